"""The worker itself, with its lanes, its source and its table work, killed at named points again and again."""

from __future__ import annotations

import random
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.scenarios.test_real_input import EVENTS, FILE
from tests.support.shop import Shop, statuses
from tests.support.sources import event_line
from tests.support.workers import Process

# (point, the how many-th passing): each kills one process; the next goes on where the table stands
KILLS = {
    "inline": [
        ("received", 7), ("before:begin", 9), ("after:claim", 4), ("after:handler", 5),
        ("before:commit", 3), ("during:commit", 2), ("after:commit", 8), ("before:ack", 2), ("after:ack", 3),
    ],
    "stored": [
        ("received", 7), ("after:store", 1), ("before:ack", 1), ("after:ack", 1), ("after:lease", 2),
        ("after:claim_leased", 4), ("after:handler", 6), ("before:commit", 9), ("during:commit", 1),
        ("after:commit", 12),
    ],
}  # fmt: skip


@pytest.mark.parametrize("mode", ["inline", "stored"])
def test_a_worker_killed_at_every_point_loses_and_doubles_nothing(
    shop: Shop, tmp_path: Path, mode: str
) -> None:
    ids: list[str] = []
    orders = tmp_path / "orders.jsonl"
    # a row on its way when the process dies is rescued at once, and is never taken for poison
    plan: dict[str, Any] = {"url": shop.url, "file": str(orders), "once": True, "mode": mode,
            "lease_s": 0.5, "max_starts": 100, "maintenance": True}  # fmt: skip
    killed = 0
    for crash in KILLS[mode]:
        # what the last one may have died of is leased; what is new is not
        new = [f"m{number}" for number in range(len(ids), len(ids) + 20)]
        lines = [event_line(message_id) for message_id in (*new, *ids, *new)]
        random.Random(7).shuffle(lines)
        with orders.open("a") as file:
            file.writelines(lines)
        ids += new
        with Process(crash=crash, **plan) as process:
            status = process.ended()
        assert status in (0, -signal.SIGKILL), process.errors
        killed += status == -signal.SIGKILL
    assert killed >= 5, "the points were not passed: this test has tested nothing"
    with Process(**plan) as process:
        assert process.ended() == 0, process.errors
    check_each_once(shop, {f"/test {message_id}" for message_id in ids})


@pytest.mark.parametrize("mode", ["inline", "stored"])
def test_a_line_that_kills_its_process_is_dead_and_those_behind_it_are_done(
    shop: Shop, tmp_path: Path, mode: str
) -> None:
    lines = [event_line(number) for number in range(40)]
    lines[5] = event_line("poison", type="die")
    orders = tmp_path / "orders.jsonl"
    orders.write_text("".join(lines))
    plan: dict[str, Any] = {"url": shop.url, "file": str(orders), "once": True, "mode": mode,
            "lease_s": 0.3, "maintenance": True}  # fmt: skip
    # the first run inline is not counted, the next `max_starts` are
    for _ in range(3 + (mode == "inline")):
        with Process(**plan) as process:
            assert process.ended() == -signal.SIGKILL, process.errors
    with Process(**plan) as process:
        assert process.ended() == 0, process.errors
    assert statuses(shop.raw) == {"processed": 39, "dead": 1}
    assert shop.effects() == 39


def test_real_events_through_the_worker(shop: Shop, tmp_path: Path) -> None:
    events = FILE.read_text().splitlines(keepends=True) if FILE.exists() else []
    lines = (events or [event_line(number) for number in range(EVENTS)]) * 3
    random.Random(20261120).shuffle(lines)
    orders = tmp_path / "events.jsonl"
    orders.write_text("".join(lines))
    plan: dict[str, Any] = {"url": shop.url, "file": str(orders), "once": True}
    # what has arrived shares a transaction, so there are few of them
    for crash in (("after:commit", 12), ("before:commit", 8)):
        with Process(crash=crash, **plan) as process:
            assert process.ended() == -signal.SIGKILL, process.errors
    with Process(**plan) as process:
        assert process.ended() == 0, process.errors
    found = check_each_once(shop, None)
    assert found == EVENTS


def check_each_once(shop: Shop, expected: set[str] | None) -> int:
    counts = {
        value.decode() if isinstance(value, bytes) else str(value): count
        for value, count in shop.raw.rows(
            "SELECT message_id, count(*) FROM effect GROUP BY message_id"
        )
    }
    assert expected is None or set(counts) == expected, "lost"
    assert set(counts.values()) == {1}, "doubled"
    assert statuses(shop.raw) == {"processed": len(counts)}
    assert shop.raw.value("SELECT count(*) FROM txbox_quarantine") == 0
    return len(counts)
