"""The script in a real bash, asked the way TAB asks it."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.command import Command
from tests.support.waiting import DEADLINE_S

#: What bash does at TAB: the function that `complete` has registered, with the words so far.
_TAB = """
source {script}
registered=$(complete -p txbox)
[[ $registered =~ -F\\ ([^ ]+) ]]
COMP_WORDS=({words}) COMP_CWORD={last} COMP_LINE={line} COMP_POINT={point}
"${{BASH_REMATCH[1]}}" txbox {current} {previous}
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("completion")
    written = directory / "txbox.bash"
    written.write_text(Command(directory, {})("completion", "bash").out)
    return written


def _tab(script: Path, *words: str) -> set[str]:
    """What bash offers with the cursor behind the last of these words."""
    line = " ".join(words)
    asked = _TAB.format(
        script=shlex.quote(str(script)),
        words=shlex.join(words),
        last=len(words) - 1,
        line=shlex.quote(line),
        point=len(line),
        current=shlex.quote(words[-1]),
        previous=shlex.quote(words[-2]),
    )
    done = subprocess.run(
        ["bash", "--norc", "--noprofile", "-u", "-c", asked],
        cwd=script.parent, capture_output=True, text=True, timeout=DEADLINE_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return {offered.strip() for offered in done.stdout.split("\n") if offered.strip()}


def test_bash_completes_commands_options_values_and_files(script: Path) -> None:
    assert _tab(script, "txbox", "qua") == {"quarantine"}
    assert {"init", "run", "demo", "ui", "completion"} <= _tab(script, "txbox", "")
    assert _tab(script, "txbox", "quarantine", "") == {"list", "show", "accept", "discard"}
    assert _tab(script, "txbox", "init", "--part") == {"--partition"}
    assert _tab(script, "txbox", "init", "--partition", "u") == {"uuid7", "ulid"}
    assert "--app" in _tab(script, "txbox", "outbox", "list", "--")
    assert "--app" not in _tab(script, "txbox", "demo", "--")
    (script.parent / "fixed.json").touch()
    assert _tab(script, "txbox", "edit", "--payload", "fix") == {"fixed.json"}


def test_zsh_reads_the_script(command: Command) -> None:
    written = command("completion", "zsh").out
    assert written.startswith("#compdef txbox\n")
    command.file("_txbox", written)
    if zsh := shutil.which("zsh"):
        subprocess.run([zsh, "-n", "_txbox"], cwd=command.directory, check=True, timeout=DEADLINE_S)


def test_without_shtab_it_says_what_to_install(command: Command) -> None:
    command.file("shtab.py", "raise ModuleNotFoundError('none', name='shtab')")
    assert command("completion", "bash", code=2).sentence == (
        "Completion needs shtab: run pip install 'txbox[cli]'."
    )
    assert "invalid choice: 'fish'" in command("completion", "fish", code=2).err
