"""`rehearse`: a handler runs, is told about, and leaves nothing behind (promise 7.5)."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import asyncpg
import pymysql
import pytest
import sqlalchemy as sa
from psycopg_pool import ConnectionPool
from sqlalchemy import orm

from tests.support.databases import NewDatabase, Raw
from tests.support.shop import CONSUMER, TOPIC, Shop, create_effects, effects, execute, opened, paid
from txbox import App, ConfigurationError, Message, Outcome, Reject, RetryPolicy
from txbox.admin import Admin, InboxFilter, OutboxFilter, rehearsal
from txbox.brokers.local import Local
from txbox.connections.asyncpg import AsyncpgConnection
from txbox.store.dialect import dialect

ONCE = RetryPolicy(max_attempts=1)


@pytest.fixture(params=["sqlite", "postgresql", "mysql", "mariadb"])
def shop(request: pytest.FixtureRequest, new_database: NewDatabase) -> Iterator[Shop]:
    with opened(new_database(request.param)) as made:
        yield made


def dead(shop: Shop, body: Callable[[Message[Any], Any], object], **options: Any) -> None:
    """A handler that is fixed once a message is dead."""

    def handle(message: Message[Any], tx: Any) -> None:
        if message.id not in fixed:
            raise Reject("not yet")
        body(message, tx)

    fixed: set[str] = set()
    shop.handler(handle, retry=ONCE, **options)
    assert shop.deliver(paid("m1")) is Outcome.DEAD
    fixed.add("m1")


def rows(raw: Raw) -> list[list[tuple[Any, ...]]]:
    """All that txbox and the handler keep, but for the audit."""
    return [
        raw.rows(f"SELECT * FROM {table} ORDER BY 1, 2")
        for table in ("txbox_inbox", "txbox_attempt", "txbox_outbox", "txbox_quarantine", "effect")
    ]


def test_a_dead_message_shows_what_its_handler_would_do_and_stays_as_it_was(shop: Shop) -> None:
    def body(message: Message[Any], tx: Any) -> None:
        shop.app.outbox.stage(tx, TOPIC, {"paid": str(message.id)})
        shop.app.effects.stage(tx, "mail", {"to": "anna"})

    shop.app.effect("mail")(lambda message: None)
    dead(shop, body)
    before = rows(shop.raw)
    with Admin(shop.app) as admin:
        done = admin.rehearse(CONSUMER, "m1", actor="anna")
    assert done.outcome == "processed"
    assert [(link.topic, link.consumer) for link in done.staged] == [
        (TOPIC, None),
        ("effect:mail", "effect:mail"),
    ]
    assert any("effect" in statement and "m1" not in statement for statement in done.statements)
    assert not any("txbox_" in statement for statement in done.statements)
    assert rows(shop.raw) == before
    assert shop.raw.rows("SELECT actor, action FROM txbox_audit") == [("anna", "rehearse")]
    # and what comes after is not disturbed
    assert shop.deliver(paid("m2")) is Outcome.DEAD


def test_a_processed_message_and_another_payload(shop: Shop) -> None:
    seen: list[bytes | None] = []
    shop.handler(lambda message, tx: seen.append(message.payload), keep_payload="always")
    assert shop.deliver(paid("m1")) is Outcome.PROCESSED
    with Admin(shop.app) as admin:
        assert admin.rehearse(CONSUMER, "m1", payload=b"other").outcome == "processed"
    assert seen[-1] == b"other"
    assert effects(shop.raw) == 1


def test_what_it_stages_is_told_while_that_of_the_first_run_still_waits(shop: Shop) -> None:
    def body(message: Message[Any], tx: Any) -> None:
        shop.app.outbox.stage(tx, "refunds" if message.payload == b"other" else "receipts", {})

    shop.app.publish(Local(), topics=["receipts", "refunds"])
    shop.handler(body, keep_payload="always")
    assert shop.deliver(paid("m1")) is Outcome.PROCESSED
    staged = "SELECT id, topic FROM txbox_outbox"
    before = shop.raw.rows(staged)
    with Admin(shop.app) as admin:
        (again,) = admin.rehearse(CONSUMER, "m1").staged
        (other,) = admin.rehearse(CONSUMER, "m1", payload=b"other").staged
        (first,) = admin.list(OutboxFilter(topic="receipts"))
    # under the id that it would have
    assert again.message_id == other.message_id == first.message_id
    assert (again.topic, other.topic) == ("receipts", "refunds")
    assert shop.raw.rows(staged) == before


def test_what_fails_says_so_and_leaves_nothing(shop: Shop) -> None:
    def body(message: Message[Any], tx: Any) -> None:
        del message
        execute(tx, "INSERT INTO no_such_table VALUES (1)")

    dead(shop, body)
    before = rows(shop.raw)
    with Admin(shop.app) as admin:
        done = admin.rehearse(CONSUMER, "m1")
    assert done.outcome == "dead"
    assert done.error_type in ("OperationalError", "UndefinedTable", "ProgrammingError")
    # SQLite refuses it before it is a statement
    sent = any("no_such_table" in statement for statement in done.statements)
    assert sent is (shop.raw.product != "sqlite")
    assert rows(shop.raw) == before


def test_a_failure_beyond_the_age_limit_is_said_to_be_final(shop: Shop) -> None:
    def fails(message: Message[Any], tx: Any) -> None:
        raise ValueError("told to fail")

    shop.handler(fails, retry=RetryPolicy(max_age=timedelta(hours=1)))
    assert shop.deliver(paid("m1")) is Outcome.FAILED
    with Admin(shop.app) as admin:
        assert admin.rehearse(CONSUMER, "m1").outcome == "failed"
        shop.raw.execute("UPDATE txbox_inbox SET received_at = '2026-01-01 00:00:00'")
        assert admin.rehearse(CONSUMER, "m1").outcome == "dead"


ENDLESS = {
    "sqlite": "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT max(i) FROM n",
    "postgresql": "SELECT pg_sleep(600)",
    "mysql": "SELECT sleep(600)",
}


@pytest.mark.parametrize("swallowed", [True, False])
@pytest.mark.parametrize("how", ["statement", "statements", "nothing"])
def test_a_rehearsal_has_a_time_limit(
    shop: Shop, how: str, swallowed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rehearsal, "_LONGEST", timedelta(seconds=0.2))

    def body(message: Message[Any], tx: Any) -> None:
        del message
        try:
            if how == "nothing":
                threading.Event().wait(0.25)
            while how == "statements":
                execute(tx, "SELECT 1")
            if how == "statement":
                execute(tx, ENDLESS[shop.raw.product])
        except Exception:
            if not swallowed:
                raise

    dead(shop, body)
    before = rows(shop.raw)
    with (
        Admin(shop.app) as admin,
        pytest.raises(ConfigurationError, match="longer than the 200 ms"),
    ):
        admin.rehearse(CONSUMER, "m1")
    assert rows(shop.raw) == before
    with Admin(shop.app) as admin:
        monkeypatch.undo()
        assert how != "nothing" or admin.rehearse(CONSUMER, "m1").outcome == "processed"


@pytest.mark.parametrize(
    "sql",
    [
        "INSERT INTO effect VALUES ('; commit', 'x'';rollback')",
        "SELECT ';commit' AS \"; commit\" -- it's no commit",
        '/* ; */ SELECT 1 /* it\'s */ AS "; end; commit"',
    ],
)
def test_what_is_quoted_ends_no_transaction(shop: Shop, sql: str) -> None:
    dead(shop, lambda _, tx: execute(tx, sql))
    with Admin(shop.app) as admin:
        done = admin.rehearse(CONSUMER, "m1")
    assert (done.outcome, done.error) == ("processed", None)
    assert len(done.statements) == 2


LEAVES: dict[str, Callable[[Any], object]] = {
    "commit": lambda tx: tx.commit(),
    "rollback": lambda tx: tx.rollback(),
    "COMMIT": lambda tx: execute(tx, "COMMIT"),
    "ROLLBACK": lambda tx: execute(tx, "/* mine */ ROLLBACK"),
    "END": lambda tx: execute(tx, "END"),
    "behind a quote in a comment": lambda tx: execute(tx, "/* it's */ COMMIT -- isn't"),
}


@pytest.mark.parametrize("swallowed", [True, False])
@pytest.mark.parametrize("how", LEAVES)
def test_a_handler_that_ends_its_transaction_leaves_nothing(
    shop: Shop, how: str, swallowed: bool
) -> None:
    def body(message: Message[Any], tx: Any) -> None:
        del message
        try:
            LEAVES[how](tx)
        except Exception:
            if not swallowed:
                raise
        # what a handler would write behind a rollback, and commit
        execute(tx, "INSERT INTO effect (message_id, note) VALUES ('behind', 'x')")
        tx.commit()

    dead(shop, body)
    before = rows(shop.raw)
    with Admin(shop.app) as admin:
        done = admin.rehearse(CONSUMER, "m1")
    assert done.outcome in ("broken", "failed", "dead")
    assert rows(shop.raw) == before


def test_deferred_constraints_are_checked(shop: Shop) -> None:
    if shop.raw.product == "mysql":
        pytest.skip("it has none")
    shop.raw.execute("CREATE TABLE parent (id integer PRIMARY KEY)")
    shop.raw.execute(
        "CREATE TABLE child (parent integer REFERENCES parent (id) DEFERRABLE INITIALLY DEFERRED)"
    )
    dead(shop, lambda message, tx: execute(tx, "INSERT INTO child VALUES (7)"))
    with Admin(shop.app) as admin:
        done = admin.rehearse(CONSUMER, "m1")
    assert done.outcome == "dead"
    assert "oreign" in str(done.error)
    assert shop.raw.value("SELECT count(*) FROM child") == 0


def test_what_cannot_be_rehearsed_says_why(shop: Shop) -> None:
    shop.handler(retry=ONCE)
    shop.deliver(paid("m1"))
    with Admin(shop.app) as admin:
        with pytest.raises(ConfigurationError, match="was not kept"):
            admin.rehearse(CONSUMER, "m1")
        with pytest.raises(ConfigurationError, match="no such message"):
            admin.rehearse(CONSUMER, "m2")
    with Admin(shop.url) as bare, pytest.raises(ConfigurationError, match="give the App"):
        bare.rehearse(CONSUMER, "m1")


def test_a_message_that_is_processed_or_held_is_left_alone(
    postgresql_url: str, raw: Callable[[str], Raw]
) -> None:
    with opened(postgresql_url) as shop, Admin(shop.app) as admin:
        shop.handler(mode="stored")
        shop.deliver(paid("m1"))
        shop.deliver(paid("m2"))
        shop.lease(limit=1)
        with pytest.raises(ConfigurationError, match="is being processed"):
            admin.rehearse(CONSUMER, "m1")
        other = raw(postgresql_url)
        other.execute("BEGIN")
        other.execute("UPDATE txbox_inbox SET starts = 0 WHERE message_id = 'm2'")
        with pytest.raises(ConfigurationError, match="locked by another transaction"):
            admin.rehearse(CONSUMER, "m2")
        other.execute("ROLLBACK")


def test_a_row_of_the_handlers_that_is_locked_is_waited_for_shortly(
    shop: Shop, raw: Callable[[str], Raw], monkeypatch: pytest.MonkeyPatch
) -> None:
    if shop.raw.product == "sqlite":
        pytest.skip("its one lock is waited for at BEGIN")
    monkeypatch.setattr(rehearsal, "_TRIES", 1)
    monkeypatch.setattr(rehearsal, "_LOCK_TIMEOUT", timedelta(seconds=1))
    shop.raw.execute("CREATE TABLE counter (n integer)")
    shop.raw.execute("INSERT INTO counter VALUES (1)")
    shop.handler(lambda _, tx: execute(tx, "UPDATE counter SET n = n + 1"), keep_payload="always")
    assert shop.deliver(paid("m1")) is Outcome.PROCESSED
    other = raw(shop.url)
    other.execute("BEGIN")
    other.execute("UPDATE counter SET n = 5")
    started = time.monotonic()
    with Admin(shop.app) as admin:
        assert rehearsal.recorded(admin, CONSUMER, "m1").skipped == "locked"
        # the session's default on MySQL and MariaDB is 50 s
        assert time.monotonic() - started < 40
        other.execute("ROLLBACK")
        assert rehearsal.recorded(admin, CONSUMER, "m1").outcome == "processed"


@pytest.mark.parametrize(
    "how", ["CREATE TABLE escaped (id integer)", "SET autocommit = 1", "LOCK TABLES effect WRITE"]
)
def test_mysql_refuses_what_commits_by_itself(mysql_url: str, how: str) -> None:
    """Past the watch as well: the server refuses it in a branch of an XA transaction."""

    def body(message: Message[Any], tx: Any) -> None:
        del message
        with pytest.raises(pymysql.MySQLError):
            type(tx).query(tx, how)
        with pytest.raises(pymysql.MySQLError):
            type(tx).commit(tx)
        execute(tx, "INSERT INTO effect (message_id, note) VALUES ('behind', 'x')")

    with opened(mysql_url) as shop, Admin(shop.app) as admin:
        dead(shop, body)
        before = rows(shop.raw)
        assert admin.rehearse(CONSUMER, "m1").outcome == "processed"
        assert rows(shop.raw) == before


# -- every driver -----------------------------------------------------------------------------


INSERT = "INSERT INTO effect (message_id, note) VALUES ('behind', 'x')"


def _insert(tx: Any) -> Any:
    return tx.execute(
        sa.text(INSERT) if isinstance(tx, sa.Connection) or hasattr(tx, "get_bind") else INSERT
    )


@pytest.mark.parametrize("kind", ["psycopg pool", "engine", "sessions", "async psycopg"])
def test_every_driver_tells_and_refuses(
    postgresql_url: str, raw: Callable[[str], Raw], kind: str
) -> None:
    view = raw(postgresql_url)
    create_effects(view)
    target: Any = postgresql_url
    pool = None
    if kind == "psycopg pool":
        target = pool = ConnectionPool(postgresql_url, min_size=1, max_size=2, open=True)
    engine = sa.create_engine(postgresql_url.replace("postgresql:", "postgresql+psycopg:"))
    if kind == "engine":
        target = engine
    if kind == "sessions":
        target = orm.sessionmaker(engine)
    with App(target) as app, Admin(app) as admin:
        register: Any = app.handler(TOPIC, consumer=CONSUMER, mode="stored")
        if kind.startswith("async"):

            async def handle_async(message: Message[Any], tx: Any) -> None:
                await _insert(tx)
                if message.payload == b"leave":
                    await tx.execute("ROLLBACK")

            register(handle_async)
        else:

            def handle(message: Message[Any], tx: Any) -> None:
                _insert(tx)
                if message.payload == b"leave":
                    tx.execute(sa.text("ROLLBACK")) if kind == "sessions" else tx.rollback()

            register(handle)
        app.send(paid("m1"))
        done = admin.rehearse(CONSUMER, "m1")
        assert done.outcome == "processed"
        assert [sql for sql in done.statements if "SAVEPOINT" not in sql] == [INSERT]
        left = admin.rehearse(CONSUMER, "m1", payload=b"leave")
        assert left.outcome == "broken"
        assert admin.list(InboxFilter(consumer=CONSUMER))[0].status == "pending"
    if pool is not None:
        pool.close()
    engine.dispose()
    assert effects(view) == 0


def test_asyncpg_tells_and_refuses(postgresql_url: str) -> None:
    told: list[str] = []

    def tell(sql: str, values: Any) -> None:
        del values
        told.append(sql)
        if sql == "ROLLBACK":
            raise RuntimeError("refused")

    async def watched() -> None:
        pool: Any = await asyncpg.create_pool(postgresql_url, min_size=1)
        for raw in (await asyncpg.connect(postgresql_url), await pool.acquire()):
            AsyncpgConnection(raw, dialect("postgresql"), set()).watch(tell)
            assert await raw.fetchval("SELECT 1") == 1
            async with raw.transaction():
                with pytest.raises(RuntimeError, match="refused"):
                    await raw.execute("ROLLBACK")
            await raw.close()
        pool.terminate()

    asyncio.run(watched())
    assert told.count("SELECT 1") == 2
    assert told.count("ROLLBACK") == 2
