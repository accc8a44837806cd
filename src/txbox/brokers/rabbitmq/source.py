"""RabbitMQ: queues, the channel that consumes them, and deliveries as messages, whatever bytes they have."""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from functools import partial
from typing import Any, cast

import aio_pika
from aiormq.abc import AbstractChannel, DeliveredMessage
from aiormq.exceptions import (
    AuthenticationError,
    ChannelAccessRefused,
    ChannelNotFoundEntity,
    ChannelPreconditionFailed,
    ConnectionNotAllowed,
    ProbableAuthenticationError,
)
from pamqp import commands
from yarl import URL

from txbox.brokers import facts
from txbox.brokers.base import Context, Delivery, Source, refuse, taken
from txbox.brokers.envelope import RABBITMQ
from txbox.brokers.loop import LoopConsumer, error_text, run_once
from txbox.brokers.rabbitmq.client import HEARTBEAT_S, TROUBLE, Connection, close_quietly
from txbox.brokers.rabbitmq.publisher import RabbitMQPublisher
from txbox.errors import BrokerUnavailable, ConfigurationError
from txbox.message import HeaderValue

_NAME_BYTES_MAX = 255
_PREFETCH_MAX = 65_535
_REFUSED = {
    "no_ack": "txbox acknowledges by itself, and only what is stored",
    "auto_ack": "txbox acknowledges by itself, and only what is stored",
    "prefetch_count": "it is called prefetch here",
    "requeue": "failures are retried from the database; nothing goes back into a queue",
    "connection_class": "txbox reconnects by itself",
}
_OPTIONS = {"ssl_context", "client_properties"}
_MISTAKES = (
    AuthenticationError,
    ProbableAuthenticationError,
    ConnectionNotAllowed,
    ChannelAccessRefused,
    ChannelPreconditionFailed,
)
_SHOWN_PROPERTIES = ("correlation_id", "reply_to", "app_id", "user_id", "content_encoding")


class RabbitMQ(Source):
    """Consumes RabbitMQ queues, classic or quorum. A topic is the name of a queue.

    Args:
        url: "amqp://user:password@host:5672/vhost" or "amqps://…", with the query options of aio-pika.
        queues: the queues to consume; by default those that handlers name as topics. They must exist:
            declaring queues, bindings and policies is up to you.
        prefetch: how many deliveries per queue may be unacknowledged at a time; all are in memory.
        consumer_timeout: the server's setting (`consumer_timeout`, 30 minutes by default), after which
            it takes back what is unacknowledged. None if it is switched off.
        arguments: of the consumers, such as {"x-priority": 10}.
        check: how long a consumer may be silent before the server is asked whether it still exists.
        single_active_consumer: the queues are declared with `x-single-active-consumer`, so that one
            consumer at a time gets all messages in order; `ordered=True` needs it.
        exchange: where messages are published, with the topic as routing key; "" is the default
            exchange, where the topic is the name of a queue.
        management: the server's HTTP API, "http://user:password@host:15672", used only by `txbox doctor`, because
            AMQP does not show the settings of queues. The user needs the tag `monitoring`, or `management`.
        options: `ssl_context` and `client_properties` of `aio_pika.connect`.

    There is no weak id, because a delivery tag means nothing outside its channel. Header values that are
    not text become text: numbers, true and false, ISO times, JSON for tables and arrays; bytes stay bytes.

    Guarantee: a message is acknowledged only after it is stored, on the channel that delivered it, and
    is never rejected or requeued. When the channel or its consumer dies, the source reconnects; what
    was unacknowledged comes again and is a duplicate.
    """

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
        management: str | None = None,
        **options: Any,
    ) -> None:
        self._url = _checked_url(url)
        self.topics = None if queues is None else _checked_queues(queues)
        if not 1 <= prefetch <= _PREFETCH_MAX:
            raise ConfigurationError(
                f"prefetch is {prefetch}: it must be 1 to {_PREFETCH_MAX}; 0 would mean unlimited."
            )
        _check_options(options)
        if not (management or "http://").startswith(("http://", "https://")):
            raise ConfigurationError(
                "management= of RabbitMQ must be an address such as http://user:password@host:15672."
            )
        self._single_active_consumer = single_active_consumer
        self._exchange = exchange
        self._management = management
        self._options = options
        self._where = f"{self._url.host}:{self._url.port or 5672}{self._url.path or '/'}"
        self.name = f"rabbitmq:{self._where}:{','.join(self.topics or ('*',))}"
        # the server takes an unacknowledged delivery back
        self.redelivery_s = None if consumer_timeout is None else consumer_timeout.total_seconds()
        self._consumed = partial(
            RabbitMQConsumer, self, partial(Connection, self._url, **options),
            where=self._where, prefetch=prefetch, arguments=dict(arguments or {}), check_s=check.total_seconds(),
        )  # fmt: skip

    def keeps_order(self, topic: str) -> bool:
        """Consumers of a queue take turns, message by message, unless only one is active at a time."""
        return self._single_active_consumer

    def publisher(self) -> RabbitMQPublisher:
        return RabbitMQPublisher(
            self._url, self._options, exchange=self._exchange, where=self._where
        )

    def consumer(self, topics: Sequence[str], context: Context) -> RabbitMQConsumer:
        if self.topics is None and "*" in topics:
            raise ConfigurationError(
                f"{self.name} cannot list the server's queues: pass queues= to RabbitMQ(…)."
            )
        every = not topics or "*" in topics
        return self._consumed((self.topics or ()) if every else _checked_queues(topics))

    def examine(self, topics: Sequence[str]) -> Sequence[facts.Facts]:
        """Ask for the settings of queues; without `management=`, only whether they exist."""
        queues = (self.topics or ()) if "*" in topics else topics
        if self._management is not None:
            return facts.of_rabbitmq(self._management, self._url.raw_path, queues)
        existing = run_once(self.name, self._existing(queues), TROUBLE)
        return [facts.of_amqp(queue, found=queue in existing) for queue in queues]

    async def _existing(self, queues: Iterable[str]) -> set[str]:
        connection = Connection(self._url, **self._options)
        existing: set[str] = set()
        try:
            await connection.connect()
            for queue in queues:
                # a missing queue closes the channel
                channel = await connection.opened_channel(publisher_confirms=False)
                with suppress(ChannelNotFoundEntity):
                    await (await channel.get_underlay_channel()).queue_declare(queue, passive=True)
                    existing.add(queue)
        finally:
            await close_quietly(connection)
        return existing


class RabbitMQConsumer(LoopConsumer["Link"]):
    """Consumes queues, on a connection that it makes again when it is lost. See `RabbitMQ`."""

    trouble = TROUBLE

    def __init__(
        self,
        source: RabbitMQ,
        make_connection: Callable[[], Connection],
        queues: Sequence[str],
        *,
        where: str,
        prefetch: int,
        arguments: Mapping[str, Any],
        check_s: float,
    ) -> None:
        super().__init__(source)
        self._make_connection = make_connection
        self._queues = queues
        self._where = where
        self._prefetch = prefetch
        self._arguments = arguments
        self._check_s = check_s
        self._start()

    async def _connect(self) -> Link:
        link = Link(self._make_connection())
        try:
            await link.consume(self._queues, self._prefetch, self._arguments)
        except BaseException as error:
            await link.close()
            if isinstance(error, _MISTAKES):
                raise ConfigurationError(
                    f"RabbitMQ at {self._where} rejects this consumer ({error_text(error)}): "
                    "check user, password, vhost, permissions and arguments."
                ) from error
            raise
        return link

    def receive(self, messages_max: int, wait_s: float) -> Sequence[Delivery]:
        link = self._linked(receiving=True)
        found = link.take(messages_max, wait_s)
        if not found and link.lost is None and link.silent_s() > self._check_s:
            with suppress(BrokerUnavailable):
                self._call(link.check(self._queues))
        return found

    def settle(self, deliveries: Sequence[Delivery]) -> None:
        link = self._link
        tags = [delivery.tag[1] for delivery in deliveries if delivery.tag[0] is link]
        if link is None or link.lost is not None or not tags:
            # tags of a channel that is gone: the queue has these messages again
            return
        try:
            self._call(link.acknowledge(tags))
        except BrokerUnavailable as error:
            error.failed = len(tags)
            raise


class Link:
    """One connection with one channel and its consumers. Delivery tags mean nothing outside it.

    Everything except `take` and `lost` runs on the loop's thread.
    """

    def __init__(self, connection: Connection) -> None:
        self.lost: str | None = None
        self._connection = connection
        self._owner: aio_pika.abc.AbstractChannel | None = None
        self._channel: AbstractChannel | None = None
        self._last_tag = 0
        self._unsettled: dict[int, None] = {}
        self._arrived: deque[tuple[str, DeliveredMessage]] = deque()
        self._changed = threading.Condition()
        self._heard_at = time.monotonic()

    async def consume(
        self, queues: Sequence[str], prefetch: int, arguments: Mapping[str, Any]
    ) -> None:
        await self._connection.connect()
        self._connection.close_callbacks.add(self._closed)
        channel = await self._connection.opened_channel(publisher_confirms=False)
        channel.close_callbacks.add(self._closed)
        # aio-pika closes a channel nobody holds a reference to
        self._owner = channel
        self._channel = await channel.get_underlay_channel()
        self._channel.on_consumer_cancel_callbacks.add(self._cancelled)
        await self._channel.basic_qos(prefetch_count=prefetch)
        for queue in queues:
            try:
                await self._channel.queue_declare(queue, passive=True)
            except ChannelNotFoundEntity as error:
                raise ConfigurationError(
                    f"RabbitMQ has no queue {queue!r}: declare it before the worker starts, or correct the topic."
                ) from error
        # every queue knows this argument, with this default, but a stream refuses it
        arguments = {"x-priority": 0, **arguments}
        for queue in queues:
            try:
                await self._channel.basic_consume(
                    queue, self._receiver(queue), no_ack=False, arguments=arguments
                )
            except ChannelPreconditionFailed as error:
                said = error_text(error)
                if "'x-priority'" not in said or "of queue type" not in said:
                    raise
                raise ConfigurationError(
                    f"{queue!r} is a stream, which keeps no acknowledgements: a restart would skip messages or "
                    "get all of them again. Consume a classic or quorum queue bound to the same exchange."
                ) from error

    def _receiver(self, queue: str) -> Any:
        async def receive(delivered: DeliveredMessage) -> None:
            tag = delivered.delivery_tag
            assert tag is not None
            if tag != self._last_tag + 1:
                # a multiple acknowledgement must never cover a tag we do not know
                self.lose(f"delivery {tag} came after delivery {self._last_tag}")
                return
            self._last_tag = tag
            self._unsettled[tag] = None
            with self._changed:
                self._arrived.append((queue, delivered))
                self._changed.notify_all()

        return receive

    def take(self, messages_max: int, wait_s: float) -> list[Delivery]:
        """Wait for the first delivery; returns early and empty if the link is lost."""
        with self._changed:
            self._changed.wait_for(lambda: self._arrived or self.lost is not None, wait_s)
            if self.lost is not None:
                # their tags are dead: the queue has the messages again
                return []
            found = taken(self._arrived, messages_max)
        if found:
            self._heard_at = time.monotonic()
        mark = self._connection.frames.mark
        return [
            delivery_of(queue, delivered, mark, (self, delivered.delivery_tag))
            for queue, delivered in found
        ]

    def silent_s(self) -> float:
        return time.monotonic() - self._heard_at

    async def check(self, queues: Sequence[str]) -> None:
        """Ask the server whether our queues still have consumers."""
        assert self._channel is not None
        for queue in queues:
            answer = await self._channel.queue_declare(queue, passive=True)
            if not answer.consumer_count:
                self.lose(f"the server no longer has a consumer for queue {queue!r}")
        self._heard_at = time.monotonic()

    async def acknowledge(self, tags: Sequence[int]) -> None:
        assert self._channel is not None
        done = {tag for tag in tags if tag in self._unsettled}
        front = 0
        for tag in list(self._unsettled):
            if tag not in done:
                break
            front = tag
            done.discard(tag)
            del self._unsettled[tag]
        for tag in done:
            del self._unsettled[tag]
            await self._channel.basic_ack(tag, wait=False)
        if front:
            # all older ones are acknowledged too: one frame covers the whole front
            await self._channel.basic_ack(front, multiple=True)

    def lose(self, reason: str) -> None:
        with self._changed:
            self.lost = self.lost or reason
            self._arrived.clear()
            self._changed.notify_all()

    async def _closed(self, _sender: object, error: BaseException | None = None) -> None:
        self.lose(error_text(error) if error is not None else "closed")

    async def _cancelled(self, _frame: object) -> None:
        self.lose("the server cancelled the consumer (its queue was deleted or moved)")

    async def close(self) -> None:
        self.lose("closed")
        await close_quietly(self._connection)


def delivery_of(queue: str, delivered: DeliveredMessage, unreadable: str, tag: object) -> Delivery:
    """Return what the server delivered, as a message or as a problem.

    Args:
        unreadable: what `CheckedTransport` puts in place of properties that cannot be decoded.
    """
    frame = cast("commands.Basic.Deliver", delivered.delivery)
    redelivered, properties = bool(frame.redelivered), delivered.header.properties
    if properties.content_type == unreadable:
        problem = (
            "The AMQP properties or headers of this message cannot be decoded (text that is not "
            "UTF-8, an unknown type or an impossible time): fix the publisher."
        )
        return Delivery(None, queue, tag, problem, delivered.body, redelivered)
    try:
        headers = [
            (name, _header_value(value)) for name, value in (properties.headers or {}).items()
        ]
    except RecursionError:
        problem = (
            "The AMQP headers of this message are nested too deeply to store: fix the publisher."
        )
        return Delivery(None, queue, tag, problem, delivered.body, redelivered)
    origin: dict[str, Any] = {
        "queue": queue,
        "exchange": frame.exchange or "",
        "routing_key": frame.routing_key or "",
    }
    for name in _SHOWN_PROPERTIES:
        if value := getattr(properties, name):
            origin[name] = value
    at = properties.timestamp
    return RABBITMQ.delivery(
        queue,
        delivered.body,
        headers,
        tag=tag,
        redelivered=redelivered,
        origin=origin,
        # clients that always send the property leave it empty; then the headers decide
        message_id=properties.message_id or None,
        message_type=properties.message_type,
        content_type=properties.content_type,
        time=at if at is None or at.tzinfo is not None else at.replace(tzinfo=UTC),
    )


def _header_value(value: Any) -> HeaderValue:
    if value is None or isinstance(value, str | bytes):
        return value
    if isinstance(value, bytearray):
        return bytes(value)
    if isinstance(value, dict | list):
        return json.dumps(value, default=_json_value, ensure_ascii=False)
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(_json_value(value))


def _json_value(value: object) -> object:
    if isinstance(value, bytes | bytearray):
        return f"hex:{value.hex()}"
    if isinstance(value, datetime):
        return value.isoformat()
    return str(value) if isinstance(value, Decimal) else repr(value)


def _checked_url(url: str) -> URL:
    try:
        parsed = URL(url)
    except ValueError:
        parsed = URL()
    if parsed.scheme not in ("amqp", "amqps") or not parsed.host:
        # not shown: it may contain a password
        raise ConfigurationError(
            "The URL of RabbitMQ(…) is invalid: use amqp://user:password@host:5672/vhost."
        )
    heartbeat = parsed.query.get("heartbeat", str(HEARTBEAT_S))
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
                f"{queue!r} is not a valid queue name: RabbitMQ allows 1 to {_NAME_BYTES_MAX} bytes."
            )
    if not found:
        raise ConfigurationError("RabbitMQ(…) has no queues to consume: pass queues=.")
    return found


def _check_options(options: Mapping[str, Any]) -> None:
    refuse(options, _REFUSED, "RabbitMQ(…) does not take {option}=: {why}.")
    for name in options:
        if name not in _OPTIONS:
            raise ConfigurationError(
                f"RabbitMQ(…) has no option {name!r}: connection options go into the URL's query."
            )
