"""`txbox quarantine`: what was set aside is looked at, accepted or discarded, and bounded by maintenance."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest

from tests.support.command import Command
from tests.support.databases import Raw
from tests.support.shop import TOPIC, Shop, opened, paid, statuses
from tests.support.waiting import DEADLINE_S, eventually
from txbox import Limits, Message, Outcome, Retention
from txbox.admin import Admin, InboxFilter, QuarantineFilter
from txbox.events import QuarantineTrimmed, RowsChanged
from txbox.maintenance import Task, run_once

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
        value.decode() if isinstance(value, bytes) else str(value): (str(status), int(kept))
        for value, status, kept in raw.rows(
            "SELECT message_id, status, kept_bytes FROM txbox_quarantine"
        )
    }


def test_list_and_show(command: Command, shop: Shop) -> None:
    listed = command("quarantine", "list", "--database", shop.url, "--json").json["quarantined"]
    assert {row["message_id"] for row in listed} == {"a", "", "big"}
    assert {row["status"] for row in listed} == {"quarantined"}
    text = command("quarantine", "list", "--database", shop.url).out
    assert "(none)" in text
    hidden = command("quarantine", "show", "billing", "a", "--database", shop.url).out
    assert "14 bytes" in hidden
    assert "cents" not in hidden
    digits = next(row["hash"] for row in listed if row["message_id"] == "")[:10]
    found = command(
        "quarantine", "show", "--hash", digits, "--reveal", "--json", "--database", shop.url
    ).json["quarantined"]
    assert [(row["payload"], row["kept_bytes"]) for row in found] == [('{"no": "id"}', 12)]
    assert "Which message" in command("quarantine", "show", "--database", shop.url, code=2).sentence
    missing = command("quarantine", "show", "billing", "nope", "--database", shop.url, code=1)
    assert "quarantine list" in missing.sentence


def test_pages_go_on_where_the_last_one_ended_even_among_rows_of_one_instant(
    command: Command, database_url: str
) -> None:
    with opened(database_url) as shop:
        shop.handler()
        for number in range(5):
            shop.deliver(Message(topic=TOPIC, key=f"k{number % 2}", payload=b"%d" % number))
        shop.raw.execute("UPDATE txbox_quarantine SET received_at = '2026-01-01 00:00:00'")
        seen: list[str] = []
        before: str | None = None
        while True:
            words = () if before is None else ("--before", before)
            page = command(
                "quarantine", "list", "--limit", "2", "--json", *words, "--database", shop.url
            ).json
            seen += [row["hash"] for row in page["quarantined"]]
            before = page["before"]
            if before is None:
                break
        assert len(seen) == len(set(seen)) == 5
        with Admin(shop.app) as admin:
            assert len(admin.list(QuarantineFilter(key="k1"))) == 2
            assert len(admin.list(QuarantineFilter(hash=seen[3][:9].upper()))) == 1
        wrong = command(
            "quarantine", "list", "--before", "x", "--database", shop.url, code=2
        ).sentence
        assert "Invalid cursor" in wrong


def test_several_are_named_at_once_and_an_id_is_for_one(command: Command, shop: Shop) -> None:
    words = ("quarantine", "accept", "billing", "a", "big", "--database", shop.url)
    assert "--id is for one" in command(*words, "--id", "x", code=2).sentence
    told = command(*words, "--json", code=1).json
    assert (told["count"], told["sample"][0]["message_id"]) == (1, "big")
    assert [refusal["message_id"] for refusal in told["refused"]] == ["a"]


@pytest.mark.every_database
def test_a_dry_run_waits_for_no_lock_and_tells_the_same_beside_one(shop: Shop) -> None:
    """Neither for rows that somebody changes, nor on SQLite for its one writer."""
    shop.raw.execute("UPDATE txbox_inbox SET status = 'dead', payload = ?, has_payload = ?", (b"{}", True))  # fmt: skip
    where = QuarantineFilter(consumer="billing")

    def dry_runs(admin: Admin) -> list[Any]:
        big = QuarantineFilter(consumer="billing", message_id="big")
        return [
            admin.retry(InboxFilter(consumer="billing"), dry_run=True),
            admin.discard(where, dry_run=True),
            admin.accept(where, dry_run=True),
            admin.accept(big, message_id="a", dry_run=True),
            admin.edit("billing", "a", payload=b"[]", dry_run=True),
        ]

    with Admin(shop.app) as admin:
        before = dry_runs(admin)
        retried, discarded, accepted, taken, _ = before
        assert (retried.count, len(retried.sample), discarded.count) == (1, 1, 3)
        assert [key["message_id"] for key in accepted.sample] == ["big"]
        assert len(accepted.refused) == 2
        assert "another message under the id a" in taken.refused[0]["reason"]
        with Raw(shop.url) as other:
            other.execute("BEGIN IMMEDIATE" if other.product == "sqlite" else "BEGIN")
            other.execute("UPDATE txbox_inbox SET starts = starts + 1")
            other.execute("UPDATE txbox_quarantine SET seen = seen + 1")
            assert dry_runs(admin) == before
            other.execute("ROLLBACK")


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
    assert "1 quarantined message accepted." in done.out
    assert entries(shop.raw)["big"] == ("accepted", 0)
    audit = shop.raw.rows("SELECT actor, action, affected, reason FROM txbox_audit")
    login = shop.raw.value("SELECT login FROM txbox_audit")
    assert (login is None) is (shop.raw.product == "sqlite")
    assert [tuple(each) for each in audit] == [("ann", "quarantine accept", 1, "why not")]
    assert shop.work() == [Outcome.PROCESSED]
    assert shop.calls == ["a", "big"]
    again = command("quarantine", "accept", "billing", "big", *database, code=1)
    assert "No such quarantined message" in again.err


def test_messages_without_an_id_are_told_apart_by_their_key_too(
    command: Command, database_url: str
) -> None:
    with opened(database_url) as shop:
        keys: list[str | None] = []
        shop.handler(lambda message, tx: keys.append(message.key))
        for key in ("a", "b", "b"):
            tombstone = Message(topic=TOPIC, key=key, headers=[("n", "1")], payload=None)
            assert shop.deliver(tombstone) is Outcome.QUARANTINED
        listed = command("quarantine", "list", "--json", "--database", shop.url).json["quarantined"]
        assert sorted((row["key"], row["seen"]) for row in listed) == [("a", 1), ("b", 2)]
        for row in listed:
            words = ("--hash", row["hash"], "--id", f"new-{row['key']}", "--yes")
            command("quarantine", "accept", *words, "--database", shop.url)
        while shop.work():
            pass
        assert sorted(map(str, keys)) == ["a", "b"]
        # nothing says that an equal one is a copy of what has been decided
        again = Message(topic=TOPIC, key="a", headers=[("n", "1")], payload=None)
        assert shop.deliver(again) is Outcome.QUARANTINED
        (row,) = command("quarantine", "list", "--json", "--database", shop.url).json["quarantined"]
        assert (row["key"], row["status"], row["seen"]) == ("a", "quarantined", 2)


def test_an_id_of_its_own_is_needed_where_there_is_none_or_another_has_it(
    command: Command, shop: Shop
) -> None:
    database = ("--database", shop.url)
    refused = command("quarantine", "accept", "--all", "--yes", "--json", *database, code=1)
    assert refused.json["count"] == 1  # the one that is too large
    reasons = {each["message_id"]: each["reason"] for each in refused.json["refused"]}
    assert "has another message under the id a" in reasons["a"]
    assert "it has no id" in reasons[""]
    assert (
        "a new id is for one"
        in command(
            "quarantine", "accept", "--consumer", "billing", "--id", "x", "--yes", *database, code=2
        ).sentence.lower()
    )
    command("quarantine", "accept", "billing", "a", "--id", "a-2", *database)
    command("quarantine", "accept", "--topic", TOPIC, "--id", "new", "--yes", *database)
    assert {entry for entry, _ in entries(shop.raw).values()} == {"accepted"}
    while shop.work():
        pass
    assert sorted(shop.calls) == ["a", "a-2", "big", "new"]
    # what was accepted is a row like any other: its copies are duplicates, another payload is not
    assert shop.deliver(paid("a-2", OTHER)) is Outcome.DUPLICATE
    assert shop.deliver(paid("new", OTHER)) is Outcome.QUARANTINED


def test_an_accept_that_loses_to_another_transaction_is_tried_again(postgresql_url: str) -> None:
    with opened(postgresql_url, limits=Limits(payload_bytes=2)) as shop, Admin(shop.app) as admin:
        shop.handler()
        assert shop.deliver(paid("a")) is Outcome.QUARANTINED
        rival, done = shop.raw, list[int]()
        rival.execute("BEGIN")
        rival.execute(
            "INSERT INTO txbox_inbox (consumer, message_id, status, topic) VALUES ('billing', 'a', 'dead', 'x')"
        )
        where = QuarantineFilter(message_id="a")
        accept = threading.Thread(target=lambda: done.append(admin.accept(where).count))
        accept.start()
        # it holds the quarantined row, and waits for the id: now each waits for the other
        waiting = "SELECT count(*) FROM pg_locks WHERE NOT granted AND locktype = 'transactionid'"
        eventually(lambda: rival.value(waiting) == 1)
        rival.execute("SET LOCAL deadlock_timeout = '60s'")
        rival.rows("SELECT 1 FROM txbox_quarantine FOR UPDATE")
        rival.execute("ROLLBACK")
        accept.join(DEADLINE_S)
        assert done == [1]


def test_a_version_and_a_hash_are_made_as_the_handler_says(database_url: str) -> None:
    with opened(database_url, limits=Limits(headers_bytes=100)) as shop:
        shop.handler(payload_hash="json", sequence="body.version")
        large = {"key": "k", "headers": [("h", "x" * 200)]}
        assert shop.deliver(paid("1", b'{"version": 1}', **large)) is Outcome.QUARANTINED
        assert shop.deliver(paid("2", b'{"none": 1}', **large)) is Outcome.QUARANTINED
        with Admin(shop.app) as admin:
            done = admin.accept(QuarantineFilter(consumer="billing"))
        assert done.count == 1
        (refused,) = done.refused
        assert refused["message_id"] == "2"
        assert "version" in refused["reason"] or "sequence" in refused["reason"]
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
            (refused,) = admin.accept(QuarantineFilter(message_id="cut")).refused
            assert "not all of its payload" in refused["reason"]
            run_once(shop.app, "prune-quarantine")
            (refused,) = admin.accept(QuarantineFilter(message_id="cut")).refused
            assert "was dropped" in refused["reason"]
        assert statuses(shop.raw) == {}


def test_what_is_discarded_loses_its_payload_and_later_its_row(
    command: Command, shop: Shop
) -> None:
    database = ("--database", shop.url)
    asked = command("quarantine", "discard", *database, code=2).sentence
    assert "Which messages are to be discarded" in asked
    both = command(
        "quarantine", "discard", "--all", "--consumer", "billing", *database, code=2
    ).sentence
    assert "Give --all or a filter, not both" in both
    assert "add --yes" in command("quarantine", "discard", "--all", *database, code=2).sentence
    dry = command("quarantine", "discard", "--all", "--dry-run", "--json", *database).json
    assert (dry["count"], len(dry["sample"])) == (3, 3)
    command("quarantine", "discard", "billing", "a", *database)
    assert entries(shop.raw)["a"] == ("discarded", 0)
    # SQLite counts milliseconds: in the one in which it was done it is not old yet
    eventually(lambda: run_once(shop.app, "prune-quarantine", Task(dry_run=True)).rows == 1)
    assert run_once(shop.app, "prune-quarantine").rows == 1
    # what waits for a decision is never deleted
    assert set(entries(shop.raw)) == {"", "big"}
    command("quarantine", "discard", "--older-than", "1ms", "--yes", *database)
    assert {entry for entry, _ in entries(shop.raw).values()} == {"discarded"}
    affected = shop.raw.rows("SELECT affected FROM txbox_audit ORDER BY number")
    assert [each for (each,) in affected] == [1, 2]
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
        for place, (mark,) in enumerate(marks):
            stamp = f"2026-01-01 00:00:{place:02}"
            shop.raw.execute(
                "UPDATE txbox_quarantine SET received_at = ? WHERE hash = ?", (stamp, mark)
            )
        run_once(shop.app, "prune-quarantine")
        kept = shop.raw.rows(
            "SELECT kept_bytes, payload IS NOT NULL FROM txbox_quarantine ORDER BY received_at"
        )
        assert [(int(size), bool(has)) for size, has in kept] == [(0, False)] * 5 + [(50, True)] * 5
        assert shop.emitted(QuarantineTrimmed) == [QuarantineTrimmed(rows=5, payload_bytes=250)]
        run_once(shop.app, "prune-quarantine")
        assert len(shop.emitted(QuarantineTrimmed)) == 1
