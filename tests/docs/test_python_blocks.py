"""Every Python block of the documentation runs, page by page, in a process of its own, on SQLite."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import Page, all_pages

# what a page may take for granted: a shop with its tables, in the working directory
_SHOP = """
import sqlite3
from txbox import App
with App("sqlite:///shop.db") as app: app.init()
with sqlite3.connect("shop.db") as database:
    database.execute("CREATE TABLE account (id INTEGER PRIMARY KEY, balance INTEGER NOT NULL)")
    database.execute("CREATE TABLE orders (number INTEGER PRIMARY KEY, account INTEGER, amount INTEGER)")
    database.execute("INSERT INTO account VALUES (7, 100)")
database.close()
"""
_DJANGO = """
import django
from django.conf import settings
settings.configure(
    DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": "shop.db"}},
    USE_TZ=True, DEFAULT_AUTO_FIELD="django.db.models.BigAutoField", INSTALLED_APPS=[],
)
django.setup()
"""


def _python(page: Page) -> str:
    """The blocks as one script, each on its own lines, so that a traceback points into the page."""
    script = ""
    for block in page.blocks():
        if block.language == "python":
            script += "\n" * (block.line - script.count("\n")) + block.text
    return script


# several files, which test_tutorial.py saves under their names and runs in the page's order
_TYPED = "docs/tutorial.md"
_PAGES = [page for page in all_pages() if _python(page) and page.name != _TYPED]


@pytest.mark.parametrize("page", _PAGES, ids=lambda page: page.name)
def test_python_blocks_run(page: Page, tmp_path: Path) -> None:
    script = tmp_path / f"page_{page.path.stem.replace('-', '_')}.py"
    script.write_text(_python(page))
    setup = _SHOP + (_DJANGO if "django" in page.path.name else "")
    run = f"import runpy; runpy.run_path({script.name!r}, run_name='page')"
    done = subprocess.run(
        [sys.executable, "-X", "dev", "-W", "ignore::ResourceWarning", "-c", setup + run],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, f"{page.name} (line numbers are those of the page):\n{done.stderr}"


def test_blocks_say_their_language() -> None:
    known = {"python", "sh", "sql", "text", "mermaid", "json", "yaml", "ini", ""}
    for page in all_pages():
        for block in page.blocks():
            assert block.language in known, f"{page.name}:{block.line} is {block.language!r}"
            if block.language == "":
                assert "\nimport " not in f"\n{block.text}", (
                    f"{page.name}:{block.line} looks like Python"
                )
