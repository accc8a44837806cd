"""The databases' queries say the same: names, parameters, and SQL that no driver misreads."""

from __future__ import annotations

import re
import sqlite3
from collections import Counter
from collections.abc import Mapping
from datetime import timedelta
from importlib.resources import files

import pytest

from txbox import Message
from txbox.store.codec import Arrival, Columns
from txbox.store.dialect import Style, dialect, native
from txbox.store.inbox import InboxStore

REFERENCE = "postgresql"
TWINS = ("sqlite", "mysql")
STYLES: tuple[Style, ...] = ("numeric", "format", "qmark", "named")

#: What only PostgreSQL sets inside of a claim: SQLite waits at BEGIN, MySQL in a statement of its own.
SETTINGS = {"lock_timeout_ms", "idle_ms"}
#: SQLite's claims need no token: arm writes it, and RETURNING names what is new.
WITHOUT_TOKEN = {
    "claim", "claim_single", "claim_kept", "claim_leased", "claim_replay", "claim_rehearsal", "accept", "store",
}  # fmt: skip
#: MySQL has no way from key to key in an index.
FROM_KEY_TO_KEY = {"window", "after", "keyless"}

NAMES = tuple(dialect(REFERENCE).queries)


def parameters(name: str, query: str) -> set[str]:
    sql = dialect(name).queries[query]
    _, found = native(sql, "numeric")
    # the token is also what the canary is made of
    return {*found, "token"} if "[canary]" in sql else set(found)


def text(name: str) -> str:
    return files("txbox.store").joinpath(f"{name}.sql").read_text()


def fragments(name: str) -> set[str]:
    return set(re.findall(r"^-- fragment: (\w+)", text(name), re.MULTILINE))


@pytest.mark.parametrize("name", TWINS)
def test_the_same_queries(name: str) -> None:
    seconds = set(dialect(name).seconds.values())
    assert set(dialect(name).queries) - seconds == set(NAMES)


def test_what_is_common_is_used_by_at_least_two_databases() -> None:
    """A query or fragment that most databases replace is not common."""
    shared = re.findall(r"^-- (name|fragment): (\w+)", text("common"), re.MULTILINE)
    for kind, query in shared:
        pattern = rf"^-- (?:{kind}|nothing):(?: \w+)* {query}\b"
        replaced = [
            name for name in (REFERENCE, *TWINS) if re.search(pattern, text(name), re.MULTILINE)
        ]
        assert len(replaced) < 2, query


def test_a_fragment_is_used_more_than_once() -> None:
    """One that every database spells in its own way may be used once: that is how a query becomes common."""
    every = ("common", REFERENCE, *TWINS)
    uses = Counter(re.findall(r"\[(\w+)", "".join(map(text, every))))
    spelled = set.intersection(*map(fragments, (REFERENCE, *TWINS)))
    for each in set.union(*map(fragments, every)) - spelled:
        assert uses[each] > 1, each


@pytest.mark.parametrize("name", [REFERENCE, *TWINS])
def test_no_fragment_is_left(name: str) -> None:
    for query, sql in dialect(name).queries.items():
        assert set(re.findall(r"\[(\w+)", sql)) <= {"canary"}, query


@pytest.mark.parametrize("name", TWINS)
@pytest.mark.parametrize("query", NAMES)
def test_the_same_parameters(name: str, query: str) -> None:
    if not dialect(name).has(query) or not dialect(REFERENCE).has(query):
        return
    expected = parameters(REFERENCE, query)
    found = parameters(name, query)
    # where two statements do what elsewhere one does, they share its parameters
    second = dialect(name).seconds.get(query) or ("complete" if query == "claim_leased" else None)
    if second is not None and dialect(name).has(second):
        found |= {parameter for parameter in parameters(name, second) if parameter in expected}
    if query.startswith("claim"):
        expected -= SETTINGS
    if name == "sqlite" and query in WITHOUT_TOKEN:
        expected -= {"token"}
    if name == "mysql" and query == "lease_ordered":
        expected -= FROM_KEY_TO_KEY
    assert found == expected


def test_a_second_statement_is_bound_to_rows_that_the_first_one_locked() -> None:
    """Its rows are the first columns of those; the rest of its parameters are the first one's."""
    mysql = dialect("mysql")
    assert set(mysql.seconds.values()) == {
        query for query in mysql.queries if query.endswith("_take")
    }
    assert not dialect(REFERENCE).seconds
    assert not dialect("sqlite").seconds
    for first, second in mysql.seconds.items():
        assert "FOR UPDATE" in mysql.queries[first]
        found = parameters("mysql", second)
        # what both are given is what the one statement of PostgreSQL knows; it leases what it stores at once
        given = parameters(REFERENCE, first) or {"consumer", "token", "lease_s"}
        assert {row for row in found if not row.startswith("rows.")} <= given, first
        rows = list(dict.fromkeys(re.findall(r":rows\.(\w+)", mysql.queries[second])))
        columns = re.findall(r"CONVERT\((?:\w+\.)?(\w+)", mysql.queries[first])
        assert rows == columns[: len(rows)], first
    assert parameters("mysql", "complete") == {"consumer", "token", "keep", "rows.message_id"}


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
    queries = dialect(name)
    for query, sql in queries.queries.items():
        columns = set(re.findall(r":rows\.(\w+)", sql))
        if not columns:
            assert "{" not in sql, f"{query} repeats nothing"
            continue
        outside = re.sub(r"\{[^{}]*\}", "", sql)
        assert ":rows." not in outside, f"{query} names a row outside of braces"
        rows = {column: [f"{column} {index}" for index in range(count)] for column in columns}
        statement = queries.statement(query, {}, rows)
        assert "{" not in statement.sql
        assert "}" not in statement.sql
        _, names = native(statement.sql, "qmark")
        bound = [each for each in names if each.startswith("rows.")]
        assert {statement.params[each] for each in bound} == {
            value for values in rows.values() for value in values
        }


@pytest.mark.parametrize("name", [REFERENCE, *TWINS])
def test_a_guard_that_is_a_savepoint_is_named_after_its_token(name: str) -> None:
    store = InboxStore(dialect(name), Columns())
    arrivals = [Arrival(Message(id=each, topic="t"), each, None) for each in ("a", "b")]
    claimed = store.claim(
        "c", arrivals, token="ab", lock_timeout=timedelta(seconds=1), idle_s=1.0, keep=False
    )
    guards = [*claimed, store.closing("ab"), store.still_claimed("ab")]
    assert not any("[canary]" in statement.sql for statement in guards)
    if not store.dialect.refuses_commit:
        sql = [statement.sql for statement in guards]
        assert "SAVEPOINT txbox_ab" in sql
        assert sql[-2:] == ["RELEASE SAVEPOINT txbox_ab"] * 2


def test_a_database_that_cannot_refuse_a_commit_completes_its_claims() -> None:
    for name in (REFERENCE, *TWINS):
        queries = dialect(name)
        assert queries.has("complete") is not queries.refuses_commit
        assert queries.has("rescue_broken") is not queries.refuses_commit
        assert queries.has("arm") or name == REFERENCE


def test_sqlite_uses_nothing_newer_than_its_oldest_version() -> None:
    # 3.38 brought unixepoch(), format() and ->>, 3.37 STRICT
    for sql in dialect("sqlite").queries.values():
        assert not re.search(r"\b(?:unixepoch|format)\(|->|\bSTRICT\b", sql)
    assert sqlite3.sqlite_version_info >= (3, 35)


def test_mysql_joins_rows_that_it_changes_by_their_key() -> None:
    """By its own choice it may read a small table through, and wait for a row that a handler holds."""
    joined = [
        match
        for sql in dialect("mysql").queries.values()
        for match in re.findall(r"STRAIGHT_JOIN \w+ AS \w+\s+(FORCE INDEX \(\w+\)|\w+)", sql)
    ]
    assert set(joined) == {"FORCE INDEX (PRIMARY)", "FORCE INDEX (txbox_attempt_message)"}


def test_mysql_never_ignores_an_error_of_an_insert() -> None:
    for sql in dialect("mysql").queries.values():
        assert "IGNORE" not in sql.upper()


#: Words that MySQL, MariaDB or Vitess read as their own, as far as they could be the name of something.
RESERVED = """
    accessible add all alter analyze array as asc before between both by call cascade case change check column
    condition continue convert create cross cube cursor database default delayed delete desc describe distinct div
    drop dual due each else empty escape except exists exit explain false fetch first for force foreign from function
    generated get grant group grouping groups having if ignore in index inner inout insert intersect interval into
    is iterate join key keys kill lag last lateral lead leading leave left less like limit linear lines load local
    lock long loop manual match member mod natural next no not null of off offset on open optimize option or order
    out outer over partition primary procedure purge range rank read recursive references release rename repeat
    replace require restrict return returning revoke right row rows schema select sensitive separator set show
    signal specific sql starting stored system table terminated then to trailing trigger true undo union unique
    unlock update usage use using values varying virtual when where while window with write xor
"""


def test_no_alias_of_mysql_is_a_word_of_another_server() -> None:
    """Vitess, for one, reads `next` as the beginning of NEXT VALUE."""
    alias = re.compile(r"\bAS (?!SIGNED|UNSIGNED|CHAR|BINARY)(\w+)", re.IGNORECASE)
    wrong = {
        name: words
        for name, sql in dialect("mysql").queries.items()
        if (words := {word for word in alias.findall(sql) if word.lower() in RESERVED.split()})
    }
    assert wrong == {}
