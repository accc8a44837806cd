"""What one transaction writes, waits for and leaves behind (promises 2.1, 2.4, 2.5, 2.11, 4.2)."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from typing import Any

import pytest

from tests.support.blocked import acquired
from tests.support.databases import BY_NAME, NewDatabase, Raw, names
from tests.support.meddling import Verb, drive_meddled
from tests.support.shop import CONSUMER, TOPIC, Shop, add_effect, execute, opened, paid, statuses
from tests.support.sources import Memory
from tests.support.waiting import eventually, room
from tests.support.workers import worker
from txbox import (
    App,
    Batching,
    Inbox,
    Limits,
    Message,
    MessageInProgress,
    Outcome,
    RetryPolicy,
    SchemaError,
    StoreError,
)
from txbox.events import MessageFailed
from txbox.session import Statements

pytestmark = pytest.mark.every_database


def table_counts(raw: Raw) -> tuple[int, int, int]:
    """(inserted, updated, dead tuples) of the inbox, once the server has caught up."""

    def counted() -> tuple[int, int, int] | None:
        raw.rows("SELECT pg_stat_clear_snapshot()")
        ((inserted, updated, dead),) = raw.rows(
            "SELECT n_tup_ins, n_tup_upd + n_tup_del, n_dead_tup FROM pg_stat_user_tables"
            " WHERE relname = 'txbox_inbox'"
        )
        return (inserted, updated, dead) if inserted else None

    counts: tuple[int, int, int] = eventually(counted, "the counts")
    return counts


def test_success_writes_one_row_once(postgresql_url: str) -> None:
    with opened(postgresql_url) as shop:
        shop.handler()
        for number in range(20):
            assert shop.deliver(paid(f"m{number}")) is Outcome.PROCESSED
        for number in range(20):
            assert shop.deliver(paid(f"m{number}")) is Outcome.DUPLICATE
        shop.app.close()  # an ended session reports its counts at once
        assert table_counts(shop.raw) == (20, 0, 0)
        assert shop.raw.rows(
            "SELECT DISTINCT payload IS NULL, headers IS NULL, has_payload FROM txbox_inbox"
        ) == [(True, True, False)]


@pytest.mark.parametrize("product", ["postgresql", "sqlite"])
def test_row_is_processed_from_its_insert_on(new_database: NewDatabase, product: str) -> None:
    """Seen from inside the transaction: no `processing` comes first."""
    seen: list[Any] = []
    with opened(new_database(product)) as shop:
        shop.handler(lambda message, tx: seen.extend(execute(tx, "SELECT status FROM txbox_inbox")))
        assert shop.deliver(paid("a")) is Outcome.PROCESSED
    assert [tuple(entry) for entry in seen] == [("processed",)]


def test_payload_is_kept_only_where_asked(shop: Shop) -> None:
    shop.handler(consumer="slim")
    shop.handler(consumer="kept", keep_payload="always")
    shop.handler(consumer="kept-while", keep_payload=timedelta(days=1), mode="stored")
    for consumer in ("slim", "kept", "kept-while"):
        shop.deliver(paid("a", b"{}", headers={"x": "y"}), consumer)
    shop.work("kept-while")
    rows = shop.raw.rows("SELECT consumer, has_payload, payload, headers FROM txbox_inbox")
    kept = {
        (value.decode() if isinstance(value, bytes) else value): (
            bool(has),
            payload and bytes(payload),
            headers,
        )
        for value, has, payload, headers in rows
    }
    assert kept == {
        "slim": (False, None, None),
        "kept": (True, b"{}", '[["x","y"]]'),
        "kept-while": (True, b"{}", '[["x","y"]]'),
    }


WAITS = {
    "postgresql": ("SHOW lock_timeout", "SET lock_timeout = '4321ms'", "4321ms"),
    "mysql": (
        "SELECT @@SESSION.innodb_lock_wait_timeout",
        "SET SESSION innodb_lock_wait_timeout = 43",
        43,
    ),
}
by_server = pytest.mark.parametrize("product", names("postgresql", "mysql"))


@by_server
@pytest.mark.parametrize("mode", ["inline", "stored"])
def test_lock_timeout_is_restored_before_the_handler_runs(
    new_database: NewDatabase, product: str, mode: str
) -> None:
    show, change, _ = WAITS[BY_NAME[product].dialect]
    seen: list[Any] = []

    def looks(message: Message[Any], tx: Any) -> None:
        seen.append(execute(tx, show)[0][0])
        execute(tx, change)  # of the session, and yet not for the next message

    with opened(new_database(product), limits=Limits(lock_timeout=timedelta(seconds=2))) as shop:
        default = shop.raw.rows(show)[0][0]
        shop.handler(looks, mode=mode)
        for name in ("a", "b", "a"):
            shop.deliver(paid(name))
            shop.work()
        assert seen == [default, default]
        assert shop.effects() == 2


@by_server
@pytest.mark.parametrize("rival", [False, True], ids=["free", "held"])
def test_lock_timeout_is_restored_after_accept(
    new_database: NewDatabase, product: str, rival: bool
) -> None:
    """And where the time-out passes, the caller's transaction is still usable."""
    show, change, changed = WAITS[BY_NAME[product].dialect]
    with opened(new_database(product)) as shop:
        inbox = Inbox(CONSUMER)
        tx = acquired(shop.app._any_sync())
        tx.begin(())
        execute(tx.native, change)
        add_effect(tx.native, "mine")
        if rival:
            other = acquired(shop.app._any_sync())
            other.begin(())
            assert inbox.accept(other.native, paid("a"))
            started = time.monotonic()
            with pytest.raises(MessageInProgress):
                inbox.accept(tx.native, paid("a"), timeout=timedelta(seconds=1))
            assert 0.9 < time.monotonic() - started < 1 + room(5)
            other.rollback()
            other.discard()
        assert inbox.accept(tx.native, paid("b"), timeout=timedelta(seconds=1))
        assert execute(tx.native, show)[0][0] == changed
        tx.commit(())
        tx.discard()
        assert statuses(shop.raw) == {"processed": 1}
        assert shop.effects("mine") == 1


def test_accept_inside_a_handler_leaves_the_guard_open(shop: Shop) -> None:
    """A handler that accepts for another consumer still may not commit by itself."""
    inbox = Inbox("inner")
    commit = [True]

    def accepts(message: Message[Any], tx: Any) -> None:
        assert inbox.accept(tx, paid("inner"))
        if commit.pop() if commit else False:
            tx.commit()

    shop.handler(accepts)
    refused = shop.app.store.dialect.refuses_commit
    assert shop.deliver(paid("a")) is (Outcome.FAILED if refused else Outcome.DEAD)
    if refused:
        assert (shop.effects(), statuses(shop.raw)) == (0, {"failed": 1})
        assert shop.work() == [Outcome.PROCESSED]
        assert statuses(shop.raw) == {"processed": 2}
    else:
        assert shop.row("inner", "inner").status == "processed"
        assert shop.row("a").status == "dead"
    assert shop.effects() == 1


def test_accept_needs_no_close_and_rolls_back_with_its_caller(shop: Shop) -> None:
    inbox = Inbox(CONSUMER)
    for end, count in (("rollback", 0), ("commit", 1)):
        tx = acquired(shop.app._any_sync())
        tx.begin(())
        assert inbox.accept(tx.native, paid("a"))
        add_effect(tx.native, "a")
        if end == "commit":
            tx.native.commit()
        else:
            tx.native.rollback()
        tx.discard()
        assert (shop.effects(), len(statuses(shop.raw))) == (count, count)


def test_guard_that_does_not_fire_stops_the_consumer(postgresql_url: str) -> None:
    with opened(postgresql_url) as shop:
        shop.handler()
        shop.raw.execute("ALTER TABLE txbox_inbox DISABLE TRIGGER txbox_inbox_guard")
        for state in ("DISABLE", "ENABLE", "ENABLE REPLICA"):
            shop.raw.execute(f"ALTER TABLE txbox_inbox {state} TRIGGER txbox_inbox_guard")
            with pytest.raises(SchemaError, match="guard does not fire"):
                shop.deliver(paid("a"))
        shop.raw.execute("ALTER TABLE txbox_inbox ENABLE ALWAYS TRIGGER txbox_inbox_guard")
        assert shop.deliver(paid("a")) is Outcome.PROCESSED


def test_guard_fires_whatever_a_handler_left_on_its_connection(postgresql_url: str) -> None:
    """The role that silences triggers stays on the connection; the next handlers there commit too early."""

    def commits(message: Message[Any], tx: Any) -> None:
        if message.id == "leak":
            execute(tx, "SET session_replication_role = replica")
        else:
            tx.commit()

    with opened(postgresql_url) as shop:
        shop.handler(commits, retry=RetryPolicy(max_attempts=2, base=timedelta(0)))
        assert shop.deliver(paid("leak")) is Outcome.PROCESSED
        for number in range(5):
            assert shop.deliver(paid(number)) is Outcome.FAILED
        assert shop.work() == [Outcome.DEAD] * 5
        assert statuses(shop.raw) == {"processed": 1, "dead": 5}
        assert shop.effects() == 1


@pytest.mark.parametrize("reset", ["RESET ALL", "DISCARD ALL", "SET search_path = pg_catalog"])
def test_guard_survives_what_a_pool_does_to_a_connection(postgresql_url: str, reset: str) -> None:
    from psycopg_pool import ConnectionPool

    def renew(connection: Any) -> None:
        connection.execute(reset)
        connection.commit()

    breaks = [True, False]

    with (
        opened(postgresql_url) as shop,
        ConnectionPool(postgresql_url, min_size=1, max_size=1, open=True, reset=renew) as pool,
        App(pool) as app,
    ):

        @app.handler(TOPIC, consumer=CONSUMER)
        def handle(message: Message[Any], tx: Any) -> None:
            tx.execute("INSERT INTO public.effect VALUES (%s, '')", (message.id,))
            if breaks.pop():
                tx.commit()

        assert app.process(paid("fresh")) is Outcome.PROCESSED
        assert app.process(paid("recycled")) is Outcome.FAILED
        assert shop.effects() == 1


def test_handler_cannot_make_its_commit_less_durable(postgresql_url: str) -> None:
    """Close raises synchronous_commit to its floor: seen by the deferred trigger's own transaction."""
    with opened(postgresql_url) as shop:
        shop.raw.execute(
            "CREATE FUNCTION look() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN"
            " INSERT INTO effect VALUES ('setting', current_setting('synchronous_commit')); RETURN NULL; END $$"
        )
        shop.raw.execute(
            "CREATE CONSTRAINT TRIGGER look AFTER INSERT ON effect DEFERRABLE INITIALLY DEFERRED"
            " FOR EACH ROW WHEN (NEW.message_id = 'a') EXECUTE FUNCTION look()"
        )
        shop.handler(lambda message, tx: execute(tx, "SET LOCAL synchronous_commit = off"))
        assert shop.deliver(paid("a")) is Outcome.PROCESSED
        assert shop.raw.rows("SELECT note FROM effect WHERE message_id = 'setting'") == [("on",)]


@pytest.mark.parametrize("runs", ["process", "worker"])
def test_a_role_that_a_handler_leaves_on_its_connection_stops_nobody(
    postgresql_url: str, runs: str
) -> None:
    """Also behind the COMMIT of that very transaction, where a lane begins its next one."""
    role = f"limited_{postgresql_url.rpartition('_')[2]}_{os.getpid()}"

    def sets_role(message: Message[Any], tx: Any) -> None:
        if message.id in ("m3", "m7"):
            execute(tx, f"SET ROLE {role}")

    with opened(postgresql_url, batching=Batching(messages=1)) as shop:
        shop.raw.execute(f"CREATE ROLE {role}")
        try:
            shop.handler(sets_role)
            messages = [paid(f"m{number}") for number in range(10)]
            if runs == "process":
                assert {shop.deliver(each) for each in messages} == {Outcome.PROCESSED}
            else:
                shop.app.consume(Memory(messages))
                assert worker(shop.app, once=True).run() == 0
            assert statuses(shop.raw) == {"processed": 10}
            assert shop.effects() == 10
            assert not shop.emitted(MessageFailed)
        finally:
            shop.raw.execute(f"DROP ROLE {role}")


def test_a_right_that_is_missing_is_said_so(postgresql_url: str) -> None:
    role = f"limited_{postgresql_url.rpartition('_')[2]}_{os.getpid()}"
    with opened(postgresql_url) as shop:
        shop.raw.execute(f"CREATE ROLE {role}")
        try:
            with App(f"{postgresql_url}?options=-crole%3D{role}") as app:
                app.protocol.checked = True
                app.handler(TOPIC, consumer=CONSUMER)(lambda message, tx: None)
                with pytest.raises(StoreError, match="42501"):
                    app.process(paid("a"))
        finally:
            shop.raw.execute(f"DROP ROLE {role}")


def test_zombie_can_run_but_cannot_commit(shop: Shop) -> None:
    """Its lease was given to another; whatever the order of their ends, one effect."""
    shop.handler(mode="stored")
    shop.deliver(paid("a"))
    ((zombie, token),) = shop.lease()
    shop.raw.execute("UPDATE txbox_inbox SET lease_until = received_at")
    assert len(shop.rescue()) == 1
    ((heir, leased),) = shop.lease(suspect=True)
    assert shop.run(zombie, token) is Outcome.IN_PROGRESS
    assert shop.effects() == 0
    assert shop.run(heir, leased) is Outcome.PROCESSED
    assert shop.run(zombie, token) is Outcome.IN_PROGRESS
    assert (shop.effects("a"), shop.row("a").status) == (1, "processed")


def test_zombie_cannot_record_a_failure(shop: Shop) -> None:
    def fails(message: Message[Any], tx: Any) -> None:
        raise ValueError("too late")

    handler = shop.handler(fails, mode="stored")
    shop.deliver(paid("a"))
    ((zombie, token),) = shop.lease()
    heirs: list[Any] = []

    async def stolen(verb: Verb, statements: Statements, carried_out: Any) -> Any:
        """Between the roll-back and the record the lease goes to another."""
        answer = await carried_out()
        if verb == "rollback" and not heirs:
            shop.raw.execute("UPDATE txbox_inbox SET lease_until = received_at")
            shop.rescue()
            heirs.extend(shop.lease(suspect=True))
        return answer

    settled = drive_meddled(
        shop.app._any_sync(), stolen, shop.app.protocol.run_leased, handler, zombie, token
    )
    assert settled.outcome is Outcome.IN_PROGRESS
    assert (len(heirs), shop.row("a").status, shop.row("a").starts) == (1, "processing", 2)
    assert shop.emitted(MessageFailed) == []
    assert shop.raw.value("SELECT count(*) FROM txbox_attempt WHERE error_type = 'ValueError'") == 0


def test_pgbouncer(pgbouncer_url: str, postgresql_url: str) -> None:
    """Transaction pooling, without prepared statements: the whole life of messages."""
    with opened(postgresql_url) as shop, App(f"{pgbouncer_url}?prepare=off") as app:
        fail = [True]

        @app.handler(TOPIC, consumer=CONSUMER)
        def handle(message: Message[Any], tx: Any) -> None:
            add_effect(tx, message.id)
            if message.id == "b" and fail and fail.pop():
                tx.commit()

        for each, outcome in (
            ("a", Outcome.PROCESSED),
            ("a", Outcome.DUPLICATE),
            ("b", Outcome.FAILED),
            ("b", Outcome.DEFERRED),
        ):
            assert app.process(paid(each)) is outcome
        assert shop.effects() == 1
