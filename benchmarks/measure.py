"""What the figures were measured on, with the commit."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

from txbox.bench import setting

ROOT = Path(__file__).resolve().parents[1]


def circumstances(url: str | None) -> dict[str, Any]:
    """The machine, the versions, the commit; settings of the server where it is PostgreSQL."""
    return {
        **setting.circumstances(url),
        "commit": _git("rev-parse", "HEAD"),
        "uncommitted_changes": bool(_git("status", "--porcelain", "--", "src", "benchmarks/*.py")),
    }


def _git(*arguments: str) -> str:
    done = subprocess.run(
        ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return done.stdout.strip()
