"""Publishing to Redis: the conformance suite for publishers, and what is special about Redis."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import redis

from tests.support.brokers.publisher_conformance import (
    HOSTILE,
    WITHIN_S,
    PublisherConformance,
    arrived,
    confirmed,
    ids,
    message,
    publisher_of,
    several,
)
from tests.support.brokers.rigs import Rig
from tests.support.brokers.rigs.redis import RedisRig
from tests.support.servers.control import ThrowawayRedis
from txbox import Message
from txbox.brokers.redis import RedisStreams
from txbox.errors import BrokerError, ConfigurationError, MessageRefused

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
            isinstance(answer, BrokerError) and "0 of 1" in str(answer) for answer in answers
        )
        assert ids(arrived(rig, 2)) == {"m0", "m1"}

    def test_a_server_without_memory_takes_nothing_now(self, throwaway_rig: Rig) -> None:
        with (
            redis.Redis.from_url(throwaway_rig.address) as client,
            publisher_of(throwaway_rig) as publisher,
        ):
            confirmed(publisher, [message(throwaway_rig, "m1")])
            client.config_set("maxmemory", "1")  # a byte: what an empty server needs differs
            answers = publisher.publish(
                [message(throwaway_rig, "m2"), message(throwaway_rig, "m3")], WITHIN_S
            )
            assert all(
                isinstance(answer, BrokerError) and "memory" in str(answer) for answer in answers
            )
            assert not any(isinstance(answer, MessageRefused) for answer in answers)
            client.config_set("maxmemory", "0")
            confirmed(publisher, [message(throwaway_rig, "m2"), message(throwaway_rig, "m3")])


def test_without_a_group_it_only_publishes() -> None:
    nothing: Any = None
    assert RedisStreams("redis://user:secret@localhost:1/3").name == "redis:localhost:1/3"
    with pytest.raises(ConfigurationError, match="group"):
        RedisStreams("redis://localhost:1").open(["orders"], nothing, nothing)
    with pytest.raises(ConfigurationError, match="maxlen"):
        RedisStreams("redis://localhost:1", maxlen=0)
