"""The outbox's operations: leasing rows, and what becomes of them."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import starmap
from operator import attrgetter
from typing import Any, NamedTuple

from txbox.errors import LONGEST, UnreadableMessage
from txbox.message import NO_HEADERS, Message
from txbox.session import Result, Session, Statement, Transaction
from txbox.store.codec import Columns, Row
from txbox.store.dialect import Dialect, as_time

# pages per transaction, so that a long run of waiting keys does not block the others
_PAGES = 5
_START = (None, 0)
# a row is dated by the start of its transaction, so one that commits late lies behind the current position
_BACK_S = 1.0
# rows moved per transaction
_ADOPTED = 1000


class Staged(NamedTuple):
    """A row leased by a relay.

    Args:
        number: its position in its key's order.
        attempts: failures so far.
        unreadable: why its row cannot be read; its message then has neither payload nor headers.
    """

    message: Message[Any]
    number: int
    attempts: int
    unreadable: UnreadableMessage | None = None

    @property
    def id(self) -> str:
        """The message's id, which is never None here."""
        return str(self.message.id)

    @property
    def run(self) -> tuple[str, str | None]:
        """The topic and key whose rows are sent in order, unless the key is None."""
        return self.message.topic, self.message.key


@dataclass(slots=True)
class LeasedPage:
    """The result of one query of the outbox.

    Args:
        rows: leased, in the order in which they must be sent.
        more: there may be more to take right now.
    """

    rows: list[Staged] = field(default_factory=list[Staged])
    more: bool = False


class _Candidate(NamedTuple):
    id: str
    number: int
    topic: str
    key: str | None
    available_at: Any
    size_bytes: int
    type: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayScope:
    """Which rows a relay takes: those of its route, and some that were staged without one.

    Args:
        whole: all rows of the route, whatever their topic.
        topics: only rows with these topics; with `others`, all but these.
        fits: whether a topic and type have a consumer. Rows that do not fit wait, without holding up
            their key.
    """

    route: str
    topics: Sequence[str] = ()
    others: bool = True
    whole: bool = False
    fits: Callable[[str, str | None], bool] = lambda _topic, _type: True

    def only(self, topic: str) -> RelayScope:
        """Return the same route with this topic alone."""
        return replace(self, topics=[topic], others=False, whole=False)

    def without(self, topics: Collection[str]) -> RelayScope:
        """Return the same route without these topics; of `whole`, none can be excluded."""
        if self.others:
            return replace(self, topics=[*self.topics, *topics])
        return replace(self, topics=[topic for topic in self.topics if topic not in topics])

    @property
    def params(self) -> dict[str, Any]:
        """The parameters of the queries that find these rows."""
        return {"route": self.route, "whole": self.whole, "named": not self.others}

    @property
    def rows(self) -> dict[str, Sequence[str]]:
        """The topics. An empty text stands for no topics, because the list must not be empty."""
        return {"topic": self.topics or [""]}

    def routes(self, topic: str) -> Sequence[str]:
        """Return the routes whose rows share an order with those of this topic."""
        return (self.route, "") if (topic in self.topics) is not self.others else (self.route,)


class OutboxStore:
    """The relay's statements in one dialect.

    Each query continues where the last one ended, and starts over at the end or after a second. So rows
    that wait behind the head of their key, however many, cannot hide those of other keys behind them.
    """

    def __init__(self, dialect: Dialect, columns: Columns) -> None:
        self.dialect = dialect
        self.columns = columns
        self._after: tuple[Any, int] = _START
        self._back_at, self._back_s = 0.0, _BACK_S

    async def lease(
        self,
        db: Session,
        *,
        token: str,
        limit: int,
        payload_bytes: int,
        lease_s: float,
        scope: RelayScope,
    ) -> LeasedPage:
        """Lease due rows in a transaction of its own.

        Of each key only the first open rows are leased, without a gap, so that no relay overtakes
        another, or a row that failed.

        Args:
            limit: rows, 1 or more.
            payload_bytes: no more rows are leased once their payloads exceed this.
            lease_s: seconds after which another relay may take them.
        """
        leased_page = LeasedPage()
        if time.monotonic() >= self._back_at:
            self._after, self._back_at = _START, time.monotonic() + self._back_s
            # later each time that it finds nothing before: else it might never see the rows behind those that wait
            self._back_s *= 2
        (result,) = await db.begin((self._paging(limit, scope),))
        overtaken: list[str] = []
        committed = False
        for number in range(_PAGES):
            before = self._after
            if number:
                result = await db.execute(self._paging(limit, scope))
            page = self._page(result)
            leased_page.more = len(page) == limit
            page = [row for row in page if scope.fits(row.topic, row.type)]
            wanted = await self._eligible(db, page, scope) if page else []
            fitting = _within(wanted, payload_bytes)
            if fitting:
                params = {"token": token, "lease_s": lease_s, "route": scope.route}
                ids = {"id": [row.id for row in fitting]}
                committed = self.columns.codec is None and "relay_lease" not in self.dialect.seconds
                if committed:
                    statement = self.dialect.statement("relay_lease", params, ids)
                    (leased,) = await db.commit((statement,))
                else:
                    # read before the COMMIT: a codec may raise, for instance while its key service is away
                    leased = await self.dialect.take(db, "relay_lease", params, ids)
                leased_page.rows, overtaken = self._leased(fitting, leased)
            if not leased_page.more:
                self._after = _START
            if len(fitting) < len(wanted):
                self._after, leased_page.more = before, True
            if leased_page.rows or not leased_page.more:
                self._back_s = _BACK_S
                break
            if committed:
                break
        release = (self.release(overtaken, token=token),) if overtaken else ()
        if not committed:
            await db.commit(release)
        elif release:
            await db.together(release)
        return leased_page

    def _paging(self, limit: int, scope: RelayScope) -> Statement:
        after_at, after_number = self._after
        params = {
            **scope.params, "after_at": after_at, "after_number": after_number, "limit": limit,
        }  # fmt: skip
        return self.dialect.statement("relay_page", params, scope.rows)

    def _page(self, result: Result) -> list[_Candidate]:
        page = list(starmap(_Candidate, result.rows))
        if page:
            self._after = (page[-1].available_at, page[-1].number)
        return page

    async def _eligible(
        self, db: Transaction, page: Sequence[_Candidate], scope: RelayScope
    ) -> list[_Candidate]:
        """Return the rows with nothing of their key ahead of them except rows of this page."""
        page = sorted(page, key=attrgetter("number"))
        keys = Counter((row.topic, row.key) for row in page if row.key is not None)
        if not keys:
            return page
        routes_of = {topic: scope.routes(topic) for topic in {topic for topic, _ in keys}}
        wanted = [(route, topic, key) for topic, key in keys for route in routes_of[topic]]
        routes, topics, names = zip(*wanted, strict=True)
        heads = await db.execute(
            self.dialect.statement(
                "relay_heads",
                {"last": page[-1].number},
                {"route": routes, "topic": topics, "key": names},
            )
        )
        first: dict[tuple[str, str], int] = {}
        counts: Counter[tuple[str, str]] = Counter()
        for topic, key, kind, head, count in heads.rows:
            if scope.fits(topic, kind):
                first[topic, key] = min(head, first.get((topic, key), head))
                counts[topic, key] += count
        if counts == keys:
            return page
        return [
            row
            for row in page
            if row.key is None
            or counts[row.topic, row.key] == keys[row.topic, row.key]
            or first.get((row.topic, row.key)) == row.number
        ]

    def _leased(
        self, wanted: Sequence[_Candidate], result: Result
    ) -> tuple[list[Staged], list[str]]:
        """Return the rows that were leased, in order, and the ids to release at once."""
        rows = sorted(map(self._staged, result.rows), key=attrgetter("number"))
        if len(rows) == len(wanted):
            return rows, []
        leased = {row.id for row in rows}
        # another relay was faster with an earlier row of the key, so the later rows must stay behind it
        overtaken = {
            (row.topic, row.key) for row in wanted if row.key is not None and row.id not in leased
        }
        behind = [row.id for row in rows if row.run in overtaken]
        return [row for row in rows if row.run not in overtaken], behind

    def _staged(self, row: Sequence[Any]) -> Staged:
        (row_id, number, topic, kind, key, content_type, headers, payload, key_id, at, attempts) = (
            row[:11]
        )
        carried, unreadable = NO_HEADERS, None
        try:
            bound = Row(None, row_id)
            carried = self.columns.headers_back(headers, bound)
            payload = self.columns.payload_back(payload, key_id, bound)
        except UnreadableMessage as error:
            payload, unreadable = None, error
        message: Message[Any] = Message(
            id=row_id,
            topic=topic,
            type=kind,
            key=key,
            content_type=content_type,
            headers=carried,
            payload=payload,
            time=as_time(at),
        )
        return Staged(message, number, attempts, unreadable)

    # -- what becomes of them -----------------------------------------------------------------

    def sent(self, ids: Sequence[str], *, token: str, keep: bool) -> Statement:
        """Return the statement that marks leased rows sent or deletes them; its count is how many were still ours."""
        return self.dialect.statement(
            "relay_kept" if keep else "relay_sent", {"token": token}, {"id": ids}
        )

    def failed(
        self, row: Staged, *, token: str, dead: bool, delay_s: float, error_type: str, error: str
    ) -> Statement:
        """Return the statement that records that a leased row was not sent; it is due again after `delay_s`."""
        return self.dialect.statement(
            "relay_failed",
            {
                "id": row.id,
                "token": token,
                "status": "dead" if dead else "pending",
                # what a destination asks for may be any time
                "delay_s": min(delay_s, LONGEST.total_seconds()),
                "error_type": error_type,
                "error": self.columns.error(error, Row(None, row.id)),
            },
        )

    def release(self, ids: Sequence[str], *, token: str) -> Statement:
        """Return the statement that gives leased rows back at once."""
        return self.dialect.statement("relay_release", {"token": token}, {"id": ids})

    async def has_rows(self, db: Session, scope: RelayScope) -> bool:
        """Whether rows that a relay takes are due or leased."""
        result = await db.alone(self.dialect.statement("relay_left", scope.params, scope.rows))
        return any(scope.fits(topic, kind) for topic, kind in result.rows)

    async def adopt(
        self,
        db: Session,
        route: str,
        adopts_after: Callable[[str, str, str | None, str | None], float | None],
    ) -> bool:
        """Assign a route to rows for consumers on this database that have another route, or none.

        Args:
            adopts_after: for how many seconds rows of a given route, topic, type and cause's consumer must be due
                until they belong here; 0 is before they are, and None never.

        Returns: whether there were any.
        """
        result = await db.alone(self.dialect.statement("relay_strays", {"route": route}))
        adopted = False
        for stray in result.rows:
            due_s = adopts_after(*stray)
            if due_s is None:
                continue
            sort = dict(zip(("from_route", "topic", "type", "cause_consumer"), stray, strict=True))
            count = _ADOPTED
            while count == _ADOPTED:
                params = {**sort, "route": route, "due_s": due_s, "limit": _ADOPTED}
                count = (await self.dialect.run(db, "relay_adopt", params)).count
                adopted = adopted or count > 0
        return adopted


def _within(wanted: Iterable[_Candidate], payload_bytes: int) -> list[_Candidate]:
    """Return the first rows that fit, at least one. No key gets a gap: nothing after the last one is returned."""
    chosen: list[_Candidate] = []
    size_bytes = 0
    for row in wanted:
        size_bytes += row.size_bytes
        if chosen and size_bytes > payload_bytes:
            break
        chosen.append(row)
    return chosen
