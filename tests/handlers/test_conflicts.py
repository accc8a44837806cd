"""The order of the time-outs, checked before anything is consumed."""

from __future__ import annotations

import logging
from datetime import timedelta
from typing import Any

import pytest

from tests.support.shop import TOPIC, opened, paid
from tests.support.sources import Memory
from tests.support.workers import worker
from txbox import Lease, Limits
from txbox.brokers.base import InFlight, Progress


def started(url: str, source: Memory, *, timeout_s: float | None = None, **policies: Any) -> int:
    with opened(url, **policies) as shop:
        options: dict[str, Any] = (
            {} if timeout_s is None else {"timeout": timedelta(seconds=timeout_s)}
        )
        shop.handler(**options)
        shop.app.consume(source, [TOPIC])
        return worker(shop.app, once=True).run()


@pytest.mark.parametrize(
    ("claim_s", "timeout_s", "lease_s", "source_s", "named"),
    [
        (5, None, 5, (None, None), ("Limits.lock_timeout is 5 s", "Lease.duration 5 s")),
        (5, 3, 60, (None, None), ("Limits.lock_timeout is 5 s", "tests.support.shop", " 3 s")),
        (5, 60, 60, (None, None), ("timeout= of ", "is 60 s", "Lease.duration 60 s")),
        (5, None, 60, (None, 60), ("memory", "after 60 s", "Lease.duration is 60 s")),
        (5, None, 300, (10, 10), ("memory", "after 10 s", "every 10 s")),
    ],
)
def test_a_wrong_order_ends_with_status_2(
    sqlite_url: str,
    caplog: pytest.LogCaptureFixture,
    *,
    claim_s: float,
    timeout_s: float | None,
    lease_s: float,
    source_s: tuple[float | None, float | None],
    named: tuple[str, ...],
) -> None:
    source = Memory([paid("m1")])
    source.tend_every_s, source.redelivery_s = source_s
    limits = Limits(lock_timeout=timedelta(seconds=claim_s))
    lease = Lease(duration=timedelta(seconds=lease_s))

    assert started(sqlite_url, source, timeout_s=timeout_s, limits=limits, lease=lease) == 2

    (error,) = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    for part in named:
        assert part in error
    assert source.received == []
    assert source.threads == set(), "found before the source was opened"


@pytest.mark.parametrize(
    ("timeout_s", "tend_s", "redelivery_s"),
    # what is tended may be redelivered sooner than a lease runs out; None: never, or not known
    [(None, None, None), (30, 3, 10), (30, None, 61), (30, 3, None)],
)
def test_the_right_order_runs(
    sqlite_url: str, timeout_s: float | None, tend_s: float | None, redelivery_s: float | None
) -> None:
    source = Memory([paid("m1")])
    source.tend_every_s, source.redelivery_s = tend_s, redelivery_s

    lease = Lease(duration=timedelta(seconds=60))
    assert started(sqlite_url, source, timeout_s=timeout_s, lease=lease) == 0

    assert source.settled_ids == ["m1"]


def test_a_time_out_that_only_the_broker_knows(
    sqlite_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    class Asking(Memory):
        def open(self, topics: Any, progress: Progress, in_flight: InFlight) -> None:
            super().open(topics, progress, in_flight)
            self.redelivery_s = 30.0

    source = Asking([paid("m1")])

    assert started(sqlite_url, source) == 2

    assert "after 30 s" in caplog.text
    assert source.received == []
    assert source.closed
