"""Examples as their users run them: processes of their own, on a database of the test's."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from tests.support.servers import ROOT

EXAMPLES = ROOT / "examples"


def database_for(directory: Path, *tables: str) -> str:
    """`txbox init` and the example's own tables; returns the URL."""
    url = f"sqlite:///{directory / 'example.db'}"
    subprocess.run(
        [sys.executable, "-m", "txbox", "init", "--database", url],
        check=True, capture_output=True, timeout=60,
    )  # fmt: skip
    with closing(sqlite3.connect(directory / "example.db")) as database:
        for table in tables:
            database.execute(table)
    return url


def rows(directory: Path, sql: str) -> list[Any]:
    with closing(sqlite3.connect(directory / "example.db", timeout=30)) as database:
        return database.execute(sql).fetchall()


@contextmanager
def started(
    directory: Path, *command: str, env: Mapping[str, str], keep: Sequence[int] = ()
) -> Iterator[subprocess.Popen[bytes]]:
    """`python -m <command>` next to the examples; killed when the block is left."""
    process = subprocess.Popen(
        [sys.executable, "-m", *command],
        cwd=directory,
        env={**os.environ, "PYTHONPATH": str(EXAMPLES), **env},
        pass_fds=keep,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait(30)
