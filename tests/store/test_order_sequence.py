"""`sequence=`: versions in their order, and what is done about those that are missing (promise 5.2)."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from tests.support.ordered import add_step, again, create_steps, done, of, status_of
from tests.support.shop import AT_ONCE, CONSUMER, TOPIC, Shop, quarantined, statuses
from tests.support.sources import Memory
from tests.support.waiting import eventually
from tests.support.workers import running, worker
from txbox import (
    App,
    ConfigurationError,
    GapPolicy,
    Message,
    Outcome,
    RetryPolicy,
    VersionConflict,
)
from txbox.events import MessageWaits, SequenceGap
from txbox.testing import (
    Crashed,
    another_process,
    crash_at,
    crash_points,
    drain,
    frozen_clock,
    meanwhile,
)

SOON = GapPolicy(wait=timedelta(milliseconds=500))
LATER = RetryPolicy(max_attempts=3, base=timedelta(hours=1))

Fails = Callable[[Message[Any]], bool]


@pytest.fixture(autouse=True)
def _steps(shop: Shop) -> None:
    create_steps(shop.raw)


def versions(app: App, fails: Fails = lambda _message: False, **options: Any) -> None:
    def handle(message: Message[Any], tx: Any) -> None:
        add_step(tx, message)
        if fails(message):
            raise ValueError("told to fail")

    given: dict[str, Any] = {"sequence": "body.n", "retry": AT_ONCE} | options
    register: Any = app.handler(TOPIC, consumer=CONSUMER, **given)
    register(handle)


def first_try(*ids: str) -> Fails:
    return lambda message: message.id in ids and message.attempt == 1


@pytest.mark.parametrize("order", [(1, 3, 2), (3, 2, 1), (2, 3, 1)], ids=str)
def test_out_of_order_events(shop: Shop, order: tuple[int, ...]) -> None:
    versions(shop.app)
    shop.app.consume(source := Memory([of("a", n) for n in order]))
    with running(worker(shop.app)):
        eventually(lambda: done(shop.raw).get("a") == [1, 2, 3], "versions in their order")
    assert len(source.settled) == 3, "what waits is stored and acknowledged"
    assert shop.raw.value("SELECT sum(attempts) FROM txbox_inbox") == 0
    assert shop.raw.value("SELECT sum(starts) FROM txbox_inbox") == 0
    assert not shop.emitted(SequenceGap)


@pytest.mark.parametrize("order", list(itertools.permutations((1, 2, 3, 4)))[::5], ids=str)
def test_copies_of_versions_that_wait(shop: Shop, order: tuple[int, ...]) -> None:
    versions(shop.app)
    for n in (*order, *reversed(order)):
        shop.deliver(of("a", n))
    drain(shop.app)
    assert done(shop.raw) == {"a": [1, 2, 3, 4]}


def test_a_version_waits_with_its_outcome_and_its_event(shop: Shop) -> None:
    versions(shop.app)
    assert shop.deliver(of("a", 2)) is Outcome.DEFERRED
    assert shop.deliver(of("b", 1)) is Outcome.PROCESSED
    assert shop.deliver(of("a", 2)) is Outcome.DEFERRED
    assert [event.message_id for event in shop.emitted(MessageWaits)] == ["a-2"]
    assert status_of(shop, "a", 2) == "pending"


def test_the_successor_is_due_as_soon_as_its_predecessor_is_committed(shop: Shop) -> None:
    versions(shop.app)
    # however slow the machine, no time passes
    with frozen_clock():
        for n in (3, 2):
            shop.deliver(of("a", n))
        assert drain(shop.app) == [], "not due"
        shop.deliver(of("a", 1))
        assert drain(shop.app) == [Outcome.PROCESSED, Outcome.PROCESSED]
    assert done(shop.raw) == {"a": [1, 2, 3]}


def test_the_successor_comes_before_those_that_were_looked_at_and_still_wait(shop: Shop) -> None:
    """Else each version waits for a look at all others, and again after a few seconds."""
    versions(shop.app)
    waiting = [of("a", 2), *(of(key, n) for key in ("b", "c", "a") for n in (3, 4))]
    for message in waiting:
        assert shop.deliver(message) is Outcome.DEFERRED
    shop.make_due()
    assert shop.deliver(of("a", 1)) is Outcome.PROCESSED
    ((leased, token),) = shop.lease(limit=1)
    assert leased.arrival.message_id == "a-2"
    assert shop.run(leased, token) is Outcome.PROCESSED


def test_a_missing_version_is_waited_for_no_longer_than_the_policy_says(shop: Shop) -> None:
    versions(shop.app, gaps=GapPolicy(wait=timedelta(seconds=1)))
    shop.app.consume(Memory([of("a", 1), of("a", 3), of("a", 4)]))
    with running(worker(shop.app)):
        eventually(lambda: done(shop.raw).get("a") == [1, 3, 4])
    (gap,) = shop.emitted(SequenceGap)
    assert (gap.message_id, gap.expected, gap.sequence) == ("a-3", 2, 3)

    assert shop.deliver(of("a", 2)) is Outcome.PROCESSED, "a late version is the handler's"
    assert shop.deliver(of("a", 5)) is Outcome.PROCESSED, "and does not set the key back"
    assert len(shop.emitted(SequenceGap)) == 1


def test_a_predecessor_that_failed_is_waited_for_without_a_limit(shop: Shop) -> None:
    versions(shop.app, first_try("a-1"), gaps=SOON, retry=LATER)
    assert shop.deliver(of("a", 1)) is Outcome.FAILED
    assert shop.deliver(of("a", 2)) is Outcome.DEFERRED
    shop.raw.execute(
        "UPDATE txbox_inbox SET next_attempt_at = received_at WHERE status = 'pending'"
    )
    assert drain(shop.app) == [Outcome.DEFERRED]
    assert not shop.emitted(SequenceGap)

    shop.raw.execute("UPDATE txbox_inbox SET next_attempt_at = received_at WHERE status = 'failed'")
    drain(shop.app)
    assert done(shop.raw) == {"a": [1, 2]}


def test_a_dead_predecessor_is_a_missing_one(shop: Shop) -> None:
    versions(
        shop.app, lambda message: message.id == "a-1", gaps=SOON, retry=RetryPolicy(max_attempts=1)
    )
    assert shop.deliver(of("a", 1)) is Outcome.DEAD
    assert shop.deliver(of("a", 2)) is Outcome.DEFERRED
    eventually(lambda: drain(shop.app, ignore_dates=True) and done(shop.raw) == {"a": [2]})
    (gap,) = shop.emitted(SequenceGap)
    assert gap.expected == 1


def test_without_a_first_version_a_key_begins_with_what_comes(shop: Shop) -> None:
    versions(shop.app, gaps=GapPolicy(first=None))
    assert shop.deliver(of("a", 7)) is Outcome.PROCESSED
    assert shop.deliver(of("a", 9)) is Outcome.DEFERRED
    assert shop.deliver(of("a", 8)) is Outcome.PROCESSED
    drain(shop.app)
    assert done(shop.raw) == {"a": [7, 8, 9]}


@pytest.mark.parametrize(
    "message",
    [of(None, 1), Message(id="x", topic=TOPIC, key="a", payload=b'{"n": null}'),
     Message(id="x", topic=TOPIC, key="a", payload=b"{}"),
     Message(id="x", topic=TOPIC, key="a", payload=b'{"n": "soon"}'),
     Message(id="x", topic=TOPIC, key="a", payload=b'{"n": 99999999999999999999}')],
    ids=["no key", "null", "missing", "no number", "too large"],
)  # fmt: skip
def test_without_key_or_version_it_is_quarantined(shop: Shop, message: Message[Any]) -> None:
    versions(shop.app)
    assert shop.deliver(message) is Outcome.QUARANTINED
    ((reason, _),) = quarantined(shop.raw)
    assert "sequence" in reason


def test_a_version_from_a_callable(shop: Shop) -> None:
    versions(shop.app, sequence=lambda message: int(message.headers.text("version") or ""))
    for n in (2, 1):
        version = of("a", n)
        shop.deliver(
            Message(
                id=version.id,
                topic=TOPIC,
                key="a",
                payload=version.payload,
                headers=[("version", str(n))],
            )
        )
    drain(shop.app)
    assert done(shop.raw) == {"a": [1, 2]}


@pytest.mark.parametrize(
    "options", [{"batch": True}, {"ordered": True}, {"transactional": False}], ids=str
)
def test_what_sequence_does_not_go_with(shop: Shop, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError):
        versions(shop.app, **options)


def test_redelivered_versions_keep_their_order(shop: Shop) -> None:
    versions(shop.app, first_try("a-2"), concurrency=2)
    shop.app.consume(Memory([again("a", n) for n in (3, 1, 2, 5, 4)]))
    with running(worker(shop.app)):
        eventually(lambda: done(shop.raw).get("a") == [1, 2, 3, 4, 5])
    assert statuses(shop.raw) == {"processed": 5}


def test_a_version_conflict_is_retried_and_costs_an_attempt(shop: Shop) -> None:
    """Promise 5.3: the handler compares versions itself."""

    def handle(message: Message[Any], tx: Any) -> None:
        n = message.json()["n"]
        if n != len(done(shop.raw).get("a", ())) + 1:
            raise VersionConflict("too early")
        add_step(tx, message)

    shop.app.handler(TOPIC, consumer=CONSUMER, retry=AT_ONCE)(handle)
    assert shop.deliver(of("a", 2)) is Outcome.FAILED
    assert shop.row("a-2").attempts == 1
    assert shop.row("a-2").error_type == "VersionConflict"
    assert shop.deliver(of("a", 1)) is Outcome.PROCESSED
    drain(shop.app)
    assert done(shop.raw) == {"a": [1, 2]}


def test_a_successor_that_comes_while_its_predecessor_runs(shop: Shop) -> None:
    if shop.raw.product == "sqlite":
        pytest.skip("one writer at a time: nothing is claimed while a handler runs")
    versions(shop.app)
    seen: list[Outcome] = []
    other = another_process(shop.app)
    with meanwhile("before:handler", lambda: seen.append(other.process(of("a", 2)))):
        shop.deliver(of("a", 1))
    assert seen == [Outcome.DEFERRED]
    drain(shop.app, ignore_dates=True)
    assert done(shop.raw) == {"a": [1, 2]}


def test_crashes_leave_no_hole_and_no_copy(shop: Shop) -> None:
    versions(shop.app)
    shop.deliver(of("warm", 1))
    waiting = crash_points(shop.app, of("probe", 2))
    running_points = crash_points(shop.app, of("probe", 1))
    drain(shop.app)
    numbers = itertools.count()
    for point in dict.fromkeys(waiting):
        key = f"w{next(numbers)}"
        with pytest.raises(Crashed), crash_at(point):
            shop.deliver(of(key, 2))
        shop.deliver(of(key, 2))
        shop.deliver(of(key, 1))
    for point in dict.fromkeys(running_points):
        key = f"r{next(numbers)}"
        shop.deliver(of(key, 2))
        with pytest.raises(Crashed), crash_at(point):
            shop.deliver(of(key, 1))
        shop.deliver(of(key, 1))
    drain(shop.app, ignore_dates=True)
    assert "after:sequence_state" in running_points
    wrong = {key: found for key, found in done(shop.raw).items() if found != [1, 2]}
    assert wrong == {"warm": [1]}


BIGINT = 2**63 - 1


@pytest.mark.parametrize("mode", ["inline", "stored"])
def test_what_is_no_version_is_quarantined_before_the_handler(shop: Shop, mode: str) -> None:
    versions(shop.app, mode=mode)
    none: list[Any] = [BIGINT, -BIGINT, BIGINT * 10, True, False, "3", 3.0, None, [3]]
    for version in none:
        assert shop.deliver(of("a", version)) is Outcome.QUARANTINED, version
        assert len(quarantined(shop.raw)) == 1, version
        assert done(shop.raw) == {}, version
        shop.next_case()


@pytest.mark.parametrize("mode", ["inline", "stored"])
def test_the_largest_and_the_smallest_version(shop: Shop, mode: str) -> None:
    shop.handler(sequence="body.n", mode=mode, gaps=GapPolicy(first=None))
    for key, version in (("a", BIGINT - 1), ("b", 0), ("c", -1), ("d", 1 - BIGINT)):
        shop.deliver(of(key, version))
        drain(shop.app)
        assert status_of(shop, key, version) == "processed", version
        # what follows the largest one is none
        shop.deliver(of(key, version + 1))
        drain(shop.app)
        assert len(quarantined(shop.raw)) == (version == BIGINT - 1), version
        shop.next_case()


@pytest.mark.parametrize(
    ("text", "taken"), [("3", True), ("3.0", False), ("³", False), ("x", False)]
)
def test_a_version_in_a_header_is_decimal_text(shop: Shop, text: str, taken: bool) -> None:
    versions(shop.app, sequence="headers.n", gaps=GapPolicy(first=None))
    message: Message[Any] = Message(
        id="m", topic=TOPIC, key="a", payload=b'{"n": 1}', headers=[("n", text)]
    )
    assert shop.deliver(message) is (Outcome.PROCESSED if taken else Outcome.QUARANTINED)
