"""Each misconfiguration is planted, on a real server, and found under its code with its evidence."""

from __future__ import annotations

import re
import shlex
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, cast
from urllib.parse import urlsplit

import psycopg
import pytest

from tests.support.backlog import fill
from tests.support.databases import Raw, require
from tests.support.doctor import diagnosed, findings
from tests.support.servers import packages
from tests.support.servers.control import ThrowawayPostgres
from tests.support.servers.postgresql import PgBouncerServer
from tests.support.servers.process import throwaway_name
from tests.support.shop import TOPIC, Shop, paid
from tests.support.tidying import SESSIONS
from tests.support.waiting import DEADLINE_S, eventually
from txbox import App, Lease, Limits, Message, Reject
from txbox.admin import Admin, InboxFilter
from txbox.admin import findings as rows
from txbox.admin.doctor import Finding
from txbox.admin.doctor import database as doctor_database
from txbox.admin.tables import COUNTED_MAX
from txbox.cli import make_parser
from txbox.cli.options import filter_of
from txbox.errors import StoreUnavailable
from txbox.store import schema as tables

pytestmark = pytest.mark.every_database

RawOf = Callable[[str], Raw]

_AGO = {
    "postgresql": "now() - interval '{} days'",
    "mysql": "UTC_TIMESTAMP(6) - INTERVAL {} DAY",
    "sqlite": "strftime('%Y-%m-%d %H:%M:%f', 'now', '-{} days')",
}


def days_ago(raw: Raw, days: int) -> str:
    return _AGO[raw.product].format(days)


# -- the tables -------------------------------------------------------------------------------


def test_tables_that_are_missing(empty_database_url: str) -> None:
    found = diagnosed(empty_database_url)
    assert "schema-missing" in [one.code for one in found.findings]
    assert "txbox init" in findings(empty_database_url)["schema-missing"].remedy
    assert [one.what for one in found.unchecked] == ["rows, pruning and partitions"]


@pytest.mark.parametrize("version", [tables.OLDEST_USABLE - 1, tables.VERSION + 1])
def test_tables_of_another_version(database_url: str, raw: RawOf, version: int) -> None:
    view = raw(database_url)
    view.execute("DELETE FROM txbox_schema")
    view.execute(
        f"INSERT INTO txbox_schema (version, compatible_from) VALUES ({version}, {version})"
    )
    assert str(version) in findings(database_url)["schema-version"].problem


_DROPPED = {
    "a table": ("DROP TABLE txbox_sequence", "table txbox_sequence"),
    "a view": ("DROP VIEW txbox_status", "view txbox_status"),
    "a column": ("ALTER TABLE txbox_audit DROP COLUMN login", "column txbox_audit.login"),
    "an index": (
        "DROP INDEX txbox_attempt_message",
        "index txbox_attempt_message of txbox_attempt",
    ),
}


@pytest.mark.parametrize("what", _DROPPED)
def test_drift(database_url: str, raw: RawOf, what: str) -> None:
    sql, named = _DROPPED[what]
    view = raw(database_url)
    view.execute(
        sql + (" ON txbox_attempt" if what == "an index" and view.product == "mysql" else "")
    )
    assert named in findings(database_url)["schema-drift"].problem


def test_an_index_that_was_not_finished(postgresql_url: str, raw: RawOf) -> None:
    view = raw(postgresql_url)
    for _ in range(2):
        view.execute(
            "INSERT INTO txbox_sequence (consumer, key, last) VALUES ('a', gen_random_uuid()::text, 1)"
        )
    with pytest.raises(psycopg.errors.UniqueViolation):
        view.execute("CREATE UNIQUE INDEX CONCURRENTLY mine ON txbox_sequence (consumer)")
    assert "mine of txbox_sequence" in findings(postgresql_url)["index-invalid"].problem


@pytest.mark.parametrize(
    "sql",
    [
        "ALTER TABLE txbox_inbox DISABLE TRIGGER txbox_inbox_guard",
        "ALTER TABLE txbox_inbox ENABLE TRIGGER txbox_inbox_guard",
        "DROP TRIGGER txbox_inbox_guard ON txbox_inbox",
    ],
)
def test_a_guard_that_does_not_fire(postgresql_url: str, raw: RawOf, sql: str) -> None:
    raw(postgresql_url).execute(sql)
    assert "ENABLE ALWAYS" in findings(postgresql_url)["guard-off"].remedy


def test_a_guard_that_lets_everything_through(postgresql_url: str, raw: RawOf) -> None:
    raw(postgresql_url).execute(
        "CREATE OR REPLACE FUNCTION txbox_guard() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END'"
    )
    found = findings(postgresql_url)
    assert "txbox_guard" in found["guard-changed"].problem


def test_a_guard_that_is_gone_on_sqlite(sqlite_url: str, raw: RawOf) -> None:
    raw(sqlite_url).execute("DROP TABLE txbox_guard")
    assert {"guard-off", "schema-drift"} <= set(findings(sqlite_url))


def test_a_table_without_transactions(mysql_url: str, raw: RawOf) -> None:
    view = raw(mysql_url)
    # longer than a key may be there
    view.execute("ALTER TABLE txbox_inbox DROP KEY txbox_inbox_status")
    view.execute("ALTER TABLE txbox_inbox ROW_FORMAT = DEFAULT, ENGINE = MyISAM")
    assert "ENGINE = InnoDB" in findings(mysql_url)["guard-off"].remedy


def test_a_schema_in_which_others_may_create(postgresql_url: str, raw: RawOf) -> None:
    raw(postgresql_url).execute("GRANT CREATE ON SCHEMA public TO PUBLIC")
    assert findings(postgresql_url)["foreign-create"].problem.startswith("PUBLIC ")


def test_partitions_that_are_not_made(new_database: Any, raw: RawOf) -> None:
    url = new_database("postgresql", schema=False)
    with App(url) as app:
        app.init(partition="uuid7")
    assert "partitions-missing" not in findings(url)
    view = raw(url)
    days = [
        name
        for (name,) in view.rows(
            "SELECT relname FROM pg_class WHERE relname ~ '^txbox_inbox_uuid7_[0-9]' AND relkind = 'r' ORDER BY 1"
        )
    ]
    for name in days[1:]:
        view.execute(f"DROP TABLE {name}")
    assert "default partition" in findings(url)["partitions-missing"].problem


# -- the server -------------------------------------------------------------------------------

_SET = {
    "isolation-level": ("default_transaction_isolation = 'serializable'", "serializable"),
    "durability-commit": ("synchronous_commit = off", "synchronous_commit is off"),
    "time-out-statement": ("statement_timeout = '2s'", "2 s"),
    "on-replica": ("default_transaction_read_only = on", "transaction_read_only is on"),
    "guard-off": ("session_replication_role = replica", "guard"),
}


@pytest.mark.parametrize("code", _SET)
def test_settings_of_postgresql(postgresql_url: str, raw: RawOf, code: str) -> None:
    setting, said = _SET[code]
    name = urlsplit(postgresql_url).path.lstrip("/")
    raw(postgresql_url).execute(f'ALTER DATABASE "{name}" SET {setting}')
    assert said in findings(postgresql_url)[code].problem


def test_servers_that_wait_for_no_disk(shop: Shop) -> None:
    """The shared ones."""
    found = {one.code for one in diagnosed(shop.app).findings}
    expected = {
        "postgresql": {"durability-fsync", "durability-torn-pages"},
        "mysql": {"durability-flush"},
        "sqlite": set[str](),
    }
    assert found == expected[shop.raw.product]


@pytest.mark.parametrize(
    ("pragma", "code"),
    [("synchronous = OFF", "durability-flush"), ("journal_mode = MEMORY", "durability-journal")],
)
def test_an_engine_that_waits_for_no_disk(sqlite_url: str, pragma: str, code: str) -> None:
    sqlalchemy: Any = pytest.importorskip("sqlalchemy")
    engine = sqlalchemy.create_engine(sqlite_url)

    def connected(connection: Any, _: object) -> None:
        connection.execute("PRAGMA foreign_keys = ON")
        connection.execute(f"PRAGMA {pragma}").fetchall()

    sqlalchemy.event.listen(engine, "connect", connected)
    assert code in {one.code for one in diagnosed(engine).findings}


def test_lock_waits_that_outlast_a_lease(mysql_url: str) -> None:
    """The servers wait their default, 50 s."""
    with App(mysql_url, lease=Lease(duration=timedelta(seconds=50))) as app:
        app.handler("orders", consumer="billing")(_nothing)
        assert "50 s" in findings(app)["time-out-lock-wait"].problem


def test_connections_that_end_before_a_run(mysql_url: str) -> None:
    """The servers end an idle connection after their default, 8 h."""
    with App(mysql_url, lease=Lease(duration=timedelta(hours=9))) as app:
        app.handler("orders", consumer="billing")(_nothing)
        assert "wait_timeout is 8h" in findings(app)["time-out-transaction"].problem


def test_a_clock_that_is_off(postgresql_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    late = SimpleNamespace(time=lambda: time.time() - 90)
    monkeypatch.setattr(doctor_database, "time", late)
    assert "90 s behind" in findings(postgresql_url)["clock-skew"].problem


def test_a_transaction_that_is_left_open(database: Any, raw: RawOf) -> None:
    if database.name == "sqlite":
        pytest.skip("nobody knows of transactions of other processes there")
    idle = raw(database.url)
    idle.execute("BEGIN")
    idle.execute("DELETE FROM txbox_sequence")
    with App(database.url, lease=Lease(duration=timedelta(seconds=1))) as app:
        app.handler("orders", consumer="billing")(_nothing)
        found = eventually(lambda: findings(app).get("old-transaction"), "the finding")
    assert "KILL" in found.remedy or "pg_terminate_backend" in found.remedy


def test_transactions_are_seen_beside_a_statement_with_bytes(database: Any, raw: RawOf) -> None:
    """MySQL's list of transactions cannot be read while anybody runs such a statement."""
    if database.name != "mysql":
        pytest.skip("it is a fault of MySQL")
    busy, view = raw(database.url), raw(database.url)
    asleep = threading.Thread(
        target=lambda: busy.execute("DO (SELECT SLEEP(3) = ?)", (b"\xa3U\xb3g\x8a\x11",))
    )
    asleep.start()
    sleeping = f"SELECT 1 FROM {SESSIONS} WHERE db = DATABASE() AND state = 'User sleep'"
    eventually(lambda: view.rows(sleeping))
    assert "old transactions" not in [one.what for one in diagnosed(database.url).unchecked]
    assert view.rows(sleeping)
    asleep.join()


def test_dead_rows_that_nobody_vacuums(postgresql_url: str, raw: RawOf) -> None:
    view = raw(postgresql_url)
    view.execute("ALTER TABLE txbox_outbox SET (autovacuum_enabled = off)")
    view.execute(
        "INSERT INTO txbox_outbox (id, topic) SELECT n, 't' FROM generate_series(1, 60000) AS n"
    )
    view.execute("DELETE FROM txbox_outbox")
    found = eventually(
        lambda: seen if "dead-tuples" in (seen := findings(postgresql_url)) else None,
        "the statistics",
    )
    assert "60,000 dead rows" in found["dead-tuples"].problem
    assert "txbox_outbox" in found["autovacuum-off"].problem


def test_a_pooler_that_shares_connections_out(pgbouncer_url: str) -> None:
    with App(f"{pgbouncer_url}?prepare=off", notify=True) as app:
        app.handler("orders", consumer="billing")(_nothing)
        found = findings(app)
    assert set(found) == {"pooler-transaction", "pooler-listen"}


def test_a_pooler_that_knows_no_prepared_statements(pgbouncer_url: str) -> None:
    console = urlsplit(pgbouncer_url)
    url = console._replace(
        netloc=f"pgbouncer@{console.netloc.rpartition('@')[2]}", path="/pgbouncer"
    )
    with psycopg.connect(url.geturl(), autocommit=True, prepare_threshold=None) as connection:
        settings = {row[0]: row[1] for row in connection.execute("SHOW CONFIG")}
    told = findings(pgbouncer_url)
    if int(settings.get("max_prepared_statements", 0)):
        # PgBouncer 1.22 and later know them unless they are told not to
        assert "pooler-prepared" not in told
    else:
        assert "prepare=off" in told["pooler-prepared"].remedy


def test_a_pool_of_one_connection(postgresql_url: str) -> None:
    sqlalchemy: Any = pytest.importorskip("sqlalchemy")
    url = postgresql_url.replace("postgresql://", "postgresql+psycopg://")
    engine = sqlalchemy.create_engine(url, pool_size=1, max_overflow=0, pool_timeout=0.5)
    told = {each.what: each.why for each in diagnosed(engine).unchecked}
    engine.dispose()
    assert "two connections" in told["whether a pooler is between"]


class _StatementPooler(PgBouncerServer):
    def initialise(self) -> None:
        super().initialise()
        ini = self.directory / "pgbouncer.ini"
        ini.write_text(ini.read_text().replace("pool_mode = transaction", "pool_mode = statement"))

    def ping(self) -> str:
        with psycopg.connect(self.url, autocommit=True, prepare_threshold=None) as connection:
            connection.execute("SELECT 1")
        return "PgBouncer"


@pytest.fixture
def statement_pooler(postgresql_url: str) -> Iterator[str]:
    server = _StatementPooler(throwaway_name("pgbouncer", 1), postgresql_url)
    try:
        server.start()
        yield urlsplit(server.url)._replace(path=urlsplit(postgresql_url).path).geturl()
    finally:
        server.remove()


def test_a_pooler_that_takes_no_transactions(statement_pooler: str) -> None:
    assert "pool_mode" in findings(statement_pooler)["pooler-statement"].remedy


class _Standby(ThrowawayPostgres):
    """A hot standby of another server."""

    def __init__(self, primary: ThrowawayPostgres) -> None:
        super().__init__()
        self._primary = primary

    def initialise(self) -> None:
        self.run(
            self._bin / "pg_basebackup",
            "--pgdata", self._data,
            "--write-recovery-conf",
            "--wal-method=stream",
            "--checkpoint=fast",
            "--no-sync",
            f"--dbname={self._primary.url}",
        )  # fmt: skip


@pytest.fixture
def standby() -> Iterator[tuple[str, str]]:
    """The URL of a database on a primary, and on the standby that follows it."""
    require(None if packages.installed("postgresql") else packages.what_is_missing("postgresql"))
    with ThrowawayPostgres() as primary:
        with Raw(primary.url) as admin:
            admin.execute("CREATE DATABASE shop")
        url = urlsplit(primary.url)._replace(path="/shop").geturl()
        with App(url) as app:
            app.init()
        with _Standby(primary) as server:
            yield url, urlsplit(server.url)._replace(path="/shop").geturl()


def test_a_standby_is_no_place_to_decide_and_must_not_lag(
    standby: tuple[str, str], raw: RawOf
) -> None:
    primary, follower = standby
    eventually(lambda: "replication-asynchronous" in findings(primary))
    assert set(findings(follower)) == {"on-replica"}
    assert "in_recovery is on" in findings(follower)["on-replica"].problem
    raw(follower).rows("SELECT pg_wal_replay_pause()")
    raw(primary).rows(
        "SELECT count(pg_logical_emit_message(false, 'x', repeat('x', 1000000))) FROM generate_series(1, 300)"
    )
    found = eventually(lambda: findings(primary).get("replication-lag"), "the lag")
    assert " MB behind" in found.problem


def test_a_database_that_is_away(sqlite_url: str) -> None:
    del sqlite_url
    with pytest.raises(StoreUnavailable):
        diagnosed("postgresql://txbox@127.0.0.1:1/nothing")


def test_a_role_without_rights_is_told_what_was_not_seen(postgresql_url: str, raw: RawOf) -> None:
    view = raw(postgresql_url)
    name = urlsplit(postgresql_url).path.lstrip("/")
    role = f"{name}_blind"
    view.execute(f"CREATE ROLE {role} LOGIN PASSWORD 'blind'")
    try:
        view.execute(f"GRANT SELECT ON txbox_schema, txbox_job TO {role}")
        parts = urlsplit(postgresql_url)
        url = parts._replace(netloc=f"{role}:blind@{parts.hostname}:{parts.port}").geturl()
        found = diagnosed(url)
    finally:
        view.execute(f"DROP OWNED BY {role}")
        view.execute(f"DROP ROLE {role}")
    told = {one.what: one.why for one in found.unchecked}
    assert "pg_read_all_stats" in told["transactions of other roles"]
    assert "42501" in told["messages that wait"]
    assert "42501" in told["the quarantine"]


# -- rows -------------------------------------------------------------------------------------


def _nothing(message: Message[Any], tx: Any) -> None:
    del message, tx


def _declined(message: Message[Any], tx: Any) -> None:
    raise Reject("declined")


def test_dead_and_quarantined_messages(shop: Shop) -> None:
    shop.handler(_declined)
    for number in range(3):
        shop.deliver(paid(f"m{number}"))
    shop.deliver(paid("m0", b'{"cents": 1}'))
    found = findings(shop.app)
    assert set(found) == {"dead-messages", "quarantined-messages"}
    assert "3 dead messages" in found["dead-messages"].problem
    assert "txbox list --consumer billing --status dead" in found["dead-messages"].remedy
    assert "billing has 1 message in quarantine" in found["quarantined-messages"].problem


def test_more_than_are_counted(shop: Shop) -> None:
    shop.handler()
    fill(shop.raw, COUNTED_MAX + 1, status="dead")
    assert "more than 10,000 dead messages" in findings(shop.app)["dead-messages"].problem


def test_where_not_all_were_looked_at_each_count_is_at_least_that(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows, "_LOOKED", 3)
    monkeypatch.setattr(rows, "_LOOKED_OUTGOING", 3)
    shop.handler()
    shop.app.handler(TOPIC, consumer="ledger")(_nothing)
    for first, consumer, topic in (
        (0, "billing", "gone"), (10, "billing", "lost"), (20, "ledger", "gone"), (30, "ledger", "lost"),
    ):  # fmt: skip
        fill(shop.raw, 2, consumer=consumer, first=first)
        shop.raw.execute("UPDATE txbox_inbox SET topic = ? WHERE topic = ?", (topic, TOPIC))
        for number in (first, first + 1):
            _staged(shop.raw, topic, "kafka:gone:9092", number=number)
    problems = [
        (finding.code, finding.problem)
        for finding in diagnosed(shop.app).findings
        if finding.code in ("orphan-messages", "orphan-route")
    ]
    assert len(problems) == 5, problems
    assert [problem for _, problem in problems if "at least" not in problem] == []


def test_a_consumer_that_no_handler_has(shop: Shop) -> None:
    shop.handler()
    fill(shop.raw, 3, consumer="retired; rm -rf")
    found = findings(shop.app)
    assert set(found) == {"orphan-consumer"}
    assert "retired; rm -rf has 3 messages overdue" in found["orphan-consumer"].problem
    assert "--consumer 'retired; rm -rf'`" in found["orphan-consumer"].remedy
    assert _discarded(shop, found["orphan-consumer"]) == 3


def _discarded(shop: Shop, finding: Finding) -> int:
    """Do what a remedy says; how many messages that gave up."""
    command = re.search(r"`(txbox discard [^`]+)`", finding.remedy)
    assert command is not None, finding.remedy
    args = make_parser("discard").parse_args(shlex.split(command[1])[1:])
    with Admin(shop.app) as admin:
        return admin.discard(cast("InboxFilter", filter_of(args))).count


def test_a_topic_that_the_handlers_of_a_consumer_do_not_take(shop: Shop) -> None:
    shop.app.handler("invoices", consumer="billing")(_nothing)
    fill(shop.raw, 2)
    found = findings(shop.app)
    assert set(found) == {"orphan-messages"}
    assert "'orders'" in found["orphan-messages"].problem
    assert _discarded(shop, found["orphan-messages"]) == 2


def test_messages_that_nobody_takes_in_time(shop: Shop) -> None:
    shop.handler()
    fill(shop.raw, 4)
    found = findings(shop.app)
    assert set(found) == {"consumer-unserved"}
    assert found["consumer-unserved"].problem.startswith(
        "billing has 4 messages overdue by up to 1h"
    )
    # nobody knows whose they are
    assert set(findings(shop.url)) == {"consumer-unserved"}


def test_a_consumer_that_is_paused_is_not_late(shop: Shop) -> None:
    shop.handler()
    fill(shop.raw, 4)
    with Admin(shop.app) as admin:
        admin.pause("billing", actor="ana", reason="the bank is closed")
    found = findings(shop.app)
    assert set(found) == {"consumer-paused"}
    assert "by ana: the bank is closed" in found["consumer-paused"].problem


def test_messages_that_are_not_due_are_nobodys_fault(shop: Shop) -> None:
    shop.handler()
    fill(shop.raw, 4, due_in_s=3600)
    fill(shop.raw, 4, due_in_s=3600, consumer="of another app")
    assert findings(shop.app) == {}


def test_behind_the_head_of_a_key_a_row_may_wait(shop: Shop) -> None:
    shop.handler(ordered=True)
    fill(shop.raw, 1, key="'k'", due_in_s=3600)
    fill(shop.raw, 4, key="'k'", first=1)
    assert findings(shop.app) == {}


def test_leases_that_nobody_ends(shop: Shop) -> None:
    shop.handler()
    fill(shop.raw, 2, status="processing")
    shop.raw.execute(f"UPDATE txbox_inbox SET lease_until = {days_ago(shop.raw, 1)}")
    found = findings(shop.app)
    assert set(found) == {"lease-expired"}
    assert "txbox rescue" in found["lease-expired"].remedy


def _staged(raw: Raw, topic: str, route: str, *, status: str = "pending", number: int = 1) -> None:
    raw.execute(
        "INSERT INTO txbox_outbox (id, topic, route, status, staged_at, available_at)"
        f" VALUES (?, ?, ?, ?, {days_ago(raw, 1)}, {days_ago(raw, 1)})",
        (f"o{number}", topic, route, status),
    )


@pytest.mark.parametrize("route", ["kafka:gone:9092", "", "local:retired"])
def test_outgoing_messages_of_no_app(shop: Shop, route: str) -> None:
    shop.handler()
    _staged(shop.raw, "invoices", route)
    found = findings(shop.app)
    assert set(found) == {"orphan-route"}
    assert found["orphan-route"].problem.startswith("invoices: 1 message overdue by up to 1d")


def test_outgoing_messages_that_no_relay_takes_in_time(shop: Shop) -> None:
    shop.handler()
    local = shop.app.routes.local
    for number in range(2):
        _staged(shop.raw, "orders", local, number=number)
    # its consumer was registered beside another one then
    _staged(shop.raw, "orders", f"{local},ledger", number=2)
    found = findings(shop.app)
    assert set(found) == {"route-unserved"}
    assert "orders: 2 messages overdue" in findings(shop.url)["route-unserved"].problem or (
        "orders: 1 message overdue" in found["route-unserved"].problem
    )


def test_outgoing_messages_that_were_given_up(shop: Shop) -> None:
    shop.handler()
    _staged(shop.raw, "orders", "kafka:gone:9092", status="dead")
    found = findings(shop.app)
    assert set(found) == {"dead-outgoing"}
    assert found["dead-outgoing"].problem.startswith("1 outgoing message is dead,")


@pytest.mark.parametrize("ran", [None, 5])
def test_pruning_that_does_not_run(shop: Shop, ran: int | None) -> None:
    shop.handler()
    shop.deliver(paid("m1"))
    shop.raw.execute(f"UPDATE txbox_schema SET applied_at = {days_ago(shop.raw, 9)}")
    if ran is not None:
        shop.raw.execute(
            f"INSERT INTO txbox_job (name, updated_at) VALUES ('prune', {days_ago(shop.raw, ran)})"
        )
    problem = findings(shop.app)["pruning-stopped"].problem
    assert ("5d ago" if ran else "has never run") in problem


# -- what the App says ------------------------------------------------------------------------


def test_time_outs_in_the_wrong_order(sqlite_url: str) -> None:
    with App(sqlite_url, limits=Limits(lock_timeout=timedelta(minutes=5))) as app:
        app.handler("orders", consumer="a", timeout=timedelta(minutes=6))(_nothing)
        found = [one for one in diagnosed(app).findings if one.code == "time-out-order"]
    assert len(found) == 2


def test_a_grace_that_is_shorter_than_a_run(sqlite_url: str) -> None:
    with App(sqlite_url) as app:
        app.handler("orders", consumer="a", timeout=timedelta(minutes=2))(_nothing)
        assert "time-out-grace" not in findings(app)
        found = findings(app, grace=timedelta(seconds=25))["time-out-grace"]
    assert found.severity == "note"
    assert "--grace 125s" in found.remedy


def test_weak_ids(sqlite_url: str) -> None:
    with App(sqlite_url) as app:
        app.handler("orders", consumer="a", weak_ids=True)(_nothing)
        assert findings(app)["weak-ids"].severity == "note"


def test_the_thread_that_asks_may_be_any(shop: Shop) -> None:
    """The pages ask from a thread of their own."""
    shop.handler()
    fill(shop.raw, 1)
    found: list[Any] = []
    asking = threading.Thread(target=lambda: found.append(findings(shop.app)))
    asking.start()
    asking.join(DEADLINE_S)
    assert "consumer-unserved" in found[0]
