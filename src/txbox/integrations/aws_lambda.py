"""AWS Lambda: the batches of SQS and Kafka event sources, each message by itself.

Lambda receives, acknowledges and repeats. What a handler fails at it does not repeat: that is parked in the table, and
a worker, or `txbox run --once` on a schedule, retries it. Lambda is asked to deliver again only what the database
does not know: it is away, or another transaction holds the message.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime
from typing import Any

from txbox.app import App
from txbox.brokers import envelope
from txbox.brokers.base import Delivery
from txbox.brokers.sqs import read
from txbox.errors import BrokerError, StoreUnavailable
from txbox.message import Message
from txbox.session import drive

Event = Mapping[str, Any]

_NO_TIME = -1  # Kafka's, of a record without a timestamp


class BatchUnsettled(BrokerError):
    """Raised for Lambda, so that it delivers a batch again: some of it is not in the database."""


def sqs(app: App, event: Event, *, consumer: str | None = None) -> dict[str, Any]:
    """Process a batch of SQS; returns what Lambda is to deliver again, to be returned by the function.

    The event source mapping must have `ReportBatchItemFailures`: without it Lambda deletes the whole batch. Of a FIFO
    queue, what comes behind an unsettled message of its group comes again, too.

    Args:
        app: with a handler for the queue's name. Its `Limits.unavailable_for` must be shorter than the function's
            time-out.
        consumer: if several handlers take the topic.

    Guarantee: what it does not name has committed: processed, parked, dead or quarantined.
    """
    again: list[str] = []
    settle = _Settling(app, consumer)
    for record in event["Records"]:
        group = record.get("attributes", {}).get("MessageGroupId")
        if not settle(_of_sqs(record), group):
            again.append(record["messageId"])
    return {"batchItemFailures": [{"itemIdentifier": message_id} for message_id in again]}


def kafka(
    app: App, event: Event, *, consumer: str | None = None, partial: bool = False
) -> dict[str, Any]:
    """Process a batch of Kafka (MSK or self-managed); returns what the function is to return.

    Args:
        app, consumer: as for `sqs`; the topic is Kafka's.
        partial: the event source mapping has provisioned mode and `ReportBatchItemFailures`: name the first unsettled
            offset of each partition. Without the two, Lambda would take that for success.

    Raises:
        BatchUnsettled: without `partial`: Lambda delivers the whole batch again. What was processed is a duplicate
            then, and nothing runs.

    Guarantee: as of `sqs`. Of a partition, nothing behind an unsettled message is processed.
    """
    settle = _Settling(app, consumer)
    failures: dict[str, int] = {}
    cluster = str(event.get("eventSourceArn") or event.get("bootstrapServers") or "kafka")
    for records in event["records"].values():
        for record in records:
            partition = f"{record['topic']}-{record['partition']}"
            if not settle(_of_kafka(record, cluster), partition):
                failures.setdefault(partition, record["offset"])
    if failures and not partial:
        raise BatchUnsettled(
            f"{len(failures)} of the batch's partitions are not settled: the database is away, or another "
            "process holds a message. Lambda delivers the batch again."
        )
    return {
        "batchItemFailures": [
            {"itemIdentifier": {"partition": partition, "offset": offset}}
            for partition, offset in failures.items()
        ]
    }


class _Settling:
    """One batch: after a message that is not settled, the rest of its sequence is not begun."""

    def __init__(self, app: App, consumer: str | None) -> None:
        self._app, self._consumer = app, consumer
        self._blocked: set[str] = set()
        self._away = False

    def __call__(self, delivery: Delivery, sequence: str | None) -> bool:
        if self._away or sequence in self._blocked:
            return False
        try:
            settled = self._settled(delivery)
        except StoreUnavailable:
            # nor will the rest of the batch find the database in time
            self._away, settled = True, False
        if not settled and sequence is not None:
            self._blocked.add(sequence)
        return settled

    def _settled(self, delivery: Delivery) -> bool:
        app = self._app
        if delivery.message is not None:
            return app.process(delivery.message, consumer=self._consumer).settles
        kept = Message[Any](topic=delivery.topic, payload=delivery.raw)
        assert app.database.sync is not None, "a database without sync connections cannot process"
        drive(app.database.sync, app.intake.unmatched, kept, delivery.problem or "not a message")
        return True


def _of_sqs(record: Event) -> Delivery:
    queue = str(record["eventSourceARN"])
    topic, body, counted = (
        queue.rpartition(":")[2],
        str(record["body"]),
        record.get("attributes", {}),
    )
    try:
        # an event spells the names of attributes with a small letter, the queue's own API does not
        attributes = {
            name: {part[:1].upper() + part[1:]: value for part, value in attribute.items()}
            for name, attribute in record.get("messageAttributes", {}).items()
        }
        for attribute in attributes.values():
            if isinstance(attribute.get("BinaryValue"), str):
                attribute["BinaryValue"] = base64.b64decode(attribute["BinaryValue"])
        payload, headers = read(body, attributes)
    except UnicodeEncodeError:
        raw = body.encode("utf-8", "surrogatepass")
        return Delivery(
            None, topic, problem="The body has lone surrogates: it is not text.", raw=raw
        )
    return envelope.SQS.delivery(
        topic,
        payload,
        headers,
        tag=None,
        origin={
            "source": "sqs", "queue": queue, "sqs_message_id": record["messageId"],
            "weak_id": f"{queue}/{record['messageId']}",
        },
        key=headers.get("key") or counted.get("MessageGroupId"),
        stored_at=_clock(counted.get("SentTimestamp")),
    )  # fmt: skip


def _of_kafka(record: Event, cluster: str) -> Delivery:
    value, key, stored_ms = record.get("value"), record.get("key"), record.get("timestamp")
    # an event has no id of the topic: the time tells a record from that of an earlier topic of this name
    position = f"{record['topic']}/{record['partition']}/{record['offset']}"
    if stored_ms == _NO_TIME:
        stored_ms = None
    weak = {} if stored_ms is None else {"weak_id": f"{cluster}/{position}@{stored_ms}"}
    headers = [
        (name, None if content is None else bytes(octet & 0xFF for octet in content))
        for header in record.get("headers") or ()
        for name, content in header.items()
    ]
    return envelope.KAFKA.delivery(
        record["topic"],
        None if value is None else base64.b64decode(value),
        headers,
        tag=None,
        origin={
            "source": "kafka", "partition": record["partition"], "offset": record["offset"], **weak,
        },
        key=None if key is None else base64.b64decode(key),
        stored_at=_clock(stored_ms),
    )  # fmt: skip


def _clock(milliseconds: object) -> datetime | None:
    """A time by the broker's clock, which SQS writes as text; None if there is none."""
    if not isinstance(milliseconds, int | str):
        return None
    with suppress(ValueError):
        return envelope.clock(int(milliseconds) / 1000)
    return None
