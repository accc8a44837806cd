"""A connection that the caller has opened without txbox, by database."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any
from urllib.parse import urlsplit

import psycopg
import pymysql
import pytest


@pytest.fixture
def plain_connection() -> Callable[[str], Any]:
    @contextmanager
    def opened(url: str) -> Iterator[Any]:
        parts = urlsplit(url)
        if parts.scheme == "postgresql":
            connection: Any = psycopg.connect(url)
        elif parts.scheme == "mysql":
            connection = pymysql.connect(
                host=parts.hostname, port=parts.port or 3306, user=parts.username,
                password=parts.password or "", database=parts.path[1:],
            )  # fmt: skip
        else:
            connection = sqlite3.connect(
                parts.path[1:] if parts.path.startswith("//") else parts.path
            )
        with closing(connection):
            yield connection

    return opened
