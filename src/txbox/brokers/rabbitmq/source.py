"""RabbitMQ queues, by aio-pika on an event loop of its own."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import CancelledError as FutureCancelledError
from datetime import timedelta
from typing import Any, TypeVar

from aiormq.exceptions import (
    AMQPError,
    AuthenticationError,
    ChannelAccessRefused,
    ChannelInvalidStateError,
    ChannelPreconditionFailed,
    ConnectionNotAllowed,
    ProbableAuthenticationError,
)
from yarl import URL

from txbox.brokers.base import Delivery, InFlight, Progress
from txbox.brokers.rabbitmq.link import CLOSE_S, Connection, Link, MissingQueueError, shown
from txbox.brokers.rabbitmq.publisher import RabbitMQPublisher
from txbox.errors import BrokerUnavailable, ConfigurationError

_log = logging.getLogger("txbox")

_CALL_S = 10.0
_SLACK_S = 5.0
_HEARTBEAT_S = 20
_RETRY_S = (0.1, 5.0)
_STEADY_S = 10.0
_NAME_BYTES_MAX = 255
_PREFETCH_MAX = 65_535
_REFUSED = {
    "no_ack": "only what is stored may be acknowledged, and only by txbox",
    "auto_ack": "only what is stored may be acknowledged, and only by txbox",
    "prefetch_count": "it is named prefetch here",
    "requeue": "failures are retried from the database, nothing is put back into a queue",
    "connection_class": "txbox reconnects by itself",
}
_OPTIONS = {"ssl_context", "client_properties"}
# at the first connection these are mistakes; later they may be repairs under way
_NEVER = (
    AuthenticationError,
    ProbableAuthenticationError,
    ConnectionNotAllowed,
    ChannelAccessRefused,
    ChannelPreconditionFailed,
)
# the client lets StopAsyncIteration out when a server hangs up during the handshake
_TROUBLE = (AMQPError, ChannelInvalidStateError, OSError, TimeoutError, StopAsyncIteration)

_T = TypeVar("_T")


class RabbitMQ:
    """Consumes RabbitMQ queues, classic or quorum; a topic is the name of a queue.

    Args:
        url: "amqp://user:password@host:5672/vhost" or "amqps://…", with the query options of aio-pika.
        queues: the queues to consume; without them, those that handlers name as topics. They must
            exist: queues, bindings and policies are yours to declare.
        prefetch: deliveries of each queue that may be unacknowledged at a time; each is held in memory.
        consumer_timeout: what the server is set to (`consumer_timeout`, 30 minutes by default): it
            takes back what is unacknowledged for longer. None when it is switched off.
        arguments: of the consumers, such as {"x-priority": 10}.
        check: how long a silent consumer is trusted before the server is asked whether it exists.
        single_active_consumer: the queues are declared with `x-single-active-consumer`, so that one
            consumer at a time gets all messages, in their order; `ordered=True` needs it.
        exchange: where messages are published to, with the topic as routing key; "" is the default
            exchange, on which the topic is the name of a queue.
        options: `ssl_context` and `client_properties` of `aio_pika.connect`.

    The id is the `message_id` property, else a `message-id` header or CloudEvents `id` and `source`
    (headers with `cloudEvents:`, `ce-` or `ce_`). There is no weak id: a delivery tag names nothing
    beyond its channel. The type is the `type` property, else a header `type` or the CloudEvents type;
    the key is a header `key`, else the CloudEvents `partitionkey`, else `subject`. Header values
    that are no text become text: numbers, true and false, ISO times, JSON for tables and arrays;
    bytes stay bytes.

    Guarantee: a message is acknowledged only after it is stored, on the channel that delivered it,
    and is never rejected or requeued. When the channel or its consumer dies, the source connects
    again; what was unacknowledged comes again and is found to be a duplicate.
    """

    tend_every_s: float | None = None  # the server offers no extension of its time-out
    exhausted = False

    def __init__(
        self,
        url: str,
        *,
        queues: Iterable[str] | None = None,
        prefetch: int = 200,
        consumer_timeout: timedelta | None = timedelta(minutes=30),
        arguments: Mapping[str, Any] | None = None,
        check: timedelta = timedelta(seconds=30),
        single_active_consumer: bool = False,
        exchange: str = "",
        **options: Any,
    ) -> None:
        self._url = _checked_url(url)
        self._given = None if queues is None else _checked_queues(queues)
        if not 1 <= prefetch <= _PREFETCH_MAX:
            raise ConfigurationError(
                f"prefetch is {prefetch}: it must be 1 to {_PREFETCH_MAX}, 0 would mean no bound at all."
            )
        _check_options(options)
        self._prefetch = prefetch
        self._consumer_timeout = consumer_timeout
        self._arguments = dict(arguments or {})
        self._check_s = check.total_seconds()
        self._single_active_consumer = single_active_consumer
        self._exchange = exchange
        self._options = options
        self._queues: tuple[str, ...] = ()
        self._link: Link | None = None
        self._was_linked = False
        self._failures = 0
        self._retry_at = 0.0
        self._reason = ""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    @property
    def name(self) -> str:
        return f"rabbitmq:{self._where}:{','.join(self._given or ('*',))}"

    @property
    def topics(self) -> Sequence[str] | None:
        return self._given

    @property
    def redelivery_s(self) -> float | None:
        """Seconds after which the server takes an unacknowledged delivery back."""
        return None if self._consumer_timeout is None else self._consumer_timeout.total_seconds()

    def keeps_order(self, topic: str) -> bool:  # noqa: ARG002  # every one
        """Several consumers of a queue take turns, message by message, unless one is active at a time."""
        return self._single_active_consumer

    def publisher(self) -> RabbitMQPublisher:
        return RabbitMQPublisher(
            self._url, self._options, exchange=self._exchange, where=self._where
        )

    @property
    def _where(self) -> str:
        return f"{self._url.host}:{self._url.port or 5672}{self._url.path or '/'}"

    def open(
        self,
        topics: Sequence[str],
        progress: Progress,  # noqa: ARG002  # the server remembers
        in_flight: InFlight,  # noqa: ARG002  # it takes back without asking
    ) -> None:
        if self._given is None and "*" in topics:
            raise ConfigurationError(
                f"{self.name} cannot list the queues of the server: pass queues= to RabbitMQ(…)."
            )
        named = [topic for topic in topics if topic != "*"]
        self._queues = _checked_queues(named) if named else self._given or ()
        self._was_linked, self._failures, self._retry_at = False, 0, 0.0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=_serve, args=(self._loop,), name="txbox-rabbitmq", daemon=True
        )
        self._thread.start()
        try:
            self._connect()
        except BrokerUnavailable as error:
            # a server that is away when the worker starts is waited for as it is later
            _log.debug("%s", error)

    def receive(self, messages_max: int, wait_s: float) -> Sequence[Delivery]:
        link = self._link
        if link is not None and link.lost is not None:
            raise self._unlinked(link)
        if link is None:
            link = self._connect()
        taken = link.take(messages_max, wait_s)
        if not taken and link.lost is None and link.silent_s() > self._check_s:
            try:
                self._call(link.check(self._queues))
            except _TROUBLE as error:
                link.lose(shown(error))
        return taken

    def tend(self, deliveries: Sequence[Delivery]) -> None:
        """Nothing: the server counts from the delivery, and nothing extends it."""

    def settle(self, deliveries: Sequence[Delivery]) -> None:
        link = self._link
        tags = [delivery.tag[1] for delivery in deliveries if delivery.tag[0] is link]
        if link is None or link.lost is not None or not tags:
            # tags of a channel that is gone: the queue has these messages again
            return
        try:
            self._call(link.acknowledge(tags))
        except _TROUBLE as error:
            link.lose(shown(error))
            raise BrokerUnavailable(
                f"{self.name} could not acknowledge ({shown(error)}): the messages come again.",
                failed=len(tags),
            ) from error

    def close(self) -> None:
        loop, thread = self._loop, self._thread
        if loop is None or thread is None:
            return
        try:
            if self._link is not None:
                self._close(self._link)
        finally:
            self._link = self._loop = self._thread = None
            loop.call_soon_threadsafe(loop.stop)
            thread.join()

    # -- the connection -----------------------------------------------------------------------

    def _connect(self) -> Link:
        """Connect and consume, not sooner after a failure than the back-off allows."""
        if time.monotonic() < self._retry_at:
            raise BrokerUnavailable(self._reason)
        try:
            link = self._link = self._call(self._linked(), _CALL_S + CLOSE_S)
        except MissingQueueError as error:
            message = (
                f"The queue {str(error)!r} does not exist on RabbitMQ at {self._where}: "
                "declare it before the worker starts, or correct the topic of the handler."
            )
            if not self._was_linked:
                raise ConfigurationError(message) from error
            raise self._failed(message) from error
        except _NEVER as error:
            message = (
                f"RabbitMQ at {self._where} refuses this consumer ({shown(error)}): "
                "check user, password, vhost, permissions and arguments."
            )
            if not self._was_linked:
                raise ConfigurationError(message) from error
            raise self._failed(message) from error
        except _TROUBLE as error:
            raise self._failed(
                f"RabbitMQ at {self._where} cannot be reached ({shown(error)}): it is tried again."
            ) from error
        self._was_linked = True
        return link

    async def _linked(self) -> Link:
        url = self._url
        if "heartbeat" not in url.query:
            url = url.update_query(heartbeat=_HEARTBEAT_S)
        link = Link(Connection(url, **self._options))
        try:
            async with asyncio.timeout(_CALL_S):
                await link.consume(self._queues, self._prefetch, self._arguments)
        except BaseException:
            await _close_quietly(link)
            raise
        return link

    def _unlinked(self, link: Link) -> BrokerUnavailable:
        self._link = None
        if time.monotonic() - link.made_at < _STEADY_S:
            lost = self._failed(f"{self.name} lost its consumer again: {link.lost}.")
        else:
            self._failures = 0
            lost = BrokerUnavailable(f"{self.name} lost its consumer: {link.lost}.")
        self._close(link)
        return lost

    def _failed(self, reason: str) -> BrokerUnavailable:
        first_s, longest_s = _RETRY_S
        self._reason = reason
        self._retry_at = time.monotonic() + min(first_s * 2 ** min(self._failures, 10), longest_s)
        self._failures += 1
        return BrokerUnavailable(reason)

    def _close(self, link: Link) -> None:
        try:
            self._call(_close_quietly(link))
        except TimeoutError:
            _log.warning("%s left a connection behind that did not close.", self.name)

    def _call(self, work: Coroutine[Any, Any, _T], within_s: float = _CALL_S) -> _T:
        assert self._loop is not None

        async def bounded() -> _T:
            async with asyncio.timeout(within_s):
                return await work

        task = asyncio.run_coroutine_threadsafe(bounded(), self._loop)
        try:
            # the client may hold on to a cancellation while it closes what is dead already
            return task.result(within_s + CLOSE_S + _SLACK_S)
        except FutureCancelledError:
            # the client cancels who waits on a connection that dies
            raise TimeoutError("the connection ended during the call") from None


async def _close_quietly(link: Link) -> None:
    try:
        await link.close()
    except (*_TROUBLE, asyncio.CancelledError) as error:
        # the server takes back what was unacknowledged when it notices by itself
        _log.debug("A connection did not close cleanly: %s", shown(error))


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.get_loop().run_forever()


def _checked_url(url: str) -> URL:
    try:
        parsed = URL(url)
    except ValueError:
        parsed = URL()
    if parsed.scheme not in ("amqp", "amqps") or not parsed.host:
        # not shown: it may hold a password
        raise ConfigurationError(
            "The URL of RabbitMQ(…) is none: write amqp://user:password@host:5672/vhost."
        )
    heartbeat = parsed.query.get("heartbeat", str(_HEARTBEAT_S))
    if not heartbeat.isdecimal() or int(heartbeat) == 0:
        raise ConfigurationError(
            f"heartbeat={heartbeat} would leave a dead connection unnoticed: use 5 to 60 seconds."
        )
    return parsed


def _checked_queues(queues: Iterable[str]) -> tuple[str, ...]:
    found = (queues,) if isinstance(queues, str) else tuple(dict.fromkeys(queues))
    for queue in found:
        if not queue or len(queue.encode()) > _NAME_BYTES_MAX:
            raise ConfigurationError(
                f"{queue!r} is no name of a queue: RabbitMQ allows 1 to {_NAME_BYTES_MAX} bytes."
            )
    if not found:
        raise ConfigurationError("RabbitMQ(…) has no queue to consume: pass queues=.")
    return found


def _check_options(options: Mapping[str, Any]) -> None:
    for name in options:
        if name in _REFUSED:
            raise ConfigurationError(f"RabbitMQ(…) refuses {name}=: {_REFUSED[name]}.")
        if name not in _OPTIONS:
            raise ConfigurationError(
                f"RabbitMQ(…) knows no option {name!r}: connection options go into the URL's query."
            )
