"""A worker process on the table of an ordered consumer: `python -m tests.support.ordered_service '<plan as JSON>'`.

Handlers note their step; every seventh version of a key fails once. With TXBOX_CRASH_AT in the
environment the process kills itself there.
"""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

from tests.support.effect import AT_ONCE, CONSUMER, TOPIC
from tests.support.ordered import add_step
from txbox import App, Lease, Message
from txbox.brokers.file import File
from txbox.testing import install_from_environment
from txbox.worker import Worker


def service(url: str, way: str) -> App:
    app = App(url, lease=Lease(duration=timedelta(seconds=2), max_starts=10))
    options: dict[str, Any] = {"ordered": True} if way == "ordered" else {"sequence": "body.n"}

    @app.handler(TOPIC, consumer=CONSUMER, retry=AT_ONCE, concurrency=2, **options)
    def handle(message: Message[Any], tx: Any) -> None:
        add_step(tx, message)
        if message.json()["n"] % 7 == 0 and message.attempt == 1:
            raise ValueError("every seventh, once")

    return app


def main() -> int:
    plan = json.loads(sys.argv[1])
    install_from_environment()
    app = service(plan["url"], plan["way"])
    if plan.get("file"):
        app.consume(File(Path(plan["file"]), topic=TOPIC))
    # with versions, all that is left may wait two seconds for its next look: `once` is idle then, and ends
    return Worker(app, once=plan["way"] == "ordered").run()


if __name__ == "__main__":
    sys.exit(main())
