"""Paused consumers: nothing of theirs runs, nothing is lost, and others go on; and who pauses itself."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.shop import CONSUMER, TOPIC, Shop, opened, paid, statuses
from tests.support.sources import Memory
from tests.support.waiting import DEADLINE_S, eventually
from tests.support.workers import running, worker
from txbox import ConfigurationError, Lease, Message, Outcome, RetryPolicy
from txbox.admin import Admin
from txbox.events import ConsumerPaused, ConsumerResumed, MessageFailed
from txbox.worker import pulse

OTHER = "ledger"


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulse, "_BEAT_S", 0.05)


@pytest.fixture
def admin(shop: Shop) -> Iterator[Admin]:
    # of an App of its own: what an operator does must reach a worker through the database
    with Admin(shop.url) as found:
        yield found


def hears(shop: Shop, *, paused: bool = True) -> None:
    eventually(lambda: (CONSUMER in shop.app.pauses.paused) is paused, "what the database says")


def test_a_source_of_a_paused_consumer_alone_keeps_its_messages(shop: Shop, admin: Admin) -> None:
    shop.handler()
    assert admin.pause(CONSUMER, reason="the bank is down")
    source = Memory([paid(f"m{number}") for number in range(5)], endless=True)
    source.tend_every_s = 0.01
    shop.app.consume(source)
    with running(worker(shop.app)):
        # looked after all the same: it stays in its group
        eventually(lambda: len(source.tended) > 5)
        assert not source.received
        assert admin.resume(CONSUMER)
        eventually(lambda: len(source.settled) == 5)
    assert statuses(shop.raw) == {"processed": 5}
    (paused,) = shop.emitted(ConsumerPaused)
    assert paused.reason == "the bank is down"
    assert len(shop.emitted(ConsumerResumed)) == 1


@pytest.mark.parametrize("everything", [True, False])
def test_a_source_of_every_topic_stops_when_all_of_its_consumers_are_paused(
    shop: Shop, admin: Admin, *, everything: bool
) -> None:
    """Whether a handler takes every topic or not: pausing that one does not stop the others."""
    shop.handler()
    first, second = CONSUMER, None
    if everything:
        first, second = OTHER, CONSUMER
        shop.app.handler("*", consumer=OTHER)(lambda message, tx: None)
    source = Memory([paid(f"m{number}") for number in range(5)], endless=True)
    assert admin.pause(first)
    if second is not None:
        assert admin.pause(second)
    shop.app.consume(source, topics=["*"])
    with running(worker(shop.app)):
        eventually(lambda: first in shop.app.pauses.paused)
        assert not source.received, "all are paused: it keeps its messages"
        assert admin.resume(second or first)
        eventually(lambda: shop.effects() == 5)
        eventually(lambda: len(source.settled) == 5)
    assert statuses(shop.raw) == (
        {"processed": 5, "pending": 5} if everything else {"processed": 5}
    )


def test_rows_of_a_paused_consumer_stay_until_it_is_resumed(shop: Shop, admin: Admin) -> None:
    shop.handler()
    shop.handler(consumer=OTHER)
    shop.app.send(paid("m"))
    admin.pause(CONSUMER)
    with running(worker(shop.app)):
        eventually(lambda: shop.raw.value(OF_ROWS, ("processed",)) == 1, "the other consumer")
    # a restart does not end it
    with running(worker(shop.app)):
        assert shop.effects() == 1
        admin.resume(CONSUMER)
        eventually(lambda: shop.raw.value(OF_ROWS, ("processed",)) == 2)


def test_an_app_that_was_paused_when_its_worker_ended_gets_another(
    shop: Shop, admin: Admin
) -> None:
    """Whoever is resumed meanwhile begins with the new worker, before its lanes are looked at otherwise."""
    if shop.app.database.asynchronous is None:
        pytest.skip("no async driver for this URL")

    @shop.app.handler(TOPIC, consumer=CONSUMER)
    async def handle(_message: Message[Any], _tx: Any) -> None: ...

    with running(worker(shop.app)):
        admin.pause(CONSUMER)
        hears(shop)
    shop.app.send(paid("m"))
    admin.resume(CONSUMER)
    with running(worker(shop.app)):
        eventually(lambda: statuses(shop.raw) == {"processed": 1})


OF_ROWS = "SELECT count(*) FROM txbox_inbox WHERE status = ?"


@pytest.mark.parametrize("options", [{}, {"ordered": True}, {"mode": "stored"}])
def test_another_consumer_of_a_source_goes_on_and_what_is_paused_is_stored(
    shop: Shop, admin: Admin, options: dict[str, Any]
) -> None:
    shop.handler(**options)
    shop.handler(consumer=OTHER)
    admin.pause(CONSUMER)
    source = Memory([paid(f"m{number}", key="k") for number in range(30)], endless=True)
    shop.app.consume(source)
    with running(worker(shop.app)):
        eventually(lambda: len(source.settled) == 30, "acknowledgements")
        assert statuses(shop.raw) == {"pending": 30, "processed": 30}
        assert shop.raw.value("SELECT sum(starts) + sum(attempts) FROM txbox_inbox") == 0
        shop.calls.clear()
        admin.resume(CONSUMER)
        eventually(lambda: statuses(shop.raw) == {"processed": 60})
    if "ordered" in options:
        assert shop.calls == [f"m{number}" for number in range(30)]
    assert shop.effects() == 60


def test_what_runs_is_finished_and_what_was_received_is_stored(shop: Shop, admin: Admin) -> None:
    entered, gate = threading.Event(), threading.Event()

    # outside of a transaction: on SQLite nobody writes while one is open
    @shop.app.handler(TOPIC, consumer=CONSUMER, transactional=False)
    def hold(_message: Message[Any]) -> None:
        entered.set()
        assert gate.wait(DEADLINE_S)

    source = Memory([paid(f"m{number}") for number in range(50)], endless=True)
    shop.app.consume(source)
    with running(worker(shop.app)):
        assert entered.wait(DEADLINE_S)
        admin.pause(CONSUMER)
        hears(shop)
        gate.set()
        # the one that ran is finished; nobody has a lease, and no attempt or start was counted
        eventually(lambda: statuses(shop.raw) == {"processed": 1, "pending": 49})
        eventually(lambda: len(source.settled) == 50)
        assert shop.raw.value("SELECT sum(starts) + sum(attempts) FROM txbox_inbox") == 0
        admin.resume(CONSUMER)
        eventually(lambda: statuses(shop.raw) == {"processed": 50})


def test_rows_that_are_leased_and_do_not_run_are_given_back(database_url: str) -> None:
    with opened(database_url, lease=Lease(batch=20)) as shop, Admin(shop.url) as admin:
        entered, gate = threading.Event(), threading.Event()

        @shop.app.handler(TOPIC, consumer=CONSUMER, transactional=False)
        def hold(_message: Message[Any]) -> None:
            entered.set()
            assert gate.wait(DEADLINE_S)

        for number in range(20):
            shop.app.send(paid(f"m{number}"))
        with running(worker(shop.app)):
            assert entered.wait(DEADLINE_S)
            admin.pause(CONSUMER)
            leased = "SELECT count(*) FROM txbox_inbox WHERE lease_until IS NOT NULL"
            eventually(lambda: shop.raw.value(leased) == 1, "the leases of others")
            gate.set()
            eventually(lambda: shop.raw.value(leased) == 0)
        assert shop.raw.value("SELECT sum(starts) FROM txbox_inbox") == 0
        assert statuses(shop.raw)["processed"] == 1


def test_process_stores_for_a_paused_consumer(shop: Shop, admin: Admin) -> None:
    shop.handler()
    admin.pause(CONSUMER)
    assert shop.deliver(paid("m")) is Outcome.DEFERRED
    assert shop.deliver(paid("m")) is Outcome.DEFERRED
    assert (shop.calls, shop.row("m").status) == ([], "pending")


def test_process_that_may_not_read_pauses_works_on_and_says_so_once(
    postgresql_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(postgresql_url) as shop:
        shop.handler()
        shop.raw.execute("ALTER TABLE txbox_pause RENAME TO elsewhere")
        for name in ("a", "b"):
            shop.app.pauses.stale_at = 0.0
            assert shop.deliver(paid(name)) is Outcome.PROCESSED
    assert caplog.text.count("Who is paused cannot be read") == 1


def test_run_once_ends_and_leaves_what_is_paused(shop: Shop, admin: Admin) -> None:
    shop.handler()
    shop.app.send(paid("stored"))
    shop.app.consume(Memory([paid("waiting")]))
    admin.pause(CONSUMER)
    assert worker(shop.app, once=True).run() == 0
    assert statuses(shop.raw) == {"pending": 1}


def test_a_pause_that_cannot_be_read_stays_what_it_was(shop: Shop, admin: Admin) -> None:
    shop.handler()
    shop.handler(consumer=OTHER)
    admin.pause(CONSUMER)
    source = Memory([], endless=True)
    shop.app.consume(source)
    with running(worker(shop.app)):
        hears(shop)
        shop.raw.execute("ALTER TABLE txbox_pause RENAME TO txbox_elsewhere")
        source.waiting += Memory([paid("m")]).waiting
        eventually(lambda: source.settled_ids == ["m"])
        assert CONSUMER in shop.app.pauses.paused
        assert statuses(shop.raw) == {"pending": 1, "processed": 1}
        shop.raw.execute("ALTER TABLE txbox_elsewhere RENAME TO txbox_pause")
        admin.resume(CONSUMER)
        eventually(lambda: statuses(shop.raw) == {"processed": 2})


# -- audit ----------------------------------------------------------------------------------------


def audited(shop: Shop) -> list[tuple[str, ...]]:
    rows = shop.raw.rows("SELECT actor, action, filter, reason FROM txbox_audit ORDER BY number")
    return [tuple(str(value) for value in row) for row in rows]


def test_each_change_is_audited_once_and_a_dry_run_changes_nothing(
    shop: Shop, admin: Admin
) -> None:
    assert admin.pause(CONSUMER, dry_run=True)
    assert not admin.pauses()
    assert not admin.resume(CONSUMER)
    assert admin.pause(CONSUMER, actor="anna", reason="bank")
    assert not admin.pause(CONSUMER, actor="bob")
    (pause,) = admin.pauses()
    assert (pause.consumer, pause.actor, pause.reason) == (CONSUMER, "anna", "bank")
    assert admin.resume(CONSUMER, dry_run=True)
    assert admin.resume(CONSUMER, actor="bob", reason="bank is back")
    assert not admin.resume(CONSUMER)
    meant = f'{{"consumer": "{CONSUMER}"}}'
    assert audited(shop) == [
        ("anna", "pause", meant, "bank"), ("bob", "resume", meant, "bank is back"),
    ]  # fmt: skip


# -- failures in a row ----------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["inline", "stored", "effect"])
@pytest.mark.parametrize("concurrency", [1, 3])
def test_a_dead_dependency_costs_few_attempts(
    shop: Shop, admin: Admin, mode: str, concurrency: int
) -> None:
    alive = threading.Event()
    limit = 5

    def call(message: Message[Any], _tx: Any = None) -> None:
        if not alive.is_set():
            raise ConnectionError("the bank is down")
        done.append(str(message.id))

    done: list[str] = []
    options: dict[str, Any] = {"pause_after": limit, "concurrency": concurrency}
    if mode == "effect":
        retry = RetryPolicy(base=RetryPolicy().base * 0)
        shop.app.handler(TOPIC, consumer=CONSUMER, transactional=False, retry=retry, **options)(
            call
        )
    else:
        shop.handler(call, mode=mode, **options)
    source = Memory([paid(f"m{number}") for number in range(100)], endless=True)
    shop.app.consume(source)
    with running(worker(shop.app)):
        eventually(admin.pauses, "the pause in the database")
        # what ran when it was paused has ended: an attempt is recorded before its delivery is settled
        eventually(lambda: len(source.settled) == len(source.received))
        held = "SELECT count(*) FROM txbox_inbox WHERE status = 'processing'"
        eventually(lambda: shop.raw.value(held) == 0)
        attempts = shop.raw.value("SELECT count(*) FROM txbox_attempt")
        assert limit <= attempts <= limit + concurrency
        alive.set()
        admin.resume(CONSUMER)
        eventually(lambda: len(source.settled) == 100, "all messages")
        eventually(lambda: statuses(shop.raw) == {"processed": 100}, "all rows")
    assert sorted(done) == sorted(f"m{number}" for number in range(100))
    (paused,) = shop.emitted(ConsumerPaused)
    assert (paused.consumer, paused.actor) == (CONSUMER, "txbox")
    assert paused.reason == "5 failures in a row, the last one ConnectionError"
    assert audited(shop)[0][:2] == ("txbox", "pause")


def test_a_success_ends_the_row(shop: Shop, admin: Admin) -> None:
    def fail(message: Message[Any], _tx: Any) -> None:
        if message.id != "good":
            raise ValueError("no")

    retry = RetryPolicy(max_attempts=1)
    shop.handler(fail, pause_after=3, retry=retry)
    names = ["a", "b", "good", "c", "d", "e", "f"]
    source = Memory([paid(name) for name in names], endless=True)
    shop.app.consume(source)
    with running(worker(shop.app)):
        eventually(admin.pauses)
    assert shop.calls == ["a", "b", "good", "c", "d", "e"]


def test_failures_are_counted_anew_after_a_resume(shop: Shop, admin: Admin) -> None:
    def fail(_message: Message[Any], _tx: Any) -> None:
        raise ValueError("no")

    shop.handler(fail, pause_after=2, retry=RetryPolicy(max_attempts=1))
    source = Memory([paid(f"m{number}") for number in range(10)], endless=True)
    shop.app.consume(source)
    with running(worker(shop.app)):
        for failures in (2, 4):
            eventually(admin.pauses)
            assert len(shop.calls) == failures
            admin.resume(CONSUMER)


def test_a_consumer_without_the_option_is_never_paused(shop: Shop) -> None:
    def fail(_message: Message[Any], _tx: Any) -> None:
        raise ValueError("no")

    shop.handler(fail, retry=RetryPolicy(max_attempts=1))
    source = Memory([paid(f"m{number}") for number in range(30)], endless=True)
    shop.app.consume(source)
    with running(worker(shop.app)):
        eventually(lambda: len(source.settled) == 30)
    assert not shop.emitted(ConsumerPaused)
    assert not shop.emitted(MessageFailed)


@pytest.mark.parametrize("value", [0, -1, True, "5"])
def test_pause_after_is_a_number_of_one_or_more(shop: Shop, value: Any) -> None:
    with pytest.raises(ConfigurationError, match="pause_after"):
        shop.handler(pause_after=value)


def test_pause_after_counts_message_by_message(shop: Shop) -> None:
    with pytest.raises(ConfigurationError, match="leave batch=True out"):
        shop.app.handler(TOPIC, consumer=CONSUMER, batch=True, pause_after=3)
