"""RabbitMQ: the points of every source."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping

import pytest

from tests.support.broker_fixtures import throwaway
from tests.support.brokers.conformance import SourceConformance, each_once, service
from tests.support.brokers.rigs import Note, Rig
from tests.support.brokers.rigs.rabbitmq import RabbitMQRig
from tests.support.servers.control import ThrowawayRabbitMQ
from tests.support.shop import Shop
from tests.support.waiting import DEADLINE_S, eventually
from tests.support.workers import running, worker

pytestmark = pytest.mark.brokers


class TestRabbitMQ(SourceConformance):
    @pytest.fixture
    def rig(self, rabbitmq_url: str) -> Iterator[Rig]:
        with RabbitMQRig(rabbitmq_url) as rig:
            yield rig

    @pytest.fixture
    def throwaway_rig(self, throwaway_rabbitmq: ThrowawayRabbitMQ) -> Iterator[Rig]:
        with RabbitMQRig(throwaway_rabbitmq.url, throwaway_rabbitmq) as rig:
            yield rig

    @pytest.fixture
    def impatient_rig(self) -> Iterator[Rig]:
        for server in throwaway("rabbitmq", _Impatient()):
            with RabbitMQRig(server.url, server) as rig:
                yield rig

    def test_a_slow_handler_runs_once(self, impatient_rig: Rig, shop: Shop) -> None:
        """Nothing extends a delivery here: the server closes its channel, and delivers it again."""
        go = threading.Event()
        watched = service(shop, impatient_rig, lambda _: go.wait(DEADLINE_S))
        impatient_rig.publish(Note("m1"))
        with running(worker(shop.app)) as codes:
            eventually(lambda: len(watched.received) >= 2 and watched.received[-1].redelivered)
            go.set()
            eventually(lambda: watched.settled)
            impatient_rig.publish(Note("m2"))
            eventually(lambda: shop.effects() == 2)
            assert codes == []
        assert shop.calls == ["m1", "m2"]
        each_once(shop, 2)
        assert impatient_rig.outstanding() == 0


class _Impatient(ThrowawayRabbitMQ):
    """Takes back what is not acknowledged within a second."""

    def environment(self) -> Mapping[str, str]:
        known, name = super().environment(), "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS"
        quick = "-rabbit consumer_timeout 1000 -rabbit channel_tick_interval 500"
        return {**known, name: f"{known[name]} {quick}"}
