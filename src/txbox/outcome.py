"""What became of a delivery, and what state a row is in."""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class Outcome(StrEnum):
    """What became of a delivery; all but IN_PROGRESS are to be acknowledged."""

    PROCESSED = "processed"  # the handler's transaction has committed
    DUPLICATE = "duplicate"  # finished before: nothing ran
    FAILED = "failed"  # the handler failed; parked in the table, which retries it
    DEAD = "dead"  # given up: a dead letter
    QUARANTINED = "quarantined"  # no usable id, another payload, too large: set aside
    IN_PROGRESS = "in_progress"  # another transaction holds it: do not acknowledge
    DEFERRED = "deferred"  # the table owns it and will process it
    UNMATCHED = "unmatched"  # no handler consumes this topic and type

    @property
    def settles(self) -> bool:
        """True when the delivery may be acknowledged."""
        return self is not Outcome.IN_PROGRESS


@dataclass(frozen=True, slots=True)
class Answer:
    """What became of a message for one consumer, and what its handler returned where that is kept."""

    outcome: Outcome
    #: Which run of the handler this was, from 1; 0 when none ran.
    attempt: int = 0
    #: What the handler returned, as JSON; None when nothing is kept.
    json: bytes | None = None

    @property
    def result(self) -> Any:
        """What the handler returned, read back; None when nothing is kept."""
        return None if self.json is None else json.loads(self.json)


class Status(StrEnum):
    """The state of an inbox row."""

    PENDING = "pending"
    PROCESSING = "processing"
    PROCESSED = "processed"
    FAILED = "failed"
    DEAD = "dead"
    DISCARDED = "discarded"


#: What carries nothing of its own, and is made once.
DUPLICATE = Answer(Outcome.DUPLICATE)
