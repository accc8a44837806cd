"""SQLAlchemy 2: an Engine or AsyncEngine, a sessionmaker of either, or the caller's connection or session."""

from __future__ import annotations

import asyncio
from typing import Any

import sqlalchemy as sa
from sqlalchemy import exc, orm
from sqlalchemy.ext import asyncio as sa_async

from txbox.connections.base import (
    Executor,
    dbapi_error,
    finished,
    forgets_parent,
    not_in_transaction,
    of_valid_sql,
    sync_async_mismatch,
    unreachable,
)
from txbox.connections.sqlalchemy.connection import SQLAlchemyConnection
from txbox.connections.sqlalchemy.driver import (
    Watched,
    autocommits,
    dialect_of,
    style_of,
    translated,
    unusable,
)
from txbox.errors import ConfigurationError, StoreUnavailable, redacted
from txbox.session import Result, Statement, blocking
from txbox.store.dialect import Dialect

_SYNC = (sa.Connection, orm.Session, orm.scoped_session)
_ASYNC = (sa_async.AsyncConnection, sa_async.AsyncSession, sa_async.async_scoped_session)


def open_object(target: Any, *, schema: str | None = None) -> SQLAlchemyDatabase:
    """Use the user's engine or sessionmaker."""
    if isinstance(target, (sa.Engine, sa_async.AsyncEngine)):
        return SQLAlchemyDatabase(target, schema)
    if isinstance(target, (orm.sessionmaker, sa_async.async_sessionmaker)):
        bind = target.kw.get("bind")
        if target.kw.get("binds") or not isinstance(bind, (sa.Engine, sa_async.AsyncEngine)):
            raise ConfigurationError(
                "The sessionmaker has no single engine: pass one made with sessionmaker(engine), so that the inbox "
                "row and a handler's writes share a transaction."
            )
        return SQLAlchemyDatabase(bind, schema, maker=target)
    raise ConfigurationError(
        f"App() cannot use a {type(target).__qualname__}: pass an Engine, AsyncEngine, sessionmaker or "
        "async_sessionmaker; a single connection or session belongs in Inbox.accept(tx, …)."
    )


class SQLAlchemyDatabase:
    """Takes connections from the user's engine."""

    def __init__(
        self, bind: sa.Engine | sa_async.AsyncEngine, schema: str | None, *, maker: Any = None
    ) -> None:
        self.engine = engine = bind.sync_engine if isinstance(bind, sa_async.AsyncEngine) else bind
        self.schema = schema
        self.name = redacted(engine.url.render_as_string())
        self.dialect = dialect_of(engine, schema)
        if self.dialect.name == "sqlite" and engine.url.database in (None, "", ":memory:"):
            raise ConfigurationError(
                "An in-memory SQLite engine is a separate database per connection: use a file, sqlite:///name.db."
            )
        connections = _Connections(self, bind, maker)
        self.sync = None if connections.is_async else connections
        self.asynchronous = connections if connections.is_async else None
        forgets_parent(self)

    def forget_parent(self) -> None:
        # the parent still uses the pool's sockets
        self.engine.dispose(close=False)

    def close(self) -> None:
        """Leave the engine open: it belongs to the user."""

    async def close_async(self) -> None:
        """Leave the engine open: it belongs to the user."""
        if self.asynchronous is not None:
            await finished(self.asynchronous.closing)


class _Connections:
    def __init__(self, database: SQLAlchemyDatabase, engine: Any, maker: Any) -> None:
        self.is_async = isinstance(engine, sa_async.AsyncEngine)
        self._database = database
        self._engine = engine
        self._maker = maker
        self.closing: set[asyncio.Task[None]] = set()

    async def acquire(self) -> SQLAlchemyConnection:
        database, connection = self._database, None
        try:
            opened = self._engine.connect()
            raw = await opened if self.is_async else opened
            connection = SQLAlchemyConnection(raw, database.dialect, self._maker, self.closing)
            await connection.prepare()
        except (exc.SQLAlchemyError, OSError) as error:
            if connection is not None:
                connection.discard()
            if self.is_async:
                # this looks the host up, which blocks
                raise await asyncio.to_thread(_unreachable, error, database) from error
            raise _unreachable(error, database) from error
        return connection

    async def release(self, connection: SQLAlchemyConnection) -> None:
        await connection.give_back()


class Borrowed(Executor):
    """The caller's connection, in the caller's transaction. An async session provides it at the first statement."""

    def __init__(self, tx: Any, sql_dialect: Dialect, *, is_async: bool) -> None:
        self._tx = tx
        self.dialect = sql_dialect
        self.is_async = is_async
        self._wire = None if is_async else _wire_of(tx)

    async def _execute(self, statement: Statement) -> Result:
        if not self.is_async:
            return self._sent(self._tx, statement)
        if not isinstance(self._tx, sa_async.AsyncConnection):
            self._tx = await _connection_of(self._tx, self.dialect, is_async=True)
        result: Result = await self._tx.run_sync(self._sent, statement)
        return result

    def _sent(self, raw: sa.Connection, statement: Statement) -> Result:
        if self._wire is None:
            self._wire = _wire_of(raw)
        try:
            return self._wire.execute(statement)
        except exc.SQLAlchemyError as error:
            found = translated(error, self.dialect, raw.dialect)
            raise of_valid_sql(found or unusable(error)) from error


def _wire_of(raw: sa.Connection) -> Watched:
    if autocommits(raw):
        raise not_in_transaction(raw)
    return Watched(raw, style_of(raw.dialect))


async def _connection_of(session: Any, sql_dialect: Dialect, *, is_async: bool) -> Any:
    try:
        asked = session.connection()
        return await asked if is_async else asked
    except exc.SQLAlchemyError as error:
        engine = _bind_of(session)
        raise translated(error, sql_dialect, engine.dialect) or unusable(error) from error


def borrow(tx: Any, *, is_async: bool, schema: str | None = None) -> Borrowed:
    if isinstance(tx, _SYNC if is_async else _ASYNC):
        raise sync_async_mismatch(tx, wants="sync" if is_async else "async")
    if isinstance(tx, sa.Connection):
        return Borrowed(tx, dialect_of(tx, schema), is_async=False)
    if isinstance(tx, sa_async.AsyncConnection):
        if tx.sync_connection is None:
            raise ConfigurationError(
                "This AsyncConnection has not been started: use `async with engine.begin() as tx`."
            )
        if autocommits(tx.sync_connection):
            raise not_in_transaction(tx)
        return Borrowed(tx, dialect_of(tx.sync_connection, schema), is_async=True)
    if not isinstance(tx, (*_SYNC, *_ASYNC)):
        raise _no_transaction_object(tx)
    sql_dialect = dialect_of(_bind_of(tx), schema)
    if not is_async:
        tx = blocking(_connection_of(tx, sql_dialect, is_async=False))
    return Borrowed(tx, sql_dialect, is_async=is_async)


def _no_transaction_object(tx: Any) -> ConfigurationError:
    return ConfigurationError(
        f"A {type(tx).__qualname__} is not in a transaction: pass the Connection or Session you write through."
    )


def _bind_of(session: Any) -> Any:
    try:
        return session.get_bind()
    except exc.UnboundExecutionError as error:
        raise ConfigurationError(
            "This session has no single engine: pass the Connection you write through, "
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
