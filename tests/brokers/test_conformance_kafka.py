"""Kafka: the points of every source."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.brokers.conformance import SourceConformance
from tests.brokers.rigs import Rig
from tests.brokers.rigs.kafka import KafkaRig
from tests.servers.control import ThrowawayKafka

pytestmark = pytest.mark.brokers


class TestKafka(SourceConformance):
    @pytest.fixture
    def rig(self, kafka_bootstrap: str) -> Iterator[Rig]:
        with KafkaRig(kafka_bootstrap) as own:
            yield own

    @pytest.fixture
    def own_rig(self, own_kafka: ThrowawayKafka) -> Iterator[Rig]:
        with KafkaRig(own_kafka.bootstrap, own_kafka) as own:
            yield own
