"""Starts and stops servers by name, one process at a time."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from tests.support.servers import (
    BROKERS,
    STATE_FILE,
    VARIABLES,
    ServerError,
    UnavailableError,
    UnofferedError,
    compose,
    given_url,
    packages,
    servers_required,
)
from tests.support.servers.elasticmq import ElasticMQServer
from tests.support.servers.kafka import KafkaServer
from tests.support.servers.leftovers import end_processes, remove_abandoned
from tests.support.servers.mariadb import MariaDBServer
from tests.support.servers.mysql import MySQLServer
from tests.support.servers.nats import NatsServer
from tests.support.servers.postgresql import PgBouncerServer, PostgreSQLServer
from tests.support.servers.process import ServerDirectory, ServerProcess, base_directory, file_lock
from tests.support.servers.rabbitmq import RabbitMQServer
from tests.support.servers.redis import RedisServer

DATABASES = ("postgresql", "mariadb", "mysql", "pgbouncer")
TEST_SERVERS = (*DATABASES, *BROKERS)
DURABLE_SERVERS = ("postgresql-durable", "mariadb-durable")


STARTED = "TXBOX_SERVERS_STARTED"  # names a file: servers that a command of `run` starts itself

# Python warns when it forgets a process that still runs; these outlive the one that starts them.
_kept: list[ServerProcess] = []


def say(line: str) -> None:
    print(f"servers: {line}", flush=True)


def _one_at_a_time() -> AbstractContextManager[None]:
    return file_lock(base_directory() / "lock")


def _read_state() -> dict[str, str]:
    state: dict[str, str] = json.loads(STATE_FILE.read_text()) if STATE_FILE.exists() else {}
    return state


def _write_state(state: dict[str, str]) -> None:
    # Parallel tests read it without the lock: they see the old file or the new one, never a half.
    written = STATE_FILE.with_suffix(".new")
    written.write_text(json.dumps(state, indent=2) + "\n")
    written.replace(STATE_FILE)


def _server(name: str, urls: dict[str, str]) -> ServerProcess:
    match name:
        case "postgresql":
            return PostgreSQLServer(name)
        case "postgresql-durable":
            return PostgreSQLServer(name, durable=True, preferred_port=25433)
        case "mariadb":
            return MariaDBServer(name)
        case "mariadb-durable":
            return MariaDBServer(name, durable=True, preferred_port=23308)
        case "mysql":
            return MySQLServer(name)
        case "pgbouncer":
            return PgBouncerServer(name, urls["postgresql"])
        case "rabbitmq":
            return RabbitMQServer(name)
        case "redis":
            return RedisServer(name)
        case "nats":
            return NatsServer(name)
        case "kafka":
            return KafkaServer(name)
        case "sqs":
            return ElasticMQServer(name)
        case _:
            raise ServerError(f"no server is called {name}")


def up(names: Sequence[str]) -> list[str]:
    """Make these servers answer; returns the names of those that were started just now."""
    urls: dict[str, str] = {}
    started: list[str] = []
    for name, variable in VARIABLES.items():
        if url := given_url(name):
            urls[name] = url
            say(f"{name}: given by {variable}")
    wanted = [name for name in names if name not in urls]
    with _one_at_a_time():
        remove_abandoned()
        state = _read_state()
        if _may_compose(wanted):
            started += _up_with_compose(wanted, state)
        else:
            started += _up_from_packages(wanted, state, urls)
        _write_state(state)
    if started and (report := os.environ.get(STARTED)):
        with Path(report).open("a") as lines:
            lines.writelines(f"{name}\n" for name in started)
    return started


def prepare(names: Sequence[str], *, throwaway: bool = False) -> None:
    """Install and fetch what these servers need, which may take minutes; starts nothing.

    Args:
        throwaway: for servers of one test, which neither a URL nor a container replaces.
    """
    wanted = [name for name in names if throwaway or not given_url(name)]
    if not throwaway and _may_compose(wanted):
        compose.pull(wanted)
    elif wanted:
        with _one_at_a_time():
            _provide(wanted, {})


def _may_compose(wanted: Sequence[str]) -> bool:
    return bool(wanted) and compose.URLS.keys() >= set(wanted) and compose.available()


def _up_with_compose(names: list[str], urls: dict[str, str]) -> list[str]:
    began = time.monotonic()
    running = compose.running()
    compose.up(names)
    urls.update({name: compose.URLS[name] for name in names})
    say(f"{', '.join(names)}: docker compose ({time.monotonic() - began:.1f} s)")
    return [name for name in names if name not in running]


def _up_from_packages(wanted: list[str], urls: dict[str, str], given: dict[str, str]) -> list[str]:
    began = time.monotonic()
    started: list[str] = []
    servers: list[ServerProcess] = []
    try:
        for name in _provide(wanted, given):
            server = _server(name, {**urls, **given})
            servers.append(server)
            if not server.running():
                started.append(name)
            server.launch()  # they come up side by side
            urls[name] = server.url
        _kept.extend(servers)
        for server in servers:
            version = server.wait_ready()
            took = "running"
            if server.name in started:
                took = f"answers after {time.monotonic() - began:.1f} s"
            say(f"{server.name}: {version} on 127.0.0.1:{server.port}, {took}")
    except BaseException:  # nothing half-started stays behind
        for name in started:
            ServerDirectory(name).remove()
        raise
    return started


def _provide(wanted: list[str], given: dict[str, str]) -> list[str]:
    """Install and fetch what these servers need; returns those that can run."""
    absent = packages.missing(wanted)
    if absent and packages.may_install():
        began = time.monotonic()
        say(f"installing {', '.join(absent)} with apt-get (once per machine)")
        packages.install(absent)
        say(f"installed in {time.monotonic() - began:.0f} s")
    elif absent:
        wanted = _without_missing(wanted, given)
    return [name for name in wanted if name not in packages.FETCH or _fetched(name)]


def _fetched(name: str) -> bool:
    """True when what is fetched for this server is here; fails without it where servers are required."""
    began = time.monotonic()
    try:
        if packages.FETCH[name]():
            say(f"{name}: fetched in {time.monotonic() - began:.0f} s (once per machine)")
    except UnavailableError as error:
        if servers_required() and not isinstance(error, UnofferedError):
            raise
        say(f"{name}: {error} (its tests are skipped)")
        return False
    return True


def _without_missing(wanted: list[str], given: dict[str, str]) -> list[str]:
    """The servers that can run; says which cannot, and fails where they are required."""
    present = [name for name in wanted if packages.installed(name)]
    if "postgresql" not in {*present, *given} and "pgbouncer" in present:
        present.remove("pgbouncer")
    for name in wanted:
        if name not in present:
            sentence = (
                f"{packages.what_is_missing(name)}; start Docker, install it, "
                f"run as root on Debian, or set {VARIABLES[name]}"
            )
            if servers_required():
                raise UnavailableError(sentence)
            say(f"{sentence} (its tests are skipped)")
    return present


def down(names: Sequence[str] | None = None) -> None:
    """Stop and delete these servers, or all of this checkout."""
    with _one_at_a_time():
        state = _read_state()
        composed = [name for name, url in state.items() if compose.URLS.get(name) == url]
        if names is not None:
            composed = [name for name in composed if name in names]
        if composed and compose.available():
            compose.down(None if names is None else composed)
        for directory in sorted(base_directory().iterdir(), reverse=True):
            if (directory.is_dir() or directory.is_symlink()) and (
                names is None or directory.name in names
            ):
                ServerDirectory(directory.name).remove()
        state = (
            {} if names is None else {name: url for name, url in state.items() if name not in names}
        )
        if state:
            _write_state(state)
        else:
            STATE_FILE.unlink(missing_ok=True)


def run(command: list[str], names: Sequence[str]) -> int:
    """Run `command` while these servers are up; stop those that were not up before."""
    started = up(names)
    # The terminal's Ctrl-C reaches the command by itself; here it must not skip the stopping. A
    # function, unlike SIG_IGN, is not inherited by the command.
    signal.signal(signal.SIGINT, lambda *_: None)
    report = base_directory() / f"started-{os.getpid()}"
    child = subprocess.Popen(command, env={**os.environ, STARTED: str(report)})
    signal.signal(signal.SIGTERM, lambda *_: child.terminate())
    try:
        return child.wait()
    finally:
        end_processes(f"{STARTED}={report}")
        with _one_at_a_time():
            remove_abandoned()
        if report.exists():
            started += report.read_text().split()
            report.unlink()
        if started:
            down(started)
