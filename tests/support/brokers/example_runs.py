"""Runs an example that books orders, as its users do, on a database of the test's."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from tests.support.databases import Raw
from tests.support.servers import ROOT
from tests.support.waiting import DEADLINE_S


@contextmanager
def example(app: str, url: str, **variables: str) -> Iterator[None]:
    """Run an example by `txbox run` on a database that has txbox's tables; afterwards it was drained."""
    with Raw(url) as raw:
        raw.execute("CREATE TABLE booking (order_id INTEGER, amount INTEGER)")
    process = subprocess.Popen(
        [sys.executable, "-m", "txbox", "run", app],
        cwd=ROOT / "examples",
        env={**os.environ, **variables, "TXBOX_DATABASE_URL": url},
        stdout=subprocess.DEVNULL,
    )
    try:
        yield
        process.terminate()
        assert process.wait(DEADLINE_S) == 0
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def booked(url: str) -> list[tuple[int, int]]:
    with Raw(url) as raw:
        return [
            (row[0], row[1]) for row in raw.rows("SELECT order_id, amount FROM booking ORDER BY 1")
        ]
