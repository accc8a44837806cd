"""The operator's verbs, all of them audited where they change anything: `Admin` has those of look.py, changes.py,
canary.py, encrypt.py and replay.py."""

from __future__ import annotations

from collections.abc import Callable
from types import CoroutineType
from typing import Any, Concatenate, ParamSpec, TypeVar

from txbox.admin.canary import Canary
from txbox.admin.changes import Changed, Changes, Edited, How, MessageChanged
from txbox.admin.encrypt import Encrypted, Encryption
from txbox.admin.look import Look
from txbox.admin.reader import Reader, run_verb
from txbox.admin.replay import Replays
from txbox.admin.tables import InboxFilter, OutboxFilter, QuarantineFilter
from txbox.session import twin_of

__all__ = [
    "Admin", "Changed", "Edited", "Encrypted", "How", "InboxFilter", "MessageChanged", "OutboxFilter",
    "QuarantineFilter",
]  # fmt: skip


T = TypeVar("T")
P = ParamSpec("P")
ReaderT = TypeVar("ReaderT", bound=Reader)


def _twin(
    verb: Callable[Concatenate[ReaderT, P], T],
) -> Callable[Concatenate[ReaderT, P], CoroutineType[Any, Any, T]]:
    @twin_of(verb)
    async def twin(*args: Any, **kwargs: Any) -> T:
        return await run_verb(verb, *args, **kwargs)

    twin.__name__, twin.__doc__ = (
        f"{verb.__name__}_async",
        f"`{verb.__name__}` inside a running event loop.",
    )
    return twin


class Admin(Look, Replays, Canary, Encryption):
    """The operator's view of one inbox and outbox. A filter says which table a verb is about.

    Args:
        target: an App; or a database URL, pool or engine, which is enough for everything but `replay`,
            `rehearse`, and what messages of an order wait for.
        schema: with a database: the PostgreSQL schema of the tables.

    Nothing connects before the first verb. A verb may be called from any thread. Inside a running event loop await
    its twin: `await admin.retry_async(…)` does what `admin.retry(…)` does, and so for each verb. A twin uses async
    connections, and runs async handlers, in that loop; the rest runs in another thread, callbacks like `progress`
    included. Cancelled, it ends after the batch at work.
    """

    status_async = _twin(Look.status)
    topics_async = _twin(Look.topics)
    overview_async = _twin(Look.overview)
    open_of_async = _twin(Look.open_of)
    unsent_async = _twin(Look.unsent)
    names_async = _twin(Look.names)
    hint_async = _twin(Look.hint)
    consumers_async = _twin(Look.consumers)
    sizes_async = _twin(Look.sizes)
    schema_async = _twin(Look.schema)
    activity_async = _twin(Look.activity)
    workers_async = _twin(Look.workers)
    pauses_async = _twin(Look.pauses)
    pause_changes_async = _twin(Look.pause_changes)
    snapshot_async = _twin(Look.snapshot)
    unserved_async = _twin(Look.unserved)
    check_async = _twin(Look.check)
    crew_async = _twin(Look.crew)
    idle_async = _twin(Look.idle)
    doctor_async = _twin(Look.doctor)
    list_async = _twin(Look.list)
    page_async = _twin(Look.page)
    failures_async = _twin(Look.failures)
    quarantine_groups_async = _twin(Look.quarantine_groups)
    audit_async = _twin(Look.audit)
    show_async = _twin(Look.show)
    reveal_async = _twin(Look.reveal)
    explain_async = _twin(Look.explain)
    retry_async = _twin(Changes.retry)
    discard_async = _twin(Changes.discard)
    reroute_async = _twin(Changes.reroute)
    accept_async = _twin(Changes.accept)
    edit_async = _twin(Changes.edit)
    pause_async = _twin(Changes.pause)
    resume_async = _twin(Changes.resume)
    why_not_async = _twin(Changes.why_not)
    replay_async = _twin(Replays.replay)
    rehearse_async = _twin(Replays.rehearse)
    canary_async = _twin(Canary.canary)
    encrypt_async = _twin(Encryption.encrypt)
