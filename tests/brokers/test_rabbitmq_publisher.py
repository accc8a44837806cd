"""Publishing to RabbitMQ: the conformance suite for publishers, and what is special about RabbitMQ."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from typing import Any

import pamqp.frame
import pytest
from aiormq.exceptions import AMQPConnectionError, ConnectionInternalError
from pamqp import commands
from yarl import URL

from tests.support.brokers.rabbitmq import on_server
from tests.support.brokers.rigs.rabbitmq import RabbitMQRig
from tests.support.proxy import Proxy
from tests.support.servers.control import ThrowawayRabbitMQ
from txbox import Message
from txbox.brokers.rabbitmq import RabbitMQ
from txbox.brokers.rabbitmq.client import Connection, _Frames
from txbox.brokers.rabbitmq.publisher import RabbitMQPublisher
from txbox.errors import (
    BrokerError,
    BrokerUnavailable,
    DestinationRefused,
    MessageRefused,
    NotTried,
)
from txbox.testing.brokers import (
    HOSTILE,
    KEYS,
    TIME,
    WITHIN_S,
    PublisherConformance,
    Rig,
    arrived,
    confirmed,
    ids,
    message,
    publisher_of,
    several,
)

pytestmark = pytest.mark.brokers


class TestRabbitMQPublisher(PublisherConformance):
    # a table has each name once: what is repeated becomes an array, which is JSON to the source
    headers = (*(pair for pair in HOSTILE if pair[0] != "twice"), ("twice", '["1", "2"]'))
    time = TIME.replace(microsecond=0)

    @pytest.fixture
    def rig(self, rabbitmq_url: str) -> Iterator[Rig]:
        with RabbitMQRig(rabbitmq_url) as opened_rig:
            yield opened_rig

    @pytest.fixture
    def throwaway_rig(self, throwaway_rabbitmq: ThrowawayRabbitMQ) -> Iterator[Rig]:
        with RabbitMQRig(throwaway_rabbitmq.url, throwaway_rabbitmq) as opened_rig:
            yield opened_rig

    @contextmanager
    def too_large(self, rig: Rig) -> Iterator[Message[Any]]:
        # 134 MB of payload would do as well: see below for what closes the channel
        yield message(rig, "large", headers=(("h", "x" * 140_000),))

    def test_a_connection_that_ended_just_now_is_a_server_that_is_away(
        self, rabbitmq_url: str
    ) -> None:
        async def ended() -> None:
            connection = Connection(URL(rabbitmq_url))
            await connection.connect()
            assert connection.transport is not None
            await connection.transport.connection.close()
            try:
                await connection.opened_channel()
            finally:
                await connection.close()

        with pytest.raises(AMQPConnectionError, match="has ended"):
            asyncio.run(ended())

    def test_a_time_that_the_property_cannot_hold_is_a_header(self, rig: Rig) -> None:
        times = [datetime(year, 1, 1, tzinfo=UTC) for year in (1, 1969, 1970, 2106, 2107, 9999)]
        batch = [message(rig, f"m{at.year}", time=at) for at in times]
        with publisher_of(rig) as publisher:
            assert list(publisher.publish(batch, WITHIN_S)) == [None] * len(times)
        assert [found.time for found in arrived(rig, len(times))] == times

    def test_a_queue_that_never_confirms_costs_its_own_messages_alone(self, rig: Rig) -> None:
        """Like a quorum queue without a majority: messages the other queues confirmed stay confirmed."""
        with publisher_of(rig) as publisher:
            publisher.publish([message(rig, "first")], WITHIN_S)
            publish = publisher._channel.basic_publish

            async def hanging(*given: Any, **options: Any) -> object:
                if options["routing_key"] == "hangs":
                    await asyncio.sleep(60)
                return await publish(*given, **options)

            publisher._channel.basic_publish = hanging
            batch = [message(rig, "m1"), message(rig, "m2", topic="hangs"), message(rig, "m3")]
            first, hung, last = publisher.publish(batch, 3)
        assert (first, last) == (None, None)
        assert type(hung) is DestinationRefused
        assert ids(arrived(rig, 3)) == {"first", "m1", "m3"}

    def test_the_message_that_closes_the_channel_is_found(self, rig: Rig) -> None:
        bad = message(rig, "bad", headers=(("CC", "text where the server wants an array"),))
        batch = [*several(rig, 40), bad, *several(rig, 40, first=40), bad]
        with publisher_of(rig) as publisher:
            answers = publisher.publish(batch, WITHIN_S)
        assert [at for at, answer in enumerate(answers) if answer is not None] == [40, 81]
        assert isinstance(answers[40], MessageRefused)
        assert isinstance(answers[81], MessageRefused)
        found = arrived(rig, 80)
        first = [row for at, row in enumerate(found) if row.id not in {o.id for o in found[:at]}]
        assert len(first) == 80
        # copies of what was on its way are behind their first, and the first of each are in the order of their key
        numbers = [int(str(row.id).removeprefix("m")) for row in first]
        for key in range(KEYS):
            of_key = [number for number in numbers if number % KEYS == key]
            assert of_key == sorted(of_key)

    def test_a_message_on_which_the_server_fails_costs_an_attempt(self, rig: Rig) -> None:
        """Like a header that crashes a plugin. Taken for a server that is away, it would be sent for ever."""

        async def failing(publish: Any, *given: Any, **options: Any) -> object:
            if options["properties"].message_id == "bad":
                raise ConnectionInternalError("INTERNAL_ERROR")
            return await publish(*given, **options)

        opened = RabbitMQPublisher._open_channel

        async def open_channel(publisher: RabbitMQPublisher) -> Any:
            channel = await opened(publisher)
            if not isinstance(channel.basic_publish, partial):
                channel.basic_publish = partial(failing, channel.basic_publish)
            return channel

        batch = [*several(rig, 5), message(rig, "bad"), *several(rig, 5, first=5)]
        with pytest.MonkeyPatch.context() as patched, publisher_of(rig) as publisher:
            patched.setattr(RabbitMQPublisher, "_open_channel", open_channel)
            (alone,) = publisher.publish([message(rig, "bad")], WITHIN_S)
            answers = publisher.publish(batch, WITHIN_S)
        assert type(alone) is BrokerError
        assert [at for at, answer in enumerate(answers) if answer is not None] == [5]
        assert type(answers[5]) is BrokerError

    def test_one_id_for_two_topics_is_told_apart(self, rig: Rig) -> None:
        """The client identifies returned messages by their id alone."""
        nowhere = self.unroutable(rig)
        batch = [
            message(rig, "m1", topic=nowhere),
            message(rig, "m1"),
            message(rig, "m1", topic=nowhere),
        ]
        with publisher_of(rig) as publisher:
            answers = publisher.publish(batch, WITHIN_S)
        assert [answer is None for answer in answers] == [False, True, False]

    def test_nothing_of_a_key_is_taken_behind_what_was_not(self, rig: Rig) -> None:
        """Pipelined, what is behind a refused message would be in the queue before it."""
        run = [message(rig, name, key="k") for name in "abcde"]
        run[2] = message(
            rig, "c", key="k", headers=(("CC", "text where the server wants an array"),)
        )
        others = [message(rig, name, key="o") for name in "xy"]
        with publisher_of(rig) as publisher:
            answers = publisher.publish([*run, *others], WITHIN_S)
            assert [type(answer) for answer in answers] == [
                type(None), type(None), MessageRefused, NotTried, NotTried, type(None), type(None),
            ]  # fmt: skip
            confirmed(publisher, run[3:])
        order = [str(found.id) for found in arrived(rig, 6) if found.key == "k"]
        assert list(dict.fromkeys(order)) == ["a", "b", "d", "e"]

    def test_of_a_long_run_the_rest_is_left_to_the_next_call(self, rig: Rig) -> None:
        """A distant broker would not confirm all of it in time, and one that is innocent would pay."""
        run = [message(rig, f"m{number}", key="k") for number in range(5)]
        with publisher_of(rig) as publisher:
            confirmed(publisher, [message(rig, "first")])
            publish = publisher._channel.basic_publish

            async def slow(*given: Any, **options: Any) -> object:
                await asyncio.sleep(1.1)
                return await publish(*given, **options)

            publisher._channel.basic_publish = slow
            answers = publisher.publish(run, 4)
        assert answers[0] is None
        assert all(answer is None or isinstance(answer, NotTried) for answer in answers)
        assert isinstance(answers[4], NotTried)

    def test_a_queue_that_is_full_is_an_error(self, rig: Rig) -> None:
        queue = f"full-{rig.topic}"
        arguments: Any = {"x-max-length": 1, "x-overflow": "reject-publish"}
        on_server(
            rig.address, lambda made: made.declare_queue(queue, durable=True, arguments=arguments)
        )
        try:
            with publisher_of(rig) as publisher:
                answers = publisher.publish(
                    [message(rig, name, topic=queue) for name in ("m1", "m2", "m3")], WITHIN_S
                )
        finally:
            on_server(rig.address, lambda channel: channel.queue_delete(queue))
        assert answers[0] is None
        assert all(
            type(answer) is DestinationRefused and "nack" in str(answer) for answer in answers[1:]
        )

    def test_on_an_exchange_the_topic_is_the_routing_key(self, rig: Rig) -> None:
        on_server(rig.address, lambda each: bind(each, rig.topic, "amq.topic", f"{rig.topic}.#"))
        with publisher_of(rig, exchange="amq.topic") as publisher:
            kept, lost = publisher.publish(
                [
                    message(rig, "m1", topic=f"{rig.topic}.paid"),
                    message(rig, "m2", topic="nowhere"),
                ],
                WITHIN_S,
            )
        assert kept is None
        assert "nowhere" in str(lost)
        assert "amq.topic" in str(lost)
        assert ids(arrived(rig, 1)) == {"m1"}

    @pytest.mark.parametrize("exchange", ["missing", "internal"])
    def test_an_exchange_that_takes_nothing_is_an_error_of_each_message(
        self, rig: Rig, exchange: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It kills none of them, and is not asked about each of them on a connection of its own."""
        name, connections = f"{exchange}-{rig.topic}", 0
        connect = Connection.connect

        async def counted(connection: Connection, *given: Any, **options: Any) -> None:
            nonlocal connections
            connections += 1
            await connect(connection, *given, **options)

        monkeypatch.setattr(Connection, "connect", counted)
        if exchange == "internal":
            on_server(
                rig.address,
                lambda each: each.declare_exchange(name, internal=True, auto_delete=True),
            )
        with publisher_of(rig, exchange=name) as publisher:
            answers = publisher.publish(several(rig, 100), WITHIN_S)
        assert {type(answer) for answer in answers} == {DestinationRefused}
        assert {name in str(answer) for answer in answers} == {True}
        assert connections <= 2

    def test_an_alarm_is_named(self, rabbitmq_url: str) -> None:
        """All that the server says is a frame to those that publish; then it reads nothing more of them."""
        with Proxy(rabbitmq_url) as proxy, RabbitMQRig(rabbitmq_url) as rig:
            publisher: Any = RabbitMQ(proxy.url).publisher()
            try:
                assert publisher.publish([message(rig, "m1")], WITHIN_S) == [None]
                frames = publisher._connection.frames

                async def read(frame: Any) -> None:
                    sent, reader = pamqp.frame.marshal(frame, 0), asyncio.StreamReader()
                    reader.feed_data(sent)
                    await _Frames(reader, frames).readexactly(len(sent))

                publisher._loop.call(read(commands.Connection.Blocked("low on memory")), 5.0)
                proxy.lose()
                with pytest.raises(BrokerUnavailable, match="takes no messages, low on memory"):
                    publisher.publish([message(rig, "m2")], 1.0)
                publisher._loop.call(read(commands.Connection.Unblocked()), 5.0)
                assert frames.blocked is None
            finally:
                publisher.close()

    def test_a_wrong_password_is_no_confirmation(self, rabbitmq_url: str) -> None:
        url = rabbitmq_url.replace("guest:guest", "guest:wrong")
        publisher = RabbitMQ(url).publisher()
        with pytest.raises(BrokerUnavailable, match="is unavailable") as caught:
            publisher.publish([Message(topic="orders", id="m1")], 3)
        assert "wrong" not in str(caught.value)
        publisher.close()


async def bind(channel: Any, queue: str, exchange: str, key: str) -> None:
    queue_object = await channel.get_queue(queue)
    await queue_object.bind(exchange, key)
