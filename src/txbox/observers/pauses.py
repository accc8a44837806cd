"""Which consumers this process knows to be paused, and which fail so often in a row that it pauses them itself.

Source: docs/decisions/0039-pauses.md
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping

from txbox.events import ConsumerPaused, ConsumerResumed, Event, MessageDead, MessageFailed
from txbox.session import Session
from txbox.store import activity
from txbox.store.activity import Pause
from txbox.store.dialect import Dialect

#: Who pauses a consumer that fails again and again.
ACTOR = "txbox"
# a process without a worker asks so often, when it has something to do
_FRESH_S = 5.0


class Pauses:
    """The consumers that nobody runs, as far as this process has heard; and who is to be one of them.

    Args:
        limit: how many failures in a row pause a consumer; None where none do.
        emit: told of each change.
    """

    def __init__(self, limit: Callable[[str], int | None], emit: Callable[[Event], None]) -> None:
        self._limit = limit
        self._emit = emit
        self._lock = threading.Lock()
        self._failures: Counter[str] = Counter()
        #: From when on, by `time.monotonic`, what this process has heard is old.
        self.stale_at = 0.0
        #: The log has been told that the database does not say.
        self.unreadable = False
        #: Their names; replaced as a whole, so that it is read without a lock.
        self.held: frozenset[str] = frozenset()
        #: By consumer, why: paused by this process, which has not written it down yet.
        self.unwritten: Mapping[str, str] = {}
        #: Called when there is something to be written down; from any thread. Set while somebody does.
        self.wake: Callable[[], None] | None = None

    #: What it counts.
    kinds = (MessageFailed, MessageDead)

    def __call__(self, event: Event) -> None:
        """Count failures in a row; the one that is too many pauses its consumer at once."""
        if not isinstance(event, self.kinds) or self.wake is None:
            return
        consumer = event.consumer or ""
        limit = self._limit(consumer)
        if limit is None:
            return
        with self._lock:
            self._failures[consumer] += 1
            count = self._failures[consumer]
            if count < limit or consumer in self.held:
                return
            reason = f"{count} failures in a row, the last one {event.error_type}"
            self.unwritten = {**self.unwritten, consumer: reason}
            self.held |= {consumer}
        self._emit(ConsumerPaused(consumer=consumer, actor=ACTOR, reason=reason))
        self.wake()

    def went_well(self, consumer: str) -> None:
        """A message was processed: failures before it are no row any more."""
        if self._failures and consumer not in self.held:
            with self._lock:
                self._failures.pop(consumer, None)

    def heard(self, paused: Iterable[Pause]) -> frozenset[str]:
        """The database says who is paused; returns who is not any more."""
        known = {pause.consumer: pause for pause in paused}
        with self._lock:
            before = self.held
            self.held = frozenset({*known, *self.unwritten})
            resumed = before - self.held
            for consumer in resumed:
                self._failures.pop(consumer, None)
            self.stale_at = time.monotonic() + _FRESH_S
            fresh = self.held - before
        for consumer in sorted(fresh):
            pause = known[consumer]
            self._emit(ConsumerPaused(consumer=consumer, actor=pause.actor, reason=pause.reason))
        for consumer in sorted(resumed):
            self._emit(ConsumerResumed(consumer=consumer))
        return resumed

    async def look(self, db: Session, dialect: Dialect) -> frozenset[str]:
        """Ask the database who is paused; returns who is not any more."""
        _, paused = await activity.pauses(db, dialect)
        return self.heard(paused)

    async def look_now_and_then(self, db: Session, dialect: Dialect) -> None:
        """As `look`, where nobody else does, and it was long ago."""
        now = time.monotonic()
        if self.wake is None and now >= self.stale_at:
            # also where it fails: the next one is not to try again at once
            self.stale_at = now + _FRESH_S
            await self.look(db, dialect)

    async def write(self, db: Session, dialect: Dialect) -> None:
        """Write down whom this process has paused.

        Guarantee: a pause and its audit row are one commit; until then this process holds the consumer, and after a
        crash its failures are counted anew.
        """
        for consumer, reason in self.unwritten.items():
            await activity.pause(db, dialect, consumer, actor=ACTOR, reason=reason)
            with self._lock:
                self.unwritten = {
                    name: why for name, why in self.unwritten.items() if name != consumer
                }
