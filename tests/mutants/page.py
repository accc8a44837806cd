"""The page that shows what caught which mutant, and the file beside it with a line for each."""

from __future__ import annotations

import json
import subprocess
from collections import defaultdict
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tests.mutants.commands import OF_SOURCE, WAYS, Command, Verdict
from tests.mutants.table import MUTANTS
from tests.support.servers import ROOT
from tests.support.servers.process import base_directory, file_lock

FILE = ROOT / "docs" / "reliability" / "mutants.json"
PAGE = FILE.with_suffix(".md")
MARK = "<!-- written by `make mutants` from mutants.json: do not edit below -->\n"
_BY_CHARS = 120
Row = Mapping[str, Any]
#: mutant → date, commit, and way → [outcome, seconds, by]
Rows = Mapping[str, Row]


def read(file: Path = FILE) -> dict[str, Row]:
    rows: list[Row] = json.loads(file.read_text()) if file.exists() else []
    return {row["mutant"]: row for row in rows}


def keep(name: str, way: str, verdict: Verdict, file: Path = FILE, page: Path = PAGE) -> None:
    """Write a verdict into the file, in place of an earlier one, and the page anew. Several processes may do so."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short=12", "HEAD"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.strip()  # fmt: skip
    with file_lock(base_directory() / "mutants"):
        rows = read(file)
        told = [verdict.outcome, round(verdict.seconds, 1), verdict.by[:_BY_CHARS]]
        fresh = {"mutant": name, "date": f"{datetime.now(UTC):%Y-%m-%d}", "commit": commit, way: told}  # fmt: skip
        rows[name] = {**rows.get(name, {}), **fresh}
        lines = [json.dumps(rows[name], ensure_ascii=False) for name in MUTANTS if name in rows]
        file.write_text("[\n" + ",\n".join(lines) + "\n]\n")
        write(rows, page)


def write(rows: Rows, page: Path = PAGE) -> None:
    head = page.read_text().partition(MARK)[0]
    page.write_text(head + MARK + "\n" + "\n".join(tables(rows)) + "\n")


def outcome_of(rows: Rows, name: str, way: str) -> str | None:
    """`caught` or `survived`; None if this was not run, or cannot be."""
    verdict = rows.get(name, {}).get(way)
    if verdict is None or isinstance(MUTANTS[name].way(way), str):
        return None
    return str(verdict[0])


def is_caught(rows: Rows, name: str) -> bool:
    """Whether anything that looks at the source has noticed it."""
    return any(outcome_of(rows, name, way) == "caught" for way in OF_SOURCE)


def tables(rows: Rows) -> Iterator[str]:
    caught = [name for name in MUTANTS if is_caught(rows, name)]
    yield f"{len(MUTANTS)} mutants, of which {len(caught)} are caught in the source so far."
    yield ""
    yield "| way | can see | run | caught | survived |"
    yield "|---|---|---|---|---|"
    for way in WAYS:
        seen = [name for name, mutant in MUTANTS.items() if not isinstance(mutant.way(way), str)]
        ends = [outcome_of(rows, name, way) for name in seen]
        counts = (len(seen), sum(map(bool, ends)), ends.count("caught"), ends.count("survived"))
        yield f"| {way} | {' | '.join(map(str, counts))} |"
    yield ""
    yield "## What caught which"
    yield ""
    yield f"| mutant | what is wrong with it | {' | '.join(WAYS)} |"
    yield "|---|---|" + "---|" * len(WAYS)
    for name, mutant in MUTANTS.items():
        cells = " | ".join(_cell(rows, name, way) for way in WAYS)
        yield f"| `{name}` | {mutant.does} | {cells} |"
    yield ""
    yield "## What should catch it"
    yield ""
    yield "| mutant | model | tests | last run |"
    yield "|---|---|---|---|"
    for name, mutant in MUTANTS.items():
        model = "-" if isinstance(mutant.model, str) else f"`{mutant.model.name}`"
        row = rows.get(name)
        last = "never" if row is None else f"{row['date']}, commit `{row['commit']}`"
        yield f"| `{name}` | {model} | {_files(mutant.tests)} | {last} |"
    yield ""
    yield "## What a way cannot see"
    for way in WAYS:
        reasons: dict[str, list[str]] = defaultdict(list)
        for name, mutant in MUTANTS.items():
            how = mutant.way(way)
            if isinstance(how, str):
                reasons[how].append(f"`{name}`")
        if reasons:
            yield ""
            yield f"*{way}*"
            yield ""
        for why, names in reasons.items():
            yield f"- {why}: {', '.join(names)}"


def _cell(rows: Rows, name: str, way: str) -> str:
    if isinstance(MUTANTS[name].way(way), str):
        return "-"
    verdict = rows.get(name, {}).get(way)
    if verdict is None:
        return "not run"
    outcome, seconds, by = verdict
    # tests and models have their names below; of the others this is what they found
    why = f": {by}" if by and way == "chaos" else ""
    return f"**{outcome}** {seconds:.0f} s" if outcome == "survived" else f"{seconds:.0f} s{why}"


def _files(command: Command) -> str:
    return ", ".join(f"`{word}`" for word in command.words if word.startswith("tests/"))
