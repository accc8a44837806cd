"""The Django app in the example's project: migrations, checks, models, the admin's verbs, the command, the signal."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from django.db import connections

from tests.docs.pages import ROOT
from tests.support.databases import Raw
from tests.support.django_project import configured
from tests.support.waiting import DEADLINE_S
from txbox import App
from txbox.integrations import django as integration
from txbox.integrations.django.operations import Tables
from txbox.store import schema

PROJECT = ROOT / "examples" / "django_shop"


def _run(directory: Path, *words: str, code: int = 0) -> str:
    done = subprocess.run(
        [sys.executable, *words],
        cwd=directory,
        env={
            **os.environ, "PYTHONPATH": str(PROJECT), "DJANGO_SETTINGS_MODULE": "settings",
            "SHOP_DATABASE": str(directory / "shop.db"),
        },
        capture_output=True, text=True, timeout=DEADLINE_S, check=False,
    )  # fmt: skip
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout


def _manage(directory: Path, *words: str, code: int = 0) -> str:
    return _run(directory, str(PROJECT / "manage.py"), *words, code=code)


# one process for what needs the tables: most of its time is Django's start
_SESSION = """
import django; django.setup()
from django.contrib.auth.models import Permission, User
from django.core import checks
from django.core.management import call_command
from django.test import Client
from django.urls import reverse
assert [found.id for found in checks.run_checks(databases=["default"])] == ["txbox.W001"]
call_command("migrate", verbosity=0)
call_command("migrate", verbosity=0)
assert checks.run_checks(databases=["default"]) == []
call_command("makemigrations", "--check", "--dry-run", verbosity=0)

# a request that fails keeps neither its order nor its message
from txbox.integrations.django.models import InboxMessage, OutgoingMessage
from shop.models import Order
from shop.messages import app
client = Client(raise_request_exception=False)
assert client.post("/orders/-1").status_code == 500
assert OutgoingMessage.objects.count() == Order.objects.count() == 0
assert client.post("/orders/7").status_code == 201
assert [row.topic for row in OutgoingMessage.objects.all()] == ["orders"]

# the worker takes it; a message about nothing is dead, and the signal says so
from txbox.worker import Worker
assert Worker(app, once=True, install_signals=False).run() == 0
assert Order.objects.get().invoiced
from txbox import Message, Outcome
heard = []
from txbox.integrations.django import dead_letter
def hear(event, **_): heard.append(event.message_id)
dead_letter.connect(hear)
def breaks(**_): raise ZeroDivisionError
dead_letter.connect(breaks)
assert app.process(Message(id="m-8", topic="orders", payload=b'{"number": 8}')) is Outcome.DEAD
assert app.process(Message(id="m-9", topic="orders", payload=b'{"number": 9}')) is Outcome.DEAD
assert heard == ["m-8", "m-9"], heard

# nothing goes around the verbs
dead = InboxMessage.objects.get(message_id="m-8")
for change in (dead.save, dead.delete, InboxMessage.objects.all().delete,
               lambda: InboxMessage.objects.update(status="x"), lambda: InboxMessage.objects.create()):
    try: change()
    except TypeError: pass
    else: raise AssertionError(change)

# who only views gets no verbs; who may change is the actor of the audit
def acts(user, verb, *rows):
    client.force_login(user)
    data = {"action": verb, "_selected_action": [row.pk for row in rows]}
    return client.post(reverse("admin:txbox_inboxmessage_changelist"), data, follow=True)
viewer, operator = (User.objects.create_user(name, is_staff=True) for name in ("viewer", "operator"))
view, change = (Permission.objects.get(codename=f"{verb}_inboxmessage") for verb in ("view", "change"))
viewer.user_permissions.set([view])
operator.user_permissions.set([view, change])
acts(viewer, "retry", dead)
assert InboxMessage.objects.get(pk=dead.pk).status == "dead"
page = client.get(reverse("admin:txbox_inboxmessage_change", args=[dead.pk]))
assert page.status_code == 200 and b"matching query does not exist" in page.content, page.content
assert b"Save" not in page.content and b"Delete" not in page.content
Order.objects.create(number=8)
done = acts(operator, "retry", dead)
assert b"Retry: 1" in done.content, done.content
other = InboxMessage.objects.get(message_id="m-9")
assert b"Discard: 1" in acts(operator, "discard", other).content
assert Worker(app, once=True, install_signals=False).run() == 0
statuses = dict(InboxMessage.objects.values_list("message_id", "status"))
assert statuses["m-8"] == "processed" and statuses["m-9"] == "discarded", statuses
from txbox.admin import Admin
audit = Admin(app).audit()
assert {(row.actor, row.action) for row in audit} == {("operator", "retry"), ("operator", "discard")}, audit
again = acts(operator, "retry", InboxMessage.objects.get(message_id="m-8"))
assert b"Retry: 0" in again.content, again.content
"""


def test_the_app_in_a_project(tmp_path: Path) -> None:
    printed = _run(tmp_path, "-W", "error", "-c", _SESSION)
    assert printed.count("ALERT MessageDead") == 2
    with closing(sqlite3.connect(tmp_path / "shop.db")) as database:
        found = database.execute("SELECT max(version) FROM txbox_schema").fetchall()
        # a new version takes a migration of Django's, too
        assert found == [(schema.VERSION,)]


def test_the_command_takes_its_app_from_the_settings(tmp_path: Path) -> None:
    # offline: the SQL of the tables, and no connection
    assert "CREATE TABLE txbox_inbox" in _manage(tmp_path, "sqlmigrate", "txbox", "0011")
    _manage(tmp_path, "txbox", "init")
    # the tables of `txbox init` are taken over
    _manage(tmp_path, "migrate", "txbox")
    assert _manage(tmp_path, "txbox", "run", "--once") == "Nothing to do.\n"


@pytest.mark.parametrize("start", [[str(PROJECT / "manage.py")], ["-m", "django"]])
def test_each_of_several_processes_sets_django_up(tmp_path: Path, start: list[str]) -> None:
    _manage(tmp_path, "migrate")
    _manage(tmp_path, "txbox", "send", "orders", "--id", "a", "--data", '{"number": 7}')
    # its order is missing, which only a process with Django's models finds out
    assert "matching query does not exist" in _run(
        tmp_path, *start, "txbox", "run", "--once", "--processes", "2", code=1
    )
    with closing(sqlite3.connect(tmp_path / "shop.db")) as database:
        assert database.execute("SELECT status FROM txbox_inbox").fetchall() == [("dead",)]


def test_the_tables_on_every_database(
    empty_database_url: str, raw: Callable[[str], Raw], monkeypatch: pytest.MonkeyPatch
) -> None:
    with configured(empty_database_url) as alias:
        monkeypatch.setattr(integration, "app", lambda: App(django=alias))
        # the second finds nothing to do
        for _ in range(2):
            with connections[alias].schema_editor() as editor:
                Tables(schema.VERSION).database_forwards("txbox", editor, None, None)
        with App(django=alias) as app:
            assert app.init() == (schema.VERSION, schema.VERSION)
    assert raw(empty_database_url).value("SELECT count(*) FROM txbox_inbox") == 0
