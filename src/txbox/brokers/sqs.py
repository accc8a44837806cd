"""Amazon SQS: standard and FIFO queues, kept invisible for as long as their messages are worked on."""

from __future__ import annotations

import importlib.util
import logging
import math
import time
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from txbox.brokers.base import Delivery, InFlight, Progress
from txbox.brokers.plain import plain_time
from txbox.brokers.sqs_body import read
from txbox.brokers.sqs_call import new_client
from txbox.brokers.sqs_publisher import SQSPublisher
from txbox.brokers.sqs_queue import VISIBLE_MAX_S, Queue, Receipt, in_batches, look_up
from txbox.errors import BrokerError, BrokerUnavailable, ConfigurationError
from txbox.identity import scoped_id
from txbox.message import Headers, Message

_log = logging.getLogger("txbox")

_WAIT_MAX = timedelta(seconds=20)


class SQS:
    """Receives from queues; a topic is a queue's name, `.fifo` included.

    Args:
        queues: names or URLs; without any, the topics of the handlers are the names.
        visibility: how long a message stays ours without word from us, up to 12 h; without it, the
            queue's own time-out. It is extended every third of that while the message is in flight.
        wait: the long poll of an idle source, 1 to 20 s. A longer one costs fewer requests; a stop,
            and the other queues of this source, wait for it to end.
        deduplication_ids: take a FIFO message's MessageDeduplicationId (within its group, where the
            queue deduplicates by group) as id when it has no other. Only for producers that set it
            to the id of the event; refused on queues that hash the content, where two equal
            messages would be one.
        client: a boto3 SQS client of your own, instead of options.
        options: for boto3's client: `region_name`, `endpoint_url`, `config` …; `profile_name` too.

    The id is the message attribute `message-id`, or CloudEvents `ce-source` and `ce-id` (or with
    `ce_`). SQS's MessageId differs when a producer sends again: it counts only on handlers with
    `weak_ids=True`. Attributes become headers, binary ones as bytes; the attribute `key`, else the
    MessageGroupId, is the key. A body that is marked as base64 by txbox's publisher is decoded.

    Guarantee: a message is deleted only after it is settled. What could not be deleted comes again,
    and the inbox takes it as a duplicate. What is in flight at the end is given back at once.
    """

    topics: Sequence[str] | None
    exhausted = False

    def __init__(
        self,
        *queues: str,
        visibility: timedelta | None = None,
        wait: timedelta = timedelta(seconds=1),
        deduplication_ids: bool = False,
        client: Any = None,
        **options: Any,
    ) -> None:
        if visibility is not None and not 1 <= visibility.total_seconds() <= VISIBLE_MAX_S:
            raise ConfigurationError(f"visibility is {visibility}: use 1 second to 12 hours.")
        if not timedelta(seconds=1) <= wait <= _WAIT_MAX:
            raise ConfigurationError(f"wait is {wait}: use 1 to 20 seconds.")
        if client is not None and options:
            raise ConfigurationError("SQS() takes a client or options for one, not both.")
        if "*" in queues or not all(queues):
            raise ConfigurationError("SQS() takes names or URLs of queues: name each.")
        self._wanted = {_topic(queue): queue for queue in queues}
        if len(self._wanted) < len(set(queues)):
            raise ConfigurationError(
                "Two queues of SQS() have one name: give each a source of its own."
            )
        if importlib.util.find_spec("boto3") is None:
            raise ConfigurationError("SQS needs boto3: install it with pip install 'txbox[sqs]'.")
        self.topics = tuple(self._wanted) or None
        self._visible_s = None if visibility is None else math.ceil(visibility.total_seconds())
        self._wait_s = math.ceil(wait.total_seconds())
        self._deduplication_ids = deduplication_ids
        self._given, self._options = client, options
        self._client: Any = None
        self._queues: list[Queue] = []
        self._receipts: dict[tuple[str, str], Receipt] = {}
        self._turn = 0

    @property
    def name(self) -> str:
        return "sqs:" + ",".join(sorted(self._wanted))

    @property
    def redelivery_s(self) -> float | None:
        """After so many seconds without word from us a message comes again; None before `open`."""
        return min((float(queue.visible_s) for queue in self._queues), default=None)

    @property
    def tend_every_s(self) -> float | None:
        visible_s = self.redelivery_s
        return None if visible_s is None else visible_s / 3

    def publisher(self) -> SQSPublisher:
        return SQSPublisher(self._given, self._options, self._wanted)

    def keeps_order(self, topic: str) -> bool:
        """A FIFO queue has message groups; a group's next messages wait for those in flight."""
        return topic.endswith(".fifo")

    def open(
        self,
        topics: Sequence[str],
        progress: Progress,  # noqa: ARG002  # SQS remembers
        in_flight: InFlight | None = None,  # noqa: ARG002  # nobody takes a message away
    ) -> None:
        if not self._wanted:
            if not topics or "*" in topics:
                raise ConfigurationError(
                    "SQS has no 'all queues': name them, as in SQS('orders'), or name handlers' topics."
                )
            self._wanted = {_topic(topic): topic for topic in topics}
        self._receipts = {}
        self._client = self._given or new_client(self._options, self._wait_s + 10)
        try:
            self._find_queues()
        except BrokerUnavailable as error:
            # found again by the first receive
            _log.debug("%s is away: %s", self.name, error)

    def receive(self, messages_max: int, wait_s: float) -> Sequence[Delivery]:
        self._find_queues()
        self._turn += 1
        turn = self._turn % len(self._queues)
        inturn = self._queues[turn:] + self._queues[:turn]
        found: list[Delivery] = []
        if wait_s <= 0 or len(inturn) > 1:
            for queue in inturn:
                if len(found) >= messages_max:
                    return found
                if time.monotonic() < queue.look_at:
                    continue
                try:
                    found += self._receive_from(queue, messages_max - len(found), 0)
                except BrokerUnavailable:
                    # what has come already is handed out; the next receive says what is wrong
                    if not found:
                        raise
                    return found
        if not found and wait_s > 0:
            found += self._receive_from(inturn[0], messages_max, self._wait_s)
        return found

    def tend(self, deliveries: Sequence[Delivery]) -> None:
        receipts = [delivery.tag for delivery in deliveries if isinstance(delivery.tag, Receipt)]
        in_batches([receipt for receipt in receipts if not receipt.gone], Queue.extend)

    def settle(self, deliveries: Sequence[Delivery]) -> None:
        receipts = [delivery.tag for delivery in deliveries if isinstance(delivery.tag, Receipt)]
        for receipt in receipts:
            self._receipts.pop((receipt.queue.url, receipt.message_id), None)
        deleted = 0

        def delete(queue: Queue, batch: Sequence[Receipt]) -> list[Receipt]:
            nonlocal deleted
            left = queue.delete(batch)
            deleted += len(batch) - len(left)
            return left

        try:
            left = in_batches(receipts, delete)
            if left:
                left = in_batches(left, delete)
        except BrokerUnavailable as error:
            error.failed = len(receipts) - deleted
            raise
        if left:
            raise BrokerError(
                f"SQS did not delete {len(left)} of {len(receipts)} messages: they come again as duplicates.",
                failed=len(left),
            )

    def close(self) -> None:
        """Make what was not settled visible again, for whoever receives next."""
        receipts = [receipt for receipt in self._receipts.values() if not receipt.gone]
        self._receipts = {}
        client, self._client = self._client, None
        if client is None:
            return
        try:
            in_batches(receipts, Queue.release)
        finally:
            self._queues = []
            if self._given is None:
                client.close()

    # -- queues and their messages ------------------------------------------------------------

    def _find_queues(self) -> None:
        if not self._queues:
            self._queues = [
                look_up(
                    self._client, topic, queue, self._visible_s,
                    deduplication_ids=self._deduplication_ids,
                )
                for topic, queue in self._wanted.items()
            ]  # fmt: skip

    def _receive_from(self, queue: Queue, messages_max: int, wait_s: int) -> list[Delivery]:
        received = queue.receive(messages_max, wait_s)
        deliveries = (self._delivery(queue, record) for record in received)
        return [delivery for delivery in deliveries if delivery is not None]

    def _delivery(self, queue: Queue, record: dict[str, Any]) -> Delivery | None:
        receipt = Receipt(queue, record["MessageId"], record["ReceiptHandle"])
        known = self._receipts.setdefault((queue.url, receipt.message_id), receipt)
        if known is not receipt:
            # it became visible while we still work on it: the newest handle is the one that deletes
            known.handle, known.received_at, known.gone = receipt.handle, receipt.received_at, False
            return None
        counted = record.get("Attributes", {})
        redelivered = int(counted.get("ApproximateReceiveCount", "1")) > 1
        try:
            message = self._message(queue, record, counted)
        except UnicodeEncodeError:
            raw = str(record["Body"]).encode("utf-8", "surrogatepass")
            problem = "The body contains lone surrogates: it is not text."
            return Delivery(None, queue.topic, receipt, problem, raw, redelivered)
        return Delivery(message, queue.topic, receipt, redelivered=redelivered)

    def _message(
        self, queue: Queue, record: dict[str, Any], counted: dict[str, str]
    ) -> Message[Any]:
        payload, headers = read(str(record["Body"]), record.get("MessageAttributes", {}))
        group = counted.get("MessageGroupId")
        origin: dict[str, Any] = {
            "source": "sqs",
            "queue": queue.arn,
            "sqs_message_id": record["MessageId"],
            "weak_id": f"{queue.arn}/{record['MessageId']}",
        }
        for name, kept in (
            ("SequenceNumber", "sequence_number"), ("ApproximateReceiveCount", "receive_count"),
            ("MessageDeduplicationId", "deduplication_id"),
        ):  # fmt: skip
            if name in counted:
                origin[kept] = counted[name]
        sent = counted.get("SentTimestamp")
        return Message(
            topic=queue.topic,
            payload=payload,
            id=self._deduplication_id(queue, headers, counted),
            type=headers.text("type") or headers.text("ce_type") or headers.text("ce-type"),
            key=headers.text("key") or group,
            headers=headers,
            content_type=headers.text("content-type"),
            time=plain_time(headers)
            or (None if sent is None else datetime.fromtimestamp(int(sent) / 1000, UTC)),
            origin=origin,
        )

    def _deduplication_id(
        self, queue: Queue, headers: Headers, counted: dict[str, str]
    ) -> str | None:
        deduplication_id = counted.get("MessageDeduplicationId")
        if not self._deduplication_ids or deduplication_id is None:
            return None
        if any(headers.get(name) is not None for name in ("message-id", "ce_id", "ce-id")):
            return None
        return (
            scoped_id(counted.get("MessageGroupId", ""), deduplication_id)
            if queue.per_group
            else deduplication_id
        )


def _topic(queue: str) -> str:
    return queue.rstrip("/").rpartition("/")[2]
