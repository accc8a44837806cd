"""P16: the peers, each driven its own fastest documented way, beside naive and txbox on the same server."""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

from benchmarks import measure
from benchmarks.peers import toolchain
from benchmarks.peers.contenders import PEERS, Spec
from benchmarks.peers.peer import LATE, WARM, Peer
from benchmarks.peers.servers import LogicalPostgres, redis
from benchmarks.result import Bar, Plot, Round, ratios, result
from benchmarks.servers import fresh_database
from benchmarks.setting import Cell, Setting, opened
from benchmarks.workload import Work, order_paid, writes

NUMBER = "P16"
TITLE = "Peers, each with its fastest documented settings"

PIPELINED = "txbox, pipeline=True"
STORED = "txbox, stored, pipeline=True"

_METHOD = (
    "{rounds} rounds in turns. Rate: deliveries, the 10 % duplicates included, over the time to store them all and "
    "then to process them all; naive, txbox, dbos, omni-box and FastStream have nothing to store, mode='stored' stores "
    "while it processes. Peers: the same two statements a message in a process of their own (Node or Python), a fresh "
    f"database each round, warmed up with {WARM} messages, processing timed from the first one handled; "
    "logical replication on a server of its own with the same settings. "
    f"Afterwards {LATE} messages are delivered once more: how many of them run again. "
    "How each is driven, and what it guarantees: benchmarks/peers/README.md"
)


def run(*, rounds: int, messages: int) -> dict[str, Any]:
    """Measure, in interleaved rounds; returns the result as it is stored.

    Args:
        rounds: of each contender, 1 or more.
        messages: distinct ones in each round of naive; the others get a multiple, see `PEERS`.
    """
    toolchain.install()
    with fresh_database("p16") as url, ExitStack() as stack:
        on = stack.enter_context(opened(url, rounds=rounds, messages=messages, report=_report))
        done = on.interleaved(_cells(on, PEERS, stack), warm=False)
        circumstances = measure.circumstances(url)
    circumstances["versions"] |= toolchain.versions()
    return result(
        phase=NUMBER,
        title=TITLE,
        method=_METHOD.format(rounds=rounds),
        bars=_bars(done),
        rounds=done,
        circumstances=circumstances,
        plots=[_plot(done)],
        notes=_notes(done),
    )


def _report(text: str) -> None:
    print(f"{NUMBER}: {text}", file=sys.stderr, flush=True)


def _cells(on: Setting, specs: Sequence[Spec], stack: ExitStack) -> list[Cell]:
    """Naive and txbox, warm, and these peers; whatever servers they need are up until `stack` is left."""
    pipelined = on.txbox(PIPELINED, writes, pipeline=True)
    stored = on.txbox(STORED, writes, pipeline=True, mode="stored", until_processed=True)
    cells: list[Cell] = [
        (on.naive(), on.work()),
        (pipelined, on.work(8)),
        (stored, on.work(4)),
    ]
    for contender, _ in cells:
        contender.round(order_paid(WARM, seed=0))
    redis_url = redis()
    logical: str | None = None
    if any(spec.logical for spec in specs):
        logical = stack.enter_context(LogicalPostgres()).url
    for spec in specs:
        peer = Peer(spec, logical if spec.logical else None, redis_url)
        cells.append((peer, on.work(spec.times)))
    return cells


def _bars(done: Sequence[Round]) -> list[Bar]:
    found: list[Bar] = []
    for spec in PEERS:
        for ours, bar in ((PIPELINED, spec.pipelined), (STORED, spec.stored)):
            if bar is not None:
                text = f"{ours}: at least {bar:g} times {spec.name}"
                found.append(Bar(text, bar, ratios(done, ours, spec.name)))
    return found


def _plot(done: Sequence[Round]) -> Plot:
    rates: dict[str, list[float]] = {}
    for outcome in done:
        if outcome.rate:
            rates.setdefault(outcome.contender, []).append(outcome.rate)
    medians = {name: [(0.0, statistics.median(rates_of))] for name, rates_of in rates.items()}
    return Plot("p16", TITLE, "bars", "", "deliveries a second", medians, log="y")


def _notes(done: Sequence[Round]) -> list[str]:
    sizes = {outcome.contender: outcome.messages for outcome in done}
    return [
        "Deliveries a round: "
        + ", ".join(f"{name} {size:,}" for name, size in sizes.items())
        + ".",
        (
            "A percentage of late duplicates above 0 is the peer's own documented model: its key is free again once "
            "the job is done. Its rate is without any dedupe that lasts."
        ),
        f"1-minute load at the end: {os.getloadavg()[0]:.2f}.",
    ]


def main() -> None:
    """`python -m benchmarks.peers.p16 pgqueuer boss --messages 1000`: those alone, nothing stored."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART OF A NAME", help="all without")
    parser.add_argument("--messages", type=int, default=2000)
    parser.add_argument("--ours", action="store_true", help="naive and txbox too")
    given = parser.parse_args()
    toolchain.install()
    specs = [spec for spec in PEERS if any(part in spec.name for part in given.parts or [""])]
    with fresh_database("p16") as url, ExitStack() as stack:
        on = stack.enter_context(opened(url, rounds=1, messages=given.messages))
        for contender, work in _cells(on, specs, stack)[0 if given.ours else 3 :]:
            print(_sentence(contender.round, work), flush=True)


def _sentence(round_of: Callable[[Work], Round], work: Callable[[int], Work]) -> str:
    done = round_of(work(1))
    verified = done.verified
    more = ", ".join(f"{name} {value:,.4g}" for name, value in done.more.items())
    return (
        f"{done.contender}: {done.rate or 0:,.0f} msg/s of {done.messages:,}, "
        f"client {done.client_cpu_us or 0:,.0f} us, server {done.server_cpu_us or 0:,.0f} us, "
        f"lost {verified.lost}, doubled {verified.doubled}; {more}{done.failure or ''}"
    )


if __name__ == "__main__":
    main()
