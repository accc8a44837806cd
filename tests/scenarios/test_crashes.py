"""A worker is killed with SIGKILL in every window around its transaction; the redelivery settles it."""

from __future__ import annotations

import signal

import pytest

from tests.support.scenario_process import Plan, WorkerProcess
from tests.support.shop import Shop, paid, row
from tests.support.waiting import eventually
from txbox import Outcome

PAYLOAD = b'{"cents": 100}'


def killed_at(shop: Shop, point: str, **plan: object) -> None:
    """Deliver "a" to a process that dies at a point."""
    made = Plan(shop.url, deliveries=[("a", PAYLOAD)], crash=point, **plan)  # type: ignore[arg-type]
    with WorkerProcess(made) as worker:
        said = worker.rest()
        assert worker.ended() == -signal.SIGKILL, worker.errors
    assert [line for line in said if "acked" in line] == []


def redelivered(shop: Shop) -> Outcome:
    shop.handler()
    return shop.deliver(paid("a", PAYLOAD))


def check_processed_once(shop: Shop, starts: int = 0) -> None:
    assert shop.effects("a") == 1
    inbox_row = shop.row("a")
    assert (inbox_row.status, inbox_row.attempts, inbox_row.starts, inbox_row.has_payload) == (
        "processed",
        0,
        starts,
        False,
    )
    assert shop.deliver(paid("a", PAYLOAD)) is Outcome.DUPLICATE
    assert shop.effects("a") == 1


@pytest.mark.parametrize("point", ["received", "before:begin"])
def test_crash_before_transaction(shop: Shop, point: str) -> None:
    killed_at(shop, point)
    assert row(shop.raw, "a") is None
    assert redelivered(shop) is Outcome.PROCESSED
    check_processed_once(shop)


def test_crash_after_inbox_insert(shop: Shop) -> None:
    killed_at(shop, "after:claim")
    assert row(shop.raw, "a") is None
    assert redelivered(shop) is Outcome.PROCESSED
    check_processed_once(shop)


def test_crash_after_domain_update(shop: Shop) -> None:
    killed_at(shop, "domain updated")
    assert (row(shop.raw, "a"), shop.effects()) == (None, 0)
    assert redelivered(shop) is Outcome.PROCESSED
    check_processed_once(shop)


@pytest.mark.parametrize("point", ["after:handler", "before:close", "before:commit"])
def test_crash_after_business_logic_before_status_update(shop: Shop, point: str) -> None:
    killed_at(shop, point)
    assert (row(shop.raw, "a"), shop.effects()) == (None, 0)
    assert redelivered(shop) is Outcome.PROCESSED
    check_processed_once(shop)


@pytest.mark.parametrize("point", ["after:commit", "before:ack"])
def test_crash_after_commit_before_ack(shop: Shop, point: str) -> None:
    killed_at(shop, point)
    assert (shop.row("a").status, shop.effects("a")) == ("processed", 1)
    assert redelivered(shop) is Outcome.DUPLICATE
    check_processed_once(shop)
    assert shop.calls == []


def test_stuck_message_recovery(shop: Shop) -> None:
    killed_at_work = Plan(
        shop.url, deliveries=[("a", PAYLOAD)], mode="stored", crash="handling", lease_s=0.3
    )
    with WorkerProcess(killed_at_work) as worker:
        said = worker.rest()
        assert worker.ended() == -signal.SIGKILL, worker.errors
    assert [line["outcome"] for line in said if "acked" in line] == [Outcome.DEFERRED]
    inbox_row = shop.row("a")
    assert (inbox_row.status, inbox_row.starts, inbox_row.has_payload) == ("processing", 1, True)
    shop.handler(mode="stored")
    assert shop.deliver(paid("a", PAYLOAD)) is Outcome.DEFERRED  # the table owns it, nobody else

    rescued = eventually(shop.rescue, "the end of the lease", pause_s=0.05)
    assert [(one.message_id, one.starts, one.dead) for one in rescued] == [("a", 1, False)]
    inbox_row = shop.row("a")
    assert (inbox_row.status, inbox_row.starts, inbox_row.error_type) == (
        "failed",
        1,
        "LeaseExpired",
    )

    assert shop.work() == []  # its run never ended: it is taken alone
    assert shop.work(suspect=True) == [Outcome.PROCESSED]
    check_processed_once(shop, starts=1)  # the run that never ended stays counted


def test_message_that_kills_its_process_runs_out_of_starts(shop: Shop) -> None:
    shop.handler(mode="stored")
    shop.deliver(paid("a", PAYLOAD))
    for start in (1, 2, 3):
        assert len(shop.lease(suspect=start > 1)) == 1
        shop.raw.execute("UPDATE txbox_inbox SET lease_until = received_at")
        shop.rescue(max_starts=3)
    inbox_row = shop.row("a")
    assert (inbox_row.status, inbox_row.error_type, inbox_row.has_payload) == (
        "dead",
        "KilledItsProcess",
        True,
    )
    assert shop.work(suspect=True) == []
    assert shop.effects() == 0
