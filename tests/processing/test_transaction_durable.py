"""What is acknowledged is on disk, whatever synchronous_commit a role or database is set to (promise 2.9)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from tests.support.blocked import acquired
from tests.support.databases import NewDatabase, names
from tests.support.shop import CONSUMER, Shop, opened, paid
from txbox import Inbox, Outcome, RetryPolicy
from txbox.message import Headers

pytestmark = pytest.mark.every_database

# at COMMIT, from within the transaction that ends
_LOOK = (
    "CREATE FUNCTION look() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN"
    " INSERT INTO seen VALUES (TG_TABLE_NAME, current_setting('synchronous_commit')); RETURN NULL; END $$"
)


def looked_at(shop: Shop) -> None:
    """Turn synchronous_commit off for every new session, and note what each commit was like."""
    name = shop.raw.value("SELECT current_database()")
    shop.raw.execute(f"ALTER DATABASE {name} SET synchronous_commit = off")
    shop.raw.execute("CREATE TABLE seen (place text, setting text)")
    shop.raw.execute(_LOOK)
    for table in ("txbox_inbox", "txbox_attempt", "txbox_quarantine"):
        shop.raw.execute(
            f"CREATE CONSTRAINT TRIGGER look AFTER INSERT OR UPDATE ON {table}"
            " DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION look()"
        )


def commits(shop: Shop) -> set[tuple[str, str]]:
    return {(str(row[0]), str(row[1])) for row in shop.raw.rows("SELECT place, setting FROM seen")}


def test_a_stored_message_is_durable(postgresql_url: str) -> None:
    with opened(postgresql_url) as shop:
        looked_at(shop)
        shop.handler(mode="stored")
        assert shop.deliver(paid("a")) is Outcome.DEFERRED
        assert commits(shop) == {("txbox_inbox", "on")}


def test_a_parked_failure_is_durable(postgresql_url: str) -> None:
    def fail(message: object, tx: object) -> None:
        raise ValueError("no")

    with opened(postgresql_url) as shop:
        looked_at(shop)
        shop.handler(fail)
        assert shop.deliver(paid("a")) is Outcome.FAILED
        assert commits(shop) == {("txbox_inbox", "on"), ("txbox_attempt", "on")}


def test_a_quarantined_message_is_durable(postgresql_url: str) -> None:
    with opened(postgresql_url) as shop:
        looked_at(shop)
        shop.handler()
        message = dataclasses.replace(paid("a"), id=None, headers=Headers())
        assert shop.deliver(message) is Outcome.QUARANTINED
        assert commits(shop) == {("txbox_quarantine", "on")}


def test_a_payload_that_is_given_back_is_durable(postgresql_url: str) -> None:
    with opened(postgresql_url) as shop:
        shop.handler(mode="stored")
        shop.deliver(paid("a"))
        shop.raw.execute(
            "UPDATE txbox_inbox SET has_payload = false, payload = NULL WHERE consumer = ?",
            (CONSUMER,),
        )
        looked_at(shop)
        shop.app.close()
        assert shop.deliver(paid("a")) is Outcome.DEFERRED
        assert commits(shop) == {("txbox_inbox", "on")}


# -- InnoDB: visible before it is on disk ---------------------------------------------------------------
# Seen on MySQL 9.7 without a binary log: another session reads a row whose COMMIT waits for the disk, and SIGKILL
# undoes it. Only the COMMIT of the reader can wait for it, and does so only if the reader has written something
# (docs/decisions/0064-read-before-durable.md).

innodb = pytest.mark.parametrize("product", names("mysql"))


def fail(message: object, tx: object) -> None:
    raise ValueError("no")


def moved(shop: Shop, again: Callable[[], object]) -> bool:
    """Whether something has been committed to the only row, as another session sees it."""
    before = shop.raw.value("SELECT updated_at FROM txbox_inbox")
    again()
    return bool(shop.raw.value("SELECT updated_at FROM txbox_inbox") > before)


@innodb
@pytest.mark.parametrize(
    ("options", "outcome"),
    [
        ({}, Outcome.DUPLICATE),
        ({"keep_result": True}, Outcome.DUPLICATE),
        ({"keep_payload": timedelta(hours=1)}, Outcome.DUPLICATE),
        ({"mode": "stored"}, Outcome.DEFERRED),
        ({"body": fail, "retry": RetryPolicy(base=timedelta(hours=1))}, Outcome.DEFERRED),
        ({"body": fail, "retry": RetryPolicy(max_attempts=1)}, Outcome.DUPLICATE),
    ],
    ids=["inline", "keep_result", "keep_payload", "stored", "failed", "dead"],
)
def test_a_copy_is_acknowledged_after_a_commit_that_wrote(
    new_database: NewDatabase, product: str, options: dict[str, Any], outcome: Outcome
) -> None:
    with opened(new_database(product)) as shop:
        shop.handler(**options)
        shop.deliver(paid("a"))
        outcomes: list[Outcome] = []
        assert moved(shop, lambda: outcomes.append(shop.deliver(paid("a"))))
        assert outcomes == [outcome]
        assert len(shop.calls) == (options.get("mode") != "stored")


@innodb
def test_a_copy_that_is_accepted_writes(new_database: NewDatabase, product: str) -> None:
    with opened(new_database(product)) as shop:

        def accept() -> bool:
            tx = acquired(shop.app._any_sync())
            tx.begin(())
            is_new = bool(Inbox(CONSUMER).accept(tx.native, paid("a")))
            tx.commit(())
            tx.discard()
            return is_new

        assert accept()
        assert moved(shop, lambda: accept() and pytest.fail("it is a copy"))


@innodb
def test_a_copy_of_what_something_unexpected_cost_writes(
    new_database: NewDatabase, product: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one way to an answer without a claim: the failure is not recorded, since the row is another's."""
    with opened(new_database(product)) as shop:
        shop.handler()
        shop.deliver(paid("a"))
        monkeypatch.setattr(shop.app.protocol.transaction, "once", _raises)
        outcomes: list[Outcome] = []
        assert moved(shop, lambda: outcomes.append(shop.deliver(paid("a"))))
        assert outcomes == [Outcome.DUPLICATE]


async def _raises(*_: object) -> None:
    raise TypeError("unexpected")
