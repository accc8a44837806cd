"""The command `explain`: sentences, what helps, and its exit status."""

from __future__ import annotations

from tests.support.command import Command


def test_the_command_prints_sentences_and_what_helps(sqlite_shop: Command) -> None:
    sqlite_shop("send", "orders", "--id", "m-1", "--data", '{"bad": true}')
    sqlite_shop("run", "shop:app", "--once", code=1)
    ended = sqlite_shop("explain", "m-1", code=1)
    lines = ended.out.splitlines()
    assert lines[0] == "m-1 in the inbox of billing: dead"
    assert lines[1].startswith("  ! Dead since ")
    assert lines[2] == "      $ txbox retry billing m-1"
    assert "m-1 in the inbox of ledger: processed" in lines
    only = sqlite_shop("explain", "m-1", "--consumer", "ledger")
    assert "billing" not in only.out
    told = sqlite_shop("explain", "m-1", "--json", code=1).json
    assert [place["status"] for place in told["places"]] == ["dead", "processed"]
    assert told["places"][0]["sentences"][0]["kind"] == "dead"
    assert told["found"]["inbox"][0]["message"]["payload"] is None
    assert sqlite_shop("explain", "nothing", code=1).out.startswith("nothing: unknown")


def test_a_mistyped_consumer_is_hinted_at(sqlite_shop: Command) -> None:
    done = sqlite_shop("list", "--consumer", "biling")
    assert "There is no consumer 'biling'; did you mean 'billing'?" in done.out
