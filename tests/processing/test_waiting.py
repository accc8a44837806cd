"""The database stops under a running worker and comes back: paused, resumed, nothing lost or counted."""

from __future__ import annotations

from pathlib import Path

from tests.support.databases import Raw, missing_server, require
from tests.support.servers.control import ThrowawayPostgres
from tests.support.shop import effects, opened, paid, statuses
from tests.support.sources import Memory, write_events
from tests.support.waiting import eventually
from tests.support.workers import Process, running, worker
from txbox import App
from txbox.brokers.base import Delivery
from txbox.events import ConsumptionPaused, ConsumptionResumed


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


def _all_processed(url: str, count: int) -> None:
    with Raw(url) as raw:
        assert statuses(raw) == {"processed": count}
        assert effects(raw) == count
        assert raw.value("SELECT max(attempts) FROM txbox_inbox") == 0
        assert raw.value("SELECT count(*) FROM txbox_attempt") == 0
