"""The transaction around a handler: begin, claim, call, close, commit; and how it ended (SEMANTICS 2)."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial
from os import urandom
from typing import Any, NamedTuple

from txbox.body import as_json
from txbox.connections.base import savepoint_is_gone
from txbox.errors import Fault, StoreError
from txbox.handlers import Handler
from txbox.outbox import Run
from txbox.policy import Batching, Lease, Limits
from txbox.processing.failure import failure_of
from txbox.steps import (
    Begin,
    Call,
    Commit,
    Discard,
    Invoke,
    InvokeGroups,
    Pipe,
    Progress,
    Raised,
    Rollback,
    Statement,
    Steps,
    Undo,
)
from txbox.store import claims, failures, order
from txbox.store.codec import Arrival
from txbox.store.dialect import Dialect
from txbox.store.failures import Failure
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


class Recorded(NamedTuple):
    """A failure that is part of its batch's transaction."""

    failure: Failure
    dead: bool
    attempt: int


# the bare types, by names that are typed: `set[str]()` takes six times as long, and one transaction needs seven
_ids: type[set[str]] = set
_by_id: Any = dict
_ids_in_order: type[list[str]] = list


@dataclass(slots=True)
class TransactionResult:
    """A transaction that has ended, and what it met."""

    end: End
    fresh: set[str] = field(default_factory=_ids)
    existing: dict[str, Existing] = field(default_factory=_by_id)
    error: BaseException | None = None
    database_error: StoreError | None = None
    #: The ids that must wait.
    waiting: set[str] = field(default_factory=_ids)
    #: The version that was expected instead of this one, when it was not waited for any longer.
    gap: int | None = None
    #: What the handler returned, for each id, where it is kept.
    results: dict[str, bytes] = field(default_factory=_by_id)
    #: The rows as they were recorded in this transaction, of messages whose handler failed under a savepoint.
    failed: dict[str, Recorded] = field(default_factory=_by_id)
    #: The ids the handler was called for, in their order; may repeat.
    called: list[str] = field(default_factory=_ids_in_order)
    #: What a BROKEN transaction leaves unknown: who was called when, or after, it was left.
    unknown: set[str] = field(default_factory=_ids)
    #: Several ids were asked for, whatever was won: locks are waited for shortly.
    together: bool = False
    #: When the claim was answered, by `time.monotonic`.
    claimed_at: float = 0.0


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
    """A COMMIT that the database refused has persisted nothing: an ordinary failure (SEMANTICS 2.1)."""
    return (
        raised.database_error is not None
        and raised.database_error.fault is Fault.GUARD
        and dialect.refuses_commit
    )


def handled(
    handler: Handler, arrivals: Sequence[Arrival], called: list[str] | None = None
) -> Steps[list[Any]]:
    """Call the handler: once for all in batch mode, else for each message in its order.

    Args:
        called: gets the id of each message that it is called for.

    Returns: what it returned, as JSON where the handler keeps its results.
    """
    if handler.options.batch:
        calls = [call_of(handler, list(arrivals), called)]
    else:
        calls = [call_of(handler, arrival, called) for arrival in arrivals]
    answers: list[Any] = yield Invoke(calls, timeout_s(handler))
    return answers


def timeout_s(handler: Handler) -> float | None:
    timeout = handler.options.timeout
    return timeout.total_seconds() if timeout else None


def call_of(
    handler: Handler, work: Arrival | list[Arrival], called: list[str] | None = None
) -> Call:
    """The handler's call: bodies are decoded inside, so that a bad one is this message's failure."""
    # one object a message: closures would be ten for the garbage collector to visit
    return partial(_call_async if handler.is_async else _call, handler, work, called)


def _call(
    handler: Handler, work: Arrival | list[Arrival], called: list[str] | None, tx: Any
) -> bytes | None:
    run, given = _bound(handler, work, called)
    with run:
        answer = (
            handler.function(given, tx)
            if handler.options.transactional
            else handler.function(given)
        )
    # written inside of the call: what JSON cannot hold is the handler's failure
    return _kept(answer, run) if handler.options.keep_result else None


async def _call_async(
    handler: Handler, work: Arrival | list[Arrival], called: list[str] | None, tx: Any
) -> bytes | None:
    run, given = _bound(handler, work, called)
    with run:
        answer = await (
            handler.function(given, tx)
            if handler.options.transactional
            else handler.function(given)
        )
    return _kept(answer, run) if handler.options.keep_result else None


def _bound(
    handler: Handler, work: Arrival | list[Arrival], called: list[str] | None
) -> tuple[Run, Any]:
    if isinstance(work, list):
        if called is not None:
            called += [arrival.message_id for arrival in work]
        messages = [handler.bound(arrival) for arrival in work]
        return Run(handler.consumer, messages), messages
    if called is not None:
        called.append(work.message_id)
    message = handler.bound(work)
    return Run(handler.consumer, (message,), replied=work.replied), message


def _kept(value: Any, run: Run) -> bytes:
    if run.replied is not None:
        # the reply has left: what is kept stays what was replied
        return run.replied
    return as_json(value)


#: What else is written in the transaction that makes a message dead.
Dying = Callable[[Handler, Arrival, Failure, int], Steps[None]]


class Groups:
    """Calls a handler for groups of messages, inside of the transaction that has claimed them."""

    def __init__(self, store: InboxStore, limits: Limits, dying: Dying | None) -> None:
        self._store = store
        self._limits = limits
        self._dying = dying

    def called(
        self,
        ran: TransactionResult,
        handler: Handler,
        mine: Sequence[Arrival],
        size: int,
        token: str,
    ) -> Steps[tuple[list[Arrival], list[Any]]]:
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
            progress: Progress = yield InvokeGroups(
                calls, timeout_s(handler), handler.options.pipeline
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
                or refused(self._store.dialect, progress.raised)
            ):
                raise progress.raised
            group = waiting.popleft()
            alone = max(0, alone - 1)
            yield Undo()
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
            yield from self._record(ran, handler, culprit, progress.raised, token)
            if group:
                waiting.appendleft(group)
                alone += 1 if alone else 0
        return good, answers

    def _record(
        self, ran: TransactionResult, handler: Handler, arrival: Arrival, raised: Raised, token: str
    ) -> Steps[None]:
        retry = handler.options.retry
        failure = failures.drawn(
            failure_of(raised.error, raised.database_error, handler.options, self._limits),
            arrival,
            retry,
        )
        dead, attempts = yield from failures.record_own(
            self._store, handler.consumer, arrival, failure, retry, token=token
        )
        if dead and self._dying is not None:
            yield from self._dying(handler, arrival, failure, attempts)
        ran.failed[arrival.message_id] = Recorded(failure, dead, attempts)


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
        *,
        batching: Batching | None = None,
        dying: Dying | None = None,
    ) -> None:
        self.store = store
        self._batching = batching or Batching()
        self._limits = limits
        self._lease = lease
        self._groups = Groups(store, limits, dying)

    def fresh(
        self, handler: Handler, arrivals: Sequence[Arrival], group: int = 0
    ) -> Steps[TransactionResult]:
        """Run what is new among these messages, whose ids differ, in their order.

        Args:
            group: as many messages share a savepoint, and a failure is recorded here; with 0 there are
                no savepoints, and one failure is everybody's.
        """
        token = urandom(16).hex()
        claim = claims.claim(
            self.store,
            handler.consumer,
            # sorted bytewise: two batches that share ids then wait for each other instead of deadlocking
            sorted(arrivals, key=_bytewise) if len(arrivals) > 1 else arrivals,
            token=token,
            lock_timeout=self._limits.lock_timeout,
            idle_s=self._idle_s(handler),
            keep=handler.keeps_payload,
            wait=self._batching.duration if len(arrivals) > 1 else None,
        )
        checks = self._order_checks(handler, arrivals, token)
        return self.run(
            handler, arrivals, claim, token, keep=handler.keeps_payload, checks=checks, group=group
        )

    def leased(
        self, handler: Handler, arrivals: Sequence[Arrival], lease: str, group: int = 0
    ) -> Steps[TransactionResult]:
        """Run rows leased under `lease`; a row whose lease is another's by now is not fresh."""
        token = urandom(16).hex()
        claim = self._claim_leased(handler, arrivals, lease, token)
        # rows are leased in the order of their arrival, not of their versions
        checks = self._order_checks(handler, arrivals, token) if handler.options.sequence else []
        return self.run(
            handler, arrivals, claim, token, keep=handler.keeps_payload, checks=checks, group=group
        )

    def finished(
        self, handler: Handler, arrival: Arrival, lease: str, returned: list[Any]
    ) -> Steps[TransactionResult]:
        """Complete a leased row whose handler has run outside of any transaction."""
        token = urandom(16).hex()
        claim = self._claim_leased(handler, [arrival], lease, token)
        return self.run(
            handler, [arrival], claim, token, keep=handler.keeps_payload, returned=returned
        )

    def replayed(self, handler: Handler, arrival: Arrival) -> Steps[TransactionResult]:
        """Run a processed row once more; it keeps its payload, and what it was answered with."""
        if handler.options.keep_result and handler.options.reply_to is not None:
            replied = yield from self.store.result(handler.consumer, arrival.message_id)
            arrival = replace(arrival, replied=replied)
        token = urandom(16).hex()
        claim = claims.claim_replay(
            self.store,
            handler.consumer,
            [arrival.message_id],
            token=token,
            lock_timeout=self._limits.lock_timeout,
            idle_s=self._idle_s(handler),
        )
        return (yield from self.run(handler, [arrival], claim, token, keep=True))

    def finished_before(self, handler: Handler, arrivals: Sequence[Arrival]) -> Steps[set[str]]:
        """Read which of these ids are finished under the same payload: a duplicate needs no claim.

        A row that another transaction is about to commit is not seen: what is missing here is claimed.
        """
        (found,) = yield Begin((claims.duplicates(self.store, handler.consumer, arrivals),))
        yield Commit()
        return {row[0] for row in found.rows}

    def looks_up(self, handler: Handler, arrivals: Sequence[Arrival]) -> bool:
        """Say whether `finished_before` tells more, or sooner, than a claim."""
        return not handler.options.keep_result and claims.finds_duplicates(self.store, arrivals)

    def _claim_leased(
        self, handler: Handler, arrivals: Sequence[Arrival], lease: str, token: str
    ) -> tuple[Statement, ...]:
        return claims.claim_leased(
            self.store,
            handler.consumer,
            [arrival.message_id for arrival in arrivals],
            token=token,
            lease=lease,
            lock_timeout=self._limits.lock_timeout,
            idle_s=self._idle_s(handler),
            keep=handler.keeps_payload,
            wait=self._batching.duration if len(arrivals) > 1 else None,
        )

    def _idle_s(self, handler: Handler) -> float:
        timeout = handler.options.timeout
        lease_s = self._lease.duration.total_seconds()
        return max(lease_s, timeout.total_seconds() if timeout else 0.0)

    def run(
        self,
        handler: Handler,
        arrivals: Sequence[Arrival],
        claim: tuple[Statement, ...],
        token: str,
        *,
        keep: bool,
        checks: Sequence[Statement] = (),
        returned: list[Any] | None = None,
        group: int = 0,
    ) -> Steps[TransactionResult]:
        """BEGIN and claim; the handler on what was claimed; close and COMMIT.

        Args:
            checks: what is asked in the claim's round trip about messages that come first.
            returned: what the handler has returned when it has run already.
            group: messages that share a savepoint.
        """
        ran = TransactionResult(End.COMMITTED, together=len(arrivals) > 1)
        try:
            results = yield Begin((*claim, *checks) if checks else claim)
            ran.claimed_at = time.monotonic()
            found = results[len(claim) :]
            if checks:
                results = results[: len(claim)]
            won = claims.claimed(self.store, claim, results)
            if won is not None and len(won.ids) == len(arrivals):
                ran.fresh = won.ids
            else:
                yield from self._meet(ran, handler, arrivals, won, token)
        except StoreError as error:
            return (yield from self._not_claimed(error))
        if checks:
            self._look_at_order(handler, arrivals, ran, [result.rows for result in found])
            if ran.waiting:
                ran.end = End.WAITS
                yield Rollback()
                return ran
        mine = [arrival for arrival in arrivals if arrival.message_id in ran.fresh]
        if not mine:
            # nothing to keep; where the claim armed a guard in the database, only ROLLBACK lifts it,
            # elsewhere COMMIT is the cheaper way out
            yield Rollback() if self.store.dialect.has("arm") else Commit()
            return ran
        try:
            if returned is None and group and not handler.options.batch:
                mine, returned = yield from self._groups.called(ran, handler, mine, group, token)
            elif returned is None:
                if handler.options.pipeline:
                    yield Pipe()
                returned = yield from handled(handler, mine, ran.called)
        except Raised as raised:
            yield from self._raised(ran, raised, token)
            return ran
        except StoreError as error:
            yield from self._lost_savepoint(ran, error, token)
            return ran
        if handler.options.keep_result:
            ran.results = {
                arrival.message_id: result for arrival, result in zip(mine, returned, strict=True)
            }
        yield from self._close(ran, handler, mine, token, keep)
        return ran

    def _meet(
        self,
        ran: TransactionResult,
        handler: Handler,
        arrivals: Sequence[Arrival],
        won: claims.Won | None,
        token: str,
    ) -> Steps[None]:
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
        ran.existing.update((yield from self.store.classify(handler.consumer, others)))
        if won is None:
            ran.fresh = {
                message_id for message_id, row in ran.existing.items() if row.token == token
            }

    def _lost_savepoint(self, ran: TransactionResult, error: StoreError, token: str) -> Steps[None]:
        """A savepoint of txbox's is gone, or its record was refused: the handler left it, or the connection broke."""
        ran.error = ran.database_error = error
        ran.end = end_of_commit(error)
        if ran.end is End.BROKEN:
            ran.unknown = set(ran.called)
        else:
            yield from self._ask(ran, token)
        yield Discard() if ran.end in (End.LOST, End.BROKEN) else Rollback()

    def _order_checks(
        self, handler: Handler, arrivals: Sequence[Arrival], token: str
    ) -> list[Statement]:
        options, dialect = handler.options, self.store.dialect
        if options.sequence is not None:
            return [
                order.sequence_state(dialect, handler.consumer, arrival, options.gaps)
                for arrival in arrivals
            ]
        if not options.ordered:
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
                ran.waiting.add(arrival.message_id)
            elif versions.gap(sequence, gaps):
                ran.gap = versions.expected(gaps)

    def _close(
        self,
        ran: TransactionResult,
        handler: Handler,
        mine: Sequence[Arrival],
        token: str,
        keep: bool,
    ) -> Steps[None]:
        store, consumer = self.store, handler.consumer
        last = self._last(ran, handler, mine)
        try:
            if store.dialect.refuses_commit:
                yield Commit((claims.close(store, token), *last))
            else:
                # first the proof that this is still the claiming transaction: on a connection that a
                # handler left in autocommit, `complete` would commit by itself. In one step, since a
                # session writes what it put off, and releases its savepoint, before all of it
                ids = [arrival.message_id for arrival in mine]
                if ids:
                    last.insert(0, claims.complete(store, consumer, ids, token=token, keep=keep))
                results = yield Commit((claims.close(store, token), *last))
                if ids and results[1].count != len(ids):
                    ran.end, ran.unknown = End.BROKEN, set(ran.called)
        except Raised as raised:
            # a flush that the session put off until now
            yield from self._raised(ran, raised, token)
        except StoreError as error:
            ran.error = ran.database_error = error
            ran.end = end_of_commit(error)
            if ran.end is End.BROKEN:
                ran.unknown = set(ran.called)
            elif error.fault in (Fault.ABORTED, Fault.PREPARED) and store.dialect.has(
                "rollback_to_claim"
            ):
                # close itself met a transaction that had failed, or lost its plan to a rollback: whose was it?
                yield from self._ask(ran, token)
            yield Rollback() if ran.end in (End.RAISED, End.CONFLICT) else Discard()

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

    def _raised(self, ran: TransactionResult, raised: Raised, token: str) -> Steps[None]:
        """The handler raised: roll back, having asked whether this is still the transaction that claimed."""
        ran.error, ran.database_error = raised.error, raised.database_error
        ran.end = end_of_handler(raised, together=ran.together)
        if not refused(self.store.dialect, raised):
            yield from self._ask(ran, token)
            if raised.left and self.store.dialect.refuses_commit:
                # what was called before it was rolled back with the claim, and can run again
                ran.unknown = set(ran.called[-1:])
        yield Discard() if ran.end in (End.BROKEN, End.LOST) else Rollback()

    def _ask(self, ran: TransactionResult, token: str) -> Steps[None]:
        """Ask whether this is still the transaction that claimed.

        After a conflict only where that can be told: elsewhere it has rolled back the proof with the rest.
        """
        if ran.end is not End.RAISED and not (
            ran.end is End.CONFLICT and self.store.dialect.has("rollback_to_claim")
        ):
            return
        for _ in range(2):
            try:
                yield claims.still_claimed(self.store, token)
            except StoreError as error:
                if error.fault is Fault.PREPARED:
                    # psycopg's rollback has deallocated it: the next one is prepared anew
                    continue
                if error.fault is Fault.GUARD or savepoint_is_gone(error):
                    # somebody wrote outside of the transaction that is rolled back: a retry could write again
                    ran.error, ran.database_error, ran.end = error, error, End.BROKEN
                    ran.unknown = set(ran.called)
            return

    def _not_claimed(self, error: StoreError) -> Steps[TransactionResult]:
        """The claim failed: nothing has run."""
        if error.fault is Fault.LOCK_TIMEOUT:
            yield from self.store.lock_timed_out()
            return TransactionResult(End.LOCKED, error=error, database_error=error)
        yield Rollback()
        if error.fault in (Fault.CONFLICT, Fault.DUPLICATE, Fault.PREPARED):
            # DUPLICATE: the key's index is being rebuilt; reading again is what a duplicate needs
            return TransactionResult(End.CONFLICT, error=error, database_error=error)
        raise error


def _bytewise(arrival: Arrival) -> bytes:
    return arrival.message_id.encode()
