"""The outbox's operations as steps: stage, lease, and what becomes of a leased row."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from txbox.message import Message
from txbox.steps import Begin, Commit, Statement, Steps
from txbox.store.codec import Columns, decode_headers
from txbox.store.dialect import Dialect, as_time

# pages looked through in one transaction, so that a long row of waiting keys holds up nobody for long
_PAGES = 5
_START = (None, 0)
# a row is dated by the start of its transaction: one that committed late lies behind the look's place
_BACK_S = 1.0


@dataclass(frozen=True, slots=True)
class Staged:
    """A row that a relay has leased.

    Args:
        number: its place in the order of its key.
        attempts: failures so far.
    """

    message: Message[Any]
    number: int
    attempts: int

    @property
    def id(self) -> str:
        """The message's id, which is never None here."""
        return str(self.message.id)


@dataclass(slots=True)
class Look:
    """One look at the outbox.

    Args:
        rows: leased, in the order in which they are to leave.
        more: there may be more to take at once.
    """

    rows: list[Staged] = field(default_factory=list[Staged])
    more: bool = False


@dataclass(frozen=True, slots=True)
class _Candidate:
    id: str
    number: int
    topic: str
    key: str | None
    size_bytes: int


class OutboxStore:
    """The statements of the relay in one dialect.

    A look goes on where the last one ended, and starts anew at the end or after a second: rows that
    wait behind the head of their key, however many, cannot hide those of other keys behind them.
    """

    def __init__(self, own: Dialect, columns: Columns) -> None:
        self.dialect = own
        self.columns = columns
        self._after: tuple[Any, int] = _START
        self._back_at = 0.0

    def lease(
        self,
        *,
        token: str,
        limit: int,
        payload_bytes: int,
        lease_s: float,
        topics: Sequence[str] = (),
        others: bool = True,
    ) -> Steps[Look]:
        """Lease rows that are due, in a transaction of its own.

        Of a key only its first open rows are taken, without a gap, so that no relay overtakes another
        or a row that failed.

        Args:
            limit: rows, 1 or more.
            payload_bytes: sum of payloads after which no more is taken.
            lease_s: seconds after which another relay may take them.
            topics: of these only; with `others`, of all but these.
        """
        look = Look()
        if time.monotonic() >= self._back_at:
            self._after, self._back_at = _START, time.monotonic() + _BACK_S
        yield Begin()
        for _ in range(_PAGES):
            before = self._after
            page = yield from self._page(limit, topics, others)
            look.more = len(page) == limit
            wanted = (yield from self._eligible(page)) if page else []
            fitting = _within(wanted, payload_bytes)
            look.rows = yield from self._take(fitting, token, lease_s)
            if not look.more:
                self._after = _START
            if len(fitting) < len(wanted):
                self._after, look.more = before, True
            if look.rows or not look.more:
                break
        yield Commit()
        return look

    def _page(self, limit: int, topics: Sequence[str], others: bool) -> Steps[list[_Candidate]]:
        after_at, after_number = self._after
        found = yield self.dialect.statement(
            "relay_page",
            {
                "after_at": after_at,
                "after_number": after_number,
                "limit": limit,
                "named": not others,
            },
            # no topic is empty: a list that must not be stands for none
            {"topic": topics or [""]},
        )
        if found.rows:
            last = found.rows[-1]
            self._after = (last[4], last[1])
        return [_Candidate(row[0], row[1], row[2], row[3], row[5]) for row in found.rows]

    def _eligible(self, page: Sequence[_Candidate]) -> Steps[list[_Candidate]]:
        """Those that nothing of their key stands before, this page's own rows excepted."""
        page = sorted(page, key=lambda own: own.number)
        keys: dict[tuple[str, str], list[int]] = {}
        for own in page:
            if own.key is not None:
                keys.setdefault((own.topic, own.key), []).append(own.number)
        if not keys:
            return list(page)
        found = yield self.dialect.statement(
            "relay_heads",
            {"last": page[-1].number},
            {"topic": [topic for topic, _ in keys], "key": [key for _, key in keys]},
        )
        first: dict[tuple[str, str], int] = {}
        whole: set[tuple[str, str]] = set()
        for topic, key, head, count in found.rows:
            first[topic, key] = head
            if count == len(keys[topic, key]):
                whole.add((topic, key))
        return [
            own
            for own in page
            if own.key is None
            or (own.topic, own.key) in whole
            or first.get((own.topic, own.key)) == own.number
        ]

    def _take(
        self, wanted: Sequence[_Candidate], token: str, lease_s: float
    ) -> Steps[list[Staged]]:
        if not wanted:
            return []
        own = self.dialect
        params = {"token": token, "lease_s": lease_s}
        ids = {"id": [row.id for row in wanted]}
        locked = yield own.statement("relay_lease", {} if own.has("relay_take") else params, ids)
        if own.has("relay_take") and locked.rows:
            yield own.statement("relay_take", params, {"id": [row[0] for row in locked.rows]})
        rows = sorted((self._staged(row) for row in locked.rows), key=lambda row: row.number)
        taken = {row.id for row in rows}
        # another relay was quicker with an earlier row of the key: its later rows stay behind it
        overtaken = {
            (row.topic, row.key) for row in wanted if row.key is not None and row.id not in taken
        }
        left = [row for row in rows if (row.message.topic, row.message.key) in overtaken]
        if left:
            yield self.release([row.id for row in left], token=token)
        return [row for row in rows if (row.message.topic, row.message.key) not in overtaken]

    def _staged(self, row: Sequence[Any]) -> Staged:
        (own_id, number, topic, kind, key, content_type, headers, payload, key_id, at, attempts) = (
            row[:11]
        )
        message: Message[Any] = Message(
            id=own_id,
            topic=topic,
            type=kind,
            key=key,
            content_type=content_type,
            headers=decode_headers(headers),
            payload=self.columns.payload_back(payload, key_id),
            time=as_time(at),
        )
        return Staged(message, number, attempts)

    # -- what becomes of them -----------------------------------------------------------------

    def sent(self, ids: Sequence[str], *, token: str, keep: bool) -> Statement:
        """The statement that marks leased rows as sent, or deletes them; its count says how many were still ours."""
        return self.dialect.statement(
            "relay_kept" if keep else "relay_sent", {"token": token}, {"id": ids}
        )

    def failed(
        self, row: Staged, *, token: str, dead: bool, delay_s: float, error_type: str, error: str
    ) -> Statement:
        """The statement that records that a leased row could not be sent; due again after `delay_s`."""
        return self.dialect.statement(
            "relay_failed",
            {
                "id": row.id,
                "token": token,
                "status": "dead" if dead else "pending",
                "delay_s": delay_s,
                "error_type": error_type,
                "error": self.columns.error(error),
            },
        )

    def release(self, ids: Sequence[str], *, token: str) -> Statement:
        """The statement that gives leased rows back at once."""
        return self.dialect.statement("relay_release", {"token": token}, {"id": ids})

    def left(self) -> Steps[bool]:
        """Say whether rows are due or leased."""
        yield Begin()
        found = yield self.dialect.statement("relay_left")
        yield Commit()
        return bool(found.rows[0][0])


def _within(wanted: Iterable[_Candidate], payload_bytes: int) -> list[_Candidate]:
    """The first ones that fit, one at least; a key keeps no gap, since nothing after the last is taken."""
    taken: list[_Candidate] = []
    size_bytes = 0
    for own in wanted:
        size_bytes += own.size_bytes
        if taken and size_bytes > payload_bytes:
            break
        taken.append(own)
    return taken
