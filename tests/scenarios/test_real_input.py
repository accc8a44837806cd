"""324 webhook events of GitHub's, delivered three times in random order to a worker that is killed twice."""

from __future__ import annotations

import json
import random
import signal
from pathlib import Path

from tests.support.scenario_process import Plan, WorkerProcess
from tests.support.servers import ROOT
from tests.support.shop import Shop, effects, statuses
from txbox import Outcome

EVENTS = 324
FILE = ROOT.parent / "shared" / "data" / "github-webhooks.cloudevents.jsonl"
Delivery = tuple[str, bytes]


def deliveries() -> list[Delivery]:
    """(id, payload) of every event; made up where the file is missing."""
    if not FILE.exists():
        return [
            (f"made-up {number}", json.dumps({"number": number}).encode())
            for number in range(EVENTS)
        ]
    return [
        (f"{event['source']} {event['id']}", json.dumps(event["data"]).encode())
        for event in map(json.loads, FILE.read_text().splitlines())
    ]


def test_real_events_with_duplicates_and_kills(shop: Shop, tmp_path: Path) -> None:
    events = deliveries()
    assert len({event for event, _ in events}) == len(events) == EVENTS
    order = events * 3
    random.Random(20261120).shuffle(order)

    unacked = order
    # the first dies by its own hand in mid-transaction, the second by ours, whatever it is doing
    for crash, crash_at, acks in (("after:handler", 120, None), (None, 1, 300)):
        plan = Plan(shop.url, deliveries=unacked, crash=crash, crash_at=crash_at)
        unacked = unacked[run_until_killed(plan, acks, tmp_path) :]
        assert 0 < effects(shop.raw) < EVENTS
    plan = Plan(shop.url, deliveries=unacked)
    assert run_until_killed(plan, None, tmp_path) == len(unacked)

    counts = shop.raw.rows("SELECT message_id, count(*) FROM effect GROUP BY message_id")
    found = {each.decode() if isinstance(each, bytes) else each: count for each, count in counts}
    assert set(found) == {event for event, _ in events}, "lost"
    assert set(found.values()) == {1}, "doubled"
    assert statuses(shop.raw) == {"processed": EVENTS}
    assert shop.raw.value("SELECT count(*) FROM txbox_quarantine") == 0
    assert shop.raw.value("SELECT count(*) FROM txbox_attempt") == 0


def run_until_killed(plan: Plan, acks: int | None, folder: Path) -> int:
    """Run a worker, killed after a number of acknowledgements; returns how many the source has seen."""
    seen = 0
    with WorkerProcess(plan, folder) as worker:
        while (said := worker.said()) is not None:
            if "acked" in said:
                assert said["outcome"] in (Outcome.PROCESSED, Outcome.DUPLICATE)
                assert said["acked"] == seen
                seen += 1
                if seen == acks:
                    # what it acknowledges from here on never reaches the source
                    worker.kill()
                    break
        status = worker.ended()
        assert worker.errors == ""
    assert status == (0 if plan.crash is None and acks is None else -signal.SIGKILL)
    return seen
