"""Groups of messages under savepoints: who made one fail is recorded, and its neighbours run again."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from txbox.calls import call_of, timeout_s
from txbox.errors import Fault
from txbox.failure import failure_of
from txbox.handlers import Handler
from txbox.policy import Limits
from txbox.ran import End, Ran, Recorded, end_of_handler, refused
from txbox.steps import InvokeGroups, Progress, Raised, Steps, Undo
from txbox.store import failures
from txbox.store.codec import Arrival
from txbox.store.failures import Failure
from txbox.store.inbox import InboxStore

#: What else is written in the transaction that makes a message dead.
Dying = Callable[[Handler, Arrival, Failure, int], Steps[None]]


class Groups:
    """Calls a handler for groups of messages, inside of the transaction that has claimed them."""

    def __init__(self, store: InboxStore, limits: Limits, dying: Dying | None) -> None:
        self._store = store
        self._limits = limits
        self._dying = dying

    def called(
        self, ran: Ran, handler: Handler, mine: Sequence[Arrival], size: int, token: str
    ) -> Steps[tuple[list[Arrival], list[Any]]]:
        """Call the handler for groups of messages under savepoints; returns who came through, and the answers.

        The culprit of a group is rolled back and recorded in this transaction; its neighbours run again.

        Raises:
            Raised: what ends the transaction as a whole: a conflict, or the loss of the connection.
        """
        waiting = deque(list(mine[at : at + size]) for at in range(0, len(mine), size))
        good: list[Arrival] = []
        answers: list[Any] = []
        alone = 0  # as many groups at the head of the line run one by one
        while waiting:
            # what is put off and sent behind a failure is sent again: about one failure is met at a time
            most = 1 if alone else size if handler.options.pipeline else len(waiting)
            now = list(itertools.islice(waiting, most))
            calls = [[call_of(handler, arrival, ran.called) for arrival in group] for group in now]
            progress: Progress = yield InvokeGroups(
                calls, timeout_s(handler), handler.options.pipeline
            )
            answers += progress.answers
            for _ in range(progress.released):
                good += waiting.popleft()
            alone = max(0, alone - progress.released)
            if progress.raised is None:
                continue
            end = end_of_handler(progress.raised, together=ran.together)
            if (
                end is not End.RAISED
                or progress.raised.left
                or refused(self._store.dialect, progress.raised)
            ):
                raise progress.raised
            group = waiting.popleft()
            alone = max(0, alone - 1)
            yield Undo()
            failed_before = (
                progress.raised.store is not None and progress.raised.store.fault is Fault.ABORTED
            )
            if progress.culprit is None or (failed_before and len(group) > 1):
                # it could be any of them: each has a turn of its own
                waiting.extendleft([arrival] for arrival in reversed(group))
                alone += len(group)
                continue
            culprit = group.pop(progress.culprit)
            yield from self._record(ran, handler, culprit, progress.raised, token)
            if group:
                waiting.appendleft(group)
                alone += 1 if alone else 0
        return good, answers

    def _record(
        self, ran: Ran, handler: Handler, arrival: Arrival, raised: Raised, token: str
    ) -> Steps[None]:
        retry = handler.options.retry
        failure = failures.drawn(
            failure_of(raised.error, raised.store, handler.options, self._limits), arrival, retry
        )
        dead, attempts = yield from failures.record_own(
            self._store, handler.consumer, arrival, failure, retry, token=token
        )
        if dead and self._dying is not None:
            yield from self._dying(handler, arrival, failure, attempts)
        ran.failed[arrival.message_id] = Recorded(failure, dead, attempts)
