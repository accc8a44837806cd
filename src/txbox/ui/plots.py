"""Small plots of what workers have counted, as SVG without scripts or styles."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime

from txbox.admin.activity import Activities, Activity

WIDTH, HEIGHT = 160, 28


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One step of time: where it stands, and how high its parts are."""

    x: float
    width: float
    done: float
    failed: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Plot:
    """What was processed and what failed, a bar for each step.

    Attributes:
        description: the same in words, for screen readers.
    """

    bars: tuple[Bar, ...]
    description: str
    width: int = WIDTH
    height: int = HEIGHT


def plot(activity: Activity, time: Activities) -> Plot:
    """Plot one consumer or route."""
    points = {point.at: point.counts for point in activity.points}
    steps = list(_steps(time))
    done = [points[at].processed if at in points else 0 for at in steps]
    failed = [points[at].failed + points[at].dead if at in points else 0 for at in steps]
    most = max((a + b for a, b in zip(done, failed, strict=True)), default=0)
    words = (
        f"{activity.name}: {sum(done):,} processed and {sum(failed):,} failed, "
        f"at most {most:,} in a step of {time.step.total_seconds() / 60:.0f} min"
    )
    return Plot(bars=tuple(_bars(done, failed, most)), description=words)


def _steps(time: Activities) -> Iterator[datetime]:
    at = time.since
    while at <= time.until:
        yield at
        at += time.step


def _bars(done: Sequence[int], failed: Sequence[int], most: int) -> Iterator[Bar]:
    step = WIDTH / max(1, len(done))
    for number, (well, badly) in enumerate(zip(done, failed, strict=True)):
        if well or badly:
            # however little happened, it is visible
            height = max(2.0, HEIGHT * (well + badly) / most)
            share = badly / (well + badly)
            yield Bar(
                x=round(number * step, 2),
                width=round(max(0.8, step - 0.6), 2),
                done=round(height * (1 - share), 2),
                failed=round(height * share, 2),
            )
