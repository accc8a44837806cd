"""CloudEvents: an event in JSON to a message, with its data as the bytes that were sent; and back."""

from __future__ import annotations

import base64
import binascii
import json
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from txbox.errors import UnusableMessage
from txbox.identity import scoped_id
from txbox.message import Headers, Message

_SPACE = " \t\n\r"
# these have a place of their own in a message
_NOT_HEADERS = frozenset({"data", "data_base64", "datacontenttype"})


def message_of(line: bytes, topic: str, origin: dict[str, Any]) -> Message[Any]:
    """Read one event of the JSON format.

    `source` and `id` become the message id, `subject` the key, `data` the payload: its raw JSON
    bytes, or the text itself where datacontenttype is not JSON. All context attributes stay visible
    as `ce_…` headers. An event without an id is still a message; the inbox quarantines it.

    Raises:
        UnusableMessage: not UTF-8, not JSON, not an object, or an attribute of the wrong type.
    """
    try:
        text = line.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UnusableMessage(
            f"The line is not UTF-8 (byte {error.start}): write one CloudEvent in JSON a line."
        ) from None
    members, data_at = _members(text)
    own_id, source = _identity(members)
    kind, subject = _text(members, "type"), _text(members, "subject")
    content_type = _text(members, "datacontenttype")
    payload = _payload(members, text, data_at, content_type)
    if content_type is None and data_at is not None:
        content_type = "application/json"
    return Message(
        topic=topic,
        payload=payload,
        id=scoped_id(source, own_id) if own_id is not None and source else own_id,
        type=kind,
        key=subject,
        headers=Headers(
            (f"ce_{name}", value if isinstance(value, str) else json.dumps(value))
            for name, value in members.items()
            if name not in _NOT_HEADERS and isinstance(value, (str, bool))
        ),
        content_type=content_type,
        time=_time(members.get("time")),
        origin=origin,
    )


def _number(text: str) -> str:
    # numbers stay text: nothing is computed here, and the digits of an id must survive
    return text


def _constant(text: str) -> Any:
    raise ValueError(f"{text} is not JSON")


_DECODER = json.JSONDecoder(parse_int=_number, parse_float=_number, parse_constant=_constant)


def _members(text: str) -> tuple[dict[str, Any], slice | None]:
    """Read the members of a JSON object, and where in the text the value of `data` stands."""
    try:
        return _scanned(text)
    except (ValueError, TypeError, RecursionError) as error:
        # the parser's own text may quote the line
        raise UnusableMessage(
            f"The line is no JSON object ({type(error).__name__}): write one CloudEvent in JSON a line."
        ) from None


def _scanned(text: str) -> tuple[dict[str, Any], slice | None]:
    members: dict[str, Any] = {}
    data_at: slice | None = None
    at = _expect(text, 0, "{")
    while text[at : at + 1] != "}":
        _expect(text, at, '"')
        name, at = _DECODER.raw_decode(text, at)
        start = _expect(text, at, ":")
        members[name], at = _DECODER.raw_decode(text, start)
        if name == "data":
            data_at = slice(start, at)
        at = _skip(text, at)
        if text[at : at + 1] != "}":
            at = _expect(text, at, ",")
            _expect(text, at, '"')
    if _skip(text, at + 1) != len(text):
        raise ValueError("text after the object")
    return members, data_at


def _skip(text: str, at: int) -> int:
    while at < len(text) and text[at] in _SPACE:
        at += 1
    return at


def _expect(text: str, at: int, mark: str) -> int:
    at = _skip(text, at)
    if text[at : at + 1] != mark:
        raise ValueError(f"no {mark}")
    return _skip(text, at + 1)


def _identity(members: dict[str, Any]) -> tuple[str | None, str | None]:
    # a number arrives here as its digits; anything but text counts as no id at all
    own_id, source = members.get("id"), members.get("source")
    return (
        own_id if isinstance(own_id, str) and own_id else None,
        source if isinstance(source, str) else None,
    )


def _text(members: dict[str, Any], name: str) -> str | None:
    value = members.get(name)
    if value is not None and not isinstance(value, str):
        raise UnusableMessage(f"The attribute {name} of the CloudEvent must be text.")
    return value


def _payload(
    members: dict[str, Any], text: str, data_at: slice | None, content_type: str | None
) -> bytes | None:
    encoded = members.get("data_base64")
    if encoded is not None:
        try:
            return base64.b64decode(encoded, validate=True)
        except (binascii.Error, TypeError, ValueError):
            raise UnusableMessage("data_base64 of the CloudEvent is not base64.") from None
    if data_at is None:
        return None
    value = members["data"]
    if isinstance(value, str) and not _is_json(content_type) and text[data_at.start] == '"':
        try:
            return value.encode()
        except UnicodeEncodeError:
            raise UnusableMessage("data of the CloudEvent contains lone surrogates.") from None
    return text[data_at].encode()


def _is_json(content_type: str | None) -> bool:
    if content_type is None:
        return True
    bare = content_type.partition(";")[0].strip().lower()
    return bare.endswith(("/json", "+json"))


def _time(value: object) -> datetime | None:
    if not isinstance(value, str):
        return None
    try:
        moment = datetime.fromisoformat(value)
    except ValueError:
        # for people to read only; what came stays in the header ce_time
        return None
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


def as_binary(message: Message[Any], source: str, prefix: str) -> Message[Any]:
    """Return the message with its CloudEvents attributes as headers; the payload stays as it is.

    Args:
        source: the service that the event comes from, a URI reference.
        prefix: what the transport's binding puts before an attribute's name.
    """
    attributes = _attributes(message, source)
    attributes.pop("datacontenttype", None)
    return replace(
        message,
        headers=Headers(
            (*message.headers, *((prefix + name, value) for name, value in attributes.items()))
        ),
    )


def as_structured(message: Message[Any], source: str) -> Message[Any]:
    """Return the message with the whole event, attributes and data, as its JSON payload."""
    members: dict[str, Any] = dict(_attributes(message, source))
    if message.payload is not None:
        try:
            text = message.payload.decode()
            members["data"] = json.loads(text) if _is_json(message.content_type) else text
        except ValueError:
            members["data_base64"] = base64.b64encode(message.payload).decode()
    return replace(
        message,
        payload=json.dumps(members, separators=(",", ":")).encode(),
        content_type="application/cloudevents+json",
    )


def _attributes(message: Message[Any], source: str) -> dict[str, str]:
    attributes = {
        "specversion": "1.0",
        "id": str(message.id),
        "source": source,
        # required there, and free here
        "type": message.type or message.topic,
    }
    if message.key is not None:
        attributes["subject"] = message.key
    if message.time is not None:
        attributes["time"] = message.time.isoformat()
    if message.content_type is not None:
        attributes["datacontenttype"] = message.content_type
    return attributes
