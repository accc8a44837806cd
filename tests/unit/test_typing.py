"""What mypy and pyright say of a program that uses txbox: nothing of a right one, the line of a wrong one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.servers import ROOT

PROGRAM = """
from typing import Any, assert_type
import sqlite3
from dataclasses import dataclass
from txbox import Answer, App, Message, Outbox, Outcome

@dataclass
class Paid:
    amount: int

app = App("sqlite:///shop.db")
message = Message(topic="orders", id="1", payload=b"{}")
assert_type(message, Message[Any])
assert_type(Message(topic="orders", body=Paid(1)), Message[Paid])
assert_type(app.process(message), Outcome)
assert_type(app.answer(message), Answer)

@app.handler("a", consumer="a")
def one(message: Message[Paid], tx: sqlite3.Connection) -> None:
    assert_type(message.body, Paid)
    app.outbox.stage(tx, "paid", message.body)

@app.handler("b", consumer="b", batch=True, pipeline=True)
def batch(messages: list[Message[Paid]], tx: sqlite3.Connection) -> None: ...

@app.handler("c", consumer="c", transactional=False, type="paid", keep_result=True)
def outside(message: Message[dict[str, Any]]) -> int:
    return 1

@app.handler("d", consumer="d")
async def later(message: Message[Any], tx: Any) -> dict[str, int]:
    return {}

def options(batch: bool) -> None:
    app.handler("e", consumer="e", batch=batch)(lambda message, tx: None)

@app.handler("f", consumer="f")  # wrong
def one_argument(message: Message[Paid]) -> None: ...

@app.handler("g", consumer="g")  # wrong
def swapped(tx: sqlite3.Connection, message: Message[Paid]) -> None: ...

@app.handler("h", consumer="h", batch=True)  # wrong
def not_a_list(message: Message[Paid], tx: sqlite3.Connection) -> None: ...

@app.handler("i", consumer="i", transactional=False)  # wrong
def with_tx(message: Message[Paid], tx: sqlite3.Connection) -> None: ...

app.handler("j", consumer="j", retry=3)  # wrong
app.handler(["k"], consumer="k")  # wrong
"""


def _mypy(path: Path) -> set[int]:
    ended = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--no-error-summary", str(path)],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    lines = [line for line in ended.stdout.splitlines() if ": error:" in line]
    assert not ended.stderr
    return {int(line.split(":")[1]) for line in lines}


def _pyright(path: Path) -> set[int]:
    ended = subprocess.run(
        [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable, str(path)],
        cwd=path.parent, capture_output=True, text=True, check=False,
    )  # fmt: skip
    found = json.loads(ended.stdout)["generalDiagnostics"]
    # it marks the decorator's line or the call's, which is the same
    return {one["range"]["start"]["line"] + 1 for one in found if one["severity"] == "error"}


@pytest.mark.parametrize("checker", [_mypy, _pyright])
def test_a_checker_finds_what_registration_would_refuse(checker: object, tmp_path: Path) -> None:
    program = tmp_path / "shop.py"
    program.write_text(PROGRAM)
    wrong = {
        number for number, line in enumerate(PROGRAM.splitlines(), start=1) if "# wrong" in line
    }
    found = _mypy(program) if checker is _mypy else _pyright(program)
    assert found == wrong
