"""psycopg 3, sync and async: a URL, a psycopg_pool pool, or the caller's connection.

BEGIN and claim go to libpq as one pipeline, close and COMMIT as another, with prepared statements of
txbox's own, because psycopg's cache forgets them on a rollback.

Source: docs/decisions/0009-round-trips.md
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import cached_property, partial
from typing import Any

import psycopg
from psycopg import pq
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from txbox.boundaries import log as _log
from txbox.connections.base import (
    KEEPALIVE,
    Database,
    Executor,
    Pool,
    check_session,
    connection_lost,
    handler_left,
    hosts_of,
    is_marked,
    not_in_transaction,
    postgresql_url,
    store_error,
    sync_async_mismatch,
    watched_class,
)
from txbox.connections.libpq import (
    BEGIN,
    COMMIT,
    DEALLOCATE,
    ExclusiveUse,
    Pipeline,
    Plans,
    Queue,
    Watched,
    close_idle,
    deallocates,
    defer,
    deferring_of,
    in_use,
    nothing,
    plain_cursor,
    reset,
    stop_deferring,
)
from txbox.errors import ConfigurationError, Fault, StoreError, redacted
from txbox.policy import Backoff
from txbox.session import (
    Connection,
    Failed,
    Lasts,
    OnStatement,
    Raised,
    Result,
    Statement,
    Statements,
)
from txbox.store.dialect import Dialect, dialect, native

# psycopg's own default
_PREPARE_AFTER = 5
# how long a listener waits for notifications before it checks whether it was stopped
_LOOK_S = 0.5
# its pause before reconnecting: the first, and the longest
_PAUSE_S = (0.2, 10.0)

SAVEPOINT = b"SAVEPOINT txbox_handler"
RELEASE = b"RELEASE SAVEPOINT txbox_handler"
ROLLBACK_TO = b"ROLLBACK TO SAVEPOINT txbox_handler"

_CONNECTED, _BAD = int(pq.ConnStatus.OK), int(pq.ConnStatus.BAD)
_FOLLOWED = "the next transaction could begin behind it"


def open_url(url: str, *, schema: str | None = None) -> PsycopgDatabase:
    """Prepare to connect by URL."""
    conninfo, prepare = postgresql_url(url, "dbname")
    return PsycopgDatabase(redacted(url), schema, prepare, conninfo=conninfo)


def open_object(target: Any, *, schema: str | None = None) -> PsycopgDatabase:
    """Use the user's pool."""
    import psycopg_pool

    if isinstance(target, psycopg_pool.AsyncConnectionPool):
        return PsycopgDatabase("an AsyncConnectionPool", schema, True, async_pool=target)
    if isinstance(target, psycopg_pool.ConnectionPool):
        return PsycopgDatabase("a ConnectionPool", schema, True, pool=target)
    raise ConfigurationError(
        f"App() cannot use this {type(target).__qualname__}: pass a URL or a psycopg_pool pool; "
        "a single connection belongs in Inbox.accept(tx, …)."
    )


class PsycopgDatabase(Database):
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
        super().__init__(name, schema, dialect("postgresql", schema))
        self.hosts = [] if conninfo is None else [host for host, _ in hosts_of(conninfo)]
        self.prepare = prepare
        self.conninfo = conninfo
        self.sync = None if async_pool is not None else _Connections(self, pool, is_async=False)
        self.asynchronous = (
            None if pool is not None else _Connections(self, async_pool, is_async=True)
        )

    @cached_property
    def settings(self) -> str:
        """How to connect. Settings in the URL take precedence."""
        options = conninfo_to_dict(self.conninfo or "")
        if "PGCONNECT_TIMEOUT" in os.environ:
            options.setdefault("connect_timeout", os.environ["PGCONNECT_TIMEOUT"])
        return make_conninfo("", **{**KEEPALIVE, **options})

    @property
    def threshold(self) -> int | None:
        """How often psycopg runs a handler's statement before preparing it; None for never."""
        return _PREPARE_AFTER if self.prepare else None

    def listener(self, heard: Callable[[], None]) -> Listener | None:
        """Listen on a dedicated connection; None with a pool, whose connections are for work."""
        return None if self.conninfo is None else Listener(self.settings, heard)


class _Connections(Pool["PsycopgConnection"]):
    """Connections by URL, or from the user's pool."""

    def __init__(self, database: PsycopgDatabase, pool: Any, *, is_async: bool) -> None:
        super().__init__(is_async=is_async, idle_limit=database.dialect.idle_limit)
        self._database = database
        self._pool = pool
        self._known: dict[Any, PsycopgConnection] = {}
        # how many connections of the user's pool were idle when one was lost
        self._distrusted = 0

    async def acquire(self) -> PsycopgConnection:
        if self._pool is None:
            return await super().acquire()
        if self._distrusted:
            distrusted, self._distrusted = self._distrusted, 0
            await close_idle(self._pool, distrusted, is_async=self.is_async)
        while in_use(raw := await self._connected(self._pool.getconn)):
            # a stray task has begun a transaction, which would become part of the next one
            raw.pgconn.finish()
            await self._put_back(raw)
        known = self._known.get(raw)
        if known is None:
            # usually instead of one that the pool has closed
            for closed in [other for other in list(self._known) if other.closed]:
                self._known.pop(closed, None)
            database = self._database
            try:
                check_session(raw)
            except ConfigurationError:
                await self._put_back(raw)
                raise
            known = PsycopgConnection(raw, database, self._pool)
            self._known[raw] = known
        await known.prepare_for_use()
        known.generation = self._generation
        return known

    def _drop_idle(self) -> None:
        if self._pool is None:
            super()._drop_idle()
        else:
            self._distrusted = self._pool.get_stats()["pool_available"]

    async def release(self, connection: PsycopgConnection) -> None:
        if connection.in_use:
            connection.discard()
            return
        if self._pool is None:
            await super().release(connection)
            return
        connection.restore()
        if connection.stained:
            # what `configure` has set is not ours to set again, so the pool opens another one
            connection.discard()
        else:
            await connection.give_back()
            await self._put_back(connection.native)

    async def _put_back(self, raw: Any) -> None:
        returned = self._pool.putconn(raw)
        if self.is_async:
            await returned

    async def _opened(self) -> PsycopgConnection:
        database = self._database
        kind: Any = psycopg.AsyncConnection if self.is_async else psycopg.Connection
        connect = partial(
            kind.connect,
            database.settings,
            prepare_threshold=database.threshold,
            # whatever the URL, the environment or the role says
            client_encoding="UTF8",
        )
        raw = await self._connected(connect)
        return PsycopgConnection(raw, database, None)

    async def _connected(self, connect: Callable[[], Any]) -> Any:
        try:
            return await connect() if self.is_async else connect()
        except Exception as error:
            package = type(error).__module__.partition(".")[0]
            if not isinstance(error, psycopg.Error) and package != "psycopg_pool":
                raise
            code = getattr(error, "sqlstate", None)
            raise await self._database.unreachable(error, code, is_async=self.is_async) from error


class Listener:
    """Calls `heard` after each notification, and after each connect, because notifications were missed before it.

    A lost connection, or a pooler that shares it, only costs notifications: whoever is woken by them
    must poll as well.
    """

    def __init__(self, conninfo: str, heard: Callable[[], None]) -> None:
        self._conninfo = conninfo
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
        backoff = Backoff(*_PAUSE_S)
        while not self._stopped.is_set():
            try:
                with psycopg.connect(self._conninfo, autocommit=True) as connection:
                    connection.execute("LISTEN txbox_outbox")
                    backoff.reset()
                    self._heard()
                    while not self._stopped.is_set():
                        for _ in connection.notifies(timeout=_LOOK_S):
                            self._heard()
            except psycopg.Error as error:
                # the text may quote the URL
                _log.info(
                    "Not listening for a while, relays poll instead: %s", type(error).__name__
                )
                self._stopped.wait(backoff.next_s())


class PsycopgConnection(Connection):
    """A connection whose transactions txbox begins and ends. An async one is bound to the event loop that opened it.

    Args:
        pool: the user's pool, to which the connection is returned.
    """

    def __init__(self, raw: Any, database: PsycopgDatabase, pool: Any) -> None:
        self.native = raw
        self.is_async = isinstance(raw, psycopg.AsyncConnection)
        self._loop = asyncio.get_running_loop() if self.is_async else None
        # None is how psycopg marks a connection behind a pooler without prepared statements
        prepare = database.prepare and raw.prepare_threshold is not None
        self._dialect = database.dialect
        self._pool = pool
        self._autocommit = raw.autocommit
        self._pipeline = Pipeline(raw, prepare=prepare, translate=self.translate)
        self._plans = Plans(prepare)
        self._pooled = not prepare
        self._object = Watched(raw, database.handler_settings, self.sets)
        if pool is None:
            self._object.watch()
        self._use = ExclusiveUse(raw)
        self._pgconn = raw.pgconn
        self._queue: Queue | None = None
        self._watched = False

    # -- what it is ---------------------------------------------------------------------------

    @property
    def lost(self) -> bool:
        # as psycopg's `closed`, which every message would ask for twice
        return bool(self._pgconn.status == _BAD)

    @property
    def in_use(self) -> bool:
        """Whether a thread or task that a handler did not wait for uses it; then it must not be reused."""
        return self._use.in_use()

    def usable(self) -> bool:
        if self._pgconn.status == _BAD or self._use.in_use():
            return False
        return self._loop is None or self._loop is asyncio.get_running_loop()

    def watch(self, on_statement: OnStatement) -> None:
        raw, sends = self.native, ("execute", "executemany", "stream", "copy")
        for name in ("cursor_factory", "server_cursor_factory"):
            watched = watched_class(getattr(raw, name), on_statement, sends, values=True)
            setattr(raw, name, watched)
        # psycopg's own methods send these without a cursor
        raw.commit = partial(on_statement, "COMMIT", None)
        raw.rollback = partial(on_statement, "ROLLBACK", None)

    def has_ended(self) -> bool:
        return self._watched and (self._is_closed() or not is_marked(self.native))

    def translate(self, error: BaseException) -> StoreError | None:
        # a session that is ended between two answers is an InternalError to psycopg
        return translated(error, self._dialect, lost=self.lost and not self._is_closed())

    def _is_closed(self) -> bool:
        """Whether its user closed it. A broken connection does not count as closed."""
        return bool(self.native.closed and not self.native.broken)

    def _check_open(self) -> None:
        """Check that statements can still be sent on it."""
        if self._pgconn.status == _CONNECTED:
            return
        if self.native.broken:
            raise connection_lost()
        raise StoreError("The handler closed the connection of its transaction.", fault=Fault.GUARD)

    # -- from and to a pool -------------------------------------------------------------------

    def restore(self) -> None:
        self._object.restore()

    async def reset(self) -> bool:
        assert self.changed is not None, "nothing is to be reset"
        if self.changed.lasts is Lasts.CONNECTION:
            return False
        try:
            await self._turn(reset(self.native.pgconn))
        except (psycopg.Error, StoreError):
            return False
        return True

    async def prepare_for_use(self) -> None:
        self._object.watch()
        self._autocommit = self.native.autocommit
        if self._autocommit:
            # a handler that rolls back must end up in a new transaction, not in autocommit
            await self._set_autocommit(False)

    async def give_back(self) -> None:
        self._object.leave()
        if self._autocommit and not self.lost:
            await self._set_autocommit(True)

    async def _set_autocommit(self, on: bool) -> None:
        if self.is_async:
            await self.native.set_autocommit(on)
        else:
            self.native.autocommit = on

    # -- deferring ----------------------------------------------------------------------------

    async def pipe(self) -> None:
        self._check_open()
        queue = Queue(self.native, self._plans, self._object)
        if defer(self.native, queue):
            self._queue = queue

    async def flush(self) -> Failed | None:
        queue = self._stop_deferring()
        if queue is None or self._is_closed():
            # whatever comes next reports it
            return None
        if queue.entered:
            try:
                await self._turn(queue.drained())
            except psycopg.Error as error:
                raise connection_lost(error.sqlstate) from error
        if queue.failure is None:
            return None
        failure, position = queue.failure
        return Failed(Raised(failure, self.translate(failure), self.lost), position)

    @property
    def position(self) -> int | None:
        return None if self._queue is None else self._queue.position

    def _stop_deferring(self) -> Queue | None:
        """Stop deferring; returns the queue, if there was one."""
        queue, self._queue = self._queue, None
        if queue is not None:
            stop_deferring(self.native, queue)
        return queue

    # -- statements ---------------------------------------------------------------------------

    async def _turn(self, steps: Any) -> Any:
        return await self._use.wait_async(steps) if self.is_async else self._use.wait(steps)

    async def _waited(self, steps: Any) -> Any:
        if self._pgconn.status != _CONNECTED:
            self._check_open()
        return await self._use.wait_async(steps) if self.is_async else self._use.wait(steps)

    async def execute(self, statement: Statement) -> Result:
        await self.flush()
        if self.ahead is not None:
            try:
                await self.begun()
            except StoreError:
                pass  # it was begun in a transaction that had failed, which is still open
            else:
                raise handler_left(_FOLLOWED)
        result: Result = (await self._waited(self._pipeline.send((statement,))))[0]
        return result

    # outside a transaction, a pipeline is a transaction of its own
    alone = execute
    pipelines = True

    async def one_trip(self, statements: Statements) -> list[Result]:
        results: list[Result] = await self._waited(self._pipeline.one_trip(statements))
        self.changed = None
        return results

    async def savepoint(self) -> None:
        await self._command(SAVEPOINT)

    async def release_savepoint(self) -> None:
        await self._command(RELEASE)

    async def rollback_to_savepoint(self) -> None:
        await self._command(ROLLBACK_TO)

    async def _command(self, sql: bytes) -> None:
        if self._queue is None or not self._queue.command(sql):
            await self._waited(self._pipeline.send((), after=sql))

    # -- transactions -------------------------------------------------------------------------

    async def begin(self, statements: Statements) -> list[Result]:
        return await self.begin_meanwhile(statements, None)

    async def begin_meanwhile(
        self, statements: Statements, work: Callable[[], None] | None
    ) -> list[Result]:
        steps = self._pipeline.send(statements, before=BEGIN, meanwhile=work)
        results: list[Result] = await self._waited(steps)
        self._watched = is_marked(self.native)
        self.changed = None
        return results

    @property
    def ahead(self) -> Statements | None:
        return self._pipeline.ahead

    async def begun(self, work: Callable[[], None] | None = None) -> list[Result]:
        results: list[Result] = await self._waited(self._pipeline.begun(work))
        self._watched = is_marked(self.native)
        self.changed = None
        return results

    async def commit(self, statements: Statements) -> list[Result]:
        return await self.commit_then(statements, None)

    async def commit_then(
        self, statements: Statements, then: Callable[[], Statements | None] | None
    ) -> list[Result]:
        self._check_open()
        queue = self._stop_deferring()
        if self._use.contended or self.stained or self._pooled:
            # a pooler may give the session to another client once the COMMIT is answered (docs/howto/pgbouncer.md)
            then = None
        try:
            results: list[Result] = await self._turn(
                self._pipeline.send(statements, after=COMMIT, queue=queue, meanwhile=then)
            )
        except psycopg.Error as error:
            # a deferred statement of the handler failed, so COMMIT was skipped
            raise Raised(error, self.translate(error), self.lost) from error
        return results

    async def rollback(self) -> None:
        await self.flush()
        if self.ahead is not None:
            # whatever became of it, it is rolled back
            with suppress(StoreError):
                await self.begun()
        # a failure may have kept the handler's deferred statements from being prepared
        deferred = self._plans.forget()
        if self.native.pgconn.transaction_status == pq.TransactionStatus.IDLE:
            # a refused COMMIT already ended the transaction, and psycopg keeps what it has prepared
            return
        deallocated = deallocates(self.native)
        if deallocated is None or deallocated or deferred:
            self._pipeline.forget()
        try:
            await self._turn(nothing())  # psycopg itself would wait without a limit
            rolled_back = self.native.rollback()
            if self.is_async:
                await rolled_back
            if deallocated is None or (deferred and not deallocated):
                # psycopg may have deallocated everything or nothing just now: make sure it is everything
                await self._turn(self._pipeline.send((), after=DEALLOCATE))
        except psycopg.Error as error:
            raise connection_lost(error.sqlstate) from error

    def discard(self) -> None:
        loop = self._loop
        if loop is None:
            self._use.end_other()
            self._finish()
            if self._pool is not None:
                self._pool.putconn(self.native)
        elif self._use.refused and loop.is_running():
            self._ending = loop.create_task(self._ended())
        else:
            self._finish()
            if self._pool is not None and loop.is_running():
                self._ending = loop.create_task(self._pool.putconn(self.native))

    def _finish(self) -> None:
        self._stop_deferring()
        self.native.pgconn.finish()

    async def _ended(self) -> None:
        try:
            await self._use.end_other_async()
        finally:
            self._finish()
            if self._pool is not None:
                await self._pool.putconn(self.native)


class Borrowed(Executor):
    """The caller's connection, in the caller's transaction."""

    async def _execute(self, statement: Statement) -> Result:
        sql, names = native(statement.sql, "format")
        values = [statement.params[name] for name in names]
        try:
            cursor = plain_cursor(self._tx)
            sent = cursor.execute(sql, values)
            if self.is_async:
                await sent
            if not cursor.description:
                return Result((), cursor.rowcount)
            fetched = cursor.fetchall()
            return Result(await fetched if self.is_async else fetched, cursor.rowcount)
        except psycopg.Error as error:
            raise translated_or_lost(error, self.dialect) from error

    async def _send(self, statement: Statement) -> None:
        deferring = deferring_of(self._tx)
        if deferring is None:
            await self._execute(statement)
            return
        try:
            deferred = deferring.send(statement)
            if not (await deferred if self.is_async else deferred):
                await self._execute(statement)
        except psycopg.Error as error:
            raise translated_or_lost(error, self.dialect) from error


def borrow(tx: Any, *, is_async: bool, schema: str | None = None) -> Borrowed:
    if not isinstance(tx, psycopg.AsyncConnection if is_async else psycopg.Connection):
        raise sync_async_mismatch(tx, wants="sync" if is_async else "async")
    _check_transaction(tx)
    check_session(tx)
    return Borrowed(tx, dialect("postgresql", schema), is_async=is_async)


def _check_transaction(tx: Any) -> None:
    if tx.autocommit and tx.info.transaction_status == pq.TransactionStatus.IDLE:
        raise not_in_transaction(tx)


def translated(error: BaseException, dialect: Dialect, *, lost: bool = False) -> StoreError | None:
    """Translate a psycopg error; None if it is not one. Without a code, it is the connection's if that is lost."""
    if not isinstance(error, psycopg.Error):
        return None
    code = error.sqlstate
    return store_error(
        error,
        dialect,
        code=code,
        constraint=error.diag.constraint_name,
        lost=code is None and (lost or isinstance(error, psycopg.OperationalError)),
    )


def translated_or_lost(error: psycopg.Error, dialect: Dialect) -> StoreError:
    return translated(error, dialect) or connection_lost(error.sqlstate)
