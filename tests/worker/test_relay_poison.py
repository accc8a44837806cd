"""A thousand keys and ten thousand, one of a hundred of which has a message that no broker accepts."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import aio_pika
import pytest

from tests.support.brokers.rabbitmq import declare, on_server
from tests.support.databases import NewDatabase, Raw
from tests.support.waiting import room
from tests.worker.test_relay import relay_of
from txbox import App, Outbox, Outgoing, RelayPolicy, RetryPolicy
from txbox.brokers.rabbitmq import RabbitMQ
from txbox.events import Event, OutgoingDead, OutgoingFailed, RelayPaused

pytestmark = pytest.mark.brokers
Connect = Callable[[str], AbstractContextManager[Any]]

PER_KEY = 2
#: Of an idle machine: four times what it takes.
WITHIN_S = 60.0


@pytest.fixture
def queue(rabbitmq_url: str) -> Iterator[str]:
    name = declare(rabbitmq_url)
    yield name
    on_server(rabbitmq_url, lambda channel: channel.queue_delete(name))


@pytest.mark.parametrize(
    "keys", [1_000, pytest.param(10_000, marks=pytest.mark.slow)], ids=lambda keys: f"{keys}-keys"
)
def test_keys_with_poison_among_them_keep_their_order(
    rabbitmq_url: str,
    queue: str,
    new_database: NewDatabase,
    raw: Callable[[str], Raw],
    plain_connection: Connect,
    keys: int,
) -> None:
    bad = keys // 200  # of each kind: together 1 % of the keys
    url, nowhere, events = new_database("postgresql"), f"no-{secrets.token_hex(6)}", list[Event]()
    # number 0 of every key, then number 1; the poison is a number 0
    messages: list[Outgoing] = []
    for number in range(PER_KEY):
        for key in range(keys):
            unroutable = key % 100 == 7 and key < 100 * bad
            refused = key % 100 == 57 and key < 100 * bad and number == 0
            messages.append(
                Outgoing(
                    topic=nowhere if unroutable else queue,
                    body=number,
                    key=str(key),
                    # no server takes a header of this size
                    headers={"h": "x" * 140_000} if refused else {},
                )
            )
    for start in range(0, len(messages), 1000):
        with plain_connection(url) as tx:
            Outbox().stage_many(tx, messages[start : start + 1000])
            tx.commit()

    policy = RelayPolicy(
        # on a busy machine the broker confirms later, which is no message's fault
        lease=timedelta(minutes=5),
        confirm_within=timedelta(minutes=2),
        retry=RetryPolicy(base=timedelta(seconds=0.2), cap=timedelta(seconds=1), max_attempts=1000),
    )
    good = keys * PER_KEY - bad * PER_KEY - bad
    began = time.monotonic()
    with App(url, relaying=policy, observers=[events.append]) as app:
        app.publish(RabbitMQ(rabbitmq_url))
        relay = relay_of(app)
        while time.monotonic() < began + room(WITHIN_S):
            relay.turn()
            if _open(raw(url), queue) == 0:
                break
        took_s = time.monotonic() - began
        assert _open(raw(url), queue) == 0, f"{took_s:.0f} s were not enough"

        # what is too large is dead, and its key has gone on
        dead = [event for event in events if isinstance(event, OutgoingDead)]
        assert len(dead) == bad
        status = "SELECT key, attempts FROM txbox_outbox WHERE status = 'dead' ORDER BY number"
        assert [tuple(row) for row in raw(url).rows(status)] == [
            (str(100 * number + 57), 1) for number in range(bad)
        ]
        # a topic that no queue takes pauses alone, and costs no attempt
        paused = [event for event in events if isinstance(event, RelayPaused)]
        assert paused
        assert {event.topic for event in paused} == {nowhere}
        assert not any(isinstance(event, OutgoingFailed) for event in events)
        waiting = raw(url).rows("SELECT attempts FROM txbox_outbox WHERE status = 'pending'")
        assert [attempts for (attempts,) in waiting] == [0] * (bad * PER_KEY)

        sent = asyncio.run(_read(rabbitmq_url, queue, good))
        assert len(set(sent)) == good
        by_key: dict[str, list[int]] = defaultdict(list)
        for own_key, body in dict.fromkeys(sent):
            by_key[own_key].append(body)
        assert all(numbers == sorted(numbers) for numbers in by_key.values())
        for number in range(bad):
            assert by_key[str(100 * number + 57)] == [1]

        # the queue is there at last
        declare(rabbitmq_url, name=nowhere)
        try:
            while relay.turn() or _open(raw(url), nowhere):
                assert time.monotonic() < began + 2 * room(WITHIN_S)
            late = asyncio.run(_read(rabbitmq_url, nowhere, bad * PER_KEY))
        finally:
            on_server(rabbitmq_url, lambda channel: channel.queue_delete(nowhere))
    by_late: dict[str, list[int]] = defaultdict(list)
    for own_key, body in dict.fromkeys(late):
        by_late[own_key].append(body)
    assert list(by_late.values()) == [[0, 1]] * bad
    print(f"{len(messages)} rows, {took_s:.1f} s")


def _open(raw: Raw, topic: str) -> int:
    query = "SELECT count(*) FROM txbox_outbox WHERE status = 'pending' AND topic = ?"
    return int(raw.value(query, (topic,)))


async def _read(url: str, queue: str, at_least: int) -> list[tuple[str, int]]:
    """Key and number of every message of a queue, in their order."""
    found: list[tuple[str, int]] = []
    async with await aio_pika.connect(url) as connection:
        channel = await connection.channel()
        await channel.set_qos(1000)
        declared = await channel.declare_queue(queue, passive=True)
        count = declared.declaration_result.message_count or 0
        assert count >= at_least
        async with declared.iterator(no_ack=True) as messages:
            async for message in messages:
                found.append((str(message.headers["key"]), int(message.body)))
                if len(found) == count:
                    break
    return found
