"""Contenders on other connections than psycopg's: their own loops beside txbox's worker, the same tables and checks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

from benchmarks import setting
from benchmarks.place import Place, Reading
from benchmarks.result import Round, Verified
from benchmarks.source import Memory, Readable, Stopwatch
from benchmarks.workload import CONSUMER, TOPIC, Delivery, Work, create_inbox, order_paid
from tests.support.servers import ServerError
from txbox import App, Message
from txbox.app import Consumption
from txbox.worker import Worker

# what a loop of its own keeps, and what txbox does
_NAIVE_INBOX = "SELECT count(*) FROM inbox"
_TXBOX_INBOX = "SELECT count(*) FROM txbox_inbox WHERE status = 'processed'"

_EFFECTS = "SELECT count(DISTINCT number), count(*), (SELECT sum(balance) FROM account) FROM orders"
_WAIT_S = 120.0

Consume = Callable[[Delivery], object]


class Shop(Protocol):
    """A database with the tables of the workload."""

    def prepare(self) -> None:
        """Empty the inbox, make the business tables anew."""
        ...

    def row(self, sql: str) -> Sequence[Any]: ...


class ClientGauge:
    """The CPU of this process alone."""

    def read(self) -> Reading:
        return Reading(time.perf_counter(), time.process_time(), None, None)


class PostgresqlShop:
    """A schema of a PostgreSQL database."""

    def __init__(self, place: Place) -> None:
        self._place = place

    def prepare(self) -> None:
        with self._place.connect() as admin:
            create_inbox(admin)
        self._place.prepare()

    def row(self, sql: str) -> Sequence[Any]:
        with self._place.connect() as admin:
            (row,) = admin.execute(sql.encode()).fetchall()
        return tuple(row)


class Looped:
    """A loop that consumes one delivery after another.

    Args:
        opened: connects, and gives what consumes a delivery.
        txbox: what it consumes with is txbox, and keeps its inbox.
    """

    def __init__(  # one more than the rule: a contender is all of these
        self,
        name: str,
        shop: Shop,
        gauge: Readable,
        opened: Callable[[], AbstractContextManager[Consume]],
        *,
        txbox: bool = False,
    ) -> None:
        self.name = name
        self._shop = shop
        self._gauge = gauge
        self._opened = opened
        self._inbox = _TXBOX_INBOX if txbox else _NAIVE_INBOX

    def round(self, work: Work) -> Round:
        self._shop.prepare()
        watch = Stopwatch(self._gauge)
        clock = time.perf_counter
        with self._opened() as consume:
            last = watch.start()
            for delivery in work.deliveries:
                consume(delivery)
                now = clock()
                watch.took_s.append(now - last)
                last = now
            watch.stop()
        return watch.round(self.name, verified(self._shop, work, self._inbox))

    def close(self) -> None: ...


class Worked:
    """The worker that `txbox run` runs, fed from memory."""

    def __init__(  # one more than the rule: a contender is all of these
        self,
        name: str,
        shop: Shop,
        gauge: Readable,
        app: App,
        handler: Callable[..., Any],
        **options: Any,
    ) -> None:
        self.name = name
        self._shop = shop
        self._gauge = gauge
        self._app = app
        register: Any = app.handler(TOPIC, consumer=CONSUMER, **options)
        register(handler)
        app.init()

    def round(self, work: Work) -> Round:
        self._shop.prepare()
        watch = Stopwatch(self._gauge)
        source = Memory(work, watch)
        worker = Worker(
            self._app,
            once=True,
            install_signals=False,
            maintenance=False,
            relay=False,
            consumptions=[Consumption(source, None)],
        )
        thread = threading.Thread(target=worker.run, name="bench-worker")
        thread.start()
        thread.join(_WAIT_S)
        if thread.is_alive() or watch.running:
            source.given_up = True
            worker.stop()
            thread.join(_WAIT_S)
            raise ServerError(f"{self.name} did not finish its round: {worker.failure}")
        return watch.round(self.name, verified(self._shop, work, _TXBOX_INBOX))

    def close(self) -> None:
        self._app.close()


Contender = Looped | Worked


@contextmanager
def processed(app: App, handler: Callable[..., Any]) -> Generator[Consume]:
    """`app.process`: txbox without a worker, a message at a time."""
    app.handler(TOPIC, consumer=CONSUMER)(handler)
    app.init()
    try:
        yield lambda delivery: app.process(
            Message(id=delivery.id, topic=TOPIC, payload=delivery.payload)
        )
    finally:
        app.close()


def verified(shop: Shop, work: Work, inbox: str) -> Verified:
    """Compare the tables with the workload."""
    numbers, rows, balance = shop.row(_EFFECTS)
    return Verified(
        lost=work.distinct - int(numbers),
        doubled=int(rows) - int(numbers),
        balance_off_by=int(balance) - work.total,
        inbox_off_by=int(shop.row(inbox)[0]) - work.distinct,
    )


def interleaved(
    cells: Sequence[tuple[Contender, float]], *, rounds: int, messages: int
) -> list[Round]:
    """As `setting.interleaved`.

    Args:
        cells: contenders, and how many times `messages` distinct ones each gets.
    """
    return setting.interleaved(
        [(contender, _workloads(round(messages * times))) for contender, times in cells],
        rounds=rounds,
    )


def _workloads(messages: int) -> Callable[[int], Work]:
    return lambda seed: order_paid(messages, seed=seed)
