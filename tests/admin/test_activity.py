"""What workers have counted, summed by steps of time."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import pytest

from tests.support.databases import Raw
from txbox.admin import Admin
from txbox.store.activity import Histogram


@pytest.mark.every_database
@pytest.mark.parametrize("minutes", [1, 30, 90])
def test_a_step_is_the_sum_of_its_minutes_and_processes(
    minutes: int, database_url: str, raw: Callable[[str], Raw]
) -> None:
    view = raw(database_url)
    with Admin(database_url) as admin:
        now = int(admin.activity().until.timestamp() // 60)
        # together longer than the 1,024 bytes that MySQL strings together by itself
        latency, run = Histogram([7] * 18), Histogram([0, 10**15])
        for ago in range(40):
            for worker in ("one", "two"):
                view.execute(
                    "INSERT INTO txbox_activity (minute, kind, name, worker, received, failed, latency, run, oldest_s)"
                    " VALUES (?, 'consumer', 'billing', ?, 2, 1, ?, ?, ?)",
                    (now - ago, worker, latency.as_text(), run.as_text(), float(ago)),
                )
        view.execute(
            "INSERT INTO txbox_activity (minute, kind, name, worker, received)"
            " VALUES (?, 'route', 'billing', '', 1)",
            (now,),
        )
        found = admin.activity(timedelta(hours=3), step=timedelta(minutes=minutes))
        of_one = admin.activity(
            timedelta(hours=3), step=timedelta(minutes=minutes), only=("consumer", "billing")
        )
        of_another = admin.activity(only=("route", "billing"))
    assert of_one.consumers == found.consumers
    assert not of_one.routes
    assert not of_another.consumers
    assert [route.total.received for route in of_another.routes] == [1]
    (billing,) = found.consumers
    assert (billing.total.received, billing.total.failed, billing.total.processed) == (160, 80, 0)
    assert billing.total.latency == Histogram([560] * 18)
    assert billing.total.run == Histogram([0, 80 * 10**15])
    assert billing.total.oldest_s == 39.0
    ats = [point.at for point in billing.points]
    assert len(ats) in (40, 41) if minutes == 1 else len(ats) in (1, 2, 3)
    assert all(at.timestamp() % (minutes * 60) == 0 for at in ats)
    assert ats == sorted(ats)
    assert sum(point.counts.received for point in billing.points) == 160
