"""`python -m benchmarks [PHASE …]`: measure txbox, each phase beside what it is compared with.

In a database of the durable test server, which `make bench` starts; results go to benchmarks/results and
docs/performance.md. With `--database URL` on a PostgreSQL server of yours: the phases that need nothing else, and
nothing is stored. That creates the schemas txbox_bench and txbox_bench_beside there, drops them at the end, makes
checkpoints where it may, and keeps the server busy for minutes: not for a production server.

Exit status 1 when a bar is missed, a round was wrong, or a phase could not run; 2 when nothing was measured.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from importlib import import_module
from typing import Any
from urllib.parse import urlsplit

import psycopg

from benchmarks import report
from benchmarks.phases import PHASES as CORE
from benchmarks.place import SCHEMAS, refuse_foreign
from benchmarks.result import passed
from benchmarks.servers import fresh_database
from benchmarks.setting import opened
from tests.support.servers import ServerError
from txbox.cli.output import confirmed, interactive
from txbox.errors import ConfigurationError

#: One line a phase, in the order of the page: its title while it has no result, and the module with `run`;
#: None for those of `benchmarks.phases`.
PHASES: dict[str, tuple[str, str | None]] = {
    "P1": ("One message at a time", None),
    "P2": ("Backlog, an ordinary handler", None),
    "P3": ("Backlog, pipeline=True", None),
    "P4": ("Backlog, batch=True", None),
    "P5": ("Slow disk", "benchmarks.p05_slow_disk"),
    "P6": ("Open loop", None),
    "P6b": ("Open loop beyond what naive can do", None),
    "P7": ("Four lanes, hot rows", None),
    "P8": ("Growth to 10 million rows", "benchmarks.p08_growth"),
    "P8b": ("A lease before a backlog", "benchmarks.p08b_backlog"),
    "P9": ("Retention", "benchmarks.p09_retention"),
    "P10": ("mode='stored'", None),
    "P11": ("SQLite", "benchmarks.p11_sqlite"),
    "P12": ("Handlers that fail", None),
    "P13": ("A storm of duplicates", None),
    "P14": ("Kafka to PostgreSQL", "benchmarks.p14_kafka"),
    "P15": ("SQLAlchemy", "benchmarks.p15_sqlalchemy"),
    "P16": ("Peers", "benchmarks.peers.p16"),
    "P17": ("What the inbox costs", None),
    "P18": ("Import and memory", "benchmarks.p18_footprint"),
    "P19": ("A handler that stages", None),
    "P20": ("accept in a loop of one's own", None),
    "P22": ("Types that alternate", None),
    "P23": ("A signed webhook over a kept-alive connection", None),
    "P24": ("The relay to each broker, many keys and one", "benchmarks.p24_relay_keys"),
    "P25": ("Kafka from the start of an assignment", "benchmarks.p25_kafka_start"),
    "P26": ("Kafka, ordered=True with 10,000 keys", "benchmarks.p26_kafka_ordered"),
    "P27": ("A request once for each Idempotency-Key", None),
    "MARIADB": ("MariaDB", "benchmarks.mariadb"),
    "PROFILE": ("Where a message's microseconds go", "benchmarks.profile"),
    "SNAPSHOT": ("Stored, while an old snapshot is held", None),
    "CRASH": ("Killed and started again", "benchmarks.crash"),
    "RELAY": ("The relay", "benchmarks.relay"),
    "SOAK": ("Ten minutes of steady load", "benchmarks.soak"),
}
_POSTGRESQL = [*CORE, "P5", "P18", "PROFILE", "CRASH"]
_GROUPS = {
    "all": [name for name in PHASES if name != "SOAK"],
    "postgresql": [name for name in PHASES if name in _POSTGRESQL],
}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure; returns the exit status."""
    options = _options(argv)
    out = sys.stderr if options.json else sys.stdout
    failed = False
    done: list[dict[str, Any]] = []
    for name in options.phases:
        began = time.monotonic()
        try:
            result = _run(name, options)
        except (ServerError, ModuleNotFoundError) as error:
            print(f"{name} could not run: {error}", file=sys.stderr)
            failed = True
            continue
        except Exception:  # noqa: BLE001  # the phases after it are worth their time all the same
            traceback.print_exc()
            failed = True
            continue
        done.append(result)
        print(f"\n{name}: {result['title']} ({time.monotonic() - began:.0f} s)\n", file=out)
        print("\n".join(report.lines(result)), file=out, flush=True)
        failed = failed or not passed(result)
        if options.store:
            print(f"stored: {report.store(result)}", file=out)
    if options.store:
        titles = {name: title for name, (title, _) in PHASES.items()}
        print(f"rendered: {report.write_page(titles)}", file=out)
    if options.database and done:
        settings = ", ".join(f"{name}={value}" for name, value in done[0]["server"].items())
        print(f"\n{report.measured_on(done[0])} Server: {settings}.", file=out)
    for line in report.summary_of(done):
        print(line, file=out)
    if options.json:
        print(json.dumps(done, indent=1))
    return 1 if failed else 0


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument(
        "phases", nargs="*", metavar="PHASE",
        help=f"{', '.join(PHASES)};\nor a group: {', '.join(_GROUPS)}; without, all but the soak",
    )  # fmt: skip
    parser.add_argument("--database", metavar="URL", help="measure a PostgreSQL server of yours")
    parser.add_argument("--yes", action="store_true", help="with --database: do not ask")
    parser.add_argument("--rounds", type=_count, default=5, help="of each contender (default 5)")
    parser.add_argument(
        "--messages", type=_count, default=4000, help="distinct, a round of naive (default 4000)"
    )
    parser.add_argument("--quick", action="store_true", help="one small round, stored nowhere")
    parser.add_argument("--dry", action="store_true", help="print only; store nothing")
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    parser.add_argument("--page", action="store_true", help="write the page again, measure nothing")
    options = parser.parse_args(argv)
    known = {**{name: [name] for name in PHASES}, **_GROUPS}
    if options.database:
        known = {name: [name] for name in CORE} | {"all": [*CORE]}
    named: Sequence[str] = options.phases or ([] if options.page else ["all"])
    if unknown := [name for name in named if name not in known]:
        where = " with --database" if options.database else ""
        parser.error(f"there is no phase {unknown[0]}{where}: use {', '.join(known)}")
    options.phases = list(dict.fromkeys(phase for name in named for phase in known[name]))
    options.store = not (options.dry or options.quick or options.database)
    if options.quick:
        options.rounds, options.messages = 1, 500
    if options.database and (problem := _refused(options.database, agreed=options.yes)):
        parser.error(problem)
    return options


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number


def _refused(url: str, *, agreed: bool) -> str | None:
    """Why nothing is measured in this database of somebody's, or None."""
    scheme = urlsplit(url).scheme
    if scheme not in ("postgresql", "postgres"):
        return f"--database must be PostgreSQL, and this is {scheme or 'no URL'}: give postgresql://user@host/name"
    what = f"create and drop the schemas {' and '.join(SCHEMAS)} in this database and keep its server busy for minutes"
    if not agreed and not interactive():
        return f"this would {what}: add --yes to do it without being asked"
    if not agreed and not confirmed(f"{what.capitalize()}?"):
        return "nothing was done"
    try:
        with psycopg.connect(url, autocommit=True) as admin:
            for name in SCHEMAS:
                refuse_foreign(admin, name)
            may = admin.execute("SELECT has_database_privilege(current_database(), 'CREATE')")
            if may.fetchone() != (True,):
                return "this database role may not create schemas there: grant it CREATE on the database"
    except ConfigurationError as error:
        return str(error)
    except psycopg.Error as error:
        # its text may hold what the URL holds
        name = type(error).__name__
        return f"the database cannot be reached ({name}): check the URL, and that the server is running"
    return None


def _run(name: str, options: argparse.Namespace) -> dict[str, Any]:
    rounds, messages, database = options.rounds, options.messages, options.database
    module = PHASES[name][1]
    if module is not None:
        run: Callable[..., dict[str, Any]] = import_module(module).run
        return run(rounds=rounds, messages=messages)

    def report_step(text: str) -> None:
        if sys.stderr.isatty():
            print(f"\r\033[K{name}: {text}", end="", file=sys.stderr, flush=True)

    with (
        nullcontext(database) if database else fresh_database(name.lower()) as url,
        opened(url, rounds=rounds, messages=messages, report=report_step) as setting,
    ):
        found = CORE[name](setting)
        report_step("done\n")
        return found


if __name__ == "__main__":
    sys.exit(main())
