"""What became of one message for one consumer."""

from __future__ import annotations

from dataclasses import dataclass

from txbox.outcome import Outcome


@dataclass(frozen=True, slots=True)
class Settled:
    """The outcome of one message for one consumer."""

    outcome: Outcome
    attempt: int = 0
    #: What the handler returned, as JSON, where it keeps that.
    result: bytes | None = None


#: What carries nothing of its own, and is made once.
DUPLICATE = Settled(Outcome.DUPLICATE)
