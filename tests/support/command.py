"""The real command, in a process of its own, in a directory of the test's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.support import warm
from tests.support.waiting import DEADLINE_S

#: A service on the database of the test; `bad` messages are rejected, effects are rows.
SHOP = """
import os, sqlite3
from txbox import App, Message, Reject
from txbox.brokers.local import Local

app = App(os.environ["SHOP_URL"])

@app.handler("orders", consumer="billing", keep_payload="always")
def bill(message: Message[dict], tx):
    mark = "?" if isinstance(tx, sqlite3.Connection) else "%s"
    cursor = tx.cursor()
    cursor.execute(f"INSERT INTO effect (id) VALUES ({mark})", (str(message.id),))
    cursor.close()
    if message.body.get("bad") or os.environ.get("SHOP_FAILS"):
        raise Reject("declined")

@app.handler("orders", consumer="ledger")
def book(message: Message[dict], tx): ...

app.consume(Local())
"""


@dataclass(frozen=True, slots=True)
class Ended:
    """A command that has ended."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    @property
    def sentence(self) -> str:
        """Standard error, which must be one line of txbox's."""
        lines = self.err.strip().splitlines()
        assert len(lines) == 1, self.err
        assert lines[0].startswith("txbox: ")
        return lines[0].removeprefix("txbox: ")


@dataclass(frozen=True, slots=True)
class Command:
    """`command("status", "--json")` runs `python -m txbox status --json`.

    `python` starts an interpreter with these arguments instead, for what is about imports.
    """

    directory: Path
    environment: dict[str, str]

    def __call__(
        self,
        *words: str,
        stdin: bytes = b"",
        env: dict[str, str] | None = None,
        python: Sequence[str] = (),
        code: int | None = 0,
    ) -> Ended:
        environment = {**self.environment, **(env or {})}
        if python:
            done = subprocess.run(
                [sys.executable, *python, *words],
                cwd=self.directory,
                env=environment,
                input=stdin,
                capture_output=True,
                timeout=DEADLINE_S,
                check=False,
            )
        else:
            done = warm.run(["txbox", *words], cwd=self.directory, env=environment, input=stdin)
        ended = Ended(done.returncode, done.stdout.decode(), done.stderr.decode())
        for before, line in pairwise(["", *ended.err.splitlines()]):
            # only the log has some, of what a handler raised
            logged = " MessageFailed " in before or " MessageDead " in before
            assert logged or not line.startswith("Traceback"), ended.err
        if code is not None:
            assert ended.code == code, (ended.out, ended.err)
        return ended

    def file(self, name: str, text: str) -> None:
        (self.directory / name).write_text(text)


@pytest.fixture
def command(tmp_path: Path) -> Command:
    directory = tmp_path / "here"
    directory.mkdir()
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("TXBOX_")
    }
    return Command(directory, environment)
