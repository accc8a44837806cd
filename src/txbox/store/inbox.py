"""The inbox's rows: what exists under an id, what is stored, what has failed, and what is read."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

from txbox.errors import Fault, StoreError
from txbox.message import Message
from txbox.outcome import Status
from txbox.policy import RetryPolicy
from txbox.session import Result, Session, Statement, Statements, Transaction
from txbox.store.codec import Arrival, Columns
from txbox.store.dialect import Dialect

# thirty years, because the SQL needs a limit
_NO_AGE_S = 10.0**9


@dataclass(frozen=True, slots=True)
class Existing:
    """A row that a claim met instead of writing one (promise 2.12).

    Attributes:
        payload_hash: None if the row was written without one.
        attempts: failures so far.
        starts: runs from the table that never ended.
        due: its time has come, or it has none.
        token: of the claim, lease or storing that last wrote it, if the row keeps it.
        leased: a worker holds it.
    """

    status: str
    payload_hash: bytes | None
    has_payload: bool
    attempts: int
    starts: int
    due: bool
    token: str | None
    leased: bool

    def differs(self, hashed: bytes | None) -> bool:
        """Whether this id has a different payload; a row without a hash is not compared."""
        return self.payload_hash is not None and hashed is not None and self.payload_hash != hashed


#: Stands for a finished row with the same payload; nothing else about it matters.
FINISHED = Existing(
    status="processed",
    payload_hash=None,
    has_payload=False,
    attempts=0,
    starts=0,
    due=True,
    token=None,
    leased=False,
)


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

    def drawn(self, arrival: Arrival, retry: RetryPolicy) -> Failure:
        """Draw the delay until the next attempt, in seconds, unless the handler set it."""
        if self.delay_s is not None:
            return self
        return replace(self, delay_s=retry.delay_s(arrival.message.attempt))


class InboxStore:
    """The rows of the inbox in one dialect; `claims` and `leases` operate on them.

    Coroutine methods are operations. Methods that return statements are for callers that send them in
    one round trip with BEGIN or COMMIT.
    """

    def __init__(self, dialect: Dialect, columns: Columns) -> None:
        self.dialect = dialect
        self.columns = columns
        #: Per ordered consumer: how often due rows were looked for, and the key where the last look ended.
        self.looks_in_order: dict[str, tuple[int, str]] = {}

    async def classify(
        self, db: Transaction, consumer: str, ids: Sequence[str]
    ) -> dict[str, Existing]:
        """Read the rows under these ids, in an open transaction.

        An id that is missing from the answer has no row.
        """
        if not ids:
            return {}
        result = await db.execute(
            self.dialect.statement("classify", {"consumer": consumer}, {"message_id": ids})
        )
        return {
            row[0]: Existing(
                status=row[1],
                payload_hash=None if row[2] is None else bytes(row[2]),
                has_payload=bool(row[3]),
                attempts=row[4],
                starts=row[5],
                due=bool(row[6]),
                token=row[7],
                leased=bool(row[8]),
            )
            for row in result.rows
        }

    async def accept(
        self, db: Transaction, consumer: str, arrivals: Sequence[Arrival], *, token: str
    ) -> set[str]:
        """Claim and close at once in the caller's transaction; returns the ids that were new.

        The ids must be sorted, each once.
        """
        if not arrivals:
            return set()
        params = {"consumer": consumer, "token": token}
        result = await db.execute(
            self.dialect.statement("accept", params, self.columns.slim(arrivals))
        )
        return await self.stored(db, consumer, arrivals, result, token=token)

    async def store(
        self,
        db: Transaction,
        consumer: str,
        arrivals: Sequence[Arrival],
        *,
        token: str,
        delay_s: float = 0.0,
    ) -> set[str]:
        """Insert messages as `storing` does, in an open transaction; returns the ids that were new."""
        if not arrivals:
            return set()
        result = await db.execute(self.storing(consumer, arrivals, token=token, delay_s=delay_s))
        return await self.stored(db, consumer, arrivals, result, token=token)

    def storing(
        self, consumer: str, arrivals: Sequence[Arrival], *, token: str, delay_s: float = 0.0
    ) -> Statement:
        """Return the statement that inserts messages as pending, with payload.

        Each id once; sorted, unless their order is the one in which they must be processed.

        Args:
            delay_s: until they are due.
        """
        params: dict[str, Any] = {"consumer": consumer, "token": token, "delay_s": delay_s}
        params["key_id"] = self.columns.key_id
        return self.dialect.statement("store", params, self.columns.whole(arrivals))

    async def stored(
        self,
        db: Transaction,
        consumer: str,
        arrivals: Sequence[Arrival],
        result: Result,
        *,
        token: str,
    ) -> set[str]:
        """Return the ids that `storing`, or the claim of `accept`, found to be new."""
        if self.dialect.returning:
            return {row[0] for row in result.rows}
        found = await self.classify(db, consumer, [arrival.message_id for arrival in arrivals])
        return {message_id for message_id, row in found.items() if row.token == token}

    def return_payload(self, consumer: str, arrival: Arrival) -> Statement:
        """Return the statement that restores the payload of an unfinished row from a redelivery."""
        return self.dialect.statement(
            "return_payload",
            {
                **self.columns.content(arrival.message),
                "consumer": consumer,
                "message_id": arrival.message_id,
                "payload_hash": arrival.hash,
                "key_id": self.columns.key_id,
            },
        )

    def quarantine(
        self,
        consumer: str,
        message: Message[Any],
        *,
        message_id: str,
        hashed: bytes,
        reason: str,
        payload_limit: int,
    ) -> Statement:
        """Return the statement that quarantines a message; a repeat only increments a counter.

        Args:
            payload_limit: how many bytes of the payload are kept.
        """
        content = self.columns.content(message)
        if message.payload is not None and len(message.payload) > payload_limit:
            content["payload"] = self.columns.payload(message.payload[:payload_limit])
        return self.dialect.statement(
            "quarantine",
            {
                **content,
                "consumer": consumer,
                "message_id": message_id,
                "hash": hashed,
                "reason": self.columns.redact.error(reason),
                "topic": message.topic,
                "type": message.type,
                "key": message.key,
                "key_id": self.columns.key_id,
            },
        )

    def attempt(
        self,
        consumer: str,
        message_id: str,
        number: int,
        *,
        status: str,
        error_type: str,
        error: str,
        fingerprint: str | None,
    ) -> Statement:
        """Return the statement that adds an attempt to a message's history.

        Args:
            error: as it is stored: encoded by the codec, unless the database wrote it.
        """
        return self.dialect.statement(
            "record_attempt",
            {
                "consumer": consumer,
                "message_id": message_id,
                "attempt": number,
                "status": status,
                "error_type": error_type,
                "error": error,
                "fingerprint": fingerprint,
            },
        )

    # -- failures: in a transaction of their own, or in the one that claimed the row -----------

    async def record_failure(
        self,
        db: Session,
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
        params = self._failed_row(consumer, arrival, failure, retry, token=token)
        await db.begin()
        written = await db.execute(self.dialect.statement("record_update", params))
        if written.count == 0:
            try:
                written = await db.execute(self.dialect.statement("record_insert", params))
            except StoreError as error:
                # where the INSERT cannot skip a rival's row, it fails instead
                if error.fault is not Fault.DUPLICATE:
                    raise
                await db.rollback()
                return None
        if written.count == 0:
            await db.rollback()
            return None
        row = (await self.classify(db, consumer, [arrival.message_id]))[arrival.message_id]
        await db.execute(
            self.failed_attempt(consumer, arrival, failure, status=row.status, number=row.attempts)
        )
        if dying is not None and row.status == Status.DEAD:
            await dying(db, row)
        await db.commit()
        return row

    async def record_failure_of_claimed(
        self,
        db: Transaction,
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
        params = self._failed_row(consumer, arrival, failure, retry, token=token)
        written = await db.execute(self.dialect.statement("record_own", params))
        if written.count == 0:
            raise StoreError(
                "A handler left the transaction that claimed its message.", fault=Fault.GUARD
            )
        if self.dialect.returning:
            status, attempts = written.rows[0]
        else:
            row = (await self.classify(db, consumer, [arrival.message_id]))[arrival.message_id]
            status, attempts = row.status, row.attempts
        await db.execute(
            self.failed_attempt(consumer, arrival, failure, status=status, number=attempts)
        )
        return status == Status.DEAD, attempts

    def _failed_row(
        self,
        consumer: str,
        arrival: Arrival,
        failure: Failure,
        retry: RetryPolicy,
        *,
        token: str,
    ) -> dict[str, Any]:
        assert failure.delay_s is not None, "a failure is drawn before it is recorded"
        return {
            **self.columns.row(arrival),
            **self.columns.content(arrival.message),
            "consumer": consumer,
            "has_payload": True,
            "key_id": self.columns.key_id,
            "error_type": failure.error_type,
            "error": self.columns.error(failure.error),
            "fingerprint": failure.fingerprint,
            "final": failure.final,
            "delay_s": failure.delay_s,
            "max_attempts": retry.max_attempts,
            "max_age_s": retry.max_age.total_seconds() if retry.max_age else _NO_AGE_S,
            "token": token,
        }

    def failed_attempt(
        self,
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
        return self.attempt(
            consumer,
            arrival.message_id,
            arrival.message.attempt if number is None else number,
            status=status,
            error_type=failure.error_type,
            error=self.columns.error(failure.error),
            fingerprint=failure.fingerprint,
        )

    # -- results and kept messages -------------------------------------------------------------

    def keep_result(self, consumer: str, message_id: str, result: bytes) -> Statement:
        """Return the statement that keeps what a handler returned."""
        return self.dialect.statement(
            "keep_result",
            {
                "consumer": consumer,
                "message_id": message_id,
                "result": self.columns.result(result),
            },
        )

    async def result(self, db: Session, consumer: str, message_id: str) -> bytes | None:
        """Read what a handler returned, in a transaction of its own; None if nothing was kept."""
        params = {"consumer": consumer, "message_id": message_id}
        found = await self.dialect.run(db, "result", params)
        return self.columns.result_back(found.rows[0][0]) if found.rows else None

    async def kept_message(
        self, db: Transaction, consumer: str, message_id: str
    ) -> Message[Any] | None:
        """Read a message whose row keeps its payload, in an open transaction; None if it does not."""
        any_row = dict.fromkeys(("status", "topic", "type", "key"))
        params = {"consumer": consumer, "message_id": message_id, "after": -1, "limit": 1}
        found = await db.execute(self.dialect.statement("replay_read", params | any_row))
        if not found.rows:
            return None
        return self.columns.arrival(consumer, found.rows[0]).arrival.message

    def bound_lock_timeout(self, lock_timeout: timedelta) -> Statement:
        """Return the statement that limits every later wait for a lock to `lock_timeout`."""
        return self.dialect.statement(
            "bound_lock_timeout",
            {"lock_timeout_ms": str(max(1, int(lock_timeout.total_seconds() * 1000)))},
        )

    def begin_bounded(self, lock_timeout: timedelta, *statements: Statement) -> Statements:
        """Return what begins a transaction in which every wait for a lock is limited to `lock_timeout`."""
        if self.dialect.has("bound_lock_timeout"):
            return (self.bound_lock_timeout(lock_timeout), *statements)
        return statements

    def commit_bounded(self) -> Statements:
        """Return what ends such a transaction. Where the limit belongs to the session, this lifts it."""
        dialect = self.dialect
        return () if dialect.claim_bounds_wait else (dialect.statement("restore_lock_timeout"),)

    async def rollback_bounded(self, db: Session) -> None:
        """Roll back such a transaction, or a claim. Where the limit belongs to the session, this lifts it."""
        if db.connection is not None and not self.dialect.claim_bounds_wait:
            # on the connection that has the limit; one that is lost is dropped by the rollback
            with suppress(StoreError):
                await db.execute(self.dialect.statement("restore_lock_timeout"))
        await db.rollback()
