"""Changes in bulk while they run: progress, cancelling and results, in the memory of this process."""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from txbox.errors import TxboxError

_log = logging.getLogger("txbox")

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
    ended_at: float | None = None
    notes: list[str] = field(default_factory=list[str])
    cancelling: bool = False

    @property
    def running(self) -> bool:
        return self.state in ("waiting", "running")

    def cancel(self) -> None:
        """End it before its next batch."""
        self.cancelling = True

    def is_cancelled(self) -> bool:
        """Another thread may cancel it at any time."""
        return self.cancelling

    def progress(self, done: int) -> None:
        self.done = done


#: Carries an operation out; returns its notes.
Work = Callable[[Operation], Sequence[str]]


class Operations:
    """The operations of this process: two at once, the others wait; the last ones are remembered."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="txbox-ui-change")
        self._known: OrderedDict[str, Operation] = OrderedDict()
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
            operation.cancel()
        self._pool.shutdown()

    def _carry_out(self, work: Work, operation: Operation) -> None:
        if operation.is_cancelled():
            operation.state, operation.ended_at = "cancelled", time.time()
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
                operation.state = "cancelled" if operation.is_cancelled() else "done"
        finally:
            operation.ended_at = time.time()
