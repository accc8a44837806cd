"""What is asyncpg's own: its transaction object, its two calls, its pool."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import asyncpg
import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import create_async_engine

from tests.support.databases import Raw
from txbox import App, Message, Outcome, RetryPolicy
from txbox.connections import open_database
from txbox.connections.asyncpg import _returns_rows
from txbox.errors import Fault, StoreError, StoreUnavailable
from txbox.store.dialect import dialect, native

pytestmark = pytest.mark.every_database


def url_of(shared_url: Callable[[str], str]) -> str:
    return shared_url("postgresql").replace("postgresql:", "postgresql+asyncpg:")


def test_every_statement_goes_to_the_right_one_of_two_calls(
    shared_url: Callable[[str], str],
) -> None:
    """fetch() returns rows and no count, execute() a count and no rows: PostgreSQL says which is right."""

    async def run() -> dict[str, bool]:
        connection = await asyncpg.connect(shared_url("postgresql"))
        wrong = {}
        for name, sql in dialect("postgresql").queries.items():
            text, _ = native(sql, "numeric")
            if not text or text.startswith(("SAVEPOINT", "RELEASE", "ROLLBACK")):
                continue
            if "txbox_partition_" in text:
                # a function of partitioned schemas
                continue
            returns = bool((await connection.prepare(text)).get_attributes())
            if returns != _returns_rows(text):
                wrong[name] = returns
        await connection.close()
        return wrong

    assert asyncio.run(run()) == {}


def test_a_connection_that_its_pool_took_back_before_commit_is_lost(
    shared_url: Callable[[str], str],
) -> None:
    async def run() -> StoreError:
        async with asyncpg.create_pool(shared_url("postgresql"), min_size=1, max_size=1) as pool:
            connections = open_database(pool).asynchronous
            assert connections is not None
            connection = await connections.acquire()
            await connection.begin(())
            connection.native.terminate()
            async with asyncio.timeout(10):
                while connection.native._con is not None:  # noqa: ASYNC110 - asyncpg has no event for it
                    await asyncio.sleep(0)
            with pytest.raises(StoreError) as caught:
                await connection.commit(())
            connection.discard()
            return caught.value

    error = asyncio.run(run())
    assert error.fault is Fault.UNAVAILABLE
    assert not error.definite


def test_a_transaction_inside_the_handler_is_a_savepoint(
    shared_url: Callable[[str], str], number: int
) -> None:
    app = App(url_of(shared_url))

    @app.handler("t", consumer=f"a{number}")
    async def handle(message: Message[Any], tx: asyncpg.Connection) -> None:
        insert = "INSERT INTO account (id, balance) VALUES ($1, 1)"
        async with tx.transaction():
            await tx.execute(insert, number)

        async def undone() -> None:
            async with tx.transaction():
                await tx.execute(insert, number + 1)
                await tx.execute("SELECT 1 / 0")

        with pytest.raises(asyncpg.DivisionByZeroError):
            await undone()

    async def run() -> Outcome:
        outcome = await app.process_async(Message(id="1", topic="t", payload=b"{}"))
        await app.close_async()
        return outcome

    assert asyncio.run(run()) is Outcome.PROCESSED
    with Raw(shared_url("postgresql")) as raw:
        rows = raw.rows("SELECT id FROM account WHERE id BETWEEN ? AND ?", (number, number + 1))
    assert rows == [(number,)]


def test_what_a_handler_writes_after_a_rollback_of_its_own_is_never_acknowledged_as_processed(
    shared_url: Callable[[str], str], number: int
) -> None:
    """asyncpg is in autocommit then: the effect stands, the message is dead, an operator decides."""
    app = App(url_of(shared_url))

    @app.handler("t", consumer=f"a{number}")
    async def handle(message: Message[Any], tx: asyncpg.Connection) -> None:
        await tx.execute("ROLLBACK")
        await tx.execute("INSERT INTO account (id, balance) VALUES ($1, 1)", number)

    async def run() -> Outcome:
        outcome = await app.process_async(Message(id="1", topic="t", payload=b"{}"))
        await app.close_async()
        return outcome

    assert asyncio.run(run()) is Outcome.DEAD
    with Raw(shared_url("postgresql")) as raw:
        (found,) = raw.rows(
            "SELECT status, error_type FROM txbox_inbox WHERE consumer = ?", (f"a{number}",)
        )
        assert found == ("dead", "TransactionBroken")


def test_a_deferred_constraint_fails_the_message_and_keeps_the_connection(
    shared_url: Callable[[str], str], number: int
) -> None:
    app = App(url_of(shared_url))
    backends: list[int] = []

    @app.handler("t", consumer=f"a{number}", retry=RetryPolicy(max_attempts=1))
    async def handle(message: Message[Any], tx: asyncpg.Connection) -> None:
        backends.append(await tx.fetchval("SELECT pg_backend_pid()"))
        await tx.execute(
            f"CREATE TABLE late{number} (id integer UNIQUE DEFERRABLE INITIALLY DEFERRED)"
        )
        await tx.execute(f"INSERT INTO late{number} VALUES (1), (1)")

    async def run() -> list[Outcome]:
        outcomes = [
            await app.process_async(Message(id=str(each), topic="t", payload=b"{}"))
            for each in range(2)
        ]
        await app.close_async()
        return outcomes

    assert asyncio.run(run()) == [Outcome.DEAD, Outcome.DEAD]
    assert backends[0] == backends[1]


@pytest.mark.parametrize("through", ["asyncpg", "sqlalchemy"])
def test_cancelling_a_handler_rolls_back_and_leaks_nothing(
    through: str, shared_url: Callable[[str], str], number: int
) -> None:
    """The server is told to stop the handler's query: its locks are free long before it would end."""
    started = asyncio.Event()
    url = shared_url("postgresql")

    async def query(tx: Any, sql: str) -> None:
        await tx.execute(sql if through == "asyncpg" else sa.text(sql))

    @asynccontextmanager
    async def pool_of_one() -> AsyncIterator[Any]:
        if through == "asyncpg":
            async with asyncpg.create_pool(url, min_size=1, max_size=1) as pool:
                yield pool
        else:
            engine = create_async_engine(url_of(shared_url), pool_size=1, max_overflow=0)
            yield engine
            await engine.dispose()

    async def run() -> None:
        async with pool_of_one() as pool:
            app = App(pool)

            @app.handler("t", consumer=f"a{number}")
            async def handle(message: Message[Any], tx: Any) -> None:
                await query(tx, f"INSERT INTO account (id, balance) VALUES ({number}, 1)")
                if not started.is_set():
                    started.set()
                    await query(tx, "SELECT pg_sleep(60)")

            message: Message[Any] = Message(id="1", topic="t", payload=b"{}")
            task = asyncio.create_task(app.process_async(message))
            await started.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            # the pool has one place: this would wait for ever if the cancelled one were still held
            assert await asyncio.wait_for(app.process_async(message), 10) is Outcome.PROCESSED
            await app.close_async()

    asyncio.run(run())


def test_a_refused_connection_is_unavailable() -> None:
    async def run() -> None:
        database = open_database("postgresql+asyncpg://nobody:secret@127.0.0.1:1/nothing")
        assert database.asynchronous is not None
        with pytest.raises(StoreUnavailable) as caught:
            await database.asynchronous.acquire()
        assert "secret" not in str(caught.value)

    asyncio.run(run())


def test_an_app_outlives_the_event_loop_it_first_ran_on(
    shared_url: Callable[[str], str], number: int
) -> None:
    app = App(url_of(shared_url))

    @app.handler("t", consumer=f"a{number}")
    async def handle(message: Message[Any], tx: asyncpg.Connection) -> None:
        await tx.execute("SELECT 1")

    async def run(message_id: str) -> Outcome:
        outcome = await app.process_async(Message(id=message_id, topic="t", payload=b"{}"))
        await app.close_async()
        return outcome

    assert asyncio.run(run("1")) is Outcome.PROCESSED
    assert asyncio.run(run("2")) is Outcome.PROCESSED
