"""Copies of one message: at once, in a storm, in every process, with another payload, for several consumers."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest

import txbox.session
from tests.support.databases import NewDatabase
from tests.support.scenario_process import Plan, WorkerProcess
from tests.support.shop import (
    CONSUMER,
    TOPIC,
    Shop,
    add_effect,
    lasting,
    opened,
    paid,
    quarantined,
    statuses,
)
from tests.support.waiting import DEADLINE_S
from txbox import App, Limits, Message, Outcome
from txbox.events import MessageDuplicate, MessageProcessed, MessageQuarantined, TransactionRetried

PAYLOAD = b'{"cents": 100}'


def test_concurrent_duplicate_messages(shop: Shop) -> None:
    one = Plan(shop.url, deliveries=[("a", PAYLOAD)], hold=("domain updated",))
    two = Plan(shop.url, deliveries=[("a", PAYLOAD)], hold=("before:begin",))
    with WorkerProcess(two) as second:
        second.until(at="before:begin")
        with WorkerProcess(one) as first:
            check_one_waits_for_the_other(first, second)
    assert shop.effects("a") == 1
    assert statuses(shop.raw) == {"processed": 1}
    assert shop.raw.value("SELECT count(*) FROM txbox_attempt") == 0


def check_one_waits_for_the_other(first: WorkerProcess, second: WorkerProcess) -> None:
    first.until(at="domain updated")  # its transaction is open, its row uncommitted
    second.go()
    first.go()
    assert first.until(acked=0)["outcome"] == Outcome.PROCESSED
    assert second.until(acked=0)["outcome"] == Outcome.DUPLICATE
    for worker in (first, second):
        worker.rest()
        assert (worker.ended(), worker.errors) == (0, "")


def test_duplicate_storm(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    shop.handler()
    names: list[str] = []
    monkeypatch.setattr(txbox.session, "crash_point", names.append)
    with ThreadPoolExecutor(8) as threads:
        outcomes = Counter(threads.map(lambda _: shop.deliver(paid("a", PAYLOAD)), range(1000)))
    assert outcomes == {Outcome.PROCESSED: 1, Outcome.DUPLICATE: 999}
    assert shop.effects() == 1
    assert len(shop.calls) == 1
    assert len(shop.emitted(MessageDuplicate)) == 999
    passed = Counter(names)
    # the cheap path: one claim and one read a copy, no handler, nothing recorded
    claims = sum(count for name, count in passed.items() if name.startswith("after:claim"))
    assert 1000 <= claims <= 1000 + retried(shop)
    assert passed["before:classify"] <= 1000 + retried(shop)
    assert passed["before:close"] == passed["before:handler"] == 1
    assert [name for name in passed if "record" in name or "quarantine" in name] == []


def retried(shop: Shop) -> int:
    """Transactions that a deadlock or a lock made the protocol try again."""
    return len(shop.emitted(TransactionRetried))


def test_id_reuse_with_different_payload(shop: Shop) -> None:
    shop.handler()
    assert shop.deliver(paid("a", PAYLOAD)) is Outcome.PROCESSED
    before = lasting(shop.raw)
    assert shop.deliver(paid("a", b'{"cents": 999}')) is Outcome.QUARANTINED
    assert shop.deliver(paid("a", b'{"cents": 999}')) is Outcome.QUARANTINED
    assert lasting(shop.raw) == before
    ((reason, seen),) = quarantined(shop.raw)
    assert "payload" in reason
    assert seen == 2
    assert bytes(shop.raw.value("SELECT payload FROM txbox_quarantine")) == b'{"cents": 999}'
    assert [event.message_id for event in shop.emitted(MessageQuarantined)] == ["a", "a"]
    assert (shop.effects(), shop.calls) == (1, ["a"])


def test_multiple_consumers_same_message(shop: Shop) -> None:
    def fails(message: Message[Any], tx: Any) -> None:
        raise ValueError("not today")

    shop.handler(consumer="billing")
    shop.handler(consumer="shipping")
    shop.handler(fails, consumer="audit")
    for consumer, outcome in (
        ("billing", Outcome.PROCESSED),
        ("shipping", Outcome.PROCESSED),
        ("audit", Outcome.FAILED),
        ("billing", Outcome.DUPLICATE),
        ("shipping", Outcome.DUPLICATE),
        ("audit", Outcome.DEFERRED),
    ):
        assert shop.deliver(paid("a"), consumer) is outcome
    assert dict(shop.raw.rows("SELECT note, count(*) FROM effect GROUP BY note")) == {
        "billing": 1,
        "shipping": 1,
    }
    assert shop.row("a", "audit").status == "failed"
    assert len(shop.emitted(MessageProcessed)) == 2


def test_fifty_deliveries_from_sixteen_threads(
    shop: Shop, caplog: pytest.LogCaptureFixture
) -> None:
    shop.handler()
    with caplog.at_level(logging.WARNING), ThreadPoolExecutor(16) as threads:
        outcomes = Counter(threads.map(lambda _: shop.deliver(paid("a")), range(50)))
    assert outcomes == {Outcome.PROCESSED: 1, Outcome.DUPLICATE: 49}
    assert (shop.effects(), statuses(shop.raw)) == (1, {"processed": 1})
    assert caplog.records == []
    assert shop.raw.value("SELECT count(*) FROM txbox_attempt") == 0


def test_fifty_deliveries_through_a_small_pool(postgresql_url: str) -> None:
    from psycopg_pool import ConnectionPool

    with (
        opened(postgresql_url) as shop,
        ConnectionPool(postgresql_url, min_size=1, max_size=2, open=True) as pool,
        App(pool) as app,
    ):
        app.handler(TOPIC, consumer=CONSUMER)(lambda message, tx: add_effect(tx, message.id))
        with ThreadPoolExecutor(16) as threads:
            outcomes = Counter(threads.map(lambda _: app.process(paid("a")), range(50)))
        assert outcomes == {Outcome.PROCESSED: 1, Outcome.DUPLICATE: 49}
        assert shop.effects() == 1


def test_fifty_deliveries_from_four_processes(shop: Shop) -> None:
    plan = Plan(shop.url, deliveries=[("a", PAYLOAD)] * 13, hold=("received",))
    workers = [WorkerProcess(plan) for _ in range(4)]
    outcomes: Counter[str] = Counter()
    try:
        for worker in workers:
            worker.until(at="received")
        for worker in workers:
            for _ in range(13):
                worker.go()
        for worker in workers:
            said = worker.rest()
            assert (worker.ended(), worker.errors) == (0, "")
            outcomes.update(line["outcome"] for line in said if "acked" in line)
            assert [line for line in said if "kept" in line] == []
    finally:
        for worker in workers:
            worker.__exit__(None, None, None)
    assert outcomes == {Outcome.PROCESSED: 1, Outcome.DUPLICATE: 51}
    assert (shop.effects("a"), statuses(shop.raw)) == (1, {"processed": 1})
    assert shop.raw.value("SELECT count(*) FROM txbox_attempt") == 0


def test_rival_that_rolls_back_leaves_the_message_to_the_next(shop: Shop) -> None:
    """Three sessions insert one key and the first rolls back: InnoDB then deadlocks one of the others."""
    inside, leave = threading.Event(), threading.Event()
    failed: list[str] = []

    def first_fails(message: Message[Any], tx: Any) -> None:
        if not failed:
            failed.append(str(message.id))
            inside.set()
            assert leave.wait(DEADLINE_S)
            raise ValueError("the first one rolls back")

    shop.handler(first_fails)
    with App(shop.url) as second, App(shop.url) as third, ThreadPoolExecutor(3) as threads:
        # apps of their own, as in other processes: this one knows what it has in flight
        for other in (second, third):
            other.handler(TOPIC, consumer=CONSUMER)(lambda message, tx: add_effect(tx, message.id))
        one = threads.submit(shop.deliver, paid("a"))
        assert inside.wait(DEADLINE_S)
        rest = [threads.submit(other.process, paid("a")) for other in (second, third)]
        leave.set()
        outcomes = Counter(future.result(DEADLINE_S) for future in (one, *rest))
    # the failure is recorded by a transaction of its own: a rival may come before it or after it
    assert outcomes[Outcome.PROCESSED] <= 1
    assert set(outcomes) <= {Outcome.PROCESSED, Outcome.DUPLICATE, Outcome.FAILED, Outcome.DEFERRED}
    shop.work()
    assert shop.effects("a") == 1
    assert shop.row("a").status == "processed"


def test_a_handler_that_delivers_its_own_message(new_database: NewDatabase) -> None:
    """It waits for itself no longer than for anybody, and is processed once."""
    inner: list[Outcome] = []
    limits = Limits(lock_timeout=timedelta(milliseconds=200))
    with opened(new_database("postgresql"), limits=limits) as shop:
        shop.handler(lambda message, _tx: inner.append(shop.app.process(paid(str(message.id)))))
        assert shop.deliver(paid("a")) is Outcome.PROCESSED
        assert inner == [Outcome.IN_PROGRESS]
        assert (shop.calls, shop.effects("a")) == (["a"], 1)
