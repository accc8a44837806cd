"""The pump: what it tends while it waits, and what it says of acknowledgements that failed."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any, Literal

import pytest

from tests.support.invariant import broken_invariant
from tests.support.shop import TOPIC, Shop, effects, opened, paid, quarantined, statuses
from tests.support.sources import Memory
from tests.support.waiting import DEADLINE_S, eventually
from tests.support.workers import run_of, running, worker
from txbox.brokers.base import Consumer, Context, Delivery
from txbox.errors import BrokerError, ConfigurationError, Fault, StoreError, StoreUnavailable
from txbox.events import ConsumptionPaused, ConsumptionResumed, MessageUnmatched, SettleFailed
from txbox.message import Message
from txbox.session import Session
from txbox.worker.lane import Lane
from txbox.worker.lanes import Lanes
from txbox.worker.pump import Lead, Pump


def test_what_is_in_flight_is_tended_while_the_database_is_away(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of what reaches no lane, too: the pump itself waits for the database then."""
    back = threading.Event()
    protocol = shop.app.protocol
    quarantine = protocol.quarantine

    async def away(db: Session, *words: Any, **named: Any) -> None:
        if not back.is_set():
            raise StoreUnavailable("away", fault=Fault.UNAVAILABLE)
        await quarantine(db, *words, **named)

    monkeypatch.setattr(protocol, "quarantine", away)
    shop.handler()
    source = Memory(
        [Delivery(None, TOPIC, problem="not JSON", raw=b"\x00{"), paid("behind")], endless=True
    )
    source.tend_every_s = 0.02
    shop.app.consume(source)
    with running(worker(shop.app)):
        eventually(
            lambda: len([delivery for delivery in source.tended if len(delivery) == 2]) >= 3,
            "three rounds of tending both",
        )
        assert source.settled == []
        assert shop.emitted(ConsumptionPaused)
        back.set()
        eventually(lambda: len(source.settled) == 2, "both settled")
    assert quarantined(shop.raw) == [("not JSON", 1)]
    assert len(source.threads) == 1


def test_a_drain_leaves_what_cannot_be_set_aside(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = threading.Event()
    quarantine = shop.app.protocol.quarantine

    async def away(db: Session, *words: Any, **named: Any) -> None:
        asked.set()
        if shop.app.events:
            raise StoreUnavailable("away", fault=Fault.UNAVAILABLE)
        await quarantine(db, *words, **named)

    monkeypatch.setattr(shop.app.protocol, "quarantine", away)
    shop.handler()
    source = Memory([Delivery(None, TOPIC, problem="not JSON", raw=b"{")], endless=True)
    shop.app.consume(source)
    with running(worker(shop.app)) as codes:
        assert asked.wait(DEADLINE_S)
    assert codes == [0]
    assert source.settled == []
    assert source.closed


def test_a_database_that_is_only_busy_pauses_nothing(shop: Shop) -> None:
    class Busy(Memory):
        tried = False

        def receive(self, messages_max: int, wait_s: float) -> Sequence[Delivery]:
            if not self.tried:
                self.tried = True
                raise StoreError("locked", fault=Fault.LOCK_TIMEOUT)
            return super().receive(messages_max, wait_s)

    shop.handler()
    source = Busy([paid("m")])
    shop.app.consume(source)

    assert worker(shop.app, once=True).run() == 0

    assert source.settled_ids == ["m"]
    assert shop.emitted(ConsumptionPaused) == shop.emitted(ConsumptionResumed) == []


@pytest.mark.parametrize(("says", "counted"), [(True, 1), (False, 3)])
def test_only_acknowledgements_that_failed_are_counted(
    shop: Shop, says: bool, counted: int
) -> None:
    class Refusing(Memory):
        def settle(self, deliveries: Sequence[Delivery]) -> None:
            super().settle(deliveries)
            failed = [
                delivery
                for delivery in deliveries
                if delivery.message and delivery.message.id == "m1"
            ]
            raise BrokerError("a receipt is unknown", failed=len(failed) if says else None)

    shop.handler()
    source = Refusing([paid(f"m{number}") for number in range(3)])
    shop.app.consume(source)

    assert worker(shop.app, once=True).run() == 0

    assert len(source.settled) == 3
    assert sum(event.count for event in shop.emitted(SettleFailed)) == counted
    assert {event.error for event in shop.emitted(SettleFailed)} == {"a receipt is unknown"}


class Refused(Memory):
    """A source whose broker refuses it in one method, as long as it is told to."""

    refuses: str | None = None

    def _check(self, method: str) -> None:
        if self.refuses == method:
            raise ConfigurationError("check user and password")

    def receive(self, messages_max: int, wait_s: float) -> Sequence[Delivery]:
        self._check("receive")
        return super().receive(messages_max, wait_s)

    def tend(self, deliveries: Sequence[Delivery]) -> None:
        self._check("tend")
        super().tend(deliveries)

    def settle(self, deliveries: Sequence[Delivery]) -> None:
        self._check("settle")
        super().settle(deliveries)


@pytest.mark.parametrize("method", ["receive", "tend", "settle"])
def test_what_is_refused_once_the_worker_has_worked_is_waited_for(shop: Shop, method: str) -> None:
    """Also by a source that never worked itself: another one's success shows that the worker is set up right."""
    shop.handler()
    works, refused = Memory([paid("m1")], endless=True), Refused([], endless=True)
    refused.name, refused.tend_every_s, refused.refuses = "refused", 0.02, "receive"
    if method != "receive":
        refused.refuses = None
    shop.app.consume(works)
    shop.app.consume(refused)
    go = threading.Event()
    receive = refused.receive

    def receive_behind_the_other(messages_max: int, wait_s: float) -> Sequence[Delivery]:
        assert go.wait(DEADLINE_S)
        return receive(messages_max, wait_s)

    vars(refused)["receive"] = receive_behind_the_other
    with running(worker(shop.app)) as codes:
        eventually(lambda: len(works.settled) == 1)
        refused.refuses = method
        go.set()
        if method == "receive":
            (paused, *_) = eventually(lambda: shop.emitted(ConsumptionPaused))
            assert (paused.source, paused.reason) == ("refused", "check user and password")
        else:
            refused.waiting.append(Delivery(paid("m2"), TOPIC))
            eventually(lambda: effects(shop.raw) == 2)
        if method == "settle":
            eventually(lambda: shop.emitted(SettleFailed))
        assert codes == []
        refused.refuses = None
        refused.waiting.append(Delivery(paid("m3"), TOPIC))
        eventually(lambda: shop.effects("m3") == 1)
        if method == "receive":
            eventually(lambda: shop.emitted(ConsumptionResumed))
        assert codes == []


def test_what_is_refused_before_any_source_has_worked_ends_the_worker(shop: Shop) -> None:
    shop.handler()
    source = Refused([], endless=True)
    source.refuses = "receive"
    shop.app.consume(source)
    assert worker(shop.app).run() == 2


def test_the_thread_that_has_received_runs_the_idle_lane(shop: Shop) -> None:
    """No message waits for another thread to wake, and the pump goes on where it was."""
    receivers, received, handled, settled = set[int](), set[int](), set[int](), set[int]()

    class Watched(Memory):
        def receive(self, messages_max: int, wait_s: float) -> Sequence[Delivery]:
            receivers.add(threading.get_ident())
            found = super().receive(min(messages_max, 1), wait_s)
            if found:
                received.add(threading.get_ident())
            return found

        def settle(self, deliveries: Sequence[Delivery]) -> None:
            settled.add(threading.get_ident())
            super().settle(deliveries)

    shop.handler(lambda _message, _tx: handled.add(threading.get_ident()))
    source = Watched([], endless=True)
    shop.app.consume(source)
    with running(worker(shop.app)):
        for number in range(20):
            source.waiting.append(Delivery(paid(f"m{number}"), TOPIC))
            eventually(partial(source.has_settled, number + 1))
    # the very first message may come before anybody follows
    assert len(received) <= 2
    assert received & handled
    # also one whose own look was in vain: it settles what the other has run
    assert settled <= receivers | handled


def test_while_a_lane_runs_long_its_source_is_received_from_and_tended(shop: Shop) -> None:
    inside, go_on = threading.Event(), threading.Event()

    def slow(_message: Message[Any], _tx: Any) -> None:
        inside.set()
        assert go_on.wait(DEADLINE_S)

    shop.handler(slow)
    source = Memory([paid("m1")], endless=True)
    source.tend_every_s = 0.02
    shop.app.consume(source)
    with running(worker(shop.app)):
        assert inside.wait(DEADLINE_S)
        source.waiting.append(Delivery(paid("m2"), TOPIC))
        tended = len(source.tended)
        eventually(lambda: len(source.received) == 2, "the next message is received")
        eventually(lambda: len(source.tended) > tended + 2, "both are tended")
        assert source.settled == []
        go_on.set()
        eventually(lambda: len(source.settled) == 2)


@pytest.fixture
def server(database_url: str) -> Iterator[Shop]:
    if database_url.startswith("sqlite"):
        pytest.skip("one writer at a time: no handler runs beside another")
    with opened(database_url) as shop:
        yield shop


@pytest.mark.parametrize("lanes", [2, 3, 5])
def test_lanes_run_beside_one_another_however_many_run_long(server: Shop, lanes: int) -> None:
    """Also when both threads of the pump could be at work in a lane."""
    together = threading.Barrier(lanes)
    server.handler(lambda _message, _tx: together.wait(DEADLINE_S), concurrency=lanes)
    source = Memory([], endless=True)
    server.app.consume(source)
    with running(worker(server.app)):
        for round_ in range(3):
            for number in range(lanes):
                # one by one: each is received while those before it run
                source.waiting.append(Delivery(paid(f"m{round_}-{number}"), TOPIC))
                eventually(partial(source.has_received, round_ * lanes + number + 1))
            eventually(partial(source.has_settled, (round_ + 1) * lanes), "all at once")


def test_what_another_lane_has_done_is_acknowledged_while_the_receiving_thread_is_busy(
    server: Shop,
) -> None:
    go_on = threading.Event()

    def slow(message: Message[Any], _tx: Any) -> None:
        if message.id == "slow":
            assert go_on.wait(DEADLINE_S)

    server.handler(slow, concurrency=2)
    source = Memory([paid("slow"), paid("m2")], endless=True)
    server.app.consume(source)
    with running(worker(server.app)):
        eventually(lambda: source.settled_ids == ["m2"])
        go_on.set()
        eventually(lambda: len(source.settled) == 2)


def test_a_lane_that_rests_lets_the_other_thread_receive_at_once(shop: Shop) -> None:
    """Also if it has settled earlier, when there was nothing to hurry."""
    shop.handler()
    run = run_of(shop.app)
    lanes = Lanes(run)
    lanes.make()
    pump = Pump(run, lanes, Memory([]), name="memory", topics=[TOPIC])
    leads = threading.Thread(target=pump._lead.follow, daemon=True)
    leads.start()
    eventually(lambda: pump._lead.lend(DEADLINE_S * 10))
    ((lane,),) = lanes.by_consumer.values()
    lane.wake()
    leads.join(DEADLINE_S)
    assert not leads.is_alive()


class Held:
    """A handler that stands still in its first message until it is let go, and what the worker did meanwhile."""

    def __init__(self, shop: Shop, source: Memory) -> None:
        self.inside, self._go_on = threading.Event(), threading.Event()
        self.shop = shop
        shop.handler(self._handle)
        shop.app.consume(source)

    def _handle(self, _message: Message[Any], _tx: Any) -> None:
        if not self.inside.is_set():
            self.inside.set()
            assert self._go_on.wait(DEADLINE_S)

    def runs_where_it_was_received(self) -> None:
        """Wait until the handler runs, in the thread that has received."""
        assert self.inside.wait(DEADLINE_S)

    def let_go(self) -> None:
        self._go_on.set()


class Lending(Memory):
    """Gives nothing out before a second thread follows, so the one that receives runs the lane."""

    follows: Callable[[], bool]
    looks = 0

    def consumer(self, topics: Sequence[str], context: Context) -> Consumer:
        assert isinstance(context, Pump)
        self.follows = lambda: context._lead._follows
        return super().consumer(topics, context)

    def has_looked(self, since: int) -> bool:
        return self.looks > since

    def receive(self, messages_max: int, wait_s: float) -> Sequence[Delivery]:
        self.looks += 1
        return super().receive(messages_max if self.follows() else 0, wait_s)


def test_a_drain_cut_off_in_the_handler_closes_the_source_once(shop: Shop) -> None:
    """The one that follows closes it; the one that comes back from the lane touches nothing any more."""
    source = Lending([paid("m1")], endless=True)
    held = Held(shop, source)
    cut = worker(shop.app, grace=timedelta(seconds=0.5))
    with running(cut) as codes:
        held.runs_where_it_was_received()
        cut.stop()
        eventually(lambda: source.closed)
        eventually(lambda: codes == [1])
    assert source.settled == []
    assert not source.rested, "the next owner must not take m1 for innocent"
    held.let_go()
    eventually(lambda: not _pumping(), "no thread is left")
    assert source.settled == []


def test_a_source_is_told_that_nothing_is_at_work_any_more(shop: Shop) -> None:
    source = Memory([paid("m1")], endless=True)
    shop.handler()
    shop.app.consume(source)
    with running(worker(shop.app)):
        eventually(lambda: source.has_settled(1))
    assert source.rested


def test_a_source_that_breaks_while_the_other_thread_runs_a_lane_ends_the_worker(
    shop: Shop,
) -> None:
    broken = threading.Event()

    class Breaks(Lending):
        def receive(self, messages_max: int, wait_s: float) -> Sequence[Delivery]:
            if broken.is_set():
                broken_invariant()
            return super().receive(messages_max, wait_s)

    source = Breaks([paid("m1")], endless=True)
    held = Held(shop, source)
    with running(worker(shop.app)) as codes:
        held.runs_where_it_was_received()
        broken.set()
        eventually(lambda: source.closed)
        held.let_go()
        eventually(lambda: codes == [1])
    # it is done, and comes again as a duplicate
    assert effects(shop.raw, "m1") == 1
    assert source.settled == []
    eventually(lambda: not _pumping(), "no thread is left")


@pytest.mark.parametrize("error", [SystemExit, asyncio.CancelledError, GeneratorExit])
def test_what_a_handler_raises_does_not_end_the_thread_that_receives(
    shop: Shop, error: type[BaseException]
) -> None:
    source = Lending([paid("m1")], endless=True)
    runs: list[str] = []

    def raises(message: Message[Any], _tx: Any) -> None:
        runs.append(str(message.id))
        if runs == ["m1"]:
            raise error

    shop.handler(raises)
    shop.app.consume(source)
    with running(worker(shop.app)) as codes:
        eventually(lambda: source.settled_ids == ["m1"])
        source.waiting.append(Delivery(paid("m2"), TOPIC))
        eventually(lambda: effects(shop.raw) == 2)
        eventually(lambda: source.settled_ids == ["m1", "m2"])
    assert codes == [0]


def test_partitions_are_lost_while_the_other_thread_runs_what_came_from_them(shop: Shop) -> None:
    """The thread that follows waits for the lane of the one that it follows, and both go on."""
    asked = threading.Event()
    lost: list[Delivery] = []

    class Loses(Lending):
        def receive(self, messages_max: int, wait_s: float) -> Sequence[Delivery]:
            if self.received and not asked.is_set():
                asked.set()
                lost.extend(self.context.settled(lambda _: True, DEADLINE_S))
            return super().receive(messages_max, wait_s)

    source = Loses([paid("m1")], endless=True)
    held = Held(shop, source)
    with running(worker(shop.app)):
        held.runs_where_it_was_received()
        assert asked.wait(DEADLINE_S)
        held.let_go()
        eventually(lambda: lost == source.received)
        source.waiting.append(Delivery(paid("m2"), TOPIC))
        eventually(lambda: source.settled_ids == ["m2"])


def test_a_worker_stopped_before_the_receiving_thread_runs_its_lane_runs_nothing(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one closes the source meanwhile."""
    source = Lending([paid("m1")], endless=True)
    shop.handler()
    shop.app.consume(source)
    stopped = worker(shop.app)
    turn_here = Lanes.turn_here

    def late(lanes: Lanes, lane: Lane) -> None:
        stopped.stop()
        eventually(lambda: source.closed)
        turn_here(lanes, lane)

    monkeypatch.setattr(Lanes, "turn_here", late)
    with running(stopped) as codes:
        eventually(lambda: codes == [0])
        eventually(lambda: not _pumping(), "no thread is left")
    assert source.settled == []
    assert shop.calls == []


def test_the_lead_goes_to_and_fro(shop: Shop) -> None:
    """Each thread takes the lead over from the other while that runs a lane, and follows afterwards."""
    runs: queue.SimpleQueue[int] = queue.SimpleQueue()
    go_on = threading.Semaphore(0)

    def slow(_message: Message[Any], _tx: Any) -> None:
        runs.put(threading.get_ident())
        assert go_on.acquire(timeout=DEADLINE_S)

    source = Lending([], endless=True)
    shop.handler(slow)
    shop.app.consume(source)
    threads: list[int] = []
    with running(worker(shop.app)):
        for number in range(6):
            source.waiting.append(Delivery(paid(f"m{number}"), TOPIC))
            threads.append(runs.get(timeout=DEADLINE_S))
            looks = source.looks
            eventually(partial(source.has_looked, looks), "the other one leads")
            go_on.release()
            eventually(partial(source.has_settled, number + 1))
    assert threads == [threads[0], threads[1]] * 3
    assert threads[0] != threads[1]


def _pumping() -> list[str]:
    return [each.name for each in threading.enumerate() if each.name == "txbox-memory"]


class TestLead:
    def follower(self, lead: Lead) -> queue.SimpleQueue[bool]:
        leads: queue.SimpleQueue[bool] = queue.SimpleQueue()
        threading.Thread(target=lambda: leads.put(lead.follow()), daemon=True).start()
        return leads

    def lend(self, lead: Lead, after_s: float) -> None:
        eventually(lambda: lead.lend(after_s), "a thread that follows")

    def test_without_a_follower_it_is_not_lent(self) -> None:
        assert not Lead().lend(0.0)

    def test_the_follower_leads_when_the_time_is_over(self) -> None:
        lead = Lead()
        leads = self.follower(lead)
        self.lend(lead, 0.001)
        assert leads.get(timeout=DEADLINE_S)
        assert not lead.take_back()
        assert not lead.lend(0.0), "nobody follows any more"

    def test_what_is_taken_back_in_time_stays(self) -> None:
        lead = Lead()
        leads = self.follower(lead)
        self.lend(lead, 3600.0)
        assert lead.take_back()
        lead.end()
        assert not leads.get(timeout=DEADLINE_S)

    def test_another_lane_that_is_done_hurries_the_follower_and_the_lender_does_not(self) -> None:
        lead = Lead()
        leads = self.follower(lead)
        self.lend(lead, 3600.0)
        lead.hurry()
        assert leads.empty()
        threading.Thread(target=lead.hurry).start()
        assert leads.get(timeout=DEADLINE_S)

    def test_a_follower_that_sleeps_is_woken(self) -> None:
        lead = Lead()
        leads = self.follower(lead)
        eventually(lambda: lead.sleeps, "no look any more")
        self.lend(lead, 0.001)
        assert leads.get(timeout=DEADLINE_S)


@pytest.mark.parametrize("unmatched", ["acknowledge", "quarantine"])
def test_no_handler_gets_a_topic_for_which_its_source_was_not_asked(
    database_url: str, unmatched: Literal["acknowledge", "quarantine"]
) -> None:
    """Not even one that takes every topic, and what cannot be read is not quarantined under its name."""
    with opened(database_url, unmatched=unmatched) as shop:
        shop.handler()
        shop.handler(consumer="everything")
        seen: list[str] = []

        @shop.app.handler("*", consumer="audit")
        def audit(message: Message[Any], tx: Any) -> None:
            seen.append(message.topic)

        @shop.app.handler("orders.cancelled", consumer="cancelling")
        def cancel(message: Message[Any], tx: Any) -> None:
            seen.append(message.topic)

        other = [
            replace(paid(f"m{number}", type=str(number)), topic=topic)
            for number, topic in enumerate(["orders.cancelled", "orders.*", "effect:mail"])
        ]
        source = Memory([*other, Delivery(None, "orders.cancelled", raw=b"?"), paid("m9")])
        shop.app.consume(source, topics=[TOPIC])

        assert worker(shop.app, once=True).run() == 0

        assert seen == [TOPIC]
        assert statuses(shop.raw) == {"processed": 3}
        assert len(source.settled) == 5
        events = shop.emitted(MessageUnmatched)
        assert [(event.topic, event.source) for event in events] == [
            (message.topic, "memory") for message in other
        ]
        kept = shop.raw.rows("SELECT consumer FROM txbox_quarantine")
        assert {len(consumer) for (consumer,) in kept} == {0}, "under the name of no consumer"
        assert len(kept) == (4 if unmatched == "quarantine" else 1)
