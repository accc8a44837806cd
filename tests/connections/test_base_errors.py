"""What an error of the database says: the server's own words, without details, values or passwords; and when."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import timedelta
from typing import Any

import pytest
import sqlalchemy as sa

from tests.support.databases import NewDatabase, Raw
from tests.support.django_project import configured
from tests.support.proxy import closed_port
from tests.support.shop import AT_ONCE, CONSUMER, TOPIC, Shop, opened
from tests.support.waiting import DEADLINE_S
from txbox import App, Limits, Message, Outcome, StoreUnavailable
from txbox.admin import Admin
from txbox.connections.base import server_message
from txbox.errors import FULL, UNANSWERED, Fault

pytestmark = pytest.mark.every_database

SECRET = "hunter2"
MESSAGE: Message[Any] = Message(topic=TOPIC, id="1", payload=b"{}")


def _error(shop: Shop, sql: str) -> str:
    def handle(message: Message[Any], tx: Any) -> None:
        tx.cursor().execute(sql)

    shop.app.handler(TOPIC, consumer=CONSUMER, retry=AT_ONCE)(handle)
    shop.app.process(MESSAGE)
    return str(shop.raw.value("SELECT error FROM txbox_inbox")).partition("\n")[0]


def test_missing_table_of_a_handler_is_named(shop: Shop) -> None:
    assert "no_such_table" in _error(shop, "INSERT INTO no_such_table VALUES (1)")


def test_values_of_rows_are_not_quoted(shop: Shop) -> None:
    shop.raw.execute("CREATE TABLE t (id integer PRIMARY KEY, name varchar(9) UNIQUE)")
    shop.raw.execute(f"INSERT INTO t VALUES (1, '{SECRET}')")
    said = _error(shop, f"INSERT INTO t VALUES (2, '{SECRET}')")
    assert SECRET not in said
    # but the constraint is, by whatever name
    assert any(name in said for name in ("t_name_key", "'name'", "t.name")), said


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("the name " + "x" * 9_000, "the name " + "x" * 8_183 + "…"),
        (f"at postgresql://u:{SECRET * 9_000}@db", "at postgresql…"),
        (f"password={SECRET * 9_000}", "password…"),
        (f"invalid: '{SECRET * 9_000}' for key 'x'", "invalid: …"),
        (f"invalid: '{SECRET}'x' for key 'x' '{SECRET}' for key 'y'", "invalid: '…' for key 'y'"),
        (f"syntax near '{SECRET}'s' at line 1, near \"{SECRET}\" x", "syntax near '…' at line 1, near '…' x"),
    ],
)  # fmt: skip
def test_a_line_is_bounded_before_its_values_are_looked_for(said: str, shown: str) -> None:
    assert server_message(Exception(said)) == shown


@pytest.mark.parametrize("unit", ["'", "' at line", "near '", 'near "', "://u:", "password"])
def test_a_message_of_strangers_takes_linear_time(unit: str, postgresql_url: str) -> None:
    with opened(postgresql_url) as shop:
        started = time.process_time()
        quoted = (unit * (24_000 // len(unit))).replace("'", "''")
        _error(shop, f"DO $do$ BEGIN RAISE EXCEPTION '{quoted}'; END $do$")
        assert time.process_time() - started < 2


def test_values_that_cannot_be_read_are_not_quoted(postgresql_shop: Shop) -> None:
    said = _error(postgresql_shop, f"SELECT CAST('{SECRET}' AS integer)")
    assert 'InvalidTextRepresentation (22P02): invalid input syntax for type integer: "…"' in said


@pytest.fixture
def postgresql_shop(postgresql_url: str) -> Iterator[Shop]:
    with opened(postgresql_url) as shop:
        yield shop


def test_handler_that_commits_is_told_so(postgresql_shop: Shop) -> None:
    postgresql_shop.app.handler(TOPIC, consumer=CONSUMER, retry=AT_ONCE)(
        lambda message, tx: tx.commit()
    )
    assert postgresql_shop.app.process(MESSAGE) is Outcome.FAILED
    error = str(postgresql_shop.raw.value("SELECT error FROM txbox_inbox"))
    assert "a handler must not commit: txbox commits its message and its writes together" in error


class _MySQLError(Exception): ...


@pytest.mark.parametrize(
    ("number", "text", "expected"),
    [
        (1062, "Duplicate entry 'it's hunter2' for key 'name'", "Duplicate entry '…' for key 'name'"),
        (
            1366, "Incorrect integer value: 'hunter2' for column `t`.`id` at row 1",
            "Incorrect integer value: '…' for column `t`.`id` at row 1",
        ),
        (
            1064, "You have an error; check the manual for the right syntax to use near 'hunter2' at line 1",
            "You have an error; check the manual for the right syntax to use near '…' at line 1",
        ),
        (1146, "Table 'shop.orders' doesn't exist", "Table 'shop.orders' doesn't exist"),
        (1054, "Unknown column 'nme' in 'field list'", "Unknown column 'nme' in 'field list'"),
    ],
)  # fmt: skip
def test_mysql_names_things_and_quotes_no_values(number: int, text: str, expected: str) -> None:
    assert server_message(_MySQLError(number, text)) == expected


@pytest.mark.parametrize(
    ("scheme", "change", "says"),
    [
        ("postgresql", "password", 'password authentication failed for user "txbox"'),
        ("postgresql", "user", 'password authentication failed for user "nobody"'),
        ("postgresql", "database", 'database "nowhere" does not exist'),
        ("postgresql", "host", "nohost.invalid"),
        ("postgresql+psycopg", "password", 'password authentication failed for user "txbox"'),
        ("postgresql+psycopg", "host", "nohost.invalid"),
        ("postgresql+django", "password", 'password authentication failed for user "txbox"'),
        ("postgresql+django", "database", 'database "nowhere" does not exist'),
        ("postgresql+django", "host", "nohost.invalid"),
        ("mysql", "password", "Access denied for user"),
        ("mysql", "database", "Unknown database 'nowhere'"),
        ("mysql", "host", "nohost.invalid"),
    ],
)
def test_wrong_configuration_is_reported_at_once(
    new_database: NewDatabase, scheme: str, change: str, says: str
) -> None:
    right = sa.make_url(new_database("mariadb" if scheme == "mysql" else "postgresql"))
    wrong: Any = {
        "password": {"password": SECRET}, "user": {"username": "nobody", "password": SECRET},
        "database": {"database": "nowhere"}, "host": {"host": "nohost.invalid"},
    }[change]  # fmt: skip
    url = right.set(**wrong)
    text = url.render_as_string(hide_password=False)
    # a database that is away is waited for so long
    limits = Limits(unavailable_for=timedelta(seconds=2 * DEADLINE_S))
    with ExitStack() as stack:
        if scheme.endswith("+django"):
            app = App(django=stack.enter_context(configured(text)), limits=limits)
        elif "+" in scheme:
            app = App(sa.create_engine(url.set(drivername=scheme)), limits=limits)
        else:
            app = App(text, limits=limits)
        stack.enter_context(app)
        app.handler(TOPIC, consumer=CONSUMER)(lambda message, tx: None)
        began = time.monotonic()
        with pytest.raises(StoreUnavailable) as refused:
            app.process(MESSAGE)
        assert time.monotonic() - began < DEADLINE_S
    assert says in str(refused.value)
    assert SECRET not in str(refused.value)
    assert refused.value.fault is Fault.UNAVAILABLE
    assert refused.value.misconfigured


@pytest.mark.parametrize(
    "scheme",
    ["postgresql", "postgresql+asyncpg", "postgresql+psycopg", "postgresql+django", "mysql"],
)
def test_a_server_without_a_free_connection_says_so_whatever_its_language(
    new_database: NewDatabase, raw: Callable[[str], Raw], scheme: str
) -> None:
    product = "mariadb" if scheme == "mysql" else "postgresql"
    whole = sa.make_url(new_database(product))
    user, admin = f"narrow_{secrets.token_hex(4)}", raw(whole.render_as_string(False))
    if product == "postgresql":
        admin.execute(f"CREATE ROLE {user} LOGIN PASSWORD '{SECRET}' CONNECTION LIMIT 1")
    else:
        admin.execute(f"CREATE USER {user} IDENTIFIED BY '{SECRET}' WITH MAX_USER_CONNECTIONS 1")
        admin.execute(f"GRANT ALL ON *.* TO {user}")
    url = whole.set(username=user, password=SECRET)
    text = url.render_as_string(False)
    try:
        with ExitStack() as stack:
            stack.enter_context(Raw(text))
            if scheme.endswith("+django"):
                target: Any = App(django=stack.enter_context(configured(text)))
            elif scheme == "postgresql+psycopg":
                target = App(sa.create_engine(url.set(drivername=scheme)))
            else:
                target = App(url.set(drivername=scheme).render_as_string(False))
            with Admin(target) as looking, pytest.raises(StoreUnavailable) as refused:
                looking.consumers()
    finally:
        admin.execute(f"DROP {'ROLE' if product == 'postgresql' else 'USER'} {user}")
    # libpq tells no SQLSTATE, and the text is not looked at
    libpq = scheme in ("postgresql", "postgresql+psycopg", "postgresql+django")
    assert refused.value.full is not libpq
    assert refused.value.code in (UNANSWERED if libpq else FULL)
    assert f"{'may have' if libpq else 'has'} no free connection" in str(refused.value)
    assert SECRET not in str(refused.value)


def test_closed_port_is_waited_for_and_says_so() -> None:
    limits = Limits(unavailable_for=timedelta(seconds=0.2))
    with (
        closed_port() as port,
        App(f"postgresql://u:{SECRET}@127.0.0.1:{port}/db", limits=limits) as app,
    ):
        app.handler(TOPIC, consumer=CONSUMER)(lambda message, tx: None)
        with pytest.raises(StoreUnavailable, match="Connection refused") as refused:
            app.process(MESSAGE)
    assert not refused.value.misconfigured
