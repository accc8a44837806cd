"""The path of a message: what follows each way its transaction can end.

Every path is a generator of steps, so that the same lines serve sync and async handlers, and every
statement boundary is a crash point. Chapter and verse: SEMANTICS 2 to 4.
"""

from __future__ import annotations

import random
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

from txbox.calls import handled
from txbox.errors import Fault, StoreError, StoreUnavailable
from txbox.events import (
    Events,
    MessageDead,
    MessageDeferred,
    MessageDuplicate,
    MessageFailed,
    MessageInFlight,
    MessageProcessed,
    MessageQuarantined,
    MessageWaits,
    SequenceGap,
    TransactionRetried,
)
from txbox.failure import BROKEN, failure_of
from txbox.handlers import Handler
from txbox.in_flight import InFlight
from txbox.message import Message
from txbox.outcome import Outcome, Status
from txbox.pace import Pace
from txbox.patience import persistently
from txbox.policy import Batching, Lease, Limits
from txbox.ran import End, Ran
from txbox.steps import Begin, Commit, Raised, Steps, Wait
from txbox.store import failures, leases
from txbox.store.codec import Arrival, Leased
from txbox.store.dialect import Dialect
from txbox.store.failures import Failure
from txbox.store.inbox import Existing, InboxStore
from txbox.transaction import HandlerTransaction

T = TypeVar("T")

_CONFLICT_PAUSE_S = 0.05
_RELEASED_S = 1.0
# a version whose predecessor is missing looks again this often; the predecessor's commit wakes it at once
_GAP_LOOK_S = 2.0
_AGAIN = (End.CONFLICT, End.AMBIGUOUS, End.LOST)


@dataclass(frozen=True, slots=True)
class Settled:
    """The outcome of one message for one consumer."""

    outcome: Outcome
    attempt: int = 0
    #: What the handler returned, as JSON, where it keeps that.
    result: bytes | None = None


# what nearly every message comes to
_AT_ONCE = Settled(Outcome.PROCESSED, 1)
_DUPLICATE = Settled(Outcome.DUPLICATE)


class Letters(Protocol):
    """What is staged when a message is given up."""

    def staged(
        self,
        own: Dialect,
        consumer: str,
        message: Message[Any],
        *,
        attempts: int,
        error_type: str,
    ) -> Steps[None]: ...


class InboxProtocol:
    """Carries messages of one app through its inbox."""

    def __init__(
        self,
        store: InboxStore,
        events: Events,
        limits: Limits,
        lease: Lease,
        *,
        batching: Batching | None = None,
        letters: Letters | None = None,
    ) -> None:
        self.letters = letters
        self.batching = batching or Batching()
        self.store = store
        self.events = events
        self.limits = limits
        self.lease = lease
        self.transaction = HandlerTransaction(
            store, limits, lease, batching=self.batching, dying=self._dying
        )
        self.in_flight = InFlight()
        self._paces: dict[tuple[str, int], Pace] = {}

    def pace(self, handler: Handler) -> Pace:
        """How this handler's transactions are sized, for all lanes of this process."""
        own = (handler.consumer, id(handler.function))
        pace = self._paces.get(own)
        if pace is None:
            batching = self.batching
            if not self.store.dialect.refuses_commit and not handler.options.batch:
                # nothing stops a handler's COMMIT there: it would commit its neighbours' claims too
                batching = replace(batching, messages=1)
            # two threads that come first together make two: the one kept is the one both find next
            pace = self._paces.setdefault(own, Pace(batching))
        return pace

    # -- deliveries ---------------------------------------------------------------------------

    def deliver(self, handler: Handler, arrivals: Sequence[Arrival]) -> Steps[dict[str, Settled]]:
        """Process deliveries whose ids differ; returns the outcome of each id.

        Ids that another thread of this process works on are waited for, up to the lock time-out.

        Guarantee: PROCESSED and the effects of the handler's transaction are one commit. After a
        crash anywhere, delivering again processes what was not processed, and nothing twice.
        """
        ids = [arrival.message_id for arrival in arrivals]
        if self.in_flight.enter_all(handler.consumer, ids):
            try:
                return (yield from self._claim_and_run(handler, arrivals))
            finally:
                self.in_flight.leave(handler.consumer, *ids)
        return (yield from self._deliver_what_is_free(handler, arrivals))

    def _deliver_what_is_free(
        self, handler: Handler, arrivals: Sequence[Arrival]
    ) -> Steps[dict[str, Settled]]:
        """Process first what nobody works on, then the others one by one: who waits for an id holds none."""
        consumer = handler.consumer
        settled: dict[str, Settled] = {}
        mine: list[Arrival] = []
        busy: list[Arrival] = []
        keys: set[str] = set()
        try:
            for arrival in arrivals:
                key = arrival.message.key if handler.options.in_order else None
                if key in keys or self.in_flight.enter(consumer, arrival.message_id) is not None:
                    # a message that another thread works on holds its key
                    busy.append(arrival)
                    if key is not None:
                        keys.add(key)
                else:
                    mine.append(arrival)
            if mine:
                settled.update((yield from self._claim_and_run(handler, mine)))
        finally:
            self.in_flight.leave(consumer, *(own.message_id for own in mine))
        held: set[str] = set()
        for arrival in busy:
            key, own_id = (
                arrival.message.key if handler.options.in_order else None,
                arrival.message_id,
            )
            if key in held or not (yield from self._entered(consumer, own_id)):
                settled[own_id] = self.held(handler, arrival)
                if key is not None:
                    held.add(key)
                continue
            try:
                settled.update((yield from self._claim_and_run(handler, [arrival])))
            finally:
                self.in_flight.leave(consumer, own_id)
            if key is not None and not settled[own_id].outcome.settles:
                held.add(key)
        return settled

    def _entered(self, consumer: str, message_id: str) -> Steps[bool]:
        deadline = time.monotonic() + self.limits.lock_timeout.total_seconds()
        while (holder := self.in_flight.enter(consumer, message_id)) is not None:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return False
            yield Wait(left_s, holder)
        return True

    def held(self, handler: Handler, arrival: Arrival) -> Settled:
        """The outcome of a message that another transaction holds, or whose key is held."""
        if self.events:
            self.events.emit(MessageInFlight(**_where(handler, arrival)))
        return Settled(Outcome.IN_PROGRESS)

    def _claim_and_run(
        self, handler: Handler, arrivals: Sequence[Arrival]
    ) -> Steps[dict[str, Settled]]:
        """Claim and run; retries conflicts, isolates the culprit of a batch, claims again when in doubt."""
        pace = self.pace(handler)
        waiting: list[Arrival] = list(arrivals)
        settled: dict[str, Settled] = {}
        tries, group = 0, self._group(handler, pace, len(waiting))
        if pace.looks_first:
            settled = yield from self._finished_before(handler, waiting)
            waiting = [arrival for arrival in waiting if arrival.message_id not in settled]
        while waiting:
            started = time.monotonic()
            ran = yield from self.transaction.fresh(handler, waiting, group)
            if ran.end is End.COMMITTED:
                pace.committed(len(waiting), time.monotonic() - started, len(ran.failed))
                pace.met(len(waiting), len(ran.existing))
                for arrival in waiting:
                    if arrival.message_id in ran.fresh:
                        settled[arrival.message_id] = self._ran(handler, arrival, started, ran)
                    elif row := ran.existing.get(arrival.message_id):
                        settled[arrival.message_id] = yield from self.met(handler, arrival, row)
                # an id that is neither fresh nor there was pruned between two statements: claim again
                waiting = [arrival for arrival in waiting if arrival.message_id not in settled]
                continue
            if ran.end is End.WAITS:
                behind = [own for own in waiting if own.message_id in ran.waiting]
                settled.update((yield from self._stored_behind(handler, behind)))
                # what was there already is met by the next claim
                waiting = [arrival for arrival in waiting if arrival.message_id not in settled]
                continue
            if len(waiting) > 1:
                if ran.end in (End.AMBIGUOUS, End.LOST) and not tries:
                    tries += 1
                    if (yield from self._may_try_again(handler, ran, tries)):
                        continue
                if ran.end is End.RAISED and not group and _divides(handler):
                    pace.failed(len(waiting))
                    group = pace.group or len(waiting)
                    continue
                if ran.end is End.BROKEN and (
                    left := (yield from self._left(handler, waiting, ran))
                ):
                    settled.update(left)
                    waiting = [arrival for arrival in waiting if arrival.message_id not in settled]
                    continue
                settled.update((yield from self._apart(handler, waiting, ran.end)))
                return settled
            if ran.end in _AGAIN:
                # a doubt is decided by claiming again on another connection, never by SELECT; while the
                # database is away that raises, and the budget is patience's
                tries += 1
                if (yield from self._may_try_again(handler, ran, tries)):
                    continue
            (arrival,) = waiting
            if ran.end is End.LOCKED:
                settled[arrival.message_id] = self.held(handler, arrival)
                return settled
            if ran.end is End.AMBIGUOUS or (ran.end in _AGAIN and not ran.fresh):
                # nothing of the handler's is known to have failed, so there is no attempt to record
                raise _lost(ran)
            # a handler that loses its connection each time, while the next one is there, is a failure too
            failure = self._failure(handler, ran)
            recorded = yield from self._recorded(handler, arrival, failure, token="")
            if recorded is not None:
                settled[arrival.message_id] = recorded
                return settled
            # the row is somebody else's by now: claim again, which says whose
        return settled

    def _finished_before(
        self, handler: Handler, arrivals: Sequence[Arrival]
    ) -> Steps[dict[str, Settled]]:
        """Look a batch up before it is claimed, when most of what came last had been finished before."""
        finished = yield from self.transaction.finished_before(handler, arrivals)
        self.pace(handler).met(len(arrivals), len(finished))
        if self.events:
            for arrival in arrivals:
                if arrival.message_id in finished:
                    self.events.emit(MessageDuplicate(**_where(handler, arrival)))
        return dict.fromkeys(finished, _DUPLICATE)

    def _group(self, handler: Handler, pace: Pace, messages: int) -> int:
        """How many messages of a batch share a savepoint at the first try; 0 for none."""
        if messages == 1 or not _divides(handler):
            return 0
        return 1 if self.store.dialect.cheap_savepoints else pace.group

    def _apart(
        self, handler: Handler, arrivals: Sequence[Arrival], end: End
    ) -> Steps[dict[str, Settled]]:
        """Divide a batch that failed, from left to right, until the culprit costs only itself.

        After a conflict each message is alone at once: halves would meet the same rows in the same order.
        """
        size = 1
        if end in (End.CONFLICT, End.LOCKED):
            self.pace(handler).conflicted(len(arrivals))
        elif end is End.RAISED:
            size = (len(arrivals) + 1) // 2
        settled: dict[str, Settled] = {}
        keys: set[str] = set()
        for at in range(0, len(arrivals), size):
            part: list[Arrival] = []
            for arrival in arrivals[at : at + size]:
                if handler.options.in_order and arrival.message.key in keys:
                    settled[arrival.message_id] = self.held(handler, arrival)
                else:
                    part.append(arrival)
            if not part:
                continue
            settled.update((yield from self._claim_and_run(handler, part)))
            keys.update(
                own.message.key
                for own in part
                if not settled[own.message_id].outcome.settles and own.message.key is not None
            )
        return settled

    def _left(
        self, handler: Handler, arrivals: Sequence[Arrival], ran: Ran, *, token: str = ""
    ) -> Steps[dict[str, Settled]]:
        """A handler left the transaction of its batch: what that makes unknown is dead, and never run again."""
        self.pace(handler).conflicted(len(arrivals))
        settled: dict[str, Settled] = {}
        for arrival in arrivals:
            if arrival.message_id in ran.unknown:
                recorded = yield from self._recorded(handler, arrival, BROKEN, token=token)
                if recorded is not None:
                    settled[arrival.message_id] = recorded
        return settled

    def _stored_behind(
        self, handler: Handler, arrivals: Sequence[Arrival]
    ) -> Steps[dict[str, Settled]]:
        """Store messages behind what they wait for; returns those that were stored."""
        by_version = handler.options.sequence is not None
        try:
            yield self.store.begin_bounded(self.limits.lock_timeout)
            fresh = yield from self.store.store(
                handler.consumer,
                arrivals,
                token=secrets.token_hex(16),
                delay_s=_GAP_LOOK_S if by_version else 0.0,
            )
            yield self.store.commit_bounded()
        except StoreError as error:
            if error.fault is not Fault.LOCK_TIMEOUT:
                raise
            yield from self.store.lock_timed_out()
            return {arrival.message_id: self.held(handler, arrival) for arrival in arrivals}
        if self.events:
            for arrival in arrivals:
                if arrival.message_id in fresh:
                    self.events.emit(MessageWaits(**_where(handler, arrival)))
        return dict.fromkeys(fresh, Settled(Outcome.DEFERRED))

    def _may_try_again(self, handler: Handler, ran: Ran, tries: int) -> Steps[bool]:
        """Wait a moment outside of any transaction, unless the budget is spent."""
        if tries > self.limits.conflict_retries:
            return False
        if self.events and ran.end is not End.AMBIGUOUS:
            code = ran.store.code if ran.store else None
            self.events.emit(TransactionRetried(consumer=handler.consumer, code=code))
        yield Wait(_CONFLICT_PAUSE_S * random.random() * tries)
        return True

    # -- how it ended -------------------------------------------------------------------------

    def _ran(self, handler: Handler, arrival: Arrival, started: float, ran: Ran) -> Settled:
        """The outcome of a message whose transaction has committed."""
        recorded = ran.failed.get(arrival.message_id) if ran.failed else None
        if recorded is None:
            return self._processed(handler, arrival, started, ran)
        return self._gave_up(
            handler, arrival, recorded.failure, dead=recorded.dead, attempts=recorded.attempt
        )

    def _processed(
        self, handler: Handler, arrival: Arrival, started: float, ran: Ran | None = None
    ) -> Settled:
        attempt = arrival.message.attempt
        if self.events:
            if ran is not None and ran.gap is not None:
                self.events.emit(
                    SequenceGap(
                        **_where(handler, arrival),
                        expected=ran.gap,
                        sequence=arrival.message.sequence or 0,
                    )
                )
            self.events.emit(
                MessageProcessed(
                    consumer=handler.consumer,
                    message_id=arrival.message_id,
                    topic=arrival.message.topic,
                    attempt=attempt,
                    duration_s=time.monotonic() - started,
                )
            )
        result = ran.results.get(arrival.message_id) if ran is not None and ran.results else None
        if attempt == 1 and result is None:
            return _AT_ONCE
        return Settled(Outcome.PROCESSED, attempt, result)

    def met(self, handler: Handler, arrival: Arrival, row: Existing) -> Steps[Settled]:
        """Decide by the row that stands under this id (SEMANTICS 2.12)."""
        where = _where(handler, arrival)
        if row.differs(arrival.hash):
            yield from self.quarantine(
                handler.consumer, arrival.message, arrival.message_id, arrival.hash or b"",
                "Another payload came under an id that is known: the producer reuses ids, or a message was altered.",
            )  # fmt: skip
            return Settled(Outcome.QUARANTINED)
        if row.status in (Status.PROCESSED, Status.DEAD, Status.DISCARDED):
            if self.events:
                self.events.emit(MessageDuplicate(**where))
            result = None
            if handler.options.keep_result and row.status == Status.PROCESSED:
                result = yield from self.store.result(handler.consumer, arrival.message_id)
            return Settled(Outcome.DUPLICATE, result=result)
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
        row = yield from failures.record(
            self.store,
            handler.consumer,
            arrival,
            failure,
            handler.options.retry,
            token=token,
            dying=lambda row: self._dying(handler, arrival, failure, row.attempts),
        )
        if row is None:
            return None
        return self._gave_up(
            handler, arrival, failure, dead=row.status == Status.DEAD, attempts=row.attempts
        )

    def _gave_up(
        self, handler: Handler, arrival: Arrival, failure: Failure, *, dead: bool, attempts: int
    ) -> Settled:
        """The outcome of a failure that is on disk."""
        if self.events:
            where = _where(handler, arrival)
            first_line = failure.error.partition("\n")[0]
            if dead:
                self.events.emit(
                    MessageDead(
                        **where, attempt=attempts, error_type=failure.error_type, error=first_line
                    )
                )
            else:
                self.events.emit(
                    MessageFailed(
                        **where, attempt=attempts, error_type=failure.error_type, error=first_line,
                        retry_in_s=failure.delay_s or 0.0,
                    )
                )  # fmt: skip
        return Settled(Outcome.DEAD if dead else Outcome.FAILED, attempts)

    def _dying(
        self, handler: Handler, arrival: Arrival, failure: Failure, attempts: int
    ) -> Steps[None]:
        """What else is written in the transaction that makes a message dead."""
        if self.letters is not None and handler.options.dead_letter_topic is not None:
            yield from self.letters.staged(
                self.store.dialect,
                handler.consumer,
                replace(arrival.message, id=arrival.message_id),
                attempts=attempts,
                error_type=failure.error_type,
            )

    # -- from the table -----------------------------------------------------------------------

    def run_leased(self, handler: Handler, leased: Leased, lease_token: str) -> Steps[Settled]:
        """Process one row that this worker has leased.

        Guarantee: a worker whose lease was given to another can run the handler, it cannot commit.
        """
        consumer, arrival = handler.consumer, leased.arrival
        if not (yield from self._entered(consumer, arrival.message_id)):
            yield from self._given_back(handler, arrival, lease_token)
            return Settled(Outcome.IN_PROGRESS)
        try:
            if handler.options.transactional:
                return (yield from self._run_row(handler, arrival, lease_token))
            return (yield from self._run_untransacted(handler, arrival, lease_token))
        finally:
            self.in_flight.leave(consumer, arrival.message_id)

    def run_leased_many(
        self, handler: Handler, rows: Sequence[Leased], lease_token: str
    ) -> Steps[list[Settled]]:
        """Process rows that this worker has leased, in their order, in one transaction where that can be.

        Guarantee: as `run_leased`.
        """
        settled: dict[str, Settled] = {}
        free = [
            own.arrival
            for own in rows
            if self.in_flight.enter(handler.consumer, own.arrival.message_id) is None
        ]
        try:
            if len(free) > 1 and _divides(handler, batch=True) and not handler.options.in_order:
                settled = yield from self._run_rows(handler, free, lease_token)
        finally:
            self.in_flight.leave(handler.consumer, *[own.message_id for own in free])
        answers: list[Settled] = []
        for leased in rows:
            done = settled.get(leased.arrival.message_id)
            answers.append(done or (yield from self.run_leased(handler, leased, lease_token)))
        return answers

    def _run_rows(
        self, handler: Handler, arrivals: Sequence[Arrival], lease_token: str
    ) -> Steps[dict[str, Settled]]:
        """Run leased rows together; those that are missing from the answer are to be run alone."""
        pace = self.pace(handler)
        group = self._group(handler, pace, len(arrivals))
        while True:
            started = time.monotonic()
            ran = yield from self.transaction.leased(handler, arrivals, lease_token, group)
            if ran.end is End.COMMITTED:
                pace.committed(len(arrivals), time.monotonic() - started, len(ran.failed))
                return {
                    own.message_id: self._ran(handler, own, started, ran)
                    if own.message_id in ran.fresh
                    # the lease ran out and the row is another's
                    else Settled(Outcome.IN_PROGRESS)
                    for own in arrivals
                }
            if ran.end is End.AMBIGUOUS:
                settled: dict[str, Settled] = {}
                for own in arrivals:
                    settled[own.message_id] = yield from self._decided(
                        handler, own, lease_token, started
                    )
                return settled
            if ran.end in (End.CONFLICT, End.LOCKED):
                pace.conflicted(len(arrivals))
            if ran.end is End.BROKEN:
                return (yield from self._left(handler, arrivals, ran, token=lease_token))
            if ran.end is not End.RAISED or group or not _divides(handler):
                return {}
            pace.failed(len(arrivals))
            group = pace.group or len(arrivals)

    def _run_row(self, handler: Handler, arrival: Arrival, lease_token: str) -> Steps[Settled]:
        started, tries = time.monotonic(), 0
        while True:
            ran = yield from self.transaction.leased(handler, [arrival], lease_token)
            if ran.end is End.COMMITTED:
                if ran.fresh:
                    self.pace(handler).committed(1, time.monotonic() - started)
                    return self._processed(handler, arrival, started, ran)
                # the fence matched nothing: the lease ran out and the row is another's
                return Settled(Outcome.IN_PROGRESS)
            if ran.end is End.WAITS:
                yield from self._given_back(handler, arrival, lease_token, _GAP_LOOK_S)
                return Settled(Outcome.DEFERRED)
            if ran.end in (End.CONFLICT, End.LOCKED, End.LOST):
                tries += 1
                if (yield from self._may_try_again(handler, ran, tries)):
                    continue
            unclaimed = ran.end in _AGAIN and not ran.fresh
            if unclaimed or ran.end in (End.AMBIGUOUS, End.LOCKED):
                return (yield from self._decided(handler, arrival, lease_token, started))
            failure = self._failure(handler, ran)
            recorded = yield from self._recorded(handler, arrival, failure, token=lease_token)
            return recorded or Settled(Outcome.IN_PROGRESS)

    def _given_back(
        self, handler: Handler, arrival: Arrival, lease_token: str, delay_s: float = _RELEASED_S
    ) -> Steps[int]:
        return self.persistently(
            lambda: leases.release(
                self.store,
                handler.consumer,
                [arrival.message_id],
                token=lease_token,
                delay_s=delay_s,
            )
        )

    def _decided(
        self, handler: Handler, arrival: Arrival, lease_token: str, started: float
    ) -> Steps[Settled]:
        """Decide a doubt by the fenced release: it waits for a commit in flight, then matches nothing."""
        if (yield from self._given_back(handler, arrival, lease_token)):
            return Settled(Outcome.DEFERRED)
        return (yield from self._as_it_stands(handler, arrival, started))

    def _as_it_stands(self, handler: Handler, arrival: Arrival, started: float) -> Steps[Settled]:
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
        try:
            returned = yield from handled(handler, [arrival])
        except Raised as raised:
            failure = failure_of(raised.error, raised.store, handler.options, self.limits)
            recorded = yield from self._recorded(handler, arrival, failure, token=lease_token)
            return recorded or Settled(Outcome.IN_PROGRESS)
        return (
            yield from self.persistently(
                lambda: self._completed(handler, arrival, lease_token, started, returned)
            )
        )

    def _completed(
        self,
        handler: Handler,
        arrival: Arrival,
        lease_token: str,
        started: float,
        returned: list[Any],
    ) -> Steps[Settled]:
        ran = yield from self.transaction.finished(handler, arrival, lease_token, returned)
        if ran.end is not End.COMMITTED:
            raise _lost(ran)
        if ran.fresh:
            return self._processed(handler, arrival, started, ran)
        # another's by now, or committed by the COMMIT whose answer was lost
        return (yield from self._as_it_stands(handler, arrival, started))

    def replay(self, handler: Handler, arrival: Arrival) -> Steps[Settled]:
        """Run a processed message once more; when it fails its row stays `processed` (SEMANTICS 7.4)."""
        started, tries = time.monotonic(), 0
        while True:
            ran = yield from self.transaction.replayed(handler, arrival)
            if ran.end is End.COMMITTED:
                if ran.fresh:
                    return self._processed(handler, arrival, started)
                return Settled(Outcome.IN_PROGRESS)
            if ran.end in (End.CONFLICT, End.LOCKED):
                tries += 1
                if (yield from self._may_try_again(handler, ran, tries)):
                    continue
            if ran.end in (End.AMBIGUOUS, End.LOST, End.LOCKED):
                raise _lost(ran)
            failure = self._failure(handler, ran)
            yield Begin(
                (
                    failures.attempt(
                        self.store, handler.consumer, arrival, failure, status="replay failed"
                    ),
                )
            )
            yield Commit()
            return Settled(Outcome.FAILED, arrival.message.attempt)

    def persistently(
        self,
        operation: Callable[[], Steps[T]],
        *,
        for_s: float | None = None,
        stop: Callable[[], bool] | None = None,
    ) -> Steps[T]:
        """Repeat an operation until the database answers; see `patience.persistently`."""
        return persistently(operation, self.events, for_s=for_s, stop=stop)


def _divides(handler: Handler, *, batch: bool = False) -> bool:
    """Say whether messages of a batch can be told apart under savepoints, or run in a batch at all."""
    options = handler.options
    return not options.in_order and options.transactional and (batch or not options.batch)


def _where(handler: Handler, arrival: Arrival) -> dict[str, str]:
    return {
        "consumer": handler.consumer,
        "message_id": arrival.message_id,
        "topic": arrival.message.topic,
    }


def _lost(ran: Ran) -> StoreError:
    """The error for a transaction that a wait may cure: its own, or the loss of its connection."""
    if ran.store is not None and ran.end is not End.AMBIGUOUS:
        return ran.store
    return StoreUnavailable(
        "The database connection was lost.",
        fault=Fault.UNAVAILABLE,
        code=ran.store.code if ran.store else None,
    )
