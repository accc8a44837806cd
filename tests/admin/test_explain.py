"""`explain`: of each state that a message can be in, its cause and what helps, on every database."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.support.databases import Raw
from tests.support.ordered import of
from tests.support.shop import CONSUMER, TOPIC, Shop, as_id, opened, paid, shop
from txbox import App, GapPolicy, Message, Outbox, Outcome, RetryPolicy
from txbox.admin import Admin, InboxFilter, views
from txbox.admin.explain import KINDS, Explanation, Sentence
from txbox.cli.output import print_json
from txbox.identity import derived_id
from txbox.session import drive
from txbox.store.activity import Doing, Identity, write
from txbox.testing import drain

__all__ = ["shop"]

LATER = RetryPolicy(max_attempts=3, base=timedelta(hours=1), factor=1, cap=timedelta(hours=1))
ONCE = RetryPolicy(max_attempts=1)


def explain(shop: Shop, message_id: str, **options: Any) -> Explanation:
    with Admin(shop.app) as admin:
        return admin.explain(message_id, **options)


def of_kind(told: Explanation, kind: str) -> Sentence:
    """The one sentence of a kind."""
    found = [said for place in told.places for said in place.sentences if said.kind == kind]
    assert len(found) == 1, [
        (said.kind, said.text) for place in told.places for said in place.sentences
    ]
    return found[0]


def kinds(told: Explanation) -> list[str]:
    return [said.kind for place in told.places for said in place.sentences]


def first(told: Explanation) -> str:
    """The cause comes first."""
    return told.places[0].sentences[0].kind


def fails(*ids: str) -> Callable[[Message[Any], Any], None]:
    def body(message: Message[Any], tx: Any) -> None:
        del tx
        if message.id in ids:
            raise ValueError("told to fail")

    return body


def update(shop: Shop, message_id: str, change: str) -> None:
    shop.raw.execute(
        f"UPDATE txbox_inbox SET {change} WHERE message_id = ?", (as_id(shop.raw, message_id),)
    )


def ago(shop: Shop, seconds: int) -> str:
    match shop.raw.product:
        case "postgresql":
            return f"clock_timestamp() - interval '{seconds} seconds'"
        case "mysql":
            return f"UTC_TIMESTAMP(6) - INTERVAL {seconds} SECOND"
        case _:
            return f"strftime('%Y-%m-%d %H:%M:%f', 'now', '{-seconds} seconds')"


def test_the_time_of_an_event_is_no_part_of_its_origin(shop: Shop) -> None:
    shop.handler(fails("m1"), retry=LATER)
    happened = datetime(2026, 11, 2, 3, 4, 5, tzinfo=UTC)
    assert shop.deliver(paid("m1", time=happened, origin={"partition": 3})) is Outcome.FAILED
    told = explain(shop, "m1")
    assert "Its event happened at 2026-11-02 03:04:05 UTC" in of_kind(told, "received").text
    assert "It came from partition 3;" in of_kind(told, "received").text
    message = told.found.inbox[0].message
    assert (message.origin, message.time) == ({"partition": 3}, happened)
    record = dict(views.record(message))
    assert (record["origin"], record["event time"]) == ("partition=3", happened)


# -- keys and versions ------------------------------------------------------------------------


def test_a_key_held_by_a_failed_message(shop: Shop) -> None:
    shop.handler(fails("a-1"), ordered=True, retry=LATER)
    assert shop.deliver(of("a", 1)) is Outcome.FAILED
    assert shop.deliver(of("a", 2)) is Outcome.DEFERRED
    told = explain(shop, "a-2")
    said = of_kind(told, "held key")
    assert first(told) == "held key"
    assert "waits for a-1" in said.text
    assert "which is failed and due at" in said.text
    assert "ValueError: told to fail" in said.text
    assert said.command == f"txbox retry {CONSUMER} a-1"
    assert told.severity == "waits"
    # and a-1 itself waits for its time only
    assert first(explain(shop, "a-1")) == "scheduled"


def test_a_key_held_by_a_dead_message(shop: Shop) -> None:
    shop.handler(fails("a-1"), ordered=True, dead_blocks=True, retry=ONCE)
    assert shop.deliver(of("a", 1)) is Outcome.DEAD
    assert shop.deliver(of("a", 2)) is Outcome.DEFERRED
    said = of_kind(explain(shop, "a-2"), "blocked key")
    assert "a-1" in said.text
    assert "which is dead" in said.text
    assert said.command == f"txbox retry {CONSUMER} a-1"
    assert of_kind(explain(shop, "a-1"), "blocks key").command == f"txbox discard {CONSUMER} a-1"


@pytest.mark.parametrize("alive", [True, False])
def test_a_key_held_by_a_message_that_is_processed(shop: Shop, alive: bool) -> None:
    shop.handler(fails("a-1"), ordered=True, retry=LATER)
    shop.deliver(of("a", 1))
    shop.deliver(of("a", 2))
    shop.make_due()
    assert [leased.arrival.message_id for leased, _ in shop.lease(limit=1)] == ["a-1"]
    if not alive:
        update(shop, "a-1", f"lease_until = {ago(shop, 60)}")
    told = explain(shop, "a-2")
    if alive:
        assert "leased until" in of_kind(told, "held key").text
    else:
        said = of_kind(told, "blocked key")
        assert "must be rescued first" in said.text
        assert said.command == f"txbox rescue --consumer={CONSUMER}"


def test_a_version_that_waits_for_one_that_has_not_arrived(shop: Shop) -> None:
    shop.handler(sequence="body.n", gaps=GapPolicy(wait=timedelta(minutes=10)))
    assert shop.deliver(of("a", 3)) is Outcome.DEFERRED
    said = of_kind(explain(shop, "a-3"), "missing version")
    assert "version 3 of key 'a', and version 1 has not arrived" in said.text
    assert "GapPolicy.wait" in said.text


# -- leases and times -------------------------------------------------------------------------


def test_the_lease_of_a_live_worker(shop: Shop) -> None:
    shop.handler(mode="stored")
    shop.deliver(paid("m1"))
    assert len(shop.lease()) == 1
    told = explain(shop, "m1")
    assert first(told) == "leased"
    assert told.severity == "waits" or shop.raw.product == "sqlite"
    assert "no process that runs billing has been seen" in of_kind(told, "leased").text
    _at_work(shop)
    assert of_kind(explain(shop, "m1"), "leased").text.startswith("Held by worker h:1 until ")


def test_the_lease_of_a_dead_worker(shop: Shop) -> None:
    shop.handler(mode="stored")
    shop.deliver(paid("m1"))
    shop.lease()
    update(shop, "m1", f"lease_until = {ago(shop, 120)}")
    said = of_kind(explain(shop, "m1"), "lease expired")
    # SQLite keeps milliseconds, so it may be one less; and a busy machine takes its time
    assert re.search(r"\((1m 59s|2m( \d+s)?) ago\)", said.text)
    assert "`txbox run` or `txbox maintain`" in said.text
    assert "every 1m 40s" in said.text
    assert "1 run of it never ended, and with 3 (Lease.max_starts) it is dead" in said.text
    assert said.command is not None
    assert shlex.split(said.command) == ["txbox", "rescue", f"--consumer={CONSUMER}"]
    update(shop, "m1", "starts = 3")
    assert "It then is dead" in of_kind(explain(shop, "m1"), "lease expired").text
    assert len(shop.rescue()) == 1
    killed = of_kind(explain(shop, "m1"), "dead")
    assert "3 runs of it never ended" in killed.text


def test_a_retry_that_is_scheduled(shop: Shop) -> None:
    shop.handler(fails("m1"), retry=LATER)
    shop.deliver(paid("m1"))
    told = explain(shop, "m1")
    said = of_kind(told, "scheduled")
    assert "after 1 failure, attempt 2 of 3 is due at" in said.text
    assert said.command == f"txbox retry {CONSUMER} m1"
    assert "ValueError" in of_kind(told, "last error").text


def test_what_is_due_and_nobody_takes(shop: Shop) -> None:
    shop.handler(mode="stored")
    shop.deliver(paid("m1"))
    told = explain(shop, "m1")
    assert first(told) == "due"
    assert "none has been seen in the last half minute" in of_kind(told, "due").text
    update(shop, "m1", f"next_attempt_at = {ago(shop, 600)}")
    said = of_kind(explain(shop, "m1"), "overdue")
    assert re.search(r"\((9m 59s|10m( \d+s)?) ago\), and was not taken: ", said.text)


def test_a_row_without_its_payload_waits_for_its_redelivery(shop: Shop) -> None:
    shop.handler(fails("m1"), retry=LATER)
    shop.deliver(paid("m1"))
    update(shop, "m1", "payload = NULL, has_payload = FALSE")
    assert first(explain(shop, "m1")) == "no payload"


def test_a_consumer_that_is_paused(shop: Shop) -> None:
    shop.handler(mode="stored")
    shop.deliver(paid("m1"))
    with Admin(shop.app) as admin:
        admin.pause(CONSUMER, actor="anna", reason="the bank is closed")
    told = explain(shop, "m1")
    assert first(told) == "paused"
    said = of_kind(told, "paused")
    assert "by anna (the bank is closed)" in said.text
    assert said.command == f"txbox resume {CONSUMER}"


def test_who_is_at_work(shop: Shop) -> None:
    shop.handler(mode="stored")
    shop.deliver(paid("m1"))
    update(shop, "m1", f"next_attempt_at = {ago(shop, 600)}")
    assert "no running worker has this consumer" in of_kind(explain(shop, "m1"), "overdue").text
    _at_work(shop)
    assert "1 process runs with this consumer" in of_kind(explain(shop, "m1"), "overdue").text


def _at_work(shop: Shop) -> None:
    identity = Identity(
        worker="w", kind="run", host="h", pid=1, version="0", app="shop:app", consumers=(CONSUMER,),
        sources={}, routes=(), lanes=1,
    )  # fmt: skip
    doing = Doing(state="running", busy=0, leases=0, in_flight=0)
    assert shop.app.database.sync is not None
    drive(shop.app.database.sync, write, shop.app.store.dialect, identity, doing, {})


# -- dead, done, given up ---------------------------------------------------------------------


def test_a_dead_message(shop: Shop) -> None:
    shop.handler(fails("m1"), retry=ONCE)
    shop.deliver(paid("m1"))
    told = explain(shop, "m1")
    assert first(told) == "dead"
    said = of_kind(told, "dead")
    assert "after 1 attempt" in said.text
    assert said.command == f"txbox retry {CONSUMER} m1"
    error = of_kind(told, "last error")
    assert "ValueError (fingerprint 'ValueError at" in error.text
    assert "told to fail" in error.text
    assert "full new budget" in of_kind(told, "remedy").text
    assert told.severity == "stuck"


def test_a_dead_letter_is_named(shop: Shop) -> None:
    shop.handler(fails("m1"), retry=ONCE, dead_letter_topic="letters")
    shop.deliver(paid("m1"))
    first_letter = of_kind(explain(shop, "m1"), "dead letter").text
    assert "(outbox, letters, due)" in first_letter
    with Admin(shop.app) as admin:
        admin.retry(InboxFilter(consumer=CONSUMER))
    shop.work()
    last_letter = of_kind(explain(shop, "m1"), "dead letter").text
    assert "(outbox, letters, due)" in last_letter
    assert last_letter != first_letter


def test_dead_of_a_broken_transaction(shop: Shop) -> None:
    def leaves(message: Message[Any], tx: Any) -> None:
        del message
        tx.rollback()

    shop.handler(leaves)
    assert shop.deliver(paid("m1")) is Outcome.DEAD
    told = explain(shop, "m1")
    assert first(told) == "broken"
    assert "what it wrote is unknown" in of_kind(told, "broken").text


def test_a_discarded_message(shop: Shop) -> None:
    shop.handler(fails("m1"), retry=ONCE)
    shop.deliver(paid("m1"))
    with Admin(shop.app) as admin:
        admin.discard(InboxFilter(consumer=CONSUMER, message_id="m1"))
    told = explain(shop, "m1")
    assert first(told) == "discarded"
    assert "ValueError" in of_kind(told, "last error").text


def test_a_processed_message_with_what_it_staged_and_what_caused_it(shop: Shop) -> None:
    def stages(message: Message[Any], tx: Any) -> None:
        if message.id == "m1":
            shop.app.outbox.stage(tx, TOPIC, {"from": "m1"})
            shop.app.effects.stage(tx, "mail", {"to": "anna"})

    shop.app.effect("mail")(lambda message: {"sent": message.body["to"]})
    shop.handler(stages, keep_payload="always")
    assert shop.deliver(paid("m1")) is Outcome.PROCESSED
    told = explain(shop, "m1")
    assert first(told) == "processed"
    assert of_kind(told, "replay").command == f"txbox replay {CONSUMER} m1"
    outgoing, effect = (derived_id(CONSUMER, "m1", ordinal) for ordinal in range(2))
    caused = of_kind(told, "caused").text
    assert f"{outgoing} (outbox, {TOPIC}, due)" in caused
    assert f"{effect} (effect:mail, effect:mail, pending)" in caused
    assert f"Caused by m1 ({CONSUMER}" in of_kind(explain(shop, outgoing), "cause").text
    assert f"Caused by m1 ({CONSUMER}" in of_kind(explain(shop, effect), "cause").text

    drain(shop.app)
    done = explain(shop, effect)
    assert "what it returned is kept" in of_kind(done, "processed").text


def test_an_effect_in_doubt(shop: Shop) -> None:
    def stages(message: Message[Any], tx: Any) -> None:
        del message
        shop.app.effects.stage(tx, "mail", {"to": "anna"})

    shop.app.effect("mail", retry=LATER)(lambda message: None)
    shop.handler(stages)
    shop.deliver(paid("m1"))
    effect = derived_id(CONSUMER, "m1", 0)
    assert "in doubt" not in kinds(explain(shop, effect))
    assert len(shop.lease("effect:mail")) == 1
    assert "in doubt" not in kinds(explain(shop, effect))
    update(shop, effect, f"lease_until = {ago(shop, 5)}")
    said = of_kind(explain(shop, effect), "in doubt")
    assert f"idempotency key effect:mail:{effect}" in said.text
    shop.rescue()
    said = of_kind(explain(shop, effect), "in doubt")
    assert said.command == f"txbox discard effect:mail {effect}"


# -- the outbox -------------------------------------------------------------------------------


Stage = Callable[..., str]


@pytest.fixture
def staged(shop: Shop) -> Iterator[Stage]:
    """Stages a message by a route, in a handler of another App; returns its id."""
    ids: list[str] = []
    with App(shop.url) as other:

        def stage(topic: str = "letters", *, route: str = "", **options: Any) -> str:
            def handle(message: Message[Any], tx: Any) -> None:
                del message
                ids.append(Outbox(route=route).stage(tx, topic, {}, **options))

            consumer = f"stager-{len(ids)}"
            other.handler("asked", consumer=consumer)(handle)
            asked = Message(id="1", topic="asked", payload=b"")
            assert other.process(asked, consumer=consumer) is Outcome.PROCESSED
            return ids[-1]

        yield stage


def test_an_outgoing_message_that_no_app_takes(shop: Shop, staged: Stage) -> None:
    shop.handler()
    for route in ("", "kafka:elsewhere", f"local:{CONSUMER}"):
        message_id = staged(route=route)
        told = explain(shop, message_id)
        said = of_kind(told, "unrouted")
        assert first(told) == "unrouted"
        assert "topic 'letters'" in said.text
        assert f"it has: local:{CONSUMER}" in said.text
        assert said.command == f"txbox outbox reroute --to=ROUTE {message_id}"
    assert "unrouted" not in kinds(explain(shop, staged(TOPIC)))


def test_outgoing_messages_behind_another_leased_delayed_dead_and_failed(
    shop: Shop, staged: Stage
) -> None:
    shop.handler()
    before, behind = staged(TOPIC, key="k"), staged(TOPIC, key="k")
    later = staged(TOPIC, delay=timedelta(hours=1))
    later_text = of_kind(explain(shop, later), "delayed").text
    assert "(in 59m" in later_text or "(in 1h" in later_text

    said = of_kind(explain(shop, behind), "held key")
    assert f"Waiting for {before}" in said.text
    _outgoing(shop, before, f"token = 't', available_at = {ago(shop, -30)}")
    assert "until" in of_kind(explain(shop, before), "leased").text
    assert "and is leased until" in of_kind(explain(shop, behind), "held key").text
    _outgoing(
        shop, before, "token = NULL, attempts = 2, error_type = 'BrokerError', error = 'not now'"
    )
    told = explain(shop, before)
    assert "2 attempts so far" in of_kind(told, "scheduled").text
    assert of_kind(told, "scheduled").command == f"txbox outbox retry {before}"
    assert "BrokerError: not now" in of_kind(told, "last error").text
    said = of_kind(explain(shop, behind), "held key")
    assert "and is failed until" in said.text
    assert said.command == f"txbox outbox retry {before}"
    _outgoing(shop, before, "status = 'dead'")
    assert of_kind(explain(shop, before), "dead").command == f"txbox outbox retry {before}"
    assert "held key" not in kinds(explain(shop, behind))
    _outgoing(shop, behind, f"available_at = {ago(shop, 600)}, staged_at = {ago(shop, 600)}")
    assert "no running relay has the route" in of_kind(explain(shop, behind), "overdue").text


def _outgoing(shop: Shop, message_id: str, change: str) -> None:
    shop.raw.execute(
        f"UPDATE txbox_outbox SET {change} WHERE id = ?", (as_id(shop.raw, message_id),)
    )


# -- set aside, unknown, held -----------------------------------------------------------------


def test_a_quarantined_copy(shop: Shop) -> None:
    shop.handler()
    shop.deliver(paid("m1"))
    assert shop.deliver(paid("m1", b"another")) is Outcome.QUARANTINED
    told = explain(shop, "m1")
    assert [place.table for place in told.places] == ["inbox", "quarantine"]
    said = of_kind(told, "quarantined")
    assert "another payload" in said.text.lower() or "payload" in said.text
    assert "needs an id of its own" in said.text
    assert said.command is not None
    assert "--id=NEW-ID" in said.command


def test_an_unknown_id(shop: Shop) -> None:
    shop.handler()
    shop.deliver(paid("m1"))
    told = explain(shop, "m2")
    assert not told.known
    assert first(told) == "unknown"
    assert "30d" in of_kind(told, "remedy").text
    assert "held" not in kinds(told)
    # and only of the consumer that is asked about
    assert not explain(shop, "m1", consumer="ledger").known
    assert explain(shop, "m1", consumer=CONSUMER).known


def test_an_id_whose_row_was_pruned_before_its_attempts(shop: Shop) -> None:
    shop.handler(fails("m1"), retry=LATER)
    shop.deliver(paid("m1"))
    shop.raw.execute("DELETE FROM txbox_inbox")
    assert "an attempt of" in of_kind(explain(shop, "m1", consumer=CONSUMER), "pruned").text


def test_a_row_that_an_open_transaction_holds(shop: Shop, raw: Callable[[str], Raw]) -> None:
    shop.handler(fails("m1"), retry=LATER)
    shop.deliver(paid("m1"))
    shop.deliver(paid("m2"))
    other = raw(shop.url)
    with Admin(shop.app) as admin:
        admin.explain("m1")
        other.execute("BEGIN IMMEDIATE" if shop.raw.product == "sqlite" else "BEGIN")
        other.execute(
            "UPDATE txbox_inbox SET starts = 0 WHERE consumer = ? AND message_id = ?",
            (as_id(other, CONSUMER), as_id(other, "m1")),
        )
        told = admin.explain("m1")
    if shop.raw.product == "sqlite":
        # one writer holds everything; who only looks does not wait for it
        assert "does not say who" in of_kind(told, "unchecked").text
        return
    said = of_kind(told, "held")
    assert first(told) == "held"
    if shop.raw.product == "postgresql":
        pid = other.value("SELECT pg_backend_pid()")
        assert f"server process {pid}, " in said.text
        assert "idle in transaction, open for" in said.text
    assert "held" not in kinds(explain(shop, "m2"))
    other.execute("ROLLBACK")
    assert "held" not in kinds(explain(shop, "m1"))


def test_an_id_that_an_open_transaction_has_just_inserted(
    shop: Shop, raw: Callable[[str], Raw]
) -> None:
    shop.handler()
    if shop.raw.product == "sqlite":
        assert "does not say" in of_kind(explain(shop, "m1"), "unchecked").text
        return
    other = raw(shop.url)
    other.execute("BEGIN")
    other.execute(
        "INSERT INTO txbox_inbox (consumer, message_id, status, topic) VALUES (?, ?, 'pending', 't')",
        (as_id(other, CONSUMER), as_id(other, "m1")),
    )
    said = of_kind(explain(shop, "m1"), "held")
    if shop.raw.product == "postgresql":
        assert f"server process {other.value('SELECT pg_backend_pid()')}, " in said.text
    else:
        assert f"holds this id in the inbox of {CONSUMER}" in said.text
    other.execute("ROLLBACK")
    assert "held" not in kinds(explain(shop, "m1"))


def test_a_role_that_only_reads_is_told_what_it_cannot_see(
    postgresql_url: str, raw: Callable[[str], Raw]
) -> None:
    role = f"reader_{urlsplit(postgresql_url).path.strip('/')}"
    with opened(postgresql_url) as shop:
        shop.handler(fails("m1"), retry=LATER)
        shop.deliver(paid("m1"))
        shop.raw.execute(f"CREATE ROLE {role} LOGIN PASSWORD 'reads'")
        try:
            for table in (
                "inbox", "attempt", "quarantine", "outbox", "sequence", "schema", "worker", "pause",
            ):  # fmt: skip
                shop.raw.execute(f"GRANT SELECT ON txbox_{table} TO {role}")
            other = raw(postgresql_url)
            other.execute("BEGIN")
            other.execute("UPDATE txbox_inbox SET starts = 0")
            parts = urlsplit(postgresql_url)
            host = parts.netloc.rpartition("@")[2]
            url = parts._replace(netloc=f"{role}:reads@{host}").geturl()
            with Admin(url) as admin:
                told = admin.explain("m1")
            said = of_kind(told, "held")
            assert f"server process {other.value('SELECT pg_backend_pid()')}, " in said.text
            assert "whose state this role may not see" in said.text
            other.execute("ROLLBACK")
            other.close()
        finally:
            shop.raw.execute(f"DROP OWNED BY {role}")
            shop.raw.execute(f"DROP ROLE {role}")


# -- handlers ---------------------------------------------------------------------------------


def test_a_topic_that_no_handler_takes_any_more(shop: Shop) -> None:
    shop.handler(fails("m1"), retry=LATER)
    shop.deliver(paid("m1"))
    with App(shop.url) as changed:
        changed.handler("elsewhere", consumer=CONSUMER)(lambda message, tx: None)
        with Admin(changed) as admin:
            told = admin.explain("m1")
    assert first(told) == "no handler"
    assert of_kind(told, "no handler").command == f"txbox discard {CONSUMER} m1"


def test_a_database_alone_knows_no_handlers_and_no_routes(shop: Shop, staged: Stage) -> None:
    shop.handler(fails("m1"), retry=LATER)
    shop.deliver(paid("m1"))
    outgoing = staged()
    with Admin(shop.url) as bare, App(shop.url) as app:
        for admin in (bare, Admin(app)):
            told = admin.explain("m1")
            assert any("only the App knows" in said.text for said in _unchecked(told))
            assert "no handler" not in kinds(told)
            told = admin.explain(outgoing)
            assert any("only the App knows" in said.text for said in _unchecked(told))
            assert "unrouted" not in kinds(told)


def _unchecked(told: Explanation) -> list[Sentence]:
    return [
        said for place in told.places for said in place.sentences if said.severity == "unchecked"
    ]


def test_every_consumer_is_searched(shop: Shop) -> None:
    shop.handler()
    shop.handler(consumer="ledger")
    shop.deliver(paid("m1"), CONSUMER)
    shop.deliver(paid("m1"), "ledger")
    told = explain(shop, "m1")
    assert [place.consumer for place in told.places] == sorted([CONSUMER, "ledger"])
    assert set(told.found.searched) == {CONSUMER, "ledger"}


def test_every_kind_is_documented() -> None:
    text = (Path(__file__).parents[2] / "docs" / "reference" / "cli.md").read_text()
    assert [kind for kind in KINDS if f"`{kind}`" not in text] == []


# -- what comes from strangers, and where it goes -------------------------------------------------


def test_hostile_ids_steer_neither_terminal_nor_shell(shop: Shop) -> None:
    hostile = "m1; rm -rf /\x1b[31m '$(x)'"
    shop.handler(fails(hostile), retry=ONCE)
    shop.deliver(paid(hostile))
    command = of_kind(explain(shop, hostile), "dead").command
    assert command is not None
    assert shlex.split(command) == ["txbox", "retry", CONSUMER, hostile]
    dashed = "--all"
    shop.handler(fails(dashed), retry=ONCE, consumer="dashes")
    shop.deliver(paid(dashed), "dashes")
    command = of_kind(explain(shop, dashed), "dead").command
    assert command == "txbox retry -- dashes --all"


def test_an_explanation_is_json(shop: Shop, capsys: pytest.CaptureFixture[str]) -> None:
    shop.handler(keep_payload="always")
    shop.deliver(paid("m1"))
    print_json(explain(shop, "m1"))
    told = json.loads(capsys.readouterr().out)
    assert told["message_id"] == "m1"
    assert told["found"]["inbox"][0]["message"]["payload"] is None
