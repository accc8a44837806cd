"""Canonical message ids and payload hashes: what makes two deliveries the same message."""

from __future__ import annotations

import json
import re
import secrets
import time
import uuid
from collections.abc import Callable, Iterable
from datetime import datetime
from hashlib import sha256
from typing import Any, Literal, Protocol, cast

from txbox.boundaries import blamed
from txbox.errors import ConfigurationError, UnusableMessage
from txbox.message import Headers, Message
from txbox.text import with_article

_UUID_V7_TIME = slice(0, 6)
_UUID_V7 = re.compile(
    r"[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}",
    re.ASCII | re.IGNORECASE,
)
#: Reserved: a plain id that starts with this is hashed too.
DIGEST_PREFIX = "sha256:"
ID_BYTES_MAX = 255
#: Of topic, type, key and content type: the narrowest column of the supported databases.
TEXT_BYTES_MAX = 1024
#: An effect's consumer and topic are this plus its name.
EFFECT_PREFIX = "effect:"
#: What the topic of an agent's tool begins with, before its consumer; no effect of that name is meant.
TOOL_PREFIX = f"{EFFECT_PREFIX}tool:"
#: A tombstone's hash. No payload hashes to it, not even the empty one.
TOMBSTONE_HASH = bytes(32)
#: Prefixes of CloudEvents attributes in headers, in lower case; every source understands all of them.
CLOUDEVENTS_PREFIXES = ("ce_", "ce-", "cloudevents:", "cloudevents_")
_CLOUDEVENTS = tuple(prefix + name for prefix in CLOUDEVENTS_PREFIXES for name in ("id", "source"))

PayloadHash = Literal["raw", "json"] | Callable[[Message[Any]], bytes | str]


def canonical_id(value: object) -> str:
    """Return an id as it is stored: text of 1 to 255 UTF-8 bytes.

    Integers become decimal strings, and bytes are read as UTF-8. Ids that are longer, or that start
    with the digest prefix, are replaced by their SHA-256.

    Raises:
        UnusableMessage: the id is empty, of another type, or contains NUL or lone surrogates.
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
            # Python will not format integers of thousands of digits
            raise UnusableMessage(
                "The message id is an integer with thousands of digits: send text."
            ) from None
    elif isinstance(value, bytes):
        try:
            text = value.decode()
        except UnicodeDecodeError:
            raise UnusableMessage("The message id is not UTF-8: send text.") from None
    elif isinstance(value, str) or type(value).__name__ == "UUID":
        text = str(value)
    else:
        raise UnusableMessage(
            f"The message id is {with_article(type(value).__name__)}: it must be text or an integer."
        )
    if not text:
        raise UnusableMessage("The message id is empty.")
    encoded = checked_text(text, "message id")
    if len(encoded) > ID_BYTES_MAX or text.startswith(DIGEST_PREFIX):
        return DIGEST_PREFIX + sha256(encoded).hexdigest()
    return text


def checked_text(text: str, what: str) -> bytes:
    """Return the text as UTF-8. Refuses what a database cannot store.

    Raises:
        UnusableMessage: the text contains NUL or lone surrogates.
    """
    encoded = _encoded(text, what)
    if b"\0" in encoded:
        raise UnusableMessage(f"The {what} contains a NUL character.")
    return encoded


def _encoded(text: str, what: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise UnusableMessage(
            f"The {what} contains lone surrogates: it is not valid text."
        ) from None


class Fields(Protocol):
    """What a message, incoming or outgoing, carries beside its payload."""

    @property
    def topic(self) -> object: ...
    @property
    def type(self) -> object: ...
    @property
    def key(self) -> object: ...
    @property
    def content_type(self) -> object: ...


def check_fields(message: Fields) -> None:
    """Check topic, type, key and content type of a message that is to be stored, on whatever database.

    Raises:
        UnusableMessage: not text, or too long for the narrowest column of the supported databases.
    """
    if message.topic is None:
        raise UnusableMessage("The topic is None: it must be text.")
    check_text("topic", message.topic)
    check_text("type", message.type)
    check_text("key", message.key)
    check_text("content_type", message.content_type)


def check_text(what: str, value: object) -> None:
    """Check one text, or None, as `check_fields` does."""
    if value is None:
        return
    if not isinstance(value, str):
        raise UnusableMessage(
            f"The {what} is {with_article(type(value).__name__)}: it must be text."
        )
    plain = value.isascii() and "\0" not in value and len(value) <= TEXT_BYTES_MAX
    if not plain and len(checked_text(value, what)) > TEXT_BYTES_MAX:
        raise UnusableMessage(f"The {what} has more than {TEXT_BYTES_MAX} bytes.")


def check_headers(headers: Headers, *, sent: bool = False) -> int:
    """Check the values of headers; returns how many characters these and the names have.

    Args:
        sent: by the outbox, and so as UTF-8; the inbox keeps text of every kind, escaped.

    Raises:
        UnusableMessage: a value is not text, bytes or None.
    """
    characters = 0
    pairs = cast("Iterable[tuple[str, Any]]", headers)
    for name, value in pairs:
        if value is None:
            characters += len(name)
            continue
        if not isinstance(value, (str, bytes)):
            raise UnusableMessage(
                f"The header {name[:80]!r} is {with_article(type(value).__name__)}: it must be text, bytes or None."
            )
        if sent:
            _encoded(name, "name of a header")
            if isinstance(value, str):
                _encoded(value, f"header {name[:80]!r}")
        characters += len(name) + len(value)
    return characters


def check_numbers(sequence: object, time: object) -> None:
    """Check the version and the time of a message.

    Raises:
        UnusableMessage: they are something else, or do not fit into their columns.
    """
    if sequence is not None:
        if not isinstance(sequence, int) or isinstance(sequence, bool):
            raise UnusableMessage(
                f"The sequence is {with_article(type(sequence).__name__)}: it must be an integer."
            )
        if not -(2**63) <= sequence < 2**63:
            raise UnusableMessage("The sequence does not fit into 64 bits.")
    if time is not None and not isinstance(time, datetime):
        raise UnusableMessage(
            f"The time is {with_article(type(time).__name__)}: it must be a datetime."
        )


def checked_consumer(name: object) -> str:
    """Return a consumer name that can be used in a key unchanged.

    Raises:
        ConfigurationError: it is empty, longer than 255 bytes, or not text.
    """
    try:
        if isinstance(name, str) and canonical_id(name) == name:
            return name
    except UnusableMessage:
        pass
    raise ConfigurationError(
        f"invalid consumer name {name!r}: use text of 1 to 255 bytes without NUL."
    )


def scoped_id(scope: str, value: str) -> str:
    """Join a scope (CloudEvents `source`, a topic) and an id, so that different pairs never collide."""
    # the first space ends the scope, so spaces inside it are escaped, and so is the escape itself
    return f"{scope.replace('%', '%25').replace(' ', '%20')} {value}"


def message_id(
    message: Message[Any],
    *,
    extract: Callable[[Message[Any]], object] | None = None,
    scope: Literal["topic"] | None = None,
    weak: bool = False,
) -> str:
    """Return the canonical id of a message (promises 1.2 and 1.3).

    Args:
        extract: takes precedence over everything else.
        scope: "topic" for ids that are unique within a topic only.
        weak: fall back to the transport coordinates (`weak_id` in the message's origin).

    Raises:
        UnusableMessage: there is no id, it cannot be stored, or `extract` raised.
    """
    chosen: object = message.id
    if extract is not None:
        chosen = _extracted(message, extract)
    elif chosen is None and message.headers:
        chosen = id_in_headers(message.headers)
    if chosen is None and weak and "weak_id" in message.origin:
        # marked as weak; the source has included the stream's incarnation
        return canonical_id(f"weak:{message.origin['weak_id']}")
    if chosen is None:
        where = "" if extract is None else " where message_id= looks for it"
        raise UnusableMessage(f"The message has no id{where}.")
    if scope == "topic":
        # checked before scoping: an empty id must not become the id of a whole topic
        return canonical_id(scoped_id(message.topic, canonical_id(chosen)))
    return canonical_id(chosen)


def _extracted(message: Message[Any], extract: Callable[[Message[Any]], object]) -> object:
    try:
        return extract(message)
    except BaseException as error:
        # an extractor is user code run on unchecked input: blame the message
        raise UnusableMessage(
            f"message_id= raised {blamed(error)} on this message: check the extractor against the payload."
        ) from error


def id_in_headers(headers: Headers) -> object:
    """Return the id in the headers, unconverted, if they have one."""
    value = headers.get("message-id")
    if value is not None:
        return value
    texts = iter(headers.texts(*_CLOUDEVENTS))
    for identity, source in zip(texts, texts, strict=True):
        if identity and source:
            return scoped_id(source, identity)
    return None


def payload_hash(message: Message[Any], method: PayloadHash = "raw") -> bytes:
    """Return the 32-byte SHA-256 that tells whether two copies of a message are equal.

    Args:
        method: "raw" hashes the bytes; "json" hashes the canonical JSON (sorted keys, no white
            space); a callable returns the bytes or text to hash.

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
    except BaseException as error:
        # the payload is untrusted and the callable is user code
        raise UnusableMessage(
            f"payload_hash= raised {blamed(error)} on this payload, so copies of it cannot be compared."
        ) from error


def time_ordered_id() -> str:
    """Return a new UUID version 7. Ids that grow with time keep their index small and in cache."""
    milliseconds = time.time_ns() // 1_000_000
    random_bits = int.from_bytes(secrets.token_bytes(10))
    number = (milliseconds & (1 << 48) - 1) << 80 | random_bits
    number = number & ~(0xF << 76) | 0x7 << 76
    number = number & ~(0x3 << 62) | 0x2 << 62
    return str(uuid.UUID(int=number))


def derived_id(consumer: str, message_id: str, ordinal: int) -> str:
    """Return the id of the n-th message that a message causes in a consumer, as a UUID.

    The same arguments always give the same id. If the cause's id is a UUIDv7, so is the result, with the
    same time, so that ids stay ordered by time along a chain.
    """
    digest = bytearray(
        sha256(f"{len(consumer)}:{consumer}{message_id}:{ordinal}".encode()).digest()[:16]
    )
    version = 8
    moment = _time_of(message_id)
    if moment is not None:
        digest[_UUID_V7_TIME] = moment
        version = 7
    digest[6] = digest[6] & 0x0F | version << 4
    digest[8] = digest[8] & 0x3F | 0x80
    # as a UUID writes it, in a fifth of the time
    text = digest.hex()
    return f"{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"


def _time_of(message_id: str) -> bytes | None:
    if _UUID_V7.fullmatch(message_id) is None:
        return None
    return bytes.fromhex(message_id[:8] + message_id[9:13])
