"""RabbitMQ: the conformance suite; identity, hostile bytes, acknowledgements, dead consumers, refusals."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import aio_pika
import pytest
from aio_pika.abc import AbstractChannel
from pamqp.commands import Basic

from tests.support.broker_fixtures import throwaway
from tests.support.brokers.rabbitmq import (
    HOSTILE,
    STAND_IN,
    STAND_IN_TIME,
    declare,
    ids,
    left,
    note,
    notes,
    on_server,
    opened_source,
    publish,
    publish_plain,
    received,
)
from tests.support.brokers.rigs.rabbitmq import RabbitMQRig
from tests.support.servers.control import ThrowawayRabbitMQ
from tests.support.waiting import DEADLINE_S, eventually
from txbox import ConfigurationError
from txbox.brokers.facts import of_rabbitmq
from txbox.brokers.rabbitmq import RabbitMQ
from txbox.errors import BrokerUnavailable
from txbox.identity import message_id
from txbox.testing.brokers import Note, Rig, Serve, SourceConformance

pytestmark = pytest.mark.brokers


class TestRabbitMQ(SourceConformance):
    @pytest.fixture
    def rig(self, rabbitmq_url: str) -> Iterator[Rig]:
        with RabbitMQRig(rabbitmq_url) as rig:
            yield rig

    @pytest.fixture
    def throwaway_rig(self, throwaway_rabbitmq: ThrowawayRabbitMQ) -> Iterator[Rig]:
        with RabbitMQRig(throwaway_rabbitmq.url, throwaway_rabbitmq) as rig:
            yield rig

    @pytest.fixture
    def impatient_rig(self) -> Iterator[Rig]:
        for server in throwaway("rabbitmq", _Impatient()):
            with RabbitMQRig(server.url, server) as rig:
                yield rig

    def test_a_slow_handler_runs_once(self, impatient_rig: Rig, serve: Serve) -> None:
        """Nothing extends a delivery here: the server closes its channel, and delivers it again."""
        go = threading.Event()
        service = serve(impatient_rig, lambda _: go.wait(DEADLINE_S))
        impatient_rig.publish(Note("m1"))
        with service.running() as codes:
            eventually(lambda: len(service.received) >= 2 and service.received[-1].redelivered)
            go.set()
            eventually(lambda: service.settled)
            impatient_rig.publish(Note("m2"))
            eventually(lambda: service.effects() == 2)
            assert codes == []
        assert service.calls == ["m1", "m2"]
        service.each_once(2)
        assert impatient_rig.outstanding() == 0


class _Impatient(ThrowawayRabbitMQ):
    """Takes back what is not acknowledged within a second."""

    def environment(self) -> Mapping[str, str]:
        known, name = super().environment(), "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS"
        quick = "-rabbit consumer_timeout 1000 -rabbit channel_tick_interval 500"
        return {**known, name: f"{known[name]} {quick}"}


@pytest.fixture
def queue(rabbitmq_url: str) -> Iterator[str]:
    queue_name = declare(rabbitmq_url)
    yield queue_name
    on_server(rabbitmq_url, lambda channel: channel.queue_delete(queue_name))


# -- what a delivery becomes -----------------------------------------------------------------------


def test_properties_become_the_message(rabbitmq_url: str, queue: str) -> None:
    at = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
    headers: Any = {
        "text": "é", "bytes": bytearray(b"\xff\x00"), "number": 7, "flag": True, "none": None, "time": at,
        "nested": {"list": [1, None, {"b": bytearray(b"\xff")}], "time": at}, "price": Decimal("1.25"),
    }  # fmt: skip
    sent = note(
        "m1", b"\x00\xff", type="order.paid", content_type="application/json", timestamp=at,
        headers=headers, correlation_id="c1", reply_to="answers",
    )  # fmt: skip
    publish(rabbitmq_url, queue, sent)
    with opened_source(rabbitmq_url, queue) as source:
        (delivery,) = received(source, 1)
    message = delivery.message
    assert message is not None
    assert delivery.topic == message.topic == queue
    assert (message.id, message.type, message.payload) == ("m1", "order.paid", b"\x00\xff")
    assert (message.content_type, message.time) == ("application/json", at)
    assert dict(message.headers) == {
        "text": "é", "bytes": b"\xff\x00", "number": "7", "flag": "true", "none": None,
        "time": "2026-01-02T03:04:05+00:00", "price": "1.25",
        "nested": '{"list": [1, null, {"b": "hex:ff"}], "time": "2026-01-02T03:04:05+00:00"}',
    }  # fmt: skip
    assert message.origin == {
        "queue": queue, "exchange": "", "routing_key": queue, "correlation_id": "c1",
        "reply_to": "answers",
    }  # fmt: skip
    assert not delivery.redelivered


@pytest.mark.parametrize(
    ("property_id", "headers", "expected"),
    [
        ("p1", {"message-id": "h1"}, "p1"),
        (None, {"message-id": "h1"}, "h1"),
        ("", {"Message-Id": bytearray(b"h1")}, "h1"),
        (None, {"message-id": 17}, "17"),
        (None, {"cloudEvents:id": "e1", "cloudEvents:source": "/shop"}, "/shop e1"),
        (None, {"ce-id": "e1", "ce-source": "/shop"}, "/shop e1"),
        (None, {"ce_id": "e1", "ce_source": "/shop"}, "/shop e1"),
    ],
)
def test_identity(
    rabbitmq_url: str, queue: str, property_id: str | None, headers: Any, expected: str
) -> None:
    properties = Basic.Properties(message_id=property_id, headers=headers)
    publish_plain(rabbitmq_url, queue, (properties, b"1"))
    with opened_source(rabbitmq_url, queue) as source:
        (delivery,) = received(source, 1)
    assert delivery.message is not None
    assert message_id(delivery.message) == expected


def test_type_and_key_of_a_cloud_event(rabbitmq_url: str, queue: str) -> None:
    headers: Any = {"cloudEvents:type": "order.paid", "cloudEvents:subject": "account-7"}
    publish(rabbitmq_url, queue, note("m1", headers=headers))
    publish(rabbitmq_url, queue, note("m2", headers={**headers, "type": "order.sent"}))
    with opened_source(rabbitmq_url, queue) as source:
        messages = [delivery.message for delivery in received(source, 2)]
    assert [(message.type, message.key) for message in messages if message] == [
        ("order.paid", "account-7"), ("order.sent", "account-7"),
    ]  # fmt: skip


def test_what_no_client_can_decode_is_a_problem_and_the_rest_goes_on(
    rabbitmq_url: str, queue: str
) -> None:
    headers: tuple[Any, ...] = ({STAND_IN: "a name"}, {"value": STAND_IN})
    publish(
        rabbitmq_url, queue, note("m1"), note(STAND_IN, b"property"),
        note("m2", b"name", headers=headers[0]), note("m3", b"value", headers=headers[1]), note("m4"),
    )  # fmt: skip
    with opened_source(rabbitmq_url, queue) as source:
        first, by_property, by_name, by_value, last = received(source, 5)
        assert ids([first, by_value, last]) == ["m1", "m3", "m4"]
        assert by_value.message is not None
        assert by_value.message.headers.get("value") == HOSTILE
        for delivery, raw in ((by_property, b"property"), (by_name, b"name")):
            assert delivery.message is None
            assert "cannot be decoded" in str(delivery.problem)
            assert (delivery.topic, delivery.raw) == (queue, raw)
        source.settle([first, by_property, by_name, by_value, last])
    assert left(rabbitmq_url, queue) == 0


def test_a_time_before_1970_costs_neither_id_nor_headers(rabbitmq_url: str, queue: str) -> None:
    described: dict[str, Any] = {
        "type": "order.paid", "content_type": "text/x", "correlation_id": "c1", "priority": 1,
        "headers": {"note": "é", "nested": {"list": [1]}}, "timestamp": STAND_IN_TIME, "app_id": "shop",
    }  # fmt: skip
    publish(rabbitmq_url, queue, note("m1", **described), note("m2", timestamp=STAND_IN_TIME))
    with opened_source(rabbitmq_url, queue) as source:
        first, second = received(source, 2)
        assert ids([first, second]) == ["m1", "m2"]
        message = first.message
        assert message is not None
        assert (message.time, message.type, message.content_type) == (None, "order.paid", "text/x")
        assert dict(message.headers) == {"note": "é", "nested": '{"list": [1]}'}
        assert message.origin["correlation_id"] == "c1"


def test_a_routing_key_that_is_no_text(rabbitmq_url: str, queue: str) -> None:
    async def send(channel: AbstractChannel) -> None:
        exchange = await channel.declare_exchange(queue, aio_pika.ExchangeType.FANOUT)
        await (await channel.get_queue(queue)).bind(exchange)
        await exchange.publish(note("m1"), STAND_IN, mandatory=True)
        await channel.exchange_delete(queue)

    on_server(rabbitmq_url, send)
    with opened_source(rabbitmq_url, queue) as source:
        (delivery,) = received(source, 1)
        assert delivery.message is not None
        assert delivery.message.origin["routing_key"] == f"hex:{HOSTILE.hex()}"
        source.settle([delivery])
    assert left(rabbitmq_url, queue) == 0


# -- settling ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["classic", "quorum"])
def test_only_what_is_settled_is_gone(rabbitmq_url: str, kind: str) -> None:
    queue = declare(rabbitmq_url, kind)
    publish(rabbitmq_url, queue, *notes(8))
    with opened_source(rabbitmq_url, queue) as source:
        deliveries = received(source, 8)
        # a gap, the front, the rest of it: single and multiple acknowledgements meet
        source.settle([deliveries[3], deliveries[1]])
        source.settle([deliveries[0]])
        source.settle([deliveries[2], deliveries[6]])
    with opened_source(rabbitmq_url, queue) as source:
        again = received(source, 3)
        assert sorted(ids(again)) == ["m4", "m5", "m7"]
        assert all(row_id.redelivered for row_id in again)
        source.settle(again)
    assert left(rabbitmq_url, queue) == 0
    on_server(rabbitmq_url, lambda channel: channel.queue_delete(queue))


def test_prefetch_bounds_what_is_out(rabbitmq_url: str, queue: str) -> None:
    publish(rabbitmq_url, queue, *notes(10))
    with opened_source(rabbitmq_url, queue, prefetch=4) as source:
        deliveries = received(source, 4)
        assert source.receive(10, 0.3) == []
        assert left(rabbitmq_url, queue) == 6
        source.settle(deliveries[:3])
        assert ids(received(source, 3)) == ["m4", "m5", "m6"]


def test_several_queues(rabbitmq_url: str, queue: str) -> None:
    other = declare(rabbitmq_url)
    publish(rabbitmq_url, queue, note("a"))
    publish(rabbitmq_url, other, note("b"))
    with opened_source(rabbitmq_url, queue, other) as source:
        deliveries = received(source, 2)
        assert {(delivery.topic, *ids([delivery])) for delivery in deliveries} == {
            (queue, "a"),
            (other, "b"),
        }
        source.settle(deliveries)
    on_server(rabbitmq_url, lambda channel: channel.queue_delete(other))


# -- dead consumers ----------------------------------------------------------------------------------


def test_a_deleted_queue_is_waited_for(rabbitmq_url: str, queue: str) -> None:
    """The server cancels the consumer: without a check, it would wait for ever."""
    publish(rabbitmq_url, queue, note("m1"))
    with opened_source(rabbitmq_url, queue) as source:
        old = received(source, 1)
        on_server(rabbitmq_url, lambda channel: channel.queue_delete(queue))

        def away() -> str | None:
            try:
                source.receive(1, 0.1)
            except BrokerUnavailable as error:
                return str(error)
            return None

        eventually(lambda: "has no queue" in (away() or ""))
        declare(rabbitmq_url, name=queue)
        publish(rabbitmq_url, queue, note("m2"))
        new = received(source, 1)
        assert ids(new) == ["m2"]
        source.settle(
            old
        )  # its tag is 1, like that of the new delivery, which it must not acknowledge
        assert left(rabbitmq_url, queue) == 0
    with opened_source(rabbitmq_url, queue) as source:
        assert ids(received(source, 1)) == ["m2"]


def test_a_consumer_that_vanished_silently_is_noticed(rabbitmq_url: str, queue: str) -> None:
    with opened_source(rabbitmq_url, queue, check=timedelta(milliseconds=100)) as source:
        link = source._link
        assert link is not None
        channel: Any = link._channel
        (tag,) = channel.consumers
        source._call(channel.basic_cancel(tag))
        publish(rabbitmq_url, queue, note("m1"))
        assert ids(received(source, 1)) == ["m1"]
        assert source._link is not link


def test_a_server_that_hangs_is_left(throwaway_rabbitmq: ThrowawayRabbitMQ) -> None:
    """No frames come and nothing is closed: only missing heartbeats show it."""
    declare(throwaway_rabbitmq.url, name="orders")
    publish(throwaway_rabbitmq.url, "orders", note("m1"))
    pid = throwaway_rabbitmq._pid()
    assert pid is not None
    with opened_source(f"{throwaway_rabbitmq.url}?heartbeat=1", "orders") as source:
        received(source, 1)
        link = source._link
        assert link is not None
        os.kill(pid, signal.SIGSTOP)
        try:
            eventually(lambda: link.lost or source.receive(1, 0.1), "the loss")
        finally:
            os.kill(pid, signal.SIGCONT)
        (delivery,) = received(source, 1)
        assert delivery.redelivered
        source.settle([delivery])
    assert left(throwaway_rabbitmq.url, "orders") == 0


# -- what can never work -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "options", "said"),
    [
        ("amqp://127.0.0.1/", {"no_ack": True}, "does not take no_ack="),
        ("amqp://127.0.0.1/", {"prefetch": 0}, "prefetch is 0"),
        ("amqp://127.0.0.1/", {"queues": []}, "no queues to consume"),
        ("amqp://127.0.0.1/", {"queues": [""]}, "not a valid queue name"),
        ("amqp://127.0.0.1/", {"colour": 1}, "has no option 'colour'"),
        ("amqp://127.0.0.1/?heartbeat=0", {}, "heartbeat=0"),
        ("http://user:secret@127.0.0.1/", {}, "amqp://user:password@host"),
    ],
)
def test_refused_at_construction(url: str, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        RabbitMQ(url, **options)
    assert said in str(caught.value)
    assert "secret" not in str(caught.value)


def test_refused_at_open(rabbitmq_url: str, queue: str) -> None:
    with (
        pytest.raises(ConfigurationError, match="has no queue 'absent'"),
        opened_source(rabbitmq_url, queue, "absent"),
    ):
        pass
    odd = {"x-priority": "high"}
    with (
        pytest.raises(ConfigurationError, match="arguments"),
        opened_source(rabbitmq_url, queue, arguments=odd),
    ):
        pass
    wrong = rabbitmq_url.replace("guest:guest", "guest:secret")
    with pytest.raises(ConfigurationError) as caught, opened_source(wrong, queue):
        pass
    assert "check user, password" in str(caught.value)
    assert "secret" not in str(caught.value)
    nothing: Any = None
    with pytest.raises(ConfigurationError, match="pass queues="):
        RabbitMQ(rabbitmq_url).consumer(["*"], nothing)


@pytest.mark.parametrize("arguments", [{}, {"x-stream-offset": "first"}, {"x-priority": 1}])
def test_a_stream_is_refused(rabbitmq_url: str, arguments: dict[str, Any]) -> None:
    """It keeps no acknowledgements: opened again, it would skip what is unsettled, or deliver everything."""
    stream = declare(rabbitmq_url, "stream")
    try:
        with (
            pytest.raises(ConfigurationError, match=f"'{stream}' is a stream.*classic or quorum"),
            opened_source(rabbitmq_url, stream, arguments=arguments),
        ):
            pass
    finally:
        on_server(rabbitmq_url, lambda channel: channel.queue_delete(stream))


def test_what_it_says_of_itself(rabbitmq_url: str) -> None:
    source = RabbitMQ("amqp://user:secret@broker.test/", queues=["orders", "payments"])
    assert source.name == "rabbitmq:broker.test:5672/:orders,payments"
    assert source.topics == ("orders", "payments")
    assert source.redelivery_s == 1800
    assert RabbitMQ(rabbitmq_url, consumer_timeout=None).redelivery_s is None


def test_the_password_of_the_http_api_goes_nowhere_else() -> None:
    asked: list[tuple[str, str | None]] = []

    class Moved(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append((self.path, self.headers["Authorization"]))
            self.send_response(302)
            self.send_header("Location", "/elsewhere")
            self.end_headers()

        def log_message(self, *_: object, **named: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Moved) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        port = server.server_address[1]
        with pytest.raises(BrokerUnavailable, match="answered 302"):
            of_rabbitmq(f"http://ann:secret@127.0.0.1:{port}", "/", ["orders"])
        server.shutdown()
    assert [path for path, _ in asked] == ["/api/queues/%2F/orders"]
    assert asked[0][1]
