"""SIGTERM and SIGINT: the first drains a worker, a second one ends its process at once."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def draining_on_signals(drain: Callable[[], None]) -> Generator[None]:
    """Handle both signals until the block is left; for the main thread.

    Args:
        drain: called inside of a signal handler, between any two instructions of the main thread.
    """
    received = 0

    def handle(_number: int, _frame: FrameType | None) -> None:
        nonlocal received
        received += 1
        if received > 1:
            os._exit(1)
        drain()

    before = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
