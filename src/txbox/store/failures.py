"""Failures: how one is recorded, in a transaction of its own or in that which has claimed the row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from txbox.errors import Fault, StoreError
from txbox.outcome import Status
from txbox.policy import RetryPolicy
from txbox.steps import Begin, Commit, Rollback, Statement, Steps
from txbox.store.codec import Arrival
from txbox.store.inbox import Existing, InboxStore

# thirty years: no limit, where the SQL wants one
_NO_AGE_S = 10.0**9


@dataclass(frozen=True, slots=True)
class Failure:
    """What is recorded of one failed attempt, already bounded and sanitised.

    Attributes:
        fingerprint: what failures that are alike have in common.
        final: the message is dead, whatever attempts it has left.
        delay_s: until the next attempt; None until it is drawn by the policy of the handler (`drawn`).
        raised: what the handler raised, for the log.
    """

    error_type: str
    error: str
    fingerprint: str | None
    final: bool = False
    delay_s: float | None = None
    raised: BaseException | None = field(default=None, repr=False, compare=False)


def drawn(failure: Failure, arrival: Arrival, retry: RetryPolicy) -> Failure:
    """Draw the delay of its next attempt, in seconds, unless the handler has said it."""
    if failure.delay_s is not None:
        return failure
    return replace(failure, delay_s=retry.delay_s(arrival.message.attempt))


def record(
    store: InboxStore,
    consumer: str,
    arrival: Arrival,
    failure: Failure,
    retry: RetryPolicy,
    *,
    token: str,
    dying: Callable[[Existing], Steps[None]] | None = None,
) -> Steps[Existing | None]:
    """Record a failure in a transaction of its own, over a row or as a new one.

    Args:
        token: that of the caller's lease, if it has one.
        dying: what else belongs into this transaction when the row becomes dead.

    Returns:
        The row as it then stands. None means that it is somebody else's by now (processed, dead, leased
        by another, or of another payload): nothing was written, the caller classifies again.

    Guarantee: never overwrites a finished row, another's lease or another payload.
    """
    params = _params(store, consumer, arrival, failure, retry, token=token)
    yield Begin()
    written = yield store.dialect.statement("record_update", params)
    if written.count == 0:
        try:
            written = yield store.dialect.statement("record_insert", params)
        except StoreError as error:
            # where the INSERT cannot leave a rival's row alone, it fails instead
            if error.fault is not Fault.DUPLICATE:
                raise
            yield Rollback()
            return None
    if written.count == 0:
        yield Rollback()
        return None
    row = (yield from store.classify(consumer, [arrival.message_id]))[arrival.message_id]
    yield attempt(store, consumer, arrival, failure, status=row.status, number=row.attempts)
    if dying is not None and row.status == Status.DEAD:
        yield from dying(row)
    yield Commit()
    return row


def record_own(
    store: InboxStore,
    consumer: str,
    arrival: Arrival,
    failure: Failure,
    retry: RetryPolicy,
    *,
    token: str,
) -> Steps[tuple[bool, int]]:
    """Record a failure over the row that this transaction has claimed under `token`.

    Returns:
        Whether the row is dead, and its failures so far.

    Raises:
        StoreError: the row is not there: a handler has left the transaction.
    """
    written = yield store.dialect.statement(
        "record_own", _params(store, consumer, arrival, failure, retry, token=token)
    )
    if written.count == 0:
        raise StoreError(
            "A handler left the transaction that claimed its message.", fault=Fault.GUARD
        )
    if store.dialect.returning:
        status, attempts = written.rows[0]
    else:
        row = (yield from store.classify(consumer, [arrival.message_id]))[arrival.message_id]
        status, attempts = row.status, row.attempts
    yield attempt(store, consumer, arrival, failure, status=status, number=attempts)
    return status == Status.DEAD, attempts


def _params(
    store: InboxStore,
    consumer: str,
    arrival: Arrival,
    failure: Failure,
    retry: RetryPolicy,
    *,
    token: str,
) -> dict[str, Any]:
    message = arrival.message
    assert failure.delay_s is not None, "a failure is drawn before it is recorded"
    return {
        **store.columns.content(message),
        "consumer": consumer,
        "message_id": arrival.message_id,
        "topic": message.topic,
        "type": message.type,
        "key": message.key,
        "sequence": message.sequence,
        "payload_hash": arrival.hash,
        "has_payload": True,
        "key_id": store.columns.key_id,
        "error_type": failure.error_type,
        "error": store.columns.error(failure.error),
        "fingerprint": failure.fingerprint,
        "final": failure.final,
        "delay_s": failure.delay_s,
        "max_attempts": retry.max_attempts,
        "max_age_s": retry.max_age.total_seconds() if retry.max_age else _NO_AGE_S,
        "token": token,
    }


def attempt(
    store: InboxStore,
    consumer: str,
    arrival: Arrival,
    failure: Failure,
    *,
    status: str,
    number: int | None = None,
) -> Statement:
    """The statement that adds a failure to a message's history.

    Args:
        number: the failures so far; None for the message's own attempt.
    """
    return store.attempt(
        consumer,
        arrival.message_id,
        arrival.message.attempt if number is None else number,
        status=status,
        error_type=failure.error_type,
        error=store.columns.error(failure.error),
        fingerprint=failure.fingerprint,
    )
