"""Waiting with a deadline: for what comes true, never for a time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

DEADLINE_S = 180.0  # reached only by what fails, also on a machine that is twenty times slower


def eventually(condition: Callable[[], Any], what: str = "the condition") -> Any:
    """Poll until a condition holds; returns what it returned."""
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        if found := condition():
            return found
        time.sleep(0.01)
    raise AssertionError(f"{what} did not come true within {DEADLINE_S:g} s")
