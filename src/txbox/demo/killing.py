"""Where a consumer process dies: at any moment by its supervisor's hand, or at a named point by its own."""

from __future__ import annotations

import os
import signal
from pathlib import Path

#: The moments that decide, in the words of the naive consumer; `None` is any moment.
WRITTEN = "written, not yet committed"
COMMITTED = "committed, not yet acknowledged"
SENDING = "receipts are about to be sent"


def request(side: Path, moment: str) -> None:
    """Ask the process of a side to kill itself when it next passes a moment."""
    partial = side.with_suffix(".kill.new")
    partial.write_text(moment)
    partial.rename(side.with_suffix(".kill"))


def withdraw(side: Path) -> None:
    """Take a request back."""
    side.with_suffix(".kill").unlink(missing_ok=True)


def passing(side: Path, moment: str) -> None:
    """Die here, by SIGKILL, if that was asked for."""
    try:
        wanted = side.with_suffix(".kill").read_text()
    except FileNotFoundError:
        return
    if wanted == moment:
        withdraw(side)
        os.kill(os.getpid(), signal.SIGKILL)
