"""Messages on their way to RabbitMQ: as AMQP has them, and what the server says of each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC
from typing import Any

import pamqp.frame
from aiormq.exceptions import ChannelNotFoundEntity, DeliveryError, PublishError
from pamqp import commands, header

from txbox.brokers.plain import KEY, described, payload_of, utf8
from txbox.brokers.rabbitmq_link import shown
from txbox.errors import BrokerError, MessageRefused, UnusableMessage
from txbox.identity import message_id
from txbox.message import HeaderValue, Message

_PART = 1000
_SHORT_BYTES_MAX = 255
_FRAME_BYTES = 8
_PERSISTENT = 2


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
