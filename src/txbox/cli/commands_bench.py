"""bench: measure txbox on this machine and this server."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from txbox.cli.options import count
from txbox.cli.output import (
    Cell,
    confirmed,
    interactive,
    print_error,
    print_json,
    print_line,
    print_table,
    progress,
)
from txbox.errors import ConfigurationError, Fault, StoreUnavailable

# connection exceptions, wrong logins, no such database, too many connections, shut down
_AWAY = ("08", "28", "3D", "53", "57")
_SCHEMAS = "txbox_bench and txbox_bench_beside"


def add(commands: Any, common: argparse.ArgumentParser) -> None:
    del common  # no inbox is looked at: a URL is all it takes
    bench = commands.add_parser(
        "bench", help="measure throughput and latency on a PostgreSQL server",
        description="Runs the real worker on a workload of its own, in turns with the textbook loop (one transaction a "
        "message) and the limit (one statement a batch), verifies after every round that nothing is lost or doubled, "
        "and compares the ratios with the bars that txbox is held to.\n\n"
        f"It creates the schemas {_SCHEMAS} in that database and drops them at the end, makes checkpoints where "
        "it may, and keeps the server busy for minutes: not for a production server. Exit status 1 when a bar "
        "is missed or a round was wrong.",
    )  # fmt: skip
    bench.add_argument(
        "--database", metavar="URL", help="a PostgreSQL database (or TXBOX_DATABASE_URL)"
    )
    bench.add_argument(
        "--phase", action="append", metavar="NAME", help="P1, P3 …; may be repeated; all without"
    )
    bench.add_argument(
        "--messages", type=count, default=4000, metavar="N",
        help="in a round of the textbook loop (default 4000); faster ones get more",
    )  # fmt: skip
    bench.add_argument(
        "--rounds", type=count, default=3, metavar="N", help="of each contender (default 3)"
    )
    bench.add_argument("--yes", action="store_true", help="do not ask")
    bench.add_argument("--json", action="store_true", help="print JSON instead of tables")
    bench.set_defaults(run=_bench)


def _bench(args: argparse.Namespace) -> int:
    url = _url(args)
    try:
        import psycopg

        from txbox.bench.phases import PHASES
        from txbox.bench.result import passed
        from txbox.bench.setting import opened
    except ModuleNotFoundError as error:
        if error.name is None or not error.name.startswith("psycopg"):
            raise
        raise ConfigurationError(
            "`txbox bench` needs psycopg: run pip install 'txbox[postgresql]'."
        ) from error
    names: list[str] = args.phase or list(PHASES)
    if unknown := [name for name in names if name not in PHASES]:
        raise ConfigurationError(f"There is no phase {unknown[0]}: use {', '.join(PHASES)}.")
    if not (args.yes or _agreed()):
        print_error("Nothing was done.")
        return 1
    found: list[dict[str, Any]] = []
    try:
        with (
            progress("bench", len(names)) as bar,
            opened(url, rounds=args.rounds, messages=args.messages) as setting,
        ):
            for number, name in enumerate(names):
                bar(number)
                found.append(PHASES[name](setting))
    except psycopg.errors.InsufficientPrivilege as error:
        raise ConfigurationError(
            "This database role may not create schemas there: grant it CREATE on the database, or give another URL."
        ) from error
    except psycopg.OperationalError as error:
        if error.sqlstate is not None and error.sqlstate[:2] not in _AWAY:
            raise
        raise StoreUnavailable(
            f"The database cannot be reached ({type(error).__name__}): check the URL, and that the server is running.",
            fault=Fault.UNAVAILABLE,
            code=error.sqlstate,
        ) from error
    if args.json:
        print_json(found)
    else:
        _print_circumstances(found[0])
        for document in found:
            _print(document)
    return 0 if all(passed(document) for document in found) else 1


def _url(args: argparse.Namespace) -> str:
    url: str | None = args.database or os.environ.get("TXBOX_DATABASE_URL")
    if not url:
        raise ConfigurationError(
            "Which database? Give --database URL or set TXBOX_DATABASE_URL; it must be PostgreSQL."
        )
    scheme = urlsplit(url).scheme
    if scheme not in ("postgresql", "postgres"):
        raise ConfigurationError(
            f"`txbox bench` measures PostgreSQL, and this is {scheme or 'no URL'}: give postgresql://user@host/name."
        )
    return url


def _agreed() -> bool:
    what = f"create and drop the schemas {_SCHEMAS} in this database and keep its server busy for minutes"
    if not interactive():
        raise ConfigurationError(f"This would {what}: add --yes to do it without being asked.")
    return confirmed(f"{what.capitalize()}?")


_FIGURES = (
    ("msg/s", "rate", 0),
    ("min", "rate_min", 0),
    ("max", "rate_max", 0),
    ("p50 ms", "p50_ms", 2),
    ("p99 ms", "p99_ms", 2),
    ("client us", "client_cpu_us", 1),
    ("server us", "server_cpu_us", 1),
    ("WAL B", "wal_bytes", 0),
    ("dead rows", "dead_tuples", 0),
    ("lost", "lost", 0),
    ("doubled", "doubled", 0),
)


def _print_circumstances(document: Mapping[str, Any]) -> None:
    machine, server = document["machine"], dict(document["server"])
    version = server.pop("server_version", "")
    settings = ", ".join(f"{name}={value}" for name, value in sorted(server.items()))
    print_line(
        f"PostgreSQL {version} ({settings}); {machine['cores']} cores of {machine['cpu']}, "
        f"Python {document['versions']['python']}, psycopg {document['versions']['psycopg']}\n"
    )


def _print(document: Mapping[str, Any]) -> None:
    contenders: Mapping[str, Mapping[str, Any]] = document["contenders"]
    print_table(
        ["", *(head for head, _, _ in _FIGURES), "failed"],
        [
            [
                name,
                *(_rounded(own[figure], digits) for _, figure, digits in _FIGURES),
                _failures(own),
            ]
            for name, own in contenders.items()
        ],
        title=f"{document['phase']}: {document['title']}",
    )
    bars: Sequence[Mapping[str, Any]] = document["bars"]
    for own in bars:
        verdict = "met" if own["met"] else "not reached" if own["stretch"] else "MISSED"
        measured = "nothing" if own["measured"] is None else f"{own['measured']:.2f}"
        print_line(f"  {own['text']}: measured {measured} {own['unit']}, {verdict}")
    print_line("")


def _rounded(value: float | None, digits: int) -> Cell:
    if value is None:
        return None
    return round(value, digits) if digits else round(value)


def _failures(own: Mapping[str, Any]) -> str:
    said = "; ".join(own["failures"])
    return said or ("" if own["good"] else "WRONG")
