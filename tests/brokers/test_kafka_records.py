"""Records as producers write them: transactions and their markers, tombstones, headers of any kind."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
from confluent_kafka import Producer

from tests.support.brokers.kafka import (
    MakeRaw,
    committed,
    each_once,
    librdkafka,
    new_group,
    new_topic,
    notes,
    opened,
    produce,
    take,
)
from tests.support.shop import AT_ONCE, CONSUMER, add_effect, create_effects, quarantined, statuses
from tests.support.waiting import eventually
from tests.support.workers import running, worker
from txbox import App, Message
from txbox.brokers.kafka import Kafka
from txbox.worker import Worker

pytestmark = pytest.mark.brokers

_HEADER = 9  # RD_KAFKA_VTYPE_HEADER; the others: TOPIC 1, VALUE 4


def one_worker(
    url: str, bootstrap: str, topic: str, group: str, seen: list[Message[Any]]
) -> Worker:
    """A worker that records what its handler saw, and writes an effect for each message."""
    app = App(url)

    @app.handler(topic, consumer=CONSUMER, retry=AT_ONCE)
    def handle(message: Message[Any], tx: Any) -> None:
        seen.append(message)
        add_effect(tx, message.id)

    app.consume(Kafka(bootstrap, group=group))
    return worker(app)


def transaction(producer: Producer, topic: str, ids: range, end: str) -> None:
    producer.begin_transaction()
    for message_id in ids:
        producer.produce(topic, b"{}", headers=[("message-id", str(message_id).encode())])
    assert producer.flush(20) == 0
    getattr(producer, f"{end}_transaction")(20)


def test_the_front_passes_over_aborted_messages_and_markers(
    kafka_bootstrap: str, sqlite_url: str, raw: MakeRaw
) -> None:
    """Offsets: 0-4 and the marker 5, 6-10 aborted and the marker 11, 12-16 and the marker 17, 18 plain.

    The last marker is passed over, too: a lag of one would stay as long as nothing else comes.
    """
    topic, group_id, database = new_topic(kafka_bootstrap), new_group(), raw(sqlite_url)
    create_effects(database)
    producer = Producer({"bootstrap.servers": kafka_bootstrap, "transactional.id": topic})
    producer.init_transactions(20)
    transaction(producer, topic, range(5), "commit")
    transaction(producer, topic, range(5, 10), "abort")
    transaction(producer, topic, range(10, 15), "commit")
    seen: list[Message[Any]] = []
    with running(one_worker(sqlite_url, kafka_bootstrap, topic, group_id, seen)):
        each_once(database, [*range(5), *range(10, 15)])
        eventually(lambda: committed(kafka_bootstrap, group_id, topic) == 18, "the commit")
        produce(kafka_bootstrap, topic, ["plain"])
        eventually(lambda: committed(kafka_bootstrap, group_id, topic) == 19, "the next commit")
    assert [entry.origin["offset"] for entry in seen] == [0, 1, 2, 3, 4, 12, 13, 14, 15, 16, 18]
    # nothing of it comes again
    with running(one_worker(sqlite_url, kafka_bootstrap, topic, group_id, seen)):
        produce(kafka_bootstrap, topic, ["later"])
        eventually(lambda: committed(kafka_bootstrap, group_id, topic) == 20, "the last commit")
    assert len(seen) == 12
    assert statuses(database) == {"processed": 12}


def test_a_gap_does_not_let_the_front_pass_an_open_message(kafka_bootstrap: str) -> None:
    topic, group_id = new_topic(kafka_bootstrap), new_group()
    producer = Producer({"bootstrap.servers": kafka_bootstrap, "transactional.id": topic})
    producer.init_transactions(20)
    transaction(producer, topic, range(2), "commit")  # 0, 1 and the marker 2
    transaction(producer, topic, range(2, 4), "abort")  # 3, 4 and the marker 5
    transaction(producer, topic, range(4, 6), "commit")  # 6, 7 and the marker 8
    with opened(Kafka(kafka_bootstrap, group=group_id), topic) as source:
        found = take(source, 4)
        source.settle([found[0], found[2], found[3]])
    assert committed(kafka_bootstrap, group_id, topic) == 1
    with opened(Kafka(kafka_bootstrap, group=group_id), topic) as source:
        found = take(source, 3)
        source.settle([found[0]])
    assert committed(kafka_bootstrap, group_id, topic) == 2
    with opened(Kafka(kafka_bootstrap, group=group_id), topic) as source:
        source.settle(take(source, 2))
    assert committed(kafka_bootstrap, group_id, topic) == 8


def test_a_service_gets_tombstones_and_every_header(
    kafka_bootstrap: str, sqlite_url: str, raw: MakeRaw
) -> None:
    topic, group_id, database = new_topic(kafka_bootstrap), new_group(), raw(sqlite_url)
    create_effects(database)
    producer = Producer({"bootstrap.servers": kafka_bootstrap})
    pairs: list[tuple[str, bytes | None]] = [
        ("message-id", b"gone-1"),
        ("x", b"1"),
        ("x", None),
        ("x", b"\xff\x00\xfe"),
        ("", b"no name"),
        ("traceparent", b"\x80not a trace"),
    ]
    producer.produce(topic, None, key=b"customer-1", headers=pairs)  # type: ignore[arg-type]
    assert producer.flush(20) == 0
    seen: list[Message[Any]] = []
    with running(one_worker(sqlite_url, kafka_bootstrap, topic, group_id, seen)):
        each_once(database, ["gone-1"])
        eventually(lambda: committed(kafka_bootstrap, group_id, topic) == 1, "the commit")
    (message,) = seen
    assert (message.payload, message.key) == (None, "customer-1")
    assert list(message.headers) == pairs


def test_ids_that_are_no_text_are_quarantined_and_their_neighbours_processed(
    kafka_bootstrap: str, sqlite_url: str, raw: MakeRaw
) -> None:
    topic, group_id, database = new_topic(kafka_bootstrap), new_group(), raw(sqlite_url)
    create_effects(database)
    producer = Producer({"bootstrap.servers": kafka_bootstrap})
    produce(kafka_bootstrap, topic, ["before"])
    for hostile in (b"\xff\xfe", b"", None, b"nul\x00inside"):
        headers: list[Any] = [("message-id", hostile)]
        producer.produce(topic, b"{}", headers=headers)
    assert producer.flush(20) == 0
    produce(kafka_bootstrap, topic, ["after"])
    with running(one_worker(sqlite_url, kafka_bootstrap, topic, group_id, [])):
        eventually(lambda: committed(kafka_bootstrap, group_id, topic) == 6, "the commit")
    assert notes(database) == {"before": 1, "after": 1}
    assert sum(seen for _, seen in quarantined(database)) == 4


def test_a_header_whose_name_is_no_text_does_not_stop_the_partition(
    kafka_bootstrap: str, sqlite_url: str, raw: MakeRaw
) -> None:
    """No Python client can write one, but clients in other languages can."""
    topic, group_id, database = new_topic(kafka_bootstrap), new_group(), raw(sqlite_url)
    create_effects(database)
    produce(kafka_bootstrap, topic, ["before"])
    produce_raw(kafka_bootstrap, topic, b"{}", b"\xff\xfename", b"value")
    produce(kafka_bootstrap, topic, ["after"])
    with running(one_worker(sqlite_url, kafka_bootstrap, topic, group_id, [])):
        eventually(lambda: committed(kafka_bootstrap, group_id, topic) == 3, "the commit")
    assert notes(database) == {"before": 1, "after": 1}
    ((reason, seen),) = quarantined(database)
    assert "UTF-8" in reason
    assert seen == 1


def produce_raw(bootstrap: str, topic: str, value: bytes, name: bytes, content: bytes) -> None:
    """Produce by the C library itself, which takes any bytes for the name of a header."""
    lib = librdkafka()
    for function in ("conf_new", "new"):
        getattr(lib, f"rd_kafka_{function}").restype = ctypes.c_void_p
    reason = ctypes.create_string_buffer(256)
    size = ctypes.c_size_t(256)
    conf = ctypes.c_void_p(lib.rd_kafka_conf_new())
    lib.rd_kafka_conf_set(conf, b"bootstrap.servers", bootstrap.encode(), reason, size)
    producer = ctypes.c_void_p(lib.rd_kafka_new(0, conf, reason, size))
    answer = lib.rd_kafka_producev(
        producer,
        ctypes.c_int(1), ctypes.c_char_p(topic.encode()),
        ctypes.c_int(4), ctypes.c_char_p(value), ctypes.c_size_t(len(value)),
        ctypes.c_int(_HEADER), ctypes.c_char_p(name), ctypes.c_char_p(content), ctypes.c_ssize_t(len(content)),
        ctypes.c_int(7), ctypes.c_int(2),  # MSGFLAGS: copy
        ctypes.c_int(0),
    )  # fmt: skip
    assert answer == 0
    assert lib.rd_kafka_flush(producer, ctypes.c_int(20_000)) == 0
    lib.rd_kafka_destroy(producer)
