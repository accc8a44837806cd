"""The pace of each handler, for all lanes of this process."""

from __future__ import annotations

import math
import threading
import time
from dataclasses import replace

from txbox.forks import forgets_parent
from txbox.handlers import Handler
from txbox.policy import Batching
from txbox.store.inbox import InboxStore

# subtransactions past 64 overflow a backend's cache in PostgreSQL, and every snapshot pays for it
_SAVEPOINTS_MAX = 64
_CALM_S = (1.0, 60.0)
_FORGETS = 0.02
# above this share of duplicates a batch is looked up before it is claimed
_REPLAYED = 0.5
# below this share of failures a failed batch is rare enough to be run twice
_RARE = 0.0005


class BatchSize:
    """The size of one handler's transactions, learned from how they end.

    It doubles from one while twice as much would stay under `Batching.duration`, and halves above
    that. After a conflict it stays under half of what conflicted, for longer each time that
    conflicts come back: batches that lock the same rows in different orders are slower than no batches.
    """

    def __init__(self, batching: Batching) -> None:
        self._longest_s = batching.duration.total_seconds()
        self._most = self._ceiling = batching.messages
        self.forget_parent()
        forgets_parent(self)
        self._size = 1
        self._raise_at = 0.0
        self._calm_s = 0.0
        self._failures = 0.0
        self._repeats = 0.0

    def forget_parent(self) -> None:
        self._lock = threading.Lock()

    @property
    def messages(self) -> int:
        """Messages for the next transaction, 1 or more."""
        return min(self._size, _SAVEPOINTS_MAX) if self._failures > _RARE else self._size

    def committed(self, messages: int, took_s: float, failed: int = 0) -> None:
        """A transaction of this many messages has committed, of which some had failed."""
        with self._lock:
            weight = 1 - (1 - _FORGETS) ** messages
            self._failures += (failed / messages - self._failures) * weight
            if self._ceiling < self._most and time.monotonic() > self._raise_at:
                self._ceiling = min(self._ceiling * 2, self._most)
                self._raise_at = time.monotonic() + self._calm_s
            if took_s > self._longest_s:
                self._size = max(1, messages // 2)
            elif (
                # duplicates leave less to run than was taken: half of it tells enough
                2 * messages >= self._size and took_s * 2 * self._size / messages < self._longest_s
            ):
                self._size = min(self._size * 2, self._ceiling)

    def conflicted(self, messages: int) -> None:
        """A transaction of this many messages lost against another one."""
        with self._lock:
            lower = max(1, messages // 2)
            if messages == 1 or lower >= self._ceiling:
                # the other side of a conflict that is known
                return
            first_s, longest_s = _CALM_S
            self._calm_s = min(max(first_s, self._calm_s * 2), longest_s)
            self._raise_at = time.monotonic() + self._calm_s
            self._ceiling = lower
            self._size = min(self._size, lower)

    def failed(self, messages: int) -> None:
        """A transaction failed because of one of its messages."""
        with self._lock:
            self._failures += (1 / messages - self._failures) * (1 - (1 - _FORGETS) ** messages)

    def met(self, messages: int, finished: int) -> None:
        """Of so many messages so many had been finished before."""
        with self._lock:
            weight = 1 - (1 - _FORGETS) ** messages
            self._repeats += (finished / messages - self._repeats) * weight

    @property
    def looks_first(self) -> bool:
        """True while most of what comes has been finished before: a read costs less than a claim that loses."""
        return self._repeats > _REPLAYED

    @property
    def group(self) -> int:
        """Messages that share a savepoint; 0 for none, where failures are rare.

        With p failures a message, groups of 1/sqrt(p) balance the savepoints set against the messages
        that run again because a neighbour failed.
        """
        if self._failures <= _RARE:
            return 0
        return max(1, min(_SAVEPOINTS_MAX, round(1 / math.sqrt(self._failures))))


class BatchSizes:
    """How the transactions of each handler are sized and divided."""

    def __init__(self, store: InboxStore, batching: Batching) -> None:
        self._store = store
        self._batching = batching
        self._batch_sizes: dict[tuple[str, int], BatchSize] = {}

    def of(self, handler: Handler) -> BatchSize:
        """The pace of one handler."""
        key = (handler.consumer, id(handler.function))
        batch_size = self._batch_sizes.get(key)
        if batch_size is None:
            batching = self._batching
            if not self._store.dialect.refuses_commit and not handler.options.batch:
                # nothing stops a handler's COMMIT there: it would commit its neighbours' claims too
                batching = replace(batching, messages=1)
            # two threads that come first together make two: the one kept is the one both find next
            batch_size = self._batch_sizes.setdefault(key, BatchSize(batching))
        return batch_size

    def group(self, handler: Handler, batch_size: BatchSize, messages: int) -> int:
        """How many messages of a batch share a savepoint at the first try; 0 for none."""
        if messages == 1 or not divides(handler):
            return 0
        return 1 if self._store.dialect.cheap_savepoints else batch_size.group


def divides(handler: Handler, *, batch: bool = False) -> bool:
    """Say whether messages of a batch can be told apart under savepoints, or run in a batch at all."""
    options = handler.options
    return not options.in_order and options.transactional and (batch or not options.batch)
