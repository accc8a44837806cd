"""What this process does, counted by the minute, for the row that it writes every few seconds."""

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

# minutes that are kept while they cannot be written; older ones are lost, which a statistic can bear
_KEPT = 60


class Received(Protocol):
    """What was received at some time, by `time.monotonic`."""

    @property
    def received(self) -> float: ...


class Moment(NamedTuple):
    """When a message came that no source has received."""

    received: float


class Activity:
    """Counts what goes well where it is told of it, batch by batch, and trouble by its events.

    Events of what goes well are made only for those who listen: one a message would cost far more than all of this.

    Args:
        went_well: called with a consumer when messages of its have been processed.
    """

    __slots__ = (
        "_consumers",
        "_counted",
        "_lock",
        "_minute",
        "_taken",
        "_went_well",
        "ahead_s",
        "counts",
    )

    def __init__(self, went_well: Callable[[str], None]) -> None:
        self._went_well = went_well
        self._lock = threading.Lock()
        self._counted: dict[Key, Counts] = {}
        # of this minute: those of consumers, which every batch asks for
        self._minute = self._taken = 0
        self._consumers: dict[str, Counts] = {}
        #: Somebody writes down what is counted; until then nothing is.
        self.counts = False
        #: How far the clock of the database is ahead of this machine's, in seconds.
        self.ahead_s = 0.0

    def received(self, consumer: str, count: int) -> None:
        """Messages were handed to a consumer."""
        if self.counts:
            with self._lock:
                self._of_consumer(consumer).received += count

    def settled(
        self, consumer: str, answers: Sequence[Answer], batch: Sequence[Received], began: float
    ) -> None:
        """Messages of one batch have come to their outcomes.

        Args:
            batch: says when each was received, in about their order.
            began: when the first transaction of the batch did, by `time.monotonic`.
        """
        if not self.counts:
            return
        now, count, first = time.monotonic(), len(answers), answers[0]
        # nearly always one value for all of them, which is compared by identity
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
        """Rows of the table have run together, which were counted when they were received.

        Args:
            received_at: when each was first, by the clock of the database.
            began: when they did, by `time.monotonic`.
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

    @property
    def kinds(self) -> Collection[type[Event]]:
        """Trouble of messages, and what becomes of outgoing ones."""
        return _COUNTED.keys()

    def __call__(self, event: Event) -> None:
        if not self.counts:
            return
        kind, counter = _COUNTED[type(event)]
        name = event.consumer if kind == "consumer" else getattr(event, "route", None)
        with self._lock:
            counts = self._of(kind, name or "")
            times = getattr(event, "count", 1)
            setattr(counts, counter, getattr(counts, counter) + times)

    # -- for who writes it down ---------------------------------------------------------------

    def late(self, ages_s: Mapping[str, float]) -> None:
        """For how long the first row of consumers that is due has been so, in seconds."""
        with self._lock:
            for consumer, age_s in ages_s.items():
                self._of_consumer(consumer).merge(Counts(oldest_s=max(age_s, 0.0)))

    def ages(self, routes: Sequence[str]) -> Mapping[str, Counts]:
        """The counts of now of routes, to be told how old their first message is."""
        with self._lock:
            return {route: self._of("route", route) for route in routes}

    def taken(self) -> Mapping[Key, Counts]:
        """All that is not known to be written: this minute so far, and those before; see `forget`."""
        with self._lock:
            self._turned()
            self._taken = self._minute
            # the objects themselves: what is counted meanwhile may be written too
            return {key: self._counted[key] for key in sorted(self._counted)}

    def forget(self) -> None:
        """What was taken last is written: minutes that were over by then need not be kept."""
        with self._lock:
            self._drop(self._taken)

    def _drop(self, before: int) -> None:
        for key in [key for key in self._counted if key.minute < before]:
            del self._counted[key]

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


_COUNTED: dict[type[Event], tuple[Kind, str]] = {
    events.MessageFailed: ("consumer", "failed"),
    events.MessageDead: ("consumer", "dead"),
    events.MessageQuarantined: ("consumer", "quarantined"),
    events.OutgoingSent: ("route", "processed"),
    events.OutgoingFailed: ("route", "failed"),
    events.OutgoingDead: ("route", "dead"),
}
