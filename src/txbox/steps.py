"""Operations as generators of steps, and the two loops that carry them out.

An operation yields a step and receives its result; it never touches a driver. `run` and
`run_async` carry statements out on a connection whose transaction belongs to the caller;
`drive` and `drive_async` also begin and end transactions of txbox's own.

Source: docs/decisions/0002-steps.md
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeVar, cast

from txbox.errors import Fault, HandlerTimeout, StoreError

T = TypeVar("T")

Call = Callable[[Any], Any]


class Statement(NamedTuple):
    """One SQL statement with `:name` parameters; `name` is also its crash point."""

    name: str
    sql: str
    params: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Result:
    """What a statement returned: all rows, and the count of rows it touched."""

    rows: Sequence[Sequence[Any]]
    count: int


class Begin(NamedTuple):
    """Begin a transaction of txbox's own and run statements, in one round trip where the driver can."""

    statements: tuple[Statement, ...] = ()


class Commit(NamedTuple):
    """Run statements and COMMIT unless one fails, in one round trip where the driver can."""

    statements: tuple[Statement, ...] = ()


class Rollback(NamedTuple):
    """Roll the transaction back; a connection that cannot is dropped."""


class Discard(NamedTuple):
    """Drop the connection: what its transaction became is not known here."""


class Pipe(NamedTuple):
    """From here to Commit no result is read: a connection that can puts statements off and sends them together."""


class Invoke(NamedTuple):
    """Call user code with the transaction's own driver object, or None outside of one; answers with a list."""

    calls: Sequence[Call]
    timeout_s: float | None = None


class InvokeGroups(NamedTuple):
    """As Invoke, each group between a savepoint and its release; answers with `Progress`.

    On a connection without savepoints it is Invoke: the first error ends the transaction.
    """

    groups: Sequence[Sequence[Call]]
    timeout_s: float | None = None
    piped: bool = False


class Undo(NamedTuple):
    """Roll back to the savepoint of the group that failed."""


class Wait(NamedTuple):
    """Wait outside any transaction, until the future is done or the time is over."""

    timeout_s: float
    until: Future[Any] | None = None


class Raised(Exception):
    """User code raised; `store` is its database error in txbox's words, if it was one.

    `lost` says that the connection of the transaction is gone; `left`, that this call has ended the
    transaction, which those before it had not.
    """

    def __init__(
        self, error: Exception, store: StoreError | None, lost: bool, left: bool = False
    ) -> None:
        super().__init__(error)
        self.error = error
        self.store = store
        self.lost = lost
        self.left = left


@dataclass(slots=True)
class Progress:
    """How far groups of calls came: `released` of them are done, the next one is to be rolled back.

    Attributes:
        answers: what the calls of the groups that are done returned, in their order.
        raised: why the next group failed; None when all are done.
        culprit: which call of that group raised; None when that is not known.
    """

    answers: list[Any] = field(default_factory=list[Any])
    released: int = 0
    raised: Raised | None = None
    culprit: int | None = None


class _Course:
    """Notes where groups and calls begin, to find the one whose statement failed later."""

    def __init__(self, groups: Sequence[Sequence[Call]]) -> None:
        self._groups = groups
        self._begun: list[tuple[int, int, int]] = []  # position, group, call
        self.group = 0
        self.call = 0

    def begin(self, position: int | None) -> None:
        if position is not None:
            self._begun.append((position, self.group, self.call))

    def progress(
        self, answers: list[Any], raised: Raised | None, failed: Failed | None
    ) -> Progress:
        """Say how far it came, when a call raised, or what was put off failed, which comes first."""
        group: int
        culprit: int | None
        if failed is not None:
            raised = failed.raised
            began = [own for own in self._begun if own[0] <= failed.position]
            group, culprit = began[-1][1:] if began else (0, 0)
        elif raised is not None:
            group, culprit = self.group, self.call
            if culprit == len(self._groups[group]):
                # a session flushed when the group was released
                culprit = 0 if culprit == 1 else None
        else:
            return Progress(answers, len(self._groups))
        del answers[sum(len(own) for own in self._groups[:group]) :]
        return Progress(answers, group, raised, culprit)


Step = Statement | Begin | Commit | Rollback | Discard | Pipe | Invoke | InvokeGroups | Undo | Wait
Steps = Generator[Step, Any, T]


class Executor(Protocol):
    """A connection in a transaction of the caller's; it executes statements and nothing else."""

    def execute(self, statement: Statement) -> Result: ...


class AsyncExecutor(Protocol):
    """The awaitable twin of `Executor`."""

    async def execute(self, statement: Statement) -> Result: ...


class Connection(Protocol):
    """A connection whose transactions txbox begins and ends.

    Every method raises `StoreError`. `discard` closes at once, without a round trip.
    """

    @property
    def native(self) -> Any: ...
    @property
    def lost(self) -> bool: ...
    def execute(self, statement: Statement) -> Result: ...
    def begin(self, statements: Sequence[Statement]) -> list[Result]: ...
    def commit(self, statements: Sequence[Statement]) -> list[Result]: ...
    def rollback(self) -> None: ...
    def discard(self) -> None: ...
    def translate(self, error: BaseException) -> StoreError | None: ...


class Failed(NamedTuple):
    """A statement that was put off failed; `position` is what `Piping.position` was before it was sent."""

    raised: Raised
    position: int


class Piping(Protocol):
    """A Connection that can put statements off.

    `pipe` begins that; `commit` sends everything with its own statements, and raises `Raised` for what
    failed of the rest. `execute` and `rollback` end it too: what had failed is seen as an aborted transaction.
    """

    @property
    def position(self) -> int | None:
        """How much was sent since `pipe`; None when nothing is put off."""
        ...

    def pipe(self) -> None: ...
    def flush(self) -> Failed | None:
        """Send what was put off, wait for all of it, and end putting off; returns what failed first."""
        ...


class AsyncPiping(Protocol):
    """The awaitable twin of `Piping`."""

    @property
    def position(self) -> int | None: ...
    async def pipe(self) -> None: ...
    async def flush(self) -> Failed | None: ...


class Nesting(Protocol):
    """A Connection with savepoints that the handler's own object knows of."""

    def savepoint(self) -> None: ...
    def release_savepoint(self) -> None: ...
    def rollback_to_savepoint(self) -> None: ...


class AsyncNesting(Protocol):
    """The awaitable twin of `Nesting`."""

    async def savepoint(self) -> None: ...
    async def release_savepoint(self) -> None: ...
    async def rollback_to_savepoint(self) -> None: ...


class Watching(Protocol):
    """A Connection, sync or async, that knows without a round trip when the transaction it began has ended."""

    def left(self) -> bool: ...


class AsyncConnection(Protocol):
    """The awaitable twin of `Connection`; `discard` and `translate` do no I/O."""

    @property
    def native(self) -> Any: ...
    @property
    def lost(self) -> bool: ...
    async def execute(self, statement: Statement) -> Result: ...
    async def begin(self, statements: Sequence[Statement]) -> list[Result]: ...
    async def commit(self, statements: Sequence[Statement]) -> list[Result]: ...
    async def rollback(self) -> None: ...
    def discard(self) -> None: ...
    def translate(self, error: BaseException) -> StoreError | None: ...


# not isinstance(), which looks at every method of a protocol each time: that costs more than a statement


def _nesting(own: object) -> Nesting | None:
    return cast("Nesting", own) if hasattr(own, "savepoint") else None


def _nesting_async(own: object) -> AsyncNesting | None:
    return cast("AsyncNesting", own) if hasattr(own, "savepoint") else None


def _piping(own: object) -> Piping | None:
    return cast("Piping", own) if hasattr(own, "pipe") else None


def _piping_async(own: object) -> AsyncPiping | None:
    return cast("AsyncPiping", own) if hasattr(own, "pipe") else None


def _watching(own: object) -> Watching | None:
    return cast("Watching", own) if hasattr(own, "left") else None


class Connections(Protocol):
    """Where connections come from and go back to."""

    def acquire(self) -> Connection: ...
    def release(self, connection: Any) -> None: ...


class AsyncConnections(Protocol):
    """The awaitable twin of `Connections`."""

    async def acquire(self) -> AsyncConnection: ...
    async def release(self, connection: Any) -> None: ...


#: Called with "before:<name>" and "after:<name>" around every step; None outside of tests.
crash_point: Callable[[str], None] | None = None


def at(point: str) -> None:
    """Pass a named crash point that is not a step (for instance `received` or `before:ack`)."""
    if crash_point is not None:
        crash_point(point)


def _around(statements: Sequence[Statement], first: str, last: str) -> None:
    # statements that share a round trip are passed together: no client can die between them
    if crash_point is not None:
        crash_point(first)
        for statement in statements:
            crash_point(f"{last}:{statement.name}")


def run(connection: Executor, steps: Steps[T]) -> T:
    """Carry statements out in the caller's transaction; begins, commits and rolls back nothing."""
    try:
        step = next(steps)
        while True:
            assert type(step) is Statement, "only statements may run in a caller's transaction"
            at(f"before:{step.name}")
            try:
                result = connection.execute(step)
            except StoreError as error:
                step = steps.throw(error)
            else:
                at(f"after:{step.name}")
                step = steps.send(result)
    except StopIteration as stop:
        answer: T = stop.value
        return answer


async def run_async(connection: AsyncExecutor, steps: Steps[T]) -> T:
    """The awaitable twin of `run`."""
    try:
        step = next(steps)
        while True:
            assert type(step) is Statement, "only statements may run in a caller's transaction"
            at(f"before:{step.name}")
            try:
                result = await connection.execute(step)
            except StoreError as error:
                step = steps.throw(error)
            else:
                at(f"after:{step.name}")
                step = steps.send(result)
    except StopIteration as stop:
        answer: T = stop.value
        return answer


def drive(connections: Connections, steps: Steps[T]) -> T:
    """Carry steps out in transactions of txbox's own.

    A connection is held from Begin to Commit, Rollback or Discard, never while waiting.
    Guarantee: whatever leaves this function, no transaction of its stays open.
    """
    connection: Connection | None = None
    try:
        step = next(steps)
        while True:
            outcome: Any = None
            try:
                if type(step) is Begin:
                    at("before:begin")
                    if connection is None:
                        connection = connections.acquire()
                    outcome = connection.begin(step.statements)
                    _around(step.statements, "after:begin", "after")
                elif type(step) is Statement:
                    assert connection is not None
                    at(f"before:{step.name}")
                    outcome = connection.execute(step)
                    at(f"after:{step.name}")
                elif type(step) is Invoke:
                    outcome = _invoke_calls(connection, step)
                elif type(step) is InvokeGroups:
                    assert connection is not None
                    outcome = _invoke_groups(connection, step)
                elif type(step) is Undo:
                    at("before:rollback_to_savepoint")
                    assert connection is not None
                    if (nesting := _nesting(connection)) is not None:
                        nesting.rollback_to_savepoint()
                elif type(step) is Pipe:
                    assert connection is not None
                    if (piping := _piping(connection)) is not None:
                        piping.pipe()
                elif type(step) is Commit:
                    assert connection is not None
                    _around(step.statements, "before:commit", "before")
                    outcome = connection.commit(step.statements)
                    at("after:commit")
                    connections.release(connection)
                    connection = None
                elif type(step) is Wait:
                    _sleep(step)
                elif connection is not None:  # Rollback, Discard
                    held, connection = connection, None
                    if type(step) is Rollback and _rolled_back(held):
                        connections.release(held)
                    else:
                        held.discard()
            except (StoreError, Raised) as error:
                step = steps.throw(error)
            else:
                step = steps.send(outcome)
    except StopIteration as stop:
        answer: T = stop.value
        return answer
    finally:
        if connection is not None:
            connection.discard()
        # a cancelled operation ends now, not when its traceback is collected: it holds ids in flight
        steps.close()


def _invoke(connection: Connection | None, call: Call, timeout_s: float | None) -> Any:
    at("before:handler")
    started = time.monotonic() if timeout_s is not None else 0.0
    try:
        # asked for by each call: an adapter tells by that what one has done to the next
        answer = call(connection.native if connection is not None else None)
    except Exception as error:
        raise _raised(error, connection) from error
    if timeout_s is not None and time.monotonic() - started > timeout_s:
        # a thread cannot be interrupted; what it did too late is rolled back all the same
        raise _raised(_timeout(timeout_s), connection)
    at("after:handler")
    return answer


def _invoke_calls(connection: Connection | None, step: Invoke) -> list[Any]:
    # what one call alone has done is seen when the transaction is closed
    watching = _watching(connection) if len(step.calls) > 1 else None
    answers: list[Any] = []
    for call in step.calls:
        try:
            answers.append(_invoke(connection, call, step.timeout_s))
        except Raised as raised:
            raised.left = watching is not None and watching.left()
            raise
        if watching is not None and watching.left():
            raise _left(watching)
    return answers


def _left(connection: Any) -> Raised:
    """The transaction has ended in a call: the next ones would write outside of any."""
    error = StoreError(
        "The handler ended the transaction that claimed its message.", fault=Fault.GUARD
    )
    return Raised(error, None, connection.lost, left=True)


def _invoke_groups(connection: Connection, step: InvokeGroups) -> Progress:
    nesting = _nesting(connection)
    if nesting is None:
        calls = [call for group in step.groups for call in group]
        return Progress(
            [_invoke(connection, call, step.timeout_s) for call in calls], len(step.groups)
        )
    piping = _piping(connection) if step.piped else None
    if piping is not None:
        piping.pipe()
    watching = _watching(connection)
    answers: list[Any] = []
    course, stopped = _Course(step.groups), None
    try:
        for course.group, group in enumerate(step.groups):
            at("before:savepoint")
            nesting.savepoint()
            for course.call, call in enumerate(group):
                course.begin(piping.position if piping is not None else None)
                answers.append(_invoke(connection, call, step.timeout_s))
                if watching is not None and watching.left():
                    raise _left(watching)
            course.call = len(group)
            at("before:release_savepoint")
            nesting.release_savepoint()
    except Raised as raised:
        stopped = raised
        stopped.left = watching is not None and watching.left()
    except StoreError as error:
        # a handler has swallowed the error that failed the transaction
        if error.fault is not Fault.ABORTED:
            raise
        stopped = Raised(error, error, connection.lost)
    failed = piping.flush() if piping is not None else None
    return course.progress(answers, stopped, failed)


def _raised(error: Exception, connection: Connection | AsyncConnection | None) -> Raised:
    if connection is None:
        return Raised(error, None, False)
    return Raised(error, connection.translate(error), connection.lost)


def _timeout(timeout_s: float) -> HandlerTimeout:
    return HandlerTimeout(
        f"The handler ran longer than its timeout of {timeout_s:g} s; its work is rolled back."
    )


def _rolled_back(connection: Connection) -> bool:
    try:
        connection.rollback()
    except StoreError:
        return False
    return not connection.lost


def _sleep(step: Wait) -> None:
    if step.until is None:
        time.sleep(step.timeout_s)
    else:
        # not concurrent.futures.wait, which costs three times as much: idle lanes come by here for every message
        with suppress(TimeoutError):
            step.until.exception(step.timeout_s)


async def drive_async(connections: AsyncConnections, steps: Steps[T]) -> T:
    """The awaitable twin of `drive`; a COMMIT that was sent is awaited even when cancelled."""
    connection: AsyncConnection | None = None
    try:
        step = next(steps)
        while True:
            outcome: Any = None
            try:
                if type(step) is Begin:
                    at("before:begin")
                    if connection is None:
                        connection = await connections.acquire()
                    outcome = await connection.begin(step.statements)
                    _around(step.statements, "after:begin", "after")
                elif type(step) is Statement:
                    assert connection is not None
                    at(f"before:{step.name}")
                    outcome = await connection.execute(step)
                    at(f"after:{step.name}")
                elif type(step) is Invoke:
                    outcome = await _invoke_calls_async(connection, step)
                elif type(step) is InvokeGroups:
                    assert connection is not None
                    outcome = await _invoke_groups_async(connection, step)
                elif type(step) is Undo:
                    at("before:rollback_to_savepoint")
                    assert connection is not None
                    if (nesting := _nesting_async(connection)) is not None:
                        await nesting.rollback_to_savepoint()
                elif type(step) is Pipe:
                    assert connection is not None
                    if (piping := _piping_async(connection)) is not None:
                        await piping.pipe()
                elif type(step) is Commit:
                    assert connection is not None
                    _around(step.statements, "before:commit", "before")
                    outcome = await _shielded(connection.commit(step.statements))
                    at("after:commit")
                    held, connection = connection, None
                    await connections.release(held)
                elif type(step) is Wait:
                    await _sleep_async(step)
                elif connection is not None:  # Rollback, Discard
                    held, connection = connection, None
                    if type(step) is Rollback and await _rolled_back_async(held):
                        await connections.release(held)
                    else:
                        held.discard()
            except (StoreError, Raised) as error:
                step = steps.throw(error)
            else:
                step = steps.send(outcome)
    except StopIteration as stop:
        answer: T = stop.value
        return answer
    finally:
        if connection is not None:
            connection.discard()
        # a cancelled operation ends now, not when its traceback is collected: it holds ids in flight
        steps.close()


async def _invoke_async(
    connection: AsyncConnection | None, call: Call, timeout_s: float | None
) -> Any:
    at("before:handler")
    limit = asyncio.timeout(timeout_s)
    try:
        async with limit:
            answer = await call(connection.native if connection is not None else None)
    except Exception as error:
        if isinstance(error, TimeoutError) and limit.expired():
            assert timeout_s is not None
            raise _raised(_timeout(timeout_s), connection) from error
        raise _raised(error, connection) from error
    at("after:handler")
    return answer


async def _invoke_calls_async(connection: AsyncConnection | None, step: Invoke) -> list[Any]:
    # what one call alone has done is seen when the transaction is closed
    watching = _watching(connection) if len(step.calls) > 1 else None
    answers: list[Any] = []
    for call in step.calls:
        try:
            answers.append(await _invoke_async(connection, call, step.timeout_s))
        except Raised as raised:
            raised.left = watching is not None and watching.left()
            raise
        if watching is not None and watching.left():
            raise _left(watching)
    return answers


async def _invoke_groups_async(connection: AsyncConnection, step: InvokeGroups) -> Progress:
    nesting = _nesting_async(connection)
    if nesting is None:
        calls = [call for group in step.groups for call in group]
        return Progress(
            [await _invoke_async(connection, call, step.timeout_s) for call in calls],
            len(step.groups),
        )
    piping = _piping_async(connection) if step.piped else None
    if piping is not None:
        await piping.pipe()
    watching = _watching(connection)
    answers: list[Any] = []
    course, stopped = _Course(step.groups), None
    try:
        for course.group, group in enumerate(step.groups):
            at("before:savepoint")
            await nesting.savepoint()
            for course.call, call in enumerate(group):
                course.begin(piping.position if piping is not None else None)
                answers.append(await _invoke_async(connection, call, step.timeout_s))
                if watching is not None and watching.left():
                    raise _left(watching)
            course.call = len(group)
            at("before:release_savepoint")
            await nesting.release_savepoint()
    except Raised as raised:
        stopped = raised
        stopped.left = watching is not None and watching.left()
    except StoreError as error:
        # a handler has swallowed the error that failed the transaction
        if error.fault is not Fault.ABORTED:
            raise
        stopped = Raised(error, error, connection.lost)
    failed = await piping.flush() if piping is not None else None
    return course.progress(answers, stopped, failed)


async def _shielded(commit: Awaitable[T]) -> T:
    task = asyncio.ensure_future(commit)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        # the COMMIT may be on its way: its connection must not be touched before the answer
        await asyncio.wait([task])
        raise


async def _rolled_back_async(connection: AsyncConnection) -> bool:
    try:
        await connection.rollback()
    except StoreError:
        return False
    return not connection.lost


async def _sleep_async(step: Wait) -> None:
    if step.until is None:
        await asyncio.sleep(step.timeout_s)
    else:
        await asyncio.wait([asyncio.wrap_future(step.until)], timeout=step.timeout_s)
