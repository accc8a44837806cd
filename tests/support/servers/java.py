"""Servers that come as jars: finds Java, fetches the jars of a pom.xml with Maven, keeps their classes loaded; once."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
from abc import abstractmethod
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import ClassVar

from tests.support.servers import UnavailableError
from tests.support.servers.process import ServerProcess, file_lock

OLDEST_JAVA = 17
_COPY = "org.apache.maven.plugins:maven-dependency-plugin:3.8.1:copy-dependencies"
_FETCH_TIMEOUT_S = 900
_START_QUICKLY = ("-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-XX:-UsePerfData")


@cache
def java() -> str | None:
    """A Java that is new enough: `JAVA_HOME`'s, else the one on the PATH."""
    home = os.environ.get("JAVA_HOME")
    for found in (home and shutil.which("java", path=f"{home}/bin"), shutil.which("java")):
        if not found:
            continue
        version = re.search(r'version "(\d+)', _version(found))
        if version and int(version[1]) >= OLDEST_JAVA:
            return found
    return None


@cache
def _version(program: str) -> str:
    said = subprocess.run([program, "-version"], capture_output=True, text=True, check=False)
    return said.stderr


def ready(pom: Path) -> bool:
    """True when the jars can be run: Java is here, and they are, or Maven to fetch them."""
    return java() is not None and (_complete(_directory(pom)) or shutil.which("mvn") is not None)


def jars(pom: Path) -> Path:
    """The directory with the jars that this file names; fetches them where they are missing."""
    fetch(pom)
    return _directory(pom)


def fetch(pom: Path) -> bool:
    """Fetch the jars that this file names, unless they are here; True when it fetched them."""
    directory = _directory(pom)
    if _complete(directory):
        return False
    mvn = shutil.which("mvn")
    if mvn is None:
        raise UnavailableError(
            f"Maven is missing; install it to fetch the jars of {pom.parent.name}"
        )
    with file_lock(directory.with_suffix(".lock")):
        if _complete(directory):  # another process was here first
            return False
        _run_maven(mvn, pom, directory)
    return True


def command(pom: Path, *arguments: str | Path, heap: str) -> Sequence[str | Path]:
    """The command line of a class among these jars, with this much memory (`256m`)."""
    program = java()
    if program is None:
        raise UnavailableError(f"Java {OLDEST_JAVA} or newer is missing; install a JRE")
    classes = _classes(pom)
    shared = [f"-XX:SharedArchiveFile={classes}"] if classes.exists() else []
    return [program, f"-Xmx{heap}", *_START_QUICKLY, *shared, "-cp", f"{jars(pom)}/*", *arguments]


class JavaServer(ServerProcess):
    """A server of a pom.xml's jars."""

    pom: ClassVar[Path]
    heap: ClassVar[str]
    accounts = ("nobody",)
    leaves_classes = False

    @abstractmethod
    def arguments(self) -> Sequence[str | Path]:
        """Options of Java, its class, and the arguments of that."""

    def command(self) -> Sequence[str | Path]:
        leave = [f"-XX:ArchiveClassesAtExit={self.directory / 'classes'}"]
        options = leave if self.leaves_classes else []
        return command(self.pom, *options, *self.arguments(), heap=self.heap)


def share_classes(server: JavaServer) -> bool:
    """Start a server once, for its classes: with them every later start costs half. True when it was done now."""
    classes = _classes(server.pom)
    if classes.exists():
        return False
    with file_lock(classes.with_suffix(".lock")):
        if classes.exists():  # another process was here first
            return False
        server.leaves_classes = True
        try:
            server.start()
            server.stop()
            part = shutil.copyfile(server.directory / "classes", classes.with_suffix(".part"))
            part.rename(classes)
        finally:
            server.remove()
    return True


def _classes(pom: Path) -> Path:
    # Java takes no classes that another release of it has left
    release = hashlib.sha256(_version(java() or "").encode()).hexdigest()[:10]
    return _directory(pom).with_suffix(f".{release}.jsa")


def _directory(pom: Path) -> Path:
    # Outside every checkout and home: the server's own account reads it, all checkouts share it.
    digest = hashlib.sha256(pom.read_bytes()).hexdigest()[:10]
    return Path("/var/tmp") / f"txbox-jars-{os.geteuid()}" / f"{pom.parent.name}-{digest}"


def _complete(directory: Path) -> bool:
    # Anybody may create names in /var/tmp: jars of another owner are not run.
    return directory.is_dir() and directory.parent.stat().st_uid == os.geteuid()


def _run_maven(mvn: str, pom: Path, directory: Path) -> None:
    fetched = directory.with_suffix(".part")
    shutil.rmtree(fetched, ignore_errors=True)
    done = subprocess.run(
        [
            mvn, "--batch-mode", "--quiet", f"--file={pom}", _COPY,
            "-DincludeScope=runtime", f"-DoutputDirectory={fetched}",
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=_FETCH_TIMEOUT_S,
    )  # fmt: skip
    if done.returncode:
        reason = next((line for line in done.stdout.splitlines() if "ERROR" in line), "no reason")
        raise UnavailableError(f"Maven could not fetch the jars of {pom.parent.name}: {reason}")
    check_sums(fetched, pom.with_name("SHA256SUMS"))
    fetched.rename(directory)


def check_sums(directory: Path, sums: Path) -> None:
    """Refuse jars that are not the ones we know: Maven trusts whatever its repository says.

    `sha256sum *.jar > SHA256SUMS` in the directory of new jars, once their origin has been looked at.
    """
    known = {name: digest for digest, name in map(str.split, sums.read_text().splitlines())}
    found = {
        jar.name: hashlib.sha256(jar.read_bytes()).hexdigest() for jar in directory.glob("*.jar")
    }
    if found != known:
        strange = sorted(set(found.items()) ^ set(known.items()))[0][0]
        raise UnavailableError(f"{strange} is not the jar that {sums.parent.name}/SHA256SUMS knows")
