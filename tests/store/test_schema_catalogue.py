"""What the migrations are read to make is what a fresh database has: no more, and no less."""

from __future__ import annotations

from typing import Any

import pytest

from txbox import App
from txbox.session import Session, blocking
from txbox.store import schema
from txbox.store.dialect import dialect
from txbox.store.schema import Catalogue

pytestmark = pytest.mark.every_database


def _read(app: App) -> tuple[Catalogue, list[tuple[str, str]]]:
    async def read(db: Session) -> Any:
        await db.begin()
        found = await schema.catalogue(db, dialect(app.store.dialect.name))
        await db.commit()
        return found

    assert app.database.sync is not None
    db = Session(app.database.sync)
    try:
        found: tuple[Catalogue, list[tuple[str, str]]] = blocking(read(db))
        return found
    finally:
        db.close()


def test_a_fresh_database_has_what_the_migrations_are_read_to_make(database_url: str) -> None:
    with App(database_url) as app:
        found, invalid = _read(app)
    wanted = schema.expected(app.store.dialect.name)
    assert invalid == []
    assert set(found.columns) == set(wanted.columns)
    # of a view the columns are not read
    assert {name: found.columns[name] for name, columns in wanted.columns.items() if columns} == {
        name: columns for name, columns in wanted.columns.items() if columns
    }
    assert found.indexes == {name: kept for name, kept in wanted.indexes.items() if kept}
    assert {name: found.functions[name].strip() for name in wanted.functions} == {
        name: text.strip() for name, text in wanted.functions.items()
    }


@pytest.mark.parametrize("kind", ["uuid7", "hash"])
def test_a_partitioned_inbox_lacks_nothing(new_database: Any, kind: Any) -> None:
    with App(new_database("postgresql", schema=False)) as app:
        app.init(partition=kind)
        found, invalid = _read(app)
    wanted = schema.expected("postgresql")
    assert (invalid, schema.missing(wanted, found), schema.changed(wanted, found)) == (
        [],
        [],
        [],
    )
