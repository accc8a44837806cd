"""The tables as operators see them: rows, filters, statuses, and what may be changed."""

from __future__ import annotations

import base64
import json
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import datetime, timedelta
from operator import add
from typing import Any, ClassVar, Generic, Literal, NamedTuple, TypeVar

from txbox.boundaries import Boundary, log
from txbox.errors import ConfigurationError, UnreadableMessage, UnusableMessage, check_duration
from txbox.identity import DIGEST_PREFIX, canonical_id
from txbox.message import Headers, Message
from txbox.outcome import Status
from txbox.store.codec import Columns, Row, decode_origin
from txbox.store.dialect import as_time
from txbox.store.order import Waits

#: A page counts up to this and one.
COUNTED_MAX = 10_000
#: What operators do to rows.
Verb = Literal["retry", "discard", "reroute", "accept"]
_ENCODED_HEADERS = "(encoded)"


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerStatus:
    """One consumer: rows by status, what is quarantined, and how old its oldest unfinished row is."""

    consumer: str
    counts: dict[str, int]
    quarantined: int
    oldest_unfinished_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicStatus:
    """The outgoing messages of one topic and route.

    Attributes:
        route: where it goes; "" is any App that publishes or consumes the topic.
        counts: rows by status.
        oldest_waiting_s: the age of the oldest row that is due, leased or failed.
    """

    topic: str
    route: str
    counts: dict[str, int]
    oldest_waiting_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TableSize:
    """How large a table is.

    Attributes:
        table: its name; on SQLite that of the one file with all tables.
        table_bytes: without its indexes, where these are known separately.
        index_bytes: None where that is not known.
        partitions: how many tables it consists of.
    """

    table: str
    table_bytes: int
    index_bytes: int | None
    partitions: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionStatus:
    """How the inbox is partitioned.

    Attributes:
        kind: "uuid7", "ulid" or "hash".
        count: how many partitions there are.
        ready_until: until when partitions exist, where each is for a span of time.
        missing: new rows have no partition and go to the default one, which only batches prune.
    """

    kind: str
    count: int
    ready_until: datetime | None
    missing: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Audited:
    """One batch of an operator's change.

    Attributes:
        actor: who, as the command line or the dashboard knows them.
        login: the database role.
        filter: the criteria by name.
        affected: rows of this batch.
    """

    number: int
    recorded_at: datetime
    actor: str
    login: str | None
    action: str
    filter: dict[str, str]
    affected: int
    reason: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureGroup:
    """Messages that failed in the same way and are dead, or wait for their next attempt.

    Attributes:
        consumers: for each consumer how many are dead and how many failed.
        first_at: when the first of them was received.
        last_at: when one of them failed last.
        sample: consumer and id of one of them.
        by_hour: how many failed last in each of the last 24 hours, the oldest first.
        error: the first line of the sample's error, for the largest groups.
        more: only the newest failures of a consumer were grouped; there may be more.
    """

    fingerprint: str | None
    error_type: str | None
    count: int
    consumers: Mapping[str, Mapping[str, int]]
    first_at: datetime
    last_at: datetime
    sample: tuple[str, str]
    by_hour: tuple[int, ...]
    error: str | None = None
    more: bool = False

    def joined(self, other: FailureGroup) -> FailureGroup:
        """This group with those of another consumer or status."""
        consumers = {name: dict(counts) for name, counts in self.consumers.items()}
        for name, counts in other.consumers.items():
            known = consumers.setdefault(name, {})
            for status, count in counts.items():
                known[status] = known.get(status, 0) + count
        return replace(
            self,
            count=self.count + other.count,
            consumers=consumers,
            first_at=min(self.first_at, other.first_at),
            last_at=max(self.last_at, other.last_at),
            by_hour=tuple(map(add, self.by_hour, other.by_hour)),
            more=self.more or other.more,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class QuarantineGroup:
    """Quarantined messages that wait for a decision, of one reason, consumer, topic and producer.

    Attributes:
        consumer: "" where no handler takes them.
        source: that of CloudEvents, whose ids begin with it and a blank; None for other ids.
        more: only the newest were grouped; there may be more.
    """

    consumer: str
    reason: str
    topic: str | None
    source: str | None
    count: int
    first_at: datetime
    last_at: datetime
    more: bool


# The fields of a row are the columns of its `…_list` query, in their order.


@dataclass(frozen=True, slots=True, kw_only=True)
class InboxRow:
    """A message of one consumer.

    Attributes:
        attempts: failures so far.
        starts: runs from the table that never ended.
        arrival: its number in the order of arrivals, the cursor of pages.
        waits_for: what must finish first, where an App has a handler with an order.
    """

    consumer: str
    message_id: str
    status: str
    topic: str
    type: str | None
    key: str | None
    attempts: int
    starts: int
    received_at: datetime
    updated_at: datetime
    processed_at: datetime | None
    next_attempt_at: datetime | None
    lease_until: datetime | None
    error_type: str | None
    error: str | None
    fingerprint: str | None
    has_payload: bool
    arrival: int
    waits_for: Waits | None = field(default=None, metadata={"column": False})


@dataclass(frozen=True, slots=True, kw_only=True)
class OutboxRow:
    """An outgoing message.

    Attributes:
        number: its number in the order of staging, the cursor of pages.
        status: `due`, `delayed` (staged for later), `leased` by a relay, `failed` (waits for its next
            attempt), `dead`, `sent`, `discarded`.
        route: where it goes; "" is any App that publishes or consumes the topic.
        next_attempt_at: when a delayed or failed one is due.
        waits_for: the message of its key that must leave first; in a list only its id.
    """

    message_id: str
    number: int
    status: str
    topic: str
    route: str
    type: str | None
    key: str | None
    attempts: int
    staged_at: datetime
    next_attempt_at: datetime | None
    lease_until: datetime | None
    sent_at: datetime | None
    cause_consumer: str | None
    cause_id: str | None
    error_type: str | None
    error: str | None
    waits_for: Waits | None


@dataclass(frozen=True, slots=True, kw_only=True)
class QuarantineRow:
    """A quarantined message.

    Attributes:
        hash: of its payload, in hexadecimal digits.
        status: "quarantined" until an operator decides, then "accepted" or "discarded"; "replaced" is
            the original of an edited message.
        seen: how often it arrived.
        kept_bytes: the stored size of its payload; 0 when it was dropped, or there was none.
    """

    consumer: str
    message_id: str
    hash: str
    status: str
    reason: str
    topic: str | None
    type: str | None
    key: str | None
    seen: int
    received_at: datetime
    updated_at: datetime
    kept_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedAttempt:
    """One entry of a message's history."""

    attempt: int
    status: str
    error_type: str | None
    error: str | None
    fingerprint: str | None
    recorded_at: datetime


@dataclass(frozen=True, kw_only=True)
class Content:
    """What a message carries; payload and header values only when revealed, after the App's redaction.

    Attributes:
        redacted: a rule hides part of payload or result, so what is shown is not what is stored.
        unreadable: why payload, header values or result cannot be shown.
    """

    content_type: str | None
    headers: tuple[tuple[str, str | None], ...]
    payload_bytes: int | None
    payload: bytes | None
    redacted: bool = False
    unreadable: str | None = None


@dataclass(frozen=True, kw_only=True)
class InboxMessage(Content, InboxRow):
    """A message with everything that is known of it.

    Attributes:
        time: when the event happened, as its producer says.
    """

    origin: dict[str, Any]
    time: datetime | None
    sequence: int | None
    payload_hash: str | None
    result_bytes: int | None
    result: bytes | None
    history: tuple[RecordedAttempt, ...]


@dataclass(frozen=True, kw_only=True)
class OutboxMessage(Content, OutboxRow):
    """An outgoing message with everything that is known of it."""


@dataclass(frozen=True, kw_only=True)
class QuarantinedMessage(Content, QuarantineRow):
    """A quarantined message with everything that is known of it.

    Attributes:
        time: when the event happened, as its producer says.
    """

    origin: dict[str, Any]
    time: datetime | None


RowT = TypeVar("RowT")
MessageT = TypeVar("MessageT")


class Change(NamedTuple):
    """The statuses that a verb may change, in an order that meets no row twice.

    `meant` are those that a filter stands for when it names neither a status nor a message.
    """

    statuses: tuple[str, ...]
    meant: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A table as operators see it.

    Attributes:
        name: the prefix of its queries.
        noun: what one row is called.
        key: the columns that identify a row.
        cursor: the column that pages and batches continue by; None where the key itself is the mark.
        audited: how `txbox_audit` and events name a verb.
    """

    name: str
    noun: str
    row: type[Any]
    message: type[Any]
    content: tuple[str, ...]
    key: tuple[str, ...]
    cursor: str | None
    statuses: tuple[str, ...]
    changes: Mapping[Verb, Change]
    audited: str


INBOX = Table(
    name="inbox",
    noun="message",
    row=InboxRow,
    message=InboxMessage,
    content=("content_type", "headers", "payload", "origin", "sequence", "payload_hash", "result"),
    key=("consumer", "message_id"),
    cursor="arrival",
    statuses=tuple(Status),
    changes={
        # failed first: a dead row that is retried is failed
        "retry": Change(("failed", "dead"), meant=("dead",)),
        "discard": Change(("pending", "failed", "dead"), meant=("dead",)),
    },
    audited="{}",
)
OUTBOX = Table(
    name="outbox",
    noun="outgoing message",
    row=OutboxRow,
    message=OutboxMessage,
    content=("content_type", "headers", "payload"),
    key=("message_id",),
    cursor="number",
    statuses=("due", "delayed", "leased", "failed", "dead", "sent", "discarded"),
    changes={
        "retry": Change(("failed", "dead"), meant=("dead",)),
        "discard": Change(("due", "delayed", "failed", "dead"), meant=("dead",)),
        "reroute": Change(("due", "delayed", "failed", "dead"), meant=("due", "delayed", "failed")),
    },
    audited="{} outgoing",
)
_WAITING = Change(("quarantined",), meant=("quarantined",))
QUARANTINE = Table(
    name="quarantine",
    noun="quarantined message",
    row=QuarantineRow,
    message=QuarantinedMessage,
    content=("content_type", "headers", "payload", "origin"),
    key=("consumer", "message_id", "hash"),
    cursor=None,
    statuses=("quarantined", "accepted", "discarded", "replaced"),
    changes={"accept": _WAITING, "discard": _WAITING},
    audited="quarantine {}",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Filter(Generic[RowT, MessageT]):
    """Criteria for the rows of one table; None matches everything.

    Args:
        older_than: received or staged longer ago than this.
        since, until: received or staged at that time or later, and before that one.
        id_prefix: how the id begins.
    """

    table: ClassVar[Table]

    message_id: str | None = None
    status: str | None = None
    topic: str | None = None
    type: str | None = None
    key: str | None = None
    older_than: timedelta | None = None
    since: datetime | None = None
    until: datetime | None = None
    id_prefix: str | None = None

    @property
    def named(self) -> bool:
        """Whether it names single messages."""
        return self.message_id is not None or getattr(self, "hash", None) is not None

    def criteria(self) -> dict[str, str]:
        """The criteria that are set, as text for people and `txbox_audit`."""
        return {name: str(value) for name, value in asdict(self).items() if value is not None}

    def params(self) -> dict[str, Any]:
        """The criteria as parameters of the queries.

        Raises:
            ConfigurationError: as for `stored_id`, or an age of more than ten years.
        """
        values = asdict(self)
        age = values.pop("older_than")
        check_duration("older_than", age)
        # "" is what came without an id
        if self.message_id:
            values["message_id"] = stored_id(self.message_id)
        if self.id_prefix is not None:
            values["id_prefix"] = stored_id(self.id_prefix)
        for name in ("since", "until"):
            moment: datetime | None = values.pop(name)
            values[f"{name}_s"] = None if moment is None else moment.timestamp()
        return {**values, "older_than_s": None if age is None else age.total_seconds()}


@dataclass(frozen=True, slots=True, kw_only=True)
class InboxFilter(Filter[InboxRow, InboxMessage]):
    """Criteria for messages of the inbox."""

    table = INBOX

    consumer: str | None = None
    error_type: str | None = None
    fingerprint: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OutboxFilter(Filter[OutboxRow, OutboxMessage]):
    """Criteria for outgoing messages."""

    table = OUTBOX

    route: str | None = None
    error_type: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class QuarantineFilter(Filter[QuarantineRow, QuarantinedMessage]):
    """Criteria for quarantined messages.

    Args:
        hash: of the payload, in hexadecimal digits; a prefix is enough.
        reason: why they were set aside, word for word.
    """

    table = QUARANTINE

    consumer: str | None = None
    hash: str | None = None
    reason: str | None = None


def stored_id(message_id: str) -> str:
    """The id in the row: a long one is stored as its hash, which is accepted as well.

    Raises:
        ConfigurationError: no message has this id: it is empty, or contains what no database can store.
    """
    try:
        return message_id if message_id.startswith(DIGEST_PREFIX) else canonical_id(message_id)
    except UnusableMessage as error:
        raise ConfigurationError(str(error)) from None


def row_of(columns: Columns, table: Table, row: Sequence[Any]) -> Any:
    """Read a row of a `…_list` query."""
    return table.row(**_named(columns, table, _columns(table), row)[0])


def message_of(
    columns: Columns,
    table: Table,
    row: Sequence[Any],
    attempts: Sequence[Sequence[Any]],
    *,
    reveal: bool,
) -> Any:
    """Read a row of a `…_show` query, in the inbox with those of its attempts; unreadable values are omitted."""
    values, key_id = _named(columns, table, (*_columns(table), *table.content), row)
    bound = _bound(table, values)
    payload, unreadable = values["payload"], None
    size = None if payload is None else len(payload)
    if reveal or key_id is None:
        try:
            payload = columns.payload_back(payload, key_id, bound)
            size = None if payload is None else len(payload)
        except UnreadableMessage as error:
            payload, unreadable = None, str(error)
    values["payload_bytes"] = size
    payload, redacted = _shown(columns, "body", payload if reveal else None)
    values["payload"] = payload
    try:
        headers = columns.headers_back(values["headers"], bound)
        values["headers"] = _headers(columns, headers, reveal=reveal)
    except UnreadableMessage as error:
        values["headers"] = ((_ENCODED_HEADERS, None),)
        unreadable = unreadable or (str(error) if reveal else None)
    if "origin" in values:
        values["time"] = None
        with shown(values, "origin", {}):
            values["origin"], values["time"] = decode_origin(values["origin"])
    if table is INBOX:
        result = values["result"]
        values["result_bytes"] = None if result is None else len(result)
        try:
            result = columns.result_back(result, bound) if reveal else None
        except UnreadableMessage as error:
            result, unreadable = None, str(error)
        values["result"], hidden = _shown(columns, "result", result)
        redacted |= hidden
        names = [item.name for item in fields(RecordedAttempt)]
        values["history"] = tuple(
            RecordedAttempt(**_named(columns, table, names, attempt, bound)[0])
            for attempt in attempts
        )
    return table.message(**values, redacted=redacted, unreadable=unreadable)


def _shown(
    columns: Columns, what: Literal["body", "result"], data: Any
) -> tuple[bytes | None, bool]:
    """Apply the redaction rules; returns what may be shown, and whether anything is hidden."""
    return (None, False) if data is None else columns.redact.json(what, bytes(data))


def age_of(seconds: Any) -> float | None:
    """An age by the database's clock; clocks differ: never negative."""
    return None if seconds is None else max(0.0, float(seconds))


def quarantined(columns: Columns, row: Sequence[Any]) -> tuple[int, Message[Any]]:
    """Read a row of `quarantine_lock`: how many bytes of the payload are kept, and the message.

    Raises:
        UnreadableMessage: it was written through a codec that this app does not have, or that fails on it.
    """
    values = dict(zip((*_columns(QUARANTINE), *QUARANTINE.content), row, strict=True))
    origin, time = decode_origin(values["origin"])
    bound = _bound(QUARANTINE, values)
    message: Message[Any] = Message(
        topic=values["topic"] or "",
        type=values["type"],
        key=values["key"],
        payload=columns.payload_back(values["payload"], values["key_id"], bound),
        headers=columns.headers_back(values["headers"], bound),
        content_type=values["content_type"],
        time=time,
        origin=origin,
        consumer=values["consumer"],
    )
    return int(values["kept_bytes"]), message


def cursor_of(row: InboxRow | OutboxRow | QuarantineRow) -> int | str:
    """The cursor of a row: as `before`, it makes `Admin.list` continue behind the row."""
    if isinstance(row, QuarantineRow):
        mark = json.dumps([row.consumer, row.message_id, row.hash])
        return base64.urlsafe_b64encode(mark.encode()).decode()
    return row.arrival if isinstance(row, InboxRow) else row.number


def mark_params(key: tuple[Any, ...] | int | None) -> dict[str, Any]:
    """Where a page or a batch continues: behind the row with this key, in a table without a number for that."""
    mark = key if isinstance(key, tuple) else (None, None, None)
    return dict(zip(("mark_consumer", "mark_id", "mark_hash"), mark, strict=True))


def mark_of(cursor: str) -> tuple[str, str, bytes]:
    """The key of the quarantine row at this cursor.

    Raises:
        ConfigurationError: not a cursor.
    """
    with suppress(ValueError, TypeError, RecursionError):
        consumer, message_id, digits = json.loads(base64.urlsafe_b64decode(cursor))
        if isinstance(consumer, str) and isinstance(message_id, str):
            return consumer, message_id, bytes.fromhex(str(digits))
    raise ConfigurationError(_NO_CURSOR)


def number_of(cursor: int | str) -> int:
    """The cursor of a row of the inbox or the outbox.

    Raises:
        ConfigurationError: not a cursor.
    """
    with suppress(ValueError, TypeError):
        number = int(cursor)
        if 0 <= number < 2**63:
            return number
    raise ConfigurationError(_NO_CURSOR)


_NO_CURSOR = "Invalid cursor: copy the one printed below the page before."


def _columns(table: Table) -> tuple[str, ...]:
    named = (item.name for item in fields(table.row) if item.metadata.get("column", True))
    return (*named, "key_id")


def _bound(table: Table, values: Mapping[str, Any]) -> Row:
    if table is QUARANTINE:
        return Row(values["consumer"], values["message_id"], _digest(values["hash"]))
    return Row(None if table is OUTBOX else values["consumer"], values["message_id"])


def _digest(value: Any) -> bytes:
    return bytes.fromhex(value) if isinstance(value, str) else bytes(value)


def _named(
    columns: Columns,
    table: Table,
    names: Sequence[str],
    row: Sequence[Any],
    bound: Row | None = None,
) -> tuple[dict[str, Any], str | None]:
    """The columns of a row by name, decoded and redacted, and the key id of its codec."""
    values = dict(zip(names, row, strict=True))
    key_id = values.pop("key_id", None)
    for name, value in values.items():
        if value is not None:
            with shown(values, name):
                values[name] = _column(columns, table, name, values, bound)
    return values, key_id


def _column(
    columns: Columns, table: Table, name: str, values: Mapping[str, Any], bound: Row | None
) -> Any:
    value = values[name]
    if name.endswith(("_at", "_until")):
        return as_time(value)
    if name in ("hash", "payload_hash"):
        return bytes(value).hex()
    if name == "has_payload":
        return bool(value)
    if name == "error":
        return columns.error_back(value, bound or _bound(table, values))
    if name == "reason":
        return columns.redact.error(value)
    return Waits(message_id=value) if name == "waits_for" else value


@contextmanager
def shown(values: dict[str, Any], name: str, instead: Any = None) -> Generator[None]:
    """Decode a column for people: one that cannot be shown says so, or is `instead`, and hides no other row."""
    try:
        yield
    except Exception as error:  # noqa: BLE001  # it was altered, or a codec or a rule fails on it
        raised = type(error).__name__
        log.warning("A column cannot be shown: %s: %s (boundary: %s)", name, raised, Boundary.ROW)
        is_text = isinstance(values[name], str) and not name.endswith(("_at", "_until"))
        values[name] = f"(cannot be shown: {raised})" if is_text and instead is None else instead


def _headers(
    columns: Columns, headers: Headers, *, reveal: bool
) -> tuple[tuple[str, str | None], ...]:
    """The names of headers, and their values when revealed."""
    return tuple(
        (name, columns.redact.header(name, _text(value)) if reveal else None)
        for name, value in headers
    )


def _text(value: str | bytes | None) -> str | None:
    return value.decode("utf-8", "backslashreplace") if isinstance(value, bytes) else value
