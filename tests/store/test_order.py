"""`ordered=True`: the messages of a key one after the other, as they arrived (promise 5.1)."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest

from tests.support.backlog import fill
from tests.support.databases import Raw
from tests.support.ordered import add_step, again, create_steps, done, of, status_of
from tests.support.shop import AT_ONCE, CONSUMER, TOPIC, Shop, opened, statuses
from tests.support.sources import Memory
from tests.support.waiting import DEADLINE_S, eventually
from tests.support.workers import running, worker
from txbox import App, ConfigurationError, Limits, Message, Outcome, Retry, RetryPolicy, session
from txbox.admin import Admin, InboxFilter
from txbox.events import MessageWaits
from txbox.session import drive
from txbox.store import leases
from txbox.testing import another_process

LATER = RetryPolicy(max_attempts=3, base=timedelta(hours=1))
ONCE = RetryPolicy(max_attempts=1)

Fails = Callable[[Message[Any]], bool]


@pytest.fixture
def shop(database_url: str) -> Iterator[Shop]:
    """A shop whose claims give up soon."""
    with opened(
        database_url, limits=Limits(lock_timeout=timedelta(milliseconds=500))
    ) as other_shop:
        yield other_shop


@pytest.fixture(autouse=True)
def _steps(shop: Shop) -> None:
    create_steps(shop.raw)


def never(_message: Message[Any]) -> bool:
    return False


def first_try(*ids: str) -> Fails:
    return lambda message: message.id in ids and message.attempt == 1


def ordered(shop: Shop, fails: Fails = never, **options: Any) -> None:
    """Register the handler that notes each step."""

    def handle(message: Message[Any], tx: Any) -> None:
        add_step(tx, message)
        if fails(message):
            raise ValueError("told to fail")

    given: dict[str, Any] = {"consumer": CONSUMER, "ordered": True, "retry": AT_ONCE} | options
    register: Any = shop.app.handler(TOPIC, **given)
    register(handle)


def ordered_batch(shop: Shop, fails: Fails = never, **options: Any) -> None:
    def handle(messages: list[Message[Any]], tx: Any) -> None:
        for message in messages:
            add_step(tx, message)
        if any(map(fails, messages)):
            raise ValueError("told to fail")

    given: dict[str, Any] = {"consumer": CONSUMER, "ordered": True, "retry": AT_ONCE} | options
    shop.app.handler(TOPIC, batch=True, **given)(handle)


def drained(shop: Shop, *deliveries: Any) -> Memory:
    source = Memory(deliveries)
    shop.app.consume(source)
    assert worker(shop.app, once=True).run() == 0
    return source


# -- one by one -------------------------------------------------------------------------------


def test_what_comes_behind_a_failed_message_waits_in_the_table(shop: Shop) -> None:
    ordered(shop, first_try("a-1"), retry=LATER)

    assert shop.deliver(of("a", 1)) is Outcome.FAILED
    assert shop.deliver(of("a", 2)) is Outcome.DEFERRED
    assert shop.deliver(of("b", 1)) is Outcome.PROCESSED
    assert shop.deliver(of("a", 3)) is Outcome.DEFERRED
    assert shop.deliver(of("a", 2)) is Outcome.DEFERRED, "a copy of what waits"

    assert [event.message_id for event in shop.emitted(MessageWaits)] == ["a-2", "a-3"]
    assert done(shop.raw) == {"b": [1]}
    shop.make_due()
    drained(shop)
    assert done(shop.raw) == {"a": [1, 2, 3], "b": [1]}
    assert shop.raw.value("SELECT sum(attempts) FROM txbox_inbox") == 1, "waiting costs no attempt"


def test_a_message_without_key_waits_for_nobody(shop: Shop) -> None:
    ordered(shop, lambda message: message.id == "None-1", retry=LATER)
    assert shop.deliver(of(None, 1)) is Outcome.FAILED
    assert shop.deliver(of(None, 2)) is Outcome.PROCESSED


def test_a_key_of_another_consumer_is_another_key(shop: Shop) -> None:
    ordered(shop, first_try("a-1"), retry=LATER)
    ordered(shop, consumer="other", retry=LATER)
    assert shop.deliver(of("a", 1), CONSUMER) is Outcome.FAILED
    assert shop.deliver(of("a", 2), "other") is Outcome.PROCESSED


def test_a_dead_head_releases_its_key(shop: Shop) -> None:
    ordered(shop, lambda message: message.id == "a-1", retry=ONCE)
    assert shop.deliver(of("a", 1)) is Outcome.DEAD
    assert shop.deliver(of("a", 2)) is Outcome.PROCESSED


@pytest.mark.parametrize("verb", ["retry", "discard"])
def test_a_dead_head_blocks_its_key_until_somebody_acts(shop: Shop, verb: str) -> None:
    broken = threading.Event()
    broken.set()
    ordered(
        shop, lambda message: message.id == "a-1" and broken.is_set(), retry=ONCE, dead_blocks=True
    )
    assert shop.deliver(of("a", 1)) is Outcome.DEAD
    assert shop.deliver(of("a", 2)) is Outcome.DEFERRED
    assert shop.deliver(of("b", 1)) is Outcome.PROCESSED
    drained(shop)
    assert done(shop.raw) == {"b": [1]}

    broken.clear()
    with Admin(shop.app) as admin:
        getattr(admin, verb)(InboxFilter(consumer=CONSUMER, message_id="a-1"), actor="me")
    drained(shop)
    assert done(shop.raw)["a"] == ([1, 2] if verb == "retry" else [2])


def test_retry_when_ordered_counts_attempts_of_the_head_only(shop: Shop) -> None:
    def handle(message: Message[Any], tx: Any) -> None:
        if message.id == "a-1" and message.attempt < 4:
            raise Retry(after=timedelta(0))
        add_step(tx, message)

    shop.app.handler(TOPIC, consumer=CONSUMER, ordered=True, retry=AT_ONCE)(handle)
    drained(shop, of("a", 1), of("a", 2), of("a", 3))
    assert done(shop.raw) == {"a": [1, 2, 3]}
    assert shop.row("a-1").attempts == 3
    assert shop.row("a-2").attempts == 0


def test_replays_are_exempt(shop: Shop) -> None:
    ordered(shop, first_try("a-2"), retry=LATER, keep_payload="always")
    assert shop.deliver(of("a", 1)) is Outcome.PROCESSED
    assert shop.deliver(of("a", 2)) is Outcome.FAILED
    with Admin(shop.app) as admin:
        admin.replay(InboxFilter(consumer=CONSUMER, message_id="a-1"), actor="me")
    assert done(shop.raw) == {"a": [1, 1]}


# -- several at once --------------------------------------------------------------------------


def test_a_batch_is_isolated_from_left_to_right(shop: Shop) -> None:
    ordered_batch(shop, first_try("a-2"))
    drained(shop, of("a", 1), of("a", 2), of("b", 1), of("a", 3), of("b", 2), of("a", 4))
    assert done(shop.raw) == {"a": [1, 2, 3, 4], "b": [1, 2]}
    assert statuses(shop.raw) == {"processed": 6}


def test_a_batch_behind_a_failed_head_lets_other_keys_go_on(shop: Shop) -> None:
    ordered_batch(shop, first_try("a-1"), retry=LATER)
    drained(shop, of("a", 1))
    drained(shop, of("b", 1), of("a", 2), of("b", 2), of("a", 3))
    assert done(shop.raw) == {"b": [1, 2]}
    assert [status_of(shop, "a", n) for n in (1, 2, 3)] == ["failed", "pending", "pending"]
    shop.make_due()
    drained(shop)
    assert done(shop.raw)["a"] == [1, 2, 3]


@pytest.mark.parametrize("register", [ordered, ordered_batch])
@pytest.mark.parametrize("mode", ["inline", "stored"])
def test_through_a_worker_with_failures(
    shop: Shop, register: Callable[..., None], mode: str
) -> None:
    bad = {f"{key}-{n}" for key in "abc" for n in (1, 4, 5, 9)}
    register(shop, first_try(*bad), mode=mode, concurrency=3)
    source = drained(shop, *(of(key, n) for n in range(1, 11) for key in "abcd"))
    assert done(shop.raw) == {key: list(range(1, 11)) for key in "abcd"}
    assert len(source.settled) == 40
    assert statuses(shop.raw) == {"processed": 40}


def test_rows_behind_one_another_need_no_look_at_other_keys(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    points: list[str] = []
    ordered(shop, mode="stored")
    shop.app.send_many([of("a", n) for n in range(1, 31)])
    monkeypatch.setattr(session, "crash_point", points.append)
    drained(shop)
    assert done(shop.raw) == {"a": list(range(1, 31))}
    assert points.count("after:lease_next") == 29, "30, but for the end of the first look's share"
    assert points.count("after:lease_ordered") < 29


def test_redelivered_messages_keep_their_place(shop: Shop) -> None:
    ordered(shop, first_try("a-2"), concurrency=2)
    shop.deliver(of("a", 1))
    drained(shop, *(again("a", n) for n in range(1, 6)), *(of("a", n) for n in range(6, 12)))
    assert done(shop.raw) == {"a": list(range(1, 12))}


def test_several_types_of_one_consumer_share_their_keys(shop: Shop) -> None:
    ordered(shop, first_try("a-1"), type="made")
    ordered(shop, type="paid", retry=AT_ONCE)
    kinds = ["made", "paid", "paid", "made", "paid"]
    deliveries: list[Message[Any]] = []
    for n, kind in enumerate(kinds, 1):
        message = of("a", n)
        deliveries.append(
            Message(topic=TOPIC, id=message.id, key="a", type=kind, payload=message.payload)
        )
    drained(shop, *deliveries)
    assert done(shop.raw) == {"a": [1, 2, 3, 4, 5]}


@pytest.mark.parametrize("other", [{"ordered": False}, {"concurrency": 2}, {"dead_blocks": True}])
def test_handlers_of_an_ordered_consumer_must_agree(shop: Shop, other: dict[str, Any]) -> None:
    ordered(shop, type="made")
    with pytest.raises(ConfigurationError, match="ordered"):
        ordered(shop, type="paid", **other)


# -- held by another --------------------------------------------------------------------------


@pytest.fixture
def held(shop: Shop) -> Iterator[Callable[[str], threading.Event]]:
    """Hold an id in a transaction of another process's; returns what lets it go."""
    threads: list[tuple[threading.Thread, threading.Event]] = []

    def hold(message_id: str) -> threading.Event:
        inside, free = threading.Event(), threading.Event()

        def wait(message: Message[Any], tx: Any) -> None:
            add_step(tx, message)
            inside.set()
            free.wait(DEADLINE_S)

        def run() -> None:
            key, n = message_id.split("-")
            with App(shop.url) as other:
                other.handler(TOPIC, consumer=CONSUMER)(wait)
                other.process(of(key, int(n)))

        thread = threading.Thread(target=run, daemon=True)
        threads.append((thread, free))
        thread.start()
        assert inside.wait(DEADLINE_S)
        return free

    yield hold
    for thread, free in threads:
        free.set()
        thread.join(DEADLINE_S)


@pytest.mark.parametrize("register", [ordered, ordered_batch])
def test_a_message_in_progress_elsewhere_holds_its_key(
    shop: Shop, register: Callable[..., None], held: Callable[[str], threading.Event]
) -> None:
    if shop.raw.product == "sqlite":
        pytest.skip("one writer at a time: whoever holds an id holds the file")
    register(shop)
    free = held("a-1")
    source = Memory([of("a", 1), of("b", 1), of("a", 2), of("b", 2), of("a", 3)])
    shop.app.consume(source)
    with running(worker(shop.app)):
        eventually(lambda: done(shop.raw).get("b") == [1, 2], "the other key")
        assert "a" not in done(shop.raw)
        free.set()
        eventually(lambda: len(done(shop.raw).get("a", ())) == 3)
    assert done(shop.raw) == {"a": [1, 2, 3], "b": [1, 2]}
    assert len(source.settled) == 5


def test_a_head_that_runs_in_another_process_is_waited_for(shop: Shop) -> None:
    """Its row is leased, so the one behind it is stored, and not run beside it."""
    if shop.raw.product == "sqlite":
        pytest.skip("one writer at a time: nothing is claimed while a handler runs")
    seen: list[Outcome] = []

    def handle(message: Message[Any], tx: Any) -> None:
        if message.id == "a-1":
            if message.attempt == 1:
                raise ValueError("told to fail")
            seen.append(another_process(shop.app).process(of("a", 2)))
        add_step(tx, message)

    shop.app.handler(TOPIC, consumer=CONSUMER, ordered=True, retry=AT_ONCE)(handle)
    shop.deliver(of("a", 1))
    drained(shop)
    assert seen == [Outcome.DEFERRED]
    assert done(shop.raw) == {"a": [1, 2]}


# -- behind more waiting rows than one look goes through ------------------------------------------


def heads(shop: Shop, limit: int = 5) -> list[str]:
    """The ids of the rows that one look of an ordered consumer leases."""
    assert shop.app.database.sync is not None
    return [
        each.arrival.message_id
        for each in drive(
            shop.app.database.sync,
            leases.lease,
            shop.app.store,
            CONSUMER,
            token=secrets.token_hex(16),
            limit=limit,
            lease=shop.app.lease,
            suspect=False,
            heads_only=True,
            dead_blocks=True,
        )
    ]


def test_heads_behind_a_thousand_rows_of_a_blocked_key_are_leased(shop: Shop) -> None:
    fill(shop.raw, 1, key="'b'", status="dead")
    fill(shop.raw, 1000, key="'b'", first=1)
    # keys on both sides of the blocked one, two rows each
    fill(shop.raw, 2, key="'a'", first=1001, due_in_s=-1800)
    fill(shop.raw, 2, key="'c'", first=1003, due_in_s=-1200)
    assert sorted(heads(shop)) == ["m1001", "m1003"]
    # the others wait for these
    assert heads(shop) == []
    shop.force("UPDATE txbox_inbox SET status = 'discarded' WHERE message_id = 'm1001'")
    assert heads(shop) == ["m1002"]


def test_rows_without_a_key_behind_a_blocked_one_are_leased_before_long(shop: Shop) -> None:
    fill(shop.raw, 1, key="'b'", status="dead")
    fill(shop.raw, 1000, key="'b'", first=1)
    fill(shop.raw, 20, first=1001, due_in_s=-1800)
    found = [row for _ in range(80) for row in heads(shop)]
    assert sorted(found) == sorted(f"m{number}" for number in range(1001, 1021))


def test_no_key_is_always_the_last_one_to_be_looked_at(shop: Shop) -> None:
    fill(shop.raw, 1, key="'b'", status="dead")
    fill(shop.raw, 1000, key="'b'", first=1)
    for number, key in enumerate(("c", "d", "e"), 1):
        fill(shop.raw, 100, key=f"'{key}'", first=1000 * number + 1000, due_in_s=-1800)
    keys = [heads(shop, limit=1) for _ in range(3)]
    # each look is one key further, though its own key has a row that could run again
    assert sorted(each for (each,) in keys) == ["m2000", "m3000", "m4000"]
    for number in (2000, 3000, 4000):
        shop.force(f"UPDATE txbox_inbox SET status = 'discarded' WHERE message_id = 'm{number}'")
    keys = [heads(shop, limit=1) for _ in range(3)]
    assert sorted(each for (each,) in keys) == ["m2001", "m3001", "m4001"]


def test_rows_committed_during_a_look_keep_their_order(
    shop: Shop, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A locking read sees them, but not the snapshot that tells who is first."""
    if shop.raw.product != "mysql":
        pytest.skip("a statement has one snapshot for all that it reads")
    fill(shop.raw, 2, key="'a'")
    queries: Any = shop.app.store.dialect.queries
    assert queries["lease_ordered"].count(" ORDER BY next_attempt_at") == 1
    # the look stops at the second row of `a`: after the first it has its snapshot
    stops = " AND (inbox.message_id <> 'm1' OR GET_LOCK(DATABASE(), 600)) ORDER BY next_attempt_at"
    stopping = queries["lease_ordered"].replace(" ORDER BY next_attempt_at", stops)
    monkeypatch.setitem(queries, "lease_ordered", stopping)
    with Raw(database_url) as storing, ThreadPoolExecutor(1) as pool:
        storing.execute("BEGIN")
        fill(storing, 3, key="'b'", first=2, due_in_s=-1800)
        shop.raw.rows("SELECT GET_LOCK(DATABASE(), 0)")
        look = pool.submit(heads, shop)
        stopped = "SELECT count(*) FROM information_schema.processlist WHERE db = DATABASE() AND state = 'User lock'"
        eventually(lambda: shop.raw.value(stopped), "the look has stopped")
        storing.execute("COMMIT")
        shop.raw.rows("SELECT RELEASE_LOCK(DATABASE())")
        found = look.result(DEADLINE_S)
    monkeypatch.undo()
    assert found + heads(shop) == ["m0", "m2"]


def test_two_looks_at_once_lease_no_row_twice(shop: Shop, database_url: str) -> None:
    fill(
        shop.raw,
        400,
        key="CONCAT('k', n % 40)" if shop.raw.product == "mysql" else "'k' || (n % 40)",
    )
    found: list[str] = []

    def look() -> None:
        with App(database_url) as app, Raw(database_url) as raw:
            while ids := heads(Shop(database_url, raw, app), limit=7):
                found.extend(ids)

    threads = [threading.Thread(target=look) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # the head of each key, once
    assert sorted(found) == sorted(f"m{number}" for number in range(40))
