"""Handlers: what they consume, how they are to be run, and the registry that holds them."""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, Literal

from txbox.body import Decoder, decoder_for
from txbox.errors import ConfigurationError, Reject, UnusableMessage
from txbox.identity import PayloadHash, checked_consumer, checked_text, message_id, payload_hash
from txbox.message import Headers, Message, handed_over
from txbox.policy import GapPolicy, Limits, RetryPolicy
from txbox.store.codec import Arrival, encode_headers

# what the narrowest column of the supported databases holds
_TEXT_BYTES_MAX = 1024

IdOf = Callable[[Message[Any]], object]


@dataclass(frozen=True, kw_only=True)
class HandlerOptions:
    """The options of `App.handler`; their meaning is in the table of docs/reference/handlers.md."""

    retry: RetryPolicy = field(default_factory=RetryPolicy)
    reject_on: tuple[type[Exception], ...] = ()
    timeout: timedelta | None = None
    concurrency: int = 1
    batch: bool = False
    pipeline: bool = False
    transactional: bool = True
    ordered: bool = False
    dead_blocks: bool = False
    dead_letter_topic: str | None = None
    sequence: IdOf | str | None = None
    gaps: GapPolicy = field(default_factory=GapPolicy)
    lock_key: IdOf | str | None = None
    message_id: IdOf | str | None = None
    weak_ids: bool = False
    id_scope: Literal["topic"] | None = None
    decode: Decoder | None = None
    payload_hash: PayloadHash = "raw"
    keep_payload: timedelta | Literal["unfinished", "always"] = "unfinished"
    keep_result: bool = False
    reply_to: str | Literal[True] | None = None
    reply_again: bool = False
    mode: Literal["inline", "stored"] = "inline"

    def __post_init__(self) -> None:
        if self.concurrency < 1:
            raise ConfigurationError(f"concurrency is {self.concurrency}: it must be 1 or more.")
        if self.mode not in ("inline", "stored"):
            raise ConfigurationError(f"mode is {self.mode!r}: use 'inline' or 'stored'.")
        if self.id_scope not in (None, "topic"):
            raise ConfigurationError(f"id_scope is {self.id_scope!r}: use 'topic' or leave it out.")
        if self.payload_hash not in ("raw", "json") and not callable(self.payload_hash):
            raise ConfigurationError(
                f"payload_hash is {self.payload_hash!r}: use 'raw', 'json' or a callable."
            )
        _check_keep(self.keep_payload)
        if self.timeout is not None and self.timeout <= timedelta(0):
            raise ConfigurationError("timeout must be above zero.")
        self._check_order()
        self._check_reply()

    def _check_order(self) -> None:
        if self.dead_blocks and not self.ordered:
            raise ConfigurationError(
                "dead_blocks=True needs ordered=True: nothing waits without it."
            )
        if self.ordered and self.sequence is not None:
            raise ConfigurationError(
                "ordered=True and sequence= exclude one another: the order of arrival, or that of the versions."
            )
        if self.sequence is not None and self.batch:
            raise ConfigurationError("sequence= takes one message at a time: leave batch=True out.")
        if self.in_order and not self.transactional:
            raise ConfigurationError(
                "An order is decided in the handler's transaction: leave transactional=False out."
            )
        if self.keep_result and self.batch:
            raise ConfigurationError(
                "keep_result=True keeps what one message returned: leave batch=True out."
            )

    def _check_reply(self) -> None:
        if self.reply_to is not None and (self.batch or not self.transactional):
            raise ConfigurationError(
                "reply_to= stages what one message returned in its transaction: leave batch=True and "
                "transactional=False out."
            )
        named = isinstance(self.reply_to, str) and self.reply_to != ""
        if self.reply_to not in (None, True) and not named:
            raise ConfigurationError(
                f"reply_to is {self.reply_to!r}: name a topic, or say True for the message's reply-to header."
            )
        if self.reply_again and not (self.reply_to and self.keep_result):
            raise ConfigurationError(
                "reply_again=True stages the kept result: it needs reply_to= and keep_result=True."
            )

    @property
    def in_order(self) -> bool:
        """True when a message may have to wait for others of its key."""
        return self.ordered or self.sequence is not None


def _check_keep(keep: object) -> None:
    if keep not in ("unfinished", "always") and not isinstance(keep, timedelta):
        raise ConfigurationError(
            f"keep_payload is {keep!r}: use 'unfinished', 'always' or a timedelta."
        )


@dataclass(frozen=True)
class Handler:
    """One registered handler."""

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
        if self.options.sequence is not None:
            message = replace(message, sequence=self._sequence(message))
        _check_sizes(message, limits)
        if message.topic != self.topic or message.type or message.key or message.content_type:
            _check_texts(message)
        return Arrival(message, own_id, payload_hash(message, self.options.payload_hash))

    def id_of(self, message: Message[Any]) -> str:
        """The canonical id of a message, as the options say.

        Raises:
            UnusableMessage: it has none, or one that cannot be kept.
        """
        options = self.options
        return message_id(
            message,
            extract=_extractor(options.message_id),
            scope=options.id_scope,
            weak=options.weak_ids,
        )

    def _sequence(self, message: Message[Any]) -> int:
        """Read the version of a message.

        Raises:
            UnusableMessage: it has none, or no key that it is a version of.
        """
        extract = _extractor(self.options.sequence)
        assert extract is not None
        try:
            found = extract(message)
            number = int(found) if isinstance(found, (int, str)) else None
        except Exception as error:
            # an extractor is user code run on a message nobody has checked yet: the message is at fault
            raise UnusableMessage(
                f"sequence= raised {type(error).__name__} on this message: check the extractor against the payload."
            ) from error
        if number is None or message.key is None:
            raise UnusableMessage(
                "sequence= needs an integer version, and a key that it is a version of."
            )
        return number

    def lock_key(self, message: Message[Any]) -> str | None:
        """What the handler locks for this message, as `lock_key=` says; None when that cannot be told."""
        extract = _extractor(self.options.lock_key)
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


def _extractor(extract: IdOf | str | None) -> IdOf | None:
    return functools.partial(_at_path, extract) if isinstance(extract, str) else extract


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


def _at_path(path: str, message: Message[Any]) -> object:
    """Follow "body.order.id", "headers.name" or "key" through a message; the body is read as JSON."""
    head, _, rest = path.partition(".")
    if head == "headers":
        return message.headers.text(rest)
    value: Any = message.json() if head == "body" else getattr(message, head)
    for part in filter(None, rest.split(".")):
        value = value[int(part) if isinstance(value, list) else part]
    return value


class Handlers:
    """The handlers of one app, in the order of their registration."""

    def __init__(self) -> None:
        self._handlers: list[Handler] = []
        self._matches: dict[tuple[str, str | None], list[Handler]] = {}

    def __iter__(self) -> typing.Iterator[Handler]:
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
        is_async = _check_function(function, options)
        if not topic:
            raise ConfigurationError(f"topic={topic!r}: it must be non-empty text.")
        handler = Handler(
            consumer=checked_consumer(consumer),
            topic=topic,
            types=None if types is None else frozenset(types),
            function=function,
            options=options,
            is_async=is_async,
            decode=options.decode or decoder_for(_body_annotation(function, options)),
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
        own = [handler.options for handler in self._handlers if handler.consumer == consumer]
        return any(one.ordered for one in own), any(one.dead_blocks for one in own)

    def matching(self, topic: str, kind: str | None, consumer: str | None = None) -> list[Handler]:
        """Return the handlers for a topic and type, at most one a consumer."""
        found = self._matches.get((topic, kind))
        if found is None:
            found = [handler for handler in self._handlers if handler.matches(topic, kind)]
            if len(self._matches) > 4096:
                # types come from strangers: the cache must not grow with them
                self._matches.clear()
            self._matches[topic, kind] = found
        return (
            found
            if consumer is None
            else [handler for handler in found if handler.consumer == consumer]
        )

    def consumers(self) -> dict[str, list[Handler]]:
        """Return the handlers of each consumer."""
        grouped: dict[str, list[Handler]] = {}
        for handler in self._handlers:
            grouped.setdefault(handler.consumer, []).append(handler)
        return grouped

    def topics(self) -> list[str]:
        """Return every topic that a handler names, each once."""
        return list(dict.fromkeys(handler.topic for handler in self._handlers))


def _check_alike(handler: Handler, other: Handler) -> None:
    """A key's messages share one lane and one order, whatever their types."""
    if handler.consumer != other.consumer or not (handler.options.ordered or other.options.ordered):
        return
    ours, theirs = (
        (own.options.ordered, own.options.dead_blocks, own.options.concurrency, own.is_async)
        for own in (handler, other)
    )
    if ours != theirs:
        raise ConfigurationError(
            f"{handler.name} and {other.name} are handlers of the ordered consumer {handler.consumer!r}: give both the "
            "same ordered=, dead_blocks= and concurrency=, and make both async or neither."
        )


def _check_function(function: Callable[..., Any], options: HandlerOptions) -> bool:
    """Check a handler's shape; returns whether it is async."""
    if not callable(function):
        raise ConfigurationError(f"A handler must be a function, got {type(function).__name__}.")
    bare = inspect.unwrap(function)
    if inspect.isgeneratorfunction(bare) or inspect.isasyncgenfunction(bare):
        raise ConfigurationError(f"{function!r} is a generator: a handler must return, not yield.")
    wanted = 2 if options.transactional else 1
    shape = "(message, tx)" if options.transactional else "(message)"
    if options.batch:
        shape = shape.replace("message", "messages")
    try:
        inspect.signature(function).bind(*range(wanted))
    except TypeError:
        raise ConfigurationError(
            f"The handler {getattr(function, '__qualname__', function)} must take {shape}, "
            f"but its signature is {inspect.signature(function)}."
        ) from None
    return is_async_function(function)


def is_async_function(function: Callable[..., Any]) -> bool:
    """Say whether calling it gives a coroutine."""
    return inspect.iscoroutinefunction(inspect.unwrap(function)) or inspect.iscoroutinefunction(
        getattr(type(function), "__call__", None)  # noqa: B004  # the colour, not whether it can be called
    )


def _body_annotation(function: Callable[..., Any], options: HandlerOptions) -> Any:
    """Return the X of `message: Message[X]` (or `list[Message[X]]`), or Any."""
    target: Any = inspect.unwrap(function)
    if not (inspect.isfunction(target) or inspect.ismethod(target)):
        # an object with __call__ carries its annotations there
        target = getattr(target.__class__, "__call__", target)  # noqa: B004
    if isinstance(target, functools.partial):
        target = target.func
    parameters = list(inspect.signature(function).parameters)
    try:
        hints: Mapping[str, Any] = typing.get_type_hints(target)
    except NameError:
        # a name that is imported for type checkers only; look at the one annotation that matters
        hints = _own_hint(target, parameters[0])
    hint = hints.get(parameters[0], Any)
    if options.batch and typing.get_origin(hint) in (list, typing.Sequence):
        (hint,) = typing.get_args(hint) or (Any,)
    if typing.get_origin(hint) is Message:
        return typing.get_args(hint)[0]
    return Any


def _own_hint(target: Any, parameter: str) -> Mapping[str, Any]:
    annotation = getattr(target, "__annotations__", {}).get(parameter, Any)
    if not isinstance(annotation, str):
        return {parameter: annotation}
    scope = {**typing.get_type_hints(Message), **getattr(target, "__globals__", {})}
    try:
        return {parameter: eval(annotation, scope)}  # noqa: S307  # the user's own annotation, as get_type_hints does
    except NameError as error:
        raise ConfigurationError(
            f"The annotation {annotation!r} of {target.__qualname__} names {error.name!r}, which is not there at run "
            "time: import it outside of TYPE_CHECKING."
        ) from error
