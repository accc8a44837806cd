"""Maintenance: what must be done now and then, each job a function in one table."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from txbox.app import App
from txbox.drive import drive, drive_async
from txbox.errors import ConfigurationError
from txbox.events import LeaseExpired, MessageDead
from txbox.maintenance.pruning import (
    Report,
    Task,
    drop_payloads,
    partitions,
    prune,
    prune_outbox,
    prune_quarantine,
)
from txbox.steps import Steps
from txbox.store import leases
from txbox.store.leases import Rescued

__all__ = ["JOBS", "Job", "Report", "Task", "rescue", "run_once"]

_RESCUE_BATCH = 100


@dataclass(frozen=True, slots=True)
class Job:
    """One maintenance job.

    Args:
        summary: one line for people.
        every: the pause between two runs of `txbox run`.
        run: one run, as steps.
    """

    name: str
    summary: str
    every: Callable[[App], timedelta]
    run: Callable[[App, Task], Steps[Report]]


def run_once(app: App, name: str, task: Task | None = None) -> Report:
    """Run one maintenance job now; returns what it did.

    Raises:
        ConfigurationError: there is no such job.
        StoreError, SchemaError: the database refused.
    """
    job = next((candidate for candidate in JOBS if candidate.name == name), None)
    if job is None:
        known = ", ".join(candidate.name for candidate in JOBS)
        raise ConfigurationError(f"There is no maintenance job {name!r}: use one of {known}.")
    steps = job.run(app, task or Task())
    if app.database.sync is not None:
        return drive(app.database.sync, steps)
    return asyncio.run(_driven(app, steps))


async def _driven(app: App, steps: Steps[Report]) -> Report:
    assert app.database.asynchronous is not None, "a database has sync or async connections"
    try:
        return await drive_async(app.database.asynchronous, steps)
    finally:
        # its connections belong to this loop, which ends now
        await app.close_async()


def rescue(app: App, task: Task) -> Steps[Report]:
    """Put rows whose lease ran out back to `failed`, or to `dead` when too many runs never ended.

    Guarantee: never touches a row whose handler holds its transaction.
    """
    rows = dead = 0
    if task.dry_run:
        raise ConfigurationError("rescue has no dry run: leave --dry-run out.")
    while not task.stop():
        rescued = yield from leases.rescue(
            app.store,
            consumer=task.consumer,
            max_starts=app.lease.max_starts,
            limit=_RESCUE_BATCH,
            dying=lambda row: _letter(app, row),
        )
        for row in rescued:
            rows, dead = rows + 1, dead + row.dead
            where: dict[str, Any] = {
                "consumer": row.consumer,
                "message_id": row.message_id,
                "topic": row.topic,
            }
            app.events.emit(LeaseExpired(**where, starts=row.starts, dead=row.dead))
            if row.dead:
                app.events.emit(
                    MessageDead(**where, attempt=0, error_type=row.error_type, error=row.error)
                )
        if task.on_progress is not None:
            task.on_progress(rows)
        if len(rescued) < _RESCUE_BATCH:
            break
    return Report("rescue", rows, dead)


def _letter(app: App, row: Rescued) -> Steps[None]:
    message = yield from app.store.kept_message(row.consumer, row.message_id)
    if message is not None:
        yield from app.dead_letters.staged(
            app.store.dialect,
            row.consumer,
            message,
            attempts=row.starts,
            error_type=row.error_type,
        )


JOBS = (
    Job(
        "rescue",
        "put rows whose worker went away back to work",
        lambda app: app.lease.duration / 3,
        rescue,
    ),
    Job(
        "partitions",
        "make the partitions of the next days",
        lambda app: min(app.retention.every, app.retention.partition / 4),
        partitions,
    ),
    Job(
        "prune",
        "delete finished rows past the retention",
        lambda app: app.retention.every,
        prune,
    ),
    Job(
        "prune-outbox",
        "delete sent and discarded outgoing messages that were kept for their time",
        lambda app: app.retention.every,
        prune_outbox,
    ),
    Job(
        "prune-quarantine",
        "delete what was accepted or discarded, and bound the payloads of the quarantine",
        lambda app: app.retention.every,
        prune_quarantine,
    ),
    Job(
        "drop-payloads",
        "drop payloads that were kept for a time",
        lambda app: app.retention.every,
        drop_payloads,
    ),
)
