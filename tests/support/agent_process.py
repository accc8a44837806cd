"""An agent without a model: it plays a plan of refunds, and may be killed at any moment; and the worker beside it.

`python -m tests.support.agent_process agent URL PLAN` ends with 0 when the plan is done. PLAN is a file of JSON.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from tests.support.effect import AT_ONCE, add_effect
from txbox import App, Lease
from txbox.integrations.agents import CallRefused, CallWaiting, once, run
from txbox.worker import Worker

#: A person approves what costs more.
LIMIT = 1000


@dataclass
class Plan:
    """What an agent does.

    Attributes:
        run: the id of its run.
        refunds: order and cents of each call.
        has_calls: the conversation is kept, with the model's id of each call; else the run starts from its beginning.
        conversation: the file of the answers that the agent has kept.
        answers: the file of every answer that any of its lives got.
        dies_at: the moment of its death, counted from 1; 0 for none.
    """

    run: str
    refunds: list[tuple[int, int]]
    has_calls: bool
    conversation: str
    answers: str
    dies_at: int = 0

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def load(cls, path: str) -> Plan:
        return cls(**json.loads(Path(path).read_text()))


class Moments:
    """Counts what happens, and kills the process at one of these moments."""

    def __init__(self, dies_at: int) -> None:
        self._dies_at, self._count = dies_at, 0

    def __call__(self) -> None:
        self._count += 1
        if self._count == self._dies_at:
            os.kill(os.getpid(), signal.SIGKILL)


def shop(url: str, moment: Any = lambda: None) -> tuple[App, Any]:
    """An App and its tool."""
    # a killed worker's calls are taken back soon, and it may be killed often
    app = App(url, observers=[], lease=Lease(duration=timedelta(seconds=2), max_starts=1000))
    begin = app.transaction

    @contextmanager
    def transaction() -> Iterator[Any]:
        with begin() as tx:
            moment()
            yield tx
            moment()  # before COMMIT
        moment()

    vars(app)["transaction"] = transaction

    @once(
        app,
        "refund",
        approve=lambda order, cents: cents > LIMIT,
        wait=timedelta(0),
        retry=AT_ONCE,
    )
    def refund(tx: Any, order: int, cents: int) -> dict[str, Any]:
        add_effect(tx, order, str(cents))
        moment()
        return {"order": order, "receipt": secrets.token_hex(8)}

    return app, refund


def play(url: str, plan: Plan) -> None:
    moment = Moments(plan.dies_at)
    app, refund = shop(url, moment)
    conversation = Path(plan.conversation)
    answered = len(conversation.read_text().splitlines()) if plan.has_calls else 0

    def call(number: int) -> Any:
        order, cents = plan.refunds[number]
        while True:
            try:
                if plan.has_calls:
                    with run(plan.run, call=f"call_{number}"):
                        return refund(order, cents=cents)
                return refund(order, cents)
            except CallWaiting:
                time.sleep(0.01)
            except CallRefused:
                return "refused"

    with app, run(plan.run):
        for number in range(answered, len(plan.refunds)):
            moment()
            answer = call(number)
            _append(plan.answers, json.dumps([number, answer]))
            moment()
            _append(plan.conversation, json.dumps(answer))


def _append(path: str, line: str) -> None:
    with Path(path).open("a") as file:
        file.write(f"{line}\n")


def main() -> None:
    match sys.argv[1:]:
        case ["agent", url, plan]:
            play(url, Plan.load(plan))
        case ["worker", url]:
            Worker(shop(url)[0]).run()
        case words:
            raise SystemExit(f"not known: {words}")


if __name__ == "__main__":
    main()
