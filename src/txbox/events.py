"""What happened, as values; observers turn them into logs, metrics, traces and alerts."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

_log = logging.getLogger("txbox")


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """The root of all events; `consumer` is None where no single consumer is meant."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageDuplicate(MessageEvent):
    """A copy of a message that is already finished; nothing ran."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageDeferred(MessageEvent):
    """A copy of a message whose row waits in the table; the table owns it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageStored(MessageEvent):
    """A message was stored with its payload, to be processed from the table."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageInFlight(MessageEvent):
    """Another transaction holds this id; the delivery is kept and tried again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageFailed(MessageEvent):
    """The handler failed; its work is rolled back and the message parked."""

    attempt: int
    error_type: str
    error: str
    retry_in_s: float
    exception: BaseException | None = field(default=None, repr=False, compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageDead(MessageEvent):
    """A message was given up: a dead letter. Hang your alert here."""

    attempt: int
    error_type: str
    error: str
    exception: BaseException | None = field(default=None, repr=False, compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageQuarantined(MessageEvent):
    """A message that cannot be trusted was set aside. Hang your alert here."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageUnmatched(MessageEvent):
    """No handler consumes this topic and type; acknowledged and counted."""

    type: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageWaits(MessageEvent):
    """A message was stored behind earlier ones of its key, or behind a version that is missing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceGap(MessageEvent):
    """A version did not come in time: a later one was processed without it. Hang your alert here."""

    expected: int
    sequence: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TransactionRetried(Event):
    """A deadlock or serialization failure; tried again at once, no attempt counted."""

    code: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumptionPaused(Event):
    """The database (or `source`) cannot be used: nothing is fetched, counted or acknowledged until it can."""

    reason: str
    retry_in_s: float
    source: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumptionResumed(Event):
    """The database (or `source`) answers again."""

    paused_s: float
    source: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceRefused(Event):
    """The first messages of a source have no ids: nothing more is taken from it. Hang your alert here."""

    source: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MessagesLost(Event):
    """The broker dropped messages before anybody could process them. Hang your alert here."""

    source: str
    topic: str
    count: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseExpired(MessageEvent):
    """A row whose worker went away was rescued; `dead` when it had killed too many workers."""

    starts: int
    dead: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsPruned(Event):
    """A prune run ended."""

    rows: int
    duration_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SettleFailed(Event):
    """An acknowledgement failed; harmless, the redelivery will be a duplicate."""

    source: str
    count: int
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStarted(Event):
    """`txbox run` consumes."""

    consumers: tuple[str, ...]
    sources: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStopped(Event):
    """`txbox run` has drained (`clean`) or left work behind for redelivery."""

    clean: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class QuarantineTrimmed(Event):
    """The quarantine held more than `Retention.quarantine_bytes`: its oldest payloads were dropped, the rows stay."""

    rows: int
    payload_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsChanged(Event):
    """An operator retried, discarded or replayed rows; also in `txbox_audit`."""

    action: str
    rows: int
    actor: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OutgoingSent(Event):
    """The broker has confirmed staged messages, and the outbox says so."""

    publisher: str
    count: int
    duration_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class OutgoingFailed(MessageEvent):
    """A staged message was not confirmed; it is sent again later, under the same id."""

    publisher: str
    attempt: int
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OutgoingDead(MessageEvent):
    """A staged message was given up. Hang your alert here."""

    publisher: str
    attempt: int
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayPaused(Event):
    """A broker cannot be reached: its messages wait in the outbox, and nothing is counted."""

    publisher: str
    reason: str
    retry_in_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayResumed(Event):
    """The broker confirms again."""

    publisher: str
    paused_s: float


Observer = Callable[[Event], None]


class Events:
    """The log and the observers of one app; an observer that raises is logged and kept.

    False where nobody hears of what goes well: such events need not be made, those of trouble always are.
    """

    __slots__ = ("_logs", "observers")

    def __init__(self, observers: Sequence[Observer] = (), logs: Observer | None = None) -> None:
        self._logs = [] if logs is None else [logs]
        self.observers = list(observers)

    def __bool__(self) -> bool:
        # the log writes what goes well at DEBUG
        return bool(self.observers) or (bool(self._logs) and _log.isEnabledFor(logging.DEBUG))

    def emit(self, event: Event) -> None:
        for observer in (*self._logs, *self.observers):
            try:
                observer(event)
            except Exception:  # noqa: BLE001
                # the observer is user code; its failure must neither lose a message nor silence itself
                _log.exception(
                    "An observer failed on %s; it stays registered.", type(event).__name__
                )
