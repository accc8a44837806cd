"""The order of the time-outs, and who delivers what, checked before anything is consumed."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.support.shop import TOPIC, opened, paid
from tests.support.sources import Memory
from tests.support.workers import worker
from txbox import App, ConfigurationError, Lease, Limits, Message
from txbox.brokers.base import Consumer, Context, Delivery, Source
from txbox.brokers.file import File
from txbox.brokers.kafka import Kafka
from txbox.handlers.conflicts import names_of, topics_of


def started(url: str, source: Memory, *, timeout_s: float | None = None, **policies: Any) -> int:
    with opened(url, **policies) as shop:
        options: dict[str, Any] = (
            {} if timeout_s is None else {"timeout": timedelta(seconds=timeout_s)}
        )
        shop.handler(**options)
        shop.app.consume(source, [TOPIC])
        return worker(shop.app, once=True).run()


@pytest.mark.parametrize(
    ("claim_s", "timeout_s", "lease_s", "source_s", "named"),
    [
        (5, None, 5, (None, None), ("Limits.lock_timeout is 5 s", "Lease.duration 5 s")),
        (5, 3, 60, (None, None), ("Limits.lock_timeout is 5 s", "tests.support.shop", " 3 s")),
        (5, 60, 60, (None, None), ("timeout= of ", "is 60 s", "Lease.duration 60 s")),
        (5, None, 60, (None, 60), ("memory", "after 60 s", "Lease.duration is 60 s")),
        (5, None, 300, (10, 10), ("memory", "after 10 s", "every 10 s")),
    ],
)
def test_a_wrong_order_ends_with_status_2(
    sqlite_url: str,
    caplog: pytest.LogCaptureFixture,
    *,
    claim_s: float,
    timeout_s: float | None,
    lease_s: float,
    source_s: tuple[float | None, float | None],
    named: tuple[str, ...],
) -> None:
    source = Memory([paid("m1")])
    source.tend_every_s, source.redelivery_s = source_s
    limits = Limits(lock_timeout=timedelta(seconds=claim_s))
    lease = Lease(duration=timedelta(seconds=lease_s))

    assert started(sqlite_url, source, timeout_s=timeout_s, limits=limits, lease=lease) == 2

    (error,) = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    for part in named:
        assert part in error
    assert source.received == []
    assert source.threads == set(), "found before the source was opened"


@pytest.mark.parametrize(
    ("timeout_s", "tend_s", "redelivery_s"),
    # what is tended may be redelivered sooner than a lease runs out; None: never, or not known
    [(None, None, None), (30, 3, 10), (30, None, 61), (30, 3, None)],
)
def test_the_right_order_runs(
    sqlite_url: str, timeout_s: float | None, tend_s: float | None, redelivery_s: float | None
) -> None:
    source = Memory([paid("m1")])
    source.tend_every_s, source.redelivery_s = tend_s, redelivery_s

    lease = Lease(duration=timedelta(seconds=60))
    assert started(sqlite_url, source, timeout_s=timeout_s, lease=lease) == 0

    assert source.settled_ids == ["m1"]


def test_a_time_out_that_only_the_broker_knows(
    sqlite_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    class Asking(Memory):
        def consumer(self, topics: Any, context: Context) -> Consumer:
            self.redelivery_s = 30.0
            return super().consumer(topics, context)

    source = Asking([paid("m1")])

    assert started(sqlite_url, source) == 2

    assert "after 30 s" in caplog.text
    assert source.received == []
    assert source.closed


class Shared(Source):
    """A source whose consumers share nothing."""

    name = "shared"

    def __init__(self) -> None:
        self.consumers: list[Memory] = []

    def consumer(self, topics: Sequence[str], context: Context) -> Consumer:
        made = Memory([replace(paid(f"m-{topic}"), topic=topic) for topic in topics])
        self.consumers.append(made)
        return made.consumer(topics, context)


def test_one_source_is_consumed_twice(sqlite_url: str) -> None:
    """By one worker, and by the next: each time something else is opened."""
    source, seen = Shared(), list[str]()
    with App(sqlite_url) as app:
        app.init()

        @app.handler("*", consumer="all")
        def handle(message: Message[Any], tx: Any) -> None:
            seen.append(message.topic)

        app.consume(source, ["a"])
        app.consume(source, ["b"])
        for count in (2, 4):
            assert worker(app, once=True).run() == 0
            assert [each.settled_ids for each in source.consumers[-2:]] in (
                [["m-a"], ["m-b"]], [["m-b"], ["m-a"]],
            )  # fmt: skip
            assert len(source.consumers) == count
    assert sorted(seen) == ["a", "b"]


def test_what_forgets_a_method_is_no_source() -> None:
    class Forgetful(Source):
        name = "forgetful"

    class Lossy(Consumer):
        def receive(self, messages_max: int, wait_s: float) -> Sequence[Delivery]:
            return []

    made: list[Any] = [Forgetful, Lossy]
    for kind, forgotten in zip(made, ("consumer", "close.*settle"), strict=True):
        with pytest.raises(TypeError, match=forgotten):
            kind()


@pytest.mark.parametrize(
    ("topics", "sentence"),
    [(["effect:mail"], "are those of effects"), (None, "no handler names a topic")],
)
def test_no_source_delivers_effects(
    sqlite_url: str, topics: list[str] | None, sentence: str
) -> None:
    with App(sqlite_url) as app:

        @app.effect("mail")
        def mail(message: Message[Any]) -> None: ...

        app.consume(Memory([]), topics)
        running = worker(app, once=True)
        assert running.run() == 2
        assert sentence in str(running.failure)


def test_every_topic_of_a_source_that_has_its_own(sqlite_url: str) -> None:
    """Its topics, all of them: one without a handler would be acknowledged unread."""
    source = Memory([])
    source.topics = ("a", "b")
    with App(sqlite_url) as app:
        app.handler("a", consumer="c")(lambda message, tx: None)
        app.handler("x: y", consumer="c")(lambda message, tx: None)
        with pytest.raises(ConfigurationError) as raised:
            topics_of(app.handlers, source, ["*", "a"])
        # its text cannot be split at a colon
        assert raised.value.problem.endswith("topic 'b', which no handler consumes")
        assert raised.value.remedy.startswith("register a handler for it")
        app.handler("b", consumer="c")(lambda message, tx: None)
        assert topics_of(app.handlers, source, ["*", "a"]) == ("a", "b")


def test_sources_that_share_a_name_are_told_apart(tmp_path: Path) -> None:
    several = [Memory([]) for _ in range(4)]
    several[3].name = "other"
    found = names_of(list(zip(several, [["a"], ["b", "c"], ["a"], ["a"]], strict=True)))
    assert found == ["memory (a)", "memory (b, c)", "memory (a) 2", "other"]
    twice = File(tmp_path / "a.jsonl"), File(tmp_path / "a.jsonl")
    with pytest.raises(ConfigurationError, match="one of them would wait for the other"):
        names_of([(source, ["a"]) for source in twice])
    member = Kafka("localhost:1", group="shop", group_instance_id="one")
    with pytest.raises(ConfigurationError, match="names one member"):
        names_of([(member, ["a"]), (member, ["b"])])
    elsewhere = File(tmp_path / "a.jsonl", name="elsewhere")
    assert len({*names_of([(twice[0], ["a"]), (elsewhere, ["a"])])}) == 2
