"""What became of a delivery, and the state of an inbox row."""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class Outcome(StrEnum):
    """What became of a delivery. Acknowledge all of them except IN_PROGRESS."""

    PROCESSED = "processed"  # the handler's transaction has committed
    DUPLICATE = "duplicate"  # already finished; nothing ran
    FAILED = "failed"  # the handler failed: the message is parked, and retried from the table
    DEAD = "dead"  # given up: a dead letter
    QUARANTINED = "quarantined"  # set aside: no usable id, a different payload, or too large
    IN_PROGRESS = "in_progress"  # another transaction holds it: do not acknowledge
    DEFERRED = "deferred"  # the table owns it and will process it
    UNMATCHED = "unmatched"  # no handler consumes this topic and type

    @property
    def settles(self) -> bool:
        """True when the delivery may be acknowledged."""
        return self is not Outcome.IN_PROGRESS


@dataclass(frozen=True, slots=True)
class Answer:
    """What became of a message for one consumer, and what its handler returned, if that is kept."""

    outcome: Outcome
    #: Which attempt this was, from 1; 0 if the handler did not run.
    attempt: int = 0
    #: What the handler returned, as JSON; None if results are not kept.
    json: bytes | None = None

    @property
    def result(self) -> Any:
        """What the handler returned, parsed; None if results are not kept."""
        return None if self.json is None else json.loads(self.json)


class Status(StrEnum):
    """The state of an inbox row."""

    PENDING = "pending"
    PROCESSING = "processing"
    PROCESSED = "processed"
    FAILED = "failed"
    DEAD = "dead"
    DISCARDED = "discarded"


#: Carries no data, so one instance serves all.
DUPLICATE = Answer(Outcome.DUPLICATE)
