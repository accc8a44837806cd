"""Staged messages for this app's own consumers become pending inbox rows, in the transaction that marks them."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from typing import Any

from txbox.app import App
from txbox.errors import UnusableMessage
from txbox.events import MessageQuarantined, MessageStored
from txbox.handlers import Handler
from txbox.message import Message
from txbox.processing.intake import presentable
from txbox.session import Session, Statement
from txbox.store.codec import Arrival
from txbox.store.outbox import OutboxStore, Staged

_OTHER_PAYLOAD = "A different payload was staged under a known id."


class LocalDelivery:
    """Puts leased rows into the inbox of each of their consumers.

    Guarantee: the inbox rows and the mark in the outbox are one commit.
    """

    def __init__(self, app: App, outbox: OutboxStore, token: str, *, keep: bool) -> None:
        self._app = app
        self._outbox = outbox
        self._token = token
        self._keep = keep
        self._set_aside: list[tuple[str, Message[Any], str, str]] = []
        self._stored: list[tuple[str, Arrival]] = []

    async def deliver(self, db: Session, rows: Sequence[Staged]) -> int:
        """Deliver rows in order; each has a consumer. Returns how many, or 0 if the lease was lost."""
        work = self._sorted(rows)
        await db.begin()
        for handler, arrivals in work.items():
            await self._store(db, handler, arrivals)
        for consumer, message, message_id, reason in self._set_aside:
            await db.execute(self._quarantine(consumer, message, message_id, reason))
        ids = [row.id for row in rows]
        marked = await db.execute(self._outbox.sent(ids, token=self._token, keep=self._keep))
        if marked.count != len(ids):
            # another relay has taken some over, so what this one wrote must go
            await db.rollback()
            return 0
        await db.commit()
        self._report()
        return len(ids)

    @property
    def consumers(self) -> set[str]:
        """The consumers that got a message they did not have before."""
        return {consumer for consumer, _ in self._stored}

    def _sorted(self, rows: Sequence[Staged]) -> dict[Handler, dict[str, Arrival]]:
        """Return the arrivals of each handler, in the order of the rows, each id once."""
        app = self._app
        work: dict[Handler, dict[str, Arrival]] = {}
        for row in rows:
            message = row.message
            for handler in app.handlers.matching(message.topic, message.type):
                try:
                    arrival = handler.arrival(message, app.limits)
                except UnusableMessage as error:
                    self._set_aside.append(
                        (handler.consumer, message, error.message_id, str(error))
                    )
                    continue
                first = work.setdefault(handler, {}).setdefault(arrival.message_id, arrival)
                if first.hash != arrival.hash:
                    self._set_aside.append(
                        (handler.consumer, message, arrival.message_id, _OTHER_PAYLOAD)
                    )
        return work

    async def _store(self, db: Session, handler: Handler, arrivals: dict[str, Arrival]) -> None:
        inbox, consumer = self._app.store, handler.consumer
        fresh = await inbox.store(db, consumer, list(arrivals.values()), token=self._token)
        self._stored += [
            (consumer, arrivals[message_id]) for message_id in arrivals if message_id in fresh
        ]
        known = await inbox.classify(
            db, consumer, [message_id for message_id in arrivals if message_id not in fresh]
        )
        for message_id, row in known.items():
            if row.differs(arrivals[message_id].hash):
                self._set_aside.append(
                    (consumer, arrivals[message_id].message, message_id, _OTHER_PAYLOAD)
                )

    def _quarantine(
        self, consumer: str, message: Message[Any], message_id: str, reason: str
    ) -> Statement:
        return self._app.store.quarantine(
            consumer,
            presentable(message),
            message_id=message_id,
            hashed=hashlib.sha256(message.payload or b"").digest(),
            reason=reason,
            payload_limit=self._app.limits.quarantined_bytes,
        )

    def _report(self) -> None:
        events = self._app.events
        for consumer, message, message_id, reason in self._set_aside:
            events.emit(
                MessageQuarantined(
                    consumer=consumer, message_id=message_id, topic=message.topic, reason=reason
                )
            )
        for consumer, count in Counter(consumer for consumer, _ in self._stored).items():
            self._app.activity.received(consumer, count)
        for consumer, arrival in self._stored:
            events.emit(
                MessageStored(
                    consumer=consumer, message_id=arrival.message_id, topic=arrival.message.topic
                )
            )
