"""A partition is detached in one transaction and dropped in the next: what a crash leaves, and what is not ours."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import psycopg
import pytest

from tests.support.databases import Raw
from tests.support.partitions import DAY, day_parts, finished_at, midnight, place, uuid7
from tests.support.shop import Shop, paid
from tests.support.waiting import DEADLINE_S, eventually
from txbox import Outcome, Retention
from txbox.maintenance import run_once
from txbox.store import partitions

_DETACH = "SELECT txbox_partition_detach(?, 7 * 86400.0)"
_DROP = "SELECT txbox_partition_drop(?, 7 * 86400.0)"
_TABLES = (
    "SELECT relname FROM pg_class WHERE relkind = 'r' AND relname ~ '^txbox_inbox_uuid7_[0-9]'"
)
_PRUNE = """
from datetime import timedelta
from txbox import App, Retention
from txbox.maintenance import run_once
from txbox.testing import install_from_environment
with App({url!r}, retention=Retention(processed=timedelta(days=7))) as app:
    install_from_environment()
    run_once(app, "prune")
"""


def name_of(days: int) -> str:
    return f"txbox_inbox_uuid7_{midnight(days):%Y%m%d}_0000"


def is_there(raw: Raw, name: str) -> bool:
    return bool(raw.value("SELECT to_regclass(?) IS NOT NULL", (name,)))


@pytest.fixture
def over(of_uuid7: Shop) -> Shop:
    """One day is over, with a row and its attempt; the days around it have no partition any more."""
    shop = of_uuid7

    def once(message: Any, _tx: Any) -> None:
        if message.attempt == 1:
            raise ValueError("once")

    shop.handler(once)
    for part in day_parts(shop.raw):
        if part < name_of(-7) and part != name_of(-20):
            shop.raw.execute(f"DROP TABLE {part}")
    shop.deliver(paid(uuid7(midnight(-20), 7)))
    shop.work(limit=10)
    finished_at(shop.raw, midnight(-20))
    shop.raw.execute("UPDATE txbox_attempt SET recorded_at = recorded_at - interval '20 days'")
    assert shop.raw.value("SELECT count(*) FROM txbox_attempt") == 1
    return shop


@pytest.mark.parametrize(
    ("point", "nth", "attached", "there"),
    [
        # each is a transaction in one round trip: behind it, it is committed
        ("after:partitions", 1, True, True),
        ("after:partition_detach", 1, False, True),
        ("after:partitions_detached", 2, False, True),
        ("after:partition_drop", 1, False, False),
        ("after:prune_orphans", 1, False, False),
    ],
)
def test_the_next_run_drops_what_a_killed_one_has_detached(
    over: Shop, point: str, nth: int, *, attached: bool, there: bool
) -> None:
    shop, name = over, name_of(-20)
    environment = dict(os.environ) | {"TXBOX_CRASH_AT": point, "TXBOX_CRASH_NTH": str(nth)}
    killed = subprocess.run(
        [sys.executable, "-c", _PRUNE.format(url=shop.url)], env=environment, check=False
    )
    assert killed.returncode == -signal.SIGKILL
    # the server has noticed, and let go of what it had locked
    eventually(lambda: is_there(shop.raw, name) is there)
    eventually(lambda: (name in day_parts(shop.raw)) is attached)
    old = uuid7(midnight(-20), 7)
    if not attached:
        assert place(shop.raw, old) == set()
    # whoever was killed holds the lease of the job
    shop.raw.execute("UPDATE txbox_job SET lease_until = NULL, token = NULL")
    assert run_once(shop.app, "prune").rows == int(attached)
    assert not is_there(shop.raw, name)
    if there:
        assert shop.raw.value("SELECT count(*) FROM txbox_attempt") == 0
    # past the retention the message is a new one, and unique again
    assert shop.deliver(paid(old)) is Outcome.FAILED
    assert place(shop.raw, old) == {"uuid7_default"}


def test_two_who_detach_at_once_do_it_once(over: Shop, raw: Callable[[str], Raw]) -> None:
    shop, name = over, name_of(-20)
    first, second = raw(shop.url), raw(shop.url)
    answers: list[Any] = []
    for sql in (_DETACH, _DROP):
        first.execute("BEGIN")
        assert first.value(sql, (name,))
        late = threading.Thread(target=lambda: answers.append(second.value(sql, (name,))))  # noqa: B023
        late.start()
        eventually(lambda: shop.raw.value("SELECT count(*) FROM pg_locks WHERE NOT granted") > 0)
        first.execute("COMMIT")
        late.join(DEADLINE_S)
    assert answers == [False, False]
    assert not is_there(shop.raw, name)


def test_two_runs_at_once_prune_once(over: Shop) -> None:
    reports: list[Any] = []
    runs = [
        threading.Thread(target=lambda: reports.append(run_once(over.app, "prune")))
        for _ in range(4)
    ]
    for thread in runs:
        thread.start()
    for thread in runs:
        thread.join(DEADLINE_S)
    assert sum(report.rows for report in reports) == 1
    assert len(reports) == 4
    assert not is_there(over.raw, name_of(-20))


@pytest.mark.parametrize(
    "change",
    [
        "COMMENT ON TABLE {name} IS NULL",
        "ALTER TABLE {name} RENAME TO {name}_kept",
        "CREATE SCHEMA archive; ALTER TABLE {name} SET SCHEMA archive",
        (
            "CREATE TABLE archive (LIKE {name}) PARTITION BY RANGE (message_id);"
            "ALTER TABLE archive ATTACH PARTITION {name} FOR VALUES FROM (MINVALUE) TO (MAXVALUE)"
        ),
        # rows that are wanted after all
        "UPDATE {name} SET status = 'failed'",
        "UPDATE {name} SET processed_at = now()",
    ],
)
def test_what_was_to_be_dropped_and_is_wanted_stays(over: Shop, change: str) -> None:
    name = name_of(-20)
    assert over.raw.value(_DETACH, (name,))
    _stays(over, name, change)


@pytest.mark.parametrize(
    "comment", ["COMMENT ON TABLE {name} IS 'archive: to be dropped by txbox'", ""]
)
def test_a_table_that_an_operator_has_detached_stays(over: Shop, comment: str) -> None:
    _stays(over, name_of(-20), f"ALTER TABLE txbox_inbox DETACH PARTITION {{name}};{comment}")


def _stays(shop: Shop, name: str, change: str) -> None:
    oid = shop.raw.value(f"SELECT '{name}'::regclass::oid::bigint")
    for statement in filter(None, change.format(name=name).split(";")):
        shop.raw.execute(statement)
    assert run_once(shop.app, "prune").rows == 0
    assert not shop.raw.value(_DROP, (name,))
    assert shop.raw.value("SELECT count(*) FROM pg_class WHERE oid = ?", (oid,)) == 1


def test_a_table_of_that_name_and_comment_in_another_schema_stays(over: Shop) -> None:
    shop, name = over, name_of(-20)
    shop.raw.execute("CREATE SCHEMA other")
    shop.raw.execute(f"CREATE TABLE other.{name} (message_id text)")
    shop.raw.execute(f"COMMENT ON TABLE other.{name} IS '{name}: to be dropped by txbox'")
    shop.raw.execute("SET search_path = other, public")
    assert run_once(shop.app, "prune").rows == 1
    assert is_there(shop.raw, f"other.{name}")
    assert not is_there(shop.raw, f"public.{name}")


def test_a_detach_waits_for_nobody_while_others_wait_for_it(
    over: Shop, raw: Callable[[str], Raw]
) -> None:
    """It has the inbox: a reader of one partition, or a vacuum, would be waited for by all who come."""
    reader, view = raw(over.url), raw(over.url)
    reader.execute("BEGIN")
    reader.rows("SELECT count(*) FROM txbox_inbox_uuid7_default")
    view.execute("SET lock_timeout = '60s'")
    with pytest.raises(psycopg.errors.LockNotAvailable):
        view.value(_DETACH, (name_of(-20),))
    assert over.deliver(paid(uuid7(midnight()))) is Outcome.FAILED
    reader.execute("ROLLBACK")
    assert view.value(_DETACH, (name_of(-20),))


def test_the_wait_for_the_inbox_is_short_at_first(
    over: Shop, raw: Callable[[str], Raw], monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[int] = []
    detach = partitions.detach

    async def noted(*given: Any, **named: Any) -> bool:
        waits.append(named["wait_ms"])
        return await detach(*given, **named)

    monkeypatch.setattr(partitions, "detach", noted)
    rival = raw(over.url)
    rival.execute("BEGIN")
    rival.rows("SELECT count(*) FROM txbox_inbox")
    run_once(over.app, "prune")
    assert waits == [5, 10, 20, 40, 80, 100, 100, 100, 100, 100]
    rival.execute("ROLLBACK")
    run_once(over.app, "prune")
    assert waits[10:] == [5]
    assert not is_there(over.raw, name_of(-20))


def test_a_longer_retention_keeps_what_a_crash_has_left(over: Shop) -> None:
    name = name_of(-20)
    assert over.raw.value(_DETACH, (name,))
    over.app.retention = Retention(processed=30 * DAY)
    assert run_once(over.app, "prune").rows == 0
    assert is_there(over.raw, name)
    over.app.retention = Retention(processed=7 * DAY)
    assert run_once(over.app, "prune").rows == 0
    assert not is_there(over.raw, name)
