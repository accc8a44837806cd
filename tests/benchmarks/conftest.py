"""A setting of the smallest size on the test server."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from benchmarks.setting import Setting, opened
from tests.support.databases import NewDatabase


@pytest.fixture
def url(new_database: NewDatabase) -> str:
    return new_database("postgresql", schema=False)


@pytest.fixture
def setting(url: str) -> Iterator[Setting]:
    with opened(url, rounds=1, messages=60) as on:
        yield on
