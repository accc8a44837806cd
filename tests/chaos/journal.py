"""What every process writes down as it happens: one file each, a line for each fact, written at once."""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import NamedTuple

from txbox.events import (
    ErrorContained,
    Event,
    LeaseExpired,
    MessageDead,
    MessageEvent,
    MessageFailed,
    MessageProcessed,
    MessagesLost,
    SequenceGap,
)

#: Events that the checker reads.
_KEPT = (
    MessageProcessed,
    MessageFailed,
    MessageDead,
    LeaseExpired,
    SequenceGap,
    ErrorContained,
    MessagesLost,
)


class Fact(NamedTuple):
    """One line: when (seconds since the epoch), by whom, what, and about what."""

    at: float
    process: str
    kind: str
    words: tuple[str, ...]


class Journal:
    """The file of one process. What it has written survives its SIGKILL.

    Args:
        process: a name that no other process of the run has.
        timed: consumers whose processed messages are kept, too.
    """

    def __init__(self, folder: Path, process: str, *, timed: Collection[str] = ()) -> None:
        self._timed = timed
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
        self._file = os.open(folder / f"{process}.journal", flags, 0o600)

    def write(self, kind: str, *words: object) -> None:
        # not time.time(), which is wrong in a process whose clock is
        line = "\t".join([f"{now():.6f}", kind, *(_word(word) for word in words)])
        os.write(self._file, f"{line}\n".encode())

    def observe(self, event: Event) -> None:
        """An observer of an App."""
        if isinstance(event, MessageProcessed) and event.consumer not in self._timed:
            return
        if isinstance(event, _KEPT):
            message_id = event.message_id if isinstance(event, MessageEvent) else ""
            why = getattr(event, "error", "") or getattr(event, "reason", "")
            error_type = getattr(event, "error_type", "")
            self.write(
                type(event).__name__, event.consumer or "", message_id or "", error_type, why
            )


def now() -> float:
    """Seconds since the epoch, whatever a fault has done to `time.time`."""
    return time.clock_gettime(time.CLOCK_REALTIME)


def _word(word: object) -> str:
    return str(word).replace("\t", " ").replace("\n", " ")[:400]


def facts(folder: Path, *kinds: str) -> Iterator[Fact]:
    """Every fact of these kinds that any process has written; a line that was cut off is no fact."""
    for path in sorted(folder.glob("*.journal")):
        with path.open(errors="replace") as lines:
            for line in lines:
                at, _, rest = line.rstrip("\n").partition("\t")
                kind, *words = rest.split("\t")
                if line.endswith("\n") and kind in kinds:
                    yield Fact(float(at), path.stem, kind, tuple(words))
