"""What is SQLAlchemy's own: sessions in a savepoint, late flushes, and an engine that stays as it was."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy import event, exc, orm
from sqlalchemy.ext import asyncio as sa_async

from tests.support.blocked import acquired
from tests.support.connections import engine_url
from tests.support.databases import Raw, names
from txbox import App, Limits, Message, Outcome, RetryPolicy
from txbox.connections import open_database
from txbox.errors import ConfigurationError, StoreUnavailable

pytestmark = pytest.mark.every_database

PRODUCTS = names()
DRIVERS = {"postgresql": "psycopg", "mysql": "pymysql", "sqlite": "pysqlite"}
ASYNC_DRIVERS = {"postgresql": "asyncpg", "mysql": "asyncmy", "sqlite": "aiosqlite"}
every_product = pytest.mark.parametrize("product", PRODUCTS)


class Base(orm.DeclarativeBase):
    pass


class Account(Base):
    __tablename__ = "account"
    id: orm.Mapped[int] = orm.mapped_column(primary_key=True, autoincrement=False)
    balance: orm.Mapped[int]


def message(message_id: str = "1") -> Message[Any]:
    return Message(id=message_id, topic="t", payload=b"{}")


def balances(url: str, number: int) -> dict[int, int]:
    with Raw(url) as raw:
        rows = raw.rows(
            "SELECT id, balance FROM account WHERE id BETWEEN ? AND ?", (number, number + 99)
        )
    return {value - number: balance for value, balance in rows}


@pytest.fixture
def make_engine(shared_url: Callable[[str], str]) -> Iterator[Callable[..., sa.Engine]]:
    made: list[sa.Engine] = []

    def make(product: str, **options: Any) -> sa.Engine:
        url = shared_url(product)
        made.append(sa.create_engine(engine_url(url, DRIVERS[url.partition(":")[0]]), **options))
        return made[-1]

    yield make
    for engine in made:
        engine.dispose()


@every_product
def test_what_a_session_has_pending_is_written_with_the_message(
    product: str,
    make_engine: Callable[..., sa.Engine],
    shared_url: Callable[[str], str],
    number: int,
) -> None:
    app = App(orm.sessionmaker(make_engine(product)))

    @app.handler("t", consumer=f"s{number}")
    def handle(message: Message[Any], tx: orm.Session) -> None:
        tx.add(Account(id=number, balance=1))

    assert app.process(message()) is Outcome.PROCESSED
    assert balances(shared_url(product), number) == {0: 1}


@every_product
def test_a_flush_that_fails_at_the_end_is_the_handlers_failure(
    product: str,
    make_engine: Callable[..., sa.Engine],
    shared_url: Callable[[str], str],
    number: int,
) -> None:
    app = App(orm.sessionmaker(make_engine(product)))

    @app.handler("t", consumer=f"s{number}", retry=RetryPolicy(max_attempts=1))
    def handle(message: Message[Any], tx: orm.Session) -> None:
        tx.execute(sa.insert(Account).values(id=number, balance=1))
        tx.add(Account(id=number, balance=2))

    assert app.process(message()) is Outcome.DEAD
    assert balances(shared_url(product), number) == {}
    with Raw(shared_url(product)) as raw:
        ((error_type,),) = raw.rows(
            "SELECT error_type FROM txbox_inbox WHERE consumer = ?", (f"s{number}",)
        )
    assert error_type == "IntegrityError"


@every_product
def test_commit_and_rollback_of_a_session_end_a_savepoint_only(
    product: str,
    make_engine: Callable[..., sa.Engine],
    shared_url: Callable[[str], str],
    number: int,
) -> None:
    app = App(orm.sessionmaker(make_engine(product)))
    fails = [True]

    @app.handler("t", consumer=f"s{number}")
    def handle(message: Message[Any], tx: orm.Session) -> None:
        tx.add(Account(id=number, balance=1))
        tx.commit()
        tx.add(Account(id=number + 1, balance=1))
        tx.flush()
        tx.rollback()
        tx.add(Account(id=number + 2, balance=1))
        if fails.pop():
            raise ValueError("after a commit() of its own")

    fails.append(True)
    assert app.process(message("1")) is Outcome.FAILED
    assert balances(shared_url(product), number) == {}
    fails[:] = [False]
    assert app.process(message("2")) is Outcome.PROCESSED
    assert balances(shared_url(product), number) == {0: 1, 2: 1}


@every_product
def test_a_swallowed_error_of_the_session_is_an_ordinary_failure(
    product: str,
    make_engine: Callable[..., sa.Engine],
    shared_url: Callable[[str], str],
    number: int,
) -> None:
    app = App(orm.sessionmaker(make_engine(product)))

    @app.handler("t", consumer=f"s{number}")
    def handle(message: Message[Any], tx: orm.Session) -> None:
        tx.execute(sa.insert(Account).values(id=number, balance=1))
        tx.add(Account(id=number, balance=2))
        with pytest.raises(exc.IntegrityError):
            tx.flush()

    assert app.process(message()) is Outcome.FAILED
    assert balances(shared_url(product), number) == {}


@every_product
def test_async_sessions_write_what_is_pending_too(
    product: str, shared_url: Callable[[str], str], number: int
) -> None:
    url = shared_url(product)

    async def run() -> Outcome:
        engine = sa_async.create_async_engine(engine_url(url, ASYNC_DRIVERS[url.partition(":")[0]]))
        app = App(sa_async.async_sessionmaker(engine))

        @app.handler("t", consumer=f"s{number}")
        async def handle(message: Message[Any], tx: sa_async.AsyncSession) -> None:
            tx.add(Account(id=number, balance=1))
            await tx.commit()
            tx.add(Account(id=number + 1, balance=1))

        outcome = await app.process_async(message())
        await app.close_async()
        await engine.dispose()
        return outcome

    assert asyncio.run(run()) is Outcome.PROCESSED
    assert balances(url, number) == {0: 1, 1: 1}


def test_the_isolation_level_of_the_engine_comes_back(
    make_engine: Callable[..., sa.Engine], number: int
) -> None:
    engine = make_engine("postgresql", isolation_level="SERIALIZABLE", pool_size=1, max_overflow=0)
    app = App(engine)
    seen: list[str] = []

    @app.handler("t", consumer=f"s{number}")
    def handle(message: Message[Any], tx: sa.Connection) -> None:
        seen.append(tx.exec_driver_sql("SHOW transaction_isolation").scalar_one())

    assert app.process(message()) is Outcome.PROCESSED
    with engine.connect() as connection:
        seen.append(connection.exec_driver_sql("SHOW transaction_isolation").scalar_one())
    assert seen == ["read committed", "serializable"]


@pytest.mark.parametrize("product", names("mysql"))
def test_mysql_runs_read_committed_and_the_session_keeps_its_level(
    product: str,
    make_engine: Callable[..., sa.Engine],
    shared_url: Callable[[str], str],
    number: int,
) -> None:
    engine = make_engine(product, pool_size=1, max_overflow=0)
    app = App(engine)
    read = sa.select(Account.balance).where(Account.id == number)
    seen: list[int] = []

    @app.handler("t", consumer=f"s{number}")
    def handle(message: Message[Any], tx: sa.Connection) -> None:
        seen.append(tx.execute(read).scalar_one())
        with Raw(shared_url(product)) as raw:
            raw.execute("UPDATE account SET balance = 2 WHERE id = ?", (number,))
        seen.append(tx.execute(read).scalar_one())

    with Raw(shared_url(product)) as raw:
        raw.execute("INSERT INTO account (id, balance) VALUES (?, 1)", (number,))
    assert app.process(message()) is Outcome.PROCESSED
    assert seen == [1, 2]
    with engine.connect() as connection:
        level = "tx_isolation" if product == "mariadb" else "transaction_isolation"
        assert (
            connection.exec_driver_sql(f"SELECT @@SESSION.{level}").scalar_one()
            == "REPEATABLE-READ"
        )


@pytest.mark.parametrize("product", [each for each in PRODUCTS if each in ("mariadb", "mysql")])
def test_a_claim_that_waited_in_vain_leaves_no_limit_on_a_connection_of_the_pool(
    product: str,
    make_engine: Callable[..., sa.Engine],
    shared_url: Callable[[str], str],
    number: int,
) -> None:
    """This pool lends the connection that has been idle longest, so the next one is another."""
    engine = make_engine(product, pool_size=2)
    app = App(engine, limits=Limits(lock_timeout=timedelta(seconds=1)))

    @app.handler("t", consumer=f"s{number}")
    def handle(message: Message[Any], tx: sa.Connection) -> None: ...

    def limits() -> list[int]:
        with engine.connect() as one, engine.connect() as other:
            read = sa.text("SELECT @@SESSION.innodb_lock_wait_timeout")
            return [one.execute(read).scalar_one(), other.execute(read).scalar_one()]

    before = limits()
    assert app.process(message("a")) is Outcome.PROCESSED
    with Raw(shared_url(product)) as raw:
        raw.execute("BEGIN")
        raw.execute(
            "INSERT INTO txbox_inbox (consumer, message_id, status, topic) VALUES (?, 'b', 'processing', 't')",
            (f"s{number}",),
        )
        assert app.process(message("b")) is Outcome.IN_PROGRESS
    assert limits() == before


def test_foreign_keys_of_a_sqlite_engine_are_as_before(
    make_engine: Callable[..., sa.Engine], number: int
) -> None:
    engine = make_engine("sqlite", pool_size=1, max_overflow=0)
    app = App(engine)
    seen: list[int] = []

    @app.handler("t", consumer=f"s{number}")
    def handle(message: Message[Any], tx: sa.Connection) -> None:
        seen.append(tx.exec_driver_sql("PRAGMA foreign_keys").scalar_one())

    assert app.process(message()) is Outcome.PROCESSED
    with engine.connect() as connection:
        seen.append(connection.exec_driver_sql("PRAGMA foreign_keys").scalar_one())
    assert seen == [1, 0]


@pytest.mark.parametrize("begins", ["event", "driver"])
def test_a_sqlite_engine_that_begins_by_itself_still_writes_from_the_start(
    begins: str,
    make_engine: Callable[..., sa.Engine],
    shared_url: Callable[[str], str],
    number: int,
) -> None:
    engine = make_engine("sqlite")

    @event.listens_for(engine, "connect")
    def connected(dbapi_connection: Any, record: Any) -> None:
        dbapi_connection.isolation_level = None

    if begins == "event":

        @event.listens_for(engine, "begin")
        def begun(connection: sa.Connection) -> None:
            connection.exec_driver_sql("BEGIN")

    app = App(engine)
    locked: list[bool] = []

    @app.handler("t", consumer=f"s{number}")
    def handle(message: Message[Any], tx: sa.Connection) -> None:
        tx.execute(sa.insert(Account).values(id=number, balance=1))
        with Raw(shared_url("sqlite")) as raw:
            raw.rows("PRAGMA busy_timeout = 0")
            try:
                raw.execute("BEGIN IMMEDIATE")
            except Exception:  # noqa: BLE001  # sqlite3 names no class for it
                locked.append(True)
        if message.id == "1":
            raise ValueError("roll back")

    assert app.process(message("1")) is Outcome.FAILED
    assert app.process(message("2")) is Outcome.PROCESSED
    assert locked == [True, True]
    assert balances(shared_url("sqlite"), number) == {0: 1}


@every_product
def test_a_listener_on_the_engine_sees_what_txbox_executes(
    product: str,
    make_engine: Callable[..., sa.Engine],
    shared_url: Callable[[str], str],
    number: int,
) -> None:
    engine = make_engine(product)
    seen: list[str] = []

    @event.listens_for(engine, "before_cursor_execute")
    def executes(connection: Any, cursor: Any, statement: str, *others: Any) -> None:
        seen.append(statement)

    app = App(engine)

    @app.handler("t", consumer=f"s{number}")
    def handle(message: Message[Any], tx: sa.Connection) -> None:
        tx.execute(sa.insert(Account).values(id=number, balance=1))

    assert app.process(message()) is Outcome.PROCESSED
    assert app.process(message()) is Outcome.DUPLICATE
    assert sum(re.search(r"INTO \S*txbox_inbox", entry) is not None for entry in seen) == 2
    assert balances(shared_url(product), number) == {0: 1}


@pytest.mark.parametrize("prepares", [True, False], ids=["prepares", "behind a pooler"])
@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_an_engine_that_does_not_prepare_statements_prepares_none(
    prepares: bool,
    is_async: bool,
    make_engine: Callable[..., sa.Engine],
    shared_url: Callable[[str], str],
    number: int,
) -> None:
    options = {} if prepares else {"connect_args": {"prepare_threshold": None}}
    asked = sa.text("SELECT count(*) FROM pg_prepared_statements WHERE name LIKE 'txbox%'")
    found: list[int] = []

    async def run() -> Outcome:
        engine = sa_async.create_async_engine(
            engine_url(shared_url("postgresql"), "psycopg"), **options
        )
        app = App(engine)

        @app.handler("t", consumer=f"s{number}")
        async def handle(message: Message[Any], tx: sa_async.AsyncConnection) -> None:
            found.append((await tx.execute(asked)).scalar_one())

        outcome = await app.process_async(message())
        await app.close_async()
        await engine.dispose()
        return outcome

    if is_async:
        assert asyncio.run(run()) is Outcome.PROCESSED
    else:
        app = App(make_engine("postgresql", **options))

        @app.handler("t", consumer=f"s{number}")
        def handle(message: Message[Any], tx: sa.Connection) -> None:
            found.append(tx.execute(asked).scalar_one())

        assert app.process(message()) is Outcome.PROCESSED
    assert (found[0] > 0) is prepares


def test_what_cannot_share_a_transaction_is_refused() -> None:
    engine = sa.create_engine("sqlite:///unused.db")
    memory = sa.create_engine("sqlite://")
    for target in (
        memory,
        orm.sessionmaker(),
        orm.sessionmaker(engine, binds={Account: engine}),
        orm.Session(engine),
    ):
        with pytest.raises(ConfigurationError):
            open_database(target)
    engine.dispose()
    memory.dispose()


def test_an_exhausted_pool_is_unavailable(make_engine: Callable[..., sa.Engine]) -> None:
    engine = make_engine("postgresql", pool_size=1, max_overflow=0, pool_timeout=0.05)
    database = open_database(engine)
    assert database.sync is not None
    with engine.connect(), pytest.raises(StoreUnavailable, match="size of the pool"):
        acquired(database.sync)


def test_a_refused_connection_is_unavailable() -> None:
    engine = sa.create_engine("postgresql+psycopg://nobody:secret@127.0.0.1:1/nothing")
    database = open_database(engine)
    assert database.sync is not None
    assert "secret" not in database.name
    with pytest.raises(StoreUnavailable) as caught:
        acquired(database.sync)
    assert "secret" not in str(caught.value)
