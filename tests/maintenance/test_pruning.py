"""Retention: which partitions are dropped, which rows are deleted by batch, when, and who may."""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime, time, timedelta
from functools import partial
from itertools import pairwise
from time import monotonic
from typing import Any
from urllib.parse import urlsplit

import asyncpg
import psycopg
import pytest

from tests.support.databases import NewDatabase, Raw
from tests.support.partitions import DAY, ID_OF, day_parts, finished_at, midnight, place, uuid7
from tests.support.shop import Shop, opened, paid, past_guard, statuses
from tests.support.waiting import DEADLINE_S, eventually
from txbox import App, ConfigurationError, Message, Outcome, Retention
from txbox.events import RowsPruned
from txbox.maintenance import JOBS, Report, Task, pruning, run_once
from txbox.session import drive, drive_async
from txbox.store import jobs, partitions
from txbox.store import schema as tables
from txbox.store.jobs import BlockScan


def test_whole_days_are_dropped_and_only_they(timed: Shop, kind: str) -> None:
    def once(message: Any, _tx: Any) -> None:
        if message.attempt == 1 and message.payload == b"{}":
            raise ValueError("once")

    timed.handler(once)
    make = ID_OF[kind]
    old = [make(midnight(-20) + number * timedelta(hours=1)) for number in range(10)]
    edge, young = make(midnight(-7)), make(midnight(-6))
    for message_id in (*old, edge, young, "other"):
        timed.deliver(paid(message_id, b"{}"))
    timed.work(limit=100)
    assert statuses(timed.raw) == {"processed": 13}
    finished_at(timed.raw, midnight(-20))
    finished_at(timed.raw, midnight(-6), f"message_id IN ('{edge}', '{young}')")
    assert timed.raw.value("SELECT count(*) FROM txbox_attempt") == 13
    timed.raw.execute("UPDATE txbox_attempt SET recorded_at = recorded_at - interval '20 days'")

    report = run_once(timed.app, "prune")

    # 10 with their partition, "other" by batch; those of yesterday's horizon wait for theirs
    assert report.rows == 11
    assert statuses(timed.raw) == {"processed": 2}
    assert [event.rows for event in timed.emitted(RowsPruned)] == [11]
    # 40 days ago to the day before the horizon are gone; the one that holds the horizon is not
    assert day_parts(timed.raw)[0] == f"txbox_inbox_{kind}_{midnight(-7):%Y%m%d}_0000"
    assert timed.raw.value("SELECT count(*) FROM txbox_attempt") == 2
    # what comes this late is new, and lies where no partition is
    assert timed.deliver(paid(old[0])) is Outcome.PROCESSED
    assert place(timed.raw, old[0]) == {f"{kind}_default"}
    assert timed.deliver(paid(old[0])) is Outcome.DUPLICATE


@pytest.mark.parametrize("status", ["failed", "dead", "pending", "processing", "young"])
def test_a_partition_with_a_row_that_stays_is_kept_and_emptied_by_batch(
    of_uuid7: Shop, status: str
) -> None:
    shop = of_uuid7
    shop.handler()
    ids = [uuid7(midnight(days) + timedelta(hours=1)) for days in (-20, -8) for _ in range(120)]
    for message_id in ids:
        shop.deliver(paid(message_id))
    finished_at(shop.raw, midnight(-8))
    for stays in (ids[0], ids[-1]):
        if status == "young":
            finished_at(shop.raw, midnight(-1), f"message_id = '{stays}'")
        else:
            shop.raw.execute(
                f"UPDATE txbox_inbox SET status = '{status}' WHERE message_id = '{stays}'"
            )

    assert run_once(shop.app, "prune").rows == 119

    assert place(shop.raw, ids[0]) == {f"uuid7_{midnight(-20):%Y%m%d}_0000"}
    # the younger one has a day's grace: the rest of it may yet go with its partition
    assert shop.raw.value("SELECT count(*) FROM txbox_inbox") == 1 + 120
    assert len(day_parts(shop.raw)) == 2 + 7 + 1 + 2
    for stays in (ids[0], ids[-1]):
        past_guard(shop.raw)
        shop.raw.execute(
            "UPDATE txbox_inbox SET status = 'discarded', processed_at = ? WHERE message_id = ?",
            (midnight(-8), stays),
        )
    assert run_once(shop.app, "prune").rows == 121
    assert len(day_parts(shop.raw)) == 7 + 1 + 2


def test_between_two_drops_live_messages_have_their_time(
    of_uuid7: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each detach stops all who use the inbox: thirty in a row made one live message in twenty late."""
    shop, detach, dropped = of_uuid7, partitions.detach, list[tuple[float, float]]()

    async def timed(*given: Any, **named: Any) -> Any:
        began = monotonic()
        answer = await detach(*given, **named)
        dropped.append((began, monotonic()))
        return answer

    monkeypatch.setattr(partitions, "detach", timed)
    monkeypatch.setattr(pruning, "DETACH_PAUSE_MAX_S", 0.5)
    parts = len(day_parts(shop.raw))
    run_once(shop.app, "prune", Task(stop=lambda: len(dropped) == 3))
    assert len(day_parts(shop.raw)) == parts - 3
    for (began, ended), (following, _) in pairwise(dropped):
        assert following - ended >= min(100 * (ended - began), 0.5)


def test_a_drain_does_not_wait_for_the_next_drop(
    of_uuid7: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    shop, stop = of_uuid7, threading.Event()
    monkeypatch.setattr(pruning, "DETACH_PAUSE_MAX_S", 2 * DEADLINE_S)
    monkeypatch.setattr(pruning, "_DETACH_SHARE", 1e-9)
    task = Task(on_progress=lambda _rows: stop.set(), stop=stop.is_set)
    parts, started = len(day_parts(shop.raw)), monotonic()
    run_once(shop.app, "prune", task)
    assert len(day_parts(shop.raw)) == parts - 1
    assert monotonic() - started < DEADLINE_S


def test_a_row_that_comes_between_look_and_lock_keeps_its_partition(
    of_uuid7: Shop, raw: Any
) -> None:
    """The drop waits for a transaction that has put an old id into the partition, and then looks again."""
    shop = of_uuid7
    shop.handler()
    shop.deliver(paid(uuid7(midnight(-20))))
    finished_at(shop.raw, midnight(-20))
    late, rival = uuid7(midnight(-20)), raw(shop.url)
    rival.execute("BEGIN")
    rival.execute("SET txbox.token = 'own'")
    rival.execute("SET txbox.closed = 'own'")
    rival.execute(
        "INSERT INTO txbox_inbox (consumer, message_id, status, topic, processed_at)"
        " VALUES ('billing', ?, 'processed', 't', now())",
        (late,),
    )
    answers: list[Any] = []

    def drop() -> None:
        with Raw(shop.url) as view:
            view.execute("SET lock_timeout = '60s'")
            name = f"txbox_inbox_uuid7_{midnight(-20):%Y%m%d}_0000"
            while not answers:
                # a vacuum may hold the partition for a moment, which is not waited for
                with suppress(psycopg.errors.LockNotAvailable):
                    answers.append(
                        view.value("SELECT txbox_partition_detach(?, 7 * 86400.0)", (name,))
                    )

    thread = threading.Thread(target=drop)
    thread.start()
    eventually(
        lambda: shop.raw.value(
            "SELECT count(*) FROM pg_locks WHERE NOT granted AND mode = 'AccessExclusiveLock'"
            " AND relation = 'txbox_inbox'::regclass"
        )
    )
    rival.execute("COMMIT")
    thread.join(DEADLINE_S)
    assert answers == [False]
    assert shop.deliver(paid(late)) is Outcome.DUPLICATE
    assert shop.raw.value("SELECT count(*) FROM txbox_inbox") == 2


def test_a_partition_is_not_dropped_before_its_time_whoever_asks(of_uuid7: Shop) -> None:
    for name in (
        *day_parts(of_uuid7.raw)[-10:],
        "txbox_inbox_uuid7_default",
        "txbox_attempt",
        "x; y",
    ):
        for function in ("detach", "drop"):
            sql = f"SELECT txbox_partition_{function}(?, 7 * 86400.0)"
            assert not of_uuid7.raw.value(sql, (name,))


def test_a_drop_gives_way_to_live_transactions_and_goes_on_later(of_uuid7: Shop, raw: Any) -> None:
    shop = of_uuid7
    shop.handler()
    shop.deliver(paid(old := uuid7(midnight(-8))))
    finished_at(shop.raw, midnight(-8))
    rival = raw(shop.url)
    rival.execute("BEGIN")
    rival.rows("SELECT count(*) FROM txbox_inbox")
    assert run_once(shop.app, "prune").rows == 0
    assert place(shop.raw, old)
    assert shop.deliver(paid(uuid7(midnight()))) is Outcome.PROCESSED
    rival.execute("ROLLBACK")
    assert run_once(shop.app, "prune").rows == 1


def test_an_age_or_a_consumer_that_is_asked_for_is_pruned_at_once(of_uuid7: Shop) -> None:
    shop = of_uuid7
    shop.handler()
    shop.handler(consumer="ledger")
    for consumer in ("billing", "ledger"):
        for days in (-3, 0):
            shop.deliver(paid(uuid7(midnight(days), 1)), consumer)
    finished_at(shop.raw, datetime.now(UTC) - timedelta(hours=2))
    hour = timedelta(hours=1)
    assert run_once(shop.app, "prune").rows == 0
    assert run_once(shop.app, "prune", Task(older_than=hour, dry_run=True)).rows == 4
    assert run_once(shop.app, "prune", Task(older_than=hour, consumer="ledger")).rows == 2
    assert run_once(shop.app, "prune", Task(older_than=hour)).rows == 2


def test_maintenance_needs_no_more_than_its_grants(of_uuid7: Shop) -> None:
    """Adding and dropping partitions is the owner's right; the role may do that much through two functions."""
    shop, role = of_uuid7, f"txbox_maintenance_{secrets.token_hex(4)}"
    shop.handler()
    shop.deliver(paid(uuid7(midnight(-8))))
    finished_at(shop.raw, midnight(-8))
    shop.raw.execute(f"CREATE ROLE {role} LOGIN PASSWORD 'x'")
    try:
        parts = urlsplit(shop.url)
        url = parts._replace(netloc=f"{role}:x@{parts.netloc.rpartition('@')[2]}").geturl()
        for statement in tables.split(tables.grants(shop.app.store.dialect)["maintenance"]):
            shop.raw.execute(statement.replace("<maintenance>", role))
        retention = Retention(processed=7 * DAY, ahead=3)
        with App(url, retention=retention) as app:
            # refused, said in the log, and no reason to stop
            assert run_once(app, "partitions").rows == run_once(app, "prune").rows == 0
            for statement in tables.split(
                tables.grants(shop.app.store.dialect, "uuid7")["maintenance"]
            ):
                shop.raw.execute(statement.replace("<maintenance>", role))
            assert run_once(app, "partitions").rows == 1
            assert run_once(app, "prune").rows == 1
        with Raw(url) as view, pytest.raises(psycopg.errors.InsufficientPrivilege):
            view.execute(f"DROP TABLE {day_parts(shop.raw)[0]}")
    finally:
        shop.raw.execute(f"DROP OWNED BY {role}")
        shop.raw.execute(f"DROP ROLE {role}")


def test_the_rights_of_the_owner_are_not_led_astray(of_uuid7: Shop, raw: Any) -> None:
    """A table of the same name in a caller's schema or among its temporary ones is not what is dropped."""
    caller = raw(of_uuid7.url)
    caller.execute(
        "CREATE TEMP TABLE txbox_inbox (message_id text) PARTITION BY RANGE (message_id)"
    )
    for days in (3, 4):
        assert (
            caller.value(
                "SELECT txbox_partition_make(?::timestamptz, ?::timestamptz, 0)",
                (midnight(days), midnight(days + 1)),
            )
            == "made"
        )
    assert day_parts(of_uuid7.raw)[-1] == f"txbox_inbox_uuid7_{midnight(4):%Y%m%d}_0000"


def test_hash_partitions_are_pruned_by_batch(new_database: NewDatabase) -> None:
    with opened(
        new_database("postgresql", schema=False), retention=Retention(processed=DAY, batch=10)
    ) as shop:
        shop.app.init(partition="hash")
        shop.handler()
        for number in range(100):
            assert shop.deliver(paid(f"m{number}")) is Outcome.PROCESSED
            assert shop.deliver(paid(f"m{number}")) is Outcome.DUPLICATE
        assert shop.raw.value("SELECT count(DISTINCT tableoid) FROM txbox_inbox") == 16
        finished_at(shop.raw, midnight(-3), "length(message_id) = 3")
        assert run_once(shop.app, "prune").rows == 90
        assert statuses(shop.raw) == {"processed": 10}


# -- batches ---------------------------------------------------------------------------------------


def test_old_rows_are_found_wherever_they_lie(postgresql_url: str) -> None:
    """Among rows that stay, in many blocks, in batches that are no larger than they may be."""
    with opened(postgresql_url) as shop:
        past_guard(shop.raw)
        shop.raw.execute(
            "INSERT INTO txbox_inbox (consumer, message_id, status, topic, processed_at)"
            " SELECT 'a', n::text, CASE WHEN n %% 7 = 0 THEN 'dead' ELSE 'processed' END, 't',"
            " now() - CASE WHEN n %% 3 = 0 THEN interval '9 days' ELSE interval '1 day' END"
            " FROM generate_series(1, 20000) AS n WHERE ? = 1",
            (1,),
        )
        connections, value = shop.app.database.sync, shop.app.store.dialect
        assert connections is not None
        found = drive(connections, partitions.layout, value)
        scan = BlockScan(value, found.parts, consumer=None, older_than_s=8 * 86400.0)
        sizes: list[int] = []
        while (done := drive(connections, scan.batch, 100)).more:
            sizes.append(done.rows)
        sizes.append(done.rows)
        assert sum(sizes) == 6666 - 952
        assert max(sizes) == 100
        assert (
            shop.raw.value(
                "SELECT count(*) FROM txbox_inbox WHERE status = 'processed'"
                " AND processed_at < now() - interval '8 days'"
            )
            == 0
        )
        assert statuses(shop.raw) == {"dead": 2857, "processed": 20000 - 2857 - 5714}


# -- the window ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("window", "inside", "outside"),
    [
        ((time(1), time(5)), (3600, 17999.9), (0, 3599.9, 18000, 80000)),
        ((time(22), time(2)), (79200, 86399, 0, 7199), (7200, 50000, 79199)),
        (None, (0, 86399), ()),
    ],
)
def test_a_window_may_pass_midnight(window: Any, inside: Any, outside: Any) -> None:
    retention = Retention(window=window)
    assert all(retention.open_at(second) for second in inside)
    assert not any(retention.open_at(second) for second in outside)


@pytest.mark.parametrize(
    "window", [(time(1), time(1)), (time(1, tzinfo=UTC), time(2)), ("1:00", "2:00"), time(1)]
)
def test_a_window_that_is_none_is_refused(window: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"Retention\.window"):
        Retention(window=window)


def _reports(shop: Shop, wanted: Report) -> bool:
    return run_once(shop.app, "prune") == wanted


def test_the_window_is_told_by_the_database_and_not_asked_by_hand(
    database_url: str, raw: Callable[[str], Raw]
) -> None:
    with opened(database_url) as shop:
        connections = shop.app.database.sync
        assert connections is not None
        second = drive(connections, jobs.value, shop.app.store.dialect, "second_of_day")
        now = datetime.now(UTC)
        of_day = now.hour * 3600 + now.minute * 60 + now.second
        assert min(abs(second - of_day), 86400 - abs(second - of_day)) < 60
        hour = int(second // 3600)
        # from the hour after next to the one after that: closed now, and for the time of this test
        closed = (time((hour + 2) % 24), time((hour + 3) % 24))
        opens = (time((hour - 1) % 24), time((hour + 2) % 24))
        shop.handler()
        for window, rows in ((closed, 0), (opens, 1)):
            shop.app.retention = Retention(processed=timedelta(microseconds=1), window=window)
            if not rows:
                shop.deliver(paid("a"))
            for job in ("prune-outbox", "drop-payloads"):
                assert run_once(shop.app, job).rows == 0
            wanted = Report("prune", rows, closed=not rows)
            eventually(partial(_reports, shop, wanted))
        shop.deliver(paid("b"))
        shop.app.retention = Retention(processed=timedelta(microseconds=1), window=closed)
        # SQLite counts milliseconds: in the one in which it was done it is not old yet
        eventually(lambda: run_once(shop.app, "prune", Task(at_any_time=True)).rows == 1)


def test_tables_have_their_settings_and_a_guard_that_is_always_on(
    postgresql_url: str, raw: Any
) -> None:
    view = raw(postgresql_url)
    settings = view.rows(
        "SELECT relname, reloptions FROM pg_class WHERE relname IN"
        " ('txbox_inbox', 'txbox_outbox', 'txbox_sequence', 'txbox_job') ORDER BY 1"
    )
    # those of a partitioned inbox are its partitions'
    assert [str(name) for name, options in settings if not options] in ([], ["txbox_inbox"])
    guards = view.rows("SELECT tgenabled FROM pg_trigger WHERE tgname = 'txbox_inbox_guard'")
    assert {state for (state,) in guards} == {"A"}


def test_asyncpg_prunes_and_makes_partitions(new_database: NewDatabase) -> None:
    url = new_database("postgresql", schema=False)

    async def maintained() -> list[int]:
        async with asyncpg.create_pool(url) as pool:
            app = App(pool, retention=Retention(processed=timedelta(microseconds=1), ahead=8))
            app.handler("t", consumer="c")(_nothing)
            await app.init_async(partition="uuid7")
            app.retention = Retention(processed=timedelta(microseconds=1), ahead=10)
            for number in range(5):
                message: Message[Any] = Message(topic="t", id=f"x{number}", payload=b"{}")
                assert await app.process_async(message) is Outcome.PROCESSED
            assert app.database.asynchronous is not None
            wanted = [job for job in JOBS if job.name in ("partitions", "prune")]
            return [
                (await drive_async(app.database.asynchronous, job.run, app, Task())).rows
                for job in wanted
            ]

    assert asyncio.run(maintained()) == [2, 5]


async def _nothing(message: Message[Any], tx: Any) -> None:
    """The marker alone."""
