"""Debian's packages unpacked beside the system: of releases this machine does not run, by any user.

With their own loader and libraries around them these programs need nothing of the system they run on.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from tests.support.servers import UnavailableError, UnofferedError
from tests.support.servers.process import file_lock

_KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"
_FETCH_TIMEOUT_S = 600
_REAL = ".real"
_ELF = b"\x7fELF"


class Unpacked:
    """Packages of a suite and all they need, in one directory that every checkout shares.

    Args:
        name: of the directory.
        suite: of Debian: `trixie`, `sid`.
        packages: to unpack with what they depend on; `libpq5/experimental` is of another suite.
        wrapped: globs below the directory: a script that names loader and libraries takes the place of each
            such program, so that whoever starts it needs to know of neither.
        otherwise: what the reader can do where they cannot be had.
    """

    def __init__(
        self,
        name: str,
        suite: str,
        packages: Sequence[str],
        *,
        wrapped: Sequence[str] = (),
        otherwise: str,
    ) -> None:
        self.suite = suite
        self.packages = packages
        self.wrapped = wrapped
        self.otherwise = otherwise
        # Outside every checkout and home: the server's account reads it, all checkouts share it.
        self.root = Path("/var/tmp") / f"txbox-packages-{os.geteuid()}" / name

    def here(self) -> bool:
        """True when they have been fetched."""
        # Anybody may create names in /var/tmp: programs of another owner are not run.
        return self.root.is_dir() and self.root.parent.stat().st_uid == os.geteuid()

    def fetch(self) -> bool:
        """Fetch them, unless they are here; True when they were fetched.

        Raises:
            UnofferedError: this machine's packages do not have them.
            UnavailableError: they should have them, and they could not be fetched.
        """
        if self.here():
            return False
        mirror = self._mirror()
        with file_lock(self.root.with_suffix(".lock")):
            if self.here():  # another process was here first
                return False
            self._unpack(mirror)
        return True

    def started(self, program: str) -> Sequence[str | Path]:
        """The beginning of a command that runs a program which is not wrapped."""
        loader = next(self._libraries(self.root).glob("ld-linux*.so.*"))
        return [loader, "--library-path", self._libraries(self.root), self.root / program]

    def _libraries(self, root: Path) -> Path:
        return next(root.glob("usr/lib/*-linux-gnu"))

    def _wrap(self, root: Path) -> None:
        libraries = self._libraries(root).relative_to(root)
        loader = next((root / libraries).glob("ld-linux*.so.*")).name
        for pattern in self.wrapped:
            for program in root.glob(pattern):
                if program.is_symlink() or not program.read_bytes().startswith(_ELF):
                    continue
                real = program.rename(program.with_name(program.name + _REAL)).relative_to(root)
                within = self.root / libraries
                program.write_text(
                    f'#!/bin/sh\nexec {within / loader} --argv0 "$0" --library-path {within} {self.root / real} "$@"\n'
                )
                program.chmod(0o755)

    def _mirror(self) -> str:
        """The mirror of Debian that this machine's packages come from."""
        if shutil.which("apt-get") is None:
            raise UnofferedError(f"no package of it on a system without apt-get; {self.otherwise}")
        listed = subprocess.run(
            ["apt-get", "indextargets", "--format", "$(REPO_URI)", "Created-By: Packages"],
            capture_output=True,
            text=True,
            check=False,
        )
        for uri in listed.stdout.split():
            if re.search(r"/debian(\.list)?/?$", uri):
                return uri
        raise UnofferedError(f"apt's sources name no mirror of Debian; {self.otherwise}")

    def _unpack(self, mirror: str) -> None:
        """Fetch the package and everything it needs, as for an empty system, and unpack it."""
        work = self.root.with_suffix(".part")
        shutil.rmtree(work, ignore_errors=True)
        root = work / "root"
        for directory in (root, work / "lists/partial", work / "cache/archives/partial"):
            directory.mkdir(parents=True)
        (work / "status").touch()
        suites = {self.suite, *(each.partition("/")[2] for each in self.packages)} - {""}
        (work / "sources.list").write_text(
            "".join(f"deb [signed-by={_KEYRING}] {mirror} {suite} main\n" for suite in suites)
        )
        (work / "apt.conf").write_text(
            f'Dir::State "{work}";\n'
            f'Dir::State::status "{work}/status";\n'
            f'Dir::Cache "{work}/cache";\n'
            f'Dir::Etc::sourcelist "{work}/sources.list";\n'
            'Dir::Etc::sourceparts "/dev/null";\n'
            'APT::Sandbox::User "";\n'
            'Acquire::Languages "none";\n'
        )
        if done := _apt(work, "update"):
            raise UnofferedError(f"{mirror} has no {self.suite} ({done}); {self.otherwise}")
        if not list((work / "lists").glob("*_InRelease")):
            raise UnavailableError(f"{mirror} does not answer; {self.otherwise}")
        if done := _apt(
            work, "install", "--yes", "--no-install-recommends", "--simulate", *self.packages
        ):
            raise UnofferedError(
                f"{mirror} cannot install {' '.join(self.packages)} ({done}); {self.otherwise}"
            )
        if done := _apt(
            work, "install", "--yes", "--no-install-recommends", "--download-only", *self.packages
        ):
            raise UnavailableError(
                f"{mirror} did not give all of {' '.join(self.packages)} ({done}); {self.otherwise}"
            )
        for package in sorted((work / "cache/archives").glob("*.deb")):
            subprocess.run(
                ["dpkg-deb", "--extract", package, root], check=True, capture_output=True
            )
        self._wrap(root)
        root.rename(self.root)
        shutil.rmtree(work)


def _apt(work: Path, *arguments: str) -> str | None:
    """None, or the last line of what apt-get complains about."""
    done = subprocess.run(
        ["apt-get", *arguments],
        env={**os.environ, "APT_CONFIG": str(work / "apt.conf"), "LC_ALL": "C.UTF-8"},
        capture_output=True,
        text=True,
        check=False,
        timeout=_FETCH_TIMEOUT_S,
    )
    if done.returncode == 0:
        return None
    return " ".join((done.stderr or done.stdout).strip().splitlines()[-1:])


def python(suite: str, version: str) -> Path:
    """Debian's Python of this suite, 3.13 or 3.14 in November 2026, to make environments with."""
    package = f"python{version}"
    unpacked = Unpacked(
        f"{suite}-{package.replace('.', '-')}", suite, [package, f"{package}-venv", "libstdc++6"],
        wrapped=[f"usr/bin/{package}"], otherwise=f"Python {version} cannot be had here",
    )  # fmt: skip
    unpacked.fetch()
    return unpacked.root / "usr/bin" / package
