"""Every Python block of the documentation runs, page by page, in a process of its own, on the database it names."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import ROOT, Page, all_pages
from tests.support.databases import NewDatabase, Raw
from tests.support.django_project import database
from tests.support.waiting import DEADLINE_S
from txbox import App

# What a page may take for granted, unless it makes it itself: a shop with its tables, at the URL that its blocks name.
_TABLES = (
    "CREATE TABLE account (id INTEGER PRIMARY KEY, balance INTEGER NOT NULL)",
    "CREATE TABLE orders (number {serial} PRIMARY KEY, account INTEGER, amount INTEGER)",
    "INSERT INTO account VALUES (7, 100)",
)
_MAKES_TABLES = "CREATE TABLE IF NOT EXISTS account"
_SERVER = "://localhost/shop"
_DJANGO = """
import django
from django.conf import settings
settings.configure(
    DATABASES={{"default": {database!r}}},
    USE_TZ=True, DEFAULT_AUTO_FIELD="django.db.models.BigAutoField", INSTALLED_APPS=[],
)
django.setup()
"""
# pages whose blocks are parts of an example's files, with the test that runs these
_PARTS = {
    "docs/howto/alembic.md": "examples/alembic_shop",  # tests/integrations/test_alembic.py
    "docs/howto/write-a-source.md": "examples",  # tests/testing/test_brokers.py
}


def _python(page: Page) -> str:
    """The blocks as one script, each on its own lines, so that a traceback points into the page."""
    script = ""
    for block in page.blocks():
        if block.language == "python":
            script += "\n" * (block.line - script.count("\n")) + block.text
    return script


# several files, which test_tutorial.py saves under their names and runs in the page's order
_TYPED = "docs/tutorial.md"
_PAGES = [page for page in all_pages() if _python(page) and page.name not in {_TYPED, *_PARTS}]


@pytest.mark.parametrize("page", _PAGES, ids=lambda page: page.name)
def test_python_blocks_run(page: Page, tmp_path: Path, new_database: NewDatabase) -> None:
    text, setup = _python(page), ""
    if _SERVER in text or page.name == "docs/howto/django.md":
        url = new_database("postgresql")
        if _MAKES_TABLES not in text:
            _shop(url)
        text = text.replace(_SERVER, url.removeprefix("postgresql"))
        if page.name == "docs/howto/django.md":
            setup = _DJANGO.format(database=database(url))
    else:
        with App(f"sqlite:///{tmp_path / 'shop.db'}") as app:
            app.init()
        _shop(f"sqlite:///{tmp_path / 'shop.db'}")
    script = tmp_path / f"page_{page.path.stem.replace('-', '_')}.py"
    script.write_text(text)
    run = f"import runpy; runpy.run_path({script.name!r}, run_name='page')"
    done = subprocess.run(
        [sys.executable, "-X", "dev", "-W", "ignore::ResourceWarning", "-c", setup + run],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, f"{page.name} (line numbers are those of the page):\n{done.stderr}"


@pytest.mark.parametrize("name", _PARTS)
def test_blocks_are_parts_of_the_example(name: str) -> None:
    files = [path.read_text() for path in (ROOT / _PARTS[name]).rglob("*.py")]
    blocks = [block for block in Page(ROOT / name).blocks() if block.language == "python"]
    assert blocks
    for block in blocks:
        assert any(block.text in text for text in files), f"{name}:{block.line} is in no file"


def _shop(url: str) -> None:
    with Raw(url) as raw:
        for statement in _TABLES:
            raw.execute(
                statement.format(serial="serial" if raw.product == "postgresql" else "INTEGER")
            )


def test_blocks_say_their_language() -> None:
    known = {"python", "sh", "sql", "text", "mermaid", "json", "yaml", "ini", ""}
    for page in all_pages():
        for block in page.blocks():
            assert block.language in known, f"{page.name}:{block.line} is {block.language!r}"
            if block.language == "":
                assert "\nimport " not in f"\n{block.text}", (
                    f"{page.name}:{block.line} looks like Python"
                )
