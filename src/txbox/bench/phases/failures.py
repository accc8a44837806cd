"""P12: handlers that fail now and then."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from txbox.bench.contender import Txbox
from txbox.bench.result import Bar, Round, ratios
from txbox.bench.setting import Cell, Setting
from txbox.bench.workload import Work, raises, writes

#: Share of messages that fail → times naive.
_BARS = {0.001: 8.0, 0.01: 6.0, 0.05: 4.5}


class Failing:
    """The same contender, under the name of its workload."""

    def __init__(self, name: str, inner: Txbox) -> None:
        self.name, self._inner = name, inner

    def round(self, work: Work) -> Round:
        return replace(self._inner.round(work), contender=self.name)


def p12(on: Setting) -> dict[str, Any]:
    naive = on.naive()
    kinds = {
        "raises": on.txbox("raises", raises, pipeline=True),
        "statement fails": on.txbox("statement fails", writes, pipeline=True),
    }
    cells: list[Cell] = [(naive, on.work())]
    bars: list[tuple[str, float]] = []
    for share, bar in _BARS.items():
        for kind, inner in kinds.items():
            name = f"{share:.1%} {kind}"
            cells.append((Failing(name, inner), on.work(5, failing=share)))
            bars.append((name, bar))
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
