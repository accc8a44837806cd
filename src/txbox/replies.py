"""Replies: what a handler returns is staged in its own transaction, to the topic that the sender waits on.

Source: https://www.enterpriseintegrationpatterns.com/patterns/messaging/ReturnAddress.html
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from txbox.cause import Run
from txbox.handler_options import HandlerOptions
from txbox.handlers import Handler
from txbox.message import Message
from txbox.outbox import Outbox, Outgoing
from txbox.outcome import Outcome
from txbox.settled import Settled
from txbox.signature import is_async_function
from txbox.steps import Begin, Commit, Steps
from txbox.store.dialect import Dialect

F = TypeVar("F", bound=Callable[..., Any])

# no ordinal of anything that the handler itself stages: the reply's id does not depend on those
_REPLY = -1


def replying(function: F, options: HandlerOptions, outbox: Outbox) -> F:
    """Wrap a handler so that what it returns is staged as a reply; None is no reply."""
    if options.reply_to is None:
        return function

    def call(message: Message[Any], tx: Any) -> Any:
        answer = function(message, tx)
        reply = None if answer is None else _reply(message, answer, options)
        if reply is not None:
            with _caused_by(message):
                outbox.stage_many(tx, [reply])
        return answer

    async def call_async(message: Message[Any], tx: Any) -> Any:
        answer = await function(message, tx)
        reply = None if answer is None else _reply(message, answer, options)
        if reply is not None:
            with _caused_by(message):
                await outbox.stage_many_async(tx, [reply])
        return answer

    wrapped: Any = functools.wraps(function)(call_async if is_async_function(function) else call)
    own: F = wrapped
    return own


def replied_again(
    own: Dialect,
    outbox: Outbox,
    handler: Handler,
    messages: Sequence[Message[Any]],
    settled: Sequence[Settled],
) -> Steps[None]:
    """Stage the kept replies of duplicates once more, each under the id of the first one."""
    for message, answer in zip(messages, settled, strict=True):
        if answer.outcome is not Outcome.DUPLICATE or answer.result in (None, b"null"):
            continue
        known = replace(message, id=handler.id_of(message), consumer=handler.consumer)
        reply = _reply(known, answer.result, handler.options)
        if reply is None:
            continue
        yield Begin()
        with _caused_by(known):
            yield from outbox.staging(own, [reply])
        yield Commit()


def _caused_by(message: Message[Any]) -> Run:
    return Run(message.consumer or "", (message,), first=_REPLY)


def _reply(message: Message[Any], answer: Any, options: HandlerOptions) -> Outgoing | None:
    topic = message.headers.text("reply-to") if options.reply_to is True else options.reply_to
    if not topic:
        return None
    headers: tuple[tuple[str, str], ...] = ()
    if message.headers.text("correlation-id") is None:
        # a requester that named nothing else knows its request by its id
        headers = (("correlation-id", str(message.id)),)
    return Outgoing(
        topic=str(topic), body=answer, key=message.key, headers=headers, cause=message,
        content_type="application/json",
    )  # fmt: skip
