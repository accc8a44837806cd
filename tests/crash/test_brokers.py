"""A few crash points of every broker, and a wrong consumer; `make crash-brokers` runs them all."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from tests.crash.brokers import page, results, runs
from tests.crash.brokers.runs import Case
from tests.support.databases import BY_NAME, require

pytestmark = pytest.mark.brokers

POINTS = [("after:handler", 5), ("after:commit", 9), ("before:ack", 3)]
FIXTURES = {
    "kafka": "kafka_bootstrap", "rabbitmq": "rabbitmq_url", "sqs": "sqs_url", "nats": "nats_url",
    "redis": "redis_url",
}  # fmt: skip


@pytest.fixture(scope="module")
def pool() -> Iterator[ProcessPoolExecutor]:
    """Processes that fork workers: this one may hold threads and clients."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([runs.__name__])
    with ProcessPoolExecutor(4, mp_context=context) as executor:
        yield executor


@pytest.fixture
def case(broker: str, request: pytest.FixtureRequest) -> Case:
    require(BY_NAME["postgresql"].missing())
    fixture = FIXTURES.get(broker)
    url = "" if fixture is None else str(request.getfixturevalue(fixture))
    return Case(broker, url, "postgresql", "inline")


@pytest.mark.parametrize("broker", [*FIXTURES, "webhook"])
def test_killed_workers_lose_and_double_nothing(case: Case, pool: ProcessPoolExecutor) -> None:
    cases = [replace(case, point=point, nth=nth) for point, nth in POINTS]
    redelivered = replace(case, first=POINTS[0], point="after:claim_leased", nth=2)
    wrong = replace(case, point="after:handler", nth=9, wrong="ack_first")
    caught = pool.submit(runs.run, wrong)
    for ended in pool.map(runs.run, [*cases, redelivered]):
        assert not ended.checked.wrong, (ended.case.point, ended.checked, ended.notes)
        assert ended.checked.effects == ended.checked.sent
    assert "I2 lost" in caught.result().checked.wrong


def test_the_page_is_what_the_figures_say(tmp_path: Path) -> None:
    """And the file has one line for all points of a sweep that became the same."""
    kept = results.Results()
    kept.load()
    assert "\n".join(page.tables(kept)) in page.PAGE.read_text()
    again = results.Results(tmp_path / "crashes.json")
    again.about = kept.about
    for each in kept:
        again.add(each)
    again.save()
    assert (tmp_path / "crashes.json").read_text() == results.FILE.read_text()
    assert len(list(kept)) > 2000
    assert len(results.FILE.read_text().splitlines()) < 300
