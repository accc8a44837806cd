"""The printed SQL makes the same tables as `init`, and its grants are enough, and no more."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psycopg
import pytest

from tests.support.command import SHOP, Command
from tests.support.databases import FreshDatabase, NewDatabase, Raw
from tests.support.meddling import Verb, drive_meddled
from tests.support.shop import opened
from tests.support.versions import NEXT, released
from txbox import App
from txbox.errors import SchemaError
from txbox.session import Statements
from txbox.store import schema as tables
from txbox.store.schema import split

RawOf = Callable[[str], Raw]

_LOOK = {
    "postgresql": (
        ("SELECT table_name, column_name, data_type, is_nullable, coalesce(column_default, ''), collation_name"
        " FROM information_schema.columns WHERE table_name LIKE 'txbox%' ORDER BY 1, 2"),
        "SELECT indexname, indexdef FROM pg_indexes WHERE indexname LIKE 'txbox%' ORDER BY 1",
        "SELECT tgname, pg_get_triggerdef(oid) FROM pg_trigger WHERE tgname LIKE 'txbox%' ORDER BY 1",
        "SELECT proname, prosrc FROM pg_proc WHERE proname LIKE 'txbox%' ORDER BY 1",
    ),
    "sqlite": ("SELECT type, name, sql FROM sqlite_master WHERE name LIKE 'txbox%' ORDER BY name",),
    "mysql": (
        ("SELECT table_name, column_name, column_type, is_nullable, column_default, character_set_name, collation_name"
        " FROM information_schema.columns WHERE table_schema = DATABASE() ORDER BY 1, 2"),
        ("SELECT table_name, index_name, seq_in_index, column_name FROM information_schema.statistics"
        " WHERE table_schema = DATABASE() ORDER BY 1, 2, 3"),
    ),
}  # fmt: skip


def structure(view: Raw, dialect: str) -> list[Any]:
    return [view.rows(sql) for sql in _LOOK[dialect]]


def test_what_is_printed_makes_the_tables_of_init(
    command: Command, database: FreshDatabase, new_database: NewDatabase, raw: RawOf
) -> None:
    dialect = database.kind.dialect
    sql = command("schema", "print", "--dialect", dialect).out
    empty = new_database(database.name, schema=False)
    assert (
        command("schema", "print", "--database", empty, "--json").json["sql"].strip() == sql.strip()
    )
    pasted = raw(empty)
    for statement in split(sql):
        pasted.execute(statement)
    assert structure(pasted, dialect) == structure(raw(database.url), dialect)
    assert (
        command("schema", "check", "--database", empty, "--json").json["version"] == tables.VERSION
    )
    assert command("init", "--database", empty, "--json").json == {
        "before": tables.VERSION, "after": tables.VERSION,
    }  # fmt: skip
    # the print leads from nothing to this version in as many parts as one likes
    assert (
        command("schema", "print", "--dialect", dialect, "--from", "0", "--to", "1").out.strip()
        in sql
    )


def test_print_and_init_are_of_the_same_database(command: Command, sqlite_url: str) -> None:
    command.file("shop.py", f"import txbox\napp = txbox.App({sqlite_url!r})\n")
    env = {"TXBOX_APP": "shop:app", "TXBOX_DATABASE_URL": "postgresql://nobody@127.0.0.1:1/shop"}
    assert "sqlite" in command("init", env=env).out
    assert command("schema", "print", "--json", env=env).json["dialect"] == "sqlite"


def test_nothing_leads_to_the_version_one_has(command: Command) -> None:
    version = str(tables.VERSION)
    said = command("schema", "print", "--dialect", "sqlite", "--from", version).out
    assert said == f"-- There is no migration from {version} to {version}.\n"
    assert (
        "upgrade txbox"
        in command("schema", "print", "--dialect", "sqlite", "--to", "99", code=2).sentence
    )
    assert "Give --dialect" in command("schema", "print", code=2).sentence


def test_init_makes_a_named_schema(command: Command, new_database: NewDatabase, raw: RawOf) -> None:
    url = new_database("postgresql", schema=False)
    command("init", "--database", url, "--schema", "inbox")
    view = raw(url)
    assert (
        view.value(
            "SELECT count(*) FROM pg_tables WHERE schemaname = 'inbox' AND tablename = 'txbox_inbox'"
        )
        == 1
    )
    assert command("status", "--database", url, "--schema", "inbox").out == "The inbox is empty.\n"
    assert "run `txbox init`" in command("status", "--database", url, code=2).sentence
    grants = command(
        "schema", "print", "--dialect", "postgresql", "--schema", "inbox", "--grants", "readonly=bi"
    ).out
    assert 'GRANT USAGE ON SCHEMA "inbox" TO bi;' in grants
    assert 'ON "inbox".txbox_inbox TO bi;' in grants
    refused = command("init", "--database", url, "--schema", 'x"; DROP TABLE y', code=2)
    assert "invalid schema name" in refused.sentence


def test_a_kind_of_role_that_is_none_is_refused(command: Command) -> None:
    refused = command("schema", "print", "--dialect", "mysql", "--grants", "boss=x", code=2)
    assert "the kinds are consumer, relay, maintenance, operator, readonly" in refused.sentence
    assert (
        "SQLite has no roles" in command("schema", "print", "--dialect", "sqlite", "--grants").out
    )


@pytest.mark.parametrize(
    ("spoken", "name", "quoted"),
    [
        ("postgresql", "shop", "shop"),
        ("postgresql", "Shop", '"Shop"'),
        ("postgresql", 'x"; DROP TABLE y', '"x""; DROP TABLE y"'),
        ("mysql", "shop", "shop"),
        ("mysql", "'shop'@'%'", "`shop`@`%`"),
        ("mysql", "x`; DROP TABLE y", "`x``; DROP TABLE y`"),
    ],
)
def test_the_names_of_roles_are_quoted(
    command: Command, spoken: str, name: str, quoted: str
) -> None:
    sql = command("schema", "print", "--dialect", spoken, "--grants", f"readonly={name}").out
    assert f"GRANT SELECT ON txbox_status TO {quoted};" in sql


@dataclass(frozen=True, slots=True)
class Roles:
    """A PostgreSQL database and one login for each kind of role, with the printed grants."""

    owner: str
    urls: dict[str, str]


@pytest.fixture
def roles(command: Command, postgresql_url: str, raw: RawOf) -> Iterator[Roles]:
    admin = raw(postgresql_url)
    admin.execute("CREATE TABLE effect (id text)")
    password = secrets.token_hex(8)
    suffix = secrets.token_hex(4)
    kinds = ("consumer", "maintenance", "operator", "readonly", "viewer")
    names = {kind: f"txbox_{kind}_{suffix}" for kind in kinds}
    urls: dict[str, str] = {}
    parts = urlsplit(postgresql_url)
    for kind, name in names.items():
        admin.execute(f"CREATE ROLE {name} LOGIN PASSWORD '{password}'")
        host = parts.netloc.rpartition("@")[2]
        urls[kind] = parts._replace(netloc=f"{name}:{password}@{host}").geturl()
    pairs = [f"{kind}={name}" for kind, name in names.items()]
    for statement in split(
        command("schema", "print", "--dialect", "postgresql", "--grants", *pairs).out
    ):
        admin.execute(statement)
    admin.execute(f"GRANT INSERT ON effect TO {names['consumer']}")
    yield Roles(postgresql_url, urls)
    for name in names.values():
        admin.execute(f"DROP OWNED BY {name}")
        admin.execute(f"DROP ROLE {name}")


def test_a_consumer_role_processes_parks_stores_and_quarantines(
    command: Command, roles: Roles
) -> None:
    command.file("shop.py", SHOP)
    env = {"SHOP_URL": roles.urls["consumer"], "TXBOX_APP": "shop:app"}
    command("send", "orders", "--id", "1", "--data", "{}", env=env)
    command("send", "orders", "--id", "2", "--data", '{"bad": 1}', env=env)
    command("send", "orders", "--id", "1", "--data", "[]", env=env, code=1)
    ran = command("run", "--once", "--no-maintenance", "--json", env=env, code=1).json
    assert (ran["events"]["processed"], ran["events"]["dead"]) == (3, 1)
    with Raw(roles.urls["consumer"]) as view, pytest.raises(psycopg.errors.InsufficientPrivilege):
        view.execute("DELETE FROM txbox_inbox")


def test_an_operator_role_retries_and_discards(command: Command, roles: Roles) -> None:
    command.file("shop.py", SHOP)
    env = {"SHOP_URL": roles.urls["consumer"], "TXBOX_APP": "shop:app"}
    for name in ("1", "2"):
        command("send", "orders", "--id", name, "--data", '{"bad": 1}', env=env)
    command("run", "--once", "--no-maintenance", env=env, code=1)
    url = roles.urls["operator"]
    command("status", "--database", url)
    command("show", "billing", "1", "--database", url)
    command("retry", "billing", "1", "--database", url)
    command("discard", "billing", "2", "--database", url)
    for name in ("3", "4", "6"):
        command("send", "orders", "--id", name, "--data", "{}", env=env)
        command("send", "orders", "--id", name, "--data", "[]", env=env, code=1)
    command("quarantine", "accept", "billing", "3", "--id", "5", "--database", url)
    command("quarantine", "discard", "billing", "4", "--database", url)
    command("quarantine", "show", "billing", "4", "--database", url)
    for kind in ("maintenance", "readonly"):
        denied = command(
            "quarantine", "discard", "billing", "6", "--database", roles.urls[kind], code=1
        )
        assert "lacks a right" in denied.err
    with Raw(url) as operator:
        login = urlsplit(url).username
        assert {value for (value,) in operator.rows("SELECT login FROM txbox_audit")} == {login}
        columns = "actor, action, filter, affected"
        for forbidden in (
            "DELETE FROM txbox_audit",
            f"INSERT INTO txbox_audit ({columns}, login) VALUES ('ann', 'retry', '', 1, 'ann')",
            f"INSERT INTO txbox_audit ({columns}, recorded_at) VALUES ('ann', 'retry', '', 1, now())",
        ):
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                operator.execute(forbidden)


def test_a_maintenance_role_prunes_and_rescues(command: Command, roles: Roles) -> None:
    with Raw(roles.owner) as owner:
        owner.execute(
            "INSERT INTO txbox_inbox (consumer, message_id, status, topic, processed_at, lease_until, token, starts)"
            " VALUES ('a', '1', 'discarded', 't', now() - interval '90 days', NULL, NULL, 0),"
            " ('a', '2', 'processing', 't', NULL, now() - interval '1 hour', 'x', 1)"
        )
    url = roles.urls["maintenance"]
    assert command("prune", "--database", url, "--json").json["rows"] == 1
    assert command("rescue", "--database", url, "--json").json["rows"] == 1
    with Raw(roles.owner) as owner:
        owner.execute(
            "INSERT INTO txbox_quarantine (consumer, message_id, hash, reason, status, updated_at)"
            " VALUES ('a', '1', 'h', 'r', 'discarded', now() - interval '90 days')"
        )
    command("maintain", "--once", "--database", url)
    command("status", "--database", url)
    with Raw(roles.owner) as owner:
        assert owner.value("SELECT count(*) FROM txbox_quarantine") == 0
    with Raw(url) as view, pytest.raises(psycopg.errors.InsufficientPrivilege):
        view.execute(
            "INSERT INTO txbox_inbox (consumer, message_id, status, topic) VALUES ('a', 'b', 'pending', 't')"
        )


def test_a_readonly_role_looks_and_cannot_write(command: Command, roles: Roles) -> None:
    url = roles.urls["readonly"]
    for words in (("status",), ("list",), ("quarantine", "list"), ("schema", "check")):
        command(*words, "--database", url)
    with Raw(roles.owner) as owner:
        owner.execute(
            "INSERT INTO txbox_inbox (consumer, message_id, status, topic, has_payload)"
            " VALUES ('a', '1', 'dead', 't', true)"
        )
    refused = command("retry", "a", "1", "--database", url, code=1)
    assert "this database role lacks a right" in refused.sentence
    with Raw(url) as view, pytest.raises(psycopg.errors.InsufficientPrivilege):
        view.execute("UPDATE txbox_inbox SET status = 'dead'")


def test_a_viewer_role_counts_and_sees_no_content(command: Command, roles: Roles) -> None:
    url = roles.urls["viewer"]
    with Raw(roles.owner) as owner:
        owner.execute(
            "INSERT INTO txbox_inbox (consumer, message_id, status, topic, has_payload, payload, error)"
            " VALUES ('a', '1', 'dead', 't', true, 'secret', 'secret')"
        )
        owner.execute("INSERT INTO txbox_outbox (id, topic, payload) VALUES ('1', 't', 'secret')")
    said = command("status", "--database", url, "--json").json
    assert "secret" not in str(said)
    assert said["consumers"][0]["counts"] == {"dead": 1}
    assert "lacks a right" in command("show", "a", "1", "--reveal", "--database", url, code=1).err
    with Raw(url) as viewer:
        hidden = {"txbox_inbox": "payload error headers key result", "txbox_outbox": "payload headers key error",
                  "txbox_attempt": "error", "txbox_quarantine": "payload headers key reason"}  # fmt: skip
        for table, columns in hidden.items():
            for column in columns.split():
                with pytest.raises(psycopg.errors.InsufficientPrivilege):
                    viewer.rows(f"SELECT {column} FROM {table}")
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            viewer.execute("UPDATE txbox_inbox SET status = 'pending'")


def test_a_later_version_is_printed_and_applied_from_the_one_before(
    sqlite_url: str, raw: RawOf, tmp_path: Path
) -> None:
    """With one more migration beside those there are, the upgrade is that migration alone."""
    before = tables.VERSION
    with released(tmp_path, NEXT, oldest=before), App(sqlite_url) as app:
        text = tables.migration_text(app.store.dialect, None, after=before)
        assert "CREATE TABLE txbox_more (" in text
        assert "CREATE TABLE txbox_inbox (" not in text
        assert app.init() == (before, NEXT)
        assert app.init() == (NEXT, NEXT)
    assert raw(sqlite_url).value("SELECT count(*) FROM txbox_more") == 0


def test_tables_that_are_dropped_while_they_are_checked_are_missing(
    new_database: NewDatabase,
) -> None:
    with opened(new_database("postgresql")) as shop:

        async def dropped(verb: Verb, statements: Statements, carried_out: Any) -> Any:
            if verb == "execute" and statements[0].name == "schema_version":
                shop.raw.execute("DROP TABLE txbox_schema")
            return await carried_out()

        with pytest.raises(SchemaError, match="txbox init"):
            drive_meddled(shop.app._any_sync(), dropped, shop.app.protocol.check_schema)
