"""Publishing to Amazon SQS; calls to it, what its errors mean, and a message in its form."""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import re
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from txbox.brokers.base import Batch, parts
from txbox.brokers.envelope import PACKED, SQS, SQS_GROUPED, Pair, utf8
from txbox.errors import BrokerError, ConfigurationError, MessageRefused
from txbox.message import Headers, HeaderValue, Message

# -- calls --------------------------------------------------------------------------------------------

#: Concurrent requests, and connections kept for them.
WORKERS = 8
GONE = frozenset({"QueueDoesNotExist", "AWS.SimpleQueueService.NonExistentQueue"})
DENIED = frozenset({
    "UnrecognizedClientException", "InvalidClientTokenId", "SignatureDoesNotMatch", "InvalidAddress",
    "MissingAuthenticationToken", "AccessDenied", "AccessDeniedException", "InvalidSecurity",
    "AWS.SimpleQueueService.AccessDenied",
})  # fmt: skip
#: Errors the client raises itself, before calling.
NO_CREDENTIALS = frozenset({"NoCredentialsError", "PartialCredentialsError", "ProfileNotFound"})
MALFORMED = "ParamValidation"
#: What only a message can be the reason for. Anything else, such as a disabled key or a wrong clock, may pass.
_OF_A_MESSAGE = frozenset({
    MALFORMED, "BatchRequestTooLong", "InvalidAttributeValue", "InvalidMessageContents", "InvalidParameterValue",
    "MissingParameter", "UnsupportedOperation",
})  # fmt: skip
#: Throttling or server trouble, whatever the messages are.
_LATER = ("Throttl", "RequestThrottled", "OverLimit", "ServiceUnavailable", "InternalError",
          "InternalFailure", "RequestExpired", "ExpiredToken")  # fmt: skip


class CallError(Exception):
    """SQS refused a call or one of its entries, or could not be reached."""

    def __init__(self, code: str, *, away: bool = False) -> None:
        super().__init__(code)
        self.code = code
        self.away = away
        self.of_a_message = code.rpartition(".")[2] in _OF_A_MESSAGE


def new_client(given: Mapping[str, Any], within_s: float) -> Any:
    """Create a boto3 client from the options of SQS(…), with this read timeout in seconds.

    Raises:
        ConfigurationError: boto3 rejects the options.
    """
    import boto3.session
    from botocore.config import Config
    from botocore.exceptions import BotoCoreError

    options = dict(given)
    config = Config(
        connect_timeout=min(3.0, within_s),
        read_timeout=within_s,
        retries={"mode": "standard", "max_attempts": 2},
        tcp_keepalive=True,
        max_pool_connections=WORKERS,
    )
    options["config"] = config.merge(options["config"]) if "config" in options else config
    try:
        session: Any = boto3.session.Session(profile_name=options.pop("profile_name", None))
        return session.client("sqs", **options)
    except (BotoCoreError, TypeError, ValueError) as error:
        raise ConfigurationError(
            f"boto3 cannot create an SQS client ({error}): check region, profile and options of SQS(…)."
        ) from error


def queue_attributes(client: Any, queue: str) -> tuple[str, dict[str, str]]:
    """Return the URL and the attributes of a queue, given by name or URL; raises CallError."""
    url = queue
    if "/" not in queue:
        url = call(lambda: client.get_queue_url(QueueName=queue))["QueueUrl"]
    known = call(lambda: client.get_queue_attributes(QueueUrl=url, AttributeNames=["All"]))
    attributes: dict[str, str] = known["Attributes"]
    return url, attributes


def call(function: Callable[[], Any]) -> Any:
    """Call SQS; raises CallError."""
    from botocore import exceptions as boto
    from botocore.parsers import ResponseParserError

    try:
        return function()
    except boto.ParamValidationError as error:
        raise CallError(MALFORMED) from error
    except boto.ClientError as error:
        code = str(error.response.get("Error", {}).get("Code", ""))
        status = int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 400))
        away = status >= 500 or any(fragment in code for fragment in _LATER)
        raise CallError(code, away=away) from error
    except (boto.BotoCoreError, ResponseParserError) as error:
        # connections, timeouts, credentials that are temporarily unavailable
        raise CallError(type(error).__name__, away=True) from error


# -- publishing: batches of ten, in parallel except for FIFO queues -----------------------------------

#: SQS's limit for every call.
BATCH_MAX = 10
_QUEUE = re.compile(r"[A-Za-z0-9_-]{1,80}|(?=.{1,80}\Z)[A-Za-z0-9_-]+\.fifo")
_BATCH_BYTES_MIN, _BYTES_MAX = 256 * 1024, 1024 * 1024

_Entry = tuple[int, dict[str, Any]]


@dataclass(frozen=True, slots=True)
class _Queue:
    topic: str
    url: str
    fifo: bool
    bytes_max: int

    def entry_of(self, message: Message[Any]) -> dict[str, Any]:
        entry = entry_of(message, fifo=self.fifo)
        if (size := size_of(entry)) > self.bytes_max:
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

    event_prefix = SQS.prefix

    def __init__(self, given: Any, options: Mapping[str, Any], urls: Mapping[str, str]) -> None:
        self._given, self._options, self._urls = given, options, urls
        self._client: Any = None
        self._queues: dict[str, _Queue] = {}
        self.name = f"sqs:{options.get('region_name') or options.get('endpoint_url') or 'publish'}"

    def publish(
        self, messages: Sequence[Message[Any]], within_s: float
    ) -> Sequence[BrokerError | None]:
        batch = Batch(SQS.name, messages, within_s)
        self._connect(within_s)
        topics = list(dict.fromkeys(message.topic for message in messages))
        in_time = _side_by_side([partial(self._find, batch, topic) for topic in topics], batch)
        queues = [self._queues[topic] for topic in topics if topic in self._queues]
        jobs: list[Callable[[], None]] = []
        for queue in queues:
            entries = batch.entries(queue.entry_of, queue.topic)
            bytes_max = max(queue.bytes_max, _BATCH_BYTES_MIN)
            in_parts = list(parts(entries, size_of, BATCH_MAX, bytes_max))
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
        if client is not None and self._given is None:
            client.close()

    # -- queues -------------------------------------------------------------------------------

    def _connect(self, within_s: float) -> None:
        if self._client is None:
            self._client = self._given or new_client(self._options, within_s)

    def _find(self, batch: Batch, topic: str) -> None:
        if topic in self._queues:
            return
        at = [index for index, message in enumerate(batch.messages) if message.topic == topic]
        url = self._urls.get(topic, topic)
        if "/" not in url and not _QUEUE.fullmatch(url):
            for index in at:
                batch.answers[index] = MessageRefused(
                    f"{url!r} is not a valid queue name: SQS allows 80 letters, digits, - and _, and .fifo at the end."
                )
            return
        try:
            if "/" not in url:
                url = call(lambda: self._client.get_queue_url(QueueName=topic))["QueueUrl"]
            bytes_max = self._bytes_max(url)
        except CallError as error:
            _fail(batch, at, error, topic)
        else:
            self._queues[topic] = _Queue(topic, url, url.endswith(".fifo"), bytes_max)

    def _bytes_max(self, url: str) -> int:
        try:
            known = call(
                lambda: self._client.get_queue_attributes(
                    QueueUrl=url, AttributeNames=["MaximumMessageSize"]
                )
            )
        except CallError as error:
            if error.code not in DENIED:
                raise
            # a publisher may lack the permission to ask; then SQS itself enforces the limit
            return _BYTES_MAX
        return int(known.get("Attributes", {}).get("MaximumMessageSize", _BYTES_MAX))

    # -- sending ------------------------------------------------------------------------------

    def _send_in_order(
        self, batch: Batch, queue: _Queue, in_parts: Sequence[Sequence[_Entry]]
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

    def _send(self, batch: Batch, queue: _Queue, part: Sequence[_Entry]) -> None:
        if batch.left_s() <= 0:
            return
        entries = [{"Id": str(number), **entry} for number, (_, entry) in enumerate(part)]
        try:
            answer = call(
                lambda: self._client.send_message_batch(QueueUrl=queue.url, Entries=entries)
            )
        except CallError as error:
            if error.of_a_message and len(part) > 1:
                half = len(part) // 2
                self._send(batch, queue, part[:half])
                self._send(batch, queue, part[half:])
                return
            if error.code in GONE:
                # the next call looks it up again
                self._queues.pop(queue.topic, None)
            _fail(batch, [at for at, _ in part], error, queue.topic)
            return
        for sent in answer.get("Successful", []):
            batch.answer(part[int(sent["Id"])][0], None)
        for failed in answer.get("Failed", []):
            why = CallError(str(failed.get("Code", "")))
            _fail(batch, [part[int(failed["Id"])][0]], why, queue.topic)


def _fail(batch: Batch, at: Iterable[int], error: CallError, topic: str) -> None:
    for index in at:
        if error.away:
            batch.lose(f"SQS cannot be reached for queue {topic!r} ({error.code}).", error)
            batch.answers[index] = batch.away
        else:
            batch.answer(index, _error_of(error, topic))


def _error_of(error: CallError, topic: str) -> BrokerError:
    if error.code in GONE:
        return BrokerError(f"SQS has no queue {topic!r} ({error.code}): create it.")
    if error.code in DENIED:
        return BrokerError(
            f"Access to queue {topic!r} was denied ({error.code}): check the region and the permissions."
        )
    if error.of_a_message:
        return MessageRefused(
            f"SQS will not accept the message for queue {topic!r} ({error.code}): "
            "make it smaller, or correct its attributes."
        )
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
        for _ in range(min(WORKERS, len(jobs)))
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


def entry_of(message: Message[Any], *, fifo: bool) -> dict[str, Any]:
    """Return the message as an entry of SendMessageBatch, without its Id.

    Raises:
        MessageRefused: SQS cannot carry it.
    """
    body, encoding = _body(SQS.payload(message))
    markers = {} if encoding is None else {_BODY: _attribute(encoding)}
    grouped = fifo and message.key is not None and _TOKEN.fullmatch(message.key) is not None
    pairs = list((SQS_GROUPED if grouped else SQS).headers(message))
    attributes, rest = _divided(pairs, _ATTRIBUTES_MAX - len(markers) - 1)
    if rest:
        markers[PACKED] = _attribute(json.dumps([_packed(pair) for pair in rest]))
    entry: dict[str, Any] = {"MessageBody": body, "MessageAttributes": attributes | markers}
    if fifo:
        unique = _token(str(message.id))
        entry["MessageDeduplicationId"] = unique
        entry["MessageGroupId"] = unique if message.key is None else _token(message.key)
    return entry


def size_of(entry: Mapping[str, Any]) -> int:
    """Return the size SQS counts: the body, plus each attribute's name, type and value."""
    size = len(entry["MessageBody"].encode())
    for name, attribute in entry["MessageAttributes"].items():
        value: str | bytes = (
            attribute["BinaryValue"] if "BinaryValue" in attribute else attribute["StringValue"]
        )
        size += len(name) + len(attribute["DataType"])
        size += len(value if isinstance(value, bytes) else value.encode())
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
