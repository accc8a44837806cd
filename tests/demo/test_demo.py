"""The demo shows what it claims to show, with small numbers: it is never told the result."""

from __future__ import annotations

import json
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.support.waiting import DEADLINE_S
from txbox.demo import build_stream, judge
from txbox.demo.naive import create_tables


def _demo(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "txbox", "demo", *arguments],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )


def test_the_demo_kills_both_and_only_the_naive_books_are_wrong(tmp_path: Path) -> None:
    small = ("--payments", "80", "--kills", "4", "--seconds", "6", "--seed", "7")
    done = _demo(*small, "--json", "--dir", str(tmp_path))
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    naive, txbox = result["naive"], result["txbox"]
    assert naive["kills"] >= 4
    assert txbox["kills"] >= 4
    assert txbox["right"]
    assert txbox["dead"] == ["pay-0026"]
    assert txbox["duplicates"] == result["deliveries"] - result["payments"]
    assert not naive["right"]
    assert naive["payments_doubled"] >= result["deliveries"] - result["payments"] - 1
    assert naive["payments_doubled_by_crashes"] >= 1
    assert naive["receipts_lost"] >= 1
    assert txbox["receipts_lost"] == txbox["receipts_doubled"] == 0
    assert (tmp_path / "txbox.db").exists()


def test_the_demo_prints_plain_lines_and_how_to_look_further_when_there_is_no_terminal(
    tmp_path: Path,
) -> None:
    done = _demo("--payments", "20", "--kills", "1", "--seconds", "1", "--dir", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "txbox: every customer was charged once, and got one receipt" in done.stdout
    assert "\x1b" not in done.stdout


def test_a_directory_with_files_in_it_is_refused(tmp_path: Path) -> None:
    (tmp_path / "precious").touch()
    done = _demo("--dir", str(tmp_path))
    assert done.returncode == 2
    assert "is not empty" in done.stderr


def test_a_stream_that_cannot_be_is_refused() -> None:
    for words in (
        ("--seconds", "0"),
        ("--duplicates", "2"),
        ("--kills", "-1"),
        ("--dir", "/proc/x"),
    ):
        done = _demo(*words)
        assert (done.returncode, "Traceback" in done.stderr) == (2, False), done.stderr


def test_ctrl_c_ends_the_demo_with_a_line(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "txbox", "demo", "--dir", str(tmp_path)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    assert "naive: booked" in process.stdout.readline()
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=DEADLINE_S)
    assert (process.returncode, said.count("\n")) == (130, 1), said


def test_the_verdict_finds_doubled_and_lost_payments(tmp_path: Path) -> None:
    stream = build_stream(30, duplicates=0.2, seed=1)
    database = tmp_path / "books.db"
    twice, lost, *rest = stream.payments.items()
    with sqlite3.connect(database) as books:
        create_tables(books)
        for payment, (customer, amount) in (twice, twice, *rest):
            books.execute(
                "UPDATE account SET charged = charged + ? WHERE customer = ?", (amount, customer)
            )
            books.execute(
                "INSERT INTO payment (id, customer, amount) VALUES (?, ?, ?)",
                (payment, customer, amount),
            )
    books.close()
    receipts = [payment for payment in stream.payments if payment not in (lost[0], rest[0][0])]
    verdict = judge(database, stream, [*receipts, rest[1][0]])
    assert any(verdict.values())
    assert verdict["receipts_lost"] == 1
    assert verdict["receipts_doubled"] == 1
    assert verdict["payments_doubled"] == 1
    assert verdict["payments_lost"] == 1
    assert verdict["amount_too_much"] - verdict["amount_too_little"] == twice[1][1] - lost[1][1]


def test_a_stream_has_duplicates_failures_and_one_poison_message() -> None:
    stream = build_stream(400, duplicates=0.1, seed=3)
    assert len(stream.deliveries) == 440
    poison = {delivery.id for delivery in stream.deliveries if b"???" in delivery.payload}
    assert poison == {stream.poison}
    assert stream.poison not in stream.payments
    assert len(stream.payments) == 399
    assert (
        len({delivery.id for delivery in stream.deliveries if b"flaky" in delivery.payload}) == 10
    )
