"""outbox list, show, retry, discard and reroute: the operator's commands, for outgoing messages."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from txbox.admin import Admin
from txbox.admin.outbox import (
    CHANGEABLE,
    ChangedOutgoing,
    ListedOutgoing,
    OutboxAdmin,
    OutgoingFilter,
    ShownOutgoing,
)
from txbox.cli.application import admin_of
from txbox.cli.consent import CONSENT, agreed
from txbox.cli.options import add_audit, add_filter, count
from txbox.cli.output import (
    counted,
    described,
    payload_as_json,
    print_error,
    print_json,
    print_line,
    print_record,
    print_table,
    printable_lines,
    progress,
    readable,
    shown,
)
from txbox.errors import ConfigurationError
from txbox.store.outbox_rows import STATUSES

_FILTERS = ("status", "topic", "route", "type", "key", "error_type", "older_than")
_DONE = {"retry": "retried", "discard": "discarded", "reroute": "rerouted"}


def add(commands: Any, common: argparse.ArgumentParser) -> None:
    outbox = commands.add_parser(
        "outbox", help="list, show, retry, discard or reroute outgoing messages",
        description="What list, show, retry and discard do for the inbox, for messages that are to be sent: due, "
        "delayed (staged for later), leased (by a relay), failed (waits for its next attempt), dead, sent (where "
        "RelayPolicy.keep_sent keeps them), discarded. `txbox status` counts them.",
    )  # fmt: skip
    verbs = outbox.add_subparsers(
        dest="verb", metavar="list|show|retry|discard|reroute", required=True
    )
    _add_looking(verbs, common)
    retry = verbs.add_parser(
        "retry", parents=[common],
        help="send dead or failed messages again, with a new budget of attempts",
        description="Gives outgoing messages a full new budget of attempts, due at once; a relay then sends them, "
        f"under their ids. A filter means dead messages, unless --status failed.\n\n{CONSENT}",
    )  # fmt: skip
    discard = verbs.add_parser(
        "discard", parents=[common],
        help="give outgoing messages up: no relay sends them any more",
        description="Gives outgoing messages up: no relay sends them any more. What a relay has leased is left to it. "
        f"A filter means dead messages, unless --status failed, due or delayed.\n\n{CONSENT}",
    )  # fmt: skip
    reroute = verbs.add_parser(
        "reroute", parents=[common],
        help="send outgoing messages another way: those whose route no App has any more",
        description="Gives outgoing messages another route, with a full new budget of attempts: for those that no "
        "relay takes, since their route was renamed or removed. Only a relay whose App has the new route takes them. "
        f"A filter means what has not left, dead messages only with --status dead.\n\n{CONSENT}",
    )  # fmt: skip
    reroute.add_argument(
        "--to", required=True, metavar="ROUTE", type=_route,
        help="the new route, as `txbox status` shows it: a broker, local:… (an App's own consumers), local (whichever "
        "App has a consumer), any (whichever App publishes or consumes the topic)",
    )  # fmt: skip
    for command, statuses, run in (
        (retry, CHANGEABLE["retry"], _retry),
        (discard, CHANGEABLE["discard"], _discard),
        (reroute, CHANGEABLE["reroute"], _reroute),
    ):
        command.add_argument("ids", nargs="*", metavar="ID", help="message ids")
        add_filter(command, *_FILTERS, statuses=statuses, since="staged")
        command.add_argument(
            "--all",
            action="store_true",
            help="no filter: every outgoing message that a filter could mean",
        )
        command.add_argument("--dry-run", action="store_true", help="count, and change nothing")
        command.add_argument("--yes", action="store_true", help="do not ask")
        add_audit(command)
        command.set_defaults(run=run)


def _add_looking(verbs: Any, common: argparse.ArgumentParser) -> None:
    listed = verbs.add_parser(
        "list", parents=[common],
        help="list outgoing messages, newest first, with filters",
        description="Lists outgoing messages, newest first, and of each the one of its key that must leave before it. "
        "Without payloads.",
    )  # fmt: skip
    add_filter(listed, *_FILTERS, statuses=STATUSES, since="staged")
    listed.add_argument(
        "--limit", type=count, default=50, metavar="N", help="how many (default 50)"
    )
    listed.add_argument(
        "--before",
        type=count,
        metavar="NUMBER",
        help="the next page: what the last one printed at its end",
    )
    listed.set_defaults(run=_list)
    show = verbs.add_parser(
        "show", parents=[common], help="show one outgoing message",
        description="Shows one outgoing message, its cause, its last error, and the one of its key that it waits for. "
        "The payload and the values of headers stay hidden unless --reveal.",
    )  # fmt: skip
    show.add_argument("message_id", metavar="ID", help="its id, as `txbox outbox list` shows it")
    show.add_argument(
        "--reveal", action="store_true", help="print the payload and header values too"
    )
    show.set_defaults(run=_show)


def _filter_of(args: argparse.Namespace) -> OutgoingFilter:
    given: dict[str, Any] = {name: getattr(args, name) for name in _FILTERS}
    given["route"] = given["route"] and _route(given["route"])
    return OutgoingFilter(**given)


def _route(text: str) -> str:
    """A route as people write it: any is none."""
    return "" if text == "any" else text


def _list(args: argparse.Namespace) -> int:
    where = _filter_of(args)
    with admin_of(args) as admin:
        messages = admin.outbox.list(where, limit=args.limit, before=args.before)
    more = messages[-1].number if len(messages) == args.limit else None
    if args.json:
        print_json({"messages": messages, "before": more})
    elif not messages:
        print_line("No outgoing message matches." if where.criteria() else "The outbox is empty.")
    else:
        print_table(
            [
                "id", "status", "topic", "route", "type", "key", "attempts", "staged", "next attempt", "waits for",
                "error",
            ],
            [
                [
                    message.message_id, message.status, message.topic, message.route or "any", message.type,
                    message.key, message.attempts, message.staged_at, message.next_attempt_at,
                    message.waits_for, _error(message),
                ]
                for message in messages
            ],
        )  # fmt: skip
        if more is not None:
            print_line(f"There may be more: add --before {more}.")
    return 0


def _error(message: ListedOutgoing) -> str | None:
    if message.error_type is None:
        return None
    first = (message.error or "").partition("\n")[0]
    return f"{message.error_type}: {first}"[:120]


def _show(args: argparse.Namespace) -> int:
    with admin_of(args) as admin:
        found = admin.outbox.show(args.message_id, reveal=args.reveal)
    if found is None:
        print_error(_unknown(args.message_id))
        return 1
    if args.json:
        print_json(
            {
                "message": {
                    **{
                        name: getattr(found.message, name)
                        for name in ListedOutgoing.__dataclass_fields__
                    },
                    "waits_for": found.waits_for,
                    "content_type": found.content_type,
                    "headers": found.headers,
                    "payload_bytes": found.payload_bytes,
                    **payload_as_json(found.payload),
                }
            }
        )
        return 0
    _print_message(found)
    return 0


def _unknown(message_id: str) -> str:
    return (
        f"The outbox has no message {shown(message_id)!r}: what was sent is deleted, unless "
        "RelayPolicy.keep_sent keeps it."
    )


def _print_message(found: ShownOutgoing) -> None:
    message, ahead = found.message, found.waits_for
    waits = None
    if ahead is not None:
        at = ahead.next_attempt_at
        waits = f"{ahead.message_id} ({ahead.status}{f', next attempt {shown(at)}' if at else ''})"
    print_record(
        [
            ("id", message.message_id),
            ("status", message.status),
            ("topic", message.topic),
            ("route", message.route or "any"),
            ("type", message.type),
            ("key", message.key),
            ("number", message.number),
            ("staged", message.staged_at),
            ("caused by", _cause(message)),
            ("sent", message.sent_at),
            ("next attempt", message.next_attempt_at),
            ("leased until", message.lease_until),
            ("waits for", waits),
            ("attempts", message.attempts),
            ("content type", found.content_type),
            (
                "headers",
                ", ".join(
                    name if value is None else f"{name}={value}" for name, value in found.headers
                ),
            ),
            ("payload", described(found.payload_bytes, revealed=found.payload is not None)),
            ("error type", message.error_type),
        ]
    )
    if message.error:
        print_line(f"\n{printable_lines(message.error)}")
    if found.payload is not None:
        print_line(f"\nPayload:\n{readable(found.payload)}")


def _cause(message: ListedOutgoing) -> str | None:
    return (
        None
        if message.cause_id is None
        else f"{message.cause_consumer or ''} {message.cause_id}".strip()
    )


def _retry(args: argparse.Namespace) -> int:
    return _change(args, lambda outbox: outbox.retry)


def _discard(args: argparse.Namespace) -> int:
    return _change(args, lambda outbox: outbox.discard)


def _reroute(args: argparse.Namespace) -> int:
    return _change(args, lambda outbox: partial(outbox.reroute, to=args.to))


def _targets(args: argparse.Namespace) -> list[OutgoingFilter]:
    where = _filter_of(args)
    if args.ids:
        if where.criteria() or args.all:
            raise ConfigurationError("Give message ids or a filter, not both.")
        return [OutgoingFilter(message_id=message_id) for message_id in args.ids]
    if not where.criteria() and not args.all:
        raise ConfigurationError(
            f"What is to be {_DONE[args.verb]}? Give message ids, a filter, or --all."
        )
    if where.criteria() and args.all:
        raise ConfigurationError("--all goes without a filter: leave one of them out.")
    return [where]


def _change(
    args: argparse.Namespace, verb: Callable[[OutboxAdmin], Callable[..., ChangedOutgoing]]
) -> int:
    targets = _targets(args)
    left: list[str] = []
    with admin_of(args) as admin:
        change = verb(admin.outbox)
        if args.dry_run:
            results = [change(where, dry_run=True) for where in targets]
        elif args.ids:
            results = [change(where, actor=args.actor, reason=args.reason) for where in targets]
        else:
            (where,) = targets
            expected = change(where, dry_run=True).count
            meant = "waiting" if args.verb == "reroute" else "dead"
            what = f"{where.status or meant} outgoing message"
            if not agreed(args.verb, expected, what, yes=args.yes):
                print_error("Nothing was changed.")
                return 1
            with progress(args.verb, expected) as bar:
                results = [change(where, actor=args.actor, reason=args.reason, progress=bar)]
        if args.ids:
            left = _left_alone(admin, args.verb, targets, results)
    _print_changed(args, results)
    for sentence in left:
        print_error(sentence)
    return 1 if left else 0


def _left_alone(
    admin: Admin,
    verb: str,
    targets: Sequence[OutgoingFilter],
    results: Sequence[ChangedOutgoing],
) -> list[str]:
    """Why a message that was named was not changed, a sentence each."""
    sentences: list[str] = []
    for where, result in zip(targets, results, strict=True):
        if result.count:
            continue
        assert where.message_id is not None
        found = admin.outbox.show(where.message_id)
        if found is None:
            sentences.append(_unknown(where.message_id))
        elif found.message.status in CHANGEABLE[result.action]:
            sentences.append(f"{shown(where.message_id)} is held by a relay right now: try again.")
        else:
            sentences.append(
                f"{shown(where.message_id)} is {found.message.status}, and cannot be changed by {verb} now."
            )
    return sentences


def _print_changed(args: argparse.Namespace, results: Sequence[ChangedOutgoing]) -> None:
    number = sum(result.count for result in results)
    sample = [one for result in results for one in result.sample][:10]
    if args.json:
        print_json(
            {"action": args.verb, "dry_run": args.dry_run, "count": number, "sample": sample}
        )
        return
    if args.dry_run and sample:
        print_table(["id"], [[message_id] for message_id in sample])
        if number > len(sample):
            print_line(f"… and {number - len(sample)} more")
    would = "would be " if args.dry_run else ""
    print_line(f"{counted(number, 'outgoing message')} {would}{_DONE[args.verb]}.")
