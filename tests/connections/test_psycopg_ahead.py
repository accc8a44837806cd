"""What is begun behind a COMMIT is the next transaction, or none: on psycopg, sync and async (PostgreSQL)."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import closing, suppress
from typing import Any

import psycopg
import pytest

from tests.support.databases import Raw, missing_server, require, through_pgbouncer
from tests.support.proxy import Cut, Proxy
from tests.support.waiting import eventually
from txbox import App
from txbox.errors import Fault, StoreError
from txbox.session import Statement, Statements, blocking
from txbox.worker.lane import LaneSession

pytestmark = pytest.mark.every_database


def insert(own_id: str, name: str = "insert") -> Statement:
    return Statement(name, "INSERT INTO mark (id) VALUES (:id)", {"id": own_id})


class Driven:
    """An app on one way to connect, and a table whose constraint is looked at by COMMIT."""

    def __init__(self, url: str, way: str) -> None:
        self.is_async = way == "async"
        self.url = url
        self._raw = Raw(url)
        self._raw.execute(
            "CREATE TABLE mark (id text PRIMARY KEY, twin text UNIQUE DEFERRABLE INITIALLY DEFERRED)"
        )
        self._runner = asyncio.Runner()
        self.connect(url)

    def connect(self, url: str) -> None:
        self.app = App(url)

    def drive(self, operation: Any, *args: Any, **kwargs: Any) -> Any:
        if self.is_async:
            assert self.app.database.asynchronous is not None
            with closing(LaneSession(self.app.database.asynchronous)) as db:
                return self._wait(operation(db, *args, **kwargs))
        assert self.app.database.sync is not None
        with closing(LaneSession(self.app.database.sync)) as db:
            return blocking(operation(db, *args, **kwargs))

    def _wait(self, value: Awaitable[Any]) -> Any:
        async def waited() -> Any:
            return await value

        return self._runner.run(waited())

    def marks(self) -> set[str]:
        return {str(each) for (each,) in self._raw.rows("SELECT id FROM mark")}

    def open_transactions(self) -> int:
        return int(
            self._raw.value(
                "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()"
                " AND pid <> pg_backend_pid() AND backend_type = 'client backend' AND state <> 'idle'"
            )
        )

    def close(self) -> None:
        if self.is_async:
            self._wait(self.app.close_async())
        else:
            self.app.close()
        self._raw.close()
        self._runner.close()


@pytest.fixture(params=["sync", "async"])
def driven(request: pytest.FixtureRequest, postgresql_url: str) -> Iterator[Driven]:
    app_under_test = Driven(postgresql_url, request.param)
    yield app_under_test
    app_under_test.close()


class _Next:
    """What comes behind a COMMIT, and is never put back."""

    def __init__(self, asked: Callable[[], Statements | None]) -> None:
        self._asked = asked

    def begin(self, db: LaneSession) -> Statements | None:
        return self._asked()

    def put_back(self) -> None: ...


async def commit_then(
    db: LaneSession, statements: Statements, asked: Callable[[], Statements | None]
) -> None:
    with db.followed_by(_Next(asked)):
        await db.commit(statements)


async def chained(db: LaneSession, first: Statement, following: Statements) -> None:
    """One transaction, with the BEGIN of the next behind its COMMIT."""
    await db.begin()
    await commit_then(db, (first,), lambda: following)


def test_the_next_transaction_goes_on_where_it_was_begun(driven: Driven) -> None:
    following = (insert("b"), Statement("pid", "SELECT pg_backend_pid()", {}))

    async def steps(db: LaneSession) -> tuple[Any, Any]:
        (first,) = await db.begin((Statement("pid", "SELECT pg_backend_pid()", {}),))
        await commit_then(db, (insert("a"),), lambda: following)
        assert driven.marks() == {"a"}, "the first is committed, and only that"
        _, second = await db.begin(following, user_code=True)
        await db.commit((insert("c"),))
        return first.rows[0][0], second.rows[0][0]

    first, second = driven.drive(steps)
    assert first == second
    assert driven.marks() == {"a", "b", "c"}
    eventually(lambda: driven.open_transactions() == 0)


def test_what_follows_is_asked_for_when_the_commit_is_on_its_way(driven: Driven) -> None:
    asked: list[bool] = []
    committed = threading.Event()

    def following() -> Statements | None:
        # another connection sees the commit although nobody has read its answer yet
        with psycopg.connect(driven.url, autocommit=True) as other:
            for _ in range(1000):
                if other.execute("SELECT 1 FROM mark").fetchone():
                    committed.set()
                    break
        asked.append(committed.is_set())
        return None

    async def steps(db: LaneSession) -> None:
        await db.begin()
        await commit_then(db, (insert("a"),), following)

    driven.drive(steps)
    assert asked == [True]


def test_nothing_is_begun_behind_a_commit_through_a_pooler(driven: Driven) -> None:
    """It would give the session away at the answer to the COMMIT, with the next transaction in it."""
    require(missing_server("pgbouncer"))
    driven.app.close()
    driven.connect(through_pgbouncer(driven.url) + "?prepare=off")
    asked: list[str] = []

    def following() -> Statements:
        asked.append("next")
        return (insert("b"),)

    async def steps(db: LaneSession) -> None:
        await db.begin()
        await commit_then(db, (insert("a"),), following)
        await db.begin((insert("c"),))
        await db.commit()

    driven.drive(steps)
    assert asked == []
    assert driven.marks() == {"a", "c"}


MARKED = Statement("mark", "SAVEPOINT marked", {})
BACK = Statement("back", "ROLLBACK TO SAVEPOINT marked", {})
WRONG = Statement("wrong", "SELECT 1/0", {})


@pytest.mark.parametrize("ended", [False, True], ids=["failed", "ended before"])
def test_what_is_asked_behind_a_refused_commit_is_asked_of_its_own_transaction(
    driven: Driven, ended: bool
) -> None:
    """And never of the one that was begun behind it, which has a savepoint of that name as well."""
    answers: list[object] = []

    async def steps(db: LaneSession) -> None:
        await db.begin((insert("a"), MARKED))
        with suppress(StoreError):
            await db.execute(Statement("end", "ROLLBACK", {}) if ended else WRONG)
        with suppress(StoreError):
            await commit_then(db, (WRONG,), lambda: (insert("b"), MARKED))
        try:
            await db.execute(BACK)
        except StoreError as error:
            answers.append(error.fault)
        else:
            answers.append("the same")
        await db.rollback()
        await db.begin((insert("c"),))
        await db.commit()

    driven.drive(steps)
    assert answers == [Fault.GUARD if ended else "the same"]
    assert driven.marks() == {"c"}
    eventually(lambda: driven.open_transactions() == 0)


@pytest.mark.parametrize("other", ["begin", "wait", "rollback", "discard", "nothing"])
def test_any_other_step_gives_up_what_was_begun(driven: Driven, other: str) -> None:
    async def steps(db: LaneSession) -> None:
        await chained(db, insert("a"), (insert("ahead"),))
        if other == "begin":
            await db.begin((insert("other"),))
            await db.commit()
        elif other == "wait":
            await db.wait(0.0)
        elif other == "rollback":
            await db.rollback()
        elif other == "discard":
            db.discard()

    driven.drive(steps)
    assert driven.marks() == {"a"} | ({"other"} if other == "begin" else set())
    eventually(lambda: driven.open_transactions() == 0)
    driven.drive(chained, insert("again"), (insert("ahead"),))
    assert "again" in driven.marks()


REFUSED = [
    # by the statement, and by COMMIT itself
    Statement("refused", "INSERT INTO mark (id) VALUES (:id::int::text)", {"id": "no number"}),
    Statement("refused", "INSERT INTO mark (id, twin) VALUES (:id, 'x'), ('second', 'x')", {"id": "first"}),
]  # fmt: skip


@pytest.mark.parametrize("refused", REFUSED, ids=["statement", "commit"])
def test_behind_a_commit_that_is_refused_nothing_begins(driven: Driven, refused: Statement) -> None:
    following = (insert("ahead"),)

    async def steps(db: LaneSession) -> StoreError | None:
        error: StoreError | None = None
        await db.begin((insert("a"),))
        try:
            await commit_then(db, (refused,), lambda: following)
        except StoreError as refusal:
            error = refusal
            await db.rollback()
        await db.begin(following, user_code=True)
        await db.commit()
        return error

    error = driven.drive(steps)
    assert error is not None
    assert error.definite
    assert driven.marks() == {"ahead"}, "what follows is begun anew, in a transaction of its own"


def test_an_error_of_what_was_begun_is_its_own(driven: Driven) -> None:
    following = (insert("a"),)

    async def steps(db: LaneSession) -> StoreError | None:
        await db.begin()
        await commit_then(db, (insert("a"),), lambda: following)
        try:
            await db.begin(following, user_code=True)
        except StoreError as error:
            await db.rollback()
            return error
        return None

    error = driven.drive(steps)
    assert error is not None
    assert error.code == "23505"
    assert driven.marks() == {"a"}
    eventually(lambda: driven.open_transactions() == 0)


def test_a_statement_that_was_not_prepared_behind_a_refusal_is_prepared_later(
    driven: Driven,
) -> None:
    """Its Parse was skipped with the rest."""
    following = (Statement("other", "INSERT INTO mark (id) SELECT :id", {"id": "ahead"}),)

    async def steps(db: LaneSession) -> None:
        await db.begin()
        with suppress(StoreError):
            await commit_then(db, (REFUSED[0],), lambda: following)
        await db.rollback()
        for _ in range(2):
            await db.begin(following, user_code=True)
            await db.rollback()
        await db.begin(following, user_code=True)
        await db.commit()

    driven.drive(steps)
    assert driven.marks() == {"ahead"}


def test_a_commit_does_not_wait_for_what_is_begun_behind_it(driven: Driven) -> None:
    following = (insert("locked"),)
    order: list[str] = []
    with psycopg.connect(driven.url) as other:
        other.execute("INSERT INTO mark (id) VALUES ('locked')")

        async def steps(db: LaneSession) -> None:
            await db.begin()
            await commit_then(db, (insert("a"),), lambda: following)
            order.append("committed")
            # while the other one holds the id, which is given up here
            other.rollback()
            await db.begin(following, user_code=True)
            order.append("begun")
            await db.commit()

        driven.drive(steps)
    assert order == ["committed", "begun"]
    assert driven.marks() == {"a", "locked"}


@pytest.mark.parametrize("cut", ["before", "after"])
def test_a_commit_whose_answer_is_lost_is_in_doubt_and_what_follows_is_not(
    driven: Driven, cut: Cut
) -> None:
    following = (insert("ahead"),)

    async def steps(db: LaneSession) -> StoreError | None:
        await db.begin()
        try:
            await commit_then(db, (insert("a"),), lambda: following)
        except StoreError as error:
            db.discard()
            await db.begin(following, user_code=True)
            await db.commit()
            return error
        return None

    with Proxy(driven.url) as proxy:
        driven.connect(proxy.url)
        proxy.cut = cut
        error = driven.drive(steps)
        assert error is not None
        assert not error.definite
        assert error.fault is Fault.UNAVAILABLE
    assert driven.marks() == {"ahead"} | ({"a"} if cut == "after" else set())


@pytest.mark.parametrize("when", ["committed", "begun"])
def test_a_connection_that_dies_behind_the_commit_has_lost_only_what_was_begun(
    driven: Driven, when: str
) -> None:
    following = (insert("ahead"),)

    def kill() -> None:
        with psycopg.connect(driven.url, autocommit=True) as other:
            other.execute(
                "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity"
                " WHERE datname = current_database() AND pid <> pg_backend_pid()"
                " AND state = 'idle in transaction'"
            )

    async def steps(db: LaneSession) -> StoreError | None:
        await db.begin()
        await commit_then(db, (insert("a"),), lambda: following)
        try:
            if when == "committed":
                _eventually_idle(driven)
                kill()
                # its answer may be here already
                await db.begin(following, user_code=True)
            else:
                await db.begin(following, user_code=True)
                kill()
            await db.execute(insert("b"))
        except StoreError as error:
            await db.rollback()
            return error
        return None

    error = driven.drive(steps)
    assert error is not None
    assert error.definite
    assert error.fault is Fault.UNAVAILABLE
    assert driven.marks() == {"a"}


def _eventually_idle(driven: Driven) -> None:
    with psycopg.connect(driven.url, autocommit=True) as other:
        for _ in range(10_000):
            found = other.execute(
                "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()"
                " AND state = 'idle in transaction'"
            ).fetchone()
            if found and found[0]:
                return
    raise AssertionError("nothing was begun")
