"""completion: the script with which a shell completes commands, options and their values."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

from txbox.cli.output import print_line
from txbox.errors import ConfigurationError

SHELLS = ("bash", "zsh")
# what these metavars stand for is a file, and the shell completes its name
_FILES = frozenset({"FILE", "PATH"})


def add(commands: Any, _common: argparse.ArgumentParser) -> None:
    completion = commands.add_parser(
        "completion",
        description="Prints a script for the shell; once it has been read, TAB completes commands, options and "
        "their values. Print it again after an upgrade of txbox.",
    )  # fmt: skip
    completion.add_argument("shell", choices=SHELLS, help="for which shell")
    completion.set_defaults(run=_completion)


def _completion(args: argparse.Namespace) -> int:
    try:
        import shtab
    except ModuleNotFoundError as error:
        raise ConfigurationError(
            f"Completion needs {error.name}: run pip install 'txbox[cli]'."
        ) from error
    from txbox.cli import make_parser
    from txbox.demo import make_parser as make_demo_parser

    parser = make_parser()
    for commands in _commands(parser):
        commands["demo"] = make_demo_parser()  # it is parsed by itself
    _complete_files(parser, shtab.FILE)
    print_line(shtab.complete(parser, shell=args.shell))
    return 0


def _complete_files(parser: argparse.ArgumentParser, files: Any) -> None:
    for commands in _commands(parser):
        for below in commands.values():
            _complete_files(below, files)
    for action in _actions(parser):
        if action.metavar in _FILES:
            action.complete = files


def _commands(parser: argparse.ArgumentParser) -> Iterator[dict[str, argparse.ArgumentParser]]:
    """The commands below this one, by name."""
    for action in _actions(parser):
        if action.nargs == argparse.PARSER:
            yield action.choices


def _actions(parser: argparse.ArgumentParser) -> list[Any]:
    # argparse has no other way to walk a parser
    return parser._actions  # noqa: SLF001
