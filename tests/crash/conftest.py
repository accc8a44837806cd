"""The pool that runs cases, one database a product for all of them, and the tables at the end of the run."""

from __future__ import annotations

import itertools
import multiprocessing
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Protocol

import pytest

from tests.crash import runs
from tests.crash.report import REPORT
from tests.crash.runs import Case, Ended
from tests.crash.service import TABLES, Mode
from tests.support.databases import BY_NAME, Database, Raw, require

# rescue is waited for most of the time: more cases at once than cores
_WORKERS = 6

_numbers = itertools.count(1)


class Sweep(Protocol):
    def __call__(self, database: str, mode: Mode, consumer: str) -> list[Ended]: ...


@pytest.fixture(scope="session")
def pool() -> Iterator[ProcessPoolExecutor]:
    """Processes that have imported everything and opened nothing."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([runs.__name__])
    with ProcessPoolExecutor(_WORKERS, mp_context=context) as executor:
        yield executor


@pytest.fixture(scope="session")
def crash_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], str]]:
    """The URL of a product's database with txbox's tables and the service's."""
    made: dict[str, str] = {}

    def url(product: str) -> str:
        if product not in made:
            kind: Database = BY_NAME[product]
            require(kind.missing())
            made[product] = kind.create(tmp_path_factory.mktemp(product), schema=True)
            with Raw(made[product]) as raw:
                for table in TABLES:
                    raw.execute(table)
        return made[product]

    yield url
    for product, each in made.items():
        BY_NAME[product].drop(each)


@pytest.fixture
def sweep(pool: ProcessPoolExecutor, crash_url: Callable[[str], str], tmp_path: Path) -> Sweep:
    """Run a consumer once for every point that it passes, killed there; or once, when it is not swept."""

    def swept(database: str, mode: Mode, consumer: str) -> list[Ended]:
        started = time.monotonic()
        first = Case(
            database, crash_url(database), str(tmp_path), mode, consumer, None, 1, next(_numbers)
        )
        cases = [first]
        if runs.is_swept(first):
            points = pool.submit(runs.points_of, first).result()
            cases = [runs.numbered(first, next(_numbers), point, nth) for point, nth in points]
        ended = list(pool.map(runs.run, cases))
        REPORT.add(database, mode, consumer, ended, time.monotonic() - started)
        return ended

    return swept


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for line in REPORT.lines(full=terminalreporter.config.get_verbosity() > 0):
        terminalreporter.write_line(line)
