"""Deliveries that are stored and leased before they run: redeliveries, and work outside a transaction."""

from __future__ import annotations

import threading
from contextlib import closing
from datetime import timedelta
from typing import Any, Literal

import pytest

from tests.support.databases import Raw
from tests.support.proxy import Proxy
from tests.support.shop import AT_ONCE, CONSUMER, TOPIC, Shop, opened, paid, statuses
from tests.support.sources import Memory
from tests.support.waiting import DEADLINE_S, eventually
from tests.support.workers import running, worker
from txbox import App, Batching, Lease, Message, session
from txbox.brokers.base import Delivery
from txbox.events import ConsumptionPaused, Event


def again(message_id: str, **more: Any) -> Delivery:
    return Delivery(paid(message_id, **more), TOPIC, redelivered=True)


def test_a_redelivery_is_counted_before_it_runs(shop: Shop) -> None:
    """Promise 4.4: it may have killed the worker that had it, so its start is on disk first."""
    seen: list[Any] = []

    def look(message: Message[Any], _tx: Any) -> None:
        with closing(Raw(shop.url)) as other:
            rows = other.rows("SELECT status, starts FROM txbox_inbox ORDER BY arrival")
            seen.append((message.id, [tuple(row) for row in rows]))

    shop.handler(look)
    source = Memory([again("again"), Delivery(paid("fresh"), TOPIC)])
    shop.app.consume(source)

    assert worker(shop.app, once=True).run() == 0

    assert seen[0] == ("again", [("processing", 1)])
    assert source.settled_ids == ["again", "fresh"]
    assert statuses(shop.raw) == {"processed": 2}
    assert shop.raw.value("SELECT sum(starts) FROM txbox_inbox") == 0


def test_a_burst_of_redeliveries_is_stored_together_and_runs_in_order(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    points: list[str] = []
    shop.handler()
    # ids that sort the other way: neither the table nor the id may decide the order
    burst = [f"m{99 - number}" for number in range(60)]
    source = Memory([*map(again, burst), *(Delivery(paid(f"f{n}"), TOPIC) for n in range(20))])
    shop.app.consume(source)

    monkeypatch.setattr(session, "crash_point", points.append)

    assert worker(shop.app, once=True).run() == 0

    assert shop.calls == [*burst, *(f"f{number}" for number in range(20))]
    assert source.settled_ids == shop.calls
    assert points.count("after:store") == 3, "as many as Lease.batch share a transaction"
    assert shop.effects() == 80
    assert shop.raw.value("SELECT sum(starts) FROM txbox_inbox") == 0


def test_a_burst_runs_in_a_few_transactions(
    postgresql_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The start of each is on disk before any of them runs, so that they need no transaction each."""
    points: list[str] = []
    # however long a transaction takes here
    with opened(postgresql_url, batching=Batching(duration=timedelta(hours=1))) as shop:
        shop.handler()
        shop.app.consume(Memory([again(f"m{number}") for number in range(200)]))
        monkeypatch.setattr(session, "crash_point", points.append)

        assert worker(shop.app, once=True).run() == 0

        assert shop.effects() == 200
        assert points.count("after:store") == 10
        assert points.count("after:claim_leased") <= 20


def test_copies_in_a_burst_of_redeliveries(shop: Shop) -> None:
    shop.handler()
    shop.deliver(paid("known"))
    source = Memory([again(name) for name in ("a", "known", "a", "b", "known")])
    shop.app.consume(source)

    assert worker(shop.app, once=True).run() == 0

    assert shop.calls == ["known", "a", "b"]
    assert len(source.settled) == 5


def test_a_failure_in_a_burst_costs_only_itself(shop: Shop) -> None:
    def fail(message: Message[Any], _tx: Any) -> None:
        if message.id == "m1" and message.attempt == 1:
            raise ValueError("once")

    shop.handler(fail)
    source = Memory([again(f"m{number}") for number in range(4)])
    shop.app.consume(source)

    assert worker(shop.app, once=True).run() == 0

    assert sorted(shop.calls) == ["m0", "m1", "m1", "m2", "m3"]
    assert statuses(shop.raw) == {"processed": 4}
    assert shop.row("m1").attempts == 1


def test_a_drain_gives_back_what_the_lane_has_leased(shop: Shop) -> None:
    entered, gate = threading.Event(), threading.Event()

    def hold(_message: Message[Any], _tx: Any) -> None:
        entered.set()
        assert gate.wait(DEADLINE_S)

    shop.handler(hold)
    source = Memory([again(f"m{number}") for number in range(5)], endless=True)
    shop.app.consume(source)
    the_worker = worker(shop.app)
    with running(the_worker) as codes:
        assert entered.wait(DEADLINE_S)
        the_worker.stop()
        eventually(the_worker._stopping.is_set)
        gate.set()
    assert codes == [0]
    assert shop.calls == ["m0"]
    assert statuses(shop.raw) == {"pending": 4, "processed": 1}
    assert shop.raw.value("SELECT sum(starts) FROM txbox_inbox") == 0
    assert len(source.settled) == 5, "what is stored may be acknowledged"


def test_a_long_run_outside_a_transaction_keeps_its_lease(database_url: str) -> None:
    gate = threading.Event()
    calls: list[Any] = []
    with opened(database_url, lease=Lease(duration=timedelta(seconds=0.6))) as shop:

        @shop.app.handler(TOPIC, consumer=CONSUMER, transactional=False, retry=AT_ONCE)
        def call(message: Message[Any]) -> None:
            calls.append(message.id)
            assert gate.wait(DEADLINE_S)

        source = Memory([paid("m1"), paid("m2")], endless=True)
        shop.app.consume(source)
        with running(worker(shop.app, maintenance=True)):
            eventually(lambda: len(source.settled) == 2, "the acknowledgement of what is stored")
            until = {_lease_until(shop, "m2")}

            def beaten() -> bool:
                until.add(_lease_until(shop, "m2"))
                return len(until) > 3

            eventually(beaten, "three heartbeats")
            assert calls == ["m1"]
            gate.set()
            eventually(lambda: statuses(shop.raw) == {"processed": 2})
        assert calls == ["m1", "m2"]
        assert shop.raw.value("SELECT count(*) FROM txbox_attempt") == 0


def test_process_leases_work_outside_a_transaction_for_its_timeout(shop: Shop) -> None:
    left: list[float] = []

    @shop.app.handler(
        TOPIC, consumer=CONSUMER, transactional=False, timeout=timedelta(hours=2), retry=AT_ONCE
    )
    def call(message: Message[Any]) -> None:
        with closing(Raw(shop.url)) as other:
            left.append(_lease_left_s(other))

    assert shop.deliver(paid("m1")).settles

    assert 7200 < left[0] <= 7200 + shop.app.lease.duration.total_seconds() + 1


def _lease_until(shop: Shop, message_id: str) -> Any:
    return shop.raw.value(
        "SELECT lease_until FROM txbox_inbox WHERE message_id = ?",
        (message_id.encode() if shop.raw.product == "mysql" else message_id,),
    )


def _lease_left_s(raw: Raw) -> float:
    left = {
        "postgresql": "extract(epoch FROM lease_until - clock_timestamp())",
        "mysql": "timestampdiff(second, utc_timestamp(6), lease_until)",
        "sqlite": "(julianday(lease_until) - julianday('now')) * 86400",
    }[raw.product]
    return float(raw.value(f"SELECT {left} FROM txbox_inbox"))


@pytest.mark.parametrize("mode", ["inline", "stored"])
def test_a_drain_does_not_wait_for_a_database_that_went_away_before_a_commit(
    postgresql_url: str, mode: Literal["inline", "stored"]
) -> None:
    with Raw(postgresql_url) as raw, Proxy(postgresql_url) as proxy, App(proxy.url) as app:
        paused = threading.Event()

        @app.handler(TOPIC, consumer=CONSUMER, mode=mode)
        def handle(_message: Message[Any], _tx: Any) -> None:
            proxy.refuse()

        def hear(event: Event) -> None:
            if isinstance(event, ConsumptionPaused) and event.consumer == CONSUMER:
                paused.set()

        app.events.observers.append(hear)
        app.consume(Memory([paid("m")], endless=True))
        with running(worker(app)) as codes:
            assert paused.wait(DEADLINE_S)
        assert codes == [0]
        assert statuses(raw) == ({"processing": 1} if mode == "stored" else {})
