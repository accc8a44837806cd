"""A ledger in an SQLite file that has txbox's tables."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from txbox import App

Rows = Callable[[str], list[Any]]


@pytest.fixture
def database(tmp_path: Path) -> Path:
    path = tmp_path / "shop.db"
    with App(f"sqlite:///{path}") as app:
        app.init()
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE ledger (amount INTEGER)")
    return path


@pytest.fixture
def rows(database: Path) -> Rows:
    def query(sql: str) -> list[Any]:
        with closing(sqlite3.connect(database)) as connection:
            return connection.execute(sql).fetchall()

    return query
