"""Fixtures of every test: fresh databases on every server, and a view of them without txbox."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import pytest

from tests import databases
from tests.databases import BY_NAME, Database, Raw, missing_server, through_pgbouncer
from tests.servers import servers_required

# What meets every statement of the store, in any order and on any connection. Elsewhere MariaDB stands for
# MySQL: they differ in their SQL alone, and `make test` would take many minutes more.
ON_EVERY_DATABASE = ("connections", "contract", "protocol", "test_environment.py")


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


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "database_kind" in metafunc.fixturenames:
        folder = metafunc.definition.path.relative_to(Path(__file__).parent).parts[0]
        every = folder in ON_EVERY_DATABASE
        kinds = databases.selected() if every else databases.representatives()
        metafunc.parametrize("database_kind", kinds, ids=[kind.name for kind in kinds])
    if "mysql_name" in metafunc.fixturenames:
        metafunc.parametrize("mysql_name", databases.names("mysql"))


def require(reason: str | None) -> None:
    """Skip the test, or fail it where servers are required, when there is a reason to."""
    if reason is None:
        return
    if servers_required():
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason)


@pytest.fixture(scope="session", autouse=True)
def _templates() -> Iterator[None]:
    yield
    for kind in databases.DATABASES:
        kind.close()


@pytest.fixture
def new_database(tmp_path: Path) -> Iterator[NewDatabase]:
    """Makes fresh databases by name: `new_database("postgresql", schema=False)`."""
    made: list[tuple[Database, str]] = []

    def make(name: str, *, schema: bool = True) -> str:
        kind = BY_NAME[name]
        if name != "sqlite" and kind not in databases.selected():
            pytest.skip(f"{name} is not among {databases.SELECTION}")
        require(kind.missing())
        url = kind.create(tmp_path, schema=schema)
        made.append((kind, url))
        return url

    yield make
    for kind, url in made:
        kind.drop(url)


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
def raw() -> Iterator[Callable[[str], Raw]]:
    """`raw(url)`: a plain driver connection, closed when the test ends."""
    opened: list[Raw] = []

    def connect(url: str) -> Raw:
        connection = Raw(url)
        opened.append(connection)
        return connection

    yield connect
    for connection in opened:
        connection.close()
