"""Replies: what a handler returns, staged for the topic on which its sender waits.

Source: https://www.enterpriseintegrationpatterns.com/patterns/messaging/ReturnAddress.html
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable
from typing import Any, TypeVar

from txbox.handlers import HandlerOptions, Run, is_async_function
from txbox.message import Message
from txbox.outbox import Outbox, Outgoing, cause_of, encoded

F = TypeVar("F", bound=Callable[..., Any])

# beyond any ordinal the handler itself can reach, so the reply's id does not depend on what else was staged
_REPLY = 1 << 64


def replying(function: F, options: HandlerOptions, outbox: Outbox) -> F:
    """Wrap a handler so that its return value is staged as a reply; None means no reply.

    Guarantee: two replies to one message have the same id if, and only if, their content is the same.
    """
    if options.reply_to is None:
        return function

    def call(message: Message[Any], tx: Any) -> Any:
        answer = function(message, tx)
        reply = _reply(message, answer, options)
        if reply is not None:
            with _caused_by(message, reply):
                outbox.stage_many(tx, [reply])
        return answer

    async def call_async(message: Message[Any], tx: Any) -> Any:
        answer = await function(message, tx)
        reply = _reply(message, answer, options)
        if reply is not None:
            with _caused_by(message, reply):
                await outbox.stage_many_async(tx, [reply])
        return answer

    wrapped: Any = functools.wraps(function)(call_async if is_async_function(function) else call)
    handler: F = wrapped
    return handler


def _caused_by(message: Message[Any], reply: Outgoing) -> Run:
    payload, _ = encoded(reply)
    digest = hashlib.sha256(payload).digest()
    return Run(message.consumer or "", (message,), first=_REPLY + int.from_bytes(digest[:8]))


def _reply(message: Message[Any], answer: Any, options: HandlerOptions) -> Outgoing | None:
    run, _ = cause_of(None)
    if run is not None and run.replied is not None:
        # a replay sends the same reply as before
        answer = json.loads(run.replied)
    if answer is None:
        return None
    topic = message.headers.text("reply-to") if options.reply_to is True else options.reply_to
    if not topic:
        return None
    headers: tuple[tuple[str, str], ...] = ()
    if message.headers.text("correlation-id") is None:
        # a requester without a correlation id knows its request by the message id
        headers = (("correlation-id", str(message.id)),)
    return Outgoing(
        topic=str(topic), body=answer, key=message.key, headers=headers, cause=message,
        content_type="application/json",
    )  # fmt: skip
