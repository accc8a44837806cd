"""The service under test: one effect a message, in a table without a unique key, so that a second one shows."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

import txbox
from tests.support.databases import Raw
from tests.support.effect import AT_ONCE, CONSUMER, TOPIC, add_effect
from txbox import App, Lease, Limits, Message, Outcome
from txbox.events import Event
from txbox.handlers import Handler
from txbox.session import drive
from txbox.store import leases

__all__ = [
    "AT_ONCE",
    "CONSUMER",
    "TOPIC",
    "add_effect",
]  # what processes of the tests take from .effect


def create_effects(raw: Raw) -> None:
    """The business table; VARBINARY keeps every id bytewise apart on MySQL and MariaDB."""
    raw.execute(f"CREATE TABLE effect (message_id {id_type(raw)} NOT NULL, note varchar(64))")


def id_type(raw: Raw) -> str:
    return "varbinary(300)" if raw.product == "mysql" else "text"


def execute(tx: Any, sql: str) -> list[Any]:
    """Run one statement by a plain sync driver's connection."""
    cursor = tx.cursor()
    try:
        cursor.execute(sql)
        return list(cursor.fetchall()) if cursor.description else []
    finally:
        cursor.close()


def past_guard(raw: Raw) -> None:
    """From here on PostgreSQL takes processed rows from this connection, as from a claim that was closed."""
    raw.execute("SET txbox.token = 'test'")
    raw.execute("SET txbox.closed = 'test'")


def effects(raw: Raw, message_id: str | None = None) -> int:
    if message_id is None:
        return int(raw.value("SELECT count(*) FROM effect"))
    return int(
        raw.value("SELECT count(*) FROM effect WHERE message_id = ?", (as_id(raw, message_id),))
    )


def as_id(raw: Raw, message_id: str) -> str | bytes:
    """An id as a parameter: MySQL compares bytes with bytes, whatever the connection's character set."""
    return message_id.encode() if raw.product == "mysql" else message_id


@dataclass(frozen=True)
class Row:
    """What the tests look at of an inbox row."""

    status: str
    attempts: int
    starts: int
    has_payload: bool
    error_type: str | None
    error: str | None


def row(raw: Raw, message_id: str, consumer: str = CONSUMER) -> Row | None:
    found = raw.rows(
        "SELECT status, attempts, starts, has_payload, error_type, error FROM txbox_inbox"
        " WHERE consumer = ? AND message_id = ?",
        (as_id(raw, consumer), as_id(raw, message_id)),
    )
    if not found:
        return None
    ((status, attempts, starts, has_payload, error_type, error),) = found
    return Row(status, attempts, starts, bool(has_payload), error_type, error)


def the_row(raw: Raw, message_id: str, consumer: str = CONSUMER) -> Row:
    found = row(raw, message_id, consumer)
    assert found is not None, f"{consumer} has no row of {message_id!r}"
    return found


def lasting(raw: Raw) -> list[Any]:
    """The inbox rows without `updated_at`: on MySQL and MariaDB a copy moves it by a microsecond (ADR 0064)."""
    key = "`key`" if raw.product == "mysql" else "key"
    return raw.rows(
        "SELECT consumer, message_id, status, topic, type, sequence, received_at, processed_at, payload_hash, attempts,"
        " starts, next_attempt_at, lease_until, token, error_type, error, fingerprint, content_type, headers, origin,"
        f" payload, has_payload, result, key_id, arrival, {key} FROM txbox_inbox"
    )


def statuses(raw: Raw) -> dict[str, int]:
    return {
        str(status): int(count)
        for status, count in raw.rows("SELECT status, count(*) FROM txbox_inbox GROUP BY status")
    }


def quarantined(raw: Raw) -> list[tuple[str, int]]:
    """(reason, times seen) of every quarantine row."""
    return [
        (str(reason), int(seen))
        for reason, seen in raw.rows("SELECT reason, seen FROM txbox_quarantine")
    ]


def paid(message_id: str | int, payload: bytes = b'{"cents": 100}', **options: Any) -> Message[Any]:
    return Message(id=message_id, topic=TOPIC, payload=payload, **options)


@dataclass
class Shop:
    """An app with an effect table, the events it emitted, and the tests' own view of its database."""

    url: str
    raw: Raw
    app: App
    events: list[Event] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)

    def handler(
        self,
        body: Callable[[Message[Any], Any], object] | None = None,
        *,
        consumer: str = CONSUMER,
        **options: Any,
    ) -> Handler:
        """Register a handler that notes its call, writes the effect, then does `body`."""

        def handle(message: Message[Any], tx: Any) -> None:
            self.calls.append(str(message.id))
            add_effect(tx, message.id, consumer)
            if body is not None:
                body(message, tx)

        options.setdefault("retry", AT_ONCE)
        register: Any = self.app.handler(TOPIC, consumer=consumer, **options)
        register(handle)
        return self.app.handlers.matching(TOPIC, options.get("type"), consumer)[0]

    def deliver(self, message: Message[Any], consumer: str | None = None) -> Outcome:
        return self.app.process(message, consumer=consumer)

    def work(
        self, consumer: str = CONSUMER, *, suspect: bool = False, limit: int = 20
    ) -> list[Outcome]:
        """Lease what is due, once, and run it."""
        return [
            self.run(each, token, consumer)
            for each, token in self.lease(consumer, suspect=suspect, limit=limit)
        ]

    def lease(
        self,
        consumer: str = CONSUMER,
        *,
        suspect: bool = False,
        limit: int = 20,
        heads_only: bool = False,
    ) -> list[tuple[Any, str]]:
        token = secrets.token_hex(16)
        assert self.app.database.sync is not None
        leased = drive(
            self.app.database.sync,
            leases.lease,
            self.app.store,
            consumer,
            token=token,
            limit=limit,
            lease=self.app.lease,
            suspect=suspect,
            heads_only=heads_only,
        )
        return [(each, token) for each in leased]

    def run(self, leased: Any, token: str, consumer: str = CONSUMER) -> Outcome:
        handler = next(each for each in self.app.handlers if each.consumer == consumer)
        assert self.app.database.sync is not None
        return drive(
            self.app.database.sync, self.app.protocol.run_leased, handler, leased, token
        ).outcome

    def rescue(self, max_starts: int = 3) -> list[Any]:
        assert self.app.database.sync is not None
        return drive(
            self.app.database.sync,
            leases.rescue,
            self.app.store,
            consumer=None,
            max_starts=max_starts,
            limit=100,
        )

    def emitted(self, kind: type[Event]) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]

    def effects(self, message_id: str | None = None) -> int:
        return effects(self.raw, message_id)

    def row(self, message_id: str, consumer: str = CONSUMER) -> Row:
        return the_row(self.raw, message_id, consumer)

    def force(self, sql: str, params: Sequence[object] = ()) -> int:
        """Change rows as no part of txbox may: past the guard."""
        if self.raw.product == "postgresql":
            past_guard(self.raw)
        try:
            return self.raw.execute(sql, params)
        finally:
            if self.raw.product == "postgresql":
                self.raw.execute("RESET txbox.token")

    def next_case(self) -> None:
        """Without the quarantine and the events of the last of several cases that share this database."""
        self.raw.execute("DELETE FROM txbox_quarantine")
        self.events.clear()

    def make_due(self) -> None:
        self.raw.execute(
            "UPDATE txbox_inbox SET next_attempt_at = received_at WHERE status IN ('failed', 'pending')"
        )


@contextmanager
def opened(
    url: str,
    *,
    limits: Limits | None = None,
    lease: Lease | None = None,
    observers: Sequence[Callable[[Event], None]] = (),
    **options: Any,
) -> Iterator[Shop]:
    """A shop on a fresh database."""
    events: list[Event] = []
    with (
        Raw(url) as raw,
        txbox.App(
            url, limits=limits, lease=lease, observers=[events.append, *observers], **options
        ) as app,
    ):
        create_effects(raw)
        yield Shop(url, raw, app, events)


@pytest.fixture
def shop(database_url: str) -> Iterator[Shop]:
    """A shop on each database; the test registers the handler."""
    with opened(database_url) as other_shop:
        yield other_shop
