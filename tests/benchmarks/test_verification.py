"""The check of a round can fail: whatever is changed behind its back, it notices."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.contender import inbox_off_by
from benchmarks.result import Verified, passed
from benchmarks.setting import Setting
from benchmarks.workload import Tx, Work, pay, verify, writes
from txbox import Message

_TAMPERED = {
    "lost": "DELETE FROM orders WHERE id = (SELECT min(id) FROM orders)",
    "doubled": "INSERT INTO orders (number, account, amount) SELECT number, account, amount FROM orders LIMIT 1",
    "balance_off_by": "UPDATE account SET balance = balance + 1 WHERE id = 7",
    "inbox_off_by": "DELETE FROM txbox_inbox WHERE arrival = (SELECT min(arrival) FROM txbox_inbox)",
}


def _verified(setting: Setting, work: Work) -> Verified:
    with setting.place.connect() as admin:
        return verify(admin, work, inbox_off_by(admin, work))


@pytest.mark.parametrize("what", _TAMPERED)
def test_a_row_that_was_tampered_with_is_found(setting: Setting, what: str) -> None:
    work = setting.work()(1)
    done = setting.txbox("txbox", writes).round(work)
    assert done.verified.good
    assert _verified(setting, work).good

    with setting.place.connect() as admin:
        admin.execute(_TAMPERED[what].encode())

    found = _verified(setting, work)
    assert not found.good
    assert getattr(found, what) == 1


def test_a_message_that_failed_more_than_once_is_found(setting: Setting) -> None:
    work = setting.work(failing=0.1)(1)
    assert setting.txbox("txbox", writes).round(work).verified.good

    with setting.place.connect() as admin:
        admin.execute(
            "UPDATE txbox_inbox SET attempts = 2 WHERE arrival = "
            "(SELECT min(arrival) FROM txbox_inbox WHERE status = 'failed')"
        )

    assert _verified(setting, work).inbox_off_by > 0


def test_a_handler_that_loses_work_fails_its_phase(setting: Setting) -> None:
    def careless(message: Message[dict[str, Any]], tx: Tx) -> None:
        if message.body["order"] % 10:
            pay(message.body, tx)

    contender = setting.txbox("careless", careless)
    rounds = setting.interleaved([(contender, setting.work())], warm=False)
    document = setting.result("P0", "Careless", "once", [], rounds)

    assert document["contenders"]["careless"]["lost"] == 6
    assert not passed(document)


def test_a_handler_that_pays_twice_fails_its_phase(setting: Setting) -> None:
    def generous(message: Message[dict[str, Any]], tx: Tx) -> None:
        pay(message.body, tx)
        if message.body["order"] == 3:
            pay(message.body, tx)

    contender = setting.txbox("generous", generous)
    rounds = setting.interleaved([(contender, setting.work())], warm=False)

    assert not passed(setting.result("P0", "Generous", "once", [], rounds))
    assert rounds[0].verified.doubled == 1
