"""A drain ends within its grace, even if a broker or the database accepts connections and never answers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Self

import psycopg
import pytest

from tests.support.brokers.trouble_service import rig_of
from tests.support.databases import NewDatabase, representatives
from tests.support.proxy import Proxy
from tests.support.servers import ROOT
from tests.support.servers.control import ThrowawayKafka
from tests.support.waiting import DEADLINE_S, eventually, room
from tests.support.warm import Warm
from txbox import Outbox
from txbox.testing.brokers import Note, Rig

pytestmark = pytest.mark.brokers

FIXTURES = {
    "rabbitmq": "rabbitmq_url", "sqs": "sqs_url", "nats": "nats_url", "redis": "redis_url"
}  # fmt: skip
GRACE_S = 5.0
LONG_GRACE_S = 60.0
HUNG_S = 5.0
# beside a grace: the start of a signal handler and the end of a process
SLACK_S = 1.5
LATE_S = 3.0


class Run:
    """`txbox run` (or another verb) on the App of `trouble_service`, its log in a file."""

    def __init__(
        self, directory: Path, plan: dict[str, Any], *words: str, verb: str = "run"
    ) -> None:
        self.output = directory / "output"
        with self.output.open("wb") as output:
            self.process = Warm(
                [
                    "txbox", verb, "tests.support.brokers.trouble_service:app", *words,
                ],
                cwd=ROOT, env={**os.environ, "TXBOX_TEST_PLAN": json.dumps(plan)},
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=output,
            )  # fmt: skip

    @property
    def lines(self) -> list[str]:
        return self.output.read_text().splitlines()

    def says(self, text: str) -> list[str]:
        """Wait for log lines that contain the text; returns them."""

        def found() -> list[str]:
            lines = [line for line in self.lines if text in line]
            assert lines or self.process.poll() is None, self.lines
            return lines

        said: list[str] = eventually(found, f"{text!r} in the log")
        return said

    def drained(self) -> tuple[float, int]:
        """Send SIGTERM; returns the seconds until the process ended, and its exit status."""
        asked = time.monotonic()
        self.process.send_signal(signal.SIGTERM)
        try:
            code = self.process.wait(DEADLINE_S)
        except subprocess.TimeoutExpired:
            pytest.fail(f"It did not end: {self._threads()}, {self.lines}")
        return time.monotonic() - asked, code

    def _threads(self) -> list[str]:
        """What the kernel says of the process and its threads: their states, and the signals that wait."""
        wanted = ("Name", "State", "SigPnd", "ShdPnd", "SigBlk", "SigCgt")
        tasks = Path(f"/proc/{self.process.pid}/task")
        return [
            " ".join(line for line in status.read_text().splitlines() if line.startswith(wanted))
            for status in sorted(tasks.glob("*/status"))
        ]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


@contextmanager
def hanging(
    broker: str, request: pytest.FixtureRequest
) -> Iterator[tuple[Rig, str, Callable[[], None]]]:
    """A topic, the address at which a service finds it, and what makes the server hang."""
    with ExitStack() as stack:
        if broker == "kafka":
            server: ThrowawayKafka = request.getfixturevalue("throwaway_kafka")
            rig = stack.enter_context(rig_of(broker, server.bootstrap))
            pid = int((server.directory / "pid").read_text())
            # its clients connect to the address it advertises, past any proxy
            stack.callback(os.kill, pid, signal.SIGCONT)
            yield rig, server.bootstrap, lambda: os.kill(pid, signal.SIGSTOP)
            return
        url = str(request.getfixturevalue(FIXTURES[broker]))
        rig = stack.enter_context(rig_of(broker, url))
        proxy = stack.enter_context(Proxy(url))
        yield rig, proxy.url, proxy.hang


@pytest.mark.parametrize("broker", ["kafka", *FIXTURES])
def test_a_broker_that_hangs_is_given_up_long_before_the_grace_is_over(
    broker: str, postgresql_url: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    with hanging(broker, request) as (rig, address, hang):
        rig.publish(Note("m1"))
        plan = {
            "database": postgresql_url, "broker": broker, "address": address, "topic": rig.topic,
            "consumes": True, "publishes": True,
        }  # fmt: skip
        with (
            Run(tmp_path, plan, "--grace", f"{LONG_GRACE_S}s", "--verbose") as run,
            psycopg.connect(postgresql_url, autocommit=True) as tx,
        ):
            run.says("MessageProcessed")
            hang()
            # the relay waits for a confirmation that does not come
            with tx.transaction():
                Outbox().stage(tx, rig.topic, "{}")
            eventually(
                lambda: tx.execute(
                    "SELECT id FROM txbox_outbox WHERE token IS NOT NULL"
                ).fetchall(),
                "the relay's lease",
            )
            took_s, code = run.drained()
            assert took_s < HUNG_S + room(LATE_S), run.lines
            cut_off = [line for line in run.lines if "drain was cut off: the " in line]
            assert (code, len(cut_off)) in ((0, 0), (1, 1)), run.lines
            # the line names what hung, and the database did not
            assert "the database" not in "".join(cut_off)


@pytest.mark.parametrize(
    "name", [database.name for database in representatives() if database.concurrent_writers]
)
def test_a_database_that_hangs_does_not_outlast_the_grace(
    name: str, tmp_path: Path, new_database: NewDatabase
) -> None:
    with (
        Proxy(new_database(name)) as proxy,
        Run(tmp_path, {"database": proxy.url}, "--grace", f"{GRACE_S}s") as run,
    ):
        run.says("WorkerStarted")
        proxy.hang()
        took_s, code = run.drained()
        assert code == 1
        assert GRACE_S - SLACK_S < took_s < GRACE_S + room(LATE_S), run.lines
        (line,) = [line for line in run.lines if "grace period of 5 s ended with " in line]
        assert "the database postgresql://" in line or "the database mysql://" in line
        assert line.count("the database") == 1


def test_several_processes_end_within_the_grace(postgresql_url: str, tmp_path: Path) -> None:
    words = ("--processes", "2", "--grace", f"{GRACE_S}s")
    with (
        Proxy(postgresql_url) as proxy,
        Run(tmp_path, {"database": proxy.url}, *words) as run,
    ):
        eventually(lambda: len(run.says("WorkerStarted")) == 2, "two workers")
        proxy.hang()
        took_s, code = run.drained()
        assert code == 1
        assert took_s < GRACE_S + room(LATE_S), run.lines


def test_a_relay_ends_within_its_grace(redis_url: str, postgresql_url: str, tmp_path: Path) -> None:
    with rig_of("redis", redis_url) as rig, Proxy(redis_url) as proxy:
        plan = {
            "database": postgresql_url, "broker": "redis", "address": proxy.url, "topic": rig.topic,
            "publishes": True,
        }  # fmt: skip
        proxy.hang()
        with psycopg.connect(postgresql_url, autocommit=True) as tx:
            with tx.transaction():
                Outbox().stage(tx, rig.topic, "{}")
            with Run(tmp_path, plan, "--grace", "2s", verb="relay") as run:
                # leased and being sent
                assert proxy.hung.wait(DEADLINE_S)
                took_s, code = run.drained()
        assert code == 1
        assert took_s < 2 + room(LATE_S), run.lines
        assert "the relay to redis:" in "".join(run.lines)
