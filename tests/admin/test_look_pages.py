"""Pages of messages: in order, whole across stretches of arrivals, and by an index."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from typing import Any

import pymysql
import pytest

from tests.support.databases import Raw
from txbox.admin import Admin, InboxFilter, OutboxFilter, QuarantineFilter
from txbox.admin.tables import Filter
from txbox.errors import ConfigurationError, Fault, StoreError
from txbox.store.dialect import dialect, native


def receive(view: Raw, arrivals: range, status: str = "dead", topic: str = "orders") -> None:
    for arrival in arrivals:
        view.execute(
            "INSERT INTO txbox_inbox (consumer, message_id, status, topic, arrival) VALUES ('billing', ?, ?, ?, ?)",
            (f"m{arrival}", status, topic, arrival),
        )


def test_a_page_goes_through_gaps_and_says_how_far_it_looked(
    sqlite_url: str, raw: Callable[[str], Raw]
) -> None:
    view = raw(sqlite_url)
    receive(view, range(1, 4), topic="rare")
    receive(view, range(2_000_000, 2_000_010))
    with Admin(sqlite_url) as admin:
        rare = InboxFilter(topic="rare")
        assert [row.message_id for row in admin.list(rare)] == ["m3", "m2", "m1"]
        assert admin.page(rare).behind is None
        early = admin.page(rare, within_s=0.0)
        assert early.rows == []
        assert isinstance(early.behind, int)
        found: list[str] = []
        place: int | str | None = early.behind
        while place is not None:
            page = admin.page(rare, before=place, within_s=0.0)
            found += [row.message_id for row in page.rows]
            place = page.behind
        assert found == ["m3", "m2", "m1"]
        both = [row.arrival for row in admin.list(InboxFilter(), limit=11)]
        assert both == [*range(2_000_009, 1_999_999, -1), 3]


def test_pages_are_read_through_asyncpg(postgresql_url: str) -> None:
    with Admin(postgresql_url.replace("://", "+asyncpg://")) as admin:
        assert admin.list(InboxFilter()) == []
        assert admin.list(InboxFilter(status="dead")) == []
        assert admin.list(InboxFilter(message_id="m1")) == []
        assert admin.list(OutboxFilter()) == []
        assert admin.list(QuarantineFilter()) == []
        assert admin.failures() == []
        assert admin.audit() == []


@pytest.mark.parametrize("query", ["inbox_list", "inbox_list_open", "inbox_list_id"])
def test_no_page_of_default_filters_reads_the_whole_table(
    query: str, postgresql_url: str, raw: Callable[[str], Raw]
) -> None:
    view = raw(postgresql_url)
    view.execute(
        "INSERT INTO txbox_inbox (consumer, message_id, status, topic) "
        "SELECT 'consumer-' || n % 5, 'm' || n, CASE n % 50 WHEN 0 THEN 'dead' ELSE 'discarded' END, 'orders' "
        "FROM generate_series(1, 60000) AS n"
    )
    view.execute("VACUUM ANALYZE txbox_inbox")
    nothing = dict.fromkeys(
        ("topic", "type", "key", "error_type", "fingerprint", "older_than_s", "since_s", "until_s", "id_prefix")
    )  # fmt: skip
    params = {
        **nothing, "floor": 59_000, "before": 60_001, "limit": 50, "status": None, "consumer": None,
    }  # fmt: skip
    if query != "inbox_list":
        params |= {"consumer": "consumer-0", "status": "dead", "message_id": "m50"}
    sql, names = native(dialect("postgresql").queries[query], "format")
    plan = view.rows(f"EXPLAIN {sql}", [params[name] for name in names])
    text = "\n".join(row[0] for row in plan)
    assert "Seq Scan" not in text, text


@pytest.mark.every_database
def test_no_statement_of_a_page_runs_for_long(mysql_url: str, raw: Callable[[str], Raw]) -> None:
    query = dialect("mysql").queries["inbox_newest"].partition("coalesce")[0]
    short = query.replace("= 5 ", "= 0.2 ").replace("(5000)", "(200)")
    assert short.count("0.2") == short.count("(200)") == 1
    many = ", ".join(f"information_schema.columns AS t{n}" for n in range(4))
    with pytest.raises(pymysql.Error) as ended:
        raw(mysql_url).value(f"{short} count(*) FROM {many}")
    assert dialect("mysql").fault(str(ended.value.args[0])) is Fault.TIMEOUT


def test_verbs_may_be_called_from_several_threads_at_a_time_through_asyncpg(
    postgresql_url: str,
) -> None:
    with (
        Admin(postgresql_url.replace("://", "+asyncpg://")) as admin,
        ThreadPoolExecutor(4) as threads,
    ):
        assert list(threads.map(lambda _: list(admin.status()), range(20))) == [[]] * 20


@pytest.mark.parametrize("where", [InboxFilter(), OutboxFilter(), QuarantineFilter()])
@pytest.mark.parametrize(
    "wrong", [{"limit": 0}, {"limit": -1}, {"before": "abc"}, {"before": "-1"}]
)
def test_a_page_that_cannot_be_is_refused(
    where: Filter[Any, Any], wrong: dict[str, Any], sqlite_url: str
) -> None:
    with Admin(sqlite_url) as admin:
        for read in (admin.list, admin.page):
            with pytest.raises(ConfigurationError):
                read(where, **wrong)


def test_a_stretch_that_takes_too_long_is_read_in_shorter_ones(
    sqlite_url: str, raw: Callable[[str], Raw], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows far back may be larger, or colder, than the newest ones."""
    receive(raw(sqlite_url), range(1, 4), topic="rare")
    receive(raw(sqlite_url), range(2_000_000, 2_000_003))
    spans: list[int] = []
    read = Admin._page_rows

    def bounded(admin: Admin, name: str, params: Any = None) -> Any:
        if name == "inbox_list":
            spans.append(params["before"] - params["floor"])
            if spans[-1] > 100_000:
                raise StoreError("canceling statement", fault=Fault.TIMEOUT, code="57014")
        return read(admin, name, params)

    monkeypatch.setattr(Admin, "_page_rows", bounded)
    with Admin(sqlite_url) as admin:
        found = admin.list(InboxFilter(topic="rare"))
    assert [row.message_id for row in found] == ["m3", "m2", "m1"]
    assert max(spans) > 100_000


def _an_hour(view: Raw, first: int, count: int, at: str) -> None:
    """A message a second, from that time on; on SQLite."""
    view.execute(
        "INSERT INTO txbox_inbox (consumer, message_id, status, topic, arrival, received_at)"
        " WITH RECURSIVE numbers(n) AS (SELECT 0 UNION ALL SELECT n + 1 FROM numbers WHERE n < ?)"
        " SELECT 'billing', 'm' || (? + n), CASE WHEN n % 100 THEN 'processed' ELSE 'dead' END, 'orders', ? + n,"
        " strftime('%Y-%m-%d %H:%M:%f', ?, n || ' seconds') FROM numbers",
        (count - 1, first, first, at),
    )


@pytest.mark.parametrize("status", [None, "dead"])
def test_rows_of_a_time_are_found_without_a_walk_through_all_that_came_since(
    status: str | None, sqlite_url: str, raw: Callable[[str], Raw], monkeypatch: pytest.MonkeyPatch
) -> None:
    view = raw(sqlite_url)
    # numbers that are skipped, as duplicates do, where a half may fall
    _an_hour(view, 1_000, 9_000, "2026-11-01 00:00:00")
    _an_hour(view, 20_000, 9_000, "2026-11-01 02:30:00")
    looked = 0
    read = Admin._page_rows

    def counting(admin: Admin, name: str, params: Any = None) -> Any:
        nonlocal looked
        looked += params["before"] - params["floor"] if name == "inbox_list" else 0
        return read(admin, name, params)

    monkeypatch.setattr(Admin, "_page_rows", counting)
    with Admin(sqlite_url) as admin:
        for hours, minutes in ((0, 0), (0, 30), (2, 29), (2, 31), (4, 50), (9, 0)):
            since = datetime(2026, 11, 1, hours, minutes, tzinfo=UTC)
            where = InboxFilter(since=since, until=since + timedelta(minutes=2), status=status)
            found: list[str] = []
            place: int | str | None = None
            while True:
                page = admin.page(where, before=place)
                found += [row.message_id for row in page.rows]
                if (place := page.behind) is None:
                    break
            expected = view.rows(
                "SELECT message_id FROM txbox_inbox WHERE received_at >= ? AND received_at < ?"
                " AND (? IS NULL OR status = ?) ORDER BY arrival DESC",
                (f"{where.since:%Y-%m-%d %H:%M:%S}", f"{where.until:%Y-%m-%d %H:%M:%S}", status, status),
            )  # fmt: skip
            assert found == [message_id for (message_id,) in expected], (hours, minutes)
        assert looked < 200_000, "without a search by halves it is half a million"


@pytest.mark.every_database
def test_ids_are_found_by_their_beginning(database_url: str, raw: Callable[[str], Raw]) -> None:
    view = raw(database_url)
    for consumer in ("billing", "ledger"):
        for message_id in ("order-1", "order-10", "order-2", "ordér", "order-", "other", "order%"):
            view.execute(
                "INSERT INTO txbox_inbox (consumer, message_id, status, topic) VALUES (?, ?, 'dead', 'orders')",
                (consumer, message_id),
            )
    for message_id in ("out-1", "out-10", "other"):
        view.execute("INSERT INTO txbox_outbox (id, topic) VALUES (?, 'orders')", (message_id,))
    with Admin(database_url) as admin:

        def ids(where: Filter[Any, Any], **how: Any) -> list[str]:
            return [row.message_id for row in admin.page(where, **how).rows]

        assert ids(InboxFilter(id_prefix="order-1", consumer="billing")) == ["order-1", "order-10"]
        assert (
            ids(InboxFilter(id_prefix="order-1", status="dead"))
            == ["order-1"] * 2 + ["order-10"] * 2
        )
        assert ids(InboxFilter(id_prefix="order-1"), limit=2) == ["order-1"] * 2
        assert ids(InboxFilter(id_prefix="ordé", consumer="billing")) == ["ordér"]
        assert ids(InboxFilter(id_prefix="order%")) == ["order%"] * 2
        assert ids(InboxFilter(id_prefix="order-1", topic="else")) == []
        assert ids(OutboxFilter(id_prefix="out-1")) == ["out-1", "out-10"]
        # what a change takes is what the page shows
        changed = admin.discard(InboxFilter(id_prefix="order-1"), dry_run=True)
        assert changed.count == 4
        assert [(part.consumer, part.status, part.rows) for part in changed.matching] == [
            ("billing", "dead", 2), ("ledger", "dead", 2),
        ]  # fmt: skip
        early = InboxFilter(until=datetime(2020, 1, 1, tzinfo=UTC))
        assert admin.discard(early, dry_run=True).count == 0
        late = InboxFilter(since=datetime(2020, 1, 1, tzinfo=UTC))
        assert admin.discard(late, dry_run=True).count == 14
