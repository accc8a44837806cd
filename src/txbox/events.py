"""Events: what happened, as values. Observers turn them into logs, metrics, traces and alerts."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, fields, replace
from datetime import datetime
from typing import Protocol

from txbox.boundaries import Boundary, blamed
from txbox.boundaries import log as _log


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """The root of all events. `consumer` is None when the event is not about a single consumer."""

    consumer: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageEvent(Event):
    """Something happened to one message."""

    message_id: str | None = None
    topic: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageProcessed(MessageEvent):
    """The handler's transaction has committed."""

    attempt: int = 1
    duration_s: float = 0.0
    latency_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageDuplicate(MessageEvent):
    """A copy of an already finished message arrived; nothing ran."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageDeferred(MessageEvent):
    """A copy arrived of a message that waits in the table, which will process it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageStored(MessageEvent):
    """A message was stored with its payload, and will be processed from the table."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageInFlight(MessageEvent):
    """Another transaction holds this id. The delivery is kept and tried again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageFailed(MessageEvent):
    """The handler failed. Its work was rolled back and the message parked."""

    attempt: int
    error_type: str
    error: str
    retry_in_s: float
    exception: BaseException | None = field(default=None, repr=False, compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageDead(MessageEvent):
    """A message was given up: a dead letter. Alert on this event."""

    attempt: int
    error_type: str
    error: str
    exception: BaseException | None = field(default=None, repr=False, compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageQuarantined(MessageEvent):
    """A message that cannot be trusted was set aside. Alert on this event."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageUnmatched(MessageEvent):
    """No handler consumes this topic and type. The message is acknowledged and counted.

    Attributes:
        source: that has delivered a topic for which it was not asked; no handler gets such a message.
    """

    type: str | None = None
    source: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageWaits(MessageEvent):
    """A message was stored behind earlier ones of its key, or behind a missing version."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceGap(MessageEvent):
    """A version did not arrive in time, so a later one was processed without it. Alert on this event."""

    expected: int
    sequence: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TransactionCommitted(Event):
    """A transaction of a handler has committed, of one message or of several."""

    messages: int
    handler_s: float
    commit_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TransactionRetried(Event):
    """A deadlock or serialization failure. The transaction is retried at once; no attempt is counted."""

    code: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class HandlerRunsAlone(Event):
    """A handler sets something on its session: from now on it runs one message per transaction."""

    set_by: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumptionPaused(Event):
    """The database (or `source`) is unavailable. Until it is back, nothing is fetched, counted or acknowledged."""

    reason: str
    retry_in_s: float
    source: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumptionResumed(Event):
    """The database (or `source`) is available again."""

    paused_s: float
    source: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerPaused(Event):
    """An operator, or `pause_after` (then `actor` is "txbox"), has paused a consumer: this process does not run it."""

    actor: str
    reason: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerResumed(Event):
    """A consumer that was paused is run again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceRefused(Event):
    """The first messages of a source have no ids, so txbox stops reading from it. Alert on this event."""

    source: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicMissing(Event):
    """The broker does not have one of the topics of a source, which delivers the others. Repeated while it lasts."""

    source: str
    topic: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MessagesLost(Event):
    """The broker dropped messages before they could be processed. Alert on this event."""

    source: str
    topic: str
    count: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitsLost(Event):
    """The database failed over or was restored, and lacks what this process had settled. Alert on this event."""

    count: int
    since: datetime
    until: datetime
    message_ids: tuple[str, ...] = field(repr=False)
    complete: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseExpired(MessageEvent):
    """A row whose worker went away was rescued; `dead` if it had killed too many workers."""

    starts: int
    dead: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsPruned(Event):
    """A prune run ended."""

    rows: int
    duration_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SettleFailed(Event):
    """An acknowledgement failed. Harmless: the redelivery will be a duplicate."""

    source: str
    count: int
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorContained(MessageEvent):
    """Something raised that must not. It waits or was set aside, and the worker goes on. Alert on this event.

    Attributes:
        boundary: where, by its name in `txbox.boundaries.Boundary`.
        retry_in_s: when it is tried again; None if that is not known here.
    """

    boundary: str
    error_type: str
    error: str
    retry_in_s: float | None = None
    exception: BaseException | None = field(default=None, repr=False, compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStarted(Event):
    """`txbox run` has started to consume."""

    consumers: tuple[str, ...]
    sources: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStopped(Event):
    """`txbox run` has drained (`clean`) or left work behind for redelivery."""

    clean: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class QuarantineTrimmed(Event):
    """The quarantine exceeded `Retention.quarantine_bytes`. Its oldest payloads were dropped; the rows stay."""

    rows: int
    payload_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsChanged(Event):
    """An operator retried, discarded or replayed rows. Also recorded in `txbox_audit`."""

    action: str
    rows: int
    actor: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LoginRefused(Event):
    """The dashboard has turned somebody away.

    Attributes:
        cause: `missing`, no credentials; `expired`, the session is over or its user is gone; `wrong`, name,
            password or token; `limited`, too many wrong ones in a minute; `host`, the host application's callable.
        address: of the client, or of the proxy in front; None where the server does not tell.
    """

    cause: str
    address: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class OutgoingSent(Event):
    """The broker has confirmed staged messages, and the outbox has recorded it."""

    publisher: str
    route: str | None = None
    count: int
    duration_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class OutgoingFailed(MessageEvent):
    """A staged message was not confirmed. It will be sent again under the same id."""

    publisher: str
    route: str | None = None
    attempt: int
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OutgoingDead(MessageEvent):
    """A staged message was given up. Alert on this event."""

    publisher: str
    route: str | None = None
    attempt: int
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayPaused(Event):
    """A broker is unreachable, or refuses one topic. Messages wait in the outbox, and no attempts are counted."""

    publisher: str
    topic: str | None = None
    reason: str
    retry_in_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayResumed(Event):
    """The broker confirms messages again, or those of one topic."""

    publisher: str
    topic: str | None = None
    paused_s: float


Observer = Callable[[Event], None]


class Counter(Protocol):
    """An observer of some kinds of events."""

    @property
    def kinds(self) -> Collection[type[Event]]: ...
    def __call__(self, event: Event) -> None: ...


class Events:
    """The log and the observers of one app. An observer that raises is logged and kept.

    Falsy when nobody listens to events of success, which then need not be created. Events of failure always are.

    Args:
        redact: applied to the error and reason texts of events.
        around: entered while an event is emitted.
        counters: called with events of their kinds; they do not cause events of success to be created.
    """

    __slots__ = ("_around", "_counters", "_logs", "_redact", "observers")

    def __init__(
        self,
        observers: Sequence[Observer] = (),
        logs: Observer | None = None,
        redact: Callable[[str], str] | None = None,
        around: Callable[[Event], AbstractContextManager[None]] | None = None,
        counters: Sequence[Counter] = (),
    ) -> None:
        self._around = around
        self._logs = [] if logs is None else [logs]
        self._redact = redact
        self._counters: dict[type[Event], list[Observer]] = {}
        for counter in counters:
            for kind in counter.kinds:
                self._counters.setdefault(kind, []).append(counter)
        self.observers = list(observers)

    def __bool__(self) -> bool:
        # the log writes events of success at DEBUG
        if self.observers or self._around is not None:
            return True
        return bool(self._logs) and _log.logger.isEnabledFor(logging.DEBUG)

    def emit(self, event: Event) -> None:
        """Tell everybody; never raises."""
        try:
            if self._redact is not None and (texts := _texts(event)):
                redacted = {name: self._redact(text) for name, text in texts.items()}
                event = replace(event, **redacted)
            if self._around is None:
                self._tell(event)
            else:
                with self._around(event):
                    self._tell(event)
        except BaseException as error:  # noqa: BLE001  # a tracer's, or a rule's: see `_observer_failed`
            _observer_failed(event, error)

    def _tell(self, event: Event) -> None:
        for observer in (*self._counters.get(type(event), ()), *self._logs, *self.observers):
            try:
                observer(event)
            except BaseException as error:  # noqa: BLE001
                # user code: its failure must neither lose a message nor silence the observer
                _observer_failed(event, error)


def _observer_failed(event: Event, error: BaseException) -> None:
    _log.error(
        "An observer failed on %s; it stays registered. It raised %s (boundary: %s).",
        type(event).__name__,
        blamed(error),
        Boundary.OBSERVER,
        exc_info=error,
    )


def _texts(event: Event) -> dict[str, str]:
    """The error and reason texts of an event, as the code that raised them wrote them."""
    return {
        each.name: getattr(event, each.name)
        for each in fields(event)
        if each.name in ("error", "reason")
    }
