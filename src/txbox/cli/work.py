"""prune, rescue, maintain and send: work beside the worker."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import uuid
from datetime import timedelta
from pathlib import Path
from typing import Any

from txbox.admin.views import age, counted
from txbox.app import App
from txbox.cli.application import opened, perform
from txbox.cli.options import duration, header_of
from txbox.cli.output import (
    confirmed,
    interactive,
    print_json,
    print_line,
    print_table,
    progress,
)
from txbox.cli.parser import print_error
from txbox.errors import ConfigurationError
from txbox.maintenance import Report, Task, run_once
from txbox.message import Headers, Message
from txbox.outcome import Outcome


def add(commands: Any, common: argparse.ArgumentParser) -> None:
    prune = commands.add_parser(
        "prune", parents=[common],
        description="Deletes processed and discarded messages, with their attempts, that were finished longer ago than "
        "the retention; never what is unfinished, dead or quarantined. Small batches; live traffic is not "
        "blocked. A copy of a deleted message that comes later is processed again, so less than the "
        "retention of the App (or 30d with --database) is asked about, or needs --yes. With --outbox, deletes "
        "outgoing messages instead: sent ones that were kept for RelayPolicy.keep_sent, and discarded ones.",
    )  # fmt: skip
    prune.add_argument(
        "--older-than", type=duration, metavar="AGE", help="instead of the retention (30d, 12h)"
    )
    prune.add_argument("--consumer", metavar="TEXT", help="messages of this consumer only")
    prune.add_argument(
        "--outbox", action="store_true", help="sent and discarded outgoing messages instead"
    )
    prune.add_argument("--dry-run", action="store_true", help="count, and delete nothing")
    prune.add_argument("--yes", action="store_true", help="do not ask")
    prune.set_defaults(run=_prune)
    rescue = commands.add_parser(
        "rescue", parents=[common],
        description="Puts messages whose worker's lease has run out back to failed (and due), or to dead when too many "
        "runs never ended. `txbox run` and `txbox maintain` do this all the time.",
    )  # fmt: skip
    rescue.add_argument("--consumer", metavar="TEXT", help="messages of this consumer only")
    rescue.set_defaults(run=_rescue)
    _add_send(commands, common)


def _add_send(commands: Any, common: argparse.ArgumentParser) -> None:
    send = commands.add_parser(
        "send", parents=[common],
        description="Stores a message as pending for every consumer of its topic and type; a worker then processes it. "
        "The payload is --data, the bytes of --file, or standard input. Without --id it gets a random one, "
        "which no second `txbox send` repeats.",
    )  # fmt: skip
    send.add_argument("topic", metavar="TOPIC", help="a topic that a handler of the App consumes")
    send.add_argument(
        "--id", dest="message_id", metavar="ID", help="the message id, by which copies are known"
    )
    send.add_argument("--type", metavar="TEXT", help="its type, by which handlers select")
    send.add_argument("--key", metavar="TEXT", help="its ordering key")
    send.add_argument(
        "--header", action="append", default=[], metavar="NAME=VALUE", help="may be repeated"
    )
    send.add_argument(
        "--content-type", metavar="TEXT", help="default: application/json when the payload is JSON"
    )
    source = send.add_mutually_exclusive_group()
    source.add_argument(
        "--data", metavar="JSON", help="the payload; JSON unless --content-type says otherwise"
    )
    source.add_argument(
        "--file", metavar="PATH", type=Path, help="a file with the payload; - is standard input"
    )
    send.set_defaults(run=_send)


def _prune(args: argparse.Namespace) -> int:
    if args.outbox and args.consumer is not None:
        raise ConfigurationError(
            "Outgoing messages have no consumer: leave --consumer or --outbox out."
        )
    job, what = ("prune-outbox", "outgoing message") if args.outbox else ("prune", "message")
    with opened(args) as app:
        perform(app, app.check_schema)
        kept = app.retention.processed
        if args.outbox:
            kept = app.relaying.keep_sent or kept
        wanted: timedelta | None = args.older_than
        shorter = wanted is not None and wanted < kept
        task = Task(consumer=args.consumer, older_than=wanted, dry_run=True)
        count = None
        if args.dry_run or shorter:
            count = run_once(app, job, task).rows
        if args.dry_run:
            return _reported(args, Report(job, count or 0), "would be deleted", what)
        if (
            wanted is not None
            and shorter
            and count
            and not args.yes
            and not _agreed(counted(count, what), wanted, kept)
        ):
            print_error("Nothing was deleted.")
            return 1
        with progress("prune", count) as bar:
            report = run_once(
                app,
                job,
                Task(consumer=args.consumer, older_than=wanted, at_any_time=True, on_progress=bar),
            )
    return _reported(args, report, "deleted", what)


def _agreed(number: str, wanted: timedelta, retention: timedelta) -> bool:
    shorter, usual = age(wanted.total_seconds()), age(retention.total_seconds())
    if not interactive():
        raise ConfigurationError(
            f"{shorter} is less than the retention of {usual}: add --yes to delete {number} all the same, "
            "or --dry-run."
        )
    return confirmed(f"Delete {number} before the retention of {usual} is over?")


def _rescue(args: argparse.Namespace) -> int:
    with opened(args) as app, progress("rescue") as bar:
        perform(app, app.check_schema)
        report = run_once(app, "rescue", Task(consumer=args.consumer, on_progress=bar))
    return _reported(args, report, "put back to work")


def _reported(args: argparse.Namespace, report: Report, verb: str, what: str = "message") -> int:
    if args.json:
        print_json(
            {
                "job": report.job, "dry_run": getattr(args, "dry_run", False), "rows": report.rows,
                "dead": report.dead, "skipped": report.skipped,
            }
        )  # fmt: skip
    elif report.skipped:
        print_line(f"Another process runs {report.job} right now: nothing to do.")
    else:
        dead = f", {report.dead} of them dead" if report.dead else ""
        print_line(f"{counted(report.rows, what)} {verb}{dead}.")
    return 0


def _send(args: argparse.Namespace) -> int:
    message = _message(args)
    with opened(args, handlers="stores a message for the consumers of its topic") as app:
        outcomes = app.send(message) if app.database.sync else asyncio.run(_sent(app, message))
    if args.json:
        print_json({"id": message.id, "topic": message.topic, "outcomes": outcomes})
    else:
        names = {Outcome.DEFERRED: "stored"}
        print_table(
            ["consumer", "id", "outcome"],
            [
                [consumer, str(message.id), names.get(done, str(done))]
                for consumer, done in outcomes.items()
            ],
        )
    return 1 if Outcome.QUARANTINED in outcomes.values() else 0


async def _sent(app: App, message: Message[Any]) -> dict[str, Outcome]:
    async with app:
        return await app.send_async(message)


def _message(args: argparse.Namespace) -> Message[Any]:
    headers = [header_of(pair) for pair in args.header]
    payload = _payload(args)
    content_type = args.content_type
    if content_type is None:
        if _is_json(payload):
            content_type = "application/json"
        elif args.data is not None:
            raise ConfigurationError(
                "--data is no JSON: quote it for the shell, or give --content-type text/plain for other data."
            )
    return Message(
        topic=args.topic,
        id=args.message_id or str(uuid.uuid4()),
        type=args.type,
        key=args.key,
        headers=Headers(headers),
        payload=payload,
        content_type=content_type,
    )


def _payload(args: argparse.Namespace) -> bytes:
    if args.data is not None:
        return str(args.data).encode("utf-8", "surrogateescape")
    if args.file is not None and str(args.file) != "-":
        try:
            content: bytes = args.file.read_bytes()
        except OSError as error:
            raise ConfigurationError(f"{args.file} cannot be read: {error.strerror}.") from error
        return content
    if args.file is None and sys.stdin.isatty():
        raise ConfigurationError("Which payload? Give --data or --file, or pipe it in.")
    return sys.stdin.buffer.read()


def _is_json(payload: bytes) -> bool:
    try:
        json.loads(payload)
    except ValueError:
        return False
    return True
