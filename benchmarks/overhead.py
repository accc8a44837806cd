"""`python -m benchmarks.overhead [--json]`: where a message's microseconds go, on the paths of P1 to P4.

Every path is driven from memory in this thread, without a worker: fetching and acknowledging are left
out, and nothing overlaps, so that wall time is the client's CPU, the server's CPU, and the waiting for
neither, which is mostly the disk. The client's CPU is divided by samples of the stack, one a millisecond
of CPU: the innermost frame of txbox, or of the handler, has it.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import psycopg

from benchmarks import beside, workload
from benchmarks.measure import circumstances
from benchmarks.servers import fresh_database
from benchmarks.workload import CONSUMER, TOPIC, Delivery, Work
from txbox import App, Message
from txbox.session import drive

_SAMPLE_S = 0.001
_WARM = 500
_LOOP = "the loop around it"
_DRIVER, _HANDLERS_DRIVER = "to the server and back, for the inbox", "the same, for the handler"
_BODIES, _HANDLER = "bodies from JSON", "the handler"
_DECODING = ("parsed", "decode")
# which files of txbox do what
_STAGES = {
    "messages, ids, hashes": ("handlers", "identity", "message"),
    "folding, in flight": ("processing/intake", "processing/waiting"),
    "protocol, steps, events": (
        "app", "processing/attempt", "processing/transaction", "processing/calls", "processing/failure", "outbox",
        "session", "events",
    ),
    "statements": ("store/inbox", "store/codec", "store/dialect"),
    _BODIES: ("body",),
    _HANDLER: (),
    # Python looks at signals when it is back from the kernel: what sends and receives cannot be told
    # from what encodes
    _DRIVER: (
        "connections/libpq", "connections/psycopg",
        "connections/base",
    ),
}  # fmt: skip
_STAGE_OF = {f"txbox/{file}.py": stage for stage, files in _STAGES.items() for file in files}
_ORDER = (*_STAGES, _HANDLERS_DRIVER, _LOOP)


@dataclass(frozen=True, slots=True)
class Route:
    """A way to consume deliveries, so many at a time."""

    name: str
    consume: Callable[[Sequence[Delivery]], object]
    inbox: str
    at_once: int = 1
    times: int = 1

    def run(
        self, work: Work, admin: workload.Tx, samples: Samples | None = None
    ) -> tuple[float, float, float | None]:
        """Consume it in empty tables, and verify; returns seconds of wall time, client CPU and server CPU."""
        workload.create_tables(admin)
        admin.execute(f"TRUNCATE {self.inbox}".encode())
        admin.execute("CHECKPOINT")
        deliveries = work.deliveries
        self.consume(deliveries[:1])  # connected
        server_s = _server_cpu_s(admin)
        with samples.taken() if samples is not None else nullcontext():
            cpu_began, began = time.process_time(), time.perf_counter()
            for start in range(1, len(deliveries), self.at_once):
                self.consume(deliveries[start : start + self.at_once])
            wall_s, client_s = time.perf_counter() - began, time.process_time() - cpu_began
        spent_s = None if server_s is None else (_server_cpu_s(admin) or 0.0) - server_s
        counted = admin.execute(f"SELECT count(*) FROM {self.inbox}".encode()).fetchone()
        assert counted is not None
        verified = workload.verify(admin, work, counted[0] - work.distinct)
        if not verified.good:
            raise RuntimeError(f"{self.name} left something else behind: {verified}")
        return wall_s, client_s, spent_s


def _server_cpu_s(admin: workload.Tx) -> float | None:
    """CPU of the other connections' processes; None where /proc does not show them."""
    pids = admin.execute(
        "SELECT pid FROM pg_stat_activity WHERE datname = current_database() "
        "AND pid <> pg_backend_pid() AND backend_type = 'client backend'"
    ).fetchall()
    try:
        spent = [Path(f"/proc/{pid}/schedstat").read_text().split()[0] for (pid,) in pids]
    except OSError:
        return None
    return sum(map(int, spent)) / 1e9 if spent else None


class Samples:
    """Counts which stage the stack is in."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    @contextmanager
    def taken(self) -> Generator[None]:
        before = signal.signal(signal.SIGPROF, self._sample)
        signal.setitimer(signal.ITIMER_PROF, _SAMPLE_S, _SAMPLE_S)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
            signal.signal(signal.SIGPROF, before)

    def _sample(self, _signal: int, frame: FrameType | None) -> None:
        self.counts[stage_of(frame)] += 1


def stage_of(frame: FrameType | None) -> str:
    """The stage that a stack belongs to."""
    found, driver = _LOOP, False
    while frame is not None:
        file = frame.f_code.co_filename
        if file == workload.__file__:
            return _HANDLERS_DRIVER if driver or found != _LOOP else _HANDLER
        stage = _STAGE_OF.get("txbox/" + file.rpartition("/txbox/")[2])
        if found == _LOOP and stage is not None:
            found = _BODIES if frame.f_code.co_name in _DECODING else stage
        driver = driver or (found == _LOOP and "/psycopg" in file)
        frame = frame.f_back
    return _DRIVER if driver else found


@contextmanager
def _waits_counted(waits: Counter[str]) -> Generator[None]:
    """Count the times that a psycopg connection waits for the server."""
    wait = psycopg.Connection.wait

    def counted(self: Any, *args: Any, **options: Any) -> Any:
        waits["all"] += 1
        return wait(self, *args, **options)

    psycopg.Connection.wait = counted  # type: ignore[method-assign]
    try:
        yield
    finally:
        psycopg.Connection.wait = wait  # type: ignore[method-assign]


def profiled(route: Route, admin: workload.Tx, messages: int) -> dict[str, Any]:
    """Microseconds of one delivery, by where they go."""
    warm = workload.order_paid(_WARM, seed=0)
    waits: Counter[str] = Counter()
    with _waits_counted(waits):
        route.run(warm, admin)
    work = workload.order_paid(messages * route.times, seed=1)
    count = len(work.deliveries)
    runs = [route.run(work, admin) for _ in range(3)]
    wall_s, client_s, server_s = sorted(runs, key=lambda run: run[0])[1]
    samples = Samples()
    for _ in range(3):
        route.run(work, admin, samples)
    total = sum(samples.counts.values()) or 1
    client_us = client_s / count * 1e6
    return {
        "path": route.name,
        "deliveries": count,
        "wall_us": wall_s / count * 1e6,
        "client_us": client_us,
        "server_us": None if server_s is None else server_s / count * 1e6,
        "waiting_us": None
        if server_s is None
        else max(0.0, wall_s - client_s - server_s) / count * 1e6,
        "waits": waits["all"] / len(warm.deliveries),
        "stages": {stage: samples.counts[stage] / total * client_us for stage in _ORDER},
    }


def _naive(url: str) -> Generator[Route]:
    with psycopg.connect(url) as connection:

        def consume(deliveries: Sequence[Delivery]) -> None:
            for delivery in deliveries:
                beside.consume(delivery, connection, workload.pay)

        yield Route("naive", consume, "inbox")


def _txbox(url: str, name: str, handler: Any, at_once: int, **options: Any) -> Generator[Route]:
    with App(url) as app:
        register: Any = app.handler(TOPIC, consumer=CONSUMER, **options)
        register(handler)
        (registered,) = app.handlers
        connections = app.database.sync
        assert connections is not None

        def consume(deliveries: Sequence[Delivery]) -> None:
            messages: list[Message[Any]] = [
                Message(topic=TOPIC, id=delivery.id, payload=delivery.payload)
                for delivery in deliveries
            ]
            if at_once == 1:
                app.process(messages[0])
            else:
                drive(connections, app.intake.take_with_retries, registered, messages)

        yield Route(name, consume, "txbox_inbox", at_once, 1 if at_once == 1 else 5)


def _routes(url: str) -> Iterator[Generator[Route]]:
    many = beside.BATCH
    yield _naive(url)
    yield _txbox(url, "P1: one at a time", workload.writes, 1)
    yield _txbox(url, "P2: reads its results", workload.reads, many)
    yield _txbox(url, "P3: pipeline=True", workload.writes, many, pipeline=True)
    yield _txbox(url, "P4: batch=True", workload.in_sets, many, batch=True)


def lines(profiles: Sequence[dict[str, Any]]) -> list[str]:
    """The profiles as a table."""

    def row(name: str, values: Iterable[float | None]) -> str:
        return f"| {name} | {' | '.join('' if value is None else f'{value:.1f}' for value in values)} |"

    table = [
        f"| us a message | {' | '.join(profile['path'] for profile in profiles)} |",
        f"|---|{'---|' * len(profiles)}",
    ]
    for name, key in (
        ("wall time", "wall_us"),
        ("waiting, mostly for the disk", "waiting_us"),
        ("server CPU", "server_us"),
        ("client CPU", "client_us"),
    ):
        table.append(row(f"**{name}**", (profile[key] for profile in profiles)))
    table += [
        row(stage, (profile["stages"][stage] or None for profile in profiles)) for stage in _ORDER
    ]
    waits = " | ".join(format(profile["waits"], ".2f") for profile in profiles)
    return [*table, f"| waits for the server | {waits} |"]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.overhead", description=__doc__)
    parser.add_argument(
        "--messages", type=int, default=4000, help="distinct; batches get five times as many"
    )
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    profiles: list[dict[str, Any]] = []
    with fresh_database("overhead") as url, psycopg.connect(url, autocommit=True) as admin:
        admin.execute(
            "CREATE TABLE inbox (consumer text NOT NULL, message_id text NOT NULL, "
            "received_at timestamptz NOT NULL DEFAULT now(), PRIMARY KEY (consumer, message_id))"
        )
        with App(url) as app:
            app.init()
        for opened in _routes(url):
            with contextmanager(lambda opened=opened: opened)() as route:
                profiles.append(profiled(route, admin, arguments.messages))
        found = {"method": __doc__, "profiles": profiles, **circumstances(url)}
    print(json.dumps(found, indent=1) if arguments.json else "\n".join(lines(profiles)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
