"""The database stops under a running worker and comes back: paused, resumed, nothing lost or counted."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from tests.support.databases import Raw, missing_server, require
from tests.support.servers.control import ThrowawayPostgres
from tests.support.shop import effects, opened, paid, statuses
from tests.support.sources import Memory, write_events
from tests.support.waiting import eventually
from tests.support.workers import Process, running, worker
from txbox import App, Limits
from txbox.brokers.base import Delivery
from txbox.errors import StoreUnavailable
from txbox.events import ConsumptionPaused, ConsumptionResumed, Event, Events
from txbox.processing.waiting import Waiting
from txbox.session import Session, blocking


def test_database_unavailable_pauses_and_resumes(tmp_path: Path) -> None:
    require(missing_server("postgresql"))
    with ThrowawayPostgres() as server:
        with App(server.url) as app:
            app.init()
        with opened(server.url) as shop:
            shop.handler(concurrency=2)
            source = Memory([paid(f"m{number}") for number in range(5)], endless=True)
            shop.app.consume(source)
            with running(worker(shop.app, maintenance=True)) as codes:
                eventually(lambda: len(source.settled) == 5)
                shop.raw.close()
                server.stop(immediate=True)
                source.waiting = [Delivery(paid(f"n{number}"), "orders") for number in range(5)]
                eventually(lambda: shop.emitted(ConsumptionPaused))
                assert len(source.settled) == 5
                assert codes == []
                server.start()
                eventually(lambda: len(source.settled) == 10)
                eventually(lambda: shop.emitted(ConsumptionResumed))
            assert codes == [0]
        _all_processed(server.url, 10)


def test_a_drain_ends_while_the_database_is_away(tmp_path: Path) -> None:
    require(missing_server("postgresql"))
    path = tmp_path / "orders.jsonl"
    write_events(path, range(3))
    with ThrowawayPostgres() as server:
        with App(server.url) as app:
            app.init()
        with opened(server.url) as shop:
            shop.raw.close()
            with Process(url=server.url, file=str(path), follow=True) as process:
                process.says("handled", 3)
                server.stop(immediate=True)
                process.says("paused")
                process.process.terminate()
                assert process.ended() == 0
        server.start()
        with Process(url=server.url, file=str(path), once=True) as process:
            assert process.ended() == 0
        _all_processed(server.url, 3)


def test_a_try_from_before_the_database_answered_tells_of_no_new_trouble() -> None:
    seen: list[Event] = []
    waiting = Waiting(Limits(), Events([seen.append]))
    db = cast("Session", Answerless())
    begun = iter([True])

    async def overtaken(_: Session) -> None:
        if next(begun, False):
            await waiting.with_retries(db, Failing())
            raise StoreUnavailable("away")

    blocking(waiting.with_retries(db, overtaken))
    kinds = [type(event) for event in seen]
    assert kinds == [ConsumptionPaused, ConsumptionResumed, ConsumptionResumed]
    blocking(waiting.with_retries(db, away_again := Failing()))
    assert away_again.calls == 2
    assert [type(event) for event in seen[3:]] == [ConsumptionPaused, ConsumptionResumed]


class Answerless:
    """A session without a connection."""

    def discard(self) -> None: ...

    async def wait(self, seconds: float, freed: Any = None) -> None: ...


class Failing:
    """Raises once, then answers."""

    calls = 0

    async def __call__(self, _: Session) -> None:
        self.calls += 1
        if self.calls == 1:
            raise StoreUnavailable("away")


def _all_processed(url: str, count: int) -> None:
    with Raw(url) as raw:
        assert statuses(raw) == {"processed": count}
        assert effects(raw) == count
        assert raw.value("SELECT max(attempts) FROM txbox_inbox") == 0
        assert raw.value("SELECT count(*) FROM txbox_attempt") == 0
