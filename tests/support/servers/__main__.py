"""`python -m tests.support.servers up | down | env | run -- command`."""

from __future__ import annotations

import argparse
import shlex
import sys

from tests.support.servers import BROKERS, VARIABLES, ServerError, server_urls
from tests.support.servers.provision import (
    DATABASES,
    DURABLE_SERVERS,
    TEST_SERVERS,
    down,
    run,
    say,
    up,
)

_ALONE = ("postgresql", "mariadb", "mysql", *BROKERS)
_GROUPS = {"brokers": BROKERS, "databases": DATABASES, "durable": DURABLE_SERVERS}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.support.servers", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    start = commands.add_parser("up", help="start the servers and leave them running")
    stop = commands.add_parser("down", help="stop every server of this checkout, delete its data")
    commands.add_parser("env", help="print the URLs as shell exports")
    runner = commands.add_parser("run", help="run a command while the servers are up")
    for command in (start, stop, runner):
        command.add_argument("--only", type=_names, metavar="a,b", help="these servers by name")
    for command in (start, runner):
        command.add_argument("--brokers", action="store_true", help="the brokers alone")
        command.add_argument("--databases", action="store_true", help="the databases alone")
        command.add_argument(
            "--durable", action="store_true", help="own servers with durability on, for benchmarks"
        )
    runner.add_argument("argv", nargs=argparse.REMAINDER)
    arguments = parser.parse_args()
    names = _selected(arguments)
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
                down(arguments.only)
                say("stopped, data deleted")
    except ServerError as error:
        say(str(error))
        return 1
    return 0


def _names(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if unknown := [name for name in names if name not in _ALONE]:
        raise argparse.ArgumentTypeError(f"{unknown[0]} is none of {', '.join(_ALONE)}")
    return names


def _selected(arguments: argparse.Namespace) -> tuple[str, ...]:
    only: tuple[str, ...] | None = getattr(arguments, "only", None)
    if only is not None:
        return only
    for option, servers in _GROUPS.items():
        if getattr(arguments, option, False):
            return servers
    return TEST_SERVERS


def _print_urls() -> None:
    for name, url in server_urls().items():
        print(f"export {VARIABLES[name]}={shlex.quote(url)}")


if __name__ == "__main__":
    sys.exit(main())
