"""quarantine list | show | accept | discard."""

from __future__ import annotations

import argparse
from typing import Any

from txbox.admin import ChangedQuarantine, QuarantinedMessage, QuarantineFilter
from txbox.cli.application import admin_of
from txbox.cli.consent import ASKED, agreed
from txbox.cli.options import add_audit, count, duration
from txbox.cli.output import (
    counted,
    payload_as_json,
    print_error,
    print_json,
    print_line,
    print_table,
    progress,
    readable,
    shown,
)
from txbox.errors import ConfigurationError

_DONE = {"accept": "accepted", "discard": "discarded"}
#: Stands for the consumer of what no handler consumes.
UNMATCHED = "(no consumer)"


def add(commands: Any, common: argparse.ArgumentParser) -> None:
    quarantine = commands.add_parser(
        "quarantine", help="look at messages that were set aside, and accept or discard them",
        description="Messages that were set aside: without a usable id, too large, or a known id with another payload. "
        "Nobody processes them until they are accepted.",
    )  # fmt: skip
    actions = quarantine.add_subparsers(
        dest="action", required=True, metavar="list|show|accept|discard"
    )
    listed = actions.add_parser(
        "list", parents=[common], help="the latest first",
        description="Lists what was set aside and waits for a decision, or with --status what became of it.",
    )  # fmt: skip
    _add_filter(listed)
    listed.add_argument(
        "--status", choices=["quarantined", "accepted", "discarded", "all"], default="quarantined",
        help="default: quarantined, which waits for a decision",
    )  # fmt: skip
    listed.add_argument(
        "--limit", type=count, default=50, metavar="N", help="how many (default 50)"
    )
    listed.set_defaults(run=_list)
    show = actions.add_parser(
        "show", parents=[common], help="everything that is known of one",
        description="Shows what was set aside, 20 of a kind at most. The payload stays hidden unless --reveal.",
    )  # fmt: skip
    show.add_argument(
        "--reveal", action="store_true", help="print payloads, which may be personal or secret"
    )
    show.set_defaults(run=_show)
    accept = actions.add_parser(
        "accept", parents=[common], help="have it processed after all",
        description="Stores what was set aside as pending, in the order in which it came; a worker then processes it. "
        "A message without an id, or with one that another message has (another payload under a known id), "
        "needs --id. With --app, version and hash are made as its handler says.\n\n" + ASKED,
    )  # fmt: skip
    accept.add_argument(
        "--id", dest="given", metavar="ID", help="the id to process it under; for one message"
    )
    discard = actions.add_parser(
        "discard", parents=[common], help="give it up",
        description="Gives up what was set aside: its payload is dropped, its row stays for Retention.quarantine.\n\n"
        + ASKED,
    )  # fmt: skip
    for command in (show, accept, discard):
        command.add_argument(
            "of", nargs="?", metavar="CONSUMER", help='the consumer; "" for no handler\'s'
        )
        command.add_argument("message_id", nargs="?", metavar="ID", help="its id")
        command.add_argument("--hash", metavar="HEX", help="its hash, or the first digits of it")
    for command, run in ((accept, _accept), (discard, _discard)):
        _add_filter(command)
        command.add_argument("--all", action="store_true", help="no filter: everything")
        command.add_argument("--dry-run", action="store_true", help="count, and change nothing")
        command.add_argument("--yes", action="store_true", help="do not ask")
        add_audit(command)
        command.set_defaults(run=run)


def _add_filter(command: argparse.ArgumentParser) -> None:
    group = command.add_argument_group("filter (all that are given must match)")
    for name in ("consumer", "topic", "type"):
        group.add_argument(f"--{name}", metavar="TEXT", help=f"messages of this {name}")
    group.add_argument(
        "--older-than", type=duration, metavar="AGE",
        help="received longer ago than this (90s, 5m, 2h, 7d)",
    )  # fmt: skip


def _where(args: argparse.Namespace) -> QuarantineFilter:
    consumer = getattr(args, "consumer", None)
    of = getattr(args, "of", None)
    if of is not None and consumer is not None:
        raise ConfigurationError("Give CONSUMER or --consumer, not both.")
    status = getattr(args, "status", None)
    return QuarantineFilter(
        consumer=of if of is not None else consumer,
        message_id=getattr(args, "message_id", None),
        hash=getattr(args, "hash", None),
        status=None if status == "all" else status,
        topic=getattr(args, "topic", None),
        type=getattr(args, "type", None),
        older_than=getattr(args, "older_than", None),
    )


def _list(args: argparse.Namespace) -> int:
    with admin_of(args) as admin:
        rows = admin.quarantined(where=_where(args), limit=args.limit)
    if args.json:
        print_json({"quarantined": [as_json(row) for row in rows]})
    elif rows:
        print_rows(rows)
    else:
        print_line("Nothing is quarantined.")
    return 0


def _show(args: argparse.Namespace) -> int:
    where = _where(args)
    if where.message_id is None and where.hash is None:
        raise ConfigurationError("Which message? Give CONSUMER and an id, or --hash.")
    with admin_of(args) as admin:
        rows = admin.show_quarantined(where, reveal=args.reveal)
    if not rows:
        print_error("Nothing like that is quarantined: `txbox quarantine list` shows what is.")
        return 1
    if args.json:
        print_json({"quarantined": [as_json(row, whole=True) for row in rows]})
        return 0
    print_rows(rows)
    for row in rows:
        print_line(f"\n{row.hash}\n{shown(row.reason)}")
        if row.payload is not None:
            print_line(readable(row.payload))
        elif row.payload_bytes is None:
            print_line("There is no payload: it had none, or it was dropped.")
        else:
            print_line(f"{row.payload_bytes} bytes; --reveal prints them.")
    return 0


def _accept(args: argparse.Namespace) -> int:
    where = _target(args)
    with admin_of(args) as admin:
        expected = admin.accept_quarantined(where, message_id=args.given, dry_run=True)
        if args.dry_run or not _agreed(args, where, expected):
            return _ended(args, expected)
        with progress("accept", expected.count) as bar:
            done = admin.accept_quarantined(
                where, message_id=args.given, actor=args.actor, reason=args.reason, progress=bar
            )
    return _ended(args, done)


def _discard(args: argparse.Namespace) -> int:
    where = _target(args)
    with admin_of(args) as admin:
        expected = admin.discard_quarantined(where, dry_run=True)
        if args.dry_run or not _agreed(args, where, expected):
            return _ended(args, expected)
        with progress("discard", expected.count) as bar:
            done = admin.discard_quarantined(
                where, actor=args.actor, reason=args.reason, progress=bar
            )
    return _ended(args, done)


def _target(args: argparse.Namespace) -> QuarantineFilter:
    where = _where(args)
    if bool(where.criteria()) == args.all:
        raise ConfigurationError(
            f"What is to be {_DONE[args.action]}? Give CONSUMER and an id, --hash, a filter, or --all."
        )
    return where


def _agreed(args: argparse.Namespace, where: QuarantineFilter, expected: ChangedQuarantine) -> bool:
    # what is named is changed at once
    yes = args.yes or (where.message_id is not None or where.hash is not None)
    if expected.count == 0 or agreed(args.action, expected.count, "quarantined message", yes=yes):
        return expected.count > 0
    args.dry_run = True
    print_error("Nothing was changed.")
    return False


def _ended(args: argparse.Namespace, done: ChangedQuarantine) -> int:
    refused = [
        {"consumer": consumer, "message_id": own_id, "hash": hashed.hex(), "reason": why}
        for (consumer, own_id, hashed), why in done.refused
    ]
    if args.json:
        sample = [
            dict(zip(("consumer", "message_id", "hash"), identity, strict=True))
            for identity in done.sample
        ]
        print_json(
            {
                "action": args.action,
                "dry_run": done.dry_run,
                "count": done.count,
                "sample": sample,
                "refused": refused,
            }
        )
    else:
        if done.dry_run and done.sample:
            print_table(
                ["consumer", "id", "hash"],
                [
                    [identity[0] or UNMATCHED, identity[1] or "(none)", identity[2][:12]]
                    for identity in done.sample
                ],
            )
        would = "would be " if done.dry_run else ""
        print_line(f"{counted(done.count)} {would}{_DONE[args.action]}.")
    for refusal in refused[:10]:
        name = f"{refusal['consumer'] or UNMATCHED} {shown(refusal['message_id']) or '(no id)'}"
        print_error(f"{name} {refusal['hash'][:12]}: {refusal['reason']}.")
    if len(refused) > 10:
        print_error(f"and {len(refused) - 10} more that cannot be accepted.")
    if not done.count and not refused:
        print_error(
            "Nothing like that waits for a decision: `txbox quarantine list` shows what does."
        )
    return 0 if done.count and not refused else 1


def print_rows(rows: Any) -> None:
    """Quarantined messages as a table."""
    print_table(
        ["consumer", "id", "hash", "status", "topic", "type", "seen", "received", "reason"],
        [
            [
                row.consumer or UNMATCHED, row.message_id or "(none)", row.hash[:12], row.status, row.topic,
                row.type, row.seen, row.received_at, row.reason,
            ]
            for row in rows
        ],
    )  # fmt: skip


def as_json(message: QuarantinedMessage, *, whole: bool = False) -> dict[str, Any]:
    """A quarantined message as JSON, and the payload where it was revealed."""
    names = (
        "consumer", "message_id", "hash", "status", "reason", "topic", "type", "key", "seen", "kept_bytes",
        "received_at", "updated_at",
    )  # fmt: skip
    found = {name: getattr(message, name) for name in names}
    if whole:
        found |= {"payload_bytes": message.payload_bytes, **payload_as_json(message.payload)}
    return found
