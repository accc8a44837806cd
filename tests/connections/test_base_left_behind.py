"""A thread or task that a handler leaves behind on its connection: nothing hangs, and no message is without its row."""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress
from typing import Any

import asyncmy
import asyncpg
import psycopg
import pymysql
import pytest

from tests.connections.test_base_conformance import balance, consumer, every
from tests.connections.test_base_processing import Service, app_of, row
from tests.support.connections import Given, do
from tests.support.databases import Raw
from tests.support.shop import CONSUMER, TOPIC, Shop, add_effect, opened, paid
from tests.support.waiting import DEADLINE_S, eventually
from txbox import App, Message, Outcome
from txbox.connections import asyncpg as asyncpg_adapter
from txbox.connections import base, libpq
from txbox.connections import django as django_adapter
from txbox.connections import sqlalchemy as sqlalchemy_driver
from txbox.session import Statement

pytestmark = pytest.mark.every_database

_WAITING = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"
# waits until the test lets it go, or the server ends it
_WAITS = "SELECT pg_advisory_xact_lock(4711)"


def _done_after_close(given: Given, monkeypatch: pytest.MonkeyPatch, sql: str) -> list[str]:
    """Have a statement of somebody else's run on the driver's connection between close and COMMIT."""
    ran: list[str] = []

    def on_cursor(connection: Any) -> None:
        cursor = connection.cursor()
        try:
            cursor.execute(sql)
        except Exception as error:  # noqa: BLE001  # as a thread that nobody looks after
            ran.append(repr(error))
        else:
            ran.append(sql)
        finally:
            cursor.close()

    def once(name: str) -> bool:
        return name == "close" and not ran

    if given.kind.family == "asyncpg":
        executed = asyncpg_adapter._executed

        async def and_fails(native: Any, statement: Statement) -> Any:
            result = await executed(native, statement)
            if once(statement.name):
                ran.append(sql)
                with pytest.raises(asyncpg.PostgresError):
                    await native.execute(sql)
            return result

        monkeypatch.setattr(asyncpg_adapter, "_executed", and_fails)
    elif given.kind.family == "django":
        django_executed = django_adapter._executed

        def then_fails(wrapper: Any, statement: Statement) -> Any:
            result = django_executed(wrapper, statement)
            if once(statement.name):
                on_cursor(wrapper.connection)
            return result

        monkeypatch.setattr(django_adapter, "_executed", then_fails)
    elif given.kind.family == "sqlalchemy":
        for kind in (sqlalchemy_driver.Watched, sqlalchemy_driver.Cursors):

            def fails(value: Any, statement: Statement, execute: Any = kind.execute) -> Any:
                result = execute(value, statement)
                if once(statement.name):
                    on_cursor(value._raw.connection)
                return result

            monkeypatch.setattr(kind, "execute", fails)
    return ran


@every()
def test_whatever_is_done_between_close_and_commit_no_message_is_acknowledged_without_its_row(
    given: Given, db: Raw, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = Service(given, number)
    sqlite, between = given.kind.product == "sqlite", not given.kind.one_round_trip
    # COMMIT of MySQL and MariaDB has nothing to tell
    between = between and given.kind.family in ("asyncpg", "django", "sqlalchemy")
    between = between and given.kind.product not in ("mariadb", "mysql")
    ran: list[str] = []
    if between:
        ran = _done_after_close(given, monkeypatch, "ROLLBACK" if sqlite else "SELECT 1 / 0")
    outcome = service.process(number)
    assert bool(ran) == between
    service.close()
    if not between:
        expected, status = Outcome.PROCESSED, "processed"
    elif sqlite:
        expected, status = Outcome.FAILED, "failed"  # there was nothing to commit any more
    else:
        # the transaction that claimed has ended otherwise than by its COMMIT
        expected, status = Outcome.DEAD, "dead"
    assert outcome is expected
    assert row(db, service.consumer, "status") == (status,)
    assert balance(db, number) == (None if between else 1)


@pytest.fixture
def turns(monkeypatch: pytest.MonkeyPatch) -> list[libpq.ExclusiveUse]:
    """Those of every connection that is made."""
    made: list[libpq.ExclusiveUse] = []
    initialised = libpq.ExclusiveUse.__init__

    def noted(use: libpq.ExclusiveUse, connection: Any) -> None:
        initialised(use, connection)
        made.append(use)

    monkeypatch.setattr(libpq.ExclusiveUse, "__init__", noted)
    return made


def _delivered(shop: Shop, own_id: str, is_async: bool) -> Outcome:
    """By a thread, so that the test ends also where that hangs."""
    outcomes: list[Outcome] = []

    def deliver() -> None:
        if is_async:
            outcomes.append(asyncio.run(_deliver_async(shop, own_id)))
        else:
            outcomes.append(shop.deliver(paid(own_id)))

    thread = threading.Thread(target=deliver, daemon=True)
    thread.start()
    thread.join(DEADLINE_S)
    assert outcomes, "it hangs"
    return outcomes[0]


async def _deliver_async(shop: Shop, own_id: str) -> Outcome:
    outcome = await shop.app.process_async(paid(own_id))
    await shop.app.close_async()
    return outcome


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("ends", [False, True], ids=["goes-on", "ends"])
def test_a_statement_that_is_left_behind_neither_hangs_nor_meets_another_message(
    postgresql_url: str,
    monkeypatch: pytest.MonkeyPatch,
    turns: list[libpq.ExclusiveUse],
    is_async: bool,
    ends: bool,
) -> None:
    """It has its time to end; its connection is nobody's afterwards."""
    monkeypatch.setattr(base, "LEFT_BEHIND_S", 600 if ends else 0.2)
    tasks: list[Any] = []
    backends: list[int] = []
    with opened(postgresql_url) as shop, Raw(postgresql_url) as holder:
        holder.execute("SELECT pg_advisory_lock(4711)")

        def is_waiting() -> bool:
            return bool(shop.raw.value(_WAITING))

        def let_go() -> None:
            eventually(lambda: any(turn.contended for turn in turns))
            holder.execute("SELECT pg_advisory_unlock(4711)")

        def left_behind(tx: Any) -> None:
            with suppress(psycopg.Error):
                tx.execute(_WAITS)

        async def left_behind_async(tx: Any) -> None:
            with suppress(psycopg.Error):
                await tx.execute(_WAITS)

        def handle(message: Message[Any], tx: Any) -> None:
            backends.append(tx.info.backend_pid)
            tx.execute("INSERT INTO effect (message_id) VALUES (%s)", (message.id,))
            if message.id == "a":
                tasks.append(threading.Thread(target=left_behind, args=(tx,), daemon=True))
                tasks[0].start()
                eventually(is_waiting)

        async def handle_async(message: Message[Any], tx: Any) -> None:
            backends.append(tx.info.backend_pid)
            await tx.execute("INSERT INTO effect (message_id) VALUES (%s)", (message.id,))
            if message.id == "a":
                tasks.append(asyncio.create_task(left_behind_async(tx)))
                while not await asyncio.to_thread(is_waiting):
                    pass

        shop.app.handler(TOPIC, consumer=CONSUMER)(handle_async if is_async else handle)
        thread = threading.Thread(target=let_go, daemon=True)
        if ends:
            thread.start()
        outcome = _delivered(shop, "a", is_async)
        assert outcome is (Outcome.PROCESSED if ends else Outcome.FAILED)
        assert _delivered(shop, "b", is_async) is Outcome.PROCESSED
        assert backends[0] != backends[1]
        assert (shop.effects("a"), shop.effects("b")) == (1 if ends else 0, 1)
        assert shop.row("a").status == ("processed" if ends else "failed")
        if not ends:
            assert "left behind" in (shop.row("a").error or "")
            # the server, too, has ended it
            eventually(lambda: not is_waiting())


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("ends", [False, True], ids=["goes-on", "ends"])
def test_on_mysql_no_answer_is_taken_for_that_of_a_statement_left_behind(
    mysql_url: str, monkeypatch: pytest.MonkeyPatch, is_async: bool, ends: bool
) -> None:
    """Both read one socket: without turns, asyncmy took a SELECT's answer for that of COMMIT."""
    monkeypatch.setattr(base, "LEFT_BEHIND_S", 600 if ends else 0.2)
    lent: list[Any] = []
    left: list[Any] = []
    lock = "GET_LOCK(CONCAT(DATABASE(), '.left'), 600)"
    with opened(mysql_url) as shop, Raw(mysql_url) as holder:
        holder.value(f"SELECT {lock}")

        def is_waiting() -> bool:
            return bool(
                shop.raw.value(
                    "SELECT count(*) FROM information_schema.processlist"
                    " WHERE db = DATABASE() AND state = 'User lock'"
                )
            )

        def let_go() -> None:
            eventually(lambda: bool(lent) and lent[0].contended)
            holder.value("SELECT RELEASE_LOCK(CONCAT(DATABASE(), '.left'))")

        def waits(tx: Any) -> None:
            with suppress(pymysql.MySQLError):
                tx.cursor().execute(f"SELECT {lock}")

        async def waits_async(tx: Any) -> None:
            with suppress(asyncmy.errors.MySQLError):
                await tx.cursor().execute(f"SELECT {lock}")

        def handle(message: Message[Any], tx: Any) -> None:
            lent.append(tx)
            add_effect(tx, message.id, CONSUMER)
            if message.id == "a":
                left.append(threading.Thread(target=waits, args=(tx,), daemon=True))
                left[0].start()
                eventually(is_waiting)

        async def handle_async(message: Message[Any], tx: Any) -> None:
            lent.append(tx)
            async with tx.cursor() as cursor:
                await cursor.execute("INSERT INTO effect (message_id) VALUES (%s)", (message.id,))
            if message.id == "a":
                left.append(asyncio.create_task(waits_async(tx)))
                while not await asyncio.to_thread(is_waiting):
                    pass

        shop.app.handler(TOPIC, consumer=CONSUMER)(handle_async if is_async else handle)
        if ends:
            threading.Thread(target=let_go, daemon=True).start()
        outcome = _delivered(shop, "a", is_async)
        assert outcome is (Outcome.PROCESSED if ends else Outcome.FAILED)
        assert _delivered(shop, "b", is_async) is Outcome.PROCESSED
        assert lent[0] is not lent[1]
        assert (shop.effects("a"), shop.effects("b")) == (1 if ends else 0, 1)
        assert shop.row("a").status == ("processed" if ends else "failed")
        eventually(lambda: not is_waiting())


def test_asyncpg_cancels_what_is_left_behind(postgresql_url: str) -> None:
    """Otherwise the record of the failure waits for its locks, as long as it runs."""
    left: list[Any] = []
    url = postgresql_url.replace("postgresql", "postgresql+asyncpg")
    with Raw(postgresql_url) as holder, App(url) as app:
        holder.execute("SELECT pg_advisory_lock(4711)")

        async def waits(tx: Any) -> None:
            with suppress(asyncpg.PostgresError):
                await tx.execute(_WAITS)

        @app.handler(TOPIC, consumer=CONSUMER)
        async def handle(_message: Message[Any], tx: Any) -> None:
            left.append(asyncio.create_task(waits(tx)))
            while not await asyncio.to_thread(holder.value, _WAITING):
                pass

        async def main() -> Outcome:
            async with app:
                return await app.process_async(paid("a"))

        assert asyncio.run(main()) is Outcome.FAILED
        assert not holder.value(_WAITING)


@every()
def test_what_is_written_behind_a_transaction_is_not_in_the_next_one(
    given: Given, db: Raw, number: int
) -> None:
    """By a task that a handler left behind. Where a statement commits by itself, it has done so by then."""
    family, kept = given.kind.family, list[Any]()
    app = app_of(given)

    def handle(_message: Message[Any], tx: Any) -> None:
        kept.append(tx)

    async def handle_async(_message: Message[Any], tx: Any) -> None:
        kept.append(tx)

    register: Any = app.handler("t", consumer=consumer(number))
    register(handle_async if given.kind.is_async else handle)

    def process(name: str) -> Outcome:
        message: Message[Any] = Message(id=name, topic="t", payload=b"{}")
        outcome: Outcome = (
            given.wait(app.process_async(message)) if given.kind.is_async else app.process(message)
        )
        return outcome

    assert process("first") is Outcome.PROCESSED
    with suppress(Exception):
        given.wait(do(family, kept[0], f"INSERT INTO account (id, balance) VALUES ({number}, 1)"))
    committed = balance(db, number)
    # whichever connection it gets
    for name in ("second", "third", "fourth"):
        assert process(name) is Outcome.PROCESSED
    if given.kind.is_async:
        given.wait(app.close_async())
    else:
        app.close()
    assert balance(db, number) == committed


@pytest.mark.parametrize("scheme", ["postgresql", "postgresql+asyncpg"])
def test_what_is_set_behind_a_transaction_does_not_reach_the_next_one(
    postgresql_url: str, scheme: str
) -> None:
    seen: list[str] = []

    async def main() -> None:
        async with App(postgresql_url.replace("postgresql", scheme, 1)) as app:

            @app.handler(TOPIC, consumer=CONSUMER)
            async def handle(_message: Message[Any], tx: Any) -> None:
                kept.append(tx)
                asked = "SELECT current_setting('statement_timeout')"
                if scheme == "postgresql":
                    seen.append((await (await tx.execute(asked)).fetchone())[0])
                else:
                    seen.append(await tx.fetchval(asked))

            kept: list[Any] = []
            await app.process_async(paid("a"))
            if scheme == "postgresql":
                await kept[0].set_autocommit(True)
            await kept[0].execute("SET statement_timeout = '77s'")
            if scheme == "postgresql":
                await kept[0].set_autocommit(False)
            await app.process_async(paid("b"))

    asyncio.run(main())
    assert seen == ["0", "0"]
