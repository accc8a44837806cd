"""What the conformance suites need of each broker: one rig a broker.

To add a broker: write a `Rig` (publish, make the source, count what is unacknowledged) and a test class
of about ten lines, as in `tests/brokers/test_redis.py`; what is tested is in `conformance.py`.
"""

from __future__ import annotations

import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, ClassVar, Protocol, Self

from tests.support.waiting import eventually
from txbox.brokers.base import Consumer, Delivery, Source
from txbox.errors import BrokerUnavailable
from txbox.events import Event
from txbox.message import HeaderValue

Pairs = tuple[tuple[str, HeaderValue], ...]
PAYLOAD = b'{"cents": 100}'


@dataclass(frozen=True)
class Note:
    """A message to publish; the rig puts each part where its broker keeps it.

    Args:
        id: the header `message-id`.
        native: the broker's own property for a message's id.
        content_type: the header `content-type`, or the broker's own property for it.
    """

    id: str | None = None
    payload: bytes | None = PAYLOAD
    headers: Pairs = ()
    native: str | None = None
    content_type: str | None = None

    @property
    def pairs(self) -> Pairs:
        """The headers, the id and the content type among them."""
        described = (("message-id", self.id), ("content-type", self.content_type))
        return (*(pair for pair in described if pair[1] is not None), *self.headers)


def notes(count: int, first: int = 0) -> list[Note]:
    return [Note(f"m{number}") for number in range(first, first + count)]


class Server(Protocol):
    """A server of one test alone; messages that it has taken survive `stop(immediate=True)`."""

    def start(self) -> object: ...
    def stop(self, *, immediate: bool = False) -> None: ...


class Rig(ABC):
    """One topic on one server, made for one test and removed after it.

    Args:
        address: of the server, as the source takes it.
        server: the server itself where the test may kill it.
    """

    #: The broker has a property of its own for a message's id.
    native_ids: ClassVar[bool] = False
    #: Its coordinates name a message for ever; then `recreate` makes the same coordinates again.
    weak_ids: ClassVar[bool] = True
    #: What CloudEvents headers begin with in its binding.
    cloud_events: ClassVar[str] = "ce_"
    #: Payloads as they must arrive; SQS carries nothing but text, and no empty one.
    payloads: ClassVar[Sequence[bytes | None]] = (b"\xff\x00\xfe", b"")
    #: Headers as they must arrive: what the broker can carry of these.
    headers: ClassVar[Pairs] = (
        ("bytes", b"\xff\xfe\x80"), ("empty", ""), ("nul", "a\0b"), ("twice", "1"), ("twice", "2"),
        ("null", None),
    )  # fmt: skip
    #: After so long the sources with `impatient` options get again what is not acknowledged.
    redelivery_s: ClassVar[float] = 1.0

    def __init__(self, address: str, server: Server | None = None) -> None:
        self.address = address
        self.server = server
        self.topic = f"orders-{secrets.token_hex(6)}"

    def __enter__(self) -> Self:
        self.create()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.remove()

    @property
    def impatient(self) -> Mapping[str, Any]:
        """Options of `source` by which what is not acknowledged comes again soon."""
        return {}

    @property
    def replaceable(self) -> Mapping[str, Any]:
        """Options of `source` by which a killed worker is soon followed by the next."""
        return self.impatient

    @abstractmethod
    def create(self) -> None:
        """Make the topic."""

    @abstractmethod
    def remove(self) -> None:
        """Delete the topic, and close what was opened."""

    def recreate(self) -> None:
        """Delete the topic and make it again, under the same name."""
        self.remove()
        self.create()

    @abstractmethod
    def publish(self, *messages: Note) -> None:
        """Returns when the server has all of them."""

    @abstractmethod
    def source(self, **options: Any) -> Any:
        """A source of the topic; all sources of a rig share their progress."""

    @abstractmethod
    def outstanding(self) -> int:
        """How many messages are not acknowledged; those that a source holds may be missing."""

    @contextmanager
    def rival(self) -> Iterator[Callable[[], Sequence[Delivery]]]:
        """Another member of the group, who gets what the broker takes away from the first."""
        with opened(self, **self.impatient) as source:
            yield lambda: source.receive(100, 0.05)


class Alone:
    """Stands in for the worker where a test drives a source itself."""

    lease_s = 1.0

    def __init__(self) -> None:
        self.events: list[Event] = []

    @property
    def progress(self) -> Self:
        return self

    def settled(self, among: object, within_s: float) -> list[Delivery]:  # nothing is in flight
        return []

    def report(self, event: Event) -> None:
        self.events.append(event)

    def acquire(self) -> bool:
        return True

    def load(self) -> str | None:
        return None

    def save(self, state: str) -> bool:  # brokers remember
        return True

    def release(self) -> None:
        return


@contextmanager
def opened(rig: Rig, **options: Any) -> Iterator[Consumer]:
    """A consumer that the test drives itself; closed in the end, what it holds unacknowledged."""
    source: Source = rig.source(**options)
    consumer = source.consumer([rig.topic], Alone())
    try:
        yield consumer
    finally:
        consumer.close()


def take(source: Consumer, count: int) -> list[Delivery]:
    """Receive until that many have come."""
    found: list[Delivery] = []

    def enough() -> bool:
        try:
            found.extend(source.receive(count - len(found), 0.2))
        except BrokerUnavailable:
            return False
        return len(found) >= count

    eventually(enough, f"{count} deliveries")
    return found


def nothing_for(receive: Callable[[], Sequence[Delivery]], seconds: float) -> None:
    """Fails on a delivery that comes within so long."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        assert not receive(), "delivered again while it was kept"
