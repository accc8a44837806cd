"""One AMQP 0-9-1 connection: its consumers, and their deliveries as messages, whatever bytes they hold."""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import struct
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any, cast

import aio_pika
import pamqp.frame
from aiormq.abc import AbstractChannel, DeliveredMessage
from aiormq.connection import TCPTransportFactory, TLSTransportFactory, TransportFactory
from aiormq.exceptions import (
    AMQPConnectionError,
    AMQPError,
    ChannelInvalidStateError,
    ChannelNotFoundEntity,
)
from pamqp import commands, header
from yarl import URL

from txbox.brokers.base import Delivery
from txbox.brokers.envelope import RABBITMQ, text_or_hex
from txbox.message import HeaderValue

_log = logging.getLogger("txbox")

CLOSE_S = 5.0
HEARTBEAT_S = 20
#: What waiting can cure. The client leaks StopAsyncIteration if a server hangs up during the handshake.
TROUBLE = (AMQPError, ChannelInvalidStateError, OSError, TimeoutError, StopAsyncIteration)
_FRAME_HEADER_BYTES = 7
_METHOD, _CONTENT_HEADER = 1, 2
_DELIVER = struct.pack(">HH", 60, 60)
_SHOWN_PROPERTIES = ("correlation_id", "reply_to", "app_id", "user_id", "content_encoding")


class MissingQueueError(Exception):
    """A queue does not exist."""


class Link:
    """One connection with one channel and its consumers. Delivery tags mean nothing outside it.

    Everything except `take` and `lost` runs on the loop's thread.
    """

    def __init__(self, connection: Connection) -> None:
        self.lost: str | None = None
        self.made_at = time.monotonic()
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
                raise MissingQueueError(queue) from error
        for queue in queues:
            await self._channel.basic_consume(
                queue, self._receiver(queue), no_ack=False, arguments=dict(arguments)
            )

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
            count = min(messages_max, len(self._arrived))
            taken = [self._arrived.popleft() for _ in range(count)]
        if taken:
            self._heard_at = time.monotonic()
        mark = self._connection.frames.mark
        return [
            delivery_of(queue, delivered, mark, (self, delivered.delivery_tag))
            for queue, delivered in taken
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
        self.lose(shown(error) if error is not None else "closed")

    async def _cancelled(self, _frame: object) -> None:
        self.lose("the server cancelled the consumer (its queue was deleted or moved)")

    async def close(self) -> None:
        self.lose("closed")
        await close_quietly(self._connection)


def shown(error: BaseException) -> str:
    text = str(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


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


class Connection(aio_pika.Connection):
    """A connection with heartbeats that survives frames the client cannot decode."""

    def __init__(self, url: URL, *args: Any, **options: Any) -> None:
        if "heartbeat" not in url.query:
            url = url.update_query(heartbeat=HEARTBEAT_S)
        super().__init__(url, *args, **options)
        self.frames = CheckedTransport(url)
        self.kwargs["transport_factory"] = self.frames

    async def opened_channel(self, **options: Any) -> aio_pika.abc.AbstractChannel:
        """Open a channel.

        Raises:
            AMQPConnectionError: the connection has ended, which the client reports as a bare RuntimeError.
        """
        try:
            return await self.channel(**options)
        except RuntimeError as error:
            if self.transport is not None and not self.transport.connection.is_closed:
                raise
            raise AMQPConnectionError("the connection has ended") from error


async def close_quietly(connection: Connection) -> None:
    try:
        async with asyncio.timeout(CLOSE_S):
            await connection.close()
    except (*TROUBLE, asyncio.CancelledError) as error:
        # the server notices by itself, and takes back what was unacknowledged
        _log.debug("A connection did not close cleanly: %s", shown(error))


class CheckedTransport(TransportFactory):
    """The client's own transport, which replaces content headers it cannot decode with marked ones.

    The server passes on the bytes of properties and headers unchecked. The client closes the connection
    when it cannot decode them, so a single message would block a queue for ever.
    """

    def __init__(self, url: URL) -> None:
        self._inner: TransportFactory = (
            TLSTransportFactory() if url.scheme == "amqps" else TCPTransportFactory()
        )
        #: Random, so no publisher can send it.
        self.mark = f"unreadable:{secrets.token_hex(16)}"

    async def create(
        self, url: URL, **options: Any
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await self._inner.create(url, **options)
        return cast("asyncio.StreamReader", _Frames(reader, self.mark)), writer


class _Frames:
    """The part of StreamReader the client uses. Reads frame by frame and returns checked bytes."""

    def __init__(self, reader: asyncio.StreamReader, mark: str) -> None:
        self._reader = reader
        self._mark = mark
        self._held = memoryview(b"")

    def at_eof(self) -> bool:
        return not self._held and self._reader.at_eof()

    async def read(self, length: int = -1) -> bytes:
        return await self._reader.read(length)

    async def readexactly(self, length: int) -> bytes:
        if not self._held:
            self._held = memoryview(await self._next())
        found, self._held = bytes(self._held[:length]), self._held[length:]
        return found

    async def _next(self) -> bytes:
        start = await self._reader.readexactly(_FRAME_HEADER_BYTES)
        kind, channel, length = struct.unpack(">BHI", start)
        if start.startswith(b"AMQP"):
            # a server that refuses the protocol version replies with its own, in eight bytes
            return start + await self._reader.readexactly(1)
        frame = start + await self._reader.readexactly(length + 1)
        if kind == _CONTENT_HEADER and not _readable(frame):
            (size,) = struct.unpack_from(">Q", frame, _FRAME_HEADER_BYTES + 4)
            marked = commands.Basic.Properties(content_type=self._mark)
            return pamqp.frame.marshal(
                header.ContentHeader(body_size=size, properties=marked), channel
            )
        if (
            kind == _METHOD
            and frame.startswith(_DELIVER, _FRAME_HEADER_BYTES)
            and not _readable(frame)
        ):
            return _with_readable_names(frame, channel)
        return frame


def _readable(frame: bytes) -> bool:
    try:
        pamqp.frame.unmarshal(frame)
    except Exception:  # noqa: BLE001  # untrusted bytes, in a decoder that may raise anything
        return False
    return True


def _with_readable_names(frame: bytes, channel: int) -> bytes:
    """Rewrite a Basic.Deliver whose exchange or routing key is not UTF-8."""
    content = frame[_FRAME_HEADER_BYTES + 4 : -1]
    consumer_tag, at = _short_text(content, 0)
    delivery_tag, redelivered = struct.unpack_from(">QB", content, at)
    exchange, at = _short_text(content, at + 9)
    routing_key, _ = _short_text(content, at)
    deliver = commands.Basic.Deliver(
        consumer_tag, delivery_tag, bool(redelivered), exchange, routing_key
    )
    return pamqp.frame.marshal(deliver, channel)


def _short_text(content: bytes, at: int) -> tuple[str, int]:
    """Read a short string of up to 255 bytes; returns it and the position after it."""
    end = at + 1 + content[at]
    return text_or_hex(content[at + 1 : end])[:255], end
