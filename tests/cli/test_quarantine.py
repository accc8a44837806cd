"""`txbox quarantine`: what was set aside is looked at, accepted or discarded, and bounded by maintenance."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest

from tests.cli.conftest import Command
from tests.databases import Raw
from tests.shop import TOPIC, Shop, opened, paid, statuses
from txbox import App, Limits, Message, Outcome, Retention
from txbox.admin import Admin, QuarantineFilter
from txbox.events import QuarantineTrimmed, RowsChanged
from txbox.maintenance import Task, run_once
from txbox.store import schema as tables
from txbox.store.dialect import dialect

OTHER = b'{"cents": 999}'


@pytest.fixture
def shop(database_url: str) -> Iterator[Shop]:
    """Three entries: a known id with another payload, no id, and a payload that is too large."""
    retention = Retention(quarantine=timedelta(microseconds=1), quarantine_bytes=100)
    with opened(database_url, retention=retention, limits=Limits(payload_bytes=40)) as shop:
        shop.handler()
        shop.deliver(paid("a"))
        assert shop.deliver(paid("a", OTHER)) is Outcome.QUARANTINED
        assert shop.deliver(Message(topic=TOPIC, payload=b'{"no": "id"}')) is Outcome.QUARANTINED
        assert shop.deliver(paid("big", b'{"text": "' + b"x" * 40 + b'"}')) is Outcome.QUARANTINED
        yield shop


def entries(raw: Raw) -> dict[str, tuple[str, int]]:
    """By id: what became of it, and how much of its payload is kept."""
    return {
        own.decode() if isinstance(own, bytes) else str(own): (str(status), int(kept))
        for own, status, kept in raw.rows(
            "SELECT message_id, status, kept_bytes FROM txbox_quarantine"
        )
    }


def test_list_and_show(command: Command, shop: Shop) -> None:
    listed = command("quarantine", "list", "--database", shop.url, "--json").json["quarantined"]
    assert {own["message_id"] for own in listed} == {"a", "", "big"}
    assert {own["status"] for own in listed} == {"quarantined"}
    text = command("quarantine", "list", "--database", shop.url).out
    assert "(none)" in text
    hidden = command("quarantine", "show", "billing", "a", "--database", shop.url).out
    assert "14 bytes" in hidden
    assert "999" not in hidden
    digits = next(own["hash"] for own in listed if own["message_id"] == "")[:10]
    found = command(
        "quarantine", "show", "--hash", digits, "--reveal", "--json", "--database", shop.url
    ).json["quarantined"]
    assert [(own["payload"], own["kept_bytes"]) for own in found] == [('{"no": "id"}', 12)]
    assert "Which message" in command("quarantine", "show", "--database", shop.url, code=2).sentence
    missing = command("quarantine", "show", "billing", "nope", "--database", shop.url, code=1)
    assert "quarantine list" in missing.sentence


def test_what_is_accepted_is_processed_under_its_id(command: Command, shop: Shop) -> None:
    database = ("--database", shop.url)
    before = entries(shop.raw)
    dry = command("quarantine", "accept", "billing", "big", "--dry-run", "--json", *database).json
    assert (dry["count"], dry["dry_run"], dry["refused"]) == (1, True, [])
    assert entries(shop.raw) == before
    assert statuses(shop.raw) == {"processed": 1}
    done = command(
        "quarantine", "accept", "billing", "big", "--actor", "ann", "--reason", "why not", *database
    )
    assert "1 message accepted." in done.out
    assert entries(shop.raw)["big"] == ("accepted", 0)
    audit = shop.raw.rows("SELECT actor, action, affected, reason FROM txbox_audit")
    login = shop.raw.value("SELECT login FROM txbox_audit")
    assert (login is None) is (shop.raw.product == "sqlite")
    assert [tuple(own) for own in audit] == [("ann", "quarantine accept", 1, "why not")]
    assert shop.work() == [Outcome.PROCESSED]
    assert shop.calls == ["a", "big"]
    again = command("quarantine", "accept", "billing", "big", *database, code=1)
    assert "Nothing like that waits" in again.err


def test_an_id_of_its_own_is_needed_where_there_is_none_or_another_has_it(
    command: Command, shop: Shop
) -> None:
    database = ("--database", shop.url)
    refused = command("quarantine", "accept", "--all", "--yes", "--json", *database, code=1)
    assert refused.json["count"] == 1  # the one that is too large
    reasons = {own["message_id"]: own["reason"] for own in refused.json["refused"]}
    assert "has another message under the id a" in reasons["a"]
    assert "it has no id" in reasons[""]
    assert (
        "an id is for one"
        in command(
            "quarantine", "accept", "--consumer", "billing", "--id", "x", "--yes", *database, code=2
        ).sentence.lower()
    )
    command("quarantine", "accept", "billing", "a", "--id", "a-2", *database)
    command("quarantine", "accept", "--topic", TOPIC, "--id", "new", "--yes", *database)
    assert {own for own, _ in entries(shop.raw).values()} == {"accepted"}
    while shop.work():
        pass
    assert sorted(shop.calls) == ["a", "a-2", "big", "new"]
    # what was accepted is a row like any other: its copies are duplicates, another payload is not
    assert shop.deliver(paid("a-2", OTHER)) is Outcome.DUPLICATE
    assert shop.deliver(paid("new", OTHER)) is Outcome.QUARANTINED


def test_a_version_and_a_hash_are_made_as_the_handler_says(database_url: str) -> None:
    with opened(database_url, limits=Limits(headers_bytes=100)) as shop:
        shop.handler(payload_hash="json", sequence="body.version")
        large = {"key": "k", "headers": [("h", "x" * 200)]}
        assert shop.deliver(paid("1", b'{"version": 1}', **large)) is Outcome.QUARANTINED
        assert shop.deliver(paid("2", b'{"none": 1}', **large)) is Outcome.QUARANTINED
        with Admin(shop.app) as admin:
            done = admin.accept_quarantined(QuarantineFilter(consumer="billing"))
        assert done.count == 1
        ((key, why),) = done.refused
        assert key[1] == "2"
        assert "version" in why or "sequence" in why
        (changed,) = shop.emitted(RowsChanged)
        assert (changed.action, changed.rows) == ("quarantine accept", 1)
        assert shop.raw.value("SELECT sequence FROM txbox_inbox") == 1
        assert shop.work() == [Outcome.PROCESSED]
        assert shop.deliver(paid("1", b'{ "version": 1 }', key="k")) is Outcome.DUPLICATE


def test_a_payload_that_was_cut_or_dropped_is_not_accepted(database_url: str) -> None:
    limits = Limits(payload_bytes=10, quarantined_bytes=20)
    with opened(database_url, limits=limits, retention=Retention(quarantine_bytes=0)) as shop:
        shop.handler()
        assert shop.deliver(paid("cut", b"x" * 21)) is Outcome.QUARANTINED
        with Admin(shop.app) as admin:
            ((_, why),) = admin.accept_quarantined(QuarantineFilter(message_id="cut")).refused
            assert "not all of its payload" in why
            run_once(shop.app, "prune-quarantine")
            ((_, why),) = admin.accept_quarantined(QuarantineFilter(message_id="cut")).refused
            assert "was dropped" in why
        assert statuses(shop.raw) == {}


def test_what_is_discarded_loses_its_payload_and_later_its_row(
    command: Command, shop: Shop
) -> None:
    database = ("--database", shop.url)
    for words in (("discard",), ("discard", "--all", "--consumer", "billing")):
        assert (
            "What is to be discarded" in command("quarantine", *words, *database, code=2).sentence
        )
    assert "add --yes" in command("quarantine", "discard", "--all", *database, code=2).sentence
    dry = command("quarantine", "discard", "--all", "--dry-run", "--json", *database).json
    assert (dry["count"], len(dry["sample"])) == (3, 3)
    command("quarantine", "discard", "billing", "a", *database)
    assert entries(shop.raw)["a"] == ("discarded", 0)
    assert run_once(shop.app, "prune-quarantine", Task(dry_run=True)).rows == 1
    assert run_once(shop.app, "prune-quarantine").rows == 1
    # what waits for a decision is never deleted
    assert set(entries(shop.raw)) == {"", "big"}
    command("quarantine", "discard", "--older-than", "1ms", "--yes", *database)
    assert {own for own, _ in entries(shop.raw).values()} == {"discarded"}
    affected = shop.raw.rows("SELECT affected FROM txbox_audit ORDER BY number")
    assert [own for (own,) in affected] == [1, 2]
    assert "Nothing is quarantined." in command("quarantine", "list", *database).out
    left = command("quarantine", "list", "--status", "discarded", "--json", *database).json
    assert len(left["quarantined"]) == 2
    assert statuses(shop.raw) == {"processed": 1}


def test_beyond_their_bound_the_oldest_payloads_go_and_their_rows_stay(database_url: str) -> None:
    retention = Retention(quarantine_bytes=250, window=None)
    with opened(database_url, retention=retention) as shop:
        shop.handler()
        for number in range(10):
            payload = b"%d" % number + b"x" * 49
            assert shop.deliver(Message(topic=TOPIC, payload=payload)) is Outcome.QUARANTINED
            shop.raw.execute("UPDATE txbox_quarantine SET received_at = received_at WHERE 1 = 0")
        marks = shop.raw.rows("SELECT hash FROM txbox_quarantine ORDER BY received_at, hash")
        for place, (own,) in enumerate(marks):
            stamp = f"2026-01-01 00:00:{place:02}"
            shop.raw.execute(
                "UPDATE txbox_quarantine SET received_at = ? WHERE hash = ?", (stamp, own)
            )
        run_once(shop.app, "prune-quarantine")
        kept = shop.raw.rows(
            "SELECT kept_bytes, payload IS NOT NULL FROM txbox_quarantine ORDER BY received_at"
        )
        assert [(int(size), bool(has)) for size, has in kept] == [(0, False)] * 5 + [(50, True)] * 5
        assert shop.emitted(QuarantineTrimmed) == [QuarantineTrimmed(rows=5, payload_bytes=250)]
        run_once(shop.app, "prune-quarantine")
        assert len(shop.emitted(QuarantineTrimmed)) == 1


def test_rows_of_an_earlier_version_are_counted(empty_database_url: str, raw: Any) -> None:
    view = raw(empty_database_url)
    name = {"postgresql": "postgresql", "mysql": "mysql"}.get(view.product, "sqlite")
    text = tables.migration_text(dialect(name), None, upto=4)
    for statement in tables.split(text):
        view.execute(statement)
    view.execute(
        "INSERT INTO txbox_quarantine (consumer, message_id, hash, reason, payload)"
        " VALUES ('billing', 'a', ?, 'old', ?)",
        (b"h" * 32, b"x" * 70),
    )
    with App(empty_database_url) as app:
        assert app.init() == (4, tables.VERSION)
    assert entries(view) == {"a": ("quarantined", 70)}
