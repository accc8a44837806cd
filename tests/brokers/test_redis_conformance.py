"""Redis Streams: the points of every source."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.brokers.conformance import SourceConformance
from tests.support.brokers.rigs import Rig
from tests.support.brokers.rigs.redis import RedisRig
from tests.support.servers.control import ThrowawayRedis

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
