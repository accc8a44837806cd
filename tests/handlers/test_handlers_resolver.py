"""Extra parameters of handlers: checked when registered, opened in the transaction, closed before its COMMIT."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncGenerator, Generator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any

import pytest

from txbox import App, ConfigurationError, Message, Outcome
from txbox.handlers import Opened
from txbox.testing import drain


class Client:
    sent: list[str]


class Fake:
    """Knows Client and str; writes down what is opened and closed, and fails or swallows as it is asked to."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.asked: list[tuple[Mapping[str, Any], bool, bool]] = []
        self.how = ""
        self.asynchronous = False

    def __call__(
        self, annotations: Mapping[str, Any], *, is_async: bool, transactional: bool
    ) -> Opened:
        self.asked.append((annotations, is_async, transactional))
        for name, hint in annotations.items():
            if hint not in (Client, str):
                raise ConfigurationError(f"nothing is known for {name}.")
        values = {name: Client() if hint is Client else name for name, hint in annotations.items()}

        @contextmanager
        def opened(given: Any, tx: Any) -> Generator[Mapping[str, Any]]:
            self.log.append("open")
            with suppress(ValueError if self.how == "swallow" else LookupError):
                yield values
            self.log.append("close")
            if tx is not None:
                tx.execute("INSERT INTO ledger VALUES (-1)")
            if self.how == "fail":
                raise ZeroDivisionError

        @asynccontextmanager
        async def opened_async(given: Any, tx: Any) -> AsyncGenerator[Mapping[str, Any]]:
            self.log.append("open")
            yield values
            self.log.append("close")
            await tx.execute("INSERT INTO ledger VALUES (-1)")

        return opened_async if self.asynchronous else opened


@pytest.fixture
def fake() -> Fake:
    return Fake()


@pytest.fixture
def app(sqlite_url: str, fake: Fake) -> Iterator[App]:
    with App(sqlite_url, resolver=fake) as app:
        with app.transaction() as tx:
            tx.execute("CREATE TABLE ledger (amount INTEGER)")
        yield app


def _message(name: str = "m-1", topic: str = "orders") -> Message[Any]:
    return Message(id=name, topic=topic, payload=b"1")


def _ledger(app: App) -> list[int]:
    with app.transaction() as tx:
        return [amount for (amount,) in tx.execute("SELECT amount FROM ledger ORDER BY rowid")]


def test_it_is_left_before_the_commit_and_what_it_writes_counts(app: App, fake: Fake) -> None:
    app.handler("answers", consumer="answered")(lambda message, tx: None)

    @app.handler("orders", consumer="billing", reply_to="answers")
    def book(
        message: Message[int], tx: sqlite3.Connection, client: Client, *, name: str, n: int = 4
    ) -> int:
        assert isinstance(client, Client)
        assert (name, n, message.body) == ("name", 4, 1)
        tx.execute("INSERT INTO ledger VALUES (1)")
        return 1

    assert fake.asked == [({"client": Client, "name": str}, False, True)]
    assert app.process(_message()) is Outcome.PROCESSED
    assert app.process(_message()) is Outcome.DUPLICATE
    assert (_ledger(app), fake.log) == ([1, -1], ["open", "close"])


def test_an_error_of_leaving_is_the_messages_failure(app: App, fake: Fake) -> None:
    @app.handler("orders", consumer="billing")
    def book(message: Message[int], tx: sqlite3.Connection, client: Client) -> None:
        tx.execute("INSERT INTO ledger VALUES (1)")

    fake.how = "fail"
    assert app.process(_message()) is Outcome.FAILED
    assert _ledger(app) == []


def test_an_exception_that_is_swallowed_is_no_success(app: App, fake: Fake) -> None:
    @app.handler("orders", consumer="billing")
    def book(message: Message[int], tx: sqlite3.Connection, client: Client) -> None:
        raise ValueError

    fake.how = "swallow"
    assert app.process(_message()) is Outcome.FAILED
    assert _ledger(app) == []


def test_an_async_handler_may_be_given_what_is_awaited(app: App, fake: Fake) -> None:
    fake.asynchronous = True

    @app.handler("orders", consumer="billing", batch=True)
    async def book(messages: list[Message[int]], tx: Any, client: Client) -> None:
        await tx.execute("INSERT INTO ledger VALUES (1)")

    async def main() -> Outcome:
        async with app:
            return await app.process_async(_message())

    assert asyncio.run(main()) is Outcome.PROCESSED
    assert (_ledger(app), fake.log) == ([1, -1], ["open", "close"])


def test_an_effect_is_given_its_client_outside_of_a_transaction(app: App, fake: Fake) -> None:
    @app.effect("mail")
    def mail(message: Message[Any], client: Client) -> str:
        return type(client).__name__

    with app.transaction() as tx:
        app.effects.stage(tx, "mail", {})
    assert drain(app) == [Outcome.PROCESSED]
    assert fake.asked[-1][1:] == (False, False)
    assert fake.log == ["open", "close"]


def test_what_cannot_be_given_is_refused_at_registration(app: App, sqlite_url: str) -> None:
    def unknown(message: Message[int], tx: Any, what: bytes) -> None: ...

    def plain(message: Message[int], tx: Any, what) -> None: ...  # type: ignore[no-untyped-def]

    with pytest.raises(ConfigurationError, match=r"unknown .*: nothing is known for what"):
        app.handler("orders", consumer="billing")(unknown)
    with pytest.raises(ConfigurationError, match="no annotation"):
        app.handler("orders", consumer="billing")(plain)
    with pytest.raises(ConfigurationError, match=r"\(message, tx\).* App\(resolver=…\)"):
        App(sqlite_url).handler("orders", consumer="billing")(unknown)
    assert len(app.handlers) == 0


def test_swapped_parameters_are_still_refused(app: App) -> None:
    with pytest.raises(ConfigurationError, match="the message comes first"):

        @app.handler("orders", consumer="billing")
        def book(tx: Any, message: Message[int], client: Client) -> None: ...
