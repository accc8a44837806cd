"""The page that shows the runs, between two marks, and the file beside it that keeps them by seed and pair.

A row of the file may have a `remark`, written by hand: why a run was red, where that was mended, how to run it again.
A run with the same seed and pair takes the row's place.
"""

from __future__ import annotations

import json
import subprocess
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tests.chaos.harness import Result
from tests.chaos.nemesis import KINDS
from tests.support.servers import ROOT

FILE = ROOT / "docs" / "reliability" / "chaos.json"
PAGE = FILE.with_suffix(".md")
BEGIN = "<!-- written by `make chaos ARGS=--write-page` from chaos.json: do not edit -->"
END = "<!-- end of what is written -->"
_SUMMED = (
    "minutes", "faults", "sent", "deliveries", "effects", "dead", "quarantined", "lost", "doubled", "disordered",
)  # fmt: skip
Row = Mapping[str, Any]


def keep(result: Result, file: Path = FILE, page: Path = PAGE) -> None:
    """Write a run into the file, in place of a green one with the same seed and pair, and the page anew.

    What was broken stays, and is explained by a `remark` that is written into the file by hand.
    """
    commit = subprocess.run(
        ["git", "rev-parse", "--short=12", "HEAD"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.strip()  # fmt: skip
    checked = result.checked
    row = {
        "database": result.database, "broker": result.broker, "seed": result.seed, "minutes": result.minutes,
        "date": f"{datetime.now(UTC):%Y-%m-%d}", "commit": commit, "versions": result.versions,
        "kinds": result.faults, "faults": sum(result.faults.values()),
        "sent": checked.sent, "deliveries": checked.deliveries, "effects": checked.effects, "dead": checked.dead,
        "quarantined": checked.quarantined, "lost": checked.lost, "doubled": checked.doubled,
        "disordered": checked.disordered, "wrong": result.wrong,
    }  # fmt: skip
    if result.elle:
        row["elle"] = result.elle
    rows = [kept for kept in read(file) if kept["wrong"] or _place(kept) != _place(row)]
    rows = sorted([*rows, row], key=_place)
    file.write_text("[\n" + ",\n".join(json.dumps(kept) for kept in rows) + "\n]\n")
    write(rows, page)


def write(rows: Sequence[Row], page: Path = PAGE) -> None:
    """Write the page anew from the rows of the file."""
    before, _, rest = page.read_text().partition(BEGIN)
    after = rest.partition(END)[2]
    page.write_text("\n".join([before + BEGIN, "", *tables(rows), "", END + after]))


def read(file: Path = FILE) -> Sequence[Row]:
    rows: Sequence[Row] = json.loads(file.read_text()) if file.exists() else []
    return rows


def _place(row: Row) -> tuple[str, str, int]:
    return row["database"], row["broker"], row["seed"]


def tables(rows: Sequence[Row]) -> Iterator[str]:
    yield "## The runs"
    yield ""
    yield f"| database | broker | seed | {' | '.join(_SUMMED)} | Elle | at the end |"
    yield "|---|---|---|" + "---|" * (len(_SUMMED) + 2)
    for row in rows:
        cells = " | ".join(f"{row[name]:,}" for name in _SUMMED)
        verdict = f"**{len(row['wrong'])} broken**" if row["wrong"] else "all invariants hold"
        elle = row.get("elle", "")
        yield f"| {row['database']} | {row['broker']} | {row['seed']} | {cells} | {elle} | {verdict} |"
    green = [row for row in rows if not row["wrong"]]
    yield f"| **{len(green)} that hold** | | | {_sums(green, '**')} | | |"
    yield f"| **all {len(rows)}** | | | {_sums(rows, '**')} | | |"
    yield ""
    yield "## By database and broker"
    yield ""
    yield f"| | runs | {' | '.join(_SUMMED)} |"
    yield "|---|---|" + "---|" * len(_SUMMED)
    for target in ("database", "broker"):
        for name in sorted({row[target] for row in rows}):
            of_target = [row for row in rows if row[target] == name]
            yield f"| {name} | {len(of_target)} | {_sums(of_target)} |"
    yield ""
    yield "## The faults"
    yield ""
    counts = Counter[str]()
    for row in rows:
        counts.update(row["kinds"])
    yield "| kind | times | what it is |"
    yield "|---|---|---|"
    for name, kind in KINDS.items():
        yield f"| {name} | {counts[name]:,} | {(kind.fault.__doc__ or '').splitlines()[0]} |"
    if broken := [row for row in rows if row["wrong"]]:
        yield ""
        yield "## What broke"
        yield ""
        for row in broken:
            for wrong in row["wrong"]:
                yield f"- {row['database']} and {row['broker']}, seed {row['seed']}: {wrong[:300]}"
            if remark := row.get("remark"):
                yield f"    - {remark}"
    yield ""
    yield "## Versions"
    yield ""
    lines = {f"{row['versions']}: {row['date']}, commit `{row['commit']}`" for row in rows}
    for line in sorted(lines):
        yield f"- {line}"


def _sums(rows: Sequence[Row], mark: str = "") -> str:
    return " | ".join(
        f"{mark}{round(sum(row[name] for row in rows), 1):,}{mark}" for name in _SUMMED
    )
