"""The partitions of the inbox: listing, making them ahead of time, detaching and dropping expired ones.

Source: docs/decisions/0021-partitions.md
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Literal

from txbox.session import Session, Transaction
from txbox.store.dialect import Dialect

Kind = Literal["uuid7", "ulid", "hash"]
KINDS: tuple[Kind, ...] = ("uuid7", "ulid", "hash")

_NAME = re.compile(r"txbox_inbox_(uuid7|ulid|hash)_(\w+)")
_CROCKFORD = {letter: value for value, letter in enumerate("0123456789ABCDEFGHJKMNPQRSTVWXYZ")}
# if more rows than this are in the way of a new partition, they stay where they are
_STRAYS = 10_000


@dataclass(frozen=True, slots=True)
class Partitioning:
    """How a new inbox is partitioned.

    Args:
        kind: by the time in UUIDv7s or in ULIDs, or by hash.
        length: the time one partition covers.
        ahead: how many are made in advance.
    """

    kind: Kind
    length: timedelta = timedelta(days=1)
    ahead: int = 7


@dataclass(frozen=True, slots=True)
class Part:
    """One table that holds rows of the inbox.

    Args:
        relation: its oid.
        kind: None for the inbox itself.
        begins, ends: its lowest id, and the lowest id after it; None if unbounded.
        blocks: its size, in blocks of the server.
        ends_s: for a time partition, the end of its time; else None.
    """

    relation: int
    name: str
    kind: Kind | None
    begins: str | None
    ends: str | None
    ends_s: float | None
    blocks: int


@dataclass(frozen=True, slots=True)
class Layout:
    """The tables with the inbox's rows, and the database's time."""

    parts: tuple[Part, ...]
    clock_s: float

    @property
    def kind(self) -> Kind | None:
        """How the inbox is partitioned; None if it is not."""
        return self.parts[0].kind if self.parts else None

    @property
    def of_time(self) -> list[Part]:
        """The time partitions, oldest first."""
        dated = (part for part in self.parts if part.ends_s is not None)
        return sorted(dated, key=lambda part: part.ends_s or 0.0)

    @property
    def ready_until(self) -> datetime | None:
        """Until when partitions exist; None if the inbox is not partitioned by time."""
        if self.kind not in ("uuid7", "ulid"):
            return None
        parts = self.of_time
        return datetime.fromtimestamp((parts[-1].ends_s if parts else 0.0) or 0.0, UTC)


def id_time_s(kind: Kind, text: str) -> float:
    """Return the time in an id's first 48 bits, in seconds; the inverse of `txbox_partition_bound`."""
    if kind == "uuid7":
        return int(text.replace("-", "")[:12], 16) / 1000
    value = 0
    for letter in text[:10]:
        value = value * 32 + _CROCKFORD[letter]
    return value / 1000


async def read(db: Transaction, dialect: Dialect) -> Layout:
    """Read the tables with the rows, in an open transaction."""
    if not dialect.has("partitions"):
        return Layout((), 0.0)
    result = await db.execute(dialect.statement("partitions"))
    parts = tuple(_part(*row[:5]) for row in result.rows)
    return Layout(parts, float(result.rows[0][5]) if result.rows else 0.0)


def _part(relation: int, name: str, begins: str | None, ends: str | None, blocks: int) -> Part:
    named = _NAME.fullmatch(name)
    kind: Kind | None = next(
        (candidate for candidate in KINDS if named and named[1] == candidate), None
    )
    ends_s = None
    if kind is not None and named is not None and ends is not None and named[2][0].isdigit():
        ends_s = id_time_s(kind, ends)
    return Part(relation, name, kind, begins, ends, ends_s, blocks)


async def layout(db: Session, dialect: Dialect) -> Layout:
    """`read` in a transaction of its own."""
    await db.begin()
    current = await read(db, dialect)
    await db.commit()
    return current


async def make(db: Session, dialect: Dialect, first_s: float, last_s: float, wait_ms: int) -> str:
    """Make the partition for a time, unless it exists.

    Args:
        first_s, last_s: where it begins and ends, in seconds since the epoch.
        wait_ms: the longest wait for a lock; every user of the inbox queues behind it.

    Returns:
        "made"; "there" if it existed; "strays" if too many rows of that time are in the default
        partition, where they stay.

    Raises:
        StoreError: LOCK_TIMEOUT while transactions are open that have used the inbox.
    """
    params = {"first_s": first_s, "last_s": last_s, "most": _STRAYS}
    return str(await _changed(db, dialect, "partition_make", params, wait_ms))


async def rows(db: Session, dialect: Dialect, part: Part) -> int:
    """Count the rows of a time partition."""
    result = await dialect.run(db, "partition_rows", {"first": part.begins, "last": part.ends})
    return int(result.rows[0][0])


async def detach(
    db: Session, dialect: Dialect, part: Part, older_than_s: float, wait_ms: int
) -> bool:
    """Take a partition out of the inbox unless a row in it may not be pruned; returns whether it did.

    Args:
        wait_ms: as for `make`.

    Raises:
        StoreError: LOCK_TIMEOUT while transactions are open that have used the inbox.

    Guarantee: from the same commit on, the table is listed by `detached`, and only there.
    """
    params = {"name": part.name, "older_than_s": older_than_s}
    return bool(await _changed(db, dialect, "partition_detach", params, wait_ms))


async def detached(db: Session, dialect: Dialect) -> list[str]:
    """Name the tables that `detach` took out of the inbox and that are not dropped yet."""
    result = await dialect.run(db, "partitions_detached")
    return [str(name) for (name,) in result.rows]


async def drop(db: Session, dialect: Dialect, name: str, older_than_s: float, wait_ms: int) -> bool:
    """Drop a table that `detach` took out of the inbox; returns whether it did.

    Raises:
        StoreError: LOCK_TIMEOUT while that table is being read.
    """
    params = {"name": name, "older_than_s": older_than_s}
    return bool(await _changed(db, dialect, "partition_drop", params, wait_ms))


async def _changed(
    db: Session, dialect: Dialect, query: str, params: Mapping[str, Any], wait_ms: int
) -> Any:
    bound = dialect.statement("partition_begin", {"lock_timeout_ms": str(wait_ms)})
    return (await dialect.run(db, query, params, begin=(bound,))).rows[0][0]


def missing(layout: Layout, length: timedelta, ahead: int) -> list[tuple[float, float]]:
    """Return the times without a partition: the present one and the `ahead` that follow.

    Each is a begin and an end, in seconds since the epoch.
    """
    ready = layout.ready_until
    if ready is None:
        return []
    length_s = length.total_seconds()
    slot = layout.clock_s // length_s
    wanted = (
        ((slot + offset) * length_s, (slot + offset + 1) * length_s) for offset in range(ahead + 1)
    )
    return [(first, last) for first, last in wanted if last > ready.timestamp()]


def moment(at_s: float) -> str:
    """Format a time in seconds since the epoch, for people."""
    return f"{datetime.fromtimestamp(at_s, UTC):%Y-%m-%d %H:%M} UTC"
