"""A system on which nothing is wrong has no finding: servers with their own defaults, and traffic."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.support.databases import Raw, require
from tests.support.doctor import diagnosed, findings
from tests.support.servers import packages
from tests.support.servers.control import ThrowawayMariaDB, ThrowawayPostgres
from tests.support.shop import Shop, opened, paid
from txbox import App, Outcome
from txbox.brokers.local import Local
from txbox.maintenance import run_once


@pytest.fixture(params=["sqlite", "postgresql", "mariadb"])
def durable_url(request: pytest.FixtureRequest, sqlite_url: str) -> Iterator[str]:
    """An empty database on a server that waits for the disk."""
    if request.param == "sqlite":
        yield sqlite_url
        return
    require(None if packages.installed(request.param) else packages.what_is_missing(request.param))
    server = ThrowawayPostgres() if request.param == "postgresql" else ThrowawayMariaDB()
    server.durable = True
    with server:
        with Raw(server.url) as admin:
            admin.execute("CREATE DATABASE clean")
        url = urlsplit(server.url)._replace(path="/clean").geturl()
        with App(url) as app:
            app.init()
        yield url


def _used(shop: Shop) -> None:
    shop.handler(timeout=timedelta(seconds=20))
    shop.app.consume(Local())
    shop.app.publish(Local(), topics=["letters"])
    assert shop.deliver(paid("m1")) is Outcome.PROCESSED
    shop.app.send(paid("m2"))
    run_once(shop.app, "prune")


def test_a_clean_system_has_no_finding(durable_url: str) -> None:
    with opened(durable_url) as shop:
        _used(shop)
        found = diagnosed(shop.app, grace=timedelta(seconds=25))
    assert found.findings == []
    assert found.unchecked == []


def test_nor_has_one_on_the_servers_of_the_tests(shop: Shop) -> None:
    _used(shop)
    assert findings(shop.app) == {}


def test_an_async_only_database_is_examined_too(postgresql_url: str) -> None:
    url = postgresql_url.replace("postgresql://", "postgresql+asyncpg://")
    assert findings(url) == {}


def test_a_database_alone_says_what_only_an_app_knows(sqlite_url: str) -> None:
    found = diagnosed(sqlite_url)
    assert [one.code for one in found.findings] == []
    assert [one.what for one in found.unchecked] == ["rows that no handler or relay takes"]


def test_every_look_is_undone(shop: Shop, raw: Callable[[str], Raw]) -> None:
    """It writes nothing: no row, no job."""
    shop.handler()
    shop.deliver(paid("m1"))
    looks = [
        f"SELECT * FROM {table} ORDER BY 1, 2"
        for table in ("txbox_inbox", "txbox_job", "txbox_schema", "txbox_audit")
    ]
    before: list[list[tuple[Any, ...]]] = [shop.raw.rows(look) for look in looks]
    findings(shop.app)
    assert [shop.raw.rows(look) for look in looks] == before
