"""A worker in a process of its own, fed from memory: python -m benchmarks.child '{"url": …}'.

Prints a JSON line with what was settled, how long that took and the memory of the process, every so
often, and ends when all is settled.

Fields of the argument: url; deliveries; first (the delivery to begin with); rate (deliveries a second, none: all
wait); payload_bytes; in_flight; every_s; hold (the first run waits until as much is in flight); redelivered (so many
of the first are marked so); maintenance.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from benchmarks.lazy import lazy_work
from benchmarks.workload import CONSUMER, TOPIC, Tx, pay
from txbox import App, Batching, Message
from txbox.app import Consumption
from txbox.brokers.base import Consumer, Context, Delivery, Source
from txbox.worker import Worker


@dataclass(frozen=True)
class Task:
    url: str
    deliveries: int
    first: int = 0
    rate: float | None = None
    payload_bytes: int = 200
    in_flight: int = 200
    every_s: float = 10.0
    hold: bool = False
    redelivered: int = 0
    maintenance: bool = False


class Feed(Source, Consumer):
    """A source that makes deliveries when they are received, and keeps times of the last ten seconds only."""

    name = "feed"

    def __init__(self, task: Task) -> None:
        self._task = task
        self._made = lazy_work(task.deliveries, task.payload_bytes).deliveries
        self._next = task.first
        self._began = 0.0
        self._done: set[int] = set()
        self._lock = threading.Lock()
        self._took_s: list[float] = []
        self.settled = 0
        #: Every delivery below it is settled.
        self.front = task.first
        self.full = threading.Event()

    @property
    def exhausted(self) -> bool:
        return self._next == len(self._made)

    def keeps_order(self, topic: str) -> bool:
        del topic
        return True

    def consumer(self, topics: Sequence[str], context: Context) -> Consumer:
        del topics, context
        return self

    def receive(self, messages_max: int, wait_s: float) -> Sequence[Delivery]:
        now = time.perf_counter()
        self._began = self._began or now
        until = self._next + messages_max
        if self._task.rate is not None:
            due = self._began + (self._next - self._task.first) / self._task.rate
            if due > now and wait_s > 0:
                time.sleep(min(due - now, wait_s))
                now = time.perf_counter()
            arrived = int((now - self._began) * self._task.rate) + 1
            until = min(until, self._task.first + arrived)
        found: list[Delivery] = []
        for at in range(self._next, min(until, len(self._made))):
            delivery = self._made[at]
            since = (
                now
                if self._task.rate is None
                else self._began + (at - self._task.first) / self._task.rate
            )
            found.append(
                Delivery(
                    Message(topic=TOPIC, id=delivery.id, payload=delivery.payload),
                    TOPIC,
                    tag=(at, since),
                    redelivered=at < self._task.first + self._task.redelivered,
                )
            )
        self._next += len(found)
        if self._next - self._task.first - self.settled >= self._task.in_flight:
            self.full.set()
        return found

    def settle(self, deliveries: Sequence[Delivery]) -> None:
        now = time.perf_counter()
        with self._lock:
            for delivery in deliveries:
                at, since = delivery.tag
                self._done.add(at)
                self._took_s.append(now - since)
            self.settled += len(deliveries)
            while self.front in self._done:
                self._done.remove(self.front)
                self.front += 1

    def close(self) -> None: ...

    def sample(self) -> dict[str, Any]:
        with self._lock:
            took, self._took_s = sorted(self._took_s), []
            settled, front = self.settled, self.front
        return {
            "at_s": time.perf_counter() - self._began if self._began else 0.0,
            "settled": settled,
            "front": front,
            "p50_ms": took[len(took) // 2] * 1e3 if took else None,
            "p99_ms": took[len(took) * 99 // 100] * 1e3 if took else None,
            **memory(),
        }


def memory() -> dict[str, float]:
    """Resident memory of this process now and at its highest, in MB of 2**20 bytes."""
    status = dict(
        line.split(":", 1)
        for line in Path("/proc/self/status").read_text().splitlines()
        if ":" in line
    )
    return {
        name: int(status[key].split()[0]) / 1024
        for name, key in (("rss_mb", "VmRSS"), ("rss_highest_mb", "VmHWM"))
    }


def main() -> int:
    task = Task(**json.loads(sys.argv[1]))
    feed = Feed(task)
    held: list[dict[str, float]] = []
    app = App(
        task.url, batching=Batching(messages=task.in_flight // 2, duration=timedelta(seconds=1))
    )

    @app.handler(TOPIC, consumer=CONSUMER, pipeline=True)
    def billing(message: Message[dict[str, Any]], tx: Tx) -> None:
        if task.hold and not held:
            feed.full.wait(10)
            held.append(memory())
        pay(message.body, tx)

    worker = Worker(
        app, once=True, relay=False, maintenance=task.maintenance, install_signals=False,
        consumptions=[Consumption(feed, None)],
    )  # fmt: skip
    ended: list[int] = []
    thread = threading.Thread(target=lambda: ended.append(worker.run()))
    thread.start()
    while thread.is_alive():
        thread.join(task.every_s)
        print(json.dumps(feed.sample()), flush=True)
    print(json.dumps({**feed.sample(), "held": held}), flush=True)
    return ended[0]


if __name__ == "__main__":
    sys.exit(main())
