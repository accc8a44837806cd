"""Amazon SQS: standard and FIFO queues, kept invisible for as long as their messages are worked on."""

from __future__ import annotations

import importlib.util
import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from txbox.brokers.base import Delivery, InFlight, Progress
from txbox.brokers.plain import plain_time
from txbox.brokers.sqs.body import read
from txbox.brokers.sqs.client import DENIED, GONE, new_client
from txbox.brokers.sqs.publisher import SQSPublisher
from txbox.errors import BrokerError, BrokerUnavailable, ConfigurationError
from txbox.identity import scoped_id
from txbox.message import Headers, Message

_log = logging.getLogger("txbox")

_WAIT_MAX = timedelta(seconds=20)
VISIBLE_MAX_S = 12 * 3600.0  # from the receipt on; no extension leads beyond it
_BATCH_MAX = 10  # SQS's own bound, on every call
_QUIET_S = (0.1, 1.0)
_RECEIPT_GONE = frozenset({
    "ReceiptHandleIsInvalid", "InvalidParameterValue", "MessageNotInflight",
    "AWS.SimpleQueueService.MessageNotInflight",
})  # fmt: skip


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


@dataclass(slots=True, eq=False)
class Queue:
    """What a source knows of one queue. Every call raises as `_called` says.

    Args:
        per_group: it deduplicates within a message group.
        visible_s: how long a message is ours without word from us.
        quiet_s: how long an empty queue is left alone; `look_at`: until when, of the monotonic clock.
    """

    client: Any
    topic: str
    url: str
    arn: str
    per_group: bool
    visible_s: int
    quiet_s: float = 0.0
    look_at: float = 0.0

    def receive(self, messages_max: int, wait_s: int) -> Sequence[dict[str, Any]]:
        answer = _called(
            lambda: self.client.receive_message(
                QueueUrl=self.url,
                MaxNumberOfMessages=min(messages_max, _BATCH_MAX),
                WaitTimeSeconds=wait_s,
                VisibilityTimeout=self.visible_s,
                MessageAttributeNames=["All"],
                MessageSystemAttributeNames=["All"],
            ),
            self.topic,
        )
        received: Sequence[dict[str, Any]] = answer.get("Messages", [])
        # while others are worked on, an empty queue is not asked many times a second
        first_s, longest_s = _QUIET_S
        self.quiet_s = 0.0 if received else min(max(first_s, 2 * self.quiet_s), longest_s)
        self.look_at = time.monotonic() + self.quiet_s
        return received

    def extend(self, receipts: Sequence[Receipt]) -> list[Receipt]:
        entries: list[dict[str, Any]] = []
        for index, receipt in enumerate(receipts):
            left_s = VISIBLE_MAX_S - (time.monotonic() - receipt.received_at)
            receipt.gone = left_s < 1
            if receipt.gone:
                _log.warning(
                    "A message of %s is in flight for 12 h: SQS will deliver it again.", self.topic
                )
            else:
                entries.append(_entry(index, receipt, min(self.visible_s, int(left_s))))
        if entries:
            for failed in self._change_visibility(entries):
                receipts[int(failed["Id"])].gone = failed.get("Code") in _RECEIPT_GONE
        return []

    def delete(self, receipts: Sequence[Receipt]) -> list[Receipt]:
        """Return those that were not deleted."""
        entries = [_entry(index, receipt) for index, receipt in enumerate(receipts)]
        answer = _called(
            lambda: self.client.delete_message_batch(QueueUrl=self.url, Entries=entries),
            self.topic,
        )
        return [receipts[int(failed["Id"])] for failed in answer.get("Failed", [])]

    def release(self, receipts: Sequence[Receipt]) -> list[Receipt]:
        self._change_visibility(
            [_entry(index, receipt, 0) for index, receipt in enumerate(receipts)]
        )
        return []

    def _change_visibility(self, entries: list[dict[str, Any]]) -> list[Any]:
        answer = _called(
            lambda: self.client.change_message_visibility_batch(QueueUrl=self.url, Entries=entries),
            self.topic,
        )
        failed: list[Any] = answer.get("Failed", [])
        return failed


@dataclass(slots=True, eq=False)
class Receipt:
    """The right to delete one message: the newest handle of it.

    Args:
        received_at: of the monotonic clock, in seconds.
        gone: SQS does not know the handle any more, or will not in a moment.
    """

    queue: Queue
    message_id: str
    handle: str
    received_at: float = field(default_factory=time.monotonic)
    gone: bool = False


def look_up(
    client: Any, topic: str, queue: str, visible_s: int | None, *, deduplication_ids: bool
) -> Queue:
    """Ask for a queue by its name or URL.

    Args:
        visible_s: instead of the queue's own time-out.
        deduplication_ids: they are to be ids of messages.

    Raises:
        ConfigurationError: it is not there, or cannot be used so.
        BrokerUnavailable.
    """
    url: str = queue
    if "/" not in queue:
        url = _called(lambda: client.get_queue_url(QueueName=queue), queue, found=False)["QueueUrl"]
    known = _called(
        lambda: client.get_queue_attributes(QueueUrl=url, AttributeNames=["All"]),
        queue,
        found=False,
    )["Attributes"]
    if deduplication_ids and known.get("ContentBasedDeduplication") == "true":
        raise ConfigurationError(
            f"Queue {queue!r} hashes the content as deduplication id: two equal messages would be one; "
            "leave deduplication_ids out and send a message-id attribute."
        )
    visible_s = visible_s or int(known["VisibilityTimeout"])
    if visible_s < 1:
        raise ConfigurationError(
            f"Queue {queue!r} has no visibility time-out: pass visibility= to SQS(…)."
        )
    return Queue(
        client,
        topic,
        url,
        known["QueueArn"],
        per_group=known.get("DeduplicationScope") == "messageGroup",
        visible_s=visible_s,
    )


def in_batches(
    receipts: Sequence[Receipt], call: Callable[[Queue, Sequence[Receipt]], list[Receipt]]
) -> list[Receipt]:
    """Call with each queue's receipts, as many as SQS takes at once; returns what the calls do."""
    of_queue: dict[str, list[Receipt]] = {}
    for receipt in receipts:
        of_queue.setdefault(receipt.queue.url, []).append(receipt)
    left: list[Receipt] = []
    for queue_receipts in of_queue.values():
        for start in range(0, len(queue_receipts), _BATCH_MAX):
            left += call(queue_receipts[0].queue, queue_receipts[start : start + _BATCH_MAX])
    return left


def _entry(index: int, receipt: Receipt, visible_s: int | None = None) -> dict[str, Any]:
    more = {} if visible_s is None else {"VisibilityTimeout": visible_s}
    return {"Id": str(index), "ReceiptHandle": receipt.handle, **more}


def _called(call: Callable[[], Any], queue: str, *, found: bool = True) -> Any:
    """Call SQS; what it answers decides whether waiting helps.

    Args:
        found: the queue has been there: who makes it anew, or starts its server, brings it back.

    Raises:
        ConfigurationError: no wait helps.
        BrokerUnavailable: it may.
    """
    from botocore import exceptions as boto
    from botocore.parsers import ResponseParserError

    try:
        return call()
    except (boto.NoCredentialsError, boto.PartialCredentialsError, boto.ProfileNotFound) as error:
        raise ConfigurationError(
            f"There are no credentials for queue {queue!r}: set AWS's variables, or pass a profile_name."
        ) from error
    except (
        boto.ConnectionError, boto.HTTPClientError, boto.IncompleteReadError,
        boto.CredentialRetrievalError, ResponseParserError,
    ) as error:  # fmt: skip
        raise BrokerUnavailable(
            f"SQS cannot be reached for queue {queue!r} ({type(error).__name__})."
        ) from error
    except boto.ParamValidationError as error:
        raise ConfigurationError(f"Queue {queue!r} cannot be asked for: check its name.") from error
    except boto.ClientError as error:
        code = str(error.response.get("Error", {}).get("Code", ""))
        if code in DENIED or (code in GONE and not found):
            raise ConfigurationError(
                f"Queue {queue!r} cannot be used ({code}): check its name, the region and the permissions."
            ) from error
        raise BrokerUnavailable(f"SQS refused a call for queue {queue!r} ({code}).") from error
