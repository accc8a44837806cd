"""How a worker is: alive, ready."""

from __future__ import annotations

import threading
import time
from collections.abc import Generator, Iterable
from contextlib import contextmanager

from txbox.events import ConsumptionPaused, ConsumptionResumed, Event
from txbox.worker.driving import Driver
from txbox.worker.pump import Pump
from txbox.worker.table import Table

#: A loop that has not come round for this long is stuck.
STUCK_S = 60.0
_SILENT_S = 30.0
# the next try says so again; until then a pause is believed this much longer
_STILL_AWAY_S = 15.0


class Health:
    """What a worker and its events tell of it; an observer, and read from any thread.

    Args:
        stuck_s: a main thread or asyncio loop that has not come round for this long is not alive.

    Guarantee: a database or a broker that is away never makes a worker lifeless, only unready.
    """

    def __init__(self, *, stuck_s: float = STUCK_S) -> None:
        #: The pumps of all sources, whether their source is open yet or not.
        self.pumps: list[Pump] = []
        #: The tables of all consumers, once it consumes.
        self.tables: list[Table] = []
        self._stuck_s = stuck_s
        self._lock = threading.Lock()
        self._driver: Driver | None = None
        # None: the main thread is where it may stay
        self._beat_at: float | None = None
        self._judged = False
        self._draining = False
        self._failure: BaseException | None = None
        self._away_until = 0.0
        self._pinged_at: float | None = None

    def __call__(self, event: Event) -> None:
        # the pump itself knows of its source
        if isinstance(event, ConsumptionPaused) and event.source is None:
            self._away_until = time.monotonic() + event.retry_in_s + _STILL_AWAY_S
        elif isinstance(event, ConsumptionResumed) and event.source is None:
            self._away_until = 0.0

    # -- told by the worker -------------------------------------------------------------------

    def consuming(self, tables: Iterable[Table], driver: Driver | None) -> None:
        """Sources are open, the schema fits: from here on, loops must come round."""
        self.tables = list(tables)
        self._driver = driver
        self.beat()
        self._judged = True

    def beat(self) -> None:
        """The main loop has come round."""
        self._beat_at = time.monotonic()

    @contextmanager
    def asking_the_database(self) -> Generator[None]:
        """The main thread waits for the database, which may be away for long."""
        self._beat_at = None
        try:
            yield
        finally:
            self.beat()

    def draining(self) -> None:
        self._draining = True

    def failed(self, error: BaseException) -> None:
        """A thread has died; the worker ends."""
        self._failure = error

    def closing(self) -> None:
        """Everything has ended; what is left waits for the database, for a bounded time."""
        self._judged = False

    # -- asked by whoever looks ---------------------------------------------------------------

    def stuck(self) -> list[str]:
        """Why the worker is not alive: a thread has died, or a loop does not come round."""
        why: list[str] = []
        if self._failure is not None:
            why.append(f"the worker ends after {type(self._failure).__name__}")
        if not self._judged:
            return why
        now = time.monotonic()
        beat_at = self._beat_at
        if beat_at is not None and now - beat_at > self._stuck_s:
            why.append(f"the main thread has been stuck for {now - beat_at:.0f} s")
        loop_s = self._loop_silent_s(now)
        if loop_s > self._stuck_s:
            why.append(f"the asyncio loop has been blocked for {loop_s:.0f} s")
        return why

    def unready(self) -> list[str]:
        """Why the worker does not consume."""
        why = self.stuck()
        if self._draining:
            return [*why, "draining"]
        if not self._judged:
            waiting = [pump.name for pump in self.pumps if not pump.opened(0)]
            return [*why, *(f"{name} is not open yet" for name in waiting)] or ["starting"]
        if time.monotonic() < self._away_until:
            why.append("the database does not answer")
        for pump in self.pumps:
            if pump.refusal is not None:
                why.append(f"{pump.name} is paused: its messages have no ids")
            elif pump.paused:
                why.append(f"{pump.name} does not answer")
            elif pump.silent_s > _SILENT_S:
                why.append(f"{pump.name} has been silent for {pump.silent_s:.0f} s")
        return why

    def _loop_silent_s(self, now: float) -> float:
        """How long a call has been waiting for the loop; each look sends one, unless one waits."""
        with self._lock:
            if self._pinged_at is not None:
                return now - self._pinged_at
            # before the call is sent: its answer may be faster than the next line
            self._pinged_at = now
            if self._driver is None or not self._driver.ping(self._ponged):
                self._pinged_at = None
            return 0.0

    def _ponged(self) -> None:
        # without the lock: the looker that holds it may be sending the call that this answers
        self._pinged_at = None
