"""Passwords in database URLs of every shape: refused or masked, never shown."""

from __future__ import annotations

import asyncio
import traceback
from datetime import timedelta
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.support.databases import NewDatabase
from tests.support.proxy import Proxy, closed_port
from txbox import App, ConfigurationError, Limits, Message, StoreUnavailable
from txbox.connections.mysql import MysqlConnection
from txbox.session import blocking

pytestmark = pytest.mark.every_database

SECRET = "hunter2"


@pytest.mark.parametrize("scheme", ["postgresql", "postgresql+asyncpg", "mysql"])
@pytest.mark.parametrize(
    "rest",
    [
        f"u:a/{SECRET}@h/db", f"u:{SECRET}/b@h/db", f"u:1/{SECRET}@h/db",
        f"u:a#{SECRET}@h/db", f"u:{SECRET}#b@h/db", f"u:a?{SECRET}@h/db", f"u:{SECRET}?b@h/db",
        f"u:[{SECRET}]@h/db", f"u:{SECRET}[@h/db", f"u:{SECRET}]@h/db", f"u:a[b]{SECRET}@h/db",
        f"u:{SECRET}@h:port/db", f"u:{SECRET}\N{FULLWIDTH SOLIDUS}@h/db", f"u@corp:{SECRET}@h",
        f"u:a {SECRET}@h", f"u:a@{SECRET}@h/",
    ],
)  # fmt: skip
def test_unreadable_url_is_refused_without_its_password(scheme: str, rest: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        App(f"{scheme}://{rest}")
    assert SECRET not in "".join(traceback.format_exception(refused.value))


@pytest.mark.parametrize(
    "rest",
    [
        f"u:{SECRET}@h/db", f"u@corp:{SECRET}@h/db", f"u:a@{SECRET}@h/db", f"h/db?password={SECRET}",
        f"h/db?sslpassword={SECRET}", f"h/db?passwd={SECRET}&a=b", f"h/db?PASSWORD={SECRET}",
        f"u:{SECRET}@h1:1,h2:2/db", f"u:{SECRET}@[::1]:5432/db?host=/a@b",
    ],
)  # fmt: skip
def test_name_of_a_database_masks_its_password(rest: str) -> None:
    with App(f"postgresql://{rest}") as app:
        assert SECRET not in app.database.name
        assert "***" in app.database.name


def test_name_of_an_engine_masks_passwords_of_its_query() -> None:
    sa = pytest.importorskip("sqlalchemy")
    engine = sa.create_engine(f"postgresql+psycopg://u:{SECRET}@h/db?sslpassword={SECRET}")
    with App(engine) as app:
        assert app.database.name == "postgresql+psycopg://u:***@h/db?sslpassword=***"


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://h/db", "postgresql:///db?host=/var/run", "postgresql://h1,h2:5432/db",
        "postgresql://u:%2F%40%5B@[fe80::1%25eth0]:5432/db", "postgresql://h/db?options=-c%20a=b@c",
        "mysql://h1,h2:3307/db", "mysql://u:p@[::1]:3307,h2/db",
    ],
)  # fmt: skip
def test_readable_urls_are_accepted(url: str) -> None:
    App(url).close()


@pytest.mark.parametrize("scheme", ["postgresql", "postgresql+asyncpg", "mysql"])
def test_every_host_of_a_url_is_known(scheme: str) -> None:
    with App(f"{scheme}://u:p@h1,[::1]:5,h2:6/db") as app:
        assert app.database.hosts == ["h1", "::1", "h2"]


@pytest.mark.parametrize("is_async", [False, True], ids=["pymysql", "asyncmy"])
def test_hosts_of_mysql_are_tried_in_order_from_the_one_behind_trouble(
    new_database: NewDatabase, is_async: bool
) -> None:
    with Proxy(new_database("mariadb")) as one, Proxy(one.url) as two, closed_port() as closed:
        ports = [urlsplit(each.url).port for each in (one, two)]
        first = urlsplit(one.url)
        hosts = ",".join(f"{first.hostname}:{port}" for port in (closed, *ports))
        user = first.netloc.rpartition("@")[0]
        with App(first._replace(netloc=f"{user}@{hosts}").geturl()) as app:
            reached: list[int] = []

            async def connect() -> None:
                connections = app.database.asynchronous if is_async else app.database.sync
                assert connections is not None
                connection = await connections.acquire()
                assert isinstance(connection, MysqlConnection)
                reached.append(connection.address[1])
                connections.distrust(connection)
                connection.discard()

            def reach() -> None:
                asyncio.run(connect()) if is_async else blocking(connect())

            for _ in range(3):
                reach()
            # the second one, then the one behind it, then from the front, where nobody answers
            assert reached == [ports[0], ports[1], ports[0]]
            two.refuse()
            reach()
            assert reached[-1] == ports[0]


def test_a_name_is_wrong_only_if_every_host_is_unknown() -> None:
    with closed_port() as port:
        limits = Limits(unavailable_for=timedelta(milliseconds=1))
        for hosts, wrong in (
            ("nohost.invalid,nohost2.invalid", True),
            (f"127.0.0.1:{port},nohost.invalid", False),
        ):
            for scheme in ("postgresql", "mysql"):
                with App(f"{scheme}://u@{hosts}/db", limits=limits) as app:
                    app.handler("t", consumer="c")(lambda message, tx: None)
                    with pytest.raises(StoreUnavailable) as refused:
                        app.process(Message(topic="t", id="1", payload=b""))
                    assert refused.value.misconfigured is wrong, (scheme, hosts)


def test_a_new_sqlite_file_is_its_owners_alone(tmp_path: Path) -> None:
    path = tmp_path / "shop.db"
    with App(f"sqlite:///{path}") as app:
        app.init()
        modes = {each.name: each.stat().st_mode & 0o777 for each in tmp_path.iterdir()}
    assert set(modes.values()) == {0o600}
    assert "shop.db" in modes
    path.chmod(0o660)
    with App(f"sqlite:///{path}") as app:
        app.init()
    assert path.stat().st_mode & 0o777 == 0o660
