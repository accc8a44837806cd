"""Maintenance jobs, in one table."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from txbox import alerts
from txbox.app import App
from txbox.boundaries import Boundary, is_contents
from txbox.errors import ConfigurationError
from txbox.events import LeaseExpired, MessageDead
from txbox.maintenance import alerting
from txbox.maintenance.pruning import (
    Report,
    Task,
    drop_payloads,
    partitions,
    prune,
    prune_activity,
    prune_outbox,
    prune_quarantine,
)
from txbox.session import Session, Transaction, drive, drive_async
from txbox.store import leases
from txbox.store.leases import Rescued

__all__ = ["JOBS", "Job", "Report", "Task", "prune", "prune_outbox", "rescue", "run_once"]

_RESCUE_BATCH = 100


@dataclass(frozen=True, slots=True)
class Job:
    """One maintenance job.

    Args:
        summary: one line for people.
        every: the pause between two runs in `txbox run`.
        run: performs one run.
    """

    name: str
    summary: str
    every: Callable[[App], timedelta]
    run: Callable[[Session, App, Task], Coroutine[Any, Any, Report]]


def run_once(app: App, name: str, task: Task | None = None) -> Report:
    """Run one maintenance job now; returns what it did.

    Raises:
        ConfigurationError: no job has this name.
        StoreError, SchemaError: the database refused.
    """
    job = next((candidate for candidate in JOBS if candidate.name == name), None)
    if job is None:
        known = ", ".join(candidate.name for candidate in JOBS)
        raise ConfigurationError(f"There is no maintenance job {name!r}: use one of {known}.")
    if app.database.sync is not None:
        return drive(app.database.sync, job.run, app, task or Task())
    return asyncio.run(_driven(app, job, task or Task()))


async def _driven(app: App, job: Job, task: Task) -> Report:
    assert app.database.asynchronous is not None, "a database has sync or async connections"
    async with app:  # its connections belong to this loop, which ends now
        try:
            return await drive_async(app.database.asynchronous, job.run, app, task)
        finally:
            await app.database.leave_loop()


async def rescue(db: Session, app: App, task: Task) -> Report:
    """Return rows whose lease expired to `failed`, or make them `dead` after too many unfinished runs.

    Guarantee: never touches a row whose handler holds its transaction.
    """
    rows = dead = 0
    if task.dry_run:
        raise ConfigurationError("rescue has no dry run.")
    letters = True
    while not task.stop():
        try:
            rescued = await leases.rescue(
                db, app.store, consumer=task.consumer, max_starts=app.lease.max_starts, limit=_RESCUE_BATCH,
                dying=(lambda db, rows: _dying(db, app, rows)) if letters else None,
            )  # fmt: skip
        except Exception as error:
            if not letters or not is_contents(error):
                raise
            # a letter that cannot be staged keeps no row from being rescued
            app.protocol.contain(Boundary.JOB, error)
            db.discard()
            letters = False
            continue
        for row in rescued:
            rows, dead = rows + 1, dead + row.dead
            where: Any = {
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


async def _dying(db: Transaction, app: App, rows: Sequence[Rescued]) -> None:
    for row in rows:
        message = await app.store.kept_message(db, row.consumer, row.message_id)
        if message is not None:
            await app.dead_letters.staged(
                db,
                app.store.dialect,
                row.consumer,
                message,
                attempts=row.starts,
                error_type=row.error_type,
            )
    if app.alerting is not None:
        gone = (alerts.dead(row.consumer, None, row.error_type) for row in rows)
        await app.alerting.opened(db, app.store.dialect, gone)


def _seldom(app: App) -> timedelta:
    return app.retention.every


JOBS = (
    Job("rescue", "take messages back from workers that died", lambda app: app.lease.duration / 3, rescue),
    Job("alerts", "say what is still wrong, and what is resolved", alerting.pause, alerting.review),
    Job("partitions", "create the partitions for the coming days",
        lambda app: min(app.retention.every, app.retention.partition / 4), partitions),
    Job("prune", "delete finished messages past the retention", _seldom, prune),
    Job("prune-outbox", "delete sent and discarded outgoing messages", _seldom, prune_outbox),
    Job("prune-quarantine", "delete decided quarantined messages, and limit payloads", _seldom, prune_quarantine),
    Job("prune-activity", "merge counts, delete old ones, and forget dead workers", _seldom, prune_activity),
    Job("drop-payloads", "drop payloads whose keep_payload= has run out", _seldom, drop_payloads),
)  # fmt: skip


def scheduled(app: App, wait: Callable[[float], bool]) -> Iterator[Job]:
    """Each job when it is due, all of them at once at first; ends when `wait`, for so many seconds, returns True."""
    # without alerts that job asks the database nothing, and so could not tell whether it is away
    jobs = [job for job in JOBS if job.run is not alerting.review or app.alerting is not None]
    due_at = dict.fromkeys(jobs, time.monotonic())
    while True:
        job = min(jobs, key=due_at.__getitem__)
        if wait(max(0.0, due_at[job] - time.monotonic())):
            return
        yield job
        due_at[job] = time.monotonic() + job.every(app).total_seconds()
