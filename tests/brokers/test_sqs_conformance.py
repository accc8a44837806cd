"""SQS: the points of every source."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.brokers.conformance import SourceConformance
from tests.support.brokers.rigs import Rig
from tests.support.brokers.rigs.sqs import SqsRig
from tests.support.servers.control import ThrowawayElasticMQ

pytestmark = pytest.mark.brokers


class TestSqs(SourceConformance):
    @pytest.fixture
    def rig(self, sqs_url: str) -> Iterator[Rig]:
        with SqsRig(sqs_url) as rig:
            yield rig

    @pytest.fixture
    def throwaway_rig(self, throwaway_sqs: ThrowawayElasticMQ) -> Iterator[Rig]:
        with SqsRig(throwaway_sqs.url, throwaway_sqs) as rig:
            yield rig
