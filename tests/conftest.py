"""Fixtures of every test: fresh databases on every server, and a view of them without txbox."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support import databases
from tests.support.broker_fixtures import (
    kafka_bootstrap,
    nats_url,
    pytest_collection_finish,
    rabbitmq_url,
    redis_url,
    sqs_url,
    throwaway_kafka,
    throwaway_kafka_cluster,
    throwaway_nats,
    throwaway_rabbitmq,
    throwaway_redis,
    throwaway_sqs,
)
from tests.support.command import command
from tests.support.connections import db, given, number, shared_url
from tests.support.databases import (
    BY_NAME,
    Database,
    FreshDatabase,
    NewDatabase,
    Raw,
    missing_server,
    require,
    through_pgbouncer,
)
from tests.support.partitions import kind, of_uuid7, timed, without_rest
from tests.support.plain_connection import plain_connection
from tests.support.servers.process import memory
from tests.support.shop import shop

__all__ = [
    "command",
    "db",
    "given",
    "kafka_bootstrap",
    "kind",
    "nats_url",
    "number",
    "of_uuid7",
    "plain_connection",
    "pytest_collection_finish",
    "rabbitmq_url",
    "redis_url",
    "shared_url",
    "shop",
    "sqs_url",
    "throwaway_kafka",
    "throwaway_kafka_cluster",
    "throwaway_nats",
    "throwaway_rabbitmq",
    "throwaway_redis",
    "throwaway_sqs",
    "timed",
    "without_rest",
]  # fmt: skip

# pytest without make: compile once, not in every process that a test starts
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# PyMySQL parses the system's certificates for every connection, TLS or not: 25 ms of processor, five times a test.
os.environ.setdefault("TXBOX_TEST_CERTIFICATES", os.environ.get("SSL_CERT_FILE", ""))
os.environ["SSL_CERT_FILE"] = os.devnull
# SQLite's files in memory: on a disk each commit waits for its flush, and costs processor twice
if (room := memory()) is not None:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(room))
gc.disable()  # until all is collected


def pytest_runtestloop() -> None:
    # what was collected lives as long as the session; looking through it for garbage costs each worker 3 s
    gc.freeze()
    gc.enable()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "database_kind" in metafunc.fixturenames:
        # `every_database` is for what meets every statement of the store, in any order and on any connection.
        # Elsewhere MariaDB stands for MySQL: they differ in their SQL alone.
        every = metafunc.definition.get_closest_marker("every_database") is not None
        kinds = databases.selected() if every else databases.representatives()
        metafunc.parametrize("database_kind", kinds, ids=[kind.name for kind in kinds])
    if "mysql_name" in metafunc.fixturenames:
        metafunc.parametrize("mysql_name", databases.names("mysql"))


@pytest.fixture(scope="session", autouse=True)
def _templates() -> Iterator[None]:
    yield
    for each in databases.DATABASES:
        each.close()


@pytest.fixture
def new_database(tmp_path: Path) -> Iterator[NewDatabase]:
    """Makes fresh databases by name: `new_database("postgresql", schema=False)`."""
    made: list[tuple[Callable[[str], None], str]] = []

    def make(name: str, *, schema: bool = True) -> str:
        database = BY_NAME[name]
        if name != "sqlite" and database not in databases.selected():
            pytest.skip(f"{name} is not among {databases.SELECTION}")
        require(database.missing())
        url = database.take(tmp_path) if schema else database.create(tmp_path, schema=False)
        made.append((database.give_back if schema else database.drop, url))
        return url

    yield make
    for ends, url in made:
        ends(url)


@pytest.fixture
def database(database_kind: Database, new_database: NewDatabase) -> FreshDatabase:
    """Once for every database: a fresh one, its URL and what it can do."""
    return FreshDatabase(database_kind, new_database(database_kind.name))


@pytest.fixture
def database_url(database: FreshDatabase) -> str:
    """Once for every database: the URL of a fresh one with txbox's tables and no rows."""
    return database.url


@pytest.fixture
def empty_database_url(database_kind: Database, new_database: NewDatabase) -> str:
    """Once for every database: the URL of a fresh one without any table."""
    return new_database(database_kind.name, schema=False)


@pytest.fixture
def sqlite_url(new_database: NewDatabase) -> str:
    return new_database("sqlite")


@pytest.fixture
def postgresql_url(new_database: NewDatabase) -> str:
    return new_database("postgresql")


@pytest.fixture
def mysql_url(mysql_name: str, new_database: NewDatabase) -> str:
    """Once for MariaDB and once for MySQL."""
    return new_database(mysql_name)


@pytest.fixture
def pgbouncer_url(postgresql_url: str) -> str:
    """A fresh PostgreSQL database, through PgBouncer in transaction mode."""
    require(missing_server("pgbouncer"))
    return through_pgbouncer(postgresql_url)


@pytest.fixture
def raw(new_database: NewDatabase) -> Iterator[Callable[[str], Raw]]:
    """`raw(url)`: a plain driver connection, closed when the test ends, before its databases are given back."""
    opened: list[Raw] = []

    def connect(url: str) -> Raw:
        connection = Raw(url)
        opened.append(connection)
        return connection

    yield connect
    for connection in opened:
        connection.close()
