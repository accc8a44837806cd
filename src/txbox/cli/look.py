"""status, doctor, explain, and list and show of each table: they change nothing."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from functools import partial
from typing import Any

from txbox.admin import Admin, views
from txbox.admin.doctor import SEVERITIES, Diagnosis, Finding
from txbox.admin.explain import Explanation
from txbox.admin.tables import (
    INBOX,
    OUTBOX,
    QUARANTINE,
    Filter,
    InboxFilter,
    PartitionStatus,
    QuarantineFilter,
    Table,
    cursor_of,
)
from txbox.cli import add_command, print_error
from txbox.cli.options import (
    add_audit,
    add_filter,
    add_grace,
    add_options,
    admin_of,
    count,
    filter_of,
)
from txbox.cli.output import (
    as_json,
    print_json,
    print_line,
    print_record,
    print_section,
    print_table,
    printable_lines,
    readable,
    shown,
)
from txbox.text import counted

_WORTH_A_LINE = 1024 * 1024
# how far back `show` searches for similar ids
_LATEST = 1_000
_KEY = {
    "consumer": ("CONSUMER", "the consumer of the message"),
    "message_id": ("ID", "its id; of a CloudEvent 'SOURCE ID', in quotes"),
}
_LIST = {
    "inbox": "With --app also what each message waits for, if its handler keeps an order.",
    "outbox": "Each with the message of its key that must leave first.",
    "quarantine": "By default those that wait for a decision.",
}

_SHOW = {
    "inbox": "its attempts, its last error, and what it waits for.",
    "outbox": "its last error, and what must leave before it.",
    "quarantine": "why it was set aside, and how often it came.",
}


def add(commands: Any, common: argparse.ArgumentParser) -> None:
    add_command(commands, "status", _status, common)
    doctor = add_command(commands, "doctor", _doctor, common)
    doctor.add_argument(
        "--fail-on", choices=SEVERITIES[:2], default=SEVERITIES[0],
        help="how bad a finding must be for exit status 1 (default: error)",
    )  # fmt: skip
    add_grace(doctor, "what `txbox run` has: handlers should not take longer")
    add_table(commands, common, InboxFilter)
    explain = add_command(commands, "explain", _explain, common)
    add_options(explain, {"message_id ID": _KEY["message_id"][1]})
    add_options(explain, {"--consumer TEXT": "only in its inbox and quarantine"})


def add_table(commands: Any, common: argparse.ArgumentParser, kind: type[Filter[Any, Any]]) -> None:
    """Add list and show of the table that the filter is for."""
    table = kind.table
    listed = add_command(
        commands, "list", _list, common, help=f"list {table.noun}s, newest first, with filters",
        description=f"Lists {table.noun}s, newest first, without payloads. {_LIST[table.name]}",
    )  # fmt: skip
    if table is QUARANTINE:
        add_filter(listed, kind, statuses=(*table.statuses, "all"))
        listed.set_defaults(status=table.statuses[0])
    else:
        add_filter(listed, kind)
    add_options(listed, {"--limit N": "how many (default 50)"})
    before = f"--before {(table.cursor or 'before').upper()}"
    there = "continue the list: the last page prints this at its end"
    add_options(listed, {before: there}, type=count if table.cursor else None)
    listed.set_defaults(kind=kind, limit=50)
    show = add_command(
        commands, "show", _show, common, help=f"show everything about one {table.noun}",
        description=f"Shows everything about one {table.noun}: {_SHOW[table.name]} Of its payload only size and hash "
        "are shown, and of headers the names: add --reveal to see them.",
    )  # fmt: skip
    for column in table.key:
        if column == "hash":
            add_options(
                show, {"--hash HEX": "the hash of its payload; its first digits are enough"}
            )
        else:
            metavar, help_text = _KEY[column]
            add_options(
                show, {f"{column} {metavar}": help_text}, nargs=None if table.cursor else "?"
            )
    add_options(show, {"--reveal": "show payload and header values, too; kept in the audit"})
    add_audit(show)
    show.set_defaults(kind=kind)


def _explain(args: argparse.Namespace) -> int:
    """Says where one message is and why: in the inbox of every consumer, in the outbox and in quarantine. What it
    waits for (an earlier message of its key, a version, its next attempt, a lease, an open transaction, a relay),
    where it came from, what it has caused, and the command that gets it going. It changes nothing and waits for
    nothing.

    With --app it also knows handlers and routes; what it could not check is listed.

    Exit status: 0 it is done or goes on by itself; 1 it needs somebody, or was not found.
    """
    with admin_of(args) as admin:
        explanation = admin.explain(args.message_id, consumer=args.consumer)
    if args.json:
        print_json(explanation)
    else:
        _print_explanation(explanation)
    return 1 if explanation.severity == "stuck" or not explanation.known else 0


def _print_explanation(explanation: Explanation) -> None:
    for number, (title, sentences) in enumerate(views.explanation(explanation)):
        print_line(f"{'' if not number else chr(10)}{shown(title)}")
        for mark, text, command in sentences:
            print_line(f"  {mark} {shown(text)}")
            if command is not None:
                print_line(f"      $ {shown(command)}")


def _status(args: argparse.Namespace) -> int:
    """Counts the messages of each consumer by status, and those in quarantine, with the age of the oldest
    unfinished one (pending, processing or failed). Below: outgoing messages by topic, route and status, paused
    consumers, the size of large tables, the partitions, and what `txbox doctor` finds wrong with any of these.
    """
    with admin_of(args) as admin:
        consumers, topics = admin.status(), admin.topics()
        tables, partitions = admin.sizes()
        paused, checked = admin.pauses(), admin.check()
    if args.json:
        print_json(
            {
                "consumers": consumers, "outbox": topics, "tables": tables, "partitions": partitions, "paused": paused,
                "findings": _plain(checked.findings),
                "unchecked": checked.unchecked,
            }
        )  # fmt: skip
        return 0
    if consumers:
        print_table(*views.consumers(consumers))
    else:
        print_line("The inbox is empty.")
    print_section("Paused", *views.pauses(paused))
    print_section("Outbox", *views.topics(topics))
    if consumers or topics:
        # what is a page or two says nothing
        large = [
            size for size in tables if size.table_bytes + (size.index_bytes or 0) >= _WORTH_A_LINE
        ]
        print_section("Size", *views.sizes(large))
    if partitions is not None:
        _print_partitions(partitions)
    if checked.findings or checked.unchecked:
        print_line("\nFindings:")
        _print_findings(checked)
    return 0


def _print_partitions(partitions: PartitionStatus) -> None:
    until = None if partitions.ready_until is None else shown(partitions.ready_until)
    if partitions.missing:
        print_line(
            f"\nThe partitions of the inbox ({partitions.kind}) end at {until}. {views.DEFAULT_PARTITION}"
        )
    else:
        made = "" if until is None else f", made until {until}"
        print_line(f"\nThe inbox is in {partitions.count} partitions ({partitions.kind}){made}.")


def _list(args: argparse.Namespace) -> int:
    where = filter_of(args)
    table = where.table
    with admin_of(args) as admin:
        rows = admin.list(where, limit=args.limit, before=args.before)
        hint = "" if rows else admin.hint(where)
    more = cursor_of(rows[-1]) if len(rows) == args.limit else None
    if args.json:
        print_json({"quarantined" if table is QUARANTINE else "messages": rows, "before": more})
    elif not rows:
        print_line(shown(f"{views.nothing(where)} {hint}".strip()))
    else:
        print_table(*views.page(table, rows))
        if more is not None:
            print_line(f"There may be more: add --before {more}.")
    return 0


def _show(args: argparse.Namespace) -> int:
    table: Table = args.kind.table
    where = args.kind(**{name: getattr(args, name) for name in table.key})
    aside: Sequence[Any] = ()
    with admin_of(args) as admin:
        show: Any = admin.show
        if args.reveal:
            show = partial(admin.reveal, actor=args.actor, reason=args.reason)
        messages = show(where)
        if table is INBOX:
            aside = show(QuarantineFilter(consumer=where.consumer, message_id=where.message_id))
        if not messages and not aside:
            print_error(_unknown(admin, where))
            return 1
    if args.json:
        print_json(_as_json(table, messages, aside))
        return 0
    for number, message in enumerate(messages):
        if number:
            print_line("")
        _print_message(message)
    print_section("Quarantined under this id", *views.page(QUARANTINE, aside))
    for message in aside:
        _print_bytes(f"Payload {message.hash[:12]}", message.payload)
    return 0


def _unknown(admin: Admin, where: Filter[Any, Any]) -> str:
    if not isinstance(where, InboxFilter):
        return shown(admin.why_not("show", where))
    # of the latest messages only: no index knows how ids end
    latest = admin.list(InboxFilter(consumer=where.consumer), limit=_LATEST)
    ending = str(where.message_id)
    alike = [repr(shown(row.message_id)) for row in latest if row.message_id.endswith(ending)][:3]
    return f"Consumer {where.consumer!r} has no message {shown(ending)!r}: " + (
        f"did you mean {' or '.join(alike)}? Ids of CloudEvents begin with their source."
        if alike
        else "`txbox list` shows which there are."
    )


def _as_json(table: Table, messages: Sequence[Any], aside: Sequence[Any]) -> dict[str, Any]:
    if table is QUARANTINE:
        return {"quarantined": messages}
    message = as_json(messages[0]) if messages else None
    if table is OUTBOX:
        return {"message": message}
    attempts: Any = []
    if message is not None:
        attempts = message.pop("history")
        message["result"] = None if messages[0].result is None else json.loads(messages[0].result)
    return {"message": message, "attempts": attempts, "quarantined": aside}


def _print_message(message: Any) -> None:
    hidden = {"payload": message.payload, "result": getattr(message, "result", None)}
    print_record(
        [
            (name, f"{value} (--reveal prints it)")
            if name in hidden and hidden[name] is None and str(value).endswith("bytes")
            else (name, value)
            for name, value in views.record(message)
        ]
    )
    if error := getattr(message, "error", None):
        print_line(f"\n{printable_lines(error)}")
    print_section("Attempts", *views.attempts(getattr(message, "history", ())))
    _print_bytes("Payload", message.payload)
    _print_bytes("Result", hidden["result"])


def _print_bytes(title: str, content: bytes | None) -> None:
    if content is not None:
        print_line(f"\n{title}:\n{readable(content)}")


def _doctor(args: argparse.Namespace) -> int:
    """Examines the database, the tables and what waits in them; with --app also the settings of the App and of its
    brokers. Each finding has a severity (error, warning, note), a code, the evidence and the remedy. What could not
    be examined is listed, and why. It changes nothing and scans no table.

    Exit status: 0 nothing as bad as --fail-on, 1 something, 2 wrong configuration or no database.
    """
    with admin_of(args) as admin:
        diagnosis = admin.doctor(grace=args.grace)
    if args.json:
        print_json({"findings": _plain(diagnosis.findings), "unchecked": diagnosis.unchecked})
    else:
        _print_diagnosis(diagnosis)
    return 1 if diagnosis.at_least(args.fail_on) else 0


def _plain(findings: Sequence[Finding]) -> list[dict[str, str]]:
    names = ("code", "severity", "problem", "remedy")
    return [{name: getattr(finding, name) for name in names} for finding in findings]


def _print_findings(diagnosis: Diagnosis) -> None:
    for finding in diagnosis.findings:
        print_line(f"{finding.severity}  {finding.code}")
        print_line(f"    {shown(finding.problem)}")
        print_line(f"    -> {shown(finding.remedy)}")
    for unchecked in diagnosis.unchecked:
        print_line(f"not checked  {shown(unchecked.what)}: {shown(unchecked.why)}")


def _print_diagnosis(diagnosis: Diagnosis) -> None:
    _print_findings(diagnosis)
    counts = (
        counted(sum(one.severity == severity for one in diagnosis.findings), severity)
        for severity in SEVERITIES
    )
    print_line(f"{', '.join(counts)}." if diagnosis.findings else "Nothing is wrong.")
