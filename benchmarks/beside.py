"""What txbox is measured against: the textbook loop, the same without an inbox, and the limit."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Protocol

import psycopg

from benchmarks.place import Gauges, Place
from benchmarks.result import Round
from benchmarks.source import Stopwatch
from benchmarks.workload import (
    CONSUMER,
    Body,
    Delivery,
    Tx,
    Work,
    create_inbox,
    pay,
    pay_many,
    verify,
)

BATCH = 100


class Contender(Protocol):
    """One way to consume a workload."""

    @property
    def name(self) -> str: ...

    def round(self, work: Work) -> Round:
        """Make the tables anew, consume the workload, verify what it left behind."""
        ...


class Beside:
    """A contender without txbox: a round in tables of its own place, timed by a stop-watch.

    Args:
        inbox: whether it keeps one; what it holds is verified then.
    """

    def __init__(self, name: str, place: Place, gauges: Gauges, *, inbox: bool = True) -> None:
        self.name = name
        self.place = place
        self.gauges = gauges
        self._inbox = inbox

    def prepare(self) -> None:
        with self.place.connect() as admin:
            create_inbox(admin)
        self.place.prepare()

    def round(self, work: Work) -> Round:
        self.prepare()
        watch = Stopwatch(self.gauges)
        self.consume_all(work, watch)
        return self.measured(watch, work)

    def consume_all(self, work: Work, watch: Stopwatch) -> None:
        raise NotImplementedError

    def measured(self, watch: Stopwatch, work: Work) -> Round:
        with self.place.connect() as admin:
            off = 0
            if self._inbox:
                row = admin.execute("SELECT count(*) FROM inbox").fetchone()
                assert row is not None
                off = row[0] - work.distinct
            verified = verify(admin, work, off)
        return watch.round(self.name, verified, dead_tuples=self.place.dead_tuples())


def consume(delivery: Delivery, tx: Tx, handler: Callable[[Body, Tx], None]) -> None:
    """The textbook's transaction; psycopg sends its BEGIN, and prepares statements that come again."""
    claimed = tx.execute(
        "INSERT INTO inbox (consumer, message_id) VALUES (%s, %s) "
        "ON CONFLICT DO NOTHING RETURNING message_id",
        (CONSUMER, delivery.id),
    ).fetchone()
    if claimed is not None:
        handler(json.loads(delivery.payload), tx)
    tx.commit()


class Naive(Beside):
    """BEGIN, INSERT … ON CONFLICT DO NOTHING RETURNING, UPDATE, INSERT, COMMIT; a message at a time.

    Args:
        connections: threads, with a connection each.
        rate: deliveries that become due in a second; None has all of them wait from the start.
    """

    def __init__(  # one more than the rule: what it runs, and how
        self,
        place: Place,
        gauges: Gauges,
        *,
        name: str = "naive",
        handler: Callable[[Body, Tx], None] = pay,
        connections: int = 1,
        rate: float | None = None,
    ) -> None:
        super().__init__(name, place, gauges)
        self.handler = handler
        self._count = connections
        self._rate = rate

    def consume_all(self, work: Work, watch: Stopwatch) -> None:
        connections = [psycopg.connect(self.place.url) for _ in range(self._count)]
        try:
            began = watch.start()
            due = self._due(work.deliveries, began)
            if self._count == 1:
                watch.took_s += self.line(connections[0], due)
            else:
                watch.took_s += self._lines(connections, due)
            watch.stop()
        finally:
            for connection in connections:
                connection.close()

    def _due(
        self, deliveries: Sequence[Delivery], began: float
    ) -> Iterator[tuple[float, Delivery]]:
        if self._rate is None:
            return iter([(0.0, delivery) for delivery in deliveries])
        return iter([(began + at / self._rate, delivery) for at, delivery in enumerate(deliveries)])

    def _lines(
        self, connections: Sequence[psycopg.Connection[Any]], due: Iterator[tuple[float, Delivery]]
    ) -> list[float]:
        took: list[list[float]] = [[] for _ in connections]

        def work(number: int) -> None:
            took[number] = self.line(connections[number], due)

        threads = [threading.Thread(target=work, args=(at,)) for at in range(self._count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return [one for times in took for one in times]

    def taking(self, tx: Tx) -> Callable[[Delivery], object]:
        """What consumes a delivery on this connection."""
        return partial(consume, tx=tx, handler=self.handler)

    def line(self, tx: Tx, due: Iterator[tuple[float, Delivery]]) -> list[float]:
        """Consume on one connection, each when it is due; returns the seconds that each took."""
        took: list[float] = []
        clock, take = time.perf_counter, self.taking(tx)
        for at, delivery in due:
            since = clock()
            if at:
                if at > since:
                    time.sleep(at - since)
                since = at
            take(delivery)
            took.append(clock() - since)
        return took


class WithoutInbox(Beside):
    """The set-based handler alone, in batches: what is left when nobody asks what was seen before."""

    def __init__(self, place: Place, gauges: Gauges) -> None:
        super().__init__("no inbox, set-based", place, gauges, inbox=False)

    def consume_all(self, work: Work, watch: Stopwatch) -> None:
        with psycopg.connect(self.place.url) as tx:
            watch.start()
            for batch in batches(work.deliveries):
                since = time.perf_counter()
                pay_many([json.loads(delivery.payload) for delivery in batch], tx)
                tx.commit()
                watch.took_s += [time.perf_counter() - since] * len(batch)
            watch.stop()


_LIMIT = """
WITH given AS (
    SELECT * FROM unnest(%s::text[], %s::int[], %s::bigint[], %s::int[])
        AS one (message_id, account, number, amount)
), claimed AS (
    INSERT INTO inbox (consumer, message_id)
    SELECT %s, message_id FROM given ON CONFLICT DO NOTHING RETURNING message_id
), fresh AS (
    SELECT given.* FROM given JOIN claimed USING (message_id)
), paid AS (
    UPDATE account SET balance = balance + own.amount
    FROM (SELECT account, sum(amount) AS amount FROM fresh GROUP BY account) AS own
    WHERE account.id = own.account
)
INSERT INTO orders (account, amount, number) SELECT account, amount, number FROM fresh
"""


class Limit(Beside):
    """One server-side statement a batch: inbox, accounts and orders, in autocommit: one round trip."""

    def __init__(self, place: Place, gauges: Gauges) -> None:
        super().__init__("limit: one statement a batch", place, gauges)

    def consume_all(self, work: Work, watch: Stopwatch) -> None:
        with psycopg.connect(self.place.url, autocommit=True) as connection:
            watch.start()
            for batch in batches(work.deliveries):
                since = time.perf_counter()
                once = {delivery.id: delivery.payload for delivery in batch}
                bodies = [json.loads(payload) for payload in once.values()]
                connection.execute(
                    _LIMIT,
                    (
                        list(once),
                        [body["account"] for body in bodies],
                        [body["order"] for body in bodies],
                        [body["amount"] for body in bodies],
                        CONSUMER,
                    ),
                )
                watch.took_s += [time.perf_counter() - since] * len(batch)
            watch.stop()


def batches(deliveries: Sequence[Delivery], size: int = BATCH) -> Iterator[Sequence[Delivery]]:
    for start in range(0, len(deliveries), size):
        yield deliveries[start : start + size]
