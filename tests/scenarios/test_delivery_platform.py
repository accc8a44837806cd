"""The delivery platform of the examples: duplicates, disorder, kill -9 of every process, a replay."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from aio_pika.abc import AbstractChannel

from tests.support.brokers.kafka import lag
from tests.support.brokers.rabbitmq import left, on_server
from tests.support.databases import NewDatabase
from tests.support.platform.platforms import Clean, Platform, clean_run, platform
from tests.support.waiting import DEADLINE_S

SERVICES = {"scans": "scans", "notifications": "notifications"}


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Clean:
    """The clean run that the others are compared with."""
    return clean_run(tmp_path_factory.mktemp("clean"))


def _topics() -> dict[str, str]:
    suffix = secrets.token_hex(4)
    return {
        "SCANS_TOPIC": f"scans-{suffix}",
        "STATUS_TOPIC": f"status-{suffix}",
        "GROUP": f"g-{suffix}",
    }


def _survives(services: Platform, clean: Clean, seed: int) -> None:
    services.start()
    services.killed_again_and_again(services.fed(parts=30, pause_s=0.4), each=5, seed=seed)
    services.check(clean)


def _fed_again(services: Platform, clean: Clean, drained: Callable[[], bool]) -> None:
    """Everything is published once more: no state moves, and no mail is sent."""
    before = {what: len(copies) for what, copies in services.mails().items()}
    assert services.fed(1, 0.0).wait(DEADLINE_S) == 0
    services.until(drained, "the end of the replay")
    services.check(clean)
    assert {what: len(copies) for what, copies in services.mails().items()} == before


def test_delivery_platform_without_a_broker(tmp_path: Path, clean: Clean) -> None:
    url = f"sqlite:///{tmp_path / 'platform.db'}"
    workers = {"first": "monolith", "second": "monolith"}
    with platform(tmp_path, apps=workers, env={}, urls=[url]) as services:
        _survives(services, clean, seed=1)
        _fed_again(services, clean, services.quiet)


@pytest.mark.brokers
def test_delivery_platform_on_kafka(
    kafka_bootstrap: str, new_database: NewDatabase, tmp_path: Path, clean: Clean
) -> None:
    env = {"PLATFORM_BROKER": f"kafka://{kafka_bootstrap}", **_topics()}
    urls = [new_database("postgresql"), new_database("postgresql")]
    with platform(tmp_path, apps=SERVICES, env=env, urls=urls) as services:
        _survives(services, clean, seed=2)
        services.stop()
        before = {what: len(copies) for what, copies in services.mails().items()}
        # a group that is new reads both topics from their beginning
        group = f"{env['GROUP']}-again"
        services.start(GROUP=group)
        read = {f"{group}-scans": env["SCANS_TOPIC"], f"{group}-notifications": env["STATUS_TOPIC"]}
        services.until(
            lambda: not any(lag(kafka_bootstrap, name, topic, 3) for name, topic in read.items()),
            "the end of the replay",
        )
        services.check(clean)
        assert {what: len(copies) for what, copies in services.mails().items()} == before


@pytest.mark.brokers
def test_delivery_platform_on_rabbitmq(
    rabbitmq_url: str, new_database: NewDatabase, tmp_path: Path, clean: Clean
) -> None:
    env = {"PLATFORM_BROKER": rabbitmq_url, **_topics()}
    urls = [new_database("postgresql"), new_database("postgresql")]
    queues = [env["SCANS_TOPIC"], env["STATUS_TOPIC"]]
    try:
        with platform(tmp_path, apps=SERVICES, env=env, urls=urls) as services:
            _survives(services, clean, seed=3)
            _fed_again(
                services, clean, lambda: not any(left(rabbitmq_url, name) for name in queues)
            )
    finally:
        for name in queues:
            on_server(rabbitmq_url, partial(_deleted, name))


async def _deleted(queue: str, channel: AbstractChannel) -> None:
    await channel.queue_delete(queue)
