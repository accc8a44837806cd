"""What a worker does beside its lanes: heartbeats, maintenance, a look at the process that started it."""

from __future__ import annotations

import logging
import os
import select
import threading
import time
from collections.abc import Callable, Mapping

from txbox.app import App
from txbox.errors import StoreError
from txbox.maintenance import JOBS, Task
from txbox.processing.patience import CURABLE
from txbox.steps import Steps
from txbox.worker.driving import Driver, thread
from txbox.worker.supervisor import PARENT_FD, tell_parent
from txbox.worker.table import Table

_log = logging.getLogger("txbox")

_PARENT_S = 1.0


class Background:
    """Threads beside the lanes; each reports its end.

    Args:
        tables: the leases that they hold are extended until `end`, so that a drain keeps them.
        draining: ends maintenance.
        ended: called by each thread with what ended it, None for a stop.
        orphaned: called when the supervising process is gone.
    """

    def __init__(
        self,
        app: App,
        driver: Driver,
        tables: Mapping[str, Table],
        *,
        draining: threading.Event,
        ended: Callable[[BaseException | None], None],
        orphaned: Callable[[], None],
    ) -> None:
        self._app = app
        self._driver = driver
        self._tables = tables
        self._draining = draining
        self._ended = ended
        self._orphaned = orphaned
        self._over = threading.Event()
        self._threads: list[threading.Thread] = []

    def start(self, *, maintenance: bool) -> None:
        """Start the threads: heartbeats, `maintenance` if wanted, and the look at a parent if there is one."""
        self._threads.append(thread("txbox-heartbeat", self._beat, self._ended))
        if maintenance:
            self._threads.append(thread("txbox-maintenance", self._maintain, self._ended))
        tell_parent()
        # taken out: the descriptor is not for processes that a handler starts
        if parent := os.environ.pop(PARENT_FD, None):
            thread("txbox-parent", lambda: self._watch(int(parent)), self._ended)

    def end(self) -> None:
        """Have them end: nothing that is leased is at work any more."""
        self._over.set()

    def join(self, timeout_s: float) -> bool:
        """Wait for the threads that use the database, at most this long; returns whether they have ended."""
        until = time.monotonic() + timeout_s
        for daemon in self._threads:
            daemon.join(max(0.0, until - time.monotonic()))
        return not any(daemon.is_alive() for daemon in self._threads)

    def _beat(self) -> None:
        while not self._over.wait(self._app.lease.heartbeat_s):
            for table in self._tables.values():
                self._patiently(table.heartbeat())

    def _maintain(self) -> None:
        due = {job.name: time.monotonic() for job in JOBS}
        while not self._draining.wait(max(0.0, min(due.values()) - time.monotonic())):
            for job in JOBS:
                if due[job.name] <= time.monotonic() and not self._draining.is_set():
                    self._patiently(job.run(self._app, Task(stop=self._draining.is_set)))
                    due[job.name] = time.monotonic() + job.every(self._app).total_seconds()

    def _patiently(self, steps: Steps[object]) -> None:
        """Carry steps out; what a later round cures is left to it."""
        try:
            self._driver.perform(steps)
        except StoreError as error:
            if error.fault not in CURABLE:
                raise
            _log.debug("Put off while the database is busy or away: %s", error)

    def _watch(self, fd: int) -> None:
        while not self._over.is_set():
            if select.select([fd], [], [], _PARENT_S)[0]:
                # nobody writes there: it is readable when the last process that could has ended
                self._orphaned()
                return
