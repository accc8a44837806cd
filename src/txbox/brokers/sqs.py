"""Amazon SQS: standard and FIFO queues, kept invisible for as long as their messages are worked on."""

from __future__ import annotations

import importlib.util
import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

from txbox.brokers.base import Delivery, InFlight, Progress
from txbox.brokers.plain import plain_time
from txbox.brokers.sqs_body import read
from txbox.brokers.sqs_publisher import SQSPublisher
from txbox.errors import BrokerError, BrokerUnavailable, ConfigurationError
from txbox.identity import scoped_id
from txbox.message import Headers, Message

_log = logging.getLogger("txbox")

_BATCH_MAX = 10  # SQS's own bound, on every call
_VISIBLE_MAX_S = 12 * 3600.0  # from the receipt on; no extension leads beyond it
_QUIET_S = (0.1, 1.0)
_WAIT_MAX = timedelta(seconds=20)
#: Of a queue that is not there, or of a caller who may not use it.
_NEVER_CURED = frozenset({
    "QueueDoesNotExist", "AWS.SimpleQueueService.NonExistentQueue", "InvalidAddress",
    "UnrecognizedClientException", "InvalidClientTokenId", "SignatureDoesNotMatch",
    "MissingAuthenticationToken", "AccessDenied", "AccessDeniedException", "InvalidSecurity",
})  # fmt: skip
_RECEIPT_GONE = frozenset({
    "ReceiptHandleIsInvalid", "InvalidParameterValue", "MessageNotInflight",
    "AWS.SimpleQueueService.MessageNotInflight",
})  # fmt: skip


@dataclass(slots=True, eq=False)
class _Queue:
    topic: str
    url: str
    arn: str
    per_group: bool  # deduplicates within a message group
    visible_s: int
    quiet_s: float = 0.0
    look_at: float = 0.0


@dataclass(slots=True, eq=False)
class _Receipt:
    """The right to delete one message: the newest handle of it."""

    queue: _Queue
    message_id: str
    handle: str
    received_at: float = field(default_factory=time.monotonic)
    gone: bool = False


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
        if visibility is not None and not 1 <= visibility.total_seconds() <= _VISIBLE_MAX_S:
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
        self._queues: list[_Queue] = []
        self._receipts: dict[tuple[str, str], _Receipt] = {}
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
        self._client = self._given or self._new_client()
        try:
            self._find_queues()
        except BrokerUnavailable as error:
            # found again by the first receive
            _log.warning("%s is away: %s", self.name, error)

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
        receipts = [own.tag for own in deliveries if isinstance(own.tag, _Receipt)]
        self._in_batches([own for own in receipts if not own.gone], self._extend)

    def settle(self, deliveries: Sequence[Delivery]) -> None:
        receipts = [own.tag for own in deliveries if isinstance(own.tag, _Receipt)]
        for receipt in receipts:
            self._receipts.pop((receipt.queue.url, receipt.message_id), None)
        deleted = 0

        def delete(queue: _Queue, batch: Sequence[_Receipt]) -> list[_Receipt]:
            nonlocal deleted
            left = self._delete(queue, batch)
            deleted += len(batch) - len(left)
            return left

        try:
            left = self._in_batches(receipts, delete)
            if left:
                left = self._in_batches(left, delete)
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
        receipts = [own for own in self._receipts.values() if not own.gone]
        self._receipts = {}
        client, self._client = self._client, None
        if client is None:
            return
        try:
            self._in_batches(receipts, partial(_release, client))
        finally:
            self._queues = []
            if self._given is None:
                client.close()

    # -- connecting ---------------------------------------------------------------------------

    def _new_client(self) -> Any:
        import boto3.session
        from botocore.config import Config
        from botocore.exceptions import BotoCoreError

        options = dict(self._options)
        config = Config(
            connect_timeout=3,
            read_timeout=self._wait_s + 10,
            retries={"mode": "standard", "max_attempts": 2},
            tcp_keepalive=True,
        )
        if "config" in options:
            config = config.merge(options["config"])
        options["config"] = config
        try:
            session: Any = boto3.session.Session(profile_name=options.pop("profile_name", None))
            return session.client("sqs", **options)
        except (BotoCoreError, TypeError, ValueError) as error:
            raise ConfigurationError(
                f"boto3 makes no SQS client ({error}): check region, profile and options of SQS(…)."
            ) from error

    def _find_queues(self) -> None:
        if self._queues:
            return
        queues = [self._found(topic, queue) for topic, queue in self._wanted.items()]
        self._queues = queues

    def _found(self, topic: str, queue: str) -> _Queue:
        client = self._client
        url: str = queue
        if "/" not in queue:
            url = _called(lambda: client.get_queue_url(QueueName=queue), queue)["QueueUrl"]
        known = _called(
            lambda: client.get_queue_attributes(QueueUrl=url, AttributeNames=["All"]), queue
        )["Attributes"]
        if self._deduplication_ids and known.get("ContentBasedDeduplication") == "true":
            raise ConfigurationError(
                f"Queue {queue!r} hashes the content as deduplication id: two equal messages would be one; "
                "leave deduplication_ids out and send a message-id attribute."
            )
        visible_s = self._visible_s or int(known["VisibilityTimeout"])
        if visible_s < 1:
            raise ConfigurationError(
                f"Queue {queue!r} has no visibility time-out: pass visibility= to SQS(…)."
            )
        return _Queue(
            topic,
            url,
            known["QueueArn"],
            per_group=known.get("DeduplicationScope") == "messageGroup",
            visible_s=visible_s,
        )

    # -- receiving ----------------------------------------------------------------------------

    def _receive_from(self, queue: _Queue, messages_max: int, wait_s: int) -> list[Delivery]:
        client = self._client
        answer = _called(
            lambda: client.receive_message(
                QueueUrl=queue.url,
                MaxNumberOfMessages=min(messages_max, _BATCH_MAX),
                WaitTimeSeconds=wait_s,
                VisibilityTimeout=queue.visible_s,
                MessageAttributeNames=["All"],
                MessageSystemAttributeNames=["All"],
            ),
            queue.topic,
        )
        received = answer.get("Messages", [])
        # while others are worked on, an empty queue is not asked many times a second
        first_s, longest_s = _QUIET_S
        queue.quiet_s = 0.0 if received else min(max(first_s, 2 * queue.quiet_s), longest_s)
        queue.look_at = time.monotonic() + queue.quiet_s
        deliveries = (self._delivery(queue, own) for own in received)
        return [own for own in deliveries if own is not None]

    def _delivery(self, queue: _Queue, own: dict[str, Any]) -> Delivery | None:
        receipt = _Receipt(queue, own["MessageId"], own["ReceiptHandle"])
        known = self._receipts.setdefault((queue.url, receipt.message_id), receipt)
        if known is not receipt:
            # it became visible while we still work on it: the newest handle is the one that deletes
            known.handle, known.received_at, known.gone = receipt.handle, receipt.received_at, False
            return None
        counted = own.get("Attributes", {})
        redelivered = int(counted.get("ApproximateReceiveCount", "1")) > 1
        try:
            message = self._message(queue, own, counted)
        except UnicodeEncodeError:
            raw = str(own["Body"]).encode("utf-8", "surrogatepass")
            problem = "The body contains lone surrogates: it is not text."
            return Delivery(None, queue.topic, receipt, problem, raw, redelivered)
        return Delivery(message, queue.topic, receipt, redelivered=redelivered)

    def _message(self, queue: _Queue, own: dict[str, Any], counted: dict[str, str]) -> Message[Any]:
        payload, headers = read(str(own["Body"]), own.get("MessageAttributes", {}))
        group = counted.get("MessageGroupId")
        origin: dict[str, Any] = {
            "source": "sqs",
            "queue": queue.arn,
            "sqs_message_id": own["MessageId"],
            "weak_id": f"{queue.arn}/{own['MessageId']}",
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
        self, queue: _Queue, headers: Headers, counted: dict[str, str]
    ) -> str | None:
        own = counted.get("MessageDeduplicationId")
        if not self._deduplication_ids or own is None:
            return None
        if any(headers.get(name) is not None for name in ("message-id", "ce_id", "ce-id")):
            return None
        return scoped_id(counted.get("MessageGroupId", ""), own) if queue.per_group else own

    # -- keeping and deleting -----------------------------------------------------------------

    def _extend(self, queue: _Queue, receipts: Sequence[_Receipt]) -> list[_Receipt]:
        entries: list[dict[str, Any]] = []
        for index, receipt in enumerate(receipts):
            left_s = _VISIBLE_MAX_S - (time.monotonic() - receipt.received_at)
            receipt.gone = left_s < 1
            if receipt.gone:
                _log.warning(
                    "A message of %s is in flight for 12 h: SQS will deliver it again.", queue.topic
                )
            else:
                entries.append(_entry(index, receipt, min(queue.visible_s, int(left_s))))
        if entries:
            for failed in _change_visibility(self._client, queue, entries):
                receipts[int(failed["Id"])].gone = failed.get("Code") in _RECEIPT_GONE
        return []

    def _delete(self, queue: _Queue, receipts: Sequence[_Receipt]) -> list[_Receipt]:
        """Return those that were not deleted."""
        entries = [_entry(index, receipt) for index, receipt in enumerate(receipts)]
        answer = _called(
            lambda: self._client.delete_message_batch(QueueUrl=queue.url, Entries=entries),
            queue.topic,
        )
        return [receipts[int(failed["Id"])] for failed in answer.get("Failed", [])]

    def _in_batches(
        self,
        receipts: Sequence[_Receipt],
        call: Callable[[_Queue, Sequence[_Receipt]], list[_Receipt]],
    ) -> list[_Receipt]:
        of_queue: dict[str, list[_Receipt]] = {}
        for receipt in receipts:
            of_queue.setdefault(receipt.queue.url, []).append(receipt)
        left: list[_Receipt] = []
        for own in of_queue.values():
            for start in range(0, len(own), _BATCH_MAX):
                left += call(own[0].queue, own[start : start + _BATCH_MAX])
        return left


def _topic(queue: str) -> str:
    return queue.rstrip("/").rpartition("/")[2]


def _entry(index: int, receipt: _Receipt, visible_s: int | None = None) -> dict[str, Any]:
    more = {} if visible_s is None else {"VisibilityTimeout": visible_s}
    return {"Id": str(index), "ReceiptHandle": receipt.handle, **more}


def _change_visibility(client: Any, queue: _Queue, entries: list[dict[str, Any]]) -> list[Any]:
    answer = _called(
        lambda: client.change_message_visibility_batch(QueueUrl=queue.url, Entries=entries),
        queue.topic,
    )
    failed: list[Any] = answer.get("Failed", [])
    return failed


def _release(client: Any, queue: _Queue, receipts: Sequence[_Receipt]) -> list[_Receipt]:
    _change_visibility(client, queue, [_entry(index, own, 0) for index, own in enumerate(receipts)])
    return []


def _called(call: Callable[[], Any], queue: str) -> Any:
    """Call SQS; what it answers decides whether waiting helps.

    Raises:
        ConfigurationError, BrokerUnavailable, BrokerError.
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
        if code in _NEVER_CURED:
            raise ConfigurationError(
                f"Queue {queue!r} cannot be used ({code}): check its name, the region and the permissions."
            ) from error
        raise BrokerUnavailable(f"SQS refused a call for queue {queue!r} ({code}).") from error
