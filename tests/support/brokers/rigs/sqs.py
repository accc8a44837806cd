"""SQS: a queue on ElasticMQ."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any, ClassVar, cast

import boto3
from types_boto3_sqs import SQSClient

from tests.support.brokers.rigs import ServerRig
from txbox.brokers.sqs import SQS
from txbox.testing.brokers import Note, Server

ACCESS: dict[str, Any] = {
    "region_name": "elasticmq",
    "aws_access_key_id": "a",
    "aws_secret_access_key": "b",
}


class SqsRig(ServerRig):
    lacks: ClassVar = {
        "native ids": "the broker makes its own",
        "tombstones": "no message is without a body",
    }
    cloud_events = "ce-"
    payloads = ("grüß dich \U0001f600".encode(),)
    headers = (("bytes", b"\xff\x00\xfe"), ("text", "é\U0001f600"))
    redelivery_s = 2.0  # ElasticMQ looks at its clock once a second

    def __init__(
        self,
        address: str,
        server: Server | None = None,
        *,
        visible_s: int = 30,
        fifo: bool = False,
        **attributes: str,
    ) -> None:
        super().__init__(address, server)
        self.client: SQSClient = boto3.client("sqs", endpoint_url=address, **ACCESS)
        self.attributes = {"VisibilityTimeout": str(visible_s)} | attributes
        if fifo:
            self.topic += ".fifo"
            self.attributes["FifoQueue"] = "true"

    @property
    def impatient(self) -> Mapping[str, Any]:
        return {"visibility": timedelta(seconds=1)}

    def create(self) -> None:
        made = self.client.create_queue(
            QueueName=self.topic, Attributes=cast("Any", self.attributes)
        )
        self.url = made["QueueUrl"]

    def remove(self) -> None:
        self.client.delete_queue(QueueUrl=self.url)

    def publish(self, *messages: Note) -> None:
        for note in messages:
            self.send(note)

    def send(self, note: Note, attributes: Mapping[str, Any] | None = None, **more: Any) -> None:
        assert note.payload is not None
        pairs = {name: attribute(value) for name, value in note.pairs}
        self.client.send_message(
            QueueUrl=self.url,
            MessageBody=note.payload.decode(),
            MessageAttributes={**pairs, **(attributes or {})},
            **more,
        )

    def source(self, **options: Any) -> SQS:
        return SQS(self.topic, endpoint_url=self.address, **ACCESS, **options)

    def counts(self) -> tuple[int, int]:
        """(visible, in flight)"""
        found = self.client.get_queue_attributes(QueueUrl=self.url, AttributeNames=["All"])
        counted = cast("dict[str, str]", found["Attributes"])
        return int(counted["ApproximateNumberOfMessages"]), int(
            counted["ApproximateNumberOfMessagesNotVisible"]
        )

    def outstanding(self) -> int:
        return sum(self.counts())


def attribute(value: str | bytes | None) -> Any:
    if isinstance(value, bytes):
        return {"DataType": "Binary", "BinaryValue": value}
    return {"DataType": "String", "StringValue": value}
