"""The failure catalogue names tests that exist, and its page says what it says."""

from __future__ import annotations

from tests.docs import catalogue


def test_every_fault_has_its_tests_or_says_why_not() -> None:
    faults = catalogue.faults()
    assert len(faults) == 80
    assert {
        fault.number: missing for fault in faults if (missing := catalogue.missing(fault))
    } == {}
    assert [fault.number for fault in faults if not fault.tests] == [41, 60]


def test_the_page_is_the_catalogue() -> None:
    assert catalogue.PAGE.read_text() == catalogue.page()
