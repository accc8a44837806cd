"""The outbox: messages staged in a transaction, and what caused them.

routes.py says where they go; dead_letters.py, replies.py and effects.py stage what txbox itself says.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from txbox.connections import borrow
from txbox.errors import ConfigurationError, check_duration
from txbox.handlers import Run, running
from txbox.handlers.body import as_json
from txbox.identity import check_fields, check_headers, time_ordered_id
from txbox.message import HeaderPairs, Headers, HeaderValue, Message
from txbox.session import Transaction, async_of, run, run_async
from txbox.store.codec import Codec, Columns, Row
from txbox.store.dialect import Dialect

if TYPE_CHECKING:
    from txbox.observers.tracing import Tracing

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
    named = {name.lower() for name in headers.names()}
    return Headers((*headers, *((name, passed[name]) for name in passed if name not in named)))


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
        route = self._route(message.topic, message.type)
        if route is None and otherwise is None:
            raise ConfigurationError(
                f"Nobody publishes topic {message.topic!r} and no handler names it: list it in "
                "app.publish(…, topics=[…]), or register a handler."
            )
        return otherwise or "" if route is None else route


def _lock(message: Outgoing) -> int:
    """Return the number of a key's lock: 63 bits, because only some databases take 64 unsigned."""
    name = f"{len(message.topic)}:{message.topic}{message.key}".encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.sha256(name).digest()[:8]) >> 1


def encoded(message: Outgoing) -> tuple[bytes, str | None]:
    """Return the payload of a message and its content type."""
    if isinstance(message.body, bytes):
        return message.body, message.content_type
    return as_json(message.body), message.content_type or "application/json"
