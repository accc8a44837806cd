"""What a batch meets is decided as for a message alone, whichever statement says so (promises 1.1, 1.5, 2.5, 2.12)."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import pytest

from tests.support.blocked import acquired
from tests.support.databases import NewDatabase
from tests.support.leasing import Leasing
from tests.support.shop import (
    CONSUMER,
    TOPIC,
    Shop,
    as_id,
    execute,
    lasting,
    opened,
    paid,
    quarantined,
)
from tests.support.waiting import DEADLINE_S
from txbox import App, Inbox, Lease, Limits, Message, Outcome
from txbox.events import MessageDuplicate
from txbox.handlers import Handler
from txbox.policy import Batching
from txbox.processing import attempt as pace
from txbox.processing.attempt import BatchSize
from txbox.processing.intake import Mode
from txbox.session import Statement, drive

pytestmark = pytest.mark.every_database

DECIDES = {
    "processed": Outcome.DUPLICATE,
    "dead": Outcome.DUPLICATE,
    "discarded": Outcome.DUPLICATE,
    "pending": Outcome.DEFERRED,
    "failed": Outcome.DEFERRED,
    "processing": Outcome.DEFERRED,
}
IDS = list(DECIDES)
NEW = ["new1", "new2"]
OTHER = b'{"cents": 1}'


def take(app: App, handler: Handler, *messages: Message[Any]) -> list[Outcome]:
    settled = drive(app._any_sync(), app.intake.take, handler, messages)
    return [answer.outcome for answer in settled]


def pace_of(shop: Shop, handler: Handler) -> BatchSize:
    return shop.app.protocol.batch_sizes.of(handler)


@pytest.fixture(params=["claim", "claim that keeps payloads", "look"])
def handler(request: pytest.FixtureRequest, shop: Shop) -> Handler:
    """A handler whose next batch is met by one of the three statements that know duplicates."""
    keeps = request.param == "claim that keeps payloads"
    registered = shop.handler(keep_payload="always" if keeps else "unfinished")
    if request.param == "look":
        pace_of(shop, registered).looked_up(1000, 1000)
    return registered


def stand(shop: Shop, ids: list[str] = IDS, *, has_payload: bool = True) -> None:
    """A row of each status, named by it."""
    for message_id in ids:
        assert shop.deliver(paid(message_id), CONSUMER) is Outcome.PROCESSED
        shop.force(
            "UPDATE txbox_inbox SET status = ?, has_payload = ? WHERE consumer = ? AND message_id = ?",
            (message_id, has_payload, as_id(shop.raw, CONSUMER), as_id(shop.raw, message_id)),
        )
    shop.force(
        "UPDATE txbox_inbox SET token = 'another', lease_until = received_at"
        " WHERE status = 'processing'"
    )
    shop.calls.clear()
    shop.events.clear()


def rows(shop: Shop) -> list[tuple[Any, ...]]:
    return sorted(lasting(shop.raw), key=str)


def test_every_row_decides_in_a_batch(shop: Shop, handler: Handler) -> None:
    stand(shop)
    before = rows(shop)
    outcomes = take(shop.app, handler, *map(paid, [*IDS, *NEW]))
    assert dict(zip(IDS, outcomes, strict=False)) == DECIDES
    assert outcomes[len(IDS) :] == [Outcome.PROCESSED] * 2
    assert (shop.calls, quarantined(shop.raw)) == (NEW, [])
    assert set(before) <= set(rows(shop))
    told = {str(row.message_id) for row in shop.emitted(MessageDuplicate)}
    assert told == {decide for decide, outcome in DECIDES.items() if outcome is Outcome.DUPLICATE}


def test_another_payload_is_set_aside_whatever_the_row(shop: Shop, handler: Handler) -> None:
    stand(shop)
    before = rows(shop)
    outcomes = take(
        shop.app, handler, *[paid(message_id, OTHER) for message_id in IDS], *map(paid, NEW)
    )
    assert outcomes == [Outcome.QUARANTINED] * len(IDS) + [Outcome.PROCESSED] * 2
    assert (shop.calls, len(quarantined(shop.raw))) == (NEW, len(IDS))
    assert set(before) <= set(rows(shop))


def test_a_row_without_a_hash_is_not_compared_in_a_batch(shop: Shop, handler: Handler) -> None:
    stand(shop)
    shop.force("UPDATE txbox_inbox SET payload_hash = NULL")
    outcomes = take(
        shop.app, handler, *[paid(message_id, OTHER) for message_id in IDS], *map(paid, NEW)
    )
    assert outcomes == [*DECIDES.values(), Outcome.PROCESSED, Outcome.PROCESSED]
    assert quarantined(shop.raw) == []


def test_unfinished_rows_without_a_payload_get_theirs_from_a_batch(
    shop: Shop, handler: Handler
) -> None:
    stand(shop, ["pending", "failed"], has_payload=False)
    outcomes = take(shop.app, handler, *map(paid, ["pending", *NEW, "failed"]))
    processed = Outcome.PROCESSED
    assert outcomes == [Outcome.DEFERRED, processed, processed, Outcome.DEFERRED]
    assert shop.row("pending").has_payload
    assert shop.row("failed").has_payload


def test_the_rows_of_other_consumers_decide_nothing_in_a_batch(
    shop: Shop, handler: Handler
) -> None:
    for consumer in ("a-first", "shipping"):
        other = shop.handler(consumer=consumer)
        messages = [paid(message_id) for message_id in [*IDS, *NEW]]
        assert take(shop.app, other, *messages) == [Outcome.PROCESSED] * len(messages)
    stand(shop)
    outcomes = take(shop.app, handler, *map(paid, [*IDS, *NEW]))
    assert dict(zip(IDS, outcomes, strict=False)) == DECIDES
    assert outcomes[len(IDS) :] == [Outcome.PROCESSED] * 2
    assert [shop.effects(message_id) for message_id in NEW] == [3, 3]


@pytest.mark.parametrize("savepoints", [False, True])
def test_rows_whose_lease_is_anothers_by_now_are_left_to_it(shop: Shop, savepoints: bool) -> None:
    """The fence is each row's: the neighbours of a row that was lost run, and it does not."""
    handler = shop.handler(mode="stored")
    if savepoints:
        for _ in range(200):
            pace_of(shop, handler).failed(4)
    arrived = [paid(message_id) for message_id in IDS]
    leasing = Leasing(
        drive(shop.app._any_sync(), shop.app.intake.take, handler, arrived, Mode.LEASED)
    )
    rescued = "UPDATE txbox_inbox SET token = 'another' WHERE message_id = ?"
    finished = "UPDATE txbox_inbox SET status = 'dead', token = NULL, lease_until = NULL WHERE message_id = ?"
    shop.force(rescued, (as_id(shop.raw, IDS[0]),))
    shop.force(finished, (as_id(shop.raw, IDS[3]),))
    settled = drive(
        shop.app._any_sync(),
        shop.app.protocol.run_leased_many,
        handler,
        leasing.rows,
        leasing.token,
    )
    lost = {IDS[0]: Outcome.IN_PROGRESS, IDS[3]: Outcome.IN_PROGRESS}
    assert [answer.outcome for answer in settled] == [
        lost.get(message_id, Outcome.PROCESSED) for message_id in IDS
    ]
    assert sorted(shop.calls) == sorted(message_id for message_id in IDS if message_id not in lost)
    assert (shop.row(IDS[0]).status, shop.row(IDS[3]).status) == ("processing", "dead")
    assert [shop.effects(message_id) for message_id in IDS] == [
        int(message_id not in lost) for message_id in IDS
    ]


# -- when a batch is looked up ------------------------------------------------------------------


def test_duplicates_that_were_claimed_bring_the_look_and_new_messages_end_it(
    new_database: NewDatabase,
) -> None:
    ids = [f"m{number}" for number in range(100)]
    # the others have no look: what their pace says of one means nothing
    with opened(new_database("postgresql")) as shop:
        shop.app.handler(TOPIC, consumer=CONSUMER, batch=True)(lambda messages, tx: None)
        handler = shop.app.handlers.matching(TOPIC, None, CONSUMER)[0]
        known = pace_of(shop, handler)
        take(shop.app, handler, *map(paid, ids))
        assert not known.looks_first
        for _ in range(2):
            assert take(shop.app, handler, *map(paid, ids)) == [Outcome.DUPLICATE] * 100
            assert known.looks_first
        new = [paid(f"new {message_id}") for message_id in ids]
        assert take(shop.app, handler, *new) == [Outcome.PROCESSED] * 100
        assert not known.looks_first


@pytest.mark.parametrize("share", [60, 70, 90])
def test_every_batch_is_looked_up_while_more_than_half_is_known(
    new_database: NewDatabase, share: int
) -> None:
    """What a look leaves over is not counted a second time, as if all that came were new."""
    with opened(new_database("postgresql")) as shop:
        shop.app.handler(TOPIC, consumer=CONSUMER, batch=True)(lambda messages, tx: None)
        handler = shop.app.handlers.matching(TOPIC, None, CONSUMER)[0]
        known = [paid(f"m{number}") for number in range(share)]
        looked: list[bool] = []
        for batch in range(7):
            new = [paid(f"{batch}-{number}") for number in range(100 - share)]
            looked.append(pace_of(shop, handler).looks_first)
            outcomes = take(shop.app, handler, *known, *new)
            assert outcomes[share:] == [Outcome.PROCESSED] * len(new)
        assert looked == [False, False, *[True] * 5]


@pytest.mark.parametrize("keep", [False, True])
def test_what_a_claim_has_not_won_is_found_in_linear_time(
    new_database: NewDatabase, keep: bool
) -> None:
    """Hashed: an id is not compared with every id that was won, which took seconds for 10,000."""
    with opened(new_database("postgresql")) as shop:
        registered = shop.handler()
        (claim, *_) = shop.app.store.claim(
            CONSUMER,
            [registered.arrival(paid(f"m{number}"), Limits()) for number in range(1000)],
            token="t" * 32,
            lock_timeout=timedelta(seconds=1),
            idle_s=60.0,
            keep=keep,
        )
        connection = acquired(shop.app._any_sync())
        (plan,) = connection.begin((Statement("plan", f"EXPLAIN {claim.sql}", claim.params),))
        connection.rollback()
        connection.discard()
        assert any("hashed SubPlan" in line for (line,) in plan.rows)


# -- how long a claim waits, and how long a handler may ------------------------------------------


def test_limits_beyond_what_a_setting_holds_are_as_long_as_it_can(
    new_database: NewDatabase,
) -> None:
    limits, year = Limits(lock_timeout=timedelta(days=365)), timedelta(days=365)
    with opened(new_database("postgresql"), limits=limits) as shop:
        handler = shop.handler(timeout=year)
        assert take(shop.app, handler, paid("m1")) == [Outcome.PROCESSED]
    with opened(new_database("postgresql"), limits=limits) as shop:
        shop.handler(mode="stored")
        assert shop.app.process(paid("m1")) is Outcome.DEFERRED


@pytest.mark.parametrize("way", ["plain", "kept", "look"])
def test_an_id_that_is_held_elsewhere_costs_a_batch_its_bound_and_nobody_else(
    new_database: NewDatabase, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    # on a busy machine the last message may come later than the calm that lets batches grow again
    monkeypatch.setattr(pace, "_CALM_S", (3600.0, 3600.0))
    url, calm = new_database("postgresql"), Batching(duration=timedelta(seconds=60))
    with opened(url, limits=Limits(lock_timeout=timedelta(seconds=0.5)), batching=calm) as shop:
        handler = shop.handler(keep_payload="always" if way == "kept" else "unfinished")
        for doubled in range(5):
            pace_of(shop, handler).committed(2**doubled, 0.0)
        assert pace_of(shop, handler).messages == 32
        if way == "look":
            pace_of(shop, handler).looked_up(1000, 1000)
        other = acquired(shop.app._any_sync())
        other.begin(())
        assert Inbox(CONSUMER).accept(other.native, paid("m1"))
        # so that a wait without a bound ends
        late = threading.Timer(20, other.rollback)
        late.start()
        outcomes = take(shop.app, handler, *map(paid, ["m0", "m1", "m2"]))
        assert outcomes == [Outcome.PROCESSED, Outcome.IN_PROGRESS, Outcome.PROCESSED]
        assert late.is_alive()
        assert pace_of(shop, handler).messages == 1
        late.cancel()
        other.rollback()
        other.discard()
        outcomes = take(shop.app, handler, *map(paid, ["m0", "m1", "m2"]))
        assert outcomes == [Outcome.DUPLICATE, Outcome.PROCESSED, Outcome.DUPLICATE]
        assert shop.calls == ["m0", "m2", "m1"]


@pytest.mark.parametrize("way", ["plain", "kept"])
def test_a_batch_that_waits_for_an_id_holds_none_that_sorts_behind_it(
    new_database: NewDatabase, way: str
) -> None:
    """Two batches that share ids wait for each other instead of deadlocking, whatever order they came in."""
    with opened(new_database("postgresql")) as shop:
        handler = shop.handler(keep_payload="always" if way == "kept" else "unfinished")
        connections = [acquired(shop.app._any_sync()) for _ in range(2)]
        for connection in connections:
            connection.begin(())
        first, second = connections
        assert Inbox(CONSUMER).accept(first.native, paid("a"))
        outcomes: list[Outcome] = []
        thread = threading.Thread(
            target=lambda: outcomes.extend(take(shop.app, handler, paid("z"), paid("a")))
        )
        thread.start()
        waiting = (
            "SELECT count(*) FROM pg_stat_activity"
            " WHERE wait_event_type = 'Lock' AND datname = current_database()"
        )
        while thread.is_alive() and not shop.raw.value(waiting):
            pass
        assert Inbox(CONSUMER).accept(second.native, paid("z"), timeout=timedelta(seconds=1))
        first.rollback()
        second.rollback()
        thread.join(DEADLINE_S)
        assert outcomes == [Outcome.PROCESSED] * 2
        for connection in connections:
            connection.discard()


_SETTINGS = """
    SELECT current_setting('lock_timeout'), current_setting('idle_in_transaction_session_timeout')
"""


def _seen(shop: Shop, way: str, messages: int, **options: Any) -> set[tuple[str, str]]:
    seen: list[tuple[str, str]] = []
    keeps = "always" if way == "kept" else "unfinished"
    handler = shop.handler(
        lambda message, tx: seen.extend(map(tuple, execute(tx, _SETTINGS))),
        keep_payload=keeps,
        **options,
    )
    chosen = [paid(f"m{number}") for number in range(messages)]
    if way == "leased":
        leasing = Leasing(
            drive(shop.app._any_sync(), shop.app.intake.take, handler, chosen, Mode.LEASED)
        )
        settled = drive(
            shop.app._any_sync(),
            shop.app.protocol.run_leased_many,
            handler,
            leasing.rows,
            leasing.token,
        )
    else:
        settled = drive(shop.app._any_sync(), shop.app.intake.take, handler, chosen)
    assert [one.outcome for one in settled] == [Outcome.PROCESSED] * messages
    assert len(seen) == messages
    return set(seen)


@pytest.mark.parametrize("way", ["plain", "kept", "leased"])
@pytest.mark.parametrize(
    ("messages", "configured", "wait"),
    [(1, None, "0"), (1, "3s", "3s"), (2, None, "70ms"), (2, "3s", "70ms"), (2, "30ms", "30ms")],
)
def test_a_handler_has_the_waits_of_its_transaction(
    new_database: NewDatabase, way: str, messages: int, configured: str | None, wait: str
) -> None:
    """A batch gives up soon, unless somebody asked for less; nobody keeps the claim's own bound."""
    url = new_database("postgresql")
    if configured is not None:
        with opened(url) as shop:
            name = shop.raw.value("SELECT current_database()")
            shop.raw.execute(f"ALTER DATABASE {name} SET lock_timeout = '{configured}'")
            shop.raw.execute("DROP TABLE effect")
    with opened(
        url,
        limits=Limits(lock_timeout=timedelta(seconds=2)),
        lease=Lease(duration=timedelta(seconds=77)),
        batching=Batching(duration=timedelta(milliseconds=70)),
    ) as shop:
        assert _seen(shop, way, messages) == {(wait, "77s")}


@pytest.mark.parametrize("way", ["plain", "kept", "leased"])
def test_a_handler_that_may_run_longer_than_a_lease_may_idle_longer(
    new_database: NewDatabase, way: str
) -> None:
    with opened(new_database("postgresql"), lease=Lease(duration=timedelta(seconds=30))) as shop:
        ((_, idle),) = _seen(shop, way, 2, timeout=timedelta(seconds=99))
        assert idle == "99s"
