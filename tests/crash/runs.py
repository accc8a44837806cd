"""Cases: a worker process is killed at one point, a fresh one gets the redelivery, then the tables are checked.

A case runs in a process of a pool that has imported everything and opened nothing, so that a worker
is a fork away; workers are real processes and are killed by real signals.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from tests.crash import mutants
from tests.crash.checker import Checked, check
from tests.crash.service import Job, Mode
from tests.support.databases import Raw
from tests.support.waiting import DEADLINE_S
from txbox import session
from txbox.testing import kill_at

#: Longer than it may take to become quiet, which says what is stuck.
_WORKER_WITHIN_S = int(2 * DEADLINE_S)
_TRIES = 3


@dataclass(frozen=True)
class Case:
    """One kill of one consumer.

    Args:
        consumer: a row of `mutants.CONSUMERS`; "txbox" is the real one.
        point: where the first worker is killed; None kills none.
        nth: which pass of that point.
    """

    database: str
    url: str
    folder: str
    mode: Mode
    consumer: str
    point: str | None
    nth: int
    number: int

    def job(self, again: int) -> Job:
        name = f"{self.consumer}-{self.mode}-{self.number}-{again}"
        return Job(self.url, self.mode, name, str(Path(self.folder, f"{name}.journal")))


@dataclass(frozen=True)
class Ended:
    """How a case ended; `killed` is False when the point was never passed."""

    case: Case
    killed: bool
    checked: Checked


def points_of(case: Case) -> list[tuple[str, int]]:
    """Every point that one undisturbed run passes, each with its passes numbered."""
    job = case.job(0)
    _open_account(job)
    record = f"{job.journal}.points"

    def work() -> None:
        passed: list[str] = []
        session.crash_point = passed.append
        mutants.CONSUMERS[case.consumer].work(job)
        Path(record).write_text(json.dumps(passed))

    status = _in_worker(work, job)
    if status != 0:
        raise AssertionError(f"the undisturbed run ended with {status}: {job.notes()}")
    passes: dict[str, int] = {}
    numbered: list[tuple[str, int]] = []
    for point in json.loads(Path(record).read_text()):
        passes[point] = passes.get(point, 0) + 1
        numbered.append((point, passes[point]))
    return numbered


def run(case: Case) -> Ended:
    """Kill, redeliver, check. A point that this run did not pass is tried again: rounds of an empty table vary."""
    again = 1
    while True:
        ended = _run(case, case.job(again))
        if ended.killed or case.point is None or again == _TRIES:
            return ended
        again += 1


def _run(case: Case, job: Job) -> Ended:
    consumer = mutants.CONSUMERS[case.consumer]
    _open_account(job)
    killed = _killed_worker(case, job)
    _in_worker(lambda: consumer.work(job), job)
    with Raw(job.url) as raw:
        checked = check(raw, job, unended=killed + consumer.starts, may_die=consumer.may_die)
    if consumer.deduplicates and not checked.wrong:
        # one more copy, long after: only now, since it would heal a loss
        _in_worker(lambda: mutants.deliver_late(consumer, job), job)
        with Raw(job.url) as raw:
            checked = check(raw, job, unended=killed + consumer.starts, may_die=consumer.may_die)
    return Ended(case, killed, checked)


def _killed_worker(case: Case, job: Job) -> bool:
    if case.point is None:
        return False
    point = case.point

    def work() -> None:
        kill_at(point, case.nth)
        mutants.CONSUMERS[case.consumer].work(job)

    return _in_worker(work, job) == -signal.SIGKILL


def is_swept(case: Case) -> bool:
    """Say whether the consumer of a case is killed at every point."""
    return mutants.CONSUMERS[case.consumer].swept


def numbered(case: Case, number: int, point: str | None, nth: int) -> Case:
    return replace(case, number=number, point=point, nth=nth)


def _open_account(job: Job) -> None:
    with Raw(job.url) as raw:
        raw.execute("INSERT INTO account (name, balance) VALUES (?, 0)", (job.consumer,))


def _in_worker(work: Callable[[], None], job: Job) -> int:
    """Run in a forked process; returns its exit status, negative for the signal that killed it."""
    pid = os.fork()
    if pid == 0:
        status = 70
        try:
            signal.alarm(_WORKER_WITHIN_S)
            work()
            status = 0
        except BaseException as error:  # noqa: BLE001  # the last line of a process: it is written down
            job.note(f"error {type(error).__name__}: {error}")
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
