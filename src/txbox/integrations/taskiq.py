"""taskiq: run the body of a task once per id, in a transaction of yours.

taskiq acknowledges when the result is saved, or earlier (`--ack-type`); brokers that redeliver run the tasks of a dead
worker again. A retry keeps the task's id and runs, because a failed body rolls its row back. A copy returns what the
first run returned, so that a caller goes on waiting to the end whose worker was killed behind the commit.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import timedelta
from inspect import Parameter
from typing import Any, TypeVar, cast, get_type_hints

from pydantic import PydanticUserError, TypeAdapter
from pydantic_core import to_json
from taskiq import Context, TaskiqDepends
from taskiq.exceptions import NoResultError

from txbox.inbox import Inbox
from txbox.integrations.once import BeginAsync, Body

R = TypeVar("R")
_CONTEXT = "txbox_context"
_REQUEUED = "X-Taskiq-requeue"


def once(
    inbox: Inbox,
    transaction: BeginAsync,
    *,
    id: Callable[..., str | int] | None = None,  # noqa: A002  # the word of the field
    timeout: timedelta | None = None,
    keep_result: bool = True,
) -> Callable[[Callable[..., Awaitable[R]]], Callable[..., Awaitable[R]]]:
    """Run a task's body once per id: `@broker.task` on top, then this, then an `async def` function.

    The function's first argument is the transaction's connection or session, which callers do not pass.

    Args:
        inbox: one for each task, because its consumer is part of the key.
        transaction: begins and ends, as `async_engine.begin` and `async_sessionmaker.begin` do.
        id: from the task's arguments; without it, the task's own id, which a sender chooses with
            `task.kicker().with_task_id(…)`.
        timeout: the longest wait for another worker with the same id.
        keep_result: keep what the body returns in the row, as JSON, for copies to return. The task's annotation says
            what the JSON is read back as; without one a copy returns JSON's own types.

    A body that ends by `raise NoResultError` is done: what it wrote is committed. One that ends by `Context.requeue` is
    not. What taskiq injects is not compared.

    Raises, in the worker:
        NoResultError: the body did; the id is known with other arguments, which are quarantined; or the body has run
            before, and its result was not kept. taskiq acknowledges the task, and keeps the result of the first run.
        ConfigurationError: the result cannot be written as JSON; nothing is committed.
        MessageInProgress: the timeout passed.
        whatever the body raises: it is rolled back; SimpleRetryMiddleware tries again if asked to.

    Guarantee: the row and what the body wrote are one commit. With the default `--ack-type when_saved` the task is
    acknowledged after it.
    """

    def decorate(function: Callable[..., Awaitable[R]]) -> Callable[..., Awaitable[R]]:
        body = Body(
            function, inbox, id=id, timeout=timeout, is_async=True,
            encode=to_json if keep_result else None, decode=_returned(function).validate_json,
        )  # fmt: skip

        async def run(*args: Any, **kwargs: Any) -> R:
            context: Context | None = kwargs.pop(_CONTEXT, None)
            if context is None:
                answer = await body.call_async(transaction, None, args, kwargs)
            else:
                message = context.message
                requeued = message.labels.get(_REQUEUED)

                def done(error: Exception) -> bool:
                    # `Context.requeue` raises it as well, and has sent the task again under the same id
                    return (
                        isinstance(error, NoResultError)
                        and message.labels.get(_REQUEUED) == requeued
                    )

                answer = await body.call_async(
                    transaction, message.task_id, args, kwargs,
                    done=done, sent=(message.args, message.kwargs),
                )  # fmt: skip
            if not answer:
                raise NoResultError
            return cast("R", answer.result)

        body.update(run)
        # taskiq injects what a parameter's default says, and reads these two to find it
        context = Parameter(
            _CONTEXT, Parameter.KEYWORD_ONLY, default=TaskiqDepends(), annotation=Context
        )
        vars(run)["__signature__"] = body.signature.replace(
            parameters=[*body.signature.parameters.values(), context]
        )
        run.__annotations__ = {**run.__annotations__, _CONTEXT: Context}
        return run

    return decorate


def _returned(function: Callable[..., Any]) -> TypeAdapter[Any]:
    """How JSON is read back as what the function is annotated to return."""
    try:
        return TypeAdapter(get_type_hints(function, include_extras=True).get("return", Any))
    except (NameError, PydanticUserError):
        # a name that only a type checker knows, or a type that pydantic does not
        return TypeAdapter(Any)
