"""Partitions: where rows go, that an id stays unique whatever partitions come and go, and the guard on each."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import psycopg
import pytest

from tests.support.databases import NewDatabase, Raw, names
from tests.support.partitions import DAY, ID_OF, day_parts, midnight, place, uuid7
from tests.support.shop import Shop, effects, opened, paid, statuses
from txbox import App, ConfigurationError, Outcome, SchemaError
from txbox.admin import Admin
from txbox.maintenance import run_once
from txbox.session import drive
from txbox.store import partitions
from txbox.store import schema as tables
from txbox.store.partitions import Kind

MS = timedelta(milliseconds=1)


def test_ids_go_to_the_day_in_their_bytes_and_others_to_the_rest(timed: Shop, kind: str) -> None:
    timed.handler()
    make = ID_OF[kind]
    for days in (-40, -1, 0, 1):
        begins = midnight(days)
        last_of, first_of = make(begins - MS), make(begins)
        for each in (last_of, first_of):
            assert timed.deliver(paid(each)) is Outcome.PROCESSED
        assert place(timed.raw, first_of) == {f"{kind}_{begins:%Y%m%d}_0000"}
        before = "before" if days == -40 else f"{begins - DAY:%Y%m%d}_0000"
        assert place(timed.raw, last_of) == {f"{kind}_{before}"}
    rest = {
        make(midnight(300)): "default",
        make(midnight(-300)): "before",
        "7": "after",
        "order-1": "after",
        f"orders/{make(midnight())}": "after",
        "": "",
        "f3b0c442-98fc-41c1-9afb-f4c8996fb924": "after",
        make(midnight(365 * 150)): "after",
    }
    for message_id, where in rest.items():
        if message_id:
            assert timed.deliver(paid(message_id)) is Outcome.PROCESSED
            assert place(timed.raw, message_id) == {f"{kind}_{where}"}, message_id


def test_an_id_is_unique_on_both_sides_of_every_bound(timed: Shop, kind: str) -> None:
    timed.handler()
    timed.handler(consumer="ledger")
    ids = [
        ID_OF[kind](midnight(days) + offset)
        for days in (-39, 0, 1, 3, 4)
        for offset in (-MS, 0 * MS)
    ]
    for consumer in ("billing", "ledger"):
        for message_id in ids:
            assert timed.deliver(paid(message_id), consumer) is Outcome.PROCESSED
            assert timed.deliver(paid(message_id), consumer) is Outcome.DUPLICATE
    assert run_once(timed.app, "partitions").rows == 0
    timed.app.retention = timed.app.retention.__class__(ahead=6)
    assert run_once(timed.app, "partitions").rows == 4
    for consumer in ("billing", "ledger"):
        for message_id in ids:
            assert timed.deliver(paid(message_id), consumer) is Outcome.DUPLICATE
    assert effects(timed.raw) == 2 * len(ids)
    assert timed.raw.value("SELECT count(*) FROM txbox_inbox") == 2 * len(ids)


def test_rows_without_a_partition_move_to_it_when_it_is_made(of_uuid7: Shop) -> None:
    shop = of_uuid7

    def refuse(message: Any, _tx: Any) -> None:
        if message.payload == b"{}":
            raise ValueError("no")

    shop.handler(refuse)
    done, failed = uuid7(midnight(3)), uuid7(midnight(3) + MS)
    assert shop.deliver(paid(done)) is Outcome.PROCESSED
    assert shop.deliver(paid(failed, b"{}")) is Outcome.FAILED
    assert place(shop.raw, done) == place(shop.raw, failed) == {"uuid7_default"}
    before = shop.raw.rows("SELECT * FROM txbox_inbox ORDER BY message_id")

    connections = shop.app.database.sync
    assert connections is not None
    begins = midnight(3).timestamp()
    assert (
        drive(connections, partitions.make, shop.app.store.dialect, begins, begins + 86400, 1000)
        == "made"
    )

    assert place(shop.raw, done) == place(shop.raw, failed) == {f"uuid7_{midnight(3):%Y%m%d}_0000"}
    assert shop.raw.rows("SELECT * FROM txbox_inbox ORDER BY message_id") == before
    assert shop.deliver(paid(done)) is Outcome.DUPLICATE
    assert statuses(shop.raw) == {"processed": 1, "failed": 1}


def test_too_many_strays_stay_and_the_next_day_is_made(
    of_uuid7: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    shop = of_uuid7
    shop.handler()
    for number in range(3):
        shop.deliver(paid(uuid7(midnight(3) + number * MS)))
    monkeypatch.setattr(partitions, "_STRAYS", 2)
    shop.app.retention = shop.app.retention.__class__(ahead=4)
    assert run_once(shop.app, "partitions").rows == 1
    assert day_parts(shop.raw)[-1] == f"txbox_inbox_uuid7_{midnight(4):%Y%m%d}_0000"
    assert shop.raw.value("SELECT count(*) FROM txbox_inbox_uuid7_default") == 3
    shop.deliver(paid(tomorrow := uuid7(midnight(4))))
    assert place(shop.raw, tomorrow) == {f"uuid7_{midnight(4):%Y%m%d}_0000"}


def test_the_length_of_a_partition_may_change(of_uuid7: Shop) -> None:
    shop = of_uuid7
    shop.handler()
    shop.app.retention = shop.app.retention.__class__(partition=timedelta(hours=6), ahead=20)
    hours = run_once(shop.app, "partitions").rows
    assert hours > 4
    shop.app.retention = shop.app.retention.__class__(partition=2 * DAY, ahead=6)
    assert run_once(shop.app, "partitions").rows > 0
    assert run_once(shop.app, "partitions").rows == 0
    for days in range(10):
        message_id = uuid7(midnight(days))
        assert shop.deliver(paid(message_id)) is Outcome.PROCESSED
        assert place(shop.raw, message_id) != {"uuid7_default"}
        assert shop.deliver(paid(message_id)) is Outcome.DUPLICATE


def test_partitions_wait_for_nobody_who_has_the_inbox_open(of_uuid7: Shop, raw: Any) -> None:
    shop = of_uuid7
    shop.handler()
    rival = raw(shop.url)
    rival.execute("BEGIN")
    rival.execute("LOCK TABLE txbox_inbox IN ROW EXCLUSIVE MODE")
    shop.app.retention = shop.app.retention.__class__(ahead=3)
    assert run_once(shop.app, "partitions").rows == 0
    assert shop.deliver(paid(uuid7(midnight()))) is Outcome.PROCESSED
    rival.execute("ROLLBACK")
    assert run_once(shop.app, "partitions").rows == 1


def test_the_guard_stands_on_every_partition(timed: Shop, kind: str) -> None:
    timed.app.retention = timed.app.retention.__class__(ahead=4)
    assert run_once(timed.app, "partitions").rows == 2
    tables_of = timed.raw.rows(
        "SELECT inhrelid::regclass::text FROM pg_inherits WHERE inhparent = 'txbox_inbox'::regclass"
    )
    assert len(tables_of) == 40 + 1 + 4 + 3
    ids = [ID_OF[kind](midnight(days)) for days in range(-42, 7)]
    for number, message_id in enumerate([*ids, "other"]):
        timed.raw.execute(f"SET session_replication_role = {'origin' if number % 2 else 'replica'}")
        with pytest.raises(psycopg.errors.Error) as found:
            timed.raw.execute(
                "INSERT INTO txbox_inbox (consumer, message_id, status, topic) VALUES ('a', ?, 'processed', 't')",
                (message_id,),
            )
        assert found.value.sqlstate == "TXB02"
    assert timed.raw.value("SELECT count(*) FROM txbox_inbox") == 0
    part = f"txbox_inbox_{kind}_{midnight(4):%Y%m%d}_0000"
    for state in ("DISABLE", "ENABLE"):
        timed.raw.execute(f"ALTER TABLE {part} {state} TRIGGER txbox_inbox_guard")
        with App(timed.url) as app:
            assert app.database.sync is not None
            with pytest.raises(SchemaError, match="guard does not fire"):
                drive(app.database.sync, app.protocol.check_schema)
    timed.raw.execute(f"ALTER TABLE {part} ENABLE ALWAYS TRIGGER txbox_inbox_guard")


@pytest.mark.parametrize("kind", ["uuid7", "ulid", "hash"])
def test_partitions_are_chosen_when_the_tables_are_made(
    new_database: NewDatabase, kind: Kind
) -> None:
    url = new_database("postgresql", schema=False)
    with App(url, schema="messages") as app:
        assert app.init(partition=kind) == (0, tables.VERSION)
        assert app.init() == app.init(partition=kind) == (tables.VERSION, tables.VERSION)
        other: Kind = "hash" if kind != "hash" else "ulid"
        with pytest.raises(ConfigurationError, match=f"partitioned for {kind}"):
            app.init(partition=other)
    with Admin(url, schema="messages") as admin:
        sizes, how = admin.sizes()
    assert how is not None
    assert (how.kind, how.count, how.missing) == (kind, 16 if kind == "hash" else 8 + 3, False)
    assert (how.ready_until is None) == (kind == "hash")
    assert next(size for size in sizes if size.table == "txbox_inbox").partitions == how.count
    with (
        App(new_database("postgresql")) as app,
        pytest.raises(ConfigurationError, match="not partitioned"),
    ):
        app.init(partition=kind)


@pytest.mark.parametrize("name", names("sqlite", "mysql"))
def test_other_databases_have_no_partitions(new_database: NewDatabase, name: str) -> None:
    with App(new_database(name, schema=False)) as app:
        with pytest.raises(ConfigurationError, match="on PostgreSQL"):
            app.init(partition="hash")
        app.init()
        assert run_once(app, "partitions").rows == 0


def test_status_says_when_partitions_are_missing(of_uuid7: Shop) -> None:
    with Raw(of_uuid7.url) as raw:
        for part in day_parts(raw)[-3:]:
            raw.execute(f"DROP TABLE {part}")
    with Admin(of_uuid7.url) as admin:
        _, how = admin.sizes()
        assert how is not None
        assert (how.ready_until, how.missing) == (midnight(), True)
        assert run_once(of_uuid7.app, "partitions").rows == 3
        _, how = admin.sizes()
        assert how is not None
        assert (how.ready_until, how.missing) == (midnight(3), False)


def test_every_partition_has_the_settings_of_the_plain_table(
    new_database: NewDatabase, postgresql_url: str, raw: Any
) -> None:
    plain = raw(postgresql_url).value(
        "SELECT reloptions FROM pg_class WHERE relname = 'txbox_inbox'"
    )
    assert "autovacuum_vacuum_scale_factor=0.02" in plain
    for kind in ("hash", "ulid"):
        url = new_database("postgresql", schema=False)
        with opened(url) as shop:
            shop.app.init(partition=kind)
            found = shop.raw.rows(
                "SELECT DISTINCT reloptions FROM pg_class WHERE relispartition AND relkind = 'r'"
            )
            assert [sorted(row) for (row,) in found] == [sorted(plain)]
