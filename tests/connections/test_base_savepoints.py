"""Messages of one batch whose failures stay apart: savepoints around a handler's calls, on every kind of connection."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy import exc, orm
from sqlalchemy.ext import asyncio as sa_async

from tests.connections.test_base_conformance import backend, kill
from tests.support.connections import KINDS, Given, Held, engine_url
from tests.support.databases import Raw, names
from txbox import App, Message, Outcome
from txbox.errors import Fault, StoreError
from txbox.session import Raised, drive, drive_async

pytestmark = pytest.mark.every_database

SQLALCHEMY = [kind for kind in KINDS if kind.family == "sqlalchemy"]
SESSIONS = [kind for kind in SQLALCHEMY if "session" in kind.name]
OWN_TRANSLATION = [kind for kind in KINDS if kind.family not in ("psycopg", "asyncpg")]
ON_SERVERS = [kind for kind in KINDS if kind.dialect != "sqlite"]
ABORTING = [kind for kind in OWN_TRANSLATION if kind.dialect == "postgresql"]
every_kind = pytest.mark.parametrize("given", KINDS, indirect=True, ids=str)


def nest(held: Held, verb: str) -> None:
    held.given.wait(getattr(held.connection, verb)())


def account(held: Held, number: int) -> None:
    """As a call of a handler does: with the object that the connection gives it for this call."""
    held.again()
    held.do(f"INSERT INTO account (id, balance) VALUES ({number}, 1)")


def accounts(db: Raw, number: int) -> list[int]:
    rows = db.rows(
        "SELECT id FROM account WHERE id BETWEEN ? AND ? ORDER BY id", (number, number + 99)
    )
    return [value - number for (value,) in rows]


@every_kind
def test_what_is_rolled_back_is_the_group_alone(given: Given, db: Raw, number: int) -> None:
    held = given.acquire()
    token = held.claim(f"c{number}", str(number))
    nest(held, "savepoint")
    account(held, number)
    nest(held, "release_savepoint")
    nest(held, "savepoint")
    account(held, number + 1)
    nest(held, "rollback_to_savepoint")
    nest(held, "savepoint")
    account(held, number + 2)
    nest(held, "release_savepoint")
    held.close(f"c{number}", str(number), token)
    held.release()
    assert accounts(db, number) == [0, 2]


@every_kind
def test_a_transaction_goes_on_behind_an_error_of_the_database(
    given: Given, db: Raw, number: int
) -> None:
    held = given.acquire()
    token = held.claim(f"c{number}", str(number))
    nest(held, "savepoint")
    account(held, number)
    nest(held, "release_savepoint")
    nest(held, "savepoint")
    with pytest.raises(Exception, match=r"."):
        account(held, number)
    nest(held, "rollback_to_savepoint")
    held.close(f"c{number}", str(number), token)
    held.release()
    assert accounts(db, number) == [0]


@pytest.mark.parametrize("given", ABORTING, indirect=True, ids=str)
def test_a_swallowed_error_that_fails_the_transaction_is_the_groups(
    given: Given, db: Raw, number: int
) -> None:
    held = given.acquire()
    token = held.claim(f"c{number}", str(number))
    nest(held, "savepoint")
    with pytest.raises(Exception, match=r"."):
        held.do("SELECT 1 / 0")
    with pytest.raises(Raised):
        nest(held, "release_savepoint")
    nest(held, "rollback_to_savepoint")
    nest(held, "savepoint")
    account(held, number + 1)
    nest(held, "release_savepoint")
    held.close(f"c{number}", str(number), token)
    held.release()
    assert accounts(db, number) == [1]


@pytest.mark.parametrize("verb", ["release_savepoint", "rollback_to_savepoint"])
@pytest.mark.parametrize("given", OWN_TRANSLATION, indirect=True, ids=str)
def test_who_ended_the_transaction_has_no_savepoint(
    given: Given, db: Raw, number: int, verb: str
) -> None:
    held = given.acquire()
    held.begin()
    nest(held, "savepoint")
    account(held, number)
    held.do("COMMIT")
    with pytest.raises(StoreError) as caught:
        nest(held, verb)
    assert caught.value.fault is Fault.GUARD
    held.discard()


@pytest.mark.parametrize("verb", ["release_savepoint", "rollback_to_savepoint"])
@pytest.mark.parametrize("given", ON_SERVERS, indirect=True, ids=str)
def test_a_connection_that_dies_at_a_savepoint_is_lost_for_a_reason_that_ends(
    given: Given, db: Raw, number: int, verb: str
) -> None:
    held = given.acquire()
    held.begin()
    process = backend(held)
    nest(held, "savepoint")
    kill(db, given, process)
    with pytest.raises((StoreError, Raised)) as caught:
        nest(held, verb)
    raised = caught.value
    found = raised.database_error if isinstance(raised, Raised) else raised
    assert isinstance(found, StoreError)
    assert found.fault is Fault.UNAVAILABLE
    assert held.lost
    causes: list[BaseException] = [raised]
    while (cause := causes[-1].__cause__) is not None:
        assert cause not in causes
        causes.append(cause)
    held.discard()


@pytest.mark.parametrize("given", SESSIONS, indirect=True, ids=str)
@pytest.mark.parametrize("verb", ["rollback", "close"])
def test_a_session_that_undoes_an_earlier_calls_work_does_not_commit(
    given: Given, db: Raw, number: int, verb: str
) -> None:
    held = given.acquire()
    held.claim(f"c{number}", str(number))
    account(held, number)
    account(held, number + 1)
    given.wait(getattr(held.native, verb)())
    with pytest.raises(Raised):
        held.commit()
    held.rollback()
    held.release()
    assert accounts(db, number) == []


class Base(orm.DeclarativeBase):
    pass


class Account(Base):
    __tablename__ = "account"
    id: orm.Mapped[int] = orm.mapped_column(primary_key=True, autoincrement=False)
    balance: orm.Mapped[int]


def rolls_back(row_id: int, tx: orm.Session, *, culprit: bool) -> None:
    tx.execute(sa.text(f"INSERT INTO account (id, balance) VALUES ({row_id}, 1)"))
    if culprit:
        tx.rollback()


def closes(row_id: int, tx: orm.Session, *, culprit: bool) -> None:
    tx.add(Account(id=row_id, balance=1))
    tx.flush()
    if culprit:
        tx.close()


def commits(row_id: int, tx: orm.Session, *, culprit: bool) -> None:
    tx.add(Account(id=row_id, balance=1))
    if culprit:
        tx.flush()
        tx.rollback()
    tx.commit()


def cannot_be_flushed(row_id: int, tx: orm.Session, *, culprit: bool) -> None:
    # found when all are written, at the end
    tx.add(Account(id=row_id, balance=None if culprit else 1))


def raises(row_id: int, tx: orm.Session, *, culprit: bool) -> None:
    tx.add(Account(id=row_id, balance=1))
    tx.flush()
    if culprit:
        raise ValueError("no")


def swallows(row_id: int, tx: orm.Session, *, culprit: bool) -> None:
    tx.add(Account(id=row_id, balance=None if culprit else 1))
    try:
        tx.flush()
    except exc.IntegrityError:
        return


@pytest.mark.parametrize("product", names())
@pytest.mark.parametrize(
    ("work", "outcome"),
    [
        (rolls_back, Outcome.PROCESSED),
        (closes, Outcome.PROCESSED),
        (commits, Outcome.PROCESSED),
        (cannot_be_flushed, Outcome.FAILED),
        (raises, Outcome.FAILED),
        (swallows, Outcome.FAILED),
    ],
)
def test_what_a_handler_does_to_its_session_costs_its_neighbours_nothing(
    product: str,
    work: Callable[..., None],
    outcome: Outcome,
    shared_url: Callable[[str], str],
    number: int,
) -> None:
    url = shared_url(product)
    drivers = {"postgresql": "psycopg", "mysql": "pymysql", "sqlite": "pysqlite"}
    engine = sa.create_engine(engine_url(url, drivers[url.partition(":")[0]]))
    app = App(orm.sessionmaker(engine))

    @app.handler("t", consumer=f"s{number}")
    def handle(message: Message[Any], tx: orm.Session) -> None:
        work(number + int(message.id or 0), tx, culprit=message.id == "3")

    (handler,) = app.handlers.matching("t", None)
    messages = [Message[Any](id=str(each), topic="t", payload=b"{}") for each in range(1, 6)]
    assert app.database.sync is not None
    settled = drive(app.database.sync, app.intake.take_with_retries, handler, messages)
    engine.dispose()
    fine = Outcome.PROCESSED
    assert [answer.outcome for answer in settled] == [fine, fine, outcome, fine, fine]
    with Raw(url) as db:
        assert accounts(db, number) == [1, 2, 4, 5]


@pytest.mark.parametrize("driver", ["psycopg", "asyncpg"])
def test_neither_does_a_handler_of_an_async_session(
    driver: str, shared_url: Callable[[str], str], number: int
) -> None:
    url = shared_url("postgresql")

    async def run() -> list[Outcome]:
        engine = sa_async.create_async_engine(engine_url(url, driver))
        app = App(sa_async.async_sessionmaker(engine))

        @app.handler("t", consumer=f"s{number}")
        async def handle(message: Message[Any], tx: sa_async.AsyncSession) -> None:
            tx.add(Account(id=number + int(message.id or 0), balance=1))
            await tx.flush()
            if message.id == "3":
                await tx.rollback()
            if message.id == "4":
                await tx.close()

        (handler,) = app.handlers.matching("t", None)
        messages = [Message[Any](id=str(each), topic="t", payload=b"{}") for each in range(1, 7)]
        assert app.database.asynchronous is not None
        settled = await drive_async(
            app.database.asynchronous, app.intake.take_with_retries, handler, messages
        )
        await app.close_async()
        await engine.dispose()
        return [answer.outcome for answer in settled]

    assert asyncio.run(run()) == [Outcome.PROCESSED] * 6
    with Raw(url) as db:
        assert accounts(db, number) == [1, 2, 5, 6]
