"""A service whose broker or database is in trouble: the App of the plan in TXBOX_TEST_PLAN, for `txbox run`."""

from __future__ import annotations

import importlib
import json
import os
from typing import Any

from txbox import App, Message
from txbox.observers import logging
from txbox.testing.brokers import Rig
from txbox.worker import pump, relay

_RIGS = {
    "kafka": "KafkaRig", "rabbitmq": "RabbitMQRig", "sqs": "SqsRig", "nats": "NatsRig", "redis": "RedisRig",
}  # fmt: skip


def rig_of(broker: str, address: str, topic: str | None = None) -> Rig:
    """The rig of a broker; no other client is imported, which takes longer than all the rest."""
    module = importlib.import_module(f"tests.support.brokers.rigs.{broker}")
    rig: Rig = getattr(module, _RIGS[broker])(address)
    if topic is not None:
        rig.topic = topic
        if broker == "nats":
            vars(rig)["stream"] = topic.removesuffix(".paid")
    return rig


def make(plan: dict[str, Any]) -> App:
    if "longest_pause_s" in plan:
        pump._PAUSE_S = (pump._PAUSE_S[0], plan["longest_pause_s"])
        relay._PAUSE_S = (relay._PAUSE_S[0], plan["longest_pause_s"])
        # trouble is told again after a minute, which a busy machine may need to end it
        logging._REPEATED_EVERY_S = 3600.0
    app = App(plan["database"])

    @app.handler("orders" if not plan.get("consumes") else plan["topic"], consumer="billing")
    def handle(message: Message[Any], tx: Any) -> None:
        del message, tx

    if plan.get("consumes"):
        app.consume(rig_of(plan["broker"], plan["address"], plan["topic"]).source())
    if plan.get("publishes"):
        app.publish(
            rig_of(plan["broker"], plan["address"], plan["topic"]).source(), topics=[plan["topic"]]
        )
    return app


app = make(json.loads(os.environ["TXBOX_TEST_PLAN"])) if "TXBOX_TEST_PLAN" in os.environ else None
