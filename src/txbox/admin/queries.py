"""The operator's queries: counts, pages, single messages, and changes in batches with their audit row."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Any, Generic, NamedTuple

from txbox.admin import tables
from txbox.admin.canary import State
from txbox.admin.tables import (
    INBOX,
    QUARANTINE,
    Audited,
    ConsumerStatus,
    FailureGroup,
    Filter,
    InboxFilter,
    MessageT,
    PartitionStatus,
    QuarantineFilter,
    RowT,
    TableSize,
    TopicStatus,
    Verb,
)
from txbox.errors import ConfigurationError, UnusableMessage
from txbox.identity import TOMBSTONE_HASH
from txbox.message import Message
from txbox.session import Session, Statement
from txbox.store import partitions
from txbox.store.codec import Arrival, Leased
from txbox.store.inbox import InboxStore

#: What names a row: the columns of `Table.key`.
Key = tuple[Any, ...]
_BATCH = 500
_SHOWN_MAX = 20
#: What is more than this is not counted for a page.
COUNTED_MAX = 10_000
# failures that are looked at to be grouped: of one consumer and status, at least and at most, and of all
_GROUPED_MIN, _GROUPED_MAX, _GROUPED = 100, 2_000, 3_000
# of one statement of a page
_LOOK_MS = 5_000
# greater than every place in a table
_LAST = 2**63 - 1
# rows that a page begins to look through, and how many times as many it takes next
_STRETCH, _LONGER = 1_000, 8
#: The statuses that an index knows, and the query that reads by it.
_OPEN = {
    "inbox": ("pending", "processing", "failed", "dead", "discarded"),
    "outbox": ("dead", "sent", "discarded"),
}
_INDEXED = {"inbox": "inbox_list_open", "outbox": "outbox_list_ended"}
# the place of key_id among the columns of a lease
_KEY_ID = 14
#: What a relay should have sent.
_WAITING = ("due", "leased", "failed")
_PAYLOAD_GONE = (
    "its payload was dropped (Retention.quarantine_bytes): let its producer send it again"
)
_PAYLOAD_CUT = (
    "not all of its payload was kept, or its hash is made in another way: give --app if the handler has "
    "payload_hash=, else let its producer send it again"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """Who changes rows, and why; written into `txbox_audit` with the change."""

    actor: str
    reason: str | None = None


class Meant(NamedTuple):
    """What a change would find of one status and consumer, and what of it it would leave alone."""

    status: str
    consumer: str | None
    rows: int
    spared: int


class Page(NamedTuple, Generic[RowT]):
    """Rows, the newest first, and the place behind which there may be more; None when there are none."""

    rows: list[RowT]
    behind: int | str | None


class Batch(NamedTuple):
    """One batch of a change: the rows it meant, how many were left alone, and where the next one begins, if any."""

    keys: list[Key]
    spared: int
    place: Any


class Queries:
    """The statements with which people look at the tables and change them."""

    def __init__(self, store: InboxStore) -> None:
        self._store = store

    def _statement(
        self,
        name: str,
        params: Mapping[str, Any] | None = None,
        rows: Mapping[str, Sequence[Any]] | None = None,
    ) -> Statement:
        # the dialect is another once the schema of the tables is known
        return self._store.dialect.statement(name, params, rows)

    def _audit(
        self, audit: Audit, action: str, where: Filter[Any, Any], affected: int
    ) -> Statement:
        params = {"actor": audit.actor, "action": action, "reason": audit.reason}
        asked = json.dumps(where.criteria(), sort_keys=True)
        return self._statement("audit", {**params, "filter": asked, "affected": affected})

    # -- looking ------------------------------------------------------------------------------

    async def status(self, db: Session) -> list[ConsumerStatus]:
        """Count the rows of every consumer, in one snapshot where the database gives one."""
        counts: dict[str, dict[str, int]] = {}
        await db.begin()
        for consumer, status, count in (await db.execute(self._statement("status"))).rows:
            counts.setdefault(consumer, {})[status] = int(count)
        ages = {
            row[0]: row[1] for row in (await db.execute(self._statement("oldest_unfinished"))).rows
        }
        aside = {
            row[0]: row[1] for row in (await db.execute(self._statement("quarantine_status"))).rows
        }
        await db.commit()
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

    async def topics(self, db: Session) -> list[TopicStatus]:
        """Count the outgoing rows of every topic and route."""
        await db.begin()
        found = await db.execute(self._statement("outbox_status"))
        await db.commit()
        return _topics(found.rows)

    async def sizes(self, db: Session) -> tuple[list[TableSize], PartitionStatus | None]:
        """Read how large the tables are, and how the inbox is partitioned."""
        await db.begin()
        found = await db.execute(self._statement("sizes"))
        layout = await partitions.read(db, self._store.dialect)
        await db.commit()
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

    async def overview(self, db: Session) -> tuple[list[ConsumerStatus], list[TopicStatus]]:
        """Count what is open of every consumer and topic, each count up to `COUNTED_MAX` and one.

        Its cost does not grow with the tables. What has ended well is not counted.
        """
        statuses = ("pending", "processing", "failed", "dead", "discarded")
        most = {"most": COUNTED_MAX + 1}
        consumers: list[ConsumerStatus] = []
        await self._look(db)
        for consumer in await self._consumers(db):
            asked = self._statement("consumer_open", {"consumer": consumer, **most})
            (counted,) = (await db.execute(asked)).rows
            ages = [float(age) for age in counted[-3:] if age is not None]
            consumers.append(
                ConsumerStatus(
                    consumer=consumer,
                    counts=dict(zip(statuses, map(int, counted), strict=False)),
                    quarantined=int(counted[len(statuses)]),
                    oldest_unfinished_s=max(0.0, *ages) if ages else None,
                )
            )
        found = await db.execute(self._statement("outbox_open", most))
        await db.commit()
        return consumers, _topics(found.rows)

    async def consumers(self, db: Session) -> list[str]:
        """Name the consumers that have rows."""
        await self._look(db)
        names = await self._consumers(db)
        await db.commit()
        return names

    async def _consumers(self, db: Session) -> list[str]:
        return [str(name) for (name,) in (await db.execute(self._statement("consumers"))).rows]

    async def page(
        self,
        db: Session,
        where: Filter[RowT, Any],
        *,
        limit: int,
        before: int | str | None = None,
        within_s: float | None = None,
    ) -> Page[RowT]:
        """Read rows, the newest first.

        Args:
            before: the place that the page before ended with; None for the first page.
            within_s: look about that long, and say how far it went; None looks through the whole table.

        Raises:
            ConfigurationError: `before` is no place in this table.
        """
        table = where.table
        numbered = table.place is not None
        place = before if numbered or before is None else tables.mark_of(str(before))
        params = {**where.params(), **_mark(place), "limit": limit}
        await self._look(db)
        reached: int | None = None
        if not numbered:
            found = (await db.execute(self._statement(f"{table.name}_list", params))).rows
        else:
            params["before"] = _LAST if before is None else before
            if where.message_id is not None:
                found = await self._of_each(db, f"{table.name}_list_id", params, table)
            elif where.status in _OPEN[table.name]:
                found = await self._of_each(db, _INDEXED[table.name], params, table)
            else:
                found, reached = await self._through(db, table, params, within_s)
        await db.commit()
        rows = [tables.row_of(self._store.columns, table, row) for row in found[:limit]]
        if len(rows) == limit:
            return Page(rows, tables.place_of(rows[-1]))
        return Page(rows, reached)

    async def _of_each(
        self, db: Session, name: str, params: dict[str, Any], table: tables.Table
    ) -> Sequence[Sequence[Any]]:
        """Read a page of rows that an index has in their order, consumer by consumer."""
        if "consumer" not in table.key or params["consumer"] is not None:
            return (await db.execute(self._statement(name, params))).rows
        found: list[Sequence[Any]] = []
        for consumer in await self._consumers(db):
            asked = self._statement(name, {**params, "consumer": consumer})
            found += (await db.execute(asked)).rows
        # behind the place stands only the key of the codec
        return sorted(found, key=lambda row: int(row[-2]), reverse=True)

    async def _through(
        self, db: Session, table: tables.Table, params: dict[str, Any], within_s: float | None
    ) -> tuple[list[Sequence[Any]], int | None]:
        """Read a page stretch by stretch, each longer than the one before; and say where it stopped, if early."""
        ((newest,),) = (await db.execute(self._statement(f"{table.name}_newest"))).rows
        upper, stretch = min(int(params["before"]), int(newest) + 1), _STRETCH
        found: list[Sequence[Any]] = []
        began = time.monotonic()
        while upper > 1:
            floor, looked = max(0, upper - 1 - stretch), time.monotonic()
            left = params["limit"] - len(found)
            asked = {**params, "before": upper, "floor": floor, "limit": left}
            found += (await db.execute(self._statement(f"{table.name}_list", asked))).rows
            if len(found) >= params["limit"]:
                return found, None
            upper, stretch = floor + 1, stretch * _LONGER
            now = time.monotonic()
            # the next one takes that many times as long
            if within_s is not None and now - began + (now - looked) * _LONGER > within_s:
                return found, upper if upper > 1 else None
        return found, None

    async def failures(self, db: Session) -> list[FailureGroup]:
        """Group the newest failures of every consumer by fingerprint, the most frequent first."""
        groups: dict[tuple[Any, Any], FailureGroup] = {}
        await self._look(db)
        consumers = await self._consumers(db)
        share = _GROUPED // (2 * len(consumers) or 1)
        most = min(max(share, _GROUPED_MIN), _GROUPED_MAX)
        for consumer in consumers:
            for status in ("dead", "failed"):
                asked = {"consumer": consumer, "status": status, "most": most}
                found = await db.execute(self._statement("failure_groups", asked))
                looked = sum(int(row[2]) for row in found.rows)
                for fingerprint, error_type, *counted in found.rows:
                    fresh = tables.failures_of(fingerprint, error_type, consumer, status, counted)
                    if looked == most:
                        fresh = replace(fresh, more=True)
                    key = (fingerprint, error_type)
                    groups[key] = groups[key].joined(fresh) if key in groups else fresh
        await db.commit()
        return sorted(groups.values(), key=lambda group: group.count, reverse=True)

    async def states(self, db: Session, keys: Sequence[Key]) -> dict[tuple[str, str], State]:
        """Read where messages of the inbox are now; those that are gone are left out."""
        consumers, ids = zip(*keys, strict=True)
        await db.begin()
        found = await db.execute(
            self._statement("inbox_states", None, {"consumer": consumers, "message_id": ids})
        )
        await db.commit()
        return {
            (consumer, message_id): State(
                status=status, attempts=int(attempts), fingerprint=fingerprint
            )
            for consumer, message_id, status, attempts, fingerprint in found.rows
        }

    async def audit(self, db: Session, *, limit: int, before: int | None = None) -> list[Audited]:
        """Read what operators have changed, the newest first."""
        await self._look(db)
        params = {"limit": limit, "before": before}
        found = await db.execute(self._statement("audit_list", params))
        await db.commit()
        return [tables.audited_of(row) for row in found.rows]

    async def _look(self, db: Session) -> None:
        """Begin a transaction that reads a page; no statement of it may take long, where the database can say so."""
        await db.begin()
        if self._store.dialect.has("bound_look"):
            await db.execute(self._statement("bound_look", {"statement_ms": _LOOK_MS}))

    async def shown(
        self, db: Session, where: Filter[Any, MessageT], *, reveal: bool
    ) -> list[MessageT]:
        """Read messages as a whole, the oldest first, and not more than 20; of the inbox with their attempts.

        Args:
            where: the key of one message; in the quarantine all that are like it.
            reveal: with payload and header values.

        Raises:
            ConfigurationError: revealed, and written through a codec that this app does not have.
        """
        table, params = where.table, {**where.params(), "limit": _SHOWN_MAX}
        attempts: Sequence[Sequence[Any]] = ()
        await db.begin()
        found = await db.execute(self._statement(f"{table.name}_show", params))
        if table is INBOX:
            attempts = (await db.execute(self._statement("inbox_attempts", params))).rows
        await db.commit()
        return [
            tables.message_of(self._store.columns, table, row, attempts, reveal=reveal)
            for row in found.rows
        ]

    # -- changing -----------------------------------------------------------------------------

    async def meant(
        self,
        db: Session,
        verb: Verb,
        where: Filter[Any, Any],
        statuses: Sequence[str],
        *,
        spared: str | None,
    ) -> list[Meant]:
        """Count what `change` would find, in the order in which to change it; nothing is locked."""
        params = {**where.params(), "needs_payload": verb == "retry", "spared": spared}
        await db.begin()
        found = await db.execute(
            self._statement(f"{where.table.name}_count", params, {"status": list(statuses)})
        )
        await db.commit()
        counted = [
            Meant(status, consumer, int(count - left), int(left))
            for status, consumer, count, left in found.rows
        ]
        return sorted(counted, key=lambda meant: statuses.index(meant.status))

    async def change(
        self,
        db: Session,
        verb: Verb,
        where: Filter[Any, Any],
        meant: Meant,
        audit: Audit | None,
        *,
        spared: str | None,
        after: Any,
        to: str | None = None,
        most: int | None = None,
    ) -> Batch:
        """Change one batch in a transaction of its own, in the order in which the rows came.

        Args:
            where: what the operator asked for, which may be of all consumers.
            meant: of which status and consumer the batch is.
            audit: None makes it a dry run, which is rolled back.
            spared: rows with this error type are counted and left alone.
            after: the `place` of the batch before; None for the first.
            to: the route that a reroute gives.
            most: rows, if fewer than a batch has.

        Guarantee: rows that a live delivery or a relay holds are left to it, without waiting; the change
            and its audit row are one commit.
        """
        table, limit = where.table, _BATCH if most is None else min(most, _BATCH)
        params = {
            **where.params(),
            **_mark(after),
            "status": meant.status,
            "consumer": meant.consumer,
            # without its payload a retried row would wait for ever
            "needs_payload": verb == "retry",
            "after": -1 if after is None else after,
            "limit": limit,
        }
        await db.begin()
        found = await db.execute(self._statement(f"{table.name}_select", params))
        keys = [tuple(key) for *key, _, error in found.rows if spared is None or error != spared]
        place = None
        if len(found.rows) == limit:
            *last, number, _ = found.rows[-1]
            place = tuple(last) if table.place is None else number
        batch = Batch(keys, len(found.rows) - len(keys), place)
        if audit is None or not keys:
            await db.rollback()
            return batch
        rows = dict(zip(table.key, zip(*keys, strict=True), strict=True))
        if table is QUARANTINE:
            await db.execute(self._statement("quarantine_end", {"status": "discarded"}, rows))
        else:
            await db.execute(self._statement(f"{table.name}_{verb}", {"to": to}, rows))
        await db.execute(self._audit(audit, table.audited.format(verb), where, len(keys)))
        await db.commit()
        return batch

    async def accept(
        self,
        db: Session,
        key: Key,
        arrival_of: Callable[[Message[Any]], Arrival],
        audit: Audit | None,
        *,
        token: str,
    ) -> str | None:
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
        hashed = bytes(hashed)
        named = {"consumer": consumer, "message_id": message_id, "hash": hashed}
        await db.begin()
        found = await db.execute(self._statement("quarantine_lock", named))
        if not found.rows:
            await db.rollback()
            return "somebody else has decided on it meanwhile"
        try:
            kept_bytes, message = tables.quarantined(self._store.columns, found.rows[0])
            arrival = arrival_of(message)
        except (UnusableMessage, ConfigurationError) as error:
            await db.rollback()
            if isinstance(error, UnusableMessage):
                return str(error)
            raise
        if not _whole(message.payload, hashed, arrival):
            await db.rollback()
            return _PAYLOAD_CUT if kept_bytes else _PAYLOAD_GONE
        fresh = await self._store.store(db, consumer, [arrival], token=token)
        if not fresh:
            await db.rollback()
            return f"{consumer} has another message under the id {arrival.message_id}: give it one of its own (--id)"
        if audit is None:
            await db.rollback()
            return None
        rows = {name: [value] for name, value in named.items()}
        await db.execute(self._statement("quarantine_end", {"status": "accepted"}, rows))
        where = QuarantineFilter(consumer=consumer, message_id=message_id, hash=hashed.hex())
        await db.execute(self._audit(audit, "quarantine accept", where, 1))
        await db.commit()
        return None

    async def edit(
        self,
        db: Session,
        where: InboxFilter,
        edited: Callable[[Arrival], Message[Any]],
        audit: Audit | None,
    ) -> tuple[Message[Any], Message[Any]] | None:
        """Give one dead or failed message other content and a full new budget of attempts.

        Args:
            where: consumer and id.
            edited: from what stands in the row to what it is to be.
            audit: None makes it a dry run, which is rolled back.

        Returns:
            The message before and after; None when there is none that can be edited now.

        Raises:
            ConfigurationError: written through a codec that this app does not have; or what `edited` raises.

        Guarantee: the change, the row that keeps what was there before and the audit row are one commit.
        """
        columns, named = self._store.columns, where.params()
        await db.begin()
        found = await db.execute(self._statement("edit_lock", named))
        if not found.rows:
            await db.rollback()
            return None
        try:
            *row, error = found.rows[0]
            arrival = columns.arrival(str(where.consumer), row).arrival
            after = edited(arrival)
            told = columns.error_back(error, row[_KEY_ID])
        except ConfigurationError:
            await db.rollback()
            raise
        if audit is None:
            await db.rollback()
            return arrival.message, after
        before = arrival.message.payload
        hashed = TOMBSTONE_HASH if before is None else sha256(before).digest()
        reason = f"edited by {audit.actor}" + (f": {audit.reason}" if audit.reason else "")
        kept = {**named, "hash": hashed, "reason": reason}
        await db.execute(self._statement("edit_set_aside", kept))
        # the key that a row names is that of all its columns: its error is written anew as well
        content = {
            **named,
            **columns.content(after),
            "key_id": columns.key_id,
            "error": None if told is None else columns.error(told),
        }
        await db.execute(self._statement("edit_write", content))
        await db.execute(self._audit(audit, "edit", where, 1))
        await db.commit()
        return arrival.message, after

    # -- replaying ----------------------------------------------------------------------------

    async def kept(
        self, db: Session, where: InboxFilter, *, after: int, limit: int
    ) -> list[Leased]:
        """Read messages whose payload was kept, in arrival order, without locking them.

        Args:
            where: of one consumer; error type, fingerprint and age are not asked for.
            after: the arrival behind which to begin; -1 for the first.

        Raises:
            ConfigurationError: a payload was written through a codec that this app does not have.
        """
        assert where.consumer is not None
        params = {**where.params(), "after": after, "limit": limit}
        await db.begin()
        result = await db.execute(self._statement("replay_read", params))
        await db.commit()
        columns = self._store.columns
        return [columns.arrival(where.consumer, row) for row in result.rows]

    async def announce(
        self, db: Session, audit: Audit, action: str, where: Filter[Any, Any], affected: int
    ) -> None:
        """Write the audit row of work whose own transactions follow."""
        await db.begin()
        await db.execute(self._audit(audit, action, where, affected))
        await db.commit()

    async def copy(
        self,
        db: Session,
        consumer: str,
        arrivals: Sequence[Arrival],
        audit: Audit,
        where: InboxFilter,
        *,
        token: str,
    ) -> int:
        """Store messages as pending rows of another consumer, in the order given; returns how many were new.

        Guarantee: the rows and their audit row are one commit.
        """
        await db.begin()
        # in arrival order, not by id: two such commands may deadlock, and are tried again
        fresh = await self._store.store(db, consumer, arrivals, token=token)
        await db.execute(self._audit(audit, f"replay as {consumer}", where, len(fresh)))
        await db.commit()
        return len(fresh)


def _topics(rows: Sequence[Sequence[Any]]) -> list[TopicStatus]:
    """Put rows of `outbox_status` together by topic and route."""
    ways: dict[tuple[str, str], list[Sequence[Any]]] = {}
    for topic, route, *counted in rows:
        ways.setdefault((topic, route), []).append(counted)
    return [
        TopicStatus(
            topic=topic,
            route=route,
            counts={status: int(count) for status, count, _, _ in counted},
            overdue=sum(int(late) for *_, late in counted),
            oldest_waiting_s=max(
                # a row that is staged between two clocks has no negative age
                (max(0.0, float(age)) for status, _, age, _ in counted if status in _WAITING),
                default=None,
            ),
        )
        for (topic, route), counted in sorted(ways.items())
    ]


def _mark(place: Key | int | str | None) -> dict[str, Any]:
    """The key of a row that a page or a batch goes on behind, where no number says so."""
    mark = place if isinstance(place, tuple) else (None, None, None)
    return dict(zip(("mark_consumer", "mark_id", "mark_hash"), mark, strict=True))


def _whole(payload: bytes | None, hashed: bytes, arrival: Arrival) -> bool:
    """Say whether this is the payload that was hashed; without one, whether there was none."""
    if payload is None:
        return hashed in (TOMBSTONE_HASH, sha256(b"").digest())
    return hashed in (sha256(payload).digest(), arrival.hash)
