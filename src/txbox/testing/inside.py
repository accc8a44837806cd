"""txbox inside a test's transaction: where it would commit or roll back, it releases or rolls back a savepoint."""

from __future__ import annotations

import copy
import dataclasses
import itertools
from typing import Any

from txbox.app import App
from txbox.connections import borrow, open_database
from txbox.connections.base import (
    ConnectionSource,
    Database,
    Executor,
    closes,
    dbapi_error,
    handler_left,
)
from txbox.errors import ConfigurationError, Fault, StoreError
from txbox.processing.attempt import InboxProtocol
from txbox.processing.intake import Intake
from txbox.session import Connection, Raised, Result, Statement, Statements, blocking
from txbox.store.inbox import InboxStore

_DRIVERS = frozenset({"psycopg", "asyncpg", "sqlite3", "aiosqlite", "pymysql", "asyncmy"})

# sent after a handler raised, to a savepoint outside the session's own; on MySQL, close goes to one
_BEHIND_A_FAILURE = frozenset({"close", "rollback_to_claim"})

_numbers = itertools.count(1)


def inside(app: App, tx: Any) -> App:
    """Return a copy of an app that works in savepoints of the transaction `tx` is in.

    Handlers get `tx` itself. Where txbox would COMMIT, it releases a savepoint; where it would roll back,
    it rolls back to one. Failures are recorded in that transaction too, so a test can read every row, and
    the fixture's rollback removes everything.

    Args:
        tx: any kind of connection or session that `Inbox.accept` takes, with its transaction open.
            Bind an SQLAlchemy Session to the fixture's connection with
            join_transaction_mode="create_savepoint". Inside Django's TestCase no copy is needed:
            App(django=…) nests by itself.

    It cannot show a COMMIT that the database refuses (the guard fires in COMMIT, and the outermost one
    never comes), waiting for another connection, or durability. A handler that commits or rolls back
    `tx` ends the fixture's transaction as well.

    Raises:
        ConfigurationError: `tx` is not in a transaction, or on another kind of database.
    """
    if hasattr(tx, "in_atomic_block"):
        # Django nests by itself, and keeps track of failed blocks
        return _with(app, open_database(tx, schema=app.database.schema))
    return _with(app, _Inside(tx, app.database.schema))


def another_process(app: App) -> App:
    """Return a copy of an app that does not know which ids the first one is working on."""
    return _with(app, app.database)


def _with(app: App, database: Database) -> App:
    dialect = app.store.dialect
    if dialect.name != database.dialect.name:
        raise ConfigurationError(
            f"The app is on {dialect.name}, but the test's transaction is on {database.dialect.name}: use one database."
        )
    if isinstance(database, _Inside):
        # the guard fires in a COMMIT that never comes, so there is nothing to check
        dialect = dataclasses.replace(dialect, queries={**dialect.queries, "guard_check": ""})
    copied = copy.copy(app)
    copied.database = database
    copied.store = InboxStore(dialect, app.store.columns)
    copied.protocol = InboxProtocol(
        copied.store,
        app.events,
        app.limits,
        app.lease,
        batching=app.batching,
        letters=app.dead_letters,
    )
    copied.protocol.checked = app.protocol.checked
    copied.intake = Intake(copied.protocol)
    return copied


class _Inside(Database):
    """A database whose only connection is the test's."""

    def __init__(self, tx: Any, schema: str | None) -> None:
        # a sqlite3 connection would commit with the outermost RELEASE
        if getattr(tx, "in_transaction", None) is False:
            raise ConfigurationError(
                f"This {type(tx).__qualname__} is not in a transaction: begin one, so that the test can roll back."
            )
        lent = borrow(tx, is_async=_is_async(tx), schema=schema)
        connections = Savepoints(tx, lent)
        super().__init__("the test's transaction", schema, lent.dialect)
        # it would read the catalogue in the test's transaction
        self.handler_settings = None
        self.sync = None if lent.is_async else connections
        self.asynchronous = connections if lent.is_async else None


def _is_async(tx: Any) -> bool:
    return hasattr(tx, "__aenter__") or type(tx).__module__.startswith("asyncpg")


class Savepoints(ConnectionSource):
    """Lends its only connection."""

    def __init__(self, tx: Any, lent: Executor) -> None:
        # how long it may be idle is the test's own business
        super().__init__(is_async=lent.is_async)
        self._tx = tx
        self._lent = lent
        self._last: _Savepoint | None = None

    async def acquire(self) -> Connection:
        await self.settle()
        self._last = _Savepoint(self._tx, self._lent)
        return self._last

    async def release(self, connection: Any) -> None:
        """Keep the connection: it belongs to the test."""

    async def settle(self) -> None:
        """Undo what was discarded, because discarding itself cannot await."""
        last, self._last = self._last, None
        if last is not None and last.discarded:
            await last.undo()


class _Savepoint(Connection):
    nests = False

    def __init__(self, tx: Any, lent: Executor) -> None:
        self.native = tx
        self.is_async = lent.is_async
        #: `undo` must still be called.
        self.discarded = False
        self._lent = lent
        self._name: str | None = None
        # SQLAlchemy tracks savepoints itself: a session's objects expire with them
        self._accounts = hasattr(tx, "begin_nested")
        self._is_session = hasattr(tx, "flush")
        self._nested: Any = None
        # a failed flush ends the innermost savepoint, which must not be the one the claim is in
        self._inner: Any = None
        self._claims = self._lost = False

    @property
    def lost(self) -> bool:
        return self._lost

    async def _named(self, verb: str) -> None:
        await self.execute(Statement("savepoint", f"{verb} {self._name}", {}))

    def _check_nested(self) -> None:
        if self._accounts and not self._nested.is_active:
            raise handler_left("it ended the savepoint around it")
        if self._inner is not None and not self._inner.is_active:
            raise StoreError(
                "The session needs a rollback: the handler caught the error of a flush.",
                fault=Fault.ABORTED,
            )

    def _failed(self, error: Exception) -> Raised:
        # a flush that the session postponed until now belongs to the handler
        return Raised(error, self.translate(error), self.lost)

    def _gone(self, error: StoreError) -> StoreError:
        self._name = None
        if error.fault is Fault.UNAVAILABLE:
            self._lost = True
            return error
        return handler_left("the savepoint around it is gone")

    def translate(self, error: BaseException) -> StoreError | None:
        """Translate a driver's error; None if it is not one."""
        cause = getattr(error, "orig", None) or error
        if type(cause).__module__.partition(".")[0] not in _DRIVERS:
            return None
        return dbapi_error(cause, self._lent.dialect)

    async def execute(self, statement: Statement) -> Result:
        if self._inner is not None and statement.name in _BEHIND_A_FAILURE:
            # it would remove this savepoint from under the session
            inner, self._inner = self._inner, None
            await self._done(inner.rollback())
        # not `execute`, because the session already passes the crash points
        return await self._lent._execute(statement)  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]

    async def begin(self, statements: Statements) -> list[Result]:
        if self._accounts:
            self._nested = await self._done(self.native.begin_nested())
            if self._is_session:
                # a session sends its SAVEPOINT only when the connection is first used
                await self._done(self.native.connection())
        else:
            # numbered, because MySQL replaces a savepoint of the same name, and a handler may itself deliver
            self._name = f"txbox_inside_{next(_numbers)}"
            await self._named("SAVEPOINT")
        self._claims = any(statement.name.startswith("claim") for statement in statements)
        results = [await self.execute(statement) for statement in statements]
        if self._is_session:
            self._inner = await self._done(self.native.begin_nested())
        return results

    async def commit(self, statements: Statements) -> list[Result]:
        self._check_nested()
        if self._claims and not closes(statements):
            # a claim without a close wrote nothing but armed the guard, which must be undone because the
            # surrounding transaction goes on
            results = [await self.execute(statement) for statement in statements]
            await self.rollback()
            return results
        if self._is_session:
            inner, self._inner = self._inner, None
            try:
                await self._done(inner.commit())
            except Exception as error:
                raise self._failed(error) from error
        results = [await self.execute(statement) for statement in statements]
        if self._accounts:
            nested, self._nested = self._nested, None
            await self._done(nested.commit())
            return results
        try:
            await self._named("RELEASE SAVEPOINT")
        except StoreError as error:
            raise self._gone(error) from error
        self._name = None
        return results

    async def rollback(self) -> None:
        nested, self._nested, self._inner = self._nested, None, None
        if nested is not None and nested.is_active:
            await self._done(nested.rollback())
        if self._name is None:
            return
        try:
            await self._named("ROLLBACK TO SAVEPOINT")
            await self._named("RELEASE SAVEPOINT")
        except StoreError as error:
            raise self._gone(error) from error
        self._name = None

    async def undo(self) -> None:
        try:
            await self.rollback()
        except StoreError:
            # the surrounding transaction is gone as well, so there is nothing to undo
            self._name = None

    def discard(self) -> None:
        if self.is_async:
            self.discarded = True
        else:
            blocking(self.undo())

    async def _done(self, answer: Any) -> Any:
        return await answer if self.is_async else answer
