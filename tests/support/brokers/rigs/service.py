"""A worker process over a rig, to be killed: `python -m tests.support.brokers.rigs.service '<plan as JSON>'`."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from importlib import import_module
from typing import Any

from tests.support.brokers.rigs import Rig
from tests.support.effect import AT_ONCE, CONSUMER, add_effect
from tests.support.servers import ROOT
from tests.support.warm import Warm
from txbox import App, Lease, Message
from txbox.testing import install_from_environment
from txbox.worker import Worker

#: What a killed worker had leased is free after a second; each restart counts a start.
SHORT = Lease(duration=timedelta(seconds=1), max_starts=20)


@contextmanager
def process(rig: Rig, url: str, crash: str | None = None) -> Iterator[Warm]:
    """A worker that kills itself at the crash point; it is killed when the block ends."""
    kind = type(rig)
    plan = {
        "rig": [kind.__module__, kind.__name__],
        "address": rig.address,
        "topic": rig.topic,
        "url": url,
    }
    environment = dict(os.environ)
    if crash is not None:
        environment |= {"TXBOX_CRASH_AT": crash, "TXBOX_CRASH_NTH": "1"}
    worker = Warm(
        ["tests.support.brokers.rigs.service", json.dumps(plan)], cwd=ROOT, env=environment
    )
    try:
        yield worker
    finally:
        worker.kill()
        worker.wait()


def main(plan: dict[str, Any]) -> int:
    install_from_environment()
    module, name = plan["rig"]
    rig: Rig = getattr(import_module(module), name)(plan["address"])
    rig.topic = plan["topic"]
    app = App(plan["url"], lease=SHORT)

    @app.handler(rig.topic, consumer=CONSUMER, retry=AT_ONCE)
    def handle(message: Message[Any], tx: Any) -> None:
        add_effect(tx, message.headers.text("message-id"))

    app.consume(rig.source(**rig.replaceable))
    return Worker(app).run()


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
