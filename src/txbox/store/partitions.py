"""The partitions of the inbox: which there are, making them ahead, dropping those whose time is over.

Source: docs/decisions/0021-partitions.md
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Literal

from txbox.steps import Begin, Commit, Steps
from txbox.store.dialect import Dialect

Kind = Literal["uuid7", "ulid", "hash"]
KINDS: tuple[Kind, ...] = ("uuid7", "ulid", "hash")

_NAME = re.compile(r"txbox_inbox_(uuid7|ulid|hash)_(\w+)")
_CROCKFORD = {letter: value for value, letter in enumerate("0123456789ABCDEFGHJKMNPQRSTVWXYZ")}
# all that come wait behind one who waits for this lock: so it is tried for briefly, and again later
_LOCK_MS = "100"
# more rows than this in the way of a new partition stay where they are
_STRAYS = 10_000


@dataclass(frozen=True, slots=True)
class Partitioning:
    """How a new inbox is partitioned.

    Args:
        kind: by the time in UUIDv7s or in ULIDs, or by hash.
        length: the time that one partition holds.
        ahead: how many are made ahead.
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
        begins, ends: the least id of it, and the least behind it; None where there is no bound.
        blocks: its size, in blocks of the server.
        ends_s: for a partition of a time, the end of that; else None.
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
    """The tables that hold the rows of the inbox, and what time it was in the database."""

    parts: tuple[Part, ...]
    clock_s: float

    @property
    def kind(self) -> Kind | None:
        """How the inbox is partitioned; None when it is not."""
        return self.parts[0].kind if self.parts else None

    @property
    def of_time(self) -> list[Part]:
        """The partitions of a time each, the oldest first."""
        found = (part for part in self.parts if part.ends_s is not None)
        return sorted(found, key=lambda part: part.ends_s or 0.0)

    @property
    def ready_until(self) -> datetime | None:
        """Until when partitions are made; None when the inbox is not partitioned by time."""
        if self.kind not in ("uuid7", "ulid"):
            return None
        found = self.of_time
        return datetime.fromtimestamp((found[-1].ends_s if found else 0.0) or 0.0, UTC)


def id_time_s(kind: Kind, text: str) -> float:
    """The time in the first 48 bits of an id, in seconds; the inverse of `txbox_partition_bound`."""
    if kind == "uuid7":
        return int(text.replace("-", "")[:12], 16) / 1000
    value = 0
    for letter in text[:10]:
        value = value * 32 + _CROCKFORD[letter]
    return value / 1000


def read(dialect: Dialect) -> Steps[Layout]:
    """Read the tables that hold the rows, in a transaction that is open."""
    if not dialect.has("partitions"):
        return Layout((), 0.0)
    found = yield dialect.statement("partitions")
    parts = tuple(_part(*row[:5]) for row in found.rows)
    return Layout(parts, float(found.rows[0][5]) if found.rows else 0.0)


def _part(relation: int, name: str, begins: str | None, ends: str | None, blocks: int) -> Part:
    named = _NAME.fullmatch(name)
    kind: Kind | None = next(
        (candidate for candidate in KINDS if named and named[1] == candidate), None
    )
    ends_s = None
    if kind is not None and named is not None and ends is not None and named[2][0].isdigit():
        ends_s = id_time_s(kind, ends)
    return Part(relation, name, kind, begins, ends, ends_s, blocks)


def layout(dialect: Dialect) -> Steps[Layout]:
    """As `read`, in a transaction of its own."""
    yield Begin()
    found = yield from read(dialect)
    yield Commit()
    return found


def make(dialect: Dialect, first_s: float, last_s: float) -> Steps[str]:
    """Make the partition of a time, as far as it is missing.

    Args:
        first_s, last_s: where it begins and ends, in seconds of the epoch.

    Returns:
        "made"; "there" when it was; "strays" when too many rows of that time lie in the default
        partition, and stay there.

    Raises:
        StoreError: LOCK_TIMEOUT while transactions are open that have used the inbox.
    """
    yield Begin((dialect.statement("bound_lock_timeout", {"lock_timeout_ms": _LOCK_MS}),))
    done = yield dialect.statement(
        "partition_make", {"first_s": first_s, "last_s": last_s, "most": _STRAYS}
    )
    yield Commit()
    return str(done.rows[0][0])


def rows(dialect: Dialect, part: Part) -> Steps[int]:
    """Count the rows of a partition of a time."""
    yield Begin()
    found = yield dialect.statement("partition_rows", {"first": part.begins, "last": part.ends})
    yield Commit()
    return int(found.rows[0][0])


def drop(dialect: Dialect, part: Part, *, older_than_s: float) -> Steps[bool]:
    """Drop a partition, unless a row in it may not be pruned; says whether it did.

    Raises:
        StoreError: LOCK_TIMEOUT while transactions are open that have used the inbox.
    """
    yield Begin((dialect.statement("bound_lock_timeout", {"lock_timeout_ms": _LOCK_MS}),))
    done = yield dialect.statement(
        "partition_drop", {"name": part.name, "older_than_s": older_than_s}
    )
    yield Commit()
    return bool(done.rows[0][0])


def missing(found: Layout, length: timedelta, ahead: int) -> list[tuple[float, float]]:
    """The times from now on, `ahead` of them beside the present one, that have no partition.

    Each is where it begins and ends, in seconds of the epoch.
    """
    ready = found.ready_until
    if ready is None:
        return []
    length_s = length.total_seconds()
    slot = found.clock_s // length_s
    wanted = (
        ((slot + offset) * length_s, (slot + offset + 1) * length_s) for offset in range(ahead + 1)
    )
    return [(first, last) for first, last in wanted if last > ready.timestamp()]


def moment(at_s: float) -> str:
    """A time in seconds of the epoch, for people."""
    return datetime.fromtimestamp(at_s, UTC).isoformat(sep=" ", timespec="minutes")
