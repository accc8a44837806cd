"""Amazon SQS: standard and FIFO queues, whose messages stay invisible while they are being processed."""

from __future__ import annotations

import importlib.util
import json
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any

from txbox.brokers import envelope
from txbox.brokers.base import Delivery, Facts, InFlight, Progress, Source, later_if_away, refusal
from txbox.brokers.sqs.publisher import (
    BATCH_MAX,
    DENIED,
    GONE,
    MALFORMED,
    NO_CREDENTIALS,
    CallError,
    SQSPublisher,
    call,
    new_client,
    queue_attributes,
    read,
)
from txbox.errors import BrokerError, BrokerUnavailable, ConfigurationError
from txbox.identity import scoped_id
from txbox.message import Headers

_log = logging.getLogger("txbox")

_WAIT_MAX = timedelta(seconds=20)
VISIBLE_MAX_S = 12 * 3600.0  # counted from receipt; no extension goes beyond it
_ASK_S = 10.0
_QUIET_S = (0.1, 1.0)
_SHOWN = {
    "SequenceNumber": "sequence_number",
    "ApproximateReceiveCount": "receive_count",
    "MessageDeduplicationId": "deduplication_id",
}
_MISTAKES = {
    **dict.fromkeys(NO_CREDENTIALS, "set the AWS variables, or pass profile_name="),
    **dict.fromkeys(DENIED | GONE, "check its name, the region and the permissions"),
    MALFORMED: "check its name or URL",
}
_RECEIPT_GONE = frozenset({
    "ReceiptHandleIsInvalid", "InvalidParameterValue", "MessageNotInflight",
    "AWS.SimpleQueueService.MessageNotInflight",
})  # fmt: skip


class SQS(Source):
    """Receives from queues. A topic is a queue's name, including `.fifo`.

    Args:
        queues: names or URLs; by default the handlers' topics are the names.
        visibility: how long a message stays ours without an extension, up to 12 h; by default the
            queue's own timeout. It is extended every third of that while the message is in flight.
        wait: the long poll of an idle source, 1 to 20 s. A longer one costs fewer requests, but
            stopping, and the source's other queues, wait for it to end.
        deduplication_ids: use a FIFO message's MessageDeduplicationId (within its group, if the queue
            deduplicates by group) as the id of a message without any other. Only for producers that
            set it to the event's id. Refused on queues that hash the content, where two equal messages
            would count as one.
        client: your own boto3 SQS client, instead of options.
        options: for boto3's client: `region_name`, `endpoint_url`, `config` …, and `profile_name`.

    The weak id is SQS's MessageId, which differs when a producer sends again. Attributes become headers,
    binary ones as bytes. A body that txbox's publisher marked as base64 is decoded.

    Guarantee: a message is deleted only after it is settled. If the deletion fails it comes again, as a
    duplicate. On close, what is in flight is given back at once.
    """

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
            raise ConfigurationError("SQS() takes either a client or options for one, not both.")
        if "*" in queues or not all(queues):
            raise ConfigurationError("SQS() takes names or URLs of queues: list each one.")
        self._wanted = {_topic(queue): queue for queue in queues}
        if len(self._wanted) < len(set(queues)):
            raise ConfigurationError(
                "Two queues of SQS() have the same name: give each a source of its own."
            )
        if importlib.util.find_spec("boto3") is None:
            raise ConfigurationError("SQS needs boto3: run pip install 'txbox[sqs]'.")
        self._topics = tuple(self._wanted) or None
        self._visible_s = None if visibility is None else math.ceil(visibility.total_seconds())
        self._wait_s = math.ceil(wait.total_seconds())
        self._deduplication_ids = deduplication_ids
        self._given, self._options = client, options
        self._client: Any = None
        self._queues: deque[Queue] = deque()
        self._receipts: dict[tuple[str, str], Receipt] = {}

    @property
    def name(self) -> str:
        return "sqs:" + ",".join(sorted(self._wanted))

    @property
    def topics(self) -> Sequence[str] | None:
        return self._topics

    @property
    def redelivery_s(self) -> float | None:
        """Seconds after which a message comes again unless extended; None before `open`."""
        return min((float(queue.visible_s) for queue in self._queues), default=None)

    @property
    def tend_every_s(self) -> float | None:
        visible_s = self.redelivery_s
        return None if visible_s is None else visible_s / 3

    def publisher(self) -> SQSPublisher:
        return SQSPublisher(self._given, self._options, self._wanted)

    def keeps_order(self, topic: str) -> bool:
        """In a FIFO queue, the next messages of a group wait for those in flight."""
        return topic.endswith(".fifo")

    def open(self, topics: Sequence[str], progress: Progress, in_flight: InFlight) -> None:
        if not self._wanted:
            if not topics or "*" in topics:
                raise ConfigurationError(
                    "SQS cannot consume all queues: name them, as in SQS('orders'), or name handlers' topics."
                )
            self._wanted = {_topic(topic): topic for topic in topics}
        self._receipts = {}
        self._client = self._given or new_client(self._options, self._wait_s + 10)
        with later_if_away(self.name):
            self._find_queues()

    def receive(self, messages_max: int, wait_s: float) -> Sequence[Delivery]:
        self._find_queues()
        # a busy queue must not starve the others
        self._queues.rotate(-1)
        found: list[Delivery] = []
        if wait_s <= 0 or len(self._queues) > 1:
            for queue in self._queues:
                if len(found) >= messages_max:
                    return found
                if time.monotonic() < queue.look_at:
                    continue
                try:
                    found += self._receive_from(queue, messages_max - len(found), 0)
                except BrokerUnavailable:
                    # hand out what has arrived; the next receive reports the problem
                    if not found:
                        raise
                    return found
        if not found and wait_s > 0:
            found += self._receive_from(self._queues[0], messages_max, self._wait_s)
        return found

    def tend(self, deliveries: Sequence[Delivery]) -> None:
        receipts = [delivery.tag for delivery in deliveries if isinstance(delivery.tag, Receipt)]
        each_queue((receipt for receipt in receipts if not receipt.gone), Queue.extend)

    def settle(self, deliveries: Sequence[Delivery]) -> None:
        left = [delivery.tag for delivery in deliveries if isinstance(delivery.tag, Receipt)]
        for receipt in left:
            self._receipts.pop((receipt.queue.url, receipt.message_id), None)
        count, deleted = len(left), 0

        def delete(queue: Queue, part: Sequence[Receipt]) -> None:
            nonlocal deleted
            failed = queue.delete(part)
            deleted += len(part) - len(failed)
            left.extend(failed)

        try:
            # failed deletions are retried once
            for _ in range(2):
                tried, left = left, []
                each_queue(tried, delete)
        except BrokerUnavailable as error:
            error.failed = count - deleted
            raise
        if left:
            raise BrokerError(
                f"SQS did not delete {len(left)} of {count} messages: they will come again as duplicates.",
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
            each_queue(receipts, Queue.release)
        finally:
            self._queues.clear()
            if self._given is None:
                client.close()

    def examine(self, topics: Sequence[str]) -> Sequence[Facts]:
        """Ask for the attributes of queues; it takes the right to GetQueueAttributes."""
        client = self._given or new_client(self._options, _ASK_S)
        try:
            return [self._facts(client, topic, self._wanted.get(topic, topic)) for topic in topics]
        finally:
            if self._given is None:
                client.close()

    def _facts(self, client: Any, topic: str, queue: str) -> Facts:
        try:
            _, known = queue_attributes(client, queue)
        except CallError as error:
            if error.code in GONE:
                return Facts(topic=topic, found=False)
            raise BrokerUnavailable(
                f"SQS does not describe queue {queue!r} ({error.code})."
            ) from error
        kept = known.get("MessageRetentionPeriod")
        kept_s = None if kept is None else float(kept)
        visible_s = self._visible_s or int(known["VisibilityTimeout"])
        most = json.loads(known.get("RedrivePolicy", "{}")).get("maxReceiveCount")
        said = f"MessageRetentionPeriod={kept}"
        return Facts(
            topic=topic,
            # a message whose deletion failed can come again until then
            replay_s=kept_s,
            kept_s=kept_s,
            redelivery_s=float(visible_s),
            deliveries_max=None if most is None else int(most),
            said={
                "replay_s": said,
                "kept_s": said,
                "redelivery_s": "visibility="
                if self._visible_s
                else f"VisibilityTimeout={visible_s}",
                "deliveries_max": f"maxReceiveCount={most}",
            },
            unknown=()
            if kept is not None
            else ("the server does not report MessageRetentionPeriod.",),
        )

    # -- queues and their messages ------------------------------------------------------------

    def _find_queues(self) -> None:
        if not self._queues:
            self._queues = deque([self._look_up(*wanted) for wanted in self._wanted.items()])

    def _look_up(self, topic: str, queue: str) -> Queue:
        """Look up a queue by its name or URL.

        Raises:
            ConfigurationError: it does not exist, or cannot be used this way.
            BrokerUnavailable.
        """
        client = self._client
        url, known = _call_queue(partial(queue_attributes, client, queue), queue, found=False)
        if self._deduplication_ids and known.get("ContentBasedDeduplication") == "true":
            raise ConfigurationError(
                f"Queue {queue!r} hashes the content for its deduplication id, so two equal messages would count as "
                "one: remove deduplication_ids= and send a message-id attribute."
            )
        visible_s = self._visible_s or int(known["VisibilityTimeout"])
        if visible_s < 1:
            raise ConfigurationError(
                f"Queue {queue!r} has no visibility timeout: pass visibility= to SQS(…)."
            )
        per_group = known.get("DeduplicationScope") == "messageGroup"
        return Queue(client, topic, url, known["QueueArn"], per_group, visible_s)

    def _receive_from(self, queue: Queue, messages_max: int, wait_s: int) -> list[Delivery]:
        received = queue.receive(messages_max, wait_s)
        deliveries = (self._delivery(queue, record) for record in received)
        return [delivery for delivery in deliveries if delivery is not None]

    def _delivery(self, queue: Queue, record: dict[str, Any]) -> Delivery | None:
        receipt = Receipt(queue, record["MessageId"], record["ReceiptHandle"])
        known = self._receipts.setdefault((queue.url, receipt.message_id), receipt)
        if known is not receipt:
            # it became visible while we still work on it: only the newest handle can delete it
            known.handle, known.received_at, known.gone = receipt.handle, receipt.received_at, False
            return None
        counted = record.get("Attributes", {})
        redelivered = int(counted.get("ApproximateReceiveCount", "1")) > 1
        try:
            payload, headers = read(str(record["Body"]), record.get("MessageAttributes", {}))
        except UnicodeEncodeError:
            raw = str(record["Body"]).encode("utf-8", "surrogatepass")
            problem = "The body contains lone surrogates: it is not valid text."
            return Delivery(None, queue.topic, receipt, problem, raw, redelivered)
        sent_ms = counted.get("SentTimestamp")
        return envelope.SQS.delivery(
            queue.topic,
            payload,
            headers,
            tag=receipt,
            redelivered=redelivered,
            origin={
                "source": "sqs",
                "queue": queue.arn,
                "sqs_message_id": record["MessageId"],
                "weak_id": f"{queue.arn}/{record['MessageId']}",
                **{kept: counted[name] for name, kept in _SHOWN.items() if name in counted},
            },
            message_id=self._deduplication_id(queue, headers, counted),
            # a key that is not a valid group name is sent as a header beside its digest
            key=headers.get("key") or counted.get("MessageGroupId"),
            stored_at=None if sent_ms is None else envelope.clock(int(sent_ms) / 1000),
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
    """What a source knows about one queue. Calls raise what `_call_queue` raises.

    Args:
        per_group: it deduplicates within a message group.
        visible_s: how long a message stays ours without an extension.
        quiet_s: how long an empty queue is left alone; `look_at`: until when, by the monotonic clock.
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
        answer = self._call(
            "receive_message",
            MaxNumberOfMessages=min(messages_max, BATCH_MAX),
            WaitTimeSeconds=wait_s,
            VisibilityTimeout=self.visible_s,
            MessageAttributeNames=["All"],
            MessageSystemAttributeNames=["All"],
        )
        received: Sequence[dict[str, Any]] = answer.get("Messages", [])
        # while others are busy, do not ask an empty queue many times a second
        first_s, longest_s = _QUIET_S
        self.quiet_s = 0.0 if received else min(max(first_s, 2 * self.quiet_s), longest_s)
        self.look_at = time.monotonic() + self.quiet_s
        return received

    def extend(self, receipts: Sequence[Receipt]) -> None:
        for receipt in receipts:
            receipt.gone = receipt.left_s() < 1
            if receipt.gone:
                _log.warning(
                    "A message of %s has been in flight for 12 h: SQS will deliver it again.",
                    self.topic,
                )
        self._change_visibility(
            (receipt, min(self.visible_s, int(receipt.left_s())))
            for receipt in receipts
            if not receipt.gone
        )

    def release(self, receipts: Sequence[Receipt]) -> None:
        self._change_visibility((receipt, 0) for receipt in receipts)

    def delete(self, receipts: Sequence[Receipt]) -> list[Receipt]:
        """Delete messages; returns those that were not deleted."""
        entries = [receipt.entry(index) for index, receipt in enumerate(receipts)]
        answer = self._call("delete_message_batch", Entries=entries)
        return [receipts[int(failed["Id"])] for failed in answer.get("Failed", [])]

    def _change_visibility(self, wanted_s: Iterable[tuple[Receipt, int]]) -> None:
        changes = list(wanted_s)
        if changes:
            entries = [
                {**receipt.entry(index), "VisibilityTimeout": visible_s}
                for index, (receipt, visible_s) in enumerate(changes)
            ]
            answer = self._call("change_message_visibility_batch", Entries=entries)
            for failed in answer.get("Failed", []):
                receipt, _ = changes[int(failed["Id"])]
                receipt.gone = failed.get("Code") in _RECEIPT_GONE

    def _call(self, name: str, **arguments: Any) -> Any:
        request = partial(getattr(self.client, name), QueueUrl=self.url, **arguments)
        return _call_queue(partial(call, request), self.topic)


@dataclass(slots=True, eq=False)
class Receipt:
    """The right to delete one message: its newest handle.

    Args:
        received_at: by the monotonic clock, in seconds.
        gone: SQS no longer knows the handle, or is about to forget it.
    """

    queue: Queue
    message_id: str
    handle: str
    received_at: float = field(default_factory=time.monotonic)
    gone: bool = False

    def left_s(self) -> float:
        return VISIBLE_MAX_S - (time.monotonic() - self.received_at)

    def entry(self, index: int) -> dict[str, Any]:
        return {"Id": str(index), "ReceiptHandle": self.handle}


def each_queue(
    receipts: Iterable[Receipt], work: Callable[[Queue, Sequence[Receipt]], None]
) -> None:
    """Do something with the receipts of each queue, in batches as large as SQS allows.

    Raises:
        BrokerUnavailable: at least one queue failed. The others have been served all the same.
    """
    of_queue: dict[str, list[Receipt]] = {}
    for receipt in receipts:
        of_queue.setdefault(receipt.queue.url, []).append(receipt)
    failure: BrokerUnavailable | None = None
    for of_one in of_queue.values():
        try:
            for start in range(0, len(of_one), BATCH_MAX):
                work(of_one[0].queue, of_one[start : start + BATCH_MAX])
        except BrokerUnavailable as error:
            failure = error
    if failure is not None:
        raise failure


def _call_queue(call: Callable[[], Any], queue: str, *, found: bool = True) -> Any:
    """Call SQS, and decide whether waiting helps if it refuses.

    Args:
        found: the queue could be used before.

    Raises:
        ConfigurationError: waiting does not help.
        BrokerUnavailable: waiting may help.
    """
    try:
        return call()
    except CallError as error:
        if mistake := _MISTAKES.get(error.code):
            sentence = f"Queue {queue!r} cannot be used ({error.code}): {mistake}."
            raise refusal(sentence, worked=found and error.code != MALFORMED) from error
        what = "SQS cannot be reached" if error.away else "SQS refused a call"
        raise BrokerUnavailable(f"{what} for queue {queue!r} ({error.code}).") from error
