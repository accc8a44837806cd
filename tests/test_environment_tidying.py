"""A database goes from test to test only when the last one has changed nothing but rows."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from tests.support import tidying
from tests.support.databases import BY_NAME, Database, Raw, names, require
from tests.support.shop import opened, paid

_CHANGES = {
    "a column": "ALTER TABLE txbox_inbox ADD COLUMN more integer",
    "an index": "CREATE INDEX more ON txbox_inbox (topic)",
    "a table away": "DROP TABLE txbox_audit",
    "the version": "DELETE FROM txbox_schema WHERE version = 1",
    "a view": "CREATE VIEW more AS SELECT 1 AS one",
}
_OF_POSTGRESQL = {
    "a right": "GRANT SELECT ON txbox_inbox TO PUBLIC",
    "the guard off": "ALTER TABLE txbox_inbox DISABLE TRIGGER ALL",
    "a function": "CREATE FUNCTION more() RETURNS int LANGUAGE sql AS 'SELECT 1'",
    "statistics": "ANALYZE txbox_schema",
    "a schema": "CREATE SCHEMA more",
    "a comment": "COMMENT ON TABLE txbox_inbox IS 'more'",
    "a setting": "ALTER TABLE txbox_inbox SET (fillfactor = 50)",
}
_SERVERS = names("postgresql", "mysql")
_CASES = [(name, sql) for name in _SERVERS for sql in _CHANGES.values()] + [
    (name, sql) for name in names("postgresql") for sql in _OF_POSTGRESQL.values()
]
_IDS = [f"{name}-{change}" for name in _SERVERS for change in _CHANGES] + [
    f"{name}-{change}" for name in names("postgresql") for change in _OF_POSTGRESQL
]


def _of(name: str) -> Database:
    require(BY_NAME[name].missing())
    return BY_NAME[name]


def _given_out_again(database: Database, url: str, tmp_path: Path) -> bool:
    """Whether the next test would get the same one."""
    database.give_back(url)
    following = database.take(tmp_path)
    database.drop(following)
    return following == url


@pytest.mark.parametrize("name", _SERVERS)
def test_what_changed_rows_alone_is_given_out_again_without_them(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # a busy machine sees late that the clients have gone
    monkeypatch.setattr(tidying, "LEAVING_S", 60.0)
    database = _of(name)
    first, url = database.take(tmp_path), database.take(tmp_path)
    database.drop(first)
    with opened(url) as shop:  # it makes a table, too
        shop.handler()
        shop.deliver(paid("a"))
        # a table without a counter that would show it
        shop.raw.execute("INSERT INTO txbox_pause (consumer, actor) VALUES ('a', 'ann')")
    database.give_back(url)
    assert database.take(tmp_path) == url
    try:
        with Raw(url) as raw, opened(url) as shop:
            assert raw.value("SELECT count(*) FROM txbox_inbox") == 0
            assert raw.value("SELECT count(*) FROM txbox_pause") == 0
            shop.handler()
            shop.deliver(paid("b"))
            assert raw.value("SELECT arrival FROM txbox_inbox") == 1
    finally:
        database.drop(url)


@pytest.mark.parametrize(("name", "sql"), _CASES, ids=_IDS)
def test_what_changed_anything_else_is_dropped(name: str, sql: str, tmp_path: Path) -> None:
    database = _of(name)
    url = database.take(tmp_path)
    with Raw(url) as raw:
        raw.execute(sql)
    assert not _given_out_again(database, url, tmp_path)


@pytest.mark.parametrize("name", _SERVERS)
def test_what_somebody_is_connected_to_is_dropped(name: str, tmp_path: Path) -> None:
    database = _of(name)
    url = database.take(tmp_path)
    with Raw(url):
        assert not _given_out_again(database, url, tmp_path)


def test_what_a_thread_of_its_test_may_write_to_is_dropped(tmp_path: Path) -> None:
    database = _of("postgresql")
    url, end = database.take(tmp_path), threading.Event()
    thread = threading.Thread(target=end.wait)
    thread.start()
    try:
        assert not _given_out_again(database, url, tmp_path)
    finally:
        end.set()
        thread.join()
