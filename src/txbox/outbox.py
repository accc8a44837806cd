"""The outbox: messages that are staged in a transaction, the cause they name, and where they go."""

from __future__ import annotations

import hashlib
import sys
import uuid
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

from txbox.body import as_json
from txbox.brokers.base import Destination
from txbox.brokers.local import Local
from txbox.connections import borrow, borrow_async
from txbox.drive import run, run_async
from txbox.errors import ConfigurationError
from txbox.handlers import Handlers
from txbox.identity import checked_text, time_ordered_id
from txbox.message import HeaderPairs, Headers, HeaderValue, Message
from txbox.policy import check_duration
from txbox.steps import Steps
from txbox.store.codec import Codec, Columns
from txbox.store.dialect import Dialect

# W3C trace context, and the correlation that services of one chain share
_PASSED_ON = ("traceparent", "tracestate", "baggage", "correlation-id")
_UUID_V7_TIME = slice(0, 6)


class Run:
    """One run of one handler: its messages, and how much each has caused so far.

    As a context manager it is the run that is going on, in this thread or task.

    Args:
        first: the ordinal of the first thing that each message causes.
        replied: of a replay, what its message was answered with.
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
        self._token = _running.set(self)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # a coroutine that is closed by another task ends in a context that never had it
        with suppress(ValueError) if kind is GeneratorExit else _nothing:
            _running.reset(self._token)

    def next_id(self, cause: Message[Any]) -> str:
        """The id of the next thing that this message causes: a run that is repeated gives the same ones."""
        cause_id = str(cause.id)
        ordinal = self._caused.get(cause_id, self._first)
        self._caused[cause_id] = ordinal + 1
        return derived_id(self.consumer, cause_id, ordinal)


_nothing = nullcontext()
_running: ContextVar[Run | None] = ContextVar("txbox_running", default=None)


def cause_of(explicit: Message[Any] | None) -> tuple[Run | None, Message[Any] | None]:
    """Return the run and the message that cause what is staged now; without either, nothing does.

    Raises:
        ConfigurationError: several messages are being handled and it was not said which.
    """
    run = _running.get()
    if run is None:
        return None, explicit
    if explicit is not None:
        handled = any(explicit.id == message.id for message in run.messages)
        return (run if handled else None), explicit
    if len(run.messages) != 1:
        raise ConfigurationError(
            "A batch handler handles several messages: say which one causes what is staged, with cause=message."
        )
    return run, run.messages[0]


def passed_on(cause: Message[Any] | None) -> dict[str, HeaderValue]:
    """The headers that go from a message to what it causes: trace context, correlation, and the cause's id.

    The trace is that of OpenTelemetry's current span, where the program uses it.
    """
    headers: dict[str, HeaderValue] = {}
    if cause is not None:
        for name in _PASSED_ON:
            if (value := cause.headers.text(name)) is not None:
                headers[name] = value
        headers["causation-id"] = str(cause.id)
    # looked up and not imported: a program that traces has loaded it
    tracing: Any = sys.modules.get("opentelemetry.propagate")
    if tracing is not None:
        tracing.inject(headers)
    return headers


def derived_id(consumer: str, message_id: str, ordinal: int) -> str:
    """Return the id of the n-th thing that a message causes in a consumer, as a UUID.

    The same arguments always give the same id. When the cause's own id is a UUID of version 7, the
    result has its time and version, so that ids which grow with time stay so along a chain.
    """
    digest = bytearray(
        hashlib.sha256(f"{len(consumer)}:{consumer}{message_id}:{ordinal}".encode()).digest()[:16]
    )
    version = 8
    moment = _time_of(message_id)
    if moment is not None:
        digest[_UUID_V7_TIME] = moment
        version = 7
    digest[6] = digest[6] & 0x0F | version << 4
    digest[8] = digest[8] & 0x3F | 0x80
    return str(uuid.UUID(bytes=bytes(digest)))


def _time_of(message_id: str) -> bytes | None:
    if len(message_id) != 36:
        return None
    try:
        parsed = uuid.UUID(message_id)
    except ValueError:
        return None
    return parsed.bytes[_UUID_V7_TIME] if parsed.version == 7 else None


#: Bytes as they are, or what `txbox.body.as_json` writes.
Body = Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Outgoing:
    """A message to be sent, for `Outbox.stage_many`; the arguments are those of `Outbox.stage`."""

    topic: str
    body: Body
    type: str | None = None
    key: str | None = None
    headers: HeaderPairs = ()
    content_type: str | None = None
    delay: timedelta | None = None
    cause: Message[Any] | None = None
    ordered: bool = False


class Outbox:
    """Stages outgoing messages, so that they leave if, and only if, your transaction commits.

    Args:
        schema: the PostgreSQL schema of the tables, if they are not on the search path.
        codec: as given to App(codec=…).
        route: where everything goes, as app.publish(name=…) names it; `app.outbox` knows it for each
            topic. Without it, any App that publishes the topic, or consumes it and gets it from no
            broker, may take a message.
        notify: as given to App(notify=…).

    Inside a handler a message is staged under an id that follows from the message being handled and
    from how many were staged before it: a run that is repeated stages the same ids. It carries the
    cause's trace context on.
    """

    def __init__(
        self,
        *,
        schema: str | None = None,
        codec: Codec | None = None,
        route: str | Callable[[str, str | None], str | None] = "",
        notify: bool = False,
    ) -> None:
        self._schema = schema
        self._columns = Columns(codec)
        self._route = route
        self._notify = notify
        #: Called whenever something is staged in this process, before its commit.
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
            body: bytes as they are; anything else becomes JSON: also datetimes, UUIDs, Decimals, enums,
                dataclasses, pydantic models and msgspec structs.
            key: messages of one key and topic leave in the order of their numbers, one after the
                confirmation of the other.
            delay: do not send before this much later; its place in its key's order is kept from then on.
            cause: the message that this one follows from; inside a handler it is known, unless the
                handler takes a batch.
            ordered: also make concurrent transactions that stage under this key wait for each other,
                so that numbers are given in the order of their commits. The wait ends with the other
                transaction; two that stage under several keys in different orders can deadlock.

        Raises:
            UnusableMessage: a topic, type or key that no database can keep.
            ConfigurationError: nobody publishes this topic and no handler consumes it; or several
                messages are being handled and `cause` is missing.
            SchemaError: a table is missing; the message contains the command to run.

        Guarantee: the row commits or rolls back with your writes; once committed it is sent at least
        once, always under this id.
        """
        message = Outgoing(
            topic=topic, body=body, type=type, key=key, headers=headers,
            content_type=content_type, delay=delay, cause=cause, ordered=ordered,
        )  # fmt: skip
        return self.stage_many(tx, [message])[0]

    async def stage_async(
        self,
        tx: Any,
        topic: str,
        body: Body,
        *,
        type: str | None = None,  # noqa: A002
        key: str | None = None,
        headers: HeaderPairs = (),
        content_type: str | None = None,
        delay: timedelta | None = None,
        cause: Message[Any] | None = None,
        ordered: bool = False,
    ) -> str:
        """The twin of `stage` for async connections and sessions."""
        message = Outgoing(
            topic=topic, body=body, type=type, key=key, headers=headers,
            content_type=content_type, delay=delay, cause=cause, ordered=ordered,
        )  # fmt: skip
        return (await self.stage_many_async(tx, [message]))[0]

    def stage_many(self, tx: Any, messages: Sequence[Outgoing]) -> list[str]:
        """As `stage` for many messages, in one statement and in their order."""
        executor = borrow(tx, schema=self._schema)
        return run(executor, self.staging(executor.dialect, messages))

    async def stage_many_async(self, tx: Any, messages: Sequence[Outgoing]) -> list[str]:
        """The twin of `stage_many` for async connections and sessions."""
        executor = borrow_async(tx, schema=self._schema)
        return await run_async(executor, self.staging(executor.dialect, messages))

    def staging(
        self, dialect: Dialect, messages: Sequence[Outgoing], *, otherwise: str | None = None
    ) -> Steps[list[str]]:
        """The steps of `stage_many`, for a transaction that is open.

        Args:
            otherwise: the route of what has nowhere to go, instead of an error.
        """
        if not messages:
            return []
        self._check(messages)
        routes = [self._route_of(message, otherwise) for message in messages]
        bodies = [encoded(message) for message in messages]
        causes = [cause_of(message.cause) for message in messages]
        locks = sorted({_lock(message) for message in messages if message.ordered})
        if locks and dialect.has("stage_lock"):
            yield dialect.statement("stage_lock", {}, {"lock": locks})
        ids = [_own_id(*cause) for cause in causes]
        yield dialect.statement(
            "stage_notify" if self._notify and dialect.has("stage_notify") else "stage",
            {"key_id": self._columns.key_id},
            {
                "id": ids,
                "topic": [message.topic for message in messages],
                "type": [message.type for message in messages],
                "key": [message.key for message in messages],
                "content_type": [kind for _, kind in bodies],
                "headers": [
                    self._columns.headers(_headers(message, cause))
                    for message, (_, cause) in zip(messages, causes, strict=True)
                ],
                "payload": [self._columns.payload(payload) for payload, _ in bodies],
                "cause_consumer": [
                    own_run.consumer if own_run else cause.consumer if cause else None
                    for own_run, cause in causes
                ],
                "cause_id": [None if cause is None else str(cause.id) for _, cause in causes],
                "delay_s": [
                    message.delay.total_seconds() if message.delay else 0.0 for message in messages
                ],
                "route": routes,
            },
        )
        if self.staged is not None:
            self.staged()
        return ids

    def _check(self, messages: Iterable[Outgoing]) -> None:
        for message in messages:
            if not message.topic:
                raise ConfigurationError("An outgoing message needs a topic.")
            check_duration("delay", message.delay)
            if message.ordered and message.key is None:
                raise ConfigurationError(
                    "ordered=True needs a key: it keeps the order of one key's messages."
                )
            for what in ("topic", "type", "key", "content_type"):
                text: str | None = getattr(message, what)
                if text is not None:
                    checked_text(text, what)

    def _route_of(self, message: Outgoing, otherwise: str | None) -> str:
        if isinstance(self._route, str):
            return self._route
        found = self._route(message.topic, message.type)
        if found is None and otherwise is None:
            raise ConfigurationError(
                f"Nobody publishes topic {message.topic!r} and no handler consumes it: name it in "
                "app.publish(…, topics=[…]), or register a handler."
            )
        return otherwise or "" if found is None else found


def _own_id(own_run: Run | None, cause: Message[Any] | None) -> str:
    return time_ordered_id() if own_run is None or cause is None else own_run.next_id(cause)


def _headers(message: Outgoing, cause: Message[Any] | None) -> Headers:
    headers = Headers(message.headers)
    given = {name.lower() for name in headers.names()}
    return Headers(
        (
            *headers,
            *((name, value) for name, value in passed_on(cause).items() if name not in given),
        )
    )


def _lock(message: Outgoing) -> int:
    """The number of a key's lock: 63 bits, since 64 would be signed on one database only."""
    name = f"{len(message.topic)}:{message.topic}{message.key}".encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.sha256(name).digest()[:8]) >> 1


def encoded(message: Outgoing) -> tuple[bytes, str | None]:
    """The payload of a message, and its content type."""
    if isinstance(message.body, bytes):
        return message.body, message.content_type
    return as_json(message.body), message.content_type or "application/json"


CloudEvents = Literal["binary", "structured"]
_ALL = "*"
#: Rows for whichever App of the database has a consumer: the App that staged them has none.
LOCAL = "local"
_UNHANDLED = " (no handler)"
_NAME_BYTES = 200
_CONSUMER_BYTES = 60


@dataclass(frozen=True, slots=True)
class Route:
    """Messages of some topics go to one destination.

    Args:
        destination: None for the consumers of this app itself.
        topics: with `others`, those that go elsewhere. To the consumers of the app itself everything
            goes that was staged for them: there they say what is taken that was staged without a route.
        others: every topic but `topics`.
        cloudevents: how a message is wrapped; None leaves it as it was staged.
        source: the CloudEvents source.
        name: what the rows that go this way have in their column `route`.
    """

    destination: Destination | None
    topics: tuple[str, ...]
    others: bool = False
    cloudevents: CloudEvents | None = None
    source: str | None = None
    name: str = LOCAL

    def names(self, topic: str) -> bool:
        """Say whether a topic is one of its own."""
        return (topic in self.topics) is not self.others


@dataclass(frozen=True, slots=True)
class _Published:
    destination: Destination | Local
    topics: tuple[str, ...]
    others: bool
    cloudevents: CloudEvents | None
    source: str | None
    name: str | None


class Routes:
    """The destinations of one app; a topic goes to one of them.

    Args:
        arrives: says whether a topic comes from a broker that this app consumes.
    """

    def __init__(self, handlers: Handlers, arrives: Callable[[str], bool]) -> None:
        self._handlers = handlers
        self._arrives = arrives
        self._named: list[_Published] = []
        self._others: _Published | None = None
        self._names: dict[_Published, str] = {}
        self._local = (0, LOCAL)

    def add(
        self,
        destination: Destination | Local,
        topics: Iterable[str] | None,
        cloudevents: CloudEvents | None,
        source: str | None,
        name: str | None = None,
    ) -> None:
        """Send topics to a destination; None or "*" sends every topic that no other route names.

        Raises:
            ConfigurationError: a topic has a destination already, or an option is out of range.
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
        named = (_ALL,) if topics is None else tuple(topics)
        if not named:
            raise ConfigurationError("app.publish got no topics: name them, or leave topics out.")
        if _ALL in named:
            if self._others is not None:
                raise ConfigurationError(
                    "Two destinations take every topic: name the topics of one of them."
                )
            self._others = _Published(destination, (), True, cloudevents, source, name)
        listed = tuple(topic for topic in named if topic != _ALL)
        for topic in listed:
            if any(topic in other.topics for other in self._named):
                raise ConfigurationError(f"Topic {topic!r} has two destinations: name it once.")
        if listed:
            self._named.append(_Published(destination, listed, False, cloudevents, source, name))

    def of(self, topic: str, kind: str | None) -> str | None:
        """The name of the route that a message takes; None when it has nowhere to go."""
        published = self._published(topic)
        if published is not None and not isinstance(published.destination, Local):
            return self._name(published)
        if self._handlers.matching(topic, kind):
            return self.local
        if self._handlers.consumes(topic):
            return self.local + _UNHANDLED
        return None if published is None else LOCAL

    def all(self) -> list[Route]:
        """Return the routes that a relay of this app serves."""
        routes = [
            Route(
                published.destination,
                published.topics,
                False,
                published.cloudevents,
                published.source,
                self._name(published),
            )
            for published in self._named
            if not isinstance(published.destination, Local)
        ]
        others = self._others
        if others is not None and not isinstance(others.destination, Local):
            routes.append(
                Route(
                    others.destination, self._named_topics(), True, others.cloudevents,
                    others.source, self._name(others),
                )
            )  # fmt: skip
        if any(self._is_local(topic) for topic in self._consumed()):
            routes.append(self._local_route())
        return routes

    @property
    def local(self) -> str:
        """The route of what goes to this app's own consumers: named by them, which no other App has."""
        count, name = self._local
        if count != len(self._handlers):
            name = _within(
                ",".join(sorted(_short(consumer) for consumer in self._handlers.consumers()))
            )
            self._local = (len(self._handlers), name)
        return name

    def adopts(self, route: str, topic: str, kind: str | None, cause_consumer: str | None) -> bool:
        """Say whether rows that are on no route of this app are for its own consumers.

        They are when they were staged for one of these consumers, by a release that had others beside
        it or had no handler for them; or by a handler of this app, before rows had a route; or for
        whoever consumes them, and their topic does not come to this app from a broker too.
        """
        consumers = self._handlers.consumers()
        if not self._handlers.matching(topic, kind):
            return False
        if route == LOCAL:
            return not self._arrives(topic)
        if not route:
            return cause_consumer in consumers and self.of(topic, kind) == self.local
        named = route.removesuffix(_UNHANDLED).removeprefix(f"{LOCAL}:").split(",")
        return not {_short(consumer) for consumer in consumers}.isdisjoint(named)

    def _published(self, topic: str) -> _Published | None:
        for published in self._named:
            if topic in published.topics:
                return published
        return self._others

    def _named_topics(self) -> tuple[str, ...]:
        return tuple(topic for published in self._named for topic in published.topics)

    def _consumed(self) -> list[str]:
        """The topics that handlers name, and those that only this app's routes name."""
        named = (topic for topic in self._named_topics() if self._handlers.consumes(topic))
        return list(dict.fromkeys((*self._handlers.topics(), *named)))

    def _is_local(self, topic: str) -> bool:
        published = self._published(topic)
        return published is None or isinstance(published.destination, Local)

    def _takes_unrouted(self, topic: str) -> bool:
        """Nobody said where these rows go: what also comes from a broker may have been meant for that."""
        return self._is_local(topic) and (
            self._published(topic) is not None or not self._arrives(topic)
        )

    def _local_route(self) -> Route:
        topics = self._consumed()
        if _ALL in topics and self._takes_unrouted(_ALL):
            left = (topic for topic in topics if topic != _ALL and not self._takes_unrouted(topic))
            return Route(None, tuple(left), others=True, name=self.local)
        taken = (topic for topic in topics if topic != _ALL and self._takes_unrouted(topic))
        return Route(None, tuple(taken), name=self.local)

    def _name(self, published: _Published) -> str:
        if published.name is not None:
            return published.name
        found = self._names.get(published)
        if found is None:
            assert not isinstance(published.destination, Local)
            kind, colon, where = published.destination.publisher().name.partition(":")
            # the hosts of a cluster in any order
            found = kind + colon + ",".join(sorted(where.split(",")))
            if published.cloudevents is not None:
                found = f"{found} {published.cloudevents} {published.source}"
            self._names[published] = found = _bounded(found)
        return found


def _check_name(name: str, destination: Destination | Local) -> None:
    if isinstance(destination, Local):
        raise ConfigurationError("name= is for brokers: the route of Local is that of the App.")
    if not name or len(name.encode()) > _NAME_BYTES or name.startswith(LOCAL):
        raise ConfigurationError(
            f"name is {name!r}: use a text of 1 to {_NAME_BYTES} bytes that does not begin with {LOCAL!r}."
        )


def _short(consumer: str) -> str:
    """A consumer within a route's name."""
    plain = consumer.isascii() and consumer.isprintable() and not set(consumer) & {",", " "}
    if plain and len(consumer) <= _CONSUMER_BYTES:
        return consumer
    return hashlib.sha256(consumer.encode("utf-8", "surrogatepass")).hexdigest()[:20]


def _within(consumers: str) -> str:
    """The route's name with as many of the consumers as fit: each of them is enough to know the App by."""
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


# below the ordinals of whatever a handler stages: each death of a message has an id of its own
_DEATH = -2
# these name the dead message, not the letter about it
_IDENTITY = ("message-id", "ce_id", "ce-id", "cloudevents:id", "cloudevents_id")


class DeadLetters:
    """Stages dead letters of handlers with `dead_letter_topic=`.

    Guarantee: the letter is staged if, and only if, the row becomes dead: one transaction.
    """

    def __init__(self, handlers: Handlers, outbox: Outbox) -> None:
        self._handlers = handlers
        self._outbox = outbox

    def staged(
        self,
        dialect: Dialect,
        consumer: str,
        message: Message[Any],
        *,
        attempts: int,
        error_type: str,
    ) -> Steps[None]:
        """Stage the letter of a message that has just become dead; for a transaction that is open.

        It has the payload, key, type and headers of the message, and says in headers who gave it up.
        """
        found = self._handlers.matching(message.topic, message.type, consumer)
        topic = found[0].options.dead_letter_topic if found else None
        if topic is None:
            return
        letter = Outgoing(
            topic=topic,
            # a tombstone's letter is empty
            body=message.payload or b"",
            type=message.type,
            key=message.key,
            content_type=message.content_type,
            headers=_letter_headers(message, consumer, attempts, error_type),
        )
        with Run(consumer, (message,), first=_DEATH - attempts):
            yield from self._outbox.staging(dialect, [letter], otherwise=LOCAL)


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
        # not the text: it may hold what the codec hides
        ("dead-letter-error-type", error_type),
    ]
