"""The operator's verbs: look at messages, and retry, discard, reroute, accept, edit or replay them, all audited."""

from __future__ import annotations

import getpass
import secrets
import socket
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from hashlib import sha256
from typing import Any, Literal, TypedDict, Unpack, cast

from txbox.admin import activity, changes, replay, tables
from txbox.admin.activity import Activities, Snapshot, WorkerStatus
from txbox.admin.changes import Audit, Key, Matching, again
from txbox.admin.doctor import Diagnosis, examine, examine_app
from txbox.admin.explain import Explanation, explained
from txbox.admin.found import look
from txbox.admin.reader import Reader, says_anything
from txbox.admin.replay import Progress, Rehearsed, Replay, Replayed
from txbox.admin.tables import (
    INBOX,
    OUTBOX,
    QUARANTINE,
    Filter,
    InboxFilter,
    MessageT,
    OutboxFilter,
    QuarantineFilter,
    RowT,
    Verb,
)
from txbox.admin.views import COUNTED_MAX
from txbox.errors import ConfigurationError, Reject, UnusableMessage
from txbox.events import RowsChanged
from txbox.handlers import Handler
from txbox.identity import DIGEST_PREFIX, canonical_id, checked_consumer, payload_hash
from txbox.message import Headers, Message
from txbox.outbox import LOCAL
from txbox.outcome import Status
from txbox.policy import HIDDEN, Limits
from txbox.processing.failure import BROKEN
from txbox.store import partitions
from txbox.store import schema as schemas
from txbox.store.activity import Pause, pause, pauses, resume, workers
from txbox.store.codec import Arrival

_SAMPLE = 10
# failures that are grouped: of one consumer and status, at least and at most, and of all
_GROUPED_MIN, _GROUPED_MAX, _GROUPED = 100, 2_000, 3_000
# groups of failures whose error is read, too
_SHOWN_GROUPS = 20

__all__ = [
    "Admin", "Changed", "Edited", "How", "InboxFilter", "MessageChanged", "OutboxFilter", "QuarantineFilter",
]  # fmt: skip


class How(TypedDict, total=False):
    """The options of every change.

    Keys:
        actor: who, for `txbox_audit`; by default the login name and the host.
        reason: why, for `txbox_audit`.
        dry_run: count, and change nothing.
        progress: called after each batch with the number of messages done so far.
        most: change at most so many, the oldest first.
        cancelled: called before each batch; True ends the change there.
    """

    actor: str | None
    reason: str | None
    dry_run: bool
    progress: Progress | None
    most: int | None
    cancelled: Callable[[], bool] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Changed:
    """What a change did, or in a dry run would do.

    Attributes:
        count: rows changed.
        spared: rows left alone because their transaction was broken; see `Admin.retry`.
        sample: the keys of the first changed rows.
        refused: the keys of rows that cannot be accepted, with the reason.
        cancelled: it ended before everything that matches was changed.
    """

    action: Verb | Literal["replay"]
    dry_run: bool
    count: int
    spared: int
    sample: tuple[dict[str, str], ...]
    refused: tuple[dict[str, str], ...] = ()
    cancelled: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Edited:
    """What an edit changed, or in a dry run would change; pairs are before and after.

    Attributes:
        version: of the message before; pass it as `expected` to edit exactly that.
        payload_hash: SHA-256 in hexadecimal digits.
        headers: the names of those that were set or removed.
    """

    dry_run: bool
    version: str
    payload_bytes: tuple[int | None, int | None]
    payload_hash: tuple[str, str]
    headers: tuple[str, ...]


class MessageChanged(ConfigurationError):
    """The message is no longer the version that an edit expects."""


class Admin(Reader):
    """The operator's view of one inbox and outbox. A filter says which table a verb is about.

    Args:
        target: an App; or a database URL, pool or engine, which is enough for everything but `replay`,
            `rehearse`, and what messages of an order wait for.
        schema: with a database: the PostgreSQL schema of the tables.

    Nothing connects before the first verb. A verb may be called from any thread, but not inside a
    running event loop: use `asyncio.to_thread` there.
    """

    # -- looking ------------------------------------------------------------------------------

    def status(self) -> Sequence[tables.ConsumerStatus]:
        """Count every consumer's rows; the cost grows with the table."""
        queries = ("status", "oldest_unfinished", "quarantine_status")
        found, ages, aside = (
            result.rows for result in self.snapshot_of(*map(self.dialect.statement, queries))
        )
        counts: dict[str, dict[str, int]] = {}
        for consumer, status, count in found:
            counts.setdefault(consumer, {})[status] = int(count)
        oldest = {consumer: tables.age_of(age) for consumer, age in ages}
        quarantined = {consumer: int(count) for consumer, count in aside}
        return [
            tables.ConsumerStatus(
                consumer=consumer,
                counts=counts.get(consumer, {}),
                quarantined=quarantined.get(consumer, 0),
                oldest_unfinished_s=oldest.get(consumer),
            )
            for consumer in sorted({*counts, *quarantined})
        ]

    def topics(self) -> Sequence[tables.TopicStatus]:
        """Count every topic's outgoing messages; the cost grows with the table."""
        return tables.topics_of(self.rows("outbox_status"))

    def overview(self) -> tuple[Sequence[tables.ConsumerStatus], Sequence[tables.TopicStatus]]:
        """Count what is open, each count up to `COUNTED_MAX` and one: the cost does not grow with the tables."""
        statuses = ("pending", "processing", "failed", "dead", "discarded")
        most = {"most": COUNTED_MAX + 1}
        consumers: list[tables.ConsumerStatus] = []
        for consumer in self.consumers():
            (row,) = self.page_rows("consumer_open", {"consumer": consumer, **most})
            *counts, quarantined = map(int, row[: len(statuses) + 1])
            ages = [float(age) for age in row[len(statuses) + 1 :] if age is not None]
            consumers.append(
                tables.ConsumerStatus(
                    consumer=consumer,
                    counts=dict(zip(statuses, counts, strict=True)),
                    quarantined=quarantined,
                    oldest_unfinished_s=tables.age_of(max(ages, default=None)),
                )
            )
        return consumers, tables.topics_of(self.page_rows("outbox_open", most))

    def sizes(self) -> tuple[Sequence[tables.TableSize], tables.PartitionStatus | None]:
        """Read how large the tables and their indexes are, and how the inbox is partitioned."""
        sizes = [
            tables.TableSize(
                table=str(name),
                table_bytes=int(size),
                index_bytes=None if indexes is None else int(indexes),
                partitions=int(count),
            )
            for name, size, indexes, count in self.rows("sizes")
        ]
        layout = self.on_database(partitions.layout, self.dialect)
        if layout.kind is None:
            return sizes, None
        ready = layout.ready_until
        return sizes, tables.PartitionStatus(
            kind=layout.kind,
            count=len(layout.parts),
            ready_until=ready,
            missing=ready is not None and ready.timestamp() <= layout.clock_s,
        )

    def activity(
        self, last: timedelta = timedelta(hours=1), *, step: timedelta = timedelta(minutes=1)
    ) -> Activities:
        """Read what became of messages in the last hour, or another time, by consumer and by route of the outbox.

        It reads what workers and relays have counted, never the inbox: the cost grows with time and consumers.

        Args:
            last: whole minutes, up to `Retention.activity`.
            step: the time that one point stands for, in whole minutes.

        Raises:
            ConfigurationError: a step that is not whole minutes, or longer than the time.
        """
        return self.on_database(activity.read, self.dialect, last, step)

    def workers(self) -> Sequence[WorkerStatus]:
        """List the processes that work on this database, also those that vanished less than an hour ago."""
        known = self.on_database(workers, self.dialect)
        return activity.statuses(known, self.pauses())

    def snapshot(self) -> Snapshot:
        """Read what goes on right now: rates of the last minute or two, workers, pauses."""
        return activity.snapshot(self.activity(timedelta(minutes=2)), self.workers(), self.pauses())

    def pauses(self) -> Sequence[Pause]:
        """List the paused consumers: since when, by whom and why."""
        return self.on_database(pauses, self.dialect)[1]

    def doctor(self, *, grace: timedelta | None = None) -> Diagnosis:
        """Find what is wrong, or soon will be: settings, tables, rows that wait and, with an App, its brokers.

        Args:
            grace: how long `txbox run` may drain; None leaves that out.

        Raises:
            StoreUnavailable: the database does not answer. A broker that does not answer, or a missing
                right, is listed in `unchecked`.

        It changes nothing, and the cost does not grow with the tables.
        """
        diagnosis = Diagnosis()
        self.on_database(examine, self.app, diagnosis)
        if says_anything(self.app):
            examine_app(self.app, diagnosis, grace)
        diagnosis.sort()
        return diagnosis

    def list(
        self, where: Filter[RowT, Any], *, limit: int = 50, before: int | str | None = None
    ) -> Sequence[RowT]:
        """Read a page, the newest first; for handlers with an order, also what each message waits for.

        Args:
            before: `tables.place_of` the last row of the page before.
        """
        return self.page(where, limit=limit, before=before).rows

    def failures(self) -> Sequence[tables.FailureGroup]:
        """Group the newest dead and failed messages of each consumer by fingerprint, the largest group first."""
        groups: dict[tuple[str | None, str | None], tables.FailureGroup] = {}
        consumers = self.consumers()
        share = _GROUPED // (2 * len(consumers) or 1)
        most = min(max(share, _GROUPED_MIN), _GROUPED_MAX)
        for consumer in consumers:
            for status in ("dead", "failed"):
                params = {"consumer": consumer, "status": status, "most": most}
                found = self.page_rows("failure_groups", params)
                more = sum(int(row[2]) for row in found) == most
                for row in found:
                    fresh = tables.failures_of(consumer, status, row, more=more)
                    key = fresh.fingerprint, fresh.error_type
                    groups[key] = groups[key].joined(fresh) if key in groups else fresh
        largest = sorted(groups.values(), key=lambda group: group.count, reverse=True)
        shown, others = largest[:_SHOWN_GROUPS], largest[_SHOWN_GROUPS:]
        return [*(replace(group, error=self._error_of(*group.sample)) for group in shown), *others]

    def _error_of(self, consumer: str, message_id: str) -> str | None:
        """The first line of a message's error; None when it is gone."""
        where = InboxFilter(consumer=consumer, message_id=message_id)
        errors = [(message.error or "").partition("\n")[0] for message in self.messages(where)]
        return errors[0] or None if errors else None

    def audit(self, *, limit: int = 50, before: int | None = None) -> Sequence[tables.Audited]:
        """Read what operators have changed, a row for each batch, the newest first.

        Args:
            before: the `number` of the last row of the page before.
        """
        found = self.page_rows("audit_list", {"limit": limit, "before": before})
        return [tables.audited_of(row) for row in found]

    def show(self, where: Filter[Any, MessageT], *, reveal: bool = False) -> Sequence[MessageT]:
        """Read a message with everything that is known of it.

        Args:
            where: consumer and id in the inbox, id in the outbox; in the quarantine id or hash, which may
                match several, of which the oldest 20 are read.
            reveal: include payload and header values, which may be personal or secret.

        Raises:
            ConfigurationError: the filter names no message.
        """
        if not _named(where) or (where.table is INBOX and not where.criteria().get("consumer")):
            raise ConfigurationError("Which message? Give its consumer and id.")
        found = self.messages(where, reveal=reveal)
        if where.table is INBOX:
            return self.with_waits(found)
        return [self._with_head(message) for message in found]

    def _with_head(self, message: Any) -> Any:
        """An outgoing message with the state of the one that must leave before it."""
        if not isinstance(message, tables.OutboxMessage) or message.waits_for is None:
            return message
        for head in self.messages(OutboxFilter(message_id=message.waits_for.message_id)):
            waits_for = replace(
                message.waits_for, status=head.status, next_attempt_at=head.next_attempt_at
            )
            return replace(message, waits_for=waits_for)
        return message

    def explain(self, message_id: str, *, consumer: str | None = None) -> Explanation:
        """Say where one message stands, why, and what would let it go on.

        Args:
            consumer: only in its inbox and quarantine; by default those of all consumers, and the outbox.

        Nothing is changed, and no lock is waited for. What depends on handlers and routes needs an App.
        """
        return explained(look(self, _as_stored(message_id), consumer), self.app)

    def reveal(
        self,
        where: Filter[Any, MessageT],
        *,
        actor: str | None = None,
        reason: str | None = None,
    ) -> Sequence[MessageT]:
        """As `show`, with payload and header values; `txbox_audit` says who looked, and why, before they see it.

        Raises:
            ConfigurationError: the filter names no message.
        """
        found = self.show(where)
        if not found:
            return found
        self._announce(where.table.audited.format("reveal"), where, actor, reason, len(found))
        return self.show(where, reveal=True)

    def schema(self) -> schemas.SchemaState:
        """Read the version of the tables, and where they are."""
        return self.on_database(schemas.check, self.dialect)

    # -- changing -----------------------------------------------------------------------------

    def retry(self, where: InboxFilter | OutboxFilter, **how: Unpack[How]) -> Changed:
        """Give messages a full new budget of attempts, due at once, under their ids.

        A filter matches dead messages unless it names the status `failed`; with a message id it matches
        both. Rows of a broken transaction (their effects are unknown) are left alone unless the filter
        names the message id or that error type. An outgoing message leaves before the later ones of its key.

        Guarantee: batches are small transactions with their audit row, and never wait for live traffic.
        """
        return self._change("retry", where, how)

    def canary(
        self,
        where: InboxFilter,
        *,
        patience: timedelta = changes.PATIENCE,
        on_step: Callable[[changes.Step], None] | None = None,
        **how: Unpack[How],
    ) -> changes.Redriven:
        """Retry dead messages one, then ten, then five hundred at a time, as long as their failure does not return.

        Workers run them, and each step waits for the one before. It stops when a message fails with the
        fingerprint of the filter (without one, when any fails), when a step processes nothing, or when no
        worker takes the messages. A dry run counts.

        Args:
            patience: stop when no message of a step has been processed or failed for so long.
            on_step: called after each step.

        Raises:
            ConfigurationError: a filter that names a message, or another status than dead.

        Guarantee: that of `retry`; after a crash the released messages are retried, the rest stay dead.
        """
        changes.check_canary(where)
        where = replace(where, status=Status.DEAD)
        total = self.retry(where, dry_run=True).count
        most = how.get("most")
        total = total if most is None else min(most, total)
        if how.get("dry_run"):
            return changes.Redriven(steps=(), count=0, left=total, stopped=None)
        report, reason, done = how.get("progress"), how.get("reason"), 0
        who = {"actor": how.get("actor"), "reason": f"canary: {reason}" if reason else "canary"}

        def release(size: int) -> Sequence[changes.Named]:
            nonlocal done
            given = cast("How", {**who, "most": size})
            changed = self._change("retry", where, given, named_max=size)
            done += changed.count
            if report is not None:
                report(done)
            return [(key["consumer"], key["message_id"]) for key in changed.sample]

        return changes.redriven(
            self,
            where.fingerprint,
            total=total,
            release=release,
            cancelled=how.get("cancelled") or (lambda: False),
            patience=patience,
            on_step=on_step or (lambda _: None),
        )

    def discard(
        self, where: InboxFilter | OutboxFilter | QuarantineFilter, **how: Unpack[How]
    ) -> Changed:
        """Give messages up for good: they never run or leave, and a copy that arrives later is a duplicate.

        A filter matches dead messages unless it names another status; with a message id it matches every
        status that can be discarded. An outgoing message whose relay died may have been published before.
        A quarantined message loses its payload at once, and its row after `Retention.quarantine`.
        The guarantee is that of `retry`.
        """
        return self._change("discard", where, how)

    def edit(
        self,
        consumer: str,
        message_id: str,
        *,
        payload: bytes | None = None,
        content_type: str | None = None,
        headers: Mapping[str, str | None] | None = None,
        expected: str | None = None,
        **how: Unpack[How],
    ) -> Edited:
        """Correct what a dead or failed message carries, and give it a full new budget of attempts, due at once.

        It keeps its id, its place and the hash of the original, whose copies stay duplicates. The original stays in
        the quarantine, as `replaced`, as long as the message itself. With an App, its handler must be able to read
        the new payload, and find the same id and version in it.

        Args:
            payload: the new payload; None keeps the old one.
            content_type: in the same way.
            headers: new values by name, in any case; None removes a header.
            expected: the `version` that a dry run returned; None edits whatever is there.

        Raises:
            MessageChanged: payload, content type or headers are no longer those of `expected`.
            ConfigurationError: nothing to change, no dead or failed message with a payload under this id,
                a payload that the handler refuses, or one copied from redacted text.

        Guarantee: the change, the copy of the original and the audit row are one commit.
        """
        if payload is None and content_type is None and not headers:
            raise ConfigurationError("Nothing to edit: give a payload, a content type or headers.")
        redact = self.app.store.columns.redact
        hidden = [name for name, value in (headers or {}).items() if value == HIDDEN]
        if any(redact.header(name, "") for name in hidden) or redact.was_shown(payload or b""):
            raise ConfigurationError(
                f"Your edit contains {HIDDEN!r}, which stands for what App(redact=…) hides: give the real value."
            )
        where, audit = InboxFilter(consumer=consumer, message_id=message_id), _audit(how)
        changed = partial(
            self._edited,
            consumer,
            payload=payload,
            content_type=content_type,
            headers=headers or {},
            expected=expected,
        )
        found = self.on_database(again, changes.edit, self.store, where, changed, audit)
        if found is None:
            raise ConfigurationError(self.why_not("edit", where))
        self._emit("edit", 1, audit)
        before, after = found
        return Edited(
            dry_run=audit is None,
            version=_version(before),
            payload_bytes=(_length(before), _length(after)),
            payload_hash=(payload_hash(before).hex(), payload_hash(after).hex()),
            headers=tuple(sorted({name.lower() for name in headers or {}})),
        )

    def _edited(
        self,
        consumer: str,
        arrival: Arrival,
        *,
        payload: bytes | None,
        content_type: str | None,
        headers: Mapping[str, str | None],
        expected: str | None,
    ) -> Message[Any]:
        message = arrival.message
        if expected not in (None, _version(message)):
            raise MessageChanged("The message has changed meanwhile: look at it again.")
        changed = {name.lower() for name in headers}
        kept = [pair for pair in message.headers if pair[0].lower() not in changed]
        given = [(name, value) for name, value in headers.items() if value is not None]
        after = replace(
            message,
            payload=message.payload if payload is None else payload,
            content_type=content_type or message.content_type,
            headers=Headers([*kept, *given]),
        )
        found = self.app.handlers.matching(message.topic, message.type, consumer)
        if found:
            _check_edited(found[0], arrival, after, self.app.limits)
        return after

    def reroute(self, where: OutboxFilter, to: str, **how: Unpack[How]) -> Changed:
        """Give outgoing messages another route, with a full new budget of attempts, under their ids.

        A filter matches messages that have not left, and dead ones only if it names the status `dead`; with
        a message id it matches both. The guarantee is that of `retry`.

        Args:
            to: a route as `topics` and `list` show it, or the name= of app.publish; "" is any App that
                publishes or consumes the topic.
        """
        return self._change("reroute", where, how, to=to)

    def unserved(self, route: str) -> str | None:
        """Warn about a route that no relay of this App or of a running process is known to have.

        Returns: a sentence; None where a relay has it, or any App may take what goes there.
        """
        known = {served.name for served in self.app.routes.all()}
        known.update(*(worker.routes for worker in self.workers()))
        if not route or route in known or route.startswith(LOCAL):
            return None
        have = ", ".join(map(repr, sorted(known))) or "none"
        return (
            f"No relay is known to have the route {route!r}, so what goes there waits until one runs; "
            f"known routes are {have}."
        )

    def accept(
        self, where: QuarantineFilter, *, message_id: str | None = None, **how: Unpack[How]
    ) -> Changed:
        """Store quarantined messages as pending, in the order of their arrival, to be processed after all.

        Each keeps its id. One without an id, or under the id of another message (a known id with another
        payload), needs `message_id`. With an App, its handler determines version and hash.

        Args:
            message_id: the id to store it under; then the filter must match one message.

        Raises:
            ConfigurationError: `message_id`, and the filter matches several messages.

        Guarantee: each pending row, the end of its quarantine row and its audit row are one commit.
        """
        if message_id is not None:
            several = sum(matching.rows for matching in self._matching("accept", where))
            if several > 1:
                raise ConfigurationError(
                    f"A new id is for one message, and {several} match: give the hash, too."
                )

        def accept(key: Key, audit: Audit | None) -> str | None:
            arrival_of = partial(self._accepted, key, message_id)
            token = secrets.token_hex(16)
            try:
                self.on_database(changes.accept, self.store, key, arrival_of, audit, token=token)
            except UnusableMessage as error:
                return str(error)
            return None

        return self._change("accept", where, how, each=accept)

    def _accepted(self, key: Key, message_id: str | None, message: Message[Any]) -> Arrival:
        consumer, known, _ = key
        if not consumer:
            raise UnusableMessage("no handler consumed it: send it again with `txbox send`")
        if message_id is None and not known:
            raise UnusableMessage("it has no id: give it one (--id)")
        accepted_id = known if message_id is None else canonical_id(message_id)
        found = self.app.handlers.matching(message.topic, message.type, consumer)
        if found:
            return found[0].accepted(message, accepted_id)
        return Arrival(message, accepted_id, payload_hash(message))

    def pause(self, consumer: str, **how: Unpack[How]) -> bool:
        """Stop all workers from running a consumer until it is resumed; returns False when it is paused already.

        Every worker notices within a few seconds, and later ones when they start. Running messages finish; rows
        stay in the table. A source without another consumer is not received from, and keeps its messages;
        messages of a shared source, of `process` or of a webhook are stored as pending.

        Guarantee: the pause and its audit row are one commit.
        """
        return self._paused("pause", pause, consumer, how)

    def resume(self, consumer: str, **how: Unpack[How]) -> bool:
        """Let workers run a consumer again, within a few seconds; returns False when it is not paused.

        Guarantee: the end of the pause and its audit row are one commit.
        """
        return self._paused("resume", resume, consumer, how)

    def _paused(
        self, action: str, change: Callable[..., Coroutine[Any, Any, bool]], consumer: str, how: How
    ) -> bool:
        audit = _audit(how)
        checked_consumer(consumer)
        done = self.on_database(
            change,
            self.dialect,
            consumer,
            actor=default_actor() if audit is None else audit.actor,
            reason=how.get("reason"),
            dry_run=audit is None,
        )
        self._emit(action, int(done), audit)
        return done

    def replay(
        self, where: InboxFilter, *, as_consumer: str | None = None, **how: Unpack[How]
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
        audit = _audit(how)
        done = Replay(reader=self, where=where, as_consumer=as_consumer, audit=audit).carried_out(
            how.get("progress")
        )
        self._emit("replay", done.processed + done.stored, audit)
        return done

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
        where = InboxFilter(consumer=consumer, message_id=_as_stored(message_id))
        if not self.has_handlers:
            raise ConfigurationError("A rehearsal runs a handler: give the App.")
        found = self.kept(where, after=-1, limit=1)
        if not found:
            raise ConfigurationError(self.why_not("rehearse", where))
        arrival = found[0].arrival
        if payload is not None:
            arrival = replace(arrival, message=replace(arrival.message, payload=payload))
        message = arrival.message
        matching = self.app.handlers.matching(message.topic, message.type, consumer)
        if not matching:
            raise ConfigurationError(
                f"{consumer} has no handler for topic {message.topic!r} with type {message.type!r}."
            )
        replay.check_rehearsal(self.app, matching[0])
        self._announce("rehearse", where, actor, reason, 1)
        return self.on_handlers_database(
            matching[0], replay.rehearsed, self.app, matching[0], arrival
        )

    def _announce(
        self,
        action: str,
        where: Filter[Any, Any],
        actor: str | None,
        reason: str | None,
        affected: int,
    ) -> None:
        audit = Audit(actor=actor or default_actor(), reason=reason)
        self.on_database(changes.announce, self.store, audit, action, where, affected)

    def _change(
        self,
        verb: Verb,
        where: Filter[Any, Any],
        how: How,
        *,
        to: str | None = None,
        each: Callable[[Key, Audit | None], str | None] | None = None,
        named_max: int = _SAMPLE,
    ) -> Changed:
        """Change what a filter matches, in batches; or one by one with `each`, which says why a message is refused."""
        table, audit, report = where.table, _audit(how), how.get("progress")
        named = _named(where) or getattr(where, "error_type", None) == BROKEN.error_type
        broken = BROKEN.error_type if verb == "retry" and table is INBOX and not named else None
        counted = self._matching(verb, where, broken)
        most, is_cancelled = how.get("most"), how.get("cancelled")
        count = spared = 0
        cancelled = False
        sample: list[Key] = []
        refused: list[dict[str, str]] = []
        for matching in counted:
            after, more = None, True
            while more and (audit or each or len(sample) < named_max):
                if most is not None and count >= most:
                    break
                if is_cancelled is not None and is_cancelled():
                    cancelled = True
                    break
                batch = self.on_database(
                    again, changes.change, self.store, verb, where, matching, None if each else audit,
                    spared=broken, after=after, to=to, most=None if most is None else most - count,
                )  # fmt: skip
                whys = {key: each(key, audit) for key in batch.keys} if each else {}
                refused += [{**_key(table, key), "reason": why} for key, why in whys.items() if why]
                changed = [key for key in batch.keys if not whys.get(key)]
                sample += changed[: named_max - len(sample)]
                count, spared = count + len(changed), spared + batch.spared
                after, more = batch.place, batch.place is not None
                if report is not None and audit is not None:
                    report(count)
        if audit is None and each is None:
            count = sum(matching.rows for matching in counted)
            spared = sum(matching.spared for matching in counted)
        self._emit(table.audited.format(verb), count, audit)
        return Changed(
            action=verb,
            dry_run=audit is None,
            count=count,
            spared=spared,
            sample=tuple(_key(table, key) for key in sample),
            refused=tuple(refused),
            cancelled=cancelled,
        )

    def _matching(
        self, verb: Verb, where: Filter[Any, Any], spared: str | None = None
    ) -> Sequence[Matching]:
        """Count what a change matches, in the order in which to change it; nothing is locked."""
        statuses = list(_statuses(verb, where))
        params = {**where.params(), "needs_payload": verb == "retry", "spared": spared}
        found = self.rows(f"{where.table.name}_count", params, {"status": statuses})
        counted = [
            Matching(status, consumer, int(count - left), int(left))
            for status, consumer, count, left in found
        ]
        return sorted(counted, key=lambda matching: statuses.index(matching.status))

    def _emit(self, action: str, rows: int, audit: Audit | None) -> None:
        if audit is not None and rows:
            self.app.events.emit(RowsChanged(action=action, rows=rows, actor=audit.actor))

    def why_not(self, verb: str, where: Filter[Any, Any]) -> str:
        """Explain in a sentence why a change or a replay did nothing to the message that a filter names."""
        if where.table is QUARANTINE:
            return "No such quarantined message: `txbox quarantine list` shows what is there."
        consumer = getattr(where, "consumer", None)
        name = str(where.message_id) if consumer is None else f"{consumer} {where.message_id}"
        found: Any = next(iter(self.show(where)), None)
        if found is None and where.table is OUTBOX:
            return (
                f"The outbox has no message {name!r}: what was sent is deleted, unless "
                "RelayPolicy.keep_sent keeps it."
            )
        if found is None:
            return f"{name}: there is no such message; `txbox list` shows which there are."
        if verb == "replay" and not found.has_payload:
            return f"{name}: its payload was not kept; set keep_payload= on the handler for messages to come."
        if verb == "replay":
            return f"{name} is {found.status}: only processed messages are replayed."
        if verb == "rehearse":
            return (
                f"{name} has no payload to run its handler with: it was not kept (keep_payload=)."
            )
        if verb == "edit" and found.status not in (Status.DEAD, Status.FAILED):
            return f"{name} is {found.status}: only dead and failed messages can be edited."
        if found.status == Status.PROCESSED and verb != "discard":
            return f"{name} is processed: `txbox replay` runs it again."
        if verb != "edit" and found.status not in where.table.changes[cast("Verb", verb)].statuses:
            return f"{name} is {found.status}: {verb} does not apply."
        if verb in ("retry", "edit") and where.table is INBOX and not found.has_payload:
            return f"{name} has no payload: send it again from its producer."
        return f"{name} is held by a transaction or a relay right now: try again."


def _audit(how: How) -> Audit | None:
    """Who changes something and why; None in a dry run."""
    if how.get("dry_run"):
        return None
    return Audit(actor=how.get("actor") or default_actor(), reason=how.get("reason"))


def _length(message: Message[Any]) -> int | None:
    return None if message.payload is None else len(message.payload)


def _version(message: Message[Any]) -> str:
    """Of what an edit may change: 32 hexadecimal digits."""
    content = (message.payload, message.content_type, list(message.headers))
    return sha256(repr(content).encode()).hexdigest()[:32]


def _check_edited(handler: Handler, arrival: Arrival, after: Message[Any], limits: Limits) -> None:
    """Check that a handler can read an edited message, and finds the same id and version in it.

    Raises:
        ConfigurationError: it does not.
    """
    try:
        if handler.options.message_id is not None:
            made = handler.arrival(replace(after, id=None), limits)
        else:
            made = handler.accepted(after, arrival.message_id)
        handler.bound(replace(made, message=after))
    except (UnusableMessage, Reject) as error:
        raise ConfigurationError(
            f"{handler.consumer} could not read the edited message: {error}"
        ) from None
    if made.message_id != arrival.message_id or made.message.sequence != arrival.message.sequence:
        raise ConfigurationError(
            f"The new payload has another id or version for {handler.consumer}: leave these as they are, or send a "
            "new message."
        )
    if after.payload is not None and len(after.payload) > limits.payload_bytes:
        raise ConfigurationError(
            f"The new payload has {len(after.payload)} bytes, the limit is {limits.payload_bytes}: raise "
            "Limits.payload_bytes."
        )


def default_actor() -> str:
    """The login name and the host, as `txbox_audit` records them."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        # a container's user id may have no name
        user = "unknown"
    return f"{user}@{socket.gethostname()}"


def _as_stored(message_id: str) -> str:
    """The id in the row: a long one is stored as its hash, which is accepted as well."""
    try:
        return message_id if message_id.startswith(DIGEST_PREFIX) else canonical_id(message_id)
    except UnusableMessage as error:
        raise ConfigurationError(str(error)) from None


def _key(table: tables.Table, key: Key) -> dict[str, str]:
    values = (
        bytes(value).hex() if name == "hash" else str(value)
        for name, value in zip(table.key, key, strict=True)
    )
    return dict(zip(table.key, values, strict=True))


def _named(where: Filter[Any, Any]) -> bool:
    """Whether a filter names single messages."""
    return where.message_id is not None or getattr(where, "hash", None) is not None


def _statuses(verb: Verb, where: Filter[Any, Any]) -> tuple[str, ...]:
    """The statuses to change, in the order in which to change them."""
    change = where.table.changes[verb]
    if where.status is None:
        return change.statuses if _named(where) else change.meant
    if where.status not in change.statuses:
        raise ConfigurationError(
            f"{verb} does not apply to the status {where.status!r}: use {' or '.join(change.statuses)}."
        )
    return (where.status,)
