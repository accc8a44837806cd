"""Tests of a handler with txbox's fixtures: pytest pytest_billing.py"""

import sqlite3
from datetime import timedelta

import pytest

from txbox import App, Message, Outcome, Retry


def register(app: App) -> None:
    """The service under test."""

    @app.handler("orders", consumer="billing")
    def bill(message: Message[int], tx: sqlite3.Connection) -> None:
        if message.body > 100 and message.attempt == 1:
            raise Retry(after=timedelta(hours=1))
        tx.execute("INSERT INTO ledger VALUES (?)", (message.body,))


@pytest.fixture
def ledger(txbox_app):
    with txbox_app.transaction() as tx:
        tx.execute("CREATE TABLE ledger (amount INTEGER)")
    register(txbox_app)

    def amounts():
        with txbox_app.transaction() as tx:
            return [amount for (amount,) in tx.execute("SELECT amount FROM ledger")]

    return amounts


def order(name, amount=5):
    return Message(id=name, topic="orders", payload=b"%d" % amount)


def test_an_order_that_comes_twice_is_booked_once(txbox_deliver, ledger):
    assert txbox_deliver(order("o-1")) is Outcome.PROCESSED
    assert txbox_deliver(order("o-1")) is Outcome.DUPLICATE
    assert ledger() == [5]


def test_a_large_order_waits_an_hour(txbox_deliver, txbox_drain, txbox_clock, ledger):
    assert txbox_deliver(order("o-1", 500)) is Outcome.FAILED
    txbox_clock.advance(timedelta(minutes=59))
    assert txbox_drain() == []
    txbox_clock.advance(timedelta(minutes=1))
    assert txbox_drain() == [Outcome.PROCESSED]
    assert ledger() == [500]


def test_no_crash_loses_or_doubles_an_order(txbox_crash_everywhere, ledger):
    ended = txbox_crash_everywhere(order)
    assert set(ended.values()) == {Outcome.PROCESSED, Outcome.DUPLICATE}
    assert len(ledger()) == len(ended) + 1  # the delivery that found the points
