"""Celery: the body of a task once for each id, in a transaction of yours.

Celery runs a task again when a worker dies (with `acks_late`), when the visibility time-out of Redis or SQS runs out
before the task does, and when its sender sends it twice. Its retries keep the task's id: a failed body rolls its
row back, so a retry runs.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

from celery import current_task  # pyright: ignore[reportMissingTypeStubs]
from celery.exceptions import Ignore  # pyright: ignore[reportMissingTypeStubs]

from txbox.inbox import Inbox
from txbox.integrations.once import Begin, Body

R = TypeVar("R")


def once(
    inbox: Inbox,
    transaction: Begin,
    *,
    id: Callable[..., str | int] | None = None,  # noqa: A002  # the word of the field
    timeout: timedelta | None = None,
) -> Callable[[Callable[..., R]], Callable[..., R]]:
    """Run a task's body once for each id: `@app.task(acks_late=True)` on top, then this, then the function.

    The function's first argument is the transaction's connection or session, which callers do not pass. Without
    `bind=True`: what it gives is `celery.current_task`.

    Args:
        inbox: one for each task, because its consumer is part of the key.
        transaction: begins and ends, as `engine.begin` and `sessionmaker.begin` do.
        id: from the task's arguments; without it, the task's own id, which a sender chooses with
            `apply_async(task_id=…)`.
        timeout: the longest wait for another worker with the same id.

    Raises, in the worker:
        Ignore: the body has run before, or the id is known with other arguments, which are quarantined. Celery
            acknowledges the task, and keeps the state and result of the first run.
        MessageInProgress: the timeout passed.
        whatever the body raises: it is rolled back, and `autoretry_for` or `acks_late` say what is next.

    Guarantee: the row and what the body wrote are one commit. With `acks_late=True, reject_on_worker_lost=True` the
    task is acknowledged after it; without them, a task whose worker dies is lost.
    """

    def decorate(function: Callable[..., R]) -> Callable[..., R]:
        body = Body(function, inbox, id=id, timeout=timeout)

        def run(*args: Any, **kwargs: Any) -> R:
            task: Any = current_task
            answer = body(transaction, task.request.id if task else None, args, kwargs)
            if not answer:
                raise Ignore
            result: R = answer.result
            return result

        body.lend(run)
        return run

    return decorate
