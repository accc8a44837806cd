"""What every publisher must do, as tests over the rigs of the sources: `class TestMine(PublisherConformance)`.

What the publisher sends is read by the broker's own source. The class gives two fixtures: `rig` on
the shared server, and `throwaway_rig` on one that the test may kill. As a program, it publishes until it
is killed, and says what was confirmed.
"""

from __future__ import annotations

import importlib
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, ClassVar

import pytest

from tests.support.brokers.rigs import Rig, opened
from tests.support.servers import ROOT
from tests.support.waiting import DEADLINE_S, eventually, room
from tests.support.warm import Warm
from txbox import Message
from txbox.brokers.base import Consumer, Publisher
from txbox.brokers.envelope import as_structured
from txbox.errors import BrokerUnavailable, DestinationRefused, MessageRefused
from txbox.identity import message_id
from txbox.message import HeaderValue

WITHIN_S = 60.0  # of one call, which is tried again: several fit into a deadline
SHORT_S = 3.0
KEYS = 20
TIME = datetime(2026, 11, 20, 17, 0, 1, 234567, tzinfo=UTC)
HOSTILE: tuple[tuple[str, HeaderValue], ...] = (
    ("bytes", b"\xff\xfe\x80"), ("empty", ""), ("nul", "a\0b"), ("twice", "1"), ("twice", "2"),
    ("null", None), ("text", "é\U0001f600"),
)  # fmt: skip


def took_s(publisher: Publisher, calls: Sequence[Sequence[Message[Any]]]) -> float:
    started = time.monotonic()
    for messages in calls:
        confirmed(publisher, messages)
    return time.monotonic() - started


def publisher_of(rig: Rig, **options: Any) -> Any:
    made: Publisher = rig.source(**options).publisher()
    return closing(made)


def message(rig: Rig, name: object, **more: Any) -> Message[Any]:
    return Message(**{"topic": rig.topic, "id": str(name), "payload": b'{"cents": 100}', **more})


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


def received(source: Consumer, wanted: int | set[str]) -> list[Message[Any]]:
    """Receive and settle until so many ids have come, or these; copies stay in."""
    found: list[Message[Any]] = []
    ids: set[str] = set()

    def enough() -> bool:
        try:
            deliveries = source.receive(500, 0.2)
        except BrokerUnavailable:
            return False
        for delivery in deliveries:
            assert delivery.message is not None, delivery.problem
            found.append(delivery.message)
            ids.add(message_id(delivery.message))
        source.settle(deliveries)
        return wanted <= ids if isinstance(wanted, set) else len(ids) >= wanted

    eventually(enough, f"{wanted} messages")
    return found


def arrived(rig: Rig, wanted: int | set[str]) -> list[Message[Any]]:
    with opened(rig) as source:
        return received(source, wanted)


def ids(messages: Sequence[Message[Any]]) -> set[str]:
    return {message_id(got) for got in messages}


class PublisherConformance:
    #: What becomes of HOSTILE on the way; the same by default.
    headers: ClassVar[Sequence[tuple[str, HeaderValue]]] = HOSTILE
    payloads: ClassVar[Sequence[bytes]] = (b"\xff\x00\xfe", b"", "grüß".encode())
    tombstones: ClassVar[bool] = False
    time: ClassVar[datetime] = TIME
    many: ClassVar[int] = 5000
    faster: ClassVar[float] = 2.0

    def unroutable(self, rig: Rig) -> str:
        """A topic that takes no message."""
        return f"nowhere-{rig.topic}"

    @contextmanager
    def too_large(self, rig: Rig) -> Iterator[Message[Any]]:
        yield message(rig, "large", payload=b"x" * 2_000_000)

    def test_what_is_published_is_what_is_received(self, rig: Rig) -> None:
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
        found = {message_id(got): got for got in arrived(rig, len(sent))}
        assert set(found) == {wanted.id for wanted in sent}
        for wanted in sent:
            got = found[str(wanted.id)]
            assert (got.topic, got.payload, got.type, got.key, got.content_type) == (
                wanted.topic, wanted.payload, wanted.type, wanted.key, wanted.content_type,
            )  # fmt: skip
            assert got.time == self.time
            for name in {name for name, _ in self.headers}:
                values = [value for header, value in self.headers if header == name]
                assert got.headers.get_all(name) == values, name

    def test_cloud_events_leave_with_the_prefix_of_the_binding(self, rig: Rig) -> None:
        with publisher_of(rig) as publisher:
            prefix = publisher.event_prefix
            assert prefix == rig.cloud_events or prefix == "ce-"
            event = ((f"{prefix}id", "e1"), (f"{prefix}source", "/shop"), (f"{prefix}type", "paid"))
            confirmed(publisher, [Message(topic=rig.topic, payload=b"1", headers=event)])
        (got,) = arrived(rig, 1)
        assert (message_id(got), got.type) == ("/shop e1", "paid")

    def test_a_structured_event_is_read_back_as_it_was(self, rig: Rig) -> None:
        sent = message(
            rig,
            "m1",
            type="paid",
            key="k",
            payload=b'{"b" :  1.10}',
            content_type="application/json",
        )
        with publisher_of(rig) as publisher:
            confirmed(publisher, [as_structured(sent, "/shop")])
        (got,) = arrived(rig, 1)
        assert (message_id(got), got.type, got.key) == ("m1", "paid", "k")
        assert (got.payload, got.content_type) == (sent.payload, sent.content_type)
        assert got.headers.text(f"{publisher.event_prefix}source") == "/shop"

    def test_a_tombstone_arrives_or_is_refused(self, rig: Rig) -> None:
        with publisher_of(rig) as publisher:
            answers = publisher.publish(
                [
                    message(rig, "m1"),
                    message(rig, "gone", key="k", payload=None),
                    message(rig, "m2"),
                ],
                WITHIN_S,
            )
        assert answers[::2] == [None, None]
        assert (answers[1] is None) is self.tombstones
        found = {message_id(got): got for got in arrived(rig, 2 + self.tombstones)}
        assert set(found) == {"m1", "m2"} | ({"gone"} if self.tombstones else set())
        if self.tombstones:
            assert found["gone"].payload is None
        else:
            assert isinstance(answers[1], MessageRefused)

    def test_a_topic_that_takes_nothing_fails_its_message_alone(self, rig: Rig) -> None:
        topic = self.unroutable(rig)
        with publisher_of(rig) as publisher:
            answers = publisher.publish(
                [message(rig, "m1"), message(rig, "lost", topic=topic), message(rig, "m2")],
                WITHIN_S,
            )
            assert answers[::2] == [None, None]
            assert type(answers[1]) is DestinationRefused
            assert topic in str(answers[1])
            confirmed(publisher, [message(rig, "m3")])
        assert ids(arrived(rig, 3)) == {"m1", "m2", "m3"}

    def test_what_is_too_large_is_refused_and_its_neighbours_are_not(self, rig: Rig) -> None:
        with publisher_of(rig) as publisher:
            with self.too_large(rig) as large:
                batch = [*several(rig, 30), large, *several(rig, 30, first=30)]
                answers = publisher.publish(batch, WITHIN_S)
            assert [at for at, answer in enumerate(answers) if answer is not None] == [30], answers
            assert isinstance(answers[30], MessageRefused)
            confirmed(publisher, [message(rig, "after")])
        assert ids(arrived(rig, 61)) == {f"m{number}" for number in range(60)} | {"after"}

    def test_text_that_is_none_is_refused(self, rig: Rig) -> None:
        broken = [
            message(rig, "m\ud800"), message(rig, "m1", key="\ud800"), message(rig, "m2", type="\ud800"),
            message(rig, "m3", headers=(("h", "\ud800"),)), message(rig, "m4", topic="\ud800"),
        ]  # fmt: skip
        with publisher_of(rig) as publisher:
            answers = publisher.publish([*broken, message(rig, "good")], WITHIN_S)
        assert [type(answer) for answer in answers] == [MessageRefused] * 5 + [type(None)]
        assert ids(arrived(rig, 1)) == {"good"}

    def test_one_id_twice_is_confirmed_twice_and_never_lost(self, rig: Rig) -> None:
        with publisher_of(rig) as publisher:
            confirmed(publisher, [message(rig, "m1"), message(rig, "m1"), message(rig, "m2")])
            confirmed(publisher, [message(rig, "m1")])
        assert ids(arrived(rig, 2)) == {"m1", "m2"}

    def test_thousands_in_one_call_arrive_in_the_order_of_their_keys(self, rig: Rig) -> None:
        with publisher_of(rig) as publisher:
            confirmed(publisher, [message(rig, "first")])
            confirmed(publisher, several(rig, self.many), DEADLINE_S)
            sent, together_s, singly_s = self.many, [], []
            for _ in range(7):
                together_s.append(took_s(publisher, [several(rig, 200, first=sent)]))
                singles = [[single] for single in several(rig, 20, first=sent + 200)]
                singly_s.append(took_s(publisher, singles))
                sent += 220
            # What else runs on the machine only ever adds, and 200 together take a few ms: one
            # interruption would decide. The fastest of each are those that nobody interrupted.
            gain = min(singly_s) * 10 / min(together_s)
            print(f"\n{publisher.name}: {gain:.1f} times faster together")
        found = arrived(rig, sent + 1)
        assert len(found) == sent + 1
        of_key: dict[str | None, list[int]] = defaultdict(list)
        for got in found:
            if message_id(got) != "first":
                of_key[got.key].append(int(got.payload or b""))
        assert len(of_key) == KEYS
        assert all(numbers == list(range(len(numbers))) for numbers in of_key.values())
        assert gain > self.faster

    def test_an_outage_is_said_in_time_and_what_was_confirmed_survives_it(
        self, throwaway_rig: Rig
    ) -> None:
        server: Any = throwaway_rig.server
        with publisher_of(throwaway_rig) as publisher:
            confirmed(publisher, several(throwaway_rig, 50))
            with stopped(server):
                unavailable(publisher, throwaway_rig)
            eventually(
                lambda: again(publisher, message(throwaway_rig, "after hanging")), "an answer"
            )
            confirmed(publisher, several(throwaway_rig, 50, first=50))
            server.stop(immediate=True)
            unavailable(publisher, throwaway_rig)
            unavailable(publisher, throwaway_rig)
            server.start()
            eventually(
                lambda: again(publisher, message(throwaway_rig, "after the kill")), "an answer"
            )
        sent = {f"m{number}" for number in range(100)} | {"after hanging", "after the kill"}
        arrived(throwaway_rig, sent)  # and perhaps what was refused for want of an answer

    def test_what_a_killed_process_saw_confirmed_is_there(self, rig: Rig) -> None:
        plan = {
            "rig": f"{type(rig).__module__}:{type(rig).__name__}",
            "address": rig.address,
            "topic": rig.topic,
        }
        process = Warm(
            ["tests.support.brokers.publisher_conformance", json.dumps(plan)],
            cwd=ROOT, stdout=subprocess.PIPE,
        )  # fmt: skip
        assert process.stdout is not None
        said: list[str] = []
        try:
            while len(said) < 300:
                line = process.stdout.readline()
                assert line, "the publishing process has ended"
                said += json.loads(line)
        finally:
            process.kill()
            # the last line may be half a line
            rest = process.communicate()[0].rpartition(b"\n")[0]
            for line in rest.splitlines():
                said += json.loads(line)
        assert set(said) <= ids(arrived(rig, len(set(said))))


@contextmanager
def stopped(server: Any) -> Iterator[None]:
    """The server's processes hang: they accept connections, and say nothing."""
    leader = server._pid()
    os.killpg(leader, signal.SIGSTOP)
    # on a busy machine its threads answer for a moment more
    threads = Path(f"/proc/{leader}/task")
    eventually(
        lambda: all(
            stat.read_text().rpartition(")")[2].split()[0] == "T" for stat in threads.glob("*/stat")
        ),
        "every thread stopped",
    )
    try:
        yield
    finally:
        os.killpg(leader, signal.SIGCONT)


def unavailable(publisher: Publisher, rig: Rig) -> None:
    started = time.monotonic()
    with pytest.raises(BrokerUnavailable):
        publisher.publish([message(rig, "lost"), message(rig, "lost too")], SHORT_S)
    assert time.monotonic() - started < SHORT_S + room(4)


def again(publisher: Publisher, sent: Message[Any]) -> bool:
    try:
        return publisher.publish([sent], WITHIN_S) == [None]
    except BrokerUnavailable:
        return False


def whole_seconds(moment: datetime) -> datetime:
    return moment.replace(microsecond=0)


def milliseconds(moment: datetime) -> datetime:
    return moment - timedelta(microseconds=moment.microsecond % 1000)


def main() -> None:
    plan = json.loads(sys.argv[1])
    module, _, name = plan["rig"].partition(":")
    rig: Rig = getattr(importlib.import_module(module), name)(plan["address"])
    rig.topic = plan["topic"]
    with publisher_of(rig) as publisher:
        for round_number in itertools.count():
            batch = [message(rig, f"{round_number}-{number}", key="k") for number in range(100)]
            answers = publisher.publish(batch, WITHIN_S)
            kept = [
                tried.id for tried, answer in zip(batch, answers, strict=True) if answer is None
            ]
            os.write(1, json.dumps(kept).encode() + b"\n")


if __name__ == "__main__":
    main()
