"""A rolling deploy: this release on the tables of earlier ones, and the release before it on these tables."""

from __future__ import annotations

import io
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.docs.pages import ROOT
from tests.support.command import SHOP, Command
from tests.support.databases import FreshDatabase, NewDatabase, Raw
from txbox import App, Message, Outcome, Reject
from txbox.errors import SchemaError
from txbox.store import schema as tables
from txbox.store.dialect import dialect as load_dialect
from txbox.store.schema import migration_text, split

RawOf = Callable[[str], Raw]


def _tables_of(version: int, database: FreshDatabase, new: NewDatabase, raw: RawOf) -> str:
    """URL of a database with the tables as they were at this version."""
    url = new(database.name, schema=False)
    view = raw(url)
    for statement in split(
        migration_text(load_dialect(database.kind.dialect, None), None, upto=version)
    ):
        view.execute(statement)
    return url


@pytest.mark.parametrize("version", range(tables.OLDEST_USABLE, tables.VERSION + 1))
def test_this_release_works_on_every_version_that_it_says(
    database: FreshDatabase, new_database: NewDatabase, raw: RawOf, version: int
) -> None:
    url = _tables_of(version, database, new_database, raw)
    with App(url) as app:

        @app.handler("orders", consumer="billing")
        def bill(message: Message[Any], tx: Any) -> None:
            app.outbox.stage(tx, "letters", {})
            if message.id == "bad":
                raise Reject("declined")

        @app.handler("letters", consumer="post")
        def post(message: Message[Any], tx: Any) -> None: ...

        def process(name: str) -> Outcome:
            return app.process(Message(id=name, topic="orders", payload=b"{}"))

        assert [process("1"), process("1"), process("bad")] == [
            Outcome.PROCESSED, Outcome.DUPLICATE, Outcome.DEAD,
        ]  # fmt: skip
        assert app.init() == (version, tables.VERSION)
        assert [process("1"), process("bad"), process("2")] == [
            Outcome.DUPLICATE, Outcome.DUPLICATE, Outcome.PROCESSED,
        ]  # fmt: skip
    assert raw(url).value("SELECT count(*) FROM txbox_outbox") == 2


def test_older_tables_are_refused_before_anything_is_consumed(
    database: FreshDatabase, new_database: NewDatabase, raw: RawOf
) -> None:
    url = _tables_of(tables.OLDEST_USABLE - 1, database, new_database, raw)
    with App(url) as app:

        @app.handler("orders", consumer="billing")
        def bill(message: Message[Any], tx: Any) -> None:
            raise AssertionError("not to be run")

        with pytest.raises(SchemaError, match="run `txbox schema apply`"):
            app.process(Message(id="1", topic="orders", payload=b"{}"))
    assert raw(url).value("SELECT count(*) FROM txbox_inbox") == 0


@pytest.mark.parametrize("usable", [True, False])
def test_newer_tables_say_whether_this_release_may_use_them(
    command: Command, database: FreshDatabase, raw: RawOf, usable: bool
) -> None:
    after = tables.VERSION + 1
    raw(database.url).execute(
        "INSERT INTO txbox_schema (version, compatible_from) VALUES (?, ?)",
        (after, tables.VERSION if usable else after),
    )
    checked = command("schema", "check", "--database", database.url, code=0 if usable else 2)
    if not usable:
        assert "upgrade txbox" in checked.sentence


def _git(*words: str) -> bytes:
    return subprocess.run(["git", *words], cwd=ROOT, check=True, capture_output=True).stdout


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source as it was before the tables changed last."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a checkout")
    changed = _git("log", "-1", "--format=%H", "-G^VERSION = ", "--", "src/txbox/store/schema.py")
    try:
        archived = _git("archive", f"{changed.decode().strip()}^", "src/txbox")
    except subprocess.CalledProcessError:
        pytest.skip("a checkout without the history of the tables")
    directory = tmp_path_factory.mktemp("before")
    with tarfile.open(fileobj=io.BytesIO(archived)) as archive:
        archive.extractall(directory, filter="data")
    return directory / "src"


@pytest.mark.slow
def test_the_release_before_shares_these_tables_with_this_one(
    command: Command, database: FreshDatabase, raw: RawOf, before: Path
) -> None:
    command.file("shop.py", SHOP)
    view = raw(database.url)
    view.execute("CREATE TABLE effect (id varchar(40))")
    shop = {**command.environment, "TXBOX_APP": "shop:app", "SHOP_URL": database.url}
    this = Command(command.directory, shop)
    old = Command(command.directory, {**shop, "PYTHONPATH": str(before)})
    asked = "import txbox.store.schema as s; print(s.__file__, s.VERSION)"
    assert old(python=["-c", asked]).out.startswith(str(before))
    assert not old(python=["-c", asked]).out.endswith(f" {tables.VERSION}\n")

    old("schema", "check")
    for number, (sender, worker) in enumerate([(old, this), (this, old)]):
        done, failed = f"done-{number}", f"failed-{number}"
        sender("send", "orders", "--id", done, "--data", "{}")
        worker("run", "--once")
        assert "duplicate" in sender("send", "orders", "--id", done, "--data", "{}").out
        worker("send", "orders", "--id", failed, "--data", "{}")
        worker("run", "--once", env={"SHOP_FAILS": "1"}, code=1)
        sender("retry", "billing", failed)
        sender("run", "--once")
    made = sorted(str(row[0]) for row in view.rows("SELECT id FROM effect"))
    assert made == ["done-0", "done-1", "failed-0", "failed-1"]
    states = view.rows("SELECT DISTINCT status FROM txbox_inbox")
    assert len(states) == 1
