"""What can be won by round trips alone: the way txbox goes to the server, and nothing else of txbox."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from benchmarks.beside import Naive, batches
from benchmarks.place import Gauges, Place
from benchmarks.workload import CONSUMER, Body, Delivery, Tx, pay
from txbox.connections.libpq import BEGIN, COMMIT, Pipeline
from txbox.session import Statement

_ONE = (
    "INSERT INTO inbox (consumer, message_id) VALUES (:consumer, :id) "
    "ON CONFLICT DO NOTHING RETURNING message_id"
)
_MANY = (
    "INSERT INTO inbox (consumer, message_id) SELECT :consumer, unnest(:ids::text[]) "
    "ON CONFLICT DO NOTHING RETURNING message_id"
)


class Trips:
    """Consumes on one connection: BEGIN and the claim in a round trip, the handler through psycopg, COMMIT."""

    def __init__(self, tx: Tx, handler: Callable[[Body, Tx], None]) -> None:
        # `wait` is typed for psycopg's own generators
        self._tx: Any = tx
        self._handler = handler
        self._pipeline = Pipeline(tx, prepare=True, translate=lambda _error: None)

    def consume(self, deliveries: Sequence[Delivery]) -> None:
        tx, handler, pipeline = self._tx, self._handler, self._pipeline
        once = {delivery.id: delivery.payload for delivery in deliveries}
        if len(once) == 1:
            claim = Statement("claim", _ONE, {"consumer": CONSUMER, "id": deliveries[0].id})
        else:
            claim = Statement("claim", _MANY, {"consumer": CONSUMER, "ids": list(once)})
        (claimed,) = tx.wait(pipeline.send((claim,), before=BEGIN))
        for (message_id,) in claimed.rows:
            handler(json.loads(once[message_id]), tx)
        tx.wait(pipeline.send((), after=COMMIT))


class ByHand(Naive):
    """As naive, with a round trip less a transaction: no guard, hash, retries, events, no worker.

    How far round trips alone go, with psycopg's own `execute`; what txbox is behind it, txbox costs.

    Args:
        together: messages that share a transaction; more than one of those that wait from the start.
    """

    def __init__(  # as naive has
        self,
        place: Place,
        gauges: Gauges,
        *,
        name: str = "by hand",
        handler: Callable[[Body, Tx], None] = pay,
        rate: float | None = None,
        together: int = 1,
    ) -> None:
        super().__init__(place, gauges, name=name, handler=handler, rate=rate)
        self._together = together

    def taking(self, tx: Tx) -> Callable[[Delivery], object]:
        trips = Trips(tx, self.handler)
        return lambda delivery: trips.consume((delivery,))

    def line(self, tx: Tx, due: Iterator[tuple[float, Delivery]]) -> list[float]:
        if self._together == 1:
            return super().line(tx, due)
        took: list[float] = []
        trips = Trips(tx, self.handler)
        for batch in batches([delivery for _, delivery in due], self._together):
            since = time.perf_counter()
            trips.consume(batch)
            took += [time.perf_counter() - since] * len(batch)
        return took
