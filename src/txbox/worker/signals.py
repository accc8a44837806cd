"""SIGTERM and SIGINT: the first drains a process within its grace, a second one ends it at once."""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from functools import cache
from queue import Empty, SimpleQueue
from types import FrameType
from typing import NoReturn

_log = logging.getLogger("txbox")

# a standard error that nobody reads must not hold the end up
_SAY_S = 0.2


def last_s(grace_s: float) -> float:
    """The end of a grace, in seconds, that is left to the end of the process itself."""
    return min(0.5, grace_s / 10)


@contextmanager
def draining_on_signals(
    drain: Callable[[], None], grace_s: float, awaited: Callable[[], Sequence[str]] = tuple
) -> Generator[None]:
    """Handle both signals until the block is left; for the main thread.

    Args:
        drain: called inside of a signal handler, between any two instructions of the main thread.
        grace_s: so long after the first signal the process ends with status 1, whatever hangs in it.
        awaited: what has not ended by then, as the log says it.
    """
    received = 0
    # of the monotonic clock; None when the block is left. SimpleQueue.put may interrupt itself
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
            _cut_off(f"The drain was cut off after its grace of {grace_s:g} s: {what}.")

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
    """A wish to stop, that a signal handler of the thread that waits for it may set."""

    def __init__(self) -> None:
        self._said: SimpleQueue[None] = SimpleQueue()
        self._set = False

    def set(self) -> None:
        self._set = True
        self._said.put(None)

    def is_set(self) -> bool:
        return self._set

    def wait(self, timeout_s: float) -> bool:
        """Wait at most so long; returns whether it was set."""
        if not self._set:
            try:
                self._said.get(timeout=timeout_s)
            except Empty:
                return self._set
        return True
