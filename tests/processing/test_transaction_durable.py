"""What is acknowledged is on disk, whatever synchronous_commit a role or database is set to (promise 2.9)."""

from __future__ import annotations

import dataclasses

import pytest

from tests.support.shop import CONSUMER, Shop, opened, paid
from txbox import Outcome
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
