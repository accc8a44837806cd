"""Every command line in the documentation is one that exists: make targets, txbox commands, options, extras."""

from __future__ import annotations

import argparse
import re
import shlex
import tomllib
from collections.abc import Iterator
from functools import cache

from tests.docs.pages import ROOT, all_pages, page
from txbox.cli import make_parser
from txbox.demo import make_parser as make_demo_parser

_TARGETS = set(re.findall(r"^([a-z-]+):.*##", (ROOT / "Makefile").read_text(), re.MULTILINE))
_PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
_OTHERS = {"python", "uvicorn", ".venv/bin/pytest", "uv", "echo", "cat"}
_INLINE = re.compile(r"`((?:txbox|make|pip install) [^`]+)`")


@cache
def _commands() -> dict[str, argparse.ArgumentParser]:
    """Command → its parser; "schema print" is one command."""
    found: dict[str, argparse.ArgumentParser] = {"demo": make_demo_parser()}
    for name, parser in _below(make_parser()):
        nested = list(_below(parser))
        found.update({f"{name} {command}": inner for command, inner in nested})
        if not nested:
            found.setdefault(name, parser)
    return found


def _below(parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            yield from action.choices.items()


def _options(parser: argparse.ArgumentParser) -> set[str]:
    return {
        option
        for action in parser._actions
        if action.help != argparse.SUPPRESS
        for option in action.option_strings
    }


def _problem(line: str) -> str | None:
    """Why this command line would not work, or None."""
    words = shlex.split(line, comments=True)
    match words:
        case ["make", *targets]:
            unknown = {target for target in targets if "=" not in target} - _TARGETS
            return f"no make target {unknown}" if unknown else None
        case ["pip", "install", *what]:
            for each in what:
                for extra in re.findall(r"txbox\[([\w,]+)\]", each):
                    unknown = set(extra.split(",")) - set(_PROJECT["optional-dependencies"])
                    if unknown:
                        return f"no extra {unknown}"
            return None
        case ["txbox", *rest] if rest:
            return _txbox_problem(rest)
        case [program, *_] if program in _OTHERS:
            return None
    return "neither make, txbox, pip nor python"


def _txbox_problem(words: list[str]) -> str | None:
    name = " ".join(words[:2]) if " ".join(words[:2]) in _commands() else words[0]
    given = [word.partition("=")[0] for word in words if word.startswith("--")]
    if name.startswith("-"):
        return None if set(given) <= _options(make_parser()) else f"no option {given}"
    if name == "schema":
        return None if len(words) == 1 else f"no command schema {words[1]}"
    if name not in _commands():
        return f"no command {name}"
    unknown = set(given) - _options(_commands()[name])
    return f"{name} has no option {unknown}" if unknown else None


def test_shell_blocks_are_commands_that_exist() -> None:
    for each in all_pages():
        for block in each.blocks():
            if block.language == "sh":
                for line in block.text.replace("\\\n", " ").splitlines():
                    if line.strip() and not line.startswith("#"):
                        problem = _problem(line)
                        assert problem is None, f"{each.name}: {line!r}: {problem}"


def test_commands_in_sentences_exist() -> None:
    for each in all_pages():
        for line in _INLINE.findall(each.prose):
            if line != "txbox COMMAND --help":
                problem = _problem(line.replace("…", "x"))
                assert problem is None, f"{each.name}: {line!r}: {problem}"


def test_every_command_has_a_heading_and_its_options_are_described() -> None:
    reference = page("docs/reference/cli.md")
    headings = reference.headings()
    for name, parser in _commands().items():
        assert name.partition(" ")[0] in headings, f"{name} has no heading"
        assert f"txbox {name}" in reference.text, f"{name} is not described"
        if name == "demo":
            # the page points to its --help, which must then say it all
            assert all(action.help for action in parser._actions)
            continue
        for option in _options(parser) - {"-h", "--help"}:
            assert option in reference.text, f"{name} {option} is not described"
