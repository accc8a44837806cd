"""The composition root: a database, handlers, sources, policies."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Sequence
from contextlib import asynccontextmanager, contextmanager
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Any, Concatenate, Literal, Self, TypeVar, Unpack, overload

from txbox.body import Decoder
from txbox.brokers.base import Destination, Source
from txbox.brokers.local import Local
from txbox.brokers.webhook import Webhook
from txbox.connections import open_database
from txbox.connections.base import BLOCK, BLOCK_ENDS, Database, block_left
from txbox.effects import PREFIX, Effects
from txbox.errors import ConfigurationError, StoreError
from txbox.events import Event, Events, MessageUnmatched, Observer
from txbox.handlers import (
    Extractor,
    Handler,
    HandlerOptions,
    Handlers,
    Options,
    Resolver,
    check_message,
    exceptions_of,
    is_async_function,
    resolved,
    types_of,
)
from txbox.identity import PayloadHash
from txbox.message import Message
from txbox.observers.activity import Activity, Moment
from txbox.observers.logging import LoggingObserver
from txbox.observers.pauses import Pauses
from txbox.outbox import CloudEvents, DeadLetters, Outbox, Routes, replying
from txbox.outcome import Answer, Outcome
from txbox.policy import (
    Batching,
    GapPolicy,
    Lease,
    Limits,
    Redaction,
    RelayPolicy,
    Retention,
    RetryPolicy,
    check_policies,
)
from txbox.processing.attempt import InboxProtocol
from txbox.processing.intake import Intake
from txbox.processing.waiting import CURABLE
from txbox.session import Connections, Raised, Session, blocking, drive, drive_async
from txbox.store import schema as tables
from txbox.store.codec import Codec, Columns
from txbox.store.inbox import InboxStore
from txbox.store.partitions import Kind, Partitioning

if TYPE_CHECKING:
    from txbox.observers.tracing import Tracing
    from txbox.ui import Authenticate, Authenticator, Dashboard

_log = logging.getLogger("txbox")

_LEFT = frozenset({Outcome.FAILED, Outcome.DEFERRED})

F = TypeVar("F", bound=Callable[..., Any])
# a resolver may pass more
OfMessage = TypeVar("OfMessage", bound=Callable[Concatenate[Message[Any], Any, ...], object])
OfMessages = TypeVar(
    "OfMessages", bound=Callable[Concatenate[list[Message[Any]], Any, ...], object]
)
Outside = TypeVar("Outside", bound=Callable[[Message[Any]], object])


@dataclasses.dataclass(frozen=True)
class Consumption:
    """A source and the topics it is asked for."""

    source: Source
    topics: tuple[str, ...] | None


class App:
    """One service: its database, its handlers and where its messages come from.

    Args:
        database: `postgresql://…`, `mysql://…` or `sqlite:///file.db`; or an object of your own: a psycopg
            or asyncpg pool, an SQLAlchemy Engine or AsyncEngine (handlers get a Connection) or
            sessionmaker (a Session).
        django: instead of `database`, an alias of Django's DATABASES.
        schema: the PostgreSQL schema of the tables; None uses the search path.
        observers: called with every event; alerts hang here. The log on `txbox` is written besides, unless one of
            them is a `LoggingObserver`.
        codec: encrypts or compresses payloads and error texts at rest.
        tracing: spans of OpenTelemetry for what is staged, sent and processed; see `txbox.observers.tracing`.
        redact: what operators, logs and stored error texts never show; see Redaction.
        limits: how large a message may be, and how long a claim waits. Without it, a claim gives up
            before a short `lease` runs out.
        lease: how long a worker holds rows of the table; see Lease.
        retention: when old rows are deleted; see Retention.
        batching: what one transaction may take; see Batching.
        relaying: how staged messages are sent; see RelayPolicy.
        notify: on PostgreSQL, wake relays in other processes at the commit of what is staged, by NOTIFY,
            instead of when they look next. It costs: transactions that notify commit one after the
            other, over all databases of the server, so that they share no flush. Relays listen on a
            connection of their own, if `database` is a URL for psycopg; all others look, as always.
        unmatched: what to do with a message that no handler consumes: acknowledge and count it, or
            keep it in the quarantine.
        resolver: supplies handlers and effects with parameters beside message and transaction, by annotation; see
            `txbox.handlers.Resolver`.

    Raises:
        ConfigurationError: no database or two, one that txbox does not know, a driver that is not
            installed.

    Constructing an App does no I/O, and it may be forked: a child has connections of its own, and nothing in
    flight. With SQLite fork before the first message, since SQLite lets no child use a database that is open.
    """

    def __init__(  # noqa: PLR0913  # every option by name, as of `handler`
        self,
        database: Any = None,
        *,
        django: str | None = None,
        schema: str | None = None,
        observers: Sequence[Observer] = (),
        tracing: Tracing | None = None,
        codec: Codec | None = None,
        redact: Redaction | None = None,
        limits: Limits | None = None,
        lease: Lease | None = None,
        retention: Retention | None = None,
        batching: Batching | None = None,
        relaying: RelayPolicy | None = None,
        notify: bool = False,
        unmatched: Literal["acknowledge", "quarantine"] = "acknowledge",
        resolver: Resolver | None = None,
    ) -> None:
        if (database is None) == (django is None):
            raise ConfigurationError(
                "App() takes either a database or django='alias': give exactly one of them."
            )
        if unmatched not in ("acknowledge", "quarantine"):
            raise ConfigurationError(
                f"unmatched is {unmatched!r}: use 'acknowledge' or 'quarantine'."
            )
        check_policies(
            redact=(redact, Redaction), limits=(limits, Limits), lease=(lease, Lease), retention=(retention, Retention),
            batching=(batching, Batching), relaying=(relaying, RelayPolicy),
        )  # fmt: skip
        self.database: Database = _open(database, django, schema)
        self.handlers = Handlers()
        self.consumptions: list[Consumption] = []
        self.webhooks: list[Webhook] = []
        #: Where staged messages go.
        self.routes = Routes(self.handlers, self._arrives)
        #: Stages outgoing messages in a handler's transaction: `app.outbox.stage(tx, topic, body)`.
        self.outbox = Outbox(
            schema=schema, codec=codec, route=self.routes.of, notify=notify, tracing=tracing
        )
        self.tracing = tracing
        self.notify = notify
        has_log = any(isinstance(observer, LoggingObserver) for observer in observers)
        #: Consumers that are paused, and what a worker or relay of this process has done, which it writes down
        #: every few seconds.
        self.pauses = Pauses(self._pause_after, self._emit)
        self.activity = Activity(self.pauses.went_well)
        self.events = Events(
            observers,
            None if has_log else LoggingObserver(),
            # its own names of credentials are about headers, which no event has
            None if redact is None or not redact.errors else redact.error,
            None if tracing is None else tracing.around,
            counts=(self.activity, self.pauses),
        )
        self.lease = lease or Lease()
        self.limits = limits or Limits.within(self.lease)
        self.retention = retention or Retention()
        self.batching = batching or Batching()
        self.relaying = relaying or RelayPolicy()
        self.unmatched = unmatched
        self.resolver = resolver
        self.store = InboxStore(self.database.dialect, Columns(codec, redact))
        #: Stages external calls in a handler's transaction: `app.effects.stage(tx, name, body)`.
        self.effects = Effects(
            self.handlers, self.limits, schema=schema, columns=self.store.columns
        )
        self.dead_letters = DeadLetters(self.handlers, self.outbox)
        self.protocol = InboxProtocol(
            self.store,
            self.events,
            self.limits,
            self.lease,
            batching=self.batching,
            letters=self.dead_letters,
        )
        self.intake = Intake(self.protocol)
        #: Told by `process`, `answer` and `send` of what they have left in the table, with its consumer: FAILED
        #: or DEFERRED. A worker of this process looks there.
        self.left: Callable[[str, Outcome], None] | None = None

    def __repr__(self) -> str:
        count = len(self.handlers)
        return f"<App {self.database.name}: {count} {'handler' if count == 1 else 'handlers'}>"

    # -- registration -------------------------------------------------------------------------

    # what a handler takes depends on two options; a checker then finds one argument too few, or a swapped pair
    @overload
    def handler(
        self,
        topic: str,
        *,
        consumer: str,
        batch: Literal[False] = ...,
        transactional: Literal[True] = ...,
        **options: Unpack[Options],
    ) -> Callable[[OfMessage], OfMessage]: ...
    @overload
    def handler(
        self,
        topic: str,
        *,
        consumer: str,
        batch: Literal[True],
        transactional: Literal[True] = ...,
        **options: Unpack[Options],
    ) -> Callable[[OfMessages], OfMessages]: ...
    @overload
    def handler(
        self,
        topic: str,
        *,
        consumer: str,
        batch: Literal[False] = ...,
        transactional: Literal[False],
        **options: Unpack[Options],
    ) -> Callable[[Outside], Outside]: ...
    @overload
    def handler(
        self,
        topic: str,
        *,
        consumer: str,
        batch: bool = ...,
        transactional: bool = ...,
        **options: Unpack[Options],
    ) -> Callable[[F], F]: ...
    def handler(  # noqa: PLR0913  # every option by name: this is the API people read
        self,
        topic: str,
        *,
        consumer: str,
        type: str | None = None,  # noqa: A002  # the word of the field
        types: Iterable[str] | None = None,
        retry: RetryPolicy | None = None,
        reject_on: Sequence[type[Exception]] = (),
        timeout: timedelta | None = None,
        pause_after: int | None = None,
        concurrency: int = 1,
        batch: bool = False,
        pipeline: bool = False,
        transactional: bool = True,
        ordered: bool = False,
        dead_blocks: bool = False,
        dead_letter_topic: str | None = None,
        sequence: Extractor | str | None = None,
        gaps: GapPolicy | None = None,
        lock_key: Extractor | str | None = None,
        message_id: Extractor | str | None = None,
        weak_ids: bool = False,
        id_scope: Literal["topic"] | None = None,
        decode: Decoder | None = None,
        payload_hash: PayloadHash = "raw",
        keep_payload: timedelta | Literal["unfinished", "always"] = "unfinished",
        keep_result: bool = False,
        reply_to: str | Literal[True] | None = None,
        mode: Literal["inline", "stored"] = "inline",
    ) -> Callable[[F], F]:
        """Register a handler for a topic; the function stays as it is.

        Args:
            topic: "*" for every topic of the sources.
            consumer: part of the key of its inbox rows: keep it stable.
            type: the message type it takes; without it and `types`, all.
            types: several message types.
            retry: when failures are tried again; see RetryPolicy.
            reject_on: exceptions that make the message dead at once.
            timeout: bound on one run; what it did is rolled back.
            pause_after: a worker pauses the consumer after so many failures in a row, until somebody resumes it; its
                messages are then taken one by one.
            concurrency: lanes of one worker, 1 or more.
            batch: the function takes a list of messages and one transaction.
            pipeline: the function reads no results: with psycopg its statements travel with COMMIT.
            transactional: False for work outside a transaction: `(message)`, leased, at least once;
                a worker stores its messages first and keeps the lease while it runs.
            ordered: messages of one key are processed in the order of their arrival; one that fails
                holds its key up until it is processed or dead.
            dead_blocks: with `ordered`, a dead message holds its key up until somebody acts.
            dead_letter_topic: where a copy of a message that is given up is sent, through the outbox.
            sequence: the version of the message's key, as a callable or a path; versions are
                processed in their order, and one that is missing is waited for.
            gaps: with `sequence`, what to do about a missing version; see GapPolicy.
            lock_key: what the function locks, as a callable or a path: messages of one lock key
                share a lane, and a batch is sorted by it.
            message_id: a callable or a path like "body.order_id".
            weak_ids: accept ids made of transport coordinates where a message has no other.
            id_scope: "topic" where ids are unique within a topic only.
            decode: a callable from Message to body, instead of the annotation.
            payload_hash: "raw", "json" or a callable; how copies are compared.
            keep_payload: "unfinished", "always", or how long processed rows keep their payload.
            keep_result: keep what the function returned, as JSON, and give it to duplicates; see `answer`.
            reply_to: stage what the function returned, in its transaction, to this topic; True: to
                the one that the message's `reply-to` header names. None is no reply. A replay that returns
                something else replies under another id; with `keep_result`, it replies what is kept.
            mode: "stored" acknowledges once the payload is stored, and processes from the table.

        Raises:
            ConfigurationError: a wrong signature, an overlap, an option out of range, or no connections of its kind.
        """
        kinds = types_of(type, types)
        options = HandlerOptions(
            retry=RetryPolicy() if retry is None else retry,
            reject_on=exceptions_of(reject_on),
            timeout=timeout,
            pause_after=pause_after,
            concurrency=concurrency,
            batch=batch,
            pipeline=pipeline,
            transactional=transactional,
            ordered=ordered,
            dead_blocks=dead_blocks,
            dead_letter_topic=dead_letter_topic,
            sequence=sequence,
            gaps=GapPolicy() if gaps is None else gaps,
            lock_key=lock_key,
            message_id=message_id,
            weak_ids=weak_ids,
            id_scope=id_scope,
            decode=decode,
            payload_hash=payload_hash,
            keep_payload=keep_payload,
            keep_result=keep_result,
            reply_to=reply_to,
            mode=mode,
        )

        def register(function: F) -> F:
            is_async = is_async_function(function)
            called = resolved(
                function, self.resolver, transactional=transactional, is_async=is_async
            )
            called = replying(called, options, self.outbox)
            if self.tracing is not None:
                called = self.tracing.traced(called, consumer, is_async=is_async)
            added = self.handlers.add(
                called,
                topic=topic,
                consumer=consumer,
                types=kinds,
                options=options,
            )
            self._check_connections(added)
            return function

        return register

    def effect(
        self,
        name: str,
        *,
        retry: RetryPolicy | None = None,
        reject_on: Sequence[type[Exception]] = (),
        timeout: timedelta | None = None,
        pause_after: int | None = None,
        concurrency: int = 1,
    ) -> Callable[[F], F]:
        """Register a function `(message)` that calls something outside of the database, after commit.

        Its rows are those of the consumer `effect:<name>`; what it returns is kept as their result.

        Args:
            retry: when failures are tried again; see RetryPolicy.
            reject_on: exceptions that make the message dead at once.
            timeout: bound on one run.
            pause_after: a worker pauses the effect after so many failures in a row.
            concurrency: lanes of one worker, 1 or more.

        Guarantee: carried out at least once for each `app.effects.stage(tx, name, …)` that commits.
        Give `message.idempotency_key` to the other side, so that a repeated call is one.
        """
        return self.handler(
            PREFIX + name,
            consumer=PREFIX + name,
            transactional=False,
            keep_result=True,
            retry=retry,
            reject_on=reject_on,
            timeout=timeout,
            pause_after=pause_after,
            concurrency=concurrency,
        )

    def consume(self, source: Source | Webhook, topics: Iterable[str] | None = None) -> None:
        """Take messages from a source; `topics` default to those of the handlers.

        A Webhook has its topic; `txbox run` serves it.
        """
        if isinstance(source, Webhook):
            if topics is not None:
                raise ConfigurationError("A Webhook has one topic: name it there, as topic=.")
            source.bind(self._by_every_consumer)
            self.webhooks.append(source)
            return
        self.consumptions.append(Consumption(source, None if topics is None else tuple(topics)))

    def publish(
        self,
        destination: Destination | Local,
        topics: Iterable[str] | None = None,
        *,
        cloudevents: CloudEvents | None = None,
        source: str | None = None,
        name: str | None = None,
    ) -> None:
        """Send staged messages of these topics to a broker; without topics, all that no other one takes.

        What nobody publishes and a handler consumes goes to the handlers of this app (`Local`).

        Args:
            name: of the route, which staged rows keep: only a relay that has it takes them. By default
                it is the broker's address. Name it where two Apps on one database publish the same topic to
                one broker and must not relay for each other, or where the address is going to change.
            cloudevents: send "binary" or "structured" CloudEvents, from the service named by `source`.

        Raises:
            ConfigurationError: a topic has a destination already.
        """
        self.routes.add(destination, topics, cloudevents, source, name)

    def _arrives(self, topic: str) -> bool:
        """Say whether a topic comes from a source."""
        for consumption in self.consumptions:
            asked = consumption.source.topics if consumption.topics is None else consumption.topics
            if not isinstance(consumption.source, Local) and not {topic, "*"}.isdisjoint(
                self.handlers.topics() if asked is None else asked
            ):
                return True
        return False

    def _emit(self, event: Event) -> None:
        self.events.emit(event)

    def _pause_after(self, consumer: str) -> int | None:
        found = self.handlers.consumers().get(consumer, ())
        limits = [handler.options.pause_after for handler in found]
        return min((limit for limit in limits if limit is not None), default=None)

    def _check_connections(self, handler: Handler) -> None:
        connections = self.database.asynchronous if handler.is_async else self.database.sync
        if handler.options.transactional and connections is None:
            kind, other = ("async", "def") if handler.is_async else ("sync", "async def")
            raise ConfigurationError(
                f"{handler.name} is {kind}, but {self.database.name} has no {kind} connections: "
                f"make it a `{other}` function, or give App() a pool or engine that is {kind}."
            )

    # -- one message --------------------------------------------------------------------------

    def process(self, message: Message[Any], *, consumer: str | None = None) -> Outcome:
        """Run the handler of one message safely; acknowledge unless the outcome is IN_PROGRESS.

        Returns: UNMATCHED when no handler consumes its topic and type, QUARANTINED with
        `unmatched="quarantine"`; DEFERRED, stored in the table, while the consumer is paused; see Outcome for
        the others.

        Raises:
            ConfigurationError: several consumers without `consumer=`, one that has no handler at all, an
                async handler, or a database with async connections only.
            SchemaError: the tables are missing or do not fit; the message has the command to run.
            StoreUnavailable: the database stayed away for Limits.unavailable_for: do not acknowledge.

        Guarantee: PROCESSED means that the inbox row and the handler's writes are one commit. A
        handler with `transactional=False` is leased for `Lease.duration` and its `timeout=` on top,
        without heartbeats: a run that outlasts both may be run a second time beside itself.
        """
        return self.answer(message, consumer=consumer).outcome

    async def process_async(self, message: Message[Any], *, consumer: str | None = None) -> Outcome:
        """The twin of `process`; a sync handler runs in a thread."""
        return (await self.answer_async(message, consumer=consumer)).outcome

    def answer(self, message: Message[Any], *, consumer: str | None = None) -> Answer:
        """As `process`; also returns what the handler of `keep_result=True` returned, then or now.

        A duplicate gets the answer that the first delivery got.
        """
        handler = self.handlers.only(message, consumer)
        if handler is not None and handler.is_async:
            raise ConfigurationError(f"{handler.name} is async: await app.process_async(message).")
        return drive(self._any_sync(), self._answered, handler, message)

    async def answer_async(self, message: Message[Any], *, consumer: str | None = None) -> Answer:
        """The twin of `answer`; a sync handler runs in a thread."""
        handler, connections = self.handlers.only(message, consumer), self.database.asynchronous
        if connections is None or (handler is not None and not handler.is_async):
            return await asyncio.to_thread(self.answer, message, consumer=consumer)
        return await drive_async(connections, self._answered, handler, message)

    async def _by_every_consumer(self, message: Message[Any]) -> dict[str, Answer]:
        """Return each consumer's answer to a message; where there is none, that of the consumer ""."""
        found = self.handlers.matching(message.topic, message.type)
        if not found:
            return {"": await self.answer_async(message)}
        return {
            handler.consumer: await self.answer_async(message, consumer=handler.consumer)
            for handler in found
        }

    # -- sending to the own consumers ---------------------------------------------------------

    def send(self, message: Message[Any]) -> dict[str, Outcome]:
        """Store a message for every consumer of its topic, to be processed from the table.

        Returns: consumer → DEFERRED when it is stored, now or before; DUPLICATE when it was finished before;
        QUARANTINED; IN_PROGRESS when another transaction holds this id: send it again.

        Raises:
            ConfigurationError: no handler consumes its topic and type.
        """
        return drive(self._any_sync(), self._sent, [message])[0]

    async def send_async(self, message: Message[Any]) -> dict[str, Outcome]:
        """The twin of `send`."""
        return (await self.send_many_async([message]))[0]

    def send_many(self, messages: Sequence[Message[Any]]) -> list[dict[str, Outcome]]:
        """As `send` for many messages, in one statement a consumer; the answers are in their order."""
        return drive(self._any_sync(), self._sent, messages)

    async def send_many_async(self, messages: Sequence[Message[Any]]) -> list[dict[str, Outcome]]:
        """The twin of `send_many`."""
        if self.database.asynchronous is None:
            return await asyncio.to_thread(self.send_many, messages)
        return await drive_async(self.database.asynchronous, self._sent, messages)

    # -- a transaction of the caller's ---------------------------------------------------------

    @contextmanager
    def transaction(self) -> Generator[Any]:
        """A transaction of this app's database, to stage messages beside writes of your own.

        Gives what handlers get, a connection or session of your own kind; never commit or roll back on it.
        Whatever leaves the block as an exception rolls it back, and is raised on.

        Raises:
            StoreError: COMMIT was refused, or sent without an answer; `definite` says that nothing was kept. Or the
                block ended the transaction itself (fault GUARD).
            StoreUnavailable: the database cannot be reached.

        Guarantee: when the block ends without an exception, everything is committed; else, unless COMMIT
        itself stayed without an answer, nothing is, and no staged message is sent.
        """
        db = Session(self._any_sync())
        try:
            blocking(db.begin([BLOCK]))
            assert db.connection is not None
            yield db.connection.native
            blocking(_committed(db))
        except BaseException:
            blocking(db.rollback())
            raise
        finally:
            db.close()

    @asynccontextmanager
    async def transaction_async(self) -> AsyncGenerator[Any]:
        """The twin of `transaction`. If its task is cancelled during COMMIT, everything or nothing is kept.

        Raises:
            ConfigurationError: the database has sync connections only.
        """
        if self.database.asynchronous is None:
            raise ConfigurationError(
                f"{self.database.name} has sync connections only: use `with app.transaction()`."
            )
        db = Session(self.database.asynchronous)
        try:
            await db.begin([BLOCK])
            assert db.connection is not None
            yield db.connection.native
            await _committed(db)
        except BaseException:
            await db.rollback()
            raise
        finally:
            db.close()

    # -- operations behind the verbs, and for the worker --------------------------------------

    async def _answered(
        self, db: Session, handler: Handler | None, message: Message[Any]
    ) -> Answer:
        if handler is None:
            await self.unmatched_message(db, message)
            kept = self.unmatched == "quarantine"
            return Answer(Outcome.QUARANTINED if kept else Outcome.UNMATCHED)
        began, counts = time.monotonic(), self.activity.counts
        if counts:
            self.activity.received(handler.consumer, 1)
        if began >= self.pauses.stale_at:
            await self._look_for_pauses(db)
        settled = await self.intake.take_persistently(
            db,
            # of a paused consumer, what comes is stored for later
            handler.stored if handler.consumer in self.pauses.held else handler,
            [message],
            for_s=self.limits.unavailable_for.total_seconds(),
        )
        if counts:
            self.activity.settled(handler.consumer, settled, [Moment(began)], began)
        if self.left is not None:
            self._tell_of_left(self.left, handler, settled)
        return settled[0]

    async def _look_for_pauses(self, db: Session) -> None:
        try:
            if not self.protocol.checked:
                # first of all: a pool may change a connection's search_path once it has been used
                await self.protocol.check_schema(db)
            await self.pauses.look_now_and_then(db, self.store.dialect)
        except StoreError as error:
            # what is known is what counts; whether the database answers is found out next, and told there
            db.discard()
            if error.fault not in CURABLE and not self.pauses.unreadable:
                self.pauses.unreadable = True
                _log.warning(
                    "Who is paused cannot be read (%s): no consumer counts as paused here. "
                    "`txbox schema print --grants` prints the rights that are needed.",
                    error,
                )

    def _tell_of_left(
        self, left: Callable[[str, Outcome], None], handler: Handler, settled: Sequence[Answer]
    ) -> None:
        for outcome in {answer.outcome for answer in settled} & _LEFT:
            left(handler.consumer, outcome)

    async def unmatched_message(self, db: Session, message: Message[Any]) -> None:
        """Count a message that no handler consumes, and keep it where `unmatched` says so."""
        self.events.emit(
            MessageUnmatched(message_id=str(message.id), topic=message.topic, type=message.type)
        )
        if self.unmatched == "quarantine":
            await self.intake.unmatched(
                db,
                message,
                f"No handler consumes topic {message.topic!r} with type {message.type!r}.",
            )

    async def _sent(
        self, db: Session, messages: Sequence[Message[Any]]
    ) -> list[dict[str, Outcome]]:
        answers: list[dict[str, Outcome]] = [{} for _ in messages]
        work: dict[Handler, list[int]] = {}
        for index, message in enumerate(messages):
            check_message(message)
            found = self.handlers.matching(message.topic, message.type)
            if not found:
                raise ConfigurationError(
                    f"No handler consumes topic {message.topic!r} with type {message.type!r}: register one."
                )
            for handler in found:
                work.setdefault(handler, []).append(index)
        if not self.protocol.checked:
            await self.check_schema(db)
        for handler, indexes in work.items():
            began = time.monotonic()
            self.activity.received(handler.consumer, len(indexes))
            settled = await self.intake.take(
                db, handler.stored, [messages[index] for index in indexes]
            )
            for index, answer in zip(indexes, settled, strict=True):
                answers[index][handler.consumer] = answer.outcome
            self.activity.settled(handler.consumer, settled, [Moment(began)] * len(settled), began)
            if self.left is not None:
                self._tell_of_left(self.left, handler, settled)
        return answers

    async def check_schema(self, db: Session) -> None:
        """Check that this release can work with the tables; from then on their schema is known.

        Raises:
            SchemaError: the message contains the command to run.
        """
        await self.protocol.check_schema(db)

    # -- life ---------------------------------------------------------------------------------

    def init(self, *, partition: Kind | None = None) -> tuple[int, int]:
        """Apply the schema (as `txbox init` does); returns the versions before and after.

        Args:
            partition: on PostgreSQL, when the tables are made: partition the inbox by the time in its
                ids ("uuid7", "ulid"), so that retention drops whole partitions, or by "hash".
        """
        return drive(self._any_sync(), self._init, partition)

    async def init_async(self, *, partition: Kind | None = None) -> tuple[int, int]:
        """The twin of `init`."""
        if self.database.asynchronous is None:
            return await asyncio.to_thread(self.init, partition=partition)
        return await drive_async(self.database.asynchronous, self._init, partition)

    async def _init(self, db: Session, partition: Kind | None) -> tuple[int, int]:
        kept = self.retention
        wanted = None if partition is None else Partitioning(partition, kept.partition, kept.ahead)
        return await tables.apply(db, self.store.dialect, self.database.schema, wanted)

    def _any_sync(self) -> Connections:
        if self.database.sync is None:
            raise ConfigurationError(
                f"{self.database.name} has async connections only: use the verb with the suffix _async."
            )
        return self.database.sync

    def asgi(
        self,
        authenticator: Authenticator | Authenticate,
        *,
        hosts: Iterable[str] = (),
        secret: str | None = None,
    ) -> Dashboard:
        """The dashboard, to be mounted in an application of your own; `txbox ui` serves it on a port of its own.

        Args:
            authenticator: who may come in, as `txbox.ui.Dashboard` takes it.
            hosts: names under which it is reached, beside those of loopback.
            secret: 24 bytes or more, the same in all processes that serve it.

        Raises:
            ConfigurationError: its libraries are not installed, or there is no authenticator.
        """
        try:
            from txbox.ui import Dashboard
        except ModuleNotFoundError as error:
            raise ConfigurationError(
                f"The dashboard needs {error.name}: run pip install 'txbox[ui]'."
            ) from error
        return Dashboard(self, authenticator, hosts=hosts, secret=secret)

    def close(self) -> None:
        """Close the connections that txbox opened itself."""
        self.database.close()

    async def close_async(self) -> None:
        """The twin of `close`."""
        await self.database.close_async()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close_async()


async def _committed(db: Session) -> None:
    try:
        await db.commit([BLOCK_ENDS])
    except StoreError as error:
        raise block_left(error) from error.__cause__
    except Raised as raised:
        # a session's own error, of its last flush
        raise raised.error from None


def _open(database: Any, django: str | None, schema: str | None) -> Database:
    if django is None:
        return open_database(database, schema=schema)
    from txbox.connections.django import open_alias

    return open_alias(django, schema=schema)
