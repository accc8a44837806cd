"""An SQLite connection whose transactions txbox begins and ends.

They stay under sqlite3's legacy transaction control, with implicit BEGIN IMMEDIATE: what a handler
writes after its own rollback() begins a new transaction, which close refuses, and is not committed
statement by statement.

Source: docs/decisions/0002-steps.md
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Sequence
from typing import Any

from txbox.connections.base import (
    RELEASE,
    ROLLBACK_TO,
    SAVEPOINT,
    handler_left,
    is_marked,
    not_released,
    of_own,
    refused_commit,
    store_error,
)
from txbox.errors import Fault, StoreError
from txbox.steps import Result, Statement
from txbox.store.dialect import Dialect, native


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
        return own_failure(error, self._dialect)

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
            return executed(self._raw, statement)
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
            return await executed_async(self.native, statement)
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


def executed(connection: sqlite3.Connection, statement: Statement) -> Result:
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


async def executed_async(connection: Any, statement: Statement) -> Result:
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


def own_failure(error: sqlite3.Error, dialect: Dialect) -> StoreError:
    """Put an error of one of txbox's statements into txbox's words."""
    return of_own(store_error(error, dialect, code=getattr(error, "sqlite_errorname", None)))
