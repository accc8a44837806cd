"""A worker on RabbitMQ: outcomes, slow handlers, a killed server, killed workers, a drain."""

from __future__ import annotations

import json
import os
import secrets
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from pamqp.commands import Basic

from tests.brokers.conftest import _own
from tests.brokers.rabbitmq_support import (
    STAND_IN,
    declare,
    left,
    note,
    notes,
    on_server,
    publish,
    publish_plain,
    shop_on,
)
from tests.databases import Raw
from tests.runtime.support import eventually, running, worker
from tests.servers import ROOT
from tests.servers.control import ThrowawayPostgres, ThrowawayRabbitMQ
from tests.shop import effects, quarantined, statuses
from txbox import Message
from txbox.brokers.rabbitmq import RabbitMQ
from txbox.events import ConsumptionPaused, ConsumptionResumed, SettleFailed

pytestmark = pytest.mark.brokers


@pytest.fixture
def queue(rabbitmq_url: str) -> Iterator[str]:
    own = declare(rabbitmq_url)
    yield own
    on_server(rabbitmq_url, lambda channel: channel.queue_delete(own))


# -- with the worker ---------------------------------------------------------------------------------


def test_duplicates_have_no_second_effect(rabbitmq_url: str, queue: str, sqlite_url: str) -> None:
    publish(rabbitmq_url, queue, *notes(5), *notes(5), *notes(5))
    with shop_on(sqlite_url, RabbitMQ(rabbitmq_url), queue) as shop:
        with running(worker(shop.app)):
            eventually(lambda: shop.effects() == 5 and left(rabbitmq_url, queue) == 0)
        assert sorted(shop.calls) == [f"m{number}" for number in range(5)]
        assert statuses(shop.raw) == {"processed": 5}
    assert left(rabbitmq_url, queue) == 0


@pytest.mark.parametrize("weak", [False, True])
def test_without_an_id_it_is_quarantined(
    rabbitmq_url: str, queue: str, sqlite_url: str, weak: bool
) -> None:
    """Even by weak_ids: a delivery tag names nothing, and the same message would get another one."""
    publish_plain(rabbitmq_url, queue, (Basic.Properties(), b"1"))
    publish(rabbitmq_url, queue, note("m1"))
    with shop_on(sqlite_url, RabbitMQ(rabbitmq_url), queue, weak_ids=weak) as shop:
        with running(worker(shop.app)):
            eventually(lambda: shop.effects() == 1 and quarantined(shop.raw))
        ((reason, seen),) = quarantined(shop.raw)
        assert "has no id" in reason
        assert seen == 1
        assert shop.calls == ["m1"]
    assert left(rabbitmq_url, queue) == 0


def test_undecodable_headers_are_quarantined(
    rabbitmq_url: str, queue: str, sqlite_url: str
) -> None:
    publish(rabbitmq_url, queue, note("m1", headers={STAND_IN: 1}), note("m2"))
    with shop_on(sqlite_url, RabbitMQ(rabbitmq_url), queue) as shop:
        with running(worker(shop.app)):
            eventually(lambda: shop.effects() == 1 and quarantined(shop.raw))
        ((reason, _),) = quarantined(shop.raw)
        assert "cannot be decoded" in reason
    assert left(rabbitmq_url, queue) == 0


@pytest.mark.parametrize("mode", ["inline", "stored"])
@pytest.mark.parametrize("own", [{}, {"type": "a\0b"}, {"message_id": "a\0b"}])
def test_what_no_database_keeps(
    rabbitmq_url: str, queue: str, postgresql_url: str, mode: Any, own: dict[str, Any]
) -> None:
    properties: dict[str, Any] = {
        "message_id": "m1", "content_type": "a\0b", "correlation_id": "a\0b", "reply_to": "\ufffe",
        "headers": {"a\0b": "c\0d", "nested": {"a\0b": ["\0", 1.5]}},
    }  # fmt: skip
    publish_plain(
        rabbitmq_url, queue, (Basic.Properties(**_amqp_names({**properties, **own})), b"1")
    )
    publish(rabbitmq_url, queue, note("m2"))
    with (
        shop_on(postgresql_url, RabbitMQ(rabbitmq_url), queue, mode=mode) as shop,
        running(worker(shop.app)) as codes,
    ):
        eventually(lambda: shop.effects("m2") == 1)
        eventually(lambda: shop.effects("m1") == 1 or quarantined(shop.raw))
        assert codes == []
    assert left(rabbitmq_url, queue) == 0


def _amqp_names(properties: dict[str, Any]) -> dict[str, Any]:
    return {("message_type" if name == "type" else name): own for name, own in properties.items()}


def test_failures_are_acknowledged_and_retried_from_the_table(
    rabbitmq_url: str, queue: str, sqlite_url: str
) -> None:
    publish(rabbitmq_url, queue, *notes(3))
    tries: dict[object, int] = {}

    def fail_twice(message: Message[Any]) -> None:
        tries[message.id] = tries.get(message.id, 0) + 1
        if message.id == "m1" and tries["m1"] < 3:
            raise ValueError("not now")

    with shop_on(sqlite_url, RabbitMQ(rabbitmq_url), queue, body=fail_twice) as shop:
        with running(worker(shop.app)):
            eventually(lambda: shop.effects() == 3)
        assert tries == {"m0": 1, "m1": 3, "m2": 1}
        assert not shop.emitted(SettleFailed)
    assert left(rabbitmq_url, queue) == 0


def test_a_drain_leaves_the_rest_in_the_queue(
    rabbitmq_url: str, queue: str, sqlite_url: str
) -> None:
    publish(rabbitmq_url, queue, *notes(10))
    started, go = threading.Event(), threading.Event()

    def hold(message: Message[Any]) -> None:
        started.set()
        assert go.wait(30)

    source = RabbitMQ(rabbitmq_url)
    with shop_on(sqlite_url, source, queue, body=hold) as shop:
        draining = worker(shop.app)
        with running(draining) as codes:
            assert started.wait(30)
            draining.stop()
            go.set()
            eventually(lambda: codes)
        assert codes == [0]
        assert shop.effects() == 1
        assert left(rabbitmq_url, queue) == 9
        with running(worker(shop.app)):
            eventually(lambda: shop.effects() == 10)
        assert sorted(shop.calls) == sorted(f"m{number}" for number in range(10))
    assert left(rabbitmq_url, queue) == 0


def test_while_the_database_is_away_nothing_is_rejected_or_counted(
    rabbitmq_url: str,
) -> None:
    queue = declare(rabbitmq_url, "quorum")
    with ThrowawayPostgres() as server:
        source = RabbitMQ(rabbitmq_url)
        with shop_on(server.url, source, queue) as shop, running(worker(shop.app)) as codes:
            publish(rabbitmq_url, queue, *notes(3))
            eventually(lambda: shop.effects() == 3)
            shop.raw.close()
            link = source._link
            server.stop(immediate=True)
            publish(rabbitmq_url, queue, *(note(f"n{number}") for number in range(5)))
            eventually(lambda: shop.emitted(ConsumptionPaused))
            server.start()
            with Raw(server.url) as raw:
                eventually(lambda: effects(raw) == 8)
                assert statuses(raw) == {"processed": 8}
                assert raw.value("SELECT max(attempts) FROM txbox_inbox") == 0
            # the same channel: nothing was given back, so nothing was delivered twice
            assert source._link is link
            assert codes == []
    assert left(rabbitmq_url, queue) == 0
    on_server(rabbitmq_url, lambda channel: channel.queue_delete(queue))


class _Impatient(ThrowawayRabbitMQ):
    """Takes back what is not acknowledged within a second."""

    def environment(self) -> Mapping[str, str]:
        known, name = super().environment(), "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS"
        quick = "-rabbit consumer_timeout 1000 -rabbit channel_tick_interval 500"
        return {**known, name: f"{known[name]} {quick}"}


@pytest.fixture
def impatient() -> Iterator[ThrowawayRabbitMQ]:
    yield from _own("rabbitmq", _Impatient())


@pytest.mark.parametrize("kind", ["classic", "quorum"])
def test_a_handler_slower_than_the_consumer_timeout_runs_once(
    impatient: ThrowawayRabbitMQ, sqlite_url: str, kind: str
) -> None:
    declare(impatient.url, kind, "orders")
    publish(impatient.url, "orders", note("m1"))
    source, go = RabbitMQ(impatient.url), threading.Event()
    with shop_on(sqlite_url, source, "orders", body=lambda _: go.wait(30) and None) as shop:
        with running(worker(shop.app)) as codes:
            eventually(lambda: shop.calls)
            link = source._link
            # the server closes the channel under the delivery, and delivers it again
            eventually(lambda: source._link not in {link, None})
            go.set()
            eventually(lambda: shop.effects() == 1)
            publish(impatient.url, "orders", note("m2"))
            eventually(lambda: shop.effects() == 2)
            assert codes == []
        assert shop.calls == ["m1", "m2"]
    assert left(impatient.url, "orders") == 0


# -- a server that is away ---------------------------------------------------------------------------


def test_a_killed_server_comes_back_mid_stream(
    own_rabbitmq: ThrowawayRabbitMQ, sqlite_url: str
) -> None:
    declare(own_rabbitmq.url, "quorum", "orders")
    own_rabbitmq.wait_until_kept("orders")
    publish(own_rabbitmq.url, "orders", *notes(40))
    half, go = threading.Event(), threading.Event()

    def wait_at_half(message: Message[Any]) -> None:
        if message.id == "m20":
            half.set()
            assert go.wait(60)

    source = RabbitMQ(own_rabbitmq.url)
    with shop_on(sqlite_url, source, "orders", body=wait_at_half) as shop:
        with running(worker(shop.app)) as codes:
            assert half.wait(30)
            own_rabbitmq.stop(immediate=True)
            go.set()
            eventually(lambda: shop.emitted(ConsumptionPaused))
            own_rabbitmq.start()
            eventually(lambda: shop.emitted(ConsumptionResumed))
            eventually(lambda: shop.effects() == 40)
            publish(own_rabbitmq.url, "orders", note("late"))
            eventually(lambda: shop.effects() == 41)
            assert codes == []
        assert statuses(shop.raw) == {"processed": 41}
    assert left(own_rabbitmq.url, "orders") == 0


def test_a_server_that_is_away_at_the_start_is_waited_for(
    own_rabbitmq: ThrowawayRabbitMQ, sqlite_url: str
) -> None:
    declare(own_rabbitmq.url, name="orders")
    publish(own_rabbitmq.url, "orders", note("m1"))
    own_rabbitmq.stop()
    with (
        shop_on(sqlite_url, RabbitMQ(own_rabbitmq.url), "orders") as shop,
        running(worker(shop.app)) as codes,
    ):
        (paused, *_) = eventually(lambda: shop.emitted(ConsumptionPaused))
        assert "cannot be reached" in paused.reason
        assert "guest" not in paused.reason
        own_rabbitmq.start()
        eventually(lambda: shop.effects() == 1)
        assert codes == []


POINTS = [
    "received", "before:handler", "after:handler", "before:commit", "after:commit", "before:ack", "after:ack",
]  # fmt: skip


@pytest.mark.parametrize("point", POINTS)
def test_a_worker_killed_at(rabbitmq_url: str, postgresql_url: str, point: str) -> None:
    queue = declare(rabbitmq_url, "quorum")
    # each alone, so that every point is passed more than twice
    with shop_on(postgresql_url, RabbitMQ(rabbitmq_url), queue) as shop:
        plan = {"url": postgresql_url, "broker": rabbitmq_url, "queue": queue, "point": point}
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.brokers.rabbitmq_support", json.dumps(plan)], cwd=ROOT
        )
        try:
            for number in range(10):
                publish(rabbitmq_url, queue, note(f"m{number}"))
            assert process.wait(30) == -signal.SIGKILL
        finally:
            process.kill()
            process.wait(30)
        with running(worker(shop.app, maintenance=True)):
            eventually(lambda: shop.effects() == 10)
            eventually(lambda: left(rabbitmq_url, queue) == 0)
        assert statuses(shop.raw) == {"processed": 10}
        assert {shop.effects(f"m{number}") for number in range(10)} == {1}
    # what the drained worker had not acknowledged would be back by now
    assert left(rabbitmq_url, queue) == 0
    on_server(rabbitmq_url, lambda channel: channel.queue_delete(queue))


def test_the_example(rabbitmq_url: str, tmp_path: Path) -> None:
    queue = f"txbox-{secrets.token_hex(6)}"
    with closing(sqlite3.connect(tmp_path / "rabbitmq.db")) as database:
        database.execute("CREATE TABLE ledger (payment INTEGER, amount INTEGER)")
    environment = {
        **os.environ, "AMQP_URL": rabbitmq_url, "PAYMENTS_QUEUE": queue,
        "PYTHONPATH": str(ROOT / "examples"),
    }  # fmt: skip

    def command(*own: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, *own], cwd=tmp_path, env=environment)

    example = str(ROOT / "examples" / "rabbitmq_service.py")
    assert command(example, "declare").wait(30) == 0
    assert command("-m", "txbox", "init", "--database", "sqlite:///rabbitmq.db").wait(30) == 0
    assert command(example, "publish", "3").wait(30) == 0
    service = command("-m", "txbox", "run", "rabbitmq_service:app")
    try:
        with Raw(f"sqlite:///{tmp_path / 'rabbitmq.db'}") as raw:
            eventually(lambda: raw.value("SELECT count(*) FROM ledger") >= 3)
            eventually(lambda: left(rabbitmq_url, queue) == 0)
            service.terminate()
            assert service.wait(30) == 0
            assert raw.rows("SELECT * FROM ledger ORDER BY 1") == [(1, 10), (2, 20), (3, 30)]
            assert statuses(raw) == {"processed": 3}
    finally:
        service.kill()
        service.wait(30)
    # what the drained service had not acknowledged would be back by now
    assert left(rabbitmq_url, queue) == 0
    on_server(rabbitmq_url, lambda channel: channel.queue_delete(queue))
