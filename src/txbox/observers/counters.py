"""Events as counters, in the text format that Prometheus reads."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from txbox import events
from txbox.events import Event, MessageEvent

Labels = Mapping[str, str]
_Series = tuple[str, tuple[tuple[str, str], ...]]

_HELP = {
    "txbox_messages_total": "Messages by consumer and by what happened to them.",
    "txbox_handler_seconds_total": "Seconds from claim to commit, of processed messages.",
    "txbox_transactions_retried_total": "Deadlocks and serialization failures that were tried again.",
    "txbox_settle_failures_total": "Deliveries whose acknowledgement failed.",
    "txbox_pauses_total": "Tries put off because the database (no source) or a source was away.",
    "txbox_paused_seconds_total": "Seconds that ended pauses took.",
    "txbox_lost_upstream_total": "Messages that a broker dropped before they could be processed.",
    "txbox_sources_refused_total": "Sources from which nothing is taken until they are configured otherwise.",
    "txbox_leases_expired_total": "Rows whose worker went away.",
    "txbox_rows_pruned_total": "Rows that prune deleted.",
    "txbox_sequence_gaps_total": "Messages that were processed without a version that did not come.",
    "txbox_outgoing_total": "Staged messages by publisher and by what became of a try to send them.",
    "txbox_publish_seconds_total": "Seconds from lease to mark, of batches in which something was sent.",
    "txbox_relay_pauses_total": "Tries put off because a publisher's broker was away.",
    "txbox_relay_paused_seconds_total": "Seconds that ended pauses of relays took.",
}


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric and its values by labels."""

    name: str
    kind: str
    help: str
    values: Iterable[tuple[Labels, float]]


class Counters:
    """Counts events; an observer. Labels are consumers, sources, publishers and outcomes: never ids or topics."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[_Series, float] = {}

    def __call__(self, event: Event) -> None:
        consumer = event.consumer or ""
        match event:
            case events.LeaseExpired():
                self.count("leases_expired", consumer=consumer)
            case events.OutgoingFailed():
                self.count("outgoing", publisher=event.publisher, outcome="failed")
            case events.OutgoingDead():
                self.count("outgoing", publisher=event.publisher, outcome="dead")
            case events.OutgoingSent():
                self.count("outgoing", event.count, publisher=event.publisher, outcome="sent")
                self.count("publish_seconds", event.duration_s, publisher=event.publisher)
            case events.RelayPaused():
                self.count("relay_pauses", publisher=event.publisher)
            case events.RelayResumed():
                self.count("relay_paused_seconds", event.paused_s, publisher=event.publisher)
            case events.SequenceGap():
                self.count("sequence_gaps", consumer=consumer)
            case MessageEvent() if (name := type(event).__name__).startswith("Message"):
                outcome = name.removeprefix("Message").lower()
                self.count("messages", consumer=consumer, outcome=outcome)
                if isinstance(event, events.MessageProcessed):
                    self.count("handler_seconds", event.duration_s, consumer=consumer)
            case events.TransactionRetried():
                self.count("transactions_retried", consumer=consumer)
            case events.SettleFailed():
                self.count("settle_failures", event.count, source=event.source)
            case events.ConsumptionPaused():
                self.count("pauses", source=event.source or "")
            case events.ConsumptionResumed():
                self.count("paused_seconds", event.paused_s, source=event.source or "")
            case events.MessagesLost():
                self.count("lost_upstream", event.count, source=event.source)
            case events.SourceRefused():
                self.count("sources_refused", source=event.source)
            case events.RowsPruned():
                self.count("rows_pruned", event.rows)
            case _:
                pass

    def count(self, name: str, by: float = 1, **labels: str) -> None:
        """Add to `txbox_<name>_total`."""
        series = _series(name, labels)
        with self._lock:
            self._counts[series] = self._counts.get(series, 0) + by

    def value(self, name: str, **labels: str) -> float:
        """What `txbox_<name>_total` has come to."""
        with self._lock:
            return self._counts.get(_series(name, labels), 0)

    def metrics(self) -> list[Metric]:
        """All counters, also those that have not counted yet."""
        with self._lock:
            counts = dict(self._counts)
        return [
            Metric(
                name,
                "counter",
                text,
                [(dict(labels), total) for (of, labels), total in counts.items() if of == name],
            )
            for name, text in _HELP.items()
        ]


def render(metrics: Iterable[Metric]) -> str:
    """Metrics in the text exposition format, version 0.0.4."""
    lines: list[str] = []
    for metric in metrics:
        lines += [f"# HELP {metric.name} {metric.help}", f"# TYPE {metric.name} {metric.kind}"]
        for labels, value in metric.values:
            inside = ",".join(
                f'{name}="{_escaped(label_value)}"' for name, label_value in labels.items()
            )
            lines.append(
                f"{metric.name}{{{inside}}} {value:.17g}"
                if inside
                else f"{metric.name} {value:.17g}"
            )
    return "\n".join(lines) + "\n"


def _series(name: str, labels: Labels) -> _Series:
    return f"txbox_{name}_total", tuple(sorted(labels.items()))


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
