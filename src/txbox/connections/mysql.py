"""MySQL and MariaDB through PyMySQL and asyncmy: a URL, or the caller's connection.

These servers cannot be made to refuse a commit. That a handler left its transaction shows when close
releases a savepoint that no longer exists (error 1305).

Source: docs/decisions/0031-coroutines.md
"""

from __future__ import annotations

import asyncio
import re
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache, partial
from math import inf
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

import pymysql
from pymysql.constants import SERVER_STATUS
from pymysql.cursors import Cursor

from txbox.connections import base
from txbox.connections.base import (
    MAX_PACKET,
    RELEASE,
    ROLLBACK_TO,
    SAVEPOINT,
    Database,
    Executor,
    Pool,
    acquired,
    async_driver,
    check_session,
    connection_lost,
    cut_off_bytes,
    handler_left,
    hosts_of,
    is_refusal,
    keep_alive,
    left_behind,
    not_in_transaction,
    not_released,
    packet_too_large,
    refused_commit,
    store_error,
    sync_async_mismatch,
)
from txbox.errors import ConfigurationError, Fault, StoreError, redacted
from txbox.session import (
    Connection,
    Lasts,
    OnStatement,
    Result,
    SettingChange,
    Statement,
    Statements,
    blocking,
)
from txbox.store.dialect import Dialect, dialect, native

_CONNECT_TIMEOUT_S = 10
# READ COMMITTED has no gap locks; without strict mode, ids and payloads could be truncated silently; both drivers quote
# bytes with backslashes. What a server may be set to for the sake of people at a prompt would refuse updates, cut lists
# off, or begin a transaction with each COMMIT
_SESSION = (
    "SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED",
    (
        "SET SESSION sql_mode = CONCAT(REPLACE(@@SESSION.sql_mode, 'NO_BACKSLASH_ESCAPES', 'STRICT_ALL_TABLES'), "
        "',STRICT_ALL_TABLES'), sql_safe_updates = 0, sql_select_limit = {limit}, sql_big_selects = 1, "
        "completion_type = 'NO_CHAIN'"
    ),
)
_NO_LIMIT = "18446744073709551615"
# what vtgate says that it is; any limit of its own would be put behind GET_LOCK, which it then refuses
_VITESS, _NO_LIMIT_OF_VTGATE = "-Vitess", "DEFAULT"
_OPTIONS = frozenset({"charset", "unix_socket", "ssl_ca", "ssl_cert", "ssl_key"})
_VALUE = re.compile(
    r"(?:_binary ?|x)?'(?:[^'\\]|\\.|'')*+'?+|\"(?:[^\"\\]|\\.|\"\")*+\"?+"
    r"|(?<![\w.`\"])-?\d+(?:\.\d+)?(?![\w`\"])",
    re.IGNORECASE | re.DOTALL,
)
# methods that set something without a statement
_SETTERS = ("select_db", "set_charset", "set_character_set")
_CONVERTERS = ("encoders", "decoders")
# the server said goodbye, or the driver noticed that it is gone: the connection is useless
_GONE = frozenset(
    {"1053", "1077", "1152", "1158", "1159", "1160", "1161", "1184", "1927", "2006", "2013", "2014", "2055", "4031"}
)  # fmt: skip


def open_url(url: str, *, schema: str | None = None) -> MysqlDatabase:
    """Prepare to connect by URL: mysql://user:password@host:3306,other/name?ssl_ca=ca.pem.

    Raises:
        ConfigurationError: no database name, or an unknown option.
    """
    parts = urlsplit(url)
    name = redacted(url)
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    if unknown := sorted(set(options) - _OPTIONS):
        raise ConfigurationError(
            f"The URL {name} has an unknown option {unknown[0]!r}: use {', '.join(sorted(_OPTIONS))}."
        )
    if options.pop("charset", "utf8mb4") != "utf8mb4":
        raise ConfigurationError(f"The URL {name} sets a charset other than utf8mb4: remove it.")
    database = unquote(parts.path.lstrip("/"))
    if not database:
        raise ConfigurationError(f"The URL {name} names no database: use mysql://host/name.")
    hosts = [(host or "localhost", port or 3306) for host, port in hosts_of(url)]
    settings: dict[str, Any] = {
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
    return MysqlDatabase(name, hosts, settings, dialect("mysql", schema))


def open_object(target: Any, *, schema: str | None = None) -> MysqlDatabase:  # noqa: ARG001 - every adapter takes it
    """Refuse the driver's connections and pools."""
    raise ConfigurationError(
        f"App() cannot use this {type(target).__module__}.{type(target).__qualname__}: pass a URL or an SQLAlchemy "
        "Engine; a single connection belongs in Inbox.accept(tx, …)."
    )


class MysqlDatabase(Database):
    """Where connections to one MySQL or MariaDB database come from.

    Args:
        addresses: its hosts and their ports. They are tried in order, from the one after that whose connection last
            reported trouble.
    """

    def __init__(
        self,
        name: str,
        addresses: Sequence[tuple[str, int]],
        settings: dict[str, Any],
        sql_dialect: Dialect,
    ) -> None:
        super().__init__(name, None, sql_dialect)
        self.settings = settings
        self.hosts = [host for host, _ in addresses]
        self._addresses = tuple(addresses)
        self.sync = _Connections(self, is_async=False)
        self.asynchronous = _Connections(self, is_async=True)

    @property
    def addresses(self) -> Sequence[tuple[str, int]]:
        return self._addresses

    def avoid(self, address: tuple[str, int]) -> None:
        """Begin behind this address from now on."""
        index = self._addresses.index(address) + 1
        self._addresses = self._addresses[index:] + self._addresses[:index]


class _Connections(Pool["MysqlConnection"]):
    def __init__(self, database: MysqlDatabase, *, is_async: bool) -> None:
        super().__init__(is_async=is_async)
        self._database = database

    async def _opened(self) -> MysqlConnection:
        database, is_async = self._database, self.is_async
        errors = _connecting_errors(is_async)
        try:
            raw = await _connected(database, is_async)
            connection = MysqlConnection(raw, database, is_async=is_async)
            try:
                cursor = raw.cursor()
                limit = _NO_LIMIT_OF_VTGATE if _VITESS in raw.get_server_info() else _NO_LIMIT
                await _done(cursor.execute(_SESSION[1].format(limit=limit)), is_async)
                await _done(cursor.close(), is_async)
                connection.changed = None
                check_session(raw)
            except BaseException:
                connection.discard()
                raise
        except errors as error:
            raise await database.unreachable(error, _code_of(error), is_async=is_async) from error
        return connection

    def distrust(self, connection: Connection) -> None:
        if isinstance(connection, MysqlConnection) and connection.generation == self._generation:
            self._database.avoid(connection.address)
        super().distrust(connection)


async def _connected(database: MysqlDatabase, is_async: bool) -> Any:
    """Connect to the first of the hosts that answers."""
    failure: BaseException | None = None
    for address in database.addresses:
        try:
            return await _connected_to(database, address, is_async)
        except _connecting_errors(is_async) as error:
            failure = failure or error
            if is_refusal(_code_of(error)):
                break
    assert failure is not None, "a URL names a host"
    raise failure


async def _connected_to(database: MysqlDatabase, address: tuple[str, int], is_async: bool) -> Any:
    options = {} if is_async else {"defer_connect": True}
    raw = _kind(is_async)(host=address[0], port=address[1], **database.settings, **options)
    raw.address = address
    raw.turn = asyncio.Lock() if is_async else threading.Lock()
    await _done(raw.connect(), is_async)
    keep_alive(raw._transport.get_extra_info("socket") if is_async else raw._sock)  # noqa: SLF001 - have no public name
    return raw


@cache
def _kind(is_async: bool) -> Any:
    """Return the driver's connection class with commands that take turns, even with a stray thread or task.

    Otherwise two commands would share the socket, and one could read the other's answer, even that of a COMMIT.
    `contended`: another thread or task was using it. `refused`: it did not become free in time.
    """
    driver: Any = async_driver("asyncmy", "MySQL").connection if is_async else pymysql.connections
    commands = ("query", "begin", "commit", "rollback", "autocommit")
    turns = {name: _in_turn(getattr(driver.Connection, name), is_async) for name in commands}
    turns["query"] = _heard(turns["query"])
    for name in _SETTERS:
        if hasattr(driver.Connection, name):
            turns[name] = _setting(name, getattr(driver.Connection, name))
    if hasattr(driver.Connection, _TLS):
        turns[_TLS] = _made_once(getattr(driver.Connection, _TLS))
    defaults = {"contended": False, "refused": False, "sets": None, "settings": None}
    return type("Connection", (driver.Connection,), {**defaults, **turns})


# of PyMySQL, for each connection
_TLS = "_create_ssl_ctx"


def _made_once(create: Callable[..., Any]) -> Callable[..., Any]:
    """Without certificates of its own a context is always the same: it reads those of the system, for 10 ms."""
    made = list[Any]()

    def context(raw: Any, options: Any) -> Any:
        if options:
            return create(raw, options)
        if not made:
            made.append(create(raw, options))
        return made[0]

    return context


def _heard(query: Callable[..., Any]) -> Callable[..., Any]:
    """Note what a handler's statement sets. `sets` is None during our own."""

    def heard(raw: Any, sql: Any, *args: Any, **options: Any) -> Any:
        if raw.sets is not None and raw.settings is not None:
            text = sql.decode("utf-8", "replace") if isinstance(sql, (bytes, bytearray)) else sql
            raw.sets(raw.settings.of(text))
        return query(raw, sql, *args, **options)

    return heard


def _setting(name: str, command: Callable[..., Any]) -> Callable[..., Any]:
    def sets(raw: Any, *args: Any, **options: Any) -> Any:
        if raw.sets is not None:
            raw.sets(SettingChange(name, Lasts.CONNECTION))
        return command(raw, *args, **options)

    return sets


def _in_turn(command: Callable[..., Any], is_async: bool) -> Callable[..., Any]:
    async def in_turn(raw: Any, *args: Any, **options: Any) -> Any:
        if not await _has_turn(raw, is_async):
            raw.refused = True
            raise left_behind()
        try:
            return await _done(command(raw, *args, **options), is_async)
        finally:
            raw.turn.release()

    def blocks(*args: Any, **options: Any) -> Any:
        return blocking(in_turn(*args, **options))

    return in_turn if is_async else blocks


async def _has_turn(raw: Any, is_async: bool) -> bool:
    if is_async and not raw.turn.locked():
        return bool(await raw.turn.acquire())
    if not is_async and raw.turn.acquire(blocking=False):
        return True
    raw.contended = True
    if raw.refused:
        return False
    return await acquired(raw.turn) if is_async else raw.turn.acquire(timeout=base.LEFT_BEHIND_S)


class MysqlConnection(Connection):
    """A connection whose transactions txbox begins and ends. One of asyncmy is bound to the loop that opened it."""

    def __init__(self, raw: Any, database: MysqlDatabase, *, is_async: bool) -> None:
        self.native = raw
        self.address: tuple[str, int] = raw.address
        self._database = database
        self.is_async = is_async
        self._loop = asyncio.get_running_loop() if is_async else None
        self._errors = _errors(is_async)
        self._dialect = database.dialect
        self._broken = False
        raw.settings, raw.sets = database.handler_settings, self.sets
        # PyMySQL's, which a handler can replace or change
        self._cursors = getattr(raw, "cursorclass", None)
        self._converters = {name: dict(getattr(raw, name, {})) for name in _CONVERTERS}

    @property
    def lost(self) -> bool:
        return self._broken or not _is_open(self.native, self.is_async)

    def watch(self, on_statement: OnStatement) -> None:
        raw = self.native
        query = raw.query

        def watched(sql: Any, *args: Any, **options: Any) -> Any:
            text = sql.decode("utf-8", "replace") if isinstance(sql, (bytes, bytearray)) else sql
            if "txbox_" in text:
                on_statement(text, None)
            else:
                # the drivers fill the values in
                on_statement(_VALUE.sub("?", text), _VALUE.findall(text))
            return query(sql, *args, **options)

        raw.query = watched
        raw.commit = partial(on_statement, "COMMIT", None)
        raw.rollback = partial(on_statement, "ROLLBACK", None)

    def usable(self) -> bool:
        ours = self._loop is None or self._loop is asyncio.get_running_loop()
        # BEGIN would commit a transaction begun since
        begun = self.native.server_status & SERVER_STATUS.SERVER_STATUS_IN_TRANS
        return ours and not self.lost and not self.native.contended and not begun

    def restore(self) -> None:
        if self._cursors is None:
            return
        self.native.cursorclass = self._cursors
        for name, converters in self._converters.items():
            if getattr(self.native, name) != converters:
                setattr(self.native, name, dict(converters))

    def translate(self, error: BaseException) -> StoreError | None:
        if type(error).__module__.partition(".")[0] not in ("pymysql", "asyncmy"):
            return None
        failure = self._failed(error)
        if failure.fault is Fault.GUARD:
            # a missing savepoint has the same code as a missing function that the handler called
            failure.fault = Fault.OTHER
        return failure

    async def execute(self, statement: Statement) -> Result:
        self._check_open()
        try:
            return await _executed(self.native, statement, self.is_async)
        except self._errors as error:
            failure = self._failed(error)
            size = cut_off_bytes(statement, failure)
            if size and size > await self._packet_bytes():
                failure = packet_too_large()
            raise failure from error

    async def _packet_bytes(self) -> float:
        """The largest statement that the server takes: it may close the connection without saying so."""
        try:
            other = await _connected(self._database, self.is_async)
            try:
                ((most,),) = (await _executed(other, MAX_PACKET, self.is_async)).rows
            finally:
                other.close()
        except (self._errors, OSError):
            # the server is away after all
            return inf
        return int(most)

    async def alone(self, statement: Statement) -> Result:
        await self._set_autocommit(True)
        return await self.execute(statement)

    async def begin(self, statements: Statements) -> list[Result]:
        # if a handler rolls back, it must end up in a new transaction, not in autocommit
        await self._set_autocommit(False)
        try:
            # not BEGIN, which is no statement where sql_mode is ORACLE: the check at start must get to name that
            await _done(self.native.query("START TRANSACTION"), self.is_async)
        except self._errors as error:
            raise self._failed(error) from error
        results = [await self.execute(statement) for statement in statements]
        self.changed = None
        return results

    async def _set_autocommit(self, on: bool) -> None:
        self._check_open()
        if self.native.get_autocommit() is not on:
            try:
                await _done(self.native.autocommit(on), self.is_async)
            except self._errors as error:
                raise self._failed(error) from error

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
            # use its cause, because what is raised may be the same error
            raise not_released(error, self.lost) from error.__cause__

    async def commit(self, statements: Statements) -> list[Result]:
        results = [await self.execute(statement) for statement in statements]
        self._check_open()
        try:
            await _done(self.native.commit(), self.is_async)
        except self._errors as error:
            failure = self._failed(error)
            failure.definite = refused_commit(failure)
            raise failure from error
        return results

    async def rollback(self) -> None:
        self._check_open()
        if self.native.refused:
            await self._end_other()
            raise left_behind()
        try:
            await _done(self.native.rollback(), self.is_async)
        except self._errors as error:
            raise self._failed(error) from error

    async def _end_other(self) -> None:
        """End the server's session: the statement still running keeps the transaction's locks."""
        try:
            other = await _connected_to(self._database, self.address, self.is_async)
            try:
                await _done(other.query(f"KILL {self.native.thread_id()}"), self.is_async)
            finally:
                other.close()
        except self._errors as error:
            raise self._failed(error) from error

    def discard(self) -> None:
        loop = self._loop
        if loop is None:
            # close() would send a goodbye, and block if the network does not take it
            if self.native.refused:
                _interrupt(self.native)
            self.native._force_close()  # noqa: SLF001
            return
        self._broken = True
        if not loop.is_closed() and not _is_ours(loop):
            # another thread's loop owns the transport
            loop.call_soon_threadsafe(self.native.close)
        elif not loop.is_closed():
            self.native.close()
        else:
            _close_orphan(self.native)

    def _check_open(self) -> None:
        if self._broken:
            raise connection_lost()
        if self.lost:
            raise handler_left("it closed the connection")

    def _failed(self, error: BaseException) -> StoreError:
        code = _code_of(error)
        if code in _GONE or self.lost:
            self._broken = True
        return store_error(error, self._dialect, code=code, lost=self._broken)


class Borrowed(Executor):
    """The caller's connection, in the caller's transaction."""

    async def _execute(self, statement: Statement) -> Result:
        try:
            return await _executed(self._tx, statement, self.is_async)
        except _errors(self.is_async) as error:
            lost = not _is_open(self._tx, self.is_async)
            raise store_error(error, self.dialect, code=_code_of(error), lost=lost) from error


def borrow(tx: Any, *, is_async: bool, schema: str | None = None) -> Borrowed:
    if isinstance(tx, pymysql.connections.Connection) is is_async:
        raise sync_async_mismatch(tx, wants="sync" if is_async else "async")
    _check_caller(tx)
    return Borrowed(tx, dialect("mysql", schema), is_async=is_async)


def _check_caller(tx: Any) -> None:
    check_session(tx)
    if tx.get_autocommit() and not tx.server_status & SERVER_STATUS.SERVER_STATUS_IN_TRANS:
        raise not_in_transaction(tx)


async def _executed(connection: Any, statement: Statement, is_async: bool) -> Result:
    sql, names = native(statement.sql, "format")
    # ours is not looked at for what it sets, nor are the values in it; the caller's may be a plain connection
    sets = getattr(connection, "sets", None)
    if sets is not None:
        connection.sets = None
    cursor = connection.cursor(
        async_driver("asyncmy", "MySQL").cursors.Cursor if is_async else Cursor
    )
    try:
        values = tuple(statement.params[name] for name in names)
        await _done(cursor.execute(sql, values), is_async)
        rows = await _done(cursor.fetchall(), is_async) if cursor.description else ()
        return Result(rows, cursor.rowcount)
    finally:
        if sets is not None:
            connection.sets = sets
        await _done(cursor.close(), is_async)


async def _done(answer: Any, is_async: bool) -> Any:
    return await answer if is_async else answer


def _is_open(raw: Any, is_async: bool) -> bool:
    return bool(raw.connected if is_async else raw.open)


def _errors(is_async: bool) -> type[Exception]:
    errors: type[Exception] = (
        async_driver("asyncmy", "MySQL").errors.MySQLError if is_async else pymysql.MySQLError
    )
    return errors


def _connecting_errors(is_async: bool) -> tuple[type[Exception], ...]:
    return (_errors(is_async), TimeoutError) if is_async else (_errors(is_async),)


def _code_of(error: BaseException) -> str | None:
    """Return the server's error number; None if the driver raised the error itself, without a number."""
    number = error.args[0] if error.args else None
    return str(number) if isinstance(number, int) and number else None


def _is_ours(loop: asyncio.AbstractEventLoop) -> bool:
    """Whether the loop runs in this thread, or not at all."""
    try:
        return asyncio.get_running_loop() is loop
    except RuntimeError:
        return not loop.is_running()


def _interrupt(raw: Any) -> None:
    """End the command still running, before its thread reads a socket number the kernel has reused."""
    sock = raw._sock  # noqa: SLF001
    if sock is not None:
        # the server may have ended it before
        with suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)
    if raw.turn.acquire(timeout=base.LEFT_BEHIND_S):
        raw.turn.release()


def _close_orphan(raw: Any) -> None:
    """Close a connection whose event loop is closed. Its transport would need the loop to do it."""
    transport = raw._transport  # noqa: SLF001
    sock = getattr(transport, "_sock", None)
    if sock is not None:
        sock.close()
        transport._sock = None  # noqa: SLF001
