"""Parameters of handlers from a real container of dishka, opened and closed in the transaction."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Iterator
from typing import Annotated, Any

import aiosqlite
import pytest
from dishka import (
    FromComponent,
    FromDishka,
    Provider,
    Scope,
    from_context,
    make_async_container,
    make_container,
    provide,
)
from sqlalchemy import create_engine, text
from sqlalchemy.orm import Session, sessionmaker

from txbox import App, ConfigurationError, Message, Outcome
from txbox.integrations.dishka import resolver


class Settings:
    fee = 3


class Ledger:
    """A repository on the handler's transaction."""

    def __init__(self, tx: Any, message: Message[Any], settings: Settings) -> None:
        self.tx, self.message, self.settings = tx, message, settings

    def entry(self, amount: int) -> tuple[str, tuple[int]]:
        return "INSERT INTO ledger VALUES (?)", (amount + self.settings.fee,)


class Unknown: ...


LOG: list[str] = []


class _Shop(Provider):
    tx = from_context(sqlite3.Connection, scope=Scope.REQUEST)
    message = from_context(Message, scope=Scope.REQUEST)

    @provide(scope=Scope.APP)
    def settings(self) -> Settings:
        return Settings()

    @provide(scope=Scope.REQUEST)
    def ledger(
        self, tx: sqlite3.Connection, message: Message[Any], settings: Settings
    ) -> Iterator[Ledger]:
        LOG.append("opened")
        raised = yield Ledger(tx, message, settings)
        # the transaction is still open: what is written here counts
        tx.execute("INSERT INTO ledger VALUES (?)", (-1,))
        LOG.append(f"closed {raised!r}")


class _AsyncShop(Provider):
    tx = from_context(aiosqlite.Connection, scope=Scope.REQUEST)
    message = from_context(Message, scope=Scope.REQUEST)

    @provide(scope=Scope.REQUEST)
    async def ledger(
        self, tx: aiosqlite.Connection, message: Message[Any]
    ) -> AsyncIterator[Ledger]:
        yield Ledger(tx, message, Settings())
        await tx.execute("INSERT INTO ledger VALUES (?)", (-1,))


def _named() -> Provider:
    named = Provider(component="other")
    named.provide(lambda: "named", scope=Scope.APP, provides=str)
    return named


@pytest.fixture
def app(sqlite_url: str) -> Iterator[App]:
    LOG.clear()
    with sqlite3.connect(sqlite_url.removeprefix("sqlite:///")) as database:
        database.execute("CREATE TABLE ledger (amount INTEGER)")
    database.close()
    container = make_container(_Shop(), _named())
    with App(sqlite_url, resolver=resolver(container)) as app:
        yield app
    container.close()


def _ledger(app: App) -> list[int]:
    with app.transaction() as tx:
        return [amount for (amount,) in tx.execute("SELECT amount FROM ledger ORDER BY rowid")]


def _message(name: str = "m-1") -> Message[Any]:
    return Message(id=name, topic="orders", payload=b"5")


def test_a_repository_writes_in_the_handlers_transaction(app: App) -> None:
    @app.handler("orders", consumer="billing")
    def book(
        message: Message[int],
        tx: sqlite3.Connection,
        ledger: Ledger,
        *,
        settings: FromDishka[Settings],
        named: Annotated[str, FromComponent("other")],
    ) -> None:
        assert (ledger.tx, ledger.message, ledger.settings) == (tx, message, settings)
        assert named == "named"
        tx.execute(*ledger.entry(message.body))

    assert app.process(_message()) is Outcome.PROCESSED
    assert app.process(_message()) is Outcome.DUPLICATE
    assert (_ledger(app), LOG) == ([8, -1], ["opened", "closed None"])


def test_a_failure_is_told_to_what_was_opened_and_rolls_it_back(app: App) -> None:
    @app.handler("orders", consumer="billing")
    def book(message: Message[int], tx: sqlite3.Connection, ledger: Ledger) -> None:
        tx.execute(*ledger.entry(1))
        raise ValueError("no")

    assert app.process(_message()) is Outcome.FAILED
    assert (_ledger(app), LOG) == ([], ["opened", "closed ValueError('no')"])


def test_an_async_container_serves_async_handlers(sqlite_url: str, app: App) -> None:
    container = make_async_container(_AsyncShop())
    later = App(sqlite_url, resolver=resolver(container))

    @later.handler("orders", consumer="billing")
    async def book(message: Message[int], tx: aiosqlite.Connection, ledger: Ledger) -> None:
        assert ledger.tx is tx
        await tx.execute(*ledger.entry(message.body))

    async def main() -> None:
        async with later:
            assert await later.process_async(_message()) is Outcome.PROCESSED
        await container.close()

    asyncio.run(main())
    assert _ledger(app) == [8, -1]

    with pytest.raises(ConfigurationError, match="AsyncContainer"):

        @later.handler("invoices", consumer="billing")
        def sync(message: Message[int], tx: Any, ledger: Ledger) -> None: ...


def test_what_the_container_lacks_is_refused_at_registration(app: App) -> None:
    with pytest.raises(ConfigurationError, match=r"book .*no factory for what: .*Unknown"):

        @app.handler("orders", consumer="billing")
        def book(message: Message[int], tx: sqlite3.Connection, what: Unknown) -> None: ...

    assert len(app.handlers) == 0


class Orders:
    def __init__(self, session: Session) -> None:
        self.session = session


def test_the_session_of_a_sessionmaker_is_a_session(sqlite_url: str, app: App) -> None:
    provider = Provider(scope=Scope.REQUEST)
    provider.from_context(provides=Session)
    provider.provide(Orders)
    container, engine = make_container(provider), create_engine(sqlite_url)
    mapped = App(sessionmaker(engine), resolver=resolver(container))

    @mapped.handler("orders", consumer="billing")
    def book(message: Message[int], tx: Session, orders: Orders) -> None:
        assert orders.session is tx
        tx.execute(text("INSERT INTO ledger VALUES (2)"))

    assert mapped.process(_message()) is Outcome.PROCESSED
    assert _ledger(app) == [2]
    engine.dispose()
    container.close()
