"""The ids that this process is working on: none is claimed twice at once (SEMANTICS 2.5)."""

from __future__ import annotations

from concurrent.futures import Future
from threading import Lock


class InFlight:
    """Who works on which id, among the threads and tasks of one process."""

    def __init__(self) -> None:
        self._lock = Lock()
        # the future is made when somebody waits: hardly ever
        self._held: dict[tuple[str, str], Future[None] | None] = {}

    def enter(self, consumer: str, message_id: str) -> Future[None] | None:
        """Take an id; returns None when it is ours now, else the future that ends with its holder."""
        own = (consumer, message_id)
        with self._lock:
            if own not in self._held:
                self._held[own] = None
                return None
            holder = self._held[own]
            if holder is None:
                holder = self._held[own] = Future()
            return holder

    def leave(self, consumer: str, message_id: str) -> None:
        """Give an id up and wake who waits for it."""
        with self._lock:
            holder = self._held.pop((consumer, message_id))
        if holder is not None:
            holder.set_result(None)
