"""`Inbox.accept`: the inbox inside the caller's own loop and transaction."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

from txbox.connections import borrow
from txbox.errors import (
    ConfigurationError,
    Fault,
    MessageInProgress,
    PayloadMismatch,
    StoreError,
    TxboxError,
    UnusableMessage,
    check_duration,
)
from txbox.handlers.body import as_json
from txbox.identity import (
    PayloadHash,
    check_fields,
    check_headers,
    check_numbers,
    checked_consumer,
    message_id,
    payload_hash,
)
from txbox.message import Message
from txbox.outcome import Status
from txbox.policy import Limits
from txbox.processing.intake import presentable
from txbox.session import Transaction, async_of, run, run_async
from txbox.store.codec import Arrival, Codec, Columns
from txbox.store.dialect import Dialect
from txbox.store.inbox import AGAIN_MAX, Existing, InboxStore, out_of_sight
from txbox.store.schema import limited_encoding, session_settings

_REUSED = "Another payload came under a known id."
# a character that the server cannot convert to the database's encoding
_UNTRANSLATABLE = frozenset({"22P05", "22021"})
Payload = bytes | str | dict[str, Any] | list[Any] | None


@dataclass(frozen=True, slots=True)
class Acceptance:
    """The result of `accept`: true for a new message, false if its row was there before.

    Attributes:
        message_id: the id as it is stored.
        status: None for a new message, else the status of the row that was there.
    """

    message_id: str
    status: Status | None = None

    def __bool__(self) -> bool:
        return self.status is None

    @property
    def duplicate(self) -> bool:
        """True when this message is finished. A row that was there and is not waits for a worker with a handler."""
        return self.status in (Status.PROCESSED, Status.DEAD, Status.DISCARDED)


class Inbox:
    """The inbox of one consumer, for code that has its own loop and its own transaction.

    Args:
        consumer: part of the key. Keep it stable: under a new name everything is processed again.
        id_scope: "topic" for ids that are unique within a topic only.
        payload_hash: how copies are compared; see `App.handler`.
        schema: the PostgreSQL schema of the tables, if it is not on the search path.
        codec: that of App(codec=…), for the payloads that `quarantine` keeps.

    It never begins, commits, rolls back or retries your transaction, and it records no failures:
    that is up to your loop.
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
        message: Message[Any] | str | int | None,
        *,
        payload: Payload = None,
        topic: str | None = None,
        type: str | None = None,  # noqa: A002  # the word of the field
        key: str | None = None,
        timeout: timedelta | None = None,
    ) -> Acceptance:
        """Write a message's inbox row in your transaction. False means seen before: just acknowledge it.

        Args:
            tx: your connection or session, inside a transaction.
            message: a Message, or its id, with whatever else you know passed by keyword. Without a
                payload, later copies are not compared with this one.
            timeout: the longest wait for another transaction that holds this id. Without it, your
                connection's own lock timeout applies.

        Raises:
            PayloadMismatch: the id is known with a different payload: roll back, `quarantine`, acknowledge.
            UnusableMessage: no usable id, or a field or header that no database can store: the same.
            MessageInProgress: the timeout passed: do not acknowledge; your transaction is still usable.
            SchemaError: a table is missing; the message contains the command to run.
            StoreError: the database refused; if `fault` is CONFLICT, roll back and start again.

        Guarantee: the row commits or rolls back with your writes.
        """
        arrival = self._arrival(message, payload, topic, type, key)
        executor = borrow(tx, schema=self._schema)
        return run(executor, self._accept, executor.dialect, [arrival], timeout)[0]

    @async_of(accept)
    async def accept_async(
        self,
        tx: Any,
        message: Any,
        *,
        timeout: timedelta | None = None,  # noqa: ASYNC109  # a lock time-out of the database
        **known: Any,
    ) -> Acceptance:
        """`accept` for async connections and sessions."""
        arrival = self._arrival(message, **known)
        executor = borrow(tx, is_async=True, schema=self._schema)
        return (await run_async(executor, self._accept, executor.dialect, [arrival], timeout))[0]

    def accept_many(
        self, tx: Any, messages: Sequence[Message[Any]], *, timeout: timedelta | None = None
    ) -> list[Acceptance]:
        """Accept many messages in one statement, or none of them; a copy within the list is a duplicate."""
        arrivals = [self._arrival(message) for message in messages]
        executor = borrow(tx, schema=self._schema)
        return run(executor, self._accept, executor.dialect, arrivals, timeout)

    @async_of(accept_many)
    async def accept_many_async(
        self,
        tx: Any,
        messages: Sequence[Message[Any]],
        *,
        timeout: timedelta | None = None,  # noqa: ASYNC109
    ) -> list[Acceptance]:
        """`accept_many` for async connections and sessions."""
        arrivals = [self._arrival(message) for message in messages]
        executor = borrow(tx, is_async=True, schema=self._schema)
        return await run_async(executor, self._accept, executor.dialect, arrivals, timeout)

    def quarantine(
        self,
        tx: Any,
        message: Message[Any] | str | int | None,
        *,
        payload: Payload = None,
        topic: str | None = None,
        reason: str | None = None,
    ) -> None:
        """Set a message aside in your transaction, also one without a usable id; then commit and acknowledge it.

        Copies share a row that counts them: under one id those with the same payload, without an id those that are
        equal in everything that is kept.

        Args:
            reason: for people; by default what makes it unusable, or that its id came with another payload.

        Guarantee: the row commits or rolls back with your transaction.
        """
        arrival, reason = self._aside(message, payload, topic, reason)
        executor = borrow(tx, schema=self._schema)
        run(executor, self._set_aside, executor.dialect, arrival, reason)

    @async_of(quarantine)
    async def quarantine_async(
        self,
        tx: Any,
        message: Any,
        *,
        payload: Payload = None,
        topic: str | None = None,
        reason: str | None = None,
    ) -> None:
        """`quarantine` for async connections and sessions."""
        arrival, reason = self._aside(message, payload, topic, reason)
        executor = borrow(tx, is_async=True, schema=self._schema)
        await run_async(executor, self._set_aside, executor.dialect, arrival, reason)

    def keep_result(self, tx: Any, accepted: Acceptance, result: bytes) -> None:
        """Keep what your processing returned in the row that `accept` has written in this transaction.

        Args:
            result: JSON, or other bytes that do not begin with NUL.

        Guarantee: result, row and your writes are one commit.
        """
        executor = borrow(tx, schema=self._schema)
        run(executor, self._keep_result, executor.dialect, accepted, result)

    @async_of(keep_result)
    async def keep_result_async(self, tx: Any, accepted: Acceptance, result: bytes) -> None:
        """`keep_result` for async connections and sessions."""
        executor = borrow(tx, is_async=True, schema=self._schema)
        await run_async(executor, self._keep_result, executor.dialect, accepted, result)

    def result(self, tx: Any, accepted: Acceptance) -> bytes | None:
        """What was kept when this message was processed; None if nothing was."""
        executor = borrow(tx, schema=self._schema)
        return run(executor, self._result, executor.dialect, accepted)

    @async_of(result)
    async def result_async(self, tx: Any, accepted: Acceptance) -> bytes | None:
        """`result` for async connections and sessions."""
        executor = borrow(tx, is_async=True, schema=self._schema)
        return await run_async(executor, self._result, executor.dialect, accepted)

    def _arrival(
        self,
        message: Message[Any] | str | int | None,
        payload: Payload = None,
        topic: str | None = None,
        type: str | None = None,  # noqa: A002
        key: str | None = None,
    ) -> Arrival:
        chosen = message
        if not isinstance(chosen, Message):
            chosen = Message(
                id=chosen, topic=topic or "", payload=_bytes(payload), type=type, key=key
            )
        identity = message_id(chosen, scope=self._id_scope)
        # without a payload, an id by itself is not compared; a Message without one is a tombstone
        compared = chosen is message or payload is not None
        try:
            check_fields(chosen)
            check_headers(chosen.headers)
            check_numbers(chosen.sequence, chosen.time)
            hashed = payload_hash(chosen, self._payload_hash) if compared else None
        except UnusableMessage as error:
            error.message_id = identity
            raise
        return Arrival(chosen, identity, hashed)

    def _aside(
        self,
        message: Message[Any] | str | int | None,
        payload: Payload,
        topic: str | None,
        reason: str | None,
    ) -> tuple[Arrival, str]:
        """What is kept of a message that is set aside, and why; without a usable id it has none."""
        try:
            return self._arrival(message, payload, topic), reason or _REUSED
        except UnusableMessage as error:
            if not isinstance(message, Message):
                message = Message(id=message, topic=topic or "", payload=_bytes(payload))
            return Arrival(message, error.message_id, None), reason or str(error)

    async def _accept(
        self,
        db: Transaction,
        dialect: Dialect,
        arrivals: Sequence[Arrival],
        bound: timedelta | None,
    ) -> list[Acceptance]:
        store = InboxStore(dialect, self._columns)
        check_duration("timeout", bound)
        if bound is None:
            return await self._accepted(db, store, arrivals)
        await _if_needed(db, dialect, "savepoint")
        try:
            if dialect.has("bound_lock_timeout"):
                await db.execute(store.bound_lock_timeout(bound))
            answer = await self._accepted(db, store, arrivals)
            await _if_needed(db, dialect, "restore_lock_timeout")
        except TxboxError as error:
            if not dialect.claim_bounds_wait:
                # the limit is the session's, and outlives its transaction
                with suppress(StoreError):
                    await _if_needed(db, dialect, "restore_lock_timeout")
            # SQLite has one lock for all rows; elsewhere a conflict has already aborted the caller's transaction
            if not isinstance(error, StoreError) or not (
                error.fault is Fault.LOCK_TIMEOUT or (error.code or "").startswith("SQLITE_BUSY")
            ):
                raise
            await _if_needed(db, dialect, "rollback_to_savepoint")
            await _if_needed(db, dialect, "release_savepoint")
            raise MessageInProgress(
                f"Another transaction holds this message of consumer {self.consumer!r}: do not acknowledge it, "
                "try again later."
            ) from error
        await _if_needed(db, dialect, "release_savepoint")
        return answer

    async def _accepted(
        self, db: Transaction, store: InboxStore, arrivals: Sequence[Arrival]
    ) -> list[Acceptance]:
        first: dict[str, Arrival] = {}
        for arrival in arrivals:
            if first.setdefault(arrival.message_id, arrival).differs(arrival):
                raise self._mismatch()
        waiting = sorted(first.values(), key=lambda arrival: arrival.message_id.encode())
        fresh: set[str] = set()
        rows: dict[str, Existing] = {}
        for _ in range(AGAIN_MAX):
            token = secrets.token_hex(16)
            try:
                won = await store.accept(db, self.consumer, waiting, token=token)
            except StoreError as error:
                if error.fault is Fault.CONFLICT and store.dialect.arrays:
                    error.add_note(
                        "Another transaction accepted this message after your snapshot was taken: roll back and "
                        "start again; READ COMMITTED avoids this."
                    )
                if error.code in _UNTRANSLATABLE:
                    raise UnusableMessage(
                        "The id, topic, type or key has characters that the encoding of this database lacks."
                    ) from error
                raise
            fresh |= won
            unclaimed = [arrival for arrival in waiting if arrival.message_id not in won]
            rows.update(
                await store.classify(
                    db, self.consumer, [arrival.message_id for arrival in unclaimed]
                )
            )
            # an id without a row was pruned between the two statements: accept it again
            waiting = [arrival for arrival in unclaimed if arrival.message_id not in rows]
            if not waiting:
                break
        else:
            raise out_of_sight(self.consumer)
        return [self._answer(arrival, first, fresh, rows) for arrival in arrivals]

    def _answer(
        self,
        arrival: Arrival,
        first: dict[str, Arrival],
        fresh: set[str],
        rows: dict[str, Existing],
    ) -> Acceptance:
        message_id = arrival.message_id
        if message_id in fresh:
            return Acceptance(
                message_id, None if first[message_id] is arrival else Status.PROCESSED
            )
        row = rows[message_id]
        if row.differs(arrival.hash):
            raise self._mismatch()
        return Acceptance(message_id, Status(row.status))

    def _mismatch(self) -> PayloadMismatch:
        return PayloadMismatch(
            f"A known message id of consumer {self.consumer!r} came with a different payload: roll back, call "
            "inbox.quarantine(tx, …) in a new transaction, then acknowledge."
        )

    async def _keep_result(
        self, db: Transaction, dialect: Dialect, accepted: Acceptance, result: bytes
    ) -> None:
        if result.startswith(b"\0"):
            raise ConfigurationError(
                "A result that is kept must not begin with NUL: write it as JSON."
            )
        store = InboxStore(dialect, self._columns)
        await db.send(store.keep_result(self.consumer, accepted.message_id, result))

    async def _result(
        self, db: Transaction, dialect: Dialect, accepted: Acceptance
    ) -> bytes | None:
        store = InboxStore(dialect, self._columns)
        return await store.kept_result(db, self.consumer, accepted.message_id)

    async def _set_aside(
        self, db: Transaction, dialect: Dialect, arrival: Arrival, reason: str
    ) -> None:
        self._columns.encoding = limited_encoding(await session_settings(db, dialect))
        await db.send(
            InboxStore(dialect, self._columns).quarantine(
                self.consumer,
                presentable(arrival.message),
                message_id=arrival.message_id,
                reason=reason,
                payload_limit=self._limits.quarantined_bytes,
                hashed=arrival.hash,
            )
        )


async def _if_needed(db: Transaction, dialect: Dialect, name: str) -> None:
    """Run a statement if this database needs it."""
    if dialect.has(name):
        await db.execute(dialect.statement(name))


def _bytes(payload: Payload) -> bytes | None:
    if payload is None or isinstance(payload, bytes):
        return payload
    if isinstance(payload, str):
        return payload.encode()
    return as_json(payload, sort_keys=True)
