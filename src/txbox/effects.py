"""Effects: external calls (mail, HTTP, payment) after commit, at least once, under a stable key.

An effect is an inbox row of a consumer of its own, staged in the caller's transaction: leases,
retries, dead letters and the operator's commands are those of every message.

Source: docs/decisions/0018-effects-are-rows.md
"""

from __future__ import annotations

import secrets
from datetime import timedelta
from typing import Any

from txbox.body import as_json
from txbox.connections import borrow, borrow_async
from txbox.drive import run, run_async
from txbox.errors import ConfigurationError
from txbox.handlers import Handler, Handlers
from txbox.identity import time_ordered_id
from txbox.message import HeaderPairs, Headers, Message
from txbox.outbox import cause_of, passed_on
from txbox.policy import Limits, check_duration
from txbox.steps import Steps
from txbox.store.codec import Arrival, Columns
from txbox.store.dialect import Dialect
from txbox.store.inbox import InboxStore

#: The consumer and the topic of an effect are its name behind this.
PREFIX = "effect:"

Body = dict[str, Any] | list[Any] | str | int | float | bool | None


class Effects:
    """Stages the effects of one app: `app.effects.stage(tx, "send-invoice", {…})`."""

    def __init__(
        self,
        handlers: Handlers,
        limits: Limits,
        *,
        schema: str | None,
        columns: Columns,
    ) -> None:
        self._handlers = handlers
        self._limits = limits
        self._schema = schema
        self._columns = columns

    def stage(
        self,
        tx: Any,
        name: str,
        body: Body,
        *,
        key: str | None = None,
        headers: HeaderPairs = (),
        delay: timedelta | None = None,
        cause: Message[Any] | None = None,
    ) -> str:
        """Write an effect into your transaction, to be carried out after its commit; returns its id.

        Args:
            tx: your connection or session, inside a transaction.
            name: as registered by `@app.effect(name)`.
            body: what the function gets as `message.body`; it becomes JSON.
            delay: not before this much later.
            cause: the message that this one follows from; a batch handler must say.

        Raises:
            ConfigurationError: there is no such effect.

        Guarantee: carried out at least once if, and only if, your transaction commits; every attempt
        carries the same `message.idempotency_key`, also when your handler is run again.
        """
        executor = borrow(tx, schema=self._schema)
        steps = self._staged(
            executor.dialect, name, body, key=key, headers=headers, delay=delay, cause=cause
        )
        return run(executor, steps)

    async def stage_async(
        self,
        tx: Any,
        name: str,
        body: Body,
        *,
        key: str | None = None,
        headers: HeaderPairs = (),
        delay: timedelta | None = None,
        cause: Message[Any] | None = None,
    ) -> str:
        """The twin of `stage` for async connections and sessions."""
        executor = borrow_async(tx, schema=self._schema)
        steps = self._staged(
            executor.dialect, name, body, key=key, headers=headers, delay=delay, cause=cause
        )
        return await run_async(executor, steps)

    def _staged(
        self,
        dialect: Dialect,
        name: str,
        body: Body,
        *,
        key: str | None,
        headers: HeaderPairs,
        delay: timedelta | None,
        cause: Message[Any] | None,
    ) -> Steps[str]:
        handler = self._handler(name)
        check_duration("delay", delay)
        own_run, found = cause_of(cause)
        own_id = time_ordered_id() if own_run is None or found is None else own_run.next_id(found)
        given = Headers(headers)
        names = {own_name.lower() for own_name in given.names()}
        message: Message[Any] = Message(
            topic=handler.topic,
            id=own_id,
            key=key,
            payload=as_json(body),
            content_type="application/json",
            headers=(
                *given,
                *(
                    (own_name, value)
                    for own_name, value in passed_on(found).items()
                    if own_name not in names
                ),
            ),
        )
        arrival: Arrival = handler.arrival(message, self._limits)
        yield from InboxStore(dialect, self._columns).store(
            handler.consumer,
            [arrival],
            token=secrets.token_hex(16),
            delay_s=delay.total_seconds() if delay else 0.0,
        )
        return own_id

    def _handler(self, name: str) -> Handler:
        found = self._handlers.matching(PREFIX + name, None)
        if not found:
            raise ConfigurationError(
                f"There is no effect {name!r}: register a function with @app.effect({name!r})."
            )
        return found[0]
