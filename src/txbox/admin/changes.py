"""The operator's transactions, each with its audit row: a batch of a change, an accepted or edited message, a copy;
and the canary, which retries dead messages step by step."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta
from hashlib import sha256
from typing import Any, Literal, NamedTuple, TypeVar

from txbox.admin import tables
from txbox.admin.reader import Reader
from txbox.admin.tables import QUARANTINE, Filter, InboxFilter, QuarantineFilter, Verb
from txbox.errors import ConfigurationError, Fault, StoreError, UnusableMessage
from txbox.identity import TOMBSTONE_HASH
from txbox.message import Message
from txbox.outcome import Status
from txbox.session import Session, Statement
from txbox.store.codec import Arrival
from txbox.store.inbox import InboxStore

T = TypeVar("T")
#: What names a row: the columns of `Table.key`.
Key = tuple[Any, ...]
_BATCH = 500
_CONFLICT_PAUSE_S = 0.05
# the place of key_id among the columns of a lease
_KEY_ID = 14
_PAYLOAD_GONE = (
    "its payload was dropped (Retention.quarantine_bytes): let its producer send it again"
)
_PAYLOAD_CUT = (
    "not all of its payload was kept, or its hash is made in another way: give --app if the handler has "
    "payload_hash=, else let its producer send it again"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """Who changes rows, and why; written into `txbox_audit` with the change."""

    actor: str
    reason: str | None = None

    def row(
        self, store: InboxStore, action: str, where: Filter[Any, Any], affected: int
    ) -> Statement:
        params = {
            "actor": self.actor, "action": action, "reason": self.reason, "affected": affected,
            "filter": json.dumps(where.criteria(), sort_keys=True),
        }  # fmt: skip
        return store.dialect.statement("audit", params)


class Matching(NamedTuple):
    """How many rows of one status and consumer a change matches, and how many of them it leaves alone."""

    status: str
    consumer: str | None
    rows: int
    spared: int


class Batch(NamedTuple):
    """One batch of a change: its rows, how many were left alone, and where the next one begins, if any."""

    keys: list[Key]
    spared: int
    place: Any


@asynccontextmanager
async def _transaction(db: Session, *, commit: bool) -> AsyncGenerator[None]:
    """A transaction that ends with this block; rolled back in a dry run, and when the change is refused."""
    await db.begin()
    try:
        yield
    except (ConfigurationError, UnusableMessage):
        await db.rollback()
        raise
    await (db.commit() if commit else db.rollback())


async def change(
    db: Session,
    store: InboxStore,
    verb: Verb,
    where: Filter[Any, Any],
    matching: Matching,
    audit: Audit | None,
    *,
    spared: str | None,
    after: Any,
    to: str | None = None,
    most: int | None = None,
) -> Batch:
    """Change one batch in a transaction of its own, the oldest rows first.

    Args:
        where: what the operator asked for, possibly for all consumers.
        matching: the status and consumer of this batch.
        audit: None makes it a dry run.
        spared: rows with this error type are counted and left alone.
        after: the `place` of the batch before; None for the first.
        to: the new route, for a reroute.
        most: a smaller limit than that of a batch.

    Guarantee: rows that a live delivery or a relay holds are left to it, without waiting; the change
        and its audit row are one commit.
    """
    table, limit = where.table, _BATCH if most is None else min(most, _BATCH)
    params = {
        **where.params(),
        **tables.mark_params(after),
        "status": matching.status,
        "consumer": matching.consumer,
        # without its payload a retried row would wait for ever
        "needs_payload": verb == "retry",
        "after": -1 if after is None else after,
        "limit": limit,
    }
    async with _transaction(db, commit=audit is not None):
        found = await db.execute(store.dialect.statement(f"{table.name}_select", params))
        keys = [tuple(key) for *key, _, error in found.rows if spared is None or error != spared]
        if audit is not None and keys:
            rows = dict(zip(table.key, zip(*keys, strict=True), strict=True))
            name, given = f"{table.name}_{verb}", {"to": to}
            if table is QUARANTINE:
                name, given = "quarantine_end", {"status": "discarded"}
            await db.execute(store.dialect.statement(name, given, rows))
            await db.execute(audit.row(store, table.audited.format(verb), where, len(keys)))
    place = None
    if len(found.rows) == limit:
        *last, number, _ = found.rows[-1]
        place = tuple(last) if table.place is None else number
    return Batch(keys, len(found.rows) - len(keys), place)


async def accept(
    db: Session,
    store: InboxStore,
    key: Key,
    arrival_of: Callable[[Message[Any]], Arrival],
    audit: Audit | None,
    *,
    token: str,
) -> None:
    """Store one quarantined message as pending.

    Args:
        arrival_of: gives the message the id and the hash to store it with.
        audit: None makes it a dry run.

    Raises:
        UnusableMessage: it cannot be accepted.
        ConfigurationError: written through a codec that this app does not have.

    Guarantee: the pending row, the end of the quarantine row and the audit row are one commit.
    """
    consumer, message_id, hashed = key
    hashed = bytes(hashed)
    named = {"consumer": consumer, "message_id": message_id, "hash": hashed}
    async with _transaction(db, commit=audit is not None):
        found = await db.execute(store.dialect.statement("quarantine_lock", named))
        if not found.rows:
            raise UnusableMessage("somebody else has decided on it meanwhile")
        kept_bytes, message = tables.quarantined(store.columns, found.rows[0])
        arrival = arrival_of(message)
        if not _whole(message.payload, hashed, arrival):
            raise UnusableMessage(_PAYLOAD_CUT if kept_bytes else _PAYLOAD_GONE)
        if not await store.store(db, consumer, [arrival], token=token):
            raise UnusableMessage(
                f"{consumer} has another message under the id {arrival.message_id}: give it one of its own (--id)"
            )
        if audit is not None:
            rows = {name: [value] for name, value in named.items()}
            ended = store.dialect.statement("quarantine_end", {"status": "accepted"}, rows)
            await db.execute(ended)
            where = QuarantineFilter(consumer=consumer, message_id=message_id, hash=hashed.hex())
            await db.execute(audit.row(store, "quarantine accept", where, 1))


async def edit(
    db: Session,
    store: InboxStore,
    where: InboxFilter,
    edited: Callable[[Arrival], Message[Any]],
    audit: Audit | None,
) -> tuple[Message[Any], Message[Any]] | None:
    """Give one dead or failed message other content and a full new budget of attempts.

    Args:
        where: consumer and id.
        edited: makes the new message of the stored one.
        audit: None makes it a dry run.

    Returns:
        The message before and after; None when there is none that can be edited now.

    Raises:
        ConfigurationError: written through a codec that this app does not have; or what `edited` raises.

    Guarantee: the change, the row that keeps what was there before and the audit row are one commit.
    """
    columns, named = store.columns, where.params()
    async with _transaction(db, commit=audit is not None):
        found = await db.execute(store.dialect.statement("edit_lock", named))
        if not found.rows:
            return None
        *row, error = found.rows[0]
        arrival = columns.arrival(str(where.consumer), row).arrival
        after = edited(arrival)
        text = columns.error_back(error, row[_KEY_ID])
        if audit is not None:
            before = arrival.message.payload
            hashed = TOMBSTONE_HASH if before is None else sha256(before).digest()
            reason = f"edited by {audit.actor}" + (f": {audit.reason}" if audit.reason else "")
            kept = {**named, "hash": hashed, "reason": reason}
            await db.execute(store.dialect.statement("edit_set_aside", kept))
            # the key that a row names is that of all its columns: its error is written anew as well
            content = {
                **named,
                **columns.content(after),
                "key_id": columns.key_id,
                "error": None if text is None else columns.error(text),
            }
            await db.execute(store.dialect.statement("edit_write", content))
            await db.execute(audit.row(store, "edit", where, 1))
    return arrival.message, after


async def copy(
    db: Session,
    store: InboxStore,
    consumer: str,
    arrivals: Sequence[Arrival],
    audit: Audit,
    where: InboxFilter,
    *,
    token: str,
) -> int:
    """Store messages as pending rows of another consumer, in the order given; returns how many were new.

    Guarantee: the rows and their audit row are one commit.
    """
    async with _transaction(db, commit=True):
        # in arrival order, not by id: two such commands may deadlock, and are tried again
        fresh = await store.store(db, consumer, arrivals, token=token)
        await db.execute(audit.row(store, f"replay as {consumer}", where, len(fresh)))
    return len(fresh)


async def announce(
    db: Session,
    store: InboxStore,
    audit: Audit,
    action: str,
    where: Filter[Any, Any],
    affected: int,
) -> None:
    """Write the audit row of work whose own transactions follow."""
    await db.begin((audit.row(store, action, where, affected),))
    await db.commit()


async def again(
    db: Session, operation: Callable[..., Awaitable[T]], *args: Any, **options: Any
) -> T:
    """Repeat a small transaction that lost to another."""
    for tried in range(10):
        try:
            return await operation(db, *args, **options)
        except StoreError as error:
            if error.fault not in (Fault.CONFLICT, Fault.LOCK_TIMEOUT) or tried == 9:
                raise
            db.discard()
            await db.wait(_CONFLICT_PAUSE_S * (tried + 1))
    raise AssertionError("the last try returned or raised")


def _whole(payload: bytes | None, hashed: bytes, arrival: Arrival) -> bool:
    """Say whether this is the payload that was hashed; without one, whether there was none."""
    if payload is None:
        return hashed in (TOMBSTONE_HASH, sha256(b"").digest())
    return hashed in (sha256(payload).digest(), arrival.hash)


#: How many messages are let go before what becomes of them is waited for; then always the last.
SIZES = (1, 10, 500)
PATIENCE = timedelta(minutes=2)
_LOOK_S, _AGAIN = 0.25, 10

#: Consumer and id.
Named = tuple[str, str]
#: "returned": a message failed as before; "otherwise": none was processed; "nobody": no worker took them.
Why = Literal["returned", "otherwise", "nobody", "cancelled"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What became of the messages that were let go together.

    Attributes:
        count: how many there were.
        processed: how many are done.
        returned: how many failed with the fingerprint of the filter; without one, how many failed.
        otherwise: how many failed in another way.
        waiting: how many have not run yet.
        again: consumer and id of those that `returned` counts, the first ten.
    """

    count: int
    processed: int = 0
    returned: int = 0
    otherwise: int = 0
    waiting: int = 0
    again: tuple[Named, ...] = ()

    @property
    def sentence(self) -> str:
        parts = (
            (self.processed, "processed"),
            (self.returned, "failed in the same way"),
            (self.otherwise, "failed in another way"),
            (self.waiting, "not run yet"),
        )
        became = ", ".join(f"{number:,} {what}" for number, what in parts if number)
        return f"{self.count:,} retried: {became or 'gone meanwhile'}."


@dataclass(frozen=True, slots=True, kw_only=True)
class Redriven:
    """What a canary redrive did.

    Attributes:
        count: messages that were given a new budget of attempts.
        left: how many matching messages it has left alone.
        stopped: why it ended before all of them; None when it did not.
    """

    steps: tuple[Step, ...]
    count: int
    left: int
    stopped: Why | None

    @property
    def sentence(self) -> str:
        """How it ended."""
        if self.stopped is None:
            return "All of them were retried, and the failure did not return."
        unfinished = sum(step.count - step.processed for step in self.steps)
        left = f"{self.left:,} were not retried"
        if unfinished:
            left += (
                f"; of the {self.count:,} that were, {unfinished:,} are not processed yet and go on by their retry "
                "policy"
            )
        match self.stopped:
            case "returned":
                again = self.steps[-1].again
                named = ", ".join(" ".join(name) for name in again[:3])
                more = f" and {len(again) - 3} more" if len(again) > 3 else ""
                return f"Stopped: the failure returned ({named}{more}). {left}."
            case "otherwise":
                return f"Stopped: every message failed in another way. {left}."
            case "nobody":
                return f"Stopped: no worker took the messages. Does one run, and is the consumer paused? {left}."
            case "cancelled":
                return f"Cancelled. {left}."


def redriven(
    reader: Reader,
    fingerprint: str | None,
    *,
    total: int,
    release: Callable[[int], Sequence[Named]],
    cancelled: Callable[[], bool],
    patience: timedelta,
    on_step: Callable[[Step], None],
) -> Redriven:
    """Release dead messages in steps, and wait after each for what becomes of them.

    Args:
        fingerprint: the failure that must not return; None for any failure.
        total: how many there are.
        release: retries so many of them, the oldest first; returns which.
        patience: without any message of a step done or failed for so long, it stops.
        on_step: called after each step.
    """
    steps: list[Step] = []
    count = 0
    why: Why | None = None
    while why is None and count < total:
        if cancelled():
            why = "cancelled"
            break
        size = min(SIZES[min(len(steps), len(SIZES) - 1)], total - count)
        keys = release(size)
        if not keys:
            break
        count += len(keys)
        step, why = _settled(reader, fingerprint, keys, cancelled, patience)
        steps.append(step)
        on_step(step)
    left = max(0, total - count)
    return Redriven(steps=tuple(steps), count=count, left=left, stopped=why)


def _settled(
    reader: Reader,
    fingerprint: str | None,
    keys: Sequence[Named],
    cancelled: Callable[[], bool],
    patience: timedelta,
) -> tuple[Step, Why | None]:
    """Wait until all have run, one has failed as before, or nothing happens any more."""
    waiting, since = len(keys), time.monotonic()
    while True:
        step = _step(reader, fingerprint, keys)
        if step.returned:
            return step, "returned"
        if not step.waiting:
            return step, None if step.processed or not step.otherwise else "otherwise"
        if step.waiting < waiting:
            waiting, since = step.waiting, time.monotonic()
        if cancelled():
            return step, "cancelled"
        if time.monotonic() - since > patience.total_seconds():
            return step, "nobody"
        time.sleep(_LOOK_S)


def _step(reader: Reader, fingerprint: str | None, keys: Sequence[Named]) -> Step:
    """What has become of these messages; those that are gone count nowhere."""
    consumers, ids = zip(*keys, strict=True)
    found = reader.rows("inbox_states", rows={"consumer": consumers, "message_id": ids})
    became: Counter[str] = Counter()
    again: list[Named] = []
    for consumer, message_id, status, attempts, of_now in found:
        if status == Status.PROCESSED:
            became["processed"] += 1
        elif status == Status.DEAD or (status == Status.FAILED and int(attempts)):
            # a retry has set the attempts to 0: there has been one since
            if fingerprint in (None, of_now):
                again.append((consumer, message_id))
            else:
                became["otherwise"] += 1
        elif status != Status.DISCARDED:
            became["waiting"] += 1
    return Step(count=len(keys), returned=len(again), again=tuple(again[:_AGAIN]), **became)


def check_canary(where: InboxFilter) -> None:
    """Refuse a filter that is not for dead messages in bulk.

    Raises:
        ConfigurationError: it names a message, or another status than dead.
    """
    if where.message_id is not None:
        raise ConfigurationError("A canary is for many messages: retry one by its id.")
    if where.status not in (None, Status.DEAD):
        raise ConfigurationError(
            f"A canary is for dead messages, not {where.status} ones: leave the status out."
        )
