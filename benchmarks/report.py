"""The results on the terminal, as JSON, and as docs/performance.md.

A result is what `benchmarks.result.result` makes; its fields are described at the top of that module. It lies in
benchmarks/results/<phase>.json.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import plots
from benchmarks.measure import ROOT
from benchmarks.result import passed

RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "performance.md"
PLOTS = ROOT / "docs" / "plots"

_SUMMARY = """\
# What it costs

Five figures and four plots come first, then every bar, then the rounds behind them. A figure is a **ratio**: to the
same work *by hand*, to the *limit*, or to txbox with an empty table. The contenders took turns in one run; shown are
the median of the rounds, the lowest and the highest. Absolute rates mean little on a shared machine. "Times naive" is
reported beside, and measures the disk: the textbook loop waits for a flush with every message. P3 and P5 have the same
handler; in P5 a flush takes a millisecond more. PostgreSQL had its default durability, and client and server ran on one
machine. Yours will differ: [measure it](#how-it-is-measured).
"""

_INTRODUCTION = """\
## How it is measured

`make bench` writes this page from the results in [benchmarks/results](../benchmarks/results); do not edit it. Default
durability is `fsync=on` and `synchronous_commit=on`. A bar that txbox requires of itself is met or **MISSED**; one that
is further than required, or only reported, is met or not reached.

The workload is "order paid": distinct messages plus 10 % duplicates interleaved, 200 bytes of JSON each; the handler
does one UPDATE of one of 1,000 accounts and one INSERT of an order. *naive* is the textbook psycopg loop on one
connection: BEGIN, `INSERT … ON CONFLICT DO NOTHING RETURNING`, UPDATE, INSERT, COMMIT, without guard, payload hash,
retries or events. The *limit* does the same work in one statement per batch of 100. *By hand*, where an ordinary
handler is measured, is naive with txbox's round trips and nothing else: it shows how far those alone go, with psycopg's
own `execute`. txbox is the worker of `txbox run`, fed from memory. Every round is verified: orders, balances and inbox
rows are compared with the workload, and every rate has **lost** and **doubled** beside it. From a checkout,
`python -m benchmarks --database postgresql://…` measures your own server (see [Contributing](../CONTRIBUTING.md)).
"""

#: The figures at the top, good or bad: phase, beginning of its bar's text, and what it says.
_FIGURES = (
    (
        "P1",
        "txbox, ordinary handler: at least 0.88",
        "one message at a time, ordinary handler: rate, of that by hand",
    ),
    ("P2", "at least 1.0 of by hand", "backlog, ordinary handler: rate, of that by hand"),
    ("P3", "at least 0.8 of the limit", "backlog, `pipeline=True`: rate, of the limit"),
    (
        "P6",
        "txbox, 200/s: p50 to commit at most 1.15",
        "200 messages a second: median latency to the commit, times that by hand (above 1 is slower)",
    ),
    (
        "P8",
        "time-ordered ids, 10,000,000 rows: at most 1.2",
        "an inbox of ten million rows: cost of a marker, times that of an empty one",
    ),
)
#: The plots at the top; the others are with their phases.
_TOP_PLOTS = ("p06b", "growth_us_marker", "p16")

_COLUMNS: tuple[tuple[str, str, str], ...] = (
    ("p50 ms", "p50_ms", ".2f"),
    ("p99 ms", "p99_ms", ".2f"),
    ("client us/msg", "client_cpu_us", ".1f"),
    ("server us/msg", "server_cpu_us", ".1f"),
    ("WAL B/msg", "wal_bytes", ",.0f"),
    ("dead rows", "dead_tuples", ",.0f"),
)
_KNOWN = {figure for _, figure, _ in _COLUMNS} | {
    "rounds", "messages", "rate", "rate_min", "rate_max", "lost", "doubled", "good", "failures",
}  # fmt: skip


def lines(result: Mapping[str, Any]) -> list[str]:
    """One phase as a Markdown table, which reads well on a terminal too."""
    contenders: Mapping[str, Mapping[str, Any]] = result["contenders"]
    columns = [column for column in _COLUMNS if _used(contenders, column[1])]
    more = dict.fromkeys(
        name for figures in contenders.values() for name in figures if name not in _KNOWN
    )
    columns += [(name.replace("_", " "), name, ",.4g") for name in more if _used(contenders, name)]
    heads = ["msg/s (median)", "min to max", *(head for head, _, _ in columns), "lost", "doubled"]
    out = [f"| | {' | '.join(heads)} |", f"|---{'|---' * len(heads)}|"]
    for name, medians in contenders.items():
        figures = [_figure(medians.get(figure), form) for _, figure, form in columns]
        span = (
            f"{medians['rate_min']:,.0f} to {medians['rate_max']:,.0f}"
            if medians["rate"] is not None
            else ""
        )
        wrong = [f"{medians['lost']:,.0f}", f"{medians['doubled']:,.0f}"]
        cells = [_figure(medians["rate"], ",.0f"), span, *figures, *wrong]
        out.append(f"| {name} | {' | '.join(cells)} |")
    out += ["", *(f"- {_judged(bar)}" for bar in result["bars"])]
    for name, medians in contenders.items():
        if not medians["good"]:
            said = "; ".join(medians.get("failures", ()))
            out.append(f"- **WRONG**: {name}: {said or 'what it left behind is not the workload'}")
    out += ["", *result.get("notes", ())]
    return out


def _used(contenders: Mapping[str, Mapping[str, Any]], figure: str) -> bool:
    return any(figures.get(figure) is not None for figures in contenders.values())


def _figure(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _measured(bar: Mapping[str, Any]) -> str:
    value, unit = bar["measured"], bar["unit"]
    if value is None:
        return "nothing"
    text = f"{value:,.0f}" if abs(value) >= 100 else f"{value:.2f}"
    return f"{text} x" if unit == "x" else f"{text} {unit}"


def _verdict(bar: Mapping[str, Any]) -> str:
    return "met" if bar["met"] else "not reached" if bar["stretch"] else "**MISSED**"


def _judged(bar: Mapping[str, Any]) -> str:
    pairs = ", ".join(f"{ratio:.3g}" for ratio in bar["pairs"])
    return f"{bar['text']}: **{_measured(bar)}** (round by round: {pairs}), {_verdict(bar)}"


def store(result: Mapping[str, Any]) -> Path:
    """Write one result; the newest of a phase replaces the one before, history is in git."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{result['phase'].lower()}.json"
    path.write_text(as_text(result))
    return path


def as_text(result: Mapping[str, Any]) -> str:
    """A result as JSON with a line for each contender, bar and round; numbers have six digits."""

    def line(value: object) -> str:
        return json.dumps(_rounded(value))

    parts: list[str] = []
    for name, value in result.items():
        entries: list[str] = []
        if isinstance(value, dict) and any(isinstance(each, dict) for each in value.values()):
            entries = [f"{json.dumps(key)}: {line(each)}" for key, each in value.items()]
        elif isinstance(value, list) and any(isinstance(each, dict) for each in value):
            entries = [line(each) for each in value]
        first, last = "{}" if isinstance(value, dict) else "[]"
        shown = f"{first}\n  " + ",\n  ".join(entries) + f"\n {last}" if entries else line(value)
        parts.append(f"{json.dumps(name)}: {shown}")
    return "{\n " + ",\n ".join(parts) + "\n}\n"


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {name: _rounded(each) for name, each in value.items()}
    return [_rounded(each) for each in value] if isinstance(value, list | tuple) else value


def write_page(titles: Mapping[str, str]) -> Path:
    """Render docs/performance.md and its plots from the stored results, in the order of the phases.

    Args:
        titles: of every phase there is; one without a result is shown as not measured.
    """
    found: dict[str, dict[str, Any]] = {}
    for phase in titles:
        path = RESULTS / f"{phase.lower()}.json"
        if path.exists():
            found[phase] = json.loads(path.read_text())
    text = [_SUMMARY, *_figures(found), "", *_missed(found), ""]
    if shapes := _shapes(found):
        plots.write(shapes, PLOTS)
        text += [f"![{shapes['title']}](plots/{shapes['name']}.svg)", ""]
    of_all = {plot["name"]: plot for result in found.values() for plot in result.get("plots", ())}
    for name in _TOP_PLOTS:
        if name in of_all:
            text += [f"![{of_all[name]['title']}](plots/{name}.svg)", ""]
    text += [_INTRODUCTION, "## The bars", "", *_bars(titles, found), ""]
    for phase, result in found.items():
        text += _section(phase, result)
    PAGE.write_text("\n".join(text))
    return PAGE


def _figures(found: Mapping[str, Mapping[str, Any]]) -> list[str]:
    out = ["| | median | rounds | |", "|---|---|---|---|"]
    for phase, text, said in _FIGURES:
        for bar in found.get(phase, {}).get("bars", ()):
            if bar["text"].startswith(text) and bar["measured"] is not None:
                low, high = min(bar["pairs"]), max(bar["pairs"])
                link = f"[{phase}](#{_anchor(phase, found[phase]['title'])})"
                span = f"{low:.2f} to {high:.2f}"
                out.append(f"| {said} | **{_measured(bar)}** | {span} | {link}, {_verdict(bar)} |")
    return out


def _missed(found: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """How many of the bars are missed, and which phases they are of."""
    bars = [(phase, bar) for phase, result in found.items() for bar in result["bars"]]
    required = [(phase, bar) for phase, bar in bars if not bar["stretch"]]
    missed = [phase for phase, bar in required if not bar["met"]]
    links = [
        f"[{phase}](#{_anchor(phase, found[phase]['title'])})" for phase in dict.fromkeys(missed)
    ]
    if not missed:
        return [f"All {len(required)} bars are met."]
    return [f"Of {len(required)} bars {len(missed)} are **missed**: {', '.join(links)}."]


def _anchor(phase: str, title: str) -> str:
    """The fragment of a phase's heading, as code hosts and the site make it."""
    return re.sub(r"[^\w\- ]", "", f"{phase}: {title}".lower()).strip().replace(" ", "-")


def _bars(titles: Mapping[str, str], found: Mapping[str, Mapping[str, Any]]) -> list[str]:
    out = ["| | bar | measured | | result |", "|---|---|---|---|---|"]
    for phase, title in titles.items():
        result = found.get(phase)
        if result is None:
            out.append(f"| {phase} | {title} | | not measured | |")
            continue
        name = f"{phase.lower()}.json"
        link = f"[{name}](../benchmarks/results/{name})"
        wrong = not all(medians["good"] for medians in result["contenders"].values())
        if wrong:
            out.append(f"| {phase} | nothing lost, doubled or given up | | **WRONG** | {link} |")
        out += [
            f"| {phase} | {bar['text']} | {_measured(bar)} | {_verdict(bar)} | {link} |"
            for bar in result["bars"]
        ]
    return out


#: Phases with naive beside a contender, and what that is called in the plot.
_SHAPES = {
    "P1": ("txbox, ordinary handler", "P1 one at a time"),
    "P2": ("txbox, ordinary handler", "P2 ordinary handler"),
    "P3": ("txbox, pipeline=True", "P3 pipeline=True"),
    "P4": ("txbox, batch=True", "P4 batch=True, set-based"),
    "P5": ("txbox, pipeline=True", "P5 slow disk, pipeline=True"),
    "P10": ("stored, pipeline=True", "P10 stored, pipeline=True"),
}


def _shapes(found: Mapping[str, Mapping[str, Any]]) -> dict[str, Any] | None:
    bars = {
        name: [(0.0, contenders[contender]["rate"] / contenders["naive"]["rate"])]
        for phase, (contender, name) in _SHAPES.items()
        if phase in found and contender in (contenders := found[phase]["contenders"])
    }
    if not bars:
        return None
    fourth = found.get("P4", {}).get("contenders", {})
    limit = next((name for name in fourth if name.startswith("limit")), None)
    if limit is not None:
        bars["limit of P4"] = [(0.0, fourth[limit]["rate"] / fourth["naive"]["rate"])]
    return {
        "name": "shapes", "title": "Times the rate of naive in the same run", "kind": "bars", "x": "",
        "y": "times naive", "lines": {"naive": [(0.0, 1.0)], **bars}, "log": "",
    }  # fmt: skip


def _section(phase: str, result: Mapping[str, Any]) -> list[str]:
    out = [f"## {phase}: {result['title']}", ""]
    for plot in result.get("plots", ()):
        plots.write(plot, PLOTS)
        out += [f"![{plot['title']}](plots/{plot['name']}.svg)", ""]
    return [*out, *lines(result), "", _method(phase, result), ""]


def _method(phase: str, result: Mapping[str, Any]) -> str:
    name = f"{phase.lower()}.json"
    return (
        f"Method: {result['method']}. {measured_on(result)} "
        f"All rounds: [{name}](../benchmarks/results/{name})."
    )


def measured_on(result: Mapping[str, Any]) -> str:
    """The machine, the versions and the commit, as sentences."""
    machine, versions, server = result["machine"], result["versions"], result["server"]
    changes = " with uncommitted changes" if result["uncommitted_changes"] else ""
    loads = result.get("load_1min")
    load = loads[-1] if isinstance(loads, list) else loads
    busy = "" if load is None else f"Load average at the end: {load:.1f}. "
    if (flush := result.get("flush_us")) is not None:
        busy = f"A flush took {flush:.0f} us. {busy}"
    on = f"PostgreSQL {server['server_version']}, " if "server_version" in server else ""
    return (
        f"Machine: {machine['cores']} cores of {machine['cpu']}, "
        f"{machine['memory_gb']} GB, Linux {machine['kernel']}; {on}"
        f"Python {versions['python']}, psycopg {versions['psycopg']} ({versions['psycopg_implementation']}). "
        f"{busy}{result['date'][:10]}, commit `{result['commit'][:12]}`{changes}."
    )


def summary_of(results: Sequence[Mapping[str, Any]]) -> list[str]:
    """What was missed in this run, a line each; nothing when all is met."""
    return [
        f"{result['phase']}: "
        + "; ".join(_judged(bar) for bar in result["bars"] if not (bar["met"] or bar["stretch"]))
        for result in results
        if not passed(result)
    ]
