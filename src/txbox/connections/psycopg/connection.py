"""A psycopg connection whose transactions txbox begins and ends.

They go to libpq as one pipeline for BEGIN and claim and one for close and COMMIT, with prepared
statements of txbox's own: psycopg's cache forgets them on a rollback.

Source: docs/decisions/0009-round-trips.md
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import psycopg
from psycopg import pq

from txbox.connections.base import handler_left, is_marked, store_error
from txbox.connections.libpq import BEGIN, COMMIT, DEALLOCATE, Pipeline, Turns, nothing
from txbox.connections.psycopg.piped import Plans, Queue, put_off, put_on
from txbox.errors import Fault, StoreError, StoreUnavailable
from txbox.steps import Begin, Failed, Raised, Result, Statement
from txbox.store.dialect import Dialect

SAVEPOINT = b"SAVEPOINT txbox_handler"
RELEASE = b"RELEASE SAVEPOINT txbox_handler"
ROLLBACK_TO = b"ROLLBACK TO SAVEPOINT txbox_handler"

_FOLLOWED = "the next transaction could begin behind it"


class _Owned:
    """What the sync and the async connection share."""

    def __init__(self, raw: Any, dialect: Dialect, prepare: bool, pool: Any) -> None:
        self.native = raw
        # psycopg's own word for a pooler that cannot keep prepared statements
        prepare = prepare and raw.prepare_threshold is not None
        self._dialect = dialect
        self._pool = pool
        self._autocommit = raw.autocommit
        self._pipeline = Pipeline(raw, prepare=prepare, translate=self.translate)
        self._plans = Plans(prepare)
        self._turns = Turns(raw)
        self._queue: Queue | None = None
        self._watched = False

    def left(self) -> bool:
        return self._watched and (self._is_closed() or not is_marked(self.native))

    def _is_closed(self) -> bool:
        """Say whether its user has closed it: one that is broken was closed by nobody."""
        return bool(self.native.closed and not self.native.broken)

    @property
    def lost(self) -> bool:
        return bool(self.native.closed)

    @property
    def taken(self) -> bool:
        """Somebody whom a handler has left behind uses it: nobody else may get it."""
        return self._turns.taken()

    def discard(self) -> None:
        self._put_on()
        self.native.pgconn.finish()

    @property
    def ahead(self) -> Begin | None:
        return self._pipeline.ahead

    def translate(self, error: BaseException) -> StoreError | None:
        return translated(error, self._dialect)

    def _open(self) -> Any:
        """The driver's connection, if statements can still be sent on it."""
        if self.native.pgconn.status == pq.ConnStatus.OK:
            return self.native
        if self.native.broken:
            raise StoreUnavailable("The database connection was lost.", fault=Fault.UNAVAILABLE)
        raise StoreError("The handler closed the connection of its transaction.", fault=Fault.GUARD)

    def _forget(self) -> None:
        self._pipeline.forget()
        self._plans.forget()

    def _is_over(self) -> bool:
        """Say whether a refused COMMIT has ended the transaction: psycopg then keeps what it has prepared."""
        over: bool = self.native.pgconn.transaction_status == pq.TransactionStatus.IDLE
        if over:
            self._plans.forget()
        return over

    def _put_off(self) -> None:
        """From here on what the handler sends waits for the commit, where the connection lets it."""
        raw = self._open()
        queue = Queue(raw, self._plans)
        if put_off(raw, queue):
            self._queue = queue

    def _put_on(self) -> Queue | None:
        """The end of putting off; returns the queue, if there was one."""
        queue, self._queue = self._queue, None
        if queue is not None:
            put_on(self.native, queue)
        return queue

    @property
    def position(self) -> int | None:
        """How much has been sent since putting off began; None when nothing is put off."""
        return None if self._queue is None else self._queue.position

    def _queued(self, sql: bytes) -> bool:
        return self._queue is not None and self._queue.command(sql)

    def _failed(self, queue: Queue) -> Failed | None:
        if queue.failure is None:
            return None
        error, position = queue.failure
        return Failed(Raised(error, self.translate(error), self.lost), position)


class PsycopgConnection(_Owned):
    """A sync connection whose transactions txbox begins and ends."""

    def prepare_for_use(self) -> None:
        self._autocommit = self.native.autocommit
        if self._autocommit:
            # a handler that rolls back must land in a new transaction, not in autocommit
            self.native.autocommit = False

    def give_back(self) -> None:
        if self._autocommit and not self.lost:
            self.native.autocommit = True

    def pipe(self) -> None:
        self._put_off()

    def flush(self) -> Failed | None:
        queue = self._put_on()
        if queue is None or self._is_closed():
            # what comes next says so
            return None
        if queue.entered:
            try:
                self._turns.wait(queue.drained())
            except psycopg.Error as error:
                raise _lost(error) from error
        return self._failed(queue)

    def _waited(self, steps: Any) -> Any:
        self._open()
        return self._turns.wait(steps)

    def savepoint(self) -> None:
        self._command(SAVEPOINT)

    def release_savepoint(self) -> None:
        self._command(RELEASE)

    def rollback_to_savepoint(self) -> None:
        self._command(ROLLBACK_TO)

    def _command(self, sql: bytes) -> None:
        if not self._queued(sql):
            self._waited(self._pipeline.send((), after=sql))

    def execute(self, statement: Statement) -> Result:
        self.flush()
        if self.ahead is not None:
            try:
                self.begun()
            except StoreError:
                pass  # it was begun in a transaction that had failed, and is still there
            else:
                raise handler_left(_FOLLOWED)
        result: Result = self._waited(self._pipeline.send((statement,)))[0]
        return result

    # outside of a transaction a pipeline is a transaction of its own
    read = execute

    def begin(self, statements: Sequence[Statement]) -> list[Result]:
        results: list[Result] = self._waited(self._pipeline.send(statements, before=BEGIN))
        self._watched = is_marked(self.native)
        return results

    def commit(self, statements: Sequence[Statement]) -> list[Result]:
        return self.commit_then(statements, None)

    def commit_then(
        self, statements: Sequence[Statement], then: Callable[[], Begin | None] | None
    ) -> list[Result]:
        self._open()
        queue = self._put_on()
        queued = 0 if queue is None else queue.left()
        if self._turns.met:
            then = None
        try:
            results: list[Result] = self._turns.wait(
                self._pipeline.send(statements, after=COMMIT, queued=queued, then=then)
            )
        except psycopg.Error as error:
            # a statement of the handler's, put off until now: COMMIT was skipped behind it
            raise Raised(error, self.translate(error), self.lost) from error
        return results

    def begun(self) -> list[Result]:
        results: list[Result] = self._waited(self._pipeline.begun())
        self._watched = is_marked(self.native)
        return results

    def rollback(self) -> None:
        self.flush()
        if self.ahead is not None:
            # whatever it came to, it is rolled back
            with suppress(StoreError):
                self.begun()
        if self._is_over():
            return
        self._forget()
        try:
            self._turns.wait(nothing())  # psycopg would wait without bound
            self.native.rollback()
            # psycopg may just have deallocated everything, or nothing: make it everything
            self._turns.wait(self._pipeline.send((), after=DEALLOCATE))
        except psycopg.Error as error:
            raise _lost(error) from error

    def discard(self) -> None:
        self._turns.end_other()
        super().discard()
        if self._pool is not None:
            self._pool.putconn(self.native)


class AsyncPsycopgConnection(_Owned):
    """The async twin of `PsycopgConnection`, bound to the event loop that opened it."""

    def __init__(self, raw: Any, dialect: Dialect, prepare: bool, pool: Any) -> None:
        super().__init__(raw, dialect, prepare, pool)
        self.loop = asyncio.get_running_loop()

    async def prepare_for_use(self) -> None:
        self._autocommit = self.native.autocommit
        if self._autocommit:
            await self.native.set_autocommit(False)

    async def give_back(self) -> None:
        if self._autocommit and not self.lost:
            await self.native.set_autocommit(True)

    async def pipe(self) -> None:
        self._put_off()

    async def flush(self) -> Failed | None:
        queue = self._put_on()
        if queue is None or self._is_closed():
            # what comes next says so
            return None
        if queue.entered:
            try:
                await self._turns.wait_async(queue.drained())
            except psycopg.Error as error:
                raise _lost(error) from error
        return self._failed(queue)

    async def _waited(self, steps: Any) -> Any:
        self._open()
        return await self._turns.wait_async(steps)

    async def savepoint(self) -> None:
        await self._command(SAVEPOINT)

    async def release_savepoint(self) -> None:
        await self._command(RELEASE)

    async def rollback_to_savepoint(self) -> None:
        await self._command(ROLLBACK_TO)

    async def _command(self, sql: bytes) -> None:
        if not self._queued(sql):
            await self._waited(self._pipeline.send((), after=sql))

    async def execute(self, statement: Statement) -> Result:
        await self.flush()
        if self.ahead is not None:
            try:
                await self.begun()
            except StoreError:
                pass
            else:
                raise handler_left(_FOLLOWED)
        result: Result = (await self._waited(self._pipeline.send((statement,))))[0]
        return result

    read = execute

    async def begin(self, statements: Sequence[Statement]) -> list[Result]:
        results: list[Result] = await self._waited(self._pipeline.send(statements, before=BEGIN))
        self._watched = is_marked(self.native)
        return results

    async def commit(self, statements: Sequence[Statement]) -> list[Result]:
        return await self.commit_then(statements, None)

    async def commit_then(
        self, statements: Sequence[Statement], then: Callable[[], Begin | None] | None
    ) -> list[Result]:
        self._open()
        queue = self._put_on()
        queued = 0 if queue is None else queue.left()
        if self._turns.met:
            then = None
        try:
            results: list[Result] = await self._turns.wait_async(
                self._pipeline.send(statements, after=COMMIT, queued=queued, then=then)
            )
        except psycopg.Error as error:
            # a statement of the handler's, put off until now: COMMIT was skipped behind it
            raise Raised(error, self.translate(error), self.lost) from error
        return results

    async def begun(self) -> list[Result]:
        results: list[Result] = await self._waited(self._pipeline.begun())
        self._watched = is_marked(self.native)
        return results

    async def rollback(self) -> None:
        await self.flush()
        if self.ahead is not None:
            # whatever it came to, it is rolled back
            with suppress(StoreError):
                await self.begun()
        if self._is_over():
            return
        self._forget()
        try:
            await self._turns.wait_async(nothing())  # psycopg would wait without bound
            await self.native.rollback()
            await self._turns.wait_async(self._pipeline.send((), after=DEALLOCATE))
        except psycopg.Error as error:
            raise _lost(error) from error

    def discard(self) -> None:
        if self._turns.refused and self.loop.is_running():
            self._ending = self.loop.create_task(self._ended())
            return
        super().discard()
        if self._pool is not None and self.loop.is_running():
            self._ending = self.loop.create_task(self._pool.putconn(self.native))

    async def _ended(self) -> None:
        try:
            await self._turns.end_other_async()
        finally:
            super().discard()
            if self._pool is not None:
                await self._pool.putconn(self.native)


def translated(error: BaseException, dialect: Dialect) -> StoreError | None:
    """Put a psycopg error into txbox's words; None when it is none."""
    if not isinstance(error, psycopg.Error):
        return None
    code = error.sqlstate
    return store_error(
        error,
        dialect,
        code=code,
        constraint=error.diag.constraint_name,
        lost=code is None and isinstance(error, psycopg.OperationalError),
    )


def translated_or_lost(error: psycopg.Error, dialect: Dialect) -> StoreError:
    return translated(error, dialect) or _lost(error)


def _lost(error: psycopg.Error) -> StoreUnavailable:
    return StoreUnavailable("The database connection was lost.", code=error.sqlstate)
