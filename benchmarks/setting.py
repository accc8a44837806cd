"""What a phase is given: places, gauges, sizes; and how contenders take turns."""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from benchmarks.beside import Contender, Limit, Naive
from benchmarks.by_hand import ByHand
from benchmarks.contender import Txbox
from benchmarks.measure import circumstances
from benchmarks.place import Gauges, Place, places
from benchmarks.result import Bar, Plot, Round, result
from benchmarks.workload import Work, order_paid

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
    place: Place
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
        return Txbox(name, self.place, self.gauges, handler, **options)

    def work(
        self, times: float = 1, make: Callable[..., Work] = order_paid, **options: Any
    ) -> Callable[[int], Work]:
        """Workloads of a multiple of `messages`, the same one for all who ask for the same."""
        messages = max(1, round(self.messages * times))
        given = tuple(sorted(options.items()))
        return lambda seed: _made(make, messages, seed, given)

    def interleaved(self, cells: Sequence[Cell], *, warm: bool = True) -> list[Round]:
        """See `interleaved`."""
        warm_up = min(_WARM, self.messages) if warm else 0
        return interleaved(cells, rounds=self.rounds, warm_up=warm_up, report=self.report)

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


def interleaved(
    cells: Sequence[Cell],
    *,
    rounds: int,
    warm_up: int = _WARM,
    report: Report = lambda _text: None,
) -> list[Round]:
    """A round of every contender after another, several times; who goes first alternates.

    Args:
        warm_up: messages that each contender consumes before anything counts.
    """
    if warm_up:
        for contender, _ in cells:
            report(f"{contender.name}, warming up")
            contender.round(_made(order_paid, warm_up, 0, ()))
    done: list[Round] = []
    for number in range(rounds):
        for contender, work in cells[:: -1 if number % 2 else 1]:
            report(f"{contender.name}, round {number + 1} of {rounds}")
            done.append(contender.round(work(number + 1)))
    # in the order of the table, whoever went first
    order = {contender.name: at for at, (contender, _) in enumerate(cells)}
    return sorted(done, key=lambda run: order[run.contender])


@contextmanager
def opened(
    url: str, *, rounds: int, messages: int, report: Report | None = None
) -> Generator[Setting]:
    """Make the schemas, and drop them at the end.

    Raises:
        ConfigurationError: there is a schema of that name which is not from here.
    """
    with places(url) as (place, beside):
        gauges = Gauges(url)
        try:
            yield Setting(
                url, place, beside, gauges, rounds, messages, report or (lambda _text: None)
            )
        finally:
            gauges.close()
