"""SQS: the points of every source."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.brokers.conformance import SourceConformance
from tests.brokers.rigs import Rig
from tests.brokers.rigs.sqs import SqsRig
from tests.servers.control import ThrowawayElasticMQ

pytestmark = pytest.mark.brokers


class TestSqs(SourceConformance):
    @pytest.fixture
    def rig(self, sqs_url: str) -> Iterator[Rig]:
        with SqsRig(sqs_url) as own:
            yield own

    @pytest.fixture
    def own_rig(self, own_sqs: ThrowawayElasticMQ) -> Iterator[Rig]:
        with SqsRig(own_sqs.url, own_sqs) as own:
            yield own
