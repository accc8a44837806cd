"""Inbox.accept in the caller's own transaction: nothing is begun, committed or rolled back for the caller."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from datetime import timedelta
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy import event, orm
from sqlalchemy.ext import asyncio as sa_async

from tests.support.connections import engine_url
from tests.support.databases import NewDatabase, Raw, names
from tests.support.django_project import configured
from txbox import App, Message
from txbox.connections import borrow
from txbox.errors import ConfigurationError, SchemaError, UnusableMessage
from txbox.inbox import Inbox
from txbox.outbox import Outbox
from txbox.session import run
from txbox.store.codec import Arrival, Columns
from txbox.store.inbox import InboxStore

# -- callers: what is passed as tx, its commit and its rollback ----------------------------------


@contextmanager
def psycopg_caller(url: str) -> Iterator[tuple[Any, Any, Any]]:
    import psycopg

    with psycopg.connect(url) as connection:
        yield connection, connection.commit, connection.rollback


@contextmanager
def connection_caller(url: str) -> Iterator[tuple[Any, Any, Any]]:
    engine = sa.create_engine(engine_url(url, DRIVERS[url.partition(":")[0]]))
    with engine.connect() as connection:
        yield connection, connection.commit, connection.rollback
    engine.dispose()


@contextmanager
def session_caller(url: str) -> Iterator[tuple[Any, Any, Any]]:
    engine = sa.create_engine(engine_url(url, DRIVERS[url.partition(":")[0]]))
    with orm.Session(engine) as session:
        yield session, session.commit, session.rollback
    engine.dispose()


@contextmanager
def scoped_caller(url: str) -> Iterator[tuple[Any, Any, Any]]:
    engine = sa.create_engine(engine_url(url, DRIVERS[url.partition(":")[0]]))
    session = orm.scoped_session(orm.sessionmaker(engine))
    yield session, session.commit, session.rollback
    session.remove()
    engine.dispose()


@contextmanager
def django_caller(url: str) -> Iterator[tuple[Any, Any, Any]]:
    from django.db import connections, transaction

    with configured(url) as alias:
        transaction.set_autocommit(False, using=alias)
        made = connections[alias]
        yield made, made.commit, made.rollback
        made.rollback()
        transaction.set_autocommit(True, using=alias)


@asynccontextmanager
async def async_psycopg_caller(url: str) -> AsyncIterator[tuple[Any, Any, Any]]:
    import psycopg

    async with await psycopg.AsyncConnection.connect(url) as connection:
        yield connection, connection.commit, connection.rollback


@asynccontextmanager
async def asyncpg_caller(url: str) -> AsyncIterator[tuple[Any, Any, Any]]:
    import asyncpg

    connection = await asyncpg.connect(url)
    transaction = connection.transaction()
    await transaction.start()

    async def again() -> Any:
        # the test begins anew after each end, as `async with own.transaction()` would
        nonlocal transaction
        transaction = connection.transaction()
        await transaction.start()

    async def commit() -> None:
        await transaction.commit()
        await again()

    async def rollback() -> None:
        await transaction.rollback()
        await again()

    yield connection, commit, rollback
    await transaction.rollback()
    await connection.close()


@asynccontextmanager
async def async_connection_caller(url: str) -> AsyncIterator[tuple[Any, Any, Any]]:
    engine = sa_async.create_async_engine(engine_url(url, ASYNC_DRIVERS[url.partition(":")[0]]))
    async with engine.connect() as connection:
        yield connection, connection.commit, connection.rollback
    await engine.dispose()


@asynccontextmanager
async def async_session_caller(url: str) -> AsyncIterator[tuple[Any, Any, Any]]:
    engine = sa_async.create_async_engine(engine_url(url, ASYNC_DRIVERS[url.partition(":")[0]]))
    async with sa_async.AsyncSession(engine) as session:
        yield session, session.commit, session.rollback
    await engine.dispose()


@asynccontextmanager
async def async_scoped_caller(url: str) -> AsyncIterator[tuple[Any, Any, Any]]:
    engine = sa_async.create_async_engine(engine_url(url, ASYNC_DRIVERS[url.partition(":")[0]]))
    maker = sa_async.async_sessionmaker(engine)
    session = sa_async.async_scoped_session(maker, asyncio.current_task)
    yield session, session.commit, session.rollback
    await session.remove()
    await engine.dispose()


DRIVERS = {"postgresql": "psycopg", "mysql": "pymysql", "sqlite": "pysqlite"}
ASYNC_DRIVERS = {"postgresql": "asyncpg", "mysql": "asyncmy", "sqlite": "aiosqlite"}
PRODUCTS = names()
SYNC: list[tuple[str, Callable[[str], Any]]] = [
    *((product, psycopg_caller) for product in names("postgresql")),
    *(
        (product, caller)
        for product in PRODUCTS
        for caller in (connection_caller, session_caller, scoped_caller, django_caller)
    ),
]
ASYNC: list[tuple[str, Callable[[str], Any]]] = [
    *(
        (product, caller)
        for product in names("postgresql")
        for caller in (async_psycopg_caller, asyncpg_caller)
    ),
    *(
        (product, caller)
        for product in PRODUCTS
        for caller in (async_connection_caller, async_session_caller, async_scoped_caller)
    ),
]


def _ids(cases: list[tuple[str, Callable[[str], Any]]]) -> list[str]:
    return [f"{caller.__name__.removesuffix('_caller')}-{product}" for product, caller in cases]


def row_count(raw: Raw, consumer: str) -> int:
    return int(raw.value("SELECT count(*) FROM txbox_inbox WHERE consumer = ?", (consumer,)))


@pytest.mark.parametrize(("product", "caller"), SYNC, ids=_ids(SYNC))
def test_accept_leaves_the_callers_transaction_to_the_caller(
    product: str, caller: Callable[[str], Any], shared_url: Callable[[str], str], number: int
) -> None:
    url, inbox = shared_url(product), Inbox(consumer=f"b{number}")
    with Raw(url) as raw, caller(url) as (tx, commit, rollback):
        assert inbox.accept(tx, "m1", payload=b"{}")
        assert not inbox.accept(tx, "m1", payload=b"{}")
        assert row_count(raw, f"b{number}") == 0
        rollback()
        assert row_count(raw, f"b{number}") == 0
        accepted = inbox.accept(tx, "m1", payload=b"{}")
        assert accepted
        inbox.keep_result(tx, accepted, b'"paid"')
        commit()
        assert row_count(raw, f"b{number}") == 1
        again = inbox.accept(tx, "m1", payload=b"{}")
        assert not again
        assert inbox.result(tx, again) == b'"paid"'
        rollback()
        other = inbox.accept(tx, "m2")
        assert inbox.result(tx, other) is None
        with pytest.raises(ConfigurationError, match="NUL"):
            inbox.keep_result(tx, other, b"\0")
        rollback()


def test_one_message_is_written_as_each_of_many(
    database_url: str,
    plain_connection: Callable[[str], AbstractContextManager[Any]],
    raw: Callable[[str], Raw],
) -> None:
    """By `accept`, and with its payload as effects and stored messages are."""
    messages = [
        Message(
            topic="orders", id=f"m{number}", type="paid", key="k", sequence=7, payload=b"{}",
            headers=[("a", "1")], content_type="x/y", origin={"offset": 1},
        )
        for number in range(3)
    ]  # fmt: skip
    arrivals = [Arrival(message, str(message.id), b"h" * 32) for message in messages]
    inbox = Inbox(consumer="accepts")
    with plain_connection(database_url) as tx:
        inbox.accept_many(tx, messages[:1])
        inbox.accept_many(tx, messages[1:])
        db = borrow(tx)
        store = InboxStore(db.dialect, Columns())
        for some in (arrivals[:1], arrivals[1:]):
            run(db, store.store, "stores", some, token="t", delay_s=3600.0)
        tx.commit()
    found = raw(database_url).rows(
        "SELECT consumer, topic, type, txbox_inbox.key, sequence, status, payload_hash, content_type, headers, origin, "
        "payload, has_payload, processed_at IS NOT NULL, next_attempt_at > received_at "
        "FROM txbox_inbox ORDER BY consumer, message_id"
    )
    (accepted, *others), (stored, *rest) = found[:3], found[3:]
    assert others == [accepted] * 2
    assert None not in accepted[:7]
    assert rest == [stored] * 2
    assert None not in stored


@pytest.mark.parametrize("count", [1, 2])
def test_what_is_accepted_is_durable_a_duplicate_too(
    postgresql_url: str, plain_connection: Callable[[str], AbstractContextManager[Any]], count: int
) -> None:
    """A duplicate is acknowledged on the word of a row that may not be on disk yet."""
    messages = [Message(topic="orders", id=f"m{number}") for number in range(count)]
    inbox = Inbox(consumer="billing")
    with plain_connection(postgresql_url) as tx:
        for fresh in (True, False):
            tx.execute("SET LOCAL synchronous_commit = off")
            accepted = inbox.accept_many(tx, messages)
            assert list(map(bool, accepted)) == [fresh] * count
            assert tx.execute("SHOW synchronous_commit").fetchone() == ("on",)
            tx.commit()


@pytest.mark.parametrize(("product", "caller"), ASYNC, ids=_ids(ASYNC))
def test_accept_async_leaves_the_callers_transaction_to_the_caller(
    product: str, caller: Callable[[str], Any], shared_url: Callable[[str], str], number: int
) -> None:
    url, inbox = shared_url(product), Inbox(consumer=f"b{number}")

    async def run(raw: Raw) -> None:
        async with caller(url) as (tx, commit, rollback):
            assert await inbox.accept_async(tx, "m1", payload=b"{}")
            assert not await inbox.accept_async(tx, "m1", payload=b"{}")
            assert row_count(raw, f"b{number}") == 0
            await rollback()
            assert row_count(raw, f"b{number}") == 0
            accepted = await inbox.accept_async(tx, "m1", payload=b"{}")
            assert accepted
            await inbox.keep_result_async(tx, accepted, b'"paid"')
            await commit()
            assert row_count(raw, f"b{number}") == 1
            again = await inbox.accept_async(tx, "m1", payload=b"{}")
            assert not again
            assert await inbox.result_async(tx, again) == b'"paid"'
            await rollback()

    with Raw(url) as raw:
        asyncio.run(run(raw))


@pytest.mark.parametrize("unusable", [None, "", "a\0b"])
def test_message_without_a_usable_id_is_refused_and_can_be_set_aside(
    unusable: str | None, database_url: str, raw: Callable[[str], Raw]
) -> None:
    inbox, message = Inbox(consumer="billing"), Message(id=unusable, topic="t", payload=b"one")
    with App(database_url) as app:
        with pytest.raises(UnusableMessage), app.transaction() as tx:
            inbox.accept(tx, message)
        with app.transaction() as tx:
            inbox.quarantine(tx, message)
            inbox.quarantine(tx, unusable, payload=b"two", topic="t")
    kept = raw(database_url).rows("SELECT payload, reason FROM txbox_quarantine ORDER BY payload")
    assert [row[0] for row in kept] == [b"one", b"two"]
    assert all("id" in row[1] and "known" not in row[1] for row in kept)
    assert all("handler" not in row[1] for row in kept)


@pytest.mark.parametrize(
    ("options", "known", "says"),
    [
        ({}, {"topic": "t" * 2000}, "The topic has more than"),
        ({"payload_hash": "json"}, {"payload": b"\xff"}, "payload_hash= raised"),
    ],
    ids=["text", "payload"],
)
def test_what_is_set_aside_keeps_the_id_it_has_and_the_reason(
    options: Any, known: dict[str, Any], says: str, database_url: str, raw: Callable[[str], Raw]
) -> None:
    inbox = Inbox(consumer="billing", **options)
    with App(database_url) as app:
        with pytest.raises(UnusableMessage, match=says), app.transaction() as tx:
            inbox.accept(tx, "m1", **known)
        with app.transaction() as tx:
            inbox.quarantine(tx, "m1", **known)
    ((kept, reason),) = raw(database_url).rows("SELECT message_id, reason FROM txbox_quarantine")
    assert (kept.decode() if isinstance(kept, bytes) else kept) == "m1"
    assert reason.startswith(says)


def test_without_an_id_only_equal_messages_share_a_row(
    database_url: str, raw: Callable[[str], Raw]
) -> None:
    inbox = Inbox(consumer="billing")
    messages: list[dict[str, Any]] = [
        {"key": "a"},  # two tombstones differ by nothing but their key
        {"key": "b"},
        {"payload": b"{}"},
        {"payload": b"{}", "type": "paid"},
        {"payload": b"{}", "headers": [("tenant", "1")]},
        {"payload": b"{}", "headers": [("tenant", "2")]},
        {"key": "a"},
    ]
    with App(database_url) as app:
        for known in messages:
            with app.transaction() as tx:
                inbox.quarantine(tx, Message(topic="t", **known))
    seen = raw(database_url).rows("SELECT seen FROM txbox_quarantine ORDER BY seen")
    assert [count for (count,) in seen] == [1] * 5 + [2]


@pytest.mark.parametrize(("product", "caller"), SYNC, ids=_ids(SYNC))
def test_without_its_tables_the_error_has_the_command(
    product: str, caller: Callable[[str], Any], new_database: NewDatabase
) -> None:
    """The first thing that somebody meets who has not run it yet."""
    with caller(new_database(product, schema=False)) as (tx, _, rollback):
        for write in (
            lambda: Inbox(consumer="b").accept(tx, "m1"),
            lambda: Inbox(consumer="b").accept(tx, "m1", timeout=timedelta(seconds=1)),
            lambda: Inbox(consumer="b").quarantine(tx, "m1"),
            lambda: Outbox().stage(tx, "out", b"{}"),
        ):
            with pytest.raises(SchemaError, match="run `txbox init`"):
                write()
            rollback()


@pytest.mark.parametrize(("product", "caller"), ASYNC, ids=_ids(ASYNC))
def test_without_its_tables_the_async_error_has_the_command(
    product: str, caller: Callable[[str], Any], new_database: NewDatabase
) -> None:
    async def run() -> None:
        async with caller(new_database(product, schema=False)) as (tx, _, rollback):
            with pytest.raises(SchemaError, match="run `txbox init`"):
                await Inbox(consumer="b").accept_async(tx, "m1")
            await rollback()

    asyncio.run(run())


@pytest.mark.parametrize(("product", "caller"), SYNC, ids=_ids(SYNC))
def test_a_sync_object_is_refused_by_the_async_verb(
    product: str, caller: Callable[[str], Any], shared_url: Callable[[str], str]
) -> None:
    with (
        caller(shared_url(product)) as (tx, _, _),
        pytest.raises(ConfigurationError, match="is sync"),
    ):
        borrow(tx, is_async=True)


@pytest.mark.parametrize(("product", "caller"), ASYNC, ids=_ids(ASYNC))
def test_an_async_object_is_refused_by_the_sync_verb(
    product: str, caller: Callable[[str], Any], shared_url: Callable[[str], str]
) -> None:
    async def run() -> None:
        async with caller(shared_url(product)) as (tx, _, _):
            with pytest.raises(ConfigurationError, match="is async"):
                borrow(tx)

    asyncio.run(run())


# -- objects that commit each statement by themselves --------------------------------------------


@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("session", [False, True], ids=["connection", "session"])
def test_sqlalchemy_in_autocommit_is_refused(
    product: str, session: bool, shared_url: Callable[[str], str]
) -> None:
    url = shared_url(product)
    engine = sa.create_engine(
        engine_url(url, DRIVERS[url.partition(":")[0]]), isolation_level="AUTOCOMMIT"
    )
    opened = orm.Session(engine) if session else engine.connect()
    with opened as connection, pytest.raises(ConfigurationError, match="autocommit"):
        borrow(connection)
    engine.dispose()


@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("session", [False, True], ids=["connection", "session"])
def test_async_sqlalchemy_in_autocommit_is_refused(
    product: str, session: bool, shared_url: Callable[[str], str], number: int
) -> None:
    url = shared_url(product)

    async def run() -> None:
        engine = sa_async.create_async_engine(
            engine_url(url, ASYNC_DRIVERS[url.partition(":")[0]]), isolation_level="AUTOCOMMIT"
        )
        async with sa_async.AsyncSession(engine) if session else engine.connect() as connection:
            with pytest.raises(ConfigurationError, match="autocommit"):
                await Inbox(consumer=f"b{number}").accept_async(connection, "m1")
        await engine.dispose()

    asyncio.run(run())


def test_a_sqlite_engine_that_sends_begin_itself_is_taken(
    shared_url: Callable[[str], str], number: int
) -> None:
    """SQLAlchemy's own recipe runs the driver in autocommit and emits BEGIN in an event."""
    engine = sa.create_engine(engine_url(shared_url("sqlite"), "pysqlite"))

    @event.listens_for(engine, "connect")
    def connected(dbapi_connection: Any, record: Any) -> None:
        dbapi_connection.isolation_level = None

    @event.listens_for(engine, "begin")
    def begun(connection: sa.Connection) -> None:
        connection.exec_driver_sql("BEGIN")

    with engine.begin() as connection:
        assert Inbox(consumer=f"b{number}").accept(connection, "m1")
    engine.dispose()
    with Raw(shared_url("sqlite")) as raw:
        assert row_count(raw, f"b{number}") == 1


def test_asyncpg_outside_a_transaction_is_refused(shared_url: Callable[[str], str]) -> None:
    import asyncpg

    async def run() -> None:
        connection = await asyncpg.connect(shared_url("postgresql"))
        with pytest.raises(ConfigurationError, match="autocommit"):
            borrow(connection, is_async=True)
        await connection.close()

    asyncio.run(run())


@pytest.mark.parametrize("product", PRODUCTS)
def test_django_outside_atomic_is_refused(
    product: str, shared_url: Callable[[str], str], number: int
) -> None:
    from django.db import connections, transaction

    with configured(shared_url(product)) as alias:
        with pytest.raises(ConfigurationError, match="autocommit"):
            borrow(connections[alias])
        with transaction.atomic(using=alias):
            assert Inbox(consumer=f"b{number}").accept(connections[alias], "m1")


def test_djangos_default_connection_is_taken(shared_url: Callable[[str], str]) -> None:
    """`django.db.connection` is a proxy, not a connection."""
    from django.db import connection, transaction

    with configured(shared_url("sqlite")), transaction.atomic():
        assert borrow(connection).execute is not None


@pytest.mark.parametrize("target", ["maker", "binds"])
def test_a_session_without_one_engine_is_refused(target: str) -> None:
    engine = sa.create_engine("sqlite://")
    unbound = (
        orm.Session() if target == "maker" else orm.Session(binds={orm.declarative_base(): engine})
    )
    with unbound, pytest.raises(ConfigurationError, match="no single engine"):
        borrow(unbound)
    engine.dispose()
