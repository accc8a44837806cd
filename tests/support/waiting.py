"""Waiting with a deadline: for what comes true, never for a time."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

#: This ends, or something is broken: reached only by what fails, also on a machine that is twenty times slower.
DEADLINE_S = 40.0


def eventually(
    condition: Callable[[], Any], what: str = "the condition", *, pause_s: float = 0.01
) -> Any:
    """Poll until a condition holds; returns what it returned."""
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        if found := condition():
            return found
        time.sleep(pause_s)
    raise AssertionError(f"{what} did not come true within {DEADLINE_S:g} s")


def room(seconds: float) -> float:
    """What takes up to `seconds` on an idle machine may take so long on this one, as busy as it is now.

    For the rest beside a promised time: `took_s < GRACE_S + room(3)`.
    """
    return seconds * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
