"""Work from the table: rows that this process has leased, and when to look for more."""

from __future__ import annotations

import heapq
import itertools
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from txbox.app import App
from txbox.boundaries import Boundary
from txbox.errors import CURABLE, Fault, StoreError
from txbox.events import MessageUnmatched
from txbox.handlers import Handler
from txbox.policy import Backoff
from txbox.session import Session
from txbox.store import leases
from txbox.store.codec import Leased
from txbox.worker.driving import Driver

_BUSY_S = 0.05
_IDLE_S = 2.5
# a pause is then about a quarter of the time since something happened
_GROWTH = 1.25
# a row that is due by the database's clock must be so when it is asked for
_MARGIN_S = 0.005
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
    taken = [row]
    if row.alone:
        return taken
    messages_max = app.protocol.batch_sizes.of(row.handler).messages
    bytes_left = app.batching.payload_bytes - _size_bytes(row)
    while len(taken) < messages_max and index < len(rows):
        following = rows[index]
        bytes_left -= _size_bytes(following)
        if (
            following.handler is not row.handler
            or following.token != row.token
            or following.suspect
            or bytes_left < 0
        ):
            break
        del rows[index]
        taken.append(following)
    return taken


def _size_bytes(row: Row) -> int:
    return len(row.leased.arrival.message.payload or b"")


class Poll:
    """Asks the database for every consumer of a worker at once what is due, and when the next row is.

    Args:
        consumers: of the worker.
        due: called with a consumer's name when a row of its is due, with "" for the outbox.
        outbox: ask for the outbox, too.
        stop: True when nothing more is to be started.

    It asks often after `soon`, and then less and less often: at least every 2.5 s, or as `RelayPolicy.poll` says.
    """

    def __init__(
        self,
        app: App,
        consumers: Sequence[str],
        *,
        due: Callable[[str], None],
        outbox: bool,
        stop: Callable[[], bool],
    ) -> None:
        self._app = app
        self._consumers = consumers
        self._due = due
        routes = app.routes.all() if outbox else []
        names = [route.name for route in routes]
        self._local = next((route.name for route in routes if route.destination is None), None)
        # and what was staged without one
        self._routes = [*names, ""] if names else []
        self._stop = stop
        self._idle_s = min(_IDLE_S, app.relaying.poll.total_seconds()) if outbox else _IDLE_S
        self._changed = threading.Condition()
        self._backoff = Backoff(_BUSY_S, self._idle_s, factor=_GROWTH, spread=(0.9, 1.0))
        self._asked_at = self._ask_at = 0.0
        # what the last answers said of the time until the next ones
        self._due_at: dict[str, float] = {}
        # since when, by the last answer, the first row has been due
        self._late_since: dict[str, float] = {}
        self._calls: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()

    def run(self, driver: Driver) -> None:
        """Poll until stopped."""
        while not self._stop():
            try:
                for call in self._next():
                    call()
                if time.monotonic() >= self._ask_at and not self._stop():
                    self._ask(driver)
            except Exception as error:  # noqa: BLE001  # see contain
                retry_in_s = max(0.0, self._ask_at - time.monotonic())
                self._app.protocol.contain(Boundary.POLL, error, retry_in_s=retry_in_s)

    def soon(self) -> None:
        """Rows may become due before the next look: look at once, and often for a while. From any thread."""
        with self._changed:
            self._backoff.reset()
            # not more often than that, however much there is to tell
            ask_at = max(time.monotonic(), self._asked_at + _BUSY_S)
            if ask_at < self._ask_at:
                self._ask_at = ask_at
                self._changed.notify()

    def call_at(self, at: float, call: Callable[[], None]) -> None:
        """Call something at a time of the monotonic clock, from the thread of the poll."""
        with self._changed:
            heapq.heappush(self._calls, (at, next(self._order), call))
            self._changed.notify()

    def late(self) -> dict[str, float]:
        """For how many seconds the first due row of each consumer, and of the outbox under "", has been due."""
        now = time.monotonic()
        return {name: now - since for name, since in self._late_since.items()}

    def wake(self) -> None:
        """Look whether to stop."""
        with self._changed:
            self._changed.notify()

    def _next(self) -> list[Callable[[], None]]:
        """Wait until it is time to ask, or to call; returns whom."""
        with self._changed:
            now = time.monotonic()
            first = self._calls[0][0] if self._calls else self._ask_at
            until = min([self._ask_at, first, *self._due_at.values()])
            if until > now and not self._stop():
                self._changed.wait(until - now)
                now = time.monotonic()
            calls: list[Callable[[], None]] = []
            for name in [name for name, at in self._due_at.items() if at <= now]:
                del self._due_at[name]
                calls.append(partial(self._due, name))
            while self._calls and self._calls[0][0] <= now:
                calls.append(heapq.heappop(self._calls)[2])
            return calls

    def _ask(self, driver: Driver) -> None:
        with self._changed:
            pause_s = self._backoff.next_s()
            # before the answer comes: `soon` may be called meanwhile
            self._asked_at = time.monotonic()
            self._ask_at = self._asked_at + pause_s
        app = self._app
        try:
            answer = driver.perform(
                app.protocol.persistently,
                lambda db: leases.due(
                    db,
                    app.store.dialect,
                    self._consumers,
                    ahead_s=pause_s + _BUSY_S,
                    routes=self._routes,
                    local=self._local,
                ),
                stop=self._stop,
            )
        except StoreError as error:
            if self._stop() and error.fault in CURABLE:
                return
            if error.fault is Fault.SCHEMA:
                # raises with the command to run, if that is it
                driver.perform(app.protocol.check_schema)
            raise
        self._tell(answer)

    def _tell(self, answer: list[tuple[str, float]]) -> None:
        now = time.monotonic()
        self._late_since = {name: now + in_s for name, in_s in answer if in_s <= 0}
        for name, in_s in answer:
            if in_s <= 0:
                self._due(name)
            else:
                self._due_at[name] = now + in_s + _MARGIN_S


class Table:
    """The due rows of one consumer, leased in batches and handed to its lanes.

    Args:
        suspects: one for the whole process: of the rows that may kill it, it runs one at a time.
        stop: True when nothing more is to be started.
        wake: called when rows have come.
        soon: called when rows may become due before the next poll; see `Poll.soon`.
    """

    def __init__(
        self,
        app: App,
        consumer: str,
        *,
        suspects: threading.Lock,
        stop: Callable[[], bool],
        wake: Callable[[], None],
        soon: Callable[[], None],
    ) -> None:
        self.consumer = consumer
        self.soon = soon
        self._app = app
        self._suspects = suspects
        self._stop = stop
        self._wake = wake
        self._lock = threading.Lock()
        self._rows: deque[Row] = deque()
        self._held: dict[str, set[str]] = {}
        self._leasing = False
        self._look = False
        # what the poll says to be due may be another's, or wait for its turn
        self._backoff = Backoff(_BUSY_S, _IDLE_S)
        self._due_from = 0.0
        self._suspects_at = 0.0
        self._heads_only, self._dead_blocks = app.handlers.order_of(consumer)
        self._handlers = app.handlers.consumers().get(consumer, [])

    async def next(self, db: Session, is_async: bool, lane: int) -> list[Row]:
        """Return rows that may share a transaction; leases more when none is here and it is time to look."""
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
        found: Leased | None = None
        try:
            found = await app.protocol.persistently(
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
        if found is None:
            return None
        message = found.arrival.message
        handlers = app.handlers.matching(message.topic, message.type, self.consumer)
        if not handlers:
            await self._refuse(db, [found], token)
            return None
        next_row = Row(handlers[0], found, token, False)
        self.hold([next_row])
        return next_row

    @property
    def leased(self) -> int:
        """Rows whose lease is held here."""
        with self._lock:
            return sum(len(ids) for ids in self._held.values())

    @property
    def paused(self) -> bool:
        """True while nobody is to run this consumer: what comes is stored, what is stored stays."""
        return self.consumer in self._app.pauses.held

    @property
    def due(self) -> bool:
        """True when there are rows here, or it is time to look for some."""
        return bool(self._rows) or self._look

    def look_now(self) -> None:
        """Something was put into the table: do not wait for the next poll."""
        self._look = True

    def told(self) -> bool:
        """The poll says that rows are due; returns whether to look for them now."""
        if time.monotonic() < self._due_from:
            return False
        self._look = True
        return True

    @contextmanager
    def running(self, rows: Sequence[Row]) -> Generator[None]:
        """Hold the leases of rows while they run; they end with it."""
        try:
            yield
        finally:
            self._forget(rows)
            for row in rows:
                if row.suspect:
                    self._suspects.release()

    def hold(self, rows: Iterable[Row]) -> None:
        """Keep the leases of rows that a lane has leased itself, until each has run."""
        with self._lock:
            for row in rows:
                self._held.setdefault(row.token, set()).add(row.message_id)

    def put_back(self, rows: Iterable[Row]) -> None:
        """Take rows over that their lane does not run any more: `give_back` releases them."""
        with self._lock:
            self._rows.extend(rows)

    async def heartbeat(self, db: Session) -> None:
        """Extend every lease held here."""
        with self._lock:
            held = [(token, sorted(ids)) for token, ids in self._held.items()]
        for token, ids in held:
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
                # their leases are held on, and they are released the next time
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
            if self._leasing or self._rows or self._stop() or not self._look:
                return False
            self._leasing = True
            # at once: whoever has something to tell meanwhile is heard
            self._look = False
            return True

    async def _lease(self, db: Session) -> None:
        limit = self._limit()
        found = await self._leased(db, limit, suspect=False)
        now = time.monotonic()
        # with much to do, those that may kill the process are looked for now and then only
        if (found < limit or now >= self._suspects_at) and self._suspects.acquire(blocking=False):
            self._suspects_at = now + _IDLE_S
            # released when its run has ended; at once when there is none
            taken = 0
            try:
                taken = await self._leased(db, 1, suspect=True)
            finally:
                if not taken:
                    self._suspects.release()
            found += taken
        if not found:
            self._look_later()
            return
        self._backoff.reset()
        self._due_from = 0.0
        if found >= limit:
            self._look = True
        else:
            self.soon()
        self._wake()

    def _look_later(self) -> None:
        self._due_from = time.monotonic() + self._backoff.next_s()

    def _not_leased(self, db: Session, error: Exception) -> None:
        """Rows are left where they are: what was leased without an answer is rescued."""
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
        found: list[Leased] = await app.protocol.persistently(
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
        for leased in found:
            message = leased.arrival.message
            handlers = app.handlers.matching(message.topic, message.type, self.consumer)
            if handlers:
                rows.append(Row(handlers[0], leased, token, suspect))
            else:
                unmatched.append(leased)
        self.hold(rows)
        self.put_back(rows)
        if unmatched:
            await self._refuse(db, unmatched, token)
        return len(rows)

    async def _refuse(self, db: Session, unmatched: list[Leased], token: str) -> None:
        """Give rows back that another release of this service may know how to handle."""
        ids = [leased.arrival.message_id for leased in unmatched]
        await self._app.protocol.persistently(
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
                ids = self._held.get(row.token)
                if ids is not None:
                    ids.discard(row.message_id)
                    if not ids:
                        del self._held[row.token]
