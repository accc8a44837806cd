"""The calls of a handler: for one message, or in batch mode for all; and what it returned, as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from txbox.body import as_json
from txbox.cause import Run
from txbox.handlers import Handler
from txbox.steps import Call, Invoke, Steps
from txbox.store.codec import Arrival


def handled(
    handler: Handler, arrivals: Sequence[Arrival], called: list[str] | None = None
) -> Steps[list[Any]]:
    """Call the handler: once for all in batch mode, else for each message in its order.

    Args:
        called: gets the id of each message that it is called for.

    Returns: what it returned, as JSON where the handler keeps its results.
    """
    if handler.options.batch:
        calls = [call_of(handler, list(arrivals), called)]
    else:
        calls = [call_of(handler, arrival, called) for arrival in arrivals]
    answers: list[Any] = yield Invoke(calls, timeout_s(handler))
    return answers


def timeout_s(handler: Handler) -> float | None:
    timeout = handler.options.timeout
    return timeout.total_seconds() if timeout else None


def call_of(
    handler: Handler, work: Arrival | list[Arrival], called: list[str] | None = None
) -> Call:
    """The handler's call: bodies are decoded inside, so that a bad one is this message's failure."""
    # one object a message: closures would be ten for the garbage collector to visit
    return partial(_call_async if handler.is_async else _call, handler, work, called)


def _call(
    handler: Handler, work: Arrival | list[Arrival], called: list[str] | None, tx: Any
) -> bytes | None:
    run, given = _bound(handler, work, called)
    with run:
        answer = (
            handler.function(given, tx)
            if handler.options.transactional
            else handler.function(given)
        )
    # written inside of the call: what JSON cannot hold is the handler's failure
    return _kept(answer, run) if handler.options.keep_result else None


async def _call_async(
    handler: Handler, work: Arrival | list[Arrival], called: list[str] | None, tx: Any
) -> bytes | None:
    run, given = _bound(handler, work, called)
    with run:
        answer = await (
            handler.function(given, tx)
            if handler.options.transactional
            else handler.function(given)
        )
    return _kept(answer, run) if handler.options.keep_result else None


def _bound(
    handler: Handler, work: Arrival | list[Arrival], called: list[str] | None
) -> tuple[Run, Any]:
    if isinstance(work, list):
        if called is not None:
            called += [arrival.message_id for arrival in work]
        messages = [handler.bound(arrival) for arrival in work]
        return Run(handler.consumer, messages), messages
    if called is not None:
        called.append(work.message_id)
    message = handler.bound(work)
    return Run(handler.consumer, (message,), replied=work.replied), message


def _kept(value: Any, run: Run) -> bytes:
    if run.replied is not None:
        # the reply has left: what is kept stays what was replied
        return run.replied
    return as_json(value)
