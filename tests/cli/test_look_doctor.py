"""`txbox doctor`: what it prints, and its exit status."""

from __future__ import annotations

from collections.abc import Callable

from tests.support.command import Command
from tests.support.databases import Raw

RawOf = Callable[[str], Raw]


def test_a_clean_system(sqlite_shop: Command) -> None:
    done = sqlite_shop("doctor")
    assert done.out == "Nothing is wrong.\n"
    assert sqlite_shop("doctor", "--json", "--fail-on", "warning").json == {
        "findings": [], "unchecked": [],
    }  # fmt: skip


def test_a_warning_fails_where_that_is_asked_for(sqlite_shop: Command) -> None:
    """A dead message: a warning."""
    sqlite_shop("send", "orders", "--data", '{"bad": true}', "--id", "m1")
    sqlite_shop("run", "shop:app", "--once", code=1)
    lines = sqlite_shop("doctor").out.splitlines()
    assert lines[0] == "warning  dead-messages"
    assert lines[1].startswith("    billing has 1 dead message, the oldest received ")
    assert lines[2].startswith(
        "    -> `txbox list --consumer billing --status dead` shows the errors"
    )
    assert lines[3:] == ["0 errors, 1 warning, 0 notes."]
    (finding,) = sqlite_shop("doctor", "--json", "--fail-on", "warning", code=1).json["findings"]
    assert set(finding) == {"code", "severity", "problem", "remedy"}
    assert (finding["code"], finding["severity"]) == ("dead-messages", "warning")


def test_an_error_fails(sqlite_shop: Command, raw: RawOf) -> None:
    raw(sqlite_shop.environment["SHOP_URL"]).execute("DROP INDEX txbox_attempt_message")
    done = sqlite_shop("doctor", code=1)
    assert done.out.startswith("error  schema-drift\n")


def test_a_database_alone(sqlite_shop: Command) -> None:
    url = sqlite_shop.environment["SHOP_URL"]
    done = sqlite_shop("doctor", "--database", url, env={"TXBOX_APP": ""})
    assert done.out.splitlines() == [
        "not checked  rows that no handler or relay takes: no App was given (--app): handlers and routes are not known",
        "Nothing is wrong.",
    ]


def test_wrong_use_and_no_database(command: Command) -> None:
    assert "Which database?" in command("doctor", code=2).sentence
    command("doctor", "--fail-on", "note", code=2)
    away = command("doctor", "--database", "postgresql://u:secret@127.0.0.1:1/shop", code=2)
    assert "secret" not in away.err


def test_auto_commit_is_said_before_anything_is_examined(sqlite_shop: Command) -> None:
    with (sqlite_shop.directory / "shop.py").open("a") as file:
        file.write(
            "\nfrom txbox.brokers.kafka import Kafka\n"
            'app.consume(Kafka("localhost", group="g", enable_auto_commit=True))\n'
        )
    assert "enable.auto.commit must be off" in sqlite_shop("doctor", code=2).sentence


def test_the_grace_that_run_is_given(sqlite_shop: Command) -> None:
    with (sqlite_shop.directory / "shop.py").open("a") as file:
        file.write(
            "\nfrom datetime import timedelta\n"
            '@app.handler("slow", consumer="slow", timeout=timedelta(seconds=40))\n'
            "def slow(message, tx): ...\n"
        )
    assert "time-out-grace" in sqlite_shop("doctor").out
    assert sqlite_shop("doctor", "--grace", "45s").out == "Nothing is wrong.\n"


def test_what_strangers_wrote_steers_no_terminal(sqlite_shop: Command, raw: RawOf) -> None:
    raw(sqlite_shop.environment["SHOP_URL"]).execute(
        "INSERT INTO txbox_inbox (consumer, message_id, status, topic) VALUES ('\x1b[2J\u202ex', 'm', 'dead', 't')"
    )
    out = sqlite_shop("doctor").out
    assert "\x1b" not in out
    assert "\u202e" not in out
