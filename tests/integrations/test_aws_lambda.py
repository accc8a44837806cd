"""Batches of Lambda: what is named again, and what never is."""

from __future__ import annotations

import base64
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, Self

import pytest

from txbox import App, Message, Outcome, StoreUnavailable
from txbox.identity import message_id
from txbox.integrations.aws_lambda import BatchUnsettled, kafka, sqs

Rows = Callable[[str], list[Any]]
QUEUE = "arn:aws:sqs:eu-west-1:123456789012:orders"


@pytest.fixture
def app(tmp_path: Path) -> Iterator[App]:
    with App(f"sqlite:///{tmp_path / 'shop.db'}") as app:
        app.init()
        with closing(sqlite3.connect(tmp_path / "shop.db")) as database:
            database.execute("CREATE TABLE booking (message TEXT)")

        @app.handler("orders", consumer="billing")
        def book(message: Message[bytes], tx: sqlite3.Connection) -> None:
            tx.execute("INSERT INTO booking VALUES (?)", (f"{message.id} {message.key}",))
            if message.body == b"fail":
                raise ValueError

        yield app


@pytest.fixture
def rows(tmp_path: Path) -> Rows:
    def query(sql: str) -> list[Any]:
        with closing(sqlite3.connect(tmp_path / "shop.db")) as database:
            return database.execute(sql).fetchall()

    return query


def of_sqs(number: int, body: str = "{}", *, group: str | None = None, **attributes: Any) -> Any:
    named = {"message-id": {"stringValue": f"o-{number}", "dataType": "String"}}
    return {
        "messageId": f"sqs-{number}",
        "body": body,
        "attributes": {} if group is None else {"MessageGroupId": group},
        "messageAttributes": {**named, **attributes},
        "eventSourceARN": QUEUE,
    }


def of_kafka(offset: int, message_id: str, value: bytes | None = b"{}", partition: int = 0) -> Any:
    header = [octet - 256 if octet > 127 else octet for octet in message_id.encode()]
    return {
        "topic": "orders",
        "partition": partition,
        "offset": offset,
        "timestamp": 1545084650987,
        "timestampType": "CREATE_TIME",
        "key": base64.b64encode(b"k").decode(),
        "value": None if value is None else base64.b64encode(value).decode(),
        "headers": [{"message-id": header}],
    }


def batch(*records: Any) -> Any:
    partitions: dict[str, list[Any]] = {}
    for record in records:
        partitions.setdefault(f"{record['topic']}-{record['partition']}", []).append(record)
    return {"eventSource": "aws:kafka", "records": partitions}


def again(*numbers: int) -> Any:
    return {"batchItemFailures": [{"itemIdentifier": f"sqs-{number}"} for number in numbers]}


class Held:
    """While it is entered, another process holds some messages, or the database is away."""

    def __init__(self, app: App, *held: str, away: bool = False) -> None:
        self.app, self.held, self.away = app, held, away
        self.asked: list[object] = []

    def __enter__(self) -> Self:
        process = self.app.process

        def answer(message: Message[Any], *, consumer: str | None = None) -> Outcome:
            identity = message_id(message)
            self.asked.append(identity)
            if self.away:
                raise StoreUnavailable("it is away")
            return (
                Outcome.IN_PROGRESS
                if identity in self.held
                else process(message, consumer=consumer)
            )

        vars(self.app)["process"] = answer
        return self

    def __exit__(self, *_: object) -> None:
        del vars(self.app)["process"]


def test_what_fails_is_parked_and_not_named(app: App, rows: Rows) -> None:
    copy = of_sqs(1)
    assert sqs(app, {"Records": [copy, copy, of_sqs(2, "fail")]}) == again()
    assert rows("SELECT message FROM booking") == [("o-1 None",)]
    assert rows("SELECT message_id, status FROM txbox_inbox ORDER BY 1") == [
        ("o-1", "processed"),
        ("o-2", "failed"),
    ]


def test_what_has_no_id_is_set_aside(app: App, rows: Rows) -> None:
    nameless = of_sqs(1)
    del nameless["messageAttributes"]
    assert sqs(app, {"Records": [nameless]}) == again()
    assert len(rows("SELECT * FROM txbox_quarantine")) == 1


def test_attributes_are_read_as_the_source_reads_them(app: App, rows: Rows) -> None:
    binary = {"binaryValue": base64.b64encode(b"\xff").decode(), "dataType": "Binary"}
    encoded = {"stringValue": "base64", "dataType": "String"}
    record = of_sqs(1, base64.b64encode(b"fail").decode(), raw=binary)
    record["messageAttributes"]["txbox-body"] = encoded
    sqs(app, {"Records": [record]})
    assert rows("SELECT status FROM txbox_inbox") == [("failed",)]  # its body was `fail`


def test_the_rest_of_a_group_comes_again_in_its_order(app: App, rows: Rows) -> None:
    records = [of_sqs(1, group="g"), of_sqs(2, group="h"), of_sqs(3, group="g"), of_sqs(4)]
    with Held(app, "o-1") as held:
        assert sqs(app, {"Records": records}) == again(1, 3)
    assert held.asked == ["o-1", "o-2", "o-4"]
    assert sqs(app, {"Records": records}) == again()
    written = [("o-2 h",), ("o-4 None",), ("o-1 g",), ("o-3 g",)]
    assert rows("SELECT message FROM booking") == written


def test_a_failure_holds_its_group_if_the_handler_is_ordered(app: App, rows: Rows) -> None:
    @app.handler("orders", consumer="ordered", ordered=True)
    def run(message: Message[bytes], tx: sqlite3.Connection) -> None:
        raise ValueError

    records = [of_sqs(1, group="g"), of_sqs(2, group="g")]
    assert sqs(app, {"Records": records}, consumer="ordered") == again()
    assert rows("SELECT message_id, status, attempts FROM txbox_inbox ORDER BY 1") == [
        ("o-1", "failed", 1),
        ("o-2", "pending", 0),
    ]


def test_while_the_database_is_away_it_is_asked_once(app: App) -> None:
    with Held(app, away=True) as held:
        assert sqs(app, {"Records": [of_sqs(1), of_sqs(2), of_sqs(3)]}) == again(1, 2, 3)
    assert held.asked == ["o-1"]


def test_kafka_is_read_whole(app: App, rows: Rows) -> None:
    tombstone = of_kafka(2, "ö-2", None)
    answer = kafka(app, batch(of_kafka(1, "o-1"), of_kafka(1, "o-1"), tombstone))
    assert answer == {"batchItemFailures": []}
    assert rows("SELECT message FROM booking") == [("o-1 k",), ("ö-2 k",)]


def test_the_time_is_the_brokers(app: App) -> None:
    times: list[Any] = []

    @app.handler("orders", consumer="times")
    def keep(message: Message[bytes], tx: sqlite3.Connection) -> None:
        times.append(message.time)

    record = of_sqs(1)
    record["attributes"]["SentTimestamp"] = "1545082649183"
    sqs(app, {"Records": [record]}, consumer="times")
    record = of_sqs(2)
    record["attributes"]["SentTimestamp"] = "soon"
    sqs(app, {"Records": [record]}, consumer="times")
    kafka(app, batch(of_kafka(3, "o-3")), consumer="times")
    assert [moment and moment.timestamp() for moment in times] == [
        1545082649.183,
        None,
        1545084650.987,
    ]


def test_weak_ids_of_kafka_know_an_earlier_topic_by_its_time(app: App, rows: Rows) -> None:
    @app.handler("orders", consumer="weak", weak_ids=True)
    def run(message: Message[bytes], tx: sqlite3.Connection) -> None: ...

    first = of_kafka(7, "")
    first["headers"] = []
    later = {**first, "timestamp": first["timestamp"] + 1}
    # without a time it would be taken for one of an earlier topic
    timeless = {**first, "timestamp": -1}
    for record in (first, first, later, timeless):
        kafka(app, batch(record), consumer="weak")
    assert len(rows("SELECT * FROM txbox_quarantine")) == 1
    assert rows("SELECT message_id FROM txbox_inbox WHERE consumer = 'weak' ORDER BY 1") == [
        ("weak:kafka/orders/0/7@1545084650987",),
        ("weak:kafka/orders/0/7@1545084650988",),
    ]


def test_an_unsettled_batch_of_kafka_comes_again(app: App, rows: Rows) -> None:
    records = batch(of_kafka(1, "o-1"), of_kafka(2, "o-2"), of_kafka(7, "o-7", partition=3))
    with Held(app, "o-1"), pytest.raises(BatchUnsettled, match="delivers the batch"):
        kafka(app, records)
    assert rows("SELECT message FROM booking") == [("o-7 k",)]  # nothing behind an unsettled one
    kafka(app, records)
    assert rows("SELECT message FROM booking") == [("o-7 k",), ("o-1 k",), ("o-2 k",)]


def test_partial_names_the_first_offset_of_each_partition(app: App) -> None:
    records = batch(of_kafka(1, "o-1"), of_kafka(2, "o-2"), of_kafka(7, "o-7", partition=3))
    with Held(app, "o-2", "o-7"):
        answer = kafka(app, records, partial=True)
    assert answer == {
        "batchItemFailures": [
            {"itemIdentifier": {"partition": "orders-0", "offset": 2}},
            {"itemIdentifier": {"partition": "orders-3", "offset": 7}},
        ]
    }


def test_a_body_that_is_no_text_is_set_aside(app: App, rows: Rows) -> None:
    assert sqs(app, {"Records": [of_sqs(1, "\ud800")]}) == again()
    assert len(rows("SELECT * FROM txbox_quarantine")) == 1
