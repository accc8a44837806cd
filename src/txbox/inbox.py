"""The first door: `Inbox.accept` inside the caller's own transaction."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

from txbox.body import as_json
from txbox.connections import borrow, borrow_async
from txbox.drive import run, run_async
from txbox.errors import (
    Fault,
    MessageInProgress,
    PayloadMismatch,
    StoreError,
)
from txbox.handlers import check_texts
from txbox.identity import PayloadHash, checked_consumer, message_id, payload_hash
from txbox.message import Message
from txbox.outcome import Status
from txbox.policy import Limits
from txbox.processing.intake import presentable
from txbox.steps import Steps
from txbox.store.codec import Arrival, Codec, Columns
from txbox.store.dialect import Dialect
from txbox.store.inbox import Existing, InboxStore

_AGAIN_MAX = 10
Payload = bytes | str | dict[str, Any] | list[Any] | None


@dataclass(frozen=True, slots=True)
class Acceptance:
    """The answer of `accept`; false for a duplicate (and for a message whose row waits in the table).

    Attributes:
        message_id: the id as it is stored.
        status: None when accepted, else the status of the row that was there before.
    """

    message_id: str
    status: Status | None = None

    def __bool__(self) -> bool:
        return self.status is None

    @property
    def duplicate(self) -> bool:
        """True when this message is finished: acknowledge it and do nothing."""
        return self.status in (Status.PROCESSED, Status.DEAD, Status.DISCARDED)


class Inbox:
    """The inbox of one consumer, for those who own their loop and their transaction.

    Args:
        consumer: part of the key; keep it stable, a new name processes everything anew.
        id_scope: "topic" for ids that are unique within a topic only.
        payload_hash: how copies are compared; see `App.handler`.
        schema: the PostgreSQL schema of the tables, if they are not on the search path.
        codec: as given to App(codec=…), for the payloads that `quarantine` keeps.

    Nothing here begins, commits, rolls back or retries your transaction, and no failure is
    recorded: that is the loop's owner's job.
    """

    def __init__(
        self,
        consumer: str,
        *,
        id_scope: Literal["topic"] | None = None,
        payload_hash: PayloadHash = "raw",
        schema: str | None = None,
        codec: Codec | None = None,
    ) -> None:
        self.consumer = checked_consumer(consumer)
        self._id_scope: Literal["topic"] | None = id_scope
        self._payload_hash: PayloadHash = payload_hash
        self._schema = schema
        self._columns = Columns(codec)
        self._limits = Limits()

    def __repr__(self) -> str:
        return f"Inbox(consumer={self.consumer!r})"

    def accept(
        self,
        tx: Any,
        message: Message[Any] | str | int,
        *,
        payload: Payload = None,
        topic: str | None = None,
        type: str | None = None,  # noqa: A002  # the word of the field
        key: str | None = None,
        timeout: timedelta | None = None,
    ) -> Acceptance:
        """Write the inbox row of a message in your transaction; false means: seen before, only acknowledge.

        Args:
            tx: your connection or session, inside a transaction.
            message: a Message, or its id with what you know of it by keyword. Without a payload
                nothing is compared with the copies to come.
            timeout: the longest wait for another transaction that holds this id; without one your
                connection's own lock time-out holds.

        Raises:
            PayloadMismatch: the id is known with another payload: roll back, `quarantine`, acknowledge.
            MessageInProgress: the time-out passed: do not acknowledge; your transaction is still usable.
            UnusableMessage: no usable id, or a topic, type or key of more than 1,024 bytes.
            SchemaError: a table is missing; the message contains the command to run.
            StoreError: the database refused; with `fault` CONFLICT roll back and start again.

        Guarantee: the row commits or rolls back with your writes.
        """
        arrival = self._arrival(message, payload, topic, type, key)
        executor = borrow(tx, schema=self._schema)
        return run(executor, self._accept(executor.dialect, [arrival], timeout))[0]

    async def accept_async(
        self,
        tx: Any,
        message: Message[Any] | str | int,
        *,
        payload: Payload = None,
        topic: str | None = None,
        type: str | None = None,  # noqa: A002  # the word of the field
        key: str | None = None,
        timeout: timedelta | None = None,  # noqa: ASYNC109  # a lock time-out of the database
    ) -> Acceptance:
        """The twin of `accept` for async connections and sessions."""
        arrival = self._arrival(message, payload, topic, type, key)
        executor = borrow_async(tx, schema=self._schema)
        return (await run_async(executor, self._accept(executor.dialect, [arrival], timeout)))[0]

    def accept_many(
        self, tx: Any, messages: Sequence[Message[Any]], *, timeout: timedelta | None = None
    ) -> list[Acceptance]:
        """As `accept` for many messages in one statement; a copy within the list is a duplicate."""
        arrivals = [self._arrival(message, None, None, None, None) for message in messages]
        executor = borrow(tx, schema=self._schema)
        return run(executor, self._accept(executor.dialect, arrivals, timeout))

    async def accept_many_async(
        self,
        tx: Any,
        messages: Sequence[Message[Any]],
        *,
        timeout: timedelta | None = None,  # noqa: ASYNC109
    ) -> list[Acceptance]:
        """The twin of `accept_many` for async connections and sessions."""
        arrivals = [self._arrival(message, None, None, None, None) for message in messages]
        executor = borrow_async(tx, schema=self._schema)
        return await run_async(executor, self._accept(executor.dialect, arrivals, timeout))

    def quarantine(
        self,
        tx: Any,
        message: Message[Any] | str | int,
        *,
        payload: Payload = None,
        topic: str | None = None,
        reason: str = "another payload came under a known id",
    ) -> None:
        """Set a message aside in a transaction of yours; then commit and acknowledge it."""
        executor = borrow(tx, schema=self._schema)
        run(executor, self._set_aside(executor.dialect, message, payload, topic, reason))

    async def quarantine_async(
        self,
        tx: Any,
        message: Message[Any] | str | int,
        *,
        payload: Payload = None,
        topic: str | None = None,
        reason: str = "another payload came under a known id",
    ) -> None:
        """The twin of `quarantine` for async connections and sessions."""
        executor = borrow_async(tx, schema=self._schema)
        await run_async(
            executor, self._set_aside(executor.dialect, message, payload, topic, reason)
        )

    def _arrival(
        self,
        message: Message[Any] | str | int,
        payload: Payload,
        topic: str | None,
        type: str | None,  # noqa: A002
        key: str | None,
    ) -> Arrival:
        if isinstance(message, Message):
            own_id = message_id(message, scope=self._id_scope)
            return Arrival(message, own_id, payload_hash(message, self._payload_hash))
        given: Message[Any] = Message(
            id=message,
            topic="" if topic is None else topic,
            payload=_bytes(payload),
            type=type,
            key=key,
        )
        hashed = None if payload is None else payload_hash(given, self._payload_hash)
        return Arrival(given, message_id(given, scope=self._id_scope), hashed)

    def _accept(
        self, dialect: Dialect, arrivals: Sequence[Arrival], timeout: timedelta | None
    ) -> Steps[list[Acceptance]]:
        store = InboxStore(dialect, self._columns)
        for arrival in arrivals:
            check_texts(arrival.message)
        if timeout is None:
            return (yield from self._accepted(store, arrivals))
        yield from _if_needed(dialect, "savepoint")
        try:
            if dialect.has("bound_lock_timeout"):
                yield store.bound_lock_timeout(timeout)
            answer = yield from self._accepted(store, arrivals)
            yield from _if_needed(dialect, "restore_lock_timeout")
        except StoreError as error:
            # SQLite has one lock for all rows; elsewhere a conflict has ended the caller's transaction
            busy = (error.code or "").startswith("SQLITE_BUSY")
            if error.fault is not Fault.LOCK_TIMEOUT and not busy:
                raise
            yield from _if_needed(dialect, "rollback_to_savepoint")
            yield from _if_needed(dialect, "release_savepoint")
            if not dialect.claim_bounds_wait:
                # where the setting is no part of the transaction, the savepoint has not brought it back
                yield from _if_needed(dialect, "restore_lock_timeout")
            raise MessageInProgress(
                f"Another transaction holds this message of consumer {self.consumer!r}: do not acknowledge it, "
                "try again later."
            ) from error
        yield from _if_needed(dialect, "release_savepoint")
        return answer

    def _accepted(self, store: InboxStore, arrivals: Sequence[Arrival]) -> Steps[list[Acceptance]]:
        first: dict[str, Arrival] = {}
        for arrival in arrivals:
            self._same_payload(first.setdefault(arrival.message_id, arrival), arrival)
        waiting = sorted(first.values(), key=lambda arrival: arrival.message_id.encode())
        fresh: set[str] = set()
        rows: dict[str, Existing] = {}
        for _ in range(_AGAIN_MAX):
            token = secrets.token_hex(16)
            try:
                won = yield from store.accept(self.consumer, waiting, token=token)
            except StoreError as error:
                if error.fault is Fault.CONFLICT and store.dialect.arrays:
                    error.add_note(
                        "Another transaction accepted this message after your snapshot was taken: roll back and "
                        "start again; READ COMMITTED avoids this."
                    )
                raise
            fresh |= won
            left = [arrival for arrival in waiting if arrival.message_id not in won]
            rows.update(
                (yield from store.classify(self.consumer, [arrival.message_id for arrival in left]))
            )
            # an id without a row was pruned between the two statements: accept again
            waiting = [arrival for arrival in left if arrival.message_id not in rows]
            if not waiting:
                break
        return [self._answer(arrival, first, fresh, rows) for arrival in arrivals]

    def _answer(
        self,
        arrival: Arrival,
        first: dict[str, Arrival],
        fresh: set[str],
        rows: dict[str, Existing],
    ) -> Acceptance:
        own_id = arrival.message_id
        if own_id in fresh:
            return (
                Acceptance(own_id)
                if first[own_id] is arrival
                else Acceptance(own_id, Status.PROCESSED)
            )
        row = rows[own_id]
        if row.differs(arrival.hash):
            raise self._mismatch()
        return Acceptance(own_id, Status(row.status))

    def _same_payload(self, first: Arrival, arrival: Arrival) -> None:
        if first.hash is not None and arrival.hash is not None and first.hash != arrival.hash:
            raise self._mismatch()

    def _mismatch(self) -> PayloadMismatch:
        return PayloadMismatch(
            f"A known message id of consumer {self.consumer!r} came with another payload: roll back, call "
            "inbox.quarantine(tx, …) in a new transaction, then acknowledge."
        )

    def _set_aside(
        self,
        dialect: Dialect,
        message: Message[Any] | str | int,
        payload: Payload,
        topic: str | None,
        reason: str,
    ) -> Steps[None]:
        arrival = self._arrival(message, payload, topic, None, None)
        hashed = arrival.hash or hashlib.sha256(arrival.message.payload or b"").digest()
        yield InboxStore(dialect, self._columns).quarantine(
            self.consumer,
            presentable(arrival.message),
            message_id=arrival.message_id,
            hashed=hashed,
            reason=reason,
            payload_limit=self._limits.quarantined_bytes,
        )


def _if_needed(dialect: Dialect, name: str) -> Steps[None]:
    """Run a statement where this database has anything to do."""
    if dialect.has(name):
        yield dialect.statement(name)


def _bytes(payload: Payload) -> bytes | None:
    if payload is None or isinstance(payload, bytes):
        return payload
    if isinstance(payload, str):
        return payload.encode()
    return as_json(payload, sort_keys=True)
