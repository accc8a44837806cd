"""Percentiles from a few buckets, and what is added, merged and written of them."""

from __future__ import annotations

import random

import pytest

from txbox.store.activity import BOUNDS_S, Counts, Histogram


def test_nothing_has_no_percentile() -> None:
    assert Histogram().quantile(0.5) is None
    assert Histogram().as_text() == ""


@pytest.mark.parametrize("share", [0.5, 0.95, 0.99])
def test_a_percentile_lies_in_the_bucket_of_the_true_one(share: float) -> None:
    drawn = random.Random(7)
    times = sorted(drawn.lognormvariate(-3, 1.5) for _ in range(5_000))
    histogram = Histogram()
    for seconds in times:
        histogram.add(seconds)
    true = times[int(share * len(times)) - 1]
    found = histogram.quantile(share)
    assert found is not None
    upper = next(bound for bound in BOUNDS_S if bound >= true)
    lower = max((bound for bound in BOUNDS_S if bound < true), default=0.0)
    assert lower <= found <= upper


def test_what_is_longer_than_the_last_bound_is_that_bound_at_least() -> None:
    histogram = Histogram()
    histogram.add(1e9)
    assert histogram.quantile(0.5) == BOUNDS_S[-1]


def test_a_bound_belongs_to_its_bucket() -> None:
    histogram = Histogram()
    histogram.add(0.001)
    assert histogram.buckets[0] == 1


@pytest.mark.parametrize("buckets", [[], [3], [0, 0, 7], [1] * (len(BOUNDS_S) + 1)])
def test_it_comes_back_from_its_column(buckets: list[int]) -> None:
    assert Histogram.of(Histogram(buckets).as_text()) == Histogram(buckets)


def test_the_longest_text_fits_its_column() -> None:
    assert len(Histogram([2**63 - 1] * (len(BOUNDS_S) + 1)).as_text()) <= 1024


def test_counts_of_two_processes_are_added_and_the_older_first_message_is_told() -> None:
    one, other = Counts(received=2, oldest_s=4.0), Counts(received=3, failed=1, oldest_s=9.0)
    one.latency.add(0.004)
    other.latency.add(0.004, 2)
    one.merge(other)
    one.merge(Counts())
    assert (one.received, one.failed, one.latency.count, one.oldest_s) == (5, 1, 3, 9.0)
