"""PROFILE: where a message's microseconds go, in P1 to P4: Python, the server, and waiting for one another."""

from __future__ import annotations

import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Generator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from benchmarks import measure
from benchmarks.beside import Contender
from benchmarks.contender import inbox_off_by
from benchmarks.place import Gauges, Reading
from benchmarks.result import Round, result
from benchmarks.servers import fresh_database
from benchmarks.setting import Setting, opened
from benchmarks.source import Stopwatch
from benchmarks.workload import CONSUMER, TOPIC, Work, in_sets, reads, verify, writes
from txbox import App, Message

NUMBER = "PROFILE"
TITLE = "Where a message's microseconds go"

# looks a second
_RATE = 1000
# innermost first: the first of these that a frame's file contains says whose time it is
_PARTS = (
    ("/json/", "json"),
    ("txbox/connections/", "connections"),
    ("/psycopg", "psycopg"),
    ("/benchmarks/workload.py", "handler"),
    ("/benchmarks/", "harness"),
    ("txbox/worker/", "worker"),
    ("txbox/", "protocol"),
)


class OneByOne:
    """app.process, one message after another."""

    def __init__(self, on: Setting, name: str, **options: Any) -> None:
        self.name, self._on, self._options = name, on, options

    def round(self, work: Work) -> Round:
        on = self._on
        with App(on.place.url) as app:
            register: Any = app.handler(TOPIC, consumer=CONSUMER, **self._options)
            register(writes)
            app.init()
            on.place.prepare()
            watch = Stopwatch(on.gauges)
            watch.start()
            for delivery in work.deliveries:
                app.process(Message(topic=TOPIC, id=delivery.id, payload=delivery.payload))
                watch.took_s.append(0.0)
            watch.stop()
        with on.place.connect() as admin:
            verified = verify(admin, work, inbox_off_by(admin, work))
        return replace(watch.round(self.name, verified), p50_ms=None, p99_ms=None)


class Sampled(Gauges):
    """Gauges, between whose two readings this process is looked at from outside.

    Only a thread that holds the interpreter's lock is seen: what waits for the server is not.
    """

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.counts: Counter[str] = Counter()
        self._spy: subprocess.Popen[str] | None = None
        self._folder = tempfile.TemporaryDirectory()
        self._stacks = Path(self._folder.name, "stacks")

    def read(self) -> Reading:
        spy = self._spy
        if spy is None:
            self._spy = self._attached()
            return super().read()
        reading = super().read()
        self._spy = None
        spy.send_signal(signal.SIGINT)
        said, _ = spy.communicate()
        if not self._stacks.exists():
            raise RuntimeError(f"py-spy has seen nothing: {said}")
        for line in self._stacks.read_text().splitlines():
            stack, _, count = line.rpartition(" ")
            self.counts[_part(stack) or "rest"] += int(count)
        return reading

    def _attached(self) -> subprocess.Popen[str]:
        spy = subprocess.Popen(
            [
                *(str(Path(sys.executable).with_name("py-spy")), "record", "--gil"),
                *("--pid", str(os.getpid()), "--rate", str(_RATE), "--full-filenames"),
                *("--format", "raw", "--output", str(self._stacks)),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert spy.stdout is not None
        said = ""
        while "Sampling" not in said:
            line = spy.stdout.readline()
            if not line:
                raise RuntimeError(f"py-spy cannot look at this process: {said}")
            said += line
        return spy

    def close(self) -> None:
        super().close()
        self._folder.cleanup()


def _part(stack: str) -> str | None:
    for frame in reversed(stack.split(";")):
        for piece, part in _PARTS:
            if piece in frame:
                return part
    return None


class Counting:
    """Passes bytes between clients and the server, and counts how often a client's turn began."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._server = (parts.hostname or "127.0.0.1", parts.port or 5432)
        self._listener = socket.create_server(("127.0.0.1", 0))
        port = self._listener.getsockname()[1]
        login = parts.netloc.rpartition("@")[0]
        self.url = parts._replace(netloc=f"{login}@127.0.0.1:{port}").geturl()
        #: Of each connection.
        self.turns: list[int] = []
        self._stopped = False
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            at = len(self.turns)
            self.turns.append(0)
            threading.Thread(target=self._pass, args=(client, at), daemon=True).start()

    def _pass(self, client: socket.socket, at: int) -> None:
        server = socket.create_connection(self._server)
        server.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        last: socket.socket | None = None
        with client, server, selectors.DefaultSelector() as both:
            both.register(client, selectors.EVENT_READ, server)
            both.register(server, selectors.EVENT_READ, client)
            while True:
                for key, _ in both.select():
                    sender = client if key.fileobj is client else server
                    data = sender.recv(65536)
                    if not data:
                        return
                    if sender is client and last is not client:
                        self.turns[at] += 1
                    last = sender
                    (server if sender is client else client).sendall(data)

    def close(self) -> None:
        self._listener.close()


@contextmanager
def counting(url: str) -> Generator[Counting]:
    proxy = Counting(url)
    try:
        yield proxy
    finally:
        proxy.close()


def run(*, rounds: int, messages: int) -> dict[str, Any]:
    """Measure each contender by itself, then look into it; returns the result as it is stored."""
    del rounds
    done: list[Round] = []
    with fresh_database("profile") as url:
        with opened(url, rounds=1, messages=messages) as on, closing(Sampled(url)) as sampled:
            both = zip(_contenders(on), _contenders(replace(on, gauges=sampled)), strict=True)
            for (contender, times), (looked_at, _) in both:
                work = on.work(times)(1)
                contender.round(on.work(0.1)(2))
                plain = contender.round(work)
                sampled.counts.clear()
                looked_at.round(on.work(times)(3))
                done.append(_divided(plain, sampled.counts))
        with counting(url) as proxy, opened(proxy.url, rounds=1, messages=messages) as on:
            for at, (contender, times) in enumerate(_contenders(on)):
                before = len(proxy.turns)
                work = on.work(min(times, 2))(1)
                contender.round(work)
                # the busiest connection is the one that does the work
                trips = max(proxy.turns[before:]) / len(work.deliveries)
                done[at] = replace(done[at], more={**done[at].more, "round_trips": trips})
        circumstances = measure.circumstances(url)
    return result(
        phase=NUMBER,
        title=TITLE,
        method="each contender alone, on a workload that waits from the start; wall: microseconds a delivery. The "
        "client's CPU is divided by which code held the interpreter's lock, looked at a thousand times a second by "
        "py-spy in a second run. "
        "Connections: what hands statements to libpq and reads its results, with psycopg's compiled code where it is "
        "called from there; protocol: ids, hash, decoding, claims, outcomes; worker: lanes and settling; harness: the "
        "memory source. Round trips are counted in a third run, by a proxy: how often the client's turn began",
        bars=[],
        rounds=done,
        circumstances=circumstances,
        notes=[
            "CPU of client and server overlap in time, so that they may add up to more than the wall."
        ],
    )


def _contenders(on: Setting) -> list[tuple[Contender, float]]:
    return [
        (on.naive(), 1),
        (OneByOne(on, "P1 ordinary handler"), 1),
        (OneByOne(on, "P1 pipeline=True", pipeline=True), 1),
        (on.txbox("P2 ordinary handler", reads), 3),
        (on.txbox("P3 pipeline=True", writes, pipeline=True), 8),
        (on.txbox("P4 batch=True", in_sets, batch=True), 15),
        (on.txbox("P4 batch=True, pipeline=True", in_sets, batch=True, pipeline=True), 15),
        (on.limit(), 15),
    ]


def _divided(plain: Round, counts: Counter[str]) -> Round:
    total = sum(counts.values()) or 1
    client_us = plain.client_cpu_us or 0.0
    parts = dict.fromkeys(part for _, part in _PARTS)
    return replace(
        plain,
        more={
            "wall_us": 1e6 / plain.rate if plain.rate else 0.0,
            **{f"{part}_us": client_us * counts[part] / total for part in parts},
        },
    )
