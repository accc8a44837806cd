"""The lanes of every consumer, and the tables that they take rows from."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial

from txbox.app import App
from txbox.worker.driving import Driver
from txbox.worker.lane import Lane
from txbox.worker.table import Table


class Lanes:
    """One table a consumer; over it lanes for its sync handlers and lanes for its async ones.

    Args:
        stop: True when nothing more is to be started.
    """

    def __init__(self, app: App, *, stop: Callable[[], bool]) -> None:
        self._app = app
        self._stop = stop
        #: By consumer.
        self.tables: dict[str, Table] = {}
        #: By consumer, and whether they run its async handlers.
        self.by_colour: dict[tuple[str, bool], list[Lane]] = {}

    def __len__(self) -> int:
        return sum(len(lanes) for lanes in self.by_colour.values())

    def make(self) -> None:
        """Make them for the handlers that are registered by now."""
        suspects = threading.Lock()
        for consumer, handlers in self._app.handlers.consumers().items():
            self.tables[consumer] = table = Table(
                self._app,
                consumer,
                suspects=suspects,
                stop=self._stop,
                wake=partial(self._wake, consumer),
            )
            for is_async in sorted({handler.is_async for handler in handlers}):
                count = max(own.options.concurrency for own in handlers if own.is_async == is_async)
                self.by_colour[consumer, is_async] = [
                    Lane(self._app, table, index=index, is_async=is_async, stop=self._stop)
                    for index in range(count)
                ]

    def start(
        self,
        driver: Driver,
        *,
        thread_ended: Callable[[BaseException | None], None],
        task_ended: Callable[[Future[None]], None],
    ) -> None:
        """Start a thread for each sync lane and a task for each async one; each reports its end."""
        for (_, is_async), lanes in self.by_colour.items():
            for lane in lanes:
                if is_async:
                    driver.start(lane.steps()).add_done_callback(task_ended)
                else:
                    driver.start_thread(lane.name, lane.steps(), thread_ended)

    def wake(self) -> None:
        """Have every lane look at what there is to do."""
        for lanes in self.by_colour.values():
            for lane in lanes:
                lane.wake()

    def look_now(self) -> None:
        """Have every consumer look for due rows at once: some have come from elsewhere than a source."""
        for consumer, table in self.tables.items():
            table.look_now()
            self._wake(consumer)

    def _wake(self, consumer: str) -> None:
        for is_async in (False, True):
            for lane in self.by_colour.get((consumer, is_async), ()):
                lane.wake()
