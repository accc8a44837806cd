"""One message or batch, from its claim to its outcome: run the transaction, then act on how it ended.

New, leased and replayed messages share this loop, sync and async. Keeps promises 2 to 4.
"""

from __future__ import annotations

import math
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from txbox.alerts import Alerting, quarantined
from txbox.boundaries import Boundary, is_contents
from txbox.connections.base import connection_lost, forgets_parent
from txbox.connections.settings import Settings
from txbox.errors import Fault, StoreError, UnusableMessage
from txbox.events import (
    Events,
    HandlerRunsAlone,
    MessageDeferred,
    MessageDuplicate,
    MessageEvent,
    MessageInFlight,
    MessageProcessed,
    MessageQuarantined,
    MessageWaits,
    SequenceGap,
    TransactionCommitted,
)
from txbox.handlers import Handler
from txbox.outbox.dead_letters import DeadLetters
from txbox.outcome import DUPLICATE, Answer, Outcome, Status
from txbox.policy import Batching, Lease, Limits
from txbox.processing.calls import handled
from txbox.processing.failure import BROKEN, Recorder, escaped, is_of_content, message_fields
from txbox.processing.transaction import NEW, Claim, End, HandlerTransaction, TransactionResult
from txbox.processing.waiting import Holder, Waiting
from txbox.session import Raised, Session
from txbox.store import leases
from txbox.store import schema as tables
from txbox.store.codec import Arrival, Leased, quarantine_hash
from txbox.store.dialect import dialect
from txbox.store.inbox import AGAIN_MAX, Existing, Failure, InboxStore, out_of_sight

# when a row is due again that was released because another thread works on its id
_RELEASED_S = 1.0
# when a version is due again whose predecessor is missing, unless the predecessor's commit wakes it first
_GAP_LOOK_S = 2.0
# of the payload of a quarantined message, when more of it cannot be written
_LITTLE_BYTES = 64 * 1024

# nearly every message's answer
_PROCESSED = Answer(Outcome.PROCESSED, 1)
_NOT_OURS = Answer(Outcome.IN_PROGRESS)


class InboxProtocol:
    """Takes messages of one app through its inbox.

    Args:
        letters: stages the dead letters of dead messages.
        alerting: stages the alerts about them, and about what is quarantined.
        settings: what tells which statements set something; asked for late, as Django's settings may be.
    """

    def __init__(
        self,
        store: InboxStore,
        events: Events,
        limits: Limits,
        lease: Lease,
        *,
        batching: Batching | None = None,
        letters: DeadLetters | None = None,
        alerting: Alerting | None = None,
        settings: Callable[[], Settings | None] = lambda: None,
    ) -> None:
        batching = batching or Batching()
        self.store = store
        self.events = events
        self.limits = limits
        self.lease = lease
        self.batch_sizes = BatchSizes(store, batching)
        self.waiting = Waiting(limits, events)
        self.in_flight = self.waiting.in_flight
        self.with_retries = self.waiting.with_retries
        self._recorder = recorder = Recorder(store, events, limits, letters, alerting)
        self._alerting = alerting
        self.contain = recorder.contain
        self.transaction = HandlerTransaction(store, limits, lease, recorder, batching=batching)

        self._settings_of = settings
        self._settings: Settings | None = None
        #: The schema has been checked.
        self.checked = False

    async def check_schema(self, db: Session) -> None:
        """Check that this release can work with the tables, and remember which schema they are in.

        Raises:
            SchemaError: the message contains the command to run.
        """
        current = self.store.dialect
        state = await tables.check(db, current)
        if state.schema is not None:
            # qualify table names from now on, so that a handler's search_path cannot hide them
            self.store.dialect = dialect(current.name, state.schema)
        self._settings = self._settings_of()
        if self._settings is not None and time.monotonic() >= self._settings.stale_at:
            await self._read_setters(db, self._settings)
        self.store.columns.encoding = state.encoding
        self.checked = True

    async def _read_setters(self, db: Session, settings: Settings) -> None:
        """Read which functions and tables set something, so that statements that use them are recognised."""
        rows: Sequence[Sequence[Any]] = ()
        queries = [name for name in ("may_set", "setters") if self.store.dialect.has(name)]
        for name in queries:
            rows = (await db.alone(self.store.dialect.statement(name))).rows
            if not rows:
                break
        settings.learn(rows)

    # -- entry points -------------------------------------------------------------------------

    async def deliver(
        self,
        db: Session,
        handler: Handler,
        arrivals: Sequence[Arrival],
        holder: Holder | None = None,
        claim: Claim = NEW,
    ) -> dict[str, Answer]:
        """Process messages with different ids; returns the answer for each id.

        Waits, up to the lock timeout, for ids that another thread of this process works on.

        Args:
            holder: of ids, for a lane that runs one batch behind another; see `waiting.Holder`.

        Guarantee: PROCESSED and the effects of the handler's transaction are one commit. After a
        crash anywhere, delivering again processes what was not processed, and nothing twice.
        """
        if len(arrivals) == 1 and claim is NEW and handler.plain:
            return {
                arrivals[0].message_id: await self.deliver_one(db, handler, arrivals[0], holder)
            }
        ids = [arrival.message_id for arrival in arrivals]
        if self.in_flight.enter_all(handler.consumer, ids, holder):
            try:
                return await self._run(db, handler, arrivals, claim)
            finally:
                self.in_flight.leave(handler.consumer, *ids, holder=holder)
        return await self._deliver_free_first(db, handler, arrivals, holder, claim)

    async def deliver_one(
        self, db: Session, handler: Handler, arrival: Arrival, holder: Holder | None = None
    ) -> Answer:
        """`deliver` for one new message of a handler that is `plain`.

        The road of nearly all messages: committed at the first try. Whatever else becomes of that try is decided
        where it is for all others, in the loop.
        """
        consumer, message_id, arrivals = handler.consumer, arrival.message_id, (arrival,)
        if not self.in_flight.enter_all(consumer, (message_id,), holder):
            return (await self._deliver_free_first(db, handler, arrivals, holder, NEW))[message_id]
        try:
            if self._settings is not None and time.monotonic() >= self._settings.stale_at:
                # may fail as anything in the loop may
                return (await self._run(db, handler, arrivals, NEW))[message_id]
            try:
                ran = await self.transaction.once(db, handler, arrival)
            except Exception as error:  # noqa: BLE001  # raised again in the loop, which contains it
                return (await self._run(db, handler, arrivals, NEW, error))[message_id]
            if ran.end is not End.COMMITTED or not ran.fresh:
                return (await self._run(db, handler, arrivals, NEW, ran))[message_id]
            self.batch_sizes.of(handler).committed(1, time.monotonic() - ran.claimed_at, 0, 0)
            if self.events:
                self._emit_committed(handler, ran, ran.handled_at - ran.claimed_at)
                return self._processed(handler, arrival, ran, ran.claimed_at)
            return (
                _PROCESSED
                if arrival.message.attempt == 1
                else Answer(Outcome.PROCESSED, arrival.message.attempt)
            )
        finally:
            self.in_flight.leave(consumer, message_id, holder=holder)

    async def _deliver_free_first(
        self,
        db: Session,
        handler: Handler,
        arrivals: Sequence[Arrival],
        holder: Holder | None,
        claim: Claim,
    ) -> dict[str, Answer]:
        """Process the free ids first, then the busy ones one by one: no wait for an id while having another."""
        consumer, in_order = handler.consumer, handler.options.in_order
        settled: dict[str, Answer] = {}
        free: list[Arrival] = []
        busy: list[Arrival] = []
        # a message that another thread works on blocks its key
        keys: set[str | None] = set()
        try:
            for arrival in arrivals:
                key = arrival.message.key if in_order else None
                blocked = key is not None and key in keys
                if (
                    blocked
                    or self.in_flight.enter(consumer, arrival.message_id, holder) is not None
                ):
                    busy.append(arrival)
                    keys.add(key)
                else:
                    free.append(arrival)
            if free:
                settled.update(await self._run(db, handler, free, claim))
        finally:
            self.in_flight.leave(consumer, *[arrival.message_id for arrival in free], holder=holder)
        keys = set()
        for arrival in busy:
            key, message_id = arrival.message.key if in_order else None, arrival.message_id
            blocked = key is not None and key in keys
            if blocked or not await self.waiting.for_id(db, consumer, message_id, holder):
                if claim.lease is not None:
                    await self._release(db, handler, arrival, claim, _RELEASED_S)
                settled[message_id] = self.in_progress(handler, arrival)
                keys.add(key)
                continue
            try:
                settled.update(await self._run(db, handler, [arrival], claim))
            finally:
                self.in_flight.leave(consumer, message_id, holder=holder)
            if not settled[message_id].outcome.settles:
                keys.add(key)
        return settled

    async def run_leased(
        self,
        db: Session,
        handler: Handler,
        leased: Leased,
        lease_token: str,
        *,
        for_s: float | None = None,
    ) -> Answer:
        """Process one row that this worker has leased.

        Args:
            for_s: see `Claim`.

        Guarantee: a worker that lost its lease can run the handler, but cannot commit.
        """
        claim = Claim(lease=lease_token, for_s=for_s)
        return (await self.deliver(db, handler, [leased.arrival], claim=claim))[
            leased.arrival.message_id
        ]

    async def run_leased_many(
        self,
        db: Session,
        handler: Handler,
        rows: Sequence[Leased],
        lease_token: str,
        *,
        apart: bool = False,
        stop: Callable[[], bool] | None = None,
    ) -> list[Answer]:
        """Process rows that this worker has leased, in order, in one transaction if the handler allows it.

        Args:
            apart, stop: see `Claim`.

        Guarantee: as `run_leased`.
        """
        claim = Claim(lease=lease_token, stop=stop, apart=apart)
        settled = dict[str, Answer]()
        arrivals = [leased.arrival for leased in rows]
        parts = [arrivals] if divides(handler, batch=True) else [[each] for each in arrivals]
        for part in parts:
            settled.update(await self.deliver(db, handler, part, claim=claim))
        return [settled[arrival.message_id] for arrival in arrivals]

    async def replay(self, db: Session, handler: Handler, arrival: Arrival) -> Answer:
        """Run a processed message once more. If that fails its row stays `processed` (promise 7.4).

        The row keeps its payload and its first answer.
        """
        if handler.options.keep_result and handler.options.reply_to is not None:
            replied = await self.store.result(db, handler.consumer, arrival.message_id)
            arrival = replace(arrival, replied=replied)
        return (await self._run(db, handler, [arrival], Claim(replay=True)))[arrival.message_id]

    # -- the loop -----------------------------------------------------------------------------

    async def _run(
        self,
        db: Session,
        handler: Handler,
        arrivals: Sequence[Arrival],
        claim: Claim,
        first: TransactionResult | Exception | None = None,
    ) -> dict[str, Answer]:
        """Bring messages to their answers; what something unexpected raises costs the message that caused it.

        Args:
            first: what became of a first try; None before there was any.
        """
        try:
            return await self._settled(db, handler, arrivals, claim, first)
        except Exception as error:
            if not is_contents(error):
                raise
            db.discard()
            if isinstance(error, StoreError):
                # raises if the tables are to blame
                await self.check_schema(db)
            if len(arrivals) > 1:
                return await self._divide(db, handler, arrivals, claim, End.RAISED)
            return {
                arrivals[0].message_id: await self.blame(
                    db, handler, arrivals[0], error, Boundary.TRANSACTION, claim
                )
            }

    async def _settled(
        self,
        db: Session,
        handler: Handler,
        arrivals: Sequence[Arrival],
        claim: Claim,
        first: TransactionResult | Exception | None,
    ) -> dict[str, Answer]:
        """Run the transaction, then act on how it ended, until every message has its answer."""
        if not handler.options.transactional:
            return {
                arrival.message_id: await self._run_outside(db, handler, arrival, claim)
                for arrival in arrivals
            }
        if self._settings is not None and time.monotonic() >= self._settings.stale_at:
            await self._read_setters(db, self._settings)
        batch_size, consumer = self.batch_sizes.of(handler), handler.consumer
        settled: dict[str, Answer] = {}
        unsettled, tries, rounds, known, group = arrivals, 0, 0, claim is not NEW, 0
        alone = len(arrivals) == 1
        if not alone:
            if batch_size.alone:
                return await self._divide(db, handler, arrivals, claim, End.SETS)
            group = (
                int(divides(handler))
                if claim.apart
                else self.batch_sizes.group(handler, batch_size)
            )
        if not (known or alone) and batch_size.looks_first and self._can_look_up(handler, arrivals):
            known, settled = True, await self._finished_before(db, handler, batch_size, unsettled)
            unsettled = [arrival for arrival in unsettled if arrival.message_id not in settled]
        while unsettled:
            together = len(unsettled) > 1
            try:
                if isinstance(first, Exception):
                    raise first
                ran = first or await self.transaction.run(
                    db, handler, unsettled, claim, group=group if together else 0
                )
                first = None
            except (UnusableMessage, StoreError) as error:
                # what the claim keeps of a message cannot be written
                if not is_of_content(error):
                    raise
                settled.update(await self._not_kept(db, handler, unsettled, claim, error))
                break
            if ran.end is End.COMMITTED:
                if not claim.replay:
                    batch_size.committed(
                        len(unsettled),
                        time.monotonic() - ran.claimed_at,
                        len(ran.failed),
                        None if known else len(unsettled) - len(ran.fresh),
                    )
                settled.update(await self._committed(db, handler, unsettled, claim, ran))
            elif ran.end is End.WAITS:
                behind = [arrival for arrival in unsettled if arrival.message_id in ran.waiting]
                settled.update(await self._put_behind(db, handler, behind, claim))
            elif ran.end is End.SETS:
                if batch_size.runs_alone():
                    self.events.emit(HandlerRunsAlone(consumer=consumer, set_by=ran.set_by))
                settled.update(await self._divide(db, handler, unsettled, claim, ran.end))
            elif together and ran.end is End.RAISED and not group and divides(handler):
                batch_size.failed(len(unsettled))
                group = batch_size.group or len(unsettled)
            elif (
                together
                and ran.end is End.BROKEN
                and (broken := await self._park_broken(db, handler, unsettled, claim, ran))
            ):
                batch_size.conflicted(len(unsettled))
                settled.update(broken)
            elif _may_be_tried_again(claim, ran.end, together=together, tries=tries) and (
                await self.waiting.for_conflict(
                    db, consumer, tries + 1, ran.database_error, emit=ran.end is not End.AMBIGUOUS
                )
            ):
                tries += 1
            elif together and not (ran.end is End.AMBIGUOUS and claim.lease is not None):
                settled.update(await self._divide(db, handler, unsettled, claim, ran.end))
            else:
                for arrival in unsettled:
                    answer = await self._failed(db, handler, arrival, claim, ran)
                    if answer is not None:
                        settled[arrival.message_id] = answer
            if len(settled) == len(arrivals):
                break
            before = len(unsettled)
            unsettled = [arrival for arrival in unsettled if arrival.message_id not in settled]
            rounds = rounds + 1 if len(unsettled) == before else 0
            if rounds > AGAIN_MAX + max(tries, self.limits.conflict_retries):
                raise out_of_sight(consumer)
        return settled

    def _can_look_up(self, handler: Handler, arrivals: Sequence[Arrival]) -> bool:
        """Whether reading which ids are finished tells more, or sooner, than a claim."""
        return not handler.options.keep_result and self.store.finds_duplicates(arrivals)

    async def _finished_before(
        self, db: Session, handler: Handler, batch_size: BatchSize, arrivals: Sequence[Arrival]
    ) -> dict[str, Answer]:
        """Query a batch before claiming it while most messages are duplicates: those need no claim.

        It does not see rows that another transaction is about to commit. Those are claimed like new ones.
        """
        results = await db.together((self.store.duplicates(handler.consumer, arrivals),))
        finished = {row[0] for row in results[0].rows}
        batch_size.looked_up(len(arrivals), len(finished))
        for arrival in arrivals:
            if arrival.message_id in finished:
                self.emit(MessageDuplicate, handler, arrival)
        return dict.fromkeys(finished, DUPLICATE)

    async def _put_behind(
        self, db: Session, handler: Handler, arrivals: Sequence[Arrival], claim: Claim
    ) -> dict[str, Answer]:
        """Store messages to wait in the table for those before them; returns their answers.

        A message without an answer has a row already, which the next claim will find.
        """
        delay_s = 0.0 if handler.options.sequence is None else _GAP_LOOK_S
        if claim.lease is not None:
            for arrival in arrivals:
                await self._release(db, handler, arrival, claim, delay_s)
            return {arrival.message_id: Answer(Outcome.DEFERRED) for arrival in arrivals}
        store, token = self.store, secrets.token_hex(16)
        try:
            storing = store.storing(handler.consumer, arrivals, token=token, delay_s=delay_s)
            results = await db.begin(store.begin_bounded(self.limits.lock_timeout, storing))
            fresh = await store.stored(db, handler.consumer, arrivals, results[-1], token=token)
            await db.commit(store.commit_bounded())
        except StoreError as error:
            if error.fault is not Fault.LOCK_TIMEOUT:
                raise
            await store.rollback_bounded(db)
            return {arrival.message_id: self.in_progress(handler, arrival) for arrival in arrivals}
        for arrival in arrivals:
            if arrival.message_id in fresh:
                self.emit(MessageWaits, handler, arrival)
        return dict.fromkeys(fresh, Answer(Outcome.DEFERRED))

    async def _not_kept(
        self,
        db: Session,
        handler: Handler,
        arrivals: Sequence[Arrival],
        claim: Claim,
        error: Exception,
    ) -> dict[str, Answer]:
        """Quarantine a message that cannot be written; several are divided first."""
        await self.store.rollback_bounded(db)
        if len(arrivals) > 1:
            return await self._divide(db, handler, arrivals, claim, End.RAISED)
        (arrival,) = arrivals
        await self.quarantine(
            db, handler.consumer, arrival.message, arrival.message_id, str(error), arrival.hash
        )
        return {arrival.message_id: Answer(Outcome.QUARANTINED)}

    async def _park_broken(
        self,
        db: Session,
        handler: Handler,
        arrivals: Sequence[Arrival],
        claim: Claim,
        ran: TransactionResult,
    ) -> dict[str, Answer]:
        """The handler ended its batch's transaction: make dead, for good, the messages whose effects are unknown."""
        settled: dict[str, Answer] = {}
        for arrival in arrivals:
            if arrival.message_id in ran.unknown:
                parked = await self._parked(db, handler, arrival, BROKEN, claim)
                if parked is not None:
                    settled[arrival.message_id] = parked
        return settled

    async def _divide(
        self, db: Session, handler: Handler, arrivals: Sequence[Arrival], claim: Claim, end: End
    ) -> dict[str, Answer]:
        """Run the halves of a batch that failed, the first one first, until the culprit fails alone.

        After a conflict each message runs alone at once: halves would lock the same rows in the same order.
        """
        size = 1
        if end in (End.CONFLICT, End.LOCKED, End.BROKEN):
            self.batch_sizes.of(handler).conflicted(len(arrivals))
        elif end in (End.RAISED, End.REFUSED):
            size = (len(arrivals) + 1) // 2
        settled: dict[str, Answer] = {}
        keys: set[str] = set()
        for at in range(0, len(arrivals), size):
            part: list[Arrival] = []
            for arrival in arrivals[at : at + size]:
                if handler.options.in_order and arrival.message.key in keys:
                    settled[arrival.message_id] = self.in_progress(handler, arrival)
                else:
                    part.append(arrival)
            if not part:
                continue
            settled.update(await self._run(db, handler, part, claim))
            keys.update(
                arrival.message.key
                for arrival in part
                if not settled[arrival.message_id].outcome.settles
                and arrival.message.key is not None
            )
        return settled

    async def _run_outside(
        self, db: Session, handler: Handler, arrival: Arrival, claim: Claim
    ) -> Answer:
        """Run a handler outside any transaction and complete its row, fenced, afterwards."""
        assert claim.lease is not None, "work outside a transaction is leased"
        began = time.monotonic()
        try:
            returned = await handled(db, handler, [arrival])
        except Raised as raised:
            failure = self._recorder.described(handler, raised.error, raised.database_error)
            parked = await self._parked(db, handler, arrival, failure, claim)
            return parked or _NOT_OURS
        handler_s = time.monotonic() - began

        async def complete(db: Session) -> Answer:
            ran = await self.transaction.run(db, handler, [arrival], claim, returned=returned)
            if ran.end is not End.COMMITTED:
                raise _as_error(ran)
            if ran.fresh:
                if self.events:
                    self._emit_committed(handler, ran, handler_s)
                return self._processed(handler, arrival, ran, began)
            # another worker's by now, or committed by the COMMIT whose answer was lost
            return await self._by_row(db, handler, arrival, ran, began)

        return await self.with_retries(db, complete, consumer=handler.consumer, for_s=claim.for_s)

    # -- one message's outcome ----------------------------------------------------------------

    async def _committed(
        self,
        db: Session,
        handler: Handler,
        arrivals: Sequence[Arrival],
        claim: Claim,
        ran: TransactionResult,
    ) -> dict[str, Answer]:
        """The answers after a COMMIT.

        A message without an answer lost its claim to a row that was then pruned: claim it again.
        """
        settled: dict[str, Answer] = {}
        fresh, failed, observed = ran.fresh, ran.failed, bool(self.events)
        if observed and fresh:
            self._emit_committed(handler, ran, ran.handled_at - ran.claimed_at)
        plain = not (ran.results or ran.gap is not None or observed)
        for arrival in arrivals:
            message_id = arrival.message_id
            if message_id in fresh:
                if message_id in failed:
                    settled[message_id] = self._recorder.reported(
                        handler, arrival, failed[message_id]
                    )
                elif plain and arrival.message.attempt == 1:
                    settled[message_id] = _PROCESSED
                else:
                    settled[message_id] = self._processed(handler, arrival, ran, ran.claimed_at)
            elif claim is not NEW:
                # the fence matched nothing: the lease ran out, and the row is another worker's
                settled[message_id] = _NOT_OURS
            elif (row := ran.existing.get(message_id)) is not None:
                settled[message_id] = await self.settle_existing(db, handler, arrival, row)
        return settled

    def emit(self, kind: type[MessageEvent], handler: Handler, arrival: Arrival) -> None:
        """Emit an event that says nothing but which message it is about, if anybody observes success."""
        if self.events:
            self.events.emit(kind(**message_fields(handler, arrival)))

    def _emit_committed(self, handler: Handler, ran: TransactionResult, handler_s: float) -> None:
        self.events.emit(
            TransactionCommitted(
                consumer=handler.consumer,
                messages=len(ran.fresh),
                handler_s=handler_s,
                commit_s=time.monotonic() - ran.handled_at,
            )
        )

    def _processed(
        self, handler: Handler, arrival: Arrival, ran: TransactionResult, began: float
    ) -> Answer:
        attempt, events = arrival.message.attempt, self.events
        if ran.gap is not None:
            self.events.emit(
                SequenceGap(
                    **message_fields(handler, arrival),
                    expected=ran.gap,
                    sequence=arrival.message.sequence or 0,
                )
            )
        if events:
            now = time.monotonic()
            events.emit(
                MessageProcessed(
                    consumer=handler.consumer,
                    message_id=arrival.message_id,
                    topic=arrival.message.topic,
                    attempt=attempt,
                    duration_s=now - began,
                    latency_s=_latency_s(arrival, now),
                )
            )
        return Answer(Outcome.PROCESSED, attempt, ran.results.get(arrival.message_id))

    async def settle_existing(
        self, db: Session, handler: Handler, arrival: Arrival, row: Existing
    ) -> Answer:
        """Decide by the row that this id already has (promise 2.12)."""
        if row.differs(arrival.hash):
            await self.quarantine(
                db, handler.consumer, arrival.message, arrival.message_id,
                "A known id came with another payload: the producer reuses ids, or the message was altered.",
                arrival.hash,
            )  # fmt: skip
            return Answer(Outcome.QUARANTINED)
        if row.status in (Status.PROCESSED, Status.DEAD, Status.DISCARDED):
            self.emit(MessageDuplicate, handler, arrival)
            result = None
            if handler.options.keep_result and row.status == Status.PROCESSED:
                result = await self.store.result(db, handler.consumer, arrival.message_id)
            return Answer(Outcome.DUPLICATE, json=result)
        if row.status == Status.PROCESSING and not row.leased:
            # committed without a lease: only a handler that committed causes this (promise 2.3)
            parked = await self._recorder.parked(
                db, handler, arrival, BROKEN, token=row.token or ""
            )
            return parked or Answer(Outcome.DUPLICATE)
        if not row.has_payload:
            try:
                await db.together((self.store.return_payload(handler.consumer, arrival),))
            except (UnusableMessage, StoreError) as error:
                if not is_of_content(error):
                    raise
                return (await self._not_kept(db, handler, [arrival], NEW, error))[
                    arrival.message_id
                ]
        self.emit(MessageDeferred, handler, arrival)
        return Answer(Outcome.DEFERRED)

    async def _failed(
        self, db: Session, handler: Handler, arrival: Arrival, claim: Claim, ran: TransactionResult
    ) -> Answer | None:
        """The answer for a message whose transaction did not commit and is not retried as it was.

        None: claim it again, to find out whether another worker has the row or the COMMIT took effect after all.
        """
        if ran.end is End.LOCKED and claim is NEW:
            return self.in_progress(handler, arrival)
        unclaimed = ran.end is End.CONFLICT and not ran.fresh and not claim.replay
        if unclaimed or ran.end in (End.AMBIGUOUS, End.LOCKED):
            # the handler is not known to have failed, so there is no attempt to record
            if claim.lease is None:
                raise _as_error(ran)
            # the release waits for a commit in flight, then matches nothing
            if await self._release(db, handler, arrival, claim, _RELEASED_S):
                return Answer(Outcome.DEFERRED)
            return await self._by_row(db, handler, arrival, ran)
        failure = BROKEN
        if ran.end is not End.BROKEN:
            assert ran.error is not None, "it ended with one"
            # a handler that loses its connection every time, although the next one works, has failed too
            failure = self._recorder.described(handler, ran.error, ran.database_error)
        if claim.replay:
            attempt = self.store.failed_attempt(
                handler.consumer, arrival, failure, status="replay failed"
            )
            await db.together((attempt,))
            return Answer(Outcome.FAILED, arrival.message.attempt)
        parked = await self._parked(db, handler, arrival, failure, claim)
        if parked is not None or claim is NEW:
            return parked
        if ran.end is End.REFUSED:
            # it took effect, whatever the server answered
            return await self._by_row(db, handler, arrival, ran)
        return _NOT_OURS

    async def blame(
        self,
        db: Session,
        handler: Handler,
        arrival: Arrival,
        error: Exception,
        boundary: Boundary,
        claim: Claim = NEW,
    ) -> Answer:
        """The answer for a message on which something unexpected was raised: it costs an attempt.

        Where that cannot be recorded, a new message is quarantined; where that cannot be done either, it is not
        settled, and tried again. A leased row then stays leased: it is rescued, and dead when its starts are used up.
        """
        database_error = error if isinstance(error, StoreError) else None
        failure = self._recorder.described(handler, error, database_error)
        try:
            if claim.replay:
                number = arrival.message.attempt
                attempt = self.store.failed_attempt(
                    handler.consumer, arrival, failure, status="replay failed"
                )
                await db.together((attempt,))
                return Answer(Outcome.FAILED, number)
            parked = await self._parked(db, handler, arrival, failure, claim)
            if parked is not None or claim is not NEW:
                return parked or _NOT_OURS
            # another's row: what it says is the answer
            await db.begin(self.store.meeting(handler.consumer, arrival.message_id))
            rows = await self.store.classify(db, handler.consumer, [arrival.message_id])
            await db.commit()
            row = rows.get(arrival.message_id)
            return (
                _NOT_OURS if row is None else await self.settle_existing(db, handler, arrival, row)
            )
        except Exception as unrecorded:  # noqa: BLE001  # see contain
            self.contain(Boundary.RECORD, unrecorded, consumer=handler.consumer, arrival=arrival)
            db.discard()
        try:
            if claim is NEW:
                reason = f"{failure.error_type} (boundary: {boundary}), and the failure cannot be recorded."
                await self.quarantine(
                    db, handler.consumer, arrival.message, arrival.message_id, reason, arrival.hash
                )
                return Answer(Outcome.QUARANTINED)
        except Exception as unrecorded:  # noqa: BLE001  # see contain
            self.contain(Boundary.RECORD, unrecorded, consumer=handler.consumer, arrival=arrival)
            db.discard()
        return _NOT_OURS

    async def _parked(
        self, db: Session, handler: Handler, arrival: Arrival, failure: Failure, claim: Claim
    ) -> Answer | None:
        """Record a failure; None when the row is not ours to write.

        Each wait for a transaction that has locked the row is bounded. That transaction then decides on a new one,
        which runs it as well; a lease, or a message that must not run again, goes on waiting.
        """
        while True:
            try:
                return await self._recorder.parked(
                    db, handler, arrival, failure, token=claim.lease or ""
                )
            except StoreError as error:
                if error.fault is Fault.CONTENT and claim is NEW:
                    # nor can it be recorded without its content
                    return (await self._not_kept(db, handler, [arrival], claim, error))[
                        arrival.message_id
                    ]
                if error.fault is not Fault.LOCK_TIMEOUT or (claim.stop and claim.stop()):
                    raise
                await self.store.rollback_bounded(db)
            answer = self.in_progress(handler, arrival)
            if claim is NEW and failure is not BROKEN:
                return answer

    async def _by_row(
        self,
        db: Session,
        handler: Handler,
        arrival: Arrival,
        ran: TransactionResult,
        began: float | None = None,
    ) -> Answer:
        await db.begin()
        rows = await self.store.classify(db, handler.consumer, [arrival.message_id])
        await db.commit()
        row = rows.get(arrival.message_id)
        if row is not None and row.status == Status.PROCESSED:
            return self._processed(
                handler, arrival, ran, began or ran.claimed_at or time.monotonic()
            )
        return _NOT_OURS

    async def _release(
        self, db: Session, handler: Handler, arrival: Arrival, claim: Claim, delay_s: float
    ) -> int:
        """Release a leased row; returns 0 if it is no longer ours."""
        assert claim.lease is not None, "only leased rows are released"
        token = claim.lease
        return await self.with_retries(
            db,
            lambda db: leases.release(
                db, self.store, handler.consumer, [arrival.message_id], token=token, delay_s=delay_s
            ),
            consumer=handler.consumer,
            stop=claim.stop,
        )

    def in_progress(self, handler: Handler, arrival: Arrival) -> Answer:
        """The answer for a message that another transaction holds, or whose key is blocked."""
        self.emit(MessageInFlight, handler, arrival)
        return Answer(Outcome.IN_PROGRESS)

    async def quarantine(
        self,
        db: Session,
        consumer: str,
        message: Any,
        message_id: str,
        reason: str,
        hashed: bytes | None = None,
    ) -> None:
        """Set a message aside in a transaction of its own, and emit its event.

        What cannot be kept of it is dropped: the end of its payload, then all but a reason and the hash.
        """
        hashed = hashed or quarantine_hash(message, message_id)
        kept, kept_id, limits = (
            message,
            message_id,
            (self.limits.quarantined_bytes, _LITTLE_BYTES, None),
        )
        for limit in limits:
            if limit is None:
                kept = replace(message, topic=escaped(message.topic), type=None, key=None)
                kept_id = message_id if message_id.isascii() else ""
                reason = f"{escaped(reason)} Its content could not be kept."
            try:
                aside = self.store.quarantine(
                    consumer, kept, message_id=kept_id, reason=reason,
                    payload_limit=limit or 0, hashed=hashed, bare=limit is None,
                )  # fmt: skip
                if self._alerting is None:
                    await db.together((aside,))
                else:
                    await db.begin((aside,))
                    await self._alerting.opened(db, self.store.dialect, [quarantined(consumer)])
                    await db.commit()
                break
            except (UnusableMessage, StoreError) as error:
                if limit is None or not is_of_content(error):
                    raise
                await db.rollback()
        self.events.emit(
            MessageQuarantined(
                consumer=consumer, message_id=message_id, topic=message.topic, reason=reason
            )
        )


def _may_be_tried_again(claim: Claim, end: End, *, together: bool, tries: int) -> bool:
    """Whether the transaction can simply be retried: neither handler nor message is to blame. A batch is retried once.

    When a COMMIT of new messages is in doubt, claiming again on another connection decides, never a SELECT; while
    the database is away that raises, and `Waiting.with_retries` waits. For leased rows their release decides.
    """
    if together and tries:
        return False
    if end is End.LOST:
        return True
    if end is End.AMBIGUOUS:
        return claim is NEW
    # a batch is divided instead, and a new message does not wait twice for the holder of its id
    return not together and (end is End.CONFLICT or (end is End.LOCKED and claim is not NEW))


def _latency_s(arrival: Arrival, now: float) -> float | None:
    """Seconds since this process, or the table, received the message."""
    if arrival.received:
        return now - arrival.received
    came = arrival.message.received_at
    # the database's clock may be ahead of ours
    return None if came is None else max(0.0, time.time() - came.timestamp())


def _as_error(ran: TransactionResult) -> StoreError:
    """The error for a transaction that may succeed later: its own, or a lost connection."""
    if ran.database_error is not None and ran.end not in (End.AMBIGUOUS, End.REFUSED):
        return ran.database_error
    return connection_lost(ran.database_error.code if ran.database_error else None)


# -- batch sizes ------------------------------------------------------------------------------

# more than 64 subtransactions overflow a PostgreSQL backend's cache, which slows down every snapshot
_SAVEPOINTS_MAX = 64
_CALM_S = (1.0, 60.0)
_FORGETS = 0.02
# above this share of duplicates, a batch is looked up before it is claimed
_REPLAYED = 0.5
# up to this share of failures, a batch that fails is run twice
_RARE = 0.0005


class BatchSize:
    """How many messages one handler's transactions take, learned from how they end.

    Starts at one, doubles while twice as many would stay below `Batching.duration`, and halves above it. After a
    conflict it stays at half of what conflicted, longer each time conflicts return: batches that lock the same
    rows in different orders are slower than no batches.
    """

    def __init__(self, batching: Batching) -> None:
        self._longest_s = batching.duration.total_seconds()
        self._most = self._ceiling = batching.messages
        self.forget_parent()
        forgets_parent(self)
        self._size = 1
        #: Its handler sets something that other messages must not see.
        self.alone = False
        self._raise_at = 0.0
        self._calm_s = 0.0
        self._failures = 0.0
        self._repeats = 0.0

    def forget_parent(self) -> None:
        self._lock = threading.Lock()

    def runs_alone(self) -> bool:
        """Take one message per transaction from now on; returns whether that is new."""
        with self._lock:
            new, self.alone = not self.alone, True
            self._size = self._most = self._ceiling = 1
        return new

    @property
    def messages(self) -> int:
        """Messages for the next transaction, 1 or more."""
        return min(self._size, _SAVEPOINTS_MAX) if self._failures > _RARE else self._size

    def committed(
        self, messages: int, took_s: float, failed: int = 0, finished: int | None = None
    ) -> None:
        """A transaction of this many messages has committed.

        Args:
            failed: how many of them failed.
            finished: how many were duplicates; None if `met` has counted them already.
        """
        with self._lock:
            if self._failures or failed:
                self._failures = _learned(self._failures, failed, messages)
            if finished is not None and (self._repeats or finished):
                self._repeats = _learned(self._repeats, finished, messages)
            if self._ceiling < self._most and time.monotonic() > self._raise_at:
                self._ceiling = min(self._ceiling * 2, self._most)
                self._raise_at = time.monotonic() + self._calm_s
            if took_s > self._longest_s:
                self._size = max(1, messages // 2)
            elif (
                # duplicates leave less to run than was claimed; half of it is evidence enough
                2 * messages >= self._size and took_s * 2 * self._size / messages < self._longest_s
            ):
                self._size = min(self._size * 2, self._ceiling)

    def conflicted(self, messages: int) -> None:
        """A transaction of this many messages lost against another one."""
        with self._lock:
            lower = max(1, messages // 2)
            if messages == 1 or lower >= self._ceiling:
                # the same conflict, seen by the other batch
                return
            first_s, longest_s = _CALM_S
            self._calm_s = min(max(first_s, self._calm_s * 2), longest_s)
            self._raise_at = time.monotonic() + self._calm_s
            self._ceiling = lower
            self._size = min(self._size, lower)

    def failed(self, messages: int) -> None:
        """A transaction failed because of one of its messages."""
        with self._lock:
            self._failures = _learned(self._failures, 1, messages)

    def looked_up(self, messages: int, finished: int) -> None:
        """So many messages were looked up, and so many of them were finished."""
        with self._lock:
            self._repeats = _learned(self._repeats, finished, messages)

    @property
    def looks_first(self) -> bool:
        """True while most messages are duplicates: a read is cheaper than a claim that loses."""
        return self._repeats > _REPLAYED

    @property
    def group(self) -> int:
        """Messages that share a savepoint; 0, meaning no savepoints, while failures are rare.

        If a share p of messages fails, groups of 1/sqrt(p) balance the cost of savepoints against that of
        neighbours that run again.
        """
        if self._failures <= _RARE:
            return 0
        return max(1, min(_SAVEPOINTS_MAX, round(1 / math.sqrt(self._failures))))


def _learned(share: float, count: int, messages: int) -> float:
    """The share of messages of a kind, having seen so many of them among the last ones."""
    return share + (count / messages - share) * (1 - (1 - _FORGETS) ** messages)


class BatchSizes:
    """The batch sizes of all handlers."""

    def __init__(self, store: InboxStore, batching: Batching) -> None:
        self._store = store
        self._batching = batching
        self._batch_sizes: dict[tuple[str, int], BatchSize] = {}

    def of(self, handler: Handler) -> BatchSize:
        """The batch size of one handler."""
        key = (handler.consumer, id(handler.function))
        batch_size = self._batch_sizes.get(key)
        if batch_size is None:
            batching = self._batching
            options = handler.options
            counted = options.pause_after is not None
            if counted or (not self._store.dialect.refuses_commit and not options.batch):
                # a database that cannot refuse a handler's COMMIT would commit its neighbours' claims too; and
                # `pause_after` counts failures in a row, which needs messages one by one
                batching = replace(batching, messages=1)
            # two threads may make one each; setdefault keeps the first
            batch_size = self._batch_sizes.setdefault(key, BatchSize(batching))
        return batch_size

    def group(self, handler: Handler, batch_size: BatchSize) -> int:
        """How many messages share a savepoint on the first try; 0 means no savepoints."""
        if not divides(handler):
            return 0
        return 1 if self._store.dialect.cheap_savepoints else batch_size.group


def divides(handler: Handler, *, batch: bool = False) -> bool:
    """Whether savepoints can separate the messages of a batch; with `batch`, whether they can share one at all."""
    options = handler.options
    return not options.in_order and options.transactional and (batch or not options.batch)
