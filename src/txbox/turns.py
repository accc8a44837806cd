"""Whose turn it is: another thread works on the id, another transaction won, another version comes first."""

from __future__ import annotations

import random
import time

from txbox.events import Events, TransactionRetried
from txbox.handlers import Handler
from txbox.in_flight import Holder, InFlight
from txbox.policy import Limits
from txbox.ran import End, Ran
from txbox.steps import Steps, Wait

#: A version whose predecessor is missing looks again this often; the predecessor's commit wakes it at once.
GAP_LOOK_S = 2.0
#: Ends that are nobody's failure, as long as the budget of tries lasts.
AGAIN = (End.CONFLICT, End.AMBIGUOUS, End.LOST)

_CONFLICT_PAUSE_S = 0.05


class Turns:
    """Waits, outside of any transaction, until a message may be run, or run again.

    Args:
        in_flight: the ids that this process works on.
    """

    def __init__(self, in_flight: InFlight, limits: Limits, events: Events) -> None:
        self.in_flight = in_flight
        self._limits = limits
        self._events = events

    def entered(self, consumer: str, message_id: str, holder: Holder | None = None) -> Steps[bool]:
        """Take an id, waiting for another thread up to the lock time-out; False when that one kept it."""
        deadline = time.monotonic() + self._limits.lock_timeout.total_seconds()
        while (freed := self.in_flight.enter(consumer, message_id, holder)) is not None:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return False
            yield Wait(left_s, freed)
        return True

    def again(self, handler: Handler, ran: Ran, tries: int) -> Steps[bool]:
        """Wait a moment outside of any transaction, unless the budget is spent."""
        if tries > self._limits.conflict_retries:
            return False
        if self._events and ran.end is not End.AMBIGUOUS:
            code = ran.store.code if ran.store else None
            self._events.emit(TransactionRetried(consumer=handler.consumer, code=code))
        yield Wait(_CONFLICT_PAUSE_S * random.random() * tries)
        return True
