"""The ids that this process is working on: none is claimed twice at once (SEMANTICS 2.5)."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from threading import Lock


class InFlight:
    """Who works on which id, among the threads and tasks of one process."""

    def __init__(self) -> None:
        self._lock = Lock()
        # the ids of each consumer; the future is made when somebody waits: hardly ever
        self._held: dict[str, dict[str, Future[None] | None]] = {}

    def enter(self, consumer: str, message_id: str) -> Future[None] | None:
        """Take an id; returns None when it is ours now, else the future that ends with its holder."""
        with self._lock:
            held = self._held.setdefault(consumer, {})
            if message_id not in held:
                held[message_id] = None
                return None
            holder = held[message_id]
            if holder is None:
                holder = held[message_id] = Future()
            return holder

    def enter_all(self, consumer: str, message_ids: Sequence[str]) -> bool:
        """Take these ids, or none of them when somebody holds one."""
        with self._lock:
            held = self._held.setdefault(consumer, {})
            if not held.keys().isdisjoint(message_ids):
                return False
            held.update(dict.fromkeys(message_ids))
            return True

    def leave(self, consumer: str, *message_ids: str) -> None:
        """Give ids up and wake who waits for them."""
        with self._lock:
            held = self._held.setdefault(consumer, {})
            holders = [held.pop(message_id) for message_id in message_ids]
        for holder in holders:
            if holder is not None:
                holder.set_result(None)
