"""A connection of an SQLAlchemy engine's whose transactions txbox begins and ends, and the session its handlers get.

The async connection runs the same code as the sync one, through SQLAlchemy's own greenlet bridge. A handler's
Session is bound to txbox's connection and works in a savepoint: its commit() and rollback() end the
savepoint, never the transaction.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import sqlalchemy as sa
from sqlalchemy import exc
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
from txbox.steps import Raised, Result, Statement
from txbox.store.dialect import Dialect

T = TypeVar("T")

_READ_COMMITTED = Statement("isolation", "SET TRANSACTION ISOLATION LEVEL READ COMMITTED", {})


class SQLAlchemyConnection:
    """A connection of the engine's pool whose transactions txbox begins and ends."""

    def __init__(self, raw: sa.Connection, dialect: Dialect, maker: Any, bind: Any = None) -> None:
        self.raw = raw
        self._dialect = dialect
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
            driver_error(raw.dialect),
            StoreError,
        )
        self._wire: Wire = Watched(raw, style_of(raw.dialect))
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
        if self.raw.closed:
            # a connection that is lost is invalidated: only its user closes it
            return self._watched
        return self._watched and not self.lost and not self._is_marked()

    def _is_marked(self) -> bool:
        return is_marked(self.raw.connection.driver_connection)

    @property
    def lost(self) -> bool:
        return self._fatal or self.raw.closed or self.raw.invalidated

    def translate(self, error: BaseException) -> StoreError | None:
        return translated(error, self._dialect, self.raw.dialect)

    def prepare(self) -> None:
        """Ask for READ COMMITTED, also of an engine in autocommit; the pool resets it afterwards."""
        self._wire = wire(self.raw, self._dialect, style_of(self.raw.dialect))
        name = self._dialect.name
        # libpq's BEGIN names the level itself
        always = name == "postgresql" and not isinstance(self._wire, Libpq)
        if always or (name != "sqlite" and autocommits(self.raw)):
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
            self._watched = begins_marked(self.raw.connection.driver_connection, statements)
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
            found = self._failure(error)
            raise found from (error.__cause__ if found is error else error)
        try:
            if self._transaction.is_active:  # or the next line says that a handler has ended it
                self._wire.end(self._dialect)
            self._transaction.commit()
        except self._errors as error:
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
            if not self.lost and self._wire.taken:
                self.discard()
                return
            if self._enforce_later and not self.lost:
                self.raw.exec_driver_sql("PRAGMA foreign_keys = OFF")
                self.raw.rollback()
            self.raw.close()
        except exc.SQLAlchemyError:
            # the transaction was over already; the pool drops the connection
            self.raw.invalidate()

    def discard(self) -> None:
        if not self.raw.closed:
            self._wire.give_up()
            self.raw.invalidate()
        self._ended()
        self.raw.close()

    def _failure(self, error: BaseException) -> StoreError:
        found = error if isinstance(error, StoreError) else self.translate(error)
        if found is None:
            found = handler_left("it closed its connection") if self.raw.closed else unusable(error)
        self._fatal = self._fatal or found.fault is Fault.UNAVAILABLE
        return found


class AsyncSQLAlchemyConnection:
    """The async twin of `SQLAlchemyConnection`, which does the work inside SQLAlchemy's bridge."""

    def __init__(
        self,
        raw: sa_async.AsyncConnection,
        dialect: Dialect,
        maker: Any,
        closing: set[asyncio.Task[None]],
    ) -> None:
        inner = raw.sync_connection
        assert inner is not None
        self._raw = raw
        self._inner = SQLAlchemyConnection(inner, dialect, maker, raw)
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
