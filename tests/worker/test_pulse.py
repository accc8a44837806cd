"""What workers write of themselves: counts by the minute, who they are, and what becomes of both."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from tests.support.recording import Recorder
from tests.support.shop import CONSUMER, TOPIC, Shop, opened, paid
from tests.support.sources import Memory
from tests.support.waiting import DEADLINE_S, eventually
from tests.support.workers import running, worker
from txbox import ConfigurationError, Message, Reject, Retention, session
from txbox.admin import Admin
from txbox.admin.activity import Activity
from txbox.errors import BrokerUnavailable
from txbox.maintenance import run_once
from txbox.store.activity import Counts
from txbox.worker import pulse


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulse, "_BEAT_S", 0.05)


def counted(shop: Shop, name: str = CONSUMER) -> Counts:
    """What was counted of one consumer or route in the last hour."""
    with Admin(shop.app) as admin:
        activities = admin.activity()
    found = [each for each in (*activities.consumers, *activities.routes) if each.name == name]
    return found[0].total if found else Counts()


def numbers(counts: Counts) -> tuple[int, ...]:
    return (
        counts.received, counts.processed, counts.duplicate, counts.failed, counts.dead, counts.quarantined,
    )  # fmt: skip


def test_a_worker_counts_what_becomes_of_messages(shop: Shop) -> None:
    def fail(message: Message[Any], _tx: Any) -> None:
        if message.id == "dead":
            raise Reject("no")
        if message.id == "failed" and message.attempt == 1:
            raise ValueError("once")

    shop.handler(fail)
    source = Memory([paid("a"), paid("b"), paid("a"), paid("failed"), paid("dead")], endless=True)
    shop.app.consume(source)
    with running(worker(shop.app)):
        eventually(lambda: len(source.settled) == 5)
        # the same id with another payload
        source.waiting.append(Memory([paid("b", b"{}")]).waiting[0])
        eventually(lambda: numbers(counted(shop)) == (6, 3, 1, 1, 1, 1), "the counts")
    found = counted(shop)
    assert found.latency.count == found.run.count == 3
    p99 = found.latency.quantile(0.99)
    assert p99 is not None
    assert 0 < p99 < 60


def test_counts_of_the_last_moments_are_written_when_a_worker_ends(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pulse, "_BEAT_S", 3600.0)
    shop.handler()
    shop.app.consume(Memory([paid(f"m{number}") for number in range(20)]))
    assert worker(shop.app, once=True).run() == 0
    assert numbers(counted(shop))[:2] == (20, 20)
    with Admin(shop.app) as admin:
        assert not admin.workers(), "a worker that has ended well is gone"


def test_messages_of_process_and_of_the_table_are_counted_in_a_worker(shop: Shop) -> None:
    shop.handler(mode="stored")
    with running(worker(shop.app)):
        eventually(lambda: shop.app.activity.counts)
        shop.deliver(paid("by-process"))
        shop.app.send(paid("by-send"))
        eventually(lambda: numbers(counted(shop))[:2] == (2, 2), "both")
    assert counted(shop).deferred == 2
    # from the first receipt, although a row ran
    assert counted(shop).latency.count == 2


def test_an_idle_worker_reads_who_is_paused_and_writes_nothing_that_is_known(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pulse, "_WRITE_S", 3600.0)
    shop.handler()
    source = Memory([paid("a")], endless=True)
    shop.app.consume(source)
    with running(worker(shop.app)):
        eventually(lambda: counted(shop).processed == 1)
        sent = pulse_sends(monkeypatch)
        reads = {"pauses", "anchor_history"}
        eventually(lambda: sent.count("pauses") >= 10 and set(sent[-5:]) == reads)
        # what has changed is written at the next beat
        source.waiting += Memory([paid("b")]).waiting
        eventually(lambda: counted(shop).processed == 2)


def test_an_idle_worker_says_in_one_statement_that_it_is_there(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pulse, "_WRITE_S", 0.2)
    shop.handler()
    with running(worker(shop.app)):
        eventually(lambda: shop.raw.value("SELECT count(*) FROM txbox_worker") == 1)
        sent = pulse_sends(monkeypatch)
        eventually(lambda: sent.count("worker_write") >= 4, "four heartbeats")
        monkeypatch.setattr(session, "crash_point", None)
    assert set(sent) == {"pauses", "worker_write"}
    assert sent.count("pauses") > sent.count("worker_write")


def pulse_sends(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the pulse sends from now on, BEGIN and COMMIT included."""
    sent: list[str] = []

    def note(point: str) -> None:
        verb, _, name = point.partition(":")
        if verb == "before" and threading.current_thread().name == "txbox-pulse":
            sent.append(name)

    monkeypatch.setattr(session, "crash_point", note)
    return sent


def test_nothing_is_counted_where_nobody_writes_it_down(shop: Shop) -> None:
    shop.handler()
    shop.deliver(paid("m"))
    assert not shop.app.activity.unwritten()


def test_counting_makes_no_event_of_what_goes_well(shop: Shop) -> None:
    shop.app.events.observers.clear()
    assert not shop.app.events


def test_a_relay_counts_what_leaves_and_how_long_the_first_waits(shop: Shop) -> None:
    shop.handler()
    route = next(iter(shop.app.routes.all())).name
    shop.raw.execute(
        "INSERT INTO txbox_outbox (id, topic, payload, route, staged_at, available_at)"
        f" VALUES ('old', '{TOPIC}', ?, ?, {_past(shop)}, {_past(shop)})",
        (b"{}", route.encode() if shop.raw.product == "mysql" else route),
    )
    with running(worker(shop.app, relay=False)):
        eventually(lambda: shop.app.activity.counts)
    # whoever relays nothing says nothing of the outbox
    assert counted(shop, route) == Counts()
    with running(worker(shop.app)):
        eventually(lambda: counted(shop, route).processed == 1, "the message that left")
        eventually(lambda: numbers(counted(shop))[:2] == (1, 1), "its arrival")
    assert (counted(shop, route).oldest_s or 600) >= 600


def _past(shop: Shop, minutes: int = 10) -> str:
    return {
        "postgresql": f"now() - interval '{minutes} minutes'",
        "mysql": f"UTC_TIMESTAMP(6) - INTERVAL {minutes} MINUTE",
        "sqlite": f"strftime('%Y-%m-%d %H:%M:%f', 'now', '-{minutes} minutes')",
    }[shop.raw.product]


# -- who is at work -------------------------------------------------------------------------------


def test_a_worker_says_who_it_is_and_what_it_does(shop: Shop) -> None:
    entered, gate = threading.Event(), threading.Event()

    # outside of a transaction: on SQLite nobody writes while one is open
    @shop.app.handler(TOPIC, consumer=CONSUMER, concurrency=2, transactional=False)
    def hold(_message: Message[Any]) -> None:
        entered.set()
        assert gate.wait(DEADLINE_S)

    shop.app.consume(Memory([paid("m")], endless=True))
    with running(worker(shop.app, name="shop:app")), Admin(shop.app) as admin:
        assert entered.wait(DEADLINE_S)
        (known,) = eventually(lambda: [each for each in admin.workers() if each.leases])
        gate.set()
    assert (known.kind, known.state, known.app) == ("run", "running", "shop:app")
    assert known.consumers == (CONSUMER,)
    assert known.sources == {"memory": (TOPIC,)}
    assert known.routes
    assert (known.lanes, known.busy, known.leases) == (2, 1, 1)
    assert known.host
    assert known.pid
    assert abs(datetime.now(UTC) - known.seen_at) < timedelta(minutes=1)


def test_a_worker_that_went_away_is_silent_and_is_forgotten_after_an_hour(shop: Shop) -> None:
    with lost(shop) as name, Admin(shop.app) as admin:
        assert [(each.worker, each.state) for each in admin.workers()] == [(name, "running")]
        shop.raw.execute(f"UPDATE txbox_worker SET seen_at = {_past(shop, 10)}")
        assert [each.state for each in admin.workers()] == ["silent"]
        run_once(shop.app, "prune-activity")
        assert len(admin.workers()) == 1
        shop.raw.execute(f"UPDATE txbox_worker SET seen_at = {_past(shop, 61)}")
        run_once(shop.app, "prune-activity")
        assert not admin.workers()


@contextmanager
def lost(shop: Shop) -> Iterator[str]:
    """The row of a worker that was killed, and the counts it had written."""
    shop.handler()
    shop.app.consume(Memory([paid("m")], endless=True))
    with running(worker(shop.app)):
        eventually(lambda: counted(shop).processed == 1)
        rows = shop.raw.rows("SELECT * FROM txbox_worker")
    assert shop.raw.value("SELECT count(*) FROM txbox_worker") == 0
    marks = ", ".join("?" for _ in rows[0])
    shop.raw.execute(f"INSERT INTO txbox_worker VALUES ({marks})", rows[0])
    yield str(rows[0][0])


# -- what becomes of the counts -------------------------------------------------------------------


def fill(shop: Shop, ages: list[int], workers: int = 3) -> None:
    """One row for each worker in minutes so long ago."""
    now = int(datetime.now(UTC).timestamp() // 60)
    for age in ages:
        for number in range(workers):
            shop.raw.execute(
                "INSERT INTO txbox_activity (minute, kind, name, worker, received, latency, run)"
                " VALUES (?, 'consumer', ?, ?, 2, '0 2', '2')",
                (now - age, b"c" if shop.raw.product == "mysql" else "c", f"w{number}"),
            )


def test_old_minutes_are_folded_into_one_row_and_older_ones_deleted(shop: Shop) -> None:
    fill(shop, [0, 1, 30, 31, 7 * 24 * 60 + 182])
    before = counted(shop, "c")
    run_once(shop.app, "prune-activity")
    rows = shop.raw.rows("SELECT worker, received FROM txbox_activity ORDER BY minute, worker")
    assert [(str(name), int(count)) for name, count in rows] == [
        ("", 6), ("", 6), *[(f"w{number}", 2) for _ in range(2) for number in range(3)],
    ]  # fmt: skip
    after = counted(shop, "c")
    assert (before.received, before.latency, before.run) == (24, after.latency, after.run)
    # what comes late is added to what was folded
    fill(shop, [30], workers=1)
    run_once(shop.app, "prune-activity")
    assert counted(shop, "c").received == 26
    assert shop.raw.value("SELECT count(*) FROM txbox_activity WHERE worker = ''") == 2


@pytest.mark.parametrize(
    ("step", "ages"),
    [(5, range(66, 81)), (30, range(390, 450)), (180, range(1_630, 1_990, 20))],
    ids=["an hour", "six hours", "a day"],
)
def test_minutes_of_some_time_ago_become_longer_steps(shop: Shop, step: int, ages: range) -> None:
    fill(shop, [*ages, 30])
    for late in range(2):
        run_once(shop.app, "prune-activity")
        rows = shop.raw.rows(
            "SELECT minute, worker, received, latency FROM txbox_activity ORDER BY minute"
        )
        *steps, (_, _, minute, _) = rows
        assert len(steps) - (ages[-1] - ages[0] + ages.step) // step in (0, 1)
        assert all(int(at) % step == 0 and worker == "" for at, worker, _, _ in steps)
        assert sum(int(received) for _, _, received, _ in steps) == len(ages) * 6 + late * 2
        assert sum(int(latency.split()[1]) for *_, latency in steps) == len(ages) * 6 + late * 2
        assert int(minute) == 6, "a younger minute stays by itself"
        # what comes late is added
        fill(shop, [ages[5]], workers=1)


def test_the_longest_step_is_deleted_when_all_of_it_is_too_old(shop: Shop) -> None:
    now = int(datetime.now(UTC).timestamp() // 60)
    oldest = now - 7 * 24 * 60
    first = now - oldest // 180 * 180
    fill(shop, [first, first + 180])
    run_once(shop.app, "prune-activity")
    with Admin(shop.app) as admin:
        (week,) = admin.activity(timedelta(days=7), step=timedelta(hours=3)).consumers
    assert [point.counts.received for point in week.points] == [6]
    assert shop.raw.value("SELECT count(*) FROM txbox_activity") == 1


def test_retention_says_how_long_counts_are_kept(database_url: str) -> None:
    with opened(database_url, retention=Retention(activity=timedelta(hours=1))) as shop:
        fill(shop, [30, 90])
        run_once(shop.app, "prune-activity")
        assert shop.raw.value("SELECT count(*) FROM txbox_activity") == 1


def test_counts_are_shown_in_steps_of_whole_minutes(shop: Shop) -> None:
    fill(shop, [0, 1, 2, 100])
    with Admin(shop.app) as admin:
        (hour,) = admin.activity().consumers
        assert [point.counts.received for point in hour.points] == [6, 6, 6]
        day: Activity = admin.activity(timedelta(days=1), step=timedelta(hours=1)).consumers[0]
        assert sum(point.counts.received for point in day.points) == day.total.received == 24
        assert all(point.at.minute == 0 for point in day.points)
        with pytest.raises(ConfigurationError, match="by the minute"):
            admin.activity(step=timedelta(seconds=90))


# -- trouble --------------------------------------------------------------------------------------


def test_counts_wait_for_a_database_that_is_away_and_double_nothing(shop: Shop) -> None:
    shop.handler()
    source = Memory([paid("a")], endless=True)
    shop.app.consume(source)
    with running(worker(shop.app)):
        eventually(lambda: counted(shop).processed == 1)
        shop.raw.execute("ALTER TABLE txbox_activity RENAME TO txbox_elsewhere")
        source.waiting += Memory([paid("b"), paid("c")]).waiting
        # a table that is missing is the worst there is: messages go on
        eventually(lambda: len(source.settled) == 3)
        shop.raw.execute("ALTER TABLE txbox_elsewhere RENAME TO txbox_activity")
        eventually(lambda: counted(shop).processed == 3, "what was counted meanwhile")
    assert numbers(counted(shop))[:2] == (3, 3)


# -- brokers that are away --------------------------------------------------------------------


class _Away(Recorder):
    """A broker that refuses the login until it is back."""

    def __init__(self, back: threading.Event) -> None:
        super().__init__()
        self.back = back

    def publish(self, messages: Any, within_s: float) -> Any:
        if not self.back.is_set():
            raise BrokerUnavailable("ACCESS_REFUSED - Login was refused")
        return super().publish(messages, within_s)


def test_a_worker_says_why_nothing_leaves_and_since_when(shop: Shop) -> None:
    back = threading.Event()
    broker = _Away(back)
    shop.handler()
    shop.app.publish(broker, topics=["letters"])
    message_id = _stage(shop)
    with Admin(shop.app) as admin, running(worker(shop.app)):
        (trouble,) = eventually(
            lambda: [each for found in admin.workers() for each in found.troubles]
        )
        assert (trouble.kind, trouble.name) == ("route", "recorder")
        assert trouble.error == "ACCESS_REFUSED - Login was refused"
        assert abs(time.time() - trouble.since_s) < DEADLINE_S
        (finding,) = admin.check().findings
        assert (finding.code, finding.severity) == ("relay-away", "error")
        assert "ACCESS_REFUSED" in finding.problem
        assert finding in admin.doctor().findings
        explained = admin.explain(message_id)
        assert [said.code for said in explained.places[0].sentences if said.kind == "away"] == [
            "relay-away"
        ]
        assert explained.severity == "stuck"
        back.set()
        eventually(lambda: not [each for found in admin.workers() for each in found.troubles])
        assert admin.check().findings == []
    assert len(broker.sent) == 1


def _stage(shop: Shop) -> str:
    def stage(_: Any, tx: Any) -> None:
        shop.app.outbox.stage(tx, topic="letters", body=1)

    shop.app.handler("stage", consumer="stager")(stage)
    shop.app.process(Message(topic="stage", id="s1", payload=b"{}"))
    (row,) = shop.raw.rows("SELECT id FROM txbox_outbox")
    return row[0].decode() if isinstance(row[0], bytes) else str(row[0])


def test_a_worker_says_why_nothing_is_received(shop: Shop) -> None:
    back = threading.Event()

    class Away(Memory):
        def receive(self, messages_max: int, wait_s: float) -> Any:
            if not back.is_set():
                raise BrokerUnavailable("vhost not found")
            return super().receive(messages_max, wait_s)

    shop.handler()
    shop.app.consume(Away([paid("m1")], endless=True))
    with Admin(shop.app) as admin, running(worker(shop.app)):
        (trouble,) = eventually(
            lambda: [each for found in admin.workers() for each in found.troubles]
        )
        assert (trouble.kind, trouble.name, trouble.error) == (
            "source",
            "memory",
            "vhost not found",
        )
        assert [one.code for one in admin.check().findings] == ["source-away"]
        back.set()
        eventually(lambda: not [each for found in admin.workers() for each in found.troubles])
        eventually(lambda: shop.effects() == 1)
