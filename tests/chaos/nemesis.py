"""What goes wrong in a chaos run: kinds of fault, and threads that draw from them with a seed."""

from __future__ import annotations

import random
import signal
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tests.chaos.databases import PostgreSQL
from tests.support.databases import Raw

if TYPE_CHECKING:
    from tests.chaos.harness import Run

#: A fault: it begins, yields for how many seconds it lasts (once or more), and heals itself at its end.
Fault = Callable[["Run", random.Random], Generator[float, None, None]]
_ROLES = ("bank", "bank", "bank", "relay", "books", "books", "maintain", "operator", "producer")


@dataclass(frozen=True)
class Kind:
    """One kind of fault.

    Args:
        weight: how often it is drawn, beside the others.
        group: only one fault of a group lasts at a time.
        fits: whether a run can have it.
    """

    fault: Fault
    weight: int
    group: str
    fits: Callable[[Run], bool]


KINDS: dict[str, Kind] = {}


def _kind(
    name: str, *, weight: int = 10, group: str = "", fits: Callable[[Run], bool] | None = None
) -> Callable[[Fault], Fault]:
    def register(fault: Fault) -> Fault:
        KINDS[name] = Kind(fault, weight, group or name, fits or (lambda _: True))
        return fault

    return register


def _served(run: Run) -> bool:
    return run.database.served


def _proxied(run: Run) -> bool:
    return run.database.proxy is not None


def _has_small_disk(run: Run) -> bool:
    return run.database.disk is not None and run.database.disk.small


def _is_postgresql(run: Run) -> bool:
    return isinstance(run.database, PostgreSQL)


def _has_broker(run: Run) -> bool:
    return run.broker.keeps_messages


# -- processes ----------------------------------------------------------------------------------------


@_kind("kill", weight=24, group="")
def _killed(run: Run, rng: random.Random) -> Generator[float, None, None]:
    """SIGKILL: the process is started again."""
    run.strike(rng.choice(_ROLES), signal.SIGKILL, rng)
    yield rng.uniform(0.1, 0.5)


@_kind("freeze", weight=10)
def _frozen(run: Run, rng: random.Random) -> Generator[float, None, None]:
    """SIGSTOP and SIGCONT, sometimes for longer than a lease."""
    pid = run.strike(rng.choice(_ROLES), signal.SIGSTOP, rng)
    try:
        yield rng.choice((0.3, 1.0, 2.0, 5.0))
    finally:
        run.resume(pid)


@_kind("terminate", weight=8)
def _terminated(run: Run, rng: random.Random) -> Generator[float, None, None]:
    """SIGTERM: it drains, and another one is started."""
    run.strike(rng.choice(_ROLES[:-2]), signal.SIGTERM, rng)
    yield rng.uniform(0.2, 0.6)


@_kind("rebalance", weight=6)
def _rebalanced(run: Run, rng: random.Random) -> Generator[float, None, None]:
    """One more worker comes, and leaves."""
    name = run.add("bank", clock_s=0.0)
    try:
        yield rng.uniform(1.0, 3.0)
    finally:
        run.dismiss(name, signal.SIGTERM)


@_kind("deploy", weight=2)
def _deployed(run: Run, rng: random.Random) -> Generator[float, None, None]:
    """Every worker is replaced, one after the other, by one with other options."""
    options = {"batch": rng.choice((1, 10, 50, 200)), "concurrency": rng.choice((1, 1, 2))}
    for name in run.names("bank", "books"):
        run.replace(name, **options)
        yield rng.uniform(0.2, 0.5)


@_kind("release", weight=2, group="deploy")
def _released(run: Run, rng: random.Random) -> Generator[float, None, None]:
    """A rolling deploy of another release, which has brought its tables; or back to the one before, half-way or not."""
    run.bring_next_release()
    names = run.names("bank", "books", "relay", "maintain")
    is_next = not run.is_next(names[0])
    for name in names[: rng.choice((len(names) // 2, len(names)))]:
        with suppress(KeyError):  # one that had come for a rebalance has left
            run.replace(name, is_next=is_next)
        yield rng.uniform(0.2, 1.0)


@_kind("clock", weight=3)
def _skewed(run: Run, rng: random.Random) -> Generator[float, None, None]:
    """A worker's clock is an hour ahead or behind."""
    name = rng.choice(run.names("bank", "books", "relay", "maintain"))
    run.replace(name, clock_s=rng.choice((-3600.0, 3600.0)))
    try:
        yield rng.uniform(2.0, 5.0)
    finally:
        run.replace(name, clock_s=0.0)


@_kind("one connection", weight=3)
def _one_connection(run: Run, rng: random.Random) -> Generator[float, None, None]:
    """A worker whose lanes share one connection."""
    name = rng.choice(run.names("bank"))
    run.replace(name, connections=1)
    try:
        yield rng.uniform(2.0, 5.0)
    finally:
        run.replace(name, connections=None)


# -- the database -------------------------------------------------------------------------------------


@_kind("sessions ended", weight=16, fits=_served)
def _sessions_ended(run: Run, rng: random.Random) -> Generator[float, None, None]:
    """Some sessions are ended by the server, whatever they do."""
    _end(run, run.database.sessions, rng, most=3)
    yield rng.uniform(0.1, 0.4)


@_kind("idle sessions ended", weight=6, fits=_served)
def _idle_ended(run: Run, rng: random.Random) -> Generator[float, None, None]:
    """All idle sessions are ended, as a time-out of the server does."""
    _end(run, lambda raw: run.database.sessions(raw, idle=True), rng, most=100)
    yield rng.uniform(0.1, 0.4)


def _end(run: Run, listed: Callable[[Raw], Sequence[int]], rng: random.Random, most: int) -> None:  # fmt: skip
    with run.database.raw() as raw:
        sessions = listed(raw)
        for session in rng.sample(sessions, min(most, len(sessions))):
            with suppress(Exception):  # it has just gone by itself
                run.database.end_session(raw, session)


@_kind("database restarted", weight=3, group="database", fits=_served)
def _restarted(run: Run, rng: random.Random) -> Generator[float, None, None]:
    """SIGKILL of the whole server; it recovers what was committed."""
    run.database.stop()
    try:
        yield rng.uniform(0.1, 1.0)
    finally:
        run.database.start()


@_kind("standby promoted", weight=2, group="database", fits=_is_postgresql)
def _promoted(run: Run, rng: random.Random) -> Generator[float, None, None]:
    """The primary is killed, its synchronous standby takes over, and a new one is made."""
    assert isinstance(run.database, PostgreSQL)
    run.database.promote()
    yield rng.uniform(0.1, 0.5)


@_kind("standby away", weight=2, group="database", fits=_is_postgresql)
def _standby_away(run: Run, rng: random.Random) -> Generator[float, None, None]:
    """Every COMMIT waits for a standby that is not there."""
    run.database.standby.stop(immediate=True)
    try:
        yield rng.uniform(0.5, 2.0)
    finally:
        run.database.standby.start()


@_kind("read-only", weight=3, group="database", fits=_served)
def _read_only(run: Run, rng: random.Random) -> Generator[float, None, None]:
    """The server takes no writes, as after a failover that went wrong."""
    with run.database.raw() as raw:
        run.database.read_only(raw, on=True)
    try:
        yield rng.uniform(0.3, 1.5)
    finally:
        with run.database.raw() as raw:
            run.database.read_only(raw, on=False)


@_kind("disk full", weight=2, group="database", fits=_has_small_disk)
def _disk_full(run: Run, rng: random.Random) -> Generator[float, None, None]:
    """Not a byte is free where the database writes."""
    disk = run.database.disk
    assert disk is not None
    disk.fill()
    try:
        yield rng.uniform(0.3, 1.5)
    finally:
        disk.free()
        run.database.start()


@_kind("locks", weight=6, group="locks")
def _locked(run: Run, rng: random.Random) -> Generator[float, None, None]:
    """A transaction of somebody else locks what the handlers or txbox write."""
    table = rng.choice(("account", "counter", "txbox_inbox", "txbox_outbox"))
    with run.database.raw() as raw:
        match raw.product:
            case "postgresql":
                raw.execute("SET lock_timeout = '2s'")
                raw.execute("BEGIN")
                raw.execute(f"LOCK TABLE {table} IN SHARE ROW EXCLUSIVE MODE")
            case "mysql":
                raw.execute("SET innodb_lock_wait_timeout = 2")
                raw.execute("BEGIN")
                raw.rows(f"SELECT 1 FROM {table} LIMIT 2000 FOR UPDATE")
            case _:
                raw.execute("BEGIN IMMEDIATE")
        yield rng.uniform(0.1, 1.2)
        raw.execute("ROLLBACK")


# -- the network --------------------------------------------------------------------------------------


@_kind("commit cut after", weight=16, group="commit", fits=_proxied)
def _cut_after(run: Run, rng: random.Random) -> Generator[float, None, None]:
    """The next COMMIT through the proxy is done, and its answer lost."""
    yield from _cut(run, rng, "after")


@_kind("commit cut before", weight=6, group="commit", fits=_proxied)
def _cut_before(run: Run, rng: random.Random) -> Generator[float, None, None]:
    """The next COMMIT through the proxy does not arrive."""
    yield from _cut(run, rng, "before")


def _cut(run: Run, rng: random.Random, when: str) -> Generator[float, None, None]:
    proxy = run.database.proxy
    assert proxy is not None
    proxy.cut = "after" if when == "after" else "before"
    yield rng.uniform(0.1, 0.4)


@_kind("database cut", weight=4, group="database network", fits=_proxied)
def _database_cut(run: Run, rng: random.Random) -> Generator[float, None, None]:
    """Connections through the proxy end, and new ones are refused."""
    assert run.database.proxy is not None
    run.database.proxy.refuse()
    try:
        yield rng.uniform(0.1, 1.0)
    finally:
        run.database.proxy.go_on()


@_kind("database silent", weight=3, group="database network", fits=_proxied)
def _database_silent(run: Run, rng: random.Random) -> Generator[float, None, None]:
    """A black hole: nothing passes, nothing ends."""
    assert run.database.proxy is not None
    run.database.proxy.hang()
    try:
        yield rng.choice((0.3, 1.0, 3.0))
    finally:
        run.database.proxy.go_on()


@_kind("database slow", weight=4, group="database network", fits=_proxied)
def _database_slow(run: Run, rng: random.Random) -> Generator[float, None, None]:
    """Each packet through the proxy is late."""
    assert run.database.proxy is not None
    run.database.proxy.delay_s = rng.uniform(0.005, 0.05)
    try:
        yield rng.uniform(0.3, 1.0)
    finally:
        run.database.proxy.delay_s = 0.0


@_kind("broker cut", weight=5, group="broker network")
def _broker_cut(run: Run, rng: random.Random) -> Generator[float, None, None]:
    """Connections through the broker's proxy end, and new ones are refused."""
    run.broker.proxy.refuse()
    try:
        yield rng.uniform(0.1, 1.0)
    finally:
        run.broker.proxy.go_on()


@_kind("broker silent", weight=4, group="broker network")
def _broker_silent(run: Run, rng: random.Random) -> Generator[float, None, None]:
    """A black hole in front of the broker."""
    run.broker.proxy.hang()
    try:
        yield rng.choice((0.3, 1.0, 3.0))
    finally:
        run.broker.proxy.go_on()


@_kind("broker slow", weight=3, group="broker network")
def _broker_slow(run: Run, rng: random.Random) -> Generator[float, None, None]:
    """Each packet to and from the broker is late."""
    run.broker.proxy.delay_s = rng.uniform(0.005, 0.05)
    try:
        yield rng.uniform(0.3, 1.0)
    finally:
        run.broker.proxy.delay_s = 0.0


@_kind("broker killed", weight=2, group="broker", fits=_has_broker)
def _broker_killed(run: Run, rng: random.Random) -> Generator[float, None, None]:
    """SIGKILL of the broker; it keeps what it had confirmed."""
    run.broker.server.stop(immediate=True)
    try:
        yield rng.uniform(0.1, 1.0)
    finally:
        run.broker.server.start()


@_kind("queue made again", weight=1, group="broker", fits=_has_broker)
def _recreated(run: Run, rng: random.Random) -> Generator[float, None, None]:
    """The queue is deleted with all that is in it, and made again; then its messages are sent once more."""
    run.recreate()
    yield rng.uniform(0.1, 0.3)


# -- the threads --------------------------------------------------------------------------------------


class Nemesis:
    """Threads that each draw a fault, let it last and heal it, until they are told to end.

    Args:
        lanes: how many faults last at once.
        calm_s: the longest pause between two faults of a thread.
        without: kinds that are not drawn.
    """

    def __init__(
        self, run: Run, *, lanes: int = 4, calm_s: float = 1.2, without: Sequence[str] = ()
    ) -> None:
        self._run = run
        self._calm_s = calm_s
        self._over = threading.Event()
        self._groups: set[str] = set()
        self._lock = threading.Lock()
        self._kinds: Mapping[str, Kind] = {
            name: kind for name, kind in KINDS.items() if name not in without and kind.fits(run)
        }
        self.counts: Counter[str] = Counter()
        #: What could not be done to a server, with its traceback: no fault then.
        self.mishaps: list[str] = []
        self._threads = [
            threading.Thread(target=self._wreak, args=(random.Random(f"{run.seed} {lane}"),))
            for lane in range(lanes)
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        """Heal everything; returns when nothing of it lasts."""
        self._over.set()
        for thread in self._threads:
            thread.join()

    def _wreak(self, rng: random.Random) -> None:
        names = list(self._kinds)
        weights = [self._kinds[name].weight for name in names]
        while not self._over.wait(rng.uniform(0.0, self._calm_s)):
            (name,) = rng.choices(names, weights)
            group = self._kinds[name].group
            with self._lock:
                if group in self._groups:
                    continue
                self._groups.add(group)
            try:
                self._do(name, rng)
            finally:
                with self._lock:
                    self._groups.discard(group)

    def _do(self, name: str, rng: random.Random) -> None:
        began = time.monotonic()
        try:
            for lasts_s in self._kinds[name].fault(self._run, rng):
                self._over.wait(lasts_s)
        except Exception:  # noqa: BLE001  # the server is away because of another fault
            self.mishaps.append(f"{name}: {traceback.format_exc()}")
            self._run.journal.write("mishap", name, traceback.format_exc()[-300:])
            return
        with self._lock:
            self.counts[name] += 1
        self._run.journal.write("fault", name, f"{time.monotonic() - began:.2f}")
