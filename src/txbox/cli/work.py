"""prune, rescue and send: work beside the worker."""

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
from txbox.cli.parser import add_command, add_flags, print_error
from txbox.errors import ConfigurationError
from txbox.maintenance import Report, Task, run_once
from txbox.message import Headers, Message
from txbox.outcome import Outcome


def add(commands: Any, common: argparse.ArgumentParser) -> None:
    prune = add_command(commands, "prune", _prune, common)
    rescue = add_command(commands, "rescue", _rescue, common)
    for command in (prune, rescue):
        command.add_argument("--consumer", metavar="TEXT", help="messages of this consumer only")
    prune.add_argument(
        "--older-than", type=duration, metavar="AGE", help="instead of the retention (30d, 12h)"
    )
    add_flags(
        prune,
        {
            "--outbox": "sent and discarded outgoing messages instead",
            "--dry-run": "count, and delete nothing",
            "--yes": "do not ask",
        },
    )
    send = add_command(commands, "send", _send, common)
    option = send.add_argument
    option("topic", metavar="TOPIC", help="a topic that a handler of the App consumes")
    option(
        "--id", dest="message_id", metavar="ID", help="the message id, by which copies are known"
    )
    option("--type", metavar="TEXT", help="its type, by which handlers select")
    option("--key", metavar="TEXT", help="its ordering key")
    option("--header", action="append", default=[], metavar="NAME=VALUE", help="may be repeated")
    option(
        "--content-type", metavar="TEXT", help="default: application/json when the payload is JSON"
    )
    source = send.add_mutually_exclusive_group()
    source.add_argument(
        "--data", metavar="JSON", help="the payload; JSON unless --content-type says otherwise"
    )
    source.add_argument(
        "--file", metavar="PATH", type=Path, help="a file with the payload; - is standard input"
    )


def _prune(args: argparse.Namespace) -> int:
    """Deletes processed and discarded messages, with their attempts, that were finished longer ago than the retention;
    never what is unfinished, dead or quarantined. Small batches; live traffic is not blocked. A copy of a deleted
    message that comes later is processed again, so less than the retention of the App (or 30d with --database) is asked
    about, or needs --yes. With --outbox, deletes outgoing messages instead: sent ones that were kept for
    RelayPolicy.keep_sent, and discarded ones.
    """
    if args.outbox and args.consumer is not None:
        raise ConfigurationError(
            "Outgoing messages have no consumer: leave --consumer or --outbox out."
        )
    job, what = ("prune-outbox", "outgoing message") if args.outbox else ("prune", "message")
    with opened(args) as app:
        perform(app, app.check_schema)
        kept = (args.outbox and app.relaying.keep_sent) or app.retention.processed
        wanted: timedelta | None = args.older_than
        count = None
        if args.dry_run or (wanted is not None and wanted < kept):
            task = Task(consumer=args.consumer, older_than=wanted, dry_run=True)
            count = run_once(app, job, task).rows
            if args.dry_run:
                return _reported(args, Report(job, count), "would be deleted", what)
            if count and not args.yes and not _agreed(counted(count, what), wanted or kept, kept):
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
    """Puts messages whose worker's lease has run out back to failed (and due), or to dead when too many runs never
    ended. `txbox run` and `txbox maintain` do this all the time.
    """
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
    """Stores a message as pending for every consumer of its topic and type; a worker then processes it. The payload is
    --data, the bytes of --file, or standard input. Without --id it gets a random one, which no second `txbox send`
    repeats.
    """
    message = _message(args)
    with opened(args, handlers="stores a message for the consumers of its topic") as app:
        outcomes = app.send(message) if app.database.sync else asyncio.run(_sent(app, message))
    if args.json:
        print_json({"id": message.id, "topic": message.topic, "outcomes": outcomes})
    else:
        names = {Outcome.DEFERRED: "stored"}
        rows = [
            [name, str(message.id), names.get(done, str(done))] for name, done in outcomes.items()
        ]
        print_table(["consumer", "id", "outcome"], rows)
    return 1 if Outcome.QUARANTINED in outcomes.values() else 0


async def _sent(app: App, message: Message[Any]) -> dict[str, Outcome]:
    async with app:
        return await app.send_async(message)


def _message(args: argparse.Namespace) -> Message[Any]:
    headers = [header_of(pair) for pair in args.header]
    payload = _payload(args)
    content_type = args.content_type
    if content_type is None:
        try:
            json.loads(payload)
            content_type = "application/json"
        except ValueError:
            if args.data is not None:
                raise ConfigurationError(
                    "--data is not JSON: quote it for the shell, or give --content-type text/plain for other data."
                ) from None
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
