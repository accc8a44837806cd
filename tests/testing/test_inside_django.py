"""A real Django TestCase: App(django=…) nests in the transaction that the case rolls back."""

from __future__ import annotations

import unittest
from typing import Any

import pytest

from tests.support.databases import Raw
from tests.support.django_project import configured
from tests.support.ledger import TABLE, message, service
from txbox import App, Outcome
from txbox.testing import Crashed, crash_at, crash_points, deliver, drain


def _case(alias: str) -> type[unittest.TestCase]:
    from django.db import connections
    from django.test import TestCase

    def rows(sql: str) -> list[tuple[Any, ...]]:
        with connections[alias].cursor() as cursor:
            cursor.execute(sql)
            return list(cursor.fetchall())

    class Orders(TestCase):
        databases = {alias}  # noqa: RUF012

        def setUp(self) -> None:
            self.app = service(App(django=alias))
            # the test before this one left nothing
            assert rows("SELECT count(*) FROM txbox_inbox") == [(0,)]

        def test_processed_once(self) -> None:
            assert deliver(self.app, message("a")) is Outcome.PROCESSED
            assert deliver(self.app, message("a")) is Outcome.DUPLICATE
            assert rows("SELECT message_id FROM ledger") == [("a",)]

        def test_failed_and_retried(self) -> None:
            assert deliver(self.app, message("fail")) is Outcome.FAILED
            assert rows("SELECT count(*) FROM ledger") == [(0,)]
            assert rows("SELECT status, attempts FROM txbox_inbox") == [("failed", 1)]
            assert drain(self.app, ignore_dates=True) == [Outcome.PROCESSED]
            assert rows("SELECT attempt FROM ledger") == [(2,)]

        def test_given_djangos_connection(self) -> None:
            outcome = deliver(self.app, message("a"), tx=connections[alias])
            assert outcome is Outcome.PROCESSED
            assert rows("SELECT status FROM txbox_inbox") == [("processed",)]

        def test_every_crash_point(self) -> None:
            points = crash_points(self.app, message("first"))
            for number, point in enumerate(points):
                sent = message(f"crash-{number:02}")
                nth = points[: number + 1].count(point)
                with pytest.raises(Crashed), crash_at(point, nth):
                    deliver(self.app, sent)
                deliver(self.app, sent)
            assert rows("SELECT count(*), count(DISTINCT message_id) FROM ledger") == [
                (1 + len(points), 1 + len(points))
            ]

    return Orders


def test_inside_djangos_testcase(database_url: str) -> None:
    with Raw(database_url) as raw:
        raw.execute(TABLE)
    with configured(database_url) as alias:
        result = unittest.TestResult()
        unittest.defaultTestLoader.loadTestsFromTestCase(_case(alias)).run(result)

    assert result.testsRun == 4
    assert not result.errors, "\n".join(text for _, text in result.errors)
    assert not result.failures, "\n".join(text for _, text in result.failures)
    with Raw(database_url) as raw:
        assert raw.value("SELECT count(*) FROM txbox_inbox") == 0
        assert raw.value("SELECT count(*) FROM ledger") == 0
