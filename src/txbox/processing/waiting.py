"""What is waited for, outside of any transaction: another thread that has an id (promise 2.5), a conflict to
pass, and a database that is away (promise 2.8): nothing is counted, refused or acknowledged meanwhile.
"""

from __future__ import annotations

import random
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import Future
from threading import Lock
from typing import TypeVar

from txbox.connections.base import forgets_parent
from txbox.errors import Fault, StoreError, StoreUnavailable
from txbox.events import ConsumptionPaused, ConsumptionResumed, Events, TransactionRetried
from txbox.policy import Limits
from txbox.session import Session

T = TypeVar("T")


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
            # a thread that forks inside of its handler has left nothing to its child
            held = self._held.get(consumer, {})
            left: Iterable[str] = message_ids
            if holder is not None:
                if kept := holder.twice.intersection(message_ids):
                    holder.twice -= kept
                    left = set(message_ids) - kept
                holder.ids.difference_update(left)
            waited = [freed for each in left if (freed := held.pop(each, None)) is not None]
        for freed in waited:
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


#: What a wait can cure.
CURABLE = (Fault.UNAVAILABLE, Fault.CONFLICT, Fault.LOCK_TIMEOUT, Fault.PREPARED, Fault.TIMEOUT)

_CONFLICT_PAUSE_S = 0.05
# of one id, as many threads are waited for in turn
_HOLDERS_MAX = 12
_PAUSE_S = (0.05, 5.0)
# a server that refuses just this user may only be full
_MISCONFIGURED_S = 1.0
# a drain is noticed this soon
_LOOK_S = 0.5


class Waiting:
    """The one place that waits, for all threads and tasks of one app."""

    def __init__(self, limits: Limits, events: Events) -> None:
        self.in_flight = InFlight()
        self._limits = limits
        self._events = events

    async def for_id(
        self, db: Session, consumer: str, message_id: str, holder: Holder | None = None
    ) -> bool:
        """Take an id, waiting for another thread up to the lock time-out; False when that one kept it.

        Each thread that had it in between has a lock time-out of its own: a storm of copies makes nobody give up.
        """
        bound_s = self._limits.lock_timeout.total_seconds()
        deadline = time.monotonic() + _HOLDERS_MAX * bound_s
        while (freed := self.in_flight.enter(consumer, message_id, holder)) is not None:
            left_s = min(bound_s, deadline - time.monotonic())
            if left_s > 0:
                await db.wait(left_s, freed)
            if not freed.done():
                return False
        return True

    async def for_conflict(
        self, db: Session, consumer: str, tries: int, error: StoreError | None, *, told: bool
    ) -> bool:
        """Wait a moment before a transaction is tried again, unless the budget is spent.

        Args:
            tries: how often it was tried.
            told: there is an event of it.
        """
        if tries > self._limits.conflict_retries:
            return False
        if told:
            code = error.code if error is not None else None
            self._events.emit(TransactionRetried(consumer=consumer, code=code))
        await db.wait(_CONFLICT_PAUSE_S * random.random() * tries)
        return True

    async def persistently(
        self,
        db: Session,
        operation: Callable[[Session], Awaitable[T]],
        *,
        consumer: str | None = None,
        for_s: float | None = None,
        stop: Callable[[], bool] | None = None,
    ) -> T:
        """Repeat an operation until the database answers.

        Args:
            consumer: whose operation it is, for the events.
            for_s: give up after this many seconds without an answer; None never does.
            stop: True gives up; asked at least twice a second.

        Raises:
            StoreUnavailable: it gave up after `for_s`.
            StoreError: the error is none that waiting can cure, or it was stopped.
        """
        paused_at: float | None = None
        pause_s = _PAUSE_S[0]
        while True:
            try:
                answer = await operation(db)
            except StoreError as error:
                db.discard()
                if error.fault not in CURABLE:
                    raise
                now = time.monotonic()
                paused_at = paused_at or now
                if for_s is not None:
                    misconfigured = isinstance(error, StoreUnavailable) and error.misconfigured
                    if now - paused_at >= (
                        min(for_s, _MISCONFIGURED_S) if misconfigured else for_s
                    ):
                        if isinstance(error, StoreUnavailable):
                            raise
                        # a deadlock, a lock, a time-out: whatever it was, it has lasted
                        raise StoreUnavailable(
                            str(error),
                            fault=error.fault,
                            code=error.code,
                            constraint=error.constraint,
                            definite=error.definite,
                        ) from error
                wait_s = pause_s * random.uniform(0.5, 1.5)
                self._events.emit(
                    ConsumptionPaused(consumer=consumer, reason=str(error), retry_in_s=wait_s)
                )
                until = now + wait_s
                while (left_s := until - time.monotonic()) > 0:
                    if stop is not None and stop():
                        raise
                    await db.wait(min(left_s, _LOOK_S))
                pause_s = min(pause_s * 2, _PAUSE_S[1])
            else:
                if paused_at is not None:
                    paused_s = time.monotonic() - paused_at
                    self._events.emit(ConsumptionResumed(consumer=consumer, paused_s=paused_s))
                return answer
