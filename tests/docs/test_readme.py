"""The README: its shop and service, pasted by a reader (one file, the commands, their output), and its figures."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

from tests.docs.pages import ROOT, page
from tests.support.databases import NewDatabase
from tests.support.waiting import DEADLINE_S

_URL = "postgresql://localhost/shop"
_SERVICE = "**Your whole service**"
_TIME = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d")


def test_the_whole_service_prints_what_the_readme_says(
    tmp_path: Path, new_database: NewDatabase
) -> None:
    url = new_database("postgresql", schema=False)
    readme = page("README.md")
    line = readme.text.count("\n", 0, readme.text.index(_SERVICE))
    blocks = list(readme.blocks())
    shop = next(block.text for block in blocks if "CREATE TABLE" in block.text)
    service, commands, output = [block for block in blocks if block.line > line][:3]
    assert [service.language, commands.language, output.language] == ["python", "sh", "text"]
    subprocess.run(
        [sys.executable, "-c", shop.replace(_URL, url)],
        cwd=tmp_path,
        check=True,
        timeout=DEADLINE_S,
    )
    (tmp_path / "shop.py").write_text(service.text.replace(_URL, url))
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    ended = subprocess.run(
        ["sh", "-e", "-c", commands.text],
        cwd=tmp_path, env={**os.environ, "PATH": path}, capture_output=True, text=True, timeout=DEADLINE_S,
        check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert _TIME.sub("TIME", ended.stdout) == _TIME.sub("TIME", output.text)


def test_importing_the_service_does_nothing(tmp_path: Path) -> None:
    readme = page("README.md")
    line = readme.text.count("\n", 0, readme.text.index(_SERVICE))
    service = next(
        block.text for block in readme.blocks() if block.line > line and block.language == "python"
    )
    (tmp_path / "shop.py").write_text(service)
    subprocess.run(
        [sys.executable, "-c", "import shop"], cwd=tmp_path, check=True, timeout=DEADLINE_S
    )
    assert {found.name for found in tmp_path.iterdir()} <= {"shop.py", "__pycache__"}


def test_the_rates_are_those_of_the_results() -> None:
    """A figure that links a result is one of its bars, rounded."""
    linked = re.findall(r"\[([^\]]+)\]\((benchmarks/results/\w+\.json)\)", page("README.md").prose)
    assert len(linked) >= 4
    for text, file in linked:
        measured = [bar["measured"] for bar in json.loads((ROOT / file).read_text())["bars"]]
        for figure in re.findall(r"\d+(?:\.\d+)?", text):
            decimals = len(figure.partition(".")[2])
            assert figure in {f"{each:.{decimals}f}" for each in measured}, f"{text}: {file}"
