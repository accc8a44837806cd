"""Publishing to Redis: the conformance suite for publishers, and what is special about Redis."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any

import pytest
import redis

from tests.support.brokers.rigs.redis import RedisRig
from tests.support.servers.control import ThrowawayRedis
from txbox import Message
from txbox.brokers.redis import RedisPublisher, RedisStreams
from txbox.errors import (
    BrokerError,
    BrokerUnavailable,
    ConfigurationError,
    DestinationRefused,
    MessageRefused,
    NotTried,
)
from txbox.testing.brokers import (
    HOSTILE,
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


class TestRedisPublisher(PublisherConformance):
    # fields have names and bytes, and nothing else
    headers = tuple(
        (name, value.encode() if isinstance(value, str) else value or b"")
        for name, value in HOSTILE
    )

    @pytest.fixture
    def rig(self, redis_url: str) -> Iterator[Rig]:
        with RedisRig(redis_url) as opened_rig:
            yield opened_rig

    @pytest.fixture
    def throwaway_rig(self, throwaway_redis: ThrowawayRedis) -> Iterator[Rig]:
        with RedisRig(throwaway_redis.url, throwaway_redis) as opened_rig:
            yield opened_rig

    def unroutable(self, rig: Rig) -> str:
        key = f"no-stream-{rig.topic}"
        with redis.Redis.from_url(rig.address) as client:
            client.set(key, "text", ex=60)
        return key

    @contextmanager
    def too_large(self, rig: Rig) -> Iterator[Message[Any]]:
        with redis.Redis.from_url(rig.address) as client:
            before = str(client.config_get("proto-max-bulk-len")["proto-max-bulk-len"])
            client.config_set("proto-max-bulk-len", 1024 * 1024)
            try:
                yield message(rig, "large", payload=b"x" * (1024 * 1024 + 1))
            finally:
                client.config_set("proto-max-bulk-len", before)

    def test_a_header_named_like_the_payload_stays_a_header(self, rig: Rig) -> None:
        with publisher_of(rig) as publisher:
            confirmed(
                publisher, [message(rig, "m1", payload=b"mine", headers=(("payload", "other"),))]
            )
        (found,) = arrived(rig, 1)
        assert (found.payload, found.headers.get("payload")) == (b"mine", b"other")

    def test_a_run_of_a_key_is_taken_whole_or_not_at_all(
        self, rig: Rig, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """What the server refuses in the middle leaves nothing of the run, so that nothing overtakes it."""
        write = RedisPublisher._command

        def command(publisher: RedisPublisher, one: Message[Any]) -> list[bytes]:
            if one.id == "unwritable":
                raise MessageRefused("too large")
            return [b"XADD"] if one.id == "wrong" else write(publisher, one)

        monkeypatch.setattr(RedisPublisher, "_command", command)
        runs = {
            "a": ["a1", "wrong", "a3"],
            "b": ["b1", "b2", "b3"],
            "c": ["c1", "unwritable", "c3"],
            "d": [f"d{number}" for number in range(1200)],  # more than is sent at a time
        }
        sent = [message(rig, name, key=key) for key, names in runs.items() for name in names]
        with publisher_of(rig) as publisher:
            answers = dict(
                zip([one.id for one in sent], publisher.publish(sent, WITHIN_S), strict=True)
            )
        refused = {name: type(answer) for name, answer in answers.items() if answer is not None}
        assert refused == {
            "a1": BrokerError, "wrong": BrokerError, "a3": BrokerError, "unwritable": MessageRefused, "c3": NotTried,
        }  # fmt: skip
        with redis.Redis.from_url(rig.address) as client:
            entries: Any = client.xrange(rig.topic)
        order = [fields[b"message-id"].decode() for _, fields in entries]
        assert order == ["b1", "b2", "b3", "c1", *runs["d"]]

    def test_maxlen_trims_and_nothing_does_without_it(self, rig: Rig) -> None:
        with publisher_of(rig) as publisher:
            confirmed(publisher, several(rig, 1000))
        with redis.Redis.from_url(rig.address) as client:
            assert client.xlen(rig.topic) == 1000
            with publisher_of(rig, maxlen=200) as publisher:
                confirmed(publisher, several(rig, 100, first=1000))
            assert 200 <= client.xlen(rig.topic) < 500

    def test_what_too_few_replicas_have_is_not_confirmed(self, rig: Rig) -> None:
        with publisher_of(rig, replicas=1) as publisher:
            answers = publisher.publish(several(rig, 2), 1.0)
        assert all(
            type(answer) is DestinationRefused and "0 of 1" in str(answer) for answer in answers
        )
        assert ids(arrived(rig, 2)) == {"m0", "m1"}

    def test_a_server_that_refuses_every_write_pauses_the_publisher(
        self, throwaway_rig: Rig
    ) -> None:
        with (
            redis.Redis.from_url(throwaway_rig.address) as client,
            publisher_of(throwaway_rig) as publisher,
        ):
            confirmed(publisher, [message(throwaway_rig, "m1")])
            refuses: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
                "memory": (
                    # a byte: what an empty server needs differs
                    lambda: client.config_set("maxmemory", "1"),
                    lambda: client.config_set("maxmemory", "0"),
                ),
                "good replicas": (
                    lambda: client.config_set("min-replicas-to-write", "1"),
                    lambda: client.config_set("min-replicas-to-write", "0"),
                ),
                # of a server that is not there
                "replica": (
                    lambda: client.execute_command("REPLICAOF", "127.0.0.1", "1"),
                    lambda: client.execute_command("REPLICAOF", "NO", "ONE"),
                ),
            }
            for said, (begin, end) in refuses.items():
                begin()
                for _ in range(2):
                    with pytest.raises(BrokerUnavailable, match=said):
                        publisher.publish(several(throwaway_rig, 3), WITHIN_S)
                end()
                confirmed(publisher, [message(throwaway_rig, said)])

    def test_a_right_that_was_taken_away_pauses_the_topic(self, throwaway_rig: Rig) -> None:
        with redis.Redis.from_url(throwaway_rig.address) as client:
            rules = ("on", ">secret", "+@all", "~*")
            client.execute_command("ACL", "SETUSER", "shop", *rules)
            url = throwaway_rig.address.replace("://", "://shop:secret@")
            with closing(RedisStreams(url).publisher()) as publisher:
                confirmed(publisher, [message(throwaway_rig, "m1")])
                client.execute_command("ACL", "SETUSER", "shop", "resetkeys", "~other")
                denied, kept = publisher.publish(
                    [message(throwaway_rig, "m2"), message(throwaway_rig, "m3", topic="other")],
                    WITHIN_S,
                )
                assert (type(denied), kept) == (DestinationRefused, None)
                client.execute_command("ACL", "SETUSER", "shop", "-xadd")
                (denied,) = publisher.publish([message(throwaway_rig, "m2")], WITHIN_S)
                assert type(denied) is DestinationRefused
                client.execute_command("ACL", "DELUSER", "shop")
                with pytest.raises(BrokerUnavailable):
                    publisher.publish([message(throwaway_rig, "m2")], WITHIN_S)


def test_without_a_group_it_only_publishes() -> None:
    nothing: Any = None
    assert RedisStreams("redis://user:secret@localhost:1/3").name == "redis:localhost:1/3"
    with pytest.raises(ConfigurationError, match="group"):
        RedisStreams("redis://localhost:1").consumer(["orders"], nothing)
    with pytest.raises(ConfigurationError, match="maxlen"):
        RedisStreams("redis://localhost:1", maxlen=0)
