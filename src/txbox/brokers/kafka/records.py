"""A Kafka record as a delivery."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import confluent_kafka as client

from txbox.brokers.base import Delivery
from txbox.brokers.envelope import KAFKA, clock
from txbox.errors import UnusableMessage
from txbox.identity import message_id
from txbox.message import Headers


def delivery_of(raw: client.Message, source: str, tag: Any, *, redelivered: bool) -> Delivery:
    topic, partition, offset = raw.topic() or "", raw.partition() or 0, raw.offset() or 0
    value = raw.value()
    try:
        headers = Headers(raw.headers() or ())
    except (UnicodeDecodeError, SystemError) as error:
        return Delivery(
            None, topic, tag, raw=value or b"", redelivered=redelivered,
            problem=f"Partition {partition}, offset {offset}: a header name is "
            f"not UTF-8 ({type(error).__name__}).",
        )  # fmt: skip
    kind, stored_ms = raw.timestamp()
    return KAFKA.delivery(
        topic, value, headers, tag=tag, redelivered=redelivered, key=raw.key(),
        stored_at=None if kind == client.TIMESTAMP_NOT_AVAILABLE else clock(stored_ms / 1000),
        origin={"source": source, "partition": partition, "offset": offset},
    )  # fmt: skip


def lacks_id(delivery: Delivery) -> bool:
    """Whether it is a message that nothing but its place in the topic names."""
    message = delivery.message
    if message is None or message.headers.get("message-id"):
        return False
    try:
        message_id(message)
    except UnusableMessage:
        return True
    return False


def add_weak_id(delivery: Delivery, uuid: str | None) -> None:
    """Give a message without any other id a weak one, if its topic's UUID is known."""
    message = delivery.message
    if uuid is not None and message is not None and lacks_id(delivery):
        weak_id = f"{uuid}/{message.origin['partition']}/{message.origin['offset']}"
        delivery.message = replace(message, origin={**message.origin, "weak_id": weak_id})
