"""What every command line needs, and `txbox --help` nothing else: no import of the rest of txbox."""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from txbox.errors import redacted


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors quote no password."""

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        print_error(f"{redacted(message)}. See `{self.prog} --help`.")
        raise SystemExit(2)


class HelpFormatter(argparse.HelpFormatter):
    """Fills each paragraph of a description by itself; examples stay as they are written."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=30)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return "\n\n".join(
            textwrap.fill(
                " ".join(paragraph.split()), width, initial_indent=indent, subsequent_indent=indent
            )
            if not paragraph.startswith("examples:")
            else paragraph
            for paragraph in text.split("\n\n")
        )


def common() -> argparse.ArgumentParser:
    """The options of every command."""
    parent = Parser(add_help=False)
    group = parent.add_argument_group("which inbox (--app or --database)")
    option = group.add_argument
    option("--app", metavar="MODULE:APP", help="the App, importable from here (or TXBOX_APP)")
    option(
        "--database", metavar="URL",
        help="its database, where no App is needed; if it has a password, use TXBOX_DATABASE_URL: arguments are public",
    )  # fmt: skip
    option("--schema", metavar="NAME", help="with --database: the PostgreSQL schema of the tables")
    add_flags(parent, {"--json": "print JSON instead of text and tables"})
    return parent


def add_command(
    commands: Any, name: str, run: Callable[[argparse.Namespace], int], common: Any, **options: Any
) -> argparse.ArgumentParser:
    """Add a command. Its description is the docstring of the function that runs it."""
    options = {"description": run.__doc__, "parents": [common]} | options
    command: argparse.ArgumentParser = commands.add_parser(name, **options)
    command.set_defaults(run=run)
    return command


def add_flags(parser: Any, flags: Mapping[str, str]) -> None:
    """Add options without a value: their names, and their lines of help."""
    for name, text in flags.items():
        parser.add_argument(name, action="store_true", help=text)


def print_error(text: str) -> None:
    print(f"txbox: {redacted(text)}", file=sys.stderr)
