"""A task of Celery runs once for each id, eagerly and in a worker of its own on a broker in memory."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from celery import Celery
from celery.contrib.testing.worker import start_worker

from tests.integrations.conftest import Rows
from txbox import ConfigurationError, Inbox
from txbox.integrations.celery import once


class Shop:
    """Tasks over one database: `pay` writes, and then fails as often as told."""

    def __init__(self, database: Path, **settings: Any) -> None:
        self.celery = Celery(
            "shop", broker="memory://", backend="cache+memory://", set_as_current=False
        )
        self.celery.conf.update({"task_always_eager": True, **settings})
        self.failures: list[Exception] = []
        self.results: list[object] = []

        @contextmanager
        def transaction() -> Iterator[sqlite3.Connection]:
            with closing(sqlite3.connect(database)) as connection, connection:
                connection.execute("BEGIN IMMEDIATE")
                yield connection

        @self.celery.task(
            shared=False,
            acks_late=True,
            autoretry_for=(OSError,),
            retry_backoff=False,
            default_retry_delay=0,
        )
        @once(Inbox(consumer="pay"), transaction)
        def pay(tx: sqlite3.Connection, amount: int) -> str:
            tx.execute("INSERT INTO ledger VALUES (?)", (amount,))
            if self.failures:
                raise self.failures.pop()
            return "paid"

        @self.celery.task(shared=False, acks_late=True)
        @once(Inbox(consumer="ship"), transaction, id=lambda order: f"order-{order}")
        def ship(tx: sqlite3.Connection, order: int) -> None:
            tx.execute("INSERT INTO ledger VALUES (?)", (order,))

        @self.celery.task(shared=False)
        @once(Inbox(consumer="answer"), transaction)
        def answer(tx: sqlite3.Connection) -> object:
            return self.results.pop()

        @self.celery.task(shared=False)
        @once(Inbox(consumer="forget"), transaction, keep_result=False)
        def forget(tx: sqlite3.Connection) -> object:
            return self.results.pop()

        # celery has no types
        self.answer: Any = answer
        self.forget: Any = forget
        self.pay: Any = pay
        self.ship: Any = ship


def test_a_task_that_is_delivered_again_returns_what_the_first_run_returned(
    database: Path, rows: Rows
) -> None:
    shop = Shop(database)
    for _ in range(2):
        assert shop.pay.apply((5,), task_id="t-1").result == "paid"
    assert rows("SELECT amount FROM ledger") == [(5,)]


def test_a_known_id_with_other_arguments_is_ignored_and_set_aside(
    database: Path, rows: Rows
) -> None:
    shop = Shop(database)
    assert shop.pay.apply((5,), task_id="t-1").result == "paid"
    assert shop.pay.apply((6,), task_id="t-1").state == "IGNORED"
    assert rows("SELECT amount FROM ledger") == [(5,)]
    assert rows("SELECT message_id FROM txbox_quarantine") == [("t-1",)]


@pytest.mark.parametrize(
    "result",
    [None, [1, "a"], {"day": date(2026, 11, 26), "price": Decimal("1.10"), "id": UUID(int=7)}],
)
def test_a_copy_returns_the_types_of_the_first_run(database: Path, result: object) -> None:
    shop = Shop(database)
    shop.results = [result]
    first, second = (shop.answer.apply((), task_id="t-1").result for _ in range(2))
    assert first == second == result


def test_what_celery_cannot_pass_on_is_refused_before_the_commit(
    database: Path, rows: Rows
) -> None:
    shop = Shop(database)
    shop.results = [object()]
    failed = shop.answer.apply((), task_id="t-1")
    assert isinstance(failed.result, ConfigurationError)
    assert "keep_result=False" in str(failed.result)
    assert rows("SELECT * FROM txbox_inbox") == []


def test_results_that_are_not_kept(database: Path) -> None:
    shop = Shop(database)
    kept = object()
    shop.results = [kept]
    assert shop.forget.apply((), task_id="t-1").result is kept
    assert shop.forget.apply((), task_id="t-1").state == "IGNORED"


def test_celery_retries_what_failed_under_the_same_id(database: Path, rows: Rows) -> None:
    shop = Shop(database)
    shop.failures = [OSError("away"), OSError("away")]
    assert shop.pay.apply_async((5,), task_id="t-1").get() == "paid"
    assert rows("SELECT amount FROM ledger") == [(5,)]
    assert rows("SELECT message_id FROM txbox_inbox") == [("t-1",)]


def test_what_fails_for_good_keeps_no_row(database: Path, rows: Rows) -> None:
    shop = Shop(database)
    shop.failures = [ValueError("no")]
    assert shop.pay.apply((5,), task_id="t-1").failed()
    assert rows("SELECT * FROM txbox_inbox") == rows("SELECT * FROM ledger") == []


def test_the_id_may_be_the_order(database: Path, rows: Rows) -> None:
    shop = Shop(database)
    shop.ship.delay(7)
    shop.ship.delay(order=7)  # sent twice, as two tasks
    assert rows("SELECT amount FROM ledger") == [(7,)]


def test_callers_do_not_pass_the_transaction(database: Path) -> None:
    shop = Shop(database)
    with pytest.raises(TypeError):
        shop.pay.delay(object(), 5)


def test_a_plain_call_has_no_id(database: Path) -> None:
    with pytest.raises(ConfigurationError, match="has no id"):
        Shop(database).pay(5)


def test_a_worker_keeps_the_result_of_the_first_run(database: Path, rows: Rows) -> None:
    shop = Shop(database, task_always_eager=False)
    done = {"timeout": 60}
    working: Any = start_worker
    with working(shop.celery, pool="solo", perform_ping_check=False, shutdown_timeout=60):
        assert shop.pay.apply_async((5,), task_id="t-1").get(**done) == "paid"
        shop.pay.apply_async((5,), task_id="t-1")
        # one worker, one thread: what it answers next, it has come to after the copy
        assert shop.pay.apply_async((6,), task_id="t-2").get(**done) == "paid"
        assert shop.celery.AsyncResult("t-1").result == "paid"
    assert rows("SELECT amount FROM ledger ORDER BY 1") == [(5,), (6,)]
