"""P1: one message at a time, no backlog, the full protocol, beside the naive loop."""

from __future__ import annotations

import functools
import statistics
from collections import Counter
from typing import Any

import psycopg

from benchmarks import measure
from benchmarks.naive import INBOX_ROWS, Naive
from benchmarks.servers import fresh_database
from benchmarks.workload import (
    Delivery,
    Verified,
    Work,
    create_tables,
    order_paid,
    take_payment,
    verify,
)
from txbox import App, Message
from txbox.events import Event

NUMBER = "P1"
TITLE = "One message at a time, no backlog, full protocol"
BAR = 1.0


class Txbox:
    """`app.process`: guard, payload hash, events; the same handler on the same kind of connection."""

    name = "txbox"

    def __init__(self, url: str) -> None:
        self._url = url
        self.seen: Counter[str] = Counter()
        self.app = App(url, observers=[self._count])
        self.app.handler("orders", consumer="billing")(_billing)
        self.app.init()

    def _count(self, event: Event) -> None:
        self.seen[type(event).__name__] += 1

    def prepare(self) -> None:
        with psycopg.connect(self._url, autocommit=True) as admin:
            create_tables(admin)
            admin.execute("TRUNCATE txbox_inbox")
            admin.execute("CHECKPOINT")

    def consume(self, delivery: Delivery) -> None:
        self.app.process(Message(id=delivery.id, topic="orders", payload=delivery.payload))

    def close(self) -> None:
        self.app.close()


def _billing(message: Message[dict[str, Any]], tx: psycopg.Connection[Any]) -> None:
    take_payment(message.body, tx)


_INBOX_ROWS = {
    "naive": INBOX_ROWS,
    "txbox": "SELECT count(*) FROM txbox_inbox WHERE status = 'processed'",
}


def run(*, rounds: int, messages: int) -> dict[str, Any]:
    """Measure, in interleaved rounds; returns the result as it is stored.

    Args:
        rounds: of each contender, 1 or more.
        messages: distinct ones in each round.
    """
    with fresh_database("naive") as naive_url, fresh_database("txbox") as txbox_url:
        where = {"naive": naive_url, "txbox": txbox_url}
        contenders = (Naive(naive_url), Txbox(txbox_url))
        try:
            done: list[measure.Round] = []
            _once(contenders, where, order_paid(min(messages, 500), seed=0))  # both warm
            for number in range(1, rounds + 1):
                work = order_paid(messages, seed=number)
                done += _once(contenders, where, work)
        finally:
            for contender in contenders:
                contender.close()
        pairs = measure.ratios(done, "txbox", "naive")
        return {
            "phase": NUMBER,
            "title": TITLE,
            "method": f"{rounds} rounds of {messages:,} distinct messages plus 10 % duplicates, "
            "in turns of 100 deliveries, closed loop, one connection each, client and server on one machine",
            "bar": BAR,
            "ratio": statistics.median(pairs),
            "ratios": pairs,
            "yardstick": "naive",
            "contenders": measure.summary(done),
            "rounds": measure.as_json(done),
            **measure.circumstances(txbox_url),
        }


def _once(
    contenders: tuple[Naive | Txbox, ...], where: dict[str, str], work: Work
) -> list[measure.Round]:
    for own in contenders:
        own.prepare()
    return measure.taking_turns(
        [
            measure.Contender(
                own.name,
                own.consume,
                functools.partial(_verified, own.name, where[own.name], work),
            )
            for own in contenders
        ],
        work,
    )


def _verified(name: str, url: str, work: Work) -> Verified:
    with psycopg.connect(url, autocommit=True) as connection:
        return verify(connection, work, _INBOX_ROWS[name])
