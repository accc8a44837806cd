"""Vitess: what works through vtgate, what is refused, and each message once while its processes are killed.

`make test-vitess` builds it with Go, and runs these alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pymysql
import pytest

from tests.support.databases import require
from tests.support.servers import ServerError, UnavailableError
from tests.support.servers import vitess as server
from tests.support.servers.provision import prepare
from tests.support.servers.vitess import ThrowawayVitess
from tests.support.waiting import eventually
from tests.support.workers import running, worker
from txbox import App, Inbox, Lease, Limits, Message, Outcome, RetryPolicy
from txbox.errors import SchemaError
from txbox.events import ConsumptionPaused, Event
from txbox.worker import Worker

pytestmark = pytest.mark.slow

CONSUMER, TOPIC = "billing", "orders"
EFFECT = (
    "CREATE TABLE effect (id bigint PRIMARY KEY AUTO_INCREMENT, message_id varchar(40) NOT NULL)"
)


def missing() -> str | None:
    try:
        prepare(["mysql"], throwaway=True)
        if not server.here():
            raise UnavailableError("Vitess is not here; `make test-vitess` builds it, with Go")
    except ServerError as error:
        return str(error)
    return None


@pytest.fixture(scope="module")
def vitess() -> Iterator[ThrowawayVitess]:
    require(missing())
    with ThrowawayVitess() as vitess:
        with App(vitess.url) as app:
            app.init()
        vitess.query(EFFECT)
        yield vitess


class Service:
    """An App with one handler, which writes an effect."""

    def __init__(self, url: str, *, is_async: bool = False) -> None:
        self.events: list[Event] = []
        self.app = App(
            url,
            observers=[self.events.append],
            limits=Limits(lock_timeout=timedelta(seconds=2)),
            lease=Lease(duration=timedelta(seconds=8), batch=10),
        )
        self.app.handler(
            TOPIC, consumer=CONSUMER, retry=RetryPolicy(max_attempts=3, base=timedelta(0))
        )(handle_async if is_async else handle)

    def worker(self) -> Worker:
        return worker(self.app, maintenance=True)

    def saw(self, kind: type[Event]) -> bool:
        return any(isinstance(event, kind) for event in self.events)


def handle(message: Message[Any], tx: Any) -> None:
    with tx.cursor() as cursor:
        cursor.execute("INSERT INTO effect (message_id) VALUES (%s)", (message.id,))
    if message.payload == b'"fail"':
        raise ValueError("after its effect")
    if message.payload == b'"commit"':
        tx.commit()
    if message.payload == b'"again"':
        tx.commit()
        tx.begin()
    if message.payload == b'"slow"':
        with tx.cursor() as cursor:
            cursor.execute("SELECT SLEEP(4) FROM effect LIMIT 1")


async def handle_async(message: Message[Any], tx: Any) -> None:
    async with tx.cursor() as cursor:
        await cursor.execute("INSERT INTO effect (message_id) VALUES (%s)", (message.id,))


def messages(name: str, count: int, payload: bytes = b"{}") -> list[Message[Any]]:
    return [Message(topic=TOPIC, id=f"{name}-{number}", payload=payload) for number in range(count)]


@pytest.fixture
def service(vitess: ThrowawayVitess) -> Iterator[Service]:
    made = Service(vitess.url)
    yield made
    made.app.close()


def check_each_once(vitess: ThrowawayVitess, name: str, count: int) -> None:
    like = f"LIKE '{name}-%'"
    ((rows, different),) = vitess.query(
        f"SELECT count(*), count(DISTINCT message_id) FROM effect WHERE message_id {like}"
    )
    assert (rows, different) == (count, count)
    found = vitess.query(
        f"SELECT status, attempts, count(*) FROM txbox_inbox WHERE message_id {like} GROUP BY 1, 2"
    )
    assert [tuple(row) for row in found] == [("processed", 0, count)]


def unfinished(vitess: ThrowawayVitess, name: str) -> int:
    ((count,),) = vitess.query(
        f"SELECT count(*) FROM txbox_inbox WHERE message_id LIKE '{name}-%' AND status <> 'processed'"
    )
    return int(count)


def finish(vitess: ThrowawayVitess, name: str) -> None:
    """Wait until all are processed, however slow the machine is: in each while some must be."""
    while before := unfinished(vitess, name):
        eventually(lambda: unfinished(vitess, name) < before, f"fewer than {before} unfinished")


def test_a_message_is_processed_once(vitess: ThrowawayVitess, service: Service) -> None:
    (message,) = messages("once", 1)
    assert service.app.process(message) is Outcome.PROCESSED
    assert service.app.process(message) is Outcome.DUPLICATE
    check_each_once(vitess, "once", 1)


def test_async_handlers(vitess: ThrowawayVitess) -> None:
    service = Service(vitess.url, is_async=True)

    async def twice() -> list[Outcome]:
        (message,) = messages("async", 1)
        try:
            return [await service.app.process_async(message) for _ in range(2)]
        finally:
            await service.app.close_async()

    assert asyncio.run(twice()) == [Outcome.PROCESSED, Outcome.DUPLICATE]
    check_each_once(vitess, "async", 1)


@pytest.mark.parametrize("way", ["fail", "commit", "again"])
def test_a_handler_that_fails_or_ends_its_transaction_is_not_processed(
    vitess: ThrowawayVitess, service: Service, way: str
) -> None:
    (message,) = messages(way, 1, f'"{way}"'.encode())
    assert service.app.process(message) in (Outcome.FAILED, Outcome.DEAD)
    ((status,),) = vitess.query(f"SELECT status FROM txbox_inbox WHERE message_id = '{way}-0'")
    assert status in ("failed", "dead")
    if way == "fail":
        ((count,),) = vitess.query("SELECT count(*) FROM effect WHERE message_id = 'fail-0'")
        assert count == 0


def kill_vtgate_and_tablet(vitess: ThrowawayVitess) -> None:
    vitess.vitess.stop(immediate=True)


def kill_mysqld(vitess: ThrowawayVitess) -> None:
    vitess.mysql.stop(immediate=True)


@pytest.mark.parametrize("kill", [kill_vtgate_and_tablet, kill_mysqld])
def test_a_kill_and_its_return(vitess: ThrowawayVitess, service: Service, kill: Any) -> None:
    name = kill.__name__
    sent = messages(name, 200)
    service.app.send_many(sent)
    with running(service.worker()) as codes:
        eventually(lambda: unfinished(vitess, name) < 180)
        kill(vitess)
        eventually(lambda: service.saw(ConsumptionPaused))
        assert codes == [], "the worker ended"
        vitess.mysql.start()
        vitess.vitess.start()
        finish(vitess, name)
        assert codes == [], "the worker ended"
    assert codes == [0]
    check_each_once(vitess, name, len(sent))


# -- shards ----------------------------------------------------------------------------------------

SHARDS = ("-80", "80-")
VSCHEMA = {
    "sharded": True,
    "vindexes": {"hash": {"type": "xxhash"}},
    "tables": {
        table: {"column_vindexes": [{"column": column, "name": "hash"}]}
        for table, column in (
            ("txbox_inbox", "message_id"), ("txbox_outbox", "id"), ("effect", "message_id"), ("account", "id"),
        )
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def sharded() -> Iterator[ThrowawayVitess]:
    require(missing())
    with ThrowawayVitess(
        SHARDS, VSCHEMA, transaction_mode="SINGLE", queryserver_config_transaction_timeout="2s"
    ) as vitess:
        for shard in SHARDS:
            with App(f"{vitess.url}:{shard}") as app:
                app.init()
        vitess.query(EFFECT.replace(" AUTO_INCREMENT", " DEFAULT 0").replace("PRIMARY KEY", ""))
        vitess.query("CREATE TABLE account (id varchar(40) PRIMARY KEY, balance integer NOT NULL)")
        yield vitess


def test_an_app_for_each_shard(sharded: ThrowawayVitess) -> None:
    for shard in SHARDS:
        service = Service(f"{sharded.url}:{shard}")
        service.app.send_many(messages("shard", 20))
        service.app.send_many(messages("shard", 20))
        with running(worker(service.app, once=True)) as codes:
            eventually(lambda: codes == [0])
        service.app.close()
    # each shard has an inbox of its own: the producer decides which one gets a message
    ((count,),) = sharded.query("SELECT count(*) FROM effect WHERE message_id LIKE 'shard-%'")
    assert count == 2 * 20


def test_a_keyspace_of_several_shards_is_refused(sharded: ThrowawayVitess) -> None:
    with App(sharded.url) as app, pytest.raises(SchemaError, match="keyspace_shards is 2"):
        app.init()
    service = Service(sharded.url)
    with pytest.raises(SchemaError, match="keyspace_shards is 2"):
        service.app.process(messages("refused", 1)[0])
    service.app.close()


def test_your_own_loop_across_shards(sharded: ThrowawayVitess) -> None:
    """Rows of one vindex key are of one shard; with others, transaction_mode=SINGLE refuses, and nothing is kept."""
    inbox = Inbox(consumer=CONSUMER)
    connection = pymysql.connect(
        host="127.0.0.1", port=sharded.vitess.port, user="root", database="shop", charset="utf8mb4"
    )
    refused = 0
    with connection, connection.cursor() as cursor:
        for number in range(20):
            connection.begin()
            assert inbox.accept(connection, f"own-{number}", payload=b"{}", topic=TOPIC)
            cursor.execute("INSERT INTO effect (message_id) VALUES (%s)", (f"own-{number}",))
            try:
                cursor.execute("INSERT INTO account VALUES (%s, 0)", (f"another-{number}",))
            except pymysql.Error:
                connection.rollback()
                refused += 1
            else:
                connection.commit()
    assert 0 < refused < 20
    for table in ("effect", "txbox_inbox"):
        ((count,),) = sharded.query(f"SELECT count(*) FROM {table} WHERE message_id LIKE 'own-%'")
        assert count == 20 - refused, table


def test_a_transaction_that_vttablet_gives_up_leaves_nothing(sharded: ThrowawayVitess) -> None:
    service = Service(f"{sharded.url}:-80")
    (message,) = messages("slow", 1, b'"slow"')
    assert service.app.process(message) in (Outcome.FAILED, Outcome.DEAD)
    service.app.close()
    ((count,),) = sharded.query("SELECT count(*) FROM effect WHERE message_id = 'slow-0'")
    assert count == 0
