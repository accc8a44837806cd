"""All relays of one app, each in a thread of its own."""

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
        stop: True when nothing more is to be leased.
        ended: called by each thread with what ended it, None for a stop.
        delivered: called when messages have reached consumers of this app itself, with their names.
        polled: somebody calls `look` when a row of the outbox is due.
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
        """Start a thread for each route; what this process stages wakes them, or, with notify, any process."""
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
        except BaseException as error:  # noqa: BLE001  # the owner decides: no thread dies in silence
            self._ended(error)
        else:
            self._ended(None)

    def wake(self) -> None:
        """Look at the outbox soon. From any thread."""
        for relay in self._relays:
            relay.wake()

    def look(self) -> None:
        """A row of the outbox is due. From any thread."""
        for relay in self._relays:
            relay.look()

    def left(self) -> bool:
        """Say whether staged messages that these relays take are due or leased."""
        return any(relay.left() for relay in self._relays)

    def join(self, timeout_s: float) -> list[str]:
        """Wait for the threads to end; what they had leased is marked or given back by then.

        Returns: the names of the destinations whose threads had not ended in time.
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
