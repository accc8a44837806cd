"""A source whose first messages all lack an id is paused, and names what to set (promise 1.3)."""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.shop import TOPIC, Shop, opened, statuses
from tests.support.sources import Memory
from tests.support.waiting import eventually
from tests.support.workers import running, worker
from txbox import Batching, Message
from txbox.brokers.file import File
from txbox.events import SourceRefused
from txbox.worker import Worker
from txbox.worker.health import Health


def nameless(count: int, **options: Any) -> list[Message[Any]]:
    return [
        Message(topic=TOPIC, payload=json.dumps({"n": number}).encode(), **options)
        for number in range(count)
    ]


def test_it_pauses_and_comes_back_whole_with_the_option(
    shop: Shop, caplog: pytest.LogCaptureFixture
) -> None:
    shop.handler()
    source = Memory(nameless(150), endless=True)
    source.tend_every_s = 0.02
    shop.app.consume(source)
    health = Health()
    with running(worker(shop.app, health=health)) as codes:
        eventually(lambda: shop.emitted(SourceRefused), "the pause")
        eventually(
            lambda: shop.raw.value("SELECT count(*) FROM txbox_quarantine") == 100, "quarantine"
        )
        tended = len(source.tended)
        eventually(lambda: len(source.tended) > tended + 3, "tending during the pause")
        assert any("no ids" in each for each in health.unready())
        assert health.stuck() == []
    assert codes == [0]
    assert source.settled == []
    assert source.closed
    (event,) = shop.emitted(SourceRefused)
    assert event.source == "memory"
    assert "message_id=" in event.reason
    assert "handle" in event.reason
    assert "weak_ids" not in event.reason, "there is no weak id in these"
    assert event.reason in [
        record.getMessage() for record in caplog.records if record.levelno == logging.ERROR
    ]

    with opened_again(shop) as again:
        again.handler(message_id="body.n")
        again.app.consume(
            Memory([delivery.message for delivery in source.received if delivery.message])
        )
        assert worker(again.app, once=True).run() == 0
        assert again.effects() == 150
        assert statuses(again.raw) == {"processed": 150}


def test_the_pause_is_quiet(shop: Shop) -> None:
    shop.handler()
    source = Memory(nameless(120), endless=True)
    shop.app.consume(source)
    the_worker: Worker = worker(shop.app)
    with running(the_worker):
        eventually(lambda: shop.emitted(SourceRefused))
        eventually(
            lambda: shop.raw.value("SELECT count(*) FROM txbox_quarantine") == 100, "quarantine"
        )
        (pump,) = the_worker._pumps
        rounds: list[float] = []

        def counted() -> bool:
            rounds.append(pump.silent_s)
            time.sleep(0.01)
            return len(rounds) > 60

        eventually(counted)
        # every round of the loop sets the silence back: one that spins is never silent
        assert max(rounds) > 0.2
    assert len(shop.emitted(SourceRefused)) == 1


def test_trickling_messages_count_together(database_url: str) -> None:
    with opened(database_url, batching=Batching(messages=5)) as shop:
        shop.handler()
        source = Memory(nameless(150, origin={"weak_id": "w"}), endless=True)
        shop.app.consume(source)
        with running(worker(shop.app)):
            eventually(lambda: shop.emitted(SourceRefused), "the pause")
            eventually(
                lambda: shop.raw.value("SELECT count(*) FROM txbox_quarantine") == 100, "quarantine"
            )
        assert "weak_ids=True" in shop.emitted(SourceRefused)[0].reason
        # acknowledged before the pause: in the quarantine, with their payloads
        assert 85 <= len(source.settled) < 100


def test_one_id_is_enough(shop: Shop) -> None:
    shop.handler()
    messages = nameless(150)
    messages[99] = Message(id="m99", topic=TOPIC, payload=b"{}")
    source = Memory(messages)
    shop.app.consume(source)

    assert worker(shop.app, once=True).run() == 0

    assert shop.emitted(SourceRefused) == []
    assert len(source.settled) == 150
    assert shop.calls == ["m99"]
    assert shop.raw.value("SELECT count(*) FROM txbox_quarantine") == 149


def test_an_id_for_one_of_several_consumers_is_enough(shop: Shop) -> None:
    shop.handler(consumer="audit", message_id="body.n")
    shop.handler()
    source = Memory(nameless(120))
    shop.app.consume(source)

    assert worker(shop.app, once=True).run() == 0

    assert shop.emitted(SourceRefused) == []
    assert shop.effects() == 120


def test_a_file_read_once_ends_with_status_2_and_is_read_again(
    shop: Shop, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "orders.jsonl"
    lines = [
        {"specversion": "1.0", "source": "/till", "type": "order.paid", "data": {"n": number}}
        for number in range(120)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    shop.handler()
    shop.app.consume(File(path, topic=TOPIC))

    assert worker(shop.app, once=True).run() == 2

    assert "set message_id= on" in caplog.text
    assert shop.calls == []
    with opened_again(shop) as again:
        again.handler(message_id="body.n")
        again.app.consume(File(path, topic=TOPIC))
        assert worker(again.app, once=True).run() == 0
        assert again.effects() == 120


def opened_again(shop: Shop) -> Any:
    shop.raw.execute("DROP TABLE effect")
    return opened(shop.url)
