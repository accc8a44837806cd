"""All that the database knows of one id: inbox, attempts, locks, outbox and quarantine, as `explain` reads it.

Everything is read by keys, and no lock is waited for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, NamedTuple

from txbox.admin import activity, tables
from txbox.admin.activity import WorkerStatus
from txbox.admin.replay import Application
from txbox.admin.tables import (
    INBOX,
    OUTBOX,
    QUARANTINE,
    InboxMessage,
    OutboxFilter,
    OutboxMessage,
    QuarantinedMessage,
)
from txbox.effects import PREFIX
from txbox.errors import ConfigurationError, Fault, StoreError
from txbox.identity import derived_id
from txbox.outbox import letter_id
from txbox.outcome import Status
from txbox.session import Session
from txbox.store import pauses, waits
from txbox.store.activity import workers
from txbox.store.dialect import as_time
from txbox.store.pauses import Pause

_ASIDE_MAX = 20
_CONSUMERS_MAX = 1_000
# where there are more consumers, only effects are looked through for what a message has caused
_CAUSED_CONSUMERS = 50
_CAUSED_MAX = 16
_WRITERS_MAX = 5


# -- what was found ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """Another message: in the inbox of a consumer, or, without one, in the outbox."""

    consumer: str | None
    message_id: str
    status: str
    topic: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """An open transaction.

    Attributes:
        pid: of its server process.
        user, application, state: as pg_stat_activity says; None where this role may not know.
        open_s: for how long it has been open.
    """

    pid: int
    user: str | None
    application: str | None
    state: str | None
    open_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class InInbox:
    """A message of one consumer.

    Attributes:
        message: without payload and header values.
        ahead: what it waits for, where that is another message.
        held: an open transaction has locked or changed its row; None where that cannot be told.
        holders: who that is, where that can be told.
        cause_id: the message it follows from, as its headers say, where they are kept.
        headers_kept: they are, and can be read.
        caused: what it staged that is still there.
        letter: the dead letter about it that is still in the outbox.
    """

    message: InboxMessage
    ahead: InboxMessage | None
    held: bool | None
    holders: tuple[Holder, ...]
    cause_id: str | None
    causes: tuple[Link, ...]
    headers_kept: bool
    caused: tuple[Link, ...]
    letter: Link | None


@dataclass(frozen=True, slots=True, kw_only=True)
class InOutbox:
    """An outgoing message, what leaves before it, and what it follows from."""

    message: OutboxMessage
    ahead: OutboxMessage | None
    causes: tuple[Link, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """All that the database knows of an id at one time, by its clock.

    Attributes:
        consumer: only this one's inbox and quarantine were searched.
        searched: the consumers that have rows in the inbox.
        workers: the processes that say they work on this database.
        paused: the consumers that are paused.
        writers: when no row was found: open transactions, which may have inserted it.
        held_for: when no row was found: the consumers under which an open transaction holds this id.
        last_attempt_at: when no row was found: when the last recorded attempt of it was.
    """

    message_id: str
    consumer: str | None
    at: datetime
    searched: tuple[str, ...]
    workers: tuple[WorkerStatus, ...]
    paused: tuple[Pause, ...]
    inbox: tuple[InInbox, ...] = ()
    outbox: InOutbox | None = None
    quarantine: tuple[QuarantinedMessage, ...] = ()
    writers: tuple[Holder, ...] = ()
    held_for: tuple[str, ...] = ()
    last_attempt_at: datetime | None = None


# -- reading ----------------------------------------------------------------------------------


class _Read(NamedTuple):
    """What every question needs."""

    db: Session
    app: Application

    async def rows(
        self,
        name: str,
        params: Mapping[str, Any] | None = None,
        rows: Mapping[str, Sequence[Any]] | None = None,
    ) -> Sequence[Sequence[Any]]:
        """The rows of a query; none where this database has no answer to it."""
        dialect = self.app.store.dialect
        if not dialect.has(name) or (rows is not None and not next(iter(rows.values()))):
            return ()
        return (await self.db.read(dialect.statement(name, params, rows))).rows


async def look(db: Session, app: Application, message_id: str, consumer: str | None) -> Found:
    """Read all that is known of an id; nothing is locked or changed, and no lock is waited for.

    Args:
        consumer: look only in its inbox and quarantine, and not in the outbox.
    """
    read = _Read(db, app)
    ((now,),) = await read.rows("database_clock")
    at = as_time(now)
    assert at is not None
    _, paused = await pauses.read(db, app.store.dialect)
    consumers = await _consumers(read, "explain_consumers")
    asked = consumers if consumer is None else [consumer]
    present = await _inbox_links(read, [(name, message_id) for name in asked])
    rows = [await _in_inbox(read, link, consumers) for link in present]
    inbox = [row for row in rows if row is not None]
    outbox = await _in_outbox(read, message_id, consumers) if consumer is None else None
    found = Found(
        message_id=message_id,
        consumer=consumer,
        at=at,
        searched=tuple(consumers),
        workers=tuple(activity.statuses(await workers(db, app.store.dialect), paused)),
        paused=tuple(paused),
        inbox=tuple(inbox),
        outbox=outbox,
        quarantine=tuple(await _aside(read, message_id, consumer)),
    )
    return await _nowhere(read, found) if not inbox and outbox is None else found


async def _consumers(read: _Read, query: str) -> list[str]:
    """Who has rows in a table; a database that cannot step through its index by itself is asked again for each."""
    known: list[str] = []
    while len(known) < _CONSUMERS_MAX:
        after = known[-1] if known else ""
        rows = await read.rows(query, {"after": after, "limit": _CONSUMERS_MAX})
        if not rows:
            break
        known += [row[0] for row in rows]
    return known


async def _inbox_links(read: _Read, keys: Sequence[tuple[str, str]]) -> list[Link]:
    rows = await read.rows(
        "explain_inbox",
        rows={"consumer": [key[0] for key in keys], "message_id": [key[1] for key in keys]},
    )
    return [
        Link(consumer=consumer, message_id=message_id, status=status, topic=topic)
        for consumer, message_id, status, topic in rows
    ]


async def _outbox_links(read: _Read, ids: Sequence[str]) -> list[Link]:
    rows = await read.rows("explain_outbox", rows={"message_id": ids})
    return [
        Link(consumer=None, message_id=found_id, status=state, topic=topic)
        for found_id, state, topic in rows
    ]


async def _message(read: _Read, consumer: str, message_id: str) -> tuple[InboxMessage, bool] | None:
    """A row of the inbox without what is hidden, but for the ids in its headers; and whether those could be read."""
    params = {"consumer": consumer, "message_id": message_id}
    rows = await read.rows("inbox_show", params)
    if not rows:
        return None
    attempts = await read.rows("inbox_attempts", params)
    columns = read.app.store.columns
    try:
        message = tables.message_of(columns, INBOX, rows[0], attempts, reveal=True)
    except ConfigurationError:
        # written through a codec that is not known here
        return tables.message_of(columns, INBOX, rows[0], attempts, reveal=False), False
    return message, True


async def _in_inbox(read: _Read, link: Link, consumers: Sequence[str]) -> InInbox | None:
    consumer, message_id = str(link.consumer), link.message_id
    known = await _message(read, consumer, message_id)
    if known is None:
        # pruned meanwhile
        return None
    message, readable = known
    cause_id = next((value for name, value in message.headers if name == "causation-id"), None)
    kept = readable and message.has_payload
    message = _hidden(message)
    message = replace(message, waits_for=await _waits_for(read, message))
    ahead = None
    if message.waits_for is not None and message.waits_for.message_id is not None:
        found = await _message(read, consumer, message.waits_for.message_id)
        ahead = None if found is None else _hidden(found[0])
    held, holders = await _held(read, consumer, message_id)
    caused = await _caused(read, consumer, message_id, consumers)
    letters = await _outbox_links(
        read,
        [letter_id(consumer, message_id, count) for count in {message.attempts, message.starts}],
    )
    return InInbox(
        message=message,
        ahead=ahead,
        held=held,
        holders=holders,
        cause_id=cause_id if kept else None,
        causes=await _causes(read, cause_id, consumers) if kept and cause_id else (),
        headers_kept=kept,
        caused=caused,
        letter=letters[0] if letters else None,
    )


def _hidden(message: InboxMessage) -> InboxMessage:
    return replace(
        message,
        payload=None,
        result=None,
        headers=tuple((name, None) for name, _ in message.headers),
    )


async def _waits_for(read: _Read, message: InboxMessage) -> waits.Waits | None:
    options = next(
        (
            handler.options
            for handler in read.app.handlers
            if handler.consumer == message.consumer and handler.options.in_order
        ),
        None,
    )
    unfinished = message.status in (Status.PENDING, Status.FAILED)
    if options is None or message.key is None or not unfinished:
        return None
    dialect, ids = read.app.store.dialect, [message.message_id]
    if options.ordered:
        found = await waits.by_arrival(
            read.db, dialect, message.consumer, ids, dead_blocks=options.dead_blocks
        )
    else:
        found = await waits.by_version(
            read.db, dialect, message.consumer, ids, first=options.gaps.first
        )
    return found.get(message.message_id)


async def _held(
    read: _Read, consumer: str, message_id: str
) -> tuple[bool | None, tuple[Holder, ...]]:
    """Whether an open transaction holds this id, and which; None where that cannot be told."""
    dialect, named = read.app.store.dialect, {"consumer": consumer, "message_id": message_id}
    if dialect.has("explain_holder"):
        holders = _holders(await read.rows("explain_holder", named))
        return bool(holders), holders
    if not dialect.has("explain_locked"):
        return None, ()
    try:
        await read.db.begin((dialect.statement("explain_locked", named),))
        await read.db.rollback()
    except StoreError as error:
        await read.db.rollback()
        if error.fault is Fault.LOCK_TIMEOUT:
            return True, ()
        if error.fault is Fault.UNAVAILABLE:
            raise
        # a role that only reads may not lock
        return None, ()
    return False, ()


def _holders(rows: Sequence[Sequence[Any]]) -> tuple[Holder, ...]:
    return tuple(
        Holder(
            pid=int(pid),
            user=user,
            application=application or None,
            state=state,
            open_s=None if open_s is None else max(0.0, float(open_s)),
        )
        for pid, user, application, state, open_s in rows
    )


async def _caused(
    read: _Read, consumer: str, message_id: str, consumers: Sequence[str]
) -> tuple[Link, ...]:
    """What a message's handler has staged, by the ids that this always has: in the outbox, and in inboxes."""
    ids = [derived_id(consumer, message_id, ordinal) for ordinal in range(_CAUSED_MAX)]
    few = len(consumers) <= _CAUSED_CONSUMERS
    where = [name for name in consumers if few or name.startswith(PREFIX)][:_CAUSED_CONSUMERS]
    links = [
        *await _outbox_links(read, ids),
        *await _inbox_links(read, [(name, caused_id) for name in where for caused_id in ids]),
    ]
    return tuple(sorted(links, key=lambda link: ids.index(link.message_id)))


async def _causes(read: _Read, cause_id: str, consumers: Sequence[str]) -> tuple[Link, ...]:
    return tuple(await _inbox_links(read, [(name, cause_id) for name in consumers]))


async def _in_outbox(read: _Read, message_id: str, consumers: Sequence[str]) -> InOutbox | None:
    message = await _outgoing(read, message_id)
    if message is None:
        return None
    ahead = None
    if message.waits_for is not None and message.waits_for.message_id is not None:
        ahead = await _outgoing(read, message.waits_for.message_id)
    causes: tuple[Link, ...] = ()
    if message.cause_id is not None:
        named = consumers if message.cause_consumer is None else [message.cause_consumer]
        causes = await _causes(read, message.cause_id, named)
    return InOutbox(message=message, ahead=ahead, causes=causes)


async def _outgoing(read: _Read, message_id: str) -> OutboxMessage | None:
    params = OutboxFilter(message_id=message_id).params()
    rows = await read.rows("outbox_show", params)
    if not rows:
        return None
    message: OutboxMessage = tables.message_of(
        read.app.store.columns, OUTBOX, rows[0], (), reveal=False
    )
    return message


async def _aside(read: _Read, message_id: str, consumer: str | None) -> list[QuarantinedMessage]:
    asked = [consumer]
    if consumer is None:
        # "" has what no handler consumed
        asked = ["", *await _consumers(read, "explain_aside")]
    found: list[QuarantinedMessage] = []
    for name in asked:
        named = {"consumer": name, "message_id": message_id, "limit": _ASIDE_MAX}
        found += [
            tables.message_of(read.app.store.columns, QUARANTINE, row, (), reveal=False)
            for row in await read.rows("explain_quarantine", named)
        ]
    return found


async def _nowhere(read: _Read, found: Found) -> Found:
    """Look for traces of an id that has no row: open transactions, and attempts whose row is gone."""
    writers = _holders(await read.rows("explain_writers", {"limit": _WRITERS_MAX}))
    asked = (
        {found.consumer}
        if found.consumer is not None
        else {*found.searched, *read.app.handlers.consumers()}
    )
    held_for: list[str] = []
    last: list[datetime] = []
    for name in sorted(asked)[:_CAUSED_CONSUMERS]:
        if not writers and (await _held(read, name, found.message_id))[0]:
            held_for.append(name)
        params = {"consumer": name, "message_id": found.message_id}
        last += [
            moment
            for *_, recorded in await read.rows("inbox_attempts", params)
            if (moment := as_time(recorded)) is not None
        ]
    return replace(
        found,
        writers=writers,
        held_for=tuple(held_for),
        last_attempt_at=max(last, default=None),
    )
