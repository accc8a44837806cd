"""Several Apps on one database, as separate processes with real brokers."""

from __future__ import annotations

import importlib.util
import os
import secrets
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import redis

from tests.support.brokers.rabbitmq import declare
from tests.support.databases import Raw
from tests.support.waiting import DEADLINE_S, eventually
from tests.support.warm import Warm

Connect = Callable[[str], AbstractContextManager[Any]]
Look = Callable[[str], Raw]
ROOT = Path(__file__).parents[2]
COUNT = 20

#: `orders` publishes; `mails` does not; `billing` consumes the topic from the broker; `audit` has it locally.
APPS = """
import os
from txbox import App
from txbox.brokers.rabbitmq import RabbitMQ
from txbox.brokers.redis import RedisStreams

url, broker, topic = os.environ["DATABASE"], os.environ["BROKER"], os.environ["TOPIC"]

def at_the_broker():
    return RedisStreams(broker, group="billing") if broker.startswith("redis") else RabbitMQ(broker)

def handle(message, tx): ...

orders, mails, billing, audit = App(url), App(url), App(url), App(url)
orders.publish(at_the_broker(), topics=[topic])
mails.handler("for mails", consumer="mails")(handle)
billing.handler(topic, consumer="billing")(handle)
billing.handler("for billing", consumer="billing-own")(handle)
billing.consume(at_the_broker(), topics=[topic])
audit.handler(topic, consumer="audit")(handle)
audit.handler("for audit", consumer="audit-own")(handle)
"""


class Shops:
    """The Apps of one database and one broker."""

    def __init__(self, folder: Path, url: str, broker: str, topic: str) -> None:
        self._folder = folder
        self._environment = {"DATABASE": url, "BROKER": broker, "TOPIC": topic}
        (folder / "shops.py").write_text(APPS)

    def loaded(self) -> Any:
        spec = importlib.util.spec_from_file_location("shops", self._folder / "shops.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        os.environ.update(self._environment)
        try:
            spec.loader.exec_module(module)
        finally:
            for name in self._environment:
                del os.environ[name]
        return module

    def start(self, command: str, app: str, *options: str) -> Warm:
        return Warm(
            ["txbox", command, f"shops:{app}", *options],
            cwd=self._folder, env=os.environ | self._environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

    @contextmanager
    def running(self, command: str, app: str) -> Iterator[None]:
        process = self.start(command, app)
        try:
            yield
        finally:
            process.send_signal(signal.SIGTERM)
            said, _ = process.communicate(timeout=DEADLINE_S)
        assert process.returncode == 0, said

    def once(self, command: str, app: str) -> str:
        said, _ = (process := self.start(command, app, "--once")).communicate(timeout=DEADLINE_S)
        assert process.returncode == 0, said
        return str(said)


def relay_each_for_itself(shops: Shops, raw: Raw, tx: Any) -> None:
    """Workers and a relay of the other Apps run first; then the relay of the App that staged."""
    apps = shops.loaded()
    topic: str = apps.topic
    mine = "SELECT count(*) FROM txbox_outbox WHERE topic = ? AND status = 'pending' AND attempts = 0 AND token IS NULL"
    with ExitStack() as others:
        others.enter_context(shops.running("run", "mails"))
        others.enter_context(shops.running("run", "billing"))
        others.enter_context(shops.running("relay", "audit"))
        for number in range(COUNT):
            apps.orders.outbox.stage(tx, topic, number, key=str(number % 2), ordered=True)
        tx.commit()
        # each of these is behind those rows, and shows that a relay has looked past them
        for name in ("mails", "billing", "audit"):
            getattr(apps, name).outbox.stage(tx, f"for {name}", {})
        tx.commit()
        eventually(
            lambda: raw.value("SELECT count(*) FROM txbox_inbox") == 3, "the other Apps' own rows"
        )
        assert raw.value(mine, (topic,)) == COUNT
        assert f"{COUNT} sent" in shops.once("relay", "orders")
        eventually(lambda: from_the_broker(raw) == COUNT, "each message over its broker")
    assert raw.value("SELECT count(*) FROM txbox_outbox") == 0
    assert raw.value("SELECT count(*) FROM txbox_inbox") == COUNT + 3
    for name in ("orders", "mails", "billing", "audit"):
        getattr(apps, name).close()


def from_the_broker(raw: Raw) -> int:
    return int(
        raw.value(
            "SELECT count(*) FROM txbox_inbox WHERE consumer = 'billing' AND status = 'processed'"
        )
    )


@pytest.mark.brokers
def test_another_apps_worker_leaves_rows_for_redis_alone(
    database_url: str, redis_url: str, tmp_path: Path, raw: Look, plain_connection: Connect
) -> None:
    topic = f"created-{secrets.token_hex(4)}"
    shops = Shops(tmp_path, database_url, redis_url, topic)
    with redis.Redis.from_url(redis_url) as client:
        try:
            with plain_connection(database_url) as tx:
                relay_each_for_itself(shops, raw(database_url), tx)
            entries: Any = client.xrange(topic)
        finally:
            client.delete(topic)
    # every subscriber of the stream sees each message, in the order of its key
    by_key = {
        key: [int(fields[b"payload"]) for _, fields in entries if fields[b"key"] == key]
        for key in (b"0", b"1")
    }
    assert by_key == {b"0": list(range(0, COUNT, 2)), b"1": list(range(1, COUNT, 2))}


@pytest.mark.brokers
def test_another_apps_worker_leaves_rows_for_rabbitmq_alone(
    postgresql_url: str, rabbitmq_url: str, tmp_path: Path, raw: Look, plain_connection: Connect
) -> None:
    shops = Shops(tmp_path, postgresql_url, rabbitmq_url, declare(rabbitmq_url))
    with plain_connection(postgresql_url) as tx:
        relay_each_for_itself(shops, raw(postgresql_url), tx)


def test_a_worker_without_anything_to_relay_ends_while_others_rows_wait(
    database_url: str, tmp_path: Path, raw: Look, plain_connection: Connect
) -> None:
    shops = Shops(tmp_path, database_url, "redis://127.0.0.1:1/0", "created")
    apps = shops.loaded()
    with plain_connection(database_url) as tx:
        apps.orders.outbox.stage(tx, "created", 1)
        tx.commit()
    for app in ("mails", "audit"):
        shops.once("relay", app)
        assert raw(database_url).value("SELECT count(*) FROM txbox_outbox WHERE attempts = 0") == 1
    apps.orders.close()
