"""Relays killed at every point: nothing is lost, ids stay, and no two relays send one row at the same time."""

from __future__ import annotations

import os
import secrets
import signal
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import redis

from tests.support.databases import NewDatabase, Raw
from tests.support.relay_process import Plan, downstream, started
from tests.support.waiting import DEADLINE_S, eventually
from tests.support.workers import running, worker
from txbox import App, Outbox, Outgoing
from txbox.brokers.redis import RedisStreams

Connect = Callable[[str], AbstractContextManager[Any]]
Look = Callable[[str], Raw]
KILLS = 50
ROWS_A_ROUND = 24
KEYS = 120
LEASE_S = 0.6
OPEN = "SELECT count(*) FROM txbox_outbox WHERE status = 'pending'"


def stage(url: str, connect: Connect, topic: str, first: int, count: int) -> list[str]:
    """Rows of some keys, numbered; every fifth has none."""
    numbers = range(first, first + count)
    messages = [
        Outgoing(topic=topic, body=number, key=str(number % KEYS) if number % 5 else None)
        for number in numbers
    ]
    with connect(url) as tx:
        ids = Outbox().stage_many(tx, messages)
        tx.commit()
    return ids


def killed_again_and_again(
    plan: Plan, points: list[tuple[str, int]], topic: str, connect: Connect
) -> list[str]:
    """Stage, let one relay after another die at a point, then let a last one live; returns all ids."""
    ids: list[str] = []
    for number in range(KILLS):
        ids += stage(plan.url, connect, topic, len(ids), ROWS_A_ROUND)
        point, nth = points[number % len(points)]
        with started(replace(plan, point=point, nth=nth)) as process:
            process.join(DEADLINE_S)
            assert process.exitcode == -signal.SIGKILL, (number, point)
    return ids


def keys_in_order(numbers: list[int]) -> bool:
    """Among the first copies of each number, those of one key (tests.stage) come in order."""
    by_key: dict[int, list[int]] = defaultdict(list)
    for number in dict.fromkeys(numbers):
        if number % 5:
            by_key[number % KEYS].append(number)
    return all(messages_of_key == sorted(messages_of_key) for messages_of_key in by_key.values())


def effects(raw: Raw) -> Counter[str]:
    return Counter(value for (value,) in raw.rows("SELECT id FROM effect"))


@pytest.fixture
def stream(redis_url: str) -> Iterator[str]:
    name = f"out-{secrets.token_hex(4)}"
    yield name
    with redis.Redis.from_url(redis_url) as client:
        client.delete(name)


@pytest.mark.brokers
def test_relay_republishes(
    redis_url: str,
    stream: str,
    new_database: NewDatabase,
    raw: Look,
    plain_connection: Connect,
) -> None:
    url, next_url = new_database("postgresql"), new_database("sqlite")
    points = [
        (point, nth)
        for nth in (1, 2)
        for point in ("relay:published", "relay:leased", "relay:marked")
    ]
    # the second commit of a turn is that of the marks
    points += [("before:commit", 2), ("after:commit", 2)]
    plan = Plan(url, LEASE_S, redis=redis_url, batch=10)
    ids = killed_again_and_again(plan, points, stream, plain_connection)
    view = raw(url)
    # the one that lives has time to publish what it has leased, however busy the machine is
    with started(replace(plan, lease_s=DEADLINE_S)):
        eventually(lambda: view.value("SELECT count(*) FROM txbox_outbox") == 0, "no row left")

    with redis.Redis.from_url(redis_url) as client:
        entries: Any = client.xrange(stream)
    sent = [fields[b"message-id"].decode() for _, fields in entries]
    assert set(sent) == set(ids), "none is lost, and no id is new"
    assert len(sent) > len(ids), "what was published and not marked was published again"
    number_of = {message_id: number for number, message_id in enumerate(ids)}
    assert keys_in_order([number_of[message] for message in sent])

    raw(next_url).execute("CREATE TABLE effect (id TEXT)")
    with App(next_url) as app:
        downstream(app, stream)
        app.consume(RedisStreams(redis_url, group="downstream"))
        with running(worker(app)):
            eventually(lambda: len(effects(raw(next_url))) == len(ids), "an effect of each")
            with redis.Redis.from_url(redis_url) as client:

                def drained() -> bool:
                    groups: Any = client.xinfo_groups(stream)
                    return all(group["lag"] == 0 and group["pending"] == 0 for group in groups)

                eventually(drained, "the duplicates")
    assert set(effects(raw(next_url)).values()) == {1}


def test_relay_republishes_to_its_own_app(
    new_database: NewDatabase, raw: Look, plain_connection: Connect
) -> None:
    """Without a broker publishing and marking are one transaction, killed around each of its statements."""
    url = new_database("sqlite")
    raw(url).execute("CREATE TABLE effect (id TEXT)")
    plan = Plan(url, LEASE_S, batch=10)
    # the first commit of a turn is that of the lease
    points = [
        ("relay:leased", 1),
        ("after:relay_sent", 1),
        ("before:relay_sent", 1),
        ("before:commit", 2),
        ("after:commit", 2),
    ]
    ids = killed_again_and_again(plan, points, "out", plain_connection)
    view = raw(url)
    # the one that lives has time to publish what it has leased, however busy the machine is
    with started(replace(plan, lease_s=DEADLINE_S)):
        eventually(lambda: view.value("SELECT count(*) FROM txbox_outbox") == 0, "no row left")
    stored = view.rows("SELECT message_id, payload FROM txbox_inbox ORDER BY arrival")
    assert sorted(row for row, _ in stored) == sorted(ids)
    assert keys_in_order([int(payload) for _, payload in stored])
    with App(url) as app:
        downstream(app, "out")
        assert worker(app, once=True).run() == 0
    assert effects(raw(url)) == Counter(ids)


# -- two at a time --------------------------------------------------------------------------------


class Calls:
    """An entry of the publish log: which call of which process published which rows, and when."""

    def __init__(self, log: Path) -> None:
        self.ended: dict[tuple[int, str], float] = {}
        self.begun: list[tuple[float, int, str]] = []
        self.ready: set[int] = set()
        for line in log.read_text().splitlines() if log.exists() else ():
            what, pid, at, *ids = line.split()
            if what == "ready":
                self.ready.add(int(pid))
            for message_id in ids:
                if what == "begin":
                    self.begun.append((float(at), int(pid), message_id))
                else:
                    self.ended[int(pid), message_id] = float(at)

    @property
    def processes(self) -> set[int]:
        return {pid for _, pid, _ in self.begun}

    def by_row(self) -> dict[str, list[tuple[float, int]]]:
        found: dict[str, list[tuple[float, int]]] = defaultdict(list)
        for at, pid, row_id in self.begun:
            found[row_id].append((at, pid))
        return found


def caught_publishing(relay: BaseProcess, log: Path) -> bool:
    """Stop a relay; unless that met it in the middle of a call, with rows it has leased, let it go on."""
    assert relay.pid is not None
    os.kill(relay.pid, signal.SIGSTOP)
    state = Path(f"/proc/{relay.pid}/stat")
    eventually(lambda: state.read_text().rpartition(")")[2].split()[0] == "T", "the stop")
    calls = Calls(log)
    if any(pid == relay.pid and (pid, row_id) not in calls.ended for _, pid, row_id in calls.begun):
        return True
    os.kill(relay.pid, signal.SIGCONT)
    return False


def test_two_relays_never_publish_one_row_and_one_takes_over_from_the_other(
    database_url: str, plain_connection: Connect, raw: Look, tmp_path: Path
) -> None:
    log, lease_s, view = tmp_path / "log", 3.0, raw(database_url)
    plan = Plan(database_url, lease_s, log=log, publish_s=0.05)
    with started(plan) as one, started(plan) as two:
        eventually(lambda: len(Calls(log).ready) == 2, "both relays")
        ids = stage(database_url, plain_connection, "out", 0, 600)
        eventually(lambda: view.value(OPEN) == 0, "no row left")
        calls = Calls(log)
        assert calls.processes == {one.pid, two.pid}, "both have worked"
        assert set(calls.by_row()) == set(ids)
        assert all(len(each) == 1 for each in calls.by_row().values()), "each row once"

        # now one dies while publishing
        more = stage(database_url, plain_connection, "out", 600, 600)
        eventually(lambda: caught_publishing(one, log), "the first, while it publishes")
        one.kill()
        one.join(DEADLINE_S)
        died = time.monotonic()
        eventually(lambda: view.value(OPEN) == 0, "what the dead one had leased")
    calls = Calls(log)
    assert set(calls.by_row()) == {*ids, *more}
    again = {each: sent for each, sent in calls.by_row().items() if len(sent) > 1}
    for row_id, ((first, dead), (second, living)) in again.items():
        assert (dead, living) == (one.pid, two.pid), row_id
        # leased a moment before it was published, and never touched before that lease's end
        assert second - first > lease_s / 2, row_id
        assert second > died, row_id
    taken_over = [
        at for at, pid, row_id in calls.begun if pid == two.pid and at > died + lease_s / 2
    ]
    assert taken_over, "the living one waited for the lease's end"
    numbers = {message_id: number for number, message_id in enumerate([*ids, *more])}
    assert keys_in_order([numbers[row_id] for _, _, row_id in sorted(calls.begun)])


def test_rows_that_commit_late_are_not_skipped_under_load(
    database_url: str, plain_connection: Connect, raw: Look, tmp_path: Path
) -> None:
    if database_url.startswith("sqlite"):
        pytest.skip("SQLite has one writer: nobody can commit in between")
    log, view = tmp_path / "log", raw(database_url)
    plan = Plan(database_url, 5.0, log=log, batch=50)
    committed: list[str] = []
    late: list[str] = []
    with started(plan), started(plan):
        for number in range(6):
            with plain_connection(database_url) as early:
                messages = [
                    Outgoing(topic="out", body=each, key=f"late-{each % 3}") for each in range(5)
                ]
                late += Outbox().stage_many(early, messages)
                later = [
                    each
                    for part in range(10)
                    for each in stage(
                        database_url, plain_connection, "out", (number * 10 + part) * 30, 30
                    )
                ]
                committed += later
                # all that was committed later leaves, and is marked, while the early ones are open
                eventually(lambda: view.value(OPEN) == 0, "no later row left")
                assert set(committed) <= set(Calls(log).by_row())
                assert not set(late[-5:]) & set(Calls(log).by_row())
                early.commit()
        eventually(lambda: view.value(OPEN) == 0, "no row left")
    sent = Calls(log).by_row()
    assert set(sent) == {*committed, *late}
    assert all(len(message) == 1 for message in sent.values())
