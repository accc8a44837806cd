"""The examples of task queues deliver each task twice, and book once."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.docs.pages import ROOT
from tests.support.databases import NewDatabase
from tests.support.waiting import DEADLINE_S


@pytest.mark.parametrize(
    ("example", "printed"),
    [
        ("celery_tasks", ["SUCCESS", "SUCCESS", "[(1, 5)]"]),
        ("dramatiq_actors", ["[(1, 5)]"]),
        ("taskiq_tasks", ["charged", "charged", "[(1, 5)]"]),
    ],
)
def test_task_queue(example: str, printed: list[str], new_database: NewDatabase) -> None:
    driver = "asyncpg" if example == "taskiq_tasks" else "psycopg"
    url = new_database("postgresql", schema=False).replace("://", f"+{driver}://", 1)
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / f"{example}.py")],
        env={**os.environ, "DATABASE_URL": url}, capture_output=True, text=True, timeout=DEADLINE_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == printed
