"""Examples as their users run them: processes of their own, on a database of the test's."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support.databases import Raw
from tests.support.servers import ROOT
from tests.support.waiting import DEADLINE_S

EXAMPLES = ROOT / "examples"


def tables(url: str, *statements: str) -> str:
    """Make an example's own tables in a database that has txbox's; returns the URL."""
    with Raw(url) as raw:
        for statement in statements:
            raw.execute(statement)
    return url


def rows(url: str, sql: str) -> list[Any]:
    with Raw(url) as raw:
        return raw.rows(sql)


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
        process.wait(DEADLINE_S)
