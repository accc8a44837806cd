"""Passwords in database URLs of every shape: refused or masked, never shown."""

from __future__ import annotations

import traceback
from pathlib import Path

import pytest

from txbox import App, ConfigurationError

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
    ],
)  # fmt: skip
def test_readable_urls_are_accepted(url: str) -> None:
    App(url).close()


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
