"""Many deliveries of the same ids while partitions are made and dropped: each is done once, and none is lost."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from typing import Any

from tests.support.partitions import DAY, day_parts, finished_at, midnight, place, uuid7
from tests.support.shop import Shop, paid
from txbox import Outcome, Retention
from txbox.maintenance import run_once

HOUR = timedelta(hours=1)
_THREADS = 4
_HOURS = 24


def test_each_id_once_while_partitions_come_and_go(of_uuid7: Shop) -> None:
    """Ids at both sides of every bound, most of them beyond the last partition, for two consumers.

    Meanwhile the missing partitions are made, an hour each, which moves the rows that have come, and
    the old ones dropped.
    """
    shop = of_uuid7
    shop.handler()
    shop.handler(consumer="ledger")
    for days in range(-30, -9, 3):
        shop.deliver(paid(uuid7(midnight(days))), "billing")
    finished_at(shop.raw, midnight(-9))
    bounds = [midnight(days) for days in (0, 1, 2)]
    bounds += [midnight(3) + number * HOUR for number in range(_HOURS + 1)]
    offsets = [timedelta(milliseconds=number) for number in (-2, -1, 0, 1)]
    ids = [uuid7(bound + offset) for bound in bounds for offset in offsets for _ in range(4)]
    deliveries = [
        (message_id, consumer) for message_id in ids for consumer in ("billing", "ledger")
    ]
    maintained = threading.Event()
    with ThreadPoolExecutor(_THREADS + 1) as pool:
        rounds = [
            pool.submit(_deliver, shop, deliveries, number, maintained)
            for number in range(_THREADS)
        ]
        made = pool.submit(_maintain, shop, maintained)
        outcomes = sum((future.result(300) for future in rounds), Counter[Outcome]())
        assert made.result() == _HOURS
    assert outcomes[Outcome.PROCESSED] == 2 * len(ids)
    assert outcomes.keys() == {Outcome.PROCESSED, Outcome.DUPLICATE}
    found = shop.raw.rows("SELECT message_id, count(*) FROM effect GROUP BY message_id")
    done: dict[Any, int] = {row: int(count) for row, count in found}
    assert {message_id: done.get(message_id) for message_id in ids} == dict.fromkeys(ids, 2)
    assert shop.raw.value("SELECT count(*) FROM txbox_inbox") == 2 * len(ids)
    # each row is in the partition of its time by now, wherever it was written; only those past the last are not
    beyond = {message_id for message_id in ids if "uuid7_default" in place(shop.raw, message_id)}
    assert beyond == set(ids[-8:])
    assert len(day_parts(shop.raw)) == 7 + 1 + 2 + _HOURS


def _deliver(
    shop: Shop, deliveries: Sequence[tuple[str, str]], seed: int, maintained: threading.Event
) -> Counter[Outcome]:
    """Deliver everything in an order of its own, again and again until partitions are made, and once more."""
    draw, outcomes, last = random.Random(seed), Counter[Outcome](), False
    while not last:
        last = maintained.is_set()
        for delivery, consumer in draw.sample(deliveries, len(deliveries)):
            outcome = Outcome.IN_PROGRESS
            while outcome is Outcome.IN_PROGRESS:
                outcome = shop.deliver(paid(delivery), consumer)
            outcomes[outcome] += 1
    return outcomes


def _maintain(shop: Shop, maintained: threading.Event) -> int:
    made = 0
    behind = int((midnight(3) - datetime.now(UTC)) / HOUR)
    try:
        for number in range(1, _HOURS + 1):
            shop.app.retention = Retention(processed=7 * DAY, partition=HOUR, ahead=behind + number)
            while made < number:
                made += run_once(shop.app, "partitions").rows
            if number % 8 == 0:
                run_once(shop.app, "prune")
    finally:
        maintained.set()
    return made
