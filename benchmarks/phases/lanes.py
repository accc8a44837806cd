"""P7: four lanes on a thousand hot rows."""

from __future__ import annotations

from typing import Any

from benchmarks.result import Bar, ratios
from benchmarks.setting import Cell, Setting
from benchmarks.workload import ACCOUNTS, in_sets, writes

_LANES = 4
_ACCOUNT = "body.account"


def p07(on: Setting) -> dict[str, Any]:
    naive = on.naive(name=f"naive, {_LANES} connections", connections=_LANES)
    kinds: list[tuple[str, Any, dict[str, Any]]] = [
        ("ordinary handler", writes, {}),
        ("pipeline=True", writes, {"pipeline": True}),
        ("batch=True", in_sets, {"batch": True}),
    ]
    lanes = [
        on.txbox(
            f"{name}{', lock_key' if key else ''}",
            handler,
            concurrency=_LANES,
            **options,
            **({"lock_key": _ACCOUNT} if key else {}),
        )
        for name, handler, options in kinds
        for key in (False, True)
    ]
    cells: list[Cell] = [(naive, on.work()), *((lane, on.work(2)) for lane in lanes)]
    cells.append((on.limit(), on.work(5)))
    rounds = on.interleaved(cells)
    return on.result(
        "P7",
        "Four lanes, a thousand hot rows",
        f"{ACCOUNTS:,} accounts, concurrency={_LANES} against naive on {_LANES} connections; without and with "
        f"lock_key={_ACCOUNT!r}, the whole workload waiting from the start",
        [
            Bar(f"{lane.name}: never below naive", 1.0, ratios(rounds, lane.name, naive.name))
            for lane in lanes
        ],
        rounds,
    )
