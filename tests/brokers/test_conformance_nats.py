"""NATS JetStream: the points of every source."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.brokers.conformance import SourceConformance
from tests.brokers.rigs import Rig
from tests.brokers.rigs.nats import NatsRig
from tests.servers.control import ThrowawayNats

pytestmark = pytest.mark.brokers


class TestNats(SourceConformance):
    @pytest.fixture
    def rig(self, nats_url: str) -> Iterator[Rig]:
        with NatsRig(nats_url) as own:
            yield own

    @pytest.fixture
    def own_rig(self, own_nats: ThrowawayNats) -> Iterator[Rig]:
        with NatsRig(own_nats.url, own_nats) as own:
            yield own
