"""The inbox's operations as steps: claim, classify, close, record, quarantine, store, lease, rescue."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import lru_cache
from typing import Any, NamedTuple

from txbox.errors import Fault, StoreError
from txbox.message import Message
from txbox.outcome import Status
from txbox.policy import Lease, RetryPolicy
from txbox.steps import Begin, Commit, Rollback, Statement, Steps
from txbox.store.codec import Arrival, Columns, Leased
from txbox.store.dialect import Dialect, as_time

_NO_AGE_S = 10.0**9


@dataclass(frozen=True, slots=True)
class Existing:
    """A row that a claim met instead of writing its own (SEMANTICS 2.12)."""

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
FINISHED = Existing("processed", None, False, 0, 0, True, None, False)


class Won(NamedTuple):
    """What a claim has come to.

    Attributes:
        ids: what it won.
        finished: of the others those that are known to be finished, under the same payload.
    """

    ids: set[str]
    finished: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Failure:
    """What is recorded of one failed attempt, already bounded and sanitised."""

    error_type: str
    error: str
    fingerprint: str | None
    final: bool = False
    delay_s: float | None = None


@dataclass(frozen=True, slots=True)
class Rescued:
    """A row whose lease had run out."""

    consumer: str
    message_id: str
    topic: str
    starts: int
    dead: bool
    error_type: str
    error: str


class InboxStore:
    """The statements of the inbox in one dialect.

    Methods named as verbs are operations (steps); those that return statements are for callers
    that put them into one round trip with BEGIN or COMMIT.
    """

    def __init__(self, own: Dialect, columns: Columns) -> None:
        self.dialect = own
        self.columns = columns

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
        """Statements that claim ids (sorted by the caller, each once) and arm the guard with `token`.

        Args:
            lock_timeout: the longest wait for an id.
            wait: the longest wait for a lock of the handler's, where the database can bound it and a
                batch can be run again; None for the connection's own.
        """
        params = {**_bounds(lock_timeout, idle_s), "consumer": consumer, "token": token}
        if keep:
            claim = self.dialect.statement(
                "claim_kept",
                {**params, "key_id": self.columns.key_id},
                self.columns.whole(arrivals),
            )
        elif len(arrivals) == 1 and self.dialect.has("claim_single"):
            params.update(self.columns.single(arrivals[0]))
            # one crash point, whichever form the claim takes
            return (Statement("claim", self.dialect.queries["claim_single"], params),)
        else:
            claim = self.dialect.statement("claim", params, self.columns.slim(arrivals))
        return self._bounded(claim, token, lock_timeout, wait)

    def claim_leased(
        self,
        consumer: str,
        ids: Sequence[str],
        *,
        token: str,
        lease: str,
        lock_timeout: timedelta,
        idle_s: float,
        keep: bool,
        wait: timedelta | None = None,
    ) -> tuple[Statement, ...]:
        """As `claim`, for rows leased under `lease`: the fence."""
        params = {
            **_bounds(lock_timeout, idle_s), "consumer": consumer, "token": token, "lease": lease, "keep": keep
        }  # fmt: skip
        claim = self.dialect.statement("claim_leased", params, {"message_id": ids})
        return self._bounded(claim, token, lock_timeout, wait)

    def claim_replay(
        self,
        consumer: str,
        ids: Sequence[str],
        *,
        token: str,
        lock_timeout: timedelta,
        idle_s: float,
    ) -> tuple[Statement, ...]:
        """As `claim`, for processed rows that an operator replays."""
        params = {**_bounds(lock_timeout, idle_s), "consumer": consumer, "token": token}
        claim = self.dialect.statement("claim_replay", params, {"message_id": ids})
        return self._bounded(claim, token, lock_timeout)

    def _bounded(
        self,
        claim: Statement,
        token: str,
        lock_timeout: timedelta,
        wait: timedelta | None = None,
    ) -> tuple[Statement, ...]:
        own = self.dialect
        statements = [claim]
        if not own.claim_bounds_wait:
            statements.insert(0, self.bound_lock_timeout(lock_timeout))
        if wait is not None and own.has("bound_batch"):
            statements.append(own.statement("bound_batch", {"longest_s": wait.total_seconds()}))
        elif own.has("restore_lock_timeout"):
            statements.append(own.statement("restore_lock_timeout"))
        if own.has("arm"):
            statements.append(own.statement("arm", {"token": token}, canary=token))
        return tuple(statements)

    def bound_lock_timeout(self, lock_timeout: timedelta) -> Statement:
        return self.dialect.statement(
            "bound_lock_timeout",
            {"lock_timeout_ms": str(max(1, int(lock_timeout.total_seconds() * 1000)))},
        )

    def begin_bounded(self, lock_timeout: timedelta) -> Begin:
        """The BEGIN of a transaction whose every wait for a lock ends after `lock_timeout`."""
        own = self.dialect
        return Begin(
            (self.bound_lock_timeout(lock_timeout),) if own.has("bound_lock_timeout") else ()
        )

    def commit_bounded(self) -> Commit:
        """The COMMIT of such a transaction; where the bound is the session's, it ends as well."""
        own = self.dialect
        return Commit(() if own.claim_bounds_wait else (own.statement("restore_lock_timeout"),))

    def lock_timed_out(self) -> Steps[None]:
        """Roll a transaction back that waited too long; where the bound is the session's, end that."""
        yield Rollback()
        if not self.dialect.claim_bounds_wait:
            yield Begin((self.dialect.statement("restore_lock_timeout"),))
            yield Rollback()

    def claimed(self, statements: Sequence[Statement], results: Sequence[Any]) -> Won | None:
        """What a claim has won, where its own answer says so; else None: classify by token."""
        if not self.dialect.returning:
            return None
        for statement, result in zip(statements, results, strict=True):
            if statement.name.startswith("claim"):
                return self._won(statement, result)
        raise AssertionError("no claim among the statements")

    def _won(self, claim: Statement, result: Any) -> Won:
        if not self.dialect.arrays:
            return Won({row[0] for row in result.rows})
        params = claim.params
        asked = params.get("rows.message_id") or (params["message_id"],)
        if "rows.payload_hash" in params:
            # a claim of new ones names what it has not won
            lost = dict(result.rows)
            won = set(asked).difference(lost) if lost else set(asked)
            return Won(won, [own for own, finished in lost.items() if finished])
        if result.count == len(asked):
            # all of them, as is the rule: their ids need not be read
            return Won(set(asked))
        return Won({row[0] for row in result.rows})

    def finds_duplicates(self, arrivals: Sequence[Arrival]) -> bool:
        """Say whether `duplicates` is quicker than `classify` for these."""
        return len(arrivals) > 1 and self.dialect.has("duplicates")

    def duplicates(self, consumer: str, arrivals: Sequence[Arrival]) -> Statement:
        """The statement that reads which of these ids are finished, under the same payload."""
        columns: dict[str, list[Any]] = {
            "message_id": [own.message_id for own in arrivals],
            "payload_hash": [own.hash for own in arrivals],
        }
        return self.dialect.statement("duplicates", {"consumer": consumer}, columns)

    def classify(self, consumer: str, ids: Sequence[str]) -> Steps[dict[str, Existing]]:
        """Read the rows under these ids; an id that is missing has no row."""
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

    def complete(self, consumer: str, ids: Sequence[str], *, token: str, keep: bool) -> Statement:
        """The statement that makes claimed rows `processed` where the claim could not (SEMANTICS 2.3).

        Its caller checks the count: a row less is no longer this transaction's.
        """
        return self.dialect.statement(
            "complete", {"consumer": consumer, "token": token, "keep": keep}, {"message_id": ids}
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

    def close(self, token: str) -> Statement:
        """The statement that fails unless this is still the claiming transaction."""
        return self.dialect.statement("close", {"token": token}, canary=token)

    def record(
        self,
        consumer: str,
        arrival: Arrival,
        failure: Failure,
        retry: RetryPolicy,
        *,
        token: str,
        dying: Callable[[Existing], Steps[None]] | None = None,
    ) -> Steps[Existing | None]:
        """Record a failure in a transaction of its own; returns the row as it then stands, if it was written.

        Args:
            dying: what else belongs into this transaction when the row becomes dead.

        None means that the row is somebody else's by now (processed, dead, leased by another, or of
        another payload): nothing was written, the caller classifies again.

        Guarantee: never overwrites a finished row, another's lease or another payload.
        """
        params = self._recorded(consumer, arrival, failure, retry, token)
        yield Begin()
        written = yield self.dialect.statement("record_update", params)
        if written.count == 0:
            try:
                written = yield self.dialect.statement("record_insert", params)
            except StoreError as error:
                if error.fault is not Fault.DUPLICATE:
                    raise
                yield Rollback()
                return None
        if written.count == 0:
            yield Rollback()
            return None
        row = (yield from self.classify(consumer, [arrival.message_id]))[arrival.message_id]
        yield self.attempt(consumer, arrival, failure, status=row.status, attempt=row.attempts)
        if dying is not None and row.status == Status.DEAD:
            yield from dying(row)
        yield Commit()
        return row

    def record_own(
        self, consumer: str, arrival: Arrival, failure: Failure, retry: RetryPolicy, *, token: str
    ) -> Steps[tuple[bool, int]]:
        """Record a failure over the row this transaction has claimed; returns whether it is dead, and its attempts.

        Raises:
            StoreError: the row is not there: a handler has left the transaction.
        """
        written = yield self.dialect.statement(
            "record_own", self._recorded(consumer, arrival, failure, retry, token)
        )
        if written.count == 0:
            raise StoreError(
                "A handler left the transaction that claimed its message.", fault=Fault.GUARD
            )
        if self.dialect.returning:
            status, attempts = written.rows[0]
        else:
            row = (yield from self.classify(consumer, [arrival.message_id]))[arrival.message_id]
            status, attempts = row.status, row.attempts
        yield self.attempt(consumer, arrival, failure, status=status, attempt=attempts)
        return status == Status.DEAD, attempts

    def _recorded(
        self, consumer: str, arrival: Arrival, failure: Failure, retry: RetryPolicy, token: str
    ) -> dict[str, Any]:
        message = arrival.message
        return {
            **self.columns.content(message),
            "consumer": consumer,
            "message_id": arrival.message_id,
            "topic": message.topic,
            "type": message.type,
            "key": message.key,
            "sequence": message.sequence,
            "payload_hash": arrival.hash,
            "has_payload": True,
            "key_id": self.columns.key_id,
            "error_type": failure.error_type,
            "error": self.columns.error(failure.error),
            "fingerprint": failure.fingerprint,
            "final": failure.final,
            "delay_s": retry.delay_s(message.attempt)
            if failure.delay_s is None
            else failure.delay_s,
            "max_attempts": retry.max_attempts,
            "max_age_s": retry.max_age.total_seconds() if retry.max_age else _NO_AGE_S,
            "token": token,
        }

    def attempt(
        self,
        consumer: str,
        arrival: Arrival,
        failure: Failure,
        *,
        status: str,
        attempt: int | None = None,
    ) -> Statement:
        """The statement that adds an attempt to a message's history."""
        return self.dialect.statement(
            "record_attempt",
            {
                "consumer": consumer,
                "message_id": arrival.message_id,
                "attempt": arrival.message.attempt if attempt is None else attempt,
                "status": status,
                "error_type": failure.error_type,
                "error": self.columns.error(failure.error),
                "fingerprint": failure.fingerprint,
            },
        )

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
        """The statement that sets a message aside; the same one again only counts up."""
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
        return {own for own, row in found.items() if row.token == token}

    def store(
        self,
        consumer: str,
        arrivals: Sequence[Arrival],
        *,
        token: str,
        delay_s: float = 0.0,
    ) -> Steps[set[str]]:
        """Insert messages as pending, payload included; returns the ids that were new.

        Each id once; sorted, unless their order is that in which they are to be processed. For a
        transaction that is already open.

        Args:
            delay_s: they are due this much later.
        """
        if not arrivals:
            return set()
        result = yield self.dialect.statement(
            "store",
            {
                "consumer": consumer,
                "token": token,
                "key_id": self.columns.key_id,
                "delay_s": delay_s,
            },
            self.columns.whole(arrivals),
        )
        if self.dialect.returning:
            return {row[0] for row in result.rows}
        found = yield from self.classify(consumer, [arrival.message_id for arrival in arrivals])
        return {own for own, row in found.items() if row.token == token}

    def lease(
        self,
        consumer: str,
        *,
        token: str,
        limit: int,
        lease: Lease,
        suspect: bool,
        heads_only: bool = False,
        dead_blocks: bool = False,
    ) -> Steps[list[Leased]]:
        """Lease due rows in a transaction of its own, oldest due first.

        Args:
            suspect: take rows whose last run never ended; lease those one at a time.
            heads_only: of each key take only the first row that is unfinished.
            dead_blocks: with `heads_only`, a dead row stays the head of its key.

        Guarantee: the start is counted before a handler runs, so a message that kills its process
        still runs out of starts.
        """
        lease_s = lease.duration.total_seconds()
        params: dict[str, Any] = {
            "consumer": consumer,
            "token": token,
            "limit": limit,
            "lease_s": lease_s,
            "suspect": suspect,
        }
        if heads_only:
            params["dead_blocks"] = dead_blocks
        yield Begin()
        result = yield self.dialect.statement("lease_ordered" if heads_only else "lease", params)
        if not result.rows:
            # a ROLLBACK would cost the connection its prepared statements
            yield Commit()
            return []
        leased = yield from self._taken(consumer, result.rows, token, lease_s)
        yield Commit()
        return leased

    def lease_next(
        self, consumer: str, key: str, *, token: str, lease: Lease, dead_blocks: bool
    ) -> Steps[Leased | None]:
        """Lease the row of a key whose turn it is, where it is due and no run of it was left unended."""
        lease_s = lease.duration.total_seconds()
        yield Begin()
        result = yield self.dialect.statement(
            "lease_next",
            {
                "consumer": consumer,
                "key": key,
                "token": token,
                "lease_s": lease_s,
                "dead_blocks": dead_blocks,
            },
        )
        if not result.rows:
            yield Commit()
            return None
        (leased,) = yield from self._taken(consumer, result.rows, token, lease_s)
        yield Commit()
        return leased

    def store_leased(
        self, consumer: str, arrivals: Sequence[Arrival], *, token: str, lease: Lease
    ) -> Steps[list[Leased]]:
        """Insert messages as `store` does, leased from the start; returns those that were new.

        For a transaction that is already open: nobody else ever sees them waiting.
        """
        if not self.dialect.has("store_leased"):
            fresh = yield from self.store(consumer, arrivals, token=token)
            if not fresh:
                return []
            return (
                yield from self._lease_stored(consumer, sorted(fresh), token=token, lease=lease)
            )
        statement = self.dialect.statement(
            "store_leased",
            {
                "consumer": consumer,
                "token": token,
                "lease_s": lease.duration.total_seconds(),
                "key_id": self.columns.key_id,
            },
            self.columns.whole(arrivals),
        )
        # one crash point, whichever form the storing takes
        stored = yield statement._replace(name="store")
        written = {row[0]: row for row in stored.rows}
        return [
            Leased(
                replace(
                    arrival,
                    message=replace(
                        arrival.message, received_at=as_time(written[arrival.message_id][1])
                    ),
                ),
                attempts=0,
                starts=1,
                number=written[arrival.message_id][2],
            )
            for arrival in arrivals
            if arrival.message_id in written
        ]

    def _lease_stored(
        self, consumer: str, ids: Sequence[str], *, token: str, lease: Lease
    ) -> Steps[list[Leased]]:
        lease_s = lease.duration.total_seconds()
        result = yield self.dialect.statement(
            "lease_stored",
            {"consumer": consumer, "token": token, "lease_s": lease_s},
            {"message_id": ids},
        )
        return (yield from self._taken(consumer, result.rows, token, lease_s))

    def _taken(
        self, consumer: str, rows: Sequence[Any], token: str, lease_s: float
    ) -> Steps[list[Leased]]:
        if self.dialect.has("lease_take"):
            yield self.dialect.statement(
                "lease_take",
                {"consumer": consumer, "token": token, "lease_s": lease_s},
                {"message_id": [row[0] for row in rows]},
            )
        return sorted(
            (self.columns.arrival(consumer, row) for row in rows), key=lambda own: own.number
        )

    def heartbeat(
        self, consumer: str, ids: Sequence[str], *, token: str, lease: Lease
    ) -> Steps[int]:
        """Extend a lease; returns how many rows were extended (those in a handler's transaction are skipped)."""
        yield Begin()
        result = yield self.dialect.statement(
            "heartbeat",
            {"consumer": consumer, "token": token, "lease_s": lease.duration.total_seconds()},
            {"message_id": ids},
        )
        if self.dialect.has("heartbeat_take") and result.rows:
            result = yield self.dialect.statement(
                "heartbeat_take",
                {"consumer": consumer, "lease_s": lease.duration.total_seconds()},
                {"message_id": [row[0] for row in result.rows]},
            )
        yield Commit()
        return int(result.count)

    def release(
        self, consumer: str, ids: Sequence[str], *, token: str, delay_s: float
    ) -> Steps[int]:
        """Give leased rows back without an attempt, fenced; waits for a commit in flight, then matches nothing."""
        yield Begin()
        result = yield self.dialect.statement(
            "release",
            {"consumer": consumer, "token": token, "delay_s": delay_s},
            {"message_id": ids},
        )
        yield Commit()
        return int(result.count)

    def rescue(
        self,
        *,
        consumer: str | None,
        max_starts: int,
        limit: int,
        dying: Callable[[Rescued], Steps[None]] | None = None,
    ) -> Steps[list[Rescued]]:
        """Put rows whose lease ran out back to `failed`, or to `dead` when too many runs never ended.

        Args:
            dying: what else belongs into this transaction when a row becomes dead.
        """
        own = self.dialect
        yield Begin()
        rescued: list[Rescued] = []
        rows = list(
            (yield own.statement("rescue", self._rescue_params(consumer, max_starts, limit))).rows
        )
        if rows and own.has("rescue_take"):
            yield own.statement(
                "rescue_take",
                {"max_starts": max_starts},
                {"consumer": [row[0] for row in rows], "message_id": [row[1] for row in rows]},
            )
        for row in rows:
            rescued.append(
                Rescued(row[0], row[1], row[2], row[3], row[4] == "dead", row[6], row[7])
            )
            yield own.statement(
                "record_attempt",
                {
                    "consumer": row[0],
                    "message_id": row[1],
                    "attempt": row[5],
                    "status": row[4],
                    "error_type": row[6],
                    "error": row[7],
                    "fingerprint": None,
                },
            )
            if dying is not None and rescued[-1].dead:
                yield from dying(rescued[-1])
        if own.has("rescue_broken"):
            yield own.statement("rescue_broken", {"consumer": consumer, "limit": limit})
        yield Commit()
        return rescued

    def kept_message(self, consumer: str, message_id: str) -> Steps[Message[Any] | None]:
        """Read a message whose row keeps its payload; for a transaction that is open."""
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

    def _rescue_params(self, consumer: str | None, max_starts: int, limit: int) -> dict[str, Any]:
        return {"consumer": consumer, "max_starts": max_starts, "limit": limit}


@lru_cache(maxsize=64)
def _bounds(lock_timeout: timedelta, idle_s: float) -> dict[str, str]:
    return {
        "lock_timeout_ms": str(max(1, int(lock_timeout.total_seconds() * 1000))),
        "idle_ms": str(max(1, int(idle_s * 1000))),
    }
