"""The message: an immutable value that carries no way to acknowledge it."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import FrozenInstanceError, dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar, cast, overload

Body = TypeVar("Body")
HeaderValue = str | bytes | None
HeaderPairs = Iterable[tuple[str, HeaderValue]] | Mapping[str, HeaderValue]


class Headers(tuple[tuple[str, HeaderValue], ...]):
    """An ordered multi-map of header names and values. Names are case-insensitive."""

    __slots__ = ()

    def __new__(cls, pairs: HeaderPairs = ()) -> Self:
        if type(pairs) is cls:
            return pairs
        items = (
            cast("Mapping[str, HeaderValue]", pairs).items()
            if isinstance(pairs, Mapping)
            else pairs
        )
        return super().__new__(cls, tuple((str(name), value) for name, value in items))

    @overload
    def get(self, name: str) -> HeaderValue: ...
    @overload
    def get(self, name: str, default: HeaderValue) -> HeaderValue: ...
    def get(self, name: str, default: HeaderValue = None) -> HeaderValue:
        """Return the first value under `name`, or `default`."""
        wanted = name.lower()
        for header, value in self:
            if header.lower() == wanted:
                return value
        return default

    def get_all(self, name: str) -> list[HeaderValue]:
        """Return every value under `name`, in order."""
        wanted = name.lower()
        return [value for header, value in self if header.lower() == wanted]

    def text(self, name: str) -> str | None:
        """Return the first value under `name` as text, or None if it is absent or not UTF-8."""
        return _text(self.get(name))

    def texts(self, *names: str) -> list[str | None]:
        """Read several names in one pass, each as `text` does. The names must be lower case."""
        first: dict[str, HeaderValue] = {}
        for header, value in self:
            lower = header.lower()
            if lower in names:
                first.setdefault(lower, value)
        return [_text(first.get(name)) for name in names]

    def names(self) -> Iterator[str]:
        """Yield the names in order, repeats included."""
        return (name for name, _ in self)


def headers_in(text: str) -> Headers:
    """Read headers from a JSON list of names and values; bytes are `{"b64": …}` or `{"base64": …}`.

    Raises:
        ValueError, TypeError, KeyError: it is something else.
    """
    return Headers((name, header_value(value)) for name, value in json.loads(text))


def header_value(value: Any) -> HeaderValue:
    """Read one value, as `headers_in` does."""
    if value is None or isinstance(value, str):
        return value
    return base64.b64decode(value["b64" if "b64" in value else "base64"], validate=True)


NO_HEADERS = Headers()
# typed Any until a handler's annotation decides how to decode it
_NOT_DECODED: Any = None
_assign, _new = object.__setattr__, object.__new__


_scan = json.JSONDecoder().raw_decode


def parsed(payload: bytes) -> Any:
    """Parse JSON, as `json.loads` does.

    Raises:
        ValueError: the payload is not JSON.
    """
    try:
        text = payload.decode()
        value, end = _scan(text)
        if end == len(text):
            return value
    except ValueError:
        pass
    # surrounding white space, another encoding, or not JSON: json.loads is slower but tells them apart
    return json.loads(payload)


def _text(value: HeaderValue) -> str | None:
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            return None
    return value


if TYPE_CHECKING:

    class _HeadersField:
        """For type checkers: accepts any pairs, in `dataclasses.replace` too, and returns Headers."""

        def __get__(self, instance: object, owner: object) -> Headers: ...
        def __set__(self, instance: object, value: HeaderPairs) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True, init=False, repr=False)
class Message(Generic[Body]):
    """One message as the broker delivered it, plus what the inbox knows about it.

    Args:
        topic: the topic, queue, subject or stream it came from.
        payload: the raw bytes; None is a tombstone. Text is encoded as UTF-8.
        id: the producer's id. Without one, a `message-id` header or CloudEvents `source` and `id`
            are used.
        type: the event type that handlers select by.
        key: the ordering key.
        headers: pairs or a mapping; repeated names are kept.
        origin: transport coordinates (partition, offset, delivery tag …), for people to read.
        sequence: the producer's version number for `key`, if it keeps one.

    Before a handler sees it, `consumer`, `attempt` (from 1), `received_at` and `body` (decoded according to the
    handler's annotation) are filled in.
    """

    topic: str
    payload: bytes | None
    id: str | int | None
    type: str | None
    key: str | None
    if TYPE_CHECKING:
        headers: _HeadersField = _HeadersField()
    else:
        headers: Headers
    content_type: str | None
    time: datetime | None
    sequence: int | None
    origin: Mapping[str, Any]
    consumer: str | None
    attempt: int
    received_at: datetime | None
    body: Body

    # without a body its type cannot be inferred
    @overload
    def __init__(
        self: Message[Any],
        *,
        topic: str,
        payload: bytes | bytearray | memoryview | str | None = ...,
        id: str | int | None = ...,
        type: str | None = ...,
        key: str | None = ...,
        headers: HeaderPairs = ...,
        content_type: str | None = ...,
        time: datetime | None = ...,
        sequence: int | None = ...,
        origin: Mapping[str, Any] | None = ...,
        consumer: str | None = ...,
        attempt: int = ...,
        received_at: datetime | None = ...,
    ) -> None: ...
    @overload
    def __init__(
        self,
        *,
        topic: str,
        payload: bytes | bytearray | memoryview | str | None = ...,
        id: str | int | None = ...,
        type: str | None = ...,
        key: str | None = ...,
        headers: HeaderPairs = ...,
        content_type: str | None = ...,
        time: datetime | None = ...,
        sequence: int | None = ...,
        origin: Mapping[str, Any] | None = ...,
        consumer: str | None = ...,
        attempt: int = ...,
        received_at: datetime | None = ...,
        body: Body,
    ) -> None: ...
    def __init__(  # noqa: PLR0913  # the fields
        self,
        *,
        topic: str,
        payload: bytes | bytearray | memoryview | str | None = b"",
        id: str | int | None = None,  # noqa: A002
        type: str | None = None,  # noqa: A002
        key: str | None = None,
        headers: HeaderPairs = NO_HEADERS,
        content_type: str | None = None,
        time: datetime | None = None,
        sequence: int | None = None,
        origin: Mapping[str, Any] | None = None,
        consumer: str | None = None,
        attempt: int = 1,
        received_at: datetime | None = None,
        body: Body = _NOT_DECODED,
    ) -> None:
        message: Any = self if self.__class__ is Message else cast("Any", _new(Message))
        _assign(message, "__class__", _Unfrozen)
        message.topic = topic
        message.payload = (
            payload if payload.__class__ is bytes or payload is None else _bytes(payload)
        )
        message.id = id
        message.type = type
        message.key = key
        message.headers = headers if headers.__class__ is Headers else Headers(headers)
        message.content_type = content_type
        message.time = time
        message.sequence = sequence
        message.origin = {} if origin is None else origin
        message.consumer = consumer
        message.attempt = attempt
        message.received_at = received_at
        message.body = body
        message.__class__ = Message
        if message is not self:
            # a user's subclass, whose slots may be laid out differently
            for name in Message.__slots__:
                _assign(self, name, getattr(message, name))

    def __repr__(self) -> str:
        # the payload may be long, and does not belong in a log
        kind = "" if self.type is None else f", type={self.type!r}"
        size = "None" if self.payload is None else f"<{len(self.payload)} bytes>"
        return (
            f"{type(self).__qualname__}(topic={self.topic!r}, id={self.id!r}{kind}, payload={size})"
        )

    @property
    def idempotency_key(self) -> str:
        """`consumer:id`, the same on every attempt. Use it as the idempotency key of external calls."""
        return f"{self.consumer}:{self.id}"

    def json(self) -> Any:
        """Return the payload parsed as JSON, regardless of `body`."""
        return parsed(self.payload or b"null")


def _refuse(_self: object, name: str, _value: object) -> None:
    raise FrozenInstanceError(f"cannot assign to field {name!r}")


# for frozen slotted classes, Python 3.11 generates a __setattr__ that breaks `Message[Order](…)`
setattr(Message, "__setattr__", _refuse)  # noqa: B010  # a type checker would refuse the plain form


class _Unfrozen(Message[Any]):
    """A message under construction: plain assignment takes a fifth of the time frozen fields need."""

    __slots__ = ()
    # both are needed, or assignments still go through the frozen class
    __setattr__ = object.__setattr__
    __delattr__ = object.__delattr__


def handed_over(message: Message[Any], message_id: str, consumer: str, body: Body) -> Message[Body]:
    """Return a copy of the message as a handler of `consumer` sees it."""
    unfrozen: Any = _new(_Unfrozen)
    unfrozen.topic = message.topic
    unfrozen.payload = message.payload
    unfrozen.id = message_id
    unfrozen.type = message.type
    unfrozen.key = message.key
    unfrozen.headers = message.headers
    unfrozen.content_type = message.content_type
    unfrozen.time = message.time
    unfrozen.sequence = message.sequence
    unfrozen.origin = message.origin
    unfrozen.consumer = consumer
    unfrozen.attempt = message.attempt
    unfrozen.received_at = message.received_at
    unfrozen.body = body
    unfrozen.__class__ = Message
    handed: Message[Body] = unfrozen
    return handed


def _bytes(payload: object) -> bytes:
    if isinstance(payload, str):
        return payload.encode()
    if isinstance(payload, bytearray | memoryview):
        return bytes(cast("bytearray", payload))
    raise TypeError(
        f"Message.payload must be bytes, got {type(payload).__name__}: encode it, e.g. with json.dumps(...).encode()."
    )
