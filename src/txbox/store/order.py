"""What a message waits for: earlier messages of its key, or versions before its own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from txbox.policy import GapPolicy
from txbox.steps import Statement
from txbox.store.codec import Arrival
from txbox.store.dialect import Dialect


def waiting(
    dialect: Dialect, consumer: str, arrivals: Iterable[Arrival], *, dead_blocks: bool, token: str
) -> Statement | None:
    """The statement that names the keys with unfinished messages; None when no message has a key.

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
    """The statement that tells where a key's versions stand; `Versions.read` reads its answer."""
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
    """The statements that write a version down as processed, and wake the one behind it."""
    params = {
        "consumer": consumer,
        "key": arrival.message.key,
        "sequence": arrival.message.sequence,
    }
    return dialect.statement("sequence_done", params), dialect.statement("sequence_next", params)


@dataclass(frozen=True, slots=True)
class Versions:
    """Where a key stands when a version of it arrives.

    Args:
        last: the version processed last; None when none was.
        earlier_unfinished: an earlier version is on its way through the table.
        overdue: this one has waited as long as it may.
    """

    last: int | None
    earlier_unfinished: bool
    overdue: bool

    @classmethod
    def read(cls, rows: Sequence[Sequence[Any]]) -> Versions:
        """Read the answer to `sequence_state`."""
        ((last, earlier, overdue),) = rows
        return cls(last, bool(earlier), bool(overdue))

    def expected(self, gaps: GapPolicy) -> int | None:
        """The version that comes next; None when any may."""
        return gaps.first if self.last is None else self.last + 1

    def gap(self, sequence: int, gaps: GapPolicy) -> bool:
        """Say whether a version before this one has not been processed."""
        expected = self.expected(gaps)
        return self.earlier_unfinished or (expected is not None and sequence > expected)

    def waits(self, sequence: int, gaps: GapPolicy) -> bool:
        """Say whether this version must wait; what is on its way is waited for without a limit."""
        return self.gap(sequence, gaps) and (self.earlier_unfinished or not self.overdue)
