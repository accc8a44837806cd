"""One database a product for all conformance tests: each test has a consumer and rows of its own."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.conftest import require
from tests.connections.conformance import Given, Kind
from tests.databases import BY_NAME, Raw, missing_server

_numbers = itertools.count(1)


@pytest.fixture(scope="session")
def shared_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], str]]:
    """The URL of the one database of a product, with txbox's tables and an `account` table."""
    made: dict[str, str] = {}

    def url(product: str) -> str:
        if product not in made:
            kind = BY_NAME[product]
            require(kind.missing())
            folder: Path = tmp_path_factory.mktemp(product)
            made[product] = kind.create(folder, schema=True)
            with Raw(made[product]) as raw:
                raw.execute(
                    "CREATE TABLE account (id integer PRIMARY KEY, balance integer NOT NULL)"
                )
        return made[product]

    yield url
    for product, own in made.items():
        BY_NAME[product].drop(own)


@pytest.fixture
def given(request: pytest.FixtureRequest, shared_url: Callable[[str], str]) -> Iterator[Given]:
    """A database opened in the way that the test's parameter says."""
    kind: Kind = request.param
    if kind.pooler:
        require(missing_server("pgbouncer"))
    url = shared_url(kind.product)
    with asyncio.Runner() as runner, Given(kind, url, runner) as opened:
        yield opened


@pytest.fixture
def db(given: Given) -> Iterator[Raw]:
    """The tests' own view of the same database, in autocommit."""
    with Raw(given.url) as own:
        yield own


@pytest.fixture
def number() -> int:
    """A number that no other test has: for rows, ids and consumers."""
    return next(_numbers) * 100
