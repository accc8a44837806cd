"""What operators see, as tables and records for the command line and the pages to render."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from txbox.admin.activity import WorkerStatus
from txbox.admin.changes import Changed
from txbox.admin.replay import ReplayFailure
from txbox.admin.tables import (
    INBOX,
    OUTBOX,
    QUARANTINE,
    ConsumerStatus,
    Filter,
    RecordedAttempt,
    Table,
    TableSize,
    TopicStatus,
    Verb,
)
from txbox.outcome import Status
from txbox.store.activity import Pause, Trouble
from txbox.text import UNMATCHED, Cell, View, counted, moment

if TYPE_CHECKING:
    from txbox.admin.explain import Explanation

#: Names and values of one message.
Record = list[tuple[str, Cell]]

#: What a verb has done.
DONE = {
    "retry": "retried", "discard": "discarded", "reroute": "rerouted", "accept": "accepted", "replay": "replayed",
}  # fmt: skip
#: What the lack of partitions means.
DEFAULT_PARTITION = (
    "Newer messages go to the default partition until `txbox run` or `txbox maintain` makes more."
)
_ERROR_CHARACTERS = 120
_MARKS = {"stuck": "!", "waits": "…", "ok": "✓", "info": "-", "unchecked": "?"}


@dataclass(frozen=True, slots=True)
class Column:
    """How people see a field of messages.

    Args:
        field: its name in rows, filters and JSON.
        heading: by default that name.
        lists: the tables whose lists have it, at the place that the field has in their rows.
        value: what is shown of a row; by default the field.
        short: what a list shows instead.
        wide: text of any length, which lists have at their end.
        option: metavar and help of the filter's option.
    """

    field: str
    heading: str = ""
    lists: Sequence[Table] = ()
    value: Callable[[Any], Cell] | None = None
    short: Callable[[Any], Cell] | None = None
    wide: bool = False
    option: str | None = None

    def __call__(self, row: Any) -> Cell:
        cell: Cell = getattr(row, self.field) if self.value is None else self.value(row)
        return cell


def noun_of(table: Table, verb: Verb, status: str | None) -> str:
    """What a filter without message ids means, such as "dead message"."""
    if table is QUARANTINE:
        return table.noun
    meant = table.changes[verb].meant
    return f"{status or (meant[0] if len(meant) == 1 else 'waiting')} {table.noun}"


def label(criterion: str) -> str:
    """How people call a field, or a criterion of a filter."""
    return _LABELS.get(criterion, criterion.replace("_", " "))


def extent(table: Table, verb: Verb, criteria: Mapping[str, str]) -> str:
    """Say in words what a filter means to a verb: every dead message of consumer billing."""
    chosen = ", ".join(
        f"{label(name)} {value}" for name, value in criteria.items() if name != "status"
    )
    of = f" of {chosen}" if chosen else f" in the whole {table.name}"
    return f"every {noun_of(table, verb, criteria.get('status'))}{of}"


def extents(table: Table, criteria: Mapping[str, str]) -> list[tuple[list[Verb], str]]:
    """What a filter means to each verb that its status allows; verbs to which it means the same stand together."""
    verbs: dict[str, list[Verb]] = {}
    for verb, change in table.changes.items():
        if criteria.get("status") in (None, *change.statuses):
            verbs.setdefault(extent(table, verb, criteria), []).append(verb)
    return [(named, words) for words, named in verbs.items()]


def breakdown(changes: Sequence[Changed]) -> View:
    """What changes match, by consumer and status."""
    counts: dict[tuple[str, str], int] = {}
    for matching in (part for change in changes for part in change.matching):
        group = matching.consumer or UNMATCHED, matching.status
        counts[group] = counts.get(group, 0) + matching.rows
    if any(part.consumer is not None for change in changes for part in change.matching):
        return View(
            ("consumer", "status", "messages"),
            [(*group, counts[group]) for group in sorted(counts)],
        )
    return View(("status", "messages"), [(group[1], counts[group]) for group in sorted(counts)])


def spared(count: int) -> str:
    """Why a retry in bulk leaves messages alone."""
    return f"{count:,} skipped: their handler broke the transaction, so their effects are unknown. Check each"


def without_payload(count: int) -> str:
    """Why a retry in bulk leaves messages without a payload alone."""
    bare = f"{counted(count)} without a payload cannot be retried"
    return f"{bare}: send them again from their producer, or discard them."


def done(count: int, noun: str, verb: str, *, dry_run: bool = False) -> str:
    """What a change did, or in a dry run would do."""
    return f"{counted(count, noun)} {'would be ' if dry_run else ''}{DONE[verb]}."


def refusals(table: Table, refused: Sequence[Mapping[str, str]]) -> list[str]:
    """Why the first ten rows that cannot be accepted are not, and how many more there are."""
    named = zip(keys(table, refused[:10]).rows, refused, strict=False)
    said = [f"{' '.join(map(str, row))}: {refusal['reason']}." for row, refusal in named]
    if (more := len(refused) - 10) > 0:
        said.append(f"And {more} more that cannot be accepted.")
    return said


def nothing(where: Filter[Any, Any]) -> str:
    """What an empty list means."""
    table, criteria = where.table, where.criteria()
    if table is QUARANTINE and criteria in ({}, {"status": table.statuses[0]}):
        return "Nothing is quarantined."
    return f"No {table.noun} matches." if criteria else f"The {table.name} is empty."


def consumers(statuses: Iterable[ConsumerStatus]) -> View:
    """The inbox by consumer and status."""
    counted = ("pending", "processing", "failed", "dead", "processed", "discarded")
    view = View(("consumer", *counted, "quarantined", "oldest unfinished"), [])
    for status in statuses:
        counts = [status.counts.get(name, 0) for name in counted]
        age = _age(status.oldest_unfinished_s)
        view.rows.append((status.consumer or UNMATCHED, *counts, status.quarantined, age))
    return view


def topics(statuses: Iterable[TopicStatus]) -> View:
    """The outbox by topic, route and status."""
    view = View(("topic", "route", *OUTBOX.statuses, "oldest waiting"), [])
    for status in statuses:
        counts = [status.counts.get(name, 0) for name in OUTBOX.statuses]
        age = _age(status.oldest_waiting_s)
        view.rows.append((status.topic, status.route or "any", *counts, age))
    return view


def sizes(tables: Iterable[TableSize]) -> View:
    """How large the tables are."""
    view = View(("table", "table, MB", "indexes, MB", "partitions"), [])
    for size in tables:
        parts = size.partitions if size.partitions > 1 else "-"
        sizes = _megabytes(size.table_bytes), _megabytes(size.index_bytes)
        view.rows.append((size.table, *sizes, parts))
    return view


def workers(statuses: Iterable[WorkerStatus]) -> View:
    """The processes at work."""
    columns = (
        "host", "pid", "command", "state", "consumers", "busy", "lanes", "leases", "in flight", "app", "version",
        "started", "seen",
    )  # fmt: skip
    view = View(columns, [])
    for each in statuses:
        names = [f"{name} (paused)" if name in each.paused else name for name in each.consumers]
        consumers = ", ".join(names) or "-"
        doing = each.busy, each.lanes, each.leases, each.in_flight
        view.rows.append(
            (each.host, each.pid, each.kind, each.state, consumers, *doing, each.app, each.version, each.started_at,
             each.seen_at)
        )  # fmt: skip
    return view


def _where(trouble: Trouble) -> str:
    name = trouble.name or "any"
    return name if trouble.topic is None else f"{name}, topic {trouble.topic}"


def troubles(statuses: Iterable[WorkerStatus]) -> View:
    """The brokers that processes wait for."""
    rows: list[tuple[Cell, ...]] = [
        (f"{worker.host}:{worker.pid}", trouble.kind, _where(trouble),
         datetime.fromtimestamp(trouble.since_s, UTC), trouble.error)
        for worker in statuses
        for trouble in worker.troubles
    ]  # fmt: skip
    return View(("process", "cannot reach", "name", "since", "error"), rows)


def pauses(paused: Iterable[Pause]) -> View:
    """Paused consumers."""
    return View(
        ("consumer", "since", "by", "reason"),
        [(pause.consumer, pause.paused_at, pause.actor, pause.reason) for pause in paused],
    )


def page(table: Table, rows: Iterable[Any], front: Sequence[str] = ()) -> View:
    """One row for each message; `front` are the fields to begin with."""
    names = [*front, *(item.name for item in fields(table.row))]
    columns = (column for column in COLUMNS if table in column.lists)
    by_place = sorted(
        columns, key=lambda one: (one.wide and one.field not in front, names.index(one.field))
    )
    return _view(by_place, rows)


def _view(columns: Sequence[Column], rows: Iterable[Any]) -> View:
    return View(
        tuple(label(column.field) for column in columns),
        [tuple((column.short or column)(row) for column in columns) for row in rows],
    )


def record(message: Any) -> Record:
    """Everything about one message except error, attempts and payload."""
    columns = (column for column in COLUMNS if column.field != "error")
    values = (
        (label(column.field), column(message))
        for column in columns
        if hasattr(message, column.field)
    )
    return [(name, value) for name, value in values if value not in (None, "")]


def attempts(history: Iterable[RecordedAttempt]) -> View:
    """The attempts of one message."""
    return View(
        ("attempt", "at", "became", "error"),
        [(past.attempt, past.recorded_at, past.status, _error(past)) for past in history],
    )


def failures(failed: Iterable[ReplayFailure]) -> View:
    """The messages whose replay failed."""
    return View(("id", "error"), [(failure.message_id, _error(failure)) for failure in failed])


def explanation(explained: Explanation) -> list[tuple[str, list[tuple[str, str, str | None]]]]:
    """Each location of a message: its title, and for each sentence a mark, the text and a command."""
    places: list[tuple[str, list[tuple[str, str, str | None]]]] = []
    for location in explained.places:
        where = (
            f" of {location.consumer or UNMATCHED}"
            if location.table in ("inbox", "quarantine")
            else ""
        )
        title = f"{explained.message_id} in the {location.table}{where}: {location.status}"
        places.append(
            (
                title if location.table else f"{explained.message_id}: unknown",
                [(_MARKS[said.severity], said.text, said.command) for said in location.sentences],
            )
        )
    return places


def keys(table: Table, named: Iterable[Mapping[str, str]]) -> View:
    """The keys of rows, such as the sample of a change."""
    columns = [column for column in COLUMNS if column.field in table.key]
    return _view(columns, (SimpleNamespace(**key) for key in named))


def _first_in_line(row: Any) -> str | None:
    if row.waits_for is None:
        return None
    return row.waits_for.message_id or f"version {row.waits_for.version}"


def _waits_for(row: Any) -> str | None:
    waits = row.waits_for
    if waits is None:
        return None
    if waits.message_id is None:
        return f"version {waits.version} of its key, which has not arrived"
    at = _next_attempt(waits)
    return f"{waits.message_id} ({waits.status}{f', next attempt {moment(at)}' if at else ''})"


def _next_attempt(row: Any) -> datetime | None:
    at: datetime | None = row.next_attempt_at
    return at if row.status in (Status.FAILED, Status.PENDING, "delayed") else None


def _caused_by(row: Any) -> str | None:
    return None if row.cause_id is None else f"{row.cause_consumer or ''} {row.cause_id}".strip()


def _error(row: Any) -> str | None:
    if row.error_type is None:
        return None
    if not row.error:
        return str(row.error_type)
    return f"{row.error_type}: {row.error.partition(chr(10))[0]}"[:_ERROR_CHARACTERS]


def _headers(message: Any) -> str:
    return ", ".join(
        name if value is None else f"{name}={value}" for name, value in message.headers
    )


def _payload(message: Any) -> str:
    if not getattr(message, "has_payload", True):
        return "not kept"
    if message.unreadable is not None:
        return str(message.unreadable)
    size = message.payload_bytes
    return "none: a tombstone, or dropped" if size is None else f"{size} bytes"


def _age(seconds: float | None) -> Cell:
    return "-" if seconds is None else timedelta(seconds=seconds)


def _megabytes(count: int | None) -> str:
    return "-" if count is None else f"{count / 1_000_000:,.1f}"


_ALL = (INBOX, OUTBOX, QUARANTINE)
#: Those of all three tables, in the order of a record.
COLUMNS = (
    Column("consumer", "", (INBOX, QUARANTINE), lambda row: row.consumer or UNMATCHED, option="TEXT of this consumer"),
    Column("message_id", "id", _ALL, lambda row: row.message_id or "(none)"),
    Column(
        "hash", lists=(QUARANTINE,), short=lambda row: row.hash[:12],
        option="HEX whose payload has this hash; its first digits are enough",
    ),
    Column("status", lists=_ALL, option="STATUS"),
    Column("topic", lists=_ALL, option="TEXT of this topic"),
    Column(
        "route", lists=(OUTBOX,), value=lambda row: row.route or "any",
        option="ROUTE with this route, as `txbox status` shows it",
    ),
    Column("type", lists=_ALL, option="TEXT of this type"),
    Column("key", lists=(INBOX, OUTBOX), option="TEXT with this ordering key"),
    Column("sequence"), Column("number"), Column("time", "event time"),
    Column("received_at", "received", (INBOX, QUARANTINE)), Column("staged_at", "staged", (OUTBOX,)),
    Column("cause_id", "caused by", value=_caused_by),
    Column("updated_at", "updated"), Column("processed_at", "processed"), Column("sent_at", "sent"),
    Column("next_attempt_at", "next attempt", (OUTBOX,), _next_attempt),
    Column("waits_for", lists=(INBOX, OUTBOX), value=_waits_for, short=_first_in_line),
    Column("lease_until", "leased until"), Column("attempts", lists=(INBOX, OUTBOX)),
    Column("starts", "unfinished starts", value=lambda row: row.starts or None), Column("seen", lists=(QUARANTINE,)),
    Column("content_type"), Column("headers", value=_headers),
    Column("origin", value=lambda row: ", ".join(f"{name}={value}" for name, value in row.origin.items())),
    Column("payload", value=_payload), Column("payload_hash", "payload sha-256"),
    Column("result", value=lambda row: None if row.result_bytes is None else f"{row.result_bytes} bytes"),
    Column("reason", lists=(QUARANTINE,), wide=True),
    Column("error_type", option="TEXT whose last error has this type, such as TimeoutError"),
    Column("fingerprint", option="TEXT whose last error has this fingerprint, as `txbox show` prints it"),
    Column("error", lists=(INBOX, OUTBOX), value=_error, wide=True),
)  # fmt: skip
_LABELS = {column.field: column.heading for column in COLUMNS if column.heading} | {
    "since": "received from", "until": "received before", "id_prefix": "ids that begin with",
}  # fmt: skip
