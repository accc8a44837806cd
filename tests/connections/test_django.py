"""What is Django's own: TestCase around everything, on_commit hooks, marks for rollback, one connection a thread."""

from __future__ import annotations

import threading
import unittest
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django import test
from django.db import connections, transaction

from tests.support.databases import Raw, names
from tests.support.django_project import configured
from tests.support.waiting import DEADLINE_S
from txbox import App, Inbox, Message, Outcome
from txbox.admin import Admin
from txbox.connections.django import open_alias
from txbox.errors import ConfigurationError
from txbox.session import Session, drive
from txbox.store.dialect import as_time

pytestmark = pytest.mark.every_database

PRODUCTS = names()
every_product = pytest.mark.parametrize("product", PRODUCTS)


@pytest.fixture
def alias(product: str, shared_url: Callable[[str], str]) -> Iterator[str]:
    with configured(shared_url(product)) as settings:
        yield settings


def message(message_id: str = "1") -> Message[Any]:
    return Message(id=message_id, topic="t", payload=b"{}")


def insert(tx: Any, number: int) -> None:
    with tx.cursor() as cursor:
        cursor.execute("INSERT INTO account (id, balance) VALUES (%s, 1)", [number])


def ids(url: str, number: int) -> list[int]:
    with Raw(url) as raw:
        rows = raw.rows(
            "SELECT id FROM account WHERE id BETWEEN ? AND ? ORDER BY id", (number, number + 99)
        )
    return [value - number for (value,) in rows]


def statuses(url: str, consumer: str) -> list[str]:
    with Raw(url) as raw:
        rows = raw.rows("SELECT status FROM txbox_inbox WHERE consumer = ?", (consumer,))
    return [str(status) for (status,) in rows]


# -- TestCase ------------------------------------------------------------------------------------


def run_case(case: type[unittest.TestCase]) -> unittest.TestResult:
    result = unittest.TestResult()
    unittest.defaultTestLoader.loadTestsFromTestCase(case).run(result)
    return result


@every_product
def test_handlers_run_inside_a_testcase_and_leave_nothing(
    product: str, alias: str, shared_url: Callable[[str], str], number: int
) -> None:
    """The test's transaction is around txbox's; Django checks all deferred constraints at its end."""
    app = App(django=alias)
    seen: list[Outcome] = []

    @app.handler("t", consumer=f"d{number}")
    def handle(message: Message[Any], tx: Any) -> None:
        insert(tx, number + int(message.id or 0))
        if message.id == "2":
            raise ValueError("rolled back to the savepoint of this message")

    class Case(test.TestCase):
        databases = {alias}  # noqa: RUF012  # Django's type

        def test_messages(self) -> None:
            seen.append(app.process(message("1")))
            seen.append(app.process(message("2")))
            seen.append(app.process(message("3")))
            # last: its claim wins nothing, and must not leave the guard armed for the end of the test
            seen.append(app.process(message("1")))
            with connections[alias].cursor() as cursor:
                cursor.execute(
                    "SELECT count(*) FROM account WHERE id > %s AND id < %s", [number, number + 9]
                )
                assert cursor.fetchone()[0] == 2

        def test_again(self) -> None:
            """The tests of a case do not see one another."""
            seen.append(app.process(message("1")))

    result = run_case(Case)
    assert not result.errors, result.errors
    assert not result.failures, result.failures
    assert result.testsRun == 2
    assert sorted(seen) == sorted(
        [Outcome.PROCESSED, Outcome.FAILED, Outcome.DUPLICATE, Outcome.PROCESSED, Outcome.PROCESSED]
    )
    assert ids(shared_url(product), number) == []
    assert statuses(shared_url(product), f"d{number}") == []


@every_product
def test_accept_inside_a_testcase(
    product: str, alias: str, shared_url: Callable[[str], str], number: int
) -> None:
    inbox = Inbox(consumer=f"d{number}")

    class Case(test.TestCase):
        databases = {alias}  # noqa: RUF012  # Django's type

        def test_accept(self) -> None:
            with transaction.atomic(using=alias):
                assert inbox.accept(connections[alias], "1")
            assert not inbox.accept(connections[alias], "1")

    result = run_case(Case)
    assert not result.errors, result.errors
    assert result.wasSuccessful()
    assert statuses(shared_url(product), f"d{number}") == []


# -- the outermost transaction -------------------------------------------------------------------


@every_product
def test_process_inside_the_callers_atomic_is_refused(
    product: str, alias: str, number: int
) -> None:
    app = App(django=alias)

    @app.handler("t", consumer=f"d{number}")
    def handle(message: Message[Any], tx: Any) -> None:
        raise AssertionError("not reached")

    with transaction.atomic(using=alias):
        with pytest.raises(ConfigurationError, match="atomic"):
            app.process(message())
        (finding,) = Admin(app).doctor().findings
        assert finding.problem.endswith("inside an atomic block.")
        assert finding.remedy.startswith("Call it outside, or use Inbox.accept(")
    assert not connections[alias].in_atomic_block


@every_product
def test_nested_atomic_blocks_are_savepoints(
    product: str, alias: str, shared_url: Callable[[str], str], number: int
) -> None:
    app = App(django=alias)

    @app.handler("t", consumer=f"d{number}")
    def handle(message: Message[Any], tx: Any) -> None:
        insert(tx, number)
        with suppress(LookupError), transaction.atomic(using=alias):
            insert(tx, number + 1)
            raise LookupError
        insert(tx, number + 2)

    assert app.process(message()) is Outcome.PROCESSED
    assert ids(shared_url(product), number) == [0, 2]


@every_product
def test_a_mark_for_rollback_is_a_failure_of_the_handler(
    product: str, alias: str, shared_url: Callable[[str], str], number: int
) -> None:
    """Django would leave atomic() without an exception and without a trace of the work."""
    app = App(django=alias)

    @app.handler("t", consumer=f"d{number}")
    def handle(message: Message[Any], tx: Any) -> None:
        insert(tx, number)
        transaction.set_rollback(True, using=alias)

    assert app.process(message()) is Outcome.FAILED
    assert ids(shared_url(product), number) == []
    assert statuses(shared_url(product), f"d{number}") == ["failed"]


@every_product
def test_on_commit_hooks_run_once_after_the_commit_and_cannot_undo_it(
    product: str,
    alias: str,
    shared_url: Callable[[str], str],
    number: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    app = App(django=alias)
    seen: list[Any] = []

    def fail() -> None:
        seen.append(ids(shared_url(product), number))
        raise ValueError("a hook")

    @app.handler("t", consumer=f"d{number}")
    def handle(message: Message[Any], tx: Any) -> None:
        insert(tx, number)
        transaction.on_commit(fail, using=alias)
        transaction.on_commit(lambda: seen.append("next"), using=alias)

    assert app.process(message()) is Outcome.PROCESSED
    assert app.process(message()) is Outcome.DUPLICATE
    assert seen == [[0], "next"]
    assert any("on_commit" in record.getMessage() for record in caplog.records)


@every_product
def test_on_commit_hooks_may_send_and_process(
    product: str, shared_url: Callable[[str], str], number: int
) -> None:
    # closed whenever it is given back, by default
    with configured(shared_url(product), CONN_MAX_AGE=0) as alias:
        app = App(django=alias)
        done: list[Any] = []

        def follow() -> None:
            app.send(message("3"))
            done.append(app.process(message("2")))

        @app.handler("t", consumer=f"d{number}")
        def handle(message: Message[Any], tx: Any) -> None:
            insert(tx, number + int(message.id or 0))
            if message.id == "1":
                transaction.on_commit(follow, using=alias)

        assert app.process(message("1")) is Outcome.PROCESSED
        assert app.process(message("4")) is Outcome.PROCESSED
        assert not connections[alias].execute_wrappers
    assert done == [Outcome.PROCESSED]
    assert ids(shared_url(product), number) == [1, 2, 4]
    assert statuses(shared_url(product), f"d{number}").count("processed") == 3


@every_product
def test_a_rehearsal_leaves_nothing(
    product: str, alias: str, shared_url: Callable[[str], str], number: int
) -> None:
    app = App(django=alias)

    @app.handler("t", consumer=f"d{number}", mode="stored")
    def handle(message: Message[Any], tx: Any) -> None:
        insert(tx, number)
        if message.payload == b"leave":
            with tx.cursor() as cursor:
                cursor.execute("ROLLBACK")

    app.send(message())
    with Admin(app) as admin:
        done = admin.rehearse(f"d{number}", "1")
        assert (done.outcome, done.statements) == (
            "processed",
            ("INSERT INTO account (id, balance) VALUES (%s, 1)",),
        )
        assert admin.rehearse(f"d{number}", "1", payload=b"leave").outcome == "broken"
    assert ids(shared_url(product), number) == []
    assert statuses(shared_url(product), f"d{number}") == ["pending"]
    assert not connections[alias].execute_wrappers


@every_product
def test_commit_by_django_or_by_the_driver_never_leaves_a_processed_row(
    product: str, alias: str, shared_url: Callable[[str], str], number: int
) -> None:
    app = App(django=alias)

    @app.handler("t", consumer=f"d{number}")
    def handle(message: Message[Any], tx: Any) -> None:
        insert(tx, number + int(message.id or 0))
        if message.id == "1":
            tx.commit()
        else:
            tx.connection.commit()

    assert app.process(message("1")) is Outcome.FAILED
    assert app.process(message("2")) in (Outcome.FAILED, Outcome.DEAD)
    assert "processed" not in statuses(shared_url(product), f"d{number}")


@every_product
def test_a_handler_that_closes_its_connection_persists_nothing(
    product: str, alias: str, shared_url: Callable[[str], str], number: int
) -> None:
    app = App(django=alias)

    @app.handler("t", consumer=f"d{number}")
    def handle(message: Message[Any], tx: Any) -> None:
        insert(tx, number + int(message.id or 0))
        if message.id == "1":
            tx.close()

    assert app.process(message("1")) is Outcome.DEAD
    assert app.process(message("2")) is Outcome.PROCESSED
    assert ids(shared_url(product), number) == [2]


# -- connections ---------------------------------------------------------------------------------


@pytest.mark.parametrize("product", names("postgresql"))
def test_a_lost_connection_of_another_alias_costs_one_attempt(
    product: str, alias: str, shared_url: Callable[[str], str], number: int
) -> None:
    """Of requests Django closes it between two of them; a worker's thread has none."""
    app = App(django=alias)
    other = f"{alias}_other"
    connections.databases[other] = connections.databases[alias]

    @app.handler("t", consumer=f"d{number}")
    def handle(_message: Message[Any], tx: Any) -> None:
        with connections[other].cursor() as cursor:
            cursor.execute("SELECT 1")

    try:
        assert app.process(message("1")) is Outcome.PROCESSED
        connections[other].connection.pgconn.finish()
        assert app.process(message("2")) is Outcome.FAILED
        assert app.process(message("3")) is Outcome.PROCESSED
    finally:
        connections[other].close()
        del connections[other], connections.databases[other]


@every_product
def test_each_thread_has_a_connection_of_its_own(
    product: str, alias: str, shared_url: Callable[[str], str], number: int
) -> None:
    app = App(django=alias)
    used: list[Any] = []

    @app.handler("t", consumer=f"d{number}")
    def handle(message: Message[Any], tx: Any) -> None:
        used.append(tx.connection)
        insert(tx, number + int(message.id or 0))

    def lane(message_id: str) -> None:
        app.process(message(message_id))
        connections[alias].close()

    lanes = [threading.Thread(target=lane, args=(str(each),)) for each in range(2)]
    for thread in lanes:
        thread.start()
        thread.join(DEADLINE_S)
    assert ids(shared_url(product), number) == [0, 1]
    assert len({id(each) for each in used}) == 2


@pytest.mark.parametrize("product", ["postgresql"])
def test_connections_end_as_django_is_told(
    product: str, shared_url: Callable[[str], str], number: int
) -> None:
    with configured(shared_url(product), CONN_MAX_AGE=0) as alias:
        app = App(django=alias)

        @app.handler("t", consumer=f"d{number}")
        def handle(message: Message[Any], tx: Any) -> None:
            insert(tx, number)

        assert app.process(message()) is Outcome.PROCESSED
        assert connections[alias].connection is None


@pytest.mark.parametrize("level", [None, "SERIALIZABLE"])
def test_postgresql_runs_read_committed_whatever_the_settings(
    level: str | None, shared_url: Callable[[str], str], number: int
) -> None:
    from psycopg import IsolationLevel

    options = {} if level is None else {"isolation_level": IsolationLevel[level]}
    with configured(shared_url("postgresql"), OPTIONS=options) as alias:
        app = App(django=alias)
        seen: list[str] = []

        @app.handler("t", consumer=f"d{number}")
        def handle(message: Message[Any], tx: Any) -> None:
            with tx.cursor() as cursor:
                cursor.execute("SHOW transaction_isolation")
                seen.append(cursor.fetchone()[0])

        assert app.process(message()) is Outcome.PROCESSED
        assert seen == ["read committed"]


@pytest.mark.parametrize("mode", [None, "IMMEDIATE", "EXCLUSIVE"])
def test_sqlite_transactions_write_from_the_start_in_every_mode(
    mode: str | None, shared_url: Callable[[str], str], number: int
) -> None:
    options = {} if mode is None else {"transaction_mode": mode}
    with configured(shared_url("sqlite"), OPTIONS=options) as alias:
        app = App(django=alias)
        locked: list[bool] = []

        @app.handler("t", consumer=f"d{number}")
        def handle(message: Message[Any], tx: Any) -> None:
            with Raw(shared_url("sqlite")) as raw:
                raw.rows("PRAGMA busy_timeout = 0")
                try:
                    raw.execute("BEGIN IMMEDIATE")
                except Exception:  # noqa: BLE001  # sqlite3 names no class for it
                    locked.append(True)
            insert(tx, number)

        assert app.process(message()) is Outcome.PROCESSED
        assert locked == [True]
        assert ids(shared_url("sqlite"), number) == [0]


def test_an_app_is_made_before_django_is_set_up() -> None:
    database = open_alias("not yet there")
    with pytest.raises(ConfigurationError, match=r"settings\.DATABASES"):
        _ = database.dialect


def test_async_handlers_are_refused(shared_url: Callable[[str], str]) -> None:
    with configured(shared_url("sqlite")) as alias:
        app = App(django=alias)

        with pytest.raises(ConfigurationError):

            @app.handler("t", consumer="d")
            async def handle(message: Message[Any], tx: Any) -> None:
                raise AssertionError("not reached")


# -- time zones ----------------------------------------------------------------------------------


@every_product
def test_times_are_the_same_points_in_time_without_use_tz(
    product: str, shared_url: Callable[[str], str]
) -> None:
    """On PostgreSQL Django then returns local times, without saying where."""
    with (
        configured(shared_url(product)) as alias,
        test.override_settings(USE_TZ=False, TIME_ZONE="America/Chicago"),
    ):
        database = open_alias(alias)
        assert database.sync is not None
        clock = database.dialect.statement("database_clock")
        now = datetime.now(UTC)
        found = as_time(drive(database.sync, Session.alone, clock).rows[0][0])
        assert found is not None
        assert abs(found - now) < timedelta(minutes=1)


# -- autocommit --------------------------------------------------------------------------------------


@every_product
def test_without_autocommit_it_is_refused_before_anything_runs(
    product: str, shared_url: Callable[[str], str], number: int
) -> None:
    """Django's `atomic` then commits nothing by itself, and says so after txbox's COMMIT has taken effect."""
    url = shared_url(product)
    with configured(url, AUTOCOMMIT=False) as alias:
        app = App(django=alias)
        app.handler("t", consumer=f"d{number}")(lambda _message, tx: insert(tx, number))
        with pytest.raises(ConfigurationError, match="AUTOCOMMIT"):
            app.process(message())
        # a transaction of the caller's own is fine
        assert Inbox(consumer=f"e{number}").accept(connections[alias], "1")
        connections[alias].commit()
    with configured(url) as alias:
        app = App(django=alias)
        app.handler("t", consumer=f"d{number}")(lambda _message, tx: insert(tx, number + 1))
        transaction.set_autocommit(False, using=alias)
        insert(connections[alias], number + 2)
        with pytest.raises(ConfigurationError, match="set_autocommit"):
            app.process(message())
        # what the caller has written is still there to be committed
        transaction.commit(using=alias)
        transaction.set_autocommit(True, using=alias)
        assert app.process(message()) is Outcome.PROCESSED
    assert ids(url, number) == [1, 2]
    assert statuses(url, f"e{number}") == ["processed"]
