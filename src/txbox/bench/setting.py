"""What a phase is given: places, gauges, sizes; and how contenders take turns."""

from __future__ import annotations

import datetime
import functools
import os
import platform
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psycopg

import txbox
from txbox.bench.beside import Contender, Limit, Naive
from txbox.bench.by_hand import ByHand
from txbox.bench.contender import Txbox
from txbox.bench.place import Gauges, Place, places
from txbox.bench.result import Bar, Plot, Round, result
from txbox.bench.workload import Work, order_paid

Report = Callable[[str], None]
#: A contender, and what makes its workload of a seed.
Cell = tuple[Contender, Callable[[int], Work]]

_WARM = 300


@functools.lru_cache(maxsize=8)
def _made(make: Callable[..., Work], messages: int, seed: int, options: tuple[Any, ...]) -> Work:
    return make(messages, seed=seed, **dict(options))


@dataclass
class Setting:
    """One run of phases on one database.

    Args:
        rounds: of each contender, 1 or more.
        messages: distinct ones in a round of naive; faster contenders get a multiple.
        report: told what is measured next.
    """

    url: str
    own: Place
    beside: Place
    gauges: Gauges
    rounds: int
    messages: int
    report: Report = field(default=lambda _text: None)

    def naive(self, **options: Any) -> Naive:
        return Naive(self.beside, self.gauges, **options)

    def by_hand(self, **options: Any) -> ByHand:
        return ByHand(self.beside, self.gauges, **options)

    def limit(self) -> Limit:
        return Limit(self.beside, self.gauges)

    def txbox(self, name: str, handler: Callable[..., Any], **options: Any) -> Txbox:
        return Txbox(name, self.own, self.gauges, handler, **options)

    def work(
        self, times: float = 1, make: Callable[..., Work] = order_paid, **options: Any
    ) -> Callable[[int], Work]:
        """Workloads of a multiple of `messages`, the same one for all who ask for the same."""
        messages = max(1, round(self.messages * times))
        given = tuple(sorted(options.items()))
        return lambda seed: _made(make, messages, seed, given)

    def interleaved(self, cells: Sequence[Cell], *, warm: bool = True) -> list[Round]:
        """A round of every contender after another, several times; who goes first alternates."""
        if warm:
            for contender, _ in cells:
                self.report(f"{contender.name}, warming up")
                contender.round(_made(order_paid, min(_WARM, self.messages), 0, ()))
        done: list[Round] = []
        for number in range(self.rounds):
            for contender, work in cells[:: -1 if number % 2 else 1]:
                self.report(f"{contender.name}, round {number + 1} of {self.rounds}")
                done.append(contender.round(work(number + 1)))
        # in the order of the table, whoever went first
        order = {contender.name: at for at, (contender, _) in enumerate(cells)}
        return sorted(done, key=lambda own: order[own.contender])

    def result(  # the fields of the document, without those that the setting knows
        self,
        phase: str,
        title: str,
        method: str,
        bars: Sequence[Bar],
        rounds: Sequence[Round],
        *,
        plots: Sequence[Plot] = (),
        notes: Sequence[str] = (),
    ) -> dict[str, Any]:
        return result(
            phase=phase,
            title=title,
            method=f"{self.rounds} rounds of each, in turns, {method}",
            bars=bars,
            rounds=rounds,
            circumstances=circumstances(self.url),
            plots=plots,
            notes=notes,
        )


@contextmanager
def opened(
    url: str, *, rounds: int, messages: int, report: Report | None = None
) -> Generator[Setting]:
    """Make the schemas, and drop them at the end.

    Raises:
        ConfigurationError: there is a schema of that name which is not from here.
    """
    with places(url) as (own, beside):
        gauges = Gauges(url)
        try:
            yield Setting(
                url, own, beside, gauges, rounds, messages, report or (lambda _text: None)
            )
        finally:
            gauges.close()


def circumstances(url: str | None) -> dict[str, Any]:
    """The machine, the versions and, where the URL is that of a PostgreSQL server, its settings."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": {
            "cpu": _cpu(),
            "cores": os.cpu_count(),
            "kernel": platform.release(),
            "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        },
        "versions": {
            "python": platform.python_version(),
            "txbox": txbox.__version__,
            "psycopg": psycopg.__version__,
            "psycopg_implementation": psycopg.pq.__impl__,
            "libpq": psycopg.pq.version(),
        },
        "server": {} if url is None else _settings(url),
        "load_1min": os.getloadavg()[0],
    }


_SETTINGS = (
    "server_version",
    "fsync",
    "synchronous_commit",
    "full_page_writes",
    "shared_buffers",
    "max_wal_size",
)


def _settings(url: str) -> dict[str, str]:
    with psycopg.connect(url, autocommit=True) as connection:
        rows = connection.execute(
            "SELECT name, current_setting(name) FROM pg_settings WHERE name = ANY(%s)",
            (list(_SETTINGS),),
        ).fetchall()
    return dict(rows)


def _cpu() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
