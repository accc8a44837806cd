"""Retention as steps: what is deleted when its time is over, by batch or by partition, and partitions made ahead."""

from __future__ import annotations

import logging
import random
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import TypeVar

from txbox.app import App
from txbox.errors import ConfigurationError, Fault, StoreError
from txbox.events import QuarantineTrimmed, RowsPruned
from txbox.steps import Discard, Rollback, Steps, Wait
from txbox.store import jobs
from txbox.store import partitions as tables
from txbox.store.jobs import Batch, JobLease, Walk
from txbox.store.partitions import Layout, Part

# a batch that takes longer is followed by a smaller one: live messages wait for its CPU and its WAL
_LONG_S = 0.002
# below this many rows the round trips to a distant database would count, and only a slow batch is divided
_FIRST_BATCH = 100
# so that none comes near a tenth of a second
_SLOW_S = 0.04
_PAUSE_MAX_S = 1.0
# a drop stops all who use the inbox, and has them plan anew: of two hundred live messages one may meet it
_DROP_SHARE = 0.005
#: The longest rest between two drops, in seconds.
DROP_PAUSE_MAX_S = 5.0
# a drain is noticed this soon
_LOOK_S = 0.5
_JOB_LEASE_S = 60.0
_TOO_SLOW = (Fault.TIMEOUT, Fault.LOCK_TIMEOUT, Fault.CONFLICT)
_LOCK_TRIES = 10
_NOT_ALLOWED = "42501"

T = TypeVar("T")

_log = logging.getLogger("txbox.maintenance")

Batches = Callable[[int], Steps[Batch]]


@dataclass(frozen=True, slots=True)
class Task:
    """What one run is asked for.

    Args:
        consumer: only this one; None for all.
        older_than: for prune, instead of the retention policy.
        dry_run: count only, change nothing.
        at_any_time: also outside of `Retention.window`: somebody asks for it now.
        on_progress: called after each batch with the rows done so far.
        stop: asked between batches; True ends the run.
    """

    consumer: str | None = None
    older_than: timedelta | None = None
    dry_run: bool = False
    at_any_time: bool = False
    on_progress: Callable[[int], None] | None = None
    stop: Callable[[], bool] = lambda: False


@dataclass(frozen=True, slots=True)
class Report:
    """What one run did.

    Args:
        rows: how many rows it changed; for a dry run, would change.
        dead: of these, how many became dead.
        skipped: another process was at it, so nothing was done.
        closed: it is not the time of `Retention.window`, so nothing was done, or not all.
    """

    job: str
    rows: int = 0
    dead: int = 0
    skipped: bool = False
    closed: bool = False


def prune(app: App, task: Task) -> Steps[Report]:
    """Delete processed and discarded rows past the retention, with their attempts.

    In a table that is partitioned by time, whole partitions are dropped. There, rows whose ids are of a
    time wait until their partition goes, unless a consumer or an age is asked for.

    Guarantee: never deletes what is unfinished, dead or quarantined; a crash in between loses
    nothing, the next run goes on.
    """
    dialect = app.store.dialect
    older_than_s = (task.older_than or app.retention.processed).total_seconds()
    if task.dry_run:
        rows = yield from jobs.prunable(dialect, consumer=task.consumer, older_than_s=older_than_s)
        return Report("prune", rows)
    run = _Run(app, task, "prune")
    if not dialect.has("prune_blocks"):

        def batch(limit: int) -> Steps[Batch]:
            return jobs.prune(
                dialect, consumer=task.consumer, older_than_s=older_than_s, limit=limit
            )

        return (yield from run.batches([batch]))
    if not (yield from run.begin()):
        return run.report()
    found = yield from tables.layout(dialect)
    if task.consumer is None and found.of_time:
        if (yield from _drop(run, found, older_than_s)):
            yield from run.repeat(
                lambda limit: jobs.prune_orphans(dialect, older_than_s=older_than_s, limit=limit),
                counted=False,
            )
        found = yield from tables.layout(dialect)
    whole = task.consumer is not None or task.older_than is not None
    parts = found.parts if whole else _by_batch(app, found, older_than_s)
    walk = Walk(dialect, parts, consumer=task.consumer, older_than_s=older_than_s)
    yield from run.repeat(walk.batch)
    return (yield from run.end())


def _by_batch(app: App, found: Layout, older_than_s: float) -> Sequence[Part]:
    """The partitions whose rows are deleted one by one: those of no time, and those that had to stay."""
    stays_s = older_than_s + app.retention.partition.total_seconds()
    return [
        part
        for part in found.parts
        if part.ends_s is None or part.ends_s <= found.clock_s - stays_s
    ]


def _drop(run: _Run, found: Layout, older_than_s: float) -> Steps[bool]:
    """Drop the partitions whose time is over and whose rows may all go; says whether any was."""
    dropped = False
    took_s = 0.0

    def drop(part: Part) -> Steps[bool]:
        nonlocal took_s
        started = time.monotonic()
        done = yield from tables.drop(run.dialect, part, older_than_s=older_than_s)
        took_s = time.monotonic() - started
        return done

    for part in found.of_time:
        if (part.ends_s or 0.0) > found.clock_s - older_than_s:
            break
        if dropped:
            yield from run.rest(min(took_s / _DROP_SHARE, DROP_PAUSE_MAX_S))
        if not (yield from run.may_go_on()):
            break
        rows = yield from tables.rows(run.dialect, part)
        done = yield from _patiently(run, partial(drop, part))
        if done is None:
            # what is in this one's way is in the way of the others
            break
        if done:
            dropped = True
            run.did(rows)
    return dropped


def partitions(app: App, task: Task) -> Steps[Report]:
    """Make the partitions of the next days, where the inbox is partitioned by time; `rows` counts them.

    Guarantee: a row whose partition is missing goes to the default partition, and is as safe and as unique
    there; up to 10,000 of them move to their partition when it is made.
    """
    if task.dry_run:
        raise ConfigurationError("partitions has no dry run: leave --dry-run out.")
    dialect = app.store.dialect
    if not dialect.has("partitions"):
        return Report("partitions")
    found = yield from tables.layout(dialect)
    missing = tables.missing(found, app.retention.partition, app.retention.ahead)
    if not missing:
        return Report("partitions")
    run = _Run(app, task, "partitions")
    if not (yield from run.begin(at_any_time=True)):
        return run.report()
    for first_s, last_s in missing:
        if not (yield from run.may_go_on()):
            break
        done = yield from _patiently(run, partial(tables.make, dialect, first_s, last_s))
        if done is None:
            break
        run.did(int(done == "made"))
        if done == "strays":
            _log.warning(
                "No partition is made from %s on: too many rows of that time are in the default partition, "
                "where they stay until they are pruned. `txbox status` shows what is ready.",
                tables.moment(first_s),
            )
    return (yield from run.end())


def _patiently(run: _Run, work: Callable[[], Steps[T]]) -> Steps[T | None]:
    """Try for a lock a few times, with growing pauses; None when it is not to be had now."""
    for tried in range(1, _LOCK_TRIES + 1):
        if not (yield from run.may_go_on()):
            break
        try:
            return (yield from work())
        except StoreError as error:
            yield Rollback()
            if error.code == _NOT_ALLOWED:
                _log.warning(
                    "This role may not add or drop partitions of the inbox: grant it what "
                    "`txbox schema print --partition … --grants` prints."
                )
                return None
            if error.fault not in _TOO_SLOW:
                raise
        # random, so that it does not meet the same transaction that comes again and again
        yield Wait(random.uniform(0.05, 0.1) * tried)
    _log.info("A partition is left to the next run: the inbox was in use all the time.")
    return None


def prune_outbox(app: App, task: Task) -> Steps[Report]:
    """Delete outgoing messages that were sent or discarded and have been kept for their time.

    Sent ones are kept for `RelayPolicy.keep_sent`; where that is zero, those that another policy has
    left behind are kept as long as discarded ones, for `Retention.processed`.

    Guarantee: never deletes what is still to be sent, or dead.
    """
    kept = task.older_than or app.retention.processed
    sent_s = (task.older_than or app.relaying.keep_sent or kept).total_seconds()
    dialect, discarded_s = app.store.dialect, kept.total_seconds()
    if task.dry_run:
        rows = yield from jobs.prunable_outbox(dialect, sent_s=sent_s, discarded_s=discarded_s)
        return Report("prune-outbox", rows)

    def batch(limit: int) -> Steps[Batch]:
        return jobs.prune_outbox(dialect, sent_s=sent_s, discarded_s=discarded_s, limit=limit)

    return (yield from _Run(app, task, "prune-outbox").batches([batch]))


def prune_quarantine(app: App, task: Task) -> Steps[Report]:
    """Delete quarantine rows that were decided on and have been kept for their time; bound the payloads of all.

    Beyond `Retention.quarantine_bytes` the oldest payloads are dropped, with an event, and their rows stay.

    Guarantee: no row that waits for a decision is deleted.
    """
    dialect = app.store.dialect
    older_than_s = (task.older_than or app.retention.quarantine).total_seconds()
    if task.dry_run:
        rows = yield from jobs.prunable_quarantine(dialect, older_than_s=older_than_s)
        return Report("prune-quarantine", rows)
    run = _Run(app, task, "prune-quarantine")
    if not (yield from run.begin(at_any_time=True)):
        return run.report()
    yield from run.repeat(
        lambda limit: jobs.prune_quarantine(dialect, older_than_s=older_than_s, limit=limit)
    )
    excess = (yield from jobs.quarantine_bytes(dialect)) - app.retention.quarantine_bytes
    rows = payload_bytes = 0
    while payload_bytes < excess and (yield from run.may_go_on()):
        dropped, size = yield from jobs.drop_quarantined(
            dialect, excess=excess - payload_bytes, limit=_FIRST_BATCH
        )
        if not dropped:
            break
        rows, payload_bytes = rows + dropped, payload_bytes + size
    if rows:
        app.events.emit(QuarantineTrimmed(rows=rows, payload_bytes=payload_bytes))
    return (yield from run.end())


def drop_payloads(app: App, task: Task) -> Steps[Report]:
    """Drop the payloads that handlers keep for a time (`keep_payload=timedelta(…)`) once it is over.

    The longest time of a consumer's handlers counts; a consumer with an "always" keeps all.
    """
    if task.dry_run:
        raise ConfigurationError("drop-payloads has no dry run: leave --dry-run out.")
    batches: list[Batches] = []
    for consumer, handlers in app.handlers.consumers().items():
        kept = [handler.options.keep_payload for handler in handlers]
        times = [keep for keep in kept if isinstance(keep, timedelta)]
        if times and "always" not in kept and task.consumer in (None, consumer):
            batches.append(_dropping(app, consumer, max(times).total_seconds()))
    if not batches:
        return Report("drop-payloads")
    return (yield from _Run(app, task, "drop-payloads").batches(batches))


def _dropping(app: App, consumer: str, older_than_s: float) -> Batches:
    return lambda limit: jobs.drop_payloads(
        app.store.dialect, consumer=consumer, older_than_s=older_than_s, limit=limit
    )


class _Run:
    """One run of a job under its lease: its batches, what they did, and whether it may go on."""

    def __init__(self, app: App, task: Task, name: str) -> None:
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

    def begin(self, *, at_any_time: bool = False) -> Steps[bool]:
        """Take the lease; False when another has it, or it is not the time."""
        self._any_time = self._any_time or at_any_time
        if not (yield from self._is_time()):
            return False
        self._open = yield from self._lease.acquire()
        self._look_at = time.monotonic() + _JOB_LEASE_S / 6
        return self._open

    def _is_time(self) -> Steps[bool]:
        if not self._any_time:
            second = yield from jobs.second_of_day(self.dialect)
            self._closed = not self._app.retention.open_at(second)
        return not self._closed

    def may_go_on(self) -> Steps[bool]:
        """Say whether to go on: not stopped, the lease still held, and still in the window."""
        if not self._open or self._closed or self._task.stop():
            return False
        now = time.monotonic()
        if now >= self._look_at:
            self._look_at = now + _JOB_LEASE_S / 6
            self._open = yield from self._lease.acquire()
            if self._open:
                yield from self._is_time()
        return self._open and not self._closed

    def rest(self, for_s: float) -> Steps[None]:
        """Do nothing for a time, or until stopped."""
        until = time.monotonic() + for_s
        while (left_s := until - time.monotonic()) > 0 and not self._task.stop():
            yield Wait(min(left_s, _LOOK_S))

    def did(self, rows: int) -> None:
        self.rows += rows
        if self._task.on_progress is not None:
            self._task.on_progress(self.rows)

    def report(self) -> Report:
        return Report(
            self._name, self.rows, skipped=not (self._open or self._closed), closed=self._closed
        )

    def end(self) -> Steps[Report]:
        """Give the lease back, and tell what was done."""
        yield from self._lease.release()
        if self.rows and self._name in ("prune", "prune-outbox", "prune-quarantine"):
            took_s = time.monotonic() - self._started
            self._app.events.emit(
                RowsPruned(consumer=self._task.consumer, rows=self.rows, duration_s=took_s)
            )
        return Report(self._name, self.rows, closed=self._closed)

    def batches(self, batches: Sequence[Batches]) -> Steps[Report]:
        """A whole run: each kind of batch for as long as it finds something."""
        if not (yield from self.begin()):
            return self.report()
        for batch in batches:
            yield from self.repeat(batch)
        return (yield from self.end())

    def _given_back(self) -> Steps[None]:
        """Give the lease back behind an error, so that the next run need not wait until it is over."""
        try:
            yield from self._lease.release()
        except StoreError:
            # the error that ended the run is the one to tell
            yield Discard()

    def repeat(self, batch: Batches, *, counted: bool = True) -> Steps[None]:
        """Repeat a batch until there is no more; its size follows the time it takes."""
        most = self._app.retention.batch
        limit = min(most, _FIRST_BATCH)
        while (yield from self.may_go_on()):
            started = time.monotonic()
            try:
                done = yield from batch(limit)
            except StoreError as error:
                yield Discard()
                if error.fault not in _TOO_SLOW or limit == 1:
                    yield from self._given_back()
                    raise
                limit = max(1, limit // 2)
                yield Wait(_SLOW_S)
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
            # as long a pause as the work took: live traffic gets half of the time at least
            yield Wait(min(max(took_s, 0.001), _PAUSE_MAX_S))
