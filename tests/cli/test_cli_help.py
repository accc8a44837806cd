"""What a command says to somebody who has mistyped something, or asks how it is used."""

from __future__ import annotations

import argparse
import shlex
import sqlite3
import subprocess
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.command import Command
from txbox import Inbox
from txbox.cli import _COMMANDS, _EXAMPLES, make_parser
from txbox.demo import make_parser as make_demo_parser
from txbox.errors import ConfigurationError, SchemaError


def test_only_init_makes_an_sqlite_file(command: Command, tmp_path: Path) -> None:
    missing = tmp_path / "typo.db"
    url = f"sqlite:///{missing}"
    for words in (
        ("status",), ("list",), ("show", "a", "b"), ("schema", "check"), ("retry", "a", "b"), ("prune",),
        ("maintain", "--once"), ("outbox", "list"), ("quarantine", "list"),
    ):  # fmt: skip
        said = command(*words, "--database", url, code=2).sentence
        assert said.startswith(
            f"There is no SQLite file '{missing}': correct the name, or run `txbox init`"
        )
        assert not missing.exists(), words
    command("init", "--database", url)
    assert command("status", "--database", url).out == "The inbox is empty.\n"


def test_show_suggests_ids_that_end_like_this(shop: Command) -> None:
    for name in ("/shop e3", "/shop e33", "other"):
        shop("send", "orders", "--id", name, "--data", "{}")
    said = shop("show", "billing", "e3", code=1).sentence
    assert "did you mean '/shop e3'?" in said
    assert "`txbox list` shows which" in shop("show", "billing", "nothing", code=1).sentence
    assert "/shop e3" in shop("show", "billing", "/shop e3").out


@pytest.mark.parametrize("bad", [False, True])
def test_a_run_to_the_end_says_by_its_status_that_a_message_died(
    sqlite_shop: Command, bad: bool
) -> None:
    data = '{"bad": true}' if bad else "{}"
    sqlite_shop("send", "orders", "--id", "1", "--data", data)
    ended = sqlite_shop("run", "--once", code=int(bad))
    assert ("Dead and quarantined messages wait for you: exit status 1." in ended.out) is bad
    # it is told once: the next run took nothing that died
    assert sqlite_shop("run", "--once").out == "Nothing to do.\n"


def _leaves(parser: argparse.ArgumentParser) -> list[argparse.ArgumentParser]:
    below = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if not below:
        return [parser]
    return [
        leaf for action in below for choice in action.choices.values() for leaf in _leaves(choice)
    ]


def test_a_mistyped_command_is_told_all_there_are(command: Command) -> None:
    said = command("shwo", "status", code=2).err
    assert "'shwo'" in said
    assert "retry" in said


def test_options_before_the_command_are_told_their_place(command: Command) -> None:
    said = command("--app", "shop:app", "status", code=2)
    assert said.sentence.startswith("Options come after the command: txbox COMMAND --app")


def test_every_positional_has_help_and_every_command_an_example() -> None:
    for parser in _leaves(make_parser()):
        name = parser.prog.removeprefix("txbox ")
        for action in parser._actions:
            assert action.help, (name, action.dest)
        if name not in ("demo",):
            assert "examples:\n  txbox " in parser.format_help(), name


def _all(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for choice in action.choices.values():
                yield from _all(choice)


def test_every_help_fits_a_terminal_of_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for parser in (make_parser(""), *_all(make_parser()), make_demo_parser()):
        wide = [line for line in parser.format_help().splitlines() if len(line) > 80]
        assert not wide, parser.prog


@pytest.mark.parametrize("line", [each for several in _EXAMPLES.values() for each in several])
def test_examples_parse(line: str) -> None:
    make_parser().parse_args(shlex.split(line))


def test_a_cursor_is_no_transaction() -> None:
    cursor = sqlite3.connect(":memory:").cursor()
    with pytest.raises(
        ConfigurationError, match=r"sqlite3.Cursor is a cursor: pass the connection"
    ):
        Inbox("billing").accept(cursor, "1")


def test_missing_tables_are_one_traceback() -> None:
    tx = sqlite3.connect(":memory:")
    with pytest.raises(SchemaError, match="run `txbox init`") as caught:
        Inbox("billing").accept(tx, "1")
    told = "".join(traceback.format_exception(caught.value))
    assert told.count("Traceback") == 1
    assert "no such table" in told or "OTHER" in told or "SQLITE" in told


def test_sqlalchemy_without_greenlet_names_what_to_install() -> None:
    program = """
import sys
sys.modules["greenlet"] = None
import sqlalchemy
from txbox import App, ConfigurationError
try:
    App(sqlalchemy.create_engine("sqlite:///shop.db"))
except ConfigurationError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert "needs greenlet" in done.stdout
    assert "pip install 'txbox[sqlalchemy]'" in done.stdout


#: Prints what a program imports beyond what any Python does.
_IMPORTED = """
import sys
before = set(sys.modules)
{program}
print(*sorted(sys.modules.keys() - before), file=sys.stderr)
"""
_HELP = "from txbox.cli import main; main({words})"


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        ("import txbox", {"txbox"}),
        (_HELP.format(words=["--help"]), {"txbox", "txbox.cli", "txbox.errors"}),
        (_HELP.format(words=["--version"]), {"txbox", "txbox.cli", "txbox.errors"}),
    ],
    ids=["import", "help", "version"],
)  # fmt: skip
def test_what_needs_nothing_imports_nothing(
    command: Command, program: str, expected: set[str]
) -> None:
    imported = _imported(command, program)
    assert {name for name in imported if name.startswith("txbox")} == expected
    assert not _not_pythons(imported)
    assert not {"asyncio", "dataclasses", "sqlite3", "ssl"} & imported


def test_a_command_imports_no_client_library_and_no_other_floor(command: Command) -> None:
    modules = {module: name for name, (module, *_) in _COMMANDS.items() if module}
    for module, name in modules.items():
        imported = _imported(command, _HELP.format(words=[name, "--help"]))
        assert not _not_pythons(imported), name
        others = {f"txbox.cli.{each}" for each in modules} - {f"txbox.cli.{module}"}
        # the lists of outbox and quarantine are those of `list`
        assert others & imported <= ({"txbox.cli.look"} if module == "change" else set()), name
        assert not {"txbox.demo", "txbox.testing", "txbox.ui"} & imported, name
        if module in ("look", "change", "schema", "workers"):
            assert "txbox.worker" not in imported, name


def test_a_worker_imports_nothing_of_the_operators(command: Command) -> None:
    imported = _imported(command, "import txbox.cli.run, txbox.worker.worker, txbox.worker.relay")
    assert not {name for name in imported if name.startswith(("txbox.admin", "txbox.ui"))}


def test_the_line_of_each_command_is_the_same_for_one_and_for_all() -> None:
    assert set(_COMMANDS) == {name for name, _ in _below(make_parser())}
    for name in _COMMANDS:
        ((_, parser),) = [each for each in _below(make_parser(name)) if each[0] == name]
        ((_, of_all),) = [each for each in _below(make_parser()) if each[0] == name]
        assert parser.format_help() == of_all.format_help()


def _below(parser: argparse.ArgumentParser) -> list[tuple[str, argparse.ArgumentParser]]:
    (commands,) = (each for each in parser._actions if each.nargs == argparse.PARSER)
    assert isinstance(commands.choices, dict)
    return list(commands.choices.items())


def _imported(command: Command, program: str) -> set[str]:
    ended = command(python=("-c", _IMPORTED.format(program=program)), code=0)
    return set(ended.err.split())


def _not_pythons(imported: set[str]) -> set[str]:
    tops = {name.partition(".")[0] for name in imported if not name.startswith("_sysconfigdata_")}
    return tops - sys.stdlib_module_names - {"txbox"}
