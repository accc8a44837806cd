"""`App.transaction`: what is written and staged in it is committed together, or not at all."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import psycopg
import pytest
from sqlalchemy import create_engine
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker

from tests.support.databases import Raw
from tests.support.recording import Recorder
from txbox import App, ConfigurationError, StoreError
from txbox.errors import Fault

OPEN = Callable[[str], Raw]


def _staged(other: Raw) -> int:
    return int(other.value("SELECT count(*) FROM txbox_outbox"))


def _app(database: Any) -> App:
    app = App(database)
    app.publish(Recorder(), topics=["invoices"])
    return app


def _order(app: App, number: int, divisor: int = 1) -> None:
    with app.transaction() as tx:
        app.outbox.stage(tx, "invoices", {"number": number})
        assert number // divisor == number


def test_a_block_commits_and_an_exception_rolls_back(database_url: str, raw: OPEN) -> None:
    with _app(database_url) as app, raw(database_url) as other:
        _order(app, 1)
        assert _staged(other) == 1
        with pytest.raises(ZeroDivisionError):
            _order(app, 2, divisor=0)
        assert _staged(other) == 1


def test_an_async_block_commits_and_an_exception_rolls_back(database_url: str, raw: OPEN) -> None:
    async def order(app: App, number: int, divisor: int = 1) -> None:
        async with app.transaction_async() as tx:
            await app.outbox.stage_async(tx, "invoices", {"number": number})
            assert number // divisor == number

    async def main() -> None:
        async with _app(database_url) as app:
            await order(app, 1)
            with pytest.raises(ZeroDivisionError):
                await order(app, 2, divisor=0)

    asyncio.run(main())
    with raw(database_url) as other:
        assert _staged(other) == 1


def test_a_cancelled_block_keeps_nothing_and_no_transaction(sqlite_url: str, raw: OPEN) -> None:
    async def main() -> None:
        async with _app(sqlite_url) as app:
            inside = asyncio.Event()

            async def request() -> None:
                async with app.transaction_async() as tx:
                    await app.outbox.stage_async(tx, "invoices", {"number": 1})
                    inside.set()
                    await asyncio.Event().wait()

            task = asyncio.create_task(request())
            await inside.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            async with app.transaction_async() as tx:
                await app.outbox.stage_async(tx, "invoices", {"number": 2})

    asyncio.run(main())
    with raw(sqlite_url) as other:
        assert _staged(other) == 1


def test_a_swallowed_database_error_is_no_success(postgresql_url: str, raw: OPEN) -> None:
    # PostgreSQL answers such a COMMIT with ROLLBACK, and drivers say nothing
    def swallow(app: App) -> None:
        with app.transaction() as tx:
            app.outbox.stage(tx, "invoices", {"number": 1})
            with suppress(psycopg.errors.UndefinedTable):
                tx.execute("SELECT 1 FROM no_such_table")

    with _app(postgresql_url) as app, raw(postgresql_url) as other:
        with pytest.raises(StoreError, match="nothing was persisted"):
            swallow(app)
        assert _staged(other) == 0
        _order(app, 2)
        assert _staged(other) == 1


@pytest.mark.parametrize("ended", ["commit", "rollback"])
def test_a_block_that_ends_its_transaction_is_no_success(
    database_url: str, raw: OPEN, ended: str
) -> None:
    with _app(database_url) as app, raw(database_url) as other:

        def end() -> None:
            with app.transaction() as tx:
                app.outbox.stage(tx, "invoices", {"number": 1})
                getattr(tx, ended)()

        with pytest.raises(StoreError, match="ended its transaction") as caught:
            end()
        assert caught.value.fault is Fault.GUARD
        assert not caught.value.definite
        assert _staged(other) == (ended == "commit")
        _order(app, 2)


@pytest.mark.parametrize("driver", ["asyncpg", "psycopg"])
def test_an_async_block_that_ends_its_transaction_is_no_success(
    postgresql_url: str, driver: str
) -> None:
    async def end(app: App) -> None:
        async with app.transaction_async() as tx:
            await app.outbox.stage_async(tx, "invoices", {"number": 1})
            await tx.execute("ROLLBACK")

    async def main() -> None:
        async with _app(postgresql_url.replace("postgresql", f"postgresql+{driver}")) as app:
            with pytest.raises(StoreError, match="ended its transaction"):
                await end(app)

    asyncio.run(main())


class _Base(DeclarativeBase): ...


class _Placed(_Base):
    __tablename__ = "orders"
    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)


def test_a_session_is_flushed_and_its_own_error_is_raised(sqlite_url: str, raw: OPEN) -> None:
    engine = create_engine(sqlite_url)
    _Base.metadata.create_all(engine)
    app = _app(sessionmaker(engine))

    def order(number: int) -> None:
        with app.transaction() as session:
            assert isinstance(session, Session)
            app.outbox.stage(session, "invoices", {"number": number})
            session.add(_Placed(number=number))

    order(1)
    with pytest.raises(IntegrityError):
        order(1)
    with raw(sqlite_url) as other:
        assert _staged(other) == 1
    engine.dispose()


def test_the_other_kind_of_connection_is_refused(sqlite_url: str) -> None:
    async def main() -> None:
        async with App(create_engine(sqlite_url)).transaction_async():
            raise AssertionError("a sync engine has no async transaction")

    with pytest.raises(ConfigurationError, match="sync connections only"):
        asyncio.run(main())
