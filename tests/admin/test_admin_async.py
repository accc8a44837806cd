"""The operator's verbs inside a running event loop, on async connections alone."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import aclosing, asynccontextmanager
from typing import Any

import pytest

from tests.support.connections import KINDS, Kind
from txbox import App, ConfigurationError, Message, Outcome, Reject
from txbox.admin import Admin, InboxFilter, OutboxFilter, QuarantineFilter
from txbox.admin.canary import Canary, Redriven
from txbox.admin.changes import Changes
from txbox.admin.encrypt import Encryption
from txbox.admin.look import Queries
from txbox.admin.replay import Replays
from txbox.session import Session, Statement
from txbox.testing import drain_async

#: One of each driver; the engine and the pool are the caller's, and belong to its event loop.
ON = ("asyncpg-pool", "async-engine-asyncpg", "async-engine-aiosqlite", "async-engine-asyncmy")
ASYNC = [kind for kind in KINDS if kind.name in ON]
VERBS = {
    name: verb
    for base in (Queries, Changes, Canary, Replays, Encryption)
    for name, verb in vars(base).items()
    if inspect.isfunction(verb) and not name.startswith("_")
}


class Shop:
    """An App whose async handler fails while it is told to, and the threads in which it ran."""

    def __init__(self, target: Any) -> None:
        self.failing = True
        self.threads: set[int] = set()
        self.app = App(target)
        assert self.app.database.sync is None

        @self.app.handler("orders", consumer="billing", keep_payload="always")
        async def bill(message: Message[Any], tx: Any) -> None:
            self.threads.add(threading.get_ident())
            if self.failing:
                raise Reject("told to fail")

    async def deliver(self, *ids: str) -> list[Outcome]:
        return [
            await self.app.process_async(Message(id=name, topic="orders", payload=b"{}"))
            for name in ids
        ]


@asynccontextmanager
async def shop_on(kind: Kind, url: str) -> AsyncIterator[Shop]:
    async with kind.source(url) as target:
        shop = Shop(target)
        async with shop.app:
            yield shop


@pytest.mark.parametrize("name", sorted(VERBS))
def test_each_verb_has_an_async_twin_of_the_same_signature(name: str) -> None:
    twin = getattr(Admin, f"{name}_async")
    followed = inspect.isgeneratorfunction(VERBS[name])
    assert inspect.isasyncgenfunction(twin) if followed else inspect.iscoroutinefunction(twin)
    assert inspect.signature(twin) == inspect.signature(VERBS[name])


@pytest.mark.parametrize("kind", ASYNC, ids=str)
def test_an_operator_works_inside_the_loop(kind: Kind, new_database: Callable[[str], str]) -> None:
    async def work() -> None:
        async with shop_on(kind, new_database(kind.product)) as shop, Admin(shop.app) as admin:
            assert await shop.deliver("a", "b", "c") == 3 * [Outcome.DEAD]
            where = InboxFilter(consumer="billing")
            (status,) = await admin.status_async()
            assert status.counts == {"dead": 3}
            assert {row.message_id for row in await admin.list_async(where)} == {"a", "b", "c"}
            (message,) = await admin.show_async(InboxFilter(consumer="billing", message_id="a"))
            assert message.error_type == "Reject"
            assert (await admin.explain_async("a")).places
            assert (await admin.retry_async(where, most=1)).count == 1
            assert (await admin.discard_async(where, reason="test")).count == 2
            assert [row.action for row in await admin.audit_async()] == ["discard", "retry"]
            assert await admin.pause_async("billing")
            assert await admin.resume_async("billing")
            assert not await admin.list_async(OutboxFilter())
            assert not await admin.list_async(QuarantineFilter())
            await admin.doctor_async()

    asyncio.run(work())


@pytest.mark.parametrize("kind", ASYNC, ids=str)
def test_a_replay_runs_its_async_handler_in_the_loop(
    kind: Kind, new_database: Callable[[str], str]
) -> None:
    async def work() -> None:
        async with shop_on(kind, new_database(kind.product)) as shop:
            shop.failing = False
            admin = Admin(shop.app)
            assert await shop.deliver("a") == [Outcome.PROCESSED]
            shop.threads.clear()
            done = await admin.replay_async(InboxFilter(consumer="billing"))
            assert (done.processed, shop.threads) == (1, {threading.get_ident()})
            await admin.close_async()
            # what was passed stays open
            assert await shop.deliver("b") == [Outcome.PROCESSED]

    asyncio.run(work())


def on_a_shop(
    new_database: Callable[[str], str], work: Callable[[Shop], Coroutine[Any, Any, None]]
) -> None:
    async def run() -> None:
        async with shop_on(ASYNC[0], new_database(ASYNC[0].product)) as shop:
            await work(shop)

    asyncio.run(run())


def test_the_loop_goes_on_while_a_verb_works(new_database: Callable[[str], str]) -> None:
    async def work(shop: Shop) -> None:
        """A canary waits for its messages, which are processed in the same loop."""
        await shop.deliver("a", "b")
        shop.failing = False
        where = InboxFilter(consumer="billing")
        seen = list[Redriven]()
        async for redriven in Admin(shop.app).canary_steps_async(where):
            await drain_async(shop.app)
            seen.append(redriven)
        assert seen[-1].stopped is None
        assert [step.processed for step in seen[-1].steps] == [1, 1]

    on_a_shop(new_database, work)


def test_a_cancelled_change_ends_after_its_batch(new_database: Callable[[str], str]) -> None:
    async def work(shop: Shop) -> None:
        await shop.deliver(*(f"m{number}" for number in range(3)))
        admin, at_work, go_on = Admin(shop.app), asyncio.Event(), asyncio.Event()
        execute = Session.execute

        async def held_up(db: Session, statement: Statement) -> Any:
            if statement.name == "inbox_discard":
                at_work.set()
                await go_on.wait()
            return await execute(db, statement)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Session, "execute", held_up)
            task = asyncio.create_task(admin.discard_async(InboxFilter(consumer="billing")))
            await at_work.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        (status,) = await admin.status_async()
        assert status.counts == {"dead": 3}

    on_a_shop(new_database, work)


def test_a_change_is_followed_and_ends_with_the_loop_around_it(
    new_database: Callable[[str], str],
) -> None:
    async def work(shop: Shop) -> None:
        await shop.deliver("a", "b")
        admin, where = Admin(shop.app), InboxFilter(consumer="billing")
        async for so_far in admin.batches_async("retry", where, most=1):
            assert so_far.count == 1
        shop.failing = False
        async with aclosing(admin.canary_steps_async(where)) as steps:
            async for redriven in steps:
                # of the two it is the one that is still dead
                assert redriven.count == 1
                break
        (status,) = await admin.status_async()
        assert status.counts == {"failed": 2}

    on_a_shop(new_database, work)


def test_a_sync_verb_inside_the_loop_names_its_twin(new_database: Callable[[str], str]) -> None:
    async def work(shop: Shop) -> None:
        with pytest.raises(ConfigurationError, match="status_async"):
            Admin(shop.app).status()

    on_a_shop(new_database, work)


def test_an_admin_of_a_url_closes_what_it_opened(new_database: Callable[[str], str]) -> None:
    async def work() -> None:
        async with Admin(new_database("sqlite")) as admin:
            assert not await admin.status_async()

    asyncio.run(work())
