"""The FastStream example on a real RabbitMQ: nothing is acknowledged before it is in the database."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import aio_pika
import psycopg
import pytest
from pamqp.commands import Basic

from tests.examples.programs import rows, started, tables
from tests.support.brokers.rabbitmq import declare, left, on_server, publish, publish_plain
from tests.support.waiting import DEADLINE_S, eventually

pytestmark = pytest.mark.brokers

BOOKED = "SELECT payment, amount FROM ledger ORDER BY 1"


@pytest.fixture
def queue(rabbitmq_url: str) -> Iterator[str]:
    name = declare(rabbitmq_url)
    yield name
    on_server(rabbitmq_url, lambda channel: channel.queue_delete(name))


@pytest.fixture
def url(postgresql_url: str) -> str:
    return tables(postgresql_url, "CREATE TABLE ledger (payment INTEGER, amount INTEGER)")


@pytest.fixture
def env(rabbitmq_url: str, queue: str, url: str) -> dict[str, str]:
    return {"AMQP_URL": rabbitmq_url, "PAYMENTS_QUEUE": queue, "TXBOX_DATABASE_URL": url}


def _payment(number: int, body: bytes | None = None) -> aio_pika.Message:
    return aio_pika.Message(
        b'{"id": %d, "amount": 5}' % number if body is None else body,
        message_id=f"payment-{number}",
        type="payment.made",
        content_type="application/json",
        headers={"attempt": 1, "region": "eu"},
        delivery_mode=aio_pika.DeliveryMode.PERSISTENT,
    )


def _statuses(url: str) -> dict[str, str]:
    return dict(rows(url, "SELECT message_id, status FROM txbox_inbox"))


def test_each_payment_is_booked_once(
    rabbitmq_url: str, queue: str, env: dict[str, str], url: str, tmp_path: Path
) -> None:
    twice = [_payment(1), _payment(1), _payment(2, b'{"id": 2}'), _payment(3, b"{no json")]
    publish(rabbitmq_url, queue, *twice)
    nameless = Basic.Properties(message_type="payment.made", content_type="application/json")
    publish_plain(rabbitmq_url, queue, (nameless, b'{"id": 4, "amount": 5}'))
    ends = {"payment-1": "processed", "payment-2": "dead", "payment-3": "dead"}
    with started(tmp_path, "faststream_rabbitmq", env=env) as process:
        eventually(lambda: _statuses(url) == ends)
        eventually(lambda: rows(url, "SELECT count(*) FROM txbox_quarantine") == [(1,)])
        process.terminate()
        assert process.wait(DEADLINE_S) == 0
    assert rows(url, BOOKED) == [(1, 5)]
    # what it had not acknowledged would be back by now
    assert left(rabbitmq_url, queue) == 0


def test_nothing_is_acknowledged_before_the_commit(
    rabbitmq_url: str, queue: str, env: dict[str, str], url: str, tmp_path: Path
) -> None:
    with psycopg.connect(url) as other:
        other.execute("LOCK TABLE ledger")  # nobody else can book
        publish(rabbitmq_url, queue, _payment(1))
        with started(tmp_path, "faststream_rabbitmq", env=env) as process:
            eventually(lambda: left(rabbitmq_url, queue) == 0)
            process.kill()
            process.wait(DEADLINE_S)
        eventually(lambda: left(rabbitmq_url, queue) == 1)
        other.rollback()
    with started(tmp_path, "faststream_rabbitmq", env=env) as process:
        eventually(lambda: rows(url, BOOKED) == [(1, 5)])
        process.terminate()
        assert process.wait(DEADLINE_S) == 0
