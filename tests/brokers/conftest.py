"""Fixtures of the brokers: a test that names one starts it; `own_...` ones may be killed.

The shared servers stay up after the tests (`make test` stops them): tests use names of their own
for topics, queues and streams.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, redirect_stdout, suppress
from typing import Any, TypeVar

import pytest

from tests.conftest import require
from tests.servers import UnavailableError, packages, provision, server_urls
from tests.servers.control import (
    ThrowawayElasticMQ,
    ThrowawayKafka,
    ThrowawayKafkaCluster,
    ThrowawayNats,
    ThrowawayRabbitMQ,
    ThrowawayRedis,
)

_SHARED = {
    "kafka_bootstrap": "kafka",
    "rabbitmq_url": "rabbitmq",
    "redis_url": "redis",
    "nats_url": "nats",
    "sqs_url": "sqs",
}
_OWN = {
    "own_kafka": "kafka",
    "own_kafka_cluster": "kafka",
    "own_rabbitmq": "rabbitmq",
    "own_redis": "redis",
    "own_nats": "nats",
    "own_sqs": "sqs",
}

_Server = TypeVar("_Server", bound=AbstractContextManager[object])


def pytest_collection_finish(session: pytest.Session) -> None:
    """Installs and fetches before the first test: no test's time limit covers a download."""
    if session.config.option.collectonly:
        return
    used = {name for item in session.items for name in getattr(item, "fixturenames", ())}
    shared = sorted({server for fixture, server in _SHARED.items() if fixture in used})
    own = sorted({server for fixture, server in _OWN.items() if fixture in used})
    # The fixture that needs what cannot be had says so, and skips or fails its tests.
    with _shown(session.config), suppress(UnavailableError):
        provision.prepare(shared)
        provision.prepare(own, own=True)


@contextmanager
def _shown(config: pytest.Config) -> Iterator[None]:
    capture: Any = config.pluginmanager.getplugin("capturemanager")
    if capture is None:
        yield
        return
    with capture.global_and_fixture_disabled():
        yield


def _shared(name: str, config: pytest.Config) -> str:
    said = io.StringIO()
    started: list[str] = []
    try:
        with redirect_stdout(said):
            started = provision.up((name,))
    except UnavailableError as error:
        require(str(error))
    lines = said.getvalue().splitlines()
    url = server_urls().get(name)
    if url is None:
        require(lines[-1].removeprefix("servers: "))
        raise AssertionError("unreachable: the line above skips or fails")
    if started:
        with _shown(config):
            print(f"\n{lines[-1]}")
    return url


def _own(name: str, server: _Server) -> Iterator[_Server]:
    if not packages.installed(name):
        require(f"{packages.what_is_missing(name)}; tests that kill the server need their own")
    with ExitStack() as stack:
        try:
            stack.enter_context(server)
        except UnavailableError as error:
            require(str(error))
        yield server


@pytest.fixture(scope="session")
def kafka_bootstrap(pytestconfig: pytest.Config) -> str:
    """`bootstrap.servers` of one broker; it creates no topics by itself."""
    return _shared("kafka", pytestconfig)


@pytest.fixture(scope="session")
def rabbitmq_url(pytestconfig: pytest.Config) -> str:
    return _shared("rabbitmq", pytestconfig)


@pytest.fixture(scope="session")
def redis_url(pytestconfig: pytest.Config) -> str:
    return _shared("redis", pytestconfig)


@pytest.fixture(scope="session")
def nats_url(pytestconfig: pytest.Config) -> str:
    return _shared("nats", pytestconfig)


@pytest.fixture(scope="session")
def sqs_url(pytestconfig: pytest.Config) -> str:
    """The endpoint; any credentials and any region will do."""
    return _shared("sqs", pytestconfig)


@pytest.fixture
def own_kafka() -> Iterator[ThrowawayKafka]:
    yield from _own("kafka", ThrowawayKafka())


@pytest.fixture
def own_kafka_cluster() -> Iterator[ThrowawayKafkaCluster]:
    """Three brokers."""
    yield from _own("kafka", ThrowawayKafkaCluster(brokers=3))


@pytest.fixture
def own_rabbitmq() -> Iterator[ThrowawayRabbitMQ]:
    yield from _own("rabbitmq", ThrowawayRabbitMQ())


@pytest.fixture
def own_redis() -> Iterator[ThrowawayRedis]:
    yield from _own("redis", ThrowawayRedis())


@pytest.fixture
def own_nats() -> Iterator[ThrowawayNats]:
    yield from _own("nats", ThrowawayNats())


@pytest.fixture
def own_sqs() -> Iterator[ThrowawayElasticMQ]:
    yield from _own("sqs", ThrowawayElasticMQ())
