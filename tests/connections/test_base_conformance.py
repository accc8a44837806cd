"""What every kind of connection must do alike (promises 2.1 to 2.3, 2.6)."""

from __future__ import annotations

import asyncio
import inspect
import sqlite3
import threading
from collections.abc import Callable
from datetime import datetime
from typing import Any

import pytest

from tests.support.connections import KINDS, Given, Held, Kind, statement
from tests.support.databases import Raw
from tests.support.tidying import SESSIONS
from tests.support.waiting import DEADLINE_S, eventually
from txbox.errors import Fault, StoreError
from txbox.session import Raised, Session, Statement, drive, drive_async
from txbox.store import leases
from txbox.store.dialect import as_time

pytestmark = pytest.mark.every_database


def every(*, dialects: tuple[str, ...] = ("postgresql", "mysql", "sqlite")) -> pytest.MarkDecorator:
    kinds = [kind for kind in KINDS if kind.dialect in dialects]
    return pytest.mark.parametrize("given", kinds, ids=str, indirect=True)


SERVERS = ("postgresql", "mysql")


def balance(db: Raw, number: int) -> int | None:
    rows = db.rows("SELECT balance FROM account WHERE id = ?", (number,))
    return rows[0][0] if rows else None


def status(db: Raw, number: int) -> str | None:
    rows = db.rows("SELECT status FROM txbox_inbox WHERE message_id = ?", (message_id(number),))
    return _text(rows[0][0]) if rows else None


def message_id(number: int) -> str:
    return f"m{number}"


def consumer(number: int) -> str:
    return f"c{number}"


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


BACKEND = {"postgresql": "SELECT pg_backend_pid()", "mysql": "SELECT CONNECTION_ID()"}
ALIVE = {
    "postgresql": "SELECT 1 FROM pg_stat_activity WHERE pid = ?",
    "mysql": f"SELECT 1 FROM {SESSIONS} WHERE id = ?",
}


def backend(held: Held) -> int:
    return int(held.execute(statement(BACKEND[held.given.kind.dialect])).rows[0][0])


def kill(db: Raw, given: Given, process: int) -> None:
    if given.kind.dialect == "postgresql":
        db.rows("SELECT pg_terminate_backend(?)", (process,))
    else:
        db.execute(f"KILL {process}")
    eventually(lambda: not db.rows(ALIVE[given.kind.dialect], (process,)))


# -- values and counts ---------------------------------------------------------------------------

VALUES = {
    "postgresql": "SELECT :text::text, :number::bigint, :flag::boolean, :data::bytea, :nothing::text, now(), "
    "'50% :x' || 'y'",
    "mysql": "SELECT CAST(:text AS CHAR), CAST(:number AS SIGNED), :flag, CAST(:data AS BINARY), :nothing, "
    "UTC_TIMESTAMP(6), '50% :xy'",
    "sqlite": "SELECT :text, :number, :flag, :data, :nothing, strftime('%Y-%m-%d %H:%M:%f', 'now'), '50% :xy'",
}


@every()
def test_values_come_back_as_the_store_reads_them(given: Given) -> None:
    held = given.acquire()
    text = "é'\\\"%s"
    query = statement(
        VALUES[given.kind.dialect],
        text=text,
        number=2**40,
        flag=True,
        data=b"\x00\xff",
        nothing=None,
    )
    (first,) = held.begin(query)
    again = held.execute(query)
    for result in (first, again):
        ((got, number, flag, data, nothing, moment, mark),) = result.rows
        assert got == text
        assert number == 2**40
        assert flag in (True, 1)
        assert type(data) is bytes
        assert data == b"\x00\xff"
        assert nothing is None
        read = as_time(moment)
        assert isinstance(read, datetime)
        assert read.tzinfo is not None
        assert mark == "50% :xy"
    held.rollback()
    held.release()


@every(dialects=("postgresql",))
def test_columns_of_many_rows_travel_as_arrays(given: Given) -> None:
    held = given.acquire()
    ids, data, numbers = (
        ["a", 'b"\\', "{c,d}", "NULL"],
        [b"\x00", None, b'"\\', b""],
        [1, None, 2**40, -1],
    )
    query = statement(
        "SELECT * FROM unnest(:rows.i::text[], :rows.d::bytea[], :rows.n::bigint[])",
        **{"rows.i": ids, "rows.d": data, "rows.n": numbers},
    )
    (result,) = held.begin(query)
    assert [tuple(row) for row in result.rows] == list(zip(ids, data, numbers, strict=True))
    held.rollback()
    held.release()


@every()
def test_count_says_how_many_rows_were_touched(given: Given, number: int) -> None:
    held = given.acquire()
    values = "(:a, 1), (:b, 2)"
    insert = statement(f"INSERT INTO account (id, balance) VALUES {values}", a=number, b=number + 1)
    inserted = held.begin(insert)[0]
    changed = held.execute(statement("UPDATE account SET balance = 9 WHERE id = :a", a=number))
    missed = held.execute(statement("UPDATE account SET balance = 9 WHERE id = :a", a=number + 50))
    assert (inserted.count, changed.count, missed.count) == (2, 1, 0)
    assert list(inserted.rows) == []
    if given.database.dialect.returning:
        named = held.execute(
            statement(
                "UPDATE account SET balance = 7 WHERE id >= :a AND id <= :b RETURNING id",
                a=number,
                b=number + 1,
            )
        )
        assert sorted(tuple(row) for row in named.rows) == [(number,), (number + 1,)]
    held.rollback()
    held.release()


# -- begin, commit, rollback ---------------------------------------------------------------------


@every()
def test_commit_persists_what_txbox_and_the_handler_wrote(
    given: Given, db: Raw, number: int
) -> None:
    held = given.acquire()
    held.begin(statement("INSERT INTO account (id, balance) VALUES (:id, 1)", id=number))
    held.do(f"INSERT INTO account (id, balance) VALUES ({number + 1}, 2)")
    assert balance(db, number) is None
    held.commit(statement("INSERT INTO account (id, balance) VALUES (:id, 3)", id=number + 2))
    held.release()
    assert [balance(db, number + each) for each in range(3)] == [1, 2, 3]


@every()
def test_rollback_persists_nothing_and_the_connection_is_used_again(
    given: Given, db: Raw, number: int
) -> None:
    for _ in range(2):
        held = given.acquire()
        held.begin(statement("INSERT INTO account (id, balance) VALUES (:id, 1)", id=number))
        held.do(f"INSERT INTO account (id, balance) VALUES ({number + 1}, 2)")
        held.rollback()
        assert not held.lost
        held.release()
        assert balance(db, number) is None
        assert balance(db, number + 1) is None
    held = given.acquire()
    held.begin()
    held.do(f"INSERT INTO account (id, balance) VALUES ({number}, 5)")
    held.commit()
    held.release()
    assert balance(db, number) == 5


@every()
def test_a_failing_statement_skips_the_commit(given: Given, db: Raw, number: int) -> None:
    held = given.acquire()
    held.begin()
    held.do(f"INSERT INTO account (id, balance) VALUES ({number}, 1)")
    with pytest.raises(StoreError) as caught:
        held.commit(
            statement("INSERT INTO account (id, balance) VALUES (:id, NULL)", id=number + 1)
        )
    assert caught.value.definite
    held.rollback()
    held.release()
    assert balance(db, number) is None


@every(dialects=SERVERS)
def test_the_transaction_is_read_committed(given: Given, db: Raw, number: int) -> None:
    db.execute("INSERT INTO account (id, balance) VALUES (?, 1)", (number,))
    read = statement("SELECT balance FROM account WHERE id = :id", id=number)
    held = given.acquire()
    (before,) = held.begin(read)
    db.execute("UPDATE account SET balance = 2 WHERE id = ?", (number,))
    after = held.execute(read)
    held.rollback()
    held.release()
    assert (before.rows[0][0], after.rows[0][0]) == (1, 2)


def driven(given: Given, operation: Any, *args: Any, **kwargs: Any) -> Any:
    if given.kind.is_async:
        return given.wait(drive_async(given.database.asynchronous, operation, *args, **kwargs))
    return drive(given.database.sync, operation, *args, **kwargs)


@every()
def test_a_statement_alone_leaves_no_transaction_and_no_snapshot_behind(
    given: Given, db: Raw, number: int
) -> None:
    async def write(db: Session) -> Any:
        await db.alone(statement("UPDATE account SET balance = 4 WHERE id = :id", id=number))

    async def read(db: Session) -> Any:
        result = await db.alone(statement("SELECT balance FROM account WHERE id = :id", id=number))
        return result.rows[0][0]

    db.execute("INSERT INTO account (id, balance) VALUES (?, 1)", (number,))
    assert driven(given, read) == 1
    # by others, and they need not wait
    db.execute("UPDATE account SET balance = 2 WHERE id = ?", (number,))
    assert driven(given, read) == 2
    held = given.acquire()
    held.begin()
    held.do(f"UPDATE account SET balance = 3 WHERE id = {number}")
    held.rollback()
    held.release()
    assert driven(given, read) == 2
    driven(given, write)
    assert balance(db, number) == 4
    # by others, and they need not wait
    db.execute("UPDATE account SET balance = 5 WHERE id = ?", (number,))


@every()
def test_one_read_tells_what_is_due_for_every_consumer(given: Given, db: Raw, number: int) -> None:
    names = [consumer(number), consumer(number + 1), consumer(number + 2)]
    now, later = {
        "postgresql": ("clock_timestamp()", "clock_timestamp() + interval '1 minute'"),
        "mysql": ("UTC_TIMESTAMP(6)", "UTC_TIMESTAMP(6) + INTERVAL 1 MINUTE"),
        "sqlite": (
            "strftime('%Y-%m-%d %H:%M:%f', 'now')",
            "strftime('%Y-%m-%d %H:%M:%f', 'now', '+1 minute')",
        ),
    }[given.kind.dialect]
    for name, status, at in (
        (names[0], "pending", later),
        (names[0], "failed", now),
        (names[1], "pending", later),
        (names[2], "dead", "NULL"),
    ):
        db.execute(
            "INSERT INTO txbox_inbox (consumer, message_id, status, topic, payload_hash, payload, has_payload, "
            f"next_attempt_at) VALUES (?, ?, ?, 't', ?, ?, {'1' if given.kind.dialect == 'sqlite' else 'TRUE'}, "
            f"{at})",
            (name, f"{name}-{status}", status, b"h" * 32, b"{}"),
        )
    dialect = given.database.dialect
    found = dict(driven(given, leases.due, dialect, names, ahead_s=5.0, routes=[""]))
    assert list(found) == names[:1]
    assert found[names[0]] <= 0
    found = dict(driven(given, leases.due, dialect, names, ahead_s=120.0, routes=[]))
    assert set(found) == set(names[:2])
    assert 30 < found[names[1]] <= 60


@every(dialects=("sqlite",))
def test_sqlite_transactions_are_writers_from_the_start(given: Given, db: Raw) -> None:
    held = given.acquire()
    held.begin()
    db.rows("PRAGMA busy_timeout = 0")
    with pytest.raises(Exception, match="locked"):
        db.execute("BEGIN IMMEDIATE")
    (foreign_keys,) = held.execute(statement("PRAGMA foreign_keys")).rows[0]
    held.rollback()
    held.release()
    assert foreign_keys == 1


# -- errors --------------------------------------------------------------------------------------


@every()
def test_a_duplicate_key_is_told(given: Given, db: Raw, number: int) -> None:
    db.execute("INSERT INTO account (id, balance) VALUES (?, 1)", (number,))
    held = given.acquire()
    with pytest.raises(StoreError) as caught:
        held.begin(statement("INSERT INTO account (id, balance) VALUES (:id, 1)", id=number))
    assert caught.value.fault is Fault.DUPLICATE
    assert caught.value.definite
    if given.kind.dialect == "postgresql":
        assert caught.value.constraint == "account_pkey"
    assert str(number) not in str(caught.value)
    held.rollback()
    held.release()


@every()
def test_an_error_of_the_handler_is_translated(given: Given, db: Raw, number: int) -> None:
    db.execute("INSERT INTO account (id, balance) VALUES (?, 1)", (number,))
    held = given.acquire()
    held.begin()
    with pytest.raises(Exception, match=r".") as caught:
        held.do(f"INSERT INTO account (id, balance) VALUES ({number}, 1)")
    found = held.connection.translate(caught.value)
    assert found is not None
    assert found.fault is Fault.DUPLICATE
    assert held.connection.translate(ValueError("no database")) is None
    assert held.connection.translate(FileNotFoundError(2, "no database")) is None
    assert not held.lost
    held.rollback()
    held.release()


@every(dialects=SERVERS)
def test_an_undefined_table_is_told(given: Given) -> None:
    held = given.acquire()
    with pytest.raises(StoreError) as caught:
        held.begin(statement("SELECT 1 FROM no_such_table"))
    assert caught.value.fault is Fault.SCHEMA
    held.rollback()
    held.release()


def lock_briefly(held: Held) -> None:
    if held.given.kind.dialect == "postgresql":
        held.do("SET LOCAL lock_timeout = '50ms'")
    else:
        held.do("SET SESSION innodb_lock_wait_timeout = 1")


@every(dialects=SERVERS)
def test_a_lock_timeout_is_told(given: Given, db: Raw, number: int) -> None:
    db.execute("INSERT INTO account (id, balance) VALUES (?, 1)", (number,))
    with Raw(given.url) as rival:
        rival.execute("BEGIN")
        rival.execute("UPDATE account SET balance = 2 WHERE id = ?", (number,))
        held = given.acquire()
        held.begin()
        lock_briefly(held)
        with pytest.raises(StoreError) as caught:
            held.execute(statement("UPDATE account SET balance = 3 WHERE id = :id", id=number))
        assert caught.value.fault is Fault.LOCK_TIMEOUT
        held.rollback()
        held.discard()
        rival.execute("ROLLBACK")


@every(dialects=SERVERS)
def test_a_deadlock_is_a_conflict(given: Given, db: Raw, number: int) -> None:
    for each in range(20):
        db.execute("INSERT INTO account (id, balance) VALUES (?, 1)", (number + each,))
    held = given.acquire()
    with Raw(given.url) as rival:
        # the rival weighs more (InnoDB) and looks later (PostgreSQL): txbox's transaction is the victim
        blocked = rival.value(BACKEND[given.kind.dialect])
        rival.execute("BEGIN")
        rival.execute(
            "UPDATE account SET balance = 2 WHERE id BETWEEN ? AND ?", (number + 1, number + 19)
        )
        held.begin(statement("UPDATE account SET balance = 3 WHERE id = :id", id=number))
        if given.kind.dialect == "postgresql":
            held.do("SET LOCAL deadlock_timeout = '10ms'")
        waiting = threading.Thread(
            target=rival.execute,
            args=("UPDATE account SET balance = 2 WHERE id = ?", (number,)),
            daemon=True,
        )
        waiting.start()
        eventually(lambda: bool(db.rows(BLOCKED[given.kind.dialect], (blocked,))))
        with pytest.raises(StoreError) as caught:
            held.execute(statement("UPDATE account SET balance = 3 WHERE id = :id", id=number + 1))
        assert caught.value.fault is Fault.CONFLICT
        assert caught.value.definite
        held.rollback()
        held.release()
        waiting.join(DEADLINE_S)
        assert not waiting.is_alive()
        rival.execute("ROLLBACK")


BLOCKED = {
    "postgresql": "SELECT 1 FROM pg_locks WHERE NOT granted AND pid = ?",
    # innodb_trx is a cache that polling keeps from being refreshed
    "mysql": f"SELECT 1 FROM {SESSIONS} WHERE state = 'Updating' AND id = ?",
}


# -- lost connections ----------------------------------------------------------------------------


@every(dialects=SERVERS)
def test_a_killed_connection_is_lost_and_unavailable(given: Given, db: Raw) -> None:
    held = given.acquire()
    held.begin()
    kill(db, given, backend(held))
    with pytest.raises(StoreError) as caught:
        held.execute(statement("SELECT 1"))
    assert caught.value.fault is Fault.UNAVAILABLE
    assert held.lost
    held.discard()
    held = given.acquire()
    held.begin(statement("SELECT 1"))
    held.rollback()
    held.release()


@every(dialects=SERVERS)
def test_a_handler_that_meets_a_killed_connection_is_not_blamed(given: Given, db: Raw) -> None:
    held = given.acquire()
    held.begin()
    kill(db, given, backend(held))
    with pytest.raises(Exception, match=r".") as caught:
        held.do("SELECT 1")
    found = held.connection.translate(caught.value)
    assert found is not None
    assert found.fault is Fault.UNAVAILABLE
    assert held.lost
    held.discard()


def kill_after_execute(held: Held, kill: Callable[[], None]) -> None:
    """Lose the connection between the last statement and COMMIT."""
    # async SQLAlchemy runs the statements of commit() inside its bridge
    target = getattr(held.connection, "_inner", held.connection)
    target = getattr(target, "_wire", target)
    original = target.execute

    async def awaited(result: Any) -> Any:
        answer = await result
        kill()
        return answer

    def execute(query: Statement) -> Any:
        result = original(query)
        if inspect.isawaitable(result):
            return awaited(result)
        kill()
        return result

    target.execute = execute


@every(dialects=SERVERS)
def test_commit_on_a_killed_connection_leaves_it_open_whether_it_took_effect(
    given: Given, db: Raw
) -> None:
    held = given.acquire()
    held.begin()
    process = backend(held)
    if given.kind.one_round_trip:
        kill(db, given, process)
    else:
        kill_after_execute(held, lambda: kill(db, given, process))
    with pytest.raises(StoreError) as caught:
        held.commit(statement("SELECT 1"))
    assert not caught.value.definite
    held.discard()


# -- the transaction that failed -----------------------------------------------------------------


@every(dialects=("postgresql",))
@pytest.mark.parametrize("with_statement", [True, False], ids=["close", "alone"])
def test_commit_of_a_failed_transaction_is_refused(
    given: Given, db: Raw, number: int, with_statement: bool
) -> None:
    held = given.acquire()
    held.begin(statement("INSERT INTO account (id, balance) VALUES (:id, 1)", id=number))
    with pytest.raises(Exception, match=r"."):
        held.do("SELECT 1 / 0")
    with pytest.raises((StoreError, Raised)) as caught:
        held.commit(*([statement("SELECT 1")] if with_statement else []))
    error: BaseException = caught.value
    if isinstance(error, Raised):
        # a session tells by itself; the protocol takes it as the handler's failure
        assert not error.lost
    else:
        assert isinstance(error, StoreError)
        assert error.fault is Fault.ABORTED
        assert error.definite
    held.rollback()
    held.release()
    assert balance(db, number) is None


# -- the guard -----------------------------------------------------------------------------------


@every()
def test_claim_and_close_process_a_message(given: Given, db: Raw, number: int) -> None:
    held = given.acquire()
    token = held.claim(consumer(number), message_id(number))
    held.do(f"INSERT INTO account (id, balance) VALUES ({number}, 1)")
    held.close(consumer(number), message_id(number), token)
    held.release()
    assert status(db, number) == "processed"
    assert balance(db, number) == 1


@every()
@pytest.mark.parametrize("breach", ["COMMIT", "native"])
def test_a_handler_that_commits_never_leaves_a_processed_row(
    given: Given, db: Raw, number: int, breach: str
) -> None:
    if breach == "native" and given.kind.family == "asyncpg":
        pytest.skip("an asyncpg connection has no commit()")
    held = given.acquire()
    token = held.claim(consumer(number), message_id(number))
    held.do(f"INSERT INTO account (id, balance) VALUES ({number}, 1)")
    refused: BaseException | None = None
    harmless = breach == "native" and "session" in given.kind.name
    try:
        if breach == "COMMIT":
            held.do("COMMIT")
        else:
            given.wait(held.native.commit())
        held.do(f"INSERT INTO account (id, balance) VALUES ({number + 1}, 1)")
    except Exception as error:  # noqa: BLE001  # whichever driver's: what it means is asserted below
        refused = error
    if harmless:
        assert refused is None
        held.close(consumer(number), message_id(number), token)
        held.release()
        assert status(db, number) == "processed"
        return
    if refused is None:
        with pytest.raises((StoreError, Raised)) as caught:
            held.close(consumer(number), message_id(number), token)
        if isinstance(caught.value, StoreError):
            assert caught.value.definite
            assert caught.value.fault in (Fault.GUARD, Fault.ABORTED)
    held.discard()
    if given.database.dialect.refuses_commit:
        assert status(db, number) is None
        assert balance(db, number) is None
    else:
        # the proof of a broken handler, which the next delivery turns into a dead letter; Django
        # and SQLAlchemy may refuse before the server sees a commit
        assert status(db, number) in ("processing", None)
        assert balance(db, number) == (1 if status(db, number) else None)


@every()
def test_a_handler_that_rolls_back_is_found_out_at_close(
    given: Given, db: Raw, number: int
) -> None:
    held = given.acquire()
    token = held.claim(consumer(number), message_id(number))
    left = True
    try:
        held.do("ROLLBACK")
        held.do(f"INSERT INTO account (id, balance) VALUES ({number}, 1)")
    except Exception:  # noqa: BLE001  # some refuse at once
        left = False
    if left:
        with pytest.raises((StoreError, Raised)) as caught:
            held.close(consumer(number), message_id(number), token)
        if isinstance(caught.value, StoreError):
            assert caught.value.fault in (Fault.GUARD, Fault.ABORTED)
            assert caught.value.definite
    held.discard()
    assert status(db, number) is None


@every()
def test_a_connection_given_back_carries_no_guard(given: Given, db: Raw, number: int) -> None:
    for each in (number, number + 1):
        held = given.acquire()
        token = held.claim(consumer(each), message_id(each))
        held.close(consumer(each), message_id(each), token)
        held.release()
    held = given.acquire()
    held.begin()
    held.do(f"INSERT INTO account (id, balance) VALUES ({number}, 1)")
    held.commit()
    held.release()
    assert balance(db, number) == 1


# -- nothing stays open --------------------------------------------------------------------------


@every(dialects=SERVERS)
def test_discard_ends_the_transaction_at_once(given: Given, db: Raw, number: int) -> None:
    held = given.acquire()
    held.begin(statement("INSERT INTO account (id, balance) VALUES (:id, 1)", id=number))
    held.do(f"INSERT INTO account (id, balance) VALUES ({number + 1}, 1)")
    process = backend(held)
    held.discard()
    eventually(lambda: not db.rows(ALIVE[given.kind.dialect], (process,)))
    assert balance(db, number) is None
    for _ in range(5):
        # a pool of three would be empty by now if a discarded connection kept its place
        held = given.acquire()
        held.begin()
        held.discard()
    held = given.acquire()
    held.begin(statement("SELECT 1"))
    held.rollback()
    held.release()


@pytest.mark.parametrize("verb", ["rollback", "commit"])
@pytest.mark.parametrize("given", [kind for kind in KINDS if kind.is_async], ids=str, indirect=True)
def test_a_caller_cancelled_at_the_end_of_its_transaction_keeps_no_connection(
    given: Given, db: Raw, number: int, verb: str
) -> None:
    write = statement("INSERT INTO account (id, balance) VALUES (:id, 1)", id=number)

    async def cancelled(session: Session) -> None:
        await session.begin((write,))
        this = asyncio.current_task()
        assert this is not None
        asyncio.get_running_loop().call_soon(this.cancel)
        await (session.rollback() if verb == "rollback" else session.commit())

    async def fine(session: Session) -> None:
        await session.begin((statement("SELECT 1"),))
        await session.commit()

    async def run() -> None:
        # a pool of three would be empty by then
        for _ in range(4):
            task = asyncio.ensure_future(drive_async(given.database.asynchronous, cancelled))
            await asyncio.wait([task], timeout=DEADLINE_S)
            assert task.done()
            db.execute("DELETE FROM account WHERE id = ?", (number,))
        await asyncio.wait_for(drive_async(given.database.asynchronous, fine), DEADLINE_S)

    given.wait(run())


def _sqlite_of(native: Any) -> sqlite3.Connection | None:
    """The driver's own connection, below what a handler gets; None where only its loop can ask for it."""
    while not isinstance(native, sqlite3.Connection):
        if hasattr(native, "sync_session"):
            return None
        names = ("_conn", "driver_connection", "sync_connection", "connection")
        below = next(getattr(native, name) for name in names if getattr(native, name, None))
        native = below() if inspect.ismethod(below) else below
    return native


@every(dialects=("sqlite",))
def test_discard_frees_the_file(given: Given, db: Raw, number: int) -> None:
    """Also while a traceback keeps a statement that is not read to its end."""
    held = given.acquire()
    held.begin(statement("INSERT INTO account (id, balance) VALUES (:id, 1)", id=number))
    driver = _sqlite_of(held.native)
    kept = None if driver is None else driver.execute("SELECT 1 UNION SELECT 2")
    if kept is not None:
        kept.fetchone()
    held.discard()
    db.execute("INSERT INTO account (id, balance) VALUES (?, 7)", (number,))
    assert balance(db, number) == 7


def test_kinds_have_names_of_their_own() -> None:
    found = [kind.name for kind in KINDS]
    assert len(found) == len(set(found))
    assert all(isinstance(kind, Kind) for kind in KINDS)
