"""What commands print: no passwords, nothing that steers the terminal, tables with and without rich."""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from datetime import UTC, datetime, timedelta
from io import BytesIO, TextIOWrapper

import pytest

from tests.support.command import Command
from txbox.cli import main
from txbox.cli.options import count, duration
from txbox.cli.output import print_json, print_table, shown
from txbox.errors import redacted


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("at postgresql://shop:hunter2@db/x", "at postgresql://shop:***@db/x"),
        ("at mysql://shop:a/b@c@db/x?y=1", "at mysql://shop:***@db/x?y=1"),
        ("host=db password=hunter2 user=shop", "host=db password=*** user=shop"),
        (
            "postgresql://db/x?user=u&password=hunter2&a=b",
            "postgresql://db/x?user=u&password=***&a=b",
        ),
        ("password = 'hunter 2' x", "password = *** x"),
        ("amqp://u@corp:hunter2@db/x", "amqp://u@corp:***@db/x"),
        ("db/x?sslpassword=hunter2&a=b", "db/x?sslpassword=***&a=b"),
        ("passwd=it's; token=x", "passwd=*** token=***"),
        ("postgresql://db:5432/x is away", "postgresql://db:5432/x is away"),
        ("http://a:b c://u:p@db://x:y@z", "http://a:b c://u:***@z"),
        (r"password='it\'s x' host=db", "password=*** host=db"),
        # cut in the middle
        ("host=db password='hunter 2 host", "host=db password=***"),
        ("host=db password='hunter\\", "host=db password=***"),
    ],
)
def test_no_password_is_printed(text: str, expected: str) -> None:
    assert redacted(text) == expected


@pytest.mark.parametrize(
    "unit", ["://a:", "://", "password", "password='", "= ", "@://u:", "token="]
)
def test_masking_takes_linear_time(unit: str) -> None:
    started = time.process_time()
    redacted(unit * (200_000 // len(unit)))
    assert time.process_time() - started < 2


def test_text_of_strangers_cannot_steer_the_terminal() -> None:
    assert shown("a\x1b[31mb\r\x9b2J\u202e\nc") == "a\\x1b[31mb\\x0d\\x9b2J\\x202e c"


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("30s", 30),
        ("5m", 300),
        ("2h", 7200),
        ("7d", 604800),
        ("1h30m", 5400),
        ("1.5m", 90),
        ("250ms", 0.25),
    ],
)
def test_durations(text: str, seconds: float) -> None:
    assert duration(text) == timedelta(seconds=seconds)


@pytest.mark.parametrize("text", ["", "5", "m", "5 m", "-5m", "5x", "5m!", "5M"])
def test_durations_without_a_unit_are_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="30s, 5m, 2h or 7d"):
        duration(text)


@pytest.mark.parametrize("text", ["3654d", "99999999999d", "9" * 400 + "w"])
def test_durations_that_no_database_can_reckon_with_are_refused(text: str) -> None:
    assert duration("3653d") == timedelta(days=3653)
    with pytest.raises(argparse.ArgumentTypeError, match="longer than ten years"):
        duration(text)


@pytest.mark.parametrize("unit", ["1", "1.", "9m9", "m"])
def test_durations_are_refused_in_linear_time(unit: str) -> None:
    started = time.process_time()
    with pytest.raises(argparse.ArgumentTypeError, match="30s, 5m, 2h or 7d") as refused:
        duration(unit * 200_000)
    assert time.process_time() - started < 1
    assert len(str(refused.value)) < 200


def test_a_number_that_no_database_has_is_refused() -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="must be a whole number"):
        count("9" * 19)


def test_a_plain_table_is_aligned_and_leaves_empty_columns_out(
    capsys: pytest.CaptureFixture[str],
) -> None:
    moment = datetime(2026, 1, 31, 12, tzinfo=UTC)
    print_table(
        ["id", "type", "attempts", "received"],
        [["a", None, 3, moment], ["long-id", "", 12, moment], ["日本", "", 1, moment]],
    )
    assert capsys.readouterr().out.splitlines() == [
        "ID       ATTEMPTS  RECEIVED",
        "a               3  2026-01-31 12:00:00 UTC",
        "long-id        12  2026-01-31 12:00:00 UTC",
        "日本            1  2026-01-31 12:00:00 UTC",  # of two columns each
    ]


_ID = "da3e9f32-2333-4b88-b191-4f943e803423"


def on_a_terminal(
    columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> list[str]:
    """The lines of a list of two messages on a terminal of that width."""
    pytest.importorskip("rich")
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    moment = datetime(2026, 1, 31, 12, tzinfo=UTC)
    print_table(
        ["consumer", "id", "status", "topic", "type", "key", "attempts", "received", "error"],
        [
            ["billing", _ID, "failed", "orders", "order.paid", None, 3, moment, "ValueError: " + "no " * 30],
            ["billing", "2", "processed", "orders", "order.paid", "k", 12, moment, None],
        ],
    )  # fmt: skip
    shown_there = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)
    return [line.rstrip() for line in shown_there.splitlines() if line.strip()]


def test_a_table_wider_than_the_terminal_breaks_no_id_and_no_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = on_a_terminal(80, monkeypatch, capsys)
    assert max(map(len, lines)) <= 80
    assert lines[0].split() == ["consumer", "id", "status", "topic", "type"]
    assert lines[2].split() == ["billing", _ID, "failed", "orders", "order.paid"]
    assert lines[3].split() == (
        ["attempts", "3,", "received", "2026-01-31", "12:00:00", "UTC,", "error", "ValueError:"]
        + ["no"] * 4
    )
    assert lines[-1].strip() == "key k, attempts 12, received 2026-01-31 12:00:00 UTC"


def test_only_the_last_column_is_folded_where_that_is_enough(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = on_a_terminal(160, monkeypatch, capsys)
    assert max(map(len, lines)) <= 160
    assert lines[0].split()[-1] == "error"
    assert "2026-01-31 12:00:00 UTC   ValueError: no no" in lines[2]
    assert lines[-1].split()[:2] == ["billing", "2"]


def test_json_has_times_in_iso_and_bytes_in_base64(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"at": datetime(2026, 1, 31, tzinfo=UTC), "for": timedelta(minutes=1), "b": b"\xff"})
    assert json.loads(capsys.readouterr().out) == {
        "at": "2026-01-31T00:00:00+00:00", "for": 60.0, "b": "/w==",
    }  # fmt: skip


@pytest.mark.parametrize(
    "mark", ["\u200b", "\u200e", "\u200f", "\u2060", "\ufeff", "\xad", "\u061c", "\U000e0041"]
)
def test_what_cannot_be_seen_makes_no_two_ids_look_alike(mark: str) -> None:
    assert shown(f"order{mark}-1") == f"order\\x{ord(mark):02x}-1"
    assert shown("né-ü-日本") == "né-ü-日本"


def test_a_terminal_of_few_characters_shows_the_others_as_escapes(
    command: Command, sqlite_url: str
) -> None:
    env = {"PYTHONIOENCODING": "ascii"}
    plain = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    command("init", "--database", sqlite_url, env=plain, python=("-m", "txbox"))
    words = ("list", "--topic", "né", "--database", sqlite_url)
    assert command(*words, env=env, python=("-m", "txbox")).out == "No message matches.\n"
    ended = command("pause", "né", "--database", sqlite_url, env=env, python=("-m", "txbox"))
    assert ended.out.startswith("n\\xe9 is paused.")


@pytest.mark.parametrize("stream", ["stdin", "stdout", "stderr"])
def test_a_stream_may_be_closed(
    stream: str, sqlite_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", TextIOWrapper(BytesIO()))
    monkeypatch.setattr(sys, stream, None)
    assert main(["list", "--database", sqlite_url]) == 0
    # where nobody can be asked
    assert main(["discard", "--all", "--database", sqlite_url]) == 0
    assert main(["send", "orders", "--database", sqlite_url]) == 2
    getattr(sys, stream).close()
