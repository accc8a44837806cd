"""SQLite by sqlite3 and aiosqlite: a URL, or the caller's connection.

txbox's own connections stay under sqlite3's legacy transaction control, with implicit BEGIN IMMEDIATE:
what a handler writes after its own rollback() begins a new transaction, which close refuses, and is not
committed statement by statement.

Source: docs/decisions/0002-steps.md
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
import threading
from collections.abc import Sequence
from importlib import import_module
from typing import Any
from urllib.parse import unquote

from txbox.connections.base import (
    RELEASE,
    ROLLBACK_TO,
    SAVEPOINT,
    Idle,
    handler_left,
    is_marked,
    not_in_transaction,
    not_released,
    of_own,
    refused_commit,
    store_error,
    sync_async_mismatch,
    unreachable,
)
from txbox.errors import ConfigurationError, Fault, StoreError, StoreUnavailable
from txbox.steps import Result, Statement
from txbox.store.dialect import Dialect, dialect, native

# how long BEGIN IMMEDIATE waits for the transaction of another connection
_BUSY_TIMEOUT_S = 10.0


def open_url(url: str, *, schema: str | None = None) -> SqliteDatabase:
    """Prepare to open a file: sqlite:///relative.db or sqlite:////absolute.db."""
    _, _, rest = url.partition("://")
    path = unquote(rest.removeprefix("/"))
    if path in ("", ":memory:"):
        raise ConfigurationError(
            "An SQLite database in memory belongs to one connection, and txbox needs several: "
            "name a file, sqlite:///name.db."
        )
    if not rest.startswith("/") or "?" in rest:
        raise ConfigurationError(
            f"The URL {url} has a host or options: write sqlite:///relative.db or sqlite:////absolute.db."
        )
    return SqliteDatabase(url, path, dialect("sqlite", schema))


def open_object(target: Any, *, schema: str | None = None) -> SqliteDatabase:  # noqa: ARG001 - every adapter takes it
    """Refuse a single connection: an app needs as many as it runs handlers."""
    raise ConfigurationError(
        f"App() cannot use a {type(target).__qualname__}: pass a URL, sqlite:///name.db; "
        "a single connection belongs into Inbox.accept(tx, …)."
    )


class SqliteDatabase:
    """Where connections to one SQLite file come from."""

    def __init__(self, name: str, path: str, sql_dialect: Dialect) -> None:
        self.name = name
        self.schema = None
        self.path = path
        self.dialect = sql_dialect
        self.sync = _Connections(self)
        self.asynchronous = _AsyncConnections(self)

    def close(self) -> None:
        self.sync.idle.clear()
        self.asynchronous.idle.clear()

    async def close_async(self) -> None:
        self.close()


class _Connections:
    def __init__(self, database: SqliteDatabase) -> None:
        self._database = database
        self.idle: Idle[SqliteConnection] = Idle()

    def acquire(self) -> SqliteConnection:
        waiting = self.idle.take()
        if waiting is not None:
            return waiting
        try:
            return SqliteConnection(_opened(self._database.path), self._database.dialect)
        except sqlite3.Error as error:
            raise _unreachable(error, self._database) from error

    def release(self, connection: SqliteConnection) -> None:
        self.idle.give(connection)


class _AsyncConnections:
    def __init__(self, database: SqliteDatabase) -> None:
        self._database = database
        self.idle: Idle[AsyncSqliteConnection] = Idle()

    async def acquire(self) -> AsyncSqliteConnection:
        # a connection is bound to its thread, to no event loop: any loop may take it
        waiting = self.idle.take()
        if waiting is not None:
            return waiting
        aiosqlite = _aiosqlite()
        try:
            # not by the driver: after a failure its thread answers to a loop that may be closed by then
            raw = await asyncio.to_thread(_opened, self._database.path)
        except sqlite3.Error as error:
            raise _unreachable(error, self._database) from error
        driver = aiosqlite.Connection(lambda: raw, 64)
        # an app that was not closed must not keep the interpreter from exiting
        driver._thread.daemon = True  # noqa: SLF001 - has no public name
        return AsyncSqliteConnection(await driver, raw, self._database.dialect)

    async def release(self, connection: AsyncSqliteConnection) -> None:
        self.idle.give(connection)


def _opened(path: str) -> sqlite3.Connection:
    _make_private(path)
    raw = sqlite3.connect(
        path, timeout=_BUSY_TIMEOUT_S, isolation_level="IMMEDIATE", check_same_thread=False
    )
    try:
        raw.execute("PRAGMA foreign_keys = ON")
        raw.execute("PRAGMA synchronous = FULL")
        if raw.execute("PRAGMA journal_mode").fetchone()[0] != "wal":
            _write_ahead(raw)
    except sqlite3.Error:
        raw.close()
        raise
    return raw


def _make_private(path: str) -> None:
    """Make a file that is not there for its owner alone: payloads may be personal. Journals take its mode over."""
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    except OSError:
        # it is there, or no file, or cannot be made: SQLite says which
        return


def _write_ahead(raw: sqlite3.Connection) -> None:
    try:
        raw.execute("PRAGMA journal_mode = WAL")
    except sqlite3.OperationalError as error:
        # whoever holds the file sets the mode itself, or the next connection does
        if not error.sqlite_errorname.startswith("SQLITE_BUSY"):
            raise


class _Sqlite:
    """What the sync and the async connection share."""

    def __init__(self, raw: sqlite3.Connection, dialect: Dialect) -> None:
        self._raw = raw
        self._dialect = dialect
        self._watched = False

    def left(self) -> bool:
        # nobody but its user closes a connection to a file
        return self._watched and (self.lost or not is_marked(self._raw))

    def _watch(self, statements: Sequence[Statement]) -> None:
        # a transaction that claims nothing has no guard to look for
        self._watched = any(statement.name == "arm" for statement in statements)

    @property
    def lost(self) -> bool:
        return _closed(self._raw)

    def translate(self, error: BaseException) -> StoreError | None:
        if not isinstance(error, sqlite3.Error):
            return None
        found = store_error(error, self._dialect, code=getattr(error, "sqlite_errorname", None))
        if found.fault is Fault.GUARD:
            # a handler meets the code of close with data of its own
            found.fault = Fault.OTHER
        return found

    def _check_open(self) -> None:
        # nobody but its user closes a connection to a file
        if self.lost:
            raise handler_left("it closed the connection")

    def _renew(self) -> None:
        """Undo what an earlier handler set on the connection."""
        if self._raw.isolation_level != "IMMEDIATE":
            self._raw.isolation_level = "IMMEDIATE"
        self._raw.row_factory = None
        self._raw.text_factory = str

    def _check_transaction(self) -> None:
        self._check_open()
        if not self._raw.in_transaction:
            # a full disk and other errors roll back by themselves as well, and a handler may swallow them
            raise handler_left("it was rolled back or committed before its end")

    def _failed(self, error: sqlite3.Error) -> StoreError:
        return _own_failure(error, self._dialect)

    def _commit_failed(self, error: sqlite3.Error) -> StoreError:
        found = self._failed(error)
        # after a failed write the disk decides what the next connection will read
        found.definite = refused_commit(found)
        return found


class SqliteConnection(_Sqlite):
    """A sync connection whose transactions txbox begins and ends."""

    def __init__(self, raw: sqlite3.Connection, dialect: Dialect) -> None:
        super().__init__(raw, dialect)
        self.native = raw

    def execute(self, statement: Statement) -> Result:
        self._check_open()
        try:
            return _executed(self._raw, statement)
        except sqlite3.Error as error:
            raise self._failed(error) from error

    def read(self, statement: Statement) -> Result:
        self._renew()
        return self.execute(statement)

    def begin(self, statements: Sequence[Statement]) -> list[Result]:
        self._check_open()
        self._renew()
        try:
            self._raw.execute("BEGIN IMMEDIATE")
        except sqlite3.Error as error:
            raise self._failed(error) from error
        self._watch(statements)
        return [self.execute(statement) for statement in statements]

    def savepoint(self) -> None:
        # outside of a transaction it would begin one, and its release would commit
        self._check_transaction()
        self._savepoint(SAVEPOINT)

    def release_savepoint(self) -> None:
        self._savepoint(RELEASE)

    def rollback_to_savepoint(self) -> None:
        self._savepoint(ROLLBACK_TO)

    def _savepoint(self, statement: Statement) -> None:
        self._check_open()
        try:
            self._raw.execute(statement.sql)
        except sqlite3.Error as error:
            raise not_released(self._failed(error), self.lost) from error

    def commit(self, statements: Sequence[Statement]) -> list[Result]:
        self._check_transaction()
        results = [self.execute(statement) for statement in statements]
        try:
            self._raw.commit()
        except sqlite3.Error as error:
            raise self._commit_failed(error) from error
        return results

    def rollback(self) -> None:
        self._check_open()
        try:
            self._raw.rollback()
        except sqlite3.Error as error:
            raise self._failed(error) from error

    def discard(self) -> None:
        self._raw.close()


class AsyncSqliteConnection(_Sqlite):
    """The async twin of `SqliteConnection`; its statements run in aiosqlite's thread."""

    def __init__(self, driver: Any, raw: sqlite3.Connection, dialect: Dialect) -> None:
        super().__init__(raw, dialect)
        self.native = driver
        self._discarded = False

    @property
    def lost(self) -> bool:
        return self._discarded or _closed(self._raw)

    async def execute(self, statement: Statement) -> Result:
        self._check_open()
        try:
            return await _executed_async(self.native, statement)
        except sqlite3.Error as error:
            raise self._failed(error) from error

    async def read(self, statement: Statement) -> Result:
        self._renew()
        return await self.execute(statement)

    async def begin(self, statements: Sequence[Statement]) -> list[Result]:
        self._check_open()
        self._renew()
        try:
            await self.native.execute("BEGIN IMMEDIATE")
        except sqlite3.Error as error:
            raise self._failed(error) from error
        self._watch(statements)
        return [await self.execute(statement) for statement in statements]

    async def savepoint(self) -> None:
        self._check_transaction()
        await self._savepoint(SAVEPOINT)

    async def release_savepoint(self) -> None:
        await self._savepoint(RELEASE)

    async def rollback_to_savepoint(self) -> None:
        await self._savepoint(ROLLBACK_TO)

    async def _savepoint(self, statement: Statement) -> None:
        self._check_open()
        try:
            await self.native.execute(statement.sql)
        except sqlite3.Error as error:
            raise not_released(self._failed(error), self.lost) from error

    async def commit(self, statements: Sequence[Statement]) -> list[Result]:
        self._check_transaction()
        results = [await self.execute(statement) for statement in statements]
        self._check_open()
        try:
            await self.native.commit()
        except sqlite3.Error as error:
            raise self._commit_failed(error) from error
        return results

    async def rollback(self) -> None:
        self._check_open()
        try:
            await self.native.rollback()
        except sqlite3.Error as error:
            raise self._failed(error) from error

    def discard(self) -> None:
        if self._discarded:
            return
        self._discarded = True
        # Asked from a thread without an event loop: else the driver answers to a loop that may be
        # closed by then.
        threading.Thread(target=self._end, name="txbox discard", daemon=True).start()

    def _end(self) -> None:
        """Have the driver roll back, close and end its thread, after what it still has to do."""
        self.native.stop()
        driver = self.native._thread  # noqa: SLF001 - has no public name
        try:
            while driver.is_alive():
                # what nobody waits for must not keep its locks; a statement that is queued begins later
                self._raw.interrupt()
                driver.join(0.01)
        except sqlite3.ProgrammingError:
            # closed: the driver is about to end
            return
        # an answer to a closed loop may have ended the driver before its time
        self._raw.close()


class Borrowed:
    """The caller's connection, in the caller's transaction."""

    def __init__(self, tx: sqlite3.Connection, sql_dialect: Dialect) -> None:
        self._tx = tx
        self.dialect = sql_dialect

    def execute(self, statement: Statement) -> Result:
        try:
            return _executed(self._tx, statement)
        except sqlite3.Error as error:
            raise _own_failure(error, self.dialect) from error


class AsyncBorrowed:
    """The async twin of `Borrowed`."""

    def __init__(self, tx: Any, sql_dialect: Dialect) -> None:
        self._tx = tx
        self.dialect = sql_dialect

    async def execute(self, statement: Statement) -> Result:
        try:
            return await _executed_async(self._tx, statement)
        except sqlite3.Error as error:
            raise _own_failure(error, self.dialect) from error


def borrow(tx: Any, *, schema: str | None = None) -> Borrowed:
    if not isinstance(tx, sqlite3.Connection):
        raise sync_async_mismatch(tx, wants="async")
    _check_transaction(tx)
    return Borrowed(tx, dialect("sqlite", schema))


def borrow_async(tx: Any, *, schema: str | None = None) -> AsyncBorrowed:
    if isinstance(tx, sqlite3.Connection):
        raise sync_async_mismatch(tx, wants="sync")
    _check_transaction(tx)
    return AsyncBorrowed(tx, dialect("sqlite", schema))


def _check_transaction(tx: Any) -> None:
    # `autocommit` came with Python 3.12; its legacy value is -1
    alone = getattr(tx, "autocommit", -1) is True or tx.isolation_level is None
    if alone and not tx.in_transaction:
        raise not_in_transaction(tx)


def _executed(connection: sqlite3.Connection, statement: Statement) -> Result:
    sql, names = native(statement.sql, "qmark")
    cursor = connection.cursor()
    cursor.row_factory = None
    try:
        cursor.execute(sql, [statement.params[name] for name in names])
        if cursor.description is None:
            return Result((), cursor.rowcount)
        rows = cursor.fetchall()
        return Result(rows, len(rows))
    finally:
        cursor.close()


async def _executed_async(connection: Any, statement: Statement) -> Result:
    sql, names = native(statement.sql, "qmark")
    async with connection.cursor() as cursor:
        cursor.row_factory = None
        await cursor.execute(sql, [statement.params[name] for name in names])
        if cursor.description is None:
            return Result((), cursor.rowcount)
        rows = list(await cursor.fetchall())
        return Result(rows, len(rows))


def _closed(raw: sqlite3.Connection) -> bool:
    try:
        raw.total_changes  # noqa: B018 - the one attribute that says so
    except sqlite3.ProgrammingError:
        return True
    return False


def _own_failure(error: sqlite3.Error, dialect: Dialect) -> StoreError:
    """Put an error of one of txbox's statements into txbox's words."""
    return of_own(store_error(error, dialect, code=getattr(error, "sqlite_errorname", None)))


def _unreachable(error: sqlite3.Error, database: SqliteDatabase) -> StoreUnavailable:
    code = getattr(error, "sqlite_errorname", None)
    return unreachable(
        database.name,
        error,
        "that the directory exists and that the file can be written",
        code=code,
    )


def _aiosqlite() -> Any:
    try:
        return import_module("aiosqlite")
    except ModuleNotFoundError as error:
        raise ConfigurationError(
            "async handlers on SQLite need aiosqlite: run pip install 'txbox[sqlite]'."
        ) from error
