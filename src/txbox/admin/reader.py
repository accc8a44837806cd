"""What the operator's verbs stand on: an App, or a database alone, whose tables are read by named queries."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import Any, Generic, NamedTuple, ParamSpec, Protocol, Self, TypeVar, cast

from txbox.admin import tables
from txbox.admin.tables import INBOX, Filter, InboxFilter, MessageT, RowT, Table
from txbox.brokers.base import Source
from txbox.connections import open_database
from txbox.connections.base import Database
from txbox.events import Events
from txbox.handlers import Handler, Handlers
from txbox.observers.logging import LoggingObserver
from txbox.outbox import Routes
from txbox.outcome import Status
from txbox.policy import Lease, Limits, RelayPolicy, Retention
from txbox.processing.attempt import InboxProtocol
from txbox.session import Operation, Result, Session, Statement, drive, drive_async
from txbox.store import order, schema
from txbox.store.codec import Columns, Leased
from txbox.store.dialect import Dialect, dialect
from txbox.store.inbox import InboxStore
from txbox.store.order import Waits

T = TypeVar("T")
P = ParamSpec("P")
Rows = Sequence[Sequence[Any]]

_SHOWN_MAX = 20
# of one statement of a page
_PAGE_MS = "5000"
# greater than every place in a table
_LAST = 2**63 - 1
# rows that a page looks through at first, and how many times as many it takes next
_STRETCH, _LONGER = 1_000, 8
#: The statuses that an index knows, and the query that reads by it.
_OPEN = {
    "inbox": ("pending", "processing", "failed", "dead", "discarded"),
    "outbox": ("dead", "sent", "discarded"),
}
_INDEXED = {"inbox": "inbox_list_open", "outbox": "outbox_list_ended"}


class Consumes(Protocol):
    """A source and the topics it is asked for; None for those of the handlers."""

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

    async def check_schema(self, db: Session) -> None: ...


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

    async def check_schema(self, db: Session) -> None:
        state = await schema.check(db, self.store.dialect)
        if state.schema is not None:
            self.store.dialect = dialect(self.store.dialect.name, state.schema)


def says_anything(app: Application) -> bool:
    """Whether an App has handlers, sources or routes; without any, only its database is known."""
    return bool(len(app.handlers) or app.consumptions or app.routes.all())


class Page(NamedTuple, Generic[RowT]):
    """Rows, the newest first, and the place to continue from; None at the end."""

    rows: list[RowT]
    behind: int | str | None


class Reader:
    """Runs operations on the connections of an App or a database, and reads rows and messages.

    A method may be called from any thread, but not inside a running event loop.
    """

    def __init__(self, target: Any, *, schema: str | None = None) -> None:
        self._owned = not (hasattr(target, "protocol") and hasattr(target, "handlers"))
        if self._owned:
            target = _DatabaseOnly(open_database(target, schema=schema))
        self.app = cast("Application", target)
        self._runner: asyncio.Runner | None = None
        self._checked = False
        #: Where async connections belong to a loop that runs already: the verbs are then called from other threads.
        self.loop: asyncio.AbstractEventLoop | None = None

    @property
    def has_handlers(self) -> bool:
        """Whether there is an App whose handlers can be run."""
        return len(self.app.handlers) > 0

    @property
    def store(self) -> InboxStore:
        """The tables; checked, and their schema found out, before they are first used."""
        if not self._checked:
            self.on_database(self.app.check_schema)
            self._checked = True
        return self.app.store

    @property
    def dialect(self) -> Dialect:
        return self.store.dialect

    # -- how operations run -------------------------------------------------------------------

    def on_database(self, operation: Operation[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run an operation on whichever connections there are."""
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
        # one loop for all verbs: an async connection belongs to the loop that opened it
        if self.loop is not None:
            return asyncio.run_coroutine_threadsafe(work, self.loop).result()
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
            self._runner.close()
            self._runner = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- rows ---------------------------------------------------------------------------------

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

    def page_rows(self, name: str, params: Mapping[str, Any] | None = None) -> Rows:
        """As `rows`, for a page: no statement of it may take long, where the database can say so."""
        if not self.dialect.has("bound_look"):
            return self.rows(name, params)
        bound = self.dialect.statement("bound_look", {"statement_ms": _PAGE_MS})
        return self.snapshot_of(bound, self.dialect.statement(name, params))[-1].rows

    def snapshot_of(self, *statements: Statement) -> list[Result]:
        """Read in one transaction: one snapshot, where the database gives one."""
        return self.on_database(_in_transaction, statements)

    def consumers(self) -> Sequence[str]:
        """Name the consumers that have rows in inbox or quarantine, "" among them; costs one index probe each."""
        return [str(name) for (name,) in self.page_rows("consumers")]

    # -- messages -----------------------------------------------------------------------------

    def messages(self, where: Filter[Any, MessageT], *, reveal: bool = False) -> list[MessageT]:
        """Read at most 20 messages with all that is known of them, the oldest first.

        Args:
            where: the key of one message; in the quarantine all that are like it.

        Raises:
            ConfigurationError: revealed, and written through a codec that this app does not have.
        """
        table, params = where.table, {**where.params(), "limit": _SHOWN_MAX}
        found = self.rows(f"{table.name}_show", params)
        attempts = self.rows("inbox_attempts", params) if found and table is INBOX else ()
        columns = self.store.columns
        return [tables.message_of(columns, table, row, attempts, reveal=reveal) for row in found]

    def kept(self, where: InboxFilter, *, after: int, limit: int) -> list[Leased]:
        """Read messages of one consumer whose payload was kept, in arrival order, without locking them.

        Args:
            where: error type, fingerprint and age are ignored.
            after: the arrival to continue behind; -1 for the first.

        Raises:
            ConfigurationError: a payload was written through a codec that this app does not have.
        """
        found = self.rows("replay_read", {**where.params(), "after": after, "limit": limit})
        return [self.store.columns.arrival(str(where.consumer), row) for row in found]

    def with_waits(self, messages: Sequence[Any]) -> list[Any]:
        """Add to messages of the inbox what they wait for, where a handler has an order."""
        waiting: dict[tuple[str, str], Waits] = {}
        for consumer, handlers in self.app.handlers.consumers().items():
            in_order = [handler.options for handler in handlers if handler.options.in_order]
            ids = [
                row.message_id
                for row in messages
                if row.consumer == consumer
                and row.status in (Status.PENDING, Status.FAILED)
                and row.key is not None
            ]
            if not in_order or not ids:
                continue
            options, args = in_order[0], (self.dialect, consumer, ids)
            found = (
                self.on_database(order.waits_by_arrival, *args, dead_blocks=options.dead_blocks)
                if options.ordered
                else self.on_database(order.waits_by_version, *args, first=options.gaps.first)
            )
            waiting |= {(consumer, message_id): what for message_id, what in found.items()}
        return [
            replace(row, waits_for=waiting.get((row.consumer, row.message_id))) for row in messages
        ]

    # -- pages --------------------------------------------------------------------------------

    def page(
        self,
        where: Filter[RowT, Any],
        *,
        limit: int = 50,
        before: int | str | None = None,
        within_s: float | None = None,
    ) -> Page[RowT]:
        """Read a page of rows, the newest first, and the place to continue from.

        Args:
            before: the place that the page before ended with; None for the first page.
            within_s: stop after about so long: where no index helps, a page may then have fewer rows than
                `limit`, or none, and more behind it. None looks through the whole table.

        Raises:
            ConfigurationError: `before` is no place in this table.
        """
        table, reached = where.table, None
        params = {**where.params(), "limit": limit}
        if table.place is None:
            mark = None if before is None else tables.mark_of(str(before))
            found = self.page_rows(f"{table.name}_list", {**params, **tables.mark_params(mark)})
        else:
            params["before"] = _LAST if before is None else before
            if where.message_id is not None:
                found = self._of_each(f"{table.name}_list_id", params, table)
            elif where.status in _OPEN[table.name]:
                found = self._of_each(_INDEXED[table.name], params, table)
            else:
                found, reached = self._through(table, params, within_s)
        columns = self.store.columns
        rows = [tables.row_of(columns, table, row) for row in found[:limit]]
        if table is INBOX:
            rows = self.with_waits(rows)
        return Page(rows, tables.place_of(rows[-1]) if len(rows) == limit else reached)

    def _of_each(self, name: str, params: dict[str, Any], table: Table) -> Rows:
        """Read a page of rows that an index has in their order, consumer by consumer."""
        if "consumer" not in table.key or params["consumer"] is not None:
            return self.page_rows(name, params)
        found = [
            row
            for consumer in self.consumers()
            for row in self.page_rows(name, {**params, "consumer": consumer})
        ]
        # behind the place stands only the key of the codec
        return sorted(found, key=lambda row: int(row[-2]), reverse=True)

    def _through(
        self, table: Table, params: dict[str, Any], within_s: float | None
    ) -> tuple[Rows, int | None]:
        """Read a page stretch by stretch, each longer than the one before; and say where it stopped, if early."""
        ((newest,),) = self.page_rows(f"{table.name}_newest")
        upper, stretch = min(int(params["before"]), int(newest) + 1), _STRETCH
        found: list[Sequence[Any]] = []
        began = time.monotonic()
        while upper > 1:
            floor, looked = max(0, upper - 1 - stretch), time.monotonic()
            bounds = {"before": upper, "floor": floor, "limit": params["limit"] - len(found)}
            found += self.page_rows(f"{table.name}_list", {**params, **bounds})
            if len(found) >= params["limit"]:
                return found, None
            upper, stretch = floor + 1, stretch * _LONGER
            now = time.monotonic()
            # the next one takes that many times as long
            if within_s is not None and now - began + (now - looked) * _LONGER > within_s:
                return found, upper if upper > 1 else None
        return found, None


async def _in_transaction(db: Session, statements: tuple[Statement, ...]) -> list[Result]:
    results = await db.begin(statements)
    await db.commit()
    return results
