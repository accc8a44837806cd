"""How messages become columns and come back; the user's codec sees payloads, headers, results and error texts."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Protocol

from txbox.errors import ConfigurationError
from txbox.message import Headers, HeaderValue, Message
from txbox.store.dialect import as_time

#: What a text begins with that a codec has encoded: an error, or the headers, whose JSON begins otherwise.
ENCODED_ERROR = "codec:"
#: Stands in events and logs for an error text that a codec encodes at rest.
HIDDEN_ERROR = "(encoded: see `txbox show`)"
# They open doors elsewhere, so no row holds them and no relay forwards them: what HTTP, gateways and the webhook
# schemes authenticate with. By name and not by pattern: a handler's own `page-token` is its own.
_CREDENTIALS = frozenset(
    {
        "authorization", "proxy-authorization", "x-authorization", "x-forwarded-authorization", "cookie", "cookie2",
        "set-cookie", "set-cookie2", "x-api-key", "api-key", "apikey", "x-apikey", "ocp-apim-subscription-key",
        "x-auth-token", "x-access-token", "access-token", "x-id-token", "x-refresh-token", "x-session-token",
        "x-csrf-token", "x-xsrf-token", "x-functions-key", "x-goog-api-key", "x-goog-iap-jwt-assertion",
        "x-amz-security-token", "x-amzn-oidc-accesstoken", "x-amzn-oidc-data", "x-vault-token",
        "x-ms-token-aad-access-token", "x-ms-token-aad-id-token", "x-ms-token-aad-refresh-token",
        "x-forwarded-access-token", "cf-access-jwt-assertion",
        "cf-access-client-secret", "private-token", "job-token", "x-gitlab-token", "x-github-token", "x-secret",
        "x-webhook-secret", "x-webhook-token", "x-telegram-bot-api-secret-token", "x-slack-signature",
        "x-hub-signature", "x-hub-signature-256", "stripe-signature", "webhook-signature", "svix-signature",
        "x-shopify-hmac-sha256", "x-twilio-signature", "x-signature", "x-webhook-signature", "password",
    }
)  # fmt: skip


class Codec(Protocol):
    """Encrypts or compresses payloads, headers, results and error texts at rest.

    `key_id` names the key in use; `decode` gets the id that a row was written with.
    """

    @property
    def key_id(self) -> str: ...
    def encode(self, data: bytes) -> bytes: ...
    def decode(self, data: bytes, key_id: str) -> bytes: ...


@dataclass(slots=True)
class Arrival:
    """A message with the id and the hash it is known by; `message.id` is `message_id`.

    Attributes:
        replied: of a replay, what the message was answered with, as JSON.
    """

    message: Message[Any]
    message_id: str
    hash: bytes | None
    replied: bytes | None = None

    def differs(self, other: Arrival) -> bool:
        """Say whether the other one has another payload; without a hash there is nothing to compare."""
        return self.hash != other.hash and None not in (self.hash, other.hash)


@dataclass(frozen=True, slots=True)
class Leased:
    """A row taken from the table.

    Attributes:
        attempts: failures so far.
        starts: runs from the table that never ended; of a leased row with the one to come.
        number: its place in the order of arrivals.
    """

    arrival: Arrival
    attempts: int
    starts: int
    number: int


def encode_headers(headers: Headers) -> str | None:
    """Write headers as JSON in ASCII, without credentials; bytes that are not UTF-8 travel as base64."""
    headers = without_credentials(headers)
    if not headers:
        return None
    return json.dumps(
        [[name, _header_out(value)] for name, value in headers], separators=(",", ":")
    )


def _header_out(value: HeaderValue) -> object:
    if isinstance(value, bytes):
        return {"b64": base64.b64encode(value).decode()}
    return value


def decode_headers(text: str | None) -> Headers:
    """Read what `encode_headers` wrote."""
    if not text:
        return Headers()
    # rows of earlier releases may hold credentials
    return without_credentials(
        Headers((name, _header_back(value)) for name, value in json.loads(text))
    )


def without_credentials(headers: Headers) -> Headers:
    """Leave out what authenticates somebody: cookies, tokens, keys and signatures by their usual names."""
    if not any(name.lower() in _CREDENTIALS for name, _ in headers):
        return headers
    return Headers(pair for pair in headers if pair[0].lower() not in _CREDENTIALS)


def _header_back(value: Any) -> HeaderValue:
    return value if value is None or isinstance(value, str) else base64.b64decode(value["b64"])


class Columns:
    """Turns messages into columns and rows into messages, through the codec where there is one."""

    def __init__(self, codec: Codec | None = None) -> None:
        self._codec = codec

    @property
    def key_id(self) -> str | None:
        """The key that rows are written with now; None without a codec."""
        return self._codec.key_id if self._codec else None

    def payload(self, payload: bytes | None) -> bytes | None:
        """Write a payload column."""
        return self._codec.encode(payload) if self._codec and payload is not None else payload

    def headers(self, headers: Headers) -> str | None:
        """Write a headers column: JSON without credentials, marked where a codec has encoded it."""
        text = encode_headers(headers)
        return None if text is None else self.error(text)

    def headers_back(self, text: str | None, key_id: str | None) -> Headers:
        """Read a headers column; those of rows that were written before the codec are plain.

        Raises:
            ConfigurationError: the row was written through a codec and this app has none.
        """
        if text is None or not text.startswith(ENCODED_ERROR) or key_id is None:
            return decode_headers(text)
        if self._codec is None:
            raise _encoded("headers are", key_id)
        return decode_headers(self.error_back(text, key_id))

    def error(self, text: str) -> str:
        """Write an error column: text, marked where a codec has encoded it."""
        if self._codec is None:
            return text
        return ENCODED_ERROR + base64.b64encode(self._codec.encode(text.encode())).decode()

    def told(self, error: str) -> str:
        """An error text as events and logs may have it: not where a codec encodes it at rest."""
        return error if self._codec is None else HIDDEN_ERROR

    def error_back(self, text: str | None, key_id: str | None) -> str | None:
        """Read an error column. Without the row's key it stays encoded; without a codec only the key is told."""
        if text is None or not text.startswith(ENCODED_ERROR) or key_id is None:
            return text
        if self._codec is None:
            return f"(encoded with key {key_id})"
        return self._codec.decode(
            base64.b64decode(text.removeprefix(ENCODED_ERROR)), key_id
        ).decode()

    def payload_back(self, payload: Any, key_id: str | None) -> bytes | None:
        """Read a payload column.

        Raises:
            ConfigurationError: the row was written through a codec and this app has none.
        """
        if payload is None:
            return None
        if key_id is None:
            return bytes(payload)
        if self._codec is None:
            raise _encoded("payload is", key_id)
        return self._codec.decode(bytes(payload), key_id)

    def result(self, result: bytes) -> bytes:
        """Encode what a handler returned, with the key's name: the row's own is that of its payload."""
        if self._codec is None:
            return result
        return b"\0" + self._codec.key_id.encode() + b"\0" + self._codec.encode(result)

    def result_back(self, result: Any) -> bytes | None:
        """Read a result column, as `payload_back` reads a payload."""
        if result is None:
            return None
        kept = bytes(result)
        if not kept.startswith(b"\0"):  # no JSON begins so
            return kept
        key_id, _, encoded = kept[1:].partition(b"\0")
        return self.payload_back(encoded, key_id.decode())

    def single(self, arrival: Arrival) -> dict[str, Any]:
        """The values of `slim` for one message."""
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
        """The columns that a processed row keeps."""
        messages = [arrival.message for arrival in arrivals]
        return {
            "message_id": [arrival.message_id for arrival in arrivals],
            "topic": [message.topic for message in messages],
            "type": [message.type for message in messages],
            "key": [message.key for message in messages],
            "sequence": [message.sequence for message in messages],
            "payload_hash": [arrival.hash for arrival in arrivals],
        }

    def whole(self, arrivals: Sequence[Arrival]) -> dict[str, list[Any]]:
        """All columns of rows that keep their payload."""
        kept = [self.content(arrival.message) for arrival in arrivals]
        columns = self.slim(arrivals)
        for name in ("content_type", "headers", "origin", "payload"):
            columns[name] = [content[name] for content in kept]
        return columns

    def content(self, message: Message[Any]) -> dict[str, Any]:
        """The values of a message that only rows with a payload have."""
        return {
            "content_type": message.content_type,
            "headers": self.headers(message.headers),
            "origin": encode_origin(message.origin, message.time),
            "payload": self.payload(message.payload),
        }

    def arrival(self, consumer: str, row: Sequence[Any]) -> Leased:
        """Read a row of one of the lease queries, or of replay_read.

        Raises:
            ConfigurationError: as `payload_back`.
        """
        (message_id, topic, kind, key, sequence, received_at, hashed, attempts, starts) = row[:9]
        (content_type, headers, origin, payload, _, key_id, number) = row[9:]
        coordinates, time = decode_origin(origin)
        message: Message[Any] = Message(
            id=message_id,
            topic=topic,
            type=kind,
            key=key,
            sequence=sequence,
            payload=self.payload_back(payload, key_id),
            headers=self.headers_back(headers, key_id),
            content_type=content_type,
            time=time,
            origin=coordinates,
            consumer=consumer,
            attempt=attempts + 1,
            received_at=as_time(received_at),
        )
        arrival = Arrival(message, message_id, None if hashed is None else bytes(hashed))
        return Leased(arrival, attempts, starts, number)


def _encoded(what: str, key_id: str) -> ConfigurationError:
    return ConfigurationError(
        f"The {what} encoded with key {key_id}: give App(codec=…) that knows it."
    )


def encode_origin(origin: Mapping[str, Any], time: datetime | None) -> str | None:
    """Write where a message came from, and its own time, as JSON; what JSON does not know as its text."""
    if not origin and time is None:
        return None
    return json.dumps({**origin, **({"_time": time.isoformat()} if time else {})}, default=str)


def decode_origin(text: str | None) -> tuple[dict[str, Any], datetime | None]:
    """Read what `encode_origin` wrote."""
    if not text:
        return {}, None
    origin = json.loads(text)
    time = origin.pop("_time", None)
    return origin, as_time(time)
