"""CRASH: a worker killed in the middle of a backlog, three times, and started again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from typing import Any

from benchmarks import measure
from benchmarks.lazy import lazy_work
from benchmarks.place import Place
from benchmarks.result import Round, result
from benchmarks.servers import fresh_database
from benchmarks.workload import verify
from txbox import App

NUMBER = "CRASH"
TITLE = "Killed in the middle of a backlog, and started again"

_KILLS = (0.25, 0.5, 0.75)
_IN_FLIGHT = 200
_WAIT_S = 120.0


def run(*, rounds: int, messages: int) -> dict[str, Any]:
    """Kill and restart; returns the result as it is stored."""
    deliveries = 11 * max(messages, 1000)
    with fresh_database("crash") as url:
        with App(url) as app:
            app.init()
        done: list[Round] = []
        for _ in range(min(rounds, 3)):
            done += [_round(url, deliveries, ()), _round(url, deliveries, _KILLS)]
        circumstances = measure.circumstances(url)
    return result(
        phase=NUMBER,
        title=TITLE,
        method=f"a worker process on {deliveries:,} waiting deliveries, the handler of P3; killed with SIGKILL when a "
        "quarter, half and three quarters of them were acknowledged, and started again at once. It is then given "
        "everything again that was not acknowledged below the first gap, as a Kafka consumer is, the first "
        f"{_IN_FLIGHT} marked as redelivered. The rate is that of all deliveries over the whole time, restarts "
        "included; drain: from the last start to the end",
        bars=[],
        rounds=done,
        circumstances=circumstances,
    )


def _round(url: str, deliveries: int, kills: tuple[float, ...]) -> Round:
    place = Place(url)
    place.prepare()
    front, killed = 0, 0
    began = started = time.monotonic()
    pending = list(kills)
    failure = None
    while True:
        task = {
            "url": url, "deliveries": deliveries, "first": front, "every_s": 0.02,
            "redelivered": _IN_FLIGHT if killed else 0,
        }  # fmt: skip
        started = time.monotonic()
        with subprocess.Popen(
            [sys.executable, "-m", "benchmarks.child", json.dumps(task)],
            cwd=measure.ROOT, stdout=subprocess.PIPE, text=True,
        ) as child:  # fmt: skip
            assert child.stdout is not None
            seen = front
            for line in child.stdout:
                seen = json.loads(line)["front"]
                if pending and seen >= pending[0] * deliveries:
                    pending.pop(0)
                    os.kill(child.pid, signal.SIGKILL)
                    killed += 1
                    break
            child.stdout.close()
            status = child.wait(_WAIT_S)
        front = seen
        if status != -signal.SIGKILL:
            failure = f"the worker ended with status {status}" if status else None
            break
    wall_s = time.monotonic() - began
    with place.connect() as admin:
        verified = verify(admin, lazy_work(deliveries))
    return Round(
        f"killed {len(kills)} times" if kills else "left alone",
        deliveries, deliveries / wall_s, None, None, None, verified,
        dead_tuples=place.dead_tuples(), failure=failure,
        more={"kills": killed, "wall_s": wall_s, "drain_s": time.monotonic() - started},
    )  # fmt: skip
