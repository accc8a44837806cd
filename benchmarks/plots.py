"""Figures as SVG: horizontal bars, and lines on plain or logarithmic axes. Light and dark pages both show them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

_COLOURS = ("#2f6fb0", "#d1672a", "#3d8b4f", "#8a54a2", "#a8443f", "#7a6a2b", "#3f8f95", "#888888")
_WIDTH = 760
_ROW = 26
_STYLE = (
    "<style>text{font:13px sans-serif;fill:#222}.t{font-weight:bold;font-size:15px}.r{text-anchor:end}"
    ".m{text-anchor:middle}line{stroke:#bbb}rect.b{fill:#fff}</style>"
)


def write(plot: Mapping[str, Any], directory: Path) -> Path:
    """Draw one plot of a result into `<name>.svg`."""
    directory.mkdir(exist_ok=True)
    path = directory / f"{plot['name']}.svg"
    draw = _bars if plot["kind"] == "bars" else _lines
    path.write_text("\n".join(draw(plot)) + "\n")
    return path


def _bars(plot: Mapping[str, Any]) -> Iterable[str]:
    values = {name: points[0][1] for name, points in plot["lines"].items()}
    left = 20 + 7 * max(len(name) for name in values)
    log = bool(plot["log"])
    ticks = _ticks(list(values.values()), log)
    scale = ticks if log else [0.0, max(*values.values(), 1e-9)]
    yield from _frame(plot, 60 + _ROW * len(values))
    for at, (name, value) in enumerate(values.items()):
        y, wide = 36 + at * _ROW, (_WIDTH - left - 90) * _share(value, scale, log)
        colour = _COLOURS[1] if name.startswith("naive") else _COLOURS[-1]
        colour = colour if name.startswith(("naive", "limit", "no inbox")) else _COLOURS[0]
        yield f'<text class="r" x="{left - 8}" y="{y + 15}">{escape(name)}</text>'
        yield f'<rect x="{left}" y="{y}" width="{wide:.1f}" height="18" fill="{colour}"/>'
        yield f'<text x="{left + wide + 6:.1f}" y="{y + 14}">{_number(value)}</text>'
    unit = escape(plot["y"]) + (", logarithmic" if log else "")
    yield f'<text class="r" x="{_WIDTH - 10}" y="{50 + _ROW * len(values)}">{unit}</text>'
    yield "</svg>"


def _lines(plot: Mapping[str, Any]) -> Iterable[str]:
    height, left, top, bottom = 400, 70, 50, 350
    lines: Mapping[str, Sequence[Sequence[float]]] = plot["lines"]
    right = 50 + 7 * max(map(len, lines))
    xs = [point[0] for line in lines.values() for point in line]
    ys = [point[1] for line in lines.values() for point in line]
    x_log, y_log = "x" in plot["log"], "y" in plot["log"]
    x_ticks, y_ticks = _ticks(xs, x_log), _ticks(ys, y_log)
    yield from _frame(plot, height)

    def across(value: float) -> float:
        return left + (_WIDTH - left - right) * _share(value, x_ticks, x_log)

    def down(value: float) -> float:
        return bottom - (bottom - top) * _share(value, y_ticks, y_log)

    for tick in x_ticks:
        yield f'<line x1="{across(tick):.1f}" x2="{across(tick):.1f}" y1="{top}" y2="{bottom}"/>'
        yield f'<text class="m" x="{across(tick):.1f}" y="{bottom + 18}">{_number(tick)}</text>'
    for tick in y_ticks:
        yield f'<line x1="{left}" x2="{_WIDTH - right}" y1="{down(tick):.1f}" y2="{down(tick):.1f}"/>'
        yield f'<text class="r" x="{left - 6}" y="{down(tick) + 4:.1f}">{_number(tick)}</text>'
    yield f'<text class="m" x="{(left + _WIDTH - right) / 2}" y="{bottom + 38}">{escape(plot["x"])}</text>'
    yield f'<text x="{left}" y="{top - 6}">{escape(plot["y"])}</text>'
    for at, (name, line) in enumerate(lines.items()):
        colour = _COLOURS[at % len(_COLOURS)]
        placed = [(across(point[0]), down(point[1])) for point in line]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in placed)
        yield f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>'
        yield from (f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in placed)
        y = top + 12 + at * 20
        yield f'<rect x="{_WIDTH - right + 14}" y="{y - 9}" width="12" height="10" fill="{colour}"/>'
        yield f'<text x="{_WIDTH - right + 32}" y="{y}">{escape(name)}</text>'
    yield "</svg>"


def _frame(plot: Mapping[str, Any], height: int) -> Iterable[str]:
    yield f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img">'
    yield _STYLE
    yield f'<rect class="b" width="{_WIDTH}" height="{height}"/>'
    yield f'<text class="t" x="10" y="20">{escape(plot["title"])}</text>'


def _ticks(values: Sequence[float], log: bool) -> list[float]:
    low, high = min(values), max(values)
    if log:
        first, last = math.floor(math.log10(max(low, 1e-9))), math.ceil(math.log10(max(high, 1e-9)))
        return [10.0**power for power in range(first, max(last, first + 1) + 1)]
    step = 10 ** math.floor(math.log10(max(high, 1e-9)))
    step = next(step * part for part in (0.1, 0.2, 0.5, 1, 2) if high / (step * part) <= 6)
    return [step * number for number in range(math.ceil(high / step) + 1)]


def _share(value: float, ticks: Sequence[float], log: bool) -> float:
    if log:
        value = max(value, ticks[0])
        return math.log(value / ticks[0]) / math.log(ticks[-1] / ticks[0])
    return (value - ticks[0]) / (ticks[-1] - ticks[0])


def _number(value: float) -> str:
    if value >= 1e6:
        return f"{value / 1e6:g} M"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
