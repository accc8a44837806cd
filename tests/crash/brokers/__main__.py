"""The sweep: `python -m tests.crash.brokers [--brokers a,b] [--databases a,b] [--paths a,b]`.

Every broker, every database, every crash point between receive and acknowledgement: the worker is
killed there, others take over, and nothing may be lost or doubled. Then the scenarios and the wrong
consumers. Prints a line for each, writes docs/reliability/crashes.md, and fails when one is wrong.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from tests.crash.brokers import page, runs, scenarios
from tests.crash.brokers.mutants import WRONG as WRONG_CONSUMERS
from tests.crash.brokers.results import SCENARIO, WRONG, Result, Results, result
from tests.crash.brokers.runs import Case, Ended
from tests.support.servers import BROKERS, provision, server_urls

ALL_BROKERS = ("kafka", "kafka-share", "rabbitmq", "sqs", "nats", "redis", "webhook")
ALL_DATABASES = ("postgresql", "mariadb", "sqlite")
SWEEPS = ("inline", "stored", "redelivered")
ALL_PATHS = (*SWEEPS, SCENARIO, WRONG)
#: Of another name than their server.
_SERVERS = {"kafka-share": "kafka"}
_CHOICES = {"brokers": ALL_BROKERS, "databases": ALL_DATABASES, "paths": ALL_PATHS}
# dies with messages in work, done and untouched: what the next worker gets are redeliveries
_FIRST = ("after:handler", 5)
# swept on the path of redeliveries even though the others pass them as well
_AGAIN = {"received", "after:handler", "before:commit", "after:commit", "before:ack", "after:ack"}
# most of the time is waiting for leases and time-outs: more cases at once than cores
_PROCESSES = 8


@dataclass(frozen=True)
class Selection:
    brokers: Sequence[str]
    databases: Sequence[str]
    paths: Sequence[str]

    def cases(self, urls: dict[str, str]) -> Iterator[Case]:
        for database in self.databases:
            for broker in self.brokers:
                url = urls.get(_SERVERS.get(broker, broker), "")
                yield Case(broker, url, database, "inline")


def _names(allowed: Sequence[str], text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if unknown := [name for name in names if name not in allowed]:
        raise argparse.ArgumentTypeError(f"{unknown[0]} is none of {', '.join(allowed)}")
    return names


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.crash.brokers", description=__doc__)
    for name, allowed in _CHOICES.items():
        parser.add_argument(
            f"--{name}",
            default=allowed,
            type=partial(_names, allowed),
            metavar="a,b",
            help=", ".join(allowed),
        )
    parser.add_argument("--processes", type=int, default=_PROCESSES)
    return parser.parse_args()


def points_of(recorded: Sequence[Ended]) -> Iterator[Case]:
    """A case for each point that the undisturbed runs of one broker on one database passed."""
    known: set[str] = set()
    for each in recorded:
        if each.case.mode == "stored":
            each.points.update(dict.fromkeys(runs.HEARTBEAT, 1))
        for point, passes in each.points.items():
            if each.case.first is None or point not in known or point in _AGAIN:
                yield replace(each.case, point=point, nth=max(1, passes // 2))
        known |= each.points.keys()


def sweep_cases(case: Case, paths: Sequence[str]) -> list[Case]:
    """The runs that find out what there is to pass."""
    all_of_them = {
        "inline": case,
        "stored": replace(case, mode="stored"),
        "redelivered": replace(case, first=_FIRST),
    }
    return [each for path, each in all_of_them.items() if path in paths]


def wrong_cases(case: Case) -> list[Case]:
    points = {"ack_first": "after:handler", "no_identity": "after:commit"}
    return [
        replace(case, wrong=wrong_consumer, point=points[wrong_consumer], nth=9)
        for wrong_consumer in WRONG_CONSUMERS
    ]


def as_result(ended: Ended) -> Result:
    case = ended.case
    path, point = (WRONG, case.wrong) if case.wrong else (case.path, case.point or "none")
    return result(
        (case.broker, case.database, path, point), ended.kills, ended.checked,
        int(case.point is not None and not ended.killed),
    )  # fmt: skip


def main() -> int:
    arguments = _arguments()
    selection = Selection(arguments.brokers, arguments.databases, arguments.paths)
    servers = {_SERVERS.get(broker, broker) for broker in selection.brokers}
    provision.up(tuple(server for server in BROKERS if server in servers))
    results = Results()
    results.load()
    for case in selection.cases({}):
        for path in selection.paths:
            results.forget(case.broker, case.database, path)
    bad = 0
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(arguments.processes, mp_context=context) as pool:
        for done in _all(pool, list(selection.cases(server_urls())), selection.paths):
            if isinstance(done, BaseException):
                bad += 1
                print("".join(traceback.format_exception(done)), flush=True)
                continue
            done_result = as_result(done) if isinstance(done, Ended) else done
            results.add(done_result)
            # what was found stays, whatever ends this run
            results.save()
            print(done_result.line(), flush=True)
            if bool(done_result.wrong) != (done_result.path == WRONG):
                bad += 1
                print("\n".join(getattr(done, "notes", ())), flush=True)
    results.about |= page.about(selection.databases)
    results.save()
    page.write(results)
    print(f"{bad} wrong" if bad else "nothing lost, nothing doubled")
    return 1 if bad else 0


def _all(
    pool: ProcessPoolExecutor, cases: Sequence[Case], paths: Sequence[str]
) -> Iterator[Ended | Result | BaseException]:
    """Every case as it ends; those of a sweep begin when its undisturbed runs are over."""
    recording: dict[Future[Any], list[Future[Any]]] = {}
    waiting: set[Future[Any]] = set()
    for case in cases:
        recorded = [pool.submit(runs.run, sweep_case) for sweep_case in sweep_cases(case, paths)]
        recording |= dict.fromkeys(recorded, recorded)
        waiting.update(recorded)
    for case in cases:
        if WRONG in paths:
            waiting.update(pool.submit(runs.run, wrong_case) for wrong_case in wrong_cases(case))
        if SCENARIO in paths:
            names = scenarios.names(case.broker)
            waiting.update(pool.submit(scenarios.run, name, case) for name in names)
    while waiting:
        ended, waiting = wait(waiting, return_when=FIRST_COMPLETED)
        for outcome in ended:
            yield outcome.exception() or outcome.result()
            sisters = recording.pop(outcome, None)
            if sisters and all(sister.done() for sister in sisters):
                found = [sister.result() for sister in sisters if not sister.exception()]
                waiting |= {pool.submit(runs.run, case) for case in points_of(found)}


if __name__ == "__main__":
    sys.exit(main())
