"""P18: what an import takes, and what a worker with everything in flight holds."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from benchmarks import measure
from benchmarks.lazy import lazy_work
from benchmarks.place import Place
from benchmarks.result import Bar, Round, Verified, result
from benchmarks.servers import fresh_database
from benchmarks.workload import verify
from txbox import App

NUMBER = "P18"
TITLE = "Import, and memory of a worker"

_IN_FLIGHT = 1_000
_PAYLOAD_BYTES = 8 * 1024
_GOOD = Verified(0, 0)


def run(*, rounds: int, messages: int) -> dict[str, Any]:
    """Measure in fresh processes; returns the result as it is stored."""
    imports = [_import_ms() for _ in range(max(rounds, 3))]
    rounds_done = [
        Round("import txbox", 0, None, None, None, None, _GOOD, more={"import_ms": took_ms})
        for took_ms, _ in imports
    ]
    with fresh_database("footprint") as url:
        held = [
            _worker(url, 2 * _IN_FLIGHT + 5 * min(messages, 2000)) for _ in range(min(rounds, 3))
        ]
        circumstances = measure.circumstances(url)
    rounds_done += held
    slowest = "; ".join(f"{name} {took_ms:.1f} ms" for name, took_ms in imports[-1][1])
    return result(
        phase=NUMBER,
        title=TITLE,
        method=f"`python -X importtime -c 'import txbox'` in {len(imports)} fresh processes, cumulative time of txbox "
        "(the interpreter's own start is not in it, the cost of measuring is); a worker process with one lane whose "
        f"first run waits until {_IN_FLIGHT:,} deliveries of {_PAYLOAD_BYTES:,} bytes are in flight, its resident "
        "memory then, and at its highest until all are processed",
        bars=[
            Bar(
                "`import txbox` in at most 60 ms",
                60.0,
                [took_ms for took_ms, _ in imports],
                "at most",
                "ms",
            ),
            Bar(
                "a worker with 1,000 x 8 kB in flight: at most 90 MB resident",
                90.0,
                [outcome.more["highest_mb"] for outcome in held],
                "at most",
                "MB",
            ),
        ],
        rounds=rounds_done,
        circumstances=circumstances,
        notes=[f"Slowest parts of the import, by themselves: {slowest}."],
    )


def _import_ms(module: str = "txbox") -> tuple[float, list[tuple[str, float]]]:
    """Cumulative milliseconds of a module, and its five slowest parts."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", f"import {module}"],
        cwd=measure.ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    total, parts = 0.0, list[tuple[str, float]]()
    for line in done.stderr.splitlines():
        self_us, cumulative, name = line.removeprefix("import time:").split("|")
        if not self_us.strip().isdigit():
            continue
        if name.strip() == "site":
            # so far it was the interpreter's own start
            parts.clear()
        parts.append((name.strip(), int(self_us) / 1e3))
        if name.strip() == module:
            total = int(cumulative) / 1e3
    return total, sorted(parts, key=lambda part: -part[1])[:5]


def _worker(url: str, deliveries: int) -> Round:
    place = Place(url)
    with App(url) as app:
        app.init()
    place.prepare()
    task = {
        "url": url, "deliveries": deliveries, "payload_bytes": _PAYLOAD_BYTES, "in_flight": _IN_FLIGHT,
        "hold": True, "every_s": 1.0,
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.child", json.dumps(task)],
        cwd=measure.ROOT, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    with place.connect() as admin:
        verified = verify(admin, lazy_work(deliveries, _PAYLOAD_BYTES))
    name = f"worker, {_IN_FLIGHT:,} x {_PAYLOAD_BYTES // 1024} kB in flight"
    if done.returncode or not done.stdout:
        return Round(name, 0, None, None, None, None, verified, failure=done.stderr[-500:])
    last = json.loads(done.stdout.splitlines()[-1])
    return Round(
        name, deliveries, None, None, None, None, verified,
        more={"full_mb": last["held"][0]["rss_mb"], "highest_mb": last["rss_highest_mb"]},
    )  # fmt: skip
