"""One database a product and one app a kind, for all trials: connections are used again, as in life."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.support.connections import Kind
from tests.support.contract.bench import Bench
from tests.support.databases import BY_NAME, Raw, missing_server, require
from tests.support.shop import create_effects


@pytest.fixture(scope="package")
def product_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], str]]:
    made: dict[str, str] = {}

    def url(product: str) -> str:
        if product not in made:
            require(BY_NAME[product].missing())
            made[product] = BY_NAME[product].create(tmp_path_factory.mktemp(product), schema=True)
            with Raw(made[product]) as raw:
                create_effects(raw)
        return made[product]

    yield url
    for product, each in made.items():
        BY_NAME[product].drop(each)


@pytest.fixture(scope="module")
def bench(request: pytest.FixtureRequest, product_url: Callable[[str], str]) -> Iterator[Bench]:
    """An app whose database was given in the way that the test's parameter says."""
    kind: Kind = request.param
    if kind.pooler:
        require(missing_server("pgbouncer"))
    with Bench(kind, product_url(kind.product)) as made:
        yield made
