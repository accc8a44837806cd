"""Charts as SVG that needs no script: what became of messages, how long they took, and how far behind it is."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import NamedTuple

from txbox.admin.activity import Activities, Activity, WorkerStatus
from txbox.admin.tables import Audited
from txbox.store.activity import BOUNDS_S, Counts, Histogram, Pause
from txbox.text import age, counted, lasting

#: Units of a chart across one step, and from its top to its ground.
STEP, HEIGHT = 10, 100
#: Outcomes as they are stacked, the first one at the ground.
OUTCOMES = ("processed", "duplicate", "quarantined", "failed", "dead")
_SHARES = (("p50", 0.5), ("p95", 0.95), ("p99", 0.99))
#: Processes that start within this belong to one deploy.
_TOGETHER = timedelta(minutes=10)
_TICKS = 4
_SHADES = 5
#: Of an axis of time, in seconds.
_MARKS_S = (0.001, 0.01, 0.1, 1.0, 10.0, 60.0, 600.0, 3_600.0, 86_400.0, 2_592_000.0, 31_536_000.0)


class Step(NamedTuple):
    """A step of time, as the addresses of lists have it, and what a chart says of it."""

    since: str
    until: str
    when: str
    sentence: str


class Chart(NamedTuple):
    """One chart.

    Attributes:
        unit: of the axis on the left, the labels of which go from its top to its ground; so on the right.
        paths: the class, the name in the legend, and the drawing of each.
        steps: for whoever points at one.
        description: all of it in a sentence.
    """

    name: str
    title: str
    unit: str
    left: tuple[str, ...]
    right: tuple[str, ...]
    paths: tuple[tuple[str, str, str], ...]
    steps: tuple[Step, ...]
    description: str


class Marker(NamedTuple):
    """A deploy or a pause, from where to where in the units of a chart."""

    kind: str
    x: float
    width: float
    at: datetime
    sentence: str


class Heat(NamedTuple):
    """How long messages took: a row for each stored bucket, the longest above, and a column for each step.

    Attributes:
        shades: how dark, from 1, and the drawing.
        bars: the rows of all steps together.
        rows: what each row counts, and how many there are.
        description: all of it in a sentence.
    """

    shades: tuple[tuple[int, str], ...]
    bars: str
    rows: tuple[tuple[str, int], ...]
    description: str


class Charts(NamedTuple):
    """The charts of one consumer, of one route, or of all consumers.

    Attributes:
        ticks: the times below, at equal distances.
        heat: None where nothing was processed.
    """

    width: int
    charts: tuple[Chart, ...]
    heat: Heat | None
    markers: tuple[Marker, ...]
    ticks: tuple[str, ...]


def charts(
    activity: Activity,
    time: Activities,
    *,
    workers: Sequence[WorkerStatus] = (),
    paused: Sequence[Pause] = (),
    changes: Sequence[Audited] = (),
    unfinished: int | None = None,
) -> Charts:
    """Draw what was counted.

    Args:
        time: from when to when.
        changes: pauses and resumptions, the newest first.
        unfinished: how many are now, from which the backlog of before is estimated; None leaves it out.
    """
    counts = {point.at: point.counts for point in activity.points}
    length = (time.until - time.since) // time.step + 1
    ats = [time.since + number * time.step for number in range(length)]
    steps = [counts.get(at, Counts()) for at in ats]
    drawn = (
        _throughput(steps, ats, time.step, sent=activity.kind == "route"),
        _latency(steps, ats, time.step),
        _lag(steps, ats, time.step, unfinished),
    )
    every = [ats[round(tick * (length - 1) / _TICKS)] for tick in range(_TICKS)]
    shape = "%H:%M" if time.until - time.since < timedelta(days=2) else "%b %d"
    return Charts(
        width=STEP * length,
        charts=drawn,
        heat=_heat(steps),
        markers=(*_deploys(workers, time), *_pauses(paused, changes, time)),
        ticks=(*(f"{at:{shape}}" for at in every), f"{time.until:%H:%M} UTC"),
    )


def _steps(ats: Sequence[datetime], step: timedelta, say: Callable[[int], str]) -> tuple[Step, ...]:
    shape = "%Y-%m-%dT%H:%M"
    return tuple(
        Step(f"{at:{shape}}", f"{at + step:{shape}}", f"{at:%b %d %H:%M} to {at + step:%H:%M} UTC", say(number))
        for number, at in enumerate(ats)
    )  # fmt: skip


def _throughput(
    steps: Sequence[Counts], ats: Sequence[datetime], step: timedelta, *, sent: bool
) -> Chart:
    parts = [name for name in OUTCOMES if any(getattr(counts, name) for counts in steps)]
    top = _nice(max((sum(getattr(counts, name) for name in parts) for counts in steps), default=0))
    ground, paths = [0.0] * len(steps), list[tuple[str, str, str]]()
    for name in parts:
        drawing: list[str] = []
        for number, counts in enumerate(steps):
            if amount := getattr(counts, name):
                # however little happened, it is visible
                height = max(1.0, HEIGHT * amount / top)
                foot = HEIGHT - ground[number]
                drawing.append(
                    f"M{number * STEP + 1} {foot:.1f}v{-height:.1f}h{STEP - 2}v{height:.1f}"
                )
                ground[number] += height
        total = sum(getattr(counts, name) for counts in steps)
        paths.append((name, f"{_word(name, sent=sent)} {total:,}", "".join(drawing)))

    def say(number: int) -> str:
        amounts = [(name, getattr(steps[number], name)) for name in parts]
        return (
            ", ".join(f"{amount:,} {_word(name, sent=sent)}" for name, amount in amounts if amount)
            or "nothing"
        )

    length = age(step.total_seconds()).replace("m", " min").replace("h", " h")
    return Chart(
        "throughput", "Throughput", f"messages per {length.removeprefix('1 ')}",
        _linear(top) if paths else (), (), tuple(paths),
        _steps(ats, step, say), f"Throughput: {', '.join(words for _, words, _ in paths) or 'nothing'}",
    )  # fmt: skip


def _word(outcome: str, *, sent: bool) -> str:
    return "sent" if sent and outcome == "processed" else outcome


def _latency(steps: Sequence[Counts], ats: Sequence[datetime], step: timedelta) -> Chart:
    values = {name: [counts.latency.quantile(share) for counts in steps] for name, share in _SHARES}
    drawn, left = _logarithmic(values)
    total = Counts()
    for counts in steps:
        total.merge(counts)
    paths = tuple(
        (name, f"{name} {_seconds(total.latency.quantile(share))}", drawn[name])
        for name, share in _SHARES
        if drawn[name]
    )

    def say(number: int) -> str:
        return ", ".join(f"{name} {_seconds(values[name][number])}" for name, _ in _SHARES)

    return Chart(
        "latency", "Latency", "from receipt to commit", left, (), paths, _steps(ats, step, say),
        f"Latency: {', '.join(words for _, words, _ in paths) or 'nothing'}",
    )  # fmt: skip


def _lag(
    steps: Sequence[Counts], ats: Sequence[datetime], step: timedelta, unfinished: int | None
) -> Chart:
    lags = [counts.oldest_s for counts in steps]
    drawn, left = _logarithmic({"lag": lags})
    longest = max((lag for lag in lags if lag is not None), default=None)
    paths: list[tuple[str, str, str]] = []
    if longest is not None:
        paths.append(("lag", f"oldest due message, at most {_seconds(longest)}", drawn["lag"]))
    backlog = _backlog(steps, unfinished) if unfinished is not None else []
    right: tuple[str, ...] = ()
    if backlog:
        top = _nice(max(backlog))
        right = _linear(top)
        line = "".join(f"V{HEIGHT - HEIGHT * amount / top:.1f}h{STEP}" for amount in backlog)
        area = f"M0 {HEIGHT}{line}V{HEIGHT}Z"
        paths.insert(0, ("backlog", f"unfinished, estimated, at most {max(backlog):,}", area))

    def say(number: int) -> str:
        about = f", about {counted(backlog[number])} unfinished" if backlog else ""
        return f"the oldest due message waited {_seconds(lags[number])}{about}"

    return Chart(
        "lag", "Lag and backlog" if backlog else "Lag", "waiting time" + (", and messages" if backlog else ""),
        left, right, tuple(paths), _steps(ats, step, say),
        f"Lag: {', '.join(words for _, words, _ in paths) or 'nothing'}",
    )  # fmt: skip


def _backlog(steps: Sequence[Counts], unfinished: int) -> list[int]:
    """How many were unfinished at the end of each step: those of now, less what came since, and what ended since."""
    amounts: list[int] = []
    for counts in reversed(steps):
        amounts.append(max(0, unfinished))
        ended = counts.processed + counts.duplicate + counts.dead + counts.quarantined
        unfinished += ended - counts.received
    return amounts[::-1]


def _heat(steps: Sequence[Counts]) -> Heat | None:
    total = Histogram()
    for counts in steps:
        total.merge(counts.latency)
    known = [place for place, count in enumerate(total.buckets) if count]
    if not known:
        return None
    places = range(known[-1], known[0] - 1, -1)
    height = HEIGHT / len(places)
    most = max(max(counts.latency.buckets) for counts in steps)
    drawings: dict[int, list[str]] = {}
    for row, place in enumerate(places):
        shades = [_shade(counts.latency.buckets[place], most) for counts in steps]
        # neighbours of one shade are one rectangle
        begins = [at for at, shade in enumerate(shades) if not at or shade != shades[at - 1]]
        for at, end in zip(begins, [*begins[1:], len(shades)], strict=True):
            if shade := shades[at]:
                drawings.setdefault(shade, []).append(
                    f"M{at * STEP} {row * height:.1f}h{(end - at) * STEP}v{height:.1f}h{(at - end) * STEP}z"
                )
    longest = max(total.buckets)
    bars = "".join(
        f"M0 {(row + 0.15) * height:.1f}h{max(1.0, 100 * total.buckets[place] / longest):.1f}v{0.7 * height:.1f}H0z"
        for row, place in enumerate(places)
        if total.buckets[place]
    )
    rows = tuple((_bound(place), total.buckets[place]) for place in places)
    return Heat(
        tuple((shade, "".join(drawings[shade])) for shade in sorted(drawings)), bars, rows,
        f"How long messages took: {', '.join(f'{count:,} {bound}' for bound, count in reversed(rows))}",
    )  # fmt: skip


def _shade(count: int, most: int) -> int:
    # by the root: few are visible beside many
    return math.ceil(_SHADES * math.sqrt(count / most))


def _bound(place: int) -> str:
    if place == len(BOUNDS_S):
        return f"over {lasting(BOUNDS_S[-1])}"
    return f"up to {lasting(BOUNDS_S[place])}"


# -- axes -----------------------------------------------------------------------------------------


def _nice(most: int) -> int:
    """The next of 1, 2, 5, 10, 20 …"""
    power: int = 10 ** max(0, len(str(most)) - 1)
    return min(digit * power for digit in (1, 2, 5, 10) if digit * power >= most)


def _linear(top: int) -> tuple[str, ...]:
    return (f"{top:,}", f"{top / 2:,.1f}".removesuffix(".0"), "0")


def _logarithmic(
    lines: Mapping[str, Sequence[float | None]],
) -> tuple[dict[str, str], tuple[str, ...]]:
    """Lines in steps between round marks, each several times the one below it, and the labels of these marks."""
    values = [value for line in lines.values() for value in line if value]
    if not values:
        return dict.fromkeys(lines, ""), ()
    low = min(math.floor(_height(min(values))), len(_MARKS_S) - 2)
    high = max(math.ceil(_height(max(values))), low + 1)
    return (
        {name: _stairs(line, low, high) for name, line in lines.items()},
        tuple(lasting(mark_s) for mark_s in reversed(_MARKS_S[low : high + 1])),
    )


def _height(seconds: float) -> float:
    """Where on the marks a time is, which are at equal distances."""
    below = min(max(bisect_right(_MARKS_S, seconds) - 1, 0), len(_MARKS_S) - 2)
    low_s, high_s = _MARKS_S[below : below + 2]
    share = math.log(max(seconds, low_s) / low_s) / math.log(high_s / low_s)
    return below + min(share, 1.0)


def _stairs(line: Iterable[float | None], low: int, high: int) -> str:
    drawing, is_open = list[str](), False
    for number, value in enumerate(line):
        if value is not None:
            share = (max(_height(value), low) - low) / (high - low)
            y = f"{HEIGHT * (1 - share):.1f}"
            drawing.append(f"V{y}h{STEP}" if is_open else f"M{number * STEP} {y}h{STEP}")
        is_open = value is not None
    return "".join(drawing)


def _seconds(value: float | None) -> str:
    return "-" if value is None else lasting(value)


# -- markers --------------------------------------------------------------------------------------


def _deploys(workers: Sequence[WorkerStatus], time: Activities) -> list[Marker]:
    """When processes of one version started together."""
    groups: list[list[WorkerStatus]] = []
    for worker in sorted(workers, key=lambda worker: (worker.version, worker.started_at)):
        last = groups[-1][-1] if groups else None
        if (
            last is None
            or last.version != worker.version
            or worker.started_at - last.started_at > _TOGETHER
        ):
            groups.append([])
        groups[-1].append(worker)
    return [
        Marker(
            "deploy", _x(group[0].started_at, time), 0.0, group[0].started_at,
            f"{counted(len(group), 'process')} with txbox {group[0].version} started",
        )
        for group in sorted(groups, key=lambda group: group[0].started_at)
        if group[0].started_at >= time.since
    ]  # fmt: skip


def _pauses(paused: Sequence[Pause], changes: Sequence[Audited], time: Activities) -> list[Marker]:
    """From when to when consumers were paused."""
    ends: dict[str, datetime] = {}
    spans: dict[tuple[str, datetime], tuple[datetime, str, str | None]] = {
        (pause.consumer, pause.paused_at): (time.until, pause.actor, pause.reason)
        for pause in paused
    }
    still = {pause.consumer for pause in paused}
    for change in changes:
        consumer = change.filter.get("consumer", "")
        if change.action == "resume":
            ends[consumer] = change.recorded_at
        elif consumer in ends:
            spans[consumer, change.recorded_at] = ends.pop(consumer), change.actor, change.reason
        elif consumer in still:
            # it is the one that lasts
            still.discard(consumer)
    return [
        Marker(
            "pause", _x(max(since, time.since), time), _x(until, time) - _x(max(since, time.since), time), since,
            f"{consumer} paused by {actor}{f': {reason}' if reason else ''}",
        )
        for (consumer, since), (until, actor, reason) in sorted(spans.items(), key=lambda span: span[0][1])
        if until > time.since
    ]  # fmt: skip


def _x(at: datetime, time: Activities) -> float:
    return round(STEP * ((at - time.since) / time.step), 1)
