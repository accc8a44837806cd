"""The table of integrations is current: versions of uv.lock, files that exist, nothing left out."""

from __future__ import annotations

import re
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.docs.pages import ROOT, page

PAGE = page("docs/reference/integrations.md")
#: The packages that bring no framework, or are what the others are made of.
_SHARED = {"once", "requests", "__init__"}
#: Integrations with a module of another name: FastAPI, Starlette and Litestar share one.
_MODULES = {
    "fastapi": "starlette",
    "litestar": "starlette",
    "pydantic-settings": "settings",
    "aws lambda": "aws_lambda",
}


def _rows() -> dict[str, list[str]]:
    """The cells of each row, by what it is for."""
    cells = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in PAGE.text.splitlines()
        if line.startswith("| [")
    ]
    return {re.sub(r"\[([^\]]*)\].*", r"\1", row[0]).lower(): row for row in cells}


ROWS = _rows()


def test_every_integration_has_a_row() -> None:
    modules = {path.stem for path in (ROOT / "src/txbox/integrations").iterdir()}
    listed = {_MODULES.get(name, name) for name in ROWS}
    assert {name for name in modules if not name.startswith("__")} - _SHARED == listed - {
        "sqlalchemy"  # a connection, for which there is nothing to integrate
    }


@pytest.mark.parametrize("name", ROWS)
def test_a_row_is_what_the_tests_run_with(name: str) -> None:
    _, extra, tested, tests, example = ROWS[name]
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    assert not extra or extra.strip("`") in extras
    if tested:
        package, _, stated = tested.partition(" ")
        locked = {
            each["version"]
            for each in tomllib.loads((ROOT / "uv.lock").read_text())["package"]
            if each["name"] == package
        }
        assert stated in locked, f"{name}: uv.lock has {package} {' and '.join(sorted(locked))}"
        # a package with several locked versions runs in the one for this Python
        assert len(locked) > 1 or version(package) == stated, (
            f"{name}: `make dev` installs {stated}"
        )
    module = _MODULES.get(name, name)
    assert re.search(rf"\b{module}\b", _linked(tests).read_text()), f"{tests} does not use {module}"
    assert not example or _linked(example).is_file()


def _linked(cell: str) -> Path:
    links: list[str] = re.findall(r"\]\(([^)]+)\)", cell)
    assert len(links) == 1, cell
    return PAGE.path.parent / links[0]
