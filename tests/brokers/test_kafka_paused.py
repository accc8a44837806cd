"""A broker that is away for longer than the session of the group: the member that comes back must receive."""

from __future__ import annotations

import time

import pytest

from tests.support.brokers.kafka import MockCluster, opened, produce
from tests.support.waiting import eventually
from txbox.brokers.base import Delivery
from txbox.brokers.kafka import Kafka
from txbox.errors import BrokerUnavailable

pytestmark = [pytest.mark.brokers, pytest.mark.slow]


def test_what_was_lost_while_it_was_paused_is_received_again() -> None:
    mock = MockCluster()
    try:
        topic = mock.topic()
        produce(mock.bootstrap, topic, ["before"])
        options = {"session.timeout.ms": 6000, "heartbeat.interval.ms": 500, "log_level": 0}
        with opened(Kafka(mock.bootstrap, group="shop", options=options), topic) as source:
            found: list[Delivery] = []

            def receive() -> None:
                try:
                    found.extend(source.receive(10, 0.2))
                except BrokerUnavailable:
                    time.sleep(0.05)

            def lost() -> bool:
                receive()
                return not source._partitions

            def received(count: int) -> bool:
                receive()
                return len(found) >= count

            eventually(lambda: received(1))
            source.settle(found)
            mock.broker(up=False)
            # no longer assigned: the session ended while the partition was paused
            eventually(lost)
            mock.broker(up=True)
            produce(mock.bootstrap, topic, ["after"])
            eventually(lambda: received(2), "what was sent after the broker came back")
    finally:
        mock.close()
