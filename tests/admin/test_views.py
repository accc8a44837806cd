"""The sentences that command line and pages share."""

from __future__ import annotations

from txbox.admin import views
from txbox.admin.tables import COUNTED_MAX, ConsumerStatus, TopicStatus


def _status(**counts: int) -> ConsumerStatus:
    return ConsumerStatus(consumer="billing", counts=counts, quarantined=0, oldest_unfinished_s=1)


def test_a_count_that_ended_at_its_limit_is_not_said_to_be_exact() -> None:
    (warned,) = views.warnings([_status(dead=10_001)], (), (), ())
    assert warned.said == "More than 10,000 messages of billing are dead."
    (warned,) = views.warnings([_status(dead=10_000)], (), (), ())
    assert warned.said == "10,000 messages of billing are dead."


def test_what_is_more_than_a_page_counts_is_called_more() -> None:
    topic = TopicStatus(
        topic="letters", route="", counts={}, overdue=COUNTED_MAX + 1, oldest_waiting_s=90.0
    )
    (warned,) = views.warnings([], [topic], [], [])
    assert warned.said == (
        "More than 10,000 messages of topic letters should have left more than a minute ago."
    )
