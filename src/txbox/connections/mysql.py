"""MySQL and MariaDB by PyMySQL and asyncmy: a URL, or the caller's connection.

The server cannot be made to refuse a commit; that a handler left its transaction shows when close
releases a savepoint that is gone (error 1305).

Source: docs/decisions/0002-steps.md
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from importlib import import_module
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

import pymysql
from pymysql.constants import SERVER_STATUS
from pymysql.cursors import Cursor

from txbox.connections.base import (
    RELEASE,
    ROLLBACK_TO,
    SAVEPOINT,
    Idle,
    handler_left,
    not_in_transaction,
    not_released,
    refused_commit,
    store_error,
    sync_async_mismatch,
    unreachable,
)
from txbox.errors import ConfigurationError, Fault, StoreError, StoreUnavailable, redacted
from txbox.steps import Result, Statement
from txbox.store.dialect import Dialect, dialect, native

_CONNECT_TIMEOUT_S = 10
# READ COMMITTED has no gap locks; without a strict mode ids and payloads could be cut off silently
_SESSION = (
    "SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED",
    "SET SESSION sql_mode = CONCAT_WS(',', NULLIF(@@SESSION.sql_mode, ''), 'STRICT_ALL_TABLES')",
)
_OPTIONS = frozenset({"charset", "unix_socket", "ssl_ca", "ssl_cert", "ssl_key"})
# the server says goodbye with these, or the driver found it gone: the connection is of no more use
_GONE = frozenset(
    {"1053", "1077", "1152", "1158", "1159", "1160", "1161", "1184", "1927", "2006", "2013", "2014", "2055", "4031"}
)  # fmt: skip


def open_url(url: str, *, schema: str | None = None) -> MysqlDatabase:
    """Prepare to connect by URL: mysql://user:password@host:3306/name?ssl_ca=ca.pem.

    Raises:
        ConfigurationError: no database name, or an option that is not known.
    """
    parts = urlsplit(url)
    name = redacted(url)
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    if unknown := sorted(set(options) - _OPTIONS):
        raise ConfigurationError(
            f"The URL {name} has an unknown option {unknown[0]!r}: use {', '.join(sorted(_OPTIONS))}."
        )
    if options.pop("charset", "utf8mb4") != "utf8mb4":
        raise ConfigurationError(f"The URL {name} sets another charset than utf8mb4: leave it out.")
    database = unquote(parts.path.lstrip("/"))
    if not database:
        raise ConfigurationError(f"The URL {name} names no database: write mysql://host/name.")
    settings: dict[str, Any] = {
        "host": parts.hostname or "localhost",
        "port": parts.port or 3306,
        "user": unquote(parts.username) if parts.username else None,
        "password": unquote(parts.password or ""),
        "database": database,
        "charset": "utf8mb4",
        "autocommit": False,
        "connect_timeout": _CONNECT_TIMEOUT_S,
        "init_command": _SESSION[0],
    }
    if "unix_socket" in options:
        settings["unix_socket"] = options.pop("unix_socket")
    if options:
        settings["ssl"] = {option.removeprefix("ssl_"): path for option, path in options.items()}
    return MysqlDatabase(name, settings, dialect("mysql", schema))


def open_object(target: Any, *, schema: str | None = None) -> MysqlDatabase:  # noqa: ARG001 - every adapter takes it
    """Refuse a connection or pool of the driver's."""
    raise ConfigurationError(
        f"App() cannot use a {type(target).__module__}.{type(target).__qualname__}: pass a URL or an SQLAlchemy "
        "Engine; a single connection belongs into Inbox.accept(tx, …)."
    )


class MysqlDatabase:
    """Where connections to one MySQL or MariaDB database come from."""

    def __init__(self, name: str, settings: dict[str, Any], sql_dialect: Dialect) -> None:
        self.name = name
        self.schema = None
        self.settings = settings
        self.dialect = sql_dialect
        self.sync = _Connections(self)
        self.asynchronous = _AsyncConnections(self)

    def close(self) -> None:
        self.sync.idle.clear()
        self.asynchronous.idle.clear()

    async def close_async(self) -> None:
        self.close()


class _Connections:
    def __init__(self, database: MysqlDatabase) -> None:
        self._database = database
        self.idle: Idle[PymysqlConnection] = Idle()

    def acquire(self) -> PymysqlConnection:
        waiting = self.idle.take()
        if waiting is not None:
            return waiting
        try:
            raw: Any = pymysql.connect(**self._database.settings)
            with raw.cursor() as cursor:
                cursor.execute(_SESSION[1])
        except pymysql.MySQLError as error:
            raise _unreachable(error, self._database) from error
        return PymysqlConnection(raw, self._database.dialect)

    def release(self, connection: PymysqlConnection) -> None:
        self.idle.give(connection)


class _AsyncConnections:
    def __init__(self, database: MysqlDatabase) -> None:
        self._database = database
        self.idle: Idle[AsyncmyConnection] = Idle()

    async def acquire(self) -> AsyncmyConnection:
        loop = asyncio.get_running_loop()
        waiting = self.idle.take(lambda connection: connection.loop is loop)
        if waiting is not None:
            return waiting
        asyncmy = _async_driver()
        try:
            raw = await asyncmy.connect(**self._database.settings)
            async with raw.cursor() as cursor:
                await cursor.execute(_SESSION[1])
        except (asyncmy.errors.MySQLError, TimeoutError) as error:
            raise await asyncio.to_thread(_unreachable, error, self._database) from error
        return AsyncmyConnection(raw, self._database.dialect)

    async def release(self, connection: AsyncmyConnection) -> None:
        self.idle.give(connection)


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
        code = _code_of(error)
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
            return _executed(self.native, statement)
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
        self._errors: type[Exception] = _async_driver().errors.MySQLError

    @property
    def _is_open(self) -> bool:
        return bool(self.native.connected)

    async def execute(self, statement: Statement) -> Result:
        self._check_open()
        try:
            return await _executed_async(self.native, statement)
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


class Borrowed:
    """The caller's connection, in the caller's transaction."""

    def __init__(self, tx: Any, sql_dialect: Dialect) -> None:
        self._tx = tx
        self.dialect = sql_dialect

    def execute(self, statement: Statement) -> Result:
        try:
            return _executed(self._tx, statement)
        except pymysql.MySQLError as error:
            code = _code_of(error)
            raise store_error(error, self.dialect, code=code, lost=not self._tx.open) from error


class AsyncBorrowed:
    """The async twin of `Borrowed`."""

    def __init__(self, tx: Any, sql_dialect: Dialect) -> None:
        self._tx = tx
        self.dialect = sql_dialect
        self._errors: type[Exception] = _async_driver().errors.MySQLError

    async def execute(self, statement: Statement) -> Result:
        try:
            return await _executed_async(self._tx, statement)
        except self._errors as error:
            code = _code_of(error)
            raise store_error(
                error, self.dialect, code=code, lost=not self._tx.connected
            ) from error


def borrow(tx: Any, *, schema: str | None = None) -> Borrowed:
    if not isinstance(tx, pymysql.connections.Connection):
        raise sync_async_mismatch(tx, wants="async")
    _check_caller(tx)
    return Borrowed(tx, dialect("mysql", schema))


def borrow_async(tx: Any, *, schema: str | None = None) -> AsyncBorrowed:
    if isinstance(tx, pymysql.connections.Connection):
        raise sync_async_mismatch(tx, wants="sync")
    _check_caller(tx)
    return AsyncBorrowed(tx, dialect("mysql", schema))


def _check_caller(tx: Any) -> None:
    if tx.character_set_name() != "utf8mb4":
        raise ConfigurationError(
            f"This {type(tx).__qualname__} speaks {tx.character_set_name()}, in which ids become other bytes: "
            "connect with charset='utf8mb4'."
        )
    if tx.get_autocommit() and not tx.server_status & SERVER_STATUS.SERVER_STATUS_IN_TRANS:
        raise not_in_transaction(tx)


def _unreachable(error: Exception, database: MysqlDatabase) -> StoreUnavailable:
    code = _code_of(error)
    return unreachable(
        database.name,
        error,
        "the URL, and that the server is running",
        code=code,
        host=database.settings["host"],
    )


def _executed(connection: Any, statement: Statement) -> Result:
    sql, names = native(statement.sql, "format")
    with connection.cursor(Cursor) as cursor:
        cursor.execute(sql, tuple(statement.params[name] for name in names))
        return Result(cursor.fetchall() if cursor.description else (), cursor.rowcount)


async def _executed_async(connection: Any, statement: Statement) -> Result:
    sql, names = native(statement.sql, "format")
    async with connection.cursor(_async_driver().cursors.Cursor) as cursor:
        await cursor.execute(sql, tuple(statement.params[name] for name in names))
        return Result(await cursor.fetchall() if cursor.description else (), cursor.rowcount)


def _code_of(error: BaseException) -> str | None:
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


def _async_driver() -> Any:
    """Import asyncmy, which only async handlers need."""
    try:
        return import_module("asyncmy")
    except ModuleNotFoundError as error:
        raise ConfigurationError(
            "async handlers on MySQL need asyncmy: run pip install 'txbox[mysql]'."
        ) from error
