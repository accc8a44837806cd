"""Rescue, prune and drop-payloads: what they touch, in which steps, and who may run them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy.ext.asyncio import create_async_engine

from tests.support.connections import engine_url
from tests.support.shop import CONSUMER, Shop, opened, paid, statuses
from tests.support.waiting import eventually
from tests.support.workers import running, worker
from txbox import App, ConfigurationError, Message, Reject, Retention
from txbox.admin import Admin, InboxFilter
from txbox.errors import Fault, StoreError
from txbox.events import LeaseExpired, MessageDead, RowsPruned
from txbox.maintenance import JOBS, Task, run_once
from txbox.session import Session, drive
from txbox.store import jobs
from txbox.store.jobs import Batch, JobLease

DAY = timedelta(days=1)


@pytest.fixture
def shop(database_url: str) -> Iterator[Shop]:
    with opened(
        database_url,
        retention=Retention(processed=DAY, batch=10),
    ) as other_shop:
        yield other_shop


def filled(shop: Shop, count: int) -> None:
    shop.handler()
    for number in range(count):
        shop.deliver(paid(f"m{number}"))


def make_old(shop: Shop, hours: int = 48) -> None:
    """Move every row into the past."""
    past = {
        "postgresql": f"now() - interval '{hours} hours'",
        "mysql": f"UTC_TIMESTAMP(6) - INTERVAL {hours} HOUR",
        "sqlite": f"strftime('%Y-%m-%d %H:%M:%f', 'now', '-{hours} hours')",
    }[shop.raw.product]
    shop.raw.execute(f"UPDATE txbox_inbox SET received_at = {past}, updated_at = {past}")
    shop.raw.execute(f"UPDATE txbox_inbox SET processed_at = {past} WHERE processed_at IS NOT NULL")


def test_an_engine_of_asyncpg_outlives_every_event_loop_that_txbox_makes(
    postgresql_url: str,
) -> None:
    """A connection in the user's pool belongs to the loop that opened it."""
    engine = create_async_engine(engine_url(postgresql_url, "asyncpg"))
    app = App(engine)
    for _ in range(2):
        assert run_once(app, "rescue").rows == 0
        with Admin(app) as admin:
            assert admin.list(InboxFilter()) == []
    asyncio.run(engine.dispose())


def test_prune_deletes_finished_rows_past_the_horizon_with_their_attempts(shop: Shop) -> None:
    def fail_once(message: Message[Any], _tx: Any) -> None:
        if message.id == "dead":
            raise Reject("no")
        if message.attempt == 1:
            raise ValueError("once")

    shop.handler(fail_once)
    for name in ("done", "dead"):
        shop.deliver(paid(name))
    shop.work()
    make_old(shop)
    shop.handler(consumer="young")
    shop.deliver(paid("young"), "young")
    shop.raw.execute("UPDATE txbox_inbox SET processed_at = updated_at WHERE status = 'dead'")

    report = run_once(shop.app, "prune")

    assert (report.rows, report.skipped) == (1, False)
    assert statuses(shop.raw) == {"dead": 1, "processed": 1}
    assert shop.raw.value("SELECT count(*) FROM txbox_attempt") == 1
    assert [event.rows for event in shop.emitted(RowsPruned)] == [1]


@pytest.mark.parametrize("status", ["failed", "dead", "pending", "processing"])
def test_prune_never_touches_what_is_not_finished(shop: Shop, status: str) -> None:
    filled(shop, 3)
    make_old(shop, 24 * 400)
    shop.raw.execute("UPDATE txbox_inbox SET lease_until = received_at")
    shop.raw.execute(f"UPDATE txbox_inbox SET status = '{status}'")

    assert run_once(shop.app, "prune").rows == 0
    assert statuses(shop.raw) == {status: 3}


def test_prune_works_in_small_batches_and_reports_them(shop: Shop) -> None:
    filled(shop, 35)
    make_old(shop)
    seen: list[int] = []

    report = run_once(shop.app, "prune", Task(on_progress=seen.append))

    assert report.rows == 35
    assert seen[-1] == 35
    assert len(seen) >= 4
    assert all(later - earlier <= 10 for earlier, later in zip([0, *seen], seen, strict=False))
    assert statuses(shop.raw) == {}


def test_prune_by_age_by_consumer_and_as_a_dry_run(shop: Shop) -> None:
    filled(shop, 3)
    shop.handler(consumer="audit")
    shop.deliver(paid("m0"), "audit")
    make_old(shop, hours=2)
    hour = timedelta(hours=1)

    assert run_once(shop.app, "prune").rows == 0
    assert run_once(shop.app, "prune", Task(older_than=hour, dry_run=True)).rows == 4
    assert run_once(shop.app, "prune", Task(older_than=hour, consumer="audit")).rows == 1
    assert statuses(shop.raw) == {"processed": 3}


def test_prune_stops_between_batches_and_goes_on_later(shop: Shop) -> None:
    filled(shop, 30)
    make_old(shop)
    done: list[int] = []

    run_once(shop.app, "prune", Task(on_progress=done.append, stop=lambda: bool(done)))
    assert statuses(shop.raw) == {"processed": 20}
    assert run_once(shop.app, "prune").rows == 20


def test_one_runner_holds_the_lease_of_a_job(shop: Shop) -> None:
    filled(shop, 3)
    make_old(shop)
    connections = shop.app.database.sync
    assert connections is not None
    other = JobLease(shop.app.store.dialect, "prune", "somebody else", 60.0)
    assert drive(connections, other.acquire)

    assert run_once(shop.app, "prune").skipped
    assert statuses(shop.raw) == {"processed": 3}

    drive(connections, other.release)
    assert run_once(shop.app, "prune").rows == 3


def test_a_job_lease_ends_by_the_clock_of_the_database(shop: Shop) -> None:
    connections = shop.app.database.sync
    assert connections is not None
    first = JobLease(shop.app.store.dialect, "a job", "first", 0.05)
    second = JobLease(shop.app.store.dialect, "a job", "second", 60.0)

    assert drive(connections, first.acquire)
    nothing = drive(connections, first.load)
    assert nothing.state is None
    assert drive(connections, first.save, "one", nothing)
    eventually(lambda: drive(connections, second.acquire))
    assert not drive(connections, first.acquire)
    one = drive(connections, second.load)
    assert one.state == "one"
    assert not drive(connections, first.save, "two", one), "the fence"
    # the row is older than what was saved: a database that failed over
    assert not drive(connections, second.save, "three", replace(one, state="two"))
    assert not drive(connections, second.save, "three", replace(one, history="another server"))
    assert drive(connections, second.load) == one
    drive(connections, first.release)
    assert not drive(connections, first.acquire), "released what was not its own"


def test_slow_and_refused_batches_get_smaller_and_grow_back(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits: list[int] = []
    clock = [0.0]

    async def batch(db: Session, limit: int, **params: Any) -> Batch:
        limits.append(limit)
        if len(limits) == 2:
            raise StoreError("too long", fault=Fault.TIMEOUT)
        clock[0] += 0.2 if len(limits) <= 3 else 0.01
        return Batch(limit, True) if len(limits) < 12 else Batch(0, False)

    monkeypatch.setattr(jobs, "batch", batch)
    monkeypatch.setattr("txbox.maintenance.pruning.time.monotonic", lambda: clock[0])

    run_once(shop.app, "prune-outbox")

    assert limits[:4] == [10, 5, 2, 1]
    assert limits[4:] == sorted(limits[4:])
    assert limits[-1] == 10


def test_live_rows_are_not_waited_for(shop: Shop, raw: Any) -> None:
    if shop.raw.product == "sqlite":
        pytest.skip("SQLite has one writer")
    filled(shop, 3)
    make_old(shop)
    rival = raw(shop.url)
    rival.execute("BEGIN")
    rival.rows(
        "SELECT 1 FROM txbox_inbox WHERE consumer = ? AND message_id = ? FOR UPDATE",
        (CONSUMER.encode(), b"m1") if shop.raw.product == "mysql" else (CONSUMER, "m1"),
    )
    assert run_once(shop.app, "prune").rows == 2
    rival.execute("ROLLBACK")
    assert run_once(shop.app, "prune").rows == 1


def test_payloads_kept_for_a_time_are_dropped_after_it(shop: Shop) -> None:
    shop.handler(keep_payload=timedelta(hours=1))
    shop.handler(consumer="archive", keep_payload="always")
    for name in ("m0", "m1"):
        for consumer in (CONSUMER, "archive"):
            shop.deliver(paid(name), consumer)
    make_old(shop, hours=2)
    shop.deliver(paid("new"), CONSUMER)

    assert run_once(shop.app, "drop-payloads").rows == 2

    assert {name: shop.row(name).has_payload for name in ("m0", "m1", "new")} == {
        "m0": False,
        "m1": False,
        "new": True,
    }
    assert shop.row("m0", "archive").has_payload
    assert shop.raw.value("SELECT count(*) FROM txbox_inbox WHERE payload IS NULL") == 2
    assert statuses(shop.raw) == {"processed": 5}


def test_rescue_puts_expired_leases_back_and_gives_killers_up(shop: Shop) -> None:
    shop.handler()
    for name in ("m0", "m1"):
        shop.app.send(paid(name))
    assert len(shop.lease()) == 2
    shop.raw.execute("UPDATE txbox_inbox SET starts = 3 WHERE message_id = 'm1'")
    shop.raw.execute("UPDATE txbox_inbox SET lease_until = received_at")

    report = run_once(shop.app, "rescue")

    assert (report.rows, report.dead) == (2, 1)
    assert {name: shop.row(name).status for name in ("m0", "m1")} == {"m0": "failed", "m1": "dead"}
    assert len(shop.emitted(LeaseExpired)) == 2
    assert len(shop.emitted(MessageDead)) == 1
    assert run_once(shop.app, "rescue").rows == 0


def test_a_worker_prunes_in_the_background(database_url: str) -> None:
    retention = Retention(processed=timedelta(milliseconds=1), every=timedelta(milliseconds=50))
    with opened(database_url, retention=retention) as shop:
        filled(shop, 5)
        with running(worker(shop.app, maintenance=True)) as codes:
            eventually(lambda: statuses(shop.raw) == {})
        assert codes == [0]


def test_an_unknown_job_is_refused(shop: Shop) -> None:
    with pytest.raises(ConfigurationError, match="'sweep'"):
        run_once(shop.app, "sweep")
    assert [job.name for job in JOBS] == [
        "rescue", "alerts", "partitions", "prune", "prune-outbox", "prune-quarantine", "prune-activity",
        "drop-payloads",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("job", "table", "rows"),
    [("prune", "txbox_attempt", 1), ("prune-activity", "txbox_activity", 0)],
)
def test_a_run_that_fails_gives_its_lease_back(shop: Shop, job: str, table: str, rows: int) -> None:
    """The next one need not wait for the lease's end, and says nothing of another process."""
    shop.handler()
    shop.deliver(paid("a"))
    make_old(shop)
    shop.raw.execute(f"ALTER TABLE {table} RENAME TO txbox_hidden")
    with pytest.raises(StoreError):
        run_once(shop.app, job)
    shop.raw.execute(f"ALTER TABLE txbox_hidden RENAME TO {table}")
    report = run_once(shop.app, job)
    assert (report.rows, report.skipped) == (rows, False)
