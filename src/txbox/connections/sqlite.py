"""SQLite by sqlite3 and aiosqlite: a URL, or the caller's connection."""

from __future__ import annotations

import asyncio
import os
import sqlite3
from importlib import import_module
from typing import Any
from urllib.parse import unquote

from txbox.connections.base import Idle, not_in_transaction, unreachable, wrong_colour
from txbox.connections.sqlite_connection import (
    AsyncSqliteConnection,
    SqliteConnection,
    executed,
    executed_async,
    own_failure,
)
from txbox.errors import ConfigurationError, StoreUnavailable
from txbox.steps import Result, Statement
from txbox.store.dialect import Dialect, dialect

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
        self._sync = _Connections(self)
        self._async = _AsyncConnections(self)

    @property
    def sync(self) -> _Connections:
        return self._sync

    @property
    def asynchronous(self) -> _AsyncConnections:
        return self._async

    def close(self) -> None:
        self._sync.idle.clear()
        self._async.idle.clear()

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


class Borrowed:
    """The caller's connection, in the caller's transaction."""

    def __init__(self, tx: sqlite3.Connection, sql_dialect: Dialect) -> None:
        self._tx = tx
        self.dialect = sql_dialect

    def execute(self, statement: Statement) -> Result:
        try:
            return executed(self._tx, statement)
        except sqlite3.Error as error:
            raise own_failure(error, self.dialect) from error


class AsyncBorrowed:
    """The async twin of `Borrowed`."""

    def __init__(self, tx: Any, sql_dialect: Dialect) -> None:
        self._tx = tx
        self.dialect = sql_dialect

    async def execute(self, statement: Statement) -> Result:
        try:
            return await executed_async(self._tx, statement)
        except sqlite3.Error as error:
            raise own_failure(error, self.dialect) from error


def borrow(tx: Any, *, schema: str | None = None) -> Borrowed:
    if not isinstance(tx, sqlite3.Connection):
        raise wrong_colour(tx, wants="async")
    _check_transaction(tx)
    return Borrowed(tx, dialect("sqlite", schema))


def borrow_async(tx: Any, *, schema: str | None = None) -> AsyncBorrowed:
    if isinstance(tx, sqlite3.Connection):
        raise wrong_colour(tx, wants="sync")
    _check_transaction(tx)
    return AsyncBorrowed(tx, dialect("sqlite", schema))


def _check_transaction(tx: Any) -> None:
    # `autocommit` came with Python 3.12; its legacy value is -1
    alone = getattr(tx, "autocommit", -1) is True or tx.isolation_level is None
    if alone and not tx.in_transaction:
        raise not_in_transaction(tx)


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
