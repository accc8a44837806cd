"""The commands `rehearse` and `edit`, and that what `explain` recommends can be run."""

from __future__ import annotations

import shlex

import pytest

from tests.support.command import Command
from txbox.cli import make_parser


def test_a_dead_message_is_rehearsed_corrected_and_runs(sqlite_shop: Command) -> None:
    sqlite_shop("send", "orders", "--id", "m-1", "--data", '{"bad": true}')
    sqlite_shop("run", "shop:app", "--once", code=1)
    still = sqlite_shop("rehearse", "billing", "m-1", code=1)
    assert still.out.startswith("It would be dead (Reject)")
    good = b'{"bad": false}'
    would = sqlite_shop("rehearse", "billing", "m-1", "--payload", "-", stdin=good)
    assert would.out.startswith("It would be processed")
    assert "INSERT INTO effect" in would.out
    assert sqlite_shop("show", "billing", "m-1", "--json").json["message"]["status"] == "dead"
    dry = sqlite_shop("edit", "billing", "m-1", "--payload", "-", "--dry-run", stdin=good)
    assert "would be edited" in dry.out
    version = dry.out.rpartition("--expect ")[2].strip()
    edit = ("edit", "billing", "m-1", "--payload", "-", "--expect")
    assert (
        "has changed since you read it" in sqlite_shop(*edit, "0" * 32, stdin=good, code=2).sentence
    )
    sqlite_shop(*edit, version, "--reason", "typo", stdin=good)
    sqlite_shop("run", "shop:app", "--once")
    shown = sqlite_shop("show", "billing", "m-1", "--json", "--reveal").json
    assert shown["message"]["status"] == "processed"
    assert [row["status"] for row in shown["quarantined"]] == ["replaced"]
    assert (
        "only dead and failed"
        in sqlite_shop("edit", "billing", "m-1", "--payload", "-", stdin=good, code=2).sentence
    )


@pytest.mark.parametrize(
    "command",
    [
        "txbox retry -- dashes --all", "txbox discard billing m1", "txbox rescue --consumer=billing",
        "txbox resume billing", "txbox explain --consumer=billing m1", "txbox replay billing m1",
        "txbox outbox reroute --to=ROUTE o1", "txbox outbox retry o1",
        "txbox quarantine accept --hash=ab --id=NEW-ID billing m1",
    ],
)  # fmt: skip
def test_what_is_recommended_can_be_typed(command: str) -> None:
    assert make_parser().parse_args(shlex.split(command)[1:]).command
