"""asyncpg: a URL, a pool, or the caller's connection; async only.

The transaction is asyncpg's own object, so `tx.transaction()` in a handler is a savepoint. A handler
that sends ROLLBACK itself is in autocommit from then on. Close then finds another token, and the
message is dead ("transaction broken"), never acknowledged as processed (promise 2.2).
"""

from __future__ import annotations

import asyncio
import re
from functools import cache, lru_cache
from typing import Any
from weakref import WeakKeyDictionary

import asyncpg
from asyncpg.pool import PoolConnectionProxy

from txbox.connections.base import (
    KEEPALIVE,
    RELEASE,
    RESET,
    ROLLBACK_TO,
    SAVEPOINT,
    Database,
    Executor,
    Pool,
    check_committed,
    check_session,
    hosts_of,
    is_marked,
    keep_alive,
    not_in_transaction,
    postgresql_url,
    refused_commit,
    store_error,
    sync_async_mismatch,
    watched_class,
)
from txbox.connections.settings import Settings
from txbox.errors import ConfigurationError, Fault, StoreError, redacted
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

_ERRORS = (asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError, OSError)
_CLOSE_S = 2.0
# whatever the URL says
_UTF8 = {"client_encoding": "UTF8"}
# the methods that send a statement, as far as this release has them
_SENDS = (
    "execute", "executemany", "fetch", "fetchval", "fetchrow", "fetchmany", "cursor", "prepare",
    "copy_from_query",
)  # fmt: skip
_CODECS = ("set_type_codec", "set_builtin_type_codec", "reset_type_codec")
_STRINGS = re.compile(r"'(?:[^']|'')*'|\"[^\"]*\"|--[^\n]*")
_PARENTHESES = re.compile(r"\([^()]*\)")
_VERBS = re.compile(r"\b(SELECT|VALUES|TABLE|SHOW|INSERT|UPDATE|DELETE|MERGE)\b", re.IGNORECASE)


def open_url(url: str, *, schema: str | None = None) -> AsyncpgDatabase:
    """Prepare to connect by URL."""
    dsn, prepare = postgresql_url(url, "dbname", "database")
    return AsyncpgDatabase(redacted(url), schema, dsn=dsn, prepare=prepare)


def open_object(target: Any, *, schema: str | None = None) -> AsyncpgDatabase:
    """Use the user's pool."""
    if isinstance(target, asyncpg.Pool):
        return AsyncpgDatabase("an asyncpg.Pool", schema, pool=target)
    raise ConfigurationError(
        f"App() cannot use this {type(target).__qualname__}: pass a URL or an asyncpg pool; "
        "a single connection belongs in Inbox.accept_async(tx, …)."
    )


class AsyncpgDatabase(Database):
    """Where asyncpg connections come from; there are no sync ones."""

    check = "that the server is running, and the URL, or that the pool was awaited and is open"

    def __init__(
        self,
        name: str,
        schema: str | None,
        *,
        dsn: str = "",
        prepare: bool = True,
        pool: Any = None,
    ) -> None:
        super().__init__(name, schema, dialect("postgresql", schema))
        self.dsn = dsn
        self.hosts = [host for host, _ in hosts_of(dsn)] if dsn else []
        self.prepare = prepare
        self.asynchronous = _Connections(self, pool)


class _Connections(Pool["AsyncpgConnection"]):
    def __init__(self, database: AsyncpgDatabase, pool: Any) -> None:
        super().__init__(is_async=True, idle_limit=database.dialect.idle_limit)
        self._database = database
        self._pool = pool
        self._distrusted = False

    async def _opened(self) -> AsyncpgConnection:
        try:
            if self._distrusted:
                self._distrusted = False
                await self._pool.expire_connections()
            raw: Any = await (self._connect() if self._pool is None else self._pool.acquire())
        except _ERRORS as error:
            code = getattr(error, "sqlstate", None)
            raise await self._database.unreachable(error, code, is_async=True) from error
        if self._pool is not None:
            try:
                check_session(raw)
            except ConfigurationError:
                await self._pool.release(raw)
                raise
        connection = AsyncpgConnection(raw, self._database.dialect, self._database.closing)
        connection.listen(self._database.handler_settings)
        return connection

    async def _connect(self) -> Any:
        database = self._database
        options: dict[str, Any] = {} if database.prepare else {"statement_cache_size": 0}
        options["timeout"] = KEEPALIVE["connect_timeout"]
        raw: Any = await asyncpg.connect(database.dsn, server_settings=_UTF8, **options)
        keep_alive(raw._transport.get_extra_info("socket"))  # noqa: SLF001 - has no public name
        return raw

    def _drop_idle(self) -> None:
        super()._drop_idle()
        self._distrusted = self._pool is not None

    async def release(self, connection: AsyncpgConnection) -> None:
        if self._pool is None:
            await super().release(connection)
            return
        connection.listen(None)
        if connection.stained:
            # what `init` has set is not ours to set again, and the pool's reset leaves the role
            connection.discard()
            return
        try:
            await self._pool.release(connection.native)
        except _ERRORS:
            # the reset failed and asyncpg dropped the connection; the transaction was already over
            return


class AsyncpgConnection(Connection):
    """A connection whose transactions txbox begins and ends, bound to the event loop that opened it."""

    is_async = True

    def __init__(self, raw: Any, sql_dialect: Dialect, closing: set[asyncio.Task[None]]) -> None:
        self.native = raw
        self._closing = closing
        self._loop = asyncio.get_running_loop()
        self._dialect = sql_dialect
        self._transaction: Any = None
        self._fatal = False
        self._watched = False

    def usable(self) -> bool:
        return not self.lost and self._loop is asyncio.get_running_loop()

    def watch(self, on_statement: OnStatement) -> None:
        # a pool lends proxies, which call the methods of the real connection's class
        raw = getattr(self.native, "_con", self.native)
        raw.__class__ = watched_class(type(raw), on_statement, _SENDS, values=True)

    def listen(self, settings: Settings | None) -> None:
        """Hear of the statements and codecs of the handler; without settings, no longer."""
        raw: Any = getattr(self.native, "_con", self.native)
        if raw is None:
            return
        kind: Any = raw.__class__
        if settings is None:
            if _heard.pop(raw, None) is not None:
                raw.__class__ = kind.__base__
        else:
            raw.__class__ = _hearing(kind)
            _heard[raw] = self, settings

    async def reset(self) -> bool:
        assert self.changed is not None, "nothing is to be reset"
        if self.changed.lasts is Lasts.CONNECTION:
            return False
        try:
            await self.native.execute(RESET)
        except _ERRORS:
            return False
        return True

    def has_ended(self) -> bool:
        return self._watched and not self.lost and not is_marked(self.native)

    @property
    def lost(self) -> bool:
        return self._fatal or _closed(self.native)

    def translate(self, error: BaseException) -> StoreError | None:
        if isinstance(error, (asyncpg.InterfaceError, asyncpg.InternalClientError)) and self.lost:
            return store_error(error, self._dialect, code=None, lost=True)
        return translated(error, self._dialect)

    async def execute(self, statement: Statement) -> Result:
        try:
            return await _executed(self.native, statement)
        except _ERRORS as error:
            raise self._failure(error) from error

    # outside `begin`, each statement is its own transaction
    alone = execute

    async def savepoint(self) -> None:
        await self.execute(SAVEPOINT)

    async def release_savepoint(self) -> None:
        await self.execute(RELEASE)

    async def rollback_to_savepoint(self) -> None:
        await self.execute(ROLLBACK_TO)

    async def begin(self, statements: Statements) -> list[Result]:
        transaction = self.native.transaction(isolation="read_committed")
        try:
            await transaction.start()
        except _ERRORS as error:
            # asyncpg now believes it is in a transaction: this connection cannot begin another
            self._fatal = True
            raise self._failure(error) from error
        self._transaction = transaction
        results = [await self.execute(statement) for statement in statements]
        self._watched = is_marked(self.native)
        self.changed = None
        return results

    async def commit(self, statements: Statements) -> list[Result]:
        results = [await self.execute(statement) for statement in statements]
        self._transaction = None
        try:
            # what asyncpg's own commit does, which would hide the server's answer; a pool takes a dead
            # connection back at once and leaves its proxy empty
            if (raw := getattr(self.native, "_con", self.native)) is not None:
                raw._top_xact = None  # noqa: SLF001
            check_committed(await self.native.execute("COMMIT"))
        except (*_ERRORS, StoreError) as error:
            failure = error if isinstance(error, StoreError) else self._failure(error)
            failure.definite = refused_commit(failure)
            raise failure from error
        return results

    async def rollback(self) -> None:
        if self._transaction is None:
            # a refused COMMIT already ended the transaction
            return
        try:
            await self._transaction.rollback()
        except _ERRORS as error:
            # it stays, for `discard` to cancel what a stray task still runs
            raise self._failure(error) from error
        self._transaction = None

    def discard(self) -> None:
        if self._loop.is_closed():
            # nothing works on a closed loop; the kernel closes the socket along with its object
            return
        if _running_loop() is not self._loop:
            self._loop.call_soon_threadsafe(self._terminate)
        elif self._transaction is None:
            self._terminate()
        else:
            # a cancelled handler has a query running: terminate() would also drop asyncpg's request to
            # cancel it, and the server would keep the transaction's locks until the query ends
            task = self._loop.create_task(self._cancelled_and_closed())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    async def _cancelled_and_closed(self) -> None:
        if _closed(self.native):
            return
        try:
            await self.native.close(timeout=_CLOSE_S)
        except _ERRORS:
            # asyncpg aborted the connection instead
            return

    def _terminate(self) -> None:
        # this also frees the slot in a pool; a connection that died has already done so
        if not _closed(self.native):
            self.native.terminate()

    def _failure(self, error: BaseException) -> StoreError:
        failure = self.translate(error)
        if failure is None:
            lost = self.lost or isinstance(error, OSError)
            failure = store_error(error, self._dialect, code=None, lost=lost)
        return failure


# whose statements are heard: an object of asyncpg has no room for more attributes
_heard: WeakKeyDictionary[Any, tuple[AsyncpgConnection, Settings]] = WeakKeyDictionary()


@cache
def _hearing(kind: Any) -> Any:
    """Return a subclass of a connection class that notes what a handler sets."""

    def sending(name: str) -> Any:
        send = getattr(kind, name)

        def method(self: Any, query: Any, *args: Any, **kwargs: Any) -> Any:
            if (heard := _heard.get(self)) is not None:
                connection, settings = heard
                connection.sets(settings.of(str(query)))
            return send(self, query, *args, **kwargs)

        return method

    def setting(name: str) -> Any:
        call = getattr(kind, name)

        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            if (heard := _heard.get(self)) is not None:
                heard[0].sets(SettingChange(name, Lasts.CONNECTION))
            return call(self, *args, **kwargs)

        return method

    methods = {name: sending(name) for name in _SENDS if hasattr(kind, name)}
    methods |= {name: setting(name) for name in _CODECS if hasattr(kind, name)}
    return type(kind)(
        kind.__name__, (kind,), {"__slots__": (), "__module__": kind.__module__, **methods}
    )


class Borrowed(Executor):
    """The caller's connection, in the caller's transaction."""

    async def _execute(self, statement: Statement) -> Result:
        try:
            return await _executed(self._tx, statement)
        except _ERRORS as error:
            failure = translated(error, self.dialect)
            lost = _closed(self._tx)
            raise failure or store_error(error, self.dialect, code=None, lost=lost) from error


def borrow(tx: Any, *, is_async: bool, schema: str | None = None) -> Borrowed:
    if not is_async:
        raise sync_async_mismatch(tx, wants="async")
    if not isinstance(tx, (asyncpg.Connection, PoolConnectionProxy)):
        raise ConfigurationError(
            f"This {type(tx).__qualname__} is not an asyncpg connection: pass the one your transaction is on."
        )
    if not tx.is_in_transaction():
        raise not_in_transaction(tx)
    check_session(tx)
    return Borrowed(tx, dialect("postgresql", schema), is_async=True)


def translated(error: BaseException, sql_dialect: Dialect) -> StoreError | None:
    """Translate an asyncpg error; None if it is not one, or if it says that asyncpg was misused."""
    if not isinstance(error, asyncpg.PostgresError):
        return None
    constraint = getattr(error, "constraint_name", None)
    failure = store_error(error, sql_dialect, code=error.sqlstate, constraint=constraint)
    if isinstance(error, (asyncpg.InvalidCachedStatementError, asyncpg.OutdatedSchemaCacheError)):
        # the tables changed under a cached statement; asyncpg has emptied its cache
        failure.fault = Fault.PREPARED
    return failure


async def _executed(raw: Any, statement: Statement) -> Result:
    sql, names = native(statement.sql, "numeric")
    values = [statement.params[name] for name in names]
    if _returns_rows(sql):
        # not of the record class that the connection was opened with
        fetched = await raw.fetch(sql, *values, record_class=asyncpg.Record)
        rows = [tuple(row) for row in fetched]
        return Result(rows, len(rows))
    # "UPDATE 3", "INSERT 0 3", "CREATE TABLE"
    count = (await raw.execute(sql, *values)).rpartition(" ")[2]
    return Result((), int(count) if count.isdigit() else 0)


@lru_cache(maxsize=512)
def _returns_rows(sql: str) -> bool:
    """Whether a statement needs the asyncpg call that returns rows, rather than the one that returns a count."""
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
        # the pool took it back, as it does when a connection dies
        return True


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
