"""The path of a message: what follows each way its transaction can end.

Every path is a generator of steps, so that the same lines serve sync and async handlers, and every
statement boundary is a crash point. Chapter and verse: SEMANTICS 2 to 4.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from txbox.deliveries import Deliveries
from txbox.endings import Endings, Letters
from txbox.events import Events
from txbox.in_flight import InFlight
from txbox.paces import Paces
from txbox.patience import persistently
from txbox.policy import Batching, Lease, Limits
from txbox.steps import Steps
from txbox.store.inbox import InboxStore
from txbox.table_rows import TableRows
from txbox.transaction import HandlerTransaction
from txbox.turns import Turns

T = TypeVar("T")


class InboxProtocol:
    """Carries messages of one app through its inbox."""

    def __init__(
        self,
        store: InboxStore,
        events: Events,
        limits: Limits,
        lease: Lease,
        *,
        batching: Batching | None = None,
        letters: Letters | None = None,
    ) -> None:
        batching = batching or Batching()
        self.store = store
        self.events = events
        self.limits = limits
        self.lease = lease
        self.in_flight = InFlight()
        self.paces = Paces(store, batching)
        endings = Endings(store, events, limits, letters)
        transaction = HandlerTransaction(
            store, limits, lease, batching=batching, dying=endings.dying
        )
        turns = Turns(self.in_flight, limits, events)
        self.deliveries = Deliveries(transaction, endings, self.paces, turns)
        self.rows = TableRows(transaction, endings, self.paces, turns)
        # bound, not wrapped: every message passes here
        self.deliver = self.deliveries.deliver
        self.run_leased = self.rows.run_leased
        self.run_leased_many = self.rows.run_leased_many
        self.replay = self.rows.replay
        self.met = endings.met
        self.held = endings.held
        self.quarantine = endings.quarantine

    def persistently(
        self,
        operation: Callable[[], Steps[T]],
        *,
        consumer: str | None = None,
        for_s: float | None = None,
        stop: Callable[[], bool] | None = None,
    ) -> Steps[T]:
        """Repeat an operation until the database answers; see `patience.persistently`."""
        return persistently(operation, self.events, consumer=consumer, for_s=for_s, stop=stop)
