"""The operator's verbs on the outbox: look at outgoing messages, and retry or discard them, each change audited."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from txbox.admin.replay import Progress, again
from txbox.errors import ConfigurationError
from txbox.steps import Steps
from txbox.store.audit import Audit, Change
from txbox.store.filters import OutgoingFilter
from txbox.store.inbox import InboxStore
from txbox.store.outbox_rows import (
    ListedOutgoing,
    OutboxRows,
    OutgoingBatch,
    ShownOutgoing,
    TopicStatus,
)

T = TypeVar("T")

_BATCH = 500
_SAMPLE = 10

#: By action: the statuses that may be changed; a filter means the first, of a reroute all but the last.
CHANGEABLE: dict[Change, tuple[str, ...]] = {
    "retry": ("dead", "failed"),
    "discard": ("dead", "failed", "due", "delayed"),
    "reroute": ("due", "delayed", "failed", "dead"),
}

__all__ = [
    "CHANGEABLE",
    "ChangedOutgoing",
    "ListedOutgoing",
    "OutboxAdmin",
    "OutgoingFilter",
    "ShownOutgoing",
    "TopicStatus",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangedOutgoing:
    """What a retry or discard did, or in a dry run would do; `sample` has the first ids."""

    action: Change
    dry_run: bool
    count: int
    sample: tuple[str, ...]


class Drive(Protocol):
    """Carries steps out on the Admin's connections."""

    def __call__(self, steps: Steps[T]) -> T: ...


class OutboxAdmin:
    """The operator's view of the outbox; `Admin.outbox` is one."""

    def __init__(
        self,
        store: InboxStore,
        drive: Drive,
        *,
        audit: Callable[[str | None, str | None], Audit],
        changed: Callable[[str, int, Audit], None],
    ) -> None:
        self._rows = OutboxRows(store)
        self._drive = drive
        self._audit = audit
        self._changed = changed

    def status(self) -> Sequence[TopicStatus]:
        """Count every topic's outgoing messages; its cost grows with the table."""
        return self._drive(self._rows.status())

    def list(
        self, where: OutgoingFilter | None = None, *, limit: int = 50, before: int | None = None
    ) -> Sequence[ListedOutgoing]:
        """Read outgoing messages, newest first.

        Args:
            before: the `number` of the last message of the page before.
        """
        return self._drive(self._rows.page(where or OutgoingFilter(), limit=limit, before=before))

    def show(self, message_id: str, *, reveal: bool = False) -> ShownOutgoing | None:
        """Read one outgoing message; None when it was sent and not kept, or never staged.

        Args:
            reveal: include payload and header values, which may be personal or secret.
        """
        return self._drive(self._rows.shown(message_id, reveal=reveal))

    def retry(
        self,
        where: OutgoingFilter,
        *,
        actor: str | None = None,
        reason: str | None = None,
        dry_run: bool = False,
        progress: Progress | None = None,
    ) -> ChangedOutgoing:
        """Give outgoing messages a full new budget of attempts, due at once, under their ids.

        A filter means dead messages unless it names the status `failed`; with a message id it means
        both. Of its key, a message takes its place before the later ones that have not left.

        Guarantee: batches are small transactions with their audit row, and never wait for a relay.
        """
        audit = None if dry_run else self._audit(actor, reason)
        return self._change("retry", where, audit, progress)

    def reroute(
        self,
        where: OutgoingFilter,
        to: str,
        *,
        actor: str | None = None,
        reason: str | None = None,
        dry_run: bool = False,
        progress: Progress | None = None,
    ) -> ChangedOutgoing:
        """Send outgoing messages another way, with a full new budget of attempts, under their ids.

        A filter means messages that have not left, dead ones only if it names the status `dead`; with
        a message id it means both. The guarantee is that of `retry`.

        Args:
            to: a route as `status` and `list` show it, or as app.publish(name=…) names it; "" is any App
                that publishes or consumes the topic.
        """
        audit = None if dry_run else self._audit(actor, reason)
        return self._change("reroute", where, audit, progress, to)

    def discard(
        self,
        where: OutgoingFilter,
        *,
        actor: str | None = None,
        reason: str | None = None,
        dry_run: bool = False,
        progress: Progress | None = None,
    ) -> ChangedOutgoing:
        """Give outgoing messages up: no relay sends them any more.

        A filter means dead messages unless it names the status `failed`, `due` or `delayed`; with a
        message id it means all four. One whose relay went away may have been published before. The
        guarantee is that of `retry`.
        """
        audit = None if dry_run else self._audit(actor, reason)
        return self._change("discard", where, audit, progress)

    def _change(
        self,
        action: Change,
        where: OutgoingFilter,
        audit: Audit | None,
        progress: Progress | None,
        to: str | None = None,
    ) -> ChangedOutgoing:
        statuses = _statuses(action, where)
        sample: tuple[str, ...] = ()
        count = 0
        after: int | None = -1
        while after is not None:
            batch: OutgoingBatch = self._drive(
                again(
                    self._rows.change,
                    action,
                    where,
                    statuses,
                    audit,
                    after=after,
                    limit=_BATCH,
                    to=to,
                )
            )
            count += len(batch.ids)
            sample = (*sample, *batch.ids[: _SAMPLE - len(sample)])
            after = batch.next_after
            if progress is not None:
                progress(count)
        if audit is not None:
            self._changed(f"{action} outgoing", count, audit)
        return ChangedOutgoing(action=action, dry_run=audit is None, count=count, sample=sample)


def _statuses(action: Change, where: OutgoingFilter) -> tuple[str, ...]:
    allowed = CHANGEABLE[action]
    if where.status is not None:
        if where.status not in allowed:
            raise ConfigurationError(
                f"The status {where.status!r} cannot be changed by {action}: use {' or '.join(allowed)}."
            )
        return (where.status,)
    if where.message_id is not None:
        return allowed
    return allowed[:-1] if action == "reroute" else allowed[:1]
