"""The pauses between tries."""

from __future__ import annotations

import pytest

from txbox.policy import Backoff


def test_pauses_grow_to_the_longest_and_begin_again_after_a_success() -> None:
    backoff = Backoff(0.5, 3.0)
    assert [backoff.next_s() for _ in range(5)] == [0.5, 1.0, 2.0, 3.0, 3.0]
    assert backoff.at_longest
    backoff.reset()
    assert (backoff.pause_s, backoff.at_longest) == (0.5, False)
    assert Backoff(5.0, 1.0).next_s() == 1.0, "never more than the longest"


def test_pauses_are_spread_and_the_spread_does_not_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("random.uniform", lambda _least, most: most)
    backoff = Backoff(1.0, 100.0, factor=1.5, spread=(0.5, 1.5))
    assert [backoff.next_s() for _ in range(3)] == [1.5, 2.25, 3.375]
