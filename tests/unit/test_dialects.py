"""The three files of queries say the same: names, parameters, and SQL that no driver misreads."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Mapping

import pytest

from txbox.store.dialect import Style, dialect, native

REFERENCE = "postgresql"
TWINS = ("sqlite", "mysql")
STYLES: tuple[Style, ...] = ("numeric", "format", "qmark", "named")

#: What only PostgreSQL sets inside of a claim: SQLite waits at BEGIN, MySQL in a statement of its own.
SETTINGS = {"lock_timeout_ms", "idle_ms"}
#: Where MySQL needs two statements, they share the parameters of PostgreSQL's one.
SPLIT: Mapping[str, str] = {
    "lease": "lease_take",
    "lease_ordered": "lease_take",
    "lease_suspect": "lease_take",
    "lease_next": "lease_take",
    "rescue": "rescue_take",
    "heartbeat": "heartbeat_take",
    "claim_leased": "complete",
    "relay_lease": "relay_take",
}
#: A second statement is bound to rows that the first one locked.
SECONDS = {*SPLIT.values(), "prune_take"}
#: SQLite's claims need no token: arm writes it, and RETURNING names what is new.
WITHOUT_TOKEN = {"claim", "claim_kept", "claim_leased", "claim_replay", "accept", "store"}
#: MySQL has no way from key to key in an index.
FROM_KEY_TO_KEY = {"window", "after", "keyless"}

NAMES = tuple(dialect(REFERENCE).queries)


def parameters(name: str, query: str) -> set[str]:
    sql = dialect(name).queries[query]
    _, found = native(sql, "numeric")
    # the token is also what the canary is made of
    return {*found, "token"} if "[canary]" in sql else set(found)


@pytest.mark.parametrize("name", TWINS)
def test_the_same_queries_in_the_same_order(name: str) -> None:
    assert tuple(dialect(name).queries) == NAMES


@pytest.mark.parametrize("name", TWINS)
@pytest.mark.parametrize("query", NAMES)
def test_the_same_parameters(name: str, query: str) -> None:
    if not dialect(name).has(query) or not dialect(REFERENCE).has(query):
        return
    expected = parameters(REFERENCE, query)
    found = parameters(name, query)
    second = SPLIT.get(query)
    if second is not None and dialect(name).has(second):
        found |= {own for own in parameters(name, second) if own in expected}
    if query.startswith("claim"):
        expected -= SETTINGS
    if name == "sqlite" and query in WITHOUT_TOKEN:
        expected -= {"token"}
    if name == "mysql" and query == "lease_ordered":
        expected -= FROM_KEY_TO_KEY
    assert found == expected


@pytest.mark.parametrize("name", TWINS)
def test_second_statements_know_no_other_parameters(name: str) -> None:
    known = {
        "lease_take": {"consumer", "token", "lease_s", "rows.message_id"},
        "heartbeat_take": {"consumer", "lease_s", "rows.message_id"},
        "rescue_take": {"max_starts", "rows.consumer", "rows.message_id"},
        "prune_take": {"rows.consumer", "rows.message_id"},
        "complete": {"consumer", "token", "keep", "rows.message_id"},
        "relay_take": {"token", "lease_s", "rows.id"},
    }
    assert set(known) == SECONDS
    for query, expected in known.items():
        if dialect(name).has(query):
            assert parameters(name, query) == expected


@pytest.mark.parametrize("name", [REFERENCE, *TWINS])
def test_every_parameter_becomes_one_placeholder(name: str) -> None:
    placeholder: Mapping[Style, re.Pattern[str]] = {
        "numeric": re.compile(r"\$\d+"),
        "format": re.compile(r"(?<!%)%s"),
        "qmark": re.compile(r"\?"),
    }
    for query, sql in dialect(name).queries.items():
        for style, shape in placeholder.items():
            text, names = native(sql, style)
            found = shape.findall(text)
            count = len(set(found)) if style == "numeric" else len(found)
            assert count == len(names), f"{query} as {style}"


@pytest.mark.parametrize("name", [REFERENCE, *TWINS])
def test_percent_signs_survive_the_format_style(name: str) -> None:
    for query, sql in dialect(name).queries.items():
        text, names = native(sql, "format")
        plain, _ = native(sql, "qmark")
        assert text % (("?",) * len(names)) == plain, query


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("name", [REFERENCE, *TWINS])
def test_no_parameter_is_left(name: str, style: Style) -> None:
    for query, sql in dialect(name).queries.items():
        text, _ = native(sql, style)
        outside = re.sub(r"'(?:[^']|'')*'|::", "", text)
        assert not re.search(r":(?:rows\.)?[a-z_]", outside), query


@pytest.mark.parametrize("name", TWINS)
@pytest.mark.parametrize("count", [1, 3])
def test_regions_repeat_for_each_row(name: str, count: int) -> None:
    own = dialect(name)
    for query, sql in own.queries.items():
        columns = set(re.findall(r":rows\.(\w+)", sql))
        if not columns:
            assert "{" not in sql, f"{query} repeats nothing"
            continue
        outside = re.sub(r"\{[^{}]*\}", "", sql)
        assert ":rows." not in outside, f"{query} names a row outside of braces"
        rows = {column: [f"{column} {index}" for index in range(count)] for column in columns}
        statement = own.statement(query, {}, rows)
        assert "{" not in statement.sql
        assert "}" not in statement.sql
        _, names = native(statement.sql, "qmark")
        bound = [own for own in names if own.startswith("rows.")]
        assert {statement.params[own] for own in bound} == {
            value for values in rows.values() for value in values
        }


@pytest.mark.parametrize("name", [REFERENCE, *TWINS])
def test_the_canary_is_an_identifier(name: str) -> None:
    own = dialect(name)
    for query in own.queries:
        if own.has(query):
            sql = own.statement(query, {}, None, canary="0" * 32).sql
            assert "[canary]" not in sql
    if not own.refuses_commit:
        assert own.statement("close", canary="ab").sql == "RELEASE SAVEPOINT txbox_ab"


def test_a_database_that_cannot_refuse_a_commit_completes_its_claims() -> None:
    for name in (REFERENCE, *TWINS):
        own = dialect(name)
        assert own.has("complete") is not own.refuses_commit
        assert own.has("rescue_broken") is not own.refuses_commit
        assert own.has("arm") or name == REFERENCE


def test_sqlite_uses_nothing_newer_than_its_oldest_version() -> None:
    # 3.38 brought unixepoch(), format() and ->>, 3.37 STRICT
    for sql in dialect("sqlite").queries.values():
        assert not re.search(r"\b(?:unixepoch|format)\(|->|\bSTRICT\b", sql)
    assert sqlite3.sqlite_version_info >= (3, 35)


def test_mysql_never_ignores_an_error_of_an_insert() -> None:
    for sql in dialect("mysql").queries.values():
        assert "IGNORE" not in sql.upper()
