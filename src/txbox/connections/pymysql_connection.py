"""A MySQL or MariaDB connection whose transactions txbox begins and ends.

The server cannot be made to refuse a commit; that a handler left its transaction shows when close
releases a savepoint that is gone (error 1305).

Source: docs/decisions/0002-steps.md
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import pymysql
from pymysql.cursors import Cursor

from txbox.connections.base import (
    RELEASE,
    ROLLBACK_TO,
    SAVEPOINT,
    handler_left,
    not_released,
    refused_commit,
    store_error,
)
from txbox.errors import ConfigurationError, Fault, StoreError, StoreUnavailable
from txbox.steps import Result, Statement
from txbox.store.dialect import Dialect, native

# the server says goodbye with these, or the driver found it gone: the connection is of no more use
_GONE = frozenset(
    {"1053", "1077", "1152", "1158", "1159", "1160", "1161", "1184", "1927", "2006", "2013", "2014", "2055", "4031"}
)  # fmt: skip


class _Mysql:
    """What the sync and the async connection share."""

    def __init__(self, raw: Any, dialect: Dialect) -> None:
        self.native = raw
        self._dialect = dialect
        self._broken = False

    @property
    def lost(self) -> bool:
        return self._broken or not self._is_open

    @property
    def _is_open(self) -> bool:
        raise NotImplementedError

    def translate(self, error: BaseException) -> StoreError | None:
        if type(error).__module__.partition(".")[0] not in ("pymysql", "asyncmy"):
            return None
        found = self._failed(error)
        if found.fault is Fault.GUARD:
            # the code of a missing savepoint is also that of a missing function of the handler's
            found.fault = Fault.OTHER
        return found

    def _check_open(self) -> None:
        if self._broken:
            raise StoreUnavailable("The database connection was lost.", fault=Fault.UNAVAILABLE)
        if not self._is_open:
            raise handler_left("it closed the connection")

    def _failed(self, error: BaseException) -> StoreError:
        code = code_of(error)
        if code in _GONE or not self._is_open:
            self._broken = True
        return store_error(error, self._dialect, code=code, lost=self._broken)

    def _commit_failed(self, error: BaseException) -> StoreError:
        found = self._failed(error)
        found.definite = refused_commit(found)
        return found


class PymysqlConnection(_Mysql):
    """A sync connection whose transactions txbox begins and ends."""

    @property
    def _is_open(self) -> bool:
        return bool(self.native.open)

    def execute(self, statement: Statement) -> Result:
        self._check_open()
        try:
            return executed(self.native, statement)
        except pymysql.MySQLError as error:
            raise self._failed(error) from error

    def read(self, statement: Statement) -> Result:
        result = self.execute(statement)
        # no autocommit: the statement has begun a transaction, whose snapshot must not grow old
        self.commit(())
        return result

    def begin(self, statements: Sequence[Statement]) -> list[Result]:
        self._check_open()
        try:
            if self.native.get_autocommit():
                # an earlier handler's doing: its rollback() would land in autocommit
                self.native.autocommit(False)
            self.native.begin()
        except pymysql.MySQLError as error:
            raise self._failed(error) from error
        return [self.execute(statement) for statement in statements]

    def savepoint(self) -> None:
        self.execute(SAVEPOINT)

    def release_savepoint(self) -> None:
        self._savepoint(RELEASE)

    def rollback_to_savepoint(self) -> None:
        self._savepoint(ROLLBACK_TO)

    def _savepoint(self, statement: Statement) -> None:
        try:
            self.execute(statement)
        except StoreError as error:
            raise not_released(error, self.lost) from error

    def commit(self, statements: Sequence[Statement]) -> list[Result]:
        results = [self.execute(statement) for statement in statements]
        self._check_open()
        try:
            self.native.commit()
        except pymysql.MySQLError as error:
            raise self._commit_failed(error) from error
        return results

    def rollback(self) -> None:
        self._check_open()
        try:
            self.native.rollback()
        except pymysql.MySQLError as error:
            raise self._failed(error) from error

    def discard(self) -> None:
        # close() would send a goodbye, and wait where the network does not take it
        self.native._force_close()  # noqa: SLF001


class AsyncmyConnection(_Mysql):
    """The async twin of `PymysqlConnection`, bound to the event loop that opened it."""

    def __init__(self, raw: Any, dialect: Dialect) -> None:
        super().__init__(raw, dialect)
        self.loop = asyncio.get_running_loop()
        self._errors: type[Exception] = async_driver().errors.MySQLError

    @property
    def _is_open(self) -> bool:
        return bool(self.native.connected)

    async def execute(self, statement: Statement) -> Result:
        self._check_open()
        try:
            return await executed_async(self.native, statement)
        except self._errors as error:
            raise self._failed(error) from error

    async def read(self, statement: Statement) -> Result:
        result = await self.execute(statement)
        await self.commit(())
        return result

    async def begin(self, statements: Sequence[Statement]) -> list[Result]:
        self._check_open()
        try:
            if self.native.get_autocommit():
                await self.native.autocommit(False)
            await self.native.begin()
        except self._errors as error:
            raise self._failed(error) from error
        return [await self.execute(statement) for statement in statements]

    async def savepoint(self) -> None:
        await self.execute(SAVEPOINT)

    async def release_savepoint(self) -> None:
        await self._savepoint(RELEASE)

    async def rollback_to_savepoint(self) -> None:
        await self._savepoint(ROLLBACK_TO)

    async def _savepoint(self, statement: Statement) -> None:
        try:
            await self.execute(statement)
        except StoreError as error:
            raise not_released(error, self.lost) from error

    async def commit(self, statements: Sequence[Statement]) -> list[Result]:
        results = [await self.execute(statement) for statement in statements]
        self._check_open()
        try:
            await self.native.commit()
        except self._errors as error:
            raise self._commit_failed(error) from error
        return results

    async def rollback(self) -> None:
        self._check_open()
        try:
            await self.native.rollback()
        except self._errors as error:
            raise self._failed(error) from error

    def discard(self) -> None:
        self._broken = True
        if not self.loop.is_closed() and not _is_ours(self.loop):
            # another thread's loop: its transports are its own
            self.loop.call_soon_threadsafe(self.native.close)
        elif not self.loop.is_closed():
            self.native.close()
        else:
            _close_orphan(self.native)


def executed(connection: Any, statement: Statement) -> Result:
    sql, names = native(statement.sql, "format")
    with connection.cursor(Cursor) as cursor:
        cursor.execute(sql, tuple(statement.params[name] for name in names))
        return Result(cursor.fetchall() if cursor.description else (), cursor.rowcount)


async def executed_async(connection: Any, statement: Statement) -> Result:
    sql, names = native(statement.sql, "format")
    async with connection.cursor(async_driver().cursors.Cursor) as cursor:
        await cursor.execute(sql, tuple(statement.params[name] for name in names))
        return Result(await cursor.fetchall() if cursor.description else (), cursor.rowcount)


def code_of(error: BaseException) -> str | None:
    """The server's error number; None when the driver met the error by itself and gave it none."""
    number = error.args[0] if error.args else None
    return str(number) if isinstance(number, int) and number else None


def _is_ours(loop: asyncio.AbstractEventLoop) -> bool:
    """Say whether no other thread can be inside the loop."""
    try:
        return asyncio.get_running_loop() is loop
    except RuntimeError:
        return not loop.is_running()


def _close_orphan(raw: Any) -> None:
    """Close a connection whose event loop is closed: its transport needs the loop to do it."""
    transport = raw._transport  # noqa: SLF001
    sock = getattr(transport, "_sock", None)
    if sock is not None:
        sock.close()
        transport._sock = None  # noqa: SLF001


def async_driver() -> Any:
    """Import asyncmy, which only async handlers need."""
    try:
        return import_module("asyncmy")
    except ModuleNotFoundError as error:
        raise ConfigurationError(
            "async handlers on MySQL need asyncmy: run pip install 'txbox[mysql]'."
        ) from error
