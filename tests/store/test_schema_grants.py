"""A login with exactly the printed rights can do its work, and no more."""

from __future__ import annotations

import logging
import os
import secrets
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psycopg
import pymysql
import pytest

from tests.admin.test_admin_outbox import relayed
from tests.support.databases import FreshDatabase, Raw
from tests.support.recording import Recorder
from tests.support.sources import Memory
from tests.support.waiting import DEADLINE_S
from tests.support.workers import worker
from txbox import App, Message, Outcome, Reject, RetryPolicy
from txbox.admin import Admin, InboxFilter, QuarantineFilter
from txbox.errors import StoreError
from txbox.maintenance import Task, run_once
from txbox.store.dialect import dialect
from txbox.store.schema import grants, split

ROOT = Path(__file__).parents[2]
DENIED = (psycopg.errors.InsufficientPrivilege, pymysql.OperationalError)
# of a command, of a column, of a database, of an administrator, of a routine
_DENIED_BY_MYSQL = {1142, 1143, 1044, 1227, 1370}
# SELECT, INSERT, UPDATE, DELETE; s is SELECT of some columns. What is not here is forbidden.
RIGHTS = {
    "consumer": "inbox SIU, attempt SI, quarantine SIU, outbox SI, sequence SIU, job SIU, activity SIU, worker SIUD, "
    "pause SI, audit I, schema S",
    "relay": "outbox SUD, activity SIU, worker SIUD, pause S, schema S",
    "maintenance": "inbox SUD, attempt SID, quarantine SUD, outbox SIUD, job SIUD, activity SIUD, worker SIUD, "
    "sequence S, pause S, schema S",
    "operator": "inbox SIU, attempt S, quarantine SIU, outbox SU, sequence S, job S, pause SID, activity S, worker S, "
    "audit SI, dead_letters S, status S, schema S",
    "readonly": "inbox S, attempt S, quarantine S, outbox S, sequence S, job S, pause S, activity S, worker S, "
    "dead_letters S, status S, schema S",
    "viewer": "inbox s, attempt s, quarantine s, outbox s, pause S, activity S, worker S, status S, schema S",
}
# what MySQL needs besides: to write a row again that is there, and to be shown what the check at start asks
MORE_ON_MYSQL = {("consumer", "outbox"): "U", ("relay", "inbox"): "S"}

SHOP = """
import os
from datetime import timedelta
from tests.support.recording import Recorder
from txbox import App, Message, RelayPolicy, Retry, RetryPolicy
from txbox.errors import MessageRefused

now = RetryPolicy(base=timedelta(0))
app = App(os.environ["SHOP_URL"], relaying=RelayPolicy(keep_sent=timedelta(days=1), retry=now))
app.publish(Recorder(lambda message: MessageRefused("no") if message.json() == "bad" else None), topics=["out"])

@app.handler("orders", consumer="billing", sequence="body.version", retry=now)
def bill(message: Message[dict], tx):
    app.outbox.stage(tx, "out", message.body["out"], key="k")
    app.outbox.stage(tx, "out", "ordered", key="k", ordered=True)
    app.effects.stage(tx, "mail", {})
    app.outbox.stage(tx, "inside", {})

@app.handler("inside", consumer="inside")
def inside(message: Message[dict], tx): ...

@app.effect("mail")
def mail(message: Message[dict]):
    return {"sent": True}
"""


@dataclass(frozen=True, slots=True)
class Roles:
    """One login for each kind of role, and one with the rights of several."""

    owner: str
    urls: dict[str, str]
    directory: Path

    def txbox(self, kind: str, *words: str, code: int = 0) -> str:
        app = {"SHOP_URL": self.urls[kind], "TXBOX_APP": "shop:app"}
        done = subprocess.run(
            [sys.executable, "-m", "txbox", *words],
            cwd=self.directory, env={**os.environ, **app, "PYTHONPATH": str(ROOT)},
            capture_output=True, text=True, timeout=DEADLINE_S, check=False,
        )  # fmt: skip
        assert done.returncode == code, (kind, words, done.stdout, done.stderr)
        return done.stdout + done.stderr


@pytest.fixture
def roles(database: FreshDatabase, raw: Callable[[str], Raw], tmp_path: Path) -> Iterator[Roles]:
    if database.name == "sqlite":
        pytest.skip("SQLite has no roles: the rights are those of the file")
    (tmp_path / "shop.py").write_text(SHOP)
    mysql = database.name != "postgresql"
    rights = grants(dialect("mysql" if mysql else "postgresql"))
    wanted = {**{kind: (kind,) for kind in rights}, "local relay": ("consumer", "relay")}
    parts, admin = urlsplit(database.url), raw(database.url)
    password = secrets.token_hex(8)
    urls: dict[str, str] = {}
    names: list[str] = []
    for kind, kinds in wanted.items():
        name = f"txb_{secrets.token_hex(6)}"
        role = f"'{name}'@'%'" if mysql else name
        admin.execute(
            f"CREATE USER {role} IDENTIFIED BY '{password}'"
            if mysql
            else f"CREATE ROLE {role} LOGIN PASSWORD '{password}'"
        )
        names.append(role)
        for each in kinds:
            for statement in split(rights[each].replace(f"<{each}>", role)):
                admin.execute(statement)
        host = parts.netloc.rpartition("@")[2]
        urls[kind] = parts._replace(netloc=f"{name}:{password}@{host}").geturl()
    yield Roles(database.url, urls, tmp_path)
    for role in names:
        if mysql:
            admin.execute(f"DROP USER {role}")
        else:
            admin.execute(f"DROP OWNED BY {role}")
            admin.execute(f"DROP ROLE {role}")


def test_each_role_does_its_part_of_what_leaves(roles: Roles, raw: Callable[[str], Raw]) -> None:
    for version, out in ((2, '"later"'), (1, '"bad"')):
        data = f'{{"version": {version}, "out": {out}}}'
        roles.txbox(
            "consumer", "send", "orders", "--id", str(version), "--key", "k", "--data", data
        )
    ran = roles.txbox("consumer", "run", "--once", "--no-maintenance", "--no-relay", "--json")
    assert '"processed": 4' in ran, ran
    look = raw(roles.owner)
    assert look.value("SELECT count(*) FROM txbox_outbox") == 6
    assert look.value("SELECT last FROM txbox_sequence") == 2
    sent = roles.txbox("local relay", "relay", "--once")
    assert "5 sent, 0 failed, 1 dead" in sent
    assert look.value("SELECT count(*) FROM txbox_inbox WHERE consumer = 'inside'") == 2
    assert '"outbox"' in roles.txbox("readonly", "status", "--json")
    assert "MessageRefused" in roles.txbox("readonly", "outbox", "list", "--status", "dead")
    assert "lacks a right" in roles.txbox("readonly", "outbox", "retry", "--all", "--yes", code=1)
    assert "1 outgoing message retried" in roles.txbox(
        "operator", "outbox", "retry", "--all", "--yes"
    )
    assert "1 dead" in roles.txbox("relay", "relay", "--once")
    assert "1 outgoing message discarded" in roles.txbox(
        "operator", "outbox", "discard", "--all", "--yes"
    )
    roles.txbox("operator", "list")
    pruned = roles.txbox("maintenance", "prune", "--outbox", "--older-than", "1ms", "--yes")
    assert "deleted" in pruned
    roles.txbox("maintenance", "maintain", "--once")
    assert (
        look.value("SELECT count(*) FROM txbox_outbox WHERE status IN ('sent', 'discarded')") == 0
    )


def test_roles_have_no_right_to_more(roles: Roles, raw: Callable[[str], Raw]) -> None:
    forbidden: dict[str, str] = {
        "consumer": "DELETE FROM txbox_outbox",
        "relay": "INSERT INTO txbox_outbox (id, topic) VALUES ('1', 't')",
        "operator": "DELETE FROM txbox_outbox",
        "maintenance": "INSERT INTO txbox_audit (actor, action, filter, affected) VALUES ('a', 'b', 'c', 0)",
        "readonly": "UPDATE txbox_outbox SET status = 'sent'",
    }
    for kind, statement in forbidden.items():
        look: Any = raw(roles.urls[kind])
        with pytest.raises(DENIED, match=r"denied"):
            look.execute(statement)


def test_alerts_are_staged_sent_and_reviewed_with_these_rights(
    roles: Roles, raw: Callable[[str], Raw]
) -> None:
    recorder, look = Recorder(), raw(roles.owner)

    def app_of(kind: str) -> App:
        app = App(roles.urls[kind], alerts=recorder)

        # versions are what a review reads of another table
        @app.handler("orders", consumer="billing", sequence="body.version")
        def bill(message: Message[Any], tx: Any) -> None:
            raise Reject("never")

        return app

    with app_of("consumer") as app:
        message = Message[Any](topic="orders", id="1", key="k", payload=b'{"version": 1}')
        assert app.process(message) is Outcome.DEAD
    with app_of("relay") as app:
        # the consumers of an App that also runs them have that role, too
        assert worker(app, kind="relay", once=True).run() == 0
    # one that waits for its version is looked at, too
    look.execute(
        "UPDATE txbox_inbox SET status = 'pending', has_payload = TRUE, next_attempt_at = '2020-01-01 00:00:00'"
    )
    look.execute("UPDATE txbox_job SET lease_until = updated_at WHERE name LIKE 'alert:%'")
    with app_of("maintenance") as app:
        assert run_once(app, "alerts", Task(at_any_time=True)).rows == 2
    with app_of("relay") as app:
        assert worker(app, kind="relay", once=True).run() == 0
    told = {(alert["code"], alert["state"]) for alert in recorder.bodies}
    assert told == {
        ("dead-messages", "open"), ("dead-messages", "resolved"), ("consumer-unserved", "open")
    }  # fmt: skip


# -- and nothing else -----------------------------------------------------------------------------


def denied(look: Raw, statement: str) -> bool:
    """Say whether a statement is refused for want of a right; it may fail for another reason, and changes nothing."""
    try:
        look.execute(statement)
    except psycopg.errors.InsufficientPrivilege:
        return True
    # not pymysql.err: once Django has loaded it as MySQLdb, that is another module with other classes
    except pymysql.MySQLError as error:
        return error.args[0] in _DENIED_BY_MYSQL
    except psycopg.Error as error:
        # a view that nobody can write to
        return isinstance(error, psycopg.errors.ObjectNotInPrerequisiteState)
    return False


def rights_of(look: Raw, table: str, columns: list[str]) -> str:
    """What this login may do with a table, found out by trying."""
    found = ""
    if not denied(look, f"SELECT * FROM {table} WHERE 1 = 0"):
        found += "S"
    elif not all(denied(look, f"SELECT {column} FROM {table} WHERE 1 = 0") for column in columns):
        found += "s"
    insert = "() VALUES ()" if look.product == "mysql" else "DEFAULT VALUES"
    if not denied(look, f"INSERT INTO {table} {insert}"):
        found += "I"
    if not all(
        denied(look, f"UPDATE {table} SET {column} = NULL WHERE 1 = 0") for column in columns
    ):
        found += "U"
    if not denied(look, f"DELETE FROM {table} WHERE 1 = 0"):
        found += "D"
    return found


def test_every_role_may_do_what_is_written_here_and_nothing_else(
    roles: Roles, raw: Callable[[str], Raw]
) -> None:
    owner = raw(roles.owner)
    mysql = owner.product == "mysql"
    schema = "database()" if mysql else "current_schema()"
    columns: dict[str, list[str]] = {}
    for table, column in owner.rows(
        "SELECT table_name, column_name FROM information_schema.columns"
        f" WHERE table_schema = {schema} AND table_name LIKE 'txbox%' ORDER BY table_name"
    ):
        columns.setdefault(str(table), []).append(f"`{column}`" if mysql else f'"{column}"')
    assert len(columns) >= 13
    for kind, written in RIGHTS.items():
        wanted = dict(pair.split() for pair in written.split(", "))
        if mysql:
            for (of, table), more in MORE_ON_MYSQL.items():
                if of == kind:
                    wanted[table] = wanted.get(table, "") + more
        look = raw(roles.urls[kind])
        for table, names in columns.items():
            may = rights_of(look, table, names)
            assert may == wanted.get(table.removeprefix("txbox_"), ""), f"{kind} on {table}: {may}"
        if not mysql and kind in ("operator", "readonly", "viewer"):
            # or the newest row is found by reading all of them
            for name in ("inbox_arrival", "outbox_number"):
                privileged = "SELECT has_sequence_privilege(?, 'SELECT')"
                assert look.value(privileged, (f"txbox_{name}_seq",)), f"{kind} on {name}"


FORBIDDEN = {
    "postgresql": (
        "CREATE TABLE mine (id integer)", "ALTER TABLE txbox_inbox DISABLE TRIGGER ALL", "TRUNCATE txbox_inbox",
        "DROP TABLE txbox_pause", "CREATE INDEX mine ON txbox_inbox (topic)", "SELECT * FROM effect",
        "ALTER TABLE txbox_audit ADD COLUMN mine text", "SET session_replication_role = 'replica'",
        "CREATE OR REPLACE VIEW txbox_status AS SELECT 1",
        "CREATE FUNCTION mine() RETURNS integer LANGUAGE sql AS 'SELECT 1'",
        "COPY txbox_inbox TO PROGRAM 'true'",
    ),
    "mysql": (
        "CREATE TABLE mine (id integer)", "ALTER TABLE txbox_inbox ADD COLUMN mine integer",
        "TRUNCATE TABLE txbox_inbox", "DROP TABLE txbox_pause", "CREATE INDEX mine ON txbox_inbox (consumer)",
        "SELECT * FROM effect", "SELECT * FROM mysql.user", "CREATE VIEW mine AS SELECT 1",
        "SET GLOBAL max_connections = 10", "GRANT SELECT ON txbox_inbox TO CURRENT_USER()",
        "RENAME TABLE txbox_pause TO mine",
    ),
}  # fmt: skip


def test_no_role_changes_tables_or_reads_what_is_not_of_txbox(
    roles: Roles, raw: Callable[[str], Raw]
) -> None:
    owner = raw(roles.owner)
    owner.execute("CREATE TABLE effect (id integer)")
    old = owner.product == "postgresql" and int(owner.value("SHOW server_version_num")) < 150_000
    for kind in RIGHTS:
        look = raw(roles.urls[kind])
        for statement in FORBIDDEN[owner.product]:
            # everybody may create in `public` there: `init` says so
            if not (old and statement.startswith("CREATE")):
                assert denied(look, statement), f"{kind}: {statement}"
    if owner.product == "postgresql":
        # what runs with the owner's rights is nobody's but those who got it
        definers = (
            "SELECT oid::regprocedure::text FROM pg_proc WHERE prosecdef AND proname LIKE 'txbox%'"
        )
        for (function,) in owner.rows(definers):
            for kind, url in roles.urls.items():
                may = raw(url).value(
                    "SELECT has_function_privilege(current_user, ?, 'EXECUTE')", (function,)
                )
                assert not may, f"{kind} may call {function}"


def test_each_role_works_without_a_word_about_rights(
    roles: Roles, raw: Callable[[str], Raw], caplog: pytest.LogCaptureFixture
) -> None:
    broker = Recorder()
    with App(roles.urls["consumer"]) as app, caplog.at_level(logging.INFO, "txbox"):
        app.publish(broker, topics=["out"])

        @app.handler("orders", consumer="billing", retry=RetryPolicy(max_attempts=1))
        def bill(message: Message[Any], tx: Any) -> None:
            app.outbox.stage(tx, "out", {})
            if message.type == "bad":
                raise LookupError("declined")

        orders = [Message(id=str(number), topic="orders", payload=b"{}") for number in range(4)]
        orders[3] = Message(id="3", topic="orders", payload=b"{}", type="bad")
        app.consume(Memory([*orders, Message(id="0", topic="orders", payload=b"[]")]))
        assert worker(app, once=True, relay=False).run() == 0
    with App(roles.urls["relay"]) as app, caplog.at_level(logging.INFO, "txbox"):
        app.publish(broker, topics=["out"])
        relayed(app)
    assert len(broker.sent) == 3
    billing = InboxFilter(consumer="billing")
    with Admin(roles.urls["operator"]) as operator:
        assert operator.pause("billing", reason="a bad release")
        assert [pause.consumer for pause in operator.pauses()] == ["billing"]
        assert operator.resume("billing")
        operator.workers()
        operator.activity()
        assert len(operator.list(billing)) == 4
        named = InboxFilter(consumer="billing", message_id="3")
        assert operator.show(named, reveal=True)[0].payload == b"{}"
        assert operator.reveal(named, reason="a complaint")[0].payload == b"{}"
        assert operator.explain("3").places
        operator.edit("billing", "3", payload=b'{"right": 1}')
        assert operator.retry(named).count == 1
        assert operator.discard(named).count == 1
        assert operator.accept(QuarantineFilter(), message_id="4").count == 1
        assert (
            operator.replay(
                InboxFilter(consumer="billing", status="pending"), as_consumer="copy"
            ).stored
            == 1
        )
    with Admin(roles.urls["readonly"]) as readonly:
        readonly.workers()
        readonly.pauses()
        readonly.activity()
        assert readonly.show(named, reveal=True)[0].status == "discarded"
        assert readonly.explain("3").places
        with pytest.raises(StoreError):
            readonly.pause("billing")
        with pytest.raises(StoreError):
            readonly.discard(InboxFilter(consumer="billing", status="pending"))
    with Admin(roles.urls["viewer"]) as viewer:
        viewer.workers()
        viewer.pauses()
        viewer.activity()
        counts = {status.consumer: status.counts for status in viewer.status()}
        assert counts["billing"] == {"processed": 3, "discarded": 1, "pending": 1}
        with pytest.raises(StoreError):
            viewer.list(billing)
        with pytest.raises(StoreError):
            viewer.show(named)
        with pytest.raises(StoreError):
            viewer.pause("billing")
    for kind in ("consumer", "relay", "maintenance"):
        with Admin(roles.urls[kind]) as other, pytest.raises(StoreError):
            other.resume("billing")
    told = [record for record in caplog.records if "rights" in record.getMessage()]
    assert not told, told
    # who did what: the login stands beside the name that was given
    look = raw(roles.owner)
    login = urlsplit(roles.urls["operator"]).username
    logins = {
        str(value).partition("@")[0] for (value,) in look.rows("SELECT login FROM txbox_audit")
    }
    assert logins == {login}
