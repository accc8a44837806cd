"""Plain headers: what describes a message, under names of its own where a broker has no property for it."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

from txbox.errors import MessageRefused
from txbox.message import Headers, HeaderValue, Message

MESSAGE_ID = "message-id"
TYPE = "type"
KEY = "key"
CONTENT_TYPE = "content-type"
TIME = "time"

Pair = tuple[str, HeaderValue]


def described(message: Message[Any], *names: str) -> Iterator[Pair]:
    """Yield the headers with which a message leaves: first these, from its fields, then its own.

    A header of its own that a field speaks for, native or not, is left out: the field decides.
    """
    fields = _fields(message)
    for name in names:
        if name in fields:
            yield name, fields[name]
    for pair in message.headers:
        if pair[0].lower() not in fields:
            yield pair


def _fields(message: Message[Any]) -> dict[str, str]:
    found = {
        MESSAGE_ID: None if message.id is None else str(message.id),
        TYPE: message.type,
        KEY: message.key,
        CONTENT_TYPE: message.content_type,
        TIME: None if message.time is None else message.time.isoformat(),
    }
    return {name: value for name, value in found.items() if value is not None}


def plain_time(headers: Headers) -> datetime | None:
    """Read the header `time`; None where there is none, or where it is no ISO time."""
    try:
        moment = datetime.fromisoformat(headers.text(TIME) or "")
    except ValueError:
        return None
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


def utf8(text: str) -> bytes:
    """Return the text as bytes.

    Raises:
        MessageRefused: it contains lone surrogates.
    """
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise MessageRefused(
            "The topic, key, id, type or a header of the message contains lone surrogates: it is not text."
        ) from None


def payload_of(message: Message[Any], broker: str) -> bytes:
    """Return the payload for a broker that has no tombstones.

    Raises:
        MessageRefused: the payload is None.
    """
    if message.payload is None:
        raise MessageRefused(
            f"{broker} has no tombstones: stage an empty payload, or a type that says what is gone."
        )
    return message.payload
