"""Maintenance jobs and stored progress: leases in txbox_job, positions, and pruning."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from txbox.identity import canonical_id
from txbox.session import Session, Statements, Transaction
from txbox.store.dialect import Dialect
from txbox.store.partitions import Part

# of 8 kB; a cached table yields about the maximum in the time below when a scan finds nothing
_BLOCKS_MIN = 16
_BLOCKS_MAX = 4096
_WALK_S = 0.02


@dataclass(frozen=True, slots=True)
class Saved:
    """A state, and the database that has it.

    Args:
        history: as in `brokers.base.Anchor`.
    """

    history: str
    state: str | None


@dataclass(frozen=True, slots=True)
class JobLease:
    """A row of txbox_job, leased to one token at a time. The database's clock decides.

    Args:
        job: the name of the row; a name over 255 bytes is stored as its digest.
        token: the holder's own random text.
        lease_s: seconds after which another may take over.
    """

    dialect: Dialect
    job: str
    token: str
    lease_s: float

    @property
    def _name(self) -> str:
        return canonical_id(self.job)

    async def acquire(self, db: Session) -> bool:
        """Take or renew the lease; False if another holds it."""
        params = {"name": self._name, "token": self.token, "lease_s": self.lease_s}
        await db.begin()
        result = await db.execute(self.dialect.statement("job_acquire", params))
        if result.count == 0:
            await db.execute(self.dialect.statement("job_create", {"name": self._name}))
            result = await db.execute(self.dialect.statement("job_acquire", params))
        await db.commit()
        return bool(result.count)

    async def load(self, db: Session) -> Saved:
        """Read the last saved state."""
        await db.begin()
        history = await db.execute(self.dialect.statement("anchor_history"))
        state = await db.execute(self.dialect.statement("job_state", {"name": self._name}))
        await db.commit()
        return Saved(str(history.rows[0][0]), state.rows[0][0] if state.rows else None)

    async def save(self, db: Session, state: str, before: Saved) -> bool:
        """Write the state; False if the lease was lost or another state is there, and nothing is written.

        Args:
            before: as it was read, or saved, last.
        """
        params = {"name": self._name, "token": self.token, "state": state, "before": before.state}
        await db.begin()
        history = await db.execute(self.dialect.statement("anchor_history"))
        saved = 0
        if str(history.rows[0][0]) == before.history:
            saved = (await db.execute(self.dialect.statement("job_save", params))).count
        await db.commit()
        return bool(saved)

    async def release(self, db: Session) -> None:
        """Release the lease; does nothing if it is no longer ours."""
        await self.dialect.run(db, "job_release", {"name": self._name, "token": self.token})


async def history(db: Session, dialect: Dialect) -> str:
    """Return which run of which database this is, as in `brokers.base.Anchor`."""
    return str((await db.alone(dialect.statement("anchor_history"))).rows[0][0])


class OpenAlert(NamedTuple):
    """A row of txbox_job that stands for an open alert.

    Attributes:
        token: of the transaction that opened it.
        state: what was said last, as JSON.
        due: not 0 once its window has ended.
    """

    name: str
    token: str | None
    state: str
    due: int


async def alert_rows(db: Transaction, dialect: Dialect, names: str) -> list[OpenAlert]:
    """Read open alerts, in an open transaction.

    Args:
        names: a pattern of LIKE.
    """
    found = await db.execute(dialect.statement("alerts_open", {"names": names}))
    return [OpenAlert(*row) for row in found.rows]


async def alert_row(db: Transaction, dialect: Dialect, name: str) -> OpenAlert | None:
    """Read one of them; takes no locks."""
    found = await db.execute(dialect.statement("alert_row", {"name": name}))
    return OpenAlert(*found.rows[0]) if found.rows else None


async def open_alert(
    db: Transaction, dialect: Dialect, name: str, *, token: str, state: str, window_s: float
) -> None:
    """Insert the row of an alert, unless it is there: it is ours if it then has our token."""
    params = {"name": name, "token": token, "state": state, "window_s": window_s}
    await db.execute(dialect.statement("alert_open", params))


async def say_alert(
    db: Transaction, dialect: Dialect, name: str, *, state: str, window_s: float
) -> bool:
    """Begin the next window of an alert; False if it has begun, or the alert is closed."""
    params = {"name": name, "state": state, "window_s": window_s}
    return bool((await db.execute(dialect.statement("alert_said", params))).count)


async def close_alert(db: Transaction, dialect: Dialect, name: str) -> bool:
    """Delete the row of an alert whose window has ended; False if somebody else has."""
    return bool((await db.execute(dialect.statement("alert_closed", {"name": name}))).count)


async def anchors(
    db: Session,
    dialect: Dialect,
    names: Sequence[str],
    moves: Callable[[str, Mapping[str, int]], Mapping[str, int]] | None = None,
) -> tuple[str, Mapping[str, int]]:
    """Read positions, and optionally move some of them forward in the same transaction.

    Args:
        names: as stored.
        moves: from the database's history and the stored positions to new positions. A position that
            is lower than the stored one changes nothing.

    Returns:
        The history, and the positions stored when the transaction began.
    """
    await db.begin()
    result = await db.execute(dialect.statement("anchor_history"))
    history = str(result.rows[0][0])
    stored = await db.execute(dialect.statement("anchor_read", {}, {"name": list(names)}))
    positions = {
        name.decode() if isinstance(name, bytes) else str(name): int(position)
        for name, position in stored.rows
    }
    if moves is not None and (moved := sorted(moves(history, positions).items())):
        rows: dict[str, list[Any]] = {
            "name": [name for name, _ in moved],
            "position": [to for _, to in moved],
        }
        await db.execute(dialect.statement("anchor_advance", {}, rows))
    await db.commit()
    return history, positions


@dataclass(frozen=True, slots=True)
class Batch:
    """What one batch did, and whether there may be more."""

    rows: int
    more: bool


def _begun(dialect: Dialect) -> Statements:
    return (dialect.statement("prune_begin"),) if dialect.has("prune_begin") else ()


async def value(db: Session, /, dialect: Dialect, name: str, **params: Any) -> Any:
    """Read a query's one value, such as the number of rows that would be pruned, in a transaction of its own."""
    return (await dialect.run(db, name, params)).rows[0][0]


async def batch(db: Session, limit: int, *, dialect: Dialect, name: str, **params: Any) -> Batch:
    """Run a query that deletes or empties at most `limit` rows, in a transaction of its own."""
    params["limit"] = limit
    gone = await dialect.run(db, name, params, begin=_begun(dialect))
    return Batch(gone.count, gone.count == limit)


async def prune(
    db: Session, limit: int, *, dialect: Dialect, consumer: str | None, older_than_s: float
) -> Batch:
    """Delete one batch of finished rows and their attempts in one transaction.

    Args:
        limit: rows, 1 or more.
        consumer: None for all.
        older_than_s: seconds since they finished.
    """
    params = {"consumer": consumer, "older_than_s": older_than_s, "limit": limit}
    rows = await _pruned(db, dialect, "prune", params)
    return Batch(rows, rows == limit)


async def _pruned(
    db: Session,
    dialect: Dialect,
    name: str,
    params: Mapping[str, Any],
    tables: Mapping[str, Sequence[Any]] | None = None,
) -> int:
    await db.begin(_begun(dialect))
    gone = await dialect.take(db, name, params, tables)
    if not gone.rows:
        # not ROLLBACK: psycopg would forget its prepared statements, and planning is most of an empty batch
        await db.commit()
        return 0
    keys = {"consumer": [row[0] for row in gone.rows], "message_id": [row[1] for row in gone.rows]}
    await db.execute(dialect.statement("prune_attempts", {}, keys))
    await db.commit()
    return len(gone.rows)


class BlockScan:
    """Deletes finished rows in physical order, for the database where that is the cheapest way to find them.

    Args:
        parts: the tables to scan through side by side.

    The number of blocks per batch adapts to the time a batch takes, as does the number of rows. Where
    there is nothing to delete the scan is fast, and where there is, no batch takes long.
    """

    def __init__(
        self, dialect: Dialect, parts: Sequence[Part], *, consumer: str | None, older_than_s: float
    ) -> None:
        self._dialect = dialect
        self._relations = [part.relation for part in parts]
        self._ends = max((part.blocks for part in parts), default=0)
        self._params = {"consumer": consumer, "older_than_s": older_than_s}
        self._block = 0
        self._width = _BLOCKS_MIN

    async def batch(self, db: Session, limit: int) -> Batch:
        """Delete one batch of rows and their attempts in one transaction."""
        if self._block >= self._ends:
            return Batch(0, False)
        until = self._block + self._width
        started = time.monotonic()
        bounds = {"from_ctid": f"({self._block},0)", "to_ctid": f"({until},0)", "limit": limit}
        rows = await _pruned(
            db,
            self._dialect,
            "prune_blocks",
            {**self._params, **bounds},
            {"relation": self._relations},
        )
        took_s = time.monotonic() - started
        if rows < limit:
            self._block = until
        if took_s > _WALK_S:
            self._width = max(_BLOCKS_MIN, self._width // 2)
        elif took_s < _WALK_S / 2 and rows < limit:
            self._width = min(_BLOCKS_MAX, self._width * 2)
        return Batch(rows, self._block < self._ends)


async def drop_quarantined(
    db: Session, dialect: Dialect, *, excess: int, limit: int
) -> tuple[int, int]:
    """Drop the oldest payloads of the quarantine until `excess` bytes are gone, at most one batch.

    Returns:
        How many payloads were dropped, and their size in bytes.
    """
    await db.begin(_begun(dialect))
    oldest = await db.execute(dialect.statement("quarantine_oldest", {"limit": limit}))
    chosen: list[Sequence[Any]] = []
    dropped = 0
    for row in oldest.rows:
        if dropped >= excess:
            break
        chosen.append(row)
        dropped += int(row[3])
    if chosen:
        keys: dict[str, list[Any]] = {
            "consumer": [row[0] for row in chosen],
            "message_id": [row[1] for row in chosen],
            "hash": [bytes(row[2]) for row in chosen],
        }
        await db.execute(dialect.statement("drop_quarantined", {}, keys))
    await db.commit()
    return len(chosen), dropped
