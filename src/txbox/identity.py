"""Canonical message ids and payload hashes: what makes two deliveries the same message."""

from __future__ import annotations

import json
import secrets
import time
import uuid
from collections.abc import Callable
from hashlib import sha256
from typing import Any, Literal

from txbox.errors import ConfigurationError, UnusableMessage
from txbox.message import Headers, Message

#: No plain id starts with this: one that does is hashed as well.
DIGEST_PREFIX = "sha256:"
ID_BYTES_MAX = 255
#: A tombstone hashes unlike every payload, the empty one included.
TOMBSTONE_HASH = bytes(32)
# id and source as each transport spells them, in lower case
_CLOUDEVENTS = tuple(
    prefix + name
    for prefix in ("ce_", "ce-", "cloudevents:", "cloudevents_")
    for name in ("id", "source")
)

PayloadHash = Literal["raw", "json"] | Callable[[Message[Any]], bytes | str]


def canonical_id(value: object) -> str:
    """Return the id as it is stored: text of 1 to 255 UTF-8 bytes.

    Integers become decimal strings; longer ids, and ids that start with the digest prefix, become
    their SHA-256. Bytes are read as UTF-8.

    Raises:
        UnusableMessage: empty, another type, NUL or lone surrogates.
    """
    if type(value) is str:
        if (
            0 < len(value) <= ID_BYTES_MAX
            and value.isascii()
            and "\0" not in value
            and not value.startswith(DIGEST_PREFIX)
        ):
            return value
        text = value
    elif isinstance(value, int) and not isinstance(value, bool):
        try:
            text = str(value)
        except ValueError:
            # Python refuses to write integers of thousands of digits
            raise UnusableMessage(
                "The message id is an integer of thousands of digits: send text."
            ) from None
    elif isinstance(value, bytes):
        try:
            text = value.decode()
        except UnicodeDecodeError:
            raise UnusableMessage(
                "The message id is not UTF-8: send text, or set message_id= on the handler."
            ) from None
    elif isinstance(value, str) or type(value).__name__ == "UUID":
        text = str(value)
    else:
        raise UnusableMessage(
            f"The message id is a {type(value).__name__}: it must be text or an integer; "
            "set message_id= on the handler."
        )
    if not text:
        raise UnusableMessage(
            "The message id is empty: send one, or set message_id= on the handler."
        )
    encoded = checked_text(text, "message id")
    if len(encoded) > ID_BYTES_MAX or text.startswith(DIGEST_PREFIX):
        return DIGEST_PREFIX + sha256(encoded).hexdigest()
    return text


def checked_text(text: str, what: str) -> bytes:
    """Return the text as UTF-8, refusing what a database cannot keep.

    Raises:
        UnusableMessage: NUL or lone surrogates.
    """
    try:
        encoded = text.encode()
    except UnicodeEncodeError:
        raise UnusableMessage(f"The {what} contains lone surrogates: it is not text.") from None
    if b"\0" in encoded:
        raise UnusableMessage(f"The {what} contains a NUL character.")
    return encoded


def checked_consumer(name: object) -> str:
    """Return a consumer name that can be part of a key as it stands.

    Raises:
        ConfigurationError: empty, longer than 255 bytes, or no text.
    """
    try:
        if isinstance(name, str) and canonical_id(name) == name:
            return name
    except UnusableMessage:
        pass
    raise ConfigurationError(
        f"consumer={name!r} is no usable name: use text of 1 to 255 bytes without NUL."
    )


def scoped_id(scope: str, value: str) -> str:
    """Join a scope (CloudEvents `source`, a topic) and an id so that no two pairs give one text."""
    # the first space ends the scope, so spaces inside it, and the escape itself, are escaped
    return f"{scope.replace('%', '%25').replace(' ', '%20')} {value}"


def message_id(
    message: Message[Any],
    *,
    extract: Callable[[Message[Any]], object] | None = None,
    scope: Literal["topic"] | None = None,
    weak: bool = False,
) -> str:
    """Return the canonical id of a message (SEMANTICS 1.2 and 1.3).

    Args:
        extract: decides before everything else.
        scope: "topic" for ids that are unique within a topic only.
        weak: without any id, take the transport coordinates (`weak_id` in the message's origin).

    Raises:
        UnusableMessage: there is none, or it cannot be kept; an `extract` that raises counts as that.
    """
    found: object = message.id
    if extract is not None:
        found = _extracted(message, extract)
    elif found is None and message.headers:
        found = _id_in_headers(message.headers)
    if found is None and weak and "weak_id" in message.origin:
        # shown as weak; the source has put its incarnation into it
        return canonical_id(f"weak:{message.origin['weak_id']}")
    if found is None:
        raise UnusableMessage(
            "The message has no id: send a message-id header or CloudEvents source and id, "
            "or set message_id= on the handler."
        )
    if scope == "topic":
        # checked before it is scoped: an empty id must not become that of a whole topic
        return canonical_id(scoped_id(message.topic, canonical_id(found)))
    return canonical_id(found)


def _extracted(message: Message[Any], extract: Callable[[Message[Any]], object]) -> object:
    try:
        return extract(message)
    except Exception as error:
        # an extractor is user code run on a message nobody has checked yet: the message is at fault
        raise UnusableMessage(
            f"message_id= raised {type(error).__name__} on this message: check the extractor against the payload."
        ) from error


def _id_in_headers(headers: Headers) -> object:
    value = headers.get("message-id")
    if value is not None:
        return value
    texts = iter(headers.texts(*_CLOUDEVENTS))
    for identity, source in zip(texts, texts, strict=True):
        if identity and source:
            return scoped_id(source, identity)
    return None


def payload_hash(message: Message[Any], method: PayloadHash = "raw") -> bytes:
    """Return the 32-byte SHA-256 by which copies of a message are compared.

    Args:
        method: "raw" hashes the bytes, "json" the canonical JSON (sorted keys, no white space),
            a callable returns the bytes or text to hash.

    Raises:
        UnusableMessage: the method cannot read this payload.
    """
    payload = message.payload
    if payload is None:
        return TOMBSTONE_HASH
    if method == "raw":
        return sha256(payload).digest()
    try:
        if method == "json":
            content: bytes | str = json.dumps(
                json.loads(payload), sort_keys=True, separators=(",", ":")
            )
        else:
            content = method(message)
        return sha256(content.encode() if isinstance(content, str) else content).digest()
    except Exception as error:
        # the payload is what a stranger sent and the callable is user code
        raise UnusableMessage(
            f"payload_hash= raised {type(error).__name__} on this payload: it cannot be compared."
        ) from error


def time_ordered_id() -> str:
    """Return a new UUID version 7: ids that grow with time keep an index on them small and warm."""
    milliseconds = time.time_ns() // 1_000_000
    random_bits = int.from_bytes(secrets.token_bytes(10))
    number = (milliseconds & (1 << 48) - 1) << 80 | random_bits
    number = number & ~(0xF << 76) | 0x7 << 76
    number = number & ~(0x3 << 62) | 0x2 << 62
    return str(uuid.UUID(int=number))
