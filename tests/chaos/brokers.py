"""The brokers of a chaos run: a server of its own behind a proxy, and the feeds of the crash sweep on it.

Webhooks have no broker: senders reach one of the workers through a balancer, and repeat a message until it answers 2xx.
"""

from __future__ import annotations

import importlib.metadata
import random
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from datetime import timedelta
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
    Sent,
    SQSFeed,
)
from tests.support.proxy import Proxy
from tests.support.servers import ServerError
from tests.support.servers.control import (
    ThrowawayElasticMQ,
    ThrowawayKafka,
    ThrowawayNats,
    ThrowawayRabbitMQ,
    ThrowawayRedis,
)
from tests.support.servers.process import is_free
from tests.support.waiting import DEADLINE_S
from txbox.brokers.base import Destination, Source
from txbox.brokers.http import Http
from txbox.brokers.nats import Nats
from txbox.brokers.redis import RedisStreams
from txbox.brokers.webhook import Verified, Webhook
from txbox.message import Headers

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


class WebhookFeed(Feed):
    """An endpoint that each worker serves, and that a balancer leads to."""

    @property
    def _path(self) -> str:
        return f"/{self.topic}"

    @property
    def _token(self) -> str:
        return f"Bearer {self.name}"

    def hook(self, received: Callable[[], None]) -> Webhook:
        """The endpoint, which calls `received` for each genuine request."""

        def verify(headers: Headers, body: bytes) -> Verified | bool:
            del body
            if headers.text("authorization") != self._token:
                return False
            received()
            message_id, kind, key = map(headers.text, ("webhook-id", "ce-type", "ce-subject"))
            return Verified(id=message_id, type=kind, key=key)

        return Webhook(
            topic=self.topic, path=self._path, verify=verify,
            # sooner than the relay gives it up
            answer_within=timedelta(seconds=1), retry_after=timedelta(0),
        )  # fmt: skip

    def destination(self) -> Destination:
        return Http(self.url + self._path, headers={"authorization": self._token}, private=True)

    def left(self, workers: int = 0) -> int:
        """Nothing waits between a sender and a receiver."""
        del workers
        return 0

    def source(self, member: int) -> Source:
        raise NotImplementedError

    def create(self) -> None:
        raise NotImplementedError

    def publish(self, messages: Sequence[Sent]) -> None:
        raise NotImplementedError

    def remove(self) -> None:
        raise NotImplementedError


_KINDS: dict[str, tuple[Callable[[], Any], type[Feed]]] = {
    "kafka": (ProxiedKafka, _Kafka),
    "rabbitmq": (ThrowawayRabbitMQ, RabbitMQFeed),
    "quorum": (ThrowawayRabbitMQ, QuorumFeed),
    "nats": (ThrowawayNats, _Nats),
    "redis": (ThrowawayRedis, _Redis),
    "sqs": (ThrowawayElasticMQ, SQSFeed),
}
NAMES = (*_KINDS, "webhook")


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

    #: Messages stay in it until they are acknowledged.
    keeps_messages = True
    server: Any
    proxy: Any

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
        self.proxy = self._stack.enter_context(made)
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

    def lend_port(self, topic: str) -> int | None:
        """A port for one more worker of a topic, if it has to listen."""
        del topic
        return None

    def take_back(self, port: int | None) -> None:
        """The worker of a port is gone for good."""

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


class Balancer(Proxy):
    """Leads each connection to the next worker that listens."""

    _REACHED_S = 1.0

    def __init__(self) -> None:
        super().__init__("http://127.0.0.1")
        self.ports: list[int] = []

    def _reach(self) -> socket.socket:
        for port in tuple(self.ports):
            # the next connection is another worker's
            self.ports.remove(port)
            self.ports.append(port)
            try:
                # a frozen one accepts until its backlog is full
                server = socket.create_connection(("127.0.0.1", port), self._REACHED_S)
            except OSError:
                continue
            server.settimeout(None)
            return server
        raise ConnectionRefusedError


class _Balancers:
    """Those of both topics, for a fault that both have."""

    def __init__(self, *balancers: Balancer) -> None:
        self._all = balancers

    def refuse(self) -> None:
        for balancer in self._all:
            balancer.refuse()

    def hang(self) -> None:
        for balancer in self._all:
            balancer.hang()

    def go_on(self) -> None:
        for balancer in self._all:
            balancer.go_on()

    @property
    def delay_s(self) -> float:
        return self._all[0].delay_s

    @delay_s.setter
    def delay_s(self, delay_s: float) -> None:
        for balancer in self._all:
            balancer.delay_s = delay_s


class Endpoints(BrokerServer):
    """No broker: producer and relay send to the workers' endpoints, and repeat what is not answered with 2xx."""

    keeps_messages = False
    #: Servers of the tests have others, and so have connections that go out.
    _PORTS = range(27_000, 28_500)

    def __init__(self) -> None:
        self.name = "webhook"
        self.server = self
        self._balancers = {topic: Balancer() for topic in (PAYMENTS, ENTRIES)}
        self.proxy = _Balancers(*self._balancers.values())
        self._stack = ExitStack()
        # nobody who runs beside this may get the same ones: not from the seed of the run
        self._random = random.SystemRandom()

    def __enter__(self) -> Self:
        for balancer in self._balancers.values():
            self._stack.enter_context(balancer)
        return self

    def start(self) -> None:
        """Nothing had to stop."""

    def ping(self) -> str:
        names = ("aiohttp", "uvicorn")
        return " to ".join(f"{name} {importlib.metadata.version(name)}" for name in names)

    def lend_port(self, topic: str) -> int:
        lent = {port for balancer in self._balancers.values() for port in balancer.ports}
        port = self._random.choice(
            [port for port in self._PORTS if port not in lent and is_free(port)]
        )
        self._balancers[topic].ports.append(port)
        return port

    def take_back(self, port: int | None) -> None:
        for balancer in self._balancers.values():
            if port in balancer.ports:
                balancer.ports.remove(port)

    def _on(self, topic: str, *, proxied: bool) -> Feed:
        del proxied
        return WebhookFeed(self._balancers[topic].url, topic)


def server_of(name: str) -> BrokerServer:
    return Endpoints() if name == "webhook" else BrokerServer(name)
