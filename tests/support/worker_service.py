"""A worker process to signal and kill: `python -m tests.support.worker_service '<plan as JSON>'`.

It prints a line for each thing it does. A handler whose message has the type `hold` waits for the
file that the plan's `gate` names; one with the type `die` kills its process.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

from tests.support.effect import AT_ONCE, CONSUMER, TOPIC, add_effect
from txbox import App, Lease, Message
from txbox.brokers import file
from txbox.brokers.file import File
from txbox.events import ConsumptionPaused, ConsumptionResumed, Event, WorkerStarted
from txbox.testing import install_from_environment
from txbox.worker import Worker, pump, supervise


def say(*what: object) -> None:
    # one write, so that lines of several processes do not mix
    os.write(1, (" ".join(map(str, what)) + "\n").encode())


def observe(event: Event) -> None:
    if isinstance(event, WorkerStarted):
        say("started", os.getpid())
    if isinstance(event, ConsumptionPaused):
        say("paused")
    if isinstance(event, ConsumptionResumed):
        say("resumed")


class _Told(Worker):
    """A worker that says when nothing more will be started."""

    def _drain(self) -> None:
        super()._drain()
        say("draining")


def serve(plan: dict[str, Any]) -> int:
    # what reads the file of a process that was killed waits this long for it
    pump._LEASE_S, file._WAIT_FOR_LEASE_S = 1.0, 0.1
    app = App(
        plan["url"],
        lease=Lease(
            duration=timedelta(seconds=plan.get("lease_s", 60)),
            max_starts=plan.get("max_starts", 3),
            batch=20,
        ),
        observers=[observe],
    )

    @app.handler(
        TOPIC, consumer=CONSUMER, retry=AT_ONCE, mode=plan.get("mode", "inline"),
        concurrency=plan.get("concurrency", 1),
    )  # fmt: skip
    def handle(message: Message[Any], tx: Any) -> None:
        say("handling", message.id)
        add_effect(tx, message.id, str(os.getpid()))
        if message.type == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if message.type == "hold":
            gate = Path(plan["gate"])
            while not gate.exists():
                time.sleep(0.01)
        say("handled", message.id)

    if plan.get("file"):
        app.consume(File(plan["file"], topic=TOPIC, follow=plan.get("follow", False)))
    worker = _Told(app, once=plan.get("once", False), maintenance=plan.get("maintenance", False))
    return worker.run()


def main() -> int:
    plan = json.loads(sys.argv[1])
    install_from_environment()
    processes = plan.pop("processes", 1)
    if processes > 1:
        argv = [sys.executable, "-m", "tests.support.worker_service", json.dumps(plan)]
        return supervise(argv, processes)
    return serve(plan)


if __name__ == "__main__":
    sys.exit(main())
