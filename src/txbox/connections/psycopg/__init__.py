"""psycopg 3, sync and async: a URL, a psycopg_pool pool, or the caller's connection."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from functools import partial
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit
from weakref import WeakKeyDictionary

import psycopg
from psycopg import pq
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.rows import tuple_row
from psycopg.sql import SQL, Identifier

from txbox.connections.base import (
    Executor,
    Pool,
    not_in_transaction,
    sync_async_mismatch,
    unreachable,
)
from txbox.connections.psycopg.connection import PsycopgConnection, translated_or_lost
from txbox.errors import ConfigurationError, StoreUnavailable, redacted
from txbox.session import Result, Statement
from txbox.store.dialect import Dialect, dialect, native

_log = logging.getLogger("txbox")

# psycopg's own default
_PREPARE_AFTER = 5
# how long a listener waits for notifications before it checks whether it was stopped
_LOOK_S = 0.5
# its pause before reconnecting: the first, and the longest
_PAUSE_S = (0.2, 10.0)
# notice a server that vanished silently; settings in the URL take precedence
_ALIVE = {"connect_timeout": 10, "keepalives_idle": 30, "keepalives_interval": 10}


def open_url(url: str, *, schema: str | None = None) -> PsycopgDatabase:
    """Prepare to connect by URL; `?prepare=off` is for poolers without prepared statements."""
    parts = urlsplit(url)
    options = dict(parse_qsl(parts.query))
    prepare = options.pop("prepare", "on") != "off"
    conninfo = urlunsplit(parts._replace(scheme="postgresql", query=urlencode(options)))
    if parts.path in ("", "/") and "dbname" not in options:
        raise ConfigurationError(
            f"The URL {redacted(url)} names no database: use postgresql://host/name."
        )
    return PsycopgDatabase(redacted(url), schema, prepare, conninfo=conninfo)


def open_object(target: Any, *, schema: str | None = None) -> PsycopgDatabase:
    """Use the user's pool."""
    import psycopg_pool

    if isinstance(target, psycopg_pool.AsyncConnectionPool):
        return PsycopgDatabase("an AsyncConnectionPool", schema, True, async_pool=target)
    if isinstance(target, psycopg_pool.ConnectionPool):
        return PsycopgDatabase("a ConnectionPool", schema, True, pool=target)
    raise ConfigurationError(
        f"App() cannot use a {type(target).__qualname__}: pass a URL or a psycopg_pool pool; "
        "a single connection belongs in Inbox.accept(tx, …)."
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
        self.sync = None if async_pool is not None else _Connections(self, pool, is_async=False)
        self.asynchronous = (
            None if pool is not None else _Connections(self, async_pool, is_async=True)
        )

    @property
    def host(self) -> str | None:
        """The host named in the URL."""
        return None if self.conninfo is None else urlsplit(self.conninfo).hostname

    @property
    def threshold(self) -> int | None:
        """How often psycopg runs a handler's statement before preparing it; None for never."""
        return _PREPARE_AFTER if self.prepare else None

    def listener(self, channel: str, heard: Callable[[], None]) -> Listener | None:
        """Listen on a dedicated connection; None with a pool, whose connections are for work."""
        return None if self.conninfo is None else Listener(self.conninfo, channel, heard)

    def close(self) -> None:
        if self.sync is not None:
            self.sync.clear()
        if self.asynchronous is not None:
            self.asynchronous.clear()

    async def close_async(self) -> None:
        self.close()


class _Connections(Pool[PsycopgConnection]):
    """Connections by URL, or from the user's pool."""

    def __init__(self, database: PsycopgDatabase, pool: Any, *, is_async: bool) -> None:
        super().__init__(is_async=is_async)
        self._database = database
        self._pool = pool
        self._known: WeakKeyDictionary[Any, PsycopgConnection] = WeakKeyDictionary()

    async def acquire(self) -> PsycopgConnection:
        if self._pool is None:
            return self._taken() or await self._opened()
        raw = await self._connected(self._pool.getconn)
        known = self._known.get(raw)
        if known is None:
            database = self._database
            known = PsycopgConnection(raw, database.dialect, database.prepare, self._pool)
            self._known[raw] = known
        await known.prepare_for_use()
        return known

    async def release(self, connection: PsycopgConnection) -> None:
        if connection.taken:
            connection.discard()
        elif self._pool is None:
            await super().release(connection)
        else:
            await connection.give_back()
            returned = self._pool.putconn(connection.native)
            if self.is_async:
                await returned

    async def _opened(self) -> PsycopgConnection:
        database = self._database
        kind: Any = psycopg.AsyncConnection if self.is_async else psycopg.Connection
        connect = partial(
            kind.connect, database.conninfo or "", prepare_threshold=database.threshold
        )
        raw = await self._connected(connect)
        return PsycopgConnection(raw, database.dialect, database.prepare, None)

    async def _connected(self, connect: Callable[[], Any]) -> Any:
        try:
            return await connect() if self.is_async else connect()
        except Exception as error:
            package = type(error).__module__.partition(".")[0]
            if not isinstance(error, psycopg.Error) and package != "psycopg_pool":
                raise
            if self.is_async:
                # this looks the host up, which blocks
                raise await asyncio.to_thread(_unreachable, error, self._database) from error
            raise _unreachable(error, self._database) from error


class Listener:
    """Calls `heard` after each notification, and after each connect, because notifications were missed before it.

    A lost connection, or a pooler that shares it, only costs notifications: whoever is woken by them
    must poll as well.
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
                _log.info(
                    "Not listening for a while, relays poll instead: %s", type(error).__name__
                )
                self._stopped.wait(pause_s)
                pause_s = min(2 * pause_s, _PAUSE_S[1])


class Borrowed(Executor):
    """The caller's connection, in the caller's transaction."""

    def __init__(self, tx: Any, sql_dialect: Dialect, *, is_async: bool) -> None:
        self._tx = tx
        self.dialect = sql_dialect
        self.is_async = is_async

    async def _execute(self, statement: Statement) -> Result:
        sql, names = native(statement.sql, "format")
        values = [statement.params[name] for name in names]
        try:
            cursor = self._tx.cursor(row_factory=tuple_row)
            sent = cursor.execute(sql, values)
            if self.is_async:
                await sent
            if not cursor.description:
                return Result((), cursor.rowcount)
            fetched = cursor.fetchall()
            return Result(await fetched if self.is_async else fetched, cursor.rowcount)
        except psycopg.Error as error:
            raise translated_or_lost(error, self.dialect) from error


def borrow(tx: Any, *, is_async: bool, schema: str | None = None) -> Borrowed:
    if not isinstance(tx, psycopg.AsyncConnection if is_async else psycopg.Connection):
        raise sync_async_mismatch(tx, wants="sync" if is_async else "async")
    _check_transaction(tx)
    return Borrowed(tx, dialect("postgresql", schema), is_async=is_async)


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
