"""Replaying kept messages: through their own handler once more, or into the inbox of another consumer."""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

from txbox.admin.queries import Audit, Queries
from txbox.admin.tables import InboxFilter
from txbox.connections.base import Database
from txbox.errors import ConfigurationError, Fault, StoreError, UnusableMessage
from txbox.events import Events
from txbox.handlers import Handler, Handlers
from txbox.identity import payload_hash
from txbox.outbox import Routes
from txbox.outcome import Outcome, Status
from txbox.policy import Lease, Limits, RelayPolicy, Retention
from txbox.processing.attempt import InboxProtocol
from txbox.session import Session
from txbox.store.codec import Arrival
from txbox.store.inbox import InboxStore

T = TypeVar("T")
#: Called after each batch with the number of messages done so far.
Progress = Callable[[int], None]

# each message of a batch brings its payload along
_BATCH = 50
_FAILURES_NAMED = 20
_CONFLICT_PAUSE_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayFailure:
    """A message whose replay failed; its row is `processed` as before."""

    message_id: str
    error_type: str | None
    error: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """What a replay did, or in a dry run would do.

    Attributes:
        count: messages met; the others add up to it, except in a dry run.
        processed: handlers that ran and committed.
        failed: handlers that failed; the first of them are named in `failures`.
        stored: rows that became pending for the other consumer.
        duplicates: messages that the other consumer has already.
        skipped: messages that no handler takes, or that another transaction holds.
    """

    dry_run: bool
    count: int = 0
    processed: int = 0
    failed: int = 0
    stored: int = 0
    duplicates: int = 0
    skipped: int = 0
    failures: tuple[ReplayFailure, ...] = ()


class Application(Protocol):
    """What an operator needs of an App."""

    database: Database
    store: InboxStore
    protocol: InboxProtocol
    handlers: Handlers
    events: Events
    limits: Limits
    lease: Lease
    retention: Retention
    relaying: RelayPolicy

    @property
    def routes(self) -> Routes | None:
        """None when there is a database and no App around it."""
        ...

    async def check_schema(self, db: Session) -> None: ...


@dataclass(slots=True, kw_only=True)
class Replay:
    """One replay: reads in batches, and runs or copies what it reads; without an audit it is a dry run.

    Attributes:
        drive: carries an operation out on any connection.
        run: the same on a sync or an async connection, as its first argument, a handler, is.
    """

    app: Application
    queries: Queries
    drive: Callable[..., Any]
    run: Callable[..., Any]
    where: InboxFilter
    as_consumer: str | None
    audit: Audit | None
    counts: Counter[str] = field(default_factory=Counter[str])
    failures: list[ReplayFailure] = field(default_factory=list[ReplayFailure])

    def carried_out(self, progress: Progress | None) -> Replayed:
        """Replay what the filter means."""
        self._check()
        if self.as_consumer is None:
            self.where = replace(self.where, status=Status.PROCESSED)
        newest = self.drive(
            self.queries.page, InboxFilter(consumer=self.where.consumer), limit=1
        ).rows
        upto, after = newest[0].arrival if newest else 0, -1
        while True:
            found = self.drive(self.queries.kept, self.where, after=after, limit=_BATCH)
            batch = [leased for leased in found if leased.number <= upto]
            if not batch:
                break
            after = batch[-1].number
            self.counts["count"] += len(batch)
            if self.audit is not None:
                arrivals = [leased.arrival for leased in batch]
                if self.as_consumer is None:
                    self._run_again(arrivals, self.audit)
                else:
                    self._copy(arrivals, self.as_consumer, self.audit)
            if progress is not None:
                progress(self.counts["count"])
        return Replayed(dry_run=self.audit is None, failures=tuple(self.failures), **self.counts)

    def _check(self) -> None:
        where, as_consumer = self.where, self.as_consumer
        if where.consumer is None:
            raise ConfigurationError("A replay is of one consumer: say which.")
        for name in ("error_type", "fingerprint", "older_than"):
            if getattr(where, name) is not None:
                raise ConfigurationError(
                    f"A replay cannot be filtered by {name}: use message_id, topic, type or key."
                )
        if as_consumer is None and where.status not in (None, Status.PROCESSED):
            raise ConfigurationError(
                f"Only processed messages can be replayed, not {where.status} ones: use retry for those."
            )
        if as_consumer == where.consumer:
            raise ConfigurationError(
                f"Consumer {as_consumer!r} has these messages already: leave the other consumer out to run them again."
            )
        known = self.app.handlers.consumers()
        needed = where.consumer if as_consumer is None else as_consumer
        if needed not in known and (as_consumer is None or known):
            raise ConfigurationError(
                f"No handler is registered for consumer {needed!r}: "
                + (f"this app has {', '.join(sorted(known))}." if known else "a replay needs the App.")
            )  # fmt: skip

    def _run_again(self, arrivals: Sequence[Arrival], audit: Audit) -> None:
        self.drive(self.queries.announce, audit, "replay", self.where, len(arrivals))
        for arrival in arrivals:
            outcome = Outcome.DEFERRED
            handler = self._handler(arrival, str(self.where.consumer))
            if handler is not None:
                outcome = self.run(handler, self.app.protocol.replay, handler, arrival).outcome
            done = outcome in (Outcome.PROCESSED, Outcome.FAILED)
            self.counts[str(outcome) if done else "skipped"] += 1
            if outcome is Outcome.FAILED and len(self.failures) < _FAILURES_NAMED:
                self.failures.append(self._failure(arrival.message_id))

    def _failure(self, message_id: str) -> ReplayFailure:
        named = InboxFilter(consumer=self.where.consumer, message_id=message_id)
        (row,) = self.drive(self.queries.shown, named, reveal=False)
        last = row.history[-1] if row.history else None
        return ReplayFailure(
            message_id=message_id,
            error_type=None if last is None else last.error_type,
            error=(last.error or "").partition("\n")[0] if last is not None else None,
        )

    def _copy(self, arrivals: Sequence[Arrival], consumer: str, audit: Audit) -> None:
        converted = [self._as(consumer, arrival) for arrival in arrivals]
        taken = [arrival for arrival in converted if arrival is not None]
        token = secrets.token_hex(16)
        fresh: int = 0
        if taken:
            fresh = self.drive(
                again, self.queries.copy, consumer, taken, audit, self.where, token=token
            )
        self.counts["stored"] += fresh
        self.counts["duplicates"] += len(taken) - fresh
        self.counts["skipped"] += len(arrivals) - len(taken)

    def _as(self, consumer: str, arrival: Arrival) -> Arrival | None:
        """The message as another consumer would have received it; None when that one does not take it."""
        if not len(self.app.handlers):
            return arrival
        handler = self._handler(arrival, consumer)
        if handler is None:
            return None
        try:
            if handler.options.message_id is not None:
                return handler.arrival(arrival.message, self.app.limits)
        except UnusableMessage:
            return None
        # hashed by the rule of its new consumer: else a live copy would look like another payload
        hashed = payload_hash(arrival.message, handler.options.payload_hash)
        return replace(arrival, hash=hashed)

    def _handler(self, arrival: Arrival, consumer: str) -> Handler | None:
        message = arrival.message
        found = self.app.handlers.matching(message.topic, message.type, consumer)
        return found[0] if found else None


async def again(
    db: Session, operation: Callable[..., Awaitable[T]], *args: Any, **options: Any
) -> T:
    """Repeat a small transaction that lost against others."""
    for tried in range(10):
        try:
            return await operation(db, *args, **options)
        except StoreError as error:
            if error.fault not in (Fault.CONFLICT, Fault.LOCK_TIMEOUT) or tried == 9:
                raise
            db.discard()
            await db.wait(_CONFLICT_PAUSE_S * (tried + 1))
    raise AssertionError("the last try returned or raised")
