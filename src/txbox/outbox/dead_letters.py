"""Dead letters: what is staged about a message that is given up."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import Any

from txbox.errors import UnusableMessage
from txbox.handlers import Handlers, Run
from txbox.identity import derived_id
from txbox.message import HeaderValue, Message
from txbox.outbox import Outbox, Outgoing
from txbox.outbox.routes import LOCAL
from txbox.session import Transaction
from txbox.store.dialect import Dialect

# below the ordinals of anything a handler stages, so that each death of a message gets its own id
_DEATH = -2
# these identify the dead message, not the letter about it
_IDENTITY = ("message-id", "ce_id", "ce-id", "cloudevents:id", "cloudevents_id")


def letter_id(consumer: str, message_id: str, death: int) -> str:
    """Return the id of the letter about a death of a message: that of its row in txbox_attempt.

    Not its attempts: a redrive counts them anew, and a second letter under the first one's id would be a duplicate.
    """
    return derived_id(consumer, message_id, _DEATH - death)


class DeadLetters:
    """Stages dead letters for handlers with `dead_letter_topic=`.

    Guarantee: the letter is staged in the transaction that makes the row dead, or not at all.
    """

    def __init__(self, handlers: Handlers, outbox: Outbox) -> None:
        self._handlers = handlers
        self._outbox = outbox

    async def staged(
        self,
        db: Transaction,
        dialect: Dialect,
        consumer: str,
        message: Message[Any],
        *,
        attempts: int,
        error_type: str,
    ) -> None:
        """Stage the letter of a message whose last attempt has just been recorded, in the same transaction.

        The letter has the message's payload, key, type and headers, plus headers that say who gave it up.
        """
        handlers = self._handlers.matching(message.topic, message.type, consumer)
        topic = handlers[0].options.dead_letter_topic if handlers else None
        if topic is None:
            return
        headers = _letter_headers(message, consumer, attempts, error_type)
        letter = Outgoing(
            topic=topic,
            # a tombstone becomes an empty letter
            body=message.payload or b"",
            type=message.type,
            key=message.key,
            content_type=message.content_type,
            headers=headers,
        )
        named = {"consumer": consumer, "message_id": str(message.id)}
        ((death,),) = (await db.execute(dialect.statement("last_death", named))).rows
        with Run(consumer, (message,), first=_DEATH - death):
            try:
                await self._outbox.staging(db, dialect, [letter], otherwise=LOCAL)
            except UnusableMessage as error:
                # the codec fails on it, or it has what cannot be staged: what can be said is said
                empty = replace(
                    letter, body=b"", type=None, key=None, content_type=None,
                    headers=[*headers[-_LETTER_HEADERS:], ("dead-letter-content", str(error))],
                )  # fmt: skip
                with suppress(UnusableMessage):
                    await self._outbox.staging(db, dialect, [empty], otherwise=LOCAL)


# how many _letter_headers adds
_LETTER_HEADERS = 5


def _letter_headers(
    message: Message[Any], consumer: str, attempts: int, error_type: str
) -> list[tuple[str, HeaderValue]]:
    kept = [(name, value) for name, value in message.headers if name.lower() not in _IDENTITY]
    return [
        *kept,
        ("dead-letter-message-id", str(message.id)),
        ("dead-letter-topic", message.topic),
        ("dead-letter-consumer", consumer),
        ("dead-letter-attempts", str(attempts)),
        # not the error text: it may contain what the codec hides
        ("dead-letter-error-type", error_type),
    ]
