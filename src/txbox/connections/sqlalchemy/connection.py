"""A connection from an SQLAlchemy engine whose transactions txbox begins and ends, and the session handlers get.

Its methods are written once, in blocking calls; an async connection runs them inside SQLAlchemy's greenlet bridge.
A handler's Session is bound to txbox's connection and works in a savepoint. Its commit() and rollback() end the
savepoint, never the transaction.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import wraps
from types import CoroutineType
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

import sqlalchemy as sa
from sqlalchemy import event, exc
from sqlalchemy.ext import asyncio as sa_async

from txbox.connections.base import (
    RELEASE,
    ROLLBACK_TO,
    SAVEPOINT,
    begins_marked,
    handler_left,
    is_marked,
    not_released,
    refused_commit,
    savepoint_is_gone,
)
from txbox.connections.sqlalchemy.driver import (
    Libpq,
    Watched,
    Wire,
    autocommits,
    driver_error,
    style_of,
    translated,
    unusable,
    wire,
)
from txbox.errors import Fault, StoreError
from txbox.session import Connection, Raised, Result, Statement, Statements
from txbox.store.dialect import Dialect

T = TypeVar("T")
P = ParamSpec("P")

_READ_COMMITTED = Statement("isolation", "SET TRANSACTION ISOLATION LEVEL READ COMMITTED", {})


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
        self._enforce_later = False
        self._fatal = False
        self._watched = False

    @property
    def native(self) -> Any:
        """What the next handler call gets. The calls of one transaction share a session."""
        if self._maker is None:
            return self.bind
        if self._session is not None and (self._has_ended() or not _sync(self._session).is_active):
            # this transaction is lost, but the next call must not inherit what the last one left behind
            self._spoilt.append(self._session)
            self._session = self._shared = None
        if self._session is None:
            self._session = self._maker(
                bind=self.bind, join_transaction_mode="create_savepoint", twophase=False
            )
        self._shared = _sync(self._session).get_transaction()
        return self._session

    def _has_ended(self) -> bool:
        """Whether a call ended a session transaction that contained the work of earlier calls."""
        shared = self._shared
        return shared is not None and _sync(self._session).get_transaction() is not shared

    def watch(self, told: Callable[[str], None]) -> None:
        def sent(_conn: Any, _cursor: Any, statement: str, *_: Any) -> None:
            told(statement)

        def commits(_conn: Any) -> None:
            told("COMMIT")

        def rolls_back(_conn: Any) -> None:
            told("ROLLBACK")

        event.listen(self._raw, "before_cursor_execute", sent)
        event.listen(self._raw, "commit", commits)
        event.listen(self._raw, "rollback", rolls_back)

    def left(self) -> bool:
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

    @_bridged
    def prepare(self) -> None:
        """Request READ COMMITTED, even from an engine in autocommit; the pool resets it afterwards."""
        self._wire = wire(self._raw, self._dialect, style_of(self._raw.dialect))
        name = self._dialect.name
        # with libpq, BEGIN names the level itself
        always = name == "postgresql" and not isinstance(self._wire, Libpq)
        if always or (name != "sqlite" and autocommits(self._raw)):
            self._raw.execution_options(isolation_level="READ COMMITTED")

    @_bridged
    def execute(self, statement: Statement) -> Result:
        return self._execute(statement)

    def _execute(self, statement: Statement) -> Result:
        try:
            return self._wire.execute(statement)
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
            results = self._wire.begin(statements)
            self._watched = begins_marked(self._raw.connection.driver_connection, statements)
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
            # nobody uses its objects any more
            _sync(self._session).expire_on_commit = False
        self._end_calls()
        try:
            results = self._wire.commit(statements)
        except self._errors as error:
            raise self._failure(error) from _reason(error)
        try:
            if (
                self._transaction.is_active
            ):  # otherwise the next line reports that a handler ended it
                self._wire.end(self._dialect)
            self._transaction.commit()
        except self._errors as error:
            found = self._failure(error)
            found.definite = refused_commit(found)
            raise found from _reason(error)
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
            found = self.translate(error)
            if found is not None and _savepoint_gone(error, found):
                raise handler_left("its session's savepoint is gone") from error
            raise Raised(error, found, self.lost) from error

    @_bridged
    def rollback(self) -> None:
        try:
            over = not self.lost and self._wire.is_over()
            if self._transaction.is_active:
                self._transaction.rollback()
            elif not self.lost:
                # COMMIT was refused, in which case SQLite keeps the transaction open
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
            if not self.lost and self._wire.taken:
                self._close()
                return
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
        # of a cancelled handler, whose locks the server would otherwise hold
        task = asyncio.get_running_loop().create_task(self._closed())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    @_bridged
    def _closed(self) -> None:
        self._close()

    def _close(self) -> None:
        if not self._raw.closed:
            self._wire.give_up()
            self._raw.invalidate()
        self._ended()
        self._raw.close()

    def _failure(self, error: BaseException) -> StoreError:
        found = error if isinstance(error, StoreError) else self.translate(error)
        if found is None:
            found = (
                handler_left("it closed its connection") if self._raw.closed else unusable(error)
            )
        self._fatal = self._fatal or found.fault is Fault.UNAVAILABLE
        return found


def _reason(error: BaseException) -> BaseException | None:
    """Return the cause to report for an error. One that is already translated keeps its own."""
    return error.__cause__ if isinstance(error, StoreError) else error


def _in_sqlite_transaction(raw: sa.Connection) -> bool:
    driver: Any = raw.connection.driver_connection
    return bool(driver.in_transaction)


def _savepoint_gone(error: BaseException, found: StoreError) -> bool:
    """Whether a session could not release its savepoint because it no longer exists."""
    return (
        savepoint_is_gone(found)
        and isinstance(error, exc.StatementError)
        and (error.statement or "").startswith("RELEASE SAVEPOINT")
    )


def _sync(session: Any) -> Any:
    return getattr(session, "sync_session", session)


def _undone() -> StoreError:
    return StoreError(
        "A handler ended its session's transaction with rollback() or close(), and undid what other messages of its "
        "batch had written: they run again, each on its own.",
        fault=Fault.OTHER,
    )
