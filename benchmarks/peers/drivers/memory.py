"""naive and txbox, fed from memory: nothing to ingest. `memory.py naive | pipelined | stored`"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import psycopg

from benchmarks import workload
from benchmarks.naive import Naive
from benchmarks.peers.drivers.drive import URL, After, Delivery, drive
from benchmarks.workload import take_payment
from txbox import App, Message
from txbox.app import Consumption
from txbox.brokers.base import Delivery as Received
from txbox.brokers.base import InFlight, Progress
from txbox.worker import Worker

_LEFT = "SELECT EXISTS (SELECT FROM txbox_inbox WHERE status <> 'processed')"


class Memory:
    """A source that hands out what it was given."""

    topics: Sequence[str] | None = None
    tend_every_s: float | None = None
    redelivery_s: float | None = None
    name = "memory"
    exhausted = False

    def __init__(self, messages: list[Message[Any]]) -> None:
        self._waiting = messages[::-1]
        self._unsettled = len(messages)
        self.settled = threading.Event()

    def keeps_order(self, topic: str) -> bool:
        del topic
        return True

    def open(self, topics: Sequence[str], progress: Progress, in_flight: InFlight) -> None: ...

    def receive(self, messages_max: int, wait_s: float) -> Sequence[Received]:
        count = min(messages_max, len(self._waiting))
        if not count:
            time.sleep(min(wait_s, 0.01))
        return [Received(self._waiting.pop(), "orders") for _ in range(count)]

    def settle(self, deliveries: Sequence[Received]) -> None:
        self._unsettled -= len(deliveries)
        if not self._unsettled:
            self.settled.set()

    def tend(self, deliveries: Sequence[Received]) -> None: ...
    def close(self) -> None: ...


class Txbox:
    """One worker with one lane and default settings; a worker and a source for each file."""

    def __init__(self, mode: Literal["inline", "stored"]) -> None:
        self._app = App(URL)
        self._app.handler("*", consumer="billing", pipeline=True, mode=mode)(self._handle)
        self._app.init()
        self._stored = mode == "stored"
        self._source = Memory([])
        self._expected: set[str] = set()
        self._handled = 0

    def _handle(self, message: Message[dict[str, Any]], tx: psycopg.Connection[Any]) -> None:
        self._handled += 1
        take_payment(message.body, tx)

    def prepare(self, deliveries: Sequence[Delivery]) -> None:
        self._expected.update(own.id for own in deliveries)
        self._source = Memory(
            [
                Message[Any](
                    topic="orders",
                    payload=json.dumps(own.body).encode(),
                    headers=[("message-id", own.id.encode())],
                )
                for own in deliveries
            ]
        )

    def process(self) -> Callable[[], object]:
        worker = Worker(
            self._app,
            install_signals=False,
            maintenance=False,
            relay=False,
            consumptions=[Consumption(self._source, None)],
        )
        thread = threading.Thread(target=worker.run)
        thread.start()
        self._source.settled.wait()
        if self._stored:  # settled once stored, processed afterwards
            with psycopg.connect(URL, autocommit=True) as connection:
                while self._handled < len(self._expected) or self._left(connection):
                    time.sleep(0.002)

        def stop() -> None:
            worker.stop()
            thread.join()

        return stop

    def _left(self, connection: psycopg.Connection[Any]) -> bool:
        row = connection.execute(_LEFT).fetchone()
        return row is not None and bool(row[0])


class Loop:
    """The yardstick."""

    def __init__(self) -> None:
        self._naive = Naive(URL)
        self._naive.prepare()
        self._deliveries: list[workload.Delivery] = []

    def prepare(self, deliveries: Sequence[Delivery]) -> None:
        self._deliveries = [
            workload.Delivery(own.id, json.dumps(own.body).encode()) for own in deliveries
        ]

    def process(self) -> None:
        for delivery in self._deliveries:
            self._naive.consume(delivery)


async def main(which: str) -> None:
    own = Loop() if which == "naive" else Txbox("stored" if which == "stored" else "inline")

    async def prepare(deliveries: Sequence[Delivery]) -> None:
        own.prepare(deliveries)

    async def ingest(deliveries: Sequence[Delivery]) -> None:
        del deliveries

    async def process(deliveries: Sequence[Delivery]) -> After | None:
        del deliveries
        stop = own.process()
        return None if stop is None else partial(asyncio.to_thread, stop)

    await drive(ingest, process, prepare)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
