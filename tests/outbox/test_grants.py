"""A login with exactly the printed rights can do its work, and no more."""

from __future__ import annotations

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

from tests.conftest import FreshDatabase
from tests.databases import Raw
from txbox.store.dialect import dialect
from txbox.store.schema import grants, split

ROOT = Path(__file__).parents[2]
DENIED = (psycopg.errors.InsufficientPrivilege, pymysql.err.OperationalError)

SHOP = """
import os
from datetime import timedelta
from tests.outbox.recording import Recorder
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
            capture_output=True, text=True, timeout=60, check=False,
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
        for own in kinds:
            for statement in split(rights[own].replace(f"<{own}>", role)):
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
