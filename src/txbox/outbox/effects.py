"""Effects: external calls (mail, HTTP, payments) after commit, at least once, under a stable key.

An effect is an inbox row of a consumer of its own, staged in the caller's transaction. Leases, retries,
dead letters and the operator's commands work as for any message.

Source: docs/decisions/0018-effects-are-rows.md
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from txbox.connections import borrow
from txbox.errors import ConfigurationError, check_duration
from txbox.handlers import Handler, Handlers
from txbox.handlers.body import as_json
from txbox.identity import EFFECT_PREFIX
from txbox.message import HeaderPairs, Headers, Message
from txbox.outbox import cause_of, id_of, passed_on, with_passed_on
from txbox.policy import Limits
from txbox.session import Transaction, async_of, run, run_async
from txbox.store.codec import Arrival, Columns
from txbox.store.dialect import Dialect
from txbox.store.inbox import InboxStore

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
        #: Called when an effect was staged in this process, before its commit, with its consumer and delay in seconds.
        self.staged: Callable[[str, float], None] | None = None

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
        """Write an effect into your transaction, to be carried out after the commit; returns its id.

        Args:
            tx: your connection or session, inside a transaction.
            name: as registered with `@app.effect(name)`.
            body: what the function gets as `message.body`; it is encoded as JSON.
            delay: carry it out no earlier than this.
            cause: the message this effect follows from; required in a batch handler.

        Raises:
            ConfigurationError: no effect has this name.

        Guarantee: carried out at least once if, and only if, your transaction commits. Every attempt
        carries the same `message.idempotency_key`, even when your handler runs again.
        """
        executor = borrow(tx, schema=self._schema)
        return run(
            executor, self._staged, executor.dialect, name, body,
            key=key, headers=headers, delay=delay, cause=cause,
        )  # fmt: skip

    @async_of(stage)
    async def stage_async(self, tx: Any, *args: Any, **kwargs: Any) -> str:
        """`stage` for async connections and sessions."""
        executor = borrow(tx, is_async=True, schema=self._schema)
        return await run_async(executor, self._staged, executor.dialect, *args, **kwargs)

    async def _staged(
        self,
        db: Transaction,
        dialect: Dialect,
        name: str,
        body: Body,
        *,
        key: str | None = None,
        headers: HeaderPairs = (),
        delay: timedelta | None = None,
        cause: Message[Any] | None = None,
    ) -> str:
        handler = self._handler(name)
        check_duration("delay", delay)
        run_of, causes = cause_of(cause)
        effect_id = id_of(run_of, causes)
        message: Message[Any] = Message(
            topic=handler.topic,
            id=effect_id,
            key=key,
            payload=as_json(body),
            content_type="application/json",
            headers=with_passed_on(Headers(headers), passed_on(causes)),
        )
        arrival: Arrival = handler.arrival(message, self._limits)
        delay_s = delay.total_seconds() if delay else 0.0
        await db.send(
            InboxStore(dialect, self._columns).storing(
                handler.consumer,
                [arrival],
                token=secrets.token_hex(16),
                delay_s=delay_s,
            )
        )
        if self.staged is not None:
            self.staged(handler.consumer, delay_s)
        return effect_id

    def _handler(self, name: str) -> Handler:
        handlers = self._handlers.matching(EFFECT_PREFIX + name, None)
        if not handlers:
            raise ConfigurationError(
                f"There is no effect {name!r}: register a function with @app.effect({name!r})."
            )
        return handlers[0]
