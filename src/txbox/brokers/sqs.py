"""Amazon SQS through boto3: standard and FIFO queues, whose messages stay invisible while they are being processed."""

from __future__ import annotations

import base64
import binascii
import hashlib
import importlib.util
import json
import math
import re
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any, cast

from txbox.boundaries import log as _log
from txbox.brokers.base import (
    Batch,
    Consumer,
    Context,
    Delivery,
    Source,
    later_if_away,
    parts,
    refusal,
)
from txbox.brokers.envelope import PACKED, SQS_GROUPED, Pair, clock, utf8
from txbox.brokers.envelope import SQS as SQS_TRANSPORT
from txbox.brokers.facts import Facts, of_sqs
from txbox.errors import (
    BrokerError,
    BrokerUnavailable,
    ConfigurationError,
    DestinationRefused,
    MessageRefused,
)
from txbox.identity import scoped_id
from txbox.message import Headers, HeaderValue, Message
from txbox.policy import Backoff

# -- calls --------------------------------------------------------------------------------------------

#: SQS's limit for every call.
_BATCH_MAX = 10
#: Concurrent requests, and connections kept for them.
_WORKERS = 8
_GONE = frozenset({"QueueDoesNotExist", "AWS.SimpleQueueService.NonExistentQueue"})
_DENIED = frozenset({
    "UnrecognizedClientException", "InvalidClientTokenId", "SignatureDoesNotMatch", "InvalidAddress",
    "MissingAuthenticationToken", "AccessDenied", "AccessDeniedException", "InvalidSecurity",
    "AWS.SimpleQueueService.AccessDenied",
})  # fmt: skip
#: Errors the client raises itself, before calling.
_NO_CREDENTIALS = frozenset({"NoCredentialsError", "PartialCredentialsError", "ProfileNotFound"})
_MALFORMED = "ParamValidation"
#: What only a message can be the reason for. Anything else, such as a disabled key or a wrong clock, may pass.
_OF_A_MESSAGE = frozenset({
    _MALFORMED, "BatchRequestTooLong", "InvalidAttributeValue", "InvalidMessageContents", "InvalidParameterValue",
    "MissingParameter", "UnsupportedOperation",
})  # fmt: skip
#: The queue or its key (those begin with Kms), the account or its credentials.
_OF_THE_QUEUE = frozenset({
    "AccountProblem", "IncompleteSignature", "InvalidSignatureException", "NotAuthorized", "OptInRequired",
    "QueueDeletedRecently",
})  # fmt: skip
#: Throttling or server trouble, whatever the messages are.
_LATER = ("Throttl", "RequestThrottled", "OverLimit", "ServiceUnavailable", "InternalError",
          "InternalFailure", "RequestExpired", "ExpiredToken")  # fmt: skip


class _CallError(Exception):
    """SQS refused a call or one of its entries, or could not be reached."""

    def __init__(self, code: str, *, away: bool = False, status: int = 400) -> None:
        super().__init__(code)
        self.code = code
        self.away = away
        short = code.rpartition(".")[2]
        self.of_a_message = short in _OF_A_MESSAGE
        self.of_the_queue = (
            status in (401, 403) or short.startswith("Kms") or short in _OF_THE_QUEUE
        )


def _new_client(wanted: Mapping[str, Any], within_s: float) -> Any:
    """Create a boto3 client from the options of SQS(…), with this read timeout in seconds.

    Raises:
        ConfigurationError: boto3 rejects the options.
    """
    import boto3.session
    from botocore.config import Config
    from botocore.exceptions import BotoCoreError

    options = dict(wanted)
    config = Config(
        connect_timeout=min(3.0, within_s),
        read_timeout=within_s,
        retries={"mode": "standard", "max_attempts": 2},
        tcp_keepalive=True,
        max_pool_connections=_WORKERS,
    )
    options["config"] = config.merge(options["config"]) if "config" in options else config
    try:
        session: Any = boto3.session.Session(profile_name=options.pop("profile_name", None))
        return session.client("sqs", **options)
    except (BotoCoreError, TypeError, ValueError) as error:
        raise ConfigurationError(
            f"boto3 cannot create an SQS client ({error}): check region, profile and options of SQS(…)."
        ) from error


def _url_of(client: Any, queue: str) -> str:
    """Return the URL of a queue that is given by name or URL; raises _CallError."""
    url: str = queue if "/" in queue else _call(client.get_queue_url, QueueName=queue)["QueueUrl"]
    return url


def _attributes_of(client: Any, url: str, name: str = "All") -> dict[str, str]:
    """Return the attributes of a queue, or the one of this name; raises _CallError."""
    known = _call(client.get_queue_attributes, QueueUrl=url, AttributeNames=[name])
    attributes: dict[str, str] = known.get("Attributes", {})
    return attributes


def _call(method: Callable[..., Any], **arguments: Any) -> Any:
    """Call SQS; raises _CallError."""
    from botocore import exceptions as boto
    from botocore.parsers import ResponseParserError

    try:
        return method(**arguments)
    except boto.ParamValidationError as error:
        raise _CallError(_MALFORMED) from error
    except boto.ClientError as error:
        code = str(error.response.get("Error", {}).get("Code", ""))
        status = int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 400))
        away = status >= 500 or any(fragment in code for fragment in _LATER)
        raise _CallError(code, away=away, status=status) from error
    except (boto.BotoCoreError, ResponseParserError) as error:
        # connections, timeouts, credentials that are temporarily unavailable
        raise _CallError(type(error).__name__, away=True) from error


# -- consuming ----------------------------------------------------------------------------------------

_WAIT_MAX = timedelta(seconds=20)
_VISIBLE_MAX_S = 12 * 3600.0  # counted from receipt; no extension goes beyond it
_ASK_S = 10.0
_QUIET_S = (0.1, 1.0)
_SHOWN = {
    "SequenceNumber": "sequence_number",
    "ApproximateReceiveCount": "receive_count",
    "MessageDeduplicationId": "deduplication_id",
}
_MISTAKES = {
    **dict.fromkeys(_NO_CREDENTIALS, "set the AWS variables, or pass profile_name="),
    **dict.fromkeys(_DENIED | _GONE, "check its name, the region and the permissions"),
    _MALFORMED: "check its name or URL",
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
        if visibility is not None and not 1 <= visibility.total_seconds() <= _VISIBLE_MAX_S:
            raise ConfigurationError(f"visibility is {visibility}: use 1 second to 12 hours.")
        if not timedelta(seconds=1) <= wait <= _WAIT_MAX:
            raise ConfigurationError(f"wait is {wait}: use 1 to 20 seconds.")
        if client is not None and options:
            raise ConfigurationError("SQS() takes either a client or options for one, not both.")
        if "*" in queues or not all(queues):
            raise ConfigurationError("SQS() takes names or URLs of queues: list each one.")
        self._named = {_topic(queue): queue for queue in queues}
        if len(self._named) < len(set(queues)):
            raise ConfigurationError(
                "Two queues of SQS() have the same name: give each a source of its own."
            )
        if importlib.util.find_spec("boto3") is None:
            raise ConfigurationError("SQS needs boto3: run pip install 'txbox[sqs]'.")
        self._visible_s = None if visibility is None else math.ceil(visibility.total_seconds())
        self._users, self._options = client, options
        self.name = "sqs:" + ",".join(sorted(self._named or "*"))
        self.topics = tuple(self._named) or None
        if self._visible_s is not None:
            self.redelivery_s, self.tend_every_s = float(self._visible_s), self._visible_s / 3
        self._consumed = partial(
            SQSConsumer, self, client, options,
            visible_s=self._visible_s, wait_s=math.ceil(wait.total_seconds()), deduplication_ids=deduplication_ids,
        )  # fmt: skip

    def publisher(self) -> SQSPublisher:
        return SQSPublisher(self._users, self._options, self._named)

    def keeps_order(self, topic: str) -> bool:
        """In a FIFO queue, the next messages of a group wait for those in flight."""
        return topic.endswith(".fifo")

    def consumer(self, topics: Sequence[str], context: Context) -> SQSConsumer:
        if not self._named and (not topics or "*" in topics):
            raise ConfigurationError(
                "SQS cannot consume all queues: name them, as in SQS('orders'), or name handlers' topics."
            )
        named = self._named or {_topic(topic): topic for topic in topics}
        return self._consumed(
            {
                topic: queue
                for topic, queue in named.items()
                if not topics or "*" in topics or topic in topics
            }
        )

    def examine(self, topics: Sequence[str]) -> Sequence[Facts]:
        """Ask for the attributes of queues; it takes the right to GetQueueAttributes."""
        client = self._users or _new_client(self._options, _ASK_S)
        try:
            return [self._facts(client, topic, self._named.get(topic, topic)) for topic in topics]
        finally:
            if self._users is None:
                client.close()

    def _facts(self, client: Any, topic: str, queue: str) -> Facts:
        try:
            known = _attributes_of(client, _url_of(client, queue))
        except _CallError as error:
            if error.code in _GONE:
                return Facts(topic=topic, found=False)
            raise BrokerUnavailable(
                f"SQS does not describe queue {queue!r} ({error.code})."
            ) from error
        return of_sqs(topic, known, visible_s=self._visible_s)


class SQSConsumer(Consumer):
    """Receives from the queues of an SQS. See there.

    Args:
        client: the user's, which stays open; or None, and options for one.
        queues: topic → name or URL.
    """

    def __init__(
        self,
        source: SQS,
        client: Any,
        options: Mapping[str, Any],
        queues: Mapping[str, str],
        *,
        visible_s: int | None,
        wait_s: int,
        deduplication_ids: bool,
    ) -> None:
        super().__init__(source)
        self._users, self._wanted = client, queues
        self._visible_s, self._wait_s = visible_s, wait_s
        self._deduplication_ids = deduplication_ids
        self._queues: deque[Queue] = deque()
        self._receipts: dict[tuple[str, str], Receipt] = {}
        self._client = client or _new_client(options, wait_s + 10)
        try:
            with later_if_away(self.name):
                self._find_queues()
        except BaseException:
            self._close_client()
            raise

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
        receipts: list[Receipt] = [delivery.tag for delivery in deliveries]
        _each_queue((receipt for receipt in receipts if not receipt.gone), Queue.extend)

    def settle(self, deliveries: Sequence[Delivery]) -> None:
        receipts: list[Receipt] = [delivery.tag for delivery in deliveries]
        for receipt in receipts:
            self._receipts.pop((receipt.queue.url, receipt.message_id), None)
        try:
            # failed deletions are retried once
            for _ in range(2):
                _each_queue((receipt for receipt in receipts if not receipt.deleted), Queue.delete)
        except BrokerUnavailable as error:
            error.failed = _kept(receipts)
            raise
        if kept := _kept(receipts):
            raise BrokerError(
                f"SQS did not delete {kept} of {len(receipts)} messages: they will come again as duplicates.",
                failed=kept,
            )

    def close(self) -> None:
        """Make what was not settled visible again, for whoever receives next."""
        try:
            _each_queue(
                (receipt for receipt in self._receipts.values() if not receipt.gone), Queue.release
            )
        finally:
            self._close_client()

    def _close_client(self) -> None:
        if self._users is None:
            self._client.close()

    # -- queues and their messages ------------------------------------------------------------

    def _find_queues(self) -> None:
        if not self._queues:
            self._queues = deque([self._look_up(*wanted) for wanted in self._wanted.items()])
            visible_s = min(queue.visible_s for queue in self._queues)
            self.redelivery_s, self.tend_every_s = float(visible_s), visible_s / 3

    def _look_up(self, topic: str, queue: str) -> Queue:
        """Look up a queue by its name or URL.

        Raises:
            ConfigurationError: it does not exist, or cannot be used this way.
            BrokerUnavailable.
        """
        client = self._client
        with _translated(queue, found=False):
            url = _url_of(client, queue)
            known = _attributes_of(client, url)
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
        return SQS_TRANSPORT.delivery(
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
            stored_at=None if sent_ms is None else clock(int(sent_ms) / 1000),
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


def _kept(receipts: Iterable[Receipt]) -> int:
    return sum(not receipt.deleted for receipt in receipts)


@dataclass(slots=True, eq=False)
class Queue:
    """What a source knows about one queue. Calls raise what `_translated` raises.

    Args:
        per_group: it deduplicates within a message group.
        visible_s: how long a message stays ours without an extension.
        empty: how long an empty queue is not asked again; `look_at`: until when, by the monotonic clock.
    """

    client: Any
    topic: str
    url: str
    arn: str
    per_group: bool
    visible_s: int
    empty: Backoff = field(default_factory=lambda: Backoff(*_QUIET_S))
    look_at: float = 0.0

    def receive(self, messages_max: int, wait_s: int) -> Sequence[dict[str, Any]]:
        answer = self._call(
            "receive_message",
            MaxNumberOfMessages=min(messages_max, _BATCH_MAX),
            WaitTimeSeconds=wait_s,
            VisibilityTimeout=self.visible_s,
            MessageAttributeNames=["All"],
            MessageSystemAttributeNames=["All"],
        )
        received: Sequence[dict[str, Any]] = answer.get("Messages", [])
        # while others are busy, do not ask an empty queue many times a second
        if received:
            self.empty.reset()
            self.look_at = 0.0
        else:
            self.look_at = time.monotonic() + self.empty.next_s()
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

    def delete(self, receipts: Sequence[Receipt]) -> None:
        entries = [receipt.entry(index) for index, receipt in enumerate(receipts)]
        answer = self._call("delete_message_batch", Entries=entries)
        failed = {int(entry["Id"]) for entry in answer.get("Failed", [])}
        for index, receipt in enumerate(receipts):
            receipt.deleted = index not in failed

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
        with _translated(self.topic):
            return _call(getattr(self.client, name), QueueUrl=self.url, **arguments)


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
    deleted: bool = False

    def left_s(self) -> float:
        return _VISIBLE_MAX_S - (time.monotonic() - self.received_at)

    def entry(self, index: int) -> dict[str, Any]:
        return {"Id": str(index), "ReceiptHandle": self.handle}


def _each_queue(
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
            for start in range(0, len(of_one), _BATCH_MAX):
                work(of_one[0].queue, of_one[start : start + _BATCH_MAX])
        except BrokerUnavailable as error:
            failure = error
    if failure is not None:
        raise failure


@contextmanager
def _translated(queue: str, *, found: bool = True) -> Generator[None]:
    """Raise what SQS refuses as an error that says whether waiting helps.

    Args:
        found: the queue could be used before.

    Raises:
        ConfigurationError: waiting does not help.
        BrokerUnavailable: waiting may help.
    """
    try:
        yield
    except _CallError as error:
        if mistake := _MISTAKES.get(error.code):
            sentence = f"Queue {queue!r} cannot be used ({error.code}): {mistake}."
            raise refusal(sentence, worked=found and error.code != _MALFORMED) from error
        what = "SQS cannot be reached" if error.away else "SQS refused a call"
        raise BrokerUnavailable(f"{what} for queue {queue!r} ({error.code}).") from error


# -- publishing: batches of ten, in parallel except for FIFO queues -----------------------------------

_QUEUE = re.compile(r"[A-Za-z0-9_-]{1,80}|(?=.{1,80}\Z)[A-Za-z0-9_-]+\.fifo")
_BATCH_BYTES_MIN, _BYTES_MAX = 256 * 1024, 1024 * 1024

_Entry = tuple[int, dict[str, Any]]


@dataclass(frozen=True, slots=True)
class _TargetQueue:
    topic: str
    url: str
    fifo: bool
    bytes_max: int

    def entry_of(self, message: Message[Any]) -> dict[str, Any]:
        entry = _entry_of(message, fifo=self.fifo)
        if (size := _size_of(entry)) > self.bytes_max:
            raise MessageRefused(
                f"The message has {size} bytes with its attributes: queue {self.topic!r} takes "
                f"{self.bytes_max}. Make it smaller, or send a reference to it."
            )
        return entry


class SQSPublisher:
    """Sends batches of up to ten messages. A topic is a queue's name, including `.fifo`.

    A UTF-8 payload is sent as the body unchanged. Any other is encoded as base64 and marked by the
    attribute `txbox-body`; so is an empty one. Headers are attributes, of which SQS allows ten. Those
    beyond ten, repeated, empty or with an illegal name go as JSON into one attribute, `txbox-headers`.
    In a FIFO queue the key is the MessageGroupId (a message without one gets a group of its own) and
    the id the MessageDeduplicationId. Values SQS does not allow there are replaced by their SHA-256.

    Guarantee: what is confirmed is stored redundantly by SQS.
    """

    event_prefix = SQS_TRANSPORT.prefix

    def __init__(self, client: Any, options: Mapping[str, Any], urls: Mapping[str, str]) -> None:
        self._users, self._options, self._urls = client, options, urls
        self._client: Any = None
        self._queues: dict[str, _TargetQueue] = {}
        self.name = f"sqs:{options.get('region_name') or options.get('endpoint_url') or 'publish'}"

    def publish(
        self, messages: Sequence[Message[Any]], within_s: float
    ) -> Sequence[BrokerError | None]:
        batch = Batch(SQS_TRANSPORT.name, messages, within_s)
        self._connect(within_s)
        topics = list(dict.fromkeys(message.topic for message in messages))
        unknown = [topic for topic in topics if topic not in self._queues]
        in_time = _side_by_side([partial(self._find, batch, topic) for topic in unknown], batch)
        queues = [self._queues[topic] for topic in topics if topic in self._queues]
        jobs: list[Callable[[], None]] = []
        for queue in queues:
            entries = batch.entries(queue.entry_of, queue.topic)
            bytes_max = max(queue.bytes_max, _BATCH_BYTES_MIN)
            in_parts = list(parts(entries, _size_of, _BATCH_MAX, bytes_max))
            if queue.fifo:
                jobs.append(partial(self._send_in_order, batch, queue, in_parts))
            else:
                jobs += [partial(self._send, batch, queue, part) for part in in_parts]
        in_time = _side_by_side(jobs, batch) and in_time
        if not in_time and batch.away is None:
            batch.lose(f"SQS did not answer within {within_s:g} s.")
        return batch.outcome()

    def close(self) -> None:
        client, self._client = self._client, None
        self._queues = {}
        if client is not None and self._users is None:
            client.close()

    # -- queues -------------------------------------------------------------------------------

    def _connect(self, within_s: float) -> None:
        if self._client is None:
            self._client = self._users or _new_client(self._options, within_s)

    def _find(self, batch: Batch, topic: str) -> None:
        at = [index for index, message in enumerate(batch.messages) if message.topic == topic]
        url = self._urls.get(topic, topic)
        if "/" not in url and not _QUEUE.fullmatch(url):
            for index in at:
                batch.answers[index] = MessageRefused(
                    f"{url!r} is not a valid queue name: SQS allows 80 letters, digits, - and _, and .fifo at the end."
                )
            return
        try:
            url = _url_of(self._client, url)
            bytes_max = self._bytes_max(url)
        except _CallError as error:
            _fail(batch, at, error, topic)
        else:
            self._queues[topic] = _TargetQueue(topic, url, url.endswith(".fifo"), bytes_max)

    def _bytes_max(self, url: str) -> int:
        try:
            known = _attributes_of(self._client, url, "MaximumMessageSize")
        except _CallError as error:
            if error.code not in _DENIED:
                raise
            # a publisher may lack the permission to ask; then SQS itself enforces the limit
            return _BYTES_MAX
        return int(known.get("MaximumMessageSize", _BYTES_MAX))

    # -- sending ------------------------------------------------------------------------------

    def _send_in_order(
        self, batch: Batch, queue: _TargetQueue, in_parts: Sequence[Sequence[_Entry]]
    ) -> None:
        behind: set[str] = set()
        for part in in_parts:
            free = [entry for entry in part if entry[1]["MessageGroupId"] not in behind]
            if free:
                self._send(batch, queue, free)
            # later messages of a group wait for an earlier one that may still be accepted
            behind |= {
                entry["MessageGroupId"] for at, entry in part
                if batch.answers[at] is not None and not isinstance(batch.answers[at], MessageRefused)
            }  # fmt: skip

    def _send(self, batch: Batch, queue: _TargetQueue, part: Sequence[_Entry]) -> None:
        if batch.left_s() <= 0:
            return
        entries = [{"Id": str(number), **entry} for number, (_, entry) in enumerate(part)]
        try:
            answer = _call(self._client.send_message_batch, QueueUrl=queue.url, Entries=entries)
        except _CallError as error:
            if error.of_a_message and len(part) > 1:
                half = len(part) // 2
                self._send(batch, queue, part[:half])
                self._send(batch, queue, part[half:])
                return
            if error.code in _GONE:
                # the next call looks it up again
                self._queues.pop(queue.topic, None)
            _fail(batch, [at for at, _ in part], error, queue.topic)
            return
        for sent in answer.get("Successful", []):
            batch.answer(part[int(sent["Id"])][0], None)
        for failed in answer.get("Failed", []):
            why = _CallError(str(failed.get("Code", "")))
            _fail(batch, [part[int(failed["Id"])][0]], why, queue.topic)


def _fail(batch: Batch, at: Iterable[int], error: _CallError, topic: str) -> None:
    for index in at:
        if error.away:
            batch.lose(f"SQS cannot be reached for queue {topic!r} ({error.code}).", error)
            batch.answers[index] = batch.away
        else:
            batch.answer(index, _error_of(error, topic))


def _error_of(error: _CallError, topic: str) -> BrokerError:
    if error.code in _GONE:
        return DestinationRefused(f"SQS has no queue {topic!r} ({error.code}): create it.")
    if error.code in _DENIED:
        return DestinationRefused(
            f"Access to queue {topic!r} was denied ({error.code}): check the region and the permissions."
        )
    if error.of_a_message:
        return MessageRefused(
            f"SQS will not accept the message for queue {topic!r} ({error.code}): "
            "make it smaller, or correct its attributes."
        )
    if error.of_the_queue:
        return DestinationRefused(f"Queue {topic!r} takes no message now ({error.code}).")
    return BrokerError(f"SQS did not accept the message for queue {topic!r} ({error.code}).")


def _side_by_side(jobs: Sequence[Callable[[], None]], batch: Batch) -> bool:
    """Run jobs in a few threads until the batch's time is up; returns whether all have finished.

    Threads that hang are abandoned; they do not keep the process alive.
    """
    waiting = deque(jobs)
    failures: list[BaseException] = []

    def work() -> None:
        while waiting:
            try:
                job = waiting.popleft()
            except IndexError:
                # another thread was faster
                return
            try:
                job()
            except BaseException as error:  # noqa: BLE001  # re-raised by the waiting thread
                failures.append(error)

    threads = [
        threading.Thread(target=work, name="txbox-sqs", daemon=True)
        for _ in range(min(_WORKERS, len(jobs)))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(batch.left_s())
    waiting.clear()
    if failures:
        raise failures[0]
    return not any(thread.is_alive() for thread in threads)


# -- a message as text and at most ten attributes -----------------------------------------------------

#: How to decode the body: "base64", or "empty" because SQS does not accept empty bodies.
_BODY = "txbox-body"
_ATTRIBUTES_MAX = 10
_NO_TEXT = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_ATTRIBUTE = re.compile(r"(?!(?i:AWS\.|Amazon\.))(?!.*\.\.)(?!\.)[A-Za-z0-9_.-]{1,256}(?<!\.)")
_TOKEN = re.compile(r"[A-Za-z0-9!\"#$%&'()*+,./:;<=>?@\[\\\]^_`{|}~-]{1,128}")


def _entry_of(message: Message[Any], *, fifo: bool) -> dict[str, Any]:
    """Return the message as an entry of SendMessageBatch, without its Id.

    Raises:
        MessageRefused: SQS cannot carry it.
    """
    body, encoding = _body(SQS_TRANSPORT.payload(message))
    markers = {} if encoding is None else {_BODY: _attribute(encoding)}
    grouped = fifo and message.key is not None and _TOKEN.fullmatch(message.key) is not None
    pairs = (SQS_GROUPED if grouped else SQS_TRANSPORT).headers(message)
    attributes, rest = _divided(pairs, _ATTRIBUTES_MAX - len(markers) - 1)
    if rest:
        markers[PACKED] = _attribute(json.dumps([_packed(pair) for pair in rest]))
    entry: dict[str, Any] = {"MessageBody": body, "MessageAttributes": attributes | markers}
    if fifo:
        unique = _token(str(message.id))
        entry["MessageDeduplicationId"] = unique
        entry["MessageGroupId"] = unique if message.key is None else _token(message.key)
    return entry


def _size_of(entry: Mapping[str, Any]) -> int:
    """Return the size SQS counts: the body, plus each attribute's name, type and value."""
    size = len(entry["MessageBody"].encode())
    for name, attribute in entry["MessageAttributes"].items():
        value = attribute.get("BinaryValue") or attribute["StringValue"].encode()
        size += len(name) + len(attribute["DataType"]) + len(value)
    return size


def read(body: str, attributes: Mapping[str, Any]) -> tuple[bytes, Headers]:
    """Return payload and headers of a received message; one from another producer is read as it is."""
    pairs = [(name, _value(attribute)) for name, attribute in attributes.items()]
    encoding = dict(pairs).get(_BODY)
    if encoding in ("empty", "base64"):
        try:
            payload = b"" if encoding == "empty" else base64.b64decode(body, validate=True)
        except (binascii.Error, ValueError):
            # another producer's attribute of the same name
            return body.encode(), Headers(pairs)
        return payload, Headers(pair for pair in pairs if pair[0] != _BODY)
    return body.encode(), Headers(pairs)


def _body(payload: bytes) -> tuple[str, str | None]:
    if not payload:
        return "-", "empty"
    try:
        text = payload.decode()
    except UnicodeDecodeError:
        text = "\0"
    if _NO_TEXT.search(text):
        return base64.b64encode(payload).decode(), "base64"
    return text, None


def _divided(pairs: list[Pair], room: int) -> tuple[dict[str, Any], list[Pair]]:
    """Split into attributes and headers that cannot be one: repeated, without a value, or one too many."""
    names = Counter(name for name, _ in pairs)
    attributes: dict[str, Any] = {}
    rest: list[Pair] = []
    for name, value in pairs:
        utf8(name)
        fits = names[name] == 1 and _ATTRIBUTE.fullmatch(name) and name not in (_BODY, PACKED)
        if isinstance(value, str):
            utf8(value)
            fits = fits and not _NO_TEXT.search(value)
        if fits and value and len(attributes) < room:
            attributes[name] = _attribute(value)
        else:
            rest.append((name, value))
    return attributes, rest


def _attribute(value: str | bytes) -> dict[str, Any]:
    if isinstance(value, bytes):
        return {"DataType": "Binary", "BinaryValue": value}
    return {"DataType": "String", "StringValue": value}


def _value(attribute: Mapping[str, Any]) -> HeaderValue:
    binary = str(attribute.get("DataType", "")).startswith("Binary")
    return cast("HeaderValue", attribute.get("BinaryValue" if binary else "StringValue"))


def _packed(pair: Pair) -> list[Any]:
    name, value = pair
    return [
        name,
        {"base64": base64.b64encode(value).decode()} if isinstance(value, bytes) else value,
    ]


def _token(text: str) -> str:
    """Return a valid group or deduplication id: the text itself, or its digest if SQS would refuse it."""
    if _TOKEN.fullmatch(text):
        return text
    return hashlib.sha256(utf8(text)).hexdigest()
