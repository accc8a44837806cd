"""Deliveries, from their claim to an outcome each; a batch that fails is taken apart."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence

from txbox.endings import Endings, lost, where
from txbox.errors import Fault, StoreError
from txbox.events import MessageDuplicate, MessageWaits
from txbox.handlers import Handler
from txbox.in_flight import Holder
from txbox.outcome import Outcome
from txbox.paces import Paces, divides
from txbox.ran import End, Ran
from txbox.settled import DUPLICATE, Settled
from txbox.steps import Steps
from txbox.store.codec import Arrival
from txbox.transaction import HandlerTransaction
from txbox.turns import AGAIN, GAP_LOOK_S, Turns


class Deliveries:
    """Runs what a source delivers in the transaction that claims it."""

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

    def deliver(
        self, handler: Handler, arrivals: Sequence[Arrival], holder: Holder | None = None
    ) -> Steps[dict[str, Settled]]:
        """Process deliveries whose ids differ; returns the outcome of each id.

        Ids that another thread of this process works on are waited for, up to the lock time-out.

        Args:
            holder: who runs one batch behind another, see `in_flight.Holder`.

        Guarantee: PROCESSED and the effects of the handler's transaction are one commit. After a
        crash anywhere, delivering again processes what was not processed, and nothing twice.
        """
        ids = [arrival.message_id for arrival in arrivals]
        if self._in_flight.enter_all(handler.consumer, ids, holder):
            try:
                return (yield from self._claim_and_run(handler, arrivals))
            finally:
                self._in_flight.leave(handler.consumer, *ids, holder=holder)
        return (yield from self._deliver_what_is_free(handler, arrivals, holder))

    def _deliver_what_is_free(
        self, handler: Handler, arrivals: Sequence[Arrival], holder: Holder | None
    ) -> Steps[dict[str, Settled]]:
        """Process first what nobody works on, then the others one by one: who waits for an id holds none."""
        consumer = handler.consumer
        settled: dict[str, Settled] = {}
        mine: list[Arrival] = []
        busy: list[Arrival] = []
        keys: set[str] = set()
        try:
            for arrival in arrivals:
                key = arrival.message.key if handler.options.in_order else None
                if (
                    key in keys
                    or self._in_flight.enter(consumer, arrival.message_id, holder) is not None
                ):
                    # a message that another thread works on holds its key
                    busy.append(arrival)
                    if key is not None:
                        keys.add(key)
                else:
                    mine.append(arrival)
            if mine:
                settled.update((yield from self._claim_and_run(handler, mine)))
        finally:
            self._in_flight.leave(
                consumer, *[arrival.message_id for arrival in mine], holder=holder
            )
        held: set[str] = set()
        for arrival in busy:
            key, own_id = (
                arrival.message.key if handler.options.in_order else None,
                arrival.message_id,
            )
            if key in held or not (yield from self._turns.entered(consumer, own_id, holder)):
                settled[own_id] = self._endings.held(handler, arrival)
                if key is not None:
                    held.add(key)
                continue
            try:
                settled.update((yield from self._claim_and_run(handler, [arrival])))
            finally:
                self._in_flight.leave(consumer, own_id, holder=holder)
            if key is not None and not settled[own_id].outcome.settles:
                held.add(key)
        return settled

    def _claim_and_run(
        self, handler: Handler, arrivals: Sequence[Arrival]
    ) -> Steps[dict[str, Settled]]:
        if len(arrivals) == 1:
            return self._run_alone(handler, arrivals[0])
        return self._run_together(handler, arrivals)

    def _run_alone(self, handler: Handler, arrival: Arrival) -> Steps[dict[str, Settled]]:
        """Claim and run one message; retries conflicts, claims again when in doubt, records a failure."""
        tries = 0
        while True:
            ran = yield from self.transaction.fresh(handler, [arrival])
            if ran.end is End.COMMITTED:
                self._paces.of(handler).met(1, 1 - len(ran.fresh))
                if settled := (yield from self._committed(handler, [arrival], ran)):
                    return settled
                continue
            if ran.end is End.WAITS:
                if settled := (yield from self._stored_behind(handler, [arrival])):
                    return settled
                # it is there already, which the next claim meets
                continue
            if ran.end in AGAIN:
                # a doubt is decided by claiming again on another connection, never by SELECT; while the
                # database is away that raises, and the budget is patience's
                tries += 1
                if (yield from self._turns.again(handler, ran, tries)):
                    continue
            if ran.end is End.LOCKED:
                return {arrival.message_id: self._endings.held(handler, arrival)}
            if ran.end is End.AMBIGUOUS or (ran.end in AGAIN and not ran.fresh):
                # nothing of the handler's is known to have failed, so there is no attempt to record
                raise lost(ran)
            # a handler that loses its connection each time, while the next one is there, is a failure too
            failure = self._endings.failure(handler, ran)
            recorded = yield from self._endings.recorded(handler, arrival, failure, token="")
            if recorded is not None:
                return {arrival.message_id: recorded}
            # the row is somebody else's by now, or that of a COMMIT which took effect whatever was answered:
            # claim again, which says whose

    def _run_together(
        self, handler: Handler, arrivals: Sequence[Arrival]
    ) -> Steps[dict[str, Settled]]:
        """Claim and run a batch; isolates the culprit of one that fails, whose neighbours go on."""
        pace = self._paces.of(handler)
        waiting: list[Arrival] = list(arrivals)
        settled: dict[str, Settled] = {}
        group, doubted = self._paces.group(handler, pace, len(waiting)), False
        if looked := pace.looks_first and self.transaction.looks_up(handler, waiting):
            settled = yield from self._finished_before(handler, waiting)
            waiting = [arrival for arrival in waiting if arrival.message_id not in settled]
        while len(waiting) > 1:
            ran = yield from self.transaction.fresh(handler, waiting, group)
            if ran.end is End.BROKEN:
                pace.conflicted(len(waiting))
            if ran.end is End.COMMITTED:
                if not looked:
                    pace.met(len(waiting), len(waiting) - len(ran.fresh))
                settled.update((yield from self._committed(handler, waiting, ran)))
            elif ran.end is End.WAITS:
                behind = [arrival for arrival in waiting if arrival.message_id in ran.waiting]
                settled.update((yield from self._stored_behind(handler, behind)))
            elif (
                ran.end in (End.AMBIGUOUS, End.LOST)
                and not doubted
                and (yield from self._turns.again(handler, ran, 1))
            ):
                doubted = True
            elif ran.end is End.RAISED and not group and divides(handler):
                pace.failed(len(waiting))
                group = pace.group or len(waiting)
            elif ran.end is End.BROKEN and (
                left := (yield from self._endings.left(handler, waiting, ran))
            ):
                settled.update(left)
            else:
                settled.update((yield from self._apart(handler, waiting, ran.end)))
            waiting = [arrival for arrival in waiting if arrival.message_id not in settled]
        for arrival in waiting:
            settled.update((yield from self._run_alone(handler, arrival)))
        return settled

    def _committed(
        self, handler: Handler, arrivals: Sequence[Arrival], ran: Ran
    ) -> Steps[dict[str, Settled]]:
        """The outcome of each message; an id that is missing was pruned between two statements: claim again."""
        pace = self._paces.of(handler)
        pace.committed(len(arrivals), time.monotonic() - ran.claimed_at, len(ran.failed))
        settled: dict[str, Settled] = {}
        for arrival in arrivals:
            if arrival.message_id in ran.fresh:
                settled[arrival.message_id] = self._endings.ran(handler, arrival, ran)
            elif row := ran.existing.get(arrival.message_id):
                settled[arrival.message_id] = yield from self._endings.met(handler, arrival, row)
        return settled

    def _finished_before(
        self, handler: Handler, arrivals: Sequence[Arrival]
    ) -> Steps[dict[str, Settled]]:
        """Look a batch up before it is claimed, when most of what came last had been finished before."""
        finished = yield from self.transaction.finished_before(handler, arrivals)
        self._paces.of(handler).met(len(arrivals), len(finished))
        if self._events:
            for arrival in arrivals:
                if arrival.message_id in finished:
                    self._events.emit(MessageDuplicate(**where(handler, arrival)))
        return dict.fromkeys(finished, DUPLICATE)

    def _apart(
        self, handler: Handler, arrivals: Sequence[Arrival], end: End
    ) -> Steps[dict[str, Settled]]:
        """Divide a batch that failed, from left to right, until the culprit costs only itself.

        After a conflict each message is alone at once: halves would meet the same rows in the same order.
        """
        size = 1
        if end in (End.CONFLICT, End.LOCKED):
            self._paces.of(handler).conflicted(len(arrivals))
        elif end in (End.RAISED, End.REFUSED):
            size = (len(arrivals) + 1) // 2
        settled: dict[str, Settled] = {}
        keys: set[str] = set()
        for at in range(0, len(arrivals), size):
            part: list[Arrival] = []
            for arrival in arrivals[at : at + size]:
                if handler.options.in_order and arrival.message.key in keys:
                    settled[arrival.message_id] = self._endings.held(handler, arrival)
                else:
                    part.append(arrival)
            if not part:
                continue
            settled.update((yield from self._claim_and_run(handler, part)))
            keys.update(
                arrival.message.key
                for arrival in part
                if not settled[arrival.message_id].outcome.settles
                and arrival.message.key is not None
            )
        return settled

    def _stored_behind(
        self, handler: Handler, arrivals: Sequence[Arrival]
    ) -> Steps[dict[str, Settled]]:
        """Store messages behind what they wait for; returns those that were stored."""
        by_version = handler.options.sequence is not None
        try:
            token, delay_s = secrets.token_hex(16), GAP_LOOK_S if by_version else 0.0
            storing = self._store.storing(handler.consumer, arrivals, token=token, delay_s=delay_s)
            results = yield self._store.begin_bounded(self._limits.lock_timeout, storing)
            fresh = yield from self._store.stored(
                handler.consumer, arrivals, results[-1], token=token
            )
            yield self._store.commit_bounded()
        except StoreError as error:
            if error.fault is not Fault.LOCK_TIMEOUT:
                raise
            yield from self._store.lock_timed_out()
            return {
                arrival.message_id: self._endings.held(handler, arrival) for arrival in arrivals
            }
        if self._events:
            for arrival in arrivals:
                if arrival.message_id in fresh:
                    self._events.emit(MessageWaits(**where(handler, arrival)))
        return dict.fromkeys(fresh, Settled(Outcome.DEFERRED))
