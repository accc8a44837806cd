"""What a chart draws and says of what was counted."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from txbox.admin.activity import Activities, Activity, Point, WorkerStatus, together
from txbox.admin.tables import Audited
from txbox.store.activity import Counts, Histogram, Pause, bucket_of
from txbox.ui.charts import Charts, charts

NOW = datetime(2026, 11, 28, 12, 30, tzinfo=UTC)
MINUTE = timedelta(minutes=1)


def counted(*steps: dict[str, Any], **more: Any) -> Charts:
    """The charts of an hour, of which these are the last minutes."""
    since = NOW - 59 * MINUTE
    points = tuple(
        Point(at=NOW - (len(steps) - 1 - number) * MINUTE, counts=Counts(**counts))
        for number, counts in enumerate(steps)
    )
    activity = Activity(kind="consumer", name="billing", total=Counts(), points=points)
    time = Activities(since=since, until=NOW, step=MINUTE, consumers=(activity,), routes=())
    return charts(activity, time, **more)


def within(seconds: float, times: int = 1) -> Histogram:
    times_of = Histogram()
    times_of.buckets[bucket_of(seconds)] += times
    return times_of


def test_outcomes_are_stacked_and_the_smallest_is_seen() -> None:
    drawn = counted({"processed": 1_500, "failed": 1}, {})
    throughput = drawn.charts[0]
    assert drawn.width == 600
    assert throughput.left == ("2,000", "1,000", "0")
    assert throughput.unit == "messages per min"
    paths = {kind: drawing for kind, _, drawing in throughput.paths}
    assert paths == {"processed": "M581 100.0v-75.0h8v75.0", "failed": "M581 25.0v-1.0h8v1.0"}
    assert [words for _, words, _ in throughput.paths] == ["processed 1,500", "failed 1"]
    assert throughput.steps[58].sentence == "1,500 processed, 1 failed"
    assert throughput.steps[59].sentence == "nothing"
    assert throughput.steps[58].since == "2026-11-28T12:29"
    assert throughput.steps[58].until == "2026-11-28T12:30"


def test_latency_has_round_marks_and_gaps() -> None:
    slow = {"latency": within(4.0, 10)}
    latency = counted({"latency": within(0.004, 10)}, {}, slow, slow).charts[1]
    assert latency.left == ("10 s", "1 s", "100 ms", "10 ms", "1 ms")
    drawing = latency.paths[0][2]
    assert drawing.count("M") == 2, "nothing is drawn where nothing was measured"
    assert drawing.count("h10") == 3
    assert "p50 -" in latency.steps[57].sentence


def test_waiting_is_marked_in_minutes_hours_and_days() -> None:
    lag = counted({"oldest_s": 0.4}, {"oldest_s": 60.0}, {"oldest_s": 3 * 3600.0}).charts[2]
    assert lag.left == ("1d", "1h", "10m", "60 s", "10 s", "1 s", "100 ms")
    # a mark is as far from the next one as any other
    heights = [float(step.split("h")[0]) for step in lag.paths[0][2].split(" ", 1)[1].split("V")]
    assert heights == [90.0, 50.0, 10.9]
    # longer than every mark
    years = counted({"oldest_s": 1e8}, {"oldest_s": 1e8}).charts[2]
    assert years.left == ("365d", "30d")
    assert years.paths[0][2].startswith("M580 0.0h10")


def test_latencies_are_a_map_with_the_sum_of_each_row_beside() -> None:
    assert counted({"processed": 1}, {}).heat is None
    few, many = within(0.004, 1), within(4.0, 100)
    heat = counted({"latency": few}, {}, {"latency": many}, {"latency": many}).heat
    assert heat is not None
    assert heat.rows[0] == ("up to 5 s", 200)
    assert heat.rows[-1] == ("up to 5 ms", 1)
    assert len(heat.rows) == 10, "and all between"
    # the darkest is the most; two steps with as many are one rectangle; few are visible beside many
    assert heat.shades == (
        (1, "M560 90.0h10v10.0h-10z"),
        (5, "M580 0.0h20v10.0h-20z"),
    )
    assert heat.bars == "M0 1.5h100.0v7.0H0zM0 91.5h1.0v7.0H0z"
    assert heat.description.endswith(
        "100 ms, 0 up to 200 ms, 0 up to 500 ms, 0 up to 1 s, 0 up to 2 s, 200 up to 5 s"
    )


def test_the_backlog_of_before_is_that_of_now_less_what_came_and_went() -> None:
    lag = counted(
        {"received": 100, "processed": 40}, {"received": 5, "processed": 25, "oldest_s": 30.0},
        {"received": 10, "processed": 0, "duplicate": 3}, unfinished=47,
    ).charts[2]  # fmt: skip
    about = [step.sentence.rpartition("about ")[2] for step in lag.steps[-4:]]
    assert about == [f"{amount} messages unfinished" for amount in (0, 60, 40, 47)]
    assert lag.right == ("100", "50", "0")
    assert "waited 30 s" in lag.steps[-2].sentence


def test_nothing_at_all_is_drawn_as_nothing() -> None:
    drawn = counted(unfinished=0)
    assert [chart.left for chart in drawn.charts] == [(), (), ()]
    assert all(len(chart.steps) == 60 for chart in drawn.charts)
    # nor does a legend name what was not measured
    assert [kind for kind, _, _ in drawn.charts[2].paths] == ["backlog"]
    assert counted().charts[2].description == "Lag: nothing"


def _worker(version: str, started_at: datetime) -> WorkerStatus:
    return WorkerStatus(
        worker="w", kind="run", host="h", pid=1, version=version, paused=(), state="running", busy=0, leases=0,
        in_flight=0, troubles=(), started_at=started_at, seen_at=NOW,
    )  # fmt: skip


def _change(action: str, ago: int, consumer: str = "billing") -> Audited:
    return Audited(
        number=0, recorded_at=NOW - ago * MINUTE, actor="ann", login=None, action=action,
        filter={"consumer": consumer}, affected=1, reason="why",
    )  # fmt: skip


def test_deploys_and_pauses_are_marked() -> None:
    started = (("2", 30), ("2", 25), ("2", 5), ("1", 30), ("1", 300))
    drawn = counted(
        workers=[_worker(version, NOW - ago * MINUTE) for version, ago in started],
        paused=[Pause(consumer="billing", actor="bob", reason=None, paused_at=NOW - 10 * MINUTE)],
        changes=[_change("pause", 10), _change("resume", 20), _change("pause", 400), _change("resume", 500)],
    )  # fmt: skip
    marks = [(mark.kind, mark.x, mark.width, mark.sentence) for mark in drawn.markers]
    assert marks == [
        ("deploy", 290.0, 0.0, "1 process with txbox 1 started"),
        ("deploy", 290.0, 0.0, "2 processes with txbox 2 started"),
        ("deploy", 540.0, 0.0, "1 process with txbox 2 started"),
        ("pause", 0.0, 390.0, "billing paused by ann: why"),
        ("pause", 490.0, 100.0, "billing paused by bob"),
    ]


def test_consumers_are_added_up() -> None:
    def activity(name: str, processed: int) -> Activity:
        counts = Counts(processed=processed, latency=within(1.0, processed))
        return Activity(
            kind="consumer", name=name, total=counts, points=(Point(at=NOW, counts=counts),)
        )

    every = together([activity("a", 3), activity("b", 4)])
    assert every.total.processed == 7
    assert every.points[0].counts.latency == within(1.0, 7)
    # and are what they were
    assert together([activity("a", 3)]).total.processed == 3
