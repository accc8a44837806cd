"""Failures: recorded in a transaction of their own, or in the one that claimed the row."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Any

from txbox.errors import Fault, StoreError
from txbox.outcome import Status
from txbox.policy import RetryPolicy
from txbox.session import Session, Statement, Transaction
from txbox.store.codec import Arrival
from txbox.store.inbox import Existing, InboxStore

# thirty years, because the SQL needs a limit
_NO_AGE_S = 10.0**9


@dataclass(frozen=True, slots=True)
class Failure:
    """What is recorded of a failed attempt, already bounded and sanitised.

    Attributes:
        fingerprint: equal for similar failures.
        final: the message is dead, even if it has attempts left.
        delay_s: until the next attempt; None until drawn from the handler's policy (`drawn`).
        raised: what the handler raised, for the log.
    """

    error_type: str
    error: str
    fingerprint: str | None
    final: bool = False
    delay_s: float | None = None
    raised: BaseException | None = field(default=None, repr=False, compare=False)


def drawn(failure: Failure, arrival: Arrival, retry: RetryPolicy) -> Failure:
    """Draw the delay until the next attempt, in seconds, unless the handler set it."""
    if failure.delay_s is not None:
        return failure
    return replace(failure, delay_s=retry.delay_s(arrival.message.attempt))


async def record(
    db: Session,
    store: InboxStore,
    consumer: str,
    arrival: Arrival,
    failure: Failure,
    retry: RetryPolicy,
    *,
    token: str,
    dying: Callable[[Session, Existing], Awaitable[None]] | None = None,
) -> Existing | None:
    """Record a failure in a transaction of its own, over an existing row or as a new one.

    Args:
        token: of the caller's lease, if it has one.
        dying: what else must happen in this transaction if the row becomes dead.

    Returns:
        The row as it is afterwards. None means that it belongs to somebody else by now (processed,
        dead, leased to another, or with another payload): nothing was written; classify again.

    Guarantee: never overwrites a finished row, another's lease or another payload.
    """
    params = _params(store, consumer, arrival, failure, retry, token=token)
    await db.begin()
    written = await db.execute(store.dialect.statement("record_update", params))
    if written.count == 0:
        try:
            written = await db.execute(store.dialect.statement("record_insert", params))
        except StoreError as error:
            # where the INSERT cannot skip a rival's row, it fails instead
            if error.fault is not Fault.DUPLICATE:
                raise
            await db.rollback()
            return None
    if written.count == 0:
        await db.rollback()
        return None
    row = (await store.classify(db, consumer, [arrival.message_id]))[arrival.message_id]
    await db.execute(
        attempt(store, consumer, arrival, failure, status=row.status, number=row.attempts)
    )
    if dying is not None and row.status == Status.DEAD:
        await dying(db, row)
    await db.commit()
    return row


async def record_own(
    db: Transaction,
    store: InboxStore,
    consumer: str,
    arrival: Arrival,
    failure: Failure,
    retry: RetryPolicy,
    *,
    token: str,
) -> tuple[bool, int]:
    """Record a failure over a row that this transaction has claimed under `token`.

    Returns:
        Whether the row is dead, and how many failures it has now.

    Raises:
        StoreError: the row is missing: a handler left the transaction.
    """
    params = _params(store, consumer, arrival, failure, retry, token=token)
    written = await db.execute(store.dialect.statement("record_own", params))
    if written.count == 0:
        raise StoreError(
            "A handler left the transaction that claimed its message.", fault=Fault.GUARD
        )
    if store.dialect.returning:
        status, attempts = written.rows[0]
    else:
        row = (await store.classify(db, consumer, [arrival.message_id]))[arrival.message_id]
        status, attempts = row.status, row.attempts
    await db.execute(attempt(store, consumer, arrival, failure, status=status, number=attempts))
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
    assert failure.delay_s is not None, "a failure is drawn before it is recorded"
    return {
        **store.columns.row(arrival),
        **store.columns.content(arrival.message),
        "consumer": consumer,
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
    """Return the statement that adds a failure to a message's history.

    Args:
        number: failures so far; None for the message's own attempt number.
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
