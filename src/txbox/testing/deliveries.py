"""Deliveries in tests: one, many at once, and everything that waits in the table."""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections.abc import AsyncGenerator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

from txbox.app import App
from txbox.errors import ConfigurationError
from txbox.handlers import Handler
from txbox.message import Message
from txbox.outcome import Outcome
from txbox.session import Connections, Session, Statement, drive, drive_async, twin_of
from txbox.store import leases
from txbox.store.dialect import qualified
from txbox.testing.crash import recorded
from txbox.testing.inside import Savepoints, another_process, inside

# for tests only, in SQL that every dialect understands
_FORGET_DATES = (
    "UPDATE txbox_inbox SET next_attempt_at = received_at"
    " WHERE consumer = :consumer AND status IN ('pending', 'failed')"
)
_FORGET_LEASES = (
    "UPDATE txbox_inbox SET lease_until = received_at"
    " WHERE consumer = :consumer AND status = 'processing' AND lease_until IS NOT NULL"
)
_RESCUED_AT_ONCE = 1000


def deliver(
    app: App, message: Message[Any], *, consumer: str | None = None, tx: Any = None
) -> Outcome:
    """Deliver a message once, through the real protocol. For a retry, call `deliver` again, or `drain`.

    Args:
        tx: work inside this transaction of the test; see `inside`.

    It raises whatever `App.process` raises. For an async handler use `deliver_async`.
    """
    return _within(app, tx).process(message, consumer=consumer)


@twin_of(deliver)
async def deliver_async(app: App, message: Any, *, tx: Any = None, **named: Any) -> Outcome:
    """`deliver` for async handlers."""
    async with _settled(_within(app, tx)) as app_within:
        return await app_within.process_async(message, **named)


def drain(app: App, *, ignore_dates: bool = False, tx: Any = None) -> list[Outcome]:
    """Process everything due in the table, for every consumer with a sync handler, until nothing is left.

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
    return drive(connections, _drained, app, False, ignore_dates)


@twin_of(drain)
async def drain_async(app: App, *, ignore_dates: bool = False, tx: Any = None) -> list[Outcome]:
    """`drain` for every consumer with an async handler."""
    async with _settled(_within(app, tx)) as app_within:
        connections = app_within.database.asynchronous
        if connections is None:
            raise ConfigurationError(f"{app.database.name} has sync connections only: use drain().")
        return await drive_async(connections, _drained, app_within, True, ignore_dates)


def race(
    app: App, message: Message[Any], workers: int = 8, *, consumer: str | None = None
) -> list[Outcome]:
    """Deliver one message from many threads at the same moment, each as if in its own process.

    The losers wait in the database, so it needs connections that see each other's commits. It does not
    work with a rollback fixture or Django's TestCase.

    Args:
        workers: threads, 2 or more; your own pool must hold as many connections.

    Returns: one outcome per worker. With a sound handler one is PROCESSED (or FAILED), and the others
        are DUPLICATE, DEFERRED, or IN_PROGRESS if they waited longer than Limits.lock_timeout.
    """
    start = threading.Barrier(workers)

    def work(app_copy: App) -> Outcome:
        start.wait()
        return app_copy.process(message, consumer=consumer)

    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(work, [another_process(app) for _ in range(workers)]))


@twin_of(race)
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
    """Deliver a message and return the crash points it passed, in order, repeats included."""
    with recorded() as points:
        deliver(app, message, consumer=consumer, tx=tx)
    return points


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
    await app.check_schema(db)
    outcomes: list[Outcome] = []
    while True:
        before = len(outcomes)
        for consumer, handlers in app.handlers.consumers().items():
            if any(handler.is_async == is_async for handler in handlers):
                if ignore_dates:
                    await _dates_forgotten(db, app, consumer)
                await leases.rescue(
                    db,
                    app.store,
                    consumer=consumer,
                    max_starts=app.lease.max_starts,
                    limit=_RESCUED_AT_ONCE,
                )
                await _consumed(db, app, consumer, is_async, outcomes)
        # looking again at a row that waits for another makes no progress
        waits = (Outcome.IN_PROGRESS, Outcome.DEFERRED)
        if all(outcome in waits for outcome in outcomes[before:]):
            return outcomes


async def _dates_forgotten(db: Session, app: App, consumer: str) -> None:
    schema = app.database.schema
    await db.begin()
    for name, sql in (("forget_dates", _FORGET_DATES), ("forget_leases", _FORGET_LEASES)):
        await db.execute(
            Statement(name, qualified(sql, schema) if schema else sql, {"consumer": consumer})
        )
    await db.commit()


async def _consumed(
    db: Session, app: App, consumer: str, is_async: bool, outcomes: list[Outcome]
) -> None:
    """Lease and run the due rows one by one; give back those for the other kind of handler."""
    heads_only, dead_blocks = app.handlers.order_of(consumer)
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
                await leases.release(
                    db, app.store, consumer, [row.arrival.message_id], token=token, delay_s=60.0
                )
                continue
            settled = await app.protocol.run_leased(db, handler, row, token)
            outcomes.append(settled.outcome)


def _handler_of(app: App, message: Message[Any], consumer: str, is_async: bool) -> Handler | None:
    found: Iterator[Handler] = iter(app.handlers.matching(message.topic, message.type, consumer))
    return next((handler for handler in found if handler.is_async == is_async), None)
