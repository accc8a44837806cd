"""The canary: retries dead messages step by step, as long as their failure does not return."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Literal, Unpack

from txbox.admin.changes import ChangeOptions, Changes, Key, result_of
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
Why = Literal["returned", "otherwise", "nobody"]


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


class Canary(Changes):
    """Retries in steps."""

    def canary(
        self, where: InboxFilter, *, patience: timedelta = _PATIENCE, **how: Unpack[ChangeOptions]
    ) -> Redriven:
        """Retry dead messages one, then ten, then five hundred at a time, as long as their failure does not return.

        Workers run them, and each step waits for the one before. It stops when a message fails with the
        fingerprint of the filter (without one, when any fails), when a step processes nothing, or when no
        worker takes the messages. A dry run counts.

        Args:
            patience: stop when no message of a step has been processed or failed for so long.

        Raises:
            ConfigurationError: a filter that names a message, or another status than dead.

        Guarantee: that of `retry`; after a crash the released messages are retried, the rest stay dead.
        """
        return result_of(self.canary_steps(where, patience=patience, **how))

    def canary_steps(
        self, where: InboxFilter, *, patience: timedelta = _PATIENCE, **how: Unpack[ChangeOptions]
    ) -> Generator[Redriven]:
        """Do what `canary` does, and yield what has become of the messages so far, several times a second.

        The last one yielded is the result, and there is at least one. Leaving the loop ends the canary there: no
        message is retried any more.
        """
        if where.message_id is not None:
            raise ConfigurationError("A canary is for many messages: retry one by its id.")
        if where.status not in (None, Status.DEAD):
            raise ConfigurationError(
                f"A canary is for dead messages, not {where.status} ones: leave the status out."
            )
        where = replace(where, status=Status.DEAD)
        reason, most = how.get("reason"), how.get("most")
        how = {**how, "reason": f"canary: {reason}" if reason else "canary"}
        steps: tuple[Step, ...] = ()
        for changed, keys in self._batches("retry", where, how, sizes=_SIZES):
            total = sum(matching.rows for matching in changed.matching)
            total = total if most is None else min(most, total)
            count = 0 if changed.dry_run else changed.count
            # more may have died meanwhile
            rest = max(0, total - count)
            so_far = Redriven(steps=steps, count=count, left=rest, stopped=None)
            if not keys:
                yield so_far
                return
            for step, why in _watched(self, where.fingerprint, keys, patience):
                so_far = replace(so_far, steps=(*steps, step), stopped=why)
                yield so_far
                if why is not None:
                    return
            steps = so_far.steps


def _watched(
    operator: Operator, fingerprint: str | None, keys: Sequence[Key], patience: timedelta
) -> Generator[tuple[Step, Why | None]]:
    """Look until all have run, one has failed as before, or nothing happens any more."""
    waiting, since = len(keys), time.monotonic()
    while True:
        step = _step(operator, fingerprint, keys)
        if step.returned:
            yield step, "returned"
            return
        if not step.waiting:
            yield step, None if step.processed or not step.otherwise else "otherwise"
            return
        if step.waiting < waiting:
            waiting, since = step.waiting, time.monotonic()
        if time.monotonic() - since > patience.total_seconds():
            yield step, "nobody"
            return
        yield step, None
        time.sleep(_LOOK_S)


def _step(operator: Operator, fingerprint: str | None, keys: Sequence[Key]) -> Step:
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
