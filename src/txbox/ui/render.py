"""How pages show things: payloads to read and compare, plots as SVG without scripts or styles, filters of templates."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from itertools import zip_longest
from typing import Any, NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from txbox.admin.activity import Activities, Activity
from txbox.admin.tables import COUNTED_MAX, FailureGroup, Table
from txbox.text import CONTROL, Cell, age, lasting, moment, visible

#: A payload that is longer is only offered as a file.
_SHOWN_BYTES = 256 * 1024
# of JSON with line breaks added; if there are more, it is shown as it came
_INDENTED_CHARACTERS = 2 * _SHOWN_BYTES
# of two payloads that are compared
_COMPARED_LINES = 1_000
# of which so many may differ: the time to align them grows with the square
_EDITS = 500
_NOT_COMPARED = "… the rest is not compared: download both to compare all"


# -- payloads ---------------------------------------------------------------------------------------


def differences(stored: bytes | None, aside: bytes | None) -> list[tuple[str, str, str]]:
    """Two payloads side by side: "same", "changed", "only stored" or "only aside", and the two lines.

    A last pair of lines is "cut" where there is more than was compared.
    """
    views = [readable(payload) for payload in (stored, aside)]
    if stored != aside and len({view and view.text for view in views}) == 1:
        # JSON that differs only in white space
        views = [readable(payload, indented=False) for payload in (stored, aside)]
    left, right = ([] if view is None else view.text.split("\n") for view in views)
    cut = max(len(left), len(right)) > _COMPARED_LINES or any(view and view.cut for view in views)
    left, right = left[:_COMPARED_LINES], right[:_COMPARED_LINES]
    lines: list[tuple[str, str, str]] = []
    a = b = 0
    for c, d in (*_alignment(left, right), (len(left), len(right))):
        for one, other in zip_longest(left[a:c], right[b:d]):
            kind = "only aside" if one is None else "only stored" if other is None else "changed"
            lines.append((kind, one or "", other or ""))
        if c < len(left) and d < len(right):
            lines.append(("same", left[c], right[d]))
        a, b = c + 1, d + 1
    if cut:
        lines.append(("cut", _NOT_COMPARED, _NOT_COMPARED))
    return lines


def _alignment(left: Sequence[str], right: Sequence[str]) -> list[tuple[int, int]]:
    """The lines that two texts have in common, in order, as indexes into both; of texts too different, the ends.

    Source: Myers, "An O(ND) Difference Algorithm and Its Variations", 1986.
    """
    start = next((at for at, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), -1)
    start = min(len(left), len(right)) if start < 0 else start
    back = zip(reversed(left[start:]), reversed(right[start:]), strict=False)
    end = next((at for at, (a, b) in enumerate(back) if a != b), -1)
    end = min(len(left), len(right)) - start if end < 0 else end
    numbers: dict[str, int] = {}
    one, other = (
        [numbers.setdefault(line, len(numbers)) for line in lines[start : len(lines) - end]]
        for lines in (left, right)
    )
    middle = [(start + a, start + b) for a, b in _common(one, other)]
    ends = ((len(left) - at, len(right) - at) for at in range(end, 0, -1))
    return [*((at, at) for at in range(start)), *middle, *ends]


def _common(one: Sequence[int], other: Sequence[int]) -> list[tuple[int, int]]:
    # how far each diagonal is reached with so many edits; diagonal 1 begins before the first line
    reached, before = {1: 0}, list[dict[int, int]]()

    def step(reached: dict[int, int], edits: int, diagonal: int) -> int:
        inserts = diagonal == -edits or (
            diagonal != edits and reached[diagonal - 1] < reached[diagonal + 1]
        )
        return diagonal + 1 if inserts else diagonal - 1

    for edits in range(_EDITS + 1):
        before.append(reached.copy())
        for diagonal in range(-edits, edits + 1, 2):
            source = step(reached, edits, diagonal)
            a = reached[source] + (source < diagonal)
            while a < len(one) and 0 <= a - diagonal < len(other) and one[a] == other[a - diagonal]:
                a += 1
            reached[diagonal] = a
            if a >= len(one) and a - diagonal >= len(other):
                break
        else:
            continue
        break
    else:
        return []
    a, b, pairs = len(one), len(other), list[tuple[int, int]]()
    for edits in range(len(before) - 1, -1, -1):
        source = step(before[edits], edits, a - b)
        from_a = before[edits][source] if edits else 0
        from_b = from_a - source if edits else 0
        while a > from_a and b > from_b:
            a, b = a - 1, b - 1
            pairs.append((a, b))
        a, b = from_a, from_b
    return pairs[::-1]


class Readable(NamedTuple):
    """A payload to show: its kind, its text or a hexadecimal dump, and whether it was cut."""

    kind: str
    text: str
    cut: bool


def readable(content: bytes | None, *, indented: bool = True) -> Readable | None:
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
            # only whether it is JSON: numbers of any length stay text
            json.loads(text, parse_int=str, parse_float=str)
            return Readable("JSON", _indented(text) if indented else text, cut)
    except (ValueError, RecursionError):
        # not JSON, or nested too deeply
        pass
    return Readable("text", text, cut)


_JSON_TOKEN = re.compile(r'"(?:[^"\\]|\\.?)*+(?:"|\Z)|[{}\[\],:]|[^\s{}\[\],:"]++')


def _indented(text: str) -> str:
    """JSON with line breaks; each name, number and text as it is written there."""
    parts, length, depth, opened = list[str](), 0, 0, False
    for word in _JSON_TOKEN.findall(text):
        closes = word in "}]"
        depth -= closes
        # an empty list or object stays on its line
        line = "\n" + "  " * depth
        part = line + word if opened != closes else word
        opened = word in "{["
        depth += opened
        part += line if word == "," else " " if word == ":" else ""
        length += len(part)
        if length > _INDENTED_CHARACTERS:
            return text
        parts.append(part)
    return "".join(parts)


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


def trend(group: FailureGroup) -> Plot:
    """Plot the hours in which messages of a group failed last."""
    hours, none = group.by_hour, [0] * len(group.by_hour)
    words = (
        f"failed in the last {len(hours)} hours: {sum(hours):,}, "
        f"at most {max(hours):,} in an hour, {hours[-1]:,} in the last one"
    )
    return Plot(bars=tuple(_bars(none, hours, max(hours))), description=words)


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
        "key": key_of, "names": names_of, "seconds": seconds, "ago": ago,
        "since": since,
    }  # fmt: skip
    environment.filters.update(filters)  # pyright: ignore[reportUnknownMemberType]
    return environment


def seen(value: object) -> Markup:
    """Text of strangers: escaped, and invisible characters made visible."""
    return Markup(CONTROL.sub(_unseen, escape(str(value))))


def _unseen(found: re.Match[str]) -> str:
    # one element for all of a run: a page must not be a hundred times as long as its payload
    run = found[0]
    return run if run == "\r" else f'<span class="unseen">{visible(run)}</span>'


def told(value: object) -> Markup:
    """A sentence with `code` in backticks."""
    parts = re.split(r"`([^`]+)`", str(value))
    return Markup("").join(
        Markup("<code>{}</code>").format(seen(part)) if place % 2 else seen(part)
        for place, part in enumerate(parts)
    )


def when(given: datetime | float | None) -> Markup:
    """A point in time in UTC; a script says how long ago that is."""
    if given is None:
        return Markup("")
    at = given if isinstance(given, datetime) else datetime.fromtimestamp(given, UTC)
    return Markup('<time datetime="{}">{}</time>').format(
        at.isoformat(timespec="milliseconds"), moment(at)
    )


def ago(at: datetime) -> Markup:
    """How long ago a time was, or in how long it is; the time itself is in its title."""
    if at.year in (1, 9999):
        return when(at)
    past_s = (datetime.now(UTC) - at).total_seconds()
    words = f"{age(past_s)} ago" if past_s >= 0 else f"in {age(-past_s)}"
    return Markup('<time datetime="{}" title="{}">{}</time>').format(
        at.isoformat(timespec="milliseconds"), moment(at), words
    )


def since(at: datetime | float) -> Markup:
    """How long ago something of the past was: a process whose clock is ahead was not seen in the future."""
    now = datetime.now(UTC)
    moment = at if isinstance(at, datetime) else datetime.fromtimestamp(at, UTC)
    return ago(min(moment, now))


def seconds(value: float | None) -> str:
    """A latency: three digits and a unit."""
    return "-" if value is None else lasting(value)


def count(number: int) -> str:
    """A number that was counted up to a limit."""
    return f"{COUNTED_MAX:,}+" if number > COUNTED_MAX else f"{number:,}"


def cell(value: Cell) -> Markup:
    """A cell of a table."""
    if isinstance(value, datetime):
        return ago(value)
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
