"""A worker on one queue that may kill itself: `python -m tests.brokers.sqs_service '<plan as JSON>'`."""

from __future__ import annotations

import json
import os
import signal
import sys
from datetime import timedelta
from typing import Any

from tests.shop import CONSUMER, add_effect
from txbox import App, Message, steps
from txbox.brokers.sqs import SQS
from txbox.worker import Worker


def main() -> int:
    plan = json.loads(sys.argv[1])
    if "kill_at" in plan:
        _die_at(plan["kill_at"], plan["times"])
    app = App(plan["database"])

    @app.handler(plan["queue"], consumer=CONSUMER)
    def handle(message: Message[Any], tx: Any) -> None:
        add_effect(tx, message.headers.text("message-id"))

    source = SQS(
        plan["queue"],
        visibility=timedelta(seconds=2),
        endpoint_url=plan["endpoint"],
        region_name="elasticmq",
        aws_access_key_id="any",
        aws_secret_access_key="any",
    )
    app.consume(source)
    return Worker(app, maintenance=False).run()


def _die_at(point: str, times: int) -> None:
    seen = 0

    def crash(name: str) -> None:
        nonlocal seen
        seen += name == point
        if seen >= times:
            os.kill(os.getpid(), signal.SIGKILL)

    steps.crash_point = crash


if __name__ == "__main__":
    sys.exit(main())
