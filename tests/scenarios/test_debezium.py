"""The outbox through Debezium on Kafka Connect, as the page configures it: the relay's ids, keys and headers."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import psycopg
import pytest

from tests.docs.pages import page
from tests.support.brokers.kafka import new_group, new_topic, opened, take
from tests.support.databases import Raw
from tests.support.servers import connect, java
from tests.support.servers.connect import ConnectServer
from tests.support.servers.control import ThrowawayPostgres
from tests.support.servers.process import throwaway_name
from tests.support.waiting import eventually
from tests.worker.test_relay import drained, relay_of
from txbox import App, Headers, Message, Outbox, Outcome, Outgoing
from txbox.brokers.kafka import Kafka
from txbox.errors import StoreError
from txbox.identity import message_id
from txbox.maintenance import Task, run_once

pytestmark = [pytest.mark.slow, pytest.mark.brokers]

_PAGE = page("docs/howto/debezium.md")
_OUTBOX = Outbox(route="debezium")


def _blocks(language: str) -> list[str]:
    return [block.text for block in _PAGE.blocks() if block.language == language]


def _settings(number: int) -> dict[str, str]:
    lines = _blocks("ini")[number].splitlines()
    return {name: value for name, _, value in (line.partition("=") for line in lines)}


@pytest.fixture
def server() -> Iterator[ThrowawayPostgres]:
    with ThrowawayPostgres() as postgres:
        with Raw(postgres.url) as admin:
            admin.execute("ALTER SYSTEM SET wal_level = logical")
        postgres.stop()
        postgres.start()
        with App(postgres.url) as app:
            app.init()
        with psycopg.connect(postgres.url) as admin:
            admin.execute(_blocks("sql")[0].encode())
        yield postgres


@pytest.fixture
def debezium(server: ThrowawayPostgres, kafka_bootstrap: str) -> Iterator[ConnectServer]:
    java.fetch(connect.POM)
    worker = _settings(0) | {"bootstrap.servers": kafka_bootstrap}
    login = urlsplit(server.url)
    connector = _settings(1) | {
        "database.port": str(login.port),
        "database.user": str(login.username),
        "database.password": str(login.password),
        "database.dbname": login.path.removeprefix("/"),
        "topic.creation.default.partitions": "1",
        "topic.creation.default.replication.factor": "1",
    }
    started = ConnectServer(throwaway_name("connect", 1), worker, connector)
    try:
        started.start()
        with Raw(server.url) as raw:
            eventually(lambda: raw.rows("SELECT 1 FROM pg_replication_slots WHERE active"))
        yield started
    finally:
        started.remove()


def _id(message: Message[Any] | None) -> str:
    assert message is not None
    return str(message_id(message))


def _on_the_wire(message: Message[Any]) -> list[tuple[str, bytes | None]]:
    return [
        (name, value.encode() if isinstance(value, str) else value)
        for name, value in message.headers
    ]


def _stage(url: str, topic: str, bodies: range, key: str | None = None) -> list[str]:
    with psycopg.connect(url) as tx:
        return _OUTBOX.stage_many(tx, [Outgoing(topic, {"n": n}, key=key) for n in bodies])


def _arrived(bootstrap: str, topic: str, ids: set[str]) -> list[Message[Any]]:
    """All that is in a topic, once these have come."""
    found: list[Message[Any]] = []
    with opened(Kafka(bootstrap, group=new_group()), topic) as source:

        def complete() -> bool:
            deliveries = source.receive(500, 0.2)
            found.extend(each.message for each in deliveries if each.message is not None)
            return ids <= {_id(message) for message in found}

        eventually(complete, f"{len(ids)} messages")
    return found


def test_debezium_publishes_what_the_relay_would(
    server: ThrowawayPostgres, debezium: ConnectServer, kafka_bootstrap: str
) -> None:
    topic, relayed = new_topic(kafka_bootstrap), new_topic(kafka_bootstrap)
    extra = Headers([("tag", "é"), ("tag", "2"), ("raw", b"\xff"), ("none", None)])
    with App(server.url) as app:
        app.publish(Kafka(kafka_bootstrap), topics=[relayed])

        @app.handler("orders", consumer="billing")
        def bill(message: Message[Any], tx: psycopg.Connection) -> None:
            for outbox, to in ((_OUTBOX, topic), (app.outbox, relayed)):
                outbox.stage(tx, to, {"order": 7}, key="o-7", type="due", headers=extra)
                outbox.stage(tx, to, b"\x00\xff", key="o-8", content_type="image/png")
                outbox.stage(tx, to, b"", key="o-9")

        order = Message(
            id="evt-1", topic="orders", payload=b"{}", headers={"correlation-id": "c-1"}
        )
        assert app.process(order) is Outcome.PROCESSED
        assert app.process(order) is Outcome.DUPLICATE
        drained(relay_of(app))
    with opened(Kafka(kafka_bootstrap, group=new_group()), relayed) as source:
        wanted = [each.message for each in take(source, 3)]
    with opened(Kafka(kafka_bootstrap, group=new_group()), topic) as source:
        found = [each.message for each in take(source, 3)]
    with Raw(server.url) as raw:
        staged = raw.rows(f"SELECT id FROM txbox_outbox WHERE topic = '{topic}' ORDER BY number")
    assert [_id(each) for each in found] == [row[0] for row in staged]
    for ours, theirs in zip(wanted, found, strict=True):
        assert ours is not None
        assert theirs is not None
        for field in ("key", "type", "payload", "content_type"):
            assert getattr(theirs, field) == getattr(ours, field), field
        there = _on_the_wire(theirs)
        for pair in _on_the_wire(ours):
            assert pair in there or pair[0] == "message-id", pair
        assert len(theirs.headers.get_all("tag")) == len(ours.headers.get_all("tag"))


def test_nothing_is_lost_when_connect_is_killed(
    server: ThrowawayPostgres, debezium: ConnectServer, kafka_bootstrap: str
) -> None:
    topic = new_topic(kafka_bootstrap, partitions=3)
    ids = _stage(server.url, topic, range(100), key="k")
    _arrived(kafka_bootstrap, topic, set(ids))
    ids += _stage(server.url, topic, range(100, 2000), key="k")
    debezium.stop(immediate=True)
    ids += _stage(server.url, topic, range(2000, 2100), key="k")
    with psycopg.connect(server.url) as tx:
        _OUTBOX.stage(tx, topic, "never committed")
        tx.rollback()
    debezium.start()
    found = [_id(message) for message in _arrived(kafka_bootstrap, topic, set(ids))]
    assert set(found) == set(ids)
    assert list(dict.fromkeys(found)) == ids, "the order of a key"


def test_rows_are_pruned_without_a_relay_and_a_relay_can_send_them_again(
    server: ThrowawayPostgres, debezium: ConnectServer, kafka_bootstrap: str
) -> None:
    topic = new_topic(kafka_bootstrap)
    ids = _stage(server.url, topic, range(3))
    assert {each.key for each in _arrived(kafka_bootstrap, topic, set(ids))} == {None}
    debezium.stop()
    with Raw(server.url) as raw:
        again = _blocks("sql")[-1]
        assert again.startswith("UPDATE")
        raw.execute(again)
        with App(server.url) as app:
            app.publish(Kafka(kafka_bootstrap), topics=[topic], name="debezium")
            drained(relay_of(app))
        found = _arrived(kafka_bootstrap, topic, set(ids))
        eventually(lambda: not raw.rows("SELECT 1 FROM txbox_outbox"))
        assert {_id(message) for message in found} == set(ids)
        _stage(server.url, topic, range(2))
        raw.execute("UPDATE txbox_outbox SET sent_at = sent_at - interval '31 days'")
        with App(server.url) as app:
            assert run_once(app, "prune-outbox", Task()).rows == 2


def test_what_debezium_cannot_do_is_refused(server: ThrowawayPostgres) -> None:
    with psycopg.connect(server.url) as tx, pytest.raises(StoreError, match="neither delays"):
        _OUTBOX.stage(tx, "later", {}, delay=timedelta(hours=1))
