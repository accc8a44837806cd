"""NATS JetStream: the conformance suite; subjects, headers, consumers."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import pytest
from nats.js.api import ConsumerConfig

from tests.support.brokers.example_runs import booked, example
from tests.support.brokers.rigs.nats import NatsRig
from tests.support.proxy import Proxy
from tests.support.servers.control import ThrowawayNats
from tests.support.waiting import eventually, room
from txbox import ConfigurationError, Message
from txbox.brokers.base import Delivery
from txbox.brokers.nats import Nats, NatsConsumer
from txbox.errors import BrokerError, BrokerUnavailable
from txbox.identity import message_id
from txbox.testing.brokers import Alone, Note, Rig, SourceConformance

pytestmark = pytest.mark.brokers


class TestNats(SourceConformance):
    @pytest.fixture
    def rig(self, nats_url: str) -> Iterator[Rig]:
        with NatsRig(nats_url) as rig:
            yield rig

    @pytest.fixture
    def throwaway_rig(self, throwaway_nats: ThrowawayNats) -> Iterator[Rig]:
        with NatsRig(throwaway_nats.url, throwaway_nats) as rig:
            yield rig


SECOND = timedelta(seconds=1)


class Stream(NatsRig):
    """A stream with the subject `<name>.paid` and others below its name."""

    async def add_consumer(self, config: ConsumerConfig, js: Any) -> None:
        await js.add_consumer(self.stream, config)

    def opened(self, *topics: str, **options: Any) -> NatsConsumer:
        source: Nats = self.source(**options)
        return source.consumer(topics or [self.topic], Alone())


@pytest.fixture
def stream(nats_url: str) -> Iterator[Stream]:
    with Stream(nats_url) as opened_stream:
        yield opened_stream


@pytest.fixture
def closing() -> Iterator[Callable[[NatsConsumer], NatsConsumer]]:
    """Closes sources whatever happens: their threads must not outlive the test."""
    sources: list[NatsConsumer] = []

    def keep(source: NatsConsumer) -> NatsConsumer:
        sources.append(source)
        return source

    yield keep
    for each in sources:
        each.close()


def received(source: NatsConsumer, count: int = 1) -> list[Delivery]:
    found: list[Delivery] = []

    def enough() -> bool:
        found.extend(source.receive(100, 0.1))
        return len(found) >= count

    eventually(enough)
    return found


def the_message(delivery: Delivery) -> Message[Any]:
    assert delivery.message is not None
    return delivery.message


def test_a_message_of_the_stream(stream: Stream, closing: Any) -> None:
    headers = (("type", "order.paid"), ("key", "k"), ("content-type", "x/y"))
    stream.publish(Note(native="m1", payload=b"\xff\x00", headers=headers))
    (delivery,) = received(closing(stream.opened()))
    message = the_message(delivery)
    assert (message.topic, message.payload, message.id) == (stream.topic, b"\xff\x00", "m1")
    assert (message.type, message.key, message.content_type) == ("order.paid", "k", "x/y")
    assert message.time is not None
    assert abs(message.time - datetime.now(UTC)) < timedelta(minutes=1)
    assert (message.origin["stream"], message.origin["sequence"]) == (stream.stream, 1)
    assert not delivery.redelivered


def test_hostile_headers_arrive_as_they_are(stream: Stream, closing: Any) -> None:
    hostile_headers = (
        ("note", b"\xff\xfe"), ("note", "2"), ("a b", "c"), ("key", b"\xfe"), ("Status", "503"),
        ("x", "y\r\nno colon"),
    )  # fmt: skip
    event = (("ce_id", "1"), ("ce_source", "/a"), ("ce_type", "t"), ("ce_subject", "k"))
    stream.publish(Note("m1", headers=hostile_headers), Note(native="", headers=event))
    hostile, cloud = received(closing(stream.opened()), 2)
    message = the_message(hostile)
    assert message_id(message) == "m1"
    assert message.headers.get_all("note") == [b"\xff\xfe", "2"]
    assert (message.headers.get("a b"), message.headers.get("status")) == ("c", "503")
    assert message.key == "hex:fe"
    message = the_message(cloud)
    assert (message.type, message.key, message_id(message)) == ("t", "k", "/a 1")


def test_several_topics_and_wildcards(stream: Stream, closing: Any) -> None:
    stream.publish(Note("m1"))
    stream.publish(Note("m2"), subject=f"{stream.stream}.sent.eu")
    topics = [stream.topic, f"{stream.stream}.sent.*"]
    source = closing(stream.opened(*topics))
    found = received(source, 2)
    assert sorted(the_message(row).topic for row in found) == topics
    source.settle(found)
    assert stream.outstanding(f"shop-{stream.stream}_paid") == 0
    everything = closing(stream.opened("*", stream=stream.stream, durable="all"))
    assert [the_message(delivery).topic for delivery in received(everything, 2)] == [
        stream.topic,
        f"{stream.stream}.sent.eu",
    ]


def test_a_server_that_is_away_at_first(throwaway_nats: ThrowawayNats, closing: Any) -> None:
    stream = Stream(throwaway_nats.url)
    stream.create()
    stream.publish(Note("m1"))
    throwaway_nats.stop()
    source = closing(stream.opened(ack_wait=SECOND))
    with pytest.raises(BrokerUnavailable):
        source.receive(1, 0)
    throwaway_nats.start()
    mine = received(source)
    throwaway_nats.stop()
    with pytest.raises(BrokerUnavailable):
        source.settle(mine)
    throwaway_nats.start()
    # a new connection acknowledges what came through the old one
    source.settle(mine)
    assert stream.outstanding() == 0


def test_a_wrong_password_is_named() -> None:
    """The server numbers no errors; the client knows this one by a word of its protocol."""
    with ThrowawayNats() as server:
        config = server.directory / "nats.conf"
        config.write_text(config.read_text() + "authorization { user: shop, password: right }\n")
        server.stop()
        server.start()

        def at(user: str) -> Nats:
            return Nats(server.url.replace("//", f"//{user}@"), durable="shop", stream="S")

        source = at("shop:wrong")
        for refused in (
            lambda: source.consumer(["orders"], Alone()),
            lambda: source.examine(["orders"]),
        ):
            with pytest.raises(ConfigurationError, match="rejects the login") as caught:
                refused()
            assert "wrong" not in str(caught.value)
        publisher = source.publisher()
        with pytest.raises(BrokerUnavailable, match="rejects the login"):
            publisher.publish([Message(topic="orders", id="m1", payload=b"")], 5.0)
        publisher.close()
        (facts,) = at("shop:right").examine(["orders"])
        assert not facts.found


def test_a_deleted_consumer_is_created_again(stream: Stream, closing: Any) -> None:
    stream.publish(Note("m1"))
    source = closing(stream.opened())
    mine = received(source)
    stream.do(lambda js: js.delete_consumer(stream.stream, "shop"))
    (again,) = received(source)
    assert message_id(the_message(again)) == "m1"
    source.settle([*mine, again])
    assert stream.outstanding() == 0


@pytest.mark.parametrize("confirm", [True, False])
@pytest.mark.parametrize("connection", ["stays", "is lost"])
def test_what_was_delivered_before_a_stream_was_made_again_acknowledges_nothing_after_it(
    stream: Stream, closing: Any, monkeypatch: pytest.MonkeyPatch, connection: str, confirm: bool
) -> None:
    """Acknowledgements name sequences, which are other messages by now."""
    monkeypatch.setattr(
        "txbox.brokers.nats._SAME_S", 0.0, raising=False
    )  # it is made again within a second
    stream.publish(Note("old 1"), Note("old 2"))
    source = closing(stream.opened(confirm=confirm))
    before = received(source, 2)
    if connection == "is lost":
        # after the stream's end, nobody hears of it
        source._call(source._link._client.close())
    stream.remove()
    stream.create()
    stream.publish(Note("new 1"), Note("new 2"))
    after: list[Delivery] = []

    def enough() -> bool:
        with suppress(BrokerUnavailable):  # it was lost soon after it was made
            after.extend(source.receive(100, 0.1))
        return len(after) == 2

    eventually(enough, "the new messages")
    assert [message_id(the_message(row)) for row in after] == ["new 1", "new 2"]
    source.tend(before)
    source.settle(before)
    assert stream.outstanding() == 2
    source.settle(after)
    eventually(lambda: stream.outstanding() == 0, "their own acknowledgements")


@pytest.mark.parametrize(
    "start",
    [{"deliver_policy": "new"}, {"deliver_policy": "by_start_sequence", "opt_start_seq": 2}],
)
@pytest.mark.parametrize("lost", ["consumer", "stream"])
def test_a_lost_consumer_misses_nothing_that_came_since(
    stream: Stream, closing: Any, lost: str, start: dict[str, Any]
) -> None:
    """Where it starts, as the options say, is only for a consumer that is new."""
    source = closing(stream.opened(consumer=start))
    if lost == "consumer":
        stream.do(lambda js: js.delete_consumer(stream.stream, "shop"))
    else:
        stream.remove()
        stream.create()
    stream.publish(Note("m1"))
    (delivery,) = received(source)
    assert message_id(the_message(delivery)) == "m1"


def test_a_deleted_stream_is_waited_for(stream: Stream, closing: Any) -> None:
    """Also when the source has to reconnect: it worked once, and somebody may be repairing it."""
    source = closing(stream.opened())
    stream.remove()
    source._call(source._link._client.close())

    def away() -> bool:
        try:
            source.receive(1, 0)
        except BrokerUnavailable as error:
            return "No NATS stream" in str(error)
        return False

    eventually(away)
    stream.create()
    stream.publish(Note("m1"))

    def back() -> list[Delivery]:
        try:
            return list(source.receive(1, 0.1))
        except BrokerUnavailable:
            return []

    (delivery,) = eventually(back)
    assert message_id(the_message(delivery)) == "m1"


def test_what_can_never_work_is_refused(
    stream: Stream, caplog: pytest.LogCaptureFixture, closing: Any
) -> None:
    for options, words in (
        ({"consumer": {"max_deliver": 3}}, "max_deliver 3"),
        ({"consumer": {"ack_policy": "none"}}, "ack_policy"),
        ({"consumer": {"colour": 1}}, "does not have"),
        ({"allow_reconnect": True}, "allow_reconnect"),
        ({"ack_wait": timedelta(0)}, "ack_wait"),
    ):
        with pytest.raises(ConfigurationError, match=words):
            stream.source(**options)
    with caplog.at_level(logging.WARNING, "txbox"):
        stream.source(consumer={"max_deliver": 50})
    assert "max_deliver 50" in caplog.text
    for topics, source in (
        (["*"], stream.source()),
        ([], stream.source()),
        ([f"{stream.stream}.a.b", f"{stream.stream}.a_b"], stream.source()),
        (["nowhere"], stream.source()),
        (["nowhere"], stream.source(stream="NOWHERE")),
        ([stream.topic], stream.source(durable={"other": "x"})),
        ([stream.topic], stream.source(durable=None)),
    ):
        with pytest.raises(ConfigurationError):
            source.consumer(topics, Alone())


def test_consumers_that_exist_are_looked_at(stream: Stream, closing: Any) -> None:
    for each in (
        ConsumerConfig(durable_name="limited", max_deliver=3, filter_subject=stream.topic),
        ConsumerConfig(durable_name="other", filter_subject=f"{stream.stream}.sent"),
        ConsumerConfig(
            durable_name="pushing", deliver_subject="inbox", filter_subject=stream.topic
        ),
        ConsumerConfig(durable_name="bare", headers_only=True, filter_subject=stream.topic),
        # these would bring `cancelled` to the handler of `paid`
        ConsumerConfig(durable_name="unfiltered"),
        ConsumerConfig(
            durable_name="several",
            filter_subjects=[stream.topic, f"{stream.stream}.cancelled"],
        ),
    ):
        stream.do(partial(Stream.add_consumer, stream, each))
        with pytest.raises(ConfigurationError, match=str(each.durable_name)):
            stream.opened(durable=each.durable_name)
    fine = ConsumerConfig(durable_name="fine", ack_wait=6, filter_subject=stream.topic)
    stream.do(lambda js: js.add_consumer(stream.stream, fine))
    source = closing(stream.opened(durable="fine"))
    assert (source.redelivery_s, source.tend_every_s) == (6, 2)
    alone = f"{stream.stream}-alone"
    stream.do(lambda js: js.add_stream(name=alone, subjects=[alone]))
    try:
        # all of its stream is what is asked for
        stream.do(lambda js: js.add_consumer(alone, ConsumerConfig(durable_name="whole")))
        closing(stream.opened(alone, durable="whole"))
    finally:
        stream.do(lambda js: js.delete_stream(alone))


@pytest.mark.parametrize("topic", ["paid", "paid.*", "paid.>"])
def test_a_filter_that_is_changed_brings_nothing_under_the_topic(
    stream: Stream, closing: Any, topic: str
) -> None:
    """What it was asked for has its topic, and the rest has its subject, so that no handler gets it."""
    topic, cancelled = f"{stream.stream}.{topic}", f"{stream.stream}.cancelled"
    source = closing(stream.opened(topic))
    everything = ConsumerConfig(durable_name="shop", ack_wait=30, max_deliver=-1)
    stream.do(lambda js: js.add_consumer(stream.stream, everything))
    asked_for = topic.replace("*", "eu").replace(">", "eu.fr")
    stream.publish(Note("m1"), subject=cancelled)
    stream.publish(Note("m2"), subject=asked_for)
    found = {message_id(the_message(row)): the_message(row).topic for row in received(source, 2)}
    assert found == {"m1": cancelled, "m2": topic}


def test_the_example(stream: Stream, postgresql_url: str) -> None:
    paid = (("type", "order.paid"),)
    stream.publish(Note("o-1", b'{"id": 1, "amount": 5}', paid))
    with example(
        "nats_service:app", postgresql_url, NATS_URL=stream.address, ORDERS_SUBJECT=stream.topic
    ):
        eventually(lambda: booked(postgresql_url) == [(1, 5)])
        eventually(lambda: not stream.outstanding("billing"))


def test_a_connection_that_is_lost_without_an_end_is_replaced(
    nats_url: str, stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As behind a firewall that forgets it: the client's own pings took six minutes."""
    monkeypatch.setattr("txbox.brokers.nats._PULL_S", 0.5)
    monkeypatch.setattr("txbox.brokers.nats._CONFIRM_S", 1.0)
    with Proxy(nats_url) as proxy:
        nats = Nats(proxy.url, durable="shop", stream=stream.stream)
        source = nats.consumer([stream.topic], Alone())
        try:
            stream.publish(Note("m1"))
            source.settle(received(source))
            proxy.lose()
            found: list[Delivery] = []

            def noticed() -> bool:
                try:
                    source.receive(100, 0.1)
                except BrokerUnavailable:
                    return True
                return False

            started = time.monotonic()
            eventually(noticed, "the loss")
            # not before: the server would deliver it to the request of the lost connection, and again after ack_wait
            stream.publish(Note("m2"))

            def again() -> bool:
                with suppress(BrokerUnavailable):
                    found.extend(source.receive(100, 0.1))
                return bool(found)

            eventually(again, "the next message")
            # a request that gets no answer, and a new connection
            assert time.monotonic() - started < room(12)
            proxy.lose()
            # its acknowledgement is not confirmed on this one, but on the next
            with pytest.raises(BrokerError):
                source.settle(found)
            source.settle(found)
        finally:
            source.close()
        assert stream.outstanding() == 0
