"""The pace of each handler, for all lanes of this process."""

from __future__ import annotations

from dataclasses import replace

from txbox.handlers import Handler
from txbox.pace import Pace
from txbox.policy import Batching
from txbox.store.inbox import InboxStore


class Paces:
    """How the transactions of each handler are sized and divided."""

    def __init__(self, store: InboxStore, batching: Batching) -> None:
        self._store = store
        self._batching = batching
        self._paces: dict[tuple[str, int], Pace] = {}

    def of(self, handler: Handler) -> Pace:
        """The pace of one handler."""
        key = (handler.consumer, id(handler.function))
        pace = self._paces.get(key)
        if pace is None:
            batching = self._batching
            if not self._store.dialect.refuses_commit and not handler.options.batch:
                # nothing stops a handler's COMMIT there: it would commit its neighbours' claims too
                batching = replace(batching, messages=1)
            # two threads that come first together make two: the one kept is the one both find next
            pace = self._paces.setdefault(key, Pace(batching))
        return pace

    def group(self, handler: Handler, pace: Pace, messages: int) -> int:
        """How many messages of a batch share a savepoint at the first try; 0 for none."""
        if messages == 1 or not divides(handler):
            return 0
        return 1 if self._store.dialect.cheap_savepoints else pace.group


def divides(handler: Handler, *, batch: bool = False) -> bool:
    """Say whether messages of a batch can be told apart under savepoints, or run in a batch at all."""
    options = handler.options
    return not options.in_order and options.transactional and (batch or not options.batch)
