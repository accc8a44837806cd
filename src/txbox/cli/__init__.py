"""The `txbox` command. Exit status: 0 done, 1 failed, 2 wrong configuration (nothing was consumed)."""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import txbox
from txbox.cli.parser import HelpFormatter, Parser, common, print_error
from txbox.errors import ConfigurationError, SchemaError, StoreError, StoreUnavailable, TxboxError

_EPILOG = """\
All but demo and completion take --app MODULE:APP (or TXBOX_APP) or, where
no handler is needed, --database URL (or TXBOX_DATABASE_URL), and --json.
The working directory is importable.
Exit status: 0 done, 1 failed, 2 wrong configuration, schema or database.
`txbox COMMAND --help` says more."""

#: The commands in the order of help: the module that adds each, and its line there.
_COMMANDS = {
    "init": ("schema", "create the tables, or bring them to this release's version"),
    "schema": ("schema", "print, check or apply the SQL of the tables"),
    "run": ("run", "consume: sources, retries from the table, relay, maintenance"),
    "maintain": ("run", "rescue and prune, again and again or --once"),
    "demo": ("run", "a payment service under kill -9, beside a naive consumer"),
    "relay": ("run", "send staged messages from the outbox to where they go"),
    "status": ("look", "count messages by consumer and status; oldest unfinished age"),
    "doctor": ("doctor", "find what is wrong: settings, tables, rows nobody takes, brokers"),
    "list": ("look", "list messages, newest first, with filters"),
    "show": ("look", "show one message with everything that is known of it"),
    "explain": ("look", "say where a message stands, why, and what would let it go on"),
    "retry": ("change", "give dead or failed messages a new budget of attempts, due at once"),
    "discard": ("change", "give messages up for good"),
    "edit": ("change", "correct the payload or headers of a dead or failed message, and retry it"),
    "rehearse": ("change", "run a message's handler in a transaction that is always rolled back"),
    "replay": ("change", "run processed messages once more, or feed them to another consumer"),
    "outbox": ("tables", "list, show, retry, discard or reroute outgoing messages"),
    "quarantine": ("tables", "look at messages that were set aside, and accept or discard them"),
    "prune": ("work", "delete finished messages past the retention"),
    "rescue": ("work", "put messages whose worker went away back to work"),
    "send": ("work", "store a message for every consumer of its topic"),
    "workers": ("workers", "list who is at work: host, consumers, what each does, since when"),
    "pause": ("workers", "have no worker run a consumer until it is resumed"),
    "resume": ("workers", "have workers run a paused consumer again"),
    "top": ("workers", "watch rates, times, failures and workers"),
    "ui": ("ui", "serve the dashboard"),
    "asyncapi": ("asyncapi", "print an AsyncAPI document of the handlers and routes"),
    "completion": ("completion", "print a script that completes commands and options in a shell"),
}  # fmt: skip
_EXAMPLES = {
    "init": ["init --app shop:app", "init --database sqlite:///shop.db"],
    "run": ["run shop:app", "run shop:app --processes 4 --health-port 8080", "run shop:app --once"],
    "relay": ["relay shop:app"],
    "maintain": ["maintain --app shop:app --once"],
    "status": ["status --app shop:app"],
    "doctor": ["doctor --app shop:app", "doctor --app shop:app --json --fail-on warning"],
    "list": ["list --app shop:app --status dead --older-than 1h"],
    "show": ["show billing evt-1 --app shop:app", "show billing '/shop e3' --app shop:app --reveal"],
    "explain": ["explain evt-1 --app shop:app"],
    "retry": ["retry billing evt-1 --app shop:app", "retry --error-type TimeoutError --app shop:app"],
    "edit": ["edit billing evt-1 --payload fixed.json --reason 'wrong currency' --app shop:app"],
    "discard": ["discard billing evt-1 --reason 'test data' --app shop:app"],
    "rehearse": ["rehearse billing evt-1 --payload fixed.json --app shop:app"],
    "replay": ["replay billing evt-1 --app shop:app"],
    "prune": ["prune --dry-run --app shop:app"],
    "rescue": ["rescue --app shop:app"],
    "send": ["send orders --data '{\"cents\": 100}' --app shop:app"],
    "workers": ["workers --app shop:app"],
    "pause": ["pause billing --reason 'the bank is down' --app shop:app"],
    "resume": ["resume billing --app shop:app"],
    "top": ["top --app shop:app", "top --once --json --app shop:app"],
    "outbox list": ["outbox list --status dead --app shop:app"],
    "outbox show": ["outbox show 0192f0c1 --app shop:app"],
    "outbox retry": ["outbox retry --topic letters --app shop:app"],
    "outbox discard": ["outbox discard 0192f0c1 --app shop:app"],
    "quarantine list": ["quarantine list --app shop:app"],
    "quarantine show": ["quarantine show billing evt-1 --app shop:app"],
    "quarantine accept": ["quarantine accept billing evt-1 --app shop:app"],
    "quarantine discard": ["quarantine discard billing evt-1 --app shop:app"],
    "ui": ["ui --app shop:app --users users.txt", "ui --database sqlite:///shop.db --grant change"],
    "asyncapi": ["asyncapi shop:app", "asyncapi --app shop:app --title Shop --service-version 1.4"],
    "completion": ["completion bash", "completion zsh"],
    "schema check": ["schema check --app shop:app"],
    "schema apply": ["schema apply --app shop:app"],
    "schema print": ["schema print --dialect postgresql"],
}  # fmt: skip
_INTERRUPTED = 130
# insufficient_privilege; access denied to a database, a table, a column, a routine
_NO_RIGHT = frozenset({"42501", "1044", "1142", "1143", "1370"})


# -P: a txbox.py of the working directory is not this package
_PROGRAM = (sys.executable, "-P", "-m", "txbox")


def main(argv: Sequence[str] | None = None, *, program: Sequence[str] = _PROGRAM) -> int:
    """Run one command; returns its exit status.

    Args:
        program: what starts this program again, for `run --processes`.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["demo"]:
        from txbox.demo import main as demo

        return demo(words[1:])
    parser = make_parser(words[0] if words else "")
    try:
        args = parser.parse_args(words, Namespace(program=program))
        if args.command is None:
            parser.print_help(sys.stderr)
            return 2
        code: int = args.run(args)
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


def _with_remedy(error: TxboxError) -> str:
    if isinstance(error, StoreError) and error.code in _NO_RIGHT:
        return (
            f"{error}: this database role lacks a right that the command needs; "
            "`txbox schema print --grants` prints the rights of each kind of role."
        )
    return str(error)


def make_parser(wanted: str | None = None) -> Parser:
    """The parser of all commands, or of the wanted one: imports what these need; of no command, next to nothing."""
    parser = Parser(
        prog="txbox",
        formatter_class=HelpFormatter,
        description="txbox: the transactional inbox and outbox. Effectively once for effects in your transaction.",
        epilog=_EPILOG,
    )
    parser.add_argument("--version", action="version", version=f"txbox {txbox.__version__}")
    commands = _Commands(
        parser.add_subparsers(
            dest="command", metavar="COMMAND", title="commands", parser_class=_Command
        )
    )
    if wanted is not None and wanted not in _COMMANDS:
        for name in _COMMANDS:
            commands.add_parser(name)
        return parser
    shared = common()
    for module in dict.fromkeys(
        module for name, (module, _) in _COMMANDS.items() if wanted in (None, name)
    ):
        import_module(f"txbox.cli.{module}").add(commands, shared)
    return parser


class _Commands:
    """Gives each command its line of help."""

    def __init__(self, parsers: Any) -> None:
        self._parsers = parsers

    def add_parser(self, name: str, **options: Any) -> Parser:
        added: Parser = self._parsers.add_parser(name, **options | {"help": _COMMANDS[name][1]})
        return added


class _Command(Parser):
    def __init__(self, *, prog: str, **options: object) -> None:
        examples = _EXAMPLES.get(prog.removeprefix("txbox "))
        if examples is not None:
            options["epilog"] = "\n  ".join(
                ("examples:", *(f"txbox {example}" for example in examples))
            )
        super().__init__(prog=prog, formatter_class=HelpFormatter, **options)  # type: ignore[arg-type]
