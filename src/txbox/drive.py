"""The loops that carry steps out: in the caller's transaction, or in transactions of txbox's own.

`run` and `run_async` carry statements out on a connection whose transaction belongs to the caller;
`drive` and `drive_async` also begin and end transactions.

Source: docs/decisions/0002-steps.md
"""

from __future__ import annotations

import asyncio
import signal
import threading
import time
import traceback
from collections.abc import Awaitable, Sequence
from contextlib import suppress
from functools import partial
from types import CodeType
from typing import Any, cast

from txbox.errors import Fault, HandlerTimeout, SchemaError, StoreError
from txbox.steps import (
    AsyncChaining,
    AsyncConnection,
    AsyncConnections,
    AsyncExecutor,
    AsyncNesting,
    AsyncPiping,
    AsyncReading,
    Begin,
    Call,
    Chaining,
    Commit,
    Connection,
    Connections,
    Crashed,
    Executor,
    Failed,
    Invoke,
    InvokeGroups,
    Nesting,
    Pipe,
    Piping,
    Progress,
    Raised,
    Read,
    Reading,
    Result,
    Rollback,
    Statement,
    Steps,
    T,
    Undo,
    Wait,
    Watching,
    around,
    at,
)


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
            began = [start for start in self._begun if start[0] <= failed.position]
            group, culprit = began[-1][1:] if began else (0, 0)
        elif raised is not None:
            group, culprit = self.group, self.call
            if culprit == len(self._groups[group]):
                # a session flushed when the group was released
                culprit = 0 if culprit == 1 else None
        else:
            return Progress(answers, len(self._groups))
        del answers[sum(len(calls) for calls in self._groups[:group]) :]
        return Progress(answers, group, raised, culprit)


def can_nest(connection: object) -> Nesting | None:
    return cast("Nesting", connection) if hasattr(connection, "savepoint") else None


def can_nest_async(connection: object) -> AsyncNesting | None:
    return cast("AsyncNesting", connection) if hasattr(connection, "savepoint") else None


def can_pipe(connection: object) -> Piping | None:
    return cast("Piping", connection) if hasattr(connection, "pipe") else None


def can_pipe_async(connection: object) -> AsyncPiping | None:
    return cast("AsyncPiping", connection) if hasattr(connection, "pipe") else None


def can_chain(connection: object) -> Chaining | None:
    return cast("Chaining", connection) if hasattr(connection, "commit_then") else None


def can_chain_async(connection: object) -> AsyncChaining | None:
    return cast("AsyncChaining", connection) if hasattr(connection, "commit_then") else None


def can_read(connection: object) -> Reading | None:
    return cast("Reading", connection) if hasattr(connection, "read") else None


def can_read_async(connection: object) -> AsyncReading | None:
    return cast("AsyncReading", connection) if hasattr(connection, "read") else None


def can_watch(connection: object) -> Watching | None:
    return cast("Watching", connection) if hasattr(connection, "left") else None


def _call(connection: Connection | None, call: Call, timeout_s: float | None) -> Any:
    at("before:handler")
    started = time.monotonic() if timeout_s is not None else 0.0
    try:
        # asked for by each call: an adapter tells by that what one has done to the next
        answer = call(connection.native if connection is not None else None)
    except BaseException as error:
        if _from_outside(error):
            raise
        raise _raised(error, connection) from error
    if timeout_s is not None and time.monotonic() - started > timeout_s:
        # a thread cannot be interrupted; what it did too late is rolled back all the same
        raise _raised(_timeout(timeout_s), connection)
    at("after:handler")
    return answer


def invoke(connection: Connection | None, step: Invoke) -> list[Any]:
    # what one call alone has done is seen when the transaction is closed
    watching = can_watch(connection) if len(step.calls) > 1 else None
    answers: list[Any] = []
    for call in step.calls:
        try:
            answers.append(_call(connection, call, step.timeout_s))
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


def invoke_groups(connection: Connection, step: InvokeGroups) -> Progress:
    nesting = can_nest(connection)
    if nesting is None:
        calls = [call for group in step.groups for call in group]
        return Progress(
            [_call(connection, call, step.timeout_s) for call in calls], len(step.groups)
        )
    piping = can_pipe(connection) if step.piped else None
    if piping is not None:
        piping.pipe()
    watching = can_watch(connection)
    answers: list[Any] = []
    course, stopped = _Course(step.groups), None
    try:
        for course.group, group in enumerate(step.groups):
            at("before:savepoint")
            nesting.savepoint()
            for course.call, call in enumerate(group):
                course.begin(piping.position if piping is not None else None)
                answers.append(_call(connection, call, step.timeout_s))
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


def _from_outside(error: BaseException) -> bool:
    """Say whether something else than the handler has raised this in it: a signal, or a simulated crash.

    Python calls signal handlers in the main thread only. One that is written in Python is among the frames of
    what it raises. The default for SIGINT has no frame: while it is installed, a KeyboardInterrupt in the main
    thread is taken for Ctrl-C, whoever has raised it.
    """
    if isinstance(error, (Exception, Crashed)):
        return isinstance(error, Crashed)
    if threading.current_thread() is not threading.main_thread():
        return False
    installed = [signal.getsignal(number) for number in signal.valid_signals()]
    if isinstance(error, KeyboardInterrupt) and signal.default_int_handler in installed:
        return True
    codes = {_code_of(handler) for handler in installed}
    return any(frame.f_code in codes for frame, _ in traceback.walk_tb(error.__traceback__))


def _code_of(function: Any) -> CodeType | None:
    while isinstance(function, partial):
        function = function.func
    # a method's is that of its function
    code: CodeType | None = getattr(function, "__code__", None)
    return code or getattr(type(function).__dict__.get("__call__"), "__code__", None)


def _is_ended(task: asyncio.Task[Any] | None, error: BaseException) -> bool:
    """Say whether the task that carries out the steps is being cancelled, or its coroutine closed from outside.

    Not so when an inner task was cancelled, or the handler itself has raised what ends programs.
    """
    try:
        closed = asyncio.current_task() is not task
    except RuntimeError:  # its loop no longer runs
        closed = True
    if closed or isinstance(error, Exception):
        return closed
    return (task is not None and task.cancelling() > 0) or _from_outside(error)


def _raised(error: BaseException, connection: Connection | AsyncConnection | None) -> Raised:
    if connection is None:
        return Raised(error, None, False)
    # what a handler does through txbox, staging or accepting, raises in txbox's words
    store = error if isinstance(error, StoreError) else connection.translate(error)
    return Raised(error, store, connection.lost)


def _timeout(timeout_s: float) -> HandlerTimeout:
    return HandlerTimeout(
        f"The handler ran longer than its timeout of {timeout_s:g} s; its work is rolled back."
    )


async def _call_async(
    connection: AsyncConnection | None, call: Call, timeout_s: float | None
) -> Any:
    at("before:handler")
    limit, task = asyncio.timeout(timeout_s), asyncio.current_task()
    try:
        async with limit:
            answer = await call(connection.native if connection is not None else None)
    except BaseException as error:
        if isinstance(error, TimeoutError) and limit.expired():
            assert timeout_s is not None
            raise _raised(_timeout(timeout_s), connection) from error
        if _is_ended(task, error):
            raise
        raise _raised(error, connection) from error
    at("after:handler")
    return answer


async def invoke_async(connection: AsyncConnection | None, step: Invoke) -> list[Any]:
    # what one call alone has done is seen when the transaction is closed
    watching = can_watch(connection) if len(step.calls) > 1 else None
    answers: list[Any] = []
    for call in step.calls:
        try:
            answers.append(await _call_async(connection, call, step.timeout_s))
        except Raised as raised:
            raised.left = watching is not None and watching.left()
            raise
        if watching is not None and watching.left():
            raise _left(watching)
    return answers


async def invoke_groups_async(connection: AsyncConnection, step: InvokeGroups) -> Progress:
    nesting = can_nest_async(connection)
    if nesting is None:
        calls = [call for group in step.groups for call in group]
        return Progress(
            [await _call_async(connection, call, step.timeout_s) for call in calls],
            len(step.groups),
        )
    piping = can_pipe_async(connection) if step.piped else None
    if piping is not None:
        await piping.pipe()
    watching = can_watch(connection)
    answers: list[Any] = []
    course, stopped = _Course(step.groups), None
    try:
        for course.group, group in enumerate(step.groups):
            at("before:savepoint")
            await nesting.savepoint()
            for course.call, call in enumerate(group):
                course.begin(piping.position if piping is not None else None)
                answers.append(await _call_async(connection, call, step.timeout_s))
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


# A role that a handler has set stays on its connection, and may have no right to txbox's tables: nothing
# has been done where the first statements fail so, and another connection tells whether the right is missing.
_NO_RIGHT = "42501"
# more than are kept idle
_OTHERS_MAX = 20


def run(connection: Executor, steps: Steps[T]) -> T:
    """Carry statements out in the caller's transaction; begins, commits and rolls back nothing.

    Raises:
        SchemaError: a table of txbox's is missing; the message contains the command to run.
        StoreError: as the steps do.
    """
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
    except StoreError as error:
        if error.fault is Fault.SCHEMA:
            raise _absent(error) from None
        raise


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
    except StoreError as error:
        if error.fault is Fault.SCHEMA:
            raise _absent(error) from None
        raise


def _absent(error: StoreError) -> SchemaError:
    # their version cannot be asked for: a statement of this transaction has failed
    return SchemaError(
        f"A table, column or function of txbox's is not in this database ({error}): run `txbox init`, or compare "
        "its tables with `txbox schema print`."
    )


def drive(connections: Connections, steps: Steps[T]) -> T:
    """Carry steps out in transactions of txbox's own.

    A connection is held from Begin to Commit, Rollback or Discard, never while waiting.
    Guarantee: whatever leaves this function, no transaction of its stays open.
    """
    connection: Connection | None = None
    begun: Begin | None = None  # behind the last COMMIT
    try:
        step = next(steps)
        while True:
            outcome: Any = None
            try:
                if begun is not None and step is not begun:
                    assert connection is not None
                    _give_up(connections, connection)
                    connection = begun = None
                if type(step) is Begin:
                    at("before:begin")
                    chaining = can_chain(connection) if begun is not None else None
                    begun, others = None, 0
                    while True:
                        if connection is None:
                            connection = connections.acquire()
                        try:
                            outcome = (
                                connection.begin(step.statements)
                                if chaining is None
                                else chaining.begun()
                            )
                            break
                        except StoreError as error:
                            if error.code != _NO_RIGHT or others == _OTHERS_MAX:
                                raise
                            connection.discard()
                            connection = chaining = None
                            others += 1
                    around(step.statements, "after:begin", "after")
                elif type(step) is Statement:
                    assert connection is not None
                    at(f"before:{step.name}")
                    outcome = connection.execute(step)
                    at(f"after:{step.name}")
                elif type(step) is Invoke:
                    outcome = invoke(connection, step)
                elif type(step) is InvokeGroups:
                    assert connection is not None
                    outcome = invoke_groups(connection, step)
                elif type(step) is Undo:
                    at("before:rollback_to_savepoint")
                    assert connection is not None
                    if (nesting := can_nest(connection)) is not None:
                        nesting.rollback_to_savepoint()
                elif type(step) is Pipe:
                    assert connection is not None
                    if (piping := can_pipe(connection)) is not None:
                        piping.pipe()
                elif type(step) is Commit:
                    assert connection is not None
                    around(step.statements, "before:commit", "before")
                    if step.then is None or (chaining := can_chain(connection)) is None:
                        outcome = connection.commit(step.statements)
                    else:
                        outcome = chaining.commit_then(step.statements, step.then)
                        begun = chaining.ahead
                    at("after:commit")
                    if begun is None:
                        connections.release(connection)
                        connection = None
                elif type(step) is Wait:
                    _sleep(step)
                elif type(step) is Read:
                    connection = connections.acquire()
                    at(f"before:{step.statement.name}")
                    outcome = _read(connection, step.statement)
                    at(f"after:{step.statement.name}")
                    connections.release(connection)
                    connection = None
                elif connection is not None:  # Rollback, Discard
                    held, connection = connection, None
                    if type(step) is Rollback:
                        _give_up(connections, held)
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


def _read(connection: Connection, statement: Statement) -> Result:
    if (reading := can_read(connection)) is not None:
        return reading.read(statement)
    (result,) = connection.begin((statement,))
    connection.commit(())
    return result


def _give_up(connections: Connections, held: Connection) -> None:
    """Roll back; a connection that cannot is dropped."""
    try:
        held.rollback()
    except StoreError:
        held.discard()
        return
    if held.lost:
        held.discard()
    else:
        connections.release(held)


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
    begun: Begin | None = None  # behind the last COMMIT
    try:
        step = next(steps)
        while True:
            outcome: Any = None
            try:
                if begun is not None and step is not begun:
                    assert connection is not None
                    await _give_up_async(connections, connection)
                    connection = begun = None
                if type(step) is Begin:
                    at("before:begin")
                    chaining = can_chain_async(connection) if begun is not None else None
                    begun, others = None, 0
                    while True:
                        if connection is None:
                            connection = await connections.acquire()
                        try:
                            outcome = await (
                                connection.begin(step.statements)
                                if chaining is None
                                else chaining.begun()
                            )
                            break
                        except StoreError as error:
                            if error.code != _NO_RIGHT or others == _OTHERS_MAX:
                                raise
                            connection.discard()
                            connection = chaining = None
                            others += 1
                    around(step.statements, "after:begin", "after")
                elif type(step) is Statement:
                    assert connection is not None
                    at(f"before:{step.name}")
                    outcome = await connection.execute(step)
                    at(f"after:{step.name}")
                elif type(step) is Invoke:
                    outcome = await invoke_async(connection, step)
                elif type(step) is InvokeGroups:
                    assert connection is not None
                    outcome = await invoke_groups_async(connection, step)
                elif type(step) is Undo:
                    at("before:rollback_to_savepoint")
                    assert connection is not None
                    if (nesting := can_nest_async(connection)) is not None:
                        await nesting.rollback_to_savepoint()
                elif type(step) is Pipe:
                    assert connection is not None
                    if (piping := can_pipe_async(connection)) is not None:
                        await piping.pipe()
                elif type(step) is Commit:
                    assert connection is not None
                    around(step.statements, "before:commit", "before")
                    if step.then is None or (chaining := can_chain_async(connection)) is None:
                        outcome = await _shielded(connection.commit(step.statements))
                    else:
                        outcome = await _shielded(chaining.commit_then(step.statements, step.then))
                        begun = chaining.ahead
                    at("after:commit")
                    if begun is None:
                        held, connection = connection, None
                        await connections.release(held)
                elif type(step) is Wait:
                    await _sleep_async(step)
                elif type(step) is Read:
                    connection = await connections.acquire()
                    at(f"before:{step.statement.name}")
                    outcome = await _read_async(connection, step.statement)
                    at(f"after:{step.statement.name}")
                    held, connection = connection, None
                    await connections.release(held)
                elif connection is not None:  # Rollback, Discard
                    held, connection = connection, None
                    if type(step) is Rollback:
                        await _give_up_async(connections, held)
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


async def _shielded(commit: Awaitable[T]) -> T:
    task = asyncio.ensure_future(commit)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        # the COMMIT may be on its way: its connection must not be touched before the answer
        await asyncio.wait([task])
        raise


async def _read_async(connection: AsyncConnection, statement: Statement) -> Result:
    if (reading := can_read_async(connection)) is not None:
        return await reading.read(statement)
    (result,) = await connection.begin((statement,))
    await connection.commit(())
    return result


async def _give_up_async(connections: AsyncConnections, held: AsyncConnection) -> None:
    try:
        await held.rollback()
    except StoreError:
        held.discard()
        return
    if held.lost:
        held.discard()
    else:
        await connections.release(held)


async def _sleep_async(step: Wait) -> None:
    if step.until is None:
        await asyncio.sleep(step.timeout_s)
    else:
        await asyncio.wait([asyncio.wrap_future(step.until)], timeout=step.timeout_s)
