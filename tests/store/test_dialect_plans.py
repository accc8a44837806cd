"""What the planner believes of a table must not change what a statement does, nor what it costs."""

from __future__ import annotations

import itertools
import json
import sqlite3
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest

from tests.support.backlog import fill
from tests.support.databases import Raw
from tests.support.shop import CONSUMER, Shop, opened, paid
from txbox.session import Session, Statement, drive
from txbox.store import leases
from txbox.store.dialect import as_time, dialect, native

pytestmark = pytest.mark.every_database

_PARAMS: dict[str, Any] = {
    "consumer": CONSUMER,
    "token": "t",
    "lease_s": 60.0,
    "limit": 20,
    "window": 220,
    "after": "",
    "keyless": False,
    "heads_only": True,
    "dead_blocks": True,
    "max_starts": 3,
    "outbox": True,
    "ahead_s": 60.0,
    "local": "local:billing",
    "needs_payload": True,
    "status": "dead",
}
_NO_FILTER = dict.fromkeys(
    (
        "message_id", "topic", "type", "key", "error_type", "fingerprint", "older_than_s", "since_s", "until_s",
        "id_prefix",
    )
)  # fmt: skip
_ROWS: dict[str, dict[str, list[Any]]] = {
    "due": {"consumer": [CONSUMER, "another"], "route": ["local:billing", None]}
}


def stale(shop: Shop, count: int) -> None:
    """Store messages after the statistics were taken: the planner believes that there is one row."""
    shop.deliver(paid("m0"))
    shop.raw.execute("VACUUM ANALYZE txbox_inbox")
    for number in range(1, count):
        shop.deliver(paid(f"m{number}"))


def test_a_limit_holds_with_stale_statistics(postgresql_url: str) -> None:
    with opened(postgresql_url) as shop:
        shop.handler(mode="stored")
        stale(shop, 12)
        assert len(shop.lease(limit=1)) == 1
        assert len(shop.lease(limit=5)) == 5
        # a row that may kill its process is leased alone
        shop.raw.execute("UPDATE txbox_inbox SET starts = 1 WHERE status = 'pending'")
        assert len(shop.lease(limit=1, suspect=True)) == 1
        shop.raw.execute("UPDATE txbox_inbox SET lease_until = now() WHERE lease_until IS NOT NULL")
        assert shop.app.database.sync is not None
        assert (
            len(
                drive(
                    shop.app.database.sync,
                    leases.rescue,
                    shop.app.store,
                    consumer=CONSUMER,
                    max_starts=3,
                    limit=2,
                )
            )
            == 2
        )


# -- what a statement costs, by the database's own count -------------------------------------------


def cost(
    raw: Raw,
    name: str,
    rows: dict[str, list[Any]] | None = None,
    /,
    *,
    mode: str = "custom",
    **params: Any,
) -> int:
    """Run a named query, undo it, and return what it has touched: pages, index entries or steps.

    Args:
        mode: on PostgreSQL, of the plan of a prepared statement.
    """
    statement = dialect(raw.product).statement(name, _PARAMS | params, rows or _ROWS.get(name))
    text, values = statement.sql, statement.params
    match raw.product:
        case "postgresql":
            sql, names = native(text, "numeric")
            raw.execute(f"SET plan_cache_mode = force_{mode}_plan")
            raw.execute(f"PREPARE costs AS {sql}")
            given = ", ".join(_literal(values[each]) for each in names)
            raw.execute("BEGIN")
            ((plan,),) = raw.rows(f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) EXECUTE costs({given})")
            raw.execute("ROLLBACK")
            raw.execute("DEALLOCATE costs")
            found = plan if isinstance(plan, list) else json.loads(plan)
            top = found[0]["Plan"]
            return int(top["Shared Hit Blocks"] + top["Shared Read Blocks"])
        case "mysql":
            sql, names = native(text, "qmark")
            raw.execute("BEGIN")
            before = _handler_reads(raw)
            raw.rows(sql.replace("%", "%%"), [values[each] for each in names])
            after = _handler_reads(raw)
            raw.execute("ROLLBACK")
            return after - before
        case _:
            sql, names = native(text, "qmark")
            connection: sqlite3.Connection = raw._connection  # steps are counted by the driver
            steps = itertools.count(1)
            raw.execute("BEGIN")
            connection.set_progress_handler(lambda: next(steps) and 0, 10)
            raw.rows(sql, [values[each] for each in names])
            connection.set_progress_handler(None, 0)
            raw.execute("ROLLBACK")
            return 10 * next(steps)


def _handler_reads(raw: Raw) -> int:
    return sum(int(count) for _, count in raw.rows("SHOW SESSION STATUS LIKE 'Handler_read%'"))


def _literal(value: Any) -> str:
    if value is None:
        return "NULL"
    if isinstance(value, list):
        return "ARRAY[" + ", ".join(_literal(part) for part in value) + "]"
    return str(value).lower() if isinstance(value, bool | int | float) else f"'{value}'"


#: A handful of rows costs at most this, so that many rows may cost no more; naive plans go into tens of thousands.
_FLAT = {"postgresql": 2_500, "mysql": 2_500, "sqlite": 60_000}


def _fresh(raw: Raw) -> None:
    match raw.product:
        case "postgresql":
            raw.execute("VACUUM ANALYZE txbox_inbox")
        case "mysql":
            raw.rows("ANALYZE TABLE txbox_inbox")
        case _:
            raw.execute("ANALYZE")


def _never(raw: Raw) -> None:
    del raw


@pytest.fixture
def many(database: Any) -> int:
    """Rows: far more than any statement may touch; MySQL stores them ten times as slowly as the others."""
    return 6_000 if database.name == "mysql" else 20_000


@pytest.fixture(params=["never", "of an empty table", "of one row", "of finished rows", "fresh"])
def filled(
    request: pytest.FixtureRequest, database_url: str, raw: Callable[[str], Raw]
) -> Callable[..., Raw]:
    """Makes a backlog; the planner's statistics are of the named time."""
    view = raw(database_url)

    def make(*parts: dict[str, Any]) -> Raw:
        if view.product == "postgresql":
            # one test says when, and no daemon
            names = "SELECT oid::regclass::text FROM pg_class WHERE relname LIKE 'txbox\\_inbox%' AND relkind = 'r'"
            for (name,) in view.rows(names):
                view.execute(f"ALTER TABLE {name} SET (autovacuum_enabled = off)")
        if request.param == "of an empty table":
            _fresh(view)
        if request.param == "of one row":
            fill(view, 1, first=900_000_000, status="discarded", consumer="another")
            _fresh(view)
        if request.param == "of finished rows":
            fill(view, 5_000, first=900_000_000, status="discarded")
            _fresh(view)
        for part in parts:
            fill(view, **part)
        if request.param == "of one row" and view.product == "sqlite":
            # SQLite 3.46 believes them, and scans. This notices growth: docs/troubleshooting.md
            view.execute("PRAGMA optimize=0x10002")
        if request.param == "fresh":
            _fresh(view)
        return view

    return make


def _every_mode(raw: Raw) -> tuple[str, ...]:
    return ("custom", "generic") if raw.product == "postgresql" else ("custom",)


def test_a_lease_costs_the_same_whatever_waits_behind_it(
    filled: Callable[..., Raw], many: int
) -> None:
    raw = filled(
        {"rows": many},
        # parked, and not due for an hour
        {"rows": many, "first": many, "status": "failed", "due_in_s": 3600},
        {"rows": many, "first": 2 * many, "status": "dead"},
    )
    for name in ("lease", "lease_suspect", "work_left", "due"):
        for mode in _every_mode(raw):
            assert cost(raw, name, mode=mode) < _FLAT[raw.product], (name, mode)


def test_no_index_but_its_own_is_read_for_a_lease(
    postgresql_url: str, raw: Callable[[str], Raw]
) -> None:
    """PostgreSQL 19 read txbox_inbox_kept from end to end, because what a lease asks for implied its condition."""
    view = raw(postgresql_url)
    view.execute("SET enable_seqscan = off")
    for index in ("due", "status", "arrival", "processed_at"):
        view.execute(f"DROP INDEX txbox_inbox_{index}")
    for name in ("lease", "lease_suspect", "lease_ordered", "work_left", "due"):
        statement = dialect("postgresql").statement(name, _PARAMS, _ROWS.get(name))
        sql, names = native(statement.sql, "numeric")
        view.execute(f"PREPARE costs AS {sql}")
        values = ", ".join(_literal(statement.params[each]) for each in names)
        plan = str(view.rows(f"EXPLAIN EXECUTE costs({values})"))
        assert "txbox_inbox" in plan
        assert "txbox_inbox_kept" not in plan, name
        view.execute("DEALLOCATE costs")


def test_a_replay_costs_the_same_whatever_is_in_the_table(
    filled: Callable[..., Raw], many: int
) -> None:
    raw = filled(
        {"rows": many, "status": "dead"},
        {"rows": many, "first": many, "consumer": "another"},
    )
    middle = raw.value("SELECT min(arrival) FROM txbox_inbox WHERE status = 'dead'") + many // 2
    # MySQL has no index of this order, and sorts the consumer's rows
    most = 6 * many if raw.product == "mysql" else 2 * _FLAT[raw.product]
    for mode in _every_mode(raw):
        page = _NO_FILTER | {"status": None, "after": middle, "limit": 100}
        assert cost(raw, "replay_read", mode=mode, **page) < most, mode
        assert cost(raw, "doctor_keys", mode=mode, limit=100) < _FLAT[raw.product], mode


def test_a_rescue_looks_at_leased_rows_only(filled: Callable[..., Raw], many: int) -> None:
    raw = filled({"rows": many}, {"rows": many, "first": many, "status": "dead"})
    for consumer in (CONSUMER, None):
        for mode in _every_mode(raw):
            assert cost(raw, "rescue", mode=mode, consumer=consumer) < _FLAT[raw.product], mode


def _key(count: int, raw_product: str) -> str:
    return f"CONCAT('k', n % {count})" if raw_product == "mysql" else f"'k' || (n % {count})"


def test_the_heads_of_many_keys_cost_the_same_whatever_waits_behind_them(
    filled: Callable[..., Raw], database: Any, many: int
) -> None:
    key = _key(2_000, "mysql" if database.name.startswith("m") else "")
    raw = filled({"rows": 2 * many, "key": key})
    for name in ("lease_ordered", "lease_suspect"):
        for mode in _every_mode(raw):
            assert cost(raw, name, mode=mode) < 2 * _FLAT[raw.product], (name, mode)
    for mode in _every_mode(raw):
        assert cost(raw, "lease_next", mode=mode, key="k7") < _FLAT[raw.product], mode


def test_a_key_that_is_blocked_costs_nothing_for_the_rows_behind_its_head(
    filled: Callable[..., Raw], many: int
) -> None:
    raw = filled(
        {"rows": 1, "key": "'dead'", "status": "dead"},
        {"rows": many, "key": "'dead'", "first": 1},
        {"rows": 5, "key": "'runs'", "first": many + 1, "due_in_s": -1800},
    )
    # MySQL cannot step from key to key, and looks at each row: five index entries
    most = 6 * many if raw.product == "mysql" else 2 * _FLAT[raw.product]
    for mode in _every_mode(raw):
        assert cost(raw, "lease_ordered", mode=mode) < most, mode
        assert cost(raw, "lease_next", mode=mode, key="dead") < _FLAT[raw.product], mode


def test_a_batch_of_a_bulk_change_costs_the_same_wherever_it_begins(
    filled: Callable[..., Raw], many: int
) -> None:
    raw = filled(
        {"rows": many, "status": "dead"},
        {"rows": many, "first": many, "status": "dead", "consumer": "another"},
        {"rows": many, "first": 2 * many},
    )
    middle = raw.value("SELECT min(arrival) FROM txbox_inbox WHERE status = 'dead'") + many // 2
    for after in (-1, middle):
        for mode in _every_mode(raw):
            page = {"after": after, "limit": 100}
            found = cost(raw, "inbox_select", mode=mode, **_NO_FILTER | page)
            assert found < 2 * _FLAT[raw.product], (after, mode)


def test_an_explanation_costs_the_same_whatever_is_in_the_table(
    filled: Callable[..., Raw], many: int
) -> None:
    raw = filled(
        {"rows": many, "status": "dead"},
        {"rows": many, "first": many, "consumer": "another"},
    )
    keys = {"consumer": [CONSUMER, "another"], "message_id": ["m7", "m7"]}
    asked: list[tuple[str, dict[str, Any], dict[str, list[Any]] | None]] = [
        ("explain_consumers", {"after": "", "limit": 1_000}, None),
        ("explain_inbox", {}, keys),
        ("inbox_show", {"message_id": "m7"}, None),
    ]
    if raw.product == "postgresql":
        asked.append(("explain_holder", {"message_id": "m7"}, None))
    for name, params, rows in asked:
        for mode in _every_mode(raw):
            assert cost(raw, name, rows, mode=mode, **params) < _FLAT[raw.product], (name, mode)


def test_the_counts_of_one_consumer_cost_the_same_whatever_others_have_counted(
    database_url: str, raw: Callable[[str], Raw]
) -> None:
    view, ago = raw(database_url), 100_000
    text = "CAST('{}' AS BINARY)" if view.product == "mysql" else "'{}'"

    def count(minute: int, name: str) -> None:
        view.execute(
            "INSERT INTO txbox_activity (minute, kind, name, worker)"
            f" VALUES (?, 'consumer', {text.format(name)}, '')",
            (minute,),
        )

    def costs() -> list[int]:
        params = {"kind": "consumer", "name": CONSUMER, "minute": ago, "step": 30}
        return [cost(view, "activity_read_one", mode=mode, **params) for mode in _every_mode(view)]

    for minute in range(10):
        count(ago + minute, CONSUMER)
    alone = costs()
    for number in range(20):
        count(ago, f"another-{number}")
    for power in range(9):
        view.execute(
            f"INSERT INTO txbox_activity (minute, kind, name, worker) SELECT minute + {2**power}, kind, name, worker"
            f" FROM txbox_activity WHERE name <> {text.format(CONSUMER)}"
        )
    if view.product == "mysql":
        view.rows("ANALYZE TABLE txbox_activity")
    else:
        view.execute("ANALYZE txbox_activity")
    assert view.value("SELECT count(*) FROM txbox_activity") == 20 * 512 + 10
    assert all(now < 3 * before + 50 for now, before in zip(costs(), alone, strict=True))


def test_the_groups_of_a_quarantine_cost_the_same_however_large_it_is(
    database_url: str, raw: Callable[[str], Raw]
) -> None:
    view = raw(database_url)
    columns, table = "consumer, message_id, hash, reason", "txbox_quarantine"
    view.execute(f"INSERT INTO {table} ({columns}) VALUES ('billing', 'm', 'h', 'r')")

    def costs(letters: str) -> list[int]:
        for letter in letters:
            longer = (
                f"CONCAT(message_id, '{letter}')"
                if view.product == "mysql"
                else f"message_id || '{letter}'"
            )
            view.execute(
                f"INSERT INTO {table} ({columns}) SELECT consumer, {longer}, hash, reason FROM {table}"
            )
        if view.product == "mysql":
            view.rows("ANALYZE TABLE txbox_quarantine")
        else:
            view.execute("ANALYZE txbox_quarantine")
        return [cost(view, "quarantine_groups", mode=mode, most=500) for mode in _every_mode(view)]

    before, now = costs("abcdefghijk"), costs("lm")
    assert view.value("SELECT count(*) FROM txbox_quarantine") == 2**13
    assert all(many < 1.5 * some + 50 for many, some in zip(now, before, strict=True)), (
        before,
        now,
    )


# -- time ------------------------------------------------------------------------------------------


def test_the_clock_is_not_behind_what_was_written_before_it_was_read(shop: Shop) -> None:
    """SQLite's day numbers are some 40 us off: what was stored in this millisecond was said to be in the future."""
    assert shop.app.database.sync is not None
    written = shop.app.store.dialect.statement("database_clock")
    clock = shop.app.store.dialect.statement("clock")
    for _ in range(50):
        written_at, clock_s = drive(shop.app.database.sync, _both, written, clock)
        assert datetime.fromtimestamp(clock_s, UTC) >= written_at


async def _both(db: Session, written: Statement, clock: Statement) -> tuple[datetime, float]:
    written_at = as_time((await db.alone(written)).rows[0][0])
    assert written_at is not None
    return written_at, float((await db.alone(clock)).rows[0][0])
