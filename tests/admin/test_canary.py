"""Canary redrive: one, ten, then the rest, as long as the failure does not return."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from contextlib import closing
from datetime import timedelta

import pytest

from tests.support.dashboard import Broken, shop
from tests.support.databases import Raw
from tests.support.workers import running, worker
from txbox.admin import Admin, InboxFilter
from txbox.admin.canary import Step
from txbox.errors import ConfigurationError

FINGERPRINT = "TimeoutError at dashboard.py:bill"
GROUP = InboxFilter(consumer="billing", fingerprint=FINGERPRINT)


def bury(view: Raw, count: int, fingerprint: str = FINGERPRINT, number: int = 11) -> None:
    """Dead messages, which the handler fails with as long as the gateway is away."""
    payload = json.dumps({"number": number}).encode()
    digest = hashlib.sha256(payload).digest()
    for each in range(count):
        view.execute(
            "INSERT INTO txbox_inbox (consumer, message_id, status, topic, type, payload, payload_hash, has_payload, "
            "attempts, error_type, fingerprint) VALUES ('billing', ?, 'dead', 'orders', 'order.placed', ?, ?, ?, 2, "
            "'TimeoutError', ?)",
            (f"{fingerprint[:5]}-{each:04d}", payload, digest, True, fingerprint),
        )


def counts(view: Raw) -> dict[str, int]:
    found = view.rows("SELECT status, count(*) FROM txbox_inbox GROUP BY status")
    return {status: int(count) for status, count in found}


def test_a_thousand_whose_cause_is_there_stop_after_the_first_and_go_through_once_it_is_mended(
    database_url: str, raw: Callable[[str], Raw]
) -> None:
    view, broken = raw(database_url), Broken()
    bury(view, 1_000)
    with shop(database_url, broken) as app, running(worker(app)), Admin(database_url) as admin:
        stopped = admin.canary(GROUP, actor="ann", reason="try")
        assert (stopped.stopped, stopped.count, stopped.left) == ("returned", 1, 999)
        first = f"{FINGERPRINT[:5]}-0000"
        assert stopped.steps == (Step(count=1, returned=1, again=(("billing", first),)),)
        assert stopped.sentence == (
            f"Stopped: the failure returned (billing {first}). 999 were not retried; of the 1 that were, 1 are not "
            "processed yet and go on by their retry policy."
        )
        assert counts(view)["dead"] >= 999

        broken.gateway = False
        every = list(admin.canary_steps(GROUP, actor="ann"))
        # nothing more is let go before the step is over
        assert not any(step.waiting for each in every for step in each.steps[:-1])
        done, redriven = [each.count for each in every], every[-1]
        steps = redriven.steps
        assert redriven.stopped is None
        assert redriven.left == 0
        assert [step.count for step in steps][:2] == [1, 10]
        assert (
            sum(step.count for step in steps)
            == sum(step.processed for step in steps)
            == redriven.count
            >= 999
        )
        assert done == sorted(done)
    audited = view.rows("SELECT actor, action, affected, reason FROM txbox_audit ORDER BY number")
    assert audited[0] == ("ann", "retry", 1, "canary: try")
    assert sum(int(affected) for *_, affected, _ in audited) == 1 + redriven.count
    assert counts(view).get("dead", 0) == 0


def test_nobody_takes_them(sqlite_url: str, raw: Callable[[str], Raw]) -> None:
    bury(raw(sqlite_url), 3)
    with Admin(sqlite_url) as admin:
        redriven = admin.canary(GROUP, patience=timedelta(0))
    assert (redriven.stopped, redriven.count, redriven.left) == ("nobody", 1, 2)
    assert redriven.steps[0].waiting == 1


def test_it_fails_in_another_way(sqlite_url: str, raw: Callable[[str], Raw]) -> None:
    bury(raw(sqlite_url), 3, number=17)
    with shop(sqlite_url) as app, running(worker(app)), Admin(sqlite_url) as admin:
        redriven = admin.canary(GROUP)
    assert (redriven.stopped, redriven.count) == ("otherwise", 1)
    assert redriven.steps == (Step(count=1, otherwise=1),)


def test_it_ends_with_the_loop_around_it(sqlite_url: str, raw: Callable[[str], Raw]) -> None:
    view = raw(sqlite_url)
    bury(view, 30)
    # nobody runs them
    with Admin(sqlite_url) as admin, closing(admin.canary_steps(GROUP)) as steps:
        redriven = next(steps)
    assert (redriven.stopped, redriven.count, redriven.left) == (None, 1, 29)
    assert redriven.steps == (Step(count=1, waiting=1),)
    assert counts(view) == {"failed": 1, "dead": 29}


def test_what_a_transaction_holds_is_not_called_retried(
    postgresql_url: str, raw: Callable[[str], Raw]
) -> None:
    holder, broken = raw(postgresql_url), Broken()
    bury(holder, 3)
    broken.gateway = False
    holder.execute("BEGIN")
    holder.rows("SELECT 1 FROM txbox_inbox WHERE message_id LIKE '%1' FOR UPDATE")
    with shop(postgresql_url, broken) as app, running(worker(app)), Admin(postgresql_url) as admin:
        redriven = admin.canary(GROUP)
    holder.execute("ROLLBACK")
    assert (redriven.stopped, redriven.count, redriven.left) == (None, 2, 1)
    assert redriven.sentence == (
        "2 were retried, and the failure did not return. 1 were not retried: "
        "locked by a transaction, or already changed."
    )


def test_others_are_left_alone_and_a_dry_run_counts(
    sqlite_url: str, raw: Callable[[str], Raw]
) -> None:
    view = raw(sqlite_url)
    bury(view, 3)
    bury(view, 2, fingerprint="KeyError at dashboard.py:bill")
    with Admin(sqlite_url) as admin:
        assert admin.canary(GROUP, dry_run=True).left == 3
        assert admin.canary(InboxFilter(consumer="billing"), dry_run=True).left == 5
        groups = admin.failures()
        assert [(group.fingerprint, group.count) for group in groups] == [
            (FINGERPRINT, 3),
            ("KeyError at dashboard.py:bill", 2),
        ]
        assert groups[0].consumers == {"billing": {"dead": 3}}
    assert counts(view) == {"dead": 5}


def test_what_it_is_not_for(sqlite_url: str) -> None:
    with Admin(sqlite_url) as admin:
        with pytest.raises(ConfigurationError, match="by its id"):
            admin.canary(InboxFilter(consumer="billing", message_id="x"))
        with pytest.raises(ConfigurationError, match="dead messages"):
            admin.canary(InboxFilter(status="failed"))
