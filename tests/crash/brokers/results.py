"""What became of each case, kept in a file beside the page that shows it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Any

from tests.crash.brokers.checker import Checked
from tests.support.servers import ROOT

FILE = ROOT / "docs" / "reliability" / "crashes.json"

#: paths that are no sweep over points
SCENARIO, WRONG = "scenario", "wrong consumer"


@dataclass(frozen=True)
class Result:
    """One line of the table.

    Args:
        path: inline, stored, redelivered, or one of the two above.
        point: the crash point; the name of the scenario or of the wrong consumer.
        unpassed: 1 when the worker ended without passing the point.
    """

    broker: str
    database: str
    path: str
    point: str
    kills: int
    sent: int
    effects: int
    lost: int
    doubled: int
    unpassed: int = 0
    wrong: tuple[str, ...] = ()

    @property
    def key(self) -> tuple[str, str, str, str]:
        return self.broker, self.database, self.path, self.point

    def line(self) -> str:
        """For people, as the run goes on."""
        verdict = ", ".join(self.wrong) or ("not passed" if self.unpassed else "ok")
        return (
            f"{self.broker:<11} {self.database:<11} {self.path:<14} {self.point:<24} kills {self.kills:>2}"
            f"  sent {self.sent:>4}  effects {self.effects:>4}  lost {self.lost}  doubled {self.doubled}  {verdict}"
        )


def result(
    where: tuple[str, str, str, str], kills: int, checked: Checked, unpassed: int = 0
) -> Result:
    return Result(
        *where, kills, checked.sent, checked.effects, checked.lost, checked.doubled, unpassed,
        checked.wrong,
    )  # fmt: skip


class Results:
    """All lines of a run, together with those that an earlier run left and this one does not repeat."""

    def __init__(self, path: Path = FILE) -> None:
        self._path = path
        self._lines: dict[tuple[str, str, str, str], Result] = {}
        self.about: dict[str, str] = {}

    def load(self) -> None:
        if not self._path.exists():
            return
        read = json.loads(self._path.read_text())
        self.about = read["about"]
        for row in read["results"]:
            where, figures, (wrong, points) = row[:3], row[3:-2], row[-2:]
            for point in points:
                values = [*where, point, *figures, tuple(wrong)]
                self.add(Result(*values))

    def forget(self, broker: str, database: str, path: str) -> None:
        """A sweep begins anew: points that are passed no more disappear."""
        self._lines = {
            key: line for key, line in self._lines.items() if key[:3] != (broker, database, path)
        }

    def add(self, added: Result) -> None:
        self._lines[added.key] = added

    def save(self) -> None:
        """One line for each sweep and what became of its points: most became the same."""
        alike: dict[tuple[Any, ...], list[str]] = {}
        for each in self:
            broker, database, path, point, *figures = astuple(each)
            alike.setdefault((broker, database, path, *figures), []).append(point)
        columns = [field.name for field in fields(Result) if field.name != "point"]
        rows = [json.dumps([*figures, points]) for figures, points in alike.items()]
        self._path.parent.mkdir(exist_ok=True)
        body = ",\n".join(rows)
        self._path.write_text(
            f'{{"about": {json.dumps(self.about, indent=1)},\n"columns": {json.dumps([*columns, "points"])},\n'
            f'"results": [\n{body}\n]}}\n'
        )

    def __iter__(self) -> Iterator[Result]:
        return iter(sorted(self._lines.values(), key=lambda each: each.key))

    def of(self, *paths: str) -> Sequence[Result]:
        return [each for each in self if each.path in paths]
