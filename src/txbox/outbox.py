"""The outbox: messages staged in a transaction, what caused them, where they go; dead letters and replies."""

from __future__ import annotations

import functools
import hashlib
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from txbox.brokers.base import Destination
from txbox.brokers.local import Local
from txbox.connections import borrow
from txbox.errors import ConfigurationError, UnusableMessage, check_duration
from txbox.handlers import (
    HandlerOptions,
    Handlers,
    Run,
    check_name,
    is_async_function,
    listed,
    running,
)
from txbox.handlers.body import as_json
from txbox.identity import (
    EFFECT_PREFIX,
    check_fields,
    check_headers,
    derived_id,
    time_ordered_id,
)
from txbox.message import HeaderPairs, Headers, HeaderValue, Message
from txbox.session import Transaction, async_of, run, run_async
from txbox.store.codec import Codec, Columns, Row
from txbox.store.dialect import Dialect

if TYPE_CHECKING:
    from txbox.observers.tracing import Tracing

F = TypeVar("F", bound=Callable[..., Any])

# the W3C trace context, and the correlation id shared by a chain of services
_PASSED_ON = ("traceparent", "tracestate", "baggage", "correlation-id")


def cause_of(explicit: Message[Any] | None) -> tuple[Run | None, Message[Any] | None]:
    """Return the run and the message that cause what is staged now, if any.

    Raises:
        ConfigurationError: several messages are being handled and `cause=` was not given.
    """
    run = running.get()
    if run is None:
        return None, explicit
    if explicit is not None:
        handled = any(explicit.id == message.id for message in run.messages)
        return (run if handled else None), explicit
    if len(run.messages) != 1:
        raise ConfigurationError(
            "A batch handler handles several messages: say which one is the cause, with cause=message."
        )
    return run, run.messages[0]


def passed_on(cause: Message[Any] | None) -> dict[str, HeaderValue]:
    """Return the headers a message passes to what it causes: trace context, correlation id and its own id.

    If the program uses OpenTelemetry, the trace is that of the current span.
    """
    headers: dict[str, HeaderValue] = {}
    if cause is not None:
        if cause.headers:
            values = zip(_PASSED_ON, cause.headers.texts(*_PASSED_ON), strict=True)
            headers |= {name: value for name, value in values if value is not None}
        headers["causation-id"] = str(cause.id)
    # looked up, not imported: a program that traces has loaded it already
    tracing: Any = sys.modules.get("opentelemetry.propagate")
    if tracing is not None:
        tracing.inject(headers)
    return headers


def with_passed_on(headers: Headers, passed: Mapping[str, HeaderValue]) -> Headers:
    """Add what is passed on, but for the names that are given already."""
    if not headers:
        return Headers(passed)
    given = {name.lower() for name in headers.names()}
    return Headers((*headers, *((name, passed[name]) for name in passed if name not in given)))


def id_of(run: Run | None, cause: Message[Any] | None) -> str:
    """Return the id of the next message staged: derived from its cause, if a handler of that one stages it."""
    return time_ordered_id() if run is None or cause is None else run.next_id(cause)


#: Bytes are sent as they are; anything else is encoded with `txbox.handlers.body.as_json`.
Body = Any


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A message for `Outbox.stage_many`; the fields are the arguments of `Outbox.stage`."""

    topic: str
    body: Body
    _: KW_ONLY
    type: str | None = None
    key: str | None = None
    headers: HeaderPairs = ()
    content_type: str | None = None
    delay: timedelta | None = None
    cause: Message[Any] | None = None
    ordered: bool = False


class Outbox:
    """Stages outgoing messages, which are sent if, and only if, your transaction commits.

    Args:
        schema: the PostgreSQL schema of the tables, if it is not on the search path.
        codec: the one given to App(codec=…).
        route: where everything goes, named as in app.publish(name=…); `app.outbox` knows the route of
            each topic. Without a route, a message may be taken by any App that publishes the topic, or
            that consumes it and does not get it from a broker.
        notify: as given to App(notify=…).
        tracing: as given to App(tracing=…).

    Inside a handler, a message's id is derived from the message being handled and from how many were
    staged before it, so a repeated run stages the same ids. The cause's trace context is passed on.
    """

    def __init__(
        self,
        *,
        schema: str | None = None,
        codec: Codec | None = None,
        route: str | Callable[[str, str | None], str | None] = "",
        notify: bool = False,
        tracing: Tracing | None = None,
    ) -> None:
        self._schema = schema
        self._tracing = tracing
        self._columns = Columns(codec)
        self._route = route
        self._notify = notify
        #: Called when something was staged in this process, before its commit.
        self.staged: Callable[[], None] | None = None

    def stage(
        self,
        tx: Any,
        topic: str,
        body: Body,
        *,
        type: str | None = None,  # noqa: A002  # the word of the field
        key: str | None = None,
        headers: HeaderPairs = (),
        content_type: str | None = None,
        delay: timedelta | None = None,
        cause: Message[Any] | None = None,
        ordered: bool = False,
    ) -> str:
        """Write an outgoing message into the outbox in your transaction; returns its id.

        Args:
            tx: your connection or session, inside a transaction.
            body: bytes are sent as they are. Anything else becomes JSON, including datetimes, UUIDs,
                Decimals, enums, dataclasses, pydantic models and msgspec structs.
            key: messages with the same topic and key leave in the order they were numbered, each after
                the one before it was confirmed.
            delay: send it no earlier than this; it keeps its place in its key's order.
            cause: the message this one follows from. Known inside a handler, unless the handler takes
                a batch.
            ordered: also make concurrent transactions that stage under this key wait for each other, so
                that numbers follow commit order. The wait ends with the other transaction; two that
                stage under several keys in different orders can deadlock.

        Raises:
            UnusableMessage: a topic, type, key or header that its consumers could not store either.
            ConfigurationError: nobody publishes this topic and no handler names it; or several
                messages are being handled and `cause` is missing.
            SchemaError: a table is missing; the message contains the command to run.

        Guarantee: the row commits or rolls back with your writes. Once committed it is sent at least
        once, always under this id.
        """
        message = Outgoing(
            topic, body, type=type, key=key, headers=headers,
            content_type=content_type, delay=delay, cause=cause, ordered=ordered,
        )  # fmt: skip
        return self.stage_many(tx, [message])[0]

    @async_of(stage)
    async def stage_async(self, tx: Any, *args: Any, **kwargs: Any) -> str:
        """`stage` for async connections and sessions."""
        return (await self.stage_many_async(tx, [Outgoing(*args, **kwargs)]))[0]

    def stage_many(self, tx: Any, messages: Sequence[Outgoing]) -> list[str]:
        """Stage many messages in one statement, in the order given."""
        executor = borrow(tx, schema=self._schema)
        return run(executor, self.staging, executor.dialect, messages)

    async def stage_many_async(self, tx: Any, messages: Sequence[Outgoing]) -> list[str]:
        """`stage_many` for async connections and sessions."""
        executor = borrow(tx, is_async=True, schema=self._schema)
        return await run_async(executor, self.staging, executor.dialect, messages)

    async def staging(
        self,
        db: Transaction,
        dialect: Dialect,
        messages: Sequence[Outgoing],
        *,
        otherwise: str | None = None,
    ) -> list[str]:
        """Stage messages in a transaction that is already open.

        Args:
            otherwise: the route for messages that have nowhere to go; without it they are an error.
        """
        if not messages:
            return []
        self._check(messages)
        routes = [self._route_of(message, otherwise) for message in messages]
        bodies = [encoded(message) for message in messages]
        causes = [cause_of(message.cause) for message in messages]
        locks = sorted({_lock(message) for message in messages if message.ordered})
        if locks and dialect.has("stage_lock"):
            await db.send(dialect.statement("stage_lock", {}, {"lock": locks}))
        ids = [id_of(*cause) for cause in causes]
        rows = [self._row(*one) for one in zip(messages, ids, bodies, causes, routes, strict=True)]
        await db.send(
            dialect.statement(
                "stage_notify" if self._notify and dialect.has("stage_notify") else "stage",
                {"key_id": self._columns.key_id},
                {column: [row[column] for row in rows] for column in rows[0]},
            )
        )
        if self.staged is not None:
            self.staged()
        return ids

    def _row(
        self,
        message: Outgoing,
        message_id: str,
        body: tuple[bytes, str | None],
        cause: tuple[Run | None, Message[Any] | None],
        route: str,
    ) -> dict[str, Any]:
        (payload, content_type), (handling, caused_by) = body, cause
        row = Row(None, message_id)
        if handling is not None:
            cause_consumer: str | None = handling.consumer
        else:
            cause_consumer = None if caused_by is None else caused_by.consumer
        return {
            "id": message_id,
            "topic": message.topic,
            "type": message.type,
            "key": message.key,
            "content_type": content_type,
            "headers": self._columns.headers(self._headers(message, message_id, caused_by), row),
            "payload": self._columns.payload(payload, row),
            "cause_consumer": cause_consumer,
            "cause_id": None if caused_by is None else str(caused_by.id),
            "delay_s": message.delay.total_seconds() if message.delay else 0.0,
            "route": route,
        }

    def _check(self, messages: Iterable[Outgoing]) -> None:
        for message in messages:
            if message.topic in ("", None):
                raise ConfigurationError("An outgoing message needs a topic.")
            check_duration("delay", message.delay)
            if message.ordered and message.key is None:
                raise ConfigurationError(
                    "ordered=True needs a key: it orders the messages of one key."
                )
            check_fields(message)
            if message.headers:
                check_headers(Headers(message.headers), sent=True)

    def _headers(self, message: Outgoing, message_id: str, cause: Message[Any] | None) -> Headers:
        headers, passed = Headers(message.headers), passed_on(cause)
        if self._tracing is not None and not headers.get_all("traceparent"):
            self._tracing.created(passed, message.topic, message_id, cause)
        return with_passed_on(headers, passed)

    def _route_of(self, message: Outgoing, otherwise: str | None) -> str:
        if isinstance(self._route, str):
            return self._route
        found = self._route(message.topic, message.type)
        if found is None and otherwise is None:
            raise ConfigurationError(
                f"Nobody publishes topic {message.topic!r} and no handler names it: list it in "
                "app.publish(…, topics=[…]), or register a handler."
            )
        return otherwise or "" if found is None else found


def _lock(message: Outgoing) -> int:
    """Return the number of a key's lock: 63 bits, because only some databases take 64 unsigned."""
    name = f"{len(message.topic)}:{message.topic}{message.key}".encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.sha256(name).digest()[:8]) >> 1


def encoded(message: Outgoing) -> tuple[bytes, str | None]:
    """Return the payload of a message and its content type."""
    if isinstance(message.body, bytes):
        return message.body, message.content_type
    return as_json(message.body), message.content_type or "application/json"


CloudEvents = Literal["binary", "structured"]
_ALL = "*"
#: Rows for whichever App on this database has a consumer; the App that staged them has none.
LOCAL = "local"
_UNHANDLED = " (no handler)"
_NAME_BYTES = 200
# a program may make up its topics
_ROUTES_MAX = 1_000
_CONSUMER_BYTES = 60


@dataclass(frozen=True, slots=True)
class Route:
    """Sends messages of some topics to one destination.

    Args:
        destination: None for the consumers of this app.
        topics: the topics that take this route; with `others`, the topics that do not. On the route to
            the app's own consumers, these only select which rows staged without a route it takes.
        others: every topic except `topics`.
        cloudevents: how a message is wrapped; None leaves it as it was staged.
        source: the CloudEvents source.
        name: what rows on this route have in their `route` column.
        render: makes what is sent of what was staged.
    """

    destination: Destination | None
    topics: tuple[str, ...]
    others: bool = False
    cloudevents: CloudEvents | None = None
    source: str | None = None
    name: str = LOCAL
    render: Callable[[Message[Any]], Message[Any]] | None = None

    def names(self, topic: str) -> bool:
        """Whether a topic takes this route."""
        return (topic in self.topics) is not self.others


class Routes:
    """The destinations of one app. Each topic goes to exactly one.

    Args:
        arrives: whether a topic comes from a broker that this app consumes.
    """

    def __init__(self, handlers: Handlers, arrives: Callable[[str], bool]) -> None:
        self._handlers = handlers
        self._arrives = arrives
        # as added, with the names that were given
        self._named: list[Route] = []
        self._others: Route | None = None
        self._names: dict[Route, str] = {}
        self._local = (0, LOCAL)
        # topic and type → route, for as long as no handler or destination is added
        self._of: dict[tuple[str, str | None], str | None] = {}
        self._of_handlers = 0

    def add(
        self,
        destination: Destination | Local,
        topics: Iterable[str] | None,
        cloudevents: CloudEvents | None,
        source: str | None,
        name: str | None = None,
        *,
        render: Callable[[Message[Any]], Message[Any]] | None = None,
    ) -> None:
        """Send topics to a destination; None or "*" sends every topic without a route of its own.

        Raises:
            ConfigurationError: a topic already has a destination, or an option is out of range.
        """
        if cloudevents not in (None, "binary", "structured"):
            raise ConfigurationError(
                f"cloudevents is {cloudevents!r}: use 'binary', 'structured' or leave it out."
            )
        if (cloudevents is None) != (source is None):
            raise ConfigurationError(
                "cloudevents= and source= go together: a CloudEvent names the service it comes from."
            )
        if name is not None:
            _check_name(name, destination)
        given = Route(
            None if isinstance(destination, Local) else destination,
            (), cloudevents=cloudevents, source=source, name=name or "", render=render,
        )  # fmt: skip
        named = (_ALL,) if topics is None else listed("app.publish", topics)
        for topic in named:
            check_name("topic", topic)
        if _ALL in named:
            if self._others is not None:
                raise ConfigurationError(
                    "Two destinations take every topic: name the topics of one of them."
                )
            self._others = replace(given, others=True)
        topics = tuple(topic for topic in named if topic != _ALL)
        for topic in topics:
            if any(topic in other.topics for other in self._named):
                raise ConfigurationError(f"Topic {topic!r} has two destinations: name it once.")
        if topics:
            self._named.append(replace(given, topics=topics))
        self._of.clear()

    def of(self, topic: str, kind: str | None) -> str | None:
        """Return the name of the route a message takes; None if it has nowhere to go."""
        if self._of_handlers != len(self._handlers) or len(self._of) >= _ROUTES_MAX:
            self._of, self._of_handlers = {}, len(self._handlers)
        try:
            return self._of[topic, kind]
        except KeyError:
            return self._of.setdefault((topic, kind), self._route_of(topic, kind))

    def _route_of(self, topic: str, kind: str | None) -> str | None:
        published = self._published(topic)
        if published is not None and published.destination is not None:
            return self._name(published)
        if not self._is_wanted(topic):
            return None
        if self._handlers.matching(topic, kind):
            return self.local
        if self._handlers.consumes(topic):
            return self.local + _UNHANDLED
        return None if published is None else LOCAL

    def all(self) -> list[Route]:
        """Return the routes that this app's relay serves."""
        routes = [*self._named]
        if self._others is not None:
            routes.append(replace(self._others, topics=self._named_topics()))
        routes = [
            replace(route, name=self._name(route))
            for route in routes
            if route.destination is not None
        ]
        if any(self._is_local(topic) for topic in self._consumed()):
            routes.append(self._local_route())
        return routes

    @property
    def local(self) -> str:
        """The route to this app's own consumers. It contains their names, which no other App shares."""
        count, name = self._local
        if count != len(self._handlers):
            name = _within(
                ",".join(sorted(_short(consumer) for consumer in self._handlers.consumers()))
            )
            self._local = (len(self._handlers), name)
        return name

    def adopts(self, route: str, topic: str, kind: str | None, cause_consumer: str | None) -> bool:
        """Whether this app's consumers take rows whose route it does not know.

        True in three cases: this app staged the rows for one of these consumers when it had other consumers, or no
        handler for them; or a handler of this app staged them by an Outbox without an App; or any App may consume
        them, and their topic does not also come from a broker.
        """
        consumers = self._handlers.consumers()
        if not self._handlers.matching(topic, kind) or not self._is_wanted(topic):
            return False
        if route == LOCAL:
            return not self._arrives(topic)
        if not route:
            return cause_consumer in consumers and self.of(topic, kind) == self.local
        named = route.removesuffix(_UNHANDLED).removeprefix(f"{LOCAL}:").split(",")
        return not {_short(consumer) for consumer in consumers}.isdisjoint(named)

    def _published(self, topic: str) -> Route | None:
        return next((route for route in self._named if topic in route.topics), self._others)

    def _named_topics(self) -> tuple[str, ...]:
        return tuple(topic for published in self._named for topic in published.topics)

    def _consumed(self) -> list[str]:
        """Return the topics that handlers name, plus those that only this app's routes name."""
        named = (topic for topic in self._named_topics() if self._handlers.consumes(topic))
        return [
            topic
            for topic in dict.fromkeys((*self._handlers.topics(), *named))
            if not topic.startswith(EFFECT_PREFIX)
        ]

    def _is_wanted(self, topic: str) -> bool:
        """Whether what is staged for a topic may be meant for this app's handlers: one names it, or a route does.

        Never for an effect: a message's `reply-to` may name any topic, and must not run one.
        A handler of "*" takes what sources bring, and what is published to Local. It is no reason to take what nobody
        publishes: the topic may be misspelt, or another App's.
        """
        if topic.startswith(EFFECT_PREFIX):
            return False
        return self._published(topic) is not None or self._handlers.name(topic)

    def _is_local(self, topic: str) -> bool:
        published = self._published(topic)
        return published is None or published.destination is None

    def _takes_unrouted(self, topic: str) -> bool:
        """Whether to take rows without a route. If the topic also comes from a broker, they may be meant for it."""
        return self._is_local(topic) and (
            self._published(topic) is not None or not self._arrives(topic)
        )

    def _local_route(self) -> Route:
        topics = self._consumed()
        others = _ALL in topics and self._others is not None and self._takes_unrouted(_ALL)
        named = (
            topic for topic in topics if topic != _ALL and self._takes_unrouted(topic) is not others
        )
        return Route(None, tuple(named), others=others, name=self.local)

    def _name(self, route: Route) -> str:
        """Return the name of a route to a broker: the one that was given, or where it leads."""
        if route.name:
            return route.name
        # which topics take it may change with each `add`
        key = replace(route, topics=())
        if key not in self._names:
            assert route.destination is not None
            kind, colon, where = route.destination.publisher().name.partition(":")
            # a cluster's hosts may be listed in any order
            found = kind + colon + ",".join(sorted(where.split(",")))
            if route.cloudevents is not None:
                found = f"{found} {route.cloudevents} {route.source}"
            self._names[key] = _bounded(found)
        return self._names[key]


def _check_name(name: str, destination: Destination | Local) -> None:
    if isinstance(destination, Local):
        raise ConfigurationError("name= is for brokers: Local always uses the App's own route.")
    if not name or len(name.encode()) > _NAME_BYTES or name.startswith(LOCAL):
        raise ConfigurationError(
            f"invalid route name {name!r}: use 1 to {_NAME_BYTES} bytes that do not begin with {LOCAL!r}."
        )


def _short(consumer: str) -> str:
    """A consumer's name as part of a route name."""
    plain = consumer.isascii() and consumer.isprintable() and not set(consumer) & {",", " "}
    if plain and len(consumer) <= _CONSUMER_BYTES:
        return consumer
    return hashlib.sha256(consumer.encode("utf-8", "surrogatepass")).hexdigest()[:20]


def _within(consumers: str) -> str:
    """Return a route name with as many consumers as fit: any one of them identifies the App."""
    if not consumers:
        return LOCAL
    name = f"{LOCAL}:{consumers}"
    return name if len(name) <= _NAME_BYTES else name[: _NAME_BYTES + 1].rpartition(",")[0]


def _bounded(name: str) -> str:
    found = name.encode("utf-8", "surrogatepass")
    if len(found) <= _NAME_BYTES:
        return name
    digest = hashlib.sha256(found).hexdigest()[:16]
    return f"{found[: _NAME_BYTES - 17].decode('utf-8', 'ignore')} {digest}"


# below the ordinals of anything a handler stages, so that each death of a message gets its own id
_DEATH = -2
# these identify the dead message, not the letter about it
_IDENTITY = ("message-id", "ce_id", "ce-id", "cloudevents:id", "cloudevents_id")


def letter_id(consumer: str, message_id: str, death: int) -> str:
    """Return the id of the letter about a death of a message: that of its row in txbox_attempt.

    Not its attempts: a redrive counts them anew, and a second letter under the first one's id would be a duplicate.
    """
    return derived_id(consumer, message_id, _DEATH - death)


class DeadLetters:
    """Stages dead letters for handlers with `dead_letter_topic=`.

    Guarantee: the letter is staged in the transaction that makes the row dead, or not at all.
    """

    def __init__(self, handlers: Handlers, outbox: Outbox) -> None:
        self._handlers = handlers
        self._outbox = outbox

    async def staged(
        self,
        db: Transaction,
        dialect: Dialect,
        consumer: str,
        message: Message[Any],
        *,
        attempts: int,
        error_type: str,
    ) -> None:
        """Stage the letter of a message whose last attempt has just been recorded, in the same transaction.

        The letter has the message's payload, key, type and headers, plus headers that say who gave it up.
        """
        found = self._handlers.matching(message.topic, message.type, consumer)
        topic = found[0].options.dead_letter_topic if found else None
        if topic is None:
            return
        headers = _letter_headers(message, consumer, attempts, error_type)
        letter = Outgoing(
            topic=topic,
            # a tombstone becomes an empty letter
            body=message.payload or b"",
            type=message.type,
            key=message.key,
            content_type=message.content_type,
            headers=headers,
        )
        named = {"consumer": consumer, "message_id": str(message.id)}
        ((death,),) = (await db.execute(dialect.statement("last_death", named))).rows
        with Run(consumer, (message,), first=_DEATH - death):
            try:
                await self._outbox.staging(db, dialect, [letter], otherwise=LOCAL)
            except UnusableMessage as error:
                # the codec fails on it, or it has what cannot be staged: what can be said is said
                empty = replace(
                    letter, body=b"", type=None, key=None, content_type=None,
                    headers=[*headers[-_LETTER_HEADERS:], ("dead-letter-content", str(error))],
                )  # fmt: skip
                with suppress(UnusableMessage):
                    await self._outbox.staging(db, dialect, [empty], otherwise=LOCAL)


# how many _letter_headers adds
_LETTER_HEADERS = 5


def _letter_headers(
    message: Message[Any], consumer: str, attempts: int, error_type: str
) -> list[tuple[str, HeaderValue]]:
    kept = [(name, value) for name, value in message.headers if name.lower() not in _IDENTITY]
    return [
        *kept,
        ("dead-letter-message-id", str(message.id)),
        ("dead-letter-topic", message.topic),
        ("dead-letter-consumer", consumer),
        ("dead-letter-attempts", str(attempts)),
        # not the error text: it may contain what the codec hides
        ("dead-letter-error-type", error_type),
    ]


# -- replies: what a handler returns, for the topic its sender waits on ----------------------------
# Source: https://www.enterpriseintegrationpatterns.com/patterns/messaging/ReturnAddress.html

# beyond any ordinal the handler itself can reach, so the reply's id does not depend on what else was staged
_REPLY = 1 << 64


def replying(function: F, options: HandlerOptions, outbox: Outbox) -> F:
    """Wrap a handler so that its return value is staged as a reply; None means no reply.

    Guarantee: two replies to one message have the same id if, and only if, their content is the same.
    """
    if options.reply_to is None:
        return function

    def call(message: Message[Any], tx: Any) -> Any:
        answer = function(message, tx)
        reply = _reply(message, answer, options)
        if reply is not None:
            with _caused_by(message, reply):
                outbox.stage_many(tx, [reply])
        return answer

    async def call_async(message: Message[Any], tx: Any) -> Any:
        answer = await function(message, tx)
        reply = _reply(message, answer, options)
        if reply is not None:
            with _caused_by(message, reply):
                await outbox.stage_many_async(tx, [reply])
        return answer

    wrapped: Any = functools.wraps(function)(call_async if is_async_function(function) else call)
    handler: F = wrapped
    return handler


def _caused_by(message: Message[Any], reply: Outgoing) -> Run:
    payload, _ = encoded(reply)
    digest = hashlib.sha256(payload).digest()
    return Run(message.consumer or "", (message,), first=_REPLY + int.from_bytes(digest[:8]))


def _reply(message: Message[Any], answer: Any, options: HandlerOptions) -> Outgoing | None:
    run, _ = cause_of(None)
    if run is not None and run.replied is not None:
        # a replay sends the same reply as before
        answer = json.loads(run.replied)
    if answer is None:
        return None
    topic = message.headers.text("reply-to") if options.reply_to is True else options.reply_to
    if not topic:
        return None
    headers: tuple[tuple[str, str], ...] = ()
    if message.headers.text("correlation-id") is None:
        # a requester without a correlation id knows its request by the message id
        headers = (("correlation-id", str(message.id)),)
    return Outgoing(
        topic=str(topic), body=answer, key=message.key, headers=headers, cause=message,
        content_type="application/json",
    )  # fmt: skip
