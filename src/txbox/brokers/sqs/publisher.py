"""Publishing to Amazon SQS: batches of ten, in parallel except for FIFO queues."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from txbox.brokers.base import Batch, parts
from txbox.brokers.envelope import SQS
from txbox.brokers.sqs.client import (
    DENIED,
    GONE,
    WORKERS,
    CallError,
    call,
    checked_queue,
    entry_of,
    new_client,
    size_of,
)
from txbox.errors import BrokerError, BrokerUnavailable, MessageRefused
from txbox.message import Message

_BATCH_MAX = 10
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
            in_parts = list(parts(entries, _size_of, _BATCH_MAX, bytes_max))
            if queue.fifo:
                jobs.append(partial(self._send_in_order, batch, queue, in_parts))
            else:
                jobs += [partial(self._send, batch, queue, part) for part in in_parts]
        in_time = _side_by_side(jobs, batch) and in_time
        if not in_time and batch.away is None:
            batch.away = BrokerUnavailable(f"SQS did not answer within {within_s:g} s.")
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
        try:
            if "/" not in url:
                checked_queue(url)
                url = call(lambda: self._client.get_queue_url(QueueName=topic))["QueueUrl"]
            bytes_max = self._bytes_max(url)
        except CallError as error:
            _fail(batch, at, error, topic)
        except MessageRefused as refusal:
            for index in at:
                batch.answers[index] = refusal
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
            if error.of_the_messages and len(part) > 1:
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
            why = CallError(str(failed.get("Code", "")), sender=bool(failed.get("SenderFault")))
            _fail(batch, [part[int(failed["Id"])][0]], why, queue.topic)


def _fail(batch: Batch, at: Iterable[int], error: CallError, topic: str) -> None:
    for index in at:
        if error.away:
            batch.away = BrokerUnavailable(
                f"SQS cannot be reached for queue {topic!r} ({error.code})."
            )
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
    if error.of_the_messages:
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


def _size_of(entry: _Entry) -> int:
    return size_of(entry[1])
