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
# of one id, as many threads are waited for in turn
_HOLDERS_MAX = 12


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
        """Take an id, waiting for another thread up to the lock time-out; False when that one kept it.

        Each thread that had it in between has a lock time-out of its own: a storm of copies makes nobody give up.
        """
        bound_s = self._limits.lock_timeout.total_seconds()
        deadline = time.monotonic() + _HOLDERS_MAX * bound_s
        while (freed := self.in_flight.enter(consumer, message_id, holder)) is not None:
            left_s = min(bound_s, deadline - time.monotonic())
            if left_s > 0:
                yield Wait(left_s, freed)
            if not freed.done():
                return False
        return True

    def again(self, handler: Handler, ran: Ran, tries: int) -> Steps[bool]:
        """Wait a moment outside of any transaction, unless the budget is spent."""
        if tries > self._limits.conflict_retries:
            return False
        if ran.end is not End.AMBIGUOUS:
            code = ran.store.code if ran.store else None
            self._events.emit(TransactionRetried(consumer=handler.consumer, code=code))
        yield Wait(_CONFLICT_PAUSE_S * random.random() * tries)
        return True
