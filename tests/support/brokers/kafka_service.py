"""A worker process on Kafka: `python -m tests.support.brokers.kafka_service '<plan as JSON>'`.

It prints a line for each handler call, event, rebalance and commit, in the order of their happening.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import confluent_kafka
from confluent_kafka import KafkaException, TopicPartition

from tests.support.effect import AT_ONCE, CONSUMER, add_effect
from txbox import App, Lease, Limits, Message
from txbox.brokers.kafka import Kafka
from txbox.events import Event
from txbox.testing import install_from_environment
from txbox.worker import Worker


def say(*what: object) -> None:
    # one write, so that lines do not mix
    os.write(1, (" ".join(map(str, what)) + "\n").encode())


class Outspoken(confluent_kafka.Consumer):
    """The client's consumer, which says what its group does to it and what it commits."""

    def subscribe(self, topics: list[str], **callbacks: Any) -> None:  # type: ignore[override]  # pyright: ignore[reportIncompatibleMethodOverride]
        super().subscribe(
            topics, **{name: _said(name, callback) for name, callback in callbacks.items()}
        )

    def commit(self, **options: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        asked = _fronts(options["offsets"])
        try:
            answered = super().commit(**options)
        except KafkaException as error:
            say("refused", error.args[0].name(), *asked)
            raise
        say("committed", *_fronts([one for one in answered or () if one.error is None]))
        return answered


def _said(name: str, callback: Callable[..., None]) -> Callable[..., None]:
    def speak(consumer: confluent_kafka.Consumer, partitions: list[TopicPartition]) -> None:
        say(name, *(partition.partition for partition in partitions))
        callback(consumer, partitions)
        say(f"{name}:done", *(partition.partition for partition in partitions))

    return speak


def _fronts(partitions: list[TopicPartition]) -> list[str]:
    return [f"{partition.partition}:{partition.offset}" for partition in partitions]


def tell(event: Event) -> None:
    say("event", type(event).__name__, getattr(event, "message_id", ""))


def serve(plan: dict[str, Any]) -> int:
    # the first window after an assignment is leased before it runs (promise 4.4): rows of a killed
    # worker come back when their lease has run out
    lease = timedelta(seconds=plan.get("lease_s", 2))
    app = App(
        plan["url"],
        lease=Lease(duration=lease, max_starts=20),
        limits=Limits(lock_timeout=lease / 2),
        observers=[tell],
    )

    @app.handler(
        plan["topic"], consumer=CONSUMER, retry=AT_ONCE, concurrency=plan.get("concurrency", 1)
    )
    def handle(message: Message[Any], tx: Any) -> None:
        say("handling", message.id)
        add_effect(tx, message.id, str(os.getpid()))
        time.sleep(plan.get("handle_s", 0.0))
        say("handled", message.id)

    confluent_kafka.Consumer = Outspoken  # type: ignore[misc]
    app.consume(
        Kafka(
            plan["bootstrap"],
            group=plan["group"],
            share=plan.get("share", False),
            options=plan.get("options", {}),
        ),
        topics=[plan["topic"]],
    )
    return Worker(app).run()


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING)
    install_from_environment()
    sys.exit(serve(json.loads(sys.argv[1])))
