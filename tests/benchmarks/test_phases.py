"""Every phase runs, and nothing is lost or doubled in any; whether a bar is met is not asked here."""

from __future__ import annotations

import json

import pytest

from benchmarks.phases import PHASES
from benchmarks.setting import Setting


@pytest.mark.parametrize("phase", PHASES)
def test_a_phase_verifies_all_of_its_contenders(setting: Setting, phase: str) -> None:
    document = PHASES[phase](setting)

    assert document["phase"] == phase
    assert document["bars"]
    for name, medians in document["contenders"].items():
        assert medians["good"], (name, medians)
        assert medians["rate"] > 0, name
        assert (medians["lost"], medians["doubled"]) == (0, 0), name
    for bar in document["bars"]:
        assert bar["measured"] is not None, bar["text"]
        assert isinstance(bar["met"], bool)
    # it becomes a file
    assert json.loads(json.dumps(document))["title"] == document["title"]


def test_contenders_take_turns_and_get_the_same_workload(setting: Setting) -> None:
    setting.rounds = 2
    began: list[tuple[str, int]] = []

    class Noting:
        def __init__(self, name: str) -> None:
            self.name = name
            self._inner = setting.naive(name=name)

        def round(self, work):  # type: ignore[no-untyped-def]
            began.append((self.name, id(work)))
            return self._inner.round(work)

    rounds = setting.interleaved(
        [(Noting("a"), setting.work()), (Noting("b"), setting.work())], warm=False
    )

    assert [name for name, _ in began] == ["a", "b", "b", "a"]
    assert began[0][1] == began[1][1]
    assert began[0][1] != began[2][1]
    assert [run.contender for run in rounds] == ["a", "a", "b", "b"]
