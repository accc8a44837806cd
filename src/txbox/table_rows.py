"""Rows of the table, run there: those that a worker has leased, and processed ones once more."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from txbox.calls import handled
from txbox.endings import Endings, lost
from txbox.failure import failure_of
from txbox.handlers import Handler
from txbox.outcome import Outcome, Status
from txbox.paces import Paces, divides
from txbox.patience import persistently
from txbox.ran import End
from txbox.settled import Settled
from txbox.steps import Begin, Commit, Raised, Steps
from txbox.store import failures, leases
from txbox.store.codec import Arrival, Leased
from txbox.transaction import HandlerTransaction
from txbox.turns import AGAIN, GAP_LOOK_S, Turns

_RELEASED_S = 1.0


class TableRows:
    """Runs rows that stand in the table; whoever holds a row's lease token may finish it."""

    def __init__(
        self, transaction: HandlerTransaction, endings: Endings, paces: Paces, turns: Turns
    ) -> None:
        self.transaction = transaction
        self._endings = endings
        self._paces = paces
        self._turns = turns
        self._in_flight = turns.in_flight
        self._store = endings.store
        self._events = endings.events
        self._limits = endings.limits

    def run_leased(self, handler: Handler, leased: Leased, lease_token: str) -> Steps[Settled]:
        """Process one row that this worker has leased.

        Guarantee: a worker whose lease was given to another can run the handler, it cannot commit.
        """
        consumer, arrival = handler.consumer, leased.arrival
        if not (yield from self._turns.entered(consumer, arrival.message_id)):
            yield from self._given_back(handler, arrival, lease_token)
            return Settled(Outcome.IN_PROGRESS)
        try:
            if handler.options.transactional:
                return (yield from self._run_row(handler, arrival, lease_token))
            return (yield from self._run_untransacted(handler, arrival, lease_token))
        finally:
            self._in_flight.leave(consumer, arrival.message_id)

    def run_leased_many(
        self, handler: Handler, rows: Sequence[Leased], lease_token: str
    ) -> Steps[list[Settled]]:
        """Process rows that this worker has leased, in their order, in one transaction where that can be.

        Guarantee: as `run_leased`.
        """
        settled: dict[str, Settled] = {}
        free = [
            leased.arrival
            for leased in rows
            if self._in_flight.enter(handler.consumer, leased.arrival.message_id) is None
        ]
        try:
            if len(free) > 1 and divides(handler, batch=True) and not handler.options.in_order:
                settled = yield from self._run_rows(handler, free, lease_token)
        finally:
            self._in_flight.leave(handler.consumer, *[arrival.message_id for arrival in free])
        answers: list[Settled] = []
        for leased in rows:
            done = settled.get(leased.arrival.message_id)
            answers.append(done or (yield from self.run_leased(handler, leased, lease_token)))
        return answers

    def _run_rows(
        self, handler: Handler, arrivals: Sequence[Arrival], lease_token: str
    ) -> Steps[dict[str, Settled]]:
        """Run leased rows together; those that are missing from the answer are to be run alone."""
        pace = self._paces.of(handler)
        group = self._paces.group(handler, pace, len(arrivals))
        while True:
            started = time.monotonic()
            ran = yield from self.transaction.leased(handler, arrivals, lease_token, group)
            if ran.end is End.COMMITTED:
                pace.committed(len(arrivals), time.monotonic() - ran.claimed_at, len(ran.failed))
                return {
                    arrival.message_id: self._endings.ran(handler, arrival, ran)
                    if arrival.message_id in ran.fresh
                    # the lease ran out and the row is another's
                    else Settled(Outcome.IN_PROGRESS)
                    for arrival in arrivals
                }
            if ran.end is End.AMBIGUOUS:
                settled: dict[str, Settled] = {}
                for arrival in arrivals:
                    settled[arrival.message_id] = yield from self._decided(
                        handler, arrival, lease_token, started
                    )
                return settled
            if ran.end in (End.CONFLICT, End.LOCKED):
                pace.conflicted(len(arrivals))
            if ran.end is End.BROKEN:
                pace.conflicted(len(arrivals))
                return (yield from self._endings.left(handler, arrivals, ran, token=lease_token))
            if ran.end is not End.RAISED or group or not divides(handler):
                return {}
            pace.failed(len(arrivals))
            group = pace.group or len(arrivals)

    def _run_row(self, handler: Handler, arrival: Arrival, lease_token: str) -> Steps[Settled]:
        started, tries = time.monotonic(), 0
        while True:
            ran = yield from self.transaction.leased(handler, [arrival], lease_token)
            if ran.end is End.COMMITTED:
                if ran.fresh:
                    self._paces.of(handler).committed(1, time.monotonic() - ran.claimed_at)
                    return self._endings.processed(handler, arrival, started, ran)
                # the fence matched nothing: the lease ran out and the row is another's
                return Settled(Outcome.IN_PROGRESS)
            if ran.end is End.WAITS:
                yield from self._given_back(handler, arrival, lease_token, GAP_LOOK_S)
                return Settled(Outcome.DEFERRED)
            if ran.end in (End.CONFLICT, End.LOCKED, End.LOST):
                tries += 1
                if (yield from self._turns.again(handler, ran, tries)):
                    continue
            unclaimed = ran.end in AGAIN and not ran.fresh
            if unclaimed or ran.end in (End.AMBIGUOUS, End.LOCKED):
                return (yield from self._decided(handler, arrival, lease_token, started))
            failure = self._endings.failure(handler, ran)
            recorded = yield from self._endings.recorded(
                handler, arrival, failure, token=lease_token
            )
            if recorded is None and ran.end is End.REFUSED:
                # it took effect, whatever was answered
                return (yield from self._as_it_stands(handler, arrival, started))
            return recorded or Settled(Outcome.IN_PROGRESS)

    def _given_back(
        self, handler: Handler, arrival: Arrival, lease_token: str, delay_s: float = _RELEASED_S
    ) -> Steps[int]:
        return persistently(
            lambda: leases.release(
                self._store,
                handler.consumer,
                [arrival.message_id],
                token=lease_token,
                delay_s=delay_s,
            ),
            self._events,
            consumer=handler.consumer,
        )

    def _decided(
        self, handler: Handler, arrival: Arrival, lease_token: str, started: float
    ) -> Steps[Settled]:
        """Decide a doubt by the fenced release: it waits for a commit in flight, then matches nothing."""
        if (yield from self._given_back(handler, arrival, lease_token)):
            return Settled(Outcome.DEFERRED)
        return (yield from self._as_it_stands(handler, arrival, started))

    def _as_it_stands(self, handler: Handler, arrival: Arrival, started: float) -> Steps[Settled]:
        yield Begin()
        rows = yield from self._store.classify(handler.consumer, [arrival.message_id])
        yield Commit()
        row = rows.get(arrival.message_id)
        if row is not None and row.status == Status.PROCESSED:
            return self._endings.processed(handler, arrival, started)
        return Settled(Outcome.IN_PROGRESS)

    def _run_untransacted(
        self, handler: Handler, arrival: Arrival, lease_token: str
    ) -> Steps[Settled]:
        """Run a handler outside any transaction and complete its row, fenced, afterwards."""
        started = time.monotonic()
        try:
            returned = yield from handled(handler, [arrival])
        except Raised as raised:
            failure = failure_of(raised.error, raised.store, handler.options, self._limits)
            recorded = yield from self._endings.recorded(
                handler, arrival, failure, token=lease_token
            )
            return recorded or Settled(Outcome.IN_PROGRESS)
        return (
            yield from persistently(
                lambda: self._completed(handler, arrival, lease_token, started, returned),
                self._events,
                consumer=handler.consumer,
            )
        )

    def _completed(
        self,
        handler: Handler,
        arrival: Arrival,
        lease_token: str,
        started: float,
        returned: list[Any],
    ) -> Steps[Settled]:
        ran = yield from self.transaction.finished(handler, arrival, lease_token, returned)
        if ran.end is not End.COMMITTED:
            raise lost(ran)
        if ran.fresh:
            return self._endings.processed(handler, arrival, started, ran)
        # another's by now, or committed by the COMMIT whose answer was lost
        return (yield from self._as_it_stands(handler, arrival, started))

    def replay(self, handler: Handler, arrival: Arrival) -> Steps[Settled]:
        """Run a processed message once more; when it fails its row stays `processed` (SEMANTICS 7.4)."""
        started, tries = time.monotonic(), 0
        while True:
            ran = yield from self.transaction.replayed(handler, arrival)
            if ran.end is End.COMMITTED:
                if ran.fresh:
                    return self._endings.processed(handler, arrival, started)
                return Settled(Outcome.IN_PROGRESS)
            if ran.end in (End.CONFLICT, End.LOCKED):
                tries += 1
                if (yield from self._turns.again(handler, ran, tries)):
                    continue
            if ran.end in (End.AMBIGUOUS, End.LOST, End.LOCKED):
                raise lost(ran)
            failure = self._endings.failure(handler, ran)
            yield Begin(
                (
                    failures.attempt(
                        self._store, handler.consumer, arrival, failure, status="replay failed"
                    ),
                )
            )
            yield Commit()
            return Settled(Outcome.FAILED, arrival.message.attempt)
