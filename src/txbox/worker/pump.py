"""A pump: receives from a source, hands out and settles, in one thread at a time."""

from __future__ import annotations

import secrets
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any

from txbox import session
from txbox.boundaries import Boundary, ends_worker
from txbox.boundaries import log as _log
from txbox.brokers.base import Anchor, Consumer, Delivery, Source
from txbox.errors import (
    BrokerError,
    BrokerUnavailable,
    ConfigurationError,
    Fault,
    StoreError,
    TxboxError,
    UnusableMessage,
)
from txbox.events import (
    ConsumptionPaused,
    ConsumptionResumed,
    Event,
    SettleFailed,
    SourceRefused,
)
from txbox.handlers import Handler
from txbox.identity import canonical_id
from txbox.message import Message
from txbox.policy import Backoff
from txbox.processing.intake import presentable
from txbox.session import Session
from txbox.store import jobs
from txbox.store.activity import Trouble
from txbox.store.jobs import JobLease, Saved
from txbox.worker.agenda import Run
from txbox.worker.driving import trouble_of
from txbox.worker.lane import Lane
from txbox.worker.lanes import Lanes

_WAIT_S = 0.5
# how often the source is polled, at first and at last, while deliveries in flight are waited for
_LOOK_S = (0.0005, 0.02)
# at least this long while every lane is busy: a poll takes time from them, and a settlement ends the wait anyway
_BUSY_LOOK_S = 0.005
_PAUSE_S = (0.1, 5.0)
# a follower that has looked so often in vain sleeps until it is woken; until then nobody spends time on waking it
_LOOKS = 10
# a source whose first messages, so many, all lack an id is set up wrongly (promise 1.3)
_FIRST = 100
# deliveries of one source: more would only be memory, and withheld from other workers
_IN_FLIGHT = 1000
# of a source that only one process may read: short, because whoever takes over waits this long; too short only costs
# reading again
_LEASE_S = 3.0


class Pump:
    """Receives from one source, hands deliveries to lanes, and acknowledges what they have settled.

    Args:
        name: of the source in events and gauges.
        topics: those that the source is to deliver.

    Unsettled deliveries are bounded: three batches for each lane (one commits, one is claimed behind it, one waits),
    about a thousand at most. Their bytes are bounded by twice `Batching.payload_bytes`, plus at most what one `receive`
    returns.

    Guarantee: a delivery is acknowledged only after every consumer has settled its part. Nothing is received while
    the bound is reached, so a database that is away stops the source.
    """

    #: What is open of the source, once `opened`.
    consumer: Consumer

    def __init__(
        self,
        run: Run,
        lanes: Lanes,
        source: Source,
        *,
        name: str,
        topics: Sequence[str],
    ) -> None:
        app = run.app
        self._source = source
        self.name = name
        self._worked = run.worked
        #: See `Context`.
        self.progress = StoredProgress(run, source.name)
        self._app = app
        self._driver = run.driver
        self._lanes = lanes
        self._topics = topics
        self._matches = lanes.matches(topics)
        batch, count = app.batching.messages, len(lanes)
        self._in_flight_max = max(3 * batch, 3 * count, min(3 * batch * count, _IN_FLIGHT))
        self._bytes_max = 2 * app.batching.payload_bytes
        self._stop = run.stopping.is_set
        # with its size in bytes
        self._in_flight: dict[Delivery, int] = {}
        self._bytes = 0
        self._tend_at = 0.0
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._settled: list[Delivery] = []
        # what could not be set aside, and when it is tried again
        self._aside: deque[tuple[float, Delivery]] = deque()
        self._looks = Backoff(*_LOOK_S)
        self._look_s = self._looks.next_s()
        self._mean_bytes = 0.0
        self._finish = False
        self._go = threading.Event()
        self._opened = threading.Event()
        self._paused_at: float | None = None
        # while it does not receive, or cannot store what no lane takes
        self._backoff: Backoff | None = None
        #: Why nothing is received, and since when.
        self.trouble: Trouble | None = None
        self._ids = FirstIds(name)
        #: Why nothing more is received or settled, until the configuration changes.
        self.refusal: str | None = None
        self._round_at: float | None = None
        self._lead = Lead()
        lanes.rested.append(self._lead.hurry)

    def start(self, ended: Callable[[BaseException | None], None]) -> None:
        """Open the source in a thread of its own; pump, from `go` on, until it is exhausted or is to finish.

        Args:
            ended: called once the source is closed, with the error if there was one.
        """
        self._ended = ended
        self._thread(self._open)

    def _thread(self, work: Callable[[], None]) -> None:
        threading.Thread(target=work, name=f"txbox-{self.name}", daemon=True).start()

    def _open(self) -> None:
        try:
            self.consumer = self._source.consumer(self._topics, self)
        except BaseException as error:  # noqa: BLE001  # reported: the worker decides what happens
            self._lead.end()
            self._ended(error)
            return
        try:
            self._opened.set()
            self._go.wait()
            self._thread(self._run)
        except BaseException as error:  # noqa: BLE001  # reported: the worker decides what happens
            self._end(error)
        else:
            self._run(leads=True)

    def _run(self, *, leads: bool = False) -> None:
        """Lead and follow by turns; whoever leads at the end closes the source, and the other one just ends."""
        try:
            while leads or self._lead.follow():
                lane = self._pump()
                if lane is None:
                    self._end(None)
                    return
                leads = self._run_lane(lane)
        except BaseException as error:  # noqa: BLE001  # reported: the worker decides what happens
            self._end(error)

    def _run_lane(self, lane: Lane) -> bool:
        """Run a lane that was idle, here if somebody follows; returns whether this thread still leads."""
        # with another lane idle, what arrives meanwhile must not wait
        after_s = 0.0 if self._lanes.has_idle_lane() else _BUSY_LOOK_S
        if not self._lead.lend(after_s):
            lane.run()
            return True
        self._lanes.turn_here(lane)
        return self._lead.take_back()

    def _end(self, error: BaseException | None) -> None:
        """Close the source and report; never raises."""
        self._round_at = None
        self.consumer.rested = self._finish and not self._lanes.busy
        try:
            self.consumer.close()
        except (StoreError, BrokerError) as failed:
            # unsaved progress only means duplicates
            _log.warning("The source %s did not close cleanly: %s", self.name, failed)
        except Exception as failed:  # noqa: BLE001  # a client's: nothing more is expected of it
            _log.warning(
                "The source %s did not close (boundary: %s).",
                self.name, Boundary.SOURCE, exc_info=failed,
            )  # fmt: skip
        except BaseException as failed:  # noqa: BLE001  # reported: the worker decides what happens
            error = error or failed
        self._lead.end()
        self._ended(error)

    def opened(self, timeout_s: float) -> bool:
        return self._opened.wait(timeout_s)

    @property
    def in_flight(self) -> int:
        """The number of unsettled deliveries."""
        return len(self._in_flight)

    @property
    def paused(self) -> bool:
        """Whether nothing is received from the source, for whatever reason."""
        return self._paused_at is not None or self.refusal is not None

    @property
    def silent_s(self) -> float:
        """Seconds since the last round of the loop; 0 if it is not running."""
        round_at = self._round_at
        return 0.0 if round_at is None else time.monotonic() - round_at

    def go(self) -> None:
        """Start receiving; every source is open and every lane exists."""
        self._go.set()

    def finish(self) -> None:
        """Acknowledge what is settled, close the source and end; the lanes have ended."""
        with self._lock:
            self._finish = True
            self._changed.notify()
        self._go.set()

    def deliveries_settled(self, deliveries: Sequence[Delivery]) -> None:
        """Called by lanes, in their threads; the thread that pumps acknowledges."""
        with self._lock:
            self._settled += deliveries
            self._changed.notify()
        self._lead.hurry()

    # -- the loop -----------------------------------------------------------------------------

    def _pump(self) -> Lane | None:
        """Go round until a lane that was idle has work, which is returned, or until the end."""
        while True:
            self._round_at = time.monotonic()
            if self.refusal is None:
                self._settle()
            self._tend()
            while self._aside and self._aside[0][0] <= self._round_at and not self._finish:
                self._take_aside(self._aside.popleft()[1])
            if self.refusal is not None:
                if self._finish:
                    return None
                # it keeps its deliveries: released, they would go round workers that are configured alike
                self._wait(_WAIT_S, for_settled=False)
                continue
            if self._finish or (self.consumer.exhausted and not self._in_flight):
                self._settle()
                return None
            if self._stop() or self._full() or self.all_paused:
                self._wait(_WAIT_S)
                continue
            if self._in_flight and self._look_s:
                busy_s = 0.0 if self._lanes.has_idle_lane() else _BUSY_LOOK_S
                self._wait(max(self._look_s, busy_s))
                self._settle()
            lane = self._receive()
            if lane is not None:
                return lane

    @property
    def all_paused(self) -> bool:
        """Whether every consumer of this source is paused; messages then stay at the broker."""
        paused = self._app.pauses.paused
        return bool(paused) and bool(self.consumers) and paused.issuperset(self.consumers)

    @property
    def consumers(self) -> set[str]:
        """Those that get messages of this source."""
        return {
            handler.consumer for handler in self._app.handlers if self._matches.reaches(handler)
        }

    def _full(self) -> bool:
        return len(self._in_flight) >= self._in_flight_max or self._bytes >= self._bytes_max

    def _wait(self, wait_s: float, *, for_settled: bool = True) -> None:
        """Wait until a lane settles or this is to finish, and no longer than deliveries may go untended."""
        with self._lock:
            if not self._finish and not (for_settled and self._settled):
                self._changed.wait(min(wait_s, self.consumer.tend_every_s or wait_s))

    def _receive(self) -> Lane | None:
        """Receive and hand out; waits for the source only if nothing is in flight. Returns a lane to run, if any.

        Otherwise the loop waits for settlements and polls the source in between, often at first, so that lanes find
        what has arrived.
        """
        in_flight, room = bool(self._in_flight), self._room()
        try:
            received = self.consumer.receive(room, 0.0 if in_flight else _WAIT_S)
        except (BrokerUnavailable, ConfigurationError, StoreError) as error:
            self._pause(error)
            return None
        except Exception as error:  # noqa: BLE001  # see contain
            self._app.protocol.contain(Boundary.SOURCE, error)
            self._pause(BrokerUnavailable(f"{self.name} raised {type(error).__name__}."))
            return None
        if not self._worked.is_set():
            self._worked.set()
        if self._backoff is not None:
            self._resumed()
        if received:
            self._looks.reset()
            # a full batch: there is probably more
            self._look_s = 0.0 if len(received) >= room else self._looks.next_s()
            return self._hand_out(received)
        self._look_s = self._looks.next_s()
        return None

    def _room(self) -> int:
        """How many deliveries fit, by number and by the mean size of recent ones.

        The first value is the largest ever; a source may size its buffers by it.
        """
        messages = self._in_flight_max - len(self._in_flight)
        heavy = int((self._bytes_max - self._bytes) / max(self._mean_bytes, 1.0))
        return max(1, min(messages, heavy))

    def _hand_out(self, received: Sequence[Delivery]) -> Lane | None:
        sizes = [delivery.size_bytes for delivery in received]
        # count all first: handing out may block until the database is back
        self._in_flight.update(zip(received, sizes, strict=True))
        self._bytes += sum(sizes)
        mean = sum(sizes) / len(sizes)
        # rises at once and falls slowly, to be safe about what comes next
        self._mean_bytes = max(mean, (self._mean_bytes + mean) / 2)
        if session.crash_point is not None:
            for _ in received:
                session.at("received")
        if not self._ids.usable:
            received = self._with_ids(received)
        unmatched, lane = self._lanes.hand_out(received, self._matches, self.deliveries_settled)
        if unmatched and lane is not None:
            # what follows may wait for the database
            lane.run()
            lane = None
        for delivery in unmatched:
            self._take_aside(delivery)
        return lane

    def _take_aside(self, delivery: Delivery) -> None:
        """Settle a delivery without a lane; where something unexpected is raised, try it again after a pause."""
        message = delivery.message
        try:
            if message is None or delivery.problem is not None:
                self._set_aside(delivery)
            else:
                source = None if self._matches.asks_for(message.topic) else self.name
                self._persist(
                    delivery, [partial(self._app.unmatched_message, message=message, source=source)]
                )
        except Exception as error:  # noqa: BLE001  # see contain
            pause_s = _PAUSE_S[1]
            self._app.protocol.contain(Boundary.RECORD, error, retry_in_s=pause_s)
            self._aside.append((time.monotonic() + pause_s, delivery))

    def _with_ids(self, received: Sequence[Delivery]) -> Sequence[Delivery]:
        """Check the first messages for ids; returns them all, or those up to the one that refused the source."""
        for index, delivery in enumerate(received):
            message = delivery.message
            if message is None or (delivery.redelivered and delivery.store_from is not None):
                # what its broker may give up is better set aside than kept here
                continue
            handlers = [modes.handler for modes, _ in self._matches[message.topic, message.type]]
            if not handlers:
                continue
            self.refusal = self._ids.missing(message, handlers)
            if self.refusal is not None:
                _log.error("%s", self.refusal)
                self._troubled(self.refusal)
                self._app.events.emit(SourceRefused(source=self.name, reason=self.refusal))
                return received[: index + 1]
            if self._ids.usable:
                break
        return received

    # -- deliveries that reach no lane --------------------------------------------------------

    def _set_aside(self, delivery: Delivery) -> None:
        """Quarantine what cannot be read as a message, under every consumer of its topic."""
        origin = {"source": self.name}
        payload = delivery.raw if delivery.message is None else delivery.message.payload
        message: Message[Any] = presentable(
            Message(topic=delivery.topic, payload=payload, origin=origin)
        )
        reason = delivery.problem or "The source could not read this as a message."
        consumers = dict.fromkeys(
            handler.consumer
            for handler in self._app.handlers
            if handler.takes(delivery.topic) and self._matches.asks_for(delivery.topic)
        )
        protocol = self._app.protocol
        self._persist(
            delivery,
            [
                partial(
                    protocol.quarantine,
                    consumer=consumer,
                    message=message,
                    message_id="",
                    reason=reason,
                )
                for consumer in consumers or [""]
            ],
        )

    def _persist(
        self, delivery: Delivery, operations: Sequence[Callable[[Session], Awaitable[None]]]
    ) -> None:
        for operation in operations:
            while not self._persisted(operation):
                if self._stop():
                    # stopped while the database is away: it will be delivered again
                    return
                self._tend()
        self._resumed()
        self.deliveries_settled([delivery])

    def _persisted(self, operation: Callable[[Session], Awaitable[None]]) -> bool:
        self._round_at = time.monotonic()
        try:
            self._driver.perform(self._app.protocol.with_retries, operation, for_s=0.0)
        except StoreError as error:
            self._pause(error)
            return False
        return True

    # -- settling -----------------------------------------------------------------------------

    def _settle(self) -> None:
        # no lock: the next round sees what a lane adds meanwhile
        if not self._settled:
            return
        with self._lock:
            deliveries, self._settled = self._settled, []
        session.at("before:ack")
        try:
            self.consumer.settle(deliveries)
        except Exception as error:  # noqa: BLE001  # raised again if it ends the worker
            self._raise_if_final(error)
            failed = error.failed if isinstance(error, BrokerError) else None
            count = len(deliveries) if failed is None else failed
            if count:
                text = (
                    f"{'' if isinstance(error, TxboxError) else f'{type(error).__name__}: '}{error}"
                )
                self._app.events.emit(SettleFailed(source=self.name, count=count, error=text))
        session.at("after:ack")
        self._done(deliveries)

    def _done(self, deliveries: Sequence[Delivery]) -> None:
        self._bytes -= sum(map(self._in_flight.pop, deliveries))

    def settled(self, among: Callable[[Delivery], bool], within_s: float) -> Sequence[Delivery]:
        """See `Context`. Called in the pump's thread."""
        if self.refusal is not None:
            return []
        deadline = time.monotonic() + within_s
        done: list[Delivery] = []
        while True:
            with self._lock:
                lost: list[Delivery] = []
                others: list[Delivery] = []
                for delivery in self._settled:
                    (lost if among(delivery) else others).append(delivery)
                self._settled = others
                self._done(lost)
                done += lost
                remaining_s = deadline - time.monotonic()
                if remaining_s <= 0 or not any(among(delivery) for delivery in self._in_flight):
                    return done
                self._changed.wait(min(remaining_s, _WAIT_S))

    def report(self, event: Event) -> None:
        """See `Context`."""
        self._app.events.emit(event)

    # -- keeping deliveries alive -------------------------------------------------------------

    def _tend(self) -> None:
        every_s = self.consumer.tend_every_s
        if every_s is None or time.monotonic() < self._tend_at:
            return
        self._tend_at = time.monotonic() + every_s
        try:
            self.consumer.tend(list(self._in_flight))
        except Exception as error:  # noqa: BLE001  # raised again if it ends the worker
            self._raise_if_final(error)
            # it will be delivered again, as a duplicate
            _log.debug("%s could not be tended: %s", self.name, error)

    def _raise_if_final(self, error: Exception) -> None:
        """Raise what ends the worker; a refusal does so only before the worker's first success."""
        if ends_worker(error) and not (
            isinstance(error, ConfigurationError) and self._worked.is_set()
        ):
            raise error

    def _pause(self, error: BrokerUnavailable | ConfigurationError | StoreError) -> None:
        self._raise_if_final(error)
        # about half as long as the trouble lasts
        self._backoff = self._backoff or Backoff(*_PAUSE_S, factor=1.5, spread=(0.5, 1.5))
        now, wait_s = time.monotonic(), self._backoff.next_s()
        away = not isinstance(error, StoreError) or error.fault is Fault.UNAVAILABLE
        if away:
            self._paused_at = self._paused_at or now
        if away:
            if not isinstance(error, StoreError):
                self._troubled(error, for_s=now - (self._paused_at or now))
            self._app.events.emit(
                ConsumptionPaused(reason=str(error), retry_in_s=wait_s, source=self.name)
            )
        self._wait(wait_s, for_settled=False)

    def _resumed(self) -> None:
        self._backoff = None
        if self._paused_at is not None:
            paused_s = time.monotonic() - self._paused_at
            self._app.events.emit(ConsumptionResumed(paused_s=paused_s, source=self.name))
            self._paused_at = self.trouble = None

    def _troubled(self, error: object, *, for_s: float = 0.0) -> None:
        self.trouble = trouble_of(self._app, "source", self.name, error, for_s=for_s)


class Lead:
    """Which of a pump's two threads pumps: the one that leads. The other follows, or runs a lane.

    A thread that has received runs the idle lane itself, so that the message need not wait until another thread wakes.
    The other takes the lead over if that takes long; most turns end before.

    Source: the pattern "Leader/Followers" (Schmidt et al., 2000).
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        # by the monotonic clock; None while a thread leads
        self._free_from: float | None = None
        self._lender = 0
        self._follows = self._over = False
        #: The follower looks no more, and must be woken.
        self.sleeps = False

    def lend(self, after_s: float) -> bool:
        """Let the follower lead after this long; returns False if nobody follows."""
        with self._lock:
            if not self._follows:
                return False
            self._lender = threading.get_ident()
            self._free_from = time.monotonic() + after_s
            if self.sleeps or not after_s:
                self._changed.notify()
            return True

    def hurry(self) -> None:
        """A lane has settled or rests; unless it is the lender's, let the follower lead now."""
        if self._lender == threading.get_ident():
            return
        with self._lock:
            if self._free_from is not None:
                self._free_from = 0.0
                self._changed.notify()

    def take_back(self) -> bool:
        """Lead again; returns False if the follower leads by now, and the caller is to follow."""
        with self._lock:
            free, self._free_from = self._free_from is not None, None
            return free

    def follow(self) -> bool:
        """Wait for the lead; returns False once there is none any more."""
        looks = 0
        with self._lock:
            self._follows = True
            while not self._over:
                if self._free_from is None:
                    looks += 1
                    self.sleeps = looks > _LOOKS
                    self._changed.wait(None if self.sleeps else _LOOK_S[1])
                elif (wait_s := self._free_from - time.monotonic()) > 0:
                    looks = 0
                    self.sleeps = False
                    self._changed.wait(wait_s)
                else:
                    self._free_from = None
                    break
            self._follows = self.sleeps = False
            return not self._over

    def end(self) -> None:
        """Let the follower go."""
        with self._lock:
            self._over = True
            self._changed.notify()


class FirstIds:
    """Checks the first messages of a source until one has a usable id.

    A single message without an id is quarantined. A source with none at all is set up wrongly, and would be emptied
    into the quarantine.
    """

    def __init__(self, source: str) -> None:
        self._source = source
        self._without = 0
        #: A message had an id, so there is nothing more to check.
        self.usable = False

    def missing(self, message: Message[Any], handlers: Sequence[Handler]) -> str | None:
        """Check one more message; returns what to configure once too many had no id."""
        for handler in handlers:
            try:
                handler.id_of(message)
            except UnusableMessage:
                continue
            self.usable = True
            return None
        self._without += 1
        if self._without < _FIRST:
            return None
        weak = (
            ", or weak_ids=True if the position in the stream may stand for one"
            if "weak_id" in message.origin
            else ""
        )
        names = ", ".join(handler.name for handler in handlers)
        return (
            f"None of the first {_FIRST} messages of {self._source} has a usable id, and the source is paused: "
            f"set message_id= on {names}{weak}, then start the worker again."
        )


class StoredProgress:
    """The lease and the state of one source, and the anchors of its partitions."""

    def __init__(self, run: Run, name: str) -> None:
        self._driver = run.driver
        self._name = name
        self._lease = JobLease(run.app.store.dialect, name, secrets.token_hex(16), _LEASE_S)
        # as it was read, or saved, last
        self._saved: Saved | None = None
        self.anchors = StoredAnchors(run)

    @property
    def lease_s(self) -> float:
        return self._lease.lease_s

    def acquire(self) -> bool:
        saved = self._saved
        if not self._driver.perform(self._lease.acquire):
            self._saved = None
            return False
        if saved is not None and saved != self._driver.perform(self._lease.load):
            self._saved = None
            _log.warning(
                "%s goes back to the progress that the database has: that was restored, failed over or restarted, "
                "or another process went on. What is still there will be duplicates.",
                self._name,
            )
            return False
        return True

    def load(self) -> str | None:
        self._saved = self._driver.perform(self._lease.load)
        return self._saved.state

    def save(self, state: str) -> bool:
        saved = self._saved
        if saved is None or not self._driver.perform(self._lease.save, state, saved):
            return False
        self._saved = Saved(saved.history, state)
        return True

    def release(self) -> None:
        self._driver.perform(self._lease.release)


class StoredAnchors:
    """Positions that any process may advance; no lease, for each is a fact."""

    def __init__(self, run: Run) -> None:
        self._dialect = run.app.store.dialect
        self._driver = run.driver

    def read(self, names: Sequence[str]) -> Mapping[str, Anchor]:
        stored = [_stored_name(name) for name in names]
        history, positions = self._driver.perform(jobs.anchors, self._dialect, stored)
        return {name: Anchor(positions.get(_stored_name(name)), history) for name in names}

    def advance(self, moves: Mapping[str, tuple[int, Anchor]]) -> Mapping[str, Anchor]:
        wanted = {_stored_name(name): move for name, move in moves.items()}

        def allowed(history: str, positions: Mapping[str, int]) -> Mapping[str, int]:
            return {
                name: position
                for name, (position, known) in wanted.items()
                if not known.is_missing_in(Anchor(positions.get(name), history))
            }

        history, before = self._driver.perform(jobs.anchors, self._dialect, list(wanted), allowed)
        after = dict(before)
        for name, position in allowed(history, before).items():
            after[name] = max(position, before.get(name, position))
        return {name: Anchor(after.get(_stored_name(name)), history) for name in moves}


def _stored_name(name: str) -> str:
    return canonical_id(f"anchor:{name}")
