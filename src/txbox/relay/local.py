"""Staged messages for this app's own consumers: pending inbox rows, in the transaction that marks them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from txbox.app import App
from txbox.errors import UnusableMessage
from txbox.events import MessageQuarantined, MessageStored
from txbox.handlers import Handler
from txbox.message import Message
from txbox.processing.intake import presentable
from txbox.steps import Begin, Commit, Rollback, Statement, Steps
from txbox.store.codec import Arrival
from txbox.store.outbox import OutboxStore, Staged

_OTHER_PAYLOAD = "Another payload was staged under an id that is known."


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

    def deliver(self, rows: Sequence[Staged]) -> Steps[int]:
        """Deliver rows in their order, each of which has a consumer; returns how many, 0 when the lease was lost."""
        work = self._sorted(rows)
        yield Begin()
        for handler, arrivals in work.items():
            yield from self._store(handler, arrivals)
        for consumer, message, own_id, reason in self._set_aside:
            yield self._quarantine(consumer, message, own_id, reason)
        ids = [row.id for row in rows]
        marked = yield self._outbox.sent(ids, token=self._token, keep=self._keep)
        if marked.count != len(ids):
            # another relay has taken some over: what this one wrote goes with it
            yield Rollback()
            return 0
        yield Commit()
        self._report()
        return len(ids)

    @property
    def consumers(self) -> set[str]:
        """Those that have got a message which they did not have."""
        return {consumer for consumer, _ in self._stored}

    def _sorted(self, rows: Sequence[Staged]) -> dict[Handler, dict[str, Arrival]]:
        """The arrivals of each handler, in the order of the rows, each id once."""
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

    def _store(self, handler: Handler, arrivals: dict[str, Arrival]) -> Steps[None]:
        inbox, consumer = self._app.store, handler.consumer
        fresh = yield from inbox.store(consumer, list(arrivals.values()), token=self._token)
        self._stored += [
            (consumer, arrivals[message_id]) for message_id in arrivals if message_id in fresh
        ]
        known = yield from inbox.classify(
            consumer, [message_id for message_id in arrivals if message_id not in fresh]
        )
        for message_id, row in known.items():
            if row.differs(arrivals[message_id].hash):
                self._set_aside.append(
                    (consumer, arrivals[message_id].message, message_id, _OTHER_PAYLOAD)
                )

    def _quarantine(
        self, consumer: str, message: Message[Any], own_id: str, reason: str
    ) -> Statement:
        return self._app.store.quarantine(
            consumer,
            presentable(message),
            message_id=own_id,
            hashed=hashlib.sha256(message.payload or b"").digest(),
            reason=reason,
            payload_limit=self._app.limits.quarantined_bytes,
        )

    def _report(self) -> None:
        events = self._app.events
        for consumer, message, own_id, reason in self._set_aside:
            events.emit(
                MessageQuarantined(
                    consumer=consumer, message_id=own_id, topic=message.topic, reason=reason
                )
            )
        for consumer, arrival in self._stored:
            events.emit(
                MessageStored(
                    consumer=consumer, message_id=arrival.message_id, topic=arrival.message.topic
                )
            )
