"""From raw messages to settled outcomes: identity, quarantine, folded copies, and the mode of the handler."""

from __future__ import annotations

import dataclasses
import hashlib
import secrets
from collections.abc import Sequence
from typing import Any

from txbox.errors import UnusableMessage
from txbox.events import MessageDuplicate, MessageStored
from txbox.failure import printable
from txbox.handlers import Handler
from txbox.message import Message
from txbox.outcome import Outcome
from txbox.protocol import InboxProtocol, Settled
from txbox.steps import Begin, Commit, Steps
from txbox.store.codec import Arrival


class Intake:
    """Takes deliveries of one app in, whatever their handler's mode."""

    def __init__(self, protocol: InboxProtocol) -> None:
        self._protocol = protocol

    def take(
        self, handler: Handler, messages: Sequence[Message[Any]], *, suspect: bool = False
    ) -> Steps[list[Settled]]:
        """Bring messages to an outcome each, in their order.

        Copies of one id share the first one's fate; a copy with another payload is quarantined.

        Args:
            suspect: an earlier delivery may have killed its worker: count the start before the run,
                so that a message which kills every process ends as a dead letter (SEMANTICS 4.4).

        Guarantee: an outcome that settles is on disk: as a finished row, a stored payload or a
        quarantine row.
        """
        if len(messages) == 1:
            return [(yield from self._take_one(handler, messages[0], suspect))]
        known: dict[str, Arrival] = {}
        ids: list[str | None] = []
        settled: list[Settled | None] = []
        for message in messages:
            try:
                arrival = handler.arrival(message, self._protocol.limits)
            except UnusableMessage as error:
                yield from self._quarantined(handler.consumer, message, "", str(error))
                ids.append(None)
                settled.append(Settled(Outcome.QUARANTINED))
                continue
            first = known.setdefault(arrival.message_id, arrival)
            if first.hash != arrival.hash and None not in (first.hash, arrival.hash):
                yield from self._quarantined(
                    handler.consumer, message, arrival.message_id,
                    "Two payloads came under one id in one batch: the producer reuses ids, or a message was altered.",
                )  # fmt: skip
                ids.append(None)
                settled.append(Settled(Outcome.QUARANTINED))
                continue
            ids.append(arrival.message_id)
            settled.append(None)
        answers = yield from self._run(handler, list(known.values()), suspect)
        seen: set[str] = set()
        outcomes: list[Settled] = []
        for own, done in zip(ids, settled, strict=True):
            if done is not None or own is None:
                outcomes.append(done or Settled(Outcome.QUARANTINED))
                continue
            answer = answers[own]
            if own in seen and answer.outcome is Outcome.PROCESSED:
                answer = Settled(Outcome.DUPLICATE)
                if self._protocol.events:
                    self._protocol.events.emit(
                        MessageDuplicate(
                            consumer=handler.consumer, message_id=own, topic=handler.topic
                        )
                    )
            seen.add(own)
            outcomes.append(answer)
        return outcomes

    def _take_one(self, handler: Handler, message: Message[Any], suspect: bool) -> Steps[Settled]:
        try:
            arrival = handler.arrival(message, self._protocol.limits)
        except UnusableMessage as error:
            yield from self._quarantined(handler.consumer, message, "", str(error))
            return Settled(Outcome.QUARANTINED)
        return (yield from self._run(handler, [arrival], suspect))[arrival.message_id]

    def _run(
        self, handler: Handler, arrivals: list[Arrival], suspect: bool
    ) -> Steps[dict[str, Settled]]:
        if not arrivals:
            return {}
        if handler.options.mode == "stored":
            return (yield from self.store(handler, arrivals))
        if handler.options.transactional and not suspect:
            return (yield from self._protocol.deliver(handler, arrivals))
        return (yield from self._run_leased(handler, arrivals))

    def store(self, handler: Handler, arrivals: Sequence[Arrival]) -> Steps[dict[str, Settled]]:
        """Store messages as pending, to be processed from the table; returns DEFERRED for new ones."""
        protocol, consumer = self._protocol, handler.consumer
        ordered = sorted(arrivals, key=lambda arrival: arrival.message_id.encode())
        token = secrets.token_hex(16)
        settled: dict[str, Settled] = {}
        while True:
            yield Begin()
            fresh = yield from protocol.store.store(consumer, ordered, token=token)
            rows = yield from protocol.store.classify(
                consumer, [own.message_id for own in ordered if own.message_id not in fresh]
            )
            yield Commit()
            gone: list[Arrival] = []
            for arrival in ordered:
                if arrival.message_id in fresh:
                    settled[arrival.message_id] = Settled(Outcome.DEFERRED)
                    if protocol.events:
                        protocol.events.emit(
                            MessageStored(
                                consumer=consumer,
                                message_id=arrival.message_id,
                                topic=arrival.message.topic,
                            )
                        )
                elif arrival.message_id in rows:
                    settled[arrival.message_id] = yield from protocol.met(
                        handler, arrival, rows[arrival.message_id]
                    )
                else:
                    gone.append(arrival)
            if not gone:
                return settled
            # pruned between the two statements: store again
            ordered = gone

    def _run_leased(
        self, handler: Handler, arrivals: Sequence[Arrival]
    ) -> Steps[dict[str, Settled]]:
        """Store, lease and run at once, for work that must be counted, or be one worker's, before it begins."""
        protocol = self._protocol
        settled = yield from self.store(handler, arrivals)
        for arrival in arrivals:
            if settled[arrival.message_id].outcome is not Outcome.DEFERRED:
                continue
            token = secrets.token_hex(16)
            leased = yield from protocol.store.lease_one(
                handler.consumer, arrival.message_id, token=token, lease=protocol.lease
            )
            if leased is not None:
                settled[arrival.message_id] = yield from protocol.run_leased(handler, leased, token)
        return settled

    def _quarantined(
        self, consumer: str, message: Message[Any], message_id: str, reason: str
    ) -> Steps[None]:
        yield from self._protocol.quarantine(
            consumer,
            presentable(message),
            message_id,
            hashlib.sha256(message.payload or b"").digest(),
            reason,
        )

    def unmatched(self, message: Message[Any], reason: str) -> Steps[None]:
        """Keep a message that no handler consumes, under no consumer's name."""
        yield from self._quarantined("", message, _shown_id(message), reason)


def presentable(message: Message[Any]) -> Message[Any]:
    """The message with every text fit for a column: what a database cannot keep is escaped."""
    return dataclasses.replace(
        message,
        topic=printable(str(message.topic), 1024),
        type=None if message.type is None else printable(str(message.type), 1024),
        key=None if message.key is None else printable(str(message.key), 1024),
        content_type=None
        if message.content_type is None
        else printable(str(message.content_type), 1024),
    )


def _shown_id(message: Message[Any]) -> str:
    return "" if message.id is None else printable(str(message.id), 255)
