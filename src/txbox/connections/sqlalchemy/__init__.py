"""SQLAlchemy 2: an Engine or AsyncEngine, a sessionmaker of either, or the caller's connection or session."""

from __future__ import annotations

import asyncio
from typing import Any

import sqlalchemy as sa
from sqlalchemy import exc, orm
from sqlalchemy.ext import asyncio as sa_async

from txbox.connections.base import (
    dbapi_error,
    finished,
    not_in_transaction,
    of_own,
    sync_async_mismatch,
    unreachable,
)
from txbox.connections.sqlalchemy.connection import AsyncSQLAlchemyConnection, SQLAlchemyConnection
from txbox.connections.sqlalchemy.driver import (
    Watched,
    autocommits,
    dialect_of,
    style_of,
    translated,
    unusable,
)
from txbox.errors import ConfigurationError, StoreUnavailable, redacted
from txbox.forks import forgets_parent
from txbox.steps import Result, Statement
from txbox.store.dialect import Dialect


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
        self.name = redacted(engine.url.render_as_string())
        self.dialect = dialect_of(engine, schema)
        if self.dialect.name == "sqlite" and engine.url.database in (None, "", ":memory:"):
            raise ConfigurationError(
                "An SQLite engine in memory is another database for each connection: use a file, sqlite:///name.db."
            )
        self.sync = None if async_engine is not None else _Connections(self, maker)
        self.asynchronous = (
            _AsyncConnections(self, async_engine, maker) if async_engine is not None else None
        )
        forgets_parent(self)

    def forget_parent(self) -> None:
        # the parent still uses the sockets of the pool
        self.engine.dispose(close=False)

    def close(self) -> None:
        """Leave the engine open: it is the user's."""

    async def close_async(self) -> None:
        """Leave the engine open: it is the user's."""
        if self.asynchronous is not None:
            await finished(self.asynchronous.closing)


class _Connections:
    def __init__(self, database: SQLAlchemyDatabase, maker: Any) -> None:
        self._database = database
        self._maker = maker

    def acquire(self) -> SQLAlchemyConnection:
        database = self._database
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
        try:
            raw = await self._engine.connect()
        except (exc.SQLAlchemyError, OSError) as error:
            raise await asyncio.to_thread(_unreachable, error, database) from error
        connection = AsyncSQLAlchemyConnection(raw, database.dialect, self._maker, self.closing)
        try:
            await connection.prepare()
        except (exc.SQLAlchemyError, OSError) as error:
            connection.discard()
            raise await asyncio.to_thread(_unreachable, error, database) from error
        return connection

    async def release(self, connection: AsyncSQLAlchemyConnection) -> None:
        await connection.give_back()


class Borrowed:
    """The caller's connection or session, in the caller's transaction."""

    def __init__(self, tx: sa.Connection, dialect: Dialect) -> None:
        if autocommits(tx):
            raise not_in_transaction(tx)
        self._tx = tx
        self._wire = Watched(tx, style_of(tx.dialect))
        self.dialect = dialect

    def execute(self, statement: Statement) -> Result:
        try:
            return self._wire.execute(statement)
        except exc.SQLAlchemyError as error:
            found = translated(error, self.dialect, self._tx.dialect)
            raise of_own(found or unusable(error)) from error


class AsyncBorrowed:
    """The async twin of `Borrowed`; a session's connection is asked for at the first statement."""

    def __init__(self, tx: Any, dialect: Dialect) -> None:
        self._tx = tx
        self.dialect = dialect
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
                    raise translated(error, self.dialect, engine.dialect) or unusable(
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
        raise sync_async_mismatch(tx, wants="async")
    if isinstance(tx, sa.Connection):
        return Borrowed(tx, dialect_of(tx, schema))
    if not isinstance(tx, (orm.Session, orm.scoped_session)):
        raise _no_transaction_object(tx)
    dialect = dialect_of(_bind_of(tx), schema)
    try:
        connection = tx.connection()
    except exc.SQLAlchemyError as error:
        raise translated(error, dialect, _bind_of(tx).dialect) or unusable(error) from error
    return Borrowed(connection, dialect)


def borrow_async(tx: Any, *, schema: str | None = None) -> AsyncBorrowed:
    if isinstance(tx, (sa.Connection, orm.Session, orm.scoped_session)):
        raise sync_async_mismatch(tx, wants="sync")
    if isinstance(tx, sa_async.AsyncConnection):
        if tx.sync_connection is None:
            raise ConfigurationError(
                "This AsyncConnection is not started: use `async with engine.begin() as tx`."
            )
        if autocommits(tx.sync_connection):
            raise not_in_transaction(tx)
        return AsyncBorrowed(tx, dialect_of(tx.sync_connection, schema))
    if not isinstance(tx, (sa_async.AsyncSession, sa_async.async_scoped_session)):
        raise _no_transaction_object(tx)
    return AsyncBorrowed(tx, dialect_of(_bind_of(tx), schema))


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


def _unreachable(error: BaseException, database: SQLAlchemyDatabase) -> StoreUnavailable:
    cause = getattr(error, "orig", None) or error
    code = dbapi_error(cause, database.dialect).code
    return unreachable(
        database.name,
        cause,
        "the URL, that the server is running, and the size of the pool",
        code=code,
        host=database.engine.url.host,
    )
