"""Replaying kept messages: through their own handler once more, or into the inbox of another consumer."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

from txbox.connections.base import Database
from txbox.errors import ConfigurationError, Fault, StoreError, UnusableMessage
from txbox.events import Events
from txbox.handlers import Handler, Handlers
from txbox.identity import payload_hash
from txbox.outcome import Outcome, Status
from txbox.policy import Limits
from txbox.processing.attempt import InboxProtocol
from txbox.steps import Discard, Steps, Wait
from txbox.store.audit import Audit
from txbox.store.codec import Arrival
from txbox.store.filters import RowFilter
from txbox.store.inbox import InboxStore
from txbox.store.rows import InboxRows

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
    failures: tuple[ReplayFailure, ...] = field(default=())


class Application(Protocol):
    """What an operator needs of an App."""

    database: Database
    store: InboxStore
    protocol: InboxProtocol
    handlers: Handlers
    events: Events
    limits: Limits

    def check_schema(self) -> Steps[None]: ...


class Replay:
    """One replay: reads in batches, and runs or copies what it reads.

    Args:
        drive: carries steps out on any connection.
        run: carries steps out on a sync or an async connection, as the handler is.
    """

    def __init__(
        self,
        app: Application,
        rows: InboxRows,
        drive: Callable[[Steps[Any]], Any],
        run: Callable[[Handler, Steps[Any]], Any],
    ) -> None:
        self._app = app
        self._rows = rows
        self._drive = drive
        self._run = run

    def run(
        self,
        where: RowFilter,
        as_consumer: str | None,
        audit: Audit | None,
        progress: Progress | None,
    ) -> Replayed:
        """Replay what the filter means; without an audit it is a dry run."""
        self._check(where, as_consumer)
        if as_consumer is None:
            where = replace(where, status=Status.PROCESSED)
        assert where.consumer is not None
        upto: int = self._drive(self._rows.newest_arrival(where.consumer))
        total = Replayed(dry_run=audit is None)
        after = -1
        while True:
            found = self._drive(self._rows.kept(where, after=after, limit=_BATCH))
            batch = [leased for leased in found if leased.number <= upto]
            if not batch:
                break
            after = batch[-1].number
            arrivals = [leased.arrival for leased in batch]
            total = replace(total, count=total.count + len(arrivals))
            if audit is not None and as_consumer is not None:
                total = self._copied(total, where, as_consumer, arrivals, audit)
            elif audit is not None:
                total = self._rerun(total, where, arrivals, audit)
            if progress is not None:
                progress(total.count)
        return total

    def _check(self, where: RowFilter, as_consumer: str | None) -> None:
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
        known = self._app.handlers.consumers()
        needed = where.consumer if as_consumer is None else as_consumer
        if needed not in known and (as_consumer is None or known):
            raise ConfigurationError(
                f"No handler is registered for consumer {needed!r}: "
                + (f"this app has {', '.join(sorted(known))}." if known else "a replay needs the App.")
            )  # fmt: skip

    def _rerun(
        self, total: Replayed, where: RowFilter, arrivals: Sequence[Arrival], audit: Audit
    ) -> Replayed:
        self._drive(self._rows.announce(audit, "replay", where, len(arrivals)))
        assert where.consumer is not None
        processed = failed = 0
        failures = [*total.failures]
        for arrival in arrivals:
            handler = self._handler(arrival, where.consumer)
            if handler is None:
                continue
            outcome = self._run(handler, self._app.protocol.replay(handler, arrival)).outcome
            processed += outcome is Outcome.PROCESSED
            if outcome is Outcome.FAILED:
                failed += 1
                if len(failures) < _FAILURES_NAMED:
                    failures.append(self._failure(where.consumer, arrival.message_id))
        return replace(
            total,
            processed=total.processed + processed,
            failed=total.failed + failed,
            skipped=total.skipped + len(arrivals) - processed - failed,
            failures=tuple(failures),
        )

    def _failure(self, consumer: str, message_id: str) -> ReplayFailure:
        shown, _ = self._drive(self._rows.shown(consumer, message_id, reveal=False))
        last = shown.history[-1] if shown and shown.history else None
        return ReplayFailure(
            message_id=message_id,
            error_type=None if last is None else last.error_type,
            error=(last.error or "").partition("\n")[0] if last is not None else None,
        )

    def _copied(
        self,
        total: Replayed,
        where: RowFilter,
        consumer: str,
        arrivals: Sequence[Arrival],
        audit: Audit,
    ) -> Replayed:
        taken = [
            converted
            for arrival in arrivals
            if (converted := self._as(consumer, arrival)) is not None
        ]
        fresh: int = 0
        if taken:
            fresh = self._drive(
                again(self._rows.copy, consumer, taken, audit, where, token=secrets.token_hex(16))
            )
        return replace(
            total,
            stored=total.stored + fresh,
            duplicates=total.duplicates + len(taken) - fresh,
            skipped=total.skipped + len(arrivals) - len(taken),
        )

    def _as(self, consumer: str, arrival: Arrival) -> Arrival | None:
        """The message as another consumer would have received it; None when that one does not take it."""
        if not len(self._app.handlers):
            return arrival
        handler = self._handler(arrival, consumer)
        if handler is None:
            return None
        try:
            if handler.options.message_id is not None:
                return handler.arrival(arrival.message, self._app.limits)
        except UnusableMessage:
            return None
        # hashed by the rule of its new consumer: else a live copy would look like another payload
        hashed = payload_hash(arrival.message, handler.options.payload_hash)
        return replace(arrival, hash=hashed)

    def _handler(self, arrival: Arrival, consumer: str) -> Handler | None:
        message = arrival.message
        found = self._app.handlers.matching(message.topic, message.type, consumer)
        return found[0] if found else None


def again(operation: Callable[..., Steps[T]], *args: Any, **options: Any) -> Steps[T]:
    """Repeat a small transaction that lost against others."""
    for tried in range(10):
        try:
            return (yield from operation(*args, **options))
        except StoreError as error:
            if error.fault not in (Fault.CONFLICT, Fault.LOCK_TIMEOUT) or tried == 9:
                raise
            yield Discard()
            yield Wait(_CONFLICT_PAUSE_S * (tried + 1))
    raise AssertionError("the last try returned or raised")
