"""docs/reference/cli.md has a heading for every command, and names every option."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from txbox.cli import make_parser

REFERENCE = Path(__file__).parents[2] / "docs" / "reference" / "cli.md"


def _commands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    return {
        name: command
        for action in parser._actions
        if isinstance(action, argparse._SubParsersAction)
        for name, command in action.choices.items()
    }


def _options(parser: argparse.ArgumentParser) -> Iterator[str]:
    for action in parser._actions:
        if action.help != argparse.SUPPRESS:
            yield from (option for option in action.option_strings if option.startswith("--"))
    for command in _commands(parser).values():
        yield from _options(command)


def test_every_command_has_a_heading_and_every_heading_a_command() -> None:
    headings = {
        line.removeprefix("## ")
        for line in REFERENCE.read_text().splitlines()
        if line.startswith("## ")
    }
    assert headings == set(_commands(make_parser()))


def test_every_option_is_named() -> None:
    text = REFERENCE.read_text()
    missing = sorted(
        {option for option in _options(make_parser()) if option not in text} - {"--version"}
    )
    assert missing == []
