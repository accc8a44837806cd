"""The transaction around a handler: begin, claim, call, close, commit; and how it ended (promises, chapter 2)."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from operator import attrgetter
from os import urandom
from typing import Any, NamedTuple

from txbox.connections.base import savepoint_is_gone
from txbox.errors import Fault, StoreError
from txbox.handlers import Handler
from txbox.policy import Batching, Lease, Limits
from txbox.processing.calls import call_of, called_apart, decode_ahead, handled, undo
from txbox.processing.failure import Recorded, Recorder
from txbox.session import Raised, Result, Session, Statement, Transaction
from txbox.store import claims, order
from txbox.store.codec import Arrival
from txbox.store.dialect import Dialect
from txbox.store.inbox import FINISHED, Existing, InboxStore


class End(Enum):
    """How a transaction around a handler ended."""

    COMMITTED = "committed"
    RAISED = "raised"  # the handler, or the database on its behalf: rolled back
    BROKEN = "broken"  # the handler left the claiming transaction
    CONFLICT = "conflict"  # deadlock or serialization failure: rolled back
    LOCKED = "locked"  # another transaction holds an id
    LOST = "lost"  # the connection is gone before COMMIT was sent: rolled back by the server
    AMBIGUOUS = "ambiguous"  # the COMMIT may have taken effect
    REFUSED = (
        "refused"  # the server answered COMMIT with an error: it failed, if the next claim wins
    )
    WAITS = "waits"  # earlier messages of its key come first: nothing ran


class Claim(NamedTuple):
    """How a transaction claims its messages: by their ids as new ones, else as rows.

    Attributes:
        lease: the token under which the rows are leased.
        replay: the row is processed, and runs once more.
    """

    lease: str | None = None
    replay: bool = False


_MESSAGE_ID = attrgetter("message_id")

#: Messages that come for the first time, as far as is known.
NEW = Claim()


# the bare types, by names that are typed: `set[str]()` takes six times as long, and every transaction needs these
_by_id: Any = dict
_ids_in_order: type[list[str]] = list


@dataclass(slots=True)
class TransactionResult:
    """A transaction that has ended, and what it met."""

    end: End
    fresh: AbstractSet[str] = frozenset()
    existing: dict[str, Existing] = field(default_factory=_by_id)
    error: BaseException | None = None
    database_error: StoreError | None = None
    #: The ids that must wait.
    waiting: AbstractSet[str] = frozenset()
    #: The version that was expected instead of this one, when it was not waited for any longer.
    gap: int | None = None
    #: What the handler returned, for each id, where it is kept.
    results: dict[str, bytes] = field(default_factory=_by_id)
    #: The rows as they were recorded in this transaction, of messages whose handler failed under a savepoint.
    failed: dict[str, Recorded] = field(default_factory=_by_id)
    #: The ids the handler was called for, in their order; may repeat.
    called: list[str] = field(default_factory=_ids_in_order)
    #: What a BROKEN transaction leaves unknown: who was called when, or after, it was left.
    unknown: AbstractSet[str] = frozenset()
    #: Several ids were asked for, whatever was won: locks are waited for shortly.
    together: bool = False
    #: When the claim was answered, and when the handler had ended, by `time.monotonic`.
    claimed_at: float = 0.0
    handled_at: float = 0.0


def end_of_handler(raised: Raised, *, together: bool) -> End:
    """How a transaction ends whose handler raised."""
    fault = raised.database_error.fault if raised.database_error else None
    if fault is Fault.UNAVAILABLE and raised.lost:
        return End.LOST
    # a batch waits shorter for a lock than a message alone, which the handler need not know
    if fault in (Fault.CONFLICT, Fault.PREPARED) or (together and fault is Fault.LOCK_TIMEOUT):
        return End.CONFLICT
    return End.RAISED


def end_of_commit(error: StoreError) -> End:
    """How a transaction ends whose close or COMMIT failed."""
    if not error.definite:
        # what a pooler or a server that goes away says is about the connection
        answered = error.code is not None and error.fault is not Fault.UNAVAILABLE
        return End.REFUSED if answered else End.AMBIGUOUS
    if error.fault is Fault.GUARD:
        return End.BROKEN
    # psycopg deallocates txbox's statements with its own when a savepoint of the handler's is rolled back
    if error.fault in (Fault.CONFLICT, Fault.PREPARED):
        return End.CONFLICT
    if error.fault is Fault.UNAVAILABLE:
        return End.LOST
    return End.RAISED


def refused(dialect: Dialect, raised: Raised) -> bool:
    """A COMMIT that the database refused has persisted nothing: an ordinary failure (promise 2.1)."""
    return (
        raised.database_error is not None
        and raised.database_error.fault is Fault.GUARD
        and dialect.refuses_commit
    )


# SQLite has one lock for everything, and has waited for it as long as it waits: somebody keeps the whole database
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
        """BEGIN and claim; the handler on what was claimed, in the order given; close and COMMIT.

        Args:
            arrivals: their ids differ. Of those that the claim does not win none is `fresh`.
            group: as many messages share a savepoint, and a failure is recorded here; with 0 there are
                no savepoints, and one failure is everybody's.
            returned: what the handler has returned, when it has run already, outside of any transaction.
        """
        token = urandom(16).hex()
        claiming = self.claiming(handler, arrivals, claim, token)
        checks: Sequence[Statement] = ()
        if handler.in_order and not claim.replay:
            checks = self._order_checks(handler, arrivals, claim, token)
        ran = TransactionResult(End.COMMITTED, together=len(arrivals) > 1)
        decode = partial(decode_ahead, handler, arrivals) if returned is None else None
        try:
            results = await db.begin((*claiming, *checks), decode)
            ran.claimed_at = time.monotonic()
            found: list[Result] = []
            if checks:
                results, found = results[: len(claiming)], results[len(claiming) :]
            won = claims.claimed(self.store, claiming, results)
            if won is not None and len(won.ids) == len(arrivals):
                ran.fresh = won.ids
            else:
                await self._meet(db, ran, handler, arrivals, won, token)
        except StoreError as error:
            return await self._not_claimed(db, error)
        if checks:
            self._look_at_order(handler, arrivals, ran, [result.rows for result in found])
            if ran.waiting:
                ran.end = End.WAITS
                await db.rollback()
                return ran
        if len(ran.fresh) == len(arrivals):
            mine = arrivals
        else:
            mine = [arrival for arrival in arrivals if arrival.message_id in ran.fresh]
        if not mine:
            # nothing to keep; where the claim armed a guard in the database, only ROLLBACK lifts it,
            # elsewhere COMMIT is the cheaper way out
            await (db.rollback() if self.store.dialect.has("arm") else db.commit())
            return ran
        try:
            if returned is None and group and not handler.options.batch:
                mine, returned = await self._in_groups(db, ran, handler, mine, group, token)
            elif returned is None:
                if handler.options.pipeline and db.connection is not None:
                    await db.connection.pipe()
                returned = await handled(db, handler, mine, ran.called)
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
    ) -> list[Statement]:
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
            return claims.claim(
                store, consumer,
                # sorted: two batches that share ids then wait for each other instead of deadlocking
                sorted(arrivals, key=_MESSAGE_ID) if together else arrivals,
                token=token, lock_timeout=lock_timeout, idle_s=idle_s, keep=handler.keeps_payload, wait=wait,
            )  # fmt: skip
        ids = [arrival.message_id for arrival in arrivals]
        if claim.lease is None:
            return claims.claim_known(
                store, "claim_replay", consumer, ids, token=token, lock_timeout=lock_timeout, idle_s=idle_s
            )  # fmt: skip
        return claims.claim_known(
            store, "claim_leased", consumer, ids, token=token, lease=claim.lease,
            lock_timeout=lock_timeout, idle_s=idle_s, keep=handler.keeps_payload, wait=wait,
        )  # fmt: skip

    async def _in_groups(
        self,
        db: Session,
        ran: TransactionResult,
        handler: Handler,
        mine: Sequence[Arrival],
        size: int,
        token: str,
    ) -> tuple[list[Arrival], list[Any]]:
        """Call the handler for groups of messages under savepoints; returns who came through, and the answers.

        The culprit of a group is rolled back and recorded in this transaction; its neighbours run again.

        Raises:
            Raised: what ends the transaction as a whole: a conflict, or the loss of the connection.
        """
        waiting = deque(list(mine[at : at + size]) for at in range(0, len(mine), size))
        good: list[Arrival] = []
        answers: list[Any] = []
        alone = 0  # as many groups at the head of the line run one by one
        while waiting:
            # what is put off and sent behind a failure is sent again: about one failure is met at a time
            most = 1 if alone else size if handler.options.pipeline else len(waiting)
            now = list(itertools.islice(waiting, most))
            calls = [[call_of(handler, arrival, ran.called) for arrival in group] for group in now]
            progress = await called_apart(
                db, calls, handler.timeout_s, piped=handler.options.pipeline
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
                or progress.raised.left
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
                # it could be any of them: each has a turn of its own
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

    async def _meet(
        self,
        db: Transaction,
        ran: TransactionResult,
        handler: Handler,
        arrivals: Sequence[Arrival],
        won: claims.Won | None,
        token: str,
    ) -> None:
        """Read what stands under the ids that were not won; without `won` the rows' tokens say which were."""
        if won is not None:
            ran.fresh = won.ids
            if not handler.options.keep_result:
                ran.existing = dict.fromkeys(won.finished, FINISHED)
        others = [
            arrival.message_id
            for arrival in arrivals
            if arrival.message_id not in ran.fresh and arrival.message_id not in ran.existing
        ]
        ran.existing.update(await self.store.classify(db, handler.consumer, others))
        if won is None:
            ran.fresh = {
                message_id for message_id, row in ran.existing.items() if row.token == token
            }

    async def _lost_savepoint(
        self, db: Session, ran: TransactionResult, error: StoreError, token: str
    ) -> None:
        """A savepoint of txbox's is gone, or its record was refused: the handler left it, or the connection broke."""
        ran.error = ran.database_error = error
        ran.end = end_of_commit(error)
        if ran.end is End.BROKEN:
            ran.unknown = set(ran.called)
        else:
            await self._ask(db, ran, token)
        await _ended(db, dropped=ran.end in (End.LOST, End.BROKEN))

    def _order_checks(
        self, handler: Handler, arrivals: Sequence[Arrival], claim: Claim, token: str
    ) -> list[Statement]:
        """What is asked in the claim's round trip about messages that come first."""
        options, dialect = handler.options, self.store.dialect
        if options.sequence is not None:
            return [
                order.sequence_state(dialect, handler.consumer, arrival, options.gaps)
                for arrival in arrivals
            ]
        if claim.lease is not None:
            # rows are leased in the order of their arrival, not of their versions
            return []
        asked = order.waiting(
            dialect, handler.consumer, arrivals, dead_blocks=options.dead_blocks, token=token
        )
        return [] if asked is None else [asked]

    def _look_at_order(
        self,
        handler: Handler,
        arrivals: Sequence[Arrival],
        ran: TransactionResult,
        found: Sequence[Sequence[Sequence[Any]]],
    ) -> None:
        gaps = handler.options.gaps
        if handler.options.sequence is None:
            blocked = {row[0] for row in found[0]}
            ran.waiting = {
                arrival.message_id
                for arrival in arrivals
                if arrival.message_id in ran.fresh and arrival.message.key in blocked
            }
            return
        for arrival, rows in zip(arrivals, found, strict=True):
            sequence, versions = arrival.message.sequence, order.Versions.read(rows)
            if arrival.message_id not in ran.fresh or sequence is None:
                continue
            if versions.waits(sequence, gaps):
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
            last = self._last(ran, handler, mine)
        try:
            if store.dialect.refuses_commit:
                await db.commit((claims.close(store, token), *last))
            else:
                # first the proof that this is still the claiming transaction: on a connection that a
                # handler left in autocommit, `complete` would commit by itself. In one step, since a
                # session writes what it put off, and releases its savepoint, before all of it
                ids = [arrival.message_id for arrival in mine]
                if ids:
                    last.insert(0, claims.complete(store, consumer, ids, token=token, keep=keep))
                results = await db.commit((claims.close(store, token), *last))
                if ids and results[1].count != len(ids):
                    ran.end, ran.unknown = End.BROKEN, set(ran.called)
        except Raised as raised:
            # a flush that the session put off until now
            await self._raised(db, ran, raised, token)
        except StoreError as error:
            ran.error = ran.database_error = error
            ran.end = end_of_commit(error)
            if ran.end is End.BROKEN:
                ran.unknown = set(ran.called)
            elif error.fault in (Fault.ABORTED, Fault.PREPARED) and store.dialect.has(
                "rollback_to_claim"
            ):
                # close itself met a transaction that had failed, or lost its plan to a rollback: whose was it?
                await self._ask(db, ran, token)
            await _ended(db, dropped=ran.end not in (End.RAISED, End.CONFLICT))

    def _last(
        self, ran: TransactionResult, handler: Handler, mine: Sequence[Arrival]
    ) -> list[Statement]:
        """What is written behind close: only the transaction that claimed comes this far."""
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
        """The handler raised: roll back, having asked whether this is still the transaction that claimed."""
        ran.error, ran.database_error = raised.error, raised.database_error
        ran.end = end_of_handler(raised, together=ran.together)
        if not refused(self.store.dialect, raised):
            await self._ask(db, ran, token)
            if raised.left and self.store.dialect.refuses_commit:
                # what was called before it was rolled back with the claim, and can run again
                ran.unknown = set(ran.called[-1:])
        await _ended(db, dropped=ran.end in (End.BROKEN, End.LOST))

    async def _ask(self, db: Transaction, ran: TransactionResult, token: str) -> None:
        """Ask whether this is still the transaction that claimed.

        After a conflict only where that can be told: elsewhere it has rolled back the proof with the rest.
        """
        if ran.end is not End.RAISED and not (
            ran.end is End.CONFLICT and self.store.dialect.has("rollback_to_claim")
        ):
            return
        for _ in range(2):
            try:
                await db.execute(claims.still_claimed(self.store, token))
            except StoreError as error:
                if error.fault is Fault.PREPARED:
                    # psycopg's rollback has deallocated it: the next one is prepared anew
                    continue
                if error.fault is Fault.GUARD or savepoint_is_gone(error):
                    # somebody wrote outside of the transaction that is rolled back: a retry could write again
                    ran.error, ran.database_error, ran.end = error, error, End.BROKEN
                    ran.unknown = set(ran.called)
            return

    async def _not_claimed(self, db: Session, error: StoreError) -> TransactionResult:
        """The claim failed: nothing has run."""
        if error.fault is Fault.LOCK_TIMEOUT:
            await self.store.lock_timed_out(db)
            return TransactionResult(End.LOCKED, error=error, database_error=error)
        await db.rollback()
        if error.code == _LOCKED_OUT:
            raise error
        if error.fault in (Fault.CONFLICT, Fault.DUPLICATE, Fault.PREPARED):
            # DUPLICATE: the key's index is being rebuilt; reading again is what a duplicate needs
            return TransactionResult(End.CONFLICT, error=error, database_error=error)
        raise error


async def _ended(db: Session, *, dropped: bool) -> None:
    """End a transaction that failed; the connection of one that nobody knows about is dropped."""
    if dropped:
        db.discard()
    else:
        await db.rollback()
