"""Fixtures of the brokers: a test that names one starts it; `throwaway_...` ones may be killed.

The shared servers stay up after the tests (`make test` stops them): tests use names of their own
for topics, queues and streams.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, redirect_stdout, suppress
from typing import Any, TypeVar

import pytest

from tests.support.databases import require
from tests.support.servers import UnavailableError, packages, provision, server_urls
from tests.support.servers.control import (
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
_THROWAWAY = {
    "throwaway_kafka": "kafka",
    "throwaway_kafka_cluster": "kafka",
    "throwaway_rabbitmq": "rabbitmq",
    "throwaway_redis": "redis",
    "throwaway_nats": "nats",
    "throwaway_sqs": "sqs",
}

_Server = TypeVar("_Server", bound=AbstractContextManager[object])


def pytest_collection_finish(session: pytest.Session) -> None:
    """Installs and fetches before the first test: no test's time limit covers a download."""
    if session.config.option.collectonly:
        return
    used = {name for item in session.items for name in getattr(item, "fixturenames", ())}
    shared = sorted({server for fixture, server in _SHARED.items() if fixture in used})
    throwaway = sorted({server for fixture, server in _THROWAWAY.items() if fixture in used})
    # The fixture that needs what cannot be had says so, and skips or fails its tests.
    with _shown(session.config), suppress(UnavailableError):
        provision.prepare(shared)
        provision.prepare(throwaway, throwaway=True)


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


def throwaway(name: str, server: _Server) -> Iterator[_Server]:
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
def throwaway_kafka() -> Iterator[ThrowawayKafka]:
    yield from throwaway("kafka", ThrowawayKafka())


@pytest.fixture
def throwaway_kafka_cluster() -> Iterator[ThrowawayKafkaCluster]:
    """Three brokers."""
    yield from throwaway("kafka", ThrowawayKafkaCluster(brokers=3))


@pytest.fixture
def throwaway_rabbitmq() -> Iterator[ThrowawayRabbitMQ]:
    yield from throwaway("rabbitmq", ThrowawayRabbitMQ())


@pytest.fixture
def throwaway_redis() -> Iterator[ThrowawayRedis]:
    yield from throwaway("redis", ThrowawayRedis())


@pytest.fixture
def throwaway_nats() -> Iterator[ThrowawayNats]:
    yield from throwaway("nats", ThrowawayNats())


@pytest.fixture
def throwaway_sqs() -> Iterator[ThrowawayElasticMQ]:
    yield from throwaway("sqs", ThrowawayElasticMQ())
