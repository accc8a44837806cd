"""AES-GCM at rest: what the tables hold, keys that rotate between any two writes, and rows that cannot be read."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from typing import Any

import pytest

from tests.admin.test_admin_outbox import relayed
from tests.store.test_codec import everything
from tests.support.command import Command
from tests.support.recording import Recorder
from tests.support.shop import AT_ONCE, Shop, opened, paid
from tests.support.waiting import DEADLINE_S
from txbox import App, ConfigurationError, Inbox, Message, Outcome, Reject, RelayPolicy
from txbox.admin import Admin, InboxFilter, OutboxFilter, QuarantineFilter
from txbox.encryption import AesGcm, new_key
from txbox.errors import BrokerError

OLD, NEW, OTHER = new_key(), new_key(), new_key()
BEFORE = AesGcm({"2026-05": OLD})
AFTER = AesGcm({"2026-11": NEW, "2026-05": OLD})
SECRET = "plain-words"
PAYLOAD = json.dumps({"card": SECRET}).encode()
HEADERS = {"x-customer": SECRET}


# -- the codec alone -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data", [b"", b"x", bytes(range(256)) * 4000], ids=["empty", "byte", "mega"]
)
def test_what_is_encrypted_comes_back(data: bytes) -> None:
    sealed = AFTER.encode(data)
    assert AFTER.decode(sealed, "2026-11") == data
    # a nonce of its own each time
    assert AFTER.encode(data) != sealed
    assert len(sealed) == len(data) + 2 + len("2026-11") + 12 + 16


def test_the_first_key_encrypts_and_all_decrypt() -> None:
    assert AFTER.key_id == "2026-11"
    sealed = BEFORE.encode(PAYLOAD)
    assert AFTER.decode(sealed, "2026-05") == PAYLOAD
    # a later write may have given the row another name
    assert AFTER.decode(sealed, "2026-11") == PAYLOAD
    with pytest.raises(
        ConfigurationError, match="encrypted with key '2026-11', and AesGcm has 2026-05"
    ):
        BEFORE.decode(AFTER.encode(PAYLOAD), "2026-11")


def test_nonces_do_not_repeat() -> None:
    start = 2 + len("2026-05")
    nonces = {BEFORE.encode(b"")[start : start + 12] for _ in range(20_000)}
    assert len(nonces) == 20_000


def test_no_altered_byte_goes_unnoticed() -> None:
    sealed = BEFORE.encode(PAYLOAD)
    for at in range(len(sealed)):
        altered = bytes(byte ^ 1 if place == at else byte for place, byte in enumerate(sealed))
        with pytest.raises(ConfigurationError):
            BEFORE.decode(altered, "2026-05")
    for end in range(len(sealed)):
        with pytest.raises(ConfigurationError):
            BEFORE.decode(sealed[:end], "2026-05")


def test_another_key_of_the_same_name_is_told_from_a_missing_one() -> None:
    with pytest.raises(
        ConfigurationError, match="another key of this name, or its bytes were altered"
    ):
        AesGcm({"2026-05": OTHER}).decode(BEFORE.encode(PAYLOAD), "2026-05")


def test_one_name_cannot_pass_for_another() -> None:
    """Under one secret with two names, the bytes of one are not those of the other."""
    both = AesGcm({"a": OLD, "b": OLD})
    sealed = both.encode(PAYLOAD)
    with pytest.raises(ConfigurationError):
        both.decode(sealed.replace(b"\x01\x01a", b"\x01\x01b", 1), "b")


@pytest.mark.parametrize(
    "keys",
    [
        {}, None, "k1", {"": OLD}, {"é": OLD}, {"a\0": OLD}, {"a" * 65: OLD}, {7: OLD}, {"k1": OLD[:-4]},
        {"k1": "é" * 43}, {"k1": b"0" * 32}, {"k1": base64.b64encode(b"0" * 16).decode()}, {"k1": "!" + OLD[1:]},
        {"k1": None},
    ],
)  # fmt: skip
def test_what_is_no_key_is_refused_without_being_told(keys: Any) -> None:
    with pytest.raises(ConfigurationError) as refused:
        AesGcm(keys)
    assert OLD[:12] not in str(refused.value)


def test_a_key_in_the_alphabet_of_urls_is_the_same_key() -> None:
    raw = base64.b64decode(OLD)
    for text in (base64.urlsafe_b64encode(raw).decode().rstrip("="), f"  {OLD}\n"):
        assert AesGcm({"2026-05": text}).decode(BEFORE.encode(b"x"), "2026-05") == b"x"
    assert OLD not in repr(BEFORE)


def test_a_process_that_lacks_the_extra_is_told() -> None:
    program = """
import sys
sys.modules["cryptography"] = None
import txbox
try:
    import txbox.encryption
except txbox.ConfigurationError as error:
    assert "txbox[crypto]" in str(error)
else:
    raise AssertionError
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=DEADLINE_S)


def test_what_is_bound_is_read_only_where_it_was_written() -> None:
    sealed = BEFORE.encode(PAYLOAD, context=b"here")
    assert BEFORE.decode(sealed, "2026-05", context=b"here") == PAYLOAD
    for context in (b"there", b"", None):
        with pytest.raises(ConfigurationError, match="altered or moved"):
            BEFORE.decode(sealed, "2026-05", context=context)
    # neither form passes for the other
    for altered in (b"\x01" + sealed[1:], b"\x02" + BEFORE.encode(PAYLOAD)[1:]):
        with pytest.raises(ConfigurationError):
            BEFORE.decode(altered, "2026-05", context=b"here")


# -- through the tables ----------------------------------------------------------------------------


def rotated(shop: Shop, codec: AesGcm, **options: Any) -> App:
    """The same service, started again with other keys."""
    return App(shop.url, codec=codec, **options)


def test_no_table_holds_a_word_of_it_and_handlers_get_all(database_url: str) -> None:
    seen: list[Any] = []
    broker = Recorder()

    def body(message: Message[Any], tx: Any) -> Any:
        seen.append((message.payload, message.headers.get("x-customer")))
        if message.attempt == 1:
            raise LookupError(SECRET)
        shop.app.outbox.stage(tx, "out", PAYLOAD, headers=HEADERS)

    with opened(database_url, codec=BEFORE) as shop:
        shop.app.publish(broker, topics=["out"])
        shop.handler(body, keep_payload="always")
        assert shop.deliver(paid("a", PAYLOAD, headers=HEADERS)) is Outcome.FAILED
        assert shop.deliver(paid("a", PAYLOAD + b" ", headers=HEADERS)) is Outcome.QUARANTINED
        assert SECRET not in everything(shop.raw)
        assert shop.work() == [Outcome.PROCESSED]
        held = everything(shop.raw)
        assert SECRET not in held
        assert SECRET.encode().hex() not in held
        relayed(shop.app)
    assert seen == [(PAYLOAD, SECRET)] * 2
    (sent,) = broker.sent
    assert (sent.payload, sent.headers.get("x-customer")) == (PAYLOAD, SECRET)


def test_keys_may_change_between_any_two_writes(database_url: str) -> None:
    """A failure before, one after, then the payload, its headers, both errors and the result are read."""
    seen: list[Any] = []

    def fails(message: Message[Any], tx: Any) -> None:
        raise LookupError(f"{SECRET} {message.attempt}")

    with opened(database_url, codec=BEFORE) as shop:
        shop.handler(fails, retry=AT_ONCE)
        assert shop.deliver(paid("a", PAYLOAD, headers=HEADERS)) is Outcome.FAILED
        with rotated(shop, AFTER) as app:
            later = Shop(shop.url, shop.raw, app)
            later.handler(fails, retry=AT_ONCE)
            assert later.work() == [Outcome.FAILED]
            with Admin(app) as admin:
                (found,) = admin.show(InboxFilter(consumer="billing", message_id="a"), reveal=True)
        assert (found.payload, found.headers) == (PAYLOAD, (("x-customer", SECRET),))
        assert str(found.error).startswith(f"{SECRET} 2")
        assert sorted(str(past.error).partition("\n")[0] for past in found.history) == [
            f"{SECRET} 1", f"{SECRET} 2",
        ]  # fmt: skip
        with rotated(shop, AFTER) as app:
            last = Shop(shop.url, shop.raw, app)

            def keeps(message: Message[Any], tx: Any) -> None:
                seen.append((message.payload, message.headers.get("x-customer")))

            last.handler(keeps, keep_payload="always")
            assert last.work() == [Outcome.PROCESSED]
            with Admin(app) as admin:
                assert admin.replay(InboxFilter(consumer="billing")).processed == 1
    assert seen == [(PAYLOAD, SECRET)] * 2


def test_results_quarantine_and_outbox_survive_a_rotation(database_url: str) -> None:
    answers: list[BrokerError | None] = [BrokerError(SECRET), None]
    broker = Recorder(lambda message: answers.pop(0))
    once = RelayPolicy(retry=AT_ONCE)

    def register(shop: Shop) -> None:
        shop.app.publish(broker, topics=["out"])

        @shop.app.handler("orders", consumer="billing", keep_result=True)
        def handle(message: Message[Any], tx: Any) -> Any:
            shop.app.outbox.stage(tx, "out", PAYLOAD, headers=HEADERS)
            return {"card": SECRET}

    with opened(database_url, codec=BEFORE, relaying=once) as shop:
        register(shop)
        assert shop.app.answer(paid("a", PAYLOAD)).result == {"card": SECRET}
        shop.deliver(paid("a", PAYLOAD + b" "))
        with rotated(shop, AFTER, relaying=once) as app:
            later = Shop(shop.url, shop.raw, app)
            register(later)
            assert app.answer(paid("a", PAYLOAD)).result == {"card": SECRET}
            from tests.admin.test_admin_outbox import relay_of

            relay_of(app).turn()
            with Admin(app) as admin:
                (row,) = admin.list(OutboxFilter())
                assert row.error == SECRET
                assert admin.accept(QuarantineFilter(message_id="a"), message_id="b").count == 1
            assert SECRET not in everything(shop.raw)
            later.raw.execute("UPDATE txbox_outbox SET available_at = staged_at")
            relayed(app)
            assert later.work() == [Outcome.PROCESSED]
    assert broker.sent[0].payload == PAYLOAD


def test_the_door_of_accept_quarantines_under_the_key(sqlite_url: str) -> None:
    import sqlite3

    with opened(sqlite_url, codec=BEFORE) as shop:
        connection = sqlite3.connect(sqlite_url.removeprefix("sqlite:///"))
        Inbox("billing", codec=BEFORE).quarantine(connection, paid("a", PAYLOAD), reason="odd")
        connection.commit()
        connection.close()
        assert SECRET not in everything(shop.raw)
        with Admin(shop.app) as admin:
            (found,) = admin.show(QuarantineFilter(message_id="a"), reveal=True)
    assert found.payload == PAYLOAD


@pytest.mark.parametrize(
    "codec", [AesGcm({"2027-01": OTHER}), AesGcm({"2026-05": OTHER})], ids=["missing", "wrong"]
)
def test_a_row_that_cannot_be_read_costs_an_attempt_and_keeps_its_content(
    database_url: str, codec: AesGcm
) -> None:
    with opened(database_url, codec=BEFORE) as shop:
        shop.handler(lambda message, tx: _fail(), retry=AT_ONCE)
        shop.deliver(paid("a", PAYLOAD, headers=HEADERS))
        content = (
            "SELECT content_type, headers, origin, payload, has_payload, key_id FROM txbox_inbox"
        )
        before = shop.raw.rows(content)
        with rotated(shop, codec) as app:
            later = Shop(shop.url, shop.raw, app)
            later.handler()
            assert later.work() == [Outcome.FAILED]
            assert later.calls == []
            row = later.row("a")
            assert (row.attempts, row.error_type) == (2, "UnreadableMessage")
            assert "2026-05" in str(row.error)
            assert SECRET not in str(row.error)
            with Admin(app) as admin:
                # a page of others is not hidden by it
                assert admin.list(InboxFilter())[0].error == row.error
                where = InboxFilter(consumer="billing", message_id="a")
                (found,) = admin.show(where)
                assert (found.headers, found.payload) == ((("(encoded)", None),), None)
                (found,) = admin.show(where, reveal=True)
                assert (found.headers, found.payload) == ((("(encoded)", None),), None)
                assert "2026-05" in str(found.unreadable)
                assert any(
                    said.kind == "unreadable" for said in admin.explain("a").places[0].sentences
                )
                with pytest.raises(ConfigurationError, match="2026-05"):
                    admin.edit("billing", "a", payload=b"{}")
        assert shop.raw.rows(content) == before
        assert shop.raw.value("SELECT count(*) FROM txbox_quarantine") == 0
        # with its key back, it goes on
        assert shop.work() == [Outcome.FAILED]
        assert shop.row("a").error_type == "LookupError"


def _fail() -> None:
    raise LookupError(SECRET)


def test_bytes_altered_in_the_database_are_refused_and_others_are_not_held_up(
    database_url: str,
) -> None:
    with opened(database_url, codec=BEFORE) as shop:
        shop.handler(mode="stored")
        assert shop.deliver(paid("a", PAYLOAD)) is Outcome.DEFERRED
        assert shop.deliver(paid("b", PAYLOAD)) is Outcome.DEFERRED
        (sealed,) = shop.raw.rows("SELECT payload FROM txbox_inbox WHERE message_id = 'a'")[0]
        altered = bytes(sealed)[:-1] + bytes([bytes(sealed)[-1] ^ 1])
        shop.raw.execute("UPDATE txbox_inbox SET payload = ? WHERE message_id = 'a'", (altered,))
        assert sorted(shop.work()) == [Outcome.FAILED, Outcome.PROCESSED]
        assert shop.calls == ["b"]
        with Admin(shop.app) as admin:
            where = InboxFilter(consumer="billing", message_id="a")
            assert admin.discard(where, reason="altered").count == 1
        assert shop.work() == []


class Unbound(AesGcm):
    """As it wrote before texts were bound to their rows, and as codecs of others do."""

    def encode(self, data: bytes) -> bytes:  # type: ignore[override]
        return super().encode(data)

    def decode(self, data: bytes, key_id: str) -> bytes:  # type: ignore[override]
        return super().decode(data, key_id)


@pytest.mark.parametrize("column", ["payload", "headers"])
def test_a_text_moved_to_another_message_is_not_read(database_url: str, column: str) -> None:
    with opened(database_url, codec=BEFORE) as shop:
        shop.handler(mode="stored", keep_payload="always")
        for name in ("a", "b"):
            assert shop.deliver(paid(name, PAYLOAD, headers=HEADERS)) is Outcome.DEFERRED
        named = f"SELECT {column} FROM txbox_inbox WHERE message_id = 'a'"
        ((text,),) = shop.raw.rows(named)
        shop.raw.execute(f"UPDATE txbox_inbox SET {column} = ? WHERE message_id = 'b'", (text,))
        assert sorted(shop.work()) == [Outcome.FAILED, Outcome.PROCESSED]
        assert shop.calls == ["a"]
        assert "moved in the database" in str(shop.row("b").error)


def test_a_text_of_the_quarantine_is_not_read_in_the_inbox(database_url: str) -> None:
    """Where there is another one of this id, and of those without an id any other one."""
    with opened(database_url, codec=BEFORE) as shop:
        shop.handler(mode="stored")
        assert shop.deliver(paid("a", PAYLOAD)) is Outcome.DEFERRED
        assert shop.deliver(paid("a", b"{}")) is Outcome.QUARANTINED
        for payload in (b"{}", PAYLOAD):
            assert shop.deliver(Message(topic="orders", payload=payload)) is Outcome.QUARANTINED
        ((aside,),) = shop.raw.rows("SELECT payload FROM txbox_quarantine WHERE message_id = 'a'")
        shop.raw.execute("UPDATE txbox_inbox SET payload = ?", (aside,))
        texts = "SELECT hash, payload FROM txbox_quarantine WHERE message_id = ''"
        (first, _), (_, other) = shop.raw.rows(texts)
        shop.raw.execute("UPDATE txbox_quarantine SET payload = ? WHERE hash = ?", (other, first))
        assert shop.work() == [Outcome.FAILED]
        assert "moved in the database" in str(shop.row("a").error)
        with Admin(shop.app) as admin:
            named = QuarantineFilter(hash=bytes(first).hex())
            (swapped,) = admin.show(named, reveal=True)
        assert "moved in the database" in str(swapped.unreadable)


@pytest.mark.parametrize(
    "altered",
    ["payload = ?, key_id = NULL, headers = NULL", 'headers = \'[["x-customer","Eve"]]\''],
)
def test_a_row_that_somebody_made_plain_is_not_read(database_url: str, altered: str) -> None:
    """Not even one whose payload is still encrypted, for its headers."""
    with opened(database_url, codec=BEFORE) as shop:
        shop.handler(mode="stored")
        shop.deliver(paid("a", PAYLOAD, headers=HEADERS))
        shop.raw.execute(f"UPDATE txbox_inbox SET {altered}", (b"{}",)[: altered.count("?")])
        assert shop.work() == [Outcome.FAILED]
        assert shop.calls == []
        assert "is plain, though App(codec=…) encodes" in str(shop.row("a").error)


def test_rows_from_before_the_codec_are_read_where_that_is_allowed(database_url: str) -> None:
    with opened(database_url) as shop:
        shop.handler(mode="stored")
        shop.deliver(paid("a", PAYLOAD, headers=HEADERS))
        with rotated(shop, BEFORE) as app:
            later = Shop(shop.url, shop.raw, app)
            later.handler(retry=AT_ONCE)
            assert later.work() == [Outcome.FAILED]
        with rotated(shop, BEFORE, plain="accept") as app:
            later = Shop(shop.url, shop.raw, app)
            later.handler()
            assert later.work() == [Outcome.PROCESSED]


def test_rows_that_were_not_bound_stay_readable(database_url: str) -> None:
    with opened(database_url, codec=Unbound({"2026-05": OLD})) as shop:
        shop.handler(lambda message, tx: _fail(), retry=AT_ONCE, keep_payload="always")
        assert shop.deliver(paid("a", PAYLOAD, headers=HEADERS)) is Outcome.FAILED
        with rotated(shop, BEFORE) as app:
            with Admin(app) as admin:
                (found,) = admin.show(InboxFilter(consumer="billing", message_id="a"), reveal=True)
            assert (found.payload, found.headers) == (PAYLOAD, (("x-customer", SECRET),))
            assert str(found.error).startswith(SECRET)
            later = Shop(shop.url, shop.raw, app)
            later.handler()
            assert later.work() == [Outcome.PROCESSED]


def test_what_an_edit_sets_aside_stays_readable(database_url: str) -> None:
    with opened(database_url, codec=BEFORE) as shop:
        shop.handler(lambda message, tx: _fail(), retry=AT_ONCE)
        shop.deliver(paid("a", PAYLOAD, headers=HEADERS))
        with Admin(shop.app) as admin:
            admin.edit("billing", "a", payload=b'{"card": 2}')
            (old,) = admin.show(QuarantineFilter(message_id="a"), reveal=True)
            (new,) = admin.show(InboxFilter(consumer="billing", message_id="a"), reveal=True)
            assert old.payload == PAYLOAD
            assert new.payload == b'{"card": 2}'
            assert str(new.error).startswith(SECRET)
            assert [str(past.error).startswith(SECRET) for past in new.history] == [True]


SERVICE = """
import os
from txbox import App, Message
from txbox.brokers.local import Local
from txbox.encryption import AesGcm

app = App({url!r}, codec=AesGcm({{os.environ["KEY_NAME"]: os.environ["KEY"]}}))

@app.handler("orders", consumer="billing")
def bill(message: Message[dict], tx): ...

app.consume(Local())
"""


def test_a_worker_without_the_key_goes_on_and_says_so(command: Command, sqlite_url: str) -> None:
    command.file("shop.py", SERVICE.format(url=sqlite_url))
    named = {"TXBOX_APP": "shop:app", "KEY_NAME": "2026-05", "KEY": OLD}
    rotated_to = {**named, "KEY_NAME": "2026-11", "KEY": NEW}
    command("send", "orders", "--id", "a", "--data", '{"card": 1}', env=named)
    command("send", "orders", "--id", "b", "--data", '{"card": 1}', env=rotated_to)
    ended = command("run", "--once", env=rotated_to)
    assert "UnreadableMessage" in ended.err
    assert OLD not in ended.err
    shown = command("show", "billing", "a", "--reveal", env=rotated_to).out
    assert "encrypted with key '2026-05', and AesGcm has 2026-11" in shown
    listed = command("list", "--json", env=named).json["messages"]
    assert {row["message_id"]: row["status"] for row in listed} == {"a": "failed", "b": "processed"}
    command("retry", "billing", "a", env=named)
    command("run", "--once", env=named)
    listed = command("list", "--json", env=named).json["messages"]
    assert {row["status"] for row in listed} == {"processed"}


def test_a_handler_that_rejects_leaves_its_letter_encrypted(database_url: str) -> None:
    broker = Recorder()

    def body(message: Message[Any], tx: Any) -> None:
        raise Reject(SECRET)

    with opened(database_url, codec=BEFORE) as shop:
        shop.app.publish(broker, topics=["letters"])
        shop.handler(body, dead_letter_topic="letters")
        assert shop.deliver(paid("a", PAYLOAD)) is Outcome.DEAD
        assert SECRET not in everything(shop.raw)
        relayed(shop.app)
    assert broker.sent[0].payload == PAYLOAD
