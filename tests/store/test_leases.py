"""What a claim meets, what a lease is worth, what pruning leaves (promises 2.12, 4, 7.1)."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from tests.support.meddling import Verb, drive_meddled
from tests.support.shop import AT_ONCE, CONSUMER, TOPIC, Shop, as_id, paid, quarantined
from txbox import Lease, Limits, Message, Outcome
from txbox.maintenance import Task, run_once
from txbox.session import Result, Statements, drive
from txbox.store import leases
from txbox.store.inbox import Failure

pytestmark = pytest.mark.every_database


def test_existing_row_decides(shop: Shop) -> None:
    shop.handler()
    assert shop.deliver(paid("a")) is Outcome.PROCESSED
    for status, outcome in (
        ("processed", Outcome.DUPLICATE),
        ("dead", Outcome.DUPLICATE),
        ("discarded", Outcome.DUPLICATE),
        ("pending", Outcome.DEFERRED),
        ("failed", Outcome.DEFERRED),
    ):
        shop.force("UPDATE txbox_inbox SET status = ?, has_payload = ?", (status, True))
        assert shop.deliver(paid("a")) is outcome, status
    assert (shop.calls, shop.effects(), quarantined(shop.raw)) == (["a"], 1, [])


def test_failed_row_without_payload_gets_that_of_the_redelivery(shop: Shop) -> None:
    handler = shop.handler()
    drive(
        shop.app._any_sync(),
        shop.app.store.record_failure,
        CONSUMER,
        handler.arrival(paid("a", b"{}"), Limits()),
        Failure(error_type="ValueError", error="late", fingerprint="f", delay_s=0.0),
        AT_ONCE,
        token="",
        lock_timeout=Limits().lock_timeout,
    )
    shop.raw.execute("UPDATE txbox_inbox SET payload = NULL, has_payload = ?", (False,))
    assert shop.work() == []  # nothing to run it with
    assert shop.deliver(paid("a", b"{}")) is Outcome.DEFERRED
    assert shop.row("a").has_payload
    assert shop.work() == [Outcome.PROCESSED]
    assert shop.effects("a") == 1


def test_row_pruned_between_claim_and_classify_is_claimed_again(shop: Shop) -> None:
    handler = shop.handler()
    assert shop.deliver(paid("a")) is Outcome.PROCESSED
    hidden = False

    async def pruned_once(verb: Verb, statements: Statements, carried_out: Any) -> Any:
        """The first classification finds nothing, as if the row had gone."""
        nonlocal hidden
        answer = await carried_out()
        if statements and statements[0].name == "classify" and not hidden:
            hidden = True
            return Result((), 0) if verb == "execute" else [Result((), 0)]
        return answer

    arrivals = [handler.arrival(paid("a"), Limits())]
    connections = shop.app._any_sync()
    settled = drive_meddled(connections, pruned_once, shop.app.protocol.deliver, handler, arrivals)
    assert hidden
    assert settled["a"].outcome is Outcome.DUPLICATE
    assert shop.effects("a") == 1


# -- leases ------------------------------------------------------------------------------------


def test_starts_are_counted_before_the_handler_and_given_back_after(shop: Shop) -> None:
    seen: list[int] = []

    def fails_once(message: Message[Any], tx: Any) -> None:
        seen.append(message.attempt)
        if message.attempt == 1:
            raise ValueError("once")

    shop.handler(fails_once, mode="stored")
    shop.deliver(paid("a"))
    ((leased, token),) = shop.lease()
    assert (shop.row("a").starts, shop.row("a").status) == (1, "processing")
    assert shop.run(leased, token) is Outcome.FAILED
    assert (shop.row("a").starts, shop.row("a").attempts) == (0, 1)
    assert shop.work() == [Outcome.PROCESSED]
    assert (shop.row("a").starts, seen) == (0, [1, 2])


def test_infrastructure_release_gives_the_start_back(shop: Shop) -> None:
    shop.handler(mode="stored")
    shop.deliver(paid("a"))
    ((_, token),) = shop.lease()
    release, store = leases.release, shop.app.store
    assert (
        drive(shop.app._any_sync(), release, store, CONSUMER, ["a"], token="not it", delay_s=0) == 0
    )
    assert drive(shop.app._any_sync(), release, store, CONSUMER, ["a"], token=token, delay_s=0) == 1
    assert (shop.row("a").status, shop.row("a").starts) == ("pending", 0)


def test_heartbeat_keeps_a_lease_from_rescue(shop: Shop) -> None:
    shop.handler(mode="stored")
    shop.deliver(paid("a"))
    ((_, token),) = shop.lease()
    shop.raw.execute("UPDATE txbox_inbox SET lease_until = received_at")
    beat, store = leases.heartbeat, shop.app.store
    assert (
        drive(shop.app._any_sync(), beat, store, CONSUMER, ["a"], token="not it", lease=Lease())
        == 0
    )
    assert (
        drive(shop.app._any_sync(), beat, store, CONSUMER, ["a"], token=token, lease=Lease()) == 1
    )
    assert shop.rescue() == []


@pytest.mark.parametrize("heads_only", [False, True], ids=["any row", "heads of keys"])
def test_of_those_whose_last_run_never_ended_the_one_due_longest_is_leased_first(
    shop: Shop, heads_only: bool
) -> None:
    """However often it was started: new ones come all the time, and would keep it waiting."""
    shop.handler(mode="stored")
    for name in ("a", "b", "c"):
        shop.deliver(paid(name, key=name))
    shop.make_due()
    shop.raw.execute("UPDATE txbox_inbox SET starts = 1")
    shop.raw.execute(
        "UPDATE txbox_inbox SET starts = 2 WHERE message_id = ?", (as_id(shop.raw, "a"),)
    )
    order = []
    for _ in range(3):
        ((leased, _),) = shop.lease(suspect=True, heads_only=heads_only)
        order.append(leased.arrival.message_id)
    assert order == ["a", "b", "c"]


def test_untransacted_handler_is_leased_and_completed_fenced(shop: Shop) -> None:
    calls: list[str] = []

    @shop.app.handler(TOPIC, consumer=CONSUMER, transactional=False, retry=AT_ONCE)
    def call_the_bank(message: Message[Any]) -> None:
        inbox_row = shop.row("a")
        calls.append(f"{message.idempotency_key} {inbox_row.status} {inbox_row.starts}")
        if len(calls) == 1:
            raise ValueError("the bank hung up")

    assert shop.deliver(paid("a")) is Outcome.FAILED
    assert shop.work() == [Outcome.PROCESSED]
    assert calls == ["billing:a processing 1"] * 2
    assert shop.deliver(paid("a")) is Outcome.DUPLICATE
    row = shop.row("a")
    assert (row.status, row.attempts, row.starts, row.has_payload) == ("processed", 1, 0, False)


def test_untransacted_handler_whose_lease_was_lost_does_not_complete(shop: Shop) -> None:
    calls: list[str] = []

    @shop.app.handler(TOPIC, consumer=CONSUMER, transactional=False, mode="stored", retry=AT_ONCE)
    def slow(message: Message[Any]) -> None:
        calls.append(str(message.id))
        if len(calls) == 1:
            shop.raw.execute("UPDATE txbox_inbox SET lease_until = received_at")
            assert len(shop.rescue()) == 1

    assert shop.deliver(paid("a")) is Outcome.DEFERRED
    assert shop.work() == [Outcome.IN_PROGRESS]
    assert shop.row("a").status == "failed"
    assert shop.work(suspect=True) == [Outcome.PROCESSED]
    assert calls == ["a", "a"]


# -- retention ---------------------------------------------------------------------------------


def test_prune_deletes_finished_rows_only(shop: Shop) -> None:
    kept = ("failed", "dead", "pending", "processing")
    gone = ("processed", "discarded")
    shop.handler()
    for status in kept + gone:
        shop.deliver(paid(status))
        shop.force(
            "UPDATE txbox_inbox SET status = ?, lease_until = NULL WHERE message_id = ?",
            (status, status.encode() if shop.raw.product == "mysql" else status),
        )
    assert shop.deliver(Message(id="", topic=TOPIC)) is Outcome.QUARANTINED
    assert shop.raw.execute("UPDATE txbox_inbox SET processed_at = '2020-01-01 00:00:00.000'") == 6
    assert run_once(shop.app, "prune", Task(dry_run=True)).rows == 2
    assert run_once(shop.app, "prune", Task(older_than=timedelta(days=1))).rows == 2
    found = shop.raw.rows("SELECT status FROM txbox_inbox")
    assert {str(row) for (row,) in found} == set(kept)
    assert len(quarantined(shop.raw)) == 1


def test_prune_keeps_what_is_younger_than_the_retention(shop: Shop) -> None:
    shop.handler()
    shop.deliver(paid("a"))
    assert run_once(shop.app, "prune", Task(older_than=timedelta(hours=1))).rows == 0
    assert shop.deliver(paid("a")) is Outcome.DUPLICATE
