"""A server process of our own: unprivileged account, private directory, loopback port."""

from __future__ import annotations

import fcntl
import hashlib
import os
import pwd
import re
import shutil
import signal
import socket
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import ClassVar, Self

from tests.support.servers import ROOT, ServerError, UnavailableError
from tests.support.waiting import DEADLINE_S, eventually

MAX_PORTS = 4  # the most that one server takes
#: From here on Linux lends ports to connections: one that is free now is a client's a moment later.
LENT_PORTS = 32768
ENVIRONMENT = {"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C.UTF-8"}


#: Every checkout's: what its name begins with, and what all of them lock while they look for free ports.
_DIRECTORIES = Path("/var/tmp/txbox-servers-")
#: Files in memory: none of them costs a disk, and all are gone with the machine.
_MEMORY, _MEMORY_BYTES = Path("/dev/shm"), 4 << 30
_PORTS_LOCK = Path(f"/var/tmp/txbox-ports-{os.geteuid()}.lock")
#: RabbitMQ takes 6 s alone, and a minute where everything else starts beside it.
_START_S = 3 * DEADLINE_S
_OWNER = re.compile(r"throwaway-\w+-(\d+)-\d+")


def base_directory() -> Path:
    """The directory of this checkout's servers; another checkout or user has another one."""
    digest = hashlib.sha256(str(ROOT).encode()).hexdigest()[:10]
    user = f"-{os.geteuid()}" if os.geteuid() else ""
    return Path(f"{_DIRECTORIES}{digest}{user}")


def memory() -> Path | None:
    """Where files cost no flush and half the processor; None where there is little room, as in most containers."""
    try:
        here = os.statvfs(_MEMORY)
    except OSError:
        return None
    roomy = here.f_bavail * here.f_frsize >= _MEMORY_BYTES
    # tests install programs into their directories
    runs = not here.f_flag & os.ST_NOEXEC
    return _MEMORY if roomy and runs and os.access(_MEMORY, os.W_OK | os.X_OK) else None


def throwaway_name(kind: str, number: int) -> str:
    """The name of a server that belongs to this process, and goes with it."""
    return f"throwaway-{kind}-{os.getpid()}-{number}"


def abandoned(directory: Path) -> bool:
    """True for the directory of a throw-away server whose process has ended."""
    owner = _OWNER.fullmatch(directory.name)
    return owner is not None and not alive(int(owner[1]))


def free_port(preferred: int, span: int = 1) -> int:
    """`preferred`, or the next one in steps of ten, that begins `span` ports nobody uses."""
    claimed = _claimed_ports()
    for port in range(preferred, min(preferred + 400, LENT_PORTS - span + 1), 10):
        wanted = range(port, port + span)
        if claimed.isdisjoint(wanted) and all(is_free(number) for number in wanted):
            return port
    raise ServerError(f"no free port near {preferred} on 127.0.0.1; stop what listens there")


def _claimed_ports() -> set[int]:
    """Ports of every checkout's servers, those too that are stopped or do not listen yet."""
    ports: set[int] = set()
    for claim in _DIRECTORIES.parent.glob(f"{_DIRECTORIES.name}*/*/port"):
        if abandoned(claim.parent):
            continue
        try:
            first = int(claim.read_text())
        except (OSError, ValueError):  # its server is being removed, or is another user's
            continue
        ports.update(range(first, first + MAX_PORTS))
    return ports


def is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


@contextmanager
def file_lock(path: Path) -> Iterator[None]:
    """Holds an exclusive lock on `path`, waiting for whoever has it."""
    path.parent.mkdir(mode=0o755, exist_ok=True)
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def alive(pid: int) -> bool:
    """True until the process has ended, reaped or not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"  # whoever is process 1 in a container may never reap it


def _children(pid: int) -> list[int]:
    found: list[int] = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == pid:
            found.append(int(stat.parent.name))
    return found


def kill(pid: int, number: signal.Signals) -> None:
    """Send a signal, unless the process is gone already."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def _kill_group(leader: int) -> None:
    """A server that ended may leave a child behind; it began as the leader of its own group."""
    try:
        os.killpg(leader, signal.SIGKILL)
    except ProcessLookupError:
        return


def _unmount_below(directory: Path) -> None:
    """A chaos run gives servers small file systems of their own, and may be killed."""
    mounted = (line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines())
    for point in mounted:
        if Path(point).is_relative_to(directory):
            subprocess.run(["umount", "--lazy", point], check=False, capture_output=True)


class ServerDirectory:
    """Where a server of this checkout lives; whatever kind it is, it can be stopped and removed."""

    stop_signal: ClassVar[signal.Signals] = signal.SIGTERM

    def __init__(self, name: str) -> None:
        if not Path("/proc/self/stat").exists():
            raise UnavailableError(
                f"servers from packages need Linux; start Docker, or set the URL of {name}"
            )
        self.name = name
        self.directory = base_directory() / name
        self._child: subprocess.Popen[bytes] | None = None

    @property
    def port(self) -> int:
        return int((self.directory / "port").read_text())

    @property
    def log(self) -> Path:
        return self.directory / "log"

    def running(self) -> bool:
        pid = self._pid()
        return pid is not None and alive(pid)

    def stop(self, *, immediate: bool = False) -> None:
        """Stop it, keeping its data; `immediate` is SIGKILL for it and all its children."""
        pid = self._pid()
        if pid is None:
            return
        ending = [pid]
        if immediate:
            # Stopped first, so that it starts no child between the listing and the kill.
            kill(pid, signal.SIGSTOP)
            ending = [*_children(pid), pid]
            for victim in ending:
                kill(victim, signal.SIGKILL)
        else:
            kill(pid, self.stop_signal)
        if self._child is not None:
            self._child.wait(DEADLINE_S)
            self._child = None
        deadline = time.monotonic() + DEADLINE_S
        # its children too: what is left of one holds the shared memory, and the next server refuses to start
        while left := [each for each in ending if alive(each)]:
            if time.monotonic() > deadline:
                raise ServerError(f"{self.name} (process {left[0]}) does not stop; kill it by hand")
            time.sleep(0.02)
        _kill_group(pid)
        (self.directory / "pid").unlink(missing_ok=True)

    @contextmanager
    def hung(self) -> Iterator[None]:
        """Meanwhile its processes stand still: they accept connections, and say nothing."""
        leader = self._pid()
        assert leader is not None, f"{self.name} does not run"
        os.killpg(leader, signal.SIGSTOP)
        # on a busy machine its threads answer for a moment more
        threads = Path(f"/proc/{leader}/task")
        eventually(
            lambda: all(
                stat.read_text().rpartition(")")[2].split()[0] == "T"
                for stat in threads.glob("*/stat")
            ),
            "every thread stopped",
        )
        try:
            yield
        finally:
            os.killpg(leader, signal.SIGCONT)

    def remove(self) -> None:
        """Kill it and delete everything it wrote."""
        if self.directory.exists():
            self.stop(immediate=True)
        self._delete()

    def _delete(self) -> None:
        _unmount_below(self.directory.resolve())
        if self.directory.is_symlink():
            # in memory; after a start of the machine it is gone, and the link is not
            shutil.rmtree(self.directory.readlink(), ignore_errors=True)
            self.directory.unlink()
        elif self.directory.exists():
            shutil.rmtree(self.directory)

    def _pid(self) -> int | None:
        if self._child is not None:
            return self._child.pid if self._child.poll() is None else None
        try:
            pid = int((self.directory / "pid").read_text())
            cmdline = Path(f"/proc/{pid}/cmdline").read_bytes()
        except (OSError, ValueError):
            return None
        # The number may belong to somebody else by now.
        return pid if str(self.directory).encode() in cmdline else None


class ServerProcess(ServerDirectory, ABC):
    """One server in `directory`; another process may have started it (its pid file tells).

    Args:
        name: unique among this checkout's servers; names the directory.
        durable: the server's own durability defaults, for benchmarks; otherwise as fast as
            surviving a killed process (not a power cut) allows.
        preferred_port: the port it takes when nobody else listens there.
    """

    preferred_port: ClassVar[int]
    ports: ClassVar[int] = 1  # `port` and those that follow it, at most MAX_PORTS
    accounts: ClassVar[tuple[str, ...]]
    in_memory: ClassVar[bool] = False  # where there is room, unless it is durable
    not_ready: ClassVar[tuple[type[Exception], ...]]  # what `ping` raises until it answers

    def __init__(
        self, name: str, *, durable: bool = False, preferred_port: int | None = None
    ) -> None:
        super().__init__(name)
        self.durable = durable
        self.wanted_port = preferred_port or self.preferred_port
        self._claimed = False

    @abstractmethod
    def command(self) -> Sequence[str | Path]:
        """The command that runs the server in the foreground."""

    @abstractmethod
    def initialise(self) -> None:
        """Fill the new, empty directory."""

    @property
    def format(self) -> str:
        """What its directory was made by, where another one must make it anew."""
        return ""

    @abstractmethod
    def ping(self) -> str:
        """The server's version; raises one of `not_ready` while it does not answer."""

    @property
    @abstractmethod
    def url(self) -> str:
        """URL with the rights of a superuser."""

    def environment(self) -> Mapping[str, str]:
        """The variables that the server and its tools see."""
        # MariaDB and MySQL delete every server's temporary tables from the directory for them when they start
        return {**ENVIRONMENT, "TMPDIR": str(self.directory)}

    def start(self) -> str:
        """Start it, creating it first where needed; returns its version once it answers."""
        self.launch()
        return self.wait_ready()

    def launch(self) -> None:
        """The first half of `start`: it may not answer yet."""
        complete = self.directory / "complete"
        if not complete.exists() or (complete.read_text() != self.format and not self.running()):
            self.claim()
            self.initialise()
            complete.write_text(self.format)
        if not self.running():
            account = self._account()
            with self.log.open("ab") as log:
                self._child = subprocess.Popen(
                    [str(part) for part in self.command()],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    cwd=self.directory,
                    start_new_session=True,
                    env=dict(self.environment()),
                    user=account.pw_uid if account else None,
                    group=account.pw_gid if account else None,
                    extra_groups=[] if account else None,
                )
            (self.directory / "pid").write_text(str(self._child.pid))

    def run(self, *argv: str | Path) -> None:
        """Run one of the server's own tools under its account."""
        account = self._account()
        done = subprocess.run(
            [str(part) for part in argv],
            cwd=self.directory,
            capture_output=True,
            text=True,
            check=False,
            env=dict(self.environment()),
            user=account.pw_uid if account else None,
            group=account.pw_gid if account else None,
            extra_groups=[] if account else None,
        )
        if done.returncode:
            raise ServerError(
                f"{Path(argv[0]).name} failed for {self.name}: "
                f"{(done.stderr or done.stdout).strip()[-500:]}"
            )

    def claim(self) -> None:
        """Take a directory and ports, once; servers that name one another do so before `start`."""
        if self._claimed:
            return
        self._delete()  # an earlier start was killed half-way
        room = memory() if self.in_memory and not self.durable else None
        with file_lock(_PORTS_LOCK):
            self._make(room)
            port = free_port(self.wanted_port, self.ports)
            (self.directory / "port").write_text(str(port))
        if account := self._account():
            os.chown(self.directory, account.pw_uid, account.pw_gid)
        self._claimed = True

    def _make(self, room: Path | None) -> None:
        if room is None:
            self.directory.mkdir(mode=0o700, parents=True)
            return
        self.directory.parent.mkdir(parents=True, exist_ok=True)
        there = room / f"{self.directory.parent.name}-{self.name}"
        shutil.rmtree(there, ignore_errors=True)
        there.mkdir(mode=0o700)
        self.directory.symlink_to(there)

    def _account(self) -> pwd.struct_passwd | None:
        if os.geteuid() != 0:
            return None
        for name in self.accounts:
            try:
                return pwd.getpwnam(name)
            except KeyError:
                continue
        raise ServerError(
            f"{self.name} may not run as root and no account {' or '.join(self.accounts)} exists"
        )

    def wait_ready(self) -> str:
        """The second half of `start`: its version, once it answers."""
        deadline = time.monotonic() + _START_S
        while True:
            try:
                return self.ping()
            except self.not_ready as error:
                if not self.running():
                    raise ServerError(
                        f"{self.name} stopped while starting; the end of its log says: "
                        f"{self._log_end()}"
                    ) from error
                if time.monotonic() > deadline:
                    raise ServerError(
                        f"{self.name} did not answer within {_START_S:.0f} s; "
                        f"the end of its log says: {self._log_end()}"
                    ) from error
            time.sleep(0.05)

    def _log_end(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines()
        return " | ".join(lines[-3:]) or "(nothing)"


class Throwaway(ABC):
    """A server, or several, for the length of a block; removed however it ends, also if they did not start."""

    @abstractmethod
    def _start_all(self) -> None: ...

    @abstractmethod
    def _remove(self) -> None: ...

    def __enter__(self) -> Self:
        try:
            self._start_all()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._remove()
