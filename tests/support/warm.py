"""`python -m module …` for tests, forked from a process that has imported txbox and its drivers.

The suite starts more than a thousand of them, and three quarters of what each would cost is imports. It is a process
like any other: its own directory, environment, arguments and streams; it can be signalled and killed; its interpreter
ends by itself. Only imports are shared, so what is about imports, interpreters or installations starts Python itself.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import IO, Any, Self

from tests.support.waiting import DEADLINE_S

_ROOT = Path(__file__).resolve().parents[2]
_IMPORTED = (
    "psycopg", "pymysql", "pytest", "sqlite3",
    "txbox.cli.options", "txbox.cli.run", "txbox.observers.logging", "txbox.testing", "txbox.worker",
    "tests.support.effect",
)  # fmt: skip

Stream = int | IO[Any] | None


class Warm:
    """One process; what `subprocess.Popen` offers, as far as the tests use it.

    Args:
        words: a module and its arguments.
        stdin, stdout, stderr: `PIPE`, `DEVNULL`, `STDOUT`, a file, or None for this process's own.
    """

    def __init__(
        self,
        words: Sequence[str],
        *,
        cwd: Path,
        env: Mapping[str, str] | None = None,
        stdin: Stream = None,
        stdout: Stream = None,
        stderr: Stream = None,
        text: bool = False,
    ) -> None:
        self.args = words
        self.returncode: int | None = None
        self._lock = threading.Lock()
        theirs: list[int] = []
        ours: list[IO[Any] | None] = []
        close: list[int] = []
        for number, stream in enumerate((stdin, stdout, stderr)):
            ours.append(None)
            if stream == subprocess.PIPE:
                read, write = os.pipe()
                mine, other = (write, read) if number == 0 else (read, write)
                mode = ("w" if number == 0 else "r") + ("" if text else "b")
                ours[number] = open(mine, mode, 1 if text else -1)  # noqa: PTH123, SIM115
                close.append(other)
            elif stream == subprocess.DEVNULL:
                close.append(other := os.open(os.devnull, os.O_RDWR))
            elif stream == subprocess.STDOUT:
                other = theirs[1]
            else:
                other = number if stream is None else _number(stream)
            theirs.append(other)
        self.stdin, self.stdout, self.stderr = ours
        self._status, status = os.pipe()
        try:
            self.pid = _server().start(
                {
                    "words": list(words),
                    "cwd": str(cwd),
                    "env": dict(os.environ if env is None else env),
                },
                [*theirs, status],
                self._status,
            )
        finally:
            for other in (*close, status):
                os.close(other)

    def poll(self) -> int | None:
        return self._ended(0)

    def wait(self, timeout: float | None = None) -> int:
        code = self._ended(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0)
        return code

    def _ended(self, timeout: float | None) -> int | None:
        if self.returncode is None and select.select([self._status], [], [], timeout)[0]:
            with self._lock:
                if self.returncode is None:
                    said = os.read(self._status, 16)
                    os.close(self._status)
                    # the server is gone when it says nothing: with it the tests
                    self.returncode = int(said) if said else -signal.SIGKILL
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            # it may have ended, and its status be still on the way
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def communicate(self, input: Any = None, timeout: float | None = None) -> tuple[Any, Any]:  # noqa: A002
        """Write `input`, read both streams to their ends, and wait for the process."""
        read: dict[IO[Any], Any] = {}
        readers = [
            threading.Thread(
                target=lambda pipe: read.update({pipe: pipe.read()}), args=(pipe,), daemon=True
            )
            for pipe in (self.stdout, self.stderr)
            if pipe is not None
        ]
        for reader in readers:
            reader.start()
        if self.stdin is not None:
            try:
                if input:
                    self.stdin.write(input)
                self.stdin.close()
            except BrokenPipeError:
                pass  # it ended without reading
        deadline = None if timeout is None else time.monotonic() + timeout
        self.wait(timeout)
        for reader in readers:
            reader.join(None if deadline is None else max(0.0, deadline - time.monotonic()))
            if reader.is_alive():
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
        out, err = (pipe and read[pipe] for pipe in (self.stdout, self.stderr))
        self._close()
        return out, err

    def _close(self) -> None:
        for pipe in (self.stdin, self.stdout, self.stderr):
            if pipe is not None:
                pipe.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *raised: object) -> None:
        if kind is not None:
            # a test that has failed does not wait for what it could not end
            self.kill()
        self._close()
        self.wait()


def run(
    words: Sequence[str],
    *,
    cwd: Path,
    env: Mapping[str, str] | None = None,
    input: bytes = b"",  # noqa: A002
    timeout: float = DEADLINE_S,
) -> subprocess.CompletedProcess[bytes]:
    """Run a module to its end; killed when that takes longer than `timeout`."""
    pipe = subprocess.PIPE
    with Warm(words, cwd=cwd, env=env, stdin=pipe, stdout=pipe, stderr=pipe) as process:
        try:
            out, err = process.communicate(input, timeout)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(words, process.wait(), out, err)


def _number(stream: int | IO[Any]) -> int:
    return stream if isinstance(stream, int) else stream.fileno()


class _Server:
    """The process that is forked, one for each test process; it goes with it."""

    def __init__(self) -> None:
        self._channel, theirs = socket.socketpair()
        self._lock = threading.Lock()
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(theirs.fileno())],
            cwd=_ROOT, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL,
        )  # fmt: skip
        theirs.close()
        atexit.register(self._close)

    def _close(self) -> None:
        self._channel.close()
        self._process.wait()

    def start(self, request: dict[str, Any], streams: list[int], status: int) -> int:
        text = json.dumps(request).encode()
        with self._lock:
            socket.send_fds(self._channel, [len(text).to_bytes(4, "big")], streams)
            self._channel.sendall(text)
        return int.from_bytes(os.read(status, 4), "big")


@cache
def _server() -> _Server:
    return _Server()


def _serve(channel: socket.socket) -> tuple[str, ...]:
    """Fork for every request; returns in the forked processes alone, with their words."""
    noticed, notice = os.pipe()
    os.set_blocking(notice, False)
    signal.set_wakeup_fd(notice, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    running: dict[int, int] = {}
    while True:
        ready, _, _ = select.select([channel.fileno(), noticed], [], [])
        if noticed in ready:
            os.read(noticed, 4096)
            for pid in list(running):
                ended, how = os.waitpid(pid, os.WNOHANG)
                if ended:
                    _tell(running.pop(pid), b"%d" % os.waitstatus_to_exitcode(how))
        if channel.fileno() in ready:
            size, files, _, _ = socket.recv_fds(channel, 4, 4)
            if not size:
                os._exit(0)
            text = channel.recv(int.from_bytes(size, "big"), socket.MSG_WAITALL)
            *streams, status = files
            pid = os.fork()
            if not pid:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                # ignored in whatever a script starts with &, these tests perhaps
                signal.signal(signal.SIGINT, signal.default_int_handler)
                os.write(status, os.getpid().to_bytes(4, "big"))
                for number, stream in enumerate(streams):
                    os.dup2(stream, number)
                channel.detach()
                os.closerange(3, 65536)
                return _become(json.loads(text))
            running[pid] = status
            for stream in streams:
                os.close(stream)


def _tell(status: int, text: bytes) -> None:
    with suppress(BrokenPipeError):  # nobody waits for it any more
        os.write(status, text)
    os.close(status)


def _become(request: dict[str, Any]) -> tuple[str, ...]:
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    more = request["env"].get("PYTHONPATH", "")
    sys.path[0:1] = [request["cwd"], *filter(None, more.split(os.pathsep))]
    return tuple(request["words"])


def _main() -> None:
    for name in _IMPORTED:
        __import__(name)
    gc.collect()
    gc.freeze()  # a collection in a fork would copy every page
    module, *words = _serve(socket.socket(fileno=int(sys.argv[1])))
    sys.argv = [module, *words]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    _main()
