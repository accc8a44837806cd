"""Kafka: the points of every source."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.brokers.conformance import SourceConformance
from tests.support.brokers.rigs import Rig
from tests.support.brokers.rigs.kafka import KafkaRig
from tests.support.servers.control import ThrowawayKafka

pytestmark = pytest.mark.brokers


class TestKafka(SourceConformance):
    @pytest.fixture
    def rig(self, kafka_bootstrap: str) -> Iterator[Rig]:
        with KafkaRig(kafka_bootstrap) as rig:
            yield rig

    @pytest.fixture
    def throwaway_rig(self, throwaway_kafka: ThrowawayKafka) -> Iterator[Rig]:
        with KafkaRig(throwaway_kafka.bootstrap, throwaway_kafka) as rig:
            yield rig
