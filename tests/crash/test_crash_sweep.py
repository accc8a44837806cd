"""The crash sweep: whatever statement boundary the worker dies at, the effect is there exactly once."""

from __future__ import annotations

import pytest

from tests.crash.conftest import Sweep
from tests.crash.mutants import MUTANTS
from tests.crash.service import MODES, Mode
from tests.support.databases import Database

# what every sweep must at least have met, whatever a database passes besides
_ALWAYS = {
    "received", "before:begin", "after:begin", "before:handler", "between:writes", "after:handler",
    "before:commit", "before:close", "after:commit", "before:ack", "after:ack",
}  # fmt: skip
_ALSO: dict[Mode, set[str]] = {
    "inline": set(),
    "retried": {
        "record_failure",
        "after:record_insert",
        "before:record_attempt",
        "after:lease",
        "after:claim_leased",
    },
    "batched": {
        "before:savepoint",
        "before:rollback_to_savepoint",
        "after:record_own",
        "before:record_attempt",
    },
    "pipelined": {
        "before:savepoint",
        "before:rollback_to_savepoint",
        "after:record_own",
        "after:lease",
    },
    "ahead": {
        "before:savepoint",
        "after:record_own",
        "during:commit",
    },
    "stored": {"after:store", "after:lease", "after:claim_leased"},
}


@pytest.mark.parametrize("mode", MODES)
def test_crash_sweep(database_kind: Database, mode: Mode, sweep: Sweep) -> None:
    if mode in ("pipelined", "ahead") and database_kind.dialect != "postgresql":
        pytest.skip("statements are put off, and claims sent ahead, on PostgreSQL alone")
    ended = sweep(database_kind.name, mode, "txbox")

    wrong = [
        f"{outcome.case.point}#{outcome.case.nth}: {outcome.checked}"
        for outcome in ended
        if outcome.checked.wrong
    ]
    assert not wrong, "\n".join(wrong)
    assert all(outcome.checked.effects == 1 for outcome in ended)
    missed = [f"{outcome.case.point}#{outcome.case.nth}" for outcome in ended if not outcome.killed]
    assert not missed, f"never killed at {missed}"
    points = {str(outcome.case.point) for outcome in ended}
    assert points >= _ALWAYS | _ALSO[mode]
    # a claim of one message may be a statement of its own
    assert any(point.startswith("after:claim") for point in points)


@pytest.mark.parametrize("mutant", list(MUTANTS))
def test_wrong_consumer_is_caught(database_kind: Database, mutant: str, sweep: Sweep) -> None:
    mode, sound = MUTANTS[mutant]

    caught = [each for each in sweep(database_kind.name, mode, mutant) if each.checked.wrong]

    assert caught
    assert all({"I1 doubled", "I2 lost"} & set(each.checked.wrong) for each in caught), caught
    if sound != "txbox":  # which is swept above
        sound_ended = sweep(database_kind.name, mode, sound)
        assert not [each.checked for each in sound_ended if each.checked.wrong]
