"""Maintenance: what must be done now and then, each job a function in one table."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

from txbox.app import App
from txbox.errors import ConfigurationError, Fault, StoreError
from txbox.events import LeaseExpired, MessageDead, RowsPruned
from txbox.steps import Discard, Steps, Wait, drive, drive_async
from txbox.store import jobs
from txbox.store.inbox import Rescued
from txbox.store.jobs import JobLease

_RESCUE_BATCH = 100
_SLOW_S = 0.1
_PAUSE_MAX_S = 1.0
_JOB_LEASE_S = 60.0
_TOO_SLOW = (Fault.TIMEOUT, Fault.LOCK_TIMEOUT, Fault.CONFLICT)


@dataclass(frozen=True, slots=True)
class Task:
    """What one run is asked for.

    Args:
        consumer: only this one; None for all.
        older_than: for prune, instead of the retention policy.
        dry_run: count only, change nothing.
        on_progress: called after each batch with the rows done so far.
        stop: asked between batches; True ends the run.
    """

    consumer: str | None = None
    older_than: timedelta | None = None
    dry_run: bool = False
    on_progress: Callable[[int], None] | None = None
    stop: Callable[[], bool] = lambda: False


@dataclass(frozen=True, slots=True)
class Report:
    """What one run did.

    Args:
        rows: how many rows it changed; for a dry run, would change.
        dead: of these, how many became dead.
        skipped: another process was at it, so nothing was done.
    """

    job: str
    rows: int = 0
    dead: int = 0
    skipped: bool = False


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
    job = next((own for own in JOBS if own.name == name), None)
    if job is None:
        known = ", ".join(own.name for own in JOBS)
        raise ConfigurationError(f"There is no maintenance job {name!r}: use one of {known}.")
    steps = job.run(app, task or Task())
    if app.database.sync is not None:
        return drive(app.database.sync, steps)
    return asyncio.run(_driven(app, steps))


async def _driven(app: App, steps: Steps[Report]) -> Report:
    assert app.database.asynchronous is not None, (
        "a database has connections of one colour at least"
    )
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
        rescued = yield from app.store.rescue(
            consumer=task.consumer,
            max_starts=app.lease.max_starts,
            limit=_RESCUE_BATCH,
            dying=lambda row: _letter(app, row),
        )
        for row in rescued:
            rows, dead = rows + 1, dead + row.dead
            where = {"consumer": row.consumer, "message_id": row.message_id, "topic": row.topic}
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


def prune(app: App, task: Task) -> Steps[Report]:
    """Delete processed and discarded rows past the retention, with their attempts.

    Guarantee: never deletes what is unfinished, dead or quarantined; a crash in between loses
    nothing, the next run goes on.
    """
    older_than_s = (task.older_than or app.retention.processed).total_seconds()
    if task.dry_run:
        rows = yield from jobs.prunable(
            app.store.dialect, consumer=task.consumer, older_than_s=older_than_s
        )
        return Report("prune", rows)
    return (
        yield from _alone(
            app,
            task,
            "prune",
            [
                lambda limit: jobs.prune(
                    app.store.dialect,
                    consumer=task.consumer,
                    older_than_s=older_than_s,
                    limit=limit,
                )
            ],
        )
    )


def prune_outbox(app: App, task: Task) -> Steps[Report]:
    """Delete outgoing messages that were sent or discarded and have been kept for their time.

    Sent ones are kept for `RelayPolicy.keep_sent`; where that is zero, those that another policy has
    left behind are kept as long as discarded ones, for `Retention.processed`.

    Guarantee: never deletes what is still to be sent, or dead.
    """
    kept = task.older_than or app.retention.processed
    sent_s = (task.older_than or app.relaying.keep_sent or kept).total_seconds()
    own, discarded_s = app.store.dialect, kept.total_seconds()
    if task.dry_run:
        rows = yield from jobs.prunable_outbox(own, sent_s=sent_s, discarded_s=discarded_s)
        return Report("prune-outbox", rows)

    def batch(limit: int) -> Steps[int]:
        return jobs.prune_outbox(own, sent_s=sent_s, discarded_s=discarded_s, limit=limit)

    return (yield from _alone(app, task, "prune-outbox", [batch]))


def drop_payloads(app: App, task: Task) -> Steps[Report]:
    """Drop the payloads that handlers keep for a time (`keep_payload=timedelta(…)`) once it is over.

    The longest time of a consumer's handlers counts; a consumer with an "always" keeps all.
    """
    if task.dry_run:
        raise ConfigurationError("drop-payloads has no dry run: leave --dry-run out.")
    batches: list[Callable[[int], Steps[int]]] = []
    for consumer, handlers in app.handlers.consumers().items():
        kept = [own.options.keep_payload for own in handlers]
        times = [own for own in kept if isinstance(own, timedelta)]
        if times and "always" not in kept and task.consumer in (None, consumer):
            batches.append(_dropping(app, consumer, max(times).total_seconds()))
    if not batches:
        return Report("drop-payloads")
    return (yield from _alone(app, task, "drop-payloads", batches))


def _dropping(app: App, consumer: str, older_than_s: float) -> Callable[[int], Steps[int]]:
    return lambda limit: jobs.drop_payloads(
        app.store.dialect, consumer=consumer, older_than_s=older_than_s, limit=limit
    )


def _alone(
    app: App, task: Task, name: str, batches: list[Callable[[int], Steps[int]]]
) -> Steps[Report]:
    """Run batches under the job's lease; another process that holds it makes this run a no-op."""
    lease = JobLease(app.store.dialect, name, secrets.token_hex(16), _JOB_LEASE_S)
    if not (yield from lease.acquire()):
        return Report(name, skipped=True)
    started = time.monotonic()
    rows = 0
    for batch in batches:
        rows = yield from _in_batches(app, task, lease, batch, rows)
    yield from lease.release()
    if rows and name in ("prune", "prune-outbox"):
        app.events.emit(
            RowsPruned(consumer=task.consumer, rows=rows, duration_s=time.monotonic() - started)
        )
    return Report(name, rows)


def _in_batches(
    app: App, task: Task, lease: JobLease, batch: Callable[[int], Steps[int]], rows: int
) -> Steps[int]:
    """Repeat a batch until it finds less than it may take; its size follows the time it takes."""
    limit = app.retention.batch
    renew_at = time.monotonic() + _JOB_LEASE_S / 3
    while not task.stop():
        started = time.monotonic()
        if started >= renew_at:
            if not (yield from lease.acquire()):
                break
            renew_at = started + _JOB_LEASE_S / 3
        try:
            done = yield from batch(limit)
        except StoreError as error:
            yield Discard()
            if error.fault not in _TOO_SLOW or limit == 1:
                raise
            limit = max(1, limit // 2)
            yield Wait(_SLOW_S)
            continue
        took_s = time.monotonic() - started
        rows += done
        if task.on_progress is not None:
            task.on_progress(rows)
        if done < limit:
            break
        grown = min(app.retention.batch, limit + max(1, limit // 4))
        limit = max(1, limit // 2) if took_s > _SLOW_S else grown
        # as long a pause as the work took: live traffic gets half of the time at least
        yield Wait(min(max(took_s, 0.001), _PAUSE_MAX_S))
    return rows


JOBS = (
    Job(
        "rescue",
        "put rows whose worker went away back to work",
        lambda app: app.lease.duration / 3,
        rescue,
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
        "drop-payloads",
        "drop payloads that were kept for a time",
        lambda app: app.retention.every,
        drop_payloads,
    ),
)
