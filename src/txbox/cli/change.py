"""What changes rows: retry, discard, reroute, accept, edit and replay; prune, rescue and send."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import os
import sys
import uuid
from collections.abc import Callable, Generator, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from txbox.admin import Admin, Changed, OutboxFilter, QuarantineFilter, views
from txbox.admin.changes import result_of
from txbox.admin.replay import Replayed
from txbox.admin.tables import Filter, InboxFilter, Table
from txbox.app import App
from txbox.cli import add_command, look, print_error
from txbox.cli.options import (
    add_audit,
    add_filter,
    add_options,
    admin_of,
    any_of,
    filter_of,
    opened,
    payload_of,
)
from txbox.cli.output import (
    as_json,
    confirmed,
    interactive,
    print_json,
    print_line,
    print_table,
    progress,
    shown,
)
from txbox.errors import ConfigurationError
from txbox.maintenance import Report, Task, prune, prune_outbox, rescue
from txbox.message import Headers, Message
from txbox.outcome import Outcome, Status
from txbox.text import age, counted

T = TypeVar("T")

_ASKED = """\
Messages named by id are changed at once. For a filter you are told the number and asked first; without a terminal,
add --yes."""
_CONSENT = f"""\
Say which messages: their ids, a filter, or --all.
{_ASKED}"""
#: By verb: help in a list of commands, and the description.
_HELP = {
    "retry": (
        "retry dead or failed {}",
        "Retries {}: they keep their ids, get a full new budget of attempts, and are due at once.",
    ),
    "discard": (
        "give {} up for good",
        "Gives {} up for good: they are neither processed nor sent.",
    ),
    "reroute": (
        "give {} another route, such as when theirs was renamed",
        """Gives {} another route, and a full new budget of attempts. It is for those that no relay takes because their
        route was renamed or removed. Only a relay whose App has the new route takes them.""",
    ),
    "accept": (
        "have {} processed after all",
        """Stores {} as pending, in the order of their arrival, and a worker processes them. A message without an id, or
        with the id of another message, needs a new one: --id. With --app, its version and hash are those that its
        handler makes.""",
    ),
}
_ALSO = {
    (
        "inbox",
        "retry",
    ): "Messages whose handler broke its transaction are left alone, because what they wrote is unknown: "
    "look at each, then name it by id, or all of them with --error-type TransactionBroken.",
    ("inbox", "discard"): "A copy that arrives later is a duplicate, and not processed either.",
    ("outbox", "discard"): "A message that a relay is sending is left alone.",
    (
        "quarantine",
        "discard",
    ): "Their payload is dropped at once, their row after Retention.quarantine.",
}
_REPLAY = """\
Runs the handler of processed messages again, here and now. Their payload must have been kept (keep_payload=). If it
fails, the message stays processed, and the failure is reported.

With --as, nothing is run: the messages are stored, in the order of their arrival, for another consumer, whose workers
process them. --database is then enough.

A replay is of one consumer: give CONSUMER and ids, or --consumer and a filter."""
_ROUTES = (
    "the new route, as `txbox status` shows it: a broker; local:… (consumers of one App); local (consumers of any "
    "App); any (whichever App publishes or consumes the topic)"
)
_CANARY = (
    "retry one dead message, then ten, then five hundred at a time, while a worker runs; stop if the failure "
    "returns"
)
_DESCRIBED = {
    "outbox": "Messages that were staged in the outbox, for a relay to send. Each is due, delayed (staged for later), "
    "leased (a relay is sending it), failed (waits for its next attempt), dead, sent (if RelayPolicy.keep_sent keeps "
    "it) or discarded.",
    "quarantine": "Messages that were set aside instead of processed: without a usable id, too large, or with the id "
    "of another message but another payload. They wait until you accept or discard them.",
}  # fmt: skip


def add(commands: Any, common: argparse.ArgumentParser) -> None:
    add_table(commands, common, InboxFilter)
    edit = add_command(commands, "edit", _edit, common)
    add_options(edit, {"of CONSUMER": "the consumer of the message", "message_id ID": "its id"})
    new = {"--payload FILE": "a file with the new payload; - is standard input"}
    add_options(edit, new, type=str)
    add_options(
        edit,
        {
            "--content-type TYPE": "the new content type",
            "--header NAME=VALUE…": "replace the headers of this name",
            "--without-header NAME…": "remove these headers",
            "--dry-run": "show what would change",
            "--expect VERSION": "only if nobody has changed it since --dry-run, which prints this",
        },
    )
    add_audit(edit)
    replay = add_command(commands, "replay", _change, common, description=f"{_REPLAY}\n\n{_ASKED}")
    # a replay is of one consumer, which is a filter
    names = ("consumer", "status", "topic", "type", "key")
    _add_targets(replay, InboxFilter, names, statuses=tuple(Status))
    of_another = {"--as CONSUMER": "store them for this consumer instead of running them"}
    add_options(replay, of_another, dest="as_consumer")
    replay.set_defaults(kind=InboxFilter, verb="replay", all=False)
    for kind in (OutboxFilter, QuarantineFilter):
        table = kind.table
        group = add_command(commands, table.name, description=_DESCRIBED[table.name])
        below = group.add_subparsers(
            dest="verb", required=True, metavar="COMMAND", title="commands"
        )
        look.add_table(below, common, kind)
        add_table(below, common, kind)
    consumer = {"--consumer TEXT": "only of this consumer"}
    add_options(
        add_command(commands, "prune", _prune, common),
        {
            **consumer,
            "--older-than AGE": "finished longer ago than this, such as 30d or 12h (default: the retention)",
            "--outbox": "delete sent and discarded outgoing messages instead",
            "--dry-run": "count them, and delete nothing",
            "--yes": "do not ask",
        },
    )
    add_options(add_command(commands, "rescue", _rescue, common), consumer)
    encrypt = add_command(commands, "encrypt", _encrypt, common)
    add_options(encrypt, {"path MODULE:APP": "instead of --app"}, nargs="?")
    add_options(encrypt, {"--dry-run": "count them, and change nothing"})
    add_audit(encrypt)
    proof = add_command(commands, "prove", _prove, common)
    add_options(proof, {"path MODULE:APP": "instead of --app"}, nargs="?")
    lines = 'messages, one a line: {"id": "1", "topic": "orders", "body": {}}'
    add_options(proof, {"--messages FILE": lines}, type=Path, required=True)
    kit = add_command(commands, "conformance", _conformance, common)
    started = "starts the program, which finds the database in TXBOX_DATABASE_URL"
    add_options(kit, {"--command COMMAND": started}, dest="program_under_test", required=True)
    some = "check only these sentences, for example 3.8"
    add_options(kit, {"--only NUMBER": some}, nargs="+", default=())
    send = add_command(commands, "send", _send, common)
    add_options(send, {"topic TOPIC": "a topic that a handler of the App consumes"})
    a_copy = {"--id ID": "its id; a second message with this id is a duplicate"}
    add_options(send, a_copy, dest="message_id")
    add_options(
        send,
        {
            "--type TEXT": "its type",
            "--key TEXT": "its ordering key",
            "--header NAME=VALUE…": "a header",
            "--content-type TEXT": "its content type (default: application/json if it is JSON)",
        },
    )
    payload = send.add_mutually_exclusive_group()
    data = {"--data JSON": "the payload; must be JSON without --content-type"}
    add_options(payload, data, type=os.fsencode)
    file = {"--file PATH": "a file with the payload; - is standard input"}
    add_options(payload, file, type=str)


def add_table(commands: Any, common: argparse.ArgumentParser, kind: type[Filter[Any, Any]]) -> None:
    """Add what changes the table that the filter is for."""
    table = kind.table
    for verb, change in table.changes.items():
        summary, described = (text.format(f"{table.noun}s") for text in _HELP[verb])
        if len(change.statuses) > 1:
            meant = any_of(change.meant)
            described += (
                f" A filter matches those that are {meant}, unless --status says otherwise."
            )
        also = _ALSO.get((table.name, verb), "")
        description = f"{described} {also}\n\n{_CONSENT}"
        command = add_command(
            commands, verb, _change, common, help=summary, description=description
        )
        _add_targets(command, kind, statuses=change.statuses)
        add_options(command, {"--all": "all that a filter could match"})
        if verb == "reroute":
            add_options(command, {"--to ROUTE": _ROUTES}, required=True)
        if (table.name, verb) == ("inbox", "retry"):
            add_options(command, {"--canary": _CANARY})
        if verb == "accept":
            add_options(command, {"--id ID": "a new id, for one message"}, dest="message_id")
        command.set_defaults(kind=kind, verb=verb)


def _edit(args: argparse.Namespace) -> int:
    """Changes the payload or headers of one dead or failed message, and retries it with a full new budget of
    attempts. It keeps its id and its place, and a copy of the original is still a duplicate. The original can be
    read as long as the message is there: `txbox quarantine show CONSUMER ID --reveal`.

    With --app, a payload is refused that the handler cannot read, or that has another id or version.
    """
    headers: dict[str, str | None] = dict.fromkeys(args.without_header)
    headers.update(args.header)
    with admin_of(args) as admin:
        edited = admin.edit(
            args.of,
            args.message_id,
            payload=None if args.payload is None else payload_of(args.payload),
            content_type=args.content_type,
            headers=headers,
            expected=args.expect,
            actor=args.actor,
            reason=args.reason,
            dry_run=args.dry_run,
        )
    if args.json:
        print_json({"action": "edit", **as_json(edited)})
        return 0
    (before, after), would = edited.payload_bytes, "would be " if args.dry_run else ""
    if edited.payload_hash[0] != edited.payload_hash[1]:
        old, new = (digits[:12] for digits in edited.payload_hash)
        print_line(f"payload: {old} ({before or 0} bytes) → {new} ({after or 0} bytes)")
    if edited.headers:
        print_line(f"headers: {', '.join(map(shown, edited.headers))}")
    print_line(f"1 message {would}edited and retried.")
    if args.dry_run:
        print_line(
            f"To edit what was looked at, and nothing that came since: --expect {edited.version}"
        )
    return 0


def _add_targets(
    command: argparse.ArgumentParser,
    kind: type[Filter[Any, Any]],
    names: Sequence[str] | None = None,
    *,
    statuses: Sequence[str],
) -> None:
    if "consumer" in kind.table.key:
        add_options(command, {"of CONSUMER": "the consumer of the messages"}, nargs="?")
    add_options(command, {"ids ID": "their ids"}, nargs="*")
    add_filter(command, kind, names, statuses=statuses)
    add_options(command, {"--dry-run": "count them, and change nothing", "--yes": "do not ask"})
    add_audit(command)


def _targets(args: argparse.Namespace) -> tuple[list[Filter[Any, Any]], bool]:
    """One filter for each named message, or the one of the options; and whether any is named."""
    where = filter_of(args)
    consumer: str | None = getattr(args, "of", None)
    marked = getattr(where, "hash", None) is not None
    if consumer is not None and not args.ids and not marked:
        raise ConfigurationError(
            f"Which messages of {consumer!r}? Give ids after it, or --consumer {consumer} for all of them."
        )
    criteria = set(where.criteria()) - {"hash"}
    if args.ids and (criteria or args.all):
        raise ConfigurationError("Give message ids or a filter, not both.")
    if args.all and (criteria or marked):
        raise ConfigurationError("Give --all or a filter, not both.")
    if len(args.ids) > 1 and getattr(args, "message_id", None) is not None:
        raise ConfigurationError("--id is for one message: accept them one by one.")
    if args.ids or marked:
        whose: dict[str, Any] = {} if consumer is None else {"consumer": consumer}
        return [
            dataclasses.replace(where, message_id=message_id, **whose)
            for message_id in args.ids or [None]
        ], True
    if args.verb == "replay" and args.consumer is None:
        raise ConfigurationError(
            "A replay is for one consumer: give --consumer, or CONSUMER and ids."
        )
    if not criteria and not args.all:
        named = "CONSUMER and ids" if hasattr(args, "of") else "message ids"
        raise ConfigurationError(
            f"Which messages are to be {views.DONE[args.verb]}? Give {named}, a filter, or --all."
        )
    return [where], False


def _change(args: argparse.Namespace) -> int:
    targets, named = _targets(args)
    names = ("to", "message_id", "as_consumer")
    options = {name: getattr(args, name) for name in names if hasattr(args, name)}
    runs = args.verb == "replay" and args.as_consumer is None
    if getattr(args, "canary", False):
        return _canary(args, targets[0], named=named)
    with admin_of(args, handlers="runs handlers" if runs else None) as admin:
        batches: Any = admin.replay_batches
        if args.verb != "replay":
            batches = partial(admin.batches, args.verb)
        change = partial(batches, **options)
        who = {"actor": args.actor, "reason": args.reason}
        if args.verb == "reroute" and (warning := admin.unserved(args.to)):
            print_error(f"warning: {shown(warning)}")
        results: list[Any]
        if args.dry_run:
            results = [result_of(change(where, dry_run=True)) for where in targets]
        elif named:
            results = [result_of(change(where, **who)) for where in targets]
        else:
            expected = result_of(change(targets[0], dry_run=True)).count
            if not _agreed_to_change(args, expected, targets[0]):
                print_error("Nothing was changed.")
                return 1
            with progress(args.verb, expected or None) as bar:
                steps = change(targets[0], **who, most=expected)
                results = [_followed(steps, lambda so_far: bar(so_far.count))]
        if args.verb == "retry" and args.kind is InboxFilter:
            _warn_of_idle(admin, targets, results)
        complaints = [
            admin.why_not(args.verb, where)
            for where, result in zip(targets, results, strict=True)
            if named and not result.count and not getattr(result, "refused", ())
        ]
    well = (
        _print_replayed(args, results) if args.verb == "replay" else _print_changed(args, results)
    )
    for sentence in complaints:
        print_error(shown(sentence))
    return 0 if well and not complaints else 1


def _warn_of_idle(
    admin: Admin, targets: Sequence[Filter[Any, Any]], results: Sequence[Changed]
) -> None:
    """Warn at once if no worker runs the retried messages."""
    named = {where.criteria().get("consumer") for where in targets}
    named |= {key["consumer"] for result in results for key in result.sample}
    if any(result.count for result in results):
        for consumer in sorted(filter(None, named)):
            if warning := admin.idle(consumer):
                print_error(f"warning: {shown(warning)}")


def _followed(steps: Iterable[T], report: Callable[[T], object]) -> T:
    """Carry a change out to its end, and report each batch; returns the last one, which is the result."""

    def reported() -> Generator[T]:
        for so_far in steps:
            report(so_far)
            yield so_far

    return result_of(reported())


def _canary(args: argparse.Namespace, where: Filter[Any, Any], *, named: bool) -> int:
    """Retry one, ten, then the rest, and report each step."""
    if named or not isinstance(where, InboxFilter):
        raise ConfigurationError("--canary is for a filter: retry single messages by their ids.")
    with admin_of(args) as admin:
        redriven = admin.canary(where, dry_run=True)
        expected = redriven.left
        if not args.dry_run:
            if not _agreed_to_change(args, expected, where):
                print_error("Nothing was changed.")
                return 1
            who, reported = {"actor": args.actor, "reason": args.reason}, 0
            for redriven in admin.canary_steps(where, **who, most=expected):
                # the last one may not be over
                for step in redriven.steps[reported:-1] if not args.json else ():
                    print_line(step.sentence)
                reported = max(reported, len(redriven.steps) - 1)
            for step in redriven.steps[reported:] if not args.json else ():
                print_line(step.sentence)
    if args.json:
        print_json({"action": "canary", "dry_run": args.dry_run, **as_json(redriven)})
    elif args.dry_run:
        print_line(views.done(expected, "message", "retry", dry_run=True))
    else:
        print_line(redriven.sentence if expected else "No dead message matches.")
    return 0 if redriven.stopped is None else 1


def _agreed(args: argparse.Namespace, question: str, refusal: str) -> bool:
    """Whether a change in bulk may go on.

    Args:
        refusal: printed without a terminal; ends with what --yes would do.

    Raises:
        ConfigurationError: there is no terminal, and --yes is missing.
    """
    if args.yes:
        return True
    if not interactive():
        raise ConfigurationError(refusal)
    return confirmed(question)


def _agreed_to_change(args: argparse.Namespace, count: int, where: Filter[Any, Any]) -> bool:
    if count == 0:
        return True
    if args.verb == "replay":
        noun = f"{args.consumer} {where.table.noun}"
    else:
        noun = views.noun_of(where.table, args.verb, where.status)
    return _agreed(
        args,
        f"{args.verb.capitalize()} {counted(count, noun)}?",
        f"This would {args.verb} {counted(count)}: add --yes to do it without being asked, or --dry-run.",
    )


def _print_changed(args: argparse.Namespace, results: Sequence[Changed]) -> bool:
    """Report what was changed; returns whether nothing was refused."""
    table: Table = args.kind.table
    names = ("count", "spared", "without_payload")
    count, spared, bare = (sum(getattr(result, name) for result in results) for name in names)
    sample = [key for result in results for key in result.sample][:10]
    refused = [refusal for result in results for refusal in result.refused]
    if args.json:
        report = {"action": args.verb, "dry_run": args.dry_run, "count": count, "spared": spared}
        report["without_payload"] = bare
        print_json({**report, "sample": sample, "refused": refused})
    else:
        if args.dry_run and sample:
            print_table(*views.keys(table, sample))
            if count > len(sample):
                print_line(f"… and {count - len(sample)} more")
        print_line(views.done(count, table.noun, args.verb, dry_run=args.dry_run))
        if spared:
            print_line(
                f"{views.spared(spared)}, then name it by id, or all of them with --error-type TransactionBroken."
            )
        if bare:
            print_line(views.without_payload(bare))
    for sentence in views.refusals(table, refused):
        print_error(shown(sentence))
    return not refused


def _print_replayed(args: argparse.Namespace, results: Sequence[Replayed]) -> bool:
    """Report what was replayed; returns whether everything was."""
    names = ("count", "processed", "failed", "stored", "duplicates", "skipped")
    sums = {name: sum(getattr(result, name) for result in results) for name in names}
    failures = [failure for result in results for failure in result.failures]
    well = not sums["failed"] and not sums["skipped"]
    if args.json:
        report = {"action": "replay", "dry_run": args.dry_run, "as": args.as_consumer}
        print_json({**report, **sums, "failures": failures})
        return well
    if args.dry_run:
        print_line(views.done(sums["count"], "message", "replay", dry_run=True))
        return well
    said = ", ".join(
        counted(sums[name], "duplicate") if name == "duplicates" else f"{sums[name]:,} {name}"
        for name in names[1:]
        if sums[name]
    )
    print_line(f"{counted(sums['count'])}: {said}" if sums["count"] else "No kept message matches.")
    if failures:
        print_table(*views.failures(failures))
        print_line("Their messages stay processed; `txbox show` has each attempt.")
    if sums["skipped"]:
        print_line(
            f"{sums['skipped']} skipped: no handler takes their topic and type, or a transaction holds them."
        )
    return well


def _prune(args: argparse.Namespace) -> int:
    """Deletes messages that were processed or discarded longer ago than the retention, with their attempts; never
    unfinished, dead or quarantined ones. It works in small batches and does not block live traffic.

    A copy that arrives after its message was deleted is processed again. So an --older-than below the retention of
    the App (30d with --database) asks first, or needs --yes.
    """
    if args.outbox and args.consumer is not None:
        raise ConfigurationError(
            "Outgoing messages have no consumer: leave --consumer or --outbox out."
        )
    run, what = (prune_outbox, "outgoing message") if args.outbox else (prune, "message")
    with opened(args) as app, Admin(app) as admin:
        admin.on_database(app.protocol.check_schema)
        kept = (args.outbox and app.relaying.keep_sent) or app.retention.processed
        wanted = args.older_than
        count = None
        if args.dry_run or (wanted is not None and wanted < kept):
            task = Task(consumer=args.consumer, older_than=wanted, dry_run=True)
            report = admin.on_database(run, app, task)
            if args.dry_run:
                return _reported(args, report, "would be deleted", what)
            count, number = report.rows, counted(report.rows, what)
            shorter, usual = (
                age(each.total_seconds()) for each in (kept if wanted is None else wanted, kept)
            )
            if count and not _agreed(
                args,
                f"Delete {number} before the retention of {usual} is over?",
                f"{shorter} is less than the retention of {usual}: add --yes to delete {number} all the same, "
                "or --dry-run.",
            ):
                print_error("Nothing was deleted.")
                return 1
        with progress("prune", count) as bar:
            task = Task(
                consumer=args.consumer, older_than=wanted, at_any_time=True, on_progress=bar
            )
            report = admin.on_database(run, app, task)
    return _reported(args, report, "deleted", what)


def _rescue(args: argparse.Namespace) -> int:
    """Takes messages back whose worker died or hangs, which shows by a lease that has run out: they fail and are
    due at once, or are dead after too many runs that never ended. `txbox run` and `txbox maintain` do this all the
    time.
    """
    with opened(args) as app, Admin(app) as admin, progress("rescue") as bar:
        admin.on_database(app.protocol.check_schema)
        report = admin.on_database(rescue, app, Task(consumer=args.consumer, on_progress=bar))
    return _reported(args, report, "put back to work")


def _encrypt(args: argparse.Namespace) -> int:
    """Encodes payloads, headers, results and error texts anew that are plain, or under an older key than the first one
    of App(codec=…): of messages, their attempts, the quarantine and the outbox. Workers may run beside it. It can be
    ended at any time, and goes on where it was when it is started again.

    It takes plain texts as they are: where all were encrypted already, first find out who has written plain ones. It
    needs the App, and a database role that may write all these tables, such as their owner.

    Exit status: 0 all is encrypted, 1 rows were left: those that a worker kept leased, or that the codec cannot read.
    """
    with (
        admin_of(args, handlers="encrypts with the codec of the App") as admin,
        progress("encrypt") as bar,
    ):
        steps = admin.encrypt_batches(actor=args.actor, reason=args.reason, dry_run=args.dry_run)
        done = _followed(steps, lambda so_far: bar(sum(table.count for table in so_far.tables)))
    code = 0 if done.complete else 1
    if args.json:
        print_json({"action": "encrypt", **as_json(done)})
        return code
    heads = (
        "table",
        "to encrypt" if args.dry_run else "encrypted",
        "of them plain",
        "leased",
        "unreadable",
    )
    print_table(heads, [dataclasses.astuple(table) for table in done.tables])
    for reason in done.reasons:
        print_error(shown(reason))
    if any(table.leased for table in done.tables):
        print_line("Some were leased all the time: run it again.")
    elif done.complete and not args.dry_run:
        print_line(f"All are encrypted with the key {done.key_id}.")
    return code


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


def _prove(args: argparse.Namespace) -> int:
    """Runs the handlers of these messages once undisturbed, then through crashes at every point, duplicates, disorder
    and faults of the database; each run must leave the same rows. What is wrong is named with its line. All tables are
    put back as they were, before each run and at the end: use a database for tests, with an empty inbox and outbox.
    """
    # late: only this command needs it
    from txbox.testing import prove
    from txbox.testing.proof import read_messages

    with opened(args, handlers="runs handlers") as app:
        report = prove(app, read_messages(args.messages))
    if args.json:
        print_json(report.as_dict())
    else:
        for line in str(report).splitlines():
            print_line(line)
    return 0 if report.ok else 1


def _conformance(args: argparse.Namespace) -> int:
    """Checks a program in any language against the contract of the inbox, docs/contract.md, sentence by sentence: runs
    it, kills it, and works beside it. Use a PostgreSQL database for tests, with nothing in its inbox and outbox, which
    are emptied in the end. Exit status: 0 if every sentence holds.
    """
    # late: only this command needs it
    from txbox.testing import conformance

    if args.database is None or args.schema is not None:
        raise ConfigurationError(
            "`txbox conformance` takes --database, without --schema: programs use the search path."
        )
    report = conformance.run(args.database, args.program_under_test, only=args.only)
    if args.json:
        print_json(report.as_dict())
    else:
        for line in str(report).splitlines():
            print_line(line)
    return 0 if report.ok else 1


def _send(args: argparse.Namespace) -> int:
    """Stores a message as pending for every consumer of its topic and type; a worker then processes it. The payload
    is --data, a --file, or standard input. Without --id it gets a random id, so sending it twice processes it
    twice.
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
    if args.data is None and args.file is None and sys.stdin.isatty():
        raise ConfigurationError("Which payload? Give --data or --file, or pipe it in.")
    payload: bytes = payload_of(args.file or "-") if args.data is None else args.data
    content_type = args.content_type
    if content_type is None:
        try:
            json.loads(payload)
            content_type = "application/json"
        except (ValueError, RecursionError):
            if args.data is not None:
                raise ConfigurationError(
                    "--data is not JSON: quote it for the shell, or give --content-type text/plain for other data."
                ) from None
    return Message(
        topic=args.topic,
        id=args.message_id or str(uuid.uuid4()),
        type=args.type,
        key=args.key,
        headers=Headers(args.header),
        payload=payload,
        content_type=content_type,
    )
