"""In order, a message that somebody else works on holds those of its key that came behind it (promise 5.1)."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import pytest

from tests.support.blocked import acquired
from tests.support.databases import NewDatabase
from tests.support.shop import CONSUMER, Shop, opened, paid
from txbox import Inbox, Limits, Outcome
from txbox.handlers import Handler
from txbox.session import drive

pytestmark = pytest.mark.every_database

HELD = [Outcome.IN_PROGRESS, Outcome.IN_PROGRESS, Outcome.PROCESSED]


def take(shop: Shop, handler: Handler) -> list[Outcome]:
    """A head, what follows it, and a message of another key."""
    messages = [paid("head", key="k"), paid("behind", key="k"), paid("other", key="o")]
    settled = drive(shop.app._any_sync(), shop.app.intake.take, handler, messages)
    return [answer.outcome for answer in settled]


def check_order(shop: Shop, handler: Handler) -> None:
    """Nobody holds the head any more: it comes first."""
    assert shop.calls == ["other"]
    assert take(shop, handler) == [Outcome.PROCESSED, Outcome.PROCESSED, Outcome.DUPLICATE]
    assert shop.calls == ["other", "head", "behind"]


@contextmanager
def held_elsewhere(shop: Shop) -> Iterator[None]:
    """Another process has claimed the head and has not committed."""
    other = acquired(shop.app._any_sync())
    other.begin(())
    assert Inbox(CONSUMER).accept(other.native, paid("head", key="k"))
    yield
    other.rollback()
    other.discard()


def test_a_head_that_another_process_has_holds_its_key_in_a_batch(
    new_database: NewDatabase,
) -> None:
    limits = Limits(lock_timeout=timedelta(seconds=0.3))
    with opened(new_database("postgresql"), limits=limits) as shop:
        handler = shop.handler(ordered=True)
        with held_elsewhere(shop):
            assert take(shop, handler) == HELD
        check_order(shop, handler)


def test_a_head_that_another_thread_has_holds_its_key_in_a_batch(database_url: str) -> None:
    with opened(database_url, limits=Limits(lock_timeout=timedelta(seconds=0.3))) as shop:
        handler = shop.handler(ordered=True)
        in_flight = shop.app.protocol.in_flight
        assert in_flight.enter(CONSUMER, "head") is None
        assert take(shop, handler) == HELD
        in_flight.leave(CONSUMER, "head")
        check_order(shop, handler)


def test_a_head_that_one_more_thread_gave_up_and_a_process_has_holds_its_key(
    new_database: NewDatabase,
) -> None:
    limits = Limits(lock_timeout=timedelta(seconds=2))
    with opened(new_database("postgresql"), limits=limits) as shop:
        handler = shop.handler(ordered=True)
        in_flight = shop.app.protocol.in_flight
        assert in_flight.enter(CONSUMER, "head") is None
        leaving = threading.Timer(0.2, in_flight.leave, args=(CONSUMER, "head"))
        with held_elsewhere(shop):
            leaving.start()
            assert take(shop, handler) == HELD
        leaving.join()
        check_order(shop, handler)


def test_a_head_that_comes_free_in_time_is_processed_before_what_is_behind_it(
    database_url: str,
) -> None:
    with opened(database_url, limits=Limits(lock_timeout=timedelta(seconds=20))) as shop:
        handler = shop.handler(ordered=True)
        in_flight = shop.app.protocol.in_flight
        assert in_flight.enter(CONSUMER, "head") is None
        leaving = threading.Timer(0.2, in_flight.leave, args=(CONSUMER, "head"))
        leaving.start()
        assert take(shop, handler) == [Outcome.PROCESSED] * 3
        leaving.join()
        assert shop.calls == ["other", "head", "behind"]
