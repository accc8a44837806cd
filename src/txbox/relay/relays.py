"""All relays of one app, each in a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable

from txbox.app import App
from txbox.connections.base import Listening, Notifies
from txbox.relay.relay import Perform, Relay
from txbox.store.outbox import OutboxStore

Ended = Callable[[BaseException | None], None]


class Relays:
    """Sends the staged messages of every route until stopped.

    Args:
        stop: True when nothing more is to be leased.
        ended: called by each thread with what ended it, None for a stop.
        delivered: called when messages have reached consumers of this app itself.
    """

    def __init__(
        self,
        app: App,
        perform: Perform,
        *,
        stop: Callable[[], bool],
        ended: Ended,
        delivered: Callable[[], None] | None = None,
    ) -> None:
        self._app = app
        self._perform = perform
        self._ended = ended
        self._relays = [
            Relay(app, route, perform, stop=stop, delivered=delivered) for route in app.routes.all()
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
            own = threading.Thread(
                target=self._run, args=(relay,), name=f"txbox-relay-{relay.name}", daemon=True
            )
            self._threads.append(own)
            own.start()

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

    def left(self) -> bool:
        """Say whether staged messages are due or leased."""
        return self._perform(OutboxStore(self._app.store.dialect, self._app.store.columns).left())

    def join(self, timeout_s: float) -> bool:
        """Wait for the threads to end; what they had leased is marked or given back by then."""
        self._app.outbox.staged = None
        if self._listener is not None:
            self._listener.stop()
        self.wake()
        for own in self._threads:
            own.join(timeout_s)
        return not any(own.is_alive() for own in self._threads)
