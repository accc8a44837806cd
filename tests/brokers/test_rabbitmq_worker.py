"""A whole worker on RabbitMQ: what cannot be decoded or stored, and a server that is away."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pamqp.commands import Basic

from tests.support.brokers.rabbitmq import (
    STAND_IN,
    declare,
    left,
    note,
    on_server,
    publish,
    publish_plain,
    shop_on,
)
from tests.support.databases import NewDatabase, Raw
from tests.support.servers import ROOT
from tests.support.servers.control import ThrowawayRabbitMQ
from tests.support.shop import quarantined, statuses
from tests.support.waiting import DEADLINE_S, eventually
from tests.support.workers import running, worker
from txbox.brokers.rabbitmq import RabbitMQ
from txbox.events import ConsumptionPaused

pytestmark = pytest.mark.brokers


@pytest.fixture
def queue(rabbitmq_url: str) -> Iterator[str]:
    queue_name = declare(rabbitmq_url)
    yield queue_name
    on_server(rabbitmq_url, lambda channel: channel.queue_delete(queue_name))


# -- with the worker ---------------------------------------------------------------------------------


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
@pytest.mark.parametrize("settings", [{}, {"type": "a\0b"}, {"message_id": "a\0b"}])
def test_what_no_database_keeps(
    rabbitmq_url: str, queue: str, postgresql_url: str, mode: Any, settings: dict[str, Any]
) -> None:
    properties: dict[str, Any] = {
        "message_id": "m1", "content_type": "a\0b", "correlation_id": "a\0b", "reply_to": "\ufffe",
        "headers": {"a\0b": "c\0d", "nested": {"a\0b": ["\0", 1.5]}},
    }  # fmt: skip
    publish_plain(
        rabbitmq_url, queue, (Basic.Properties(**_amqp_names({**properties, **settings})), b"1")
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
    return {("message_type" if name == "type" else name): each for name, each in properties.items()}


# -- a server that is away ---------------------------------------------------------------------------


def test_a_server_that_is_away_at_the_start_is_waited_for(
    throwaway_rabbitmq: ThrowawayRabbitMQ, sqlite_url: str
) -> None:
    declare(throwaway_rabbitmq.url, name="orders")
    publish(throwaway_rabbitmq.url, "orders", note("m1"))
    throwaway_rabbitmq.stop()
    with (
        shop_on(sqlite_url, RabbitMQ(throwaway_rabbitmq.url), "orders") as shop,
        running(worker(shop.app)) as codes,
    ):
        (paused, *_) = eventually(lambda: shop.emitted(ConsumptionPaused))
        assert "cannot be reached" in paused.reason
        assert "guest" not in paused.reason
        throwaway_rabbitmq.start()
        eventually(lambda: shop.effects() == 1)
        assert codes == []


def test_the_example(rabbitmq_url: str, new_database: NewDatabase, tmp_path: Path) -> None:
    queue = f"txbox-{secrets.token_hex(6)}"
    url = new_database("postgresql", schema=False)
    environment = {
        **os.environ, "AMQP_URL": rabbitmq_url, "PAYMENTS_QUEUE": queue,
        "TXBOX_DATABASE_URL": url, "PYTHONPATH": str(ROOT / "examples"),
    }  # fmt: skip

    def command(*words: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, *words], cwd=tmp_path, env=environment)

    example = str(ROOT / "examples" / "rabbitmq_service.py")
    assert command(example, "declare").wait(DEADLINE_S) == 0
    assert command("-m", "txbox", "init").wait(DEADLINE_S) == 0
    assert command(example, "publish", "3").wait(DEADLINE_S) == 0
    service = command("-m", "txbox", "run", "rabbitmq_service:app")
    try:
        with Raw(url) as raw:
            eventually(lambda: raw.value("SELECT count(*) FROM ledger") >= 3)
            eventually(lambda: left(rabbitmq_url, queue) == 0)
            service.terminate()
            assert service.wait(DEADLINE_S) == 0
            assert raw.rows("SELECT * FROM ledger ORDER BY 1") == [(1, 10), (2, 20), (3, 30)]
            assert statuses(raw) == {"processed": 3}
    finally:
        service.kill()
        service.wait(DEADLINE_S)
    # what the drained service had not acknowledged would be back by now
    assert left(rabbitmq_url, queue) == 0
    on_server(rabbitmq_url, lambda channel: channel.queue_delete(queue))
