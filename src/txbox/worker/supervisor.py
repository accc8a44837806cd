"""How a process ends, and several under one parent.

The first SIGTERM or SIGINT drains a process within its grace, a second one ends it at once. The parent forwards signals
to its worker processes, and starts those that die again.
"""

from __future__ import annotations

import faulthandler
import logging
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import cache
from queue import Empty, SimpleQueue
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from txbox.boundaries import log as _log
from txbox.policy import GRACE, Backoff

if TYPE_CHECKING:
    from txbox.worker.serving import Server

# -- the end of a process -----------------------------------------------------------------------

# do not block on a full stderr pipe
_SAY_S = 0.2


def last_s(grace_s: float) -> float:
    """The last part of a grace, in seconds, in which the process itself ends."""
    return min(1.0, grace_s / 6)


@contextmanager
def draining_on_signals(
    drain: Callable[[], None], grace_s: float, awaited: Callable[[], Sequence[str]] = tuple
) -> Generator[None]:
    """Handle both signals inside the block; for the main thread.

    Args:
        drain: called inside of a signal handler, between any two instructions of the main thread.
        grace_s: this long after the first signal the process ends with status 1, whatever hangs in it.
        awaited: what has not ended by then, as the log says it.
    """
    received = 0
    # of the monotonic clock; None at the end of the block. SimpleQueue.put may interrupt itself
    ends: SimpleQueue[float | None] = SimpleQueue()

    def handle(_number: int, _frame: FrameType | None) -> None:
        nonlocal received
        received += 1
        if received > 1:
            os._exit(1)
        end = time.monotonic() + grace_s
        ends.put(end)
        # of C: for a main thread that holds the interpreter's lock
        leave_by(end)
        drain()

    def watch() -> None:
        end = ends.get()
        if end is None:
            return
        try:
            # later than a worker that waits for nothing any more, sooner than the last resort
            ends.get(timeout=max(0.0, end - last_s(grace_s) / 2 - time.monotonic()))
        except Empty:
            what = ", ".join(awaited()) or "something hangs"
            _cut_off(f"The grace period of {grace_s:g} s ended with {what}.")

    _nowhere()
    # made beforehand: a signal handler must not start threads
    threading.Thread(target=watch, name="txbox-grace", daemon=True).start()
    before = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        ends.put(None)
        faulthandler.cancel_dump_traceback_later()


def leave_by(end: float) -> None:
    """Have the process end by then, of the monotonic clock, whatever Python would wait for: else with status 1."""
    faulthandler.dump_traceback_later(
        max(0.001, end - time.monotonic()), exit=True, file=_nowhere()
    )


def leave(code: int) -> NoReturn:
    """End the process at once: what hangs in it would be waited for."""
    sys.stdout.flush()
    logging.shutdown()
    os._exit(code)


@cache
def _nowhere() -> int:
    return os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)


def _cut_off(sentence: str) -> None:
    saying = threading.Thread(target=_log.error, args=(sentence,), daemon=True)
    saying.start()
    saying.join(_SAY_S)
    os._exit(1)


class Stop:
    """A stop flag that is safe to set from a signal handler."""

    def __init__(self) -> None:
        self._said: SimpleQueue[None] = SimpleQueue()
        self._set = False

    def set(self) -> None:
        self._set = True
        self._said.put(None)

    def is_set(self) -> bool:
        return self._set

    def wait(self, timeout_s: float) -> bool:
        """Wait at most this long; returns whether it was set."""
        if not self._set:
            try:
                self._said.get(timeout=timeout_s)
            except Empty:
                return self._set
        return True


# -- several processes --------------------------------------------------------------------------

_POLL_S = 0.1
_RESTART_S = (0.5, 30.0)
_HEALTHY_S = 60.0
#: A child that finds this set drains when the file descriptor it names is closed: its parent is gone.
PARENT_FD = "TXBOX_PARENT_FD"
#: The sockets that a child serves on: its parent has bound them, so that no request is lost with a child.
HEALTH_FD = "TXBOX_HEALTH_FD"
HTTP_FD = "TXBOX_HTTP_FD"
#: How a child of `--once` ends that is done, and leaves a message to an operator.
GAVE_UP = 3
#: A child that consumes says so here: from then on the service is set up rightly.
_CONSUMES_FD = "TXBOX_CONSUMES_FD"


class Child:
    """A worker process, by its number: the one that runs now, or will run next.

    Args:
        health: where it answers its parent.
    """

    def __init__(self, number: int, health: socket.socket | None = None) -> None:
        self.number = number
        self.health = health
        #: Whether this process has ever answered.
        self.answered = False
        self.process: subprocess.Popen[bytes] | None = None
        self.started_at = self.start_at = 0.0
        self.restarts = Backoff(*_RESTART_S, spread=(0.75, 1.25))
        self.code: int | None = None

    @property
    def running(self) -> bool:
        return self.process is not None


def supervise(
    argv: Sequence[str],
    processes: int,
    *,
    http: socket.socket | None = None,
    health: socket.socket | None = None,
    grace: timedelta = GRACE,
) -> int:
    """Run a command several times at once; returns the worst exit status: 2, then 1, then GAVE_UP, then 0.

    Args:
        http: listening; every child accepts from it.
        health: listening; the parent answers there for all its children.
        grace: from the first signal to the end; a child that outlives it is killed, with status 1.

    SIGTERM and SIGINT go to every child: the first drains, the second ends at once. Until one child
    consumes, one that exits with 2 (configuration) stops all. After that whatever ends a child, it is
    started again, later each time; only one that exits with 0 or GAVE_UP has finished and stays so.
    Must be called from the main thread.
    """
    return _Supervisor(argv, processes, http, health, grace).run()


def tell_parent() -> None:
    """Say, in a child, that it consumes; nothing in any other process."""
    if fd := os.environ.pop(_CONSUMES_FD, None):
        os.write(int(fd), b"1")
        os.close(int(fd))


class _Supervisor:
    def __init__(
        self,
        argv: Sequence[str],
        processes: int,
        http: socket.socket | None,
        health: socket.socket | None,
        grace: timedelta,
    ) -> None:
        self._argv = list(argv)
        self._grace_s = grace.total_seconds()
        self._ends_at = math.inf
        self._has_consumed = False
        self._http = http
        self._children = [Child(number) for number in range(1, processes + 1)]
        self._stopping = False
        self._pending: deque[signal.Signals] = deque()
        self._server: Server | None = None
        if health is not None:
            # the extra is needed for this alone
            from txbox.worker.serving import PROBES, Server, probes_of

            for child in self._children:
                child.health = socket.create_server(("127.0.0.1", 0))
            self._server = Server(probes_of(self._children), health, PROBES)

    def run(self) -> int:
        # nothing is ever written: children see the end of this pipe when the parent dies
        self._read_fd, write_fd = os.pipe()
        self._consumes_read_fd, self._consumes_write_fd = os.pipe()
        os.set_blocking(self._consumes_read_fd, False)
        before = {
            signum: signal.signal(signum, self._on_signal)
            for signum in (signal.SIGTERM, signal.SIGINT)
        }
        if self._server is not None:
            self._server.start()
        try:
            while any(child.code is None for child in self._children):
                while self._pending:
                    self._stop(self._pending.popleft())
                for child in self._children:
                    if child.code is None:
                        self._look_after(child)
                if time.monotonic() >= self._ends_at:
                    self._cut_off()
                time.sleep(_POLL_S)
        finally:
            for signum, handler in before.items():
                signal.signal(signum, handler)
            for fd in (self._read_fd, write_fd, self._consumes_read_fd, self._consumes_write_fd):
                os.close(fd)
            if self._server is not None:
                self._server.close()
        codes = [child.code or 0 for child in self._children]
        for worst in (2, 1, GAVE_UP):
            if worst in codes:
                return worst
        return 0

    def _look_after(self, child: Child) -> None:
        if child.process is None:
            if self._stopping:
                # it had nothing to drain
                child.code = 0
            elif time.monotonic() >= child.start_at:
                self._start(child)
            return
        code = child.process.poll()
        if code is None:
            return
        child.process = None
        child.answered = False
        if self._stopping:
            # the default of a process that has not come to its own handlers: nothing was running
            child.code = 0 if code in (0, GAVE_UP, -signal.SIGTERM) else 1
            return
        if code in (0, GAVE_UP) or (code == 2 and not self._consumes()):
            child.code = code
            if code == 2:
                self._stop(signal.SIGTERM)
            return
        now = time.monotonic()
        if now - child.started_at > _HEALTHY_S:
            child.restarts.reset()
        child.start_at = now + child.restarts.next_s()
        _log.error(
            "Worker process %d ended with status %d; it is started again in %.1f s.",
            child.number,
            code,
            child.start_at - now,
        )

    def _consumes(self) -> bool:
        """Whether any child has ever consumed."""
        if not self._has_consumed:
            with suppress(BlockingIOError):
                self._has_consumed = bool(os.read(self._consumes_read_fd, 1))
        return self._has_consumed

    def _start(self, child: Child) -> None:
        child.started_at = time.monotonic()
        # a session of its own: Ctrl-C reaches the parent, which forwards it once, not twice
        passed = {PARENT_FD: self._read_fd, _CONSUMES_FD: self._consumes_write_fd}
        if self._http is not None:
            passed[HTTP_FD] = self._http.fileno()
        if child.health is not None:
            passed[HEALTH_FD] = child.health.fileno()
        child.process = subprocess.Popen(
            self._argv,
            start_new_session=True,
            pass_fds=tuple(passed.values()),
            env={**os.environ, **{name: str(fd) for name, fd in passed.items()}},
        )

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        # forwarded by the loop: a child that is being started at this moment must hear of it
        self._pending.append(signal.Signals(number))

    def _stop(self, number: signal.Signals) -> None:
        if not self._stopping:
            self._ends_at = time.monotonic() + self._grace_s
        self._stopping = True
        if self._http is not None:
            # children close theirs: without this one, connections would wait for nobody
            self._http.close()
            self._http = None
        for child in self._children:
            if child.process is not None and child.process.poll() is None:
                child.process.send_signal(number)

    def _cut_off(self) -> None:
        """Kill what has not ended by itself, though its own grace is a little shorter."""
        self._ends_at = math.inf
        for child in self._children:
            if child.process is not None and child.process.poll() is None:
                _log.error("Worker process %d did not end within the grace: killed.", child.number)
                child.process.kill()
