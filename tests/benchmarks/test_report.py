"""The page: what is missed or wrong stands there, and the plots are drawings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from benchmarks import plots, report
from benchmarks.__main__ import PHASES
from benchmarks.phases import PHASES as CORE
from benchmarks.result import Bar, Plot, Round, Verified, passed, result


def _document(*, lost: int = 0, ratio: float = 13.0, stretch: bool = False) -> dict[str, Any]:
    rounds = [
        Round("naive", 100, 1000.0, 1.0, 2.0, 100.0, Verified(0, 0)),
        Round(
            "txbox", 100, 1000.0 * ratio, 1.0, 2.0, 10.0, Verified(lost, 0), more={"held_ms": 3.0}
        ),
    ]
    bar = Bar("at least 12 times naive", 12.0, [ratio], stretch=stretch)
    return result(
        phase="P3", title="Backlog", method="once", bars=[bar], rounds=rounds, circumstances={}
    )


def test_a_bar_that_is_met_passes() -> None:
    document = _document()

    assert passed(document)
    text = "\n".join(report.lines(document))
    assert "at least 12 times naive: **13.00 x** (round by round: 13), met" in text
    assert "held ms" in text
    assert "WRONG" not in text


def test_a_bar_that_is_missed_says_so() -> None:
    document = _document(ratio=11.0)

    assert not passed(document)
    assert "**MISSED**" in "\n".join(report.lines(document))
    assert report.summary_of([document])


def test_a_stretch_that_is_not_reached_fails_nothing() -> None:
    document = _document(ratio=11.0, stretch=True)

    assert passed(document)
    assert "not reached" in "\n".join(report.lines(document))


def test_what_was_lost_is_never_hidden_by_a_rate() -> None:
    document = _document(lost=1)

    assert not passed(document)
    assert "**WRONG**: txbox" in "\n".join(report.lines(document))


def test_an_upper_bar_is_missed_from_above() -> None:
    assert Bar("at most 5 ms", 5.0, [4.0, 6.0, 5.0], "at most", "ms").met
    assert not Bar("at most 5 ms", 5.0, [4.0, 6.0, 6.0], "at most", "ms").met
    assert not Bar("nothing measured", 5.0, []).met


def test_every_phase_of_the_command_is_on_the_page() -> None:
    assert {name for name, (_, module) in PHASES.items() if module is None} == set(CORE)


def test_plots_are_drawings(tmp_path: Path) -> None:
    bars = Plot("one", "A & B", "bars", "", "msg/s", {"naive": [(0, 10.0)], "x<y": [(0, 90.0)]})
    lines = Plot("two", "T", "lines", "x", "y", {"a": [(10, 1.0), (10000, 0.5)]}, "xy")
    for plot in (bars, lines):
        path = plots.write(plot.as_dict(), tmp_path)
        root = ElementTree.fromstring(path.read_text())
        shapes = [shape.tag.rpartition("}")[2] for shape in root.iter()]
        assert shapes.count("rect") + shapes.count("polyline") >= 2


def _top(page: str) -> str:
    return page.partition("## How it is measured")[0]


def test_the_page_begins_with_five_figures_and_four_plots() -> None:
    page = report.PAGE.read_text()
    assert (
        len([line for line in _top(page).splitlines() if line.startswith("| ") and "**" in line])
        == 5
    )
    assert _top(page).count("](plots/") == 4


def test_the_page_counts_what_is_missed() -> None:
    missed = report._missed({"P3": _document(ratio=11.0)})
    assert missed == ["Of 1 bars 1 are **missed**: [P3](#p3-backlog)."]
    assert report._missed({"P3": _document()}) == ["All 1 bars are met."]


def test_a_result_has_a_line_for_each_round() -> None:
    document = {
        "phase": "P0", "bars": [], "contenders": {"a": {"rate": 1.23456789, "failures": []}},
        "rounds": [{"rate": 1 / 3, "lost": None}, {"rate": 2, "lost": 0}],
    }  # fmt: skip
    text = report.as_text(document)
    assert json.loads(text) == {
        "phase": "P0", "bars": [], "contenders": {"a": {"rate": 1.23457, "failures": []}},
        "rounds": [{"rate": 0.333333, "lost": None}, {"rate": 2, "lost": 0}],
    }  # fmt: skip
    assert '\n  {"rate": 2, "lost": 0}\n' in text
    assert len(text.splitlines()) == 11
