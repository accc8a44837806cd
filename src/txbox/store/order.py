"""Order: what a message waits for, which is earlier messages of its key or earlier versions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from txbox.policy import GapPolicy
from txbox.session import Session, Statement
from txbox.store.codec import Arrival
from txbox.store.dialect import Dialect, as_time


def waiting(
    dialect: Dialect, consumer: str, arrivals: Iterable[Arrival], *, dead_blocks: bool, token: str
) -> Statement | None:
    """Return the statement that names the keys with unfinished messages; None if no message has a key.

    Args:
        dead_blocks: a dead message counts as unfinished.
        token: of the claim, whose own rows do not count.
    """
    keys = sorted({key for arrival in arrivals if (key := arrival.message.key) is not None})
    if not keys:
        return None
    return dialect.statement(
        "order_waiting",
        {"consumer": consumer, "dead_blocks": dead_blocks, "token": token},
        {"key": keys},
    )


def sequence_state(dialect: Dialect, consumer: str, arrival: Arrival, gaps: GapPolicy) -> Statement:
    """Return the statement that reads how far a key's versions are; `Versions.read` parses its result."""
    return dialect.statement(
        "sequence_state",
        {
            "consumer": consumer,
            "key": arrival.message.key,
            "sequence": arrival.message.sequence,
            "message_id": arrival.message_id,
            "wait_s": gaps.wait.total_seconds(),
        },
    )


def sequence_done(dialect: Dialect, consumer: str, arrival: Arrival) -> tuple[Statement, ...]:
    """Return the statements that record a version as processed and wake the next one."""
    params = {
        "consumer": consumer,
        "key": arrival.message.key,
        "sequence": arrival.message.sequence,
    }
    return dialect.statement("sequence_done", params), dialect.statement("sequence_next", params)


@dataclass(frozen=True, slots=True)
class Versions:
    """The state of a key when one of its versions arrives.

    Args:
        last: the version processed last; None before the first.
        earlier_unfinished: an earlier version is being processed from the table.
        overdue: this one has waited as long as allowed.
    """

    last: int | None
    earlier_unfinished: bool
    overdue: bool

    @classmethod
    def read(cls, rows: Sequence[Sequence[Any]]) -> Versions:
        """Parse the result of `sequence_state`."""
        ((last, earlier, overdue),) = rows
        return cls(last, bool(earlier), bool(overdue))

    def expected(self, gaps: GapPolicy) -> int | None:
        """Return the version that comes next; None if any may."""
        return gaps.first if self.last is None else self.last + 1

    def gap(self, sequence: int, gaps: GapPolicy) -> bool:
        """Whether an earlier version has not been processed."""
        expected = self.expected(gaps)
        return self.earlier_unfinished or (expected is not None and sequence > expected)

    def must_wait(self, sequence: int, gaps: GapPolicy) -> bool:
        """Whether this version must wait. There is no time limit on waiting for one already on its way."""
        return self.gap(sequence, gaps) and (self.earlier_unfinished or not self.overdue)


# -- for people -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Waits:
    """What a message is waiting for.

    Attributes:
        message_id, status, next_attempt_at: the message that must finish first, if any.
        version: the version that has not arrived.
    """

    message_id: str | None = None
    status: str | None = None
    next_attempt_at: datetime | None = None
    version: int | None = None


async def waits_by_arrival(
    db: Session, dialect: Dialect, consumer: str, ids: Sequence[str], *, dead_blocks: bool
) -> dict[str, Waits]:
    """Read what messages of a consumer with `ordered=True` wait for; messages that wait for nothing are omitted.

    Args:
        dead_blocks: messages also wait for dead ones.
    """
    result = await db.alone(
        dialect.statement(
            "waits_order",
            {"consumer": consumer, "dead_blocks": dead_blocks},
            {"message_id": list(ids)},
        )
    )
    return {
        row[0]: Waits(message_id=row[1], status=row[2], next_attempt_at=as_time(row[3]))
        for row in result.rows
    }


async def waits_by_version(
    db: Session, dialect: Dialect, consumer: str, ids: Sequence[str], *, first: int | None
) -> dict[str, Waits]:
    """Read what messages of a consumer with `sequence=` wait for; messages that wait for nothing are omitted.

    Args:
        first: the version a key begins with; None for any.
    """
    result = await db.alone(
        dialect.statement("waits_version", {"consumer": consumer}, {"message_id": list(ids)})
    )
    waiting: dict[str, Waits] = {}
    for message_id, sequence, last, head, status, at, head_sequence in result.rows:
        expected = first if last is None else last + 1
        if head is not None and (expected is None or head_sequence <= expected):
            waiting[message_id] = Waits(message_id=head, status=status, next_attempt_at=as_time(at))
        elif expected is not None and sequence > expected:
            # any versions in between wait for it as well
            waiting[message_id] = Waits(version=expected)
    return waiting
