"""A lane: one line of work of one consumer, with one batch in flight."""

from __future__ import annotations

import heapq
import itertools
import random
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

from txbox.app import App
from txbox.brokers.base import Delivery
from txbox.errors import Fault, StoreError
from txbox.handlers import Handler
from txbox.outcome import Outcome
from txbox.patience import CURABLE
from txbox.protocol import Settled
from txbox.steps import Steps, Wait
from txbox.worker.table import Row, Table

_IDLE_S = 1.0
_AGAIN_S = (0.1, 5.0)


class Ticket:
    """A delivery in work; it is settled after every consumer has settled its part."""

    __slots__ = ("_lock", "_open", "_settled", "delivery")

    def __init__(self, delivery: Delivery, parts: int, settled: Callable[[Ticket], None]) -> None:
        self.delivery = delivery
        self._open = parts
        self._settled = settled
        self._lock = threading.Lock()

    def part_settled(self) -> None:
        with self._lock:
            self._open -= 1
            last = self._open == 0
        if last:
            self._settled(self)


@dataclass(slots=True, eq=False)
class Work:
    """One consumer's part of a delivery."""

    ticket: Ticket
    handler: Handler
    tries: int = field(default=0)


class Lane:
    """Runs deliveries in their order and rows from the table in turns, one batch at a time.

    Guarantee: what it has not brought to a settling outcome stays unacknowledged.
    """

    def __init__(
        self, app: App, table: Table, *, index: int, is_async: bool, stop: Callable[[], bool]
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
        self._waiter: Future[None] | None = None

    @property
    def name(self) -> str:
        return f"txbox-{self._table.consumer}-{self._index}"

    def put(self, work: Work) -> None:
        with self._lock:
            self._queue.append(work)
        self.wake()

    def wake(self) -> None:
        with self._lock:
            waiter, self._waiter = self._waiter, None
        if waiter is not None:
            waiter.set_result(None)

    def steps(self) -> Steps[None]:
        """Work until stopped; what is running then is brought to its end."""
        try:
            while not self._stop():
                batch = self._next_batch()
                if batch:
                    yield from self._deliver(batch)
                    if self._stop():
                        break
                # in turns, so that neither the source nor the table starves
                row = yield from self._table.next(self._is_async, self._index)
                if row is not None:
                    yield from self._run_row(row)
                if row is None and not batch:
                    yield from self._idle()
        except StoreError as error:
            if error.fault is Fault.SCHEMA:
                yield from self._app.check_schema()  # raises with the command to run, if that is it
            if not (self._stop() and error.fault in CURABLE):
                raise

    # -- deliveries ---------------------------------------------------------------------------

    def _next_batch(self) -> list[Work]:
        now = time.monotonic()
        if self._again and self._again[0][0] <= now:
            return [heapq.heappop(self._again)[2]]
        batch: list[Work] = []
        size = 0
        with self._lock:
            while self._queue:
                work = self._queue[0]
                size += work.ticket.delivery.size_bytes
                if batch and (
                    work.ticket.delivery.redelivered
                    or batch[0].ticket.delivery.redelivered
                    or work.handler is not batch[0].handler
                    or len(batch) >= self._batch_messages(batch[0].handler)
                    or size > self._app.batching.payload_bytes
                ):
                    break
                batch.append(self._queue.popleft())
        return batch

    def _batch_messages(self, handler: Handler) -> int:
        """The one place that decides how many deliveries share a transaction."""
        if handler.options.batch or handler.options.mode == "stored":
            return self._app.batching.messages
        return 1

    def _deliver(self, batch: list[Work]) -> Steps[None]:
        handler = batch[0].handler
        messages = [
            work.ticket.delivery.message
            for work in batch
            if work.ticket.delivery.message is not None
        ]
        # it may have killed the worker that had it: alone, and its start counted first
        suspect = batch[0].ticket.delivery.redelivered
        answers: list[Settled] = yield from self._app.taken(
            handler, messages, suspect=suspect, stop=self._stop
        )
        for work, settled in zip(batch, answers, strict=True):
            if settled.outcome.settles:
                work.ticket.part_settled()
                if settled.outcome is Outcome.DEFERRED:
                    self._table.look_now()
            else:
                self._hold(work)

    def _hold(self, work: Work) -> None:
        """Keep a delivery that another transaction holds, and claim it again after a pause."""
        first_s, longest_s = _AGAIN_S
        pause_s = min(first_s * 2 ** min(work.tries, 10), longest_s) * random.uniform(0.5, 1.5)
        work.tries += 1
        heapq.heappush(self._again, (time.monotonic() + pause_s, next(self._order), work))

    # -- rows ---------------------------------------------------------------------------------

    def _run_row(self, row: Row) -> Steps[None]:
        with self._table.running(row):
            yield from self._app.protocol.persistently(
                lambda: self._app.protocol.run_leased(row.handler, row.leased, row.token),
                stop=self._stop,
            )
        # a retry may be due at once, and a finished row makes room for the next
        if row.suspect or row.handler.options.retry.base.total_seconds() == 0:
            self._table.look_now()

    # -- waiting ------------------------------------------------------------------------------

    def _idle(self) -> Steps[None]:
        wait_s = min(_IDLE_S, self._table.poll_in_s() or _IDLE_S)
        if self._again:
            wait_s = min(wait_s, max(0.0, self._again[0][0] - time.monotonic()))
        waiter: Future[None] = Future()
        with self._lock:
            if self._queue or self._stop():
                return
            self._waiter = waiter
        yield Wait(max(wait_s, 0.001), waiter)
        with self._lock:
            if self._waiter is waiter:
                self._waiter = None
