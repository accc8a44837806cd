"""Retention: deletes what is past its time, in batches or by partition, and creates partitions in advance."""

from __future__ import annotations

import logging
import random
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

from txbox.app import App
from txbox.errors import ConfigurationError, Fault, StoreError, check_duration
from txbox.events import QuarantineTrimmed, RowsPruned
from txbox.session import Session
from txbox.store import activity, jobs
from txbox.store import partitions as tables
from txbox.store.jobs import Batch, BlockScan, JobLease
from txbox.store.partitions import Layout, Part

# a batch that takes longer is followed by a smaller one, because live messages wait for its CPU and WAL
_LONG_S = 0.002
# with fewer rows, round trips to a distant database would dominate; only a slow batch is made smaller still
_FIRST_BATCH = 100
# keeps every batch well below a tenth of a second
_SLOW_S = 0.04
_PAUSE_MAX_S = 1.0
# a detach blocks everyone who uses the inbox and makes them plan again: at most one live message in 200 may meet it
_DETACH_SHARE = 0.005
#: The longest pause between two detaches, in seconds.
DETACH_PAUSE_MAX_S = 5.0
# how soon a drain is noticed
_LOOK_S = 0.5
_JOB_LEASE_S = 60.0
_TOO_SLOW = (Fault.TIMEOUT, Fault.LOCK_TIMEOUT, Fault.CONFLICT)
_LOCK_TRIES = 10
# while we wait for the inbox everyone else queues behind us, so at first wait only as long as a short transaction
_LOCK_WAIT_MS = 5
_LOCK_WAIT_MAX_MS = 100
# minutes per row, and the age at which they are merged; after an outage a process writes counts of up to an hour ago,
# which are added. The charts of an hour, of six and of a day have these steps, and that of a week has the last one.
FOLDED_AFTER_S = {1: 300.0, 5: 3600.0, 30: 6 * 3600.0, 180: 24 * 3600.0}
# keep crashed workers visible for a while
_WORKERS_KEPT_S = 3600.0

T = TypeVar("T")

_log = logging.getLogger("txbox.maintenance")

Batches = Callable[[Session, int], Awaitable[Batch]]


@dataclass(frozen=True, slots=True)
class Task:
    """The options of a run.

    Args:
        consumer: only this one; None for all.
        older_than: for prune, overrides the retention policy.
        dry_run: count only, change nothing.
        at_any_time: ignore `Retention.window`, because an operator runs it now.
        on_progress: called after each batch with the rows done so far.
        stop: checked between batches; True ends the run.
    """

    consumer: str | None = None
    older_than: timedelta | None = None
    dry_run: bool = False
    at_any_time: bool = False
    on_progress: Callable[[int], None] | None = None
    stop: Callable[[], bool] = lambda: False

    def __post_init__(self) -> None:
        check_duration("older_than", self.older_than)

    def age(self, usual: timedelta) -> timedelta:
        """The explicit age, which may be zero, or else the usual one."""
        return usual if self.older_than is None else self.older_than


@dataclass(frozen=True, slots=True)
class Report:
    """What a run did.

    Args:
        rows: how many rows it changed, or in a dry run would change.
        dead: how many of these became dead.
        skipped: another process was running it, so nothing was done.
        closed: outside `Retention.window`, so nothing was done, or not everything.
    """

    job: str
    rows: int = 0
    dead: int = 0
    skipped: bool = False
    closed: bool = False


async def prune(db: Session, app: App, task: Task) -> Report:
    """Delete processed and discarded rows past the retention, with their attempts.

    In a table partitioned by time, whole partitions are dropped. There, rows whose ids contain a time
    wait until their partition goes, unless a consumer or an age is named.

    Guarantee: never deletes anything unfinished, dead or quarantined. A crash loses nothing; the next
    run continues.
    """
    dialect = app.store.dialect
    older_than_s = task.age(app.retention.processed).total_seconds()
    if task.dry_run:
        rows = await jobs.value(
            db, dialect, "prunable", consumer=task.consumer, older_than_s=older_than_s
        )
        return Report("prune", rows)
    run = _Run(app, task, "prune")
    if not dialect.has("prune_blocks"):
        batch = partial(
            jobs.prune, dialect=dialect, consumer=task.consumer, older_than_s=older_than_s
        )
        return await run.batches(db, [batch])
    if not await run.begin(db):
        return run.report()
    async with run.leased(db):
        layout = await tables.layout(db, dialect)
        if task.consumer is None and layout.ready_until is not None:
            if await _drop_days(db, run, layout, older_than_s):
                await run.repeat(
                    db, run.batch("prune_orphans", older_than_s=older_than_s), counted=False
                )
            layout = await tables.layout(db, dialect)
        whole = task.consumer is not None or task.older_than is not None
        parts = layout.parts if whole else _by_batch(app, layout, older_than_s)
        scan = BlockScan(dialect, parts, consumer=task.consumer, older_than_s=older_than_s)
        await run.repeat(db, scan.batch)
        return await run.end(db)


def _by_batch(app: App, layout: Layout, older_than_s: float) -> Sequence[Part]:
    """Return the partitions whose rows are deleted individually: those without a time, and those that had to stay."""
    stays_s = older_than_s + app.retention.partition.total_seconds()
    return [
        part
        for part in layout.parts
        if part.ends_s is None or part.ends_s <= layout.clock_s - stays_s
    ]


async def _drop_days(db: Session, run: _Run, layout: Layout, older_than_s: float) -> bool:
    """Detach and drop the expired partitions whose rows may all go; returns whether any was dropped.

    Live messages wait for a detach, but not for the drop after it. What a crash leaves between
    the two, the next run drops first.
    """
    dropped = await _drop_detached(db, run, older_than_s)
    rest_s = 0.0
    for part in layout.of_time:
        if (part.ends_s or 0.0) > layout.clock_s - older_than_s:
            break
        await run.rest(db, rest_s)
        if not await run.may_go_on(db):
            break
        rows = await tables.rows(db, run.dialect, part)
        done = await _with_retries(
            db,
            run,
            partial(tables.detach, dialect=run.dialect, part=part, older_than_s=older_than_s),
        )
        if done is None:
            # whatever blocks this one also blocks the others
            break
        rest_s = 0.0
        if done:
            rest_s = min(run.took_s / _DETACH_SHARE, DETACH_PAUSE_MAX_S)
            dropped = await _drop_detached(db, run, older_than_s) or dropped
            run.did(rows)
    return dropped


async def _drop_detached(db: Session, run: _Run, older_than_s: float) -> bool:
    dropped = False
    for name in await tables.detached(db, run.dialect):
        drop = partial(tables.drop, dialect=run.dialect, name=name, older_than_s=older_than_s)
        dropped = bool(await _with_retries(db, run, drop)) or dropped
    return dropped


async def partitions(db: Session, app: App, task: Task) -> Report:
    """Create the partitions for the coming days, if the inbox is partitioned by time; `rows` counts them.

    Guarantee: a row without a partition goes to the default partition, where it is just as safe and
    unique. Up to 10,000 of them move to their partition when it is created.
    """
    dialect = app.store.dialect
    if not dialect.has("partitions"):
        return Report("partitions")
    layout = await tables.layout(db, dialect)
    missing = tables.missing(layout, app.retention.partition, app.retention.ahead)
    if not missing:
        return Report("partitions")
    run = _Run(app, task, "partitions")
    if not await run.begin(db, at_any_time=True):
        return run.report()
    async with run.leased(db):
        for first_s, last_s in missing:
            if not await run.may_go_on(db):
                break
            done = await _with_retries(
                db, run, partial(tables.make, dialect=dialect, first_s=first_s, last_s=last_s)
            )
            if done is None:
                break
            run.did(int(done == "made"))
            if done == "strays":
                _log.warning(
                    "No partition can be created from %s on: too many rows of that time are in the default partition, "
                    "where they stay until they are pruned. `txbox status` shows what exists.",
                    tables.moment(first_s),
                )
        return await run.end(db)


async def _with_retries(db: Session, run: _Run, work: Callable[..., Awaitable[T]]) -> T | None:
    """Try for a lock a few times, with growing waits and pauses; None if it is not available now."""
    wait_ms = _LOCK_WAIT_MS
    for tried in range(1, _LOCK_TRIES + 1):
        if not await run.may_go_on(db):
            break
        started = time.monotonic()
        try:
            done = await work(db, wait_ms=wait_ms)
        except StoreError as error:
            await db.rollback()
            if error.lacks_right:
                _log.warning(
                    "This role may not add or drop partitions of the inbox: grant it what "
                    "`txbox schema print --partition … --grants` prints."
                )
                return None
            if error.fault not in _TOO_SLOW:
                raise
        else:
            run.took_s = time.monotonic() - started
            return done
        wait_ms = min(2 * wait_ms, _LOCK_WAIT_MAX_MS)
        # random, so that it does not keep meeting the same recurring transaction
        await db.wait(random.uniform(0.05, 0.1) * tried)
    _log.info("A partition stays until the next run, because the inbox was in use all the time.")
    return None


async def prune_outbox(db: Session, app: App, task: Task) -> Report:
    """Delete outgoing messages that were sent or discarded and are past their retention.

    Sent ones are kept for `RelayPolicy.keep_sent`. If that is zero, those left behind by an earlier
    policy are kept as long as discarded ones, for `Retention.processed`.

    Guarantee: never deletes anything that is still to be sent, or dead.
    """
    kept = task.age(app.retention.processed)
    sent_s = task.age(app.relaying.keep_sent or kept).total_seconds()
    dialect, discarded_s = app.store.dialect, kept.total_seconds()
    if task.dry_run:
        rows = await jobs.value(
            db, dialect, "prunable_outbox", sent_s=sent_s, discarded_s=discarded_s
        )
        return Report("prune-outbox", rows)
    run = _Run(app, task, "prune-outbox")
    return await run.batches(
        db, [run.batch("prune_outbox", sent_s=sent_s, discarded_s=discarded_s)]
    )


async def prune_quarantine(db: Session, app: App, task: Task) -> Report:
    """Delete quarantine rows that were decided on and are past their retention; limit the payloads of the rest.

    Beyond `Retention.quarantine_bytes` the oldest payloads are dropped, with an event; their rows stay.

    Guarantee: no row that awaits a decision is deleted.
    """
    dialect = app.store.dialect
    older_than_s = task.age(app.retention.quarantine).total_seconds()
    if task.dry_run:
        rows = await jobs.value(db, dialect, "prunable_quarantine", older_than_s=older_than_s)
        return Report("prune-quarantine", rows)
    run = _Run(app, task, "prune-quarantine")
    if not await run.begin(db, at_any_time=True):
        return run.report()
    async with run.leased(db):
        await run.repeat(db, run.batch("prune_quarantine", older_than_s=older_than_s))
        kept_bytes = int(await jobs.value(db, dialect, "quarantine_bytes"))
        excess = kept_bytes - app.retention.quarantine_bytes
        rows = payload_bytes = 0
        while payload_bytes < excess and await run.may_go_on(db):
            dropped, size = await jobs.drop_quarantined(
                db, dialect, excess=excess - payload_bytes, limit=_FIRST_BATCH
            )
            if not dropped:
                break
            rows, payload_bytes = rows + dropped, payload_bytes + size
        if rows:
            app.events.emit(QuarantineTrimmed(rows=rows, payload_bytes=payload_bytes))
        return await run.end(db)


async def prune_activity(db: Session, app: App, task: Task) -> Report:
    """Merge the counts of all processes into one row per minute, and minutes into longer steps as they grow old.

    Those past `Retention.activity` are deleted, and so are workers that have been silent for an hour.
    """
    run = _Run(app, task, "prune-activity")
    if not await run.begin(db, at_any_time=True):
        return run.report()
    async with run.leased(db):
        kept_s = task.age(app.retention.activity).total_seconds()
        steps = [step for step, age_s in FOLDED_AFTER_S.items() if age_s < kept_s]
        longest = max(steps, default=1)
        run.did(
            await activity.prune(
                db, run.dialect, older_than_s=kept_s, step=longest, silent_s=_WORKERS_KEPT_S
            )
        )
        for step, older_than_s in FOLDED_AFTER_S.items():
            while await run.may_go_on(db):
                folded = await activity.fold(db, run.dialect, older_than_s=older_than_s, step=step)
                run.did(folded)
                if not folded:
                    break
        return await run.end(db)


async def drop_payloads(db: Session, app: App, task: Task) -> Report:
    """Drop payloads that handlers keep for a limited time (`keep_payload=timedelta(…)`) once that is over.

    A consumer's longest time counts; a consumer with an "always" keeps everything.
    """
    run = _Run(app, task, "drop-payloads")
    batches: list[Batches] = []
    for consumer, handlers in app.handlers.consumers().items():
        kept = [handler.options.keep_payload for handler in handlers]
        times = [keep for keep in kept if isinstance(keep, timedelta)]
        if times and "always" not in kept and task.consumer in (None, consumer):
            older_than_s = max(times).total_seconds()
            batches.append(run.batch("drop_payloads", consumer=consumer, older_than_s=older_than_s))
    return await run.batches(db, batches) if batches else Report("drop-payloads")


class _Run:
    """One run of a job under its lease: its batches, what they did, and whether it may continue."""

    def __init__(self, app: App, task: Task, name: str) -> None:
        if task.dry_run:
            raise ConfigurationError(f"{name} has no dry run.")
        self.dialect = app.store.dialect
        self._app = app
        self._task = task
        self._name = name
        self._lease = JobLease(self.dialect, name, secrets.token_hex(16), _JOB_LEASE_S)
        self._started = self._look_at = time.monotonic()
        self._open = False
        self._any_time = task.at_any_time or app.retention.window is None
        self._closed = False
        self.rows = 0
        # how long the last successful try of `_with_retries` took
        self.took_s = 0.0

    async def begin(self, db: Session, *, at_any_time: bool = False) -> bool:
        """Take the lease; False if another holds it, or outside the window."""
        self._any_time = self._any_time or at_any_time
        if not await self._is_time(db):
            return False
        self._open = await self._lease.acquire(db)
        self._look_at = time.monotonic() + _JOB_LEASE_S / 6
        return self._open

    async def _is_time(self, db: Session) -> bool:
        if not self._any_time:
            second = await jobs.value(db, self.dialect, "second_of_day")
            self._closed = not self._app.retention.open_at(float(second))
        return not self._closed

    async def may_go_on(self, db: Session) -> bool:
        """Whether to continue: not stopped, the lease still ours, and still inside the window."""
        if not self._open or self._closed or self._task.stop():
            return False
        now = time.monotonic()
        if now >= self._look_at:
            self._look_at = now + _JOB_LEASE_S / 6
            self._open = await self._lease.acquire(db)
            if self._open:
                await self._is_time(db)
        return self._open and not self._closed

    async def rest(self, db: Session, for_s: float) -> None:
        """Do nothing for a while, or until stopped."""
        until = time.monotonic() + for_s
        while (left_s := until - time.monotonic()) > 0 and not self._task.stop():
            await db.wait(min(left_s, _LOOK_S))

    def did(self, rows: int) -> None:
        self.rows += rows
        if self._task.on_progress is not None:
            self._task.on_progress(self.rows)

    def report(self) -> Report:
        return Report(
            self._name, self.rows, skipped=not (self._open or self._closed), closed=self._closed
        )

    async def end(self, db: Session) -> Report:
        """Give the lease back, and report what was done."""
        await self._lease.release(db)
        if self.rows and self._name in ("prune", "prune-outbox", "prune-quarantine"):
            took_s = time.monotonic() - self._started
            self._app.events.emit(
                RowsPruned(consumer=self._task.consumer, rows=self.rows, duration_s=took_s)
            )
        return Report(self._name, self.rows, closed=self._closed)

    def batch(self, query: str, **params: Any) -> Batches:
        """A batch that is one query."""
        return partial(jobs.batch, dialect=self.dialect, name=query, **params)

    async def batches(self, db: Session, batches: Sequence[Batches]) -> Report:
        """Do a whole run: repeat each kind of batch as long as it finds something."""
        if not await self.begin(db):
            return self.report()
        async with self.leased(db):
            for batch in batches:
                await self.repeat(db, batch)
            return await self.end(db)

    @asynccontextmanager
    async def leased(self, db: Session) -> AsyncGenerator[None]:
        """Give the lease back after an error in this block, so that the next run need not wait for it to expire."""
        try:
            yield
        except Exception:
            db.discard()
            try:
                await self._lease.release(db)
            except StoreError:
                # the error that ended the run is the one to report
                db.discard()
            raise

    async def repeat(self, db: Session, batch: Batches, *, counted: bool = True) -> None:
        """Repeat a batch until there is no more; its size adapts to the time it takes."""
        most = self._app.retention.batch
        limit = min(most, _FIRST_BATCH)
        while await self.may_go_on(db):
            started = time.monotonic()
            try:
                done = await batch(db, limit)
            except StoreError as error:
                db.discard()
                if error.fault not in _TOO_SLOW or limit == 1:
                    raise
                limit = max(1, limit // 2)
                await db.wait(_SLOW_S)
                continue
            took_s = time.monotonic() - started
            if counted:
                self.did(done.rows)
            if not done.more:
                break
            long_s = _LONG_S if limit > _FIRST_BATCH else _SLOW_S
            if took_s > long_s:
                limit = max(limit // 2, 1 if took_s > _SLOW_S else _FIRST_BATCH)
            elif took_s < long_s / 2 and done.rows == limit:
                limit = min(most, limit + max(1, limit // 4))
            # pause as long as the work took, which leaves live traffic at least half the time
            await db.wait(min(max(took_s, 0.001), _PAUSE_MAX_S))
