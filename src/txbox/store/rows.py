"""The operator's queries on the inbox as steps: counts, pages, one message with its history, changes in batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from txbox.errors import ConfigurationError, UnusableMessage
from txbox.identity import TOMBSTONE_HASH
from txbox.message import Message
from txbox.steps import Begin, Commit, Rollback, Statement, Steps
from txbox.store import partitions, shown
from txbox.store.audit import Audit, Change
from txbox.store.codec import Arrival, Leased
from txbox.store.dialect import Dialect
from txbox.store.filters import QuarantineFilter, RowFilter
from txbox.store.inbox import InboxStore
from txbox.store.shown import (
    ConsumerStatus,
    ListedMessage,
    PartitionStatus,
    QuarantinedMessage,
    ShownMessage,
    TableSize,
)

#: Consumer, message id and hash of a quarantine row.
QuarantineKey = tuple[str, str, bytes]
#: Most quarantine rows that one command changes.
QUARANTINE_MAX = 100_000
_SHOWN_MAX = 20
_PAYLOAD_GONE = (
    "its payload was dropped (Retention.quarantine_bytes): let its producer send it again"
)
_PAYLOAD_CUT = (
    "not all of its payload was kept, or its hash is made in another way: give --app if the handler has "
    "payload_hash=, else let its producer send it again"
)


@dataclass(frozen=True, slots=True)
class ChangedBatch:
    """One batch of a change.

    Attributes:
        rows: those it meant, as (consumer, message id).
        skipped: how many were left alone.
        next_after: the arrival behind which the next batch begins; None when this is the last.
    """

    rows: tuple[tuple[str, str], ...]
    skipped: int
    next_after: int | None


class InboxRows:
    """The statements with which people look at the inbox and change it."""

    def __init__(self, store: InboxStore) -> None:
        self._store = store

    @property
    def _dialect(self) -> Dialect:
        # asked for each time: it is another once the schema of the tables is known
        return self._store.dialect

    # -- looking ------------------------------------------------------------------------------

    def status(self) -> Steps[list[ConsumerStatus]]:
        """Count the rows of every consumer, in one snapshot where the database gives one."""
        counts: dict[str, dict[str, int]] = {}
        yield Begin()
        for consumer, status, count, _ in (yield self._dialect.statement("status")).rows:
            counts.setdefault(consumer, {})[status] = int(count)
        ages = {row[0]: row[1] for row in (yield self._dialect.statement("oldest_unfinished")).rows}
        aside = {
            row[0]: row[1] for row in (yield self._dialect.statement("quarantine_status")).rows
        }
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
        found = yield self._dialect.statement("sizes")
        layout = yield from partitions.read(self._dialect)
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
        """Read rows, newest arrival first.

        Args:
            before: the arrival of the last row of the page before; None for the first page.
        """
        params = {**_filter(where), "status": where.status, "before": before, "limit": limit}
        yield Begin()
        result = yield self._dialect.statement("list", params)
        yield Commit()
        return [shown.listed(self._store.columns, row) for row in result.rows]

    def newest_arrival(self, consumer: str) -> Steps[int]:
        """The number of a consumer's latest arrival; 0 when it has no rows."""
        rows = yield from self.page(RowFilter(consumer=consumer), limit=1, before=None)
        return rows[0].arrival if rows else 0

    def quarantined(
        self, where: QuarantineFilter, *, limit: int
    ) -> Steps[list[QuarantinedMessage]]:
        """Read the latest quarantine rows."""
        yield Begin()
        result = yield self._dialect.statement(
            "list_quarantine", {**_quarantine(where), "limit": limit}
        )
        yield Commit()
        return [shown.quarantined(row) for row in result.rows]

    def shown(
        self, consumer: str, message_id: str, *, reveal: bool
    ) -> Steps[tuple[ShownMessage | None, list[QuarantinedMessage]]]:
        """Read one message with its attempts, and what is quarantined under its id.

        Args:
            reveal: with payload and header values.

        Raises:
            ConfigurationError: revealed, and written through a codec that this app does not have.
        """
        named = {"consumer": consumer, "message_id": message_id}
        alike = {**named, "hash_prefix": None, "limit": _SHOWN_MAX}
        yield Begin()
        found = yield self._dialect.statement("show", named)
        attempts = yield self._dialect.statement("show_attempts", named)
        aside = yield self._dialect.statement("show_quarantine", alike)
        yield Commit()
        columns = self._store.columns
        message = None
        if found.rows:
            message = shown.message(columns, found.rows[0], attempts.rows, reveal=reveal)
        return message, [shown.quarantined_whole(columns, row, reveal=reveal) for row in aside.rows]

    # -- changing -----------------------------------------------------------------------------

    def change(
        self,
        action: Change,
        where: RowFilter,
        consumer: str,
        status: str,
        audit: Audit | None,
        *,
        spared: str | None,
        after: int,
        limit: int,
    ) -> Steps[ChangedBatch]:
        """Change one batch of one consumer's rows in a transaction of its own, in arrival order.

        Args:
            where: what the operator asked for, which may be of all consumers.
            audit: None makes it a dry run, which is rolled back.
            spared: rows with this error type are counted and left alone.
            after: the arrival behind which the batch begins; -1 for the first.

        Guarantee: rows that a live delivery holds are left to it, without waiting; the change and
            its audit row are one commit.
        """
        yield Begin()
        found = yield self._dialect.statement(
            "select_for_change",
            {
                **_meant(action, where, status),
                "consumer": consumer,
                "after": after,
                "limit": limit,
            },
        )
        rows = found.rows
        chosen = tuple(
            (consumer, message_id)
            for consumer, message_id, _, _, error_type in rows
            if spared is None or error_type != spared
        )
        batch = ChangedBatch(
            rows=chosen,
            skipped=len(rows) - len(chosen),
            next_after=rows[-1][3] if len(rows) == limit else None,
        )
        if audit is None or not chosen:
            yield Rollback()
            return batch
        yield self._dialect.statement(
            action,
            rows={"consumer": [row[0] for row in chosen], "message_id": [row[1] for row in chosen]},
        )
        yield audit.statement(self._dialect, action, where, affected=len(chosen))
        yield Commit()
        return batch

    def show_quarantined(
        self, where: QuarantineFilter, *, reveal: bool
    ) -> Steps[list[QuarantinedMessage]]:
        """Read quarantine rows as a whole, the oldest first.

        Raises:
            ConfigurationError: as for `shown`.
        """
        yield Begin()
        found = yield self._dialect.statement(
            "show_quarantine", {**_quarantine(where), "limit": _SHOWN_MAX}
        )
        yield Commit()
        columns = self._store.columns
        return [shown.quarantined_whole(columns, row, reveal=reveal) for row in found.rows]

    def select_quarantined(self, where: QuarantineFilter) -> Steps[list[QuarantineKey]]:
        """The quarantine rows that wait for a decision, in the order in which they came, without locking them."""
        yield Begin()
        found = yield self._dialect.statement(
            "select_quarantine",
            {**_quarantine(where), "status": "quarantined", "limit": QUARANTINE_MAX},
        )
        yield Commit()
        return [(row[0], row[1], bytes(row[2])) for row in found.rows]

    def discard_quarantined(
        self, keys: Sequence[QuarantineKey], audit: Audit, where: QuarantineFilter
    ) -> Steps[int]:
        """Give one batch of quarantine rows up; returns how many were still waiting for a decision.

        Guarantee: the change and its audit row are one commit.
        """
        yield Begin()
        done = yield self._ended("discarded", keys)
        yield audit.statement(self._dialect, "quarantine discard", where, affected=done.count)
        yield Commit()
        return int(done.count)

    def accept_quarantined(
        self,
        key: QuarantineKey,
        arrival_of: Callable[[Message[Any]], Arrival],
        audit: Audit | None,
        where: QuarantineFilter,
        *,
        token: str,
    ) -> Steps[str | None]:
        """Store one quarantined message as pending.

        Args:
            arrival_of: gives the message the id and the hash that it is stored with.
            audit: None makes it a dry run, which is rolled back.

        Returns:
            None, or why it cannot be accepted.

        Raises:
            ConfigurationError: written through a codec that this app does not have.

        Guarantee: the pending row, the end of the quarantine row and the audit row are one commit.
        """
        consumer, message_id, hashed = key
        yield Begin()
        found = yield self._dialect.statement(
            "take_quarantined", {"consumer": consumer, "message_id": message_id, "hash": hashed}
        )
        if not found.rows:
            yield Rollback()
            return "somebody else has decided on it meanwhile"
        try:
            row, message = shown.quarantined_message(self._store.columns, found.rows[0])
            arrival = arrival_of(message)
        except UnusableMessage as error:
            yield Rollback()
            return str(error)
        except ConfigurationError:
            yield Rollback()
            raise
        if not _whole(message.payload, hashed, arrival):
            yield Rollback()
            return _PAYLOAD_CUT if row.kept_bytes else _PAYLOAD_GONE
        fresh = yield from self._store.store(consumer, [arrival], token=token)
        if not fresh:
            yield Rollback()
            return f"{consumer} has another message under the id {arrival.message_id}: give it one of its own (--id)"
        if audit is None:
            yield Rollback()
            return None
        yield self._ended("accepted", [key])
        yield audit.statement(self._dialect, "quarantine accept", where, affected=1)
        yield Commit()
        return None

    def _ended(self, status: str, keys: Sequence[QuarantineKey]) -> Statement:
        return self._dialect.statement(
            "end_quarantined",
            {"status": status},
            {
                "consumer": [key[0] for key in keys],
                "message_id": [key[1] for key in keys],
                "hash": [key[2] for key in keys],
            },
        )

    def meant(
        self, action: Change, where: RowFilter, status: str, *, spared: str | None
    ) -> Steps[dict[str, tuple[int, int]]]:
        """Count by consumer what `change` would change and what it would leave alone, without a lock."""
        yield Begin()
        counted = yield self._dialect.statement(
            "count_for_change", {**_meant(action, where, status), "spared": spared}
        )
        yield Commit()
        return {row[0]: (int(row[1]) - int(row[2]), int(row[2])) for row in counted.rows}

    def kept(self, where: RowFilter, *, after: int, limit: int) -> Steps[list[Leased]]:
        """Read messages whose payload was kept, in arrival order, without locking them.

        Args:
            where: of one consumer; error type, fingerprint and age are not asked for.
            after: as for `change`.

        Raises:
            ConfigurationError: a payload was written through a codec that this app does not have.
        """
        assert where.consumer is not None
        yield Begin()
        result = yield self._dialect.statement(
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
        yield audit.statement(self._dialect, action, where, affected=affected)
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
        """Store messages as pending rows of another consumer, in the order given; returns how many were new.

        Guarantee: the rows and their audit row are one commit.
        """
        yield Begin()
        # in arrival order, not by id: two such commands may deadlock, and are tried again
        fresh = yield from self._store.store(consumer, arrivals, token=token)
        yield audit.statement(self._dialect, f"replay as {consumer}", where, affected=len(fresh))
        yield Commit()
        return len(fresh)


def _whole(payload: bytes | None, hashed: bytes, arrival: Arrival) -> bool:
    """Say whether this is the payload that was hashed; without one, whether there was none."""
    if payload is None:
        return hashed in (TOMBSTONE_HASH, sha256(b"").digest())
    return hashed in (sha256(payload).digest(), arrival.hash)


def _quarantine(where: QuarantineFilter) -> dict[str, Any]:
    return {
        "consumer": where.consumer,
        "message_id": where.message_id,
        "hash_prefix": None if where.hash is None else where.hash.lower(),
        "status": where.status,
        "topic": where.topic,
        "type": where.type,
        "older_than_s": None if where.older_than is None else where.older_than.total_seconds(),
    }


def _meant(action: Change, where: RowFilter, status: str) -> dict[str, Any]:
    # without its payload a retried row would wait for ever
    return {**_filter(where), "status": status, "needs_payload": action == "retry"}


def _filter(where: RowFilter) -> dict[str, Any]:
    return {
        "consumer": where.consumer,
        "message_id": where.message_id,
        "topic": where.topic,
        "type": where.type,
        "key": where.key,
        "error_type": where.error_type,
        "fingerprint": where.fingerprint,
        "older_than_s": None if where.older_than is None else where.older_than.total_seconds(),
    }
