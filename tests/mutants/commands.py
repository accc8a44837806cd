"""The ways to catch a mutant: commands that are green in the tree as it is, and should be red in the mutant."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple

#: Cheap ones first: this is the order in which they are tried.
WAYS = ("model", "machine", "tests", "sweep", "chaos")
#: Those that look at the source. A model has the same defect, and says that it matters.
OF_SOURCE = WAYS[1:]

# what pytest prints of a test that is red, and at its end; the names have no parameters
_TEST_IS_RED = r"^(?:FAILED|ERROR) tests/([\w/.:]+)"
_TEST_HAS_PASSED = r"^PASSED (tests/[\w/.:]+)"
_TESTS_RAN = r"\b[1-9]\d* passed\b"


@dataclass(frozen=True)
class Command:
    """What is run in the copy, by this interpreter.

    Args:
        words: behind the interpreter.
        limit_s: after so many seconds it is cut off, which counts as red: in the tree as it is, it ends.
        red: a pattern that finds in the output what is wrong; without a match an exit status of 1 says nothing.
        green: a pattern of the output that shows that something was really looked at.
        tests: those among the words that pytest runs.
    """

    words: tuple[str, ...]
    limit_s: float
    red: str
    green: str
    tests: tuple[str, ...] = ()


class Finished(NamedTuple):
    """How a command ended; without a status it was cut off."""

    status: int | None
    output: str
    seconds: float


class Verdict(NamedTuple):
    """What one way says of one mutant.

    Args:
        outcome: `broken`, when the command says nothing about the mutant, with the reason in `by`.
        by: the test, invariant or assertion that noticed it.
    """

    outcome: Literal["caught", "survived", "broken"]
    seconds: float
    by: str = ""


@dataclass(frozen=True)
class Defect:
    """The same defect in a model, which is what spin checks: the source has no part in it."""

    model: str
    name: str


def pytest_of(*tests: str, only: str = "", limit_s: float = 240.0) -> Command:
    """Some tests, up to the first that is red.

    Args:
        tests: below `tests/`.
        only: an expression for `-k`.
    """
    chosen = ("-k", only) if only else ()
    files = tuple(f"tests/{test}" for test in tests)
    words = ("-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", "slow or not slow")
    return Command((*words, *chosen, *files), limit_s, _TEST_IS_RED, _TESTS_RAN, files)


def joint(commands: Iterable[Command]) -> list[tuple[Command, list[Command]]]:
    """The commands of pytest that differ in their tests alone, each group with one that runs all of its tests."""
    groups: dict[tuple[str, ...], list[Command]] = {}
    for command in dict.fromkeys(commands):
        if command.tests:
            groups.setdefault(command.words[: -len(command.tests)], []).append(command)
    return [
        (
            Command(
                (
                    *words,
                    "-rA",
                    *dict.fromkeys(test for command in group for test in command.tests),
                ),
                sum(command.limit_s for command in group),
                _TEST_IS_RED,
                _TESTS_RAN,
            ),
            group,
        )
        for words, group in groups.items()
        if len(group) > 1
    ]


def passed(command: Command, output: str) -> bool:
    """Whether each test of a command is among those that a joint one says have passed."""
    names = set(re.findall(_TEST_HAS_PASSED, output, re.MULTILINE))
    return all(any(name.startswith(test) for name in names) for test in command.tests)


def machine(database: str) -> Command:
    """Random lives of messages beside a model of twenty lines."""
    return pytest_of("fuzz/test_machines.py", only=database, limit_s=300)


def sweep(mode: str, database: str) -> Command:
    """A worker is killed at every statement of one mode."""
    return pytest_of(
        "crash/test_crash_sweep.py::test_crash_sweep", only=f"{mode} and {database}", limit_s=400
    )


def sweep_of_broker(broker: str) -> Command:
    """A worker that consumes a real broker is killed at a few points."""
    test = "crash/test_brokers.py::test_killed_workers_lose_and_double_nothing"
    return pytest_of(test, only=f"[{broker}]", limit_s=400)


def chaos(database: str, broker: str, *, minutes: int = 1, seed: int = 20261128) -> Command:
    """Minutes in which everything goes wrong at once; then it has two to come to rest."""
    words = f"-m tests.chaos --minutes {minutes} --seed {seed} --databases {database} --brokers {broker} --impatient"
    return Command(
        tuple(words.split()), 420.0 + 60.0 * minutes, r"^ +WRONG ([^:\n]+)", r"^ +green\b"
    )


def verdict_of(command: Command, finished: Finished) -> Verdict:
    """What an exit status and an output mean."""
    status, output, seconds = finished
    if status is None:
        return Verdict("caught", seconds, f"no end within {command.limit_s:g} s")
    wrong = re.search(command.red, output, re.MULTILINE)
    if status == 1 and wrong is not None:
        return Verdict("caught", seconds, wrong[1])
    if status == 0 and re.search(command.green, output, re.MULTILINE):
        return Verdict("survived", seconds)
    last = "\n".join(output.splitlines()[-15:])
    return Verdict("broken", seconds, f"exit status {status}: {last}")
