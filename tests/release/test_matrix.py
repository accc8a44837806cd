"""The page of versions shows what the matrix has seen, failures by name; a report is read as pytest writes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.docs.pages import ROOT
from tests.release import matrix

_REPORT = """<?xml version="1.0"?>
<testsuites><testsuite>
<testcase classname="tests.store.test_claims" name="test_a[postgresql]"/>
<testcase classname="tests.store.test_claims" name="test_b[mariadb]"><skipped message="not selected"/></testcase>
<testcase classname="tests.store.test_claims" name="test_c[postgresql]"><failure message="no"/></testcase>
<testcase classname="tests.store.test_leases" name="test_d"><error message="no"/></testcase>
<testcase classname="tests.store.test_leases" name="test_d"><failure message="no"/></testcase>
</testsuite></testsuites>
"""


def test_the_page_is_what_was_seen() -> None:
    text = matrix.PAGE.read_text()
    assert text == matrix.page(text, matrix.load())
    assert matrix.load().keys() <= matrix.COLUMNS.keys()


def test_every_column_has_tests_to_run() -> None:
    for column in matrix.COLUMNS.values():
        assert column.tests
        assert [each for each in column.tests if not (ROOT / each).exists()] == [], column.name


def test_a_report_gives_what_passed_and_the_names_of_what_did_not(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    report.write_text(_REPORT)
    assert matrix.read(report) == {
        "passed": 1, "failed": ["test_claims::test_c[postgresql]", "test_leases::test_d"],
    }  # fmt: skip


def test_the_table_names_failures_and_what_was_not_run() -> None:
    seen: dict[str, Any] = {
        "version": "Redis 8.0.2", "passed": 7, "failed": ["test_a"], "day": "2026-11-23", "commit": "abc",
    }  # fmt: skip
    text = matrix.page(f"before\n{matrix.BEGIN}old\n{matrix.END}after\n", {"redis-8.0": seen})
    assert text.startswith(f"before\n{matrix.BEGIN}")
    assert text.endswith(f"{matrix.END}after\n")
    assert "old" not in text
    assert "| redis-8.0 | Redis 8.0.2 | 7 | 1 | 2026-11-23 | `abc` |" in text
    assert "Failed on redis-8.0: `test_a`." in text
    assert "| postgresql-18 | not run yet |" in text
