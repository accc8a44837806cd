"""Handlers: what they consume, how messages are read for them, and the registry that holds them."""

from __future__ import annotations

import functools
import inspect
import re
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from datetime import timedelta
from types import NoneType
from typing import Any, Literal, Protocol, TypedDict, TypeVar

from txbox.boundaries import Boundary, blamed, is_contents
from txbox.errors import ConfigurationError, Reject, UnusableMessage, check_duration
from txbox.handlers.body import Decoder, decoder_for
from txbox.identity import (
    EFFECT_PREFIX,
    TOOL_PREFIX,
    PayloadHash,
    check_fields,
    check_headers,
    check_numbers,
    check_text,
    checked_consumer,
    derived_id,
    message_id,
    payload_hash,
)
from txbox.message import Headers, Message, handed_over
from txbox.policy import GapPolicy, Limits, RetryPolicy
from txbox.store.codec import Arrival, encode_headers
from txbox.text import with_article

#: What a path may start with; all but the first two are attributes of the message.
_HEADS = ("body", "headers", "id", "key", "type", "topic", "sequence", "origin", "time")

Extractor = Callable[[Message[Any]], object]
F = TypeVar("F", bound=Callable[..., Any])
#: By the names of the parameters.
Values = Mapping[str, Any]
#: Takes what the handler takes: the message (or list of messages), and the transaction or None.
Opened = Callable[[Any, Any], AbstractContextManager[Values] | AbstractAsyncContextManager[Values]]


class Resolver(Protocol):
    """Supplies handlers with more parameters than message and transaction: a container's, a framework's, yours."""

    def __call__(
        self, annotations: Mapping[str, Any], *, is_async: bool, transactional: bool
    ) -> Opened:
        """Called once per handler, at registration.

        Args:
            annotations: parameter → its annotation, `Annotated` included.
            is_async: whether the handler is; an `async def` handler may be given either kind of context manager.
            transactional: whether the handler has a transaction; effects have none.

        Returns: a function that opens the values for one call. They are opened in the handler's transaction
            before it runs, and closed when it has returned or raised, before COMMIT.

        Raises:
            ConfigurationError: it cannot supply one of them.
        """
        ...


def check_path(option: str, source: object) -> None:
    """Check an option that may be a path, so that a typo does not quarantine every message.

    Raises:
        ConfigurationError: no message has this path.
    """
    if source is None or callable(source):
        return
    if not isinstance(source, str):
        raise ConfigurationError(f"{option} is {source!r}: give a callable or a path.")
    head, dot, rest = source.partition(".")
    if head not in _HEADS or (dot and not all(rest.split("."))) or (head == "headers" and not rest):
        raise ConfigurationError(
            f'{option} is {source!r}: use a callable or a path such as "body.order.id", "headers.name" or "key".'
        )


def extractor_of(source: Extractor | str | None) -> Extractor | None:
    """Return the callable itself, or one that follows a path; None for None."""
    return functools.partial(_at_path, source) if isinstance(source, str) else source


def _at_path(path: str, message: Message[Any]) -> object:
    """Follow a path such as "body.order.id", "headers.name" or "key". The body is read as JSON."""
    head, _, rest = path.partition(".")
    if head == "headers":
        return message.headers.text(rest)
    value: Any = message.json() if head == "body" else getattr(message, head)
    for part in filter(None, rest.split(".")):
        value = value[int(part) if isinstance(value, list) else part]
    return value


def check_signature(function: Callable[..., Any], *, batch: bool, transactional: bool) -> None:
    """Check that a handler can be called the way its options say.

    Raises:
        ConfigurationError: it is not a function, is a generator, or takes other arguments.
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
            f"but its signature is {inspect.signature(function)}. More parameters are passed by App(resolver=…)."
        ) from None
    _check_places(function, batch=batch, transactional=transactional)


def resolved(function: F, resolver: Resolver | None, *, transactional: bool, is_async: bool) -> F:
    """Wrap a handler so that its extra parameters, those without a default, are passed by name to each call.

    Raises:
        ConfigurationError: one has no annotation, or the resolver cannot supply it.

    Guarantee: an error on closing fails the message and rolls its transaction back. A context manager that
    swallows the handler's exception cannot turn a failure into a success.
    """
    if resolver is None or not callable(function):
        return function
    signature, name = inspect.signature(function), getattr(function, "__qualname__", function)
    extra = [
        parameter
        for parameter in list(signature.parameters.values())[2 if transactional else 1 :]
        if parameter.default is parameter.empty
        and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    ]
    if not extra:
        return function
    for parameter in extra:
        if parameter.annotation is parameter.empty:
            raise ConfigurationError(
                f"The parameter {parameter.name} of the handler {name} has no annotation to resolve it by: annotate it."
            )
    annotations = {
        each.name: _hints(function, each.name, extras=True).get(each.name) for each in extra
    }
    try:
        opened = resolver(annotations, is_async=is_async, transactional=transactional)
    except ConfigurationError as error:
        raise ConfigurationError(
            f"The parameters of the handler {name} cannot be supplied: {error}"
        ) from error

    def call(argument: Any, *tx: Any) -> Any:
        with opened(argument, tx[0] if tx else None) as values:  # type: ignore[union-attr]
            return function(argument, *tx, **values)
        raise _swallowed(name)

    async def call_async(argument: Any, *tx: Any) -> Any:
        entered = opened(argument, tx[0] if tx else None)
        if isinstance(entered, AbstractAsyncContextManager):
            async with entered as values:
                return await function(argument, *tx, **values)
        else:
            with entered as values:
                return await function(argument, *tx, **values)
        raise _swallowed(name)

    wrapped: Any = functools.wraps(function)(call_async if is_async else call)
    names = {parameter.name for parameter in extra}
    wrapped.__signature__ = signature.replace(
        parameters=[each for each in signature.parameters.values() if each.name not in names]
    )
    handler: F = wrapped
    return handler


def _swallowed(name: object) -> ConfigurationError:
    return ConfigurationError(
        f"A context manager of the resolver swallowed an exception of {name}: let it propagate."
    )


def _check_places(function: Callable[..., Any], *, batch: bool, transactional: bool) -> None:
    """Refuse `(tx, message)`, a list where one message is passed, and the reverse."""
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
            f"The handler {name} takes a list, but is called with one message: annotate it as Message[…], "
            "or set batch=True."
        )


def _names_message(parameter: inspect.Parameter) -> bool:
    """Whether a parameter takes a message or messages, judged by its annotation, else by its name."""
    if parameter.annotation in (inspect.Parameter.empty, Any, "Any"):
        return parameter.name in ("message", "messages", "msg", "msgs")
    shown = (
        parameter.annotation
        if isinstance(parameter.annotation, str)
        else repr(parameter.annotation)
    )
    return re.search(r"\bMessage\b", shown) is not None


def is_async_function(function: Callable[..., Any]) -> bool:
    """Whether calling it returns a coroutine."""
    return inspect.iscoroutinefunction(inspect.unwrap(function)) or inspect.iscoroutinefunction(
        getattr(type(function), "__call__", None)  # noqa: B004  # is it async, not: is it callable
    )


def body_annotation(function: Callable[..., Any], *, batch: bool) -> Any:
    """Return the X of `message: Message[X]` (with `batch`, of `list[Message[X]]`), or Any.

    Raises:
        ConfigurationError: the annotation names something that does not exist at run time.
    """
    first = next(iter(inspect.signature(function).parameters))
    hint = _hints(function, first).get(first, Any)
    if batch and typing.get_origin(hint) in (list, Sequence):
        (hint,) = typing.get_args(hint) or (Any,)
    if typing.get_origin(hint) is Message:
        return typing.get_args(hint)[0]
    return Any


def _hints(
    function: Callable[..., Any], parameter: str, *, extras: bool = False
) -> Mapping[str, Any]:
    """Return the annotations of a function as values; with `extras` what Annotated adds to them, too."""
    target: Any = inspect.unwrap(function)
    if not (inspect.isfunction(target) or inspect.ismethod(target)):
        # a callable object carries its annotations on __call__
        target = getattr(target.__class__, "__call__", target)  # noqa: B004
    if isinstance(target, functools.partial):
        target = target.func
    try:
        return typing.get_type_hints(target, include_extras=extras)
    except NameError:
        # a name imported under TYPE_CHECKING only: evaluate just the annotation that matters
        return _hint(target, parameter)


def _hint(target: Any, parameter: str) -> Mapping[str, Any]:
    annotation = getattr(target, "__annotations__", {}).get(parameter, Any)
    if not isinstance(annotation, str):
        return {parameter: annotation}
    scope = {**typing.get_type_hints(Message), **getattr(target, "__globals__", {})}
    try:
        return {parameter: eval(annotation, scope)}  # noqa: S307  # the user's annotation, as in get_type_hints
    except NameError as error:
        raise ConfigurationError(
            f"The annotation {annotation!r} of {target.__qualname__} uses {error.name!r}, which does not exist at run "
            "time: import it outside TYPE_CHECKING."
        ) from error


_FLAG = (bool, "True or False")
# what each option must be, and how to write it
_KINDS: dict[str, tuple[Any, str]] = {
    "retry": (RetryPolicy, "a RetryPolicy, such as RetryPolicy(max_attempts=3)"),
    "gaps": (GapPolicy, "a GapPolicy, such as GapPolicy(wait=timedelta(minutes=1))"),
    "timeout": ((timedelta, NoneType), "a timedelta, such as timedelta(seconds=3)"),
    "concurrency": (int, "a whole number"),
    "pause_after": ((int, NoneType), "a whole number, or None"),
    "dead_letter_topic": ((str, NoneType), "the name of a topic"),
    **dict.fromkeys(
        (
            "batch", "pipeline", "shares", "transactional", "ordered", "dead_blocks", "weak_ids", "keep_result",
        ),
        _FLAG,
    ),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class HandlerOptions:
    """The options of `App.handler`; docs/reference/handlers.md explains each in a table.

    Raises:
        ConfigurationError: an option is out of range, or two exclude each other.
    """

    retry: RetryPolicy = field(default_factory=RetryPolicy)
    reject_on: tuple[type[Exception], ...] = ()
    timeout: timedelta | None = None
    pause_after: int | None = None
    concurrency: int = 1
    batch: bool = False
    pipeline: bool = False
    shares: bool = False
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
        check_duration("timeout", self.timeout)
        if isinstance(self.keep_payload, timedelta):
            check_duration("keep_payload", self.keep_payload)
        for name, fits, wanted in (
            ("decode", self.decode is None or callable(self.decode), "give a callable from Message to the body"),
            ("dead_letter_topic", self.dead_letter_topic != "", "give the name of a topic"),
            ("concurrency", self.concurrency >= 1, "it must be 1 or more"),
            ("pause_after", self.pause_after is None or self.pause_after >= 1, "it must be 1 or more"),
            ("timeout", self.timeout is None or self.timeout > timedelta(0), "it must be above zero"),
            ("mode", self.mode in ("inline", "stored"), "use 'inline' or 'stored'"),
            ("id_scope", self.id_scope in (None, "topic"), "use 'topic' or leave it out"),
            (
                "payload_hash",
                self.payload_hash in ("raw", "json") or callable(self.payload_hash),
                "use 'raw', 'json' or a callable",
            ),
            (
                "keep_payload",
                self.keep_payload in ("unfinished", "always") or isinstance(self.keep_payload, timedelta),
                "use 'unfinished', 'always' or a timedelta",
            ),
            (
                "reply_to",
                self.reply_to in (None, True) or (isinstance(self.reply_to, str) and self.reply_to != ""),
                "name a topic, or pass True to use the message's reply-to header",
            ),
        ):  # fmt: skip
            if not fits:
                raise ConfigurationError(f"{name} is {getattr(self, name)!r}: {wanted}.")
        for name in ("dead_letter_topic", "reply_to"):
            if isinstance(topic := getattr(self, name), str):
                check_name(name, topic)
        for excluded, why in (
            (self.pause_after is not None and self.batch,
             "pause_after= counts failures message by message: leave batch=True out."),
            (self.dead_blocks and not self.ordered,
             "dead_blocks=True needs ordered=True: without it nothing waits."),
            (self.ordered and self.sequence is not None,
             "ordered=True and sequence= exclude each other: use either arrival order or version order."),
            (self.sequence is not None and self.batch,
             "sequence= handles one message at a time: remove batch=True."),
            (self.in_order and not self.transactional,
             "The order is enforced in the handler's transaction: remove transactional=False."),
            (self.keep_result and self.batch,
             "keep_result=True keeps the result of a single message: remove batch=True."),
            (self.reply_to is not None and (self.batch or not self.transactional),
             "reply_to= stages one message's result in its transaction: remove batch=True and transactional=False."),
        ):  # fmt: skip
            if excluded:
                raise ConfigurationError(why)

    @property
    def in_order(self) -> bool:
        """Whether a message may have to wait for others of its key."""
        return self.ordered or self.sequence is not None


class Options(TypedDict, total=False):
    """The options of `App.handler` that do not change the handler's signature."""

    type: str | None
    types: Iterable[str] | None
    retry: RetryPolicy | None
    reject_on: Sequence[type[Exception]]
    timeout: timedelta | None
    pause_after: int | None
    concurrency: int
    pipeline: bool
    shares: bool
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


def exceptions_of(classes: Any) -> tuple[type[Exception], ...]:
    """Return `reject_on=` as a tuple; a single class is accepted too.

    Raises:
        ConfigurationError: it holds something else.
    """
    kinds = (classes,) if isinstance(classes, type) else tuple(classes)
    if not all(isinstance(kind, type) and issubclass(kind, Exception) for kind in kinds):
        raise ConfigurationError(
            f"reject_on is {classes!r}: give exception classes, as in (ValueError, KeyError)."
        )
    return kinds


_NAME_AN_ID = (
    "Send a message-id header, or CloudEvents source and id (behind a webhook's signature only Verified(id=…) "
    "counts), or set message_id= on the handler."
)
# 64 bits, minus room for the version before and the one after
SEQUENCE_MAX = 2**63 - 2
_DECIMAL = re.compile(r"-?[0-9]{1,19}")
# types come from outside, so the cache must be bounded
_MATCHES_MAX = 4096


@dataclass(frozen=True)
class Handler:
    """One registered handler.

    Args:
        topic: "*" for every topic.
        types: None for every type, including messages without one.
        function: what is called; with `reply_to=` a wrapper that also stages the result.
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
        """Module and qualified name of the function, for people."""
        return f"{getattr(self.function, '__module__', '?')}.{getattr(self.function, '__qualname__', '?')}"

    def matches(self, topic: str, kind: str | None) -> bool:
        """Whether this handler consumes messages of this topic and type."""
        return self.takes(topic) and (self.types is None or kind in self.types)

    def takes(self, topic: str) -> bool:
        """Whether it consumes this topic, at least some types; "*" is every topic but those of effects."""
        return self.topic == topic or (self.topic == "*" and not topic.startswith(EFFECT_PREFIX))

    def overlaps(self, other: Handler) -> bool:
        """Whether some message would match both under the same consumer."""
        if self.consumer != other.consumer:
            return False
        if self.topic != other.topic and "*" not in (self.topic, other.topic):
            return False
        return self.types is None or other.types is None or bool(self.types & other.types)

    @functools.cached_property
    def timeout_s(self) -> float | None:
        """How long one call may take."""
        timeout = self.options.timeout
        return timeout.total_seconds() if timeout else None

    @functools.cached_property
    def in_order(self) -> bool:
        """Whether messages of a key are processed one behind another."""
        return self.options.in_order

    @functools.cached_property
    def keeps_payload(self) -> bool:
        """Whether processed rows of this consumer keep their payload."""
        return self.options.keep_payload != "unfinished"

    @functools.cached_property
    def plain(self) -> bool:
        """Whether one message needs nothing but a claim, a call and a close in one transaction."""
        options = self.options
        stored = options.mode == "stored" or not options.transactional
        return not (stored or options.in_order or options.keep_result)

    def arrival(self, message: Message[Any], limits: Limits) -> Arrival:
        """Attach its id and hash to a message.

        Raises:
            UnusableMessage: it has no usable id, is too large, or contains what no database can store.
        """
        message_id = self.id_of(message)
        try:
            if self.options.sequence is not None:
                message = replace(message, sequence=self._sequence(message))
            # most messages have a payload that fits, and nothing else to check
            if message.headers or len(message.payload or b"") > limits.payload_bytes:
                _check_sizes(message, limits)
            if message.sequence is not None or message.time is not None:
                check_numbers(message.sequence, message.time)
            # most messages have nothing but the topic, which the handler itself names
            if (
                message.topic != self.topic
                or message.type is not None
                or message.key is not None
                or message.content_type is not None
            ):
                check_fields(message)
            return Arrival(message, message_id, payload_hash(message, self.options.payload_hash))
        except UnusableMessage as error:
            error.message_id = message_id
            raise
        except Exception as error:
            if not is_contents(error):
                raise
            raise _unreadable(error, message_id) from error

    def accepted(self, message: Message[Any], message_id: str) -> Arrival:
        """Attach the id that an operator chose, whatever the message's size.

        Raises:
            UnusableMessage: it lacks a version, or its payload cannot be hashed.
        """
        if self.options.sequence is not None:
            message = replace(message, sequence=self._sequence(message))
        return Arrival(message, message_id, payload_hash(message, self.options.payload_hash))

    def id_of(self, message: Message[Any]) -> str:
        """Return the canonical id of a message, according to the options.

        Raises:
            UnusableMessage: it has no id, or one that cannot be stored.
        """
        options, extract = self.options, self._extract_id
        try:
            return message_id(
                message, extract=extract, scope=options.id_scope, weak=options.weak_ids
            )
        except UnusableMessage as error:
            if extract is None:
                raise UnusableMessage(f"{error} {_NAME_AN_ID}") from None
            raise
        except Exception as error:
            if not is_contents(error):
                raise
            raise _unreadable(error, "") from error

    @functools.cached_property
    def _extract_id(self) -> Extractor | None:
        return extractor_of(self.options.message_id)

    def _sequence(self, message: Message[Any]) -> int:
        """Read the version of a message.

        Raises:
            UnusableMessage: it has no version, one out of range, or no key.
        """
        extract = extractor_of(self.options.sequence)
        assert extract is not None
        try:
            version = extract(message)
        except BaseException as error:
            # an extractor is user code run on unchecked input: blame the message
            raise UnusableMessage(
                f"sequence= raised {blamed(error)} on this message: check the extractor against the payload."
            ) from error
        if (
            isinstance(version, str)
            and _in_header(self.options.sequence)
            and _DECIMAL.fullmatch(version)
        ):
            # header values are always text
            version = int(version)
        if not isinstance(version, int) or isinstance(version, bool) or message.key is None:
            raise UnusableMessage("sequence= needs an integer version and a message with a key.")
        if not -SEQUENCE_MAX <= version <= SEQUENCE_MAX:
            raise UnusableMessage(
                f"sequence= gave a version out of range: it must be between {-SEQUENCE_MAX} and {SEQUENCE_MAX}."
            )
        return version

    def lock_key(self, message: Message[Any]) -> str | None:
        """Return what the handler locks for this message, according to `lock_key=`; None if that is unknown."""
        extract = extractor_of(self.options.lock_key)
        if extract is None:
            return None
        try:
            value = extract(message)
            return None if value is None else str(value)
        except BaseException as error:  # noqa: BLE001  # user code on unchecked input; decoding will report the error
            blamed(error)
            return None

    def bound(self, arrival: Arrival) -> Message[Any]:
        """Return the message as the handler sees it.

        Raises:
            Reject: the body cannot be decoded.
            UnreadableMessage: its row cannot be read.
        """
        if arrival.unreadable is not None:
            raise arrival.unreadable
        message = arrival.message
        try:
            body = self.decode(message)
        except BaseException as error:
            # whatever a decoder raises, the payload is not what was agreed on
            raise Reject(f"The body cannot be decoded: {blamed(error)}: {error}") from error
        return handed_over(message, arrival.message_id, self.consumer, body)


def _unreadable(error: Exception, message_id: str) -> UnusableMessage:
    """The error for a message with a field that nothing here expects."""
    unusable = UnusableMessage(
        f"The message cannot be read: {type(error).__name__} (boundary: {Boundary.IDENTITY}). "
        "Look at its fields and headers."
    )
    unusable.message_id = message_id
    return unusable


def _in_header(source: Extractor | str | None) -> bool:
    return isinstance(source, str) and source.startswith("headers.")


def _check_sizes(message: Message[Any], limits: Limits) -> None:
    if message.payload is not None and len(message.payload) > limits.payload_bytes:
        raise UnusableMessage(
            f"The payload has {len(message.payload)} bytes, but the limit is {limits.payload_bytes}: "
            "raise Limits.payload_bytes, or send a reference to it."
        )
    if message.headers and not _fit(message.headers, limits.headers_bytes):
        raise UnusableMessage(
            f"The headers have more than {limits.headers_bytes} bytes (Limits.headers_bytes)."
        )


def _fit(headers: Headers, bytes_max: int) -> bool:
    # JSON in ASCII takes at most twelve bytes a character, so encoding just to measure is rarely needed
    characters = check_headers(headers)
    if 12 * characters + 24 * len(headers) <= bytes_max:
        return True
    return len(encode_headers(headers) or "") <= bytes_max


class Run:
    """One run of one handler: its messages, and how many messages each has caused so far.

    As a context manager it becomes the current run of this thread or task.

    Args:
        first: the ordinal of the first message that each message causes.
        replied: for a replay, the original reply.
    """

    __slots__ = ("_caused", "_first", "_token", "consumer", "messages", "replied")

    def __init__(
        self,
        consumer: str,
        messages: Sequence[Message[Any]],
        *,
        first: int = 0,
        replied: bytes | None = None,
    ) -> None:
        self._first = first
        self.replied = replied
        self.consumer = consumer
        self.messages = messages
        self._caused: dict[str, int] = {}

    def __enter__(self) -> None:
        self._token = running.set(self)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            running.reset(self._token)
        except ValueError:
            # a coroutine closed by another task ends in a context in which it was never set
            if kind is not GeneratorExit:
                raise

    def next_id(self, cause: Message[Any]) -> str:
        """Return the id of the next message that this one causes; a repeated run gets the same ids."""
        cause_id = str(cause.id)
        ordinal = self._caused.get(cause_id, self._first)
        self._caused[cause_id] = ordinal + 1
        return derived_id(self.consumer, cause_id, ordinal)


#: The current run of this thread or task.
running: ContextVar[Run | None] = ContextVar("txboxrunning", default=None)


class Handlers:
    """The handlers of one app, in order of registration."""

    def __init__(self) -> None:
        self._handlers: list[Handler] = []
        self._matches: dict[tuple[str, str | None], list[Handler]] = {}
        #: Workers that run them.
        self.workers = 0

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
            ConfigurationError: wrong signature, unusable name, overlap with another handler, or a worker runs.
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
        if self.workers:
            # its lanes and the topics of its sources are made: some messages would be acknowledged without this one
            raise ConfigurationError(
                f"{handler.name} is registered while a worker of this App runs: register handlers before it starts."
            )
        # a worker carries tools of agents out, too
        if topic not in (consumer, TOOL_PREFIX + consumer) and EFFECT_PREFIX in (
            topic[: len(EFFECT_PREFIX)],
            consumer[: len(EFFECT_PREFIX)],
        ):
            raise ConfigurationError(
                f"{handler.name} consumes topic {topic!r} as {consumer!r}, but names that begin with "
                f"{EFFECT_PREFIX!r} are those of effects: use @app.effect, or another name."
            )
        if handler.options.dead_letter_topic == topic:
            raise ConfigurationError(
                f"{handler.name} would consume its own dead letters: set dead_letter_topic= to another topic."
            )
        for other in self._handlers:
            if handler.overlaps(other):
                raise ConfigurationError(
                    f"{handler.name} and {other.name} overlap: both consume topic {topic!r} with the same type as "
                    f"consumer {consumer!r}; give one of them a different type= or consumer=."
                )
            _check_alike(handler, other)
        self._handlers.append(handler)
        self._matches.clear()
        return handler

    def order_of(self, consumer: str) -> tuple[bool, bool]:
        """Whether only the heads of keys may run for a consumer, and whether dead rows stay heads."""
        options = [handler.options for handler in self._handlers if handler.consumer == consumer]
        return any(one.ordered for one in options), any(one.dead_blocks for one in options)

    def matching(self, topic: str, kind: str | None, consumer: str | None = None) -> list[Handler]:
        """Return the handlers for a topic and type, at most one per consumer; optionally of one consumer only."""
        try:
            matches = self._matches.get((topic, kind))
        except TypeError:
            # a topic or type that is not text, such as a list
            return []
        if matches is None:
            matches = [handler for handler in self._handlers if handler.matches(topic, kind)]
            if len(self._matches) > _MATCHES_MAX:
                self._matches.clear()
            self._matches[topic, kind] = matches
        return (
            matches
            if consumer is None
            else [handler for handler in matches if handler.consumer == consumer]
        )

    def only(self, message: Message[Any], consumer: str | None) -> Handler | None:
        """Return the one handler for a message's topic and type; None when no handler consumes them.

        Raises:
            ConfigurationError: several match without a `consumer`, the consumer has no
                handler for this topic, or this is not a Message.
        """
        check_message(message)
        matches = self.matching(message.topic, message.type, consumer)
        if len(matches) == 1:
            return matches[0]
        if matches:
            names = ", ".join(repr(handler.consumer) for handler in matches)
            raise ConfigurationError(
                f"Several consumers take topic {message.topic!r} ({names}): say which with consumer=."
            )
        if consumer is not None:
            topics = [handler.topic for handler in self._handlers if handler.consumer == consumer]
            if not topics:
                raise ConfigurationError(f"No handler is registered for consumer {consumer!r}.")
            if message.topic not in topics and "*" not in topics:
                # a type may be nobody's; with another topic, the caller and the handler do not fit together
                raise ConfigurationError(
                    f"Consumer {consumer!r} takes {', '.join(map(repr, dict.fromkeys(topics)))}, not topic "
                    f"{message.topic!r}: register a handler for it, or name another consumer."
                )
        return None

    def consumes(self, topic: str) -> bool:
        """Whether any handler takes messages of this topic."""
        return any(handler.takes(topic) for handler in self._handlers)

    def name(self, topic: str) -> bool:
        """Whether any handler names this topic, rather than taking every one."""
        return any(handler.topic == topic for handler in self._handlers)

    def consumers(self) -> dict[str, list[Handler]]:
        """Return the handlers grouped by consumer."""
        grouped: dict[str, list[Handler]] = {}
        for handler in self._handlers:
            grouped.setdefault(handler.consumer, []).append(handler)
        return grouped

    def topics(self) -> list[str]:
        """Return the topics that handlers name, without repeats."""
        return list(dict.fromkeys(handler.topic for handler in self._handlers))


def check_message(message: object) -> None:
    """Check that a verb got a Message.

    Raises:
        ConfigurationError: it is something else.
    """
    if not isinstance(message, Message):
        raise ConfigurationError(
            f"This is {with_article(type(message).__name__)}, not a Message: pass Message(topic=…, id=…, payload=…)."
        )


def types_of(one: object, several: Any) -> tuple[str, ...] | None:
    """Return the types that `type=` or `types=` name; None for every type.

    Raises:
        ConfigurationError: both are set, or one is not text.
    """
    if one is not None and several is not None:
        raise ConfigurationError("A handler takes type= or types=, not both.")
    if one is not None:
        if not isinstance(one, str):
            raise ConfigurationError(f"type is {one!r}: name one type, or give several as types=.")
        check_name("type", one)
        return (one,)
    if several is None:
        return None
    types = () if isinstance(several, str) else tuple(several)
    if not types or not all(isinstance(kind, str) for kind in types):
        raise ConfigurationError(f"types is {several!r}: give several types, or name one as type=.")
    for kind in types:
        check_name("type", kind)
    return types


def listed(verb: str, topics: Any) -> tuple[str, ...]:
    """Return the topics of a verb's argument, without repeats.

    Raises:
        ConfigurationError: it is empty, or one text, whose letters would be topics.
    """
    several = (topics,) if isinstance(topics, str) else tuple(topics)
    if not several:
        raise ConfigurationError(f"{verb} got no topics: name them, or leave topics out.")
    if isinstance(topics, str) or not all(isinstance(topic, str) and topic for topic in several):
        raise ConfigurationError(
            f"topics of {verb} is {topics!r}: list the names, as in ['orders']."
        )
    return tuple(dict.fromkeys(several))


def check_name(what: str, name: str) -> None:
    """Check a topic or type that the program names.

    Raises:
        ConfigurationError: no message can have it.
    """
    try:
        check_text(what, name)
    except UnusableMessage as error:
        raise ConfigurationError(f"{what} is {name[:80]!r}: {error}") from None


def _check_topic(topic: object) -> None:
    if not isinstance(topic, str) or not topic:
        raise ConfigurationError(
            f"topic is {topic!r}: name one topic, or '*' for all; to consume several, register the function for each."
        )
    if topic != "*" and ("*" in topic or topic.endswith(">")):
        raise ConfigurationError(
            f"topic is {topic!r}: patterns are not supported, except '*' alone for every topic of the sources; "
            "give the full name."
        )
    check_name("topic", topic)


def _check_alike(handler: Handler, other: Handler) -> None:
    """Messages of one key share a lane and an order, whatever their types."""
    if handler.consumer != other.consumer or not (handler.options.ordered or other.options.ordered):
        return
    ours, theirs = (
        (peer.options.ordered, peer.options.dead_blocks, peer.options.concurrency, peer.is_async)
        for peer in (handler, other)
    )
    if ours != theirs:
        raise ConfigurationError(
            f"{handler.name} and {other.name} both handle the ordered consumer {handler.consumer!r}: give them the "
            "same ordered=, dead_blocks= and concurrency=, and make both async or neither."
        )
