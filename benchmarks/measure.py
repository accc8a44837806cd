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
_TURN = 100


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


@dataclass(frozen=True, slots=True)
class Contender:
    """One way to consume the workload, one delivery at a time, and the check of what it left behind."""

    name: str
    consume: Callable[[Delivery], object]
    verify: Callable[[], Verified]


def taking_turns(contenders: Sequence[Contender], work: Work) -> list[Round]:
    """Run one round of every contender, delivery by delivery: the next waits for the last one's COMMIT.

    They take turns every hundred deliveries, so that all meet the same disturbances of the machine.
    """
    took: dict[str, list[float]] = {own.name: [] for own in contenders}
    cpu_s: dict[str, float] = dict.fromkeys(took, 0.0)
    clock = time.perf_counter
    for start in range(0, len(work.deliveries), _TURN):
        # who goes first alternates too
        for own in contenders[:: 1 if start // _TURN % 2 else -1]:
            cpu_began, last = time.process_time(), clock()
            for delivery in work.deliveries[start : start + _TURN]:
                own.consume(delivery)
                now = clock()
                took[own.name].append(now - last)
                last = now
            cpu_s[own.name] += time.process_time() - cpu_began
    return [_round(own, took[own.name], cpu_s[own.name]) for own in contenders]


def _round(contender: Contender, took: list[float], cpu_s: float) -> Round:
    count, wall_s = len(took), sum(took)
    took.sort()
    return Round(
        contender=contender.name,
        messages=count,
        rate=count / wall_s,
        p50_ms=took[count // 2] * 1e3,
        p99_ms=took[count * 99 // 100] * 1e3,
        client_cpu_us=cpu_s / count * 1e6,
        verified=contender.verify(),
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
