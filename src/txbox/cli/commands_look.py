"""status, list and show: they change nothing."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any

from txbox.admin import (
    Admin,
    ConsumerStatus,
    ListedMessage,
    PartitionStatus,
    ShownMessage,
    TableSize,
)
from txbox.admin.outbox import TopicStatus
from txbox.cli.application import admin_of
from txbox.cli.commands_quarantine import UNMATCHED, as_json, print_rows
from txbox.cli.options import add_filter, count, filter_of
from txbox.cli.output import (
    age,
    counted,
    described,
    payload_as_json,
    print_error,
    print_json,
    print_line,
    print_record,
    print_table,
    printable_lines,
    readable,
    shown,
)
from txbox.errors import ConfigurationError
from txbox.outcome import Status
from txbox.store.filters import RowFilter
from txbox.store.outbox_rows import STATUSES

_WORTH_A_LINE = 1024 * 1024
# how far back `show` looks for ids like the one it was given
_LATEST = 1_000


def add(commands: Any, common: argparse.ArgumentParser) -> None:
    status = commands.add_parser(
        "status", parents=[common], help="count messages by consumer and status; oldest unfinished age",
        description="Counts the messages of every consumer by status, what is quarantined, and says how long ago the "
        "oldest unfinished one (pending, processing, failed) was received. Counts the outgoing messages of "
        "every topic and route by status, if there are any, and says how long ago the oldest was staged that a relay "
        "should have sent. Tells the size of tables and of their indexes, and until when partitions are made.",
    )  # fmt: skip
    status.set_defaults(run=_status)
    listed = commands.add_parser(
        "list", parents=[common], help="list messages, newest first, with filters",
        description="Lists messages, newest arrival first. Without payloads. With --app, of handlers with an order, "
        "what each message waits for.",
    )  # fmt: skip
    add_filter(
        listed,
        "consumer",
        "status",
        "topic",
        "type",
        "key",
        "error_type",
        "fingerprint",
        "older_than",
    )
    listed.add_argument(
        "--limit", type=count, default=50, metavar="N", help="how many (default 50)"
    )
    listed.add_argument(
        "--before",
        type=count,
        metavar="ARRIVAL",
        help="the next page: what the last one printed at its end",
    )
    listed.add_argument(
        "--quarantined", action="store_true", help="what was set aside instead; filters: --consumer"
    )
    listed.set_defaults(run=_list)
    show = commands.add_parser(
        "show", parents=[common], help="show one message with its attempts",
        description="Shows one message with every recorded attempt, and what is quarantined under its id. The payload "
        "and the values of headers stay hidden (size and hash are shown) unless --reveal.",
    )  # fmt: skip
    show.add_argument(
        "consumer", metavar="CONSUMER", help="whose message, as `txbox list` names it"
    )
    show.add_argument(
        "message_id",
        metavar="ID",
        help="the whole id; of CloudEvents that is 'SOURCE ID', in quotes",
    )
    show.add_argument(
        "--reveal", action="store_true", help="print the payload and header values too"
    )
    show.set_defaults(run=_show)


def _status(args: argparse.Namespace) -> int:
    with admin_of(args) as admin:
        consumers, topics = admin.status(), admin.outbox.status()
        tables, partitions = admin.sizes()
    if args.json:
        print_json(
            {"consumers": consumers, "outbox": topics, "tables": tables, "partitions": partitions}
        )
        return 0
    if not consumers:
        print_line("The inbox is empty.")
    else:
        names = ["pending", "processing", "failed", "dead", "processed", "discarded"]
        print_table(
            ["consumer", *names, "quarantined", "oldest unfinished"],
            [_status_row(status, names) for status in consumers],
        )
    if topics:
        print_line("\nOutbox:")
        print_topics(topics)
    if consumers or topics:
        _print_sizes(tables)
    if partitions is not None:
        _print_partitions(partitions)
    return 0


def _print_sizes(tables: Sequence[TableSize]) -> None:
    # what is a page or two says nothing
    large = [size for size in tables if size.table_bytes + (size.index_bytes or 0) >= _WORTH_A_LINE]
    if not large:
        return
    print_line("\nSize:")
    print_table(
        ["table", "rows", "indexes", "partitions"],
        [
            [
                size.table,
                _megabytes(size.table_bytes),
                _megabytes(size.index_bytes),
                size.partitions if size.partitions > 1 else "-",
            ]
            for size in large
        ],
    )


def _megabytes(count: int | None) -> str:
    return "-" if count is None else f"{count / 1_000_000:,.1f} MB"


def _print_partitions(partitions: PartitionStatus) -> None:
    if partitions.ready_until is None:
        print_line(f"\nThe inbox is in {partitions.count} partitions ({partitions.kind}).")
        return
    until = shown(partitions.ready_until)
    if partitions.missing:
        print_line(
            f"\nThe partitions of the inbox ({partitions.kind}) end at {until}: newer messages go to the default "
            "partition until `txbox run` or `txbox maintain` makes more."
        )
    else:
        print_line(
            f"\nThe inbox is in {partitions.count} partitions ({partitions.kind}), made until {until}."
        )


def print_topics(topics: Sequence[TopicStatus]) -> None:
    """The outbox by topic and status."""
    print_table(
        ["topic", "route", *STATUSES, "oldest waiting"],
        [
            [
                status.topic,
                status.route or "any",
                *(status.counts.get(name, 0) for name in STATUSES),
                age(status.oldest_waiting_s) or "-",
            ]
            for status in topics
        ],
    )
    for status in topics:
        if status.overdue:
            print_line(
                f"{counted(status.overdue, 'message')} of topic {shown(status.topic)} should have left more than a "
                f"minute ago: see that a worker or `txbox relay` of an App with the route "
                f"{shown(status.route or 'any')} runs and reaches its destination, or `txbox outbox reroute` them."
            )


def _status_row(status: ConsumerStatus, names: list[str]) -> list[str | int | None]:
    counts = [status.counts.get(Status(name), 0) for name in names]
    return [
        status.consumer or UNMATCHED, *counts, status.quarantined, age(status.oldest_unfinished_s) or "-"
    ]  # fmt: skip


def _list(args: argparse.Namespace) -> int:
    where = filter_of(args)
    if args.quarantined:
        if set(where.criteria()) - {"consumer"} or args.before:
            raise ConfigurationError("--quarantined takes only the filter --consumer, and --limit.")
        with admin_of(args) as admin:
            aside = admin.quarantined(where.consumer, limit=args.limit)
        if args.json:
            print_json({"quarantined": [as_json(message) for message in aside]})
        elif not aside:
            print_line("Nothing is quarantined.")
        else:
            print_rows(aside)
        return 0
    with admin_of(args) as admin:
        messages = admin.list(where, limit=args.limit, before=args.before)
    more = messages[-1].arrival if len(messages) == args.limit else None
    if args.json:
        print_json({"messages": messages, "before": more})
    elif not messages:
        print_line("No message matches." if where.criteria() else "The inbox is empty.")
    else:
        print_table(
            [
                "consumer", "id", "status", "topic", "type", "key", "attempts", "received", "waits for",
                "error",
            ],
            [
                [
                    message.consumer, message.message_id, message.status, message.topic, message.type, message.key,
                    message.attempts, message.received_at, _in_the_way(message), _error(message),
                ]
                for message in messages
            ],
        )  # fmt: skip
        if more is not None:
            print_line(f"There may be more: add --before {more}.")
    return 0


def _in_the_way(message: ListedMessage) -> str | None:
    """The id of the message that this one waits for, or the version."""
    if message.waits_for is None:
        return None
    if message.waits_for.message_id is None:
        return f"version {message.waits_for.version}"
    return message.waits_for.message_id


def _waits_for(message: ListedMessage) -> str | None:
    waits = message.waits_for
    if waits is None:
        return None
    if waits.message_id is None:
        return f"version {waits.version} of its key, which has not arrived"
    at = (
        f", next attempt {shown(waits.next_attempt_at)}"
        if waits.status in (Status.FAILED, Status.PENDING) and waits.next_attempt_at is not None
        else ""
    )
    return f"{waits.message_id} ({waits.status}{at})"


def _error(message: ListedMessage) -> str | None:
    if message.error_type is None:
        return None
    first = (message.error or "").partition("\n")[0]
    return f"{message.error_type}: {first}"[:120]


def _show(args: argparse.Namespace) -> int:
    with admin_of(args) as admin:
        found, aside = admin.show(args.consumer, args.message_id, reveal=args.reveal)
        if found is None and not aside:
            alike = _ids_like(admin, args.consumer, args.message_id)
            print_error(
                f"Consumer {args.consumer!r} has no message {shown(args.message_id)!r}: "
                + (
                    f"did you mean {' or '.join(alike)}? Ids of CloudEvents begin with their source."
                    if alike
                    else "`txbox list` shows which there are."
                )
            )
            return 1
    if args.json:
        print_json(
            {
                "message": None if found is None else _as_json(found),
                "attempts": [] if found is None else found.history,
                "quarantined": [as_json(message, whole=True) for message in aside],
            }
        )
        return 0
    if found is not None:
        _print_message(found)
    if aside:
        print_line("\nQuarantined under this id:")
        print_rows(aside)
        for message in aside:
            if message.payload is not None:
                print_line(f"\nPayload {message.hash[:12]}:\n{readable(message.payload)}")
    return 0


def _ids_like(admin: Admin, consumer: str, ending: str) -> list[str]:
    """Up to three ids that end with this, of the latest messages: no index knows how ids end."""
    latest = admin.list(RowFilter(consumer=consumer), limit=_LATEST)
    ids = [message.message_id for message in latest if message.message_id.endswith(ending)]
    return [repr(shown(message_id)) for message_id in ids[:3]]


def _print_message(found: ShownMessage) -> None:
    message = found.message
    headers = ", ".join(
        name if value is None else f"{name}={value}" for name, value in found.headers
    )
    print_record(
        [
            ("consumer", message.consumer),
            ("id", message.message_id),
            ("status", message.status),
            ("topic", message.topic),
            ("type", message.type),
            ("key", message.key),
            ("sequence", found.sequence),
            ("received", message.received_at),
            ("updated", message.updated_at),
            ("processed", message.processed_at),
            (
                "next attempt",
                message.next_attempt_at if message.status in ("failed", "pending") else None,
            ),
            ("waits for", _waits_for(message)),
            ("leased until", message.lease_until),
            ("attempts", message.attempts),
            ("unfinished starts", message.starts or None),
            ("content type", found.content_type),
            ("headers", headers),
            ("origin", ", ".join(f"{name}={value}" for name, value in found.origin.items())),
            ("payload", _described(found)),
            ("payload sha-256", found.payload_hash),
            (
                "result",
                None
                if found.result_bytes is None
                else described(found.result_bytes, revealed=found.result is not None),
            ),
            ("error type", message.error_type),
            ("fingerprint", message.fingerprint),
        ]
    )
    if message.error:
        print_line(f"\n{printable_lines(message.error)}")
    if found.history:
        print_line("\nAttempts:")
        print_table(
            ["attempt", "at", "became", "error"],
            [
                [
                    past.attempt, past.recorded_at, past.status,
                    f"{past.error_type}: {(past.error or '').partition(chr(10))[0]}"[:160],
                ]
                for past in found.history
            ],
        )  # fmt: skip
    if found.payload is not None:
        print_line(f"\nPayload:\n{readable(found.payload)}")
    if found.result is not None:
        print_line(f"\nResult:\n{readable(found.result)}")


def _described(found: ShownMessage) -> str:
    if not found.message.has_payload:
        return "not kept"
    return described(found.payload_bytes, revealed=found.payload is not None)


def _as_json(found: ShownMessage) -> dict[str, Any]:
    message = found.message
    return {
        **{name: getattr(message, name) for name in ListedMessage.__dataclass_fields__},
        "sequence": found.sequence,
        "content_type": found.content_type,
        "headers": found.headers,
        "origin": found.origin,
        "payload_hash": found.payload_hash,
        "payload_bytes": found.payload_bytes,
        **payload_as_json(found.payload),
        "result_bytes": found.result_bytes,
        "result": None if found.result is None else json.loads(found.result),
    }
