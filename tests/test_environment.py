"""The ground the other tests stand on: fresh databases, and servers that can be killed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable

import psycopg
import pymysql
import pytest

from benchmarks.p05_slow_disk import SlowDisk
from tests.conftest import NewDatabase, require
from tests.databases import Raw
from tests.runtime.support import eventually
from tests.servers import ROOT, VARIABLES, ServerError, compose, packages
from tests.servers.control import ThrowawayMariaDB, ThrowawayPostgres
from tests.servers.leftovers import end_processes, remove_abandoned
from tests.servers.process import (
    LENT_PORTS,
    MAX_PORTS,
    ServerDirectory,
    alive,
    base_directory,
    free_port,
)

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
            processes = [pid for (pid,) in before.rows("SELECT pid FROM pg_stat_activity")]
            server.stop(immediate=True)
            # one that is left would hold the shared memory, and keep the next server from starting
            assert not any(map(alive, processes))
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


_KILLED_WITH_A_SERVER = """
import os, signal
from tests.servers.control import ThrowawayPostgres
with ThrowawayPostgres() as server:
    print(server.name, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_tests_server_is_stopped_and_deleted() -> None:
    _require_package("postgresql")
    with ThrowawayPostgres() as own:
        done = subprocess.run(
            [sys.executable, "-c", _KILLED_WITH_A_SERVER],
            cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=60, check=False,
        )  # fmt: skip
        left = ServerDirectory(done.stdout.strip())
        assert left.running()
        process = int((left.directory / "pid").read_text())
        remove_abandoned()
        assert not alive(process)
        assert not left.directory.exists()
        assert own.running()  # its process, this one, lives


def test_processes_that_a_killed_command_started_are_ended() -> None:
    mark = f"TXBOX_TEST_MARK={base_directory().name}-{os.getpid()}"
    name, value = mark.split("=")
    child = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(); signal.pause()"
    parent = (
        f"import os, signal, subprocess, sys; c = subprocess.Popen([sys.executable, '-c', {child!r}], "
        "stdout=subprocess.PIPE); c.stdout.readline(); print(c.pid, flush=True); "
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run(
        [sys.executable, "-c", parent],
        env={**os.environ, name: value},
        stdout=subprocess.PIPE, text=True, timeout=60, check=False,
    )  # fmt: skip
    orphan = int(done.stdout)
    assert alive(orphan)
    end_processes(mark, within_s=0.5)
    eventually(lambda: not alive(orphan))


def test_no_server_takes_a_port_that_a_connection_may_be_lent() -> None:
    """A throw-away server found its port free and could not listen on it: a client had it."""
    assert free_port(LENT_PORTS - MAX_PORTS, MAX_PORTS) + MAX_PORTS <= LENT_PORTS
    with pytest.raises(ServerError, match="no free port"):
        free_port(LENT_PORTS - 1, MAX_PORTS)


def test_the_server_of_the_slow_disk_finds_a_port() -> None:
    """It wished for one of those, and P5 could not run; nothing else of it runs in the tests."""
    assert free_port(SlowDisk().wanted_port) < LENT_PORTS


def test_compose_offers_every_server_on_the_ports_that_the_tests_use() -> None:
    text = (ROOT / "compose.yaml").read_text().partition("\nservices:\n")[2]
    sections = re.split(r"^  (\w+):$", text, flags=re.MULTILINE)
    services = dict(zip(sections[1::2], sections[2::2], strict=True))
    assert services.keys() == compose.URLS.keys()
    assert services.keys() == {name for name in VARIABLES if not name.endswith("-durable")}
    for name, section in services.items():
        port = re.search(r":(\d+)(/|$)", compose.URLS[name])
        assert port
        assert f"127.0.0.1:{port[1]}:" in section, name
