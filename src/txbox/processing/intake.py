"""From raw messages to settled outcomes: identity, quarantine, folded copies, and the mode of the handler."""

from __future__ import annotations

import dataclasses
import secrets
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import Enum
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple

from txbox.boundaries import Boundary, is_contents
from txbox.errors import Fault, StoreError, UnusableMessage
from txbox.events import MessageDuplicate, MessageStored
from txbox.handlers import Handler
from txbox.identity import TEXT_BYTES_MAX, check_headers
from txbox.identity import message_id as identify
from txbox.message import Headers, Message
from txbox.outcome import DUPLICATE, Answer, Outcome
from txbox.policy import Lease
from txbox.processing.attempt import InboxProtocol
from txbox.processing.failure import is_of_content, printable
from txbox.processing.waiting import Holder
from txbox.session import Session
from txbox.store import leases
from txbox.store import schema as tables
from txbox.store.codec import Arrival, Leased
from txbox.store.inbox import AGAIN_MAX, Existing, out_of_sight

_TWO_PAYLOADS = "Two payloads came under one id in one batch: the producer reuses ids, or a message was altered."
_QUARANTINED = Answer(Outcome.QUARANTINED)
_STORED = Answer(Outcome.DEFERRED)
# compared by identity: the hash of an enumeration is slow
_DUPLICATE, _IN_PROGRESS, _ASIDE = Outcome.DUPLICATE, Outcome.IN_PROGRESS, Outcome.QUARANTINED


class Mode(Enum):
    """How messages are processed (promises 4.4 to 4.6)."""

    INLINE = "inline"  # at once
    LEASED = "leased"  # stored and leased first, so that its run is counted before it begins
    STORED = "stored"  # later, from the table


_AT_ONCE = (None, Mode.INLINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class LeasedAnswer(Answer):
    """DEFERRED: the message is stored and leased under the token, for the caller to run."""

    leased: Leased
    token: str


class ReleasedAnswer(Answer):
    """DEFERRED: an earlier try has stored and leased the message; its lease is released, and it is due in the table."""


_RELEASED = ReleasedAnswer(Outcome.DEFERRED)


class _Leasing(NamedTuple):
    """A lease to take on what is stored, in the same transaction."""

    lease: Lease
    token: str


def _is_written(answer: Answer) -> bool:
    """Whether a row was committed with it; that of a duplicate is older."""
    outcome = answer.outcome
    return outcome is not _DUPLICATE and outcome is not _IN_PROGRESS and outcome is not _ASIDE


class Intake:
    """Takes in the deliveries of one app, whatever the mode of their handlers."""

    def __init__(self, protocol: InboxProtocol) -> None:
        self._protocol = protocol
        #: Hears of each batch that is settled; a worker sets it.
        self.on_settled: Callable[[str, Collection[str]], None] | None = None

    async def take_with_retries(
        self,
        db: Session,
        handler: Handler,
        messages: Sequence[Message[Any]],
        mode: Mode | None = None,
        *,
        holder: Holder | None = None,
        received: Sequence[float] | None = None,
        for_s: float | None = None,
        stop: Callable[[], bool] | None = None,
    ) -> list[Answer]:
        """`take`, but wait while the database is away. The first call checks the schema.

        Args:
            for_s, stop: see `Waiting.with_retries`.

        Raises:
            SchemaError: the tables are missing or do not fit; the message has the command to run.
            StoreUnavailable: the database was away for too long.
            StoreError: waiting would not help.
        """
        protocol = self._protocol
        try:
            if not protocol.checked:
                await protocol.with_retries(
                    db, protocol.check_schema, consumer=handler.consumer, for_s=for_s, stop=stop
                )
            return await protocol.with_retries(
                db,
                partial(
                    self.take,
                    handler=handler,
                    messages=messages,
                    mode=mode,
                    # the same each time: a row that an earlier try has stored is recognised by it
                    token=secrets.token_hex(16) if mode is Mode.LEASED else "",
                    holder=holder,
                    received=received,
                    for_s=for_s,
                ),
                consumer=handler.consumer,
                for_s=for_s,
                stop=stop,
            )
        except StoreError as error:
            if error.fault in (Fault.SCHEMA, Fault.OTHER):
                # its error names the command that makes a missing table
                await protocol.check_schema(db)
            if error.fault is Fault.SCHEMA:
                raise tables.incomplete(error) from None
            raise

    async def take(
        self,
        db: Session,
        handler: Handler,
        messages: Sequence[Message[Any]],
        mode: Mode | None = None,
        *,
        token: str = "",
        holder: Holder | None = None,
        received: Sequence[float] | None = None,
        for_s: float | None = None,
    ) -> list[Answer]:
        """Bring each message to an outcome; the answers are in the same order.

        Copies of one id share the first one's fate; a copy with another payload is quarantined.

        Args:
            mode: None for the handler's.
            token: of the leases, if the mode is LEASED: each new message then gets a `LeasedAnswer`.
            holder: of the ids, for a lane that runs one batch behind another; see `waiting.Holder`.
            received: when each arrived, by `time.monotonic`; None for now.
            for_s: how long to wait for the database when a handler without a transaction has run.

        Guarantee: an outcome that settles is on disk, as a finished row, a stored payload or a
        quarantine row.
        """
        if len(messages) == 1 and mode in _AT_ONCE and handler.plain:
            (message,) = messages
            try:
                arrival = self._arrival(handler, message)
            except UnusableMessage as error:
                return [await self._set_aside(db, handler, message, error.message_id, str(error))]
            arrival.received = time.monotonic() if received is None else received[0]
            answer = await self._protocol.deliver_one(db, handler, arrival, holder)
            if self.on_settled is not None and _is_written(answer):
                self.on_settled(handler.consumer, (arrival.message_id,))
            return [answer]
        known: dict[str, Arrival] = {}
        ids: list[str] = []
        # by index, of messages that go no further
        aside: dict[int, Answer] = {}
        now = time.monotonic() if received is None else 0.0
        for index, message in enumerate(messages):
            message_id = ""  # no message has this one
            try:
                arrival = self._arrival(handler, message)
            except UnusableMessage as error:
                aside[index] = await self._set_aside(
                    db, handler, message, error.message_id, str(error)
                )
            else:
                arrival.received = now if received is None else received[index]
                message_id = arrival.message_id
                first = known.setdefault(message_id, arrival)
                if first is not arrival and first.differs(arrival):
                    aside[index] = await self._set_aside(
                        db, handler, message, message_id, _TWO_PAYLOADS
                    )
                    message_id = ""
            ids.append(message_id)
        if not known:
            return list(aside.values())
        arrivals = list(known.values())
        mode = mode or Mode(handler.options.mode)
        if mode is not Mode.INLINE:
            leasing = None
            if mode is Mode.LEASED:
                leasing = _Leasing(self._protocol.lease, token or secrets.token_hex(16))
            answers = await self.store(db, handler, arrivals, leasing)
        elif handler.options.transactional:
            answers = await self._protocol.deliver(db, handler, arrivals, holder)
        else:
            answers = await self._run_leased(db, handler, arrivals, for_s)
        if self.on_settled is not None:
            self.on_settled(
                handler.consumer,
                [message_id for message_id, answer in answers.items() if _is_written(answer)],
            )
        if len(known) == len(ids):
            return [answers[message_id] for message_id in ids]
        return self._unfolded(handler.consumer, messages, ids, answers, aside)

    def _arrival(self, handler: Handler, message: Message[Any]) -> Arrival:
        """Attach id and hash to a message that this database can hold; see `Handler.arrival`."""
        arrival, columns = (
            handler.arrival(message, self._protocol.limits),
            self._protocol.store.columns,
        )
        if columns.encoding is not None:
            columns.check_encoding(arrival)
        return arrival

    def _unfolded(
        self,
        consumer: str,
        messages: Sequence[Message[Any]],
        ids: Sequence[str],
        answers: dict[str, Answer],
        aside: dict[int, Answer],
    ) -> list[Answer]:
        """Return one answer per message: copies share the first one's fate, those without an id were set aside."""
        outcomes: list[Answer] = []
        seen: set[str] = set()
        for index, (message, message_id) in enumerate(zip(messages, ids, strict=True)):
            answer = answers[message_id] if message_id else aside[index]
            if message_id in seen and isinstance(answer, LeasedAnswer):
                answer = _STORED
            elif message_id in seen and answer.outcome in (Outcome.PROCESSED, Outcome.DUPLICATE):
                if answer.outcome is Outcome.PROCESSED:
                    answer = DUPLICATE
                if self._protocol.events:
                    self._protocol.events.emit(
                        MessageDuplicate(
                            consumer=consumer, message_id=message_id, topic=message.topic
                        )
                    )
            seen.add(message_id)
            outcomes.append(answer)
        return outcomes

    async def store(
        self,
        db: Session,
        handler: Handler,
        arrivals: Sequence[Arrival],
        leasing: _Leasing | None = None,
    ) -> dict[str, Answer]:
        """Store messages, pending or leased, to be processed from the table; returns DEFERRED for new ones.

        What something unexpected raises costs the message that caused it.
        """
        try:
            return await self._store(db, handler, arrivals, leasing)
        except Exception as error:
            if not is_contents(error):
                raise
            db.discard()
            if isinstance(error, StoreError):
                # raises if the tables are to blame
                await self._protocol.check_schema(db)
            if len(arrivals) > 1:
                return await self._stored_apart(db, handler, arrivals, leasing)
            (arrival,) = arrivals
            answer = await self._protocol.blame(db, handler, arrival, error, Boundary.STORE)
            return {arrival.message_id: answer}

    async def _store(
        self, db: Session, handler: Handler, arrivals: Sequence[Arrival], leasing: _Leasing | None
    ) -> dict[str, Answer]:
        protocol, consumer = self._protocol, handler.consumer
        # sorted by id, so that two stores wait for each other instead of deadlocking, unless the order counts
        ordered = (
            list(arrivals)
            if handler.options.in_order
            else sorted(arrivals, key=attrgetter("message_id"))
        )
        settled: dict[str, Answer] = {}
        for _ in range(AGAIN_MAX):
            try:
                fresh, rows = await self._insert(db, consumer, ordered, leasing)
            except (UnusableMessage, StoreError) as error:
                of_content = is_of_content(error)
                locked = isinstance(error, StoreError) and error.fault is Fault.LOCK_TIMEOUT
                if not (of_content or locked):
                    raise
                await protocol.store.rollback_bounded(db)
                if len(ordered) > 1:
                    return {**settled, **await self._stored_apart(db, handler, ordered, leasing)}
                (arrival,) = ordered
                if locked:
                    return {**settled, arrival.message_id: protocol.in_progress(handler, arrival)}
                await protocol.quarantine(
                    db, consumer, arrival.message, arrival.message_id, str(error), arrival.hash
                )
                return {**settled, arrival.message_id: _QUARANTINED}
            released = await self._release(db, consumer, rows, leasing)
            gone: list[Arrival] = []
            for arrival in ordered:
                if arrival.message_id in fresh:
                    self._emit_stored(consumer, arrival)
                    settled[arrival.message_id] = fresh[arrival.message_id]
                elif arrival.message_id in rows:
                    answer = await protocol.settle_existing(
                        db, handler, arrival, rows[arrival.message_id]
                    )
                    if arrival.message_id in released and answer.outcome is Outcome.DEFERRED:
                        answer = _RELEASED
                    settled[arrival.message_id] = answer
                else:
                    gone.append(arrival)
            if not gone:
                break
            # pruned between the two statements: store again
            ordered = gone
        else:
            raise out_of_sight(consumer)
        return settled

    async def _insert(
        self, db: Session, consumer: str, arrivals: Sequence[Arrival], leasing: _Leasing | None
    ) -> tuple[dict[str, Answer], dict[str, Existing]]:
        """Insert in a transaction of its own; returns the answers for the new ids, and the rows of the others."""
        store, bound = self._protocol.store, self._protocol.limits.lock_timeout
        fresh: dict[str, Answer]
        if leasing is None:
            token = secrets.token_hex(16)
            insert = store.storing(consumer, arrivals, token=token)
            results = await db.begin(store.begin_bounded(bound, insert))
            new = await store.stored(db, consumer, arrivals, results[-1], token=token)
            fresh = dict.fromkeys(new, _STORED)
        else:
            lease, token = leasing
            insert = leases.storing(store, consumer, arrivals, token=token, lease=lease)
            results = await db.begin(store.begin_bounded(bound, insert))
            rows_leased = await leases.stored(
                db, store, consumer, arrivals, results[-1], token=token, lease=lease
            )
            fresh = {
                leased.arrival.message_id: LeasedAnswer(
                    Outcome.DEFERRED, leased=leased, token=token
                )
                for leased in rows_leased
            }
        rows = await store.classify(
            db,
            consumer,
            [arrival.message_id for arrival in arrivals if arrival.message_id not in fresh],
        )
        await db.commit(store.commit_bounded())
        return fresh, rows

    async def _release(
        self, db: Session, consumer: str, rows: dict[str, Existing], leasing: _Leasing | None
    ) -> list[str]:
        """Release rows stored by a COMMIT whose answer was lost: no worker runs them, so they must not stay leased."""
        if leasing is None:
            return []
        ours = [message_id for message_id, row in rows.items() if row.token == leasing.token]
        if ours:
            await leases.release(
                db, self._protocol.store, consumer, ours, token=leasing.token, delay_s=0.0
            )
        return ours

    def _emit_stored(self, consumer: str, arrival: Arrival) -> None:
        if self._protocol.events:
            self._protocol.events.emit(
                MessageStored(
                    consumer=consumer, message_id=arrival.message_id, topic=arrival.message.topic
                )
            )

    async def _stored_apart(
        self, db: Session, handler: Handler, arrivals: Sequence[Arrival], leasing: _Leasing | None
    ) -> dict[str, Answer]:
        """Store one by one, since another transaction holds the id of one, or one cannot be stored."""
        settled: dict[str, Answer] = {}
        keys: set[str | None] = set()
        for arrival in arrivals:
            if handler.options.in_order and arrival.message.key in keys:
                settled[arrival.message_id] = self._protocol.in_progress(handler, arrival)
                continue
            settled.update(await self.store(db, handler, [arrival], leasing))
            if not settled[arrival.message_id].outcome.settles and arrival.message.key is not None:
                keys.add(arrival.message.key)
        return settled

    async def _run_leased(
        self, db: Session, handler: Handler, arrivals: Sequence[Arrival], for_s: float | None
    ) -> dict[str, Answer]:
        """Store, lease and run at once, without heartbeats: the lease covers the handler's `timeout=`."""
        lease, timeout = self._protocol.lease, handler.options.timeout
        if timeout is not None:
            lease = dataclasses.replace(lease, duration=lease.duration + timeout)
        settled: dict[str, Answer] = {}
        for arrival in arrivals:
            # one by one, so that no lease runs down while another message is being processed
            leasing = _Leasing(lease, secrets.token_hex(16))
            settled.update(await self.store(db, handler, [arrival], leasing))
            answer = settled[arrival.message_id]
            if isinstance(answer, LeasedAnswer):
                settled[arrival.message_id] = await self._protocol.run_leased(
                    db, handler, answer.leased, answer.token, for_s=for_s
                )
        return settled

    async def _set_aside(
        self, db: Session, handler: Handler, message: Message[Any], message_id: str, reason: str
    ) -> Answer:
        """Quarantine a message; where that fails unexpectedly it is not settled, and tried again."""
        try:
            await self._quarantined(db, handler.consumer, message, message_id, reason)
        except Exception as error:  # noqa: BLE001  # see contain
            self._protocol.contain(Boundary.RECORD, error, consumer=handler.consumer)
            db.discard()
            return Answer(Outcome.IN_PROGRESS)
        return _QUARANTINED

    async def _quarantined(
        self, db: Session, consumer: str, message: Message[Any], message_id: str, reason: str
    ) -> None:
        await self._protocol.quarantine(db, consumer, presentable(message), message_id, reason)

    async def unmatched(self, db: Session, message: Message[Any], reason: str) -> None:
        """Keep a message that no handler consumes, under no consumer's name."""
        await self._quarantined(db, "", message, shown_id(message), reason)


def presentable(message: Message[Any]) -> Message[Any]:
    """Return the message with every text fit for a column; what a database cannot store is escaped."""
    return dataclasses.replace(
        message,
        topic=printable(str(message.topic), TEXT_BYTES_MAX),
        type=None if message.type is None else printable(str(message.type), TEXT_BYTES_MAX),
        key=None if message.key is None else printable(str(message.key), TEXT_BYTES_MAX),
        content_type=None
        if message.content_type is None
        else printable(str(message.content_type), TEXT_BYTES_MAX),
        headers=_presentable(message.headers),
        time=message.time if isinstance(message.time, datetime) else None,
    )


def _presentable(headers: Headers) -> Headers:
    try:
        check_headers(headers)
    except UnusableMessage:
        return Headers(
            (
                printable(name, TEXT_BYTES_MAX),
                value
                if value is None or isinstance(value, bytes)
                else printable(str(value), TEXT_BYTES_MAX),
            )
            for name, value in headers
        )
    return headers


def shown_id(message: Message[Any]) -> str:
    """Return the id under which a message is looked for, if it has one; "" without."""
    try:
        return identify(message)
    except UnusableMessage:
        return "" if message.id is None else printable(str(message.id), 255)
