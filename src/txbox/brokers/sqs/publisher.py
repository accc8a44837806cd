"""Publishing to Amazon SQS: batches of ten, side by side except into FIFO queues."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from txbox.brokers.sqs.body import checked_queue, entry_of, size_of
from txbox.brokers.sqs.client import DENIED, GONE, WORKERS, CallError, called, new_client
from txbox.errors import BrokerError, BrokerUnavailable, MessageRefused
from txbox.message import Message

_BATCH_MAX = 10
_BATCH_BYTES_MIN, _BYTES_MAX = 256 * 1024, 1024 * 1024


@dataclass(slots=True, eq=False)
class _Queue:
    topic: str
    url: str
    fifo: bool
    bytes_max: int
    waiting: list[tuple[int, dict[str, Any]]] = field(
        default_factory=list[tuple[int, dict[str, Any]]]
    )


class SQSPublisher:
    """Sends batches of up to ten messages; a topic is a queue's name, `.fifo` included.

    Payloads that are UTF-8 text are bodies as they are; others are base64 and marked by the attribute
    `txbox-body`, as an empty one is. Id, type, content type, key and time are attributes, as are
    headers. SQS takes ten: headers beyond, repeated, empty or with a name that no attribute may have are JSON in
    the one attribute `txbox-headers`. In a FIFO queue the key is the MessageGroupId (a message without one has a
    group of its own), the id the MessageDeduplicationId; SHA-256 stands for what SQS does not take
    there. There are no tombstones.

    Guarantee: what is confirmed is stored by SQS in several places.
    """

    event_prefix = "ce-"

    def __init__(self, given: Any, options: Mapping[str, Any], urls: Mapping[str, str]) -> None:
        self._given, self._options, self._urls = given, options, urls
        self._client: Any = None
        self._queues: dict[str, _Queue] = {}
        self.name = f"sqs:{options.get('region_name') or options.get('endpoint_url') or 'publish'}"

    def publish(
        self, messages: Sequence[Message[Any]], within_s: float
    ) -> Sequence[BrokerError | None]:
        batch = _Batch(messages, time.monotonic() + within_s)
        self._connect(within_s)
        topics = list(dict.fromkeys(message.topic for message in messages))
        in_time = _side_by_side([partial(self._find, batch, topic) for topic in topics], batch)
        queues = [self._queues[topic] for topic in topics if topic in self._queues]
        jobs: list[Callable[[], None]] = []
        for queue in queues:
            parts = list(_parts(batch.entries(queue), max(queue.bytes_max, _BATCH_BYTES_MIN)))
            if queue.fifo:
                jobs.append(partial(self._send_in_order, batch, queue, parts))
            else:
                jobs += [partial(self._send, batch, queue, part) for part in parts]
        in_time = _side_by_side(jobs, batch) and in_time
        if batch.away is not None and not batch.heard:
            raise batch.away
        if not in_time and not batch.heard:
            raise BrokerUnavailable(f"SQS did not answer within {within_s:g} s.")
        return list(batch.answers)

    def close(self) -> None:
        client, self._client = self._client, None
        self._queues = {}
        if client is not None and self._given is None:
            client.close()

    # -- queues -------------------------------------------------------------------------------

    def _connect(self, within_s: float) -> None:
        if self._client is None:
            self._client = self._given or new_client(self._options, within_s)

    def _find(self, batch: _Batch, topic: str) -> None:
        if topic in self._queues:
            return
        at = [index for index, message in enumerate(batch.messages) if message.topic == topic]
        url = self._urls.get(topic, topic)
        try:
            if "/" not in url:
                checked_queue(url)
                url = called(lambda: self._client.get_queue_url(QueueName=topic))["QueueUrl"]
            bytes_max = self._bytes_max(url)
        except CallError as error:
            batch.fail(at, error, topic)
        except MessageRefused as refusal:
            batch.answer(at, refusal)
        else:
            self._queues[topic] = _Queue(topic, url, url.endswith(".fifo"), bytes_max)

    def _bytes_max(self, url: str) -> int:
        try:
            known = called(
                lambda: self._client.get_queue_attributes(
                    QueueUrl=url, AttributeNames=["MaximumMessageSize"]
                )
            )
        except CallError as error:
            if error.code not in DENIED:
                raise
            # a publisher may not be allowed to ask; then SQS itself refuses
            return _BYTES_MAX
        return int(known.get("Attributes", {}).get("MaximumMessageSize", _BYTES_MAX))

    # -- sending ------------------------------------------------------------------------------

    def _send_in_order(
        self, batch: _Batch, queue: _Queue, parts: Sequence[Sequence[_Entry]]
    ) -> None:
        behind: set[str] = set()
        for part in parts:
            free = [entry for entry in part if entry[1]["MessageGroupId"] not in behind]
            if free:
                self._send(batch, queue, free)
            # what follows a message that may still be taken waits for it
            behind |= {
                entry["MessageGroupId"] for at, entry in part
                if batch.answers[at] is not None and not isinstance(batch.answers[at], MessageRefused)
            }  # fmt: skip

    def _send(self, batch: _Batch, queue: _Queue, part: Sequence[_Entry]) -> None:
        if batch.left_s() <= 0:
            return
        entries = [{"Id": str(number), **entry} for number, (_, entry) in enumerate(part)]
        try:
            answer = called(
                lambda: self._client.send_message_batch(QueueUrl=queue.url, Entries=entries)
            )
        except CallError as error:
            if error.of_the_messages and len(part) > 1:
                half = len(part) // 2
                self._send(batch, queue, part[:half])
                self._send(batch, queue, part[half:])
                return
            if error.code in GONE:
                # looked for again by the next call
                self._queues.pop(queue.topic, None)
            batch.fail([at for at, _ in part], error, queue.topic)
            return
        batch.heard = True
        for sent in answer.get("Successful", []):
            batch.answers[part[int(sent["Id"])][0]] = None
        for failed in answer.get("Failed", []):
            why = CallError(str(failed.get("Code", "")), sender=bool(failed.get("SenderFault")))
            batch.fail([part[int(failed["Id"])][0]], why, queue.topic)


_Entry = tuple[int, dict[str, Any]]


class _Batch:
    """The messages of one call and what has been heard of them; written by several threads."""

    def __init__(self, messages: Sequence[Message[Any]], until: float) -> None:
        self.messages, self._until = messages, until
        self.answers: list[BrokerError | None] = [
            BrokerError(f"SQS has not confirmed the message for queue {message.topic!r} in time.")
            for message in messages
        ]
        self.heard = False
        self.away: BrokerUnavailable | None = None

    def left_s(self) -> float:
        return max(0.0, self._until - time.monotonic())

    def entries(self, queue: _Queue) -> Iterator[_Entry]:
        for at, message in enumerate(self.messages):
            if message.topic != queue.topic:
                continue
            try:
                entry = entry_of(message, fifo=queue.fifo)
            except MessageRefused as refusal:
                self.answers[at] = refusal
                continue
            if (size := size_of(entry)) <= queue.bytes_max:
                yield at, entry
            else:
                self.answers[at] = MessageRefused(
                    f"The message has {size} bytes with its attributes: queue {queue.topic!r} takes "
                    f"{queue.bytes_max}. Make it smaller, or send a reference to it."
                )

    def answer(self, at: Sequence[int], error: BrokerError) -> None:
        for index in at:
            self.answers[index] = error

    def fail(self, at: Sequence[int], error: CallError, topic: str) -> None:
        if error.away:
            self.away = BrokerUnavailable(
                f"SQS cannot be reached for queue {topic!r} ({error.code})."
            )
            self.answer(at, self.away)
            return
        self.heard = True
        if error.code in GONE:
            answer = BrokerError(f"SQS has no queue {topic!r} ({error.code}): create it.")
        elif error.code in DENIED:
            answer = BrokerError(
                f"Queue {topic!r} cannot be used ({error.code}): check the region and the permissions."
            )
        elif error.of_the_messages:
            answer = MessageRefused(
                f"SQS does not take the message for queue {topic!r} ({error.code}): "
                "make it smaller, or correct its attributes."
            )
        else:
            answer = BrokerError(
                f"SQS did not take the message for queue {topic!r} ({error.code})."
            )
        self.answer(at, answer)


def _side_by_side(jobs: Sequence[Callable[[], None]], batch: _Batch) -> bool:
    """Run jobs in a few threads, until the time of the batch is up; returns whether all have ended.

    Threads that hang are left behind: the process may end without them.
    """
    waiting = deque(jobs)
    failures: list[BaseException] = []

    def work() -> None:
        while waiting:
            try:
                job = waiting.popleft()
            except IndexError:
                # another was faster
                return
            try:
                job()
            except BaseException as error:  # noqa: BLE001  # raised where it is waited for
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


def _parts(entries: Iterator[_Entry], bytes_max: int) -> Iterator[list[_Entry]]:
    part: list[_Entry] = []
    size = 0
    for entry in entries:
        own_size = size_of(entry[1])
        if part and (len(part) == _BATCH_MAX or size + own_size > bytes_max):
            yield part
            part, size = [], 0
        part.append(entry)
        size += own_size
    if part:
        yield part
