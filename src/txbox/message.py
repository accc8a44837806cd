"""The message: an immutable value, without any right to acknowledge it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import FrozenInstanceError, dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar, cast, overload

Body = TypeVar("Body")
HeaderValue = str | bytes | None
HeaderPairs = Iterable[tuple[str, HeaderValue]] | Mapping[str, HeaderValue]


class Headers(tuple[tuple[str, HeaderValue], ...]):
    """An ordered multi-map of header names and values; names compare without regard to case."""

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
        return next((value for own, value in self if own.lower() == wanted), default)

    def get_all(self, name: str) -> list[HeaderValue]:
        """Return every value under `name`, in order."""
        wanted = name.lower()
        return [value for own, value in self if own.lower() == wanted]

    def text(self, name: str) -> str | None:
        """Return the first value under `name` as text, or None when absent or not UTF-8."""
        return _text(self.get(name))

    def texts(self, *names: str) -> list[str | None]:
        """As `text` for several names, which must be lower case, in one pass."""
        found: dict[str, HeaderValue] = {}
        for own, value in self:
            lower = own.lower()
            if lower in names:
                found.setdefault(lower, value)
        return [_text(found.get(name)) for name in names]

    def names(self) -> Iterator[str]:
        """Yield the names in order, repeats included."""
        return (name for name, _ in self)


def _text(value: HeaderValue) -> str | None:
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            return None
    return value


if TYPE_CHECKING:

    class _HeadersField:
        """What type checkers see: any pairs go in, Headers come out."""

        def __get__(self, instance: object, owner: object) -> Headers: ...
        def __set__(self, instance: object, value: HeaderPairs) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Message(Generic[Body]):
    """One message as the broker moved it, plus what the inbox knows of it.

    Args:
        topic: the topic, queue, subject or stream it came from.
        payload: the raw bytes; None is a tombstone. Text is encoded as UTF-8.
        id: the producer's id for it. Without one, a `message-id` header or CloudEvents
            `source` and `id` decide (SEMANTICS 1.2).
        type: the event type that handlers select by.
        key: the ordering key.
        headers: pairs or a mapping; repeated names are kept.
        origin: transport coordinates (partition, offset, delivery tag …) for people to read.
        sequence: the producer's version of `key`, where it keeps one.
        consumer, attempt, received_at, body: filled in before a handler sees the message;
            `attempt` counts from 1, `body` is decoded by the handler's annotation.
    """

    topic: str
    payload: bytes | None = b""
    id: str | int | None = None
    type: str | None = None
    key: str | None = None
    if TYPE_CHECKING:
        headers: _HeadersField = _HeadersField()
    else:
        headers: Headers = Headers()
    content_type: str | None = None
    time: datetime | None = None
    sequence: int | None = None
    origin: Mapping[str, Any] = field(default_factory=dict[str, Any])
    consumer: str | None = None
    attempt: int = 1
    received_at: datetime | None = None
    body: Body = None  # type: ignore[assignment]  # unknown until a handler's annotation decodes it

    def __post_init__(self) -> None:
        if type(self.headers) is not Headers:
            object.__setattr__(self, "headers", Headers(self.headers))
        payload = self.payload
        if type(payload) is not bytes and payload is not None:
            object.__setattr__(self, "payload", _bytes(payload))

    @property
    def idempotency_key(self) -> str:
        """`consumer:id`, the same on every attempt; for the idempotency header of an external call."""
        return f"{self.consumer}:{self.id}"

    def json(self) -> Any:
        """Return the payload parsed as JSON, whatever `body` holds."""
        return json.loads(self.payload or b"null")


def _refuse(_self: object, name: str, _value: object) -> None:
    raise FrozenInstanceError(f"cannot assign to field {name!r}")


# Python 3.11 generates, for frozen slotted classes, a __setattr__ that breaks `Message[Order](…)`
setattr(Message, "__setattr__", _refuse)  # noqa: B010  # a type checker would refuse the plain form


def _bytes(payload: object) -> bytes:
    if isinstance(payload, str):
        return payload.encode()
    if isinstance(payload, bytearray | memoryview):
        return bytes(cast("bytearray", payload))
    raise TypeError(
        f"Message.payload takes bytes, got {type(payload).__name__}: encode it, e.g. with json.dumps(...).encode()."
    )
