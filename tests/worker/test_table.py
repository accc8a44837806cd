"""An idle worker: what it asks the database, and what wakes it."""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from typing import Any

import pytest

from tests.support.shop import TOPIC, Shop, paid, statuses
from tests.support.sources import Memory
from tests.support.waiting import DEADLINE_S, eventually
from tests.support.workers import running, worker
from txbox import Message, Outcome, RelayPolicy, Retry, session
from txbox.brokers.base import Delivery
from txbox.brokers.local import Local
from txbox.processing import attempt
from txbox.worker import agenda, pulse

NEVER_S = 3600.0


def never_poll(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """An idle worker of this app looks by itself only after an hour, at the inbox and at the outbox."""
    monkeypatch.setattr(agenda, "_IDLE_S", NEVER_S)
    # the poll is one for both: it is as frequent as the outbox, which any worker looks after, wants it
    shop.app.relaying = RelayPolicy(poll=timedelta(seconds=NEVER_S))


class Points:
    """The statements of a process, BEGIN and COMMIT included: each passes a crash point before it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[str] = []
        monkeypatch.setattr(session, "crash_point", self._note)

    def _note(self, point: str) -> None:
        self.seen.append(point)

    def sent(self) -> list[str]:
        return [point.removeprefix("before:") for point in self.seen if point.startswith("before:")]


@pytest.mark.parametrize("handlers", [1, 100])
def test_an_idle_worker_sends_fewer_statements_than_seconds_pass(
    shop: Shop, handlers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # everything ten times as fast
    for module, name in ((agenda, "_IDLE_S"), (pulse, "_BEAT_S"), (pulse, "_WRITE_S")):
        monkeypatch.setattr(module, name, getattr(module, name) / 10)
    for number in range(handlers):
        shop.handler(consumer=f"consumer-{number}")
    shop.app.consume(Memory([], endless=True))
    points = Points(monkeypatch)
    with running(worker(shop.app, maintenance=True)):
        # at first it looks often, and maintains
        eventually(lambda: len(points.sent()) > 20 and set(points.sent()[-10:]) == IDLE)
        points.seen.clear()
        started = time.monotonic()
        eventually(lambda: points.sent().count("worker_write") >= 3)
        took_s = time.monotonic() - started
        sent = points.sent()
    assert set(sent) == IDLE, "single statements, without BEGIN and COMMIT, for all consumers"
    assert len(sent) < took_s * 10
    assert shop.calls == []


IDLE = {"due", "pauses", "worker_write"}


def test_one_consumer_that_is_busy_costs_the_idle_ones_nothing(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(20):
        shop.app.handler(f"other-{number}", consumer=f"other-{number}")(_nothing)
    shop.handler(mode="stored")
    source = Memory([paid(f"m{number}") for number in range(200)], endless=True)
    shop.app.consume(source)
    points = Points(monkeypatch)
    with running(worker(shop.app)):
        eventually(lambda: statuses(shop.raw) == {"processed": 200})
    # before, each of them looked for itself, twice
    assert points.sent().count("lease") < 20


def test_a_retry_starts_when_it_is_due_however_seldom_an_idle_worker_looks(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran_at: list[float] = []

    def fail_once(message: Message[Any], _tx: Any) -> None:
        ran_at.append(time.monotonic())
        if message.attempt == 1:
            raise Retry(after=timedelta(seconds=1.5))

    never_poll(shop, monkeypatch)
    shop.handler(fail_once)
    source = Memory([paid("m1")], endless=True)
    shop.app.consume(source)
    with running(worker(shop.app)):
        eventually(lambda: statuses(shop.raw) == {"processed": 1})
    first, second = ran_at
    assert second - first >= 1.4, "not before it is due"


def test_what_this_process_sends_wakes_its_worker(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    never_poll(shop, monkeypatch)
    monkeypatch.setattr(agenda, "_BUSY_S", NEVER_S)
    points = Points(monkeypatch)
    shop.handler()
    shop.app.consume(Memory([], endless=True))
    with running(worker(shop.app)):
        eventually(lambda: "after:due" in points.seen)
        shop.app.send(paid("m1"))
        eventually(lambda: statuses(shop.raw) == {"processed": 1})
        # stored as a webhook stores
        shop.app.send_many([paid("m2"), paid("m3")])
        eventually(lambda: statuses(shop.raw) == {"processed": 3})
    assert points.sent().count("due") == 1
    assert shop.app.agenda is None, "nobody is told any more"


def looks_twice(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """An idle worker looks at its start and once more, then only after an hour, unless it is told of something."""
    never_poll(shop, monkeypatch)
    monkeypatch.setattr(agenda, "_GROWTH", NEVER_S / agenda._BUSY_S)


def test_an_effect_of_this_process_wakes_its_worker(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks_twice(shop, monkeypatch)
    points = Points(monkeypatch)

    @shop.app.effect("mail")
    def mail(message: Message[Any]) -> None:
        pass

    shop.handler(lambda message, tx: shop.app.effects.stage(tx, "mail", {}) and None)
    with running(worker(shop.app)):
        eventually(lambda: points.seen.count("after:due") == 2)
        assert shop.deliver(paid("m1")) is Outcome.PROCESSED
        eventually(lambda: statuses(shop.raw) == {"processed": 2})
    assert shop.app.agenda is None, "nobody is told any more"


def test_a_version_that_process_takes_wakes_those_that_wait_for_it(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks_twice(shop, monkeypatch)
    monkeypatch.setattr(attempt, "_GAP_LOOK_S", NEVER_S)
    points = Points(monkeypatch)
    shop.handler(sequence="body.n")
    one, two = (paid(f"m{n}", b'{"n": %d}' % n, key="k") for n in (1, 2))
    service = worker(shop.app)
    with running(service):
        eventually(lambda: points.seen.count("after:due") == 2)
        assert shop.deliver(two) is Outcome.DEFERRED
        eventually(lambda: "after:lease" in points.seen and not service._lanes.busy)
        assert shop.deliver(one) is Outcome.PROCESSED
        eventually(lambda: statuses(shop.raw) == {"processed": 2})


def test_what_process_parks_is_retried_by_the_worker_of_this_process(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail_once(message: Message[Any], _tx: Any) -> None:
        if message.attempt == 1:
            raise Retry(after=timedelta(milliseconds=100))

    never_poll(shop, monkeypatch)
    points = Points(monkeypatch)
    shop.handler(fail_once)
    shop.app.consume(Memory([], endless=True))
    service = worker(shop.app)
    with running(service):
        eventually(lambda: "after:due" in points.seen)
        # the pauses of a worker that has been idle for long
        service._agenda._backoff.pause_s = NEVER_S
        service._agenda._poll_at = time.monotonic() + NEVER_S
        shop.deliver(paid("m1"))
        asked = points.sent().count("due")
        eventually(lambda: statuses(shop.raw) == {"processed": 1})
        assert points.sent().count("due") > asked
    assert shop.calls == ["m1", "m1"]


def test_what_is_staged_for_a_handler_of_this_app_wakes_its_consumer_alone(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    never_poll(shop, monkeypatch)
    monkeypatch.setattr(agenda, "_BUSY_S", NEVER_S)
    done = threading.Event()

    def stage(message: Message[Any], tx: Any) -> None:
        shop.app.outbox.stage(tx, "next", {"n": 1}, key=message.key)

    def note(_message: Message[Any], _tx: Any) -> None:
        done.set()

    shop.handler(stage)
    shop.app.handler("next", consumer="next")(note)
    for number in range(20):
        shop.app.handler(f"other-{number}", consumer=f"other-{number}")(_nothing)
    shop.app.publish(Local())
    source = Memory([], endless=True)
    shop.app.consume(source)
    points = Points(monkeypatch)
    with running(worker(shop.app)):
        eventually(lambda: "after:due" in points.seen)
        source.waiting.append(Delivery(paid("m1"), TOPIC))
        assert done.wait(DEADLINE_S)
        assert points.sent().count("lease") <= 4


def _nothing(_message: Message[Any], _tx: Any) -> None:
    return None


def test_a_version_that_waited_runs_when_the_one_before_it_is_done(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its row is due from that commit on."""
    never_poll(shop, monkeypatch)
    monkeypatch.setattr(agenda, "_GROWTH", 1e9)
    monkeypatch.setattr(attempt, "_GAP_LOOK_S", 2 * NEVER_S)
    shop.handler(sequence="headers.n")
    source = Memory([paid("m2", key="k", headers={"n": "2"})], endless=True)
    shop.app.consume(source)
    idle = worker(shop.app)
    with running(idle):
        eventually(lambda: source.settled_ids == ["m2"])
        eventually(lambda: idle._agenda._poll_at > time.monotonic() + NEVER_S / 2)
        source.waiting.append(Delivery(paid("m1", key="k", headers={"n": "1"}), TOPIC))
        eventually(lambda: statuses(shop.raw) == {"processed": 2})
    assert shop.calls == ["m1", "m2"]
