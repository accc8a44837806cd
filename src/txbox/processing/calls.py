"""Calling handlers: decode, call, time out, and find the call of a batch that failed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Generator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

from txbox.boundaries import is_from_outside
from txbox.errors import Fault, HandlerTimeout, StoreError
from txbox.handlers import Handler, Run
from txbox.handlers.body import as_json
from txbox.message import Message
from txbox.session import Connection, Failed, Raised, Session, SettingChange, at
from txbox.store.codec import Arrival


class SettingsChanged(Exception):
    """A call of a batch has set something that its neighbours would see (promise 2.15)."""

    def __init__(self, change: SettingChange) -> None:
        super().__init__(change.by)
        self.by = change.by


# what a call returns that has not done its work
_PROMISES = (Awaitable, Generator, AsyncGenerator)

#: Takes the transaction's own object, or None outside of one; async where its session is.
Call = Callable[[Any], Any]


@dataclass(slots=True)
class Progress:
    """How far groups of calls came: `released` groups are done, and the next one must be rolled back.

    Attributes:
        answers: what the calls of the finished groups returned, in order.
        raised: why the next group failed; None if all are done.
        culprit: which call of that group raised; None if unknown.
    """

    answers: list[Any] = field(default_factory=list[Any])
    released: int = 0
    raised: Raised | None = None
    culprit: int | None = None


async def handled(
    db: Session, handler: Handler, arrivals: Sequence[Arrival], called: list[str] | None = None
) -> list[Any]:
    """Call the handler: once for all messages in batch mode, else for each in order.

    Args:
        called: collects the ids of the messages it is called for.

    Returns: what each call returned, as JSON if results are kept.

    Raises:
        Raised: a call failed; none was made after it.
        SettingsChanged: a call has set what the next ones must not see.
    """
    works = [list(arrivals)] if handler.options.batch else arrivals
    call_one, run = (_call_async, _run_async) if db.is_async else (_call, _run)
    connection, limit_s = db.connection, handler.timeout_s
    # if there is only one call, close finds out whether it ended the transaction
    watched = connection if len(works) > 1 else None
    answers: list[Any] = []
    for work in works:
        try:
            # bodies are decoded inside, so that a bad one is this message's failure
            call = partial(run, handler, work, called)
            answers.append(await call_one(connection, call, limit_s))
        except Raised as raised:
            raised.ended = watched is not None and watched.has_ended()
            raise
        if watched is not None and watched.has_ended():
            raise _ended(watched)
        if watched is not None and watched.changed is not None and not handler.options.shares:
            raise SettingsChanged(watched.changed)
    return answers


async def called_once(db: Session, handler: Handler, arrival: Arrival, called: list[str]) -> None:
    """Call the handler for one message, in whatever form it takes it; see `handled`.

    Close finds out whether the call ended the transaction.
    """
    work = [arrival] if handler.options.batch else arrival
    if db.is_async:
        call = partial(_run_async, handler, work, called)
        await _call_async(db.connection, call, handler.timeout_s)
    else:
        await _call(db.connection, partial(_run, handler, work, called), handler.timeout_s)


def call_of(handler: Handler, arrival: Arrival, called: list[str]) -> Call:
    """The handler's call for one message."""
    return partial(_run_async if handler.is_async else _run, handler, arrival, called)


def _run(
    handler: Handler, work: Arrival | list[Arrival], called: list[str] | None, tx: Any
) -> bytes | None:
    run, argument = _bound(handler, work, called)
    with run:
        answer = (
            handler.function(argument, tx)
            if handler.options.transactional
            else handler.function(argument)
        )
        _check_done(answer)
    # inside the call: a result that is not JSON is the handler's failure
    return _kept(answer, run) if handler.options.keep_result else None


async def _run_async(
    handler: Handler, work: Arrival | list[Arrival], called: list[str] | None, tx: Any
) -> bytes | None:
    run, argument = _bound(handler, work, called)
    with run:
        answer = await (
            handler.function(argument, tx)
            if handler.options.transactional
            else handler.function(argument)
        )
        _check_done(answer)
    return _kept(answer, run) if handler.options.keep_result else None


def _check_done(answer: Any) -> None:
    """Check that the call has done its work, and not only promised it: a decorator can hide an `async def`."""
    if answer is not None and isinstance(answer, _PROMISES):
        kind = type(cast("object", answer)).__name__
        if isinstance(answer, Coroutine):
            answer.close()
        raise TypeError(
            f"The handler returned a {kind}, which never runs: declare it `async def`, or run it before you return."
        )


def _bound(
    handler: Handler, work: Arrival | list[Arrival], called: list[str] | None
) -> tuple[Run, Any]:
    if isinstance(work, list):
        if called is not None:
            called += [arrival.message_id for arrival in work]
        messages = [_decoded(handler, arrival) for arrival in work]
        return Run(handler.consumer, messages, first=work[0].first if work else 0), messages
    if called is not None:
        called.append(work.message_id)
    message = _decoded(handler, work)
    return Run(handler.consumer, (message,), first=work.first, replied=work.replied), message


def _decoded(handler: Handler, arrival: Arrival) -> Message[Any]:
    # once: the next run must not see what this one does to it
    message, arrival.decoded = arrival.decoded, None
    return handler.bound(arrival) if message is None else message


def decode_ahead(handler: Handler, arrivals: Sequence[Arrival]) -> None:
    """Decode bodies while the server claims their messages.

    A body that cannot be decoded fails in the handler's call.
    """
    for arrival in arrivals:
        try:
            arrival.decoded = handler.bound(arrival)
        except BaseException as error:
            if is_from_outside(error):
                raise


def _kept(value: Any, run: Run) -> bytes:
    if run.replied is not None:
        # the reply was sent; a replay keeps it
        return run.replied
    return as_json(value)


async def called_apart(
    db: Session,
    groups: Sequence[Sequence[Call]],
    timeout_s: float | None,
    *,
    piped: bool,
    shares: bool = False,
) -> Progress:
    """Call handlers in groups, each between a savepoint and its release.

    Args:
        piped: the handler reads no results, so its statements are deferred if the driver can do that.
        shares: a call may see what another one has set.

    Raises:
        SettingsChanged: a call has set what the next ones must not see.
    """
    call_one, connection = _call_async if db.is_async else _call, db.connection
    assert connection is not None, "no transaction has begun"
    if not connection.nests:
        # without savepoints the first error fails the transaction
        calls = [call for group in groups for call in group]
        return Progress(
            [await call_one(connection, call, timeout_s) for call in calls], len(groups)
        )
    if piped:
        await connection.pipe()
    answers: list[Any] = []
    cursor, stopped = _Place(groups), None
    try:
        for cursor.group, group in enumerate(groups):
            at("before:savepoint")
            await connection.savepoint()
            for cursor.call, call in enumerate(group):
                cursor.begins(connection.position if piped else None)
                answers.append(await call_one(connection, call, timeout_s))
                if connection.has_ended():
                    raise _ended(connection)
                if connection.changed is not None and not shares:
                    raise SettingsChanged(connection.changed)
            cursor.call = len(group)
            at("before:release_savepoint")
            await connection.release_savepoint()
    except Raised as raised:
        stopped = raised
        stopped.ended = connection.has_ended()
    except StoreError as error:
        # the handler swallowed the error that failed the transaction
        if error.fault is not Fault.ABORTED:
            raise
        stopped = Raised(error, error, connection.lost)
    failed = await connection.flush() if piped else None
    return cursor.progress(answers, stopped, failed)


async def undo(db: Session) -> None:
    """Roll back to the savepoint of the group that failed."""
    assert db.connection is not None, "no transaction has begun"
    at("before:rollback_to_savepoint")
    if db.connection.nests:
        await db.connection.rollback_to_savepoint()


class _Place:
    """Where each call of each group began in the pipeline, to find the one whose deferred statement failed."""

    def __init__(self, groups: Sequence[Sequence[Call]]) -> None:
        self._groups = groups
        self._begun: list[tuple[int, int, int]] = []  # position, group, call
        self.group = 0
        self.call = 0

    def begins(self, position: int | None) -> None:
        if position is not None:
            self._begun.append((position, self.group, self.call))

    def progress(
        self, answers: list[Any], raised: Raised | None, failed: Failed | None
    ) -> Progress:
        """How far it came: a deferred statement failed (which came first), a call raised, or all are done."""
        group: int
        culprit: int | None
        if failed is not None:
            raised = failed.raised
            began = [start for start in self._begun if start[0] <= failed.position]
            group, culprit = began[-1][1:] if began else (0, 0)
        elif raised is not None:
            group, culprit = self.group, self.call
            if culprit == len(self._groups[group]):
                # a session's flush at the release failed
                culprit = 0 if culprit == 1 else None
        else:
            return Progress(answers, len(self._groups))
        del answers[sum(len(calls) for calls in self._groups[:group]) :]
        return Progress(answers, group, raised, culprit)


async def _call(connection: Connection | None, call: Call, timeout_s: float | None) -> Any:
    at("before:handler")
    started = time.monotonic() if timeout_s is not None else 0.0
    try:
        # read for each call: a session that the last call made unusable is then replaced
        answer = call(connection.native if connection is not None else None)
    except BaseException as error:
        if is_from_outside(error):
            raise
        raise _raised(error, connection) from error
    finally:
        if connection is not None:
            connection.restore()
    if timeout_s is not None and time.monotonic() - started > timeout_s:
        # a thread cannot be interrupted, but its work is rolled back
        raise _raised(_timeout(timeout_s), connection)
    at("after:handler")
    return answer


async def _call_async(connection: Connection | None, call: Call, timeout_s: float | None) -> Any:
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
    finally:
        if connection is not None:
            connection.restore()
    at("after:handler")
    return answer


def _ended(connection: Connection) -> Raised:
    """The error for a call that ended the transaction: the next calls would write outside it."""
    error = StoreError(
        "The handler ended the transaction that claimed its message.", fault=Fault.GUARD
    )
    return Raised(error, None, connection.lost, ended=True)


def _raised(error: BaseException, connection: Connection | None) -> Raised:
    if connection is None:
        return Raised(error, None, False)
    # staging and accepting in a handler raise StoreError already
    store = error if isinstance(error, StoreError) else connection.translate(error)
    return Raised(error, store, connection.lost)


def _timeout(timeout_s: float) -> HandlerTimeout:
    return HandlerTimeout(
        f"The handler ran longer than its timeout of {timeout_s:g} s; its work is rolled back."
    )


def _is_ended(task: asyncio.Task[Any] | None, error: BaseException) -> bool:
    """Whether the operation's task is being cancelled, or its coroutine closed from outside.

    False if an inner task was cancelled, or the handler itself raised SystemExit or the like.
    """
    try:
        closed = asyncio.current_task() is not task
    except RuntimeError:  # its loop no longer runs
        closed = True
    if closed or isinstance(error, Exception):
        return closed
    return (task is not None and task.cancelling() > 0) or is_from_outside(error)
