"""What an ordered message waits for is seen in list and show, on every database."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.support.databases import FreshDatabase
from tests.support.waiting import DEADLINE_S
from txbox import App, GapPolicy, Message, Outcome, Reject, RetryPolicy
from txbox.admin import Admin, InboxFilter

LATER = RetryPolicy(base=timedelta(hours=9), factor=1, cap=timedelta(hours=9))


class Shop:
    """Handlers that fail as the body says, in each kind of order."""

    def __init__(self, url: str) -> None:
        self.app = App(url)

        @self.app.handler("a", consumer="ordered", ordered=True, retry=LATER)
        def in_order(message: Message[Any], tx: Any) -> None:
            act(message)

        @self.app.handler("a", consumer="blocking", ordered=True, dead_blocks=True, retry=LATER)
        def blocking(message: Message[Any], tx: Any) -> None:
            act(message)

        @self.app.handler("a", consumer="versions", sequence="body.version", retry=LATER)
        def versions(message: Message[Any], tx: Any) -> None:
            act(message)

        @self.app.handler(
            "a",
            consumer="anywhere",
            sequence="body.version",
            gaps=GapPolicy(first=None),
            retry=LATER,
        )
        def anywhere(message: Message[Any], tx: Any) -> None:
            act(message)

        @self.app.handler("a", consumer="free", retry=LATER)
        def free(message: Message[Any], tx: Any) -> None:
            act(message)

    def take(
        self, consumer: str, message_id: str, *, do: str = "", version: int = 0, key: str = "k"
    ) -> Outcome:
        body = f'{{"do": "{do}", "version": {version}}}'
        message = Message[Any](id=message_id, topic="a", key=key, payload=body.encode())
        return self.app.process(message, consumer=consumer)

    def waits(self, consumer: str) -> dict[str, tuple[str | None, str | None, int | None]]:
        """By message: the one it waits for, that one's status, the missing version."""
        with Admin(self.app) as admin:
            return {
                row.message_id: (
                    row.waits_for.message_id,
                    row.waits_for.status,
                    row.waits_for.version,
                )
                for row in admin.list(InboxFilter(consumer=consumer))
                if row.waits_for is not None
            }


def act(message: Message[Any]) -> None:
    if message.body["do"] == "fail":
        raise ValueError("told to")
    if message.body["do"] == "die":
        raise Reject("told to")


@pytest.fixture
def shop(database: FreshDatabase) -> Iterator[Shop]:
    made = Shop(database.url)
    yield made
    made.app.close()


def test_a_row_names_the_first_unfinished_one_of_its_key(shop: Shop) -> None:
    assert shop.take("ordered", "1", do="fail") == Outcome.FAILED
    assert shop.take("ordered", "2") == Outcome.DEFERRED
    assert shop.take("ordered", "3") == Outcome.DEFERRED
    assert shop.take("ordered", "4", key="other") == Outcome.PROCESSED
    assert shop.waits("ordered") == {"2": ("1", "failed", None), "3": ("1", "failed", None)}
    with Admin(shop.app) as admin:
        (found,) = admin.show(InboxFilter(consumer="ordered", message_id="2"))
        assert found.waits_for is not None
        assert found.waits_for.next_attempt_at is not None
        admin.discard(InboxFilter(consumer="ordered", message_id="1"))
    assert shop.waits("ordered") == {"3": ("2", "pending", None)}


def test_a_dead_one_is_in_the_way_where_the_handler_says_so(shop: Shop) -> None:
    assert shop.take("blocking", "1", do="die") == Outcome.DEAD
    assert shop.take("blocking", "2") == Outcome.DEFERRED
    assert shop.waits("blocking") == {"2": ("1", "dead", None)}
    assert shop.take("ordered", "1", do="die") == Outcome.DEAD
    assert shop.take("ordered", "2", do="fail") == Outcome.FAILED
    assert shop.waits("ordered") == {}


def test_a_version_names_the_one_that_is_missing_or_the_row_that_has_it(shop: Shop) -> None:
    assert shop.take("versions", "3", version=3) == Outcome.DEFERRED
    assert shop.waits("versions") == {"3": (None, None, 1)}
    assert shop.take("versions", "1", version=1) == Outcome.PROCESSED
    assert shop.waits("versions") == {"3": (None, None, 2)}
    assert shop.take("versions", "5", version=5) == Outcome.DEFERRED
    assert shop.waits("versions") == {"3": (None, None, 2), "5": (None, None, 2)}
    assert shop.take("versions", "2", version=2, do="fail") == Outcome.FAILED
    assert shop.waits("versions") == {"3": ("2", "failed", None), "5": ("2", "failed", None)}
    assert shop.take("versions", "x", version=2, key="other") == Outcome.DEFERRED
    assert shop.waits("versions")["x"] == (None, None, 1)


def test_a_dead_version_is_named(shop: Shop) -> None:
    assert shop.take("versions", "1", version=1, do="die") == Outcome.DEAD
    assert shop.take("versions", "2", version=2) == Outcome.DEFERRED
    assert shop.waits("versions") == {"2": ("1", "dead", None)}


def test_where_any_version_may_be_the_first_only_rows_are_in_the_way(shop: Shop) -> None:
    assert shop.take("anywhere", "7", version=7, do="fail") == Outcome.FAILED
    assert shop.take("anywhere", "9", version=9) == Outcome.DEFERRED
    assert shop.waits("anywhere") == {"9": ("7", "failed", None)}


def test_without_an_order_nothing_waits(shop: Shop) -> None:
    for each in "12":
        assert shop.take("free", each, do="fail") == Outcome.FAILED
    assert shop.waits("free") == {}


SHOP = """
import os
from txbox import App, Message
app = App(os.environ["SHOP_URL"])
@app.handler("a", consumer="ordered", ordered=True)
def in_order(message: Message, tx): ...
@app.handler("a", consumer="versions", sequence="body.version")
def versions(message: Message, tx): ...
"""


def test_the_commands_show_it(sqlite_url: str, tmp_path: Path) -> None:
    other_shop = Shop(sqlite_url)
    other_shop.take("ordered", "first", do="fail")
    other_shop.take("ordered", "second")
    other_shop.take("versions", "third", version=3)
    other_shop.app.close()
    (tmp_path / "shop.py").write_text(SHOP)

    def txbox(*words: str) -> str:
        return subprocess.run(
            [sys.executable, "-m", "txbox", *words, "--app", "shop:app"],
            cwd=tmp_path, env={**os.environ, "SHOP_URL": sqlite_url},
            capture_output=True, text=True, timeout=DEADLINE_S, check=True,
        ).stdout  # fmt: skip

    listed = txbox("list")
    assert "WAITS FOR" in listed
    assert "version 1" in listed
    assert re.search(
        r"waits for +first \(failed, next attempt 20", txbox("show", "ordered", "second")
    )
    assert "version 1 of its key, which has not arrived" in txbox("show", "versions", "third")
