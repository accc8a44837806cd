"""P5: a disk whose flush takes a millisecond more, as that of network block storage does."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.result import Bar, ratios
from benchmarks.setting import opened
from benchmarks.workload import in_sets, writes
from tests.support.servers import ServerError
from tests.support.servers.postgresql import PostgreSQLServer
from tests.support.servers.process import throwaway_name

NUMBER = "P5"
TITLE = "Backlog on a slow disk: every flush takes a millisecond more"

_SHIM = r"""
#define _GNU_SOURCE
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static int later(int result) {
    struct timespec pause = {0, 1000000};
    nanosleep(&pause, 0);
    return result;
}
int fdatasync(int fd) { return later(syscall(SYS_fdatasync, fd)); }
int fsync(int fd) { return later(syscall(SYS_fsync, fd)); }
"""


class SlowDisk(PostgreSQLServer):
    """A durable server, whose flushes wait in a library that is loaded before libc."""

    def __init__(self) -> None:
        super().__init__(throwaway_name("postgresql", 90), durable=True, preferred_port=25632)

    @property
    def _library(self) -> Path:
        return self.directory / "slow_disk.so"

    def initialise(self) -> None:
        super().initialise()
        compiler = shutil.which("cc") or shutil.which("gcc")
        if compiler is None:
            raise ServerError("P5 needs a C compiler: install gcc.")
        subprocess.run(
            [compiler, "-shared", "-fPIC", "-O1", "-x", "c", "-", "-o", str(self._library)],
            input=_SHIM.encode(),
            check=True,
        )
        self._library.chmod(0o755)

    def environment(self) -> Mapping[str, str]:
        preload = {"LD_PRELOAD": str(self._library)} if self._library.exists() else {}
        return {**super().environment(), **preload}


@contextmanager
def slow_disk() -> Generator[str]:
    """The URL of a server that is removed at the end."""
    server = SlowDisk()
    try:
        server.start()
        yield server.url
    finally:
        server.remove()


def run(*, rounds: int, messages: int) -> dict[str, Any]:
    """Measure, in interleaved rounds; returns the result as it is stored."""
    with slow_disk() as url, opened(url, rounds=rounds, messages=messages) as on:
        pipelined = on.txbox("txbox, pipeline=True", writes, pipeline=True)
        plain = on.txbox("txbox, ordinary handler", writes)
        sets = on.txbox("txbox, batch=True", in_sets, batch=True)
        found = on.interleaved(
            [
                (on.naive(), on.work(0.25)),
                (on.naive(name="naive, 4 connections", connections=4), on.work(0.5)),
                (plain, on.work(2)),
                (pipelined, on.work(5)),
                (sets, on.work(10)),
                (on.limit(), on.work(10)),
            ]
        )
        return on.result(
            NUMBER,
            TITLE,
            "the whole workload waiting from the start, one worker with one lane; fdatasync and fsync of the server "
            "return a millisecond later than they would",
            [
                Bar(
                    "pipeline=True: at least 25 times naive",
                    25.0,
                    ratios(found, pipelined.name, "naive"),
                )
            ],
            found,
        )
