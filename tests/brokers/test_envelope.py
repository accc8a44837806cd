"""The same event becomes the same message on every transport, binary or structured; none stops a source."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from aiormq.abc import DeliveredMessage
from confluent_kafka import TIMESTAMP_CREATE_TIME
from nats.aio.msg import Msg
from pamqp.commands import Basic
from pamqp.header import ContentHeader

from txbox import Headers, Message, UnusableMessage
from txbox.brokers import envelope, nats, redis
from txbox.brokers.base import Delivery
from txbox.brokers.envelope import Transport, as_binary, as_structured
from txbox.brokers.file import File
from txbox.brokers.kafka.partitions import Partition, Record
from txbox.brokers.kafka.records import delivery_of
from txbox.brokers.rabbitmq import source as rabbitmq
from txbox.brokers.sqs import SQS, Queue
from txbox.errors import MessageRefused
from txbox.identity import message_id
from txbox.message import HeaderValue
from txbox.testing.brokers import Alone

Attributes = Mapping[str, HeaderValue]
#: Makes a delivery of what a client would hand over: headers, payload, content type.
Wire = Callable[[Attributes, bytes, "str | None"], Delivery]

STORED = datetime(2026, 11, 23, 9, 0, tzinfo=UTC)
STORED_MS = int(STORED.timestamp() * 1000)
DATA = b'{"cents":  100.10, "name": "\xc3\xa9"}'
EVENT: dict[str, str] = {
    "specversion": "1.0",
    "id": "e 1",
    "source": "/my shop",
    "type": "order.paid",
    "subject": "o-1",
    "time": "2026-11-20T17:00:01.234567+00:00",
    "traceparent": "00-1",
}
STRUCTURED = "application/cloudevents+json"


def on_kafka(attributes: Attributes, payload: bytes, content_type: str | None) -> Delivery:
    pairs = [*attributes.items(), *([("content-type", content_type)] if content_type else [])]
    raw: Any = SimpleNamespace(
        topic=lambda: "orders",
        partition=lambda: 0,
        offset=lambda: 7,
        value=lambda: payload,
        headers=lambda: [
            (name, value.encode() if isinstance(value, str) else value) for name, value in pairs
        ],
        key=lambda: None,
        timestamp=lambda: (TIMESTAMP_CREATE_TIME, STORED_MS),
    )
    return delivery_of(
        raw, "kafka:shop", Record(Partition("orders", 0), 7, None, False), redelivered=False
    )


def on_rabbitmq(
    attributes: Attributes, payload: bytes, content_type: str | None, **properties: Any
) -> Delivery:
    headers: Any = {
        name: bytearray(value) if isinstance(value, bytes) else value
        for name, value in attributes.items()
    }
    described = Basic.Properties(content_type=content_type, headers=headers, **properties)
    frame = Basic.Deliver("c", 1, False, "", "orders")
    channel: Any = None
    delivered = DeliveredMessage(
        delivery=frame, header=ContentHeader(properties=described), body=payload, channel=channel
    )
    return rabbitmq.delivery_of("orders", delivered, "unreadable", None)


def on_sqs(
    attributes: Attributes, payload: bytes, content_type: str | None, **counted: str
) -> Delivery:
    pairs = {**attributes, **({"content-type": content_type} if content_type else {})}
    record = {
        "MessageId": "m", "ReceiptHandle": "r", "Body": payload.decode(),
        "Attributes": {"SentTimestamp": str(STORED_MS), **counted},
        "MessageAttributes": {
            name: {"DataType": "Binary", "BinaryValue": value}
            if isinstance(value, bytes)
            else {"DataType": "String", "StringValue": value}
            for name, value in pairs.items()
        },
    }  # fmt: skip
    queue = Queue(None, "orders", "https://sqs/orders", "arn:aws:sqs:orders", False, 30)
    nothing: Any = None
    consumer = SQS("orders", client=MagicMock()).consumer((), nothing)
    delivery = consumer._delivery(queue, record)
    assert delivery is not None
    return delivery


def on_nats(attributes: Attributes, payload: bytes, content_type: str | None) -> Delivery:
    pairs: Any = [*attributes.items(), *([("content-type", content_type)] if content_type else [])]
    reply = f"$JS.ACK.orders.shop.1.7.7.{STORED_MS}000000.0"
    client: Any = None
    got = Msg(client, "orders", reply, payload, nats.RawHeaders(pairs))
    return nats.delivery_of(got, "orders", nats.Consumer("orders"))


def on_redis(attributes: Attributes, payload: bytes, content_type: str | None) -> Delivery:
    pairs = {**attributes, **({"content-type": content_type} if content_type else {})}
    fields = [
        (name.encode(), value.encode() if isinstance(value, str) else value or b"")
        for name, value in pairs.items()
    ]
    entry = f"{STORED_MS}-0".encode()
    return redis.delivery_of(
        [*fields, (b"payload", payload)], ("orders", entry), b"payload", "redis::0",
        redelivered=False,
    )  # fmt: skip


WIRES: dict[str, tuple[Transport, Wire]] = {
    "kafka": (envelope.KAFKA, on_kafka),
    "rabbitmq": (envelope.RABBITMQ, on_rabbitmq),
    "sqs": (envelope.SQS, on_sqs),
    "nats": (envelope.NATS, on_nats),
    "redis": (envelope.REDIS, on_redis),
}


@pytest.fixture(params=WIRES)
def transport(request: pytest.FixtureRequest) -> Transport:
    return WIRES[request.param][0]


@pytest.fixture
def wire(transport: Transport) -> Wire:
    return next(wire for row, wire in WIRES.values() if row is transport)


def prefixed(prefix: str, attributes: Mapping[str, str] = EVENT) -> dict[str, str]:
    return {prefix + name: value for name, value in attributes.items()}


def structured(attributes: Mapping[str, Any] = EVENT, data: bytes | None = DATA) -> bytes:
    text = json.dumps(dict(attributes))
    return text.encode() if data is None else text[:-1].encode() + b', "data": ' + data + b"}"


def the_message(delivery: Delivery) -> Message[Any]:
    assert delivery.message is not None, delivery.problem
    return delivery.message


def is_the_event(message: Message[Any], prefix: str) -> None:
    assert message_id(message) == "/my%20shop e 1"
    assert (message.topic, message.type, message.key) == ("orders", "order.paid", "o-1")
    assert (message.payload, message.content_type) == (DATA, "application/json")
    assert message.time == datetime.fromisoformat(EVENT["time"])
    found = {name: message.headers.text(prefix + name) for name in EVENT}
    assert found == EVENT


# -- the same event is the same message ----------------------------------------------------------


def test_binary(transport: Transport, wire: Wire) -> None:
    is_the_event(
        the_message(wire(prefixed(transport.prefix), DATA, "application/json")), transport.prefix
    )


@pytest.mark.parametrize(
    "content_type", [STRUCTURED, "Application/CloudEvents+JSON; charset=UTF-8"]
)
def test_structured(transport: Transport, wire: Wire, content_type: str) -> None:
    message = the_message(wire({}, structured(), content_type))
    is_the_event(message, transport.prefix)
    assert message.headers.get("content-type") is None, "that of the event, not of its data"


@pytest.mark.parametrize("prefix", ["ce_", "ce-", "cloudEvents:", "cloudEvents_"])
def test_every_spelling_of_the_attributes(wire: Wire, prefix: str) -> None:
    is_the_event(the_message(wire(prefixed(prefix), DATA, "application/json")), prefix)


def test_a_line_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "orders.jsonl"
    path.write_bytes(structured() + b"\n")
    source = File(path).consumer(["orders"], Alone())
    (delivery,) = source.receive(10, 0)
    source.close()
    is_the_event(the_message(delivery), "ce_")


def test_partitionkey_goes_before_subject(transport: Transport, wire: Wire) -> None:
    event = {**EVENT, "partitionkey": "p"}
    assert the_message(wire(prefixed(transport.prefix, event), b"1", None)).key == "p"
    assert the_message(wire({}, structured(event), STRUCTURED)).key == "p"


@pytest.mark.parametrize(
    ("message", "payload"),
    [
        (Message[Any](topic="orders", id="m1", payload=DATA, content_type="application/json"), DATA),
        (Message[Any](topic="orders", id="m1", payload=b'"text"'), b'"text"'),
        (Message[Any](topic="orders", id="m1", payload=b"<a/>", content_type="text/xml"), b"<a/>"),
        (Message[Any](topic="orders", id="m1", payload=b"\xff\x00"), b"\xff\x00"),
        (Message[Any](topic="orders", id="m1", payload=b"[" * 100_000), b"[" * 100_000),
        (Message[Any](topic="orders", id="m1", payload=b"NaN"), b"NaN"),
        (Message[Any](topic="orders", id="m1", payload=b"1e400"), b"1e400"),
        (Message[Any](topic="orders", id="m1", payload=b""), b""),
        (Message[Any](topic="orders", id="m1", payload=None), None),
    ],
    ids=["json", "string", "xml", "bytes", "deep", "NaN", "number", "empty", "none"],
)  # fmt: skip
def test_what_a_relay_sends_structured_is_read_back_byte_for_byte(
    wire: Wire, message: Message[Any], payload: bytes | None
) -> None:
    sent = as_structured(replace(message, type="t", key="k"), "/shop")
    assert sent.payload is not None
    found = the_message(wire({}, sent.payload, sent.content_type))
    assert (found.payload, found.type, found.key) == (payload, "t", "k")
    assert message_id(found) == "/shop m1"


def test_what_leaves_comes_back(transport: Transport) -> None:
    """Fields that are not headers are passed separately, as publisher and source of the transport do."""
    at = datetime(2026, 11, 20, tzinfo=UTC)
    message: Message[Any] = Message(
        topic="orders", id="m1", type="t", key="k", content_type="x/y", time=at, payload=b"1",
        headers=(("note", "1"), ("note", b"\xff"), ("Type", "another"), ("KEY", "another"), ("message-id", "another")),
    )  # fmt: skip
    for sent in (message, as_binary(message, "/shop", transport.prefix)):
        delivery = transport.delivery(
            "orders", b"1", transport.headers(sent), origin={}, tag=None,
            message_id="m1" if transport.id is None else None,
            message_type="t" if transport.type is None else None,
            key=b"k" if transport.key is None else None,
            content_type="x/y" if transport.content_type is None else None,
            time=at if transport.time is None else None,
        )  # fmt: skip
        found = the_message(delivery)
        assert message_id(found) == "m1"
        assert (found.type, found.key, found.content_type, found.time) == ("t", "k", "x/y", at)
        assert found.headers.get_all("note") == ["1", b"\xff"]
        assert "another" not in [value for _, value in found.headers]


# -- who decides -----------------------------------------------------------------------------------


def test_plain_headers_go_before_the_event(transport: Transport, wire: Wire) -> None:
    plain = {"message-id": "m1", "type": "t", "key": "k", "time": "2026-01-01T00:00:00"}
    for delivery in (
        wire({**prefixed(transport.prefix), **plain}, DATA, "application/json"),
        wire(plain, structured(), STRUCTURED),
    ):
        message = the_message(delivery)
        assert message_id(message) == "m1"
        assert (message.type, message.key) == ("t", "k")
        assert message.time == datetime(2026, 1, 1, tzinfo=UTC)
        assert (message.payload, message.content_type) == (DATA, "application/json")


def test_properties_go_before_headers_and_events() -> None:
    at = datetime(2026, 1, 2, tzinfo=UTC)
    headers = {**prefixed("ce_"), "message-id": "m2", "type": "t2"}
    for payload, content_type in ((b"1", "x/y"), (structured(), STRUCTURED)):
        message = the_message(
            on_rabbitmq(headers, payload, content_type, message_id="m1", message_type="t1", timestamp=at)
        )  # fmt: skip
        assert (message_id(message), message.type, message.time) == ("m1", "t1", at)


def test_the_key_of_a_record_and_a_group_go_before_the_event() -> None:
    record = envelope.KAFKA.delivery("t", b"1", prefixed("ce_"), origin={}, tag=None, key=b"\xfe")
    assert the_message(record).key == "hex:fe"
    empty = envelope.KAFKA.delivery("t", b"1", prefixed("ce_"), origin={}, tag=None, key=b"")
    assert the_message(empty).key == "", "it has a partition, too"
    assert the_message(on_sqs(prefixed("ce-"), b"1", None, MessageGroupId="g")).key == "g"
    both = on_sqs({**prefixed("ce-"), "key": "k"}, b"1", None, MessageGroupId="g")
    assert the_message(both).key == "k"


def test_the_clock_of_the_broker_is_the_time_where_nobody_says_one(
    transport: Transport, wire: Wire
) -> None:
    for headers in ({}, {"time": "yesterday"}, {"time": ""}, {"time": b"\xff"}):
        message = the_message(wire(headers, b"1", None))
        assert message.time == (None if transport is envelope.RABBITMQ else STORED)


def test_ids_in_headers_go_before_those_of_a_structured_event(wire: Wire) -> None:
    """They were the id before structured events were read: a known message must not get another id."""
    for headers, expected in (
        ({"message-id": "m1"}, "m1"),
        ({"ce_id": "e2", "ce_source": "/other"}, "/other e2"),
        ({"ce_id": "e2"}, "/my%20shop e 1"),
    ):
        assert message_id(the_message(wire(headers, structured(), STRUCTURED))) == expected
    with pytest.raises(UnusableMessage):
        message_id(the_message(wire({"message-id": b"\xff"}, structured(), STRUCTURED)))


def test_an_empty_header_says_nothing(wire: Wire) -> None:
    headers = {"type": "", "key": "", "ce_type": "t", "ce_partitionkey": "", "ce_subject": "k"}
    message = the_message(wire(headers, b"1", None))
    assert (message.type, message.key) == ("t", "k")


def test_text_that_is_no_utf8_says_nothing_but_as_a_key(wire: Wire) -> None:
    message = the_message(wire({"type": b"\xff", "ce_type": "t", "key": b"\xfe"}, b"1", None))
    assert (message.type, message.key) == ("t", "hex:fe")


def test_the_event_of_an_event_stays_one(wire: Wire) -> None:
    """The content type of its data does not make a binary event a structured one."""
    message = the_message(wire({"ce_datacontenttype": STRUCTURED}, structured(), None))
    assert (message.payload, message.content_type) == (structured(), STRUCTURED)


# -- what cannot be read ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("payload", "said"),
    [
        (b"", "not a JSON object"),
        (b"[]", "not a JSON object"),
        (b'{"id": "1"} {}', "not a JSON object"),
        (b'{"id": NaN}', "not a JSON object"),
        (b'{"data": ' + b"[" * 100_000, "not a JSON object"),
        (b'{"x": ' + b'{"x":' * 100_000, "not a JSON object"),
        (b'{"id": "\\ud800', "not a JSON object"),
        (b'{"type": ["t"]}', "type of the CloudEvent must be text"),
        (b'{"subject": 1.5e3, "datacontenttype": {}}', "datacontenttype of the CloudEvent must be"),
        (b'{"data_base64": "%"}', "not valid base64"),
        (b'{"data_base64": 7}', "not valid base64"),
        (b'{"data": "\\ud800", "datacontenttype": "text/plain"}', "lone surrogates"),
    ],
)
def test_an_event_that_cannot_be_read_is_a_problem_with_its_bytes(
    wire: Wire, payload: bytes, said: str
) -> None:
    delivery = wire({"message-id": "m1"}, payload, STRUCTURED)
    assert delivery.message is None
    assert said in str(delivery.problem)
    assert (delivery.topic, delivery.raw) == ("orders", payload)


def test_an_event_that_is_no_utf8_is_a_problem() -> None:
    for wire in (on_kafka, on_rabbitmq, on_nats, on_redis):
        delivery = wire({}, b'{"id": "\xff"}', STRUCTURED)
        assert "not UTF-8 (byte 8)" in str(delivery.problem)


def test_a_batch_of_events_is_refused(wire: Wire) -> None:
    payload = b"[" + structured() + b"]"
    delivery = wire({}, payload, "application/cloudevents-batch+json; charset=utf-8")
    assert "send each event separately" in str(delivery.problem)
    assert (delivery.message, delivery.raw) == (None, payload)


def test_an_event_in_another_format_is_left_to_the_handler(wire: Wire) -> None:
    message = the_message(wire({"message-id": "m1"}, b"avro", "application/cloudevents+avro"))
    assert (message_id(message), message.payload) == ("m1", b"avro")
    assert message.content_type == "application/cloudevents+avro"


@pytest.mark.parametrize("hostile", ["a\0b", "\ud800", "x" * 100_000, "\u202e"])
def test_hostile_attributes_are_for_the_inbox_to_judge(wire: Wire, hostile: str) -> None:
    event = {
        "id": hostile,
        "source": hostile,
        "type": hostile,
        "subject": hostile,
        hostile: hostile,
    }
    message = the_message(wire({}, structured(event), STRUCTURED))
    assert (message.type, message.key, message.payload) == (hostile, hostile, DATA)


def test_an_event_without_an_id_has_none(wire: Wire) -> None:
    for event in (
        {"source": "/shop"},
        {"id": "", "source": "/shop"},
        {"id": None},
        {"id": True},
    ):
        with pytest.raises(UnusableMessage, match="no id"):
            message_id(the_message(wire({}, structured(event), STRUCTURED)))


def test_a_tombstone_is_no_event() -> None:
    delivery = envelope.KAFKA.delivery(
        "t", None, Headers([("content-type", STRUCTURED)]), origin={}, tag=None
    )
    assert the_message(delivery).payload is None


def test_a_payload_of_none_is_refused_where_it_cannot_be(transport: Transport) -> None:
    """Kafka's publisher, whose records can be without a value, does not ask."""
    message: Message[Any] = Message(topic="orders", payload=None)
    with pytest.raises(MessageRefused, match=f"{transport.name} has no tombstones"):
        transport.payload(message)


def test_base64_in_an_event(wire: Wire) -> None:
    event = {**EVENT, "data_base64": base64.b64encode(b"\xff\x00").decode()}
    assert the_message(wire({}, structured(event, None), STRUCTURED)).payload == b"\xff\x00"


def test_headers_of_sqs_that_are_nested_without_end_stay_an_attribute() -> None:
    """Python's parser raises RecursionError for them."""
    hostile = "[" * 100_000
    message = the_message(on_sqs({"txbox-headers": hostile, "message-id": "m1"}, b"1", None))
    assert (message_id(message), message.headers.get("txbox-headers")) == ("m1", hostile)


def test_headers_packed_into_one_are_those_of_the_message() -> None:
    """As Debezium sends the column of the outbox; what the transport says itself comes first."""
    packed = json.dumps([["tag", "1"], ["tag", "2"], ["raw", {"b64": "/w=="}], ["type", "other"]])
    sent: Attributes = {"type": "due", "txbox-headers": packed.encode()}
    delivery = envelope.KAFKA.delivery("t", b"", sent, origin={}, tag=0)
    assert delivery.message is not None
    assert delivery.message.type == "due"
    assert delivery.message.headers[1:4] == (("tag", "1"), ("tag", "2"), ("raw", b"\xff"))


@pytest.mark.parametrize(
    "text",
    ["[", "{}", "[1]", '[["a", 1]]', '[["a", {"c": "d"}]]', '[["a"]]', '[["a", {"b64": "%/w="}]]'],
)
def test_another_header_of_that_name_stays_one(text: str) -> None:
    delivery = envelope.KAFKA.delivery("t", b"x", {"txbox-headers": text}, origin={}, tag=0)
    assert delivery.message is not None
    assert delivery.message.headers.get("txbox-headers") == (None if text == "{}" else text)


# -- in HTTP ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (b"a%20b", "a b"), (b"%E2%82%AC", "€"), (b"100%", "100%"), (b"%zz", "%zz"), (b"%2541", "%41"),
        (b'"a \\"b\\" c"', 'a "b" c'), (b'"a%20b"', "a b"), (b'"', '"'), (b'a "b"', 'a "b"'),
        (b"%FF", "%FF"), (b"\xc3\xa9", b"\xc3\xa9"), (b"", ""), (b'""', ""),
    ],
)  # fmt: skip
def test_attributes_in_http(value: bytes, expected: str | bytes) -> None:
    assert envelope.from_http("ce-subject", value) == expected
    plain = value if isinstance(expected, bytes) else value.decode()
    assert envelope.from_http("x-subject", value) == plain
