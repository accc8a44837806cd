"""A Django project of settings only, for whichever database a test has."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import unquote, urlsplit

import django
import pymysql
from django.conf import settings
from django.db import connections

_ENGINES = {"postgresql": "postgresql", "mysql": "mysql", "sqlite": "sqlite3"}


def database(url: str) -> dict[str, Any]:
    """The entry of settings.DATABASES for a URL."""
    parts = urlsplit(url)
    properties: dict[str, Any] = {
        "ENGINE": f"django.db.backends.{_ENGINES[parts.scheme]}",
        "CONN_MAX_AGE": 60,
    }
    if parts.scheme == "sqlite":
        return properties | {"NAME": url.removeprefix("sqlite:///")}
    return properties | {
        "NAME": parts.path.lstrip("/"),
        "USER": unquote(parts.username or ""),
        "PASSWORD": unquote(parts.password or ""),
        "HOST": parts.hostname,
        "PORT": parts.port,
    }


@contextmanager
def configured(url: str, **changes: Any) -> Iterator[str]:
    """Point Django's alias "txbox_test" at a database; yields the alias."""
    if not settings.configured:
        pymysql.install_as_MySQLdb()
        settings.configure(
            DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}},
            USE_TZ=True,
            INSTALLED_APPS=[],
        )
        django.setup()
    alias = "txbox_test"
    connections.databases[alias] = connections.configure_settings(
        {"default": {}, alias: database(url) | changes}
    )[alias]
    try:
        yield alias
    finally:
        connections[alias].close()
        del connections[alias]
        del connections.databases[alias]
