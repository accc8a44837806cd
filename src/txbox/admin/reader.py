"""What the verbs stand on: the connections of an App or of a database alone, its messages, and the audit."""

from __future__ import annotations

import asyncio
import getpass
import json
import socket
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from contextvars import ContextVar
from copy import copy
from dataclasses import dataclass, replace
from typing import Any, ParamSpec, Protocol, Self, TypeVar, cast

from txbox.admin import tables
from txbox.admin.tables import INBOX, QUARANTINE, Filter, MessageT
from txbox.brokers.base import Source
from txbox.connections import open_database
from txbox.connections.base import Database
from txbox.errors import ConfigurationError
from txbox.events import Events, RowsChanged
from txbox.handlers import Handler, Handlers
from txbox.message import Message
from txbox.observers.logging import LoggingObserver
from txbox.outbox.routes import Routes
from txbox.outcome import Status
from txbox.policy import Lease, Limits, RelayPolicy, Retention
from txbox.processing.attempt import InboxProtocol
from txbox.session import Operation, Result, Session, Statement, drive, drive_async
from txbox.store import order
from txbox.store.codec import Columns
from txbox.store.dialect import Dialect
from txbox.store.inbox import InboxStore
from txbox.store.order import Waits

T = TypeVar("T")
P = ParamSpec("P")
Rows = Sequence[Sequence[Any]]

_SHOWN_MAX = 20


class Consumes(Protocol):
    """A source and the topics to consume from it; None for those of the handlers."""

    @property
    def source(self) -> Source: ...
    @property
    def topics(self) -> Sequence[str] | None: ...


class Application(Protocol):
    """What an operator needs of an App."""

    database: Database
    store: InboxStore
    protocol: InboxProtocol
    handlers: Handlers
    events: Events
    limits: Limits
    lease: Lease
    retention: Retention
    relaying: RelayPolicy
    routes: Routes
    notify: bool

    @property
    def consumptions(self) -> Sequence[Consumes]: ...


def _in_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


class _DatabaseOnly:
    """The defaults of an App around a database that has none."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self.handlers = Handlers()
        self.events = Events(logs=LoggingObserver())
        self.limits = Limits()
        self.lease = Lease()
        self.retention = Retention()
        self.relaying = RelayPolicy()
        self.routes = Routes(self.handlers, lambda _topic: False)
        self.notify = False
        self.consumptions: tuple[Consumes, ...] = ()
        self.store = InboxStore(database.dialect, Columns())
        self.protocol = InboxProtocol(self.store, self.events, self.limits, self.lease)


def has_app(app: Application) -> bool:
    """Whether an App has handlers, sources or routes; without any, only its database is known."""
    return bool(len(app.handlers) or app.consumptions or app.routes.all())


def routes_for(app: Application, route: str, topic: str, kind: str | None, cause: str | None) -> set[str]:  # fmt: skip
    """The routes of this App whose relay takes such outgoing messages, now or once it has adopted them."""
    names = {
        served.name
        for served in app.routes.all()
        if (served.name == route or (not route and served.names(topic)))
        and (served.destination is not None or app.handlers.matching(topic, kind))
    }
    if not names and app.routes.adopts_after(route, topic, kind, cause) is not None:
        names.add(app.routes.local)
    return names


async def waits_of(
    db: Session, dialect: Dialect, consumer: str, ids: Sequence[str], handlers: Sequence[Handler]
) -> dict[str, Waits]:
    """Read what messages of a consumer wait for, by its handlers' order; those that wait for nothing are omitted."""
    for options in (handler.options for handler in handlers if ids and handler.options.in_order):
        if options.ordered:
            return await order.waits_by_arrival(
                db, dialect, consumer, ids, dead_blocks=options.dead_blocks
            )
        return await order.waits_by_version(db, dialect, consumer, ids, first=options.gaps.first)
    return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """Who does something and why, for `txbox_audit`; by default the login name and the host."""

    actor: str
    reason: str | None = None

    @classmethod
    def of(cls, actor: str | None, reason: str | None) -> Audit:
        return cls(actor=actor or _default_actor(), reason=reason)

    def row(self, dialect: Dialect, action: str, where: Filter[Any, Any], rows: int) -> Statement:
        params = {
            "actor": self.actor, "action": action, "reason": self.reason, "affected": rows,
            "filter": json.dumps(where.criteria(), sort_keys=True),
        }  # fmt: skip
        return dialect.statement("audit", params)


def _default_actor() -> str:
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        # a container's user id may have no name
        user = "unknown"
    return f"{user}@{socket.gethostname()}"


class _Call:
    """An async twin at work: the verb runs in another thread, operations on async connections in this loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._operation: Future[Any] | None = None
        self._cancelled = False

    def check(self) -> None:
        if self._cancelled:
            raise asyncio.CancelledError

    def finish(self, operation: Coroutine[Any, Any, T]) -> T:
        self._operation = done = asyncio.run_coroutine_threadsafe(operation, self._loop)
        if self._cancelled:
            done.cancel()
        return done.result()

    def cancel(self) -> None:
        self._cancelled = True
        if self._operation is not None:
            self._operation.cancel()


_CALL: ContextVar[_Call | None] = ContextVar("txbox_admin_call", default=None)


async def run_verb(verb: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run a verb in another thread, and what it does on async connections in this event loop.

    Guarantee: when it ends, cancelled or not, the verb has ended.
    """
    call = _Call(asyncio.get_running_loop())
    token = _CALL.set(call)
    try:
        # it copies the context
        work = asyncio.create_task(asyncio.to_thread(verb, *args, **kwargs))
    finally:
        _CALL.reset(token)
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        call.cancel()
        while not work.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait([work])
        raise


class Operator:
    """Runs operations on the connections of an App or a database, and reads messages; `Admin` says how to use it."""

    def __init__(self, target: Any, *, schema: str | None = None) -> None:
        self._owned = not (hasattr(target, "protocol") and hasattr(target, "handlers"))
        if self._owned:
            target = _DatabaseOnly(open_database(target, schema=schema))
        self.app = cast("Application", target)
        self._runner: asyncio.Runner | None = None
        # threads take turns on the loop; a verb called inside it is still refused, instead of waiting for itself
        self._turn = threading.RLock()
        self._checked = False
        #: Where async connections belong to a loop that runs already: the verbs are then called from other threads.
        self.loop: asyncio.AbstractEventLoop | None = None
        self.shows_errors = True

    def without_errors(self) -> Self:
        """Return the same view for people who may not see contents: nothing it reads has an error text."""
        reader = copy(self)
        reader.shows_errors = False
        return reader

    @property
    def has_handlers(self) -> bool:
        """Whether there is an App whose handlers can be run."""
        return len(self.app.handlers) > 0

    def handler_of(self, message: Message[Any], consumer: str) -> Handler | None:
        """The handler of this consumer that takes such messages."""
        matches = self.app.handlers.matching(message.topic, message.type, consumer)
        return matches[0] if matches else None

    @property
    def store(self) -> InboxStore:
        """The tables; checked, and their schema found out, before they are first used."""
        if not self._checked:
            self.on_database(self.app.protocol.check_schema)
            self._checked = True
        return self.app.store

    @property
    def columns(self) -> Columns:
        """How rows are read for people."""
        columns = self.store.columns
        return columns if self.shows_errors else columns.without_errors()

    @property
    def dialect(self) -> Dialect:
        return self.store.dialect

    # -- how operations run -------------------------------------------------------------------

    def on_database(self, operation: Operation[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run an operation on whichever connections there are."""
        if (call := _CALL.get()) is not None:
            call.check()
        database = self.app.database
        if database.sync is not None:
            return drive(database.sync, operation, *args, **kwargs)
        assert database.asynchronous is not None
        return self._finish(drive_async(database.asynchronous, operation, *args, **kwargs))

    def on_handlers_database(
        self, handler: Handler, operation: Operation[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Run an operation that calls a handler, on the kind of connection the handler takes."""
        if not handler.is_async:
            return self.on_database(operation, *args, **kwargs)
        connections = self.app.database.asynchronous
        assert connections is not None  # the handler was registered with it
        return self._finish(drive_async(connections, operation, *args, **kwargs))

    def _finish(self, work: Coroutine[Any, Any, T]) -> T:
        if _in_loop():
            work.close()
            raise ConfigurationError(
                "This verb was called inside a running event loop: await its twin, for instance admin.status_async()."
            )
        if (call := _CALL.get()) is not None:
            return call.finish(work)
        # one loop for all verbs: an async connection belongs to the loop that opened it
        if self.loop is not None:
            return asyncio.run_coroutine_threadsafe(work, self.loop).result()
        with self._turn:
            if self._runner is None:
                self._runner = asyncio.Runner()
            return self._runner.run(work)

    def close(self) -> None:
        """Close what was opened here; an App that was passed stays open."""
        if self._owned:
            self.app.database.close()
        if self._runner is not None:
            if self._owned:
                self._runner.run(self.app.database.close_async())
            self._runner.run(self.app.database.leave_loop())
            self._runner.close()
            self._runner = None

    async def close_async(self) -> None:
        """`close` inside a running event loop."""
        if self._owned:
            await self.app.database.close_async()
        await run_verb(self.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close_async()

    # -- rows and messages --------------------------------------------------------------------

    def rows(
        self,
        name: str,
        params: Mapping[str, Any] | None = None,
        rows: Mapping[str, Sequence[Any]] | None = None,
    ) -> Rows:
        """Read the rows of a query; none where this database has no such query."""
        if not self.dialect.has(name) or (rows is not None and not next(iter(rows.values()))):
            return ()
        return self.on_database(Session.alone, self.dialect.statement(name, params, rows)).rows

    def in_transaction(self, *statements: Statement) -> list[Result]:
        """Execute these in one transaction: one snapshot, where the database gives one."""
        return self.on_database(Session.together, statements)

    def messages(self, where: Filter[Any, MessageT], *, reveal: bool = False) -> list[MessageT]:
        """Read at most 20 messages with all that is known of them, the oldest first.

        Args:
            where: the key of one message; in the quarantine all that are like it.
        """
        table, params = where.table, {**where.params(), "limit": _SHOWN_MAX}
        of_one = table is QUARANTINE and params["consumer"] is not None and where.message_id
        rows = self.rows(f"{table.name}_show{'_id' if of_one else ''}", params)
        attempts = self.rows("inbox_attempts", params) if rows and table is INBOX else ()
        columns = self.columns
        return [tables.message_of(columns, table, row, attempts, reveal=reveal) for row in rows]

    def with_waits(self, messages: Sequence[Any]) -> list[Any]:
        """Add to messages of the inbox what they wait for, where a handler has an order."""
        waiting: dict[tuple[str, str], Waits] = {}
        for consumer, handlers in self.app.handlers.consumers().items():
            ids = [
                row.message_id
                for row in messages
                if row.consumer == consumer
                and row.status in (Status.PENDING, Status.FAILED)
                and row.key is not None
            ]
            waits = self.on_database(waits_of, self.dialect, consumer, ids, handlers)
            waiting |= {(consumer, message_id): what for message_id, what in waits.items()}
        return [
            replace(row, waits_for=waiting.get((row.consumer, row.message_id))) for row in messages
        ]

    # -- the audit ----------------------------------------------------------------------------

    def announce(self, audit: Audit, action: str, where: Filter[Any, Any], rows: int) -> None:
        """Commit the audit row before what follows: revealing hidden data, or work in separate transactions."""
        self.in_transaction(audit.row(self.dialect, action, where, rows))

    def emit(self, action: str, rows: int, audit: Audit | None) -> None:
        """Raise the event of a change; none in a dry run."""
        if audit is not None and rows:
            self.app.events.emit(RowsChanged(action=action, rows=rows, actor=audit.actor))
