"""Per-minute counters of this process, flushed to its row every few seconds."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import datetime
from typing import NamedTuple, Protocol

from txbox import events
from txbox.events import Event
from txbox.outcome import Answer, Outcome
from txbox.store.activity import Counts, Key, Kind, bucket_of

# minutes kept while they cannot be written; older ones are dropped
_KEPT = 60
_NOTHING = Counts()
_COUNTED: dict[type[Event], tuple[Kind, str]] = {
    events.MessageFailed: ("consumer", "failed"),
    events.MessageDead: ("consumer", "dead"),
    events.MessageQuarantined: ("consumer", "quarantined"),
    events.OutgoingSent: ("route", "processed"),
    events.OutgoingFailed: ("route", "failed"),
    events.OutgoingDead: ("route", "dead"),
}


class Received(Protocol):
    """Something that was received; when, by `time.monotonic`."""

    @property
    def received(self) -> float: ...


class Moment(NamedTuple):
    """When a message arrived that did not come through a source."""

    received: float


class Activity:
    """Counts successes once per batch, by calls, and failures by their events.

    Success events exist only with an observer for them: one per message would cost far more than this.

    Args:
        went_well: called with a consumer's name when some of its messages were processed.
    """

    #: Failures of messages, and outcomes of outgoing ones.
    kinds: Collection[type[Event]] = _COUNTED.keys()

    def __init__(self, went_well: Callable[[str], None]) -> None:
        self._went_well = went_well
        self._lock = threading.Lock()
        self._counted: dict[Key, Counts] = {}
        # copies: what the last flush read, and what is known to be written of the minutes still counted
        self._unwritten: dict[Key, Counts] = {}
        self._written: dict[Key, Counts] = {}
        # this minute's counts of consumers, which every batch needs
        self._minute = self._unwritten_in = 0
        self._consumers: dict[str, Counts] = {}
        #: Whether anything is counted: only while a worker flushes it.
        self.counts = False
        #: How many seconds the database's clock is ahead of ours.
        self.ahead_s = 0.0

    def received(self, consumer: str, count: int) -> None:
        """Count messages handed to a consumer."""
        if self.counts:
            with self._lock:
                self._of_consumer(consumer).received += count

    def settled(
        self, consumer: str, answers: Sequence[Answer], batch: Sequence[Received], began: float
    ) -> None:
        """Count the answers of a batch.

        Args:
            batch: when each message was received, roughly in order.
            began: when the batch's first transaction began, by `time.monotonic`.
        """
        if not self.counts:
            return
        now, count, first = time.monotonic(), len(answers), answers[0]
        # nearly always the same object for all of them, which makes this count cheap
        alike = count == 1 or answers.count(first) == count
        with self._lock:
            counts = self._of_consumer(consumer)
            if alike and first.outcome is Outcome.PROCESSED:
                processed = count
                longest, shortest = (bucket_of(now - batch[index].received) for index in (0, -1))
                if longest == shortest:
                    counts.latency.buckets[longest] += count
                else:
                    for each in batch:
                        counts.latency.add(now - each.received)
            else:
                processed = 0
                for answer, each in zip(answers, batch, strict=True):
                    outcome = answer.outcome
                    if outcome is Outcome.PROCESSED:
                        processed += 1
                        counts.latency.add(now - each.received)
                    elif outcome is Outcome.DUPLICATE:
                        counts.duplicate += 1
                    elif outcome is Outcome.DEFERRED:
                        counts.deferred += 1
            if processed:
                counts.processed += processed
                counts.run.add((now - began) / count, processed)
        if processed:
            self._went_well(consumer)

    def ran(
        self,
        consumer: str,
        answers: Sequence[Answer],
        received_at: Sequence[datetime | None],
        began: float,
    ) -> None:
        """Count the answers of rows from the table, which were counted as received before.

        Args:
            received_at: when each was first received, by the database's clock.
            began: when their transaction began, by `time.monotonic`.
        """
        if not self.counts:
            return
        now_s = time.time() + self.ahead_s
        with self._lock:
            counts = self._of_consumer(consumer)
            processed = 0
            for answer, moment in zip(answers, received_at, strict=True):
                if answer.outcome is Outcome.PROCESSED:
                    processed += 1
                    if moment is not None:
                        counts.latency.add(now_s - moment.timestamp())
            if processed:
                counts.processed += processed
                counts.run.add((time.monotonic() - began) / len(answers), processed)
        if processed:
            self._went_well(consumer)

    def __call__(self, event: Event) -> None:
        if not self.counts:
            return
        kind, counter = _COUNTED[type(event)]
        name = event.consumer if kind == "consumer" else getattr(event, "route", None)
        with self._lock:
            counts = self._of(kind, name or "")
            times = getattr(event, "count", 1)
            setattr(counts, counter, getattr(counts, counter) + times)

    # -- for the writer -----------------------------------------------------------------------

    def late(self, kind: Kind, ages_s: Mapping[str, float]) -> None:
        """Record for how many seconds the oldest due row of each consumer or route has been due, if it is due."""
        with self._lock:
            for name, age_s in ages_s.items():
                if age_s > 0:
                    self._of(kind, name).merge(Counts(oldest_s=age_s))

    def unwritten(self) -> Mapping[Key, Counts]:
        """Return copies of the counts, of this minute and earlier ones, that differ from what was written."""
        with self._lock:
            self._turned()
            self._unwritten_in = self._minute
            self._unwritten = {
                key: self._counted[key].copy()
                for key in sorted(self._counted)
                if self._counted[key] != self._written.get(key, _NOTHING)
            }
            return self._unwritten

    def written(self) -> None:
        """Record that the last `unwritten` is written, and drop the minutes that were over by then."""
        with self._lock:
            self._written |= self._unwritten
            self._drop(self._unwritten_in)

    def _drop(self, before: int) -> None:
        for counts in (self._counted, self._written):
            for key in [key for key in counts if key.minute < before]:
                del counts[key]

    def _turned(self) -> None:
        minute = int((time.time() + self.ahead_s) // 60)
        if minute != self._minute:
            self._minute = minute
            self._consumers.clear()
            self._drop(minute - _KEPT)

    def _of_consumer(self, name: str) -> Counts:
        self._turned()
        counts = self._consumers.get(name)
        if counts is None:
            counts = self._consumers[name] = self._of("consumer", name)
        return counts

    def _of(self, kind: Kind, name: str) -> Counts:
        self._turned()
        return self._counted.setdefault(Key(self._minute, kind, name), Counts())
