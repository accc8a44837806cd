"""The envelope: broker headers and properties to a message and back; binary and structured CloudEvents.

Every transport reads each field in the same order: first the transport's own terms (a property, or a plain header
such as `type`), then the CloudEvents attribute, then what the broker adds (its clock).
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import product
from typing import Any, NamedTuple
from urllib.parse import quote, unquote

from txbox.boundaries import Boundary, is_contents
from txbox.brokers.base import Delivery
from txbox.errors import MessageRefused, UnusableMessage
from txbox.identity import CLOUDEVENTS_PREFIXES, id_in_headers, scoped_id
from txbox.message import HeaderPairs, Headers, HeaderValue, Message, headers_in

Pair = tuple[str, HeaderValue]

_ID, _TYPE, _KEY, _CONTENT_TYPE, _TIME = "message-id", "type", "key", "content-type", "time"
_DATA_CONTENT_TYPE = "datacontenttype"
#: Headers as JSON in one: SQS has room for ten attributes, and Debezium sends the column of the outbox.
PACKED = "txbox-headers"
#: Which field a header describes, and its rank among that field's headers: plain headers before CloudEvents.
_PLACES = {plain: (plain, 0) for plain in (_TYPE, _KEY, _CONTENT_TYPE, _TIME, PACKED)} | {
    prefix + attribute: (field, rank)
    for field, attributes in {
        _TYPE: ("type",),
        _KEY: ("partitionkey", "subject"),
        _TIME: ("time",),
        _DATA_CONTENT_TYPE: ("datacontenttype",),
    }.items()
    for rank, (attribute, prefix) in enumerate(product(attributes, CLOUDEVENTS_PREFIXES), 1)
}
#: The payload is one whole event, or several. Events in formats other than JSON are left to the handler as they are.
EVENT = "application/cloudevents+json"
_BATCH = "application/cloudevents-batch+json"


@dataclass(frozen=True, slots=True)
class Transport:
    """Where one transport puts the fields that describe a message.

    Args:
        name: for people.
        prefix: of headers with CloudEvents attributes.
        id, type, key, content_type, time: the header a publisher writes the field to; None if it goes elsewhere.
    """

    name: str
    prefix: str
    id: str | None = _ID
    type: str | None = _TYPE
    key: str | None = _KEY
    content_type: str | None = _CONTENT_TYPE
    time: str | None = _TIME

    def delivery(
        self,
        topic: str,
        payload: bytes | None,
        headers: HeaderPairs,
        *,
        origin: dict[str, Any],
        tag: object,
        redelivered: bool = False,
        message_id: Any = None,
        message_type: str | None = None,
        key: str | bytes | None = None,
        content_type: str | None = None,
        time: datetime | None = None,
        stored_at: datetime | None = None,
    ) -> Delivery:
        """Return what a broker delivered, as a message or as a problem.

        Args:
            message_id, message_type, key, content_type, time: from properties; None if there is no such property.
            stored_at: by the broker's clock, for a message without any other time.
        """
        try:
            message = self._message(
                topic, payload, Headers(headers), origin=origin, message_id=message_id,
                message_type=message_type, key=key, content_type=content_type, time=time, stored_at=stored_at,
            )  # fmt: skip
        except UnusableMessage as error:
            return Delivery(None, topic, tag, str(error), payload or b"", redelivered)
        except Exception as error:
            if not is_contents(error):
                raise
            why = f"{type(error).__name__} (boundary: {Boundary.ENVELOPE})"
            problem = f"What {self.name} delivered cannot be read as a message: {why}."
            return Delivery(None, topic, tag, problem, payload or b"", redelivered)
        return Delivery(message, topic, tag, redelivered=redelivered)

    def _message(
        self,
        topic: str,
        payload: bytes | None,
        headers: Headers,
        *,
        origin: dict[str, Any],
        message_id: Any,
        message_type: str | None,
        key: str | bytes | None,
        content_type: str | None,
        time: datetime | None,
        stored_at: datetime | None,
    ) -> Message[Any]:
        if self.id is not None and self.id != _ID:
            message_id = headers.get(self.id) or None
        by_field = _by_field(headers)
        if (packed := by_field.get(PACKED)) is not None:
            # another producer's header of this name stays one
            with suppress(ValueError, TypeError, KeyError, RecursionError):
                around = (pair for pair in headers if pair[0].lower() != PACKED)
                headers = Headers((*around, *headers_in(packed)))
                by_field = _by_field(headers)
        declared = content_type or by_field.get(_CONTENT_TYPE)
        media = None if declared is None else _media_type(declared)
        if payload is not None and media in (EVENT, _BATCH):
            event = _event(payload, self.prefix, batch=media == _BATCH)
            if message_id is None and id_in_headers(headers) is None:
                message_id = event.id
            # from here on as in binary mode; the transport's own headers come first
            around = (pair for pair in headers if pair[0].lower() != _CONTENT_TYPE)
            headers = Headers((*around, *event.headers))
            by_field, payload, declared = _by_field(headers), event.payload, event.content_type
        return Message(
            topic=topic,
            payload=payload,
            id=message_id,
            type=message_type or by_field.get(_TYPE),
            key=by_field.get(_KEY) if key is None else text_or_hex(key),
            headers=headers,
            content_type=declared or by_field.get(_DATA_CONTENT_TYPE),
            time=time or _moment(by_field.get(_TIME)) or stored_at,
            origin=origin,
        )

    def headers(self, message: Message[Any]) -> list[Pair]:
        """Return the headers a message is sent with: those of its fields, then its own.

        A header for something that is also a field, native or not, is left out: the field wins.
        """
        fields = (
            (_ID, self.id, message.id),
            (_TYPE, self.type, message.type),
            (_KEY, self.key, message.key),
            (_CONTENT_TYPE, self.content_type, message.content_type),
            (_TIME, self.time, message.time),
        )
        pairs: list[Pair] = [
            (name, value.isoformat() if isinstance(value, datetime) else str(value))
            for _, name, value in fields
            if name is not None and value is not None
        ]
        if message.headers:
            silenced = {
                header
                for plain, name, value in fields
                if value is not None
                for header in (plain, (name or plain).lower())
            }
            pairs += [pair for pair in message.headers if pair[0].lower() not in silenced]
        return pairs

    def payload(self, message: Message[Any]) -> bytes:
        """Return the payload, for a transport without tombstones.

        Raises:
            MessageRefused: the payload is None.
        """
        if message.payload is None:
            raise MessageRefused(
                f"{self.name} has no tombstones: stage an empty payload, or a type that says what was deleted."
            )
        return message.payload


#: The record itself has a key and a time.
KAFKA = Transport("Kafka", "ce_", key=None, time=None)
#: Everything but the key is a property.
RABBITMQ = Transport("RabbitMQ", "cloudEvents:", id=None, type=None, content_type=None, time=None)
SQS = Transport("SQS", "ce-")
#: For FIFO queues, where the MessageGroupId is the key.
SQS_GROUPED = replace(SQS, key=None)
#: The server reads the id to drop what it has seen in the last minutes.
NATS = Transport("NATS", "ce-", id="Nats-Msg-Id")
REDIS = Transport("Redis", "ce_")
#: The receiver of a request would not understand a plain `type` or `key`.
HTTP = Transport("HTTP", "ce-", id="webhook-id", type="ce-type", key="ce-subject", time="ce-time")
#: One structured event per line, without headers.
FILE = Transport("File", "ce_")


def utf8(text: str) -> bytes:
    """Return the text as bytes.

    Raises:
        MessageRefused: it contains lone surrogates.
    """
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise MessageRefused(
            "The topic, key, id, type or a header of the message contains lone surrogates: it is not valid text."
        ) from None


def clock(seconds: float) -> datetime | None:
    """Return a time by a broker's clock; None if producers may set it and the value is not a time."""
    try:
        return datetime.fromtimestamp(seconds, UTC)
    except (OverflowError, ValueError, OSError):
        return None


def _by_field(headers: Headers) -> dict[str, str]:
    """Return the values that headers give for the fields, in one pass. Empty headers are ignored."""
    found: dict[str, str] = {}
    ranks: dict[str, int] = {}
    for name, value in headers:
        place = _PLACES.get(name.lower())
        if place is None or not value:
            continue
        field, rank = place
        if field in ranks and ranks[field] <= rank:
            continue
        text = text_or_hex(value) if field == _KEY else _text(value)
        if text is not None:
            found[field], ranks[field] = text, rank
    return found


def _text(value: str | bytes) -> str | None:
    try:
        return value if isinstance(value, str) else value.decode()
    except UnicodeDecodeError:
        return None


def text_or_hex(value: str | bytes) -> str:
    """Return text as it is; anything that is not UTF-8 as hexadecimal digits after "hex:"."""
    if isinstance(value, str):
        return value
    try:
        return value.decode()
    except UnicodeDecodeError:
        return f"hex:{value.hex()}"


def _moment(text: object) -> datetime | None:
    try:
        moment = datetime.fromisoformat(text) if isinstance(text, str) else None
    except ValueError:
        # only for people to read; the original stays in the headers
        return None
    return moment if moment is None or moment.tzinfo else moment.replace(tzinfo=UTC)


def _media_type(content_type: str) -> str:
    return content_type.partition(";")[0].strip().lower()


def _is_json(content_type: str | None) -> bool:
    return content_type is None or _media_type(content_type).endswith(("/json", "+json"))


# -- CloudEvents in JSON ----------------------------------------------------------------------------


class _Event(NamedTuple):
    """A structured event. Its attributes are headers, as in binary mode."""

    id: str | None
    headers: list[Pair]
    payload: bytes | None
    content_type: str | None


def _event(content: bytes, prefix: str, *, batch: bool) -> _Event:
    """Read one event in the JSON format; `data` stays the raw JSON bytes as sent, or the text they spell.

    Raises:
        UnusableMessage: several events, not UTF-8, not JSON, not an object, or an attribute of the wrong type.
    """
    if batch:
        raise UnusableMessage(
            "A batch of CloudEvents has many ids but one acknowledgement: send each event separately."
        )
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UnusableMessage(
            f"The CloudEvent is not UTF-8 (byte {error.start}): send one event in JSON."
        ) from None
    try:
        members, data_at = _members(text)
    except (ValueError, TypeError, RecursionError) as error:
        # the parser's own message may quote the event
        raise UnusableMessage(
            f"The CloudEvent is not a JSON object ({type(error).__name__}): send one event in JSON."
        ) from None
    for name in ("type", "subject", _DATA_CONTENT_TYPE):
        if not isinstance(members.get(name), str | None):
            raise UnusableMessage(f"The attribute {name} of the CloudEvent must be text.")
    content_type: str | None = members.get(_DATA_CONTENT_TYPE)
    payload = _data(members, text, data_at, content_type)
    if content_type is None and data_at is not None:
        content_type = "application/json"
    event_id, source = members.get("id"), members.get("source")
    if not isinstance(event_id, str) or not event_id:
        event_id = None
    elif isinstance(source, str) and source:
        event_id = scoped_id(source, event_id)
    headers: list[Pair] = [
        (prefix + name, value if isinstance(value, str) else json.dumps(value))
        for name, value in members.items()
        if name not in _NOT_HEADERS and isinstance(value, str | bool)
    ]
    return _Event(event_id, headers, payload, content_type)


# these have their own place in a message
_NOT_HEADERS = frozenset({"data", "data_base64", _DATA_CONTENT_TYPE})


def _number(text: str) -> str:
    # numbers stay text: nothing is computed here, and an id must keep its digits
    return text


def _constant(text: str) -> Any:
    raise ValueError(f"{text} is not JSON")


_value_at = json.JSONDecoder(
    parse_int=_number, parse_float=_number, parse_constant=_constant
).raw_decode
_space = re.compile(r"[ \t\n\r]*").match


def _members(text: str) -> tuple[dict[str, Any], slice | None]:
    """Read the members of a JSON object, and where in the text the value of `data` is."""
    members: dict[str, Any] = {}
    data_at: slice | None = None
    at = _behind(text, 0, "{")
    while text[at : at + 1] != "}":
        if members:
            at = _behind(text, at, ",")
        _behind(text, at, '"')
        name, at = _value_at(text, at)
        start = _behind(text, at, ":")
        members[name], at = _value_at(text, start)
        if name == "data":
            data_at = slice(start, at)
        at = _past_space(text, at)
    if _past_space(text, at + 1) != len(text):
        raise ValueError("text after the object")
    return members, data_at


def _past_space(text: str, at: int) -> int:
    found = _space(text, at)
    assert found is not None
    return found.end()


def _behind(text: str, at: int, mark: str) -> int:
    at = _past_space(text, at)
    if text[at : at + 1] != mark:
        raise ValueError(f"no {mark}")
    return _past_space(text, at + 1)


def _data(
    members: dict[str, Any], text: str, data_at: slice | None, content_type: str | None
) -> bytes | None:
    encoded = members.get("data_base64")
    if encoded is not None:
        try:
            return base64.b64decode(encoded, validate=True)
        except (binascii.Error, TypeError, ValueError):
            raise UnusableMessage("data_base64 of the CloudEvent is not valid base64.") from None
    if data_at is None:
        return None
    value = members["data"]
    if isinstance(value, str) and not _is_json(content_type) and text[data_at.start] == '"':
        try:
            return value.encode()
        except UnicodeEncodeError:
            raise UnusableMessage("data of the CloudEvent contains lone surrogates.") from None
    return text[data_at].encode()


def as_binary(message: Message[Any], source: str, prefix: str) -> Message[Any]:
    """Return the message with CloudEvents attributes as headers and its payload unchanged.

    Args:
        source: a URI reference to the service the event comes from.
        prefix: of headers in the transport's binding.
    """
    attributes = _attributes(message, source)
    attributes.pop(_DATA_CONTENT_TYPE, None)
    return replace(
        message,
        headers=(*message.headers, *((prefix + name, value) for name, value in attributes.items())),
    )


def as_structured(message: Message[Any], source: str) -> Message[Any]:
    """Return the message with the whole event as payload. A JSON payload becomes `data` byte for byte."""
    attributes = json.dumps(_attributes(message, source), separators=(",", ":"))
    event = f"{attributes[:-1]}{_data_member(message)}}}"
    return replace(message, payload=event.encode(), content_type=EVENT)


#: Of what may stand in a header, only these are not sent as they are.
_UNQUOTED = "".join(char for char in map(chr, range(0x21, 0x7F)) if char not in '"%')
_QUOTED = re.compile(r'"((?:[^"\\]|\\.)*)"')


def to_http(name: str, text: str) -> str:
    """Return the value of an HTTP header; a CloudEvents attribute's is percent-encoded, as their HTTP binding says."""
    return quote(text, safe=_UNQUOTED) if name.lower().startswith(HTTP.prefix) else text


def from_http(name: str, value: bytes) -> HeaderValue:
    """Return what an HTTP header says; anything but ASCII stays bytes, because HTTP defines no encoding."""
    if not value.isascii():
        return value
    text = value.decode()
    if name.startswith(HTTP.prefix):
        if quoted := _QUOTED.fullmatch(text):
            # as older releases of the binding wrote it
            text = re.sub(r"\\(.)", r"\1", quoted[1])
        with suppress(UnicodeDecodeError):
            text = unquote(text, errors="strict")
    return text


def _attributes(message: Message[Any], source: str) -> dict[str, str]:
    attributes = {
        "specversion": "1.0",
        "id": str(message.id),
        "source": source,
        # required by CloudEvents, optional for us
        "type": message.type or message.topic,
    }
    if message.key is not None:
        attributes["subject"] = message.key
    if message.time is not None:
        attributes["time"] = message.time.isoformat()
    if message.content_type is not None:
        attributes[_DATA_CONTENT_TYPE] = message.content_type
    return attributes


def _data_member(message: Message[Any]) -> str:
    payload = message.payload
    if payload is None:
        return ""
    try:
        text = payload.decode()
        if not _is_json(message.content_type):
            return f',"data":{json.dumps(text)}'
        _, end = _value_at(text, _past_space(text, 0))
        if _past_space(text, end) == len(text):
            return f',"data":{text}'
    except (ValueError, RecursionError):
        pass
    return f',"data_base64":"{base64.b64encode(payload).decode()}"'
