"""Timing of one round, statistics over rounds, and what the figures were measured on."""

from __future__ import annotations

import datetime
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psycopg

import txbox
from benchmarks.workload import Delivery, Verified, Work

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True, slots=True)
class Round:
    """One run of one contender over the whole workload."""

    contender: str
    messages: int
    rate: float  # deliveries a second, duplicates included
    p50_ms: float
    p99_ms: float
    client_cpu_us: float  # a delivery, of this process
    verified: Verified


def one_by_one(
    name: str, consume: Callable[[Delivery], object], work: Work, verify: Callable[[], Verified]
) -> Round:
    """Hand deliveries over one at a time; the next waits until the last one's COMMIT has returned."""
    took: list[float] = []
    clock = time.perf_counter
    cpu_began, began = time.process_time(), clock()
    last = began
    for delivery in work.deliveries:
        consume(delivery)
        now = clock()
        took.append(now - last)
        last = now
    wall_s, cpu_s = last - began, time.process_time() - cpu_began
    took.sort()
    count = len(took)
    return Round(
        contender=name,
        messages=count,
        rate=count / wall_s,
        p50_ms=took[count // 2] * 1e3,
        p99_ms=took[count * 99 // 100] * 1e3,
        client_cpu_us=cpu_s / count * 1e6,
        verified=verify(),
    )


def summary(rounds: Sequence[Round]) -> dict[str, dict[str, float]]:
    """Medians over the rounds of each contender, and the sums of what went wrong."""
    found: dict[str, dict[str, float]] = {}
    for name in dict.fromkeys(own.contender for own in rounds):
        mine = [own for own in rounds if own.contender == name]
        found[name] = {
            "rounds": len(mine),
            "rate": statistics.median(own.rate for own in mine),
            "rate_min": min(own.rate for own in mine),
            "rate_max": max(own.rate for own in mine),
            "p50_ms": statistics.median(own.p50_ms for own in mine),
            "p99_ms": statistics.median(own.p99_ms for own in mine),
            "client_cpu_us": statistics.median(own.client_cpu_us for own in mine),
            "lost": sum(own.verified.lost for own in mine),
            "doubled": sum(own.verified.doubled for own in mine),
            "good": all(own.verified.good for own in mine),
        }
    return found


def ratios(rounds: Sequence[Round], contender: str, yardstick: str) -> list[float]:
    """Rate of the contender over that of the yardstick, round by round."""
    above = [own.rate for own in rounds if own.contender == contender]
    below = [own.rate for own in rounds if own.contender == yardstick]
    return [one / other for one, other in zip(above, below, strict=True)]


def circumstances(url: str) -> dict[str, Any]:
    """The machine, the versions and the commit."""
    with psycopg.connect(url, autocommit=True) as connection:
        settings = {
            name: _setting(connection, name)
            for name in ("server_version", "fsync", "synchronous_commit", "full_page_writes", "shared_buffers")
        }  # fmt: skip
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": _git("rev-parse", "HEAD"),
        "uncommitted_changes": bool(_git("status", "--porcelain", "--", "src", "benchmarks/*.py")),
        "machine": {
            "cpu": _cpu(),
            "cores": os.cpu_count(),
            "kernel": platform.release(),
            "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        },
        "versions": {
            "python": platform.python_version(),
            "txbox": txbox.__version__,
            "psycopg": psycopg.__version__,
            "psycopg_implementation": psycopg.pq.__impl__,
            "libpq": psycopg.pq.version(),
        },
        "server": settings,
    }


def as_json(rounds: Sequence[Round]) -> list[dict[str, Any]]:
    return [asdict(own) for own in rounds]


def _setting(connection: psycopg.Connection[Any], name: str) -> str:
    row = connection.execute("SELECT current_setting(%s)", (name,)).fetchone()
    assert row is not None
    return str(row[0])


def _cpu() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _git(*arguments: str) -> str:
    done = subprocess.run(
        ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return done.stdout.strip()
