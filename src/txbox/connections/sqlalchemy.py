"""SQLAlchemy 2: an Engine or AsyncEngine, a sessionmaker of either, or the caller's connection or session.

A connection's methods are written once, in blocking calls; an async one runs them inside SQLAlchemy's greenlet
bridge. A handler's Session is bound to txbox's connection and works in a savepoint. Its commit() and rollback() end
the savepoint, never the transaction.

SQLAlchemy's execution costs more than the statement, so txbox's own statements use it only for event listeners: when
the engine has listeners or echoes. Otherwise they go through a driver cursor or, with psycopg, through libpq's
pipeline, where BEGIN and claim, and close and COMMIT, take one round trip each.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from math import inf
from types import CoroutineType
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, cast

import sqlalchemy as sa
from sqlalchemy import event, exc, orm
from sqlalchemy.ext import asyncio as sa_async

from txbox.connections.base import (
    MAX_PACKET,
    PROBE,
    RELEASE,
    ROLLBACK_TO,
    SAVEPOINT,
    ConnectionSource,
    Database,
    Executor,
    begins_marked,
    check_closed,
    check_committed,
    check_session,
    cut_off_bytes,
    dbapi_error,
    forgets_parent,
    handler_left,
    is_marked,
    not_in_transaction,
    not_released,
    of_valid_sql,
    packet_too_large,
    plain_rows,
    refused_commit,
    savepoint_is_gone,
    sync_async_mismatch,
)
from txbox.connections.settings import Settings
from txbox.errors import ConfigurationError, Fault, StoreError, StoreUnavailable, redacted
from txbox.session import Connection, OnStatement, Raised, Result, Statement, Statements, blocking
from txbox.store.dialect import Dialect, Style, dialect, native

T = TypeVar("T")
P = ParamSpec("P")

_SYNC = (sa.Connection, orm.Session, orm.scoped_session)
_ASYNC = (sa_async.AsyncConnection, sa_async.AsyncSession, sa_async.async_scoped_session)
_DIALECTS = {"postgresql": "postgresql", "mysql": "mysql", "mariadb": "mysql", "sqlite": "sqlite"}
_STYLES: dict[str, Style] = {
    "pyformat": "format",
    "format": "format",
    "qmark": "qmark",
    "numeric_dollar": "numeric",
}
_INFO = "txbox"
_CHECKED = "txbox_checked"
_READ_COMMITTED = Statement("isolation", "SET TRANSACTION ISOLATION LEVEL READ COMMITTED", {})


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
        f"App() cannot use this {type(target).__qualname__}: pass an Engine, AsyncEngine, sessionmaker or "
        "async_sessionmaker; a single connection or session belongs in Inbox.accept(tx, …)."
    )


class SQLAlchemyDatabase(Database):
    """Takes connections from the user's engine, which stays open: it belongs to the user."""

    check = "the URL, that the server is running, and the size of the pool"

    def __init__(
        self, bind: sa.Engine | sa_async.AsyncEngine, schema: str | None, *, maker: Any = None
    ) -> None:
        self._async_engine = bind if isinstance(bind, sa_async.AsyncEngine) else None
        self.engine = engine = bind.sync_engine if isinstance(bind, sa_async.AsyncEngine) else bind
        super().__init__(
            redacted(engine.url.render_as_string()), schema, dialect_of(engine, schema)
        )
        self.hosts = [] if engine.url.host is None else [engine.url.host]
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

    async def leave_loop(self) -> None:
        if self._async_engine is not None:
            await self._async_engine.dispose()


class _Connections(ConnectionSource):
    def __init__(self, database: SQLAlchemyDatabase, engine: Any, maker: Any) -> None:
        super().__init__(
            is_async=isinstance(engine, sa_async.AsyncEngine),
            idle_limit=database.dialect.idle_limit,
        )
        self._database = database
        self._engine = engine
        self._maker = maker
        self._probed = maker is None

    async def acquire(self) -> SQLAlchemyConnection:
        database = self._database
        # what sets the isolation level of an engine in autocommit raises the driver's own
        errors = (exc.SQLAlchemyError, driver_error(database.engine.dialect), OSError)
        for last in (False, True):
            connection = None
            try:
                opened = self._engine.connect()
                raw = await opened if self.is_async else opened
                connection = SQLAlchemyConnection(
                    raw, database.dialect, self._maker, database.closing
                )
                await connection.prepare(database.handler_settings)
                if not self._probed:
                    await connection.check_maker()
                    self._probed = True
            except errors as error:
                if connection is not None:
                    self.distrust(connection)
                    connection.discard()
                    if not last:
                        # it was idle, and dead
                        continue
                cause = getattr(error, "orig", None) or error
                code = dbapi_error(cause, database.dialect).code
                raise await database.unreachable(cause, code, is_async=self.is_async) from error
            except BaseException:
                # refused, or cancelled
                if connection is not None:
                    connection.discard()
                raise
            return connection
        raise AssertionError("the last try returns or raises")

    async def release(self, connection: SQLAlchemyConnection) -> None:
        await connection.give_back()

    def distrust(self, connection: SQLAlchemyConnection) -> None:
        # what SQLAlchemy does for a statement of its own: the pool replaces what was opened before
        pool: Any = self._database.engine.pool
        pool._invalidate(connection.pooled, _checkin=False)  # noqa: SLF001 - has no public name


# -- txbox's own transactions -----------------------------------------------------------------


def _bridged(
    method: Callable[Concatenate[SQLAlchemyConnection, P], T],
) -> Callable[Concatenate[SQLAlchemyConnection, P], CoroutineType[Any, Any, T]]:
    """Turn a blocking method into a coroutine; an async connection runs it inside SQLAlchemy's bridge."""

    @wraps(method)
    async def bridged(self: SQLAlchemyConnection, /, *args: P.args, **kwargs: P.kwargs) -> T:
        if not self.is_async:
            return method(self, *args, **kwargs)

        def inside(_: Any) -> T:
            return method(self, *args, **kwargs)

        answer: T = await self.bind.run_sync(inside)
        return answer

    # mypy gives the result of `async def` a wider type than pyright does
    return cast(
        "Callable[Concatenate[SQLAlchemyConnection, P], CoroutineType[Any, Any, T]]", bridged
    )


class SQLAlchemyConnection(Connection):
    """A connection from the engine's pool whose transactions txbox begins and ends.

    Args:
        bind: the Connection or AsyncConnection obtained from the engine.
        closing: the discarded connections of this event loop that are being closed.
    """

    def __init__(
        self,
        bind: sa.Connection | sa_async.AsyncConnection,
        dialect: Dialect,
        maker: Any,
        closing: set[asyncio.Task[None]],
    ) -> None:
        raw = bind.sync_connection if isinstance(bind, sa_async.AsyncConnection) else bind
        assert raw is not None
        self.is_async = raw is not bind
        self.bind: Any = bind
        self._raw = raw
        self.pooled = raw.connection
        self._dialect = dialect
        self._maker = maker
        self._closing = closing
        self._session: Any = None
        # the session's transaction that an earlier handler call began and the next one joined
        self._shared: Any = None
        # sessions that a call broke, or ended along with the work of other calls
        self._spoilt: list[Any] = []
        self._transaction: Any = None
        self._errors: tuple[type[Exception], ...] = (
            exc.SQLAlchemyError,
            driver_error(raw.dialect),
            StoreError,
        )
        self._wire: Wire = Watched(raw, style_of(raw.dialect))
        self._object: Any = None
        self._options: Any = None
        self._info: dict[Any, Any] = {}
        self._enforce_later = False
        self._fatal = False
        self._watched = False

    @property
    def native(self) -> Any:
        """What the next handler call gets. The calls of one transaction share a session."""
        if self._maker is None:
            return self.bind
        if self._session is not None and (self._has_ended() or not _sync(self._session).is_active):
            # this transaction is lost, but the next call must not inherit the state of the last one
            self._spoilt.append(self._session)
            self._session = self._shared = None
        if self._session is None:
            self._session = self._maker(
                bind=self.bind, join_transaction_mode="create_savepoint", twophase=False
            )
            _sync(self._session).info[_INFO] = self._raw
            self._info = dict(self._session.info)
        self._shared = _sync(self._session).get_transaction()
        return self._session

    def _has_ended(self) -> bool:
        """Whether a call ended a session transaction that contained the work of earlier calls."""
        shared = self._shared
        return shared is not None and _sync(self._session).get_transaction() is not shared

    def watch(self, on_statement: OnStatement) -> None:
        def sent(_conn: Any, _cursor: Any, statement: str, values: Any, *_: Any) -> None:
            on_statement(statement, values)

        def commits(_conn: Any) -> None:
            on_statement("COMMIT", None)

        def rolls_back(_conn: Any) -> None:
            on_statement("ROLLBACK", None)

        event.listen(self._raw, "before_cursor_execute", sent)
        event.listen(self._raw, "commit", commits)
        event.listen(self._raw, "rollback", rolls_back)

    def has_ended(self) -> bool:
        if self._raw.closed:
            # a lost connection is invalidated; only its user closes it
            return self._watched
        return self._watched and not self.lost and not self._is_marked()

    def _is_marked(self) -> bool:
        return is_marked(self._raw.connection.driver_connection)

    @property
    def lost(self) -> bool:
        return self._fatal or self._raw.closed or self._raw.invalidated

    def translate(self, error: BaseException) -> StoreError | None:
        return translated(error, self._dialect, self._raw.dialect)

    def restore(self) -> None:
        raw: Any = self._raw
        if self._object is not None and not self.lost:
            self._object.restore()
        # `execution_options` changes the connection itself, and has no way back
        if self._options is not None and raw.get_execution_options() is not self._options:
            raw._execution_options = self._options  # noqa: SLF001 - has no public name
        if self._session is not None and self._session.info != self._info:
            self._session.info.clear()
            self._session.info.update(self._info)

    def _listen(self, settings: Settings | None) -> None:
        """Hear what the handler sends: from psycopg's cursors, elsewhere from SQLAlchemy."""
        if self._raw.dialect.driver in ("psycopg", "psycopg_async"):
            from txbox.connections.libpq import watched_in_pool

            driver = self._raw.connection.driver_connection
            self._object = watched_in_pool(driver, settings, self.sets)
        elif settings is not None:

            def sent(_conn: Any, _cursor: Any, statement: str, *_: Any) -> None:
                self.sets(settings.of(statement))

            event.listen(self._raw, "before_cursor_execute", sent)

    @_bridged
    def prepare(self, settings: Settings | None) -> None:
        """Request READ COMMITTED, even from an engine in autocommit; the pool resets it afterwards."""
        self._wire = wire(self._raw, self._dialect, style_of(self._raw.dialect))
        self.pipelines = isinstance(self._wire, Libpq)
        name = self._dialect.name
        _check_once(self._raw, dates=not isinstance(self._wire, Libpq))
        # with libpq, BEGIN names the level itself
        always = name == "postgresql" and not isinstance(self._wire, Libpq)
        if always or (name != "sqlite" and autocommits(self._raw)):
            self._raw.execution_options(isolation_level="READ COMMITTED")
        self._listen(settings)
        self._options = self._raw.get_execution_options()

    @_bridged
    def check_maker(self) -> None:
        """Check that the sessions of the maker use the connection passed to them.

        Raises:
            ConfigurationError: they choose another one.
        """
        session: orm.Session = _sync(self._maker(bind=self.bind))
        try:
            if any(bind is not self._raw for bind in _binds(session)):
                raise _elsewhere(session)
        finally:
            session.close()
        kind: type[orm.Session] = type(session)
        if kind.get_bind is not orm.Session.get_bind and not event.contains(
            kind, "after_begin", _check_begun
        ):
            # it may yet choose another one for some mapper
            event.listen(kind, "after_begin", _check_begun)

    @_bridged
    def execute(self, statement: Statement) -> Result:
        return self._execute(statement)

    def _execute(self, statement: Statement) -> Result:
        try:
            return self._wire.execute(statement)
        except self._errors as error:
            failure = self._failure(error)
            if self._dialect.name == "mysql" and (size := cut_off_bytes(statement, failure)):
                failure = packet_too_large() if size > self._packet_bytes() else failure
            raise failure from _reason(error)

    def _sent(self, statements: Statements) -> list[Result]:
        """Execute them one by one where one may be too large; otherwise the wire sends them together."""
        one_by_one = self._dialect.name == "mysql"
        return [self._execute(statement) for statement in statements] if one_by_one else []

    def _packet_bytes(self) -> float:
        """The largest statement that the server takes: it may close the connection without saying so."""
        pool: Any = self._raw.engine.pool
        errors: tuple[type[Exception], ...] = (*self._errors, OSError)
        try:
            # not from the pool, which may have no room
            other = pool._invoke_creator(None)  # noqa: SLF001 - has no public name
            try:
                cursor = other.cursor()
                cursor.execute(MAX_PACKET.sql)
                return int(cursor.fetchone()[0])
            finally:
                other.close()
        except errors:
            # the server is away after all
            return inf

    @_bridged
    def one_trip(self, statements: Statements) -> list[Result]:
        assert isinstance(self._wire, Libpq), "it does not pipeline"
        try:
            return self._wire.one_trip(statements)
        except self._errors as error:
            raise self._failure(error) from _reason(error)

    @_bridged
    def savepoint(self) -> None:
        self._execute(SAVEPOINT)

    @_bridged
    def release_savepoint(self) -> None:
        self._end_calls()
        try:
            self._execute(RELEASE)
        except StoreError as error:
            raise not_released(error, self.lost) from _reason(error)

    @_bridged
    def rollback_to_savepoint(self) -> None:
        # what the session knows of the database is about to be rolled back, so the next call gets a new one
        try:
            self._ended()
            while (nested := self._raw.get_nested_transaction()) is not None:
                nested.close()
            self._wire.execute(ROLLBACK_TO)
        except self._errors as error:
            raise not_released(self._failure(error), self.lost) from _reason(error)

    @_bridged
    def begin(self, statements: Statements) -> list[Result]:
        try:
            self._transaction = self._raw.begin()
            if self._dialect.name == "mysql":
                # affects only the next transaction; SESSION would cost two round trips to reset
                self._wire.execute(_READ_COMMITTED)
            elif self._dialect.name == "sqlite":
                self._begin_immediate()
            results = self._sent(statements) or self._wire.begin(statements)
            self._watched = begins_marked(self._raw.connection.driver_connection, statements)
            self.changed = None
        except self._errors as error:
            raise self._failure(error) from _reason(error)
        return results

    def _begin_immediate(self) -> None:
        # a deferred transaction that reads first cannot become a writer later. The engine may also have
        # begun one in the user's event listener, and foreign keys cannot be enabled inside a transaction
        if _in_sqlite_transaction(self._raw):
            self._raw.exec_driver_sql("ROLLBACK")
        if not self._raw.exec_driver_sql("PRAGMA foreign_keys").scalar():
            self._enforce_later = True
            self._raw.exec_driver_sql("PRAGMA foreign_keys = ON")
        self._raw.exec_driver_sql("BEGIN IMMEDIATE")

    @_bridged
    def commit(self, statements: Statements) -> list[Result]:
        if self._session is not None:
            # its objects are no longer used
            _sync(self._session).expire_on_commit = False
        self._end_calls()
        try:
            results = self._sent(statements) or self._wire.commit(statements)
        except self._errors as error:
            raise self._failure(error) from _reason(error)
        try:
            if (
                self._transaction.is_active
            ):  # otherwise the next line reports that a handler ended it
                self._wire.end(self._dialect)
            self._transaction.commit()
        except self._errors as error:
            failure = self._failure(error)
            failure.definite = refused_commit(failure)
            raise failure from _reason(error)
        self._ended()
        return results

    def _end_calls(self) -> None:
        """Flush the session's pending writes and release its savepoint. A failure here is the handler's.

        Raises:
            Raised: also if a call undid what earlier calls had written.
        """
        if self._session is None:
            return
        if self._spoilt or self._has_ended():
            raise Raised(_undone(), None, self.lost)
        self._shared = None
        try:
            _sync(self._session).commit()
        except Exception as error:
            failure = self.translate(error)
            if failure is not None and _savepoint_gone(error, failure):
                raise handler_left("its session's savepoint is gone") from error
            raise Raised(error, failure, self.lost) from error

    @_bridged
    def rollback(self) -> None:
        try:
            over = not self.lost and self._wire.is_over()
            # None after `one_trip`, which SQLAlchemy knows nothing of
            if self._transaction is not None and self._transaction.is_active:
                self._transaction.rollback()
            elif not self.lost:
                # or COMMIT was refused, in which case SQLite keeps the transaction open
                self._raw.connection.rollback()
            if not over:
                self._wire.rolled_back()
        except self._errors as error:
            raise self._failure(error) from _reason(error)
        self._ended()

    def _ended(self) -> None:
        sessions = [*self._spoilt, *([] if self._session is None else [self._session])]
        self._spoilt, self._session, self._shared = [], None, None
        for session in reversed(sessions):
            _sync(session).close()

    @_bridged
    def give_back(self) -> None:
        try:
            if not self.lost:
                self.restore()
                if self._wire.in_use or self.stained:
                    # what the engine's listeners have set is not ours to set again
                    self._close()
                    return
                if self._object is not None:
                    self._object.leave()
            if self._enforce_later and not self.lost:
                self._raw.exec_driver_sql("PRAGMA foreign_keys = OFF")
                self._raw.rollback()
            self._raw.close()
        except exc.SQLAlchemyError:
            # the transaction was already over; the pool drops the connection
            self._raw.invalidate()

    def discard(self) -> None:
        if not self.is_async:
            self._close()
            return
        # inside the bridge a driver closes in an orderly way: asyncpg, for one, also cancels the query
        # of a cancelled handler, whose locks the server would otherwise keep
        task = asyncio.get_running_loop().create_task(self._closed())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    @_bridged
    def _closed(self) -> None:
        self._close()

    def _close(self) -> None:
        if not self._raw.closed:
            self._wire.give_up()
            if self._dialect.name == "sqlite":
                # see its own adapter: a statement that is not read to its end would keep the transaction
                with suppress(exc.SQLAlchemyError, driver_error(self._raw.dialect)):
                    self._raw.connection.rollback()
            self._raw.invalidate()
        self._ended()
        self._raw.close()

    def _failure(self, error: BaseException) -> StoreError:
        failure = error if isinstance(error, StoreError) else self.translate(error)
        if failure is None:
            failure = (
                handler_left("it closed its connection") if self._raw.closed else unusable(error)
            )
        self._fatal = self._fatal or failure.fault is Fault.UNAVAILABLE
        return failure


def _reason(error: BaseException) -> BaseException | None:
    """Return the cause to report for an error. One that is already translated keeps its own."""
    return error.__cause__ if isinstance(error, StoreError) else error


def _in_sqlite_transaction(raw: sa.Connection) -> bool:
    driver: Any = raw.connection.driver_connection
    return bool(driver.in_transaction)


def _savepoint_gone(error: BaseException, failure: StoreError) -> bool:
    """Whether a session could not release its savepoint because it no longer exists."""
    return (
        savepoint_is_gone(failure)
        and isinstance(error, exc.StatementError)
        and (error.statement or "").startswith("RELEASE SAVEPOINT")
    )


def _sync(session: Any) -> Any:
    return getattr(session, "sync_session", session)


def _binds(session: orm.Session) -> list[Any]:
    """What a session may get its connections from, as far as it says."""
    binds: list[Any] = [session.get_bind()]
    # a private name until SQLAlchemy 2.1
    private: Any = session
    binds += (getattr(session, "binds", None) or getattr(session, "_Session__binds", {})).values()
    if type(session).get_bind is not orm.Session.get_bind:
        table = sa.Table("txbox_inbox", sa.MetaData())
        binds += [
            session.get_bind(clause=clause)
            for clause in (sa.insert(table), sa.update(table), sa.delete(table))
        ]
        # SQLAlchemy's recipe for replicas asks for this attribute
        flushing, private._flushing = private._flushing, True  # noqa: SLF001
        try:
            binds.append(session.get_bind())
        finally:
            private._flushing = flushing  # noqa: SLF001
    return binds


def _check_begun(session: orm.Session, _transaction: Any, connection: sa.Connection) -> None:
    # a session that the user makes has no such entry
    if session.info.get(_INFO, connection) is not connection:
        raise _elsewhere(session)


def _elsewhere(session: orm.Session) -> ConfigurationError:
    return ConfigurationError(
        f"The {type(session).__qualname__} of App(sessionmaker) takes another connection than the one of its "
        "transaction, where a commit would be kept although the message fails",
        "use a sessionmaker without get_bind() and binds=, and a session of your own for other databases.",
    )


def _undone() -> StoreError:
    return StoreError(
        "A handler ended its session's transaction with rollback() or close(), and undid what other messages of its "
        "batch had written: they run again, each on its own.",
        fault=Fault.OTHER,
    )


# -- the caller's transaction ------------------------------------------------------------------


class Borrowed(Executor):
    """The caller's connection, in the caller's transaction. An async session provides it at the first statement."""

    def __init__(self, tx: Any, sql_dialect: Dialect, *, is_async: bool) -> None:
        super().__init__(tx, sql_dialect, is_async=is_async)
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
            failure = translated(error, self.dialect, raw.dialect)
            raise of_valid_sql(failure or unusable(error)) from error


def _check_once(raw: sa.Connection, *, dates: bool) -> None:
    """`check_session`, for as long as the pool keeps the connection."""
    if _CHECKED not in raw.info:
        check_session(raw.connection.driver_connection, dates=dates)
        raw.info[_CHECKED] = True


def _wire_of(raw: sa.Connection) -> Watched:
    if autocommits(raw):
        raise not_in_transaction(raw)
    _check_once(raw, dates=False)
    return Watched(raw, style_of(raw.dialect))


async def _connection_of(session: Any, sql_dialect: Dialect, *, is_async: bool) -> Any:
    try:
        connecting = session.connection()
        return await connecting if is_async else connecting
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
        f"This {type(tx).__qualname__} is not in a transaction: pass the Connection or Session you write through."
    )


def _bind_of(session: Any) -> Any:
    registry: Any = getattr(session, "registry", None)
    if registry is not None:
        # a scoped session
        session = registry()
    try:
        binds = _binds(_sync(session))
    except exc.UnboundExecutionError:
        binds = []
    if len({bind.engine for bind in binds}) != 1:
        raise ConfigurationError(
            "This session has no single engine: pass the Connection you write through, "
            "session.connection(bind_arguments=…)."
        )
    return binds[0]


# -- the driver, and how statements reach it --------------------------------------------------


def dialect_of(bind: sa.Engine | sa.Connection, schema: str | None) -> Dialect:
    name = bind.dialect.name
    if name not in _DIALECTS or bind.dialect.paramstyle not in _STYLES:
        raise ConfigurationError(
            f"txbox does not support {name}+{bind.dialect.driver}: use PostgreSQL, MySQL, MariaDB or SQLite."
        )
    return dialect(_DIALECTS[name], schema)


def style_of(driver: sa.Dialect) -> Style:
    return _STYLES[driver.paramstyle]


def autocommits(raw: sa.Connection) -> bool:
    """Whether each statement would commit on its own. Asks the driver's object, not the server."""
    if raw.closed or raw.invalidated:
        return False
    if raw.dialect.name == "sqlite":
        # engines that send BEGIN themselves run the driver in autocommit, so check for a transaction
        driver: Any = raw.connection.driver_connection
        return driver.isolation_level is None and not driver.in_transaction
    connection = raw.connection.dbapi_connection
    assert connection is not None
    return bool(raw.dialect.detect_autocommit_setting(connection))


def driver_error(driver: sa.Dialect) -> type[Exception]:
    assert driver.dbapi is not None
    kind: type[Exception] = driver.dbapi.Error
    return kind


def translated(error: BaseException, sql_dialect: Dialect, driver: sa.Dialect) -> StoreError | None:
    """Translate an error of SQLAlchemy or its driver; None if it is neither."""
    if isinstance(error, exc.DBAPIError):
        cause = error.orig
        if cause is None:
            return None
        failure = dbapi_error(cause, sql_dialect)
        if error.connection_invalidated and failure.fault is not Fault.UNAVAILABLE:
            return StoreUnavailable(str(failure), fault=Fault.UNAVAILABLE, code=failure.code)
        return failure
    return dbapi_error(error, sql_dialect) if isinstance(error, driver_error(driver)) else None


def unusable(error: BaseException) -> StoreError:
    return StoreError(
        f"SQLAlchemy: {type(error).__name__}: the transaction cannot be used any more; roll it back.",
        fault=Fault.ABORTED,
    )


class Wire(Protocol):
    """How statements travel. Raises StoreError, or errors of SQLAlchemy or the driver."""

    def begin(self, statements: Statements) -> list[Result]: ...
    def execute(self, statement: Statement) -> Result: ...
    def commit(self, statements: Statements) -> list[Result]:
        """Run the last statements before SQLAlchemy's COMMIT, which is a no-op if it is already sent here."""
        ...

    def is_over(self) -> bool:
        """Whether the transaction has ended, so that the driver's rollback will do nothing. Asked before it."""
        ...

    def rolled_back(self) -> None: ...

    @property
    def in_use(self) -> bool:
        """Whether a thread or task that a handler did not wait for uses the connection; then it must not be reused."""
        ...

    def give_up(self) -> None: ...

    def end(self, dialect: Dialect) -> None:
        """Send COMMIT where SQLAlchemy's own would hide the server's answer."""
        ...


class Watched:
    """Through SQLAlchemy, whose listeners and log see every statement."""

    def __init__(self, raw: sa.Connection, style: Style) -> None:
        self._raw = raw
        self._style: Style = style

    def begin(self, statements: Statements) -> list[Result]:
        return [self.execute(statement) for statement in statements]

    def execute(self, statement: Statement) -> Result:
        sql, names = native(statement.sql, self._style)
        result = self._raw.exec_driver_sql(sql, tuple(statement.params[name] for name in names))
        rows = plain_rows(result.fetchall()) if result.returns_rows else []
        return check_closed(statement, Result(rows, result.rowcount))

    def commit(self, statements: Statements) -> list[Result]:
        results = [self.execute(statement) for statement in statements or (PROBE,)]
        return results if statements else []

    def is_over(self) -> bool:
        return False

    def rolled_back(self) -> None: ...

    @property
    def in_use(self) -> bool:
        return False

    def give_up(self) -> None: ...

    def end(self, dialect: Dialect) -> None:
        raw = self._raw
        if dialect.name == "mysql":
            return  # MySQL's answer says nothing more
        if raw.dialect.driver == "asyncpg":
            from asyncpg import InterfaceError, InternalClientError, PostgresError

            adapted: Any = raw.connection.dbapi_connection
            try:
                check_committed(adapted.run_async(_commit))
            except (PostgresError, InterfaceError, InternalClientError) as error:
                raise dbapi_error(error, dialect) from error
            return
        cursor: Any = raw.connection.cursor()
        try:
            cursor.execute("COMMIT")
            check_committed(getattr(cursor, "statusmessage", None))
        finally:
            cursor.close()


def _commit(driver: Any) -> Any:
    return driver.execute("COMMIT")


class Cursors(Watched):
    """Through a cursor of the driver."""

    def execute(self, statement: Statement) -> Result:
        sql, names = native(statement.sql, self._style)
        cursor: Any = self._raw.connection.cursor()
        try:
            cursor.execute(sql, tuple(statement.params[name] for name in names))
            rows = plain_rows(cursor.fetchall()) if cursor.description else []
            return check_closed(statement, Result(rows, cursor.rowcount))
        finally:
            cursor.close()


class Libpq:
    """Through libpq's pipeline, on psycopg's connection."""

    def __init__(self, raw: sa.Connection, dialect: Dialect) -> None:
        from txbox.connections import libpq

        self._libpq = libpq
        self._raw = raw
        pipeline: libpq.Pipeline | None = raw.info.get(_INFO)
        if pipeline is None:
            driver: Any = raw.connection.driver_connection
            pipeline = raw.info[_INFO] = libpq.Pipeline(
                driver,
                # engines behind a pooler switch off psycopg's prepared statements
                prepare=driver.prepare_threshold is not None,
                translate=lambda error: dbapi_error(error, dialect),
            )
        self._pipeline = pipeline
        self._use = libpq.ExclusiveUse(raw.connection.driver_connection)
        self._deallocates: bool | None = None

    def _wait(self, steps: Any) -> list[Result]:
        adapted: Any = self._raw.connection.dbapi_connection
        if not self._raw.dialect.is_async:
            return cast("list[Result]", self._use.wait(steps))

        def wait(_driver: Any) -> Any:
            return self._use.wait_async(steps)

        return cast("list[Result]", adapted.run_async(wait))

    def begin(self, statements: Statements) -> list[Result]:
        return self._wait(self._pipeline.send(statements, before=self._libpq.BEGIN))

    def execute(self, statement: Statement) -> Result:
        return self._wait(self._pipeline.send((statement,)))[0]

    def commit(self, statements: Statements) -> list[Result]:
        return self._wait(self._pipeline.send(statements, after=self._libpq.COMMIT))

    def one_trip(self, statements: Statements) -> list[Result]:
        return self._wait(self._pipeline.one_trip(statements))

    @property
    def in_use(self) -> bool:
        return self._use.in_use()

    def give_up(self) -> None:
        if self._raw.dialect.is_async:
            adapted: Any = self._raw.connection.dbapi_connection

            def end(_driver: Any) -> Any:
                return self._use.end_other_async()

            adapted.run_async(end)
        else:
            self._use.end_other()

    def end(self, dialect: Dialect) -> None: ...

    def is_over(self) -> bool:
        driver: Any = self._raw.connection.driver_connection
        self._deallocates = self._libpq.deallocates(driver)
        # 0 is libpq's PQTRANS_IDLE
        return int(driver.pgconn.transaction_status) == 0

    def rolled_back(self) -> None:
        if self._deallocates is False:
            return
        self._pipeline.forget()
        if self._deallocates is None:
            # psycopg may have deallocated everything or nothing just now: make sure it is everything
            self._wait(self._pipeline.send((), after=self._libpq.DEALLOCATE))


def wire(raw: sa.Connection, dialect: Dialect, style: Style) -> Wire:
    """Return the fastest way that hides nothing from event listeners."""
    engine: Any = raw.engine
    # private attributes; a release without them has every statement watched
    if (
        getattr(raw, "_has_events", True)
        or getattr(engine, "_has_events", True)
        or getattr(raw, "_echo", True)
    ):
        return Watched(raw, style)
    if raw.dialect.driver in ("psycopg", "psycopg_async"):
        return Libpq(raw, dialect)
    return Cursors(raw, style)
