"""`python -m tests.servers up [--durable] | down | env | run -- command`."""

from __future__ import annotations

import argparse
import fcntl
import json
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from tests.servers import (
    STATE_FILE,
    VARIABLES,
    ServerError,
    compose,
    given_url,
    packages,
    server_urls,
    servers_required,
)
from tests.servers.mariadb import MariaDBServer
from tests.servers.postgresql import PgBouncerServer, PostgreSQLServer
from tests.servers.process import ServerDirectory, ServerProcess, base_directory

TEST_SERVERS = ("postgresql", "mariadb", "pgbouncer")
DURABLE_SERVERS = ("postgresql-durable", "mariadb-durable")


def _say(line: str) -> None:
    print(f"servers: {line}", flush=True)


@contextmanager
def _one_at_a_time() -> Iterator[None]:
    base_directory().mkdir(mode=0o755, exist_ok=True)
    with (base_directory() / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _server(name: str, urls: dict[str, str]) -> ServerProcess:
    match name:
        case "postgresql":
            return PostgreSQLServer(name)
        case "postgresql-durable":
            return PostgreSQLServer(name, durable=True, preferred_port=55433)
        case "mariadb":
            return MariaDBServer(name)
        case "mariadb-durable":
            return MariaDBServer(name, durable=True, preferred_port=53308)
        case "pgbouncer":
            return PgBouncerServer(name, urls["postgresql"])
        case _:
            raise ServerError(f"no server is called {name}")


def up(names: tuple[str, ...]) -> list[str]:
    """Make these servers answer; returns the names of those that were started just now."""
    urls: dict[str, str] = {}
    started: list[str] = []
    for name, variable in VARIABLES.items():
        if url := given_url(name):
            urls[name] = url
            _say(f"{name}: given by {variable}")
    wanted = [name for name in names if name not in urls]
    with _one_at_a_time():
        own = json.loads(STATE_FILE.read_text()) if STATE_FILE.exists() else {}
        if names == TEST_SERVERS and wanted and compose.available():
            started += _up_with_compose(wanted, own)
        else:
            started += _up_from_packages(wanted, own, urls)
        STATE_FILE.write_text(json.dumps(own, indent=2) + "\n")
    return started


def _up_with_compose(wanted: list[str], own: dict[str, str]) -> list[str]:
    began = time.monotonic()
    names = [*wanted, *([] if given_url("mysql") else ["mysql"])]
    running = compose.running()
    compose.up(names)
    own.update({name: compose.URLS[name] for name in names})
    _say(f"{', '.join(names)}: docker compose ({time.monotonic() - began:.1f} s)")
    return [name for name in names if name not in running]


def _up_from_packages(wanted: list[str], own: dict[str, str], given: dict[str, str]) -> list[str]:
    absent = packages.missing(wanted)
    if absent and packages.may_install():
        began = time.monotonic()
        _say(f"installing {', '.join(absent)} with apt-get (once per machine)")
        packages.install(absent)
        _say(f"installed in {time.monotonic() - began:.0f} s")
    elif absent:
        wanted = _without_missing(wanted, given)
    started: list[str] = []
    try:
        for name in wanted:
            began = time.monotonic()
            server = _server(name, {**own, **given})
            took = "running"
            if not server.running():
                started.append(name)
            version = server.start()
            if name in started:
                took = f"started in {time.monotonic() - began:.1f} s"
            own[name] = server.url
            _say(f"{name}: {version} on 127.0.0.1:{server.port}, {took}")
    except BaseException:  # nothing half-started stays behind
        for name in started:
            ServerDirectory(name).remove()
        raise
    return started


def _without_missing(wanted: list[str], given: dict[str, str]) -> list[str]:
    """The servers that can run; says which cannot, and fails where they are required."""
    present = [name for name in wanted if packages.installed(name)]
    if "postgresql" not in {*present, *given} and "pgbouncer" in present:
        present.remove("pgbouncer")
    for name in wanted:
        if name not in present:
            sentence = (
                f"{name}: not here; start Docker, install it, run as root on Debian, "
                f"or set {VARIABLES[name]}"
            )
            if servers_required():
                raise ServerError(sentence)
            _say(f"{sentence} (its tests are skipped)")
    return present


def down(names: list[str] | None = None) -> None:
    """Stop and delete these servers, or all of this checkout."""
    with _one_at_a_time():
        own = json.loads(STATE_FILE.read_text()) if STATE_FILE.exists() else {}
        if compose.URLS.items() & own.items() and compose.available():
            compose.down()
        for directory in sorted(base_directory().iterdir(), reverse=True):
            if directory.is_dir() and (names is None or directory.name in names):
                ServerDirectory(directory.name).remove()
        own = {} if names is None else {name: url for name, url in own.items() if name not in names}
        if own:
            STATE_FILE.write_text(json.dumps(own, indent=2) + "\n")
        else:
            STATE_FILE.unlink(missing_ok=True)


def run(command: list[str], names: tuple[str, ...]) -> int:
    """Run `command` while these servers are up; stop those that were not up before."""
    started = up(names)
    # The terminal's Ctrl-C reaches the command by itself; here it must not skip the stopping. A
    # function, unlike SIG_IGN, is not inherited by the command.
    signal.signal(signal.SIGINT, lambda *_: None)
    child = subprocess.Popen(command)
    signal.signal(signal.SIGTERM, lambda *_: child.terminate())
    try:
        return child.wait()
    finally:
        if started:
            down(started)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.servers", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    start = commands.add_parser("up", help="start the servers and leave them running")
    commands.add_parser("down", help="stop every server of this checkout and delete its data")
    commands.add_parser("env", help="print the URLs as shell exports")
    runner = commands.add_parser("run", help="run a command while the servers are up")
    for command in (start, runner):
        command.add_argument(
            "--durable", action="store_true", help="own servers with durability on, for benchmarks"
        )
    runner.add_argument("argv", nargs=argparse.REMAINDER)
    arguments = parser.parse_args()
    names = DURABLE_SERVERS if getattr(arguments, "durable", False) else TEST_SERVERS
    try:
        match arguments.command:
            case "up":
                up(names)
                _print_urls()
            case "env":
                _print_urls()
            case "run":
                argv = arguments.argv[1:] if arguments.argv[:1] == ["--"] else arguments.argv
                return run(argv, names)
            case _:
                down()
                _say("stopped, data deleted")
    except ServerError as error:
        _say(str(error))
        return 1
    return 0


def _print_urls() -> None:
    for name, url in server_urls().items():
        print(f"export {VARIABLES[name]}={shlex.quote(url)}")


if __name__ == "__main__":
    sys.exit(main())
