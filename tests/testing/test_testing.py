"""deliver, drain, race and the crash points, with txbox outermost, on every database."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.support.connections import KINDS, Kind, do
from tests.support.databases import Raw, representatives
from tests.support.ledger import TABLE, book, lines, message, service
from tests.support.waiting import DEADLINE_S
from txbox import App, ConfigurationError, Message, Outcome, session
from txbox.events import Event, MessageDead
from txbox.testing import (
    Crashed,
    another_process,
    crash_at,
    crash_everywhere,
    crash_everywhere_async,
    crash_points,
    crash_points_async,
    deliver,
    deliver_async,
    drain,
    drain_async,
    install_from_environment,
    meanwhile,
    race,
    race_async,
)


@pytest.fixture
def db(database_url: str) -> Iterator[Raw]:
    with Raw(database_url) as view:
        view.execute(TABLE)
        yield view


@pytest.fixture
def app(database_url: str, db: Raw) -> Iterator[App]:
    with service(App(database_url)) as served:
        yield served


def test_deliver_runs_the_real_protocol(app: App, db: Raw) -> None:
    assert deliver(app, message("a")) is Outcome.PROCESSED
    assert deliver(app, message("a")) is Outcome.DUPLICATE
    assert deliver(app, message("a", b"other")) is Outcome.QUARANTINED
    assert lines(db) == [("a", 1)]


def test_drain_waits_for_dates_unless_told_otherwise(app: App, db: Raw) -> None:
    assert deliver(app, message("fail")) is Outcome.FAILED
    # the drawn delay may be next to nothing
    db.execute("UPDATE txbox_inbox SET next_attempt_at = '2999-01-01 00:00:00.000'")

    assert drain(app) == []
    assert drain(app, ignore_dates=True) == [Outcome.PROCESSED]
    assert lines(db) == [("fail", 2)]


def test_drain_ends_with_a_dead_letter(app: App, db: Raw) -> None:
    deliver(app, message("broken"))

    assert drain(app, ignore_dates=True) == [Outcome.FAILED, Outcome.DEAD]
    assert lines(db) == []


def test_drain_gives_up_what_kills_its_process_as_maintenance_does(app: App, db: Raw) -> None:
    """With the dead letter, and the events."""
    seen: list[Event] = []
    app.events.observers.append(seen.append)

    @app.handler("killer", consumer="killed", mode="stored", dead_letter_topic="graves")
    def handle(message: Message[Any], tx: Any) -> None:
        pass

    app.handler("graves", consumer="mourner")(lambda message, tx: None)
    app.send(Message(id="k", topic="killer", payload=b"{}"))
    for _ in range(app.lease.max_starts):
        with pytest.raises(Crashed), crash_at("before:handler"):
            drain(app, ignore_dates=True)
    assert drain(app, ignore_dates=True) == []
    assert db.value("SELECT status FROM txbox_inbox WHERE message_id = 'k'") == "dead"
    assert db.value("SELECT count(*) FROM txbox_outbox WHERE topic = 'graves'") == 1
    assert [event.message_id for event in seen if isinstance(event, MessageDead)] == ["k"]


def test_drain_takes_over_a_lease_that_a_crash_left(app: App, db: Raw) -> None:
    app.send(message("a"))
    with pytest.raises(Crashed), crash_at("before:handler"):
        drain(app)

    assert drain(app) == []
    assert drain(app, ignore_dates=True) == [Outcome.PROCESSED]
    assert lines(db) == [("a", 1)]


def test_race_has_one_winner(app: App, db: Raw) -> None:
    outcomes = race(app, message("a"), 6)

    assert sorted(outcomes) == sorted([Outcome.PROCESSED] + 5 * [Outcome.DUPLICATE])
    assert lines(db) == [("a", 1)]


def test_every_crash_point_of_a_delivery_is_survived(app: App, db: Raw) -> None:
    points = crash_points(app, message("first"))
    assert {"before:begin", "before:handler", "after:handler", "before:close", "after:commit"} <= {
        *points
    }

    for number, point in enumerate(points):
        nth = points[: number + 1].count(point)
        sent = message(f"crash-{number:02}")
        with pytest.raises(Crashed), crash_at(point, nth):
            deliver(app, sent)
        assert deliver(app, sent) in (Outcome.PROCESSED, Outcome.DUPLICATE)

    assert len(lines(db)) == 1 + len(points)
    assert len({line[0] for line in lines(db)}) == 1 + len(points)


@pytest.mark.parametrize(("point", "effects"), [("before:commit", 0), ("after:commit", 1)])
def test_the_first_commit_of_an_app_is_that_of_its_message(
    app: App, db: Raw, point: str, effects: int
) -> None:
    """Not that of the look at the tables: a test that crashes there would prove nothing."""
    handled: list[str] = []

    @app.handler("seen", consumer="seen")
    def see(taken: Message[Any], tx: Any) -> None:
        book(tx, taken)
        handled.append(str(taken.id))

    with pytest.raises(Crashed), crash_at(point):
        deliver(app, Message(id="a", topic="seen", payload=b""))

    assert handled == ["a"]
    assert len(lines(db)) == effects


def test_crash_at_a_point_that_is_not_passed_fails_the_test(app: App) -> None:
    with pytest.raises(AssertionError, match="before:nothing"), crash_at("before:nothing"):
        deliver(app, message("a"))
    with pytest.raises(ConfigurationError, match="nth is 0"), crash_at("before:begin", 0):
        deliver(app, message("b"))
    assert session.crash_point is None


def test_meanwhile_overtakes_without_threads(app: App, db: Raw) -> None:
    deliver(app, message("before"))
    other = another_process(app)
    answers: list[Outcome] = []

    with meanwhile("before:begin", lambda: answers.append(deliver(other, message("a")))):
        assert deliver(app, message("a")) is Outcome.DUPLICATE

    assert answers == [Outcome.PROCESSED]
    assert lines(db) == [("a", 1), ("before", 1)]


@pytest.mark.parametrize(
    ("point", "nth", "effects"),
    [("before:handler", 1, 0), ("before:commit", 1, 0), ("after:commit", 1, 1)],
)
def test_a_worker_kills_itself_where_the_environment_says(
    database_url: str, db: Raw, point: str, nth: int, effects: int
) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "tests.support.ledger_worker", database_url],
        env={**os.environ, "TXBOX_CRASH_AT": point, "TXBOX_CRASH_NTH": str(nth)},
        check=False,
        timeout=DEADLINE_S,
    )

    assert ended.returncode == -signal.SIGKILL
    assert len(lines(db)) == effects


def test_the_environment_must_name_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TXBOX_CRASH_AT", raising=False)
    install_from_environment()
    assert session.crash_point is None
    monkeypatch.setenv("TXBOX_CRASH_AT", "before:begin")
    monkeypatch.setenv("TXBOX_CRASH_NTH", "first")
    with pytest.raises(ConfigurationError, match="TXBOX_CRASH_NTH"):
        install_from_environment()


@pytest.mark.parametrize("name", [database.name for database in representatives()])
def test_what_drain_leaves_to_its_twin_is_due(
    new_database: Callable[[str], str], name: str
) -> None:
    """A consumer may have handlers of both kinds."""

    async def work() -> None:
        async with App(new_database(name)) as app:

            @app.handler("letters", consumer="office")
            async def write(message: Message[Any], tx: Any) -> None:
                pass

            @app.handler("parcels", consumer="office")
            def pack(message: Message[Any], tx: Any) -> None:
                pass

            for topic in ("letters", "parcels"):
                app.send(Message(id=topic, topic=topic, payload=b"{}"))
            assert drain(app) == [Outcome.PROCESSED]
            assert await drain_async(app) == [Outcome.PROCESSED]

    asyncio.run(work())


@pytest.mark.parametrize("name", [database.name for database in representatives()])
def test_race_and_drain_have_async_twins(new_database: Callable[[str], str], name: str) -> None:
    url = new_database(name)
    runs: list[object] = []

    async def work() -> None:
        async with App(url) as app:

            @app.handler("orders", consumer="billing")
            async def take(taken: Message[Any], tx: Any) -> None:
                runs.append(taken.id)

            outcomes = await race_async(app, message("a"), 4)
            assert sorted(outcomes) == sorted([Outcome.PROCESSED] + 3 * [Outcome.DUPLICATE])
            await app.send_async(message("b"))
            assert await drain_async(app) == [Outcome.PROCESSED]

    asyncio.run(work())
    assert runs == ["a", "b"]


ON_A_LOOP = [
    kind
    for kind in KINDS
    if kind.name in ("psycopg-async-url", "asyncpg-pool", "aiosqlite", "async-engine-asyncmy")
]


@pytest.mark.parametrize("kind", ON_A_LOOP, ids=str)
def test_async_handlers_are_crashed_everywhere(
    new_database: Callable[[str], str], kind: Kind
) -> None:
    url = new_database(kind.product)
    with Raw(url) as view:
        view.execute("CREATE TABLE effect (id integer)")

    async def work() -> dict[str, Outcome]:
        async with kind.source(url) as target, App(target) as app:

            @app.handler("orders", consumer="billing")
            async def take(taken: Message[Any], tx: Any) -> None:
                done = do(kind.family, tx, "INSERT INTO effect (id) VALUES (1)")
                await done

            points = await crash_points_async(app, message("probe"))
            outcomes = await crash_everywhere_async(app, message, consumer="billing")
            assert set(outcomes) == set(points)
            return outcomes

    outcomes = asyncio.run(work())
    assert (outcomes["after:handler"], outcomes["after:commit"]) == (
        Outcome.PROCESSED,
        Outcome.DUPLICATE,
    )
    with Raw(url) as view:
        assert view.value("SELECT count(*) FROM effect") == len(outcomes) + 2


def test_async_deliveries_overtake_in_a_loop_of_their_own(
    new_database: Callable[[str], str],
) -> None:
    outcomes: list[Outcome] = []

    async def work() -> None:
        async with App(new_database("sqlite")) as app:

            @app.handler("orders", consumer="billing")
            async def take(taken: Message[Any], tx: Any) -> None:
                pass

            await deliver_async(app, message("first"))
            other = another_process(app)

            async def overtake() -> None:
                outcomes.append(await deliver_async(other, message("a")))

            with meanwhile("before:begin", overtake):
                assert await deliver_async(app, message("a")) is Outcome.DUPLICATE

    asyncio.run(work())
    assert outcomes == [Outcome.PROCESSED]


@pytest.mark.parametrize("verb", [deliver, race, crash_points])
def test_a_sync_verb_names_its_twin(
    new_database: Callable[[str], str], verb: Callable[..., object]
) -> None:
    with App(new_database("sqlite")) as app:

        @app.handler("orders", consumer="billing")
        async def take(taken: Message[Any], tx: Any) -> None:
            pass

        with pytest.raises(ConfigurationError, match=f"await {verb.__name__}_async"):
            verb(app, message("a"))
        with pytest.raises(ConfigurationError, match="await crash_points_async"):
            crash_everywhere(app, message)
        with pytest.raises(ConfigurationError, match="await drain_async"):
            drain(app)
