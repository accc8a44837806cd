"""Batches in a lane: what shares a transaction, in which order, and how much is in flight."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any, Literal

import pytest

from tests.support.shop import AT_ONCE, CONSUMER, TOPIC, Shop, add_effect, opened, paid, statuses
from tests.support.sources import Memory
from tests.support.waiting import DEADLINE_S, eventually
from tests.support.workers import running, worker
from txbox import Batching, Limits, Message
from txbox.app import App
from txbox.brokers.base import Delivery
from txbox.events import MessageDuplicate, MessageInFlight
from txbox.handlers import Handler
from txbox.processing.attempt import BatchSize
from txbox.processing.intake import Mode
from txbox.session import Session
from txbox.testing import another_process

MESSAGES = 300


class Fixed(BatchSize):
    """A pace that learns nothing."""

    def __init__(self, messages: int) -> None:
        super().__init__(Batching())
        self._fixed = messages

    @property
    def messages(self) -> int:
        return self._fixed


def batches_of(app: App, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Handler, list[str]]]:
    """The handler and the ids of every batch that a lane takes."""
    taken: list[tuple[Handler, list[str]]] = []
    take = app.intake.take_with_retries

    def recorded(
        db: Session, handler: Handler, messages: Sequence[Message[Any]], mode: Mode, **options: Any
    ) -> Any:
        taken.append((handler, [str(message.id) for message in messages]))
        return take(db, handler, messages, mode, **options)

    monkeypatch.setattr(app.intake, "take_with_retries", recorded)
    return taken


def at_pace(app: App, monkeypatch: pytest.MonkeyPatch, messages: int) -> None:
    fixed = Fixed(messages)
    monkeypatch.setattr(app.protocol.batch_sizes, "of", lambda _handler: fixed)


def test_a_backlog_is_run_in_batches_that_grow(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an ordinary handler, too, which is called for one message at a time."""
    if shop.raw.product == "mysql":
        pytest.skip(
            "a handler's COMMIT cannot be refused: each message has a transaction of its own"
        )
    taken = batches_of(shop.app, monkeypatch)
    shop.handler()
    ids = [f"m{number:03}" for number in range(MESSAGES)]
    source = Memory([paid(message_id) for message_id in ids])
    shop.app.consume(source)

    assert worker(shop.app, once=True).run() == 0

    assert len(taken[0][1]) == 1, "it is not known yet how long one takes"
    assert len(taken) < MESSAGES / 4
    assert shop.calls == ids
    assert source.settled_ids == ids
    assert shop.effects() == MESSAGES


def test_a_batch_is_never_larger_than_the_pace(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = batches_of(shop.app, monkeypatch)
    at_pace(shop.app, monkeypatch, 7)
    shop.handler()
    shop.app.consume(Memory([paid(f"m{number}") for number in range(70)]))

    assert worker(shop.app, once=True).run() == 0

    assert max(len(ids) for _, ids in taken) == 7
    assert shop.effects() == 70


def test_after_a_conflict_messages_run_one_by_one(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    if shop.raw.product == "mysql":
        pytest.skip(
            "a handler's COMMIT cannot be refused: each message has a transaction of its own"
        )
    taken = batches_of(shop.app, monkeypatch)
    handler = shop.handler()
    pace = shop.app.protocol.batch_sizes.of(handler)
    for _ in range(10):
        pace.committed(pace.messages, 0.001)
    assert pace.messages > 1
    pace.conflicted(2)
    shop.app.consume(Memory([paid(f"m{number}") for number in range(5)]))

    assert worker(shop.app, once=True).run() == 0

    assert len(taken[0][1]) == 1
    assert shop.effects() == 5


def test_versions_of_a_key_run_one_by_one(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = batches_of(shop.app, monkeypatch)
    at_pace(shop.app, monkeypatch, 50)
    shop.handler(sequence="headers.n")
    source = Memory([paid(f"m{n}", key="k", headers={"n": str(n)}) for n in range(1, 8)])
    shop.app.consume(source)

    assert worker(shop.app, once=True).run() == 0

    assert {len(ids) for _, ids in taken} == {1}
    assert shop.calls == [f"m{n}" for n in range(1, 8)]


def test_a_batch_is_of_one_handler_and_one_way(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = batches_of(shop.app, monkeypatch)
    at_pace(shop.app, monkeypatch, 50)
    shop.handler(type="paid")
    shop.handler(type="refunded")
    deliveries = [
        Delivery(paid(f"m{n}", type="paid" if n % 20 < 10 else "refunded"), TOPIC, redelivered=30 <= n < 35)
        for n in range(60)
    ]  # fmt: skip
    shop.app.consume(Memory(deliveries))

    assert worker(shop.app, once=True).run() == 0

    kinds = {
        str(delivery.message.id): delivery.message.type
        for delivery in deliveries
        if delivery.message
    }
    again = {
        str(delivery.message.id)
        for delivery in deliveries
        if delivery.message and delivery.redelivered
    }
    for handler, ids in taken:
        assert {frozenset({kinds[message_id]}) for message_id in ids} == {handler.types}
        assert again.issuperset(ids) or again.isdisjoint(ids)
    assert max(len(ids) for _, ids in taken) == 10
    assert shop.effects() == 60


@pytest.mark.parametrize("mode", ["inline", "stored"])
@pytest.mark.parametrize("registered", [TOPIC, "*"])
def test_types_and_topics_of_one_handler_share_a_batch(
    shop: Shop, monkeypatch: pytest.MonkeyPatch, registered: str, mode: Literal["inline", "stored"]
) -> None:
    taken = batches_of(shop.app, monkeypatch)
    at_pace(shop.app, monkeypatch, 50)
    topics = [TOPIC] if registered == TOPIC else [TOPIC, "refunds"]

    @shop.app.handler(registered, consumer=CONSUMER, mode=mode)
    def handle(message: Message[Any], tx: Any) -> None:
        add_effect(tx, message.id, f"{message.topic} {message.type}")

    messages = [
        replace(paid(f"m{n:02}", type=f"type{n % 5}"), topic=topics[n % len(topics)])
        for n in range(60)
    ]
    # a copy of the first in the same batch: its event names its topic
    shop.app.consume(Memory([*messages[:20], messages[0], *messages[20:]]))

    assert worker(shop.app, once=True).run() == 0

    assert max(len(ids) for _, ids in taken) >= 50
    notes = [note for (note,) in shop.raw.rows("SELECT note FROM effect")]
    assert Counter(notes) == Counter(f"{message.topic} {message.type}" for message in messages)
    copies = shop.emitted(MessageDuplicate)
    assert [event.topic for event in copies] == ([TOPIC] if mode == "inline" else [])


def test_a_batch_is_bounded_by_its_bytes(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(database_url, batching=Batching(payload_bytes=1000)) as shop:
        taken = batches_of(shop.app, monkeypatch)
        at_pace(shop.app, monkeypatch, 50)
        shop.handler()
        small = [paid(f"m{number}", b"x" * 300) for number in range(30)]
        shop.app.consume(Memory([*small, paid("large", b"x" * 5000), paid("last")]))

        assert worker(shop.app, once=True).run() == 0

        assert max(len(ids) for _, ids in taken) == 3
        assert next(ids for _, ids in taken if "large" in ids) == ["large"]
        assert shop.effects() == 32


@pytest.mark.parametrize("concurrency", [1, 3])
def test_three_batches_of_each_lane_are_in_flight_and_no_more(
    database_url: str, concurrency: int
) -> None:
    gate = threading.Event()
    with opened(database_url, batching=Batching(messages=8)) as shop:

        def hold(_message: Message[Any], _tx: Any) -> None:
            assert gate.wait(DEADLINE_S)

        shop.handler(hold, concurrency=concurrency)
        source = Memory([paid(f"m{number}") for number in range(200)])
        shop.app.consume(source)
        with running(worker(shop.app)):
            eventually(lambda: shop.calls)
            eventually(lambda: len(source.received) == 24 * concurrency)
            assert len(source.waiting) == 200 - 24 * concurrency
            gate.set()
            eventually(lambda: len(source.settled) == 200)
        assert shop.effects() == 200


def test_what_is_in_flight_is_bounded_by_its_bytes(database_url: str) -> None:
    gate, size = threading.Event(), 40_000
    with opened(database_url, batching=Batching(payload_bytes=200_000)) as shop:

        def hold(_message: Message[Any], _tx: Any) -> None:
            assert gate.wait(DEADLINE_S)

        shop.handler(hold)
        first = [paid(f"m{number}", b"x" * size) for number in range(3)]
        source = Memory(first, endless=True)
        shop.app.consume(source)
        the_worker = worker(shop.app)
        with running(the_worker):
            eventually(lambda: shop.calls)
            # what they weigh is known from those that have come
            source.waiting = [
                Delivery(paid(f"m{number}", b"x" * size), TOPIC) for number in range(3, 60)
            ]
            eventually(lambda: len(source.received) == 10)
            (pump,) = the_worker._pumps
            assert pump.in_flight == 10
            assert not source.settled
            gate.set()
            eventually(lambda: len(source.settled) == 60)
        assert pump.in_flight == 0
        assert shop.effects() == 60


def account_of(number: int) -> bytes:
    return json.dumps({"account": f"a{(number * 7) % 13:02}"}).encode()


def test_one_lock_key_has_one_lane(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the keys of the messages are: two lanes never wait for each other's rows."""
    lanes: dict[str, set[str]] = {}

    def note(message: Message[Any], _tx: Any) -> None:
        lanes.setdefault(message.json()["account"], set()).add(threading.current_thread().name)

    shop.handler(note, concurrency=4, lock_key="body.account")
    source = Memory([paid(f"m{n}", account_of(n), key=f"k{n}") for n in range(100)])
    shop.app.consume(source)

    assert worker(shop.app, once=True).run() == 0

    assert shop.effects() == 100
    assert {len(lane) for lane in lanes.values()} == {1}
    assert len(set.union(*lanes.values())) > 1


def test_a_batch_is_sorted_by_lock_key_and_else_as_it_came(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = batches_of(shop.app, monkeypatch)
    at_pace(shop.app, monkeypatch, 50)
    asked: list[str] = []

    def lock_key(message: Message[Any]) -> str:
        asked.append(str(message.id))
        return str(message.json()["account"])

    shop.handler(lock_key=lock_key)
    messages = [paid(f"m{n:02}", account_of(n)) for n in range(40)]
    shop.app.consume(Memory(messages))

    assert worker(shop.app, once=True).run() == 0

    accounts = {str(each.id): each.json()["account"] for each in messages}
    assert max(len(ids) for _, ids in taken) > 30
    for _, ids in taken:
        assert ids == sorted(ids, key=lambda each: (accounts[each], each))
    assert asked == [str(each.id) for each in messages], "each is asked for once"


def test_an_order_is_not_sorted(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    at_pace(shop.app, monkeypatch, 50)
    shop.handler(ordered=True, lock_key="body.account")
    ids = [f"m{n:02}" for n in range(30)]
    shop.app.consume(
        Memory([paid(message_id, account_of(n), key="k") for n, message_id in enumerate(ids)])
    )

    assert worker(shop.app, once=True).run() == 0

    assert shop.calls == ids


def test_a_lock_key_that_cannot_be_told_is_the_handlers_affair(shop: Shop) -> None:
    shop.handler(concurrency=3, lock_key="body.account")
    source = Memory([paid(f"m{n}", b"no JSON" if n % 2 else b'{"other": 1}') for n in range(12)])
    shop.app.consume(source)

    assert worker(shop.app, once=True).run() == 0

    assert statuses(shop.raw) == {"processed": 12}
    assert len(source.settled) == 12


def test_rows_of_the_table_run_in_batches(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    @shop.app.handler(TOPIC, consumer=CONSUMER, batch=True, retry=AT_ONCE)
    def handle(messages: list[Message[Any]], tx: Any) -> None:
        sizes.append(len(messages))
        for message in messages:
            add_effect(tx, message.id)

    at_pace(shop.app, monkeypatch, 50)
    for number in range(60):
        shop.app.send(paid(f"m{number}"))
    shop.app.consume(Memory([]))

    assert worker(shop.app, once=True).run() == 0

    assert max(sizes) == 50, "a lease takes what a transaction takes"
    assert sum(sizes) == shop.effects() == 60
    assert statuses(shop.raw) == {"processed": 60}
    assert shop.raw.value("SELECT sum(starts) FROM txbox_inbox") == 0


def test_what_another_transaction_holds_is_settled_when_that_has_ended(postgresql_url: str) -> None:
    """Promise 2.7: the worker keeps it, and claims it again itself."""
    entered, go = threading.Event(), threading.Event()

    def hold(_message: Message[Any], _tx: Any) -> None:
        entered.set()
        assert go.wait(DEADLINE_S)

    with opened(postgresql_url, limits=Limits(lock_timeout=timedelta(milliseconds=100))) as shop:
        shop.handler(hold)
        source = Memory([paid("a")], endless=True)
        shop.app.consume(source)
        elsewhere = threading.Thread(target=another_process(shop.app).process, args=(paid("a"),))
        elsewhere.start()
        assert entered.wait(DEADLINE_S)
        with running(worker(shop.app)):
            eventually(lambda: len(shop.emitted(MessageInFlight)) > 1)
            assert source.settled == []
            go.set()
            eventually(lambda: source.has_settled(1))
        elsewhere.join(DEADLINE_S)
        assert shop.emitted(MessageDuplicate)
        assert (shop.effects(), statuses(shop.raw)) == (1, {"processed": 1})
