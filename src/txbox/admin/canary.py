"""The canary: retries dead messages step by step, as long as their failure does not return."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Literal, Unpack, cast

from txbox.admin.changes import ChangeOptions, Changes
from txbox.admin.reader import Operator
from txbox.admin.tables import InboxFilter
from txbox.errors import ConfigurationError
from txbox.outcome import Status

#: How many messages a canary retries before it waits for what becomes of them; then always the last.
_SIZES = (1, 10, 500)
_PATIENCE = timedelta(minutes=2)
_LOOK_S, _AGAIN = 0.25, 10

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
        again: consumer and id of those that `returned` counts, the first ten.
    """

    count: int
    processed: int = 0
    returned: int = 0
    otherwise: int = 0
    waiting: int = 0
    again: tuple[Named, ...] = ()

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
        count: messages retried, each with a new budget of attempts.
        left: matching messages that were not retried.
        stopped: why it ended before all of them; None when it did not.
    """

    steps: tuple[Step, ...]
    count: int
    left: int
    stopped: Why | None

    @property
    def sentence(self) -> str:
        """How it ended."""
        if self.stopped is None and not self.left:
            return "All of them were retried, and the failure did not return."
        unfinished = sum(step.count - step.processed for step in self.steps)
        rest = f"{self.left:,} were not retried"
        if unfinished:
            rest += (
                f"; of the {self.count:,} that were, {unfinished:,} are not processed yet and go on by their retry "
                "policy"
            )
        match self.stopped:
            case None:
                return (
                    f"{self.count:,} were retried, and the failure did not return. {self.left:,} were not retried: "
                    "locked by a transaction, or already changed."
                )
            case "returned":
                again = self.steps[-1].again
                named = ", ".join(" ".join(name) for name in again[:3])
                more = f" and {len(again) - 3} more" if len(again) > 3 else ""
                return f"Stopped: the failure returned ({named}{more}). {rest}."
            case "otherwise":
                return f"Stopped: every message failed in another way. {rest}."
            case "nobody":
                return f"Stopped: no worker took the messages. Does one run, and is the consumer paused? {rest}."
            case "cancelled":
                return f"Cancelled. {rest}."


class Canary(Changes):
    """Retries in steps."""

    def canary(
        self,
        where: InboxFilter,
        *,
        patience: timedelta = _PATIENCE,
        on_step: Callable[[Step], None] | None = None,
        **how: Unpack[ChangeOptions],
    ) -> Redriven:
        """Retry dead messages one, then ten, then five hundred at a time, as long as their failure does not return.

        Workers run them, and each step waits for the one before. It stops when a message fails with the
        fingerprint of the filter (without one, when any fails), when a step processes nothing, or when no
        worker takes the messages. A dry run counts.

        Args:
            patience: stop when no message of a step has been processed or failed for so long.
            on_step: called after each step.

        Raises:
            ConfigurationError: a filter that names a message, or another status than dead.

        Guarantee: that of `retry`; after a crash the released messages are retried, the rest stay dead.
        """
        if where.message_id is not None:
            raise ConfigurationError("A canary is for many messages: retry one by its id.")
        if where.status not in (None, Status.DEAD):
            raise ConfigurationError(
                f"A canary is for dead messages, not {where.status} ones: leave the status out."
            )
        where = replace(where, status=Status.DEAD)
        total = self.retry(where, dry_run=True, most=how.get("most")).count
        steps: list[Step] = []
        if how.get("dry_run"):
            return Redriven(steps=(), count=0, left=total, stopped=None)
        reason, report = how.get("reason"), how.get("progress")
        who = {"actor": how.get("actor"), "reason": f"canary: {reason}" if reason else "canary"}
        is_cancelled = how.get("cancelled") or (lambda: False)
        count = 0
        why: Why | None = None
        while why is None and count < total:
            if is_cancelled():
                why = "cancelled"
                break
            size = min(_SIZES[min(len(steps), len(_SIZES) - 1)], total - count)
            options = cast("ChangeOptions", {**who, "most": size})
            changed = self._change("retry", where, options, named_max=size)
            if not changed.count:
                break
            count += changed.count
            if report is not None:
                report(count)
            keys = [(key["consumer"], key["message_id"]) for key in changed.sample]
            step, why = _settled(self, where.fingerprint, keys, is_cancelled, patience)
            steps.append(step)
            if on_step is not None:
                on_step(step)
        remaining = max(0, total - count)
        return Redriven(steps=tuple(steps), count=count, left=remaining, stopped=why)


def _settled(
    operator: Operator,
    fingerprint: str | None,
    keys: Sequence[Named],
    cancelled: Callable[[], bool],
    patience: timedelta,
) -> tuple[Step, Why | None]:
    """Wait until all have run, one has failed as before, or nothing happens any more."""
    waiting, since = len(keys), time.monotonic()
    while True:
        step = _step(operator, fingerprint, keys)
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


def _step(operator: Operator, fingerprint: str | None, keys: Sequence[Named]) -> Step:
    """What has become of these messages; those that are gone count nowhere."""
    consumers, ids = zip(*keys, strict=True)
    rows = operator.rows("inbox_states", rows={"consumer": consumers, "message_id": ids})
    became: Counter[str] = Counter()
    again: list[Named] = []
    for consumer, message_id, status, attempts, of_now in rows:
        if status == Status.PROCESSED:
            became["processed"] += 1
        elif status == Status.DEAD or (status == Status.FAILED and int(attempts)):
            # a retry has set the attempts to 0: there has been one since
            if fingerprint in (None, of_now):
                again.append((consumer, message_id))
            else:
                became["otherwise"] += 1
        elif status != Status.DISCARDED:
            became["waiting"] += 1
    return Step(count=len(keys), returned=len(again), again=tuple(again[:_AGAIN]), **became)
