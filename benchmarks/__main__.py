"""`python -m benchmarks [all | postgresql | P1 …] [--rounds N] [--messages N] [--quick] [--dry]`.

Without phases: all but the soak. Exit status 1 when a bar is missed, a round was wrong, or a phase could not run.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

from benchmarks import measure, report
from benchmarks.servers import fresh_database
from tests.servers import ServerError
from txbox.bench.phases import PHASES as CORE
from txbox.bench.result import passed
from txbox.bench.setting import opened

#: One line a phase, in the order of the page: its title while it has no result, and the module with `run`;
#: None for those that txbox itself can run on any server.
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


def main() -> int:
    arguments = _arguments()
    failed = False
    done: list[dict[str, Any]] = []
    for name in arguments.phases:
        began = time.monotonic()
        try:
            result = _run(name, arguments.rounds, arguments.messages)
        except (ServerError, ModuleNotFoundError) as error:
            print(f"{name} could not run: {error}", file=sys.stderr)
            failed = True
            continue
        except Exception:  # noqa: BLE001  # the phases after it are worth their time all the same
            traceback.print_exc()
            failed = True
            continue
        done.append(result)
        print(f"\n{name}: {result['title']} ({time.monotonic() - began:.0f} s)\n")
        print("\n".join(report.lines(result)), flush=True)
        failed = failed or not passed(result)
        if not arguments.dry:
            print(f"stored: {report.store(result)}")
    if not arguments.dry:
        print(f"rendered: {report.write_page({name: own[0] for name, own in PHASES.items()})}")
    for line in report.summary_of(done):
        print(line)
    return 1 if failed else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "phases", nargs="*", metavar="PHASE", help=f"of {', '.join(_GROUPS)}, {', '.join(PHASES)}"
    )
    parser.add_argument("--rounds", type=int, default=5, help="of each contender (default 5)")
    parser.add_argument(
        "--messages", type=int, default=4000, help="distinct, a round of naive (default 4000)"
    )
    parser.add_argument("--quick", action="store_true", help="one small round, stored nowhere")
    parser.add_argument("--dry", action="store_true", help="print only; store nothing")
    parser.add_argument(
        "--page", action="store_true", help="render the page again, measure nothing"
    )
    arguments = parser.parse_args()
    named: Sequence[str] = arguments.phases or ([] if arguments.page else ["all"])
    phases: list[str] = []
    for name in named:
        if name not in PHASES and name not in _GROUPS:
            parser.error(f"no phase {name}; there are {', '.join((*_GROUPS, *PHASES))}")
        phases += _GROUPS.get(name, [name])
    arguments.phases = list(dict.fromkeys(phases))
    if arguments.quick:
        arguments.rounds, arguments.messages, arguments.dry = 1, 500, True
    return arguments


def _run(name: str, rounds: int, messages: int) -> dict[str, Any]:
    module = PHASES[name][1]
    if module is not None:
        run: Callable[..., dict[str, Any]] = import_module(module).run
        return run(rounds=rounds, messages=messages)

    def report_step(text: str) -> None:
        if sys.stderr.isatty():
            print(f"\r\033[K{name}: {text}", end="", file=sys.stderr, flush=True)

    with (
        fresh_database(name.lower()) as url,
        opened(url, rounds=rounds, messages=messages, report=report_step) as setting,
    ):
        found = CORE[name](setting)
        report_step("done\n")
        return {**found, **measure.circumstances(url), "date": found["date"]}


if __name__ == "__main__":
    sys.exit(main())
