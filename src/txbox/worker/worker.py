"""The worker: one process of `txbox run`, `txbox relay` or `txbox maintain`."""

from __future__ import annotations

import asyncio
import os
import select
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Literal, ParamSpec

from txbox.app import App, Consumption
from txbox.boundaries import Boundary
from txbox.boundaries import log as _log
from txbox.errors import (
    ConfigurationError,
    SchemaError,
    StoreError,
    StoreUnavailable,
)
from txbox.events import ConsumptionPaused, ConsumptionResumed, WorkerStarted, WorkerStopped
from txbox.handlers import conflicts
from txbox.maintenance import Task, scheduled
from txbox.policy import GRACE
from txbox.session import Operation
from txbox.store import leases
from txbox.store.activity import Doing
from txbox.text import counted
from txbox.worker.agenda import Run
from txbox.worker.commits import Commits
from txbox.worker.driving import check_tables, thread
from txbox.worker.health import Answers, Health
from txbox.worker.lanes import Lanes
from txbox.worker.pulse import Pulse, identify
from txbox.worker.pump import Pump
from txbox.worker.relay import Relays
from txbox.worker.supervisor import PARENT_FD, draining_on_signals, last_s, tell_parent
from txbox.worker.table import Table

if TYPE_CHECKING:
    from txbox.worker.serving import Server

P = ParamSpec("P")

# interval of the main loop
_TICK_S = 0.1
_LOOK_AT_PARENT_S = 1.0
# reserved at the end of the grace for closing sources, relays and the database: 3 s, or a third
_CLOSE_S = 3.0
# a source or relay whose broker hangs gets this much of the grace, or half of the rest
_HUNG_S = 5.0
# after a crash, running work gets this long to finish
_AFTER_CRASH_S = 10.0

#: What a worker does, by its command: everything, or only one part of it.
Kind = Literal["run", "relay", "maintain"]
# of what the end of the grace has cut off
_AFTERWARDS: dict[Kind, str] = {
    "run": "What was not settled is delivered again.",
    "relay": "What was not confirmed is sent again.",
    "maintain": "The next worker continues its jobs.",
}


class Worker:
    """Consumes the sources of an app and the rows of its table until it is stopped.

    Args:
        kind: "run" does everything. "relay" only sends what is staged, "maintain" only does maintenance: they
            have no sources and no lanes.
        once: end when all sources are exhausted and nothing is due or leased for its consumers, or to be sent.
        install_signals: SIGTERM and SIGINT drain; a second one ends the process at once.
        maintenance: run rescue, prune and the other jobs in the background.
        relay: send what is staged in the outbox.
        grace: from the first signal, or `stop`, to the end. What has not drained by then is cut off, with
            status 1.
        consumptions: instead of those of the app.
        health: updated by the worker, served by the caller.
        webhooks: serves those of the app, from the start of consumption to the drain.
        name: of the app, for `txbox workers`.
        loop: runs the async handlers, and goes on after the end; by default the worker has one of its own. `run`
            must be called in another thread.

    Guarantee: whatever ends it, what was not settled is delivered again, and what was leased and
    not started goes back to the table (after SIGKILL: when its lease has run out).
    """

    def __init__(
        self,
        app: App,
        *,
        kind: Kind = "run",
        once: bool = False,
        install_signals: bool = True,
        maintenance: bool = True,
        relay: bool = True,
        grace: timedelta = GRACE,
        consumptions: Sequence[Consumption] | None = None,
        health: Health | None = None,
        webhooks: Server | None = None,
        name: str = "",
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        self._app = app
        self._name = name
        self._once = once
        self._install_signals = install_signals
        self._kind: Kind = kind
        # the other kinds leave sources, lanes and handlers alone
        self._runs_handlers = kind == "run"
        self._maintenance = maintenance if self._runs_handlers else kind == "maintain"
        self._grace_s = grace.total_seconds()
        wanted = app.consumptions if consumptions is None else consumptions
        self._consumptions = wanted if self._runs_handlers else ()
        self._health = health or Health()
        self._webhooks = webhooks
        self._run = Run(app, self._thread_ended, loop)
        self._driver, self._stopping = self._run.driver, self._run.stopping
        self._agenda = self._run.agenda
        self._relay = relay if self._runs_handlers else kind == "relay"
        self._relays: Relays | None = None
        # reports from threads and signal handlers; SimpleQueue.put may be called inside of either
        self._reports: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._lanes = Lanes(self._run)
        self._serving = False
        # each is True until it has reported its end
        self._pumps: dict[Pump, bool] = {}
        self._background = Background(self._run, self._lanes.tables)
        self._poll: threading.Thread | None = None
        self._pulse: Pulse | None = None
        self._consuming = False
        self._crash: BaseException | None = None
        #: What made `run` return 1 or 2.
        self.failure: BaseException | None = None
        #: Something had not ended within the grace: its threads may still run.
        self.cut_off = False
        #: When the grace ends, by the monotonic clock; None before the first request to end.
        self.ends_at: float | None = None
        self._silent = [f"the database {app.database.name} did not answer"]
        # what the main thread waits for, as it is said when the grace ends before that
        self._awaited: Sequence[str] = ()

    # -- from outside -------------------------------------------------------------------------

    def run(self) -> int:
        """Work until stopped or, with `once`, until idle; returns the exit status.

        Returns: 0 drained or finished, 2 wrong configuration, schema or an unreachable database at
        the start, 1 anything that should not have happened.
        """
        with (
            draining_on_signals(self._signalled, self._grace_s, lambda: self._awaited)
            if self._install_signals
            else nullcontext()
        ):
            self._app.handlers.workers += 1
            try:
                self._start()
                self._supervise()
            except (ConfigurationError, SchemaError, StoreError) as error:
                self._crash = self._crash or error
            finally:
                # first: closing may raise what the database says
                self._app.handlers.workers -= 1
                unfinished = self._shut_down()
        if self._consuming and self._runs_handlers:
            self._app.events.emit(WorkerStopped(clean=not unfinished and self._crash is None))
        self.failure = self._crash
        self.cut_off = bool(unfinished)
        return self._status(unfinished)

    def stop(self) -> None:
        """Drain: receive nothing more, finish what runs, give the rest back. From any thread."""
        self._reports.put(self._drain)

    # -- start --------------------------------------------------------------------------------

    def _start(self) -> None:
        """Check everything that can be checked, then open the sources, then start the lanes."""
        self._awaited = self._silent
        names, topics = self._check()
        self._awaited = ()
        if self._stopping.is_set():
            return
        if self._relay:
            self._relays = Relays(self._run)
        self._health.relays = self._relays
        if self._runs_handlers:
            self._lanes.make()
        self._open_sources(names, topics)
        if not self._stopping.is_set():
            self._awaited = self._silent
            self._consume(topics)
            self._awaited = ()

    def _check(self) -> tuple[list[str], list[Sequence[str]]]:
        """Check what can be checked before sources are open; returns their names, and the topics to ask each for."""
        app = self._app
        if self._runs_handlers:
            self._check_handlers()
        for consumption in self._consumptions:
            _refuse(conflicts.redelivery(app, consumption.source))
        topics = [
            conflicts.topics_of(app.handlers, consumption.source, consumption.topics)
            for consumption in self._consumptions
        ]
        for consumption, wanted in zip(self._consumptions, topics, strict=True):
            _refuse(conflicts.order(app.handlers, consumption.source, wanted))
        sources = [consumption.source for consumption in self._consumptions]
        names = conflicts.names_of(list(zip(sources, topics, strict=True)))
        self._check_database()
        return names, topics

    def _check_handlers(self) -> None:
        app = self._app
        # without handlers it is a relay, where there is something to send
        sends = self._relay and not self._consumptions and bool(app.routes.all())
        if not sends and not len(app.handlers):
            raise ConfigurationError(
                "The app has no handlers: decorate a function with @app.handler(topic, consumer=…)."
            )
        for handler in app.handlers:
            app.check_connections(handler)
        _refuse(conflicts.time_outs(app))

    def _check_database(self) -> None:
        """Check that the database answers and holds tables that fit.

        Raises:
            StoreError: it does not answer.
            SchemaError: the message contains the command to run.
        """
        try:
            check_tables(self._app, self._driver, self._stopped_within, patient=not self._once)
        except StoreError as error:
            raise StoreError(
                f"The database {self._app.database.name} cannot be used ({error}): "
                "check that it runs and that the URL is right.",
                fault=error.fault,
                code=error.code,
            ) from error

    def _stopped_within(self, wait_s: float) -> bool:
        until = time.monotonic() + wait_s
        while not self._stopping.is_set() and (remaining_s := until - time.monotonic()) > 0:
            self._handle_reports(min(remaining_s, _TICK_S))
        return self._stopping.is_set()

    def _open_sources(self, names: Sequence[str], topics: Sequence[Sequence[str]]) -> None:
        """Start a pump for each source, and wait until all are open, or for a stop."""
        for consumption, name, wanted in zip(self._consumptions, names, topics, strict=True):
            pump = Pump(self._run, self._lanes, consumption.source, name=name, topics=wanted)
            self._pumps[pump] = True
            self._health.pumps.append(pump)
            pump.start(partial(self._pump_ended, pump))
        for pump in self._pumps:
            self._awaited = [f"the source {pump.name} did not open"]
            while not (self._stopping.is_set() or pump.opened(_TICK_S)):
                self._handle_reports(0.0)
        self._awaited = ()
        self._handle_reports(0.0)

    def _remembered(self) -> Commits | None:
        """What is settled of sources that do not give again what the database loses; None without such sources."""
        consumers = {
            consumer
            for consumption, pump in zip(self._consumptions, self._pumps, strict=True)
            if not consumption.source.rewinds
            for consumer in pump.consumers
        }
        if not consumers:
            return None
        commits = Commits(consumers, self._app.retention.processed.total_seconds())
        self._app.intake.on_settled = commits.add
        return commits

    def _consume(self, topics: Sequence[Sequence[str]]) -> None:
        """Start everything that works, and let the pumps go."""
        for pump in self._pumps:
            # some ask their broker what it is set to
            _refuse(conflicts.redelivery(self._app, pump.consumer))
        tables = self._lanes.tables
        if self._runs_handlers:
            sources = tuple(pump.name for pump in self._pumps)
            self._app.events.emit(WorkerStarted(consumers=tuple(tables), sources=sources))
        self._consuming = True
        identity = identify(
            self._kind,
            self._name,
            consumers=tables,
            sources={pump.name: wanted for pump, wanted in zip(self._pumps, topics, strict=True)},
            routes=[route.name for route in self._app.routes.all()] if self._relay else [],
            lanes=len(self._lanes),
        )
        self._pulse = Pulse(self._run, identity, tables.values(), self._doing, self._remembered())
        self._pulse.start()
        self._health.consuming(tables.values(), self._driver, Answers(self._app))
        if self._webhooks is not None:
            # requests are drained as lanes are
            self._serving = True
            self._driver.task(self._webhooks.serve()).add_done_callback(self._served)
        self._background.start(
            maintenance=self._maintenance, alone=self._kind == "maintain", orphaned=self.stop
        )
        self._app.agenda = self._agenda
        if tables:
            # a relay alone may not read the inbox, and polls the outbox itself
            self._poll = thread("txbox-poll", self._agenda.run, self._thread_ended)
        if self._relays is not None:
            self._relays.start()
        for pump in self._pumps:
            pump.go()

    def _doing(self) -> Doing:
        return Doing(
            state="draining" if self._stopping.is_set() else "running",
            busy=self._lanes.busy,
            leases=sum(table.leased for table in self._lanes.tables.values()),
            in_flight=sum(pump.in_flight for pump in self._pumps),
            troubles=(
                *(pump.trouble for pump in self._pumps if pump.trouble is not None),
                *(() if self._relays is None else self._relays.troubles()),
            ),
        )

    # -- the main thread ----------------------------------------------------------------------

    def _supervise(self) -> None:
        """Come round until stopped, failed or, with `once`, idle."""
        while not self._stopping.is_set():
            self._handle_reports(_TICK_S)
            if self._crash is not None:
                return
            refusals = [pump.refusal for pump in self._pumps if pump.refusal is not None]
            if self._once and refusals:
                raise ConfigurationError(refusals[0])
            # paused sources do not count, or this would never end
            runs = any(
                runs and not (pump.all_paused and not pump.in_flight)
                for pump, runs in self._pumps.items()
            )
            if self._once and not runs and not self._work_remains():
                return

    def _handle_reports(self, wait_s: float) -> None:
        """Act on what other threads and signals report; waits at most this long for the first report."""
        self._health.beat()
        try:
            report = self._reports.get(timeout=wait_s) if wait_s else self._reports.get_nowait()
            while True:
                report()
                report = self._reports.get_nowait()
        except Empty:
            pass

    def _work_remains(self) -> bool:
        """Whether rows of the outbox or of these consumers are due or leased."""
        begun = self._lanes.begun
        if self._lanes.busy:
            return True
        try:
            with self._health.asking_the_database():
                # the outbox first: its rows may be rows of these tables a moment later
                remains = (self._relays is not None and self._relays.has_rows()) or any(
                    self._driver.perform(
                        leases.work_left,
                        self._app.store.dialect,
                        consumer=consumer,
                        order=self._app.handlers.order_of(consumer),
                    )
                    for consumer, table in self._lanes.tables.items()
                    if not table.paused
                )
                # a handler that ran meanwhile may have staged a message after the outbox was read
                return remains or self._lanes.begun != begun
        except StoreError as error:
            if not error.transient:
                raise
            # the database is down, so assume that work remains
            return True

    def _drain(self) -> None:
        crashed = self._crash is not None
        self._asked_to_end(min(_AFTER_CRASH_S, self._grace_s) if crashed else self._grace_s)
        self._stopping.set()
        self._health.draining()
        if self._webhooks is not None:
            self._webhooks.stop()
        self._agenda.end()

    def _asked_to_end(self, within_s: float) -> None:
        if self.ends_at is None:
            self.ends_at = time.monotonic() + within_s

    def _remaining_s(self, before_end_s: float) -> float:
        """Seconds to the end of the grace, less `before_end_s`."""
        assert self.ends_at is not None
        return max(0.0, self.ends_at - before_end_s - time.monotonic())

    def _shut_down(self) -> list[str]:
        """Let lanes finish, settle, give rows back, close; returns what had not ended in time."""
        self._drain()
        unfinished: list[str] = []
        close_s, last = min(_CLOSE_S, self._grace_s / 3), last_s(self._grace_s)
        if not self._wait_until(lambda: not (self._lanes.busy or self._serving), close_s):
            if busy := self._lanes.busy:
                unfinished.append(f"{counted(busy, 'handler')} still at work")
            unfinished += ["the webhooks were still answering"] if self._serving else []
        for pump in self._pumps:
            pump.finish()
        # a process that only sends gives its relays what another gives its handlers
        hung_s = (
            self._remaining_s(close_s)
            if self._kind == "relay"
            else min(_HUNG_S, self._remaining_s(last) / 2)
        )
        hung_at = time.monotonic() + hung_s
        self._wait_until(lambda: not any(self._pumps.values()), self._remaining_s(0.0) - hung_s)
        unfinished += [
            f"the source {pump.name} did not close within {hung_s:.2g} s"
            for pump, runs in self._pumps.items()
            if runs
        ]
        self._background.end()
        self._app.agenda = self._app.intake.on_settled = None
        self._health.closing()
        if self._relays is not None:
            relays_s = max(hung_at - time.monotonic(), 0.0)
            unfinished += [
                f"the relay to {name} did not end within {hung_s:.2g} s"
                for name in self._relays.join(relays_s)
            ]
        # should the watch of supervisor.py be first, it says the same
        self._awaited = [*unfinished, *self._silent]
        answered = self._background.join(self._remaining_s(last))
        if self._poll is not None:
            self._poll.join(self._remaining_s(last))
            answered = answered and not self._poll.is_alive()
        if self._pulse is not None:
            self._pulse.end(self._remaining_s(last))
        closed = self._close(last, clean=not unfinished) and answered
        return unfinished if closed else unfinished + self._silent

    def _wait_until(self, done: Callable[[], bool], before_end_s: float) -> bool:
        """Handle reports until it is done; returns False when only `before_end_s` of the grace remains."""
        self._handle_reports(0.0)
        while not done():
            remaining_s = self._remaining_s(before_end_s)
            if not remaining_s:
                return False
            self._handle_reports(min(_TICK_S, remaining_s))
        return True

    def _close(self, before_end_s: float, *, clean: bool) -> bool:
        """Give leased rows back and close; returns whether the database let it. Never waits for one that hangs."""
        ended: list[BaseException | None] = []
        closing = thread("txbox-close", lambda: self._give_back(clean), ended.append)
        closing.join(max(self._remaining_s(before_end_s), self._remaining_s(0.0) / 4))
        if ended and ended[0] is not None:
            raise ended[0]
        return bool(ended)

    def _give_back(self, clean: bool) -> None:
        try:
            for table in self._lanes.tables.values():
                self._driver.perform(table.give_back)
        except StoreError as error:
            _log.warning(
                "Leased rows could not be given back (%s): they are rescued when their lease runs out.",
                error,
            )
        try:
            self._driver.close(self._remaining_s(0.0), clean=clean)
        except (StoreError, TimeoutError) as error:
            _log.warning("Connections did not close cleanly: %s", error)

    def _status(self, unfinished: Sequence[str]) -> int:
        """Say how it ended: in the log, and as the exit status."""
        if self._crash is None:
            if unfinished:
                over = not self._remaining_s(last_s(self._grace_s))
                _log.error(
                    "%s %s. %s",
                    f"The grace period of {self._grace_s:g} s ended with"
                    if over
                    else "The drain was cut off:",
                    ", ".join(unfinished),
                    _AFTERWARDS[self._kind],
                )
            return 1 if unfinished else 0
        if isinstance(self._crash, (ConfigurationError, SchemaError)) or (
            isinstance(self._crash, StoreError) and not self._consuming
        ):
            _log.error("%s", self._crash)
            return 2
        _log.critical(
            "The worker stops: %s",
            self._crash,
            exc_info=(type(self._crash), self._crash, self._crash.__traceback__),
        )
        return 1

    # -- reports from threads and signals -----------------------------------------------------

    def _signalled(self) -> None:
        # here and not in the report: the main thread may be waiting for the database
        self._asked_to_end(self._grace_s)
        self._health.draining()
        self._reports.put(self._drain)

    def _failed(self, error: BaseException | None) -> None:
        """The first error ends the worker; those that follow from it are dropped."""
        if error is not None and self._crash is None:
            self._crash = error
            self._health.failed(error)
            self._drain()

    def _served(self, task: Future[None]) -> None:
        error = task.exception() if not task.cancelled() else RuntimeError("cancelled")

        def report() -> None:
            self._serving = False
            self._failed(error)

        self._reports.put(report)

    def _pump_ended(self, pump: Pump, error: BaseException | None) -> None:
        def report() -> None:
            self._pumps[pump] = False
            self._failed(error)

        self._reports.put(report)

    def _thread_ended(self, error: BaseException | None) -> None:
        self._reports.put(lambda: self._failed(error))


def _refuse(all_conflicts: Iterable[conflicts.Conflict]) -> None:
    for conflict in all_conflicts:
        raise ConfigurationError(conflict.sentence)


class Background:
    """Threads beside the lanes; each reports its end.

    Args:
        tables: their leases are extended until `end`, so that a drain keeps them.
    """

    def __init__(self, run: Run, tables: Mapping[str, Table]) -> None:
        self._app = run.app
        self._driver = run.driver
        self._tables = tables
        self._draining = run.stopping
        self._ended = run.ended
        self._over = threading.Event()
        self._threads: list[threading.Thread] = []

    def start(self, *, maintenance: bool, alone: bool, orphaned: Callable[[], None]) -> None:
        """Start the threads: heartbeats of leases, `maintenance` if wanted, and the watch over a parent, if any.

        Args:
            alone: nothing but maintenance says whether the database is away.
            orphaned: called when the supervising process is gone.
        """
        if self._tables:
            self._threads.append(thread("txbox-heartbeat", self._beat, self._ended))
        if maintenance:
            self._threads.append(
                thread("txbox-maintenance", lambda: self._maintain(tells=alone), self._ended)
            )
        tell_parent()
        # removed so that a handler's subprocesses do not inherit it
        if parent := os.environ.pop(PARENT_FD, None):
            thread("txbox-parent", lambda: self._watch(int(parent), orphaned), self._ended)

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
                self._best_effort(Boundary.HEARTBEAT, table.heartbeat)

    def _maintain(self, *, tells: bool) -> None:
        """Run each job when it is due, until the drain.

        Args:
            tells: emit when the database goes away and comes back. Beside lanes and relays these tell, sooner.
        """
        app, task = self._app, Task(stop=self._draining.is_set)
        paused_at: float | None = None
        for job in scheduled(app, self._draining.wait):
            error = self._best_effort(Boundary.JOB, job.run, app, task)
            if not tells:
                continue
            if isinstance(error, StoreUnavailable):
                paused_at = paused_at or time.monotonic()
                wait_s = job.every(app).total_seconds()
                app.events.emit(ConsumptionPaused(reason=str(error), retry_in_s=wait_s))
            elif error is None and paused_at is not None:
                paused_s, paused_at = time.monotonic() - paused_at, None
                app.events.emit(ConsumptionResumed(paused_s=paused_s))

    def _best_effort(
        self,
        boundary: Boundary,
        operation: Operation[P, object],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> Exception | None:
        """Run an operation and return what it raised; the next round tries again."""
        try:
            self._driver.perform(operation, *args, **kwargs)
        except Exception as error:  # noqa: BLE001  # see contain
            if isinstance(error, StoreError) and error.transient:
                _log.debug("Postponed while the database is busy or away: %s", error)
            else:
                self._app.protocol.contain(boundary, error)
            return error
        return None

    def _watch(self, fd: int, orphaned: Callable[[], None]) -> None:
        while not self._over.is_set():
            if select.select([fd], [], [], _LOOK_AT_PARENT_S)[0]:
                # nobody writes there: it is readable when the last process that could has ended
                orphaned()
                return
