"""Two versions of the tables that nobody has released, to see what a release does with others than its own."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.docs.pages import ROOT
from txbox.store import schema as tables

SOURCE = ROOT / "src" / "txbox"

#: The versions, and the oldest whose releases can work with the tables of each.
NEXT, LAST = tables.VERSION + 1, tables.VERSION + 2
COMPATIBLE_FROM = {NEXT: tables.VERSION, LAST: NEXT}

_NEXT = """
-- a comment that says 'CREATE TABLE txbox_none (' is none
CREATE TABLE txbox_more (
    id    integer NOT NULL,
    topic varchar(40)
);
ALTER TABLE txbox_job ADD COLUMN note varchar(40);
CREATE INDEX txbox_job_note ON txbox_job (note);
"""
_LAST = """
[drop]
CREATE INDEX txbox_more_id ON txbox_more (id);
"""
_DROP = {"mysql": "ALTER TABLE txbox_job DROP KEY txbox_job_note;"}


def add_migrations(folder: Path) -> None:
    """Write the migrations of both versions beside those that a directory has."""
    for dialect in ("postgresql", "mysql", "sqlite"):
        dropped = _LAST.replace("[drop]", _DROP.get(dialect, "DROP INDEX txbox_job_note;"))
        for version, text in ((NEXT, _NEXT), (LAST, dropped)):
            (folder / dialect / f"{version:04}_invented.sql").write_text(
                f"{text}INSERT INTO txbox_schema (version, compatible_from)"
                f" VALUES ({version}, {COMPATIBLE_FROM[version]});\n"
            )


@contextmanager
def released(directory: Path, version: int, oldest: int) -> Iterator[None]:
    """Make this release one that writes an invented version, and works with versions from `oldest` on."""
    package = directory / "package"
    shutil.copytree(SOURCE / "store" / "migrations", package / "migrations")
    add_migrations(package / "migrations")
    tables.expected.cache_clear()
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tables, "files", lambda _package: package)
            patch.setattr(tables, "VERSION", version)
            patch.setattr(tables, "OLDEST_USABLE", oldest)
            yield
    finally:
        tables.expected.cache_clear()
