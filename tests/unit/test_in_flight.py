"""The ids that a process works on."""

from __future__ import annotations

from txbox.in_flight import InFlight


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
