"""mode="stored": acknowledged when stored, run from memory under a lease."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.support.shop import CONSUMER, TOPIC, Shop, as_id, paid, statuses
from tests.support.sources import Memory, event_line
from tests.support.waiting import DEADLINE_S, eventually
from tests.support.workers import Process, running, worker
from txbox import Message, session
from txbox.brokers.base import Delivery


def held_at(shop: Shop, message_id: str, **options: Any) -> tuple[threading.Event, threading.Event]:
    """A stored handler that waits at one message; returns (it is there, let it go on)."""
    entered, gate = threading.Event(), threading.Event()

    def hold(message: Message[Any], _tx: Any) -> None:
        if message.id == message_id:
            entered.set()
            assert gate.wait(DEADLINE_S)

    shop.handler(hold, mode="stored", **options)
    return entered, gate


def test_what_is_stored_is_acknowledged_before_it_runs(shop: Shop) -> None:
    entered, gate = held_at(shop, "m0")
    source = Memory([paid("m0"), paid("m1")], endless=True)
    shop.app.consume(source)
    with running(worker(shop.app)):
        assert entered.wait(DEADLINE_S)
        eventually(lambda: len(source.settled) == 2, "acknowledgements while the handler runs")
        gate.set()
        eventually(lambda: statuses(shop.raw) == {"processed": 2})
    assert shop.effects() == 2
    assert shop.raw.value("SELECT sum(starts) FROM txbox_inbox") == 0


def test_a_lane_that_has_rows_stores_what_comes_for_anybody(shop: Shop) -> None:
    """A slow handler slows no acknowledgement: its lane stores the rest before it runs the next."""
    # m1 is the second to run: by then everything has been stored
    entered, gate = held_at(shop, "m01")
    source = Memory([paid(f"m{number:02}") for number in range(60)], endless=True)
    shop.app.consume(source)
    with running(worker(shop.app)):
        assert entered.wait(DEADLINE_S)
        eventually(lambda: len(source.settled) == 60, "acknowledgements while the handler runs")
        if shop.raw.product != "sqlite":
            found = statuses(shop.raw)
            # the rest of what was leased, and what another worker may take
            assert found["processing"] == shop.app.lease.batch - found["processed"]
            assert found["pending"] == 60 - shop.app.lease.batch
        gate.set()
        eventually(lambda: statuses(shop.raw) == {"processed": 60})
    assert shop.effects() == 60


def test_a_batch_that_is_run_at_once_is_written_leased(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    if shop.raw.product == "mysql":
        pytest.skip(
            "a handler's COMMIT cannot be refused: each message has a transaction of its own"
        )
    shop.handler(mode="stored")
    shop.app.consume(Memory([paid(f"m{number}") for number in range(100)]))
    points: list[str] = []
    monkeypatch.setattr(session, "crash_point", points.append)

    assert worker(shop.app, once=True).run() == 0

    assert statuses(shop.raw) == {"processed": 100}
    assert points.count("after:store") < 10
    # how many share one depends on how fast the machine is
    assert points.count("after:claim_leased") < 100, "rows share transactions"
    assert shop.raw.value("SELECT sum(starts) FROM txbox_inbox") == 0


def test_copies_and_known_messages(shop: Shop) -> None:
    shop.handler(mode="stored")
    shop.deliver(paid("known"))
    shop.make_due()
    shop.work()
    source = Memory([paid(name) for name in ("a", "known", "a", "b", "known")])
    shop.app.consume(source)

    assert worker(shop.app, once=True).run() == 0

    assert sorted(shop.calls) == ["a", "b", "known"]
    assert len(source.settled) == 5
    assert shop.effects() == 3


def test_what_a_handler_sees_is_what_the_table_has(shop: Shop) -> None:
    """Rows run from memory are as those that were read."""
    seen: dict[str, Message[Any]] = {}

    def note(message: Message[Any], _tx: Any) -> None:
        first = seen.setdefault(str(message.id), message)
        if message.attempt == 1:
            raise ValueError("once more, from the table")
        assert first.received_at is not None
        assert message.received_at == first.received_at
        for name in ("topic", "payload", "type", "key", "headers", "content_type", "consumer"):
            assert getattr(message, name) == getattr(first, name), name

    shop.handler(note, mode="stored")
    shop.app.consume(
        Memory([paid("m1", type="t", key="k", headers={"h": "1"}, content_type="application/json")])
    )

    assert worker(shop.app, once=True).run() == 0

    assert statuses(shop.raw) == {"processed": 1}


def test_a_drain_gives_back_what_the_lane_has_stored(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    points: list[str] = []
    monkeypatch.setattr(session, "crash_point", points.append)
    entered, gate = held_at(shop, "m0")
    source = Memory([paid(f"m{number}") for number in range(10)], endless=True)
    shop.app.consume(source)
    the_worker = worker(shop.app)
    with running(the_worker) as codes:
        assert entered.wait(DEADLINE_S)
        the_worker.stop()
        eventually(the_worker._stopping.is_set)
        gate.set()
    assert codes == [0]
    assert statuses(shop.raw) == {"pending": 9, "processed": 1}
    assert shop.raw.value("SELECT sum(starts) FROM txbox_inbox") == 0
    assert points.count("after:release") == 1, "in one transaction: little of the grace may be left"
    assert len(source.settled) == 10


def test_copies_of_what_is_leased_run_nothing(shop: Shop) -> None:
    entered, gate = held_at(shop, "m0", concurrency=2)
    source = Memory([paid("m0")], endless=True)
    shop.app.consume(source)
    with running(worker(shop.app)):
        assert entered.wait(DEADLINE_S)
        source.waiting = [Delivery(paid("m0"), TOPIC, redelivered=True) for _ in range(2)]
        eventually(lambda: len(source.received) == 3, "the copies, one for each lane")
        gate.set()
        eventually(lambda: len(source.settled) == 3)
        eventually(lambda: statuses(shop.raw) == {"processed": 1})
    assert shop.calls == ["m0"]


def test_killed_between_the_store_and_the_commit_of_the_run(shop: Shop, tmp_path: Path) -> None:
    """What was acknowledged is in the table, leased; it runs when that lease is over."""
    orders = tmp_path / "orders.jsonl"
    orders.write_text("".join(event_line(f"m{number}") for number in range(10)))
    plan: dict[str, Any] = {"url": shop.url, "file": str(orders), "once": True, "mode": "stored",
            "lease_s": 0.5, "max_starts": 100, "maintenance": True}  # fmt: skip
    # its handler has begun, so the transaction that stored has committed
    with Process(crash=("before:handler", 1), **plan) as process:
        assert process.ended() == -signal.SIGKILL, process.errors
    assert statuses(shop.raw) == {"processing": 10}
    assert shop.raw.value("SELECT min(starts) FROM txbox_inbox") == 1
    with Process(**plan) as process:
        assert process.ended() == 0, process.errors
    assert statuses(shop.raw) == {"processed": 10}
    assert shop.effects() == 10


def test_once_does_not_leave_a_version_whose_turn_it_is(shop: Shop) -> None:
    """One whose predecessor's commit did not wake it looks again within two seconds."""
    shop.handler(sequence="headers.n")
    assert shop.deliver(paid("m2", key="k", headers={"n": "2"})).settles
    assert statuses(shop.raw) == {"pending": 1}
    key = "`key`" if shop.raw.product == "mysql" else "key"
    shop.raw.execute(
        f"INSERT INTO txbox_sequence (consumer, {key}, last) VALUES (?, ?, 1)",
        (as_id(shop.raw, CONSUMER), as_id(shop.raw, "k")),
    )
    shop.app.consume(Memory([]))

    assert worker(shop.app, once=True).run() == 0

    assert shop.calls == ["m2"]
    assert statuses(shop.raw) == {"processed": 1}


def test_once_does_not_wait_for_a_version_that_has_not_come(shop: Shop) -> None:
    shop.handler(sequence="headers.n")
    shop.app.consume(Memory([paid("m3", key="k", headers={"n": "3"})]))

    assert worker(shop.app, once=True).run() == 0

    assert shop.calls == []
    assert statuses(shop.raw) == {"pending": 1}
