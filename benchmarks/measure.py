"""What the figures were measured on, with the commit."""

from __future__ import annotations

import datetime
import os
import platform
import statistics
import subprocess
import time
from pathlib import Path
from typing import Any

import psycopg

import txbox

ROOT = Path(__file__).resolve().parents[1]


def circumstances(url: str | None) -> dict[str, Any]:
    """The machine, the versions, the commit; settings of the server where the URL is that of PostgreSQL."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
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
        "server": {} if url is None else _settings(url),
        "flush_us": None if url is None else flush_us(url),
        "load_1min": os.getloadavg()[0],
        "commit": _git("rev-parse", "HEAD"),
        "uncommitted_changes": bool(_git("status", "--porcelain", "--", "src", "benchmarks/*.py")),
    }


_SETTINGS = (
    "server_version",
    "fsync",
    "synchronous_commit",
    "full_page_writes",
    "shared_buffers",
    "max_wal_size",
)


def _settings(url: str) -> dict[str, str]:
    with psycopg.connect(url, autocommit=True) as connection:
        rows = connection.execute(
            "SELECT name, current_setting(name) FROM pg_settings WHERE name = ANY(%s)",
            (list(_SETTINGS),),
        ).fetchall()
    return dict(rows)


def flush_us(url: str) -> float:
    """What it takes until a commit is on the server's disk: "times naive" measures little else."""
    took: dict[str, list[float]] = {"true": [], "false": []}
    with psycopg.connect(url, autocommit=True) as connection:
        # the same record of WAL, which the commit waits for or not
        for transactional in ("true", "false") * 200:
            began = time.perf_counter()
            connection.execute(
                f"SELECT pg_logical_emit_message({transactional}, 'txbox', '')".encode()
            )
            took[transactional].append(time.perf_counter() - began)
    return (statistics.median(took["true"]) - statistics.median(took["false"])) * 1e6


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
