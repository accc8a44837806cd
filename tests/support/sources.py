"""A source in memory, and files of events for the File source."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from txbox import Message
from txbox.brokers.base import Consumer, Context, Delivery, Source


class Memory(Source, Consumer):
    """A source over a list, and its only consumer; `settled` keeps what was acknowledged, in that order.

    It fails when two threads call it at once, or one calls it after it was closed.
    """

    def __init__(self, deliveries: Sequence[Message[Any] | Delivery], *, endless: bool = False):
        self.name = "memory"
        self.waiting = [
            delivery if isinstance(delivery, Delivery) else Delivery(delivery, delivery.topic)
            for delivery in deliveries
        ]
        self.endless = endless
        self.received: list[Delivery] = []
        self.settled: list[Delivery] = []
        self.tended: list[list[Delivery]] = []
        self.threads: set[str] = set()
        self.closed = False
        self._called = threading.Lock()

    @contextmanager
    def _alone(self) -> Iterator[None]:
        assert self._called.acquire(blocking=False), "called by two threads at once"
        try:
            assert not self.closed, "called after it was closed"
            self.threads.add(threading.current_thread().name)
            yield
        finally:
            self._called.release()

    @property
    def exhausted(self) -> bool:
        return not self.waiting and not self.endless

    @property
    def settled_ids(self) -> list[Any]:
        return [delivery.message.id for delivery in self.settled if delivery.message is not None]

    def has_received(self, count: int) -> bool:
        return len(self.received) == count

    def has_settled(self, count: int) -> bool:
        return len(self.settled) == count

    def keeps_order(self, topic: str) -> bool:
        del topic
        return True

    def consumer(self, topics: Sequence[str], context: Context) -> Consumer:
        self.closed = False
        with self._alone():
            self.context = context
        return self

    def receive(self, messages_max: int, wait_s: float) -> Sequence[Delivery]:
        with self._alone():
            found, self.waiting = self.waiting[:messages_max], self.waiting[messages_max:]
            self.received += found
            if not found:
                time.sleep(min(wait_s, 0.02))
            return found

    def tend(self, deliveries: Sequence[Delivery]) -> None:
        with self._alone():
            self.tended.append(list(deliveries))

    def settle(self, deliveries: Sequence[Delivery]) -> None:
        with self._alone():
            self.settled += deliveries

    def close(self) -> None:
        with self._alone():
            self.closed = True


def event_line(own_id: object, **more: Any) -> str:
    event = {
        "specversion": "1.0", "id": own_id, "source": "/test", "type": "order.paid", "data": {"cents": 1},
    } | more  # fmt: skip
    return json.dumps(event) + "\n"


def write_events(path: Path, ids: Sequence[object]) -> None:
    path.write_text("".join(event_line(message_id) for message_id in ids))
