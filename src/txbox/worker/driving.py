"""Runs operations for a worker's threads: on sync connections if there are any, else on an asyncio loop."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, Literal, ParamSpec, TypeVar

from txbox.app import App
from txbox.errors import UNANSWERED, StoreUnavailable
from txbox.events import ConsumptionPaused
from txbox.policy import Backoff
from txbox.processing.failure import printable
from txbox.session import Operation, drive, drive_async
from txbox.store.activity import Trouble

_PAUSE_S = (0.5, 5.0)

T = TypeVar("T")
P = ParamSpec("P")


class Driver:
    """Runs operations for a worker's threads.

    Args:
        loop: the caller's, running until this is closed; by default a loop in a thread of its own.
    """

    def __init__(self, app: App, loop: asyncio.AbstractEventLoop | None = None) -> None:
        self._app = app
        self._loop = loop
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def perform(
        self,
        operation: Operation[P, T],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:
        """Run an operation that calls no user code, from any thread but the loop's; waits until it ends."""
        if self._app.database.sync is not None:
            return drive(self._app.database.sync, operation, *args, **kwargs)
        return self.start(operation, *args, **kwargs).result()

    def start(
        self,
        operation: Operation[P, T],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> Future[T]:
        """Run an operation as a task of the loop."""
        connections = self._app.database.asynchronous
        assert connections is not None, "checked at start"
        return self.task(drive_async(connections, operation, *args, **kwargs))

    def task(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine on the loop."""
        return asyncio.run_coroutine_threadsafe(work, self._running())

    def ping(self, answered: Callable[[], None]) -> bool:
        """Have the loop call back; False if there is no loop."""
        loop = self._loop
        if loop is None or loop.is_closed():
            return False
        loop.call_soon_threadsafe(answered)
        return True

    def _running(self) -> asyncio.AbstractEventLoop:
        # several pumps may need it for the first time at once
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(
                    target=_run_forever, args=(self._loop,), name="txbox-loop", daemon=True
                )
                self._thread.start()
            return self._loop

    def close(self, timeout_s: float, *, clean: bool = True) -> None:
        """Close the app's connections and end the loop.

        Args:
            clean: no operation is running, so tasks that user code left on the loop are cancelled.
        """
        loop, loop_thread = self._loop, self._thread
        if loop is None:
            self._app.close()
            return
        if loop_thread is None:
            # the caller's loop: its other tasks are not ours
            asyncio.run_coroutine_threadsafe(self._app.close_async(), loop).result(timeout_s)
            return
        asyncio.run_coroutine_threadsafe(self._closed(clean), loop).result(timeout_s)
        loop.call_soon_threadsafe(loop.stop)
        loop_thread.join(timeout_s)
        if not loop_thread.is_alive():
            loop.close()
        self._loop = self._thread = None

    async def _closed(self, clean: bool) -> None:
        await self._app.close_async()
        await self._app.database.leave_loop()
        current = asyncio.current_task()
        left = [task for task in asyncio.all_tasks() if clean and task is not current]
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        loop = asyncio.get_running_loop()
        await loop.shutdown_asyncgens()
        await loop.shutdown_default_executor()


def trouble_of(
    app: App,
    kind: Literal["source", "route"],
    name: str,
    error: object,
    *,
    for_s: float,
    topic: str | None = None,
) -> Trouble:
    """What a process says of a source or route that has been in trouble for so long."""
    text = printable(app.store.columns.redact.error(str(error)), 500)
    since_s = round(time.time() + app.activity.ahead_s - for_s)
    return Trouble(kind=kind, name=printable(name, 255), since_s=since_s, error=text, topic=topic)


def check_tables(
    app: App, driver: Driver, wait: Callable[[float], object], *, patient: bool
) -> bool:
    """Check that the tables fit; while the server has no free connection, wait and try again.

    Args:
        wait: for so many seconds; what it returns is true for a stop.
        patient: also wait for a server that does not answer. With libpq, one without a free connection looks the same.

    Returns: False for a stop.

    Raises:
        StoreError: the database does not answer.
        SchemaError: the message contains the command to run.
    """
    backoff = Backoff(*_PAUSE_S)
    while True:
        try:
            driver.perform(app.protocol.check_schema)
        except StoreUnavailable as error:
            if not error.full and not (patient and error.code in UNANSWERED):
                raise
            pause_s = backoff.next_s()
            # else each start would fail, as long as others start
            app.events.emit(ConsumptionPaused(reason=str(error), retry_in_s=pause_s))
        else:
            return True
        if wait(pause_s):
            return False


def _run_forever(loop: asyncio.AbstractEventLoop) -> None:
    while True:
        try:
            return loop.run_forever()
        except (SystemExit, KeyboardInterrupt):
            # raised by a task of a handler, which gets it where it awaits the task
            continue


def thread(
    name: str, work: Callable[[], object], ended: Callable[[BaseException | None], None]
) -> threading.Thread:
    """Start a daemon thread that always reports how it ended."""

    def report() -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001  # reported: the worker decides what happens
            ended(error)
        else:
            ended(None)

    daemon = threading.Thread(target=report, name=name, daemon=True)
    daemon.start()
    return daemon
