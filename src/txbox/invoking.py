"""Calling the user's code inside of a transaction: one call after another, or in groups under savepoints."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
import traceback
from collections.abc import Sequence
from functools import partial
from types import CodeType
from typing import Any, cast

from txbox.errors import Fault, HandlerTimeout, StoreError
from txbox.steps import (
    AsyncChaining,
    AsyncConnection,
    AsyncNesting,
    AsyncPiping,
    AsyncReading,
    Call,
    Chaining,
    Connection,
    Crashed,
    Failed,
    Invoke,
    InvokeGroups,
    Nesting,
    Piping,
    Progress,
    Raised,
    Reading,
    Watching,
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
