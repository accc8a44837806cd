"""Sources in memory, workers in threads and processes, and waiting with a deadline."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from tests.servers import ROOT
from txbox import App, Message
from txbox.brokers.base import Delivery, InFlight, Progress
from txbox.worker import Worker

DEADLINE_S = 60.0  # reached only by what fails, however slow the machine


def eventually(condition: Callable[[], Any], what: str = "the condition") -> Any:
    """Poll until a condition holds; returns what it returned."""
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        if found := condition():
            return found
        time.sleep(0.01)
    raise AssertionError(f"{what} did not come true within {DEADLINE_S:g} s")


class Memory:
    """A source over a list; `settled` keeps what was acknowledged, in that order."""

    topics: Sequence[str] | None = None
    tend_every_s: float | None = None
    redelivery_s: float | None = None

    def __init__(self, deliveries: Sequence[Message[Any] | Delivery], *, endless: bool = False):
        self.name = "memory"
        self.waiting = [
            own if isinstance(own, Delivery) else Delivery(own, own.topic) for own in deliveries
        ]
        self.endless = endless
        self.received: list[Delivery] = []
        self.settled: list[Delivery] = []
        self.tended: list[list[Delivery]] = []
        self.threads: set[str] = set()
        self.closed = False

    @property
    def exhausted(self) -> bool:
        return not self.waiting and not self.endless

    @property
    def settled_ids(self) -> list[Any]:
        return [own.message.id for own in self.settled if own.message is not None]

    def keeps_order(self, topic: str) -> bool:
        del topic
        return True

    def open(self, topics: Sequence[str], progress: Progress, in_flight: InFlight) -> None:
        self.threads.add(threading.current_thread().name)
        self.in_flight = in_flight

    def receive(self, messages_max: int, wait_s: float) -> Sequence[Delivery]:
        self.threads.add(threading.current_thread().name)
        found, self.waiting = self.waiting[:messages_max], self.waiting[messages_max:]
        self.received += found
        if not found:
            time.sleep(min(wait_s, 0.02))
        return found

    def tend(self, deliveries: Sequence[Delivery]) -> None:
        self.threads.add(threading.current_thread().name)
        self.tended.append(list(deliveries))

    def settle(self, deliveries: Sequence[Delivery]) -> None:
        self.threads.add(threading.current_thread().name)
        self.settled += deliveries

    def close(self) -> None:
        self.threads.add(threading.current_thread().name)
        self.closed = True


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


def worker(app: App, **own: Any) -> Worker:
    """A worker without signal handlers and background jobs, unless asked for."""
    options: dict[str, Any] = {"install_signals": False, "maintenance": False} | own
    return Worker(app, **options)


def event_line(own_id: object, **more: Any) -> str:
    event = {
        "specversion": "1.0", "id": own_id, "source": "/test", "type": "order.paid", "data": {"cents": 1},
    } | more  # fmt: skip
    return json.dumps(event) + "\n"


def write_events(path: Path, ids: Sequence[object]) -> None:
    path.write_text("".join(event_line(own) for own in ids))


class Process:
    """`python -m tests.runtime.service …` under watch; gone when the block ends."""

    def __init__(self, crash: tuple[str, int] | None = None, **plan: Any) -> None:
        environment = dict(os.environ)
        if crash is not None:
            environment |= {"TXBOX_CRASH_AT": crash[0], "TXBOX_CRASH_NTH": str(crash[1])}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.runtime.service", json.dumps(plan)],
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
