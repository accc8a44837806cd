"""The failure catalogue, from catalogue.txt: `python -m tests.docs.catalogue` writes its page."""

from __future__ import annotations

import ast
from functools import cache
from typing import NamedTuple

from tests.docs.pages import ROOT

PAGE = ROOT / "docs/reliability/catalogue.md"
_FAULTS = ROOT / "tests/docs/catalogue.txt"

_HEAD = """# The failure catalogue

Eighty things that go wrong around an inbox, what must become of the message, and the tests that see it. A fault without
a test says why it has none. [Promises](promises.md) say the same by what is promised, [the sweep](crashes.md) and
[the models](models.md) by the step.

<!-- written by `python -m tests.docs.catalogue`: do not edit -->
"""


class Fault(NamedTuple):
    """A row of the catalogue."""

    number: int
    heading: str
    name: str
    outcome: str
    tests: tuple[str, ...]
    why_none: str


def faults() -> list[Fault]:
    rows: list[Fault] = []
    heading = ""
    for line in _FAULTS.read_text().splitlines():
        if line.startswith("== "):
            heading = line.removeprefix("== ")
        if line.count("|") != 2 or line.startswith("#"):
            continue
        name, outcome, tests = (part.strip() for part in line.split("|"))
        seen = tuple(tests.split()) if outcome else ()
        rows.append(Fault(len(rows) + 1, heading, name, outcome, seen, "" if outcome else tests))
    return rows


def _path(test: str) -> str:
    """From the root: the suites of the brokers are in the source."""
    return test if test.startswith("src/") else f"tests/{test}"


@cache
def _tests_in(file: str) -> frozenset[str]:
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    path = ROOT / _path(file)
    if not path.is_file():
        return frozenset()
    return frozenset(
        node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, kinds)
    )


def missing(fault: Fault) -> list[str]:
    """The tests of a fault that do not exist."""
    return [
        test
        for test in fault.tests
        if test.partition("::")[2] not in _tests_in(test.partition("::")[0])
    ]


def page() -> str:
    parts, heading = [_HEAD], ""
    for fault in faults():
        if fault.heading != heading:
            heading = fault.heading
            parts.append(
                f"\n## {heading}\n\n| # | fault | becomes | status | tests |\n|---|---|---|---|---|\n"
            )
        tests = ", ".join(f"`{_path(test)}`" for test in fault.tests) or fault.why_none
        status = "tested" if fault.tests else "not detectable"
        parts.append(
            f"| {fault.number} | {fault.name} | {fault.outcome or '-'} | {status} | {tests} |\n"
        )
    return "".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page())
