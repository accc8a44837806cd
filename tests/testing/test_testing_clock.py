"""A stopped clock decides what is due, on every database; it is restored afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from txbox import App, ConfigurationError, Lease, Message, Outcome, Retry
from txbox.store.dialect import Dialect
from txbox.testing import deliver, drain, frozen_clock, inside

_MESSAGE: Message[Any] = Message(id="m-1", topic="orders", payload=b"1")


@pytest.fixture
def app(database_url: str) -> Iterator[App]:
    with App(database_url, lease=Lease(duration=timedelta(minutes=5))) as app:
        app.init()

        @app.handler("orders", consumer="billing")
        def book(message: Message[int], tx: Any) -> None:
            if message.attempt < 3:
                raise Retry(after=timedelta(minutes=10))

        yield app


@pytest.mark.every_database
def test_a_retry_is_due_to_the_moment(app: App) -> None:
    before = Dialect.statement
    with frozen_clock() as clock:
        assert deliver(app, _MESSAGE) is Outcome.FAILED
        clock.advance(timedelta(minutes=10, milliseconds=-1))
        assert drain(app) == []
        clock.advance(timedelta(milliseconds=1))
        assert drain(app) == [Outcome.FAILED]
        assert drain(app) == []
        clock.advance(timedelta(minutes=10))
        assert drain(app) == [Outcome.PROCESSED]
    assert Dialect.statement is before


@pytest.mark.every_database
def test_drain_ignores_dates_also_while_the_clock_stands(app: App) -> None:
    with frozen_clock(datetime.now(UTC) - timedelta(seconds=1)):
        assert deliver(app, _MESSAGE) is Outcome.FAILED
        assert drain(app, ignore_dates=True) == [Outcome.FAILED, Outcome.PROCESSED]


@pytest.mark.every_database
def test_a_delayed_effect_waits_for_its_time(app: App) -> None:
    done: list[Any] = []

    @app.effect("mail")
    def mail(message: Message[Any]) -> None:
        done.append(message.body)

    with frozen_clock() as clock:
        with app.transaction() as tx:
            app.effects.stage(tx, "mail", {"to": "a"}, delay=timedelta(hours=3))
        assert drain(app) == []
        clock.advance(timedelta(hours=3))
        assert drain(app) == [Outcome.PROCESSED]
    assert done == [{"to": "a"}]


def test_another_time_and_the_transaction_of_a_test(app: App) -> None:
    with frozen_clock(datetime(2031, 5, 1, tzinfo=UTC)) as clock, app.transaction() as tx:
        within = inside(app, tx)
        assert deliver(within, _MESSAGE) is Outcome.FAILED
        clock.advance(timedelta(minutes=10))
        assert drain(within) == [Outcome.FAILED]


def test_a_time_without_a_zone_is_refused() -> None:
    with (
        pytest.raises(ConfigurationError, match="time zone"),
        frozen_clock(datetime.now(UTC).replace(tzinfo=None)),
    ):
        pass
