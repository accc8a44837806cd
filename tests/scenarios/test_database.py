"""The database goes away, refuses to serialise, sets time limits: nothing lost, no attempt but the handler's own."""

from __future__ import annotations

import contextlib
import sqlite3
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import psycopg
import pymysql
import pytest

import txbox
from tests.support.databases import Database, NewDatabase, Raw, representatives, require
from tests.support.servers.control import ThrowawayMariaDB, ThrowawayMySQL, ThrowawayPostgres
from tests.support.shop import CONSUMER, TOPIC, Shop, add_effect, execute, opened, paid, row
from tests.support.tidying import LOCK_WAITS
from tests.support.waiting import DEADLINE_S, eventually
from txbox import Inbox, Limits, Message, Outcome, StoreError, StoreUnavailable
from txbox.errors import Fault
from txbox.events import ConsumptionPaused, ConsumptionResumed, Event, TransactionRetried

SERVERS = [database.name for database in representatives() if database.concurrent_writers]

_OWN: dict[str, Callable[[], ThrowawayPostgres | ThrowawayMariaDB | ThrowawayMySQL]] = {
    "postgresql": ThrowawayPostgres,
    "mariadb": ThrowawayMariaDB,
    "mysql": ThrowawayMySQL,
}


class Away:
    """A database that can be taken away and brought back."""

    def __init__(self, url: str, leave: Callable[[], object], back: Callable[[], object]) -> None:
        self.url = url
        self.leave = leave
        self.back = back


@pytest.fixture
def away(
    database_kind: Database, new_database: NewDatabase, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Away]:
    require(database_kind.missing())
    if database_kind.name == "sqlite":
        # nobody can stop a file: another process's lock beyond the busy time-out is what happens
        monkeypatch.setattr("txbox.connections.sqlite._BUSY_TIMEOUT_S", 0.05)
        url = new_database("sqlite")
        holder = sqlite3.connect(
            url.removeprefix("sqlite:///"), isolation_level=None, check_same_thread=False
        )
        yield Away(
            url, lambda: holder.execute("BEGIN EXCLUSIVE"), lambda: holder.execute("ROLLBACK")
        )
        holder.close()
        return
    with _OWN[database_kind.name]() as server:
        with txbox.App(server.url) as app:
            app.init()
        yield Away(server.url, lambda: server.stop(immediate=True), server.start)


@contextmanager
def delivering(shop: Shop, message: Message[Any]) -> Iterator[Any]:
    with ThreadPoolExecutor(1) as thread:
        yield thread.submit(shop.deliver, message)


def test_database_unavailable(away: Away) -> None:
    paused, resumed = threading.Event(), threading.Event()

    def watch(event: Event) -> None:
        if isinstance(event, ConsumptionPaused):
            paused.set()
        if isinstance(event, ConsumptionResumed):
            resumed.set()

    limits = Limits(unavailable_for=timedelta(seconds=60), conflict_retries=2)
    with opened(away.url, observers=[watch], limits=limits) as shop:
        shop.handler()
        assert shop.deliver(paid("before")) is Outcome.PROCESSED
        shop.raw.close()
        away.leave()
        try:
            with delivering(shop, paid("during")) as delivered:
                assert paused.wait(DEADLINE_S)
                assert not delivered.done()
                assert not resumed.is_set()
                away.back()
                assert delivered.result(DEADLINE_S) is Outcome.PROCESSED
        finally:
            if not resumed.is_set():
                away.back()
        assert resumed.is_set()
        with Raw(away.url) as raw:
            other_shop = Shop(away.url, raw, shop.app)
            assert (other_shop.row("during").attempts, other_shop.effects("during")) == (0, 1)
            assert (
                other_shop.effects("before"),
                raw.value("SELECT count(*) FROM txbox_attempt"),
            ) == (
                1,
                0,
            )
        assert shop.calls.count("during") == 1


def test_database_that_stays_away_is_an_error_to_the_caller(away: Away) -> None:
    limits = Limits(unavailable_for=timedelta(seconds=0.2))
    with opened(away.url, limits=limits) as shop:
        shop.handler()
        assert shop.deliver(paid("before")) is Outcome.PROCESSED
        shop.raw.close()
        away.leave()
        try:
            with pytest.raises(StoreUnavailable):
                shop.deliver(paid("during"))
        finally:
            away.back()
        assert not shop.emitted(TransactionRetried)
        assert shop.deliver(paid("during")) is Outcome.PROCESSED
        assert shop.calls == ["before", "during"]


def test_database_that_goes_away_behind_a_handler_without_a_transaction(away: Away) -> None:
    """Its caller is told, though it has run; the row is leased, and runs again when that has run out."""
    with opened(away.url, limits=Limits(unavailable_for=timedelta(seconds=0.2))) as shop:

        @shop.app.handler(TOPIC, consumer=CONSUMER, transactional=False)
        def handle(message: Message[Any]) -> None:
            shop.calls.append(str(message.id))
            away.leave()

        shop.raw.close()
        with delivering(shop, paid("m")) as delivered:
            try:
                with pytest.raises(StoreUnavailable):
                    delivered.result(DEADLINE_S)
            finally:
                away.back()
        assert shop.deliver(paid("m")) is Outcome.DEFERRED
        assert shop.calls == ["m"]


def deadlock_rival(url: str) -> Raw:
    """A connection that the database never chooses as the victim of a deadlock."""
    rival = Raw(url)
    if rival.product == "postgresql":
        rival.execute("SET deadlock_timeout = '60s'")
    else:
        # InnoDB rolls back who has changed less
        rival.execute("CREATE TABLE heavy (id integer PRIMARY KEY)")
    rival.execute("START TRANSACTION")
    if rival.product == "mysql":
        for number in range(200):
            rival.execute("INSERT INTO heavy VALUES (?)", (number,))
    return rival


def test_serialization_failure(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """A deadlock inside the handler (on SQLite a busy file, which pauses): tried again, no attempt."""
    if shop.raw.product == "sqlite":
        monkeypatch.setattr("txbox.connections.sqlite._BUSY_TIMEOUT_S", 0.05)
        check_busy_database(shop)
        return
    assert deadlocked(shop, swallows=False) is Outcome.PROCESSED
    assert len(shop.emitted(TransactionRetried)) == 1
    assert shop.calls == ["a", "a"]
    assert (shop.effects("a"), shop.row("a").attempts) == (1, 0)
    assert shop.raw.rows("SELECT id, balance FROM account ORDER BY id") == [(1, 11), (2, 11)]


@pytest.mark.parametrize("product", SERVERS)
def test_swallowed_deadlock_is_never_acknowledged_as_processed(
    new_database: NewDatabase, product: str
) -> None:
    """PostgreSQL aborts the transaction; InnoDB rolls all of it back, and goes on in a new one (2.3)."""
    with opened(new_database(product)) as shop:
        outcome = deadlocked(shop, swallows=True)
        assert outcome is (Outcome.FAILED if product == "postgresql" else Outcome.DEAD)
        assert shop.effects() == 0
        assert shop.raw.rows("SELECT id, balance FROM account ORDER BY id") == [(1, 1), (2, 1)]


def deadlocked(shop: Shop, *, swallows: bool) -> Outcome:
    """Deliver "a" to a handler that runs into a deadlock the first time."""
    shop.raw.execute("CREATE TABLE account (id integer PRIMARY KEY, balance integer)")
    shop.raw.execute("INSERT INTO account VALUES (1, 0), (2, 0)")
    rival = deadlock_rival(shop.url)
    rival.execute("UPDATE account SET balance = 1 WHERE id = 2")
    first = threading.Event()
    crossing: list[str] = []

    def crosses(message: Message[Any], tx: Any) -> None:
        execute(tx, "UPDATE account SET balance = balance + 10 WHERE id = 1")
        first.set()
        if not crossing:
            crossing.append(str(message.id))
            # the rival now waits for row 1, and this transaction will for row 2
            assert rival_waits(shop.raw)
        with contextlib.suppress(*((psycopg.Error, pymysql.Error) if swallows else ())):
            execute(tx, "UPDATE account SET balance = balance + 10 WHERE id = 2")

    def rival_crosses() -> None:
        assert first.wait(DEADLINE_S)
        rival.execute("UPDATE account SET balance = 1 WHERE id = 1")
        rival.execute("COMMIT")

    shop.handler(crosses)
    with ThreadPoolExecutor(1) as thread:
        crossed = thread.submit(rival_crosses)
        outcome = shop.deliver(paid("a"))
        crossed.result(DEADLINE_S)
    rival.close()
    return outcome


def check_busy_database(shop: Shop) -> None:
    """One writer at a time: who is kept out longer than SQLite waits pauses, and goes on."""
    rival = _sqlite(shop.url)
    shop.handler()
    assert shop.deliver(paid("before")) is Outcome.PROCESSED
    paused = threading.Event()
    shop.app.events.observers.append(
        lambda event: paused.set() if isinstance(event, ConsumptionPaused) else None
    )
    rival.execute("BEGIN IMMEDIATE")
    with ThreadPoolExecutor(1) as thread:
        delivered = thread.submit(shop.deliver, paid("a"))
        assert paused.wait(DEADLINE_S)
        rival.execute("ROLLBACK")
        assert delivered.result(DEADLINE_S) is Outcome.PROCESSED
    rival.close()
    assert shop.emitted(ConsumptionResumed)
    assert not shop.emitted(TransactionRetried)
    assert (shop.calls, shop.effects("a"), shop.row("a").attempts) == (["before", "a"], 1, 0)


def rival_waits(raw: Raw) -> bool:
    """Poll until some transaction waits for a lock."""
    sql = {
        "postgresql": "SELECT count(*) FROM pg_locks JOIN pg_stat_activity USING (pid) "
        "WHERE NOT granted AND datname = current_database()",
        "mysql": f"SELECT count(*) FROM ({LOCK_WAITS} AND db = DATABASE()) AS waiting",
    }[raw.product]
    # innodb_trx shows nothing new to whoever asks more than ten times a second
    return bool(eventually(lambda: raw.value(sql), "the rival's wait for a lock", pause_s=0.15))


@pytest.mark.parametrize("product", SERVERS)
def test_serialization_failure_that_does_not_end_becomes_an_attempt(
    new_database: NewDatabase, product: str
) -> None:
    """40001 again and again, of the handler's own making: the budget is spent, then it is an attempt."""
    raises = {
        "postgresql": "DO $$ BEGIN RAISE EXCEPTION 'x' USING ERRCODE = '40001'; END $$",
        "mysql": "SIGNAL SQLSTATE '40001' SET MYSQL_ERRNO = 1213",
    }
    with opened(new_database(product), limits=Limits(conflict_retries=2)) as shop:
        shop.handler(lambda message, tx: execute(tx, raises[shop.raw.product]))
        assert shop.deliver(paid("a")) is Outcome.FAILED
        assert shop.calls == ["a"] * 3
        assert len(shop.emitted(TransactionRetried)) == 2
        assert shop.row("a").attempts == 1


def test_serialization_failure_of_the_callers_snapshot_in_accept(shop: Shop) -> None:
    """Another transaction accepts the id after this one's snapshot was taken."""
    connect, begin = callers[shop.raw.product]
    inbox = Inbox(CONSUMER)
    late = connect(shop.url)
    execute(late, begin)
    execute(late, "SELECT count(*) FROM effect")  # the snapshot
    early = connect(shop.url)
    execute(early, "BEGIN")
    assert inbox.accept(early, paid("a"))
    add_effect(early, "a")
    early.commit()

    if shop.raw.product == "mysql":
        # a locking read sees what the snapshot does not
        assert inbox.accept(late, paid("a")).duplicate
    else:
        with pytest.raises(StoreError) as raised:
            inbox.accept(late, paid("a"))
        assert raised.value.fault is Fault.CONFLICT
        late.rollback()
        execute(late, begin)
        assert inbox.accept(late, paid("a")).duplicate
    late.commit()
    late.close()
    early.close()
    assert shop.effects("a") == 1


def _postgresql(url: str) -> Any:
    import psycopg

    return psycopg.connect(url, autocommit=True)


def _mysql(url: str) -> Any:
    return Raw(url)._connection


def _sqlite(url: str) -> Any:
    return sqlite3.connect(url.removeprefix("sqlite:///"), isolation_level=None)


callers: dict[str, tuple[Callable[[str], Any], str]] = {
    "postgresql": (_postgresql, "BEGIN ISOLATION LEVEL REPEATABLE READ"),
    "mysql": (_mysql, "START TRANSACTION WITH CONSISTENT SNAPSHOT"),
    "sqlite": (_sqlite, "BEGIN"),
}


def test_statement_timeout(shop: Shop, database_kind: Database) -> None:
    """A statement of the handler's runs into the time limit of the server: its own failure."""
    slow: list[str] = []
    limit, off = ("max_statement_time = 0.05", "max_statement_time = 0")
    if database_kind.name == "mysql":
        limit, off = ("max_execution_time = 50", "max_execution_time = 0")

    def waits(message: Message[Any], tx: Any) -> None:
        if slow:
            return
        slow.append(str(message.id))
        if shop.raw.product == "postgresql":
            execute(tx, "SET LOCAL statement_timeout = 50")
            execute(tx, "SELECT pg_sleep(30)")
        elif shop.raw.product == "mysql":
            execute(tx, f"SET SESSION {limit}")
            execute(
                tx,
                "SELECT count(*) FROM information_schema.tables AS a, information_schema.tables AS b,"
                " information_schema.columns AS c WHERE SLEEP(1) = 0",
            )
        else:
            tx.set_progress_handler(lambda: 1, 1000)
            try:
                execute(
                    tx,
                    "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT max(x) FROM n",
                )
            finally:
                tx.set_progress_handler(None, 0)

    shop.handler(waits)
    assert shop.deliver(paid("a")) is Outcome.FAILED
    inbox_row = shop.row("a")
    assert (inbox_row.status, inbox_row.attempts, inbox_row.has_payload, shop.effects()) == (
        "failed",
        1,
        True,
        0,
    )
    shop.make_due()
    if shop.raw.product == "mysql":
        shop.raw.execute(f"SET SESSION {off}")
    assert shop.work() == [Outcome.PROCESSED]
    assert shop.effects("a") == 1


@pytest.mark.parametrize("product", SERVERS)
def test_claim_waits_for_a_rival_no_longer_than_the_lock_timeout(
    new_database: NewDatabase, product: str
) -> None:
    """In progress: nothing recorded, nothing acknowledged. (SQLite has one writer, no locks of rows.)"""
    limits = Limits(lock_timeout=timedelta(seconds=1))
    with opened(new_database(product), limits=limits) as shop:
        shop.handler()
        rival = callers[shop.raw.product][0](shop.url)
        execute(rival, "BEGIN")
        assert Inbox(CONSUMER).accept(rival, paid("a"))
        assert shop.deliver(paid("a")) is Outcome.IN_PROGRESS
        assert (shop.calls, row(shop.raw, "a")) == ([], None)
        rival.rollback()
        rival.close()
        assert shop.deliver(paid("a")) is Outcome.PROCESSED
        assert shop.effects("a") == 1
