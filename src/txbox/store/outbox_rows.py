"""The operator's queries on the outbox as steps: counts, pages, one message, and changes in batches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from txbox.steps import Begin, Commit, Rollback, Steps
from txbox.store import shown
from txbox.store.audit import Audit, Change
from txbox.store.dialect import as_time
from txbox.store.filters import OutgoingFilter
from txbox.store.inbox import InboxStore

#: What becomes of an outgoing message, as people see it; the first four are `pending` in the table.
STATUSES = ("due", "delayed", "leased", "failed", "dead", "sent", "discarded")
_PENDING = STATUSES[:4]
# the columns of outbox_list, in their order
_LIST = (
    "id", "number", "state", "topic", "type", "key", "attempts", "staged_at", "available_at", "sent_at",
    "cause_consumer", "cause_id", "error_type", "error", "key_id", "route", "waits_for",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicStatus:
    """What goes one way, of one topic.

    Attributes:
        route: where it goes; "" is whoever publishes or consumes the topic.
        counts: rows by status.
        overdue: of those that are due, how many have been for a minute without an attempt: no relay
            that has the route is running, or it is behind, or its broker is away.
        oldest_waiting_s: how long ago the oldest row was staged that is due, leased or failed.
    """

    topic: str
    route: str
    counts: dict[str, int]
    overdue: int
    oldest_waiting_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedOutgoing:
    """One row of a page of the outbox.

    Attributes:
        status: `due`, `delayed` (staged for later), `leased` by a relay, `failed` (waits for its next
            attempt), `dead`, `sent`, `discarded`.
        next_attempt_at: when a delayed or failed one is due.
        route: where it goes; "" is whoever publishes or consumes the topic.
        waits_for: the id of the message of its key that must leave before it.
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
    waits_for: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownOutgoing:
    """An outgoing message with everything that is known of it; payload and header values only when revealed.

    Attributes:
        waits_for: the message of its key that must leave before it.
    """

    message: ListedOutgoing
    waits_for: ListedOutgoing | None
    content_type: str | None
    headers: tuple[tuple[str, str | None], ...]
    payload_bytes: int | None
    payload: bytes | None


@dataclass(frozen=True, slots=True)
class OutgoingBatch:
    """One batch of a change.

    Attributes:
        ids: the messages it meant.
        next_after: the number behind which the next batch begins; None when this is the last.
    """

    ids: tuple[str, ...]
    next_after: int | None


class OutboxRows:
    """The statements with which people look at the outbox and change it."""

    def __init__(self, store: InboxStore) -> None:
        self._store = store

    def status(self) -> Steps[list[TopicStatus]]:
        """Count the rows of every topic and route."""
        counts: dict[tuple[str, str], dict[str, int]] = {}
        ages: dict[tuple[str, str], float] = {}
        overdue: Counter[tuple[str, str]] = Counter()
        yield Begin()
        found = yield self._store.dialect.statement("outbox_status")
        yield Commit()
        for topic, route, status, count, age_s, late in found.rows:
            where = topic, route
            counts.setdefault(where, {})[status] = int(count)
            overdue[where] += int(late)
            if status in ("due", "leased", "failed"):
                # a row that is staged between two clocks has no negative age
                ages[where] = max(ages.get(where, 0.0), float(age_s))
        return [
            TopicStatus(
                topic=where[0], route=where[1], counts=by_status, overdue=overdue[where],
                oldest_waiting_s=ages.get(where),
            )
            for where, by_status in sorted(counts.items())
        ]  # fmt: skip

    def page(
        self, where: OutgoingFilter, *, limit: int, before: int | None
    ) -> Steps[list[ListedOutgoing]]:
        """Read rows, newest first.

        Args:
            before: the number of the last row of the page before; None for the first page.
        """
        yield Begin()
        listed = yield from self._listed(where, limit, before)
        yield Commit()
        return listed

    def shown(self, message_id: str, *, reveal: bool) -> Steps[ShownOutgoing | None]:
        """Read one message, and the one it waits for; None when it is not there.

        Args:
            reveal: with payload and header values.

        Raises:
            ConfigurationError: revealed, and written through a codec that this app does not have.
        """
        yield Begin()
        found = yield from self._listed(OutgoingFilter(message_id=message_id), 1, None)
        if not found:
            yield Rollback()
            return None
        (message,) = found
        content = yield self._store.dialect.statement("outbox_content", {"id": message_id})
        ahead: list[ListedOutgoing] = []
        if message.waits_for is not None:
            ahead = yield from self._listed(OutgoingFilter(message_id=message.waits_for), 1, None)
        yield Commit()
        if not content.rows:
            return None
        content_type, headers, payload, key_id = content.rows[0]
        if reveal or key_id is None:
            payload = self._store.columns.payload_back(payload, key_id)
        return ShownOutgoing(
            message=message,
            waits_for=ahead[0] if ahead else None,
            content_type=content_type,
            headers=shown.headers(self._store.columns, headers, key_id, reveal=reveal),
            payload_bytes=None if payload is None else len(payload),
            payload=bytes(payload) if reveal and payload is not None else None,
        )

    def _listed(
        self, where: OutgoingFilter, limit: int, before: int | None
    ) -> Steps[list[ListedOutgoing]]:
        # the status of the table first: it is what an index knows
        stored = "pending" if where.status in _PENDING else where.status
        result = yield self._store.dialect.statement(
            "outbox_list",
            {
                **_filter(where),
                "id": where.message_id,
                "stored": stored,
                "state": where.status,
                "before": before,
                "limit": limit,
            },
        )
        return [self._row(row) for row in result.rows]

    def _row(self, row: Sequence[Any]) -> ListedOutgoing:
        values = shown.named(_LIST, row)
        status, at = values["state"], as_time(values["available_at"])
        return ListedOutgoing(
            message_id=values["id"],
            number=values["number"],
            status=status,
            topic=values["topic"],
            route=values["route"],
            type=values["type"],
            key=values["key"],
            attempts=values["attempts"],
            staged_at=shown.known_time(values["staged_at"]),
            next_attempt_at=at if status in ("delayed", "failed") else None,
            lease_until=at if status == "leased" else None,
            sent_at=as_time(values["sent_at"]),
            cause_consumer=values["cause_consumer"],
            cause_id=values["cause_id"],
            error_type=values["error_type"],
            error=shown.error(
                self._store.columns, values["error"], values["key_id"], "outbox show"
            ),
            waits_for=values["waits_for"],
        )

    def change(
        self,
        action: Change,
        where: OutgoingFilter,
        statuses: Sequence[str],
        audit: Audit | None,
        *,
        after: int,
        limit: int,
        to: str | None = None,
    ) -> Steps[OutgoingBatch]:
        """Change one batch of rows in a transaction of its own, in the order of their numbers.

        Args:
            statuses: those that are changed, as people see them.
            audit: None makes it a dry run, which is rolled back.
            after: the number behind which the batch begins; -1 for the first.
            to: the route that a reroute gives.

        Guarantee: rows that a relay has leased or is marking are left to it, without waiting; the
            change and its audit row are one commit.
        """
        dialect = self._store.dialect
        yield Begin()
        found = yield dialect.statement(
            "outbox_select",
            {**_filter(where), "id": where.message_id, "after": after, "limit": limit},
            {"state": list(statuses)},
        )
        batch = OutgoingBatch(
            tuple(row[0] for row in found.rows),
            found.rows[-1][1] if len(found.rows) == limit else None,
        )
        if audit is None or not batch.ids:
            yield Rollback()
            return batch
        yield dialect.statement(f"outbox_{action}", {"to": to}, rows={"id": list(batch.ids)})
        yield audit.statement(dialect, f"{action} outgoing", where, affected=len(batch.ids))
        yield Commit()
        return batch


def _filter(where: OutgoingFilter) -> dict[str, Any]:
    return {
        "topic": where.topic,
        "route": where.route,
        "type": where.type,
        "key": where.key,
        "error_type": where.error_type,
        "older_than_s": None if where.older_than is None else where.older_than.total_seconds(),
    }
