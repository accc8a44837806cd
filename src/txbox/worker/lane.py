"""A lane: works for one consumer, one batch at a time, with the claim of the next batch sent behind each COMMIT.

While the server commits one batch and claims the next, the lane settles and prepares, so neither waits for the
other and each batch takes one round trip less. The transaction begun ahead is not a second one at the same time:
it begins when the one before it has ended, on the same connection.

Source: docs/decisions/0026-claims-ahead.md
"""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Generator, Iterable, Sequence
from contextlib import contextmanager
from functools import partial
from types import coroutine
from typing import Any, Protocol, TypeVar

from txbox.boundaries import Boundary
from txbox.brokers.base import Delivery
from txbox.errors import Fault, StoreError
from txbox.handlers import Handler
from txbox.message import Message
from txbox.outcome import Answer, Outcome
from txbox.policy import Backoff
from txbox.processing.intake import LeasedAnswer, Mode, ReleasedAnswer
from txbox.processing.waiting import Holder
from txbox.session import Connections, Result, Session, Statements, at
from txbox.worker.agenda import Run
from txbox.worker.table import Row, Table, take_together

T = TypeVar("T")

_AGAIN_S = (0.1, 5.0)
_SOON_S = 0.001
# batches in a row on one connection; then it is returned once, so that others waiting for it get their turn
_BATCHES_PER_CONNECTION = 16


class Turns(Protocol):
    """Where lanes have their turns: in threads, or on the loop.

    Attributes:
        is_async: on the loop, where async handlers run.
    """

    is_async: bool

    def begin(self, lane: Lane) -> None:
        """Run `turn` of the lane, and again for as long as it returns True."""

    def crowded(self) -> bool:
        """Whether other lanes are waiting for a turn."""
        ...


class Lane:
    """Alternates between deliveries, in order, and rows from the table, one batch at a time.

    Guarantee: a delivery without a settling outcome stays unacknowledged.
    """

    def __init__(self, run: Run, table: Table, turns: Turns, index: int) -> None:
        self._app = run.app
        self._agenda = run.agenda
        self._table = table
        self._index = index
        self.is_async = turns.is_async
        self._stop = run.stopping.is_set
        self._lock = threading.Lock()
        self._queue: deque[Work] = deque()
        # deliveries whose id is in another transaction, and when to claim them again
        self._again: list[tuple[float, int, Work]] = []
        self._order = itertools.count()
        # for each key with a message that waits for its id, the deliveries behind it
        self._behind: dict[str, deque[Work]] = {}
        # rows that this lane has stored and leased, and runs itself
        self._rows: deque[Row] = deque()
        self._turns = turns
        #: True from `begin` to the end of its last turn.
        self.busy = False
        self._woken = False
        self._ahead: Prepared | None = None
        self._in_a_row = 0
        self._holder = Holder()

    @property
    def name(self) -> str:
        return f"txbox-{self._table.consumer}-{self._index}"

    def put(self, works: Iterable[Work] = ()) -> bool:
        """Add deliveries, in order; returns whether the lane was idle and must now be run."""
        with self._lock:
            self._queue.extend(works)
            # a lane at work looks once more before it rests
            self._woken = self.busy
            if self.busy or self._stop():
                return False
            self.busy = True
            return True

    def wake(self) -> None:
        """Have the lane look for work."""
        if self.put():
            self.run()

    def run(self) -> None:
        """Have it run elsewhere, after `put` has returned True."""
        self._turns.begin(self)

    async def turn(self, db: LaneSession) -> bool:
        """Work until there is nothing to do, it is stopped (after the current batch), or others wait for the thread.

        Returns: whether it wants another turn.
        """
        ended = True
        try:
            while not self._stop():
                self._woken = False
                took = await self._take_next(db)
                # alternate, so that neither the source nor the table starves
                worked = await self._run_stored(db)
                if self._is_ahead():
                    continue
                if self._stop():
                    break
                rows = await self._table.next(db, self.is_async, self._index)
                if rows:
                    await self._run(db, rows)
                if not rows and not took and not worked:
                    if self._rests():
                        ended = False
                        return False
                elif self._turns.crowded():
                    ended = False
                    return True
            if self._is_ahead():
                # begun ahead, and not to be run
                await db.rollback()
        except StoreError as error:
            if error.fault is Fault.SCHEMA:
                # raises with the command to run, if that is it
                await self._app.protocol.check_schema(db)
            if not (self._stop() and error.transient):
                self._retry_later(db, error)
        except Exception as error:  # noqa: BLE001  # see contain
            self._retry_later(db, error)
        finally:
            if ended:
                self.put_back()
                self._table.put_back(self._rows)
                self._rows = deque()
                self.busy = False
        return False

    def _retry_later(self, db: LaneSession, error: Exception) -> None:
        """Something unexpected ended this turn: begin another one after a pause."""
        pause_s = _AGAIN_S[1]
        self._contain(error, pause_s)
        db.discard()
        self._agenda.look(self.wake, pause_s)

    def _contain(self, error: Exception, retry_in_s: float) -> None:
        consumer = self._table.consumer
        self._app.protocol.contain(Boundary.LANE, error, consumer=consumer, retry_in_s=retry_in_s)

    # -- deliveries ---------------------------------------------------------------------------

    def _next_batch(self) -> list[Work]:
        """The deliveries here that may share a transaction; does not wait for more."""
        if self._again and self._again[0][0] <= time.monotonic():
            again = heapq.heappop(self._again)[2]
            again.store_if_late()
            return [again]
        batch: list[Work] = []
        queue, behind = self._queue, self._behind
        first: Work | None = None
        messages_max, bytes_remaining = 1, self._app.batching.payload_bytes
        with self._lock:
            while queue:
                work = queue[0]
                if work.key is not None and work.key in behind:
                    behind[work.key].append(queue.popleft())
                    continue
                bytes_remaining -= len(work.message.payload or b"")
                if work.delivery.store_from is not None:
                    work.store_if_late()
                if first is None:
                    first, messages_max = work, self._batch_messages(work)
                elif (
                    len(batch) >= messages_max
                    or work.modes is not first.modes
                    or work.mode is not first.mode
                    or bytes_remaining < 0
                ):
                    break
                batch.append(queue.popleft())
        if len(batch) > 1 and batch[0].modes.lock_key:
            # all transactions lock in the same order
            batch.sort(key=lambda work: work.lock_key or "")
        return batch

    def _batch_messages(self, first: Work) -> int:
        """How many deliveries may share a transaction."""
        app, handler = self._app, first.modes.handler
        most = app.batching.messages
        if first.mode is Mode.INLINE:
            # each version of a key depends on the one before it
            return (
                1
                if handler.options.sequence is not None
                else app.protocol.batch_sizes.of(handler).messages
            )
        if first.mode is Mode.LEASED:
            return min(app.lease.batch, most)
        if self._runs_stored(first):
            return min(max(app.lease.batch, app.protocol.batch_sizes.of(handler).messages), most)
        return most

    def _runs_stored(self, work: Work) -> bool:
        """Whether this lane also runs what it is about to store, which it does unless it still has rows to run."""
        options = work.modes.handler.options
        return not self._rows and options.mode == "stored" and not options.in_order

    async def _take_next(self, db: LaneSession) -> bool:
        """Run the batch begun ahead, or the next one; returns False if there is neither."""
        ahead, self._ahead = self._ahead, None
        if ahead is None:
            self._in_a_row = 0
            batch = self._next_batch()
            if not batch:
                return False
            if batch[0].mode is Mode.LEASED and not self._table.paused:
                await self._deliver_leased(db, batch)
                return True
            ahead = self._prepare(db, batch)
            if ahead is None:
                return True
        else:
            self._in_a_row += 1
        await self._deliver(db, ahead)
        return True

    def _prepare(self, db: LaneSession, batch: list[Work]) -> Prepared | None:
        """`_prepared`; None where that raises unexpectedly: nothing has been sent, and each is tried again."""
        try:
            return self._prepared(db, batch)
        except Exception as error:  # noqa: BLE001  # see contain
            self._contain(error, _AGAIN_S[0])
            for work in batch:
                self._claim_later(work)
            return None

    def _prepared(self, db: LaneSession, batch: list[Work]) -> Prepared:
        """Run a batch up to its first transaction, without sending anything."""
        first = batch[0]
        mode = Mode.STORED if self._table.paused else first.mode
        if mode is Mode.STORED and not self._table.paused and self._runs_stored(first):
            mode = Mode.LEASED
        operation = self._app.intake.take_with_retries(
            db,
            first.modes.handler,
            [work.message for work in batch],
            mode,
            holder=self._holder,
            received=[work.received for work in batch],
            stop=self._stop,
        )
        return Prepared(db, batch, operation, mode)

    def begin(self, db: LaneSession) -> Statements | None:
        """The claim of the next batch, if a full one is here: waiting would not make it larger.

        None if the order of keys matters, since the next batch then depends on this one, and if the table is due.
        """
        if self._ahead is None and self._may_look_ahead():
            self._ahead = self._prepare(db, self._next_batch())
        return None if self._ahead is None else self._ahead.statements

    def _may_look_ahead(self) -> bool:
        queue = self._queue
        if not queue or self._again or self._table.has_work or self._stop():
            return False
        head = queue[0]
        return (
            self._in_a_row < _BATCHES_PER_CONNECTION
            and head.mode is not Mode.LEASED
            and not head.modes.in_order
            and len(queue) >= self._batch_messages(head)
        )

    def put_back(self) -> None:
        """The current batch is not finished: put what was prepared behind it back into the queue."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            ahead.close()
            with self._lock:
                self._queue.extendleft(reversed(ahead.batch))

    def _is_ahead(self) -> bool:
        return self._ahead is not None

    async def _deliver(self, db: LaneSession, prepared: Prepared) -> None:
        """Run or store a batch and settle it; the rows that it has leased are run next."""
        batch, began = prepared.batch, time.monotonic()
        try:
            with db.followed_by(None if prepared.mode is Mode.LEASED else self):
                answers = await prepared.answers()
        except Exception as error:  # noqa: BLE001  # see contain
            answers = self._unsettled(db, batch, error)
        leased = prepared.mode is Mode.LEASED
        if leased:
            self._rows.extend(self._leased(batch, answers))
        if self._settled(batch, answers, began, leased=leased):
            self._table.mark_due()

    def _settled(
        self, batch: list[Work], answers: list[Answer], began: float, *, leased: bool
    ) -> bool:
        """Settle the deliveries with a settling answer and keep the others; returns whether one waits in the table."""
        self._app.activity.settled(self._table.consumer, answers, batch, began)
        done: list[Work] = []
        deferred = failed = False
        for work, settled in zip(batch, answers, strict=True):
            if settled.outcome is Outcome.IN_PROGRESS:
                self._claim_later(work)
                continue
            done.append(work)
            if work.backoff is not None:
                self._unblock(work)
            if settled.outcome is Outcome.DEFERRED:
                # of what is leased, this lane runs the new ones, and whoever has a lease the others
                deferred = deferred or not leased or isinstance(settled, ReleasedAnswer)
            elif settled.outcome is Outcome.FAILED:
                failed = True
        if failed or batch[0].modes.handler.options.sequence is not None:
            # a retry, or the version behind this one, may be due before the next poll
            self._agenda.poll_soon()
        settle(done)
        return deferred

    async def _deliver_leased(self, db: LaneSession, batch: list[Work]) -> None:
        """Store and lease a batch in one transaction, then run its rows here, in order, several in a transaction.

        The lease has counted a start of each: should one of them end the process, each runs alone the next time.
        Nobody else can take these rows until the lane is done with them, which keeps their order.
        """
        handler, began = batch[0].modes.handler, time.monotonic()
        try:
            answers: list[Answer] = await self._app.intake.take_with_retries(
                db, handler, [work.message for work in batch], Mode.LEASED, stop=self._stop
            )
        except Exception as error:  # noqa: BLE001  # see contain
            answers = self._unsettled(db, batch, error)
        self._app.activity.settled(handler.consumer, answers, batch, began)
        rows = deque(self._leased(batch, answers))
        if not rows:
            self._table.mark_due()
        done: list[Work] = []
        waiting: list[Work] = []
        for work, settled in zip(batch, answers, strict=True):
            if not settled.outcome.settles:
                self._claim_later(work)
            elif settled.outcome is Outcome.DEFERRED and handler.options.transactional:
                # a source that loses a partition waits for its unsettled deliveries, which keeps order across workers
                waiting.append(work)
            else:
                # it is stored, and a run outside a transaction may take longer than the broker waits
                done.append(work)
        settle(done)
        try:
            while rows and not (self._stop() or self._table.paused):
                await self._run(db, take_together(self._app, rows), apart=True)
        finally:
            self._table.put_back(rows)
        settle(waiting)

    def _unsettled(self, db: Session, batch: list[Work], error: Exception) -> list[Answer]:
        """The answers for a batch on which something unexpected was raised outside of any message: try each again."""
        self._contain(error, _AGAIN_S[0])
        db.discard()
        return [Answer(Outcome.IN_PROGRESS)] * len(batch)

    def _claim_later(self, work: Work) -> None:
        """Keep a delivery whose id is in another transaction, to claim it again after a pause.

        If the order of keys matters, it blocks its key.
        """
        key = work.key
        if key in self._behind and work.backoff is None:
            self._behind[key].append(work)
            return
        if key is not None:
            self._behind.setdefault(key, deque())
        work.backoff = work.backoff or Backoff(*_AGAIN_S, spread=(0.5, 1.5))
        at = time.monotonic() + work.backoff.next_s()
        heapq.heappush(self._again, (at, next(self._order), work))

    def _unblock(self, work: Work) -> None:
        behind = self._behind.pop(work.key, None) if work.key is not None else None
        if behind:
            with self._lock:
                self._queue.extendleft(reversed(behind))

    # -- rows ---------------------------------------------------------------------------------

    def _leased(self, batch: list[Work], answers: list[Answer]) -> list[Row]:
        """The rows that a batch has leased; their leases are extended from now on."""
        handler = batch[0].modes.handler
        rows = [
            Row(handler, answer.leased, answer.token, False)
            for answer in answers
            if isinstance(answer, LeasedAnswer)
        ]
        self._table.keep(rows)
        return rows

    async def _run_stored(self, db: LaneSession) -> bool:
        """Run rows that this lane has stored, one transaction's worth; returns whether there were any."""
        if self._table.paused:
            self._table.put_back(self._rows)
            self._rows = deque()
        if not self._rows or self._stop():
            return False
        await self._run(db, take_together(self._app, self._rows), self)
        return True

    async def _run(
        self,
        db: LaneSession,
        rows: list[Row],
        following: Following | None = None,
        *,
        apart: bool = False,
    ) -> None:
        """Run rows, and behind an ordered row those of the same key, up to `Lease.batch`."""
        if len(rows) > 1:
            await self._run_together(db, rows, following, apart=apart)
            return
        row: Row | None = rows[0]
        remaining = self._app.lease.batch
        while row is not None:
            await self._run_together(db, [row], following)
            remaining -= 1
            row = await self._table.behind(db, row) if remaining else None

    async def _run_together(
        self, db: LaneSession, rows: list[Row], following: Following | None, *, apart: bool = False
    ) -> None:
        first, protocol = rows[0], self._app.protocol
        handler, options = first.handler, first.handler.options
        if len(rows) > 1 and options.lock_key is not None:
            rows.sort(key=lambda row: handler.lock_key(row.leased.arrival.message) or "")
        began = time.monotonic()
        with self._table.running(rows), db.followed_by(following):
            answers = await protocol.with_retries(
                db,
                lambda db: protocol.run_leased_many(
                    db,
                    handler,
                    [row.leased for row in rows],
                    first.token,
                    apart=apart,
                    stop=self._stop,
                ),
                consumer=handler.consumer,
                stop=self._stop,
            )
        received_at = [row.leased.arrival.message.received_at for row in rows]
        self._app.activity.ran(handler.consumer, answers, received_at, began)
        failed = any(answer.outcome is Outcome.FAILED for answer in answers)
        # finishing a suspect or ordered row lets others run, and a retry may be due at once
        at_once = failed and options.retry.base.total_seconds() == 0
        if first.suspect or options.in_order or at_once:
            self._table.mark_due()
        elif failed:
            self._agenda.poll_soon()

    def _rests(self) -> bool:
        """End the turn and return True, unless work has arrived meanwhile."""
        with self._lock:
            if self._queue or self._woken or self._stop():
                return False
            self.busy = False
            # under the lock: another turn may begin as soon as it is released
            again_at = self._again[0][0] if self._again else None
        if again_at is not None:
            # never in this thread, which still runs this turn
            self._agenda.look(self.wake, max(_SOON_S, again_at - time.monotonic()))
        return True


# -- one batch behind another -----------------------------------------------------------------


class Following(Protocol):
    """Provides the batch behind the current one."""

    def begin(self, db: LaneSession) -> Statements | None:
        """Return what its transaction begins with; None if nothing is ready. Called while a COMMIT is under way."""
        ...

    def put_back(self) -> None:
        """Give back what was prepared: the current batch is not finished after all."""
        ...


class LaneSession(Session):
    """A session that begins the transaction of the next batch right behind a COMMIT, on the same connection."""

    __slots__ = ("_following", "_preparing")

    def __init__(self, connections: Connections) -> None:
        super().__init__(connections)
        self._following: Following | None = None
        self._preparing = False

    def prepare(self, operation: Coroutine[Any, Any, Any]) -> Statements | None:
        """Run an operation of this session up to its first transaction without sending anything; see `resumed`.

        Returns: what that transaction begins with; None if the operation has something else to do first.
        """
        self._preparing = True
        try:
            statements: Statements | None = operation.send(None)
        finally:
            self._preparing = False
        return statements

    @contextmanager
    def followed_by(self, following: Following | None) -> Generator[None]:
        """Offer what comes next to the first COMMIT in this block.

        Only to the first: if the batch goes on, it may have to wait, and a waiter must have no ids in flight.
        """
        self._following = following
        self._then = None if following is None else partial(_begin_behind, self, following)
        try:
            yield
        finally:
            self._following = self._then = None

    async def _settle_ahead(self, statements: Statements | None = None) -> None:
        if self._preparing:
            await _pause(statements)
        if self._following is not None and self._then is None:
            following, self._following = self._following, None
            following.put_back()
        ahead = None if self.connection is None else self.connection.ahead
        if ahead is not None and ahead is not statements:
            await self.rollback()

    def discard(self) -> None:
        """See `Session.discard`."""
        # while it prepares, the connection is that of the batch before, whose COMMIT is under way
        if not self._preparing:
            super().discard()

    close = discard

    async def together(self, statements: Statements) -> list[Result]:
        """See `Session.together`; what is prepared pauses in the `begin` of two steps."""
        if self._preparing:
            results = await self.begin(statements)
            await self.commit()
            return results
        return await super().together(statements)


def _begin_behind(db: LaneSession, following: Following) -> Statements | None:
    at("during:commit")
    return following.begin(db)


@coroutine
def _pause(statements: Statements | None) -> Generator[Any, Any, None]:
    yield statements


@coroutine
def resumed(operation: Coroutine[Any, Any, T]) -> Generator[Any, Any, T]:
    """Await an operation that `LaneSession.prepare` has already started; a plain `await` refuses those."""
    answer: T = yield from operation  # pyright: ignore[reportUnknownVariableType]
    return answer  # pyright: ignore[reportUnknownVariableType]


class Prepared:
    """A batch that is ready for its first transaction; nothing has been sent yet.

    Attributes:
        statements: what its transaction begins with; None if something else comes first.
        mode: how its messages are processed.
    """

    __slots__ = ("_operation", "batch", "mode", "statements")

    def __init__(
        self,
        db: LaneSession,
        batch: list[Work],
        operation: Coroutine[Any, Any, list[Answer]],
        mode: Mode = Mode.INLINE,
    ) -> None:
        self.batch = batch
        self.mode = mode
        self._operation = operation
        self.statements = db.prepare(operation)

    async def answers(self) -> list[Answer]:
        """Run the batch to its end."""
        return await resumed(self._operation)

    def close(self) -> None:
        """Abandon the batch; it releases its ids."""
        self._operation.close()


# -- what a lane works on ---------------------------------------------------------------------


class HandlerModes:
    """The modes of one handler's deliveries: the first time, and when redelivered.

    A redelivered message may have killed its worker, so its run must be counted before it begins. Runs from the
    table are counted anyway, and the table also keeps the order of keys.
    """

    __slots__ = ("handler", "in_order", "lock_key", "once", "redelivered")

    def __init__(self, handler: Handler) -> None:
        options = handler.options
        self.handler = handler
        self.in_order = options.in_order
        # ordered handlers go by the message's key instead
        self.lock_key = options.lock_key is not None and not options.in_order
        stored = options.mode == "stored"
        self.once = Mode.STORED if stored else Mode.INLINE if options.transactional else Mode.LEASED
        self.redelivered = Mode.STORED if stored or options.in_order else Mode.LEASED


class Parts:
    """Counts the consumers that have not settled their part of a delivery."""

    __slots__ = ("_lock", "_unsettled_parts")

    def __init__(self, parts: int) -> None:
        self._unsettled_parts = parts
        self._lock = threading.Lock()

    def settled(self) -> bool:
        """Settle one part; returns whether it was the last."""
        with self._lock:
            self._unsettled_parts -= 1
            return self._unsettled_parts == 0


#: Acknowledges deliveries that every consumer has settled; called from the lanes' threads.
Acknowledge = Callable[[Sequence[Delivery]], None]


class Work:
    """One consumer's part of a delivery.

    Attributes:
        key: of the message, if the handler is ordered.
        lock_key: what the handler locks, if known.
        parts: shared with the other consumers of this delivery; None if there are no others.
        received: when, by `time.monotonic`.
        backoff: before its next claim, once another transaction had its id.
    """

    __slots__ = (
        "acknowledge", "backoff", "delivery", "key", "lock_key", "message", "mode", "modes", "parts",
        "received",
    )  # fmt: skip

    def __init__(
        self,
        acknowledge: Acknowledge,
        delivery: Delivery,
        message: Message[Any],
        modes: HandlerModes,
        parts: Parts | None,
    ) -> None:
        self.acknowledge = acknowledge
        self.delivery = delivery
        self.message = message
        self.modes = modes
        self.parts = parts
        self.mode = modes.redelivered if delivery.redelivered else modes.once
        self.key: str | None = None
        self.lock_key: str | None = None
        self.received = delivery.received_at
        self.backoff: Backoff | None = None

    def store_if_late(self) -> None:
        """Leave it to the table once its broker may give it up, see `Delivery`."""
        store_from = self.delivery.store_from
        if store_from is not None and time.monotonic() >= store_from:
            self.mode = Mode.STORED


def settle(works: Iterable[Work]) -> None:
    """Settle parts of deliveries, and acknowledge the deliveries whose last part is settled."""
    settled: dict[Acknowledge, list[Delivery]] = {}
    for work in works:
        if work.parts is None or work.parts.settled():
            group = settled.get(work.acknowledge)
            if group is None:
                settled[work.acknowledge] = [work.delivery]
            else:
                group.append(work.delivery)
    for acknowledge, deliveries in settled.items():
        acknowledge(deliveries)
