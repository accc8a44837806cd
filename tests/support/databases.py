"""The databases that the tests run on: one row each, in `DATABASES`."""

from __future__ import annotations

import itertools
import os
import shutil
import sqlite3
import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self
from urllib.parse import unquote, urlsplit

import psycopg
import pymysql
import pytest

import txbox
from tests.support.servers import VARIABLES, server_urls, servers_required
from tests.support.tidying import (
    SESSIONS,
    MySQLState,
    mysql_state,
    postgresql_state,
    tidy_mysql,
    tidy_postgresql,
)

SELECTION = "TXBOX_TEST_DATABASES"  # a comma-separated subset of the names below
PARTITION = (
    "TXBOX_TEST_PARTITION"  # uuid7, ulid or hash: how the inbox is partitioned on PostgreSQL
)

_numbers = itertools.count(1)


def _fresh_name() -> str:
    # The process id keeps parallel test sessions on the same servers apart.
    return f"txbox_t_{os.getpid()}_{next(_numbers)}"


class Raw:
    """A plain driver connection in autocommit mode: the tests' independent view.

    Placeholders are `?` on every database (no other `?` or `%` may stand in a statement that has
    parameters).
    """

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._connection: Any
        self.product = parts.scheme
        self._qmark = parts.scheme == "sqlite"
        match parts.scheme:
            case "sqlite":
                self._connection = sqlite3.connect(
                    url.removeprefix("sqlite:///"), isolation_level=None, check_same_thread=False
                )
                self._connection.execute("PRAGMA busy_timeout = 30000")
            case "postgresql":
                # Never prepared: a pooler may stand in between.
                self._connection = psycopg.connect(url, autocommit=True, prepare_threshold=None)
            case "mysql":
                self._connection = pymysql.connect(
                    host=parts.hostname or "127.0.0.1",
                    port=parts.port or 3306,
                    user=unquote(parts.username or "root"),
                    password=unquote(parts.password or ""),
                    database=parts.path.lstrip("/"),
                    charset="utf8mb4",
                    autocommit=True,
                )
            case scheme:
                raise ValueError(f"no driver for {scheme}")

    def rows(self, sql: str, params: Sequence[object] = ()) -> list[tuple[Any, ...]]:
        """All rows of a query, as tuples."""
        cursor = self._run(sql, params)
        try:
            return [tuple(row) for row in cursor.fetchall()]
        finally:
            cursor.close()

    def value(self, sql: str, params: Sequence[object] = ()) -> Any:
        """The only column of the only row."""
        ((value,),) = self.rows(sql, params)
        return value

    def execute(self, sql: str, params: Sequence[object] = ()) -> int:
        """Run one statement; returns the number of rows that the driver reports."""
        cursor = self._run(sql, params)
        try:
            return int(cursor.rowcount)
        finally:
            cursor.close()

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _run(self, sql: str, params: Sequence[object]) -> Any:
        cursor = self._connection.cursor()
        if self._qmark:
            cursor.execute(sql, params)
        elif params:
            cursor.execute(sql.replace("?", "%s"), params)
        else:
            cursor.execute(sql)
        return cursor


class Database(ABC):
    """One database product that txbox is tested on.

    Args:
        name: as in `TXBOX_TEST_DATABASES` and in the tests' ids.
        dialect: the name of its `.sql` file.
        ddl_is_transactional: a schema change can be rolled back.
        concurrent_writers: two transactions can write at the same time.
    """

    def __init__(
        self, name: str, dialect: str, *, ddl_is_transactional: bool, concurrent_writers: bool
    ) -> None:
        self.name = name
        self.dialect = dialect
        self.ddl_is_transactional = ddl_is_transactional
        self.concurrent_writers = concurrent_writers

    def __repr__(self) -> str:
        return self.name

    @abstractmethod
    def missing(self) -> str | None:
        """None, or one sentence that says why it cannot be tested here."""

    @abstractmethod
    def create(self, directory: Path, *, schema: bool) -> str:
        """URL of a fresh database without rows; with txbox's tables when `schema`."""

    @abstractmethod
    def drop(self, url: str) -> None:
        """Delete what `create` made, whoever is still connected."""

    def take(self, directory: Path) -> str:
        """URL of a database with txbox's tables and no rows; `give_back` takes it again."""
        return self.create(directory, schema=True)

    def give_back(self, url: str) -> None:
        self.drop(url)

    @abstractmethod
    def close(self) -> None:
        """The session ends: delete templates."""


class SQLite(Database):
    def __init__(self) -> None:
        super().__init__("sqlite", "sqlite", ddl_is_transactional=True, concurrent_writers=False)
        self._template: Path | None = None

    def missing(self) -> str | None:
        return None

    def create(self, directory: Path, *, schema: bool) -> str:
        path = directory / f"{_fresh_name()}.db"
        if schema:
            if self._template is None:
                template = directory.parent / f"{_fresh_name()}-template.db"
                _apply_schema(f"sqlite:///{template}")
                with Raw(f"sqlite:///{template}") as raw:
                    raw.rows("PRAGMA wal_checkpoint(TRUNCATE)")
                self._template = template
            shutil.copyfile(self._template, path)
        return f"sqlite:///{path}"

    def drop(self, url: str) -> None:
        path = url.removeprefix("sqlite:///")
        for suffix in ("", "-wal", "-shm", "-journal"):
            Path(path + suffix).unlink(missing_ok=True)

    def close(self) -> None:
        if self._template is not None:
            self.drop(f"sqlite:///{self._template}")


class Server(Database):
    """A database behind a URL with a superuser's rights."""

    def __init__(
        self, name: str, dialect: str, *, ddl_is_transactional: bool, required: bool = True
    ) -> None:
        super().__init__(
            name, dialect, ddl_is_transactional=ddl_is_transactional, concurrent_writers=True
        )
        self.required = required
        self._admin: Raw | None = None
        self._tidy: list[str] = []
        self._threads: dict[str, set[threading.Thread]] = {}

    @property
    def server_url(self) -> str:
        return server_urls()[self.name]

    def missing(self) -> str | None:
        return missing_server(self.name)

    @property
    def admin(self) -> Raw:
        if self._admin is None:
            self._admin = Raw(self.server_url)
        return self._admin

    def take(self, directory: Path) -> str:
        url = self._tidy.pop() if self._tidy else self.create(directory, schema=True)
        self._threads[url] = set(threading.enumerate())
        return url

    def give_back(self, url: str) -> None:
        # a thread that the test has left behind could write to a database that is another's by then
        left = set(threading.enumerate()) - self._threads.pop(url)
        if not left and PARTITION not in os.environ and self._tidied(url):
            self._tidy.append(url)
        else:
            self.drop(url)

    @abstractmethod
    def _tidied(self, url: str) -> bool:
        """Empty a database; False when it is not what `create` made, and has to be dropped."""

    def close(self) -> None:
        while self._tidy:
            self.drop(self._tidy.pop())
        if self._admin is not None:
            self._admin.close()
            self._admin = None

    def _url(self, database: str) -> str:
        return urlsplit(self.server_url)._replace(path=f"/{database}").geturl()


class PostgreSQL(Server):
    def __init__(self, name: str = "postgresql") -> None:
        super().__init__(name, "postgresql", ddl_is_transactional=True)
        self._template: str | None = None
        self._state: tuple[str, frozenset[str]] = ("", frozenset())
        # into each database that is used again: a new connection reads the catalog first, and that is most of it
        self._looks: dict[str, Raw] = {}

    def create(self, directory: Path, *, schema: bool) -> str:
        name = _fresh_name()
        if schema:
            if self._template is None:
                template = f"{name}_template"
                self.admin.execute(f'CREATE DATABASE "{template}" TEMPLATE template0')
                _apply_schema(self._url(template))
                with Raw(self._url(template)) as raw:
                    self._state = postgresql_state(raw)
                self._template = template
            self.admin.execute(f'CREATE DATABASE "{name}" TEMPLATE "{self._template}"')
        else:
            self.admin.execute(f'CREATE DATABASE "{name}" TEMPLATE template0')
        return self._url(name)

    def create_in(self, encoding: str) -> str:
        """URL of a fresh database in another encoding than UTF-8, with txbox's tables."""
        name = _fresh_name()
        self.admin.execute(
            f"CREATE DATABASE \"{name}\" TEMPLATE template0 ENCODING '{encoding}' LC_COLLATE 'C' LC_CTYPE 'C'"
        )
        _apply_schema(self._url(name))
        return self._url(name)

    def drop(self, url: str) -> None:
        if (look := self._looks.pop(url, None)) is not None:
            look.close()
        self.admin.execute(f'DROP DATABASE IF EXISTS "{_database(url)}" WITH (FORCE)')

    def _tidied(self, url: str) -> bool:
        try:
            if url not in self._looks:
                self._looks[url] = Raw(url)
            return tidy_postgresql(self._looks[url], self._state)
        except psycopg.Error:
            return False  # its test has dropped it, closed it to logins, locked it, or ended all sessions

    def close(self) -> None:
        if self._template is not None:
            self.drop(self._url(self._template))
            self._template = None
        super().close()


class MySQL(Server):
    """MySQL or MariaDB, which have no template databases: the tables are created each time."""

    def __init__(self, name: str, *, required: bool) -> None:
        super().__init__(name, "mysql", ddl_is_transactional=False, required=required)
        self._state: MySQLState | None = None

    def create(self, directory: Path, *, schema: bool) -> str:
        name = _fresh_name()
        self.admin.execute(f"CREATE DATABASE `{name}` CHARACTER SET utf8mb4")
        url = self._url(name)
        if schema:
            _apply_schema(url)
            if self._state is None:
                self._state = mysql_state(self.admin, name)
        return url

    def _tidied(self, url: str) -> bool:
        assert self._state is not None
        try:
            return tidy_mysql(self.admin, _database(url), self._state)
        except pymysql.Error:
            return False  # its test has dropped tables, or what refers to them

    def drop(self, url: str) -> None:
        name = _database(url)
        # A forgotten transaction would hold its tables' metadata locks against the DROP.
        for (connection_id,) in self.admin.rows(f"SELECT id FROM {SESSIONS} WHERE db = ?", (name,)):
            try:
                self.admin.execute(f"KILL {connection_id}")
            except pymysql.Error as error:
                if error.args[0] != 1094:  # it went away by itself
                    raise
        self.admin.execute(f"DROP DATABASE IF EXISTS `{name}`")


DATABASES: tuple[Database, ...] = (
    SQLite(),
    PostgreSQL(),
    MySQL("mariadb", required=True),
    MySQL("mysql", required=False),
)
BY_NAME: Mapping[str, Database] = {database.name: database for database in DATABASES}


def selected() -> tuple[Database, ...]:
    """The databases to test: all that are required or given, or the `TXBOX_TEST_DATABASES`."""
    if wanted := os.environ.get(SELECTION, ""):
        names = [name.strip() for name in wanted.split(",")]
        unknown = [name for name in names if name not in BY_NAME]
        if unknown:
            raise ValueError(
                f"{SELECTION} names {', '.join(unknown)}; it may name {', '.join(BY_NAME)}"
            )
        return tuple(BY_NAME[name] for name in names)
    return tuple(
        database
        for database in DATABASES
        if not isinstance(database, Server) or database.required or database.name in server_urls()
    )


def names(*dialects: str) -> tuple[str, ...]:
    """The databases to test that speak one of these dialects (any when none is named), for parameters."""
    return tuple(
        database.name for database in selected() if not dialects or database.dialect in dialects
    )


def representatives() -> tuple[Database, ...]:
    """The first of each dialect: MariaDB stands for MySQL, unless `TXBOX_TEST_DATABASES` says otherwise."""
    if os.environ.get(SELECTION):
        return selected()
    return tuple({database.dialect: database for database in reversed(selected())}.values())[::-1]


@cache
def missing_server(name: str) -> str | None:
    """None when the server answers, otherwise one sentence that says what to do."""
    url = server_urls().get(name)
    if url is None:
        return f"{name}: no server; run `make servers` or set {VARIABLES[name]}"
    try:
        Raw(url).close()
    except (psycopg.Error, pymysql.Error) as error:
        return (
            f"{name}: the server at {_without_password(url)} does not answer "
            f"({type(error).__name__}); run `make servers` or set {VARIABLES[name]}"
        )
    return None


def through_pgbouncer(url: str) -> str:
    """The same PostgreSQL database, reached through PgBouncer in transaction mode."""
    pooler = urlsplit(server_urls()["pgbouncer"])
    return pooler._replace(path=urlsplit(url).path).geturl()


def _apply_schema(url: str) -> None:
    partition: Any = os.environ.get(PARTITION) if url.startswith("postgresql:") else None
    with txbox.App(url) as app:
        app.init(partition=partition or None)


def _database(url: str) -> str:
    return urlsplit(url).path.lstrip("/")


def _without_password(url: str) -> str:
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.hostname}:{parts.port}"


class NewDatabase(Protocol):
    def __call__(self, name: str, *, schema: bool = True) -> str: ...


@dataclass(frozen=True, slots=True)
class FreshDatabase:
    """A database of this test alone: txbox's tables, no rows."""

    kind: Database
    url: str

    @property
    def name(self) -> str:
        return self.kind.name


def require(reason: str | None) -> None:
    """Skip the test, or fail it where servers are required, when there is a reason to."""
    if reason is None:
        return
    if servers_required():
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason)
