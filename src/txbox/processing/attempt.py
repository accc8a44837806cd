"""One message or batch, from its claim to its outcome: what follows each way that its transaction can end.

Every path is a generator of steps, so that the same lines serve sync and async handlers, and every
statement boundary is a crash point. Chapter and verse: SEMANTICS 2 to 4.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from txbox.errors import Fault, StoreError
from txbox.events import Events, MessageDuplicate, MessageWaits
from txbox.handlers import Handler
from txbox.outcome import DUPLICATE, Answer, Outcome, Status
from txbox.policy import Batching, Lease, Limits
from txbox.processing.batch_size import BatchSizes, divides
from txbox.processing.failure import failure_of
from txbox.processing.in_flight import AGAIN, GAP_LOOK_S, Holder, InFlight, Turns
from txbox.processing.patience import persistently
from txbox.processing.recorder import Letters, Recorder, lost, where
from txbox.processing.transaction import End, HandlerTransaction, TransactionResult, handled
from txbox.steps import Begin, Commit, Raised, Steps
from txbox.store import failures, leases
from txbox.store.codec import Arrival, Leased
from txbox.store.inbox import InboxStore


class Deliveries:
    """Runs what a source delivers in the transaction that claims it."""

    def __init__(
        self,
        transaction: HandlerTransaction,
        recorder: Recorder,
        batch_sizes: BatchSizes,
        turns: Turns,
    ) -> None:
        self.transaction = transaction
        self._recorder = recorder
        self._batch_sizes = batch_sizes
        self._turns = turns
        self._in_flight = turns.in_flight
        self._store = recorder.store
        self._events = recorder.events
        self._limits = recorder.limits

    def deliver(
        self, handler: Handler, arrivals: Sequence[Arrival], holder: Holder | None = None
    ) -> Steps[dict[str, Answer]]:
        """Process deliveries whose ids differ; returns the outcome of each id.

        Ids that another thread of this process works on are waited for, up to the lock time-out.

        Args:
            holder: who runs one batch behind another, see `in_flight.Holder`.

        Guarantee: PROCESSED and the effects of the handler's transaction are one commit. After a
        crash anywhere, delivering again processes what was not processed, and nothing twice.
        """
        ids = [arrival.message_id for arrival in arrivals]
        if self._in_flight.enter_all(handler.consumer, ids, holder):
            try:
                return (yield from self._claim_and_run(handler, arrivals))
            finally:
                self._in_flight.leave(handler.consumer, *ids, holder=holder)
        return (yield from self._deliver_what_is_free(handler, arrivals, holder))

    def _deliver_what_is_free(
        self, handler: Handler, arrivals: Sequence[Arrival], holder: Holder | None
    ) -> Steps[dict[str, Answer]]:
        """Process first what nobody works on, then the others one by one: who waits for an id holds none."""
        consumer = handler.consumer
        settled: dict[str, Answer] = {}
        mine: list[Arrival] = []
        busy: list[Arrival] = []
        keys: set[str] = set()
        try:
            for arrival in arrivals:
                key = arrival.message.key if handler.options.in_order else None
                if (
                    key in keys
                    or self._in_flight.enter(consumer, arrival.message_id, holder) is not None
                ):
                    # a message that another thread works on holds its key
                    busy.append(arrival)
                    if key is not None:
                        keys.add(key)
                else:
                    mine.append(arrival)
            if mine:
                settled.update((yield from self._claim_and_run(handler, mine)))
        finally:
            self._in_flight.leave(
                consumer, *[arrival.message_id for arrival in mine], holder=holder
            )
        held: set[str] = set()
        for arrival in busy:
            key, own_id = (
                arrival.message.key if handler.options.in_order else None,
                arrival.message_id,
            )
            if key in held or not (yield from self._turns.entered(consumer, own_id, holder)):
                settled[own_id] = self._recorder.held(handler, arrival)
                if key is not None:
                    held.add(key)
                continue
            try:
                settled.update((yield from self._claim_and_run(handler, [arrival])))
            finally:
                self._in_flight.leave(consumer, own_id, holder=holder)
            if key is not None and not settled[own_id].outcome.settles:
                held.add(key)
        return settled

    def _claim_and_run(
        self, handler: Handler, arrivals: Sequence[Arrival]
    ) -> Steps[dict[str, Answer]]:
        if len(arrivals) == 1:
            return self._run_alone(handler, arrivals[0])
        return self._run_together(handler, arrivals)

    def _run_alone(self, handler: Handler, arrival: Arrival) -> Steps[dict[str, Answer]]:
        """Claim and run one message; retries conflicts, claims again when in doubt, records a failure."""
        tries = 0
        while True:
            ran = yield from self.transaction.fresh(handler, [arrival])
            if ran.end is End.COMMITTED:
                self._batch_sizes.of(handler).met(1, 1 - len(ran.fresh))
                if settled := (yield from self._committed(handler, [arrival], ran)):
                    return settled
                continue
            if ran.end is End.WAITS:
                if settled := (yield from self._stored_behind(handler, [arrival])):
                    return settled
                # it is there already, which the next claim meets
                continue
            if ran.end in AGAIN:
                # a doubt is decided by claiming again on another connection, never by SELECT; while the
                # database is away that raises, and the budget is patience's
                tries += 1
                if (yield from self._turns.again(handler, ran, tries)):
                    continue
            if ran.end is End.LOCKED:
                return {arrival.message_id: self._recorder.held(handler, arrival)}
            if ran.end is End.AMBIGUOUS or (ran.end in AGAIN and not ran.fresh):
                # nothing of the handler's is known to have failed, so there is no attempt to record
                raise lost(ran)
            # a handler that loses its connection each time, while the next one is there, is a failure too
            failure = self._recorder.failure(handler, ran)
            recorded = yield from self._recorder.recorded(handler, arrival, failure, token="")
            if recorded is not None:
                return {arrival.message_id: recorded}
            # the row is somebody else's by now, or that of a COMMIT which took effect whatever was answered:
            # claim again, which says whose

    def _run_together(
        self, handler: Handler, arrivals: Sequence[Arrival]
    ) -> Steps[dict[str, Answer]]:
        """Claim and run a batch; isolates the culprit of one that fails, whose neighbours go on."""
        batch_size = self._batch_sizes.of(handler)
        waiting: list[Arrival] = list(arrivals)
        settled: dict[str, Answer] = {}
        group, doubted = self._batch_sizes.group(handler, batch_size, len(waiting)), False
        if looked := batch_size.looks_first and self.transaction.looks_up(handler, waiting):
            settled = yield from self._finished_before(handler, waiting)
            waiting = [arrival for arrival in waiting if arrival.message_id not in settled]
        while len(waiting) > 1:
            ran = yield from self.transaction.fresh(handler, waiting, group)
            if ran.end is End.BROKEN:
                batch_size.conflicted(len(waiting))
            if ran.end is End.COMMITTED:
                if not looked:
                    batch_size.met(len(waiting), len(waiting) - len(ran.fresh))
                settled.update((yield from self._committed(handler, waiting, ran)))
            elif ran.end is End.WAITS:
                behind = [arrival for arrival in waiting if arrival.message_id in ran.waiting]
                settled.update((yield from self._stored_behind(handler, behind)))
            elif (
                ran.end in (End.AMBIGUOUS, End.LOST)
                and not doubted
                and (yield from self._turns.again(handler, ran, 1))
            ):
                doubted = True
            elif ran.end is End.RAISED and not group and divides(handler):
                batch_size.failed(len(waiting))
                group = batch_size.group or len(waiting)
            elif ran.end is End.BROKEN and (
                left := (yield from self._recorder.left(handler, waiting, ran))
            ):
                settled.update(left)
            else:
                settled.update((yield from self._apart(handler, waiting, ran.end)))
            waiting = [arrival for arrival in waiting if arrival.message_id not in settled]
        for arrival in waiting:
            settled.update((yield from self._run_alone(handler, arrival)))
        return settled

    def _committed(
        self, handler: Handler, arrivals: Sequence[Arrival], ran: TransactionResult
    ) -> Steps[dict[str, Answer]]:
        """The outcome of each message; an id that is missing was pruned between two statements: claim again."""
        batch_size = self._batch_sizes.of(handler)
        batch_size.committed(len(arrivals), time.monotonic() - ran.claimed_at, len(ran.failed))
        settled: dict[str, Answer] = {}
        for arrival in arrivals:
            if arrival.message_id in ran.fresh:
                settled[arrival.message_id] = self._recorder.ran(handler, arrival, ran)
            elif row := ran.existing.get(arrival.message_id):
                settled[arrival.message_id] = yield from self._recorder.met(handler, arrival, row)
        return settled

    def _finished_before(
        self, handler: Handler, arrivals: Sequence[Arrival]
    ) -> Steps[dict[str, Answer]]:
        """Look a batch up before it is claimed, when most of what came last had been finished before."""
        finished = yield from self.transaction.finished_before(handler, arrivals)
        self._batch_sizes.of(handler).met(len(arrivals), len(finished))
        if self._events:
            for arrival in arrivals:
                if arrival.message_id in finished:
                    self._events.emit(MessageDuplicate(**where(handler, arrival)))
        return dict.fromkeys(finished, DUPLICATE)

    def _apart(
        self, handler: Handler, arrivals: Sequence[Arrival], end: End
    ) -> Steps[dict[str, Answer]]:
        """Divide a batch that failed, from left to right, until the culprit costs only itself.

        After a conflict each message is alone at once: halves would meet the same rows in the same order.
        """
        size = 1
        if end in (End.CONFLICT, End.LOCKED):
            self._batch_sizes.of(handler).conflicted(len(arrivals))
        elif end in (End.RAISED, End.REFUSED):
            size = (len(arrivals) + 1) // 2
        settled: dict[str, Answer] = {}
        keys: set[str] = set()
        for at in range(0, len(arrivals), size):
            part: list[Arrival] = []
            for arrival in arrivals[at : at + size]:
                if handler.options.in_order and arrival.message.key in keys:
                    settled[arrival.message_id] = self._recorder.held(handler, arrival)
                else:
                    part.append(arrival)
            if not part:
                continue
            settled.update((yield from self._claim_and_run(handler, part)))
            keys.update(
                arrival.message.key
                for arrival in part
                if not settled[arrival.message_id].outcome.settles
                and arrival.message.key is not None
            )
        return settled

    def _stored_behind(
        self, handler: Handler, arrivals: Sequence[Arrival]
    ) -> Steps[dict[str, Answer]]:
        """Store messages behind what they wait for; returns those that were stored."""
        by_version = handler.options.sequence is not None
        try:
            token, delay_s = secrets.token_hex(16), GAP_LOOK_S if by_version else 0.0
            storing = self._store.storing(handler.consumer, arrivals, token=token, delay_s=delay_s)
            results = yield self._store.begin_bounded(self._limits.lock_timeout, storing)
            fresh = yield from self._store.stored(
                handler.consumer, arrivals, results[-1], token=token
            )
            yield self._store.commit_bounded()
        except StoreError as error:
            if error.fault is not Fault.LOCK_TIMEOUT:
                raise
            yield from self._store.lock_timed_out()
            return {
                arrival.message_id: self._recorder.held(handler, arrival) for arrival in arrivals
            }
        if self._events:
            for arrival in arrivals:
                if arrival.message_id in fresh:
                    self._events.emit(MessageWaits(**where(handler, arrival)))
        return dict.fromkeys(fresh, Answer(Outcome.DEFERRED))


_RELEASED_S = 1.0


class TableRows:
    """Runs rows that stand in the table; whoever holds a row's lease token may finish it."""

    def __init__(
        self,
        transaction: HandlerTransaction,
        recorder: Recorder,
        batch_sizes: BatchSizes,
        turns: Turns,
    ) -> None:
        self.transaction = transaction
        self._recorder = recorder
        self._batch_sizes = batch_sizes
        self._turns = turns
        self._in_flight = turns.in_flight
        self._store = recorder.store
        self._events = recorder.events
        self._limits = recorder.limits

    def run_leased(self, handler: Handler, leased: Leased, lease_token: str) -> Steps[Answer]:
        """Process one row that this worker has leased.

        Guarantee: a worker whose lease was given to another can run the handler, it cannot commit.
        """
        consumer, arrival = handler.consumer, leased.arrival
        if not (yield from self._turns.entered(consumer, arrival.message_id)):
            yield from self._given_back(handler, arrival, lease_token)
            return Answer(Outcome.IN_PROGRESS)
        try:
            if handler.options.transactional:
                return (yield from self._run_row(handler, arrival, lease_token))
            return (yield from self._run_untransacted(handler, arrival, lease_token))
        finally:
            self._in_flight.leave(consumer, arrival.message_id)

    def run_leased_many(
        self, handler: Handler, rows: Sequence[Leased], lease_token: str
    ) -> Steps[list[Answer]]:
        """Process rows that this worker has leased, in their order, in one transaction where that can be.

        Guarantee: as `run_leased`.
        """
        settled: dict[str, Answer] = {}
        free = [
            leased.arrival
            for leased in rows
            if self._in_flight.enter(handler.consumer, leased.arrival.message_id) is None
        ]
        try:
            if len(free) > 1 and divides(handler, batch=True) and not handler.options.in_order:
                settled = yield from self._run_rows(handler, free, lease_token)
        finally:
            self._in_flight.leave(handler.consumer, *[arrival.message_id for arrival in free])
        answers: list[Answer] = []
        for leased in rows:
            done = settled.get(leased.arrival.message_id)
            answers.append(done or (yield from self.run_leased(handler, leased, lease_token)))
        return answers

    def _run_rows(
        self, handler: Handler, arrivals: Sequence[Arrival], lease_token: str
    ) -> Steps[dict[str, Answer]]:
        """Run leased rows together; those that are missing from the answer are to be run alone."""
        batch_size = self._batch_sizes.of(handler)
        group = self._batch_sizes.group(handler, batch_size, len(arrivals))
        while True:
            started = time.monotonic()
            ran = yield from self.transaction.leased(handler, arrivals, lease_token, group)
            if ran.end is End.COMMITTED:
                batch_size.committed(
                    len(arrivals), time.monotonic() - ran.claimed_at, len(ran.failed)
                )
                return {
                    arrival.message_id: self._recorder.ran(handler, arrival, ran)
                    if arrival.message_id in ran.fresh
                    # the lease ran out and the row is another's
                    else Answer(Outcome.IN_PROGRESS)
                    for arrival in arrivals
                }
            if ran.end is End.AMBIGUOUS:
                settled: dict[str, Answer] = {}
                for arrival in arrivals:
                    settled[arrival.message_id] = yield from self._decided(
                        handler, arrival, lease_token, started
                    )
                return settled
            if ran.end in (End.CONFLICT, End.LOCKED):
                batch_size.conflicted(len(arrivals))
            if ran.end is End.BROKEN:
                batch_size.conflicted(len(arrivals))
                return (yield from self._recorder.left(handler, arrivals, ran, token=lease_token))
            if ran.end is not End.RAISED or group or not divides(handler):
                return {}
            batch_size.failed(len(arrivals))
            group = batch_size.group or len(arrivals)

    def _run_row(self, handler: Handler, arrival: Arrival, lease_token: str) -> Steps[Answer]:
        started, tries = time.monotonic(), 0
        while True:
            ran = yield from self.transaction.leased(handler, [arrival], lease_token)
            if ran.end is End.COMMITTED:
                if ran.fresh:
                    self._batch_sizes.of(handler).committed(1, time.monotonic() - ran.claimed_at)
                    return self._recorder.processed(handler, arrival, started, ran)
                # the fence matched nothing: the lease ran out and the row is another's
                return Answer(Outcome.IN_PROGRESS)
            if ran.end is End.WAITS:
                yield from self._given_back(handler, arrival, lease_token, GAP_LOOK_S)
                return Answer(Outcome.DEFERRED)
            if ran.end in (End.CONFLICT, End.LOCKED, End.LOST):
                tries += 1
                if (yield from self._turns.again(handler, ran, tries)):
                    continue
            unclaimed = ran.end in AGAIN and not ran.fresh
            if unclaimed or ran.end in (End.AMBIGUOUS, End.LOCKED):
                return (yield from self._decided(handler, arrival, lease_token, started))
            failure = self._recorder.failure(handler, ran)
            recorded = yield from self._recorder.recorded(
                handler, arrival, failure, token=lease_token
            )
            if recorded is None and ran.end is End.REFUSED:
                # it took effect, whatever was answered
                return (yield from self._as_it_stands(handler, arrival, started))
            return recorded or Answer(Outcome.IN_PROGRESS)

    def _given_back(
        self, handler: Handler, arrival: Arrival, lease_token: str, delay_s: float = _RELEASED_S
    ) -> Steps[int]:
        return persistently(
            lambda: leases.release(
                self._store,
                handler.consumer,
                [arrival.message_id],
                token=lease_token,
                delay_s=delay_s,
            ),
            self._events,
            consumer=handler.consumer,
        )

    def _decided(
        self, handler: Handler, arrival: Arrival, lease_token: str, started: float
    ) -> Steps[Answer]:
        """Decide a doubt by the fenced release: it waits for a commit in flight, then matches nothing."""
        if (yield from self._given_back(handler, arrival, lease_token)):
            return Answer(Outcome.DEFERRED)
        return (yield from self._as_it_stands(handler, arrival, started))

    def _as_it_stands(self, handler: Handler, arrival: Arrival, started: float) -> Steps[Answer]:
        yield Begin()
        rows = yield from self._store.classify(handler.consumer, [arrival.message_id])
        yield Commit()
        row = rows.get(arrival.message_id)
        if row is not None and row.status == Status.PROCESSED:
            return self._recorder.processed(handler, arrival, started)
        return Answer(Outcome.IN_PROGRESS)

    def _run_untransacted(
        self, handler: Handler, arrival: Arrival, lease_token: str
    ) -> Steps[Answer]:
        """Run a handler outside any transaction and complete its row, fenced, afterwards."""
        started = time.monotonic()
        try:
            returned = yield from handled(handler, [arrival])
        except Raised as raised:
            failure = failure_of(raised.error, raised.database_error, handler.options, self._limits)
            recorded = yield from self._recorder.recorded(
                handler, arrival, failure, token=lease_token
            )
            return recorded or Answer(Outcome.IN_PROGRESS)
        return (
            yield from persistently(
                lambda: self._completed(handler, arrival, lease_token, started, returned),
                self._events,
                consumer=handler.consumer,
            )
        )

    def _completed(
        self,
        handler: Handler,
        arrival: Arrival,
        lease_token: str,
        started: float,
        returned: list[Any],
    ) -> Steps[Answer]:
        ran = yield from self.transaction.finished(handler, arrival, lease_token, returned)
        if ran.end is not End.COMMITTED:
            raise lost(ran)
        if ran.fresh:
            return self._recorder.processed(handler, arrival, started, ran)
        # another's by now, or committed by the COMMIT whose answer was lost
        return (yield from self._as_it_stands(handler, arrival, started))

    def replay(self, handler: Handler, arrival: Arrival) -> Steps[Answer]:
        """Run a processed message once more; when it fails its row stays `processed` (SEMANTICS 7.4)."""
        started, tries = time.monotonic(), 0
        while True:
            ran = yield from self.transaction.replayed(handler, arrival)
            if ran.end is End.COMMITTED:
                if ran.fresh:
                    return self._recorder.processed(handler, arrival, started)
                return Answer(Outcome.IN_PROGRESS)
            if ran.end in (End.CONFLICT, End.LOCKED):
                tries += 1
                if (yield from self._turns.again(handler, ran, tries)):
                    continue
            if ran.end in (End.AMBIGUOUS, End.LOST, End.LOCKED):
                raise lost(ran)
            failure = self._recorder.failure(handler, ran)
            yield Begin(
                (
                    failures.attempt(
                        self._store, handler.consumer, arrival, failure, status="replay failed"
                    ),
                )
            )
            yield Commit()
            return Answer(Outcome.FAILED, arrival.message.attempt)


T = TypeVar("T")


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
        batching = batching or Batching()
        self.store = store
        self.events = events
        self.limits = limits
        self.lease = lease
        self.in_flight = InFlight()
        self.batch_sizes = BatchSizes(store, batching)
        recorder = Recorder(store, events, limits, letters)
        transaction = HandlerTransaction(
            store, limits, lease, batching=batching, dying=recorder.dying
        )
        turns = Turns(self.in_flight, limits, events)
        self.deliveries = Deliveries(transaction, recorder, self.batch_sizes, turns)
        self.rows = TableRows(transaction, recorder, self.batch_sizes, turns)
        # bound, not wrapped: every message passes here
        self.deliver = self.deliveries.deliver
        self.run_leased = self.rows.run_leased
        self.run_leased_many = self.rows.run_leased_many
        self.replay = self.rows.replay
        self.met = recorder.met
        self.held = recorder.held
        self.quarantine = recorder.quarantine

    def persistently(
        self,
        operation: Callable[[], Steps[T]],
        *,
        consumer: str | None = None,
        for_s: float | None = None,
        stop: Callable[[], bool] | None = None,
    ) -> Steps[T]:
        """Repeat an operation until the database answers; see `patience.persistently`."""
        return persistently(operation, self.events, consumer=consumer, for_s=for_s, stop=stop)
