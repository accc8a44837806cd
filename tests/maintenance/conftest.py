"""Partitions are dropped one after another, without a rest."""

import pytest


@pytest.fixture(autouse=True)
def _without_rest(without_rest: None) -> None: ...
