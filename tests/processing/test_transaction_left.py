"""Handlers that have left the claiming transaction when they fail: it never runs again (promise 2.2).

`scenarios/contract` has what every kind of connection must do; here is what only psycopg does, or only PostgreSQL.
"""

from __future__ import annotations

from typing import Any

import psycopg
import pytest

from tests.support.leasing import Leasing
from tests.support.shop import Shop, add_effect, execute, opened, paid, statuses
from txbox import Message, Outcome
from txbox.events import TransactionRetried
from txbox.handlers import Handler
from txbox.processing.intake import Mode
from txbox.session import drive
from txbox.testing import meanwhile

pytestmark = pytest.mark.every_database


def raises(tx: Any, code: str) -> None:
    execute(tx, f"DO $$ BEGIN RAISE 'no' USING ERRCODE = '{code}'; END $$")


def commits_its_own(message: Message[Any], tx: Any) -> None:
    tx.rollback()
    add_effect(tx, message.id)
    tx.commit()


@pytest.mark.parametrize("mode", ["inline", "stored"])
@pytest.mark.parametrize("code", ["40001", "40P01", "26000", "22012", "57014"])
def test_an_error_behind_a_commit_of_its_own_is_not_tried_again(
    postgresql_url: str, code: str, mode: str
) -> None:
    """A deadlock or a serialization failure, too, which is tried again at once in the claiming transaction."""

    def body(message: Message[Any], tx: Any) -> None:
        commits_its_own(message, tx)
        raises(tx, code)

    with opened(postgresql_url) as shop:
        shop.handler(body, mode=mode)
        outcomes = [shop.deliver(paid("a"))] if mode == "inline" else []
        if mode == "stored":
            shop.deliver(paid("a"))
            outcomes = shop.work()
        assert (outcomes, shop.calls, shop.effects("a")) == ([Outcome.DEAD], ["a"], 1)
        assert shop.row("a").error_type == "TransactionBroken"
        assert shop.emitted(TransactionRetried) == []


@pytest.mark.parametrize("code", ["40001", "40P01"])
def test_a_conflict_in_the_claiming_transaction_is_still_tried_again(
    postgresql_url: str, code: str
) -> None:
    def body(message: Message[Any], tx: Any) -> None:
        if len(shop.calls) == 1:
            raises(tx, code)

    with opened(postgresql_url) as shop:
        shop.handler(body)
        assert shop.deliver(paid("a")) is Outcome.PROCESSED
        assert (shop.calls, shop.effects("a")) == (["a", "a"], 1)


def test_a_rollback_that_deallocates_hides_nothing(postgresql_url: str) -> None:
    """psycopg's rollback takes txbox's prepared statements with its own: close then fails for want of its plan."""

    def body(message: Message[Any], tx: Any) -> None:
        tx.execute("SELECT 1", prepare=True)
        if message.id == "bad":
            commits_its_own(message, tx)

    with opened(postgresql_url) as shop:
        shop.handler(body)
        assert [shop.deliver(paid(each)) for each in "abc"] == [Outcome.PROCESSED] * 3
        assert shop.deliver(paid("bad")) is Outcome.DEAD
        assert (shop.calls.count("bad"), shop.effects("bad")) == (1, 1)


def take(shop: Shop, handler: Handler, ids: list[str], way: str) -> list[Outcome]:
    messages = [*map(paid, ids)]
    if way != "leased":
        settled = drive(shop.app._any_sync(), shop.app.intake.take, handler, messages)
        return [answer.outcome for answer in settled]
    leasing = Leasing(
        drive(shop.app._any_sync(), shop.app.intake.take, handler, messages, Mode.LEASED)
    )
    return [
        answer.outcome
        for answer in drive(
            shop.app._any_sync(),
            shop.app.protocol.run_leased_many,
            handler,
            leasing.rows,
            leasing.token,
        )
    ]


@pytest.mark.parametrize("way", ["delivered", "savepoints", "pipelined", "leased"])
@pytest.mark.parametrize("ends", ["with", "close"])
def test_a_handler_that_closes_its_connection_costs_only_its_message(
    postgresql_url: str, ends: str, way: str
) -> None:
    """psycopg's `with tx:` rolls back around an error and closes the connection."""
    culprits = {"m3", "m17", "m38"}

    def body(message: Message[Any], tx: Any) -> None:
        if message.id not in culprits:
            return
        if ends == "with":
            with tx:
                raise ValueError("inside of `with tx:`")
        tx.close()
        raise ValueError("after close()")

    ids = [f"m{number}" for number in range(40)]
    with opened(postgresql_url) as shop:
        handler = shop.handler(body, pipeline=way == "pipelined")
        if way in ("savepoints", "pipelined"):
            pace = shop.app.protocol.batch_sizes.of(handler)
            for _ in range(50):
                pace.failed(8)
        outcomes = dict(zip(ids, take(shop, handler, ids, way), strict=True))
        assert {
            message_id for message_id in ids if outcomes[message_id] is Outcome.DEAD
        } == culprits
        assert statuses(shop.raw) == {"processed": 37, "dead": 3}
        assert shop.effects() == 37
        assert {culprit: shop.calls.count(culprit) for culprit in culprits} == dict.fromkeys(
            culprits, 1
        )


@pytest.mark.parametrize("point", ["after:record_insert", "before:record_attempt"])
def test_a_stray_thread_that_breaks_a_transaction_of_txbox_costs_a_retry(
    postgresql_url: str, point: str
) -> None:
    """What a handler left running fails a statement on the connection that txbox records the failure with."""
    connections: list[Any] = []

    def body(message: Message[Any], tx: Any) -> None:
        connections.append(tx)
        raise ValueError("no")

    refused: list[psycopg.Error] = []

    def stray() -> None:
        try:
            connections[0].execute("SELECT 1 / 0")
        except psycopg.Error as error:
            refused.append(error)

    with opened(postgresql_url) as shop:
        shop.handler(body)
        with meanwhile(point, stray):
            assert shop.deliver(paid("a")) is Outcome.FAILED
        assert [type(error).__name__ for error in refused] == ["DivisionByZero"]
        assert shop.row("a").attempts == 1
        assert shop.deliver(paid("b")) is Outcome.FAILED
