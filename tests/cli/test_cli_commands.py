"""Each command as an operator types it, with text and JSON, on every database."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.command import SHOP, Command
from tests.support.databases import FreshDatabase, Raw
from tests.support.waiting import DEADLINE_S, eventually
from tests.support.warm import Warm
from txbox.cli import main, make_parser

RawOf = Callable[[str], Raw]


@pytest.fixture
def view(database: FreshDatabase, raw: RawOf) -> Raw:
    return raw(database.url)


def rows(view: Raw, consumer: str = "billing") -> dict[str, str]:
    found = view.rows(
        "SELECT message_id, status FROM txbox_inbox WHERE consumer = ? ORDER BY arrival",
        (consumer,),
    )
    return {_text(row): _text(status) for row, status in found}


def snapshot(view: Raw) -> list[Any]:
    """Everything that a dry run must not change."""
    tables = ("txbox_inbox", "txbox_attempt", "txbox_quarantine", "txbox_audit", "effect")
    return [sorted(map(repr, view.rows(f"SELECT * FROM {table}"))) for table in tables]


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def send(shop: Command, *ids: str, data: str = "{}") -> None:
    for message_id in ids:
        shop("send", "orders", "--id", message_id, "--data", data)


def test_from_send_to_replay(shop: Command, view: Raw) -> None:
    sent = shop(
        "send", "orders", "--id", "1", "--type", "order.paid", "--key", "k", "--header", "trace=abc",
        "--data", '{"a": 1}', "--json",
    )  # fmt: skip
    assert sent.json == {
        "id": "1", "topic": "orders", "outcomes": {"billing": "deferred", "ledger": "deferred"},
    }  # fmt: skip
    send(shop, "2", data='{"bad": 1}')
    assert (
        "quarantined"
        in shop("send", "orders", "--id", "1", "--data", "other", "--content-type", "x", code=1).out
    )

    ran = shop("run", "--once", "--json", code=1).json
    assert ran["exit"] == 1
    assert (ran["events"]["processed"], ran["events"]["dead"]) == (3, 1)

    billing = next(
        consumer
        for consumer in shop("status", "--json").json["consumers"]
        if consumer["consumer"] == "billing"
    )
    assert billing == {
        "consumer": "billing", "counts": {"dead": 1, "processed": 1}, "quarantined": 1, "oldest_unfinished_s": None,
    }  # fmt: skip
    assert re.search(r"billing\s+0\s+0\s+0\s+1\s+1\s+0\s+1\s+-", shop("status").out)

    (dead,) = shop("list", "--status", "dead", "--json").json["messages"]
    assert (dead["message_id"], dead["error_type"], dead["error"].partition("\n")[0]) == (
        "2",
        "Reject",
        "declined",
    )
    assert "Reject: declined" in shop("list", "--consumer", "billing", "--error-type", "Reject").out
    assert shop("list", "--topic", "nothing").out == "No message matches.\n"

    shown = shop("show", "billing", "1")
    assert "8 bytes (--reveal prints it)" in shown.out
    assert "abc" not in shown.out
    assert "Quarantined under this id:" in shown.out
    assert "trace=abc" in shop("show", "billing", "1", "--reveal", "--actor", "anna").out
    looked = view.rows("SELECT actor, action FROM txbox_audit ORDER BY number")
    assert ("anna", "reveal") in [tuple(map(str, row)) for row in looked]
    revealed = shop("show", "billing", "1", "--reveal", "--json").json
    assert (revealed["message"]["payload"], revealed["quarantined"][0]["payload"]) == (
        '{"a": 1}',
        "other",
    )
    hidden = shop("show", "billing", "1", "--json").json
    assert (hidden["message"]["payload"], hidden["message"]["headers"]) == (None, [["trace", None]])
    assert [
        attempt["status"] for attempt in shop("show", "billing", "2", "--json").json["attempts"]
    ] == ["dead"]

    shop("replay", "billing", "1", "--actor", "ann", "--reason", "again")
    assert [_text(row[0]) for row in view.rows("SELECT id FROM effect")] == ["1", "1"]
    assert [
        tuple(map(_text, row))
        for row in view.rows(
            "SELECT actor, action, affected, reason FROM txbox_audit WHERE action = 'replay'"
        )
    ] == [("ann", "replay", "1", "again")]


def test_retry_and_discard(shop: Command, view: Raw) -> None:
    send(shop, "1", "2", "3", data='{"bad": 1}')
    shop("run", "--once", code=1)
    before = snapshot(view)
    for verb in ("retry", "discard"):
        dry = shop(verb, "--consumer", "billing", "--dry-run", "--json").json
        assert (dry["count"], dry["dry_run"]) == (3, True)
        assert "3 messages would be" in shop(verb, "--all", "--dry-run").out
        asked = shop(verb, "--consumer", "billing", code=2).sentence
        assert asked.startswith(f"This would {verb} 3 messages: add --yes")
    assert snapshot(view) == before

    assert shop("retry", "billing", "1").out == "1 message retried.\n"
    assert rows(view) == {"1": "failed", "2": "dead", "3": "dead"}
    assert shop("discard", "billing", "1", "2", "--json").json["count"] == 2
    assert (
        shop("retry", "--consumer", "billing", "--older-than", "1h", "--yes").out
        == "0 messages retried.\n"
    )
    assert (
        shop("retry", "--error-type", "Reject", "--yes", "--reason", "fixed").out
        == "1 message retried.\n"
    )
    assert rows(view) == {"1": "discarded", "2": "discarded", "3": "failed"}
    audit = [
        tuple(map(_text, row))
        for row in view.rows("SELECT action, affected FROM txbox_audit ORDER BY number")
    ]
    assert audit == [("retry", "1"), ("discard", "1"), ("discard", "1"), ("retry", "1")]
    actor = _text(view.rows("SELECT DISTINCT actor FROM txbox_audit")[0][0])
    assert re.fullmatch(r"\S+@\S+", actor)


def test_a_message_that_cannot_be_changed_says_why(shop: Command, view: Raw) -> None:
    send(shop, "1")
    shop("run", "--once")
    assert "is processed: `txbox replay` runs it again" in shop("retry", "billing", "1", code=1).err
    said = shop("retry", "ledger", "1", code=1).err
    assert "is processed: its payload was not kept" in said
    assert "replay" not in said
    assert "there is no such message" in shop("discard", "billing", "9", code=1).err
    assert "its payload was not kept" in shop("replay", "ledger", "1", code=1).err
    assert "there is no such message" in shop("replay", "billing", "9", code=1).err
    assert "has no message '9'" in shop("show", "billing", "9", code=1).sentence
    shop("discard", "billing", "1", code=1)
    assert rows(view) == {"1": "processed"}


def test_replay_reports_what_failed_and_feeds_another_consumer(shop: Command, view: Raw) -> None:
    send(shop, "b", "a")
    shop("run", "--once")
    before = snapshot(view)
    assert shop("replay", "--consumer", "billing", "--dry-run", "--json").json["count"] == 2
    assert (
        shop("replay", "--consumer", "billing", "--as", "ledger", "--dry-run").out
        == "2 messages would be replayed.\n"
    )
    assert "add --yes" in shop("replay", "--consumer", "billing", code=2).sentence
    assert snapshot(view) == before

    failed = shop(
        "replay", "--consumer", "billing", "--yes", "--json", env={"SHOP_FAILS": "1"}, code=1
    ).json
    assert (failed["failed"], failed["processed"]) == (2, 0)
    assert {failure["error"] for failure in failed["failures"]} == {"declined"}
    assert rows(view) == {"b": "processed", "a": "processed"}
    assert len(view.rows("SELECT * FROM effect")) == 2

    url = shop.environment["SHOP_URL"]
    fed = shop(
        "replay", "--consumer", "billing", "--as", "projection2", "--yes", "--json", "--database", url,
        env={"TXBOX_APP": ""},
    ).json  # fmt: skip
    assert (fed["stored"], fed["duplicates"]) == (2, 0)
    assert list(rows(view, "projection2").items()) == [("b", "pending"), ("a", "pending")]
    again = shop(
        "replay", "--consumer", "billing", "--as", "projection2", "--yes", "--database", url,
        env={"TXBOX_APP": ""},
    )  # fmt: skip
    assert again.out == "2 messages: 2 duplicates\n"
    refused = shop("replay", "--consumer", "billing", "--as", "typo", "--yes", code=2)
    assert "No handler is registered for consumer 'typo'" in refused.sentence


def test_prune_rescue_and_maintain(shop: Command, view: Raw) -> None:
    send(shop, "1", "2")
    send(shop, "3", data='{"bad": 1}')
    shop("run", "--once", code=1)
    assert shop("prune", "--dry-run", "--json").json["rows"] == 0
    before = snapshot(view)
    eventually(
        lambda: shop("prune", "--older-than", "1ms", "--dry-run", "--json").json["rows"] == 5
    )
    assert "add --yes to delete 5 messages" in shop("prune", "--older-than", "1ms", code=2).sentence
    assert snapshot(view) == before
    assert (
        shop("prune", "--older-than", "1ms", "--consumer", "ledger", "--yes").out
        == "3 messages deleted.\n"
    )
    assert shop("prune", "--older-than", "0s", "--yes", "--json").json["rows"] == 2
    assert rows(view) == {"3": "dead"}

    view.execute(
        "UPDATE txbox_inbox SET status = 'processing', token = 'x', lease_until = updated_at, starts = 1"
    )
    assert shop("rescue", "--consumer", "other").out == "0 messages put back to work.\n"
    assert shop("rescue", "--json").json["rows"] == 1
    assert rows(view) == {"3": "failed"}
    jobs = shop("maintain", "--once", "--json").json["jobs"]
    assert {job["job"] for job in jobs} >= {"rescue", "prune"}
    assert "prune" in shop("maintain", "--once").out


def test_list_pages_and_quarantine(shop: Command) -> None:
    send(shop, *(str(number) for number in range(5)))
    shop("send", "orders", "--id", "0", "--data", "[]", code=1)
    seen: list[str] = []
    page = shop("list", "--consumer", "billing", "--limit", "2", "--json").json
    while True:
        seen += [message["message_id"] for message in page["messages"]]
        if page["before"] is None:
            break
        page = shop(
            "list",
            "--consumer",
            "billing",
            "--limit",
            "2",
            "--before",
            str(page["before"]),
            "--json",
        ).json
    assert seen == ["4", "3", "2", "1", "0"]
    assert "add --before" in shop("list", "--limit", "2").out
    aside = shop("quarantine", "list", "--consumer", "billing", "--json").json["quarantined"]
    assert [entry["message_id"] for entry in aside] == ["0"]
    assert "ledger" in shop("quarantine", "list").out


def test_send_takes_a_file_and_standard_input(shop: Command, view: Raw) -> None:
    shop.file("body.json", '{"from": "file"}')
    shop("send", "orders", "--id", "f", "--file", "body.json")
    shop("send", "orders", "--id", "s", stdin=b'{"from": "stdin"}')
    shop("send", "orders", "--id", "d", "--file", "-", stdin=b"\xff\x00")
    first = shop("send", "orders", "--data", "1", "--json").json["id"]
    second = shop("send", "orders", "--data", "1", "--json").json["id"]
    assert first != second
    stored = {
        _text(value): bytes(payload)
        for value, payload in view.rows(
            "SELECT message_id, payload FROM txbox_inbox WHERE consumer = 'ledger'"
        )
    }
    assert (stored["f"], stored["s"], stored["d"]) == (
        b'{"from": "file"}',
        b'{"from": "stdin"}',
        b"\xff\x00",
    )
    shown = shop("show", "ledger", "d", "--reveal", "--json").json["message"]
    assert (shown["payload"], shown["payload_base64"]) == (None, "/wA=")


def test_several_processes_share_the_work(shop: Command, view: Raw) -> None:
    send(shop, *(str(number) for number in range(6)))
    assert shop("run", "--once", "--processes", "2", "--json").json == {"exit": 0}
    assert set(rows(view).values()) == {"processed"}
    assert len(view.rows("SELECT id FROM effect")) == 6
    assert shop(
        "run", "nowhere:app", "--once", "--processes", "2", env={"TXBOX_APP": ""}, code=2
    ).sentence


def test_several_processes_are_refused_one_static_member(sqlite_shop: Command) -> None:
    """Each would end the other's membership, for ever."""
    sqlite_shop.file(
        "shop.py",
        f"{SHOP}\n"
        "from txbox.brokers.kafka import Kafka\n"
        "app.consume(Kafka('localhost:1', group='g', group_instance_id='one'), topics=['orders'])\n",
    )
    said = sqlite_shop("run", "--processes", "2", code=2).sentence
    assert "kafka:g cannot be read by 2 processes: group.instance.id='one'" in said


def test_several_processes_say_together_that_a_message_died(sqlite_shop: Command) -> None:
    send(sqlite_shop, "1", "2")
    send(sqlite_shop, "bad", data='{"bad": 1}')
    ended = sqlite_shop("run", "--once", "--processes", "2", code=1)
    assert "Dead and quarantined messages wait for you: exit status 1." in ended.out
    assert "started again" not in ended.err
    assert sqlite_shop("run", "--once", "--processes", "2").out == ""


def test_logs_are_json_lines_when_asked(sqlite_shop: Command) -> None:
    send(sqlite_shop, "1", data='{"bad": 1}')
    lines = [
        json.loads(line)
        for line in sqlite_shop("run", "--once", "--log-json", "--verbose", code=1).err.splitlines()
    ]
    dead = next(line for line in lines if line.get("event") == "MessageDead")
    assert (dead["level"], dead["consumer"], dead["message_id"]) == ("error", "billing", "1")
    assert any(line.get("event") == "MessageProcessed" for line in lines)


def test_maintain_runs_until_it_is_told_to_stop(command: Command, sqlite_url: str) -> None:
    process = Warm(
        ["txbox", "maintain", "--database", sqlite_url],
        cwd=command.directory, env=command.environment,
    )  # fmt: skip
    with Raw(sqlite_url) as view:
        # its first round has begun once the job has a row, and signals are caught before that
        eventually(lambda: view.value("SELECT count(*) FROM txbox_job WHERE name = 'prune'") == 1)
        assert view.rows("SELECT kind, state FROM txbox_worker") == [("maintain", "running")]
        process.send_signal(signal.SIGTERM)
        assert process.wait(DEADLINE_S) == 0
        assert view.rows("SELECT kind FROM txbox_worker") == []


_EVERY_COMMAND_AS_JSON = (
    ("init",), ("schema", "apply"), ("schema", "check"), ("schema", "print"), ("schema", "print", "--grants"),
    ("status",), ("list",), ("quarantine", "list"), ("show", "billing", "1"), ("explain", "1"), ("doctor",),
    ("asyncapi",), ("workers",), ("top", "--once"), ("pause", "billing"), ("resume", "billing"),
    ("edit", "billing", "2", "--header", "note=1", "--dry-run"), ("rehearse", "billing", "3"),
    ("discard", "--all", "--yes"), ("retry", "--all", "--yes"), ("replay", "--consumer", "billing", "--yes"),
    ("prune",), ("rescue",),
    ("quarantine", "list"),
    ("prune", "--outbox"), ("relay", "--once"), ("outbox", "list"), ("outbox", "retry", "--all", "--yes"),
    ("outbox", "discard", "--all", "--yes"),
    ("maintain", "--once"), ("send", "orders", "--data", "{}"), ("run", "--once"),
)  # fmt: skip


def test_every_command_prints_json(sqlite_shop: Command) -> None:
    send(sqlite_shop, "1")
    send(sqlite_shop, "2", data='{"bad": 1}')
    sqlite_shop("run", "--once", code=1)
    send(sqlite_shop, "3")
    for words in _EVERY_COMMAND_AS_JSON:
        assert isinstance(sqlite_shop(*words, "--json").json, dict)
    # encrypt takes an App with a codec: tests/admin/test_encrypt.py; prove an empty inbox: tests/testing/test_proof.py;
    # conformance a program: tests/testing/test_conformance.py
    beside = {"demo", "ui", "completion", "encrypt", "prove", "conformance"}
    covered = {words[0] for words in _EVERY_COMMAND_AS_JSON} | beside
    (commands,) = (action.choices for action in make_parser()._actions if action.dest == "command")
    assert covered == set(commands or ())


def test_help_lists_every_command_with_one_line(command: Command) -> None:
    text = command("--help").out
    for name in (
        "init", "run", "maintain", "schema", "status", "list", "show", "retry", "discard", "replay", "prune",
        "rescue", "send", "demo",
    ):  # fmt: skip
        assert re.search(rf"^    {name} +\S", text, re.MULTILINE)
        assert f"usage: txbox {name}" in command(name, "--help").out
    assert re.fullmatch(r"txbox \d+\.\d+\.\d+\n", command("--version").out)
    assert "usage: txbox" in command(code=2).err


def in_a_terminal(
    shop: Command, *words: str, answer: bytes = b"", python: tuple[str, ...] = ()
) -> str:
    """What a command shows on a terminal; `answer` is typed when it asks."""
    main, child = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, *(python or ("-m", "txbox")), *words],
        cwd=shop.directory,
        env={**shop.environment, "TERM": "xterm", "COLUMNS": "140"},
        stdin=child, stdout=child, stderr=child,
    )  # fmt: skip
    os.close(child)
    shown = b""
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        ready, _, _ = select.select([main], [], [], 0.5)
        if ready:
            try:
                piece = os.read(main, 65536)
            except OSError:  # how Linux says that the other end is closed
                break
            if not piece:
                break
            shown += piece
            if answer and b"[y/N]" in shown:
                os.write(main, answer)
                answer = b""
    process.wait(DEADLINE_S)
    os.close(main)
    return shown.decode()


#: Runs the command as if rich were not installed.
_WITHOUT_RICH = (
    "-c",
    "import sys; sys.modules['rich'] = None; from txbox.cli import main; sys.exit(main())",
)


def test_a_terminal_gets_rich_tables_and_plain_ones_without_rich(sqlite_shop: Command) -> None:
    pytest.importorskip("rich")
    send(sqlite_shop, "1")
    assert "───" in in_a_terminal(sqlite_shop, "status")
    plain = in_a_terminal(sqlite_shop, "status", python=_WITHOUT_RICH)
    assert "───" not in plain
    assert "\x1b" not in plain
    assert re.search(r"CONSUMER +PENDING", plain)
    assert sqlite_shop("list", python=_WITHOUT_RICH).out == sqlite_shop("list").out
    assert "1 message discarded" in in_a_terminal(
        sqlite_shop,
        "discard",
        "--consumer",
        "ledger",
        "--status",
        "pending",
        "--yes",
        python=_WITHOUT_RICH,
    )


def test_a_declined_change_prints_nothing_where_json_is_expected(
    sqlite_shop: Command, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    send(sqlite_shop, "1")
    database = sqlite_shop.environment["SHOP_URL"]
    monkeypatch.setattr("txbox.cli.change.interactive", lambda: True)
    monkeypatch.setattr("txbox.cli.change.confirmed", lambda _question: False)
    words = ("discard", "--consumer", "billing", "--status", "pending", "--database", database)
    assert main([*words, "--json"]) == 1
    assert capsys.readouterr() == ("", "txbox: Nothing was changed.\n")


def test_no_more_is_changed_than_was_agreed_to(
    sqlite_shop: Command, sqlite_url: str, raw: RawOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    def confirmed(question: str) -> bool:
        assert question == "Discard 1 pending message?"
        send(sqlite_shop, "2")
        return True

    send(sqlite_shop, "1")
    monkeypatch.setattr("txbox.cli.change.interactive", lambda: True)
    monkeypatch.setattr("txbox.cli.change.confirmed", confirmed)
    words = ("discard", "--consumer", "billing", "--status", "pending", "--database", sqlite_url)
    assert main(words) == 0
    found = raw(sqlite_url).rows(
        "SELECT message_id, status FROM txbox_inbox WHERE consumer = 'billing' ORDER BY arrival"
    )
    assert found == [("1", "discarded"), ("2", "pending")]


def test_a_terminal_is_asked_before_a_change_in_bulk(
    sqlite_shop: Command, sqlite_url: str, raw: RawOf
) -> None:
    view = raw(sqlite_url)
    send(sqlite_shop, "1", "2")
    words = ("discard", "--consumer", "billing", "--status", "pending")
    assert "Nothing was changed" in in_a_terminal(sqlite_shop, *words, answer=b"n\n")
    assert set(rows(view).values()) == {"pending"}
    shown = in_a_terminal(sqlite_shop, *words, answer=b"y\n")
    assert "Discard 2 pending messages? [y/N]" in shown
    assert "2 messages discarded." in shown
    assert set(rows(view).values()) == {"discarded"}


@pytest.mark.parametrize(
    "words",
    [
        ("\x1b[31mwhat",), ("-\x1b[31m",), ("list", "--\x1b[31mno"), ("list", "--status", "\x1b[31mno"),
        ("show", "billing", "\x1b[31mno"), ("retry", "--limit", "\x1b[31m"), ("retry", "--older-than", "\x1b[31m"),
        ("pause", "\x1b[31mno"), ("list", "--consumer", "\x1b[31mno"), ("explain", "\x1b[31mno"),
        ("outbox", "reroute", "--to", "\x1b[31mno"), ("discard", "billing", "\x1b[31mno"), ("canary", "\x1b[31mno"),
        ("schema", "print", "--grants", "\x1b[31mno=x"), ("schema", "print", "--grants", "viewer=\x1b[31mno"),
        ("list", "--app", "\x1b[31mno:app"), ("list", "--app", "shop:\x1b[31mno"), ("run", "--only", "\x1b[31mno"),
        ("list", "--database", "sqlite:///\x1b[31mno/no"), ("list", "--database", "\x1b[31mno://no/no"),
    ],
    ids=lambda words: " ".join(words).replace("\x1b", "^"),
)  # fmt: skip
def test_what_an_operator_types_cannot_steer_the_terminal(
    sqlite_shop: Command, words: tuple[str, ...]
) -> None:
    said = sqlite_shop(*words, code=None)
    assert "\x1b" not in said.out + said.err
