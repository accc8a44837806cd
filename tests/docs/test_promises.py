"""Every promise names what keeps it and a test that fails without it; who cites a promise cites one of them."""

from __future__ import annotations

import ast
import re

from tests.docs.pages import ROOT

PAGE = (ROOT / "docs/reliability/promises.md").read_text()
_ROW = re.compile(r"^\| (\d+\.\d+) \| (.+) \| (.+) \| (.+) \|$", re.MULTILINE)
_TEST = re.compile(r"`((?:tests|src/txbox/testing)/[a-z_/0-9]+\.py)::(test_\w+)`")
_FILE = re.compile(r"`([a-z_/]+\.(?:py|sql))`")
_CITED = re.compile(r"\b[Pp]romises? (\d+\.\d+(?:(?:, | and | to |, and )\d+\.\d+)*)")


def _tests(file: str) -> set[str]:
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    tree = ast.parse((ROOT / file).read_text())
    return {node.name for node in ast.walk(tree) if isinstance(node, kinds)}


def test_every_promise_has_its_files_and_its_tests() -> None:
    rows = _ROW.findall(PAGE)
    assert len(rows) > 40
    for number, _, kept_by, tests in rows:
        named = _TEST.findall(tests)
        assert named, number
        assert [name for file, name in named if name not in _tests(file)] == [], number
        files = _FILE.findall(kept_by)
        assert files, number
        assert [file for file in files if not (ROOT / "src/txbox" / file).is_file()] == [], number


def test_what_is_cited_is_promised() -> None:
    numbers = {number for number, *_ in _ROW.findall(PAGE)}
    cited: dict[str, str] = {}
    for folder, kind in (("src", "*.py"), ("tests", "*.py"), ("docs", "*.md")):
        for path in (ROOT / folder).rglob(kind):
            for numbers_cited in _CITED.findall(path.read_text()):
                cited.update(dict.fromkeys(re.findall(r"\d+\.\d+", numbers_cited), str(path)))
    assert len(cited) > 20
    assert {number: path for number, path in cited.items() if number not in numbers} == {}
