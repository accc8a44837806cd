"""Workers in threads, and in processes to signal and kill."""

from __future__ import annotations

import json
import os
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Self

from tests.support.servers import ROOT
from tests.support.waiting import DEADLINE_S, eventually
from tests.support.warm import Warm
from txbox import App
from txbox.worker import Worker
from txbox.worker.agenda import Run


@contextmanager
def running(worker: Worker) -> Iterator[list[int]]:
    """Run a worker in a thread; afterwards it has been drained, and the list holds its exit status."""
    codes: list[int] = []
    thread = threading.Thread(target=lambda: codes.append(worker.run()), daemon=True)
    thread.start()
    try:
        yield codes
    finally:
        worker.stop()
        thread.join(DEADLINE_S)
        assert not thread.is_alive(), "the worker did not drain"


def worker(app: App, **more: Any) -> Worker:
    """A worker without signal handlers and background jobs, unless asked for."""
    options: dict[str, Any] = {"install_signals": False, "maintenance": False} | more
    return Worker(app, **options)


class _When(threading.Event):
    """Set when a condition holds."""

    def __init__(self, condition: Callable[[], bool]) -> None:
        super().__init__()
        self._condition = condition

    def is_set(self) -> bool:
        return self._condition()


def run_of(app: App, stop: Callable[[], bool] = lambda: False) -> Run:
    """What a part of a worker gets, without a worker; it stops when the condition holds."""
    run = Run(app, lambda _error: None)
    run.stopping = _When(stop)
    return run


class Process:
    """`python -m tests.support.worker_service …` under watch; gone when the block ends."""

    def __init__(self, crash: tuple[str, int] | None = None, **plan: Any) -> None:
        environment = dict(os.environ)
        if crash is not None:
            environment |= {"TXBOX_CRASH_AT": crash[0], "TXBOX_CRASH_NTH": str(crash[1])}
        self.process = Warm(
            ["tests.support.worker_service", json.dumps(plan)],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        self.lines: list[str] = []
        self._errors: list[bytes] = []
        self._threads = [
            threading.Thread(target=self._read, daemon=True),
            threading.Thread(target=self._read_errors, daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.decode().strip())

    def _read_errors(self) -> None:
        assert self.process.stderr is not None
        self._errors.extend(self.process.stderr)

    @property
    def errors(self) -> str:
        return b"".join(self._errors).decode()

    def says(self, start: str, times: int = 1) -> list[str]:
        """Wait until that many lines start so; returns them."""

        def found() -> list[str] | None:
            lines = [line for line in self.lines if line.startswith(start)]
            if len(lines) >= times:
                return lines
            assert self.process.poll() is None or self._alive(), (
                f"ended: {self.lines} {self.errors}"
            )
            return None

        said: list[str] = eventually(
            found, f"{times} x {start!r} (said {self.lines}, errors {self.errors})"
        )
        return said

    def _alive(self) -> bool:
        return any(thread.is_alive() for thread in self._threads)

    def ended(self) -> int:
        code = self.process.wait(DEADLINE_S)
        for thread in self._threads:
            thread.join(DEADLINE_S)
        return code

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.ended()
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            if pipe is not None:
                pipe.close()
