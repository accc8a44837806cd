"""The loops that carry steps out: in the caller's transaction, or in transactions of txbox's own.

`run` and `run_async` carry statements out on a connection whose transaction belongs to the caller;
`drive` and `drive_async` also begin and end transactions.

Source: docs/decisions/0002-steps.md
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable
from contextlib import suppress
from typing import Any

from txbox.errors import Fault, SchemaError, StoreError
from txbox.invoking import (
    can_chain,
    can_chain_async,
    can_nest,
    can_nest_async,
    can_pipe,
    can_pipe_async,
    can_read,
    can_read_async,
    invoke,
    invoke_async,
    invoke_groups,
    invoke_groups_async,
)
from txbox.steps import (
    AsyncConnection,
    AsyncConnections,
    AsyncExecutor,
    Begin,
    Commit,
    Connection,
    Connections,
    Executor,
    Invoke,
    InvokeGroups,
    Pipe,
    Raised,
    Read,
    Result,
    Rollback,
    Statement,
    Steps,
    T,
    Undo,
    Wait,
    around,
    at,
)

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
