"""The pulse of a process: it writes what it is and does, and reads which consumers are paused."""

from __future__ import annotations

import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import txbox
from txbox.alerts import Alert, Alerting, commits_lost, database_away
from txbox.app import OUTBOX
from txbox.boundaries import Boundary
from txbox.boundaries import log as _log
from txbox.errors import StoreError, StoreUnavailable
from txbox.policy import Backoff
from txbox.processing.failure import printable
from txbox.session import Operation, Session
from txbox.store import activity
from txbox.store.activity import Doing, Identity, Pause
from txbox.worker.agenda import Run
from txbox.worker.commits import Commits
from txbox.worker.driving import thread
from txbox.worker.table import Table

_BEAT_S = 5.0
# even if nothing has changed; a process that has not written for 30 s counts as silent
_WRITE_S = 15.0
_NAME_MAX = 255
# ids of a line
_LISTED = 100
# between two looks whether the database answers, and between tries to tell that it does not
_WATCH_S, _WATCH_MAX_S = 0.5, 30.0


def identify(
    kind: str,
    name: str,
    *,
    consumers: Iterable[str],
    sources: Mapping[str, Sequence[str]],
    routes: Iterable[str],
    lanes: int,
) -> Identity:
    """Say who this process is.

    Args:
        kind: "run", "relay" or "maintain", after its command.
        name: of the App, for people.
        sources: the topics it asks each source for.
        routes: those of the outbox that it relays.
        lanes: how many batches it may have in flight.
    """
    return Identity(
        worker=secrets.token_hex(8),
        kind=kind,
        host=printable(socket.gethostname(), _NAME_MAX),
        pid=os.getpid(),
        version=txbox.__version__,
        app=printable(name, _NAME_MAX),
        consumers=tuple(sorted(consumers)),
        sources={
            printable(source, _NAME_MAX): tuple(printable(topic, _NAME_MAX) for topic in topics)
            for source, topics in sources.items()
        },
        routes=tuple(routes),
        lanes=lanes,
    )


class Pulse:
    """A thread that writes every few seconds who this process is, what it does, and what it has counted.

    Of paused consumers, it gives back what is leased and does not run; of resumed ones, it has the tables look.

    Args:
        doing: called for each row.
        commits: compared with the database at each beat.

    Guarantee: its failures never delay or stop the worker. While the database is down, pauses stay as last read, and
    counts add up; a crash loses a few seconds of statistics.
    """

    def __init__(
        self,
        run: Run,
        identity: Identity,
        tables: Collection[Table],
        doing: Callable[[], Doing],
        commits: Commits | None = None,
    ) -> None:
        self.identity = identity
        self._run_of = run
        self._app = run.app
        self._driver = run.driver
        self._tables = tables
        self._doing = doing
        self._commits = commits
        self._unstaged: list[Alert] = []
        self._over = False
        self._written: Doing | None = None
        self._write_at = 0.0
        self._woken = threading.Event()
        self._logged: set[str | None] = set()
        self._thread: threading.Thread | None = None
        # by the monotonic clock: since when the database has owed an answer
        self._asked_at: float | None = None
        self._gone = threading.Event()

    def start(self) -> None:
        """Read who is paused, then start the thread, which reports its end."""
        self._app.activity.counts = True
        self._app.pauses.wake = self._woken.set
        self._asked_at = time.monotonic()
        alerting = self._app.alerting
        if alerting is not None and not alerting.routes.isdisjoint(self.identity.routes):
            thread("txbox-alerts", lambda: self._watch(alerting), self._run_of.ended)
        # one that is paused already is not to begin
        self._best_effort(self._read_pauses)
        self._thread = thread("txbox-pulse", self._run, self._run_of.ended)

    def end(self, timeout_s: float) -> None:
        """Write a last time, take the row of this process away, and wait for that, at most this long."""
        self._over = True
        self._woken.set()
        if self._thread is not None:
            self._thread.join(timeout_s)
        self._gone.set()

    def _run(self) -> None:
        while not self._over:
            self._woken.clear()
            if self._app.pauses.unwritten:
                self._best_effort(self._paused)
            if self._asked_at is None:
                self._asked_at = time.monotonic()
            self._best_effort(self._beat)
            if self._commits is not None:
                self._best_effort(partial(self._compare, self._commits))
            if not self._over:
                self._woken.wait(_BEAT_S)
        if self._app.pauses.unwritten:
            self._best_effort(self._paused)
        self._best_effort(self._departed)
        self._app.pauses.wake = None
        self._app.activity.counts = False

    def _watch(self, alerting: Alerting) -> None:
        """Tell that the database has been away for too long, and that it is back: past the outbox, which is in it."""
        after_s, backoff = alerting.alerts.after.total_seconds(), Backoff(_WATCH_S, _WATCH_MAX_S)
        name, told = self._app.database.name, False
        unsent: Collection[str] = ()
        alert, message_id = database_away(name, 0.0), ""
        while not self._gone.wait(backoff.pause_s):
            asked_at = self._asked_at
            away_s = 0.0 if asked_at is None else time.monotonic() - asked_at
            if not unsent:
                if (away_s >= after_s) is told:
                    continue
                told, unsent, message_id = not told, alerting.topics, secrets.token_hex(16)
                alert = database_away(name, away_s) if told else replace(alert, state="resolved")
            errors = alerting.send(alert, message_id, unsent)
            unsent = [*errors]
            if not errors:
                backoff.reset()
                continue
            backoff.next_s()
            for topic, error in errors.items():
                _log.warning("The alert %r was not sent to %s: %s", alert.title, topic, error)

    async def _paused(self, db: Session) -> None:
        await self._app.pauses.write(db, self._app.store.dialect)

    async def _read_pauses(self, db: Session) -> None:
        _, paused = await activity.pauses(db, self._app.store.dialect)
        self._apply(paused)

    async def _beat(self, db: Session) -> None:
        clock_s, paused = await activity.pauses(db, self._app.store.dialect)
        self._app.activity.ahead_s = clock_s - time.time()
        self._apply(paused)
        await self._write(db)
        for table in self._tables:
            if table.paused:
                await table.give_back(db)

    async def _compare(self, commits: Commits, db: Session) -> None:
        """Tell what the database has lost that this process had settled."""
        for loss in await commits.missing(db, self._app.store):
            self._app.events.emit(loss)
            for start in range(0, loss.count, _LISTED):
                listed = loss.message_ids[start : start + _LISTED]
                _log.error("The database has lost, of %s: %s", loss.consumer, ", ".join(listed))
            self._unstaged.append(
                commits_lost(
                    loss.consumer or "", loss.count, loss.since, loss.until, complete=loss.complete
                )
            )
        if self._app.alerting is not None and self._unstaged:
            await db.begin()
            await self._app.alerting.opened(db, self._app.store.dialect, self._unstaged)
            await db.commit()
        # where that failed, the next beat stages them
        self._unstaged = []

    async def _write(self, db: Session) -> None:
        counting, dialect = self._app.activity, self._app.store.dialect
        # without consumers there is no poll, and something may wait in the outbox
        late = self._run_of.agenda.late() if self._tables else {OUTBOX: 0.0}
        counting.late("consumer", {name: age_s for name, age_s in late.items() if name != OUTBOX})
        if self.identity.routes and OUTBOX in late:
            ages_s = await activity.outbox_ages(db, dialect, self.identity.routes)
            counting.late("route", ages_s)
        doing, counted = self._doing(), counting.unwritten()
        if counted or doing != self._written or time.monotonic() >= self._write_at:
            await activity.write(db, dialect, self.identity, doing, counted)
            counting.written()
            self._written, self._write_at = doing, time.monotonic() + _WRITE_S

    def _apply(self, paused: Iterable[Pause]) -> None:
        for consumer in self._app.pauses.heard(paused):
            self._run_of.agenda.look(consumer)

    async def _departed(self, db: Session) -> None:
        await self._write(db)
        await activity.gone(db, self._app.store.dialect, self.identity.worker)

    def _best_effort(self, operation: Operation[[], None]) -> None:
        """Run an operation; a failure is logged once, and the next beat tries again."""
        try:
            self._driver.perform(operation)
            self._asked_at = None
        except StoreError as error:
            if not isinstance(error, StoreUnavailable):
                # an answer, too
                self._asked_at = None
            if error.transient:
                _log.debug("Postponed while the database is busy or away: %s", error)
            elif error.code not in self._logged:
                self._logged.add(error.code)
                _log.warning(
                    "Cannot record this worker's status or read pauses (%s). Processing continues, but "
                    "`txbox workers`, `txbox pause` and the counts miss it. `txbox schema print --grants` prints "
                    "the rights it needs.",
                    error,
                )
        except Exception as error:  # noqa: BLE001  # see contain
            self._app.protocol.contain(Boundary.PULSE, error, retry_in_s=_BEAT_S)
