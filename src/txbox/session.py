"""How an operation uses a database: statements, connections, and the session that begins and ends transactions.

An operation is a coroutine that gets a `Session` (or the caller's connection, as a `Transaction`) and awaits
its methods. A blocking connection never suspends, so `blocking` finishes the whole operation with one `send`.
The same code therefore serves sync and async callers.

Source: docs/decisions/0031-coroutines.md
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from types import CoroutineType
from typing import Any, Concatenate, NamedTuple, ParamSpec, Protocol, TypeAlias, TypeVar, cast

from txbox.errors import Fault, SchemaError, StoreError

T = TypeVar("T")
P = ParamSpec("P")


class Statement(NamedTuple):
    """One SQL statement with `:name` parameters; `name` is also its crash point."""

    name: str
    sql: str
    params: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Result:
    """What a statement returned: all rows, and how many rows it touched."""

    rows: Sequence[Sequence[Any]]
    count: int


Statements = Sequence[Statement]


# -- crash points -----------------------------------------------------------------------------


class Crashed(BaseException):
    """Raised by a hook to simulate losing the process; caught only by the test that set the hook."""


#: Called with "before:<name>" and "after:<name>" around every statement; None outside of tests.
crash_point: Callable[[str], None] | None = None


def at(point: str) -> None:
    """Pass a named crash point."""
    if crash_point is not None:
        crash_point(point)


def _around(statements: Statements, first: str, last: str) -> None:
    # statements that share a round trip pass their points together: no client can die between them
    if crash_point is not None:
        crash_point(first)
        for statement in statements:
            crash_point(f"{last}:{statement.name}")


# -- connections ------------------------------------------------------------------------------


class Raised(Exception):
    """User code raised. `database_error` is the same error translated, if it came from the database.

    `lost`: the transaction's connection is gone. `ended`: this call ended the transaction; the calls
    before it did not.
    """

    def __init__(
        self,
        error: BaseException,
        database_error: StoreError | None,
        lost: bool,
        ended: bool = False,
    ) -> None:
        super().__init__(error)
        self.error = error
        self.database_error = database_error
        self.lost = lost
        self.ended = ended


class Failed(NamedTuple):
    """A deferred statement failed; `position` is the value of `Connection.position` before it was sent."""

    raised: Raised
    position: int


class Lasts(IntEnum):
    """How long what a statement sets stays on its connection."""

    TRANSACTION = 0
    SESSION = 1  # until it is reset
    CONNECTION = 2  # only closing the connection is sure to end it


class SettingChange(NamedTuple):
    """A statement, or a call of the driver, has set something that another message could see.

    Attributes:
        by: a keyword or name that shows it; never a value.
    """

    by: str
    lasts: Lasts


class Transaction(Protocol):
    """Where statements are executed: the caller's transaction, or that of a `Session`."""

    async def execute(self, statement: Statement) -> Result: ...
    async def send(self, statement: Statement) -> None:
        """Run a statement whose result is not read; it may fail later, at the latest with its transaction."""
        ...


#: Takes a statement and its values.
OnStatement: TypeAlias = Callable[[str, Any], None]


class Connection(ABC):
    """A connection whose transactions txbox begins and ends.

    Its methods are coroutines. On a blocking connection they never suspend: see `blocking`.
    Every method may raise `StoreError`.
    """

    #: True if its methods suspend, and so need an event loop.
    is_async: bool
    #: What a handler gets as its transaction.
    native: Any
    #: How often its pool had dropped the idle ones when this one was acquired.
    generation = 0
    #: What has been set in this transaction that another message could see, as far as that shows; see
    #: `connections.settings`. `begin` clears it, whatever runs afterwards adds to it.
    changed: SettingChange | None = None

    @property
    @abstractmethod
    def lost(self) -> bool:
        """Whether the connection is gone or closed."""

    @abstractmethod
    async def execute(self, statement: Statement) -> Result: ...

    @abstractmethod
    async def begin(self, statements: Statements) -> list[Result]:
        """BEGIN at READ COMMITTED and run statements, in one round trip if the driver can."""

    @abstractmethod
    async def commit(self, statements: Statements) -> list[Result]:
        """Run statements and COMMIT unless one fails, in one round trip if the driver can."""

    @abstractmethod
    async def rollback(self) -> None: ...

    @abstractmethod
    def discard(self) -> None:
        """Close at once, without a round trip."""

    @abstractmethod
    def translate(self, error: BaseException) -> StoreError | None:
        """Translate a driver's error; None if it is not one."""

    # -- optional capabilities ----------------------------------------------------------------

    #: It supports savepoints that the handler's own connection object knows about.
    nests = True

    async def savepoint(self) -> None:
        raise NotImplementedError

    async def release_savepoint(self) -> None:
        raise NotImplementedError

    async def rollback_to_savepoint(self) -> None:
        raise NotImplementedError

    def restore(self) -> None:  # noqa: B027 - not every driver's object has any
        """Undo what the last call set on the driver's object: factories, adapters, options."""

    async def reset(self) -> bool:
        """Undo what was set and outlives the transaction, if that is cheaper than another connection; else False."""
        return False

    def sets(self, change: SettingChange | None) -> None:
        """Note what a statement or call sets."""
        if change is not None and (self.changed is None or change.lasts > self.changed.lasts):
            self.changed = change

    @property
    def stained(self) -> bool:
        """Whether what was set outlives the transaction."""
        return self.changed is not None and self.changed.lasts > Lasts.TRANSACTION

    def watch(self, on_statement: OnStatement) -> None:
        """Call `on_statement` with each statement that the handler is about to send, COMMIT and ROLLBACK included, and
        its values, in whatever form the driver takes them.

        An exception from it keeps the statement from being sent. SQLite also calls it with "" while one runs, which an
        exception then ends. Discard the connection afterwards.
        """
        raise NotImplementedError

    def usable(self) -> bool:
        """Whether an idle connection may be used here: it is this loop's, unused, and outside a transaction."""
        return not self.lost

    def has_ended(self) -> bool:
        """Whether the transaction it began has ended, known without a round trip; False if unknown."""
        return False

    #: It can send BEGIN, statements and COMMIT together: `one_trip`.
    pipelines = False

    async def one_trip(self, statements: Statements) -> list[Result]:
        """Run statements as a transaction, with one wait for all of it; only where it `pipelines`.

        An error is `definite` unless the COMMIT may have taken effect.
        """
        raise NotImplementedError

    async def alone(self, statement: Statement) -> Result:
        """Run one statement as a transaction of its own, without BEGIN and COMMIT if the driver can."""
        (result,) = await self.begin((statement,))
        await self.commit(())
        return result

    @property
    def position(self) -> int | None:
        """How much was sent since `pipe`; None when nothing is deferred."""
        return None

    async def pipe(self) -> None:  # noqa: B027 - most drivers cannot
        """Defer the handler's statements from here on, if the driver can.

        `commit` sends them along with its own, and raises `Raised` for the first one that failed.
        `execute` and `rollback` also end deferring; a failure then shows up as an aborted transaction.
        """

    async def flush(self) -> Failed | None:
        """Send what was deferred, wait for all of it and stop deferring; returns the first failure."""
        return None

    @property
    def ahead(self) -> Statements | None:
        """What was begun behind the last COMMIT and has not been awaited yet."""
        return None

    async def begin_meanwhile(
        self, statements: Statements, work: Callable[[], None] | None
    ) -> list[Result]:
        """`begin`. `work` is called while the server is at work; a driver that cannot pipeline does not call it."""
        del work
        return await self.begin(statements)

    async def commit_then(
        self, statements: Statements, then: Callable[[], Statements | None] | None
    ) -> list[Result]:
        """`commit`. `then` is called after COMMIT is sent and returns what to begin behind it.

        A driver that cannot pipeline does not call it. An error raised here is that of the COMMIT;
        `rollback` also ends what was begun behind it.
        """
        del then
        return await self.commit(statements)

    async def begun(self, work: Callable[[], None] | None = None) -> list[Result]:
        """Wait for what was begun behind the COMMIT, as `begin_meanwhile` does."""
        raise NotImplementedError


class Connections(Protocol):
    """Where connections come from and are returned to."""

    @property
    def is_async(self) -> bool: ...
    @property
    def idle_limit(self) -> Statements:
        """What a transaction begins with so that its locks end soon after its process stands still."""
        ...

    @property
    def waits(self) -> dict[object, float]:
        """The sessions that wait for an answer to statements of txbox, and since when, by `time.monotonic`."""
        ...

    def distrust(self, connection: Any) -> None:
        """This connection reported that the database is away: drop the idle ones, which may be dead as well."""
        ...

    def acquire(self) -> Coroutine[Any, Any, Connection]: ...
    def release(self, connection: Any) -> Coroutine[Any, Any, None]: ...


# -- sessions ---------------------------------------------------------------------------------

# A handler's SET ROLE outlives its transaction, and that role may lack rights on txbox's tables. If the first
# statements fail this way, nothing has been done yet: another connection shows whether the right is really missing.
_NO_RIGHT = "42501"
# more than a pool keeps idle
_OTHERS_MAX = 20


class Session:
    """One operation's use of a database: one connection at a time, from `begin` to the transaction's end.

    It holds no connection while it waits.

    Guarantee: once it is closed, it leaves no transaction open.
    """

    __slots__ = (
        "_connections",
        "_then",
        "_unavailable",
        "_waits",
        "connection",
        "is_async",
    )

    def __init__(self, connections: Connections) -> None:
        self._connections = connections
        self.is_async = connections.is_async
        #: The connection of the current transaction; None outside one.
        self.connection: Connection | None = None
        # the connection reported that the database is away, or does not accept work
        self._unavailable = False
        self._waits = connections.waits
        # what the next COMMIT calls for statements to begin behind it, see `commit_then`; only a lane sets it
        self._then: Callable[[], Statements | None] | None = None

    async def begin(
        self,
        statements: Statements = (),
        meanwhile: Callable[[], None] | None = None,
        *,
        user_code: bool = False,
    ) -> list[Result]:
        """Begin a transaction and run statements, in one round trip if the driver can.

        If that fails because the database is away, it is tried once more, on a new connection: of a transaction that
        was not committed, nothing remains.

        Args:
            meanwhile: called while the server is at work, if the driver can do that; it must not raise.
            user_code: user code runs in it, so only that, or the statements, can tell how long it may be idle.
        """
        idle_limit = () if user_code else self._connections.idle_limit
        if idle_limit:
            statements = (*idle_limit, *statements)
        await self._settle_ahead(statements)
        at("before:begin")

        def send(connection: Connection) -> Awaitable[list[Result]]:
            if connection.ahead is not None:
                return connection.begun(meanwhile)
            if meanwhile is None:
                return connection.begin(statements)
            return connection.begin_meanwhile(statements, meanwhile)

        return (await self._sent(statements, send))[len(idle_limit) :]

    async def _settle_ahead(self, statements: Statements | None = None) -> None:
        """Before what follows a COMMIT: end what `_then` has begun behind it, unless that is these statements."""

    async def _sent(
        self,
        statements: Statements,
        send: Callable[[Connection], Awaitable[list[Result]]],
        *,
        commits: bool = False,
    ) -> list[Result]:
        """Send the beginning of a transaction, or all of one; once more, on a new connection, if the first was lost.

        Args:
            commits: it includes the COMMIT, so only a definite error may be tried again.
        """
        again, others = False, 0
        while True:
            connection = self.connection
            if connection is None:
                connection = self.connection = await self._connections.acquire()
            self._waits[self] = time.monotonic()
            try:
                results = await send(connection)
            except StoreError as error:
                if self._away(error) and (error.definite or not commits) and not again:
                    again = True
                elif error.code == _NO_RIGHT and others < _OTHERS_MAX:
                    others += 1
                else:
                    raise
                self.discard()
            else:
                _around(statements, "after:begin", "after")
                return results
            finally:
                self._waits.pop(self, None)

    def _away(self, error: StoreError) -> bool:
        """Whether the error says that the database is away; its connection is then not used again."""
        if error.fault is Fault.UNAVAILABLE:
            self._unavailable = True
        return self._unavailable

    def failed(self, error: BaseException) -> None:
        """The caller's code failed with this error, perhaps since the database is away: see `rollback`."""
        failure = None if self.connection is None else self.connection.translate(error)
        if failure is not None:
            self._away(failure)

    async def execute(self, statement: Statement) -> Result:
        """Run one statement in the transaction."""
        assert self.connection is not None, "no transaction has begun"
        at(f"before:{statement.name}")
        self._waits[self] = time.monotonic()
        try:
            result = await self.connection.execute(statement)
        except StoreError as error:
            self._away(error)
            raise
        finally:
            self._waits.pop(self, None)
        at(f"after:{statement.name}")
        return result

    async def send(self, statement: Statement) -> None:
        """See `Transaction.send`."""
        await self.execute(statement)

    async def commit(self, statements: Statements = (), *, goes_on: bool = False) -> list[Result]:
        """Run statements and COMMIT unless one fails, in one round trip if the driver can.

        Once the COMMIT is sent, its answer is awaited even if the caller is cancelled.

        Args:
            goes_on: more of this batch may follow, so that nothing may be begun behind it.
        """
        connection = self.connection
        assert connection is not None, "no transaction has begun"
        _around(statements, "before:commit", "before")
        then = None
        if statements and not goes_on:
            then, self._then = self._then, None
        commit = self._committed(connection, statements, then)
        return await (_shielded(commit) if self.is_async else commit)

    async def _committed(
        self,
        connection: Connection,
        statements: Statements,
        then: Callable[[], Statements | None] | None,
    ) -> list[Result]:
        """Send the COMMIT, and `then` begin what that returns; the connection is released unless something was."""
        self._waits[self] = time.monotonic()
        try:
            results = await (
                connection.commit(statements)
                if then is None
                else connection.commit_then(statements, then)
            )
        except StoreError as error:
            self._away(error)
            raise
        finally:
            self._waits.pop(self, None)
        at("after:commit")
        if then is None or connection.ahead is None:
            self.connection = None
            await self._connections.release(connection)
        return results

    async def rollback(self) -> None:
        """Roll back the transaction, if there is one. A connection that cannot, or reported trouble, is dropped."""
        connection = self.connection
        if connection is None:
            return
        if self._unavailable:
            self.discard()
            return
        try:
            # a caller cancelled in between still has the connection, and drops it
            await connection.rollback()
        except StoreError:
            self.discard()
            return
        if connection.lost:
            self.discard()
        else:
            await self._release(connection)

    async def _release(self, connection: Connection) -> None:
        self.connection = None
        release = self._connections.release(connection)
        await (_shielded(release) if self.is_async else release)

    def discard(self) -> None:
        """Drop the connection without finding out how its transaction ended."""
        connection, self.connection = self.connection, None
        if connection is not None:
            if self._unavailable or connection.lost:
                self._connections.distrust(connection)
            self._unavailable = False
            connection.discard()

    close = discard

    async def together(self, statements: Statements) -> list[Result]:
        """Run statements as a transaction of their own, in one round trip if the driver can.

        Nothing that they return can stop the COMMIT.
        """
        await self._settle_ahead()
        if self.connection is None:
            self.connection = await self._connections.acquire()
        if self.connection.pipelines:
            sent = self._in_one_trip(statements)
            return await (_shielded(sent) if self.is_async else sent)
        results = await self.begin(statements)
        await self.commit()
        return results

    async def _in_one_trip(self, statements: Statements) -> list[Result]:
        at("before:begin")
        results = await self._sent(
            statements, lambda connection: connection.one_trip(statements), commits=True
        )
        at("after:commit")
        connection, self.connection = self.connection, None
        assert connection is not None, "it has just answered"
        await self._connections.release(connection)
        return results

    async def alone(self, statement: Statement) -> Result:
        """Run one statement as a transaction of its own, without BEGIN and COMMIT if the driver can.

        Args:
            statement: may run twice: if the connection was lost, it is tried once more, on a new one.
        """
        await self._settle_ahead()
        at(f"before:{statement.name}")
        again = False
        while True:
            connection = self.connection = await self._connections.acquire()
            self._waits[self] = time.monotonic()
            try:
                result = await connection.alone(statement)
            except StoreError as error:
                if not self._away(error) or again:
                    raise
                self.discard()
                again = True
            else:
                at(f"after:{statement.name}")
                await self._release(connection)
                return result
            finally:
                self._waits.pop(self, None)

    async def wait(self, timeout_s: float, until: Future[Any] | None = None) -> None:
        """Wait outside any transaction until the future is done or the timeout passes."""
        await self._settle_ahead()
        if self.is_async:
            if until is None:
                await asyncio.sleep(timeout_s)
            else:
                await asyncio.wait([asyncio.wrap_future(until)], timeout=timeout_s)
        elif until is None:
            time.sleep(timeout_s)  # noqa: ASYNC251 - nothing else runs on this thread
        else:
            # not concurrent.futures.wait, which costs three times as much: idle lanes get here for every message
            with suppress(TimeoutError):
                until.exception(timeout_s)


async def _shielded(work: Awaitable[T]) -> T:
    """Await work to its end, however often the caller is cancelled meanwhile."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        # a COMMIT may be on its way: leave its connection alone until the answer is in
        while not task.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait([task])
        raise


# -- entry points -----------------------------------------------------------------------------

#: What runs in a session, and its further arguments.
Operation: TypeAlias = Callable[Concatenate[Session, P], Coroutine[Any, Any, T]]


def blocking(operation: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine whose connections block, so that it never suspends."""
    try:
        operation.send(None)
    except StopIteration as done:
        answer: T = done.value
        return answer
    operation.close()
    raise AssertionError("a blocking connection tried to wait for an event loop")


def drive(
    connections: Connections, operation: Operation[P, T], *args: P.args, **kwargs: P.kwargs
) -> T:
    """Run an operation in transactions that txbox begins and ends, on blocking connections.

    Guarantee: no transaction stays open, however this function ends.
    """
    db = Session(connections)
    try:
        return blocking(operation(db, *args, **kwargs))
    finally:
        db.close()


async def drive_async(
    connections: Connections, operation: Operation[P, T], *args: P.args, **kwargs: P.kwargs
) -> T:
    """`drive` for connections of this event loop."""
    db = Session(connections)
    try:
        return await operation(db, *args, **kwargs)
    finally:
        db.close()


def run(
    tx: Transaction,
    operation: Callable[Concatenate[Transaction, P], Coroutine[Any, Any, T]],
    *args: P.args,
    **kwargs: P.kwargs,
) -> T:
    """Run an operation in the caller's transaction, which is neither begun, committed nor rolled back.

    Raises:
        SchemaError: a txbox table is missing; the message contains the command to run.
        StoreError: whatever else the operation raises.
    """
    return blocking(_explained(operation(tx, *args, **kwargs)))


async def run_async(
    tx: Transaction,
    operation: Callable[Concatenate[Transaction, P], Coroutine[Any, Any, T]],
    *args: P.args,
    **kwargs: P.kwargs,
) -> T:
    """`run` for a connection of this event loop."""
    return await _explained(operation(tx, *args, **kwargs))


async def _explained(operation: Coroutine[Any, Any, T]) -> T:
    try:
        return await operation
    except StoreError as error:
        if error.fault is not Fault.SCHEMA:
            raise
        # the schema version cannot be queried: a statement of this transaction has failed
        raise SchemaError(
            f"A table, column or function of txbox is missing from this database ({error}): run `txbox init`, or "
            "compare its tables with `txbox schema print`."
        ) from None


def async_of(
    verb: Callable[P, T],
) -> Callable[[Callable[..., Coroutine[Any, Any, T]]], Callable[P, CoroutineType[Any, Any, T]]]:
    """Give an async verb the signature of its sync twin, so that the signature is written once."""

    def signed(
        twin: Callable[..., Coroutine[Any, Any, T]],
    ) -> Callable[P, CoroutineType[Any, Any, T]]:
        # where inspect, help() and editors read it
        vars(twin)["__wrapped__"] = verb
        return cast("Callable[P, CoroutineType[Any, Any, T]]", twin)

    return signed
