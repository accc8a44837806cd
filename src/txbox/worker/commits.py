"""What this process has settled lately, compared with a database that may have lost it.

A queue forgets what was acknowledged. What an asynchronous failover has lost of it is lost; but it can be said which
messages these were, and from when to when.

Source: docs/decisions/0066-lost-commits.md
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from datetime import UTC, datetime

from txbox.events import CommitsLost
from txbox.session import Session
from txbox.store import jobs
from txbox.store.inbox import InboxStore

_IDS_MAX = 20_000
_KEPT_S = 600.0
# ids of one statement
_ASKED = 500


# when, by the clock, of which consumer, which ids
_Settled = tuple[float, str, Collection[str]]


class Commits:
    """The ids that this process has settled in the last ten minutes, at most 20,000 of them.

    Args:
        consumers: those whose sources do not read again what the database has lost.
        retention_s: after that long a row may be pruned.
    """

    def __init__(self, consumers: Collection[str], retention_s: float) -> None:
        self._consumers = frozenset(consumers)
        self._kept_s = min(_KEPT_S, retention_s)
        self._settled: deque[_Settled] = deque()
        self._history: str | None = None

    def add(self, consumer: str, ids: Collection[str]) -> None:
        """Remember what has just been committed; called from any thread, for each batch."""
        if ids and consumer in self._consumers:
            self._settled.append((time.time(), consumer, ids))

    async def missing(self, db: Session, store: InboxStore) -> list[CommitsLost]:
        """Return what is missing, if the database is another one, or another run of it, than at the last call."""
        before, settled = self._history, self._recent()
        if before is not None and not settled:
            # an idle worker does not ask
            return []
        history = await jobs.history(db, store.dialect)
        losses: list[CommitsLost] = []
        if settled and before not in (None, history):
            losses = await self._compared(db, store, settled)
        # last: what fails is compared by the next call
        self._history = history
        return losses

    async def _compared(
        self, db: Session, store: InboxStore, settled: Sequence[_Settled]
    ) -> list[CommitsLost]:
        kept: dict[str, set[str]] = {}
        for consumer in {each[1] for each in settled}:
            remembered = [
                message_id for _, of, ids in settled if of == consumer for message_id in ids
            ]
            kept[consumer] = await self._kept(db, store, consumer, list(dict.fromkeys(remembered)))
        # a database loses its last commits, so with one of the first there, all before it are
        _, consumer, ids = settled[0]
        complete = not kept[consumer].isdisjoint(ids)
        # each id once, whatever comes behind it
        losses: dict[str, dict[str, float]] = {}
        for at, consumer, ids in settled:
            for message_id in ids:
                if message_id not in kept[consumer]:
                    losses.setdefault(consumer, {}).setdefault(message_id, at)
        self._forget(settled, losses)
        return [
            CommitsLost(
                consumer=consumer, count=len(lost), since=_time(min(lost.values())), until=_time(max(lost.values())),
                message_ids=tuple(lost), complete=complete,
            )
            for consumer, lost in losses.items()
        ]  # fmt: skip

    def _recent(self) -> Sequence[_Settled]:
        """Forget what is old, or too much, and return the rest, oldest first."""
        settled, oldest = self._settled, time.time() - self._kept_s
        count = sum(len(ids) for _, _, ids in tuple(settled))
        while settled and (settled[0][0] < oldest or count > _IDS_MAX):
            count -= len(settled.popleft()[2])
        return tuple(settled)

    def _forget(self, settled: Sequence[_Settled], losses: Mapping[str, Collection[str]]) -> None:
        """Keep only the others of what was compared; more may have come behind it meanwhile."""
        for _ in settled:
            self._settled.popleft()
        for at, consumer, ids in reversed(settled):
            if others := [each for each in ids if each not in losses.get(consumer, ())]:
                self._settled.appendleft((at, consumer, others))

    async def _kept(
        self, db: Session, store: InboxStore, consumer: str, ids: Sequence[str]
    ) -> set[str]:
        kept: set[str] = set()
        for start in range(0, len(ids), _ASKED):
            await db.begin()
            kept.update(await store.classify(db, consumer, ids[start : start + _ASKED]))
            await db.commit()
        return kept


def _time(at: float) -> datetime:
    return datetime.fromtimestamp(at, UTC)
