"""What a measurement is: rounds of contenders, the bars they are held to, and the JSON they become.

A result is a dict, one a phase:

    phase       "P3"; the file is p3.json
    title       one line
    method      a paragraph: rounds, sizes, what is timed
    bars        list of `Bar.as_dict()`; one that is not `met` fails the phase, unless it is a `stretch`
    contenders  name → medians over its rounds, see `summary`; the order is that of the table
    rounds      list of every `Round`
    plots       list of `Plot.as_dict()`
    notes       sentences for people, shown below the table
    date, machine, versions, server, load_1min, commit, uncommitted_changes: see measure.py
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class Verified:
    """What a run left behind, compared with what it should have; a good run has zeros only."""

    lost: int
    doubled: int
    balance_off_by: int = 0
    inbox_off_by: int = 0

    @property
    def good(self) -> bool:
        return not (self.lost or self.doubled or self.balance_off_by or self.inbox_off_by)


@dataclass(frozen=True, slots=True)
class Round:
    """One run of one contender; None is what this contender or this server cannot tell.

    Args:
        messages: deliveries, duplicates included; `rate` is of them, a second.
        client_cpu_us, server_cpu_us, wal_bytes: a delivery.
        dead_tuples: of the contender's tables afterwards, as the statistics know it.
        failure: why it did not come to its end; `rate` is then that of what it did.
    """

    contender: str
    messages: int
    rate: float | None
    p50_ms: float | None
    p99_ms: float | None
    client_cpu_us: float | None
    verified: Verified
    server_cpu_us: float | None = None
    wal_bytes: float | None = None
    dead_tuples: int | None = None
    failure: str | None = None
    more: Mapping[str, float] = field(default_factory=dict[str, float])


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar and what was measured against it.

    Args:
        text: the whole of it: "pipeline=True: at least 12 times naive".
        unit: "x" for a ratio, else "ms", "us", "B", "MB".
        pairs: round by round; the measured value is their median.
        stretch: reported, and never fails a phase.
    """

    text: str
    bar: float
    pairs: Sequence[float]
    sense: Literal["at least", "at most"] = "at least"
    unit: str = "x"
    stretch: bool = False

    @property
    def measured(self) -> float:
        return statistics.median(self.pairs)

    @property
    def met(self) -> bool:
        if not self.pairs:
            return False
        above = self.measured >= self.bar
        return above if self.sense == "at least" else self.measured <= self.bar

    def as_dict(self) -> dict[str, Any]:
        return {
            "text": self.text,
            "bar": self.bar,
            "sense": self.sense,
            "unit": self.unit,
            "stretch": self.stretch,
            "measured": self.measured if self.pairs else None,
            "met": self.met,
            "pairs": list(self.pairs),
        }


@dataclass(frozen=True, slots=True)
class Plot:
    """A figure for the page.

    Args:
        name: of its file, in small letters.
        kind: "bars" has one point a line, [[0, value]]; "lines" as many as there are.
        lines: name → points.
        log: the axes in powers of ten, of "", "x", "y" or "xy".
    """

    name: str
    title: str
    kind: Literal["bars", "lines"]
    x: str
    y: str
    lines: Mapping[str, Sequence[tuple[float, float]]]
    log: str = ""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


_FIGURES = ("p50_ms", "p99_ms", "client_cpu_us", "server_cpu_us", "wal_bytes", "dead_tuples")


def summary(rounds: Sequence[Round]) -> dict[str, dict[str, Any]]:
    """Medians over the rounds of each contender, and the sums of what went wrong."""
    found: dict[str, dict[str, Any]] = {}
    for name in dict.fromkeys(run.contender for run in rounds):
        mine = [run for run in rounds if run.contender == name]
        found[name] = {
            "rounds": len(mine),
            "messages": statistics.median(run.messages for run in mine),
            "rate": _median([run.rate for run in mine]),
            "rate_min": min((run.rate for run in mine if run.rate is not None), default=None),
            "rate_max": max((run.rate for run in mine if run.rate is not None), default=None),
            **{figure: _median([getattr(run, figure) for run in mine]) for figure in _FIGURES},
            **{figure: _median([run.more.get(figure) for run in mine]) for figure in mine[0].more},
            "lost": sum(run.verified.lost for run in mine),
            "doubled": sum(run.verified.doubled for run in mine),
            "good": all(run.verified.good and run.failure is None for run in mine),
            "failures": [run.failure for run in mine if run.failure is not None],
        }
    return found


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def ratios(
    rounds: Sequence[Round], contender: str, yardstick: str, figure: str = "rate"
) -> list[float]:
    """A figure of the contender over that of the yardstick, round by round."""
    above = [_of(run, figure) for run in rounds if run.contender == contender]
    below = [_of(run, figure) for run in rounds if run.contender == yardstick]
    # a yardstick that did nothing measures nothing
    return [(one or 0.0) / other for one, other in zip(above, below, strict=True) if other]


def _of(run: Round, figure: str) -> float | None:
    value: float | None = run.more[figure] if figure in run.more else getattr(run, figure)
    return value


def values(rounds: Sequence[Round], contender: str, figure: str) -> list[float]:
    """A figure of the contender, round by round, as far as it is known."""
    found = [_of(run, figure) for run in rounds if run.contender == contender]
    return [value for value in found if value is not None]


def result(
    *,
    phase: str,
    title: str,
    method: str,
    bars: Sequence[Bar],
    rounds: Sequence[Round],
    circumstances: Mapping[str, Any],
    plots: Sequence[Plot] = (),
    notes: Sequence[str] = (),
) -> dict[str, Any]:
    """The document of one phase, as it is printed and stored."""
    return {
        "phase": phase,
        "title": title,
        "method": method,
        "bars": [bar.as_dict() for bar in bars],
        "contenders": summary(rounds),
        "rounds": [asdict(run) for run in rounds],
        "plots": [plot.as_dict() for plot in plots],
        "notes": list(notes),
        **circumstances,
    }


def passed(document: Mapping[str, Any]) -> bool:
    """Every bar is met, and every round of every contender verified."""
    return all(bar["met"] or bar["stretch"] for bar in document["bars"]) and all(
        medians["good"] for medians in document["contenders"].values()
    )
