"""Calling the user's code inside of a transaction: one call after another, or in groups under savepoints."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any, cast

from txbox.errors import Fault, HandlerTimeout, StoreError
from txbox.steps import (
    AsyncChaining,
    AsyncConnection,
    AsyncNesting,
    AsyncPiping,
    Call,
    Chaining,
    Connection,
    Failed,
    Invoke,
    InvokeGroups,
    Nesting,
    Piping,
    Progress,
    Raised,
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


def can_nest(own: object) -> Nesting | None:
    return cast("Nesting", own) if hasattr(own, "savepoint") else None


def can_nest_async(own: object) -> AsyncNesting | None:
    return cast("AsyncNesting", own) if hasattr(own, "savepoint") else None


def can_pipe(own: object) -> Piping | None:
    return cast("Piping", own) if hasattr(own, "pipe") else None


def can_pipe_async(own: object) -> AsyncPiping | None:
    return cast("AsyncPiping", own) if hasattr(own, "pipe") else None


def can_chain(own: object) -> Chaining | None:
    return cast("Chaining", own) if hasattr(own, "commit_then") else None


def can_chain_async(own: object) -> AsyncChaining | None:
    return cast("AsyncChaining", own) if hasattr(own, "commit_then") else None


def can_watch(own: object) -> Watching | None:
    return cast("Watching", own) if hasattr(own, "left") else None


def _call(connection: Connection | None, call: Call, timeout_s: float | None) -> Any:
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


def _raised(error: Exception, connection: Connection | AsyncConnection | None) -> Raised:
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
