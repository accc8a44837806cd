"""The examples of task queues deliver each task twice, and book once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import ROOT


@pytest.mark.parametrize(
    ("example", "printed"),
    [
        ("celery_tasks", ["SUCCESS", "IGNORED", "[(1, 5)]"]),
        ("dramatiq_actors", ["[(1, 5)]"]),
        ("taskiq_tasks", ["charged", "charged", "[(1, 5)]"]),
    ],
)
def test_task_queue(example: str, printed: list[str], tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / f"{example}.py")],
        cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == printed
