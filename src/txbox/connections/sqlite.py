"""SQLite through sqlite3 and aiosqlite: a URL, or the caller's connection.

txbox's own connections use sqlite3's legacy transaction control with an implicit BEGIN IMMEDIATE. So
whatever a handler writes after its own rollback() starts a new transaction, which close refuses,
instead of being committed statement by statement.

Source: docs/decisions/0031-coroutines.md
"""

from __future__ import annotations

import asyncio
import os
import re
import sqlite3
import threading
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from operator import attrgetter
from typing import Any
from urllib.parse import unquote

from txbox.connections.base import (
    RELEASE,
    ROLLBACK_TO,
    SAVEPOINT,
    Database,
    Executor,
    Pool,
    async_driver,
    handler_left,
    is_marked,
    not_in_transaction,
    not_released,
    of_valid_sql,
    refused_commit,
    store_error,
    sync_async_mismatch,
)
from txbox.connections.settings import Settings
from txbox.errors import ConfigurationError, Fault, StoreError
from txbox.session import (
    Connection,
    Lasts,
    OnStatement,
    Result,
    SettingChange,
    Statement,
    Statements,
)
from txbox.store.dialect import Dialect, dialect, native

# SQLITE_TRANSACTION, of an authorizer: BEGIN, COMMIT or ROLLBACK
_TRANSACTION = 22
_VALUE = re.compile(r"x?'(?:[^']|'')*'|(?<![\w.\"])-?\d+(?:\.\d+)?(?![\w\"])", re.IGNORECASE)
# how long BEGIN IMMEDIATE waits for the transaction of another connection
_BUSY_TIMEOUT_S = 10.0
# what a connection that does nothing needs to end
_QUIET_END_S = 0.1
_WATCHED_STEPS = 100_000

_NAME = attrgetter("name")
_SENDS = ("execute", "executemany", "executescript")
# what a handler can set without a statement
_SETTERS = (
    "create_function", "create_aggregate", "create_window_function", "create_collation", "set_authorizer",
    "set_progress_handler", "set_trace_callback", "enable_load_extension", "load_extension", "setlimit", "setconfig",
)  # fmt: skip


def open_url(url: str, *, schema: str | None = None) -> SqliteDatabase:
    """Prepare to open a file: sqlite:///relative.db or sqlite:////absolute.db."""
    _, _, rest = url.partition("://")
    path = unquote(rest.removeprefix("/"))
    if path in ("", ":memory:"):
        raise ConfigurationError(
            "An in-memory SQLite database belongs to a single connection, and txbox needs several: "
            "use a file, sqlite:///name.db."
        )
    if not rest.startswith("/") or "?" in rest:
        raise ConfigurationError(
            f"The URL {url} has a host or options: use sqlite:///relative.db or sqlite:////absolute.db."
        )
    return SqliteDatabase(url, path, dialect("sqlite", schema))


def open_object(target: Any, *, schema: str | None = None) -> SqliteDatabase:  # noqa: ARG001 - every adapter takes it
    """Refuse a single connection: an app needs one per handler that runs."""
    raise ConfigurationError(
        f"App() cannot use this {type(target).__qualname__}: pass a URL, sqlite:///name.db; "
        "a single connection belongs in Inbox.accept(tx, …)."
    )


class SqliteDatabase(Database):
    """Where connections to one SQLite file come from."""

    check = "that the directory exists and that the file can be written"

    def __init__(self, name: str, path: str, sql_dialect: Dialect) -> None:
        super().__init__(name, None, sql_dialect)
        self.path = path
        self.sync = _Connections(self, is_async=False)
        self.asynchronous = _Connections(self, is_async=True)


class _Connections(Pool["SqliteConnection"]):
    def __init__(self, database: SqliteDatabase, *, is_async: bool) -> None:
        super().__init__(is_async=is_async)
        self._database = database

    async def _opened(self) -> SqliteConnection:
        database = self._database
        aiosqlite = async_driver("aiosqlite", "SQLite") if self.is_async else None
        try:
            raw = _opened(database.path) if aiosqlite is None else await _in_thread(database.path)
        except sqlite3.Error as error:
            raise await database.unreachable(error, _code_of(error)) from error
        if aiosqlite is None:
            return SqliteConnection(raw, database)
        driver = aiosqlite.Connection(lambda: raw, 64)
        # an app that was not closed must not keep the interpreter from exiting
        driver._thread.daemon = True  # noqa: SLF001 - has no public name
        # with a connection it starts without waiting: no cancellation here can lose what was opened
        driver._connection = raw  # noqa: SLF001 - has no public name
        return SqliteConnection(raw, database, await driver)


async def _in_thread(path: str) -> _Heard:
    """Open in a thread. If the caller is cancelled, the new connection is closed.

    Not in the driver's thread: after a failure it would reply to a loop that may be closed by then.
    """
    executor = ThreadPoolExecutor(1, "txbox open")
    opening = executor.submit(_opened, path)
    executor.shutdown(wait=False)
    try:
        return await asyncio.wrap_future(opening)
    except asyncio.CancelledError:
        opening.add_done_callback(_close_opened)
        raise


def _close_opened(opening: Future[_Heard]) -> None:
    if not opening.cancelled() and opening.exception() is None:
        opening.result().close()


def _opened(path: str) -> _Heard:
    _make_private(path)
    raw = sqlite3.connect(
        path,
        timeout=_BUSY_TIMEOUT_S,
        isolation_level="IMMEDIATE",
        check_same_thread=False,
        factory=_Heard,
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
    """Create a missing file readable by its owner only: payloads may be personal. Journals inherit its mode."""
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    except OSError:
        # it exists, is not a file, or cannot be created: SQLite will say which
        return


def _write_ahead(raw: sqlite3.Connection) -> None:
    try:
        raw.execute("PRAGMA journal_mode = WAL")
    except sqlite3.OperationalError as error:
        # the process with the lock sets the mode, or the next connection does
        if not error.sqlite_errorname.startswith("SQLITE_BUSY"):
            raise


class _Heard(sqlite3.Connection):
    """A connection whose handler is heard: what it sends, and what it sets by other means."""

    # as the driver's own, for inspection
    __module__, __qualname__ = "sqlite3", "Connection"
    settings: Settings | None = None
    sets: Callable[[SettingChange | None], None] | None = None
    # needs no check
    quiet: AbstractSet[str] = frozenset(("BEGIN IMMEDIATE",))

    def sent(self, text: str) -> None:
        if self.settings is not None and self.sets is not None:
            self.quiet = self.settings.quiet
            if (change := self.settings.of(text)) is not None:
                self.sets(change)

    def close(self) -> None:
        # a statement that is not read to its end, which a traceback may keep, keeps a closed connection's transaction
        with suppress(sqlite3.Error):
            self.rollback()
        super().close()

    def execute(self, sql: str, *args: Any) -> sqlite3.Cursor:
        if sql not in self.quiet:
            self.sent(sql)
        return super().execute(sql, *args)

    def executemany(self, sql: str, *args: Any) -> sqlite3.Cursor:
        self.sent(sql)
        return super().executemany(sql, *args)

    def executescript(self, sql: str) -> sqlite3.Cursor:
        self.sent(sql)
        return super().executescript(sql)

    def cursor(self, factory: Any = sqlite3.Cursor) -> Any:
        return super().cursor(_hearing(factory) if isinstance(factory, type) else factory)


@cache
def _hearing(kind: Any) -> Any:
    """Return a subclass of a cursor class that tells its connection what it sends."""

    def sending(name: str) -> Any:
        send = getattr(kind, name)

        def method(self: Any, sql: str, *args: Any) -> Any:
            if sql not in self.connection.quiet:
                self.connection.sent(sql)
            return send(self, sql, *args)

        return method

    methods = {name: sending(name) for name in _SENDS}
    return type(kind.__name__, (kind,), {"__module__": kind.__module__, **methods})


def _setting(name: str) -> Any:
    call = getattr(sqlite3.Connection, name)

    def method(self: Any, *args: Any, **options: Any) -> Any:
        if self.sets is not None:
            self.sets(SettingChange(name, Lasts.CONNECTION))
        return call(self, *args, **options)

    return method


for _name in _SETTERS:
    if hasattr(sqlite3.Connection, _name):
        setattr(_Heard, _name, _setting(_name))


class SqliteConnection(Connection):
    """A connection whose transactions txbox begins and ends.

    Args:
        driver: aiosqlite's connection over `raw`, whose thread then runs the statements. It is not
            bound to an event loop.
    """

    def __init__(self, raw: _Heard, database: SqliteDatabase, driver: Any = None) -> None:
        self.native = raw if driver is None else driver
        self.is_async = driver is not None
        self._raw = raw
        self._dialect = database.dialect
        raw.settings, raw.sets = database.handler_settings, self.sets
        self._watched = self._discarded = False

    def watch(self, on_statement: OnStatement) -> None:
        def authorize(action: int, name: str | None, *_: str | None) -> int:
            if action != _TRANSACTION:
                return sqlite3.SQLITE_OK
            try:
                on_statement(str(name), None)
            except Exception:  # noqa: BLE001
                # SQLite ignores exceptions of an authorizer: refuse the statement
                return sqlite3.SQLITE_DENY
            return sqlite3.SQLITE_OK

        # what is traced has its values filled in
        self._raw.set_trace_callback(
            lambda sql: on_statement(_VALUE.sub("?", sql), _VALUE.findall(sql))
        )
        self._raw.set_authorizer(authorize)
        # an exception ends the statement
        self._raw.set_progress_handler(lambda: on_statement("", None), _WATCHED_STEPS)

    def has_ended(self) -> bool:
        # only its user closes a connection to a file
        return self._watched and (self.lost or not is_marked(self._raw))

    @property
    def lost(self) -> bool:
        if not self._discarded:
            try:
                self._raw.total_changes  # noqa: B018 - the only attribute that tells
            except sqlite3.ProgrammingError:
                return True
        return self._discarded

    def usable(self) -> bool:
        return not self.lost and not self._raw.in_transaction

    def translate(self, error: BaseException) -> StoreError | None:
        if not isinstance(error, sqlite3.Error):
            return None
        failure = store_error(error, self._dialect, code=_code_of(error))
        if failure.fault is Fault.GUARD:
            # a handler can trigger close's error code with its own data
            failure.fault = Fault.OTHER
        return failure

    async def execute(self, statement: Statement) -> Result:
        self._check_open()
        return (await self._sent((statement,)))[0]

    async def _sent(self, statements: Statements) -> list[Result]:
        try:
            return [
                await _executed(self.native, statement, self.is_async) for statement in statements
            ]
        except sqlite3.Error as error:
            raise self._failed(error) from error

    async def alone(self, statement: Statement) -> Result:
        self._renew()
        result = await self.execute(statement)
        if self._raw.in_transaction:
            # the driver began one, as it does before a statement that writes
            await self.commit(())
        return result

    async def begin(self, statements: Statements) -> list[Result]:
        self._check_open()
        self._renew()
        try:
            begun = self.native.execute("BEGIN IMMEDIATE")
            if self.is_async:
                await begun
        except sqlite3.Error as error:
            raise self._failed(error) from error
        # a transaction that claims nothing has no guard
        self._watched = "arm" in map(_NAME, statements)
        results = await self._sent(statements)
        self.changed = None
        return results

    async def savepoint(self) -> None:
        # outside a transaction it would begin one, and releasing it would commit
        self._check_transaction()
        await self._savepoint(SAVEPOINT)

    async def release_savepoint(self) -> None:
        await self._savepoint(RELEASE)

    async def rollback_to_savepoint(self) -> None:
        await self._savepoint(ROLLBACK_TO)

    async def _savepoint(self, statement: Statement) -> None:
        self._check_open()
        try:
            sent = self.native.execute(statement.sql)
            if self.is_async:
                await sent
        except sqlite3.Error as error:
            raise not_released(self._failed(error), self.lost) from error

    async def commit(self, statements: Statements) -> list[Result]:
        self._check_transaction()
        results = await self._sent(statements)
        try:
            committed = self.native.commit()
            if self.is_async:
                await committed
        except sqlite3.Error as error:
            failure = self._failed(error)
            # after a failed write, what the next connection reads is up to the disk
            failure.definite = refused_commit(failure)
            raise failure from error
        return results

    async def rollback(self) -> None:
        self._check_open()
        try:
            rolled_back = self.native.rollback()
            if self.is_async:
                await rolled_back
        except sqlite3.Error as error:
            raise self._failed(error) from error

    def discard(self) -> None:
        if self._discarded:
            return
        self._discarded = True
        if not self.is_async:
            self._raw.close()
            return
        # from a thread without an event loop, or the driver would reply to a loop that may be closed by then
        threading.Thread(target=self._end, name="txbox discard", daemon=True).start()

    def _end(self) -> None:
        """Have aiosqlite finish its queue, roll back, close and end its thread."""
        self.native.stop()
        driver = self.native._thread  # noqa: SLF001 - has no public name
        # an interruption fails the rollback, too, where a statement is not read to its end
        driver.join(_QUIET_END_S)
        try:
            while driver.is_alive():
                # abandoned statements must not keep their locks; a queued one may start later
                self._raw.interrupt()
                driver.join(0.01)
        except sqlite3.ProgrammingError:
            # closed: the driver is about to end
            return
        # a reply to a closed loop may have ended the driver early
        self._raw.close()

    def _check_open(self) -> None:
        # only its user closes a connection to a file
        if self.lost:
            raise handler_left("it closed the connection")

    def _check_transaction(self) -> None:
        self._check_open()
        if not self._raw.in_transaction:
            # a full disk and other errors also roll back by themselves, and a handler may swallow them
            raise handler_left("it was rolled back or committed before its end")

    def restore(self) -> None:
        self._raw.row_factory = None
        self._raw.text_factory = str

    def _renew(self) -> None:
        """Undo what an earlier handler set on the connection."""
        if self._raw.isolation_level != "IMMEDIATE":
            self._raw.isolation_level = "IMMEDIATE"
        self.restore()

    def _failed(self, error: sqlite3.Error) -> StoreError:
        return _failure(error, self._dialect)


class Borrowed(Executor):
    """The caller's connection, in the caller's transaction."""

    async def _execute(self, statement: Statement) -> Result:
        factory = self._tx.text_factory
        try:
            if factory is not str:
                self._tx.text_factory = str
            return await _executed(self._tx, statement, self.is_async)
        except sqlite3.Error as error:
            raise _failure(error, self.dialect) from error
        finally:
            if factory is not str:
                self._tx.text_factory = factory


def borrow(tx: Any, *, is_async: bool, schema: str | None = None) -> Borrowed:
    if isinstance(tx, sqlite3.Connection) is is_async:
        raise sync_async_mismatch(tx, wants="sync" if is_async else "async")
    _check_transaction(tx)
    return Borrowed(tx, dialect("sqlite", schema), is_async=is_async)


def _check_transaction(tx: Any) -> None:
    # `autocommit` exists since Python 3.12; -1 is its legacy value
    alone = getattr(tx, "autocommit", -1) is True or tx.isolation_level is None
    if alone and not tx.in_transaction:
        raise not_in_transaction(tx)


async def _executed(connection: Any, statement: Statement, is_async: bool) -> Result:
    sql, names = native(statement.sql, "qmark")
    # not of a class that the connection's own `cursor` may return
    cursor: Any = await connection.cursor() if is_async else sqlite3.Cursor(connection)
    try:
        cursor.row_factory = None
        sent = cursor.execute(sql, list(map(statement.params.__getitem__, names)))
        if is_async:
            await sent
        if cursor.description is None:
            return Result((), cursor.rowcount)
        fetched = cursor.fetchall()
        rows = list(await fetched) if is_async else fetched
        return Result(rows, len(rows))
    finally:
        closing = cursor.close()
        if is_async:
            await closing


def _failure(error: sqlite3.Error, dialect: Dialect) -> StoreError:
    """Translate an error of one of txbox's own statements."""
    return of_valid_sql(store_error(error, dialect, code=_code_of(error)))


def _code_of(error: sqlite3.Error) -> str | None:
    return getattr(error, "sqlite_errorname", None)
