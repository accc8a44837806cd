"""Liveness and readiness of a worker."""

from __future__ import annotations

import threading
import time
from collections.abc import Generator, Iterable
from contextlib import contextmanager

from txbox.app import App
from txbox.events import ConsumptionPaused, ConsumptionResumed, Event
from txbox.worker.driving import Driver
from txbox.worker.pump import Pump
from txbox.worker.relay import Relays
from txbox.worker.table import Table

#: A loop that has not come round for this long is stuck.
STUCK_S = 60.0
_SILENT_S = 30.0
# the next try says so again; until then a pause is believed this much longer
_STILL_AWAY_S = 15.0
#: A statement of txbox that is out for so long is one that the database does not answer.
UNANSWERED_S = 15.0
# a claim may wait for the lock of another transaction: until it gives up, that is no silence
_BEHIND_LOCK_S = 5.0


class Answers:
    """Tells when the database leaves a statement without an answer, its connection open, and when it answers again."""

    def __init__(self, app: App) -> None:
        self._database = app.database
        self._emit = app.events.emit
        lock_s = app.limits.lock_timeout.total_seconds()
        self._longest_s = max(UNANSWERED_S, lock_s + _BEHIND_LOCK_S)
        self._silent_at: float | None = None

    def missing(self) -> bool:
        """Whether a statement has been without an answer for too long."""
        return self._database.waited_s() > self._longest_s

    def check(self) -> None:
        """Emit an event if the database has become silent, or answers again."""
        silent = self.missing()
        if silent and self._silent_at is None:
            self._silent_at = time.monotonic() - self._longest_s
            reason = (
                f"{self._database.name} has left a statement without an answer for {self._longest_s:g} s, "
                "with the connection open."
            )
            self._emit(ConsumptionPaused(reason=reason, retry_in_s=0.0))
        elif self._silent_at is not None and not silent:
            paused_s, self._silent_at = time.monotonic() - self._silent_at, None
            self._emit(ConsumptionResumed(paused_s=paused_s))


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
        self.relays: Relays | None = None
        self._stuck_s = stuck_s
        self._lock = threading.Lock()
        self._driver: Driver | None = None
        self._answers: Answers | None = None
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

    # -- called by the worker -----------------------------------------------------------------

    def consuming(
        self, tables: Iterable[Table], driver: Driver | None, answers: Answers | None = None
    ) -> None:
        """Sources are open, the schema fits: from here on, loops must come round, and the database answer."""
        self.tables = list(tables)
        self._answers = answers
        self._driver = driver
        self.beat()
        self._judged = True

    def beat(self) -> None:
        """The main loop has come round."""
        self._beat_at = time.monotonic()
        if self._answers is not None:
            self._answers.check()

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
        """Everything has ended; closing waits for the database, for a bounded time."""
        self._judged = False

    # -- read by probes ----------------------------------------------------------------------

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
        unanswered = self._answers is not None and self._answers.missing()
        if unanswered or time.monotonic() < self._away_until:
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
        """How long a call has been waiting for the loop; each check sends one, unless one waits."""
        with self._lock:
            if self._pinged_at is not None:
                return now - self._pinged_at
            # before the call is sent: its answer may be faster than the next line
            self._pinged_at = now
            if self._driver is None or not self._driver.ping(self._ponged):
                self._pinged_at = None
            return 0.0

    def _ponged(self) -> None:
        # without the lock: the thread that has it may be sending the call that this answers
        self._pinged_at = None
