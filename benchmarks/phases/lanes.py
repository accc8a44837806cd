"""P7: four lanes on a thousand hot rows. P22: types that alternate."""

from __future__ import annotations

from typing import Any

from benchmarks.result import Bar, ratios
from benchmarks.setting import Cell, Setting
from benchmarks.workload import ACCOUNTS, in_sets, writes

_LANES = 4
_ACCOUNT = "body.account"
_TYPES = ("order.paid", "order.settled", "order.corrected", "order.repaid", "order.imported")


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


def p22(on: Setting) -> dict[str, Any]:
    kinds: list[tuple[str, dict[str, Any]]] = [
        ("inline", {"pipeline": True}),
        ("stored", {"pipeline": True, "mode": "stored", "until_processed": True}),
    ]
    pairs = [
        tuple(
            on.txbox(f"{name}, {text}", writes, types=_TYPES[:count], **options)
            for text, count in (("one type", 1), ("five types", len(_TYPES)))
        )
        for name, options in kinds
    ]
    rounds = on.interleaved([
        (on.naive(), on.work()), *((contender, on.work(4)) for pair in pairs for contender in pair)
    ])  # fmt: skip
    return on.result(
        "P22",
        "Five types of one handler that alternate",
        "the handler of P3 for every type of its topic, the whole workload waiting from the start, one worker with one "
        "lane; each message has another type than the one before it, or all have the same",
        [
            Bar(
                f"{five.name}: at least 0.9 times one type",
                0.9,
                ratios(rounds, five.name, one.name),
            )
            for one, five in pairs
        ],
        rounds,
    )
