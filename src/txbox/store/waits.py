"""What a row is waiting for, shown to people: an earlier message of its key, or a missing version."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from txbox.session import Session
from txbox.store.dialect import Dialect, as_time


@dataclass(frozen=True, slots=True, kw_only=True)
class Waits:
    """What a message is waiting for.

    Attributes:
        message_id, status, next_attempt_at: the message that must finish first; None if there is none.
        version: the version that has not arrived.
    """

    message_id: str | None = None
    status: str | None = None
    next_attempt_at: datetime | None = None
    version: int | None = None


async def by_arrival(
    db: Session, dialect: Dialect, consumer: str, ids: Sequence[str], *, dead_blocks: bool
) -> dict[str, Waits]:
    """Read what messages of a consumer with `ordered=True` wait for; messages that wait for nothing are omitted.

    Args:
        dead_blocks: messages also wait for dead ones.
    """
    found = await db.read(
        dialect.statement(
            "waits_order",
            {"consumer": consumer, "dead_blocks": dead_blocks},
            {"message_id": list(ids)},
        )
    )
    return {
        row[0]: Waits(message_id=row[1], status=row[2], next_attempt_at=as_time(row[3]))
        for row in found.rows
    }


async def by_version(
    db: Session, dialect: Dialect, consumer: str, ids: Sequence[str], *, first: int | None
) -> dict[str, Waits]:
    """Read what messages of a consumer with `sequence=` wait for; messages that wait for nothing are omitted.

    Args:
        first: the version a key begins with; None for any.
    """
    found = await db.read(
        dialect.statement("waits_version", {"consumer": consumer}, {"message_id": list(ids)})
    )
    waiting: dict[str, Waits] = {}
    for message_id, sequence, last, head, status, at, head_sequence in found.rows:
        expected = first if last is None else last + 1
        if head is not None and (expected is None or head_sequence <= expected):
            waiting[message_id] = Waits(message_id=head, status=status, next_attempt_at=as_time(at))
        elif expected is not None and sequence > expected:
            # any versions in between wait for it as well
            waiting[message_id] = Waits(version=expected)
    return waiting
