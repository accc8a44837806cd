"""What the doctor costs does not grow with the tables: by the database's own count of what a statement touches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.store.test_dialect_plans import cost
from tests.support.backlog import fill
from tests.support.databases import Raw
from tests.support.doctor import findings
from tests.support.shop import CONSUMER

pytestmark = pytest.mark.every_database

#: Pages, index entries or steps: a limit of a hundred or a thousand rows, and never the table.
_FLAT = {"postgresql": 2_000, "mysql": 4_500, "sqlite": 120_000}
_LOOK = {"limit": 100, "counted": 1000, "late_s": 300.0}
_LOOKS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("doctor_consumers", {"limit": 500}),
    ("doctor_messages", {"status": "dead", "consumer": CONSUMER, **_LOOK}),
    ("doctor_messages", {"status": "pending", "consumer": CONSUMER, **_LOOK}),
    ("doctor_routes", {"limit": 500}),
    ("doctor_outgoing", {"route": "r1", "limit": 1000, "late_s": 300.0}),
    ("doctor_outgoing_dead", {"limit": 1000}),
)  # fmt: skip


def _fill_outbox(raw: Raw, rows: int) -> None:
    fill(raw, rows, status="discarded", consumer="numbers", first=500_000)
    for status, route in (("pending", "r1"), ("dead", "r1"), ("sent", "r2")):
        word = "CONCAT" if raw.product == "mysql" else ""
        named = f"CONCAT('{status}', message_id)" if word else f"'{status}' || message_id"
        raw.execute(
            "INSERT INTO txbox_outbox (id, topic, status, route)"
            f" SELECT {named}, 't', '{status}', '{route}' FROM txbox_inbox WHERE consumer = "
            + ("CAST('numbers' AS BINARY)" if word else "'numbers'")
        )


def test_a_look_costs_the_same_whatever_waits(
    database: Any, database_url: str, raw: Callable[[str], Raw]
) -> None:
    view = raw(database_url)
    rows = 6_000 if database.name == "mysql" else 20_000
    for number, status in enumerate(("dead", "pending", "processing", "failed")):
        fill(view, rows, status=status, first=number * rows)
    _fill_outbox(view, rows)
    match view.product:
        case "postgresql":
            view.execute("VACUUM ANALYZE")
        case "mysql":
            view.rows("ANALYZE TABLE txbox_inbox, txbox_outbox")
        case _:
            view.execute("ANALYZE")
    spent = {(name, params.get("status")): cost(view, name, **params) for name, params in _LOOKS}
    flat = _FLAT[view.product]
    assert {look: units for look, units in spent.items() if units > flat} == {}, spent
    assert {"dead-messages", "dead-outgoing"} <= set(findings(database_url))
