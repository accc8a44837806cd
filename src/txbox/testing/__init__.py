"""For testing handlers: deliver, race, drain, crash at named points, stop the clock; in their own transactions or
inside the test's."""

from __future__ import annotations

import asyncio
import inspect
import os
import re
import secrets
import signal
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager, suppress
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn
from unittest.mock import patch

from txbox import session
from txbox.app import App
from txbox.errors import ConfigurationError
from txbox.handlers import Handler
from txbox.maintenance import Task, rescue
from txbox.message import Message
from txbox.outcome import Outcome
from txbox.session import (
    Connections,
    Crashed,
    Session,
    Statement,
    async_of,
    blocking,
    drive,
    drive_async,
)
from txbox.store import leases
from txbox.store.dialect import Dialect, qualified
from txbox.testing.faults import (
    broker_away,
    database_away,
    deadlock,
    lost_commit_answer,
    passing,
    serialization_failure,
    statement_timeout,
)
from txbox.testing.inside import Savepoints, another_process, inside

if TYPE_CHECKING:
    from txbox.testing.proof import Report

__all__ = [
    "Clock",
    "Crashed",
    "another_process",
    "broker_away",
    "crash_at",
    "crash_everywhere",
    "crash_everywhere_async",
    "crash_points",
    "crash_points_async",
    "database_away",
    "deadlock",
    "deliver",
    "deliver_async",
    "drain",
    "drain_async",
    "frozen_clock",
    "inside",
    "install_from_environment",
    "kill_at",
    "lost_commit_answer",
    "meanwhile",
    "prove",
    "prove_async",
    "race",
    "race_async",
    "serialization_failure",
    "statement_timeout",
]

# for tests only, in SQL that every dialect understands
# Before every clock, a frozen one included. Rows of one moment keep their order of arrival.
_FORGET_DATES = (
    "UPDATE txbox_inbox SET next_attempt_at = '2000-01-01 00:00:00.000'"
    " WHERE consumer = :consumer AND status IN ('pending', 'failed')"
)
_FORGET_LEASES = (
    "UPDATE txbox_inbox SET lease_until = '2000-01-01 00:00:00.000'"
    " WHERE consumer = :consumer AND status = 'processing' AND lease_until IS NOT NULL"
)


def deliver(
    app: App, message: Message[Any], *, consumer: str | None = None, tx: Any = None
) -> Outcome:
    """Deliver a message once, through the real protocol. For a retry, call `deliver` again, or `drain`.

    Args:
        tx: work inside this transaction of the test; see `inside`.

    It raises whatever `App.process` raises. For an async handler use `deliver_async`.
    """
    _check_sync(app, message, consumer, "deliver")
    return _within(app, tx).process(message, consumer=consumer)


@async_of(deliver)
async def deliver_async(app: App, message: Any, *, tx: Any = None, **named: Any) -> Outcome:
    """`deliver` for async handlers."""
    async with _settled(_within(app, tx)) as app_within:
        return await app_within.process_async(message, **named)


def drain(app: App, *, ignore_dates: bool = False, tx: Any = None) -> list[Outcome]:
    """Process everything due in the table, for every consumer with a sync handler, until none is due.

    Args:
        ignore_dates: treat back-off delays and leases as expired, as if that much time had passed. A
            message that always fails then runs until it is dead.
        tx: work inside this transaction of the test; see `inside`.

    Returns: the outcome of each run, in order.
    """
    app = _within(app, tx)
    connections = app.database.sync
    if connections is None:
        raise ConfigurationError(
            f"{app.database.name} has async connections only: use drain_async()."
        )
    _check_kind(app, is_async=False)
    return drive(connections, _drained, app, False, ignore_dates)


@async_of(drain)
async def drain_async(app: App, *, ignore_dates: bool = False, tx: Any = None) -> list[Outcome]:
    """`drain` for every consumer with an async handler."""
    async with _settled(_within(app, tx)) as app_within:
        connections = app_within.database.asynchronous
        if connections is None:
            raise ConfigurationError(f"{app.database.name} has sync connections only: use drain().")
        _check_kind(app, is_async=True)
        return await drive_async(connections, _drained, app_within, True, ignore_dates)


def race(
    app: App, message: Message[Any], workers: int = 8, *, consumer: str | None = None
) -> list[Outcome]:
    """Deliver one message from many threads at the same moment, each as if in its own process.

    The losers wait in the database, so it needs connections that see each other's commits. It does not
    work with a rollback fixture or Django's TestCase.

    Args:
        workers: threads, 2 or more; your own pool must have as many connections.

    Returns: one outcome per worker. With a sound handler one is PROCESSED (or FAILED), and the others
        are DUPLICATE, DEFERRED, or IN_PROGRESS if they waited longer than Limits.lock_timeout.
    """
    _check_sync(app, message, consumer, "race")
    start = threading.Barrier(workers)

    def work(app_copy: App) -> Outcome:
        start.wait()
        return app_copy.process(message, consumer=consumer)

    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(work, [another_process(app) for _ in range(workers)]))


@async_of(race)
async def race_async(app: App, message: Any, workers: int = 8, **named: Any) -> list[Outcome]:
    """`race` with tasks instead of threads."""
    start = asyncio.Barrier(workers)

    async def work(app_copy: App) -> Outcome:
        await start.wait()
        return await app_copy.process_async(message, **named)

    return list(await asyncio.gather(*(work(another_process(app)) for _ in range(workers))))


def crash_points(
    app: App, message: Message[Any], *, consumer: str | None = None, tx: Any = None
) -> list[str]:
    """Deliver a message and return the crash points it passed, in order, repeats included.

    Any other message of this App, the first one too, passes the same points if it ends the same way.
    """
    _check_sync(app, message, consumer, "crash_points")
    app = _within(app, tx)
    if app.database.sync is not None:
        # first, because only some messages do: no later one need pass these points
        drive(app.database.sync, app.look_for_pauses)
    points: list[str] = []
    with passing(points.append):
        deliver(app, message, consumer=consumer)
    return points


@async_of(crash_points)
async def crash_points_async(app: App, message: Any, *, tx: Any = None, **named: Any) -> list[str]:
    """`crash_points` for async handlers."""
    points: list[str] = []
    async with _settled(_within(app, tx)) as app_within:
        if app_within.database.asynchronous is not None:
            await drive_async(app_within.database.asynchronous, app_within.look_for_pauses)
        with passing(points.append):
            await deliver_async(app_within, message, **named)
    return points


def crash_everywhere(
    app: App, message_of: Callable[[str], Message[Any]], *, consumer: str | None = None
) -> dict[str, Outcome]:
    """Crash one delivery at each point that a delivery passes, and deliver its message again.

    Compare then what the handler wrote with one effect for each point, and one more: the delivery by which the points
    were found.

    Args:
        message_of: makes a message of an id.

    Returns: for each point, in order, how the second delivery ended: PROCESSED, or DUPLICATE when the first had
        committed.
    """

    async def once(message: Message[Any]) -> Outcome:
        return deliver(app, message, consumer=consumer)

    points = crash_points(app, message_of("first"), consumer=consumer)
    return blocking(_crashed_everywhere(points, message_of, once))


@async_of(crash_everywhere)
async def crash_everywhere_async(
    app: App, message_of: Callable[[str], Any], **named: Any
) -> dict[str, Outcome]:
    """`crash_everywhere` for async handlers."""
    points = await crash_points_async(app, message_of("first"), **named)
    once = partial(deliver_async, app, **named)
    return await _crashed_everywhere(points, message_of, once)


async def _crashed_everywhere(
    points: list[str],
    message_of: Callable[[str], Message[Any]],
    once: Callable[[Message[Any]], Coroutine[Any, Any, Outcome]],
) -> dict[str, Outcome]:
    outcomes: dict[str, Outcome] = {}
    for point in dict.fromkeys(points):
        message = message_of(f"crash-{point}")
        with suppress(Crashed), crash_at(point):
            await once(message)
        outcomes[point] = await once(message)
    return outcomes


def prove(
    app: App,
    messages: Sequence[Message[Any]],
    *,
    observe: Callable[[], object] | None = None,
) -> Report:
    """Run the handlers of these messages once undisturbed, then through every fault; each run must end the same.

    The faults: a crash at every point, a deadlock, a serialization failure, a time-out and a database that goes away
    at each statement, a lost answer of COMMIT, copies at once and late, another payload, disorder, a zombie; and
    another day with other random numbers. `str()` of the report names what is wrong, and the line.

    Args:
        messages: a few of each kind; each run delivers all of them.
        observe: returns what is to be the same at the end; by default all rows of the application's tables. What the
            server itself counts (serial numbers) or dates is not compared.

    It takes some seconds, and puts every table back as it was, before each run and at the end: use a database for
    tests. Async handlers run in an event loop of this call's, for which the App needs a URL: else `prove_async`.

    Raises:
        ConfigurationError: no handler takes any message, or the inbox or outbox is not empty.
    """
    # late: few tests need it
    from txbox.testing.proof import proved

    if app.database.sync is not None and not any(handler.is_async for handler in app.handlers):
        return blocking(proved(app, messages, observe))

    async def all_of_it() -> Report:
        try:
            return await proved(app, messages, observe)
        finally:
            await app.database.leave_loop()
            await app.database.close_async()

    return asyncio.run(all_of_it())


@async_of(prove)
async def prove_async(
    app: App, messages: Any, *, observe: Callable[[], object] | None = None
) -> Report:
    """`prove` in the event loop of the caller; `observe` may be async."""
    from txbox.testing.proof import proved

    return await proved(app, messages, observe)


def _check_sync(app: App, message: Message[Any], consumer: str | None, verb: str) -> None:
    handler = app.handlers.only(message, consumer)
    if handler is not None and handler.is_async:
        raise ConfigurationError(f"{handler.name} is async: await {verb}_async().")


def _check_kind(app: App, *, is_async: bool) -> None:
    """Refuse to drain an App that has handlers of the other kind only: nothing would run, and the test would pass."""
    handlers = [handler for group in app.handlers.consumers().values() for handler in group]
    if handlers and all(handler.is_async != is_async for handler in handlers):
        raise ConfigurationError(
            "All handlers of this App are sync: use drain()."
            if is_async
            else "All handlers of this App are async: await drain_async()."
        )


def _within(app: App, tx: Any) -> App:
    return app if tx is None else inside(app, tx)


@asynccontextmanager
async def _settled(app: App) -> AsyncGenerator[App]:
    try:
        yield app
    finally:
        connections: Connections | None = app.database.asynchronous
        if isinstance(connections, Savepoints):
            await connections.settle()


async def _drained(db: Session, app: App, is_async: bool, ignore_dates: bool) -> list[Outcome]:
    await app.protocol.check_schema(db)
    outcomes: list[Outcome] = []
    while True:
        before = len(outcomes)
        for consumer, handlers in app.handlers.consumers().items():
            if any(handler.is_async == is_async for handler in handlers):
                if ignore_dates:
                    await dates_forgotten(db, app, consumer)
                await rescue(db, app, Task(consumer=consumer))
                await consumed(db, app, consumer, is_async, outcomes)
        # looking again at a row that waits for another makes no progress
        waits = (Outcome.IN_PROGRESS, Outcome.DEFERRED)
        if all(outcome in waits for outcome in outcomes[before:]):
            return outcomes


async def dates_forgotten(db: Session, app: App, consumer: str) -> None:
    schema = app.database.schema
    for name, sql in (("forget_dates", _FORGET_DATES), ("forget_leases", _FORGET_LEASES)):
        await db.alone(
            Statement(name, qualified(sql, schema) if schema else sql, {"consumer": consumer})
        )


async def consumed(
    db: Session, app: App, consumer: str, is_async: bool, outcomes: list[Outcome]
) -> None:
    """Lease and run the due rows one by one; then give back those for the other kind of handler."""
    heads_only, dead_blocks = app.handlers.order_of(consumer)
    others: dict[str, str] = {}
    for suspect in (True, False):
        while True:
            token = secrets.token_hex(16)
            leased = await leases.lease(
                db, app.store, consumer, token=token, limit=1, lease=app.lease, suspect=suspect,
                heads_only=heads_only, dead_blocks=dead_blocks,
            )  # fmt: skip
            if not leased:
                break
            (row,) = leased
            handler = _handler_of(app, row.arrival.message, consumer, is_async)
            if handler is None:
                others[row.arrival.message_id] = token
                continue
            settled = await app.protocol.run_leased(db, handler, row, token)
            outcomes.append(settled.outcome)
    for message_id, token in others.items():
        await leases.release(db, app.store, consumer, [message_id], token=token, delay_s=0.0)


def _handler_of(app: App, message: Message[Any], consumer: str, is_async: bool) -> Handler | None:
    handlers = app.handlers.matching(message.topic, message.type, consumer)
    return next((handler for handler in handlers if handler.is_async == is_async), None)


#: The point at which `install_from_environment` kills its process.
POINT_VARIABLE = "TXBOX_CRASH_AT"
#: Which pass of that point counts; 1 is the first.
NTH_VARIABLE = "TXBOX_CRASH_NTH"


class _Nth:
    """Calls something at the nth pass of a point, in whatever thread that happens, and only then."""

    def __init__(self, point: str, call: Callable[[], object], nth: int) -> None:
        if nth < 1:
            raise ConfigurationError(
                f"nth is {nth}: it must be at least 1, the first pass of a point."
            )
        self._point = point
        self._call = call
        self._left = nth
        self._lock = threading.Lock()

    def __call__(self, point: str) -> None:
        if point != self._point:
            return
        with self._lock:
            self._left -= 1
            due = self._left == 0
        if due:
            self._call()


@contextmanager
def crash_at(point: str, nth: int = 1) -> Generator[None]:
    """Simulate losing the process at a point: `Crashed` leaves the `with` block.

    The connection is dropped; txbox rolls back, records and acknowledges nothing, and the server rolls
    back what was not committed. Deliver again afterwards, as a broker would.

    Args:
        nth: which pass of the point counts, 1 or more.

    Raises:
        Crashed: the point was reached.
        AssertionError: the point was not reached, so the test has tested nothing.
    """
    crashed = False

    def crash() -> NoReturn:
        nonlocal crashed
        crashed = True
        raise Crashed(f"crashed at {point}, pass {nth}")

    with passing(_Nth(point, crash, nth)):
        yield
    if not crashed:
        raise AssertionError(
            f"The point {point!r} was passed fewer than {nth} times: crash_points() lists the existing points."
        )


@contextmanager
def meanwhile(point: str, call: Callable[[], object], nth: int = 1) -> Generator[None]:
    """Call something at a point, between two statements: a race with a single outcome.

    Args:
        call: for instance another delivery of the same message, by a copy from `another_process`. An async one runs
            in another thread, in an event loop of its own: its App then needs a URL, since a pool belongs to one loop.
        nth: which pass of the point counts, 1 or more.
    """

    def called() -> None:
        done = call()
        if inspect.iscoroutine(done):
            with ThreadPoolExecutor(1) as thread:
                thread.submit(asyncio.run, done).result()

    with passing(_Nth(point, called, nth)):
        yield


def kill_at(point: str, nth: int = 1) -> None:
    """From now on, this process kills itself (SIGKILL) at a point; for worker subprocesses in tests.

    Guarantee: no Python code runs after the point, just as with `kill -9` from outside.
    """
    session.crash_point = _Nth(point, lambda: os.kill(os.getpid(), signal.SIGKILL), nth)


def install_from_environment() -> None:
    """Call `kill_at` with TXBOX_CRASH_AT and TXBOX_CRASH_NTH (default 1), if the first is set.

    Raises:
        ConfigurationError: TXBOX_CRASH_NTH is not a positive number.
    """
    point = os.environ.get(POINT_VARIABLE)
    if not point:
        return
    nth = os.environ.get(NTH_VARIABLE, "1")
    if not nth.isdecimal():
        raise ConfigurationError(
            f"{NTH_VARIABLE} is {nth!r}: it must be a whole number, 1 or more."
        )
    kill_at(point, int(nth))


# how each dialect asks for the time, and how it writes one
_NOW = {
    "postgresql": (
        re.compile(r"\b(?:clock_timestamp|statement_timestamp|now)\(\)"),
        "timestamptz '{}+00'",
    ),
    "mysql": (re.compile(r"\bUTC_TIMESTAMP\(6\)"), "TIMESTAMP'{}'"),
    "sqlite": (re.compile(r"'now'"), "'{}'"),
}


class Clock:
    """A time that stands still.

    Attributes:
        now: aware, in whole milliseconds.
    """

    def __init__(self, at: datetime) -> None:
        if at.tzinfo is None:
            raise ConfigurationError(f"{at!r} has no time zone: give datetime(…, tzinfo=UTC).")
        self.now = at.replace(microsecond=at.microsecond // 1000 * 1000)

    def advance(self, by: timedelta) -> None:
        """Move it forward, as if that much time had passed."""
        self.now += by

    def __call__(self, dialect: Dialect, statement: Statement) -> Statement:
        asks, writes = _NOW[dialect.name]
        at = self.now.astimezone(UTC).isoformat(" ", "milliseconds").removesuffix("+00:00")
        return statement._replace(sql=asks.sub(writes.format(at), statement.sql))


@contextmanager
def frozen_clock(at: datetime | None = None) -> Generator[Clock]:
    """Stop the clock by which txbox's statements in this process find what is due; `drain` then takes that and no more.

    Back-off, delays, leases and ages are compared with it. Columns that only record a moment, as received_at,
    staged_at and processed_at do, may keep the server's time, and so do your own statements: start from now, and
    advance.

    Args:
        at: by default this machine's time.
    """
    clock = Clock(at or datetime.now(UTC))
    statement = Dialect.statement

    def at_that_time(dialect: Dialect, *args: Any, **kwargs: Any) -> Statement:
        return clock(dialect, statement(dialect, *args, **kwargs))

    with patch.object(Dialect, "statement", at_that_time):
        yield clock
