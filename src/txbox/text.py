"""Text for people: lengths of time, counts, tables, and what strangers wrote."""

from __future__ import annotations

import re
from datetime import datetime, timedelta
from typing import NamedTuple

from txbox.errors import LONGEST

#: One cell of a table; None and "" are empty.
Cell = str | int | float | datetime | timedelta | None

# Ids and error texts come from strangers: nothing in them may steer a terminal or a page, and two ids that differ in
# invisible characters (soft hyphens, zero width, direction marks, tags) must not look alike.
CONTROL = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f"
    r"\u2028-\u202e\u2060-\u206f\u3164\ufe00-\ufe0f\ufeff\uffa0\ufff9-\ufffb\U000e0000-\U000e0fff]+"
)
#: Shown as the consumer of what no handler consumes.
UNMATCHED = "(no consumer)"

_UNITS_S = {"ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}
# from the first digit of a number only: tried from each of them, a long number takes quadratic time
_DURATION = re.compile(r"(?<!\d)(\d++(?:\.\d++)?)(ms|s|m|h|d|w)")
_DURATION_CHARACTERS = 1_000


class View(NamedTuple):
    """A table: the names of its columns, and its rows."""

    columns: tuple[str, ...]
    rows: list[tuple[Cell, ...]]

    def filled(self) -> View:
        """Drop the columns that are empty in every row, except the first."""
        kept = [
            index
            for index in range(len(self.columns))
            if index == 0 or any(row[index] not in (None, "") for row in self.rows)
        ]
        rows = [tuple(row[index] for index in kept) for row in self.rows]
        return View(tuple(self.columns[index] for index in kept), rows)


def moment(at: datetime) -> str:
    """Format a point in time: 2026-11-20 08:15:00 UTC; also one beyond what Python can express.

    Args:
        at: in UTC, as all times of txbox are.
    """
    if at.year in (1, 9999):
        return "beyond the years 1 to 9998"
    return f"{at:%Y-%m-%d %H:%M:%S} UTC"


def age(seconds: float | None) -> str:
    """Format a length of time in whole seconds: 42s, 5m 10s, 3h 12m, 2d 4h."""
    if seconds is None:
        return ""
    rest, parts = int(seconds), list[str]()
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60), ("s", 1)):
        number, rest = divmod(rest, size)
        if number or parts:
            parts.append(f"{number}{unit}" if number else "")
    return " ".join(part for part in parts[:2] if part) or "0s"


def lasting(seconds: float) -> str:
    """Format a length of time of which fractions of a second matter: 5 ms, 1.5 s, 60 s, 5m 10s."""
    if seconds < 1:
        return f"{seconds * 1000:.3g} ms"
    return f"{seconds:.3g} s" if seconds < 100 else age(round(seconds))


def duration_of(text: str) -> timedelta:
    """Read 30s, 5m, 2h, 7d, or a sum like 1h30m.

    Raises:
        ValueError: not a duration, or one of more than ten years.
    """
    if len(text) > _DURATION_CHARACTERS:
        raise ValueError(
            f"invalid duration of {len(text):,} characters: use a number and a unit, such as 30s, 5m, 2h or 7d"
        )
    parts = _DURATION.findall(text)
    if not parts or "".join(f"{number}{unit}" for number, unit in parts) != text:
        raise ValueError(
            f"invalid duration {text!r}: use a number and a unit, such as 30s, 5m, 2h or 7d"
        )
    length_s = sum(float(number) * _UNITS_S[unit] for number, unit in parts)
    if length_s > LONGEST.total_seconds():
        raise ValueError(f"invalid duration {text!r}: it is longer than ten years")
    return timedelta(seconds=length_s)


def counted(number: int, noun: str = "message") -> str:
    """1 message, 2 messages, 3 processes."""
    return f"{number:,} {noun}{'' if number == 1 else 'es' if noun.endswith('s') else 's'}"


def capitalized(text: str) -> str:
    """Return a sentence that begins with a capital; the rest stays as it is."""
    return text[:1].upper() + text[1:]


def with_article(noun: str) -> str:
    """a Session, an AsyncEngine, a User."""
    return f"{'an' if noun[:1] in tuple('AEIOaeio') else 'a'} {noun}"


def visible(value: object) -> str:
    """Text of strangers with its invisible characters as \\x1b and the like."""
    return CONTROL.sub(
        lambda match: "".join(f"\\x{ord(char):02x}" for char in match[0]), str(value)
    )
