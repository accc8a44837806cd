"""NATS JetStream: the points of every source."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.brokers.conformance import SourceConformance
from tests.support.brokers.rigs import Rig
from tests.support.brokers.rigs.nats import NatsRig
from tests.support.servers.control import ThrowawayNats

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
