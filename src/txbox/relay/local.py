"""Staged messages for this app's own consumers: pending inbox rows, in the transaction that marks them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from txbox.app import App
from txbox.errors import UnusableMessage
from txbox.events import MessageQuarantined, MessageStored, OutgoingDead
from txbox.handlers import Handler
from txbox.intake import presentable
from txbox.message import Message
from txbox.steps import Begin, Commit, Rollback, Statement, Steps
from txbox.store.codec import Arrival
from txbox.store.outbox import OutboxStore, Staged

_NOBODY = "No handler consumes this topic and type, and nobody publishes it."
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
        self._nobody: list[Staged] = []
        self._set_aside: list[tuple[str, Message[Any], str, str]] = []
        self._stored: list[tuple[str, Arrival]] = []

    def deliver(self, rows: Sequence[Staged]) -> Steps[int]:
        """Deliver rows in their order; returns how many reached a consumer, 0 when the lease was lost."""
        work = self._sorted(rows)
        yield Begin()
        for handler, arrivals in work.items():
            yield from self._store(handler, arrivals)
        for consumer, message, own_id, reason in self._set_aside:
            yield self._quarantine(consumer, message, own_id, reason)
        for row in self._nobody:
            yield self._outbox.failed(
                row,
                token=self._token,
                dead=True,
                delay_s=0.0,
                error_type="NoConsumer",
                error=_NOBODY,
            )
        lost = {row.id for row in self._nobody}
        reached = [row.id for row in rows if row.id not in lost]
        if reached:
            marked = yield self._outbox.sent(reached, token=self._token, keep=self._keep)
            if marked.count != len(reached):
                # another relay has taken some over: what this one wrote goes with it
                yield Rollback()
                return 0
        yield Commit()
        self._report()
        return len(reached)

    def _sorted(self, rows: Sequence[Staged]) -> dict[Handler, dict[str, Arrival]]:
        """The arrivals of each handler, in the order of the rows, each id once."""
        app = self._app
        work: dict[Handler, dict[str, Arrival]] = {}
        for row in rows:
            message = row.message
            found = app.handlers.matching(message.topic, message.type)
            if not found:
                self._nobody.append(row)
            for handler in found:
                try:
                    arrival = handler.arrival(message, app.limits)
                except UnusableMessage as error:
                    self._set_aside.append((handler.consumer, message, "", str(error)))
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
        self._stored += [(consumer, arrivals[own]) for own in arrivals if own in fresh]
        known = yield from inbox.classify(consumer, [own for own in arrivals if own not in fresh])
        for own, row in known.items():
            if row.differs(arrivals[own].hash):
                self._set_aside.append((consumer, arrivals[own].message, own, _OTHER_PAYLOAD))

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
        for row in self._nobody:
            events.emit(
                OutgoingDead(
                    message_id=row.id, topic=row.message.topic, publisher="local",
                    attempt=row.attempts + 1, error=_NOBODY,
                )
            )  # fmt: skip
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
