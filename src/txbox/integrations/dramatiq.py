"""Dramatiq: run the body of an actor once per id, in a transaction of yours.

Dramatiq acknowledges after the actor has ended, so messages of a worker that dies, or is slower than its heartbeat, run
again. A retry keeps the message's id and runs, because a failed body rolls its row back. A copy returns what the first
run returned, so that a pipeline goes on whose worker was killed behind the commit.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from datetime import timedelta
from typing import Any, TypeVar, cast

import dramatiq
from dramatiq.middleware import CurrentMessage, SkipMessage

from txbox.inbox import Inbox
from txbox.integrations.once import Begin, Body

R = TypeVar("R")

# the message that has run a body: an actor that calls others as functions has one id for them all, so that the second
# call would count as a copy of the first
_taken: ContextVar[Any] = ContextVar("txbox_dramatiq_taken", default=None)


def _encode(result: Any) -> bytes:
    # encoders take the dict of a message, or that of a result
    return dramatiq.get_encoder().encode({"result": result})


def _decode(kept: bytes) -> Any:
    return dramatiq.get_encoder().decode(kept)["result"]


def once(
    inbox: Inbox,
    transaction: Begin,
    *,
    id: Callable[..., str | int] | None = None,  # noqa: A002  # the word of the field
    timeout: timedelta | None = None,
    keep_result: bool = True,
) -> Callable[[Callable[..., R]], Callable[..., R]]:
    """Run an actor's body once per id: `@dramatiq.actor` on top, then this, then a `def` function.

    The function's first argument is the transaction's connection or session, which callers do not pass.

    Args:
        inbox: one for each actor, because its consumer is part of the key.
        transaction: begins and ends, as `engine.begin` and `sessionmaker.begin` do.
        id: from the actor's arguments; without it, the message's own id, which needs the middleware
            `CurrentMessage()` on the broker.
        timeout: the longest wait for another worker with the same id.
        keep_result: keep what the body returns in the row, by Dramatiq's encoder, for copies to return.

    A body that ends by `raise SkipMessage` is done: what it wrote is committed.

    Raises, in the worker:
        SkipMessage: the body did; the id is known with other arguments, which are quarantined; or the body has run
            before, and its result was not kept. Dramatiq acknowledges the message, and a pipeline does not go on.
        ConfigurationError: there is no id, or the result cannot be encoded; nothing is committed.
        MessageInProgress: the timeout passed; Retries tries again.
        whatever the body raises: it is rolled back, and Retries tries again.

    Guarantee: the row and what the body wrote are one commit, and the message is acknowledged after it.
    """

    def decorate(function: Callable[..., R]) -> Callable[..., R]:
        encode = _encode if keep_result else None
        body = Body(function, inbox, id=id, timeout=timeout, encode=encode, decode=_decode)

        def run(*args: Any, **kwargs: Any) -> R:
            message = CurrentMessage.get_current_message()
            delivery_id: str | None = None
            if message is not None and message is not _taken.get():
                _taken.set(message)
                delivery_id = message.message_id
            answer = body(transaction, delivery_id, args, kwargs, done=_ends)
            if not answer:
                raise SkipMessage
            return cast("R", answer.result)

        body.update(run)
        return run

    return decorate


def _ends(error: Exception) -> bool:
    return isinstance(error, SkipMessage)
