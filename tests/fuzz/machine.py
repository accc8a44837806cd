"""Random lives of a few messages, step by step beside a model of what the inbox must say of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, Literal

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tests.support.partitions import finished_at
from tests.support.shop import CONSUMER, TOPIC, Shop, add_effect
from txbox import ConfigurationError, Message, Outcome, Reject, RetryPolicy
from txbox.admin import Admin, InboxFilter, QuarantineFilter
from txbox.maintenance import Task, run_once
from txbox.testing import Crashed, crash_at, drain

How = Literal["ok", "raises", "rejects"]

#: Ids that collations like to confuse, payloads that differ by a byte. Small sets: steps shall meet one another.
IDS = st.sampled_from(["a", "a", "a", "A", "a ", "é"])
NEW_IDS = st.sampled_from(["n1", "n2"])
PAYLOADS = st.sampled_from([b'{"n": 1}', b'{"n": 2}'])
HOWS: st.SearchStrategy[How] = st.sampled_from(["ok", "ok", "raises", "rejects"])
POINTS = st.sampled_from(
    ["before:begin", "before:handler", "after:handler", "before:commit", "after:commit"]
)
ATTEMPTS = 2
STARTS = 3
_FINISHED = ("processed", "dead", "discarded")


@dataclass
class Row:
    """What the model knows of one message: the payload that came, and that which runs."""

    status: str
    came: bytes
    payload: bytes
    attempts: int = 0
    starts: int = 0
    effects: int = 0


@dataclass
class World:
    """The model: rows, the quarantine's statuses, and effects of rows that were pruned since."""

    rows: dict[str, Row] = field(default_factory=dict)
    aside: dict[tuple[str, bytes], str] = field(default_factory=dict)
    effects: dict[str, int] = field(default_factory=dict)

    def set_aside(self, message_id: str, payload: bytes) -> None:
        """What was decided stays so; what an operator wrote and replaced is another's now."""
        if self.aside.get((message_id, payload), "replaced") == "replaced":
            self.aside[message_id, payload] = "quarantined"

    def ran(self, message_id: str, how: How) -> None:
        row = self.rows[message_id]
        if how == "ok":
            row.status = "processed"
            self.effects[message_id] = self.effects.get(message_id, 0) + 1
            return
        row.attempts += 1
        gone = how == "rejects" or row.attempts >= ATTEMPTS
        row.status = "dead" if gone else "failed"


class Lives(RuleBasedStateMachine):
    """Steps choose from fixed sets, never from what a run has led to: the same seed takes the same steps."""

    shop: Shop
    admin: Admin
    how: How = "ok"

    @classmethod
    def of(cls, shop: Shop, admin: Admin) -> type[Lives]:
        """The machine of one database; its handler does what the step says."""
        machine: type[Lives] = type("Lives", (cls,), {"shop": shop, "admin": admin})

        def handle(message: Message[Any], tx: Any) -> None:
            add_effect(tx, message.id, CONSUMER)
            if machine.how == "raises":
                raise ValueError(message.id)
            if machine.how == "rejects":
                raise Reject("no")

        once = RetryPolicy(max_attempts=ATTEMPTS, base=timedelta(0))
        shop.app.handler(TOPIC, consumer=CONSUMER, retry=once, keep_payload="always")(handle)
        return machine

    def __init__(self) -> None:
        super().__init__()
        for table in ("txbox_inbox", "txbox_attempt", "txbox_quarantine", "effect"):
            self.shop.raw.execute(f"DELETE FROM {table}")
        self.world = World()
        self.leased: list[tuple[Any, str]] = []

    def does(self, how: How) -> None:
        type(self).how = how

    # -- deliveries ---------------------------------------------------------------------------

    @rule(message_id=IDS, payload=PAYLOADS, how=HOWS)
    def deliver(self, message_id: str, payload: bytes, how: How) -> None:
        self.does(how)
        outcome = self.shop.app.process(Message(id=message_id, topic=TOPIC, payload=payload))
        row = self.world.rows.get(message_id)
        if row is None:
            self.world.rows[message_id] = row = Row("pending", payload, payload)
            self.world.ran(message_id, how)
            expected = {
                "processed": Outcome.PROCESSED,
                "failed": Outcome.FAILED,
                "dead": Outcome.DEAD,
            }
            assert outcome is expected[row.status]
        elif payload != row.came:
            self.world.set_aside(message_id, payload)
            assert outcome is Outcome.QUARANTINED
        else:
            assert outcome is (Outcome.DUPLICATE if row.status in _FINISHED else Outcome.DEFERRED)

    @rule(message_id=IDS, payload=PAYLOADS, point=POINTS)
    def crash_in_a_delivery(self, message_id: str, payload: bytes, point: str) -> None:
        if message_id in self.world.rows:
            return
        self.does("ok")
        try:
            with crash_at(point):
                self.shop.app.process(Message(id=message_id, topic=TOPIC, payload=payload))
        except Crashed:
            pass
        if point == "after:commit":
            self.world.rows[message_id] = Row("pending", payload, payload)
            self.world.ran(message_id, "ok")

    # -- the table ----------------------------------------------------------------------------

    @rule(how=HOWS)
    def run_what_is_due(self, how: How) -> None:
        self.does(how)
        drain(self.shop.app, ignore_dates=True)
        for message_id, row in self.world.rows.items():
            while row.status in ("pending", "failed", "processing"):
                self.world.ran(message_id, how)

    @rule()
    def crash_in_a_run(self) -> None:
        """A worker dies with what it has leased."""
        self.does("ok")
        due = [row for row in self.world.rows.values() if row.status in ("pending", "failed")]
        self.leased = []
        if any(row.starts for row in due) or not due:
            return
        self.shop.make_due()
        self.leased = self.shop.lease(limit=100)
        for row in due:
            row.status, row.starts = "processing", 1

    @rule(how=HOWS, late=HOWS)
    def a_zombie_comes_late(self, how: How, late: How) -> None:
        """A worker runs what it has leased only when another has done it: it changes nothing."""
        self.crash_in_a_run()
        leased, self.leased = self.leased, []
        self.run_what_is_due(how)
        self.does(late)
        for row, token in leased:
            self.shop.run(row, token)

    # -- operators ----------------------------------------------------------------------------

    def changed(self, message_id: str, changed: int, *statuses: str) -> bool:
        row = self.world.rows.get(message_id)
        matches = row is not None and row.status in statuses
        assert changed == int(matches), (message_id, row, changed)
        return matches

    @rule(message_id=IDS)
    def retry(self, message_id: str) -> None:
        done = self.admin.retry(InboxFilter(consumer=CONSUMER, message_id=message_id))
        if self.changed(message_id, done.count, "dead", "failed"):
            row = self.world.rows[message_id]
            row.status, row.attempts, row.starts = "failed", 0, 0

    @rule(message_id=IDS, payload=PAYLOADS)
    def edit(self, message_id: str, payload: bytes) -> None:
        """Its copies stay duplicates of what came; what it replaces stays readable."""
        row = self.world.rows.get(message_id)
        if row is None or row.status not in ("dead", "failed"):
            with pytest.raises(ConfigurationError):
                self.admin.edit(CONSUMER, message_id, payload=payload)
            return
        self.admin.edit(CONSUMER, message_id, payload=payload)
        if self.world.aside.get((message_id, row.payload)) != "quarantined":
            self.world.aside[message_id, row.payload] = "replaced"
        row.status, row.attempts, row.starts, row.payload = "failed", 0, 0, payload

    @rule(message_id=IDS)
    def discard(self, message_id: str) -> None:
        done = self.admin.discard(InboxFilter(consumer=CONSUMER, message_id=message_id))
        if self.changed(message_id, done.count, "dead", "failed", "pending"):
            self.world.rows[message_id].status = "discarded"

    @rule(message_id=IDS, how=HOWS)
    def replay(self, message_id: str, how: How) -> None:
        self.does(how)
        row = self.world.rows.get(message_id)
        self.admin.replay(InboxFilter(consumer=CONSUMER, message_id=message_id))
        if row is not None and row.status == "processed" and how == "ok":
            self.world.effects[message_id] += 1

    @rule(message_id=IDS, payload=PAYLOADS, new_id=NEW_IDS)
    def accept(self, message_id: str, payload: bytes, new_id: str) -> None:
        """Under an id of its own, with a payload that is known to be aside."""
        if self.world.aside.get((message_id, payload)) != "quarantined":
            return
        aside = [
            each
            for each in self.admin.show(QuarantineFilter(message_id=message_id), reveal=True)
            if each.payload == payload
        ]
        assert len(aside) == 1, aside
        where = QuarantineFilter(message_id=message_id, hash=aside[0].hash)
        done = self.admin.accept(where, message_id=new_id)
        known = self.world.rows.get(new_id)
        assert done.count == int(known is None)
        if known is None:
            self.world.rows[new_id] = Row("pending", payload, payload)
            self.world.aside[message_id, payload] = "accepted"

    @rule()
    def prune(self) -> None:
        # what was done in this very moment is not older than nothing
        finished_at(self.shop.raw, datetime(2020, 1, 1, tzinfo=UTC), "processed_at IS NOT NULL")
        run_once(self.shop.app, "prune", Task(older_than=timedelta(0), at_any_time=True))
        for message_id in [*self.world.rows]:
            if self.world.rows[message_id].status in ("processed", "discarded"):
                del self.world.rows[message_id]

    # -- what must be so after each step ------------------------------------------------------

    @invariant()
    def the_database_says_what_the_model_says(self) -> None:
        raw = self.shop.raw
        rows = {
            text(message_id): (status, int(attempts), int(starts))
            for message_id, status, attempts, starts in raw.rows(
                "SELECT message_id, status, attempts, starts FROM txbox_inbox"
            )
        }
        expected = {
            message_id: (row.status, row.attempts, row.starts)
            for message_id, row in self.world.rows.items()
        }
        assert rows == expected, (rows, expected)
        effects: dict[str, int] = {}
        for (message_id,) in raw.rows("SELECT message_id FROM effect"):
            effects[text(message_id)] = effects.get(text(message_id), 0) + 1
        assert effects == self.world.effects, (effects, self.world.effects)
        aside = sorted(
            (text(message_id), status)
            for message_id, status in raw.rows("SELECT message_id, status FROM txbox_quarantine")
        )
        expected_aside = sorted((name, status) for (name, _), status in self.world.aside.items())
        assert aside == expected_aside, (aside, expected_aside)


def text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
