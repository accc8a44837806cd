"""Counters and histograms of events, for prometheus_client."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable
from itertools import accumulate
from typing import NamedTuple

from txbox import events
from txbox.errors import installed
from txbox.events import Event, MessageEvent

with installed("http", "A metrics endpoint"):
    from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric


class _Counted(NamedTuple):
    """`txbox_<name>_total`: its help text, its labels, and how much each event adds: 1, or one of its fields."""

    name: str
    help: str
    labels: tuple[str, ...]
    by: dict[type[Event], int | str]


_MESSAGES = [kind for kind in MessageEvent.__subclasses__() if kind.__name__.startswith("Message")]
_COUNTERS = [
    _Counted("messages", "Messages by consumer and outcome.",
         ("consumer", "outcome"), dict.fromkeys(_MESSAGES, 1)),
    _Counted("transactions_retried", "Deadlocks and serialization failures that were retried.",
         ("consumer",), {events.TransactionRetried: 1}),
    _Counted("settle_failures", "Deliveries whose acknowledgement failed.",
         ("source",), {events.SettleFailed: "count"}),
    _Counted("pauses", "Attempts postponed because the database (no source) or a source was unavailable.",
         ("source",), {events.ConsumptionPaused: 1}),
    _Counted("paused_seconds", "Duration of finished pauses, in seconds.",
         ("source",), {events.ConsumptionResumed: "paused_s"}),
    _Counted("lost_upstream", "Messages that a broker dropped before they could be processed.",
         ("source",), {events.MessagesLost: "count"}),
    _Counted("lost_commits", "Messages that were settled and are missing after a failover or restore of the database.",
         ("consumer",), {events.CommitsLost: "count"}),
    _Counted("sources_refused", "Sources that are not read until they are reconfigured.",
         ("source",), {events.SourceRefused: 1}),
    _Counted("leases_expired", "Rows whose worker went away.", ("consumer",), {events.LeaseExpired: 1}),
    _Counted("rows_pruned", "Rows deleted by prune.", (), {events.RowsPruned: "rows"}),
    _Counted("sequence_gaps", "Messages processed without a version that did not arrive.",
         ("consumer",), {events.SequenceGap: 1}),
    _Counted("outgoing", "Staged messages by publisher and by outcome of an attempt to send them.",
         ("publisher", "outcome"), {events.OutgoingSent: "count", events.OutgoingFailed: 1, events.OutgoingDead: 1}),
    _Counted("publish_seconds", "Seconds from lease to mark, for batches in which something was sent.",
         ("publisher",), {events.OutgoingSent: "duration_s"}),
    _Counted("relay_pauses", "Attempts postponed because a publisher's broker was unavailable.",
         ("publisher",), {events.RelayPaused: 1}),
    _Counted("relay_paused_seconds", "Duration of finished relay pauses, in seconds.",
         ("publisher",), {events.RelayResumed: "paused_s"}),
    _Counted("logins_refused", "Requests that the dashboard has turned away, by cause.",
         ("cause",), {events.LoginRefused: 1}),
]  # fmt: skip


class _Observed(NamedTuple):
    """`txbox_<name>`: a histogram by consumer, of one field of one event."""

    name: str
    help: str
    event: type[Event]
    field: str
    bounds: tuple[float, ...]


# from a trivial handler to a message that was retried after an hour
_SECONDS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 600.0, 3600.0,
)  # fmt: skip
_HISTOGRAMS = [
    _Observed("latency_seconds", "Seconds from the receipt of a message to the commit of its handler's transaction.",
         events.MessageProcessed, "latency_s", _SECONDS),
    _Observed("handler_seconds", "Seconds that the handler took in a transaction, for all its messages.",
         events.TransactionCommitted, "handler_s", _SECONDS),
    _Observed("commit_seconds", "Seconds that the COMMIT of a handler's transaction took.",
         events.TransactionCommitted, "commit_s", _SECONDS),
    _Observed("batch_messages", "Messages in a handler's transaction.",
         events.TransactionCommitted, "messages", (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)),
]  # fmt: skip


class _Buckets:
    """How many values of one series lie below each bound; the last bucket counts those above all of them."""

    __slots__ = ("counts", "sum")

    def __init__(self, bounds: int) -> None:
        self.counts = [0] * (bounds + 1)
        self.sum = 0.0


class Counters:
    """Counts events. It is both an observer and a collector for a prometheus_client registry.

    Labels are consumers, sources, publishers and outcomes, never ids or topics.
    """

    # not prometheus_client's Counter and Histogram, which add a `_created` series and store their values wherever
    # the application has configured multiprocess mode
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = [(counted, Counter[tuple[str, ...]]()) for counted in _COUNTERS]
        self._observed = [(observed, dict[str, _Buckets]()) for observed in _HISTOGRAMS]
        # most kinds of events concern only one or two of them
        self._counts_by: dict[type[Event], list[tuple[_Counted, Counter[tuple[str, ...]]]]] = {}
        for counted, counts in self._counts:
            for kind in counted.by:
                self._counts_by.setdefault(kind, []).append((counted, counts))
        self._observed_by: dict[type[Event], list[tuple[_Observed, dict[str, _Buckets]]]] = {}
        for observed, series in self._observed:
            self._observed_by.setdefault(observed.event, []).append((observed, series))

    def __call__(self, event: Event) -> None:
        for counted, counts in self._counts_by.get(type(event), ()):
            by = counted.by[type(event)]
            labels = tuple(_label(event, label) for label in counted.labels)
            with self._lock:
                counts[labels] += getattr(event, by) if isinstance(by, str) else by
        for observed, series in self._observed_by.get(type(event), ()):
            value: float | None = getattr(event, observed.field)
            if value is None:
                continue
            bucket, consumer = bisect_left(observed.bounds, value), event.consumer or ""
            with self._lock:
                buckets = series.get(consumer)
                if buckets is None:
                    buckets = series[consumer] = _Buckets(len(observed.bounds))
                buckets.counts[bucket] += 1
                buckets.sum += value

    def collect(self) -> Iterable[Metric]:
        """Yield all counters and histograms, including those that have not counted yet."""
        for counted, counts in self._counts:
            family = CounterMetricFamily(
                f"txbox_{counted.name}", counted.help, labels=counted.labels
            )
            with self._lock:
                totals = counts.copy()
            for labels, count in totals.items():
                family.add_metric(labels, count)
            yield family
        for observed, series in self._observed:
            histogram = HistogramMetricFamily(
                f"txbox_{observed.name}", observed.help, labels=("consumer",)
            )
            with self._lock:
                copied = [
                    (name, [*buckets.counts], buckets.sum) for name, buckets in series.items()
                ]
            bounds = [*map(str, observed.bounds), "+Inf"]
            for name, per_bucket, total in copied:
                cumulative = list(zip(bounds, map(float, accumulate(per_bucket)), strict=True))
                histogram.add_metric((name,), cumulative, total)
            yield histogram


def _label(event: Event, label: str) -> str:
    if label == "outcome":
        # outcomes are the event names without their prefix
        return type(event).__name__.removeprefix("Message").removeprefix("Outgoing").lower()
    return getattr(event, label) or ""
