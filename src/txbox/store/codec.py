"""How messages become columns and back. The user's codec sees payloads, headers, results and error texts."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from datetime import datetime
from hashlib import sha256
from inspect import signature
from typing import Any, Literal, NamedTuple, Protocol
from urllib.parse import quote, unquote

from txbox.boundaries import Boundary, blamed
from txbox.errors import StoreUnavailable, TxboxError, UnreadableMessage, UnusableMessage
from txbox.message import NO_HEADERS, Headers, HeaderValue, Message, headers_in
from txbox.policy import CREDENTIAL_HEADERS, Redaction
from txbox.store.dialect import as_time

#: Prefix of an error text or of headers that a codec has encoded. Behind it are the name of the key, percent-encoded, a
#: colon, and base64. Plain headers are JSON, which starts differently.
ENCODED = "codec:"
#: Shown in events and logs instead of an error text that a codec encodes at rest.
HIDDEN_ERROR = "(encoded: see `txbox show`)"


class Codec(Protocol):
    """Encrypts or compresses payloads, headers, results and error texts at rest.

    `key_id` names the current key; `decode` gets the id the row was written with. An exception is about the text or
    payload, and costs that message an attempt. While a key service is away, raise StoreUnavailable: the caller retries
    later. If both methods take `context`, they get the same bytes, which name the row and the column: authenticate
    them, and no text can be moved to another.
    """

    @property
    def key_id(self) -> str: ...
    def encode(self, data: bytes) -> bytes: ...
    def decode(self, data: bytes, key_id: str) -> bytes: ...


class Row(NamedTuple):
    """The row that a text belongs to. The attempts of a message are of its row in the inbox.

    Attributes:
        consumer: None in the outbox.
        hash: in the quarantine, which holds several messages of one id.
    """

    consumer: str | None
    message_id: str
    hash: bytes | None = None

    def context(self, column: str) -> bytes:
        """What the text of a column is bound to."""
        if self.hash is not None:
            named = ["quarantine", self.consumer, self.message_id, self.hash.hex(), column]
        else:
            table = "outbox" if self.consumer is None else "inbox"
            named = [table, self.consumer, self.message_id, column]
        return json.dumps(named).encode()


class Texts(NamedTuple):
    """The columns of a row that a codec encodes, as they are stored; None where it has none."""

    key_id: str | None = None
    payload: bytes | None = None
    headers: str | None = None
    error: str | None = None
    result: bytes | None = None


@dataclass(slots=True)
class Arrival:
    """A message with its id and hash; `message.id` is `message_id`.

    Attributes:
        replied: for a replay, the original reply as JSON.
        first: the ordinal of the first message that it causes.
        received: when it arrived, by `time.monotonic`; 0 if it comes from the table.
        decoded: as the next run of its handler sees it, if that has been decoded ahead.
        unreadable: why its row cannot be read; its message then has neither payload nor headers.
    """

    message: Message[Any]
    message_id: str
    hash: bytes | None
    replied: bytes | None = None
    first: int = 0
    received: float = 0.0
    decoded: Message[Any] | None = None
    unreadable: UnreadableMessage | None = None

    def differs(self, other: Arrival) -> bool:
        """Whether the other has a different payload. Without both hashes there is nothing to compare."""
        return self.hash != other.hash and None not in (self.hash, other.hash)


@dataclass(frozen=True, slots=True)
class Leased:
    """A row leased from the table.

    Attributes:
        attempts: failures so far.
        starts: runs from the table that never ended, including the one about to start.
        number: its position in arrival order.
    """

    arrival: Arrival
    attempts: int
    starts: int
    number: int


# made once: json.dumps makes one for every call
_headers_out = json.JSONEncoder(separators=(",", ":")).encode


def encode_headers(headers: Headers) -> str | None:
    """Write headers as ASCII JSON, without credentials; values that are bytes are encoded as base64."""
    headers = without_credentials(headers)
    if not headers:
        return None
    return _headers_out([[name, _header_out(value)] for name, value in headers])


def _header_out(value: HeaderValue) -> object:
    if isinstance(value, bytes):
        return {"b64": base64.b64encode(value).decode()}
    return value


def decode_headers(text: str | None) -> Headers:
    """Read what `encode_headers` wrote.

    Raises:
        ValueError, TypeError, KeyError, RecursionError: it is something else.
    """
    if not text:
        return NO_HEADERS
    # the list of names may have grown since the row was written
    return without_credentials(headers_in(text))


def without_credentials(headers: Headers) -> Headers:
    """Remove credentials: cookies, tokens, keys and signatures, by their usual header names."""
    if not any(name.lower() in CREDENTIAL_HEADERS for name, _ in headers):
        return headers
    return Headers(pair for pair in headers if pair[0].lower() not in CREDENTIAL_HEADERS)


def quarantine_hash(message: Message[Any], message_id: str) -> bytes:
    """Return the SHA-256 that tells quarantined messages of one id apart.

    It is that of the payload. Messages without an id have nothing else in common: there it covers topic, type, key
    and headers as well, so that only a copy that is equal in all of them shares a row.
    """
    payload = message.payload or b""
    if message_id:
        return sha256(payload).digest()
    named = [message.topic, message.type, message.key, encode_headers(message.headers)]
    return sha256(json.dumps(named).encode() + payload).digest()


class Columns:
    """Converts messages to columns and rows to messages, through the codec if there is one."""

    def __init__(
        self,
        codec: Codec | None = None,
        redact: Redaction | None = None,
        plain: Literal["accept", "refuse"] = "refuse",
    ) -> None:
        self.codec = codec
        self._binds = codec is not None and _takes_context(codec)
        self._refuses_plain = codec is not None and plain == "refuse"
        self.redact = redact or Redaction()
        #: Python's name of the database's encoding, if that lacks characters of Unicode; read at start.
        self.encoding: str | None = None
        self.shows_errors = True

    def without_errors(self) -> Columns:
        """Return columns that read every error text as None: for people who may not see contents."""
        columns = copy(self)
        columns.shows_errors = False
        return columns

    def lacks(self, *texts: str | None) -> bool:
        """Whether the database's encoding lacks a character of these texts."""
        if self.encoding is None:
            return False
        try:
            "".join(filter(None, texts)).encode(self.encoding)
        except UnicodeEncodeError:
            return True
        return False

    def check_encoding(self, arrival: Arrival) -> None:
        """Check that the database can hold a message's id and names as they are.

        Raises:
            UnusableMessage: its encoding lacks a character of them.
        """
        message, message_id = arrival.message, arrival.message_id
        if self.lacks(message_id, message.topic, message.type, message.key, message.content_type):
            error = UnusableMessage(
                f"The id, topic, type, key or content type has characters that the encoding of this database "
                f"({self.encoding}) lacks: {message_id!a}."
            )
            error.message_id = message_id
            raise error

    def fitting(self, params: dict[str, Any]) -> dict[str, Any]:
        """Escape, in texts for people, the characters that the database's encoding lacks."""
        encoding = self.encoding
        if encoding is None:
            return params
        return {
            name: value.encode(encoding, "backslashreplace").decode(encoding)
            if isinstance(value, str)
            else value
            for name, value in params.items()
        }

    @property
    def key_id(self) -> str | None:
        """The key that rows are written with now; None without a codec."""
        return self.codec.key_id if self.codec else None

    def _context(self, row: Row, column: str) -> dict[str, Any]:
        return {"context": row.context(column)} if self._binds else {}

    def _encoded(self, data: bytes, row: Row, column: str) -> bytes:
        """Encode with the codec.

        Raises:
            UnusableMessage: it fails on this.
        """
        assert self.codec is not None, "only a codec encodes"
        try:
            return self.codec.encode(data, **self._context(row, column))
        except StoreUnavailable:
            raise
        except BaseException as error:
            raise UnusableMessage(
                f"App(codec=…) raised {blamed(error)} on this message, so it cannot be kept "
                f"(boundary: {Boundary.CODEC})."
            ) from error

    def _decoded(self, data: bytes, key_id: str, row: Row, column: str) -> bytes:
        """Decode with the codec.

        Raises:
            UnreadableMessage: the codec fails on this, or is missing.
        """
        if self.codec is None:
            raise UnreadableMessage(
                f"It is encoded with key {key_id}: pass App(codec=…) one that knows this key."
            )
        try:
            return self.codec.decode(data, key_id, **self._context(row, column))
        except (StoreUnavailable, UnreadableMessage):
            raise
        except BaseException as error:
            blamed(error)
            raise _unreadable(error) from error

    def payload(self, payload: bytes | None, row: Row) -> bytes | None:
        """Write a payload column.

        Raises:
            UnusableMessage: the codec fails on it.
        """
        if self.codec is None or payload is None:
            return payload
        return self._encoded(payload, row, "payload")

    def headers(self, headers: Headers, row: Row) -> str | None:
        """Write a headers column: JSON without credentials, prefixed if a codec has encoded it.

        Raises:
            UnusableMessage: as for `payload`.
        """
        text = encode_headers(headers)
        return None if text is None else self._text(text, row, "headers")

    def headers_back(self, text: str | None, row: Row) -> Headers:
        """Read a headers column.

        Raises:
            UnreadableMessage: as for `payload_back`.
        """
        if text and self._refuses_plain and not text.startswith(ENCODED):
            raise _plain("headers")
        try:
            return decode_headers(self._text_back(text, row, "headers"))
        except (TypeError, KeyError, ValueError, RecursionError) as error:
            raise _unreadable(error) from error

    def error(self, text: str, row: Row) -> str:
        """Write an error column: the redacted text, prefixed if a codec has encoded it.

        Args:
            text: redacted once before it was cut to its size, so that there is no other bound here.
        """
        try:
            return self._text(self.redact.error(text, len(text)), row, "error")
        except UnusableMessage:
            # a failure is recorded all the same
            return "(withheld: App(codec=…) failed on this text)"

    def _text(self, text: str, row: Row, column: str) -> str:
        if self.codec is None:
            return text
        encoded = self._encoded(text.encode(), row, column)
        return _prefix(self.codec.key_id) + base64.b64encode(encoded).decode()

    def shown_error(self, error: str) -> str:
        """Return an error text for events and logs; hidden if a codec encodes it at rest."""
        return self.redact.error(error) if self.codec is None else HIDDEN_ERROR

    def error_back(self, text: str | None, row: Row) -> str | None:
        """Read an error column for people; if it cannot be decoded, say why.

        Redaction also applies to rows written before its rules existed.
        """
        if text is None or not self.shows_errors:
            return None
        if self.codec is None and (parts := _encoded_parts(text)):
            return f"(encoded with key {parts[0]}: the App that has the codec= can read it)"
        try:
            plain = self._text_back(text, row, "error") or ""
            return self.redact.error(plain, len(plain))
        except (UnreadableMessage, ValueError) as error:
            # one such row must not hide a page of others
            return (
                f"({error})" if isinstance(error, UnreadableMessage) else f"({_unreadable(error)})"
            )

    def _text_back(self, text: str | None, row: Row, column: str) -> str | None:
        parts = _encoded_parts(text)
        if parts is None:
            return text
        key_id, encoded = parts
        return self._decoded(base64.b64decode(encoded), key_id, row, column).decode()

    def payload_back(self, payload: Any, key_id: str | None, row: Row) -> bytes | None:
        """Read a payload column.

        Raises:
            UnreadableMessage: the codec fails on it, or the row was written with a codec and this app has none.
        """
        if payload is None:
            return None
        if key_id is not None:
            return self._decoded(bytes(payload), key_id, row, "payload")
        if self._refuses_plain:
            raise _plain("payload")
        return bytes(payload)

    def result(self, result: bytes, row: Row) -> bytes:
        """Encode a handler's result along with the key's name, because the row's key_id is that of its payload."""
        if self.codec is None:
            return result
        return _result_prefix(self.codec.key_id) + self._encoded(result, row, "result")

    def result_back(self, result: Any, row: Row) -> bytes | None:
        """Read a result column, the way `payload_back` reads a payload."""
        if result is None:
            return None
        kept = bytes(result)
        if not kept.startswith(b"\0"):  # JSON never does
            if self._refuses_plain:
                raise _plain("result")
            return kept
        return self._result_decoded(kept, row)

    def _result_decoded(self, kept: bytes, row: Row) -> bytes:
        key_id, _, encoded = kept[1:].partition(b"\0")
        return self._decoded(encoded, key_id.decode("utf-8", "backslashreplace"), row, "result")

    def behind(self, texts: Texts) -> Literal["plain", "older"] | None:
        """Say whether a text is not under the codec's key; the first characters of each are enough.

        "plain" is what is refused unless the App accepts it. An error text may be plain: the database writes some.
        """
        assert self.codec is not None, "without a codec there is nothing to compare with"
        current = self.codec.key_id
        key_id, payload, headers, error, result = texts
        if (
            (payload is not None and key_id is None)
            or (headers and not headers.startswith(ENCODED))
            or (result is not None and not result.startswith(b"\0"))
        ):
            return "plain"
        if (
            (payload is not None and key_id != current)
            or any(text and not text.startswith(_prefix(current)) for text in (headers, error))
            or (result is not None and not result.startswith(_result_prefix(current)))
        ):
            return "older"
        return None

    @property
    def prefix_length(self) -> int:
        """How many characters of a text, or bytes of a result, tell its key."""
        return len(_prefix(self.codec.key_id)) if self.codec else 0

    def encoded_anew(self, texts: Texts, row: Row) -> Texts:
        """Return the texts of a row under the codec's key. Plain ones are returned unchanged.

        Raises:
            UnreadableMessage: the codec fails on one, or lacks its key.
            UnusableMessage: it fails to encode one.
        """
        key_id, payload, headers, error, result = texts
        try:
            headers = self._text_back(headers, row, "headers")
            error = self._text_back(error, row, "error")
        except ValueError as failure:
            raise _unreadable(failure) from failure
        if payload is not None and key_id is not None:
            payload = self._decoded(payload, key_id, row, "payload")
        if result is not None and result.startswith(b"\0"):
            result = self._result_decoded(result, row)
        return Texts(
            key_id=key_id if payload is None else self.key_id,
            payload=self.payload(payload, row),
            headers=None if headers is None else self._text(headers, row, "headers"),
            error=None if error is None else self._text(error, row, "error"),
            result=None if result is None else self.result(result, row),
        )

    def row(self, arrival: Arrival) -> dict[str, Any]:
        """Return what a processed row keeps of a message."""
        message = arrival.message
        return {
            "message_id": arrival.message_id,
            "topic": message.topic,
            "type": message.type,
            "key": message.key,
            "sequence": message.sequence,
            "payload_hash": arrival.hash,
        }

    def slim(self, arrivals: Sequence[Arrival]) -> dict[str, list[Any]]:
        """Return the columns of `row` for many messages."""
        # written out: a third of the time that transposing rows takes, and every batch passes here
        messages = [arrival.message for arrival in arrivals]
        return {
            "message_id": [arrival.message_id for arrival in arrivals],
            "topic": [message.topic for message in messages],
            "type": [message.type for message in messages],
            "key": [message.key for message in messages],
            "sequence": [message.sequence for message in messages],
            "payload_hash": [arrival.hash for arrival in arrivals],
        }

    def whole(self, consumer: str, arrivals: Sequence[Arrival]) -> dict[str, list[Any]]:
        """Return all columns, for rows that keep their payload."""
        kept = [
            self.content(arrival.message, Row(consumer, arrival.message_id)) for arrival in arrivals
        ]
        return self.slim(arrivals) | {name: [row[name] for row in kept] for name in kept[0]}

    def content(self, message: Message[Any], row: Row) -> dict[str, Any]:
        """Return the values that only rows with a payload have."""
        return {
            "content_type": message.content_type,
            "headers": self.headers(message.headers, row),
            "origin": encode_origin(message.origin, message.time),
            "payload": self.payload(message.payload, row),
        }

    def arrival(self, consumer: str, row: Sequence[Any]) -> Leased:
        """Read a row returned by one of the lease queries, or by replay_read.

        One whose content cannot be read comes back with the reason instead (`Arrival.unreadable`).
        """
        (message_id, topic, kind, key, sequence, received_at, hashed, attempts, starts) = row[:9]
        (content_type, headers, origin, payload, _, key_id, number) = row[9:]
        coordinates, time = decode_origin(origin)
        body: bytes | None = None
        carried, unreadable = Headers(), None
        try:
            bound = Row(consumer, message_id)
            body = self.payload_back(payload, key_id, bound)
            carried = self.headers_back(headers, bound)
        except UnreadableMessage as error:
            body, unreadable = None, error
            error.stored = {
                "content_type": content_type, "headers": headers, "origin": origin,
                "payload": payload, "key_id": key_id,
            }  # fmt: skip
        message: Message[Any] = Message(
            id=message_id,
            topic=topic,
            type=kind,
            key=key,
            sequence=sequence,
            payload=body,
            headers=carried,
            content_type=content_type,
            time=time,
            origin=coordinates,
            consumer=consumer,
            attempt=attempts + 1,
            received_at=as_time(received_at),
        )
        hashed = None if hashed is None else bytes(hashed)
        arrival = Arrival(message, message_id, hashed, unreadable=unreadable)
        return Leased(arrival, attempts, starts, number)


def _prefix(key_id: str) -> str:
    return f"{ENCODED}{quote(key_id, safe='')}:"


def _result_prefix(key_id: str) -> bytes:
    return b"\0" + key_id.encode() + b"\0"


def _encoded_parts(text: str | None) -> tuple[str, str] | None:
    """The name of the key, and base64; None for a plain text."""
    if text is None or not text.startswith(ENCODED):
        return None
    key_id, _, encoded = text.removeprefix(ENCODED).partition(":")
    return (unquote(key_id), encoded) if encoded else None


def _takes_context(codec: Codec) -> bool:
    """Whether both methods of a codec take the `context` that names row and column."""
    try:
        return all(
            "context" in signature(method).parameters for method in (codec.encode, codec.decode)
        )
    except (TypeError, ValueError):
        # some builtins have none
        return False


def _plain(what: str) -> UnreadableMessage:
    return UnreadableMessage(
        f"Its {what} is plain, though App(codec=…) encodes: somebody has altered the row, or it is from before there "
        'was a codec, and App(plain="accept") reads it.'
    )


def _unreadable(error: BaseException) -> UnreadableMessage:
    # the texts of others may quote what the codec hides
    said = f": {error}" if isinstance(error, TxboxError) else ""
    return UnreadableMessage(
        f"Its content cannot be read with App(codec=…): {type(error).__name__}{said}"
    )


def encode_origin(origin: Mapping[str, Any], time: datetime | None) -> str | None:
    """Write a message's origin and time as JSON; what JSON cannot express is written as text."""
    if not origin and time is None:
        return None
    moment = {"_time": time.isoformat()} if time else {}
    try:
        return json.dumps({**origin, **moment}, default=str)
    except Exception as error:  # noqa: BLE001  # it may contain objects of any kind, and only people read it
        return json.dumps({"unreadable": type(error).__name__, **moment})


def decode_origin(text: str | None) -> tuple[dict[str, Any], datetime | None]:
    """Read what `encode_origin` wrote; nothing if it was altered."""
    if not text:
        return {}, None
    try:
        origin = dict(json.loads(text))
    except (TypeError, ValueError, RecursionError):
        return {}, None
    time = origin.pop("_time", None)
    return origin, as_time(time)
