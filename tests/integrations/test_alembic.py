"""The example's migrations, online and as SQL; autogenerate beside the tables of txbox."""

from __future__ import annotations

import io
import sqlite3
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.operations import Operations
from sqlalchemy import MetaData, create_engine

from tests.docs.pages import ROOT
from tests.support.databases import NewDatabase, Raw
from txbox import App, ConfigurationError
from txbox.integrations.alembic import include_name, include_object
from txbox.store import schema

EXAMPLE = ROOT / "examples" / "alembic_shop"


def _config(url: str, monkeypatch: pytest.MonkeyPatch, output: io.StringIO | None = None) -> Config:
    monkeypatch.setenv("SHOP_URL", url)
    monkeypatch.syspath_prepend(str(EXAMPLE))
    return Config(str(EXAMPLE / "alembic.ini"), output_buffer=output)


def _upgrade(context: MigrationContext, version: int) -> None:
    operations: Any = Operations(context)
    operations.txbox_upgrade(version)


def _sqlalchemy(url: str) -> str:
    drivers = {"postgresql": "postgresql+psycopg", "mysql": "mysql+pymysql", "sqlite": "sqlite"}
    scheme, _, rest = url.partition("://")
    return f"{drivers[scheme]}://{rest}"


def test_a_migration_makes_the_tables_and_autogenerate_leaves_them(
    empty_database_url: str, raw: Callable[[str], Raw], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = _config(_sqlalchemy(empty_database_url), monkeypatch)
    command.upgrade(config, "head")
    with App(empty_database_url) as app:
        assert app.init() == (schema.VERSION, schema.VERSION)
    # raises where it would write a migration
    command.check(config)
    command.downgrade(config, "base")
    with raw(empty_database_url) as other:
        assert other.value("SELECT count(*) FROM txbox_inbox") == 0
    # what is there stays as it is
    command.upgrade(config, "head")


def test_without_the_filter_autogenerate_would_drop_them(sqlite_url: str) -> None:
    engine = create_engine(sqlite_url)
    with engine.connect() as connection:
        plain = MigrationContext.configure(connection)
        dropped = {str(change[1]) for change in compare_metadata(plain, MetaData())}
        assert "txbox_inbox" in dropped
        filtered = {"include_name": include_name, "include_object": include_object}
        context = MigrationContext.configure(connection, opts=filtered)
        assert compare_metadata(context, MetaData()) == []
        # tables that somebody has reflected into the metadata are none to be made elsewhere
        reflected = MetaData()
        reflected.reflect(connection)
        with create_engine("sqlite://").connect() as empty:
            context = MigrationContext.configure(empty, opts=filtered)
            assert compare_metadata(context, reflected) == []
    engine.dispose()


def test_filters_of_the_users_own_are_asked_about_the_rest() -> None:
    asked: list[str] = []

    def then(name: str | None, type_: str, parent_names: object) -> bool:
        asked.append(str(name))
        return name != "secret"

    chained = partial(include_name, then=then)
    assert not chained("txbox_inbox", "table", {})
    assert chained("orders", "table", {})
    assert not chained("secret", "table", {})
    assert asked == ["orders", "secret"]


def test_the_sql_makes_the_same_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output, url = io.StringIO(), f"sqlite:///{tmp_path / 'shop.db'}"
    command.upgrade(_config(url, monkeypatch, output), "head", sql=True)
    assert not (tmp_path / "shop.db").exists()
    with closing(sqlite3.connect(tmp_path / "shop.db")) as database:
        database.executescript(output.getvalue())
    with App(url) as app:
        assert app.init() == (schema.VERSION, schema.VERSION)


def test_a_failed_migration_leaves_no_tables(
    new_database: NewDatabase, raw: Callable[[str], Raw]
) -> None:
    url = new_database("postgresql", schema=False)
    engine = create_engine(_sqlalchemy(url))

    def fails() -> None:
        with engine.begin() as connection:
            _upgrade(MigrationContext.configure(connection), schema.VERSION)
            assert connection.exec_driver_sql("SELECT count(*) FROM txbox_inbox").scalar() == 0
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    engine.dispose()
    assert raw(url).value("SELECT to_regclass('txbox_inbox')") is None


def test_a_version_that_nobody_knows_is_refused(sqlite_url: str) -> None:
    engine = create_engine(sqlite_url)
    with engine.connect() as connection, pytest.raises(ConfigurationError, match="upgrade txbox"):
        _upgrade(MigrationContext.configure(connection), schema.VERSION + 1)
    engine.dispose()
