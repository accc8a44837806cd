"""The tables of a run: every point and what came of it, and which wrong consumer was caught by what."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tests.crash.mutants import CONSUMERS, MUTANTS
from tests.crash.runs import Ended


@dataclass(frozen=True)
class Swept:
    """All cases of one consumer on one database."""

    database: str
    mode: str
    consumer: str
    ended: Sequence[Ended]
    took_s: float

    @property
    def kills(self) -> int:
        return sum(outcome.killed for outcome in self.ended)

    @property
    def wrong(self) -> Counter[str]:
        return Counter(name for outcome in self.ended for name in outcome.checked.wrong)


class Report:
    """Collects sweeps until the end of the run."""

    def __init__(self) -> None:
        self._swept: list[Swept] = []

    def add(
        self, database: str, mode: str, consumer: str, ended: Sequence[Ended], took_s: float
    ) -> None:
        self._swept.append(Swept(database, mode, consumer, ended, took_s))

    def lines(self, *, full: bool) -> Iterator[str]:
        """The tables as text; `full` adds a line for every point."""
        real = [each for each in self._swept if each.consumer == "txbox"]
        if real:
            yield ""
            yield "crash sweep: kill -9 at every point, redelivery, then the invariants"
            if full:
                yield from _points(real)
            yield from _summary(real)
        wrong = [each for each in self._swept if each.consumer in MUTANTS]
        if wrong:
            yield ""
            yield "wrong consumers, and the real one put through the same"
            yield from self._mutants(wrong)

    def _mutants(self, wrong: Sequence[Swept]) -> Iterator[str]:
        yield f"  {'consumer':<38} {'database':<11} {'cases':>5} {'caught':>6}  by"
        for row in wrong:
            caught = sum(bool(case.checked.wrong) for case in row.ended)
            by = ", ".join(f"{name} x{count}" for name, count in row.wrong.most_common())
            title = CONSUMERS[row.consumer].title
            yield f"  {title:<38} {row.database:<11} {len(row.ended):>5} {caught:>6}  {by or 'NOT CAUGHT'}"
            if caught and row.kills:
                where = [f"{e.case.point}#{e.case.nth}" for e in row.ended if e.checked.wrong]
                yield f"  {'':<63} at {', '.join(where)}"
            mode, sound = MUTANTS[row.consumer]
            for control in self._swept:
                if (control.consumer, control.database, control.mode) == (
                    sound,
                    row.database,
                    mode,
                ):
                    bad = sum(bool(case.checked.wrong) for case in control.ended)
                    ends = ", ".join(
                        sorted(
                            {
                                f"{e.checked.status}, {e.checked.effects} effects"
                                for e in control.ended
                            }
                        )
                    )
                    yield (
                        f"    {CONSUMERS[sound].title:<36} {row.database:<11} {len(control.ended):>5} {bad:>6}  {ends}"
                    )


def _points(real: Sequence[Swept]) -> Iterator[str]:
    for mode in dict.fromkeys(row.mode for row in real):
        columns = [row for row in real if row.mode == mode]
        yield ""
        yield f"  {mode + ': point':<32}" + "".join(f"{column.database:>14}" for column in columns)
        points = list(dict.fromkeys(e.case.point for column in columns for e in column.ended))
        for point in points:
            yield f"  {point:<32}" + "".join(f"{_cell(column, point):>14}" for column in columns)


def _cell(row: Swept, point: str | None) -> str:
    here = [ended for ended in row.ended if ended.case.point == point]
    if not here:
        return "-"
    bad = sorted({name for ended in here for name in ended.checked.wrong})
    missed = sum(not ended.killed for ended in here)
    return (
        ", ".join(bad) if bad else f"{len(here)} ok" + (f" ({missed} unpassed)" if missed else "")
    )


def _summary(real: Sequence[Swept]) -> Iterator[str]:
    yield ""
    yield (
        f"  {'mode':<9} {'database':<11} {'points':>6} {'cases':>6} {'kills':>6} {'effects':>8}"
        f" {'lost':>5} {'doubled':>8} {'wrong':>6} {'seconds':>8}"
    )
    for row in real:
        effects = sum(ended.checked.effects for ended in row.ended)
        yield (
            f"  {row.mode:<9} {row.database:<11} {len({e.case.point for e in row.ended}):>6} {len(row.ended):>6}"
            f" {row.kills:>6} {effects:>8} {row.wrong['I2 lost']:>5} {row.wrong['I1 doubled']:>8}"
            f" {sum(bool(e.checked.wrong) for e in row.ended):>6} {row.took_s:>8.1f}"
        )


#: of this test session
REPORT = Report()
