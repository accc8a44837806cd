"""The live view: rich where it is installed and a terminal is there, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, TextIO

from txbox.demo.sides import Side

_EVERY_S = 2.0
_ROWS = (
    "progress",
    "payments booked",
    "receipts sent",
    "per second",
    "duplicates recognised",
    "retries",
    "killed with -9",
)


class Screen(Protocol):
    """Where progress is shown."""

    def show(self, sides: Sequence[Side], total: int, note: str) -> None: ...


@contextmanager
def screen(out: TextIO) -> Generator[Screen]:
    """A live view on a terminal, a line every two seconds elsewhere."""
    if out.isatty():
        try:
            from rich.console import Console
            from rich.live import Live
        except ModuleNotFoundError:
            pass
        else:
            with Live(console=Console(file=out), refresh_per_second=8, transient=True) as live:
                yield _Live(live)
            return
    yield _Lines(out)


class _Rates:
    """Payments a second over the last few looks."""

    def __init__(self) -> None:
        self._seen: dict[str, list[tuple[float, int]]] = {}

    def of(self, side: Side) -> float:
        seen = self._seen.setdefault(side.name, [])
        seen.append((time.monotonic(), side.done))
        del seen[:-12]
        (began, before), (now, after) = seen[0], seen[-1]
        return (after - before) / (now - began) if now > began else 0.0


class _Live:
    def __init__(self, live: Any) -> None:
        self._live = live
        self._rates = _Rates()

    def show(self, sides: Sequence[Side], total: int, note: str) -> None:
        from rich.panel import Panel
        from rich.progress_bar import ProgressBar
        from rich.table import Table

        table = Table(box=None, pad_edge=False, expand=True)
        table.add_column("", style="dim", min_width=22)
        for side in sides:
            table.add_column(side.name, ratio=1, style="cyan" if side.name == "txbox" else "yellow")
        cells: list[list[Any]] = [
            [ProgressBar(total=max(total, 1), completed=min(side.done, total), width=24) for side in sides],
            [str(side.done) for side in sides],
            [str(len(side.receipts)) for side in sides],
            [f"{self._rates.of(side):.0f}" for side in sides],
            ["it cannot know" if side.duplicates is None else str(side.duplicates) for side in sides],
            [str(side.retries) for side in sides],
            [str(side.kills) for side in sides],
        ]  # fmt: skip
        for label, row in zip(_ROWS, cells, strict=True):
            table.add_row(label, *row)
        self._live.update(
            Panel(
                table,
                title="a payment service, killed again and again",
                subtitle=note,
                padding=(1, 2),
            )
        )


class _Lines:
    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._next_s = 0.0

    def show(self, sides: Sequence[Side], total: int, note: str) -> None:
        now = time.monotonic()
        if now < self._next_s:
            return
        self._next_s = now + _EVERY_S
        parts = [
            f"{side.name}: {side.done} booked, {len(side.receipts)} receipts" for side in sides
        ]
        self._out.write(f"{'; '.join(parts)} (of {total}); {note}\n")
        self._out.flush()


def print_table(out: TextIO, head: Sequence[str], body: Sequence[Sequence[str]]) -> None:
    """The closing table."""
    if out is sys.stdout and out.isatty():
        try:
            from rich.console import Console
            from rich.table import Table
        except ModuleNotFoundError:
            pass
        else:
            table = Table(show_header=True, header_style="bold")
            for index, name in enumerate(head):
                table.add_column(name, justify="left" if index == 0 else "right")
            for row in body:
                table.add_row(*row)
            Console(file=out).print(table)
            return
    widths = [max(len(row[index]) for row in (head, *body)) for index in range(len(head))]
    for row in (head, *body):
        cells = [
            cell.ljust(width) if index == 0 else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        out.write("  ".join(cells).rstrip() + "\n")
