"""Publishing to RabbitMQ: mandatory messages, pipelined, each confirmed or returned."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC
from functools import partial
from typing import Any

from aiormq.exceptions import (
    AMQPConnectionError,
    ChannelAccessRefused,
    ChannelClosed,
    ChannelNotFoundEntity,
    ConnectionChannelError,
    ConnectionFrameError,
    ConnectionInternalError,
    ConnectionSyntaxError,
    ConnectionUnexpectedFrame,
    DeliveryError,
    PublishError,
)
from pamqp import commands
from yarl import URL

from txbox.brokers.base import Batch, run_of
from txbox.brokers.envelope import RABBITMQ, utf8
from txbox.brokers.loop import LoopPublisher, error_text
from txbox.brokers.rabbitmq.client import TROUBLE, Connection, close_quietly
from txbox.errors import BrokerError, DestinationRefused, MessageRefused, UnusableMessage
from txbox.identity import message_id
from txbox.message import HeaderValue, Message

_LARGE_BYTES = 1024 * 1024
#: Closing a channel while pipelined messages arrive on it takes the connection down too.
_OF_A_MESSAGE = (
    ConnectionChannelError,
    ConnectionFrameError,
    ConnectionInternalError,
    ConnectionSyntaxError,
    ConnectionUnexpectedFrame,
)
_PART = 1000
# of the property: clients take more seconds for milliseconds, and cannot write fewer than none
_TIMESTAMP_MAX = 0xFFFFFFFF
_SHORT_BYTES_MAX = 255
_FRAME_BYTES = 8
#: Of the frame with the properties: its own head and end, the class, the weight and the size of the body.
_HEADER_BYTES = _FRAME_BYTES + 12
_PERSISTENT = 2

_Sent = tuple[bytes, commands.Basic.Properties]
_Entry = tuple[int, _Sent]


class _Properties(commands.Basic.Properties):
    """Properties that are encoded once: to measure them, and to send them. They must not be changed after that."""

    _encoded = b""

    def marshal(self) -> bytes:
        self._encoded = self._encoded or super().marshal()
        return self._encoded


class RabbitMQPublisher(LoopPublisher):
    """Publishes persistent, mandatory messages with publisher confirms.

    Args:
        exchange: "" is the default exchange, where the topic is the name of a queue. On any other
            exchange the topic is the routing key.

    Times have whole seconds. A repeated header becomes an array, in which None is null.

    Guarantee: what is confirmed is in every queue it was routed to: on disk in a durable classic queue,
    on a majority in a quorum queue. A message that no queue takes is an error. Of a key the next message
    is sent when the one before it is confirmed. If the server closes the
    channel because of a message, that message is found by resending what is unconfirmed in ever smaller
    parts.

    Source: docs/decisions/0056-runs-of-a-key.md
    """

    event_prefix = RABBITMQ.prefix
    keeps_runs = True
    trouble = TROUBLE

    def __init__(self, url: URL, options: Mapping[str, Any], *, exchange: str, where: str) -> None:
        super().__init__(RABBITMQ.name, f"rabbitmq:{where}:{exchange or '(default)'}")
        self._url, self._options, self._exchange = url, options, exchange
        self._connection: Connection | None = None
        self._owner: Any = None
        self._channel: Any = None
        self._gone: BaseException | None = None

    async def _publish(self, batch: Batch) -> None:
        try:
            async with asyncio.timeout(batch.left_s() - batch.last_word_s):
                await self._open_channel()
                make = partial(_entry, bytes_max=self._header_bytes_max())
                for part in _parts(batch.entries(make)):
                    await self._send(part, batch)
        except TimeoutError:
            # a queue that cannot confirm does not mean the server is away
            blocked = None if self._connection is None else self._connection.frames.blocked
            if not batch.heard and blocked is not None:
                # it says nothing else until there is room again
                raise ConnectionError(f"the server takes no messages, {blocked}") from None
            if not batch.heard:
                async with asyncio.timeout(batch.last_word_s):
                    await self._look()
            self._disconnect()

    async def _send(self, part: Sequence[_Entry], batch: Batch) -> None:
        channel = await self._open_channel()
        runs: dict[Any, list[_Entry]] = {}
        for entry in part:
            if batch.is_open(entry[0]):
                runs.setdefault(run_of(batch.messages[entry[0]], entry[0]), []).append(entry)
        errors = await asyncio.gather(
            *(
                self._send_run(channel, batch, run)
                if len(run) > 1
                else self._send_one(channel, batch, *run[0])
                for run in runs.values()
            ),
            return_exceptions=True,
        )
        failures = [error for error in errors if error is not None]
        if not failures:
            return
        left = [entry for entry in part if batch.is_open(entry[0])]
        reason = self._reason(failures)
        # what was sent on the closed channel makes the server close the connection as well
        self._disconnect()
        topics = {at: batch.messages[at].topic for at, _ in left}
        # a missing exchange concerns all of them, a missing right perhaps a single routing key
        alike = (
            ChannelNotFoundEntity
            if len(set(topics.values())) > 1
            else (ChannelNotFoundEntity, ChannelAccessRefused)
        )
        if len(part) == 1 or isinstance(reason, alike):
            for at, topic in topics.items():
                batch.answer(at, self._refusal(topic, reason))
            return
        # those sent before the culprit may already be in their queues: they arrive twice, in order
        for smaller in _split(left):
            await self._send(smaller, batch)

    async def _send_run(self, channel: Any, batch: Batch, run: Sequence[_Entry]) -> None:
        """Send the messages of a key one after the other, up to one that is not taken."""
        for number, (at, sent) in enumerate(run):
            if not number or batch.may_follow(at):
                await self._send_one(channel, batch, at, sent)

    async def _send_one(self, channel: Any, batch: Batch, at: int, sent: _Sent) -> None:
        """Send one message and record the answer at once: another may never get one."""
        payload, properties = sent
        topic = batch.messages[at].topic
        try:
            await channel.basic_publish(
                payload, exchange=self._exchange, routing_key=topic, properties=properties,
                mandatory=True, wait=False,
            )  # fmt: skip
        except PublishError:
            refusal = f"No queue receives messages for {self._where(topic)}: declare or bind one."
            batch.answer(at, DestinationRefused(refusal))
        except DeliveryError:
            # the same answer whatever the message is
            refusal = (
                f"A queue did not accept the message for {self._where(topic)} (nack): is it full?"
            )
            batch.answer(at, DestinationRefused(refusal))
        else:
            batch.answer(at, None)

    def _where(self, topic: str) -> str:
        return f"{topic!r} of exchange {self._exchange!r}" if self._exchange else repr(topic)

    def _refusal(self, topic: str, reason: BaseException) -> BrokerError:
        if isinstance(reason, ChannelNotFoundEntity):
            return DestinationRefused(
                f"RabbitMQ has no exchange {self._exchange!r} ({error_text(reason)}): declare it."
            )
        if isinstance(reason, ChannelAccessRefused):
            return DestinationRefused(
                f"RabbitMQ does not let this user publish {topic!r} ({error_text(reason)}): check its permissions."
            )
        if isinstance(reason, ConnectionInternalError):
            return BrokerError(
                f"RabbitMQ failed on the message for {topic!r} ({error_text(reason)})."
            )
        return MessageRefused(
            f"RabbitMQ will not accept the message for {topic!r} ({error_text(reason)}): "
            "make it smaller, or correct its headers."
        )

    def _reason(self, errors: Sequence[BaseException]) -> BaseException:
        """Return why the server closed the channel; raises what is not the server's answer to a message."""
        errors = [*errors] if self._gone is None else [self._gone, *errors]
        # the channel's reason first: what was pipelined on it behind the culprit ends the connection for another
        for kinds in (ChannelClosed, _OF_A_MESSAGE):
            for error in errors:
                if isinstance(error, kinds):
                    return error
        for error in errors:
            if isinstance(error, (AMQPConnectionError, OSError)):
                raise error
        raise errors[0]

    async def _open_channel(self) -> Any:
        if self._connection is None or self._gone is not None:
            self._disconnect()
            connection = Connection(self._url, **self._options)
            try:
                await connection.connect()
            except BaseException:
                self._close_later(close_quietly(connection))
                raise
            connection.close_callbacks.add(self._lost)
            self._connection = connection
        if self._channel is None or self._channel.is_closed:
            # aio-pika closes a channel nobody holds a reference to
            self._owner = await self._connection.opened_channel(
                publisher_confirms=True, on_return_raises=True
            )
            self._channel = await self._owner.get_underlay_channel()
        return self._channel

    async def _lost(self, sender: object, error: BaseException | None = None) -> None:
        if sender is self._connection:
            self._gone = error or ConnectionError("the connection ended")

    async def _look(self) -> None:
        """Raise if the server does not answer on this connection."""
        if self._connection is None:
            raise TimeoutError("it did not answer")
        channel = await self._connection.opened_channel(publisher_confirms=False)
        await channel.close()

    def _header_bytes_max(self) -> int:
        transport = None if self._connection is None else self._connection.transport
        assert transport is not None
        tuned: Any = transport.connection
        return int(tuned.connection_tune.frame_max or 131_072) - _FRAME_BYTES

    def _disconnect(self) -> None:
        connection, self._connection, self._channel = self._connection, None, None
        self._gone = None
        if connection is not None:
            self._close_later(close_quietly(connection))


def _parts(entries: Iterable[_Entry]) -> Iterator[list[_Entry]]:
    """Yield what is sent together. Ids must differ, because the client matches returned messages by id."""
    part: dict[str | None, _Entry] = {}
    for entry in entries:
        message_id = entry[1][1].message_id
        if len(part) == _PART or message_id in part:
            yield list(part.values())
            part = {}
        part[message_id] = entry
    if part:
        yield list(part.values())


def _split(entries: list[_Entry]) -> list[list[_Entry]]:
    """Split what must be resent, in order, so as to isolate the culprit."""
    sizes = [len(payload) for _, (payload, _) in entries]
    largest = sizes.index(max(sizes))
    if sizes[largest] > _LARGE_BYTES:
        parts = [entries[:largest], [entries[largest]], entries[largest + 1 :]]
    else:
        half = max(1, len(entries) // 2)
        parts = [entries[:half], entries[half:]]
    return [part for part in parts if part]


def _entry(message: Message[Any], bytes_max: int) -> _Sent:
    payload = RABBITMQ.payload(message)
    headers: dict[str, Any] = {}
    for name, value in RABBITMQ.headers(message):
        _short("name of a header", name)
        if name not in headers:
            headers[name] = _value(value)
        elif isinstance(headers[name], list):
            headers[name].append(_value(value))
        else:
            headers[name] = [headers[name], _value(value)]
    at = message.time
    if at is not None and not 0 <= at.timestamp() <= _TIMESTAMP_MAX:
        headers["time"], at = at.isoformat(), None
    properties = _Properties(
        content_type=_short("content type", message.content_type),
        headers=headers,
        delivery_mode=_PERSISTENT,
        message_id=_short("id", _id(message)),
        timestamp=None if at is None else at.astimezone(UTC),
        message_type=_short("type", message.type),
    )
    _short("topic", message.topic)
    header_bytes = _HEADER_BYTES + len(properties.marshal())
    if header_bytes > bytes_max:
        raise MessageRefused(
            f"The headers have {header_bytes} bytes, but RabbitMQ allows {bytes_max} (frame_max). Make them smaller."
        )
    return payload, properties


def _id(message: Message[Any]) -> str:
    if message.id is not None:
        return str(message.id)
    try:
        # the client would invent a random one, different each time
        return message_id(message)
    except UnusableMessage as error:
        raise MessageRefused(f"The message cannot be sent without an id: {error}") from None


def _value(value: HeaderValue) -> Any:
    if isinstance(value, str):
        utf8(value)
    # the client accepts bytes only as a bytearray
    return bytearray(value) if isinstance(value, bytes) else value


def _short(what: str, text: str | None) -> str | None:
    if text is not None and len(utf8(text)) > _SHORT_BYTES_MAX:
        raise MessageRefused(f"The {what} exceeds the {_SHORT_BYTES_MAX} bytes that AMQP allows.")
    return text
