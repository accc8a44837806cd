"""The composition root: a database, handlers, sources, policies."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Sequence
from contextlib import asynccontextmanager, contextmanager
from datetime import timedelta
from typing import (
    TYPE_CHECKING,
    Any,
    Concatenate,
    Literal,
    Protocol,
    Self,
    TypeVar,
    Unpack,
    overload,
)

from txbox.alerts import Alerting, Alerts, Channel, paused
from txbox.boundaries import log as _log
from txbox.brokers.base import Destination, Source
from txbox.brokers.local import Local
from txbox.brokers.webhook import Webhook
from txbox.connections import open_database
from txbox.connections.base import BLOCK, BLOCK_ENDS, Database, block_left
from txbox.errors import ConfigurationError, StoreError, installed
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
    listed,
    resolved,
    types_of,
)
from txbox.handlers.body import Decoder
from txbox.identity import EFFECT_PREFIX, PayloadHash
from txbox.message import Message
from txbox.observers.activity import Activity, Moment
from txbox.observers.logging import LoggingObserver
from txbox.observers.pauses import Pauses
from txbox.outbox import Outbox
from txbox.outbox.dead_letters import DeadLetters
from txbox.outbox.effects import Effects
from txbox.outbox.replies import replying
from txbox.outbox.routes import CloudEvents, Routes
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
from txbox.processing.intake import Intake, Mode, shown_id
from txbox.session import Connections, Raised, Session, blocking, drive, drive_async
from txbox.store import schema as tables
from txbox.store.codec import Codec, Columns
from txbox.store.inbox import InboxStore
from txbox.store.partitions import Kind, Partitioning

if TYPE_CHECKING:
    from txbox.observers.tracing import Tracing
    from txbox.ui import Authenticate, Dashboard, Token, Tokens

#: What an agenda calls the outbox; no consumer has this name.
OUTBOX = ""
# the transaction that stages something commits a moment later, and rows seldom come alone
_COMMIT_S = 0.005

F = TypeVar("F", bound=Callable[..., Any])
# a resolver may pass more
OfMessage = TypeVar("OfMessage", bound=Callable[Concatenate[Message[Any], Any, ...], object])
OfMessages = TypeVar(
    "OfMessages", bound=Callable[Concatenate[list[Message[Any]], Any, ...], object]
)
Outside = TypeVar("Outside", bound=Callable[[Message[Any]], object])


class Agenda(Protocol):
    """When the worker of this process looks for rows; see `txbox.worker.agenda`."""

    def look(self, name: str, in_s: float = 0.0) -> None: ...
    def poll_soon(self) -> None: ...


@dataclasses.dataclass(frozen=True)
class Consumption:
    """A source and its topics."""

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
        observers: called with every event. Events are also logged to `txbox`, unless one of
            the observers is a `LoggingObserver`.
        codec: encrypts or compresses payloads and error texts at rest.
        plain: with a codec: "accept" reads rows that are not encoded, as those from before there was a codec;
            otherwise such a row is as unreadable as an altered one.
        tracing: OpenTelemetry spans for staging, sending and processing; see `txbox.observers.tracing`.
        redact: what to hide from operators, logs and stored error texts; see Redaction.
        limits: how large a message may be, and how long a claim waits. By default a claim gives up
            before a short `lease` expires.
        lease: how long a worker holds rows of the table; see Lease.
        retention: when old rows are deleted; see Retention.
        batching: how much one transaction may take; see Batching.
        relaying: how staged messages are sent; see RelayPolicy.
        notify: on PostgreSQL, wake relays in other processes with NOTIFY when a staging transaction commits,
            instead of at their next poll. The price: notifying transactions commit one at a time across all
            databases of the server, so they cannot share a flush. Relays listen on an extra connection if
            `database` is a URL for psycopg; all others just poll.
        unmatched: what to do with a message that no handler consumes: acknowledge and count it, or
            keep it in the quarantine.
        resolver: supplies further parameters of handlers and effects, by annotation; see
            `txbox.handlers.Resolver`.
        alerts: where to tell of dead and quarantined messages, paused consumers and lasting trouble: a destination,
            which gets JSON, a channel such as `slack(…)`, or `Alerts(…)` with several; see `txbox.alerts`.

    Raises:
        ConfigurationError: not exactly one database, an unknown one, or its driver is not installed.

    Constructing an App does no I/O. It survives a fork: the child opens connections of its own and has nothing in
    flight. With SQLite, fork before the first message, because a child must not use a database its parent has open.
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
        plain: Literal["accept", "refuse"] = "refuse",
        redact: Redaction | None = None,
        limits: Limits | None = None,
        lease: Lease | None = None,
        retention: Retention | None = None,
        batching: Batching | None = None,
        relaying: RelayPolicy | None = None,
        notify: bool = False,
        unmatched: Literal["acknowledge", "quarantine"] = "acknowledge",
        resolver: Resolver | None = None,
        alerts: Alerts | Channel | Destination | None = None,
    ) -> None:
        if (database is None) == (django is None):
            raise ConfigurationError(
                "App() takes either a database or django='alias': give exactly one of them."
            )
        if unmatched not in ("acknowledge", "quarantine"):
            raise ConfigurationError(
                f"unmatched is {unmatched!r}: use 'acknowledge' or 'quarantine'."
            )
        if plain not in ("accept", "refuse"):
            raise ConfigurationError(f"plain is {plain!r}: use 'accept' or 'refuse'.")
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
        #: The paused consumers, and the counts of this process, which a worker or relay writes every few seconds.
        self.pauses = Pauses(self._pause_after, self._emit)
        self.activity = Activity(self.pauses.went_well)
        self.events = Events(
            observers,
            None if has_log else LoggingObserver(),
            # without rules of its own it hides only headers, which events do not have
            None if redact is None or not redact.errors else redact.error,
            None if tracing is None else tracing.around,
            counters=(self.activity, self.pauses),
        )
        self.lease = lease or Lease()
        self.limits = limits or Limits.within(self.lease)
        self.retention = retention or Retention()
        self.batching = batching or Batching()
        self.relaying = relaying or RelayPolicy()
        self.unmatched = unmatched
        self.resolver = resolver
        self.store = InboxStore(self.database.dialect, Columns(codec, redact, plain))
        #: Stages external calls in a handler's transaction: `app.effects.stage(tx, name, body)`.
        self.effects = Effects(
            self.handlers, self.limits, schema=schema, columns=self.store.columns
        )
        self.dead_letters = DeadLetters(self.handlers, self.outbox)
        wanted = Alerts.of(alerts)
        #: Stages alerts in the transactions that they are about.
        self.alerting = None if wanted is None else Alerting(wanted, self.outbox, self.routes)
        if self.alerting is not None:
            self.pauses.pausing = self._alert_of_pause
        self.protocol = InboxProtocol(
            self.store,
            self.events,
            self.limits,
            self.lease,
            batching=self.batching,
            letters=self.dead_letters,
            alerting=self.alerting,
            settings=lambda: self.database.handler_settings,
        )
        self.intake = Intake(self.protocol)
        #: Of the worker of this process, while one runs: what is staged here, or parked by `process`, need not wait
        #: until the database is asked for it.
        self.agenda: Agenda | None = None
        self.outbox.staged = self._look_for_outgoing
        self.effects.staged = self._look_for_effect

    def __repr__(self) -> str:
        count = len(self.handlers)
        return f"<App {self.database.name}: {count} {'handler' if count == 1 else 'handlers'}>"

    # -- registration -------------------------------------------------------------------------

    # two options decide what a handler takes, so that a type checker finds a missing or swapped argument
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
        shares: bool = False,
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
        """Register a handler for a topic; the function itself is returned unchanged.

        Args:
            topic: "*" for every topic that sources, `process`, `send` and routes to `Local` bring, except effects.
            consumer: part of the key of its inbox rows: keep it stable.
            type: the message type it takes; without it and `types`, all.
            types: the message types it takes, if several.
            retry: when failures are tried again; see RetryPolicy.
            reject_on: exceptions that make the message dead at once.
            timeout: the longest a run may take before it is rolled back.
            pause_after: after this many failures in a row a worker pauses the consumer until somebody resumes it.
                Messages are then taken one by one.
            concurrency: lanes of one worker, 1 or more.
            batch: the function takes a list of messages and one transaction.
            pipeline: the function reads no results, so with psycopg its statements are sent along with COMMIT.
            shares: what a message sets (SET LOCAL and the like) may reach the others of its batch. Without it, a
                handler that sets something runs one message per transaction.
            transactional: False for work outside a transaction: `(message)`, leased, at least once;
                a worker stores its messages first and keeps the lease while it runs.
            ordered: process messages of one key in arrival order; a failed message blocks its key until it is
                processed or dead.
            dead_blocks: with `ordered`, a dead message also blocks its key, until somebody acts.
            dead_letter_topic: where to send a copy of each dead message, through the outbox.
            sequence: the version of the message's key, as a callable or a path; versions are
                processed in order, waiting for missing ones.
            gaps: with `sequence`, what to do about a missing version; see GapPolicy.
            lock_key: what the function locks, as a callable or a path. Messages with the same lock key
                share a lane, and batches are sorted by it.
            message_id: a callable or a path like "body.order_id".
            weak_ids: fall back to transport coordinates as the id of a message that has none.
            id_scope: "topic" if ids are unique only within a topic.
            decode: a callable from Message to body, instead of the annotation; may be called for duplicates, too.
            payload_hash: "raw", "json" or a callable; how copies are compared.
            keep_payload: "unfinished", "always", or how long processed rows keep their payload.
            keep_result: keep what the function returns, as JSON, and return it to duplicates; see `answer`.
            reply_to: stage what the function returns to this topic, in its transaction; True uses the
                message's `reply-to` header. Returning None sends no reply. A replay that returns something
                else replies under another id; with `keep_result`, it sends the kept result again.
            mode: "stored" acknowledges once the payload is stored, and processes from the table.

        Raises:
            ConfigurationError: wrong signature, overlap, invalid option, or no sync or async connections for it.
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
            shares=shares,
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
            if transactional:
                self.check_connections(added)
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
        """Register a function `(message)` that makes an external call after commit.

        Its consumer is `effect:<name>`; what it returns is kept as the result.

        Args:
            retry: when failures are tried again; see RetryPolicy.
            reject_on: exceptions that make the message dead at once.
            timeout: the longest a run may take.
            pause_after: after this many failures in a row a worker pauses the effect.
            concurrency: lanes of one worker, 1 or more.

        Guarantee: runs at least once for each `app.effects.stage(tx, name, …)` that commits.
        Pass `message.idempotency_key` along, so that a repeated call has no further effect.
        """
        return self.handler(
            EFFECT_PREFIX + name,
            consumer=EFFECT_PREFIX + name,
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

        Raises:
            ConfigurationError: the topics are none.
        """
        if isinstance(source, Webhook):
            if topics is not None:
                raise ConfigurationError("A Webhook has one topic: name it there, as topic=.")
            if source.topic.startswith(EFFECT_PREFIX):
                raise ConfigurationError(
                    f"The webhook {source.path} brings topic {source.topic!r}, but topics that begin with "
                    f"{EFFECT_PREFIX!r} are those of effects: name another topic=."
                )
            source.bind(self._by_every_consumer)
            self.webhooks.append(source)
            return
        named = None if topics is None else listed("app.consume", topics)
        self.consumptions.append(Consumption(source, named))

    def publish(
        self,
        destination: Destination | Local,
        topics: Iterable[str] | None = None,
        *,
        cloudevents: CloudEvents | None = None,
        source: str | None = None,
        name: str | None = None,
    ) -> None:
        """Send staged messages of these topics to a broker; without topics, all that no other destination takes.

        A topic that nobody publishes but a handler names goes to the handlers of this app (`Local`).

        Args:
            name: of the route. Staged rows keep it, and only relays with this route take them. Defaults to the
                broker's address. Set it if two Apps on one database publish the same topic to one broker but
                must not relay for each other, or if the address may change.
            cloudevents: send "binary" or "structured" CloudEvents, from the service named by `source`.

        Raises:
            ConfigurationError: a topic has a destination already.
        """
        self.routes.add(destination, topics, cloudevents, source, name)

    def _arrives(self, topic: str) -> bool:
        """Whether a source brings this topic."""
        for consumption in self.consumptions:
            asked = consumption.source.topics if consumption.topics is None else consumption.topics
            if not isinstance(consumption.source, Local) and not {topic, "*"}.isdisjoint(
                self.handlers.topics() if asked is None else asked
            ):
                return True
        return False

    def _emit(self, event: Event) -> None:
        self.events.emit(event)

    async def _alert_of_pause(self, db: Session, *, consumer: str, reason: str) -> None:
        assert self.alerting is not None
        await self.alerting.opened(db, self.store.dialect, [paused(consumer, reason)])

    def _pause_after(self, consumer: str) -> int | None:
        found = self.handlers.consumers().get(consumer, ())
        limits = [handler.options.pause_after for handler in found]
        return min((limit for limit in limits if limit is not None), default=None)

    def check_connections(self, handler: Handler) -> None:
        """Check that the database has the kind of connections a handler runs on.

        Raises:
            ConfigurationError: it has only the other kind.
        """
        connections = self.database.asynchronous if handler.is_async else self.database.sync
        if connections is None:
            kind, other = ("async", "def") if handler.is_async else ("sync", "async def")
            raise ConfigurationError(
                f"{handler.name} is {kind}, but {self.database.name} has no {kind} connections: "
                f"make it a `{other}` function, or give App() a pool or engine that is {kind}."
            )

    # -- one message --------------------------------------------------------------------------

    def process(self, message: Message[Any], *, consumer: str | None = None) -> Outcome:
        """Run the handler of one message safely; acknowledge unless the outcome is IN_PROGRESS.

        Returns: UNMATCHED if no handler consumes its topic and type (QUARANTINED with
        `unmatched="quarantine"`); DEFERRED, stored in the table, while its consumer is paused; otherwise see Outcome.

        Raises:
            ConfigurationError: several consumers without `consumer=`, an unknown consumer or one that does not take
                the topic, an async handler, or a database with async connections only.
            SchemaError: the tables are missing or do not fit; the message has the command to run.
            StoreUnavailable: the database was away for Limits.unavailable_for: do not acknowledge.

        Guarantee: PROCESSED means that the inbox row and the handler's writes were one commit. A handler with
        `transactional=False` is leased for `Lease.duration` plus its `timeout=`, without heartbeats: a run that
        takes longer may be started again in parallel.
        """
        return self.answer(message, consumer=consumer).outcome

    async def process_async(self, message: Message[Any], *, consumer: str | None = None) -> Outcome:
        """The twin of `process`; a sync handler runs in a thread."""
        return (await self.answer_async(message, consumer=consumer)).outcome

    def answer(self, message: Message[Any], *, consumer: str | None = None) -> Answer:
        """`process` that also returns the result of a handler with `keep_result=True`.

        A duplicate gets the result of the first delivery.
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
        """Return each consumer's answer to a message; under "" if no consumer takes it."""
        found = self.handlers.matching(message.topic, message.type)
        if not found:
            return {"": await self.answer_async(message)}
        return {
            handler.consumer: await self.answer_async(message, consumer=handler.consumer)
            for handler in found
        }

    # -- to this app's consumers ---------------------------------------------------------------

    def send(self, message: Message[Any]) -> dict[str, Outcome]:
        """Store a message for every consumer of its topic, to be processed from the table.

        Returns: consumer → DEFERRED if it is stored, now or earlier; DUPLICATE if it is already finished;
        QUARANTINED; IN_PROGRESS if another transaction holds this id: send it again.

        Raises:
            ConfigurationError: no handler consumes its topic and type.
        """
        return drive(self._any_sync(), self._sent, [message])[0]

    async def send_async(self, message: Message[Any]) -> dict[str, Outcome]:
        """The twin of `send`."""
        return (await self.send_many_async([message]))[0]

    def send_many(self, messages: Sequence[Message[Any]]) -> list[dict[str, Outcome]]:
        """`send` many messages, in one statement per consumer; the answers are in the same order."""
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

        Yields what handlers get: a connection or session of your own kind. Never commit or roll back on it.
        An exception that leaves the block rolls it back and is raised again.

        Raises:
            StoreError: COMMIT was refused (`definite`: nothing was kept) or was not answered, or the block ended
                the transaction itself (fault GUARD).
            StoreUnavailable: the database cannot be reached.

        Guarantee: if the block ends without an exception, everything is committed; otherwise nothing is and no
        staged message is sent, unless COMMIT itself was not answered.
        """
        db = Session(self._any_sync())
        try:
            blocking(db.begin([BLOCK], user_code=True))
            assert db.connection is not None
            yield db.connection.native
            blocking(_committed(db))
        except BaseException as error:
            db.failed(error)
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
            await db.begin([BLOCK], user_code=True)
            assert db.connection is not None
            yield db.connection.native
            await _committed(db)
        except BaseException as error:
            db.failed(error)
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
            await self.look_for_pauses(db)
        settled = await self.intake.take_with_retries(
            db,
            handler,
            [message],
            # messages of a paused consumer are stored for later
            Mode.STORED if handler.consumer in self.pauses.paused else None,
            for_s=self.limits.unavailable_for.total_seconds(),
        )
        if counts:
            self.activity.settled(handler.consumer, settled, [Moment(began)], began)
        self._look_for(handler, settled)
        return settled[0]

    async def look_for_pauses(self, db: Session) -> None:
        """Read who is paused, and check the schema first. A message that `process` gets does so now and then."""
        try:
            if not self.protocol.checked:
                # first, because a pool may change a connection's search_path once it has been used
                await self.protocol.check_schema(db)
            await self.pauses.look_now_and_then(db, self.store.dialect)
        except StoreError as error:
            # keep to what is known; if the database is away, what follows reports it
            db.discard()
            if not error.transient and not self.pauses.unreadable:
                self.pauses.unreadable = True
                _log.warning(
                    "Who is paused cannot be read (%s): no consumer counts as paused here. "
                    "`txbox schema print --grants` prints the rights that are needed.",
                    error,
                )

    def _look_for(self, handler: Handler, settled: Sequence[Answer]) -> None:
        """Have the worker of this process look for what `process`, `answer` or `send` has stored."""
        agenda = self.agenda
        if agenda is None:
            return
        outcomes = {answer.outcome for answer in settled}
        if Outcome.DEFERRED in outcomes:
            agenda.look(handler.consumer)
        ordered = handler.options.sequence is not None
        if Outcome.FAILED in outcomes or (ordered and Outcome.PROCESSED in outcomes):
            # a retry, or the version behind this one
            agenda.poll_soon()

    def _look_for_outgoing(self) -> None:
        agenda = self.agenda
        if agenda is not None:
            agenda.look(OUTBOX)

    def _look_for_effect(self, consumer: str, delay_s: float) -> None:
        agenda = self.agenda
        if agenda is not None:
            agenda.look(consumer, delay_s + _COMMIT_S)

    async def unmatched_message(
        self, db: Session, message: Message[Any], source: str | None = None
    ) -> None:
        """Count a message that no handler consumes, and quarantine it if `unmatched` says so.

        Args:
            source: that has delivered it without being asked for its topic.
        """
        self.events.emit(
            MessageUnmatched(
                message_id=shown_id(message), topic=message.topic, type=message.type, source=source
            )
        )
        if self.unmatched == "quarantine":
            await self.intake.unmatched(
                db,
                message,
                f"No handler consumes topic {message.topic!r} with type {message.type!r}."
                if source is None
                else f"{source} delivered topic {message.topic!r}, for which it was not asked.",
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
            await self.protocol.check_schema(db)
        for handler, indexes in work.items():
            began = time.monotonic()
            self.activity.received(handler.consumer, len(indexes))
            settled = await self.intake.take(
                db, handler, [messages[index] for index in indexes], Mode.STORED
            )
            for index, answer in zip(indexes, settled, strict=True):
                answers[index][handler.consumer] = answer.outcome
            self.activity.settled(handler.consumer, settled, [Moment(began)] * len(settled), began)
            self._look_for(handler, settled)
        return answers

    # -- life ---------------------------------------------------------------------------------

    def init(self, *, partition: Kind | None = None) -> tuple[int, int]:
        """Apply the schema (as `txbox init` does); returns the versions before and after.

        Args:
            partition: on PostgreSQL, for new tables: partition the inbox by the time in its ids ("uuid7",
                "ulid"), so that retention drops whole partitions, or by "hash".
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
        authenticator: Token | Tokens | Authenticate,
        *,
        hosts: Iterable[str] = (),
        proxies: Iterable[str] = (),
        secret: str | None = None,
        login: str | None = None,
    ) -> Dashboard:
        """Return the dashboard as an ASGI app to mount in your own; `txbox ui` serves it by itself.

        Args:
            authenticator: decides who may sign in; see `txbox.ui.Dashboard`.
            hosts: host names it is served under, besides loopback.
            proxies: addresses or networks of proxies whose `X-Forwarded-For` and `X-Forwarded-Proto` are believed.
            secret: at least 24 bytes, the same in all processes that serve it.
            login: where your application logs people in, such as "/login?next={next}".

        Raises:
            ConfigurationError: its libraries are not installed, or there is no authenticator.
        """
        with installed("ui", "The dashboard"):
            from txbox.ui import Dashboard
        return Dashboard(
            self, authenticator, hosts=hosts, proxies=proxies, secret=secret, login=login
        )

    def close(self) -> None:
        """Close the connections that txbox opened itself."""
        self.database.close()

    async def close_async(self) -> None:
        """The twin of `close`."""
        await self.database.close_async()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self.close_async()


async def _committed(db: Session) -> None:
    try:
        await db.commit([BLOCK_ENDS])
    except StoreError as error:
        raise block_left(error) from error.__cause__
    except Raised as raised:
        # the session's own error, from its last flush
        raise raised.error from None


def _open(database: Any, django: str | None, schema: str | None) -> Database:
    if django is None:
        return open_database(database, schema=schema)
    from txbox.connections.django import open_alias

    return open_alias(django, schema=schema)
