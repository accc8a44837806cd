"""Forwarding of dead letters: a copy goes to a topic of your choice, in the transaction that gives a message up."""

from __future__ import annotations

from typing import Any

from txbox.cause import Run
from txbox.handlers import Handlers
from txbox.message import HeaderValue, Message
from txbox.outbox import Outbox, Outgoing
from txbox.routes import LOCAL
from txbox.steps import Steps
from txbox.store.dialect import Dialect

# below the ordinals of whatever a handler stages: each death of a message has an id of its own
_DEATH = -2
# these name the dead message, not the letter about it
_IDENTITY = ("message-id", "ce_id", "ce-id", "cloudevents:id", "cloudevents_id")


class DeadLetters:
    """Stages dead letters of handlers with `dead_letter_topic=`.

    Guarantee: the letter is staged if, and only if, the row becomes dead: one transaction.
    """

    def __init__(self, handlers: Handlers, outbox: Outbox) -> None:
        self._handlers = handlers
        self._outbox = outbox

    def staged(
        self,
        dialect: Dialect,
        consumer: str,
        message: Message[Any],
        *,
        attempts: int,
        error_type: str,
    ) -> Steps[None]:
        """Stage the letter of a message that has just become dead; for a transaction that is open.

        It has the payload, key, type and headers of the message, and says in headers who gave it up.
        """
        found = self._handlers.matching(message.topic, message.type, consumer)
        topic = found[0].options.dead_letter_topic if found else None
        if topic is None:
            return
        letter = Outgoing(
            topic=topic,
            # a tombstone's letter is empty
            body=message.payload or b"",
            type=message.type,
            key=message.key,
            content_type=message.content_type,
            headers=_headers(message, consumer, attempts, error_type),
        )
        with Run(consumer, (message,), first=_DEATH - attempts):
            yield from self._outbox.staging(dialect, [letter], otherwise=LOCAL)


def _headers(
    message: Message[Any], consumer: str, attempts: int, error_type: str
) -> list[tuple[str, HeaderValue]]:
    kept = [(name, value) for name, value in message.headers if name.lower() not in _IDENTITY]
    return [
        *kept,
        ("dead-letter-message-id", str(message.id)),
        ("dead-letter-topic", message.topic),
        ("dead-letter-consumer", consumer),
        ("dead-letter-attempts", str(attempts)),
        # not the text: it may hold what the codec hides
        ("dead-letter-error-type", error_type),
    ]
