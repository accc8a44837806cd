"""The inbox under random steps beside a model; `make fuzz` takes many more of them, with another seed each time."""

from __future__ import annotations

import pytest
from hypothesis.stateful import run_state_machine_as_test

from tests.fuzz import several
from tests.fuzz.machine import Lives
from tests.support.databases import NewDatabase
from tests.support.shop import opened
from txbox.admin import Admin


@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
def test_the_inbox_is_what_the_model_says(kind: str, new_database: NewDatabase) -> None:
    with opened(new_database(kind)) as shop, Admin(shop.app) as admin:
        run_state_machine_as_test(Lives.of(shop, admin), settings=several(8, steps=25))
