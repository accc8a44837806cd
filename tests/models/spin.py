"""Checks the Promela models in `models/` with spin: every order of steps, with and without a deliberate defect."""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tests.support.servers import UnavailableError, packages
from tests.support.servers.process import base_directory, file_lock

MODELS = Path(__file__).parents[2] / "models"
NAMES = ("inbox", "kafka", "relay", "failover")
#: More of everything, for `make models`: minutes.
LARGE = {
    "inbox": {"COPIES": 3, "CRASHES": 2, "KILLS": 2, "LOST": 2, "EXPIRIES": 2},
    "kafka": {"REBALANCES": 2, "CRASHES": 1},
    "relay": {"CRASHES": 2, "LOST": 2, "EXPIRIES": 1},
    "failover": {"FAILOVERS": 4, "CRASHES": 3},
}
_DEEPEST = 1_000_000
_MEGABYTES = 8_000
_WITHIN_S = 900
_ASKED = re.compile(r"^#ifn?def (\w+)$", re.MULTILINE)
_BUDGET = re.compile(r"^#define (\w+) \d+$", re.MULTILINE)
_POINT = re.compile(r"point: ([\w:]+)")


@dataclass(frozen=True)
class Checked:
    """What spin says of one model.

    Attributes:
        states: that differ, as far as it looked.
        whole: it looked at all of them.
        wrong: the assertion that does not hold, or None.
    """

    model: str
    defect: str | None
    states: int
    whole: bool
    wrong: str | None
    seconds: float


@cache
def tools() -> str | None:
    """None once spin and a C compiler are on the machine, else a sentence that says what to do."""
    missing = [name for name in ("spin", "gcc") if shutil.which(name) is None]
    if missing and packages.may_install():
        with file_lock(base_directory() / "lock"):
            try:
                packages.install([*missing, "libc6-dev"])
            except UnavailableError as error:
                return str(error)
    elif missing:
        return f"{' and '.join(missing)}: not here; install it, or run as root on Debian"
    return None


def text_of(model: str) -> str:
    return (MODELS / f"{model}.pml").read_text()


def defects(model: str) -> list[str]:
    """The defects that a model can be given, by name."""
    text = text_of(model)
    return sorted(set(_ASKED.findall(text)) - set(_BUDGET.findall(text)))


def points(model: str) -> set[str]:
    """The crash points that a model's steps are named after."""
    return set(_POINT.findall(text_of(model)))


def check(model: str, defect: str | None = None, **budgets: int) -> Checked:
    """Look at every state of a model; its budgets are given by name."""
    settings = [f"-D{name}={value}" for name, value in budgets.items()]
    if defect is not None:
        settings.append(f"-D{defect}")
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, f"{model}.pml")
        source.write_text(text_of(model))
        _run(["spin", *settings, "-a", source.name], folder)
        # a small world takes longer to compile than to search
        fast = "-O2" if budgets else "-O0"
        compiler = ["gcc", "-w", fast, "-DSAFETY", f"-DMEMLIM={_MEGABYTES}", "-DVECTORSZ=2048"]
        _run([*compiler, "-o", "pan", "pan.c"], folder)
        said = _run(["./pan", f"-m{_DEEPEST}"], folder)
    errors, states, took = (
        _number(pattern, said)
        for pattern in (r"errors: (\d+)", r"(\d+) states, stored", r"elapsed time ([\d.]+) seconds")
    )
    violated = re.search(r"^pan:\d+: (.*?) \(at depth", said, re.MULTILINE)
    cut = "max search depth too small" in said or "out of memory" in said
    wrong = None
    if errors:
        wrong = violated[1].removeprefix("assertion violated ") if violated else "?"
    return Checked(model, defect, int(states), not errors and not cut, wrong, took)


def _number(pattern: str, text: str) -> float:
    match = re.search(pattern, text)
    if match is None:
        raise AssertionError(f"spin did not say {pattern}: {text}")
    return float(match[1])


def _run(command: list[str], folder: str) -> str:
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=_WITHIN_S, check=False
    )
    if done.returncode:
        raise AssertionError(f"{command[0]}: {done.stdout}{done.stderr}")
    return done.stdout
