"""The brokers of a chaos run: a server of its own behind a proxy, and the feeds of the crash sweep on it."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Self

from tests.crash.brokers.feeds import (
    COMES_BACK,
    GROUP,
    DynamicFeed,
    Feed,
    NatsFeed,
    QuorumFeed,
    RabbitMQFeed,
    RedisFeed,
)
from tests.support.proxy import Proxy
from tests.support.servers import ServerError
from tests.support.servers.control import (
    ThrowawayKafka,
    ThrowawayNats,
    ThrowawayRabbitMQ,
    ThrowawayRedis,
)
from tests.support.waiting import DEADLINE_S
from txbox.brokers.base import Source
from txbox.brokers.nats import Nats
from txbox.brokers.redis import RedisStreams

Broker = Feed
PAYMENTS, ENTRIES = "payments", "entries"


class ProxiedKafka(ThrowawayKafka):
    """Clients are told the proxy's address, so that what they send passes it."""

    advertised = ""

    def _settings(self) -> Any:
        advertised = {"advertised.listeners": f"PLAINTEXT://{self.advertised}"}
        return super()._settings() | (advertised if self.advertised else {})

    def initialise(self) -> None:
        """The proxy needs the port, which is known from here on, and the broker the proxy's."""
        self.proxy = Proxy(f"kafka://127.0.0.1:{self.port}")
        self.advertised = self.proxy.url.removeprefix("kafka://")
        super().initialise()


class _Kafka(DynamicFeed):
    PARTITIONS = 4


class _Nats(NatsFeed):
    def create(self) -> None:
        # the server drops what has the id of a message that is no older than this
        window: dict[str, Any] = {"duplicate_window": 0.1}
        self._do(lambda js: js.add_stream(name=self.name, subjects=[f"{self.name}.>"], **window))

    def source(self, member: int) -> Source:
        return Nats(self.url, durable=GROUP, connect_timeout=2)


class _Redis(RedisFeed):
    def source(self, member: int) -> Source:
        del member
        return RedisStreams(self.url, group=GROUP, claim_idle=COMES_BACK, socket_timeout=3)


_KINDS: dict[str, tuple[Callable[[], Any], type[Feed]]] = {
    "kafka": (ProxiedKafka, _Kafka),
    "rabbitmq": (ThrowawayRabbitMQ, RabbitMQFeed),
    "quorum": (ThrowawayRabbitMQ, QuorumFeed),
    "nats": (ThrowawayNats, _Nats),
    "redis": (ThrowawayRedis, _Redis),
}
NAMES = tuple(_KINDS)


def patiently(start: Callable[[], object]) -> None:
    """Start a server on a machine that is too busy for it to answer at once."""
    for is_last in (False, False, True):
        try:
            start()
        except ServerError:
            if is_last:
                raise
        else:
            return


class BrokerServer:
    """`with BrokerServer("redis") as broker`: a server, a proxy, and the two feeds on it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.server, self._feed = _KINDS[name][0](), _KINDS[name][1]
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        self._stack.callback(self.server.remove)
        try:
            patiently(self.server.start)
        except BaseException:
            self._stack.close()
            raise
        made = getattr(self.server, "proxy", None) or Proxy(self.server.url)
        self.proxy: Proxy = self._stack.enter_context(made)
        for feed in (self.payments(), self.entries()):
            feed.create()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    def payments(self, *, proxied: bool = False) -> Feed:
        return self._on(PAYMENTS, proxied=proxied)

    def entries(self, *, proxied: bool = False) -> Feed:
        return self._on(ENTRIES, proxied=proxied)

    def _on(self, topic: str, *, proxied: bool) -> Feed:
        url = self.proxy.url if proxied else self.server.url
        return self._feed(url.removeprefix("kafka://"), topic)

    def recreate(self, feed: Feed) -> None:
        """Delete a queue with all that is in it, and make it again."""
        feed.remove()
        deadline = time.monotonic() + DEADLINE_S
        while True:
            try:
                feed.create()
            except Exception:
                # the server is still deleting
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)
            else:
                return
