"""How many messages the next transaction takes, and how many share a savepoint (`txbox.processing.attempt`)."""

from __future__ import annotations

from datetime import timedelta

import pytest

from txbox.policy import Batching
from txbox.processing import attempt as module
from txbox.processing.attempt import BatchSize

_CEILING = 100
_FAST_S = 0.001
_SLOW_S = 0.2


class Clock:
    """A clock that the test turns on."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(module, "time", made)
    return made


@pytest.fixture
def pace(clock: Clock) -> BatchSize:
    return BatchSize(Batching(messages=_CEILING, duration=timedelta(milliseconds=50)))


def grown(pace: BatchSize) -> BatchSize:
    while (size := pace.messages) < _CEILING:
        pace.committed(size, _FAST_S)
        assert pace.messages > size
    return pace


def test_it_begins_with_one_and_doubles_up_to_the_bound(pace: BatchSize) -> None:
    sizes = []
    for _ in range(9):
        sizes.append(pace.messages)
        pace.committed(pace.messages, _FAST_S)
    assert sizes == [1, 2, 4, 8, 16, 32, 64, 100, 100]


def test_a_batch_that_was_not_full_proves_nothing(pace: BatchSize) -> None:
    pace.committed(1, _FAST_S)
    pace.committed(2, _FAST_S)
    assert pace.messages == 4
    for _ in range(10):
        pace.committed(1, _FAST_S)
    assert pace.messages == 4


def test_half_of_a_batch_tells_enough(pace: BatchSize) -> None:
    """Duplicates leave less to run than was taken: what it took is scaled to a whole batch."""
    pace.committed(1, _FAST_S)
    pace.committed(2, _FAST_S)
    pace.committed(2, 0.013)
    assert pace.messages == 4, "twice as many as a whole batch might take 52 ms"
    pace.committed(2, 0.012)
    assert pace.messages == 8


def test_what_took_too_long_is_halved_down_to_one(pace: BatchSize) -> None:
    grown(pace)
    pace.committed(100, _SLOW_S)
    assert pace.messages == 50
    for _ in range(10):
        pace.committed(pace.messages, _SLOW_S)
    assert pace.messages == 1


def test_between_half_of_the_time_and_all_of_it_the_size_stays(pace: BatchSize) -> None:
    pace.committed(1, _FAST_S)
    for _ in range(5):
        pace.committed(pace.messages, 0.03)
    assert pace.messages == 2


def test_a_conflict_halves_and_bounds_for_longer_each_time(pace: BatchSize, clock: Clock) -> None:
    grown(pace)
    pace.conflicted(100)
    assert pace.messages == 50
    pace.committed(50, _FAST_S)
    assert pace.messages == 50, "it stays under what conflicted"
    pace.conflicted(50)
    assert pace.messages == 25
    clock.now_s += 1.5
    pace.committed(25, _FAST_S)
    assert pace.messages == 25, "the second time it is longer"
    clock.now_s += 1.0
    pace.committed(25, _FAST_S)
    assert pace.messages == 50


def test_conflicts_that_come_back_end_at_one_message(pace: BatchSize) -> None:
    grown(pace)
    while pace.messages > 1:
        size = pace.messages
        pace.conflicted(size)
        assert pace.messages == size // 2
    pace.conflicted(1)
    pace.committed(1, _FAST_S)
    assert pace.messages == 1


def test_the_other_side_of_a_conflict_counts_nothing(pace: BatchSize, clock: Clock) -> None:
    """Both batches report one deadlock: it is one step down, and one wait."""
    grown(pace)
    pace.conflicted(100)
    pace.conflicted(100)
    assert pace.messages == 50
    clock.now_s += 1.1
    pace.committed(50, _FAST_S)
    assert pace.messages == 100


def test_a_conflict_of_a_message_alone_is_no_reason_to_change(pace: BatchSize) -> None:
    grown(pace)
    pace.conflicted(1)
    assert pace.messages == _CEILING


def test_groups_shrink_with_the_share_of_failures(pace: BatchSize) -> None:
    assert pace.group == 0, "nothing has failed: no savepoints"
    groups = []
    for share in (0.01, 0.1, 0.5, 1.0):
        for _ in range(100):
            pace.committed(100, _FAST_S, int(100 * share))
        groups.append(pace.group)
    assert groups == [10, 3, 1, 1]


def test_one_failure_in_a_batch_brings_savepoints_and_many_good_ones_end_them(
    pace: BatchSize,
) -> None:
    grown(pace)
    pace.failed(100)
    assert 1 <= pace.group <= 64
    assert pace.messages == 64, "a backend caches 64 subtransactions"
    for _ in range(20):
        pace.committed(64, _FAST_S)
    assert pace.group == 0
    assert pace.messages == _CEILING
