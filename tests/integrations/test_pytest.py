"""The fixtures of the plugin, as pytest finds them by the installed entry point."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Awaitable, Callable
from datetime import timedelta
from importlib.metadata import entry_points
from typing import Any

import pytest

from txbox import App, Message, Outcome, RetryPolicy
from txbox.testing import Clock

pytest_plugins = ["pytester"]


def _paid(name: str, amount: int = 1) -> Message[Any]:
    return Message(id=name, topic="orders", payload=b"%d" % amount)


@pytest.fixture
def ledger(txbox_app: App) -> Callable[[], list[int]]:
    with txbox_app.transaction() as tx:
        tx.execute("CREATE TABLE ledger (amount INTEGER)")

    policy = RetryPolicy(max_attempts=3, base=timedelta(minutes=1), cap=timedelta(hours=1))

    @txbox_app.handler("orders", consumer="billing", retry=policy)
    def book(message: Message[int], tx: sqlite3.Connection) -> None:
        tx.execute("INSERT INTO ledger VALUES (?)", (message.body,))
        if message.body < 0:
            raise ValueError("not yet")

    def amounts() -> list[int]:
        with txbox_app.transaction() as tx:
            return [amount for (amount,) in tx.execute("SELECT amount FROM ledger")]

    return amounts


def test_deliver_runs_the_apps_handlers(
    txbox_deliver: Callable[..., Outcome], ledger: Callable[[], list[int]]
) -> None:
    assert txbox_deliver(_paid("m-1", 5)) is Outcome.PROCESSED
    assert txbox_deliver(_paid("m-1", 5), consumer="billing") is Outcome.DUPLICATE
    assert ledger() == [5]


def test_a_retry_is_due_when_the_clock_says_so(
    txbox_deliver: Callable[..., Outcome],
    txbox_drain: Callable[..., list[Outcome]],
    txbox_clock: Clock,
    ledger: Callable[[], list[int]],
) -> None:
    assert txbox_deliver(_paid("m-1", -1)) is Outcome.FAILED
    assert txbox_drain() == []
    txbox_clock.advance(timedelta(minutes=1))
    assert txbox_drain() == [Outcome.FAILED]
    txbox_clock.advance(timedelta(minutes=2))
    assert txbox_drain() == [Outcome.DEAD]
    assert ledger() == []


def test_every_crash_leaves_one_effect(
    txbox_crash_everywhere: Callable[..., dict[str, Outcome]], ledger: Callable[[], list[int]]
) -> None:
    ended = txbox_crash_everywhere(_paid)
    assert (ended["after:handler"], ended["before:commit"]) == (
        Outcome.PROCESSED,
        Outcome.PROCESSED,
    )
    assert ended["after:commit"] is Outcome.DUPLICATE
    assert ledger() == [1] * (len(ended) + 1)


def test_async_handlers_have_fixtures_too(
    txbox_app: App,
    txbox_deliver_async: Callable[..., Awaitable[Outcome]],
    txbox_drain_async: Callable[..., Awaitable[list[Outcome]]],
    txbox_crash_everywhere_async: Callable[..., Awaitable[dict[str, Outcome]]],
) -> None:
    @txbox_app.handler("orders", consumer="billing")
    async def book(message: Message[int], tx: Any) -> None:
        if message.body < 0 and message.attempt == 1:
            raise ValueError("not yet")

    async def work() -> None:
        assert await txbox_deliver_async(_paid("m-1", -1)) is Outcome.FAILED
        assert await txbox_drain_async(ignore_dates=True) == [Outcome.PROCESSED]
        ended = await txbox_crash_everywhere_async(_paid)
        assert (ended["before:commit"], ended["after:commit"]) == (
            Outcome.PROCESSED,
            Outcome.DUPLICATE,
        )

    asyncio.run(work())


def test_it_is_found_by_its_entry_point_and_an_app_is_put_in_its_place(
    pytester: pytest.Pytester,
) -> None:
    (found,) = entry_points(group="pytest11", name="txbox")
    assert found.value == "txbox.integrations.pytest"
    pytester.makeconftest(
        """
        import pytest
        from txbox import App

        @pytest.fixture
        def txbox_app(tmp_path):
            with App(f"sqlite:///{tmp_path}/mine.db") as app:
                app.init()
                app.handler("orders", consumer="mine")(lambda message, tx: None)
                yield app
        """
    )
    pytester.makepyfile(
        """
        from txbox import Message, Outcome

        def test_mine(txbox_deliver):
            assert txbox_deliver(Message(id="1", topic="orders", payload=b"1")) is Outcome.PROCESSED
        """
    )
    pytester.runpytest_subprocess("-p", "no:cacheprovider").assert_outcomes(passed=1)
