"""PROFILE: where a message's microseconds go, in P1 to P4: Python, the server, and waiting for one another."""

from __future__ import annotations

import contextlib
import selectors
import signal
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from types import FrameType
from typing import Any, Self
from urllib.parse import urlsplit

from benchmarks import measure
from benchmarks.servers import fresh_database
from txbox import App, Message
from txbox.bench.beside import Contender
from txbox.bench.contender import inbox_off_by
from txbox.bench.result import Round, result
from txbox.bench.setting import Setting, opened
from txbox.bench.source import Stopwatch
from txbox.bench.workload import CONSUMER, TOPIC, Work, in_sets, reads, verify, writes

NUMBER = "PROFILE"
TITLE = "Where a message's microseconds go"

_EVERY_S = 0.001
# innermost first: the first of these that a frame's file contains says whose time it is
_PARTS = (
    ("/json/", "json"),
    ("/psycopg", "psycopg"),
    ("txbox/bench/workload.py", "handler"),
    ("txbox/bench/", "harness"),
    ("txbox/connections/", "connections"),
    ("txbox/worker/", "worker"),
    ("txbox/", "protocol"),
)
# Linux's clock of the CPU time of one thread
_THREAD_CPU = 6


class OneByOne:
    """app.process, one message after another."""

    def __init__(self, on: Setting, name: str, **options: Any) -> None:
        self.name, self._on, self._options = name, on, options

    def round(self, work: Work) -> Round:
        on = self._on
        with App(on.own.url) as app:
            app.handler(TOPIC, consumer=CONSUMER, **self._options)(writes)
            app.init()
            on.own.prepare()
            watch = Stopwatch(on.gauges)
            watch.start()
            for own in work.deliveries:
                app.process(Message(topic=TOPIC, id=own.id, payload=own.payload))
                watch.took_s.append(0.0)
            watch.stop()
        with on.own.connect() as admin:
            verified = verify(admin, work, inbox_off_by(admin, work))
        return replace(watch.round(self.name, verified), p50_ms=None, p99_ms=None)


class Sampler:
    """Says, every so much CPU time of this process, which part of the code the thread that took it is in."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._cpu_s: dict[int, float] = {}

    def __enter__(self) -> Self:
        self._switch = sys.getswitchinterval()
        # the thread that was running is seen soon after the tick
        sys.setswitchinterval(0.00002)
        self._before = signal.signal(signal.SIGPROF, self._tick)
        signal.setitimer(signal.ITIMER_PROF, _EVERY_S, _EVERY_S)
        return self

    def __exit__(self, *_error: object) -> None:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, self._before)
        sys.setswitchinterval(self._switch)

    def _tick(self, _number: int, mine: FrameType | None) -> None:
        frames = sys._current_frames()  # noqa: SLF001  # the one way to see the other threads
        spent: dict[int, float] = {}
        for thread in threading.enumerate():
            if thread.ident is not None and thread.native_id is not None:
                with contextlib.suppress(OSError):  # it has just ended
                    now_s = time.clock_gettime(~thread.native_id << 3 | _THREAD_CPU)
                    spent[thread.ident] = now_s - self._cpu_s.get(thread.native_id, now_s)
                    self._cpu_s[thread.native_id] = now_s
        if spent:
            busiest = max(spent, key=lambda own: spent[own])
            frame = mine if busiest == threading.get_ident() else frames.get(busiest)
            self.counts[_part(frame) or "rest"] += 1


def _part(frame: FrameType | None) -> str | None:
    while frame is not None:
        name = frame.f_code.co_filename
        for piece, part in _PARTS:
            if piece in name:
                return part
        frame = frame.f_back
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
                    own = client if key.fileobj is client else server
                    data = own.recv(65536)
                    if not data:
                        return
                    if own is client and last is not client:
                        self.turns[at] += 1
                    last = own
                    (server if own is client else client).sendall(data)

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
        with opened(url, rounds=1, messages=messages) as on:
            for contender, times in _contenders(on):
                work = on.work(times)(1)
                contender.round(on.work(0.1)(2))
                plain = contender.round(work)
                with Sampler() as sampler:
                    contender.round(on.work(times)(3))
                done.append(_divided(plain, sampler.counts))
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
        "client's CPU is divided by where the interpreter was every millisecond of CPU time, sampled in a second run. "
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
