"""The `txbox` command. Exit status: 0 done, 1 failed, 2 wrong configuration (nothing was consumed)."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import txbox
from txbox.admin import InboxFilter, OutboxFilter, QuarantineFilter
from txbox.cli import (
    asyncapi,
    change,
    completion,
    doctor,
    look,
    relay,
    run,
    schema,
    ui,
    work,
    workers,
)
from txbox.cli.options import HelpFormatter, Parser, common
from txbox.cli.output import print_error
from txbox.errors import ConfigurationError, SchemaError, StoreError, StoreUnavailable, TxboxError

_EPILOG = """\
All but demo and completion take --app MODULE:APP (or TXBOX_APP) or, where
no handler is needed, --database URL (or TXBOX_DATABASE_URL), and --json.
The working directory is importable.
Exit status: 0 done, 1 failed, 2 wrong configuration, schema or database.
`txbox COMMAND --help` says more."""

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
_TABLES = {
    "outbox": (
        "list, show, retry, discard or reroute outgoing messages",
        """What list, show, retry and discard do for the inbox, for messages that are to be sent: due, delayed (staged
        for later), leased (by a relay), failed (waits for its next attempt), dead, sent (where
        RelayPolicy.keep_sent keeps them), discarded. `txbox status` counts them.""",
    ),
    "quarantine": (
        "look at messages that were set aside, and accept or discard them",
        """Messages that were set aside: without a usable id, too large, or a known id with another payload. Nobody
        processes them until they are accepted.""",
    ),
}
_INTERRUPTED = 130
# insufficient_privilege; access denied to a database, a table, a column, a routine
_NO_RIGHT = frozenset({"42501", "1044", "1142", "1143", "1370"})


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["demo"]:
        from txbox.demo import main as demo

        return demo(words[1:])
    parser = make_parser()
    try:
        args = parser.parse_args(words)
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


def make_parser() -> Parser:
    """The parser of all commands."""
    parser = Parser(
        prog="txbox",
        formatter_class=HelpFormatter,
        description="txbox: the transactional inbox and outbox. Effectively once for effects in your transaction.",
        epilog=_EPILOG,
    )
    parser.add_argument("--version", action="version", version=f"txbox {txbox.__version__}")
    commands = parser.add_subparsers(
        dest="command", metavar="COMMAND", title="commands", parser_class=_Command
    )
    shared = common()
    for module in (schema, run, relay):
        module.add(commands, shared)
    look.add_status(commands, shared)
    doctor.add(commands, shared)
    look.add(commands, shared, InboxFilter)
    look.add_explain(commands, shared)
    change.add(commands, shared, InboxFilter)
    change.add_edit(commands, shared)
    change.add_rehearse(commands, shared)
    change.add_replay(commands, shared)
    for kind in (OutboxFilter, QuarantineFilter):
        verbs = "|".join(("list", "show", *kind.table.changes))
        told, described = _TABLES[kind.table.name]
        table = commands.add_parser(kind.table.name, help=told, description=described)
        below = table.add_subparsers(dest="verb", required=True, metavar=verbs)
        look.add(below, shared, kind)
        change.add(below, shared, kind)
    work.add(commands, shared)
    workers.add(commands, shared)
    ui.add(commands, shared)
    asyncapi.add(commands, shared)
    completion.add(commands)
    return parser


class _Command(Parser):
    def __init__(self, *, prog: str, **options: object) -> None:
        examples = _EXAMPLES.get(prog.removeprefix("txbox "))
        if examples is not None:
            options["epilog"] = "\n  ".join(
                ("examples:", *(f"txbox {example}" for example in examples))
            )
        super().__init__(prog=prog, formatter_class=HelpFormatter, **options)  # type: ignore[arg-type]
