"""Redis Streams: the points of every source."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.brokers.conformance import SourceConformance
from tests.brokers.rigs import Rig
from tests.brokers.rigs.redis import RedisRig
from tests.servers.control import ThrowawayRedis

pytestmark = pytest.mark.brokers


class TestRedisStreams(SourceConformance):
    @pytest.fixture
    def rig(self, redis_url: str) -> Iterator[Rig]:
        with RedisRig(redis_url) as own:
            yield own

    @pytest.fixture
    def own_rig(self, own_redis: ThrowawayRedis) -> Iterator[Rig]:
        with RedisRig(own_redis.url, own_redis) as own:
            yield own
