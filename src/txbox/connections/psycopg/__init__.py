"""psycopg 3, sync and async: a URL, a psycopg_pool pool, or the caller's connection."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit
from weakref import WeakKeyDictionary

import psycopg
from psycopg import pq
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.rows import tuple_row
from psycopg.sql import SQL, Identifier

from txbox.connections.base import Idle, not_in_transaction, sync_async_mismatch, unreachable
from txbox.connections.psycopg.connection import (
    AsyncPsycopgConnection,
    PsycopgConnection,
    translated_or_lost,
)
from txbox.errors import ConfigurationError, StoreUnavailable, redacted
from txbox.steps import Result, Statement
from txbox.store.dialect import Dialect, dialect, native

_log = logging.getLogger("txbox")

# psycopg's own default
_PREPARE_AFTER = 5
# how long a listener waits for notifications before it looks whether it was stopped
_LOOK_S = 0.5
# its pause before it connects again: the first, and the longest
_PAUSE_S = (0.2, 10.0)
# a server that went away without a word is noticed; what the URL says goes first
_ALIVE = {"connect_timeout": 10, "keepalives_idle": 30, "keepalives_interval": 10}


def open_url(url: str, *, schema: str | None = None) -> PsycopgDatabase:
    """Prepare to connect by URL; `?prepare=off` is for poolers without prepared statements."""
    parts = urlsplit(url)
    options = dict(parse_qsl(parts.query))
    prepare = options.pop("prepare", "on") != "off"
    conninfo = urlunsplit(parts._replace(scheme="postgresql", query=urlencode(options)))
    if parts.path in ("", "/") and "dbname" not in options:
        raise ConfigurationError(
            f"The URL {redacted(url)} names no database: write postgresql://host/name."
        )
    return PsycopgDatabase(redacted(url), schema, prepare, conninfo=conninfo)


def open_object(target: Any, *, schema: str | None = None) -> PsycopgDatabase:
    """Use a pool of the user's."""
    import psycopg_pool

    if isinstance(target, psycopg_pool.AsyncConnectionPool):
        return PsycopgDatabase("an AsyncConnectionPool", schema, True, async_pool=target)
    if isinstance(target, psycopg_pool.ConnectionPool):
        return PsycopgDatabase("a ConnectionPool", schema, True, pool=target)
    raise ConfigurationError(
        f"App() cannot use a {type(target).__qualname__}: pass a URL or a psycopg_pool pool; "
        "a single connection belongs into Inbox.accept(tx, …)."
    )


class PsycopgDatabase:
    """Where psycopg connections come from."""

    def __init__(
        self,
        name: str,
        schema: str | None,
        prepare: bool,
        *,
        conninfo: str | None = None,
        pool: Any = None,
        async_pool: Any = None,
    ) -> None:
        self.name = name
        self.schema = schema
        self.dialect: Dialect = dialect("postgresql", schema)
        self.prepare = prepare
        self.conninfo = conninfo
        self.sync = None if async_pool is not None else _Connections(self, pool)
        self.asynchronous = None if pool is not None else _AsyncConnections(self, async_pool)

    @property
    def host(self) -> str | None:
        """The host that the URL names."""
        return None if self.conninfo is None else urlsplit(self.conninfo).hostname

    @property
    def threshold(self) -> int | None:
        """How often psycopg sends a statement of a handler's before it prepares it; None for never."""
        return _PREPARE_AFTER if self.prepare else None

    def listener(self, channel: str, heard: Callable[[], None]) -> Listener | None:
        """Listen on a connection of its own; None with a pool, whose connections are for work."""
        return None if self.conninfo is None else Listener(self.conninfo, channel, heard)

    def close(self) -> None:
        if self.sync is not None:
            self.sync.idle.clear()
        if self.asynchronous is not None:
            self.asynchronous.idle.clear()

    async def close_async(self) -> None:
        self.close()


class _Connections:
    def __init__(self, database: PsycopgDatabase, pool: Any) -> None:
        self._database = database
        self._pool = pool
        self.idle: Idle[PsycopgConnection] = Idle()
        self._known: WeakKeyDictionary[Any, PsycopgConnection] = WeakKeyDictionary()

    def acquire(self) -> PsycopgConnection:
        if self._pool is None:
            waiting = self.idle.take(lambda connection: not connection.taken)
            if waiting is not None:
                return waiting
        database = self._database
        try:
            if self._pool is None:
                raw = psycopg.Connection.connect(
                    database.conninfo or "", prepare_threshold=database.threshold
                )
                return PsycopgConnection(raw, database.dialect, database.prepare, None)
            raw = self._pool.getconn()
        except psycopg.Error as error:
            raise _unreachable(error, database) from error
        except Exception as error:
            if type(error).__module__.startswith("psycopg_pool"):
                raise _unreachable(error, database) from error
            raise
        known = self._known.get(raw)
        if known is None:
            known = self._known[raw] = PsycopgConnection(
                raw, database.dialect, database.prepare, self._pool
            )
        known.prepare_for_use()
        return known

    def release(self, connection: PsycopgConnection) -> None:
        if connection.taken:
            connection.discard()
        elif self._pool is None:
            self.idle.give(connection)
        else:
            connection.give_back()
            self._pool.putconn(connection.native)


class _AsyncConnections:
    def __init__(self, database: PsycopgDatabase, pool: Any) -> None:
        self._database = database
        self._pool = pool
        self.idle: Idle[AsyncPsycopgConnection] = Idle()
        self._known: WeakKeyDictionary[Any, AsyncPsycopgConnection] = WeakKeyDictionary()

    async def acquire(self) -> AsyncPsycopgConnection:
        loop = asyncio.get_running_loop()
        if self._pool is None:
            waiting = self.idle.take(
                lambda connection: connection.loop is loop and not connection.taken
            )
            if waiting is not None:
                return waiting
        database = self._database
        try:
            if self._pool is None:
                raw = await psycopg.AsyncConnection.connect(
                    database.conninfo or "", prepare_threshold=database.threshold
                )
                return AsyncPsycopgConnection(raw, database.dialect, database.prepare, None)
            raw = await self._pool.getconn()
        except psycopg.Error as error:
            raise await asyncio.to_thread(_unreachable, error, database) from error
        except Exception as error:
            if type(error).__module__.startswith("psycopg_pool"):
                raise await asyncio.to_thread(_unreachable, error, database) from error
            raise
        known = self._known.get(raw)
        if known is None:
            known = self._known[raw] = AsyncPsycopgConnection(
                raw, database.dialect, database.prepare, self._pool
            )
        await known.prepare_for_use()
        return known

    async def release(self, connection: AsyncPsycopgConnection) -> None:
        if connection.taken:
            connection.discard()
        elif self._pool is None:
            self.idle.give(connection)
        else:
            await connection.give_back()
            await self._pool.putconn(connection.native)


class Listener:
    """Calls `heard` after each notification, and after each connect, since nobody listened before.

    A lost connection, or a pooler that hands it to others, costs notifications and nothing else:
    whoever is woken must look by itself as well.
    """

    def __init__(self, conninfo: str, channel: str, heard: Callable[[], None]) -> None:
        self._conninfo = make_conninfo("", **{**_ALIVE, **conninfo_to_dict(conninfo)})
        self._listen = SQL("LISTEN {}").format(Identifier(channel))
        self._heard = heard
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="txbox-listener", daemon=True)

    def start(self) -> None:
        """Listen in a thread."""
        self._thread.start()

    def stop(self) -> None:
        """Stop listening and close the connection."""
        self._stopped.set()
        self._thread.join(2 * _LOOK_S)

    def _run(self) -> None:
        pause_s = _PAUSE_S[0]
        while not self._stopped.is_set():
            try:
                with psycopg.connect(self._conninfo, autocommit=True) as connection:
                    connection.execute(self._listen)
                    pause_s = _PAUSE_S[0]
                    self._heard()
                    while not self._stopped.is_set():
                        for _ in connection.notifies(timeout=_LOOK_S):
                            self._heard()
            except psycopg.Error as error:
                # the text may quote the URL
                _log.info("Nobody listens for a while, relays poll: %s", type(error).__name__)
                self._stopped.wait(pause_s)
                pause_s = min(2 * pause_s, _PAUSE_S[1])


class Borrowed:
    """The caller's connection, in the caller's transaction."""

    def __init__(self, tx: Any, sql_dialect: Dialect) -> None:
        self._tx = tx
        self.dialect = sql_dialect

    def execute(self, statement: Statement) -> Result:
        sql, names = native(statement.sql, "format")
        try:
            with self._tx.cursor(row_factory=tuple_row) as cursor:
                cursor.execute(sql, [statement.params[name] for name in names])
                return Result(cursor.fetchall() if cursor.description else (), cursor.rowcount)
        except psycopg.Error as error:
            raise translated_or_lost(error, self.dialect) from error


class AsyncBorrowed:
    """The async twin of `Borrowed`."""

    def __init__(self, tx: Any, sql_dialect: Dialect) -> None:
        self._tx = tx
        self.dialect = sql_dialect

    async def execute(self, statement: Statement) -> Result:
        sql, names = native(statement.sql, "format")
        try:
            async with self._tx.cursor(row_factory=tuple_row) as cursor:
                await cursor.execute(sql, [statement.params[name] for name in names])
                return Result(
                    await cursor.fetchall() if cursor.description else (), cursor.rowcount
                )
        except psycopg.Error as error:
            raise translated_or_lost(error, self.dialect) from error


def borrow(tx: Any, *, schema: str | None = None) -> Borrowed:
    if not isinstance(tx, psycopg.Connection):
        raise sync_async_mismatch(tx, wants="async")
    _check_transaction(tx)
    return Borrowed(tx, dialect("postgresql", schema))


def borrow_async(tx: Any, *, schema: str | None = None) -> AsyncBorrowed:
    if not isinstance(tx, psycopg.AsyncConnection):
        raise sync_async_mismatch(tx, wants="sync")
    _check_transaction(tx)
    return AsyncBorrowed(tx, dialect("postgresql", schema))


def _check_transaction(tx: Any) -> None:
    if tx.autocommit and tx.info.transaction_status == pq.TransactionStatus.IDLE:
        raise not_in_transaction(tx)


def _unreachable(error: Exception, database: PsycopgDatabase) -> StoreUnavailable:
    code = getattr(error, "sqlstate", None)
    return unreachable(
        database.name,
        error,
        "the URL, and that the server is running",
        code=code,
        host=database.host,
    )
