"""What every source must do, as tests over a `Rig` (see `rigs`): `class TestMine(SourceConformance)`.

The class gives two fixtures: `rig` on the shared server, and `throwaway_rig` on one that the test may kill.
It overrides a point only where its broker offers another way to the same promise, and says why.
"""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import pytest

from tests.support.brokers.rigs import PAYLOAD, Note, Rig, notes, nothing_for, opened, take
from tests.support.brokers.rigs.service import SHORT, process
from tests.support.databases import Raw
from tests.support.servers.control import ThrowawayPostgres
from tests.support.shop import AT_ONCE, CONSUMER, Shop, add_effect, effects, quarantined, statuses
from tests.support.shop import opened as opened_shop
from tests.support.waiting import DEADLINE_S, eventually
from tests.support.workers import running, worker
from txbox import App, Lease, Limits, Message, Reject, Retry, events
from txbox.brokers.base import Context, Delivery, Source
from txbox.errors import BrokerError, UnusableMessage
from txbox.identity import message_id
from txbox.worker import Worker

pytestmark = pytest.mark.brokers

#: One start that is counted, and not given back, kills the message: an innocent one must never die of it.
STRICT = Lease(max_starts=1)
UNFINISHED = "SELECT 1 FROM txbox_inbox WHERE status <> 'processed'"


class Watched:
    """A source in the hands of a worker, and what went in and out."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._consumer: Any = None
        self.received: list[Delivery] = []
        self.settled: list[Delivery] = []

    def consumer(self, topics: Sequence[str], context: Context) -> Any:
        self._consumer = self._source.consumer(topics, context)
        return self

    def __getattr__(self, name: str) -> Any:
        # what is open knows more
        return getattr(self._consumer if hasattr(self._consumer, name) else self._source, name)

    @property
    def idle(self) -> bool:
        return len(self.settled) == len(self.received)

    def receive(self, messages_max: int, wait_s: float) -> Sequence[Delivery]:
        found: Sequence[Delivery] = self._consumer.receive(messages_max, wait_s)
        assert len(found) <= messages_max
        self.received += found
        return found

    def settle(self, deliveries: Sequence[Delivery]) -> None:
        self.settled += deliveries
        self._consumer.settle(deliveries)


def service(
    shop: Shop, rig: Rig, body: Callable[[Message[Any]], object] = id, **options: Any
) -> Watched:
    """Consume the topic of a rig; the handler notes its call, writes the effect, then does `body`."""

    def handle(message: Message[Any], tx: Any) -> None:
        shop.calls.append(message_id(message, weak=bool(options.get("weak_ids"))))
        add_effect(tx, shop.calls[-1])
        body(message)

    source: Any = Watched(rig.source(**options.pop("source", {})))
    register: Any = shop.app.handler(rig.topic, consumer=CONSUMER, **options)
    register(handle)
    shop.app.consume(source)
    watched: Watched = source
    return watched


def the_message(delivery: Delivery) -> Message[Any]:
    assert delivery.message is not None, delivery.problem
    return delivery.message


def each_once(shop: Shop, count: int) -> None:
    assert shop.raw.rows("SELECT count(*), count(DISTINCT message_id) FROM effect") == [
        (count, count)
    ]
    assert statuses(shop.raw) == {"processed": count}


class SourceConformance:
    """The points; promises are named where they are promised."""

    @pytest.fixture
    def shop(self, sqlite_url: str) -> Iterator[Shop]:
        with opened_shop(sqlite_url, lease=STRICT) as shop:
            yield shop

    # -- what a message is (1.2, 1.3) ----------------------------------------------------------

    def test_the_id_is_the_producers(self, rig: Rig) -> None:
        prefix = rig.cloud_events
        event = ((f"{prefix}id", "e 1"), (f"{prefix}source", "/my shop"))
        wanted = {
            "m1": Note("m1"),
            "/my%20shop e 1": Note(headers=event),
            "m2": Note("m2", b"2", event),
        }
        if rig.native_ids:
            wanted["n1"] = Note(native="n1")
            wanted["n2"] = Note("m3", b"3", native="n2")
        rig.publish(*wanted.values())
        with opened(rig) as source:
            found = take(source, len(wanted))
            assert sorted(message_id(the_message(delivery)) for delivery in found) == sorted(wanted)
            assert {delivery.topic for delivery in found} == {rig.topic}
            source.settle(found)

    def test_a_structured_event_is_the_message_that_it_describes(
        self, rig: Rig, shop: Shop
    ) -> None:
        """And what is none, or several, is set aside with its bytes."""
        event = b'{"id": "e 1", "source": "/my shop", "type": "paid", "subject": "k", "data": {"b" :  1.10}}'
        structured, batch = (f"application/cloudevents{kind}+json" for kind in ("", "-batch"))
        seen: list[Message[Any]] = []
        service(shop, rig, seen.append)
        rig.publish(
            Note(payload=event, content_type=structured),
            Note("known", event, content_type=f"{structured}; charset=UTF-8"),
            Note("malformed", b'{"id": ', content_type=structured),
            Note("batch", b"[" + event + b"]", content_type=batch),
        )
        with running(worker(shop.app)):
            eventually(lambda: shop.effects() + len(quarantined(shop.raw)) == 4)
            eventually(lambda: rig.outstanding() == 0)
        assert {message.id for message in seen} == {"/my%20shop e 1", "known"}
        for message in seen:
            assert (message.type, message.key, message.payload) == ("paid", "k", b'{"b" :  1.10}')
            assert message.content_type == "application/json"
            assert message.headers.text(f"{rig.cloud_events}source") == "/my shop"
        batch_reason, malformed_reason = sorted(reason for reason, _ in quarantined(shop.raw))
        assert batch_reason.startswith("A batch of CloudEvents")
        assert malformed_reason.startswith("The CloudEvent is not a JSON object")

    def test_coordinates_are_an_id_on_request_only(self, rig: Rig) -> None:
        """And only where they name the message for ever: not those of another topic of that name."""
        found: list[str] = []
        for _ in range(2):
            rig.publish(Note())
            for _ in range(2):
                with opened(rig, **rig.impatient) as source:
                    (delivery,) = take(source, 1)
                    message = the_message(delivery)
                    with pytest.raises(UnusableMessage, match="no id"):
                        message_id(message)
                    if not rig.weak_ids:
                        with pytest.raises(UnusableMessage, match="no id"):
                            message_id(message, weak=True)
                        return
                    found.append(message_id(message, weak=True))
            rig.recreate()
        assert all(weak_id.startswith("weak:") for weak_id in found)
        first, again, other, _ = found
        assert first == again
        assert first != other

    def test_weak_ids_in_a_service(self, rig: Rig, shop: Shop) -> None:
        service(shop, rig, weak_ids=True)
        rig.publish(Note(), Note("m1"))
        with running(worker(shop.app)):
            eventually(lambda: shop.effects() + len(quarantined(shop.raw)) == 2)
        assert shop.effects("m1") == 1
        assert len(quarantined(shop.raw)) == (0 if rig.weak_ids else 1)
        assert rig.outstanding() == 0

    def test_payloads_stay_bytes(self, rig: Rig) -> None:
        rig.publish(*(Note(f"m{at}", payload) for at, payload in enumerate(rig.payloads)))
        with opened(rig) as source:
            found = take(source, len(rig.payloads))
            by_id = {
                message_id(the_message(delivery)): the_message(delivery).payload
                for delivery in found
            }
        assert by_id == {f"m{at}": payload for at, payload in enumerate(rig.payloads)}

    def test_headers_arrive_as_they_are(self, rig: Rig, shop: Shop) -> None:
        rig.publish(Note("m1", headers=rig.headers))
        with opened(rig) as source:
            (delivery,) = take(source, 1)
            headers = the_message(delivery).headers
        names = {name for name, _ in rig.headers}
        assert {name: _bytes(headers.get_all(name)) for name in names} == {
            name: _bytes([value for header, value in rig.headers if header == name])
            for name in names
        }
        service(shop, rig, mode="stored")
        with running(worker(shop.app)):
            eventually(lambda: shop.effects() == 1)
        assert rig.outstanding() == 0

    # -- receiving and settling ------------------------------------------------------------------

    def test_no_more_than_asked_for(self, rig: Rig) -> None:
        rig.publish(*notes(12))
        with opened(rig) as source:
            found: list[Delivery] = []

            def enough() -> bool:
                batch = source.receive(asked := random.randint(1, 4), 0.2)
                assert len(batch) <= asked
                found.extend(batch)
                return len(found) >= 12

            eventually(enough)
            assert (
                len({message_id(the_message(delivery)) for delivery in found}) == len(found) == 12
            )

    def test_settled_in_any_order(self, rig: Rig) -> None:
        rig.publish(*notes(25))
        with opened(rig) as source:
            found = take(source, 25)
            random.shuffle(found)
            for part in (found[:1], found[1:12], found[12:]):
                source.settle(part)
            with suppress(BrokerError):
                source.settle(found[:3])  # again: at most it is said
        assert rig.outstanding() == 0

    def test_unacknowledged_comes_again_and_has_one_effect(self, rig: Rig, shop: Shop) -> None:
        """To an innocent message it happens often: that must never make it a dead letter (4.4)."""
        watched = service(shop, rig, source=rig.impatient)
        rig.publish(*notes(4))
        with opened(rig, **rig.impatient) as source:
            found = take(source, 4)
            for delivery in found[:2]:
                shop.app.process(the_message(delivery))
            source.settle(found[:1])
        with opened(rig, **rig.impatient) as source:
            again = take(source, 3)
            assert all(delivery.redelivered for delivery in again)
        assert rig.outstanding() == 3
        with running(worker(shop.app)):
            eventually(lambda: len(watched.settled) == 3)
        each_once(shop, 4)
        assert len(shop.emitted(events.MessageDuplicate)) == 1
        assert rig.outstanding() == 0

    # -- outcomes (2.9, 2.12, 3.1) -----------------------------------------------------------------

    def test_every_outcome_that_is_on_disk_is_acknowledged(self, rig: Rig, shop: Shop) -> None:
        def fail(message: Message[Any]) -> None:
            calls = shop.calls.count(shop.calls[-1])
            match message.headers.text("do"):
                case "retry" if calls == 1:
                    raise ValueError("at once")
                case "park":
                    raise Retry(after=timedelta(hours=1))
                case "reject":
                    raise Reject("no")

        watched = service(shop, rig, fail, type="paid", retry=AT_ONCE)
        paid = ("type", "paid")
        rig.publish(
            Note("ok", headers=(paid,)), Note("retry", headers=(paid, ("do", "retry"))),
            Note("park", headers=(paid, ("do", "park"))), Note("no", headers=(paid, ("do", "reject"))),
            Note(headers=(paid,)), Note("other", headers=(("type", "sent"),)),
        )  # fmt: skip
        with running(worker(shop.app)):
            eventually(lambda: len(watched.settled) == 6 and shop.effects() == 2)
            rig.publish(
                Note("ok", headers=(paid,)), Note("ok", b'{"cents": 1}', headers=(paid,)),
                Note("park", headers=(paid, ("do", "park"))),
            )  # fmt: skip
            eventually(lambda: len(watched.settled) == 9)
        assert rig.outstanding() == 0
        assert statuses(shop.raw) == {"processed": 2, "failed": 1, "dead": 1}
        assert len(quarantined(shop.raw)) == 2
        assert shop.calls.count("retry") == 2
        for kind in (
            events.MessageProcessed, events.MessageDuplicate, events.MessageFailed, events.MessageDead,
            events.MessageQuarantined, events.MessageDeferred, events.MessageUnmatched,
        ):  # fmt: skip
            assert shop.emitted(kind), kind
        assert not shop.emitted(events.SettleFailed)

    def test_what_another_transaction_holds_is_not_acknowledged(
        self, rig: Rig, postgresql_url: str
    ) -> None:
        limits = Limits(lock_timeout=timedelta(milliseconds=100))
        entered, go = threading.Event(), threading.Event()

        def hold(_: Message[Any]) -> None:
            entered.set()
            assert go.wait(DEADLINE_S)

        with opened_shop(postgresql_url, limits=limits) as shop:
            service(shop, rig, hold, source=rig.impatient)
            held = Message[Any](id="held", topic=rig.topic, payload=PAYLOAD)
            elsewhere = threading.Thread(target=shop.app.process, args=(held,))
            elsewhere.start()
            assert entered.wait(DEADLINE_S)
            rig.publish(Note("held"))
            with running(worker(shop.app)):
                eventually(lambda: shop.emitted(events.MessageInFlight))
            assert rig.outstanding() == 1
            go.set()
            elsewhere.join(DEADLINE_S)
            with running(worker(shop.app)):
                eventually(lambda: shop.emitted(events.MessageDuplicate))
            each_once(shop, 1)
        assert rig.outstanding() == 0

    def test_stored_first_then_processed_from_the_table(self, rig: Rig, shop: Shop) -> None:
        def is_acknowledged(message: Message[Any]) -> None:
            eventually(
                lambda: (
                    message.id
                    in {message_id(the_message(delivery)) for delivery in watched.settled}
                )
            )

        watched = service(shop, rig, is_acknowledged, mode="stored")
        rig.publish(*notes(5), *notes(5))
        with running(worker(shop.app)):
            eventually(lambda: len(watched.settled) == 10 and shop.effects() == 5)
        assert not shop.emitted(events.MessageFailed)
        each_once(shop, 5)
        assert rig.outstanding() == 0

    # -- time ----------------------------------------------------------------------------------------

    def test_a_slow_handler_keeps_its_message(self, rig: Rig, shop: Shop) -> None:
        go = threading.Event()
        watched = service(shop, rig, lambda _: go.wait(DEADLINE_S), source=rig.impatient)
        rig.publish(Note("slow"), Note("behind"))
        with running(worker(shop.app)):
            eventually(lambda: shop.calls and len(watched.received) == 2)
            with rig.rival() as receive:
                nothing_for(receive, 2 * rig.redelivery_s)
            go.set()
            eventually(lambda: len(watched.settled) == 2)
        assert sorted(shop.calls) == ["behind", "slow"]
        assert not shop.emitted(events.MessageDuplicate)
        assert rig.outstanding() == 0

    def test_while_the_database_is_away_nothing_is_given_back_or_counted(self, rig: Rig) -> None:
        with ThrowawayPostgres() as database:
            with App(database.url) as app:
                app.init()
            with opened_shop(database.url, lease=STRICT) as shop:
                watched = service(shop, rig, source=rig.impatient)
                rig.publish(Note("before"))
                with running(worker(shop.app)) as codes:
                    eventually(lambda: len(watched.settled) == 1)
                    shop.raw.close()
                    database.stop(immediate=True)
                    rig.publish(*notes(5))
                    eventually(lambda: len(watched.received) == 6)
                    eventually(lambda: shop.emitted(events.ConsumptionPaused))
                    with rig.rival() as receive:
                        nothing_for(receive, 1.5 * rig.redelivery_s)
                    assert (len(watched.received), len(watched.settled), codes) == (6, 1, [])
                    database.start()
                    eventually(lambda: len(watched.settled) == 6)
                assert len(watched.received) == 6
                assert shop.emitted(events.ConsumptionResumed)
            with Raw(database.url) as raw:
                assert (effects(raw), statuses(raw)) == (6, {"processed": 6})
                assert raw.value("SELECT max(attempts) FROM txbox_inbox") == 0
                assert raw.value("SELECT count(*) FROM txbox_attempt") == 0
        assert rig.outstanding() == 0

    # -- ends ------------------------------------------------------------------------------------------

    def test_a_drain_settles_what_ended_and_leaves_the_rest(self, rig: Rig, shop: Shop) -> None:
        def drain(_: Message[Any]) -> None:
            if len(shop.calls) == 1:
                os.kill(os.getpid(), signal.SIGTERM)
                assert drained._stopping.wait(DEADLINE_S)

        service(shop, rig, drain, source=rig.impatient)
        drained = Worker(shop.app, maintenance=False)
        rig.publish(*notes(10))
        assert drained.run() == 0
        assert 1 <= shop.effects() < 10
        # a source of suspects has handed more to the table than was processed
        assert rig.outstanding() == 10 - sum(statuses(shop.raw).values())
        with running(worker(shop.app)):
            eventually(lambda: shop.effects() == 10)
        each_once(shop, 10)
        assert rig.outstanding() == 0

    @pytest.mark.parametrize("crash", ["after:handler", "before:ack"])
    def test_a_killed_worker_loses_and_doubles_nothing(
        self, rig: Rig, postgresql_url: str, crash: str
    ) -> None:
        with opened_shop(postgresql_url, lease=SHORT) as shop:
            watched = service(shop, rig, source=rig.replaceable)
            rig.publish(*notes(8))
            with process(rig, postgresql_url, crash) as killed:
                assert killed.wait(DEADLINE_S) == -signal.SIGKILL
            with running(worker(shop.app, maintenance=True)):
                eventually(lambda: shop.effects() >= 8 and not shop.raw.rows(UNFINISHED))
                eventually(lambda: watched.idle and rig.outstanding() == 0)
            each_once(shop, 8)
        assert rig.outstanding() == 0

    def test_a_server_that_is_killed_and_comes_back(self, throwaway_rig: Rig, shop: Shop) -> None:
        server = throwaway_rig.server
        assert server is not None
        half, go = threading.Event(), threading.Event()

        def hold_at_half(_: Message[Any]) -> None:
            if len(shop.calls) == 20:
                half.set()
                assert go.wait(DEADLINE_S)

        watched = service(shop, throwaway_rig, hold_at_half, source=throwaway_rig.impatient)
        throwaway_rig.publish(*notes(40))
        with running(worker(shop.app)) as codes:
            assert half.wait(DEADLINE_S)
            server.stop(immediate=True)
            go.set()
            eventually(lambda: shop.emitted(events.ConsumptionPaused))
            server.start()
            eventually(lambda: shop.effects() >= 40)
            throwaway_rig.publish(*notes(5, first=40))
            eventually(lambda: shop.effects() >= 45)
            # what was acknowledged into the void comes again, and is a duplicate
            eventually(lambda: watched.idle and throwaway_rig.outstanding() == 0)
            assert shop.emitted(events.ConsumptionResumed)
            assert codes == []
        each_once(shop, 45)
        assert throwaway_rig.outstanding() == 0


def _bytes(values: Sequence[str | bytes | None]) -> list[bytes | None]:
    # a source may give as text what is UTF-8
    return [value.encode() if isinstance(value, str) else value for value in values]
