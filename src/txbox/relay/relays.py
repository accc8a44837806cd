"""All relays of an app, each in its own thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection

from txbox.app import App
from txbox.connections.base import Listening, Notifies
from txbox.relay.relay import Perform, Relay

Ended = Callable[[BaseException | None], None]


class Relays:
    """Sends the staged messages of every route until stopped.

    Args:
        stop: True when nothing more must be leased.
        ended: called by each thread with what ended it; None for a normal stop.
        delivered: called with the names of this app's consumers that messages have reached.
        polled: somebody else calls `look` when a row of the outbox is due.
    """

    def __init__(
        self,
        app: App,
        perform: Perform,
        *,
        stop: Callable[[], bool],
        ended: Ended,
        delivered: Callable[[Collection[str]], None] | None = None,
        polled: bool = False,
    ) -> None:
        self._app = app
        self._ended = ended
        self._relays = [
            Relay(app, route, perform, stop=stop, delivered=delivered, polled=polled)
            for route in app.routes.all()
        ]
        self._threads: list[threading.Thread] = []
        self._listener: Listening | None = None

    def start(self) -> None:
        """Start a thread per route. Staging in this process wakes them; with notify, staging in any process does."""
        self._app.outbox.staged = self.wake
        if self._app.notify and isinstance(self._app.database, Notifies):
            self._listener = self._app.database.listener("txbox_outbox", self.wake)
            if self._listener is not None:
                self._listener.start()
        for relay in self._relays:
            thread = threading.Thread(
                target=self._run, args=(relay,), name=f"txbox-relay-{relay.name}", daemon=True
            )
            self._threads.append(thread)
            thread.start()

    def _run(self, relay: Relay) -> None:
        try:
            relay.run()
        except BaseException as error:  # noqa: BLE001  # reported to the owner, so that no thread dies silently
            self._ended(error)
        else:
            self._ended(None)

    def wake(self) -> None:
        """Look at the outbox soon. Callable from any thread."""
        for relay in self._relays:
            relay.wake()

    def look(self) -> None:
        """Look at the outbox once, because a row is due. Callable from any thread."""
        for relay in self._relays:
            relay.look()

    def left(self) -> bool:
        """Whether staged messages that these relays take are due or leased."""
        return any(relay.left() for relay in self._relays)

    def join(self, timeout_s: float) -> list[str]:
        """Wait for the threads to end; by then, what they had leased is marked or given back.

        Returns: the names of destinations whose threads did not end in time.
        """
        self._app.outbox.staged = None
        if self._listener is not None:
            self._listener.stop()
        self.wake()
        until = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        return [
            relay.name
            for relay, thread in zip(self._relays, self._threads, strict=False)
            if thread.is_alive()
        ]
