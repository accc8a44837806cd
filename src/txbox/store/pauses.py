"""Paused consumers: one row each, which every worker polls every few seconds.

Source: docs/decisions/0039-pauses.md
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import datetime

from txbox.errors import Fault, StoreError
from txbox.session import Result, Session
from txbox.store.dialect import Dialect, as_time


@dataclass(frozen=True, slots=True, kw_only=True)
class Pause:
    """A consumer that no worker serves until it is resumed."""

    consumer: str
    actor: str
    reason: str | None
    paused_at: datetime


async def read(db: Session, dialect: Dialect) -> tuple[float, list[Pause]]:
    """Read which consumers are paused, in one statement that takes no locks.

    Returns:
        The database's clock in seconds since the epoch, and the pauses by consumer.
    """
    return found_in(await db.read(dialect.statement("pauses")))


def found_in(result: Result) -> tuple[float, list[Pause]]:
    """Read the result of the statement `pauses`, as `read` returns it."""
    paused: list[Pause] = []
    for _, consumer, actor, reason, paused_at in result.rows:
        at = as_time(paused_at)
        if at is not None:
            paused.append(
                Pause(consumer=str(consumer), actor=str(actor), reason=reason, paused_at=at)
            )
    return float(result.rows[0][0]), paused


async def pause(
    db: Session,
    dialect: Dialect,
    consumer: str,
    *,
    actor: str,
    reason: str | None,
    dry_run: bool = False,
) -> bool:
    """Pause a consumer; False if it is already paused.

    Guarantee: the pause and its audit row are one commit.
    """
    params = {"consumer": consumer, "actor": actor, "reason": reason}
    await db.begin()
    try:
        await db.execute(dialect.statement("pause", params))
    except StoreError as error:
        await db.rollback()
        if error.fault is not Fault.DUPLICATE:
            raise
        return False
    return await _end(db, dialect, "pause", consumer, actor, reason, dry_run=dry_run)


async def resume(
    db: Session,
    dialect: Dialect,
    consumer: str,
    *,
    actor: str,
    reason: str | None,
    dry_run: bool = False,
) -> bool:
    """Resume a consumer; False if it was not paused. Same guarantee as `pause`."""
    await db.begin()
    gone = await db.execute(dialect.statement("resume", {"consumer": consumer}))
    if not gone.count:
        await db.rollback()
        return False
    return await _end(db, dialect, "resume", consumer, actor, reason, dry_run=dry_run)


async def _end(
    db: Session,
    dialect: Dialect,
    action: str,
    consumer: str,
    actor: str,
    reason: str | None,
    *,
    dry_run: bool,
) -> bool:
    if dry_run:
        await db.rollback()
        return True
    audit = {
        "actor": actor, "action": action, "filter": json.dumps({"consumer": consumer}), "affected": 1,
        "reason": reason,
    }  # fmt: skip
    await db.execute(dialect.statement("audit", audit))
    await db.commit()
    return True
