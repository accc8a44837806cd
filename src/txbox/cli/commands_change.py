"""retry, discard and replay: single messages, or what a filter means; dry runs, consent, audit."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from txbox.admin import Admin, Changed, Replayed, RowFilter
from txbox.cli.application import admin_of
from txbox.cli.consent import ASKED, CONSENT, agreed
from txbox.cli.options import add_audit, add_filter, filter_of
from txbox.cli.output import (
    counted,
    print_error,
    print_json,
    print_line,
    print_table,
    progress,
    shown,
)
from txbox.errors import ConfigurationError
from txbox.outcome import Status

_DONE = {"retry": "retried", "discard": "discarded", "replay": "replayed"}


def add(commands: Any, common: argparse.ArgumentParser) -> None:
    filters = (
        "consumer",
        "status",
        "topic",
        "type",
        "key",
        "error_type",
        "fingerprint",
        "older_than",
    )
    retry = commands.add_parser(
        "retry", parents=[common], help="run dead or failed messages again, with a new budget of attempts",
        description="Gives messages a full new budget of attempts, due at once; a worker then runs them. "
        "A filter means dead messages, unless --status failed. Messages whose handler broke the "
        "transaction (what they wrote is unknown) are left alone unless named by id or with "
        f"--error-type TransactionBroken.\n\n{CONSENT}",
    )  # fmt: skip
    discard = commands.add_parser(
        "discard", parents=[common], help="give messages up for good; a later copy is a duplicate",
        description="Gives messages up for good: they never run, and a copy that arrives later is a duplicate. "
        f"A filter means dead messages, unless --status failed or --status pending.\n\n{CONSENT}",
    )  # fmt: skip
    replay = commands.add_parser(
        "replay", parents=[common], help="run processed messages once more, or feed them to another consumer",
        description="Runs processed messages through their handler once more, here and now; their payload must have "
        "been kept (keep_payload=). A replay that fails leaves its message processed, and is reported. "
        "With --as, stores the messages in arrival order as pending ones of another consumer instead. "
        "Takes --app; with --as, --database is enough.\n\n"
        f"A replay is of one consumer: CONSUMER and message ids, or --consumer with any other filter. {ASKED}",
    )  # fmt: skip
    for command, names, statuses in (
        (retry, filters, ("dead", "failed")),
        (discard, filters, ("dead", "failed", "pending")),
        (replay, ("consumer", "status", "topic", "type", "key"), tuple(Status)),
    ):
        command.add_argument(
            "of", nargs="?", metavar="CONSUMER", help="the consumer of the messages"
        )
        command.add_argument("ids", nargs="*", metavar="ID", help="message ids")
        add_filter(command, *names, statuses=statuses)
        if command is replay:
            # a replay is of one consumer, which is a filter
            command.set_defaults(all=False)
        else:
            command.add_argument("--all", action="store_true", help="no filter: every dead message")
        command.add_argument("--dry-run", action="store_true", help="count, and change nothing")
        command.add_argument("--yes", action="store_true", help="do not ask")
        add_audit(command)
    retry.set_defaults(run=_retry)
    discard.set_defaults(run=_discard)
    replay.add_argument(
        "--as", dest="as_consumer", metavar="CONSUMER", help="store them for this consumer instead"
    )
    replay.set_defaults(run=_replay)


def _targets(args: argparse.Namespace) -> list[RowFilter]:
    """What the command is about: one filter for each id, or the one that was given."""
    where = filter_of(args)
    if args.of is not None:
        if not args.ids:
            raise ConfigurationError(
                f"Which messages of {args.of!r}? Give ids after it, or --consumer {args.of} for all of them."
            )
        if where.criteria() or args.all:
            raise ConfigurationError("Give message ids or a filter, not both.")
        return [RowFilter(consumer=args.of, message_id=message_id) for message_id in args.ids]
    if not where.criteria() and not args.all:
        raise ConfigurationError(
            f"What is to be {_DONE[args.command]}? Give CONSUMER and ids, a filter, or --all."
        )
    if where.criteria() and args.all:
        raise ConfigurationError("--all goes without a filter: leave one of them out.")
    return [where]


def _retry(args: argparse.Namespace) -> int:
    return _change(args, lambda admin: admin.retry)


def _discard(args: argparse.Namespace) -> int:
    return _change(args, lambda admin: admin.discard)


def _change(args: argparse.Namespace, verb: Callable[[Admin], Callable[..., Changed]]) -> int:
    targets = _targets(args)
    with admin_of(args) as admin:
        change = verb(admin)
        if args.dry_run:
            results = [change(where, dry_run=True) for where in targets]
        elif targets[0].message_id is not None:
            results = [change(where, actor=args.actor, reason=args.reason) for where in targets]
        else:
            (where,) = targets
            expected = change(where, dry_run=True).count
            if not agreed(
                args.command, expected, f"{where.status or 'dead'} message", yes=args.yes
            ):
                print_error("Nothing was changed.")
                return 1
            with progress(args.command, expected) as bar:
                results = [change(where, actor=args.actor, reason=args.reason, progress=bar)]
        left = _left_alone(admin, targets, results) if targets[0].message_id is not None else []
    _print_changed(args, results)
    for sentence in left:
        print_error(sentence)
    return 1 if left else 0


def _left_alone(
    admin: Admin, targets: Sequence[RowFilter], results: Sequence[Changed]
) -> list[str]:
    """Why a message that was named was not changed, a sentence each."""
    sentences: list[str] = []
    for where, result in zip(targets, results, strict=True):
        if result.count:
            continue
        assert where.consumer is not None
        assert where.message_id is not None
        name = f"{where.consumer} {shown(where.message_id)}"
        found, _ = admin.show(where.consumer, where.message_id)
        if found is None:
            sentences.append(
                f"{name}: there is no such message; `txbox list` shows which there are."
            )
        elif found.message.status == Status.PROCESSED:
            sentences.append(f"{name} is processed: `txbox replay` runs it again.")
        elif found.message.status in (Status.DISCARDED, Status.PROCESSING, Status.PENDING):
            sentences.append(
                f"{name} is {found.message.status}, and cannot be changed by {result.action} now."
            )
        elif result.action == "retry" and not found.message.has_payload:
            sentences.append(f"{name} has no payload: send it again from its producer.")
        else:
            sentences.append(f"{name} is held by a transaction right now: try again.")
    return sentences


def _print_changed(args: argparse.Namespace, results: Sequence[Changed]) -> None:
    count = sum(result.count for result in results)
    spared = sum(result.spared for result in results)
    sample = [pair for result in results for pair in result.sample][:10]
    if args.json:
        print_json(
            {
                "action": args.command,
                "dry_run": args.dry_run,
                "count": count,
                "spared": spared,
                "sample": [
                    {"consumer": consumer, "message_id": other} for consumer, other in sample
                ],
            }
        )
        return
    if args.dry_run and sample:
        print_table(["consumer", "id"], sample)
        if count > len(sample):
            print_line(f"… and {count - len(sample)} more")
    would = "would be " if args.dry_run else ""
    print_line(f"{counted(count)} {would}{_DONE[args.command]}.")
    if spared:
        print_line(
            f"{spared} left alone: their handler broke the transaction, so what they wrote is unknown. Look at each, "
            f"then name it by id, or all of them with --error-type TransactionBroken."
        )


def _replay(args: argparse.Namespace) -> int:
    if args.of is None and args.consumer is None:
        raise ConfigurationError(
            "A replay is of one consumer: give --consumer, or CONSUMER and ids."
        )
    targets = _targets(args)
    handlers = "runs handlers" if args.as_consumer is None else None
    with admin_of(args, handlers=handlers) as admin:
        bulk = targets[0].message_id is None
        count = 0
        if bulk and not args.dry_run:
            count = admin.replay(targets[0], as_consumer=args.as_consumer, dry_run=True).count
            if not agreed(args.command, count, f"{targets[0].consumer} message", yes=args.yes):
                print_error("Nothing was changed.")
                return 1
        results: list[Replayed] = []
        with progress("replay", count or None) as bar:
            results.extend(
                admin.replay(
                    where, as_consumer=args.as_consumer, actor=args.actor, reason=args.reason,
                    dry_run=args.dry_run, progress=bar,
                )
                for where in targets
            )  # fmt: skip
        missing = [] if bulk else _not_kept(admin, targets, results)
    _print_replayed(args, results)
    for sentence in missing:
        print_error(sentence)
    return 1 if missing or any(result.failed or result.skipped for result in results) else 0


def _not_kept(admin: Admin, targets: Sequence[RowFilter], results: Sequence[Replayed]) -> list[str]:
    sentences: list[str] = []
    for where, result in zip(targets, results, strict=True):
        if result.count:
            continue
        assert where.consumer is not None
        assert where.message_id is not None
        name = f"{where.consumer} {shown(where.message_id)}"
        found, _ = admin.show(where.consumer, where.message_id)
        if found is None:
            sentences.append(
                f"{name}: there is no such message; `txbox list` shows which there are."
            )
        elif not found.message.has_payload:
            sentences.append(
                f"{name}: its payload was not kept; set keep_payload= on the handler for messages to come."
            )
        else:
            sentences.append(
                f"{name} is {found.message.status}: only processed messages are replayed."
            )
    return sentences


def _print_replayed(args: argparse.Namespace, results: Sequence[Replayed]) -> None:
    names = ("count", "processed", "failed", "stored", "duplicates", "skipped")
    sums = {name: sum(getattr(result, name) for result in results) for name in names}
    failures = [failure for result in results for failure in result.failures]
    if args.json:
        print_json(
            {
                "action": "replay",
                "dry_run": args.dry_run,
                "as": args.as_consumer,
                **sums,
                "failures": [dataclasses.asdict(failure) for failure in failures],
            }
        )
        return
    if args.dry_run:
        print_line(f"{counted(sums['count'])} would be replayed.")
        return
    print_line(
        f"{counted(sums['count'])}: "
        + ", ".join(f"{sums[name]} {name}" for name in names[1:] if sums[name])
        if sums["count"]
        else "No kept message matches."
    )
    if failures:
        print_table(
            ["id", "error"],
            [
                [failure.message_id, f"{failure.error_type}: {failure.error}"]
                for failure in failures
            ],
        )
        print_line("Their messages stay processed; `txbox show` has each attempt.")
    if sums["skipped"]:
        print_line(
            f"{sums['skipped']} skipped: no handler takes their topic and type, or a transaction holds them."
        )
