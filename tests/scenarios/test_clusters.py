"""Clusters in which every node takes writes: each message once, nobody ends, no attempt is spent (promise 2.14).

Three workers, whose URLs name all nodes and each another one first, and a handler that locks the same few rows on all
of them. `make test-clusters` runs these alone.
"""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import timedelta
from typing import Any

import pytest

from tests.support.databases import require
from tests.support.servers import ServerError
from tests.support.servers.clusters import ThrowawayGalera, ThrowawayGroup, galera_provider
from tests.support.servers.mariadb import PASSWORD
from tests.support.servers.provision import prepare
from tests.support.waiting import eventually
from tests.support.workers import running, worker
from txbox import App, Lease, Limits, Message, Outcome
from txbox.events import ConsumptionPaused, Event, TransactionRetried
from txbox.worker import Worker

pytestmark = pytest.mark.slow

Cluster = ThrowawayGalera | ThrowawayGroup
CONSUMER, TOPIC, ACCOUNTS = "billing", "orders", 3
TABLES = (
    "CREATE TABLE effect (id bigint PRIMARY KEY AUTO_INCREMENT, message_id varchar(40) NOT NULL)",
    "CREATE TABLE account (id integer PRIMARY KEY, balance integer NOT NULL)",
    "INSERT INTO account VALUES (0, 0), (1, 0), (2, 0)",
)


def missing(kind: type[Cluster]) -> str | None:
    try:
        prepare(["mariadb" if kind is ThrowawayGalera else "mysql"], throwaway=True)
    except ServerError as error:
        return str(error)
    if kind is ThrowawayGalera and galera_provider() is None:
        return "Galera is not here; install Debian's galera-4"
    return None


@pytest.fixture(scope="module", params=[ThrowawayGalera, ThrowawayGroup], ids=["galera", "group"])
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    require(missing(request.param))
    with request.param() as cluster:
        cluster.node(1).query("CREATE DATABASE shop")
        with App(_url(cluster, 1)) as app:
            app.init()
        for statement in TABLES:
            cluster.node(1).query(
                statement.replace("TABLE ", "TABLE shop.").replace("INTO ", "INTO shop.")
            )
        yield cluster


def _url(cluster: Cluster, first: int) -> str:
    nodes = cluster.nodes[first - 1 :] + cluster.nodes[: first - 1]
    hosts = ",".join(f"127.0.0.1:{node.port}" for node in nodes)
    return f"mysql://root:{PASSWORD}@{hosts}/shop"


class Service:
    """One process's App, whose URL names this node first."""

    def __init__(self, cluster: Cluster, first: int) -> None:
        self.events: list[Event] = []
        self.app = App(
            _url(cluster, first),
            observers=[self.events.append],
            limits=Limits(lock_timeout=timedelta(seconds=2)),
            lease=Lease(duration=timedelta(seconds=8), batch=10),
        )
        self.is_async = first == len(cluster.nodes)
        self.app.handler(TOPIC, consumer=CONSUMER)(handle_async if self.is_async else handle)

    def worker(self) -> Worker:
        return worker(self.app, maintenance=True)

    def saw(self, kind: type[Event]) -> bool:
        return any(isinstance(event, kind) for event in self.events)


def _account(message: Message[Any]) -> int:
    return int(str(message.id).rpartition("-")[2]) % ACCOUNTS


def handle(message: Message[Any], tx: Any) -> None:
    with tx.cursor() as cursor:
        cursor.execute(
            "UPDATE account SET balance = balance + 1 WHERE id = %s", (_account(message),)
        )
        cursor.execute("INSERT INTO effect (message_id) VALUES (%s)", (message.id,))


async def handle_async(message: Message[Any], tx: Any) -> None:
    async with tx.cursor() as cursor:
        await cursor.execute(
            "UPDATE account SET balance = balance + 1 WHERE id = %s", (_account(message),)
        )
        await cursor.execute("INSERT INTO effect (message_id) VALUES (%s)", (message.id,))


def messages(name: str, count: int) -> list[Message[Any]]:
    return [Message(topic=TOPIC, id=f"{name}-{number}", payload=b"{}") for number in range(count)]


def check_each_once(cluster: Cluster, name: str, count: int, *, on: int = 1) -> None:
    node = cluster.node(on)
    like = f"LIKE '{name}-%'"
    ((rows, different),) = node.query(
        f"SELECT count(*), count(DISTINCT message_id) FROM shop.effect WHERE message_id {like}"
    )
    assert (rows, different) == (count, count)
    found = node.query(
        f"SELECT status, attempts, count(*) FROM shop.txbox_inbox WHERE message_id {like} GROUP BY 1, 2"
    )
    assert [tuple(row) for row in found] == [("processed", 0, count)]


def unfinished(cluster: Cluster, name: str, *, on: int = 1) -> int:
    ((count,),) = cluster.node(on).query(
        f"SELECT count(*) FROM shop.txbox_inbox WHERE message_id LIKE '{name}-%' AND status <> 'processed'"
    )
    return int(count)


def finish(cluster: Cluster, name: str) -> None:
    """Wait until all are processed, however slow the machine is: in each while some must be."""
    while before := unfinished(cluster, name):
        eventually(lambda: unfinished(cluster, name) < before, f"fewer than {before} unfinished")


@pytest.fixture
def services(cluster: Cluster) -> Iterator[list[Service]]:
    made = [Service(cluster, first) for first in (1, 2, 3)]
    yield made
    for service in made:
        service.app.close()


def test_copies_on_all_nodes_are_processed_once(cluster: Cluster, services: list[Service]) -> None:
    """Each node gets every message, in an order of its own: they meet in the inbox and in the handlers' rows."""
    sent, failures = messages("copy", 60), list[BaseException]()

    def deliver(service: Service) -> None:
        pending = random.sample(sent, len(sent))
        try:
            while pending:
                if service.is_async:
                    outcomes = asyncio.run(_processed_async(service.app, pending))
                else:
                    outcomes = [service.app.process(message) for message in pending]
                pending = [
                    message
                    for message, outcome in zip(pending, outcomes, strict=True)
                    if outcome not in (Outcome.PROCESSED, Outcome.DUPLICATE)
                ]
        except BaseException as error:
            failures.append(error)
            raise

    threads = [threading.Thread(target=deliver, args=(service,)) for service in services]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert any(service.saw(TransactionRetried) for service in services), (
        "no conflict: it tests nothing"
    )
    check_each_once(cluster, "copy", len(sent))


async def _processed_async(app: App, pending: list[Message[Any]]) -> list[Outcome]:
    try:
        return [await app.process_async(message) for message in pending]
    finally:
        await app.close_async()


def test_a_killed_node_and_its_return(cluster: Cluster, services: list[Service]) -> None:
    sent = messages("killed", 300)
    services[0].app.send_many(sent[:200])
    with ExitStack() as stack:
        codes = [stack.enter_context(running(service.worker())) for service in services]
        eventually(lambda: unfinished(cluster, "killed") < 180)
        cluster.stop(2, immediate=True)
        finish(cluster, "killed")
        cluster.start(2)
        services[1].app.send_many(sent[200:])
        finish(cluster, "killed")
        assert codes == [[], [], []], "a worker ended"
    assert codes == [[0], [0], [0]]
    check_each_once(cluster, "killed", len(sent), on=2)


def test_a_lost_quorum_and_its_return(cluster: Cluster, services: list[Service]) -> None:
    sent = messages("quorum", 200)
    service = services[0]
    service.app.send_many(sent)
    with running(service.worker()) as codes:
        eventually(lambda: unfinished(cluster, "quorum") < 190)
        cluster.stop(2, immediate=True)
        cluster.stop(3, immediate=True)
        eventually(lambda: service.saw(ConsumptionPaused))
        assert codes == [], "the worker ended"
        if isinstance(cluster, ThrowawayGalera):
            cluster.node(1).query("SET GLOBAL wsrep_provider_options = 'pc.bootstrap=YES'")
        else:
            eventually(lambda: cluster.node(1).state() == "ERROR")
            cluster.found(1)
        finish(cluster, "quorum")
        assert codes == [], "the worker ended"
        for number in (2, 3):
            cluster.start(number)
    assert codes == [0]
    for number in (1, 2, 3):
        check_each_once(cluster, "quorum", len(sent), on=number)
