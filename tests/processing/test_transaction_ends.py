"""How a transaction ends, by the step that failed and the number of the error (promises 2.6, 2.8, 2.14)."""

from __future__ import annotations

import pytest

from txbox.connections.base import refused_commit, store_error
from txbox.errors import StoreError
from txbox.processing.transaction import End, end_of_commit, end_of_handler
from txbox.session import Raised
from txbox.store.dialect import dialect

AWAY = {
    "postgresql": ("25006", "08P01", "53100", "57P01", "57P04"),
    "mysql": ("1047", "1053", "1290", "1792", "1836", "3032", "3100", "4031"),
}
CONFLICTS = {"postgresql": ("40001", "40P01"), "mysql": ("1180", "1213", "3101")}


def error(name: str, code: str | None) -> StoreError:
    return store_error(Exception(), dialect(name), code=code)


def codes(table: dict[str, tuple[str, ...]]) -> pytest.MarkDecorator:
    pairs = [(name, code) for name, known in table.items() for code in known]
    return pytest.mark.parametrize(("name", "code"), pairs)


@codes(AWAY)
def test_trouble_of_the_server_is_nobodys_attempt(name: str, code: str) -> None:
    found = error(name, code)
    # of a handler's statement, while the connection looks alive
    assert end_of_handler(Raised(found, found, lost=False), together=False) is End.LOST
    assert end_of_commit(found) is End.LOST
    # of COMMIT itself
    found.definite = refused_commit(found)
    assert end_of_commit(found) is End.AMBIGUOUS


@codes(CONFLICTS)
def test_a_conflict_at_commit_has_kept_nothing_and_is_tried_again(name: str, code: str) -> None:
    found = error(name, code)
    found.definite = refused_commit(found)
    assert end_of_commit(found) is End.CONFLICT


def test_a_savepoint_that_only_the_server_knows_is_a_conflict_with_another_node() -> None:
    assert end_of_commit(error("mysql", "1030")) is End.CONFLICT
    # one that nobody knows was left by the handler
    assert end_of_commit(error("mysql", "1305")) is End.BROKEN


@pytest.mark.parametrize(
    ("name", "code"), [("mysql", "2013"), ("mysql", "2003"), ("postgresql", None)]
)
def test_what_a_client_says_may_be_about_another_connection(name: str, code: str | None) -> None:
    found = store_error(Exception(), dialect(name), code=code, lost=True)
    assert end_of_handler(Raised(found, found, lost=True), together=False) is End.LOST
    assert end_of_handler(Raised(found, found, lost=False), together=False) is End.RAISED
