"""Handlers: what they consume, how a message is read for them, and the registry that holds them."""

from __future__ import annotations

import functools
import inspect
import re
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from types import NoneType
from typing import Any, Literal, TypedDict

from txbox.body import Decoder, decoder_for
from txbox.errors import ConfigurationError, Reject, UnusableMessage
from txbox.identity import PayloadHash, checked_consumer, checked_text, message_id, payload_hash
from txbox.message import Headers, Message, handed_over
from txbox.policy import GapPolicy, Limits, RetryPolicy
from txbox.store.codec import Arrival, encode_headers

#: What a path may begin with; all but the first two are the message's own attributes.
_HEADS = ("body", "headers", "id", "key", "type", "topic", "sequence", "origin", "time")

Extractor = Callable[[Message[Any]], object]


def check_path(option: str, given: object) -> None:
    """Check an option that may be a path, so that a slip of the pen sets no message aside.

    Raises:
        ConfigurationError: a path that no message has.
    """
    if given is None or callable(given):
        return
    if not isinstance(given, str):
        raise ConfigurationError(f"{option} is {given!r}: give a callable or a path.")
    head, dot, rest = given.partition(".")
    if head not in _HEADS or (dot and not all(rest.split("."))) or (head == "headers" and not rest):
        raise ConfigurationError(
            f'{option} is {given!r}: use a callable, or a path as "body.order.id", "headers.name" or "key".'
        )


def extractor_of(given: Extractor | str | None) -> Extractor | None:
    """Return the callable itself, or one that follows a path; None where nothing was given."""
    return functools.partial(_at_path, given) if isinstance(given, str) else given


def _at_path(path: str, message: Message[Any]) -> object:
    """Follow "body.order.id", "headers.name" or "key" through a message; the body is read as JSON."""
    head, _, rest = path.partition(".")
    if head == "headers":
        return message.headers.text(rest)
    value: Any = message.json() if head == "body" else getattr(message, head)
    for part in filter(None, rest.split(".")):
        value = value[int(part) if isinstance(value, list) else part]
    return value


def check_signature(function: Callable[..., Any], *, batch: bool, transactional: bool) -> None:
    """Check that a handler can be called as its options say.

    Raises:
        ConfigurationError: it is no function, a generator, or takes other arguments.
    """
    if not callable(function):
        raise ConfigurationError(f"A handler must be a function, got {type(function).__name__}.")
    bare = inspect.unwrap(function)
    if inspect.isgeneratorfunction(bare) or inspect.isasyncgenfunction(bare):
        raise ConfigurationError(f"{function!r} is a generator: a handler must return, not yield.")
    wanted = 2 if transactional else 1
    shape = "(message, tx)" if transactional else "(message)"
    if batch:
        shape = shape.replace("message", "messages")
    try:
        inspect.signature(function).bind(*range(wanted))
    except TypeError:
        raise ConfigurationError(
            f"The handler {getattr(function, '__qualname__', function)} must take {shape}, "
            f"but its signature is {inspect.signature(function)}."
        ) from None
    _check_places(function, batch=batch, transactional=transactional)


def _check_places(function: Callable[..., Any], *, batch: bool, transactional: bool) -> None:
    """Refuse `(tx, message)`, and a list where one message comes, or the reverse."""
    name = getattr(function, "__qualname__", function)
    first, *others = inspect.signature(function).parameters.values()
    if transactional and others and (_names_message(others[0]) and not _names_message(first)):
        come = "messages come" if batch else "message comes"
        raise ConfigurationError(
            f"The handler {name} takes ({first.name}, {others[0].name}): the {come} first, then the transaction."
        )
    hint = _hints(function, first.name).get(first.name, Any)
    if batch and (hint is Message or typing.get_origin(hint) is Message):
        raise ConfigurationError(
            f"The handler {name} takes one message, but batch=True gives a list: annotate it as list[Message[…]]."
        )
    if not batch and typing.get_origin(hint) in (list, Sequence):
        raise ConfigurationError(
            f"The handler {name} takes a list, but gets one message a call: annotate it as Message[…], "
            "or say batch=True."
        )


def _names_message(parameter: inspect.Parameter) -> bool:
    """Say whether a parameter is a message's or messages', by its annotation, else by its name."""
    if parameter.annotation in (inspect.Parameter.empty, Any, "Any"):
        return parameter.name in ("message", "messages", "msg", "msgs")
    shown = (
        parameter.annotation
        if isinstance(parameter.annotation, str)
        else repr(parameter.annotation)
    )
    return re.search(r"\bMessage\b", shown) is not None


def is_async_function(function: Callable[..., Any]) -> bool:
    """Say whether calling it gives a coroutine."""
    return inspect.iscoroutinefunction(inspect.unwrap(function)) or inspect.iscoroutinefunction(
        getattr(type(function), "__call__", None)  # noqa: B004  # sync or async, not whether it can be called
    )


def body_annotation(function: Callable[..., Any], *, batch: bool) -> Any:
    """Return the X of `message: Message[X]` (with `batch`, of `list[Message[X]]`), or Any.

    Raises:
        ConfigurationError: the annotation names what is not there at run time.
    """
    first = next(iter(inspect.signature(function).parameters))
    hint = _hints(function, first).get(first, Any)
    if batch and typing.get_origin(hint) in (list, Sequence):
        (hint,) = typing.get_args(hint) or (Any,)
    if typing.get_origin(hint) is Message:
        return typing.get_args(hint)[0]
    return Any


def _hints(function: Callable[..., Any], parameter: str) -> Mapping[str, Any]:
    """The annotations of a function, as values."""
    target: Any = inspect.unwrap(function)
    if not (inspect.isfunction(target) or inspect.ismethod(target)):
        # an object with __call__ carries its annotations there
        target = getattr(target.__class__, "__call__", target)  # noqa: B004
    if isinstance(target, functools.partial):
        target = target.func
    try:
        return typing.get_type_hints(target)
    except NameError:
        # a name that is imported for type checkers only; look at the one annotation that matters
        return _hint(target, parameter)


def _hint(target: Any, parameter: str) -> Mapping[str, Any]:
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


_FLAG = (bool, "True or False")
# what an option must be, and how to write it
_KINDS: dict[str, tuple[Any, str]] = {
    "retry": (RetryPolicy, "a RetryPolicy, such as RetryPolicy(max_attempts=3)"),
    "gaps": (GapPolicy, "a GapPolicy, such as GapPolicy(wait=timedelta(minutes=1))"),
    "timeout": ((timedelta, NoneType), "a timedelta, such as timedelta(seconds=3)"),
    "concurrency": (int, "a whole number"),
    "dead_letter_topic": ((str, NoneType), "the name of a topic"),
    **dict.fromkeys(
        (
            "batch", "pipeline", "transactional", "ordered", "dead_blocks", "weak_ids", "keep_result",
        ),
        _FLAG,
    ),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class HandlerOptions:
    """The options of `App.handler`; their meaning is in the table of docs/reference/handlers.md.

    Raises:
        ConfigurationError: one is out of range, or two exclude one another.
    """

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
    sequence: Extractor | str | None = None
    gaps: GapPolicy = field(default_factory=GapPolicy)
    lock_key: Extractor | str | None = None
    message_id: Extractor | str | None = None
    weak_ids: bool = False
    id_scope: Literal["topic"] | None = None
    decode: Decoder | None = None
    payload_hash: PayloadHash = "raw"
    keep_payload: timedelta | Literal["unfinished", "always"] = "unfinished"
    keep_result: bool = False
    reply_to: str | Literal[True] | None = None
    mode: Literal["inline", "stored"] = "inline"

    def __post_init__(self) -> None:
        for name, (kinds, wanted) in _KINDS.items():
            value = getattr(self, name)
            if not isinstance(value, kinds) or (isinstance(value, bool) and kinds is not bool):
                raise ConfigurationError(f"{name} is {value!r}: give {wanted}.")
        for name in ("message_id", "sequence", "lock_key"):
            check_path(name, getattr(self, name))
        if self.decode is not None and not callable(self.decode):
            raise ConfigurationError(
                f"decode is {self.decode!r}: give a callable from Message to body."
            )
        if self.dead_letter_topic == "":
            raise ConfigurationError("dead_letter_topic is '': give the name of a topic.")
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
        self._check_answer()

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

    def _check_answer(self) -> None:
        if self.keep_result and self.batch:
            raise ConfigurationError(
                "keep_result=True keeps what one message returned: leave batch=True out."
            )
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

    @property
    def in_order(self) -> bool:
        """True when a message may have to wait for others of its key."""
        return self.ordered or self.sequence is not None


class Options(TypedDict, total=False):
    """The options of `App.handler` that do not change how a handler is called."""

    type: str | None
    types: Iterable[str] | None
    retry: RetryPolicy | None
    reject_on: Sequence[type[Exception]]
    timeout: timedelta | None
    concurrency: int
    pipeline: bool
    ordered: bool
    dead_blocks: bool
    dead_letter_topic: str | None
    sequence: Extractor | str | None
    gaps: GapPolicy | None
    lock_key: Extractor | str | None
    message_id: Extractor | str | None
    weak_ids: bool
    id_scope: Literal["topic"] | None
    decode: Decoder | None
    payload_hash: PayloadHash
    keep_payload: timedelta | Literal["unfinished", "always"]
    keep_result: bool
    reply_to: str | Literal[True] | None
    mode: Literal["inline", "stored"]


def exceptions_of(given: Any) -> tuple[type[Exception], ...]:
    """Return `reject_on=` as a tuple, of one class too.

    Raises:
        ConfigurationError: it holds something else.
    """
    kinds = (given,) if isinstance(given, type) else tuple(given)
    if not all(isinstance(kind, type) and issubclass(kind, Exception) for kind in kinds):
        raise ConfigurationError(
            f"reject_on is {given!r}: give exception classes, as in (ValueError, KeyError)."
        )
    return kinds


def _check_keep(keep: object) -> None:
    if keep not in ("unfinished", "always") and not isinstance(keep, timedelta):
        raise ConfigurationError(
            f"keep_payload is {keep!r}: use 'unfinished', 'always' or a timedelta."
        )


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
                check_texts(message)
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


def check_texts(message: Message[Any]) -> None:
    """Check what is kept of a message beside its payload.

    Raises:
        UnusableMessage: not text, or more bytes than the narrowest column of the supported databases holds.
    """
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
