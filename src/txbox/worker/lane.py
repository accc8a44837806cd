"""A lane: one line of work of one consumer, with one batch in flight."""

from __future__ import annotations

import heapq
import itertools
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable

from txbox.app import App
from txbox.errors import Fault, StoreError
from txbox.handlers import Handler
from txbox.outcome import Answer, Outcome
from txbox.processing.in_flight import Holder
from txbox.processing.intake import Leasing
from txbox.processing.patience import CURABLE
from txbox.steps import Begin, Rollback, Steps
from txbox.worker.ahead import Following, Prepared, carried_on
from txbox.worker.table import Row, Table, take_together
from txbox.worker.work import Mode, Work, settle

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

    def turn(self) -> Steps[bool]:
        """Work until there is nothing to do, or it is stopped, or others wait: then it wants another turn.

        What is running when it is stopped is brought to its end.
        """
        ended = True
        try:
            while not self._stop():
                self._woken = False
                took = yield from self._take_next()
                # in turns, so that neither the source nor the table starves
                worked = yield from self._run_own()
                if self._is_ahead():
                    continue
                if self._stop():
                    break
                rows = yield from self._table.next(self._is_async, self._index)
                if rows:
                    yield from self._run(rows)
                if not rows and not took and not worked:
                    if self._rests():
                        ended = False
                        return False
                elif self._crowded():
                    ended = False
                    return True
            if self._is_ahead():
                # begun, and never run
                yield Rollback()
        except StoreError as error:
            if error.fault is Fault.SCHEMA:
                yield from self._app.check_schema()  # raises with the command to run, if that is it
            if not (self._stop() and error.fault in CURABLE):
                raise
            return False
        else:
            return False
        finally:
            if ended:
                if self._ahead is not None:
                    self._ahead.steps.close()
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
                bytes_left -= work.delivery.size_bytes
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

    def _take_next(self) -> Steps[bool]:
        """Take what was begun ahead, else what has arrived; returns whether there was anything."""
        ahead, self._ahead = self._ahead, None
        if ahead is None:
            self._in_a_row = 0
            batch = self._next_batch()
            if not batch:
                return False
            if batch[0].mode is Mode.LEASED:
                yield from self._deliver_leased(batch)
                return True
            ahead = self._prepared(batch)
        else:
            self._in_a_row += 1
        if ahead.leasing is None:
            yield from self._deliver(ahead)
        else:
            yield from self._store(ahead, ahead.leasing)
        return True

    def _prepared(self, batch: list[Work]) -> Prepared:
        """A batch with the steps that bring it to its outcomes; nothing of it has been sent."""
        first, handler = batch[0], batch[0].modes.handler
        leasing: Leasing | None = None
        if first.mode is Mode.STORED:
            if self._runs_stored(first):
                leasing = Leasing(self._app.lease)
            else:
                handler = handler.stored
        steps = self._app.taken(
            handler,
            [work.message for work in batch],
            leasing=leasing,
            holder=self._holder,
            stop=self._stop,
        )
        return Prepared(batch, steps, leasing)

    def begin(self) -> Begin | None:
        """The claim of the next batch, when there is a whole one already: waiting would not make it larger.

        Where the order of a key counts, what comes next depends on what becomes of this; and the table has
        its turn when it is time to look.
        """
        if self._ahead is None and self._may_look_ahead():
            self._ahead = self._prepared(self._next_batch())
        return None if self._ahead is None else self._ahead.begin

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
            ahead.steps.close()
            with self._lock:
                self._queue.extendleft(reversed(ahead.batch))

    def _is_ahead(self) -> bool:
        return self._ahead is not None

    def _deliver(self, prepared: Prepared) -> Steps[None]:
        answers: list[Answer] = yield from carried_on(prepared.steps, prepared.first, self)
        if self._settled(prepared.batch, answers):
            self._table.look_now()

    def _store(self, prepared: Prepared, leasing: Leasing) -> Steps[None]:
        """Store and lease a batch in one transaction, settle it, and keep the rows to be run next."""
        handler = prepared.batch[0].modes.handler
        answers: list[Answer] = yield from carried_on(prepared.steps, prepared.first)
        self._hold_rows(leasing, handler)
        self._settled(prepared.batch, answers)
        if leasing.given_back:
            self._table.look_now()

    def _settled(self, batch: list[Work], answers: list[Answer]) -> int:
        """Settle what may be, hold the rest; returns how many the table has."""
        done: list[Work] = []
        deferred, failed = 0, False
        for work, settled in zip(batch, answers, strict=True):
            if not settled.outcome.settles:
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

    def _deliver_leased(self, batch: list[Work]) -> Steps[None]:
        """Store and lease a batch in one transaction, then run it here, in order, each row alone.

        Nobody else sees these rows before this lane is done with them, so the order of the lane holds.
        """
        handler, leasing = batch[0].modes.handler, Leasing(self._app.lease)
        answers: list[Answer] = yield from self._app.taken(
            handler, [work.message for work in batch], leasing=leasing, stop=self._stop
        )
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
            while rows and not self._stop():
                yield from self._run([rows.popleft()])
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

    def _run_own(self) -> Steps[bool]:
        """Run what this lane has stored itself, as many rows as a transaction takes."""
        if not self._rows or self._stop():
            return False
        yield from self._run(take_together(self._app, self._rows), self)
        return True

    def _run(self, rows: list[Row], following: Following | None = None) -> Steps[None]:
        """Run rows; after an ordered one those of its key that waited behind it, as many as a lease takes."""
        if len(rows) > 1:
            yield from self._run_together(rows, following)
            return
        row: Row | None = rows[0]
        left = self._app.lease.batch
        while row is not None:
            yield from self._run_together([row], following)
            left -= 1
            row = (yield from self._table.behind(row)) if left else None

    def _run_together(self, rows: list[Row], following: Following | None) -> Steps[None]:
        first, protocol = rows[0], self._app.protocol
        handler, options = first.handler, first.handler.options
        if len(rows) > 1 and options.lock_key is not None:
            rows.sort(key=lambda row: handler.lock_key(row.leased.arrival.message) or "")
        with self._table.running(rows):
            steps = protocol.persistently(
                lambda: protocol.run_leased_many(
                    handler, [row.leased for row in rows], first.token
                ),
                consumer=handler.consumer,
                stop=self._stop,
            )
            answers: list[Answer] = yield from carried_on(steps, next(steps), following)
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


def _lock_key(work: Work) -> str:
    return work.lock_key or ""
