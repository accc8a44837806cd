"""The inbox's rows as steps: what stands under an id, what is stored under it, what is read from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from txbox.message import Message
from txbox.steps import Begin, Commit, Result, Rollback, Statement, Steps
from txbox.store.codec import Arrival, Columns
from txbox.store.dialect import Dialect


@dataclass(frozen=True, slots=True)
class Existing:
    """A row that a claim met instead of writing its own (SEMANTICS 2.12).

    Attributes:
        payload_hash: None where the row was written without one.
        attempts: failures so far.
        starts: runs from the table that never ended.
        due: its time has come, or it has none.
        token: of the claim, the lease or the storing that wrote it last, where the row keeps it.
        leased: a worker has it for a time.
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
        """Say whether another payload stands under this id; a row without a hash is not compared."""
        return self.payload_hash is not None and hashed is not None and self.payload_hash != hashed


#: A row that is finished, and has the payload of the message: nobody asks for more.
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


class InboxStore:
    """The rows of the inbox in one dialect; `claims`, `failures` and `leases` are what is done to them.

    Methods that return steps are operations; those that return statements are for callers that put
    them into one round trip with BEGIN or COMMIT.
    """

    def __init__(self, dialect: Dialect, columns: Columns) -> None:
        self.dialect = dialect
        self.columns = columns
        #: Of ordered consumers: how often due rows were looked for, and the key at which the last look ended.
        self.looks_in_order: dict[str, tuple[int, str]] = {}

    def classify(self, consumer: str, ids: Sequence[str]) -> Steps[dict[str, Existing]]:
        """Read the rows under these ids; an id that is missing from the answer has no row.

        For a transaction that is already open.
        """
        if not ids:
            return {}
        result = yield self.dialect.statement(
            "classify", {"consumer": consumer}, {"message_id": ids}
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

    def accept(self, consumer: str, arrivals: Sequence[Arrival], *, token: str) -> Steps[set[str]]:
        """Claim and close at once in the caller's transaction; returns the ids that were new.

        The ids must be sorted and each once.
        """
        if not arrivals:
            return set()
        result = yield self.dialect.statement(
            "accept", {"consumer": consumer, "token": token}, self.columns.slim(arrivals)
        )
        if self.dialect.returning:
            return {row[0] for row in result.rows}
        found = yield from self.classify(consumer, [arrival.message_id for arrival in arrivals])
        return {message_id for message_id, row in found.items() if row.token == token}

    def store(
        self, consumer: str, arrivals: Sequence[Arrival], *, token: str, delay_s: float = 0.0
    ) -> Steps[set[str]]:
        """Insert messages as `storing` does, in a transaction that is already open; returns the ids that were new."""
        if not arrivals:
            return set()
        result = yield self.storing(consumer, arrivals, token=token, delay_s=delay_s)
        return (yield from self.stored(consumer, arrivals, result, token=token))

    def storing(
        self, consumer: str, arrivals: Sequence[Arrival], *, token: str, delay_s: float = 0.0
    ) -> Statement:
        """The statement that inserts messages as pending, payload included.

        Each id once; sorted, unless their order is that in which they are to be processed.

        Args:
            delay_s: they are due this much later.
        """
        return self.dialect.statement(
            "store",
            {
                "consumer": consumer,
                "token": token,
                "key_id": self.columns.key_id,
                "delay_s": delay_s,
            },
            self.columns.whole(arrivals),
        )

    def stored(
        self, consumer: str, arrivals: Sequence[Arrival], result: Result, *, token: str
    ) -> Steps[set[str]]:
        """The ids that `storing` found to be new."""
        if self.dialect.returning:
            return {row[0] for row in result.rows}
        found = yield from self.classify(consumer, [arrival.message_id for arrival in arrivals])
        return {message_id for message_id, row in found.items() if row.token == token}

    def return_payload(self, consumer: str, arrival: Arrival) -> Statement:
        """The statement that gives an unfinished row without payload the payload of its redelivery."""
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
        """The statement that sets a message aside; the same one again only counts up.

        Args:
            payload_limit: bytes of the payload that are kept.
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
                "reason": reason,
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
        """The statement that adds an attempt to a message's history.

        Args:
            error: as it is to be stored: through the codec, unless the database wrote it.
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

    def keep_result(self, consumer: str, message_id: str, result: bytes) -> Statement:
        """The statement that keeps what a handler returned."""
        return self.dialect.statement(
            "keep_result",
            {
                "consumer": consumer,
                "message_id": message_id,
                "result": self.columns.result(result),
            },
        )

    def result(self, consumer: str, message_id: str) -> Steps[bytes | None]:
        """Read what a handler returned, in a transaction of its own; None when nothing was kept."""
        yield Begin()
        found = yield self.dialect.statement(
            "result", {"consumer": consumer, "message_id": message_id}
        )
        yield Commit()
        if not found.rows:
            return None
        return self.columns.result_back(found.rows[0][0])

    def kept_message(self, consumer: str, message_id: str) -> Steps[Message[Any] | None]:
        """Read a message whose row keeps its payload, else None; for a transaction that is already open."""
        found = yield self.dialect.statement(
            "replay_read",
            {
                "consumer": consumer,
                "message_id": message_id,
                "after": -1,
                "limit": 1,
                "status": None,
                "topic": None,
                "type": None,
                "key": None,
            },
        )
        if not found.rows:
            return None
        return self.columns.arrival(consumer, found.rows[0]).arrival.message

    def bound_lock_timeout(self, lock_timeout: timedelta) -> Statement:
        """The statement that ends every later wait for a lock after `lock_timeout`."""
        return self.dialect.statement(
            "bound_lock_timeout",
            {"lock_timeout_ms": str(max(1, int(lock_timeout.total_seconds() * 1000)))},
        )

    def begin_bounded(self, lock_timeout: timedelta, *statements: Statement) -> Begin:
        """The BEGIN, and first statements, of a transaction whose every wait for a lock ends after `lock_timeout`."""
        if self.dialect.has("bound_lock_timeout"):
            return Begin((self.bound_lock_timeout(lock_timeout), *statements))
        return Begin(statements)

    def commit_bounded(self) -> Commit:
        """The COMMIT of such a transaction; where the bound is the session's, it ends as well."""
        dialect = self.dialect
        return Commit(
            () if dialect.claim_bounds_wait else (dialect.statement("restore_lock_timeout"),)
        )

    def lock_timed_out(self) -> Steps[None]:
        """Roll a transaction back that waited too long; where the bound is the session's, end that."""
        yield Rollback()
        if not self.dialect.claim_bounds_wait:
            yield Begin((self.dialect.statement("restore_lock_timeout"),))
            yield Rollback()
