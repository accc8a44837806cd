"""What is true of MySQL and MariaDB alone: the canary, the token, the locks, the sockets."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import asyncmy
import pymysql
import pytest

from tests.support.blocked import acquired, released
from tests.support.connections import KINDS, Given, Held, statement
from tests.support.databases import Raw
from tests.support.shop import lasting
from tests.support.tidying import LOCK_WAITS
from tests.support.waiting import DEADLINE_S, eventually
from txbox import Inbox, Message
from txbox.connections import borrow, mysql, open_database
from txbox.errors import ConfigurationError, Fault, PayloadMismatch, StoreError, StoreUnavailable
from txbox.session import Statement, blocking
from txbox.store.codec import Arrival, Columns
from txbox.store.inbox import InboxStore

pytestmark = pytest.mark.every_database

OWN = [kind for kind in KINDS if kind.family in ("pymysql", "asyncmy")]
both = pytest.mark.parametrize("given", OWN, ids=str, indirect=True)
# the server refreshes what waits for a lock only when nobody has read it for 0.1 s
LOOK_S = 0.15
ERRORS = (pymysql.MySQLError, asyncmy.errors.MySQLError)


@pytest.fixture
def held(given: Given) -> Iterator[Held]:
    """A connection that holds no lock when its test has failed."""
    connection = given.acquire()
    yield connection
    connection.discard()


@pytest.fixture
def other(given: Given) -> Iterator[Held]:
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


def insert(db: Raw, number: int, message_id: str, status: str, **columns: object) -> None:
    names = ", ".join(["consumer", "message_id", "status", "topic", *columns])
    marks = ", ".join("?" * (4 + len(columns)))
    db.execute(
        f"INSERT INTO txbox_inbox ({names}) VALUES ({marks})",
        (f"c{number}", message_id, status, "t", *columns.values()),
    )


def claim(given: Given, number: int, message_id: str, token: str) -> Statement:
    """The claim alone, without its bound on the wait and without the canary."""
    columns = ("type", "key", "sequence", "payload_hash")
    rows = {"message_id": [message_id], "topic": ["t"], **{column: [None] for column in columns}}
    query: Statement = given.database.dialect.statement(
        "claim", {"consumer": f"c{number}", "token": token}, rows
    )
    return query


def classify(given: Given, number: int, message_id: str) -> Statement:
    query: Statement = given.database.dialect.statement(
        "classify", {"consumer": f"c{number}"}, {"message_id": [message_id]}
    )
    return query


@both
def test_two_drivers_are_tested(given: Given) -> None:
    assert {kind.family for kind in OWN} == {"pymysql", "asyncmy"}
    assert given.database.dialect.name == "mysql"


@both
def test_sessions_read_committed_rows_and_refuse_to_cut_values_off(held: Held) -> None:
    ((mode, autocommit, charset),) = held.execute(
        statement("SELECT @@SESSION.sql_mode, @@SESSION.autocommit, @@SESSION.character_set_client")
    ).rows
    assert "STRICT_ALL_TABLES" in mode
    assert (autocommit, charset) == (0, "utf8mb4")
    with pytest.raises(StoreError) as cut:
        held.begin(
            statement("INSERT INTO txbox_job (name) VALUES (:name)", name="n" * 300),
        )
    assert cut.value.code == "1406"
    held.rollback()


@both
def test_a_session_that_cannot_be_set_up_is_closed(
    given: Given, monkeypatch: pytest.MonkeyPatch
) -> None:
    connected: list[Any] = []
    connect = mysql._connected

    async def kept(database: Any, is_async: bool) -> Any:
        connected.append(await connect(database, is_async))
        return connected[-1]

    monkeypatch.setattr(mysql, "_connected", kept)
    monkeypatch.setattr(mysql, "_SESSION", (mysql._SESSION[0], "SET SESSION no_such_setting = 1"))
    with pytest.raises(StoreUnavailable, match="1193"):
        given.acquire()
    (raw,) = connected
    assert not mysql._is_open(raw, given.kind.is_async)


# -- the canary ----------------------------------------------------------------------------------


@both
@pytest.mark.parametrize(
    "breach",
    [
        "COMMIT",
        "ROLLBACK",
        "COMMIT AND CHAIN",
        "START TRANSACTION",
        "SET autocommit = 1",
        "CREATE TABLE IF NOT EXISTS implied (id integer)",
        "TRUNCATE TABLE implied_too",
        "LOCK TABLES account WRITE, txbox_inbox WRITE",
    ],
)
def test_whatever_ends_the_transaction_is_found_out(
    given: Given, held: Held, db: Raw, number: int, breach: str
) -> None:
    db.execute("CREATE TABLE IF NOT EXISTS implied_too (id integer)")
    token = held.claim(f"c{number}", f"m{number}")
    held.do(f"INSERT INTO account (id, balance) VALUES ({number}, 1)")
    held.do(breach)
    with pytest.raises(StoreError) as found:
        held.close(f"c{number}", f"m{number}", token)
    assert found.value.fault is Fault.GUARD
    assert found.value.definite


@both
def test_a_deadlock_that_a_handler_swallows_is_found_out(
    given: Given, held: Held, db: Raw, number: int
) -> None:
    """1213 rolls the whole transaction back and the connection goes on in a new one, unasked."""
    for each in (number, number + 1):
        db.execute("INSERT INTO account (id, balance) VALUES (?, 0)", (each,))
    token = held.claim(f"c{number}", f"m{number}")
    # InnoDB rolls back whoever changed fewer rows: that is to be the handler
    db.execute("CREATE TABLE IF NOT EXISTS heavy (id integer PRIMARY KEY)")
    held.do(f"UPDATE account SET balance = 1 WHERE id = {number}")
    with Raw(given.url) as rival:
        rival.execute("START TRANSACTION")
        ids = (f"({number * 1000 + each})" for each in range(500))
        rival.execute(f"INSERT INTO heavy (id) VALUES {', '.join(ids)}")
        rival.execute(f"UPDATE account SET balance = 3 WHERE id = {number + 1}")
        blocked = threading.Thread(
            target=rival.execute, args=(f"UPDATE account SET balance = 3 WHERE id = {number}",)
        )
        connection = rival.value("SELECT CONNECTION_ID()")
        blocked.start()
        _until_waiting(db, connection)
        with pytest.raises(ERRORS) as deadlock:
            held.do(f"UPDATE account SET balance = 1 WHERE id = {number + 1}")
        blocked.join(DEADLINE_S)
        assert not blocked.is_alive()
        rival.execute("ROLLBACK")
    assert held.connection.translate(deadlock.value).fault is Fault.CONFLICT
    held.do(f"INSERT INTO account (id, balance) VALUES ({number + 2}, 9)")
    with pytest.raises(StoreError) as found:
        held.close(f"c{number}", f"m{number}", token)
    assert found.value.fault is Fault.GUARD
    held.discard()
    assert rows_of(db, number) == []
    assert balance(db, number + 2) is None


def _until_waiting(db: Raw, connection: int) -> None:
    eventually(
        lambda: db.rows(f"{LOCK_WAITS} AND id = ?", (connection,)),
        "the rival's wait for a lock",
        pause_s=LOOK_S,
    )


@both
def test_a_savepoint_of_the_handlers_own_is_its_own_business(
    given: Given, held: Held, db: Raw, number: int
) -> None:
    token = held.claim(f"c{number}", f"m{number}")
    held.do("SAVEPOINT mine")
    held.do(f"INSERT INTO account (id, balance) VALUES ({number}, 1)")
    held.do("ROLLBACK TO SAVEPOINT mine")
    held.close(f"c{number}", f"m{number}", token)
    assert rows_of(db, number) == ["processed"]
    assert balance(db, number) is None


@both
def test_a_missing_function_of_the_handlers_is_no_breach(held: Held, number: int) -> None:
    held.claim(f"c{number}", f"m{number}")
    with pytest.raises(ERRORS) as error:
        held.do(f"SELECT secret_{number}()")
    translated = held.connection.translate(error.value)
    assert (translated.code, translated.fault) == ("1305", Fault.OTHER)
    assert f"secret_{number} does not exist" in str(translated)
    assert held.connection.translate(ValueError("no database error")) is None


@both
def test_a_handler_that_closes_its_connection_is_found_out(
    given: Given, held: Held, db: Raw, number: int
) -> None:
    token = held.claim(f"c{number}", f"m{number}")
    if given.kind.is_async:
        given.wait(held.connection.native.ensure_closed())
    else:
        held.connection.native.close()
    assert held.lost
    with pytest.raises(StoreError) as found:
        held.close(f"c{number}", f"m{number}", token)
    assert found.value.fault is Fault.GUARD
    assert rows_of(db, number) == []


@both
def test_a_handlers_autocommit_does_not_outlive_its_transaction(
    held: Held, db: Raw, number: int
) -> None:
    held.begin()
    held.do("SET autocommit = 1")
    held.rollback()
    held.begin()
    held.rollback()
    held.do(f"INSERT INTO account (id, balance) VALUES ({number}, 1)")
    held.rollback()
    assert balance(db, number) is None


@both
def test_a_statement_alone_is_all_that_is_sent(given: Given, held: Held, number: int) -> None:
    questions = statement("SHOW SESSION STATUS LIKE 'Questions'")

    def sent() -> int:
        ((_, count),) = given.wait(held.connection.alone(questions)).rows
        return int(count)

    before = sent()
    assert sent() == before + 1
    # a handler is never in autocommit
    held.begin()
    held.do(f"INSERT INTO account (id, balance) VALUES ({number}, 1)")
    held.rollback()
    assert held.execute(statement("SELECT @@SESSION.autocommit")).rows == ((0,),)


# -- claims --------------------------------------------------------------------------------------


@both
def test_ids_are_compared_bytewise(given: Given, held: Held, db: Raw, number: int) -> None:
    ids = ("a", "A", "x", "x ", "é", "e", "😀", "😁")
    for message_id in ids:
        held.begin(claim(given, number, message_id, "mine"))
        (row,) = held.execute(classify(given, number, message_id)).rows
        assert (row[0], row[7]) == (message_id, "mine")
        held.commit()
    assert rows_of(db, number) == ["processing"] * len(ids)


@both
@pytest.mark.parametrize("status", ["processed", "pending", "dead"])
def test_a_claim_changes_only_the_time_of_a_row_that_is_there(
    given: Given, held: Held, db: Raw, number: int, status: str
) -> None:
    insert(db, number, f"m{number}", status, token="theirs")
    before = [row for row in lasting(db) if row[0] == f"c{number}".encode()]
    token = held.claim(f"c{number}", f"m{number}")
    (row,) = held.execute(classify(given, number, f"m{number}")).rows
    assert row[:2] == (f"m{number}", status)
    assert row[7] == "theirs" != token
    held.commit()
    assert [row for row in lasting(db) if row[0] == f"c{number}".encode()] == before != []


@both
def test_a_claim_bounds_its_wait_and_gives_the_session_back_what_it_had(
    given: Given, held: Held, other: Held, number: int
) -> None:
    dialect = given.database.dialect
    wait = statement("SELECT @@SESSION.innodb_lock_wait_timeout")
    held.do("SET SESSION innodb_lock_wait_timeout = 47")
    other.claim(f"c{number}", f"m{number}")
    for _ in range(2):
        with pytest.raises(StoreError) as blocked:
            held.begin(
                dialect.statement("bound_lock_timeout", {"lock_timeout_ms": "1"}),
                claim(given, number, f"m{number}", "mine"),
            )
        assert blocked.value.fault is Fault.LOCK_TIMEOUT
        held.rollback()
        assert held.execute(wait).rows == ((1,),)
    held.claim(f"c{number}", f"n{number}")
    assert held.execute(wait).rows == ((47,),)
    held.rollback()
    other.rollback()


@pytest.mark.parametrize("count", [2, 5, 10])
def test_two_batches_of_different_ids_do_not_wait_for_each_other(
    mysql_url: str, count: int
) -> None:
    """Not in a table without rows either, which a server would rather read through."""
    database = open_database(mysql_url)
    store = InboxStore(database.dialect, Columns())
    batches = [acquired(database.sync) for _ in "ab"]
    for connection, name in zip(batches, "ab", strict=True):
        ids = [f"{name}{number}" for number in range(count)]
        arrivals = [Arrival(Message(id=id_, topic="t"), id_, None) for id_ in ids]
        claim = store.claim(
            "c", arrivals, token=name, lock_timeout=timedelta(seconds=1), idle_s=1.0, keep=False
        )
        connection.begin(claim)
        connection.execute(statement("SET SESSION innodb_lock_wait_timeout = 1"))
        found = blocking(store.classify(connection.connection, "c", ids))
        assert {row.token for row in found.values()} == {name}
    for connection in batches:
        connection.discard()


@pytest.mark.parametrize("end", ["mismatch", "deadlock"])
def test_an_accept_that_fails_gives_the_session_back_what_it_had(
    mysql_url: str, number: int, end: str
) -> None:
    given = urlsplit(mysql_url)
    inbox, id_ = Inbox(consumer=f"c{number}"), f"m{number}"
    raws = [
        pymysql.connect(
            host=given.hostname, port=given.port or 3306, user=given.username or "",
            password=given.password or "", database=given.path[1:], charset="utf8mb4",
        )
        for _ in range(2)
    ]  # fmt: skip
    raw, rival = raws

    def wait() -> Any:
        with raw.cursor() as cursor:
            cursor.execute("SELECT @@SESSION.innodb_lock_wait_timeout")
            return cursor.fetchone()

    before = wait()
    with contextlib.closing(raw), contextlib.closing(rival):
        if end == "mismatch":
            assert inbox.accept(raw, id_, payload=b"1")
            raw.commit()
            with pytest.raises(PayloadMismatch):
                inbox.accept(raw, id_, payload=b"2", timeout=timedelta(seconds=3))
        else:
            # the one that has changed less is the victim
            for each in range(50):
                assert inbox.accept(rival, f"{id_} {each}")
            assert inbox.accept(rival, f"{id_} b")
            assert inbox.accept(raw, f"{id_} a")
            meeting = threading.Thread(target=inbox.accept, args=(rival, f"{id_} a"))
            meeting.start()
            with Raw(mysql_url) as db:
                eventually(lambda: db.rows(f"{LOCK_WAITS} AND db = DATABASE()"), pause_s=LOOK_S)
            with pytest.raises(StoreError) as lost:
                inbox.accept(raw, f"{id_} b", timeout=timedelta(seconds=30))
            assert lost.value.fault is Fault.CONFLICT
            meeting.join(DEADLINE_S)
        raw.rollback()
        assert wait() == before


@both
def test_only_a_committed_claim_proves_a_broken_handler(
    given: Given, held: Held, other: Held, db: Raw, number: int
) -> None:
    token = held.claim(f"c{number}", "running")
    insert(db, number, "committed", "processing", token="t")
    db.execute(
        "INSERT INTO txbox_inbox (consumer, message_id, status, topic, lease_until) "
        "VALUES (?, 'leased', 'processing', 't', UTC_TIMESTAMP(6))",
        (f"c{number}",),
    )
    other.begin()
    found = other.execute(
        given.database.dialect.statement("rescue_broken", {"consumer": f"c{number}", "limit": 10})
    )
    assert found.count == 1
    other.commit()
    held.close(f"c{number}", "running", token)
    assert sorted(
        db.rows(
            "SELECT message_id, status, error_type FROM txbox_inbox WHERE consumer = ?",
            (f"c{number}",),
        )
    ) == [
        (b"committed", "dead", "TransactionBroken"),
        (b"leased", "processing", None),
        (b"running", "processed", None),
    ]


# -- leases and lists ----------------------------------------------------------------------------


@both
def test_a_heartbeat_skips_what_a_handler_holds(
    given: Given, held: Held, other: Held, db: Raw, number: int
) -> None:
    for message_id in ("free", "held"):
        insert(db, number, message_id, "processing", token="lease")
        db.execute(
            "UPDATE txbox_inbox SET lease_until = '2000-01-01' WHERE consumer = ?", (f"c{number}",)
        )
    held.begin()
    held.do(
        f"SELECT 1 FROM txbox_inbox WHERE consumer = 'c{number}' AND message_id = 'held' FOR UPDATE"
    )
    other.begin(statement("SET SESSION innodb_lock_wait_timeout = 1"))
    dialect = given.database.dialect
    params = {"consumer": f"c{number}", "token": "lease", "lease_s": 30.0}
    found = other.execute(dialect.statement("heartbeat", params, {"message_id": ["free", "held"]}))
    assert [tuple(row) for row in found.rows] == [("free",)]
    assert (
        other.execute(dialect.statement("heartbeat_take", params, {"message_id": ["free"]})).count
        == 1
    )
    other.commit()
    assert db.rows(
        "SELECT message_id FROM txbox_inbox WHERE consumer = ? AND lease_until > UTC_TIMESTAMP(6)",
        (f"c{number}",),
    ) == [(b"free",)]


@both
def test_what_others_have_not_committed_is_not_waited_for(
    given: Given, held: Held, other: Held, db: Raw, number: int
) -> None:
    """Rows of the outbox are adopted and retried, and the quarantine is pruned, past whoever adds to them just now."""
    route, dialect = f"r{number}", given.database.dialect
    stage = (
        "INSERT INTO txbox_outbox (id, topic, route, attempts) "
        f"VALUES ('%s{number}', 't', '{route}', 1)"
    )
    aside = (
        "INSERT INTO txbox_quarantine (consumer, message_id, hash, reason, status, updated_at) "
        f"VALUES ('c{number}', '%s', '', '', 'accepted', '2000-01-01')"
    )
    db.execute(stage % "a")
    db.execute(aside % "a")
    held.begin()
    held.do(stage % "b")
    held.do(aside % "b")
    other.begin(statement("SET SESSION innodb_lock_wait_timeout = 1"))
    stray = {"from_route": route, "topic": "t", "type": None, "cause_consumer": None, "due_s": 0.0}
    adopt = dialect.statement("relay_adopt", {**stray, "route": "local", "limit": 10})
    assert other.execute(adopt).count == 1
    ids = [f"a{number}", *(f"c{number} {each}" for each in range(20))]
    assert other.execute(dialect.statement("outbox_retry", {}, {"message_id": ids})).count == 1
    prune = dialect.statement("prune_quarantine", {"older_than_s": 60.0, "limit": 10})
    assert other.execute(prune).count == 1
    other.commit()
    held.rollback()
    assert db.rows("SELECT id FROM txbox_outbox WHERE route = 'local'") == [
        (f"a{number}".encode(),)
    ]
    db.execute("DELETE FROM txbox_outbox WHERE id = ?", (f"a{number}",))


@pytest.mark.parametrize(
    "given", [kind for kind in OWN if kind.family == "pymysql"], ids=str, indirect=True
)
def test_two_that_stage_under_several_keys_do_not_deadlock(
    given: Given, held: Held, other: Held, db: Raw
) -> None:
    """There are fewer locks than keys: two keys may share those of two others, the other way round."""

    def lock(connection: Held, *locks: int) -> None:
        connection.execute(given.database.dialect.statement("stage_lock", {}, {"lock": locks}))

    third = given.acquire()
    held.begin()
    lock(held, 7)
    staging: list[threading.Thread] = []
    failed: list[StoreError] = []

    def stage(connection: Held, *locks: int) -> None:
        connection.begin()
        try:
            lock(connection, *locks)
        except StoreError as error:
            failed.append(error)
        connection.rollback()

    def all_wait() -> bool:
        return len(db.rows(f"{LOCK_WAITS} AND db = DATABASE()")) >= len(staging)

    for connection, locks in ((other, (7, 4096 + 3)), (third, (3, 4096 + 7))):
        staging.append(threading.Thread(target=stage, args=(connection, *locks)))
        staging[-1].start()
        eventually(all_wait, pause_s=LOOK_S)
    held.rollback()
    for thread in staging:
        thread.join(DEADLINE_S)
    third.discard()
    assert not failed


@both
@pytest.mark.parametrize("name", ["inbox_discard", "inbox_retry", "prune_take", "rescue_take"])
def test_a_long_list_of_rows_locks_no_other_row(
    given: Given, held: Held, other: Held, db: Raw, number: int, *, name: str
) -> None:
    """MariaDB reads the whole table for a list of some hundred pairs in IN."""
    rows = (f"('c{number}', 'm{each}', 'dead', 't')" for each in range(1, 2001))
    db.execute(
        f"INSERT INTO txbox_inbox (consumer, message_id, status, topic) VALUES {', '.join(rows)}"
    )
    insert(db, number + 1, "m1", "dead")
    held.begin()
    held.do(f"SELECT 1 FROM txbox_inbox WHERE consumer = 'c{number + 1}' FOR UPDATE")
    other.begin(statement("SET SESSION innodb_lock_wait_timeout = 1"))
    taken = other.execute(
        given.database.dialect.statement(
            name,
            {"max_starts": 3},
            {
                "consumer": [f"c{number}"] * 1500,
                "message_id": [f"m{each}" for each in range(1, 1501)],
            },
        )
    )
    assert taken.count == 1500
    other.rollback()
    held.rollback()  # a server may read the whole table for these rows, and meet the one that is held
    db.execute("DELETE FROM txbox_inbox WHERE consumer = ?", (f"c{number}",))


@both
def test_a_failed_row_that_is_dead_is_no_longer_due(
    given: Given, held: Held, db: Raw, number: int
) -> None:
    insert(db, number, "m", "failed", token=None, payload_hash=b"h")
    params: dict[str, Any] = dict.fromkeys(
        (
            "error_type",
            "error",
            "fingerprint",
            "content_type",
            "headers",
            "origin",
            "payload",
            "key_id",
        )
    )
    params |= {
        "consumer": f"c{number}", "message_id": "m", "payload_hash": b"h", "token": "", "has_payload": True,
        "max_attempts": 3, "max_age_s": 1e9, "delay_s": 0.0, "final": False,
    }  # fmt: skip
    update = given.database.dialect.statement("record_update", params)
    db.execute("UPDATE txbox_inbox SET attempts = 1 WHERE consumer = ?", (f"c{number}",))
    for attempts, status, due in ((2, "failed", True), (3, "dead", False)):
        db.execute(
            "INSERT INTO txbox_attempt (consumer, message_id, attempt, status) VALUES (?, 'm', 1, 'failed')",
            (f"c{number}",),
        )
        held.begin()
        assert held.execute(update).count == 1
        held.commit()
        assert db.rows(
            "SELECT attempts, status, next_attempt_at IS NOT NULL FROM txbox_inbox WHERE consumer = ?",
            (f"c{number}",),
        ) == [(attempts, status, due)]


# -- errors --------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize(
    ("sql", "code", "fault"),
    [
        ("SELECT * FROM missing", "1146", Fault.SCHEMA),
        ("SELECT missing FROM account", "1054", Fault.SCHEMA),
        ("RELEASE SAVEPOINT missing", "1305", Fault.GUARD),
        (
            "INSERT INTO txbox_schema (version, compatible_from) VALUES (1, 1)",
            "1062",
            Fault.DUPLICATE,
        ),
    ],
)
def test_error_numbers_of_the_server(held: Held, sql: str, code: str, fault: Fault) -> None:
    held.begin()
    with pytest.raises(StoreError) as found:
        held.execute(statement(sql))
    assert (found.value.code, found.value.fault) == (code, fault)
    # the value of a row is never quoted, the name of what is missing is
    assert ("missing" in str(found.value)) is ("missing" in sql)


@both
def test_a_statement_beyond_its_time_limit(held: Held) -> None:
    sql, code = {
        "mariadb": ("SET STATEMENT max_statement_time = 0.05 FOR SELECT SLEEP(5)", "1969"),
        # SLEEP alone is cut short without an error
        "mysql": (
            "SELECT /*+ MAX_EXECUTION_TIME(50) */ 1 FROM txbox_schema WHERE SLEEP(5) = 0",
            "3024",
        ),
    }[held.given.kind.product]
    held.begin()
    with pytest.raises(StoreError) as found:
        held.execute(statement(sql))
    assert (found.value.code, found.value.fault) == (code, Fault.TIMEOUT)


@both
def test_a_read_only_transaction_is_unavailable(held: Held, number: int) -> None:
    held.do("START TRANSACTION READ ONLY")
    with pytest.raises(StoreUnavailable) as found:
        held.execute(statement(f"INSERT INTO account (id, balance) VALUES ({number}, 1)"))
    assert found.value.code == "1792"


def test_a_server_that_is_not_there_is_unavailable() -> None:
    database = open_database("mysql://someone:secret@127.0.0.1:1/name")
    assert database.name == "mysql://someone:***@127.0.0.1:1/name"
    assert database.sync is not None
    with pytest.raises(StoreUnavailable, match=r"2003") as found:
        acquired(database.sync)
    assert "secret" not in str(found.value)
    with pytest.raises(StoreUnavailable, match=r"2003"):
        asyncio.run(_acquired(database))


async def _acquired(database: Any) -> Any:
    return await database.asynchronous.acquire()


@pytest.mark.parametrize(
    "url",
    [
        "mysql://host",
        "mysql://host/",
        "mysql://host/a?charset=latin1",
        "mysql://host/a?autocommit=1",
    ],
)
def test_urls_that_are_refused(url: str) -> None:
    with pytest.raises(ConfigurationError):
        open_database(url)


# -- sockets -------------------------------------------------------------------------------------


def test_an_idle_connection_of_a_closed_event_loop_is_replaced(mysql_url: str) -> None:
    database = open_database(mysql_url)

    async def used() -> Any:
        connection = await _acquired(database)
        await connection.begin(())
        await connection.commit(())
        assert database.asynchronous is not None
        await database.asynchronous.release(connection)
        return connection

    first = asyncio.run(used())
    second = asyncio.run(used())
    assert first is not second
    assert first.lost
    database.close()
    assert second.lost


def test_a_cancelled_statement_loses_its_connection(mysql_url: str) -> None:
    database = open_database(mysql_url)

    async def cancelled() -> None:
        connection = await _acquired(database)
        await connection.begin(())
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await connection.execute(statement("SELECT SLEEP(5)"))
        assert connection.lost
        connection.discard()

    asyncio.run(cancelled())


def test_an_idle_connection_never_crosses_a_fork(mysql_url: str) -> None:
    database = open_database(mysql_url)
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
    assert found.rows == ((b"forked",),)
    again.discard()
    database.close()


# -- the caller's connection ---------------------------------------------------------------------


def _settings(url: str) -> dict[str, Any]:
    parts = urlsplit(url)
    return {
        "host": parts.hostname,
        "port": parts.port,
        "user": parts.username,
        "password": parts.password or "",
        "database": parts.path.lstrip("/"),
    }


def test_borrow_refuses_a_connection_that_commits_each_statement(mysql_url: str) -> None:
    with pymysql.connect(**_settings(mysql_url), charset="utf8mb4", autocommit=True) as connection:
        with pytest.raises(ConfigurationError, match="autocommit"):
            borrow(connection)
        connection.begin()
        assert blocking(borrow(connection).execute(statement("SELECT :a", a="é"))).rows == (("é",),)
        with pytest.raises(ConfigurationError, match="sync"):
            borrow(connection, is_async=True)


def test_borrow_refuses_a_charset_in_which_ids_differ(mysql_url: str) -> None:
    with (
        pymysql.connect(**_settings(mysql_url), charset="latin1") as connection,
        pytest.raises(ConfigurationError, match="utf8mb4"),
    ):
        borrow(connection)


def test_borrow_async(mysql_url: str) -> None:
    async def borrowed() -> None:
        connection = await asyncmy.connect(
            **_settings(mysql_url), charset="utf8mb4", autocommit=True
        )
        with pytest.raises(ConfigurationError, match="autocommit"):
            borrow(connection, is_async=True)
        with pytest.raises(ConfigurationError, match="async"):
            borrow(connection)
        await connection.begin()
        found = await borrow(connection, is_async=True).execute(statement("SELECT :a", a="é"))
        assert [tuple(row) for row in found.rows] == [("é",)]
        await connection.ensure_closed()

    asyncio.run(borrowed())


def test_an_app_does_not_take_a_single_connection(mysql_url: str) -> None:
    with (
        pymysql.connect(**_settings(mysql_url)) as connection,
        pytest.raises(ConfigurationError, match="pass a URL"),
    ):
        open_database(connection)


@pytest.mark.parametrize("gone", [False, True], ids=["ended", "gone"])
def test_a_connection_in_use_is_discarded_also_when_its_socket_has_ended(
    mysql_url: str, gone: bool
) -> None:
    database = open_database(mysql_url)
    assert database.sync
    connection = blocking(database.sync.acquire())
    native = connection.native
    native.refused = True
    if gone:
        native._sock.close()
        native._sock = None
    else:
        native._sock.shutdown(socket.SHUT_RDWR)
        native._sock.close()
    connection.discard()
    assert connection.lost
    database.close()


def test_a_command_left_behind_has_ended_when_its_connection_is_discarded(mysql_url: str) -> None:
    database = open_database(mysql_url)
    assert database.sync
    connection = blocking(database.sync.acquire())
    native = connection.native
    began, ended = threading.Event(), threading.Event()

    def left_behind() -> None:
        began.set()
        with pytest.raises(pymysql.MySQLError):
            native.query("SELECT SLEEP(60)")
        ended.set()

    threading.Thread(target=left_behind, daemon=True).start()
    began.wait(DEADLINE_S)
    eventually(native.turn.locked)
    native.refused = True
    connection.discard()
    assert not native.turn.locked()
    assert ended.wait(DEADLINE_S)
    database.close()
