"""SQLAlchemy 2: an Engine or AsyncEngine, a sessionmaker or async_sessionmaker, or the caller's connection or session.

Async connections run the same code as sync ones, through SQLAlchemy's own greenlet bridge. A handler's
Session is bound to txbox's connection and works in a savepoint: its commit() and rollback() end the
savepoint, never the transaction.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import sqlalchemy as sa
from sqlalchemy import exc, orm
from sqlalchemy.ext import asyncio as sa_async

from txbox.connections.base import (
    RELEASE,
    ROLLBACK_TO,
    SAVEPOINT,
    dbapi_error,
    finished,
    handler_left,
    is_marked,
    not_in_transaction,
    not_released,
    refused_commit,
    savepoint_is_gone,
    wrong_colour,
)
from txbox.connections.sqlalchemy_wire import Libpq, Watched, wire
from txbox.errors import ConfigurationError, Fault, StoreError, StoreUnavailable
from txbox.steps import Raised, Result, Statement
from txbox.store.dialect import Dialect, Style, dialect

T = TypeVar("T")

_DIALECTS = {"postgresql": "postgresql", "mysql": "mysql", "mariadb": "mysql", "sqlite": "sqlite"}
_STYLES: dict[str, Style] = {
    "pyformat": "format",
    "format": "format",
    "qmark": "qmark",
    "numeric_dollar": "numeric",
}
_READ_COMMITTED = Statement("isolation", "SET TRANSACTION ISOLATION LEVEL READ COMMITTED", {})


def open_object(target: Any, *, schema: str | None = None) -> SQLAlchemyDatabase:
    """Use an engine or sessionmaker of the user's."""
    if isinstance(target, sa.Engine):
        return SQLAlchemyDatabase(target, schema)
    if isinstance(target, sa_async.AsyncEngine):
        return SQLAlchemyDatabase(target.sync_engine, schema, async_engine=target)
    if isinstance(target, (orm.sessionmaker, sa_async.async_sessionmaker)):
        bind = target.kw.get("bind")
        if target.kw.get("binds") or not isinstance(bind, (sa.Engine, sa_async.AsyncEngine)):
            raise ConfigurationError(
                "The sessionmaker has no single engine: pass one made with sessionmaker(engine), so that the inbox "
                "row and the writes of a handler share a transaction."
            )
        if isinstance(bind, sa_async.AsyncEngine):
            return SQLAlchemyDatabase(bind.sync_engine, schema, async_engine=bind, maker=target)
        return SQLAlchemyDatabase(bind, schema, maker=target)
    raise ConfigurationError(
        f"App() cannot use a {type(target).__qualname__}: pass an Engine, AsyncEngine, sessionmaker or "
        "async_sessionmaker; a single connection or session belongs into Inbox.accept(tx, …)."
    )


class SQLAlchemyDatabase:
    """Where connections of a user's engine come from."""

    def __init__(
        self, engine: sa.Engine, schema: str | None, *, async_engine: Any = None, maker: Any = None
    ) -> None:
        self.engine = engine
        self.schema = schema
        self.name = engine.url.render_as_string(hide_password=True)
        self.dialect = _dialect_of(engine, schema)
        if self.dialect.name == "sqlite" and engine.url.database in (None, "", ":memory:"):
            raise ConfigurationError(
                "An SQLite engine in memory is another database for each connection: use a file, sqlite:///name.db."
            )
        self._sync = None if async_engine is not None else _Connections(self, maker)
        self._async = (
            _AsyncConnections(self, async_engine, maker) if async_engine is not None else None
        )
        self._pid = os.getpid()

    @property
    def sync(self) -> _Connections | None:
        return self._sync

    @property
    def asynchronous(self) -> _AsyncConnections | None:
        return self._async

    def forget_inherited(self) -> None:
        """After a fork the parent still uses the pool's sockets: start with none."""
        if self._pid != os.getpid():
            self._pid = os.getpid()
            self.engine.dispose(close=False)

    def close(self) -> None:
        """Leave the engine open: it is the user's."""

    async def close_async(self) -> None:
        """Leave the engine open: it is the user's."""
        if self._async is not None:
            await finished(self._async.closing)


class _Connections:
    def __init__(self, database: SQLAlchemyDatabase, maker: Any) -> None:
        self._database = database
        self._maker = maker

    def acquire(self) -> SQLAlchemyConnection:
        database = self._database
        database.forget_inherited()
        try:
            raw = database.engine.connect()
        except (exc.SQLAlchemyError, OSError) as error:
            raise _unreachable(error, database) from error
        connection = SQLAlchemyConnection(raw, database.dialect, self._maker)
        try:
            connection.prepare()
        except (exc.SQLAlchemyError, OSError) as error:
            connection.discard()
            raise _unreachable(error, database) from error
        return connection

    def release(self, connection: SQLAlchemyConnection) -> None:
        connection.give_back()


class _AsyncConnections:
    def __init__(self, database: SQLAlchemyDatabase, engine: Any, maker: Any) -> None:
        self._database = database
        self._engine = engine
        self._maker = maker
        self.closing: set[asyncio.Task[None]] = set()

    async def acquire(self) -> AsyncSQLAlchemyConnection:
        database = self._database
        database.forget_inherited()
        try:
            raw = await self._engine.connect()
        except (exc.SQLAlchemyError, OSError) as error:
            raise _unreachable(error, database) from error
        connection = AsyncSQLAlchemyConnection(raw, database.dialect, self._maker, self.closing)
        try:
            await connection.prepare()
        except (exc.SQLAlchemyError, OSError) as error:
            connection.discard()
            raise _unreachable(error, database) from error
        return connection

    async def release(self, connection: AsyncSQLAlchemyConnection) -> None:
        await connection.give_back()


class SQLAlchemyConnection:
    """A connection of the engine's pool whose transactions txbox begins and ends."""

    def __init__(self, raw: sa.Connection, own: Dialect, maker: Any, bind: Any = None) -> None:
        self.raw = raw
        self._dialect = own
        self._maker = maker
        self._bind = bind or raw
        self._session: Any = None
        # the session's transaction that an earlier call of a handler's has begun, and the next one found
        self._shared: Any = None
        # sessions that a call has failed, or ended with the work of others in them
        self._spoilt: list[Any] = []
        self._transaction: Any = None
        self._errors: tuple[type[Exception], ...] = (
            exc.SQLAlchemyError,
            _driver_error(raw.dialect),
            StoreError,
        )
        self._enforce_later = False
        self._fatal = False
        self._watched = False

    @property
    def native(self) -> Any:
        """What the next call of a handler gets; the calls of one transaction share a session."""
        if self._maker is None:
            return self._bind
        if self._session is not None and (self._has_ended() or not _sync(self._session).is_active):
            # this transaction is lost, but the next call must not meet what the last one has left
            self._spoilt.append(self._session)
            self._session = self._shared = None
        if self._session is None:
            self._session = self._maker(
                bind=self._bind, join_transaction_mode="create_savepoint", twophase=False
            )
        self._shared = _sync(self._session).get_transaction()
        return self._session

    def _has_ended(self) -> bool:
        """Say whether a call has ended a transaction of the session's which held the work of calls before it."""
        shared = self._shared
        return shared is not None and _sync(self._session).get_transaction() is not shared

    def left(self) -> bool:
        return self._watched and not self.lost and not self._is_marked()

    def _is_marked(self) -> bool:
        return is_marked(self.raw.connection.driver_connection)

    @property
    def lost(self) -> bool:
        return self._fatal or self.raw.closed or self.raw.invalidated

    def translate(self, error: BaseException) -> StoreError | None:
        return _translated(error, self._dialect, self.raw.dialect)

    def prepare(self) -> None:
        """Ask for READ COMMITTED, also of an engine in autocommit; the pool resets it afterwards."""
        self._wire = wire(self.raw, self._dialect, _style_of(self.raw.dialect))
        name = self._dialect.name
        # libpq's BEGIN names the level itself
        always = name == "postgresql" and not isinstance(self._wire, Libpq)
        if always or (name != "sqlite" and _autocommits(self.raw)):
            self.raw.execution_options(isolation_level="READ COMMITTED")

    def execute(self, statement: Statement) -> Result:
        try:
            return self._wire.execute(statement)
        except self._errors as error:
            raise self._failure(error) from error

    def savepoint(self) -> None:
        self.execute(SAVEPOINT)

    def release_savepoint(self) -> None:
        self._end_calls()
        try:
            self.execute(RELEASE)
        except StoreError as error:
            raise not_released(error, self.lost) from error

    def rollback_to_savepoint(self) -> None:
        # what the session knows of the database is about to be rolled back: the next call gets another
        try:
            self._ended()
            while (nested := self.raw.get_nested_transaction()) is not None:
                nested.close()
            self._wire.execute(ROLLBACK_TO)
        except self._errors as error:
            raise not_released(self._failure(error), self.lost) from error

    def begin(self, statements: Sequence[Statement]) -> list[Result]:
        try:
            self._transaction = self.raw.begin()
            if self._dialect.name == "mysql":
                # for the next transaction only; SESSION would cost two round trips to reset
                self._wire.execute(_READ_COMMITTED)
            elif self._dialect.name == "sqlite":
                self._begin_immediate()
            results = self._wire.begin(statements)
            self._watched = self._is_marked()
        except self._errors as error:
            raise self._failure(error) from error
        return results

    def _begin_immediate(self) -> None:
        # a deferred transaction that reads first cannot become a writer later; and the engine may
        # have begun one in an event of the user's, where foreign keys cannot be switched on any more
        if _in_sqlite_transaction(self.raw):
            self.raw.exec_driver_sql("ROLLBACK")
        if not self.raw.exec_driver_sql("PRAGMA foreign_keys").scalar():
            self._enforce_later = True
            self.raw.exec_driver_sql("PRAGMA foreign_keys = ON")
        self.raw.exec_driver_sql("BEGIN IMMEDIATE")

    def commit(self, statements: Sequence[Statement]) -> list[Result]:
        if self._session is not None:
            # nobody uses what it holds any more
            _sync(self._session).expire_on_commit = False
        self._end_calls()
        try:
            results = self._wire.commit(statements)
        except self._errors as error:
            raise self._failure(error) from error
        try:
            self._transaction.commit()
        except exc.SQLAlchemyError as error:
            found = self._failure(error)
            found.definite = refused_commit(found)
            raise found from error
        self._ended()
        return results

    def _end_calls(self) -> None:
        """Write what the session has pending and release its savepoint; what fails here is the handler's.

        Raises:
            Raised: also when a call has undone what calls before it had written.
        """
        if self._session is None:
            return
        if self._spoilt or self._has_ended():
            raise Raised(_undone(), None, self.lost)
        self._shared = None
        try:
            _sync(self._session).commit()
        except Exception as error:
            found = self.translate(error)
            if found is not None and _savepoint_gone(error, found):
                raise handler_left("its session's savepoint is gone") from error
            raise Raised(error, found, self.lost) from error

    def rollback(self) -> None:
        try:
            over = not self.lost and self._wire.is_over()
            if self._transaction.is_active:
                self._transaction.rollback()
            elif not self.lost:
                # COMMIT was refused: SQLite keeps the transaction open then
                self.raw.connection.rollback()
            if not over:
                self._wire.rolled_back()
        except self._errors as error:
            raise self._failure(error) from error
        self._ended()

    def _ended(self) -> None:
        sessions = [*self._spoilt, *([] if self._session is None else [self._session])]
        self._spoilt, self._session, self._shared = [], None, None
        for session in reversed(sessions):
            _sync(session).close()

    def give_back(self) -> None:
        try:
            if self._enforce_later and not self.lost:
                self.raw.exec_driver_sql("PRAGMA foreign_keys = OFF")
                self.raw.rollback()
            self.raw.close()
        except exc.SQLAlchemyError:
            # the transaction was over already; the pool drops the connection
            self.raw.invalidate()

    def discard(self) -> None:
        if not self.raw.closed:
            self.raw.invalidate()
        self._ended()
        self.raw.close()

    def _failure(self, error: BaseException) -> StoreError:
        found = error if isinstance(error, StoreError) else self.translate(error)
        if found is None:
            found = (
                handler_left("it closed its connection") if self.raw.closed else _unusable(error)
            )
        self._fatal = self._fatal or found.fault is Fault.UNAVAILABLE
        return found


class AsyncSQLAlchemyConnection:
    """The async twin of `SQLAlchemyConnection`, which does the work inside SQLAlchemy's bridge."""

    def __init__(
        self,
        raw: sa_async.AsyncConnection,
        own: Dialect,
        maker: Any,
        closing: set[asyncio.Task[None]],
    ) -> None:
        inner = raw.sync_connection
        assert inner is not None
        self._raw = raw
        self._inner = SQLAlchemyConnection(inner, own, maker, raw)
        self._closing = closing

    @property
    def native(self) -> Any:
        return self._inner.native

    @property
    def lost(self) -> bool:
        return self._inner.lost

    def left(self) -> bool:
        return self._inner.left()

    def translate(self, error: BaseException) -> StoreError | None:
        return self._inner.translate(error)

    async def _bridged(self, call: Callable[[], T]) -> T:
        return await self._raw.run_sync(lambda _: call())

    async def prepare(self) -> None:
        await self._bridged(self._inner.prepare)

    async def execute(self, statement: Statement) -> Result:
        return await self._bridged(lambda: self._inner.execute(statement))

    async def begin(self, statements: Sequence[Statement]) -> list[Result]:
        return await self._bridged(lambda: self._inner.begin(statements))

    async def savepoint(self) -> None:
        await self._bridged(self._inner.savepoint)

    async def release_savepoint(self) -> None:
        await self._bridged(self._inner.release_savepoint)

    async def rollback_to_savepoint(self) -> None:
        await self._bridged(self._inner.rollback_to_savepoint)

    async def commit(self, statements: Sequence[Statement]) -> list[Result]:
        return await self._bridged(lambda: self._inner.commit(statements))

    async def rollback(self) -> None:
        await self._bridged(self._inner.rollback)

    async def give_back(self) -> None:
        await self._bridged(self._inner.give_back)

    def discard(self) -> None:
        # inside the bridge a driver closes in its own good order: asyncpg for one also cancels the
        # query of a cancelled handler, whose locks the server would hold otherwise
        task = asyncio.get_running_loop().create_task(self._bridged(self._inner.discard))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)


class Borrowed:
    """The caller's connection or session, in the caller's transaction."""

    def __init__(self, tx: sa.Connection, own: Dialect) -> None:
        if _autocommits(tx):
            raise not_in_transaction(tx)
        self._tx = tx
        self._wire = Watched(tx, _style_of(tx.dialect))
        self.dialect = own

    def execute(self, statement: Statement) -> Result:
        try:
            return self._wire.execute(statement)
        except exc.SQLAlchemyError as error:
            found = _translated(error, self.dialect, self._tx.dialect)
            raise found or _unusable(error) from error


class AsyncBorrowed:
    """The async twin of `Borrowed`; a session's connection is asked for at the first statement."""

    def __init__(self, tx: Any, own: Dialect) -> None:
        self._tx = tx
        self.dialect = own
        self._borrowed: Borrowed | None = None
        self._connection: Any = None

    async def execute(self, statement: Statement) -> Result:
        if self._connection is None:
            if isinstance(self._tx, sa_async.AsyncConnection):
                self._connection = self._tx
            else:
                try:
                    self._connection = await self._tx.connection()
                except exc.SQLAlchemyError as error:
                    engine = _bind_of(self._tx)
                    raise _translated(error, self.dialect, engine.dialect) or _unusable(
                        error
                    ) from error

        def call(raw: sa.Connection) -> Result:
            if self._borrowed is None:
                self._borrowed = Borrowed(raw, self.dialect)
            return self._borrowed.execute(statement)

        result: Result = await self._connection.run_sync(call)
        return result


def borrow(tx: Any, *, schema: str | None = None) -> Borrowed:
    if isinstance(
        tx, (sa_async.AsyncConnection, sa_async.AsyncSession, sa_async.async_scoped_session)
    ):
        raise wrong_colour(tx, wants="async")
    if isinstance(tx, sa.Connection):
        return Borrowed(tx, _dialect_of(tx, schema))
    if not isinstance(tx, (orm.Session, orm.scoped_session)):
        raise _no_transaction_object(tx)
    own = _dialect_of(_bind_of(tx), schema)
    try:
        connection = tx.connection()
    except exc.SQLAlchemyError as error:
        raise _translated(error, own, _bind_of(tx).dialect) or _unusable(error) from error
    return Borrowed(connection, own)


def borrow_async(tx: Any, *, schema: str | None = None) -> AsyncBorrowed:
    if isinstance(tx, (sa.Connection, orm.Session, orm.scoped_session)):
        raise wrong_colour(tx, wants="sync")
    if isinstance(tx, sa_async.AsyncConnection):
        if tx.sync_connection is None:
            raise ConfigurationError(
                "This AsyncConnection is not started: use `async with engine.begin() as tx`."
            )
        if _autocommits(tx.sync_connection):
            raise not_in_transaction(tx)
        return AsyncBorrowed(tx, _dialect_of(tx.sync_connection, schema))
    if not isinstance(tx, (sa_async.AsyncSession, sa_async.async_scoped_session)):
        raise _no_transaction_object(tx)
    return AsyncBorrowed(tx, _dialect_of(_bind_of(tx), schema))


def _no_transaction_object(tx: Any) -> ConfigurationError:
    return ConfigurationError(
        f"A {type(tx).__qualname__} is in no transaction: pass the Connection or Session that your writes go through."
    )


def _bind_of(session: Any) -> Any:
    try:
        return session.get_bind()
    except exc.UnboundExecutionError as error:
        raise ConfigurationError(
            "This session has no single engine: pass the Connection that your writes go through, "
            "session.connection(bind_arguments=…)."
        ) from error


def _dialect_of(bind: sa.Engine | sa.Connection, schema: str | None) -> Dialect:
    name = bind.dialect.name
    if name not in _DIALECTS or bind.dialect.paramstyle not in _STYLES:
        raise ConfigurationError(
            f"txbox does not know {name}+{bind.dialect.driver}: use PostgreSQL, MySQL, MariaDB or SQLite."
        )
    return dialect(_DIALECTS[name], schema)


def _style_of(own: sa.Dialect) -> Style:
    return _STYLES[own.paramstyle]


def _autocommits(raw: sa.Connection) -> bool:
    """Say whether each statement would commit by itself; asks the driver's object, not the server."""
    if raw.closed or raw.invalidated:
        return False
    if raw.dialect.name == "sqlite":
        # engines that send BEGIN themselves run the driver in autocommit: what counts is the transaction
        driver: Any = raw.connection.driver_connection
        return driver.isolation_level is None and not driver.in_transaction
    connection = raw.connection.dbapi_connection
    assert connection is not None
    return bool(raw.dialect.detect_autocommit_setting(connection))


def _in_sqlite_transaction(raw: sa.Connection) -> bool:
    driver: Any = raw.connection.driver_connection
    return bool(driver.in_transaction)


def _savepoint_gone(error: BaseException, found: StoreError) -> bool:
    """Say whether a session could not release its savepoint because there is none any more."""
    return (
        savepoint_is_gone(found)
        and isinstance(error, exc.StatementError)
        and (error.statement or "").startswith("RELEASE SAVEPOINT")
    )


def _sync(session: Any) -> Any:
    return getattr(session, "sync_session", session)


def _undone() -> StoreError:
    return StoreError(
        "A handler ended the transaction of its session with rollback() or close(), and with it what other messages "
        "of its batch had written: they run again, each by itself.",
        fault=Fault.OTHER,
    )


def _driver_error(own: sa.Dialect) -> type[Exception]:
    assert own.dbapi is not None
    kind: type[Exception] = own.dbapi.Error
    return kind


def _translated(error: BaseException, own: Dialect, driver: sa.Dialect) -> StoreError | None:
    """Put an error of SQLAlchemy's driver into txbox's words; None when it is none."""
    if isinstance(error, exc.DBAPIError):
        cause = error.orig
        if cause is None:
            return None
        found = dbapi_error(cause, own)
        if error.connection_invalidated and found.fault is not Fault.UNAVAILABLE:
            return StoreUnavailable(str(found), fault=Fault.UNAVAILABLE, code=found.code)
        return found
    return dbapi_error(error, own) if isinstance(error, _driver_error(driver)) else None


def _unusable(error: BaseException) -> StoreError:
    return StoreError(
        f"SQLAlchemy: {type(error).__name__}: the transaction cannot be used any more; roll it back.",
        fault=Fault.ABORTED,
    )


def _unreachable(error: BaseException, database: SQLAlchemyDatabase) -> StoreUnavailable:
    cause = getattr(error, "orig", None) or error
    code = dbapi_error(cause, database.dialect).code
    return StoreUnavailable(
        f"Cannot connect to {database.name} ({type(cause).__name__}{f', {code}' if code else ''}): "
        "check the URL, that the server is running, and the size of the pool.",
        fault=Fault.UNAVAILABLE,
        code=code,
    )
