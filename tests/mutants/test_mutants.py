"""Every mutant still fits the source; a mutant is really caught, a change that changes nothing is not; the page."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from tests.models import spin
from tests.mutants import __main__, page
from tests.mutants.commands import (
    WAYS,
    Command,
    Defect,
    Finished,
    Verdict,
    joint,
    pytest_of,
    verdict_of,
)
from tests.mutants.judge import Judge
from tests.mutants.table import MUTANTS, Mutant, located
from tests.mutants.tree import GUARD, MARK, Tree
from tests.support.servers import ROOT
from txbox.store.dialect import parse_queries

SOURCE = ROOT / "src" / "txbox"
_SQL = SOURCE / "store"
COMMAND = Command(("-c", "pass"), 1.0, "^red (.*)", "^green")


# -- the table --------------------------------------------------------------------------------------


def test_every_mutant_fits_the_source_as_it_is() -> None:
    """Where code was moved or rewritten, give the mutant another text that says the same."""
    wrong: list[str] = []
    for mutant in MUTANTS.values():
        try:
            path = located(mutant, SOURCE)
            before = path.read_text()
            after = mutant.applied(before)
            assert after != before, f"{mutant.name} changes nothing"
            if path.suffix == ".py":
                compile(after, path.name, "exec")
            elif path.parent == _SQL:
                _parse(path, after)
        except (LookupError, SyntaxError, AssertionError, KeyError) as error:
            wrong.append(f"{mutant.name}: {error}")
    assert wrong == []


def _parse(path: Path, text: str) -> None:
    common = text if path.stem == "common" else (_SQL / "common.sql").read_text()
    for name in ("postgresql", "mysql", "sqlite"):
        differing = text if path.stem == name else (_SQL / f"{name}.sql").read_text()
        parse_queries(common, differing)


def test_a_text_that_has_moved_is_found_and_one_that_is_not_there_once_is_not(
    tmp_path: Path,
) -> None:
    mutant = replace(MUTANTS["ack-first"], file="here.py", text="once")
    (tmp_path / "there.py").write_text("once")
    assert located(mutant, tmp_path) == tmp_path / "there.py"
    (tmp_path / "elsewhere.sql").write_text("once")
    with pytest.raises(LookupError, match="it must be in one"):
        located(mutant, tmp_path)
    (tmp_path / "here.py").write_text("once and once more")
    with pytest.raises(LookupError, match="2 times"):
        located(mutant, tmp_path)


def test_there_are_mutants_enough_and_what_should_catch_them_exists() -> None:
    assert len(MUTANTS) >= 24
    assert all(mutant.does.endswith(".") for mutant in MUTANTS.values())
    defects = {model: spin.defects(model) for model in spin.NAMES}
    for mutant in MUTANTS.values():
        assert any(not isinstance(mutant.way(way), str) for way in WAYS)
        if isinstance(mutant.model, Defect):
            assert mutant.model.name in defects[mutant.model.model], mutant.name
        for way in WAYS:
            how = mutant.way(way)
            if isinstance(how, Command):
                assert [word for word in how.words if _is_missing(word)] == [], mutant.name


def _is_missing(word: str) -> bool:
    file, _, test = word.partition("::")
    return word.startswith("tests/") and bool(test) and test not in _tests_in(file)


@cache
def _tests_in(file: str) -> frozenset[str]:
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    tree = ast.parse((ROOT / file).read_text())
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, kinds))


# -- verdicts ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("finished", "expected"),
    [
        (Finished(0, "green", 2.0), Verdict("survived", 2.0)),
        (Finished(1, "green\nred test_a\n", 2.0), Verdict("caught", 2.0, "test_a")),
        (Finished(None, "", 9.0), Verdict("caught", 9.0, "no end within 1 s")),
        # whatever else: it says nothing of a mutant
        (Finished(0, "3 skipped", 2.0), Verdict("broken", 2.0, "exit status 0: 3 skipped")),
        (Finished(1, "no server", 2.0), Verdict("broken", 2.0, "exit status 1: no server")),
        (Finished(4, "red usage", 2.0), Verdict("broken", 2.0, "exit status 4: red usage")),
    ],
)
def test_what_an_end_means(finished: Finished, expected: Verdict) -> None:
    assert verdict_of(COMMAND, finished) == expected


class Scripted:
    """A tree whose commands end as is written, with and without a mutant."""

    def __init__(self, alone: Finished, mutated: Finished) -> None:
        self._ends = {False: alone, True: mutated}
        self._mutated = False
        self.runs = 0

    def run(self, command: Command) -> Finished:
        self.runs += 1
        return self._ends[self._mutated]

    @contextmanager
    def mutated(self, mutant: Mutant) -> Iterator[None]:
        self._mutated = True
        yield
        self._mutated = False


def test_a_command_that_is_red_by_itself_catches_nothing() -> None:
    red, green = Finished(1, "red x", 1.0), Finished(0, "green", 1.0)
    tree = Scripted(red, red)
    judge = Judge(tree)
    mutant = MUTANTS["ack-first"]
    assert judge.verdict(mutant, COMMAND).by == "the command is red by itself: x"
    assert judge.verdict(mutant, COMMAND).outcome == "broken"
    assert tree.runs == 1, "once for each command"
    tree = Scripted(green, red)
    assert Judge(tree).verdict(mutant, COMMAND) == Verdict("caught", 1.0, "x")
    assert tree.runs == 2


def test_commands_that_differ_in_their_tests_are_tried_together() -> None:
    alike = [pytest_of("test_a.py::one", only="x"), pytest_of("test_b.py::two", only="x")]
    other = pytest_of("test_c.py::three")
    ((together, group),) = joint([*alike, other, COMMAND])
    assert group == alike
    assert together.words[-3:] == ("-rA", "tests/test_a.py::one", "tests/test_b.py::two")
    output = "PASSED tests/test_a.py::one[x]\nSKIPPED [1] tests/test_b.py:1: no server\n1 passed"
    green = Finished(0, output, 1.0)
    tree = Scripted(green, green)
    judge = Judge(tree)
    judge.look_ahead([*alike, other])
    judge.verdict(MUTANTS["ack-first"], alike[0])
    assert tree.runs == 2, "it is known to be green by itself"
    judge.verdict(MUTANTS["ack-first"], alike[1])
    assert tree.runs == 4, "whether the second one is green was not seen"
    tree = Scripted(Finished(1, output, 1.0), green)
    Judge(tree).look_ahead(alike)
    assert tree.runs == 1


def test_a_mutant_is_caught_and_a_change_that_changes_nothing_survives() -> None:
    """By a real test, in a real copy, on SQLite."""
    mutant = MUTANTS["payload-not-compared"]
    # the machine may be busy
    test = pytest_of(
        "test_identity_payloads.py::test_payload_is_compared_with_the_row",
        only="sqlite",
        limit_s=800,
    )
    nothing = replace(mutant, instead=f"{mutant.text}  # a remark")
    with Tree() as tree:
        judge = Judge(tree)
        caught = judge.verdict(mutant, test)
        assert caught.outcome == "caught", caught.by
        assert caught.by.endswith("test_payload_is_compared_with_the_row")
        survived = judge.verdict(nothing, test)
        assert survived.outcome == "survived", survived.by
        whole = (SOURCE / mutant.file).read_text()
        assert located(mutant, tree.source / "txbox").read_text() == whole, "it is put back"
    assert not tree.folder.exists()


def test_a_process_that_would_import_another_txbox_ends(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(GUARD)
    environment = {"PYTHONPATH": f"{tmp_path}:{ROOT / 'src'}", "PATH": ""}
    for source, status in ((ROOT / "src", 0), (tmp_path / "copy", 97)):
        ended = subprocess.run(
            [sys.executable, "-c", "import txbox.outcome"],
            env={**environment, MARK: str(source)}, check=False, capture_output=True,
        )  # fmt: skip
        assert ended.returncode == status, ended.stderr


# -- the command and the page -----------------------------------------------------------------------


def test_the_command_tries_what_it_is_told_and_keeps_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, shown = tmp_path / "mutants.json", tmp_path / "mutants.md"
    shown.write_text(f"before\n{page.MARK}")
    verdicts = {
        "no-fence": Verdict("caught", 3.0, "a test"),
        "two-runners": Verdict("survived", 4.0),
    }
    read, keep = page.read, page.keep

    def verdict(judge: Judge, mutant: Mutant, how: Command | Defect) -> Verdict:
        return verdicts[mutant.name]

    monkeypatch.setattr(page, "read", lambda path=file: read(path))
    monkeypatch.setattr(
        page, "keep", lambda name, way, verdict: keep(name, way, verdict, file, shown)
    )
    monkeypatch.setattr(__main__, "Tree", nullcontext)
    monkeypatch.setattr(Judge, "look_ahead", lambda judge, commands: None)
    monkeypatch.setattr(Judge, "verdict", verdict)
    assert __main__.main(["--by", "tests", "two-runners", "no-fence"]) == 1
    assert "nothing that was run has caught two-runners" in capsys.readouterr().out
    rows = read(file)
    assert [rows[name]["tests"] for name in rows] == [
        ["survived", 4.0, ""],
        ["caught", 3.0, "a test"],
    ]
    assert shown.read_text().startswith("before\n")
    assert "| **survived** 4 s |" in shown.read_text()
    # what is known is not run again
    assert __main__.main(["--by", "tests", "--missing", "no-fence"]) == 0
    assert capsys.readouterr().out == ""
    verdicts["no-fence"] = Verdict("broken", 1.0, "red by itself")
    assert __main__.main(["--by", "tests", "no-fence"]) == 1
    assert read(file) == rows, "what says nothing is not kept"
    for wrong in (["no-such"], ["--by", "prayer"]):
        with pytest.raises(SystemExit):
            __main__.main(wrong)


def test_the_page_is_what_the_file_says() -> None:
    rows = page.read()
    assert list(rows) == [name for name in MUTANTS if name in rows]
    written = page.PAGE.read_text().partition(page.MARK)[2]
    assert written == "\n" + "\n".join(page.tables(rows)) + "\n"
