"""The relay: sends staged messages from the outbox to their destinations.

One relay serves one route, and takes no row of another. It leases rows, publishes them, waits for the
confirmations, and only then marks the rows. After a crash in between they are sent again under the same
ids. Several relays, in one process or on many machines, share the work through their leases.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Coroutine, Sequence
from functools import partial
from typing import Any, TypeVar

from txbox import session as points
from txbox.alerts import quarantined
from txbox.app import OUTBOX, App
from txbox.boundaries import Boundary, is_contents
from txbox.boundaries import log as _log
from txbox.brokers.base import KeepsRuns, Publisher
from txbox.brokers.envelope import as_binary, as_structured
from txbox.connections.base import Listening
from txbox.errors import (
    BrokerError,
    BrokerUnavailable,
    DestinationRefused,
    MessageRefused,
    NotTried,
    StoreError,
    UnusableMessage,
)
from txbox.events import (
    Event,
    MessageQuarantined,
    MessageStored,
    OutgoingDead,
    OutgoingFailed,
    OutgoingSent,
    RelayPaused,
    RelayResumed,
)
from txbox.handlers import Handler
from txbox.message import Message
from txbox.outbox.routes import Route
from txbox.policy import Backoff
from txbox.processing.failure import printable
from txbox.processing.intake import presentable
from txbox.session import Session, Statement
from txbox.store.activity import Trouble
from txbox.store.codec import Arrival
from txbox.store.outbox import LeasedPage, OutboxStore, RelayScope, Staged
from txbox.worker.agenda import Run
from txbox.worker.driving import thread, trouble_of

T = TypeVar("T")

#: Between two looks at the outbox while messages flow.
_BUSY_S = 0.02
_TOGETHER_S = 0.005
#: The shortest and the longest pause while the broker is away, and how often a pause checks for a stop.
_PAUSE_S = (0.2, 10.0)
_STOP_S = 0.2
#: Of a topic that its destination refuses: rows that find out whether it still does, and topics that pause singly.
_PROBE_ROWS = 10
_PAUSED_TOPICS = 100
_REST_S = 2.0
#: Longer than a pause and a try take: what waited for the broker is gone, and nothing asks it whether it is back.
_FORGET_S = 60.0
#: The shortest and the longest time between two looks for rows to adopt.
_ADOPT_S = (1.0, 10.0)
_ERROR_BYTES = 1024
_OTHER_PAYLOAD = "A different payload was staged under a known id."
# `confirm_within` applies to this many at a time, however large the batch is
_WAVE = 500


class TopicPause:
    """A topic that its destination refuses, by the monotonic clock."""

    __slots__ = ("away", "backoff", "since", "until")

    def __init__(self) -> None:
        self.since = self.until = time.monotonic()
        self.away: tuple[Trouble, float] | None = None
        self.backoff = Backoff(*_PAUSE_S)


class Relay:
    """Sends the staged messages of one route until it is stopped.

    Once the worker is stopping it leases nothing more; what is being published is still marked. Where the agenda polls
    the outbox, an idle relay does not.

    Guarantee: a committed row is published at least once, always under its own id, and marked only
    after its confirmation. A later row of a key is published only after every earlier row that was
    committed before it was leased is confirmed or dead.
    """

    def __init__(self, run: Run, route: Route) -> None:
        app = run.app
        self._app = app
        self._route = route
        self._agenda = run.agenda
        self._perform = run.driver.perform
        self._stop = run.stopping.is_set
        self._policy = app.relaying
        self._store = self._new_store()
        self._publisher: Publisher | None = None
        self._runs = False
        self._woken = threading.Event()
        self._staged = False
        # between two looks at the outbox
        self._polls = Backoff(_BUSY_S, self._policy.poll.total_seconds(), spread=(0.75, 1.0))
        # while the broker is away
        self._paused_at: float | None = None
        self._backoff = Backoff(*_PAUSE_S)
        self._pause_s = 0.0
        self._paused_topics: dict[str, TopicPause] = {}
        self._lease_s = 0.0
        # why nothing is sent, and by the monotonic clock when it was last seen
        self._away: tuple[Trouble, float] | None = None
        self._adopts, self._adopt_at = Backoff(*_ADOPT_S), 0.0
        local = route.destination is None
        self._scope = RelayScope(
            route=route.name, topics=route.topics, others=route.others, whole=local,
            **({"fits": self._consumed} if local else {}),
        )  # fmt: skip
        self.route = route.name
        #: The destination, for people and in metrics.
        self.name = "local"
        if route.destination is not None:
            self._publisher = route.destination.publisher()
            self._runs = isinstance(self._publisher, KeepsRuns) and self._publisher.keeps_runs
            self.name = self._publisher.name

    def run(self) -> None:
        """Relay until stopped, then close the publisher."""
        try:
            while not self._stop():
                try:
                    more = self.turn()
                except Exception as error:  # noqa: BLE001  # see contain
                    self._app.protocol.contain(Boundary.RELAY, error)
                    self._broker_away(error)
                    more = False
                if not more:
                    self._wait()
        finally:
            self.close()

    def look(self, *, staged: bool = False) -> None:
        """Look at the outbox, from any thread.

        Args:
            staged: something may come with a transaction that has not ended yet, so look again soon.
        """
        if staged:
            self._staged = True
        self._woken.set()

    def close(self) -> None:
        """Close the publisher's connections."""
        if self._publisher is None:
            return
        try:
            self._publisher.close()
        except Exception as error:  # noqa: BLE001  # the publisher's
            # nothing is pending: every answer has been waited for
            _log.warning(
                "The publisher %s did not close cleanly (boundary: %s): %s",
                self.name, Boundary.PUBLISH, error, exc_info=not isinstance(error, BrokerError),
            )  # fmt: skip

    def turn(self) -> bool:
        """Lease and send one batch; returns whether there may be more to do at once."""
        if self._publisher is None and time.monotonic() >= self._adopt_at:
            self._adopt()
        if self._paused_topics:
            # each lease passes over their rows, however many: this must not be most of what the database does
            time.sleep(min(3 * self._lease_s, _REST_S))
        token = secrets.token_hex(16)
        lease, started = self._next_lease(), time.monotonic()
        batch = self._with_retries(lambda db: lease(db, token=token))
        self._lease_s = time.monotonic() - started
        if batch is None:
            return False
        if not batch.rows:
            return batch.more
        points.at("relay:leased")
        self._polls.reset()
        rows = self._readable(batch.rows, token)
        send = self._deliver if self._publisher is None else self._publish
        return send(rows, token) if rows else True

    def _readable(self, rows: Sequence[Staged], token: str) -> Sequence[Staged]:
        """Record the failure of rows that cannot be read, and give back those behind them in their keys."""
        failures = [
            (row, *self._failure(row, row.unreadable, token))
            for row in rows
            if row.unreadable is not None
        ]
        if not failures:
            return rows
        keys = {row.run for row, *_ in failures if row.message.key is not None}
        readable = [row for row in rows if row.unreadable is None]
        behind = [row.id for row in readable if row.run in keys]
        statements = [statement for _, statement, _ in failures]
        if behind:
            statements.append(self._store.release(behind, token=token))
        results = self._with_retries(lambda db: db.together(tuple(statements)))
        for (*_, event), result in zip(failures, results or (), strict=False):
            if result.count:
                self._app.events.emit(event)
        return [row for row in readable if row.run not in keys]

    def _next_lease(self) -> Callable[..., Coroutine[Any, Any, LeasedPage]]:
        """Return the query for the next rows: of all topics that take some, or of one whose pause is over."""
        now = time.monotonic()
        # while the broker is away, a single row probes it
        limit = self._policy.batch if self._paused_at is None else 1
        store, scope = self._store, self._scope
        if self._paused_topics:
            scope = scope.without(self._paused_topics)
            for topic, pause in self._paused_topics.items():
                if pause.until <= now:
                    pause.until = now + pause.backoff.pause_s
                    # several: a message that is never confirmed must not seem to be a topic that takes none
                    limit = min(limit, _PROBE_ROWS)
                    store, scope = self._new_store(), scope.only(topic)
                    break
        return partial(
            store.lease,
            limit=limit,
            payload_bytes=self._app.batching.payload_bytes,
            lease_s=self._policy.lease.total_seconds(),
            scope=scope,
        )

    def _new_store(self) -> OutboxStore:
        return OutboxStore(self._app.store.dialect, self._app.store.columns)

    def has_rows(self) -> bool:
        """Whether rows that this relay takes are due or leased."""
        return self._perform(self._store.has_rows, self._scope)

    def _adopt(self) -> None:
        """Adopt rows of an earlier or later release of this app, which had other consumers."""
        after = self._app.routes.adopts_after
        adopted = None
        try:
            adopted = self._with_retries(lambda db: self._store.adopt(db, self._route.name, after))
        except Exception as error:  # noqa: BLE001  # see contain
            self._app.protocol.contain(Boundary.RELAY, error, retry_in_s=self._adopts.pause_s)
        if adopted:
            self._adopts.reset()
        self._adopt_at = time.monotonic() + self._adopts.next_s()

    def _consumed(self, topic: str, kind: str | None) -> bool:
        return bool(self._app.handlers.matching(topic, kind))

    def _wait(self) -> None:
        if self._paused_at is not None:
            # staging more does not bring the broker back
            ends = time.monotonic() + self._pause_s
            while not self._stop() and (remaining_s := ends - time.monotonic()) > 0:
                time.sleep(min(remaining_s, _STOP_S))
            return
        idle = self._agenda.polls_outbox and self._polls.at_longest
        wait_s = None if idle else self._polls.next_s()
        if self._paused_topics:
            probe_at = min(pause.until for pause in self._paused_topics.values())
            probe_s = max(probe_at - time.monotonic(), _BUSY_S)
            wait_s = probe_s if wait_s is None else min(wait_s, probe_s)
        self._woken.wait(wait_s)
        if self._staged:
            # the transaction that staged commits a moment later, and rows seldom come alone
            time.sleep(_TOGETHER_S)
        self._woken.clear()
        if self._staged:
            self._staged = False
            self._polls.reset()

    # -- to a broker --------------------------------------------------------------------------

    def _publish(self, rows: Sequence[Staged], token: str) -> bool:
        """Publish in waves, with one message per key unless the publisher keeps runs; record what became of each."""
        started = time.monotonic()
        within_s = self._policy.confirm_within.total_seconds()
        # another relay may take over whatever would be confirmed later than this
        until = started + self._policy.lease.total_seconds() - 2 * within_s
        confirmed: list[Staged] = []
        failed: list[tuple[Staged, Exception]] = []
        unsent: list[Staged] = []
        paused: Collection[str] = ()
        reachable = True
        for part in _waves(rows, runs=self._runs):
            unsent += [row for row in part if row.message.topic in paused]
            wave = [row for row in part if row.message.topic not in paused]
            wave = self._behind(wave, unsent, failed)
            if not wave:
                continue
            answers = (
                self._answers(wave, within_s)
                if reachable and not self._stop() and time.monotonic() < until
                else None
            )
            if answers is None:
                reachable = False
                unsent += wave
                continue
            stopped: set[tuple[str, str | None]] = set()
            for row, answer in zip(wave, answers, strict=True):
                if answer is None:
                    confirmed.append(row)
                    continue
                # of a run the first one pays
                if isinstance(answer, NotTried) or row.run in stopped:
                    unsent.append(row)
                else:
                    failed.append((row, answer))
                if row.message.key is not None:
                    stopped.add(row.run)
            if unsent or self._paused_topics:
                reachable = self._pause_topics(wave, answers)
                paused = self._paused_topics
        points.at("relay:published")
        self._record(confirmed, failed, unsent, token, started)
        points.at("relay:marked")
        return reachable and self._paused_at is None

    def _record(
        self,
        confirmed: Sequence[Staged],
        failed: Sequence[tuple[Staged, Exception]],
        unsent: Sequence[Staged],
        token: str,
        started: float,
    ) -> None:
        """Write down what became of the rows. What is not recorded, or another relay has by now, is sent again."""
        statements: list[Statement] = []
        if confirmed:
            ids, keep = [row.id for row in confirmed], bool(self._policy.keep_sent)
            statements.append(self._store.sent(ids, token=token, keep=keep))
        failures = [self._failure(row, error, token) for row, error in failed]
        statements += [statement for statement, _ in failures]
        if unsent:
            statements.append(self._store.release([row.id for row in unsent], token=token))
        if not statements:
            return
        counts = self._marked(statements)
        self._report_sent(counts.pop(0) if confirmed else 0, started)
        for (_, event), count in zip(failures, counts, strict=False):
            if count:
                self._app.events.emit(event)

    @staticmethod
    def _behind(
        rows: list[Staged], unsent: list[Staged], failed: Sequence[tuple[Staged, Exception]]
    ) -> list[Staged]:
        """Move rows behind one of their key that was not sent to `unsent`; returns the others."""
        if not (rows and (unsent or failed)):
            return rows
        first: dict[tuple[str, str | None], int] = {}
        for row in (*unsent, *(row for row, _ in failed)):
            if row.message.key is not None:
                first[row.run] = min(row.number, first.get(row.run, row.number))
        behind = {row.id for row in rows if first.get(row.run, row.number) < row.number}
        unsent += [row for row in rows if row.id in behind]
        return [row for row in rows if row.id not in behind]

    def _marked(self, statements: list[Statement]) -> list[int]:
        """Record what became of rows, together or, where one statement fails unexpectedly, each by itself.

        Returns: how many rows each has changed; 0 for what could not be recorded.
        """
        try:
            results = self._with_retries(lambda db: db.together(tuple(statements)))
        except Exception as error:  # noqa: BLE001  # see contain
            self._app.protocol.contain(Boundary.RELAY, error)
            if len(statements) == 1:
                return [0]
            return [count for statement in statements for count in self._marked([statement])]
        return [0] * len(statements) if results is None else [result.count for result in results]

    def _answers(
        self, wave: Sequence[Staged], within_s: float
    ) -> Sequence[Exception | None] | None:
        """Publish one wave; None if the broker cannot be reached."""
        began_ns = time.time_ns()
        try:
            answers = self._published(wave, within_s)
        except BrokerUnavailable as error:
            self._broker_away(error)
            return None
        raised = [answer for answer in answers if answer and not isinstance(answer, BrokerError)]
        tried = sum(type(answer) is not NotTried for answer in answers)
        if raised and len(raised) == tried and (len(raised) > 1 or self._paused_at is not None):
            # the publisher, as it seems, and no row: the first one pays, so that one that is to blame does not stay
            self._broker_away(raised[0])
            untried = NotTried("The publisher raised on every message.")
            return [answer if answer is raised[0] else untried for answer in answers]
        self._trace(wave, answers, began_ns)
        self._works()
        return answers

    def _works(self) -> None:
        if self._paused_at is not None:
            paused_s = time.monotonic() - self._paused_at
            self._app.events.emit(RelayResumed(publisher=self.name, paused_s=paused_s))
            self._paused_at = self._away = None

    def troubles(self) -> list[Trouble]:
        """Why nothing is sent, on the whole route or of single topics."""
        every = [self._away, *(pause.away for pause in list(self._paused_topics.values()))]
        now = time.monotonic()
        return [away[0] for away in every if away is not None and now - away[1] < _FORGET_S]

    def _trouble(
        self, error: object, since: float, topic: str | None = None
    ) -> tuple[Trouble, float]:
        now = time.monotonic()
        trouble = trouble_of(
            self._app, "route", self._route.name, error, for_s=now - since, topic=topic
        )
        return trouble, now

    def _published(self, wave: Sequence[Staged], within_s: float) -> list[Exception | None]:
        """The answer for each row; the wave is divided until what raises unexpectedly is alone.

        What was sent is then sent once more, under the same id.
        """
        assert self._publisher is not None
        try:
            messages = [self._outgoing(row) for row in wave]
            answers = self._publisher.publish(messages, within_s)
            # pairs of a row and its answer, so that one too few raises here
            return [answer for _, answer in zip(wave, answers, strict=True)]
        except Exception as error:
            if isinstance(error, BrokerUnavailable) or not is_contents(error):
                raise
            if len(wave) == 1:
                self._app.protocol.contain(Boundary.PUBLISH, error)
                return [error]
            half = (len(wave) + 1) // 2
            first = self._published(wave[:half], within_s)
            stopped = {
                row.run
                for row, answer in zip(wave, first, strict=False)
                if answer is not None and row.message.key is not None
            }
            rest = [row for row in wave[half:] if row.run not in stopped]
            second = iter(self._published(rest, within_s) if rest else ())
            behind = NotTried("An earlier message of its key was not sent.")
            return [
                *first,
                *(behind if row.run in stopped else next(second) for row in wave[half:]),
            ]

    def _trace(
        self, wave: Sequence[Staged], answers: Sequence[Exception | None], began_ns: int
    ) -> None:
        if (tracing := self._app.tracing) is None:
            return
        try:
            tracing.sent(self.name, [row.message for row in wave], answers, began_ns)
        except Exception as error:  # noqa: BLE001  # see contain
            self._app.protocol.contain(Boundary.OBSERVER, error)

    def _outgoing(self, row: Staged) -> Message[Any]:
        route, publisher = self._route, self._publisher
        if route.render is not None:
            return route.render(row.message)
        if route.cloudevents is None or publisher is None:
            return row.message
        assert route.source is not None
        if route.cloudevents == "structured":
            return as_structured(row.message, route.source)
        return as_binary(row.message, route.source, publisher.event_prefix)

    def _pause_topics(self, wave: Sequence[Staged], answers: Sequence[Exception | None]) -> bool:
        """Pause the topics that are refused, resume those that are not; returns whether the broker takes anything."""
        refusals: dict[str, DestinationRefused] = {}
        answered: set[str] = set()
        for row, answer in zip(wave, answers, strict=True):
            if isinstance(answer, DestinationRefused):
                refusals.setdefault(row.message.topic, answer)
            elif not isinstance(answer, NotTried):
                answered.add(row.message.topic)
        now = time.monotonic()
        for topic in answered.intersection(self._paused_topics).difference(refusals):
            paused_s = now - self._paused_topics.pop(topic).since
            self._app.events.emit(RelayResumed(publisher=self.name, topic=topic, paused_s=paused_s))
            # the next lease must not begin behind its rows
            self._store = self._new_store()
        for topic, refusal in refusals.items():
            if topic not in self._paused_topics and len(self._paused_topics) >= _PAUSED_TOPICS:
                # so many do not pause singly
                self._broker_away(refusal)
                return False
            pause = self._paused_topics.setdefault(topic, TopicPause())
            pause_s = pause.backoff.next_s()
            pause.until = now + pause_s
            pause.away = self._trouble(refusal, pause.since, topic)
            self._app.events.emit(
                RelayPaused(
                    publisher=self.name,
                    topic=topic,
                    retry_in_s=pause_s,
                    reason=self._app.store.columns.redact.error(str(refusal)),
                )
            )
        return True

    def _broker_away(self, error: Exception) -> None:
        if self._paused_at is None:
            self._paused_at = time.monotonic()
            self._backoff.reset()
        self._pause_s = pause_s = self._backoff.next_s()
        reason = f"{'' if isinstance(error, BrokerError) else f'{type(error).__name__}: '}{error}"
        self._away = self._trouble(reason, self._paused_at)
        self._app.events.emit(
            RelayPaused(
                publisher=self.name,
                reason=self._app.store.columns.redact.error(reason),
                retry_in_s=pause_s,
            )
        )

    def _failure(self, row: Staged, error: Exception, token: str) -> tuple[Statement, Event]:
        attempt, retry = row.attempts + 1, self._policy.retry
        dead = isinstance(error, MessageRefused) or attempt >= retry.max_attempts
        after_s = error.retry_after_s if isinstance(error, BrokerError) else None
        delay_s = 0.0 if dead else max(retry.delay_s(attempt), after_s or 0.0)
        columns = self._app.store.columns
        text = printable(columns.redact.error(str(error)), _ERROR_BYTES)
        kind = OutgoingDead if dead else OutgoingFailed
        return self._store.failed(
            row, token=token, dead=dead, delay_s=delay_s, error_type=type(error).__name__, error=text,
        ), kind(
            message_id=row.id, topic=row.message.topic, publisher=self.name, route=self._route.name,
            attempt=attempt, error=columns.shown_error(text),
        )  # fmt: skip

    def _report_sent(self, count: int, started: float) -> None:
        if count:
            self._app.events.emit(
                OutgoingSent(
                    publisher=self.name, route=self._route.name, count=count,
                    duration_s=time.monotonic() - started,
                )
            )  # fmt: skip

    # -- to this app's own consumers ----------------------------------------------------------

    def _deliver(self, rows: Sequence[Staged], token: str) -> bool:
        """Deliver rows together; where something raises unexpectedly, divide them until the culprit is alone."""
        started = time.monotonic()
        failed: list[tuple[Staged, Exception]] = []
        unsent: list[Staged] = []
        reachable, parts = True, [list(rows)]
        while parts and reachable:
            part = self._behind(parts.pop(), unsent, failed) if failed else parts.pop()
            try:
                reachable = not part or self._delivered_together(part, token)
            except Exception as error:
                if not is_contents(error):
                    raise
                if len(part) == 1:
                    self._app.protocol.contain(Boundary.LOCAL, error)
                    failed.append((part[0], error))
                    continue
                half = (len(part) + 1) // 2
                parts += [part[half:], part[:half]]
        self._record([], failed, unsent, token, started)
        return reachable

    def _delivered_together(self, rows: Sequence[Staged], token: str) -> bool:
        started = time.monotonic()
        reached: set[str] = set()

        async def delivered(db: Session) -> int:
            delivery = LocalDelivery(self._app, self._store, token)
            count = await delivery.deliver(db, rows)
            reached.update(delivery.consumers)
            return count

        count = self._with_retries(delivered)
        if count is not None:
            self._works()
        for consumer in reached if count else ():
            self._agenda.look(consumer)
        self._report_sent(count or 0, started)
        return count is not None

    def _with_retries(self, operation: Callable[[Session], Awaitable[T]]) -> T | None:
        """Run an operation; None on a stop, or if the database stays away longer than the lease.

        What was published but not marked is then sent again, and its id makes it a duplicate.
        """
        app = self._app
        try:
            return self._perform(
                app.protocol.with_retries,
                operation,
                for_s=self._policy.lease.total_seconds(),
                stop=self._stop,
            )
        except StoreError as error:
            if not error.transient:
                raise
            _log.debug("Postponed while the database is busy or unavailable: %s", error)
            return None


class LocalDelivery:
    """Puts staged messages for this app's own consumers into the inbox, as pending rows.

    Guarantee: the inbox rows and the mark in the outbox are one commit.
    """

    def __init__(self, app: App, outbox: OutboxStore, token: str) -> None:
        self._app = app
        self._outbox = outbox
        self._token = token
        self._aside: list[tuple[Statement, Event]] = []
        self._stored: list[tuple[str, Arrival]] = []

    async def deliver(self, db: Session, rows: Sequence[Staged]) -> int:
        """Deliver rows in order; each has a consumer. Returns how many, or 0 if the lease was lost."""
        work = self._sorted(rows)
        await db.begin()
        for handler, arrivals in work.items():
            await self._store(db, handler, arrivals)
        for statement, _ in self._aside:
            await db.execute(statement)
        ids = [row.id for row in rows]
        keep = bool(self._app.relaying.keep_sent)
        marked = await db.execute(self._outbox.sent(ids, token=self._token, keep=keep))
        if marked.count != len(ids):
            # another relay has some of them by now, so what this one wrote must go
            await db.rollback()
            return 0
        if self._app.alerting is not None and self._aside:
            about = [quarantined(event.consumer or "") for _, event in self._aside]
            await self._app.alerting.opened(db, self._app.store.dialect, about)
        await db.commit()
        self._report()
        return len(ids)

    @property
    def consumers(self) -> set[str]:
        """The consumers that got a message they did not have before."""
        return {consumer for consumer, _ in self._stored}

    def _sorted(self, rows: Sequence[Staged]) -> dict[Handler, dict[str, Arrival]]:
        """Return the arrivals of each handler, in the order of the rows, each id once."""
        app = self._app
        work: dict[Handler, dict[str, Arrival]] = {}
        for row in rows:
            message = row.message
            for handler in app.handlers.matching(message.topic, message.type):
                try:
                    arrival = handler.arrival(message, app.limits)
                except UnusableMessage as error:
                    self._set_aside(handler.consumer, message, error.message_id, str(error))
                    continue
                first = work.setdefault(handler, {}).setdefault(arrival.message_id, arrival)
                if first.hash != arrival.hash:
                    self._set_aside(handler.consumer, message, arrival.message_id, _OTHER_PAYLOAD)
        return work

    async def _store(self, db: Session, handler: Handler, arrivals: dict[str, Arrival]) -> None:
        inbox, consumer = self._app.store, handler.consumer
        fresh = await inbox.store(db, consumer, list(arrivals.values()), token=self._token)
        self._stored += [
            (consumer, arrivals[message_id]) for message_id in arrivals if message_id in fresh
        ]
        known = await inbox.classify(
            db, consumer, [message_id for message_id in arrivals if message_id not in fresh]
        )
        for message_id, row in known.items():
            if row.differs(arrivals[message_id].hash):
                self._set_aside(consumer, arrivals[message_id].message, message_id, _OTHER_PAYLOAD)

    def _set_aside(
        self, consumer: str, message: Message[Any], message_id: str, reason: str
    ) -> None:
        statement = self._app.store.quarantine(
            consumer,
            presentable(message),
            message_id=message_id,
            reason=reason,
            payload_limit=self._app.limits.quarantined_bytes,
        )
        event = MessageQuarantined(
            consumer=consumer, message_id=message_id, topic=message.topic, reason=reason
        )
        self._aside.append((statement, event))

    def _report(self) -> None:
        events = self._app.events
        for _, event in self._aside:
            events.emit(event)
        for consumer, count in Counter(consumer for consumer, _ in self._stored).items():
            self._app.activity.received(consumer, count)
        for consumer, arrival in self._stored:
            events.emit(
                MessageStored(
                    consumer=consumer, message_id=arrival.message_id, topic=arrival.message.topic
                )
            )


class Relays:
    """Sends the staged messages of every route until stopped."""

    def __init__(self, run: Run) -> None:
        self._app = run.app
        self._ended = run.ended
        self._relays = [Relay(run, route) for route in run.app.routes.all()]
        run.agenda.parts[OUTBOX] = self
        self._threads: list[threading.Thread] = []
        self._listener: Listening | None = None

    def start(self) -> None:
        """Start a thread per route. With notify, what any process stages wakes them."""
        if self._app.notify:
            self._listener = self._app.database.listener(self.look)
            if self._listener is not None:
                self._listener.start()
        for relay in self._relays:
            self._threads.append(thread(f"txbox-relay-{relay.name}", relay.run, self._ended))

    def look(self) -> None:
        """Something was staged, or is being staged: see `Part.look`."""
        for relay in self._relays:
            relay.look(staged=True)

    expect = look

    def due(self) -> None:
        """See `Part.due`."""
        for relay in self._relays:
            relay.look()

    def by_route(self) -> dict[str, list[Trouble]]:
        """Each route, and why nothing is sent on it."""
        return {relay.route: relay.troubles() for relay in self._relays}

    def troubles(self) -> tuple[Trouble, ...]:
        """Why nothing is sent on a route, or of a topic."""
        return tuple(trouble for troubles in self.by_route().values() for trouble in troubles)

    def has_rows(self) -> bool:
        """Whether staged messages that these relays take are due or leased."""
        return any(relay.has_rows() for relay in self._relays)

    def join(self, timeout_s: float) -> list[str]:
        """Wait for the threads to end; by then, what they had leased is marked or given back.

        Returns: the names of destinations whose threads did not end in time.
        """
        if self._listener is not None:
            self._listener.stop()
        self.look()
        until = time.monotonic() + timeout_s
        for running in self._threads:
            running.join(max(0.0, until - time.monotonic()))
        return self.running()

    def running(self) -> list[str]:
        """The names of destinations whose threads run."""
        return [
            relay.name
            for relay, running in zip(self._relays, self._threads, strict=False)
            if running.is_alive()
        ]


def _waves(rows: Sequence[Staged], *, runs: bool) -> list[list[Staged]]:
    """Divide rows into what is published together, up to `_WAVE`; without `runs`, with one row of each key."""
    waves: list[list[Staged]] = [[]]
    earlier: dict[tuple[str, str | None], int] = {}
    for row in rows:
        number = earlier.get(row.run, 0)
        if number == len(waves):
            waves.append([])
        waves[number].append(row)
        if not runs and row.message.key is not None:
            earlier[row.run] = number + 1
    return [wave[at : at + _WAVE] for wave in waves for at in range(0, len(wave), _WAVE)]
