"""The verbs that read: counts, rates, pages of rows, single messages, failures, and the doctor's findings."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from datetime import timedelta
from difflib import get_close_matches
from typing import Any, Generic, NamedTuple

from txbox.admin import activity, findings, tables
from txbox.admin.activity import Activities, Snapshot, WorkerStatus
from txbox.admin.doctor import Diagnosis, worst_first
from txbox.admin.doctor.app import examine_app
from txbox.admin.doctor.database import examine
from txbox.admin.explain import Explanation, explained
from txbox.admin.facts import collect_facts
from txbox.admin.findings import Crew
from txbox.admin.reader import Audit, Operator, Rows, has_app
from txbox.admin.tables import (
    COUNTED_MAX,
    INBOX,
    Audited,
    ConsumerStatus,
    FailureGroup,
    Filter,
    InboxFilter,
    MessageT,
    OutboxFilter,
    OutboxMessage,
    PartitionStatus,
    QuarantineGroup,
    RowT,
    Table,
    TableSize,
    TopicStatus,
    age_of,
    stored_id,
)
from txbox.errors import ConfigurationError, Fault, StoreError
from txbox.outbox.routes import LOCAL
from txbox.store import partitions
from txbox.store import schema as schemas
from txbox.store.activity import Kind, Pause, pauses, workers
from txbox.store.dialect import FIRST, as_time

# failures that are grouped: of one consumer and status, at least and at most, and of all
_GROUPED_MIN, _GROUPED_MAX, _GROUPED = 100, 2_000, 3_000
# groups of failures whose error is read, too
_SHOWN_GROUPS = 20
# how long one statement of a page may take
_PAGE_MS = "5000"
# greater than every cursor of a table
_LAST = 2**63 - 1
# rows that a page looks through at first, and how many times as many it takes next
_STRETCH, _LONGER = 1_000, 8
# a stretch is not made longer if that might take more than so long: well below the bound on a statement
_STRETCH_S = 2.0
_OPEN = ("pending", "processing", "failed", "dead", "discarded")
_MOST = {"most": COUNTED_MAX + 1}
#: The query that reads by an index, and the statuses that this index knows.
_INDEXED = {
    "inbox": ("inbox_list_open", _OPEN),
    "outbox": ("outbox_list_ended", ("dead", "sent", "discarded")),
}
#: No id has a character behind this one.
_LAST_CHARACTER = "\U0010ffff"
# rows read to estimate the time at a cursor
_PROBED = 100
# transactions are committed so much later than others that began with them: rows of a time are looked for around it
_LONG_S = 60.0
# rows of the audit among which pauses are looked for
_AUDITED = 1_000
# characters of a name that is compared with others
_LIKE_MAX = 100
# what a relay should have sent
_UNSENT = ("due", "leased", "failed")


class Page(NamedTuple, Generic[RowT]):
    """Rows, the newest first, and the cursor of the next page; None at the end."""

    rows: list[RowT]
    behind: int | str | None


class Queries(Operator):
    """The verbs that change nothing; only `reveal` writes: its audit row."""

    # -- counts -------------------------------------------------------------------------------

    def status(self) -> Sequence[ConsumerStatus]:
        """Count every consumer's rows; the cost grows with the table."""
        queries = ("status", "oldest_unfinished", "quarantine_status")
        rows, ages, aside = (
            result.rows for result in self.in_transaction(*map(self.dialect.statement, queries))
        )
        counts: dict[str, dict[str, int]] = {}
        for consumer, status, count in rows:
            counts.setdefault(consumer, {})[status] = int(count)
        oldest = {consumer: age_of(age) for consumer, age in ages}
        quarantined = {consumer: int(count) for consumer, count in aside}
        return [
            ConsumerStatus(
                consumer=consumer,
                counts=counts.get(consumer, {}),
                quarantined=quarantined.get(consumer, 0),
                oldest_unfinished_s=oldest.get(consumer),
            )
            for consumer in sorted({*counts, *quarantined})
        ]

    def topics(self) -> Sequence[TopicStatus]:
        """Count every topic's outgoing messages; the cost grows with the table."""
        return _topics(self.rows("outbox_status"))

    def overview(self) -> tuple[Sequence[ConsumerStatus], Sequence[TopicStatus]]:
        """Count what is open, each count up to `COUNTED_MAX` and one: the cost does not grow with the tables."""
        consumers = [self.open_of(consumer) for consumer in self.consumers()]
        return consumers, self.unsent()

    def open_of(self, consumer: str) -> ConsumerStatus:
        """The part of `overview` that is about one consumer."""
        (row,) = self._page_rows("consumer_open", {"consumer": consumer, **_MOST})
        *counts, quarantined = map(int, row[: len(_OPEN) + 1])
        ages = [float(age) for age in row[len(_OPEN) + 1 :] if age is not None]
        return ConsumerStatus(
            consumer=consumer,
            counts=dict(zip(_OPEN, counts, strict=True)),
            quarantined=quarantined,
            oldest_unfinished_s=age_of(max(ages, default=None)),
        )

    def unsent(self) -> Sequence[TopicStatus]:
        """The part of `overview` that is about the outbox."""
        return _topics(self._page_rows("outbox_open", _MOST))

    def consumers(self) -> Sequence[str]:
        """Name the consumers that have rows in inbox or quarantine, "" among them; costs one index probe each."""
        return [str(name) for (name,) in self._page_rows("consumers")]

    def sizes(self) -> tuple[Sequence[TableSize], PartitionStatus | None]:
        """Read how large the tables and their indexes are, and how the inbox is partitioned."""
        sizes = [
            TableSize(
                table=str(name),
                table_bytes=int(size),
                index_bytes=None if indexes is None else int(indexes),
                partitions=int(count),
            )
            for name, size, indexes, count in self.rows("sizes")
        ]
        layout = self.on_database(partitions.layout, self.dialect)
        if layout.kind is None:
            return sizes, None
        ready = layout.ready_until
        return sizes, PartitionStatus(
            kind=layout.kind,
            count=len(layout.parts),
            ready_until=ready,
            missing=ready is not None and ready.timestamp() <= layout.clock_s,
        )

    def schema(self) -> schemas.SchemaState:
        """Read the version of the tables, and where they are."""
        return self.on_database(schemas.check, self.dialect)

    # -- what goes on -------------------------------------------------------------------------

    def activity(
        self,
        last: timedelta = timedelta(hours=1),
        *,
        step: timedelta = timedelta(minutes=1),
        only: tuple[Kind, str] | None = None,
    ) -> Activities:
        """Read what became of messages in the last hour, or another time, by consumer and by route of the outbox.

        It reads what workers and relays have counted, never the inbox: the cost grows with time and consumers.

        Args:
            last: whole minutes, up to `Retention.activity`.
            step: the time that one point stands for, in whole minutes; there is one point for each 5 minutes before the
                last hour, for each half hour before the last six, and for each three hours before the last day.
            only: "consumer" or "route", and its name: the counts of the others are not read.

        Raises:
            ConfigurationError: a step that is not whole minutes, or longer than the time.
        """
        return self.on_database(activity.read, self.dialect, last, step, only)

    def workers(self) -> Sequence[WorkerStatus]:
        """List the processes that work on this database, also those that vanished less than an hour ago."""
        known = self.on_database(workers, self.dialect)
        return activity.statuses(known, self.pauses())

    def pause_changes(self) -> Sequence[Audited]:
        """Read when consumers were paused and resumed, by whom and why, the newest first.

        They are looked for among the newest 1,000 changes.
        """
        rows = self._page_rows("pause_changes", {"limit": _AUDITED})
        return [
            _audited((0, at, actor, None, action, where, 1, reason))
            for at, actor, action, where, reason in rows
        ]

    def pauses(self) -> Sequence[Pause]:
        """List the paused consumers: since when, by whom and why."""
        return self.on_database(pauses, self.dialect)[1]

    def snapshot(self) -> Snapshot:
        """Read what goes on right now: rates of the last minute or two, workers, pauses."""
        return activity.snapshot(self.activity(timedelta(minutes=2)), self.workers(), self.pauses())

    def unserved(self, route: str) -> str | None:
        """Warn about a route that no relay of this App or of a running process is known to have.

        Returns: a sentence; None where a relay has it, or any App may take what goes there.
        """
        known = {served.name for served in self.app.routes.all()}
        known.update(*(worker.routes for worker in self.crew().alive))
        if not route or route in known or route.startswith(LOCAL):
            return None
        have = ", ".join(map(repr, sorted(known))) or "none"
        return (
            f"No relay is known to have the route {route!r}, so what goes there waits until one runs; "
            f"known routes are {have}."
        )

    def crew(self) -> Crew:
        """Read who is at work on this database, and what is paused."""
        return self.on_database(findings.crew, self.dialect)

    def idle(self, consumer: str) -> str | None:
        """Warn about a consumer that no running worker serves; None where one does."""
        crew = self.crew()
        if (pause := crew.pause_of(consumer)) is not None:
            return f"{consumer} is paused by {pause.actor}: its messages wait until it is resumed."
        if crew.running(consumer):
            return None
        return (
            f"No running worker has the consumer {consumer!r}: its messages wait until one starts."
        )

    def doctor(self, *, grace: timedelta | None = None) -> Diagnosis:
        """Find what is wrong, or soon will be: settings, tables, rows that wait and, with an App, its brokers.

        Args:
            grace: how long `txbox run` may drain; None leaves that out.

        Raises:
            StoreUnavailable: the database does not answer. A broker that does not answer, or a missing
                right, is listed in `unchecked`.

        It changes nothing, and the cost does not grow with the tables.
        """
        diagnosis = Diagnosis()
        self.on_database(examine, self.app, diagnosis)
        if has_app(self.app):
            examine_app(self.app, diagnosis, grace)
        diagnosis.findings = worst_first(diagnosis.findings)
        return diagnosis

    def check(self, crew: Crew | None = None) -> Diagnosis:
        """Find what is late, dead, paused or unserved, the worst first; the cost does not grow with the tables.

        `doctor` finds these too, beside what is wrong with settings, server and tables.

        Args:
            crew: who is at work, if that has been read.
        """
        return self.on_database(findings.read, self.app, self.dialect, crew)

    # -- pages --------------------------------------------------------------------------------

    def list(
        self, where: Filter[RowT, Any], *, limit: int = 50, before: int | str | None = None
    ) -> Sequence[RowT]:
        """Read a page, the newest first; for handlers with an order, also what each message waits for.

        Args:
            before: `tables.cursor_of` the last row of the page before.
        """
        return self.page(where, limit=limit, before=before).rows

    def page(
        self,
        where: Filter[RowT, Any],
        *,
        limit: int = 50,
        before: int | str | None = None,
        within_s: float | None = None,
    ) -> Page[RowT]:
        """Read a page of rows, the newest first, and the cursor of the next page.

        Args:
            before: the cursor of the page before; None for the first page.
            within_s: stop after about so long: where no index helps, a page may then have fewer rows than
                `limit`, or none, and more behind it. None looks through the whole table.

        Raises:
            ConfigurationError: `before` is no cursor of this table, or `limit` is less than one.
        """
        table, reached = where.table, None
        if limit < 1:
            raise ConfigurationError(f"A page has at least one row: limit={limit} has none.")
        params = {**where.params(), "limit": limit}
        if table.cursor is None:
            mark = None if before is None else tables.mark_of(str(before))
            rows = self._page_rows(f"{table.name}_list", {**params, **tables.mark_params(mark)})
        else:
            params |= {"floor": 0, "before": _LAST if before is None else tables.number_of(before)}
            indexed, statuses = _INDEXED[table.name]
            if where.message_id is None and where.id_prefix is None:
                params |= self._between(table, where, params["before"])
            if where.message_id is not None:
                rows = self._of_each(f"{table.name}_list_id", params, table)
            elif where.id_prefix is not None:
                # in order of their ids, and no further: with more characters there are fewer
                params["id_end"] = f"{params['id_prefix']}{_LAST_CHARACTER}"
                rows = self._of_each(f"{table.name}_list_prefix", params, table)
                named = table.key.index("message_id")
                return self._page(
                    table, sorted(rows, key=lambda row: str(row[named]))[:limit], None
                )
            elif where.status in statuses:
                rows = self._of_each(indexed, params, table)
            else:
                rows, reached = self._through(table, params, within_s)
        page = self._page(table, rows[:limit], reached)
        return (
            page._replace(behind=tables.cursor_of(page.rows[-1]))
            if len(page.rows) == limit
            else page
        )

    def _page(self, table: Table, records: Rows, behind: int | None) -> Page[Any]:
        columns = self.columns
        rows = [tables.row_of(columns, table, row) for row in records]
        return Page(self.with_waits(rows) if table is INBOX else rows, behind)

    def _between(self, table: Table, where: Filter[Any, Any], before: int) -> dict[str, int]:
        """The cursors between which a page has to search for rows of a time."""
        places: dict[str, int] = {}
        if where.since is None and where.until is None:
            return places
        ((newest,),) = self._page_rows(f"{table.name}_newest")
        if where.until is not None:
            upper_s = where.until.timestamp() + _LONG_S
            places["before"] = min(before, self._place_at(table, upper_s, int(newest), behind=True))
        if where.since is not None:
            lower_s = where.since.timestamp() - _LONG_S
            places["floor"] = self._place_at(table, lower_s, int(newest), behind=False)
        return places

    def _place_at(self, table: Table, at_s: float, newest: int, *, behind: bool) -> int:
        """A cursor after all rows older than that time, or before all rows; gaps may move it further."""
        low, high = 0, newest + 1
        while high - low > _STRETCH:
            middle = (low + high) // 2
            probe = {"floor": middle, "before": middle + 1 + _PROBED}
            moment = as_time(self._page_rows(f"{table.name}_moment", probe)[0][0])
            is_before = behind if moment is None else moment.timestamp() < at_s
            if is_before:
                low = middle
            else:
                high = middle
        return high + _PROBED if behind else low

    def _of_each(self, name: str, params: dict[str, Any], table: Table) -> Rows:
        """Read a page of rows that an index has in their order, consumer by consumer."""
        if "consumer" not in table.key or params["consumer"] is not None:
            return self._page_rows(name, params)
        rows = [
            row
            for consumer in self.consumers()
            for row in self._page_rows(name, {**params, "consumer": consumer})
        ]
        # after the cursor comes only the key of the codec
        return sorted(rows, key=lambda row: int(row[-2]), reverse=True)

    def _through(
        self, table: Table, params: dict[str, Any], within_s: float | None
    ) -> tuple[Rows, int | None]:
        """Read a page stretch by stretch, each longer than the one before; and say where it stopped, if early."""
        ((newest,),) = self._page_rows(f"{table.name}_newest")
        upper, stretch = min(int(params["before"]), int(newest) + 1), _STRETCH
        lowest = int(params["floor"])
        rows: list[Sequence[Any]] = []
        began = time.monotonic()
        while upper > lowest + 1:
            floor, looked = max(lowest, upper - 1 - stretch), time.monotonic()
            bounds = {"before": upper, "floor": floor, "limit": params["limit"] - len(rows)}
            try:
                rows += self._page_rows(f"{table.name}_list", {**params, **bounds})
            except StoreError as error:
                # rows of this stretch are larger, or colder, than those before
                if error.fault is not Fault.TIMEOUT or stretch <= _STRETCH:
                    raise
                stretch //= _LONGER
                continue
            if len(rows) >= params["limit"]:
                return rows, None
            now = time.monotonic()
            # the next one takes that many times as long
            longer = _LONGER if (now - looked) * _LONGER < _STRETCH_S else 1
            upper, stretch = floor + 1, stretch * longer
            if within_s is not None and now - began + (now - looked) * longer > within_s:
                return rows, upper if upper > lowest + 1 else None
        return rows, None

    def _page_rows(self, name: str, params: Mapping[str, Any] | None = None) -> Rows:
        """As `rows`, for a page: no statement of it may take long, where the database can say so."""
        if not self.dialect.has("bound_look"):
            return self.rows(name, params)
        bound = self.dialect.statement("bound_look", {"statement_ms": _PAGE_MS})
        return self.in_transaction(bound, self.dialect.statement(name, params))[-1].rows

    def names(self) -> Mapping[str, Sequence[str]]:
        """Name the values that a filter can have: by criterion, and of those that are few."""
        app, workers, unsent = self.app, self.crew().workers, self.unsent()
        topics = {
            *app.handlers.topics(),
            *(name for route in app.routes.all() for name in route.topics),
            *(waiting.topic for waiting in unsent),
        }
        for worker in workers:
            topics.update(*worker.sources.values())
        routes = {route.name for route in app.routes.all()}.union(
            (waiting.route for waiting in unsent), *(worker.routes for worker in workers)
        )
        names = {
            "consumer": {*app.handlers.consumers(), *self.consumers()},
            "topic": topics,
            "route": routes,
            "error_type": {group.error_type or "" for group in self.failures()},
        }  # fmt: skip
        return {column: sorted(known - {"", "*"}) for column, known in names.items()}

    def hint(
        self, where: Filter[Any, Any], known: Mapping[str, Sequence[str]] | None = None
    ) -> str:
        """Which name a filter may have meant that matches nothing; "" where nothing is like it.

        Args:
            known: what `names` has read, and not long ago; by default it is read now.
        """
        criteria = where.criteria()
        for column, names in (self.names() if known is None else known).items():
            name = criteria.get(column)
            if not isinstance(name, str) or name in names or len(name) > _LIKE_MAX:
                continue
            for like in get_close_matches(name, names, 1):
                return f"There is no {column.replace('_', ' ')} {name!r}; did you mean {like!r}?"
        return ""

    def failures(self, consumer: str | None = None) -> Sequence[FailureGroup]:
        """Group the newest dead and failed messages of each consumer by fingerprint, the largest group first.

        Args:
            consumer: only of this one.
        """
        groups: dict[tuple[str | None, str | None], FailureGroup] = {}
        consumers = self.consumers() if consumer is None else [consumer]
        kinds = [(name, status) for name in consumers for status in ("dead", "failed")]
        most = min(max(_GROUPED // (len(kinds) or 1), _GROUPED_MIN), _GROUPED_MAX)
        groups_of = {kind: self._failed(kind, most) for kind in kinds}
        read = {kind: sum(int(row[2]) for row in rows) for kind, rows in groups_of.items()}
        full = [kind for kind in kinds if read[kind] == most]
        if full:
            # those that have more share what the others do not need
            spare = max(0, _GROUPED - sum(read.values())) // len(full)
            most = min(most + spare, _GROUPED_MAX)
            groups_of |= {kind: self._failed(kind, most) for kind in full}
        for kind, rows in groups_of.items():
            more = kind in full and sum(int(row[2]) for row in rows) == most
            for row in rows:
                fresh = _failures(*kind, row, more=more)
                key = fresh.fingerprint, fresh.error_type
                groups[key] = groups[key].joined(fresh) if key in groups else fresh
        largest = sorted(groups.values(), key=lambda group: group.count, reverse=True)
        shown, others = largest[:_SHOWN_GROUPS], largest[_SHOWN_GROUPS:]
        return [*(replace(group, error=self._error_of(*group.sample)) for group in shown), *others]

    def _failed(self, kind: tuple[str, str], most: int) -> Rows:
        params = {"consumer": kind[0], "status": kind[1], "most": most}
        return self._page_rows("failure_groups", params)

    def quarantine_groups(self) -> Sequence[QuarantineGroup]:
        """Group the newest quarantined messages by reason, consumer, topic and producer, the largest group first."""
        rows = self._page_rows("quarantine_groups", {"most": _GROUPED_MAX})
        more = sum(int(row[4]) for row in rows) == _GROUPED_MAX
        groups = [
            QuarantineGroup(
                consumer=consumer, reason=reason, topic=topic, source=source, count=int(count),
                first_at=as_time(first) or FIRST, last_at=as_time(last) or FIRST, more=more,
            )
            for consumer, reason, topic, source, count, first, last in rows
        ]  # fmt: skip
        return sorted(groups, key=lambda group: group.count, reverse=True)

    def _error_of(self, consumer: str, message_id: str) -> str | None:
        """The first line of a message's error; None when it is gone."""
        for message in self.messages(InboxFilter(consumer=consumer, message_id=message_id)):
            return (message.error or "").partition("\n")[0] or None
        return None

    def audit(self, *, limit: int = 50, before: int | None = None) -> Sequence[Audited]:
        """Read what operators have changed, a row for each batch, the newest first.

        Args:
            before: the `number` of the last row of the page before.
        """
        rows = self._page_rows("audit_list", {"limit": limit, "before": before})
        return [_audited(row) for row in rows]

    # -- one message --------------------------------------------------------------------------

    def show(self, where: Filter[Any, MessageT], *, reveal: bool = False) -> Sequence[MessageT]:
        """Read a message with everything that is known of it.

        Args:
            where: consumer and id in the inbox, id in the outbox; in the quarantine id or hash, which may
                match several, of which the oldest 20 are read.
            reveal: include payload and header values, which may be personal or secret.

        Raises:
            ConfigurationError: the filter names no message.
        """
        if not where.named or (where.table is INBOX and not where.criteria().get("consumer")):
            raise ConfigurationError("Which message? Give its consumer and id.")
        messages = self.messages(where, reveal=reveal)
        if where.table is INBOX:
            return self.with_waits(messages)
        return [self._with_head(message) for message in messages]

    def _with_head(self, message: Any) -> Any:
        """An outgoing message with the state of the one that must leave before it."""
        if isinstance(message, OutboxMessage) and (waits := message.waits_for) is not None:
            for head in self.messages(OutboxFilter(message_id=waits.message_id)):
                waits = replace(waits, status=head.status, next_attempt_at=head.next_attempt_at)
                return replace(message, waits_for=waits)
        return message

    def reveal(
        self, where: Filter[Any, MessageT], *, actor: str | None = None, reason: str | None = None
    ) -> Sequence[MessageT]:
        """As `show`, with payload and header values; `txbox_audit` says who looked, and why, before they see it.

        Raises:
            ConfigurationError: the filter names no message.
        """
        messages = self.show(where)
        if not messages:
            return messages
        action = where.table.audited.format("reveal")
        self.announce(Audit.of(actor, reason), action, where, len(messages))
        return self.show(where, reveal=True)

    def explain(self, message_id: str, *, consumer: str | None = None) -> Explanation:
        """Say where one message stands, why, and what would let it go on.

        Args:
            consumer: only in its inbox and quarantine; by default those of all consumers, and the outbox.

        Nothing is changed, and no lock is waited for. What depends on handlers and routes needs an App.
        """
        return explained(collect_facts(self, stored_id(message_id), consumer), self.app)


# -- what the queries answer ------------------------------------------------------------------


def _topics(rows: Rows) -> list[TopicStatus]:
    """Put the rows of `outbox_status` together by topic and route."""
    routes: dict[tuple[str, str], list[Sequence[Any]]] = {}
    for topic, route, *counted in rows:
        routes.setdefault((topic, route), []).append(counted)
    return [
        TopicStatus(
            topic=topic,
            route=route,
            counts={status: int(count) for status, count, _ in counted},
            oldest_waiting_s=age_of(
                max((age for status, _, age in counted if status in _UNSENT), default=None)
            ),
        )
        for (topic, route), counted in sorted(routes.items())
    ]


def _failures(consumer: str, status: str, row: Sequence[Any], *, more: bool) -> FailureGroup:
    fingerprint, error_type, count, first, last, message_id, hour = row
    # clocks differ, and half of nothing is rounded away from it
    ago = max(0, int(hour))
    # an altered time counts as the oldest
    first_at, last_at = as_time(first) or FIRST, as_time(last) or FIRST
    return FailureGroup(
        fingerprint=fingerprint,
        error_type=error_type,
        count=int(count),
        consumers={consumer: {status: int(count)}},
        first_at=first_at,
        last_at=last_at,
        sample=(consumer, message_id),
        by_hour=tuple(int(count) if ago == 23 - place else 0 for place in range(24)),
        more=more,
    )


def _audited(row: Sequence[Any]) -> Audited:
    values = dict(zip((item.name for item in fields(Audited)), row, strict=True))
    values["recorded_at"] = as_time(values["recorded_at"])
    text = values["filter"]
    with tables.shown(values, "filter", {"(cannot be shown)": str(text)}):
        values["filter"] = dict(json.loads(text))
    return Audited(**values)
