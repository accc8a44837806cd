"""Maintenance and progress as steps: the leases in txbox_job, batches of pruning, what is left to do."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from txbox.identity import canonical_id
from txbox.steps import Begin, Commit, Read, Statement, Steps
from txbox.store.dialect import Dialect
from txbox.store.partitions import Part

# 8 kB each; the most is what a look without a find reads of a cached table in about the time below
_BLOCKS_MIN = 16
_BLOCKS_MAX = 4096
_WALK_S = 0.02


@dataclass(frozen=True, slots=True)
class JobLease:
    """One row of txbox_job, held by one token at a time; the clock of the database decides.

    Args:
        job: the name of the row; a name over 255 bytes is kept as its digest.
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

    def acquire(self) -> Steps[bool]:
        """Take or renew the lease; False while another holds it."""
        params = {"name": self._name, "token": self.token, "lease_s": self.lease_s}
        yield Begin()
        taken = yield self.dialect.statement("job_acquire", params)
        if taken.count == 0:
            yield self.dialect.statement("job_create", {"name": self._name})
            taken = yield self.dialect.statement("job_acquire", params)
        yield Commit()
        return bool(taken.count)

    def load(self) -> Steps[str | None]:
        """Read the state that was saved last."""
        yield Begin()
        found = yield self.dialect.statement("job_state", {"name": self._name})
        yield Commit()
        return found.rows[0][0] if found.rows else None

    def save(self, state: str) -> Steps[bool]:
        """Write the state; False when the lease is another's by now, and nothing was written."""
        yield Begin()
        saved = yield self.dialect.statement(
            "job_save", {"name": self._name, "token": self.token, "state": state}
        )
        yield Commit()
        return bool(saved.count)

    def release(self) -> Steps[None]:
        """Give the lease back; does nothing when it is another's."""
        yield Begin()
        yield self.dialect.statement("job_release", {"name": self._name, "token": self.token})
        yield Commit()


def anchors(
    dialect: Dialect,
    names: Sequence[str],
    moves: Callable[[str, Mapping[str, int]], Mapping[str, int]] | None = None,
) -> Steps[tuple[str, Mapping[str, int]]]:
    """Read positions, and move some of them forward in the same transaction.

    Args:
        names: as stored.
        moves: told the database's history and the stored positions, says which become what; one
            that is lower than the stored position changes nothing.

    Returns:
        The history, and the positions stored when the transaction began.
    """
    yield Begin()
    told = yield dialect.statement("anchor_history")
    history = str(told.rows[0][0])
    stored = yield dialect.statement("anchor_read", {}, {"name": list(names)})
    positions = {
        name.decode() if isinstance(name, bytes) else str(name): int(position)
        for name, position in stored.rows
    }
    if moves is not None and (moved := sorted(moves(history, positions).items())):
        rows: dict[str, list[Any]] = {
            "name": [name for name, _ in moved],
            "position": [to for _, to in moved],
        }
        yield dialect.statement("anchor_advance", {}, rows)
    yield Commit()
    return history, positions


@dataclass(frozen=True, slots=True)
class Batch:
    """What one batch did, and whether there may be another."""

    rows: int
    more: bool


def prune(
    dialect: Dialect, *, consumer: str | None, older_than_s: float, limit: int
) -> Steps[Batch]:
    """Delete one batch of finished rows and their attempts in one transaction.

    Args:
        consumer: None for all.
        older_than_s: seconds since they ended.
        limit: rows, 1 or more.
    """
    rows = yield from _pruned(
        dialect,
        dialect.statement(
            "prune", {"consumer": consumer, "older_than_s": older_than_s, "limit": limit}
        ),
    )
    return Batch(rows, rows == limit)


def _begun(dialect: Dialect) -> Begin:
    return Begin((dialect.statement("prune_begin"),) if dialect.has("prune_begin") else ())


def _pruned(dialect: Dialect, prune: Statement) -> Steps[int]:
    yield _begun(dialect)
    gone = yield prune
    if not gone.rows:
        # no ROLLBACK: psycopg would forget what it has prepared, and planning is most of an empty batch
        yield Commit()
        return 0
    keys = {
        "consumer": [row[0] for row in gone.rows],
        "message_id": [row[1] for row in gone.rows],
    }
    if dialect.has("prune_take"):
        yield dialect.statement("prune_take", {}, keys)
    yield dialect.statement("prune_attempts", {}, keys)
    yield Commit()
    return len(gone.rows)


class Walk:
    """Deletes finished rows in the order they lie in, for the database where that is the cheapest way to find them.

    Args:
        parts: the tables to walk through, side by side.

    How many blocks a batch looks at follows the time it takes, like the number of rows it deletes: where
    there is nothing to delete the walk is fast, and where there is, no batch is long.
    """

    def __init__(
        self, dialect: Dialect, parts: Sequence[Part], *, consumer: str | None, older_than_s: float
    ) -> None:
        self._own = dialect
        self._relations = [part.relation for part in parts]
        self._ends = max((part.blocks for part in parts), default=0)
        self._params = {"consumer": consumer, "older_than_s": older_than_s}
        self._block = 0
        self._width = _BLOCKS_MIN

    def batch(self, limit: int) -> Steps[Batch]:
        """Delete one batch of rows and their attempts in one transaction."""
        if self._block >= self._ends:
            return Batch(0, False)
        until = self._block + self._width
        started = time.monotonic()
        bounds = {"from_ctid": f"({self._block},0)", "to_ctid": f"({until},0)", "limit": limit}
        rows = yield from _pruned(
            self._own,
            self._own.statement(
                "prune_blocks", {**self._params, **bounds}, {"relation": self._relations}
            ),
        )
        took_s = time.monotonic() - started
        if rows < limit:
            self._block = until
        if took_s > _WALK_S:
            self._width = max(_BLOCKS_MIN, self._width // 2)
        elif took_s < _WALK_S / 2 and rows < limit:
            self._width = min(_BLOCKS_MAX, self._width * 2)
        return Batch(rows, self._block < self._ends)


def prunable(dialect: Dialect, *, consumer: str | None, older_than_s: float) -> Steps[int]:
    """Count the rows that `prune` would delete now."""
    yield Begin()
    found = yield dialect.statement(
        "prunable", {"consumer": consumer, "older_than_s": older_than_s}
    )
    yield Commit()
    return int(found.rows[0][0])


def prune_orphans(dialect: Dialect, *, older_than_s: float, limit: int) -> Steps[Batch]:
    """Delete one batch of the attempts of messages that went with their partition."""
    yield _begun(dialect)
    gone = yield dialect.statement("prune_orphans", {"older_than_s": older_than_s, "limit": limit})
    yield Commit()
    return Batch(int(gone.count), gone.count == limit)


def prune_outbox(
    dialect: Dialect, *, sent_s: float, discarded_s: float, limit: int
) -> Steps[Batch]:
    """Delete one batch of outgoing rows that have ended.

    Args:
        sent_s, discarded_s: seconds that sent and discarded ones are kept.
    """
    yield _begun(dialect)
    gone = yield dialect.statement(
        "prune_outbox", {"sent_s": sent_s, "discarded_s": discarded_s, "limit": limit}
    )
    yield Commit()
    return Batch(int(gone.count), gone.count == limit)


def prunable_outbox(dialect: Dialect, *, sent_s: float, discarded_s: float) -> Steps[int]:
    """Count the rows that `prune_outbox` would delete now."""
    yield Begin()
    found = yield dialect.statement(
        "prunable_outbox", {"sent_s": sent_s, "discarded_s": discarded_s}
    )
    yield Commit()
    return int(found.rows[0][0])


def prune_quarantine(dialect: Dialect, *, older_than_s: float, limit: int) -> Steps[Batch]:
    """Delete one batch of quarantine rows that were accepted or discarded `older_than_s` ago or earlier."""
    yield _begun(dialect)
    gone = yield dialect.statement(
        "prune_quarantine", {"older_than_s": older_than_s, "limit": limit}
    )
    yield Commit()
    return Batch(int(gone.count), gone.count == limit)


def prunable_quarantine(dialect: Dialect, *, older_than_s: float) -> Steps[int]:
    """Count the rows that `prune_quarantine` would delete now."""
    yield Begin()
    found = yield dialect.statement("prunable_quarantine", {"older_than_s": older_than_s})
    yield Commit()
    return int(found.rows[0][0])


def quarantine_bytes(dialect: Dialect) -> Steps[int]:
    """How many bytes of payloads the quarantine holds."""
    yield Begin()
    found = yield dialect.statement("quarantine_bytes")
    yield Commit()
    return int(found.rows[0][0])


def drop_quarantined(dialect: Dialect, *, excess: int, limit: int) -> Steps[tuple[int, int]]:
    """Drop the oldest payloads of the quarantine until `excess` bytes are gone, one batch of them.

    Returns:
        How many were dropped, and their bytes.
    """
    yield _begun(dialect)
    found = yield dialect.statement("quarantine_oldest", {"limit": limit})
    chosen: list[Sequence[Any]] = []
    dropped = 0
    for row in found.rows:
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
        yield dialect.statement("drop_quarantined", {}, keys)
    yield Commit()
    return len(chosen), dropped


def drop_payloads(
    dialect: Dialect, *, consumer: str, older_than_s: float, limit: int
) -> Steps[Batch]:
    """Drop payload and headers of one batch of rows that were processed `older_than_s` ago or earlier."""
    yield _begun(dialect)
    dropped = yield dialect.statement(
        "drop_payloads", {"consumer": consumer, "older_than_s": older_than_s, "limit": limit}
    )
    yield Commit()
    return Batch(int(dropped.count), dropped.count == limit)


def second_of_day(dialect: Dialect) -> Steps[float]:
    """The second of the UTC day by the clock of the database."""
    yield Begin()
    found = yield dialect.statement("second_of_day")
    yield Commit()
    return float(found.rows[0][0])


def due(
    dialect: Dialect,
    consumers: Sequence[str],
    *,
    ahead_s: float,
    routes: Sequence[str],
    local: str | None = None,
) -> Steps[list[tuple[str, float]]]:
    """Say which consumers have rows that are due within `ahead_s`, and in how many seconds the first is.

    Args:
        consumers: one or more.
        routes: of the outbox to ask for too, under the empty name.
        local: the one of these that leads to the App's own consumers, if any does.

    Guarantee: one statement that writes and locks nothing; what it says is a hint, a lease decides.
    """
    # columns of one length: no route is NULL, and who is asked for twice answers twice
    asked: dict[str, list[str | None]] = {
        "consumer": [*consumers, *list(consumers[:1]) * (len(routes) - len(consumers))],
        "route": [*routes, *[None] * (len(consumers) - len(routes))],
    }
    found = yield Read(dialect.statement("due", {"ahead_s": ahead_s, "local": local}, asked))
    return [(str(consumer), float(in_s)) for consumer, in_s in found.rows]


def work_left(
    dialect: Dialect, *, consumer: str, order: tuple[bool, bool] = (False, False)
) -> Steps[bool]:
    """Say whether a consumer has rows that are due now or leased by anybody.

    Args:
        order: whether rows are taken by the heads of their keys only, and whether dead rows stay heads.
    """
    heads_only, dead_blocks = order
    yield Begin()
    if heads_only:
        found = yield dialect.statement(
            "work_left_ordered", {"consumer": consumer, "dead_blocks": dead_blocks}
        )
    else:
        found = yield dialect.statement("work_left", {"consumer": consumer})
    yield Commit()
    return bool(found.rows[0][0])
