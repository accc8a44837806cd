"""The operator's verbs: look at the inbox, and retry, discard or replay messages, each change audited."""

from __future__ import annotations

import asyncio
import getpass
import secrets
import socket
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar, cast

from txbox.admin.outbox import OutboxAdmin
from txbox.admin.replay import Application, Progress, Replay, Replayed, ReplayFailure, again
from txbox.connections import open_database
from txbox.connections.base import Database
from txbox.drive import drive, drive_async
from txbox.errors import ConfigurationError, UnusableMessage
from txbox.events import Events, RowsChanged
from txbox.handlers import Handler, HandlerOptions, Handlers
from txbox.identity import canonical_id, payload_hash
from txbox.message import Message
from txbox.outcome import Status
from txbox.policy import Lease, Limits
from txbox.processing.attempt import InboxProtocol
from txbox.processing.failure import BROKEN
from txbox.steps import Steps
from txbox.store import schema as tables
from txbox.store import waits
from txbox.store.audit import Audit, Change
from txbox.store.codec import Arrival, Columns
from txbox.store.dialect import dialect
from txbox.store.filters import QuarantineFilter, RowFilter
from txbox.store.inbox import InboxStore
from txbox.store.rows import ChangedBatch, InboxRows, QuarantineKey
from txbox.store.shown import (
    ConsumerStatus,
    ListedMessage,
    PartitionStatus,
    QuarantinedMessage,
    RecordedAttempt,
    ShownMessage,
    TableSize,
)
from txbox.store.waits import Waits

T = TypeVar("T")

_BATCH = 500

_CHANGEABLE: dict[Change, tuple[str, ...]] = {
    "retry": (Status.DEAD, Status.FAILED),
    "discard": (Status.DEAD, Status.FAILED, Status.PENDING),
}

__all__ = [
    "Admin",
    "Changed",
    "ChangedQuarantine",
    "ConsumerStatus",
    "ListedMessage",
    "PartitionStatus",
    "QuarantineFilter",
    "QuarantinedMessage",
    "RecordedAttempt",
    "ReplayFailure",
    "Replayed",
    "RowFilter",
    "ShownMessage",
    "TableSize",
    "Waits",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Changed:
    """What a retry or discard did, or in a dry run would do.

    Attributes:
        count: rows changed.
        spared: rows left alone because their transaction was broken; see `Admin.retry`.
        sample: the first of the changed rows, as (consumer, message id).
    """

    action: Change
    dry_run: bool
    count: int
    spared: int
    sample: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class ChangedQuarantine:
    """What was, or in a dry run would be, accepted from the quarantine or discarded.

    Attributes:
        count: rows changed.
        sample: the first of them, as (consumer, message id, hash in hexadecimal digits).
        refused: those that cannot be accepted, as they were selected, and why.
    """

    action: str
    dry_run: bool
    count: int
    sample: tuple[tuple[str, str, str], ...]
    refused: tuple[tuple[QuarantineKey, str], ...]


class Admin:
    """The operator's view of one inbox and outbox.

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
        self._rows = InboxRows(self._app.store)
        #: The same verbs for outgoing messages.
        self.outbox = OutboxAdmin(self._app.store, self._drive, audit=_audit, changed=self._changed)
        self._runner: asyncio.Runner | None = None
        self._checked = False

    # -- looking ------------------------------------------------------------------------------

    def status(self) -> Sequence[ConsumerStatus]:
        """Count every consumer's rows; its cost grows with the table."""
        return self._drive(self._rows.status())

    def sizes(self) -> tuple[Sequence[TableSize], PartitionStatus | None]:
        """Tell how large the tables and their indexes are, and how the inbox is partitioned."""
        return self._drive(self._rows.sizes())

    def list(
        self, where: RowFilter | None = None, *, limit: int = 50, before: int | None = None
    ) -> Sequence[ListedMessage]:
        """Read messages, newest first; of handlers with an order, what each one waits for.

        Args:
            before: the `arrival` of the last message of the page before.
        """
        page = self._drive(self._rows.page(where or RowFilter(), limit=limit, before=before))
        return self._with_waits(page)

    def show(
        self, consumer: str, message_id: str, *, reveal: bool = False
    ) -> tuple[ShownMessage | None, Sequence[QuarantinedMessage]]:
        """Read one message with its attempts, and what is quarantined under its id.

        Args:
            reveal: include payload and header values, which may be personal or secret.
        """
        found, aside = self._drive(self._rows.shown(consumer, message_id, reveal=reveal))
        if found is not None:
            found = replace(found, message=self._with_waits([found.message])[0])
        return found, aside

    def quarantined(
        self,
        consumer: str | None = None,
        *,
        where: QuarantineFilter | None = None,
        limit: int = 50,
    ) -> Sequence[QuarantinedMessage]:
        """Read the latest messages that were set aside and wait for a decision; or those of a filter."""
        where = where or QuarantineFilter(consumer=consumer, status="quarantined")
        return self._drive(self._rows.quarantined(where, limit=limit))

    def show_quarantined(
        self, where: QuarantineFilter, *, reveal: bool = False
    ) -> Sequence[QuarantinedMessage]:
        """Read up to 20 quarantined messages, the oldest first.

        Args:
            reveal: include payloads, which may be personal or secret.
        """
        return self._drive(self._rows.show_quarantined(where, reveal=reveal))

    def _with_waits(self, page: Sequence[ListedMessage]) -> Sequence[ListedMessage]:
        waiting: dict[tuple[str, str], Waits] = {}
        for consumer, handlers in self._app.handlers.consumers().items():
            options = next(
                (handler.options for handler in handlers if handler.options.in_order), None
            )
            if options is None:
                continue
            ids = [
                message.message_id
                for message in page
                if message.consumer == consumer
                and message.status in (Status.PENDING, Status.FAILED)
                and message.key is not None
            ]
            if ids:
                found = self._drive(self._waits(consumer, options, ids))
                waiting |= {(consumer, message_id): what for message_id, what in found.items()}
        return [
            replace(message, waits_for=waiting.get((message.consumer, message.message_id)))
            for message in page
        ]

    def _waits(
        self, consumer: str, options: HandlerOptions, ids: Sequence[str]
    ) -> Steps[dict[str, Waits]]:
        current = self._app.store.dialect
        if options.ordered:
            return waits.by_arrival(current, consumer, ids, dead_blocks=options.dead_blocks)
        return waits.by_version(current, consumer, ids, first=options.gaps.first)

    # -- changing -----------------------------------------------------------------------------

    def retry(
        self,
        where: RowFilter,
        *,
        actor: str | None = None,
        reason: str | None = None,
        dry_run: bool = False,
        progress: Progress | None = None,
    ) -> Changed:
        """Give messages a full new budget of attempts, due at once.

        A filter means dead messages unless it names the status `failed`; with a message id it means
        both. Rows of a broken transaction (their effects are unknown) are left alone unless the filter
        names the message id or that error type.

        Guarantee: batches are small transactions with their audit row, and never wait for live traffic.
        """
        audit = None if dry_run else _audit(actor, reason)
        return self._change("retry", where, audit, progress)

    def discard(
        self,
        where: RowFilter,
        *,
        actor: str | None = None,
        reason: str | None = None,
        dry_run: bool = False,
        progress: Progress | None = None,
    ) -> Changed:
        """Give messages up for good: they never run, and a copy that arrives later is a duplicate.

        A filter means dead messages unless it names the status `failed` or `pending`; with a message
        id it means all three. The guarantee is that of `retry`.
        """
        audit = None if dry_run else _audit(actor, reason)
        return self._change("discard", where, audit, progress)

    def _change(
        self, action: Change, where: RowFilter, audit: Audit | None, progress: Progress | None
    ) -> Changed:
        sample: tuple[tuple[str, str], ...] = ()
        count = spared = 0
        named = where.message_id is not None or where.error_type == BROKEN.error_type
        left_alone = BROKEN.error_type if action == "retry" and not named else None
        for status in _statuses(action, where):
            meant = self._drive(self._rows.meant(action, where, status, spared=left_alone))
            for consumer, (changed, skipped) in meant.items():
                after: int | None = -1
                while after is not None and (audit is not None or len(sample) < 10):
                    batch: ChangedBatch = self._drive(
                        again(
                            self._rows.change, action, where, consumer, status, audit,
                            spared=left_alone, after=after, limit=_BATCH,
                        )
                    )  # fmt: skip
                    sample = (*sample, *batch.rows[: 10 - len(sample)])
                    after = batch.next_after
                    if audit is not None:
                        count, spared = count + len(batch.rows), spared + batch.skipped
                        if progress is not None:
                            progress(count)
                if audit is None:
                    count, spared = count + changed, spared + skipped
                    if progress is not None:
                        progress(count)
        if audit is not None:
            self._changed(action, count, audit)
        return Changed(
            action=action, dry_run=audit is None, count=count, spared=spared, sample=sample
        )

    def accept_quarantined(
        self,
        where: QuarantineFilter,
        *,
        message_id: str | None = None,
        actor: str | None = None,
        reason: str | None = None,
        dry_run: bool = False,
        progress: Progress | None = None,
    ) -> ChangedQuarantine:
        """Have messages that were set aside processed after all: they are stored as pending, in the order they came.

        Each keeps its id. One that has none, or whose id is another message's (the same id with another
        payload), needs `message_id`. With an App, version and hash are those of the handler.

        Args:
            message_id: the id to store it under; then the filter must mean one message.

        Raises:
            ConfigurationError: `message_id`, and the filter means several messages.

        Guarantee: each pending row is one commit with the end of its quarantine row and its audit row.
        """
        audit = None if dry_run else _audit(actor, reason)
        keys = self._drive(self._rows.select_quarantined(where))
        if message_id is not None and len(keys) > 1:
            raise ConfigurationError(
                f"An id is for one message, and {len(keys)} match: name its hash, too."
            )
        accepted: list[QuarantineKey] = []
        refused: list[tuple[QuarantineKey, str]] = []
        for key in keys:
            why_not = self._drive(
                self._rows.accept_quarantined(
                    key,
                    partial(self._accepted, key, message_id),
                    audit,
                    QuarantineFilter(consumer=key[0], message_id=key[1], hash=key[2].hex()),
                    token=secrets.token_hex(16),
                )
            )
            if why_not is None:
                accepted.append(key)
            else:
                refused.append((key, why_not))
            if progress is not None:
                progress(len(accepted))
        if audit is not None and accepted:
            self._changed("quarantine accept", len(accepted), audit)
        return ChangedQuarantine("accept", dry_run, len(accepted), _named(accepted), tuple(refused))

    def _accepted(
        self, key: QuarantineKey, message_id: str | None, message: Message[Any]
    ) -> Arrival:
        consumer, known, _ = key
        if not consumer:
            raise UnusableMessage("no handler consumed it: send it again with `txbox send`")
        if message_id is None and not known:
            raise UnusableMessage("it has no id: give it one (--id)")
        own_id = known if message_id is None else canonical_id(message_id)
        found = self._app.handlers.matching(message.topic, message.type, consumer)
        if found:
            return found[0].accepted(message, own_id)
        return Arrival(message, own_id, payload_hash(message))

    def discard_quarantined(
        self,
        where: QuarantineFilter,
        *,
        actor: str | None = None,
        reason: str | None = None,
        dry_run: bool = False,
        progress: Progress | None = None,
    ) -> ChangedQuarantine:
        """Give up messages that were set aside: their payloads go at once, their rows after `Retention.quarantine`.

        Guarantee: batches are small transactions with their audit row.
        """
        audit = None if dry_run else _audit(actor, reason)
        keys = self._drive(self._rows.select_quarantined(where))
        count = len(keys)
        if audit is not None:
            count = 0
            for first in range(0, len(keys), _BATCH):
                batch = keys[first : first + _BATCH]
                count += self._drive(self._rows.discard_quarantined(batch, audit, where))
                if progress is not None:
                    progress(count)
            if count:
                self._changed("quarantine discard", count, audit)
        return ChangedQuarantine("discard", dry_run, count, _named(keys), ())

    def replay(
        self,
        where: RowFilter,
        *,
        as_consumer: str | None = None,
        actor: str | None = None,
        reason: str | None = None,
        dry_run: bool = False,
        progress: Progress | None = None,
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
        audit = None if dry_run else _audit(actor, reason)
        replay = Replay(self._app, self._rows, self._drive, self._run)
        done = replay.run(where, as_consumer, audit, progress)
        if audit is not None:
            self._changed("replay", done.processed + done.stored, audit)
        return done

    # -- how it runs --------------------------------------------------------------------------

    def _changed(self, action: str, rows: int, audit: Audit) -> None:
        self._app.events.emit(RowsChanged(action=action, rows=rows, actor=audit.actor))

    def _drive(self, steps: Steps[T]) -> T:
        database = self._app.database
        if not self._checked:
            self._checked = True
            try:
                self._drive(self._app.check_schema())
            except BaseException:
                self._checked = False
                raise
        if database.sync is not None:
            return drive(database.sync, steps)
        assert database.asynchronous is not None
        return self._loop().run(drive_async(database.asynchronous, steps))

    def _run(self, handler: Handler, steps: Steps[T]) -> T:
        if not handler.is_async:
            return self._drive(steps)
        assert self._app.database.asynchronous is not None  # the handler was registered with it
        return self._loop().run(drive_async(self._app.database.asynchronous, steps))

    def _loop(self) -> asyncio.Runner:
        # one loop for all verbs: an async connection belongs to the loop that opened it
        if self._runner is None:
            self._runner = asyncio.Runner()
        return self._runner

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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class _Bare:
    """A database without an App around it."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self.handlers = Handlers()
        self.events = Events()
        self.limits = Limits()
        self.store = InboxStore(database.dialect, Columns())
        self.protocol = InboxProtocol(self.store, self.events, self.limits, Lease())

    def check_schema(self) -> Steps[None]:
        state = yield from tables.check(self.store.dialect)
        if state.schema is not None:
            self.store.dialect = dialect(self.store.dialect.name, state.schema)


def _audit(actor: str | None, reason: str | None) -> Audit:
    return Audit(actor=actor or default_actor(), reason=reason)


def _named(keys: Sequence[QuarantineKey]) -> tuple[tuple[str, str, str], ...]:
    return tuple((consumer, own_id, hashed.hex()) for consumer, own_id, hashed in keys[:10])


def default_actor() -> str:
    """The login name and the host, as `txbox_audit` records them."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        # a container's user id may have no name
        user = "unknown"
    return f"{user}@{socket.gethostname()}"


def _statuses(action: Change, where: RowFilter) -> tuple[str, ...]:
    """The statuses to change, one a pass."""
    allowed = _CHANGEABLE[action]
    if where.status is not None:
        if where.status not in allowed:
            raise ConfigurationError(
                f"The status {where.status!r} cannot be changed by {action}: use {' or '.join(allowed)}."
            )
        return (where.status,)
    # failed before dead: a dead row that is retried is failed, and would be met again
    return (Status.DEAD,) if where.message_id is None else allowed[::-1]
