"""Celery: run the body of a task once per id, in a transaction of yours.

Celery runs a task again when its worker dies (with `acks_late`), when it outlasts the visibility time-out of Redis or
SQS, and when it is sent twice. A retry keeps the task's id and runs, because a failed body rolls its row back. A copy
returns what the first run returned, so that a chain or chord goes on whose worker was killed behind the commit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, TypeVar, cast
from uuid import UUID, uuid5

from celery import current_task  # pyright: ignore[reportMissingTypeStubs]
from celery.exceptions import Ignore  # pyright: ignore[reportMissingTypeStubs]
from kombu.utils import json  # pyright: ignore[reportMissingTypeStubs]

from txbox.errors import ConfigurationError
from txbox.inbox import Inbox
from txbox.integrations.once import Begin, Body

R = TypeVar("R")


# Celery's own JSON, which brings dates, Decimals and UUIDs back as what they were; it has no types
_json: Any = json
_FOLLOWS = UUID("5d3a8a0c-6f52-4a3c-9d1e-7b0c2f3f6e11")
#: Where a composed signature has its parts.
_PARTS = {"group": ("tasks",), "chain": ("tasks",), "chord": ("header", "body")}


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

    A body that ends by `raise Ignore()` or `self.replace(…)` is done: what it wrote is committed. Callbacks of the task
    (`link`, `link_error`) get ids that are the same at each delivery of it, so `once` recognises their copies too.

    Raises, in the worker:
        Ignore: the body did; the id is known with other arguments, which are quarantined; or the body has run before,
            and its result was not kept. Celery acknowledges the task, and keeps the state and result of the first run.
        ConfigurationError: the task is bound, has no id, or its result is not JSON; nothing is committed.
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
            delivery_id: str | None = None
            if task:
                if args and args[0] is task._get_current_object():  # noqa: SLF001
                    # copies would not be compared: a task is no JSON
                    raise ConfigurationError(
                        f"{body.name}: remove bind=True; celery.current_task is what it gives."
                    )
                delivery_id = _identify(task.request)
            answer = body(transaction, delivery_id, args, kwargs, done=_ends)
            if not answer:
                raise Ignore
            return cast("R", answer.result)

        body.update(run)
        return run

    return decorate


def _ends(error: Exception) -> bool:
    return isinstance(error, Ignore)


def _identify(request: Any) -> str | None:
    """The id of this delivery; what is called when it ends gets ids that follow from it.

    Celery makes up a new one for each callback whenever the task is delivered.
    """
    chosen: str | None = request.id
    if chosen is None:
        return None
    if request.replaced_task_nesting:
        # `self.replace` gives its own id to what replaces it, which may be the same task with other arguments
        chosen = f"{chosen}#replaced-{request.replaced_task_nesting}"
    for name, option in (("callbacks", "link"), ("errbacks", "link_error")):
        setattr(request, name, _following(getattr(request, name), f"{chosen}/{option}"))
    chord: Any = request.chord
    if chord and chord["options"].keys() >= {"task_id", "link_error"}:
        # this task of its header calls them when it fails
        options: dict[str, Any] = chord["options"]
        errbacks = _following(options["link_error"], f"{options['task_id']}/link_error")
        request.chord = {**chord, "options": {**options, "link_error": errbacks}}
    return chosen


def _following(signatures: Any, cause: str) -> Any:
    """Copies of signatures with an id each, also of what they are composed of."""
    if isinstance(signatures, list | tuple):
        return [
            _following(each, f"{cause}/{index}")
            for index, each in enumerate(cast("list[Any]", signatures))
        ]
    if not isinstance(signatures, Mapping):
        return signatures
    signature: dict[str, Any] = {**cast("Mapping[str, Any]", signatures)}
    signature["options"] = {"task_id": str(uuid5(_FOLLOWS, cause)), **signature["options"]}
    signature["kwargs"] = dict(signature["kwargs"])
    for part in _PARTS.get(signature.get("subtask_type") or "", ()):
        signature["kwargs"][part] = _following(signature["kwargs"][part], f"{cause}/{part}")
    return signature
