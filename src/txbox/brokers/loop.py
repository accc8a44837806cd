"""Consumers and publishers whose client is async: their event loop in a thread, and when they connect."""

from __future__ import annotations

import asyncio
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Sequence
from concurrent.futures import CancelledError
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from txbox.boundaries import log as _log
from txbox.brokers.base import Batch, Consumer, Source, later_if_away, refusal
from txbox.errors import BrokerError, BrokerUnavailable, ConfigurationError
from txbox.message import Message

Result = TypeVar("Result")

CALL_S = 10.0
CLOSE_S = 5.0
#: A connection that is lost at once, again and again, is made this often.
_RECONNECT_S = 1.0


class EventLoop:
    """An event loop in its own thread; `close` ends its tasks."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def call(
        self, work: Coroutine[Any, Any, Result], within_s: float, clean_up_s: float = 0.0
    ) -> Result:
        """Run a coroutine on the loop and wait for it.

        Args:
            within_s: after this long it is cancelled.
            clean_up_s: how much longer it may take to clean up after that.

        Raises:
            TimeoutError: it took too long, or the client cancelled it.
        """

        async def bounded() -> Result:
            async with asyncio.timeout(within_s):
                return await work

        future = asyncio.run_coroutine_threadsafe(bounded(), self._loop)
        try:
            return future.result(within_s + clean_up_s)
        except CancelledError:
            # clients cancel whoever waits on a connection that dies
            raise TimeoutError("the connection ended during the call") from None
        except TimeoutError as error:
            future.cancel()
            raise TimeoutError(str(error) or f"no answer within {within_s:g} s") from error

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(_end_tasks(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        # not asyncio.Runner: it would wait for a name lookup that hangs
        self._loop.close()


async def _end_tasks() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.get_running_loop().shutdown_asyncgens()


def error_text(error: BaseException) -> str:
    text = str(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


class Link(Protocol):
    """A connection and everything subscribed on it, which is lost along with it."""

    @property
    def lost(self) -> str | None:
        """Why it no longer works; None while it does."""
        ...

    def lose(self, reason: str) -> None:
        """Make it count as lost, if it does not already."""
        ...

    async def close(self) -> None: ...


AnyLink = TypeVar("AnyLink", bound=Link)


def run_once(
    name: str,
    work: Coroutine[Any, Any, Result],
    trouble: tuple[type[BaseException], ...],
) -> Result:
    """Run a coroutine that connects by itself: nothing needs to be open.

    Args:
        name: of the source.
        trouble: what the client raises when waiting may help.
    """
    loop = EventLoop(f"txbox-{name}-examined")
    try:
        return loop.call(work, CALL_S, 2 * CLOSE_S)
    except trouble as error:
        raise BrokerUnavailable(f"{name} cannot be reached ({error_text(error)}).") from error
    finally:
        loop.close()


class LoopConsumer(Consumer, Generic[AnyLink]):
    """A consumer over an async client. It connects when it is made, and again whenever the connection is lost."""

    #: What the client raises when waiting may help.
    trouble: ClassVar[tuple[type[BaseException], ...]]

    def __init__(self, source: Source) -> None:
        super().__init__(source)
        self._link: AnyLink | None = None
        self._was_linked, self._reconnect_at, self._lost = False, 0.0, ""
        self._loop = EventLoop(f"txbox-{self.name}")

    @abstractmethod
    async def _connect(self) -> AnyLink:
        """Connect and subscribe; leaves nothing behind if that fails.

        Raises:
            ConfigurationError: the server refuses it.
        """

    def _start(self) -> None:
        """Try to connect, at the end of the subclass's `__init__`."""
        try:
            with later_if_away(self.name):
                self._linked()
        except BaseException:
            self._loop.close()
            raise

    def _linked(self, *, receiving: bool = False) -> AnyLink:
        """Return the connection; makes a new one if there is none that works.

        Raises:
            BrokerUnavailable: when `receiving`, also for a connection that was lost soon after it was made:
                that pauses the worker for a moment, and a later call connects.
        """
        link = self._link
        if link is not None and link.lost is not None:
            self._unlink(link)
            link = None
        if link is None:
            if receiving and time.monotonic() < self._reconnect_at:
                raise BrokerUnavailable(f"{self.name} lost its connection: {self._lost}.")
            link = self._link = self._call(self._connect())
            self._was_linked = True
            self._reconnect_at = time.monotonic() + _RECONNECT_S
        return link

    def _unlink(self, link: AnyLink) -> None:
        self._link, self._lost = None, link.lost or "closed"
        try:
            self._call(link.close())
        except BrokerUnavailable as error:
            _log.debug("%s left a connection behind that did not close: %s", self.name, error)

    def _call(self, work: Coroutine[Any, Any, Result], more_s: float = 0.0) -> Result:
        try:
            # a client may delay a cancellation while it closes what is already dead
            return self._loop.call(work, CALL_S + more_s, 2 * CLOSE_S)
        except ConfigurationError as error:
            raise refusal(str(error), worked=self._was_linked) from error
        except self.trouble as error:
            if self._link is not None:
                # a connection may be dead without an end: what got no answer is asked on a new one
                self._link.lose(error_text(error))
            raise BrokerUnavailable(
                f"{self.name} cannot be reached ({error_text(error)}): it will be tried again."
            ) from error

    def close(self) -> None:
        """Disconnect; the link gives back what was not settled."""
        try:
            if self._link is not None:
                self._call(self._link.close())
        finally:
            self._loop.close()


class LoopPublisher(ABC):
    """A publisher over an async client. Its loop exists from the first `publish` until `close`.

    Args:
        broker: its name, for people.
        name: as in `Publisher`.
    """

    #: What the client raises when waiting may help.
    trouble: ClassVar[tuple[type[BaseException], ...]]

    def __init__(self, broker: str, name: str) -> None:
        self.name = name
        self._broker = broker
        self._loop: EventLoop | None = None
        self._closing: set[asyncio.Task[None]] = set()

    def publish(
        self, messages: Sequence[Message[Any]], within_s: float
    ) -> Sequence[BrokerError | None]:
        if self._loop is None:
            self._loop = EventLoop(f"txbox-{self.name}")
        batch = Batch(self._broker, messages, within_s)
        try:
            self._loop.call(self._publish(batch), within_s, CLOSE_S)
        except self.trouble as error:
            self._loop.call(self._disconnected(), CLOSE_S)
            batch.lose(
                f"{self.name} is unavailable ({error_text(error)}): it will be tried again.", error
            )
        return batch.outcome()

    def close(self) -> None:
        loop, self._loop = self._loop, None
        if loop is not None:
            try:
                loop.call(self._disconnected(wait=True), 2 * CLOSE_S)
            finally:
                loop.close()

    # -- on the loop --------------------------------------------------------------------------

    @abstractmethod
    async def _publish(self, batch: Batch) -> None:
        """Connect if necessary, send, and collect the answers, all before `batch.until`."""

    @abstractmethod
    def _disconnect(self) -> None:
        """Drop the connection, if there is one: what is unsent must not be sent later."""

    async def _disconnected(self, *, wait: bool = False) -> None:
        self._disconnect()
        if wait:
            await asyncio.gather(*self._closing)

    def _close_later(self, closing: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(closing)
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)
