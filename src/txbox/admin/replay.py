"""The verbs that run handlers: a replay runs kept messages again, or copies them to another consumer; a rehearsal runs
one message in a guarded transaction that is never committed (promise 7.5).

Source: docs/decisions/0040-rehearsals.md
"""

from __future__ import annotations

import re
import secrets
import time
from collections import Counter
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any, Literal, Unpack

from txbox.admin.changes import ChangeOptions, Changes, again, audit_of, result_of
from txbox.admin.facts import MessageRef, keys_of, links
from txbox.admin.reader import Application, Audit
from txbox.admin.tables import InboxFilter, stored_id
from txbox.errors import ConfigurationError, Fault, StoreError, UnusableMessage
from txbox.handlers import Handler
from txbox.identity import EFFECT_PREFIX, checked_consumer, derived_id
from txbox.outcome import Outcome, Status
from txbox.processing.calls import handled
from txbox.processing.failure import BROKEN, failure_of
from txbox.session import Raised, Session, Statement
from txbox.store.codec import Arrival, Leased
from txbox.store.dialect import as_time
from txbox.store.inbox import InboxStore
from txbox.text import lasting

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
                kept = self._kept(where, after=after, limit=limit) if limit else []
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

    def _kept(self, where: InboxFilter, *, after: int, limit: int) -> list[Leased]:
        """Read messages of one consumer whose payload was kept, in arrival order, without locking them.

        Args:
            where: error type, fingerprint, age, times and the beginning of the id are ignored.
            after: the arrival to continue behind; -1 for the first.
        """
        rows = self.rows("replay_read", {**where.params(), "after": after, "limit": limit})
        return [self.store.columns.arrival(str(where.consumer), row) for row in rows]

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

    def rehearse(
        self,
        consumer: str,
        message_id: str,
        *,
        payload: bytes | None = None,
        actor: str | None = None,
        reason: str | None = None,
    ) -> Rehearsed:
        """Run a message's handler in a transaction that is never committed, and report what it would have done.

        Any message whose payload is kept can be rehearsed, unless it is being processed right now.

        Args:
            payload: a new payload, as for `edit`.

        Raises:
            ConfigurationError: no App, no such message, no payload, a database that cannot refuse a COMMIT (MySQL,
                MariaDB), or a handler that works outside of a transaction.

        Guarantee: nothing of the transaction stays, and its connection is thrown away. What the handler does
            elsewhere (HTTP, files, other connections) really happens. `txbox_audit` has it before it runs.
        """
        where = InboxFilter(consumer=consumer, message_id=stored_id(message_id))
        if not self.has_handlers:
            raise ConfigurationError("A rehearsal runs a handler: give the App.")
        kept = self._kept(where, after=-1, limit=1)
        if not kept:
            raise ConfigurationError(self.why_not("rehearse", where))
        arrival = kept[0].arrival
        if arrival.unreadable is not None:
            raise ConfigurationError(f"This message cannot be rehearsed. {arrival.unreadable}")
        if payload is not None:
            arrival = replace(arrival, message=replace(arrival.message, payload=payload))
        message = arrival.message
        handler = self.handler_of(message, consumer)
        if handler is None:
            raise ConfigurationError(
                f"{consumer} has no handler for topic {message.topic!r} with type {message.type!r}."
            )
        if not self.dialect.refuses_commit:
            raise ConfigurationError(
                "MySQL and MariaDB cannot refuse the COMMIT of a handler, so a rehearsal might leave something behind: "
                "rehearse on a copy in SQLite or PostgreSQL, or retry the message."
            )
        if not handler.options.transactional:
            raise ConfigurationError(
                f"{consumer} works outside a transaction: it cannot be rolled back."
            )
        self.announce(Audit.of(actor, reason), "rehearse", where, 1)
        return self.on_handlers_database(handler, _rehearsed, self.app, handler, arrival)


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


# -- a rehearsal ------------------------------------------------------------------------------

# neither waits long for others, nor lets others wait
_LOCK_TIMEOUT = timedelta(seconds=2)
# it keeps locks, and a thread of the dashboard
_LONGEST = timedelta(seconds=30)
_STATEMENTS_MAX = 200
_STATEMENT_CHARACTERS = 2_000
_STAGED_MAX = 200
# what ends a transaction, first in its statement or behind a comment; a savepoint's ROLLBACK TO does not, nor does END
# behind a semicolon, which may end a block
_ENDS = re.compile(
    r"(?:^|;|\*/)\s*+"
    r"(?:commit|abort|prepare\s+transaction|rollback(?!\s+(?:work\s+|transaction\s+)?to\b))\b"
    r"|^\s*+end\b",
    re.IGNORECASE,
)
# what is quoted ends nothing, and what looks like a quote in a comment quotes nothing
_OPAQUE = re.compile(
    r"--[^\n]*+|/\*(?:[^*]|\*(?!/))*+(?:\*/)?+"
    r"|'(?:[^']|'')*+'?+|\"(?:[^\"]|\"\")*+\"?+",
    re.DOTALL,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsed:
    """What a handler would have done; nothing of it was committed.

    Attributes:
        outcome: what would have become of the message: "processed", "failed" (and tried again), "dead", or
            "broken" when the handler tried to end the transaction, or did end it.
        statements: what it sent to the database, in its order, without values; the first 200.
        staged: what it would have staged: outgoing messages, and effects.
        result: what it returned, as JSON and redacted, where the handler keeps its results.
    """

    consumer: str
    message_id: str
    outcome: Literal["processed", "failed", "dead", "broken"]
    error_type: str | None = None
    error: str | None = None
    duration_s: float
    statements: tuple[str, ...] = ()
    staged: tuple[MessageRef, ...] = ()
    result: bytes | None = None


def _opened(match: re.Match[str]) -> str:
    text = match[0]
    if text.startswith(("--", "/*")):
        return "*/"
    # a backslash may have quoted what seems to end the string, and what has no end quotes nothing
    closed = len(text) > 1 and text[-1] == text[0] in "'\""
    return "''" if closed and "\\" not in text else text


class _Refused(Exception):
    """The handler was about to end the transaction."""


@dataclass(slots=True)
class _Watch:
    """Sees each statement of a handler before it is sent, and refuses what would end the transaction."""

    until: float
    active: bool = True
    escaped: bool = False
    late: bool = False
    statements: list[str] = field(default_factory=list[str])

    def check(self, sql: str) -> None:
        if not self.active:
            return
        if time.monotonic() > self.until:
            self.late = True
            raise _Refused("the time of this rehearsal is over")
        if _ENDS.search(_OPAQUE.sub(_opened, sql)):
            self.escaped = True
            raise _Refused(
                "a rehearsal is never committed: its handler must not end the transaction"
            )
        # what txbox itself writes for the handler is in `staged`
        if sql and len(self.statements) < _STATEMENTS_MAX and "txbox_" not in sql:
            self.statements.append(" ".join(sql.split())[:_STATEMENT_CHARACTERS])


async def _rehearsed(
    db: Session, app: Application, handler: Handler, arrival: Arrival
) -> Rehearsed:
    """Run a handler for a message whose row is there, and roll back.

    Raises:
        ConfigurationError: its row is being processed, or locked by another transaction; or its time is over.

    Guarantee: the database refuses COMMIT, and the connection refuses what ends a transaction and is thrown
        away. What the handler does outside its transaction really happens.
    """
    started, redact = time.monotonic(), app.store.columns.redact
    watch = _Watch(started + _LONGEST.total_seconds())
    timeout = min(handler.options.timeout or _LONGEST, _LONGEST)
    bounded = replace(handler, options=replace(handler.options, timeout=timeout))
    try:
        await _claimed(db, app, handler, arrival, token := secrets.token_hex(16))
        ((now,),) = (await db.execute(app.store.dialect.statement("database_clock"))).rows
        before = await _staged(db, app, handler, arrival)
        faults = await _broken_references(db, app)
        assert db.connection is not None
        db.connection.watch(watch.check)
        raised: Raised | None = None
        answers: list[Any] = []
        try:
            answers = await handled(db, bounded, [arrival])
        except Raised as error:
            raised = error
        watch.active = False
        if watch.late or (raised is not None and time.monotonic() > watch.until):
            longest = lasting(_LONGEST.total_seconds())
            raise ConfigurationError(
                f"The handler ran longer than the {longest} of a rehearsal, and is rolled back."
            )
        staged: list[MessageRef] = []
        if raised is None and not watch.escaped:
            try:
                staged = await _staged(db, app, handler, arrival)
                await db.execute(app.store.closing(token))
                if await _broken_references(db, app) - faults:
                    broken = StoreError("SQLite: a foreign key would refuse the COMMIT.")
                    raised = Raised(broken, broken, False)
                if app.store.dialect.has("rehearse_constraints"):
                    await db.execute(app.store.dialect.statement("rehearse_constraints"))
            except StoreError as error:
                watch.escaped = error.fault is Fault.GUARD
                raised = Raised(error, error, False)
    finally:
        watch.active = False
        db.discard()
    done = Rehearsed(
        consumer=handler.consumer,
        message_id=arrival.message_id,
        outcome="processed",
        duration_s=time.monotonic() - started,
        statements=tuple(map(redact.error, watch.statements)),
        staged=tuple(link for link in staged if link not in before),
        result=redact.json("result", answers[0])[0]
        if answers and handler.options.keep_result
        else None,
    )
    if watch.escaped:
        return replace(
            done,
            outcome="broken",
            error_type=BROKEN.error_type,
            error="the handler ended the transaction that txbox began, or tried to: a worker would reject it for good",
            staged=(),
        )
    return done if raised is None else _failed(app, handler, arrival, done, raised, as_time(now))


def _failed(
    app: Application, handler: Handler, arrival: Arrival, done: Rehearsed, raised: Raised, now: datetime | None
) -> Rehearsed:  # fmt: skip
    """What a worker would have made of this failure."""
    failure = failure_of(
        raised.error, raised.database_error, handler.options, app.limits, app.store.columns.redact
    )
    message, retry = arrival.message, handler.options.retry
    assert now is not None
    old = retry.max_age and message.received_at and now - message.received_at > retry.max_age
    dead = failure.final or message.attempt >= retry.max_attempts or old
    return replace(
        done,
        outcome="dead" if dead else "failed",
        error_type=failure.error_type,
        error=failure.error,
        staged=(),
    )


async def _claimed(
    db: Session, app: Application, handler: Handler, arrival: Arrival, token: str
) -> None:
    timeout = handler.options.timeout
    claim = app.store.claim_known(
        "claim_rehearsal",
        handler.consumer,
        [arrival.message_id],
        token=token,
        lock_timeout=_LOCK_TIMEOUT,
        idle_s=max(app.lease.duration.total_seconds(), timeout.total_seconds() if timeout else 0.0),
    )
    dialect, limit = app.store.dialect, tuple[Statement, ...]()
    if dialect.has("rehearse_limit"):
        limit_ms = int(_LONGEST.total_seconds() * 1000)
        limit = (dialect.statement("rehearse_limit", {"limit_ms": limit_ms}),)
    try:
        # first for all of the transaction: the claim puts back what it finds
        begins = app.store.begin_bounded(_LOCK_TIMEOUT, *limit, *claim)
        results = await db.begin(begins, user_code=True)
    except StoreError as error:
        if error.fault is not Fault.LOCK_TIMEOUT:
            raise
        raise ConfigurationError(
            f"{handler.consumer} {arrival.message_id} is locked by another transaction: try again."
        ) from None
    won = app.store.claimed(claim, results[-len(claim) :])
    if won is None or not won.ids:
        raise ConfigurationError(
            f"{handler.consumer} {arrival.message_id} is being processed, or gone: `txbox explain` says which."
        )


async def _staged(
    db: Session, app: Application, handler: Handler, arrival: Arrival
) -> list[MessageRef]:
    """What the message has staged: the ids are derived from its own."""
    ids = [
        derived_id(handler.consumer, arrival.message_id, ordinal) for ordinal in range(_STAGED_MAX)
    ]
    dialect = app.store.dialect
    outgoing = await db.execute(dialect.statement("explain_outbox", {}, {"message_id": ids}))
    staged = links(outgoing.rows)
    for consumer in app.handlers.consumers():
        if consumer.startswith(EFFECT_PREFIX):
            keys = keys_of([consumer], ids)
            effects = await db.execute(dialect.statement("explain_inbox", {}, keys))
            staged += links(effects.rows)
    return sorted(staged, key=lambda link: ids.index(link.message_id))


async def _broken_references(db: Session, app: Application) -> set[Sequence[Any]]:
    """Rows with a dangling reference, on databases that check these only at COMMIT."""
    dialect = app.store.dialect
    if not dialect.has("rehearse_references"):
        return set()
    result = await db.execute(dialect.statement("rehearse_references"))
    return {tuple(row) for row in result.rows}
