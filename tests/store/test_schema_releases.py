"""A rolling deploy: a release on the tables of earlier ones, and the release before it on its tables.

No version but the first exists, so that the later ones are invented.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.support.command import SHOP, Command, Ended
from tests.support.databases import FreshDatabase, NewDatabase, Raw
from tests.support.versions import (
    COMPATIBLE_FROM,
    LAST,
    NEXT,
    SOURCE,
    add_migrations,
    released,
)
from txbox import App, Message, Outcome, Reject
from txbox.errors import SchemaError
from txbox.store import schema as tables
from txbox.store.dialect import dialect as load_dialect
from txbox.store.schema import migration_text, split

RawOf = Callable[[str], Raw]
Run = Callable[..., Ended]


@pytest.fixture
def later(tmp_path: Path) -> Iterator[None]:
    """This is a release that writes the last version, and still works with the one before it."""
    with released(tmp_path, LAST, oldest=NEXT):
        yield


def _tables_of(version: int, database: FreshDatabase, new: NewDatabase, raw: RawOf) -> str:
    """URL of a database with the tables as they were at this version."""
    url = new(database.name, schema=False)
    view = raw(url)
    for statement in split(
        migration_text(load_dialect(database.kind.dialect, None), None, upto=version)
    ):
        view.execute(statement)
    return url


@pytest.mark.usefixtures("later")
@pytest.mark.parametrize("version", [NEXT, LAST])
def test_a_release_works_on_every_version_that_it_says(
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
        assert app.init() == (version, LAST)
        assert [process("1"), process("bad"), process("2")] == [
            Outcome.DUPLICATE, Outcome.DUPLICATE, Outcome.PROCESSED,
        ]  # fmt: skip
    view = raw(url)
    assert view.value("SELECT count(*) FROM txbox_outbox") == 2
    applied = view.rows("SELECT version, compatible_from FROM txbox_schema ORDER BY version")
    assert [tuple(row) for row in applied] == [(NEXT - 1, NEXT - 1), *COMPATIBLE_FROM.items()]


@pytest.mark.usefixtures("later")
def test_older_tables_are_refused_before_anything_is_consumed(
    database: FreshDatabase, new_database: NewDatabase, raw: RawOf
) -> None:
    url = _tables_of(NEXT - 1, database, new_database, raw)
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


@pytest.fixture(scope="module")
def next_release(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source as the next release may have it: this one, and one migration more."""
    source = tmp_path_factory.mktemp("next")
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(SOURCE, source / "txbox", ignore=ignored)
    add_migrations(source / "txbox" / "store" / "migrations")
    module = source / "txbox" / "store" / "schema.py"
    before, after = f"\nVERSION = {tables.VERSION}\n", f"\nVERSION = {NEXT}\n"
    text = module.read_text()
    assert text.count(before) == 1
    module.write_text(text.replace(before, after))
    return source


@pytest.mark.slow
def test_this_release_and_the_next_share_the_tables_of_the_next(
    command: Command, database: FreshDatabase, raw: RawOf, next_release: Path
) -> None:
    command.file("shop.py", SHOP)
    view = raw(database.url)
    view.execute("CREATE TABLE effect (id varchar(40))")
    shop = {**command.environment, "TXBOX_APP": "shop:app", "SHOP_URL": database.url}
    old = Command(command.directory, shop)
    later = Command(command.directory, {**shop, "PYTHONPATH": str(next_release)})
    # an interpreter of its own: a warm one has imported this release
    new = partial(later, python=["-m", "txbox"])
    which = "import txbox.store.schema as s; print(s.__file__, s.VERSION)"
    found = later(python=["-c", which]).out
    assert (found.startswith(str(next_release)), found.endswith(f" {NEXT}\n")) == (True, True)

    assert f"from version {tables.VERSION} to {NEXT}" in new("schema", "apply").out
    old("schema", "check")
    assert f"at version {NEXT}: nothing to do" in new("init").out
    pairs: list[tuple[Run, Run]] = [(old, new), (new, old)]
    for number, (sender, worker) in enumerate(pairs):
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
