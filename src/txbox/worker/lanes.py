"""The lanes of all consumers, the tables they take rows from, and the choice of a lane for each delivery."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing
from typing import Any
from zlib import crc32

from txbox.boundaries import Boundary, is_contents
from txbox.brokers.base import Delivery
from txbox.handlers import Handler
from txbox.identity import EFFECT_PREFIX
from txbox.message import Message
from txbox.session import Connection, Connections, blocking
from txbox.worker.agenda import Run
from txbox.worker.lane import Acknowledge, HandlerModes, Lane, LaneSession, Parts, Turns, Work
from txbox.worker.table import Table

_MATCHES_MAX = 4096
# connections of a worker, unless a handler has more lanes
_CONNECTIONS = 16
# threads for lanes whose handlers work outside a transaction
_THREADS_OUTSIDE = 200
# an idle thread ends after this long
_IDLE_S = 10.0


class ConnectionSlots:
    """Bounds how many of a worker's lanes have a connection at a time; the others wait in line."""

    def __init__(self, count: int) -> None:
        self._free = count
        self._lock = threading.Lock()
        self._waiting: deque[Future[None]] = deque()

    def take(self) -> Future[None] | None:
        """Take a slot; if none is free, returns a future that is done when the caller has one."""
        with self._lock:
            if self._free:
                self._free -= 1
                return None
            waiting: Future[None] = Future()
            self._waiting.append(waiting)
            return waiting

    def give(self) -> None:
        """Give a slot back, to whoever has waited longest."""
        with self._lock:
            while self._waiting:
                waiting = self._waiting.popleft()
                if waiting.set_running_or_notify_cancel():
                    waiting.set_result(None)
                    return
            self._free += 1


class Slot:
    """The connections of one turn: one at a time, each of which needs a slot.

    A turn that waits for a slot holds no connection, and the worker's other tasks (heartbeats, polls, relays) need no
    slot, so nobody waits for a connection while holding one. When a connection is dropped, the slot is kept until the
    next one, or until `leave`.
    """

    def __init__(self, connections: Connections, slots: ConnectionSlots) -> None:
        self.is_async = connections.is_async
        self.idle_limit = connections.idle_limit
        self.waits = connections.waits
        self.distrust = connections.distrust
        self._connections = connections
        self._slots = slots
        self._has_slot = False

    async def acquire(self) -> Connection:
        if not self._has_slot:
            if (waiting := self._slots.take()) is not None:
                await self._slot_free(waiting)
            self._has_slot = True
        try:
            return await self._connections.acquire()
        except BaseException:
            # others may use it during the pause before the next try
            self.leave()
            raise

    async def _slot_free(self, waiting: Future[None]) -> None:
        if not self.is_async:
            waiting.result()
            return
        try:
            await asyncio.wrap_future(waiting)
        except asyncio.CancelledError:
            if not waiting.cancelled():
                self._slots.give()
            raise

    async def release(self, connection: Any) -> None:
        await self._connections.release(connection)
        self.leave()

    def leave(self) -> None:
        """Give the slot back, if it has one."""
        if self._has_slot:
            self._has_slot = False
            self._slots.give()


class Threads:
    """Threads that run the turns of lanes; started when needed, ended when idle.

    Args:
        most: the number of threads, at most.
    """

    is_async = False

    def __init__(self, lanes: Lanes, most: int) -> None:
        self._lanes = lanes
        self._most = most
        self._changed = threading.Condition()
        self._ready: deque[Lane] = deque()
        self._count = self._spare = 0

    def begin(self, lane: Lane) -> None:
        """See `Turns.begin`."""
        self._lanes.begin()
        self._put(lane)

    def _put(self, lane: Lane) -> None:
        with self._changed:
            self._ready.append(lane)
            if self._spare >= len(self._ready) or self._count >= self._most:
                self._changed.notify()
                return
            self._count += 1
        threading.Thread(target=self._run, name="txbox-lane", daemon=True).start()

    def crowded(self) -> bool:
        """See `Turns.crowded`."""
        return bool(self._ready)

    def _run(self) -> None:
        while (lane := self._next()) is not None:
            threading.current_thread().name = lane.name
            if self._lanes.turn(lane):
                self._put(lane)

    def _next(self) -> Lane | None:
        with self._changed:
            ends_at = time.monotonic() + _IDLE_S
            while not self._ready:
                self._spare += 1
                self._changed.wait(ends_at - time.monotonic())
                self._spare -= 1
                if not self._ready and time.monotonic() >= ends_at:
                    self._count -= 1
                    return None
            return self._ready.popleft()


class OnLoop:
    """The turns of lanes with async handlers: a task for each."""

    is_async = True

    def __init__(self, lanes: Lanes) -> None:
        self._lanes = lanes

    def begin(self, lane: Lane) -> None:
        """See `Turns.begin`."""
        self._lanes.begin()
        self._lanes.start_on_loop(lane)

    def crowded(self) -> bool:
        """See `Turns.crowded`."""
        return False


#: A handler, as its deliveries are processed, and its lanes.
_Route = tuple[HandlerModes, tuple[Lane, ...]]


class Matches(dict[tuple[str, str | None], list[_Route]]):
    """For each topic and type of what one source delivers, the handlers that take it; none if it does not ask for it.

    Args:
        topics: those that the source is to deliver.
        modes: of every handler.
    """

    def __init__(self, topics: Sequence[str], modes: Mapping[Handler, _Route]) -> None:
        super().__init__()
        self._topics = frozenset(topics)
        self._modes = modes

    def asks_for(self, topic: str) -> bool:
        """Whether the source is to deliver this topic; "*" is every topic but those of effects."""
        return topic in self._topics or (
            "*" in self._topics and not topic.startswith(EFFECT_PREFIX)
        )

    def reaches(self, handler: Handler) -> bool:
        """Whether what the source delivers may be for this handler."""
        return handler.topic == "*" or self.asks_for(handler.topic)

    def __missing__(self, described: tuple[str, str | None]) -> list[_Route]:
        topic, kind = described
        if len(self) > _MATCHES_MAX:
            # types come from outside, so the cache must be bounded
            self.clear()
        self[described] = routes = [
            route
            for handler, route in self._modes.items()
            if self.asks_for(topic) and handler.matches(topic, kind)
        ]
        return routes


class Lanes:
    """For each consumer a table, with lanes for its sync handlers and lanes for its async ones.

    Deliveries are handed to lanes by the lock key or key if there is one, else round robin.

    Idle lanes have no thread and send no queries; busy ones share threads and connections.

    `Run.ended` is called with the error that ended a turn and, once stopped, after every turn.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._app = run.app
        self._stop = run.stopping.is_set
        self._lock = threading.Lock()
        self._busy = 0
        #: How many turns have begun.
        self.begun = 0
        #: Called when a lane has come to rest, in the thread that ran it.
        self.rested: list[Callable[[], None]] = []
        #: By consumer.
        self.tables: dict[str, Table] = {}
        #: By consumer, and whether they run async handlers.
        self.by_consumer: dict[tuple[str, bool], list[Lane]] = {}
        # one for each handler: a batch ends where the next message has another
        self._modes: dict[Handler, _Route] = {}
        self._handed = 0

    def __len__(self) -> int:
        return sum(len(lanes) for lanes in self.by_consumer.values())

    def make(self) -> None:
        """Make lanes for the handlers registered so far."""
        wanted = [
            handler.options.concurrency
            for handler in self._app.handlers
            if handler.options.transactional
        ]
        count = self._app.limits.connections or max([_CONNECTIONS, *wanted])
        self._slots = ConnectionSlots(count)
        # more threads than connections would only wait; handlers outside a transaction need none
        threads = (Threads(self, count), Threads(self, _THREADS_OUTSIDE))
        on_loop = OnLoop(self)
        for consumer, handlers in self._app.handlers.consumers().items():
            self.tables[consumer] = table = Table(self._run, consumer)
            self._run.agenda.parts[consumer] = table
            for is_async in sorted({handler.is_async for handler in handlers}):
                alike = [handler for handler in handlers if handler.is_async == is_async]
                beside = not all(handler.options.transactional for handler in alike)
                turns: Turns = on_loop if is_async else threads[beside]
                most = max(handler.options.concurrency for handler in alike)
                lanes = [Lane(self._run, table, turns, index) for index in range(most)]
                self.by_consumer[consumer, is_async] = lanes
                table.wakes += [lane.wake for lane in lanes]
                for handler in alike:
                    of_handler = tuple(lanes[: handler.options.concurrency])
                    self._modes[handler] = HandlerModes(handler), of_handler

    @property
    def busy(self) -> int:
        """The number of lanes with a turn; errors of ended turns have been reported."""
        return self._busy

    def start_on_loop(self, lane: Lane) -> None:
        """Run a lane with async handlers until it rests."""
        self._run.driver.task(self._turn_async(lane)).add_done_callback(self._task_ended)

    def turn_here(self, lane: Lane) -> None:
        """Run a lane with sync handlers in the caller's thread until it rests; reports errors, and raises none."""
        self.begin()
        thread = threading.current_thread()
        name, thread.name = thread.name, lane.name
        while self.turn(lane):
            pass
        thread.name = name

    def begin(self) -> None:
        """Count a lane that begins its turns; `turn` counts its end."""
        with self._lock:
            self._busy += 1
            self.begun += 1

    def turn(self, lane: Lane) -> bool:
        """Run one turn in this thread; returns whether the lane wants another."""
        connections = self._app.database.sync
        assert connections is not None, "checked at start"
        slot = Slot(connections, self._slots)
        error: BaseException | None = None
        again = False
        try:
            with closing(LaneSession(slot)) as db:
                again = blocking(lane.turn(db))
        except BaseException as raised:  # noqa: BLE001  # reported: the worker decides what happens
            error = raised
        finally:
            slot.leave()
        if not again:
            self._report(error)
        return again

    async def _turn_async(self, lane: Lane) -> None:
        connections = self._app.database.asynchronous
        assert connections is not None, "checked at start"
        slot = Slot(connections, self._slots)
        try:
            with closing(LaneSession(slot)) as db:
                await lane.turn(db)
        finally:
            slot.leave()

    def _task_ended(self, task: Future[None]) -> None:
        self._report(task.exception() if not task.cancelled() else RuntimeError("cancelled"))

    def _report(self, error: BaseException | None) -> None:
        if error is not None:
            self._run.ended(error)
        with self._lock:
            self._busy -= 1
        for call in self.rested:
            call()
        if self._stop():
            # the main thread waits for the last
            self._run.ended(None)

    # -- deliveries ---------------------------------------------------------------------------

    def has_idle_lane(self) -> bool:
        """Whether some lane is idle."""
        return any(not lane.busy for lanes in self.by_consumer.values() for lane in lanes)

    def matches(self, topics: Sequence[str]) -> Matches:
        """Return which handlers take what a source delivers that is to deliver these topics."""
        return Matches(topics, self._modes)

    def hand_out(
        self, deliveries: Sequence[Delivery], matches: Matches, acknowledge: Acknowledge
    ) -> tuple[list[Delivery], Lane | None]:
        """Hand deliveries out in order, all of a lane's at once.

        Args:
            matches: of their source.

        Returns: the deliveries that no handler consumes; and one of the lanes that were idle, for the caller to run
            (`turn_here`) or wake. The others run already.
        """
        handed: dict[Lane, list[Work]] = {}
        unmatched: list[Delivery] = []
        here: Lane | None = None
        for delivery in deliveries:
            message = delivery.message
            if message is None:
                unmatched.append(delivery)
                continue
            try:
                routes = matches[message.topic, message.type]
                if not routes:
                    unmatched.append(delivery)
                    continue
                parts = Parts(len(routes)) if len(routes) > 1 else None
                self._handed += 1
                for modes, lanes in routes:
                    work = Work(acknowledge, delivery, message, modes, parts)
                    if modes.in_order:
                        work.key = message.key
                        # what cannot be looked up would stop the lane
                        hash(work.key)
                    elif modes.lock_key:
                        work.lock_key = modes.handler.lock_key(message)
                    lane = lanes[0] if len(lanes) == 1 else self._lane(work, lanes, message)
                    group = handed.get(lane)
                    if group is None:
                        handed[lane] = [work]
                    else:
                        group.append(work)
            except Exception as error:
                if not is_contents(error):
                    raise
                for group in handed.values():
                    group[:] = [work for work in group if work.delivery is not delivery]
                why = f"{type(error).__name__} (boundary: {Boundary.DISPATCH})"
                delivery.problem = f"The message cannot be handed out: {why}."
                unmatched.append(delivery)
        for lane, works in handed.items():
            if not works:
                continue
            self._app.activity.received(works[0].modes.handler.consumer, len(works))
            if not lane.put(works):
                continue
            if here is None and not lane.is_async:
                here = lane
            else:
                lane.run()
        return unmatched, here

    def _lane(self, work: Work, lanes: Sequence[Lane], message: Message[Any]) -> Lane:
        key = work.lock_key if work.lock_key is not None else message.key
        if key is None:
            return lanes[self._handed % len(lanes)]
        return lanes[crc32(str(key).encode("utf-8", "surrogatepass")) % len(lanes)]
