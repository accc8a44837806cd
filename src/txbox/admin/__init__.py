"""The operator's verbs, all of them audited where they change anything: `Admin` has those of look.py, changes.py,
canary.py, encrypt.py, replay.py and rehearsal.py."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Generator
from types import CoroutineType
from typing import Any, Concatenate, ParamSpec, TypeVar

from txbox.admin.canary import Canary
from txbox.admin.changes import Changed, ChangeOptions, Changes, Edited, MessageChanged
from txbox.admin.encrypt import Encrypted, Encryption
from txbox.admin.look import Queries
from txbox.admin.reader import Operator, run_verb
from txbox.admin.rehearsal import Rehearsals
from txbox.admin.replay import Replays
from txbox.admin.tables import InboxFilter, OutboxFilter, QuarantineFilter
from txbox.session import async_of

__all__ = [
    "Admin", "ChangeOptions", "Changed", "Edited", "Encrypted", "InboxFilter", "MessageChanged", "OutboxFilter",
    "QuarantineFilter",
]  # fmt: skip


T = TypeVar("T")
P = ParamSpec("P")
OperatorT = TypeVar("OperatorT", bound=Operator)


def _twin(
    verb: Callable[Concatenate[OperatorT, P], T],
) -> Callable[Concatenate[OperatorT, P], CoroutineType[Any, Any, T]]:
    @async_of(verb)
    async def twin(*args: Any, **kwargs: Any) -> T:
        return await run_verb(verb, *args, **kwargs)

    twin.__name__, twin.__doc__ = (
        f"{verb.__name__}_async",
        f"`{verb.__name__}` inside a running event loop.",
    )
    return twin


def _iterated(
    verb: Callable[Concatenate[OperatorT, P], Generator[T]],
) -> Callable[Concatenate[OperatorT, P], AsyncGenerator[T]]:
    async def twin(*args: Any, **kwargs: Any) -> AsyncGenerator[T]:
        steps = verb(*args, **kwargs)
        try:
            # no step is None, which then stands for the end
            while (step := await run_verb(next, steps, None)) is not None:
                yield step
        finally:
            await run_verb(steps.close)

    vars(twin)["__wrapped__"] = verb
    twin.__name__, twin.__doc__ = (
        f"{verb.__name__}_async",
        f"`{verb.__name__}` inside a running event loop.",
    )
    return twin


class Admin(Queries, Rehearsals, Canary, Encryption):
    """The operator's view of one inbox and outbox. A filter says which table a verb is about.

    Args:
        target: an App; or a database URL, pool or engine, which is enough for everything but `replay`,
            `rehearse`, and what messages of an order wait for.
        schema: with a database: the PostgreSQL schema of the tables.

    Nothing connects before the first verb. A verb may be called from any thread. Inside a running event loop await
    its twin: `await admin.retry_async(…)` does what `admin.retry(…)` does, and so for each verb. A twin uses async
    connections, and runs async handlers, in that loop; the rest runs in another thread. Cancelled, it ends
    after the batch at work.

    A change of many messages can be followed: `for so_far in admin.batches("retry", …)`, or inside a loop
    `async for so_far in admin.batches_async("retry", …)`, has the change so far after each committed batch, and
    `break` ends it.
    """

    status_async = _twin(Queries.status)
    topics_async = _twin(Queries.topics)
    overview_async = _twin(Queries.overview)
    open_of_async = _twin(Queries.open_of)
    unsent_async = _twin(Queries.unsent)
    names_async = _twin(Queries.names)
    hint_async = _twin(Queries.hint)
    consumers_async = _twin(Queries.consumers)
    sizes_async = _twin(Queries.sizes)
    schema_async = _twin(Queries.schema)
    activity_async = _twin(Queries.activity)
    workers_async = _twin(Queries.workers)
    pauses_async = _twin(Queries.pauses)
    pause_changes_async = _twin(Queries.pause_changes)
    snapshot_async = _twin(Queries.snapshot)
    unserved_async = _twin(Queries.unserved)
    check_async = _twin(Queries.check)
    crew_async = _twin(Queries.crew)
    idle_async = _twin(Queries.idle)
    doctor_async = _twin(Queries.doctor)
    list_async = _twin(Queries.list)
    page_async = _twin(Queries.page)
    failures_async = _twin(Queries.failures)
    quarantine_groups_async = _twin(Queries.quarantine_groups)
    audit_async = _twin(Queries.audit)
    show_async = _twin(Queries.show)
    reveal_async = _twin(Queries.reveal)
    explain_async = _twin(Queries.explain)
    batches_async = _iterated(Changes.batches)
    retry_async = _twin(Changes.retry)
    discard_async = _twin(Changes.discard)
    reroute_async = _twin(Changes.reroute)
    accept_async = _twin(Changes.accept)
    edit_async = _twin(Changes.edit)
    pause_async = _twin(Changes.pause)
    resume_async = _twin(Changes.resume)
    why_not_async = _twin(Changes.why_not)
    replay_async = _twin(Replays.replay)
    replay_batches_async = _iterated(Replays.replay_batches)
    rehearse_async = _twin(Rehearsals.rehearse)
    canary_async = _twin(Canary.canary)
    canary_steps_async = _iterated(Canary.canary_steps)
    encrypt_async = _twin(Encryption.encrypt)
    encrypt_batches_async = _iterated(Encryption.encrypt_batches)
