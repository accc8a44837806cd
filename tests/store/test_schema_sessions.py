"""What the session of a connection must be like is checked at start, and by doctor (promise 2.14)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import psycopg
import pytest

from tests.support.databases import BY_NAME, SELECTION, PostgreSQL, Raw, selected
from tests.support.doctor import findings
from txbox import App, Inbox, Limits, Message, Outcome, UnusableMessage
from txbox.admin import Admin
from txbox.errors import SchemaError, StoreUnavailable
from txbox.events import ConsumptionPaused
from txbox.session import Result, Statement, blocking
from txbox.store.dialect import dialect
from txbox.store.inbox import InboxStore
from txbox.store.schema import limited_encoding, session_settings, unfit
from txbox.testing import drain

_SOON = timedelta(milliseconds=200)
RawOf = Callable[[str], Raw]


def message(message_id: str, **more: Any) -> Message[Any]:
    return Message(**{"id": message_id, "topic": "t", "payload": b"{}", **more})


def app_of(target: Any, **options: Any) -> App:
    app = App(target, **options)

    @app.handler("t", consumer="c")
    def handle(message: Message[Any], _tx: Any) -> None:
        if message.key == "fails" and message.attempt == 1:
            raise ValueError("😀")

    return app


# -- settings -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("setting", "remedy"),
    [("array_nulls = off", "RESET array_nulls"), ("extra_float_digits = -3", "RESET extra_float_digits"),
     ("standard_conforming_strings = off", "RESET standard")],
)  # fmt: skip
def test_a_setting_that_changes_values_is_refused_by_name(
    postgresql_url: str, raw: RawOf, setting: str, remedy: str
) -> None:
    name = urlsplit(postgresql_url).path[1:]
    try:
        raw(postgresql_url).execute(f"ALTER DATABASE {name} SET {setting}")
    except psycopg.errors.FeatureNotSupported:
        # since PostgreSQL 19 there are no other string literals
        assert "standard_conforming_strings" in setting
        return
    with app_of(postgresql_url) as app:
        for starts in (lambda: app.process(message("1")), app.init, lambda: app.send(message("1"))):
            with pytest.raises(SchemaError, match=remedy):
                starts()
    assert remedy in findings(postgresql_url)["session-setting"].remedy


def test_a_database_set_to_read_only_is_named(postgresql_url: str, raw: RawOf) -> None:
    name = urlsplit(postgresql_url).path[1:]
    raw(postgresql_url).execute(f"ALTER DATABASE {name} SET default_transaction_read_only = on")
    assert "default_transaction_read_only" in findings(postgresql_url)["on-replica"].problem


# -- row security ---------------------------------------------------------------------------------


@pytest.fixture
def limited_url(postgresql_url: str, raw: RawOf) -> Iterator[str]:
    """A role with all rights on the tables, which row security applies to."""
    role, view = f"txbox_t_{urlsplit(postgresql_url).path[1:]}", raw(postgresql_url)
    view.execute(f"CREATE ROLE {role} LOGIN PASSWORD 'x'")
    view.execute(f"GRANT ALL ON ALL TABLES IN SCHEMA public TO {role}")
    view.execute(f"GRANT ALL ON ALL SEQUENCES IN SCHEMA public TO {role}")
    parts = urlsplit(postgresql_url)
    yield parts._replace(netloc=f"{role}:x@{parts.hostname}:{parts.port}").geturl()
    view.execute(f"DROP OWNED BY {role} CASCADE")
    view.execute(f"DROP ROLE {role}")


@pytest.mark.parametrize("table", ["txbox_inbox", "txbox_schema", "txbox_outbox"])
def test_row_security_is_refused_at_start_and_found(
    postgresql_url: str, limited_url: str, raw: RawOf, table: str
) -> None:
    with app_of(postgresql_url) as app:
        app.process(message("1"))
    raw(postgresql_url).execute(f"ALTER TABLE {table} ENABLE ROW LEVEL SECURITY")
    named = rf"Row security .* {table}.*DISABLE ROW LEVEL SECURITY"
    with app_of(limited_url) as app:
        with pytest.raises(SchemaError, match=named):
            app.process(message("1"))
        with Admin(app) as admin, pytest.raises(SchemaError, match=named):
            admin.status()
    found = findings(limited_url)
    assert table in found["row-security"].problem
    assert "schema-missing" not in found
    # who owns the tables sees all of them
    with app_of(postgresql_url) as app:
        assert app.process(message("1")) is Outcome.DUPLICATE


def test_row_security_that_is_switched_on_under_a_worker_is_named(
    postgresql_url: str, limited_url: str, raw: RawOf
) -> None:
    with app_of(limited_url) as app:
        assert app.process(message("known")) is Outcome.PROCESSED
        view = raw(postgresql_url)
        view.execute("ALTER TABLE txbox_inbox ENABLE ROW LEVEL SECURITY")
        view.execute("CREATE POLICY new ON txbox_inbox FOR INSERT WITH CHECK (true)")
        with pytest.raises(SchemaError, match="Row security"):
            app.process(message("known"))


# -- rows that cannot be read -----------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["inline", "stored"])
def test_what_is_neither_won_nor_found_is_trouble_and_no_endless_loop(
    database_url: str, monkeypatch: pytest.MonkeyPatch, mode: Any
) -> None:
    reasons: list[str] = []

    def observe(event: Any) -> None:
        if isinstance(event, ConsumptionPaused):
            reasons.append(event.reason)

    def nothing(*_: Any) -> dict[str, Any]:
        return {}

    with app_of(database_url) as app:
        assert app.process(message("known", key="fails")) is Outcome.FAILED
    with App(database_url, limits=Limits(unavailable_for=_SOON), observers=[observe]) as app:
        app.handler("t", consumer="c", mode=mode)(lambda _message, _tx: None)
        assert app.process(message("first")).settles
        monkeypatch.setattr(InboxStore, "existing", nothing)
        with pytest.raises(StoreUnavailable, match="cannot read"):
            app.process(message("known", key="fails"))
    assert "cannot read" in reasons[0]


def test_accept_says_that_it_cannot_read_a_row(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nothing(*_: Any) -> dict[str, Any]:
        return {}

    with app_of(database_url) as app:
        app.process(message("known"))
        monkeypatch.setattr(InboxStore, "existing", nothing)
        with pytest.raises(StoreUnavailable, match="cannot read"), app.transaction() as tx:
            Inbox(consumer="c").accept(tx, "known")


# -- encodings of the database ----------------------------------------------------------------------


@pytest.fixture
def encoded_url(request: pytest.FixtureRequest) -> Iterator[str]:
    postgresql = BY_NAME["postgresql"]
    assert isinstance(postgresql, PostgreSQL)
    if postgresql not in selected():
        pytest.skip(f"postgresql is not among {SELECTION}")
    url = postgresql.create_in(request.param)
    yield url
    postgresql.drop(url)


in_latin1 = pytest.mark.parametrize("encoded_url", ["LATIN1"], indirect=True)


@in_latin1
def test_what_the_encoding_lacks_goes_to_the_quarantine(encoded_url: str, raw: RawOf) -> None:
    with app_of(encoded_url) as app:
        assert app.process(message("é")) is Outcome.PROCESSED
        assert app.process(message("é")) is Outcome.DUPLICATE
        assert app.process(message("😀")) is Outcome.QUARANTINED
        assert app.process(message("😀", payload=b"other")) is Outcome.QUARANTINED
        assert app.process(message("of the topic", type="😀")) is Outcome.QUARANTINED
        assert [*app.send(message("😁")).values()] == [Outcome.QUARANTINED]
        assert [*app.send(message("ü")).values()] == [Outcome.DEFERRED]
        # the error's text is escaped
        assert app.process(message("f", key="fails")) is Outcome.FAILED
        drain(app, ignore_dates=True)
    view = raw(encoded_url)
    view.execute("SET client_encoding = 'UTF8'")
    rows = view.rows("SELECT message_id, status FROM txbox_inbox ORDER BY message_id")
    assert rows == [("f", "processed"), ("é", "processed"), ("ü", "processed")]
    assert "\\U0001f600" in view.value(
        "SELECT error FROM txbox_attempt WHERE message_id = 'f' LIMIT 1"
    )
    ids = view.rows("SELECT message_id FROM txbox_quarantine ORDER BY message_id")
    assert ids == [("",), ("",), ("",), ("of the topic",)]
    assert findings(encoded_url)["server-encoding"].problem.startswith(
        "The database's encoding is LATIN1"
    )


@in_latin1
def test_accept_has_what_the_encoding_lacks_set_aside(encoded_url: str) -> None:
    inbox = Inbox(consumer="c")
    with psycopg.connect(encoded_url, client_encoding="UTF8") as tx:
        assert inbox.accept(tx, "é")
        with pytest.raises(UnusableMessage, match="encoding"):
            inbox.accept(tx, "😀")
        tx.rollback()
        inbox.quarantine(tx, "😀", payload=b"{}")
        tx.commit()
        assert tx.execute("SELECT count(*) FROM txbox_quarantine").fetchall() == [(1,)]


@pytest.mark.parametrize("encoded_url", ["SQL_ASCII"], indirect=True)
def test_a_database_without_an_encoding_works_and_is_found(encoded_url: str) -> None:
    with app_of(encoded_url) as app:
        assert app.process(message("😀", key="fails")) is Outcome.FAILED
        assert drain(app, ignore_dates=True) == [Outcome.PROCESSED]
        assert app.process(message("😀")) is Outcome.DUPLICATE
    assert "SQL_ASCII" in findings(encoded_url)["server-encoding"].problem


@pytest.mark.parametrize(
    "encoding", ["WIN1252", "KOI8R", "EUC_JP", "LATIN10", "EUC_TW", "MULE_INTERNAL"]
)
def test_every_encoding_of_the_server_has_a_name_in_python(encoding: str) -> None:
    """The last two have none: there, ASCII is certain."""
    name = limited_encoding({"server_encoding": encoding})
    assert name is not None
    assert "a".encode(name) == b"a"
    assert (name == "ascii") == (encoding in ("EUC_TW", "MULE_INTERNAL"))


def test_the_roles_encoding_is_found(postgresql_url: str, raw: RawOf) -> None:
    name = urlsplit(postgresql_url).path[1:]
    raw(postgresql_url).execute(f"ALTER DATABASE {name} SET client_encoding = 'LATIN1'")
    assert "LATIN1" in findings(postgresql_url)["role-encoding"].problem


class _Vtgate:
    """Answers as Vitess does: of `SHOW VITESS_SHARDS`, a connection to one shard makes a syntax error."""

    def __init__(self, database: str) -> None:
        self._answers: dict[str, list[tuple[Any, ...]]] = {
            "session": [("vitess", "1"), ("sql_select_limit", "18446744073709551615")],
            "keyspace": [(database,)],
        }
        if ":" not in database:
            self._answers["keyspace_shards"] = [
                ("shop/-80",), ("shop/80-",), ("shop2/0",),
            ]  # fmt: skip

    async def execute(self, statement: Statement) -> Result:
        rows = self._answers[statement.name]
        return Result(rows, len(rows))


def test_a_keyspace_of_several_shards_is_refused_and_one_of_them_is_not() -> None:
    for database, refused in (
        ("shop", True),
        ("shop@primary", True),
        ("shop:-80", False),
        ("shop2", False),
    ):
        db: Any = _Vtgate(database)
        settings = blocking(session_settings(db, dialect("mysql")))
        assert ("keyspace_shards" in unfit(settings)) is refused, database
