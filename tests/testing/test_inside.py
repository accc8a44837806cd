"""txbox inside a rollback fixture: every row can be read in the test's transaction, and nothing outlives it."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
import pytest
import sqlalchemy as sa
from sqlalchemy import event, orm
from sqlalchemy.ext import asyncio as sa_async

from tests.support.databases import Raw, representatives
from tests.support.ledger import TABLE, message, service
from txbox import App, ConfigurationError, Message, Outcome, Reject
from txbox.testing import Crashed, crash_at, crash_points, deliver, deliver_async, drain, inside

Rows = Callable[[str], list[tuple[Any, ...]]]
Fixture = Callable[[str], Any]

_DRIVERS = {"postgresql": "postgresql+psycopg", "mysql": "mysql+pymysql", "sqlite": "sqlite"}


class Base(orm.DeclarativeBase):
    pass


class Line(Base):
    __tablename__ = "ledger"

    message_id: orm.Mapped[str] = orm.mapped_column(primary_key=True)
    attempt: orm.Mapped[int | None]


def engine_of(url: str) -> sa.Engine:
    scheme, _, rest = url.partition("://")
    engine = sa.create_engine(f"{_DRIVERS[scheme]}://{rest}")
    if scheme == "sqlite":
        # SQLAlchemy's recipe for savepoints on SQLite: the driver begins nothing by itself
        event.listen(engine, "connect", lambda raw, _: setattr(raw, "isolation_level", None))
        event.listen(engine, "begin", lambda each: each.exec_driver_sql("BEGIN"))
    return engine


@contextmanager
def plain_driver(url: str) -> Iterator[tuple[Any, Rows]]:
    """A driver's connection with a transaction open, rolled back at the end."""
    with Raw(url) as view:
        tx = view._connection
        if isinstance(tx, psycopg.Connection):
            tx.autocommit = False
        elif isinstance(tx, sqlite3.Connection):
            tx.execute("BEGIN")
        else:
            tx.autocommit(False)
            tx.begin()
        yield tx, view.rows
        tx.rollback()


@contextmanager
def sqlalchemy_connection(url: str) -> Iterator[tuple[Any, Rows]]:
    engine = engine_of(url)
    with engine.connect() as tx:
        outer = tx.begin()
        yield tx, lambda sql: [tuple(row) for row in tx.exec_driver_sql(sql)]
        outer.rollback()
    engine.dispose()


@contextmanager
def sqlalchemy_session(url: str) -> Iterator[tuple[Any, Rows]]:
    """The fixture of SQLAlchemy's manual: a session that joins an external transaction."""
    engine = engine_of(url)
    with engine.connect() as connection:
        outer = connection.begin()
        with orm.Session(connection, join_transaction_mode="create_savepoint") as tx:
            yield tx, lambda sql: [tuple(row) for row in tx.execute(sa.text(sql))]
        outer.rollback()
    engine.dispose()


@pytest.fixture(params=[plain_driver, sqlalchemy_connection, sqlalchemy_session])
def fixture(request: pytest.FixtureRequest) -> Fixture:
    opened: Fixture = request.param
    return opened


@pytest.fixture
def url(database_url: str) -> str:
    with Raw(database_url) as raw:
        raw.execute(TABLE)
    return database_url


def test_rows_are_seen_in_the_tests_transaction_and_gone_after_it(
    url: str, fixture: Fixture
) -> None:
    app = service(App(url))

    with fixture(url) as (tx, rows):
        assert deliver(app, message("a"), tx=tx) is Outcome.PROCESSED
        assert deliver(app, message("a"), tx=tx) is Outcome.DUPLICATE
        assert deliver(app, message("a", b"other"), tx=tx) is Outcome.QUARANTINED
        assert rows("SELECT message_id FROM ledger") == [("a",)]
        assert rows("SELECT status FROM txbox_inbox") == [("processed",)]

    with Raw(url) as raw:
        for table in ("ledger", "txbox_inbox", "txbox_quarantine"):
            assert raw.value(f"SELECT count(*) FROM {table}") == 0


def test_a_failure_is_undone_recorded_and_retried_inside(url: str, fixture: Fixture) -> None:
    app = service(App(url))

    with fixture(url) as (tx, rows):
        assert deliver(app, message("fail"), tx=tx) is Outcome.FAILED
        assert rows("SELECT message_id FROM ledger") == []
        assert rows("SELECT status, attempts, error_type FROM txbox_inbox") == [
            ("failed", 1, "ValueError")
        ]
        assert deliver(app, message("fail"), tx=tx) is Outcome.DEFERRED
        assert drain(app, tx=tx, ignore_dates=True) == [Outcome.PROCESSED]
        assert rows("SELECT attempt FROM ledger") == [(2,)]
        assert rows("SELECT status FROM txbox_attempt") == [("failed",)]

    with Raw(url) as raw:
        assert raw.value("SELECT count(*) FROM txbox_attempt") == 0


def test_a_dead_letter_is_staged_inside(url: str, fixture: Fixture) -> None:
    app = App(url)

    @app.handler("orders", consumer="billing", dead_letter_topic="dead")
    def handle(_message: Message[Any], _tx: Any) -> None:
        raise Reject("never")

    with fixture(url) as (tx, rows):
        assert deliver(app, message("a"), tx=tx) is Outcome.DEAD
        assert rows("SELECT count(*) FROM txbox_outbox WHERE topic = 'dead'") == [(1,)]


def test_an_error_of_the_database_costs_only_the_savepoint(url: str, fixture: Fixture) -> None:
    app = App(url)

    @app.handler("orders", consumer="billing")
    def take(taken: Message[Any], tx: Any) -> None:
        if isinstance(tx, (sa.Connection, orm.Session)):
            tx.execute(sa.text("INSERT INTO ledger (message_id, attempt) VALUES ('x', NULL)"))
        else:
            tx.cursor().execute("INSERT INTO ledger (message_id, attempt) VALUES ('x', NULL)")

    with fixture(url) as (tx, rows):
        assert deliver(app, message("a"), tx=tx) is Outcome.FAILED
        assert rows("SELECT status, attempts FROM txbox_inbox") == [("failed", 1)]
        ((error_type,),) = rows("SELECT error_type FROM txbox_inbox")
        # psycopg has a class of its own for it
        assert error_type.rpartition(".")[2] in ("IntegrityError", "NotNullViolation")


def test_every_crash_point_is_survived_inside(url: str, fixture: Fixture) -> None:
    app = service(App(url))

    with fixture(url) as (tx, rows):
        points = crash_points(app, message("first"), tx=tx)
        for number, point in enumerate(points):
            sent = message(f"crash-{number:02}")
            nth = points[: number + 1].count(point)
            with pytest.raises(Crashed), crash_at(point, nth):
                deliver(app, sent, tx=tx)
            assert deliver(app, sent, tx=tx) in (Outcome.PROCESSED, Outcome.DUPLICATE)
        assert "before:close" in points
        assert rows("SELECT count(*), count(DISTINCT message_id) FROM ledger") == [
            (1 + len(points), 1 + len(points))
        ]


def test_a_session_that_ends_the_savepoint_is_caught(url: str) -> None:
    app = App(url)

    @app.handler("orders", consumer="billing")
    def take(taken: Message[Any], tx: Any) -> None:
        tx.commit()

    with sqlalchemy_session(url) as (tx, rows):
        assert deliver(app, message("a"), tx=tx) in (Outcome.DEAD, Outcome.DUPLICATE)
        assert rows("SELECT count(*) FROM txbox_inbox WHERE status = 'failed'") == [(0,)]


def test_a_flush_that_fails_is_the_handlers_failure(url: str) -> None:
    app = App(url)

    @app.handler("orders", consumer="billing")
    def take(taken: Message[Any], tx: orm.Session) -> None:
        tx.add(Line(message_id=str(taken.id), attempt=None if taken.id == "bad" else 1))

    with sqlalchemy_session(url) as (tx, rows):
        assert deliver(app, message("bad"), tx=tx) is Outcome.FAILED
        assert deliver(app, message("good"), tx=tx) is Outcome.PROCESSED
        assert rows("SELECT message_id FROM ledger") == [("good",)]
        ((status, error_type),) = rows(
            "SELECT status, error_type FROM txbox_inbox WHERE message_id = 'bad'"
        )
        assert (status, error_type.rpartition(".")[2]) == ("failed", "IntegrityError")


@pytest.mark.parametrize("name", [database.name for database in representatives()])
def test_an_async_session_and_an_async_driver(
    new_database: Callable[[str], str], name: str
) -> None:
    url = new_database(name)
    with Raw(url) as raw:
        raw.execute(TABLE)
    drivers = {
        "postgresql": "postgresql+psycopg",
        "sqlite": "sqlite+aiosqlite",
        "mysql": "mysql+asyncmy",
    }
    scheme, _, rest = url.partition("://")

    async def work() -> None:
        engine = sa_async.create_async_engine(f"{drivers[scheme]}://{rest}")
        if scheme == "sqlite":
            sync = engine.sync_engine
            event.listen(sync, "connect", lambda raw, _: setattr(raw, "isolation_level", None))
            event.listen(sync, "begin", lambda each: each.exec_driver_sql("BEGIN"))
        app = App(url)

        @app.handler("orders", consumer="billing")
        async def take(taken: Message[Any], tx: sa_async.AsyncSession) -> None:
            await tx.execute(
                sa.text("INSERT INTO ledger (message_id, attempt) VALUES (:id, 1)"),
                {"id": taken.id},
            )
            if taken.id == "bad":
                raise ValueError("as asked")

        async with engine.connect() as connection:
            outer = await connection.begin()
            async with sa_async.AsyncSession(
                bind=connection, join_transaction_mode="create_savepoint"
            ) as tx:
                with pytest.raises(Crashed), crash_at("after:handler"):
                    await deliver_async(app, message("a"), tx=tx)
                assert (await tx.execute(sa.text("SELECT count(*) FROM ledger"))).scalar() == 0
                assert await deliver_async(app, message("a"), tx=tx) is Outcome.PROCESSED
                assert await deliver_async(app, message("bad"), tx=tx) is Outcome.FAILED
                ids = (await tx.execute(sa.text("SELECT message_id FROM ledger"))).scalars().all()
                assert ids == ["a"]
            await outer.rollback()
        await engine.dispose()
        await app.close_async()

    asyncio.run(work())
    with Raw(url) as raw:
        assert raw.value("SELECT count(*) FROM txbox_inbox") == 0


def test_a_connection_without_a_transaction_is_refused(sqlite_url: str) -> None:
    app = service(App(sqlite_url))
    tx = sqlite3.connect(sqlite_url.removeprefix("sqlite:///"))
    with pytest.raises(ConfigurationError, match="not in a transaction"):
        inside(app, tx)
    tx.close()


def test_another_kind_of_database_is_refused(sqlite_url: str) -> None:
    app = service(App("postgresql://localhost/elsewhere"))
    with (
        plain_driver(sqlite_url) as (tx, _),
        pytest.raises(ConfigurationError, match="one database"),
    ):
        inside(app, tx)
