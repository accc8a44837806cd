"""The paused consumers, as far as this process knows. It pauses those that fail too often in a row.

Source: docs/decisions/0039-pauses.md
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping
from functools import partial

from txbox.events import ConsumerPaused, ConsumerResumed, Event, MessageDead, MessageFailed
from txbox.session import Session
from txbox.store import activity
from txbox.store.activity import Pause
from txbox.store.dialect import Dialect

#: The actor who pauses a consumer that keeps failing.
ACTOR = "txbox"
# a process without a worker reads the pauses again after this long, when it has work
_FRESH_S = 5.0


class Pauses:
    """The paused consumers: those last read from the database, and those this process has paused since.

    Args:
        limit: how many failures in a row pause a consumer; None for never.
        emit: called with an event for each change.
    """

    def __init__(self, limit: Callable[[str], int | None], emit: Callable[[Event], None]) -> None:
        self._limit = limit
        self._emit = emit
        self._lock = threading.Lock()
        self._failures: Counter[str] = Counter()
        #: When what was read becomes stale, by `time.monotonic`.
        self.stale_at = 0.0
        #: It has been logged that the pauses cannot be read.
        self.unreadable = False
        #: Their names; replaced as a whole, so that reading needs no lock.
        self.paused: frozenset[str] = frozenset()
        #: Consumer → reason, for pauses of this process that are not written yet.
        self.unwritten: Mapping[str, str] = {}
        #: What else is written in the transaction that writes a pause.
        self.pausing: Callable[..., Awaitable[None]] | None = None
        #: Called, from any thread, when there is a pause to write; set while a worker writes them.
        self.wake: Callable[[], None] | None = None

    #: The events it counts.
    kinds = (MessageFailed, MessageDead)

    def __call__(self, event: Event) -> None:
        """Count failures in a row; one too many pauses its consumer at once."""
        if not isinstance(event, self.kinds) or self.wake is None:
            return
        consumer = event.consumer or ""
        limit = self._limit(consumer)
        if limit is None:
            return
        with self._lock:
            self._failures[consumer] += 1
            count = self._failures[consumer]
            if count < limit or consumer in self.paused:
                return
            reason = f"{count} failures in a row, the last one {event.error_type}"
            self.unwritten = {**self.unwritten, consumer: reason}
            self.paused |= {consumer}
        self._emit(ConsumerPaused(consumer=consumer, actor=ACTOR, reason=reason))
        self.wake()

    def went_well(self, consumer: str) -> None:
        """Start counting anew, because a message was processed."""
        if self._failures and consumer not in self.paused:
            with self._lock:
                self._failures.pop(consumer, None)

    def heard(self, paused: Iterable[Pause]) -> frozenset[str]:
        """Apply the pauses in the database; returns the consumers that are no longer paused."""
        known = {pause.consumer: pause for pause in paused}
        with self._lock:
            before = self.paused
            self.paused = frozenset({*known, *self.unwritten})
            resumed = before - self.paused
            for consumer in resumed:
                self._failures.pop(consumer, None)
            self.stale_at = time.monotonic() + _FRESH_S
            fresh = self.paused - before
        for consumer in sorted(fresh):
            pause = known[consumer]
            self._emit(ConsumerPaused(consumer=consumer, actor=pause.actor, reason=pause.reason))
        for consumer in sorted(resumed):
            self._emit(ConsumerResumed(consumer=consumer))
        return resumed

    async def look_now_and_then(self, db: Session, dialect: Dialect) -> None:
        """Read the pauses from the database, if no worker does and the last time was long ago."""
        now = time.monotonic()
        if self.wake is None and now >= self.stale_at:
            # also if it fails, so that the next call does not try again at once
            self.stale_at = now + _FRESH_S
            _, paused = await activity.pauses(db, dialect)
            self.heard(paused)

    async def write(self, db: Session, dialect: Dialect) -> None:
        """Write the pauses of this process to the database.

        Guarantee: a pause and its audit row are one commit. Until then the consumer is paused in this process only;
        after a crash its failures are counted from zero.
        """
        for consumer, reason in self.unwritten.items():
            await activity.pause(
                db, dialect, consumer, actor=ACTOR, reason=reason,
                pausing=None if self.pausing is None else partial(self.pausing, consumer=consumer, reason=reason),
            )  # fmt: skip
            with self._lock:
                self.unwritten = {
                    name: why for name, why in self.unwritten.items() if name != consumer
                }
