"""The tutorial, typed from the page into an empty directory: its files, its commands, and what they print."""

from __future__ import annotations

import os
import re
import secrets
import shlex
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.docs.pages import page
from tests.support.databases import NewDatabase
from tests.support.waiting import DEADLINE_S, eventually

PAGE = page("docs/tutorial.md")
SERVER = "## 7. The same service on PostgreSQL"
BROKER = "## 8. From Kafka"
URL = "postgresql://localhost/tutorial"
_FILE = re.compile(r"`(\w+\.py)`[^`]*$")
_AGE = re.compile(r"\b\d+(ms|s|m)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Step:
    """What a reader does between two outputs: saves files, then runs commands."""

    files: dict[str, str]
    commands: list[str]
    output: str


def _steps(text: str) -> list[Step]:
    steps: list[Step] = []
    files: dict[str, str] = {}
    commands: list[str] = []
    before = ""
    for prose, language, block in re.findall(
        r"(.*?)^```(\w+)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE
    ):
        before = prose.strip()
        if language == "python":
            named = _FILE.search(before)
            assert named is not None, f"which file is this to be saved as? {before[-80:]!r}"
            files[named[1]] = block
        elif language == "sh":
            commands = block.splitlines()
        else:
            steps.append(Step(files, commands, block))
            files, commands = {}, []
    assert not files
    assert not commands, "a reader cannot tell whether it worked"
    return steps


def _section(heading: str) -> str:
    return PAGE.text.partition(heading)[2].partition("\n## ")[0]


def _environment() -> dict[str, str]:
    return {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}


def _run(command: str, folder: Path) -> str:
    done = subprocess.run(
        shlex.split(command), cwd=folder, env=_environment(), capture_output=True, text=True,
        timeout=DEADLINE_S, check=False,
    )  # fmt: skip
    if done.returncode == -signal.SIGKILL:
        return "Killed\n"  # as the reader's shell says
    assert done.returncode == 0, f"{command}\n{done.stderr}"
    return done.stdout


def _type(text: str, folder: Path, url: str) -> None:
    for step in _steps(text):
        for name, content in step.files.items():
            (folder / name).write_text(content.replace(URL, url))
        printed = "".join(_run(command, folder) for command in step.commands)
        printed = (
            re.sub(r"(tables in )\S+", rf"\1{URL}", printed) if URL in step.output else printed
        )
        assert _AGE.sub("AGE", printed) == _AGE.sub("AGE", step.output), step.commands


def test_typed_on_sqlite_it_prints_what_the_page_says(tmp_path: Path) -> None:
    _type(PAGE.text.partition(SERVER)[0], tmp_path, URL)


def test_typed_on_postgresql_after_the_readme_it_prints_what_the_page_says(
    tmp_path: Path, new_database: NewDatabase
) -> None:
    """A reader has tried the README on the same server: what it leaves behind is not in the way."""
    databases = {
        url: new_database("postgresql", schema=False)
        for url in set(
            re.findall(r"postgresql://localhost/\w+", page("README.md").text + PAGE.text)
        )
    }
    for block in page("README.md").blocks():
        if "CREATE TABLE" in block.text or "app.process(" in block.text:
            program = re.sub(
                r"postgresql://localhost/\w+", lambda url: databases[url[0]], block.text
            )
            subprocess.run([sys.executable, "-c", program], check=True, timeout=DEADLINE_S)
    _type(_section(SERVER), tmp_path, databases[URL])


def test_typed_with_kafka_it_prints_what_the_page_says(
    tmp_path: Path, new_database: NewDatabase, kafka_bootstrap: str
) -> None:
    url = new_database("postgresql", schema=False)
    _type(_section(SERVER), tmp_path, url)
    text = _section(BROKER).replace("localhost:9092", kafka_bootstrap).replace(URL, url)
    # the broker is shared: topics and a group of this test
    mark = secrets.token_hex(4)
    text = re.sub(r'"(orders|invoices|shop)"', rf'"\1-{mark}"', text)
    before, _, behind = text.partition("A few seconds later")
    (typed,), (looked,) = _steps(f"{before}```text\n```\n"), _steps(behind)
    for name, content in typed.files.items():
        (tmp_path / name).write_text(content)
    (publish, run), (look,) = typed.commands, looked.commands
    assert _run(publish, tmp_path) == ""
    service = subprocess.Popen(shlex.split(run), cwd=tmp_path, env=_environment())
    try:
        eventually(lambda: _run(look, tmp_path) == looked.output, "the output of the page")
        service.send_signal(signal.SIGINT)  # Ctrl-C
        assert service.wait(DEADLINE_S) == 0
    finally:
        service.kill()
        service.wait(DEADLINE_S)
    assert _run(look, tmp_path) == looked.output


def test_an_output_that_differs_is_seen(tmp_path: Path) -> None:
    """The test of this test."""
    with pytest.raises(AssertionError, match="print"):
        _type(
            'Save as `a.py`:\n\n```python\nprint("yes")\n```\n\n```sh\npython a.py\n```\n\n```text\nno\n```\n'.replace(
                "python a.py", "python a.py print"
            ),
            tmp_path,
            URL,
        )
