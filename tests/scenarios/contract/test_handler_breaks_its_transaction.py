"""A handler that breaks its contract: never acknowledged without its effect, never an effect twice.

Every kind of connection, every misbehaviour, every mode; what to expect is a rule, `expected_of`.
"""

from __future__ import annotations

import pytest

from tests.support.contract.bench import Bench, Trial, by_kind
from tests.support.contract.breaking import MISBEHAVIOURS, MODES, Misbehaviour, expected_of
from txbox import Outcome


@by_kind
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("misbehaviour", MISBEHAVIOURS, ids=lambda each: each.name)
def test_handler_breaks_its_transaction(
    bench: Bench, misbehaviour: Misbehaviour, mode: str
) -> None:
    check_trial(bench, misbehaviour, mode)


def check_trial(bench: Bench, misbehaviour: Misbehaviour, mode: str) -> None:
    trial = Trial(bench, misbehaviour, mode)
    dialect = bench.app.store.dialect
    expected = expected_of(bench.kind, dialect, misbehaviour)

    if mode == "inline":
        outcome = trial.deliver()
        assert outcome == Outcome(expected.status)
    else:
        assert trial.deliver() is (Outcome.FAILED if mode == "retried" else Outcome.DEFERRED)
        (outcome,) = trial.work()
        if outcome is Outcome.IN_PROGRESS:
            # only where a commit cannot be refused: the committed row is nobody's, until it is found
            assert not dialect.refuses_commit
            assert expected.status == "dead"
        else:
            assert outcome == Outcome(expected.status)
    trial.rescue()
    row, effects = trial.row, trial.effects
    assert (row.status, row.error_type if expected.status == "dead" else None) == (
        expected.status,
        "TransactionBroken" if expected.status == "dead" else None,
    )
    assert effects in expected.effects
    if row.status in ("failed", "dead"):
        assert row.has_payload  # the operator, or the retry, needs it

    # the broker delivers again and again, and the table is worked through: the handler behaves now
    runs = trial.runs
    assert trial.deliver() is (Outcome.DEFERRED if row.status == "failed" else Outcome.DUPLICATE)
    outcomes = trial.work()
    if row.status == "failed":
        assert outcomes == [Outcome.PROCESSED]
        assert (trial.row.status, trial.effects) == ("processed", 1)
    else:
        assert (outcomes, trial.runs) == ([], runs)
        assert (trial.row.status, trial.effects) == (row.status, effects)
    assert trial.deliver() is Outcome.DUPLICATE
