"""How many round trips the common things cost, counted on the wire, by each driver of a server."""

from __future__ import annotations

import asyncio
import select
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeAlias

import psycopg
import psycopg_pool
import pytest
import sqlalchemy as sa

from tests.support.connections import engine_url, statement
from tests.support.databases import NewDatabase
from tests.support.django_project import configured
from tests.support.proxy import Cut, Proxy
from tests.support.shop import TOPIC
from tests.support.waiting import eventually
from txbox import App, Message, Outbox, Outcome, RetryPolicy
from txbox.errors import StoreError, StoreUnavailable
from txbox.session import Session, blocking, drive, drive_async
from txbox.store import leases
from txbox.store.outbox import LeasedPage, OutboxStore, RelayScope, Staged

FAR = timedelta(days=1)

# duplicate: without the handler · failure: the first of a message · lease: of due rows, none there
# look: of the relay, none there · turn: of the relay with a message
TRIPS = {
    "psycopg": {"fresh": 2, "duplicate": 2, "failure": 5, "lease": 1, "look": 2, "turn": 3},
    "psycopg async": {"fresh": 2, "duplicate": 2, "failure": 5, "lease": 1, "look": 2, "turn": 3},
    "psycopg pool": {"fresh": 2, "duplicate": 2, "failure": 5, "lease": 1, "look": 2, "turn": 3},
    "sqlalchemy": {"fresh": 2, "duplicate": 2, "failure": 5, "lease": 1, "look": 2, "turn": 3},
    "django": {"fresh": 6, "duplicate": 6, "failure": 13, "lease": 6, "look": 6, "turn": 12},
    "asyncpg": {"fresh": 5, "duplicate": 5, "failure": 11, "lease": 5, "look": 4, "turn": 9},
    "pymysql": {"fresh": 9, "duplicate": 7, "failure": 16, "lease": 3, "look": 3, "turn": 8},
}


@contextmanager
def target_of(driver: str, url: str) -> Iterator[Any]:
    if driver == "psycopg pool":
        with psycopg_pool.ConnectionPool(url, min_size=1, max_size=1) as pool:
            yield pool
    elif driver == "sqlalchemy":
        engine = sa.create_engine(engine_url(url, "psycopg"))
        yield engine
        engine.dispose()
    elif driver == "django":
        # otherwise it connects anew for each
        with configured(url, CONN_MAX_AGE=None) as alias:
            yield alias
    elif driver == "asyncpg":
        yield url.replace("postgresql:", "postgresql+asyncpg:", 1)
    else:
        yield url


def app_on(driver: str, target: Any) -> App:
    return App(django=target) if driver == "django" else App(target)


Operation: TypeAlias = Callable[[Session], Coroutine[Any, Any, None]]


async def run(app: App, operation: Operation, *, is_async: bool) -> None:
    if is_async:
        assert app.database.asynchronous is not None
        await drive_async(app.database.asynchronous, operation)
    else:
        assert app.database.sync is not None
        drive(app.database.sync, operation)


class Counted:
    """An app behind a proxy, and what its steps cost."""

    def __init__(self, app: App, proxy: Proxy, *, is_async: bool) -> None:
        self._app, self._proxy, self._is_async = app, proxy, is_async
        self._outbox = OutboxStore(app.store.dialect, app.store.columns)
        self._number = 0

        def handle(message: Message[Any], _tx: Any) -> None:
            if message.body == "fails":
                raise ValueError("no")

        async def handle_async(message: Message[Any], tx: Any) -> None:
            handle(message, tx)

        register: Any = app.handler(TOPIC, consumer="billing", retry=RetryPolicy(base=FAR, cap=FAR))
        register(handle_async if is_async else handle)

    async def trips(self, step: str) -> int:
        before = self._proxy.trips
        await getattr(self, step)()
        return self._proxy.trips - before

    async def fresh(self, payload: bytes = b"{}", expected: Outcome = Outcome.PROCESSED) -> None:
        self._number += 1
        await self._deliver(payload, expected)

    async def duplicate(self) -> None:
        await self._deliver(b"{}", Outcome.DUPLICATE)

    async def failure(self) -> None:
        await self.fresh(b'"fails"', Outcome.FAILED)

    async def _deliver(self, payload: bytes, expected: Outcome) -> None:
        message = Message[Any](id=str(self._number), topic=TOPIC, payload=payload)
        app = self._app
        outcome = await app.process_async(message) if self._is_async else app.process(message)
        assert outcome is expected

    async def lease(self) -> None:
        app = self._app

        async def leased(db: Session) -> None:
            assert not await leases.lease(
                db, app.store, "billing", token="t", limit=1, lease=app.lease, suspect=False
            )

        await self.run(leased)

    async def look(self) -> None:
        assert await self._leased() == []

    async def turn(self) -> None:
        """A message without a key is staged elsewhere, leased, and marked as sent."""
        ids = [row.id for row in await self._leased()]
        assert len(ids) == 1
        sent = self._outbox.sent(ids, token="t", keep=False)

        async def mark(db: Session) -> None:
            assert (await db.together((sent,)))[0].count == 1

        await self.run(mark)

    async def _leased(self) -> Sequence[Staged]:
        found = LeasedPage()

        async def leased(db: Session) -> None:
            look = await self._outbox.lease(
                db, token="t", limit=10, payload_bytes=1000, lease_s=60, scope=RelayScope(route="r")
            )
            found.rows += look.rows

        await self.run(leased)
        return found.rows

    async def run(self, operation: Operation) -> None:
        await run(self._app, operation, is_async=self._is_async)


@pytest.mark.parametrize("driver", TRIPS)
def test_round_trips(
    driver: str, new_database: NewDatabase, plain_connection: Callable[[str], Any]
) -> None:
    is_async = driver in ("psycopg async", "asyncpg")
    url = new_database("mysql" if driver == "pymysql" else "postgresql")
    with Proxy(url) as proxy, target_of(driver, proxy.url) as target, app_on(driver, target) as app:
        counted = Counted(app, proxy, is_async=is_async)

        async def measured() -> dict[str, int]:
            trips: dict[str, int] = {}
            # the first round connects and prepares
            for _ in range(2):
                with plain_connection(url) as tx:
                    Outbox().stage(tx, "t", {})
                    tx.commit()
                for step in ("turn", "look", "lease", "fresh", "duplicate", "failure"):
                    trips[step] = await counted.trips(step)
            if is_async:
                await app.close_async()
            return trips

        assert (asyncio.run(measured()) if is_async else blocking(measured())) == TRIPS[driver]


# those that send BEGIN, statements and COMMIT together
PIPELINES = [driver for driver, trips in TRIPS.items() if trips["lease"] == 1]
COUNTS = statement("INSERT INTO counted VALUES (1)")


def run_all(driver: str, url: str, *operations: Operation) -> None:
    """Run operations, each in a session of its own, on the same connection as long as it lives."""
    is_async = driver == "psycopg async"
    with target_of(driver, url) as target, App(target) as app:

        async def ran() -> None:
            for operation in operations:
                await run(app, operation, is_async=is_async)
            if is_async:
                await app.close_async()

        if is_async:
            asyncio.run(ran())
        else:
            blocking(ran())


def counts(raw: Any) -> int:
    found: int = raw.execute("SELECT count(*) FROM counted").fetchone()[0]
    return found


async def count(db: Session) -> None:
    await db.together((COUNTS,))


@pytest.fixture
def counting(new_database: NewDatabase) -> Iterator[tuple[str, Any]]:
    """A database with a table to count in, and a connection to it."""
    url = new_database("postgresql")
    with psycopg.connect(url, autocommit=True) as raw:
        raw.execute("CREATE TABLE counted (n integer)")
        yield url, raw


@pytest.mark.parametrize("driver", PIPELINES)
def test_where_the_end_is_already_there_no_commit_is_in_doubt(
    driver: str, counting: tuple[str, Any]
) -> None:
    """The server said that it ends the connection, and closed it, while it was idle."""
    url, raw = counting
    ended: list[Any] = []

    async def used(db: Session) -> None:
        await db.begin((COUNTS,))
        assert db.connection is not None
        native = db.connection.native
        pgconn = getattr(native, "connection", native)
        pgconn = getattr(pgconn, "driver_connection", pgconn).pgconn
        ended.append((pgconn.backend_pid, pgconn.socket))
        await db.commit()

    async def end(_: Session) -> None:
        ((process, descriptor),) = ended
        raw.execute("SELECT pg_terminate_backend(%s)", (process,))
        end = select.poll()
        end.register(descriptor, select.POLLRDHUP)
        eventually(lambda: end.poll(0) != [], "the end")

    run_all(driver, url, used, end, count)
    assert counts(raw) == 2


@pytest.mark.parametrize("cut", ["before", "after"])
@pytest.mark.parametrize("driver", PIPELINES)
def test_a_commit_in_doubt_is_not_sent_again(
    driver: str, cut: Cut, counting: tuple[str, Any]
) -> None:
    url, raw = counting
    with Proxy(url) as proxy:

        async def lose(db: Session) -> None:
            proxy.cut = cut
            with pytest.raises(StoreUnavailable) as lost:
                await count(db)
            assert not lost.value.definite

        run_all(driver, proxy.url, count, lose, count)
        assert proxy.cuts == 1
    assert counts(raw) == (3 if cut == "after" else 2)


@pytest.mark.parametrize("driver", PIPELINES)
def test_a_refused_statement_of_one_trip_is_rolled_back(
    driver: str, counting: tuple[str, Any]
) -> None:
    url, raw = counting

    async def refuse(db: Session) -> None:
        with pytest.raises(StoreError) as refused:
            await db.together((COUNTS, statement("SELECT 1/0"), COUNTS))
        assert refused.value.code == "22012"
        assert refused.value.definite
        await db.rollback()
        await count(db)

    run_all(driver, url, refuse, count)
    assert counts(raw) == 2


@pytest.mark.parametrize("driver", PIPELINES)
def test_a_role_that_was_left_behind_refuses_no_trip(
    driver: str, counting: tuple[str, Any]
) -> None:
    """Another connection shows whether the right is really missing."""
    url, raw = counting

    async def leave(db: Session) -> None:
        # in words that no other test uses: what a session sends is never searched for settings again
        await db.begin((statement("SET ROLE pg_read_all_data /* left behind */"),))
        await db.commit()

    run_all(driver, url, leave, count)
    assert counts(raw) == 1
