"""The worker in one process: lanes, settlement, the table, and how it ends."""

from __future__ import annotations

import asyncio
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.support.databases import Raw
from tests.support.invariant import broken_invariant
from tests.support.shop import AT_ONCE, CONSUMER, TOPIC, Shop, opened, paid, quarantined, statuses
from tests.support.sources import Memory
from tests.support.waiting import DEADLINE_S, eventually
from tests.support.workers import running, worker
from txbox import App, Batching, Lease, Message, Outcome, Retry, RetryPolicy
from txbox.brokers.base import Consumer, Context, Delivery
from txbox.brokers.local import Local
from txbox.errors import ConfigurationError, Fault, StoreError, StoreUnavailable
from txbox.events import (
    ConsumptionPaused,
    ConsumptionResumed,
    ErrorContained,
    Event,
    MessageDead,
    MessageUnmatched,
    WorkerStarted,
    WorkerStopped,
)
from txbox.maintenance import Job, Report
from txbox.session import Transaction
from txbox.store import leases
from txbox.worker.driving import Driver
from txbox.worker.lane import Lane
from txbox.worker.relay import Relay, Relays


def test_once_processes_everything_settles_it_and_ends(shop: Shop) -> None:
    shop.handler(concurrency=3)
    source = Memory([paid(f"m{number}") for number in range(50)] + [paid("m0")])
    shop.app.consume(source)

    assert worker(shop.app, once=True).run() == 0

    assert shop.effects() == 50
    assert sorted(source.settled_ids) == sorted([f"m{number}" for number in range(50)] + ["m0"])
    assert source.closed
    assert source.threads == {"txbox-memory"}, "a source belongs to one thread"
    assert len(shop.emitted(WorkerStarted)) == 1
    assert [event.clean for event in shop.emitted(WorkerStopped)] == [True]


def test_a_handler_cannot_be_registered_while_a_worker_runs(shop: Shop) -> None:
    def late(message: Message[Any], tx: Any) -> None:
        del message, tx

    shop.handler()
    source = Memory([paid("m0")], endless=True)
    shop.app.consume(source)
    with running(worker(shop.app)):
        eventually(lambda: source.settled_ids == ["m0"])
        with pytest.raises(ConfigurationError, match="before it starts"):
            shop.app.handler(TOPIC, consumer="late")(late)
    shop.app.handler(TOPIC, consumer="late")(late)


def test_messages_of_one_key_run_in_order(shop: Shop) -> None:
    shop.handler(concurrency=4)
    shop.app.consume(Memory([paid(f"{key}-{n:02}", key=key) for n in range(10) for key in "abcd"]))

    assert worker(shop.app, once=True).run() == 0

    for key in "abcd":
        ran = [call for call in shop.calls if call.startswith(key)]
        assert ran == sorted(ran)
        assert len(ran) == 10


def test_a_delivery_is_settled_after_all_its_consumers(shop: Shop) -> None:
    entered, gate = threading.Event(), threading.Event()
    if shop.raw.product == "sqlite":
        pytest.skip("SQLite runs one handler at a time: nothing can be held while another finishes")

    def hold(_message: Message[Any], _tx: Any) -> None:
        entered.set()
        assert gate.wait(DEADLINE_S)

    shop.handler(consumer="quick")
    shop.handler(hold, consumer="slow")
    source = Memory([paid("m1")], endless=True)
    shop.app.consume(source)

    with running(worker(shop.app)) as codes:
        assert entered.wait(DEADLINE_S)
        eventually(
            lambda: shop.raw.value("SELECT count(*) FROM txbox_inbox WHERE status = 'processed'")
        )
        assert source.settled == []
        gate.set()
        eventually(lambda: source.settled_ids == ["m1"])
    assert codes == [0]
    assert shop.effects() == 2


def test_a_failed_message_is_settled_and_retried_from_the_table(shop: Shop) -> None:
    def fail_twice(message: Message[Any], _tx: Any) -> None:
        if message.attempt < 3:
            raise ValueError("not yet")

    shop.handler(fail_twice)
    source = Memory([paid("m1"), paid("m2")])
    shop.app.consume(source)

    assert worker(shop.app, once=True).run() == 0

    assert source.settled_ids == ["m1", "m2"]
    assert statuses(shop.raw) == {"processed": 2}
    assert shop.effects() == 2
    assert shop.calls.count("m1") == 3


def test_once_does_not_leave_what_a_handler_stages_while_the_tables_are_read(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The outbox is read, then a row of the inbox becomes one of the outbox, then the inbox is read."""
    has_rows, turn, work_left = Relays.has_rows, Relay.turn, leases.work_left
    reads: list[bool] = []
    inbox_read = threading.Event()

    def stage(message: Message[Any], tx: Any) -> None:
        shop.app.outbox.stage(tx, "invoices", {}, cause=message)

    def relay_later(relay: Relay) -> bool:
        assert not reads or inbox_read.wait(DEADLINE_S)
        return turn(relay)

    async def inbox(*args: Any, **options: Any) -> bool:
        found = await work_left(*args, **options)
        if reads and options["consumer"] == "invoices":
            inbox_read.set()
        return found

    def outbox(relays: Relays) -> bool:
        found = has_rows(relays)
        reads.append(found)
        if len(reads) == 1:
            shop.app.send(paid("m"))
            eventually(lambda: shop.raw.value("SELECT count(*) FROM txbox_outbox") == 1)
        return found

    shop.handler(stage)
    shop.app.handler("invoices", consumer="invoices")(_nothing)
    monkeypatch.setattr(Relays, "has_rows", outbox)
    monkeypatch.setattr(Relay, "turn", relay_later)
    monkeypatch.setattr(leases, "work_left", inbox)
    assert worker(shop.app, once=True).run() == 0
    assert statuses(shop.raw) == {"processed": 2}
    assert reads[0] is False


def _nothing(_message: Message[Any], _tx: Any) -> None: ...


def test_once_does_not_wait_for_a_retry_in_the_future(shop: Shop) -> None:
    def fail(_message: Message[Any], _tx: Any) -> None:
        raise Retry(after=timedelta(hours=1))

    shop.handler(fail)
    shop.app.consume(Memory([paid("m1")]))

    assert worker(shop.app, once=True).run() == 0

    assert statuses(shop.raw) == {"failed": 1}
    assert shop.calls == ["m1"]


def test_retries_end_as_a_dead_letter(shop: Shop) -> None:
    def fail(_message: Message[Any], _tx: Any) -> None:
        raise ValueError("always")

    shop.handler(fail, retry=RetryPolicy(max_attempts=3, base=timedelta(0)))
    shop.app.consume(Memory([paid("m1")]))

    assert worker(shop.app, once=True).run() == 0

    assert statuses(shop.raw) == {"dead": 1}
    assert len(shop.emitted(MessageDead)) == 1
    assert shop.calls == ["m1"] * 3


def test_local_runs_what_was_sent(shop: Shop) -> None:
    shop.handler()
    shop.handler(consumer="audit")
    shop.app.consume(Local(), topics=[TOPIC])
    for number in range(30):
        shop.app.send(paid(f"m{number}"))

    assert worker(shop.app, once=True).run() == 0

    assert statuses(shop.raw) == {"processed": 60}
    assert shop.effects() == 60


def test_stored_mode_settles_first_and_processes_from_the_table(shop: Shop) -> None:
    shop.handler(mode="stored")
    source = Memory([paid(f"m{number}") for number in range(30)])
    shop.app.consume(source)

    assert worker(shop.app, once=True).run() == 0

    assert len(source.settled) == 30
    assert statuses(shop.raw) == {"processed": 30}
    assert shop.effects() == 30


def test_batch_handlers_get_many_messages(shop: Shop) -> None:
    sizes: list[int] = []

    @shop.app.handler(TOPIC, consumer=CONSUMER, batch=True, retry=AT_ONCE)
    def handle(messages: list[Message[Any]], tx: Any) -> None:
        sizes.append(len(messages))

    shop.app.consume(Memory([paid(f"m{number}") for number in range(100)]))

    assert worker(shop.app, once=True).run() == 0

    assert sum(sizes) == 100
    assert max(sizes) > 1
    assert statuses(shop.raw) == {"processed": 100}


def test_async_handlers_run_as_tasks_of_one_loop(shop: Shop) -> None:
    if shop.app.database.asynchronous is None:
        pytest.skip("no async driver for this URL")
    threads: set[str] = set()

    @shop.app.handler(TOPIC, consumer=CONSUMER, concurrency=4, retry=AT_ONCE)
    async def handle(message: Message[Any], tx: Any) -> None:
        threads.add(threading.current_thread().name)
        if message.attempt == 1 and message.id == "m3":
            raise ValueError("once")

    shop.app.consume(Memory([paid(f"m{number}") for number in range(20)]))

    assert worker(shop.app, once=True).run() == 0

    assert threads == {"txbox-loop"}
    assert statuses(shop.raw) == {"processed": 20}


def test_lanes_that_need_the_first_loop_at_once_share_one(
    sqlite_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, together = asyncio.new_event_loop, threading.Barrier(2)
    made: list[asyncio.AbstractEventLoop] = []

    def slowly() -> asyncio.AbstractEventLoop:
        with suppress(threading.BrokenBarrierError):
            # until another thread makes one, too, if it does
            together.wait(0.2)
        made.append(make())
        return made[-1]

    async def loop_it_runs_on() -> asyncio.AbstractEventLoop:
        return asyncio.get_running_loop()

    monkeypatch.setattr(asyncio, "new_event_loop", slowly)
    driver = Driver(App(sqlite_url))
    with ThreadPoolExecutor(2) as pool:
        tasks = list(pool.map(lambda _: driver.task(loop_it_runs_on()), range(2)))
    assert [task.result(DEADLINE_S) for task in tasks] == made * 2
    driver.close(DEADLINE_S)
    assert [loop.is_closed() for loop in made] == [True]


def test_what_is_in_flight_is_bounded(database_url: str) -> None:
    gate = threading.Event()
    with opened(database_url, batching=Batching(messages=5)) as shop:

        def hold(_message: Message[Any], _tx: Any) -> None:
            assert gate.wait(DEADLINE_S)

        shop.handler(hold)
        source = Memory([paid(f"m{number}") for number in range(100)])
        shop.app.consume(source)
        with running(worker(shop.app)):
            eventually(lambda: shop.calls)
            eventually(lambda: len(source.received) == 15)
            assert len(source.waiting) == 85
            gate.set()
            eventually(lambda: len(source.settled) == 100)
        assert shop.effects() == 100


def test_an_id_that_another_transaction_holds_is_claimed_again(shop: Shop, raw: Any) -> None:
    if shop.raw.product == "sqlite":
        pytest.skip("SQLite has one writer: the other transaction would stop everything")
    shop.app.limits = shop.app.protocol.limits = type(shop.app.limits)(
        lock_timeout=timedelta(milliseconds=50)
    )
    shop.handler()
    source = Memory([paid("held"), paid("free")])
    shop.app.consume(source)
    rival: Raw = raw(shop.url)
    rival.execute("BEGIN")
    rival.execute(
        "INSERT INTO txbox_inbox (consumer, message_id, status, topic) VALUES (?, 'held', 'pending', ?)",
        (CONSUMER, TOPIC),
    )
    with running(worker(shop.app)):
        eventually(lambda: source.settled_ids == ["free"])
        assert "held" not in shop.calls
        rival.execute("ROLLBACK")
        eventually(lambda: source.settled_ids == ["free", "held"])
    assert shop.effects("held") == 1


def test_bytes_that_are_no_message_are_quarantined_for_each_consumer(shop: Shop) -> None:
    shop.handler()
    shop.handler(consumer="audit")
    source = Memory([Delivery(None, TOPIC, problem="not JSON", raw=b"\x00{"), paid("m1")])
    shop.app.consume(source)

    assert worker(shop.app, once=True).run() == 0

    assert quarantined(shop.raw) == [("not JSON", 1)] * 2
    assert len(source.settled) == 2
    assert shop.effects() == 2


@pytest.mark.parametrize("policy", ["acknowledge", "quarantine"])
def test_a_message_that_no_handler_takes(database_url: str, policy: Any) -> None:
    with opened(database_url, unmatched=policy) as shop:
        shop.handler(type="order.paid")
        source = Memory([paid("m1", type="order.lost"), paid("m2", type="order.paid")])
        shop.app.consume(source)

        assert worker(shop.app, once=True).run() == 0

        assert len(source.settled) == 2
        assert [event.type for event in shop.emitted(MessageUnmatched)] == ["order.lost"]
        assert len(quarantined(shop.raw)) == (1 if policy == "quarantine" else 0)


def test_an_unmatched_message_is_known_by_the_id_in_its_headers(sqlite_url: str) -> None:
    with opened(sqlite_url, unmatched="quarantine") as shop:
        shop.handler(type="order.paid")
        lost = Message[Any](topic="orders", payload=b"{}", headers={"message-id": "order-4"})
        assert shop.app.process(lost) is Outcome.QUARANTINED
        assert [event.message_id for event in shop.emitted(MessageUnmatched)] == ["order-4"]
        assert shop.raw.rows("SELECT message_id FROM txbox_quarantine") == [("order-4",)]


def test_rows_whose_type_lost_its_handler_are_given_back_with_an_event(shop: Shop) -> None:
    shop.handler(type="order.paid")
    shop.app.send(paid("m1", type="order.paid"))
    shop.raw.execute("UPDATE txbox_inbox SET type = 'order.gone'")
    shop.app.consume(Local())

    assert worker(shop.app, once=True).run() == 0

    assert shop.row("m1").status == "pending"
    assert shop.row("m1").starts == 0
    assert [row.message_id for row in shop.emitted(MessageUnmatched)] == ["m1"]


class _Busy(Memory):
    """Always has the next messages, until something has come true, or so many that it never will."""

    def __init__(self, until: Callable[[], bool], most: int) -> None:
        super().__init__([])
        self._until, self.most = until, most

    @property
    def exhausted(self) -> bool:
        return not self.waiting and self._is_over()

    def _is_over(self) -> bool:
        return self._until() or len(self.received) >= self.most

    def receive(self, messages_max: int, wait_s: float) -> Sequence[Delivery]:
        if len(self.waiting) < messages_max and not self._is_over():
            first = len(self.received) + len(self.waiting)
            fresh = [paid(f"source{number}") for number in range(first, first + 20)]
            self.waiting += [Delivery(each, each.topic) for each in fresh]
        return super().receive(messages_max, wait_s)


def test_a_busy_source_and_the_table_take_turns(shop: Shop) -> None:
    shop.handler(lambda message, tx: time.sleep(0.001))  # slower than the source
    for number in range(5):
        shop.app.send(paid(f"table{number}"))
    source = _Busy(lambda: sum(call.startswith("table") for call in shop.calls) == 5, most=2000)
    shop.app.consume(source)

    assert worker(shop.app, once=True).run() == 0

    assert shop.effects() == 5 + len(source.received)
    assert len(source.received) < source.most, "the table waited for the source"


def test_a_heartbeat_keeps_the_lease_of_rows_that_wait(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered, gate = threading.Event(), threading.Event()
    lease = Lease(
        duration=timedelta(seconds=60), batch=5
    )  # it does not run out, however busy the machine
    assert lease.heartbeat_s == 20
    monkeypatch.setattr(Lease, "heartbeat_s", 0.2)
    with opened(database_url, lease=lease) as shop:
        if shop.raw.product == "sqlite":
            pytest.skip("SQLite has one writer: while a handler runs no lease can run out")

        def hold(message: Message[Any], _tx: Any) -> None:
            if message.id == "m0":
                entered.set()
                assert gate.wait(DEADLINE_S)

        shop.handler(hold)
        for number in range(3):
            shop.app.send(paid(f"m{number}"))
        shop.app.consume(Local())
        with running(worker(shop.app, maintenance=True)):
            assert entered.wait(DEADLINE_S)
            first = _lease_until(shop, "m2")
            eventually(lambda: _lease_until(shop, "m2") > first)
            second = _lease_until(shop, "m2")
            eventually(lambda: _lease_until(shop, "m2") > second)
            gate.set()
            eventually(lambda: statuses(shop.raw) == {"processed": 3})
        assert shop.calls == ["m0", "m1", "m2"]


def _lease_until(shop: Shop, message_id: str) -> Any:
    return shop.raw.value(
        "SELECT lease_until FROM txbox_inbox WHERE message_id = ?",
        (message_id.encode() if shop.raw.product == "mysql" else message_id,),
    )


def test_stuck_message_recovery(database_url: str) -> None:
    with opened(database_url, lease=Lease(duration=timedelta(milliseconds=300))) as shop:
        shop.handler()
        shop.app.send(paid("m1"))
        ((leased, _),) = shop.lease()
        assert leased.starts == 1
        shop.app.consume(Local())

        with running(worker(shop.app, maintenance=True)):
            eventually(lambda: statuses(shop.raw) == {"processed": 1})
        assert shop.effects() == 1


def test_suspect_rows_run_alone(shop: Shop) -> None:
    active: list[str] = []
    most: list[int] = []

    def watch(message: Message[Any], _tx: Any) -> None:
        active.append(str(message.id))
        most.append(len(active))
        active.remove(str(message.id))

    shop.handler(watch, concurrency=4)
    shop.handler(watch, consumer="audit", concurrency=4)
    for number in range(6):
        shop.app.send(paid(f"m{number}"))
    shop.raw.execute("UPDATE txbox_inbox SET starts = 1")
    shop.app.consume(Local())

    assert worker(shop.app, once=True).run() == 0

    assert statuses(shop.raw) == {"processed": 12}
    assert set(most) == {1}


def test_what_is_in_flight_is_tended(shop: Shop) -> None:
    gate = threading.Event()

    def hold(_message: Message[Any], _tx: Any) -> None:
        assert gate.wait(DEADLINE_S)

    shop.handler(hold)
    source = Memory([paid("slow")], endless=True)
    source.tend_every_s = 0.02
    shop.app.consume(source)
    with running(worker(shop.app)):
        eventually(
            lambda: len([delivery for delivery in source.tended if delivery]) >= 3,
            "three rounds of tending",
        )
        gate.set()
        eventually(lambda: source.settled_ids == ["slow"], "the acknowledgement")
        count = len(source.tended)
        eventually(lambda: source.tended[count:] and source.tended[-1] == [], "tending nothing")
    assert len(source.threads) == 1


def test_a_source_collects_what_it_is_about_to_lose(shop: Shop) -> None:
    gate = threading.Event()
    collected: list[Any] = []

    class Losing(Memory):
        """Loses everything in its third round of receiving, as a revoked partition does."""

        rounds = 0

        def receive(self, messages_max: int, wait_s: float) -> Sequence[Delivery]:
            self.rounds += 1
            if self.rounds == 3:
                early = self.context.settled(lambda each: True, 0.05)
                assert [delivery.message.id for delivery in early if delivery.message] in (
                    [],
                    ["fast"],
                )
                gate.set()
                late = self.context.settled(lambda made: True, 30.0)
                collected.extend(
                    delivery.message.id for delivery in (*early, *late) if delivery.message
                )
                assert not self.context.settled(lambda _: True, 30.0)
            return super().receive(messages_max, wait_s)

    def hold(message: Message[Any], _tx: Any) -> None:
        assert message.id == "fast" or gate.wait(DEADLINE_S)

    shop.handler(hold, concurrency=2)
    source = Losing([paid("slow"), paid("fast")], endless=True)
    shop.app.consume(source)
    with running(worker(shop.app)):
        eventually(lambda: len(collected) + len(source.settled) == 2, "both settled")
    assert sorted([*collected, *source.settled_ids]) == ["fast", "slow"]
    assert "slow" in collected
    assert statuses(shop.raw) == {"processed": 2}


def test_a_broken_invariant_in_a_source_stops_the_worker(shop: Shop, caplog: Any) -> None:
    class Broken(Memory):
        def receive(self, messages_max: int, wait_s: float) -> Any:
            broken_invariant()

    shop.handler()
    shop.app.consume(Broken([], endless=True))
    the_worker = worker(shop.app)

    assert the_worker.run() == 1

    assert isinstance(the_worker.failure, AssertionError)
    assert "an invariant of ours" in caplog.text
    assert "Traceback" in caplog.text


def test_a_broken_invariant_in_a_lane_stops_the_worker(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def crash(db: Transaction, _lane: Lane) -> bool:
        broken_invariant()
        return False

    monkeypatch.setattr(Lane, "_take_next", crash)
    shop.handler()
    source = Memory([paid("m1")], endless=True)
    shop.app.consume(source)

    assert worker(shop.app).run() == 1

    assert source.settled == []
    assert shop.effects() == 0
    assert statuses(shop.raw) == {}


def test_tables_that_go_away_stop_the_worker_with_the_command(shop: Shop, caplog: Any) -> None:
    shop.handler()
    source = Memory([], endless=True)
    shop.app.consume(source)
    the_worker = worker(shop.app)
    with running(the_worker) as codes:
        eventually(lambda: shop.emitted(WorkerStarted))
        for view in ("txbox_dead_letters", "txbox_status"):
            shop.raw.execute(f"DROP VIEW {view}")
        # in this order: with the version recorded and no inbox, the tables are damaged, which is told otherwise
        for table in ("txbox_schema", "txbox_inbox"):
            shop.raw.execute(f"DROP TABLE {table}")
        source.waiting = [Delivery(paid("m1"), TOPIC)]
        eventually(lambda: codes)
    assert codes == [2]
    assert "txbox init" in caplog.text
    assert source.settled == []


def test_unapplied_schema_exits_with_status_2(empty_database_url: str, caplog: Any) -> None:
    with App(empty_database_url) as app:
        source = _one_handler(app)
        assert worker(app).run() == 2
    assert "txbox init" in caplog.text
    assert source.threads == set()


def test_a_database_that_does_not_answer_is_waited_for_at_the_start(caplog: Any) -> None:
    """libpq does not tell it from a server without a free connection. `--once` is for programs that wait themselves."""
    with App("postgresql://txbox:secret@127.0.0.1:1/nothing") as app:
        source = _one_handler(app)
        assert worker(app, once=True).run() == 2
        assert "cannot be used" in caplog.text
        paused = list[ConsumptionPaused]()
        app.events.observers.append(
            lambda event: paused.append(event) if isinstance(event, ConsumptionPaused) else None
        )
        with running(worker(app)) as codes:
            eventually(lambda: paused)
            assert not codes
        assert codes == [0]
    assert "secret" not in caplog.text
    assert source.threads == set()


def test_a_wrong_password_that_the_server_names_exits_with_status_2(
    new_database: Callable[[str], str], caplog: Any
) -> None:
    right = urlsplit(new_database("mariadb"))
    url = right._replace(netloc=f"nobody:secret@{right.hostname}:{right.port}").geturl()
    with App(url) as app:
        source = _one_handler(app)
        assert worker(app).run() == 2
    assert "cannot be used" in caplog.text
    assert "secret" not in caplog.text
    assert source.threads == set()


def test_no_handlers_exit_with_status_2(sqlite_url: str, caplog: Any) -> None:
    with App(sqlite_url) as app:
        app.consume(Memory([paid("m1")]))
        assert worker(app).run() == 2
    assert "no handlers" in caplog.text


def test_a_topic_without_handler_exits_with_status_2(sqlite_url: str, caplog: Any) -> None:
    with App(sqlite_url) as app:
        source = _one_handler(app, topics=["invoices"])
        assert worker(app).run() == 2
    assert "'invoices'" in caplog.text
    assert source.received == []


def _one_handler(app: App, topics: list[str] | None = None) -> Memory:
    @app.handler(TOPIC, consumer=CONSUMER)
    def handle(message: Message[Any], tx: Any) -> None:
        raise AssertionError("nothing may be consumed")

    source = Memory([paid("m1")])
    app.consume(source, topics)
    return source


def test_a_database_with_async_connections_only(postgresql_url: str, raw: Any) -> None:
    with App(postgresql_url.replace("postgresql://", "postgresql+asyncpg://")) as app:
        ran: list[Any] = []

        @app.handler(TOPIC, consumer=CONSUMER, concurrency=3, retry=AT_ONCE)
        async def handle(message: Message[Any], tx: Any) -> None:
            ran.append(message.id)
            if message.id == "m1" and message.attempt == 1:
                raise ValueError("once")

        source = Memory([paid(f"m{number}") for number in range(10)])
        app.consume(source)

        assert worker(app, once=True, maintenance=True).run() == 0

    assert len(source.settled) == 10
    assert len(ran) == 11
    view = raw(postgresql_url)
    assert statuses(view) == {"processed": 10}
    others = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
    eventually(lambda: view.value(others) == 0, "every connection closed")


def test_a_sync_handler_needs_sync_connections(
    postgresql_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    with App(postgresql_url.replace("postgresql://", "postgresql+asyncpg://")) as app:

        @app.handler(TOPIC, consumer=CONSUMER, transactional=False)
        def handle(message: Message[Any]) -> None:
            raise AssertionError("nothing may be consumed")

        app.consume(Memory([paid("m1")]))
        assert worker(app).run() == 2
    assert "no sync connections" in caplog.text


def test_a_worker_stopped_while_a_source_opens_ends_within_its_grace(shop: Shop) -> None:
    entered, go_on = threading.Event(), threading.Event()

    class Hangs(Memory):
        def consumer(self, topics: Sequence[str], context: Context) -> Consumer:
            entered.set()
            assert go_on.wait(DEADLINE_S)
            return super().consumer(topics, context)

    shop.handler()
    source = Hangs([paid("m")], endless=True)
    shop.app.consume(source)
    with running(worker(shop.app, grace=timedelta(seconds=0.5))) as codes:
        assert entered.wait(DEADLINE_S)
    assert codes == [1]
    go_on.set()
    eventually(lambda: source.closed)
    assert source.received == []
    assert shop.emitted(WorkerStarted) == []


def test_no_source_is_asked_for_effects(sqlite_url: str) -> None:
    asked: list[str] = []

    class Asked(Memory):
        def consumer(self, topics: Sequence[str], context: Context) -> Consumer:
            asked.extend(topics)
            return super().consumer(topics, context)

    with App(sqlite_url) as app:

        @app.handler("orders", consumer="orders")
        def order(message: Message[Any], tx: Any) -> None: ...

        @app.effect("send-mail")
        def send(message: Message[Any]) -> None: ...

        app.consume(Asked([]))
        assert worker(app, once=True).run() == 0
    assert asked == ["orders"]


def test_a_worker_that_starts_waits_for_a_free_connection(
    postgresql_url: str, raw: Callable[[str], Raw]
) -> None:
    """Else it would end with 2, be started again, and take the next connection that is free from others."""
    admin, user = raw(postgresql_url), f"narrow_{secrets.token_hex(4)}"
    admin.execute(f"CREATE ROLE {user} LOGIN PASSWORD 'x' CONNECTION LIMIT 9")
    for what in ("TABLES", "SEQUENCES", "FUNCTIONS"):
        admin.execute(f"GRANT ALL ON ALL {what} IN SCHEMA public TO {user}")
    narrow = urlsplit(postgresql_url)
    netloc = f"{user}:x@{narrow.hostname}:{narrow.port}"
    url = narrow._replace(netloc=netloc).geturl()
    try:
        with ExitStack() as others, App(url) as app:
            paused, source = list[ConsumptionPaused](), Memory([paid("m1")], endless=True)
            app.events.observers.append(
                lambda event: paused.append(event) if isinstance(event, ConsumptionPaused) else None
            )
            app.handler(TOPIC, consumer=CONSUMER)(lambda message, tx: None)
            app.consume(source)
            for _ in range(9):
                others.enter_context(Raw(url))
            with running(worker(app)) as codes:
                eventually(lambda: paused)
                assert "may have no free connection" in paused[0].reason
                assert not codes
                others.close()
                eventually(lambda: source.settled)
            assert codes == [0]
            # one that is told to stop meanwhile ends well
            for _ in range(9):
                others.enter_context(Raw(url))
            paused.clear()
            with running(worker(app)) as codes:
                eventually(lambda: paused)
            assert codes == [0]
    finally:
        admin.execute(f"DROP OWNED BY {user}")
        admin.execute(f"DROP ROLE {user}")


# -- the other kinds ------------------------------------------------------------------------------


def test_maintenance_outlives_an_outage_a_deadlock_and_a_mistake_but_no_missing_table(
    sqlite_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors: list[StoreError] = []
    runs: list[bool] = []

    async def job(*_: object) -> Report:
        if errors:
            raise errors.pop(0)
        runs.append(True)
        return Report("job")

    every = timedelta(milliseconds=1)
    monkeypatch.setattr("txbox.maintenance.JOBS", (Job("job", "", lambda _app: every, job),))
    events: list[Event] = []
    with App(sqlite_url, observers=[events.append]) as app:
        app.init()
        errors += [
            StoreUnavailable("no connection"),
            StoreError("a deadlock", fault=Fault.CONFLICT),
            StoreError("no such operator", fault=Fault.OTHER),
        ]
        with running(worker(app, kind="maintain")) as codes:
            eventually(lambda: ConsumptionResumed in map(type, events))
        assert codes == [0]
    kinds = [type(event) for event in events]
    assert kinds == [ConsumptionPaused, ErrorContained, ConsumptionResumed]
    assert runs

    errors.append(StoreError("no such table", fault=Fault.SCHEMA))
    with App(sqlite_url) as app:
        broken = worker(app, kind="maintain")
        assert broken.run() == 1
    assert str(broken.failure) == "no such table"


@pytest.mark.parametrize("kind", ["relay", "maintain"])
def test_the_other_kinds_leave_sources_and_rows_alone(shop: Shop, kind: str) -> None:
    shop.handler()
    source = Memory([paid("m1")], endless=True)
    shop.app.consume(source)
    shop.app.send(paid("m2"))
    with running(worker(shop.app, kind=kind)) as codes:
        at_work = f"SELECT count(*) FROM txbox_worker WHERE kind = '{kind}'"
        eventually(lambda: shop.raw.value(at_work) == 1)
    assert codes == [0]
    assert (source.threads, shop.calls) == (set(), [])
    assert not shop.emitted(WorkerStarted)
