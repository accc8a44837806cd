"""Canary redrive: dead messages of one cause come back one, ten, then many at a time, and stop when it returns."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Literal

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
class State:
    """Where a message is that was retried."""

    status: str
    attempts: int
    fingerprint: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What became of the messages that were let go together.

    Attributes:
        count: how many there were.
        processed: how many are done.
        returned: how many failed with the fingerprint that they were asked for by; without one, how many failed.
        otherwise: how many failed in another way.
        waiting: how many have not run yet.
    """

    count: int
    processed: int = 0
    returned: int = 0
    otherwise: int = 0
    waiting: int = 0

    def told(self) -> str:
        """The step in a sentence."""
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
        left: how many it has left alone that it was meant for.
        stopped: why it ended before all of them; None when it did not.
    """

    steps: tuple[Step, ...]
    count: int
    left: int
    stopped: Why | None

    def told(self) -> str:
        """How it ended, in a sentence."""
        left = f"{self.left:,} are left alone"
        match self.stopped:
            case "returned":
                return f"It stopped by itself, since the failure returned: {left}, the others go on by their policy."
            case "otherwise":
                return f"It stopped by itself, since nothing was processed: {left}."
            case "nobody":
                return f"It stopped by itself, since no worker took the messages: {left}. See that one runs, unpaused."
            case "cancelled":
                return f"It was cancelled: {left}."
            case None:
                return "All of them were retried, and the failure did not return."


def redriven(
    where: InboxFilter,
    *,
    total: int,
    release: Callable[[InboxFilter, int], Sequence[Named]],
    look: Callable[[Sequence[Named]], dict[Named, State]],
    rest: Callable[[float], None],
    cancelled: Callable[[], bool],
    patience: timedelta,
    told: Callable[[Step], None],
) -> Redriven:
    """Let dead messages go in steps, and wait after each for what becomes of them.

    Args:
        total: how many there are.
        release: retries so many of them, the oldest first; returns which.
        look: where these are now.
        rest: waits so many seconds.
        patience: without any message of a step done or failed for so long, it stops.
        told: called after each step.
    """
    steps: list[Step] = []
    count = 0
    why: Why | None = None
    while why is None and count < total:
        if cancelled():
            why = "cancelled"
            break
        size = min(SIZES[min(len(steps), len(SIZES) - 1)], total - count)
        keys = release(where, size)
        if not keys:
            break
        count += len(keys)
        step, why = _settled(where.fingerprint, keys, look, rest, cancelled, patience)
        steps.append(step)
        told(step)
    left = max(0, total - count)
    return Redriven(steps=tuple(steps), count=count, left=left, stopped=why)


def _settled(
    fingerprint: str | None,
    keys: Sequence[Named],
    look: Callable[[Sequence[Named]], dict[Named, State]],
    rest: Callable[[float], None],
    cancelled: Callable[[], bool],
    patience: timedelta,
) -> tuple[Step, Why | None]:
    """Wait until all have run, one has failed as before, or nothing happens any more."""
    waiting, since = len(keys), time.monotonic()
    while True:
        step = _step(fingerprint, keys, look(keys))
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
        rest(_LOOK_S)


def _step(fingerprint: str | None, keys: Sequence[Named], states: dict[Named, State]) -> Step:
    step = Step(count=len(keys))
    for key in keys:
        state = states.get(key)
        if state is None or state.status == Status.DISCARDED:
            # somebody else has ended it
            continue
        if state.status == Status.PROCESSED:
            step = replace(step, processed=step.processed + 1)
        elif state.status == Status.DEAD or (state.status == Status.FAILED and state.attempts):
            # a retry has set the attempts to 0: there has been one since
            same = fingerprint is None or state.fingerprint == fingerprint
            step = (
                replace(step, returned=step.returned + 1)
                if same
                else replace(step, otherwise=step.otherwise + 1)
            )
        else:
            step = replace(step, waiting=step.waiting + 1)
    return step


def check(where: InboxFilter) -> None:
    """Refuse what a canary is not for.

    Raises:
        ConfigurationError: single messages, or a status but dead.
    """
    if where.message_id is not None:
        raise ConfigurationError("A canary is for many messages: retry one by its id.")
    if where.status not in (None, Status.DEAD):
        raise ConfigurationError(
            f"A canary is for dead messages, not {where.status} ones: leave the status out."
        )
