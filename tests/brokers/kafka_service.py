"""A worker process on Kafka: `python -m tests.brokers.kafka_service '<plan as JSON>'`."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from datetime import timedelta
from typing import Any

from tests.shop import AT_ONCE, CONSUMER, add_effect
from txbox import App, Lease, Message
from txbox.brokers.kafka import Kafka
from txbox.testing import install_from_environment
from txbox.worker import Worker


def say(*what: object) -> None:
    # one write, so that lines do not mix
    os.write(1, (" ".join(map(str, what)) + "\n").encode())


def serve(plan: dict[str, Any]) -> int:
    # the first window after an assignment is leased before it runs (SEMANTICS 4.4): rows of a killed
    # worker come back when their lease has run out
    app = App(plan["url"], lease=Lease(duration=timedelta(seconds=1), max_starts=20))

    @app.handler(plan["topic"], consumer=CONSUMER, retry=AT_ONCE)
    def handle(message: Message[Any], tx: Any) -> None:
        say("handling", message.id)
        add_effect(tx, message.id, str(os.getpid()))
        time.sleep(plan.get("handle_s", 0.0))

    app.consume(
        Kafka(plan["bootstrap"], group=plan["group"], options=plan.get("options", {})),
        topics=[plan["topic"]],
    )
    return Worker(app).run()


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING)
    install_from_environment()
    sys.exit(serve(json.loads(sys.argv[1])))
