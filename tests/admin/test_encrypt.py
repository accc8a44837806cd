"""Rows from before the codec, and under an older key, become rows of the current one: killed, and beside workers."""

from __future__ import annotations

import json
import signal
import threading
from datetime import timedelta
from typing import Any

import pytest

from tests.admin.test_admin_outbox import relayed
from tests.store.test_codec import everything
from tests.support.command import Command
from tests.support.databases import Raw
from tests.support.doctor import findings
from tests.support.recording import Recorder
from tests.support.shop import AT_ONCE, Shop, opened, paid
from txbox import App, ConfigurationError, Message, Outcome, RelayPolicy, RetryPolicy
from txbox.admin import Admin, Encrypted, InboxFilter, OutboxFilter, QuarantineFilter
from txbox.encryption import AesGcm, new_key
from txbox.errors import BrokerError

OLD, NEW = new_key(), new_key()
BEFORE = AesGcm({"2026-05": OLD})
BOTH = AesGcm({"2026-11": NEW, "2026-05": OLD})
AFTER = AesGcm({"2026-11": NEW})
SECRET = "plain-words"
PAYLOAD = json.dumps({"card": SECRET}).encode()
HEADERS = {"x-customer": SECRET}
AT_HAND = timedelta(0)
KEPT = InboxFilter(consumer="kept", message_id="k")


def fail(message: Message[Any], tx: Any) -> None:
    raise LookupError(SECRET)


def counted(done: Encrypted) -> dict[str, tuple[int, int]]:
    return {table.table.removeprefix("txbox_"): (table.count, table.plain) for table in done.tables}


def fill(shop: Shop) -> None:
    """A text of each kind in each table: a failure, its attempts, a result, a quarantined copy, a refused letter."""
    refused = Recorder(lambda message: BrokerError(SECRET))
    shop.app.publish(refused, topics=["out"])
    shop.handler(fail, retry=RetryPolicy(max_attempts=2, base=0 * RetryPolicy().base))

    @shop.app.handler("orders", consumer="kept", keep_result=True, keep_payload="always")
    def keep(message: Message[Any], tx: Any) -> Any:
        shop.app.outbox.stage(tx, "out", PAYLOAD, headers=HEADERS)
        return {"card": SECRET}

    shop.deliver(paid("a", PAYLOAD, headers=HEADERS), "billing")
    shop.deliver(paid("a", PAYLOAD + b" ", headers=HEADERS), "billing")
    assert shop.work() == [Outcome.DEAD]
    assert shop.app.answer(paid("k", PAYLOAD, headers=HEADERS), consumer="kept").result == {
        "card": SECRET
    }
    relayed(shop.app)


def check_all(shop: Shop, codec: AesGcm) -> None:
    """All of it is read, and runs, with these keys alone, and nothing plain is accepted."""
    with App(shop.url, codec=codec) as app, Admin(app) as admin:
        (dead,) = admin.show(InboxFilter(consumer="billing", message_id="a"), reveal=True)
        assert (dead.payload, dead.headers) == (PAYLOAD, (("x-customer", SECRET),))
        assert {str(past.error).partition("\n")[0] for past in dead.history} == {SECRET}
        assert str(dead.error).startswith(SECRET)
        (kept,) = admin.show(KEPT, reveal=True)
        assert (kept.payload, json.loads(kept.result or b"")) == (PAYLOAD, {"card": SECRET})
        (aside,) = admin.show(QuarantineFilter(message_id="a"), reveal=True)
        assert (aside.payload, aside.headers) == (PAYLOAD + b" ", (("x-customer", SECRET),))
        letters = OutboxFilter(message_id=admin.list(OutboxFilter())[0].message_id)
        (letter,) = admin.show(letters, reveal=True)
        assert (letter.payload, letter.error) == (PAYLOAD, SECRET)


@pytest.mark.every_database
def test_every_text_of_every_table_comes_under_the_key(database_url: str) -> None:
    relaying = RelayPolicy(retry=AT_ONCE)
    with opened(database_url, relaying=relaying) as shop:
        fill(shop)
        all_of_it = {"inbox": (2, 2), "attempt": (2, 0), "quarantine": (1, 1), "outbox": (1, 1)}
        with App(shop.url, codec=BEFORE) as app, Admin(app) as admin:
            before = everything(shop.raw)
            assert "plain-rows" in set(findings(app))
            assert counted(admin.encrypt(dry_run=True)) == all_of_it
            assert everything(shop.raw) == before
            batches = list(admin.encrypt_batches(actor="ann", reason="audit of May"))
            done = batches[-1]
            assert (counted(done), done.complete, done.key_id) == (all_of_it, True, "2026-05")
            assert {len(so_far.tables) for so_far in batches} == {1, 2, 3, 4}
            assert SECRET not in everything(shop.raw)
            assert SECRET.encode().hex() not in everything(shop.raw)
            assert not set(findings(app)) & {"plain-rows", "key-missing"}
            # a second time there is nothing to do
            assert {count for count, _ in counted(admin.encrypt()).values()} == {0}
            audited = {(row.action, row.actor, row.affected) for row in admin.audit()}
            assert audited == {
                ("encrypt", "ann", 1), ("encrypt attempts", "ann", 2), ("quarantine encrypt", "ann", 1),
                ("outbox encrypt", "ann", 1),
            }  # fmt: skip
        check_all(shop, BEFORE)
        with App(shop.url, codec=AFTER) as app, Admin(app) as admin:
            assert "key-missing" in set(findings(app))
            done = admin.encrypt()
            assert {table.unreadable for table in done.tables} == {1, 2}
            assert not done.complete
            assert any("encrypted with key '2026-05'" in reason for reason in done.reasons)
        with App(shop.url, codec=BOTH) as app, Admin(app) as admin:
            assert not set(findings(app)) & {"plain-rows", "key-missing"}
            older = {table: (count, 0) for table, (count, _) in all_of_it.items()}
            assert counted(admin.encrypt()) == older
        check_all(shop, AFTER)
        with App(shop.url) as app, Admin(app) as admin:
            with pytest.raises(ConfigurationError, match="nothing to encode with"):
                admin.encrypt()
            app.handler("orders", consumer="billing")(fail)
            assert "key-missing" in set(findings(app))


@pytest.mark.every_database
def test_rows_that_are_leased_or_locked_are_left_until_they_are_free(database_url: str) -> None:
    with opened(database_url, codec=BEFORE, plain="accept") as shop:
        shop.handler(keep_payload="always", mode="stored")
        plain = Shop(shop.url, shop.raw, App(shop.url))
        with plain.app:
            plain.handler(mode="stored")
            for name in ("a", "b", "c"):
                assert plain.deliver(paid(name, PAYLOAD)) is Outcome.DEFERRED
        ((leased, token),) = shop.lease(limit=1)
        with Admin(shop.app) as admin, Raw(database_url) as other:
            if shop.raw.product != "sqlite":
                # which has one writer only: it would wait for this one
                other.execute("BEGIN")
                other.execute(
                    "SELECT 1 FROM txbox_inbox WHERE consumer = 'billing' AND message_id = 'b' FOR UPDATE"
                )
            done = admin.encrypt(patience=AT_HAND)
            count = 2 if shop.raw.product == "sqlite" else 1
            assert (done.tables[0].count, done.tables[0].leased) == (count, 3 - count)
            if shop.raw.product != "sqlite":
                other.execute("ROLLBACK")
            assert shop.run(leased, token) is Outcome.PROCESSED
            done = admin.encrypt()
            assert (done.tables[0].count, done.tables[0].leased) == (3 - count, 0)
        assert sorted(shop.work()) == [Outcome.PROCESSED] * 2
        assert shop.effects() == 3


@pytest.mark.every_database
def test_workers_beside_it_run_each_message_once(database_url: str) -> None:
    """Leases, runs and failures of a worker go on in the middle of it, under either form of a row."""
    count, running = 120, threading.Event()
    with opened(database_url) as plain:
        plain.handler(mode="stored")
        for number in range(count):
            plain.deliver(paid(str(number), PAYLOAD, headers=HEADERS))
        with App(plain.url, codec=BEFORE, plain="accept") as app:
            shop = Shop(plain.url, plain.raw, app)
            failed: set[str] = set()

            def once(message: Message[Any], tx: Any) -> None:
                running.set()
                if message.payload != PAYLOAD or message.headers.get("x-customer") != SECRET:
                    raise AssertionError(f"{message.id} reads otherwise")
                if message.id not in failed:
                    failed.add(str(message.id))
                    raise LookupError(SECRET)

            shop.handler(once, retry=AT_ONCE, keep_payload="always")
            outcomes: list[Outcome] = []

            def work() -> None:
                while ran := shop.work(limit=7):
                    outcomes.extend(ran)

            worker = threading.Thread(target=work)
            worker.start()
            assert running.wait(30)
            with App(plain.url, codec=BEFORE, plain="accept") as beside, Admin(beside) as admin:
                while worker.is_alive():
                    admin.encrypt(patience=AT_HAND)
                worker.join()
                admin.encrypt()
                assert {table.count for table in admin.encrypt(dry_run=True).tables} == {0}
            assert outcomes.count(Outcome.PROCESSED) == count == shop.effects()
            assert outcomes.count(Outcome.FAILED) == count
            assert SECRET not in everything(plain.raw)


SERVICE = """
import os, signal
from txbox import App
from txbox.encryption import AesGcm

class Mortal(AesGcm):
    left = int(os.environ.get("LIVES", "1000000"))
    def encode(self, data, context=None):
        Mortal.left -= 1
        if Mortal.left < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().encode(data, context)

app = App(os.environ["SHOP_URL"], codec=Mortal({"2026-05": os.environ["SHOP_KEY"]}))
"""


@pytest.mark.every_database
def test_killed_in_the_middle_it_goes_on_where_it_was(database_url: str, command: Command) -> None:
    count, lives = 230, 350
    with opened(database_url) as shop:
        shop.handler(mode="stored")
        for number in range(count):
            shop.deliver(paid(str(number), PAYLOAD, headers=HEADERS))
        command.file("vault.py", SERVICE)
        env = {"SHOP_URL": database_url, "SHOP_KEY": OLD, "TXBOX_APP": ""}
        command("encrypt", "vault:app", env={**env, "LIVES": str(lives)}, code=-signal.SIGKILL)
        done = shop.raw.rows("SELECT count(*) FROM txbox_inbox WHERE key_id = '2026-05'")
        # payload and headers of each row, in whole batches
        already = int(done[0][0])
        assert 0 < already <= lives // 2
        ended = command("encrypt", "vault:app", "--json", env=env)
        assert {of["table"]: of["count"] for of in ended.json["tables"]}[
            "txbox_inbox"
        ] == count - already
        ended = command("encrypt", "vault:app", env=env)
        assert "All are encrypted with the key 2026-05." in ended.out
        assert SECRET not in everything(shop.raw)
        with App(shop.url, codec=BEFORE) as app:
            later = Shop(shop.url, shop.raw, app)
            later.handler()
            while later.work(limit=100):
                pass
        assert later.effects() == count
