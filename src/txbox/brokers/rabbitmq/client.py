"""An AMQP 0-9-1 connection that survives whatever bytes a publisher put into properties and headers."""

from __future__ import annotations

import asyncio
import secrets
import struct
from typing import Any, cast

import aio_pika
import pamqp.frame
from aiormq.connection import TCPTransportFactory, TLSTransportFactory, TransportFactory
from aiormq.exceptions import AMQPConnectionError, AMQPError, ChannelInvalidStateError
from pamqp import commands, header
from yarl import URL

from txbox.boundaries import log as _log
from txbox.brokers.envelope import text_or_hex
from txbox.brokers.loop import CLOSE_S, error_text

HEARTBEAT_S = 20
#: What waiting can cure. The client leaks StopAsyncIteration if a server hangs up during the handshake.
TROUBLE = (AMQPError, ChannelInvalidStateError, OSError, TimeoutError, StopAsyncIteration)
_FRAME_HEADER_BYTES = 7
_METHOD, _CONTENT_HEADER = 1, 2
_DELIVER = struct.pack(">HH", 60, 60)
_BLOCKED, _UNBLOCKED = struct.pack(">HH", 10, 60), struct.pack(">HH", 10, 61)
# of a content header: where its flags are, the properties before the timestamp (by flag; 0 bytes stand for a short
# string), and the flag of the timestamp
_FLAGS_AT = _FRAME_HEADER_BYTES + 12
_HEADERS = 13
_BEFORE_TIMESTAMP = {15: 0, 14: 0, _HEADERS: 4, 12: 1, 11: 1, 10: 0, 9: 0, 8: 0, 7: 0}
_TIMESTAMP = 1 << 6


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
        _log.debug("A connection did not close cleanly: %s", error_text(error))


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
        #: Why the server takes no messages on this connection: an alarm of its memory or disk.
        self.blocked: str | None = None

    async def create(
        self, url: URL, **options: Any
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await self._inner.create(url, **options)
        return cast("asyncio.StreamReader", _Frames(reader, self)), writer


class _Frames:
    """The part of StreamReader the client uses. Reads frame by frame and returns checked bytes."""

    def __init__(self, reader: asyncio.StreamReader, transport: CheckedTransport) -> None:
        self._reader = reader
        self._transport = transport
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
            timeless = _without_timestamp(frame)
            if _readable(timeless):
                return timeless
            (size,) = struct.unpack_from(">Q", frame, _FRAME_HEADER_BYTES + 4)
            marked = commands.Basic.Properties(content_type=self._transport.mark)
            return pamqp.frame.marshal(
                header.ContentHeader(body_size=size, properties=marked), channel
            )
        if (
            kind == _METHOD
            and frame.startswith(_DELIVER, _FRAME_HEADER_BYTES)
            and not _readable(frame)
        ):
            return _with_readable_names(frame, channel)
        if channel == 0 and kind == _METHOD and frame.startswith(_BLOCKED, _FRAME_HEADER_BYTES):
            self._transport.blocked, _ = _short_text(frame, _FRAME_HEADER_BYTES + 4)
        elif channel == 0 and kind == _METHOD and frame.startswith(_UNBLOCKED, _FRAME_HEADER_BYTES):
            self._transport.blocked = None
        return frame


def _readable(frame: bytes) -> bool:
    try:
        pamqp.frame.unmarshal(frame)
    except Exception:  # noqa: BLE001  # untrusted bytes, in a decoder that may raise anything
        return False
    return True


def _without_timestamp(frame: bytes) -> bytes:
    """Return a content header without its timestamp: one before 1970 or in nanoseconds is no time to the client."""
    (flags,) = struct.unpack_from(">H", frame, _FLAGS_AT)
    if not flags & _TIMESTAMP:
        return frame
    at = _FLAGS_AT + 2
    try:
        for flag, width in _BEFORE_TIMESTAMP.items():
            if flags >> flag & 1:
                at += width or 1 + frame[at]
                if flag == _HEADERS:
                    at += struct.unpack_from(">I", frame, at - 4)[0]
    except (struct.error, IndexError):
        return frame
    properties = frame[_FLAGS_AT + 2 : at] + frame[at + 8 : -1]
    content = frame[_FRAME_HEADER_BYTES:_FLAGS_AT] + struct.pack(">H", flags & ~_TIMESTAMP)
    length = len(content) + len(properties)
    return frame[:3] + struct.pack(">I", length) + content + properties + frame[-1:]


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
