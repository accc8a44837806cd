"""Cases: a worker is killed at one point, others take over until nothing is left, then the tables are checked.

A case runs in a process of a pool that has imported everything and opened no client, so that a
worker is a fork away; workers are real processes and are killed by real signals.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import socket
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from multiprocessing import util
from pathlib import Path
from typing import Self

from tests.crash.brokers import mutants
from tests.crash.brokers.checker import Checked, check
from tests.crash.brokers.feeds import Sent
from tests.crash.brokers.hooks import WebhookFeed, append, listening
from tests.crash.brokers.service import TABLES, Job, Mode, messages, unfinished, work
from tests.support.databases import BY_NAME, Raw
from tests.support.waiting import DEADLINE_S
from txbox import session
from txbox.testing import kill_at

WITHIN_S = DEADLINE_S
# a machine that is busy is slow, but something is done all the time; a run that never gets quiet ends with it
_MOST_S = 5 * WITHIN_S
_LOOK_S = 2.0
#: Each grows to the number of messages at most, however often they are received or tried.
_DONE = """
    SELECT (SELECT count(*) FROM ledger), (SELECT count(*) FROM txbox_inbox),
           (SELECT count(*) FROM txbox_inbox WHERE status IN ('processed', 'dead')),
           (SELECT count(*) FROM txbox_quarantine)
"""
_TRIES = 4
_ROUNDS = 6
#: passed only when work takes longer than a third of a lease; its statement travels with BEGIN
HEARTBEAT = ("after:heartbeat",)
_JOBS = (":prune", ":job_acquire", ":job_create", ":job_release")
_CLEARED = (
    "txbox_inbox", "txbox_attempt", "txbox_quarantine", "txbox_job", "ledger", "account",
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One kill of one worker.

    Args:
        first: a worker before it is killed there already: what follows meets redeliveries.
        point: where the worker is killed; None kills none and records the points instead.
        wrong: a row of `mutants.WRONG`.
    """

    broker: str
    broker_url: str
    database: str
    mode: Mode
    point: str | None = None
    nth: int = 1
    first: tuple[str, int] | None = None
    wrong: str | None = None

    @property
    def path(self) -> str:
        """What the messages went through, for people."""
        return "redelivered" if self.first is not None else self.mode


@dataclass(frozen=True)
class Ended:
    """How a case ended; `killed` is False when the point was never passed."""

    case: Case
    killed: bool
    kills: int
    checked: Checked
    took_s: float
    notes: Sequence[str] = ()
    points: dict[str, int] = field(default_factory=dict)


class Workshop:
    """The database and the folder of one process: its cases follow one another."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="txbox-crashes-"))
        self._urls: dict[str, str] = {}
        self._owner = os.getpid()
        util.Finalize(self, self.close, exitpriority=10)

    def database(self, product: str) -> str:
        """The URL of a database with all tables and no rows."""
        if product not in self._urls:
            self._urls[product] = BY_NAME[product].create(self._folder, schema=True)
            with Raw(self._urls[product]) as raw:
                for table in TABLES:
                    raw.execute(table)
        url = self._urls[product]
        with Raw(url) as raw:
            for table in _CLEARED:
                raw.execute(f"DELETE FROM {table}")
            raw.execute("INSERT INTO account (name, balance) VALUES ('bank', 0)")
        return url

    @contextmanager
    def folder(self) -> Iterator[str]:
        directory = tempfile.mkdtemp(dir=self._folder)
        yield directory
        shutil.rmtree(directory)

    def close(self) -> None:
        if os.getpid() != self._owner:
            return
        for product, url in self._urls.items():
            BY_NAME[product].drop(url)
            BY_NAME[product].close()
        self._urls.clear()
        shutil.rmtree(self._folder, ignore_errors=True)


_workshop: Workshop | None = None


def workshop() -> Workshop:
    global _workshop  # noqa: PLW0603  # one for each process of the pool
    if _workshop is None:
        _workshop = Workshop()
    return _workshop


class Run:
    """The processes of one job."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.kills = 0
        self._sender: int | None = None
        self._listener: socket.socket | None = None

    def __enter__(self) -> Self:
        self.apart(self.job.feed.create)
        if self.job.broker == "webhook":
            self._listener = listening()
            port = self._listener.getsockname()[1]
            feed = WebhookFeed(self.job.folder, self.job.name)
            self._sender = self.start(lambda: feed.send_for_ever(port))
        return self

    def __exit__(self, *raised: object) -> None:
        if self._sender is not None:
            os.kill(self._sender, signal.SIGKILL)
            os.waitpid(self._sender, 0)
        if self._listener is not None:
            self._listener.close()
        self.apart(self.job.feed.remove)

    def start(self, call: Callable[[], object]) -> int:
        """Fork a process for a call; returns its id."""
        pid = os.fork()
        if pid:
            return pid
        status = 70
        try:
            errors = os.open(f"{self.job.folder}/errors", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
            os.dup2(errors, 1)
            os.dup2(errors, 2)
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            answer = call()
            status = answer if isinstance(answer, int) else 0
        except BaseException as error:  # noqa: BLE001  # the last line of a process: it is written down
            self.job.note(f"error {type(error).__name__}: {error}")
        finally:
            os._exit(status)

    def ended(self, pid: int, within_s: float = WITHIN_S) -> int:
        """The exit status, negative for the signal that ended it; what does nothing more for too long is an error."""
        began = time.monotonic()
        deadline, look_at = began + within_s, began + _LOOK_S
        done: list[tuple[int, ...]] = []
        pause_s = 0.001
        while True:
            if time.monotonic() > look_at:
                before, done = done, self._done()
                look_at = time.monotonic() + _LOOK_S
                if done != before:
                    deadline = min(look_at + within_s, began + max(_MOST_S, within_s))
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                code = os.waitstatus_to_exitcode(status)
                self.kills += code == -signal.SIGKILL
                if code not in (0, -signal.SIGKILL):
                    self.job.note(f"error exit status {code}")
                return code
            if time.monotonic() > deadline:
                took_s = time.monotonic() - began
                self.job.note(f"error not quiet after {took_s:.0f} s, {within_s:g} s of it idle")
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                return 70
            time.sleep(pause_s)
            pause_s = min(pause_s * 2, 0.05)

    def _done(self) -> list[tuple[int, ...]]:
        """How much is done, as far as the tables show it."""
        with Raw(self.job.database_url) as raw:
            return raw.rows(_DONE)

    def apart(self, call: Callable[[], object]) -> None:
        """Do something with a client in a process of its own."""
        pid = self.start(call)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if status:
            raise RuntimeError(f"{self.job.broker}: {self.job.notes()[-1:]}")

    def left(self) -> int:
        answer = Path(self.job.folder, "left")
        self.apart(lambda: answer.write_text(str(self.job.feed.left())) and None)
        return int(answer.read_text())

    def publish(self, sent: Sequence[Sent]) -> None:
        self.apart(lambda: self.job.feed.publish(sent))
        self.confirm(sent)

    def confirm(self, sent: Sequence[Sent]) -> None:
        append(Path(self.job.folder, "confirmed"), "".join(f"{message.id}\n" for message in sent))

    def confirmed(self) -> list[str]:
        return Path(self.job.folder, "confirmed").read_text().split()

    def worker(self, crash: tuple[str, int] | None = None, *, member: int = 0) -> int:
        """Start a worker, armed if so; returns its process id."""

        def armed() -> int:
            if crash is not None:
                kill_at(*crash)
            return work(self.job, self._listener, member=member, wrap=mutants.wrap_of(self.job))

        return self.start(armed)

    def recorded(self) -> Counter[str]:
        """Run a worker undisturbed; returns the points that it passed, with their passes."""
        passed: list[str] = []
        record = Path(self.job.folder, "points")

        def recording() -> int:
            session.crash_point = passed.append
            status = work(self.job, self._listener)
            record.write_text(json.dumps(passed))
            return status

        if self.ended(self.start(recording)) != 0:
            raise RuntimeError(f"the undisturbed run: {self.job.notes()} {self.errors()}")
        points: list[str] = json.loads(record.read_text())
        # what is passed only before anything was received belongs to the start; jobs are beside the way
        meanwhile = {
            point for point in points[points.index("received") :] if not point.endswith(_JOBS)
        }
        return Counter(point for point in points if point in meanwhile)

    def finish(self) -> int:
        """Start workers until nothing is left; returns what is left all the same."""
        left, rounds, again = 1, 0, True
        while again and rounds < _ROUNDS:
            rounds += 1
            status = self.ended(self.worker())
            left = self.left()
            if status not in (0, -signal.SIGKILL):
                break
            with Raw(self.job.database_url) as raw:
                # a drain leaves to the next what it has not begun
                again = bool(left or unfinished(raw))
        return left

    def checked(self, left: int) -> Checked:
        with Raw(self.job.database_url) as raw:
            return check(raw, self.job, self.confirmed(), kills=self.kills, left=left)

    def errors(self) -> list[str]:
        path = Path(self.job.folder, "errors")
        return path.read_text(errors="replace").splitlines()[-30:] if path.exists() else []


def job_of(case: Case, folder: str) -> Job:
    return Job(
        workshop().database(case.database), case.broker, case.broker_url,
        f"crash-{secrets.token_hex(5)}", case.mode, folder, case.wrong,
        # long enough for leases to be extended meanwhile
        handle_s=0.1 if "heartbeat" in (case.point or "") else 0.0,
    )  # fmt: skip


def run(case: Case) -> Ended:
    """Kill, let others take over, check. A point that this run did not pass is tried again, at its first pass.

    A wrong consumer that gets away is tried again too: one that is killed in a retry, while it has nothing
    of the broker's in flight, has nothing to lose.
    """
    again = 1
    while True:
        made = case if again <= _TRIES // 2 else replace(case, nth=max(1, case.nth // 4))
        ended = _run(made)
        met = ended.killed and case.wrong is None
        if met or case.point is None or ended.checked.wrong or again == _TRIES:
            return ended
        again += 1


def _run(case: Case) -> Ended:
    started = time.monotonic()
    with workshop().folder() as folder, Run(job_of(case, folder)) as the_run:
        the_run.publish(messages())
        if case.first is not None:
            the_run.ended(the_run.worker(case.first))
        points: Counter[str] = Counter()
        killed = False
        if case.point is None and case.wrong is None:
            points = the_run.recorded()
        elif case.point is not None:
            killed = the_run.ended(the_run.worker((case.point, case.nth))) == -signal.SIGKILL
        checked = the_run.checked(the_run.finish())
        notes = [*the_run.job.notes(), *the_run.errors()] if checked.wrong else []
        return Ended(
            case, killed, the_run.kills, checked, time.monotonic() - started, notes, dict(points)
        )
