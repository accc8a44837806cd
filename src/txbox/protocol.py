"""The path of a message through its transaction: claim, handler, close, COMMIT; and what follows each way it can end.

Every path is a generator of steps, so that the same lines serve sync and async handlers, and every
statement boundary is a crash point. Chapter and verse: SEMANTICS 2 to 4.
"""

from __future__ import annotations

import random
import secrets
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import Enum
from threading import Lock
from typing import Any, TypeVar

from txbox.errors import Fault, StoreError, StoreUnavailable
from txbox.events import (
    ConsumptionPaused,
    ConsumptionResumed,
    Events,
    MessageDead,
    MessageDeferred,
    MessageDuplicate,
    MessageFailed,
    MessageInFlight,
    MessageProcessed,
    MessageQuarantined,
    TransactionRetried,
)
from txbox.failure import BROKEN, failure_of
from txbox.handlers import Handler
from txbox.outcome import Outcome, Status
from txbox.policy import Lease, Limits
from txbox.steps import Begin, Commit, Discard, Invoke, Raised, Rollback, Statement, Steps, Wait
from txbox.store.codec import Arrival, Leased
from txbox.store.inbox import Existing, Failure, InboxStore

T = TypeVar("T")

_CONFLICT_PAUSE_S = 0.05
_UNAVAILABLE_PAUSE_S = (0.05, 5.0)


class End(Enum):
    """How a transaction around a handler ended."""

    COMMITTED = "committed"
    RAISED = "raised"  # the handler, or the database on its behalf: rolled back
    BROKEN = "broken"  # the handler left the claiming transaction
    CONFLICT = "conflict"  # deadlock or serialization failure: rolled back
    LOCKED = "locked"  # another transaction holds an id
    LOST = "lost"  # the connection is gone before COMMIT was sent: rolled back by the server
    AMBIGUOUS = "ambiguous"  # the COMMIT may have taken effect


@dataclass(slots=True)
class Ran:
    """A transaction that has ended, and what it met."""

    end: End
    fresh: set[str] = field(default_factory=set[str])
    existing: dict[str, Existing] = field(default_factory=dict[str, Existing])
    error: Exception | None = None
    store: StoreError | None = None


@dataclass(frozen=True, slots=True)
class Settled:
    """The outcome of one message for one consumer."""

    outcome: Outcome
    attempt: int = 0


class InFlight:
    """The ids that this process is working on: they are never claimed twice at once (SEMANTICS 2.5)."""

    def __init__(self) -> None:
        self._lock = Lock()
        # the future is made when somebody waits: hardly ever
        self._held: dict[tuple[str, str], Future[None] | None] = {}

    def enter(self, consumer: str, message_id: str) -> Future[None] | None:
        """Take an id; returns None when it is ours now, else the future that ends with its holder."""
        own = (consumer, message_id)
        with self._lock:
            if own not in self._held:
                self._held[own] = None
                return None
            holder = self._held[own]
            if holder is None:
                holder = self._held[own] = Future()
            return holder

    def leave(self, consumer: str, message_id: str) -> None:
        with self._lock:
            holder = self._held.pop((consumer, message_id))
        if holder is not None:
            holder.set_result(None)


class InboxProtocol:
    """Carries messages of one app through its inbox."""

    def __init__(self, store: InboxStore, events: Events, limits: Limits, lease: Lease) -> None:
        self.store = store
        self.events = events
        self.limits = limits
        self.lease = lease
        self.in_flight = InFlight()

    # -- deliveries ---------------------------------------------------------------------------

    def deliver(self, handler: Handler, arrivals: Sequence[Arrival]) -> Steps[dict[str, Settled]]:
        """Process deliveries whose ids differ; returns the outcome of each id.

        Ids that another thread of this process works on are waited for, up to the lock time-out.

        Guarantee: PROCESSED and the effects of the handler's transaction are one commit. After a
        crash anywhere, delivering again processes what was not processed, and nothing twice.
        """
        held: list[str] = []
        settled: dict[str, Settled] = {}
        try:
            for arrival in arrivals:
                if self.in_flight.enter(handler.consumer, arrival.message_id) is None or (
                    yield from self._entered(handler.consumer, arrival.message_id)
                ):
                    held.append(arrival.message_id)
                else:
                    settled[arrival.message_id] = self._waits(handler, arrival)
            mine = [arrival for arrival in arrivals if arrival.message_id not in settled]
            if mine:
                settled.update((yield from self._claim_and_run(handler, mine)))
            return settled
        finally:
            for message_id in held:
                self.in_flight.leave(handler.consumer, message_id)

    def _entered(self, consumer: str, message_id: str) -> Steps[bool]:
        deadline = time.monotonic() + self.limits.lock_timeout.total_seconds()
        while (holder := self.in_flight.enter(consumer, message_id)) is not None:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return False
            yield Wait(left_s, holder)
        return True

    def _waits(self, handler: Handler, arrival: Arrival) -> Settled:
        if self.events:
            self.events.emit(
                MessageInFlight(
                    consumer=handler.consumer,
                    message_id=arrival.message_id,
                    topic=arrival.message.topic,
                )
            )
        return Settled(Outcome.IN_PROGRESS)

    def _claim_and_run(
        self, handler: Handler, arrivals: Sequence[Arrival]
    ) -> Steps[dict[str, Settled]]:
        """Claim and run; retries conflicts, isolates the culprit of a batch, reads again when in doubt."""
        # sorted bytewise: two batches that share ids then wait for each other instead of deadlocking
        waiting = sorted(arrivals, key=lambda arrival: arrival.message_id.encode())
        settled: dict[str, Settled] = {}
        conflicts = 0
        while waiting:
            started = time.monotonic()
            ran = yield from self._run_fresh(handler, waiting)
            by_id = {arrival.message_id: arrival for arrival in waiting}
            if ran.end is End.COMMITTED:
                for message_id in ran.fresh:
                    settled[message_id] = self._processed(handler, by_id[message_id], started)
                for message_id, row in ran.existing.items():
                    if message_id not in ran.fresh:
                        settled[message_id] = yield from self.met(handler, by_id[message_id], row)
                # an id that is neither fresh nor there was pruned between two statements: claim again
                waiting = [arrival for arrival in waiting if arrival.message_id not in settled]
                continue
            if ran.end is End.LOST:
                raise _lost(ran.store)
            if ran.end is End.AMBIGUOUS:
                # decided by claiming again on another connection, never by SELECT (SEMANTICS 2.7)
                yield Wait(_CONFLICT_PAUSE_S * random.random())
                conflicts += 1
                if conflicts > self.limits.conflict_retries:
                    raise _lost(ran.store)
                continue
            if ran.end is End.CONFLICT and conflicts < self.limits.conflict_retries:
                conflicts += 1
                if self.events:
                    self.events.emit(
                        TransactionRetried(
                            consumer=handler.consumer, code=ran.store.code if ran.store else None
                        )
                    )
                yield Wait(_CONFLICT_PAUSE_S * random.random() * conflicts)
                if conflicts < 2 or len(waiting) == 1:
                    continue
            if len(waiting) > 1:
                # the culprit of a batch costs only itself: from here each has a transaction of its own
                for arrival in waiting:
                    settled.update((yield from self._claim_and_run(handler, [arrival])))
                return settled
            (arrival,) = waiting
            if ran.end is End.CONFLICT and not ran.fresh and ran.store is not None:
                # the claim itself: nothing of the handler's has run, so there is no attempt to record
                raise ran.store
            if ran.end is End.LOCKED:
                settled[arrival.message_id] = self._waits(handler, arrival)
                return settled
            recorded = yield from self._recorded(
                handler, arrival, self._failure(handler, ran), token=""
            )
            if recorded is not None:
                settled[arrival.message_id] = recorded
                return settled
            # the row is somebody else's by now: claim again, which says whose
        return settled

    def _run_fresh(self, handler: Handler, arrivals: Sequence[Arrival]) -> Steps[Ran]:
        token = secrets.token_hex(16)
        claim = self.store.claim(
            handler.consumer,
            arrivals,
            token=token,
            lock_timeout=self.limits.lock_timeout,
            idle_s=self._idle_s(handler),
            keep=handler.keeps_payload,
        )
        return (yield from self._transaction(handler, arrivals, claim, token))

    def _idle_s(self, handler: Handler) -> float:
        timeout = handler.options.timeout
        return max(self.lease.duration.total_seconds(), timeout.total_seconds() if timeout else 0.0)

    # -- the transaction ----------------------------------------------------------------------

    def _transaction(
        self,
        handler: Handler,
        arrivals: Sequence[Arrival],
        claim: tuple[Statement, ...],
        token: str,
    ) -> Steps[Ran]:
        """BEGIN and claim; the handler on what was claimed; close and COMMIT."""
        store, consumer = self.store, handler.consumer
        ran = Ran(End.COMMITTED)
        try:
            results = yield Begin(claim)
            fresh = store.claimed(claim, results)
            if fresh is None or len(fresh) < len(arrivals):
                wanted = [
                    own.message_id
                    for own in arrivals
                    if fresh is None or own.message_id not in fresh
                ]
                ran.existing = yield from store.classify(consumer, wanted)
                if fresh is None:
                    fresh = {own for own, row in ran.existing.items() if row.token == token}
            ran.fresh = fresh
        except StoreError as error:
            return (yield from self._not_claimed(error))
        mine = [arrival for arrival in arrivals if arrival.message_id in ran.fresh]
        if not mine:
            # nothing to keep; where the claim armed a guard in the database, only ROLLBACK lifts it,
            # elsewhere COMMIT is the cheaper way out
            yield Rollback() if store.dialect.has("arm") else Commit()
            return ran
        try:
            yield from self._handled(handler, mine)
        except Raised as raised:
            yield from self._raised(ran, raised, token)
            return ran
        try:
            yield from store.complete(
                consumer, [own.message_id for own in mine], token=token, keep=handler.keeps_payload
            )
            yield Commit((store.close(token),))
        except Raised as raised:
            # a flush that the session put off until now
            yield from self._raised(ran, raised, token)
        except StoreError as error:
            ran.error = ran.store = error
            ran.end = _end_of_commit(error)
            yield Discard() if ran.end in (End.AMBIGUOUS, End.BROKEN, End.LOST) else Rollback()
        return ran

    def _raised(self, ran: Ran, raised: Raised, token: str) -> Steps[None]:
        """The handler raised: roll back, having asked whether this is still the transaction that claimed."""
        ran.error, ran.store = raised.error, raised.store
        ran.end = _end_of_handler(raised)
        refused = (
            ran.store is not None
            and ran.store.fault is Fault.GUARD
            and self.store.dialect.refuses_commit
        )
        if ran.end is End.RAISED and not refused:
            try:
                yield self.store.close(token)
            except StoreError as error:
                if error.fault is Fault.GUARD:
                    # it wrote outside of the transaction that is rolled back: a retry could write again
                    ran.error, ran.store, ran.end = error, error, End.BROKEN
        yield Discard() if ran.end in (End.BROKEN, End.LOST) else Rollback()

    def _not_claimed(self, error: StoreError) -> Steps[Ran]:
        """The claim failed: nothing has run."""
        if error.fault is Fault.LOCK_TIMEOUT:
            yield Rollback()
            return Ran(End.LOCKED, error=error, store=error)
        if error.fault in (Fault.CONFLICT, Fault.DUPLICATE):
            # DUPLICATE: the key's index is being rebuilt; reading again is what a duplicate needs
            yield Rollback()
            return Ran(End.CONFLICT, error=error, store=error)
        yield Discard()
        raise error

    def _handled(self, handler: Handler, arrivals: Sequence[Arrival]) -> Steps[None]:
        timeout = handler.options.timeout
        timeout_s = timeout.total_seconds() if timeout else None
        if handler.options.batch:
            yield Invoke(_call(handler, list(arrivals)), timeout_s)
            return
        for arrival in arrivals:
            yield Invoke(_call(handler, arrival), timeout_s)

    # -- how it ended -------------------------------------------------------------------------

    def _processed(self, handler: Handler, arrival: Arrival, started: float) -> Settled:
        attempt = arrival.message.attempt
        if self.events:
            self.events.emit(
                MessageProcessed(
                    consumer=handler.consumer,
                    message_id=arrival.message_id,
                    topic=arrival.message.topic,
                    attempt=attempt,
                    duration_s=time.monotonic() - started,
                )
            )
        return Settled(Outcome.PROCESSED, attempt)

    def met(self, handler: Handler, arrival: Arrival, row: Existing) -> Steps[Settled]:
        """Decide by the row that stands under this id (SEMANTICS 2.12)."""
        where = {
            "consumer": handler.consumer,
            "message_id": arrival.message_id,
            "topic": arrival.message.topic,
        }
        if row.differs(arrival.hash):
            yield from self.quarantine(
                handler.consumer, arrival.message, arrival.message_id, arrival.hash or b"",
                "Another payload came under an id that is known: the producer reuses ids, or a message was altered.",
            )  # fmt: skip
            return Settled(Outcome.QUARANTINED)
        if row.status in (Status.PROCESSED, Status.DEAD, Status.DISCARDED):
            if self.events:
                self.events.emit(MessageDuplicate(**where))
            return Settled(Outcome.DUPLICATE)
        if row.status == Status.PROCESSING and not row.leased:
            # committed without a lease: only a handler that committed by itself leaves this (SEMANTICS 2.3)
            recorded = yield from self._recorded(handler, arrival, BROKEN, token=row.token or "")
            return recorded or Settled(Outcome.DUPLICATE)
        if not row.has_payload:
            yield Begin((self.store.return_payload(handler.consumer, arrival),))
            yield Commit()
        if self.events:
            self.events.emit(MessageDeferred(**where))
        return Settled(Outcome.DEFERRED)

    def quarantine(
        self, consumer: str, message: Any, message_id: str, hashed: bytes, reason: str
    ) -> Steps[None]:
        """Set a message aside in a transaction of its own, and raise the alarm."""
        yield Begin(
            (
                self.store.quarantine(
                    consumer, message, message_id=message_id, hashed=hashed, reason=reason,
                    payload_limit=self.limits.quarantined_bytes,
                ),
            )
        )  # fmt: skip
        yield Commit()
        if self.events:
            self.events.emit(
                MessageQuarantined(
                    consumer=consumer, message_id=message_id, topic=message.topic, reason=reason
                )
            )

    def _failure(self, handler: Handler, ran: Ran) -> Failure:
        if ran.end is End.BROKEN:
            return BROKEN
        assert ran.error is not None
        return failure_of(ran.error, ran.store, handler.options, self.limits)

    def _recorded(
        self, handler: Handler, arrival: Arrival, failure: Failure, *, token: str
    ) -> Steps[Settled | None]:
        """Park a failure, or None when the row is not ours to write."""
        row = yield from self.store.record(
            handler.consumer, arrival, failure, handler.options.retry, token=token
        )
        if row is None:
            return None
        dead = row.status == Status.DEAD
        if self.events:
            where = {
                "consumer": handler.consumer,
                "message_id": arrival.message_id,
                "topic": arrival.message.topic,
            }
            first_line = failure.error.partition("\n")[0]
            if dead:
                self.events.emit(
                    MessageDead(
                        **where,
                        attempt=row.attempts,
                        error_type=failure.error_type,
                        error=first_line,
                    )
                )
            else:
                self.events.emit(
                    MessageFailed(
                        **where, attempt=row.attempts, error_type=failure.error_type, error=first_line,
                        retry_in_s=failure.delay_s or 0.0,
                    )
                )  # fmt: skip
        return Settled(Outcome.DEAD if dead else Outcome.FAILED, row.attempts)

    # -- from the table -----------------------------------------------------------------------

    def run_leased(self, handler: Handler, leased: Leased, lease_token: str) -> Steps[Settled]:
        """Process one row that this worker has leased.

        Guarantee: a worker whose lease was given to another can run the handler, it cannot commit.
        """
        consumer, arrival = handler.consumer, leased.arrival
        if (yield from self._entered(consumer, arrival.message_id)):
            try:
                if handler.options.transactional:
                    return (yield from self._run_row(handler, arrival, lease_token))
                return (yield from self._run_untransacted(handler, arrival, lease_token))
            finally:
                self.in_flight.leave(consumer, arrival.message_id)
        yield from self.store.release(
            consumer, [arrival.message_id], token=lease_token, delay_s=1.0
        )
        return Settled(Outcome.IN_PROGRESS)

    def _run_row(self, handler: Handler, arrival: Arrival, lease_token: str) -> Steps[Settled]:
        started, conflicts = time.monotonic(), 0
        while True:
            token = secrets.token_hex(16)
            claim = self.store.claim_leased(
                handler.consumer,
                [arrival.message_id],
                token=token,
                lease=lease_token,
                lock_timeout=self.limits.lock_timeout,
                idle_s=self._idle_s(handler),
                keep=handler.keeps_payload,
            )
            ran = yield from self._transaction(handler, [arrival], claim, token)
            if ran.end is End.COMMITTED:
                if ran.fresh:
                    return self._processed(handler, arrival, started)
                # the fence matched nothing: the lease ran out and the row is another's
                return Settled(Outcome.IN_PROGRESS)
            if ran.end in (End.CONFLICT, End.LOCKED) and conflicts < self.limits.conflict_retries:
                conflicts += 1
                if self.events:
                    self.events.emit(
                        TransactionRetried(
                            consumer=handler.consumer, code=ran.store.code if ran.store else None
                        )
                    )
                yield Wait(_CONFLICT_PAUSE_S * random.random() * conflicts)
                continue
            unclaimed = ran.end is End.CONFLICT and not ran.fresh
            if unclaimed or ran.end in (End.AMBIGUOUS, End.LOST, End.LOCKED):
                return (yield from self._released(handler, arrival, lease_token, started))
            failure = self._failure(handler, ran)
            recorded = yield from self._recorded(handler, arrival, failure, token=lease_token)
            return recorded or Settled(Outcome.IN_PROGRESS)

    def _released(
        self, handler: Handler, arrival: Arrival, lease_token: str, started: float
    ) -> Steps[Settled]:
        """Decide a doubt by the fenced release: it waits for a commit in flight, then matches nothing."""
        given_back = yield from self.persistently(
            lambda: self.store.release(
                handler.consumer, [arrival.message_id], token=lease_token, delay_s=1.0
            )
        )
        if given_back:
            return Settled(Outcome.DEFERRED)
        yield Begin()
        rows = yield from self.store.classify(handler.consumer, [arrival.message_id])
        yield Commit()
        row = rows.get(arrival.message_id)
        if row is not None and row.status == Status.PROCESSED:
            return self._processed(handler, arrival, started)
        return Settled(Outcome.IN_PROGRESS)

    def _run_untransacted(
        self, handler: Handler, arrival: Arrival, lease_token: str
    ) -> Steps[Settled]:
        """Run a handler outside any transaction and complete its row, fenced, afterwards."""
        started = time.monotonic()
        timeout = handler.options.timeout
        try:
            yield Invoke(_call(handler, arrival), timeout.total_seconds() if timeout else None)
        except Raised as raised:
            failure = failure_of(raised.error, raised.store, handler.options, self.limits)
            recorded = yield from self._recorded(handler, arrival, failure, token=lease_token)
            return recorded or Settled(Outcome.IN_PROGRESS)
        return (
            yield from self.persistently(
                lambda: self._completed(handler, arrival, lease_token, started)
            )
        )

    def _completed(
        self, handler: Handler, arrival: Arrival, lease_token: str, started: float
    ) -> Steps[Settled]:
        token = secrets.token_hex(16)
        ids = [arrival.message_id]
        claim = self.store.claim_leased(
            handler.consumer, ids, token=token, lease=lease_token, lock_timeout=self.limits.lock_timeout,
            idle_s=self._idle_s(handler), keep=handler.keeps_payload,
        )  # fmt: skip
        results = yield Begin(claim)
        fresh = self.store.claimed(claim, results)
        if fresh is None:
            rows = yield from self.store.classify(handler.consumer, ids)
            fresh = {own for own, row in rows.items() if row.token == token}
        if fresh:
            yield from self.store.complete(
                handler.consumer, ids, token=token, keep=handler.keeps_payload
            )
            yield Commit((self.store.close(token),))
            return self._processed(handler, arrival, started)
        yield Rollback()
        return Settled(Outcome.IN_PROGRESS)

    def replay(self, handler: Handler, arrival: Arrival) -> Steps[Settled]:
        """Run a processed message once more; when it fails its row stays `processed` (SEMANTICS 7.4)."""
        started, conflicts = time.monotonic(), 0
        while True:
            token = secrets.token_hex(16)
            claim = self.store.claim_replay(
                handler.consumer, [arrival.message_id], token=token, lock_timeout=self.limits.lock_timeout,
                idle_s=self._idle_s(handler),
            )  # fmt: skip
            ran = yield from self._transaction(handler, [arrival], claim, token)
            if ran.end is End.COMMITTED:
                if ran.fresh:
                    return self._processed(handler, arrival, started)
                return Settled(Outcome.IN_PROGRESS)
            if ran.end in (End.CONFLICT, End.LOCKED) and conflicts < self.limits.conflict_retries:
                conflicts += 1
                yield Wait(_CONFLICT_PAUSE_S * random.random() * conflicts)
                continue
            if ran.end in (End.AMBIGUOUS, End.LOST):
                raise _lost(ran.store)
            failure = self._failure(handler, ran)
            yield Begin(
                (self.store.attempt(handler.consumer, arrival, failure, status="replay failed"),)
            )
            yield Commit()
            return Settled(Outcome.FAILED, arrival.message.attempt)

    # -- when the database is away ------------------------------------------------------------

    def persistently(
        self,
        operation: Callable[[], Steps[T]],
        *,
        for_s: float | None = None,
        stop: Callable[[], bool] | None = None,
    ) -> Steps[T]:
        """Repeat an operation until the database answers; nothing is counted or acknowledged meanwhile.

        Args:
            for_s: give up after this many seconds without an answer; None never does.
            stop: asked before each wait; True gives up.

        Raises:
            StoreError: it gave up, or the error is none that waiting can cure.
        """
        paused_at: float | None = None
        pause_s = _UNAVAILABLE_PAUSE_S[0]
        while True:
            try:
                answer = yield from operation()
            except StoreError as error:
                yield Discard()
                if error.fault not in (
                    Fault.UNAVAILABLE,
                    Fault.CONFLICT,
                    Fault.LOCK_TIMEOUT,
                    Fault.PREPARED,
                    Fault.TIMEOUT,
                ):
                    raise
                now = time.monotonic()
                paused_at = paused_at or now
                if (for_s is not None and now - paused_at >= for_s) or (
                    stop is not None and stop()
                ):
                    raise
                wait_s = pause_s * random.uniform(0.5, 1.5)
                if self.events:
                    self.events.emit(ConsumptionPaused(reason=str(error), retry_in_s=wait_s))
                yield Wait(wait_s)
                pause_s = min(pause_s * 2, _UNAVAILABLE_PAUSE_S[1])
            else:
                if paused_at is not None and self.events:
                    self.events.emit(ConsumptionResumed(paused_s=time.monotonic() - paused_at))
                return answer


def _call(handler: Handler, work: Arrival | list[Arrival]) -> Callable[[Any], Any]:
    """The handler's call: bodies are decoded inside, so that a bad one is this message's failure."""
    function, transactional = handler.function, handler.options.transactional

    def call(tx: Any) -> Any:
        given = (
            [handler.bound(own) for own in work] if isinstance(work, list) else handler.bound(work)
        )
        return function(given, tx) if transactional else function(given)

    if not handler.is_async:
        return call

    async def call_async(tx: Any) -> Any:
        return await call(tx)

    return call_async


def _end_of_handler(raised: Raised) -> End:
    fault = raised.store.fault if raised.store else None
    if fault is Fault.UNAVAILABLE and raised.lost:
        return End.LOST
    if fault is Fault.CONFLICT:
        return End.CONFLICT
    return End.RAISED


def _end_of_commit(error: StoreError) -> End:
    if not error.definite:
        return End.AMBIGUOUS
    if error.fault is Fault.GUARD:
        return End.BROKEN
    if error.fault is Fault.CONFLICT:
        return End.CONFLICT
    if error.fault is Fault.UNAVAILABLE:
        return End.LOST
    return End.RAISED


def _lost(error: StoreError | None) -> StoreError:
    if error is not None and error.fault is Fault.UNAVAILABLE:
        return error
    return StoreUnavailable("The database connection was lost.", fault=Fault.UNAVAILABLE)
