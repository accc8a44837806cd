"""Deliveries in tests: one, many at once, and everything that waits in the table."""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from txbox.app import App
from txbox.drive import drive as carry_out
from txbox.drive import drive_async as carry_out_async
from txbox.errors import ConfigurationError
from txbox.handlers import Handler
from txbox.message import Message
from txbox.outcome import Outcome
from txbox.steps import AsyncConnections, Begin, Commit, Connections, Statement, Steps
from txbox.store import leases
from txbox.store.dialect import qualified
from txbox.testing.crash import recorded
from txbox.testing.inside import another_process, inside
from txbox.testing.savepoints import AsyncSavepoints

# for tests alone, and in words that every dialect knows
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
    """Deliver a message once, through the real protocol; a retry is another `deliver`, or `drain`.

    Args:
        tx: work inside this transaction of the test's; see `inside`.

    Raises:
        what `App.process` raises; for an async handler use `deliver_async`.
    """
    return (app if tx is None else inside(app, tx)).process(message, consumer=consumer)


async def deliver_async(
    app: App, message: Message[Any], *, consumer: str | None = None, tx: Any = None
) -> Outcome:
    """The twin of `deliver`."""
    if tx is not None:
        app = inside(app, tx)
    try:
        return await app.process_async(message, consumer=consumer)
    finally:
        await _settled(app)


def drain(app: App, *, ignore_dates: bool = False, tx: Any = None) -> list[Outcome]:
    """Process what is due in the table, for every consumer with a sync handler, until nothing is.

    Args:
        ignore_dates: take back-off delays and leases as over, as if all that time had passed; a
            message that always fails then runs until it is dead.
        tx: work inside this transaction of the test's; see `inside`.

    Returns: the outcome of each run, in order.
    """
    if tx is not None:
        app = inside(app, tx)
    connections = app.database.sync
    if connections is None:
        raise ConfigurationError(f"{app.database.name} has async connections only: drain_async().")
    return carry_out(connections, _drained(app, False, ignore_dates))


async def drain_async(app: App, *, ignore_dates: bool = False, tx: Any = None) -> list[Outcome]:
    """The twin of `drain`, for every consumer with an async handler."""
    if tx is not None:
        app = inside(app, tx)
    connections = app.database.asynchronous
    if connections is None:
        raise ConfigurationError(f"{app.database.name} has sync connections only: drain().")
    try:
        return await carry_out_async(connections, _drained(app, True, ignore_dates))
    finally:
        await _settled(app)


def race(
    app: App, message: Message[Any], workers: int = 8, *, consumer: str | None = None
) -> list[Outcome]:
    """Deliver one message from many threads at the same moment, each as if in a process of its own.

    The losers wait in the database, so it needs connections that see each other's commits: not for
    a rollback fixture or Django's TestCase.

    Args:
        workers: threads, 2 or more; a pool of your own must hold as many connections.

    Returns: an outcome a worker; with a sound handler one is PROCESSED (or FAILED), the others
        DUPLICATE, DEFERRED, or IN_PROGRESS when they waited longer than Limits.lock_timeout.
    """
    start = threading.Barrier(workers)

    def work(app_copy: App) -> Outcome:
        start.wait()
        return app_copy.process(message, consumer=consumer)

    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(work, [another_process(app) for _ in range(workers)]))


async def race_async(
    app: App, message: Message[Any], workers: int = 8, *, consumer: str | None = None
) -> list[Outcome]:
    """The twin of `race`, in tasks."""
    start = asyncio.Barrier(workers)

    async def work(app_copy: App) -> Outcome:
        await start.wait()
        return await app_copy.process_async(message, consumer=consumer)

    return list(await asyncio.gather(*(work(another_process(app)) for _ in range(workers))))


def crash_points(
    app: App, message: Message[Any], *, consumer: str | None = None, tx: Any = None
) -> list[str]:
    """Deliver a message and return the crash points that this passed, in order, repeats included."""
    with recorded() as points:
        deliver(app, message, consumer=consumer, tx=tx)
    return points


async def _settled(app: App) -> None:
    connections: Connections | AsyncConnections | None = app.database.asynchronous
    if isinstance(connections, AsyncSavepoints):
        await connections.settle()


def _drained(app: App, is_async: bool, ignore_dates: bool) -> Steps[list[Outcome]]:
    yield from app.check_schema()
    outcomes: list[Outcome] = []
    while True:
        before = len(outcomes)
        for consumer, handlers in app.handlers.consumers().items():
            if any(handler.is_async == is_async for handler in handlers):
                if ignore_dates:
                    yield from _dates_forgotten(app, consumer)
                yield from leases.rescue(
                    app.store,
                    consumer=consumer,
                    max_starts=app.lease.max_starts,
                    limit=_RESCUED_AT_ONCE,
                )
                yield from _consumed(app, consumer, is_async, outcomes)
        # a row that waits for another does not become more by being looked at again
        waits = (Outcome.IN_PROGRESS, Outcome.DEFERRED)
        if all(outcome in waits for outcome in outcomes[before:]):
            return outcomes


def _dates_forgotten(app: App, consumer: str) -> Steps[None]:
    schema = app.database.schema
    yield Begin()
    for name, sql in (("forget_dates", _FORGET_DATES), ("forget_leases", _FORGET_LEASES)):
        yield Statement(name, qualified(sql, schema) if schema else sql, {"consumer": consumer})
    yield Commit()


def _consumed(app: App, consumer: str, is_async: bool, outcomes: list[Outcome]) -> Steps[None]:
    """Lease and run each row that is due, one by one; those of the other kind of handler are given back."""
    heads_only, dead_blocks = app.handlers.order_of(consumer)
    for suspect in (True, False):
        while True:
            token = secrets.token_hex(16)
            leased = yield from leases.lease(
                app.store, consumer, token=token, limit=1, lease=app.lease, suspect=suspect,
                heads_only=heads_only, dead_blocks=dead_blocks,
            )  # fmt: skip
            if not leased:
                break
            (row,) = leased
            handler = _handler_of(app, row.arrival.message, consumer, is_async)
            if handler is None:
                yield from leases.release(
                    app.store, consumer, [row.arrival.message_id], token=token, delay_s=60.0
                )
                continue
            settled = yield from app.protocol.run_leased(handler, row, token)
            outcomes.append(settled.outcome)


def _handler_of(app: App, message: Message[Any], consumer: str, is_async: bool) -> Handler | None:
    found: Iterator[Handler] = iter(app.handlers.matching(message.topic, message.type, consumer))
    return next((handler for handler in found if handler.is_async == is_async), None)
