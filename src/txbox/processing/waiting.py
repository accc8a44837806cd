"""Waiting outside any transaction: for an id that another thread holds (promise 2.5), after a conflict, and for
a database that is away (promise 2.8). Until it is back, nothing is counted, refused or acknowledged.
"""

from __future__ import annotations

import random
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import Future
from threading import Lock
from typing import TypeVar

from txbox.connections.base import forgets_parent
from txbox.errors import NO_ROOM, StoreError, StoreUnavailable
from txbox.events import ConsumptionPaused, ConsumptionResumed, Events, TransactionRetried
from txbox.policy import Backoff, Limits
from txbox.session import Session

T = TypeVar("T")


class Holder:
    """A lane that prepares its next batch while the last one commits.

    An id may be in both batches; it stays in flight until both have finished.
    """

    __slots__ = ("ids", "twice")

    def __init__(self) -> None:
        self.ids: set[str] = set()
        self.twice: set[str] = set()


class InFlight:
    """The ids that threads and tasks of this process are working on."""

    def __init__(self) -> None:
        self.forget_parent()
        forgets_parent(self)

    def forget_parent(self) -> None:
        self._lock = Lock()
        # the ids of each consumer; a future is made only for a waiter
        self._ids: dict[str, dict[str, Future[None] | None]] = {}

    def enter(
        self, consumer: str, message_id: str, holder: Holder | None = None
    ) -> Future[None] | None:
        """Enter an id. Returns None if it is ours now, else a future that is done when its holder leaves."""
        with self._lock:
            entered = self._ids.setdefault(consumer, {})
            if _enter(entered, (message_id,), holder):
                return None
            freed = entered[message_id]
            if freed is None:
                freed = entered[message_id] = Future()
            return freed

    def enter_all(
        self, consumer: str, message_ids: Sequence[str], holder: Holder | None = None
    ) -> bool:
        """Enter all of these ids, or none if one is in flight elsewhere."""
        with self._lock:
            return _enter(self._ids.setdefault(consumer, {}), message_ids, holder)

    def leave(self, consumer: str, *message_ids: str, holder: Holder | None = None) -> None:
        """Leave ids and wake the waiters."""
        with self._lock:
            # empty in the child of a handler that forked
            entered = self._ids.get(consumer, {})
            released: Iterable[str] = message_ids
            if holder is not None:
                if kept := holder.twice.intersection(message_ids):
                    holder.twice -= kept
                    released = set(message_ids) - kept
                holder.ids.difference_update(released)
            waited = [freed for each in released if (freed := entered.pop(each, None)) is not None]
        for freed in waited:
            freed.set_result(None)


def _enter(
    entered: dict[str, Future[None] | None], message_ids: Sequence[str], holder: Holder | None
) -> bool:
    if entered.keys().isdisjoint(message_ids):
        entered.update(dict.fromkeys(message_ids))
    else:
        shared = entered.keys() & set(message_ids)
        if holder is None or not shared <= holder.ids - holder.twice:
            return False
        holder.twice |= shared
        entered.update((message_id, None) for message_id in message_ids if message_id not in shared)
    if holder is not None:
        holder.ids.update(message_ids)
    return True


_CONFLICT_PAUSE_S = 0.05
# how long a handler's statement waits for room on a disk: it may be that txbox's own statements still have some
_ROOM_TRIES, _ROOM_PAUSE_S = 20, 0.5
# wait for so many holders of one id, one after another
_HOLDERS_MAX = 12
_PAUSE_S = (0.05, 5.0)
# a server that refuses this user may just be out of connections
_MISCONFIGURED_S = 1.0
# how soon a wait notices that it is to stop
_LOOK_S = 0.5


class Waiting:
    """Waits for all threads and tasks of one app."""

    def __init__(self, limits: Limits, events: Events) -> None:
        self.in_flight = InFlight()
        self._limits = limits
        self._events = events
        # consumer → when the database answered again, by `time.monotonic`
        self._resumed_at: dict[str | None, float] = {}

    async def for_id(
        self, db: Session, consumer: str, message_id: str, holder: Holder | None = None
    ) -> bool:
        """Take an id, waiting up to the lock timeout for the thread that holds it; False if it kept it.

        Each holder in turn gets a full lock timeout, so that waiters survive a storm of copies.
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
        self, db: Session, consumer: str, tries: int, error: StoreError | None, *, emit: bool
    ) -> bool:
        """Wait a moment before a transaction is retried; False if the budget is spent.

        Args:
            tries: how often it was tried.
            emit: emit an event.
        """
        budget, pause_s = self._limits.conflict_retries, _CONFLICT_PAUSE_S * random.random() * tries
        if tries > budget and error is not None and error.code in NO_ROOM:
            budget, pause_s = budget + _ROOM_TRIES, _ROOM_PAUSE_S * (0.5 + random.random())
        if tries > budget:
            return False
        if emit:
            code = error.code if error is not None else None
            self._events.emit(TransactionRetried(consumer=consumer, code=code))
        await db.wait(pause_s)
        return True

    async def with_retries(
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
            consumer: named in the events.
            for_s: give up after this many seconds without an answer; None never gives up.
            stop: gives up when it returns True; called at least twice a second.

        Raises:
            StoreUnavailable: it gave up after `for_s`.
            StoreError: waiting cannot cure it, or it was stopped.
        """
        paused_at: float | None = None
        backoff: Backoff | None = None
        while True:
            began = time.monotonic()
            try:
                answer = await operation(db)
            except StoreError as error:
                db.discard()
                if not error.transient:
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
                backoff = backoff or Backoff(*_PAUSE_S, spread=(0.5, 1.5))
                wait_s = backoff.next_s()
                # a try that began before another one succeeded reports trouble that is over
                if began >= self._resumed_at.get(consumer, 0.0):
                    self._events.emit(
                        ConsumptionPaused(consumer=consumer, reason=str(error), retry_in_s=wait_s)
                    )
                until = now + wait_s
                while (left_s := until - time.monotonic()) > 0:
                    if stop is not None and stop():
                        raise
                    await db.wait(min(left_s, _LOOK_S))
            else:
                if paused_at is not None:
                    self._resumed_at[consumer] = now = time.monotonic()
                    paused_s = now - paused_at
                    self._events.emit(ConsumptionResumed(consumer=consumer, paused_s=paused_s))
                return answer
