"""The operator's queries as steps: counts, pages, one message with its history, and changes in batches."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Literal

from txbox.steps import Begin, Commit, Rollback, Statement, Steps
from txbox.store import partitions
from txbox.store.codec import Arrival, Leased, decode_headers
from txbox.store.dialect import Dialect, as_time
from txbox.store.inbox import InboxStore
from txbox.store.waits import Waits

Change = Literal["retry", "discard"]

_ENCODED = "(encoded: `txbox show` with --app can read it)"


@dataclass(frozen=True, slots=True, kw_only=True)
class RowFilter:
    """Which rows an operator means; what is None (or no status) is not asked for."""

    consumer: str | None = None
    message_id: str | None = None
    status: str | None = None
    topic: str | None = None
    type: str | None = None
    key: str | None = None
    error_type: str | None = None
    fingerprint: str | None = None
    older_than: timedelta | None = None

    def criteria(self) -> dict[str, str]:
        """What is asked for, for people and for `txbox_audit`."""
        values = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return {name: str(value) for name, value in values.items() if value is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """Who changes rows, and why; written into `txbox_audit` with the change."""

    actor: str
    reason: str | None = None


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
    """One row of a page."""

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
    """A message that was set aside; `payload` only where it was asked for."""

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


@dataclass(frozen=True, slots=True)
class ChangedBatch:
    """One batch of a change: the rows it meant, those left alone, and where the next one starts."""

    rows: tuple[tuple[str, str], ...]
    skipped: int
    next_after: int | None


class InboxRows:
    """The statements with which people look at the inbox and change it."""

    def __init__(self, store: InboxStore) -> None:
        self._store = store

    def _statement(self, name: str, params: dict[str, Any] | None = None) -> Statement:
        # asked for each time: the dialect changes once the schema of the tables is known
        return self._store.dialect.statement(name, params)

    # -- looking ------------------------------------------------------------------------------

    def status(self) -> Steps[list[ConsumerStatus]]:
        """Count the rows of every consumer, in one snapshot where the database gives one."""
        counts: dict[str, dict[str, int]] = {}
        yield Begin()
        for consumer, status, count, _ in (yield self._statement("status")).rows:
            counts.setdefault(consumer, {})[status] = int(count)
        ages = {row[0]: row[1] for row in (yield self._statement("oldest_unfinished")).rows}
        aside = {row[0]: row[1] for row in (yield self._statement("quarantine_status")).rows}
        yield Commit()
        return [
            ConsumerStatus(
                consumer=consumer,
                counts=counts.get(consumer, {}),
                quarantined=int(aside.get(consumer, 0)),
                # a row that arrives between two clocks has no negative age
                oldest_unfinished_s=max(0.0, float(ages[consumer])) if consumer in ages else None,
            )
            for consumer in sorted({*counts, *aside})
        ]

    def sizes(self) -> Steps[tuple[list[TableSize], PartitionStatus | None]]:
        """Read how large the tables are, and how the inbox is partitioned."""
        yield Begin()
        found = yield self._statement("sizes")
        layout = yield from partitions.read(self._store.dialect)
        yield Commit()
        sizes = [
            TableSize(
                table=str(name),
                table_bytes=int(size),
                index_bytes=None if indexes is None else int(indexes),
                partitions=int(count),
            )
            for name, size, indexes, count in found.rows
        ]
        if layout.kind is None:
            return sizes, None
        ready = layout.ready_until
        return sizes, PartitionStatus(
            kind=layout.kind,
            count=len(layout.parts),
            ready_until=ready,
            missing=ready is not None and ready.timestamp() <= layout.clock_s,
        )

    def page(
        self, where: RowFilter, *, limit: int, before: int | None
    ) -> Steps[list[ListedMessage]]:
        """Read rows, newest arrival first."""
        params = {**_filter(where), "status": where.status, "before": before, "limit": limit}
        yield Begin()
        result = yield self._statement("list", params)
        yield Commit()
        return [self._listed(row) for row in result.rows]

    def newest_arrival(self, consumer: str) -> Steps[int]:
        """The number of a consumer's latest arrival; 0 when it has no rows."""
        rows = yield from self.page(RowFilter(consumer=consumer), limit=1, before=None)
        return rows[0].arrival if rows else 0

    def quarantined(self, consumer: str | None, *, limit: int) -> Steps[list[QuarantinedMessage]]:
        """Read the latest quarantine rows."""
        yield Begin()
        result = yield self._statement("list_quarantine", {"consumer": consumer, "limit": limit})
        yield Commit()
        return [
            QuarantinedMessage(
                consumer=row[0], message_id=row[1], hash=bytes(row[2]).hex(), reason=row[3],
                topic=row[4], type=row[5], key=row[6], seen=row[7],
                received_at=_time(row[8]), updated_at=_time(row[9]),
            )
            for row in result.rows
        ]  # fmt: skip

    def shown(
        self, consumer: str, message_id: str, *, reveal: bool
    ) -> Steps[tuple[ShownMessage | None, list[QuarantinedMessage]]]:
        """Read one message with its attempts, and what is quarantined under its id."""
        named = {"consumer": consumer, "message_id": message_id}
        yield Begin()
        found = yield self._statement("show", named)
        attempts = yield self._statement("show_attempts", named)
        aside = yield self._statement("show_quarantine", named)
        yield Commit()
        shown = self._shown(found.rows[0], attempts.rows, reveal) if found.rows else None
        return shown, [self._aside(row, reveal) for row in aside.rows]

    def _shown(self, row: Sequence[Any], attempts: Sequence[Any], reveal: bool) -> ShownMessage:
        columns, key_id = self._store.columns, row[23]
        # show and list name the same columns in another order
        listed = (
            *row[:6],
            row[11],
            row[12],
            *row[7:10],
            *row[13:15],
            row[15],
            row[16],
            row[17],
            row[22],
            row[24],
        )
        content = columns.payload_back(row[21], key_id) if reveal or key_id is None else row[21]
        return ShownMessage(
            message=self._listed(listed, key_id),
            sequence=row[6],
            content_type=row[18],
            headers=tuple((name, _text(value) if reveal else None) for name, value in decode_headers(row[19])),
            origin=json.loads(row[20]) if row[20] else {},
            payload_hash=None if row[10] is None else bytes(row[10]).hex(),
            payload_bytes=None if content is None else len(content),
            payload=bytes(content) if reveal and content is not None else None,
            result_bytes=None if row[25] is None else len(row[25]),
            result=columns.result_back(row[25]) if reveal else None,
            history=tuple(
                RecordedAttempt(
                    attempt=own[0], status=own[1], error_type=own[2], error=self._error(own[3], key_id),
                    fingerprint=own[4], recorded_at=_time(own[5]),
                )
                for own in attempts
            ),
        )  # fmt: skip

    def _aside(self, row: Sequence[Any], reveal: bool) -> QuarantinedMessage:
        content = self._store.columns.payload_back(row[10], row[11]) if reveal else row[10]
        return QuarantinedMessage(
            consumer=row[0], message_id=row[1], hash=bytes(row[2]).hex(), reason=row[3],
            topic=row[4], type=row[5], key=row[6], seen=row[12],
            received_at=_time(row[13]), updated_at=_time(row[14]),
            payload_bytes=None if content is None else len(content),
            payload=bytes(content) if reveal and content is not None else None,
        )  # fmt: skip

    def _listed(self, row: Sequence[Any], key_id: str | None = None) -> ListedMessage:
        return ListedMessage(
            consumer=row[0], message_id=row[1], status=row[2], topic=row[3], type=row[4], key=row[5],
            attempts=row[6], starts=row[7], received_at=_time(row[8]), updated_at=_time(row[9]),
            processed_at=as_time(row[10]), next_attempt_at=as_time(row[11]), lease_until=as_time(row[12]),
            error_type=row[13], error=self._error(row[14], key_id), fingerprint=row[15],
            has_payload=bool(row[16]), arrival=row[17],
        )  # fmt: skip

    def _error(self, text: str | None, key_id: str | None) -> str | None:
        known = self._store.columns.error_back(text, key_id)
        return _ENCODED if known is not None and known.startswith("codec:") else known

    # -- changing -----------------------------------------------------------------------------

    def change(
        self,
        action: Change,
        where: RowFilter,
        statuses: tuple[str, str],
        audit: Audit | None,
        *,
        spared: str | None,
        after: int,
        limit: int,
    ) -> Steps[ChangedBatch]:
        """Change one batch of rows in a transaction of its own, in arrival order.

        Args:
            audit: None makes it a dry run, which is rolled back.
            spared: rows with this error type are counted and left alone.

        Guarantee: rows that a live delivery holds are left to it, without waiting; the change and
            its audit row are one commit.
        """
        yield Begin()
        found = yield self._statement(
            "select_for_change",
            {
                **_filter(where),
                "message_id": where.message_id,
                "status_a": statuses[0],
                "status_b": statuses[1],
                # without its payload a row would wait for ever
                "needs_payload": action == "retry",
                "after": after,
                "limit": limit,
            },
        )
        chosen = tuple((row[0], row[1]) for row in found.rows if spared is None or row[4] != spared)
        batch = ChangedBatch(
            chosen, len(found.rows) - len(chosen),
            found.rows[-1][3] if len(found.rows) == limit else None,
        )  # fmt: skip
        if audit is None or not chosen:
            yield Rollback()
            return batch
        yield self._store.dialect.statement(
            action,
            rows={"consumer": [row[0] for row in chosen], "message_id": [row[1] for row in chosen]},
        )
        yield self._audit(audit, action, where, len(chosen))
        yield Commit()
        return batch

    def kept(self, where: RowFilter, *, after: int, limit: int) -> Steps[list[Leased]]:
        """Read messages whose payload was kept, in arrival order, without locking them."""
        assert where.consumer is not None
        yield Begin()
        result = yield self._statement(
            "replay_read",
            {
                "consumer": where.consumer,
                "message_id": where.message_id,
                "status": where.status,
                "topic": where.topic,
                "type": where.type,
                "key": where.key,
                "after": after,
                "limit": limit,
            },
        )
        yield Commit()
        columns = self._store.columns
        return [columns.arrival(where.consumer, row) for row in result.rows]

    def announce(self, audit: Audit, action: str, where: RowFilter, affected: int) -> Steps[None]:
        """Write the audit row of work whose own transactions follow."""
        yield Begin()
        yield self._audit(audit, action, where, affected)
        yield Commit()

    def copy(
        self,
        consumer: str,
        arrivals: Sequence[Arrival],
        audit: Audit,
        where: RowFilter,
        *,
        token: str,
    ) -> Steps[int]:
        """Store messages as pending rows of another consumer, in the order given; returns how many were new."""
        yield Begin()
        # in arrival order, not by id: two such commands may deadlock, and are tried again
        fresh = yield from self._store.store(consumer, arrivals, token=token)
        yield self._audit(audit, f"replay as {consumer}", where, len(fresh))
        yield Commit()
        return len(fresh)

    def _audit(self, audit: Audit, action: str, where: RowFilter, affected: int) -> Statement:
        own = self._store.dialect
        return audit_statement(own, audit, action, where.criteria(), affected=affected)


def audit_statement(
    own: Dialect, audit: Audit, action: str, criteria: dict[str, str], *, affected: int
) -> Statement:
    """The statement that records a change."""
    return own.statement(
        "audit",
        {
            "actor": audit.actor,
            "action": action,
            "filter": json.dumps(criteria, sort_keys=True),
            "affected": affected,
            "reason": audit.reason,
        },
    )


def _filter(where: RowFilter) -> dict[str, Any]:
    return {
        "consumer": where.consumer,
        "topic": where.topic,
        "type": where.type,
        "key": where.key,
        "error_type": where.error_type,
        "fingerprint": where.fingerprint,
        "older_than_s": None if where.older_than is None else where.older_than.total_seconds(),
    }


def _time(value: Any) -> datetime:
    found = as_time(value)
    assert found is not None
    return found


def _text(value: str | bytes | None) -> str | None:
    return value.decode("utf-8", "backslashreplace") if isinstance(value, bytes) else value
