"""What the parts of a worker share, and when each of them looks for work: one thread, for all of them."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Callable
from typing import Protocol

from txbox.app import OUTBOX, App
from txbox.boundaries import Boundary
from txbox.errors import Fault, StoreError
from txbox.policy import Backoff
from txbox.store import leases
from txbox.worker.driving import Driver

_BUSY_S = 0.05
_IDLE_S = 2.5
# a pause is then about a quarter of the time since something happened
_GROWTH = 1.25
# a row that is due by the database's clock must be so when it is leased
_MARGIN_S = 0.005


class Part(Protocol):
    """What takes rows from the database: the table of a consumer, or all relays."""

    def look(self) -> None:
        """Look for rows now: some are there."""

    def expect(self) -> None:
        """Look for rows now, and again soon: some come with a transaction that has not ended yet."""

    def due(self) -> None:
        """Look for rows, unless none could be leased a moment ago: the database says that some are due."""


class Agenda:
    """Has the parts of a worker look for work: when one of them or somebody else asks for it, and when the database
    says that rows are due.

    One query asks for all consumers and the outbox what is due, and when the next row is. It is sent often after
    `poll_soon`, and then less and less often: at least every 2.5 s, or as `RelayPolicy.poll` says.
    """

    def __init__(self, run: Run) -> None:
        self._app = run.app
        self._driver = run.driver
        self._stop = run.stopping.is_set
        #: By consumer; OUTBOX for the relays. Complete before `run`.
        self.parts: dict[str, Part] = {}
        self._changed = threading.Condition()
        self._at: dict[Callable[[], None], float] = {}
        self._wakes_at = math.inf
        self._backoff = Backoff(_BUSY_S, _IDLE_S)
        self._polled_at = self._poll_at = 0.0
        # since when, by the last answer, the first row has been due
        self._late_since: dict[str, float] = {}

    def look(self, name: str | Callable[[], None], in_s: float = 0.0) -> None:
        """Look for work in so many seconds; of several times the earliest counts. From any thread.

        Args:
            name: a consumer, or OUTBOX; one that this worker does not have is ignored. Or what is to be called.
            in_s: 0 is now, in the caller's thread.
        """
        if isinstance(name, str):
            part = self.parts.get(name)
            if part is None:
                return
            call = part.expect if in_s > 0 else part.look
        else:
            call = name
        if in_s <= 0:
            call()
            return
        with self._changed:
            self._schedule(call, time.monotonic() + in_s)

    def poll_soon(self) -> None:
        """Rows may become due before the next query: send it soon, and often for a while. From any thread."""
        with self._changed:
            self._backoff.reset()
            # not more often than that, however much happens
            poll_at = max(time.monotonic(), self._polled_at + _BUSY_S)
            if poll_at < self._poll_at:
                self._poll_at = poll_at
                self._changed.notify()

    @property
    def polls_outbox(self) -> bool:
        """Whether the query also asks for the outbox: it takes a consumer, and a relay alone may not read the inbox."""
        return OUTBOX in self.parts and len(self.parts) > 1

    def late(self) -> dict[str, float]:
        """For how many seconds the first due row of each consumer, and of the outbox, has been due."""
        now = time.monotonic()
        return {name: now - since for name, since in self._late_since.items()}

    def end(self) -> None:
        """Have the thread see that the worker has stopped."""
        with self._changed:
            self._changed.notify()

    # -- the thread ---------------------------------------------------------------------------

    def run(self) -> None:
        """Call parts and poll, until stopped."""
        relaying = OUTBOX in self.parts
        idle_s = min(_IDLE_S, self._app.relaying.poll.total_seconds()) if relaying else _IDLE_S
        self._backoff = Backoff(_BUSY_S, idle_s, factor=_GROWTH, spread=(0.9, 1.0))
        consumers = [name for name in self.parts if name != OUTBOX]
        routes = self._app.routes.all() if relaying else []
        local = next((route.name for route in routes if route.destination is None), None)
        # and what was staged without one
        names = [*(route.name for route in routes), ""] if routes else []
        while not self._stop():
            try:
                for call in self._next():
                    self._do(call)
                if time.monotonic() >= self._poll_at and not self._stop():
                    self._poll(consumers, names, local)
            except Exception as error:  # noqa: BLE001  # see contain
                retry_in_s = max(0.0, self._poll_at - time.monotonic())
                self._app.protocol.contain(Boundary.POLL, error, retry_in_s=retry_in_s)

    def _do(self, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:  # noqa: BLE001  # see contain
            self._app.protocol.contain(Boundary.POLL, error, retry_in_s=_IDLE_S)
            # a lane that is not woken would keep its deliveries for ever
            self.look(call, _IDLE_S)

    def _schedule(self, call: Callable[[], None], at: float) -> None:
        if at < self._at.get(call, math.inf):
            self._at[call] = at
            if at < self._wakes_at:
                self._changed.notify()

    def _next(self) -> list[Callable[[], None]]:
        """Wait until it is time to call a part, or to poll; returns what to call."""
        with self._changed:
            now = time.monotonic()
            self._wakes_at = min(self._poll_at, *self._at.values()) if self._at else self._poll_at
            if self._wakes_at > now and not self._stop():
                self._changed.wait(self._wakes_at - now)
                now = time.monotonic()
            # until the next wait, changes are seen without a notification
            self._wakes_at = 0.0
            calls = [call for call, at in self._at.items() if at <= now]
            for call in calls:
                del self._at[call]
            return calls

    def _poll(self, consumers: list[str], routes: list[str], local: str | None) -> None:
        with self._changed:
            pause_s = self._backoff.next_s()
            # before the answer comes: `poll_soon` may be called meanwhile
            self._polled_at = time.monotonic()
            self._poll_at = self._polled_at + pause_s
        app = self._app
        try:
            answer = self._driver.perform(
                app.protocol.with_retries,
                lambda db: leases.due(
                    db,
                    app.store.dialect,
                    consumers,
                    ahead_s=pause_s + _BUSY_S,
                    routes=routes,
                    local=local,
                ),
                stop=self._stop,
            )
        except StoreError as error:
            if self._stop() and error.transient:
                return
            if error.fault is Fault.SCHEMA:
                # raises with the command to run, if that is it
                self._driver.perform(app.protocol.check_schema)
            raise
        self._plan(answer)

    def _plan(self, answer: list[tuple[str, float]]) -> None:
        now = time.monotonic()
        self._late_since = {name: now + in_s for name, in_s in answer if in_s <= 0}
        for name, in_s in answer:
            part = self.parts.get(name)
            if part is None:
                continue
            if in_s <= 0:
                part.due()
            else:
                with self._changed:
                    self._schedule(part.due, now + in_s + _MARGIN_S)


class Run:
    """What all parts of a worker share, from its start to its end.

    Args:
        ended: called by each thread with what ended it; None for a normal end.
        loop: see `Driver`.

    Attributes:
        stopping: set when nothing more is to be started.
        worked: set once a source has been received from. What a broker refuses from then on is waited for, as somebody
            may be repairing it; until then it ends the worker.
        suspects: of the rows that may kill the process, it runs one at a time.
    """

    def __init__(
        self,
        app: App,
        ended: Callable[[BaseException | None], None],
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        self.app = app
        self.ended = ended
        self.driver = Driver(app, loop)
        self.stopping, self.worked = threading.Event(), threading.Event()
        self.suspects = threading.Lock()
        self.agenda = Agenda(self)
