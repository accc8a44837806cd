"""Handlers: what they consume, how a message is read for them, and the registry that holds them."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from txbox.body import Decoder, decoder_for
from txbox.errors import ConfigurationError, Reject, UnusableMessage
from txbox.extractor import Extractor, extractor_of
from txbox.handler_options import HandlerOptions
from txbox.identity import checked_consumer, checked_text, message_id, payload_hash
from txbox.message import Headers, Message, handed_over
from txbox.policy import Limits
from txbox.signature import body_annotation, check_signature, is_async_function
from txbox.store.codec import Arrival, encode_headers

# what the narrowest column of the supported databases holds
_TEXT_BYTES_MAX = 1024
# 64 bits, and room for the version after it and the one before it
SEQUENCE_MAX = 2**63 - 2
_DECIMAL = re.compile(r"-?[0-9]{1,19}")
# types come from strangers: what is remembered of them must not grow with them
_MATCHES_MAX = 4096


@dataclass(frozen=True)
class Handler:
    """One registered handler.

    Args:
        topic: "*" for every topic.
        types: None for every type, and for messages without one.
        function: as it is called: with `reply_to=`, it also stages what was returned.
        decode: from a message to what the function sees as its body.
    """

    consumer: str
    topic: str
    types: frozenset[str] | None
    function: Callable[..., Any]
    options: HandlerOptions
    is_async: bool
    decode: Decoder

    @property
    def name(self) -> str:
        """The function for people: module and qualified name."""
        return f"{getattr(self.function, '__module__', '?')}.{getattr(self.function, '__qualname__', '?')}"

    def matches(self, topic: str, kind: str | None) -> bool:
        """Say whether this handler consumes messages of this topic and type."""
        return self.topic in (topic, "*") and (self.types is None or kind in self.types)

    def overlaps(self, other: Handler) -> bool:
        """Say whether some message would match both under one consumer."""
        if self.consumer != other.consumer:
            return False
        if self.topic != other.topic and "*" not in (self.topic, other.topic):
            return False
        return self.types is None or other.types is None or bool(self.types & other.types)

    @property
    def stored(self) -> Handler:
        """The same handler with `mode="stored"`."""
        return replace(self, options=replace(self.options, mode="stored"))

    @functools.cached_property
    def keeps_payload(self) -> bool:
        """True when processed rows of this consumer keep their payload."""
        return self.options.keep_payload != "unfinished"

    def arrival(self, message: Message[Any], limits: Limits) -> Arrival:
        """Give a message its id and hash.

        Raises:
            UnusableMessage: it has no usable id, or is too large, or holds what no database can keep.
        """
        own_id = self.id_of(message)
        try:
            if self.options.sequence is not None:
                message = replace(message, sequence=self._sequence(message))
            _check_sizes(message, limits)
            # most have nothing but the topic that the handler itself names
            if message.topic != self.topic or message.type or message.key or message.content_type:
                _check_texts(message)
            return Arrival(message, own_id, payload_hash(message, self.options.payload_hash))
        except UnusableMessage as error:
            error.message_id = own_id
            raise

    def accepted(self, message: Message[Any], own_id: str) -> Arrival:
        """Give a message the id that an operator chose, whatever its size.

        Raises:
            UnusableMessage: it lacks a version, or has a payload that cannot be hashed.
        """
        if self.options.sequence is not None:
            message = replace(message, sequence=self._sequence(message))
        return Arrival(message, own_id, payload_hash(message, self.options.payload_hash))

    def id_of(self, message: Message[Any]) -> str:
        """The canonical id of a message, as the options say.

        Raises:
            UnusableMessage: it has none, or one that cannot be kept.
        """
        options = self.options
        return message_id(
            message,
            extract=extractor_of(options.message_id),
            scope=options.id_scope,
            weak=options.weak_ids,
        )

    def _sequence(self, message: Message[Any]) -> int:
        """Read the version of a message.

        Raises:
            UnusableMessage: it has none, one out of range, or no key that it is a version of.
        """
        extract = extractor_of(self.options.sequence)
        assert extract is not None
        try:
            found = extract(message)
        except Exception as error:
            # an extractor is user code run on a message nobody has checked yet: the message is at fault
            raise UnusableMessage(
                f"sequence= raised {type(error).__name__} on this message: check the extractor against the payload."
            ) from error
        if (
            isinstance(found, str)
            and _in_header(self.options.sequence)
            and _DECIMAL.fullmatch(found)
        ):
            # a header has nothing but text
            found = int(found)
        if not isinstance(found, int) or isinstance(found, bool) or message.key is None:
            raise UnusableMessage(
                "sequence= needs an integer version, and a key that it is a version of."
            )
        if not -SEQUENCE_MAX <= found <= SEQUENCE_MAX:
            raise UnusableMessage(
                f"sequence= gave a version out of range: {-SEQUENCE_MAX} to {SEQUENCE_MAX} is what can be kept."
            )
        return found

    def lock_key(self, message: Message[Any]) -> str | None:
        """What the handler locks for this message, as `lock_key=` says; None when that cannot be told."""
        extract = extractor_of(self.options.lock_key)
        if extract is None:
            return None
        try:
            found = extract(message)
        except Exception:  # noqa: BLE001  # user code, on a message nobody has checked yet: its decoding will say
            return None
        return None if found is None else str(found)

    def bound(self, arrival: Arrival) -> Message[Any]:
        """The message as the handler sees it.

        Raises:
            Reject: the body cannot be decoded.
        """
        message = arrival.message
        try:
            body = self.decode(message)
        except Exception as error:
            # whatever a decoder raises on a stranger's bytes means that they are not what was agreed
            raise Reject(f"The body cannot be decoded: {type(error).__name__}: {error}") from error
        return handed_over(message, arrival.message_id, self.consumer, body)


def _in_header(given: Extractor | str | None) -> bool:
    return isinstance(given, str) and given.startswith("headers.")


def _check_sizes(message: Message[Any], limits: Limits) -> None:
    if message.payload is not None and len(message.payload) > limits.payload_bytes:
        raise UnusableMessage(
            f"The payload has {len(message.payload)} bytes, the limit is {limits.payload_bytes}: "
            "raise Limits.payload_bytes, or send a reference to it."
        )
    if message.headers and not _fit(message.headers, limits.headers_bytes):
        raise UnusableMessage(
            f"The headers have more than {limits.headers_bytes} bytes (Limits.headers_bytes)."
        )
    if message.sequence is not None and not -(2**63) <= message.sequence < 2**63:
        raise UnusableMessage("The sequence does not fit into 64 bits.")


def _fit(headers: Headers, bytes_max: int) -> bool:
    # JSON in ASCII takes twelve bytes for a character at most: hardly ever must it be written to know
    characters = sum(len(name) + (0 if value is None else len(value)) for name, value in headers)
    if 12 * characters + 24 * len(headers) <= bytes_max:
        return True
    return len(encode_headers(headers) or "") <= bytes_max


def _check_texts(message: Message[Any]) -> None:
    _check_text("topic", message.topic)
    _check_text("type", message.type)
    _check_text("key", message.key)
    _check_text("content_type", message.content_type)


def _check_text(what: str, value: object) -> None:
    if value is None:
        return
    if not isinstance(value, str):
        raise UnusableMessage(f"The {what} is a {type(value).__name__}: it must be text.")
    plain = value.isascii() and "\0" not in value and len(value) <= _TEXT_BYTES_MAX
    if not plain and len(checked_text(value, what)) > _TEXT_BYTES_MAX:
        raise UnusableMessage(f"The {what} has more than {_TEXT_BYTES_MAX} bytes.")


class Handlers:
    """The handlers of one app, in the order of their registration."""

    def __init__(self) -> None:
        self._handlers: list[Handler] = []
        self._matches: dict[tuple[str, str | None], list[Handler]] = {}

    def __iter__(self) -> Iterator[Handler]:
        return iter(self._handlers)

    def __len__(self) -> int:
        return len(self._handlers)

    def add(
        self,
        function: Callable[..., Any],
        *,
        topic: str,
        consumer: str,
        types: Iterable[str] | None,
        options: HandlerOptions,
    ) -> Handler:
        """Register a handler.

        Raises:
            ConfigurationError: a wrong signature, an unusable name, or an overlap with another handler.
        """
        _check_topic(topic)
        check_signature(function, batch=options.batch, transactional=options.transactional)
        handler = Handler(
            consumer=checked_consumer(consumer),
            topic=topic,
            types=None if types is None else frozenset(types),
            function=function,
            options=options,
            is_async=is_async_function(function),
            decode=options.decode or decoder_for(body_annotation(function, batch=options.batch)),
        )
        if handler.options.dead_letter_topic == topic:
            raise ConfigurationError(
                f"{handler.name} would consume its own dead letters: dead_letter_topic= must be another topic."
            )
        for other in self._handlers:
            if handler.overlaps(other):
                raise ConfigurationError(
                    f"{handler.name} and {other.name} overlap: both consume topic {topic!r} with the same type as "
                    f"consumer {consumer!r}; give one of them another type= or consumer=."
                )
            _check_alike(handler, other)
        self._handlers.append(handler)
        self._matches.clear()
        return handler

    def order_of(self, consumer: str) -> tuple[bool, bool]:
        """Say whether a consumer's rows are taken by the heads of their keys, and whether dead ones stay heads."""
        options = [handler.options for handler in self._handlers if handler.consumer == consumer]
        return any(one.ordered for one in options), any(one.dead_blocks for one in options)

    def matching(self, topic: str, kind: str | None, consumer: str | None = None) -> list[Handler]:
        """Return the handlers for a topic and type, at most one a consumer; of one consumer or of all."""
        found = self._matches.get((topic, kind))
        if found is None:
            found = [handler for handler in self._handlers if handler.matches(topic, kind)]
            if len(self._matches) > _MATCHES_MAX:
                self._matches.clear()
            self._matches[topic, kind] = found
        return (
            found
            if consumer is None
            else [handler for handler in found if handler.consumer == consumer]
        )

    def only(self, message: Message[Any], consumer: str | None) -> Handler | None:
        """Return the one handler for a message's topic and type; None when no handler consumes them.

        Raises:
            ConfigurationError: there are several and no `consumer` is named, or it has no handler; or
                this is no Message.
        """
        check_message(message)
        found = self.matching(message.topic, message.type, consumer)
        if len(found) == 1:
            return found[0]
        if found:
            names = ", ".join(repr(handler.consumer) for handler in found)
            raise ConfigurationError(
                f"Several consumers take topic {message.topic!r} ({names}): say which with consumer=."
            )
        if consumer is not None and consumer not in self.consumers():
            raise ConfigurationError(f"No handler is registered for consumer {consumer!r}.")
        return None

    def consumes(self, topic: str) -> bool:
        """Say whether a handler takes some messages of this topic."""
        return any(handler.topic in (topic, "*") for handler in self._handlers)

    def consumers(self) -> dict[str, list[Handler]]:
        """Return the handlers of each consumer."""
        grouped: dict[str, list[Handler]] = {}
        for handler in self._handlers:
            grouped.setdefault(handler.consumer, []).append(handler)
        return grouped

    def topics(self) -> list[str]:
        """Return every topic that a handler names, each once."""
        return list(dict.fromkeys(handler.topic for handler in self._handlers))


def check_message(given: object) -> None:
    """Check that a verb was given a Message.

    Raises:
        ConfigurationError: it is something else.
    """
    if not isinstance(given, Message):
        raise ConfigurationError(
            f"This is a {type(given).__name__}, not a Message: pass Message(topic=…, id=…, payload=…)."
        )


def types_of(one: object, several: Any) -> tuple[str, ...] | None:
    """Return what `type=` or `types=` name; None for every type.

    Raises:
        ConfigurationError: both are given, or one is no text.
    """
    if one is not None and several is not None:
        raise ConfigurationError("A handler takes type= or types=, not both.")
    if one is not None:
        if not isinstance(one, str):
            raise ConfigurationError(f"type is {one!r}: name one type, or give several as types=.")
        return (one,)
    if several is None:
        return None
    types = () if isinstance(several, str) else tuple(several)
    if not types or not all(isinstance(kind, str) for kind in types):
        raise ConfigurationError(f"types is {several!r}: give several types, or name one as type=.")
    return types


def _check_topic(topic: object) -> None:
    if not isinstance(topic, str) or not topic:
        raise ConfigurationError(
            f"topic is {topic!r}: name one topic, or '*' for all; a function may be registered for several, one by one."
        )
    if topic != "*" and ("*" in topic or topic.endswith(">")):
        raise ConfigurationError(
            f"topic is {topic!r}: only '*' alone is a pattern, for every topic of the sources; name this one in full."
        )


def _check_alike(handler: Handler, other: Handler) -> None:
    """A key's messages share one lane and one order, whatever their types."""
    if handler.consumer != other.consumer or not (handler.options.ordered or other.options.ordered):
        return
    ours, theirs = (
        (peer.options.ordered, peer.options.dead_blocks, peer.options.concurrency, peer.is_async)
        for peer in (handler, other)
    )
    if ours != theirs:
        raise ConfigurationError(
            f"{handler.name} and {other.name} are handlers of the ordered consumer {handler.consumer!r}: give both the "
            "same ordered=, dead_blocks= and concurrency=, and make both async or neither."
        )
