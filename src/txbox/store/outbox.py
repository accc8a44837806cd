"""The outbox's operations as steps: stage, lease, and what becomes of a leased row."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from txbox.message import Message
from txbox.steps import Begin, Commit, Read, Statement, Steps
from txbox.store.codec import Columns
from txbox.store.dialect import Dialect, as_time

# pages looked through in one transaction, so that a long row of waiting keys holds up nobody for long
_PAGES = 5
_START = (None, 0)
# a row is dated by the start of its transaction: one that committed late lies behind the look's place
_BACK_S = 1.0
# rows moved in one transaction
_ADOPTED = 1000


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
    type: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """Which rows a relay takes: those of its route, and some that were staged without one.

    Args:
        whole: all rows of the route, whatever their topic.
        topics: of these only; with `others`, of all but these.
        fits: says whether a topic and type have a consumer; what does not fit waits, and holds
            nothing of its key up.
    """

    route: str
    topics: Sequence[str] = ()
    others: bool = True
    whole: bool = False
    fits: Callable[[str, str | None], bool] = lambda _topic, _type: True

    @property
    def params(self) -> dict[str, Any]:
        """The parameters of the queries that look for them."""
        return {"route": self.route, "whole": self.whole, "named": not self.others}

    @property
    def rows(self) -> dict[str, Sequence[str]]:
        """The topics; none is empty, so that a list that must not be stands for none."""
        return {"topic": self.topics or [""]}

    def routes(self, topic: str) -> Sequence[str]:
        """The routes whose rows are one order with those of this topic."""
        return (self.route, "") if (topic in self.topics) is not self.others else (self.route,)


class OutboxStore:
    """The statements of the relay in one dialect.

    A look goes on where the last one ended, and starts anew at the end or after a second: rows that
    wait behind the head of their key, however many, cannot hide those of other keys behind them.
    """

    def __init__(self, dialect: Dialect, columns: Columns) -> None:
        self.dialect = dialect
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
        taken: Taken,
    ) -> Steps[Look]:
        """Lease rows that are due, in a transaction of its own.

        Of a key only its first open rows are taken, without a gap, so that no relay overtakes another
        or a row that failed.

        Args:
            limit: rows, 1 or more.
            payload_bytes: sum of payloads after which no more is taken.
            lease_s: seconds after which another relay may take them.
        """
        look = Look()
        if time.monotonic() >= self._back_at:
            self._after, self._back_at = _START, time.monotonic() + _BACK_S
        yield Begin()
        for _ in range(_PAGES):
            before = self._after
            page = yield from self._page(limit, taken)
            look.more = len(page) == limit
            page = [row for row in page if taken.fits(row.topic, row.type)]
            wanted = (yield from self._eligible(page, taken)) if page else []
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

    def _page(self, limit: int, taken: Taken) -> Steps[list[_Candidate]]:
        after_at, after_number = self._after
        found = yield self.dialect.statement(
            "relay_page",
            {
                **taken.params,
                "after_at": after_at,
                "after_number": after_number,
                "limit": limit,
            },
            taken.rows,
        )
        if found.rows:
            last = found.rows[-1]
            self._after = (last[4], last[1])
        return [
            _Candidate(id_, number, topic, key, size, kind)
            for id_, number, topic, key, _, size, kind in found.rows
        ]

    def _eligible(self, page: Sequence[_Candidate], taken: Taken) -> Steps[list[_Candidate]]:
        """Those that nothing of their key stands before, this page's own rows excepted."""
        page = sorted(page, key=lambda row: row.number)
        keys: dict[tuple[str, str], list[int]] = {}
        for row in page:
            if row.key is not None:
                keys.setdefault((row.topic, row.key), []).append(row.number)
        if not keys:
            return list(page)
        asked = [(route, topic, key) for topic, key in keys for route in taken.routes(topic)]
        routes, topics, names = zip(*asked, strict=True)
        found = yield self.dialect.statement(
            "relay_heads",
            {"last": page[-1].number},
            {"route": routes, "topic": topics, "key": names},
        )
        first: dict[tuple[str, str], int] = {}
        counts: Counter[tuple[str, str]] = Counter()
        for topic, key, kind, head, count in found.rows:
            if taken.fits(topic, kind):
                first[topic, key] = min(head, first.get((topic, key), head))
                counts[topic, key] += count
        return [
            row
            for row in page
            if row.key is None
            or counts[row.topic, row.key] == len(keys[row.topic, row.key])
            or first.get((row.topic, row.key)) == row.number
        ]

    def _take(
        self, wanted: Sequence[_Candidate], token: str, lease_s: float
    ) -> Steps[list[Staged]]:
        if not wanted:
            return []
        dialect = self.dialect
        params = {"token": token, "lease_s": lease_s}
        ids = {"id": [row.id for row in wanted]}
        locked = yield dialect.statement(
            "relay_lease", {} if dialect.has("relay_take") else params, ids
        )
        if dialect.has("relay_take") and locked.rows:
            yield dialect.statement("relay_take", params, {"id": [row[0] for row in locked.rows]})
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
            headers=self.columns.headers_back(headers, key_id),
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

    def left(self, taken: Taken) -> Steps[bool]:
        """Say whether rows that a relay takes are due or leased."""
        found = yield Read(self.dialect.statement("relay_left", taken.params, taken.rows))
        return any(taken.fits(topic, kind) for topic, kind in found.rows)

    def adopt(
        self, route: str, adopts: Callable[[str, str, str | None, str | None], bool]
    ) -> Steps[bool]:
        """Give a route to rows for consumers of the database that are on another, or on none.

        Args:
            adopts: says of a route, topic, type and consumer of the cause whether its rows belong here.

        Returns: whether there were any.
        """
        found = yield Read(self.dialect.statement("relay_strays", {"route": route}))
        strays = [row for row in found.rows if adopts(*row)]
        for stray in strays:
            given = dict(zip(("from_route", "topic", "type", "cause_consumer"), stray, strict=True))
            count = _ADOPTED
            while count == _ADOPTED:
                yield Begin()
                moved = yield self.dialect.statement(
                    "relay_adopt", {**given, "route": route, "limit": _ADOPTED}
                )
                yield Commit()
                count = moved.count
        return bool(strays)


def _within(wanted: Iterable[_Candidate], payload_bytes: int) -> list[_Candidate]:
    """The first ones that fit, one at least; a key keeps no gap, since nothing after the last is taken."""
    taken: list[_Candidate] = []
    size_bytes = 0
    for row in wanted:
        size_bytes += row.size_bytes
        if taken and size_bytes > payload_bytes:
            break
        taken.append(row)
    return taken
