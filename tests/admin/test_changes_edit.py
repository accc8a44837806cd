"""`edit`: a dead message corrected in place, on every database; what came stays readable, its copies duplicates."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest

from tests.support.databases import NewDatabase
from tests.support.shop import CONSUMER, Shop, opened, paid, shop
from tests.support.waiting import DEADLINE_S
from txbox import ConfigurationError, Headers, Message, Outcome, RetryPolicy
from txbox.admin import Admin, InboxFilter, MessageChanged, QuarantineFilter
from txbox.events import RowsChanged
from txbox.maintenance import Task, run_once
from txbox.policy import Retention

__all__ = ["shop"]

ONCE = RetryPolicy(max_attempts=1)
WRONG, RIGHT = b'{"cents": "12"}', b'{"cents": 12}'


def strict(shop: Shop, **options: Any) -> list[Message[Any]]:
    """Register a handler that takes whole cents only; returns what it has taken."""
    taken: list[Message[Any]] = []

    def check(message: Message[Any], tx: Any) -> None:
        del tx
        if not isinstance(message.json()["cents"], int):
            raise TypeError("cents is no number")
        taken.append(message)

    shop.handler(check, retry=ONCE, **options)
    return taken


@pytest.fixture
def admin(shop: Shop) -> Iterator[Admin]:
    with Admin(shop.app) as made:
        yield made


def replaced(admin: Admin, status: str = "replaced") -> list[Any]:
    where = QuarantineFilter(consumer=CONSUMER, message_id="m1")
    return [row for row in admin.show(where, reveal=True) if row.status == status]


def test_a_dead_message_is_corrected_and_runs(shop: Shop, admin: Admin) -> None:
    taken = strict(shop)
    came = paid("m1", WRONG, headers=[("tenant", "a"), ("Trace", "t")])
    assert shop.deliver(came) is Outcome.DEAD
    before = admin.show(InboxFilter(consumer=CONSUMER, message_id="m1"))[0]

    edited = admin.edit(
        CONSUMER,
        "m1",
        payload=RIGHT,
        headers={"TENANT": "b", "trace": None},
        actor="anna",
        reason="typo",
    )
    assert edited.payload_bytes == (len(WRONG), len(RIGHT))
    assert edited.headers == ("tenant", "trace")
    (kept,) = replaced(admin)
    assert kept.payload == WRONG
    assert kept.headers == (("tenant", "a"), ("Trace", "t"))
    assert kept.reason == "edited by anna: typo"
    now = admin.show(InboxFilter(consumer=CONSUMER, message_id="m1"))[0]
    assert (now.status, now.attempts, now.arrival) == ("failed", 0, before.arrival)
    assert now.payload_hash == before.payload_hash

    # a copy of what came is a duplicate in every state, and never another payload
    assert shop.deliver(came) is Outcome.DEFERRED
    assert shop.work() == [Outcome.PROCESSED]
    assert shop.deliver(came) is Outcome.DUPLICATE
    assert [(message.payload, message.headers) for message in taken] == [
        (RIGHT, Headers([("TENANT", "b")]))
    ]
    assert shop.effects("m1") == 1
    audit = shop.raw.rows("SELECT actor, action, affected, reason FROM txbox_audit")
    assert audit == [("anna", "edit", 1, "typo")]
    assert [event.action for event in shop.emitted(RowsChanged)] == ["edit"]
    assert any(
        said.kind == "replaced" for place in admin.explain("m1").places for said in place.sentences
    )


def test_what_is_edited_twice_keeps_both_versions(shop: Shop, admin: Admin) -> None:
    strict(shop)
    shop.deliver(paid("m1", WRONG))
    for payload in (b'{"cents": null}', RIGHT, WRONG):
        admin.edit(CONSUMER, "m1", payload=payload)
    assert {row.payload for row in replaced(admin)} == {WRONG, b'{"cents": null}', RIGHT}


def test_a_stranger_with_what_an_operator_has_replaced_is_set_aside(
    shop: Shop, admin: Admin
) -> None:
    """A known id with another payload waits for a decision, although the same bytes stood in the row for a while."""
    strict(shop)
    wrote = b'{"cents": null}'
    shop.deliver(paid("m1", WRONG))
    for payload in (wrote, RIGHT):
        admin.edit(CONSUMER, "m1", payload=payload)
    late = paid("m1", wrote, key="other", content_type="text/plain")
    assert shop.deliver(late) is Outcome.QUARANTINED
    (waiting,) = replaced(admin, "quarantined")
    assert (waiting.payload, waiting.seen) == (wrote, 2)
    assert (waiting.key, waiting.content_type) == ("other", "text/plain")
    assert "edited by" not in str(waiting.reason)
    assert {row.payload for row in replaced(admin)} == {WRONG}
    # and it stays so: the next edit that replaces these bytes takes it from nobody
    admin.edit(CONSUMER, "m1", payload=wrote)
    admin.edit(CONSUMER, "m1", payload=RIGHT)
    assert len(replaced(admin, "quarantined")) == 1


def test_of_two_who_expect_a_version_one_edits_it(shop: Shop, admin: Admin) -> None:
    strict(shop)
    shop.deliver(paid("m1", WRONG))
    version = admin.edit(CONSUMER, "m1", payload=RIGHT, dry_run=True).version
    together = threading.Barrier(2)

    def edit(cents: int) -> str:
        with Admin(shop.url) as mine:
            mine.schema()
            together.wait(DEADLINE_S)
            try:
                mine.edit(CONSUMER, "m1", payload=b'{"cents": %d}' % cents, expected=version)
            except ConfigurationError as error:
                return str(error)
        return "edited"

    with ThreadPoolExecutor(2) as pool:
        ends = sorted(pool.map(edit, (1, 2)))
    # the second one meets what the first has written, or its lock
    assert ends[1] == "edited"
    assert "changed since you read it" in ends[0] or "locked by a transaction" in ends[0]
    assert [row.payload for row in replaced(admin)] == [WRONG]
    with pytest.raises(MessageChanged):
        admin.edit(CONSUMER, "m1", payload=RIGHT, expected=version)


def test_headers_and_content_type_are_of_the_version(shop: Shop, admin: Admin) -> None:
    strict(shop)
    shop.deliver(paid("m1", WRONG))
    seen = [admin.edit(CONSUMER, "m1", payload=WRONG).version]
    seen.append(admin.edit(CONSUMER, "m1", headers={"a": "1"}).version)
    seen.append(admin.edit(CONSUMER, "m1", content_type="text/plain").version)
    seen.append(admin.edit(CONSUMER, "m1", payload=WRONG, dry_run=True).version)
    assert seen[0] == seen[1]
    assert len(set(seen)) == 3


def test_a_dry_run_checks_and_changes_nothing(shop: Shop, admin: Admin) -> None:
    strict(shop)
    shop.deliver(paid("m1", WRONG))
    assert admin.edit(CONSUMER, "m1", payload=RIGHT, dry_run=True).dry_run
    assert shop.row("m1").status == "dead"
    assert not replaced(admin)
    assert shop.raw.value("SELECT count(*) FROM txbox_audit") == 0


def test_what_its_handler_could_not_take_is_refused(shop: Shop, admin: Admin) -> None:
    strict(shop, message_id="body.id", sequence=None)
    shop.deliver(Message(topic="orders", payload=b'{"id": "m1", "cents": "1"}'))
    for payload, said in (
        (b"not json", "could not read the edited message"),
        (b'{"id": "m2", "cents": 1}', "has another id or version"),
        (
            json.dumps({"id": "m1", "cents": 1, "x": "y" * 2_000_000}).encode(),
            "Limits.payload_bytes|read it so",
        ),
    ):
        with pytest.raises(ConfigurationError, match=said):
            admin.edit(CONSUMER, "m1", payload=payload)
    assert shop.row("m1").status == "dead"
    admin.edit(CONSUMER, "m1", payload=b'{"id": "m1", "cents": 1}')
    assert shop.work() == [Outcome.PROCESSED]


def test_what_cannot_be_edited_says_why(shop: Shop, admin: Admin) -> None:
    strict(shop)
    shop.deliver(paid("m1", RIGHT))
    with pytest.raises(ConfigurationError, match="only dead and failed"):
        admin.edit(CONSUMER, "m1", payload=WRONG)
    with pytest.raises(ConfigurationError, match="no such message"):
        admin.edit(CONSUMER, "m2", payload=WRONG)
    with pytest.raises(ConfigurationError, match="Nothing to edit"):
        admin.edit(CONSUMER, "m1")
    shop.deliver(paid("m3", WRONG))
    shop.raw.execute(
        "UPDATE txbox_inbox SET payload = NULL, has_payload = FALSE WHERE status = 'dead'"
    )
    with pytest.raises(ConfigurationError, match="has no payload"):
        admin.edit(CONSUMER, "m3", payload=RIGHT)


def test_what_was_replaced_is_kept_as_long_as_its_message(shop: Shop, admin: Admin) -> None:
    strict(shop)
    shop.deliver(paid("m1", WRONG))
    admin.edit(CONSUMER, "m1", payload=RIGHT)
    shop.app.retention = Retention(quarantine=timedelta(microseconds=1), quarantine_bytes=0)
    # what was done in this very millisecond is not older than it
    shop.raw.execute(
        "UPDATE txbox_quarantine SET received_at = '2020-01-01 00:00:00.000', updated_at = '2020-01-01 00:00:00.000'"
    )
    run_once(shop.app, "prune-quarantine", Task())
    assert [row.payload for row in replaced(admin)] == [WRONG]
    shop.raw.execute("DELETE FROM txbox_inbox")
    run_once(shop.app, "prune-quarantine", Task())
    assert not replaced(admin)


class Reversed:
    """A codec."""

    key_id = "k1"

    def encode(self, data: bytes) -> bytes:
        return base64.b64encode(data[::-1])

    def decode(self, data: bytes, key_id: str) -> bytes:
        assert key_id == "k1"
        return base64.b64decode(data)[::-1]


def test_through_a_codec(new_database: NewDatabase) -> None:
    with opened(new_database("sqlite"), codec=Reversed()) as coded, Admin(coded.app) as admin:
        taken = strict(coded)
        coded.deliver(paid("m1", WRONG))
        with Admin(coded.url) as bare, pytest.raises(ConfigurationError, match="codec"):
            bare.edit(CONSUMER, "m1", payload=RIGHT)
        admin.edit(CONSUMER, "m1", payload=RIGHT)
        assert RIGHT not in coded.raw.value("SELECT payload FROM txbox_inbox")
        (kept,) = replaced(admin)
        assert kept.payload == WRONG
        assert "cents is no number" in str(
            admin.show(InboxFilter(consumer=CONSUMER, message_id="m1"))[0].error
        )
        assert coded.work() == [Outcome.PROCESSED]
        assert [message.payload for message in taken] == [RIGHT]


def test_an_edit_back_and_forth_keeps_the_reason_of_the_last_one(shop: Shop, admin: Admin) -> None:
    """The copy under a hash that is there already is that of the last edit, and so is its reason."""
    strict(shop)
    assert shop.deliver(paid("m1", WRONG)) is Outcome.DEAD
    for payload, reason in ((RIGHT, "first"), (WRONG, "second"), (RIGHT, "third")):
        admin.edit(CONSUMER, "m1", payload=payload, actor="anna", reason=reason)
    reasons = {row.payload: row.reason for row in replaced(admin)}
    assert reasons == {WRONG: "edited by anna: third", RIGHT: "edited by anna: second"}
