"""The operator's verbs: look at messages, and retry, discard, reroute, accept or replay them, each change audited."""

from __future__ import annotations

import asyncio
import getpass
import secrets
import socket
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from hashlib import sha256
from itertools import zip_longest
from typing import Any, Literal, ParamSpec, Self, TypedDict, TypeVar, Unpack, cast

from txbox.admin import activity, canary, rehearse, tables
from txbox.admin.activity import Activities, Snapshot, WorkerStatus
from txbox.admin.doctor import ConfiguredApp, Diagnosis, examine, examine_app, says_anything
from txbox.admin.explain import Explanation, explained
from txbox.admin.found import look
from txbox.admin.queries import Audit, Key, Meant, Page, Queries
from txbox.admin.rehearse import Rehearsed
from txbox.admin.replay import Application, Progress, Replay, Replayed, again
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
from txbox.connections import open_database
from txbox.connections.base import Database
from txbox.errors import ConfigurationError, Reject, UnusableMessage
from txbox.events import Events, RowsChanged
from txbox.handlers import Handler, Handlers
from txbox.identity import DIGEST_PREFIX, canonical_id, checked_consumer, payload_hash
from txbox.message import Headers, Message
from txbox.outbox import Routes
from txbox.outcome import Status
from txbox.policy import HIDDEN, Lease, Limits, RelayPolicy, Retention
from txbox.processing.attempt import InboxProtocol
from txbox.processing.failure import BROKEN
from txbox.session import Operation, Session, drive, drive_async
from txbox.store import pauses, waits
from txbox.store import schema as schemas
from txbox.store.activity import workers
from txbox.store.codec import Arrival, Columns
from txbox.store.dialect import dialect
from txbox.store.inbox import InboxStore
from txbox.store.pauses import Pause
from txbox.store.waits import Waits

T = TypeVar("T")
P = ParamSpec("P")

_SAMPLE = 10
# groups of failures whose error is read, too
_SHOWN_GROUPS = 20

__all__ = [
    "Admin", "Changed", "Edited", "How", "InboxFilter", "MessageChanged", "OutboxFilter", "QuarantineFilter",
]  # fmt: skip


class How(TypedDict, total=False):
    """What every change takes.

    Keys:
        actor: who changes this, for `txbox_audit`; by default the login name and the host.
        reason: why.
        dry_run: count, and change nothing.
        progress: called after each batch with the number of messages done so far.
        most: change no more than that many, the oldest first.
        cancelled: asked before each batch; when it says so, the change ends there.
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
        sample: the first of the changed rows, by the columns of `Table.key`.
        refused: the rows that cannot be accepted, in the same way, with the reason.
        cancelled: it ended before everything was changed that is meant.
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
        version: of what was there before: an edit that gives it as `expected` changes nothing else.
        payload_hash: SHA-256 in hexadecimal digits.
        headers: the names of those that were set or removed.
    """

    dry_run: bool
    version: str
    payload_bytes: tuple[int | None, int | None]
    payload_hash: tuple[str, str]
    headers: tuple[str, ...]


class MessageChanged(ConfigurationError):
    """Somebody has changed the message since the version that an edit expects."""


class Admin:
    """The operator's view of one inbox and outbox. A filter says which table a verb is about.

    Args:
        target: an App; or a database URL, pool or engine, which is enough for everything but `replay`,
            and for what messages of an order wait for.
        schema: with a database: the PostgreSQL schema of the tables.

    Nothing connects before the first verb. A verb may be called from any thread, but not inside a
    running event loop: use `asyncio.to_thread` there.
    """

    def __init__(self, target: Any, *, schema: str | None = None) -> None:
        if hasattr(target, "protocol") and hasattr(target, "handlers"):
            self._app = cast("Application", target)
            self._owned = False
        else:
            self._app = _Bare(open_database(target, schema=schema))
            self._owned = True
        self._queries = Queries(self._app.store)
        self._runner: asyncio.Runner | None = None
        self._checked = False
        #: Where async connections belong to a loop that runs already: the verbs are then called from other threads.
        self.loop: asyncio.AbstractEventLoop | None = None

    @property
    def has_handlers(self) -> bool:
        """Whether handlers can be run: those of an App."""
        return len(self._app.handlers) > 0

    # -- looking ------------------------------------------------------------------------------

    def status(self) -> Sequence[tables.ConsumerStatus]:
        """Count every consumer's rows; its cost grows with the table."""
        return self._drive(self._queries.status)

    def topics(self) -> Sequence[tables.TopicStatus]:
        """Count every topic's outgoing messages; its cost grows with the table."""
        return self._drive(self._queries.topics)

    def sizes(self) -> tuple[Sequence[tables.TableSize], tables.PartitionStatus | None]:
        """Tell how large the tables and their indexes are, and how the inbox is partitioned."""
        return self._drive(self._queries.sizes)

    def activity(
        self, last: timedelta = timedelta(hours=1), *, step: timedelta = timedelta(minutes=1)
    ) -> Activities:
        """Read what became of messages in the last hour, or another time, by consumer and by route of the outbox.

        It reads what workers and relays have counted, and never the inbox: its cost grows with time and consumers.

        Args:
            last: whole minutes, up to `Retention.activity`.
            step: of one point, whole minutes.

        Raises:
            ConfigurationError: a step that is no minute or more, or longer than the time.
        """
        return self._drive(activity.read, self._app.store.dialect, last, step)

    def workers(self) -> Sequence[WorkerStatus]:
        """Tell which processes work on this database, or did until less than an hour ago and ended without a word."""
        known = self._drive(workers, self._app.store.dialect)
        return activity.statuses(known, self.pauses())

    def snapshot(self) -> Snapshot:
        """Tell what goes on right now: rates of the last minute or two, who is at work, what is paused."""
        recent = self.activity(timedelta(minutes=2))
        paused = self.pauses()
        known = self._drive(workers, self._app.store.dialect)
        return activity.snapshot(recent, activity.statuses(known, paused), paused)

    def pauses(self) -> Sequence[Pause]:
        """Tell which consumers are paused, by whom, since when and why."""
        return self._drive(pauses.read, self._app.store.dialect)[1]

    def doctor(self, *, grace: timedelta | None = None) -> Diagnosis:
        """Find what is wrong, or soon will be: settings, tables, rows that wait and, with an App, its brokers.

        Args:
            grace: how long `txbox run` may drain; None leaves that out.

        Raises:
            StoreUnavailable: the database does not answer. A broker that does not, or a right that is
                missing, is told in `unchecked`.

        It changes nothing, and its cost does not grow with the tables.
        """
        diagnosis, app = Diagnosis(), self._app
        # around a URL alone there may be an App that nobody has said anything to
        configured = app if isinstance(app, ConfiguredApp) and says_anything(app) else None
        self._on_database(examine, app.database.dialect, app.database, configured, diagnosis)
        if configured is not None:
            examine_app(configured, diagnosis, grace)
        diagnosis.sort()
        return diagnosis

    def list(
        self, where: Filter[RowT, Any], *, limit: int = 50, before: int | str | None = None
    ) -> Sequence[RowT]:
        """Read a page, the newest first; of handlers with an order, what each message waits for.

        Args:
            before: `tables.place_of` the last row of the page before.
        """
        return self.page(where, limit=limit, before=before).rows

    def page(
        self,
        where: Filter[RowT, Any],
        *,
        limit: int = 50,
        before: int | str | None = None,
        within_s: float | None = None,
    ) -> Page[RowT]:
        """As `list`, with the place behind which there may be more.

        Args:
            within_s: look about that long: where no index knows what is asked for, a page may then have fewer
                rows than `limit`, or none, and more behind it.
        """
        page = self._drive(self._queries.page, where, limit=limit, before=before, within_s=within_s)
        if where.table is not INBOX:
            return page
        return Page([*self._with_waits(page.rows)], page.behind)

    def overview(self) -> tuple[Sequence[tables.ConsumerStatus], Sequence[tables.TopicStatus]]:
        """Count what is open, each count up to `COUNTED_MAX` and one: its cost does not grow with the tables."""
        return self._drive(self._queries.overview)

    def consumers(self) -> Sequence[str]:
        """Name the consumers that have rows in inbox or quarantine, "" among them; its cost is that of their number."""
        return self._drive(self._queries.consumers)

    def failures(self) -> Sequence[tables.FailureGroup]:
        """Group what is dead or failed by fingerprint, the most frequent first; of each consumer the newest ones."""
        groups = self._drive(self._queries.failures)
        samples = [
            InboxFilter(consumer=group.sample[0], message_id=group.sample[1])
            for group in groups[:_SHOWN_GROUPS]
        ]
        errors = [
            next(
                (
                    message.error
                    for message in self._drive(self._queries.shown, where, reveal=False)
                ),
                None,
            )
            for where in samples
        ]
        return [
            replace(group, error=(error or "").partition("\n")[0] or None)
            for group, error in zip_longest(groups, errors)
        ]

    def audit(self, *, limit: int = 50, before: int | None = None) -> Sequence[tables.Audited]:
        """Read what operators have changed, a row for each batch, the newest first.

        Args:
            before: the `number` of the last row of the page before.
        """
        return self._drive(self._queries.audit, limit=limit, before=before)

    def show(self, where: Filter[Any, MessageT], *, reveal: bool = False) -> Sequence[MessageT]:
        """Read a message with everything that is known of it.

        Args:
            where: consumer and id in the inbox, id in the outbox; in the quarantine id or hash, which may
                mean several, of which the oldest 20 are read.
            reveal: include payload and header values, which may be personal or secret.

        Raises:
            ConfigurationError: the filter names no message.
        """
        if not _named(where) or (where.table is INBOX and not where.criteria().get("consumer")):
            raise ConfigurationError("Which message? Give its consumer and id.")
        found = self._drive(self._queries.shown, where, reveal=reveal)
        if where.table is INBOX:
            return self._with_waits(found)
        return [self._with_head(message) for message in found]

    def explain(self, message_id: str, *, consumer: str | None = None) -> Explanation:
        """Say of one message where it stands, why, and what would let it go on.

        Args:
            consumer: only in its inbox and quarantine; by default those of all consumers, and the outbox.

        Nothing is changed, and no lock is waited for. What depends on handlers and routes is said with an App only.
        """
        found = self._drive(look, self._app, _as_stored(message_id), consumer)
        return explained(found, self._app)

    def reveal(
        self,
        where: Filter[Any, MessageT],
        *,
        actor: str | None = None,
        reason: str | None = None,
    ) -> Sequence[MessageT]:
        """As `show`, with payload and header values; who has looked, and why, is in `txbox_audit` before they see it.

        Raises:
            ConfigurationError: the filter names no message.
        """
        found = self.show(where)
        if not found:
            return found
        audit = Audit(actor=actor or default_actor(), reason=reason)
        action = where.table.audited.format("reveal")
        self._drive(self._queries.announce, audit, action, where, len(found))
        return self.show(where, reveal=True)

    def schema(self) -> schemas.SchemaState:
        """Tell the version of the tables, and where they are."""
        return self._drive(schemas.check, self._app.store.dialect)

    def _with_waits(self, rows: Sequence[Any]) -> Sequence[Any]:
        waiting: dict[tuple[str, str], Waits] = {}
        for consumer, handlers in self._app.handlers.consumers().items():
            in_order = [handler.options for handler in handlers if handler.options.in_order]
            ids = [
                row.message_id
                for row in rows
                if row.consumer == consumer
                and row.status in (Status.PENDING, Status.FAILED)
                and row.key is not None
            ]
            if in_order and ids:
                options, current = in_order[0], self._app.store.dialect
                found = (
                    self._drive(
                        waits.by_arrival, current, consumer, ids, dead_blocks=options.dead_blocks
                    )
                    if options.ordered
                    else self._drive(
                        waits.by_version, current, consumer, ids, first=options.gaps.first
                    )
                )
                waiting |= {(consumer, message_id): what for message_id, what in found.items()}
        return [replace(row, waits_for=waiting.get((row.consumer, row.message_id))) for row in rows]

    def _with_head(self, message: Any) -> Any:
        if not isinstance(message, tables.OutboxMessage) or message.waits_for is None:
            return message
        head = OutboxFilter(message_id=message.waits_for.message_id)
        known = [
            replace(message.waits_for, status=row.status, next_attempt_at=row.next_attempt_at)
            for row in self._drive(self._queries.shown, head, reveal=False)
        ]
        return replace(message, waits_for=known[0]) if known else message

    # -- changing -----------------------------------------------------------------------------

    def retry(self, where: InboxFilter | OutboxFilter, **how: Unpack[How]) -> Changed:
        """Give messages a full new budget of attempts, due at once, under their ids.

        A filter means dead messages unless it names the status `failed`; with a message id it means
        both. Rows of a broken transaction (their effects are unknown) are left alone unless the filter
        names the message id or that error type. An outgoing message takes its place before the later
        ones of its key that have not left.

        Guarantee: batches are small transactions with their audit row, and never wait for live traffic.
        """
        return self._change("retry", where, how)

    def canary(
        self,
        where: InboxFilter,
        *,
        patience: timedelta = canary.PATIENCE,
        told: Callable[[canary.Step], None] | None = None,
        **how: Unpack[How],
    ) -> canary.Redriven:
        """Retry dead messages one, then ten, then five hundred at a time, as long as their failure does not return.

        Workers run them; it waits for what becomes of each step. It stops when a message fails with the
        fingerprint of the filter (without one, when a message fails), when nothing of a step was processed, or
        when no worker takes them. A dry run counts.

        Args:
            patience: without any message of a step done or failed for so long, it stops.
            told: called after each step.

        Raises:
            ConfigurationError: a filter that names a message, or another status than dead.

        Guarantee: that of `retry`; after a crash what was let go is retried, and the rest is dead as before.
        """
        canary.check(where)
        where = replace(where, status=Status.DEAD)
        total = self.retry(where, dry_run=True).count
        most = how.get("most")
        total = total if most is None else min(most, total)
        if how.get("dry_run"):
            return canary.Redriven(steps=(), count=0, left=total, stopped=None)
        report, done = how.get("progress"), 0

        def release(where: InboxFilter, size: int) -> Sequence[canary.Named]:
            nonlocal done
            reason = how.get("reason")
            changed = self._change(
                "retry", where,
                {"actor": how.get("actor"), "reason": f"canary: {reason}" if reason else "canary", "most": size},
                named_max=size,
            )  # fmt: skip
            done += changed.count
            if report is not None:
                report(done)
            return [(key["consumer"], key["message_id"]) for key in changed.sample]

        return canary.redriven(
            where,
            total=total,
            release=release,
            look=lambda keys: self._drive(self._queries.states, keys),
            rest=lambda wait_s: self._drive(_rest, wait_s),
            cancelled=how.get("cancelled") or (lambda: False),
            patience=patience,
            told=told or (lambda _: None),
        )

    def discard(
        self, where: InboxFilter | OutboxFilter | QuarantineFilter, **how: Unpack[How]
    ) -> Changed:
        """Give messages up for good: they never run or leave, and a copy that arrives later is a duplicate.

        A filter means dead messages unless it names another status of `Table.changes`; with a message
        id it means all of those. An outgoing message whose relay went away may have been published
        before. Of quarantined messages the payload goes at once, the row after `Retention.quarantine`.
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

        It keeps its id, its place and the hash of what came, so that a copy of that is a duplicate. What was there
        before stays in the quarantine, as `replaced`, as long as the message itself. With an App it is checked that
        the handler can read the new payload, and that it gives the message the same id and version.

        Args:
            payload: instead of the one that it has; None leaves it.
            content_type: in the same way.
            headers: by name, instead of those of that name, in any case; None removes them.
            expected: the `version` that a dry run gave; None takes whatever is there.

        Raises:
            MessageChanged: payload, content type or headers are no longer those of `expected`.
            ConfigurationError: nothing is to be changed, no such message is dead or failed and has its payload,
                its handler refuses the new payload, or that was copied from what a rule hides.

        Guarantee: the change, what was there before and the audit row are one commit.
        """
        if payload is None and content_type is None and not headers:
            raise ConfigurationError(
                "Nothing is to be edited: give a payload, a content type or headers."
            )
        redact = self._app.store.columns.redact
        hidden = [name for name, value in (headers or {}).items() if value == HIDDEN]
        if any(redact.header(name, "") for name in hidden) or redact.was_shown(payload or b""):
            raise ConfigurationError(
                f"What App(redact=…) hides is {HIDDEN!r} in what you gave, as it is shown: give its value."
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
        found = self._drive(again, self._queries.edit, where, changed, audit)
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
        found = self._app.handlers.matching(message.topic, message.type, consumer)
        if found:
            _check_edited(found[0], arrival, after, self._app.limits)
        return after

    def reroute(self, where: OutboxFilter, to: str, **how: Unpack[How]) -> Changed:
        """Send outgoing messages another way, with a full new budget of attempts, under their ids.

        A filter means messages that have not left, dead ones only if it names the status `dead`; with
        a message id it means both. The guarantee is that of `retry`.

        Args:
            to: a route as `topics` and `list` show it, or as app.publish(name=…) names it; "" is any App
                that publishes or consumes the topic.
        """
        return self._change("reroute", where, how, to=to)

    def accept(
        self, where: QuarantineFilter, *, message_id: str | None = None, **how: Unpack[How]
    ) -> Changed:
        """Have messages that were set aside processed after all: they are stored as pending, in the order they came.

        Each keeps its id. One that has none, or whose id is another message's (the same id with another
        payload), needs `message_id`. With an App, version and hash are those of the handler.

        Args:
            message_id: the id to store it under; then the filter must mean one message.

        Raises:
            ConfigurationError: `message_id`, and the filter means several messages.

        Guarantee: each pending row is one commit with the end of its quarantine row and its audit row.
        """
        if message_id is not None:
            several = sum(meant.rows for meant in self._meant("accept", where))
            if several > 1:
                raise ConfigurationError(
                    f"An id is for one message, and {several} match: name its hash, too."
                )

        def accept(key: Key, audit: Audit | None) -> str | None:
            arrival_of = partial(self._accepted, key, message_id)
            token = secrets.token_hex(16)
            return self._drive(self._queries.accept, key, arrival_of, audit, token=token)

        return self._change("accept", where, how, each=accept)

    def _accepted(self, key: Key, message_id: str | None, message: Message[Any]) -> Arrival:
        consumer, known, _ = key
        if not consumer:
            raise UnusableMessage("no handler consumed it: send it again with `txbox send`")
        if message_id is None and not known:
            raise UnusableMessage("it has no id: give it one (--id)")
        accepted_id = known if message_id is None else canonical_id(message_id)
        found = self._app.handlers.matching(message.topic, message.type, consumer)
        if found:
            return found[0].accepted(message, accepted_id)
        return Arrival(message, accepted_id, payload_hash(message))

    def pause(self, consumer: str, **how: Unpack[How]) -> bool:
        """Have no worker run a consumer until it is resumed; returns False when it is paused already.

        Every worker of it hears of that within a few seconds, also one that starts later. What runs then is
        finished; rows stay in the table. A source that has no other consumer is not received from, and keeps its
        messages; what another one shares with it, and what comes by `process` or a webhook, is stored for it.

        Guarantee: the pause and its audit row are one commit.
        """
        return self._paused("pause", pauses.pause, consumer, how)

    def resume(self, consumer: str, **how: Unpack[How]) -> bool:
        """Have workers run a consumer again, within a few seconds; returns False when it is not paused.

        Guarantee: the end of the pause and its audit row are one commit.
        """
        return self._paused("resume", pauses.resume, consumer, how)

    def _paused(
        self, action: str, change: Callable[..., Coroutine[Any, Any, bool]], consumer: str, how: How
    ) -> bool:
        audit = _audit(how)
        checked_consumer(consumer)
        done = self._drive(
            change,
            self._app.store.dialect,
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

        Only messages whose payload was kept are met, in arrival order, and none that arrived after
        the start. The filter takes consumer (required), message_id, topic, type and key; with
        `as_consumer` also status.

        Args:
            as_consumer: store the messages as pending rows of this consumer instead of running them.

        Raises:
            ConfigurationError: no consumer, a filter that a replay does not know, or no handler.

        Guarantee: a replay that fails leaves its row `processed` and its effects undone. Each batch is
            announced in `txbox_audit` before it runs; with `as_consumer` it is one commit with its rows.
        """
        audit = _audit(how)
        replay = Replay(
            app=self._app, queries=self._queries, drive=self._drive, run=self._run, where=where,
            as_consumer=as_consumer, audit=audit,
        )  # fmt: skip
        done = replay.carried_out(how.get("progress"))
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
        """Run a message's handler in a transaction that is never committed, and tell what it would have done.

        Any message whose payload is kept can be rehearsed, of whatever status, but one that is being processed.

        Args:
            payload: instead of that of the message, as an edit would leave it.

        Raises:
            ConfigurationError: no App, no such message, no payload, a database that cannot refuse a COMMIT (MySQL,
                MariaDB), or a handler that works outside of a transaction.

        Guarantee: nothing of the transaction stays, and its connection is thrown away. What the handler does
            elsewhere (HTTP, files, other connections) is done. It is announced in `txbox_audit`.
        """
        where = InboxFilter(consumer=consumer, message_id=_as_stored(message_id))
        if not self.has_handlers:
            raise ConfigurationError("A rehearsal runs a handler, which takes the App.")
        found = self._drive(self._queries.kept, where, after=-1, limit=1)
        if not found:
            raise ConfigurationError(self.why_not("rehearse", where))
        arrival = found[0].arrival
        if payload is not None:
            arrival = replace(arrival, message=replace(arrival.message, payload=payload))
        message = arrival.message
        matching = self._app.handlers.matching(message.topic, message.type, consumer)
        if not matching:
            raise ConfigurationError(
                f"{consumer} has no handler for topic {message.topic!r} with type {message.type!r}."
            )
        rehearse.check(self._app, matching[0])
        audit = Audit(actor=actor or default_actor(), reason=reason)
        self._drive(self._queries.announce, audit, "rehearse", where, 1)
        return self._run(matching[0], rehearse.rehearsed, self._app, matching[0], arrival)

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
        """Change what a filter means, in batches; or, a message at a time, by what says why one is refused."""
        table, audit, report = where.table, _audit(how), how.get("progress")
        named = _named(where) or getattr(where, "error_type", None) == BROKEN.error_type
        broken = BROKEN.error_type if verb == "retry" and table is INBOX and not named else None
        counted = self._meant(verb, where, broken)
        most, is_cancelled = how.get("most"), how.get("cancelled")
        count = spared = 0
        cancelled = False
        sample: list[Key] = []
        refused: list[dict[str, str]] = []
        for meant in counted:
            after, more = None, True
            while more and (audit or each or len(sample) < named_max):
                if most is not None and count >= most:
                    break
                if is_cancelled is not None and is_cancelled():
                    cancelled = True
                    break
                batch = self._drive(
                    again,
                        self._queries.change, verb, where, meant, None if each else audit,
                        spared=broken, after=after, to=to, most=None if most is None else most - count
                )  # fmt: skip
                why_not: dict[Key, str | None] = (
                    {key: each(key, audit) for key in batch.keys} if each else {}
                )
                refused += [
                    {**_key(table, key), "reason": why} for key, why in why_not.items() if why
                ]
                changed = [key for key in batch.keys if not why_not.get(key)]
                sample += changed[: named_max - len(sample)]
                count, spared = count + len(changed), spared + batch.spared
                after, more = batch.place, batch.place is not None
                if report is not None and audit is not None:
                    report(count)
        if audit is None and each is None:
            count = sum(meant.rows for meant in counted)
            spared = sum(meant.spared for meant in counted)
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

    def _meant(
        self, verb: Verb, where: Filter[Any, Any], spared: str | None = None
    ) -> Sequence[Meant]:
        return self._drive(self._queries.meant, verb, where, _statuses(verb, where), spared=spared)

    def _emit(self, action: str, rows: int, audit: Audit | None) -> None:
        if audit is not None and rows:
            self._app.events.emit(RowsChanged(action=action, rows=rows, actor=audit.actor))

    def why_not(self, verb: str, where: Filter[Any, Any]) -> str:
        """Say in a sentence why a change or a replay did nothing to the message that a filter names."""
        if where.table is QUARANTINE:
            return "Nothing like that waits for a decision: `txbox quarantine list` shows what is there."
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
            return f"{name} has no payload, which its handler would need: it was not kept (keep_payload=)."
        if verb == "edit" and found.status not in (Status.DEAD, Status.FAILED):
            return f"{name} is {found.status}: only dead and failed messages can be edited."
        if found.status == Status.PROCESSED:
            return f"{name} is processed: `txbox replay` runs it again."
        if verb != "edit" and found.status not in where.table.changes[cast("Verb", verb)].statuses:
            return f"{name} is {found.status}, and cannot be changed by {verb} now."
        if verb in ("retry", "edit") and where.table is INBOX and not found.has_payload:
            return f"{name} has no payload: send it again from its producer."
        return f"{name} is held by a transaction or a relay right now: try again."

    # -- how it runs --------------------------------------------------------------------------

    def _drive(self, operation: Operation[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        if not self._checked:
            self._checked = True
            try:
                self._drive(self._app.check_schema)
            except BaseException:
                self._checked = False
                raise
        return self._on_database(operation, *args, **kwargs)

    def _on_database(self, operation: Operation[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        database = self._app.database
        if database.sync is not None:
            return drive(database.sync, operation, *args, **kwargs)
        assert database.asynchronous is not None
        return self._finish(drive_async(database.asynchronous, operation, *args, **kwargs))

    def _run(
        self, handler: Handler, operation: Operation[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        if not handler.is_async:
            return self._drive(operation, *args, **kwargs)
        connections = self._app.database.asynchronous
        assert connections is not None  # the handler was registered with it
        return self._finish(drive_async(connections, operation, *args, **kwargs))

    def _finish(self, work: Coroutine[Any, Any, T]) -> T:
        # one loop for all verbs: an async connection belongs to the loop that opened it
        if self.loop is not None:
            return asyncio.run_coroutine_threadsafe(work, self.loop).result()
        if self._runner is None:
            self._runner = asyncio.Runner()
        return self._runner.run(work)

    def close(self) -> None:
        """Close what this Admin opened itself; an App that was passed stays open."""
        if self._owned:
            self._app.database.close()
        if self._runner is not None:
            if self._owned:
                self._runner.run(self._app.database.close_async())
            self._runner.close()
            self._runner = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Bare:
    """A database without an App around it."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self.handlers = Handlers()
        self.events = Events()
        self.limits = Limits()
        self.lease = Lease()
        self.retention = Retention()
        self.relaying = RelayPolicy()
        self.routes: Routes | None = None
        self.store = InboxStore(database.dialect, Columns())
        self.protocol = InboxProtocol(self.store, self.events, self.limits, self.lease)

    async def check_schema(self, db: Session) -> None:
        state = await schemas.check(db, self.store.dialect)
        if state.schema is not None:
            self.store.dialect = dialect(self.store.dialect.name, state.schema)


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
    """Check that a handler takes an edited message for the message that it was.

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
        raise ConfigurationError(f"{handler.consumer} could not read it so: {error}") from None
    if made.message_id != arrival.message_id or made.message.sequence != arrival.message.sequence:
        raise ConfigurationError(
            f"The new payload would be another message to {handler.consumer}: leave what its id and version are made "
            "of as it is, or send a new message."
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
    """The id that a row has: a long one is stored as its hash, which may be asked for as well."""
    try:
        return message_id if message_id.startswith(DIGEST_PREFIX) else canonical_id(message_id)
    except UnusableMessage as error:
        raise ConfigurationError(str(error)) from None


async def _rest(db: Session, wait_s: float) -> None:
    await db.wait(wait_s)


def _key(table: tables.Table, key: Key) -> dict[str, str]:
    values = (
        bytes(value).hex() if name == "hash" else str(value)
        for name, value in zip(table.key, key, strict=True)
    )
    return dict(zip(table.key, values, strict=True))


def _named(where: Filter[Any, Any]) -> bool:
    """Say whether single messages are meant, and not what there is of a kind."""
    return where.message_id is not None or getattr(where, "hash", None) is not None


def _statuses(verb: Verb, where: Filter[Any, Any]) -> tuple[str, ...]:
    """The statuses of the rows to change, in the order in which to change them."""
    change = where.table.changes[verb]
    if where.status is None:
        return change.statuses if _named(where) else change.meant
    if where.status not in change.statuses:
        raise ConfigurationError(
            f"The status {where.status!r} cannot be changed by {verb}: use {' or '.join(change.statuses)}."
        )
    return (where.status,)
