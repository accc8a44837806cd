"""One chaos run: servers, processes that are started again when they end, a nemesis, and the rest at the end."""

from __future__ import annotations

import multiprocessing
import os
import random
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tests.chaos import release, workload
from tests.chaos.brokers import ENTRIES, PAYMENTS, BrokerServer, patiently, server_of
from tests.chaos.checker import Checked, Key, Read, check, elle, keys_of, read_lists, text
from tests.chaos.databases import DATABASES, Database
from tests.chaos.journal import Journal, facts
from tests.chaos.nemesis import Nemesis
from tests.chaos.workload import Plan
from tests.support.databases import Raw
from tests.support.waiting import DEADLINE_S
from txbox import App
from txbox.admin import Admin
from txbox.errors import TxboxError

#: No progress for so long, once everything is healed, is what the checker calls stuck.
PATIENCE_S = 120.0
_MEMBERS = ("bank", "bank", "bank", "books", "books", "relay", "maintain", "producer", "operator")
#: Roles that consume, and what.
_CONSUMED = {"bank": PAYMENTS, "books": ENTRIES}
#: Exit statuses: drained; the database or broker could not be reached at the start; signals that a nemesis sends.
_GOOD_ENDS = (0, 2, -signal.SIGKILL, -signal.SIGTERM)
_UNFINISHED = """
SELECT (SELECT count(*) FROM txbox_inbox WHERE status IN ('pending', 'processing', 'failed')),
       (SELECT count(*) FROM txbox_outbox WHERE status <> 'dead')
"""


class StuckError(Exception):
    """A run that made no progress for two minutes."""


@dataclass
class _Member:
    plan: Plan
    process: Any = None
    began: float = 0.0
    #: It is not started again.
    dismissed: bool = False
    #: It has had SIGTERM: it may be cut off.
    told: bool = False


class Run:
    """The state of one run that its nemesis works on."""

    def __init__(
        self, database: Database, broker: BrokerServer, folder: Path, seed: int, *, rate: float = 600.0
    ) -> None:  # fmt: skip
        self.database, self.broker, self.folder, self.seed = database, broker, folder, seed
        self.journal = Journal(folder, "harness")
        self.ends: list[str] = []
        self._rate = rate
        self._members: dict[str, _Member] = {}
        self._lock = threading.RLock()
        self._over = threading.Event()
        self._numbers = 0
        self._next_release: release.Server | None = None
        self._context: Any = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(
            ["tests.chaos.workload", "txbox.cli.run", "txbox.worker"]
        )
        self._keeper = threading.Thread(target=self._keep)

    # -- processes ----------------------------------------------------------------------------

    def start(self) -> None:
        for role in _MEMBERS:
            self.add(role)
        self._keeper.start()

    def add(self, role: str, **options: Any) -> str:
        """Start one more process of a role; returns its name."""
        with self._lock:
            self._numbers += 1
            number = self._numbers
            name = f"{role}-{number}"
            plan = Plan(
                role, name, self.folder, self.seed, self.database.url(number),
                self.broker.payments(proxied=bool(number % 2)),
                self.broker.entries(proxied=bool(number % 3)),
                rate=self._rate, port=self.broker.lend_port(_CONSUMED[role]) if role in _CONSUMED else None,
            )  # fmt: skip
            self._members[name] = _Member(replace(plan, **options))
            self._launch(self._members[name])
            return name

    def names(self, *roles: str) -> list[str]:
        with self._lock:
            return [
                name
                for name, member in self._members.items()
                if member.plan.role in roles and not member.dismissed
            ]

    def strike(self, role: str, number: signal.Signals, rng: random.Random) -> int:
        """Send a signal to a process of a role; returns its process id."""
        with self._lock:
            member = self._members[rng.choice(self.names(role))]
            member.told = member.told or number == signal.SIGTERM
            return self._send(member, number)

    def resume(self, pid: int) -> None:
        with self._lock:
            if any(member.process.pid == pid for member in self._members.values()):
                _kill(pid, signal.SIGCONT)

    def replace(self, name: str, **options: Any) -> None:
        """End a process by SIGTERM; the one that follows has other options."""
        with self._lock:
            member = self._members[name]
            member.plan = replace(member.plan, **options)
            member.told = True
            self._send(member, signal.SIGTERM)

    def bring_next_release(self) -> None:
        """Give the tables the schema of the release that follows, once; from then on its processes can be started."""
        if self._next_release is None:
            directory = self.folder / "release"
            shutil.rmtree(directory, ignore_errors=True)
            release.migrate(release.build(directory), self.database.url(0))
            self._next_release = release.Server(directory)

    def is_next(self, name: str) -> bool:
        with self._lock:
            return self._members[name].plan.is_next

    def dismiss(self, name: str, number: signal.Signals) -> None:
        with self._lock:
            member = self._members[name]
            member.dismissed = member.told = True
            self._send(member, number)

    def _send(self, member: _Member, number: signal.Signals) -> int:
        pid = int(member.process.pid)
        if member.process.is_alive():
            _kill(pid, number)
        return pid

    def _launch(self, member: _Member) -> None:
        plan = member.plan
        if plan.is_next and self._next_release is not None:
            member.process = release.Process(self._next_release, plan)
        else:
            member.process = self._context.Process(target=workload.run, args=(plan,), daemon=True)
        member.process.start()
        member.began, member.told = time.monotonic(), False

    def _keep(self) -> None:
        """Start again what has ended."""
        while not self._over.wait(0.05):
            with self._lock:
                for name, member in list(self._members.items()):
                    code = member.process.exitcode
                    # what cannot start is not started at once again
                    if code is None or time.monotonic() < member.began + 0.3:
                        continue
                    self._note_end(name, member, code)
                    if member.dismissed or (self.stopped and member.plan.role in ("producer", "operator")):  # fmt: skip
                        self.broker.take_back(member.plan.port)
                        del self._members[name]
                    else:
                        self._launch(member)

    def _note_end(self, name: str, member: _Member, code: int) -> None:
        self.journal.write("ended", name, code)
        if code not in _GOOD_ENDS and not (member.told and code == 1):
            self.ends.append(f"{name} ended with status {code}")

    # -- the end ------------------------------------------------------------------------------

    def heal(self) -> None:
        """Start the servers that did not come back in time, when the machine was too busy."""
        patiently(self.database.heal)
        patiently(self.broker.server.start)

    @property
    def stopped(self) -> bool:
        """No more messages are sent."""
        return (self.folder / "stop").exists()

    def recreate(self) -> None:
        """Delete the queue of payments and make it again, then send what is not in the inbox once more."""
        try:
            self.broker.recreate(self.broker.payments())
        finally:
            # also after a call that failed: it may have deleted the queue
            self._send_missing()

    def _send_missing(self) -> None:
        # what was being sent may have been in the queue, confirmed or not
        sent, kept = self._numbers_sent(), self._kept()
        plan = self._members[self.names("bank")[0]].plan
        plan = replace(plan, payments=self.broker.payments())
        again = [number for number in sorted(sent) if not keys_of(self.seed, number) <= kept]
        workload.send_again(plan, again)
        self.journal.write("sent", *again)

    def _kept(self) -> set[Key]:
        """What is in the inbox; waits for a database that is away because of another fault."""
        deadline = time.monotonic() + DEADLINE_S
        while True:
            try:
                with self.database.raw() as raw:
                    rows = raw.rows("SELECT consumer, message_id FROM txbox_inbox")
            except Exception:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)
            else:
                return {(text(consumer), text(message_id)) for consumer, message_id in rows}

    def _numbers_sent(self) -> set[int]:
        return {
            int(word)
            for fact in facts(self.folder, "sending")
            for word in fact.words
            if word and word[-1] != "!"
        }

    def come_to_rest(self, patience_s: float) -> list[str]:
        """Stop producer and operator, and wait until nothing is due or unsettled; returns what is stuck."""
        (self.folder / "stop").touch()
        before: object = None
        changed_at = time.monotonic()
        while True:
            state = self._state()
            interfering = self.names("producer", "operator")
            if not interfering:
                self._resume_consumers()
            if state[:3] == (0, 0, 0) and not interfering:
                return []
            if state != before:
                before, changed_at = state, time.monotonic()
            if time.monotonic() > changed_at + patience_s:
                return self._stuck(state)
            time.sleep(0.3)

    def _resume_consumers(self) -> None:
        """What an operator has paused who was killed then."""
        with suppress(TxboxError), Admin(self.database.url(0)) as admin:
            for consumer in workload.PAUSED:
                admin.resume(consumer)

    def _state(self) -> tuple[Any, ...]:
        """Unfinished rows, staged rows, unsettled messages; and how many rows are finished, which is progress."""
        try:
            with self.database.raw() as raw:
                ((inbox, outbox),) = raw.rows(_UNFINISHED)
                done = raw.value("SELECT count(*) FROM txbox_inbox")
            workers = len(self.names("bank")), len(self.names("books"))
            waiting = self.broker.payments().left(workers[0]) + self.broker.entries().left(
                workers[1]
            )
            if not (inbox or outbox or waiting or self.broker.payments().sees_unacknowledged):
                waiting = self.broker.server.messages()
        except Exception as error:  # noqa: BLE001  # it is not back yet
            return ("away", type(error).__name__, 0, 0)
        return int(inbox), int(outbox), int(waiting), int(done)

    def _stuck(self, state: tuple[Any, ...]) -> list[str]:
        with self.database.raw() as raw:
            rows = raw.rows(
                "SELECT consumer, message_id, status, attempts, error_type FROM txbox_inbox"
                " WHERE status IN ('pending', 'processing', 'failed') LIMIT 10"
            )
            rows += raw.rows(
                "SELECT topic, id, status, attempts, error_type FROM txbox_outbox LIMIT 10"
            )
        for member in self._members.values():
            # its stacks stand in its log
            self._send(member, signal.SIGUSR1)
        inbox, outbox, waiting, _ = state
        head = f"I9 stuck: {inbox} in the inbox, {outbox} in the outbox, {waiting} in the broker"
        return [f"{head}: {'; '.join(' '.join(str(text(word)) for word in row) for row in rows)}"]

    def end(self) -> list[str]:
        """Let every process drain; returns what is wrong with how they end."""
        with self._lock:
            for name, member in self._members.items():
                member.dismissed = True
                leaks = _leaks(member.process.pid)
                if leaks:
                    self.ends.append(f"I10 {name} {leaks}")
                self._send(member, signal.SIGTERM)
        deadline = time.monotonic() + DEADLINE_S
        while self._members and time.monotonic() < deadline:
            time.sleep(0.05)
        self._over.set()
        self._keeper.join()
        for name, member in self._members.items():
            member.process.kill()
            self.ends.append(f"I10 {name} does not end after SIGTERM")
        if self.database.served:
            with self.database.raw() as raw:
                if sessions := self.database.sessions(raw):
                    # a pooler keeps its own
                    self.journal.write("sessions", len(sessions))
        return self.ends

    def abandon(self) -> None:
        """End all processes at once, whatever state the run is in."""
        self._over.set()
        if self._keeper.is_alive():
            self._keeper.join()
        for member in self._members.values():
            if member.process.is_alive():
                member.process.kill()
        if self._next_release is not None:
            self._next_release.close()


def prepare(app: App, raw: Raw) -> None:
    """Make all tables of a run."""
    app.init()
    for table in workload.TABLES:
        raw.execute(table)
    if raw.product != "mysql":
        raw.execute(workload.LATE)
    rows = ", ".join(f"({account}, 0)" for account in range(workload.ACCOUNTS))
    raw.execute(f"INSERT INTO account (name, balance) VALUES {rows}")
    names = ", ".join(f"('{name}', 0)" for name in workload.names_of_lists())
    raw.execute(f"INSERT INTO counter (name, n) VALUES {names}")


def _kill(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def _leaks(pid: int) -> str:
    """What a process has too many of (I10): files, threads."""
    try:
        files, threads = (
            len(list(Path(f"/proc/{pid}", kind).iterdir())) for kind in ("fd", "task")
        )
    except OSError:
        return ""
    return f"has {files} files and {threads} threads" if files > 200 or threads > 120 else ""


@dataclass(frozen=True)
class Result:
    """How one run ended."""

    database: str
    broker: str
    seed: int
    minutes: float
    versions: str
    faults: dict[str, int]
    checked: Checked
    wrong: list[str]
    folder: Path
    #: What Elle says of the lists; nothing if it was not asked.
    elle: str = ""


def chaos(
    database_name: str,
    broker_name: str,
    *,
    seed: int,
    minutes: float,
    say: Callable[[str], None] = print,
    patience_s: float = PATIENCE_S,
    impatient: bool = False,
    lanes: int = 4,
    without: Sequence[str] = (),
    rate: float = 600.0,
    keep: bool = False,
    elle_command: Sequence[str] = (),
) -> Result:
    """One run on one database and one broker; its journals stay when something is wrong, or with `keep`.

    Args:
        elle_command: what checks `elle.edn`, see `checker.elle`.
    """
    folder = Path(tempfile.mkdtemp(prefix=f"txbox-chaos-{database_name}-{broker_name}-{seed}-"))
    with ExitStack() as stack:
        database = stack.enter_context(DATABASES[database_name]())
        broker = stack.enter_context(server_of(broker_name))
        run = Run(database, broker, folder, seed, rate=rate)
        with App(database.url(0)) as app, database.raw() as raw:
            prepare(app, raw)
        nemesis = Nemesis(run, lanes=lanes, without=without)
        versions = f"{database.version()}, {broker.server.ping()}"
        stack.callback(run.abandon)
        run.start()
        nemesis.start()
        began = time.monotonic()
        try:
            reads = _watch(
                run, nemesis, began + minutes * 60, say, PATIENCE_S if impatient else None
            )
        finally:
            nemesis.end()
        lasted = (time.monotonic() - began) / 60
        run.heal()
        wrong = run.come_to_rest(patience_s)
        say(f"  at rest after {time.monotonic() - began - lasted * 60:.0f} s more")
        wrong += run.end()
        with database.raw() as raw:
            checked = check(raw, folder, seed, broker=broker_name, reads=reads)
    wrong += checked.wrong
    verdict = elle(elle_command, folder) if elle_command else ""
    if verdict not in ("", "valid"):
        wrong.append(f"Elle: {verdict}, see elle.txt")
    if not wrong and not keep:
        shutil.rmtree(folder, ignore_errors=True)
    return Result(
        database_name, broker_name, seed, round(lasted, 2), versions, dict(sorted(nemesis.counts.items())),
        checked, wrong, folder, verdict,
    )  # fmt: skip


def _watch(
    run: Run,
    nemesis: Nemesis,
    until: float,
    say: Callable[[str], None],
    patience_s: float | None,
) -> Sequence[Read]:
    """Wait until the time is up; says how it goes, and gives a run up that does not.

    Returns:
        two of the lists, as they were each second.
    """
    rng, reads = random.Random(run.seed), list[Read]()
    names = [f"{kind}-{key}" for kind in workload.LISTS for key in range(workload.KEYS)]
    before, changed_at, said_at = 0, time.monotonic(), time.monotonic()
    while time.monotonic() < until:
        time.sleep(min(1.0, max(0.0, until - time.monotonic())))
        with suppress(Exception), run.database.raw() as raw:  # it is away
            reads.append(read_lists(raw, rng.sample(names, 2)))
        if time.monotonic() < said_at + 15:
            continue
        said_at = time.monotonic()
        done = _processed(run)
        say(f"  {done:,} rows, {nemesis.counts.total()} faults, {len(nemesis.mishaps)} mishaps")
        if done > before:
            before, changed_at = done, time.monotonic()
        elif patience_s is not None and time.monotonic() > changed_at + patience_s:
            raise StuckError(f"no progress for {patience_s:g} s; the journals are in {run.folder}")
    return reads


def _processed(run: Run) -> int:
    try:
        with run.database.raw() as raw:
            return int(raw.value("SELECT count(*) FROM txbox_inbox WHERE status = 'processed'"))
    except Exception:  # noqa: BLE001  # it is away
        return 0
