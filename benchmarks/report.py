"""The results on the terminal, as JSON, and as docs/performance.md."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.measure import ROOT

RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "performance.md"

_INTRODUCTION = """\
# What it costs

This page is written by `make bench` from the results in
[benchmarks/results](../benchmarks/results); do not edit it. Absolute rates mean little on a shared machine: what counts
is the **ratio**, measured in one run with the contenders taking turns, on PostgreSQL with default durability
(`fsync=on`, `synchronous_commit=on`), client and server on one machine.

The workload is "order paid": distinct messages plus 10 % duplicates interleaved, 200 bytes of JSON each; the handler
does one UPDATE of one of 1,000 accounts and one INSERT of an order. *naive* is the textbook psycopg loop on one
connection: BEGIN, `INSERT … ON CONFLICT DO NOTHING RETURNING`, UPDATE, INSERT, COMMIT, without guard, payload hash,
retries or events. Every round is verified: orders, balances and inbox rows are compared with the workload, and **lost**
and **doubled** stand beside every rate.
"""


def lines(result: dict[str, Any]) -> list[str]:
    """One phase as a Markdown table, which reads well on a terminal too."""
    out = [
        "| | msg/s (median) | min to max | p50 ms | p99 ms | client CPU per msg | lost | doubled |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, own in result["contenders"].items():
        out.append(
            f"| {name} | {own['rate']:,.0f} | {own['rate_min']:,.0f} to {own['rate_max']:,.0f} | {own['p50_ms']:.2f} "
            f"| {own['p99_ms']:.2f} | {own['client_cpu_us'] / 1e3:.3f} ms | {own['lost']:.0f} | {own['doubled']:.0f} |"
        )
    pairs = ", ".join(f"{ratio:.2f}" for ratio in result["ratios"])
    verdict = "met" if passed(result) else "MISSED"
    out.append("")
    out.append(
        f"Ratio to {result['yardstick']}: **{result['ratio']:.2f}** (round by round: {pairs}); "
        f"bar: at least {result['bar']:g}, {verdict}."
    )
    return out


def passed(result: dict[str, Any]) -> bool:
    """The bar is met, and every round of every contender verified."""
    return result["ratio"] >= result["bar"] and all(
        own["good"] for own in result["contenders"].values()
    )


def store(result: dict[str, Any]) -> Path:
    """Write one result; the newest of a phase replaces the one before, history is in git."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{result['phase'].lower()}.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    return path


def write_page(phases: Sequence[str]) -> Path:
    """Render docs/performance.md from the stored results, in the order of the phases."""
    text = [_INTRODUCTION]
    for phase in phases:
        path = RESULTS / f"{phase.lower()}.json"
        if path.exists():
            text += _section(json.loads(path.read_text()), path)
    PAGE.write_text("\n".join(text))
    return PAGE


def _section(result: dict[str, Any], path: Path) -> list[str]:
    machine, versions, server = result["machine"], result["versions"], result["server"]
    changes = " with uncommitted changes" if result["uncommitted_changes"] else ""
    method = (
        f"Method: {result['method']}. Machine: {machine['cores']} cores of {machine['cpu']}, "
        f"{machine['memory_gb']} GB, Linux {machine['kernel']}; PostgreSQL {server['server_version']}, "
        f"Python {versions['python']}, psycopg {versions['psycopg']} ({versions['psycopg_implementation']}). "
        f"{result['date'][:10]}, commit `{result['commit'][:12]}`{changes}. "
        f"All rounds: [{path.name}](../benchmarks/results/{path.name})."
    )
    return [f"## {result['phase']}: {result['title']}", "", *lines(result), "", method, ""]
