"""The phases that need only a PostgreSQL URL, and so can measure any server."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.phases import backlog, calls, failures, lanes, latency, requests, stored, webhooks
from benchmarks.setting import Setting

# one line a phase
PHASES: dict[str, Callable[[Setting], dict[str, Any]]] = {
    "P1": latency.p01,
    "P2": backlog.p02,
    "P3": backlog.p03,
    "P4": backlog.p04,
    "P6": latency.p06,
    "P6b": latency.p06b,
    "P7": lanes.p07,
    "P10": stored.p10,
    "P12": failures.p12,
    "P13": backlog.p13,
    "P17": backlog.p17,
    "P19": calls.p19,
    "P20": calls.p20,
    "P22": lanes.p22,
    "P23": webhooks.p23,
    "P27": requests.p27,
    "SNAPSHOT": stored.snapshot,
}
