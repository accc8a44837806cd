"""Crashes at named points: every statement boundary of an operation, and around handler, COMMIT and ack.

A point is `before:<statement>` or `after:<statement>`, `before:` or `after:` one of `begin`,
`handler`, `commit`, `ack`, or `received`. `crash_points` lists those that a delivery passes.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import NoReturn

from txbox import steps
from txbox.errors import ConfigurationError
from txbox.steps import Crashed

#: The point at which `install_from_environment` kills its process.
POINT_VARIABLE = "TXBOX_CRASH_AT"
#: Which pass of that point is meant, 1 for the first.
NTH_VARIABLE = "TXBOX_CRASH_NTH"


class _Nth:
    """Calls something at the nth pass of a point, whatever thread passes it, and at no other."""

    def __init__(self, point: str, call: Callable[[], object], nth: int) -> None:
        if nth < 1:
            raise ConfigurationError(f"nth is {nth}: the first pass of a point is 1.")
        self._point = point
        self._call = call
        self._left = nth
        self._lock = threading.Lock()

    def __call__(self, point: str) -> None:
        if point != self._point:
            return
        with self._lock:
            self._left -= 1
            due = self._left == 0
        if due:
            self._call()


@contextmanager
def _installed(hook: Callable[[str], None]) -> Generator[None]:
    outer = steps.crash_point

    def both(point: str) -> None:
        if outer is not None:
            outer(point)
        hook(point)

    steps.crash_point = both
    try:
        yield
    finally:
        steps.crash_point = outer


@contextmanager
def crash_at(point: str, nth: int = 1) -> Generator[None]:
    """Lose the process at a point, as far as one process can: `Crashed` leaves the `with` block.

    The connection is dropped and nothing is rolled back, recorded or acknowledged by txbox; the
    server rolls back what was not committed. Deliver again afterwards, as a broker would.

    Args:
        nth: which pass of the point is meant, 1 or more.

    Raises:
        Crashed: the point was reached.
        AssertionError: it was not: the test has tested nothing.
    """
    crashed = False

    def crash() -> NoReturn:
        nonlocal crashed
        crashed = True
        raise Crashed(f"crashed at {point}, pass {nth}")

    with _installed(_Nth(point, crash, nth)):
        yield
    if not crashed:
        raise AssertionError(
            f"The point {point!r} was passed fewer than {nth} times: crash_points() lists the points there are."
        )


@contextmanager
def meanwhile(point: str, call: Callable[[], object], nth: int = 1) -> Generator[None]:
    """Call something at a point, between two statements: a race with one outcome, without threads.

    Args:
        call: for instance another delivery of the same message, by a copy from `another_process`.
        nth: which pass of the point is meant, 1 or more.
    """
    with _installed(_Nth(point, call, nth)):
        yield


@contextmanager
def recorded() -> Generator[list[str]]:
    """Collect the points that are passed inside the `with` block, in order."""
    passed: list[str] = []
    with _installed(passed.append):
        yield passed


def kill_at(point: str, nth: int = 1) -> None:
    """From now on this process kills itself (SIGKILL) at a point; for worker subprocesses of tests.

    Guarantee: no Python code runs after the point, as with `kill -9` from outside.
    """
    steps.crash_point = _Nth(point, _kill, nth)


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def install_from_environment() -> None:
    """Call `kill_at` with TXBOX_CRASH_AT and TXBOX_CRASH_NTH (default 1), when the first is set.

    Raises:
        ConfigurationError: TXBOX_CRASH_NTH is no positive number.
    """
    point = os.environ.get(POINT_VARIABLE)
    if not point:
        return
    nth = os.environ.get(NTH_VARIABLE, "1")
    if not nth.isdecimal():
        raise ConfigurationError(f"{NTH_VARIABLE} is {nth!r}: it must be a whole number from 1.")
    kill_at(point, int(nth))
