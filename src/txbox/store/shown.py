"""What people are shown of the inbox, and how it is read from the rows of the queries."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from txbox.message import Message
from txbox.store.codec import ENCODED_ERROR, Columns, decode_origin
from txbox.store.dialect import as_time
from txbox.store.waits import Waits

# the columns of the queries, in their order
_LIST = (
    "consumer", "message_id", "status", "topic", "type", "key", "attempts", "starts", "received_at", "updated_at",
    "processed_at", "next_attempt_at", "lease_until", "error_type", "error", "fingerprint", "has_payload", "arrival",
)  # fmt: skip
_SHOW = (
    "consumer", "message_id", "status", "topic", "type", "key", "sequence", "received_at", "updated_at",
    "processed_at", "payload_hash", "attempts", "starts", "next_attempt_at", "lease_until", "error_type", "error",
    "fingerprint", "content_type", "headers", "origin", "payload", "has_payload", "key_id", "arrival", "result",
)  # fmt: skip
_SHOW_ATTEMPTS = ("attempt", "status", "error_type", "error", "fingerprint", "recorded_at")
_LIST_QUARANTINE = (
    "consumer", "message_id", "hash", "reason", "topic", "type", "key", "seen", "received_at", "updated_at", "status",
    "kept_bytes",
)  # fmt: skip
_SHOW_QUARANTINE = (
    "consumer", "message_id", "hash", "reason", "topic", "type", "key", "content_type", "headers", "origin",
    "payload", "key_id", "seen", "received_at", "updated_at", "status", "kept_bytes",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerStatus:
    """One consumer: rows by status, what is quarantined, and how old its oldest unfinished row is."""

    consumer: str
    counts: dict[str, int]
    quarantined: int
    oldest_unfinished_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TableSize:
    """How large a table is.

    Attributes:
        table: its name; on SQLite all tables are one file, whose size is known.
        table_bytes: without its indexes, where those are known.
        index_bytes: of all its indexes; None where that is not known.
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
        ready_until: until when partitions are made, where they are of a time each.
        missing: rows of now have no partition: they go to the default one, which only batches prune.
    """

    kind: str
    count: int
    ready_until: datetime | None
    missing: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedMessage:
    """One row of a page.

    Attributes:
        attempts: failures so far.
        starts: runs from the table that never ended.
        arrival: its place in the order of arrivals, by which pages go on.
        waits_for: what stands in its way; asked for by the Admin, where an App says that there is an order.
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
    waits_for: Waits | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedAttempt:
    """One entry of a message's history."""

    attempt: int
    status: str
    error_type: str | None
    error: str | None
    fingerprint: str | None
    recorded_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class QuarantinedMessage:
    """A message that was set aside.

    Attributes:
        hash: of its payload, in hexadecimal digits.
        seen: how often it came.
        status: "quarantined" until somebody decides, then "accepted" or "discarded".
        kept_bytes: how much of its payload is stored; 0 when it was dropped, or had none.
        payload_bytes: how much of its payload was kept; None where it was not asked for.
        payload: only when revealed.
    """

    consumer: str
    message_id: str
    hash: str
    reason: str
    topic: str | None
    type: str | None
    key: str | None
    seen: int
    received_at: datetime
    updated_at: datetime
    status: str
    kept_bytes: int
    payload_bytes: int | None = None
    payload: bytes | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownMessage:
    """A message with everything that is known of it; payload and header values only when revealed."""

    message: ListedMessage
    sequence: int | None
    content_type: str | None
    headers: tuple[tuple[str, str | None], ...]
    origin: dict[str, Any]
    payload_hash: str | None
    payload_bytes: int | None
    payload: bytes | None
    result_bytes: int | None
    result: bytes | None
    history: tuple[RecordedAttempt, ...]


def listed(columns: Columns, row: Sequence[Any]) -> ListedMessage:
    """Read a row of `list`."""
    return _listed(columns, named(_LIST, row), None)


def message(
    columns: Columns, row: Sequence[Any], attempts: Sequence[Sequence[Any]], *, reveal: bool
) -> ShownMessage:
    """Read a row of `show`, with those of `show_attempts`.

    Raises:
        ConfigurationError: revealed, and written through a codec that this app does not have.
    """
    values = named(_SHOW, row)
    key_id, result = values["key_id"], values["result"]
    payload = values["payload"]
    if reveal or key_id is None:
        payload = columns.payload_back(payload, key_id)
    return ShownMessage(
        message=_listed(columns, values, key_id),
        sequence=values["sequence"],
        content_type=values["content_type"],
        headers=headers(columns, values["headers"], key_id, reveal=reveal),
        origin=json.loads(values["origin"]) if values["origin"] else {},
        payload_hash=None
        if values["payload_hash"] is None
        else bytes(values["payload_hash"]).hex(),
        payload_bytes=None if payload is None else len(payload),
        payload=bytes(payload) if reveal and payload is not None else None,
        result_bytes=None if result is None else len(result),
        result=columns.result_back(result) if reveal else None,
        history=tuple(_attempt(columns, attempt, key_id) for attempt in attempts),
    )


def quarantined(row: Sequence[Any]) -> QuarantinedMessage:
    """Read a row of `list_quarantine`."""
    return _quarantined(named(_LIST_QUARANTINE, row))


def quarantined_message(
    columns: Columns, row: Sequence[Any]
) -> tuple[QuarantinedMessage, Message[Any]]:
    """Read a row of `take_quarantined`, with the message that it was.

    Raises:
        ConfigurationError: written through a codec that this app does not have.
    """
    values = named(_SHOW_QUARANTINE, row)
    origin, time = decode_origin(values["origin"])
    message: Message[Any] = Message(
        topic=values["topic"] or "",
        type=values["type"],
        key=values["key"],
        payload=columns.payload_back(values["payload"], values["key_id"]),
        headers=columns.headers_back(values["headers"], values["key_id"]),
        content_type=values["content_type"],
        time=time,
        origin=origin,
        consumer=values["consumer"],
    )
    return _quarantined(values), message


def quarantined_whole(columns: Columns, row: Sequence[Any], *, reveal: bool) -> QuarantinedMessage:
    """Read a row of `show_quarantine`.

    Raises:
        ConfigurationError: revealed, and written through a codec that this app does not have.
    """
    values = named(_SHOW_QUARANTINE, row)
    payload = (
        columns.payload_back(values["payload"], values["key_id"]) if reveal else values["payload"]
    )
    return _quarantined(values, payload, reveal=reveal)


def _listed(columns: Columns, values: Mapping[str, Any], key_id: str | None) -> ListedMessage:
    return ListedMessage(
        consumer=values["consumer"],
        message_id=values["message_id"],
        status=values["status"],
        topic=values["topic"],
        type=values["type"],
        key=values["key"],
        attempts=values["attempts"],
        starts=values["starts"],
        received_at=known_time(values["received_at"]),
        updated_at=known_time(values["updated_at"]),
        processed_at=as_time(values["processed_at"]),
        next_attempt_at=as_time(values["next_attempt_at"]),
        lease_until=as_time(values["lease_until"]),
        error_type=values["error_type"],
        error=error(columns, values["error"], key_id, "show"),
        fingerprint=values["fingerprint"],
        has_payload=bool(values["has_payload"]),
        arrival=values["arrival"],
    )


def _attempt(columns: Columns, row: Sequence[Any], key_id: str | None) -> RecordedAttempt:
    values = named(_SHOW_ATTEMPTS, row)
    return RecordedAttempt(
        attempt=values["attempt"],
        status=values["status"],
        error_type=values["error_type"],
        error=error(columns, values["error"], key_id, "show"),
        fingerprint=values["fingerprint"],
        recorded_at=known_time(values["recorded_at"]),
    )


def _quarantined(
    values: Mapping[str, Any], payload: Any = None, *, reveal: bool = False
) -> QuarantinedMessage:
    return QuarantinedMessage(
        consumer=values["consumer"],
        message_id=values["message_id"],
        hash=bytes(values["hash"]).hex(),
        reason=values["reason"],
        topic=values["topic"],
        type=values["type"],
        key=values["key"],
        seen=values["seen"],
        received_at=known_time(values["received_at"]),
        updated_at=known_time(values["updated_at"]),
        status=values["status"],
        kept_bytes=int(values["kept_bytes"]),
        payload_bytes=None if payload is None else len(payload),
        payload=bytes(payload) if reveal and payload is not None else None,
    )


def named(columns: Sequence[str], row: Sequence[Any]) -> dict[str, Any]:
    """A row by its columns."""
    return dict(zip(columns, row, strict=True))


def headers(
    columns: Columns, text: str | None, key_id: str | None, *, reveal: bool
) -> tuple[tuple[str, str | None], ...]:
    """Read a column of headers; their values only when revealed, and names only where they can be decoded.

    Raises:
        ConfigurationError: revealed, and written through a codec that this app does not have.
    """
    if not reveal and text is not None and text.startswith(ENCODED_ERROR) and not columns.key_id:
        return (("(encoded)", None),)
    return tuple(
        (name, _text(value) if reveal else None)
        for name, value in columns.headers_back(text, key_id)
    )


def _text(value: str | bytes | None) -> str | None:
    return value.decode("utf-8", "backslashreplace") if isinstance(value, bytes) else value


def error(columns: Columns, text: str | None, key_id: str | None, command: str) -> str | None:
    """Read a column of error texts; of one that cannot be decoded here, tell the command that can.

    Args:
        key_id: None where the query does not select it.
        command: of `txbox`.
    """
    known = columns.error_back(text, key_id)
    if known is not None and known.startswith(ENCODED_ERROR):
        return f"(encoded: `txbox {command}` with --app can read it)"
    return known


def known_time(value: Any) -> datetime:
    """Read a column of times that is never NULL."""
    found = as_time(value)
    assert found is not None
    return found
