"""A worker process to kill: takes deliveries, prints what became of each, dies where the plan says.

`python -m tests.support.scenario_service '<plan as JSON>'`. It prints one JSON object a line: `at` (a point it
passed), `acked` with the outcome, `done`. It goes on at a point in `hold` when a line comes in.
"""

from __future__ import annotations

import base64
import json
import logging
import os
import signal
import sys
from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import Any

import txbox.session
from tests.support.effect import AT_ONCE, CONSUMER, TOPIC, add_effect
from txbox import App, Lease, Message, Outcome
from txbox.session import at, drive
from txbox.store import leases


def say(**what: Any) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


class Service:
    """Runs one plan; see `tests.support.scenario_process.Plan` for its fields."""

    def __init__(self, plan: dict[str, Any]) -> None:
        self.plan = plan
        self.app = App(plan["url"], lease=Lease(duration=timedelta(seconds=plan["lease_s"])))
        self.passed: Counter[str] = Counter()

        def handle(message: Message[Any], tx: Any) -> None:
            at("handling")
            add_effect(tx, message.id, str(os.getpid()))
            at("domain updated")

        self.app.handler(TOPIC, consumer=CONSUMER, retry=AT_ONCE, mode=plan["mode"])(handle)

    def point(self, name: str) -> None:
        self.passed[name] += 1
        if name in self.plan["hold"]:
            say(at=name)
            sys.stdin.readline()
        if name == self.plan["crash"] and self.passed[name] == self.plan["crash_at"]:
            os.kill(os.getpid(), signal.SIGKILL)

    def run(self) -> None:
        # the schema check and the first connection are no part of the plan
        drive(self.app._any_sync(), self.app.protocol.check_schema)
        say(at="started")
        txbox.session.crash_point = self.point
        for index, (delivery, payload) in enumerate(self.plan["deliveries"]):
            at("received")
            message = Message[Any](id=delivery, topic=TOPIC, payload=base64.b64decode(payload))
            outcome = self.app.process(message)
            if not outcome.settles:
                say(kept=index, outcome=outcome)
                continue
            at("before:ack")
            say(acked=index, outcome=outcome)
        if self.plan["mode"] == "stored" or self.plan["table"]:
            self.work()
        say(done=True)

    def work(self) -> list[Outcome]:
        (handler,) = self.app.handlers
        connections, token = self.app._any_sync(), "token-of-this-process"
        leased = drive(
            connections,
            leases.lease,
            self.app.store,
            CONSUMER,
            token=token,
            limit=20,
            lease=self.app.lease,
            suspect=False,
        )
        say(leased=len(leased))
        return [
            drive(connections, self.app.protocol.run_leased, handler, row, token).outcome
            for row in leased
        ]


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING)
    given = sys.argv[1]
    Service(json.loads(Path(given[1:]).read_text() if given.startswith("@") else given)).run()
