"""MySQL and MariaDB by PyMySQL and asyncmy: a URL, or the caller's connection."""

from __future__ import annotations

import asyncio
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

import pymysql
from pymysql.constants import SERVER_STATUS

from txbox.connections.base import (
    Idle,
    not_in_transaction,
    store_error,
    unreachable,
    wrong_colour,
)
from txbox.connections.pymysql_connection import (
    AsyncmyConnection,
    PymysqlConnection,
    async_driver,
    code_of,
    executed,
    executed_async,
)
from txbox.errors import ConfigurationError, StoreUnavailable, redacted
from txbox.steps import Result, Statement
from txbox.store.dialect import Dialect, dialect

_CONNECT_TIMEOUT_S = 10
# READ COMMITTED has no gap locks; without a strict mode ids and payloads could be cut off silently
_SESSION = (
    "SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED",
    "SET SESSION sql_mode = CONCAT_WS(',', NULLIF(@@SESSION.sql_mode, ''), 'STRICT_ALL_TABLES')",
)
_OPTIONS = frozenset({"charset", "unix_socket", "ssl_ca", "ssl_cert", "ssl_key"})


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
        asyncmy = async_driver()
        try:
            raw = await asyncmy.connect(**self._database.settings)
            async with raw.cursor() as cursor:
                await cursor.execute(_SESSION[1])
        except (asyncmy.errors.MySQLError, TimeoutError) as error:
            raise await asyncio.to_thread(_unreachable, error, self._database) from error
        return AsyncmyConnection(raw, self._database.dialect)

    async def release(self, connection: AsyncmyConnection) -> None:
        self.idle.give(connection)


class Borrowed:
    """The caller's connection, in the caller's transaction."""

    def __init__(self, tx: Any, sql_dialect: Dialect) -> None:
        self._tx = tx
        self.dialect = sql_dialect

    def execute(self, statement: Statement) -> Result:
        try:
            return executed(self._tx, statement)
        except pymysql.MySQLError as error:
            code = code_of(error)
            raise store_error(error, self.dialect, code=code, lost=not self._tx.open) from error


class AsyncBorrowed:
    """The async twin of `Borrowed`."""

    def __init__(self, tx: Any, sql_dialect: Dialect) -> None:
        self._tx = tx
        self.dialect = sql_dialect
        self._errors: type[Exception] = async_driver().errors.MySQLError

    async def execute(self, statement: Statement) -> Result:
        try:
            return await executed_async(self._tx, statement)
        except self._errors as error:
            code = code_of(error)
            raise store_error(
                error, self.dialect, code=code, lost=not self._tx.connected
            ) from error


def borrow(tx: Any, *, schema: str | None = None) -> Borrowed:
    if not isinstance(tx, pymysql.connections.Connection):
        raise wrong_colour(tx, wants="async")
    _check_caller(tx)
    return Borrowed(tx, dialect("mysql", schema))


def borrow_async(tx: Any, *, schema: str | None = None) -> AsyncBorrowed:
    if isinstance(tx, pymysql.connections.Connection):
        raise wrong_colour(tx, wants="sync")
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
    code = code_of(error)
    return unreachable(
        database.name,
        error,
        "the URL, and that the server is running",
        code=code,
        host=database.settings["host"],
    )
