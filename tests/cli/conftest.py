"""A service for the commands."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.support.command import SHOP, Command
from tests.support.databases import FreshDatabase, Raw


@pytest.fixture
def shop(command: Command, database: FreshDatabase, raw: Callable[[str], Raw]) -> Command:
    """`command` with a service `shop:app` on a fresh database, named by TXBOX_APP."""
    return _with_shop(command, database.url, raw)


@pytest.fixture
def sqlite_shop(command: Command, sqlite_url: str, raw: Callable[[str], Raw]) -> Command:
    """`shop` on SQLite alone, for what does not depend on the database."""
    return _with_shop(command, sqlite_url, raw)


def _with_shop(command: Command, url: str, raw: Callable[[str], Raw]) -> Command:
    command.file("shop.py", SHOP)
    raw(url).execute("CREATE TABLE effect (id varchar(40))")
    named = {"TXBOX_APP": "shop:app", "SHOP_URL": url}
    return Command(command.directory, {**command.environment, **named})
