"""What is true of SQLite alone: its guard, its threads, its files."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import aiosqlite
import pytest

from tests.support.blocked import acquired, released
from tests.support.connections import KINDS, Given, Held, statement
from tests.support.databases import Raw
from tests.support.waiting import DEADLINE_S, eventually
from txbox import App, Message
from txbox.connections import borrow, open_database, sqlite
from txbox.errors import ConfigurationError, Fault, StoreError, StoreUnavailable
from txbox.session import blocking

pytestmark = pytest.mark.every_database

OWN = [kind for kind in KINDS if kind.name in ("sqlite3", "aiosqlite")]
both = pytest.mark.parametrize("given", OWN, ids=str, indirect=True)


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    yield
    _ended(_drivers_threads())


@pytest.fixture
def held(given: Given) -> Iterator[Held]:
    """A connection that holds no lock when its test has failed."""
    connection = given.acquire()
    yield connection
    connection.discard()


def balance(db: Raw, number: int) -> int | None:
    rows = db.rows("SELECT balance FROM account WHERE id = ?", (number,))
    return rows[0][0] if rows else None


def rows_of(db: Raw, number: int) -> list[str]:
    return [
        status
        for (status,) in db.rows(
            "SELECT status FROM txbox_inbox WHERE consumer = ?", (f"c{number}",)
        )
    ]


@both
def test_two_drivers_are_tested(given: Given) -> None:
    assert {kind.name for kind in OWN} == {"sqlite3", "aiosqlite"}
    assert given.database.dialect.name == "sqlite"


@both
def test_connections_are_durable_and_enforce_foreign_keys(given: Given, held: Held) -> None:
    held.begin()
    for pragma, value in (
        ("foreign_keys", 1),
        ("synchronous", 2),
        ("journal_mode", "wal"),
        ("busy_timeout", 10_000),
    ):
        assert held.execute(statement(f"PRAGMA {pragma}")).rows == [(value,)]
    assert tuple(held.execute(given.database.dialect.statement("guard_check")).rows[0]) == (
        1,
        "origin",
    )
    held.rollback()


@both
@pytest.mark.parametrize("breach", ["commit", "executescript", "COMMIT", "END", "with"])
def test_the_database_refuses_a_handlers_commit(
    given: Given, held: Held, db: Raw, number: int, breach: str
) -> None:
    tx = held.connection.native
    token = held.claim(f"c{number}", f"m{number}")
    held.do(f"INSERT INTO account (id, balance) VALUES ({number}, 1)")

    def commit() -> None:
        if breach == "commit":
            given.wait(tx.commit())
        elif breach == "executescript":
            given.wait(tx.executescript("SELECT 1"))
        elif breach == "with" and given.kind.name == "sqlite3":
            with tx:
                tx.execute("SELECT 1")
        else:
            held.do("COMMIT" if breach == "with" else breach)

    with pytest.raises(sqlite3.IntegrityError) as refused:
        commit()
    assert refused.value.sqlite_errorname == "SQLITE_CONSTRAINT_FOREIGNKEY"
    assert rows_of(db, number) == []
    if breach != "with":  # which rolls back
        # a handler that swallows the refusal has broken nothing
        held.close(f"c{number}", f"m{number}", token)
        assert rows_of(db, number) == ["processed"]
        assert balance(db, number) == 1


@both
@pytest.mark.parametrize("again", ["implicit", "BEGIN", "read only"])
def test_work_after_a_rollback_is_not_committed_piece_by_piece(
    given: Given, held: Held, db: Raw, number: int, again: str
) -> None:
    token = held.claim(f"c{number}", f"m{number}")
    given.wait(held.connection.native.rollback())
    if again == "BEGIN":
        held.do("BEGIN")
    if again != "read only":
        held.do(f"INSERT INTO account (id, balance) VALUES ({number}, 1)")
    with pytest.raises(StoreError) as found:
        held.close(f"c{number}", f"m{number}", token)
    assert found.value.fault is Fault.GUARD
    assert found.value.definite
    assert balance(db, number) is None
    assert rows_of(db, number) == []


@both
def test_a_savepoint_of_the_handlers_own_is_its_own_business(
    given: Given, held: Held, db: Raw, number: int
) -> None:
    token = held.claim(f"c{number}", f"m{number}")
    held.do("SAVEPOINT mine")
    held.do(f"INSERT INTO account (id, balance) VALUES ({number}, 1)")
    held.do("ROLLBACK TO mine")
    held.do("RELEASE mine")
    held.close(f"c{number}", f"m{number}", token)
    assert rows_of(db, number) == ["processed"]
    assert balance(db, number) is None


@both
def test_close_refuses_the_token_of_another_transaction(
    given: Given, held: Held, number: int
) -> None:
    token = held.claim(f"c{number}", f"m{number}")
    held.close(f"c{number}", f"m{number}", token)
    held.begin()
    with pytest.raises(StoreError) as found:
        held.execute(given.store.closing(token))
    assert found.value.fault is Fault.GUARD
    held.rollback()


@both
def test_a_handler_that_closes_its_connection_is_found_out(
    given: Given, held: Held, db: Raw, number: int
) -> None:
    token = held.claim(f"c{number}", f"m{number}")
    given.wait(held.connection.native.close())
    assert held.lost
    with pytest.raises(StoreError) as found:
        held.close(f"c{number}", f"m{number}", token)
    assert found.value.fault is Fault.GUARD
    assert rows_of(db, number) == []


@both
def test_an_error_that_rolled_everything_back_and_was_swallowed_commits_nothing(
    given: Given, held: Held, db: Raw, number: int
) -> None:
    db.execute("INSERT INTO account (id, balance) VALUES (?, 1)", (number,))
    token = held.claim(f"c{number}", f"m{number}")
    with pytest.raises(sqlite3.IntegrityError):
        held.do(f"INSERT OR ROLLBACK INTO account (id, balance) VALUES ({number}, 2)")
    with pytest.raises(StoreError) as found:
        held.commit(given.store.closing(token))
    assert found.value.fault is Fault.GUARD
    assert rows_of(db, number) == []
    assert balance(db, number) == 1


@both
def test_a_full_disk_is_unavailable(held: Held) -> None:
    held.begin()
    ((pages,),) = held.execute(statement("PRAGMA page_count")).rows
    held.do(f"PRAGMA max_page_count = {pages + 2}")
    with pytest.raises(sqlite3.OperationalError) as full:
        held.do("CREATE TABLE big AS SELECT randomblob(1000000) AS data")
    assert full.value.sqlite_errorname == "SQLITE_FULL"
    assert isinstance(held.connection.translate(full.value), StoreUnavailable)


@both
def test_ids_are_compared_bytewise(given: Given, held: Held, db: Raw, number: int) -> None:
    ids = ("a", "A", "x", "x ", "é", "e", "😀", "😁")
    for message_id in ids:
        held.close(f"c{number}", message_id, held.claim(f"c{number}", message_id))
    assert rows_of(db, number) == ["processed"] * len(ids)


@both
def test_a_codeless_schema_error_is_known_in_txboxs_own_statements_only(
    given: Given, held: Held
) -> None:
    held.begin()
    with pytest.raises(StoreError) as raised:
        held.execute(statement("SELECT missing FROM txbox_inbox"))
    assert raised.value.fault is Fault.SCHEMA
    with pytest.raises(sqlite3.OperationalError) as theirs:
        held.do("SELECT missing FROM account")
    translated = held.connection.translate(theirs.value)
    assert translated.fault is Fault.OTHER
    assert held.connection.translate(ValueError("no database error")) is None
    held.rollback()


@both
def test_errors_quote_no_values(given: Given, held: Held, number: int) -> None:
    held.begin()
    with pytest.raises(sqlite3.IntegrityError) as error:
        held.do(
            f"INSERT INTO txbox_guard (number, token, never) VALUES ('secret{number}', 'secret', 1)"
        )
    translated = held.connection.translate(error.value)
    assert "secret" not in str(translated)
    assert translated.code == "SQLITE_MISMATCH"
    assert translated.fault is Fault.OTHER, "only close may accuse a handler"
    held.rollback()


@both
def test_a_writer_that_waits_too_long_may_be_tried_again(
    given: Given, db: Raw, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite, "_BUSY_TIMEOUT_S", 0.05)
    database = open_database(given.url)
    assert database.sync is not None
    db.execute("BEGIN IMMEDIATE")
    waiting = acquired(database.sync)
    with pytest.raises(StoreUnavailable) as busy:
        waiting.begin(())
    assert busy.value.fault is Fault.CONFLICT
    db.execute("ROLLBACK")
    waiting.discard()
    database.close()


@both
def test_what_a_handler_sets_on_a_connection_does_not_stay(
    given: Given, held: Held, number: int
) -> None:
    held.claim(f"c{number}", f"m{number}")
    held.connection.native.row_factory = lambda cursor, row: {"row": row}
    held.connection.native.isolation_level = "DEFERRED"
    assert held.execute(statement("SELECT 1, 2")).rows == [(1, 2)]
    held.rollback()
    held.begin()
    assert held.connection.native.row_factory is None
    assert held.connection.native.isolation_level == "IMMEDIATE"
    held.rollback()


# -- files and URLs ------------------------------------------------------------------------------


@pytest.mark.parametrize("url", ["sqlite://", "sqlite:///", "sqlite:///:memory:"])
def test_a_database_in_memory_is_refused(url: str) -> None:
    with pytest.raises(ConfigurationError, match="use a file"):
        open_database(url)


@pytest.mark.parametrize("url", ["sqlite://host/name.db", "sqlite:///name.db?mode=ro"])
def test_hosts_and_options_are_refused(url: str) -> None:
    with pytest.raises(ConfigurationError, match=r"sqlite:////absolute\.db"):
        open_database(url)


def test_relative_and_absolute_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for url, path in (
        ("sqlite:///here.db", tmp_path / "here.db"),
        (f"sqlite:///{tmp_path}/a%20b.db", tmp_path / "a b.db"),
    ):
        database = open_database(url)
        assert not path.exists()
        assert database.sync is not None
        acquired(database.sync).discard()
        assert path.exists()


def test_a_file_that_cannot_be_opened_is_unavailable(tmp_path: Path) -> None:
    database = open_database(f"sqlite:///{tmp_path}/no/where.db")
    assert database.sync is not None
    assert database.asynchronous is not None
    with pytest.raises(StoreUnavailable, match="SQLITE_CANTOPEN"):
        acquired(database.sync)
    with pytest.raises(StoreUnavailable, match="SQLITE_CANTOPEN"):
        asyncio.run(_acquired(database))
    assert _drivers_threads() == []


def test_a_locked_file_is_unavailable_to_every_verb(
    sqlite_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite, "_BUSY_TIMEOUT_S", 0.05)
    other = Message(topic="another", id="a", payload=b"{}")

    def nothing(app: App) -> None:
        with app.transaction():
            pass

    verbs: tuple[Callable[[App], object], ...] = (
        lambda app: app.process(other),
        lambda app: app.send(Message(topic="orders", id="a", payload=b"{}")),
        nothing,
        lambda app: app.init(),
    )
    with Raw(sqlite_url) as rival:
        rival.execute("BEGIN IMMEDIATE")
        for verb in verbs:
            with App(sqlite_url, unmatched="quarantine") as app:
                app.handler("orders", consumer="billing")(lambda message, tx: None)
                with pytest.raises(StoreUnavailable, match="locked"):
                    verb(app)
        rival.execute("ROLLBACK")


def test_a_caller_that_is_cancelled_while_a_file_is_opened_leaves_no_connection(
    sqlite_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[sqlite3.Connection] = []
    reached, may_go_on = threading.Event(), threading.Event()
    connect = sqlite3.connect

    def slowly(*args: Any, **options: Any) -> sqlite3.Connection:
        opened.append(connect(*args, **options))
        reached.set()
        assert may_go_on.wait(DEADLINE_S)
        return opened[-1]

    monkeypatch.setattr(sqlite3, "connect", slowly)

    async def cancelled() -> None:
        acquiring = asyncio.ensure_future(_acquired(open_database(sqlite_url)))
        assert await asyncio.to_thread(reached.wait, 10)
        acquiring.cancel()
        with pytest.raises(asyncio.CancelledError):
            await acquiring
        may_go_on.set()

    asyncio.run(cancelled())
    (raw,) = opened

    def closed() -> bool:
        try:
            return raw.total_changes < 0
        except sqlite3.ProgrammingError:
            return True

    assert eventually(closed)


async def _acquired(database: Any) -> Any:
    return await database.asynchronous.acquire()


# -- threads, processes --------------------------------------------------------------------------


def _drivers_threads() -> list[threading.Thread]:
    names = ("_connection_worker_thread", "txbox discard")
    return [each for each in threading.enumerate() if any(name in each.name for name in names)]


def _ended(threads: list[threading.Thread]) -> None:
    # those that discard outlive the driver's own by a moment
    for thread in [*threads, *_drivers_threads()]:
        thread.join(timeout=DEADLINE_S)
        assert not thread.is_alive(), "a thread still runs"
    assert _drivers_threads() == []


def test_discard_ends_the_drivers_thread_also_in_a_transaction(sqlite_url: str) -> None:
    database = open_database(sqlite_url)

    async def abandon() -> list[threading.Thread]:
        connection = await _acquired(database)
        await connection.begin((statement("CREATE TABLE left_behind (id integer)"),))
        running = asyncio.ensure_future(
            connection.native.execute_fetchall(
                "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT max(i) FROM n"
            )
        )
        await asyncio.sleep(0)
        threads = _drivers_threads()
        assert len(threads) == 1
        connection.discard()
        connection.discard()
        assert connection.lost
        with pytest.raises(sqlite3.OperationalError):
            await running
        return _drivers_threads() or threads

    _ended(asyncio.run(abandon()))
    with Raw(sqlite_url) as raw:
        assert raw.value("SELECT count(*) FROM sqlite_master WHERE name = 'left_behind'") == 0


def test_discard_ends_a_transaction_though_somebody_keeps_a_cursor(sqlite_url: str) -> None:
    """As a traceback does, which holds the handler's frames: SQLite keeps a closed connection for an open statement."""
    database = open_database(sqlite_url)
    assert database.sync is not None
    kept: list[Any] = []

    def unlocked() -> None:
        with Raw(sqlite_url) as raw:
            raw.execute("PRAGMA busy_timeout = 0")
            raw.execute("BEGIN IMMEDIATE")
            raw.execute("ROLLBACK")

    connection = acquired(database.sync)
    connection.begin((statement("CREATE TABLE left_behind (id integer)"),))
    kept.append(connection.native.execute("SELECT 1 UNION SELECT 2"))
    kept[0].fetchone()
    connection.discard()
    unlocked()

    async def abandon() -> list[threading.Thread]:
        connection = await _acquired(database)
        await connection.begin((statement("CREATE TABLE left_behind (id integer)"),))
        cursor = await connection.native.execute("SELECT 1 UNION SELECT 2")
        kept.append(cursor)
        await cursor.fetchone()
        threads = _drivers_threads()
        connection.discard()
        return threads

    _ended(asyncio.run(abandon()))
    unlocked()


def test_an_idle_connection_serves_another_event_loop(sqlite_url: str) -> None:
    database = open_database(sqlite_url)

    async def used() -> Any:
        connection = await _acquired(database)
        await connection.begin(())
        await connection.commit((statement("SELECT 1"),))
        assert database.asynchronous is not None
        await database.asynchronous.release(connection)
        return connection

    assert asyncio.run(used()) is asyncio.run(used())
    threads = _drivers_threads()
    assert len(threads) == 1
    database.close()
    _ended(threads)


def test_the_interpreter_exits_with_connections_left_open(sqlite_url: str) -> None:
    program = f"""
import asyncio
from txbox.connections import open_database
database = open_database({sqlite_url!r})
async def main():
    idle = await database.asynchronous.acquire()
    await database.asynchronous.release(idle)
    busy = await database.asynchronous.acquire()
    await busy.begin(())
    print("left")
asyncio.run(main())
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=True,
    )
    assert done.stdout == "left\n"


def test_an_idle_connection_never_crosses_a_fork(sqlite_url: str) -> None:
    database = open_database(sqlite_url)
    assert database.sync is not None
    first = acquired(database.sync)
    released(database.sync, first)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            connection = acquired(database.sync)
            connection.begin(())
            connection.commit((statement("INSERT INTO txbox_job (name) VALUES ('forked')"),))
            status = 2 if connection.connection is first.connection else 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    again = acquired(database.sync)
    assert again.connection is first.connection
    again.begin(())
    (found,) = again.commit((statement("SELECT name FROM txbox_job"),))
    assert found.rows == [("forked",)]
    again.discard()
    database.close()


# -- the caller's connection ---------------------------------------------------------------------


@pytest.fixture
def caller(sqlite_url: str) -> Iterator[sqlite3.Connection]:
    connection = sqlite3.connect(sqlite_url.removeprefix("sqlite:///"))
    yield connection
    connection.close()


def test_borrow_refuses_a_connection_that_commits_each_statement(
    caller: sqlite3.Connection,
) -> None:
    caller.isolation_level = None
    with pytest.raises(ConfigurationError, match="autocommit"):
        borrow(caller)
    caller.execute("BEGIN")
    assert blocking(borrow(caller).execute(statement("SELECT :a", a=1))).rows == [(1,)]


def test_borrow_leaves_the_callers_row_factory_alone(caller: sqlite3.Connection) -> None:
    caller.row_factory = sqlite3.Row
    assert blocking(borrow(caller).execute(statement("SELECT 1"))).rows == [(1,)]
    assert caller.row_factory is sqlite3.Row


def test_borrow_wants_the_right_colour(caller: sqlite3.Connection, sqlite_url: str) -> None:
    with pytest.raises(ConfigurationError, match="sync"):
        borrow(caller, is_async=True)

    async def wrong() -> None:
        async with aiosqlite.connect(sqlite_url.removeprefix("sqlite:///")) as connection:
            with pytest.raises(ConfigurationError, match="async"):
                borrow(connection)
            found = await borrow(connection, is_async=True).execute(statement("SELECT :a", a=1))
            assert found.rows == [(1,)]

    asyncio.run(wrong())


def test_an_app_does_not_take_a_single_connection(caller: sqlite3.Connection) -> None:
    with pytest.raises(ConfigurationError, match="pass a URL"):
        open_database(caller)
