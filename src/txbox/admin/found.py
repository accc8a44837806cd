"""Everything the database knows about one id: inbox, attempts, locks, outbox and quarantine.

Everything is read by keys, and no lock is waited for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime

from txbox.admin import tables
from txbox.admin.findings import Crew
from txbox.admin.findings import crew as read_crew
from txbox.admin.reader import Reader, Rows
from txbox.admin.tables import (
    QUARANTINE,
    InboxFilter,
    InboxMessage,
    OutboxFilter,
    OutboxMessage,
    QuarantinedMessage,
)
from txbox.errors import Fault, StoreError
from txbox.identity import EFFECT_PREFIX, derived_id
from txbox.outbox import letter_id
from txbox.session import Session, Statement
from txbox.store.dialect import as_time

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
        held: an open transaction has locked or changed its row; None where that is unknown.
        holders: which transactions, where that is known.
        cause_id: the message it follows from, by its headers, if these are kept.
        caused: what it staged that still has a row.
        letter: the dead letter about its last death, while that is in the outbox.
    """

    message: InboxMessage
    ahead: InboxMessage | None
    held: bool | None
    holders: tuple[Holder, ...]
    cause_id: str | None
    causes: tuple[Link, ...]
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
    """Everything the database knows about an id at one time.

    Attributes:
        consumer: only this one's inbox and quarantine were searched.
        searched: the consumers that have rows in the inbox.
        crew: the processes that say they work on this database, and what is paused.
        writers: when no row was found: open transactions, which may have inserted it.
        held_for: when no row was found: the consumers under which an open transaction holds this id.
        last_attempt_at: when no row was found: when the last recorded attempt of it was.
    """

    message_id: str
    consumer: str | None
    searched: tuple[str, ...]
    crew: Crew
    inbox: tuple[InInbox, ...] = ()
    outbox: InOutbox | None = None
    quarantine: tuple[QuarantinedMessage, ...] = ()
    writers: tuple[Holder, ...] = ()
    held_for: tuple[str, ...] = ()
    last_attempt_at: datetime | None = None

    @property
    def at(self) -> datetime:
        return self.crew.at


# -- reading ----------------------------------------------------------------------------------


def find(reader: Reader, message_id: str, consumer: str | None) -> Found:
    """Read everything about an id; nothing is locked or changed, and no lock is waited for.

    Args:
        consumer: look only in its inbox and quarantine, and not in the outbox.
    """
    crew = reader.on_database(read_crew, reader.dialect)
    consumers = _consumers(reader, "explain_consumers")
    present = _inbox_links(reader, consumers if consumer is None else [consumer], [message_id])
    inbox = [row for link in present if (row := _in_inbox(reader, link, consumers)) is not None]
    outbox = _in_outbox(reader, message_id, consumers) if consumer is None else None
    found = Found(
        message_id=message_id,
        consumer=consumer,
        searched=tuple(consumers),
        crew=crew,
        inbox=tuple(inbox),
        outbox=outbox,
        quarantine=tuple(_aside(reader, message_id, consumer)),
    )
    return _nowhere(reader, found) if not inbox and outbox is None else found


def _consumers(reader: Reader, query: str) -> list[str]:
    """Who has rows in a table; a database that cannot step through its index by itself is asked again for each."""
    known: list[str] = []
    while len(known) < _CONSUMERS_MAX:
        after = known[-1] if known else ""
        rows = reader.rows(query, {"after": after, "limit": _CONSUMERS_MAX})
        if not rows:
            break
        known += [row[0] for row in rows]
    return known


def _inbox_links(reader: Reader, consumers: Sequence[str], ids: Sequence[str]) -> list[Link]:
    """Which of these consumers have a row of which of these ids."""
    return links(reader.rows("explain_inbox", rows=keys_of(consumers, ids)))


def _outbox_links(reader: Reader, ids: Sequence[str]) -> list[Link]:
    return links(reader.rows("explain_outbox", rows={"message_id": ids}))


def keys_of(consumers: Sequence[str], ids: Sequence[str]) -> dict[str, list[str]]:
    """The columns of all these keys."""
    keys = [(consumer, message_id) for consumer in consumers for message_id in ids]
    return {"consumer": [key[0] for key in keys], "message_id": [key[1] for key in keys]}


def links(rows: Rows) -> list[Link]:
    """Read the rows of `explain_inbox`, or those of `explain_outbox`, which lack a consumer."""
    return [
        Link(consumer=consumer[0] if consumer else None, message_id=message_id, status=status, topic=topic)
        for *consumer, message_id, status, topic in rows
    ]  # fmt: skip


def _message(
    reader: Reader, consumer: str, message_id: str
) -> tuple[InboxMessage | None, str | None, bool]:
    """A row of the inbox without what is hidden, the causation id in its headers, and whether these can be read."""
    where = InboxFilter(consumer=consumer, message_id=message_id)
    found = reader.messages(where, reveal=True)
    if not found:
        return None, None, False
    readable, headers = found[0].unreadable is None, found[0].headers
    cause_id = next((value for name, value in headers if name == "causation-id"), None)
    hidden = tuple((name, None) for name, _ in headers)
    return replace(found[0], payload=None, result=None, headers=hidden), cause_id, readable


def _in_inbox(reader: Reader, link: Link, consumers: Sequence[str]) -> InInbox | None:
    consumer, message_id = str(link.consumer), link.message_id
    message, cause_id, readable = _message(reader, consumer, message_id)
    if message is None:
        # pruned meanwhile
        return None
    (message,) = reader.with_waits([message])
    assert message is not None
    ahead = None
    if message.waits_for is not None and message.waits_for.message_id is not None:
        ahead = _message(reader, consumer, message.waits_for.message_id)[0]
    kept = readable and message.has_payload
    held, holders = _held(reader, consumer, message_id)
    named = {"consumer": consumer, "message_id": message_id}
    ((death,),) = reader.rows("last_death", named)
    letter = None if death is None else letter_id(consumer, message_id, death)
    return InInbox(
        message=message,
        ahead=ahead,
        held=held,
        holders=holders,
        cause_id=cause_id if kept else None,
        causes=tuple(_inbox_links(reader, consumers, [cause_id])) if kept and cause_id else (),
        caused=_caused(reader, consumer, message_id, consumers),
        letter=next(iter(_outbox_links(reader, [letter] if letter else [])), None),
    )


def _held(reader: Reader, consumer: str, message_id: str) -> tuple[bool | None, tuple[Holder, ...]]:
    """Whether an open transaction holds this id, and which; None where that cannot be told."""
    named = {"consumer": consumer, "message_id": message_id}
    if reader.dialect.has("explain_holder"):
        holders = _holders(reader.rows("explain_holder", named))
        return bool(holders), holders
    if not reader.dialect.has("explain_locked"):
        return None, ()
    return reader.on_database(_locked, reader.dialect.statement("explain_locked", named)), ()


async def _locked(db: Session, statement: Statement) -> bool | None:
    """Whether a row can be locked now; None for a role that may not lock."""
    try:
        await db.begin((statement,))
    except StoreError as error:
        await db.rollback()
        if error.fault is Fault.UNAVAILABLE:
            raise
        return True if error.fault is Fault.LOCK_TIMEOUT else None
    await db.rollback()
    return False


def _holders(rows: Rows) -> tuple[Holder, ...]:
    return tuple(
        Holder(
            pid=int(pid),
            user=user,
            application=application or None,
            state=state,
            open_s=tables.age_of(open_s),
        )
        for pid, user, application, state, open_s in rows
    )


def _caused(
    reader: Reader, consumer: str, message_id: str, consumers: Sequence[str]
) -> tuple[Link, ...]:
    """What a message's handler has staged, by the ids that this always has: in the outbox, and in inboxes."""
    ids = [derived_id(consumer, message_id, ordinal) for ordinal in range(_CAUSED_MAX)]
    few = len(consumers) <= _CAUSED_CONSUMERS
    where = [name for name in consumers if few or name.startswith(EFFECT_PREFIX)][
        :_CAUSED_CONSUMERS
    ]
    links = [*_outbox_links(reader, ids), *_inbox_links(reader, where, ids)]
    return tuple(sorted(links, key=lambda link: ids.index(link.message_id)))


def _in_outbox(reader: Reader, message_id: str, consumers: Sequence[str]) -> InOutbox | None:
    message = _outgoing(reader, message_id)
    if message is None:
        return None
    ahead, causes = None, list[Link]()
    if message.waits_for is not None and message.waits_for.message_id is not None:
        ahead = _outgoing(reader, message.waits_for.message_id)
    if message.cause_id is not None:
        named = consumers if message.cause_consumer is None else [message.cause_consumer]
        causes = _inbox_links(reader, named, [message.cause_id])
    return InOutbox(message=message, ahead=ahead, causes=tuple(causes))


def _outgoing(reader: Reader, message_id: str) -> OutboxMessage | None:
    return next(iter(reader.messages(OutboxFilter(message_id=message_id))), None)


def _aside(reader: Reader, message_id: str, consumer: str | None) -> list[QuarantinedMessage]:
    # "" has what no handler consumed
    asked = ["", *_consumers(reader, "explain_aside")] if consumer is None else [consumer]
    params = {"message_id": message_id, "limit": _ASIDE_MAX}
    return [
        tables.message_of(reader.columns, QUARANTINE, row, (), reveal=False)
        for name in asked
        for row in reader.rows("explain_quarantine", {**params, "consumer": name})
    ]


def _nowhere(reader: Reader, found: Found) -> Found:
    """Look for traces of an id that has no row: open transactions, and attempts whose row is gone."""
    writers = _holders(reader.rows("explain_writers", {"limit": _WRITERS_MAX}))
    asked = {*found.searched, *reader.app.handlers.consumers()}
    if found.consumer is not None:
        asked = {found.consumer}
    names, message_id = sorted(asked)[:_CAUSED_CONSUMERS], found.message_id
    held_for = [name for name in names if not writers and _held(reader, name, message_id)[0]]
    attempts = [
        as_time(recorded)
        for name in names
        for *_, recorded in reader.rows(
            "inbox_attempts", {"consumer": name, "message_id": message_id}
        )
    ]
    last = max(filter(None, attempts), default=None)
    return replace(found, writers=writers, held_for=tuple(held_for), last_attempt_at=last)
