"""The worker: one process of `txbox run`."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from datetime import timedelta
from queue import Empty, SimpleQueue

from txbox.app import App, Consumption
from txbox.errors import ConfigurationError, SchemaError, StoreError
from txbox.events import WorkerStarted, WorkerStopped
from txbox.patience import CURABLE
from txbox.relay import Relays
from txbox.store import jobs
from txbox.worker import checks
from txbox.worker.background import Background
from txbox.worker.dispatch import Dispatch
from txbox.worker.driving import Driver, thread
from txbox.worker.endpoints import Endpoints
from txbox.worker.health import Health
from txbox.worker.lanes import Lanes
from txbox.worker.progress import StoredProgress
from txbox.worker.pump import Pump
from txbox.worker.signals import draining_on_signals

_log = logging.getLogger("txbox")

# the main thread comes round this often
_TICK_S = 0.1
# for the acknowledgements of what is settled, for the threads beside the lanes, for the connections
_CLOSE_S = 5.0
# a relay waits for the confirmations of what it has sent
_RELAY_S = 15.0
# something is broken: what still runs may end, but nobody waits for it as long as in a drain
_AFTER_CRASH_S = 10.0
# deliveries of one source: more would only be memory, and withheld from other workers
_IN_FLIGHT = 1000


class Worker:
    """Consumes the sources of an app and the rows of its table until it is stopped.

    Args:
        once: end when all sources are exhausted and nothing is due or leased for its consumers.
        install_signals: SIGTERM and SIGINT drain; a second one ends the process at once.
        maintenance: run rescue, prune and the other jobs in the background.
        relay: send what is staged in the outbox.
        grace: a drain that takes longer ends with status 1; None waits as long as a handler runs.
        consumptions: instead of those of the app.
        health: what is told how the worker is; the caller serves it.
        endpoints: the webhooks to serve, from the start of consumption to the drain.

    Guarantee: whatever ends it, what was not settled is delivered again, and what was leased and
    not started goes back to the table (after SIGKILL: when its lease has run out).
    """

    def __init__(
        self,
        app: App,
        *,
        once: bool = False,
        install_signals: bool = True,
        maintenance: bool = True,
        relay: bool = True,
        grace: timedelta | None = None,
        consumptions: Sequence[Consumption] | None = None,
        health: Health | None = None,
        endpoints: Endpoints | None = None,
    ) -> None:
        self._app = app
        self._once = once
        self._install_signals = install_signals
        self._maintenance = maintenance
        self._grace_s = None if grace is None else grace.total_seconds()
        self._consumptions = app.consumptions if consumptions is None else consumptions
        self._driver = Driver(app)
        self._health = health or Health()
        self._endpoints = endpoints
        self._stopping = threading.Event()
        self._relay = relay
        self._relays: Relays | None = None
        # reports from threads and signal handlers; SimpleQueue.put may be called inside of either
        self._reports: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._lanes = Lanes(app, stop=self._stopping.is_set)
        # those of lanes and endpoints that have not reported their end
        self._lanes_alive = 0
        # each is True until it has reported its end
        self._pumps: dict[Pump, bool] = {}
        self._background = Background(
            app,
            self._driver,
            self._lanes.tables,
            draining=self._stopping,
            ended=self._thread_ended,
            orphaned=self.stop,
        )
        self._consuming = False
        self._crash: BaseException | None = None
        #: What made `run` return 1 or 2.
        self.failure: BaseException | None = None

    # -- from outside -------------------------------------------------------------------------

    def run(self) -> int:
        """Work until stopped or, with `once`, until idle; returns the exit status.

        Returns: 0 drained or finished, 2 wrong configuration, schema or an unreachable database at
        the start, 1 anything that should not have happened.
        """
        with draining_on_signals(self._signalled) if self._install_signals else nullcontext():
            try:
                self._start()
                self._supervise()
            except (ConfigurationError, SchemaError, StoreError) as error:
                self._crash = self._crash or error
            finally:
                clean = self._shut_down()
        if self._consuming:
            self._app.events.emit(WorkerStopped(clean=clean and self._crash is None))
        self.failure = self._crash
        return self._status(clean)

    def stop(self) -> None:
        """Drain: receive nothing more, finish what runs, give the rest back. From any thread."""
        self._reports.put(self._drain)

    # -- start --------------------------------------------------------------------------------

    def _start(self) -> None:
        """Check everything that can be checked, then open the sources, then start the lanes."""
        topics = self._check()
        if self._relay:
            self._relays = Relays(
                self._app,
                self._driver.perform,
                stop=self._stopping.is_set,
                ended=self._thread_ended,
                delivered=self._lanes.look_now,
            )
        self._lanes.make()
        self._open_sources(topics)
        if self._crash is None:
            self._consume()

    def _check(self) -> list[Sequence[str]]:
        """Check what can be checked before sources are open; returns the topics to ask each for."""
        app = self._app
        checks.check_handlers(app)
        if self._endpoints is not None:
            self._endpoints.check(app.handlers.topics())
        checks.check_time_outs(app)
        for consumption in self._consumptions:
            checks.check_redelivery(app, consumption.source)
        topics = [checks.topics_of(app, consumption) for consumption in self._consumptions]
        for consumption, wanted in zip(self._consumptions, topics, strict=True):
            checks.check_order(app, consumption.source, wanted)
        checks.check_database(app, self._driver)
        return topics

    def _open_sources(self, topics: Sequence[Sequence[str]]) -> None:
        """Start a pump for each source, and wait until all are open or something has ended."""
        app = self._app
        dispatch = Dispatch(app, self._lanes.by_colour)
        for consumption, wanted in zip(self._consumptions, topics, strict=True):
            source = consumption.source
            pump = Pump(
                app, self._driver, source, dispatch,
                topics=wanted,
                progress=StoredProgress(app, self._driver, source.name),
                in_flight_max=_in_flight_max(app.batching.messages, len(self._lanes)),
                stop=self._stopping.is_set,
            )  # fmt: skip
            self._pumps[pump] = True
            self._health.pumps.append(pump)
            thread(f"txbox-{source.name}", pump.run, self._pump_ended(pump))
        for pump in self._pumps:
            while self._pumps[pump] and not pump.opened(_TICK_S):
                self._handle_reports(0.0)
        self._handle_reports(0.0)

    def _consume(self) -> None:
        """Start whatever takes messages or rows, and let the pumps go."""
        for consumption in self._consumptions:
            # some ask their broker what it is set to
            checks.check_redelivery(self._app, consumption.source)
        tables = self._lanes.tables
        self._app.events.emit(
            WorkerStarted(
                consumers=tuple(tables),
                sources=tuple(own.source.name for own in self._consumptions),
            )
        )
        self._consuming = True
        self._health.consuming(tables.values(), self._driver)
        self._lanes_alive = len(self._lanes)
        self._lanes.start(self._driver, thread_ended=self._lane_ended, task_ended=self._task_ended)
        if self._endpoints is not None:
            # requests are drained as lanes are
            self._lanes_alive += 1
            self._driver.task(self._endpoints.serve()).add_done_callback(self._task_ended)
        self._background.start(maintenance=self._maintenance)
        if self._relays is not None:
            self._relays.start()
        for pump in self._pumps:
            pump.go()

    # -- the main thread ----------------------------------------------------------------------

    def _supervise(self) -> None:
        """Come round until stopped, failed or, with `once`, idle."""
        while not self._stopping.is_set():
            self._handle_reports(_TICK_S)
            if self._crash is not None:
                return
            refusals = [own.refusal for own in self._pumps if own.refusal is not None]
            if self._once and refusals:
                raise ConfigurationError(refusals[0])
            if self._once and not any(self._pumps.values()) and not self._work_left():
                return

    def _handle_reports(self, wait_s: float) -> None:
        """Carry out what other threads and signals have reported; waits at most this long for the first."""
        self._health.beat()
        try:
            report = self._reports.get(timeout=wait_s) if wait_s else self._reports.get_nowait()
            while True:
                report()
                report = self._reports.get_nowait()
        except Empty:
            pass

    def _work_left(self) -> bool:
        """Say whether rows of the outbox or of these consumers are due or leased."""
        try:
            with self._health.asking_the_database():
                # the outbox first: what it holds may be rows of these tables a moment later
                return (self._relays is not None and self._relays.left()) or any(
                    self._driver.perform(
                        jobs.work_left(
                            self._app.store.dialect,
                            consumer=consumer,
                            order=self._app.handlers.order_of(consumer),
                        )
                    )
                    for consumer in self._lanes.tables
                )
        except StoreError as error:
            if error.fault not in CURABLE:
                raise
            # away: whatever is left there, this is no time to say that nothing is
            return True

    def _drain(self) -> None:
        self._stopping.set()
        self._health.draining()
        if self._endpoints is not None:
            self._endpoints.stop()
        self._lanes.wake()

    def _shut_down(self) -> bool:
        """Let lanes finish, settle, give rows back, close; returns whether all of it ended in time."""
        self._drain()
        grace_s = self._grace_s
        if self._crash is not None:
            grace_s = min(_AFTER_CRASH_S, _AFTER_CRASH_S if grace_s is None else grace_s)
        clean = self._wait_until(lambda: self._lanes_alive == 0, grace_s)
        for pump in self._pumps:
            pump.finish()
        clean = self._wait_until(lambda: not any(self._pumps.values()), _CLOSE_S) and clean
        self._background.end()
        self._health.closing()
        if self._relays is not None:
            # a drain that has used up its grace does not wait once more
            clean = self._relays.join(_RELAY_S if clean else _TICK_S) and clean
        self._background.join(_CLOSE_S)
        self._close()
        return clean

    def _wait_until(self, done: Callable[[], bool], for_s: float | None) -> bool:
        """Handle reports until it is done; returns False when that has taken longer than `for_s`."""
        deadline = None if for_s is None else time.monotonic() + for_s
        self._handle_reports(0.0)
        while not done():
            if deadline is not None and time.monotonic() >= deadline:
                return False
            self._handle_reports(_TICK_S)
        return True

    def _close(self) -> None:
        """Give leased rows back and close; a database that is away must not keep the worker alive."""
        try:
            for table in self._lanes.tables.values():
                self._driver.perform(table.give_back())
        except StoreError as error:
            _log.warning(
                "Leased rows could not be given back (%s): they are rescued when their lease runs out.",
                error,
            )
        try:
            self._driver.close(_CLOSE_S)
        except (StoreError, TimeoutError) as error:
            _log.warning("Connections did not close cleanly: %s", error)

    def _status(self, clean: bool) -> int:
        """Say how it ended: in the log, and as the exit status."""
        if self._crash is None:
            if not clean:
                _log.error(
                    "The drain did not end within its grace; what was running is redelivered."
                )
            return 0 if clean else 1
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
        self._health.draining()
        self._reports.put(self._drain)

    def _failed(self, error: BaseException | None) -> None:
        """The first error ends the worker; those that follow from it are not told."""
        if error is not None and self._crash is None:
            self._crash = error
            self._health.failed(error)
            self._drain()

    def _lane_ended(self, error: BaseException | None) -> None:
        def report() -> None:
            self._lanes_alive -= 1
            self._failed(error)

        self._reports.put(report)

    def _task_ended(self, task: Future[None]) -> None:
        self._lane_ended(task.exception() if not task.cancelled() else RuntimeError("cancelled"))

    def _pump_ended(self, pump: Pump) -> Callable[[BaseException | None], None]:
        def report(error: BaseException | None) -> None:
            def ended() -> None:
                self._pumps[pump] = False
                self._failed(error)

            self._reports.put(ended)

        return report

    def _thread_ended(self, error: BaseException | None) -> None:
        self._reports.put(lambda: self._failed(error))


def _in_flight_max(batch: int, lanes: int) -> int:
    """Three batches for each lane: one commits, one is claimed behind it, one waits; hardly more than a thousand."""
    return max(3 * batch, 3 * lanes, min(3 * batch * lanes, _IN_FLIGHT))


def run(
    app: App,
    *,
    once: bool = False,
    maintenance: bool = True,
    relay: bool = True,
    grace: timedelta | None = None,
    consumptions: Sequence[Consumption] | None = None,
    health: Health | None = None,
    endpoints: Endpoints | None = None,
) -> int:
    """Run a worker in this process, with its signal handlers; returns the exit status of `Worker.run`.

    Several processes: `supervise`.
    """
    return Worker(
        app,
        once=once,
        maintenance=maintenance,
        relay=relay,
        grace=grace,
        consumptions=consumptions,
        health=health,
        endpoints=endpoints,
    ).run()
