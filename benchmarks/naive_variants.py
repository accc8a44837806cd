"""Contenders on other connections than psycopg's: their own loops beside txbox's worker, the same tables and checks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

from tests.servers import ServerError
from txbox import App, Message
from txbox.app import Consumption
from txbox.bench.place import Place, Reading
from txbox.bench.result import Round, Verified
from txbox.bench.source import Memory, Stopwatch
from txbox.bench.workload import CONSUMER, TOPIC, Delivery, Work, order_paid
from txbox.worker import Worker

# what a loop of its own keeps, and what txbox does
_NAIVE_INBOX = "SELECT count(*) FROM inbox"
_TXBOX_INBOX = "SELECT count(*) FROM txbox_inbox WHERE status = 'processed'"

_EFFECTS = "SELECT count(DISTINCT number), count(*), (SELECT sum(balance) FROM account) FROM orders"
_WAIT_S = 120.0
_WARM = 300

Consume = Callable[[Delivery], object]


class Shop(Protocol):
    """A database with the tables of the workload."""

    def prepare(self) -> None:
        """Empty the inbox, make the business tables anew."""
        ...

    def row(self, sql: str) -> Sequence[Any]: ...


class Gauge(Protocol):
    def read(self) -> Reading: ...


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
            admin.execute("DROP TABLE IF EXISTS inbox")
            admin.execute(
                "CREATE TABLE inbox (consumer text NOT NULL, message_id text NOT NULL, "
                "received_at timestamptz NOT NULL DEFAULT now(), PRIMARY KEY (consumer, message_id))"
            )
        self._place.prepare()

    def row(self, sql: str) -> Sequence[Any]:
        with self._place.connect() as admin:
            (row,) = admin.execute(sql.encode()).fetchall()
        return tuple(row)


class Contender(Protocol):
    @property
    def name(self) -> str: ...
    def round(self, work: Work) -> Round: ...
    def close(self) -> None: ...


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
        gauge: Gauge,
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
        gauge: Gauge,
        app: App,
        handler: Callable[..., Any],
        **options: Any,
    ) -> None:
        self.name = name
        self._shop = shop
        self._gauge = gauge
        self._app = app
        app.handler(TOPIC, consumer=CONSUMER, **options)(handler)
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


@contextmanager
def processed(app: App, handler: Callable[..., Any]) -> Generator[Consume]:
    """`app.process`: txbox without a worker, a message at a time."""
    app.handler(TOPIC, consumer=CONSUMER)(handler)
    app.init()
    try:
        yield lambda own: app.process(Message(id=own.id, topic=TOPIC, payload=own.payload))
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
    """A round of every contender after another, several times; who goes first alternates.

    Args:
        cells: contenders, and how many times `messages` distinct ones each gets.
    """
    for contender, _ in cells:
        contender.round(order_paid(_WARM, seed=0))
    done: list[Round] = []
    for number in range(rounds):
        for contender, times in cells[:: -1 if number % 2 else 1]:
            done.append(contender.round(order_paid(round(messages * times), seed=number + 1)))
    order = {contender.name: at for at, (contender, _) in enumerate(cells)}
    return sorted(done, key=lambda own: order[own.contender])
