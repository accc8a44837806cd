"""What the commands print: tables or JSON on standard output, progress and errors on standard error."""

from __future__ import annotations

import base64
import dataclasses
import json
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timedelta
from importlib.util import find_spec
from itertools import accumulate
from typing import TYPE_CHECKING, Any
from unicodedata import combining, east_asian_width

from txbox.text import View, age, moment, visible

if TYPE_CHECKING:
    from rich.console import Console

    from txbox.admin.views import Record
    from txbox.text import Cell


def shown(value: Cell) -> str:
    """A value as a cell, on one line."""
    if value is None:
        return ""
    if isinstance(value, datetime):
        return moment(value)
    if isinstance(value, timedelta):
        return age(value.total_seconds())
    text = str(value).replace("\n", " ").replace("\t", " ")
    return visible(text)


def width_of(text: str) -> int:
    """How many columns of a terminal a text takes."""
    return sum(2 if east_asian_width(each) in "WF" else not combining(each) for each in text)


def clipped(text: str, width: int, *, right: bool = False) -> str:
    """Pad or cut a text to exactly so many columns of a terminal.

    Args:
        right: align to the right.
    """
    if width_of(text) > width:
        across = accumulate(map(width_of, text))
        text = "".join(char for char, end in zip(text, across, strict=True) if end < width)
        text = f"{text}…"[: max(width, 0)]
    blanks = " " * (width - width_of(text))
    return blanks + text if right else text + blanks


def print_json(value: Any) -> None:
    """One JSON document on standard output; times are ISO 8601 in UTC."""
    print(json.dumps(value, default=_json, indent=2))


def _json(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return as_json(value)
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    raise TypeError(f"{type(value).__name__} is not printed as JSON")


def as_json(value: Any) -> dict[str, Any]:
    """The fields of a dataclass; bytes as text where they are, else as `…_base64`."""
    values: dict[str, Any] = {}
    for field in dataclasses.fields(value):
        item = getattr(value, field.name)
        if isinstance(item, bytes):
            try:
                item = item.decode()
            except UnicodeDecodeError:
                values[f"{field.name}_base64"] = item
                item = None
        values[field.name] = item
    return values


def print_line(text: str) -> None:
    # it may quote an argument, which may come from a list that a stranger wrote
    print(visible(text))


def print_table(columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> None:
    """Print a table: with rich on a terminal if it is installed, plain otherwise.

    Columns of numbers are aligned to the right; empty columns are omitted.
    """
    heads, values = View(tuple(columns), [tuple(row) for row in rows]).filled()
    cells = [[shown(value) for value in row] for row in values]
    right = [
        bool(values) and all(isinstance(row[index], (int, float, type(None))) for row in values)
        for index in range(len(heads))
    ]
    widths = [max(width_of(line[index]) for line in (heads, *cells)) for index in range(len(heads))]
    if not (sys.stdout.isatty() and _print_rich(heads, cells, widths, right)):
        for line in ([head.upper() for head in heads], *cells):
            print("  ".join(_aligned(line, widths, right)).rstrip())


def print_section(title: str, columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> None:
    """Print a table below others, under its title; nothing if it has no rows."""
    if rows:
        print_line(f"\n{title}:")
        print_table(columns, rows)


def _aligned(line: Sequence[str], widths: Sequence[int], right: Sequence[bool]) -> Iterator[str]:
    """The cells of a line, or the first of them, padded to the widths."""
    for cell, width, to_right in zip(line, widths, right, strict=False):
        yield clipped(cell, width, right=to_right)


def _print_rich(
    heads: Sequence[str],
    cells: Sequence[Sequence[str]],
    widths: Sequence[int],
    right: Sequence[bool],
) -> bool:
    try:
        from rich import box
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ImportError:
        return False
    console = Console()
    # a blank at both edges, two and a line between columns
    if _across([*widths[:-1], min(widths[-1], _FOLDED)], 3) + 2 > console.width:
        _print_stacked(console, heads, cells, widths, right)
        return True
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for index, (head, to_right) in enumerate(zip(heads, right, strict=True)):
        last = index == len(heads) - 1
        table.add_column(
            head, justify="right" if to_right else "left", overflow="fold", no_wrap=not last
        )
    for row in cells:
        # Text, never markup: the cells are not ours
        table.add_row(*(Text(cell, style=_STYLES.get(cell, "")) for cell in row))
    console.print(table)
    return True


def _across(widths: Sequence[int], between: int) -> int:
    """The width of a row in a terminal."""
    return sum(widths) + between * (len(widths) - 1)


def _print_stacked(
    console: Console,
    heads: Sequence[str],
    cells: Sequence[Sequence[str]],
    widths: Sequence[int],
    right: Sequence[bool],
) -> None:
    """Print the columns that fit as a table, and the others in a line below each row, so that ids stay whole."""
    from rich.padding import Padding
    from rich.text import Text

    ends = range(1, len(widths) + 1)
    fit = max(1, sum(_across(widths[:end], 2) <= console.width for end in ends))

    def line(row: Sequence[str], style: str | None = None) -> Text:
        parts = zip(_aligned(row, widths[:fit], right), row, strict=False)
        texts = [
            Text(part, _STYLES.get(cell, "") if style is None else style) for part, cell in parts
        ]
        text = Text("  ", overflow="fold").join(texts)
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


def print_record(pairs: Record) -> None:
    """Names and values, one a line."""
    width = max(len(name) for name, _ in pairs)
    for name, value in pairs:
        print(f"{name.ljust(width)}  {shown(value)}")


def printable_lines(text: str) -> str:
    """Text of several lines for the terminal, without control characters."""
    return "\n".join(shown(line) for line in text.splitlines())


def readable(payload: bytes) -> str:
    """A payload for the terminal: text, or bytes in hexadecimal."""
    try:
        return printable_lines(payload.decode())
    except UnicodeDecodeError:
        return payload.hex(" ")


def interactive() -> bool:
    """Whether a person can answer."""
    return sys.stdin.isatty() and sys.stderr.isatty()


def confirmed(question: str) -> bool:
    """Ask on the terminal; only "y" and "yes" agree."""
    print(f"{visible(question)} [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


@contextmanager
def progress(text: str, total: int | None = None) -> Generator[Callable[[int], None]]:
    """Show a progress bar on standard error, if that is a terminal and rich is installed."""
    if not sys.stderr.isatty() or find_spec("rich") is None:
        yield lambda _done: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(text, total=total)
        yield lambda done: bar.update(task, completed=done)
