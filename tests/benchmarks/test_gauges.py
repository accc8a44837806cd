"""What the gauges say moves with what they measure."""

from __future__ import annotations

from collections import Counter

import psycopg
import pytest

from benchmarks.lazy import lazy_work
from benchmarks.place import Gauges
from benchmarks.profile import counting
from benchmarks.setting import Setting
from benchmarks.workload import verify


def test_the_servers_cpu_and_wal_grow_with_its_work(url: str) -> None:
    gauges = Gauges(url)
    try:
        before = gauges.read()
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute("CREATE TABLE work AS SELECT generate_series(1, 300000) AS id")
            after = gauges.read()
    finally:
        gauges.close()

    if before.server_cpu_s is None or after.server_cpu_s is None:
        pytest.skip("the server does not run in sight of /proc")
    assert before.wal_bytes is not None
    assert after.wal_bytes is not None
    # others may work on this server, too: there is no upper bound
    assert after.server_cpu_s - before.server_cpu_s > 0.01
    assert after.wal_bytes - before.wal_bytes > 1_000_000


def test_round_trips_are_counted(url: str) -> None:
    with (
        counting(url) as proxy,
        # preparing a statement is a round trip more
        psycopg.connect(proxy.url, autocommit=True, prepare_threshold=None) as connection,
    ):
        login = proxy.turns[0]
        for _ in range(20):
            connection.execute("SELECT 1")

        assert proxy.turns[0] - login == 20

        with connection.pipeline():
            for _ in range(20):
                connection.execute("SELECT 1")

        assert proxy.turns[0] - login <= 23


def test_a_workload_that_is_made_as_it_goes_is_verified_like_any_other(setting: Setting) -> None:
    work = lazy_work(110)
    counts = Counter(delivery.id for delivery in work.deliveries)
    assert len(counts) == work.distinct == 100
    assert sum(counts.values()) == 110

    done = setting.naive().round(work)

    assert done.verified.good
    with setting.beside.connect() as admin:
        admin.execute("DELETE FROM orders WHERE number = 42")
        assert verify(admin, work).lost == 1
