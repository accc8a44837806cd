"""Runs an example that books orders, as its users do, on a database of its own."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from tests.support.servers import ROOT
from tests.support.waiting import DEADLINE_S


@contextmanager
def example(app: str, directory: Path, **variables: str) -> Iterator[None]:
    """Run an example by `txbox run` on a database of its own; afterwards it was drained."""
    with closing(sqlite3.connect(directory / "service.db")) as database:
        database.execute("CREATE TABLE booking (order_id INTEGER, amount INTEGER)")
    environment = {**os.environ, **variables, "PYTHONPATH": str(ROOT / "examples")}
    command = [sys.executable, "-m", "txbox"]
    initialise = [*command, "init", "--database", "sqlite:///service.db"]
    subprocess.run(initialise, cwd=directory, env=environment, check=True, capture_output=True)
    process = subprocess.Popen(
        [*command, "run", app], cwd=directory, env=environment, stdout=subprocess.DEVNULL
    )
    try:
        yield
        process.terminate()
        assert process.wait(DEADLINE_S) == 0
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def booked(directory: Path) -> list[tuple[int, int]]:
    with closing(sqlite3.connect(directory / "service.db")) as database:
        return list(database.execute("SELECT order_id, amount FROM booking ORDER BY 1"))
