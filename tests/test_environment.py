"""The ground the other tests stand on: fresh databases, and servers that can be killed."""

from __future__ import annotations

from collections.abc import Callable

import psycopg
import pymysql
import pytest

from tests.conftest import NewDatabase, require
from tests.databases import Raw
from tests.servers import packages
from tests.servers.control import ThrowawayMariaDB, ThrowawayPostgres

RawFactory = Callable[[str], Raw]


def test_two_databases_of_one_test_share_no_rows(
    database_kind: object, new_database: NewDatabase, raw: RawFactory
) -> None:
    first, second = (raw(new_database(repr(database_kind), schema=False)) for _ in range(2))
    for connection in (first, second):
        connection.execute("CREATE TABLE t (v VARCHAR(20))")
    assert first.execute("INSERT INTO t VALUES (?)", ("it's",)) == 1
    assert first.rows("SELECT v FROM t") == [("it's",)]
    assert second.value("SELECT count(*) FROM t") == 0


def test_a_fresh_database_has_the_tables_and_no_rows(database_url: str, raw: RawFactory) -> None:
    assert raw(database_url).value("SELECT count(*) FROM txbox_inbox") == 0


def test_pgbouncer_reaches_the_same_database(
    postgresql_url: str, pgbouncer_url: str, raw: RawFactory
) -> None:
    raw(postgresql_url).execute("CREATE TABLE t AS SELECT 7 AS v")
    assert raw(pgbouncer_url).value("SELECT v FROM t") == 7


def _require_package(server: str) -> None:
    require(
        f"{server}: not installed here, and tests that kill the server need one of their own"
        if packages.missing([server])
        else None
    )


def test_postgresql_keeps_commits_when_it_is_killed(raw: RawFactory) -> None:
    _require_package("postgresql")
    with ThrowawayPostgres() as server:
        with Raw(server.url) as before:
            before.execute("CREATE TABLE t AS SELECT 7 AS v")
            server.stop(immediate=True)
            with pytest.raises(psycopg.OperationalError):
                before.rows("SELECT v FROM t")
        server.start()
        assert raw(server.url).rows("SELECT v FROM t") == [(7,)]
    assert not server.directory.exists()


def test_mariadb_keeps_commits_when_it_is_killed(raw: RawFactory) -> None:
    _require_package("mariadb")
    with ThrowawayMariaDB() as server:
        with Raw(server.url) as before:
            before.execute("CREATE TABLE t AS SELECT 7 AS v")
            server.stop(immediate=True)
            with pytest.raises(pymysql.OperationalError):
                before.rows("SELECT v FROM t")
        server.start()
        assert raw(server.url).rows("SELECT v FROM t") == [(7,)]
    assert not server.directory.exists()
