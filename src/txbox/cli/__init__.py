"""The `txbox` command: its commands, and what all of them share. `txbox --help` imports nothing else of txbox.

Exit status: 0 done, 1 failed, 2 wrong configuration (nothing was consumed).
"""

from __future__ import annotations

import argparse
import os
import sys
import textwrap
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from io import TextIOWrapper
from pathlib import Path
from typing import Any, NoReturn

import txbox
from txbox.errors import (
    ConfigurationError,
    SchemaError,
    StoreError,
    StoreUnavailable,
    TxboxError,
    installed,
    redacted,
)

_EPILOG = """\
`txbox COMMAND --help` has the options and examples of each. All but demo and
completion need to know your App: --app MODULE:APP (or TXBOX_APP), found from
the working directory. Where no handler is needed, --database URL (or
TXBOX_DATABASE_URL) is enough. With --json they print JSON.

Exit status: 0 done, 1 failed, 2 wrong configuration, schema or database."""

#: The commands in the order of help: the module that adds each, its line there, and examples.
_COMMANDS: dict[str, tuple[str, ...]] = {
    "init": ("schema", "create the tables, or upgrade them to this release",
             "init --app shop:app", "init --database sqlite:///shop.db"),
    "schema": ("schema", "print, check or apply the SQL of the tables"),
    "run": ("run", "run the service: receive, retry, send, and clean up",
            "run shop:app", "run shop:app --processes 4 --health-port 8080", "run shop:app --once"),
    "maintain": ("run", "only clean up: rescue stuck messages, prune old ones", "maintain --app shop:app --once"),
    "demo": ("", "watch a payment service survive kill -9"),
    "relay": ("run", "only send the messages that are staged in the outbox", "relay shop:app"),
    "status": ("look", "count messages by consumer and status", "status --app shop:app"),
    "doctor": ("look", "find what is wrong: settings, tables, brokers, stuck rows",
               "doctor --app shop:app", "doctor --app shop:app --json --fail-on warning"),
    "list": ("look", "list messages, newest first, with filters", "list --app shop:app --status dead --older-than 1h"),
    "show": ("look", "show everything about one message",
             "show billing evt-1 --app shop:app", "show billing '/shop e3' --app shop:app --reveal"),
    "explain": ("look", "say why a message is where it is, and what would help", "explain evt-1 --app shop:app"),
    "retry": ("change", "retry dead or failed messages",
              "retry billing evt-1 --app shop:app", "retry --error-type TimeoutError --app shop:app"),
    "discard": ("change", "give messages up for good", "discard billing evt-1 --reason 'test data' --app shop:app"),
    "edit": ("change", "change the payload of a dead or failed message, and retry it",
             "edit billing evt-1 --payload fixed.json --app shop:app"),
    "rehearse": ("rehearse", "run handlers and roll everything back; compare a new release with the running one",
                 "rehearse billing evt-1 --payload fixed.json --app shop:app",
                 "rehearse --app shop:app --against shop:app --against-path ../new"),
    "replay": ("change", "run processed messages again, or feed another consumer",
               "replay billing evt-1 --app shop:app"),
    "outbox": ("change", "list, show, retry, discard or reroute outgoing messages"),
    "quarantine": ("change", "list, show, accept or discard messages that were set aside"),
    "prune": ("change", "delete finished messages that are older than the retention", "prune --dry-run --app shop:app"),
    "rescue": ("change", "take messages back from workers that died", "rescue --app shop:app"),
    "send": ("change", "store a message for every consumer of its topic",
             "send orders --data '{\"cents\": 100}' --app shop:app"),
    "encrypt": ("change", "encrypt stored messages that are plain, or under an older key",
                "encrypt shop:app", "encrypt shop:app --dry-run"),
    "prove": ("change", "run handlers through crashes, duplicates and faults, on a database for tests",
              "prove shop:app --messages messages.jsonl"),
    "conformance": ("change", "check a program in any language against the contract of the inbox",
                    "conformance --database postgresql:///kit --command 'node inbox.mjs'"),
    "workers": ("workers", "list the running workers and what they consume", "workers --app shop:app"),
    "pause": ("workers", "stop all workers from running a consumer",
              "pause billing --reason 'the bank is down' --app shop:app"),
    "resume": ("workers", "let workers run a paused consumer again", "resume billing --app shop:app"),
    "top": ("workers", "watch rates, latencies, failures and workers live",
            "top --app shop:app", "top --once --json --app shop:app"),
    "ui": ("run", "serve the dashboard",
           "ui --app shop:app --tokens tokens.txt", "ui --database sqlite:///shop.db --grant change"),
    "asyncapi": ("asyncapi", "print an AsyncAPI document of the handlers and routes",
                 "asyncapi shop:app", "asyncapi --app shop:app --title Shop --service-version 1.4"),
    "completion": ("", "print a script for TAB completion in your shell", "completion bash", "completion zsh"),
}  # fmt: skip
_EXAMPLES = {
    **{name: examples for name, (_, _, *examples) in _COMMANDS.items() if examples},
    "outbox list": ["outbox list --status dead --app shop:app"],
    "outbox show": ["outbox show 0192f0c1 --app shop:app"],
    "outbox retry": ["outbox retry --topic letters --app shop:app"],
    "outbox discard": ["outbox discard 0192f0c1 --app shop:app"],
    "outbox reroute": ["outbox reroute --topic letters --to kafka --app shop:app"],
    "quarantine list": ["quarantine list --app shop:app"],
    "quarantine show": ["quarantine show billing evt-1 --app shop:app"],
    "quarantine accept": ["quarantine accept billing evt-1 --app shop:app"],
    "quarantine discard": ["quarantine discard billing evt-1 --app shop:app"],
    "schema check": ["schema check --app shop:app"],
    "schema apply": ["schema apply --app shop:app"],
    "schema print": ["schema print --dialect postgresql"],
}
_INTERRUPTED = 130
# -P: a txbox.py of the working directory is not this package
_PROGRAM = (sys.executable, "-P", "-m", "txbox")


def main(argv: Sequence[str] | None = None, *, program: Sequence[str] = _PROGRAM) -> int:
    """Run one command; returns its exit status.

    Args:
        program: what starts this program again, for `run --processes`.
    """
    _prepare_streams()
    words = list(sys.argv[1:] if argv is None else argv)
    if words and words[0].startswith("-") and words[0] not in ("-h", "--help", "--version"):
        print_error(f"Options come after the command: txbox COMMAND {redacted(words[0])} …")
        return 2
    try:
        code = _run(words, program)
        sys.stdout.flush()
    except (ConfigurationError, SchemaError, StoreUnavailable) as error:
        print_error(str(error))
        return 2
    except TxboxError as error:
        print_error(_with_remedy(error))
        return 1
    except SystemExit as error:
        # argparse has said what was wrong
        return error.code if isinstance(error.code, int) else 2
    except KeyboardInterrupt:
        print_error("interrupted; batches that were done stay done.")
        return _INTERRUPTED
    except BrokenPipeError:
        # the reader (head, less) has seen enough; Python's own flush at exit must not complain
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return code


def _run(words: Sequence[str], program: Sequence[str]) -> int:
    if words[:1] == ["demo"]:
        from txbox.demo import main as demo

        return demo(words[1:])
    parser = make_parser(words[0] if words else "")
    args = parser.parse_args(words, Namespace(program=program))
    if args.command is None:
        parser.print_help(sys.stderr)
        return 2
    code: int = args.run(args)
    return code


def _with_remedy(error: TxboxError) -> str:
    if isinstance(error, StoreError) and error.lacks_right:
        return (
            f"{error}: this database role lacks a right that the command needs; "
            "`txbox schema print --grants` prints the rights of each kind of role."
        )
    return str(error)


def make_parser(wanted: str | None = None) -> Parser:
    """The parser of all commands, or of the wanted one: imports what these need; of no command, next to nothing."""
    parser = Parser(
        prog="txbox",
        description="txbox: the transactional inbox and outbox. Effectively once for effects in your transaction.",
        epilog=_EPILOG,
    )
    parser.add_argument("--version", action="version", version=f"txbox {txbox.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    if wanted is not None and wanted not in _COMMANDS:
        for name in _COMMANDS:
            add_command(commands, name)
        return parser
    shared = common()
    modules = [module for name, (module, *_) in _COMMANDS.items() if wanted in (None, name)]
    for module in dict.fromkeys(modules):
        (import_module(f"txbox.cli.{module}").add if module else _add)(commands, shared)
    return parser


def _add(commands: Any, _shared: argparse.ArgumentParser) -> None:
    """Add the commands that need no App and no database."""
    add_command(commands, "demo", add_help=False)
    completion = add_command(commands, "completion", _completion)
    completion.add_argument("shell", choices=("bash", "zsh"), help="for which shell")


def _prepare_streams() -> None:
    """Read and write nothing where a stream is closed, and escape what the terminal has no character for."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open(mode))  # noqa: SIM115 - until the process ends
    out: Any = sys.stdout
    if isinstance(out, TextIOWrapper) and out.encoding.lower() != "utf-8":
        out.reconfigure(errors="backslashreplace")


class Parser(argparse.ArgumentParser):
    """A parser with the examples of its command, whose errors quote no password and whose values are text."""

    def __init__(self, *, prog: str | None = None, **options: Any) -> None:
        if examples := _EXAMPLES.get((prog or "").removeprefix("txbox ")):
            lines = ("examples:", *(f"txbox {example}" for example in examples))
            options["epilog"] = "\n  ".join(lines)
        super().__init__(prog=prog, formatter_class=HelpFormatter, **options)
        # of whatever names no type
        self.register("type", None, _text)

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        print_error(f"{redacted(message)}. See `{self.prog} --help`.")
        raise SystemExit(2)


def _text(word: str) -> str:
    try:
        word.encode()
    except UnicodeEncodeError:
        raise argparse.ArgumentTypeError(f"{word!r} is not valid UTF-8") from None
    return word


class HelpFormatter(argparse.HelpFormatter):
    """Fills each paragraph of a description by itself; lists stay as they are written."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=30)

    def add_argument(self, action: argparse.Action) -> None:
        super().add_argument(action)
        if action.nargs == argparse.PARSER:
            # argparse forgets that commands are indented once more
            self._action_max_length += self._indent_increment

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return "\n\n".join(
            textwrap.fill(
                " ".join(paragraph.split()), width, initial_indent=indent, subsequent_indent=indent
            )
            if not paragraph.startswith(("examples:", "jobs:"))
            else paragraph
            for paragraph in text.split("\n\n")
        )


def common() -> argparse.ArgumentParser:
    """The options of every command."""
    parent = Parser(add_help=False)
    group = parent.add_argument_group("which inbox (--app or --database)")
    option = group.add_argument
    option("--app", metavar="MODULE:APP", help="your App, such as shop:app (default: TXBOX_APP)")
    option(
        "--database", metavar="URL",
        help="its database, if no handler is needed (default: $TXBOX_DATABASE_URL, which keeps passwords out of `ps`)",
    )  # fmt: skip
    option("--schema", metavar="NAME", help="with --database: the PostgreSQL schema of the tables")
    text = "print JSON instead of text and tables"
    parent.add_argument("--json", action="store_true", help=text)
    return parent


def add_command(
    commands: Any,
    name: str,
    run: Callable[[Namespace], int] | None = None,
    common: argparse.ArgumentParser | None = None,
    **options: Any,
) -> argparse.ArgumentParser:
    """Add a command, or with another `help` a part of one. Its description is the docstring of what runs it."""
    options = {
        "help": _COMMANDS[name][1] if name in _COMMANDS else None,
        "description": None if run is None else run.__doc__,
        "parents": [] if common is None else [common],
        **options,
    }
    command: argparse.ArgumentParser = commands.add_parser(name, **options)
    command.set_defaults(run=run)
    return command


def print_error(text: str) -> None:
    # late: help and completion need none of it
    from txbox.text import visible

    print(f"txbox: {visible(redacted(text))}", file=sys.stderr)


# -- completion -----------------------------------------------------------------------------------

# what these metavars stand for is a file, and the shell completes its name
_FILES = frozenset({"FILE", "PATH"})


def _completion(args: Namespace) -> int:
    """Prints a script for your shell. Load it, for example with `source <(txbox completion bash)`, and TAB
    completes commands, options and their values. Print it again after an upgrade of txbox.
    """
    with installed("cli", "Completion"):
        import shtab
    from txbox.demo import make_parser as make_demo_parser

    parser = make_parser()
    for commands in _commands(parser):
        commands["demo"] = make_demo_parser()  # it is parsed by itself
    _complete_files(parser, shtab.FILE)
    print(shtab.complete(parser, shell=args.shell))
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
