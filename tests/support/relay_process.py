"""Relays in processes of their own, to be killed: forked from a clean server, since a kill needs many."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from tests.support.waiting import DEADLINE_S
from tests.support.workers import run_of
from txbox import App, Message, RelayPolicy, RetryPolicy
from txbox.brokers.redis import RedisStreams
from txbox.errors import BrokerError
from txbox.testing import kill_at
from txbox.worker.relay import Relay

_ITSELF = "tests.support.relay_process"


@dataclass(frozen=True)
class Plan:
    """What one process does.

    Args:
        url: its database.
        redis: where it publishes to; else to `log`, else to the consumer "downstream" of the App.
        log: a file that says when which row was published by whom.
        publish_s: how long one call of the log's publisher takes.
        point: where it kills itself, at the `nth` pass.
        once: it ends when nothing is due.
    """

    url: str
    lease_s: float
    redis: str | None = None
    log: Path | None = None
    publish_s: float = 0.0
    batch: int = 25
    point: str | None = None
    nth: int = 1
    once: bool = False


class Log:
    """A destination that writes down the beginning and the end of each call, as one line each."""

    event_prefix = "ce_"
    name = "log"

    def __init__(self, path: Path, publish_s: float) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(self._fd, f"ready {os.getpid()} {time.monotonic()}\n".encode())
        self._publish_s = publish_s

    def publisher(self) -> Log:
        return self

    def publish(
        self, messages: Sequence[Message[Any]], within_s: float
    ) -> Sequence[BrokerError | None]:
        del within_s
        ids = " ".join(str(message.id) for message in messages)
        # one write each: what is killed in between has begun and not ended
        os.write(self._fd, f"begin {os.getpid()} {time.monotonic()} {ids}\n".encode())
        time.sleep(self._publish_s)
        os.write(self._fd, f"end {os.getpid()} {time.monotonic()} {ids}\n".encode())
        return [None] * len(messages)

    def close(self) -> None:
        os.close(self._fd)


def app_of(plan: Plan) -> App:
    """The App of a plan; without a broker its consumer writes one effect for each message."""
    app = App(
        plan.url,
        relaying=RelayPolicy(
            batch=plan.batch,
            lease=timedelta(seconds=plan.lease_s),
            poll=timedelta(milliseconds=100),
            confirm_within=timedelta(seconds=plan.lease_s * 0.4),
            retry=RetryPolicy(base=timedelta(milliseconds=50)),
        ),
    )
    if plan.redis is not None:
        app.publish(RedisStreams(plan.redis, group="nobody"))
    elif plan.log is not None:
        app.publish(Log(plan.log, plan.publish_s))
    else:
        downstream(app, "out")
    return app


def downstream(app: App, topic: str) -> None:
    """The next service: one row in `effect` for each message."""

    @app.handler(topic, consumer="downstream")
    def take(message: Message[Any], tx: Any) -> None:
        tx.execute("INSERT INTO effect (id) VALUES (?)", (message.id,))


def relay(plan: Plan) -> None:
    """Relay as planned, until killed."""
    if plan.point is not None:
        kill_at(plan.point, plan.nth)
    with app_of(plan) as app:
        relaying = Relay(run_of(app), app.routes.all()[-1])
        if not plan.once:
            relaying.run()
        while relaying.turn():
            pass


@contextmanager
def started(plan: Plan) -> Iterator[BaseProcess]:
    """A process that relays; killed when the block is left."""
    context: Any = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([_ITSELF])
    process: BaseProcess = context.Process(target=relay, args=(plan,), daemon=True)
    process.start()
    try:
        yield process
    finally:
        process.kill()
        process.join(DEADLINE_S)
