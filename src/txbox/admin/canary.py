"""Canary redrive: dead messages of one cause come back one, ten, then many at a time, and stop when it returns."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

from txbox.admin.reader import Reader
from txbox.admin.tables import InboxFilter
from txbox.errors import ConfigurationError
from txbox.outcome import Status

#: How many messages are let go before what becomes of them is waited for; then always the last.
SIZES = (1, 10, 500)
PATIENCE = timedelta(minutes=2)
_LOOK_S = 0.25

#: Consumer and id.
Named = tuple[str, str]
#: "returned": a message failed as before; "otherwise": none was processed; "nobody": no worker took them.
Why = Literal["returned", "otherwise", "nobody", "cancelled"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What became of the messages that were let go together.

    Attributes:
        count: how many there were.
        processed: how many are done.
        returned: how many failed with the fingerprint of the filter; without one, how many failed.
        otherwise: how many failed in another way.
        waiting: how many have not run yet.
    """

    count: int
    processed: int = 0
    returned: int = 0
    otherwise: int = 0
    waiting: int = 0

    @property
    def sentence(self) -> str:
        parts = (
            (self.processed, "processed"),
            (self.returned, "failed in the same way"),
            (self.otherwise, "failed in another way"),
            (self.waiting, "not run yet"),
        )
        became = ", ".join(f"{number:,} {what}" for number, what in parts if number)
        return f"{self.count:,} retried: {became or 'gone meanwhile'}."


@dataclass(frozen=True, slots=True, kw_only=True)
class Redriven:
    """What a canary redrive did.

    Attributes:
        count: messages that were given a new budget of attempts.
        left: how many matching messages it has left alone.
        stopped: why it ended before all of them; None when it did not.
    """

    steps: tuple[Step, ...]
    count: int
    left: int
    stopped: Why | None

    @property
    def sentence(self) -> str:
        """How it ended."""
        left = f"{self.left:,} are left alone"
        match self.stopped:
            case "returned":
                return f"It stopped by itself, since the failure returned: {left}, the others go on by their policy."
            case "otherwise":
                return f"It stopped by itself, since nothing was processed: {left}."
            case "nobody":
                return f"It stopped by itself, since no worker took the messages: {left}. Is one running, unpaused?"
            case "cancelled":
                return f"It was cancelled: {left}."
            case None:
                return "All of them were retried, and the failure did not return."


def redriven(
    reader: Reader,
    fingerprint: str | None,
    *,
    total: int,
    release: Callable[[int], Sequence[Named]],
    cancelled: Callable[[], bool],
    patience: timedelta,
    on_step: Callable[[Step], None],
) -> Redriven:
    """Release dead messages in steps, and wait after each for what becomes of them.

    Args:
        fingerprint: the failure that must not return; None for any failure.
        total: how many there are.
        release: retries so many of them, the oldest first; returns which.
        patience: without any message of a step done or failed for so long, it stops.
        on_step: called after each step.
    """
    steps: list[Step] = []
    count = 0
    why: Why | None = None
    while why is None and count < total:
        if cancelled():
            why = "cancelled"
            break
        size = min(SIZES[min(len(steps), len(SIZES) - 1)], total - count)
        keys = release(size)
        if not keys:
            break
        count += len(keys)
        step, why = _settled(reader, fingerprint, keys, cancelled, patience)
        steps.append(step)
        on_step(step)
    left = max(0, total - count)
    return Redriven(steps=tuple(steps), count=count, left=left, stopped=why)


def _settled(
    reader: Reader,
    fingerprint: str | None,
    keys: Sequence[Named],
    cancelled: Callable[[], bool],
    patience: timedelta,
) -> tuple[Step, Why | None]:
    """Wait until all have run, one has failed as before, or nothing happens any more."""
    waiting, since = len(keys), time.monotonic()
    while True:
        step = _step(reader, fingerprint, keys)
        if step.returned:
            return step, "returned"
        if not step.waiting:
            return step, None if step.processed or not step.otherwise else "otherwise"
        if step.waiting < waiting:
            waiting, since = step.waiting, time.monotonic()
        if cancelled():
            return step, "cancelled"
        if time.monotonic() - since > patience.total_seconds():
            return step, "nobody"
        time.sleep(_LOOK_S)


def _step(reader: Reader, fingerprint: str | None, keys: Sequence[Named]) -> Step:
    """What has become of these messages; those that are gone count nowhere."""
    consumers, ids = zip(*keys, strict=True)
    found = reader.rows("inbox_states", rows={"consumer": consumers, "message_id": ids})
    became: Counter[str] = Counter()
    for _, _, status, attempts, of_now in found:
        if status == Status.PROCESSED:
            became["processed"] += 1
        elif status == Status.DEAD or (status == Status.FAILED and int(attempts)):
            # a retry has set the attempts to 0: there has been one since
            became["returned" if fingerprint in (None, of_now) else "otherwise"] += 1
        elif status != Status.DISCARDED:
            became["waiting"] += 1
    return Step(count=len(keys), **became)


def check(where: InboxFilter) -> None:
    """Refuse a filter that is not for dead messages in bulk.

    Raises:
        ConfigurationError: it names a message, or another status than dead.
    """
    if where.message_id is not None:
        raise ConfigurationError("A canary is for many messages: retry one by its id.")
    if where.status not in (None, Status.DEAD):
        raise ConfigurationError(
            f"A canary is for dead messages, not {where.status} ones: leave the status out."
        )
