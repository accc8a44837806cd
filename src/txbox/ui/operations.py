"""Changes in bulk: what a form asks for, and progress, cancelling and results in the memory of this process."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, cast

from txbox.admin import Admin, Changed, views
from txbox.admin.tables import Filter, InboxFilter, Verb
from txbox.boundaries import log as _log
from txbox.errors import TxboxError
from txbox.text import counted

_AT_ONCE = 2
_WAITING_MAX = 20
_KEPT_MAX = 200


@dataclass(slots=True, kw_only=True)
class Operation:
    """One change.

    Attributes:
        title: what it does, in a sentence.
        expected: how many messages the operator agreed to change.
        done: how many are changed so far.
        state: "waiting", "running", "done", "cancelled", "stopped" by itself, or "failed".
        notes: what happened so far, in sentences.
        back: where its page leads back to.
    """

    name: str
    title: str
    actor: str
    reason: str | None
    expected: int
    back: str
    done: int = 0
    state: str = "waiting"
    began_at: float = field(default_factory=time.time)
    notes: list[str] = field(default_factory=list[str])
    #: Set by another thread: it ends before its next batch.
    cancelled: threading.Event = field(default_factory=threading.Event)

    @property
    def running(self) -> bool:
        return self.state in ("waiting", "running")

    def progress(self, done: int, before: int = 0) -> None:
        self.done = before + done


#: Carries an operation out; returns its notes.
Work = Callable[[Operation], Sequence[str]]


class Operations:
    """The operations of this process: two at once, the others wait; the last ones are remembered."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="txbox-ui-change")
        self._known: dict[str, Operation] = {}
        self._lock = threading.Lock()

    def start(
        self, work: Work, *, title: str, actor: str, reason: str | None, expected: int, back: str
    ) -> Operation | None:
        """Begin a change as soon as there is room; None when too many wait."""
        operation = Operation(
            name=secrets.token_urlsafe(12), title=title, actor=actor, reason=reason,
            expected=expected, back=back,
        )  # fmt: skip
        with self._lock:
            if sum(known.state == "waiting" for known in self._known.values()) >= _WAITING_MAX:
                return None
            self._known[operation.name] = operation
            ended = [name for name, known in self._known.items() if not known.running]
            for name in ended[: max(0, len(self._known) - _KEPT_MAX)]:
                del self._known[name]
        self._pool.submit(self._carry_out, work, operation)
        return operation

    def of(self, name: str) -> Operation | None:
        with self._lock:
            return self._known.get(name)

    def latest(self) -> list[Operation]:
        """The remembered ones, the newest first."""
        with self._lock:
            return list(reversed(self._known.values()))

    def close(self) -> None:
        """Cancel what runs, between two batches, and wait for it."""
        for operation in self.latest():
            operation.cancelled.set()
        self._pool.shutdown()

    def _carry_out(self, work: Work, operation: Operation) -> None:
        if operation.cancelled.is_set():
            operation.state = "cancelled"
            return
        operation.state = "running"
        try:
            operation.notes += work(operation)
        except TxboxError as error:
            # its text may name rows or the database: the log is for those who may read it
            _log.error("The dashboard's change %r failed: %s", operation.title, error)
            operation.notes.append(
                "It ended early, and batches that were done stay done: the log of the dashboard says why."
            )
            operation.state = "failed"
        except BaseException:
            operation.state = "failed"
            _log.exception("The dashboard's change %r failed.", operation.title)
            raise
        else:
            if operation.state == "running":
                operation.state = "cancelled" if operation.cancelled.is_set() else "done"


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedChange:
    """A change that a form asks for: of chosen messages, or of all that match a filter."""

    kind: type[Filter[Any, Any]]
    verb: Verb | Literal["replay"]
    filters: list[Filter[Any, Any]]
    criteria: dict[str, str]
    picked: list[str]
    #: The route to reroute to, "any" for none in particular; or the id to accept under.
    options: dict[str, str]
    canary: bool

    @property
    def route(self) -> str:
        """Where a reroute goes, as the outbox has it."""
        return "" if self.options["to"] == "any" else self.options["to"]

    @property
    def extent(self) -> str:
        """What its filter means, in words."""
        return (
            ""
            if self.picked
            else views.extent(self.kind.table, cast("Verb", self.verb), self.criteria)
        )

    def needs_reason(self, count: int) -> bool:
        """Whether it is of so many that the audit must say why."""
        return not self.picked or count > 1

    def change(self, admin: Admin, where: Any, **how: Any) -> Changed:
        if self.verb == "replay":
            return _replayed(admin, where, how)
        options = {"to": self.route} if self.verb == "reroute" else self.options
        changed: Changed = getattr(admin, self.verb)(where, **options, **how)
        return changed

    def question(self, count: int) -> str:
        """Name the change and its extent."""
        table, criteria, noun = self.kind.table, self.criteria, self.kind.table.noun
        if not self.picked:
            noun = views.noun_of(table, cast("Verb", self.verb), criteria.get("status"))
        given = ", ".join(
            f"{views.label(name)} {value}" for name, value in criteria.items() if name != "status"
        )
        of = f" of {given}" if given else ""
        to = f" to {self.options['to']}" if self.verb == "reroute" else ""
        if self.canary:
            to = ": one, then ten, then the rest"
        return f"{self.verb.capitalize()} {counted(count, noun)}{of}{to}?"

    def carried_out(self, operation: Operation, admin: Admin) -> list[str]:
        """Change at most as many messages as the operator agreed to; returns what happened, in sentences."""
        agreed = operation.expected
        who: dict[str, Any] = {"actor": operation.actor, "reason": operation.reason}
        if self.canary:
            assert isinstance(self.filters[0], InboxFilter)
            redriven = admin.canary(
                self.filters[0], **who, most=agreed, progress=operation.progress, cancelled=operation.cancelled.is_set,
                on_step=lambda step: operation.notes.append(step.sentence),
            )  # fmt: skip
            if redriven.stopped not in (None, "cancelled"):
                operation.state = "stopped"
            return [redriven.sentence]
        done, notes = 0, list[str]()
        for where in self.filters:
            if operation.cancelled.is_set() or done >= agreed:
                break
            change = self.change(
                admin, where, **who, most=agreed - done, cancelled=operation.cancelled.is_set,
                progress=partial(operation.progress, before=done),
            )  # fmt: skip
            done += change.count
            operation.progress(done)
            if change.spared:
                notes.append(f"{views.spared(change.spared)}, and retry it by itself.")
            notes += views.refusals(self.kind.table, change.refused)
        return [views.done(done, self.kind.table.noun, self.verb), *notes]


def _replayed(admin: Admin, where: InboxFilter, how: Mapping[str, Any]) -> Changed:
    """Replay one message: a single run, without batches or progress."""
    given = {name: how[name] for name in ("actor", "reason", "dry_run") if name in how}
    replayed = admin.replay(where, **given)
    key = {"consumer": where.consumer or "", "message_id": where.message_id or ""}
    failed = tuple(
        {
            **key,
            "reason": f"its handler failed ({failure.error_type}), and it is processed as before",
        }
        for failure in replayed.failures
    )
    return Changed(
        action="replay", dry_run=replayed.dry_run, spared=0, refused=failed,
        count=replayed.count if replayed.dry_run else replayed.processed,
        sample=(key,) if replayed.count else (),
    )  # fmt: skip
