"""Log of a worker whose broker or database is away: one line at the start, one at the end, all formatted."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest

from tests.brokers.test_base_drain import FIXTURES, Run
from tests.support.brokers.trouble_service import rig_of
from tests.support.proxy import Proxy
from tests.support.servers.control import ThrowawayKafka
from tests.support.waiting import eventually
from txbox import Outbox
from txbox.testing.brokers import Note, Rig

pytestmark = pytest.mark.brokers

#: Many tries of every client.
AWAY_S = 5.0
#: Then a service tries more often in that time than it would in a quarter of a minute.
LONGEST_PAUSE_S = 0.5
#: A connection that hangs is lost after two heartbeats, and RabbitMQ's least is 5 s.
HEARTBEATS = {"rabbitmq": "?heartbeat=5"}


@contextmanager
def interrupted(
    broker: str, how: str, request: pytest.FixtureRequest
) -> Iterator[tuple[Rig, str, Callable[[], object], Callable[[], object]]]:
    """Yield a rig, the address for a service, and two functions: one takes the server away, one brings it back."""
    with ExitStack() as stack:
        if broker == "kafka":
            server: ThrowawayKafka = request.getfixturevalue("throwaway_kafka")
            rig = stack.enter_context(rig_of(broker, server.bootstrap))
            yield rig, server.bootstrap, lambda: server.stop(immediate=True), server.start
            return
        url = str(request.getfixturevalue(FIXTURES[broker]))
        rig = stack.enter_context(rig_of(broker, url))
        proxy = stack.enter_context(Proxy(url))
        yield rig, proxy.url + HEARTBEATS.get(broker, ""), getattr(proxy, how), proxy.go_on


def processed(url: str) -> int:
    with closing(psycopg.connect(url)) as tx:
        (count,) = tx.execute("SELECT count(*) FROM txbox_inbox").fetchone() or (0,)
        return int(count)


def parsed(run: Run, since: int) -> list[dict[str, Any]]:
    """Return the lines from `since` on, each of which must be JSON written by the formatter."""
    lines = [json.loads(line) for line in run.lines[since:]]
    assert all({"time", "level"} <= line.keys() for line in lines)
    return lines


def by_trouble(lines: list[dict[str, Any]]) -> dict[str, list[tuple[str, str]]]:
    """Return (event, level) of each line, by source or publisher."""
    found: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for line in lines:
        about = line.get("source") or line.get("publisher") or "others"
        found[about].append((line.get("event", str(line)), line["level"]))
    return dict(found)


@pytest.mark.parametrize(
    ("broker", "how"),
    [("kafka", "refuse"), *((fixture, "refuse") for fixture in FIXTURES), ("rabbitmq", "hang")],
)  # fmt: skip
def test_a_broker_that_is_away_is_told_once(
    broker: str, how: str, postgresql_url: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    with interrupted(broker, how, request) as (rig, address, leave, come_back):
        rig.publish(Note("m1"))
        plan = {
            "database": postgresql_url, "broker": broker, "address": address, "topic": rig.topic,
            "consumes": True, "publishes": True, "longest_pause_s": LONGEST_PAUSE_S,
        }  # fmt: skip
        with Run(tmp_path, plan, "--log-json") as run:
            run.says("WorkerStarted")
            eventually(lambda: processed(postgresql_url) == 1, "the first message")
            eventually(lambda: rig.outstanding() == 0, "its acknowledgement")
            before = len(run.lines)
            leave()
            with closing(psycopg.connect(postgresql_url)) as tx, tx.transaction():
                Outbox().stage(tx, rig.topic, "{}")
            run.says("ConsumptionPaused")
            run.says("RelayPaused")
            time.sleep(AWAY_S)
            come_back()
            run.says("ConsumptionResumed")
            run.says("RelayResumed")
            lines = parsed(run, before)
            _, code = run.drained()
    assert code == 0
    # the server counts a message as settled before its answer has arrived, which may be cut off
    unsettled = [line for line in lines if line.get("event") == "SettleFailed"]
    assert len(unsettled) <= 1, lines
    lines = [line for line in lines if line not in unsettled]
    assert all(line.get("reason") for line in lines), lines
    troubles = by_trouble(lines)
    assert sorted(troubles.values()) == [
        [("ConsumptionPaused", "warning"), ("ConsumptionResumed", "info")],
        [("RelayPaused", "warning"), ("RelayResumed", "info")],
    ], troubles
    assert all(name.startswith(broker) for name in troubles)


def test_a_database_that_is_away_is_told_once(postgresql_url: str, tmp_path: Path) -> None:
    with (
        Proxy(postgresql_url) as proxy,
        Run(
            tmp_path, {"database": proxy.url, "longest_pause_s": LONGEST_PAUSE_S}, "--log-json"
        ) as run,
    ):
        run.says("WorkerStarted")
        before = len(run.lines)
        proxy.refuse()
        run.says("ConsumptionPaused")
        time.sleep(AWAY_S)
        proxy.go_on()
        run.says("ConsumptionResumed")
        lines = parsed(run, before)
        _, code = run.drained()
    assert code == 0
    assert [(line.get("event"), line["level"]) for line in lines] == [
        ("ConsumptionPaused", "warning"),
        ("ConsumptionResumed", "info"),
    ], lines
    assert all(line["source"] == "database" and line["reason"] for line in lines), lines
