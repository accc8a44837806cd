"""SOAK: ten minutes of steady load on a worker process; its memory must stay flat. `make bench-soak`."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from typing import Any

from benchmarks import measure
from benchmarks.lazy import lazy_work
from benchmarks.place import Place
from benchmarks.result import Bar, Plot, Round, result
from benchmarks.servers import fresh_database
from benchmarks.workload import verify
from txbox import App

NUMBER = "SOAK"
TITLE = "Ten minutes of steady load"

_RATE = 2_000
_EVERY_S = 10.0
#: What is read before is start: connections, prepared statements, caches.
_SETTLED_S = 60.0


def run(*, rounds: int, messages: int) -> dict[str, Any]:
    """Run once, whatever the rounds; returns the result as it is stored.

    The environment variable TXBOX_BENCH_SOAK_S makes it shorter.
    """
    del rounds, messages
    seconds = float(os.environ.get("TXBOX_BENCH_SOAK_S", "600"))
    deliveries = round(_RATE * seconds)
    with fresh_database("soak") as url:
        with App(url) as app:
            app.init()
        place = Place(url)
        place.prepare()
        samples, failure = _samples(url, deliveries)
        with place.connect() as admin:
            verified = verify(admin, lazy_work(deliveries))
        dead = place.dead_tuples()
        circumstances = measure.circumstances(url)
    steady = [sample for sample in samples if sample["at_s"] >= min(_SETTLED_S, seconds / 3)]
    rates = [
        (later["settled"] - sample["settled"]) / (later["at_s"] - sample["at_s"])
        for sample, later in itertools.pairwise(samples)
        if later["at_s"] - sample["at_s"] > _EVERY_S / 2
    ]
    latest = samples[-1]
    grown = steady[-1]["rss_mb"] - steady[0]["rss_mb"]
    p99 = sorted(sample["p99_ms"] for sample in steady if sample["p99_ms"] is not None)
    p50 = sorted(sample["p50_ms"] for sample in steady if sample["p50_ms"] is not None)
    return result(
        phase=NUMBER,
        title=TITLE if seconds >= 600 else f"{seconds:.0f} s of steady load",
        method=f"one worker process with one lane, maintenance beside it, the handler of P3, {_RATE:,} deliveries a "
        f"second for {seconds:.0f} s; sampled every {_EVERY_S:.0f} s, medians of the samples. Growth of resident "
        f"memory: from the first sample after {min(_SETTLED_S, seconds / 3):.0f} s to the last",
        bars=[
            Bar("resident memory grows by at most 5 MB", 5.0, [grown], "at most", "MB"),
            Bar("at least 0.99 of the offered rate", 0.99, [rate / _RATE for rate in rates]),
        ],
        rounds=[
            Round(
                f"txbox, {_RATE:,}/s", latest["settled"], latest["settled"] / latest["at_s"],
                p50[len(p50) // 2], p99[len(p99) // 2], None, verified, dead_tuples=dead, failure=failure,
                more={"rss_mb": latest["rss_mb"], "rss_highest_mb": latest["rss_highest_mb"]},
            )
        ],
        circumstances=circumstances,
        plots=[
            Plot("soak_rss", "Resident memory of the worker", "lines", "seconds", "MB",
                 {"resident": [(sample["at_s"], sample["rss_mb"]) for sample in samples]}),
            Plot("soak_p99", "Latency, 10 s at a time", "lines", "seconds", "ms",
                 {figure[:3]: [(sample["at_s"], sample[figure]) for sample in samples if sample[figure] is not None]
                  for figure in ("p50_ms", "p99_ms")}, "y"),
        ],
    )  # fmt: skip


def _samples(url: str, deliveries: int) -> tuple[list[dict[str, Any]], str | None]:
    task = {
        "url": url, "deliveries": deliveries, "rate": _RATE, "every_s": _EVERY_S, "maintenance": True,
    }  # fmt: skip
    with subprocess.Popen(
        [sys.executable, "-m", "benchmarks.child", json.dumps(task)],
        cwd=measure.ROOT, stdout=subprocess.PIPE, text=True,
    ) as child:  # fmt: skip
        assert child.stdout is not None
        found = [json.loads(line) for line in child.stdout]
        status = child.wait()
    return found, f"the worker ended with status {status}" if status else None
