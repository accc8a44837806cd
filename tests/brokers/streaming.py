"""A worker process on Redis Streams or NATS, to be killed: `python -m tests.brokers.streaming '<plan>'`.

It prints `handling <id>` and `handled <id>`; a message of type `hold` waits for ever.
"""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

from tests.runtime.support import DEADLINE_S, eventually
from tests.servers import ROOT
from tests.shop import AT_ONCE, CONSUMER, add_effect
from txbox import App, Message
from txbox.brokers.base import Delivery
from txbox.testing import install_from_environment
from txbox.worker import Worker


class Unwatched:
    """Stands in for the pump where a test drives a source itself."""

    lease_s = 1.0

    def settled(self, among: object, within_s: float) -> list[Delivery]:
        return []

    def acquire(self) -> bool:
        return True

    def load(self) -> str | None:
        return None

    def save(self, state: str) -> bool:
        return True

    def release(self) -> None:
        return


def say(*what: object) -> None:
    os.write(1, (" ".join(map(str, what)) + "\n").encode())


def source_of(plan: dict[str, Any]) -> Any:
    wait = timedelta(seconds=plan.get("wait_s", 1))
    if plan["kind"] == "redis":
        from txbox.brokers.redis import RedisStreams

        return RedisStreams(plan["server"], group="shop", claim_idle=wait)
    from txbox.brokers.nats import Nats

    return Nats(plan["server"], durable="shop", ack_wait=wait)


def main() -> int:
    plan = json.loads(sys.argv[1])
    install_from_environment()
    app = App(plan["url"])

    @app.handler(plan["topic"], consumer=CONSUMER, retry=AT_ONCE)
    def handle(message: Message[Any], tx: Any) -> None:
        say("handling", message.id)
        add_effect(tx, message.id, str(os.getpid()))
        if message.type == "hold":
            threading.Event().wait()
        say("handled", message.id)

    app.consume(source_of(plan))
    return Worker(app, maintenance=False).run()


class Process:
    def __init__(self, plan: dict[str, Any], crash: str | None) -> None:
        environment = dict(os.environ)
        if crash is not None:
            environment |= {"TXBOX_CRASH_AT": crash, "TXBOX_CRASH_NTH": "1"}
        command = [sys.executable, "-m", "tests.brokers.streaming", json.dumps(plan)]
        self.process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        self.lines: list[str] = []
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.decode().strip())

    def says(self, line: str) -> None:
        eventually(lambda: line in self.lines, f"{line!r} (said {self.lines})")

    def ended(self) -> int:
        code = self.process.wait(DEADLINE_S)
        self._thread.join(DEADLINE_S)
        return code

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.ended()
        assert self.process.stdout is not None
        self.process.stdout.close()


@contextmanager
def process(crash: str | None = None, **plan: Any) -> Iterator[Process]:
    own = Process(plan, crash)
    try:
        yield own
    finally:
        own.kill()


@contextmanager
def example(app: str, directory: Path, **variables: str) -> Iterator[None]:
    """Run an example by `txbox run` on a database of its own; afterwards it was drained."""
    with closing(sqlite3.connect(directory / "service.db")) as database:
        database.execute("CREATE TABLE booking (order_id INTEGER, amount INTEGER)")
    environment = {**os.environ, **variables, "PYTHONPATH": str(ROOT / "examples")}
    command = [sys.executable, "-m", "txbox"]
    initialise = [*command, "init", "--database", "sqlite:///service.db"]
    subprocess.run(initialise, cwd=directory, env=environment, check=True, capture_output=True)
    own = subprocess.Popen(
        [*command, "run", app], cwd=directory, env=environment, stdout=subprocess.DEVNULL
    )
    try:
        yield
        own.terminate()
        assert own.wait(DEADLINE_S) == 0
    finally:
        if own.poll() is None:
            own.kill()
            own.wait()


def booked(directory: Path) -> list[tuple[int, int]]:
    with closing(sqlite3.connect(directory / "service.db")) as database:
        return list(database.execute("SELECT order_id, amount FROM booking ORDER BY 1"))


if __name__ == "__main__":
    sys.exit(main())
