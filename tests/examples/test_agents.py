"""The examples of agents repeat their calls, and refund once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.examples.programs import EXAMPLES
from tests.support.waiting import DEADLINE_S


def _run(*words: str, cwd: Path) -> list[str]:
    done = subprocess.run(
        [sys.executable, *words], cwd=cwd, capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_an_agent_that_is_killed_and_a_person(tmp_path: Path) -> None:
    program = tmp_path / "agent_refunds.py"
    program.write_text((EXAMPLES / program.name).read_text())
    done = ["call_1: {'order': 1, 'number': 1}", "call_2: {'order': 1, 'number': 2}"]
    first = _run(program.name, cwd=tmp_path)
    assert first[:3] == ["The agent was killed: True", *done]
    assert "waits for the approval of a person (ticket-4711 call_3)" in first[3]
    assert first[4:] == ["[(1, 500), (1, 500)]"]
    # as its first lines say
    words = ["-m", "txbox", "quarantine", "accept", "refund", "ticket-4711 call_3"]
    _run(*words, "--reason", "checked", "--database", "sqlite:///agent_refunds.db", cwd=tmp_path)
    _run("-m", "txbox", "run", "agent_refunds:app", "--once", cwd=tmp_path)
    assert _run(program.name, cwd=tmp_path) == [
        *done,
        "call_3: {'order': 2, 'number': 3}",
        "[(1, 500), (1, 500), (2, 50000)]",
    ]


def test_a_server_of_mcp(tmp_path: Path) -> None:
    assert _run(str(EXAMPLES / "mcp_shop.py"), "client", cwd=tmp_path) == [
        "{'order': 7, 'number': 1}",
        "{'order': 7, 'number': 1}",
        "{'order': 7, 'number': 2}",
        "(2,)",
    ]
