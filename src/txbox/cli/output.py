"""What the commands print: tables or JSON on standard output, progress and errors on standard error."""

from __future__ import annotations

import base64
import dataclasses
import json
import re
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from txbox.errors import redacted

if TYPE_CHECKING:
    from rich.console import Console

# ids and error texts come from strangers: nothing of theirs may steer the terminal
# and what cannot be seen makes no two ids look alike: soft hyphens, zero-width characters, marks of direction, tags
_CONTROL = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f"
    r"\u2028-\u202e\u2060-\u206f\u3164\ufe00-\ufe0f\ufeff\uffa0\ufff9-\ufffb\U000e0000-\U000e0fff]"
)

Cell = str | int | float | datetime | None


def shown(value: Cell) -> str:
    """A value as a cell, on one line."""
    if value is None:
        return ""
    if isinstance(value, datetime):
        return value.strftime("%Y-%m-%d %H:%M:%S")
    text = str(value).replace("\n", " ").replace("\t", " ")
    return _CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", text)


def age(seconds: float | None) -> str:
    """A length of time for people: 42s, 5m 10s, 3h 12m, 2d 4h."""
    if seconds is None:
        return ""
    left = int(seconds)
    units = (("d", 86400), ("h", 3600), ("m", 60), ("s", 1))
    for index, (unit, size) in enumerate(units):
        if left >= size:
            text = f"{left // size}{unit}"
            if index + 1 < len(units):
                smaller, smaller_size = units[index + 1]
                rest = left % size // smaller_size
                return f"{text} {rest}{smaller}" if rest else text
            return text
    return "0s"


def counted(number: int, noun: str = "message") -> str:
    """1 message, 2 messages."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def print_json(value: Any) -> None:
    """One JSON document on standard output; times are ISO 8601 in UTC."""
    print(json.dumps(value, default=_json, indent=2))


def _json(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    raise TypeError(f"{type(value).__name__} is not printed as JSON")


def print_line(text: str) -> None:
    print(text)


def print_error(text: str) -> None:
    print(f"txbox: {redacted(text)}", file=sys.stderr)


def print_table(
    columns: Sequence[str], rows: Sequence[Sequence[Cell]], *, title: str | None = None
) -> None:
    """A table: with rich on a terminal where it is installed, plain and aligned otherwise.

    Columns of numbers stand to the right; a column without any value is left out.
    """
    kept = [
        index
        for index in range(len(columns))
        if index == 0 or any(row[index] not in (None, "") for row in rows)
    ]
    heads = [columns[index] for index in kept]
    cells = [[shown(row[index]) for index in kept] for row in rows]
    right = [
        bool(rows) and all(isinstance(row[index], (int, float, type(None))) for row in rows)
        for index in kept
    ]
    if not (sys.stdout.isatty() and _print_rich(heads, cells, right, title)):
        _print_plain(heads, cells, right, title)


def _print_plain(
    heads: Sequence[str], cells: Sequence[Sequence[str]], right: Sequence[bool], title: str | None
) -> None:
    if title:
        print(title)
    lines = [[head.upper() for head in heads], *cells]
    widths = [max(len(line[index]) for line in lines) for index in range(len(heads))]
    for line in lines:
        aligned = (
            cell.rjust(width) if to_right else cell.ljust(width)
            for cell, width, to_right in zip(line, widths, right, strict=True)
        )
        print("  ".join(aligned).rstrip())


def _print_rich(
    heads: Sequence[str], cells: Sequence[Sequence[str]], right: Sequence[bool], title: str | None
) -> bool:
    try:
        from rich import box
        from rich.cells import cell_len
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ImportError:
        return False
    console = Console()
    widths = [max(cell_len(line[index]) for line in (heads, *cells)) for index in range(len(heads))]
    # a blank at both edges, two and a line between columns
    if _across([*widths[:-1], min(widths[-1], _FOLDED)], 3) + 2 > console.width:
        if title:
            console.print(Text(title, "italic"))
        _print_stacked(console, heads, cells, widths, right)
        return True
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", pad_edge=False)
    for index, (head, to_right) in enumerate(zip(heads, right, strict=True)):
        table.add_column(
            head,
            justify="right" if to_right else "left",
            overflow="fold",
            no_wrap=index < len(heads) - 1,
        )
    for row in cells:
        # Text, never markup: the cells are not ours
        table.add_row(*(Text(cell, style=_STYLES.get(cell, "")) for cell in row))
    console.print(table)
    return True


def _across(widths: Sequence[int], between: int) -> int:
    """Columns of the terminal that a row takes."""
    return sum(widths) + between * (len(widths) - 1)


def _print_stacked(
    console: Console,
    heads: Sequence[str],
    cells: Sequence[Sequence[str]],
    widths: Sequence[int],
    right: Sequence[bool],
) -> None:
    """The columns that fit as a table, the others named in a line below each row: ids stay whole."""
    from rich.cells import cell_len
    from rich.padding import Padding
    from rich.text import Text

    ends = range(1, len(widths) + 1)
    fit = max(1, sum(_across(widths[:end], 2) <= console.width for end in ends))

    def line(row: Sequence[str], style: str | None = None) -> Text:
        text = Text(overflow="fold")
        for index in range(fit):
            blanks = " " * (widths[index] - cell_len(row[index]))
            text.append("  " if index else "")
            text.append(
                blanks + row[index] if right[index] else row[index] + blanks,
                _STYLES.get(row[index], "") if style is None else style,
            )
        text.rstrip()
        return text

    console.print(line(heads, "bold"))
    console.print("─" * min(_across(widths[:fit], 2), console.width))
    for row in cells:
        console.print(line(row))
        below = range(fit, len(row))
        if rest := ", ".join(f"{heads[index]} {row[index]}" for index in below if row[index]):
            text = Text(rest, "dim", overflow="fold")
            console.print(Padding(text, (0, 0, 0, 4), expand=False))


# a last column of text is folded down to this before the table is stacked
_FOLDED = 30
_STYLES = {
    "dead": "red",
    "failed": "yellow",
    "sent": "green",
    "leased": "cyan",
    "processed": "green",
    "processing": "cyan",
    "discarded": "dim",
}


def print_record(pairs: Sequence[tuple[str, Cell]]) -> None:
    """Names and values, one a line; what has no value is left out."""
    width = max(len(name) for name, _ in pairs)
    for name, value in pairs:
        if value not in (None, ""):
            print(f"{name.ljust(width)}  {shown(value)}")


def printable_lines(text: str) -> str:
    """Text of several lines for the terminal, without control characters."""
    return "\n".join(shown(line) for line in text.splitlines())


def described(size_bytes: int | None, *, revealed: bool) -> str:
    """How large a payload is, and how to see it."""
    if size_bytes is None:
        return "empty (a tombstone)"
    return f"{size_bytes} bytes" + ("" if revealed else " (--reveal prints it)")


def readable(payload: bytes) -> str:
    """A payload for the terminal: text, or bytes in hexadecimal."""
    try:
        return printable_lines(payload.decode())
    except UnicodeDecodeError:
        return payload.hex(" ")


def payload_as_json(payload: bytes | None) -> dict[str, Any]:
    """Text as `payload`, other bytes as `payload_base64`."""
    if payload is None:
        return {"payload": None}
    try:
        return {"payload": payload.decode()}
    except UnicodeDecodeError:
        return {"payload": None, "payload_base64": payload}


def interactive() -> bool:
    """Say whether somebody can be asked."""
    return sys.stdin.isatty() and sys.stderr.isatty()


def confirmed(question: str) -> bool:
    """Ask on the terminal; anything but yes is no."""
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


@contextmanager
def progress(text: str, total: int | None = None) -> Generator[Callable[[int], None]]:
    """A progress bar on standard error while work lasts; nothing where no terminal or no rich is."""
    if not sys.stderr.isatty():
        yield lambda _done: None
        return
    try:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
        )
    except ImportError:
        yield lambda _done: None
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(text, total=total)
        yield lambda done: bar.update(task, completed=done)
