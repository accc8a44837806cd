"""Wrong configuration: one clear sentence, exit status 2, nothing consumed, no password."""

from __future__ import annotations

import contextlib
import sqlite3
import subprocess
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.command import SHOP, Command
from tests.support.databases import NewDatabase, Raw
from tests.support.waiting import DEADLINE_S
from txbox import Outbox
from txbox.cli import _PROGRAM, make_parser, run
from txbox.store.schema import VERSION

SECRET = "hunter2"


@pytest.mark.parametrize(
    ("url", "says"),
    [
        (f"oracle://shop:{SECRET}@db/shop", "unsupported database URL scheme 'oracle': use postgresql://"),
        (SECRET, "This is not a database URL: use postgresql://"),
        ("shop.db", "'shop.db' looks like a path, but App takes a URL: for this SQLite file use sqlite:///shop.db."),
        ("/data/shop", "use sqlite:////data/shop."),
        (f"postgresql://shop:{SECRET}@127.0.0.1:1", "names no database: use postgresql://host/name"),
        (f"mysql://shop:{SECRET}@127.0.0.1:1/", "names no database"),
        ("sqlite://", "use a file, sqlite:///name.db"),
        ("sqlite:///:memory:", "use a file, sqlite:///name.db"),
        (f"sqlite://shop:{SECRET}@host/x.db", "use sqlite:///relative.db"),
        (f"postgresql://shop:{SECRET}@127.0.0.1:1/shop", "check the URL, and that the server is running"),
        (f"mysql://shop:{SECRET}@127.0.0.1:1/shop", "check the URL, and that the server is running"),
        (f"postgresql://shop:a/{SECRET}@127.0.0.1:1/shop", "percent-encode special characters"),
        (f"mysql://shop:#{SECRET}@127.0.0.1:1/shop", "percent-encode special characters"),
        (f"postgresql://127.0.0.1:1/shop?password={SECRET}", "check the URL"),
    ],
)  # fmt: skip
def test_a_wrong_url_or_an_unreachable_database(command: Command, url: str, says: str) -> None:
    for words in (("status",), ("init",), ("prune",), ("maintain", "--once")):
        ended = command(*words, "--database", url, code=2)
        assert says in ended.sentence
        assert SECRET not in ended.err + ended.out


def test_the_environment_gives_the_database(command: Command, sqlite_url: str) -> None:
    named = {"TXBOX_DATABASE_URL": sqlite_url}
    assert command("status", env=named).out == "The inbox is empty.\n"
    assert (
        "--app or --database, not both"
        in command("status", "--app", "x", "--database", "y", code=2).sentence
    )
    assert "Give --app module:app or --database URL" in command("status", code=2).sentence


def test_a_password_given_in_the_wrong_place_is_not_echoed(command: Command) -> None:
    ended = command("status", f"postgresql://shop:{SECRET}@db/shop", code=2)
    assert SECRET not in ended.err
    assert "unrecognized arguments: postgresql://shop:***@db/shop" in ended.err


def test_missing_tables_name_the_command(command: Command, empty_database_url: str) -> None:
    for words in (
        ("status",),
        ("list",),
        ("schema", "check"),
        ("retry", "--all", "--yes"),
        ("rescue",),
        ("prune",),
        ("maintain", "--once"),
    ):
        ended = command(*words, "--database", empty_database_url, code=2)
        assert "run `txbox init`" in ended.sentence
    command("init", "--database", empty_database_url)
    assert f"version {VERSION}" in command("schema", "check", "--database", empty_database_url).out


def test_tables_of_a_later_release_name_the_upgrade(command: Command, sqlite_url: str) -> None:
    with Raw(sqlite_url) as raw:
        raw.execute("INSERT INTO txbox_schema (version, compatible_from) VALUES (99, 99)")
    assert "upgrade txbox" in command("status", "--database", sqlite_url, code=2).sentence


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("nowhere:app", "There is no module 'nowhere'"),
        ("shop.deep:app", "There is no module 'shop.deep'"),
        ("shop:nope", "shop has no 'nope', but it has app: give --app shop:app"),
        ("shop:settings", "shop:settings is a dict, not a txbox.App"),
        ("shop.py", "write module:app"),
        ("./shop:app", "write module:app"),
        (":app", "write module:app"),
        ("broken:app", "broken cannot be imported: ZeroDivisionError: division by zero"),
        ("syntax:app", "syntax cannot be imported: SyntaxError"),
        ("needs:app", "needs imports 'surely_not_installed', which is not installed here"),
        ("lazy:app", "lazy cannot be imported: KeyError: 'SHOP_URL'"),
    ],
)
def test_a_wrong_app_path(command: Command, path: str, says: str) -> None:
    command.file("shop.py", "import txbox\napp = txbox.App('sqlite:///shop.db')\nsettings = {}\n")
    command.file("broken.py", "app = 1 / 0\n")
    command.file("syntax.py", "app = = 1\n")
    command.file("needs.py", "import surely_not_installed\n")
    command.file("lazy.py", "import os\n\ndef __getattr__(name): return os.environ['SHOP_URL']\n")
    for words in (("status", "--app", path), ("run", path)):
        assert says in command(*words, code=2).sentence
    assert not (command.directory / "shop.db").exists()


_HANDLERS = {
    "signature": (
        'def bill(message): ...\n\napp.handler("orders", consumer="billing")(bill)\n',
        "bill must take (message, tx), but its signature is (message)",
    ),
    "overlap": (
        (
            "def one(message, tx): ...\ndef two(message, tx): ...\n"
            'app.handler("orders", consumer="billing")(one)\napp.handler("*", consumer="billing")(two)\n'
        ),
        "overlap",
    ),
    "generator": (
        'def bill(message, tx):\n    yield\n\napp.handler("orders", consumer="billing")(bill)\n',
        "a handler must return, not yield",
    ),
    "option": (
        'app.handler("orders", consumer="billing", concurrency=0)(lambda message, tx: None)\n',
        "concurrency is 0: it must be 1 or more",
    ),
}


@pytest.mark.parametrize("wrong", _HANDLERS)
def test_a_wrong_handler_ends_before_anything_is_consumed(
    command: Command, sqlite_url: str, wrong: str
) -> None:
    source, says = _HANDLERS[wrong]
    prefix = "import os\nfrom txbox import App\nfrom txbox.brokers.file import File\n"
    prefix += (
        'app = App(os.environ["SHOP_URL"])\napp.consume(File("events.jsonl", topic="orders"))\n'
    )
    command.file("shop.py", prefix + source)
    command.file(
        "events.jsonl",
        '{"specversion": "1.0", "id": "1", "source": "s", "type": "t", "data": {}}\n',
    )
    ended = command("run", "shop:app", "--once", env={"SHOP_URL": sqlite_url}, code=2)
    assert says in ended.sentence
    with Raw(sqlite_url) as raw:
        assert raw.value("SELECT count(*) FROM txbox_inbox") == 0
        assert raw.value("SELECT count(*) FROM txbox_quarantine") == 0


def test_a_handler_of_the_sync_async_mismatch(command: Command, postgresql_url: str) -> None:
    command.file(
        "shop.py",
        "import os\nimport sqlalchemy\nfrom txbox import App\n"
        'app = App(sqlalchemy.create_engine(os.environ["SHOP_URL"]))\n'
        '@app.handler("orders", consumer="billing")\nasync def bill(message, tx): ...\n',
    )
    url = postgresql_url.replace("postgresql://", "postgresql+psycopg://")
    ended = command("run", "shop:app", env={"SHOP_URL": url}, code=2)
    assert "bill is async, but" in ended.sentence
    assert "make it a `def` function" in ended.sentence


def test_run_against_missing_tables_or_a_server_that_is_away(
    command: Command, new_database: NewDatabase
) -> None:
    command.file("shop.py", SHOP)
    empty = new_database("sqlite", schema=False)
    ended = command("run", "shop:app", "--once", env={"SHOP_URL": empty}, code=2)
    assert "run `txbox init`" in ended.err
    away = f"postgresql://shop:{SECRET}@127.0.0.1:1/shop"
    ended = command("run", "shop:app", "--once", env={"SHOP_URL": away}, code=2)
    assert "check" in ended.err
    assert SECRET not in ended.err


def test_commands_that_run_handlers_take_the_app(command: Command, sqlite_url: str) -> None:
    for words in (("run",), ("send", "orders", "--data", "{}"), ("replay", "billing", "1")):
        ended = command(*words, "--database", sqlite_url, code=2)
        assert "takes the App: give --app module:app" in ended.sentence


def test_a_relay_without_the_app_gives_no_message_up(
    command: Command, sqlite_url: str, raw: Callable[[str], Raw]
) -> None:
    view = raw(sqlite_url)
    file = sqlite_url.removeprefix("sqlite:///")
    with contextlib.closing(sqlite3.connect(file)) as connection, connection:
        connection.execute("BEGIN IMMEDIATE")
        Outbox().stage(connection, "invoices", {"order": 1})
    for words in (("--database", sqlite_url), ()):
        ended = command("relay", "--once", *words, env={"TXBOX_DATABASE_URL": sqlite_url}, code=2)
        assert "takes the App: give --app module:app" in ended.sentence
    assert view.value("SELECT status FROM txbox_outbox") != "dead"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            ("retry",),
            "Which messages are to be retried? Give CONSUMER and ids, a filter, or --all.",
        ),
        (("discard", "billing"), "Which messages of 'billing'?"),
        (("retry", "--consumer", "a", "--all"), "Give --all or a filter, not both"),
        (("retry", "billing", "1", "--topic", "x"), "message ids or a filter, not both"),
        (("replay", "--topic", "x", "--as", "other"), "give --consumer"),
        (
            ("replay", "--as", "other"),
            "A replay is for one consumer: give --consumer, or CONSUMER and ids.",
        ),
    ],
)
def test_a_change_must_say_what_it_means(
    command: Command, sqlite_url: str, words: tuple[str, ...], says: str
) -> None:
    assert says in command(*words, "--database", sqlite_url, code=2).sentence


def test_replay_offers_no_option_that_it_refuses(command: Command) -> None:
    assert "--all" not in command("replay", "--help").out


def test_send_refuses_what_is_no_message(command: Command, sqlite_url: str) -> None:
    command.file("shop.py", SHOP)
    env = {"SHOP_URL": sqlite_url, "TXBOX_APP": "shop:app"}
    for words, says in (
        (("orders", "--data", "{nope"), "--data is not JSON"),
        (("orders", "--data", "{}", "--header", "x"), "--header takes NAME=VALUE"),
        (("orders", "--file", "missing.json"), "missing.json cannot be read: No such file"),
        (("invoices", "--data", "{}"), "No handler consumes topic 'invoices'"),
    ):
        assert says in command("send", *words, env=env, code=2).sentence


def test_a_child_does_not_import_a_module_of_the_working_directory(tmp_path: Path) -> None:
    (tmp_path / "txbox.py").write_text("raise SystemExit('taken for txbox')")
    words = ["run", "--app", "shop:app", "--processes", "2"]
    args = make_parser().parse_args(words, Namespace(program=_PROGRAM))
    child = [*run._child(args), "--help"]
    done = subprocess.run(
        child, cwd=tmp_path, capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("grace", ["12d", "25s", "1ms"])
def test_a_child_gets_a_grace_that_it_can_read(grace: str) -> None:
    words = ["run", "--app", "shop:app", "--processes", "2", "--grace", grace]
    args = make_parser().parse_args(words, Namespace(program=_PROGRAM))
    child = make_parser().parse_args(run._child(args)[len(_PROGRAM) :])
    assert args.grace / 2 < child.grace <= args.grace


def test_an_argument_that_is_no_text_is_refused(command: Command, sqlite_url: str) -> None:
    for words in (
        ("show", "billing", "\udcff"),
        ("retry", "billing", "\udcff"),
        ("list", "--topic", "\udcff"),
        ("pause", "\udcff"),
    ):
        ended = command(*words, "--database", sqlite_url, code=2)
        assert "is not valid UTF-8" in ended.err


def test_an_engine_of_asyncpg_serves_every_command(command: Command, postgresql_url: str) -> None:
    command.file(
        "shop.py",
        "import os\nfrom sqlalchemy.ext.asyncio import create_async_engine\nfrom txbox import App\n"
        'app = App(create_async_engine(os.environ["SHOP_URL"]))\n'
        '@app.handler("orders", consumer="billing")\nasync def bill(message, tx): ...\n',
    )
    url = postgresql_url.replace("postgresql://", "postgresql+asyncpg://")
    env = {"SHOP_URL": url, "TXBOX_APP": "shop:app"}
    for words in (
        ("init",),
        ("schema", "check"),
        ("send", "orders", "--data", "{}"),
        ("maintain", "--once"),
        ("prune", "--older-than", "1d", "--yes"),
        ("rescue",),
        ("relay", "--once"),
    ):
        ended = command(*words, env=env)
        assert "RuntimeWarning" not in ended.err, words
