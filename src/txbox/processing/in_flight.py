"""Which ids this process works on, and whose turn it is (SEMANTICS 2.5): nothing is claimed twice at once."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from concurrent.futures import Future
from threading import Lock

from txbox.events import Events, TransactionRetried
from txbox.forks import forgets_parent
from txbox.handlers import Handler
from txbox.policy import Limits
from txbox.processing.transaction import End, TransactionResult
from txbox.steps import Steps, Wait


class Holder:
    """Who runs one batch behind another, and prepares the next while the last one commits.

    An id of the one may come again in the other: it is held until both have given it up.
    """

    __slots__ = ("ids", "twice")

    def __init__(self) -> None:
        self.ids: set[str] = set()
        self.twice: set[str] = set()


class InFlight:
    """Who works on which id, among the threads and tasks of one process."""

    def __init__(self) -> None:
        self.forget_parent()
        forgets_parent(self)

    def forget_parent(self) -> None:
        self._lock = Lock()
        # the ids of each consumer; the future is made when somebody waits: hardly ever
        self._held: dict[str, dict[str, Future[None] | None]] = {}

    def enter(
        self, consumer: str, message_id: str, holder: Holder | None = None
    ) -> Future[None] | None:
        """Take an id; returns None when it is ours now, else the future that ends with its holder."""
        with self._lock:
            held = self._held.setdefault(consumer, {})
            if _taken(held, (message_id,), holder):
                return None
            freed = held[message_id]
            if freed is None:
                freed = held[message_id] = Future()
            return freed

    def enter_all(
        self, consumer: str, message_ids: Sequence[str], holder: Holder | None = None
    ) -> bool:
        """Take these ids, or none of them when somebody else holds one."""
        with self._lock:
            return _taken(self._held.setdefault(consumer, {}), message_ids, holder)

    def leave(self, consumer: str, *message_ids: str, holder: Holder | None = None) -> None:
        """Give ids up and wake who waits for them."""
        with self._lock:
            held = self._held.setdefault(consumer, {})
            kept: set[str] = set()
            if holder is not None:
                kept = holder.twice.intersection(message_ids)
                holder.twice -= kept
                holder.ids.difference_update(set(message_ids) - kept if kept else message_ids)
            # a thread that forks inside of its handler has left nothing to its child
            waited = [
                held.pop(message_id, None) for message_id in message_ids if message_id not in kept
            ]
        for freed in waited:
            if freed is not None:
                freed.set_result(None)


def _taken(
    held: dict[str, Future[None] | None], message_ids: Sequence[str], holder: Holder | None
) -> bool:
    if held.keys().isdisjoint(message_ids):
        held.update(dict.fromkeys(message_ids))
    else:
        shared = held.keys() & set(message_ids)
        if holder is None or not shared <= holder.ids - holder.twice:
            return False
        holder.twice |= shared
        held.update((message_id, None) for message_id in message_ids if message_id not in shared)
    if holder is not None:
        holder.ids.update(message_ids)
    return True


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

    def again(self, handler: Handler, ran: TransactionResult, tries: int) -> Steps[bool]:
        """Wait a moment outside of any transaction, unless the budget is spent."""
        if tries > self._limits.conflict_retries:
            return False
        if ran.end is not End.AMBIGUOUS:
            code = ran.database_error.code if ran.database_error else None
            self._events.emit(TransactionRetried(consumer=handler.consumer, code=code))
        yield Wait(_CONFLICT_PAUSE_S * random.random() * tries)
        return True
