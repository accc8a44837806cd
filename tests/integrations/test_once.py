"""A body with a hidden transaction: once for each id, and what its callers see of it."""

from __future__ import annotations

import asyncio
import inspect
import sqlite3
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import aiosqlite
import psycopg
import pytest

from tests.integrations.conftest import Rows
from txbox import App, ConfigurationError, Inbox, PayloadMismatch, StoreError
from txbox.integrations.once import Begin, BeginAsync, Body, Once

DID, DID_NOT = Once(True, "paid"), Once(False)


@pytest.fixture
def begin(database: Path) -> Begin:
    @contextmanager
    def transaction() -> Iterator[sqlite3.Connection]:
        with closing(sqlite3.connect(database)) as connection, connection:
            connection.execute("BEGIN IMMEDIATE")
            yield connection

    return transaction


@pytest.fixture
def begin_async(database: Path) -> BeginAsync:
    @asynccontextmanager
    async def transaction() -> AsyncIterator[aiosqlite.Connection]:
        async with aiosqlite.connect(database) as connection:
            await connection.execute("BEGIN IMMEDIATE")
            yield connection  # what is not committed is gone when it is closed
            await connection.commit()

    return transaction


def pay(tx: sqlite3.Connection, amount: int, *, fail: bool = False) -> str:
    tx.execute("INSERT INTO ledger VALUES (?)", (amount,))
    if fail:
        raise ValueError(amount)
    return "paid"


async def pay_async(tx: aiosqlite.Connection, amount: int) -> str:
    await tx.execute("INSERT INTO ledger VALUES (?)", (amount,))
    if amount < 0:
        raise ValueError(amount)
    if amount > 100:
        raise PayloadMismatch("of another inbox")
    return "paid"


def body(**options: Any) -> Body:
    return Body(pay, Inbox(consumer="pay"), **options)


def test_a_second_call_does_nothing(begin: Begin, rows: Rows) -> None:
    assert body()(begin, "t-1", (5,), {}) == DID
    assert body()(begin, "t-1", (), {"amount": 5}) == DID_NOT  # the same call, written another way
    assert rows("SELECT amount FROM ledger") == [(5,)]
    assert rows("SELECT consumer, message_id, topic FROM txbox_inbox") == [("pay", "t-1", "pay")]


def test_an_app_lends_its_transactions(database: Path, rows: Rows) -> None:
    with App(f"sqlite:///{database}") as app:
        assert body()(app.transaction, "t-1", (5,), {}) == DID
        assert body()(app.transaction, "t-1", (5,), {}) == DID_NOT
    assert rows("SELECT amount FROM ledger") == [(5,)]


def test_a_failure_keeps_nothing_so_that_a_retry_runs(begin: Begin, rows: Rows) -> None:
    with pytest.raises(ValueError, match="5"):
        body()(begin, "t-1", (5,), {"fail": True})
    assert rows("SELECT * FROM ledger") == rows("SELECT * FROM txbox_inbox") == []
    assert body()(begin, "t-1", (5,), {}) == DID


def swallows(tx: psycopg.Connection, amount: int) -> None:
    tx.execute("INSERT INTO ledger VALUES (%s)", (amount,))
    with suppress(psycopg.errors.UndefinedTable):
        tx.execute("SELECT 1 FROM no_such_table")


def rolls_back(tx: psycopg.Connection, amount: int) -> None:
    tx.rollback()
    tx.execute("INSERT INTO ledger VALUES (%s)", (amount,))


@pytest.mark.parametrize("broken", [swallows, rolls_back])
def test_a_body_that_loses_its_row_is_no_success(
    postgresql_url: str, broken: Callable[..., None]
) -> None:
    with psycopg.connect(postgresql_url, autocommit=True) as looking:
        looking.execute("CREATE TABLE ledger (amount integer)")
        paying = Body(broken, Inbox(consumer="pay"))
        with pytest.raises(StoreError, match="transaction"):
            paying(partial(psycopg.connect, postgresql_url), "t-1", (5,), {})
        for table in ("ledger", "txbox_inbox"):
            assert looking.execute(f"SELECT * FROM {table}").fetchall() == []


def test_a_body_that_commits_is_no_success(database: Path, rows: Rows) -> None:
    def commits(tx: sqlite3.Connection, amount: int) -> None:
        pay(tx, amount)
        tx.commit()

    with App(f"sqlite:///{database}") as app:
        paying = Body(commits, Inbox(consumer="pay"))
        with pytest.raises(StoreError, match="ended its transaction"):
            paying(app.transaction, "t-1", (5,), {})
        assert rows("SELECT amount FROM ledger") == [(5,)]
        assert paying(app.transaction, "t-1", (5,), {}) == DID_NOT  # its row was committed with it


def test_an_id_with_other_arguments_is_set_aside(begin: Begin, rows: Rows) -> None:
    assert body()(begin, "t-1", (5,), {})
    assert not body()(begin, "t-1", (6,), {})
    assert rows("SELECT amount FROM ledger") == [(5,)]
    assert rows("SELECT message_id, payload FROM txbox_quarantine") == [("t-1", b'{"amount":6}')]


def test_a_mismatch_of_another_inbox_is_a_failure_of_the_body(begin: Begin, rows: Rows) -> None:
    def orders(tx: sqlite3.Connection, amount: int) -> None:
        pay(tx, amount)
        Inbox(consumer="orders").accept(tx, "o-1", payload=str(amount))

    ordering = Body(orders, Inbox(consumer="pay"))
    assert ordering(begin, "t-1", (5,), {})
    with pytest.raises(PayloadMismatch):
        ordering(begin, "t-2", (6,), {})
    assert rows("SELECT amount FROM ledger") == [(5,)]
    assert rows("SELECT * FROM txbox_quarantine") == []


def test_arguments_that_are_no_json_are_not_compared(begin: Begin, rows: Rows) -> None:
    kept = Body(lambda tx, what: "paid", Inbox(consumer="pay"))
    assert kept(begin, "t-1", (object(),), {}) == DID
    assert kept(begin, "t-1", (object(),), {}) == DID_NOT
    assert rows("SELECT * FROM txbox_quarantine") == []


def test_the_id_may_be_an_argument(begin: Begin, rows: Rows) -> None:
    by_amount = body(id=lambda amount, **_: f"payment-{amount}")
    assert by_amount(begin, "t-1", (5,), {})
    assert not by_amount(begin, "t-2", (5,), {})
    assert rows("SELECT message_id FROM txbox_inbox") == [("payment-5",)]


def test_without_any_id_nothing_runs(begin: Begin, rows: Rows) -> None:
    with pytest.raises(ConfigurationError, match="has no id"):
        body()(begin, None, (5,), {})
    assert rows("SELECT * FROM ledger") == []


def test_callers_see_no_transaction() -> None:
    def wrapper(*args: Any, **kwargs: Any) -> None: ...

    body().update(wrapper)
    assert str(inspect.signature(wrapper)) == "(amount: int, *, fail: bool = False) -> str"
    assert list(wrapper.__annotations__) == ["amount", "fail", "return"]
    assert wrapper.__name__ == "pay"


def test_a_function_without_a_transaction_is_refused() -> None:
    def nothing() -> None: ...

    with pytest.raises(ConfigurationError, match="first parameter"):
        Body(nothing, Inbox(consumer="pay"))


@pytest.mark.parametrize(("function", "is_async"), [(pay_async, False), (pay, True)])
def test_a_body_is_as_its_queue_calls_it(function: Callable[..., Any], is_async: bool) -> None:
    """Else the row of a coroutine that nobody awaits would be committed, and its body never run."""
    with pytest.raises(ConfigurationError, match=r"make it an? `"):
        Body(function, Inbox(consumer="pay"), is_async=is_async)


def test_the_twin_does_the_same(begin_async: BeginAsync, rows: Rows) -> None:
    paying = Body(pay_async, Inbox(consumer="pay"), is_async=True)

    async def run() -> None:
        with pytest.raises(ValueError, match="-5"):
            await paying.call_async(begin_async, "t-1", (-5,), {})
        assert await paying.call_async(begin_async, "t-1", (5,), {}) == DID
        assert await paying.call_async(begin_async, "t-1", (5,), {}) == DID_NOT
        assert await paying.call_async(begin_async, "t-1", (6,), {}) == DID_NOT
        with pytest.raises(PayloadMismatch, match="another inbox"):
            await paying.call_async(begin_async, "t-2", (200,), {})

    asyncio.run(run())
    assert rows("SELECT amount FROM ledger") == [(5,)]
    assert rows("SELECT payload FROM txbox_quarantine") == [(b'{"amount":6}',)]
