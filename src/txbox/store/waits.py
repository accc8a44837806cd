"""What a row waits for, for people: a message of its key, or a version that has not come."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from txbox.steps import Begin, Commit, Steps
from txbox.store.dialect import Dialect, as_time


@dataclass(frozen=True, slots=True, kw_only=True)
class Waits:
    """What stands in a message's way.

    Attributes:
        message_id, status, next_attempt_at: the message that must end first; None when none is there.
        version: the version that has not arrived.
    """

    message_id: str | None = None
    status: str | None = None
    next_attempt_at: datetime | None = None
    version: int | None = None


def by_arrival(
    dialect: Dialect, consumer: str, ids: Sequence[str], *, dead_blocks: bool
) -> Steps[dict[str, Waits]]:
    """Read what messages of a consumer with `ordered=True` wait for; those that wait for nothing are left out.

    Args:
        dead_blocks: a dead message is waited for as well.
    """
    yield Begin()
    found = yield dialect.statement(
        "waits_order",
        {"consumer": consumer, "dead_blocks": dead_blocks},
        {"message_id": list(ids)},
    )
    yield Commit()
    return {
        row[0]: Waits(message_id=row[1], status=row[2], next_attempt_at=as_time(row[3]))
        for row in found.rows
    }


def by_version(
    dialect: Dialect, consumer: str, ids: Sequence[str], *, first: int | None
) -> Steps[dict[str, Waits]]:
    """Read what messages of a consumer with `sequence=` wait for; those that wait for nothing are left out.

    Args:
        first: the version that a key begins with; None for any.
    """
    yield Begin()
    found = yield dialect.statement(
        "waits_version", {"consumer": consumer}, {"message_id": list(ids)}
    )
    yield Commit()
    waiting: dict[str, Waits] = {}
    for message_id, sequence, last, head, status, at, head_sequence in found.rows:
        expected = first if last is None else last + 1
        if head is not None and (expected is None or head_sequence <= expected):
            waiting[message_id] = Waits(message_id=head, status=status, next_attempt_at=as_time(at))
        elif expected is not None and sequence > expected:
            # the ones in between, if any, wait for it as well
            waiting[message_id] = Waits(version=expected)
    return waiting
