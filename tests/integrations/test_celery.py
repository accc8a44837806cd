"""A task of Celery runs once for each id, eagerly and in a worker of its own on a broker in memory."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from celery import Celery, chain, chord, current_task, group
from celery.app.trace import build_tracer
from celery.contrib.testing.worker import start_worker
from celery.exceptions import Ignore
from celery.signals import before_task_publish

from tests.integrations.conftest import Rows
from txbox import ConfigurationError, Inbox
from txbox.integrations.celery import once


class Shop:
    """Tasks over one database: `pay` writes, and then fails as often as told."""

    def __init__(self, database: Path, **settings: Any) -> None:
        self.celery = Celery(
            "shop", broker="memory://", backend="cache+memory://", set_as_current=False
        )
        # a broker in memory is one for the process
        queue = {"task_default_queue": str(database)}
        self.celery.conf.update({"task_always_eager": True, **queue, **settings})
        self.failures: list[Exception] = []
        self.results: list[object] = []

        @contextmanager
        def transaction() -> Iterator[sqlite3.Connection]:
            with closing(sqlite3.connect(database)) as connection, connection:
                connection.execute("BEGIN IMMEDIATE")
                yield connection

        self.transaction = transaction

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

        @self.celery.task(shared=False, acks_late=True)
        @once(Inbox(consumer="tip"), transaction)
        def tip(tx: sqlite3.Connection, _paid: str) -> None:
            tx.execute("INSERT INTO ledger VALUES (1)")

        @self.celery.task(shared=False, acks_late=True)
        @once(Inbox(consumer="count down"), transaction)
        def count_down(tx: sqlite3.Connection, number: int) -> None:
            tx.execute("INSERT INTO ledger VALUES (?)", (number,))
            if number < 0:
                raise Ignore
            task: Any = current_task
            task.replace(self.pay.s(100) if number == 0 else self.count_down.s(number - 1))

        # celery has no types
        self.tip: Any = tip
        self.count_down: Any = count_down
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


def test_a_bound_task_is_refused(database: Path, rows: Rows) -> None:
    """Its first argument is no JSON, so that its copies would not be compared."""
    shop = Shop(database)

    def bound(tx: sqlite3.Connection, task: object, amount: int) -> None: ...

    task: Any = shop.celery.task(bind=True, shared=False)(
        once(Inbox(consumer="b"), shop.transaction)(bound)
    )
    with pytest.raises(ConfigurationError, match="remove bind=True"):
        task.apply((5,), throw=True)


def test_a_body_that_ends_by_ignore_is_done(database: Path, rows: Rows) -> None:
    shop = Shop(database)
    for _ in range(2):
        assert shop.count_down.apply((-1,), task_id="t-1").state == "IGNORED"
    assert rows("SELECT amount FROM ledger") == [(-1,)]


Step = Callable[[], Any]


def one(step: Step) -> list[Any]:
    return [step()]


def grouped(step: Step) -> list[Any]:
    return [step(), group(step(), step())]


def chained(step: Step) -> list[Any]:
    return [step(), chain(step(), chord([chain(step(), step()), step()], step()))]


@pytest.mark.parametrize(
    ("called_by", "followers"),
    [
        ("callbacks", one), ("callbacks", grouped), ("callbacks", chained),
        ("errbacks", one), ("errbacks", grouped), ("chord", grouped),
    ],
)  # fmt: skip
def test_callbacks_of_a_task_that_is_delivered_again_keep_their_ids(
    database: Path, followers: Callable[[Step], list[Any]], called_by: str
) -> None:
    """Else a callback with `once` would run again. What Celery keeps of a chain has its ids from its sender."""
    shop = Shop(database, task_always_eager=False)
    tracer: Any = build_tracer
    request: dict[str, Any] = {"id": "t-1", "delivery_info": {}}
    if called_by == "chord":
        # its group has been counted and is gone, which is an error of the chord
        body = shop.tip.s().set(task_id="body", link_error=followers(shop.tip.s))
        request |= {"chord": body, "group": "g-1"}
    else:
        request[called_by] = followers(shop.tip.s)
    if called_by == "errbacks":
        shop.failures = [ValueError("no")] * 2
    deliveries: list[set[str]] = []
    for _ in range(2):
        published: set[str] = set()

        def publishes(headers: Any, ids: set[str] = published, **_: Any) -> None:
            ids.add(headers["id"])

        before_task_publish.connect(publishes)
        try:
            # as a delivery brings it
            brought = json.loads(json.dumps(request))
            tracer(shop.pay.name, shop.pay, app=shop.celery)("t-1", (5,), {}, brought)
        finally:
            before_task_publish.disconnect(publishes)
        deliveries.append(published)
    assert deliveries[0] == deliveries[1]
    assert len(deliveries[0]) >= len(followers(shop.tip.s))


def test_copies_and_what_follows_a_task_in_a_worker(database: Path, rows: Rows) -> None:
    """Callbacks of two deliveries run once; what a task is replaced by runs, also if that is the same task."""
    shop = Shop(database, task_always_eager=False)
    done = {"timeout": 60}
    working: Any = start_worker
    with working(shop.celery, pool="solo", perform_ping_check=False, shutdown_timeout=60):
        assert shop.pay.apply_async((5,), task_id="t-2", link=shop.tip.s()).get(**done) == "paid"
        shop.pay.apply_async((5,), task_id="t-2", link=shop.tip.s())
        # one worker, one thread: what it answers next, it has come to after the copy
        assert shop.count_down.apply_async((2,), task_id="t-3").get(**done) == "paid"
        assert shop.celery.AsyncResult("t-2").result == "paid"
    assert rows("SELECT amount FROM ledger ORDER BY 1") == [
        (0,), (1,), (1,), (2,), (5,), (100,),
    ]  # fmt: skip
    assert rows("SELECT * FROM txbox_quarantine") == []
