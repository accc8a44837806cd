"""Redis Streams: the conformance suite; entries, claims, trimmed entries."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from tests.support.brokers.example_runs import booked, example
from tests.support.brokers.rigs.redis import GROUP, RedisRig
from tests.support.servers.control import ThrowawayRedis
from tests.support.waiting import eventually
from txbox import ConfigurationError, Message
from txbox.brokers.base import Delivery
from txbox.brokers.redis import RedisConsumer, RedisStreams
from txbox.errors import BrokerError, BrokerUnavailable
from txbox.events import MessagesLost
from txbox.identity import message_id
from txbox.testing.brokers import Alone, Rig, SourceConformance

pytestmark = pytest.mark.brokers


class TestRedisStreams(SourceConformance):
    @pytest.fixture
    def rig(self, redis_url: str) -> Iterator[Rig]:
        with RedisRig(redis_url) as rig:
            yield rig

    @pytest.fixture
    def throwaway_rig(self, throwaway_redis: ThrowawayRedis) -> Iterator[Rig]:
        with RedisRig(throwaway_redis.url, throwaway_redis) as rig:
            yield rig


class Stream(RedisRig):
    def add(self, own_id: str | bytes | None, payload: bytes = b"{}", **fields: Any) -> bytes:
        made = {} if own_id is None else {"message-id": own_id}
        entry: bytes = self.client.xadd(self.topic, {**made, "payload": payload, **fields})
        return entry

    def pending(self) -> int:
        return int(self.client.xpending(self.topic, GROUP)["pending"])

    def opened(self, alone: Alone | None = None, **options: Any) -> RedisConsumer:
        source: RedisStreams = self.source(**options)
        return source.consumer([self.topic], alone or Alone())


@pytest.fixture
def stream(redis_url: str) -> Iterator[Stream]:
    with Stream(redis_url) as opened_stream:
        yield opened_stream


def received(source: RedisConsumer, count: int = 100) -> list[Delivery]:
    found: list[Delivery] = eventually(lambda: source.receive(count, 0.1))
    return found


def the_message(delivery: Delivery) -> Message[Any]:
    assert delivery.message is not None
    return delivery.message


def test_an_entry_becomes_a_message(stream: Stream) -> None:
    entry = stream.add(
        "m1",
        b"\xff\x00",
        type="order.paid",
        key=b"\xfe",
        note=b"\xfd\x00",
        **{"content-type": "x/y"},
    )
    source = stream.opened()
    (delivery,) = received(source)
    message = the_message(delivery)
    assert (message.topic, message.payload, message.id) == (stream.topic, b"\xff\x00", None)
    assert (message.type, message.key, message.content_type) == ("order.paid", "hex:fe", "x/y")
    assert message.headers.get("note") == b"\xfd\x00"
    assert "payload" not in message.headers.names()
    assert message_id(message) == "m1"
    assert message.time is not None
    assert abs(message.time - datetime.now(UTC)) < timedelta(minutes=1)
    assert message.origin["entry_id"] == entry.decode()
    assert not delivery.redelivered
    source.close()


def test_other_entries(stream: Stream) -> None:
    stream.client.xadd(
        stream.topic, {"ce_id": "1", "ce_source": "/a", "ce_type": "t", "ce_subject": "k", "x": "ü"}
    )
    stream.client.execute_command("XADD", stream.topic, "*", "note", "1", "note", "2")
    stream.client.xadd(stream.topic, {"data": b"\xff"})
    stream.client.execute_command(
        "XADD", stream.topic, "*", "payload", "p", "note", "1", "note", "2"
    )
    source = stream.opened()
    cloud, repeated, binary, multi = received(source)
    message = the_message(cloud)
    assert message.json() == {
        "ce_id": "1",
        "ce_source": "/a",
        "ce_type": "t",
        "ce_subject": "k",
        "x": "ü",
    }
    assert (message.type, message.key, message_id(message)) == ("t", "k", "/a 1")
    assert (repeated.message, repeated.raw) == (None, b"note=1\nnote=2")
    assert binary.raw == b"data=\xff"
    assert "UTF-8" in (binary.problem or "")
    assert the_message(multi).headers.get_all("note") == [b"1", b"2"]
    source.close()


def test_weak_ids_come_from_the_clock_of_the_server(stream: Stream) -> None:
    stream.client.xadd(stream.topic, {"payload": "a"}, id="5-1")
    made = stream.add(None)
    source = stream.opened(incarnation="2")
    chosen, deliveries = received(source)
    assert "weak_id" not in the_message(chosen).origin
    assert (
        message_id(the_message(deliveries), weak=True)
        == f"weak:redis:2:0:{stream.topic}:{made.decode()}"
    )
    source.close()


def test_trimmed_entries_raise_an_alarm(stream: Stream, caplog: pytest.LogCaptureFixture) -> None:
    for number in range(3):
        stream.add(f"m{number}")
    dead, living = (
        stream.opened(claim_idle=timedelta(seconds=1)),
        stream.opened(claim_idle=timedelta(seconds=1)),
    )
    first = received(dead)
    assert len(first) == 3
    stream.client.xtrim(stream.topic, maxlen=1, approximate=False)
    with caplog.at_level(logging.WARNING, "txbox"):
        (delivery,) = eventually(lambda: living.receive(10, 0.2))
        # what is pending under our name comes without fields
        dead._held.clear()
        dead._ready = False
        assert dead.receive(10, 0) == []
    assert message_id(the_message(delivery)) == "m2"
    assert delivery.redelivered
    assert living.lost_upstream == 2
    assert "lost upstream: 2 entries" in caplog.text
    living.settle([delivery])
    assert stream.pending() == 0


def test_own_pending_entries_that_were_trimmed_are_acknowledged(stream: Stream) -> None:
    stream.add("m0")
    alone = Alone()
    source = stream.opened(alone)
    received(source)
    stream.client.xtrim(stream.topic, maxlen=0, approximate=False)
    source._held.clear()
    source._ready = False
    assert source.receive(10, 0) == []
    assert source.lost_upstream == 1
    (event,) = alone.events
    assert isinstance(event, MessagesLost)
    assert (event.source, event.topic, event.count) == (source.name, stream.topic, 1)
    assert "MAXLEN" in event.reason
    assert stream.pending() == 0


def test_a_trimmed_entry_that_is_being_processed_is_not_lost(stream: Stream) -> None:
    """As after an outage longer than `claim_idle`, in which nothing could be tended."""
    stream.add("m0")
    source = stream.opened(claim_idle=timedelta(seconds=1))
    (delivery,) = received(source)
    stream.client.xtrim(stream.topic, maxlen=0, approximate=False)

    def is_claimed() -> bool:
        source._claim_at = 0.0
        assert source.receive(10, 0.1) == []
        return stream.pending() == 0

    eventually(is_claimed)
    assert source.lost_upstream == 0
    source.settle([delivery])
    source.close()


def test_several_streams_never_exceed_what_was_asked_for(redis_url: str) -> None:
    streams = [Stream(redis_url) for _ in range(3)]
    for each in streams:
        each.create()
        for number in range(10):
            each.add(f"m{number}")
    source = streams[0].source().consumer([each.topic for each in streams], Alone())
    found: list[Delivery] = []
    while len(found) < 30:
        batch = source.receive(4, 0.1)
        assert 1 <= len(batch) <= 4
        found += batch
    source.settle(found)
    assert [each.pending() for each in streams] == [0, 0, 0]
    source.close()
    for each in streams:
        # the consumer has left the group
        assert each.client.xinfo_consumers(each.topic, GROUP) == []
        each.remove()


def test_a_deleted_stream_is_read_from_its_beginning(stream: Stream) -> None:
    stream.add("m0")
    source = stream.opened()
    first = received(source)
    stream.client.delete(stream.topic)
    stream.add("m1")
    (delivery,) = received(source)
    assert message_id(the_message(delivery)) == "m1"
    source.settle([*first, delivery])
    source.tend(first)
    assert stream.pending() == 0
    source.close()


def test_a_group_lost_with_the_connection_misses_nothing_that_came_since(stream: Stream) -> None:
    """As when the server starts again without its data: `start` is only for a group that is new."""
    source = stream.opened(start="$")
    source._ready = False  # a call was cut off
    stream.client.delete(stream.topic)
    stream.add("m0")
    (delivery,) = received(source)
    assert message_id(the_message(delivery)) == "m0"
    source.settle([delivery])
    source.close()


def test_a_stream_that_is_deleted_while_its_group_is_made_misses_nothing(
    stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker ended with "Redis refused a command" when it started in that moment."""
    source = stream.opened(start="$")
    source._ready = source._was_ready = False
    create = source._create

    def lose(start: str) -> None:
        monkeypatch.undo()
        create(start)
        stream.client.delete(stream.topic)
        stream.add("m0")

    monkeypatch.setattr(source, "_create", lose)
    (delivery,) = received(source)
    assert message_id(the_message(delivery)) == "m0"
    source.settle([delivery])
    source.close()


def test_a_server_that_is_away_at_first(throwaway_redis: ThrowawayRedis) -> None:
    stream = Stream(throwaway_redis.url)
    stream.create()
    stream.add("m0")
    throwaway_redis.stop()
    source = stream.opened()
    with pytest.raises(BrokerUnavailable):
        source.receive(1, 0)
    throwaway_redis.start()
    (delivery,) = received(source)
    throwaway_redis.stop()
    with pytest.raises(BrokerUnavailable):
        source.settle([delivery])
    throwaway_redis.start()
    # it was not acknowledged: it comes again
    (again,) = received(source)
    assert again.redelivered
    source.settle([again])
    assert stream.pending() == 0
    source.close()


def test_a_right_that_is_taken_away_is_waited_for(stream: Stream) -> None:
    """It worked before, so it is not the configuration: whoever took the right away may give it back."""
    stream.client.acl_setuser(
        "reader", enabled=True, passwords=["+pw"], keys=["*"], categories=["+@all"]
    )
    source = stream.opened(username="reader", password="pw")
    stream.client.acl_setuser("reader", enabled=True, keys=["*"], categories=["-@stream"])
    with pytest.raises(BrokerUnavailable, match="@stream"):
        source.receive(1, 0)
    stream.client.acl_setuser("reader", enabled=True, keys=["*"], categories=["+@stream"])
    stream.add("m0")
    assert len(received(source)) == 1
    source.close()
    stream.client.acl_deluser("reader")


def test_what_can_never_work_is_refused(stream: Stream) -> None:
    with pytest.raises(ConfigurationError, match="decode_responses"):
        stream.source(decode_responses=True)
    with pytest.raises(ConfigurationError, match="decode_responses"):
        RedisStreams(stream.address + "?decode_responses=true", group=GROUP)
    with pytest.raises(ConfigurationError, match="retry"):
        stream.source(retry=None)
    with pytest.raises(ConfigurationError, match="group"):
        RedisStreams(stream.address).consumer([stream.topic], Alone())
    with pytest.raises(ConfigurationError, match="claim_idle"):
        stream.source(claim_idle=timedelta(0))
    with pytest.raises(ConfigurationError, match="URL"):
        RedisStreams("nonsense", group=GROUP)
    with pytest.raises(ConfigurationError, match="by name"):
        stream.source().consumer(["*"], Alone())
    stream.client.set(stream.topic, "text")
    with pytest.raises(ConfigurationError, match="not a stream"):
        stream.opened()
    with pytest.raises(ConfigurationError, match="password"):
        RedisStreams(stream.address, group=GROUP, username="nobody", password="wrong").consumer(
            [stream.topic], Alone()
        )
    assert issubclass(BrokerUnavailable, BrokerError)


def test_the_example(stream: Stream, postgresql_url: str) -> None:
    stream.add("o-1", b'{"id": 1, "amount": 5}', type="order.paid")
    with example(
        "redis_service:app", postgresql_url, REDIS_URL=stream.address, ORDERS_STREAM=stream.topic
    ):
        eventually(lambda: booked(postgresql_url) == [(1, 5)])
        eventually(lambda: stream.client.xpending(stream.topic, "billing")["pending"] == 0)
