"""The session, on a connection that does what a test has written down: no database, no race."""

from __future__ import annotations

import asyncio
import inspect
import sqlite3
from collections.abc import Awaitable, Callable, Generator
from types import coroutine
from typing import Any

import aiosqlite
import pytest

from txbox import App, Inbox, Outbox, testing
from txbox.errors import StoreError, StoreUnavailable
from txbox.outbox.effects import Effects
from txbox.session import Connection, Result, Session, Statement, Statements, drive, drive_async

ONE = (Statement("one", "SELECT 1", {}),)


@coroutine
def suspended() -> Generator[None]:
    yield


class Scripted(Connection):
    """Remembers what is asked of it; `answer` is awaited by commit, `undone` by rollback, if they are given."""

    native = None

    def __init__(self, told: list[str], *, is_async: bool = False) -> None:
        self.told = told
        self.is_async = is_async
        self.answer: Callable[[], Awaitable[object]] | None = None
        self.undone: Callable[[], Awaitable[object]] | None = None
        #: What the next statements are answered with.
        self.troubles: list[StoreError] = []
        self._ahead: Statements | None = None

    @property
    def lost(self) -> bool:
        return False

    def _tell(self, verb: str, statements: Statements = ()) -> list[Result]:
        self.told.append(" ".join([verb, *(statement.name for statement in statements)]))
        if self.troubles:
            raise self.troubles.pop(0)
        return [Result((), 0) for _ in statements]

    async def execute(self, statement: Statement) -> Result:
        return self._tell("execute", (statement,))[0]

    async def begin(self, statements: Statements) -> list[Result]:
        return self._tell("begin", statements)

    async def begun(self, work: Callable[[], None] | None = None) -> list[Result]:
        statements, self._ahead = self._ahead or (), None
        return self._tell("begun", statements)

    async def commit(self, statements: Statements) -> list[Result]:
        if self.answer is not None:
            await self.answer()
        return self._tell("commit", statements)

    async def commit_then(self, statements: Statements, then: Any) -> list[Result]:
        if then is None:
            return await self.commit(statements)
        self._ahead = then()
        return self._tell("commit", statements)

    @property
    def ahead(self) -> Statements | None:
        return self._ahead

    async def rollback(self) -> None:
        self._ahead = None
        if self.undone is not None:
            await self.undone()
        self._tell("rollback")

    def discard(self) -> None:
        self.told.append("discard")

    def translate(self, error: BaseException) -> StoreError | None:
        raise NotImplementedError


class Lends:
    """Lends the one connection."""

    def __init__(self, *, is_async: bool = False) -> None:
        self.told: list[str] = []
        self.is_async = is_async
        self.idle_limit: Statements = ()
        self.waits: dict[object, float] = {}
        self.taken_back: Callable[[], Awaitable[object]] | None = None
        self.connection = Scripted(self.told, is_async=is_async)

    async def acquire(self) -> Connection:
        return self.connection

    def distrust(self, connection: Any) -> None:
        del connection
        self.told.append("distrusted")

    async def release(self, connection: Any) -> None:
        del connection
        if self.taken_back is not None:
            await self.taken_back()
        self.told.append("released")


def test_a_blocking_connection_that_suspends_fails_loudly_and_is_dropped() -> None:
    lends = Lends()
    lends.connection.answer = suspended

    async def operation(db: Session) -> None:
        await db.begin()
        await db.commit(ONE)

    with pytest.raises(AssertionError, match="tried to wait"):
        drive(lends, operation)
    assert lends.told == ["begin", "discard"]


def away() -> StoreUnavailable:
    return StoreUnavailable("the server is read-only", code="25006")


def test_begin_is_tried_once_more_on_another_connection_while_the_database_is_away() -> None:
    lends = Lends()
    lends.connection.troubles = [away()]

    async def operation(db: Session) -> None:
        await db.begin(ONE)
        await db.commit()

    drive(lends, operation)
    assert lends.told == ["begin one", "distrusted", "discard", "begin one", "commit", "released"]
    lends.told.clear()
    lends.connection.troubles = [away(), away()]
    with pytest.raises(StoreUnavailable):
        drive(lends, operation)
    assert lends.told == ["begin one", "distrusted", "discard"] * 2
    assert lends.waits == {}


def test_a_single_statement_is_tried_once_more_too() -> None:
    lends = Lends()
    lends.connection.troubles = [away()]

    async def operation(db: Session) -> None:
        await db.alone(ONE[0])

    drive(lends, operation)
    assert lends.told == ["begin one", "distrusted", "discard", "begin one", "commit", "released"]


@pytest.mark.parametrize("verb", ["execute", "commit"])
def test_nothing_that_may_have_taken_effect_is_tried_again(verb: str) -> None:
    lends = Lends()

    async def operation(db: Session) -> None:
        await db.begin()
        lends.connection.troubles = [away()]
        try:
            await (db.execute(ONE[0]) if verb == "execute" else db.commit(ONE))
        finally:
            # a rollback would succeed, and the connection be used again
            await db.rollback()

    with pytest.raises(StoreUnavailable):
        drive(lends, operation)
    assert lends.told == ["begin", f"{verb} one", "distrusted", "discard"]


def test_who_waits_for_an_answer_is_known_and_since_when() -> None:
    lends = Lends()
    seen: list[int] = []

    async def operation(db: Session) -> None:
        await db.begin()
        seen.append(len(lends.waits))  # user code runs here
        await db.commit(ONE)

    async def answer() -> None:
        seen.append(len(lends.waits))

    lends.connection.answer = answer
    drive(lends, operation)
    assert seen == [0, 1]
    assert lends.waits == {}


def test_what_an_operation_raises_comes_out_and_its_transaction_is_dropped() -> None:
    lends = Lends()

    async def operation(db: Session) -> None:
        await db.begin()
        raise LookupError("what it raises")

    with pytest.raises(LookupError, match="what it raises"):
        drive(lends, operation)
    assert lends.told == ["begin", "discard"]


def cancelled_while(lends: Lends, waits: asyncio.Event, *, times: int) -> None:
    """Run a transaction whose caller is cancelled while the connection waits for the event."""

    async def operation(db: Session) -> None:
        await db.begin()
        if lends.connection.undone is None:
            await db.commit(ONE)
        else:
            await db.rollback()

    async def run() -> None:
        task = asyncio.create_task(drive_async(lends, operation))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        for _ in range(times):
            task.cancel()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        # what a caller drops at once does not wait for this
        assert task.done() is (lends.connection.undone is not None)
        waits.set()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())


@pytest.mark.parametrize("times", [1, 2])
def test_a_commit_that_was_sent_is_awaited_however_often_its_caller_is_cancelled(
    times: int,
) -> None:
    lends, answered = Lends(is_async=True), asyncio.Event()
    lends.connection.answer = answered.wait
    cancelled_while(lends, answered, times=times)
    assert lends.told == ["begin", "commit one", "released"]


def test_a_caller_cancelled_during_rollback_drops_the_connection() -> None:
    lends, undone = Lends(is_async=True), asyncio.Event()
    lends.connection.undone = undone.wait
    cancelled_while(lends, undone, times=1)
    assert lends.told == ["begin", "discard"]


@pytest.mark.parametrize("times", [1, 2])
def test_a_connection_on_its_way_back_is_given_back_whoever_is_cancelled(times: int) -> None:
    lends, taken_back = Lends(is_async=True), asyncio.Event()
    lends.taken_back = taken_back.wait
    cancelled_while(lends, taken_back, times=times)
    assert lends.told == ["begin", "commit one", "released"]


@pytest.mark.parametrize("owner", [App, Effects, Inbox, Outbox, testing])
def test_a_verb_and_its_twin_take_the_same(owner: Any) -> None:
    twins = [name for name in dir(owner) if name.endswith("_async") and name[0] != "_"]
    assert twins
    for name in twins:
        verb, twin = getattr(owner, name.removesuffix("_async")), getattr(owner, name)
        signatures = inspect.signature(twin), inspect.signature(verb)
        if inspect.isasyncgenfunction(inspect.unwrap(twin)):  # for `async with`, and for `with`
            assert inspect.isgeneratorfunction(inspect.unwrap(verb))
            assert signatures[0].parameters == signatures[1].parameters, name
            continue
        assert inspect.iscoroutinefunction(twin)
        assert not inspect.iscoroutinefunction(verb)
        assert signatures[0] == signatures[1], name


def test_a_twin_refuses_what_its_verb_refuses() -> None:
    app = App("sqlite:///none.db")
    tx = sqlite3.connect(":memory:")
    given: Any = {"nothing": 1}
    for stage in (app.outbox.stage, app.effects.stage, Inbox("c").accept):
        with pytest.raises(TypeError, match="nothing"):
            stage(tx, "t", **given)

    async def run() -> None:
        async with aiosqlite.connect(":memory:") as tx_async:
            for stage in (app.outbox.stage_async, app.effects.stage_async):
                with pytest.raises(TypeError, match="nothing"):
                    await stage(tx_async, "t", **given)
            with pytest.raises(TypeError, match="nothing"):
                await Inbox("c").accept_async(tx_async, "t", **given)

    asyncio.run(run())
