"""P12: handlers that fail now and then."""

from __future__ import annotations

from typing import Any

from benchmarks.result import Bar, ratios
from benchmarks.setting import Cell, Setting
from benchmarks.workload import raises, writes

#: Share of messages that fail → times naive.
_BARS = {0.001: 8.0, 0.01: 6.0, 0.05: 4.5}


def p12(on: Setting) -> dict[str, Any]:
    naive = on.naive()
    kinds = {"raises": raises, "statement fails": writes}
    cells: list[Cell] = [(naive, on.work())]
    bars: list[tuple[str, float]] = []
    for share, bar in _BARS.items():
        for kind, handler in kinds.items():
            # each with an App of its own: what one has learned of its failures is not for the next
            contender = on.txbox(f"{share:.1%} {kind}", handler, pipeline=True)
            cells.append((contender, on.work(5, failing=share)))
            bars.append((contender.name, bar))
    cells.append((on.limit(), on.work(5)))
    rounds = on.interleaved(cells)
    return on.result(
        "P12",
        "Handlers that fail",
        "the whole workload waiting from the start, one worker with one lane, the handler of P3. It raises after its "
        "first statement, or its second one is refused by a CHECK. Naive meets no failure. Verified: every message "
        "that fails is a row `failed` with one attempt and none of its effects, all others are processed",
        [
            Bar(f"{name}: at least {bar:g} times naive", bar, ratios(rounds, name, naive.name))
            for name, bar in bars
        ],
        rounds,
    )
