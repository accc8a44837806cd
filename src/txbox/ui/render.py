"""How pages show things: payloads to read and compare, plots as SVG without scripts or styles, filters of templates."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from difflib import SequenceMatcher
from itertools import zip_longest
from typing import Any, NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from txbox.admin.activity import Activities, Activity
from txbox.admin.tables import COUNTED_MAX, Table
from txbox.text import CONTROL, Cell, age, lasting, moment, visible

#: A payload that is longer is only offered as a file.
_SHOWN_BYTES = 256 * 1024
# of two payloads that are compared
_COMPARED_LINES = 1_000


# -- payloads ---------------------------------------------------------------------------------------


def differences(stored: bytes | None, aside: bytes | None) -> list[tuple[str, str, str]]:
    """Two payloads side by side: "same", "changed", "only stored" or "only aside", and the two lines."""
    left, right = (
        [] if (shown := readable(payload)) is None else shown.text.splitlines()[:_COMPARED_LINES]
        for payload in (stored, aside)
    )
    lines: list[tuple[str, str, str]] = []
    for what, a, b, c, d in SequenceMatcher(None, left, right, autojunk=False).get_opcodes():
        for one, other in zip_longest(left[a:b], right[c:d]):
            kind = "same" if what == "equal" else "changed"
            if one is None or other is None:
                kind = "only aside" if one is None else "only stored"
            lines.append((kind, one or "", other or ""))
    return lines


class Readable(NamedTuple):
    """A payload to show: its kind, its text or a hexadecimal dump, and whether it was cut."""

    kind: str
    text: str
    cut: bool


def readable(content: bytes | None) -> Readable | None:
    if content is None:
        return None
    cut = len(content) > _SHOWN_BYTES
    shown = content[:_SHOWN_BYTES]
    try:
        text = shown.decode("utf-8", "ignore" if cut else "strict")
    except UnicodeDecodeError:
        lines = (shown[at : at + 16] for at in range(0, min(len(shown), 16 * 1024), 16))
        dump = "\n".join(
            f"{16 * number:08x}  {line.hex(' ', 1):<47}  {''.join(chr(b) if 32 <= b < 127 else '.' for b in line)}"
            for number, line in enumerate(lines)
        )
        return Readable("bytes", dump, cut or len(shown) > 16 * 1024)
    try:
        if not cut:
            return Readable("JSON", json.dumps(json.loads(text), indent=2, ensure_ascii=False), cut)
    except (ValueError, RecursionError):
        # not JSON, or nested too deeply
        pass
    return Readable("text", text, cut)


# -- plots ------------------------------------------------------------------------------------------

WIDTH, HEIGHT = 160, 28


class Bar(NamedTuple):
    """One step of time: where it stands, and how high its parts are."""

    x: float
    width: float
    done: float
    failed: float


class Plot(NamedTuple):
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
    length = (time.until - time.since) // time.step + 1
    steps = [time.since + number * time.step for number in range(length)]
    done = [points[at].processed if at in points else 0 for at in steps]
    failed = [points[at].failed + points[at].dead if at in points else 0 for at in steps]
    most = max((a + b for a, b in zip(done, failed, strict=True)), default=0)
    words = (
        f"{activity.name}: {sum(done):,} processed and {sum(failed):,} failed, "
        f"at most {most:,} in a step of {time.step.total_seconds() / 60:.0f} min"
    )
    return Plot(bars=tuple(_bars(done, failed, most)), description=words)


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


# -- templates ------------------------------------------------------------------------------------


def templates() -> Environment:
    environment = Environment(
        loader=PackageLoader("txbox.ui"), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    filters: dict[str, Callable[..., Any]] = {
        "seen": seen, "told": told, "plain": visible, "when": when, "age": age, "count": count, "cell": cell,
        "key": key_of, "names": names_of, "seconds": seconds,
    }  # fmt: skip
    environment.filters.update(filters)  # pyright: ignore[reportUnknownMemberType]
    return environment


def seen(value: object) -> Markup:
    """Text of strangers: escaped, and invisible characters made visible."""
    return Markup(CONTROL.sub(_unseen, escape(str(value))))


def _unseen(found: re.Match[str]) -> str:
    char = found[0]
    return char if char == "\r" else f'<span class="unseen">\\x{ord(char):02x}</span>'


def told(value: object) -> Markup:
    """A sentence with `code` in backticks."""
    parts = re.split(r"`([^`]+)`", str(value))
    return Markup("").join(
        Markup("<code>{}</code>").format(seen(part)) if place % 2 else seen(part)
        for place, part in enumerate(parts)
    )


def when(given: datetime | float | None) -> Markup:
    """A point in time in UTC; a script adds how long ago."""
    if given is None:
        return Markup("")
    at = given if isinstance(given, datetime) else datetime.fromtimestamp(given, UTC)
    return Markup('<time datetime="{}">{}</time>').format(
        at.isoformat(timespec="milliseconds"), moment(at)
    )


def seconds(value: float | None) -> str:
    """A latency: three digits and a unit."""
    return "-" if value is None else lasting(value)


def count(number: int) -> str:
    """A number that was counted up to a limit."""
    return f"{COUNTED_MAX:,}+" if number > COUNTED_MAX else f"{number:,}"


def cell(value: Cell) -> Markup:
    """A cell of a table."""
    if isinstance(value, datetime):
        return when(value)
    if isinstance(value, timedelta):
        return escape(age(value.total_seconds()))
    if isinstance(value, (int, float)):
        return escape(f"{value:,}")
    return seen("" if value is None else value)


def names_of(row: Any, table: Table) -> dict[str, Any]:
    """The key of a row, for an address."""
    return {name: getattr(row, name) for name in table.key}


def key_of(row: Any, table: Table) -> str:
    """The key of a row, for a form."""
    return json.dumps([*names_of(row, table).values()])
