"""What an aborted command leaves behind: its processes, and the throw-away servers of dead ones."""

from __future__ import annotations

import signal
import time
from pathlib import Path

from tests.support.servers.process import ServerDirectory, abandoned, alive, base_directory, kill

_PATIENCE_S = 10.0


def end_processes(mark: str, within_s: float = _PATIENCE_S) -> None:
    """End every process that has `mark` in its environment: SIGTERM, then SIGKILL after `within_s`.

    A test process that is killed cannot end the workers it started; they inherit its environment.
    """
    for number in (signal.SIGTERM, signal.SIGKILL):
        deadline = time.monotonic() + within_s
        for pid in (marked := _marked(mark)):
            kill(pid, number)
        while any(alive(pid) for pid in marked) and time.monotonic() < deadline:
            time.sleep(0.02)


def remove_abandoned() -> None:
    """Stop and delete the throw-away servers of processes that are gone."""
    for directory in sorted(base_directory().glob("throwaway-*")):
        if abandoned(directory):
            ServerDirectory(directory.name).remove()


def _marked(mark: str) -> list[int]:
    found: list[int] = []
    for environment in Path("/proc").glob("[0-9]*/environ"):
        try:
            variables = environment.read_bytes()
        except OSError:  # it ended, or belongs to somebody else
            continue
        if mark.encode() in variables:
            found.append(int(environment.parent.name))
    return found
