"""Decides mutants, one way at a time: a command must be green in the copy before it may be red in a mutant."""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Protocol

from tests.models import spin
from tests.mutants.commands import (
    Command,
    Defect,
    Finished,
    Verdict,
    joint,
    passed,
    verdict_of,
)
from tests.mutants.table import Mutant


class Runs(Protocol):
    """What a judge needs of a `tree.Tree`."""

    def run(self, command: Command) -> Finished: ...
    def mutated(self, mutant: Mutant) -> AbstractContextManager[None]: ...


class Judge:
    """Keeps which commands are green by themselves, so that each is tried once."""

    def __init__(self, tree: Runs) -> None:
        self._tree = tree
        self._by_itself: dict[Command | str, Verdict] = {}

    def look_ahead(self, commands: Iterable[Command]) -> None:
        """Find out together what is green by itself: starting pytest takes longer than most tests."""
        for command, group in joint(commands):
            finished = self._tree.run(command)
            if finished.status == 0:
                self._by_itself |= {
                    single: Verdict("survived", finished.seconds)
                    for single in group
                    if passed(single, finished.output)
                }

    def verdict(self, mutant: Mutant, how: Command | Defect) -> Verdict:
        """What a command, or a model, says of a mutant; `broken` if it is red by itself."""
        if isinstance(how, Defect):
            return self._modelled(how)
        if how not in self._by_itself:
            self._by_itself[how] = verdict_of(how, self._tree.run(how))
        if (alone := self._by_itself[how]).outcome != "survived":
            return Verdict("broken", alone.seconds, f"the command is red by itself: {alone.by}")
        with self._tree.mutated(mutant):
            return verdict_of(how, self._tree.run(how))

    def _modelled(self, defect: Defect) -> Verdict:
        if missing := spin.tools():
            return Verdict("broken", 0.0, missing)
        if defect.model not in self._by_itself:
            checked = spin.check(defect.model)
            holds = checked.whole and checked.wrong is None
            self._by_itself[defect.model] = Verdict(
                "survived" if holds else "broken", checked.seconds, checked.wrong or ""
            )
        if (alone := self._by_itself[defect.model]).outcome != "survived":
            return Verdict("broken", alone.seconds, f"the model is wrong by itself: {alone.by}")
        began = time.monotonic()
        wrong = spin.check(defect.model, defect.name).wrong
        took_s = time.monotonic() - began
        return Verdict("survived" if wrong is None else "caught", took_s, defect.name)
