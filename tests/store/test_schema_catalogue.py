"""What the migrations are read to make is what a fresh database has: no more, and no less."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.databases import NewDatabase, Raw
from tests.support.versions import LAST, NEXT, released
from txbox import App
from txbox.errors import Fault, StoreError
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


def _compare(url: str) -> Catalogue:
    """Compare a database with what its migrations are read to make; returns what it has."""
    with App(url) as app:
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
    return found


def test_a_fresh_database_has_what_the_migrations_are_read_to_make(database_url: str) -> None:
    _compare(database_url)


def test_later_versions_are_read_as_they_change_the_tables(
    empty_database_url: str, tmp_path: Path
) -> None:
    """A migration adds a table, a column and an index, and the one behind it drops and adds an index."""
    name, indexes = "", []
    for version in (NEXT, LAST):
        with released(tmp_path / str(version), version, oldest=NEXT):
            with App(empty_database_url) as app:
                app.init()
                name = app.store.dialect.name
            has = _compare(empty_database_url)
            assert (has.columns["txbox_more"], "note" in has.columns["txbox_job"]) == (
                {"id", "topic"},
                True,
            )
            indexes += [{"txbox_job_note", "txbox_more_id"} & set().union(*has.indexes.values())]
    assert indexes == [{"txbox_job_note"}, {"txbox_more_id"}]
    assert "txbox_more" not in schema.expected(name).columns


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


@pytest.mark.parametrize("product", ["mysql", "mariadb"])
def test_tables_are_not_changed_beside_another_process_that_changes_them(
    new_database: NewDatabase,
    raw: Callable[[str], Raw],
    product: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The lock is a function, which says in its answer that it was not free in time."""
    url = new_database(product, schema=False)
    with App(url) as app:
        queries: Any = app.store.dialect.queries
        at_once = queries["schema_lock"].replace("3600", "0")
        monkeypatch.setitem(queries, "schema_lock", at_once)
        other = raw(url)
        assert other.value(at_once) == 1
        with pytest.raises(StoreError, match="run `txbox init` again") as refused:
            app.init()
        assert refused.value.fault is Fault.LOCK_TIMEOUT
        assert other.rows("SHOW TABLES") == []
        assert other.value(queries["schema_unlock"]) == 1
        app.init()
