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
from txbox.admin.reader import Operator, Rows
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
from txbox.outbox.dead_letters import letter_id
from txbox.session import Session, Statement
from txbox.store.dialect import as_time

_ASIDE_MAX = 20
_CONSUMERS_MAX = 1_000
# with more consumers, only effects are searched for what a message has caused
_CAUSED_CONSUMERS = 50
_CAUSED_MAX = 16
_WRITERS_MAX = 5


# -- the facts --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageRef:
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
    causes: tuple[MessageRef, ...]
    caused: tuple[MessageRef, ...]
    letter: MessageRef | None


@dataclass(frozen=True, slots=True, kw_only=True)
class InOutbox:
    """An outgoing message, what leaves before it, and what it follows from."""

    message: OutboxMessage
    ahead: OutboxMessage | None
    causes: tuple[MessageRef, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageFacts:
    """Everything the database knows about an id at one time.

    Attributes:
        consumer: only this one's inbox and quarantine were searched.
        searched: the consumers that have rows in the inbox.
        crew: the processes that say they work on this database, and what is paused.
        writers: without a row: open transactions, which may have inserted it.
        held_for: without a row: consumers whose inbox has this id locked by an open transaction.
        last_attempt_at: without a row: the time of its last recorded attempt.
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


def collect_facts(operator: Operator, message_id: str, consumer: str | None) -> MessageFacts:
    """Read everything about an id; nothing is locked or changed, and no lock is waited for.

    Args:
        consumer: read only its inbox and quarantine, and not the outbox.
    """
    crew = operator.on_database(read_crew, operator.dialect)
    consumers = _consumers(operator, "explain_consumers")
    present = _inbox_links(operator, consumers if consumer is None else [consumer], [message_id])
    inbox = [row for link in present if (row := _in_inbox(operator, link, consumers)) is not None]
    outbox = _in_outbox(operator, message_id, consumers) if consumer is None else None
    facts = MessageFacts(
        message_id=message_id,
        consumer=consumer,
        searched=tuple(consumers),
        crew=crew,
        inbox=tuple(inbox),
        outbox=outbox,
        quarantine=tuple(_aside(operator, message_id, consumer)),
    )
    return _nowhere(operator, facts) if not inbox and outbox is None else facts


def _consumers(operator: Operator, query: str) -> list[str]:
    """Who has rows in a table; a database that cannot step through its index by itself is asked again for each."""
    known: list[str] = []
    while len(known) < _CONSUMERS_MAX:
        after = known[-1] if known else ""
        rows = operator.rows(query, {"after": after, "limit": _CONSUMERS_MAX})
        if not rows:
            break
        known += [row[0] for row in rows]
    return known


def _inbox_links(
    operator: Operator, consumers: Sequence[str], ids: Sequence[str]
) -> list[MessageRef]:
    """Which of these consumers have a row of which of these ids."""
    return links(operator.rows("explain_inbox", rows=keys_of(consumers, ids)))


def _outbox_links(operator: Operator, ids: Sequence[str]) -> list[MessageRef]:
    return links(operator.rows("explain_outbox", rows={"message_id": ids}))


def keys_of(consumers: Sequence[str], ids: Sequence[str]) -> dict[str, list[str]]:
    """The columns of all these keys."""
    keys = [(consumer, message_id) for consumer in consumers for message_id in ids]
    return {"consumer": [key[0] for key in keys], "message_id": [key[1] for key in keys]}


def links(rows: Rows) -> list[MessageRef]:
    """Read the rows of `explain_inbox`, or those of `explain_outbox`, which lack a consumer."""
    return [
        MessageRef(consumer=consumer[0] if consumer else None, message_id=message_id, status=status, topic=topic)
        for *consumer, message_id, status, topic in rows
    ]  # fmt: skip


def _message(
    operator: Operator, consumer: str, message_id: str
) -> tuple[InboxMessage | None, str | None, bool]:
    """A row of the inbox without what is hidden, the causation id in its headers, and whether these can be read."""
    where = InboxFilter(consumer=consumer, message_id=message_id)
    messages = operator.messages(where, reveal=True)
    if not messages:
        return None, None, False
    readable, headers = messages[0].unreadable is None, messages[0].headers
    cause_id = next((value for name, value in headers if name == "causation-id"), None)
    hidden = tuple((name, None) for name, _ in headers)
    return replace(messages[0], payload=None, result=None, headers=hidden), cause_id, readable


def _in_inbox(operator: Operator, link: MessageRef, consumers: Sequence[str]) -> InInbox | None:
    consumer, message_id = str(link.consumer), link.message_id
    message, cause_id, readable = _message(operator, consumer, message_id)
    if message is None:
        # pruned since the first query
        return None
    (message,) = operator.with_waits([message])
    assert message is not None
    ahead = None
    if message.waits_for is not None and message.waits_for.message_id is not None:
        ahead = _message(operator, consumer, message.waits_for.message_id)[0]
    kept = readable and message.has_payload
    locked, holders = _held(operator, consumer, message_id)
    named = {"consumer": consumer, "message_id": message_id}
    ((death,),) = operator.rows("last_death", named)
    letter = None if death is None else letter_id(consumer, message_id, death)
    return InInbox(
        message=message,
        ahead=ahead,
        held=locked,
        holders=holders,
        cause_id=cause_id if kept else None,
        causes=tuple(_inbox_links(operator, consumers, [cause_id])) if kept and cause_id else (),
        caused=_caused(operator, consumer, message_id, consumers),
        letter=next(iter(_outbox_links(operator, [letter] if letter else [])), None),
    )


def _held(
    operator: Operator, consumer: str, message_id: str
) -> tuple[bool | None, tuple[Holder, ...]]:
    """Whether an open transaction locks this id, and which; None where the database does not say."""
    named = {"consumer": consumer, "message_id": message_id}
    if operator.dialect.has("explain_holder"):
        holders = _holders(operator.rows("explain_holder", named))
        return bool(holders), holders
    if not operator.dialect.has("explain_locked"):
        return None, ()
    return operator.on_database(_locked, operator.dialect.statement("explain_locked", named)), ()


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
    operator: Operator, consumer: str, message_id: str, consumers: Sequence[str]
) -> tuple[MessageRef, ...]:
    """What a message's handler has staged, by the ids that this always has: in the outbox, and in inboxes."""
    ids = [derived_id(consumer, message_id, ordinal) for ordinal in range(_CAUSED_MAX)]
    few = len(consumers) <= _CAUSED_CONSUMERS
    where = [name for name in consumers if few or name.startswith(EFFECT_PREFIX)][
        :_CAUSED_CONSUMERS
    ]
    links = [*_outbox_links(operator, ids), *_inbox_links(operator, where, ids)]
    return tuple(sorted(links, key=lambda link: ids.index(link.message_id)))


def _in_outbox(operator: Operator, message_id: str, consumers: Sequence[str]) -> InOutbox | None:
    message = _outgoing(operator, message_id)
    if message is None:
        return None
    ahead, causes = None, list[MessageRef]()
    if message.waits_for is not None and message.waits_for.message_id is not None:
        ahead = _outgoing(operator, message.waits_for.message_id)
    if message.cause_id is not None:
        named = consumers if message.cause_consumer is None else [message.cause_consumer]
        causes = _inbox_links(operator, named, [message.cause_id])
    return InOutbox(message=message, ahead=ahead, causes=tuple(causes))


def _outgoing(operator: Operator, message_id: str) -> OutboxMessage | None:
    return next(iter(operator.messages(OutboxFilter(message_id=message_id))), None)


def _aside(operator: Operator, message_id: str, consumer: str | None) -> list[QuarantinedMessage]:
    # "" has what no handler consumed
    searched = ["", *_consumers(operator, "explain_aside")] if consumer is None else [consumer]
    params = {"message_id": message_id, "limit": _ASIDE_MAX}
    return [
        tables.message_of(operator.columns, QUARANTINE, row, (), reveal=False)
        for name in searched
        for row in operator.rows("explain_quarantine", {**params, "consumer": name})
    ]


def _nowhere(operator: Operator, facts: MessageFacts) -> MessageFacts:
    """Add traces of an id without a row: open transactions, and attempts whose row was pruned."""
    writers = _holders(operator.rows("explain_writers", {"limit": _WRITERS_MAX}))
    candidates = {*facts.searched, *operator.app.handlers.consumers()}
    if facts.consumer is not None:
        candidates = {facts.consumer}
    names, message_id = sorted(candidates)[:_CAUSED_CONSUMERS], facts.message_id
    held_for = [name for name in names if not writers and _held(operator, name, message_id)[0]]
    attempts = [
        as_time(recorded)
        for name in names
        for *_, recorded in operator.rows(
            "inbox_attempts", {"consumer": name, "message_id": message_id}
        )
    ]
    last = max(filter(None, attempts), default=None)
    return replace(facts, writers=writers, held_for=tuple(held_for), last_attempt_at=last)
