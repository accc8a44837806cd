"""What the end of a transaction means for a message: its record, its event, its outcome."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

from txbox.errors import Fault, StoreError, StoreUnavailable
from txbox.events import (
    Events,
    MessageDead,
    MessageDeferred,
    MessageDuplicate,
    MessageFailed,
    MessageInFlight,
    MessageProcessed,
    MessageQuarantined,
    SequenceGap,
)
from txbox.handlers import Handler
from txbox.message import Message
from txbox.outcome import Answer, Outcome, Status
from txbox.policy import Limits
from txbox.processing.failure import BROKEN, failure_of, shown
from txbox.processing.transaction import End, TransactionResult
from txbox.steps import Begin, Commit, Steps
from txbox.store import failures
from txbox.store.codec import Arrival
from txbox.store.dialect import Dialect
from txbox.store.failures import Failure
from txbox.store.inbox import Existing, InboxStore

# what nearly every message comes to
_AT_ONCE = Answer(Outcome.PROCESSED, 1)


class Letters(Protocol):
    """What is staged when a message is given up."""

    def staged(
        self,
        dialect: Dialect,
        consumer: str,
        message: Message[Any],
        *,
        attempts: int,
        error_type: str,
    ) -> Steps[None]: ...


class Recorder:
    """Brings messages of one app to their outcomes, whatever way their transactions ended.

    Args:
        letters: what is staged with a message that is given up.
    """

    def __init__(
        self, store: InboxStore, events: Events, limits: Limits, letters: Letters | None = None
    ) -> None:
        self.store = store
        self.events = events
        self.limits = limits
        self._letters = letters

    def ran(self, handler: Handler, arrival: Arrival, ran: TransactionResult) -> Answer:
        """The outcome of a message whose transaction has committed."""
        recorded = ran.failed.get(arrival.message_id) if ran.failed else None
        if recorded is None:
            return self.processed(handler, arrival, ran.claimed_at, ran)
        return self._gave_up(
            handler, arrival, recorded.failure, dead=recorded.dead, attempts=recorded.attempt
        )

    def processed(
        self,
        handler: Handler,
        arrival: Arrival,
        started: float,
        ran: TransactionResult | None = None,
    ) -> Answer:
        """The outcome of a message whose row is processed."""
        attempt = arrival.message.attempt
        if ran is not None and ran.gap is not None:
            self.events.emit(
                SequenceGap(
                    **where(handler, arrival),
                    expected=ran.gap,
                    sequence=arrival.message.sequence or 0,
                )
            )
        if self.events:
            self.events.emit(
                MessageProcessed(
                    consumer=handler.consumer,
                    message_id=arrival.message_id,
                    topic=arrival.message.topic,
                    attempt=attempt,
                    duration_s=time.monotonic() - started,
                )
            )
        result = ran.results.get(arrival.message_id) if ran is not None and ran.results else None
        if attempt == 1 and result is None:
            return _AT_ONCE
        return Answer(Outcome.PROCESSED, attempt, result)

    def held(self, handler: Handler, arrival: Arrival) -> Answer:
        """The outcome of a message that another transaction holds, or whose key is held."""
        if self.events:
            self.events.emit(MessageInFlight(**where(handler, arrival)))
        return Answer(Outcome.IN_PROGRESS)

    def met(self, handler: Handler, arrival: Arrival, row: Existing) -> Steps[Answer]:
        """Decide by the row that stands under this id (SEMANTICS 2.12)."""
        place = where(handler, arrival)
        if row.differs(arrival.hash):
            yield from self.quarantine(
                handler.consumer, arrival.message, arrival.message_id, arrival.hash or b"",
                "Another payload came under an id that is known: the producer reuses ids, or a message was altered.",
            )  # fmt: skip
            return Answer(Outcome.QUARANTINED)
        if row.status in (Status.PROCESSED, Status.DEAD, Status.DISCARDED):
            if self.events:
                self.events.emit(MessageDuplicate(**place))
            result = None
            if handler.options.keep_result and row.status == Status.PROCESSED:
                result = yield from self.store.result(handler.consumer, arrival.message_id)
            return Answer(Outcome.DUPLICATE, json=result)
        if row.status == Status.PROCESSING and not row.leased:
            # committed without a lease: only a handler that committed by itself leaves this (SEMANTICS 2.3)
            recorded = yield from self.recorded(handler, arrival, BROKEN, token=row.token or "")
            return recorded or Answer(Outcome.DUPLICATE)
        if not row.has_payload:
            yield Begin((self.store.return_payload(handler.consumer, arrival),))
            yield Commit()
        if self.events:
            self.events.emit(MessageDeferred(**place))
        return Answer(Outcome.DEFERRED)

    def quarantine(
        self, consumer: str, message: Any, message_id: str, hashed: bytes, reason: str
    ) -> Steps[None]:
        """Set a message aside in a transaction of its own, and raise the alarm."""
        yield Begin(
            (
                self.store.quarantine(
                    consumer, message, message_id=message_id, hashed=hashed, reason=reason,
                    payload_limit=self.limits.quarantined_bytes,
                ),
            )
        )  # fmt: skip
        yield Commit()
        self.events.emit(
            MessageQuarantined(
                consumer=consumer, message_id=message_id, topic=message.topic, reason=reason
            )
        )

    def failure(self, handler: Handler, ran: TransactionResult) -> Failure:
        """What is to be recorded of a transaction that raised, or was left."""
        if ran.end is End.BROKEN:
            return BROKEN
        assert ran.error is not None
        return failure_of(ran.error, ran.database_error, handler.options, self.limits)

    def recorded(
        self, handler: Handler, arrival: Arrival, failure: Failure, *, token: str
    ) -> Steps[Answer | None]:
        """Park a failure, or None when the row is not ours to write."""
        failure = failures.drawn(failure, arrival, handler.options.retry)
        row = yield from failures.record(
            self.store,
            handler.consumer,
            arrival,
            failure,
            handler.options.retry,
            token=token,
            dying=lambda row: self.dying(handler, arrival, failure, row.attempts),
        )
        if row is None:
            return None
        return self._gave_up(
            handler, arrival, failure, dead=row.status == Status.DEAD, attempts=row.attempts
        )

    def left(
        self,
        handler: Handler,
        arrivals: Sequence[Arrival],
        ran: TransactionResult,
        *,
        token: str = "",
    ) -> Steps[dict[str, Answer]]:
        """A handler left the transaction of its batch: what that makes unknown is dead, and never run again."""
        settled: dict[str, Answer] = {}
        for arrival in arrivals:
            if arrival.message_id in ran.unknown:
                recorded = yield from self.recorded(handler, arrival, BROKEN, token=token)
                if recorded is not None:
                    settled[arrival.message_id] = recorded
        return settled

    def _gave_up(
        self, handler: Handler, arrival: Arrival, failure: Failure, *, dead: bool, attempts: int
    ) -> Answer:
        """The outcome of a failure that is on disk."""
        text = failure.error.partition("\n")[0]
        # the lines of a traceback quote the program, which may have a text in it that the codec hides
        plain = failure.raised if self.store.columns.key_id is None else None
        told: dict[str, Any] = {
            **where(handler, arrival),
            "attempt": attempts,
            "error_type": failure.error_type,
            "error": self.store.columns.told(text),
            "exception": None if plain is None else shown(plain, text),
        }
        if dead:
            self.events.emit(MessageDead(**told))
        else:
            self.events.emit(MessageFailed(**told, retry_in_s=failure.delay_s or 0.0))
        return Answer(Outcome.DEAD if dead else Outcome.FAILED, attempts)

    def dying(
        self, handler: Handler, arrival: Arrival, failure: Failure, attempts: int
    ) -> Steps[None]:
        """What else is written in the transaction that makes a message dead."""
        if self._letters is not None and handler.options.dead_letter_topic is not None:
            yield from self._letters.staged(
                self.store.dialect,
                handler.consumer,
                replace(arrival.message, id=arrival.message_id),
                attempts=attempts,
                error_type=failure.error_type,
            )


def where(handler: Handler, arrival: Arrival) -> dict[str, str]:
    """What every event says of the message it is about."""
    return {
        "consumer": handler.consumer,
        "message_id": arrival.message_id,
        "topic": arrival.message.topic,
    }


def lost(ran: TransactionResult) -> StoreError:
    """The error for a transaction that a wait may cure: its own, or the loss of its connection."""
    if ran.database_error is not None and ran.end not in (End.AMBIGUOUS, End.REFUSED):
        return ran.database_error
    return StoreUnavailable(
        "The database connection was lost.",
        fault=Fault.UNAVAILABLE,
        code=ran.database_error.code if ran.database_error else None,
    )
