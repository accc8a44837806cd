"""Dramatiq: run the body of an actor once per id, in a transaction of yours.

Dramatiq acknowledges after the actor has ended, so messages of a worker that dies, or is slower than its heartbeat, run
again. A retry keeps the message's id and runs, because a failed body rolls its row back.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar, cast

from dramatiq.middleware import CurrentMessage

from txbox.inbox import Inbox
from txbox.integrations.once import Begin, Body

R = TypeVar("R")


def once(
    inbox: Inbox,
    transaction: Begin,
    *,
    id: Callable[..., str | int] | None = None,  # noqa: A002  # the word of the field
    timeout: timedelta | None = None,
) -> Callable[[Callable[..., R]], Callable[..., R | None]]:
    """Run an actor's body once per id: `@dramatiq.actor` on top, then this, then a `def` function.

    The function's first argument is the transaction's connection or session, which callers do not pass.

    Args:
        inbox: one for each actor, because its consumer is part of the key.
        transaction: begins and ends, as `engine.begin` and `sessionmaker.begin` do.
        id: from the actor's arguments; without it, the message's own id, which needs the middleware
            `CurrentMessage()` on the broker.
        timeout: the longest wait for another worker with the same id.

    Returns, in the worker: None when the body has run before, or when the id is known with other arguments, which are
    quarantined. With the middleware Results, that is what a duplicate stores.

    Raises, in the worker:
        ConfigurationError: there is no id.
        MessageInProgress: the timeout passed; Retries tries again.
        whatever the body raises: it is rolled back, and Retries tries again.

    Guarantee: the row and what the body wrote are one commit, and the message is acknowledged after it.
    """

    def decorate(function: Callable[..., R]) -> Callable[..., R | None]:
        body = Body(function, inbox, id=id, timeout=timeout)

        def run(*args: Any, **kwargs: Any) -> R | None:
            message = CurrentMessage.get_current_message()
            given = None if message is None else message.message_id
            return cast("R | None", body(transaction, given, args, kwargs).result)

        body.update(run)
        return run

    return decorate
