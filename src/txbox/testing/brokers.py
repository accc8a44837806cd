"""What every source and every publisher must do, as tests of your own pytest, on your own broker:

    class SpoolRig(Rig): ...  # makes a topic, publishes, makes the source, counts what is not acknowledged

    class TestSpool(SourceConformance):
        @pytest.fixture
        def rig(self, tmp_path):
            with SpoolRig(str(tmp_path)) as rig:
                yield rig

`PublisherConformance` takes the same rig: what the publisher sends, the source reads. A class that needs another way
to the same promise overrides a point; what the broker cannot do at all its rig says in `lacks`. As a program, this
module is the worker and the publisher that are killed.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import random
import secrets
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, Protocol, Self, TypeVar, cast

import pytest

from txbox import events
from txbox.app import App
from txbox.brokers.base import Consumer, Context, Delivery, Publisher, Source
from txbox.brokers.envelope import as_structured
from txbox.connections.base import connection_lost
from txbox.errors import (
    BrokerError,
    BrokerUnavailable,
    DestinationRefused,
    MessageRefused,
    Reject,
    Retry,
    UnusableMessage,
)
from txbox.events import Event
from txbox.identity import message_id
from txbox.message import HeaderValue, Message
from txbox.policy import Lease, RetryPolicy
from txbox.testing import install_from_environment
from txbox.testing.faults import passing
from txbox.worker import Worker
from txbox.worker.health import Health

Pairs = tuple[tuple[str, HeaderValue], ...]
Test = TypeVar("Test", bound=Callable[..., None])

#: How long a point waits for what must happen: reached only by what fails, also on a machine that is very busy.
DEADLINE_S = 40.0
#: Of one call of a publisher, which is tried again; and of a process that is to be killed, which imports a lot first.
WITHIN_S = 60.0
SHORT_S = 3.0
KEYS = 20
PAYLOAD = b'{"cents": 100}'
TIME = datetime(2026, 11, 20, 17, 0, 1, 234567, tzinfo=UTC)
HOSTILE: Pairs = (
    ("bytes", b"\xff\xfe\x80"), ("empty", ""), ("nul", "a\0b"), ("twice", "1"), ("twice", "2"),
    ("null", None), ("text", "é\U0001f600"),
)  # fmt: skip
#: What a rig may say that its broker lacks.
CAPABILITIES = {
    "native ids": "a property of the broker's own for the id of a message",
    "weak ids": "coordinates that name a message for ever",
    "redelivered": "a mark, or a count, on what was delivered before",
    "rival": "a second consumer, which gets what the broker takes away from the first",
    "tombstones": "messages without a payload",
    "order": "what is published of one key is received in that order",
    "batches": "many messages in one call take less time than one by one",
    "processes": "another process reaches the broker",
    "server": "a server that a test may kill",
}
_CONSUMER = "conformance"
_DRAINED_S = DEADLINE_S
#: Failures are due again at once: tests wait for nothing.
_AT_ONCE = RetryPolicy(max_attempts=8, base=timedelta(0))
#: One start that is counted, and not given back, kills the message: an innocent one must never die of it.
_STRICT = Lease(max_starts=1)
#: What a killed worker had leased is free after a second; each restart counts a start.
_SHORT = Lease(duration=timedelta(seconds=1), max_starts=20)
_PROGRAM = "txbox.testing.brokers"


# -- the rig -----------------------------------------------------------------------------------


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
    def hung(self) -> AbstractContextManager[object]:
        """Meanwhile it accepts connections, and answers nothing."""
        ...


class Rig(ABC):
    """One topic of one broker, made for one test and removed after it.

    Args:
        address: all that another process needs, beside the topic, to make this rig again.
        server: the server itself where the test may kill it.
    """

    #: Which of CAPABILITIES the broker does not have, and why. The points that need one are skipped, and say so.
    lacks: ClassVar[Mapping[str, str]] = {}
    #: What CloudEvents headers begin with in its binding.
    cloud_events: ClassVar[str] = "ce_"
    #: Payloads as they must arrive.
    payloads: ClassVar[Sequence[bytes | None]] = (b"\xff\x00\xfe", b"")
    #: Headers as they must arrive: what the broker can carry of these.
    headers: ClassVar[Pairs] = HOSTILE[:-1]
    #: After so long the sources with `impatient` options get again what is not acknowledged.
    redelivery_s: ClassVar[float] = 1.0

    def __init_subclass__(cls) -> None:
        if unknown := set(cls.lacks) - set(CAPABILITIES):
            names = ", ".join(sorted(unknown))
            raise TypeError(f"{cls.__name__}.lacks: {names} is none of {', '.join(CAPABILITIES)}.")

    def __init__(self, address: str, server: Server | None = None) -> None:
        self.address = address
        self.server = server
        self.topic = f"orders-{secrets.token_hex(6)}"

    def __enter__(self) -> Self:
        self.create()
        return self

    def __exit__(self, *raised: object) -> None:
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
        """Delete the topic and make it again, under the same name; then the same coordinates come again."""
        self.remove()
        self.create()

    @abstractmethod
    def publish(self, *messages: Note) -> None:
        """Publish without txbox; returns when the broker has all of them."""

    @abstractmethod
    def source(self, **options: Any) -> Any:
        """A source of the topic; all sources of a rig share their progress."""

    def publisher(self, **options: Any) -> Publisher:
        """A publisher to the topic; the source's own, unless this is overridden."""
        publisher: Publisher = self.source(**options).publisher()
        return publisher

    @abstractmethod
    def outstanding(self) -> int:
        """How many messages are not acknowledged; those that a source holds may be missing."""

    @contextmanager
    def rival(self) -> Generator[Callable[[], Sequence[Delivery]]]:
        """Another member of the group, who gets what the broker takes away from the first."""
        if "rival" in self.lacks:
            yield lambda: ()
            return
        with opened(self, **self.impatient) as source:
            yield lambda: source.receive(100, 0.05)

    def python(self, *words: str, **options: Any) -> Any:
        """Start `python -m …` in another process, as `subprocess.Popen` does."""
        return subprocess.Popen([sys.executable, "-m", *words], **options)


class Alone:
    """Stands in for the worker where a test drives a source itself: a Context and its Progress."""

    lease_s = 1.0

    def __init__(self) -> None:
        self.events: list[Event] = []

    @property
    def progress(self) -> Self:
        return self

    def settled(self, among: object, within_s: float) -> list[Delivery]:  # nothing is in flight
        del among, within_s
        return []

    def report(self, event: Event) -> None:
        self.events.append(event)

    def acquire(self) -> bool:
        return True

    def load(self) -> str | None:
        return None

    def save(self, state: str) -> bool:  # brokers remember
        del state
        return True

    def release(self) -> None:
        return


# -- what the points do --------------------------------------------------------------------------


def point(promise: str, *, needs: str = "") -> Callable[[Test], Test]:
    """Marks a point. Its failure says which promise is broken, and its docstring what to do about it.

    Args:
        promise: its number in docs/reliability/promises.md, or whose docstring says it in `txbox.brokers.base`.
        needs: a capability without which the point does not apply.
    """

    def decorate(test: Test) -> Test:
        @functools.wraps(test)
        def run(suite: object, **fixtures: Any) -> None:
            rig: Rig = fixtures.get("rig") or fixtures["throwaway_rig"]
            if needs in rig.lacks:
                what = f"{needs} ({CAPABILITIES[needs]})"
                pytest.skip(f"{type(rig).__name__} lacks {what}: {rig.lacks[needs]}")
            try:
                test(suite, **fixtures)
            except Exception as error:
                remedy = " ".join((test.__doc__ or "").split())
                which = (
                    f"promise {promise}" if promise[0].isdecimal() else f"what {promise} promises"
                )
                error.add_note(
                    f"\nBroken by the source or publisher of {type(rig).__name__}: {which}. {remedy}"
                )
                raise

        vars(run)["promise"] = promise
        return cast("Test", run)

    return decorate


def eventually(condition: Callable[[], Any], what: str = "the condition") -> Any:
    """Poll until a condition holds; returns what it returned."""
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        if value := condition():
            return value
        time.sleep(0.01)
    raise AssertionError(f"{what} did not come true within {DEADLINE_S:g} s")


def room(seconds: float) -> float:
    """What takes up to `seconds` on an idle machine may take so long on this one, as busy as it is now."""
    return seconds * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


@contextmanager
def opened(rig: Rig, **options: Any) -> Generator[Consumer]:
    """A consumer that the test drives itself; closed in the end, what it holds unacknowledged."""
    source: Source = rig.source(**options)
    with closing(source.consumer([rig.topic], cast("Context", Alone()))) as consumer:
        yield consumer


def take(source: Consumer, count: int) -> list[Delivery]:
    """Receive until that many have come."""
    deliveries: list[Delivery] = []

    def enough() -> bool:
        with suppress(BrokerUnavailable):
            deliveries.extend(source.receive(count - len(deliveries), 0.2))
        return len(deliveries) >= count

    eventually(enough, f"{count} deliveries")
    return deliveries


def the_message(delivery: Delivery) -> Message[Any]:
    assert delivery.message is not None, delivery.problem
    return delivery.message


def id_of(delivery: Delivery) -> str:
    return message_id(the_message(delivery))


def _nothing_for(receive: Callable[[], Sequence[Delivery]], seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        assert not receive(), "delivered again while it was kept"


def _bytes(values: Sequence[str | bytes | None]) -> list[bytes | None]:
    # a source may give as text what is UTF-8
    return [value.encode() if isinstance(value, str) else value for value in values]


class Trial:
    """A service over the topic of a rig: its handler writes an effect a message, then does `body`.

    The effects are in a table without a unique key, so that a second one shows.

    Attributes:
        received, settled: what went in and out of its source.
        calls: the ids of the handler's calls.
    """

    def __init__(
        self,
        rig: Rig,
        file: Path,
        body: Callable[[Message[Any]], object] = id,
        *,
        source: Mapping[str, Any] | None = None,
        lease: Lease = _STRICT,
        **options: Any,
    ) -> None:
        self.url = f"sqlite:///{file}"
        self.calls: list[str] = []
        self.events: list[Event] = []
        self.received: list[Delivery] = []
        self.settled: list[Delivery] = []
        self.app = App(self.url, lease=lease, observers=[self.events.append])
        self.app.init()
        self._db = sqlite3.connect(file, isolation_level=None, check_same_thread=False)
        self._db.execute("CREATE TABLE effect (message_id TEXT NOT NULL)")

        def handle(message: Message[Any], tx: sqlite3.Connection) -> None:
            self.calls.append(message_id(message, weak=bool(options.get("weak_ids"))))
            tx.execute("INSERT INTO effect VALUES (?)", self.calls[-1:])
            body(message)

        app: Any = self.app
        app.handler(rig.topic, consumer=_CONSUMER, **options)(handle)
        self.app.consume(self._watched(rig.source(**(source or {}))))

    def _watched(self, source: Source) -> Source:
        connect = source.consumer

        def consumer(topics: Sequence[str], context: Context) -> Consumer:
            made = connect(topics, context)
            receive, settle = made.receive, made.settle

            def watched_receive(messages_max: int, wait_s: float) -> Sequence[Delivery]:
                deliveries = receive(messages_max, wait_s)
                assert len(deliveries) <= messages_max
                self.received += deliveries
                return deliveries

            def watched_settle(deliveries: Sequence[Delivery]) -> None:
                self.settled += deliveries
                settle(deliveries)

            vars(made).update(receive=watched_receive, settle=watched_settle)
            return made

        vars(source).update(consumer=consumer)
        return source

    def close(self) -> None:
        self._db.close()
        self.app.close()

    @contextmanager
    def running(self, *, maintenance: bool = False) -> Generator[list[int]]:
        """Run a worker in a thread; afterwards it has been drained, and the list has its exit status."""
        worker = Worker(self.app, install_signals=False, maintenance=maintenance)
        codes: list[int] = []
        thread = threading.Thread(target=lambda: codes.append(worker.run()), daemon=True)
        thread.start()
        try:
            yield codes
        finally:
            worker.stop()
            thread.join(_DRAINED_S)
            assert not thread.is_alive(), "the worker did not drain"

    def rows(self, sql: str) -> list[Any]:
        return list(self._db.execute(sql))

    def effects(self) -> int:
        return int(self.rows("SELECT count(*) FROM effect")[0][0])

    def statuses(self) -> dict[str, int]:
        return dict(self.rows("SELECT status, count(*) FROM txbox_inbox GROUP BY status"))

    def quarantined(self) -> list[str]:
        return sorted(reason for (reason,) in self.rows("SELECT reason FROM txbox_quarantine"))

    def emitted(self, kind: type[Event]) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]

    def idle(self) -> bool:
        return len(self.settled) == len(self.received)

    def each_once(self, count: int) -> None:
        """Fails unless so many messages are processed, each with one effect."""
        effects = self.rows("SELECT message_id FROM effect")
        assert (len(effects), len(set(effects))) == (count, count), "effects, and different ones"
        assert self.statuses() == {"processed": count}


Serve = Callable[..., Trial]


class _Suite:
    @pytest.fixture
    def throwaway_rig(self, rig: Rig) -> Rig:
        """On a server that the test may kill; override it unless the rig lacks one."""
        assert rig.server is not None or "server" in rig.lacks, (
            'Make a fixture `throwaway_rig`, whose rig has a server, or put "server" among what the rig lacks.'
        )
        return rig


# -- sources -------------------------------------------------------------------------------------


class SourceConformance(_Suite):
    """What every source must do, with a fixture `rig` of yours, and `throwaway_rig` where there is a server to kill."""

    @pytest.fixture
    def serve(self, tmp_path: Path) -> Generator[Serve]:
        """Makes services: `serve(rig, body, mode="stored")`."""
        made: list[Trial] = []

        def make(rig: Rig, *args: Any, **options: Any) -> Trial:
            made.append(Trial(rig, tmp_path / f"service-{len(made)}.db", *args, **options))
            return made[-1]

        yield make
        for service in made:
            service.close()

    # -- what a message is

    @point("1.2")
    def test_the_id_is_the_producers(self, rig: Rig) -> None:
        """The id is the header `message-id`, or that of the CloudEvent. Pass the headers on as they came."""
        prefix = rig.cloud_events
        event = ((f"{prefix}id", "e 1"), (f"{prefix}source", "/my shop"))
        wanted = {
            "m1": Note("m1"),
            "/my%20shop e 1": Note(headers=event),
            "m2": Note("m2", b"2", event),
        }
        if "native ids" not in rig.lacks:
            wanted["n1"] = Note(native="n1")
            wanted["n2"] = Note("m3", b"3", native="n2")
        rig.publish(*wanted.values())
        with opened(rig) as source:
            deliveries = take(source, len(wanted))
            assert sorted(map(id_of, deliveries)) == sorted(wanted)
            assert {delivery.topic for delivery in deliveries} == {rig.topic}
            source.settle(deliveries)

    @point("1.2")
    def test_a_structured_event_is_the_message_that_it_describes(
        self, rig: Rig, serve: Serve
    ) -> None:
        """A payload of type application/cloudevents+json is the event itself. `Transport.delivery` reads it."""
        event = b'{"id": "e 1", "source": "/my shop", "type": "paid", "subject": "k", "data": {"b" :  1.10}}'
        structured = "application/cloudevents+json"
        seen: list[Message[Any]] = []
        service = serve(rig, seen.append)
        rig.publish(
            Note(payload=event, content_type=structured),
            Note("known", event, content_type=f"{structured}; charset=UTF-8"),
        )
        with service.running():
            eventually(lambda: service.effects() == 2)
            eventually(lambda: rig.outstanding() == 0)
        assert {message.id for message in seen} == {"/my%20shop e 1", "known"}
        for message in seen:
            assert (message.type, message.key, message.payload) == ("paid", "k", b'{"b" :  1.10}')
            assert message.content_type == "application/json"
            assert message.headers.text(f"{rig.cloud_events}source") == "/my shop"

    @point("2.13")
    def test_what_is_no_message_is_set_aside_and_its_neighbours_are_done(
        self, rig: Rig, serve: Serve
    ) -> None:
        """What cannot be read is a Delivery with a `problem` and its bytes: not an exception, and never left out."""
        service = serve(rig)
        rig.publish(
            Note("before"),
            Note("malformed", b'{"id": ', content_type="application/cloudevents+json"),
            Note("batch", b"[{}]", content_type="application/cloudevents-batch+json"),
            Note("behind"),
        )
        with service.running():
            eventually(lambda: len(service.quarantined()) == 2 and service.effects() == 2)
            eventually(lambda: rig.outstanding() == 0)
        batch, malformed = service.quarantined()
        assert batch.startswith("A batch of CloudEvents")
        assert malformed.startswith("The CloudEvent is not a JSON object")

    @point("1.3")
    def test_coordinates_are_an_id_on_request_only(self, rig: Rig) -> None:
        """A message of coordinates alone has no id. They go into `origin`, as `weak_id` where they name it for
        ever, and no message of another topic of that name."""
        weak: list[str] = []
        for _ in range(2):
            rig.publish(Note())
            for _ in range(2):
                with opened(rig, **rig.impatient) as source:
                    message = the_message(take(source, 1)[0])
                    with pytest.raises(UnusableMessage, match="no id"):
                        message_id(message)
                    if "weak ids" in rig.lacks:
                        with pytest.raises(UnusableMessage, match="no id"):
                            message_id(message, weak=True)
                        return
                    weak.append(message_id(message, weak=True))
            rig.recreate()
        assert all(weak_id.startswith("weak:") for weak_id in weak)
        first, again, other, _ = weak
        assert first == again
        assert first != other

    @point("1.3")
    def test_weak_ids_in_a_service(self, rig: Rig, serve: Serve) -> None:
        """A message without an id is quarantined, unless the handler takes weak ids and there is one."""
        service = serve(rig, weak_ids=True)
        rig.publish(Note(), Note("m1"))
        with service.running():
            eventually(lambda: service.effects() + len(service.quarantined()) == 2)
        assert service.calls.count("m1") == 1
        assert len(service.quarantined()) == ("weak ids" in rig.lacks)
        assert rig.outstanding() == 0

    @point("1.5")
    def test_payloads_stay_bytes(self, rig: Rig) -> None:
        """The payload is what was published, byte by byte: its hash is compared. Decode nothing."""
        rig.publish(*(Note(f"m{at}", payload) for at, payload in enumerate(rig.payloads)))
        with opened(rig) as source:
            deliveries = take(source, len(rig.payloads))
            payloads = {id_of(delivery): the_message(delivery).payload for delivery in deliveries}
        assert payloads == {f"m{at}": payload for at, payload in enumerate(rig.payloads)}

    @point("2.13")
    def test_headers_arrive_as_they_are(self, rig: Rig, serve: Serve) -> None:
        """Bytes stay bytes, and what is repeated stays so. What the broker cannot carry, `Rig.headers` leaves out."""
        rig.publish(Note("m1", headers=rig.headers))
        with opened(rig) as source:
            deliveries = take(source, 1)
            headers = the_message(deliveries[0]).headers
            source.settle(deliveries)
        names = {name for name, _ in rig.headers}
        assert {name: _bytes(headers.get_all(name)) for name in names} == {
            name: _bytes([value for header, value in rig.headers if header == name])
            for name in names
        }
        rig.publish(Note("m2", headers=rig.headers))
        service = serve(rig, mode="stored")
        with service.running():
            eventually(lambda: service.effects() == 1)
        assert rig.outstanding() == 0

    # -- receiving and settling

    @point("Consumer.receive")
    def test_no_more_than_asked_for(self, rig: Rig) -> None:
        """`receive` returns at most `messages_max`: memory is bounded by it. Keep the rest for the next call."""
        rig.publish(*notes(12))
        with opened(rig) as source:
            ids: list[str] = []

            def enough() -> bool:
                batch = source.receive(messages_max := random.randint(1, 4), 0.2)
                assert len(batch) <= messages_max
                ids.extend(map(id_of, batch))
                return len(ids) >= 12

            eventually(enough)
        assert len(set(ids)) == len(ids) == 12

    @point("2.9")
    def test_settled_in_any_order(self, rig: Rig) -> None:
        """Deliveries are settled as they end, in any order, and perhaps twice: that is a BrokerError at most."""
        rig.publish(*notes(25))
        with opened(rig) as source:
            deliveries = take(source, 25)
            random.shuffle(deliveries)
            for part in (deliveries[:1], deliveries[1:12], deliveries[12:]):
                source.settle(part)
            with suppress(BrokerError):
                source.settle(deliveries[:3])
        assert rig.outstanding() == 0

    @point("4.4")
    def test_unacknowledged_comes_again_and_has_one_effect(self, rig: Rig, serve: Serve) -> None:
        """What was not settled is delivered again, to the next consumer after `close`, and marked as redelivered. To an
        innocent message that happens often: it must never make it a dead letter."""
        service = serve(rig, source=rig.impatient)
        rig.publish(*notes(4))
        with opened(rig, **rig.impatient) as source:
            deliveries = take(source, 4)
            for delivery in deliveries[:2]:
                service.app.process(the_message(delivery))
            source.settle(deliveries[:1])
        with opened(rig, **rig.impatient) as source:
            again = take(source, 3)
            assert id_of(deliveries[0]) not in map(id_of, again)
            if "redelivered" not in rig.lacks:
                assert all(delivery.redelivered for delivery in again), "not marked as redelivered"
        assert rig.outstanding() == 3
        with service.running():
            eventually(lambda: len(service.settled) == 3)
        service.each_once(4)
        assert len(service.emitted(events.MessageDuplicate)) == 1
        assert rig.outstanding() == 0

    # -- outcomes

    @point("2.9")
    def test_every_outcome_that_is_on_disk_is_acknowledged(self, rig: Rig, serve: Serve) -> None:
        """Processed, a duplicate, parked, dead, quarantined, of no handler: `settle` is called, and acknowledges."""

        def fail(message: Message[Any]) -> None:
            match message.headers.text("do"):
                case "retry" if service.calls.count(service.calls[-1]) == 1:
                    raise ValueError("at once")
                case "park":
                    raise Retry(after=timedelta(hours=1))
                case "reject":
                    raise Reject("no")
                case _:
                    pass

        service = serve(rig, fail, type="paid", retry=_AT_ONCE)
        paid = ("type", "paid")
        rig.publish(
            Note("ok", headers=(paid,)), Note("retry", headers=(paid, ("do", "retry"))),
            Note("park", headers=(paid, ("do", "park"))), Note("no", headers=(paid, ("do", "reject"))),
            Note(headers=(paid,)), Note("other", headers=(("type", "sent"),)),
        )  # fmt: skip
        with service.running():
            eventually(lambda: len(service.settled) == 6 and service.effects() == 2)
            rig.publish(
                Note("ok", headers=(paid,)), Note("ok", b'{"cents": 1}', headers=(paid,)),
                Note("park", headers=(paid, ("do", "park"))),
            )  # fmt: skip
            eventually(lambda: len(service.settled) == 9)
        assert rig.outstanding() == 0
        assert service.statuses() == {"processed": 2, "failed": 1, "dead": 1}
        assert len(service.quarantined()) == 2
        assert service.calls.count("retry") == 2
        kinds = "Processed Duplicate Failed Dead Quarantined Deferred Unmatched"
        for kind in kinds.split():
            assert service.emitted(getattr(events, f"Message{kind}")), kind
        assert not service.emitted(events.SettleFailed)

    @point("4.5")
    def test_stored_first_then_processed_from_the_table(self, rig: Rig, serve: Serve) -> None:
        """With mode="stored" a message is acknowledged before its handler runs, copies among them."""

        def is_acknowledged(message: Message[Any]) -> None:
            eventually(lambda: message.id in set(map(id_of, service.settled)))

        service = serve(rig, is_acknowledged, mode="stored", retry=_AT_ONCE)
        rig.publish(*notes(5), *notes(5))
        with service.running():
            eventually(lambda: len(service.settled) == 10 and service.effects() == 5)
        assert not service.emitted(events.MessageFailed)
        service.each_once(5)
        assert rig.outstanding() == 0

    # -- time

    @point("2.7")
    def test_a_slow_handler_keeps_its_message(self, rig: Rig, serve: Serve) -> None:
        """While a handler runs, nobody else gets its message, nor those behind it. Set `tend_every_s`, and extend what
        is in flight in `tend`."""
        go = threading.Event()

        def wait(_: Message[Any]) -> None:
            assert go.wait(DEADLINE_S)

        service = serve(rig, wait, source=rig.impatient)
        rig.publish(Note("slow"), Note("behind"))
        with service.running(), ExitStack() as stack:
            stack.callback(go.set)
            eventually(lambda: service.calls and len(service.received) == 2)
            with rig.rival() as receive:
                _nothing_for(receive, 2 * rig.redelivery_s)
            go.set()
            eventually(lambda: len(service.settled) == 2)
        assert sorted(service.calls) == ["behind", "slow"]
        assert not service.emitted(events.MessageDuplicate)
        assert rig.outstanding() == 0

    @point("3.3")
    def test_while_the_database_is_away_nothing_is_given_back_or_counted(
        self, rig: Rig, serve: Serve
    ) -> None:
        """An outage costs no message an attempt: deliveries are kept and tended. Give none back: a broker counts."""
        service = serve(rig, source=rig.impatient)
        rig.publish(Note("before"))
        away = threading.Event()

        def lose(name: str) -> None:
            if away.is_set() and name.startswith("before:") and name != "before:ack":
                raise connection_lost(definite=True)

        with passing(lose), service.running() as codes:
            eventually(lambda: len(service.settled) == 1)
            away.set()
            rig.publish(*notes(5))
            eventually(lambda: len(service.received) == 6)
            eventually(lambda: service.emitted(events.ConsumptionPaused))
            with rig.rival() as receive:
                _nothing_for(receive, 1.5 * rig.redelivery_s)
            assert (len(service.received), len(service.settled), codes) == (6, 1, [])
            away.clear()
            eventually(lambda: len(service.settled) == 6)
        assert len(service.received) == 6
        assert service.emitted(events.ConsumptionResumed)
        service.each_once(6)
        assert service.rows("SELECT max(attempts) FROM txbox_inbox") == [(0,)]
        assert service.rows("SELECT count(*) FROM txbox_attempt") == [(0,)]
        assert rig.outstanding() == 0

    # -- ends

    @point("Consumer.close")
    def test_a_drain_settles_what_ended_and_leaves_the_rest(self, rig: Rig, serve: Serve) -> None:
        """`close` leaves unsettled deliveries to the next consumer: it acknowledges and drops none."""

        def drain(_: Message[Any]) -> None:
            if len(service.calls) == 1:
                drained.stop()
                eventually(lambda: "draining" in health.unready())

        service, health = serve(rig, drain, source=rig.impatient), Health()
        drained = Worker(service.app, install_signals=False, maintenance=False, health=health)
        rig.publish(*notes(10))
        assert drained.run() == 0
        assert 1 <= service.effects() < 10
        # a source of suspects has handed more to the table than was processed
        assert rig.outstanding() == 10 - sum(service.statuses().values())
        with service.running():
            eventually(lambda: service.effects() == 10)
        service.each_once(10)
        assert rig.outstanding() == 0

    @pytest.mark.parametrize("crash", ["after:handler", "before:ack"])
    @point("2.9", needs="processes")
    def test_a_killed_worker_loses_and_doubles_nothing(
        self, rig: Rig, serve: Serve, crash: str
    ) -> None:
        """What a killed process had received is delivered again. Acknowledge in `settle` alone; hold by a lease, or by
        a connection that ends with the process."""
        service = serve(rig, source=rig.replaceable, lease=_SHORT)
        rig.publish(*notes(8))
        with _process(
            rig, "worker", service.url, TXBOX_CRASH_AT=crash, TXBOX_CRASH_NTH="1"
        ) as killed:
            assert killed.wait(WITHIN_S) == -signal.SIGKILL
        unfinished = "SELECT 1 FROM txbox_inbox WHERE status <> 'processed'"
        with service.running(maintenance=True):
            eventually(lambda: service.effects() >= 8 and not service.rows(unfinished))
            eventually(lambda: service.idle() and rig.outstanding() == 0)
        service.each_once(8)

    @point("2.9", needs="server")
    def test_a_server_that_is_killed_and_comes_back(self, throwaway_rig: Rig, serve: Serve) -> None:
        """A broker that is away is BrokerUnavailable, and connected again by the next call. What it takes back from the
        consumer comes again."""
        rig, server = throwaway_rig, cast("Server", throwaway_rig.server)
        half, go = threading.Event(), threading.Event()

        def hold_at_half(_: Message[Any]) -> None:
            if len(service.calls) == 20:
                half.set()
                assert go.wait(DEADLINE_S)

        service = serve(rig, hold_at_half, source=rig.impatient)
        rig.publish(*notes(40))
        with service.running() as codes, ExitStack() as stack:
            stack.callback(go.set)
            assert half.wait(DEADLINE_S)
            server.stop(immediate=True)
            go.set()
            eventually(lambda: service.emitted(events.ConsumptionPaused))
            server.start()
            eventually(lambda: service.effects() >= 40)
            rig.publish(*notes(5, first=40))
            eventually(lambda: service.effects() >= 45)
            # what was acknowledged into the void comes again, and is a duplicate
            eventually(lambda: service.idle() and rig.outstanding() == 0)
            assert service.emitted(events.ConsumptionResumed)
            assert codes == []
        service.each_once(45)
        assert rig.outstanding() == 0


# -- publishers ----------------------------------------------------------------------------------


def publisher_of(rig: Rig, **options: Any) -> closing[Any]:
    return closing(rig.publisher(**options))


def message(rig: Rig, name: object, **more: Any) -> Message[Any]:
    fields: dict[str, Any] = {"topic": rig.topic, "id": str(name), "payload": PAYLOAD, **more}
    return Message(**fields)


def several(rig: Rig, count: int, first: int = 0) -> list[Message[Any]]:
    """The payload is the number within the key."""
    return [
        message(rig, f"m{number}", key=f"k{number % KEYS}", payload=str(number // KEYS).encode())
        for number in range(first, first + count)
    ]


def confirmed(
    publisher: Publisher, messages: Sequence[Message[Any]], within_s: float = WITHIN_S
) -> None:
    answers = publisher.publish(messages, within_s)
    assert [str(answer) for answer in answers if answer is not None] == []
    assert len(answers) == len(messages)


def arrived(rig: Rig, wanted: int | set[str]) -> list[Message[Any]]:
    """Receive and settle until so many ids have come, or these; copies stay in."""
    messages: list[Message[Any]] = []

    def enough() -> bool:
        with suppress(BrokerUnavailable):
            deliveries = source.receive(500, 0.2)
            messages.extend(map(the_message, deliveries))
            source.settle(deliveries)
        return wanted <= ids(messages) if isinstance(wanted, set) else len(ids(messages)) >= wanted

    with opened(rig) as source:
        eventually(enough, f"{wanted} messages")
    return messages


def ids(messages: Sequence[Message[Any]]) -> set[str]:
    return set(map(message_id, messages))


def _took_s(publisher: Publisher, calls: Sequence[Sequence[Message[Any]]]) -> float:
    started = time.monotonic()
    for messages in calls:
        confirmed(publisher, messages)
    return time.monotonic() - started


def _unavailable(publisher: Publisher, rig: Rig) -> None:
    started = time.monotonic()
    with pytest.raises(BrokerUnavailable):
        publisher.publish([message(rig, "lost"), message(rig, "lost too")], SHORT_S)
    assert time.monotonic() - started < SHORT_S + room(4)


def _again(publisher: Publisher, sent: Message[Any]) -> bool:
    try:
        return publisher.publish([sent], WITHIN_S) == [None]
    except BrokerUnavailable:
        return False


class PublisherConformance(_Suite):
    """What every publisher must do, with the same fixtures."""

    #: What becomes of HOSTILE on the way; the same by default.
    headers: ClassVar[Sequence[tuple[str, HeaderValue]]] = HOSTILE
    payloads: ClassVar[Sequence[bytes]] = (b"\xff\x00\xfe", b"", "grüß".encode())
    #: What becomes of TIME.
    time: ClassVar[datetime] = TIME
    many: ClassVar[int] = 5000
    faster: ClassVar[float] = 2.0

    def unroutable(self, rig: Rig) -> str:
        """A topic that takes no message."""
        return f"nowhere-{rig.topic}"

    @contextmanager
    def too_large(self, rig: Rig) -> Generator[Message[Any]]:
        yield message(rig, "large", payload=b"x" * 2_000_000)

    @point("Publisher.publish")
    def test_what_is_published_is_what_is_received(self, rig: Rig) -> None:
        """Id, payload, type, key, content type, time, headers arrive: `Transport.headers` has all but the payload."""
        sent = [
            message(
                rig, f"m {number}", payload=payload, type="order.paid", key="k1",
                content_type="application/json", time=TIME,
                headers=(*HOSTILE, ("message-id", "another"), ("Type", "another")),
            )
            for number, payload in enumerate(self.payloads)
        ]  # fmt: skip
        with publisher_of(rig) as publisher:
            confirmed(publisher, sent)
        received = {message_id(got): got for got in arrived(rig, len(sent))}
        assert set(received) == {wanted.id for wanted in sent}
        for wanted in sent:
            got = received[str(wanted.id)]
            assert (got.topic, got.payload, got.type, got.key, got.content_type) == (
                wanted.topic, wanted.payload, wanted.type, wanted.key, wanted.content_type,
            )  # fmt: skip
            assert got.time == self.time
            for name in {name for name, _ in self.headers}:
                values = [value for header, value in self.headers if header == name]
                assert got.headers.get_all(name) == values, name

    @point("Publisher.publish")
    def test_cloud_events_leave_with_the_prefix_of_the_binding(self, rig: Rig) -> None:
        """`event_prefix` is what the source reads as well, and its headers are the message's id and type."""
        with publisher_of(rig) as publisher:
            prefix = publisher.event_prefix
            assert prefix == rig.cloud_events or prefix == "ce-"
            event = ((f"{prefix}id", "e1"), (f"{prefix}source", "/shop"), (f"{prefix}type", "paid"))
            confirmed(publisher, [Message(topic=rig.topic, payload=b"1", headers=event)])
        (got,) = arrived(rig, 1)
        assert (message_id(got), got.type) == ("/shop e1", "paid")

    @point("Publisher.publish")
    def test_a_structured_event_is_read_back_as_it_was(self, rig: Rig) -> None:
        """The content type arrives, and the source reads the event in the payload."""
        content = {"payload": b'{"b" :  1.10}', "content_type": "application/json"}
        sent = message(rig, "m1", type="paid", key="k", **content)
        with publisher_of(rig) as publisher:
            confirmed(publisher, [as_structured(sent, "/shop")])
        (got,) = arrived(rig, 1)
        assert (message_id(got), got.type, got.key) == ("m1", "paid", "k")
        assert (got.payload, got.content_type) == (sent.payload, sent.content_type)
        assert got.headers.text(f"{publisher.event_prefix}source") == "/shop"

    @point("Publisher.publish")
    def test_a_tombstone_arrives_or_is_refused(self, rig: Rig) -> None:
        """No payload is not an empty one. `Transport.payload` refuses a tombstone that the broker cannot carry."""
        batch = [
            message(rig, "m1"),
            message(rig, "gone", key="k", payload=None),
            message(rig, "m2"),
        ]
        tombstones = "tombstones" not in rig.lacks
        with publisher_of(rig) as publisher:
            answers = publisher.publish(batch, WITHIN_S)
        assert answers[::2] == [None, None]
        assert (answers[1] is None) is tombstones
        received = {message_id(got): got for got in arrived(rig, 2 + tombstones)}
        assert set(received) == {"m1", "m2"} | ({"gone"} if tombstones else set())
        if tombstones:
            assert received["gone"].payload is None
        else:
            assert isinstance(answers[1], MessageRefused)

    @point("6.4")
    def test_a_topic_that_takes_nothing_fails_its_message_alone(self, rig: Rig) -> None:
        """The answer of its message is a DestinationRefused that names the topic; its neighbours are confirmed."""
        topic = self.unroutable(rig)
        with publisher_of(rig) as publisher:
            batch = [message(rig, "m1"), message(rig, "lost", topic=topic), message(rig, "m2")]
            answers = publisher.publish(batch, WITHIN_S)
            assert answers[::2] == [None, None]
            assert type(answers[1]) is DestinationRefused
            assert topic in str(answers[1])
            confirmed(publisher, [message(rig, "m3")])
        assert ids(arrived(rig, 3)) == {"m1", "m2", "m3"}

    @point("6.4")
    def test_what_is_too_large_is_refused_and_its_neighbours_are_not(self, rig: Rig) -> None:
        """The answer of what can never be sent is MessageRefused: it is then dead, and blocks nothing."""
        with publisher_of(rig) as publisher:
            with self.too_large(rig) as large:
                batch = [*several(rig, 30), large, *several(rig, 30, first=30)]
                answers = publisher.publish(batch, WITHIN_S)
            assert [at for at, answer in enumerate(answers) if answer is not None] == [30], answers
            assert isinstance(answers[30], MessageRefused)
            confirmed(publisher, [message(rig, "after")])
        assert ids(arrived(rig, 61)) == {f"m{number}" for number in range(60)} | {"after"}

    @point("6.4")
    def test_text_that_is_none_is_refused(self, rig: Rig) -> None:
        """What UTF-8 cannot encode is MessageRefused, wherever it is. `envelope.utf8` encodes so."""
        broken = [
            message(rig, "m\ud800"), message(rig, "m1", key="\ud800"), message(rig, "m2", type="\ud800"),
            message(rig, "m3", headers=(("h", "\ud800"),)), message(rig, "m4", topic="\ud800"),
        ]  # fmt: skip
        with publisher_of(rig) as publisher:
            answers = publisher.publish([*broken, message(rig, "good")], WITHIN_S)
        assert [type(answer) for answer in answers] == [MessageRefused] * 5 + [type(None)]
        assert ids(arrived(rig, 1)) == {"good"}

    @point("6.2")
    def test_one_id_twice_is_confirmed_twice_and_never_lost(self, rig: Rig) -> None:
        """A message whose confirmation was lost is sent again: that is a success too, whatever the broker removes."""
        with publisher_of(rig) as publisher:
            confirmed(publisher, [message(rig, "m1"), message(rig, "m1"), message(rig, "m2")])
            confirmed(publisher, [message(rig, "m1")])
        assert ids(arrived(rig, 2)) == {"m1", "m2"}

    @point("6.3", needs="order")
    def test_thousands_in_one_call_arrive_in_the_order_of_their_keys(self, rig: Rig) -> None:
        """What is sent of a key, in one call or in several, is received in that order; and a call of many takes less
        time than many calls: send all, then wait for all confirmations."""
        with publisher_of(rig) as publisher:
            confirmed(publisher, [message(rig, "first")])
            confirmed(publisher, several(rig, self.many), DEADLINE_S)
            sent, together_s, singly_s = self.many, list[float](), list[float]()
            for _ in range(7):
                together_s.append(_took_s(publisher, [several(rig, 200, first=sent)]))
                singles = [[single] for single in several(rig, 20, first=sent + 200)]
                singly_s.append(_took_s(publisher, singles))
                sent += 220
            # What else runs on the machine only ever adds, and 200 together take a few ms: one
            # interruption would decide. The fastest of each are those that nobody interrupted.
            gain = min(singly_s) * 10 / min(together_s)
        received = arrived(rig, sent + 1)
        assert len(received) == sent + 1
        of_key: dict[str | None, list[int]] = defaultdict(list)
        for got in received:
            if message_id(got) != "first":
                of_key[got.key].append(int(got.payload or b""))
        assert len(of_key) == KEYS
        assert all(numbers == list(range(len(numbers))) for numbers in of_key.values())
        assert "batches" in rig.lacks or gain > self.faster, f"{gain:.1f} times faster together"

    @point("6.2", needs="server")
    def test_an_outage_is_said_in_time_and_what_was_confirmed_survives_it(
        self, throwaway_rig: Rig
    ) -> None:
        """A broker that is away, or hangs, is BrokerUnavailable within the time of the call; the next call connects
        again. Confirm what the broker has on disk, and nothing before."""
        rig, server = throwaway_rig, cast("Server", throwaway_rig.server)
        with publisher_of(rig) as publisher:
            confirmed(publisher, several(rig, 50))
            with server.hung():
                _unavailable(publisher, rig)
            eventually(lambda: _again(publisher, message(rig, "after hanging")), "an answer")
            confirmed(publisher, several(rig, 50, first=50))
            server.stop(immediate=True)
            _unavailable(publisher, rig)
            _unavailable(publisher, rig)
            server.start()
            eventually(lambda: _again(publisher, message(rig, "after the kill")), "an answer")
        sent = {f"m{number}" for number in range(100)} | {"after hanging", "after the kill"}
        arrived(rig, sent)  # and perhaps what was refused for want of an answer

    @point("6.2", needs="processes")
    def test_what_a_killed_process_saw_confirmed_is_there(self, rig: Rig) -> None:
        """None is an answer of the broker, not of a buffer: what was confirmed is there after a kill -9."""
        sent: list[str] = []
        with _process(rig, "publisher", stdout=subprocess.PIPE) as process:
            while len(sent) < 300:
                line = process.stdout.readline()
                assert line, "the publishing process has ended"
                sent += json.loads(line)
            process.kill()
            # the last line may be half a line
            rest = process.communicate()[0].rpartition(b"\n")[0]
            for line in rest.splitlines():
                sent += json.loads(line)
        assert set(sent) <= ids(arrived(rig, len(set(sent))))


# -- the processes that are killed -----------------------------------------------------------------


@contextmanager
def _process(
    rig: Rig, role: str, url: str = "", stdout: int | None = None, **environment: str
) -> Generator[Any]:
    """This module as a program over a rig like this one; it is killed when the block ends."""
    kind = type(rig)
    plan = [kind.__module__, kind.__qualname__, rig.address, rig.topic, url]
    path = os.pathsep.join(filter(None, sys.path))
    started = rig.python(
        _PROGRAM, role, json.dumps(plan), cwd=Path.cwd(), stdout=stdout,
        env={**os.environ, "PYTHONPATH": path, **environment},
    )  # fmt: skip
    try:
        yield started
    finally:
        started.kill()
        started.wait()
        if started.stdout is not None:
            started.stdout.close()


def _work(rig: Rig, url: str) -> int:
    install_from_environment()
    app = App(url, lease=_SHORT)

    @app.handler(rig.topic, consumer=_CONSUMER, retry=_AT_ONCE)
    def handle(message: Message[Any], tx: sqlite3.Connection) -> None:
        tx.execute("INSERT INTO effect VALUES (?)", (message_id(message),))

    del handle
    app.consume(rig.source(**rig.replaceable))
    return Worker(app).run()


def _publish(rig: Rig) -> None:
    with publisher_of(rig) as publisher:
        for number in itertools.count():
            batch = [message(rig, f"{number}-{at}", key="k") for at in range(100)]
            answers = publisher.publish(batch, WITHIN_S)
            kept = [sent.id for sent, answer in zip(batch, answers, strict=True) if answer is None]
            os.write(1, json.dumps(kept).encode() + b"\n")


def _main(role: str, plan: str) -> int:
    module, name, address, topic, url = json.loads(plan)
    kind = functools.reduce(getattr, name.split("."), import_module(module))
    rig = cast("Callable[[str], Rig]", kind)(address)
    rig.topic = topic
    if role == "worker":
        return _work(rig, url)
    _publish(rig)
    return 0


if __name__ == "__main__":
    sys.exit(_main(*sys.argv[1:]))
