"""A replay runs kept messages again, or copies them to another consumer."""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from typing import Unpack

from txbox.admin.changes import ChangeOptions, Changes, again, audit_of, result_of
from txbox.admin.reader import Audit, Operator
from txbox.admin.tables import InboxFilter
from txbox.errors import ConfigurationError, UnusableMessage
from txbox.identity import checked_consumer
from txbox.outcome import Outcome, Status
from txbox.session import Session
from txbox.store.codec import Arrival, Leased
from txbox.store.inbox import InboxStore

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


def kept_messages(
    operator: Operator, where: InboxFilter, *, after: int, limit: int
) -> list[Leased]:
    """Read messages of one consumer whose payload was kept, in arrival order, without locking them.

    Args:
        where: error type, fingerprint, age, times and the beginning of the id are ignored.
        after: the arrival to continue behind; -1 for the first.
    """
    rows = operator.rows("replay_read", {**where.params(), "after": after, "limit": limit})
    return [operator.store.columns.arrival(str(where.consumer), row) for row in rows]


class Replays(Changes):
    """The verbs that run handlers."""

    def replay(
        self, where: InboxFilter, *, as_consumer: str | None = None, **how: Unpack[ChangeOptions]
    ) -> Replayed:
        """Run processed messages through their handler once more, or feed them to another consumer.

        Only messages whose payload was kept are replayed, in arrival order, and none that arrived after
        the start. The filter takes consumer (required), message_id, topic, type and key; with
        `as_consumer` also status.

        Args:
            as_consumer: store the messages as pending rows of this consumer instead of running them.

        Raises:
            ConfigurationError: no consumer, a criterion that a replay does not take, or no handler.

        Guarantee: a replay that fails leaves its row `processed` and its effects undone. Each batch is
            announced in `txbox_audit` before it runs; with `as_consumer` it is one commit with its rows.
        """
        return result_of(self.replay_batches(where, as_consumer=as_consumer, **how))

    def replay_batches(
        self, where: InboxFilter, *, as_consumer: str | None = None, **how: Unpack[ChangeOptions]
    ) -> Generator[Replayed]:
        """Do what `replay` does, and yield the replay so far after each batch.

        The last one yielded is the result, and there is at least one. Leaving the loop ends the replay there.
        """
        self._check_replay(where, as_consumer)
        if as_consumer is None:
            where = replace(where, status=Status.PROCESSED)
        audit, most, counts = audit_of(how), how.get("most"), Counter[str]()
        failures: list[ReplayFailure] = []
        ((newest,),) = self.rows("inbox_newest")
        after = -1
        try:
            while True:
                limit = _BATCH if most is None else min(_BATCH, most - counts["count"])
                kept = kept_messages(self, where, after=after, limit=limit) if limit else []
                batch = [leased for leased in kept if leased.number <= int(newest)]
                if not batch:
                    break
                after = batch[-1].number
                counts["count"] += len(batch)
                arrivals = [leased.arrival for leased in batch]
                if audit is not None and as_consumer is not None:
                    counts.update(self._copied(arrivals, as_consumer, audit, where))
                elif audit is not None:
                    self.announce(audit, "replay", where, len(arrivals))
                    for arrival in arrivals:
                        counts[self._run_again(arrival, where, failures)] += 1
                yield Replayed(dry_run=audit is None, failures=tuple(failures), **counts)
        finally:
            self.emit("replay", counts["processed"] + counts["stored"], audit)
        if not counts["count"]:
            yield Replayed(dry_run=audit is None)

    def _check_replay(self, where: InboxFilter, as_consumer: str | None) -> None:
        if where.consumer is None:
            raise ConfigurationError("A replay is for one consumer: give consumer=.")
        for name in ("error_type", "fingerprint", "older_than", "since", "until", "id_prefix"):
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
        known = self.app.handlers.consumers()
        needed = where.consumer if as_consumer is None else checked_consumer(as_consumer)
        if needed not in known and (as_consumer is None or known):
            raise ConfigurationError(
                f"No handler is registered for consumer {needed!r}: "
                + (f"this app has {', '.join(sorted(known))}." if known else "a replay needs the App.")
            )  # fmt: skip

    def _run_again(
        self, arrival: Arrival, where: InboxFilter, failures: list[ReplayFailure]
    ) -> str:
        """Replay one message; returns which of the counts it belongs to."""
        handler = self.handler_of(arrival.message, str(where.consumer))
        if handler is None:
            return "skipped"
        replay = self.app.protocol.replay
        outcome = self.on_handlers_database(handler, replay, handler, arrival).outcome
        if outcome is Outcome.FAILED and len(failures) < _FAILURES_NAMED:
            failures.append(self._failure(handler.consumer, arrival.message_id))
        return str(outcome) if outcome in (Outcome.PROCESSED, Outcome.FAILED) else "skipped"

    def _failure(self, consumer: str, message_id: str) -> ReplayFailure:
        # the row may have been pruned since
        for row in self.messages(InboxFilter(consumer=consumer, message_id=message_id)):
            for last in row.history[-1:]:
                error = (last.error or "").partition("\n")[0]
                return ReplayFailure(message_id=message_id, error_type=last.error_type, error=error)
        return ReplayFailure(message_id=message_id, error_type=None, error=None)

    def _copied(
        self, arrivals: Sequence[Arrival], consumer: str, audit: Audit, where: InboxFilter
    ) -> Counter[str]:
        converted = [self._as(consumer, arrival) for arrival in arrivals]
        usable = [arrival for arrival in converted if arrival is not None]
        token, fresh = secrets.token_hex(16), 0
        if usable:
            fresh = self.on_database(
                again, _copy, self.store, consumer, usable, audit, where, token=token
            )
        return Counter(
            stored=fresh, duplicates=len(usable) - fresh, skipped=len(arrivals) - len(usable)
        )

    def _as(self, consumer: str, arrival: Arrival) -> Arrival | None:
        """The message as the other consumer would have received it; None if it is not for it, or unreadable."""
        if arrival.unreadable is not None:
            return None
        if not self.has_handlers:
            return arrival
        handler = self.handler_of(arrival.message, consumer)
        if handler is None:
            return None
        try:
            if handler.options.message_id is not None:
                return handler.arrival(arrival.message, self.app.limits)
            # version and hash by the rules of its new consumer: else a live copy would look like another payload
            return handler.accepted(arrival.message, arrival.message_id)
        except UnusableMessage:
            return None


async def _copy(
    db: Session,
    store: InboxStore,
    consumer: str,
    arrivals: Sequence[Arrival],
    audit: Audit,
    where: InboxFilter,
    *,
    token: str,
) -> int:
    """Store messages as pending rows of another consumer, in this order; returns how many were new.

    Guarantee: the rows and their audit row are one commit.
    """
    await db.begin()
    # in arrival order, not by id: two such commands may deadlock, and are tried again
    fresh = await store.store(db, consumer, arrivals, token=token)
    await db.execute(audit.row(store.dialect, f"replay as {consumer}", where, len(fresh)))
    await db.commit()
    return len(fresh)
