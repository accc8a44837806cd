"""Celery: run the body of a task once per id, in a transaction of yours.

Celery runs a task again when its worker dies (with `acks_late`), when it outlasts the visibility time-out of Redis or
SQS, and when it is sent twice. A retry keeps the task's id and runs, because a failed body rolls its row back. A copy
returns what the first run returned, so that a chain or chord goes on whose worker was killed behind the commit.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar, cast

from celery import current_task  # pyright: ignore[reportMissingTypeStubs]
from celery.exceptions import Ignore  # pyright: ignore[reportMissingTypeStubs]
from kombu.utils import json  # pyright: ignore[reportMissingTypeStubs]

from txbox.inbox import Inbox
from txbox.integrations.once import Begin, Body

R = TypeVar("R")


# Celery's own JSON, which brings dates, Decimals and UUIDs back as what they were; it has no types
_json: Any = json


def _encode(result: Any) -> bytes:
    text: str = _json.dumps(result)
    return text.encode()


def once(
    inbox: Inbox,
    transaction: Begin,
    *,
    id: Callable[..., str | int] | None = None,  # noqa: A002  # the word of the field
    timeout: timedelta | None = None,
    keep_result: bool = True,
) -> Callable[[Callable[..., R]], Callable[..., R]]:
    """Run a task's body once per id: `@app.task(acks_late=True)` on top, then this, then a `def` function.

    The function's first argument is the transaction's connection or session, which callers do not pass. Without
    `bind=True`: what it gives is `celery.current_task`.

    Args:
        inbox: one for each task, because its consumer is part of the key.
        transaction: begins and ends, as `engine.begin` and `sessionmaker.begin` do.
        id: from the task's arguments; without it, the task's own id, which a sender chooses with
            `apply_async(task_id=…)`.
        timeout: the longest wait for another worker with the same id.
        keep_result: keep what the body returns in the row, as Celery's JSON, for copies to return.

    Raises, in the worker:
        Ignore: the id is known with other arguments, which are quarantined; or the body has run before and its result
            was not kept. Celery acknowledges the task, and keeps the state and result of the first run.
        ConfigurationError: the result is not JSON; nothing is committed.
        MessageInProgress: the timeout passed.
        whatever the body raises: it is rolled back, and `autoretry_for` or `acks_late` say what is next.

    Guarantee: the row and what the body wrote are one commit. With `acks_late=True, reject_on_worker_lost=True` the
    task is acknowledged after it; without them, a task whose worker dies is lost.
    """

    def decorate(function: Callable[..., R]) -> Callable[..., R]:
        encode = _encode if keep_result else None
        body = Body(function, inbox, id=id, timeout=timeout, encode=encode, decode=_json.loads)

        def run(*args: Any, **kwargs: Any) -> R:
            task: Any = current_task
            done = body(transaction, task.request.id if task else None, args, kwargs)
            if not done:
                raise Ignore
            return cast("R", done.result)

        body.update(run)
        return run

    return decorate
