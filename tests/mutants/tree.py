"""A copy of source and tests in which one mutant at a time is applied, and in which commands run."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Self

from tests.mutants.commands import Command, Finished
from tests.mutants.table import Mutant, located
from tests.support.servers import ROOT, VARIABLES, server_urls
from tests.support.servers.leftovers import end_processes

#: Names the source that every Python of a run must import; what is left of a run is found by it.
MARK = "TXBOX_MUTANT_SOURCE"
_COPIED = ("src", "tests", "pyproject.toml")
_NOT_COPIED = shutil.ignore_patterns("__pycache__", ".*", "node_modules")
# the run's pytest is another one than that which may be around it
_KEPT_FROM_RUNS = ("PYTEST_", "COV_")
_TO_END_S = 20.0

#: The first module that an interpreter imports. One that would import another txbox ends with a status of its own.
GUARD = f"""\
import importlib.util, os, sys

source = os.environ.get("{MARK}")
if source:
    spec = importlib.util.find_spec("txbox")
    if spec is None or not str(spec.origin).startswith(source + os.sep):
        sys.stderr.write(f"txbox would be {{spec and spec.origin}} and not the copy in {{source}}\\n")
        sys.stderr.flush()
        os._exit(97)
"""
# servers that a run which was cut off has left, and the directory of this copy's servers
_REMOVE_SERVERS = """
import shutil
from tests.support.servers import process, provision
if process.base_directory().exists():
    provision.down()
    shutil.rmtree(process.base_directory(), ignore_errors=True)
"""


class Tree:
    """The copy. It is removed on exit, with whatever its commands have left behind."""

    def __init__(self, root: Path = ROOT) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="txbox-mutants-"))
        self.root = self.folder / "tree"
        self.root.mkdir()
        for name in _COPIED:
            if (root / name).is_dir():
                shutil.copytree(root / name, self.root / name, ignore=_NOT_COPIED)
            else:
                shutil.copy2(root / name, self.root / name)
        self.source = self.root / "src"
        for name in ("first", "tmp"):
            (self.folder / name).mkdir()
        (self.folder / "first" / "sitecustomize.py").write_text(GUARD)
        self._written = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self._end_leftovers()
        shutil.rmtree(self.folder, ignore_errors=True)

    @contextmanager
    def mutated(self, mutant: Mutant) -> Iterator[None]:
        """Apply a mutant for the length of a block."""
        path = located(mutant, self.source / "txbox")
        text, before = path.read_text(), path.stat()
        self._written += 1
        path.write_text(mutant.applied(text))
        # whole seconds are what Python compares compiled files by: each text has a time of its own
        second = int(before.st_mtime) + self._written
        os.utime(path, (second, second))
        try:
            yield
        finally:
            path.write_text(text)
            os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))

    def environment(self) -> dict[str, str]:
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(_KEPT_FROM_RUNS)
        }
        urls = {VARIABLES[name]: url for name, url in server_urls().items()}
        return kept | urls | {
            "PYTHONPATH": os.pathsep.join((str(self.folder / "first"), str(self.source))),
            MARK: str(self.source), "TMPDIR": str(self.folder / "tmp"),
        }  # fmt: skip

    def run(self, command: Command) -> Finished:
        """Run a command to its end or to its limit."""
        log = self.folder / "log"
        began = time.monotonic()
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, *command.words], cwd=self.root, env=self.environment(),
                stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
            status: int | None = None
            try:
                status = process.wait(command.limit_s)
            except subprocess.TimeoutExpired:
                # as by Ctrl-C: it gives databases and servers back
                process.send_signal(signal.SIGINT)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(_TO_END_S)
            finally:
                seconds = time.monotonic() - began
                _kill_group(process)
        end_processes(f"{MARK}={self.source}", within_s=5.0)
        if status is None:
            self._end_leftovers()
        return Finished(status, log.read_text(errors="replace"), seconds)

    def _end_leftovers(self) -> None:
        subprocess.run(
            [sys.executable, "-c", _REMOVE_SERVERS], cwd=self.root, env=self.environment(),
            check=False, capture_output=True,
        )  # fmt: skip


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
