"""Names say what a thing is: the words that once stood for anything are not used again."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# a variable is called after its noun: row, message, dialect; a type after what the field calls it
RETIRED = frozenset(
    {
        "own", "thing", "stuff", "Ran", "Settled", "Endings", "Pace", "Paces", "Way", "Course",
    }
)  # fmt: skip
#: Words with many meanings, and how many names of src still use each: the number may only sink. The JSON keys `found`,
#: `held`, `held_for` and `left` are published, and stay.
OVERLOADED = {
    "found": 126,
    "held": 5,
    "hold": 0,
    "left": 35,
    "look": 27,
    "place": 51,
    "taken": 4,
    "told": 7,
    "asked": 186,
    "given": 43,
}
# in the name of a file or a class these say nothing of what it does
EMPTY = ("manager", "helper", "util", "common", "service", "factory", "usecase")
FILES = sorted(
    path for folder in ("src", "tests", "benchmarks", "examples") for path in (ROOT / folder).rglob("*.py")
    if ".venv" not in path.parts and "node_modules" not in path.parts
)  # fmt: skip


def _names(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Every name that is given, in f-strings too, with its line."""
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name) | ast.arg(arg=name) | ast.Attribute(attr=name):
                yield name, node.lineno
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name):
                yield name, node.lineno
            case ast.AsyncFunctionDef(name=name) | ast.MatchAs(name=str(name)):
                yield name, node.lineno
            case ast.ExceptHandler(name=str(name)) | ast.alias(asname=str(name)):
                yield name, node.lineno


def test_the_check_sees_a_name_wherever_it_is_given() -> None:
    source = (
        "def f(own): pass\ntext = f'{own}'\nfor own in x: pass\nlambda own: 1\nimport x as own\n"
    )
    assert {line for name, line in _names(ast.parse(source)) if name == "own"} == {1, 2, 3, 4, 5}


@pytest.mark.parametrize("folder", ["src", "tests", "benchmarks", "examples"])
def test_no_retired_name_is_used(folder: str) -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in FILES
        if path.is_relative_to(ROOT / folder)
        for name, line in _names(ast.parse(path.read_text()))
        if name in RETIRED
    ]
    assert not found, "say the noun: " + ", ".join(found)


def test_overloaded_names_only_become_fewer() -> None:
    """Lower the number with each that you rename; `house` counts the words in sentences, too."""
    counts = Counter(
        name
        for path in FILES
        if path.is_relative_to(ROOT / "src")
        for name, _ in _names(ast.parse(path.read_text()))
        if name in OVERLOADED
    )
    more = {name: count for name, count in counts.items() if count > OVERLOADED[name]}
    assert not more, f"say the noun instead: {more}, at most {OVERLOADED}"


def test_no_file_or_class_has_an_empty_name() -> None:
    found = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in FILES
        if path.is_relative_to(ROOT / "src")
        for name in [
            path.stem,
            *(node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ClassDef)),
        ]
        if any(word in name.lower() for word in EMPTY)
    ]  # fmt: skip
    assert not found
