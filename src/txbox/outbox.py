"""The first door, outgoing: `Outbox.stage` inside the caller's own transaction."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from txbox.body import as_json
from txbox.cause import Run, cause_of, passed_on
from txbox.connections import borrow, borrow_async
from txbox.drive import run, run_async
from txbox.errors import ConfigurationError
from txbox.identity import checked_text, time_ordered_id
from txbox.message import HeaderPairs, Headers, Message
from txbox.policy import check_duration
from txbox.steps import Steps
from txbox.store.codec import Codec, Columns
from txbox.store.dialect import Dialect

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
