"""Another release of txbox beside the running one, as a rolling deploy has them: a copy with the next schema."""

from __future__ import annotations

import ctypes
import os
import pickle
import queue
import re
import selectors
import shutil
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from tests.support.servers import ROOT
from tests.support.versions import COMPATIBLE_FROM, NEXT, SOURCE, add_migrations

if TYPE_CHECKING:
    from tests.chaos.workload import Plan

_STARTED_S = 120.0
_INIT = "import sys, txbox; txbox.App(sys.argv[1]).init()"


def build(folder: Path) -> Path:
    """Write a release that brings the next schema, and works with today's; returns what goes into PYTHONPATH."""
    package = folder / "txbox"
    shutil.copytree(SOURCE, package, ignore=shutil.ignore_patterns("__pycache__"))
    add_migrations(package / "store" / "migrations")
    for kept in (package / "store" / "migrations").glob(f"*/{NEXT + 1:04}_*.sql"):
        kept.unlink()
    schema = package / "store" / "schema.py"
    text = schema.read_text()
    for name, number in (("VERSION", NEXT), ("OLDEST_USABLE", COMPATIBLE_FROM[NEXT])):
        text, times = re.subn(rf"^{name} = .*$", f"{name} = {number}", text, flags=re.MULTILINE)
        if times != 1:
            raise AssertionError(f"schema.py does not set {name} in a line of its own")
    schema.write_text(text)
    return folder


def _environment(release: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join((str(release), str(ROOT)))}


def migrate(release: Path, url: str) -> None:
    """Bring the tables to the schema of a release, as its `txbox init` does; other faults may want a few tries."""
    for is_last in (False, False, False, True):
        ran = subprocess.run(
            [sys.executable, "-c", _INIT, url], check=False, capture_output=True, text=True,
            timeout=_STARTED_S, env=_environment(release), cwd=ROOT,
        )  # fmt: skip
        if not ran.returncode:
            return
        if is_last:
            raise RuntimeError(ran.stderr[-300:])


class Server:
    """Forks processes of another release: one that imports everything first would rarely live to begin."""

    def __init__(self, release: Path) -> None:
        self._server = subprocess.Popen(
            [sys.executable, "-c", "from tests.chaos import release; release.serve()"],
            env=_environment(release), cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self._lock = threading.Lock()
        self._started = queue.Queue[int]()
        self.exits: dict[int, int] = {}
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        try:
            # it has imported all that its processes need
            self._started.get(timeout=_STARTED_S)
        except queue.Empty:
            self.close()
            raise

    def _read(self) -> None:
        assert self._server.stdout is not None
        for line in self._server.stdout:
            number, _, status = line.partition(" ")
            if status:
                self.exits[int(number)] = int(status)
            else:
                # an id may be that of one that has ended
                self.exits.pop(int(number), None)
                self._started.put(int(number))

    def fork(self, plan: Path) -> int:
        """Start a process; returns its id."""
        assert self._server.stdin is not None
        with self._lock:
            print(plan, file=self._server.stdin, flush=True)
            return self._started.get(timeout=_STARTED_S)

    def close(self) -> None:
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.close()
        self._server.wait()
        self._reader.join()
        self._server.stdout.close()


def serve() -> None:
    """Fork a process for each plan that is read, and write its id; later the id again, with how it ended."""
    from tests.chaos import workload

    plans = selectors.DefaultSelector()
    plans.register(0, selectors.EVENT_READ)
    os.write(1, b"0\n")
    while True:
        if plans.select(timeout=0.05):
            # a line at a time: whoever writes waits for the answer
            path = os.read(0, 4096).decode().strip()
            if not path:
                return
            pid = os.fork()
            if not pid:
                # with this one, and so with the harness
                ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
                plans.close()
                _run(workload.run, Path(path))
            os.write(1, f"{pid}\n".encode())
        with suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                os.write(1, f"{ended[0]} {os.waitstatus_to_exitcode(ended[1])}\n".encode())


def _run(run: Callable[[Plan], None], path: Path) -> NoReturn:
    code = 1
    try:
        run(pickle.loads(path.read_bytes()))  # noqa: S301  # the harness has written it
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001  # the end of the process, which must not go on as its server
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


class Process:
    """A process of another release; used like one of multiprocessing."""

    pid: int

    def __init__(self, server: Server, plan: Plan) -> None:
        self._server, self._plan = server, plan

    def start(self) -> None:
        path = self._plan.folder / f"{self._plan.process}.plan"
        path.write_bytes(pickle.dumps(self._plan))
        self.pid = self._server.fork(path)

    @property
    def exitcode(self) -> int | None:
        return self._server.exits.get(self.pid)

    def is_alive(self) -> bool:
        return self.exitcode is None

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
