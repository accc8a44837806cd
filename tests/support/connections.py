"""Every kind of connection that txbox takes, each as one row of `KINDS`, behind one blocking face."""

from __future__ import annotations

import asyncio
import inspect
import itertools
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    asynccontextmanager,
    contextmanager,
)
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

import pytest
import sqlalchemy as sa
from sqlalchemy import orm
from sqlalchemy.ext import asyncio as sa_async

from tests.support.databases import BY_NAME, Raw, missing_server, names, require, through_pgbouncer
from txbox.connections import borrow, open_database
from txbox.message import Message
from txbox.session import Result, Statement, blocking
from txbox.store.codec import Arrival, Columns
from txbox.store.inbox import InboxStore


def statement(sql: str, **params: Any) -> Statement:
    return Statement("test", sql, params)


@dataclass(frozen=True)
class Kind:
    """One way to give txbox a connection.

    Args:
        product: the name of its database in `tests.support.databases`.
        source: opens what App() takes, from a URL; a context manager, async for async objects.
        family: which object handlers get; see `do`.
    """

    name: str
    product: str
    source: Callable[[str], Any]
    is_async: bool
    family: str
    pooler: bool = False

    def __str__(self) -> str:
        return self.name

    @property
    def dialect(self) -> str:
        return BY_NAME[self.product].dialect

    @property
    def one_round_trip(self) -> bool:
        """Whether close and COMMIT are sent together."""
        on_psycopg = self.name.endswith(("-postgresql", "-psycopg"))
        return self.family == "psycopg" or (self.family == "sqlalchemy" and on_psycopg)


class Given:
    """A database opened in one way, in blocking calls: an async one runs on a loop of its own."""

    def __init__(self, kind: Kind, url: str, runner: asyncio.Runner) -> None:
        self.kind = kind
        self.url = url
        self.runner = runner
        self._source: Any = kind.source(url)
        self.database: Any = None

    def __enter__(self) -> Self:
        target = self.wait(
            self._source.__aenter__() if self.kind.is_async else self._source.__enter__()
        )
        if self.kind.family == "django":
            from txbox.connections.django import open_alias

            self.database = open_alias(target)
        else:
            self.database = open_database(target)
        self.target = target
        return self

    def __exit__(self, *error: object) -> None:
        if self.kind.is_async:
            self.wait(self.database.close_async())
            self.wait(self._source.__aexit__(None, None, None))
        else:
            self.database.close()
            self._source.__exit__(None, None, None)

    @property
    def store(self) -> InboxStore:
        return InboxStore(self.database.dialect, Columns())

    def wait(self, value: Any) -> Any:
        if not inspect.isawaitable(value):
            return value
        if not self.kind.is_async:
            assert inspect.iscoroutine(value)
            return blocking(value)

        async def waited() -> Any:
            return await value

        return self.runner.run(waited())

    def acquire(self) -> Held:
        connections = self.database.asynchronous if self.kind.is_async else self.database.sync
        assert connections is not None
        return Held(self, self.wait(connections.acquire()))


class Held:
    """A connection in hand, in blocking calls."""

    def __init__(self, given: Given, connection: Any) -> None:
        self.given = given
        self.connection = connection
        self._native: Any = None

    @property
    def native(self) -> Any:
        """The object that the handler gets, once a transaction: who asks again stands for the next call."""
        if self._native is None:
            self._native = self.connection.native
        return self._native

    def again(self) -> None:
        """The next call of a handler begins."""
        self._native = None

    def begin(self, *statements: Statement) -> list[Result]:
        self.again()
        results: list[Result] = self.given.wait(self.connection.begin(statements))
        return results

    def execute(self, given: Statement) -> Result:
        result: Result = self.given.wait(self.connection.execute(given))
        return result

    def commit(self, *statements: Statement) -> list[Result]:
        results: list[Result] = self.given.wait(self.connection.commit(statements))
        return results

    def rollback(self) -> None:
        self.given.wait(self.connection.rollback())

    def release(self) -> None:
        connections = (
            self.given.database.asynchronous
            if self.given.kind.is_async
            else self.given.database.sync
        )
        self.given.wait(connections.release(self.connection))

    def discard(self) -> None:
        if not self.given.kind.is_async:
            self.connection.discard()
            return

        async def discarded() -> None:
            before = asyncio.all_tasks()
            self.connection.discard()
            if closing := asyncio.all_tasks() - before:
                await asyncio.wait(closing)

        self.given.runner.run(discarded())

    @property
    def lost(self) -> bool:
        return bool(self.connection.lost)

    def do(self, sql: str) -> Any:
        """Run SQL as a handler does, on the object that it gets."""
        return self.given.wait(do(self.given.kind.family, self.native, sql))

    def claim(self, consumer: str, message_id: str) -> str:
        """BEGIN and claim an id, as the protocol does; returns the token for `close`."""
        store, token = self.given.store, f"{message_id}{'0' * 8}"
        arrival = Arrival(
            Message(id=message_id, topic="t", payload=b"{}"), message_id, b"\x01" * 32
        )
        statements = store.claim(
            consumer,
            [arrival],
            token=token,
            lock_timeout=timedelta(seconds=5),
            idle_s=60.0,
            keep=False,
        )
        self.begin(*statements)
        return token

    def close(self, consumer: str, message_id: str, token: str) -> None:
        """Close, complete and COMMIT."""
        store = self.given.store
        statements = [store.closing(token)]
        if store.dialect.has("complete"):
            statements.append(store.complete(consumer, [message_id], token=token, keep=False))
        self.commit(*statements)


def do(family: str, tx: Any, sql: str) -> Any:
    """Run one statement on a native object; awaitable for the async ones."""
    if family in ("psycopg", "sqlite3", "asyncpg", "aiosqlite"):
        return tx.execute(sql)
    if family == "sqlalchemy":
        return tx.execute(sa.text(sql))
    if family == "asyncmy":

        async def run() -> None:
            async with tx.cursor() as cursor:
                await cursor.execute(sql)

        return run()
    with tx.cursor() as cursor:
        cursor.execute(sql)
    return None


# -- sources: what App() is given ----------------------------------------------------------------


@contextmanager
def url_itself(url: str) -> Iterator[Any]:
    yield url


@asynccontextmanager
async def url_async(url: str) -> AsyncIterator[Any]:
    yield url


@asynccontextmanager
async def url_pooled(url: str) -> AsyncIterator[Any]:
    yield through_pgbouncer(url) + "?prepare=off"


@asynccontextmanager
async def asyncpg_url(url: str) -> AsyncIterator[Any]:
    yield url.replace("postgresql:", "postgresql+asyncpg:")


@asynccontextmanager
async def asyncpg_pooled(url: str) -> AsyncIterator[Any]:
    yield through_pgbouncer(url).replace("postgresql:", "postgresql+asyncpg:") + "?prepare=off"


@asynccontextmanager
async def asyncpg_pool(url: str) -> AsyncIterator[Any]:
    import asyncpg

    async with asyncpg.create_pool(url, min_size=1, max_size=3) as pool:
        yield pool


def psycopg_pool(**connection: Any) -> Callable[[str], AbstractContextManager[Any]]:
    @contextmanager
    def source(url: str) -> Iterator[Any]:
        from psycopg_pool import ConnectionPool

        with ConnectionPool(url, min_size=1, max_size=3, open=True, kwargs=connection) as pool:
            yield pool

    return source


def psycopg_async_pool(**connection: Any) -> Callable[[str], AbstractAsyncContextManager[Any]]:
    @asynccontextmanager
    async def source(url: str) -> AsyncIterator[Any]:
        from psycopg_pool import AsyncConnectionPool

        async with AsyncConnectionPool(
            url, min_size=1, max_size=3, open=False, kwargs=connection
        ) as pool:
            yield pool

    return source


def engine_url(url: str, driver: str) -> str:
    parts = urlsplit(url)
    return f"{parts.scheme}+{driver}{url.removeprefix(parts.scheme)}"


def engine(driver: str, *, session: bool = False, **options: Any) -> Callable[[str], Any]:
    @contextmanager
    def source(url: str) -> Iterator[Any]:
        made = sa.create_engine(engine_url(url, driver), **options)
        try:
            yield orm.sessionmaker(made) if session else made
        finally:
            made.dispose()

    return source


def async_engine(driver: str, *, session: bool = False, **options: Any) -> Callable[[str], Any]:
    @asynccontextmanager
    async def source(url: str) -> AsyncIterator[Any]:
        made = sa_async.create_async_engine(engine_url(url, driver), **options)
        try:
            yield sa_async.async_sessionmaker(made) if session else made
        finally:
            await made.dispose()

    return source


@contextmanager
def django_alias(url: str) -> Iterator[Any]:
    from tests.support.django_project import configured

    with configured(url) as alias:
        yield alias


def _kinds() -> Iterator[Kind]:
    pg, maria, my, lite = "postgresql", "mariadb", "mysql", "sqlite"
    yield Kind("psycopg-url", pg, url_itself, False, "psycopg")
    yield Kind("psycopg-pool", pg, psycopg_pool(), False, "psycopg")
    yield Kind("psycopg-pool-autocommit", pg, psycopg_pool(autocommit=True), False, "psycopg")
    yield Kind("psycopg-async-url", pg, url_async, True, "psycopg")
    yield Kind("psycopg-async-pool", pg, psycopg_async_pool(), True, "psycopg")
    yield Kind(
        "psycopg-async-pool-autocommit", pg, psycopg_async_pool(autocommit=True), True, "psycopg"
    )
    yield Kind("psycopg-pgbouncer", pg, url_pooled, True, "psycopg", pooler=True)
    yield Kind("asyncpg-url", pg, asyncpg_url, True, "asyncpg")
    yield Kind("asyncpg-pool", pg, asyncpg_pool, True, "asyncpg")
    yield Kind("asyncpg-pgbouncer", pg, asyncpg_pooled, True, "asyncpg", pooler=True)
    yield Kind("sqlite3", lite, url_itself, False, "sqlite3")
    yield Kind("aiosqlite", lite, url_async, True, "aiosqlite")
    yield Kind("pymysql", maria, url_itself, False, "pymysql")
    yield Kind("asyncmy", maria, url_async, True, "asyncmy")
    yield Kind("pymysql-mysql", my, url_itself, False, "pymysql")
    yield Kind("asyncmy-mysql", my, url_async, True, "asyncmy")
    for product, driver, async_drivers in (
        (pg, "psycopg", ("psycopg", "asyncpg")),
        (maria, "pymysql", ("asyncmy",)),
        (my, "pymysql", ("asyncmy",)),
        (lite, "pysqlite", ("aiosqlite",)),
    ):
        yield Kind(f"engine-{product}", product, engine(driver), False, "sqlalchemy")
        yield Kind(
            f"sessionmaker-{product}", product, engine(driver, session=True), False, "sqlalchemy"
        )
        yield Kind(
            f"engine-autocommit-{product}",
            product,
            engine(driver, isolation_level="AUTOCOMMIT"),
            False,
            "sqlalchemy",
        )
        for async_driver in async_drivers:
            name = f"{async_driver}-mysql" if product == my else async_driver
            yield Kind(
                f"async-engine-{name}", product, async_engine(async_driver), True, "sqlalchemy"
            )
            yield Kind(
                f"async-sessionmaker-{name}",
                product,
                async_engine(async_driver, session=True),
                True,
                "sqlalchemy",
            )
        yield Kind(f"django-{product}", product, django_alias, False, "django")


KINDS: Sequence[Kind] = tuple(kind for kind in _kinds() if kind.product in names())


# -- the caller's own transactions, for borrow ---------------------------------------------------


@dataclass
class Own:
    """A connection of the caller's in its own transaction, in blocking calls."""

    tx: Any
    wait: Callable[[Any], Any]
    commit: Callable[[], Any]
    rollback: Callable[[], Any]
    close: Callable[[], Any]
    is_async: bool = False
    executor: Any = field(default=None)

    def execute(self, given: Statement) -> Result:
        if self.executor is None:
            self.executor = borrow(self.tx, is_async=True) if self.is_async else borrow(self.tx)
        result: Result = self.wait(self.executor.execute(given))
        return result


_numbers = itertools.count(1)


@pytest.fixture(scope="session")
def shared_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], str]]:
    """The URL of the one database of a product, with txbox's tables and an `account` table."""
    made: dict[str, str] = {}

    def url(product: str) -> str:
        if product not in made:
            kind = BY_NAME[product]
            require(kind.missing())
            folder: Path = tmp_path_factory.mktemp(product)
            made[product] = kind.create(folder, schema=True)
            with Raw(made[product]) as raw:
                raw.execute(
                    "CREATE TABLE account (id integer PRIMARY KEY, balance integer NOT NULL)"
                )
        return made[product]

    yield url
    for product, each in made.items():
        BY_NAME[product].drop(each)


@pytest.fixture
def given(request: pytest.FixtureRequest, shared_url: Callable[[str], str]) -> Iterator[Given]:
    """A database opened in the way that the test's parameter says."""
    kind: Kind = request.param
    if kind.pooler:
        require(missing_server("pgbouncer"))
    url = shared_url(kind.product)
    with asyncio.Runner() as runner, Given(kind, url, runner) as opened:
        yield opened


@pytest.fixture
def db(given: Given) -> Iterator[Raw]:
    """The tests' own view of the same database, in autocommit."""
    with Raw(given.url) as view:
        yield view


@pytest.fixture
def number() -> int:
    """A number that no other test has: for rows, ids and consumers."""
    return next(_numbers) * 100
