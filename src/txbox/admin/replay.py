"""Replaying kept messages: through their own handler once more, or into the inbox of another consumer."""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from txbox.admin import changes
from txbox.admin.changes import Audit, again
from txbox.admin.reader import Reader
from txbox.admin.tables import InboxFilter
from txbox.errors import ConfigurationError, UnusableMessage
from txbox.handlers import Handler
from txbox.identity import payload_hash
from txbox.outcome import Outcome, Status
from txbox.store.codec import Arrival

#: Called after each batch with the number of messages done so far.
Progress = Callable[[int], None]

# each message of a batch brings its payload along
_BATCH = 50
_FAILURES_NAMED = 20


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
        count: messages that match; the others add up to it, except in a dry run.
        processed: handlers that ran and committed.
        failed: handlers that failed; `failures` names the first of them.
        stored: rows that became pending for the other consumer.
        duplicates: messages that the other consumer already has.
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


@dataclass(slots=True, kw_only=True)
class Replay:
    """One replay: reads in batches, and runs or copies what it reads; without an audit it is a dry run."""

    reader: Reader
    where: InboxFilter
    as_consumer: str | None
    audit: Audit | None
    counts: Counter[str] = field(default_factory=Counter[str])
    failures: list[ReplayFailure] = field(default_factory=list[ReplayFailure])

    def carried_out(self, progress: Progress | None) -> Replayed:
        """Replay what the filter matches."""
        self._check()
        if self.as_consumer is None:
            self.where = replace(self.where, status=Status.PROCESSED)
        newest = self.reader.page(InboxFilter(consumer=self.where.consumer), limit=1).rows
        upto, after = newest[0].arrival if newest else 0, -1
        while True:
            found = self.reader.kept(self.where, after=after, limit=_BATCH)
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
            raise ConfigurationError("A replay is for one consumer: give consumer=.")
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
                f"Consumer {as_consumer!r} already has these messages: leave as_consumer out to run them again."
            )
        known = self.reader.app.handlers.consumers()
        needed = where.consumer if as_consumer is None else as_consumer
        if needed not in known and (as_consumer is None or known):
            raise ConfigurationError(
                f"No handler is registered for consumer {needed!r}: "
                + (f"this app has {', '.join(sorted(known))}." if known else "a replay needs the App.")
            )  # fmt: skip

    def _run_again(self, arrivals: Sequence[Arrival], audit: Audit) -> None:
        self.reader.on_database(
            changes.announce, self.reader.store, audit, "replay", self.where, len(arrivals)
        )
        for arrival in arrivals:
            outcome = Outcome.DEFERRED
            handler = self._handler(arrival, str(self.where.consumer))
            if handler is not None:
                outcome = self.reader.on_handlers_database(
                    handler, self.reader.app.protocol.replay, handler, arrival
                ).outcome
            done = outcome in (Outcome.PROCESSED, Outcome.FAILED)
            self.counts[str(outcome) if done else "skipped"] += 1
            if outcome is Outcome.FAILED and len(self.failures) < _FAILURES_NAMED:
                self.failures.append(self._failure(arrival.message_id))

    def _failure(self, message_id: str) -> ReplayFailure:
        named = InboxFilter(consumer=self.where.consumer, message_id=message_id)
        (row,) = self.reader.messages(named)
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
            fresh = self.reader.on_database(
                again,
                changes.copy,
                self.reader.store,
                consumer,
                taken,
                audit,
                self.where,
                token=token,
            )
        self.counts["stored"] += fresh
        self.counts["duplicates"] += len(taken) - fresh
        self.counts["skipped"] += len(arrivals) - len(taken)

    def _as(self, consumer: str, arrival: Arrival) -> Arrival | None:
        """The message as the other consumer would have received it; None when it does not take it."""
        if not len(self.reader.app.handlers):
            return arrival
        handler = self._handler(arrival, consumer)
        if handler is None:
            return None
        try:
            if handler.options.message_id is not None:
                return handler.arrival(arrival.message, self.reader.app.limits)
        except UnusableMessage:
            return None
        # hashed by the rule of its new consumer: else a live copy would look like another payload
        hashed = payload_hash(arrival.message, handler.options.payload_hash)
        return replace(arrival, hash=hashed)

    def _handler(self, arrival: Arrival, consumer: str) -> Handler | None:
        message = arrival.message
        found = self.reader.app.handlers.matching(message.topic, message.type, consumer)
        return found[0] if found else None
