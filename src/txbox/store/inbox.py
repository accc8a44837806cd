"""The inbox's rows: what a transaction claims, what exists under an id, what is stored, what has failed."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import lru_cache
from hashlib import sha256
from typing import Any, Literal, NamedTuple

from txbox.errors import Fault, StoreError, StoreUnavailable, UnreadableMessage
from txbox.message import Message
from txbox.outcome import Status
from txbox.policy import RetryPolicy
from txbox.session import Result, Session, Statement, Statements, Transaction, at
from txbox.store.codec import Arrival, Columns, Row, quarantine_hash
from txbox.store.dialect import Dialect

_NOTHING: dict[str, Any] = {}
_NO_CONTENT: dict[str, Any] = {
    "content_type": None, "headers": None, "origin": None, "payload": None, "key_id": None,
}  # fmt: skip
# thirty years, because the SQL needs a limit
_NO_AGE_S = 10.0**9
# what PostgreSQL takes as a setting: 24 days
_MS_MAX = 2**31 - 1


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


#: Claims of an id that is neither won nor in the table: its row may have been pruned in between.
AGAIN_MAX = 10


def out_of_sight(consumer: str) -> StoreUnavailable:
    """Return the error for ids whose rows are there, as claims show, and can never be read."""
    return StoreUnavailable(
        f"A message of consumer {consumer!r} has a row that this connection cannot read: row security hides it, or it "
        "was written in another encoding. `txbox doctor` tells which."
    )


class ClaimResult(NamedTuple):
    """The outcome of a claim.

    Attributes:
        ids: the ids it won.
        finished: ids it did not win and that are known to be finished, under the same payload.
    """

    ids: set[str]
    finished: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Failure:
    """What is recorded of a failed attempt, already bounded and sanitised.

    Attributes:
        fingerprint: equal for similar failures.
        final: the message is dead, even with attempts remaining.
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
    """The rows of the inbox in one dialect; `leases` operates on them, too.

    Coroutine methods are operations. Methods that return statements are for callers that send them in
    one round trip with BEGIN or COMMIT.
    """

    def __init__(self, dialect: Dialect, columns: Columns) -> None:
        self.dialect = dialect
        self.columns = columns
        #: Per ordered consumer: how often due rows were queried, and the last key of the last query.
        self.looks_in_order: dict[str, tuple[int, str]] = {}

    # -- claims: which messages a transaction has won, and the proof at its end that it still holds them

    def claim(
        self,
        consumer: str,
        arrivals: Sequence[Arrival],
        *,
        token: str,
        lock_timeout: timedelta,
        idle_s: float,
        keep: bool,
        wait: timedelta | None = None,
    ) -> tuple[Statement, ...]:
        """Return the statements that claim ids (each once, sorted by the caller) and arm the guard with `token`.

        Args:
            lock_timeout: the longest wait for an id.
            idle_s: after this long without a statement the server ends the transaction, if it can.
            keep: keep the payload in the row.
            wait: the longest wait for a lock of the handler's, if the database can limit it and the
                batch can be run again; None for the connection's own setting.
        """
        params: dict[str, Any]
        if not keep and len(arrivals) == 1 and (single := self.dialect.queries["claim_single"]):
            # as `Columns.row` has it, without the call: nearly every message comes this way
            arrival, message = arrivals[0], arrivals[0].message
            params = {
                **_bounds(lock_timeout, idle_s), "consumer": consumer, "token": token,
                "message_id": arrival.message_id, "topic": message.topic, "type": message.type, "key": message.key,
                "sequence": message.sequence, "payload_hash": arrival.hash,
            }  # fmt: skip
            # one crash point for each form of the claim, which bounds its wait itself
            return self._armed([Statement("claim", single, params)], token)
        params = {**_bounds(lock_timeout, idle_s), "consumer": consumer, "token": token}
        if keep:
            statement = self.dialect.statement(
                "claim_kept",
                {**params, "key_id": self.columns.key_id},
                self.columns.whole(consumer, arrivals),
            )
        else:
            statement = self.dialect.statement("claim", params, self.columns.slim(arrivals))
        return self._bounded(statement, token, lock_timeout, wait)

    def claim_known(
        self,
        name: Literal["claim_leased", "claim_replay", "claim_rehearsal"],
        consumer: str,
        ids: Sequence[str],
        *,
        token: str,
        lock_timeout: timedelta,
        idle_s: float,
        wait: timedelta | None = None,
        **params: Any,
    ) -> tuple[Statement, ...]:
        """`claim` for existing rows: leased ones, processed ones that an operator replays, or those of a rehearsal.

        Args:
            params: of `claim_leased`: `lease`, the token they are leased under, and `keep`.

        Guarantee: a leased row that has since been leased to another worker is not won.
        """
        params |= {**_bounds(lock_timeout, idle_s), "consumer": consumer, "token": token}
        statement = self.dialect.statement(name, params, {"message_id": ids})
        return self._bounded(statement, token, lock_timeout, wait)

    def _bounded(
        self, claim: Statement, token: str, lock_timeout: timedelta, wait: timedelta | None = None
    ) -> tuple[Statement, ...]:
        dialect = self.dialect
        statements = [claim]
        if not dialect.claim_bounds_wait:
            statements.insert(0, self.bound_lock_timeout(lock_timeout))
        if wait is not None and dialect.has("bound_batch"):
            statements.append(dialect.statement("bound_batch", {"longest_s": wait.total_seconds()}))
        elif dialect.has("restore_lock_timeout"):
            statements.append(dialect.statement("restore_lock_timeout"))
        return self._armed(statements, token)

    def _armed(self, statements: list[Statement], token: str) -> tuple[Statement, ...]:
        """Arm the guard and mark the transaction, where the claim itself has not."""
        queries = self.dialect.queries
        if queries["arm"]:
            statements.append(self._guard("arm", token))
        if mark := queries["savepoint_claim"]:
            statements.append(Statement("savepoint_claim", mark, _NOTHING))
        return tuple(statements)

    def claimed(
        self, statements: Sequence[Statement], results: Sequence[Any]
    ) -> ClaimResult | None:
        """Return what a claim won, if its own result says so; None means: classify by token."""
        if not self.dialect.returning:
            return None
        for statement, result in zip(statements, results, strict=True):
            if statement.name.startswith("claim"):
                return self._won(statement, result)
        raise AssertionError("no claim among the statements")

    def _won(self, claim: Statement, result: Any) -> ClaimResult:
        if not self.dialect.arrays:
            return ClaimResult({row[0] for row in result.rows})
        params = claim.params
        candidates = params.get("rows.message_id") or (params["message_id"],)
        if "rows.payload_hash" in params:
            # a claim of new ids names those it did not win
            lost = dict(result.rows)
            won = set(candidates).difference(lost) if lost else set(candidates)
            return ClaimResult(
                won, [message_id for message_id, finished in lost.items() if finished]
            )
        if result.count == len(candidates):
            # normally all of them, so their ids need not be read
            return ClaimResult(set(candidates))
        return ClaimResult({row[0] for row in result.rows})

    def finds_duplicates(self, arrivals: Sequence[Arrival]) -> bool:
        """Whether `duplicates` is faster than `classify` for these."""
        return len(arrivals) > 1 and self.dialect.has("duplicates")

    def duplicates(self, consumer: str, arrivals: Sequence[Arrival]) -> Statement:
        """Return the statement that reads which of these ids are finished, under the same payload."""
        columns: dict[str, list[Any]] = {
            "message_id": [arrival.message_id for arrival in arrivals],
            "payload_hash": [arrival.hash for arrival in arrivals],
        }
        return self.dialect.statement("duplicates", {"consumer": consumer}, columns)

    def complete(self, consumer: str, ids: Sequence[str], *, token: str, keep: bool) -> Statement:
        """Return the statement that makes claimed rows `processed` where the claim could not (promise 2.3).

        The caller checks the count: a missing row no longer belongs to this transaction.
        """
        return self.dialect.statement(
            "complete", {"consumer": consumer, "token": token, "keep": keep}, {"message_id": ids}
        )

    def closing(self, token: str) -> Statement:
        """Return the statement that fails unless this is still the claiming transaction."""
        return self._guard("close", token)

    def _guard(self, name: Literal["arm", "close"], token: str) -> Statement:
        """A statement of the guard, which on MySQL and MariaDB is a savepoint named after the token."""
        sql = self.dialect.queries[name].replace("[canary]", f"txbox_{token}")
        return Statement(name, sql, {"token": token})

    def still_claimed(self, token: str) -> Statement:
        """Return the statement that fails unless this is still the claiming transaction, even one that has failed.

        Only a rollback may follow.
        """
        if self.dialect.has("rollback_to_claim"):
            return self.dialect.statement("rollback_to_claim")
        return self.closing(token)

    # -- limits on waiting for a lock ------------------------------------------------------------

    def bound_lock_timeout(self, lock_timeout: timedelta) -> Statement:
        """Return the statement that limits every later wait for a lock to `lock_timeout`."""
        return self.dialect.statement(
            "bound_lock_timeout", {"lock_timeout_ms": _ms(lock_timeout.total_seconds())}
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

    # -- rows ----------------------------------------------------------------------------------

    async def classify(
        self, db: Transaction, consumer: str, ids: Sequence[str]
    ) -> dict[str, Existing]:
        """Read the rows under these ids, in an open transaction.

        An id that is missing from the answer has no row.
        """
        if not ids:
            return {}
        return self.existing(await db.execute(self.classifying(consumer, ids)))

    def classifying(self, consumer: str, ids: Sequence[str]) -> Statement:
        """Return the statement that reads the rows under these ids, one or more, for `existing`."""
        return self.dialect.statement("classify", {"consumer": consumer}, {"message_id": ids})

    def meeting(self, consumer: str, message_id: str) -> Statements:
        """Return what a transaction begins with whose `classify` decides on an acknowledgement, without a claim."""
        params = {"consumer": consumer, "message_id": message_id}
        return (self.dialect.statement("meet", params),) if self.dialect.has("meet") else ()

    def existing(self, result: Result) -> dict[str, Existing]:
        """Return the rows that `classifying` has read, by id."""
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
        return self.dialect.statement("store", params, self.columns.whole(consumer, arrivals))

    async def stored(
        self,
        db: Transaction,
        consumer: str,
        arrivals: Sequence[Arrival],
        result: Result,
        *,
        token: str,
    ) -> set[str]:
        """Return the ids that `storing`, or the claim of `accept`, reported as new."""
        if self.dialect.returning:
            return {row[0] for row in result.rows}
        rows = await self.classify(db, consumer, [arrival.message_id for arrival in arrivals])
        return {message_id for message_id, row in rows.items() if row.token == token}

    def return_payload(self, consumer: str, arrival: Arrival) -> Statement:
        """Return the statement that restores the payload of an unfinished row from a redelivery."""
        return self.dialect.statement(
            "return_payload",
            {
                **self.columns.content(arrival.message, Row(consumer, arrival.message_id)),
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
        reason: str,
        payload_limit: int,
        hashed: bytes | None = None,
        bare: bool = False,
    ) -> Statement:
        """Return the statement that quarantines a message; a copy only increments a counter.

        Args:
            payload_limit: how many bytes of the payload are kept.
            hashed: what tells it from others of its id, if not `quarantine_hash`.
            bare: without its content, which cannot be written.

        Raises:
            UnusableMessage: the codec fails on the content.
        """
        if self.columns.lacks(message_id):
            # escaped it would be another message's id; left out, it still tells the messages without one apart
            hashed = sha256(message_id.encode() + quarantine_hash(message, "")).digest()
            message_id = ""
        kept = message
        if message.payload is not None and len(message.payload) > payload_limit:
            kept = replace(message, payload=message.payload[:payload_limit])
        hashed = hashed or quarantine_hash(message, message_id)
        row = Row(consumer, message_id, hashed)
        params = {
            **(_NO_CONTENT if bare else self.columns.content(kept, row)),
            "consumer": consumer,
            "message_id": message_id,
            "hash": hashed,
            "reason": self.columns.redact.error(reason),
            "topic": message.topic,
            "type": message.type,
            "key": message.key,
            "key_id": None if bare else self.columns.key_id,
        }
        return self.dialect.statement("quarantine", self.columns.fitting(params))

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
        params = {
            "consumer": consumer,
            "message_id": message_id,
            "attempt": number,
            "status": status,
            "error_type": error_type,
            "error": error,
            "fingerprint": fingerprint,
        }
        return self.dialect.statement("record_attempt", self.columns.fitting(params))

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
        lock_timeout: timedelta,
        dying: Callable[[Session, int], Awaitable[None]] | None = None,
        bare: bool = False,
    ) -> tuple[bool, int] | None:
        """Record a failure in a transaction of its own, over an existing row or as a new one.

        Args:
            token: of the caller's lease, if it has one.
            lock_timeout: the longest wait for a transaction that holds the row.
            bare: the content cannot be written. A leased row keeps what it has; a new one has none.
            dying: what else must happen in this transaction if the row becomes dead; gets its failures.

        Returns:
            Whether the row is dead, and how many failures it has now. None means that it belongs to somebody else by
            now (processed, dead, leased to another, with another payload, or decided on by an operator): nothing was
            written; classify again.

        Raises:
            StoreError: LOCK_TIMEOUT, when the row stayed locked for longer: nothing was written; end the
                transaction with `rollback_bounded`. CONTENT: the database cannot hold the content.
            UnusableMessage: the codec fails on the content.

        Guarantee: with a lease, only the row that has its token is written. Without one, never a finished row,
            another's lease, another payload, or what an operator has edited or retried.
        """
        params = self._failed_row(consumer, arrival, failure, retry, token=token, bare=bare)
        update = self.dialect.statement(
            "record_bare" if bare and token else "record_update", params
        )
        insert = self.dialect.statement("record_insert", params)
        # most have no row yet, and where an INSERT skips a rival's row it may come first
        tries = (
            (update,) if token else (insert, update) if self.dialect.returning else (update, insert)
        )
        at("record_failure")
        written = (await db.begin(self.begin_bounded(lock_timeout, tries[0])))[-1]
        for statement in tries[1:]:
            if self._wrote(written):
                break
            try:
                written = await db.execute(statement)
            except StoreError as error:
                # where the INSERT cannot skip a rival's row, it fails instead
                if error.fault is not Fault.DUPLICATE:
                    raise
        if not self._wrote(written):
            await self.rollback_bounded(db)
            return None
        if self.dialect.returning:
            status, attempts = written.rows[0]
        else:
            row = (await self.classify(db, consumer, [arrival.message_id])).get(arrival.message_id)
            if row is None:
                raise out_of_sight(consumer)
            status, attempts = row.status, row.attempts
        attempt = self.failed_attempt(consumer, arrival, failure, status=status, number=attempts)
        dead = status == Status.DEAD
        if dying is not None and dead:
            await db.execute(attempt)
            await dying(db, attempts)
            await db.commit(self.commit_bounded())
        else:
            await db.commit((attempt, *self.commit_bounded()), goes_on=True)
        return dead, attempts

    def _wrote(self, result: Result) -> bool:
        # SQLAlchemy counts no rows of a statement that returns some
        return bool(result.rows) if self.dialect.returning else result.count > 0

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
            StoreError: the row is missing: a handler ended the transaction.
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
        bare: bool = False,
    ) -> dict[str, Any]:
        assert failure.delay_s is not None, "a failure is drawn before it is recorded"
        if bare:
            content: Mapping[str, Any] = _NO_CONTENT
        elif arrival.unreadable is not None:
            content = arrival.unreadable.stored
        else:
            row = Row(consumer, arrival.message_id)
            content = {**self.columns.content(arrival.message, row), "key_id": self.columns.key_id}
        params = {
            **self.columns.row(arrival),
            "has_payload": not bare,
            **content,
            "consumer": consumer,
            "error_type": failure.error_type,
            "error": self._error(consumer, arrival, failure),
            "fingerprint": failure.fingerprint,
            "final": failure.final,
            "delay_s": failure.delay_s,
            "max_attempts": retry.max_attempts,
            "max_age_s": retry.max_age.total_seconds() if retry.max_age else _NO_AGE_S,
            "token": token,
        }
        return self.columns.fitting(params)

    def _error(self, consumer: str, arrival: Arrival, failure: Failure) -> str:
        # the key of an unreadable row stays, so its error is not encoded: it quotes nothing of the content
        if arrival.unreadable is not None:
            return self.columns.redact.error(failure.error)
        return self.columns.error(failure.error, Row(consumer, arrival.message_id))

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
            error=self._error(consumer, arrival, failure),
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
                "result": self.columns.result(result, Row(consumer, message_id)),
            },
        )

    async def result(self, db: Session, consumer: str, message_id: str) -> bytes | None:
        """`kept_result` in a transaction of its own; None if it is unreadable."""
        await db.begin()
        try:
            result = await self.kept_result(db, consumer, message_id)
        except UnreadableMessage:
            result = None
        await db.commit()
        return result

    async def kept_result(self, db: Transaction, consumer: str, message_id: str) -> bytes | None:
        """Read what a handler returned; None if nothing was kept.

        Raises:
            UnreadableMessage: the codec fails on it.
        """
        params = {"consumer": consumer, "message_id": message_id}
        answer = await db.execute(self.dialect.statement("result", params))
        if not answer.rows:
            return None
        return self.columns.result_back(answer.rows[0][0], Row(consumer, message_id))

    async def kept_message(
        self, db: Transaction, consumer: str, message_id: str
    ) -> Message[Any] | None:
        """Read a message whose row keeps its payload, in an open transaction; None if it does not."""
        any_row = dict.fromkeys(("status", "topic", "type", "key"))
        params = {"consumer": consumer, "message_id": message_id, "after": -1, "limit": 1}
        result = await db.execute(self.dialect.statement("replay_read", params | any_row))
        if not result.rows:
            return None
        return self.columns.arrival(consumer, result.rows[0]).arrival.message


# the same values for every message of a handler
@lru_cache(maxsize=64)
def _bounds(lock_timeout: timedelta, idle_s: float) -> dict[str, str]:
    return {"lock_timeout_ms": _ms(lock_timeout.total_seconds()), "idle_ms": _ms(idle_s)}


def _ms(seconds: float) -> str:
    return str(min(max(1, int(seconds * 1000)), _MS_MAX))
