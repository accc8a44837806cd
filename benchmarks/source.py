"""A source whose messages lie in memory, all at once or each when it is due; and the stop-watch of a round."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any, Protocol

from benchmarks.place import Reading
from benchmarks.result import Round, Verified
from benchmarks.workload import TOPIC, Work
from txbox.brokers.base import Consumer, Context, Delivery, Source
from txbox.message import Message


class Readable(Protocol):
    """Gauges of some server."""

    def read(self) -> Reading: ...


class Stopwatch:
    """Times one round: from its first message to the end of its last, with the gauges at both."""

    def __init__(self, gauges: Readable) -> None:
        self._gauges = gauges
        self._began: Reading | None = None
        self._ended: Reading | None = None
        #: Seconds of each delivery, from when it was due or received to when it was done.
        self.took_s: list[float] = []
        #: Deliveries, where those are more than there are times.
        self.deliveries: int | None = None
        #: Seconds of each message, to its commit, where somebody listens.
        self.committed_s: list[float] = []
        self.done = threading.Event()

    @property
    def running(self) -> bool:
        return self._began is not None and self._ended is None

    def start(self) -> float:
        """Read the gauges and start; returns the time of it, by `time.perf_counter`."""
        self._began = self._gauges.read()
        return self._began.at

    def stop(self) -> None:
        """Stop, then read the gauges."""
        if self._ended is None:
            now, cpu_s = time.perf_counter(), time.process_time()
            gauged = self._gauges.read()
            self._ended = Reading(now, cpu_s, gauged.server_cpu_s, gauged.wal_bytes)
            self.done.set()

    def round(self, contender: str, verified: Verified, **more: int | str | None) -> Round:
        """What was measured, a delivery."""
        began, ended = self._began, self._ended
        took, count = sorted(self.took_s), self.deliveries or len(self.took_s)
        dead, failure = more.get("dead_tuples"), more.get("failure")
        if began is None or ended is None or not took:
            return Round(contender, 0, 0.0, None, None, None, verified, failure=str(failure))
        server_s, wal = None, None
        if began.server_cpu_s is not None and ended.server_cpu_s is not None:
            server_s = ended.server_cpu_s - began.server_cpu_s
        if began.wal_bytes is not None and ended.wal_bytes is not None:
            wal = (ended.wal_bytes - began.wal_bytes) / count
        return Round(
            contender=contender,
            messages=count,
            rate=count / (ended.at - began.at),
            p50_ms=took[len(took) // 2] * 1e3,
            p99_ms=took[len(took) * 99 // 100] * 1e3,
            client_cpu_us=(ended.client_cpu_s - began.client_cpu_s) / count * 1e6,
            server_cpu_us=None if server_s is None else server_s / count * 1e6,
            wal_bytes=wal,
            dead_tuples=dead if isinstance(dead, int) else None,
            verified=verified,
            failure=None if failure is None else str(failure),
            more=self._to_commit(),
        )

    def _to_commit(self) -> dict[str, float]:
        took = sorted(self.committed_s)
        if not took:
            return {}
        return {
            "commit_p50_ms": took[len(took) // 2] * 1e3,
            "commit_p99_ms": took[len(took) * 99 // 100] * 1e3,
        }


class Memory(Source, Consumer):
    """Hands out a workload as a broker's client would: bytes become a Message when they are received.

    Args:
        rate: deliveries a second that become due, evenly, from the first `receive` on; None has all
            of them wait from the start.
        types: of the messages, in turn.

    A delivery's time is from when it was due (or, without a rate, received) to its settlement.
    """

    name = "memory"

    def __init__(
        self,
        work: Work,
        watch: Stopwatch,
        *,
        rate: float | None = None,
        types: Sequence[str | None] = (None,),
    ) -> None:
        self._waiting = work.deliveries
        self._types = types
        self._watch = watch
        self._every_s = None if rate is None else 1.0 / rate
        self._next = 0
        self._settled = 0
        self._began_at: float | None = None
        #: When each message was due or received first, where somebody asks for it.
        self.received: dict[str, float] | None = None
        #: A settlement is not the end.
        self.ends_elsewhere = False
        #: Nothing more is handed out.
        self.given_up = False

    @property
    def exhausted(self) -> bool:
        return self.given_up or self._next == len(self._waiting)

    def keeps_order(self, topic: str) -> bool:
        del topic
        return True

    def consumer(self, topics: Sequence[str], context: Context) -> Consumer:
        del topics, context
        return self

    def receive(self, messages_max: int, wait_s: float) -> Sequence[Delivery]:
        if self.exhausted:
            time.sleep(min(wait_s, 0.01))
            return []
        if self._began_at is None:
            self._began_at = self._watch.start()
        now = time.perf_counter()
        if self._every_s is None:
            until, due = self._next + messages_max, now
        else:
            now = self._wait(now, wait_s)
            arrived = int((now - self._began_at) / self._every_s) + 1
            until, due = min(arrived, self._next + messages_max), self._began_at
        found: list[Delivery] = []
        types = self._types
        for at, delivery in enumerate(self._waiting[self._next : until], self._next):
            # not `Message[Any](…)`, which takes three times as long
            message: Message[Any] = Message(
                topic=TOPIC, id=delivery.id, payload=delivery.payload, type=types[at % len(types)]
            )
            since = due if self._every_s is None else due + at * self._every_s
            found.append(Delivery(message, TOPIC, tag=since))
            if self.received is not None:
                self.received.setdefault(delivery.id, since)
        self._next += len(found)
        return found

    def _wait(self, now: float, wait_s: float) -> float:
        assert self._began_at is not None
        assert self._every_s is not None
        pause_s = self._began_at + self._next * self._every_s - now
        if pause_s > 0 and wait_s > 0:
            time.sleep(min(pause_s, wait_s))
            return time.perf_counter()
        return now

    def settle(self, deliveries: Sequence[Delivery]) -> None:
        self._settled += len(deliveries)
        if self.ends_elsewhere:
            return
        now = time.perf_counter()
        self._watch.took_s += [now - delivery.tag for delivery in deliveries]
        if self._settled == len(self._waiting):
            self._watch.stop()

    def close(self) -> None: ...
