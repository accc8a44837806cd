"""Maintenance and progress as steps: the leases in txbox_job, batches of pruning, what is left to do."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from txbox.identity import canonical_id
from txbox.steps import Begin, Commit, Rollback, Steps
from txbox.store.dialect import Dialect


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
    own: Dialect,
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
    told = yield own.statement("anchor_history")
    history = str(told.rows[0][0])
    stored = yield own.statement("anchor_read", {}, {"name": list(names)})
    positions = {
        name.decode() if isinstance(name, bytes) else str(name): int(position)
        for name, position in stored.rows
    }
    if moves is not None and (moved := sorted(moves(history, positions).items())):
        rows: dict[str, list[Any]] = {
            "name": [name for name, _ in moved],
            "position": [to for _, to in moved],
        }
        yield own.statement("anchor_advance", {}, rows)
    yield Commit()
    return history, positions


def prune(own: Dialect, *, consumer: str | None, older_than_s: float, limit: int) -> Steps[int]:
    """Delete one batch of finished rows and their attempts in one transaction; returns how many rows."""
    yield Begin()
    gone = yield own.statement(
        "prune", {"consumer": consumer, "older_than_s": older_than_s, "limit": limit}
    )
    if not gone.rows:
        yield Rollback()
        return 0
    keys = {
        "consumer": [row[0] for row in gone.rows],
        "message_id": [row[1] for row in gone.rows],
    }
    if own.has("prune_take"):
        yield own.statement("prune_take", {}, keys)
    yield own.statement("prune_attempts", {}, keys)
    yield Commit()
    return len(gone.rows)


def prunable(own: Dialect, *, consumer: str | None, older_than_s: float) -> Steps[int]:
    """Count the rows that `prune` would delete now."""
    yield Begin()
    found = yield own.statement("prunable", {"consumer": consumer, "older_than_s": older_than_s})
    yield Commit()
    return int(found.rows[0][0])


def prune_outbox(own: Dialect, *, sent_s: float, discarded_s: float, limit: int) -> Steps[int]:
    """Delete one batch of outgoing rows that have ended; returns how many."""
    yield Begin()
    gone = yield own.statement(
        "prune_outbox", {"sent_s": sent_s, "discarded_s": discarded_s, "limit": limit}
    )
    yield Commit()
    return int(gone.count)


def prunable_outbox(own: Dialect, *, sent_s: float, discarded_s: float) -> Steps[int]:
    """Count the rows that `prune_outbox` would delete now."""
    yield Begin()
    found = yield own.statement("prunable_outbox", {"sent_s": sent_s, "discarded_s": discarded_s})
    yield Commit()
    return int(found.rows[0][0])


def drop_payloads(own: Dialect, *, consumer: str, older_than_s: float, limit: int) -> Steps[int]:
    """Drop payload and headers of one batch of processed rows; returns how many rows."""
    yield Begin()
    dropped = yield own.statement(
        "drop_payloads", {"consumer": consumer, "older_than_s": older_than_s, "limit": limit}
    )
    yield Commit()
    return int(dropped.count)


def work_left(
    own: Dialect, *, consumer: str, order: tuple[bool, bool] = (False, False)
) -> Steps[bool]:
    """Say whether a consumer has rows that are due now or leased by anybody.

    Args:
        order: as `Handlers.order_of` says.
    """
    heads_only, dead_blocks = order
    yield Begin()
    if heads_only:
        found = yield own.statement(
            "work_left_ordered", {"consumer": consumer, "dead_blocks": dead_blocks}
        )
    else:
        found = yield own.statement("work_left", {"consumer": consumer})
    yield Commit()
    return bool(found.rows[0][0])
