"""asyncpg: a URL, a pool, or the caller's connection; async only.

The transaction is asyncpg's own object, so that `tx.transaction()` in a handler is a savepoint. A
handler that sends ROLLBACK itself is in autocommit from there on: close then finds another token,
and the message is dead ("transaction broken"), never acknowledged as processed (SEMANTICS 2.2).
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

import asyncpg
from asyncpg.pool import PoolConnectionProxy

from txbox.connections.base import (
    Idle,
    check_committed,
    finished,
    is_marked,
    not_in_transaction,
    refused_commit,
    store_error,
    sync_async_mismatch,
    unreachable,
)
from txbox.errors import ConfigurationError, Fault, StoreError, StoreUnavailable, redacted
from txbox.steps import Result, Statement
from txbox.store.dialect import Dialect, dialect, native

_ERRORS = (asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError, OSError)
_CLOSE_S = 2.0
# the server says these as its last word; asyncpg notices the closed socket a moment later
_FATAL = frozenset({"57P01", "57P02", "57P05"})
_STRINGS = re.compile(r"'(?:[^']|'')*'|\"[^\"]*\"|--[^\n]*")
_PARENTHESES = re.compile(r"\([^()]*\)")
_VERBS = re.compile(r"\b(SELECT|VALUES|TABLE|SHOW|INSERT|UPDATE|DELETE|MERGE)\b", re.IGNORECASE)


def open_url(url: str, *, schema: str | None = None) -> AsyncpgDatabase:
    """Prepare to connect by URL; `?prepare=off` is for poolers without prepared statements."""
    parts = urlsplit(url)
    options = dict(parse_qsl(parts.query))
    prepare = options.pop("prepare", "on") != "off"
    dsn = urlunsplit(parts._replace(scheme="postgresql", query=urlencode(options)))
    if parts.path in ("", "/") and "dbname" not in options and "database" not in options:
        raise ConfigurationError(
            f"The URL {redacted(url)} names no database: write postgresql+asyncpg://host/name."
        )
    return AsyncpgDatabase(redacted(url), schema, dsn=dsn, prepare=prepare)


def open_object(target: Any, *, schema: str | None = None) -> AsyncpgDatabase:
    """Use a pool of the user's."""
    if isinstance(target, asyncpg.Pool):
        return AsyncpgDatabase("an asyncpg.Pool", schema, pool=target)
    raise ConfigurationError(
        f"App() cannot use a {type(target).__qualname__}: pass a URL or an asyncpg pool; "
        "a single connection belongs into Inbox.accept_async(tx, …)."
    )


class AsyncpgDatabase:
    """Where asyncpg connections come from; there are no sync ones."""

    sync: None = None

    def __init__(
        self,
        name: str,
        schema: str | None,
        *,
        dsn: str = "",
        prepare: bool = True,
        pool: Any = None,
    ) -> None:
        self.name = name
        self.schema = schema
        self.dialect: Dialect = dialect("postgresql", schema)
        self.dsn = dsn
        self.host = urlsplit(dsn).hostname
        self.prepare = prepare
        self.asynchronous = _AsyncConnections(self, pool)

    def close(self) -> None:
        self.asynchronous.idle.clear()

    async def close_async(self) -> None:
        self.close()
        await finished(self.asynchronous.closing)


class _AsyncConnections:
    def __init__(self, database: AsyncpgDatabase, pool: Any) -> None:
        self._database = database
        self._pool = pool
        self.idle: Idle[AsyncpgConnection] = Idle()
        self.closing: set[asyncio.Task[None]] = set()

    async def acquire(self) -> AsyncpgConnection:
        if self._pool is None:
            loop = asyncio.get_running_loop()
            waiting = self.idle.take(lambda connection: connection.loop is loop)
            if waiting is not None:
                return waiting
        try:
            raw: Any = await (self._connect() if self._pool is None else self._pool.acquire())
        except _ERRORS as error:
            raise await asyncio.to_thread(_unreachable, error, self._database) from error
        return AsyncpgConnection(raw, self._database.dialect, self.closing)

    async def _connect(self) -> Any:
        if self._database.prepare:
            return await asyncpg.connect(self._database.dsn)
        return await asyncpg.connect(self._database.dsn, statement_cache_size=0)

    async def release(self, connection: AsyncpgConnection) -> None:
        if self._pool is None:
            self.idle.give(connection)
            return
        try:
            await self._pool.release(connection.native)
        except _ERRORS:
            # the reset failed and asyncpg has dropped the connection; the transaction was over already
            return


class AsyncpgConnection:
    """A connection whose transactions txbox begins and ends, bound to the event loop that opened it."""

    def __init__(self, raw: Any, sql_dialect: Dialect, closing: set[asyncio.Task[None]]) -> None:
        self.native = raw
        self._closing = closing
        self.loop = asyncio.get_running_loop()
        self._dialect = sql_dialect
        self._transaction: Any = None
        self._fatal = False
        self._watched = False

    def left(self) -> bool:
        return self._watched and not self.lost and not is_marked(self.native)

    @property
    def lost(self) -> bool:
        return self._fatal or _closed(self.native)

    def translate(self, error: BaseException) -> StoreError | None:
        if getattr(error, "sqlstate", None) in _FATAL:
            self._fatal = True
        if isinstance(error, asyncpg.InterfaceError) and self.lost:
            return store_error(error, self._dialect, code=None, lost=True)
        return translated(error, self._dialect)

    async def execute(self, statement: Statement) -> Result:
        try:
            return await _executed(self.native, statement)
        except _ERRORS as error:
            raise self._failure(error) from error

    # each statement outside of `begin` is a transaction
    read = execute

    async def savepoint(self) -> None:
        await self._command("SAVEPOINT txbox_handler")

    async def release_savepoint(self) -> None:
        await self._command("RELEASE SAVEPOINT txbox_handler")

    async def rollback_to_savepoint(self) -> None:
        await self._command("ROLLBACK TO SAVEPOINT txbox_handler")

    async def _command(self, sql: str) -> None:
        try:
            await self.native.execute(sql)
        except _ERRORS as error:
            raise self._failure(error) from error

    async def begin(self, statements: Sequence[Statement]) -> list[Result]:
        transaction = self.native.transaction(isolation="read_committed")
        try:
            await transaction.start()
        except _ERRORS as error:
            # asyncpg believes itself in a transaction now: this connection cannot begin another
            self._fatal = True
            raise self._failure(error) from error
        self._transaction = transaction
        results = [await self.execute(statement) for statement in statements]
        self._watched = is_marked(self.native)
        return results

    async def commit(self, statements: Sequence[Statement]) -> list[Result]:
        results = [await self.execute(statement) for statement in statements]
        self._transaction = None
        try:
            # as asyncpg's own commit does, which would not tell what was answered
            getattr(self.native, "_con", self.native)._top_xact = None  # noqa: SLF001
            check_committed(await self.native.execute("COMMIT"))
        except (*_ERRORS, StoreError) as error:
            found = error if isinstance(error, StoreError) else self._failure(error)
            found.definite = refused_commit(found)
            raise found from error
        return results

    async def rollback(self) -> None:
        transaction, self._transaction = self._transaction, None
        if transaction is None:
            # COMMIT was refused, which ended the transaction
            return
        try:
            await transaction.rollback()
        except _ERRORS as error:
            raise self._failure(error) from error

    def discard(self) -> None:
        if self.loop.is_closed():
            # nothing of a closed loop works any more; the kernel closes the socket with its object
            return
        if _running_loop() is not self.loop:
            self.loop.call_soon_threadsafe(self._terminate)
        elif self._transaction is None:
            self._terminate()
        else:
            # a cancelled handler left a query behind: terminate() would also drop asyncpg's request to
            # cancel it, and the server would hold the transaction's locks until the query ends
            task = self.loop.create_task(self._cancelled_and_closed())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    async def _cancelled_and_closed(self) -> None:
        if _closed(self.native):
            return
        try:
            await self.native.close(timeout=_CLOSE_S)
        except _ERRORS:
            # asyncpg has aborted the connection instead
            return

    def _terminate(self) -> None:
        # also gives the place in a pool free, which a connection that died has done by itself
        if not _closed(self.native):
            self.native.terminate()

    def _failure(self, error: BaseException) -> StoreError:
        found = self.translate(error)
        if found is None:
            lost = self.lost or isinstance(error, OSError)
            found = store_error(error, self._dialect, code=None, lost=lost)
        return found


class AsyncBorrowed:
    """The caller's connection, in the caller's transaction."""

    def __init__(self, tx: Any, sql_dialect: Dialect) -> None:
        self._tx = tx
        self.dialect = sql_dialect

    async def execute(self, statement: Statement) -> Result:
        try:
            return await _executed(self._tx, statement)
        except _ERRORS as error:
            found = translated(error, self.dialect)
            lost = _closed(self._tx)
            raise found or store_error(error, self.dialect, code=None, lost=lost) from error


def borrow(tx: Any, *, schema: str | None = None) -> Any:  # noqa: ARG001  # every adapter's shape
    """Refuse: asyncpg is async only."""
    raise sync_async_mismatch(tx, wants="async")


def borrow_async(tx: Any, *, schema: str | None = None) -> AsyncBorrowed:
    if not isinstance(tx, (asyncpg.Connection, PoolConnectionProxy)):
        raise ConfigurationError(
            f"A {type(tx).__qualname__} is no asyncpg connection: pass the one your transaction is on."
        )
    if not tx.is_in_transaction():
        raise not_in_transaction(tx)
    return AsyncBorrowed(tx, dialect("postgresql", schema))


def translated(error: BaseException, sql_dialect: Dialect) -> StoreError | None:
    """Put an asyncpg error into txbox's words; None when it is none, or says that asyncpg was misused."""
    if not isinstance(error, asyncpg.PostgresError):
        return None
    constraint = getattr(error, "constraint_name", None)
    found = store_error(error, sql_dialect, code=error.sqlstate, constraint=constraint)
    if isinstance(error, (asyncpg.InvalidCachedStatementError, asyncpg.OutdatedSchemaCacheError)):
        # the tables changed under a cached statement; asyncpg has emptied its cache
        found.fault = Fault.PREPARED
    return found


async def _executed(raw: Any, statement: Statement) -> Result:
    if not statement.sql:
        # this database has nothing to do at this point
        return Result((), 0)
    sql, names = native(statement.sql, "numeric")
    values = [statement.params[name] for name in names]
    if _returns_rows(sql):
        rows = [tuple(row) for row in await raw.fetch(sql, *values)]
        return Result(rows, len(rows))
    # "UPDATE 3", "INSERT 0 3", "CREATE TABLE"
    count = (await raw.execute(sql, *values)).rpartition(" ")[2]
    return Result((), int(count) if count.isdigit() else 0)


@lru_cache(maxsize=512)
def _returns_rows(sql: str) -> bool:
    """Say which of asyncpg's two calls a statement needs: one returns rows, the other the count."""
    text, nested = _STRINGS.sub("''", sql), 1
    while nested:
        text, nested = _PARENTHESES.subn(" ", text)
    verb = _VERBS.search(text)
    if verb is None:
        return False
    return verb[1].upper() in ("SELECT", "VALUES", "TABLE", "SHOW") or "RETURNING" in text.upper()


def _closed(raw: Any) -> bool:
    try:
        return bool(raw.is_closed())
    except asyncpg.InterfaceError:
        # the pool has taken it back: it does so when a connection dies
        return True


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def _unreachable(error: BaseException, database: AsyncpgDatabase) -> StoreUnavailable:
    code = getattr(error, "sqlstate", None)
    return unreachable(
        database.name,
        error,
        "that the server is running, and the URL, or that the pool was awaited and is open",
        code=code,
        host=database.host,
    )
