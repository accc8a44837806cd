"""The command `rehearse`: of one message, or of a deploy."""

from __future__ import annotations

import argparse
import os
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from txbox.admin import Admin, InboxFilter
from txbox.admin.comparison import (
    Comparison,
    Side,
    Subject,
    answer,
    compare,
    environment_of,
    nothing_compared,
)
from txbox.admin.reader import Audit
from txbox.admin.rehearsal import refuse_calls
from txbox.admin.tables import stored_id
from txbox.cli import add_command
from txbox.cli.options import add_audit, add_filter, add_options, admin_of, filter_of, payload_of
from txbox.cli.output import (
    as_json,
    print_json,
    print_line,
    print_section,
    printable_lines,
    progress,
    shown,
)
from txbox.errors import ConfigurationError
from txbox.outcome import Status
from txbox.text import counted, lasting

_LAST = 100
# what is looked through for one message whose payload was kept
_LOOKED_THROUGH = 50
_PAGE = 500


def add(commands: Any, common: argparse.ArgumentParser) -> None:
    command = add_command(commands, "rehearse", _rehearse, common)
    add_options(
        command,
        {"of CONSUMER": "the consumer of one message", "message_id ID": "its id"},
        nargs="?",
    )
    another = {"--payload FILE": "of one message: a file with another payload; - is standard input"}
    add_options(command, another, type=str)
    group = command.add_argument_group("a rehearsed deploy")
    new = {
        "--against MODULE:APP": "the App of the new code: run messages through both, and compare",
        "--against-path DIR": "where the modules of the new code are, such as another checkout",
        "--against-python PATH": "the Python of the new code, if it has a virtual environment of its own",
    }
    add_options(group, new, type=str)
    add_options(
        group, {"--last N": f"so many processed messages, the newest ones (default {_LAST})"}
    )
    add_options(group, {"--rate N": "at most so many messages a second"})
    add_options(
        group,
        {
            "--calls": "let handlers connect elsewhere and start processes: it really happens, three times a message",
            "--reveal": "show values, after redaction; kept in txbox_audit",
        },
    )
    add_filter(
        command, InboxFilter, ("consumer", "topic", "type", "key"), statuses=(Status.PROCESSED,)
    )
    add_audit(command)
    # of the process of a side
    command.add_argument("--answer", action="store_true", help=argparse.SUPPRESS)
    command.add_argument("--import-from", help=argparse.SUPPRESS)
    command.set_defaults(kind=InboxFilter, status=Status.PROCESSED)


def _rehearse(args: argparse.Namespace) -> int:
    """Runs handlers and always rolls back.

    With CONSUMER and ID it reports what would become of this message, the statements of its handler, and what that
    would stage. Any message whose payload is kept can be rehearsed.

    With --against it runs the last processed messages whose payload was kept through the App of --app and through
    that of the new code, each message in a transaction of its own, and compares outcomes, results, staged messages,
    rows, statements and times. What two runs of the running code differ in, such as new ids and times, is not
    compared.

    Beware: what a handler of one message does outside its transaction (HTTP, files, other connections) really happens.
    With --against, Python's own connections and processes are refused; libraries in C connect unseen. Sequences
    advance.

    Exit status: 0 it would be processed, or both do the same; 1 it would not, or they differ; 2 nothing was compared.
    """
    if args.answer:
        return _answer(args)
    if args.against is not None:
        return _compared(args)
    for name in ("last", "rate", "against_path", "against_python", "calls", "reveal"):
        if getattr(args, name):
            option = f"--{name.replace('_', '-')}"
            raise ConfigurationError(
                f"{option} is for two versions of an App: give --against module:app, too."
            )
    if args.message_id is None:
        raise ConfigurationError(
            "Which message? Give CONSUMER and ID; or --against module:app for the last ones."
        )
    return _one(args)


def _one(args: argparse.Namespace) -> int:
    payload = None if args.payload is None else payload_of(args.payload)
    with admin_of(args, handlers="runs a handler") as admin:
        done = admin.rehearse(
            args.of, args.message_id, payload=payload, actor=args.actor, reason=args.reason
        )
    code = 0 if done.outcome == "processed" else 1
    if args.json:
        print_json({"action": "rehearse", **as_json(done)})
        return code
    would = f"{done.outcome} ({done.error_type})" if code else done.outcome
    print_line(f"It would be {shown(would)}, after {done.duration_s:.3f} s. Nothing was committed.")
    if done.error:
        print_line(f"\n{printable_lines(done.error)}")
    if done.statements:
        print_line("\nStatements:")
        for statement in done.statements:
            print_line(f"  {shown(statement)}")
    rows = [(link.topic, link.consumer or "outbox", link.message_id) for link in done.staged]
    print_section("Staged", ("topic", "where", "id"), rows)
    return code


def _answer(args: argparse.Namespace) -> int:
    # what a handler prints must not come between the answers
    with os.fdopen(os.dup(1), "w") as replies:
        os.dup2(2, 1)
        with admin_of(args, handlers="runs handlers") as admin:
            if not args.calls:
                refuse_calls()
            answer(admin, sys.stdin, replies, shown=args.reveal)
    return 0


def _compared(args: argparse.Namespace) -> int:
    if args.payload is not None:
        raise ConfigurationError("--payload is for one message of one App: leave --against out.")
    directory = args.against_path
    if directory is not None and not Path(directory).is_dir():
        raise ConfigurationError(f"There is no directory {directory!r} (--against-path).")
    with admin_of(args, handlers="runs handlers") as admin, ExitStack() as stack:
        subjects = _subjects(args, admin)
        audit, where = Audit.of(args.actor, args.reason), filter_of(args)
        admin.announce(audit, "rehearse", where, len(subjects))
        if args.reveal:
            admin.announce(audit, where.table.audited.format("reveal"), where, len(subjects))
        words = ["-P", "-m", "txbox", "rehearse", "--answer"]
        words += ["--calls"] * args.calls + ["--reveal"] * args.reveal
        running = Side(args.app, [sys.executable, *words, "--app", args.app], environment_of(None))
        there = [] if directory is None else ["--import-from", str(Path(directory).absolute())]
        python = args.against_python or sys.executable
        new = Side(
            args.against, [python, *words, "--app", args.against, *there], environment_of(directory)
        )
        stack.enter_context(running)
        stack.enter_context(new)
        update = stack.enter_context(progress("Rehearsing", len(subjects)))
        started = time.monotonic()

        def after_each(done: int) -> None:
            update(done)
            if args.rate:
                time.sleep(max(0.0, done / args.rate - (time.monotonic() - started)))

        comparison = compare(subjects, running, new, after_each=after_each)
    if args.json:
        print_json(
            {"action": "rehearse", "running": args.app, "new": args.against, **as_json(comparison)}
        )
    else:
        _print(args, comparison)
    if (reason := nothing_compared(comparison)) is not None:
        raise ConfigurationError(reason)
    return 1 if comparison.differing else 0


def _subjects(args: argparse.Namespace, admin: Admin) -> list[Subject]:
    """The messages to compare, in the order of their arrival."""
    where, last = filter_of(args), args.last or _LAST
    assert isinstance(where, InboxFilter)
    if args.of is not None:
        if args.message_id is None:
            raise ConfigurationError(
                f"Which message of {args.of!r}? Give its ID, or --consumer {args.of}."
            )
        where = InboxFilter(consumer=args.of, message_id=stored_id(args.message_id))
    subjects, before, looked = list[Subject](), None, 0
    known = admin.app.handlers.consumers()
    while len(subjects) < last and looked < _LOOKED_THROUGH * last:
        page = admin.page(where, limit=_PAGE, before=before)
        looked += len(page.rows)
        subjects += [
            Subject(
                consumer=row.consumer, message_id=row.message_id, topic=row.topic, type=row.type
            )
            for row in page.rows
            if row.has_payload and row.consumer in known
        ]
        before = page.behind
        if before is None:
            break
    if not subjects:
        raise ConfigurationError(
            "No such processed message has a payload to run its handler with: keep it (keep_payload='always' of the "
            "handler)."
        )
    return subjects[:last][::-1]


def _print(args: argparse.Namespace, comparison: Comparison) -> None:
    print_line(
        f"{counted(comparison.compared)} through {args.app} and {args.against}"
        + (f" of {args.against_path}" if args.against_path else "")
        + f", in {lasting(comparison.duration_s)}: {comparison.differing:,} differ. Nothing was committed."
    )
    differences, handlers = comparison.differences, comparison.handlers
    print_section(
        "Differences",
        ("handler", "kind", "what", "messages", "such as"),
        [
            (
                difference.handler,
                difference.kind,
                difference.what,
                difference.count,
                " ".join(difference.messages),
            )
            for difference in differences
        ],
    )
    if args.reveal:
        print_section(
            "The first of each",
            ("handler", "what", "message", "running", "new"),
            [
                (
                    difference.handler,
                    difference.what,
                    difference.messages[0],
                    difference.running,
                    difference.new,
                )
                for difference in differences
            ],
        )
    print_section(
        "Handlers",
        ("handler", "messages", "differ", "fail in both", "running ms", "new ms", "pace"),
        [
            (each.handler, each.messages, each.differing, sum(each.failing.values()), each.running_ms, each.new_ms,
             each.pace)
            for each in handlers
        ],
    )  # fmt: skip
    print_section(
        "Fail in both, so only this was compared",
        ("handler", "outcome", "messages"),
        [(each.handler, what, count) for each in handlers for what, count in each.failing.items()],
    )
    print_section(
        "Not compared, because two runs of the running code differ",
        ("handler", "what"),
        [(each.handler, what) for each in handlers for what in each.ignored],
    )
    print_section("Not run", ("reason", "messages"), list(comparison.skipped.items()))
