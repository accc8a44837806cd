"""The workload is what it says, and a source hands it out when it is due."""

from __future__ import annotations

import json
import time
import uuid
from collections import Counter

from benchmarks.place import Reading, within
from benchmarks.source import Memory, Stopwatch
from benchmarks.workload import order_paid, storm


class _NoGauges:
    def read(self) -> Reading:
        return Reading(time.perf_counter(), time.process_time(), None, None)


def test_order_paid_has_its_share_of_duplicates_behind_their_originals() -> None:
    work = order_paid(1000, seed=1)
    counts = Counter(delivery.id for delivery in work.deliveries)

    assert len(work.deliveries) == 1100
    assert len(counts) == work.distinct == 1000
    assert set(counts.values()) == {1, 2}
    once = {delivery.id: json.loads(delivery.payload) for delivery in work.deliveries}
    assert sum(body["amount"] for body in once.values()) == work.total
    assert all(len(delivery.payload) == 200 for delivery in work.deliveries)
    # by the order in which they were made, ids grow
    made = sorted(once, key=lambda message_id: once[message_id]["order"])
    assert made == sorted(made)
    assert {uuid.UUID(message_id).version for message_id in made} == {7}


def test_failing_messages_are_those_that_the_database_refuses() -> None:
    work = order_paid(1000, seed=1, failing=0.05)
    bodies = {delivery.id: json.loads(delivery.payload) for delivery in work.deliveries}

    assert len(work.failing) == 50
    assert {message_id for message_id, body in bodies.items() if body["amount"] < 0} == work.failing
    assert sum(body["amount"] for body in bodies.values() if body["amount"] > 0) == work.total


def test_a_storm_repeats_every_message() -> None:
    work = storm(5000, seed=1)

    assert len(work.deliveries) == 5000
    assert work.distinct == len({delivery.id for delivery in work.deliveries}) == 50


def test_an_open_loop_hands_out_what_is_due_and_times_it_from_then() -> None:
    work = order_paid(40, seed=1)
    watch = Stopwatch(_NoGauges())
    source = Memory(work, watch, rate=2000.0)
    began = time.perf_counter()
    received = 0
    while not source.exhausted:
        found = source.receive(100, 0.5)
        now = time.perf_counter()
        received += len(found)
        assert all(began <= delivery.tag <= now for delivery in found)
        assert received <= (now - began) * 2000.0 + 1
        source.settle(found)

    assert received == 44
    assert watch.done.is_set()
    assert time.perf_counter() - began >= 43 / 2000.0
    assert len(watch.took_s) == 44


def test_a_schema_is_added_to_a_url_with_and_without_a_query() -> None:
    assert within("postgresql://u@h/d", "s") == "postgresql://u@h/d?options=-csearch_path%3Ds"
    assert within("postgresql://u@h/d?a=1", "s").endswith("?a=1&options=-csearch_path%3Ds")
