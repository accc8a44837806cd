"""A message as SQS carries it: text and at most ten attributes. What does not fit is encoded."""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import re
from collections import Counter
from collections.abc import Mapping
from typing import Any, cast

from txbox.brokers.envelope import PACKED, SQS, SQS_GROUPED, Pair, utf8
from txbox.errors import MessageRefused
from txbox.message import Headers, HeaderValue, Message

#: How to decode the body: "base64", or "empty" because SQS does not accept empty bodies.
_BODY = "txbox-body"
_ATTRIBUTES_MAX = 10
_NO_TEXT = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_ATTRIBUTE = re.compile(r"(?!(?i:AWS\.|Amazon\.))(?!.*\.\.)(?!\.)[A-Za-z0-9_.-]{1,256}(?<!\.)")
_TOKEN = re.compile(r"[A-Za-z0-9!\"#$%&'()*+,./:;<=>?@\[\\\]^_`{|}~-]{1,128}")


def entry_of(message: Message[Any], *, fifo: bool) -> dict[str, Any]:
    """Return the message as an entry of SendMessageBatch, without its Id.

    Raises:
        MessageRefused: SQS cannot carry it.
    """
    body, encoding = _body(SQS.payload(message))
    markers = {} if encoding is None else {_BODY: _attribute(encoding)}
    grouped = fifo and message.key is not None and _TOKEN.fullmatch(message.key) is not None
    pairs = list((SQS_GROUPED if grouped else SQS).headers(message))
    attributes, rest = _divided(pairs, _ATTRIBUTES_MAX - len(markers) - 1)
    if rest:
        markers[PACKED] = _attribute(json.dumps([_packed(pair) for pair in rest]))
    entry: dict[str, Any] = {"MessageBody": body, "MessageAttributes": attributes | markers}
    if fifo:
        unique = _token(str(message.id))
        entry["MessageDeduplicationId"] = unique
        entry["MessageGroupId"] = unique if message.key is None else _token(message.key)
    return entry


def size_of(entry: Mapping[str, Any]) -> int:
    """Return the size SQS counts: the body, plus each attribute's name, type and value."""
    size = len(entry["MessageBody"].encode())
    for name, attribute in entry["MessageAttributes"].items():
        value: str | bytes = (
            attribute["BinaryValue"] if "BinaryValue" in attribute else attribute["StringValue"]
        )
        size += len(name) + len(attribute["DataType"])
        size += len(value if isinstance(value, bytes) else value.encode())
    return size


def read(body: str, attributes: Mapping[str, Any]) -> tuple[bytes, Headers]:
    """Return payload and headers of a received message; one from another producer is read as it is."""
    pairs = [(name, _value(attribute)) for name, attribute in attributes.items()]
    encoding = dict(pairs).get(_BODY)
    if encoding in ("empty", "base64"):
        try:
            payload = b"" if encoding == "empty" else base64.b64decode(body, validate=True)
        except (binascii.Error, ValueError):
            # another producer's attribute of the same name
            return body.encode(), Headers(pairs)
        return payload, Headers(pair for pair in pairs if pair[0] != _BODY)
    return body.encode(), Headers(pairs)


def _body(payload: bytes) -> tuple[str, str | None]:
    if not payload:
        return "-", "empty"
    try:
        text = payload.decode()
    except UnicodeDecodeError:
        text = "\0"
    if _NO_TEXT.search(text):
        return base64.b64encode(payload).decode(), "base64"
    return text, None


def _divided(pairs: list[Pair], room: int) -> tuple[dict[str, Any], list[Pair]]:
    """Split into attributes and headers that cannot be one: repeated, without a value, or one too many."""
    names = Counter(name for name, _ in pairs)
    attributes: dict[str, Any] = {}
    rest: list[Pair] = []
    for name, value in pairs:
        utf8(name)
        fits = names[name] == 1 and _ATTRIBUTE.fullmatch(name) and name not in (_BODY, PACKED)
        if isinstance(value, str):
            utf8(value)
            fits = fits and not _NO_TEXT.search(value)
        if fits and value and len(attributes) < room:
            attributes[name] = _attribute(value)
        else:
            rest.append((name, value))
    return attributes, rest


def _attribute(value: str | bytes) -> dict[str, Any]:
    if isinstance(value, bytes):
        return {"DataType": "Binary", "BinaryValue": value}
    return {"DataType": "String", "StringValue": value}


def _value(attribute: Mapping[str, Any]) -> HeaderValue:
    binary = str(attribute.get("DataType", "")).startswith("Binary")
    return cast("HeaderValue", attribute.get("BinaryValue" if binary else "StringValue"))


def _packed(pair: Pair) -> list[Any]:
    name, value = pair
    return [
        name,
        {"base64": base64.b64encode(value).decode()} if isinstance(value, bytes) else value,
    ]


def _token(text: str) -> str:
    """Return a valid group or deduplication id: the text itself, or its digest if SQS would refuse it."""
    if _TOKEN.fullmatch(text):
        return text
    return hashlib.sha256(utf8(text)).hexdigest()


def checked_queue(name: str) -> None:
    """Raise MessageRefused for a name that SQS does not allow."""
    if not re.fullmatch(r"[A-Za-z0-9_-]{1,80}|(?=.{1,80}\Z)[A-Za-z0-9_-]+\.fifo", name):
        raise MessageRefused(
            f"{name!r} is not a valid queue name: SQS allows 80 letters, digits, - and _, and .fifo at the end."
        )
