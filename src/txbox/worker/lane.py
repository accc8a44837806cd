"""A lane: one line of work of one consumer, with one batch in flight and the claim of the next one behind it.

While the server commits one batch and claims the next, the lane settles and prepares: neither waits
for the other's turn, and two round trips of each batch become one. What is begun ahead is the next
transaction, not a second one: it is begun when the one before it has ended, on the same connection.

Source: docs/decisions/0026-claims-ahead.md
"""

from __future__ import annotations

import heapq
import itertools
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Sequence
from enum import Enum
from typing import Any, Protocol

from txbox.app import App
from txbox.brokers.base import Delivery
from txbox.errors import Fault, StoreError
from txbox.handlers import Handler
from txbox.message import Message
from txbox.outcome import Answer, Outcome
from txbox.processing.intake import Leasing
from txbox.processing.waiting import CURABLE, Holder
from txbox.session import Following, Session, Statements, resumed
from txbox.worker.table import Row, Table, take_together

_AGAIN_S = (0.1, 5.0)
# then the connection is given back once: others may wait for it, in a pool or in a pooler of the server's
_ROW_MAX = 16


class Lane:
    """Runs deliveries in their order and rows from the table in turns, one batch at a time.

    Args:
        ready: called when there is something to do: from then on `turn` is carried out, once, and as often
            as it wants another.
        crowded: True when other lanes wait for the thread that this one has.
        wake_at: calls `wake` at a time of the monotonic clock.

    Guarantee: what it has not brought to a settling outcome stays unacknowledged.
    """

    def __init__(
        self,
        app: App,
        table: Table,
        *,
        index: int,
        is_async: bool,
        stop: Callable[[], bool],
        ready: Callable[[Lane], None],
        crowded: Callable[[], bool],
        wake_at: Callable[[float, Callable[[], None]], None],
    ) -> None:
        self._app = app
        self._table = table
        self._index = index
        self._is_async = is_async
        self._stop = stop
        self._lock = threading.Lock()
        self._queue: deque[Work] = deque()
        # deliveries whose id another transaction holds: claimed again here, when their time has come
        self._again: list[tuple[float, int, Work]] = []
        self._order = itertools.count()
        # of each key whose message is held: what came behind it
        self._behind: dict[str, deque[Work]] = {}
        # rows that this lane has stored and leased itself, to be run here
        self._rows: deque[Row] = deque()
        self._ready = ready
        self._crowded = crowded
        self._wake_at = wake_at
        #: True from `ready` to the end of its last turn.
        self.busy = False
        self._woken = False
        self._timed_at: float | None = None
        self._ahead: Prepared | None = None
        self._in_a_row = 0
        self._holder = Holder()

    @property
    def name(self) -> str:
        return f"txbox-{self._table.consumer}-{self._index}"

    def put(self, works: Iterable[Work] = ()) -> None:
        """Add deliveries, in their order, and wake the lane."""
        with self._lock:
            self._queue.extend(works)
            # told while it works: it looks once more before it rests
            self._woken = self.busy
            if self.busy or self._stop():
                return
            self.busy = True
        self._ready(self)

    def wake(self) -> None:
        """Have the lane look at what there is to do."""
        self.put()

    async def turn(self, db: Session) -> bool:
        """Work until there is nothing to do, or it is stopped, or others wait: then it wants another turn.

        What is running when it is stopped is brought to its end.
        """
        ended = True
        try:
            while not self._stop():
                self._woken = False
                took = await self._take_next(db)
                # in turns, so that neither the source nor the table starves
                worked = await self._run_stored(db)
                if self._is_ahead():
                    continue
                if self._stop():
                    break
                rows = await self._table.next(db, self._is_async, self._index)
                if rows:
                    await self._run(db, rows)
                if not rows and not took and not worked:
                    if self._rests():
                        ended = False
                        return False
                elif self._crowded():
                    ended = False
                    return True
            if self._is_ahead():
                # begun, and never run
                await db.rollback()
        except StoreError as error:
            if error.fault is Fault.SCHEMA:
                await self._app.check_schema(db)  # raises with the command to run, if that is it
            if not (self._stop() and error.fault in CURABLE):
                raise
            return False
        else:
            return False
        finally:
            if ended:
                if self._ahead is not None:
                    self._ahead.close()
                self._table.put_back(self._rows)
                self._rows = deque()
                self.busy = False

    # -- deliveries ---------------------------------------------------------------------------

    def _next_batch(self) -> list[Work]:
        """What has arrived and may share a transaction; nothing is waited for."""
        if self._again and self._again[0][0] <= time.monotonic():
            return [heapq.heappop(self._again)[2]]
        batch: list[Work] = []
        queue, behind = self._queue, self._behind
        first: Work | None = None
        messages_max, bytes_left = 1, self._app.batching.payload_bytes
        with self._lock:
            while queue:
                work = queue[0]
                if work.key is not None and work.key in behind:
                    behind[work.key].append(queue.popleft())
                    continue
                bytes_left -= len(work.message.payload or b"")
                if first is None:
                    first, messages_max = work, self._batch_messages(work)
                elif (
                    len(batch) >= messages_max
                    or work.modes is not first.modes
                    or work.mode is not first.mode
                    or bytes_left < 0
                ):
                    break
                batch.append(queue.popleft())
        if len(batch) > 1 and batch[0].modes.lock_key:
            # two transactions that lock the same rows take them in one order
            batch.sort(key=_lock_key)
        return batch

    def _batch_messages(self, first: Work) -> int:
        """The one place that decides how many deliveries share a transaction."""
        app, handler = self._app, first.modes.handler
        most = app.batching.messages
        if first.mode is Mode.INLINE:
            # each version of a key is decided by the one before it
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
        """Say whether this lane runs what it stores now: one that has rows to run does not take more."""
        options = work.modes.handler.options
        return not self._rows and options.mode == "stored" and not options.in_order

    async def _take_next(self, db: Session) -> bool:
        """Take what was begun ahead, else what has arrived; returns whether there was anything."""
        ahead, self._ahead = self._ahead, None
        if ahead is None:
            self._in_a_row = 0
            batch = self._next_batch()
            if not batch:
                return False
            if batch[0].mode is Mode.LEASED and not self._table.paused:
                await self._deliver_leased(db, batch)
                return True
            ahead = self._prepared(db, batch)
        else:
            self._in_a_row += 1
        if ahead.leasing is None:
            await self._deliver(db, ahead)
        else:
            await self._store(ahead, ahead.leasing)
        return True

    def _prepared(self, db: Session, batch: list[Work]) -> Prepared:
        """A batch that has come to its first transaction; nothing of it has been sent."""
        first, handler = batch[0], batch[0].modes.handler
        leasing: Leasing | None = None
        if self._table.paused:
            handler = handler.stored
        elif first.mode is Mode.STORED:
            if self._runs_stored(first):
                leasing = Leasing(self._app.lease)
            else:
                handler = handler.stored
        operation = self._app.intake.take_persistently(
            db,
            handler,
            [work.message for work in batch],
            leasing=leasing,
            holder=self._holder,
            received=[work.received for work in batch],
            stop=self._stop,
        )
        return Prepared(db, batch, operation, leasing)

    def begin(self, db: Session) -> Statements | None:
        """The claim of the next batch, when there is a whole one already: waiting would not make it larger.

        Where the order of a key counts, what comes next depends on what becomes of this; and the table has
        its turn when it is time to look.
        """
        if self._ahead is None and self._may_look_ahead():
            self._ahead = self._prepared(db, self._next_batch())
        return None if self._ahead is None else self._ahead.statements

    def _may_look_ahead(self) -> bool:
        queue = self._queue
        if not queue or self._again or self._table.due or self._stop():
            return False
        head = queue[0]
        return (
            self._in_a_row < _ROW_MAX
            and head.mode is not Mode.LEASED
            and not head.modes.in_order
            and len(queue) >= self._batch_messages(head)
        )

    def put_back(self) -> None:
        """The batch goes on: what was prepared behind it is taken again in its turn."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            ahead.close()
            with self._lock:
                self._queue.extendleft(reversed(ahead.batch))

    def _is_ahead(self) -> bool:
        return self._ahead is not None

    async def _deliver(self, db: Session, prepared: Prepared) -> None:
        began = time.monotonic()
        with db.followed_by(self):
            answers = await prepared.answers()
        if self._settled(prepared.batch, answers, began):
            self._table.look_now()

    async def _store(self, prepared: Prepared, leasing: Leasing) -> None:
        """Store and lease a batch in one transaction, settle it, and keep the rows to be run next."""
        handler, began = prepared.batch[0].modes.handler, time.monotonic()
        answers = await prepared.answers()
        self._hold_rows(leasing, handler)
        self._settled(prepared.batch, answers, began)
        if leasing.given_back:
            self._table.look_now()

    def _settled(self, batch: list[Work], answers: list[Answer], began: float) -> int:
        """Settle what may be, hold the rest; returns how many the table has."""
        self._app.activity.settled(self._table.consumer, answers, batch, began)
        done: list[Work] = []
        deferred, failed = 0, False
        for work, settled in zip(batch, answers, strict=True):
            if settled.outcome is Outcome.IN_PROGRESS:
                self._hold(work)
                continue
            done.append(work)
            if work.tries:
                self._let_go(work)
            if settled.outcome is Outcome.DEFERRED:
                deferred += 1
            elif settled.outcome is Outcome.FAILED:
                failed = True
        if failed:
            # its next run may be due before the next poll
            self._table.soon()
        settle(done)
        return deferred

    async def _deliver_leased(self, db: Session, batch: list[Work]) -> None:
        """Store and lease a batch in one transaction, then run it here, in order, each row alone.

        Nobody else sees these rows before this lane is done with them, so the order of the lane holds.
        """
        handler, leasing = batch[0].modes.handler, Leasing(self._app.lease)
        began = time.monotonic()
        answers: list[Answer] = await self._app.intake.take_persistently(
            db, handler, [work.message for work in batch], leasing=leasing, stop=self._stop
        )
        self._app.activity.settled(handler.consumer, answers, batch, began)
        rows = deque(Row(handler, leased, leasing.token, False) for leased in leasing.rows)
        self._table.hold(rows)
        done: list[Work] = []
        waiting: list[Work] = []
        for work, settled in zip(batch, answers, strict=True):
            if not settled.outcome.settles:
                self._hold(work)
            elif settled.outcome is Outcome.DEFERRED and handler.options.transactional:
                # a source that loses a partition waits for what is unsettled: order across workers
                waiting.append(work)
            else:
                # stored is enough; a run outside a transaction may be longer than a broker waits
                done.append(work)
        settle(done)
        try:
            while rows and not (self._stop() or self._table.paused):
                await self._run(db, [rows.popleft()])
        finally:
            self._table.put_back(rows)
        if not leasing.rows:
            self._table.look_now()
        settle(waiting)

    def _hold(self, work: Work) -> None:
        """Keep a delivery that another transaction holds, and claim it again after a pause.

        It holds its key, where a key's messages have an order.
        """
        key = work.key
        if key in self._behind and not work.tries:
            self._behind[key].append(work)
            return
        if key is not None:
            self._behind.setdefault(key, deque())
        first_s, longest_s = _AGAIN_S
        pause_s = min(first_s * 2 ** min(work.tries, 10), longest_s) * random.uniform(0.5, 1.5)
        work.tries += 1
        heapq.heappush(self._again, (time.monotonic() + pause_s, next(self._order), work))

    def _let_go(self, work: Work) -> None:
        behind = self._behind.pop(work.key, None) if work.key is not None else None
        if behind:
            with self._lock:
                self._queue.extendleft(reversed(behind))

    # -- rows ---------------------------------------------------------------------------------

    def _hold_rows(self, leasing: Leasing, handler: Handler) -> None:
        rows = [Row(handler, leased, leasing.token, False) for leased in leasing.rows]
        self._table.hold(rows)
        self._rows.extend(rows)

    async def _run_stored(self, db: Session) -> bool:
        """Run what this lane has stored itself, as many rows as a transaction takes."""
        if self._table.paused:
            self._table.put_back(self._rows)
            self._rows = deque()
        if not self._rows or self._stop():
            return False
        await self._run(db, take_together(self._app, self._rows), self)
        return True

    async def _run(self, db: Session, rows: list[Row], following: Following | None = None) -> None:
        """Run rows; after an ordered one those of its key that waited behind it, as many as a lease takes."""
        if len(rows) > 1:
            await self._run_together(db, rows, following)
            return
        row: Row | None = rows[0]
        left = self._app.lease.batch
        while row is not None:
            await self._run_together(db, [row], following)
            left -= 1
            row = await self._table.behind(db, row) if left else None

    async def _run_together(
        self, db: Session, rows: list[Row], following: Following | None
    ) -> None:
        first, protocol = rows[0], self._app.protocol
        handler, options = first.handler, first.handler.options
        if len(rows) > 1 and options.lock_key is not None:
            rows.sort(key=lambda row: handler.lock_key(row.leased.arrival.message) or "")
        began = time.monotonic()
        with self._table.running(rows), db.followed_by(following):
            answers = await protocol.persistently(
                db,
                lambda db: protocol.run_leased_many(
                    db, handler, [row.leased for row in rows], first.token
                ),
                consumer=handler.consumer,
                stop=self._stop,
            )
        received_at = [row.leased.arrival.message.received_at for row in rows]
        self._app.activity.ran(handler.consumer, answers, received_at, began)
        failed = any(answer.outcome is Outcome.FAILED for answer in answers)
        # a finished row makes room for the next, or for those behind it, and a retry may be due at once
        at_once = failed and options.retry.base.total_seconds() == 0
        if first.suspect or options.in_order or at_once:
            self._table.look_now()
        elif failed:
            self._table.soon()

    def _rests(self) -> bool:
        """Say whether there is nothing to do until somebody wakes it; then its turn is over."""
        with self._lock:
            if self._queue or self._woken or self._stop():
                return False
            self.busy = False
            # read before another turn may change it
            again_at = self._again[0][0] if self._again else None
            timed, self._timed_at = again_at == self._timed_at, again_at
        if again_at is not None and not timed:
            self._wake_at(again_at, self.wake)
        return True


class Prepared:
    """A batch that has come to its first transaction, of which nothing has been sent yet.

    Attributes:
        statements: what its transaction begins with; None when something else comes first.
        leasing: what is leased with the batch, where that is stored.
    """

    __slots__ = ("_operation", "batch", "leasing", "statements")

    def __init__(
        self,
        db: Session,
        batch: list[Work],
        operation: Coroutine[Any, Any, list[Answer]],
        leasing: Leasing | None = None,
    ) -> None:
        self.batch = batch
        self.leasing = leasing
        self._operation = operation
        self.statements = db.prepare(operation)

    async def answers(self) -> list[Answer]:
        """Bring the batch to its outcomes."""
        return await resumed(self._operation)

    def close(self) -> None:
        """Give up: it gives back what it holds."""
        self._operation.close()


# -- what a lane works on ---------------------------------------------------------------------


class Mode(Enum):
    """How a delivery is taken in (promises 4.4 to 4.6)."""

    INLINE = "inline"
    LEASED = (
        "leased"  # stored and leased, so that its run is counted, or one worker's, before it begins
    )
    STORED = "stored"


class HandlerModes:
    """Which way the deliveries for one handler go: the same for all of them.

    A redelivery may have killed the worker that had it: its run must be counted before it begins.
    Rows of the table are counted anyway; where a key's messages have an order, the table keeps that.
    """

    __slots__ = ("handler", "in_order", "lock_key", "once", "redelivered")

    def __init__(self, handler: Handler) -> None:
        options = handler.options
        self.handler = handler
        self.in_order = options.in_order
        # an order goes by the key of the messages, and no other lane or place in a batch will do
        self.lock_key = options.lock_key is not None and not options.in_order
        stored = options.mode == "stored"
        self.once = Mode.STORED if stored else Mode.INLINE if options.transactional else Mode.LEASED
        self.redelivered = Mode.STORED if stored or options.in_order else Mode.LEASED


class Parts:
    """How many consumers have yet to settle their part of a delivery."""

    __slots__ = ("_left", "_lock")

    def __init__(self, parts: int) -> None:
        self._left = parts
        self._lock = threading.Lock()

    def settled(self) -> bool:
        """Settle one part; returns whether it was the last."""
        with self._lock:
            self._left -= 1
            return self._left == 0


class Settling(Protocol):
    """Who acknowledges deliveries when every consumer has settled its part."""

    def deliveries_settled(self, deliveries: Sequence[Delivery]) -> None:
        """Called from the lanes' threads."""
        ...


class Work:
    """One consumer's part of a delivery.

    Attributes:
        key: that it has a place in, where its handler keeps an order.
        lock_key: what its handler locks, where it says so.
        parts: shared with the other consumers of this delivery; None when there is no other.
        received: when, by `time.monotonic`.
        tries: how often it was claimed while another transaction held it.
    """

    __slots__ = (
        "delivery", "key", "lock_key", "message", "mode", "modes", "owner", "parts", "received",
        "tries",
    )  # fmt: skip

    def __init__(
        self,
        owner: Settling,
        delivery: Delivery,
        message: Message[Any],
        modes: HandlerModes,
        parts: Parts | None,
    ) -> None:
        self.owner = owner
        self.delivery = delivery
        self.message = message
        self.modes = modes
        self.parts = parts
        self.mode = modes.redelivered if delivery.redelivered else modes.once
        self.key: str | None = None
        self.lock_key: str | None = None
        self.received = delivery.received_at
        self.tries = 0


def settle(works: Iterable[Work]) -> None:
    """Settle these parts; a delivery goes to whoever acknowledges it with its last part."""
    settled: dict[Settling, list[Delivery]] = {}
    for work in works:
        if work.parts is None or work.parts.settled():
            group = settled.get(work.owner)
            if group is None:
                settled[work.owner] = [work.delivery]
            else:
                group.append(work.delivery)
    for owner, deliveries in settled.items():
        owner.deliveries_settled(deliveries)


def _lock_key(work: Work) -> str:
    return work.lock_key or ""
