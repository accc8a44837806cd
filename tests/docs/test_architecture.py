"""Every file and every name on the page of the architecture exists."""

from __future__ import annotations

import ast
import re

from tests.docs.pages import ROOT

PAGE = (ROOT / "docs/architecture.md").read_text()
SOURCE = ROOT / "src/txbox"
_FILE = re.compile(r"\b((?:[a-z_]+/)*[a-z_]+\.(?:py|sql))\b")
_NAMED = re.compile(r"`((?:[a-z_]+/)*[a-z_]+\.py)` \(((?:`\w+`(?:, )?)+)\)")


def _defined(file: str) -> set[str]:
    tree = ast.parse((SOURCE / file).read_text())
    kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return {node.name for node in ast.walk(tree) if isinstance(node, kinds)}


def test_every_file_exists() -> None:
    files = set(_FILE.findall(PAGE))
    assert len(files) > 25
    folders = {file: ROOT if file.startswith("tests/") else SOURCE for file in files}
    assert [file for file in sorted(files) if not (folders[file] / file).is_file()] == []


def test_every_name_is_defined_where_the_page_says() -> None:
    named = _NAMED.findall(PAGE)
    assert len(named) > 10
    missing = [
        f"{file}: {name}"
        for file, names in named
        for name in re.findall(r"\w+", names)
        if name not in _defined(file)
    ]
    assert missing == []


def test_the_picture_has_every_package() -> None:
    picture = PAGE.partition("```mermaid")[2].partition("```")[0]
    packages = {path.name for path in SOURCE.iterdir() if (path / "__init__.py").is_file()}
    assert {name for name in packages if f"{name}/" not in picture} == {"demo"}
