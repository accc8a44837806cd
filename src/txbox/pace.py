"""How many messages the next transaction of a consumer takes, and how finely a failing batch is divided.

Nothing here waits for messages to come: a batch is what has arrived, up to this many.

Source: docs/decisions/0022-batches.md
"""

from __future__ import annotations

import math
import threading
import time

from txbox.forks import forgets_parent
from txbox.policy import Batching

# subtransactions past 64 overflow a backend's cache in PostgreSQL, and every snapshot pays for it
_SAVEPOINTS_MAX = 64
_CALM_S = (1.0, 60.0)
_FORGETS = 0.02
# above this share of duplicates a batch is looked up before it is claimed
_REPLAYED = 0.5
# below this share of failures a failed batch is rare enough to be run twice
_RARE = 0.0005


class Pace:
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
