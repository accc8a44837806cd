"""The ids that a process works on."""

from __future__ import annotations

from txbox.processing.waiting import Holder, InFlight


def test_ids_are_taken_together_or_not_at_all() -> None:
    ids = InFlight()
    assert ids.enter_all("billing", ["1", "2"])
    assert not ids.enter_all("billing", ["2", "3"])
    assert ids.enter("billing", "3") is None, "what was refused together is free"
    assert ids.enter_all("shipping", ["1", "2"]), "another consumer has ids of its own"


def test_who_waits_is_woken_when_the_holder_leaves() -> None:
    ids = InFlight()
    assert ids.enter_all("billing", ["1", "2"])
    holder = ids.enter("billing", "2")
    assert holder is not None
    assert ids.enter("billing", "2") is holder
    ids.leave("billing", "1", "2")
    assert holder.done()
    assert ids.enter_all("billing", ["1", "2"])


def test_nothing_was_held() -> None:
    ids = InFlight()
    ids.leave("billing")
    assert ids.enter_all("billing", [])


def test_a_holder_may_hold_an_id_for_the_batch_behind_it() -> None:
    ids, lane = InFlight(), Holder()
    assert ids.enter_all("billing", ["1", "2"], lane)
    assert ids.enter_all("billing", ["2", "3"], lane)
    freed = ids.enter("billing", "2")
    assert freed is not None
    ids.leave("billing", "1", "2", holder=lane)
    assert not freed.done(), "the batch behind it holds this one still"
    assert ids.enter("billing", "1") is None
    ids.leave("billing", "2", "3", holder=lane)
    assert freed.done()
    assert ids.enter_all("billing", ["2", "3"])


def test_a_holder_waits_for_ids_of_another() -> None:
    ids, lane, other = InFlight(), Holder(), Holder()
    assert ids.enter_all("billing", ["1"], other)
    assert ids.enter_all("billing", ["2"], lane)
    assert not ids.enter_all("billing", ["1", "2"], lane)
    assert ids.enter("billing", "2") is not None, "it is held once, and was not entered again"
    ids.leave("billing", "2", holder=lane)
    assert ids.enter("billing", "2") is None


def test_a_third_batch_of_one_holder_has_to_wait() -> None:
    ids, lane = InFlight(), Holder()
    assert ids.enter_all("billing", ["1"], lane)
    assert ids.enter_all("billing", ["1"], lane)
    assert not ids.enter_all("billing", ["1"], lane)
