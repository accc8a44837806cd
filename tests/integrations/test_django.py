"""The Django app in the example's project: migrations, checks, models, the admin's verbs, the command, the signal."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from django.db import connections

from tests.docs.pages import ROOT
from tests.support.databases import NewDatabase, Raw
from tests.support.django_project import configured
from tests.support.waiting import DEADLINE_S
from txbox import App
from txbox.integrations import django as integration
from txbox.integrations.django.operations import Tables
from txbox.store import schema

PROJECT = ROOT / "examples" / "django_shop"


def _environment(url: str) -> dict[str, str]:
    """The variables of libpq, which the settings of the example leave to the environment."""
    parts = urlsplit(url)
    return {
        "PGHOST": parts.hostname or "",
        "PGPORT": str(parts.port or ""),
        "PGUSER": unquote(parts.username or ""),
        "PGPASSWORD": unquote(parts.password or ""),
        "PGDATABASE": parts.path.lstrip("/"),
    }


def _run(directory: Path, url: str, *words: str, code: int = 0) -> str:
    done = subprocess.run(
        [sys.executable, *words],
        cwd=directory,
        env={
            **os.environ, **_environment(url),
            "PYTHONPATH": str(PROJECT), "DJANGO_SETTINGS_MODULE": "settings",
        },
        capture_output=True, text=True, timeout=DEADLINE_S, check=False,
    )  # fmt: skip
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout


def _manage(directory: Path, url: str, *words: str, code: int = 0) -> str:
    return _run(directory, url, str(PROJECT / "manage.py"), *words, code=code)


@pytest.fixture
def shop(new_database: NewDatabase) -> str:
    return new_database("postgresql", schema=False)


# one process for what needs the tables: most of its time is Django's start
_SESSION = """
import re
import django; django.setup()
from django.contrib.auth.models import Permission, User
from django.core import checks
from django.core.management import call_command
from django.test import Client
from django.urls import reverse
# what the first `migrate` checks before it creates the tables
assert checks.run_checks(databases=["default"]) == []
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
def acts(user, verb, *rows, **more):
    client.force_login(user)
    data = {"action": verb, "_selected_action": [row.pk for row in rows], **more}
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
assert b"1 message retried" in done.content, done.content
other = InboxMessage.objects.get(message_id="m-9")
asked = acts(operator, "discard", other)
assert b"Discard 1 message?" in asked.content and b"invoicing m-9 (dead)" in asked.content, asked.content
assert InboxMessage.objects.get(pk=other.pk).status == "dead"
# as the page sends it
form = dict(re.findall(rb'name="(_selected_action|select_across|action)" value="([^"]*)"', asked.content))
assert form == {b"_selected_action": b"%d" % other.pk, b"select_across": b"0", b"action": b"discard"}, form
assert b"1 message discarded." in acts(operator, "discard", other, confirmed="Discard").content
assert Worker(app, once=True, install_signals=False).run() == 0
statuses = dict(InboxMessage.objects.values_list("message_id", "status"))
assert statuses["m-8"] == "processed" and statuses["m-9"] == "discarded", statuses
from txbox.admin import Admin
audit = Admin(app).audit()
assert {(row.actor, row.action) for row in audit} == {("operator", "retry"), ("operator", "discard")}, audit
done = InboxMessage.objects.get(message_id="m-8")
again = acts(operator, "retry", done).content
# Django capitalises a message, which would be the consumer's name
assert b"Not retried: invoicing m-8 is processed: its payload was not kept" in again, again
assert b"replay" not in again and b"1 message" not in again, again
again = acts(operator, "discard", done, confirmed="Discard").content
assert b"Not discarded: invoicing m-8 is processed: discard does not apply" in again, again
assert b"discarded." not in again, again
"""


def test_the_app_in_a_project(tmp_path: Path, shop: str, raw: Callable[[str], Raw]) -> None:
    printed = _run(tmp_path, shop, "-W", "error", "-c", _SESSION)
    assert printed.count("ALERT MessageDead") == 2
    # a new version takes a migration of Django's, too
    assert raw(shop).value("SELECT max(version) FROM txbox_schema") == schema.VERSION


# what was done to migrated tables, and what the check says then
_UNFIT = [
    (
        "INSERT INTO txbox_schema (version, compatible_from) VALUES (99, 99)",
        "The txbox tables are at version 99, which this release (version 1) cannot use.",
        "Upgrade txbox with `pip install -U txbox`.",
    ),
    (
        "DELETE FROM txbox_schema WHERE version > 1; UPDATE txbox_schema SET version = 0",
        "The txbox tables are at version 0, but this release needs 1.",
        "Run `manage.py txbox schema apply`.",
    ),
    (
        "DELETE FROM django_migrations WHERE app = 'txbox'",
        "The txbox tables are at version 0, but this release needs 1.",
        "Run `manage.py migrate`.",
    ),
    (
        (
            "INSERT INTO django_migrations (app, name, applied) VALUES ('txbox', '0001_tables', now()); "
            "DROP TABLE txbox_schema"
        ),
        "The txbox tables are missing.",
        "Run `manage.py txbox init`, or apply the output of `manage.py txbox schema print`.",
    ),
]
_CHECK = """
import json
import django; django.setup()
from django.core import checks
print(json.dumps([(one.id, one.msg, one.hint) for one in checks.run_checks(databases=["default"])]))
"""


def test_tables_that_do_not_fit_this_release(
    tmp_path: Path, shop: str, raw: Callable[[str], Raw]
) -> None:
    _manage(tmp_path, shop, "migrate", "txbox")
    assert json.loads(_run(tmp_path, shop, "-c", _CHECK)) == []
    for change, problem, hint in _UNFIT:
        raw(shop).execute(change)
        assert json.loads(_run(tmp_path, shop, "-c", _CHECK)) == [["txbox.W001", problem, hint]]


def test_the_command_takes_its_app_from_the_settings(tmp_path: Path, shop: str) -> None:
    assert "CREATE TABLE txbox_inbox" in _manage(tmp_path, shop, "sqlmigrate", "txbox", "0001")
    _manage(tmp_path, shop, "txbox", "init")
    # the tables of `txbox init` are taken over
    _manage(tmp_path, shop, "migrate", "txbox")
    assert _manage(tmp_path, shop, "txbox", "run", "--once") == "Nothing to do.\n"


@pytest.mark.parametrize("start", [[str(PROJECT / "manage.py")], ["-m", "django"]])
def test_each_of_several_processes_sets_django_up(
    tmp_path: Path, start: list[str], shop: str, raw: Callable[[str], Raw]
) -> None:
    _manage(tmp_path, shop, "migrate")
    _manage(tmp_path, shop, "txbox", "send", "orders", "--id", "a", "--data", '{"number": 7}')
    # its order is missing, which only a process with Django's models finds out
    assert "matching query does not exist" in _run(
        tmp_path, shop, *start, "txbox", "run", "--once", "--processes", "2", code=1
    )
    assert raw(shop).value("SELECT status FROM txbox_inbox") == "dead"


_TESTS_SETTINGS = """
from settings import *
DATABASES = {{"default": {database!r} | {{"TEST": {{"NAME": {name!r}, "MIGRATE": {migrate}}}}}}}
"""
_TESTS = """
from django.db import connection, transaction
from django.test import TestCase, TransactionTestCase
from shop.messages import app
from shop.models import Order
from txbox import Message, Outcome
from txbox.integrations.django.models import OutgoingMessage

class Process:
    def process(self):
        Order.objects.create(number=7)
        message = Message(id="m-7", topic="orders", payload=b'{"number": 7}')
        self.assertEqual(app.process(message), Outcome.PROCESSED)
        self.assertEqual(app.process(message), Outcome.DUPLICATE)
        with transaction.atomic():
            app.outbox.stage(connection, "orders", b"{}")
        self.assertEqual(OutgoingMessage.objects.count(), 1)
    test_1 = test_2 = process

class Inside(Process, TestCase): pass
class Flushed(Process, TransactionTestCase): pass
"""


@pytest.mark.parametrize("migrate", [False, True])
@pytest.mark.parametrize("vendor", ["postgresql", "sqlite3"])
def test_a_test_run_with_and_without_migrations(
    tmp_path: Path, shop: str, vendor: str, *, migrate: bool
) -> None:
    """Each test finds the tables, and no rows of the test before it, also where tests commit."""
    name = f"{urlsplit(shop).path[1:]}_tests" if vendor == "postgresql" else str(tmp_path / "tests")
    database = {"ENGINE": f"django.db.backends.{vendor}", "NAME": urlsplit(shop).path[1:]}
    settings = _TESTS_SETTINGS.format(database=database, name=name, migrate=migrate)
    (tmp_path / "settings_of_tests.py").write_text(settings)
    (tmp_path / "tests.py").write_text(_TESTS)
    _run(tmp_path, shop, "-m", "django", "test", "--settings", "settings_of_tests", "tests")


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
