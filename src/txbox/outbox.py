"""The first door, outgoing: `Outbox.stage` inside the caller's own transaction."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from txbox.connections import borrow, borrow_async
from txbox.errors import ConfigurationError
from txbox.identity import checked_text, time_ordered_id
from txbox.message import HeaderPairs, Headers
from txbox.steps import Steps, run, run_async
from txbox.store.codec import Codec, Columns, encode_headers
from txbox.store.dialect import Dialect

Body = bytes | str | dict[str, Any] | list[Any] | int | float | bool | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Outgoing:
    """A message to be sent, for `Outbox.stage_many`; the arguments are those of `Outbox.stage`."""

    topic: str
    body: Body
    type: str | None = None
    key: str | None = None
    headers: HeaderPairs = ()
    content_type: str | None = None
    delay: timedelta | None = None


class Outbox:
    """Stages outgoing messages, so that they leave if, and only if, your transaction commits.

    Args:
        schema: the PostgreSQL schema of the tables, if they are not on the search path.
        codec: as given to App(codec=…).
    """

    def __init__(self, *, schema: str | None = None, codec: Codec | None = None) -> None:
        self._schema = schema
        self._columns = Columns(codec)

    def stage(
        self,
        tx: Any,
        topic: str,
        body: Body,
        *,
        type: str | None = None,  # noqa: A002  # the word of the field
        key: str | None = None,
        headers: HeaderPairs = (),
        content_type: str | None = None,
        delay: timedelta | None = None,
    ) -> str:
        """Write an outgoing message into the outbox in your transaction; returns its id.

        Args:
            tx: your connection or session, inside a transaction.
            body: bytes as they are; anything else becomes JSON.
            delay: do not send before this much later.

        Raises:
            UnusableMessage: a topic, type or key that no database can keep.

        Guarantee: the row commits or rolls back with your writes.
        """
        message = Outgoing(
            topic=topic, body=body, type=type, key=key, headers=headers,
            content_type=content_type, delay=delay,
        )  # fmt: skip
        return self.stage_many(tx, [message])[0]

    async def stage_async(
        self,
        tx: Any,
        topic: str,
        body: Body,
        *,
        type: str | None = None,  # noqa: A002
        key: str | None = None,
        headers: HeaderPairs = (),
        content_type: str | None = None,
        delay: timedelta | None = None,
    ) -> str:
        """The twin of `stage` for async connections and sessions."""
        message = Outgoing(
            topic=topic, body=body, type=type, key=key, headers=headers,
            content_type=content_type, delay=delay,
        )  # fmt: skip
        return (await self.stage_many_async(tx, [message]))[0]

    def stage_many(self, tx: Any, messages: Sequence[Outgoing]) -> list[str]:
        """As `stage` for many messages, in one statement and in their order."""
        executor = borrow(tx, schema=self._schema)
        return run(executor, self._staged(executor.dialect, messages))

    async def stage_many_async(self, tx: Any, messages: Sequence[Outgoing]) -> list[str]:
        """The twin of `stage_many` for async connections and sessions."""
        executor = borrow_async(tx, schema=self._schema)
        return await run_async(executor, self._staged(executor.dialect, messages))

    def _staged(self, own: Dialect, messages: Sequence[Outgoing]) -> Steps[list[str]]:
        if not messages:
            return []
        ids = [time_ordered_id() for _ in messages]
        bodies = [_encoded(message) for message in messages]
        yield own.statement(
            "stage",
            {"key_id": self._columns.key_id},
            {
                "id": ids,
                "topic": list(_checked(messages, "topic")),
                "type": list(_checked(messages, "type")),
                "key": list(_checked(messages, "key")),
                "content_type": [kind for _, kind in bodies],
                "headers": [encode_headers(Headers(message.headers)) for message in messages],
                "payload": [self._columns.payload(payload) for payload, _ in bodies],
                "delay_s": [
                    message.delay.total_seconds() if message.delay else 0.0 for message in messages
                ],
            },
        )
        return ids


def _checked(messages: Sequence[Outgoing], field: str) -> Iterable[str | None]:
    for message in messages:
        value: str | None = getattr(message, field)
        if value is not None:
            checked_text(value, field)
        elif field == "topic":
            raise ConfigurationError("An outgoing message needs a topic.")
        yield value


def _encoded(message: Outgoing) -> tuple[bytes, str | None]:
    if isinstance(message.body, bytes):
        return message.body, message.content_type
    text = json.dumps(message.body, separators=(",", ":"))
    return text.encode(), message.content_type or "application/json"
