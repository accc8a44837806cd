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
    date, machine, versions, server, and from benchmarks/ commit, uncommitted_changes, load_1min
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
    for name in dict.fromkeys(own.contender for own in rounds):
        mine = [own for own in rounds if own.contender == name]
        found[name] = {
            "rounds": len(mine),
            "messages": statistics.median(own.messages for own in mine),
            "rate": _median([own.rate for own in mine]),
            "rate_min": min((own.rate for own in mine if own.rate is not None), default=None),
            "rate_max": max((own.rate for own in mine if own.rate is not None), default=None),
            **{figure: _median([getattr(own, figure) for own in mine]) for figure in _FIGURES},
            **{figure: _median([own.more.get(figure) for own in mine]) for figure in mine[0].more},
            "lost": sum(own.verified.lost for own in mine),
            "doubled": sum(own.verified.doubled for own in mine),
            "good": all(own.verified.good and own.failure is None for own in mine),
            "failures": [own.failure for own in mine if own.failure is not None],
        }
    return found


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def ratios(
    rounds: Sequence[Round], contender: str, yardstick: str, figure: str = "rate"
) -> list[float]:
    """A figure of the contender over that of the yardstick, round by round."""
    above = [_of(own, figure) for own in rounds if own.contender == contender]
    below = [_of(own, figure) for own in rounds if own.contender == yardstick]
    # a yardstick that did nothing measures nothing
    return [(one or 0.0) / other for one, other in zip(above, below, strict=True) if other]


def _of(own: Round, figure: str) -> float | None:
    value: float | None = own.more[figure] if figure in own.more else getattr(own, figure)
    return value


def values(rounds: Sequence[Round], contender: str, figure: str) -> list[float]:
    """A figure of the contender, round by round, as far as it is known."""
    found = [_of(own, figure) for own in rounds if own.contender == contender]
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
        "bars": [own.as_dict() for own in bars],
        "contenders": summary(rounds),
        "rounds": [asdict(own) for own in rounds],
        "plots": [own.as_dict() for own in plots],
        "notes": list(notes),
        **circumstances,
    }


def passed(document: Mapping[str, Any]) -> bool:
    """Every bar is met, and every round of every contender verified."""
    return all(own["met"] or own["stretch"] for own in document["bars"]) and all(
        own["good"] for own in document["contenders"].values()
    )
