"""P1, P6 and P6b: one message at a time, and open loops."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from itertools import product
from typing import Any

import psycopg

from benchmarks.beside import Naive
from benchmarks.by_hand import ByHand
from benchmarks.contender import inbox_off_by
from benchmarks.place import Place, Reading
from benchmarks.result import Bar, Plot, Round, ratios, summary, values
from benchmarks.setting import Setting
from benchmarks.workload import CONSUMER, TOPIC, Delivery, Work, order_paid, verify, writes
from txbox.app import App
from txbox.events import Event
from txbox.message import Message

#: Deliveries of one way in a row. After a change the machine takes about a hundred of them to settle: naive gets
#: slower in it and txbox faster, so short turns compare two transients; they are reported beside.
_TURN, _SHORT_TURN = 1_000, 100
#: Times the rate at which naive saturates.
_OVERLOAD = 3.7


class Turns:
    """One way to consume a delivery, and what its turns have taken so far."""

    def __init__(
        self,
        name: str,
        place: Place,
        off_by: Callable[[Any, Work], int],
        take: Callable[[Delivery], object],
    ) -> None:
        self.name = name
        self._place = place
        self._off_by = off_by
        self.take = take
        self.took_s: list[float] = []
        self.client_s = self.server_s = 0.0
        self.wal_bytes = 0
        self.server_known = True

    def turn(self, deliveries: Sequence[Delivery], read: Callable[[], Reading]) -> None:
        clock, take, took = time.perf_counter, self.take, self.took_s
        before = read()
        cpu_began, last = time.process_time(), clock()
        for delivery in deliveries:
            take(delivery)
            now = clock()
            took.append(now - last)
            last = now
        self.client_s += time.process_time() - cpu_began
        after = read()
        if before.server_cpu_s is None or after.server_cpu_s is None:
            self.server_known = False
        else:
            self.server_s += after.server_cpu_s - before.server_cpu_s
        if before.wal_bytes is not None and after.wal_bytes is not None:
            self.wal_bytes += after.wal_bytes - before.wal_bytes

    def round(self, work: Work) -> Round:
        count = len(self.took_s)
        with self._place.connect() as admin:
            verified = verify(admin, work, self._off_by(admin, work))
        took = sorted(self.took_s)
        return Round(
            contender=self.name,
            messages=count,
            rate=count / sum(took),
            p50_ms=took[count // 2] * 1e3,
            p99_ms=took[count * 99 // 100] * 1e3,
            client_cpu_us=self.client_s / count * 1e6,
            server_cpu_us=self.server_s / count * 1e6 if self.server_known else None,
            wal_bytes=self.wal_bytes / count,
            dead_tuples=None,
            verified=verified,
        )


def _naive_off_by(admin: Any, work: Work) -> int:
    row = admin.execute("SELECT count(*) FROM inbox").fetchone()
    return int(row[0]) - work.distinct


def _listen(_event: Event) -> None:
    """An observer: with one, events are made and emitted."""


def _by_txbox(on: Setting, name: str, stack: ExitStack, options: dict[str, Any]) -> Turns:
    app = stack.enter_context(App(on.place.url, observers=[_listen]))
    register: Callable[[Any], Any] = app.handler(TOPIC, consumer=CONSUMER, **options)
    register(writes)
    app.init()
    on.place.prepare()
    return Turns(
        name,
        on.place,
        inbox_off_by,
        lambda delivery: app.process(
            Message(topic=TOPIC, id=delivery.id, payload=delivery.payload)
        ),
    )


def _by_loop(name: str, loop: Naive, stack: ExitStack) -> Turns:
    loop.prepare()
    tx = stack.enter_context(psycopg.connect(loop.place.url))
    return Turns(name, loop.place, _naive_off_by, loop.taking(tx))


def _one_round(
    on: Setting, work: Work, name: str, turn: int, options: dict[str, Any] | None
) -> list[Round]:
    """Naive and one other, delivery by delivery, in turns of so many; without options it is by hand."""
    with ExitStack() as stack:
        naive = _by_loop(_named("naive", turn), on.naive(), stack)
        label = _named(name, turn)
        both = [
            naive,
            # where txbox has its tables, since naive's must be its own
            _by_loop(label, ByHand(on.place, on.gauges), stack)
            if options is None
            else _by_txbox(on, label, stack, options),
        ]
        # statements are prepared in the first turn
        for number, start in enumerate(range(0, len(work.deliveries), turn)):
            # who goes first alternates, so that both meet the same disturbances of the machine
            for one in both[:: -1 if number % 2 else 1]:
                one.turn(work.deliveries[start : start + turn], on.gauges.read)
        return [one.round(work) for one in both]


def _named(name: str, turn: int) -> str:
    return name if turn == _TURN else f"{name}, turns of {turn}"


def p01(on: Setting) -> dict[str, Any]:
    kinds: list[tuple[str, dict[str, Any] | None]] = [
        ("txbox, ordinary handler", {}),
        ("txbox, pipeline=True", {"pipeline": True}),
        ("by hand", None),
    ]
    done: list[Round] = []
    times_naive: dict[str, list[float]] = {}
    for turn, (name, options) in product((_TURN, _SHORT_TURN), kinds):
        label = _named(name, turn)
        pairs: list[Round] = []
        for number in range(on.rounds):
            on.report(f"{label}, round {number + 1} of {on.rounds}")
            pairs += _one_round(on, on.work()(number + 1), name, turn, options)
        times_naive[label] = ratios(pairs, label, _named("naive", turn))
        done += pairs
    return on.result(
        "P1",
        "One message at a time, no backlog, full protocol",
        "naive and txbox alternating every 1,000 deliveries, closed loop, a connection each. app.process with guard, "
        "payload hash and events (an observer listens); the same handler declared ordinary and pipeline=True. By hand: "
        "naive with BEGIN and its claim in one round trip, and nothing else. Turns of 100 are reported beside: they "
        "are over before the machine has settled after the change, which favours naive",
        one_at_a_time(times_naive),
        sorted(done, key=lambda run: run.contender),
    )


def one_at_a_time(times_naive: Mapping[str, Sequence[float]]) -> list[Bar]:
    """The bars of P1: against by hand, which like txbox had naive beside it in every round, and beside naive itself."""
    bars: list[Bar] = []
    for turn, (name, least) in product(
        (_TURN, _SHORT_TURN), (("txbox, ordinary handler", 0.88), ("txbox, pipeline=True", 1.0))
    ):
        label = _named(name, turn)
        of_by_hand = [
            one / other
            for one, other in zip(
                times_naive[label], times_naive[_named("by hand", turn)], strict=True
            )
        ]
        bars += [
            Bar(f"{label}: at least {least} of by hand", least, of_by_hand, stretch=turn != _TURN),
            Bar(f"{label}: at least 1.0 times naive", 1.0, times_naive[label], stretch=True),
        ]
    return bars


def _offered(on: Setting, rate: float, seconds: float) -> Callable[[int], Work]:
    return on.work(rate * seconds / 1.1 / on.messages, make=order_paid)


def p06(on: Setting) -> dict[str, Any]:
    rounds: list[Round] = []
    bars: list[Bar] = []
    for rate in (200, 1000):
        # --messages scales the time that each rate is kept up: 3 s by default
        work = _offered(on, rate, on.messages / 1333)
        naive = on.naive(name=f"naive, {rate:,}/s", rate=rate)
        workers = [
            on.txbox(f"txbox, {rate:,}/s", writes, rate=rate, to_commit=True),
            on.txbox(
                f"txbox, pipeline=True, {rate:,}/s",
                writes,
                rate=rate,
                to_commit=True,
                pipeline=True,
            ),
        ]
        by_hand = on.by_hand(name=f"by hand, {rate:,}/s", rate=rate)
        found = on.interleaved([(naive, work), *((one, work) for one in workers), (by_hand, work)])
        rounds += found
        for one in workers:
            bars += to_commit_and_ack(found, one.name, by_hand.name)
        bars.append(
            Bar(
                f"{workers[0].name}: p50 to commit at most 1.2 times naive's",
                1.2,
                _over(found, workers[0].name, "commit_p50_ms", naive.name),
                "at most",
                stretch=True,
            )
        )
    return on.result(
        "P6",
        "Open loop at 200 and 1,000 messages a second",
        f"{on.messages / 1333:.0f} s each; latency from when a message is due to when it is acknowledged and, as an "
        "observer hears of it, to when it is committed, as for naive; one connection each. By hand: naive with BEGIN "
        "and its claim in one round trip, and nothing else",
        bars,
        rounds,
    )


def to_commit_and_ack(rounds: Sequence[Round], contender: str, by_hand: str) -> list[Bar]:
    """The bars of P6: what a contender's messages wait beside those of by hand, which acknowledges at its commit."""
    limit = 1.15
    return [
        Bar(
            f"{contender}: p50 to {what} at most {limit} times by hand's to commit",
            limit,
            _over(rounds, contender, figure, by_hand),
            "at most",
            stretch=figure == "p50_ms",
        )
        for what, figure in (("commit", "commit_p50_ms"), ("acknowledgement", "p50_ms"))
    ]


def _over(rounds: Sequence[Round], contender: str, figure: str, yardstick: str) -> list[float]:
    below = values(rounds, yardstick, "p50_ms")
    return [
        one / other for one, other in zip(values(rounds, contender, figure), below, strict=True)
    ]


def p06b(on: Setting) -> dict[str, Any]:
    """Open loops in multiples of what naive can do."""
    naive = on.naive(name="naive, closed loop")
    on.report("how fast naive is")
    closed = [naive.round(on.work()(number)) for number in range(1, 3)]
    saturated = values(closed, naive.name, "rate")
    most = sum(saturated) / len(saturated)
    rounds = list(closed)
    points: dict[str, list[tuple[float, float]]] = {}
    bars: list[Bar] = []
    for times in (0.1, 0.5, 0.9, 2.0, _OVERLOAD):
        rate = times * most
        work = _offered(on, rate, 0.4 * on.messages / 1000)
        pipelined = on.txbox(
            f"txbox, pipeline=True, {times:g} times",
            writes,
            rate=rate,
            to_commit=True,
            pipeline=True,
        )
        beside = on.naive(
            name=f"naive, {4 if times > 1 else 1} connections, {times:g} times",
            rate=rate,
            connections=4 if times > 1 else 1,
        )
        found = on.interleaved([(pipelined, work), (beside, work)], warm=False)
        rounds += found
        for name, line in ((pipelined.name, "txbox"), (beside.name, "naive")):
            figures = summary(found)[name]
            for figure in ("p50_ms", "p99_ms"):
                points.setdefault(f"{line} {figure[:3]}", []).append((rate, figures[figure]))
        if times == _OVERLOAD:
            bars = [
                Bar(
                    "p99 to commit at most 5 ms at 3.7 times",
                    5.0,
                    values(found, pipelined.name, "commit_p99_ms"),
                    "at most",
                    "ms",
                ),
                Bar(
                    "p99 to acknowledgement at most 5 ms at 3.7 times",
                    5.0,
                    values(found, pipelined.name, "p99_ms"),
                    "at most",
                    "ms",
                    stretch=True,
                ),
            ]
    return on.result(
        "P6b",
        "Open loop up to 3.7 times the rate at which naive saturates",
        f"{0.4 * on.messages / 1000:.1f} s each; naive saturates on one connection at {most:,.0f} messages a second in "
        "this run; it gets 4 connections above that. Latency from when a message is due to when it is acknowledged "
        "(naive: committed)",
        bars,
        rounds,
        plots=[
            Plot(
                "p06b",
                "Latency over offered rate",
                "lines",
                "messages a second offered",
                "ms",
                points,
                "xy",
            )
        ],
    )
