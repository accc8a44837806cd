"""The models hold in every order of their steps, and no deliberate defect goes unnoticed."""

from __future__ import annotations

import re

import pytest

from tests.models import spin
from tests.support.databases import require
from txbox.store.dialect import dialect

_DATABASES = ("postgresql", "mysql", "sqlite")
#: What is no statement of a store: the session's own steps, and the worker's.
_STEPS = {"begin", "commit", "handler", "ack"}


@pytest.fixture(autouse=True)
def tools() -> None:
    require(spin.tools())


@pytest.mark.parametrize("model", spin.NAMES)
def test_every_order_of_steps_keeps_the_promises(model: str) -> None:
    checked = spin.check(model)
    assert checked.whole
    assert checked.wrong is None
    assert checked.states > 1_000


@pytest.mark.parametrize(
    ("model", "defect"), [(model, defect) for model in spin.NAMES for defect in spin.defects(model)]
)
def test_a_defect_is_noticed(model: str, defect: str) -> None:
    assert spin.check(model, defect).wrong is not None


def test_there_are_models_and_defects_enough() -> None:
    assert {path.stem for path in spin.MODELS.glob("*.pml")} == set(spin.NAMES)
    assert {model: len(spin.defects(model)) for model in spin.NAMES} == {
        "inbox": 10,
        "kafka": 4,
        "relay": 6,
        "failover": 4,
    }


@pytest.mark.parametrize("model", spin.NAMES)
def test_steps_are_named_after_crash_points_that_exist(model: str) -> None:
    statements = {name for each in _DATABASES for name in dialect(each).queries}
    points = spin.points(model)
    assert len(points) >= 3
    unknown = [
        point
        for point in points - {"received", "between:writes"}
        if not re.fullmatch(r"(before|after|during):\w+", point)
        or point.partition(":")[2] not in statements | _STEPS | {"claim", "close"}
    ]
    assert unknown == []
