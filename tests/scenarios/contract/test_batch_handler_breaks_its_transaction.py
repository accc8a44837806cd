"""One message of a batch breaks its handler's contract: it ends as it does alone, its neighbours are processed once.

Also where neighbours run behind it, on a connection whose transaction is no longer the one that
claimed them: nothing of theirs may be committed without their inbox row, and nothing twice.
"""

from __future__ import annotations

import pytest

from tests.support.connections import KINDS
from tests.support.contract.bench import Bench, Trial, by_kind
from tests.support.contract.breaking import MISBEHAVIOURS, Expected, Misbehaviour, expected_of
from txbox import Outcome

PIPELINED = ("psycopg-url", "psycopg-async-url", "psycopg-pgbouncer")
BATCHED = ("batched", "grouped", "leased")


def _ends_of_neighbours(bench: Bench, expected: Expected) -> set[tuple[str, int]]:
    if bench.app.store.dialect.refuses_commit or expected.status != "dead":
        return {("processed", 1)}
    # MySQL commits the claims of the whole batch when one handler commits, and does not tell who it was:
    # what may have been written is never run again
    return {("processed", 1), ("dead", 0), ("dead", 1)}


@by_kind
@pytest.mark.parametrize("mode", BATCHED)
@pytest.mark.parametrize("misbehaviour", MISBEHAVIOURS, ids=lambda each: each.name)
def test_handler_breaks_the_transaction_of_a_batch(
    bench: Bench, misbehaviour: Misbehaviour, mode: str
) -> None:
    check_batch(bench, misbehaviour, mode)


@pytest.mark.parametrize(
    "bench", [kind for kind in KINDS if kind.name in PIPELINED], indirect=True, ids=str
)
@pytest.mark.parametrize("misbehaviour", MISBEHAVIOURS, ids=lambda each: each.name)
def test_pipelined_handler_breaks_the_transaction_of_a_batch(
    bench: Bench, misbehaviour: Misbehaviour
) -> None:
    check_batch(bench, misbehaviour, "pipelined")


def check_batch(bench: Bench, misbehaviour: Misbehaviour, mode: str) -> None:
    trial = Trial(bench, misbehaviour, mode)
    expected = expected_of(bench.kind, bench.app.store.dialect, misbehaviour)

    outcomes = trial.work_batch() if mode == "leased" else trial.deliver_batch()
    trial.rescue()
    row, effects = trial.row, trial.effects
    assert (row.status, row.error_type if expected.status == "dead" else None) == (
        expected.status,
        "TransactionBroken" if expected.status == "dead" else None,
    )
    assert effects in expected.effects, (outcomes, row)
    neighbours = {trial.neighbour(neighbour) for neighbour in trial.neighbours}
    assert neighbours <= _ends_of_neighbours(bench, expected), outcomes

    trial.behave()
    runs = trial.runs
    trial.deliver_batch()
    trial.work()
    if row.status == "failed":
        assert (trial.row.status, trial.effects) == ("processed", 1)
    else:
        assert (trial.runs, trial.row.status, trial.effects) == (runs, row.status, effects)
    assert {trial.neighbour(neighbour) for neighbour in trial.neighbours} == neighbours
    assert trial.deliver_batch() == [Outcome.DUPLICATE] * 5
