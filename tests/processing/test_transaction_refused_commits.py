"""A COMMIT that the server answers with an error is the failure of its message (promises 2.6, 2.7)."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest

from tests.support.connections import KINDS, Kind
from tests.support.contract.bench import Bench, Trial
from tests.support.contract.breaking import Expected, Hand, Misbehaviour
from tests.support.databases import Raw
from tests.support.leasing import Leasing
from tests.support.meddling import Verb, drive_meddled
from tests.support.shop import (
    CONSUMER,
    Shop,
    add_effect,
    create_effects,
    effects,
    opened,
    paid,
    statuses,
    the_row,
)
from txbox import Limits, Message, Outcome, RetryPolicy
from txbox.admin import Admin, InboxFilter
from txbox.errors import Fault, StoreError
from txbox.events import ConsumptionPaused, MessageDead, MessageFailed
from txbox.handlers import Handler
from txbox.processing.intake import Mode
from txbox.session import Statements, drive

pytestmark = pytest.mark.every_database

IDS = [f"m{number}" for number in range(40)]
POISON = "m23"
AT_ONCE = timedelta(0)
CODES = ["P0001", "22012", "57014", "55P03", "XX000"]


def guard_effects(raw: Raw, code: str) -> None:
    """A deferred constraint trigger of the user's: it looks at poor notes when the transaction commits."""
    raw.execute(
        "CREATE OR REPLACE FUNCTION look() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN"
        f" RAISE EXCEPTION 'too poor' USING ERRCODE = '{code}'; END $$"
    )
    raw.execute(
        "CREATE CONSTRAINT TRIGGER look AFTER INSERT ON effect DEFERRABLE INITIALLY DEFERRED"
        " FOR EACH ROW WHEN (NEW.note = 'poor') EXECUTE FUNCTION look()"
    )


def poisons(message: Message[Any], tx: Any) -> None:
    if message.id == POISON:
        add_effect(tx, message.id, "poor")


@pytest.fixture
def shop(postgresql_url: str, request: pytest.FixtureRequest) -> Iterator[Shop]:
    with opened(postgresql_url) as other_shop:
        guard_effects(other_shop.raw, getattr(request, "param", "P0001"))
        yield other_shop


def deliver(shop: Shop, handler: Handler, ids: list[str]) -> list[Outcome]:
    settled = drive(shop.app._any_sync(), shop.app.intake.take, handler, [*map(paid, ids)])
    return [answer.outcome for answer in settled]


@pytest.mark.parametrize("shop", CODES, indirect=True)
@pytest.mark.parametrize("mode", ["inline", "stored"])
def test_poison_at_commit_is_dead_after_its_attempts(shop: Shop, mode: str) -> None:
    shop.handler(poisons, mode=mode, retry=RetryPolicy(max_attempts=3, base=AT_ONCE))
    if mode == "inline":
        assert shop.deliver(paid(POISON)) is Outcome.FAILED
    else:
        assert shop.deliver(paid(POISON)) is Outcome.DEFERRED
        assert shop.work() == [Outcome.FAILED]
    assert (shop.work(), shop.work(), shop.work()) == ([Outcome.FAILED], [Outcome.DEAD], [])
    row = shop.row(POISON)
    assert (row.status, row.attempts, row.starts, shop.calls) == ("dead", 3, 0, [POISON] * 3)
    assert shop.effects() == 0
    code = shop.emitted(MessageDead)[0].error
    assert row.error is not None
    assert any(each in code and each in row.error for each in CODES)
    assert "too poor" in row.error
    assert row.error_type not in (None, "StoreError")
    assert (len(shop.emitted(MessageFailed)), shop.emitted(ConsumptionPaused)) == (2, [])


@pytest.mark.parametrize("way", ["delivered", "savepoints", "pipelined", "leased"])
@pytest.mark.parametrize("shop", ["P0001", "22012"], indirect=True)
def test_poison_at_commit_costs_only_itself(shop: Shop, way: str) -> None:
    handler = shop.handler(poisons, pipeline=way == "pipelined")
    if way in ("savepoints", "pipelined"):
        pace = shop.app.protocol.batch_sizes.of(handler)
        for _ in range(50):
            pace.failed(8)
    if way == "leased":
        messages = [*map(paid, IDS)]
        leasing = Leasing(
            drive(shop.app._any_sync(), shop.app.intake.take, handler, messages, Mode.LEASED)
        )
        outcomes = [
            answer.outcome
            for answer in drive(
                shop.app._any_sync(),
                shop.app.protocol.run_leased_many,
                handler,
                leasing.rows,
                leasing.token,
            )
        ]
    else:
        outcomes = deliver(shop, handler, IDS)
    assert dict(zip(IDS, outcomes, strict=True)) == {
        message_id: Outcome.FAILED if message_id == POISON else Outcome.PROCESSED
        for message_id in IDS
    }
    assert statuses(shop.raw) == {"processed": 39, "failed": 1}
    assert (shop.effects(), shop.effects(POISON)) == (39, 0)
    # halves, and halves of those: nobody runs more often than a batch can be divided
    assert max(shop.calls.count(message_id) for message_id in IDS) <= 8


def test_a_batch_handler_with_poison_at_commit_is_divided(shop: Shop) -> None:
    def handle(messages: list[Message[Any]], tx: Any) -> None:
        for message in messages:
            add_effect(tx, message.id, "poor" if message.id == POISON else "")

    shop.app.handler("orders", consumer="billing", batch=True)(handle)
    (handler,) = shop.app.handlers.matching("orders", None, "billing")
    outcomes = deliver(shop, handler, IDS)
    assert [
        message_id
        for message_id, outcome in zip(IDS, outcomes, strict=True)
        if outcome is Outcome.FAILED
    ] == [POISON]
    assert statuses(shop.raw) == {"processed": 39, "failed": 1}
    assert shop.effects() == 39


def test_a_replay_with_poison_at_commit_has_failed(shop: Shop) -> None:
    shop.handler(poisons, keep_payload="always")
    shop.raw.execute("ALTER TABLE effect DISABLE TRIGGER look")
    assert shop.deliver(paid(POISON)) is Outcome.PROCESSED
    shop.raw.execute("ALTER TABLE effect ENABLE TRIGGER look")
    with Admin(shop.app) as admin:
        replayed = admin.replay(InboxFilter(consumer=CONSUMER, message_id=POISON), actor="me")
    assert (replayed.count, replayed.failed) == (1, 1)
    (failure,) = replayed.failures
    assert "P0001" in str(failure.error)
    assert shop.row(POISON).status == "processed"


@pytest.mark.parametrize("committed", [False, True], ids=["failed", "committed"])
@pytest.mark.parametrize("mode", ["inline", "stored"])
def test_the_record_decides_whether_a_refused_commit_took_effect(
    database_url: str, mode: str, committed: bool
) -> None:
    """On every database: an answer to COMMIT with a code that nobody knows, before and after it took effect."""
    with opened(database_url, limits=Limits(conflict_retries=0)) as shop:
        handler = shop.handler(mode=mode)
        refused: list[StoreError] = []

        async def answered(verb: Verb, statements: Statements, carried_out: Any) -> Any:
            refuses = verb == "commit" and bool(statements) and not refused
            if not refuses:
                return await carried_out()
            if committed:
                await carried_out()
            text, code = "odd (99999)", "99999"
            refused.append(StoreError(text, fault=Fault.OTHER, code=code, definite=False))
            raise refused[0]

        connections, protocol = shop.app._any_sync(), shop.app.protocol
        if mode == "inline":
            arrivals = [handler.arrival(paid("a"), Limits())]
            settled = drive_meddled(connections, answered, protocol.deliver, handler, arrivals)["a"]
        else:
            shop.deliver(paid("a"))
            ((leased, token),) = shop.lease()
            settled = drive_meddled(
                connections, answered, protocol.run_leased, handler, leased, token
            )
        assert len(refused) == 1
        if committed:
            done = Outcome.DUPLICATE if mode == "inline" else Outcome.PROCESSED
            assert (settled.outcome, shop.row("a").status, shop.effects()) == (done, "processed", 1)
            assert shop.raw.value("SELECT count(*) FROM txbox_attempt") == 0
        else:
            assert (settled.outcome, shop.row("a").attempts) == (Outcome.FAILED, 1)
            assert "99999" in str(shop.row("a").error)
            assert (shop.work(), shop.effects()) == ([Outcome.PROCESSED], 1)
        assert len(shop.calls) == (1 if committed else 2)


@pytest.mark.parametrize("kind", [each for each in KINDS if each.product == "postgresql"], ids=str)
@pytest.mark.parametrize("mode", ["inline", "stored"])
def test_poison_at_commit_on_every_driver(postgresql_url: str, kind: Kind, mode: str) -> None:
    with Raw(postgresql_url) as raw, Bench(kind, postgresql_url) as bench:
        create_effects(raw)
        guard_effects(raw, "P0001")

        async def pays_poorly(hand: Hand) -> None:
            await hand.do(
                f"INSERT INTO effect (message_id, note) VALUES ('{hand.message_id}', 'poor')"
            )

        trial = Trial(bench, Misbehaviour(pays_poorly, lambda *_: Expected("failed", (0,))), mode)
        outcome = trial.deliver()
        if mode == "stored":
            assert outcome is Outcome.DEFERRED
            (outcome,) = trial.work()
        assert (outcome, trial.runs) == (Outcome.FAILED, 1)
        row = the_row(raw, trial.message_id, trial.handler.consumer)
        assert (row.status, row.attempts, row.starts) == ("failed", 1, 0)
        assert "P0001" in str(row.error)
        assert "too poor" in str(row.error)
        assert trial.work() == [Outcome.PROCESSED]
        assert effects(raw) == 1
