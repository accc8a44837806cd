"""The transaction around a handler: begin, claim, call, close, commit, and how that ended (promises 2)."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from operator import attrgetter
from os import urandom
from typing import Any, NamedTuple

from txbox.connections.base import savepoint_is_gone
from txbox.errors import Fault, StoreError, UnusableMessage
from txbox.handlers import Handler
from txbox.policy import Batching, Lease, Limits
from txbox.processing.calls import (
    SettingsChanged,
    call_of,
    called_apart,
    called_once,
    decode_ahead,
    handled,
    undo,
)
from txbox.processing.failure import Recorded, Recorder
from txbox.session import Raised, Result, Session, Statement, Transaction
from txbox.store import order
from txbox.store.codec import Arrival
from txbox.store.dialect import Dialect
from txbox.store.inbox import FINISHED, ClaimResult, Existing, InboxStore


class End(Enum):
    """How a transaction around a handler ended."""

    COMMITTED = "committed"
    RAISED = "raised"  # the handler, or the database on its behalf: rolled back
    BROKEN = "broken"  # the handler ended the claiming transaction
    CONFLICT = "conflict"  # deadlock or serialization failure: rolled back
    LOCKED = "locked"  # another transaction holds an id
    LOST = "lost"  # the connection is gone, or of no use, before COMMIT was sent: rolled back by the server
    AMBIGUOUS = "ambiguous"  # the COMMIT may have taken effect
    REFUSED = (
        "refused"  # the server answered COMMIT with an error: it failed, if the next claim wins
    )
    SETS = "sets"  # a message of a batch has set what the others must not see: rolled back
    WAITS = "waits"  # earlier messages of its key come first: nothing ran


class Claim(NamedTuple):
    """How a transaction claims its messages: as new ones, as leased rows, or as rows to replay.

    Attributes:
        lease: the token under which the rows are leased.
        replay: the row is processed, and runs once more.
        stop: True when leases are no longer released while the database is away.
        for_s: how long to wait for the database when a handler without a transaction has run; None for ever.
        apart: each of several messages has a savepoint of its own from the start, so that none runs twice for another.
    """

    lease: str | None = None
    replay: bool = False
    stop: Callable[[], bool] | None = None
    for_s: float | None = None
    apart: bool = False


_MESSAGE_ID = attrgetter("message_id")

#: New messages, as far as is known.
NEW = Claim()


# bare types under typed names: `dict[str, bytes]()` takes six times as long, and every transaction needs these
_by_id: Any = dict
_ids_in_order: type[list[str]] = list


@dataclass(slots=True)
class TransactionResult:
    """How a transaction ended, and its results.

    Attributes:
        fresh: ids that were claimed.
        existing: rows of ids that were not.
        waiting: ids that must wait for others.
        gap: the missing version that was expected instead, when it is not waited for any longer.
        results: what the handler returned, by id, if that is kept.
        failed: by id, what was recorded in this transaction of handlers that failed under a savepoint.
        called: the ids the handler was called for, in order; may repeat.
        unknown: of a BROKEN transaction, the ids whose effects are unknown.
        set_by: what shows that a handler has set something, after SETS.
        together: it was for several ids, so locks were not waited for long.
        claimed_at, handled_at: when the claim was answered, and when the handler ended, by `time.monotonic`.
    """

    end: End
    fresh: AbstractSet[str] = frozenset()
    existing: dict[str, Existing] = field(default_factory=_by_id)
    error: BaseException | None = None
    database_error: StoreError | None = None
    waiting: AbstractSet[str] = frozenset()
    gap: int | None = None
    results: dict[str, bytes] = field(default_factory=_by_id)
    failed: dict[str, Recorded] = field(default_factory=_by_id)
    called: list[str] = field(default_factory=_ids_in_order)
    unknown: AbstractSet[str] = frozenset()
    set_by: str = ""
    together: bool = False
    claimed_at: float = 0.0
    handled_at: float = 0.0


def end_of_handler(raised: Raised, *, together: bool) -> End:
    """How a transaction ends whose handler raised."""
    fault = raised.database_error.fault if raised.database_error else None
    if fault is Fault.UNAVAILABLE and (raised.lost or _answered(raised.database_error)):
        return End.LOST
    # a batch waits less long for a lock than a message alone, and is then divided
    if fault in (Fault.CONFLICT, Fault.PREPARED) or (together and fault is Fault.LOCK_TIMEOUT):
        return End.CONFLICT
    return End.RAISED


def _answered(error: StoreError | None) -> bool:
    """Whether a server said so; without a number, or with one of MySQL's clients, it may be another connection's."""
    code = error.code if error is not None else None
    return code is not None and not (len(code) == 4 and code.startswith("2"))


# MySQL's answer to releasing a savepoint that the server knows and the engine does not: in Group Replication, a
# transaction of another node has undone this one
_UNDONE = "1030"


def end_of_commit(error: StoreError) -> End:
    """How a transaction ends whose close or COMMIT failed."""
    if not error.definite:
        # an error of a pooler, or of a server that is shutting down, says nothing about the COMMIT
        answered = error.code is not None and error.fault is not Fault.UNAVAILABLE
        return End.REFUSED if answered else End.AMBIGUOUS
    if error.fault is Fault.GUARD:
        return End.BROKEN
    # psycopg deallocates txbox's statements with its own when a savepoint of the handler's is rolled back
    if error.fault in (Fault.CONFLICT, Fault.PREPARED) or error.code == _UNDONE:
        return End.CONFLICT
    if error.fault is Fault.UNAVAILABLE:
        return End.LOST
    return End.RAISED


def refused(dialect: Dialect, raised: Raised) -> bool:
    """Whether the database refused a COMMIT of the handler's: it persisted nothing, so this is an ordinary failure."""
    return (
        raised.database_error is not None
        and raised.database_error.fault is Fault.GUARD
        and dialect.refuses_commit
    )


# SQLite has one lock for the whole database, and has already waited for it
_LOCKED_OUT = "SQLITE_BUSY"


class HandlerTransaction:
    """Runs a handler between a claim and a close.

    Guarantee: End.COMMITTED means that the claimed rows and all that the handler wrote are one
    commit; every other end means that this transaction persisted nothing, but for AMBIGUOUS and REFUSED.
    """

    def __init__(
        self,
        store: InboxStore,
        limits: Limits,
        lease: Lease,
        recorder: Recorder,
        *,
        batching: Batching | None = None,
    ) -> None:
        self.store = store
        self._batching = batching or Batching()
        self._limits = limits
        self._lease = lease
        self._recorder = recorder

    async def once(self, db: Session, handler: Handler, arrival: Arrival) -> TransactionResult:
        """`run` for one new message of a handler that is `plain`: what nearly all come to, and nothing else."""
        token, arrivals = urandom(16).hex(), (arrival,)
        claiming = self.claiming(handler, arrivals, NEW, token)
        ran = TransactionResult(End.COMMITTED)
        try:
            results = await db.begin(
                claiming, partial(decode_ahead, handler, arrivals), user_code=True
            )
            ran.claimed_at = time.monotonic()
            won = self.store.claimed(claiming, results)
            if won is not None and won.ids:
                ran.fresh = won.ids
            elif won is not None:
                await self._lost_all(db, ran, handler, arrivals, won)
                return ran
            else:
                await self._read_others(db, ran, handler, arrivals, None, token)
        except StoreError as error:
            return await self._not_claimed(db, error)
        if not ran.fresh:
            await self._nothing_won(db)
            return ran
        try:
            if handler.options.pipeline and db.connection is not None:
                await db.connection.pipe()
            await called_once(db, handler, arrival, ran.called)
        except Raised as raised:
            await self._raised(db, ran, raised, token)
            return ran
        except StoreError as error:
            await self._lost_savepoint(db, ran, error, token)
            return ran
        ran.handled_at = time.monotonic()
        await self._close(db, ran, handler, arrivals, token, keep=handler.keeps_payload)
        return ran

    async def run(
        self,
        db: Session,
        handler: Handler,
        arrivals: Sequence[Arrival],
        claim: Claim,
        *,
        group: int = 0,
        returned: list[Any] | None = None,
    ) -> TransactionResult:
        """BEGIN and claim; the handler on what was claimed, in the same order; close and COMMIT.

        Args:
            arrivals: with different ids.
            group: how many messages share a savepoint; failures are then recorded in this transaction. With 0
                there are no savepoints, and one failure fails all.
            returned: what the handler returned, if it has already run outside a transaction.
        """
        token = urandom(16).hex()
        claiming = self.claiming(handler, arrivals, claim, token)
        checks: Sequence[Statement] = ()
        if handler.in_order and not claim.replay:
            checks = self._order_checks(handler, arrivals, claim, token)
        ran = TransactionResult(End.COMMITTED, together=len(arrivals) > 1)
        decode = partial(decode_ahead, handler, arrivals) if returned is None else None
        try:
            results = await db.begin((*claiming, *checks), decode, user_code=True)
            ran.claimed_at = time.monotonic()
            checked: list[Result] = []
            if checks:
                results, checked = results[: len(claiming)], results[len(claiming) :]
            won = self.store.claimed(claiming, results)
            if won is not None and len(won.ids) == len(arrivals):
                ran.fresh = won.ids
            elif won is not None and not won.ids:
                await self._lost_all(db, ran, handler, arrivals, won)
                return ran
            else:
                await self._read_others(db, ran, handler, arrivals, won, token)
        except StoreError as error:
            return await self._not_claimed(db, error)
        if checks:
            self._check_order(handler, arrivals, ran, [result.rows for result in checked])
            if ran.waiting:
                ran.end = End.WAITS
                await db.rollback()
                return ran
        if len(ran.fresh) == len(arrivals):
            mine = arrivals
        else:
            mine = [arrival for arrival in arrivals if arrival.message_id in ran.fresh]
        if not mine:
            await self._nothing_won(db)
            return ran
        try:
            if returned is None and group and not handler.options.batch:
                mine, returned = await self._in_groups(db, ran, handler, mine, group, token)
                if ran.failed:
                    dead = (one.failure for one in ran.failed.values() if one.dead)
                    await self._recorder.alert(db, handler, dead)
            elif returned is None:
                if handler.options.pipeline and db.connection is not None:
                    await db.connection.pipe()
                returned = await handled(db, handler, mine, ran.called)
        except SettingsChanged as setting:
            ran.end, ran.set_by = End.SETS, setting.by
            await db.rollback()
            return ran
        except Raised as raised:
            await self._raised(db, ran, raised, token)
            return ran
        except StoreError as error:
            await self._lost_savepoint(db, ran, error, token)
            return ran
        ran.handled_at = time.monotonic()
        if handler.options.keep_result:
            ran.results = {
                arrival.message_id: result for arrival, result in zip(mine, returned, strict=True)
            }
        await self._close(db, ran, handler, mine, token, keep=claim.replay or handler.keeps_payload)
        return ran

    def claiming(
        self, handler: Handler, arrivals: Sequence[Arrival], claim: Claim, token: str
    ) -> tuple[Statement, ...]:
        """The statements that claim messages, and arm the guard with `token`."""
        store, consumer, together = self.store, handler.consumer, len(arrivals) > 1
        lock_timeout, wait = (
            self._limits.lock_timeout,
            self._batching.duration if together else None,
        )
        timeout, idle_s = handler.options.timeout, self._lease.duration.total_seconds()
        if timeout is not None:
            idle_s = max(idle_s, timeout.total_seconds())
        if claim.lease is None and not claim.replay:
            return store.claim(
                consumer,
                # sorted: two batches that share ids then wait for each other instead of deadlocking
                sorted(arrivals, key=_MESSAGE_ID) if together else arrivals,
                token=token, lock_timeout=lock_timeout, idle_s=idle_s, keep=handler.keeps_payload, wait=wait,
            )  # fmt: skip
        ids = [arrival.message_id for arrival in arrivals]
        if claim.lease is None:
            return store.claim_known(
                "claim_replay", consumer, ids, token=token, lock_timeout=lock_timeout, idle_s=idle_s
            )  # fmt: skip
        return store.claim_known(
            "claim_leased", consumer, ids, token=token, lease=claim.lease,
            lock_timeout=lock_timeout, idle_s=idle_s, keep=handler.keeps_payload, wait=wait,
        )  # fmt: skip

    async def _lost_all(
        self,
        db: Session,
        ran: TransactionResult,
        handler: Handler,
        arrivals: Sequence[Arrival],
        won: ClaimResult,
    ) -> None:
        """Read the rows of a claim that won nothing, and end its transaction."""
        if not handler.options.keep_result:
            ran.existing = dict.fromkeys(won.finished, FINISHED)
        unread = [row.message_id for row in arrivals if row.message_id not in ran.existing]
        if not unread:
            await self._nothing_won(db)
        elif self.store.dialect.has("arm"):
            ran.existing.update(await self.store.classify(db, handler.consumer, unread))
            await self._nothing_won(db)
        else:
            statement = self.store.classifying(handler.consumer, unread)
            (result,) = await db.commit((statement,), goes_on=True)
            ran.existing.update(self.store.existing(result))

    async def _nothing_won(self, db: Session) -> None:
        """End a transaction that has won nothing; what it has read may be acknowledged afterwards (promise 2.9)."""
        dialect = self.store.dialect
        # only ROLLBACK lifts an armed guard that refuses COMMIT
        armed = dialect.refuses_commit and dialect.has("arm")
        await (db.rollback() if armed else db.commit())

    async def _in_groups(
        self,
        db: Session,
        ran: TransactionResult,
        handler: Handler,
        mine: Sequence[Arrival],
        size: int,
        token: str,
    ) -> tuple[list[Arrival], list[Any]]:
        """Call the handler for groups of messages under savepoints; returns those that succeeded, and the results.

        The culprit of a group is rolled back and recorded in this transaction, and its neighbours run again.

        Raises:
            Raised: the whole transaction has failed: a conflict, or a lost connection.
        """
        waiting = deque(list(mine[at : at + size]) for at in range(0, len(mine), size))
        good: list[Arrival] = []
        answers: list[Any] = []
        alone = 0  # so many groups at the head of the queue run one by one
        while waiting:
            # whatever a pipeline sends after a failure is sent again, so few groups are sent at a time
            most = 1 if alone else size if handler.options.pipeline else len(waiting)
            now = list(itertools.islice(waiting, most))
            calls = [[call_of(handler, arrival, ran.called) for arrival in group] for group in now]
            progress = await called_apart(
                db,
                calls,
                handler.timeout_s,
                piped=handler.options.pipeline,
                shares=handler.options.shares,
            )
            answers += progress.answers
            for _ in range(progress.released):
                good += waiting.popleft()
            alone = max(0, alone - progress.released)
            if progress.raised is None:
                continue
            end = end_of_handler(progress.raised, together=ran.together)
            if (
                end is not End.RAISED
                or progress.raised.ended
                or refused(self.store.dialect, progress.raised)
            ):
                raise progress.raised
            group = waiting.popleft()
            alone = max(0, alone - 1)
            await undo(db)
            failed_before = (
                progress.raised.database_error is not None
                and progress.raised.database_error.fault is Fault.ABORTED
            )
            if progress.culprit is None or (failed_before and len(group) > 1):
                # it could be any of them: run each alone
                waiting.extendleft([arrival] for arrival in reversed(group))
                alone += len(group)
                continue
            culprit = group.pop(progress.culprit)
            ran.failed[culprit.message_id] = await self._recorder.parked_within(
                db, handler, culprit, progress.raised, token
            )
            if group:
                waiting.appendleft(group)
                alone += 1 if alone else 0
        return good, answers

    async def _read_others(
        self,
        db: Transaction,
        ran: TransactionResult,
        handler: Handler,
        arrivals: Sequence[Arrival],
        won: ClaimResult | None,
        token: str,
    ) -> None:
        """Read the rows of the ids that were not won; without `won`, the rows' tokens say which were."""
        if won is not None:
            ran.fresh = won.ids
            if not handler.options.keep_result:
                ran.existing = dict.fromkeys(won.finished, FINISHED)
        unread = [
            arrival.message_id
            for arrival in arrivals
            if arrival.message_id not in ran.fresh and arrival.message_id not in ran.existing
        ]
        ran.existing.update(await self.store.classify(db, handler.consumer, unread))
        if won is None:
            ran.fresh = {
                message_id for message_id, row in ran.existing.items() if row.token == token
            }

    async def _lost_savepoint(
        self, db: Session, ran: TransactionResult, error: StoreError, token: str
    ) -> None:
        """Our savepoint is gone, or recording a failure failed: the handler ended it, or the connection broke."""
        ran.error = ran.database_error = error
        ran.end = end_of_commit(error)
        if ran.end is End.BROKEN:
            ran.unknown = set(ran.called)
        else:
            await self._check_still_claimed(db, ran, token)
        await _end(db, dropped=ran.end in (End.LOST, End.BROKEN))

    def _order_checks(
        self, handler: Handler, arrivals: Sequence[Arrival], claim: Claim, token: str
    ) -> list[Statement]:
        """The statements, sent with the claim, that find earlier messages of the same keys."""
        options, dialect = handler.options, self.store.dialect
        if options.sequence is not None:
            return [
                order.sequence_state(dialect, handler.consumer, arrival, options.gaps)
                for arrival in arrivals
            ]
        if claim.lease is not None:
            # rows are leased in order of arrival anyway
            return []
        check = order.waiting(
            dialect, handler.consumer, arrivals, dead_blocks=options.dead_blocks, token=token
        )
        return [] if check is None else [check]

    def _check_order(
        self,
        handler: Handler,
        arrivals: Sequence[Arrival],
        ran: TransactionResult,
        checks: Sequence[Sequence[Sequence[Any]]],
    ) -> None:
        gaps = handler.options.gaps
        if handler.options.sequence is None:
            blocked = {row[0] for row in checks[0]}
            ran.waiting = {
                arrival.message_id
                for arrival in arrivals
                if arrival.message_id in ran.fresh and arrival.message.key in blocked
            }
            return
        for arrival, rows in zip(arrivals, checks, strict=True):
            sequence, versions = arrival.message.sequence, order.Versions.read(rows)
            if arrival.message_id not in ran.fresh or sequence is None:
                continue
            if versions.must_wait(sequence, gaps):
                ran.waiting |= {arrival.message_id}
            elif versions.gap(sequence, gaps):
                ran.gap = versions.expected(gaps)

    async def _close(
        self,
        db: Session,
        ran: TransactionResult,
        handler: Handler,
        mine: Sequence[Arrival],
        token: str,
        *,
        keep: bool,
    ) -> None:
        store, consumer = self.store, handler.consumer
        last: list[Statement] = []
        if ran.results or handler.options.sequence is not None:
            try:
                last = self._after_close(ran, handler, mine)
            except UnusableMessage as error:
                # the codec fails on the result
                await self._raised(db, ran, Raised(error, None, False), token)
                return
        try:
            if store.dialect.refuses_commit:
                await db.commit((store.closing(token), *last))
            else:
                # close comes first: on a connection that a handler left in autocommit, `complete` would commit
                # by itself. All in one call, because a session flushes and releases its savepoint before it
                ids = [arrival.message_id for arrival in mine]
                if ids:
                    last.insert(0, store.complete(consumer, ids, token=token, keep=keep))
                results = await db.commit((store.closing(token), *last))
                if ids and results[1].count != len(ids):
                    ran.end, ran.unknown = End.BROKEN, set(ran.called)
        except Raised as raised:
            # a flush that the session had deferred
            await self._raised(db, ran, raised, token)
        except StoreError as error:
            ran.error = ran.database_error = error
            ran.end = end_of_commit(error)
            if ran.end is End.BROKEN:
                ran.unknown = set(ran.called)
            elif error.fault in (Fault.ABORTED, Fault.PREPARED) and store.dialect.has(
                "rollback_to_claim"
            ):
                # close found a failed transaction, or its plan was lost in a rollback: is it still the claiming one?
                await self._check_still_claimed(db, ran, token)
            await _end(db, dropped=ran.end not in (End.RAISED, End.CONFLICT))

    def _after_close(
        self, ran: TransactionResult, handler: Handler, mine: Sequence[Arrival]
    ) -> list[Statement]:
        """The statements after close, which only the claiming transaction reaches."""
        store, consumer = self.store, handler.consumer
        last = [
            store.keep_result(consumer, message_id, result)
            for message_id, result in ran.results.items()
        ]
        if handler.options.sequence is not None:
            for arrival in mine:
                last += order.sequence_done(store.dialect, consumer, arrival)
        return last

    async def _raised(
        self, db: Session, ran: TransactionResult, raised: Raised, token: str
    ) -> None:
        """The handler raised: check that this is still the claiming transaction, and roll back."""
        ran.error, ran.database_error = raised.error, raised.database_error
        ran.end = end_of_handler(raised, together=ran.together)
        if not refused(self.store.dialect, raised):
            await self._check_still_claimed(db, ran, token)
            if raised.ended and self.store.dialect.refuses_commit:
                # earlier calls were rolled back with the claim, and can run again
                ran.unknown = set(ran.called[-1:])
        await _end(db, dropped=ran.end in (End.BROKEN, End.LOST))

    async def _check_still_claimed(
        self, db: Transaction, ran: TransactionResult, token: str
    ) -> None:
        """Make the end BROKEN unless this is still the claiming transaction.

        After a conflict, only if the database can still tell: MySQL has rolled back the proof as well.
        """
        if ran.end is not End.RAISED and not (
            ran.end is End.CONFLICT and self.store.dialect.has("rollback_to_claim")
        ):
            return
        for _ in range(2):
            try:
                await db.execute(self.store.still_claimed(token))
            except StoreError as error:
                if error.fault is Fault.PREPARED:
                    # psycopg deallocated it in a rollback: prepare it again
                    continue
                if error.fault is Fault.GUARD or savepoint_is_gone(error):
                    # the handler may have committed something: a retry could write it twice
                    ran.error, ran.database_error, ran.end = error, error, End.BROKEN
                    ran.unknown = set(ran.called)
            return

    async def _not_claimed(self, db: Session, error: StoreError) -> TransactionResult:
        """The claim failed, so nothing ran."""
        await self.store.rollback_bounded(db)
        if error.fault is Fault.LOCK_TIMEOUT:
            return TransactionResult(End.LOCKED, error=error, database_error=error)
        if error.code == _LOCKED_OUT:
            raise error
        if error.fault in (Fault.CONFLICT, Fault.DUPLICATE, Fault.PREPARED):
            # DUPLICATE: the key's index is being rebuilt, and the next claim will see the row
            return TransactionResult(End.CONFLICT, error=error, database_error=error)
        raise error


async def _end(db: Session, *, dropped: bool) -> None:
    """Roll back, or drop a connection in an unknown state."""
    if dropped:
        db.discard()
    else:
        await db.rollback()
