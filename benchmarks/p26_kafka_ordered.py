"""P26: Kafka with ordered=True and 10,000 keys, beside a loop of one's own."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import psycopg
from confluent_kafka import Consumer

from benchmarks.contender import inbox_off_by
from benchmarks.p14_kafka import Subscribed, broker, circumstances
from benchmarks.p25_kafka_start import Watched, loaded
from benchmarks.place import Place
from benchmarks.result import Bar, Round, Verified, ratios, result
from benchmarks.servers import fresh_database
from benchmarks.workload import CONSUMER, Work, create_inbox, order_paid, pay, verify, writes
from tests.support.servers import ServerError
from txbox import App
from txbox.app import Consumption
from txbox.worker import Worker

NUMBER = "P26"
TITLE = "Kafka, ordered=True with 10,000 keys"
BAR = 3.0

_KEYS, _PARTITIONS = 10_000, 6
_WAIT_S = 300.0
_CLAIM = (
    "INSERT INTO inbox (consumer, message_id) VALUES (%s, %s) ON CONFLICT DO NOTHING RETURNING 1"
)

#: rate, CPU in microseconds a message
Speed = tuple[float, float]


def naive(url: str, bootstrap: str, source: Subscribed, work: Work) -> Speed:
    """The textbook loop: one message, one transaction; offsets are committed now and then."""
    topics = list(source.topics or ())
    consumer = Consumer({
        "bootstrap.servers": bootstrap, "group.id": topics[0], "auto.offset.reset": "earliest",
        "enable.auto.commit": False,
    })  # fmt: skip
    consumer.subscribe(topics)
    seen, began = 0, (0.0, 0.0)
    with psycopg.connect(url) as connection:
        while seen < len(work.deliveries):
            raw = consumer.poll(1.0)
            if raw is None or raw.error():
                continue
            if not seen:
                began = time.perf_counter(), time.process_time()
            message_id = dict(raw.headers() or ())["message-id"]
            assert isinstance(message_id, bytes)
            with connection.transaction():
                claimed = connection.execute(_CLAIM, (CONSUMER, message_id.decode())).fetchone()
                if claimed is not None:
                    pay(json.loads(raw.value() or b""), connection)
            seen += 1
            if seen % 500 == 0:
                consumer.commit(asynchronous=True)
    wall_s, cpu_s = time.perf_counter() - began[0], time.process_time() - began[1]
    consumer.close()
    return seen / wall_s, cpu_s / seen * 1e6


def txbox(app: App) -> Callable[[str, str, Subscribed, Work], Speed]:
    def run(url: str, bootstrap: str, source: Subscribed, work: Work) -> Speed:
        del bootstrap
        watched = Watched(source, len(work.deliveries))
        worker = Worker(
            app, install_signals=False, maintenance=False, consumptions=[Consumption(watched, None)]
        )
        thread = threading.Thread(target=worker.run)
        thread.start()
        deadline = time.monotonic() + _WAIT_S
        while not watched.done.wait(0.2) and thread.is_alive() and time.monotonic() < deadline:
            pass
        # what is settled may be stored, and run from the table
        with psycopg.connect(url, autocommit=True) as connection:
            while time.monotonic() < deadline and connection.execute(
                "SELECT EXISTS (SELECT FROM txbox_inbox WHERE status <> 'processed')"
            ).fetchone() != (False,):
                time.sleep(0.01)
        ended = time.perf_counter(), time.process_time()
        worker.stop()
        thread.join(_WAIT_S)
        if not watched.done.is_set():
            raise ServerError(f"txbox did not finish its round: {worker.failure}")
        _, wall, cpu = watched.marks[0]
        count = len(work.deliveries)
        return count / (ended[0] - wall), (ended[1] - cpu) / count * 1e6

    return run


def run(*, rounds: int, messages: int) -> dict[str, Any]:
    """Measure, in interleaved rounds; returns the result as it is stored.

    Args:
        rounds: of each contender, 1 or more.
        messages: distinct ones in each round; txbox is given three times as many.
    """
    bootstrap = broker()
    load = [os.getloadavg()[0]]
    done: list[Round] = []
    with fresh_database("ordered") as url, App(url) as app:
        app.handler("*", consumer=CONSUMER, ordered=True)(writes)
        app.init()
        with psycopg.connect(url, autocommit=True) as connection:
            create_inbox(connection)
        sides: list[tuple[str, Any, int]] = [("naive", naive, 1), ("ordered=True", txbox(app), 3)]
        for number in range(rounds + 1):
            for name, contend, more in sides[:: 1 if number % 2 else -1]:
                work = order_paid(more * messages if number else 500, seed=number)
                Place(url).prepare()
                with psycopg.connect(url, autocommit=True) as connection:
                    connection.execute("TRUNCATE inbox")
                source = loaded(bootstrap, work, _PARTITIONS, keys=_KEYS)
                rate, cpu_us = contend(url, bootstrap, source, work)
                if number:
                    done.append(Round(
                        contender=name, messages=len(work.deliveries), rate=rate, p50_ms=None, p99_ms=None,
                        client_cpu_us=cpu_us, verified=_verified(url, work, inbox=name != "naive"),
                    ))  # fmt: skip
            load.append(os.getloadavg()[0])
        about = circumstances(url)
    return result(
        phase=NUMBER,
        title=TITLE,
        method=f"{rounds} rounds of {messages:,} distinct messages plus 10 % duplicates (txbox: three times as many) "
        f"of {_KEYS:,} keys, waiting in {_PARTITIONS} partitions; one worker with one lane, an ordinary handler; from "
        "the first message received until all are processed. Naive: one message, one transaction, the same client",
        bars=[Bar(f"at least {BAR:g} times naive", BAR, ratios(done, "ordered=True", "naive"))],
        rounds=done,
        circumstances={**about, "load_1min": load},
    )


def _verified(url: str, work: Work, *, inbox: bool) -> Verified:
    with psycopg.connect(url, autocommit=True) as connection:
        return verify(connection, work, inbox_off_by(connection, work) if inbox else 0)
