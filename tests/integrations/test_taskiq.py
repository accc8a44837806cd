"""A task of taskiq runs once for each id, on its broker in memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Annotated, Any

import aiosqlite
import pytest
from taskiq import Context, InMemoryBroker, SimpleRetryMiddleware, TaskiqDepends
from taskiq.exceptions import NoResultError

from tests.integrations.conftest import Rows
from txbox import ConfigurationError, Inbox
from txbox.integrations.taskiq import once


class Shop:
    """A task that writes, and then fails as often as told."""

    def __init__(self, database: Path, *, await_inplace: bool = True) -> None:
        self.broker = InMemoryBroker(await_inplace=await_inplace).with_middlewares(
            SimpleRetryMiddleware()
        )
        self.failures: list[Exception] = []

        @asynccontextmanager
        async def transaction() -> AsyncIterator[aiosqlite.Connection]:
            async with aiosqlite.connect(database) as connection:
                await connection.execute("BEGIN IMMEDIATE")
                yield connection
                await connection.commit()

        @self.broker.task(retry_on_error=True)
        @once(Inbox(consumer="pay"), transaction)
        async def pay(tx: aiosqlite.Connection, amount: int) -> str:
            await tx.execute("INSERT INTO ledger VALUES (?)", (amount,))
            if self.failures:
                raise self.failures.pop()
            return "paid"

        self.pay, self.transaction = pay, transaction

    async def send(self, task_id: str, amount: object) -> Any:
        task = await self.pay.kicker().with_task_id(task_id).kiq(amount)
        return (await self.broker.result_backend.get_result(task.task_id)).return_value


def test_a_task_that_comes_again_runs_nothing_and_keeps_its_result(
    database: Path, rows: Rows
) -> None:
    shop = Shop(database)

    async def run() -> None:
        assert await shop.send("t-1", 5) == "paid"
        assert await shop.send("t-1", 5) == "paid"
        assert await shop.send("t-2", "6") == "paid"  # cast by its annotation, as ever

    asyncio.run(run())
    assert rows("SELECT amount FROM ledger ORDER BY 1") == [(5,), (6,)]


def test_arguments_are_of_the_types_of_the_tasks_own_module(database: Path, rows: Rows) -> None:
    """taskiq looks the names of annotations up where the function is, and so it must find them."""
    shop, days = Shop(database), list[date]()

    @shop.broker.task
    @once(Inbox(consumer="close"), shop.transaction)
    async def close(tx: aiosqlite.Connection, day: date) -> None:
        days.append(day)

    async def run() -> None:
        task = await close.kiq("2026-11-25")
        assert not (await task.wait_result()).is_err

    asyncio.run(run())
    assert days == [date(2026, 11, 25)]


def test_a_retry_runs_under_the_same_id(database: Path, rows: Rows) -> None:
    shop = Shop(database)
    shop.failures = [ValueError("first"), ValueError("second")]
    assert asyncio.run(shop.send("t-1", 5)) == "paid"
    assert rows("SELECT amount FROM ledger") == [(5,)]
    assert rows("SELECT message_id FROM txbox_inbox") == [("t-1",)]


@dataclass
class Receipt:
    day: date
    amount: int


def test_a_copy_returns_what_the_annotation_says(database: Path) -> None:
    shop = Shop(database)

    @shop.broker.task
    @once(Inbox(consumer="receipt"), shop.transaction)
    async def receipt(tx: aiosqlite.Connection) -> Receipt:
        return Receipt(date(2026, 11, 26), 5)

    async def run() -> None:
        for _ in range(2):
            task = await receipt.kicker().with_task_id("t-1").kiq()
            answer: Any = (await task.wait_result()).return_value
            assert answer == Receipt(date(2026, 11, 26), 5)

    asyncio.run(run())


def test_a_body_that_ends_without_a_result_is_done(database: Path, rows: Rows) -> None:
    shop = Shop(database)
    shop.failures = [NoResultError(), NoResultError()]

    async def run() -> None:
        for _ in range(2):
            await shop.pay.kicker().with_task_id("t-1").kiq(5)

    asyncio.run(run())
    assert len(shop.failures) == 1
    assert rows("SELECT amount FROM ledger") == [(5,)]
    assert rows("SELECT message_id FROM txbox_inbox") == [("t-1",)]


def test_a_body_that_is_requeued_is_not_done(database: Path, rows: Rows) -> None:
    """It runs again under the same id."""
    shop, days = Shop(database, await_inplace=False), iter(["yesterday", "today"])

    @shop.broker.task
    @once(Inbox(consumer="later"), shop.transaction)
    async def later(
        tx: aiosqlite.Connection,
        amount: int,
        context: Annotated[Context, TaskiqDepends()],
    ) -> str:
        await tx.execute("INSERT INTO ledger VALUES (?)", (amount,))
        if (day := next(days)) == "yesterday":
            await context.requeue()
        return day

    async def run() -> None:
        answer: Any = await (await later.kiq(5)).wait_result()
        assert answer.return_value == "today"

    asyncio.run(run())
    assert rows("SELECT amount FROM ledger") == [(5,)]


NUMBERS = iter(range(9))


def number() -> int:
    return next(NUMBERS)


def test_what_taskiq_injects_is_not_compared(database: Path, rows: Rows) -> None:
    shop = Shop(database)

    @shop.broker.task
    @once(Inbox(consumer="numbered"), shop.transaction)
    async def numbered(
        tx: aiosqlite.Connection,
        amount: int,
        by: Annotated[int, TaskiqDepends(number)],
        context: Annotated[Context, TaskiqDepends()],
    ) -> int:
        await tx.execute("INSERT INTO ledger VALUES (?)", (amount,))
        return by

    async def run() -> None:
        for amount in (5, 5, 6):
            task = await numbered.kicker().with_task_id("t-1").kiq(amount)
            answer: Any = await task.wait_result()
            assert answer.return_value == 0

    asyncio.run(run())
    assert rows("SELECT amount FROM ledger") == [(5,)]
    assert rows("SELECT payload FROM txbox_quarantine") == [(b'{"amount":6}',)]


def test_what_is_no_json_is_refused_before_the_commit(database: Path, rows: Rows) -> None:
    shop = Shop(database)

    @shop.broker.task
    @once(Inbox(consumer="opaque"), shop.transaction)
    async def opaque(tx: aiosqlite.Connection) -> Any:
        return object()

    async def run() -> None:
        task = await opaque.kiq()
        assert isinstance((await task.wait_result()).error, ConfigurationError)

    asyncio.run(run())
    assert rows("SELECT * FROM txbox_inbox") == []


def test_a_plain_call_has_no_id(database: Path, rows: Rows) -> None:
    async def run() -> None:
        await Shop(database).pay(5)

    with pytest.raises(ConfigurationError, match="has no id"):
        asyncio.run(run())
    assert rows("SELECT * FROM ledger") == []
