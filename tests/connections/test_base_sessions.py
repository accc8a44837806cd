"""A connection that would change the characters of ids is refused, or set right where it is ours (promise 2.14)."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any
from urllib.parse import urlsplit

import aiosqlite
import asyncmy
import asyncpg
import psycopg
import pymysql
import pytest
import sqlalchemy as sa
from asyncmy.cursors import DictCursor
from django.db import connections, transaction
from psycopg.rows import dict_row
from psycopg_pool import ConnectionPool
from sqlalchemy import event
from sqlalchemy.ext import asyncio as sa_async

from tests.support.connections import engine_url
from tests.support.databases import Raw
from tests.support.django_project import configured
from txbox import App, Inbox, Message, Outbox, Outcome, RetryPolicy
from txbox.connections import mysql
from txbox.errors import ConfigurationError, SchemaError
from txbox.testing import drain, drain_async

RawOf = Callable[[str], Raw]


def settings_of(url: str, *settings: str) -> None:
    """Set these for whoever connects to a PostgreSQL database from now on."""
    with Raw(url) as raw:
        for setting in settings:
            raw.execute(f"ALTER DATABASE {urlsplit(url).path[1:]} SET {setting}")


def message(message_id: str, key: str | None = None) -> Message[Any]:
    return Message(id=message_id, topic="t", payload=b"\0'\\", key=key)


def fails_once(message: Message[Any], _tx: Any) -> None:
    if message.key == "fails" and message.attempt == 1:
        raise ValueError("é")


async def fails_once_async(message: Message[Any], tx: Any) -> None:
    fails_once(message, tx)


def app_of(target: Any, handler: Any = fails_once, **options: Any) -> App:
    app = App(target, **options)
    app.handler("t", consumer="c", retry=RetryPolicy(max_attempts=3))(handler)
    return app


def processed(target: Any) -> list[Outcome]:
    """What becomes of a message, of its copy, and of one that fails once and comes again from the table."""
    with app_of(target) as app:
        return [
            app.process(message("é")),
            app.process(message("é")),
            app.process(message("f", "fails")),
            *drain(app, ignore_dates=True),
        ]


async def processed_async(target: Any) -> list[Outcome]:
    async with app_of(target, fails_once_async) as app:
        return [
            await app.process_async(message("é")),
            await app.process_async(message("é")),
            await app.process_async(message("f", "fails")),
            *await drain_async(app, ignore_dates=True),
        ]


ALL = [Outcome.PROCESSED, Outcome.DUPLICATE, Outcome.FAILED, Outcome.PROCESSED]

STRANGE = (
    "client_encoding = 'LATIN1'", "DateStyle = 'German'", "IntervalStyle = 'iso_8601'", "TimeZone = 'America/St_Johns'",
    "bytea_output = 'escape'",
    "backslash_quote = off", "transform_null_equals = on",
    "default_transaction_isolation = 'serializable'", "default_transaction_deferrable = on",
)  # fmt: skip


# -- connections of ours ---------------------------------------------------------------------------


@pytest.mark.parametrize("pooled", [False, True])
@pytest.mark.parametrize("driver", ["psycopg", "asyncpg"])
def test_what_the_database_sets_does_not_reach_connections_of_ours(
    postgresql_url: str, pgbouncer_url: str, driver: str, pooled: bool, raw: RawOf
) -> None:
    settings_of(postgresql_url, *STRANGE)
    url = f"{pgbouncer_url}?prepare=off" if pooled else postgresql_url
    url = url.replace("postgresql:", "postgresql+asyncpg:") if driver == "asyncpg" else url
    asynchronous = driver == "asyncpg"
    assert (asyncio.run(processed_async(url)) if asynchronous else processed(url)) == ALL
    view = raw(postgresql_url)
    view.execute("SET client_encoding = 'UTF8'")
    ids = view.rows("SELECT message_id FROM txbox_inbox ORDER BY message_id")
    assert ids == [("f",), ("é",)]


def test_the_environment_and_the_url_do_not_choose_the_encoding(
    postgresql_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PGCLIENTENCODING", "LATIN1")
    monkeypatch.setenv("PGDATESTYLE", "SQL, DMY")
    assert processed(f"{postgresql_url}?client_encoding=LATIN9") == ALL
    assert (
        asyncio.run(processed_async(f"{postgresql_url}?client_encoding=LATIN9"))[0] == "duplicate"
    )


def test_tables_are_made_under_any_setting(new_database: Callable[..., str]) -> None:
    url = new_database("postgresql", schema=False)
    settings_of(url, *STRANGE)
    with App(url) as app:
        app.init()
    assert processed(url) == ALL


@contextmanager
def server_sets(monkeypatch: pytest.MonkeyPatch, *settings: str) -> Iterator[None]:
    """As if the MySQL server were configured like this: set before txbox sets anything."""
    connected = mysql._connected

    async def with_settings(database: Any, is_async: bool) -> Any:
        connection = await connected(database, is_async)
        for setting in settings:
            sent = connection.query(f"SET SESSION {setting}")
            if is_async:
                await sent
        return connection

    with monkeypatch.context() as patch:
        patch.setattr(mysql, "_connected", with_settings)
        yield


MYSQL_STRANGE = (
    "sql_mode = 'ANSI,NO_BACKSLASH_ESCAPES'",
    "sql_mode = CONCAT(@@sql_mode, ',PAD_CHAR_TO_FULL_LENGTH')",
    "time_zone = '+05:30'", "sql_safe_updates = 1",
    "sql_select_limit = 1", "max_join_size = 1", "completion_type = 2", "sql_auto_is_null = 1", "autocommit = 1",
    "group_concat_max_len = 4", "div_precision_increment = 0",
)  # fmt: skip


def test_what_a_mysql_server_is_set_to_does_not_reach_connections_of_ours(
    mysql_name: str, new_database: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    url = new_database(mysql_name, schema=False)
    with server_sets(monkeypatch, *MYSQL_STRANGE):
        with App(url) as app:
            app.init()
        assert processed(url) == ALL
        assert asyncio.run(processed_async(url))[0] == Outcome.DUPLICATE


@pytest.mark.parametrize(
    ("setting", "named"),
    [
        ("character_set_client = latin1", "character_set_client is latin1"),
        ("character_set_connection = latin1", "character_set_connection is latin1"),
        ("character_set_results = latin1", "character_set_results is latin1"),
        ("sql_mode = 'ORACLE'", "ORACLE"),
        ("sql_mode = 'EMPTY_STRING_IS_NULL'", "EMPTY_STRING_IS_NULL"),
    ],
)
def test_what_cannot_be_set_right_on_mysql_is_refused_by_name(
    mysql_name: str, mysql_url: str, monkeypatch: pytest.MonkeyPatch, setting: str, named: str
) -> None:
    if "mode" in setting and mysql_name == "mysql":
        pytest.skip("MariaDB's own modes")
    with server_sets(monkeypatch, setting), pytest.raises(SchemaError, match=named):
        processed(mysql_url)


# -- connections that are not ours -----------------------------------------------------------------


def test_a_pool_or_engine_with_another_encoding_is_refused(postgresql_url: str) -> None:
    latin = {"client_encoding": "LATIN1"}
    engine = sa.create_engine(engine_url(postgresql_url, "psycopg"), connect_args=latin)
    with ConnectionPool(postgresql_url, min_size=1, kwargs=latin) as pool:
        for target in (pool, engine):
            with pytest.raises(ConfigurationError, match=r"client_encoding .* LATIN1.*UTF8"):
                processed(target)
        # what was refused is given back
        with pool.connection(timeout=1) as connection:
            connection.execute("SELECT 1")
    engine.dispose()
    with configured(postgresql_url, OPTIONS=latin) as alias:
        # Django sets UTF8 itself
        assert app_of(None, django=alias).process(message("é")) is Outcome.PROCESSED


def test_an_async_pool_or_engine_with_another_encoding_is_refused(postgresql_url: str) -> None:
    latin = {"client_encoding": "LATIN1"}

    async def refused() -> None:
        engine = sa_async.create_async_engine(
            engine_url(postgresql_url, "asyncpg"), connect_args={"server_settings": latin}
        )
        async with asyncpg.create_pool(postgresql_url, min_size=1, server_settings=latin) as pool:
            for target in (pool, engine):
                with pytest.raises(ConfigurationError, match=r"client_encoding .* LATIN1.*UTF8"):
                    await processed_async(target)
        await engine.dispose()

    asyncio.run(refused())


def test_an_engine_or_alias_whose_dates_its_driver_cannot_read_is_refused(
    postgresql_url: str,
) -> None:
    settings_of(postgresql_url, "DateStyle = 'German'")
    # an engine that somebody listens to reads times through the driver
    engine = sa.create_engine(engine_url(postgresql_url, "psycopg"), echo=False)
    event.listen(engine, "before_cursor_execute", lambda *_: None)
    with pytest.raises(ConfigurationError, match=r"DateStyle .* German.*ISO"):
        processed(engine)
    engine.dispose()
    with (
        configured(postgresql_url) as alias,
        pytest.raises(ConfigurationError, match=r"DateStyle .* German.*ISO"),
    ):
        app_of(None, django=alias).process(message("1"))


def test_a_pool_with_any_dates_works(postgresql_url: str) -> None:
    settings_of(postgresql_url, "DateStyle = 'German'")
    with ConnectionPool(postgresql_url, min_size=1) as pool:
        assert processed(pool) == ALL
    engine = sa.create_engine(engine_url(postgresql_url, "psycopg"))
    assert processed(engine)[0] is Outcome.DUPLICATE
    engine.dispose()


def test_a_callers_connection_with_another_encoding_is_refused(postgresql_url: str) -> None:
    inbox, outbox = Inbox(consumer="c"), Outbox()
    engine = sa.create_engine(
        engine_url(postgresql_url, "psycopg"), connect_args={"client_encoding": "LATIN1"}
    )
    with (
        psycopg.connect(postgresql_url, client_encoding="LATIN1") as plain,
        engine.connect() as raw,
    ):
        for tx in (plain, raw):
            with pytest.raises(ConfigurationError, match=r"client_encoding .* LATIN1.*UTF8"):
                inbox.accept(tx, "é")
            with pytest.raises(ConfigurationError, match=r"client_encoding .* LATIN1.*UTF8"):
                outbox.stage(tx, "t", {})
    engine.dispose()

    async def refused() -> None:
        tx = await asyncpg.connect(postgresql_url, server_settings={"client_encoding": "LATIN1"})
        async with tx.transaction():
            with pytest.raises(ConfigurationError, match=r"client_encoding .* LATIN1.*UTF8"):
                await inbox.accept_async(tx, "é")
        await tx.close()

    asyncio.run(refused())


MYSQL_UNFIT: list[tuple[dict[str, Any], str]] = [
    ({"charset": "latin1"}, "charset .* latin1"),
    ({"charset": "utf8"}, "charset .* utf8,"),
    ({"charset": "utf8mb4", "use_unicode": False}, "use_unicode"),
    ({"charset": "utf8mb4", "sql_mode": "NO_BACKSLASH_ESCAPES"}, "NO_BACKSLASH_ESCAPES"),
]


@pytest.mark.parametrize(("options", "named"), MYSQL_UNFIT)
def test_mysql_connections_that_change_bytes_are_refused(
    mysql_url: str, options: dict[str, Any], named: str
) -> None:
    engine = sa.create_engine(engine_url(mysql_url, "pymysql"), connect_args=options)
    with pytest.raises(ConfigurationError, match=named):
        processed(engine)
    with engine.connect() as raw, pytest.raises(ConfigurationError, match=named):
        Inbox(consumer="c").accept(raw, "😀")
    engine.dispose()
    with configured(mysql_url, OPTIONS=options) as alias:
        with pytest.raises(ConfigurationError, match=named):
            app_of(None, django=alias).process(message("😀"))
        with transaction.atomic(using=alias), pytest.raises(ConfigurationError, match=named):
            Inbox(consumer="c").accept(connections[alias], "é")
    parts = urlsplit(mysql_url)
    login: dict[str, Any] = {
        "host": parts.hostname, "port": parts.port, "user": parts.username, "password": parts.password,
        "database": parts.path[1:],
    }  # fmt: skip
    plain = pymysql.connect(**login, **options)
    with closing(plain), pytest.raises(ConfigurationError, match=named):
        Inbox(consumer="c").accept(plain, "é")

    async def refused() -> None:
        tx = await asyncmy.connect(**login, **options)
        with pytest.raises(ConfigurationError, match=named):
            await Inbox(consumer="c").accept_async(tx, "😀")
        await tx.ensure_closed()
        engine = sa_async.create_async_engine(
            engine_url(mysql_url, "asyncmy"), connect_args=options
        )
        with pytest.raises(ConfigurationError, match=named):
            await processed_async(engine)
        async with engine.connect() as raw:
            with pytest.raises(ConfigurationError, match=named):
                await Inbox(consumer="c").accept_async(raw, "😀")
        await engine.dispose()

    if "use_unicode" not in options:  # which asyncmy does not show
        asyncio.run(refused())


@pytest.mark.parametrize(
    "setting", ["sql_safe_updates = 1", "sql_select_limit = 1", "completion_type = 2"]
)
def test_an_engine_with_settings_for_people_is_refused_by_name(
    mysql_url: str, setting: str
) -> None:
    init = {"init_command": f"SET SESSION {setting}", "charset": "utf8mb4"}
    engine = sa.create_engine(engine_url(mysql_url, "pymysql"), connect_args=init)
    name = setting.partition(" ")[0]
    with pytest.raises(SchemaError, match=name):
        processed(engine)
    with App(engine) as app, pytest.raises(SchemaError, match=name):
        app.init()
    engine.dispose()


# -- what a connection's own cursors and rows are -----------------------------------------------------


def accepts(tx: Any, message_id: str) -> list[bool]:
    return [bool(Inbox(consumer="c").accept(tx, message_id)) for _ in range(2)]


def test_a_callers_psycopg_cursors_and_rows_do_not_matter(postgresql_url: str) -> None:
    factories: list[dict[str, Any]] = [
        {"cursor_factory": psycopg.RawCursor},
        {"cursor_factory": psycopg.ClientCursor},
        {"row_factory": dict_row},
    ]
    for number, factory in enumerate(factories):
        with psycopg.connect(postgresql_url, **factory) as tx:
            assert accepts(tx, f"é{number}") == [True, False]
            Outbox().stage(tx, "t", {})
        with ConnectionPool(postgresql_url, min_size=1, kwargs=factory) as pool:
            app = app_of(pool, lambda _message, _tx: None)
            assert app.process(message(f"p{number}")) is Outcome.PROCESSED
            assert app.process(message(f"p{number}")) is Outcome.DUPLICATE


class Keyed(asyncpg.Record):
    """As a dictionary, and many a helper, is iterated over."""

    def __iter__(self) -> Iterator[Any]:
        return iter(self.keys())


def test_a_callers_asyncpg_records_do_not_matter(postgresql_url: str) -> None:
    async def accepted() -> None:
        tx = await asyncpg.connect(postgresql_url, record_class=Keyed)
        async with tx.transaction():
            inbox = Inbox(consumer="c")
            assert await inbox.accept_async(tx, "é")
            assert not await inbox.accept_async(tx, "é")
        await tx.close()
        async with asyncpg.create_pool(postgresql_url, min_size=1, record_class=Keyed) as pool:
            assert (await processed_async(pool))[1:] == ALL[1:]

    asyncio.run(accepted())


def test_a_callers_mysql_cursors_do_not_matter(mysql_url: str) -> None:
    parts = urlsplit(mysql_url)
    login: dict[str, Any] = {
        "host": parts.hostname, "port": parts.port, "user": parts.username, "password": parts.password,
        "database": parts.path[1:], "charset": "utf8mb4",
    }  # fmt: skip
    with closing(pymysql.connect(**login, cursorclass=pymysql.cursors.SSDictCursor)) as tx:
        assert accepts(tx, "é") == [True, False]

    async def accepted() -> None:
        tx = await asyncmy.connect(**login, cursor_cls=DictCursor)
        inbox = Inbox(consumer="c")
        assert await inbox.accept_async(tx, "ü")
        assert not await inbox.accept_async(tx, "ü")
        await tx.ensure_closed()

    asyncio.run(accepted())


class OfRows(sqlite3.Connection):
    """A connection whose cursors return dictionaries."""

    def cursor(self, factory: Any = None) -> Any:
        del factory
        return super().cursor(OfDicts)


class OfDicts(sqlite3.Cursor):
    def fetchall(self) -> list[Any]:
        raise AssertionError("this class is for its user")


def test_a_callers_sqlite_factories_do_not_matter(sqlite_url: str) -> None:
    path = sqlite_url.removeprefix("sqlite:///")
    with closing(sqlite3.connect(path, factory=OfRows)) as tx:
        tx.text_factory, tx.row_factory = bytes, lambda _cursor, _row: {}
        assert accepts(tx, "é") == [True, False]
        Outbox().stage(tx, "t", {})
        assert tx.text_factory is bytes

    async def accepted() -> None:
        async with aiosqlite.connect(path) as tx:
            tx.text_factory, tx.row_factory = bytes, sqlite3.Row
            inbox = Inbox(consumer="c")
            assert await inbox.accept_async(tx, "ü")
            assert not await inbox.accept_async(tx, "ü")
            assert tx.text_factory is bytes

    asyncio.run(accepted())


def test_a_sqlite_engine_whose_texts_are_bytes_is_refused(sqlite_url: str) -> None:
    engine = sa.create_engine(sqlite_url)

    @event.listens_for(engine, "connect")
    def texts(connection: Any, _record: Any) -> None:
        connection.text_factory = bytes

    with pytest.raises(ConfigurationError, match="text_factory"):
        processed(engine)
    engine.dispose()
