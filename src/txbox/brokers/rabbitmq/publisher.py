"""Publishing to RabbitMQ: mandatory messages, pipelined, each confirmed or returned."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import CancelledError as FutureCancelledError
from concurrent.futures import TimeoutError as FutureTimeoutError
from datetime import UTC
from typing import Any

import pamqp.frame
from aiormq.exceptions import (
    AMQPConnectionError,
    AMQPError,
    ChannelClosed,
    ChannelInvalidStateError,
    ChannelNotFoundEntity,
    ConnectionChannelError,
    ConnectionFrameError,
    ConnectionSyntaxError,
    ConnectionUnexpectedFrame,
    DeliveryError,
    PublishError,
)
from pamqp import commands, header
from yarl import URL

from txbox.brokers.plain import KEY, described, payload_of, utf8
from txbox.brokers.rabbitmq.link import CLOSE_S, Connection, shown
from txbox.errors import BrokerError, BrokerUnavailable, MessageRefused, UnusableMessage
from txbox.identity import message_id
from txbox.message import HeaderValue, Message

_LAST_WORD_S = 0.5
_HEARTBEAT_S = 20
_LARGE_BYTES = 1024 * 1024
#: A channel that is closed under pipelined messages takes the connection with it.
_OF_A_MESSAGE = (
    ConnectionChannelError,
    ConnectionFrameError,
    ConnectionSyntaxError,
    ConnectionUnexpectedFrame,
)
_TROUBLE = (AMQPError, ChannelInvalidStateError, OSError, TimeoutError, StopAsyncIteration)
_PART = 1000
_SHORT_BYTES_MAX = 255
_FRAME_BYTES = 8
_PERSISTENT = 2


class RabbitMQPublisher:
    """Publishes persistent, mandatory messages with publisher confirms.

    Args:
        exchange: "" is the default exchange, where the topic is the name of a queue; on any other
            the topic is the routing key.

    Id, type, content type and time are properties, the time in whole seconds; the key is the header
    `key`. A repeated header becomes one array, in which a value that is None is null. There are no
    tombstones.

    Guarantee: what is confirmed is in every queue that it was routed to: on disk in a durable
    classic queue, on a majority in a quorum queue. What no queue takes is an error. A message for which the server
    closes the channel is found by sending what is unconfirmed again, in ever smaller parts.
    """

    event_prefix = "cloudEvents:"

    def __init__(self, url: URL, options: Mapping[str, Any], *, exchange: str, where: str) -> None:
        self._url, self._options, self._exchange = url, options, exchange
        self._where = where
        self.name = f"rabbitmq:{where}:{exchange or '(default)'}"
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._connection: Connection | None = None
        self._owner: Any = None
        self._channel: Any = None
        self._gone: BaseException | None = None
        self._closing: set[asyncio.Task[None]] = set()

    def publish(
        self, messages: Sequence[Message[Any]], within_s: float
    ) -> Sequence[BrokerError | None]:
        loop = self._running()
        batch = Batch(messages, within_s, self._exchange)
        future = asyncio.run_coroutine_threadsafe(
            self._publish(batch, time.monotonic() + within_s), loop
        )
        try:
            future.result(within_s + CLOSE_S)
        except (*_TROUBLE, FutureTimeoutError, FutureCancelledError) as error:
            future.cancel()
            loop.call_soon_threadsafe(self._end_connection)
            if not batch.heard:
                raise BrokerUnavailable(
                    f"RabbitMQ at {self._where} cannot be used now ({shown(error)}): it is tried again."
                ) from error
        return batch.answers

    def close(self) -> None:
        loop, thread = self._loop, self._thread
        if loop is None or thread is None:
            return
        self._loop = self._thread = None
        try:
            asyncio.run_coroutine_threadsafe(self._close(), loop).result(2 * CLOSE_S)
        finally:
            loop.call_soon_threadsafe(loop.stop)
            thread.join()

    def _running(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(
                target=_serve, args=(self._loop,), name="txbox-rabbitmq-publisher", daemon=True
            )
            self._thread.start()
        return self._loop

    # -- on the loop --------------------------------------------------------------------------

    async def _publish(self, batch: Batch, until: float) -> None:
        last_word_s = min(_LAST_WORD_S, (until - time.monotonic()) / 4)
        try:
            async with asyncio.timeout(until - last_word_s - time.monotonic()):
                await self._open_channel()
                for part in batch.parts(self._connection_frame_max()):
                    await self._send(part, batch)
        except TimeoutError:
            # a queue that cannot confirm is no server that is away
            if not batch.heard:
                async with asyncio.timeout(last_word_s):
                    await self._look()
            self._end_connection()

    async def _send(self, part: Sequence[Entry], batch: Batch) -> None:
        channel = await self._open_channel()
        outcomes = await asyncio.gather(
            *(self._send_one(channel, entry) for entry in part), return_exceptions=True
        )
        left: list[Entry] = []
        for entry, outcome in zip(part, outcomes, strict=True):
            if isinstance(outcome, BaseException) and not isinstance(outcome, DeliveryError):
                left.append(entry)
            else:
                batch.answer(entry, outcome)
        if not left:
            return
        reason = self._reason(outcomes)
        # what was sent to the closed channel makes the server close the connection as well
        self._end_connection()
        if len(part) == 1:
            batch.refuse(left[0], reason)
            return
        # the first of them up to the culprit may be in their queues: they arrive twice, in order
        for smaller in _split(left):
            await self._send(smaller, batch)

    def _reason(self, outcomes: Sequence[object]) -> BaseException:
        """Return why the server closed the channel; raises what is no answer to a message."""
        errors = [error for error in (self._gone, *outcomes) if isinstance(error, BaseException)]
        for error in errors:
            if isinstance(error, (ChannelClosed, *_OF_A_MESSAGE)):
                return error
        for error in errors:
            if isinstance(error, (AMQPConnectionError, OSError)):
                raise error
        raise next(error for error in errors if not isinstance(error, DeliveryError))

    async def _send_one(self, channel: Any, entry: Entry) -> object:
        answer: object = await channel.basic_publish(
            entry.payload, exchange=self._exchange, routing_key=entry.topic,
            properties=entry.properties, mandatory=True, wait=False,
        )  # fmt: skip
        return answer

    async def _open_channel(self) -> Any:
        if self._connection is None or self._gone is not None:
            self._end_connection()
            url = self._url
            if "heartbeat" not in url.query:
                url = url.update_query(heartbeat=_HEARTBEAT_S)
            connection = Connection(url, **self._options)
            try:
                await connection.connect()
            except BaseException:
                self._close_later(connection)
                raise
            connection.close_callbacks.add(self._lost)
            self._connection = connection
        if self._channel is None or self._channel.is_closed:
            # aio-pika closes a channel that nobody holds
            self._owner = await self._connection.opened_channel(
                publisher_confirms=True, on_return_raises=True
            )
            self._channel = await self._owner.get_underlay_channel()
        return self._channel

    async def _lost(self, sender: object, error: BaseException | None = None) -> None:
        if sender is self._connection:
            self._gone = error or ConnectionError("the connection ended")

    async def _look(self) -> None:
        """Raises where nobody answers, or the server reads nothing from us now."""
        if self._connection is None:
            raise TimeoutError("it did not answer")
        channel = await self._connection.opened_channel(publisher_confirms=False)
        await channel.close()

    def _connection_frame_max(self) -> int:
        transport = None if self._connection is None else self._connection.transport
        assert transport is not None
        tuned: Any = transport.connection
        return int(tuned.connection_tune.frame_max or 131_072)

    def _end_connection(self) -> None:
        """What is unsent must not leave later."""
        connection, self._connection, self._channel = self._connection, None, None
        self._gone = None
        if connection is not None:
            self._close_later(connection)

    def _close_later(self, connection: Connection) -> None:
        task = asyncio.get_running_loop().create_task(_close_quietly(connection))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def _close(self) -> None:
        self._end_connection()
        await asyncio.gather(*self._closing)


def _split(entries: list[Entry]) -> list[list[Entry]]:
    """Split what is sent again, in its order, where the culprit may be."""
    largest = max(range(len(entries)), key=lambda at: len(entries[at].payload))
    if len(entries[largest].payload) > _LARGE_BYTES:
        parts = [entries[:largest], [entries[largest]], entries[largest + 1 :]]
    else:
        half = max(1, len(entries) // 2)
        parts = [entries[:half], entries[half:]]
    return [part for part in parts if part]


async def _close_quietly(connection: Connection) -> None:
    try:
        async with asyncio.timeout(CLOSE_S):
            await connection.close()
    except (*_TROUBLE, asyncio.CancelledError):
        # the server notices by itself
        return


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.get_loop().run_forever()


class Entry:
    __slots__ = ("at", "payload", "properties", "topic")

    def __init__(
        self, at: int, topic: str, payload: bytes, properties: commands.Basic.Properties
    ) -> None:
        self.at, self.topic, self.payload, self.properties = at, topic, payload, properties


class Batch:
    """The messages of one call and what has been heard of them."""

    def __init__(self, messages: Sequence[Message[Any]], within_s: float, exchange: str) -> None:
        self._messages, self._exchange = messages, exchange
        self.answers: list[BrokerError | None] = [
            BrokerError(f"RabbitMQ has not confirmed the message for {message.topic!r} within {within_s:g} s.")
            for message in messages
        ]  # fmt: skip
        self.heard = False

    def parts(self, frame_max: int) -> Iterator[list[Entry]]:
        """Yield what is sent together; no two of one id, by which the client knows what is returned."""
        part: list[Entry] = []
        ids: set[object] = set()
        for at, message in enumerate(self._messages):
            try:
                entry = _entry(at, message, frame_max)
            except MessageRefused as refusal:
                self.answers[at] = refusal
                continue
            own_id = entry.properties.message_id
            if len(part) == _PART or (own_id in ids and own_id is not None):
                yield part
                part, ids = [], set()
            part.append(entry)
            ids.add(own_id)
        if part:
            yield part

    def answer(self, entry: Entry, outcome: object) -> None:
        self.heard = True
        self.answers[entry.at] = None
        if isinstance(outcome, PublishError):
            self.answers[entry.at] = BrokerError(
                f"No queue takes messages for {entry.topic!r}{self._of_exchange}: declare or bind one."
            )
        elif isinstance(outcome, DeliveryError):
            self.answers[entry.at] = BrokerError(
                f"A queue did not take the message for {entry.topic!r}{self._of_exchange} (nack): is it full?"
            )
        elif isinstance(outcome, BaseException):
            raise outcome

    def refuse(self, entry: Entry, reason: BaseException | None) -> None:
        self.heard = True
        why = "closed" if reason is None else shown(reason)
        if isinstance(reason, ChannelNotFoundEntity):
            self.answers[entry.at] = BrokerError(
                f"RabbitMQ has no exchange {self._exchange!r} ({why}): declare it."
            )
            return
        self.answers[entry.at] = MessageRefused(
            f"RabbitMQ does not take the message for {entry.topic!r} ({why}): make it smaller, or correct its headers."
        )

    @property
    def _of_exchange(self) -> str:
        return f" of exchange {self._exchange!r}" if self._exchange else ""


def _entry(at: int, message: Message[Any], frame_max: int) -> Entry:
    payload = payload_of(message, "RabbitMQ")
    headers: dict[str, Any] = {}
    for name, value in described(message, KEY):
        _short("name of a header", name)
        if name not in headers:
            headers[name] = _value(value)
        elif isinstance(headers[name], list):
            headers[name].append(_value(value))
        else:
            headers[name] = [headers[name], _value(value)]
    properties = commands.Basic.Properties(
        content_type=_short("content type", message.content_type),
        headers=headers,
        delivery_mode=_PERSISTENT,
        message_id=_short("id", _id(message)),
        timestamp=None if message.time is None else message.time.astimezone(UTC),
        message_type=_short("type", message.type),
    )
    _short("topic", message.topic)
    frame = pamqp.frame.marshal(
        header.ContentHeader(body_size=len(payload), properties=properties), 1
    )
    if len(frame) > frame_max - _FRAME_BYTES:
        raise MessageRefused(
            f"The headers have {len(frame)} bytes: RabbitMQ takes {frame_max} (frame_max). Make them smaller."
        )
    return Entry(at, message.topic, payload, properties)


def _id(message: Message[Any]) -> str:
    if message.id is not None:
        return str(message.id)
    try:
        # the client would invent a random one, another each time
        return message_id(message)
    except UnusableMessage as error:
        raise MessageRefused(f"The message cannot be sent without an id: {error}") from None


def _value(value: HeaderValue) -> Any:
    if isinstance(value, str):
        utf8(value)
    # the client takes bytes by this name only
    return bytearray(value) if isinstance(value, bytes) else value


def _short(what: str, text: str | None) -> str | None:
    if text is not None and len(utf8(text)) > _SHORT_BYTES_MAX:
        raise MessageRefused(f"The {what} is longer than the {_SHORT_BYTES_MAX} bytes of AMQP.")
    return text
