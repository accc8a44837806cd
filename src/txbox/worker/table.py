"""Work from the table: rows that this process has leased."""

from __future__ import annotations

import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from txbox.app import App
from txbox.boundaries import Boundary
from txbox.events import MessageUnmatched
from txbox.handlers import Handler
from txbox.policy import Backoff
from txbox.session import Session
from txbox.store import leases
from txbox.store.codec import Leased
from txbox.worker.agenda import Run

# after a lease without rows
_PAUSE_S = (0.05, 2.5)
# where rows come with a transaction that has not ended yet; then the polls go on
_EXPECT_S = (0.01, 0.05)
_SUSPECTS_S = 2.5
_UNMATCHED_S = 60.0


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """A leased row and the handler it goes to; `suspect`: its last run never ended, so it runs alone."""

    handler: Handler
    leased: Leased
    token: str
    suspect: bool

    @property
    def message_id(self) -> str:
        return self.leased.arrival.message_id

    @property
    def alone(self) -> bool:
        """True when no other row may share its transaction."""
        options = self.handler.options
        return self.suspect or options.in_order or not options.transactional


def take_together(app: App, rows: deque[Row], index: int = 0) -> list[Row]:
    """Take a row out, and those right behind it that may share its transaction."""
    row = rows[index]
    del rows[index]
    together = [row]
    if row.alone:
        return together
    messages_max = app.protocol.batch_sizes.of(row.handler).messages
    bytes_remaining = app.batching.payload_bytes - _size_bytes(row)
    while len(together) < messages_max and index < len(rows):
        following = rows[index]
        bytes_remaining -= _size_bytes(following)
        if (
            following.handler is not row.handler
            or following.token != row.token
            or following.suspect
            or bytes_remaining < 0
        ):
            break
        del rows[index]
        together.append(following)
    return together


def _size_bytes(row: Row) -> int:
    return len(row.leased.arrival.message.payload or b"")


class Table:
    """The due rows of one consumer, leased in batches and handed to its lanes."""

    def __init__(self, run: Run, consumer: str) -> None:
        app = run.app
        self.consumer = consumer
        #: Has each of the consumer's lanes take rows.
        self.wakes: list[Callable[[], None]] = []
        self._agenda = run.agenda
        self._app = app
        self._suspects = run.suspects
        self._stop = run.stopping.is_set
        self._lock = threading.Lock()
        self._rows: deque[Row] = deque()
        self._leases: dict[str, set[str]] = {}
        self._leasing = False
        self._due = False
        # while a transaction with rows for this consumer may be open
        self._expects: Backoff | None = None
        # what the poll says to be due may be another's, or wait for its turn
        self._backoff = Backoff(*_PAUSE_S)
        self._due_from = 0.0
        self._suspects_at = 0.0
        self._heads_only, self._dead_blocks = app.handlers.order_of(consumer)
        self._handlers = app.handlers.consumers().get(consumer, [])

    async def next(self, db: Session, is_async: bool, lane: int) -> list[Row]:
        """Return rows that may share a transaction; leases more when none is here and some may be due."""
        if self.paused:
            return []
        rows = self._pop(is_async, lane)
        if not rows and self._may_lease():
            try:
                await self._lease(db)
            except Exception as error:  # noqa: BLE001  # see contain
                self._not_leased(db, error)
            finally:
                self._leasing = False
            rows = self._pop(is_async, lane)
        return rows

    async def behind(self, db: Session, row: Row) -> Row | None:
        """Return the next row of an ordered row's key, once that has run; None where there is none to run now."""
        key, app = row.leased.arrival.message.key, self._app
        if not self._heads_only or key is None or self._stop() or self.paused:
            return None
        token = secrets.token_hex(16)
        leased: Leased | None = None
        try:
            leased = await app.protocol.with_retries(
                db,
                lambda db: leases.lease_next(
                    db,
                    app.store,
                    self.consumer,
                    key,
                    token=token,
                    lease=app.lease,
                    dead_blocks=self._dead_blocks,
                ),
                consumer=self.consumer,
                stop=self._stop,
            )
        except Exception as error:  # noqa: BLE001  # see contain
            self._not_leased(db, error)
        if leased is None:
            return None
        message = leased.arrival.message
        handlers = app.handlers.matching(message.topic, message.type, self.consumer)
        if not handlers:
            await self._refuse(db, [leased], token)
            return None
        next_row = Row(handlers[0], leased, token, False)
        self.keep([next_row])
        return next_row

    @property
    def leased(self) -> int:
        """Rows that this process has leased."""
        with self._lock:
            return sum(len(ids) for ids in self._leases.values())

    @property
    def paused(self) -> bool:
        """True while nobody is to run this consumer: what comes is stored, what is stored stays."""
        return self.consumer in self._app.pauses.paused

    @property
    def has_work(self) -> bool:
        """True when there are rows here, or it is time to lease some."""
        return bool(self._rows) or self._due

    def mark_due(self) -> None:
        """Have the lane that calls this lease rows when it has none: it has put some into the table."""
        self._due = True

    # -- called by the agenda -----------------------------------------------------------------

    def look(self) -> None:
        """See `Part.look`."""
        self._due = True
        self._wake()

    def expect(self) -> None:
        """See `Part.expect`."""
        self._expects = Backoff(*_EXPECT_S)
        self.look()

    def due(self) -> None:
        """See `Part.due`."""
        if time.monotonic() >= self._due_from:
            self.look()

    def _wake(self) -> None:
        for wake in self.wakes:
            wake()

    # -- leases -------------------------------------------------------------------------------

    @contextmanager
    def running(self, rows: Sequence[Row]) -> Generator[None]:
        """Keep the leases of rows while they run; they end with it."""
        try:
            yield
        finally:
            self._forget(rows)
            for row in rows:
                if row.suspect:
                    self._suspects.release()

    def keep(self, rows: Iterable[Row]) -> None:
        """Keep the leases of rows that a lane has leased itself, until each has run."""
        with self._lock:
            for row in rows:
                self._leases.setdefault(row.token, set()).add(row.message_id)

    def put_back(self, rows: Iterable[Row]) -> None:
        """Take rows over that their lane does not run any more: `give_back` releases them."""
        with self._lock:
            self._rows.extend(rows)

    async def heartbeat(self, db: Session) -> None:
        """Extend every lease of this process."""
        with self._lock:
            tokens = [(token, sorted(ids)) for token, ids in self._leases.items()]
        for token, ids in tokens:
            await leases.heartbeat(
                db, self._app.store, self.consumer, ids, token=token, lease=self._app.lease
            )

    async def give_back(self, db: Session) -> None:
        """Release the rows that no lane has started, those of one lease together."""
        while True:
            with self._lock:
                if not self._rows:
                    return
                token = self._rows[0].token
                rows = [row for row in self._rows if row.token == token]
                self._rows = deque(row for row in self._rows if row.token != token)
            ids = sorted(row.message_id for row in rows)
            try:
                await leases.release(
                    db, self._app.store, self.consumer, ids, token=token, delay_s=0.0
                )
            except BaseException:
                # their leases are kept, and they are released the next time
                self.put_back(rows)
                raise
            with self.running(rows):
                pass

    def _pop(self, is_async: bool, lane: int) -> list[Row]:
        if not self._rows:
            return []
        with self._lock:
            for index, row in enumerate(self._rows):
                if row.handler.is_async == is_async and lane < row.handler.options.concurrency:
                    return take_together(self._app, self._rows, index)
        return []

    def _may_lease(self) -> bool:
        with self._lock:
            if self._leasing or self._rows or self._stop() or not self._due:
                return False
            self._leasing = True
            # reset first, so that what becomes due during the query is not lost
            self._due = False
            return True

    async def _lease(self, db: Session) -> None:
        limit = self._limit()
        count = await self._leased(db, limit, suspect=False)
        now = time.monotonic()
        # with much to do, those that may kill the process are leased now and then only
        if (count < limit or now >= self._suspects_at) and self._suspects.acquire(blocking=False):
            self._suspects_at = now + _SUSPECTS_S
            # released when its run has ended; at once when there is none
            suspects = 0
            try:
                suspects = await self._leased(db, 1, suspect=True)
            finally:
                if not suspects:
                    self._suspects.release()
            count += suspects
        if not count:
            self._look_later()
            return
        self._backoff.reset()
        self._expects, self._due_from = None, 0.0
        if count >= limit:
            self._due = True
        else:
            self._agenda.poll_soon()
        self._wake()

    def _look_later(self) -> None:
        expects = self._expects
        if expects is None:
            self._due_from = time.monotonic() + self._backoff.next_s()
        elif expects.at_longest:
            self._expects = None
            self._agenda.poll_soon()
        else:
            self._agenda.look(self.look, expects.next_s())

    def _not_leased(self, db: Session, error: Exception) -> None:
        """Nothing is lost: what was leased without an answer is rescued."""
        self._app.protocol.contain(
            Boundary.LEASE, error, consumer=self.consumer, retry_in_s=self._backoff.pause_s
        )
        db.discard()
        self._look_later()

    def _limit(self) -> int:
        """Rows to lease: `Lease.batch`, or as many as the next transaction takes."""
        app = self._app
        batch_sizes = (
            app.protocol.batch_sizes.of(handler).messages
            for handler in self._handlers
            if not handler.options.in_order
        )
        return max(app.lease.batch, min(max(batch_sizes, default=1), app.batching.messages))

    async def _leased(self, db: Session, limit: int, *, suspect: bool) -> int:
        token = secrets.token_hex(16)
        app = self._app
        batch: list[Leased] = await app.protocol.with_retries(
            db,
            lambda db: leases.lease(
                db,
                app.store,
                self.consumer,
                token=token,
                limit=limit,
                lease=app.lease,
                suspect=suspect,
                heads_only=self._heads_only,
                dead_blocks=self._dead_blocks,
            ),
            consumer=self.consumer,
            stop=self._stop,
        )
        rows: list[Row] = []
        unmatched: list[Leased] = []
        for leased in batch:
            message = leased.arrival.message
            handlers = app.handlers.matching(message.topic, message.type, self.consumer)
            if handlers:
                rows.append(Row(handlers[0], leased, token, suspect))
            else:
                unmatched.append(leased)
        self.keep(rows)
        self.put_back(rows)
        if unmatched:
            await self._refuse(db, unmatched, token)
        return len(rows)

    async def _refuse(self, db: Session, unmatched: list[Leased], token: str) -> None:
        """Give rows back that another release of this service may know how to handle."""
        ids = [leased.arrival.message_id for leased in unmatched]
        await self._app.protocol.with_retries(
            db,
            lambda db: leases.release(
                db, self._app.store, self.consumer, ids, token=token, delay_s=_UNMATCHED_S
            ),
            consumer=self.consumer,
            stop=self._stop,
        )
        for leased in unmatched:
            message = leased.arrival.message
            self._app.events.emit(
                MessageUnmatched(
                    consumer=self.consumer,
                    message_id=leased.arrival.message_id,
                    topic=message.topic,
                    type=message.type,
                )
            )

    def _forget(self, rows: Iterable[Row]) -> None:
        with self._lock:
            for row in rows:
                ids = self._leases.get(row.token)
                if ids is not None:
                    ids.discard(row.message_id)
                    if not ids:
                        del self._leases[row.token]
