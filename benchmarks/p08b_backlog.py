"""P8b: what a lease costs while few rows, or a million, wait behind it."""

from __future__ import annotations

import secrets
import statistics
import tempfile
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import measure
from benchmarks.result import Bar, Plot, Round, Verified, ratios, result, values
from tests.support.backlog import fill
from tests.support.databases import Database, MySQL, PostgreSQL, Raw, SQLite
from tests.support.shop import CONSUMER
from txbox import App
from txbox.session import drive
from txbox.store import leases

NUMBER = "P8b"
TITLE = "Backlog: a lease before five thousand waiting rows, and before a million"

_KEYS = 10_000
_LEASES = 20
_PRODUCTS = {
    "postgresql": PostgreSQL("postgresql-durable"),
    "mariadb": MySQL("mariadb-durable", required=True),
    "sqlite": SQLite(),
}
_FEW = 5_000


def run(*, rounds: int, messages: int) -> dict[str, Any]:
    """Measure `rounds` times at each size; returns the result as it is stored.

    Args:
        messages: 4,000 for the sizes of the title: a million is 250 times as many.
    """
    most = 250 * messages
    done: list[Round] = []
    bars: list[Bar] = []
    for product, database in _PRODUCTS.items():
        for ordered in (False, True):
            kind = f"{product}, {'heads of 10,000 keys' if ordered else 'any order'}"
            with ExitStack() as stack:
                measured = [
                    stack.enter_context(_waiting(database, f"{kind}, {rows:,} rows", rows, ordered))
                    for rows in (_FEW, most)
                ]
                # who goes first alternates: both sizes meet the same disturbances
                for number in range(rounds):
                    done += [
                        measure_round() for measure_round in measured[:: -1 if number % 2 else 1]
                    ]
            few, many = f"{kind}, {_FEW:,} rows", f"{kind}, {most:,} rows"
            bars.append(
                Bar(
                    f"{many}: a lease of 20 and the look at suspects at most 2 times their time before {_FEW:,} rows",
                    2.0, ratios(done, many, few, "look_ms"), "at most",
                )
            )  # fmt: skip
        database.close()
    return result(
        phase=NUMBER,
        title=TITLE,
        method=f"{rounds} rounds at each size, in turns, of {_LEASES} leases of 20 rows, and as many looks at rows "
        "whose last run never ended, of which there are none; one connection. All rows are due; no ANALYZE is run",
        bars=bars,
        rounds=done,
        circumstances=measure.circumstances(None),
        plots=[
            Plot(
                "backlog_lease", "A lease of 20 rows before a backlog", "bars", "", "ms",
                {
                    name: [(0.0, statistics.median(values(done, name, "p50_ms")))]
                    for name in dict.fromkeys(outcome.contender for outcome in done)
                },
            )
        ],
    )  # fmt: skip


@contextmanager
def _waiting(
    database: Database, name: str, rows: int, ordered: bool
) -> Generator[Callable[[], Round]]:
    """A database with that many waiting rows; yields what measures a round in it."""
    with tempfile.TemporaryDirectory() as directory:
        url = database.create(Path(directory), schema=True)
        try:
            with App(url) as app, Raw(url) as raw:
                number = f"n % {_KEYS}"
                key = f"CONCAT('k', {number})" if raw.product == "mysql" else f"'k' || ({number})"
                fill(raw, rows, key=key if ordered else None)
                assert app.database.sync is not None
                drive(app.database.sync, app.protocol.check_schema)
                yield partial(_measured, app, name, ordered)
        finally:
            database.drop(url)


def _measured(app: App, name: str, ordered: bool) -> Round:
    cpu = time.process_time()
    leased, twice = set[str](), 0
    took, looks = list[float](), list[float]()
    for suspect, times in ((False, took), (True, looks)):
        for _ in range(_LEASES):
            began = time.perf_counter()
            found = _leased(app, ordered, suspect)
            times.append((time.perf_counter() - began) * 1e3)
            twice += len(leased.intersection(found))
            leased.update(found)
    lost = 20 * _LEASES - len(leased)
    return Round(
        name, len(leased), len(leased) / sum(took) * 1e3, statistics.median(took), max(took),
        (time.process_time() - cpu) / max(len(leased), 1) * 1e6,
        Verified(lost=lost, doubled=twice),
        more={
            "suspect_ms": statistics.median(looks),
            "look_ms": statistics.median(took) + statistics.median(looks),
        },
    )  # fmt: skip


def _leased(app: App, ordered: bool, suspect: bool) -> Sequence[str]:
    """The ids of what one look leases; they stay leased, so that no look meets them again."""
    connections = app.database.sync
    assert connections is not None
    token = secrets.token_hex(16)
    return [
        row.arrival.message_id
        for row in drive(
            connections,
            leases.lease,
            app.store,
            CONSUMER,
            token=token,
            limit=20,
            lease=app.lease,
            suspect=suspect,
            heads_only=ordered,
        )
    ]
