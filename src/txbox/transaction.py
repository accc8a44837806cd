"""The transaction around a handler: claim, handler, close, COMMIT; and the ways it can end (SEMANTICS 2)."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from txbox.cause import Run
from txbox.errors import Fault, StoreError
from txbox.handlers import Handler
from txbox.policy import Lease, Limits
from txbox.steps import Begin, Commit, Discard, Invoke, Raised, Rollback, Statement, Steps
from txbox.store.codec import Arrival
from txbox.store.inbox import Existing, InboxStore


class End(Enum):
    """How a transaction around a handler ended."""

    COMMITTED = "committed"
    RAISED = "raised"  # the handler, or the database on its behalf: rolled back
    BROKEN = "broken"  # the handler left the claiming transaction
    CONFLICT = "conflict"  # deadlock or serialization failure: rolled back
    LOCKED = "locked"  # another transaction holds an id
    LOST = "lost"  # the connection is gone before COMMIT was sent: rolled back by the server
    AMBIGUOUS = "ambiguous"  # the COMMIT may have taken effect


@dataclass(slots=True)
class Ran:
    """A transaction that has ended, and what it met."""

    end: End
    fresh: set[str] = field(default_factory=set[str])
    existing: dict[str, Existing] = field(default_factory=dict[str, Existing])
    error: Exception | None = None
    store: StoreError | None = None


class HandlerTransaction:
    """Runs a handler between a claim and a close.

    Guarantee: End.COMMITTED means that the claimed rows and all that the handler wrote are one
    commit; every other end means that this transaction persisted nothing, but for AMBIGUOUS.
    """

    def __init__(self, store: InboxStore, limits: Limits, lease: Lease) -> None:
        self.store = store
        self._limits = limits
        self._lease = lease

    def fresh(self, handler: Handler, arrivals: Sequence[Arrival]) -> Steps[Ran]:
        """Run what is new among these messages, whose ids differ and are sorted."""
        token = secrets.token_hex(16)
        claim = self.store.claim(
            handler.consumer,
            arrivals,
            token=token,
            lock_timeout=self._limits.lock_timeout,
            idle_s=self._idle_s(handler),
            keep=handler.keeps_payload,
        )
        return self.run(handler, arrivals, claim, token, keep=handler.keeps_payload)

    def leased(self, handler: Handler, arrival: Arrival, lease: str) -> Steps[Ran]:
        """Run a row leased under `lease`; nothing is fresh when the lease is another's by now."""
        token = secrets.token_hex(16)
        claim = self._claim_leased(handler, arrival, lease, token)
        return self.run(handler, [arrival], claim, token, keep=handler.keeps_payload)

    def finished(self, handler: Handler, arrival: Arrival, lease: str) -> Steps[Ran]:
        """Complete a leased row whose handler has run outside of any transaction."""
        token = secrets.token_hex(16)
        claim = self._claim_leased(handler, arrival, lease, token)
        return self.run(handler, [arrival], claim, token, keep=handler.keeps_payload, call=False)

    def replayed(self, handler: Handler, arrival: Arrival) -> Steps[Ran]:
        """Run a processed row once more; it keeps its payload."""
        token = secrets.token_hex(16)
        claim = self.store.claim_replay(
            handler.consumer,
            [arrival.message_id],
            token=token,
            lock_timeout=self._limits.lock_timeout,
            idle_s=self._idle_s(handler),
        )
        return self.run(handler, [arrival], claim, token, keep=True)

    def _claim_leased(
        self, handler: Handler, arrival: Arrival, lease: str, token: str
    ) -> tuple[Statement, ...]:
        return self.store.claim_leased(
            handler.consumer,
            [arrival.message_id],
            token=token,
            lease=lease,
            lock_timeout=self._limits.lock_timeout,
            idle_s=self._idle_s(handler),
            keep=handler.keeps_payload,
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
        call: bool = True,
    ) -> Steps[Ran]:
        """BEGIN and claim; the handler on what was claimed; close and COMMIT.

        Args:
            call: False when the handler has run already.
        """
        store, consumer = self.store, handler.consumer
        ran = Ran(End.COMMITTED)
        try:
            results = yield Begin(claim)
            fresh = store.claimed(claim, results)
            if fresh is None or len(fresh) < len(arrivals):
                won = fresh or ()
                wanted = [own.message_id for own in arrivals if own.message_id not in won]
                ran.existing = yield from store.classify(consumer, wanted)
                if fresh is None:
                    fresh = {own for own, row in ran.existing.items() if row.token == token}
            ran.fresh = fresh
        except StoreError as error:
            return (yield from self._not_claimed(error))
        mine = [arrival for arrival in arrivals if arrival.message_id in ran.fresh]
        if not mine:
            # nothing to keep; where the claim armed a guard in the database, only ROLLBACK lifts it,
            # elsewhere COMMIT is the cheaper way out
            yield Rollback() if store.dialect.has("arm") else Commit()
            return ran
        if call:
            try:
                yield from handled(handler, mine)
            except Raised as raised:
                yield from self._raised(ran, raised, token)
                return ran
        yield from self._close(ran, consumer, mine, token, keep)
        return ran

    def _close(
        self, ran: Ran, consumer: str, mine: Sequence[Arrival], token: str, keep: bool
    ) -> Steps[None]:
        store = self.store
        try:
            if store.dialect.refuses_commit:
                yield Commit((store.close(token),))
            else:
                # first the proof that this is still the claiming transaction: on a connection that a
                # handler left in autocommit, `complete` would commit by itself. In one step, since a
                # session writes what it put off, and releases its savepoint, before all of it
                ids = [own.message_id for own in mine]
                complete = store.complete(consumer, ids, token=token, keep=keep)
                results = yield Commit((store.close(token), complete))
                if results[-1].count != len(ids):
                    ran.end = End.BROKEN
        except Raised as raised:
            # a flush that the session put off until now
            yield from self._raised(ran, raised, token)
        except StoreError as error:
            ran.error = ran.store = error
            ran.end = _end_of_commit(error)
            yield Discard() if ran.end in (End.AMBIGUOUS, End.BROKEN, End.LOST) else Rollback()

    def _raised(self, ran: Ran, raised: Raised, token: str) -> Steps[None]:
        """The handler raised: roll back, having asked whether this is still the transaction that claimed."""
        ran.error, ran.store = raised.error, raised.store
        ran.end = _end_of_handler(raised)
        # a COMMIT that the database refused has persisted nothing: an ordinary failure (SEMANTICS 2.1)
        refused = (
            ran.store is not None
            and ran.store.fault is Fault.GUARD
            and self.store.dialect.refuses_commit
        )
        if ran.end is End.RAISED and not refused:
            try:
                yield self.store.close(token)
            except StoreError as error:
                if error.fault is Fault.GUARD:
                    # it wrote outside of the transaction that is rolled back: a retry could write again
                    ran.error, ran.store, ran.end = error, error, End.BROKEN
        yield Discard() if ran.end in (End.BROKEN, End.LOST) else Rollback()

    def _not_claimed(self, error: StoreError) -> Steps[Ran]:
        """The claim failed: nothing has run."""
        yield Rollback()
        if error.fault is Fault.LOCK_TIMEOUT:
            if not self.store.dialect.claim_bounds_wait:
                # the bounded wait is a setting of the session there, and outlives the rollback
                yield Begin((self.store.dialect.statement("restore_lock_timeout"),))
                yield Rollback()
            return Ran(End.LOCKED, error=error, store=error)
        if error.fault in (Fault.CONFLICT, Fault.DUPLICATE):
            # DUPLICATE: the key's index is being rebuilt; reading again is what a duplicate needs
            return Ran(End.CONFLICT, error=error, store=error)
        raise error


def handled(handler: Handler, arrivals: Sequence[Arrival]) -> Steps[None]:
    """Call the handler: once for all in batch mode, else for each message in its order."""
    timeout = handler.options.timeout
    timeout_s = timeout.total_seconds() if timeout else None
    if handler.options.batch:
        yield Invoke(_call(handler, list(arrivals)), timeout_s)
        return
    for arrival in arrivals:
        yield Invoke(_call(handler, arrival), timeout_s)


def _call(handler: Handler, work: Arrival | list[Arrival]) -> Callable[[Any], Any]:
    """The handler's call: bodies are decoded inside, so that a bad one is this message's failure."""
    function, transactional = handler.function, handler.options.transactional

    def bound() -> tuple[Run, Any]:
        if isinstance(work, list):
            messages = [handler.bound(own) for own in work]
            return Run(handler.consumer, messages), messages
        message = handler.bound(work)
        return Run(handler.consumer, (message,)), message

    def call(tx: Any) -> Any:
        run, given = bound()
        with run:
            return function(given, tx) if transactional else function(given)

    async def call_async(tx: Any) -> Any:
        run, given = bound()
        with run:
            return await (function(given, tx) if transactional else function(given))

    return call_async if handler.is_async else call


def _end_of_handler(raised: Raised) -> End:
    fault = raised.store.fault if raised.store else None
    if fault is Fault.UNAVAILABLE and raised.lost:
        return End.LOST
    if fault is Fault.CONFLICT:
        return End.CONFLICT
    return End.RAISED


def _end_of_commit(error: StoreError) -> End:
    if not error.definite:
        return End.AMBIGUOUS
    if error.fault is Fault.GUARD:
        return End.BROKEN
    if error.fault is Fault.CONFLICT:
        return End.CONFLICT
    if error.fault is Fault.UNAVAILABLE:
        return End.LOST
    return End.RAISED
