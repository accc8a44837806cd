"""Crashes at named points: every statement boundary of an operation, and around handler, COMMIT and ack.

A point is `before:<statement>` or `after:<statement>`; `before:` or `after:` plus one of `begin`,
`handler`, `commit`, `ack`; or `received`. `crash_points` lists those that a delivery passes.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import NoReturn

from txbox import session
from txbox.errors import ConfigurationError
from txbox.session import Crashed

#: The point at which `install_from_environment` kills its process.
POINT_VARIABLE = "TXBOX_CRASH_AT"
#: Which pass of that point counts; 1 is the first.
NTH_VARIABLE = "TXBOX_CRASH_NTH"


class _Nth:
    """Calls something at the nth pass of a point, in whatever thread that happens, and only then."""

    def __init__(self, point: str, call: Callable[[], object], nth: int) -> None:
        if nth < 1:
            raise ConfigurationError(
                f"nth is {nth}: it must be at least 1, the first pass of a point."
            )
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
    outer = session.crash_point

    def both(point: str) -> None:
        if outer is not None:
            outer(point)
        hook(point)

    session.crash_point = both
    try:
        yield
    finally:
        session.crash_point = outer


@contextmanager
def crash_at(point: str, nth: int = 1) -> Generator[None]:
    """Simulate losing the process at a point: `Crashed` leaves the `with` block.

    The connection is dropped; txbox rolls back, records and acknowledges nothing, and the server rolls
    back what was not committed. Deliver again afterwards, as a broker would.

    Args:
        nth: which pass of the point counts, 1 or more.

    Raises:
        Crashed: the point was reached.
        AssertionError: the point was not reached, so the test has tested nothing.
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
            f"The point {point!r} was passed fewer than {nth} times: crash_points() lists the existing points."
        )


@contextmanager
def meanwhile(point: str, call: Callable[[], object], nth: int = 1) -> Generator[None]:
    """Call something at a point, between two statements: a race with a single outcome, without threads.

    Args:
        call: for instance another delivery of the same message, by a copy from `another_process`.
        nth: which pass of the point counts, 1 or more.
    """
    with _installed(_Nth(point, call, nth)):
        yield


@contextmanager
def recorded() -> Generator[list[str]]:
    """Collect the points passed inside the `with` block, in order."""
    passed: list[str] = []
    with _installed(passed.append):
        yield passed


def kill_at(point: str, nth: int = 1) -> None:
    """From now on, this process kills itself (SIGKILL) at a point; for worker subprocesses in tests.

    Guarantee: no Python code runs after the point, just as with `kill -9` from outside.
    """
    session.crash_point = _Nth(point, _kill, nth)


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def install_from_environment() -> None:
    """Call `kill_at` with TXBOX_CRASH_AT and TXBOX_CRASH_NTH (default 1), if the first is set.

    Raises:
        ConfigurationError: TXBOX_CRASH_NTH is not a positive number.
    """
    point = os.environ.get(POINT_VARIABLE)
    if not point:
        return
    nth = os.environ.get(NTH_VARIABLE, "1")
    if not nth.isdecimal():
        raise ConfigurationError(
            f"{NTH_VARIABLE} is {nth!r}: it must be a whole number, 1 or more."
        )
    kill_at(point, int(nth))
