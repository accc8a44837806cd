"""A broker for one machine: a topic is a directory, and a message is a file in it. Its source and its publisher.

    app.consume(Spool("/var/spool/shop"))
    app.publish(Spool("/var/spool/shop"), topics=["invoices"])

A file's name is its place in the order, and how often it was delivered: `1764379000000000000-c0ffee.0`. Its time of
modification says from when on it may be delivered. Who renames it has it: of two consumers, one succeeds.
"""

import json
import os
import re
import secrets
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from txbox import ConfigurationError, Message
from txbox.brokers.base import Batch, Consumer, Context, Delivery, Source
from txbox.brokers.envelope import Transport, utf8
from txbox.errors import BrokerError, BrokerUnavailable, DestinationRefused, MessageRefused

ENVELOPE = Transport("Spool", "ce_")  # where the fields of a message go: all into headers
BYTES_MAX = 1_000_000


class Spool(Source):
    """What a user writes into the App: it only describes.

    Args:
        lease: a file that was delivered, and not settled or extended since, is delivered again after that time.
    """

    def __init__(self, root: str | Path, *, lease: timedelta = timedelta(seconds=30)) -> None:
        self.root = Path(root)
        self.name = f"spool:{self.root}"
        self.redelivery_s = lease.total_seconds()
        self.tend_every_s = self.redelivery_s / 3

    def consumer(self, topics: Sequence[str], context: Context) -> "SpoolConsumer":
        if missing := [topic for topic in topics if not (self.root / topic).is_dir()]:
            raise ConfigurationError(f"{self.root} has no directory {missing[0]!r}: make it.")
        return SpoolConsumer(self, [self.root / topic for topic in topics])

    def publisher(self) -> "SpoolPublisher":
        return SpoolPublisher(self.root)


class SpoolConsumer(Consumer):
    """What is open: it knows what it has taken."""

    def __init__(self, source: Spool, directories: Sequence[Path]) -> None:
        super().__init__(source)
        self._lease_s = source.redelivery_s
        self._directories = directories
        self._taken: set[Path] = set()

    def receive(self, messages_max: int, wait_s: float) -> Sequence[Delivery]:
        until = time.monotonic() + wait_s
        while True:
            deliveries: list[Delivery] = []
            for path in self._free():
                if len(deliveries) == messages_max:
                    break
                if taken := self._take(path):
                    deliveries.append(self._delivery(taken))
            if deliveries or time.monotonic() >= until:
                return deliveries
            time.sleep(0.01)

    def _free(self) -> Iterator[Path]:
        """Files that nobody has, the oldest first."""
        for directory in self._directories:
            try:
                paths = sorted(directory.iterdir())
            except OSError as error:
                raise BrokerUnavailable(f"{directory} cannot be read: {error.strerror}.") from error
            for path in paths:
                try:
                    if path.name[0] != "." and path.stat().st_mtime <= time.time():
                        yield path
                except FileNotFoundError:  # settled meanwhile
                    continue

    def _take(self, path: Path) -> Path | None:
        place, _, times = path.name.rpartition(".")
        taken = path.with_name(f"{place}.{int(times) + 1}")
        try:
            self._extend(path)  # first: under its new name it is never free
            path.rename(taken)
        except FileNotFoundError:  # another consumer was faster
            return None
        self._taken.add(taken)
        return taken

    def _extend(self, path: Path) -> None:
        os.utime(path, (time.time(), time.time() + self._lease_s))

    def _delivery(self, path: Path) -> Delivery:
        content, topic = path.read_bytes(), path.parent.name
        head, _, payload = content.partition(b"\n")
        place, _, times = path.name.rpartition(".")
        try:
            headers = [(name, _bytes(value)) for name, value in json.loads(head)]
        except (ValueError, TypeError) as error:
            return Delivery(None, topic, path, f"The file is not a message: {error}", content)
        return ENVELOPE.delivery(
            topic, payload, headers, origin={"file": place, "weak_id": f"spool:{topic}:{place}"},
            tag=path, redelivered=times != "1",
        )  # fmt: skip

    def tend(self, deliveries: Sequence[Delivery]) -> None:
        for delivery in deliveries:
            try:
                self._extend(delivery.tag)
            except FileNotFoundError:  # too late: another consumer has it, and settle will say so
                continue

    def settle(self, deliveries: Sequence[Delivery]) -> None:
        failed = 0
        for delivery in deliveries:
            self._taken.discard(delivery.tag)
            try:
                delivery.tag.unlink()
            except FileNotFoundError:
                failed += 1
        if failed:
            raise BrokerError(f"{failed} files are not this consumer's any more.", failed=failed)

    def close(self) -> None:
        for path in self._taken:
            try:
                os.utime(path, (0, 0))  # free at once
            except FileNotFoundError:
                continue


class SpoolPublisher:
    """What a relay calls, from one thread."""

    event_prefix = ENVELOPE.prefix

    def __init__(self, root: Path) -> None:
        self.name = f"spool:{root}"
        self._root = root
        self._last = 0

    def publish(
        self, messages: Sequence[Message[Any]], within_s: float
    ) -> Sequence[BrokerError | None]:
        batch = Batch("Spool", messages, within_s)
        for at, content in batch.entries(_content):  # what cannot be written is answered there
            directory = self._root / messages[at].topic
            if directory.is_dir():
                self._write(directory, content)
                batch.answer(at, None)
            else:
                batch.answer(at, DestinationRefused(f"There is no directory {directory}."))
        return batch.outcome()

    def _write(self, directory: Path, content: bytes) -> None:
        """Return when it is on disk."""
        self._last = max(time.time_ns(), self._last + 1)
        name = f"{self._last:020d}-{secrets.token_hex(3)}"
        hidden = directory / f".{name}"
        with hidden.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        hidden.rename(directory / f"{name}.0")
        descriptor = os.open(directory, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)

    def close(self) -> None:
        """Nothing is open between two calls."""


def _content(message: Message[Any]) -> bytes:
    """The headers as one line of JSON, then the payload."""
    utf8(message.topic)
    if not re.fullmatch(r"\w[\w.-]*", message.topic):
        raise MessageRefused(f"{message.topic!r} is not the name of a topic.")
    head = json.dumps(list(ENVELOPE.headers(message)), default=_hex, ensure_ascii=False)
    content = utf8(head) + b"\n" + ENVELOPE.payload(message)
    if len(content) > BYTES_MAX:
        raise MessageRefused(f"The message has {len(content):,} bytes: {BYTES_MAX:,} are allowed.")
    return content


def _hex(value: bytes) -> dict[str, str]:
    return {"hex": value.hex()}


def _bytes(value: Any) -> Any:
    return bytes.fromhex(value["hex"]) if isinstance(value, dict) else value
