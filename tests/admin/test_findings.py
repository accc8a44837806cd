"""Ten planted states: `status`, `explain`, `doctor` and the overview tell the same finding of each."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import pytest

from tests.support.backlog import fill
from tests.support.databases import Raw
from tests.support.doctor import NOT_DURABLE
from tests.support.ordered import of
from tests.support.shop import CONSUMER, Shop, paid
from txbox import Message, Outcome, RetryPolicy
from txbox.admin import Admin
from txbox.admin.doctor import CODES, Finding
from txbox.admin.explain import Explanation
from txbox.brokers.http import Http
from txbox.session import drive
from txbox.store.activity import Doing, Identity, Trouble, write

pytestmark = pytest.mark.every_database

_AGO = {
    "postgresql": "clock_timestamp() - interval '{} seconds'",
    "mysql": "UTC_TIMESTAMP(6) - INTERVAL {} SECOND",
    "sqlite": "strftime('%Y-%m-%d %H:%M:%f', 'now', '-{} seconds')",
}
ONCE = RetryPolicy(max_attempts=1)


def ago(raw: Raw, seconds: int) -> str:
    return _AGO[raw.product].format(seconds)


def at_work(shop: Shop, *, consumers: tuple[str, ...] = (), **options: Any) -> None:
    """A process that says it is there."""
    routes = options.pop("routes", ())
    identity = Identity(
        worker="w", kind=options.pop("kind", "run"), host="host", pid=7, version="0", consumers=consumers,
        sources={"orders at rabbit": ("orders",)}, routes=routes,
    )  # fmt: skip
    assert shop.app.database.sync is not None
    drive(shop.app.database.sync, write, shop.app.store.dialect, identity, Doing(**options), {})


def stage(shop: Shop, route: str, *, seconds: int = 100, topic: str = "letters") -> None:
    moment = ago(shop.raw, seconds)
    shop.raw.execute(
        "INSERT INTO txbox_outbox (id, topic, route, status, staged_at, available_at)"
        f" VALUES ('o1', ?, ?, 'pending', {moment}, {moment})",
        (topic, route),
    )


def _route(shop: Shop) -> str:
    shop.app.publish(Http("https://letters.example/in"), topics=["letters"])
    return str(shop.app.routes.of("letters", None))


def fails(_message: Message[Any], _tx: Any) -> None:
    raise ValueError("told to fail")


# -- the states: each plants one, and returns the id of a message that it concerns ---------------


def late_without_worker(shop: Shop) -> str:
    shop.handler()
    fill(shop.raw, 3, due_in_s=-100)
    return "m0"


def late_with_a_busy_worker(shop: Shop) -> str:
    shop.handler()
    at_work(shop, consumers=(CONSUMER,), busy=1)
    fill(shop.raw, 3, due_in_s=-100)
    return "m0"


def dead(shop: Shop) -> str:
    shop.handler(fails, retry=ONCE)
    assert shop.deliver(paid("m0")) is Outcome.DEAD
    return "m0"


def paused_with_waiting(shop: Shop) -> str:
    shop.handler()
    fill(shop.raw, 3, due_in_s=-100)
    with Admin(shop.app) as admin:
        admin.pause(CONSUMER, actor="anna", reason="the bank is closed")
    return "m0"


def quarantined(shop: Shop) -> str:
    shop.handler()
    assert shop.deliver(paid("m0")) is Outcome.PROCESSED
    shop.deliver(paid("m0", b'{"cents": 999}'))
    return "m0"


def expired_lease(shop: Shop) -> str:
    shop.handler(mode="stored")
    shop.deliver(paid("m0"))
    assert len(shop.lease()) == 1
    shop.raw.execute(f"UPDATE txbox_inbox SET lease_until = {ago(shop.raw, 100)}")
    return "m0"


def route_without_relay(shop: Shop) -> str:
    shop.handler()
    stage(shop, _route(shop))
    return "o1"


def relays_broker_away(shop: Shop) -> str:
    shop.handler()
    route = _route(shop)
    away = Trouble(kind="route", name=route, since_s=1_000, error="ACCESS_REFUSED - login refused")
    at_work(shop, consumers=(CONSUMER,), routes=(route,), troubles=(away,))
    # nothing is late yet
    stage(shop, route, seconds=1)
    return "o1"


def consumer_without_handler(shop: Shop) -> str:
    shop.handler()
    fill(shop.raw, 3, due_in_s=-100, consumer="retired")
    return "m0"


def blocked_key(shop: Shop) -> str:
    shop.handler(fails, ordered=True, dead_blocks=True, retry=ONCE)
    assert shop.deliver(of("a", 1)) is Outcome.DEAD
    assert shop.deliver(of("a", 2)) is Outcome.DEFERRED
    return "a-2"


class State(NamedTuple):
    plant: Callable[[Shop], str]
    code: str


STATES = [
    State(late_without_worker, "consumer-unserved"),
    State(late_with_a_busy_worker, "inbox-overdue"),
    State(dead, "dead-messages"),
    State(paused_with_waiting, "consumer-paused"),
    State(quarantined, "quarantined-messages"),
    State(expired_lease, "lease-expired"),
    State(route_without_relay, "route-unserved"),
    State(relays_broker_away, "relay-away"),
    State(consumer_without_handler, "orphan-consumer"),
    State(blocked_key, "dead-messages"),
]


def _named(state: State) -> str:
    return state.plant.__name__


def told(shop: Shop, message_id: str) -> tuple[list[Finding], list[Finding], Explanation]:
    """What `status` and the overview show, what the doctor shows, and what is explained."""
    with Admin(shop.app) as admin:
        examined = admin.doctor().findings
        # an earlier test may have made the tables of this database look old
        elsewhere = {*NOT_DURABLE, "pruning-stopped"}
        found = [_ageless(one) for one in examined if one.code not in elsewhere]
        return [_ageless(one) for one in admin.check().findings], found, admin.explain(message_id)


def _ageless(finding: Finding) -> Finding:
    """A second may pass between two looks."""
    return replace(finding, problem=re.sub(r"\b\d+(?:s|m|h|d)\b", "…", finding.problem))


@pytest.mark.parametrize("state", STATES, ids=_named)
def test_a_planted_state_has_one_finding_everywhere(shop: Shop, state: State) -> None:
    message_id = state.plant(shop)
    found, examined, explained = told(shop, message_id)
    assert [one.code for one in found] == [state.code]
    assert found == examined, "the doctor finds the same, in the same words"
    stuck = [
        said for place in explained.places for said in place.sentences if said.severity == "stuck"
    ]
    assert {said.code for said in stuck} == {state.code}, stuck
    assert explained.severity == "stuck"


@pytest.mark.parametrize("state", STATES, ids=_named)
def test_what_is_not_late_yet_is_stuck_nowhere(shop: Shop, state: State) -> None:
    message_id = state.plant(shop)
    if CODES[state.code] == "error" and state.code != "relay-away":
        for table, column in (("txbox_inbox", "next_attempt_at"), ("txbox_outbox", "available_at")):
            shop.raw.execute(f"UPDATE {table} SET {column} = {ago(shop.raw, 30)}")
        shop.raw.execute(f"UPDATE txbox_outbox SET staged_at = {ago(shop.raw, 30)}")
        found, examined, explained = told(shop, message_id)
        assert (found, examined) == ([], [])
        assert explained.severity == "waits", explained.places


def test_a_source_whose_broker_is_away(shop: Shop) -> None:
    shop.handler()
    trouble = Trouble(kind="source", name="orders at rabbit", since_s=1, error="disk alarm\nmore")
    at_work(shop, consumers=(CONSUMER,), troubles=(trouble,))
    found, examined, _ = told(shop, "none")
    assert [one.code for one in found] == ["source-away"]
    assert found == examined
    assert "orders at rabbit" in found[0].problem
    assert "disk alarm" in found[0].problem


def test_many_retries_that_are_not_due_hide_no_late_one(shop: Shop) -> None:
    """The oldest rows by arrival are not those that have been due for longest."""
    shop.handler()
    fill(shop.raw, 150, status="failed", due_in_s=3600)
    fill(shop.raw, 1, status="failed", due_in_s=-100, first=150)
    found, examined, explained = told(shop, "m150")
    assert [one.code for one in found] == ["consumer-unserved"] == [one.code for one in examined]
    assert explained.severity == "stuck"


def test_quarantined_messages_of_another_consumer_hide_none(shop: Shop) -> None:
    shop.handler()
    for consumer, count in (("crowded", 1_001), ("quiet", 1)):
        fill(shop.raw, count, consumer=consumer, status="discarded")
    shop.raw.execute(
        "INSERT INTO txbox_quarantine (consumer, message_id, hash, status, reason, topic)"
        f" SELECT consumer, message_id, {_HASH[shop.raw.product]}, 'quarantined', 'r', topic FROM txbox_inbox"
    )
    found, _, _ = told(shop, "m0")
    assert [one.problem.partition(" ")[0] for one in found] == ["crowded", "quiet"]


_HASH = {"postgresql": "'x'::bytea", "mysql": "'x'", "sqlite": "x'78'"}


def test_outgoing_messages_behind_one_that_waits_for_its_attempt_are_not_late(shop: Shop) -> None:
    shop.handler()
    route = _route(shop)
    key = "`key`" if shop.raw.product == "mysql" else "key"
    later = {
        "postgresql": "now() + interval '1 hour'",
        "mysql": "UTC_TIMESTAMP(6) + INTERVAL 1 HOUR",
    }
    due_at = later.get(shop.raw.product, "strftime('%Y-%m-%d %H:%M:%f', 'now', '+3600 seconds')")
    for name, attempts, available_at in (("o1", 1, due_at), ("o2", 0, ago(shop.raw, 100))):
        shop.raw.execute(
            f"INSERT INTO txbox_outbox (id, topic, route, {key}, status, attempts, staged_at, available_at)"
            f" VALUES (?, 'letters', ?, 'k', 'pending', ?, {ago(shop.raw, 100)}, {available_at})",
            (name, route, attempts),
        )
    found, examined, explained = told(shop, "o2")
    assert (found, examined) == ([], [])
    assert explained.severity == "waits"


def test_a_failing_outgoing_message_that_no_relay_tries_again_is_late(shop: Shop) -> None:
    shop.handler()
    stage(shop, _route(shop))
    shop.raw.execute("UPDATE txbox_outbox SET attempts = 2")
    found, _, explained = told(shop, "o1")
    assert [one.code for one in found] == ["route-unserved"]
    assert explained.severity == "stuck"


def test_a_row_that_another_app_runs_is_not_an_orphan(shop: Shop) -> None:
    shop.handler()
    fill(shop.raw, 1, due_in_s=-100, consumer="elsewhere")
    at_work(shop, consumers=("elsewhere",))
    found, _, explained = told(shop, "m0")
    assert [one.code for one in found] == ["inbox-overdue"]
    assert next(said.kind for said in explained.places[0].sentences) == "overdue"


def test_a_dead_workers_lease_is_told_as_the_workers_are(shop: Shop) -> None:
    shop.handler(mode="stored")
    shop.deliver(paid("m0"))
    assert len(shop.lease()) == 1
    _, _, explained = told(shop, "m0")
    (said,) = [said for said in explained.places[0].sentences if said.kind == "leased"]
    assert "no process that runs billing has been seen" in said.text
    at_work(shop, consumers=(CONSUMER,))
    _, _, explained = told(shop, "m0")
    (said,) = [said for said in explained.places[0].sentences if said.kind == "leased"]
    assert said.text.startswith("Held by worker host:7 until ")
